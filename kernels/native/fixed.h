// Fixed point: over a run of the summed index both factors of a product are whole numbers times a scale.
//
// AVX2 multiplies and adds sixteen such numbers in one instruction, and eight floats; AVX-512 twice as many. Sums of a
// run are exact in 32 bits. Right factors, of which weights are some, keep 13 bits beside the sign; left ones 12 to 15,
// as many as no sum can overflow with. bf16 has 8. The scales depend on a line of numbers alone.

#pragma once
#include "simd.h"

constexpr int64_t RUN = 64;                                  // numbers, at most, that share a scale
constexpr int WEIGHT_ONE = 8192;                             // the largest right factor of a run
constexpr int BYTE_ONE = 127;                                // the largest of both factors where they have 8 bits
constexpr float MOST_WHOLE = 32766;                          // of 16 bits
constexpr float MOST_TOTAL = 2147483647 / WEIGHT_ONE - RUN;  // of a run's magnitudes, which rounding makes larger

INLINE vf magnitude(vf x) { return bits<vf>(bits<vi>(x) & 0x7FFFFFFF); }

// The nearest whole number to x times `factor` in the lower 16 bits, for products of magnitudes below 2^15.
INLINE vi whole_bits(vf x, vf factor) { return bits<vi>(fma(x, factor, splat(12582912.0f))); }

// That number itself, for products of magnitudes below 2^22.
INLINE vi whole_number(vf x, vf factor) { return whole_bits(x, factor) - bits<int32_t>(12582912.0f); }

// The larger of magnitudes, of which one that is no number is the largest.
INLINE vf larger(vf a, vf b) {
    const vi x = bits<vi>(a), y = bits<vi>(b);
    return bits<vf>(x > y ? x : y);  // of one type: an instruction
}

// What a whole number of 1 stands for, in runs with these largest magnitudes and these sums of them; no number where
// one of them is none, and 0 for runs of zeros, whose whole numbers then mean nothing.
template <bool LEFT>
INLINE vf scale_of(vf most, vf total, int one = WEIGHT_ONE) {
    if (!LEFT) return most / float(one);
    return maximum(most / MOST_WHOLE, total / MOST_TOTAL);  // in this order a NaN stays
}

// A run of `count` factors to `run` whole numbers, zeros beyond; returns their scale. `one`: the largest right factor.
// Writes whole vectors.
template <bool LEFT>
INLINE float run_to_fixed(const float *x, int64_t count, int64_t run, int16_t *out, int one = WEIGHT_ONE) {
    vf most = {}, total = {};
    auto at = [&](int64_t c) __attribute__((always_inline)) {
        return count - c >= LANES ? load(x + c) : load_first(x + c, std::max<int64_t>(count - c, 0));
    };
    for (int64_t c = 0; c < run; c += LANES) {
        vf size = magnitude(at(c));
        most = larger(size, most);
        total += size;
    }
    vf scale = scale_of<LEFT>(splat(folded(most, larger)), splat(sum(total)), one), factor = 1 / scale;
    for (int64_t c = 0; c < run; c += LANES) store_halves(out + c, whole_bits(at(c), factor));
    return scale[0];
}
