"""Where does the time of an engine's step go, part by part?

    python benchmarks/profile_engine.py decode --rows 8 --context 1024
    python benchmarks/profile_engine.py append --tokens 250 --context 4000

decode: steps in which every row generates, around the stated context. append: the one step of a request whose prompt
goes on for some tokens behind a cached prefix of --context tokens, with one token of answer; 0 is a new prompt.

The engine's functions are wrapped with clocks, and a part's time is what is not in another part inside it. Each call of
a clock adds some 0.3 microseconds to the part around it, 0.2 ms a step. The parts of the fastest step are printed, the
one least disturbed by others, in milliseconds and percent of their sum, as one JSON line and as a table. On a CPU the
decoder calls its kernels one by one here, and not in one call for all layers, into which no clock can look.
"""

import argparse
import functools
import os
import statistics
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from radixserve.attention.paged_cpp import PagedCppBackend
from radixserve.config import EngineConfig
from radixserve.core.scheduler import Scheduler
from radixserve.engine.client import THREAD_ENVIRONMENT
from radixserve.engine.core import EngineCore
from radixserve.engine.detokenizer import Detokenizer
from radixserve.engine.frames import encode_frame
from radixserve.engine.start import start_engine
from radixserve.kernels.cpu.library import library
from radixserve.model.decoder import Decoder
from radixserve.model.linear import CppLinear, Float16Linear, OneDnnLinear
from radixserve.model.ops import DecoderOps
from radixserve.model.rope import RotaryEmbedding
from radixserve.protocol import AddRequest, StepOutput
from radixserve.runner import attention, model_executor
from radixserve.sampling_params import SamplingParams

NUM_WARM_UP_STEPS = 3
FRAME = "output: deltas and frame"
# Where each function's time goes. Inside a launcher only the C++ function is another part.
PARTS: tuple[tuple[Any, str, str], ...] = (
    (Scheduler, "schedule", "scheduler"),
    (Scheduler, "update", "scheduler"),
    (EngineCore, "step", FRAME),
    (Detokenizer, "push", FRAME),
    (model_executor.ModelExecutor, "execute", "executor: copies, finiteness, results"),
    (model_executor, "build_forward_batch", "batch"),
    (model_executor, "sample", "sampling"),
    (PagedCppBackend, "prepare", "plan of attention"),
    (RotaryEmbedding, "__call__", "cos and sin"),
    (Decoder, "hidden_states", "decoder: embedding, views, calls"),
    (Decoder, "logits", "output layer"),
    (CppLinear, "__call__", "projections"),
    (Float16Linear, "__call__", "projections"),
    (OneDnnLinear, "__call__", "projections"),
    (PagedCppBackend, "write_kv", "launchers"),
    (PagedCppBackend, "forward", "launchers"),
)
KERNELS = {
    "radixserve_paged_attention": "attention",
    "radixserve_write_kv": "write_kv",
    "radixserve_rms_norm": "norms and gate",
    "radixserve_silu_mul": "norms and gate",
}


class Clocks:
    """Adds up each part's own time, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]
        self._parts = [""]

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return function with a clock. The projection inside the output layer counts as that."""

        def timed(*arguments: Any, **options: Any) -> Any:
            name = "output layer" if self._parts[-1] == "output layer" else part
            self._inner.append(0.0)
            self._parts.append(name)
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                elapsed = time.perf_counter() - began
                self._parts.pop()
                self.seconds[name] += elapsed - self._inner.pop()
                self._inner[-1] += elapsed

        return timed

    def take(self) -> dict[str, float]:
        """Return what was added up, in milliseconds, and begin anew."""
        taken = {part: seconds * 1e3 for part, seconds in self.seconds.items()}
        self.seconds.clear()
        return taken

    def wrap_engine(self) -> None:
        """Put clocks around the functions of the engine."""
        for owner, name, part in PARTS:
            wrapped = getattr(owner, name)
            setattr(owner, name, functools.wraps(wrapped)(self.around(part, wrapped)))
        # With operations that are not CPP_OPS itself the decoder calls its kernels one by one, each with a clock.
        ops = attention.CPP_OPS
        attention.CPP_OPS = DecoderOps(
            *(self.around("launchers", function) for function in (ops.rms_norm, ops.add_rms_norm, ops.silu_mul))
        )
        for name, part in KERNELS.items():
            setattr(library(), name, self.around(part, getattr(library(), name)))


def prompt_of(num_tokens: int) -> list[int]:
    return torch.randint(100, 40_000, (num_tokens,)).tolist()


def request(index: int, prompt: list[int], max_tokens: int) -> AddRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return AddRequest(f"r{index}", array("i", prompt).tobytes(), params)


def run_step(core: EngineCore) -> StepOutput:
    output = core.step()
    encode_frame(output)
    return output


def decode_steps(core: EngineCore, clocks: Clocks, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Return the parts of each step of rows that generate."""
    for index in range(arguments.rows):
        core.add(request(index, prompt_of(arguments.context - arguments.steps // 2), most_generated(arguments)))
    while len(run_step(core).deltas) < arguments.rows:
        pass
    for _ in range(NUM_WARM_UP_STEPS):
        run_step(core)
    clocks.take()
    steps = []
    for _ in range(arguments.steps):
        output = run_step(core)
        assert len(output.deltas) == arguments.rows, "a request has ended, so this step is of fewer rows"
        steps.append(clocks.take())
    return steps


def most_generated(arguments: argparse.Namespace) -> int:
    """Return so many tokens that no row ends: the first generate while the prompts of the last are computed."""
    return NUM_WARM_UP_STEPS + int(arguments.steps) + 8 * int(arguments.rows)


def append_steps(core: EngineCore, clocks: Clocks, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Return the parts of each step that computes the end of a prompt."""
    prefix = prompt_of(arguments.context)
    if prefix:
        core.add(request(0, prefix, 1))
        while core.has_work:
            run_step(core)
    steps = []
    for index in range(1, 1 + NUM_WARM_UP_STEPS + arguments.steps):
        core.add(request(index, prefix + prompt_of(arguments.tokens), 1))
        clocks.take()
        run_step(core)
        steps.append(clocks.take())
        while core.has_work:
            run_step(core)
    return steps[NUM_WARM_UP_STEPS:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("decode", "append"))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=250)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    if not THREAD_ENVIRONMENT.keys() & os.environ.keys():  # it is read when the library is loaded
        os.execve(sys.executable, sys.orig_argv, os.environ | THREAD_ENVIRONMENT)
    torch.manual_seed(0)
    clocks = Clocks()
    clocks.wrap_engine()
    most = arguments.context + max(arguments.tokens, most_generated(arguments)) + 16
    settings = {"dtype": arguments.dtype, "threads": arguments.threads, "max_model_len": most}
    settings |= {"num_kv_blocks": (most // 16 + 2) * max(arguments.rows, 4), "eviction_policy": "lru"}
    core = start_engine(EngineConfig.from_settings(settings), show_progress=False).core
    steps = (decode_steps if arguments.kind == "decode" else append_steps)(core, clocks, arguments)
    parts = min(steps, key=lambda step: sum(step.values()))
    total = sum(parts.values())
    document = {**vars(arguments), "threads": torch.get_num_threads(), "parts_ms": parts, "fastest_ms": total}
    document |= {"median_ms": statistics.median(sum(step.values()) for step in steps)}
    document |= {"load_average": os.getloadavg()}
    print(msgspec.json.encode(document).decode())
    for part, elapsed in sorted(parts.items(), key=lambda entry: -entry[1]):
        print(f"{part:40} {elapsed:9.3f} ms {elapsed / total:7.1%}")


if __name__ == "__main__":
    main()
