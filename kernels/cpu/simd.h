// Eight floats at a time, in AVX2, FMA and F16C. Include it last: what follows it is compiled for these instructions,
// and the standard library's own templates, which the linker may share with other code, must not be.
#pragma once

#include <immintrin.h>

#include <cstdint>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

namespace radixserve {

using Floats = __m256;
constexpr int kLanes = 8;

// A float16 as it is stored; arithmetic is in float alone.
struct Half {
    uint16_t bits;
};

inline Floats load(const float* source) { return _mm256_loadu_ps(source); }

inline Floats load(const Half* source) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
}

inline void store(float* target, Floats values) { _mm256_storeu_ps(target, values); }

inline void store(Half* target, Floats values) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}

inline Floats broadcast(float value) { return _mm256_set1_ps(value); }

inline float first(Floats values) { return _mm256_cvtss_f32(values); }

// The sum of the lanes, added in pairs: always in the same order.
inline float sum(Floats values) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// The sums of four vectors' lanes, side by side.
inline __m128 sums_of(Floats a, Floats b, Floats c, Floats d) {
    Floats pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}

inline float largest(Floats values) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// 2 ** x within 2e-7 of itself; 0 below 2 ** -126, infinity above 2 ** 127.5, NaN for NaN. x must not exceed 128.
//
// The power of the nearest integer goes straight into the exponent; the rest, within half of 0, into a polynomial that
// was fitted by minimising the largest relative error.
inline Floats exp2(Floats x) {
    // With this order of operands the maximum of NaN is NaN.
    x = _mm256_max_ps(broadcast(-127.0f), x);
    Floats whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    Floats rest = _mm256_sub_ps(x, whole);
    Floats power = broadcast(1.535336182e-04f);
    power = _mm256_fmadd_ps(power, rest, broadcast(1.339887445e-03f));
    power = _mm256_fmadd_ps(power, rest, broadcast(9.618437358e-03f));
    power = _mm256_fmadd_ps(power, rest, broadcast(5.550332471e-02f));
    power = _mm256_fmadd_ps(power, rest, broadcast(2.402264791e-01f));
    power = _mm256_fmadd_ps(power, rest, broadcast(6.931472029e-01f));
    power = _mm256_fmadd_ps(power, rest, broadcast(1.0f));
    __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(power, _mm256_castsi256_ps(exponent));
}

// Transpose eight rows of eight floats in place.
inline void transpose(Floats rows[8]) {
    Floats pairs[8], fours[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        for (int j = 0; j < 2; ++j) {
            fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
            fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xEE);
        }
    }
    for (int i = 0; i < 4; ++i) {
        rows[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
        rows[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
    }
}

}  // namespace radixserve
