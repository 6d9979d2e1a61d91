"""Flags and environment variables of EngineConfig, generated from its fields."""

import argparse
import difflib
import math
import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any, Literal, NoReturn, get_args, get_origin

import msgspec

from radixserve.config import SIZES, EngineConfig, parse_size
from radixserve.errors import ConfigError

Group = Literal["model", "cache", "scheduling", "server", "events"]

# The positional MODEL is the one field that is no flag.
GROUPS: dict[Group, tuple[str, ...]] = {
    "model": ("device", "dtype", "attention_backend", "threads", "max_model_len", "chat_template", "seed"),
    "cache": (
        "kv_cache_memory",
        "num_kv_blocks",
        "gpu_memory_utilization",
        "block_size",
        "eviction_policy",
        "kv_cache_dir",
        "kv_cache_dir_size",
        "kv_cache_host_memory",
        "no_prefix_cache",
        "max_pinned_share",
        "public_prefixes",
    ),
    "scheduling": (
        "schedule_policy",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_queued_requests",
        "request_timeout",
    ),
    "server": (
        "host",
        "port",
        "served_model_name",
        "api_key",
        "cors_origin",
        "tool_call_parser",
        "enable_cache_introspection",
        "shutdown_timeout",
        "log_level",
    ),
    "events": (
        "kv_events_endpoint",
        "kv_events_replay_endpoint",
        "kv_events_topic",
        "kv_events_token_ids",
        "kv_events_buffer",
    ),
}
# Flags, and values of flags, that are announced and do not work yet; an empty tuple: the whole of it.
PLANNED: dict[str, tuple[str, ...]] = {
    "--quantization": (),
    "--tool-call-parser": ("llama3_json", "mistral", "qwen3_coder", "pythonic"),
    "--eviction-policy": ("lfu", "fifo", "slru"),
}
ENVIRONMENT_PREFIX = "RADIXSERVE_"
ENVIRONMENT_HELP = (
    "Each flag is also an environment variable: RADIXSERVE_ and its name, such as RADIXSERVE_MAX_MODEL_LEN=4096, and "
    "RADIXSERVE_MODEL for MODEL. A flag that can be repeated takes its values there with commas between them; one "
    "without a value takes 1 or 0. A flag goes before the environment, and an empty variable counts as none."
)
_METAVARS = {
    "chat_template": "FILE",
    "kv_cache_memory": "SIZE",
    "kv_cache_dir": "DIR",
    "kv_cache_dir_size": "SIZE",
    "kv_cache_host_memory": "SIZE",
    "public_prefixes": "FILE",
    "gpu_memory_utilization": "SHARE",
    "request_timeout": "SECONDS",
    "shutdown_timeout": "SECONDS",
    "host": "ADDRESS",
    "port": "PORT",
    "served_model_name": "NAME",
    "api_key": "KEY",
    "cors_origin": "ORIGIN",
    "kv_events_endpoint": "ADDRESS",
    "kv_events_replay_endpoint": "ADDRESS",
    "kv_events_topic": "TOPIC",
}
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, with flags spelled in full only and errors raised as ConfigError."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", HelpFormatter)
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse args; raise ConfigError for one that is unknown, here where the flags of the command are known."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            given = unknown[0].partition("=")[0]
            close = difflib.get_close_matches(given, self._option_string_actions, n=1)
            self.error(f"unknown argument {given}" + (f", did you mean {close[0]}?" if close else ""))
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(f"{message}; see {self.prog} --help")


class HelpFormatter(argparse.HelpFormatter):
    """argparse's formatter, at most 100 columns wide, that does not tear flags apart at their dashes."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=min(100, shutil.get_terminal_size().columns - 2))

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class _Unavailable(argparse.Action):
    """A flag of PLANNED: any use of it is an error."""

    def __call__(self, *_: Any) -> NoReturn:
        raise ConfigError(f"{self.option_strings[0]} is not available yet")


class _Field:
    """One field of EngineConfig, seen as a flag and a variable."""

    def __init__(self, field: msgspec.structs.FieldInfo) -> None:
        self.name = field.name
        self.flag = "--" + field.name.replace("_", "-")
        self.variable = ENVIRONMENT_PREFIX + field.name.upper()
        self.default = field.default
        annotated, meta = get_args(field.type)
        self.help: str = meta.description
        # None is a default, and nothing that a flag could say.
        optional = [member for member in get_args(annotated) if member is not type(None)]
        self.kind = optional[0] if isinstance(annotated, UnionType) else annotated
        self.choices: tuple[str, ...] = get_args(self.kind) if get_origin(self.kind) is Literal else ()
        self.is_repeatable = get_origin(self.kind) is tuple
        self.is_switch = self.kind is bool

    @property
    def metavar(self) -> str:
        """What stands for the value in the help."""
        return "|".join(self.choices) or _METAVARS.get(self.name, "N")

    def describe(self) -> str:
        """Return the help of the flag, with its default."""
        text = self.help.replace("%", "%%")
        if self.is_repeatable:
            return f"{text} (repeatable)"
        if self.default is None or self.is_switch:
            return text
        default = f"{self.default:g}" if isinstance(self.default, float) else self.default
        return f"{text} (default: {default})"

    def parse(self, text: str, source: str) -> Any:
        """Return the value that text writes. source: the flag or variable that an error names."""
        if text in PLANNED.get(self.flag, ()):
            raise ConfigError(f"{source} {text} is not available yet; it must be {' or '.join(self.choices)}")
        if self.choices and text not in self.choices:
            raise ConfigError(f"{source} is {text!r}; it must be {' or '.join(self.choices)}")
        if self.is_switch:
            return _parse_switch(text, source)
        if self.name in SIZES:
            return _parse_size(text, source)
        if self.kind in (int, float):
            return _parse_number(text, source, is_whole=self.kind is int)
        return text


def _parse_switch(text: str, source: str) -> bool:
    value = _BOOLEANS.get(text.lower())
    if value is None:
        raise ConfigError(f"{source} is {text!r}; it must be 1 or 0")
    return value


def _parse_size(text: str, source: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _parse_number(text: str, source: str, *, is_whole: bool) -> float:
    try:
        value = int(text) if is_whole else float(text)
    except ValueError:
        value = math.nan
    if math.isfinite(value):
        return value
    # Kubernetes sets <SERVICE>_PORT=tcp://... for every service, one named radixserve among them.
    hint = "; it looks like Kubernetes' own, set enableServiceLinks: false" if text.startswith("tcp://") else ""
    raise ConfigError(f"{source} is {text!r}; it must be a {'whole ' if is_whole else ''}number{hint}")


FIELDS = {field.name: _Field(field) for field in msgspec.structs.fields(EngineConfig)}


def add_config_arguments(parser: argparse.ArgumentParser, groups: Iterable[Group]) -> None:
    """Add MODEL and the flags of these groups. Their values stay text until engine_config reads them."""
    parser.add_argument("model_path", metavar="MODEL", nargs="?", help=FIELDS["model"].help)
    for group in groups:
        section = parser.add_argument_group(group)
        for name in GROUPS[group]:
            field = FIELDS[name]
            if field.is_switch:
                section.add_argument(field.flag, dest=name, action="store_const", const="1", help=field.describe())
            else:
                action = "append" if field.is_repeatable else "store"
                section.add_argument(field.flag, dest=name, action=action, metavar=field.metavar, help=field.describe())
    for flag, values in PLANNED.items():
        if flag.startswith("--") and not values:
            parser.add_argument(flag, action=_Unavailable, nargs="?", help=argparse.SUPPRESS)


def engine_config(
    arguments: argparse.Namespace, environment: Mapping[str, str], groups: Iterable[Group]
) -> EngineConfig:
    """Return the settings of flags and environment; a flag goes first. Only the fields of these groups are read.

    Raises ConfigError for a value that is wrong, naming the flag or the variable it came from.
    """
    for flag, values in PLANNED.items():
        variable = ENVIRONMENT_PREFIX + flag.removeprefix("--").replace("-", "_").upper()
        if flag.startswith("--") and not values and environment.get(variable):
            raise ConfigError(f"{variable} is set, and {flag} is not available yet")
    settings: dict[str, Any] = {}
    variables: dict[str, str] = {}
    for name in ("model", *(name for group in groups for name in GROUPS[group])):
        field = FIELDS[name]
        given = getattr(arguments, "model_path" if name == "model" else name)
        if given is None and environment.get(field.variable):
            text = environment[field.variable]
            given = [part.strip() for part in text.split(",")] if field.is_repeatable else text
            variables[field.flag] = field.variable
        if given is None:
            continue
        source = variables.get(field.flag, field.flag)
        settings[name] = tuple(given) if field.is_repeatable else field.parse(given, source)
    try:
        return EngineConfig(**settings)
    except ConfigError as error:
        named = [variables[flag] for flag in re.findall(r"--[a-z-]+", str(error)) if flag in variables]
        if not named:
            raise
        raise ConfigError(f"{error} (set by {' and '.join(named)})") from None
