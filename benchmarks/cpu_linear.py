"""What do the projections of the demo model cost a step on a CPU, in each layout of their weights?

    python benchmarks/cpu_linear.py --repeat 20

All 30 layers' projections, of random weights, one after another, so that weights come from memory as in a step; the
output layer apart. The layouts take turns. Prints one JSON line with the fastest time of each in milliseconds.
"""

import argparse
import functools
import math
import os
import time

import msgspec
import torch

from radixserve.kernels.cpu.weight_memory import WeightMemory
from radixserve.model.linear import CppLinear, DenseLinear, Float16Linear, LinearMaker, OneDnnLinear

# (out_features, in_features) of a layer: qkv, attention output, gate and up, down.
LAYER = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
OUTPUT = (49152, 576)
NUM_LAYERS = 30
NUM_ROWS = (1, 8, 16, 32, 512)
LAYOUTS: dict[str, LinearMaker] = {
    "dense": DenseLinear,
    "onednn": OneDnnLinear,
    "fbgemm": Float16Linear,
    "cpp": functools.partial(CppLinear, memory=WeightMemory()),
}


@torch.inference_mode()
def fastest(layouts: list[str], shapes: list[tuple[int, int]], num_rows: int, repeat: int) -> dict[str, float]:
    """Return each layout's fastest pass over projections of these shapes, in milliseconds."""
    inputs = [torch.randn(num_rows, shape[1]) for shape in shapes]
    projections = {
        name: [LAYOUTS[name](torch.randn(shape) / shape[1] ** 0.5, None) for shape in shapes] for name in layouts
    }
    best = dict.fromkeys(layouts, math.inf)
    for _ in range(repeat):
        for name, linears in projections.items():
            began = time.perf_counter()
            for linear, x in zip(linears, inputs, strict=True):
                linear(x)
            best[name] = min(best[name], (time.perf_counter() - began) * 1e3)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    measure = functools.partial(fastest, arguments.layouts, repeat=arguments.repeat)
    document = {
        "torch": str(torch.__version__),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "repeat": arguments.repeat,
        "layers_ms": {rows: measure(LAYER * NUM_LAYERS, rows) for rows in NUM_ROWS},
        "output_ms": {rows: measure([OUTPUT], rows) for rows in NUM_ROWS[:-1]},
        "load_average": os.getloadavg(),
    }
    print(msgspec.json.encode(document).decode())


if __name__ == "__main__":
    main()
