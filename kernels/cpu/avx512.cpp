// Projections and small products in AVX-512: the only code that takes more of the CPU than AVX2, FMA and F16C.
#include <cstdint>
#include <cstring>
#include <utility>

#include "linear.h"
#include "product.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC target("avx512f")
#endif

#include "linear_tiles.h"
#include "product_tiles.h"

namespace radixserve {
namespace {

struct Avx512 {
    using Vector = __m512;
    static constexpr int kLanes = 16, kMaxRows = 14, kMaxSums = 28;  // of thirty-two registers

    static Vector load(const Half* source) {
        return _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
    }
    static Vector load(const float* source) { return _mm512_loadu_ps(source); }
    static void store(float* target, Vector values) { _mm512_storeu_ps(target, values); }
    static Vector broadcast(float value) { return _mm512_set1_ps(value); }
    static Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
    static Vector multiply(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
    static Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
};

}  // namespace

const Project project_avx512 = project_in<Avx512>;
const Multiply multiply_avx512 = multiply_in<Avx512>;

}  // namespace radixserve
