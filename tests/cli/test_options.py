import argparse
from collections.abc import Mapping
from typing import get_args

import pytest

from radixserve.cli.options import FIELDS, GROUPS, PLANNED, ArgumentParser, Group, add_config_arguments, engine_config
from radixserve.config import EngineConfig
from radixserve.errors import ConfigError

ALL_GROUPS: tuple[Group, ...] = get_args(Group)


def parse(*argv: str, environment: Mapping[str, str] | None = None) -> EngineConfig:
    parser = ArgumentParser(prog="radixserve serve")
    add_config_arguments(parser, ALL_GROUPS)
    return engine_config(parser.parse_args(argv), environment or {}, ALL_GROUPS)


# A value other than the default for each field, as text and as itself.
EXAMPLES: dict[str, tuple[str, object]] = {
    "model": ("m.gguf", "m.gguf"),
    "device": ("cuda", "cuda"),
    "dtype": ("float32", "float32"),
    "attention_backend": ("torch", "torch"),
    "threads": ("3", 3),
    "max_model_len": ("512", 512),
    "block_size": ("32", 32),
    "kv_cache_memory": ("2GiB", 2 * 2**30),
    "num_kv_blocks": ("77", 77),
    "kv_cache_dir": ("cache", "cache"),
    "kv_cache_dir_size": ("1GiB", 2**30),
    "kv_cache_host_memory": ("2GiB", 2 * 2**30),
    "gpu_memory_utilization": ("0.5", 0.5),
    "max_num_seqs": ("3", 3),
    "max_num_batched_tokens": ("256", 256),
    "max_queued_requests": ("9", 9),
    "schedule_policy": ("fcfs", "fcfs"),
    "eviction_policy": ("lru", "lru"),
    "no_prefix_cache": ("1", True),
    "max_pinned_share": ("0.5", 0.5),
    "public_prefixes": ("prefixes.json", "prefixes.json"),
    "kv_events_endpoint": ("tcp://*:5557", "tcp://*:5557"),
    "kv_events_replay_endpoint": ("tcp://*:5558", "tcp://*:5558"),
    "kv_events_topic": ("kv", "kv"),
    "kv_events_token_ids": ("1", True),
    "kv_events_buffer": ("5", 5),
    "seed": ("42", 42),
    "log_level": ("debug", "debug"),
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("9000", 9000),
    "api_key": ("t=k", ("t=k",)),
    "served_model_name": ("name", "name"),
    "chat_template": ("t.jinja", "t.jinja"),
    "tool_call_parser": ("hermes", "hermes"),
    "enable_cache_introspection": ("1", True),
    "request_timeout": ("1.5", 1.5),
    "shutdown_timeout": ("4", 4.0),
    "cors_origin": ("*", ("*",)),
}
# Settings that mean nothing without others.
NEEDS = {
    "kv_cache_dir_size": ("kv_cache_dir",),
    "kv_events_replay_endpoint": ("kv_events_endpoint",),
    "kv_events_topic": ("kv_events_endpoint",),
    "kv_events_token_ids": ("kv_events_endpoint",),
    "kv_events_buffer": ("kv_events_endpoint", "kv_events_replay_endpoint"),
}


def test_every_setting_but_the_model_is_in_one_group_of_the_help() -> None:
    grouped = sorted(name for names in GROUPS.values() for name in names)
    assert grouped == sorted(set(EngineConfig.__struct_fields__) - {"model"})


def test_the_examples_here_cover_every_setting() -> None:
    assert set(EXAMPLES) == set(EngineConfig.__struct_fields__)


def test_nothing_given_is_the_default_config() -> None:
    assert parse() == EngineConfig()


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_setting_is_the_same_by_flag_by_variable_and_by_keyword(name: str) -> None:
    text, value = EXAMPLES[name]
    flag = ["--" + name.replace("_", "-"), text]
    argv = [text] if name == "model" else flag[:1] if value is True else flag
    needed = [part for other in NEEDS.get(name, ()) for part in ("--" + other.replace("_", "-"), EXAMPLES[other][0])]
    expected = EngineConfig(**{other: EXAMPLES[other][1] for other in NEEDS.get(name, ())} | {name: value})
    assert parse(*argv, *needed) == expected
    assert parse(*needed, environment={f"RADIXSERVE_{name.upper()}": text}) == expected


def test_a_flag_goes_before_its_variable() -> None:
    environment = {"RADIXSERVE_PORT": "1", "RADIXSERVE_API_KEY": "a", "RADIXSERVE_MODEL": "m"}
    assert parse("n", "--port", "2", "--api-key", "b", environment=environment) == EngineConfig(
        model="n", port=2, api_key=("b",)
    )


def test_a_flag_hides_even_a_wrong_variable() -> None:
    assert parse("--port", "2", environment={"RADIXSERVE_PORT": "tcp://10.0.0.1:80"}).port == 2


def test_repeated_flags_and_commas_in_a_variable_add_up() -> None:
    expected = EngineConfig(api_key=("a", "t=b"), cors_origin=("http://x", "http://y"))
    argv = ["--api-key", "a", "--cors-origin", "http://x", "--api-key", "t=b", "--cors-origin", "http://y"]
    assert parse(*argv) == expected
    variables = {"RADIXSERVE_API_KEY": "a, t=b", "RADIXSERVE_CORS_ORIGIN": "http://x,http://y"}
    assert parse(environment=variables) == expected


def test_an_empty_variable_counts_as_none_and_a_zero_as_no() -> None:
    assert parse(environment={"RADIXSERVE_PORT": "", "RADIXSERVE_NO_PREFIX_CACHE": "0"}) == EngineConfig()


def test_the_model_may_stand_before_between_and_behind_flags() -> None:
    for argv in (["m", "--port", "2", "--seed", "3"], ["--port", "2", "m", "--seed", "3"]):
        assert parse(*argv) == EngineConfig(model="m", port=2, seed=3)
    assert parse("--no-prefix-cache", "m") == EngineConfig(model="m", no_prefix_cache=True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("port", "x"),
        ("port", "1.5"),
        ("port", "70000"),
        ("device", "tpu"),
        ("kv_cache_memory", "lots"),
        ("kv_cache_memory", "0"),
        ("request_timeout", "nan"),
        ("request_timeout", "-1"),
        ("gpu_memory_utilization", "inf"),
        ("schedule_policy", "shortest-first"),
        ("eviction_policy", "random"),
    ],
)
def test_a_wrong_value_names_where_it_came_from(name: str, text: str) -> None:
    flag, variable = "--" + name.replace("_", "-"), f"RADIXSERVE_{name.upper()}"
    with pytest.raises(ConfigError, match=flag):
        parse(flag + "=" + text)
    with pytest.raises(ConfigError, match=variable):
        parse(environment={variable: text})


def test_a_conflict_between_flag_and_variable_names_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"give one of them \(set by RADIXSERVE_NUM_KV_BLOCKS\)"):
        parse("--kv-cache-memory", "1GiB", environment={"RADIXSERVE_NUM_KV_BLOCKS": "4"})


def test_a_switch_in_the_environment_takes_yes_or_no_only() -> None:
    with pytest.raises(ConfigError, match="RADIXSERVE_NO_PREFIX_CACHE is 'maybe'"):
        parse(environment={"RADIXSERVE_NO_PREFIX_CACHE": "maybe"})


@pytest.mark.parametrize("flag", [name for name, values in PLANNED.items() if name.startswith("--") and not values])
def test_a_planned_flag_says_that_it_is_not_available(flag: str) -> None:
    for argv in ([flag], [flag, "x"], [f"{flag}=x"]):
        with pytest.raises(ConfigError, match=f"{flag} is not available yet"):
            parse(*argv)
    variable = "RADIXSERVE_" + flag[2:].replace("-", "_").upper()
    with pytest.raises(ConfigError, match=f"{variable}.*not available yet"):
        parse(environment={variable: "x"})


@pytest.mark.parametrize(("flag", "value"), [(flag, value) for flag, values in PLANNED.items() for value in values])
def test_a_planned_value_says_that_it_is_not_available(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} {value} is not available yet"):
        parse(flag, value)


def test_what_is_planned_does_not_work_yet() -> None:
    """Fails when a setting arrives, so that its announcement goes."""
    for flag, values in PLANNED.items():
        field = FIELDS.get(flag.removeprefix("--").replace("-", "_"))
        assert (field is None) if not values else field is not None and not set(values) & set(field.choices)


def test_flags_are_not_abbreviated_and_a_near_miss_is_pointed_out() -> None:
    with pytest.raises(ConfigError, match=r"unknown argument --max-model, did you mean --max-model-len\?"):
        parse("--max-model", "5")


def test_the_help_names_every_flag_and_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    parser = ArgumentParser(prog="radixserve serve")
    add_config_arguments(parser, ALL_GROUPS)
    text = parser.format_help()
    for name, field in FIELDS.items():
        assert name == "model" or field.flag in text
        assert field.help in " ".join(text.split())
        if isinstance(field.default, int) and not isinstance(field.default, bool):
            assert f"(default: {field.default})" in text
    for group in GROUPS:
        assert f"\n{group}:\n" in text
    assert not any(flag in text for flag, values in PLANNED.items() if flag.startswith("--") and not values)


def test_only_the_asked_groups_are_flags() -> None:
    parser = ArgumentParser(prog="radixserve chat")
    add_config_arguments(parser, ["model"])
    assert engine_config(parser.parse_args(["--seed", "1"]), {"RADIXSERVE_PORT": "x"}, ["model"]).seed == 1
    assert isinstance(parser, argparse.ArgumentParser)
    with pytest.raises(ConfigError, match="--port"):
        parser.parse_args(["--port", "1"])
