// How weights lie where the decode step reads them; `decode_pack.cpp` writes what `decode_product.h` multiplies.

#pragma once
#include "simd.h"

constexpr int PANEL = 16;           // outputs, whatever the vectors' width: one line of the cache in float32
constexpr int64_t RUN = 64;         // inputs, at most, that share a scale in fixed point
constexpr int WEIGHT_ONE = 8192;    // the whole number of the largest weight of a run
constexpr float TINY = 1e-30f;      // scales below are those of zeros
