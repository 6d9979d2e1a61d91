// Attention of several tokens of a row, as two small matrix products for each tile of queries and chunk of keys.
#pragma once

#include "attention.h"
#include "simd.h"

namespace radixserve {

// Six queries by two vectors are twelve running sums, which sixteen registers hold with what they are made of.
constexpr int kRows = 6;
constexpr int kPanel = 2 * kLanes;

// result [kNumRows, kVectors * 8] = left [kNumRows, depth] * right [depth, kVectors * 8], plus result * shrink if that
// is given. The products of an element are added in order, whatever kNumRows is.
template <int kNumRows, int kVectors>
inline void multiply(const float* left, int64_t left_stride, const float* right, int64_t right_stride, int64_t depth,
                     const float* shrink, float* result, int64_t result_stride) {
    Floats sums[kNumRows][kVectors];
    for (int r = 0; r < kNumRows; ++r) {
        for (int v = 0; v < kVectors; ++v) {
            sums[r][v] = shrink == nullptr ? _mm256_setzero_ps()
                                           : _mm256_mul_ps(load(result + r * result_stride + v * kLanes),
                                                           broadcast(shrink[r]));
        }
    }
    for (int64_t k = 0; k < depth; ++k) {
        Floats row[kVectors];
        for (int v = 0; v < kVectors; ++v) row[v] = load(right + k * right_stride + v * kLanes);
        for (int r = 0; r < kNumRows; ++r) {
            const Floats factor = _mm256_broadcast_ss(left + r * left_stride + k);
            for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm256_fmadd_ps(factor, row[v], sums[r][v]);
        }
    }
    for (int r = 0; r < kNumRows; ++r) {
        for (int v = 0; v < kVectors; ++v) store(result + r * result_stride + v * kLanes, sums[r][v]);
    }
}

// Keys of a chunk, transposed: panels of 16 keys, each [head_dim, 16]. Values: [kChunk, head_dim].
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

// Let kNumRows queries see a packed chunk. visible: how many of its keys each one sees, never falling, the last one at
// least one.
template <int kNumRows>
inline void attend_rows(const float* queries, const Packed& packed, const int* visible, int64_t head_dim,
                        const Partial& partial) {
    float scores[kNumRows * kChunk];
    float shrink[kNumRows];
    const int seen = visible[kNumRows - 1];
    for (int k = 0; k < seen; k += kPanel) {
        multiply<kNumRows, 2>(queries, head_dim, packed.keys + k * head_dim, kPanel, head_dim, nullptr, scores + k,
                              kChunk);
    }
    for (int r = 0; r < kNumRows; ++r) {
        float* row = scores + r * kChunk;
        shrink[r] = visible[r] == 0 ? 1.0f : softmax(row, visible[r], partial.maxima[r], partial.weights[r]);
        std::fill(row + visible[r], row + seen, 0.0f);
    }
    int64_t d = 0;
    for (; d + kPanel <= head_dim; d += kPanel) {
        multiply<kNumRows, 2>(scores, kChunk, packed.values + d, head_dim, seen, shrink, partial.sums + d, head_dim);
    }
    if (d < head_dim) {
        multiply<kNumRows, 1>(scores, kChunk, packed.values + d, head_dim, seen, shrink, partial.sums + d, head_dim);
    }
}

inline void attend_rows(int num_rows, const float* queries, const Packed& packed, const int* visible, int64_t head_dim,
                        const Partial& partial) {
    switch (num_rows) {
        case 6: return attend_rows<6>(queries, packed, visible, head_dim, partial);
        case 5: return attend_rows<5>(queries, packed, visible, head_dim, partial);
        case 4: return attend_rows<4>(queries, packed, visible, head_dim, partial);
        case 3: return attend_rows<3>(queries, packed, visible, head_dim, partial);
        case 2: return attend_rows<2>(queries, packed, visible, head_dim, partial);
        default: return attend_rows<1>(queries, packed, visible, head_dim, partial);
    }
}

// Let queries [num_queries, head_dim] of the members' tokens see the task's keys, each those that it may. packed: room
// for a chunk.
template <typename Stored>
void prefill(const Layer& layer, const int64_t* block_table, const Task& task, const Members& members,
             const float* queries, const Packed& packed, const Partial& partial) {
    const int64_t head_dim = layer.head_dim;
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
                attend_rows(num_rows, queries + place * head_dim, packed, visible, head_dim, theirs);
            }
            first += num_queries;
        }
    }
}

}  // namespace radixserve
