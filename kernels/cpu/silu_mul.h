// The gate of an MLP: silu(gate) * up.
#pragma once

#include <cstdint>

#include "simd.h"

namespace radixserve {

// gate_up: [num_rows, 2 * size], the gate first. result: [num_rows, size]. The threads of the parallel region that it is
// called in share the work, and all must call it; it ends with a barrier.
void silu_mul(const float* gate_up, int64_t stride, float* result, int64_t num_rows, int64_t size);

}  // namespace radixserve
