// Attention of several tokens of a row, as two small matrix products for each tile of queries and chunk of keys.
#pragma once

#include "attention.h"
#include "product.h"
#include "simd.h"

namespace radixserve {

// Queries that see a chunk together: whole tiles of registers in any vectors, and their scores are in the first-level
// cache.
constexpr int kRows = 12;
constexpr int kPanel = 32;
// What the columns of a product are a multiple of in the widest vectors.
constexpr int kWidest = 16;

// Keys of a chunk, transposed: panels of 32 keys, each [head_dim, 32]. Values: [kChunk, head_dim].
struct Packed {
    float* keys;
    float* values;
};

// Pack a chunk of count keys. Places behind them, up to a whole panel, get copies of the last one, whose scores nobody
// reads.
template <typename Stored>
inline void pack(const Stored* const* keys, const Stored* const* values, int count, int64_t head_dim,
                 const Packed& packed) {
    for (int k = 0; k < count; ++k) {
        for (int64_t d = 0; d < head_dim; d += kLanes) store(packed.values + k * head_dim + d, load(values[k] + d));
    }
    for (int k = 0; k < (count + kPanel - 1) / kPanel * kPanel; k += kLanes) {
        float* panel = packed.keys + k / kPanel * kPanel * head_dim + k % kPanel;
        for (int64_t d = 0; d < head_dim; d += kLanes) {
            Floats square[kLanes];
            for (int j = 0; j < kLanes; ++j) square[j] = load(keys[k + j] + d);
            transpose(square);
            for (int j = 0; j < kLanes; ++j) store(panel + (d + j) * kPanel, square[j]);
        }
    }
}

// Let num_rows queries see a packed chunk. visible: how many of its keys each one sees, never falling, the last one at
// least one.
inline void attend_rows(int num_rows, const float* queries, const Packed& packed, const int* visible, int64_t head_dim,
                        Multiply multiply, const Partial& partial) {
    float scores[kRows * kChunk];
    float shrink[kRows];
    const int seen = visible[num_rows - 1];
    for (int k = 0; k < seen; k += kPanel) {
        const int num_keys = std::min(kPanel, (seen - k + kWidest - 1) / kWidest * kWidest);
        multiply({queries, head_dim, packed.keys + k * head_dim, kPanel, scores + k, kChunk, nullptr, num_rows,
                  num_keys, head_dim});
    }
    for (int r = 0; r < num_rows; ++r) {
        float* row = scores + r * kChunk;
        shrink[r] = visible[r] == 0 ? 1.0f : softmax(row, visible[r], partial.maxima[r], partial.weights[r]);
        std::fill(row + visible[r], row + seen, 0.0f);
    }
    multiply({scores, kChunk, packed.values, head_dim, partial.sums, head_dim, shrink, num_rows, head_dim, seen});
}

// Let queries [num_queries, head_dim] of the members' tokens see the task's keys, each those that it may. packed: room
// for a chunk.
template <typename Stored>
void prefill(const Layer& layer, const int64_t* block_table, const Task& task, const Members& members,
             const float* queries, const Packed& packed, const Partial& partial) {
    const int64_t head_dim = layer.head_dim;
    const Multiply multiply = multiply_with(layer.lanes, head_dim);
    const Stored* keys[kChunk];
    const Stored* values[kChunk];
    for (int64_t chunk = task.begin; chunk < task.end; chunk += kChunk) {
        const int count = locate(layer.key, layer, block_table, task.kv_head, chunk, task.end, keys);
        locate(layer.value, layer, block_table, task.kv_head, chunk, task.end, values);
        pack(keys, values, count, head_dim, packed);
        int64_t first = 0;
        for (int64_t member = 0; member < members.count; ++member) {
            const Tile& tile = members[member];
            const int64_t num_queries = tile.num_tokens * layer.group_size;
            for (int64_t q = 0; q < num_queries; q += kRows) {
                const int num_rows = static_cast<int>(std::min<int64_t>(kRows, num_queries - q));
                int visible[kRows];
                for (int r = 0; r < num_rows; ++r) {
                    const int64_t left = tile.num_visible + (q + r) / layer.group_size - chunk;
                    visible[r] = static_cast<int>(std::clamp<int64_t>(left, 0, count));
                }
                if (visible[num_rows - 1] == 0) continue;
                const int64_t place = first + q;
                const Partial theirs = {partial.sums + place * head_dim, partial.maxima + place,
                                        partial.weights + place};
                attend_rows(num_rows, queries + place * head_dim, packed, visible, head_dim, multiply, theirs);
            }
            first += num_queries;
        }
    }
}

}  // namespace radixserve
