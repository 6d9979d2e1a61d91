"""When does reading a shared prefix once pay on this CPU? The C++ kernel with and without it, in turn.

    python benchmarks/shared_prefix_attention.py --threads 1

Each case is a decode step: rows whose contexts begin with the same tokens and end with their own. Prints a JSON line a
case: microseconds of one layer, and of the plan, which is made once a step for all layers. Layers have blocks of their
own, more than the caches hold. The two ways must give the same bits. The heads are the demo model's unless given.
"""

import argparse
import itertools
import os
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from radixserve.kernels.cpu.paged_attention import AttentionPlan, paged_attention, plan_attention

BLOCK_SIZE = 16
ROWS = (2, 4, 8, 16, 32)
SHARED_TOKENS = (128, 256, 512, 1024, 2048, 4096)
OWN_TOKENS = (0, 64, 512)
LAYER_BYTES = 64 * 2**20


@dataclass(slots=True, frozen=True)
class Step:
    """Rows of query_length new tokens behind num_shared tokens of all and num_own of each; blocks are shuffled."""

    num_rows: int
    num_shared: int
    num_own: int
    query_length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def own_blocks(self) -> int:
        return -(-(self.num_own + self.query_length) // BLOCK_SIZE)

    @property
    def num_blocks(self) -> int:
        return self.num_shared // BLOCK_SIZE + self.num_rows * self.own_blocks

    def block_tables(self) -> torch.Tensor:
        shared = self.num_shared // BLOCK_SIZE
        blocks = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(0))
        own = blocks[shared:].view(self.num_rows, self.own_blocks)
        return torch.cat((blocks[:shared].expand(self.num_rows, shared), own), dim=1)

    def plan(self, block_tables: torch.Tensor, *, is_shared: bool) -> AttentionPlan:
        return plan_attention(
            [self.query_length] * self.num_rows,
            [self.num_shared + self.num_own + self.query_length] * self.num_rows,
            block_tables,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=BLOCK_SIZE if is_shared else None,
        )


def measure(step: Step, dtype: torch.dtype, repeat: int) -> dict[str, Any]:
    """Time both ways in turn, after a pass that does not count; the sum over layers of each one's fastest pass."""
    shape = (step.num_blocks, step.num_kv_heads, BLOCK_SIZE, step.head_dim)
    layer_bytes = 2 * dtype.itemsize * step.num_blocks * step.num_kv_heads * BLOCK_SIZE * step.head_dim
    first = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2)]
    layers = [first] + [[cache.clone() for cache in first] for _ in range(max(2, LAYER_BYTES // layer_bytes))]
    num_tokens = step.num_rows * step.query_length
    query = torch.randn(num_tokens, step.num_heads, step.head_dim, generator=torch.Generator().manual_seed(3))
    tables, scale = step.block_tables(), step.head_dim**-0.5
    ways = {"plain": False, "shared": True}
    layer_times = {way: [float("inf")] * len(layers) for way in ways}
    plan_times: dict[str, list[float]] = {way: [] for way in ways}
    outputs = {}
    with torch.inference_mode():
        for pass_index in range(repeat + 1):
            for way, is_shared in ways.items():
                began = time.perf_counter()
                plan = step.plan(tables, is_shared=is_shared)
                plan_times[way].append(time.perf_counter() - began)
                for index, caches in enumerate(layers):
                    began = time.perf_counter()
                    outputs[way] = paged_attention(query, *caches, plan, scale=scale)
                    elapsed = time.perf_counter() - began
                    if pass_index:
                        layer_times[way][index] = min(layer_times[way][index], elapsed)
    layer_us = {way: sum(times) / len(layers) * 1e6 for way, times in layer_times.items()}
    return {
        "layer_us": {way: round(value, 1) for way, value in layer_us.items()},
        "plan_us": {way: round(min(times) * 1e6, 1) for way, times in plan_times.items()},
        "speedup": round(layer_us["plain"] / layer_us["shared"], 2),
        "same_bits": torch.equal(outputs["plain"], outputs["shared"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--query-length", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--shared", type=int, nargs="+", default=SHARED_TOKENS, help="multiples of 16")
    parser.add_argument("--own", type=int, nargs="+", default=OWN_TOKENS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for dtype in (torch.float16, torch.float32):
        for rows, shared, own in itertools.product(arguments.rows, arguments.shared, arguments.own):
            step = Step(
                rows,
                shared,
                own,
                arguments.query_length,
                arguments.heads,
                arguments.kv_heads,
                arguments.head_dim,
            )
            document = {"kv": str(dtype).removeprefix("torch."), "rows": rows, "shared": shared, "own": own}
            document |= {"query_length": arguments.query_length, "heads": arguments.heads}
            document |= {"kv_heads": arguments.kv_heads, "head_dim": arguments.head_dim}
            document |= measure(step, dtype, arguments.repeat)
            document |= {"torch_version": str(torch.__version__), "threads": arguments.threads}
            document |= {"repeat": arguments.repeat, "load": round(os.getloadavg()[0], 1)}
            print(msgspec.json.encode(document).decode(), flush=True)


if __name__ == "__main__":
    main()
