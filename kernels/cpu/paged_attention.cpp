// Causal attention over the paged K/V cache, for rows of one new token and of several.
#include <omp.h>

#include <atomic>

#include "decode.h"
#include "prefill.h"
#include "radixserve_cpu.h"

namespace radixserve {
namespace {

thread_local Scratch scratch;
thread_local Scratch whole;

// Write one query's attention, and its log-sum-exp if asked for. weight is 0 if it saw no key.
void finish(const Layer& layer, int64_t token, int64_t head, const float* sums, float maximum, float weight) {
    const int64_t place = token * layer.num_kv_heads * layer.group_size + head;
    const Floats share = broadcast(weight == 0.0f ? 0.0f : 1.0f / weight);
    float* output = layer.output + place * layer.head_dim;
    for (int64_t d = 0; d < layer.head_dim; d += kLanes) store(output + d, _mm256_mul_ps(load(sums + d), share));
    if (layer.log_sums != nullptr) layer.log_sums[place] = maximum * kLn2 + std::log(weight);
}

template <typename Stored>
void run(const Plan& plan, const Layer& layer, const Task& task) {
    const Tile& tile = plan.tiles[task.tile];
    const int64_t num_queries = tile.num_tokens * layer.group_size;
    const int64_t size = partial_size(num_queries, layer.head_dim);
    const int64_t part = task.kv_head * tile.num_splits + task.split;
    float* memory = tile.num_splits > 1 ? plan.workspace + tile.workspace + part * size : whole.floats(size);
    const Partial partial = partial_at(memory, num_queries, layer.head_dim);
    clear(partial, num_queries, layer.head_dim);

    const int64_t* block_table = plan.block_tables + tile.row * plan.table_stride;
    const int64_t context = tile.num_visible + tile.num_tokens - 1;
    const int64_t begin = task.split * tile.split_tokens;
    const int64_t end = std::min(context, begin + tile.split_tokens);
    const auto kernel = tile.num_tokens == 1 ? decode<Stored> : prefill<Stored>;
    kernel(layer, block_table, tile, task.kv_head, begin, end, scratch, partial);
    if (tile.num_splits > 1) return;
    for (int64_t q = 0; q < num_queries; ++q) {
        const int64_t head = task.kv_head * layer.group_size + q % layer.group_size;
        finish(layer, tile.first_token + q / layer.group_size, head, partial.sums + q * layer.head_dim,
               partial.maxima[q], partial.weights[q]);
    }
}

// Put the splits of one query together.
void merge(const Plan& plan, const Layer& layer, const Tile& tile, int64_t kv_head, int64_t q) {
    const int64_t num_queries = tile.num_tokens * layer.group_size;
    const int64_t size = partial_size(num_queries, layer.head_dim);
    float* parts = plan.workspace + tile.workspace + kv_head * tile.num_splits * size;
    Partial total = partial_at(parts, num_queries, layer.head_dim);
    for (int64_t split = 1; split < tile.num_splits; ++split) {
        const Partial part = partial_at(parts + split * size, num_queries, layer.head_dim);
        // A query sees no key of a later split than its own.
        if (part.weights[q] == 0.0f) break;
        const Floats highest = _mm256_max_ps(broadcast(total.maxima[q]), broadcast(part.maxima[q]));
        const Floats shrink = exp2(_mm256_sub_ps(broadcast(total.maxima[q]), highest));
        const Floats factor = exp2(_mm256_sub_ps(broadcast(part.maxima[q]), highest));
        for (int64_t d = q * layer.head_dim; d < (q + 1) * layer.head_dim; d += kLanes) {
            const Floats shrunk = _mm256_mul_ps(load(total.sums + d), shrink);
            store(total.sums + d, _mm256_fmadd_ps(load(part.sums + d), factor, shrunk));
        }
        total.weights[q] = total.weights[q] * first(shrink) + part.weights[q] * first(factor);
        total.maxima[q] = first(highest);
    }
    const int64_t head = kv_head * layer.group_size + q % layer.group_size;
    finish(layer, tile.first_token + q / layer.group_size, head, total.sums + q * layer.head_dim, total.maxima[q],
           total.weights[q]);
}

void merge_tile(const Plan& plan, const Layer& layer, const Tile& tile) {
    for (int64_t kv_head = 0; kv_head < layer.num_kv_heads; ++kv_head) {
        for (int64_t q = 0; q < tile.num_tokens * layer.group_size; ++q) merge(plan, layer, tile, kv_head, q);
    }
}

template <typename Stored>
bool run_all(const Plan& plan, const Layer& layer, int num_threads) {
    std::atomic<bool> has_memory{true};
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < plan.num_tasks; ++task) {
            try {
                run<Stored>(plan, layer, plan.tasks[task]);
            } catch (const std::bad_alloc&) {  // no exception may leave a parallel region
                has_memory = false;
            }
        }
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < plan.num_tiles; ++tile) {
            if (plan.tiles[tile].num_splits > 1 && has_memory) merge_tile(plan, layer, plan.tiles[tile]);
        }
    }
    return has_memory;
}

}  // namespace
}  // namespace radixserve

int radixserve_paged_attention(const void* plan, const void* layer, int32_t is_half, int32_t num_threads) {
    using namespace radixserve;
    const auto& whole_plan = *static_cast<const Plan*>(plan);
    const auto& one_layer = *static_cast<const Layer*>(layer);
    const auto run_stored = is_half ? run_all<Half> : run_all<float>;
    return run_stored(whole_plan, one_layer, num_threads) ? 0 : 1;
}
