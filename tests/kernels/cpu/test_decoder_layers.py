"""All layers in one call against the same kernels called one by one."""

import dataclasses

import pytest
import torch

from radixserve.kernels.cpu.decoder_layers import DecoderLayers, KVCaches, LayersShape, LayerWeights
from radixserve.kernels.cpu.linear import PackedProjection, linear, pack_projection
from radixserve.kernels.cpu.paged_attention import AttentionPlan, paged_attention, plan_attention
from radixserve.kernels.cpu.rms_norm import add_rms_norm, rms_norm
from radixserve.kernels.cpu.silu_mul import silu_mul
from radixserve.kernels.cpu.weight_memory import WeightMemory
from radixserve.kernels.cpu.write_kv import write_kv

BLOCK_SIZE = 4
SHAPE = LayersShape(hidden_size=40, intermediate_size=27, num_heads=6, num_kv_heads=2, head_dim=8, norm_eps=1e-5)
NUM_HEADS, NUM_KV_HEADS = SHAPE.num_heads, SHAPE.num_kv_heads


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def projection(in_features: int, out_features: int, *, has_bias: bool, seed: int) -> PackedProjection:
    weight = random(out_features, in_features, seed=seed) / in_features**0.5
    return pack_projection(weight, random(out_features, seed=seed) if has_bias else None, WeightMemory())


def random_layer(seed: int, *, has_bias: bool = False, has_qk_norm: bool = False) -> LayerWeights:
    query_size, key_size = NUM_HEADS * SHAPE.head_dim, NUM_KV_HEADS * SHAPE.head_dim
    return LayerWeights(
        input_norm=random(SHAPE.hidden_size, seed=seed),
        qkv=projection(SHAPE.hidden_size, query_size + 2 * key_size, has_bias=has_bias, seed=seed + 1),
        qk_norm=random(NUM_HEADS + NUM_KV_HEADS, SHAPE.head_dim, seed=seed + 2) if has_qk_norm else None,
        attention_output=projection(query_size, SHAPE.hidden_size, has_bias=has_bias, seed=seed + 3),
        mlp_norm=random(SHAPE.hidden_size, seed=seed + 4),
        gate_up=projection(SHAPE.hidden_size, 2 * SHAPE.intermediate_size, has_bias=has_bias, seed=seed + 5),
        down=projection(SHAPE.intermediate_size, SHAPE.hidden_size, has_bias=has_bias, seed=seed + 6),
    )


@dataclasses.dataclass
class Step:
    """Rows of new tokens behind contexts that are in the caches, each in blocks of its own."""

    hidden: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    plan: AttentionPlan
    caches: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def random(cls, rows: list[tuple[int, int]], num_layers: int, dtype: torch.dtype = torch.float16) -> "Step":
        """Return a step of rows (new tokens, tokens before them)."""
        num_blocks = -(-max(sum(row) for row in rows) // BLOCK_SIZE)
        tables = torch.arange(len(rows) * num_blocks).view(len(rows), num_blocks)
        positions = [torch.arange(before, before + new) for new, before in rows]
        slots = [
            table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for table, at in zip(tables, positions, strict=True)
        ]
        num_tokens = sum(new for new, _ in rows)
        plan = plan_attention(
            [new for new, _ in rows],
            [sum(row) for row in rows],
            tables,
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=SHAPE.head_dim,
            block_size=BLOCK_SIZE,
        )
        shape = (len(rows) * num_blocks, NUM_KV_HEADS, BLOCK_SIZE, SHAPE.head_dim)
        return cls(
            hidden=random(num_tokens, SHAPE.hidden_size, seed=90),
            cos=random(num_tokens, SHAPE.head_dim // 2, seed=91),
            sin=random(num_tokens, SHAPE.head_dim // 2, seed=92),
            slots=torch.cat(slots),
            plan=plan,
            caches=[
                (random(*shape, seed=layer).to(dtype), random(*shape, seed=layer + 50).to(dtype))
                for layer in range(num_layers)
            ],
        )

    def copy(self) -> "Step":
        caches = [(key.clone(), value.clone()) for key, value in self.caches]
        return dataclasses.replace(self, hidden=self.hidden.clone(), caches=caches)

    def run(self, layers: DecoderLayers) -> torch.Tensor:
        keys, values = zip(*self.caches, strict=True)
        return layers.run(self.hidden, self.cos, self.sin, self.slots, self.plan, KVCaches(keys, values))

    def run_composed(self, layers: list[LayerWeights], last_norm: torch.Tensor) -> torch.Tensor:
        eps, num_rotated = SHAPE.norm_eps, NUM_HEADS + NUM_KV_HEADS
        hidden = self.hidden
        x = rms_norm(hidden, layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in layers[1:]] + [last_norm]
        for layer, next_norm, (key, value) in zip(layers, next_norms, self.caches, strict=True):
            heads = linear(x, layer.qkv).view(len(x), num_rotated + NUM_KV_HEADS, SHAPE.head_dim)
            query_key = heads[:, :num_rotated]
            if layer.qk_norm is not None:
                query_key = rms_norm(query_key, layer.qk_norm, eps)
            query = write_kv(query_key, heads[:, num_rotated:], self.cos, self.sin, key, value, self.slots)
            attended = paged_attention(query, key, value, self.plan, scale=SHAPE.head_dim**-0.5).flatten(1)
            hidden, x = add_rms_norm(hidden, linear(attended, layer.attention_output), layer.mlp_norm, eps)
            hidden, x = add_rms_norm(hidden, linear(silu_mul(linear(x, layer.gate_up)), layer.down), next_norm, eps)
        return x


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("has_bias", "has_qk_norm"), [(False, False), (True, False), (False, True), (True, True)])
def test_one_call_gives_the_bits_of_its_kernels_and_the_same_keys_and_values(
    has_bias: bool, has_qk_norm: bool, dtype: torch.dtype
) -> None:
    weights = [random_layer(10 * layer, has_bias=has_bias, has_qk_norm=has_qk_norm) for layer in range(3)]
    last_norm = random(SHAPE.hidden_size, seed=99)
    layers = DecoderLayers(weights, last_norm, SHAPE)
    # The last ones need more memory than those before and more tokens than go through the projections together.
    for rows in ([(1, 0)], [(1, 30), (5, 0), (1, 600)], [(3, 2500)], [(7, 3), (300, 9), (1, 2)], [(1, 1)]):
        step = Step.random(rows, len(weights), dtype)
        other = step.copy()
        assert torch.equal(step.run(layers), other.run_composed(weights, last_norm))
        for caches, other_caches in zip(step.caches, other.caches, strict=True):
            assert all(torch.equal(*pair) for pair in zip(caches, other_caches, strict=True))


def test_a_result_stays_as_it_is_in_the_next_step() -> None:
    layers = DecoderLayers([random_layer(0)], random(SHAPE.hidden_size), SHAPE)
    first = Step.random([(4, 0)], 1).run(layers)
    kept = first.clone()
    Step.random([(1, 9), (3, 3)], 1).run(layers)
    assert torch.equal(first, kept)


def test_weights_that_do_not_fit_are_named() -> None:
    norm = random(SHAPE.hidden_size)
    layer = random_layer(0)
    for wrong, named in (
        (dataclasses.replace(layer, qkv=layer.down), "qkv takes 27 to 40"),
        (dataclasses.replace(layer, gate_up=layer.qkv), "gate_up takes 40 to 80"),
        (dataclasses.replace(layer, down=layer.attention_output), "down takes 48 to 40"),
        (dataclasses.replace(layer, attention_output=layer.down), "attention_output takes 27"),
        (dataclasses.replace(layer, mlp_norm=norm[1:]), "mlp_norm"),
        (dataclasses.replace(layer, input_norm=norm.half()), "input_norm is torch.float16"),
        (dataclasses.replace(layer, qk_norm=norm), "qk_norm"),
    ):
        with pytest.raises(ValueError, match=named):
            DecoderLayers([layer, wrong], norm, SHAPE)
    with pytest.raises(ValueError, match="last_norm"):
        DecoderLayers([layer], norm[1:], SHAPE)


def test_a_step_that_does_not_fit_is_named() -> None:
    layers = DecoderLayers([random_layer(0)], random(SHAPE.hidden_size), SHAPE)
    step = Step.random([(4, 0)], 1)
    for wrong, named in (
        (dataclasses.replace(step, hidden=step.hidden[1:]), "hidden"),
        (dataclasses.replace(step, hidden=step.hidden.double()), "float64"),
        (dataclasses.replace(step, cos=step.cos[:, 1:]), "cos"),
        (dataclasses.replace(step, sin=step.sin.T.contiguous().T), "sin.*contiguous"),
        (dataclasses.replace(step, slots=step.slots.int()), "slot_mapping is torch.int32"),
        (dataclasses.replace(step, caches=step.caches * 2), "2 layers' caches"),
        (dataclasses.replace(step, plan=dataclasses.replace(step.plan, query_shape=(6, 16))), "the plan"),
    ):
        with pytest.raises(ValueError, match=named):
            wrong.run(layers)


def test_caches_must_be_alike() -> None:
    cache = torch.zeros(3, 2, 4, 8)
    for other in (cache.half(), cache[1:], torch.zeros(3, 4, 2, 8).transpose(1, 2)):
        with pytest.raises(ValueError, match="must be alike"):
            KVCaches([cache, other], [cache, other])
