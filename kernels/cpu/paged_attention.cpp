// Causal attention over the paged K/V cache, for rows of one new token and of several.
#include <omp.h>

#include <atomic>
#include <cstring>

#include "decode.h"
#include "prefill.h"
#include "radixserve_cpu.h"
#include "scratch.h"

namespace radixserve {
namespace {

thread_local Scratch read;     // queries, and a packed chunk
thread_local Scratch written;  // partial results

// Write one query's attention, and its log-sum-exp if asked for. weight is 0 if it saw no key.
void finish(const Layer& layer, int64_t token, int64_t head, const float* sums, float maximum, float weight) {
    const int64_t place = token * layer.num_kv_heads * layer.group_size + head;
    const Floats share = broadcast(weight == 0.0f ? 0.0f : 1.0f / weight);
    float* output = layer.output + place * layer.head_dim;
    for (int64_t d = 0; d < layer.head_dim; d += kLanes) store(output + d, _mm256_mul_ps(load(sums + d), share));
    if (layer.log_sums != nullptr) layer.log_sums[place] = maximum * kLn2 + std::log(weight);
}

// Where the partial results of a split of a tile are kept between tasks.
Partial kept_at(const Plan& plan, const Layer& layer, const Tile& tile, int64_t kv_head, int64_t split) {
    const int64_t num_queries = tile.num_tokens * layer.group_size;
    const int64_t part = kv_head * tile.num_splits + split;
    float* memory = plan.workspace + tile.workspace + part * partial_size(num_queries, layer.head_dim);
    return partial_at(memory, num_queries, layer.head_dim);
}

void copy(const Partial& from, const Partial& to, int64_t num_queries, int64_t head_dim) {
    std::memcpy(to.sums, from.sums, num_queries * head_dim * sizeof(float));
    std::memcpy(to.maxima, from.maxima, num_queries * sizeof(float));
    std::memcpy(to.weights, from.weights, num_queries * sizeof(float));
}

// Keep what a task has made of a member's queries, or write it out if no other task has a part in them.
void hand_over(const Plan& plan, const Layer& layer, const Task& task, const Tile& tile, const Partial& partial) {
    const int64_t num_queries = tile.num_tokens * layer.group_size;
    if (tile.workspace >= 0) {
        const int64_t split = task.begin / tile.split_tokens;
        return copy(partial, kept_at(plan, layer, tile, task.kv_head, split), num_queries, layer.head_dim);
    }
    for (int64_t q = 0; q < num_queries; ++q) {
        const int64_t head = task.kv_head * layer.group_size + q % layer.group_size;
        finish(layer, tile.first_token + q / layer.group_size, head, partial.sums + q * layer.head_dim,
               partial.maxima[q], partial.weights[q]);
    }
}

template <typename Stored>
void run(const Plan& plan, const Layer& layer, const Task& task) {
    const int64_t head_dim = layer.head_dim;
    const Members members = {plan.tiles, plan.members + task.first_member, task.num_members};
    const Tile& first_tile = members[0];
    int64_t num_queries = 0;
    for (int64_t member = 0; member < members.count; ++member) {
        num_queries += members[member].num_tokens * layer.group_size;
    }
    float* queries = read.floats((num_queries + 2 * kChunk) * head_dim);
    const Partial partial = partial_at(written.floats(partial_size(num_queries, head_dim)), num_queries, head_dim);
    const bool goes_on = task.begin % first_tile.split_tokens != 0;
    if (!goes_on) clear(partial, num_queries, head_dim);

    const auto of_member = [&](int64_t place) {
        return Partial{partial.sums + place * head_dim, partial.maxima + place, partial.weights + place};
    };
    for (int64_t member = 0, place = 0; member < members.count; ++member) {
        const Tile& tile = members[member];
        scale_queries(layer, tile, task.kv_head, queries + place * head_dim);
        const int64_t count = tile.num_tokens * layer.group_size;
        if (goes_on) {
            const int64_t split = task.begin / tile.split_tokens;
            copy(kept_at(plan, layer, tile, task.kv_head, split), of_member(place), count, head_dim);
        }
        place += count;
    }
    const int64_t* block_table = plan.block_tables + first_tile.row * plan.table_stride;
    if (first_tile.num_tokens == 1) {
        decode<Stored>(layer, block_table, task, queries, num_queries, partial);
    } else {
        float* room = queries + num_queries * head_dim;
        prefill<Stored>(layer, block_table, task, members, queries, {room, room + kChunk * head_dim}, partial);
    }
    for (int64_t member = 0, place = 0; member < members.count; ++member) {
        hand_over(plan, layer, task, members[member], of_member(place));
        place += members[member].num_tokens * layer.group_size;
    }
}

// Put the splits of one query together.
void merge(const Plan& plan, const Layer& layer, const Tile& tile, int64_t kv_head, int64_t q) {
    Partial total = kept_at(plan, layer, tile, kv_head, 0);
    for (int64_t split = 1; split < tile.num_splits; ++split) {
        const Partial part = kept_at(plan, layer, tile, kv_head, split);
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
void run_all(const Plan& plan, const Layer& layer, std::atomic<bool>& has_memory) {
    int64_t first = 0;
    for (int64_t phase = 0; phase < plan.num_phases; ++phase) {
        const int64_t end = plan.phase_ends[phase];
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = first; task < end; ++task) {
            try {
                run<Stored>(plan, layer, plan.tasks[task]);
            } catch (const std::bad_alloc&) {  // no exception may leave a parallel region
                has_memory = false;
            }
        }
        first = end;
    }
#pragma omp for schedule(static)
    for (int64_t tile = 0; tile < plan.num_tiles; ++tile) {
        if (plan.tiles[tile].workspace >= 0 && has_memory) merge_tile(plan, layer, plan.tiles[tile]);
    }
}

}  // namespace

void attend_layer(const Plan& plan, const Layer& layer, bool is_half, std::atomic<bool>& has_memory) {
    is_half ? run_all<Half>(plan, layer, has_memory) : run_all<float>(plan, layer, has_memory);
}

}  // namespace radixserve

int radixserve_paged_attention(const void* plan, const void* layer, int32_t is_half, int32_t num_threads) {
    using namespace radixserve;
    const auto& whole_plan = *static_cast<const Plan*>(plan);
    const auto& one_layer = *static_cast<const Layer*>(layer);
    std::atomic<bool> has_memory{true};
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    attend_layer(whole_plan, one_layer, is_half, has_memory);
    return has_memory ? 0 : 1;
}
