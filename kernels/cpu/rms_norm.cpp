// RMSNorm, alone or of a sum: each row is read once from memory, summed in float and written once.
#include <cmath>

#include "radixserve_cpu.h"
#include "simd.h"

namespace radixserve {
namespace {

float sum_of_squares(const float* row, int64_t size) {
    // Four running sums, as one would wait for itself.
    Floats sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    int64_t i = 0;
    for (; i + 4 * kLanes <= size; i += 4 * kLanes) {
        for (int j = 0; j < 4; ++j) {
            const Floats x = load(row + i + j * kLanes);
            sums[j] = _mm256_fmadd_ps(x, x, sums[j]);
        }
    }
    for (; i + kLanes <= size; i += kLanes) {
        const Floats x = load(row + i);
        sums[0] = _mm256_fmadd_ps(x, x, sums[0]);
    }
    float total = sum(_mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3])));
    for (; i < size; ++i) total += row[i] * row[i];
    return total;
}

void add(const float* x, const float* delta, float* total, int64_t size) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(total + i, _mm256_add_ps(load(x + i), load(delta + i)));
    for (; i < size; ++i) total[i] = x[i] + delta[i];
}

void normalize(const float* x, const float* weight, float eps, float* normalized, int64_t size) {
    const float scale = 1.0f / std::sqrt(sum_of_squares(x, size) / static_cast<float>(size) + eps);
    const Floats scales = broadcast(scale);
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        store(normalized + i, _mm256_mul_ps(_mm256_mul_ps(load(x + i), scales), load(weight + i)));
    }
    for (; i < size; ++i) normalized[i] = x[i] * scale * weight[i];
}

}  // namespace
}  // namespace radixserve

void radixserve_rms_norm(const float* x, int64_t token_stride, int64_t head_stride, const float* delta,
                         int64_t delta_stride, const float* weight, float eps, float* normalized, float* total,
                         int64_t num_tokens, int64_t num_heads, int64_t row_size, int32_t num_threads) {
    using namespace radixserve;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
    for (int64_t r = 0; r < num_tokens * num_heads; ++r) {
        const float* row = x + r / num_heads * token_stride + r % num_heads * head_stride;
        if (delta != nullptr) {
            add(row, delta + r * delta_stride, total + r * row_size, row_size);
            row = total + r * row_size;
        }
        normalize(row, weight + r % num_heads * row_size, eps, normalized + r * row_size, row_size);
    }
}
