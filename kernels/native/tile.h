// Products of small float32 matrices that lie in packed, padded buffers: TILE_ROWS rows of A at a time, as many as
// the accumulators leave registers for (6 x 2 vectors of sums, 2 of B, 1 of A: 15 of 16).
//
// Every element of a product is one chain of fused multiply-adds in the order of the summed index, wherever it
// lies in its tile.

#pragma once
#include <cstdlib>
#include <new>
#include <utility>

#include "simd.h"

constexpr int TILE_ROWS = 6;
constexpr int TILE_COLUMNS = 2 * LANES;

// The element (i, j) of a matrix lies at `at[i * row + j * column]`.
struct Strided {
    const float *at;
    int64_t row, column;

    Strided from(int64_t i, int64_t j) const { return {at + i * row + j * column, row, column}; }
};

// c[6, VECTORS * LANES] = a[6, count] b[count, ...], added to c if `ADD`. Rows of b and c are contiguous.
template <bool ADD, int VECTORS>
INLINE void multiply_tile(int64_t count, Strided a, const float *b, int64_t b_row, float *c, int64_t c_row) {
    vf sums[TILE_ROWS][VECTORS];
    for (int i = 0; i < TILE_ROWS; i++)
        for (int j = 0; j < VECTORS; j++) sums[i][j] = ADD ? load(c + i * c_row + j * LANES) : vf{};
    for (int64_t k = 0; k < count; k++) {
        vf right[VECTORS];
        for (int j = 0; j < VECTORS; j++) right[j] = load(b + k * b_row + j * LANES);
        for (int i = 0; i < TILE_ROWS; i++) {
            vf factor = splat(a.at[i * a.row + k * a.column]);
            for (int j = 0; j < VECTORS; j++) sums[i][j] = fma(factor, right[j], sums[i][j]);
        }
    }
    for (int i = 0; i < TILE_ROWS; i++)
        for (int j = 0; j < VECTORS; j++) store(c + i * c_row + j * LANES, sums[i][j]);
}

// c[6, columns] as above, tile by tile; tile t of b begins at b + t * b_tile. Columns are rounded up to whole vectors.
template <bool ADD>
INLINE void multiply(int64_t count, Strided a, const float *b, int64_t b_row, int64_t b_tile, float *c,
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

// Rows [count, width] as float32, scaled, with zeros up to [padded_count, padded_width].
template <class T>
static void pack_rows(float *to, const T *from, int64_t from_row, int64_t count, int64_t padded_count,
                      int64_t width, int64_t padded_width, float scale = 1) {
    for (int64_t i = 0; i < count; i++, to += padded_width, from += from_row) {
        int64_t j = 0;
        for (; j + LANES <= width; j += LANES) store(to + j, load(from + j) * scale);
        if (j < width) store(to + j, load_first(from + j, width - j) * scale), j += LANES;
        for (; j < padded_width; j += LANES) store(to + j, vf{});
    }
    std::fill(to, to + (padded_count - count) * padded_width, 0.0f);
}

// Packed rows [count, width], both whole vectors, as columns: for each tile of TILE_COLUMNS rows, [width, TILE_COLUMNS].
static inline void pack_columns(float *to, const float *rows, int64_t count, int64_t width) {
    for (int64_t i = 0; i < count; i += LANES, rows += LANES * width) {
        float *columns = to + i / TILE_COLUMNS * TILE_COLUMNS * width + i % TILE_COLUMNS;
        for (int64_t j = 0; j < width; j += LANES) {
            vf square[LANES];
            for (int k = 0; k < LANES; k++) square[k] = load(rows + k * width + j);
            transpose(square);
            for (int k = 0; k < LANES; k++) store(columns + (j + k) * TILE_COLUMNS, square[k]);
        }
    }
}

// float32 rows [count, padded_width] to rows [count, width] of another type, scaled.
template <class T>
static void unpack_rows(T *to, int64_t to_row, const float *from, int64_t count, int64_t width,
                        int64_t padded_width, float scale = 1) {
    for (int64_t i = 0; i < count; i++, to += to_row, from += padded_width) {
        int64_t j = 0;
        for (; j + LANES <= width; j += LANES) store(to + j, load(from + j) * scale);
        if (j < width) store_first(to + j, load(from + j) * scale, width - j);
    }
}
