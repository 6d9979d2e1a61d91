"""RMSNorm, alone or of a sum: each row is read once, reduced in float32 and written once."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from radixserve.kernels.tiles import DTYPES, FAMILIES, TRITON_NAMES, CompileCase

MAX_ROW = 16384
# Rows that a program takes are narrow ones, the heads of q and k; together they fill a tile of so many elements.
_TILE_ELEMENTS = 2048
# Row sizes to compile for, and whether with a delta: one for each tile that heads of 64 to 128 and models have.
_COMPILED = ((64, False), (128, False), (576, True), (2048, True), (4096, True), (8192, True), (MAX_ROW, True))


# A step has any number of rows; specialised on, it would have the kernel compiled again while requests wait.
@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    normalized: tl.tensor,
    total: tl.tensor,
    eps: tl.tensor,
    num_rows: tl.tensor,
    num_heads: tl.tensor,
    row_size: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    delta_stride: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
) -> None:
    """Normalise ROWS rows. Row r is head r % num_heads of token r // num_heads, and takes that head's weight."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    is_in = (rows < num_rows)[:, None] & (columns < row_size)[None, :]  # [ROWS, BLOCK]
    tokens, heads = rows // num_heads, rows % num_heads
    places = (tokens * token_stride + heads * head_stride)[:, None] + columns[None, :]
    results = rows[:, None] * row_size + columns[None, :]

    values = tl.load(x + places, mask=is_in, other=0.0).to(tl.float32)
    if HAS_DELTA:
        values += tl.load(delta + rows[:, None] * delta_stride + columns[None, :], mask=is_in, other=0.0).to(tl.float32)
        # What is normalised is the sum as it is stored, so that the two results belong together.
        stored = values.to(total.dtype.element_ty)
        tl.store(total + results, stored, mask=is_in)
        values = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / row_size + eps)  # [ROWS]
    scaled = (values * scale[:, None]).to(normalized.dtype.element_ty).to(tl.float32)
    weights = tl.load(weight + heads[:, None] * row_size + columns[None, :], mask=is_in, other=0.0).to(tl.float32)
    tl.store(normalized + results, (scaled * weights).to(normalized.dtype.element_ty), mask=is_in)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each row of x by its root mean square, then by weight.

    x: [T, row_size], or [T, num_heads, row_size] with a weight for each head; contiguous in the last axis, so a view of
    a wider tensor will do. weight: of x's shape without T, contiguous. One dtype: float16, bfloat16 or float32.
    Returns a contiguous tensor of x's shape and dtype. Raises ValueError for anything else.
    Source: Zhang and Sennrich 2019 (RMSNorm).
    """
    _check(x, weight)
    normalized = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # Without a delta the kernel touches neither its tensor nor the sum's.
    _launch(x, x, weight, normalized, normalized, eps, has_delta=False)
    return normalized


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + delta, and the rms_norm of that sum.

    x, delta: [T, row_size], contiguous in the last axis, of one dtype. The sum is rounded to it, then normalised.
    Raises ValueError as rms_norm does.
    """
    _check(x, weight)
    if x.dim() != 2 or delta.shape != x.shape or delta.dtype != x.dtype or delta.device != x.device:
        raise ValueError(
            f"x is {x.dtype} {list(x.shape)} on {x.device}, delta {delta.dtype} {list(delta.shape)} on {delta.device}; "
            "they must be alike, and have two axes"
        )
    if delta.stride(-1) != 1:
        raise ValueError(f"delta has strides {delta.stride()}; its last axis must be contiguous")
    total, normalized = torch.empty((2, *x.shape), dtype=x.dtype, device=x.device).unbind()
    _launch(x, delta, weight, normalized, total, eps, has_delta=True)
    return total, normalized


def compile_cases() -> Iterator[CompileCase]:
    """Yield the kernel as launched for heads, and for rows of each width with a delta, without which it does less."""
    for family in FAMILIES:
        for dtype in DTYPES:
            for row_size, has_delta in _COMPILED:
                rows, block, num_warps = _tile(row_size)
                pointer = f"*{TRITON_NAMES[dtype]}"
                tensors = dict.fromkeys(("x", "delta", "weight", "normalized", "total"), pointer)
                sizes = dict.fromkeys(
                    ("num_rows", "num_heads", "row_size", "token_stride", "head_stride", "delta_stride"), "i32"
                )
                constexprs = {"ROWS": rows, "BLOCK": block, "HAS_DELTA": has_delta}
                name = "add_rms_norm" if has_delta else "rms_norm"
                yield CompileCase(
                    name=f"{name} {TRITON_NAMES[dtype]} {row_size}",
                    family=family,
                    fn=rms_norm_kernel,
                    signature=tensors | {"eps": "fp32"} | sizes | dict.fromkeys(constexprs, "constexpr"),
                    constexprs=constexprs,
                    num_warps=num_warps,
                    num_stages=1,
                    divisible_by_16=(*tensors, "row_size", "token_stride", "head_stride", "delta_stride"),
                )


def _tile(row_size: int) -> tuple[int, int, int]:
    """Return rows of a program, the width of its tile, and its warps."""
    block = triton.next_power_of_2(row_size)
    # As many elements a thread in a wide row as in a tile of narrow ones, up to the 16 warps that a program may have.
    return max(1, _TILE_ELEMENTS // block), block, min(16, max(4, block // 512))


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.dim() not in (2, 3) or weight.shape != x.shape[1:]:
        raise ValueError(
            f"x is {list(x.shape)} and weight {list(weight.shape)}; x must be [T, row_size] or [T, num_heads, "
            "row_size], and weight the same without T"
        )
    if not 1 <= x.shape[-1] <= MAX_ROW:
        raise ValueError(f"a row has {x.shape[-1]} elements; the kernel takes 1 to {MAX_ROW}")
    if x.dtype not in DTYPES or weight.dtype != x.dtype or weight.device != x.device:
        raise ValueError(
            f"x is {x.dtype} on {x.device}, weight {weight.dtype} on {weight.device}; both must be on one device, and "
            f"one of {', '.join(map(str, DTYPES))}"
        )
    if x.stride(-1) != 1 or not weight.is_contiguous():
        raise ValueError(
            f"x has strides {x.stride()} and weight {weight.stride()}; the last axis of x and all of weight must be "
            "contiguous"
        )


def _launch(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    normalized: torch.Tensor,
    total: torch.Tensor,
    eps: float,
    *,
    has_delta: bool,
) -> None:
    row_size = x.shape[-1]
    num_heads = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * num_heads
    if num_rows == 0:
        return
    rows, block, num_warps = _tile(row_size)
    rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        delta,
        weight,
        normalized,
        total,
        eps,
        num_rows,
        num_heads,
        row_size,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        delta.stride(0),
        ROWS=rows,
        BLOCK=block,
        HAS_DELTA=has_delta,
        num_warps=num_warps,
        num_stages=1,
        enable_fp_fusion=True,
    )
