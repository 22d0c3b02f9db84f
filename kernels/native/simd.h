// Vectors of float for every instruction set: GCC and Clang vector extensions, and the few intrinsics that these
// cannot spell. A vector has RIFTCO_LANES lanes: what the compiler's target holds in one register.
//
// The whole library is compiled with -ffp-contract=off: a fused multiply-add is written `fma(a, b, c)`, and every
// other product and sum rounds separately, as exact operations need.

#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "threads.h"

#ifndef RIFTCO_LANES
#if defined(__AVX512F__)
#define RIFTCO_LANES 16
#elif defined(__AVX2__)
#define RIFTCO_LANES 8
#else
#define RIFTCO_LANES 4
#endif
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

#define MEMBER __attribute__((always_inline))

constexpr int LANES = RIFTCO_LANES;
typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

using bf16 = uint16_t;  // the upper half of a float32

template <class T>
INLINE T bits(const auto &value) {
    static_assert(sizeof(T) == sizeof(value));
    T out;
    std::memcpy(&out, &value, sizeof(T));
    return out;
}

INLINE vf splat(float value) { return value - vf{}; }  // x - 0 is x, bit for bit: one broadcast

INLINE vf load(const float *from) {
    vf out;
    std::memcpy(&out, from, sizeof out);
    return out;
}

INLINE vi load(const int32_t *from) {
    vi out;
    std::memcpy(&out, from, sizeof out);
    return out;
}

INLINE void store(float *to, vf value) { std::memcpy(to, &value, sizeof value); }
INLINE void store(int32_t *to, vi value) { std::memcpy(to, &value, sizeof value); }
INLINE void store_halves(int16_t *to, vi value) {
    vh half = __builtin_convertvector(bits<vu>(value), vh);
    std::memcpy(to, &half, sizeof half);
}

INLINE vu widened(vh halves) {
#if defined(__AVX512F__) && RIFTCO_LANES == 16
    return bits<vu>(_mm512_cvtepu16_epi32(bits<__m256i>(halves)));  // GCC 12 does the conversion in halves
#else
    return __builtin_convertvector(halves, vu);
#endif
}

INLINE vf load(const bf16 *from) {
    vh half;
    std::memcpy(&half, from, sizeof half);
    return bits<vf>(widened(half) << 16);
}

// Whether this CPU rounds to bf16, and multiplies it, in one instruction. Both take subnormals as 0.
#if defined(__AVX512F__) && RIFTCO_LANES == 16
INLINE bool has_bf16() { return __builtin_cpu_supports("avx512bf16"); }
INLINE vh round_to_bf16(vf value) {
    vh rounded;
    asm("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(value));
    return rounded;
}
// c + the products of the lower halves + those of the upper ones, halves in bf16.
INLINE vf add_bf16_products(vi a, vi b, vf c) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
    return c;
}
#else
INLINE bool has_bf16() { return false; }
INLINE vh round_to_bf16(vf) { __builtin_unreachable(); }
INLINE vf add_bf16_products(vi, vi, vf) { __builtin_unreachable(); }
#endif

// Rounds to nearest, ties to even; NaN stays NaN.
INLINE void store(bf16 *to, vf value) {
    vh half;
    if (has_bf16()) {
        half = round_to_bf16(value);
    } else {
        vu b = bits<vu>(value);
        vu rounded = (b + 0x7FFF + ((b >> 16) & 1)) >> 16;
        vi nan = value != value;
        half = __builtin_convertvector(nan ? (b >> 16) | 0x40 : rounded, vh);
    }
    std::memcpy(to, &half, sizeof half);
}

INLINE float to_float(float value) { return value; }
INLINE float to_float(bf16 value) { return bits<float>(uint32_t(value) << 16); }

template <class T>
INLINE T from_float(float value) {
    if constexpr (sizeof(T) == 4) return value;
    uint32_t b = bits<uint32_t>(value);
    if (value != value) return T((b >> 16) | 0x40);
    return T((b + 0x7FFF + ((b >> 16) & 1)) >> 16);
}

// The first `count` < LANES elements; the other lanes are 0.
template <class T>
INLINE vf load_first(const T *from, int64_t count) {
    T part[LANES] = {};
    std::memcpy(part, from, count * sizeof(T));
    return load(part);
}

template <class T>
INLINE void store_first(T *to, vf value, int64_t count) {
    T part[LANES];
    store(part, value);
    std::memcpy(to, part, count * sizeof(T));
}

INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__) && RIFTCO_LANES == 16
    return bits<vf>(_mm512_fmadd_ps(bits<__m512>(a), bits<__m512>(b), bits<__m512>(c)));
#elif defined(__FMA__) && RIFTCO_LANES == 8
    return bits<vf>(_mm256_fmadd_ps(bits<__m256>(a), bits<__m256>(b), bits<__m256>(c)));
#elif defined(__aarch64__) && RIFTCO_LANES == 4
    return bits<vf>(vfmaq_f32(bits<float32x4_t>(c), bits<float32x4_t>(a), bits<float32x4_t>(b)));
#else
    return a * b + c;
#endif
}

// c + the product of the lower halves + that of the upper ones, halves as signed 16-bit numbers. Wraps where it overflows.
INLINE vi add_pair_products(vi a, vi b, vi c) {
#if defined(__AVX512VNNI__) && RIFTCO_LANES == 16
    return bits<vi>(_mm512_dpwssd_epi32(bits<__m512i>(c), bits<__m512i>(a), bits<__m512i>(b)));
#else
#if defined(__AVX2__) && RIFTCO_LANES == 8
    vu products = bits<vu>(_mm256_madd_epi16(bits<__m256i>(a), bits<__m256i>(b)));
#elif defined(__SSE2__) && RIFTCO_LANES == 4
    vu products = bits<vu>(_mm_madd_epi16(bits<__m128i>(a), bits<__m128i>(b)));
#else
    vu products = bits<vu>((a << 16 >> 16) * (b << 16 >> 16)) + bits<vu>((a >> 16) * (b >> 16));
#endif
    return bits<vi>(bits<vu>(c) + products);
#endif
}

// c + the products of four bytes of each lane, those of a unsigned, those of b signed, in one instruction.
#if defined(__AVX512VNNI__) && RIFTCO_LANES == 16
constexpr bool QUADS = true;
INLINE vi add_quad_products(vi a, vi b, vi c) {
    return bits<vi>(_mm512_dpbusd_epi32(bits<__m512i>(c), bits<__m512i>(a), bits<__m512i>(b)));
}
// Whole numbers of four vectors as bytes, in the order of instructions: lane 4 i + j has lanes 4 i to 4 i + 3 of vector j.
INLINE vi to_bytes(const vi (&from)[4]) {
    __m512i lower = _mm512_packs_epi32(bits<__m512i>(from[0]), bits<__m512i>(from[1]));
    __m512i upper = _mm512_packs_epi32(bits<__m512i>(from[2]), bits<__m512i>(from[3]));
    return bits<vi>(_mm512_packs_epi16(lower, upper));
}
#else
constexpr bool QUADS = false;
INLINE vi add_quad_products(vi, vi, vi) { __builtin_unreachable(); }
INLINE vi to_bytes(const vi (&)[4]) { __builtin_unreachable(); }
#endif

INLINE vf maximum(vf a, vf b) { return a > b ? a : b; }
INLINE vf minimum(vf a, vf b) { return a < b ? a : b; }

// Each lane takes the value STEP lanes on.
template <int STEP, int... LANE>
INLINE vf shifted(vf a, std::integer_sequence<int, LANE...>) {
    return __builtin_shuffle(a, vi{(LANE + STEP) % LANES...});
}

// All lanes in one by `f`, as a tree: the halves, their halves and so on.
template <int STEP = LANES / 2, class F>
INLINE float folded(vf a, const F &f) {
    a = f(a, shifted<STEP>(a, std::make_integer_sequence<int, LANES>()));
    if constexpr (STEP > 1) return folded<STEP / 2>(a, f);
    return a[0];
}

INLINE float sum(vf a) {
    return folded(a, [](vf x, vf y) __attribute__((always_inline)) { return x + y; });
}

INLINE float largest(vf a) { return folded(a, maximum); }

// The halves of two vectors in turns: those of a in the lower halves of two vectors, those of b in the upper ones.
template <int... HALF>
INLINE std::pair<vi, vi> interleaved(vi a, vi b, std::integer_sequence<int, HALF...>) {
    typedef int16_t halves __attribute__((vector_size(4 * LANES)));
    halves x = bits<halves>(a), y = bits<halves>(b);
    return {bits<vi>(__builtin_shuffle(x, y, halves{(HALF / 2 + HALF % 2 * 2 * LANES)...})),
            bits<vi>(__builtin_shuffle(x, y, halves{(HALF / 2 + LANES + HALF % 2 * 2 * LANES)...}))};
}

INLINE std::pair<vi, vi> interleaved(vi a, vi b) {
    return interleaved(a, b, std::make_integer_sequence<int, 2 * LANES>());
}

// Rows a and b of a square trade the lanes whose index has, or lacks, the bit `STEP`.
template <int STEP, int... LANE>
INLINE void trade(vf &a, vf &b, std::integer_sequence<int, LANE...>) {
    vf upper = __builtin_shuffle(a, b, vi{(LANE & STEP ? LANES + LANE - STEP : LANE)...});
    b = __builtin_shuffle(a, b, vi{(LANE & STEP ? LANES + LANE : LANE + STEP)...});
    a = upper;
}

// Transposes a square of vectors.
template <int STEP = LANES / 2>
INLINE void transpose(vf square[LANES]) {
    for (int i = 0; i < LANES; i++)
        if (!(i & STEP)) trade<STEP>(square[i], square[i + STEP], std::make_integer_sequence<int, LANES>());
    if constexpr (STEP > 1) transpose<STEP / 2>(square);
}

// The lanes of each of LANES vectors in one by `f`, by the tree of `folded`.
template <int STEP = LANES / 2, class F>
INLINE vf all_folded(vf x[LANES], const F &f) {
    for (int i = 0; i < STEP; i++) {
        trade<STEP>(x[i], x[i + STEP], std::make_integer_sequence<int, LANES>());
        x[i] = f(x[i], x[i + STEP]);
    }
    if constexpr (STEP > 1) return all_folded<STEP / 2>(x, f);
    return x[0];
}

INLINE vf sums_of(vf x[LANES]) {
    return all_folded(x, [](vf a, vf b) __attribute__((always_inline)) { return a + b; });
}

// The value at x of the polynomial with these coefficients, from the highest power down, by Horner's rule.
template <class... Lower>
INLINE vf polynomial(vf x, float highest, Lower... lower) {
    vf value = splat(highest);
    ((value = fma(value, x, splat(lower))), ...);
    return value;
}

// e^x to about 1 ulp for x in [-87, 88], 0 below, NaN for NaN. x = n ln 2 + r, |r| <= ln 2 / 2; e^r by its Taylor
// series, whose next term is below 2^-26. Larger x saturate.
INLINE vf exponential(vf x) {
    vi underflow = x < -87.3f;
    x = minimum(splat(88.3f), maximum(splat(-87.3f), x));  // in this order a NaN stays
    vf shifted = fma(x, splat(1.44269504f), splat(12582912.0f));  // 1.5 * 2^23: rounds n into the low bits
    vf n = shifted - 12582912.0f;
    vf r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    vf p = polynomial(r, 1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f);
    vf scale = bits<vf>((bits<vi>(shifted) << 23) + (127 << 23));
    return underflow ? vf{} : p * scale;
}

// 2^x to a relative 3e-6 for x < 128, 1 for 0, 0 below -126, NaN for NaN.
INLINE vf power_of_two(vf x) {
    vf shifted = x + 12582912.0f;  // 1.5 * 2^23: rounds into the low bits
    vf power = polynomial(x - (shifted - 12582912.0f), 0.009582853f, 0.055906426f, 0.24024099f, 0.6931242f, 1.0f);
    vu result = bits<vu>(power) + (bits<vu>(shifted) << 23);  // below -126 it may wrap
    return x < -126.0f ? vf{} : bits<vf>(result);
}

// exp(-x^2/2), for T = float to 2 ulp while |x| < 4, for bf16 to a relative 1e-5; 0 from some 2^-126 down. The rounding
// of the exponent, which `exponential` avoids, is as small as the power.
template <class T>
INLINE vf bell(vf x) {
    if constexpr (sizeof(T) == 2) {
        // The exponent with 23 binary places: its upper bits are those of a float, the lower ones, as a mantissa m from 1
        // to 2, stand for a factor of 2^(m - 1). A NaN may become a number here: `lower_tail` keeps it.
        vf y = x * x * (-0.72134752f * (1 << 23));
        vi fixed = __builtin_convertvector(y, vi);
        vf mantissa = bits<vf>((fixed & 0x7FFFFF) | (127 << 23));
        vf power = polynomial(mantissa, 0.01353417f, -0.00212522f, 0.16661338f, 0.31201605f, 0.50996421f);
        return y < -126.0f * (1 << 23) ? vf{} : bits<vf>(bits<vi>(power) + (fixed & ~0x7FFFFF));
    }
    vf y = maximum(x * x * -0.72134752f, splat(-127.0f));
    vf shifted = y + 12582912.0f;  // 1.5 * 2^23: rounds into the low bits
    vf f = y - (shifted - 12582912.0f);
    vf power = polynomial(f, 0.00015461445f, 0.0013400428f, 0.009618057f, 0.05550327f, 0.2402265f, 0.6931472f,
                          1.0f);
    return power * bits<vf>((bits<vi>(shifted) << 23) + (127 << 23));
}

// Phi(-|x|) from e = exp(-x^2/2): times half the scaled complementary error function of |x| / sqrt(2), which is a
// polynomial in 1 / (1 + c |x|) to a relative 2e-8, for bf16 to 4e-5, a fiftieth of its rounding.
template <class T>
INLINE vf lower_tail(vf x, vf e) {
    constexpr bool half = sizeof(T) == 2;
    vf u = 1.0f / fma(bits<vf>(bits<vi>(x) & 0x7FFFFFFF), splat(half ? 0.38f : 0.26f), splat(1.0f));
    if constexpr (half)
        return e * u * polynomial(u, -0.08992812f, 0.18887597f, 0.09198011f, 0.15782936f, 0.15122515f);
    return e * u * polynomial(u, 0.030905684f, -0.15478514f, 0.25555533f, -0.15563199f, 0.16421464f,
                              0.049617946f, 0.10339709f, 0.1029642f, 0.10376223f);
}

// The standard normal distribution: Phi(x), the probability of less than x, and its density phi(x), as closely as
// results of type T need them.
struct Normal {
    vf cdf, density;
};

template <class T>
INLINE Normal normal(vf x) {
    vf e = bell<T>(x), tail = lower_tail<T>(x, e);
    return {x < 0.0f ? tail : 1.0f - tail, e * 0.3989422804f};
}
