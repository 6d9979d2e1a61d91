// RMSNorm of rows, or of heads of rows, alone or of a sum.
#pragma once

#include <cstdint>

#include "simd.h"

namespace radixserve {

// Row r of x is head r % num_heads of token r / num_heads, and takes that head's weight. delta, total: [rows, row_size],
// or null for the norm alone; total is contiguous and may be x. normalized: a token's heads are contiguous; it may be x.
struct Norm {
    const float* x;
    int64_t token_stride, head_stride;
    const float* delta;
    int64_t delta_stride;
    const float* weight;
    float* normalized;
    int64_t normalized_token_stride;
    float* total;
    int64_t num_tokens, num_heads, row_size;
    float eps;
};

// Norm rows. The threads of the parallel region that it is called in share the work, and all must call it; it ends with
// a barrier.
void rms_norm(const Norm& norm);

}  // namespace radixserve
