"""How fast are the Triton kernels on this GPU? The second half of gpu_check.py, which runs it."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.testing
from torch.nn.functional import scaled_dot_product_attention

from radixserve.kernels import reference
from radixserve.kernels.copy_blocks import copy_blocks
from radixserve.kernels.paged_decode import paged_decode, plan_decode
from radixserve.kernels.paged_prefill import paged_prefill, plan_prefill, tokens_per_tile
from radixserve.kernels.rms_norm import add_rms_norm
from radixserve.kernels.silu_mul import silu_mul
from radixserve.kernels.tiles import decode_tiles, target_family
from radixserve.kernels.write_kv import write_kv

ROOT = Path(__file__).resolve().parent.parent
BLOCK_SIZE = 16
EPS = 1e-5
SEED = 0
# The shape of an 8B model of the Llama family.
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE = 32, 8, 128, 4096, 14336
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Speed:
    """A measurement. work: bytes moved or operations of one run; unit: GB/s or TFLOP/s. Times in milliseconds."""

    name: str
    work: float
    unit: str
    times_ms: list[float]
    baseline: str
    baseline_ms: float

    @property
    def rate(self) -> float:
        return self.work / self.times_ms[0] / (1e6 if self.unit == "GB/s" else 1e9)

    @property
    def baseline_rate(self) -> float:
        return self.rate * self.times_ms[0] / self.baseline_ms


def random_tensor(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(DTYPE)


def measure(
    name: str, work: float, unit: str, run: Callable[[], Any], baseline: str, run_baseline: Callable[[], Any]
) -> Speed:
    """Time both, median, p10 and p90 of about 100 ms of runs, with the GPU's cache cleared before each."""
    times = triton.testing.do_bench(run, warmup=50, rep=100, quantiles=[0.5, 0.1, 0.9])
    baseline_times = triton.testing.do_bench(run_baseline, warmup=50, rep=100, quantiles=[0.5, 0.1, 0.9])
    return Speed(name, work, unit, list(times), baseline, baseline_times[0])


def speed_of_copy(device: torch.device) -> Speed:
    """Measure what the memory gives to a plain copy, which the other rates are to be held against."""
    source = torch.empty(2**29, dtype=DTYPE, device=device)
    destination = torch.empty_like(source)
    work = 2 * source.nbytes

    def run() -> torch.Tensor:
        return destination.copy_(source)

    return measure("copy of 1 GiB", work, "GB/s", run, "the same", run)


def paged_cache(num_rows: int, context: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return key and value caches of full rows in shuffled blocks, and their block tables."""
    num_blocks = num_rows * context // BLOCK_SIZE
    shape = (num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    tables = torch.randperm(num_blocks, device=device).view(num_rows, -1)
    return (
        random_tensor(*shape, device=device),
        random_tensor(*shape, device=device),
        tables,
    )


def gathered(cache: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Return a row's keys or values side by side, [R, num_kv_heads, context, head_dim]."""
    return cache[tables].transpose(1, 2).reshape(len(tables), NUM_KV_HEADS, -1, HEAD_DIM)


def speed_of_decode(num_rows: int, context: int, device: torch.device) -> Speed:
    """Measure decode against SDPA over keys and values that already lie side by side."""
    key_cache, value_cache, tables = paged_cache(num_rows, context, device)
    query = random_tensor(num_rows, NUM_HEADS, HEAD_DIM, device=device)
    output = torch.empty_like(query)
    split_tokens = decode_tiles(HEAD_DIM, DTYPE, target_family()).split_tokens
    rows = range(num_rows)
    plan = plan_decode(rows, rows, [context] * num_rows, split_tokens=split_tokens, device=device)
    key, value = gathered(key_cache, tables), gathered(value_cache, tables)
    return measure(
        f"paged_decode batch {num_rows} context {context}",
        key.nbytes + value.nbytes,
        "GB/s",
        lambda: paged_decode(query, key_cache, value_cache, tables, plan, output, scale=HEAD_DIM**-0.5),
        "SDPA, K/V gathered before",
        # The query heads that share a K/V head are its queries, so no key is read twice.
        lambda: scaled_dot_product_attention(query.view(num_rows, NUM_KV_HEADS, -1, HEAD_DIM), key, value),
    )


def speed_of_prefill(num_tokens: int, context: int, device: torch.device) -> Speed:
    """Measure prefill of the last tokens of a context against SDPA over keys and values repeated for each head."""
    key_cache, value_cache, tables = paged_cache(1, context, device)
    query = random_tensor(num_tokens, NUM_HEADS, HEAD_DIM, device=device)
    output = torch.empty_like(query)
    per_tile = tokens_per_tile(HEAD_DIM, DTYPE, NUM_HEADS // NUM_KV_HEADS)
    plan = plan_prefill([0], [0], [num_tokens], [context], tokens_per_tile=per_tile, device=device)
    key, value = (
        gathered(cache, tables).repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1)
        for cache in (key_cache, value_cache)
    )
    mask = None
    if num_tokens < context:
        mask = torch.ones(num_tokens, context, dtype=torch.bool, device=device).tril(context - num_tokens)
    num_seen = num_tokens * context - num_tokens * (num_tokens - 1) // 2
    return measure(
        f"paged_prefill {num_tokens} tokens context {context}",
        4 * HEAD_DIM * NUM_HEADS * num_seen,
        "TFLOP/s",
        lambda: paged_prefill(query, key_cache, value_cache, tables, plan, output, scale=HEAD_DIM**-0.5),
        "SDPA, K/V gathered before",
        lambda: scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0), key, value, attn_mask=mask, is_causal=mask is None
        ),
    )


def speed_of_write(num_tokens: int, device: torch.device) -> Speed:
    """Measure the write with RoPE against torch's operators for the same."""
    key_cache, value_cache, tables = paged_cache(1, num_tokens, device)
    qkv = random_tensor(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, device=device)
    query_key, value = qkv[:, :-NUM_KV_HEADS], qkv[:, -NUM_KV_HEADS:]
    angles = torch.rand(num_tokens, HEAD_DIM // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    offsets = torch.arange(num_tokens, device=device) % BLOCK_SIZE
    blocks = tables[0].repeat_interleave(BLOCK_SIZE)
    slots = blocks * BLOCK_SIZE + offsets

    def run_torch() -> torch.Tensor:
        rotated = reference.rope(query_key, cos, sin)
        key_cache[blocks, :, offsets] = rotated[:, NUM_HEADS:]
        value_cache[blocks, :, offsets] = value
        return rotated[:, :NUM_HEADS]

    return measure(
        f"write_kv {num_tokens} tokens",
        2 * qkv.nbytes,
        "GB/s",
        lambda: write_kv(query_key, value, cos, sin, key_cache, value_cache, slots),
        "torch",
        run_torch,
    )


def speeds_of_small_kernels(num_tokens: int, device: torch.device) -> Iterator[Speed]:
    """Measure the norm of a sum and the gate against torch's operators."""
    x, delta = (random_tensor(num_tokens, HIDDEN, device=device) for _ in range(2))
    weight = random_tensor(HIDDEN, device=device)
    yield measure(
        f"add_rms_norm {num_tokens} x {HIDDEN}",
        4 * x.nbytes,
        "GB/s",
        lambda: add_rms_norm(x, delta, weight, EPS),
        "torch",
        lambda: reference.add_rms_norm(x, delta, weight, EPS),
    )
    gate_up = random_tensor(num_tokens, 2 * INTERMEDIATE, device=device)
    yield measure(
        f"silu_mul {num_tokens} x {INTERMEDIATE}",
        1.5 * gate_up.nbytes,
        "GB/s",
        lambda: silu_mul(gate_up),
        "torch",
        lambda: reference.silu_mul(gate_up),
    )


def speed_of_block_copies(num_copies: int, device: torch.device) -> Speed:
    """Measure copies in 32 layers against two operators a tensor."""
    shape = (2 * num_copies, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    caches = [torch.zeros(shape, dtype=DTYPE, device=device) for _ in range(64)]
    blocks = torch.randperm(2 * num_copies).tolist()
    sources, destinations = blocks[:num_copies], blocks[num_copies:]

    def run_torch() -> None:
        read, written = torch.tensor([sources, destinations], device=device)
        for cache in caches:
            cache.index_copy_(0, written, cache.index_select(0, read))

    return measure(
        f"copy_blocks {num_copies} in 64 tensors",
        2 * len(caches) * num_copies * caches[0][0].nbytes,
        "GB/s",
        lambda: copy_blocks(caches, sources, destinations),
        "torch",
        run_torch,
    )


def run_speeds(device: torch.device) -> Iterator[Speed]:
    """Yield every measurement, the memory's own speed first."""
    torch.manual_seed(SEED)
    yield speed_of_copy(device)
    for num_rows, context in ((1, 8192), (8, 1024), (8, 8192), (64, 2048), (64, 8192), (256, 1024)):
        yield speed_of_decode(num_rows, context, device)
    for num_tokens, context in ((2048, 2048), (8192, 8192), (512, 8192), (512, 32768)):
        yield speed_of_prefill(num_tokens, context, device)
    for num_tokens in (64, 8192):
        yield speed_of_write(num_tokens, device)
        yield from speeds_of_small_kernels(num_tokens, device)
    yield speed_of_block_copies(16, device)


def print_speeds(device: torch.device) -> None:
    """Print a JSON line for each measurement as it is made, and then the table."""
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    about = {
        "commit": commit.stdout.strip() or None,
        "device": torch.cuda.get_device_name(device),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "dtype": str(DTYPE).removeprefix("torch."),
        "seed": SEED,
        "load_average": os.getloadavg(),
    }
    lines = []
    copy_rate = None
    for speed in run_speeds(device):
        median, p10, p90 = speed.times_ms
        copy_rate = copy_rate or speed.rate
        times = {"median_ms": median, "p10_ms": p10, "p90_ms": p90}
        rates = {"rate": speed.rate, "unit": speed.unit, "baseline": speed.baseline, "baseline_ms": speed.baseline_ms}
        print(json.dumps(about | {"workload": speed.name} | times | rates), flush=True)
        share = f"{speed.rate / copy_rate:6.0%}" if speed.unit == "GB/s" else "      "
        lines.append(
            f"{speed.name:42} {median:9.3f} ms {speed.rate:8.1f} {speed.unit:7} {share}   "
            f"{speed.baseline}: {speed.baseline_ms:.3f} ms {speed.baseline_rate:.1f} {speed.unit}"
        )
    print("\nThe share is of the rate of a plain copy.", *lines, sep="\n")
