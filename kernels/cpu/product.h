// Small matrix products in float, whose every element takes its terms in order.
#pragma once

#include <cstdint>

namespace radixserve {

// result [num_rows, num_columns] = left [num_rows, depth] * right [depth, num_columns], plus result * shrink of its row
// if that is given. Strides of rows are in elements; columns are contiguous. num_columns is a multiple of the lanes that
// it is computed with.
struct Product {
    const float* left;
    int64_t left_stride;
    const float* right;
    int64_t right_stride;
    float* result;
    int64_t result_stride;
    const float* shrink;  // [num_rows], or null
    int64_t num_rows, num_columns, depth;
};

// Compute a product: in the same bits, whatever the vectors and the number of rows.
using Multiply = void (*)(const Product&);

// In vectors of one kind, which the CPU must have: 8 lanes, and 16.
extern const Multiply multiply_avx2, multiply_avx512;

// The one with 8 lanes if these are asked for, else with the most that the CPU has and num_columns is a multiple of.
Multiply multiply_with(int32_t lanes, int64_t num_columns);

}  // namespace radixserve
