import dataclasses
import re
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixserve.config import EngineConfig
from radixserve.core.batch import ScheduledBatch
from radixserve.errors import ConfigError, ModelLoadError
from radixserve.model.config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling
from radixserve.model.linear import has_float16_linear
from radixserve.model.loader import read_model_config
from radixserve.runner.context_length import choose_max_model_len, trained_length
from radixserve.runner.startup import StartedExecutor, start_executor
from tests.runner.tiny_executor import sampled_row
from tests.tiny_models import save_tiny_model

WINDOW = 40
NEEDS_FBGEMM = pytest.mark.skipif(not has_float16_linear(), reason="torch has no float16 projections on this CPU")


@pytest.fixture(scope="module")
def windowed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("windowed"), "mistral", sliding_window=WINDOW)


@pytest.fixture
def without_weights(tiny_model: Path, tmp_path: Path) -> Path:
    """A model of which only the config is there: whatever is refused of it was refused before loading."""
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    return tmp_path


def dtypes(started: StartedExecutor) -> tuple[str, str, str]:
    return started.weights_dtype, started.dtype, started.kv_cache_dtype


def start(path: Path, **settings: Any) -> StartedExecutor:
    # torch and float32 are everywhere, so that no notice depends on what the machine has.
    defaults: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 64, "attention_backend": "torch"}
    return start_executor(EngineConfig(model=str(path), **defaults | settings), show_progress=False)


def test_a_started_executor_runs_and_says_what_was_chosen(tiny_model: Path) -> None:
    started = start(tiny_model)
    assert started.architecture == "LlamaForCausalLM"
    assert dtypes(started) == ("float32", "float32", "float32")
    assert started.device == "cpu"
    assert (started.max_model_len, started.max_num_batched_tokens) == (512, 512)
    assert (started.vocab_size, started.eos_token_ids) == (160, (2,))
    assert (started.num_blocks, started.bytes_per_block) == (64, 2 * 3 * 2 * 16 * 16 * 4)
    assert started.notices == ()
    answer = started.executor.execute(ScheduledBatch(rows=[sampled_row([1, 5, 9], array("i", [3]))]))
    assert answer.is_finite == [True]


def test_settings_are_kept_where_they_are_given(tiny_model: Path) -> None:
    started = start(tiny_model, dtype="bfloat16", max_model_len=100, max_num_batched_tokens=33, block_size=8)
    assert dtypes(started) == ("bfloat16", "bfloat16", "bfloat16")
    assert (started.max_model_len, started.max_num_batched_tokens) == (100, 33)
    assert started.bytes_per_block == 2 * 3 * 2 * 8 * 16 * 2
    assert started.notices == ()


def test_a_number_of_threads_holds_in_whichever_thread_steps(tiny_model: Path) -> None:
    seen = []

    def step(started: StartedExecutor) -> None:
        torch.set_num_threads(1)
        started.executor.execute(ScheduledBatch(rows=[sampled_row([1, 5, 9], array("i", [3]))]))
        seen.append(torch.get_num_threads())

    with ThreadPoolExecutor(1) as pool:  # whose thread keeps to itself what it sets
        started = pool.submit(start, tiny_model, threads=3).result()
        assert started.num_threads == 3
        pool.submit(step, started).result()
        pool.submit(step, pool.submit(start, tiny_model).result()).result()
    assert seen == [3, 1]


def test_memory_is_turned_into_blocks(tiny_model: Path) -> None:
    started = start(tiny_model, num_kv_blocks=None, kv_cache_memory=2**20)
    assert started.num_blocks == 2**20 // started.bytes_per_block


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_gpu_that_is_not_there_is_refused(without_weights: Path) -> None:
    with pytest.raises(ConfigError, match="--device is cuda, but torch finds no CUDA device"):
        start(without_weights, device="cuda")
    with pytest.raises(ConfigError, match="--gpu-memory-utilization needs a GPU"):
        start(without_weights, device="auto", num_kv_blocks=None, gpu_memory_utilization=0.5)
    with pytest.raises(ConfigError, match="--kv-cache-host-memory needs K/V on a GPU"):
        start(without_weights, device="auto", kv_cache_host_memory=2**20)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_auto_takes_the_cpu_where_there_is_no_gpu(tiny_model: Path) -> None:
    assert start(tiny_model, device="auto").device == "cpu"


@NEEDS_FBGEMM
def test_auto_on_a_cpu_stores_float16_and_computes_in_float32(tiny_model: Path) -> None:
    started = start(tiny_model, dtype="auto")
    assert dtypes(started) == ("float16", "float32", "float16")
    assert started.bytes_per_block == 2 * 3 * 2 * 16 * 16 * 2
    assert started.notices == ()
    rows = [sampled_row([1, 5, 9], array("i", [3]))]
    exact = start(tiny_model).executor.execute(ScheduledBatch(rows=rows))
    answer = started.executor.execute(ScheduledBatch(rows=rows))
    assert answer.token_ids == exact.token_ids
    assert answer.logprobs != exact.logprobs  # what would be equal was computed in float32 alone


@NEEDS_FBGEMM
@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        (1e7, r"holds -?\d\S*, and float16 ends at 65504"),
        (1e-7, "has elements of around 1e-08, and float16 is coarse below 6e-05"),
    ],
)
def test_weights_that_float16_would_ruin_are_float32_under_auto_and_the_start_says_so(
    tiny_model: Path, tmp_path: Path, scale: float, reason: str
) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(tiny_model / "model.safetensors")
    tensors[name] *= scale
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())

    started = start(tmp_path, dtype="auto")
    assert dtypes(started) == ("float32", "float32", "float32")
    assert started.bytes_per_block == 2 * 3 * 2 * 16 * 16 * 4
    assert len(started.notices) == 1
    assert re.match(f"weights and K/V are float32: .*model.safetensors: the tensor {name} {reason}", started.notices[0])
    with pytest.raises(ModelLoadError, match=f"the tensor {name} {reason}; give --dtype float32"):
        start(tmp_path, dtype="float16")


def test_a_length_above_the_models_is_refused_with_the_reason(without_weights: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len is 513, but LlamaForCausalLM has positions for 512 tokens"):
        start(without_weights, max_model_len=513)


def test_the_models_own_length_may_be_asked_for(tiny_model: Path) -> None:
    assert start(tiny_model, max_model_len=512).max_model_len == 512


def test_a_pool_too_small_for_the_model_lowers_the_length_and_says_so(tiny_model: Path) -> None:
    started = start(tiny_model, num_kv_blocks=3)
    assert started.max_model_len == 48
    assert started.notices == ("max_model_len is lowered from 512 to 48: the K/V blocks hold 48 tokens.",)


def test_a_pool_too_small_for_the_asked_length_is_refused(without_weights: Path, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len is 49, but the K/V blocks hold 48 tokens; lower it, or"):
        start(without_weights, num_kv_blocks=3, max_model_len=49)
    assert start(tiny_model, num_kv_blocks=3, max_model_len=48).notices == ()


def test_a_pool_too_small_for_two_tokens_is_refused(without_weights: Path, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="take at least 2"):
        start(without_weights, num_kv_blocks=1, block_size=1)
    assert start(tiny_model, num_kv_blocks=2, block_size=1).max_model_len == 2


def test_a_sliding_window_lowers_the_length_and_says_so(windowed_model: Path) -> None:
    started = start(windowed_model)
    assert started.max_model_len == WINDOW
    assert len(started.notices) == 1
    assert "attention window" in started.notices[0]
    assert start(windowed_model, max_model_len=WINDOW).notices == ()
    with pytest.raises(ConfigError, match=f"--max-model-len is {WINDOW + 1}, but the attention window"):
        start(windowed_model, max_model_len=WINDOW + 1)


def test_more_blocks_than_the_machine_holds_are_refused_before_loading(without_weights: Path) -> None:
    with pytest.raises(ConfigError, match=r"at most \d+ blocks fit; lower --num-kv-blocks or --kv-cache-memory"):
        start(without_weights, num_kv_blocks=10**15)
    with pytest.raises(ConfigError, match=r"at most \d+ blocks fit"):
        start(without_weights, num_kv_blocks=None, kv_cache_memory=10**18)
    with pytest.raises(ConfigError, match="one K/V block takes"):
        start(without_weights, num_kv_blocks=None, kv_cache_memory=100)


def test_a_model_without_weights_is_refused_by_the_loader(without_weights: Path) -> None:
    with pytest.raises(ModelLoadError):
        start(without_weights)


def test_rope_scaling_sets_the_length_that_a_model_covers(tiny_model: Path) -> None:
    model = read_model_config(tiny_model)

    def scaled(scaling: Any) -> int:
        return trained_length(dataclasses.replace(model, rope=RopeConfig(10_000.0, scaling)))

    assert scaled(None) == 512
    assert scaled(LinearScaling(factor=2.5)) == 1280
    assert scaled(YarnScaling(factor=4.0, original_max_position_embeddings=256, attention_factor=1.0)) == 1024
    assert scaled(Llama3Scaling(8.0, 1.0, 4.0, original_max_position_embeddings=64)) == 512


def test_every_limit_that_lowers_the_length_is_named(tiny_model: Path) -> None:
    model = dataclasses.replace(read_model_config(tiny_model), sliding_window=100)
    assert choose_max_model_len(None, model, 64)[0] == 64
    assert len(choose_max_model_len(None, model, 64)[1]) == 2
    assert choose_max_model_len(None, model, 1000)[0] == 100
    assert choose_max_model_len(50, model, 64) == (50, [])
