// Products of float32 matrices of any size and layout (Goto & van de Geijn 2008): blocks of both operands are packed
// into panels that fit the caches, and a tile of the result stays in registers while the summed index runs.
//
// Per tile and summed index: 2 vectors of B, 6 numbers of A, 12 multiply-adds. Every element of a product is a sum of
// chains of at most DEPTH multiply-adds in the order of the summed index; neither the number of threads nor its place
// in the result shows.

#pragma once
#include <cstdlib>
#include "tile.h"

constexpr int64_t DEPTH = 256;  // of the summed index: a panel of B and one of A are 3/4 of a 32 KiB inner cache
constexpr int64_t TALL = 192;   // rows of A packed at once: 192 KiB of the next cache
constexpr int64_t WIDE = 2048;  // columns of B packed at once: 2 MiB of the last one
constexpr int64_t PRODUCT_GRAIN = int64_t(1) << 19;  // multiply-adds that are worth a thread

// What happens to each block of the result when it is complete, while it is in the cache.
enum class Finish {
    NOTHING,
    GELU,           // other = gelu(c)
    GELU_GRADIENT,  // c = c gelu'(z) and other = gelu(z)
};

struct Product {
    int64_t rows, columns, depth;
    Strided a, b;        // [rows, depth] and [depth, columns]
    const float *bias;   // [columns]: what the products are added to, or null
    const float *start;  // [rows, columns], rows `start_row` apart: likewise
    int64_t start_row;
    float *c;  // [rows, columns], rows `c_row` apart; may be `start`
    int64_t c_row;
    float *sums;  // [rows]: receives the sums of the rows of a; or null
    Finish finish;
    const float *z;  // [rows, columns] like `other`, contiguous
    float *other;
};

struct PanelBuffers {  // of one thread, kept between calls
    float *a = nullptr, *b = nullptr;
    PanelBuffers() {
        a = static_cast<float *>(std::aligned_alloc(64, (DEPTH * TALL + 16) * sizeof(float)));
        b = static_cast<float *>(std::aligned_alloc(64, DEPTH * WIDE * sizeof(float)));
    }
    ~PanelBuffers() { std::free(a), std::free(b); }
};

#if RIFTCO_LANES == 8
// Transposes eight vectors of eight: out[k][i] = in[i][k].
INLINE void transpose8(const vf in[8], vf out[8]) {
    vf pairs[8], fours[8];
    const vi low = {0, 8, 1, 9, 4, 12, 5, 13}, high = {2, 10, 3, 11, 6, 14, 7, 15};
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = __builtin_shuffle(in[i], in[i + 1], low);
        pairs[i + 1] = __builtin_shuffle(in[i], in[i + 1], high);
    }
    const vi first = {0, 1, 8, 9, 4, 5, 12, 13}, second = {2, 3, 10, 11, 6, 7, 14, 15};
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            fours[i + 2 * j] = __builtin_shuffle(pairs[i + j], pairs[i + j + 2], first);
            fours[i + 2 * j + 1] = __builtin_shuffle(pairs[i + j], pairs[i + j + 2], second);
        }
    const vi left = {0, 1, 2, 3, 8, 9, 10, 11}, right = {4, 5, 6, 7, 12, 13, 14, 15};
    for (int i = 0; i < 4; i++) {
        out[i] = __builtin_shuffle(fours[i], fours[i + 4], left);
        out[i + 4] = __builtin_shuffle(fours[i], fours[i + 4], right);
    }
}

// The first `depth` / 8 * 8 of rows that are contiguous, eight at a time; what that is. Writes up to two numbers
// more, which the next panel overwrites.
template <int SIZE>
static int64_t pack_rows_by_eight(float *to, const float *from, int64_t outer, int64_t depth) {
    int64_t k = 0;
    for (; k + 8 <= depth; k += 8)
        for (int first = 0; first < SIZE; first += 8) {
            vf in[8] = {}, out[8];
            for (int i = 0; i < 8; i++)
                if (first + i < SIZE) in[i] = load(from + (first + i) * outer + k);
            transpose8(in, out);
            for (int i = 0; i < 8; i++) store(to + (k + i) * SIZE + first, out[i]);
        }
    return k;
}
#endif

// Panels of lines that lie across them, whose elements are contiguous: to[panel][k][i] = from[k][panel, i]. Each line
// is read once, a stretch of it at a time, so that lines far apart cost few looks into the page table.
template <int SIZE>
static void pack_across(float *to, const float *from, int64_t inner, int64_t count, int64_t depth) {
    constexpr int64_t STRETCH = 192 / SIZE;  // panels
    for (int64_t first = 0; first < count; first += STRETCH * SIZE) {
        int64_t end = std::min(count, first + STRETCH * SIZE);
        for (int64_t k = 0; k < depth; k++) {
            const float *line = from + k * inner;
            int64_t i = first;
            for (; i + SIZE <= end; i += SIZE)
                std::memcpy(to + i * depth + k * SIZE, line + i, SIZE * sizeof(float));
            if (i < end) {
                float *last = to + i * depth + k * SIZE;
                std::fill(last, last + SIZE, 0.0f);
                std::memcpy(last, line + i, (end - i) * sizeof(float));
            }
        }
    }
}

// Lines along a panel: to[k][i] = from(i, k), zeros where i is beyond the count. `inner` is the stride along k, `outer`
// along i.
template <int SIZE>
static void pack_along(float *to, const float *from, int64_t outer, int64_t inner, int64_t count, int64_t depth) {
    int64_t done = 0;
#if RIFTCO_LANES == 8
    if (count == SIZE && inner == 1) done = pack_rows_by_eight<SIZE>(to, from, outer, depth);
#endif
    if (count < SIZE) std::fill(to, to + depth * SIZE, 0.0f);
    for (int64_t first = done; first < depth; first += 16)  // lines of both sides stay in the cache
        for (int64_t i = 0; i < count; i++)
            for (int64_t k = first; k < std::min(depth, first + 16); k++)
                to[k * SIZE + i] = from[i * outer + k * inner];
}

// `count` lines in panels of SIZE, each [depth, SIZE].
template <int SIZE>
static void pack(float *to, const float *from, int64_t outer, int64_t inner, int64_t count, int64_t depth) {
    if (outer == 1) return pack_across<SIZE>(to, from, inner, count, depth);
    for (int64_t i = 0; i < count; i += SIZE)
        pack_along<SIZE>(to + i * depth, from + i * outer, outer, inner, std::min<int64_t>(SIZE, count - i), depth);
}

struct Addend {  // what a block's products are added to, each if it is there
    const float *rows;
    int64_t row;
    const float *bias;

    Addend at(int64_t i, int64_t j) const { return {rows ? rows + i * row + j : nullptr, row, bias ? bias + j : nullptr}; }
};

// Sums begin at zero and are added to the rest at the end, so that they round as little as they can.
INLINE void product_tile(int64_t depth, const float *a, const float *b, Addend more, float *c, int64_t c_row) {
    vf sums[TILE_ROWS][2] = {};
    for (int i = 0; i < TILE_ROWS; i++) __builtin_prefetch(c + i * c_row, 1);
#pragma GCC unroll 4
    for (int64_t k = 0; k < depth; k++) {
        vf left = load(b + k * TILE_COLUMNS), right = load(b + k * TILE_COLUMNS + LANES);
#pragma GCC unroll 6
        for (int i = 0; i < TILE_ROWS; i++) {
            vf factor = splat(a[k * TILE_ROWS + i]);
            sums[i][0] = fma(factor, left, sums[i][0]);
            sums[i][1] = fma(factor, right, sums[i][1]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < TILE_ROWS; i++)
        for (int j = 0; j < 2; j++) {
            if (more.bias) sums[i][j] += load(more.bias + j * LANES);
            if (more.rows) sums[i][j] += load(more.rows + i * more.row + j * LANES);
            store(c + i * c_row + j * LANES, sums[i][j]);
        }
}

// A tile of which only a corner is there.
static void product_edge(int64_t depth, const float *a, const float *b, Addend more, float *c, int64_t c_row,
                         int64_t height, int64_t width) {
    float edge[TILE_ROWS * TILE_COLUMNS];
    product_tile(depth, a, b, {}, edge, TILE_COLUMNS);
    for (int64_t i = 0; i < height; i++)
        for (int64_t j = 0; j < width; j++) {
            float sum = edge[i * TILE_COLUMNS + j];
            if (more.bias) sum += more.bias[j];
            c[i * c_row + j] = more.rows ? sum + more.rows[i * more.row + j] : sum;
        }
}

// The packed panels [rows, depth] and [depth, columns] multiplied.
static void product_block(const PanelBuffers &panels, int64_t rows, int64_t columns, int64_t depth, Addend more,
                          float *c, int64_t c_row) {
    for (int64_t j = 0; j < columns; j += TILE_COLUMNS) {
        const float *b = panels.b + j * depth;
        int64_t width = std::min<int64_t>(TILE_COLUMNS, columns - j);
        for (int64_t i = 0; i < rows; i += TILE_ROWS) {
            const float *a = panels.a + i * depth;
            float *tile = c + i * c_row + j;
            int64_t height = std::min<int64_t>(TILE_ROWS, rows - i);
            if (height == TILE_ROWS && width == TILE_COLUMNS)
                product_tile(depth, a, b, more.at(i, j), tile, c_row);
            else
                product_edge(depth, a, b, more.at(i, j), tile, c_row, height, width);
        }
    }
}

static inline void finish_row(const Product &p, float *c, const float *z, float *other, int64_t count) {
    auto one = [&](vf value, vf before) __attribute__((always_inline)) {
        vf at = p.finish == Finish::GELU ? value : before;
        Normal n = normal(at);
        return std::pair{at * n.cdf, value * fma(at, n.density, n.cdf)};
    };
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES) {
        auto [activated, gradient] = one(load(c + j), z ? load(z + j) : vf{});
        store(other + j, activated);
        if (z) store(c + j, gradient);
    }
    if (int64_t rest = count - j) {
        auto [activated, gradient] = one(load_first(c + j, rest), z ? load_first(z + j, rest) : vf{});
        store_first(other + j, activated, rest);
        if (z) store_first(c + j, gradient, rest);
    }
}

static inline void finish_block(const Product &p, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    for (int64_t r = row; r < row + rows; r++) {
        int64_t at = r * p.columns + column;
        const float *z = p.finish == Finish::GELU_GRADIENT ? p.z + at : nullptr;
        finish_row(p, p.c + r * p.c_row + column, z, p.other + at, columns);
    }
}

// The sums of `rows` rows of a over `depth` from `from` on, added to those before: short sums of short sums.
static inline void add_sums(const Product &p, int64_t row, int64_t rows, int64_t from, int64_t depth) {
    constexpr int64_t STRETCH = 16;
    double totals[TALL] = {};
    for (int64_t first = from; first < from + depth; first += STRETCH) {
        float sums[TALL] = {};
        for (int64_t k = first; k < std::min(from + depth, first + STRETCH); k++) {
            const float *line = p.a.at + row * p.a.row + k * p.a.column;
            if (p.a.row == 1)
                for (int64_t r = 0; r < rows; r++) sums[r] += line[r];
            else
                for (int64_t r = 0; r < rows; r++) sums[r] += line[r * p.a.row];
        }
        for (int64_t r = 0; r < rows; r++) totals[r] += sums[r];
    }
    for (int64_t r = 0; r < rows; r++) p.sums[row + r] = float((from ? p.sums[row + r] : 0) + totals[r]);
}

// The part of the result in rows [top, bottom) and columns [left, right).
static void product_part(const Product &p, int64_t top, int64_t bottom, int64_t left, int64_t right) {
    static thread_local PanelBuffers panels;
    int64_t steps = std::max<int64_t>(1, (p.depth + DEPTH - 1) / DEPTH);
    int64_t deep = (p.depth + steps - 1) / steps;
    for (int64_t j = left; j < right; j += WIDE) {
        int64_t columns = std::min(WIDE, right - j);
        for (int64_t k = 0, step = 0; step < steps; k += deep, step++) {
            int64_t depth = std::min(deep, p.depth - k);
            pack<TILE_COLUMNS>(panels.b, p.b.at + k * p.b.row + j * p.b.column, p.b.column, p.b.row, columns, depth);
            for (int64_t i = top; i < bottom; i += TALL) {
                int64_t rows = std::min(TALL, bottom - i);
                pack<TILE_ROWS>(panels.a, p.a.at + i * p.a.row + k * p.a.column, p.a.row, p.a.column, rows, depth);
                if (p.sums && !j) add_sums(p, i, rows, k, depth);
                float *c = p.c + i * p.c_row + j;
                Addend start{p.start, p.start_row, p.bias}, sum{p.c, p.c_row, nullptr};
                Addend more = (k ? sum : start).at(i, j);
                product_block(panels, rows, columns, depth, more, c, p.c_row);
                if (step == steps - 1 && p.finish != Finish::NOTHING) finish_block(p, i, rows, j, columns);
            }
        }
    }
}

// The whole product, cut along the longer side of the result, in whole tiles.
static inline void multiply(const Product &p, int threads) {
    int64_t work = p.rows * p.columns * p.depth / PRODUCT_GRAIN + 1;
    threads = int(std::min<int64_t>(threads, work));
    bool tall = p.rows >= p.columns;
    int64_t side = tall ? p.rows : p.columns, unit = tall ? TILE_ROWS : TILE_COLUMNS;
    parallel_for((side + unit - 1) / unit, 1, threads, [&](int64_t begin, int64_t end) {
        int64_t from = begin * unit, to = std::min(side, end * unit);
        if (tall)
            product_part(p, from, to, 0, p.columns);
        else
            product_part(p, 0, p.rows, from, to);
    });
}
