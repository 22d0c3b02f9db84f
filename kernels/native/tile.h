// Products of small float32 matrices that lie in packed, padded buffers: TILE_ROWS rows of A at a time, as many as
// the accumulators leave registers for (6 x 2 vectors of sums, 2 of B, 1 of A: 15 of 16).
//
// Every element of a product is one chain of fused multiply-adds in the order of the summed index, wherever it
// lies in its tile.

#pragma once
#include <cstdlib>
#include <new>
#include <type_traits>
#include <utility>

#include "simd.h"

constexpr int TILE_ROWS = 6;
constexpr int TILE_COLUMNS = 2 * LANES;

// Factors as words: a float, or two neighbours along the summed index in bf16, the first in the lower half. A Half is
// one of them: a bf16 where the CPU rounds to it itself.
enum class Pair : int32_t {};
enum class Half : uint16_t {};
template <class Word>
constexpr int64_t PER_WORD = std::is_same_v<Word, Pair> ? 2 : 1;

INLINE vi load(const Pair *from) {
    vi out;
    std::memcpy(&out, from, sizeof out);
    return out;
}

INLINE void store(Pair *to, vi value) { std::memcpy(to, &value, sizeof value); }
INLINE vf load(const Half *from) { return load(reinterpret_cast<const bf16 *>(from)); }
INLINE void store(Half *to, vf value) {
    vh half = round_to_bf16(value);
    std::memcpy(to, &half, sizeof half);
}
INLINE vf repeated(float word) { return splat(word); }
INLINE vi repeated(Pair word) { return vi{} + int32_t(word); }
INLINE vf add_products(vf a, vf b, vf c) { return fma(a, b, c); }
INLINE vf add_products(vi a, vi b, vf c) { return add_bf16_products(a, b, c); }

// The word (i, j) of a matrix lies at `at[i * row + j * column]`.
template <class Word>
struct Factors {
    const Word *at;
    int64_t row, column;

    Factors from(int64_t i, int64_t j) const { return {at + i * row + j * column, row, column}; }
};
using Strided = Factors<float>;

// c[6, VECTORS * LANES] = a[6, count] b[count, ...], added to c if `ADD`; `count` is of words. Rows of b and c are
// contiguous.
template <bool ADD, int VECTORS, class Word>
INLINE void multiply_tile(int64_t count, Factors<Word> a, const Word *b, int64_t b_row, float *c, int64_t c_row) {
    vf sums[TILE_ROWS][VECTORS];
    for (int i = 0; i < TILE_ROWS; i++)
        for (int j = 0; j < VECTORS; j++) sums[i][j] = ADD ? load(c + i * c_row + j * LANES) : vf{};
    for (int64_t k = 0; k < count; k++) {
        decltype(load(b)) right[VECTORS];
        for (int j = 0; j < VECTORS; j++) right[j] = load(b + k * b_row + j * LANES);
        for (int i = 0; i < TILE_ROWS; i++) {
            auto factor = repeated(a.at[i * a.row + k * a.column]);
            for (int j = 0; j < VECTORS; j++) sums[i][j] = add_products(factor, right[j], sums[i][j]);
        }
    }
    for (int i = 0; i < TILE_ROWS; i++)
        for (int j = 0; j < VECTORS; j++) store(c + i * c_row + j * LANES, sums[i][j]);
}

// c[6, columns] as above, tile by tile; tile t of b begins at b + t * b_tile. Columns are rounded up to whole vectors.
template <bool ADD, class Word>
INLINE void multiply(int64_t count, Factors<Word> a, const Word *b, int64_t b_row, int64_t b_tile, float *c,
                     int64_t c_row, int64_t columns) {
    int64_t j = 0;
    for (; j + LANES < columns; j += TILE_COLUMNS, b += b_tile)
        multiply_tile<ADD, 2>(count, a, b, b_row, c + j, c_row);
    if (j < columns) multiply_tile<ADD, 1>(count, a, b, b_row, c + j, c_row);
}

INLINE int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// Memory for numbers, from the beginning of a line of the cache on.
template <class T>
static inline T *aligned(int64_t count) {
    void *at = std::aligned_alloc(64, round_up(count * sizeof(T), 64));
    if (!at) throw std::bad_alloc();
    return static_cast<T *>(at);
}

// Rows [count, width] as another type, scaled, with zeros up to [padded_count, padded_width].
template <class To, class T>
static void pack_rows(To *to, const T *from, int64_t from_row, int64_t count, int64_t padded_count, int64_t width,
                      int64_t padded_width, float scale = 1) {
    for (int64_t i = 0; i < count; i++, to += padded_width, from += from_row) {
        int64_t j = 0;
        for (; j + LANES <= width; j += LANES) {
            __builtin_prefetch(from + 64 * from_row + j, 0, 2);  // rows of a head lie too far apart for the CPU to guess
            store(to + j, load(from + j) * scale);
        }
        if (j < width) store(to + j, load_first(from + j, width - j) * scale), j += LANES;
        std::memset(to + j, 0, (padded_width - j) * sizeof(To));
    }
    std::memset(to, 0, (padded_count - count) * padded_width * sizeof(To));
}

// Packed rows [count, width], both whole vectors, as columns: for each tile of TILE_COLUMNS rows, [width, TILE_COLUMNS].
template <class Word>
static void pack_columns(Word *to, const Word *rows, int64_t count, int64_t width) {
    for (int64_t i = 0; i < count; i += LANES, rows += LANES * width) {
        Word *columns = to + i / TILE_COLUMNS * TILE_COLUMNS * width + i % TILE_COLUMNS;
        for (int64_t j = 0; j < width; j += LANES) {
            vf square[LANES];
            for (int k = 0; k < LANES; k++) square[k] = bits<vf>(load(rows + k * width + j));
            transpose(square);
            for (int k = 0; k < LANES; k++) store(columns + (j + k) * TILE_COLUMNS, bits<decltype(load(rows))>(square[k]));
        }
    }
}

// Packed rows as factors whose summed index runs down them: [count / 2, width] words from [count, words], in which
// neighbours along a row become neighbours along a column. Both counts are even or padded with zeros.
static inline void pack_lines(Pair *to, const Pair *rows, int64_t count, int64_t words, int64_t width) {
    for (int64_t i = 0; i < count; i += 2, rows += 2 * words)
        for (int64_t j = 0; 2 * j < width; j += LANES, to += LANES) {
            auto [first, second] = interleaved(load(rows + j), load(rows + words + j));
            store(to, first);
            if (2 * j + LANES < width) store(to += LANES, second);
        }
}

static inline void pack_lines(float *, const float *, int64_t, int64_t, int64_t) {}  // words of one number are both

// float32 rows [count, padded_width] to rows [count, width] of another type, scaled.
template <class T>
static void unpack_rows(T *to, int64_t to_row, const float *from, int64_t count, int64_t width,
                        int64_t padded_width, float scale = 1) {
    for (int64_t i = 0; i < count; i++, to += to_row, from += padded_width) {
        int64_t j = 0;
        for (; j + LANES <= width; j += LANES) {
            __builtin_prefetch(to + 16 * to_row + j, 1);
            store(to + j, load(from + j) * scale);
        }
        if (j < width) store_first(to + j, load(from + j) * scale, width - j);
    }
}
