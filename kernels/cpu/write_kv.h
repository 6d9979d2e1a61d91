// Rotate queries and keys, and store keys and values, in one pass over the fused projection.
#pragma once

#include <cstdint>

#include "simd.h"

namespace radixserve {

// query_key: [num_tokens, num_heads + num_kv_heads, head_dim], the queries first. value: [num_tokens, num_kv_heads,
// head_dim]. cos, sin: [num_tokens, head_dim / 2]. query: [num_tokens, num_heads, head_dim], contiguous. slots:
// block_id * block_size + offset of each token; a token with a negative one is rotated and not stored.
struct Write {
    const float* query_key;
    int64_t query_key_token_stride, query_key_head_stride;
    const float* value;
    int64_t value_token_stride, value_head_stride;
    const float* cos;
    const float* sin;
    int64_t angle_stride;
    const int64_t* slots;
    float* query;
    void* key_cache;
    void* value_cache;
    int64_t block_stride, kv_head_stride, slot_stride;
    int64_t num_tokens, num_heads, num_kv_heads, head_dim, block_size;
};

// Write tokens to caches of float16 or float. The threads of the parallel region that it is called in share the work, and
// all must call it; it ends with a barrier.
void write_kv(const Write& write, bool is_half);

}  // namespace radixserve
