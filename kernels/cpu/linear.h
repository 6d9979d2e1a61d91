// y = x * transpose(weight) + bias: weights stored in float16, everything else in float.
//
// A sum takes its products in order, one fused multiply-add each, and then the bias, which may be much larger. So it is
// the same to the last bit whatever rows are computed beside it, in whichever tiles and vectors, by how many threads.
#pragma once

#include <cstdint>

#include "simd.h"

namespace radixserve {

// Outputs of a panel: their weights of one input are a cache line.
constexpr int kPanelOutputs = 32;

// panels: [ceil(out_features / 32), in_features, 32], on a border of a cache line, zero for outputs that there are not.
// bias: as many as the panels have outputs, or null.
struct Projection {
    const Half* panels;
    const float* bias;
    int64_t in_features, out_features;
};

// x: [count, in_features], y: [count, out_features], with strides in elements.
struct ProjectedRows {
    const float* x;
    int64_t x_stride;
    float* y;
    int64_t y_stride;
    int64_t count;
};

// Project rows. All threads of the parallel region that it is called in must call it, and share the work; it ends with a
// barrier. Outside of one, the caller does all of it.
using Project = void (*)(const Projection&, const ProjectedRows&);

// In vectors of one kind, which the CPU must have. They are pointers, as a function that is declared for other
// instructions than it is defined for would be taken for another one.
extern const Project project_avx2, project_avx512;

// In the widest vectors that the CPU has.
void project(const Projection& projection, const ProjectedRows& rows);

}  // namespace radixserve
