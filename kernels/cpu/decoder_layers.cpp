// All layers of a decoder for the tokens of a step, one kernel after another in one parallel region.
#include "decoder_layers.h"

#include <algorithm>
#include <atomic>

#include "attention.h"
#include "radixserve_cpu.h"
#include "rms_norm.h"
#include "silu_mul.h"
#include "write_kv.h"

namespace radixserve {
namespace {

// Some tokens of a step that pass through the projections together: so the memory for what lies between these has a
// bound, and may stay in a cache.
struct Tokens {
    int64_t first, count;
};

int64_t query_size(const DecoderLayers& all) { return all.num_heads * all.head_dim; }

void norm_rows(const DecoderLayers& all, float* hidden, const float* delta, const float* weight, float* normed,
               int64_t num_tokens) {
    Norm norm = {};
    norm.x = norm.total = hidden;
    norm.delta = delta;
    norm.weight = weight;
    norm.normalized = normed;
    norm.token_stride = norm.delta_stride = norm.normalized_token_stride = norm.row_size = all.hidden_size;
    norm.num_tokens = num_tokens;
    norm.num_heads = 1;
    norm.eps = all.norm_eps;
    rms_norm(norm);
}

void norm_heads(const DecoderLayers& all, float* heads, int64_t token_stride, const float* weight, int64_t num_tokens) {
    Norm norm = {};
    norm.x = norm.normalized = heads;
    norm.token_stride = norm.normalized_token_stride = token_stride;
    norm.head_stride = norm.row_size = all.head_dim;
    norm.weight = weight;
    norm.num_tokens = num_tokens;
    norm.num_heads = all.num_heads + all.num_kv_heads;
    norm.eps = all.norm_eps;
    rms_norm(norm);
}

void project_contiguous(const Projection& projection, const float* x, float* y, int64_t count) {
    project(projection, {x, projection.in_features, y, projection.out_features, count});
}

// Project tokens to queries, keys and values, and put these in their places.
void write_tokens(const DecoderLayers& all, const DecoderLayer& layer, const DecoderStep& step, int64_t index,
                  bool is_half, Tokens tokens) {
    const int64_t num_rotated = all.num_heads + all.num_kv_heads;
    const int64_t stride = layer.qkv->out_features;
    project_contiguous(*layer.qkv, step.normed + tokens.first * all.hidden_size, step.projected, tokens.count);
    if (layer.qk_norm != nullptr) norm_heads(all, step.projected, stride, layer.qk_norm, tokens.count);
    Write write = {};
    write.query_key = step.projected;
    write.value = step.projected + num_rotated * all.head_dim;
    write.query_key_token_stride = write.value_token_stride = stride;
    write.query_key_head_stride = write.value_head_stride = all.head_dim;
    write.cos = step.cos + tokens.first * step.angle_stride;
    write.sin = step.sin + tokens.first * step.angle_stride;
    write.angle_stride = step.angle_stride;
    write.slots = step.slots + tokens.first;
    write.query = step.query + tokens.first * query_size(all);
    write.key_cache = step.key_caches[index];
    write.value_cache = step.value_caches[index];
    write.block_stride = step.block_stride;
    write.kv_head_stride = step.kv_head_stride;
    write.slot_stride = step.slot_stride;
    write.num_tokens = tokens.count;
    write.num_heads = all.num_heads;
    write.num_kv_heads = all.num_kv_heads;
    write.head_dim = all.head_dim;
    write.block_size = step.block_size;
    write_kv(write, is_half);
}

void attend_tokens(const DecoderLayers& all, const DecoderStep& step, int64_t index, bool is_half,
                   std::atomic<bool>& has_memory) {
    Layer layer = {};
    layer.query = step.query;
    layer.query_token_stride = query_size(all);
    layer.query_head_stride = layer.head_dim = all.head_dim;
    layer.key = step.key_caches[index];
    layer.value = step.value_caches[index];
    layer.block_stride = step.block_stride;
    layer.kv_head_stride = step.kv_head_stride;
    layer.slot_stride = step.slot_stride;
    layer.num_kv_heads = all.num_kv_heads;
    layer.group_size = all.num_heads / all.num_kv_heads;
    layer.block_size = step.block_size;
    layer.output = step.attended;
    layer.scale = all.attention_scale;
    attend_layer(*static_cast<const Plan*>(step.plan), layer, is_half, has_memory);
}

// From tokens' attention to the next layer's input.
void finish_tokens(const DecoderLayers& all, const DecoderLayer& layer, const DecoderStep& step, Tokens tokens) {
    float* hidden = step.hidden + tokens.first * all.hidden_size;
    float* normed = step.normed + tokens.first * all.hidden_size;
    const float* attended = step.attended + tokens.first * query_size(all);
    project_contiguous(*layer.attention_output, attended, step.delta, tokens.count);
    norm_rows(all, hidden, step.delta, layer.mlp_norm, normed, tokens.count);
    project_contiguous(*layer.gate_up, normed, step.projected, tokens.count);
    silu_mul(step.projected, 2 * all.intermediate_size, step.gated, tokens.count, all.intermediate_size);
    project_contiguous(*layer.down, step.gated, step.delta, tokens.count);
    norm_rows(all, hidden, step.delta, layer.next_norm, normed, tokens.count);
}

// Every thread of a region goes through all of it; the kernels share their work among them and wait for each other.
void run_layers(const DecoderLayers& all, const DecoderStep& step, bool is_half, std::atomic<bool>& has_memory) {
    norm_rows(all, step.hidden, nullptr, all.first_norm, step.normed, step.num_tokens);
    for (int64_t index = 0; index < all.num_layers; ++index) {
        const DecoderLayer& layer = all.layers[index];
        for (int64_t first = 0; first < step.num_tokens; first += step.tokens_at_once) {
            const int64_t count = std::min(step.tokens_at_once, step.num_tokens - first);
            write_tokens(all, layer, step, index, is_half, {first, count});
        }
        attend_tokens(all, step, index, is_half, has_memory);
        for (int64_t first = 0; first < step.num_tokens; first += step.tokens_at_once) {
            const int64_t count = std::min(step.tokens_at_once, step.num_tokens - first);
            finish_tokens(all, layer, step, {first, count});
        }
    }
}

}  // namespace
}  // namespace radixserve

int32_t radixserve_decoder_layers(const void* layers, const void* step, int32_t is_half, int32_t num_threads) {
    using namespace radixserve;
    const auto& all = *static_cast<const DecoderLayers*>(layers);
    const auto& one_step = *static_cast<const DecoderStep*>(step);
    std::atomic<bool> has_memory{true};
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    run_layers(all, one_step, is_half, has_memory);
    return has_memory ? 0 : 1;
}
