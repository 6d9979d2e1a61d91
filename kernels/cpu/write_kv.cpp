// Rotate queries and keys, and store keys and values, in one pass over the fused projection.
#include "write_kv.h"

#include "radixserve_cpu.h"

namespace radixserve {
namespace {

inline void store_four(float* target, __m128 values) { _mm_storeu_ps(target, values); }

inline void store_four(Half* target, __m128 values) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(target), _mm_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}

// Turn element i of a head with element i + half. half is a multiple of 4.
template <typename Stored>
inline void rotate(const float* head, const float* cos, const float* sin, int64_t half, Stored* rotated) {
    int64_t i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        const Floats one = load(head + i), other = load(head + half + i), c = load(cos + i), s = load(sin + i);
        store(rotated + i, _mm256_fmsub_ps(one, c, _mm256_mul_ps(other, s)));
        store(rotated + half + i, _mm256_fmadd_ps(other, c, _mm256_mul_ps(one, s)));
    }
    if (i < half) {
        const __m128 one = _mm_loadu_ps(head + i), other = _mm_loadu_ps(head + half + i);
        const __m128 c = _mm_loadu_ps(cos + i), s = _mm_loadu_ps(sin + i);
        store_four(rotated + i, _mm_fmsub_ps(one, c, _mm_mul_ps(other, s)));
        store_four(rotated + half + i, _mm_fmadd_ps(other, c, _mm_mul_ps(one, s)));
    }
}

template <typename Stored>
void write_token(const Write& write, int64_t token) {
    const int64_t half = write.head_dim / 2;
    const float* head = write.query_key + token * write.query_key_token_stride;
    const float* cos = write.cos + token * write.angle_stride;
    const float* sin = write.sin + token * write.angle_stride;
    float* query = write.query + token * write.num_heads * write.head_dim;
    for (int64_t i = 0; i < write.num_heads; ++i, head += write.query_key_head_stride, query += write.head_dim) {
        rotate(head, cos, sin, half, query);
    }
    const int64_t slot = write.slots[token];
    if (slot < 0) return;
    const int64_t place = slot / write.block_size * write.block_stride + slot % write.block_size * write.slot_stride;
    Stored* keys = static_cast<Stored*>(write.key_cache) + place;
    Stored* values = static_cast<Stored*>(write.value_cache) + place;
    const float* value = write.value + token * write.value_token_stride;
    for (int64_t i = 0; i < write.num_kv_heads; ++i) {
        rotate(head + i * write.query_key_head_stride, cos, sin, half, keys + i * write.kv_head_stride);
        for (int64_t d = 0; d < write.head_dim; d += kLanes) {
            store(values + i * write.kv_head_stride + d, load(value + i * write.value_head_stride + d));
        }
    }
}

template <typename Stored>
void write_all(const Write& write) {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < write.num_tokens; ++token) write_token<Stored>(write, token);
}

}  // namespace

void write_kv(const Write& write, bool is_half) { is_half ? write_all<Half>(write) : write_all<float>(write); }

}  // namespace radixserve

void radixserve_write_kv(const void* write, int32_t is_half, int32_t num_threads) {
    using namespace radixserve;
    const auto& all = *static_cast<const Write*>(write);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    write_kv(all, is_half);
}
