// Attention of one token of each row: K/V is streamed from memory once, for all query heads that share it.
#pragma once

#include "attention.h"
#include "scratch.h"
#include "simd.h"

namespace radixserve {

// Queries that are computed side by side. Three by four keys are twelve running sums, and sixteen registers hold these.
constexpr int kSideBySide = 3;
constexpr int kKeysAtOnce = 4;

// Dot products of queries [kQueries, head_dim] and keys, to scores [kQueries, kChunk]. count is a multiple of 4.
template <int kQueries, typename Stored>
inline void score(const float* queries, const Stored* const* keys, int count, int64_t head_dim, float* scores) {
    for (int k = 0; k < count; k += kKeysAtOnce) {
        Floats sums[kQueries][kKeysAtOnce];
        for (auto& row : sums) {
            for (Floats& dot : row) dot = _mm256_setzero_ps();
        }
        for (int64_t d = 0; d < head_dim; d += kLanes) {
            Floats key[kKeysAtOnce];
            for (int j = 0; j < kKeysAtOnce; ++j) key[j] = load(keys[k + j] + d);
            for (int q = 0; q < kQueries; ++q) {
                const Floats query = load(queries + q * head_dim + d);
                for (int j = 0; j < kKeysAtOnce; ++j) sums[q][j] = _mm256_fmadd_ps(query, key[j], sums[q][j]);
            }
        }
        for (int q = 0; q < kQueries; ++q) {
            _mm_storeu_ps(scores + q * kChunk + k, sums_of(sums[q][0], sums[q][1], sums[q][2], sums[q][3]));
        }
    }
}

// Shrink kVectors columns of sums [kQueries, head_dim] and add the values by their weights [kQueries, kChunk].
template <int kQueries, int kVectors, typename Stored>
inline void add_columns(const float* weights, const Stored* const* values, int count, int64_t column,
                        int64_t head_dim, const float* shrink, float* sums) {
    Floats totals[kQueries][kVectors];
    for (int q = 0; q < kQueries; ++q) {
        for (int v = 0; v < kVectors; ++v) {
            const Floats before = load(sums + q * head_dim + column + v * kLanes);
            totals[q][v] = _mm256_mul_ps(before, broadcast(shrink[q]));
        }
    }
    for (int k = 0; k < count; ++k) {
        Floats weight[kQueries];
        for (int q = 0; q < kQueries; ++q) weight[q] = _mm256_broadcast_ss(weights + q * kChunk + k);
        for (int v = 0; v < kVectors; ++v) {
            const Floats value = load(values[k] + column + v * kLanes);
            for (int q = 0; q < kQueries; ++q) totals[q][v] = _mm256_fmadd_ps(weight[q], value, totals[q][v]);
        }
    }
    for (int q = 0; q < kQueries; ++q) {
        for (int v = 0; v < kVectors; ++v) store(sums + q * head_dim + column + v * kLanes, totals[q][v]);
    }
}

template <int kQueries, typename Stored>
inline void add_values(const float* weights, const Stored* const* values, int count, int64_t head_dim,
                       const float* shrink, float* sums) {
    int64_t d = 0;
    for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes) {
        add_columns<kQueries, 4>(weights, values, count, d, head_dim, shrink, sums);
    }
    for (; d < head_dim; d += kLanes) add_columns<kQueries, 1>(weights, values, count, d, head_dim, shrink, sums);
}

// Let queries [kQueries, head_dim] see count more keys, at most kChunk. keys is padded to a multiple of 4.
template <int kQueries, typename Stored>
inline void attend(const float* queries, const Stored* const* keys, const Stored* const* values, int count,
                   int64_t head_dim, Partial partial) {
    float scores[kQueries * kChunk];
    float shrink[kQueries];
    score<kQueries>(queries, keys, (count + kKeysAtOnce - 1) / kKeysAtOnce * kKeysAtOnce, head_dim, scores);
    for (int q = 0; q < kQueries; ++q) {
        shrink[q] = softmax(scores + q * kChunk, count, partial.maxima[q], partial.weights[q]);
    }
    add_values<kQueries>(scores, values, count, head_dim, shrink, partial.sums);
}

// Attend a tile of one token to keys [begin, end). partial is clear.
template <typename Stored>
void decode(const Layer& layer, const int64_t* block_table, const Tile& tile, int64_t kv_head, int64_t begin,
            int64_t end, Scratch& scratch, const Partial& partial) {
    float* queries = scratch.floats(layer.group_size * layer.head_dim);
    scale_queries(layer, tile, kv_head, queries);
    const Stored* keys[kChunk];
    const Stored* values[kChunk];
    for (int64_t chunk = begin; chunk < end; chunk += kChunk) {
        const int count = static_cast<int>(std::min<int64_t>(kChunk, end - chunk));
        locate(layer.key, layer, block_table, kv_head, chunk, count, keys);
        locate(layer.value, layer, block_table, kv_head, chunk, count, values);
        for (int i = count; i % kKeysAtOnce != 0; ++i) keys[i] = keys[count - 1];
        for (int64_t q = 0; q < layer.group_size;) {
            const int64_t left = layer.group_size - q;
            const int64_t num_passes = (left + kSideBySide - 1) / kSideBySide;
            const int64_t taken = (left + num_passes - 1) / num_passes;  // 4 queries are 2 and 2, not 3 and 1
            const float* some = queries + q * layer.head_dim;
            const Partial theirs = {partial.sums + q * layer.head_dim, partial.maxima + q, partial.weights + q};
            if (taken == 3) attend<3>(some, keys, values, count, layer.head_dim, theirs);
            if (taken == 2) attend<2>(some, keys, values, count, layer.head_dim, theirs);
            if (taken == 1) attend<1>(some, keys, values, count, layer.head_dim, theirs);
            q += taken;
        }
    }
}

}  // namespace radixserve
