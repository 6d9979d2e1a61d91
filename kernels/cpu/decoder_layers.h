// All layers of a decoder for the tokens of a step, one kernel after another in one parallel region.
#pragma once

#include <cstdint>

#include "linear.h"

namespace radixserve {

// qk_norm: [num_heads + num_kv_heads, head_dim], or null. next_norm: of the layer behind it, or the last one of all.
struct DecoderLayer {
    const Projection* qkv;
    const Projection* attention_output;
    const Projection* gate_up;
    const Projection* down;
    const float* qk_norm;
    const float* mlp_norm;
    const float* next_norm;
};

// What is the same at every step.
struct DecoderLayers {
    const DecoderLayer* layers;
    const float* first_norm;
    int64_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size;
    float norm_eps, attention_scale;
};

// What is computed in a step. plan: the struct of attention.h. key_caches, value_caches: [num_layers], all alike, with
// strides in elements. hidden: [num_tokens, hidden_size], the embeddings, and at the end the last sums. normed: as
// hidden, the result. query, attended: [num_tokens, num_heads * head_dim]. Of the rest there is one row for each of
// tokens_at_once: projected, as wide as the wider of qkv and gate_up; gated, [intermediate_size]; delta, [hidden_size].
struct DecoderStep {
    const void* plan;
    void* const* key_caches;
    void* const* value_caches;
    int64_t block_stride, kv_head_stride, slot_stride, block_size;
    const float* cos;
    const float* sin;
    int64_t angle_stride;
    const int64_t* slots;
    float* hidden;
    float* normed;
    float* query;
    float* attended;
    float* projected;
    float* gated;
    float* delta;
    int64_t num_tokens, tokens_at_once;
};

}  // namespace radixserve
