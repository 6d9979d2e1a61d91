"""Settings are checked when they are made."""

import itertools
from typing import Any

import pytest

from radixserve.config import EngineConfig, split_api_key
from radixserve.errors import ConfigError

SIZES: dict[str, Any] = {"kv_cache_memory": 2**20, "num_kv_blocks": 8, "gpu_memory_utilization": 0.5}


@pytest.mark.parametrize("pair", list(itertools.combinations(SIZES, 2)))
def test_the_cache_is_sized_by_one_setting_only(pair: tuple[str, str]) -> None:
    for name in pair:
        EngineConfig(**{name: SIZES[name]})
    with pytest.raises(ConfigError, match="set the same thing; give one of them") as caught:
        EngineConfig(**{name: SIZES[name] for name in pair})
    assert all(f"--{name.replace('_', '-')}" in str(caught.value) for name in pair)


def test_public_prefixes_need_a_cache() -> None:
    with pytest.raises(ConfigError, match="--public-prefixes needs the cache that --no-prefix-cache turns off"):
        EngineConfig(public_prefixes="prefixes.json", no_prefix_cache=True)


@pytest.mark.parametrize("tier", [{"kv_cache_dir": "cache"}, {"kv_cache_host_memory": 2**30}])
def test_tiers_need_a_cache(tier: dict[str, Any]) -> None:
    (name,) = tier
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} needs the cache that --no-prefix-cache turns"):
        EngineConfig(**tier, no_prefix_cache=True)


def test_a_size_needs_its_directory() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dir-size is given without --kv-cache-dir"):
        EngineConfig(kv_cache_dir_size=2**30)


def test_a_tier_in_the_hosts_memory_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-host-memory needs K/V on a GPU"):
        EngineConfig(kv_cache_host_memory=2**30, device="cpu")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_events_topic": "t"}, "--kv-events-topic needs --kv-events-endpoint"),
        ({"kv_events_token_ids": True}, "--kv-events-token-ids needs --kv-events-endpoint"),
        ({"kv_events_replay_endpoint": "tcp://*:1"}, "--kv-events-replay-endpoint needs --kv-events-endpoint"),
        (
            {"kv_events_endpoint": "tcp://*:1", "kv_events_buffer": 10_000},
            "--kv-events-buffer needs --kv-events-replay",
        ),
        ({"kv_events_endpoint": "tcp://*:1", "no_prefix_cache": True}, "--no-prefix-cache"),
    ],
)
def test_settings_of_events_that_would_have_no_effect_are_errors(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_settings(settings)


@pytest.mark.parametrize(
    ("entry", "tenant", "key"),
    [("plain", None, "plain"), ("acme=first", "acme", "first"), ("acme=c2VjcmV0Cg==", "acme", "c2VjcmV0Cg==")],
)
def test_the_first_equals_sign_ends_a_tenants_name(entry: str, tenant: str | None, key: str) -> None:
    assert split_api_key(entry) == (tenant, key)


@pytest.mark.parametrize("entry", ["", "acme=", "c2VjcmV0Cg=="])
def test_an_empty_key_is_refused_without_repeating_it(entry: str) -> None:
    with pytest.raises(ConfigError, match="empty") as caught:
        EngineConfig(api_key=(entry,))
    assert "c2Vj" not in str(caught.value)


def test_an_empty_name_makes_no_key_the_operators() -> None:
    with pytest.raises(ConfigError, match="begins with '='") as caught:
        EngineConfig(api_key=("=s3cret",))
    assert "s3cret" not in str(caught.value)


def test_settings_print_without_the_keys() -> None:
    assert repr(EngineConfig(api_key=("acme=s3cret",), port=9000)) == "EngineConfig(port=9000, api_key='...')"


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_directory_is_none(name: str) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dir is empty"):
        EngineConfig(kv_cache_dir=name)
