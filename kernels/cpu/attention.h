// What the two attention kernels share: where K/V lies, what is to be computed, and how partial results are kept.
//
// A row is a sequence's new tokens, the last of which stands at the end of its context. It is cut into tiles of tokens,
// and a tile's context into splits of a fixed number of keys. How a row is cut depends on the row alone. A split of one
// K/V head is gone through in chunks, in order, for all query heads that share the K/V head: by one task, or by several,
// each of which goes on from the running softmax that the one before has left. Tiles whose tables begin with the same
// blocks share the tasks of these. No operation on a query's numbers depends on what other queries a task has, so no
// result depends on the other rows of a step, nor on the number of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>

#include "simd.h"

namespace radixserve {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLn2 = 0.693147180559945309f;
// Keys that are taken at a time: their scores, and their values in any usual head size, stay in the first-level cache.
constexpr int kChunk = 64;

// Some tokens of a row. num_visible: keys that the first of them sees, itself included; each next one sees one more.
// workspace: where the partial results of its splits begin, in floats; -1 if one task does all of a K/V head.
struct Tile {
    int64_t row, first_token, num_tokens, num_visible, split_tokens, num_splits, workspace;
};

// Keys [begin, end) of one split of each member, the same blocks in all of their tables. All are of one token, or all of
// several and of equal split_tokens. A task that does not begin with the split goes on where an earlier phase has ended.
// Of several members each sees all of the keys, and there are whole chunks of them.
struct Task {
    int64_t kv_head, begin, end, first_member, num_members;
};

// What is the same for all layers of a step. members: tiles by their places. phase_ends: where the tasks of each phase
// end; those of one phase may run in any order. block_tables: [rows, table_stride].
struct Plan {
    const Tile* tiles;
    const Task* tasks;
    const int64_t* members;
    const int64_t* phase_ends;
    const int64_t* block_tables;
    float* workspace;
    int64_t num_tiles, num_phases, table_stride;
};

// The tiles of a task.
struct Members {
    const Tile* tiles;
    const int64_t* places;
    int64_t count;

    const Tile& operator[](int64_t member) const { return tiles[places[member]]; }
};

// Strides are in elements. K/V: [num_blocks, num_kv_heads, block_size, head_dim], the last axis contiguous.
struct Layer {
    const float* query;
    int64_t query_token_stride, query_head_stride;
    const void* key;
    const void* value;
    int64_t block_stride, kv_head_stride, slot_stride;
    int64_t num_kv_heads, group_size, head_dim, block_size;
    float* output;    // [tokens, num_kv_heads * group_size, head_dim]
    float* log_sums;  // [tokens, num_kv_heads * group_size], or null
    float scale;
    int32_t lanes;  // of the vectors that several tokens are computed in: 8, or 0 for the most there are
};

// The running softmax of queries over a part of their context. Query m of a tile is head m % group_size of token
// m / group_size; those of a task's members follow each other. Weights are powers of two: scores are in units of ln 2.
struct Partial {
    float* sums;     // [queries, head_dim], of values by their weights
    float* maxima;   // [queries], the largest score
    float* weights;  // [queries], the sum of the weights 2 ** (score - maximum)
};

inline int64_t partial_size(int64_t num_queries, int64_t head_dim) { return num_queries * (head_dim + 2); }

inline Partial partial_at(float* memory, int64_t num_queries, int64_t head_dim) {
    float* maxima = memory + num_queries * head_dim;
    return {memory, maxima, maxima + num_queries};
}

inline void clear(const Partial& partial, int64_t num_queries, int64_t head_dim) {
    std::fill_n(partial.sums, num_queries * head_dim, 0.0f);
    std::fill_n(partial.maxima, num_queries, -kInfinity);
    std::fill_n(partial.weights, num_queries, 0.0f);
}

// Compute a layer's attention; the threads of the parallel region that it is called in share the work, and all must call
// it. It ends with a barrier. Sets has_memory to false if there was none.
void attend_layer(const Plan& plan, const Layer& layer, bool is_half, std::atomic<bool>& has_memory);

// Find a K/V head's slots from begin on: kChunk of them, or those before end. The rest of slots, if one was found, gets
// the address of the last one, so that loops may go on to a multiple of what they take at once. Returns how many.
template <typename Stored>
inline int locate(const void* cache, const Layer& layer, const int64_t* block_table, int64_t kv_head, int64_t begin,
                  int64_t end, const Stored* slots[kChunk]) {
    const int count = static_cast<int>(std::clamp<int64_t>(end - begin, 0, kChunk));
    const Stored* head = static_cast<const Stored*>(cache) + kv_head * layer.kv_head_stride;
    int64_t block = begin / layer.block_size, offset = begin % layer.block_size;
    for (int i = 0; i < count; ++block, offset = 0) {
        const Stored* slot = head + block_table[block] * layer.block_stride + offset * layer.slot_stride;
        for (; offset < layer.block_size && i < count; ++offset, ++i, slot += layer.slot_stride) slots[i] = slot;
    }
    if (count > 0) std::fill(slots + count, slots + kChunk, slots[count - 1]);
    return count;
}

// Copy the queries of a tile's K/V head to [num_tokens * group_size, head_dim], scaled so that scores are in units of
// ln 2.
inline void scale_queries(const Layer& layer, const Tile& tile, int64_t kv_head, float* scaled) {
    const Floats scale = broadcast(layer.scale / kLn2);
    for (int64_t token = 0; token < tile.num_tokens; ++token) {
        const float* query = layer.query + (tile.first_token + token) * layer.query_token_stride +
                             kv_head * layer.group_size * layer.query_head_stride;
        for (int64_t head = 0; head < layer.group_size; ++head, query += layer.query_head_stride) {
            for (int64_t d = 0; d < layer.head_dim; d += kLanes, scaled += kLanes) {
                store(scaled, _mm256_mul_ps(load(query + d), scale));
            }
        }
    }
}

// Turn the scores of one query, [count] and readable to the next multiple of 8, into weights, and count them in.
// Returns what earlier sums must be multiplied by.
inline float softmax(float* scores, int count, float& maximum, float& weight) {
    for (int i = count; i % kLanes != 0; ++i) scores[i] = -kInfinity;
    Floats highest = broadcast(maximum);
    for (int i = 0; i < count; i += kLanes) highest = _mm256_max_ps(highest, load(scores + i));
    const float raised = largest(highest);
    const Floats origin = broadcast(raised);
    Floats total = _mm256_setzero_ps();
    for (int i = 0; i < count; i += kLanes) {
        const Floats weights = exp2(_mm256_sub_ps(load(scores + i), origin));
        total = _mm256_add_ps(total, weights);
        store(scores + i, weights);
    }
    const float shrink = first(exp2(broadcast(maximum - raised)));
    maximum = raised;
    weight = weight * shrink + sum(total);
    return shrink;
}

}  // namespace radixserve
