"""How much does the engine add to the calls that a decode step is made of?

    python benchmarks/composed_step.py --rows 1 8 16 --context 1024

Three ways to compute a step of the demo model on a CPU, in turn in one process:

    composed    the calls alone, one after another: float16 projections (fbgemm), C++ kernels over float16 K/V, argmax
    lean        what plain torch offers: fused float32 weights with F.linear, K/V gathered for torch's attention
    engine      EngineCore.step and its frame: scheduler, cache, executor, sampler, text. executor is its part inside

The first two have no scheduler, batch, cache or decoder: weights are read from the file, and the K/V of a row, random
numbers, lie in shuffled blocks. Both get the same, and their logits are compared before anything is measured. The
engine's requests are greedy, of random prompts, and pass the stated context in the middle of the measurement. Threads
wait as they do in the engine's process. Prints a JSON line for each number of rows, milliseconds a step.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from generating_engine import BLOCK_SIZE, generating_engine
from torch.nn import functional

from radixserve.core.batch import SampledTokens, ScheduledBatch
from radixserve.engine.client import THREAD_ENVIRONMENT
from radixserve.engine.frames import encode_frame
from radixserve.kernels.cpu.paged_attention import paged_attention, plan_attention
from radixserve.kernels.cpu.rms_norm import add_rms_norm, rms_norm
from radixserve.kernels.cpu.silu_mul import silu_mul
from radixserve.kernels.cpu.write_kv import write_kv
from radixserve.kernels.reference import rope
from radixserve.model.config import ModelConfig
from radixserve.model.gguf_config import read_gguf_config
from radixserve.model.gguf_source import GGUFSource
from radixserve.model_path import resolve_model_path
from radixserve.runner.executor import Executor

NUM_WARM_UP_STEPS = 5


@dataclass(slots=True, frozen=True)
class Layer:
    """float32 weights of a layer; qkv and gate_up are fused."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    attention_output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(slots=True, frozen=True)
class Model:
    """A model with tied embeddings, and the context that its steps attend to.

    blocks: [rows, blocks of a row]. keys, values: [layers, blocks, num_kv_heads, BLOCK_SIZE, head_dim] float16.
    """

    config: ModelConfig
    embedding: torch.Tensor
    layers: list[Layer]
    norm: torch.Tensor
    frequencies: torch.Tensor
    context: int
    blocks: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def num_rows(self) -> int:
        return len(self.blocks)

    def rotation(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of the rows' last positions, [rows, head_dim / 2]."""
        angles = torch.full((self.num_rows, 1), float(self.context - 1)) * self.frequencies
        return angles.cos(), angles.sin()


def read_model(config: ModelConfig, source: GGUFSource, num_rows: int, context: int) -> Model:
    """Read the weights, and make up a context for each row."""

    def fused(layer: int, *names: str) -> torch.Tensor:
        return torch.cat([source.read(f"model.layers.{layer}.{name}.weight") for name in names])

    layers = [
        Layer(
            input_norm=fused(layer, "input_layernorm"),
            qkv=fused(layer, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            attention_output=fused(layer, "self_attn.o_proj"),
            mlp_norm=fused(layer, "post_attention_layernorm"),
            gate_up=fused(layer, "mlp.gate_proj", "mlp.up_proj"),
            down=fused(layer, "mlp.down_proj"),
        )
        for layer in range(config.num_layers)
    ]
    # Keys are small, as large ones would let a few of them, and the rounding of their scores, decide everything.
    num_blocks = -(-context // BLOCK_SIZE)
    shape = (config.num_layers, num_rows * num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    return Model(
        config=config,
        embedding=source.read("model.embed_tokens.weight"),
        layers=layers,
        norm=source.read("model.norm.weight"),
        frequencies=1.0 / config.rope.theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim),
        context=context,
        blocks=torch.randperm(num_rows * num_blocks).view(num_rows, num_blocks),
        keys=torch.randn(shape).mul_(0.1).half(),
        values=torch.randn(shape).half(),
    )


class ComposedStep:
    """The fast calls. A step takes the tokens of the one before."""

    def __init__(self, model: Model) -> None:
        def pack(weight: torch.Tensor) -> Any:
            return torch.ops.quantized.linear_prepack_fp16(weight, None)

        self._model = model
        self._embedding = model.embedding.half()
        self._packed = [
            (pack(layer.qkv), pack(layer.attention_output), pack(layer.gate_up), pack(layer.down))
            for layer in model.layers
        ]
        self._lm_head = pack(model.embedding)
        self._slots = model.blocks[:, (model.context - 1) // BLOCK_SIZE] * BLOCK_SIZE + (model.context - 1) % BLOCK_SIZE
        self.token_ids = torch.zeros(model.num_rows, dtype=torch.int64)

    @torch.inference_mode()
    def logits(self) -> torch.Tensor:
        model, config = self._model, self._model.config
        linear = torch.ops.quantized.linear_dynamic_fp16
        num_rotated, eps = config.num_heads + config.num_kv_heads, config.rms_norm_eps
        cos, sin = model.rotation()
        plan = plan_attention(
            [1] * model.num_rows,
            [model.context] * model.num_rows,
            model.blocks,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        hidden = functional.embedding(self.token_ids, self._embedding).float()
        x = rms_norm(hidden, model.layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in model.layers[1:]] + [model.norm]
        for index, layer in enumerate(model.layers):
            qkv, attention_output, gate_up, down = self._packed[index]
            keys, values = model.keys[index], model.values[index]
            heads = linear(x, qkv).view(model.num_rows, num_rotated + config.num_kv_heads, config.head_dim)
            query = write_kv(heads[:, :num_rotated], heads[:, num_rotated:], cos, sin, keys, values, self._slots)
            attended = paged_attention(query, keys, values, plan, scale=config.head_dim**-0.5)
            hidden, x = add_rms_norm(hidden, linear(attended.flatten(1), attention_output), layer.mlp_norm, eps)
            hidden, x = add_rms_norm(hidden, linear(silu_mul(linear(x, gate_up)), down), next_norms[index], eps)
        logits: torch.Tensor = linear(x, self._lm_head)
        return logits

    def run(self) -> None:
        self.token_ids = torch.tensor(self.logits().argmax(dim=-1).tolist())


class LeanStep:
    """The same in plain torch. Its K/V are copies in float32."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._keys, self._values = model.keys.float(), model.values.float()
        self.token_ids = torch.zeros(model.num_rows, dtype=torch.int64)

    @torch.inference_mode()
    def logits(self) -> torch.Tensor:
        model, config = self._model, self._model.config
        eps, size = config.rms_norm_eps, (config.hidden_size,)
        cos, sin = model.rotation()
        block_ids, offset = model.blocks[:, (model.context - 1) // BLOCK_SIZE], (model.context - 1) % BLOCK_SIZE
        hidden = functional.embedding(self.token_ids, model.embedding)
        for layer, keys, values in zip(model.layers, self._keys, self._values, strict=True):
            x = functional.rms_norm(hidden, size, layer.input_norm, eps)
            heads = functional.linear(x, layer.qkv).view(model.num_rows, -1, config.head_dim)
            query_key, value = heads.split((config.num_heads + config.num_kv_heads, config.num_kv_heads), dim=1)
            query, key = rope(query_key, cos, sin).split((config.num_heads, config.num_kv_heads), dim=1)
            keys[block_ids, :, offset], values[block_ids, :, offset] = key, value
            attended = functional.scaled_dot_product_attention(
                query.reshape(model.num_rows, config.num_kv_heads, -1, config.head_dim),
                self._gather(keys),
                self._gather(values),
            )
            hidden = hidden + functional.linear(attended.reshape(model.num_rows, -1), layer.attention_output)
            x = functional.rms_norm(hidden, size, layer.mlp_norm, eps)
            gate, up = functional.linear(x, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + functional.linear(functional.silu(gate) * up, layer.down)
        return functional.linear(functional.rms_norm(hidden, size, model.norm, eps), model.embedding)

    def run(self) -> None:
        self.token_ids = torch.tensor(self.logits().argmax(dim=-1).tolist())

    def _gather(self, cache: torch.Tensor) -> torch.Tensor:
        """Return [rows, num_kv_heads, context, head_dim]."""
        model, config = self._model, self._model.config
        blocks = cache.index_select(0, model.blocks.flatten())
        blocks = blocks.view(model.num_rows, -1, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        return blocks.transpose(1, 2).reshape(model.num_rows, config.num_kv_heads, -1, config.head_dim)[
            :, :, : model.context
        ]


class TimedExecutor:
    """Implements Executor with another one, and notes how long its last step took."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.seconds = 0.0

    def execute(self, batch: ScheduledBatch) -> SampledTokens:
        began = time.perf_counter()
        sampled = self._executor.execute(batch)
        self.seconds = time.perf_counter() - began
        return sampled


class EngineStep:
    """An engine whose requests all generate, num_rows of them, until num_steps steps were run."""

    def __init__(self, num_rows: int, context: int, num_steps: int) -> None:
        self._num_rows = num_rows
        self.executor: TimedExecutor

        def wrap(executor: Executor) -> TimedExecutor:
            self.executor = TimedExecutor(executor)
            return self.executor

        self._core = generating_engine(num_rows, context - num_steps // 2, num_steps, wrap=wrap)

    def run(self) -> None:
        output = self._core.step()
        encode_frame(output)
        assert len(output.deltas) == self._num_rows, "a request has ended, so this step is of fewer rows"


def timed(run: Callable[[], None]) -> float:
    """Return how long it took, in milliseconds."""
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e3


def check_alike(composed: torch.Tensor, lean: torch.Tensor) -> None:
    """Exit if two compositions do not compute the same."""
    difference = (composed - lean).norm() / lean.norm()
    if not difference < 0.02:
        raise SystemExit(
            f"composed and lean differ by {difference:.3f} of the logits' norm; they are not the same model"
        )


def measure(num_rows: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Time blocks of steps in turn; each figure is of the medians of the blocks."""
    path = resolve_model_path(None)
    config = read_gguf_config(path)
    model = read_model(config, GGUFSource(path, config), num_rows, arguments.context)
    composed, lean = ComposedStep(model), LeanStep(model)
    check_alike(composed.logits(), lean.logits())
    engine = EngineStep(num_rows, arguments.context, NUM_WARM_UP_STEPS + arguments.repeat * arguments.steps)
    for step in (composed, lean, engine):
        for _ in range(NUM_WARM_UP_STEPS):
            step.run()
    blocks: dict[str, list[list[float]]] = {name: [] for name in ("composed", "engine", "executor", "lean")}
    for _ in range(arguments.repeat):
        blocks["composed"].append([timed(composed.run) for _ in range(arguments.steps)])
        own = [(timed(engine.run), engine.executor.seconds * 1e3) for _ in range(arguments.steps)]
        blocks["engine"].append([whole for whole, _ in own])
        blocks["executor"].append([part for _, part in own])
        blocks["lean"].append([timed(lean.run) for _ in range(arguments.steps)])
    medians = {name: [statistics.median(block) for block in values] for name, values in blocks.items()}
    fastest = {name: min(min(block) for block in values) for name, values in blocks.items()}
    middle = {name: statistics.median(values) for name, values in medians.items()}

    def ratio(one: str, other: str) -> dict[str, float]:
        each = sorted(a / b for a, b in zip(medians[one], medians[other], strict=True))
        return {"median": statistics.median(each), "fastest": fastest[one] / fastest[other]}

    return {
        "rows": num_rows,
        "context": arguments.context,
        "median_ms": middle,
        "fastest_ms": fastest,
        "engine_to_composed": ratio("engine", "composed"),
        "executor_to_composed": ratio("executor", "composed"),
        "lean_to_engine": ratio("lean", "engine"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="steps of each kind in a repeat")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    if not THREAD_ENVIRONMENT.keys() & os.environ.keys():  # it is read when the library is loaded
        os.execve(sys.executable, sys.orig_argv, os.environ | THREAD_ENVIRONMENT)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    for num_rows in arguments.rows:
        document = measure(num_rows, arguments)
        document |= {"repeat": arguments.repeat, "steps": arguments.steps, "threads": arguments.threads}
        document |= {"cpu": torch.backends.cpu.get_cpu_capability(), "torch": str(torch.__version__)}
        document |= {"load_average": os.getloadavg()}
        print(msgspec.json.encode(document).decode(), flush=True)


if __name__ == "__main__":
    main()
