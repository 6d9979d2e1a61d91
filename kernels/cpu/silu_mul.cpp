// The gate of an MLP: silu(gate) * up.
#include <cmath>

#include "radixserve_cpu.h"
#include "silu_mul.h"

namespace radixserve {
namespace {

void silu_mul_row(const float* gate, const float* up, float* result, int64_t size) {
    // With this order of operands the minimum of NaN is NaN.
    const Floats limit = broadcast(128.0f), log2_e = broadcast(-1.44269504088896341f), one = broadcast(1.0f);
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        const Floats x = load(gate + i);
        const Floats power = exp2(_mm256_min_ps(limit, _mm256_mul_ps(x, log2_e)));
        const Floats silu = _mm256_div_ps(x, _mm256_add_ps(one, power));
        store(result + i, _mm256_mul_ps(silu, load(up + i)));
    }
    for (; i < size; ++i) result[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
}

}  // namespace

void silu_mul(const float* gate_up, int64_t stride, float* result, int64_t num_rows, int64_t size) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows; ++row) {
        const float* gate = gate_up + row * stride;
        silu_mul_row(gate, gate + size, result + row * size, size);
    }
}

}  // namespace radixserve

void radixserve_silu_mul(const float* gate_up, int64_t stride, float* result, int64_t num_rows, int64_t size,
                         int32_t num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    radixserve::silu_mul(gate_up, stride, result, num_rows, size);
}
