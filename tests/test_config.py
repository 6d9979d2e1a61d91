import itertools
from typing import Any

import pytest

from radixserve.config import EngineConfig
from radixserve.errors import ConfigError

SIZES: dict[str, Any] = {"kv_cache_memory": 2**20, "num_kv_blocks": 8, "gpu_memory_utilization": 0.5}


@pytest.mark.parametrize("pair", list(itertools.combinations(SIZES, 2)))
def test_the_cache_is_sized_by_one_setting_only(pair: tuple[str, str]) -> None:
    for name in pair:
        EngineConfig(**{name: SIZES[name]})
    with pytest.raises(ConfigError, match="set the same thing; give one of them") as caught:
        EngineConfig(**{name: SIZES[name] for name in pair})
    assert all(f"--{name.replace('_', '-')}" in str(caught.value) for name in pair)
