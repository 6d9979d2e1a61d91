// RMSNorm, alone or of a sum: each row is read once from memory, summed in float and written once.
#include <cmath>

#include "radixserve_cpu.h"
#include "rms_norm.h"

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

void rms_norm(const Norm& norm) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < norm.num_tokens * norm.num_heads; ++r) {
        const int64_t token = r / norm.num_heads, head = r % norm.num_heads;
        const float* row = norm.x + token * norm.token_stride + head * norm.head_stride;
        if (norm.delta != nullptr) {
            float* total = norm.total + r * norm.row_size;
            add(row, norm.delta + r * norm.delta_stride, total, norm.row_size);
            row = total;
        }
        float* normalized = norm.normalized + token * norm.normalized_token_stride + head * norm.row_size;
        normalize(row, norm.weight + head * norm.row_size, norm.eps, normalized, norm.row_size);
    }
}

}  // namespace radixserve

void radixserve_rms_norm(const void* norm, int32_t num_threads) {
    using namespace radixserve;
    const auto& all = *static_cast<const Norm*>(norm);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    rms_norm(all);
}
