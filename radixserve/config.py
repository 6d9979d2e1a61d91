"""Settings of the engine and the server: one frozen value, checked when it is made.

Each field is also a flag of `radixserve serve` (underscores become dashes), an environment variable
RADIXSERVE_<FIELD>, and a keyword of LLM and AsyncEngine.
"""

import re
from typing import Annotated, Any, Literal

import msgspec

from radixserve.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
AttentionBackendName = Literal["auto", "torch", "cpp", "triton"]
LogLevel = Literal["debug", "info", "warning", "error"]
SchedulePolicy = Literal["cache-aware", "fcfs", "priority"]
EvictionPolicy = Literal["learned-reuse", "lru"]

# Fields in bytes, which may be written as 2GiB.
SIZES = ("kv_cache_memory", "kv_cache_dir_size", "kv_cache_host_memory")


def _described(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings. Raises ConfigError for a value out of range or two that cannot go together.

    None means: chosen at start-up from the model and the machine, and said in the start-up table.
    """

    model: Annotated[str | None, _described("Hugging Face directory or .gguf file; left out: the demo model")] = None
    device: Annotated[Device, _described("where the model runs; auto takes a CUDA GPU if there is one")] = "auto"
    dtype: Annotated[
        Dtype, _described("weights, activations and K/V; auto on a CPU: weights and K/V float16, the rest float32")
    ] = "auto"
    attention_backend: Annotated[
        AttentionBackendName, _described("kernels of attention; auto is triton on a GPU; cpp on a CPU, else torch")
    ] = "auto"
    threads: Annotated[int | None, _described("CPU threads that compute; left out: one for each core")] = None
    max_model_len: Annotated[int | None, _described("most tokens of prompt and answer together")] = None
    block_size: Annotated[int, _described("tokens in a K/V block")] = 16
    kv_cache_memory: Annotated[int | None, _described("bytes for K/V blocks, such as 2GiB")] = None
    num_kv_blocks: Annotated[int | None, _described("number of K/V blocks, instead of --kv-cache-memory")] = None
    gpu_memory_utilization: Annotated[
        float | None, _described("share of the GPU's memory for weights and K/V, 0.9 unless given; CUDA only")
    ] = None
    max_num_seqs: Annotated[int, _described("most sequences that run at once")] = 64
    max_num_batched_tokens: Annotated[int | None, _described("most tokens that one step computes")] = None
    max_queued_requests: Annotated[int, _described("most waiting requests of a tenant before a 429")] = 1024
    schedule_policy: Annotated[SchedulePolicy, _described("order of waiting requests")] = "cache-aware"
    eviction_policy: Annotated[EvictionPolicy, _described("which cached block is given up first")] = "learned-reuse"
    kv_cache_dir: Annotated[
        str | None, _described("directory that cached blocks are kept in when the pool is full, and across restarts")
    ] = None
    kv_cache_dir_size: Annotated[int | None, _described("bytes for --kv-cache-dir, 20GiB unless given")] = None
    kv_cache_host_memory: Annotated[
        int | None, _described("bytes of the host's memory for blocks that a GPU has no room for")
    ] = None
    no_prefix_cache: Annotated[bool, _described("compute every prompt anew")] = False
    max_pinned_share: Annotated[float, _described("most of the K/V blocks that pins may keep, as a share")] = 0.25
    public_prefixes: Annotated[
        str | None, _described("JSON file of system prompts that all tenants share the K/V of")
    ] = None
    kv_events_endpoint: Annotated[
        str | None, _described("ZeroMQ address, such as tcp://*:5557, to publish there what is cached")
    ] = None
    kv_events_replay_endpoint: Annotated[
        str | None, _described("ZeroMQ address, such as tcp://*:5558, where a subscriber asks for what it missed")
    ] = None
    kv_events_topic: Annotated[str | None, _described("ZeroMQ topic of KV events; left out: an empty one")] = None
    kv_events_token_ids: Annotated[bool, _described("put the token ids of stored blocks into KV events")] = False
    kv_events_buffer: Annotated[
        int | None, _described("batches of KV events kept for a replay, 10,000 unless given")
    ] = None
    seed: Annotated[int, _described("source of the seeds of requests that bring none")] = 0
    log_level: Annotated[LogLevel, _described("least severe message that is logged")] = "info"

    # Only a server reads what follows.
    host: Annotated[str, _described("address to listen on")] = "127.0.0.1"
    port: Annotated[int, _described("port to listen on; 0 takes a free one")] = 8000
    api_key: Annotated[tuple[str, ...], _described("key that callers must send; tenant=KEY names a tenant")] = ()
    served_model_name: Annotated[str | None, _described("the model's id in the API")] = None
    chat_template: Annotated[str | None, _described("file with a Jinja chat template")] = None
    tool_call_parser: Annotated[
        Literal["auto", "hermes"], _described("how the model writes calls of tools; auto goes by its chat template")
    ] = "auto"
    enable_cache_introspection: Annotated[
        bool, _described("let callers look into their own cache: the tree, and other salts of their tenant")
    ] = False
    request_timeout: Annotated[float | None, _described("seconds after which a request is ended with 504")] = None
    shutdown_timeout: Annotated[float, _described("seconds that running requests get at shutdown")] = 30.0
    cors_origin: Annotated[tuple[str, ...], _described("web origin that may call the API, or *")] = ()

    def __post_init__(self) -> None:
        for name, low, high in (
            ("threads", 1, 1024),
            ("max_model_len", 2, None),
            ("block_size", 1, 256),
            ("kv_cache_memory", 1, None),
            ("num_kv_blocks", 1, None),
            ("kv_cache_dir_size", 1, None),
            ("kv_cache_host_memory", 1, None),
            ("gpu_memory_utilization", 0.01, 1.0),
            ("max_num_seqs", 1, 4096),
            ("max_num_batched_tokens", 1, None),
            ("max_queued_requests", 1, None),
            ("kv_events_buffer", 1, None),
            ("max_pinned_share", 0.0, 1.0),
            ("port", 0, 65535),
            ("request_timeout", 0.001, None),
            ("shutdown_timeout", 0.0, None),
        ):
            self._check_range(name, low, high)
        sizes = {
            "--kv-cache-memory": self.kv_cache_memory,
            "--num-kv-blocks": self.num_kv_blocks,
            "--gpu-memory-utilization": self.gpu_memory_utilization,
        }
        given = [flag for flag, size in sizes.items() if size is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} set the same thing; give one of them")
        if self.gpu_memory_utilization is not None and self.device == "cpu":
            raise ConfigError("--gpu-memory-utilization needs a GPU; with --device cpu give --kv-cache-memory")
        if self.public_prefixes is not None and self.no_prefix_cache:
            raise ConfigError(
                "--public-prefixes needs the cache that --no-prefix-cache turns off; leave one of them out"
            )
        self._check_tiers()
        self._check_events()
        for entry in self.api_key:
            split_api_key(entry)

    def _check_tiers(self) -> None:
        for flag, value in (
            ("--kv-cache-dir", self.kv_cache_dir),
            ("--kv-cache-host-memory", self.kv_cache_host_memory),
        ):
            if value is not None and self.no_prefix_cache:
                raise ConfigError(f"{flag} needs the cache that --no-prefix-cache turns off; leave one of them out")
        if self.kv_cache_dir is not None and not self.kv_cache_dir.strip():
            raise ConfigError("--kv-cache-dir is empty; name a directory, or leave it out")
        if self.kv_cache_dir_size is not None and self.kv_cache_dir is None:
            raise ConfigError("--kv-cache-dir-size is given without --kv-cache-dir; give the directory too")
        if self.kv_cache_host_memory is not None and self.device == "cpu":
            raise ConfigError("--kv-cache-host-memory needs K/V on a GPU; with --device cpu raise --kv-cache-memory")

    def _check_events(self) -> None:
        for flag, is_given in (
            ("--kv-events-replay-endpoint", self.kv_events_replay_endpoint is not None),
            ("--kv-events-topic", self.kv_events_topic is not None),
            ("--kv-events-token-ids", self.kv_events_token_ids),
        ):
            if is_given and self.kv_events_endpoint is None:
                raise ConfigError(f"{flag} needs --kv-events-endpoint, where the events are published")
        if self.kv_events_buffer is not None and self.kv_events_replay_endpoint is None:
            raise ConfigError("--kv-events-buffer needs --kv-events-replay-endpoint, where what it keeps is asked for")
        if self.kv_events_endpoint is not None and self.no_prefix_cache:
            raise ConfigError(
                "--kv-events-endpoint tells of the cache that --no-prefix-cache turns off; leave one of them out"
            )

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> "EngineConfig":
        """Return the configuration of these fields, checking their types too; a size may be written as 2GiB.

        Raises ConfigError that names the field.
        """
        sizes = {name: settings[name] for name in SIZES if isinstance(settings.get(name), str)}
        settings = settings | {name: parse_size(size) for name, size in sizes.items()}
        try:
            return msgspec.convert(settings, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"the settings are wrong: {error}") from None

    def __repr__(self) -> str:
        """Return the settings that are not their defaults, without the keys, which must not get into a log."""
        hidden = {"api_key": "..."} if self.api_key else {}
        given = {field: getattr(self, field) for field in self.__struct_fields__} | hidden
        defaults = dict(zip(self.__struct_fields__, self.__struct_defaults__, strict=True))
        shown = ", ".join(f"{name}={value!r}" for name, value in given.items() if value != defaults[name])
        return f"EngineConfig({shown})"

    def _check_range(self, name: str, low: float, high: float | None) -> None:
        value = getattr(self, name)
        if value is not None and (value < low or (high is not None and value > high)):
            allowed = f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be {allowed}")


def split_api_key(entry: str) -> tuple[str | None, str]:
    """Return the tenant, None for one without a name, and the key of an --api-key entry, KEY or tenant=KEY.

    The first = ends the tenant's name, so a named key may hold more of them, as base64 does at its end. Raises
    ConfigError, which does not repeat the key.
    """
    tenant, separator, named_key = entry.partition("=")
    key = named_key if separator else entry
    if not key.strip("="):
        raise ConfigError("an --api-key is empty; give KEY, or tenant=KEY if the key ends in '='")
    if not separator:
        return None, key
    if not tenant:
        # A key without a name is the operator's, which an empty variable of a script must not make of it.
        raise ConfigError("an --api-key begins with '='; give KEY without a name, or tenant=KEY")
    return tenant, key


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}


def parse_size(text: str) -> int:
    """Return the bytes in a size such as 2GiB, 500MB or 1048576. Raises ConfigError if it is none."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(|[KMG]I?)B?\s*", text.upper())
    if match is None:
        raise ConfigError(f"{text!r} is no size; write bytes, or a number with KiB, MiB or GiB, such as 2GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_seconds(text: str) -> float:
    """Return the seconds in a time such as 90, 1.5s, 5m or 24h. Raises ConfigError if it is none."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smh]?)", text)
    if match is None:
        raise ConfigError(f"{text!r:.100} is no time; write seconds, or a number with s, m or h, such as 5m")
    return float(match[1]) * _SECONDS[match[2]]
