// How weights lie where the decode step reads them; `decode_pack.cpp` writes what `decode_product.h` multiplies.

#pragma once
#include "simd.h"

constexpr int PANEL = 16;           // outputs, whatever the vectors' width: one line of the cache in float32
