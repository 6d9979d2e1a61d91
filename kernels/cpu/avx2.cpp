// Projections and small products in AVX2, FMA and F16C.
#include <cstdint>

#include "linear_tiles.h"
#include "product_tiles.h"

namespace radixserve {
namespace {

struct Avx2 {
    using Vector = Floats;
    static constexpr int kLanes = 8, kMaxRows = 6, kMaxSums = 12;  // of sixteen registers

    static Vector load(const Half* source) { return radixserve::load(source); }
    static Vector load(const float* source) { return radixserve::load(source); }
    static void store(float* target, Vector values) { radixserve::store(target, values); }
    static Vector broadcast(float value) { return radixserve::broadcast(value); }
    static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
    static Vector multiply(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
    static Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
};

}  // namespace

const Project project_avx2 = project_in<Avx2>;
const Multiply multiply_avx2 = multiply_in<Avx2>;

}  // namespace radixserve
