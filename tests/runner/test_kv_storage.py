import dataclasses
from pathlib import Path

import pytest
import torch

from radixserve.config import EngineConfig
from radixserve.errors import ConfigError
from radixserve.model.loader import read_model_config
from radixserve.runner.kv_storage import (
    allocate_kv_layers,
    asked_num_blocks,
    bytes_per_block,
    check_blocks_fit,
    default_num_blocks,
    format_bytes,
)
from radixserve.runner.memory import DeviceMemory, cgroup_available, device_memory

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 2**30


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_blocks_are_zeroed_and_take_the_bytes_that_were_counted(tiny_model: Path, dtype: torch.dtype) -> None:
    model = dataclasses.replace(read_model_config(tiny_model), num_layers=5)
    layers = allocate_kv_layers(model, num_blocks=7, block_size=8, dtype=dtype, device=CPU)
    caches = [cache for layer in layers for cache in (layer.key, layer.value)]
    assert len(layers) == 5
    assert {tuple(cache.shape) for cache in caches} == {(7, model.num_kv_heads, 8, model.head_dim)}
    assert sum(cache.nbytes for cache in caches) == 7 * bytes_per_block(model, 8, dtype)
    assert not any(bool(cache.any()) for cache in caches)


def test_asked_blocks_come_from_either_setting() -> None:
    assert asked_num_blocks(EngineConfig(num_kv_blocks=12), 1000) == 12
    assert asked_num_blocks(EngineConfig(kv_cache_memory=12_999), 1000) == 12
    assert asked_num_blocks(EngineConfig(), 1000) is None


def test_memory_for_less_than_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-memory is 999 bytes, but one K/V block takes 1000 bytes"):
        asked_num_blocks(EngineConfig(kv_cache_memory=999), 1000)


def test_a_cpu_gets_two_gib_or_half_of_what_is_left() -> None:
    roomy, tight = DeviceMemory(64 * GIB, 60 * GIB), DeviceMemory(64 * GIB, GIB)
    assert default_num_blocks(EngineConfig(), 2**20, roomy, CPU) == 2048
    assert default_num_blocks(EngineConfig(), 2**20, tight, CPU) == 512


def test_a_gpu_gets_its_share_of_the_total_less_what_is_used() -> None:
    memory = DeviceMemory(total=100 * GIB, available=70 * GIB)
    assert default_num_blocks(EngineConfig(), GIB, memory, CUDA) == 60
    assert default_num_blocks(EngineConfig(gpu_memory_utilization=0.5), GIB, memory, CUDA) == 20


def test_no_room_for_a_block_is_refused_with_the_setting_to_change() -> None:
    with pytest.raises(ConfigError, match=r"0 bytes of cuda memory.* raise --gpu-memory-utilization, now 0.2"):
        default_num_blocks(EngineConfig(gpu_memory_utilization=0.2), GIB, DeviceMemory(10 * GIB, 2 * GIB), CUDA)
    with pytest.raises(ConfigError, match=r"512.0 MiB of cpu memory.* one block takes 1.0 GiB; free memory"):
        default_num_blocks(EngineConfig(), GIB, DeviceMemory(10 * GIB, GIB), CPU)


def test_more_blocks_than_fit_are_refused_with_the_number_that_does() -> None:
    memory = DeviceMemory(total=10_000, available=5_999)
    check_blocks_fit(5, 1000, memory, CPU)
    with pytest.raises(ConfigError, match=r"6 K/V blocks take .* at most 5 blocks fit; lower --num-kv-blocks"):
        check_blocks_fit(6, 1000, memory, CPU)


def test_sizes_are_written_in_the_unit_that_reads_best() -> None:
    assert [format_bytes(size) for size in (0, 1023, 1024, 3 * 2**19, GIB, 3000 * GIB)] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "1.5 MiB",
        "1.0 GiB",
        "2.9 TiB",
    ]


def test_the_machine_has_memory() -> None:
    memory = device_memory(CPU)
    assert 0 < memory.available <= memory.total


def write(folder: Path, **files: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_a_containers_limit_counts_less_what_it_uses_for_good(tmp_path: Path) -> None:
    assert cgroup_available(tmp_path) is None
    statistics = "anon 300\ninactive_file 200"
    write(tmp_path, memory__max="1000", memory__current="600", memory__stat=statistics)
    assert cgroup_available(tmp_path) == 600
    write(tmp_path, memory__max="300")
    assert cgroup_available(tmp_path) == 0
    write(tmp_path, memory__max="max")
    assert cgroup_available(tmp_path) is None


def test_a_containers_limit_is_read_from_version_1_too(tmp_path: Path) -> None:
    files = {"memory__limit_in_bytes": "1000", "memory__usage_in_bytes": "600"}
    write(tmp_path / "memory", **files, memory__stat="inactive_file 1\ntotal_inactive_file 200")
    assert cgroup_available(tmp_path) == 600
