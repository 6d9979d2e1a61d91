// The library's functions, as its callers in Python see them (library.py declares them too). Nothing here needs Python
// or torch. Tensors are addresses and strides, counted in elements; a last axis is always contiguous.
#pragma once

#include <cstdint>

#define RADIXSERVE_EXPORT extern "C" __attribute__((visibility("default")))

// Raised with every change of a signature or a struct, so that an old build is not taken for a new one.
RADIXSERVE_EXPORT int32_t radixserve_abi_version();

// Whether this CPU has the instructions that the other functions are made of: AVX2, FMA and F16C.
RADIXSERVE_EXPORT int32_t radixserve_is_supported();

// plan, layer: the structs of attention.h. Returns 0, or 1 if there was no memory.
RADIXSERVE_EXPORT int32_t radixserve_paged_attention(const void* plan, const void* layer, int32_t is_half,
                                                     int32_t num_threads);

// write: the struct of write_kv.h.
RADIXSERVE_EXPORT void radixserve_write_kv(const void* write, int32_t is_half, int32_t num_threads);

// norm: the struct of rms_norm.h.
RADIXSERVE_EXPORT void radixserve_rms_norm(const void* norm, int32_t num_threads);

// gate_up: [rows, 2 * size], the gate first. result: [rows, size].
RADIXSERVE_EXPORT void radixserve_silu_mul(const float* gate_up, int64_t stride, float* result, int64_t num_rows,
                                           int64_t size, int32_t num_threads);

// Whether projections are computed in AVX-512 here.
RADIXSERVE_EXPORT int32_t radixserve_has_avx512();

// weight: [out_features, in_features]. panels: of float16, as Projection of linear.h wants them.
RADIXSERVE_EXPORT void radixserve_pack_weight(const float* weight, int64_t stride, int64_t out_features,
                                              int64_t in_features, void* panels, int32_t num_threads);

// projection, rows: the structs of linear.h. lanes: 8 for AVX2, 16 for AVX-512, which the CPU must have, 0 for the widest
// that it has.
RADIXSERVE_EXPORT void radixserve_linear(const void* projection, const void* rows, int32_t lanes, int32_t num_threads);

// layers, step: the structs of decoder_layers.h. Returns 0, or 1 if there was no memory.
RADIXSERVE_EXPORT int32_t radixserve_decoder_layers(const void* layers, const void* step, int32_t is_half,
                                                    int32_t num_threads);
