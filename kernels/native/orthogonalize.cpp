// Muon's orthogonalisation (Jordan et al. 2024): each matrix scaled to norm 1, then five steps
// x <- (alpha + beta g + gamma g^2) x with g = x x^T.
//
// Matrices lie in panels of PANEL columns, each [rows, PANEL], which whole tiles of 6 rows and 16 columns divide: a
// product writes what the next one reads, and nothing is packed. All left factors are symmetric, or x, whose transpose
// is at hand: the 6 numbers of a tile's rows are neighbours. Of symmetric products only the lower tiles are computed.
// Padding is computed with, but nothing of it goes into a result. Every element is one chain of multiply-adds, whoever
// computes it.

#include "product.h"

#if RIFTCO_LANES >= 8
constexpr int VECTORS = 16 / LANES;              // of a tile
constexpr int64_t COLUMNS = 16, PANEL = 3 * COLUMNS;
constexpr int64_t STRETCH = 128;  // of the summed index: both operands of a tile are half of a 32 KiB inner cache
constexpr int64_t BLOCK = LANES;  // rows and columns transposed at once
constexpr int64_t SHARED_WORK = int64_t(1) << 24;  // multiply-adds of a product that is worth several threads
constexpr int STEPS = 5;
constexpr float ALPHA = 3.4445f, BETA = -4.7750f, GAMMA = 2.0315f;  // of singular values from 1e-2 on: to about 1
constexpr double ADDED_TO_NORM = 1e-7;

struct Panels {
    float *at;
    int64_t rows;  // whole panels of them, so that a transpose has room

    float *operator()(int64_t i, int64_t j) const { return at + (j / PANEL * rows + i) * PANEL + j % PANEL; }
};

struct Scratch {  // of one thread, kept between calls
    float *at = nullptr;
    int64_t size = 0;

    float *reserve(int64_t count) {
        if (count > size) {
            std::free(at);
            at = aligned<float>(count);
            std::fill(at, at + count, 0.0f);  // padding: no slow numbers to compute with
            size = count;
        }
        return at;
    }
    ~Scratch() { std::free(at); }
};

// Tiles of c = a^T b in COLUMNS columns from `j` on, for STRETCH of the summed index from `k` on.
template <bool ADD>
static void multiply_column(int64_t i, int64_t rows, int64_t j, int64_t k, int64_t count, Panels a, Panels b, Panels c) {
    for (; i < rows; i += TILE_ROWS)
        multiply_tile<ADD, VECTORS>(count, {a(k, i), 1, PANEL}, b(k, j), PANEL, c(i, j), PANEL);
}

// c = a^T b for a [depth, rows] and b [depth, columns]; of a symmetric product what lies on and below the diagonal, in
// whole blocks.
template <bool SYMMETRIC>
static void multiply_panels(int64_t rows, int64_t columns, int64_t depth, Panels a, Panels b, Panels c, int threads) {
    int64_t tiles = (columns + COLUMNS - 1) / COLUMNS;
    parallel_for(tiles, 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t k = 0; k < depth; k += STRETCH)
            for (int64_t t = begin; t < end; t++) {
                int64_t tile = !SYMMETRIC ? t : t % 2 ? tiles - 1 - t / 2 : t / 2;  // long and short: equal shares
                int64_t j = tile * COLUMNS, top = SYMMETRIC ? j / TILE_ROWS * TILE_ROWS : 0;
                int64_t count = std::min(STRETCH, depth - k);
                if (k)
                    multiply_column<true>(top, rows, j, k, count, a, b, c);
                else
                    multiply_column<false>(top, rows, j, k, count, a, b, c);
            }
    });
}

INLINE void load_block(Panels from, int64_t i, int64_t j, vf block[BLOCK]) {
    for (int r = 0; r < BLOCK; r++) block[r] = load(from(i, j) + r * PANEL);
}

INLINE void store_block(Panels to, int64_t i, int64_t j, const vf block[BLOCK]) {
    for (int r = 0; r < BLOCK; r++) store(to(i, j) + r * PANEL, block[r]);
}

// Turns the block itself.
INLINE void store_transposed(Panels to, int64_t i, int64_t j, vf block[BLOCK]) {
    transpose(block);
    store_block(to, j, i, block);
}

static void transpose(int64_t rows, int64_t columns, Panels from, Panels to) {
    for (int64_t i = 0; i < rows; i += BLOCK)
        for (int64_t j = 0; j < columns; j += BLOCK) {
            vf block[BLOCK];
            load_block(from, i, j, block);
            store_transposed(to, i, j, block);
        }
}

// The upper half of a symmetric matrix, from its lower one.
static void mirror(int64_t size, Panels g) {
    for (int64_t i = 0; i < size; i += BLOCK)
        for (int64_t j = 0; j < i; j += BLOCK) {
            vf block[BLOCK];
            load_block(g, i, j, block);
            store_transposed(g, i, j, block);
        }
}

// alpha + beta g + gamma g^2 in place of g^2, of which only the lower half is there.
static void quintic(int64_t size, Panels g, Panels square) {
    for (int64_t i = 0; i < size; i += BLOCK)
        for (int64_t j = 0; j <= i; j += BLOCK) {
            vf block[BLOCK], linear[BLOCK];
            load_block(square, i, j, block);
            load_block(g, i, j, linear);
            for (int r = 0; r < BLOCK; r++) block[r] = fma(block[r], splat(GAMMA), linear[r] * BETA);
            store_block(square, i, j, block);
            if (j < i) store_transposed(square, i, j, block);
        }
    for (int64_t i = 0; i < size; i++) *square(i, i) += ALPHA;
}

// 1 / norm, by sums in float64, where the square of no float32 is too large or too small.
static double inverse_norm(int64_t size, const float *matrix) {
    constexpr int CHAINS = 16;
    double sums[CHAINS] = {}, total = 0;
    int64_t i = 0;
    for (; i + CHAINS <= size; i += CHAINS)
        for (int k = 0; k < CHAINS; k++) sums[k] += double(matrix[i + k]) * matrix[i + k];
    for (; i < size; i++) total += double(matrix[i]) * matrix[i];
    for (double each : sums) total += each;
    return 1 / (std::sqrt(total) + ADDED_TO_NORM);
}

static void scale_into(Panels to, int64_t rows, int64_t columns, const float *from, double scale) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j += PANEL) {
            const float *line = from + i * columns + j;
            float *out = to(i, j);
            for (int64_t k = 0; k < std::min(PANEL, columns - j); k++) out[k] = float(line[k] * scale);
        }
}

static void copy_out(float *to, int64_t rows, int64_t columns, Panels from) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j += PANEL)
            std::memcpy(to + i * columns + j, from(i, j), std::min(PANEL, columns - j) * sizeof(float));
}

// x is wide, [size, length]: the matrix, or the transpose of a tall one.
static void orthogonalize(int64_t rows, int64_t columns, const float *matrix, float *out, int threads) {
    static thread_local Scratch scratch;
    bool tall = rows > columns;
    int64_t size = std::min(rows, columns), length = std::max(rows, columns);
    int64_t room = round_up(size, PANEL), long_room = round_up(length, PANEL);
    float *at = scratch.reserve(2 * room * (room + long_room));
    Panels g{at, room}, square{at + room * room, room};
    Panels x{at + 2 * room * room, room}, turned{x.at + room * long_room, long_room};
    scale_into(tall ? turned : x, rows, columns, matrix, inverse_norm(rows * columns, matrix));
    if (tall) transpose(length, size, turned, x);
    for (int step = 0; step < STEPS; step++) {
        if (step || !tall) transpose(size, length, x, turned);
        multiply_panels<true>(size, size, length, turned, turned, g, threads);
        mirror(size, g);
        multiply_panels<true>(size, size, size, g, g, square, threads);
        quintic(size, g, square);
        bool turn = tall && step == STEPS - 1;  // the result as it will be copied out
        Panels next{turned.at, turn ? long_room : room};
        if (turn)
            multiply_panels<false>(length, size, size, x, square, next, threads);
        else
            multiply_panels<false>(size, length, size, square, x, next, threads);
        turned = {x.at, long_room};
        x = next;
    }
    copy_out(out, rows, columns, x);
}

// `count` contiguous matrices [rows, columns] to as many in `out`; none is empty. Each is one thread's, or the large
// ones all threads' if there are fewer matrices than threads.
EXPORT int riftco_orthogonalize(const float *matrices, float *out, int64_t count, int64_t rows, int64_t columns,
                                int64_t threads) {
    bool share = count < threads && rows * columns * std::min(rows, columns) >= SHARED_WORK;
    parallel_for(count, 1, share ? 1 : int(threads), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin * rows * columns; i < end * rows * columns; i += rows * columns)
            orthogonalize(rows, columns, matrices + i, out + i, share ? int(threads) : 1);
    });
    return 0;
}
#endif
