"""Are the Triton kernels right on this GPU, and how fast are they? Needs torch with numpy, triton and this checkout.

    python benchmarks/gpu_check.py                # every kernel against its torch twin, then speeds; under 4 minutes
    python benchmarks/gpu_check.py --interpret    # a small part of the first half, on a CPU in Triton's interpreter

Prints the largest error of each kernel and dtype, a JSON line for each speed, and a table. Exits with 0 if all is
right, with 1 after a wrong result, with 2 where there is no GPU.
"""

import argparse
import functools
import itertools
import math
import os
import random
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IS_INTERPRETED = "--interpret" in sys.argv[1:]
if IS_INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
# The kernels need nothing of the package around them, whose own imports may not be installed here.
package = types.ModuleType("radixserve")
package.__path__ = [str(ROOT / "radixserve")]
sys.modules["radixserve"] = package
sys.path.insert(0, str(ROOT))

import numpy as np
import torch

from benchmarks.gpu_speeds import BLOCK_SIZE, EPS, SEED, print_speeds
from radixserve.kernels import reference
from radixserve.kernels.copy_blocks import copy_blocks
from radixserve.kernels.paged_decode import find_decode_runs, paged_decode, plan_decode
from radixserve.kernels.paged_prefill import paged_prefill, plan_prefill, tokens_per_tile
from radixserve.kernels.rms_norm import add_rms_norm, rms_norm
from radixserve.kernels.silu_mul import silu_mul
from radixserve.kernels.tiles import decode_tiles, target_family
from radixserve.kernels.write_kv import write_kv

# Largest |result - expected| / (1 + |expected|), where the twin computes from the same stored numbers in float32.
# A wrong index gives errors of about 1.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# (query length, context length) of the rows of a step.
DECODES = [(1, length) for length in (0, 1, 15, 16, 17, 130, 700, 5000)]
PREFILLS = [(1, 1), (15, 15), (16, 17), (17, 33), (130, 130), (2, 130), (33, 700)]


@dataclass(frozen=True)
class Check:
    """A comparison of one kernel with its twin. error: as TOLERANCE counts it."""

    name: str
    dtype: torch.dtype
    error: float

    @property
    def is_right(self) -> bool:
        return self.error <= TOLERANCE[self.dtype]


@dataclass(frozen=True)
class PagedRows:
    """Rows of queries, one after another, and the cache that holds their contexts among slots of NaN."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    query_lengths: list[int]
    context_lengths: list[int]

    @property
    def starts(self) -> list[int]:
        """The first token of each row."""
        return list(itertools.accumulate(self.query_lengths, initial=0))[:-1]

    def to(self, device: torch.device) -> "PagedRows":
        tensors = (self.query, self.key_cache, self.value_cache, self.block_tables)
        return PagedRows(*(tensor.to(device) for tensor in tensors), self.query_lengths, self.context_lengths)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def error_of(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error; infinity where one is NaN and the other is not."""
    result, expected = result.detach().cpu().double(), expected.detach().cpu().double()
    is_same = (result == expected) | (result.isnan() & expected.isnan())
    error = torch.where(is_same, 0.0, (result - expected).abs() / (1 + expected.abs())).nan_to_num(nan=math.inf)
    return float(error.max()) if error.numel() else 0.0


def make_rows(
    rows: Sequence[tuple[int, int]], num_kv_heads: int, group_size: int, head_dim: int, dtype: torch.dtype
) -> PagedRows:
    """Lay rows (query length, context length) out over shuffled blocks, on the CPU."""
    counts = [-(-context // BLOCK_SIZE) for _, context in rows]
    blocks = list(range(sum(counts) + 1))
    random.Random(SEED).shuffle(blocks)
    padding = blocks.pop()
    tables = torch.full((len(rows), max(counts)), padding)
    key_cache, value_cache = torch.full((2, sum(counts) + 1, num_kv_heads, BLOCK_SIZE, head_dim), math.nan, dtype=dtype)
    for row, (_, context) in enumerate(rows):
        for index in range(counts[row]):
            tables[row, index] = block = blocks.pop()
            used = min(BLOCK_SIZE, context - index * BLOCK_SIZE)
            for cache in (key_cache, value_cache):
                cache[block, :, :used] = torch.randn(num_kv_heads, used, head_dim)
    num_tokens = sum(query for query, _ in rows)
    num_heads = num_kv_heads * group_size
    # Queries are the first heads of a wider tensor, as the decoder may hand them over.
    query = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)[:, :num_heads]
    return PagedRows(
        query, key_cache, value_cache, tables, [query for query, _ in rows], [context for _, context in rows]
    )


def share(rows: PagedRows, num_tokens: int) -> PagedRows:
    """Let all rows with a token behind the first num_tokens, whole blocks, begin as the longest one does."""
    tables, num_blocks = rows.block_tables.clone(), num_tokens // BLOCK_SIZE
    longest = max(range(len(rows.starts)), key=rows.context_lengths.__getitem__)
    for row, context in enumerate(rows.context_lengths):
        if context > num_tokens:
            tables[row, :num_blocks] = tables[longest, :num_blocks]
    return replace(rows, block_tables=tables)


def decode(rows: PagedRows, split_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run paged decode; return its output and log-sum-exps."""
    output = torch.empty_like(rows.query, memory_format=torch.contiguous_format)
    log_sums = torch.empty(output.shape[:2], device=output.device)
    group_size = output.shape[1] // rows.key_cache.shape[1]
    runs = find_decode_runs(
        rows.block_tables.cpu().numpy(),
        np.array(rows.context_lengths),
        block_size=BLOCK_SIZE,
        split_tokens=split_tokens,
        group_size=group_size,
    )
    plan = plan_decode(
        range(len(rows.starts)),
        rows.starts,
        rows.context_lengths,
        split_tokens=split_tokens,
        device=output.device,
        runs=runs,
        group_size=group_size,
    )
    caches = (rows.key_cache, rows.value_cache, rows.block_tables)
    paged_decode(rows.query, *caches, plan, output, log_sums, scale=output.shape[2] ** -0.5)
    return output, log_sums


def prefill(rows: PagedRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Run paged prefill; return its output and log-sum-exps."""
    output = torch.empty_like(rows.query, memory_format=torch.contiguous_format)
    log_sums = torch.empty(output.shape[:2], device=output.device)
    group_size = output.shape[1] // rows.key_cache.shape[1]
    plan = plan_prefill(
        range(len(rows.starts)),
        rows.starts,
        rows.query_lengths,
        rows.context_lengths,
        tokens_per_tile=tokens_per_tile(output.shape[2], output.dtype, group_size),
        device=output.device,
    )
    caches = (rows.key_cache, rows.value_cache, rows.block_tables)
    paged_prefill(rows.query, *caches, plan, output, log_sums, scale=output.shape[2] ** -0.5)
    return output, log_sums


def check_attention(dtype: torch.dtype, head_dim: int, group_size: int, device: torch.device) -> Iterator[Check]:
    """Check decode with whole, with split and with shared contexts, and prefill."""
    decodes, prefills = (DECODES[:-2], PREFILLS[:4]) if IS_INTERPRETED else (DECODES, PREFILLS)
    split_tokens = decode_tiles(head_dim, dtype, target_family()).split_tokens
    # The interpreter's rows are too short for a split of the usual length.
    decode_split = functools.partial(decode, split_tokens=min(64, split_tokens))
    runs: list[tuple[str, list[tuple[int, int]], Callable[[PagedRows], tuple[torch.Tensor, torch.Tensor]]]] = [
        ("paged_decode split", decodes, decode_split),
        ("paged_decode shared", [*decodes, (1, 129), (1, 200)], decode_split),
        ("paged_decode whole", decodes, functools.partial(decode, split_tokens=1024)),
        ("paged_prefill", prefills, prefill),
    ]
    for name, lengths, run in runs:
        rows = make_rows(lengths, 2, group_size, head_dim, dtype)
        if name == "paged_decode shared":
            rows = share(rows, num_tokens=128)
        output, log_sums = run(rows.to(device))
        expected, expected_sums = reference.paged_attention(
            rows.query.float(),
            rows.key_cache,
            rows.value_cache,
            rows.block_tables,
            rows.context_lengths,
            rows.query_lengths,
            head_dim**-0.5,
        )
        error = max(error_of(output, expected), error_of(log_sums, expected_sums))
        yield Check(f"{name} head_dim {head_dim} group {group_size}", dtype, error)


def check_write_kv(
    dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, device: torch.device
) -> Iterator[Check]:
    """Check the write with RoPE, with tokens that have no slot."""
    for num_tokens, num_heads, num_kv_heads in ((0, 4, 2), (1, 9, 3), (17, 8, 1), (130, 32, 8)):
        qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
        angles = torch.rand(num_tokens, head_dim // 2) * 6.3
        slots = torch.randperm(12 * BLOCK_SIZE)[:num_tokens]
        slots[3::7] = -1
        caches = torch.full((2, 12, num_kv_heads, BLOCK_SIZE, head_dim), math.nan, dtype=cache_dtype)
        num_rotated = num_heads + num_kv_heads
        inputs = (qkv[:, :num_rotated], qkv[:, num_rotated:], angles.cos(), angles.sin())
        on_device = caches.to(device)
        # Not inputs moved one by one: on the device too they are views of one tensor.
        moved = qkv.to(device)
        query = write_kv(
            moved[:, :num_rotated],
            moved[:, num_rotated:],
            inputs[2].to(device),
            inputs[3].to(device),
            on_device[0],
            on_device[1],
            slots.to(device),
        )
        # Every result is rounded once, so the twin starts from float32.
        expected = reference.write_kv(
            inputs[0].float(), inputs[1].float(), inputs[2], inputs[3], caches[0], caches[1], slots
        )
        error = max(error_of(query, expected), error_of(on_device, caches))
        name = f"write_kv to {name_of(cache_dtype)} head_dim {head_dim} tokens {num_tokens}"
        yield Check(name, min(dtype, cache_dtype, key=lambda kind: -TOLERANCE[kind]), error)


def check_small_kernels(dtype: torch.dtype, device: torch.device) -> Iterator[Check]:
    """Check the norms, the gate and the block copies."""
    for num_rows, size in ((0, 64), (1, 1), (3, 80), (17, 576), (130, 4096), (2, 16384)):
        x, delta, gate_up = (torch.randn(num_rows, width).to(dtype) for width in (size, size, 2 * size))
        weight = torch.randn(size).to(dtype)
        arguments = (x.to(device), weight.to(device), EPS)
        yield Check(
            f"rms_norm {num_rows} x {size}", dtype, error_of(rms_norm(*arguments), reference.rms_norm(x, weight, EPS))
        )
        total, normalized = add_rms_norm(arguments[0], delta.to(device), *arguments[1:])
        expected_total, expected = reference.add_rms_norm(x, delta, weight, EPS)
        error = max(error_of(total, expected_total), error_of(normalized, expected))
        yield Check(f"add_rms_norm {num_rows} x {size}", dtype, error)
        gated = silu_mul(gate_up.to(device))
        yield Check(f"silu_mul {num_rows} x {size}", dtype, error_of(gated, reference.silu_mul(gate_up.float())))
    heads, weight = torch.randn(19, 13, 80).to(dtype), torch.randn(10, 80).to(dtype)
    normalized = rms_norm(heads.to(device)[:, :10], weight.to(device), EPS)
    yield Check("rms_norm of heads", dtype, error_of(normalized, reference.rms_norm(heads[:, :10], weight, EPS)))
    for name, sources, destinations in (
        ("apart", [0, 2, 2], [4, 5, 6]),
        ("in a chain and a swap", [0, 1, 2, 3, 4], [1, 2, 7, 4, 3]),
    ):
        caches = torch.randn(4, 8, 3, BLOCK_SIZE, 80).to(dtype)
        on_device = caches.to(device)
        copy_blocks(list(on_device), sources, destinations)
        for cache in caches:
            reference.copy_blocks(cache, sources, destinations)
        yield Check(f"copy_blocks {name}", dtype, error_of(on_device, caches))


def check_far_blocks(device: torch.device) -> Iterator[Check]:
    """Check that a block whose place takes more than 32 bits is written, read and copied: needs 9 GB of memory."""
    dtype, head_dim = torch.float16, 128
    num_blocks = 2**31 // (BLOCK_SIZE * head_dim) + 2
    key_cache, value_cache = (
        torch.zeros((num_blocks, 1, BLOCK_SIZE, head_dim), dtype=dtype, device=device) for _ in range(2)
    )
    qkv = torch.randn(1, 4, head_dim).to(dtype).to(device)
    cos, sin = torch.ones(1, head_dim // 2, device=device), torch.zeros(1, head_dim // 2, device=device)
    slots = torch.tensor([(num_blocks - 1) * BLOCK_SIZE], device=device)
    query = write_kv(qkv[:, :3], qkv[:, 3:], cos, sin, key_cache, value_cache, slots)
    yield Check("write_kv far", dtype, error_of(key_cache[-1, :, 0], qkv[0, 2:3]))
    copy_blocks([key_cache, value_cache], [num_blocks - 1], [num_blocks - 2])
    yield Check("copy_blocks far", dtype, error_of(value_cache[-2, :, 0], qkv[0, 3:]))
    for name, run in (
        ("paged_decode far", functools.partial(decode, split_tokens=256)),
        ("paged_prefill far", prefill),
    ):
        table = torch.tensor([[num_blocks - 1]], device=device)
        output, _ = run(PagedRows(query, key_cache, value_cache, table, [1], [1]))
        yield Check(name, dtype, error_of(output, qkv[:, 3:].expand(-1, 2, -1)))


def run_checks(device: torch.device) -> Iterator[Check]:
    """Yield every check: of each dtype, head size, and number of query heads that share a K/V head."""
    torch.manual_seed(SEED)
    dtypes, head_dims, groups = [torch.float32, torch.float16, torch.bfloat16], [64, 80, 96, 128], [1, 3, 4, 8]
    if IS_INTERPRETED:  # which computes bfloat16 wrongly
        dtypes, head_dims, groups = dtypes[:2], [80], [3]
    for dtype in dtypes:
        yield from check_small_kernels(dtype, device)
        for head_dim in head_dims:
            yield from check_write_kv(dtype, dtype, head_dim, device)
            for group_size in groups:
                yield from check_attention(dtype, head_dim, group_size, device)
    yield from check_write_kv(torch.float32, torch.float16, 80, device)
    if not IS_INTERPRETED:
        yield from check_far_blocks(device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interpret", action="store_true", help="a small part, on a CPU in Triton's interpreter")
    arguments = parser.parse_args()
    if not arguments.interpret and not torch.cuda.is_available():
        print("torch finds no GPU here; --interpret runs a small part on the CPU", file=sys.stderr)
        return 2
    device = torch.device("cpu" if arguments.interpret else "cuda")
    began = time.monotonic()
    wrong = []
    worst: dict[str, Check] = {}
    for check in run_checks(device):
        if not check.is_right:
            wrong.append(check)
            print(f"WRONG {name_of(check.dtype)} {check.name}: error {check.error:.1e}", flush=True)
        kind = f"{check.name.split()[0]} {name_of(check.dtype)}"
        worst[kind] = max(worst.get(kind, check), check, key=lambda found: found.error)
    for kind, check in sorted(worst.items()):
        verdict = "right" if check.is_right else "WRONG"
        print(f"{verdict} {kind:24} largest error {check.error:.1e} of {TOLERANCE[check.dtype]:.0e}: {check.name}")
    print(f"checked in {time.monotonic() - began:.0f} s", flush=True)
    if not arguments.interpret:
        print_speeds(device)
        print(f"all done in {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
