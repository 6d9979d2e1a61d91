// Which vectors a product is computed in.
#include "product.h"

#include "radixserve_cpu.h"

namespace radixserve {

Multiply multiply_with(int32_t lanes, int64_t num_columns) {
    static const bool has_avx512 = radixserve_has_avx512();
    return lanes != 8 && has_avx512 && num_columns % 16 == 0 ? multiply_avx512 : multiply_avx2;
}

}  // namespace radixserve
