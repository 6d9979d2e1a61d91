// Projections: which vectors they are computed in, and how a weight is brought into panels.
#include <algorithm>

#include "linear.h"
#include "radixserve_cpu.h"

namespace radixserve {
namespace {

// Turn weights [num_outputs, num_inputs], at most 8 of each, into halfs [num_inputs, 8 of 32]. Outputs that there are not
// become zeros.
void pack_square(const float* weight, int64_t stride, int64_t num_outputs, int64_t num_inputs, Half* panel) {
    Floats square[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
        if (i < num_outputs && num_inputs == kLanes) {
            square[i] = load(weight + i * stride);
            continue;
        }
        float row[kLanes] = {};
        for (int64_t k = 0; k < num_inputs && i < num_outputs; ++k) row[k] = weight[i * stride + k];
        square[i] = load(row);
    }
    transpose(square);
    for (int64_t k = 0; k < num_inputs; ++k) store(panel + k * kPanelOutputs, square[k]);
}

void pack_panel(const float* weight, int64_t stride, int64_t num_outputs, int64_t in_features, Half* panel) {
    for (int64_t k = 0; k < in_features; k += kLanes) {
        const int64_t num_inputs = std::min<int64_t>(kLanes, in_features - k);
        for (int64_t output = 0; output < kPanelOutputs; output += kLanes) {
            pack_square(weight + output * stride + k, stride, num_outputs - output, num_inputs,
                        panel + k * kPanelOutputs + output);
        }
    }
}

bool has_avx512() { return __builtin_cpu_supports("avx512f"); }

}  // namespace

void project(const Projection& projection, const ProjectedRows& rows) {
    static const auto widest = has_avx512() ? project_avx512 : project_avx2;
    widest(projection, rows);
}

}  // namespace radixserve

int32_t radixserve_has_avx512() { return radixserve::has_avx512(); }

void radixserve_pack_weight(const float* weight, int64_t stride, int64_t out_features, int64_t in_features,
                            void* panels, int32_t num_threads) {
    using namespace radixserve;
    const int64_t num_panels = (out_features + kPanelOutputs - 1) / kPanelOutputs;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
    for (int64_t panel = 0; panel < num_panels; ++panel) {
        const int64_t output = panel * kPanelOutputs;
        pack_panel(weight + output * stride, stride, out_features - output, in_features,
                   static_cast<Half*>(panels) + output * in_features);
    }
}

void radixserve_linear(const void* projection, const void* rows, int32_t lanes, int32_t num_threads) {
    using namespace radixserve;
    const auto& weight = *static_cast<const Projection*>(projection);
    const auto& some = *static_cast<const ProjectedRows*>(rows);
    const auto kernel = lanes == 16 ? project_avx512 : lanes == 8 ? project_avx2 : project;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    kernel(weight, some);
}
