"""Chat templates: Jinja in a sandbox, with what templates written for transformers expect to find."""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from radixserve.errors import ConfigError, InvalidRequest


class ChatTemplate:
    """One compiled template. Raises ConfigError, naming where it came from, if it is not valid Jinja.

    reads_tools, reads_tool_calls: whether it writes the request's tools, and the calls of earlier answers.
    """

    def __init__(self, source: str, *, origin: str) -> None:
        self.source = source
        try:
            tree = _ENVIRONMENT.parse(source)
            self._template = _ENVIRONMENT.from_string(tree)
        except jinja2.TemplateError as error:
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ConfigError(
                f"the chat template of {origin} is not valid Jinja{line}: {error}; give another with --chat-template"
            ) from error
        self.reads_tools = any(name.name == "tools" for name in tree.find_all(nodes.Name))
        # message.tool_calls, message["tool_calls"], or "tool_calls" in message.
        self.reads_tool_calls = any(
            "tool_calls" in (getattr(node, "attr", None), getattr(node, "value", None))
            for node in tree.find_all((nodes.Getattr, nodes.Const))
        )

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the text of a conversation. Raises InvalidRequest if the template refuses or cannot handle it."""
        try:
            return self._template.render(variables)
        # A template is a program: whatever it trips over in these messages is the request's failure, not the server's.
        except Exception as error:
            raise InvalidRequest(
                f"the chat template cannot render these messages: {error}", param="messages"
            ) from error


def read_template(file: Path) -> str:
    """Return the text of a template file. Raises ConfigError if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {file} cannot be read: {error}") from error


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %}, which marks the model's own text for training: only its body counts."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it stands in prompts; Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


_ENVIRONMENT = _environment()
