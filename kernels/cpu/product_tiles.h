// Small matrix products as tiles of rows by two vectors of columns, for any kind of vectors: see linear_tiles.h.
#pragma once

#include <algorithm>
#include <utility>

#include "product.h"

namespace radixserve {

// kRows rows and kVectors vectors of a product, from a row and a column on.
template <typename Kind, int kRows, int kVectors>
inline void multiply_vectors(const Product& product, int64_t row, int64_t column) {
    using Vector = typename Kind::Vector;
    float* result = product.result + row * product.result_stride + column;
    Vector sums[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) {
            sums[r][v] = product.shrink == nullptr
                             ? Kind::broadcast(0.0f)
                             : Kind::multiply(Kind::load(result + r * product.result_stride + v * Kind::kLanes),
                                              Kind::broadcast(product.shrink[row + r]));
        }
    }
    const float* left = product.left + row * product.left_stride;
    const float* right = product.right + column;
    for (int64_t k = 0; k < product.depth; ++k, right += product.right_stride) {
        Vector terms[kVectors];
        for (int v = 0; v < kVectors; ++v) terms[v] = Kind::load(right + v * Kind::kLanes);
        for (int r = 0; r < kRows; ++r) {
            const Vector factor = Kind::broadcast(left[r * product.left_stride + k]);
            for (int v = 0; v < kVectors; ++v) sums[r][v] = Kind::multiply_add(factor, terms[v], sums[r][v]);
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) {
            Kind::store(result + r * product.result_stride + v * Kind::kLanes, sums[r][v]);
        }
    }
}

template <typename Kind, int kRows>
void multiply_rows(const Product& product, int64_t row) {
    int64_t column = 0;
    for (; column + 2 * Kind::kLanes <= product.num_columns; column += 2 * Kind::kLanes) {
        multiply_vectors<Kind, kRows, 2>(product, row, column);
    }
    if (column < product.num_columns) multiply_vectors<Kind, kRows, 1>(product, row, column);
}

using MultiplyRows = void (*)(const Product&, int64_t);

template <typename Kind, typename RowsLessOne>
struct RowProducts;

// multiply_rows for 1 to kMaxRows rows.
template <typename Kind, int... kRowsLessOne>
struct RowProducts<Kind, std::integer_sequence<int, kRowsLessOne...>> {
    static constexpr MultiplyRows kOfRows[] = {nullptr, multiply_rows<Kind, kRowsLessOne + 1>...};
};

template <typename Kind>
void multiply_in(const Product& product) {
    const int64_t num_tiles = (product.num_rows + Kind::kMaxRows - 1) / Kind::kMaxRows;
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
        const int64_t begin = tile * product.num_rows / num_tiles, end = (tile + 1) * product.num_rows / num_tiles;
        RowProducts<Kind, std::make_integer_sequence<int, Kind::kMaxRows>>::kOfRows[end - begin](product, begin);
    }
}

}  // namespace radixserve
