"""Plain torch versions of every kernel: what a kernel must compute, written to be read.

The norms, silu_mul and rope also are the decoder's own path where no kernel replaces them. The rest loops over rows and
tokens and is only an oracle.
"""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale x by the root mean square of its last axis, computed in float32, then by weight in x's dtype."""
    x32 = x.float()
    normalized = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return normalized.to(x.dtype) * weight


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + delta, and the rms_norm of that sum; both in x's dtype."""
    total = x + delta
    return total, rms_norm(total, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, where gate_up [..., 2 * n] holds gate in its first half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the heads of x [T, num_heads, head_dim]; cos and sin are [T, head_dim / 2] float32.

    Element i turns with element i + head_dim / 2 (the NeoX pairing). Computes in float32, returns x's dtype.
    Source: Su et al. 2021 (RoFormer), section 3.2.2.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, D / 2]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lengths: list[int],
    query_lengths: list[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return causal attention over each row's paged context, and the log-sum-exp of its scores.

    query: [T, num_heads, head_dim], rows one after another; a row's last query stands at its last context position.
    key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim]. block_tables: [R, max_blocks].
    Head h reads K/V head h // (num_heads / num_kv_heads). A query that sees nothing gets zeros and -inf. Computes in
    float32.
    Returns [T, num_heads, head_dim] in query's dtype, and [T, num_heads] float32.
    """
    block_size = key_cache.shape[2]
    group_size = query.shape[1] // key_cache.shape[1]
    outputs, sums = [], []
    start = 0
    for row, (context_length, query_length) in enumerate(zip(context_lengths, query_lengths, strict=True)):
        positions = range(context_length)
        blocks = [int(block_tables[row, position // block_size]) for position in positions]
        offsets = [position % block_size for position in positions]
        keys = key_cache[blocks, :, offsets].float().repeat_interleave(group_size, dim=1)  # [C, H, D]
        values = value_cache[blocks, :, offsets].float().repeat_interleave(group_size, dim=1)
        for i in range(query_length):
            visible = context_length - query_length + i + 1
            if visible <= 0:
                outputs.append(torch.zeros_like(query[start + i], dtype=torch.float32))
                sums.append(torch.full((query.shape[1],), -torch.inf))
                continue
            scores = torch.einsum("hd,chd->hc", query[start + i].float(), keys[:visible]) * scale
            outputs.append(torch.einsum("hc,chd->hd", scores.softmax(-1), values[:visible]))
            sums.append(scores.logsumexp(-1))
        start += query_length
    return torch.stack(outputs).to(query.dtype), torch.stack(sums)


def write_kv(
    query_key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Rotate queries and keys, write keys and values into their slots in place, and return the rotated queries.

    query_key: [T, num_heads + num_kv_heads, head_dim], the heads of the queries first. value: [T, num_kv_heads,
    head_dim]. cos, sin: as for rope. slot_mapping: [T], block_id * block_size + offset; -1 writes nothing.
    Returns [T, num_heads, head_dim].
    """
    num_kv_heads, block_size = key_cache.shape[1:3]
    rotated = rope(query_key, cos, sin)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            key_cache[block, :, offset] = rotated[token, -num_kv_heads:]
            value_cache[block, :, offset] = value[token]
    return rotated[:, :-num_kv_heads]


def copy_blocks(cache: torch.Tensor, sources: list[int], destinations: list[int]) -> None:
    """Copy whole blocks of one cache tensor in place, reading every source before any destination is written."""
    before = cache.clone()
    for source, destination in zip(sources, destinations, strict=True):
        cache[destination] = before[source]
