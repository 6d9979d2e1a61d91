// Attention of one token of each row: K/V is streamed from memory once, for all query heads, and rows, that share it.
#pragma once

#include "attention.h"
#include "simd.h"

namespace radixserve {

// Queries that are computed side by side. Three by four keys are twelve running sums, and sixteen registers hold these.
constexpr int kSideBySide = 3;
constexpr int kKeysAtOnce = 4;

// What is seen next: keys and values of count slots. Of these and of the keys that come after them, what nobody has asked
// for yet, or null.
template <typename Stored>
struct Chunk {
    const Stored* const* keys;
    const Stored* const* values;
    const Stored* const* unread_values;
    const Stored* const* next_keys;
    int count;
};

// Ask for a part of a slot that is read soon. What hardware fetches by itself ends with a page, every block or two.
template <typename Stored>
inline void prefetch(const Stored* part, int64_t size) {
    constexpr int64_t kLine = 64 / sizeof(Stored);
    for (int64_t d = 0; d < size; d += kLine) _mm_prefetch(reinterpret_cast<const char*>(part + d), _MM_HINT_T0);
}

// Dot products of queries [kQueries, head_dim] and keys, to scores [kQueries, kChunk]. Asks for the values meanwhile.
template <int kQueries, typename Stored>
inline void score(const float* queries, const Chunk<Stored>& chunk, int64_t head_dim, float* scores) {
    for (int k = 0; k < chunk.count; k += kKeysAtOnce) {
        const Stored* const* keys = chunk.keys + k;
        if (chunk.unread_values != nullptr) {
            for (int j = 0; j < kKeysAtOnce; ++j) prefetch(chunk.unread_values[k + j], head_dim);
        }
        Floats sums[kQueries][kKeysAtOnce];
        for (auto& row : sums) {
            for (Floats& dot : row) dot = _mm256_setzero_ps();
        }
        for (int64_t d = 0; d < head_dim; d += kLanes) {
            Floats key[kKeysAtOnce];
            for (int j = 0; j < kKeysAtOnce; ++j) key[j] = load(keys[j] + d);
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

// Shrink kVectors columns of sums [kQueries, head_dim] and add the values by their weights [kQueries, kChunk]. Asks for
// the same columns of the next keys meanwhile.
template <int kQueries, int kVectors, typename Stored>
inline void add_columns(const float* weights, const Chunk<Stored>& chunk, int64_t column, int64_t head_dim,
                        const float* shrink, float* sums) {
    Floats totals[kQueries][kVectors];
    for (int q = 0; q < kQueries; ++q) {
        for (int v = 0; v < kVectors; ++v) {
            const Floats before = load(sums + q * head_dim + column + v * kLanes);
            totals[q][v] = _mm256_mul_ps(before, broadcast(shrink[q]));
        }
    }
    for (int k = 0; k < chunk.count; ++k) {
        if (chunk.next_keys != nullptr) prefetch(chunk.next_keys[k] + column, kVectors * kLanes);
        Floats weight[kQueries];
        for (int q = 0; q < kQueries; ++q) weight[q] = _mm256_broadcast_ss(weights + q * kChunk + k);
        for (int v = 0; v < kVectors; ++v) {
            const Floats value = load(chunk.values[k] + column + v * kLanes);
            for (int q = 0; q < kQueries; ++q) totals[q][v] = _mm256_fmadd_ps(weight[q], value, totals[q][v]);
        }
    }
    for (int q = 0; q < kQueries; ++q) {
        for (int v = 0; v < kVectors; ++v) store(sums + q * head_dim + column + v * kLanes, totals[q][v]);
    }
}

// Let queries [kQueries, head_dim] see a chunk.
template <int kQueries, typename Stored>
inline void attend(const float* queries, const Chunk<Stored>& chunk, int64_t head_dim, const Partial& partial) {
    float scores[kQueries * kChunk];
    float shrink[kQueries];
    score<kQueries>(queries, chunk, head_dim, scores);
    for (int q = 0; q < kQueries; ++q) {
        shrink[q] = softmax(scores + q * kChunk, chunk.count, partial.maxima[q], partial.weights[q]);
    }
    int64_t d = 0;
    for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes) {
        add_columns<kQueries, 4>(scores, chunk, d, head_dim, shrink, partial.sums);
    }
    for (; d < head_dim; d += kLanes) add_columns<kQueries, 1>(scores, chunk, d, head_dim, shrink, partial.sums);
}

// Let queries [num_queries, head_dim] see a chunk.
template <typename Stored>
inline void attend_all(const float* queries, int64_t num_queries, Chunk<Stored> chunk, int64_t head_dim,
                       const Partial& partial) {
    for (int64_t q = 0; q < num_queries;) {
        const int64_t left = num_queries - q;
        const int64_t num_passes = (left + kSideBySide - 1) / kSideBySide;
        const int64_t taken = (left + num_passes - 1) / num_passes;  // 4 queries are 2 and 2, not 3 and 1
        const float* some = queries + q * head_dim;
        const Partial theirs = {partial.sums + q * head_dim, partial.maxima + q, partial.weights + q};
        if (taken == 3) attend<3>(some, chunk, head_dim, theirs);
        if (taken == 2) attend<2>(some, chunk, head_dim, theirs);
        if (taken == 1) attend<1>(some, chunk, head_dim, theirs);
        chunk.unread_values = chunk.next_keys = nullptr;  // the first queries have asked for them
        q += taken;
    }
}

// Let queries [num_queries, head_dim] of one token each see the task's keys.
template <typename Stored>
void decode(const Layer& layer, const int64_t* block_table, const Task& task, const float* queries,
            int64_t num_queries, const Partial& partial) {
    const Stored* key_slots[2][kChunk];
    const Stored* values[kChunk];
    const Stored** keys = key_slots[0];
    const Stored** next_keys = key_slots[1];
    int count = locate(layer.key, layer, block_table, task.kv_head, task.begin, task.end, keys);
    for (int k = 0; k < count; ++k) prefetch(keys[k], layer.head_dim);
    for (int64_t chunk = task.begin; count > 0; chunk += kChunk) {
        locate(layer.value, layer, block_table, task.kv_head, chunk, task.end, values);
        const int next_count = locate(layer.key, layer, block_table, task.kv_head, chunk + kChunk, task.end, next_keys);
        const Chunk<Stored> seen = {keys, values, values, next_count > 0 ? next_keys : nullptr, count};
        attend_all<Stored>(queries, num_queries, seen, layer.head_dim, partial);
        std::swap(keys, next_keys);
        count = next_count;
    }
}

}  // namespace radixserve
