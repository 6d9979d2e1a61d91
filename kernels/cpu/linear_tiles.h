// Projections as tiles of rows by vectors of outputs, for any kind of vectors: a type with
//   Vector, kLanes    some floats
//   kMaxRows          rows of a tile, of at least two vectors
//   kMaxSums          sums that registers hold beside the weights and the factor that they are made of
//   load, store, broadcast, add, multiply_add(a, b, c), which is a * b + c
// Include it behind what says for which instructions it is compiled. A kind belongs to one source file.
#pragma once

#include <cstring>
#include <utility>

#include "linear.h"

namespace radixserve {

// How far ahead of their use weights are asked for, in halfs. What hardware fetches by itself ends with each page.
constexpr int64_t kWeightsAhead = 2048;

// Sums of kRows rows and kVectors vectors of outputs of one panel. weights and bias are those of the first output.
template <typename Kind, int kRows, int kVectors>
inline void sum_products(const Half* weights, const float* bias, int64_t in_features, const float* x, int64_t x_stride,
                         float* y, int64_t y_stride) {
    using Vector = typename Kind::Vector;
    Vector sums[kRows][kVectors];
    for (auto& row : sums) {
        for (Vector& sum : row) sum = Kind::broadcast(0.0f);
    }
    for (int64_t k = 0; k < in_features; ++k, weights += kPanelOutputs) {
        _mm_prefetch(reinterpret_cast<const char*>(weights + kWeightsAhead), _MM_HINT_T0);
        Vector weight[kVectors];
        for (int v = 0; v < kVectors; ++v) weight[v] = Kind::load(weights + v * Kind::kLanes);
        for (int r = 0; r < kRows; ++r) {
            const Vector factor = Kind::broadcast(x[r * x_stride + k]);
            for (int v = 0; v < kVectors; ++v) sums[r][v] = Kind::multiply_add(factor, weight[v], sums[r][v]);
        }
    }
    for (int v = 0; v < kVectors; ++v) {
        const Vector last = bias == nullptr ? Kind::broadcast(0.0f) : Kind::load(bias + v * Kind::kLanes);
        for (int r = 0; r < kRows; ++r) {
            Kind::store(y + r * y_stride + v * Kind::kLanes, bias == nullptr ? sums[r][v] : Kind::add(sums[r][v], last));
        }
    }
}

// Sums of kRows rows and one panel, as many vectors at a time as registers hold.
template <typename Kind, int kRows>
void sum_panel(const Half* panel, const float* bias, int64_t in_features, const float* x, int64_t x_stride, float* y,
               int64_t y_stride) {
    constexpr int kAll = kPanelOutputs / Kind::kLanes;
    constexpr int kVectors = kRows * kAll <= Kind::kMaxSums ? kAll : kAll / 2;
    static_assert(kRows * kVectors <= Kind::kMaxSums, "sums would be kept in memory");
    for (int output = 0; output < kPanelOutputs; output += kVectors * Kind::kLanes) {
        sum_products<Kind, kRows, kVectors>(panel + output, bias == nullptr ? nullptr : bias + output, in_features, x,
                                            x_stride, y + output, y_stride);
    }
}

using SumPanel = void (*)(const Half*, const float*, int64_t, const float*, int64_t, float*, int64_t);

template <typename Kind, typename RowsLessOne>
struct PanelSums;

// sum_panel for 1 to kMaxRows rows.
template <typename Kind, int... kRowsLessOne>
struct PanelSums<Kind, std::integer_sequence<int, kRowsLessOne...>> {
    static constexpr SumPanel kOfRows[] = {nullptr, sum_panel<Kind, kRowsLessOne + 1>...};
};

template <typename Kind>
void sum_tile(const Projection& projection, const ProjectedRows& rows, int64_t panel, int64_t first_row,
              int64_t num_rows) {
    const SumPanel sum = PanelSums<Kind, std::make_integer_sequence<int, Kind::kMaxRows>>::kOfRows[num_rows];
    const int64_t output = panel * kPanelOutputs;
    const Half* weights = projection.panels + output * projection.in_features;
    const float* bias = projection.bias == nullptr ? nullptr : projection.bias + output;
    const float* x = rows.x + first_row * rows.x_stride;
    float* y = rows.y + first_row * rows.y_stride + output;
    const int64_t num_outputs = projection.out_features - output;
    if (num_outputs >= kPanelOutputs) {
        return sum(weights, bias, projection.in_features, x, rows.x_stride, y, rows.y_stride);
    }
    float whole[Kind::kMaxRows * kPanelOutputs];
    sum(weights, bias, projection.in_features, x, rows.x_stride, whole, kPanelOutputs);
    for (int64_t r = 0; r < num_rows; ++r) {
        std::memcpy(y + r * rows.y_stride, whole + r * kPanelOutputs, num_outputs * sizeof(float));
    }
}

template <typename Kind>
void project_in(const Projection& projection, const ProjectedRows& rows) {
    const int64_t num_panels = (projection.out_features + kPanelOutputs - 1) / kPanelOutputs;
    const int64_t num_tiles = (rows.count + Kind::kMaxRows - 1) / Kind::kMaxRows;
    // A thread takes panels that lie behind one another, and reads each from memory once for all tiles.
#pragma omp for collapse(2) schedule(static)
    for (int64_t panel = 0; panel < num_panels; ++panel) {
        for (int64_t tile = 0; tile < num_tiles; ++tile) {
            const int64_t begin = tile * rows.count / num_tiles, end = (tile + 1) * rows.count / num_tiles;
            sum_tile<Kind>(projection, rows, panel, begin, end - begin);
        }
    }
}

}  // namespace radixserve
