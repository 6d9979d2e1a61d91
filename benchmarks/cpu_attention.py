"""How fast is a layer's attention on this CPU? The C++ kernels beside torch's, in turn, in milliseconds.

    python benchmarks/cpu_attention.py --threads 2

Prints a JSON line for each case: what one layer takes, writing K/V not counted. Layers have blocks of their own, 300 MB
of them where the case is a decode step, so that K/V comes from memory. The heads are the demo model's unless given.
"""

import argparse
import os
import statistics
import time
from typing import Any

import msgspec
import torch

from radixserve.attention.backend import AttentionBackend, ForwardBatch, KVLayer
from radixserve.attention.paged_cpp import PagedCppBackend
from radixserve.attention.paged_sdpa import PagedSdpaBackend

BLOCK_SIZE = 16
# (query length, context length) of each row.
CASES = {
    "decode 1 x 1024": [(1, 1024)],
    "decode 8 x 1024": [(1, 1024)] * 8,
    "decode 16 x 1024": [(1, 1024)] * 16,
    "prompt of 512": [(512, 512)],
    "512 more after 3584": [(512, 4096)],
    "16 more after 4080": [(16, 4096)],
}
LAYER_BYTES = 300 * 2**20


def make_batch(rows: list[tuple[int, int]], generator: torch.Generator) -> tuple[ForwardBatch, int]:
    """Return a step over shuffled blocks, and how many blocks there are."""
    counts = [-(-context // BLOCK_SIZE) for _, context in rows]
    tables = torch.zeros(len(rows), max(counts), dtype=torch.int64)
    for row, blocks in enumerate(torch.randperm(sum(counts), generator=generator).split(counts)):
        tables[row, : counts[row]] = blocks
    num_tokens = sum(query for query, _ in rows)
    unread = torch.zeros(num_tokens, dtype=torch.int64)
    batch = ForwardBatch(
        token_ids=unread,
        positions=unread,
        slot_mapping=unread,
        query_lengths=[query for query, _ in rows],
        context_lengths=[context for _, context in rows],
        block_tables=tables,
        logits_indices=unread,
    )
    return batch, sum(counts)


def time_layer(backend: AttentionBackend, batch: ForwardBatch, layers: list[KVLayer], query: torch.Tensor) -> float:
    """Return the milliseconds of one layer, with its share of preparing the step."""
    began = time.perf_counter()
    metadata = backend.prepare(batch)
    for layer in layers:
        backend.forward(layer, query, metadata)
    return (time.perf_counter() - began) / len(layers) * 1e3


def measure(name: str, dtype: torch.dtype, arguments: argparse.Namespace) -> dict[str, Any]:
    """Time the backends in turn; medians and minima over the repeats, after one that does not count."""
    num_heads, num_kv_heads, head_dim = arguments.heads, arguments.kv_heads, arguments.head_dim
    generator = torch.Generator().manual_seed(0)
    batch, num_blocks = make_batch(CASES[name], generator)
    shape = (num_blocks, num_kv_heads, BLOCK_SIZE, head_dim)
    layer_bytes = 2 * dtype.itemsize * num_blocks * num_kv_heads * BLOCK_SIZE * head_dim
    num_layers = max(2, LAYER_BYTES // layer_bytes) if name.startswith("decode") else 2
    layers = [
        KVLayer(*(torch.randn(shape, generator=generator).to(dtype) for _ in range(2))) for _ in range(num_layers)
    ]
    query = torch.randn(len(batch.token_ids), num_heads, head_dim, generator=generator)
    backends: dict[str, AttentionBackend] = {
        "cpp": PagedCppBackend(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=BLOCK_SIZE
        ),
        "torch": PagedSdpaBackend(block_size=BLOCK_SIZE, num_kv_heads=num_kv_heads),
    }
    times: dict[str, list[float]] = {backend: [] for backend in backends}
    with torch.inference_mode():
        for repeat in range(arguments.repeat + 1):
            for label, backend in backends.items():
                elapsed = time_layer(backend, batch, layers, query)
                if repeat:
                    times[label].append(elapsed)
    return {
        "case": name,
        "kv": str(dtype).removeprefix("torch."),
        "num_layers": num_layers,
        "median_ms": {label: round(statistics.median(values), 3) for label, values in times.items()},
        "min_ms": {label: round(min(values), 3) for label, values in times.items()},
        "gb_read_per_s": {label: round(layer_bytes / min(values) / 1e6, 1) for label, values in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for dtype in (torch.float32, torch.float16):
        for name in CASES:
            document = measure(name, dtype, arguments)
            document |= {"torch_version": str(torch.__version__), "threads": arguments.threads}
            document |= {"repeat": arguments.repeat, "load": round(os.getloadavg()[0], 1)}
            print(msgspec.json.encode(document).decode(), flush=True)


if __name__ == "__main__":
    main()
