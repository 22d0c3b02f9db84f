// Products of float32 matrices of any size and layout (Goto & van de Geijn 2008): blocks of both operands are packed
// into panels that fit the caches, and a tile of the result stays in registers while the summed index runs.
//
// Per tile and summed index: 2 vectors of B, 6 numbers of A, 12 multiply-adds. Every element of a product is a sum of
// chains of at most DEPTH multiply-adds in the order of the summed index, or of runs in fixed point; neither the number
// of threads nor its place in the result shows.

#pragma once
#include "product_panels.h"

constexpr int64_t PRODUCT_GRAIN = int64_t(1) << 19;  // multiply-adds that are worth a thread

// What happens to each block of the result when it is complete, while it is in the cache.
enum class Finish {
    NOTHING,
    GELU,           // other = gelu(c)
    GELU_GRADIENT,  // c = c gelu'(z) and other = gelu(z)
};

// What both factors become first.
enum class Operands { FLOATS, HALVES, BYTES };

struct Product {
    int64_t rows, columns, depth;
    Strided a, b;  // [rows, depth] and [depth, columns]
    Addend more;   // its rows may be c
    float *c;      // [rows, columns], rows `c_row` apart
    int64_t c_row;
    float *sums;  // [rows]: receives the sums of the rows of a; or null
    Finish finish;
    const float *z;  // [rows, columns] like `other`, contiguous
    float *other;
    Operands operands;
};

// A tile of which only a corner is there.
template <class Panels>
static void multiply_edge(const Panels &panels, int64_t row, int64_t column, Addend more, float *c, int64_t c_row,
                          int64_t height, int64_t width) {
    float edge[TILE_ROWS * TILE_COLUMNS];
    panels.multiply(row, column, {}, edge, TILE_COLUMNS);
    for (int64_t i = 0; i < height; i++)
        for (int64_t j = 0; j < width; j++) {
            float sum = edge[i * TILE_COLUMNS + j];
            for (int64_t r = 0; r < more.rank; r++)
                sum = fma(splat(more.left[i * more.left_row + r]), splat(more.right[r * more.right_row + j]), splat(sum))[0];
            if (more.bias) sum += more.bias[j];
            c[i * c_row + j] = more.rows ? sum + more.rows[i * more.row + j] : sum;
        }
}

template <class Panels>
static void multiply_block(const Panels &panels, int64_t rows, int64_t columns, Addend more, float *c, int64_t c_row) {
    for (int64_t j = 0; j < columns; j += TILE_COLUMNS) {
        int64_t width = std::min<int64_t>(TILE_COLUMNS, columns - j);
        for (int64_t i = 0; i < rows; i += TILE_ROWS) {
            float *tile = c + i * c_row + j;
            int64_t height = std::min<int64_t>(TILE_ROWS, rows - i);
            if (height == TILE_ROWS && width == TILE_COLUMNS)
                panels.multiply(i, j, more.at(i, j), tile, c_row);
            else
                multiply_edge(panels, i, j, more.at(i, j), tile, c_row, height, width);
        }
    }
}

// `Closeness`: the type that results are as close as.
template <class Closeness>
static void finish_row(const Product &p, float *c, const float *z, float *other, int64_t count) {
    auto one = [&](vf value, vf before) __attribute__((always_inline)) {
        vf at = p.finish == Finish::GELU ? value : before;
        Normal n = normal<Closeness>(at);
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
        auto finish = p.operands == Operands::FLOATS ? finish_row<float> : finish_row<bf16>;
        finish(p, p.c + r * p.c_row + column, z, p.other + at, columns);
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
template <class Panels>
static void product_part(const Product &p, int64_t top, int64_t bottom, int64_t left, int64_t right) {
    static thread_local Panels panels;
    int64_t steps = std::max<int64_t>(1, (p.depth + Panels::MOST - 1) / Panels::MOST);
    int64_t deep = round_up((p.depth + steps - 1) / steps, Panels::STEP);
    for (int64_t j = left; j < right; j += WIDE) {
        int64_t columns = std::min(WIDE, right - j);
        for (int64_t k = 0, step = 0; step < steps; k += deep, step++) {
            panels.depth = std::min(deep, p.depth - k);
            panels.pack_right(p.b.from(k, j), columns);
            for (int64_t i = top; i < bottom; i += TALL) {
                int64_t rows = std::min(TALL, bottom - i);
                panels.pack_left(p.a.from(i, k), rows);
                if (p.sums && !j) add_sums(p, i, rows, k, panels.depth);
                float *c = p.c + i * p.c_row + j;
                Addend more = k ? Addend{.rows = p.c, .row = p.c_row} : p.more;
                multiply_block(panels, rows, columns, more.at(i, j), c, p.c_row);
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
        auto part = p.operands == Operands::BYTES    ? product_part<FixedPanels<Bytes>>
                    : p.operands == Operands::HALVES ? product_part<FixedPanels<Halves>>
                                                     : product_part<FloatPanels>;
        if (tall)
            part(p, from, to, 0, p.columns);
        else
            part(p, 0, p.rows, from, to);
    });
}
