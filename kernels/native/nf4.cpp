// NF4 weights: exact quantisation, exact decoding of any rectangle, and products with one to four rows of x.
//
// A product of few rows is limited by reading and decoding the codes. Where the rows of W begin on blocks, a chunk
// of codes is decoded into registers in the order that is cheapest, and x is brought into that order once per call.
// Weights never go to memory, and a block's scale multiplies its sum instead of each weight.

#include <vector>

#include "nf4_values.h"
#include "simd.h"

namespace {

constexpr int CODES = 8;  // for each lane of a chunk
constexpr int CHUNK = CODES * LANES;
constexpr int SCALES = 64;  // decoded at a time
constexpr int AHEAD = 1536;  // bytes of codes on their way to the cache

INLINE vi lane_numbers() {
    vi out;
    for (int lane = 0; lane < LANES; lane++) out[lane] = lane;
    return out;
}

#if defined(__AVX2__) && RIFTCO_LANES == 8

// 16-entry tables of bytes are looked up twice as fast as tables of floats: each of the 4 bytes of a float has its
// own, and interleaving them makes 8 floats each of codes 0-3 and 16-19, 4-7 and 20-23, and so on, of 32.
struct Lookup {
    __m256i planes[4];

    Lookup() {
        for (int plane = 0; plane < 4; plane++) {
            uint8_t table[32];
            for (int i = 0; i < 32; i++) table[i] = uint8_t(bits<uint32_t>(VALUES[i % 16]) >> (8 * plane));
            planes[plane] = _mm256_loadu_si256((const __m256i *)table);
        }
    }

    __attribute__((always_inline)) void operator()(__m256i codes, vf *out) const {
        __m256i a = _mm256_shuffle_epi8(planes[0], codes), b = _mm256_shuffle_epi8(planes[1], codes);
        __m256i c = _mm256_shuffle_epi8(planes[2], codes), d = _mm256_shuffle_epi8(planes[3], codes);
        __m256i low = _mm256_unpacklo_epi8(a, b), high = _mm256_unpacklo_epi8(c, d);
        out[0] = bits<vf>(_mm256_unpacklo_epi16(low, high));
        out[1] = bits<vf>(_mm256_unpackhi_epi16(low, high));
        low = _mm256_unpackhi_epi8(a, b), high = _mm256_unpackhi_epi8(c, d);
        out[2] = bits<vf>(_mm256_unpacklo_epi16(low, high));
        out[3] = bits<vf>(_mm256_unpackhi_epi16(low, high));
    }
};

// The codes of a chunk in the order `place` says.
INLINE void decode_chunk(const Lookup &lookup, const uint8_t *from, vf *out) {
    __m256i words = _mm256_loadu_si256((const __m256i *)from), mask = _mm256_set1_epi8(15);
    lookup(_mm256_and_si256(words, mask), out);
    lookup(_mm256_and_si256(_mm256_srli_epi16(words, 4), mask), out + 4);
}

INLINE int place(int k, int lane) { return 2 * (lane / 4 * 16 + k % 4 * 4 + lane % 4) + k / 4; }

constexpr int GROUP = 32;

// GROUP codes in their order.
INLINE void decode_group(const Lookup &lookup, const uint8_t *from, vf *out) {
    __m256i pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from));
    __m256i codes = _mm256_and_si256(_mm256_or_si256(pairs, _mm256_slli_epi16(pairs, 4)), _mm256_set1_epi8(15));
    lookup(_mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7)), out);
}

#else

struct Lookup {
    // The value of the code in the low 4 bits of each lane, whatever the bits above.
#if defined(__AVX512F__) && RIFTCO_LANES == 16
    __m512 values = _mm512_loadu_ps(VALUES);

    __attribute__((always_inline)) vf operator()(vu codes) const {
        return bits<vf>(_mm512_permutexvar_ps(bits<__m512i>(codes), values));
    }
#else
    __attribute__((always_inline)) vf operator()(vu codes) const {
        vf out;
        for (int lane = 0; lane < LANES; lane++) out[lane] = VALUES[codes[lane] & 15];
        return out;
    }
#endif
};

// The codes of a chunk in the order `place` says: word j holds 8 consecutive ones, and shifting all words right by
// 4 k gives code k of each.
INLINE void decode_chunk(const Lookup &lookup, const uint8_t *from, vf *out) {
    vu words;
    std::memcpy(&words, from, sizeof words);
    for (int k = 0; k < CODES; k++) out[k] = lookup(words >> (4 * k));
}

INLINE int place(int k, int lane) { return lane * CODES + k; }

constexpr int GROUP = LANES;

// GROUP codes in their order.
INLINE void decode_group(const Lookup &lookup, const uint8_t *from, vf *out) {
    uint64_t word = 0;
    std::memcpy(&word, from, LANES / 2);
    vu words = vu{} + uint32_t(word);
    if constexpr (LANES == 16) words = lane_numbers() < 8 ? words : vu{} + uint32_t(word >> 32);
    *out = lookup(words >> bits<vu>(lane_numbers() % CODES * 4));
}

#endif

}  // namespace

// As `kernels/nf4/cpu.py` fills it. Either `scales`, or `scale_codes` with `group_scales` and `offset`.
struct Packed {
    const uint8_t *codes;
    const float *scales;
    const uint8_t *scale_codes;
    const float *group_scales;
    int64_t block_size, scale_block_size, rows, columns;
    float offset;
};

namespace {

// Scales of blocks [begin, end). Every operation rounds to float32, as the encoding says.
void decode_scales(const Packed &w, int64_t begin, int64_t end, float *__restrict out) {
    if (w.scales) {
        std::memcpy(out, w.scales + begin, (end - begin) * sizeof(float));
        return;
    }
    while (begin < end) {
        int64_t group = begin / w.scale_block_size;
        int64_t stop = std::min(end, (group + 1) * w.scale_block_size);
        float scale = w.group_scales[group], offset = w.offset;
        const uint8_t *codes = w.scale_codes + begin;
        for (int64_t i = 0; i < stop - begin; i++) {
            float decoded = offset + scale * (float(int(codes[i]) - 128) / 127.0f);
            out[i] = std::max(0.0f, std::min(decoded, 3.402823466e38f));
        }
        out += stop - begin;
        begin = stop;
    }
}

INLINE float decode_one(const uint8_t *codes, int64_t i, float scale) {
    return scale * VALUES[(codes[i / 2] >> (i % 2 * 4)) & 15];
}

// Weights of the flat elements [begin, end), all of one block. A scale of zero makes every weight +0, also where a
// code is negative.
void decode_block(const Lookup &lookup, const uint8_t *codes, int64_t begin, int64_t end, float scale, float *out) {
    if (scale == 0.0f) {
        std::fill(out, out + (end - begin), 0.0f);
        return;
    }
    int64_t i = begin;
    if (i % 2 && i < end) *out++ = decode_one(codes, i++, scale);
    for (; i + GROUP <= end; i += GROUP, out += GROUP) {
        vf values[GROUP / LANES];
        decode_group(lookup, codes + i / 2, values);
        for (int part = 0; part < GROUP / LANES; part++) store(out + part * LANES, splat(scale) * values[part]);
    }
    for (; i < end; i++) *out++ = decode_one(codes, i, scale);
}

// Weights of the flat elements [begin, end); blocks take no notice of rows.
void decode(const Packed &w, int64_t begin, int64_t end, float *out) {
    const Lookup lookup;
    const int64_t last = (end + w.block_size - 1) / w.block_size;
    for (int64_t block = begin / w.block_size; block < last; block += SCALES) {
        float scales[SCALES];
        int64_t stop = std::min(last, block + SCALES);
        decode_scales(w, block, stop, scales);
        for (int64_t i = block; i < stop; i++) {
            int64_t to = std::min(end, (i + 1) * w.block_size);
            decode_block(lookup, w.codes, begin, to, scales[i - block], out);
            out += to - begin;
            begin = to;
        }
    }
}

// The code whose value is nearest to each lane of `ratio`, the lower one of two equally near.
INLINE vi nearest(vf ratio) {
    vi code = {};
    vf least = splat(2.0f);
    for (int k = 0; k < 16; k++) {
        vf distance = ratio - VALUES[k];
        distance = distance < 0.0f ? -distance : distance;
        vi closer = distance < least;
        code = closer ? vi{} + k : code;
        least = closer ? distance : least;
    }
    return code;
}

float largest_magnitude(const float *values, int64_t count) {
    vf most = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        most = maximum(most, bits<vf>(bits<vu>(load(values + i)) & 0x7FFFFFFF));
    }
    float out = largest(most);
    for (; i < count; i++) out = std::max(out, std::fabs(values[i]));
    return out;
}

void quantize_block(const float *values, int64_t count, uint8_t *codes, float *scale) {
    *scale = largest_magnitude(values, count);
    uint8_t unpacked[4096 + LANES];
    std::memset(unpacked, *scale == 0.0f ? 7 : 0, count);
    unpacked[count] = 0;
    for (int64_t i = 0; i < count && *scale != 0.0f; i += LANES) {
        vf value = count - i >= LANES ? load(values + i) : load_first(values + i, count - i);
        vi code = nearest(value / *scale);
        for (int64_t lane = 0; lane < std::min<int64_t>(LANES, count - i); lane++)
            unpacked[i + lane] = uint8_t(code[lane]);
    }
    for (int64_t i = 0; i < count; i += 2) codes[i / 2] = uint8_t(unpacked[i] | unpacked[i + 1] << 4);
}

// A vector of the scales of one chunk: lane j holds codes 8 j to 8 j + 7 of it.
INLINE vf chunk_scales(const float *scales, int64_t block_size) {
    vf out = splat(scales[0]);
    for (int64_t first = block_size; first < CHUNK; first += block_size)
        out = lane_numbers() >= int32_t(first / CODES) ? splat(scales[first / block_size]) : out;
    return out;
}

// x in the order in which chunks are decoded: [chunk][code of the chunk][row][lane].
template <int R, class T>
void reorder(const T *x, int64_t columns, float *out) {
    for (int64_t chunk = 0; chunk < columns; chunk += CHUNK)
        for (int k = 0; k < CODES; k++)
            for (int r = 0; r < R; r++)
                for (int lane = 0; lane < LANES; lane++) *out++ = to_float(x[r * columns + chunk + place(k, lane)]);
}

// The sums of R rows of x with one row of W, not yet over the lanes; with few rows in two chains of additions.
template <int R>
INLINE void row_sums(const Lookup &lookup, const uint8_t *codes, int64_t columns, const float *x, const float *scales,
                     int64_t block_size, vf *sums) {
    const int64_t chunks_of_a_block = std::max<int64_t>(1, block_size / CHUNK);
    const int64_t blocks_of_a_chunk = std::max<int64_t>(1, CHUNK / block_size);
    for (int64_t left = chunks_of_a_block, chunk = 0; chunk < columns / CHUNK; chunk++) {
        __builtin_prefetch(codes + chunk * CHUNK / 2 + AHEAD);
        vf values[CODES], part[R] = {}, odd[R] = {};
        decode_chunk(lookup, codes + chunk * CHUNK / 2, values);
        for (int k = 0; k < CODES; k++)
            for (int r = 0; r < R; r++) {
                vf &into = R < 3 && k % 2 ? odd[r] : part[r];
                into = fma(values[k], load(x + (k * R + r) * LANES), into);
            }
        vf scale = blocks_of_a_chunk == 1 ? splat(*scales) : chunk_scales(scales, block_size);
        for (int r = 0; r < R; r++) sums[r] = fma(part[r] + odd[r], scale, sums[r]);
        x += CHUNK * R;
        if (--left == 0) left = chunks_of_a_block, scales += blocks_of_a_chunk;
    }
}

// Rows of W that begin on blocks and are whole chunks.
template <int R>
void aligned_row(const Lookup &lookup, const Packed &w, const float *x, int64_t row, float *scales, float *out) {
    decode_scales(w, row * w.columns / w.block_size, (row + 1) * w.columns / w.block_size, scales);
    vf sums[R] = {};
    row_sums<R>(lookup, w.codes + row * w.columns / 2, w.columns, x, scales, w.block_size, sums);
    for (int r = 0; r < R; r++) out[r] = sum(sums[r]);
}

// Any other row: decoded to memory first.
template <int R>
void any_row(const Packed &w, const float *x, int64_t row, float *weights, float *out) {
    decode(w, row * w.columns, (row + 1) * w.columns, weights);
    for (int r = 0; r < R; r++) {
        vf sums = {};
        int64_t i = 0;
        for (; i + LANES <= w.columns; i += LANES) sums = fma(load(weights + i), load(x + r * w.columns + i), sums);
        if (i < w.columns)
            sums = fma(load_first(weights + i, w.columns - i), load_first(x + r * w.columns + i, w.columns - i), sums);
        out[r] = sum(sums);
    }
}

template <int R, class T>
int product(const Packed &w, const T *x, const T *bias, T *y, int threads) {
    bool aligned = w.columns % w.block_size == 0 && w.columns % CHUNK == 0;
    std::vector<float> ordered(R * w.columns);
    if (aligned) reorder<R>(x, w.columns, ordered.data());
    else
        for (int64_t i = 0; i < R * w.columns; i++) ordered[i] = to_float(x[i]);
    int64_t grain = std::max<int64_t>(1, 65536 / w.columns);
    parallel_for(w.rows, grain, threads, [&](int64_t begin, int64_t end) {
        const Lookup lookup;
        std::vector<float> scratch(w.columns);
        for (int64_t row = begin; row < end; row++) {
            float out[R];
            if (aligned) aligned_row<R>(lookup, w, ordered.data(), row, scratch.data(), out);
            else any_row<R>(w, ordered.data(), row, scratch.data(), out);
            for (int r = 0; r < R; r++)
                y[r * w.rows + row] = from_float<T>(bias ? out[r] + to_float(bias[row]) : out[r]);
        }
    });
    return 0;
}

template <class T>
int few_rows(const Packed &w, const T *x, const T *bias, T *y, int64_t count, int threads) {
    for (; count >= 4; count -= 4, x += 4 * w.columns, y += 4 * w.rows) product<4>(w, x, bias, y, threads);
    if (count == 3) return product<3>(w, x, bias, y, threads);
    if (count == 2) return product<2>(w, x, bias, y, threads);
    return count == 1 ? product<1>(w, x, bias, y, threads) : 0;
}

}  // namespace

// codes [ceil(count / 2)] and scales [ceil(count / block_size)] of `count` finite weights.
EXPORT int riftco_nf4_quantize(const float *weights, int64_t count, int64_t block_size, uint8_t *codes, float *scales,
                               int64_t threads) {
    int64_t blocks = (count + block_size - 1) / block_size;
    parallel_for(blocks, 65536 / block_size, threads, [&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; block++) {
            int64_t first = block * block_size;
            quantize_block(weights + first, std::min(block_size, count - first), codes + first / 2, scales + block);
        }
    });
    return 0;
}

// out [rows, columns] of a rectangle of W.
EXPORT int riftco_nf4_decode(const Packed *w, int64_t first_row, int64_t rows, int64_t first_column, int64_t columns,
                             float *out, int64_t threads) {
    parallel_for(rows, std::max<int64_t>(1, 65536 / columns), threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            int64_t first = (first_row + row) * w->columns + first_column;
            decode(*w, first, first + columns, out + row * columns);
        }
    });
    return 0;
}

// y [count, W's rows] = x [count, W's columns] W^T + bias, for few rows of x; all float32 or all bf16.
EXPORT int riftco_nf4_product(const Packed *w, const void *x, const void *bias, void *y, int64_t count, int64_t half,
                              int64_t threads) {
    if (half) return few_rows(*w, (const bf16 *)x, (const bf16 *)bias, (bf16 *)y, count, threads);
    return few_rows(*w, (const float *)x, (const float *)bias, (float *)y, count, threads);
}
