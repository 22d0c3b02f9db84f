// Blocks of the operands of `product.h` in panels, as floats or in fixed point, and the tile that two panels make.

#pragma once
#include "fixed.h"
#include "tile.h"

constexpr int64_t DEPTH = 256;  // words of the summed index: with 8 lanes two panels are 3/4 of a 32 KiB inner cache
constexpr int64_t TALL = 192;   // rows of A packed at once: 192 KiB of the next cache
constexpr int64_t WIDE = 2048;  // columns of B packed at once: 2 MiB of the last one
constexpr int64_t LINE = 16;    // numbers in a line of the cache

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

// The first `depth` / LANES * LANES of SIZE lines that are contiguous, in squares; what that is. Writes up to
// LANES - 1 numbers more, which the next lines and the next panel overwrite.
template <int SIZE>
static int64_t pack_squares(float *to, const float *from, int64_t outer, int64_t depth) {
    int64_t k = 0;
    for (; k + LANES <= depth; k += LANES)
        for (int first = (SIZE - 1) / LANES * LANES; first >= 0; first -= LANES) {  // the last part writes too much
            vf square[LANES] = {};
            for (int i = 0; i < LANES; i++)
                if (first + i < SIZE) square[i] = load(from + (first + i) * outer + k);
            transpose(square);
            for (int i = 0; i < LANES; i++) store(to + (k + i) * SIZE + first, square[i]);
        }
    return k;
}

// Lines along a panel: to[k][i] = from(i, k), zeros where i is beyond the count. `inner` is the stride along k, `outer`
// along i.
template <int SIZE>
static void pack_along(float *to, const float *from, int64_t outer, int64_t inner, int64_t count, int64_t depth) {
    int64_t done = count == SIZE && inner == 1 ? pack_squares<SIZE>(to, from, outer, depth) : 0;
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

// What a block's products are added to, each if it is there: rows, a bias for all of them, and the product of two
// matrices with `rank` columns and rows.
struct Addend {
    const float *rows;
    int64_t row;
    const float *bias;
    const float *left, *right;
    int64_t left_row, right_row, rank;

    Addend at(int64_t i, int64_t j) const {
        auto moved = [](const float *from, int64_t by) { return from ? from + by : nullptr; };
        return {moved(rows, i * row + j),   row,      moved(bias, j), moved(left, i * left_row),
                moved(right, j), left_row, right_row,      rank};
    }
};

// The lines that `store_tile` will want are on their way while the sums are made.
INLINE void prefetch_tile(const Addend &more, const float *c, int64_t c_row) {
    for (int i = 0; i < TILE_ROWS; i++)
        for (int j = 0; j < TILE_COLUMNS; j += LINE) {
            __builtin_prefetch(c + i * c_row + j, 1);
            if (more.rows && more.rows != c) __builtin_prefetch(more.rows + i * more.row + j);
        }
}

// Sums, which began at zero, are added to the rest at the end, so that they round as little as they can.
INLINE void store_tile(vf (&sums)[TILE_ROWS][2], Addend more, float *c, int64_t c_row) {
    for (int64_t r = 0; r < more.rank; r++) {
        vf right[2] = {load(more.right + r * more.right_row), load(more.right + r * more.right_row + LANES)};
#pragma GCC unroll 6
        for (int i = 0; i < TILE_ROWS; i++)
            for (int j = 0; j < 2; j++) sums[i][j] = fma(splat(more.left[i * more.left_row + r]), right[j], sums[i][j]);
    }
#pragma GCC unroll 6
    for (int i = 0; i < TILE_ROWS; i++)
        for (int j = 0; j < 2; j++) {
            if (more.bias) sums[i][j] += load(more.bias + j * LANES);
            if (more.rows) sums[i][j] += load(more.rows + i * more.row + j * LANES);
            store(c + i * c_row + j * LANES, sums[i][j]);
        }
}

// A block of both operands in panels, as floats. Those of one thread are kept between calls.
struct FloatPanels {
    static constexpr int64_t STEP = 1;  // blocks of the summed index are a multiple of it
    static constexpr int64_t MOST = DEPTH;
    float *a = aligned<float>(DEPTH * TALL + 16), *b = aligned<float>(DEPTH * WIDE);
    int64_t depth;

    ~FloatPanels() { std::free(a), std::free(b); }

    void pack_left(Strided from, int64_t rows) { pack<TILE_ROWS>(a, from.at, from.row, from.column, rows, depth); }
    void pack_right(Strided from, int64_t columns) {
        pack<TILE_COLUMNS>(b, from.at, from.column, from.row, columns, depth);
    }

    // The tile at (i, j) of the block.
    MEMBER void multiply(int64_t i, int64_t j, Addend more, float *c, int64_t c_row) const {
        const float *left_side = a + i * depth, *right_side = b + j * depth;
        vf sums[TILE_ROWS][2] = {};
        prefetch_tile(more, c, c_row);
#pragma GCC unroll 4
        for (int64_t k = 0; k < depth; k++) {
            vf left = load(right_side + k * TILE_COLUMNS), right = load(right_side + k * TILE_COLUMNS + LANES);
#pragma GCC unroll 6
            for (int r = 0; r < TILE_ROWS; r++) {
                vf factor = splat(left_side[k * TILE_ROWS + r]);
                sums[r][0] = fma(factor, left, sums[r][0]);
                sums[r][1] = fma(factor, right, sums[r][1]);
            }
        }
        store_tile(sums, more, c, c_row);
    }
};

// LANES numbers of LANES lines, of which `lines` and `length` are there; the rest are zeros. `inner` is the stride
// along a line, `outer` that from line to line.
INLINE void read_square(const float *from, int64_t outer, int64_t inner, int64_t lines, int64_t length,
                        vf square[LANES]) {
    if (inner == 1 && lines >= LANES && length >= LANES) {
        for (int64_t i = 0; i < LANES; i++) square[i] = load(from + i * outer);
        return;
    }
    float copy[LANES][LANES] = {};
    for (int64_t i = 0; i < std::min<int64_t>(LANES, lines); i++)
        for (int64_t k = 0; k < std::min<int64_t>(LANES, length); k++) copy[i][k] = from[i * outer + k * inner];
    for (int64_t i = 0; i < LANES; i++) square[i] = load(copy[i]);
}

// How factors are kept in fixed point, COUNT of them in a word: as numbers of 16 bits, or of 8, which lie in 16 where
// the machine does not multiply them as bytes. Products are the same either way.
template <int COUNT, bool BYTES>
struct Words {
    static constexpr int PER_WORD = COUNT;
    static constexpr bool QUADS = COUNT == 4;
    static_assert(COUNT == 2 || (QUADS && BYTES));

    template <bool LEFT>
    static constexpr bool TOTALS = LEFT && !BYTES;  // a scale depends on the sum of magnitudes too

    template <bool LEFT>
    MEMBER static vf scale(vf most, vf total) {
        return BYTES ? most / float(BYTE_ONE) : scale_of<LEFT>(most, total);
    }

    // One word for each lane. Left bytes are 128 larger and have no sign, as `add_quad_products` wants them.
    template <bool LEFT>
    MEMBER static vi of(const vi (&whole)[COUNT]) {
        if constexpr (QUADS) {
            vi word = (whole[0] & 0xFF) | (whole[1] & 0xFF) << 8 | (whole[2] & 0xFF) << 16 | whole[3] << 24;
            return LEFT ? word ^ int(0x80808080) : word;
        }
        return (whole[0] & 0xFFFF) | whole[1] << 16;
    }

    MEMBER static vi add_products(vi left, vi right, vi sums) {
        return QUADS ? add_quad_products(left, right, sums) : add_pair_products(left, right, sums);
    }
};

using Halves = Words<2, false>;
using Bytes = Words<QUADS ? 4 : 2, true>;

// A run of several lines on its way into panels of SIZE lines.
template <class Words, bool LEFT, int SIZE>
struct Strip {
    static constexpr int64_t WIDTH = 48 % SIZE ? 2 * SIZE : 48;  // lines: whole panels and lines of the cache
    static_assert(WIDTH % LINE == 0 && WIDTH % SIZE == 0);
    alignas(64) float numbers[RUN][WIDTH], scales[WIDTH];
    alignas(64) int32_t starts[WIDTH];  // what sums of right factors begin with

    // Numbers [0, length) of `count` lines side by side, and the lines' scales. Lines that fill a panel are zeros.
    MEMBER void read(const float *from, int64_t outer, int64_t inner, int64_t count, int64_t length) {
        constexpr int AT_ONCE = LINE / LANES;  // vectors of lines
        for (int64_t first = 0; first < round_up(count, SIZE); first += LINE) {
            vf most[AT_ONCE] = {}, total[AT_ONCE] = {};
            auto add = [&](int64_t k, int v, vf x) __attribute__((always_inline)) {
                most[v] = larger(most[v], magnitude(x));
                total[v] += magnitude(x);
                store(numbers[k] + first + v * LANES, x);
            };
            const float *at = from + first * outer;
            if (outer == 1 && first + LINE <= count)
                for (int64_t k = 0; k < length; k++, at += inner)
                    for (int v = 0; v < AT_ONCE; v++) add(k, v, load(at + v * LANES));
            else
                for (int64_t k = 0; k < length; k += LANES)
                    for (int v = 0; v < AT_ONCE; v++) {
                        const float *corner = at + v * LANES * outer + k * inner;
                        for (int64_t i = 0; i < LANES; i++) __builtin_prefetch(corner + (LINE + i) * outer, 0, 2);
                        vf square[LANES];
                        read_square(corner, outer, inner, count - first - v * LANES, length - k, square);
                        transpose(square);
                        for (int64_t i = 0; i < LANES; i++) add(k + i, v, square[i]);
                    }
            for (int v = 0; v < AT_ONCE; v++) store(scales + first + v * LANES, Words::template scale<LEFT>(most[v], total[v]));
        }
    }

    // The scales of WIDTH lines, from the largest magnitudes and, where they matter, their sums.
    MEMBER void scale(const float *most, const float *total) {
        for (int64_t i = 0; i < WIDTH; i += LANES)
            store(scales + i, Words::template scale<LEFT>(load(most + i), total ? load(total + i) : vf{}));
    }

    // The numbers that were read, in place.
    MEMBER void fix(int64_t count, int64_t length) {
        for (int64_t k = length; k < round_up(length, Words::PER_WORD); k++)
            std::fill(numbers[k], numbers[k] + WIDTH, 0.0f);
        fix(numbers[0], WIDTH, count, length);
    }

    // Numbers from[k][i] to words of neighbours along k, by the scales.
    MEMBER void fix(const float *from, int64_t inner, int64_t count, int64_t length) {
        constexpr int PER_WORD = Words::PER_WORD;
        for (int64_t i = 0; i < round_up(count, SIZE); i += LANES) {
            vf factor = 1 / load(scales + i);
            vi start = {};
            for (int64_t k = 0; k < length; k += PER_WORD) {
                vi whole[PER_WORD];
                for (int j = 0; j < PER_WORD; j++) whole[j] = whole_bits(load(from + (k + j) * inner + i), factor);
                put(Words::template of<LEFT>(whole), k / PER_WORD, i, start);
            }
            store(starts + i, start);
        }
    }

    // Scales and words of LANES whole runs that are contiguous, turned when they are bytes; where words have four.
    MEMBER void fix_contiguous(const float *from, int64_t outer, int64_t line) {
        vf most[LANES] = {};
        for (int64_t i = 0; i < LANES; i++)
            for (int64_t k = 0; k < RUN; k += LANES) most[i] = larger(most[i], magnitude(load(from + i * outer + k)));
        store(scales + line, Words::template scale<LEFT>(all_folded(most, larger), vf{}));
        alignas(64) float factors[LANES];
        store(factors, 1 / load(scales + line));
        vf square[LANES];
        for (int64_t i = 0; i < LANES; i++) {
            vi whole[4];  // a run has four vectors where a word has four bytes
            for (int64_t j = 0; j < 4; j++) {
                const float *at = from + i * outer + j * LANES;
                __builtin_prefetch(at + WIDTH * outer, 0, 2);
                whole[j] = whole_number(load(at), splat(factors[i]));
            }
            square[i] = bits<vf>(to_bytes(whole));
        }
        transpose(square);
        vi start = {};
        for (int i = 0; i < LANES; i++) {
            vi word = bits<vi>(square[i]);
            put(LEFT ? word ^ int(0x80808080) : word, i % 4 * 4 + i / 4, line, start);
        }
        store(starts + line, start);
    }

    MEMBER void put(vi word, int64_t k, int64_t i, vi &start) {
        if constexpr (Words::QUADS && !LEFT) start -= add_quad_products(vi{} + int(0x80808080), word, vi{});
        store(numbers[k] + i, bits<vf>(word));
    }

    // to[panel][word][i], to_scales[panel][i] and, but for left factors, to_starts likewise; panels are `panel` words
    // and `panel_scales` scales apart.
    MEMBER void cut(int64_t count, int64_t length, int32_t *to, int64_t panel, float *to_scales, int32_t *to_starts,
                    int64_t panel_scales) const {
        for (int64_t i = 0; i < count; i += SIZE, to += panel, to_scales += panel_scales) {
            std::memcpy(to_scales, scales + i, SIZE * sizeof(float));
            if (to_starts) std::memcpy(to_starts + i / SIZE * panel_scales, starts + i, SIZE * sizeof(int32_t));
            for (int64_t k = 0; k * Words::PER_WORD < length; k++)
                std::memcpy(to + k * SIZE, numbers[k] + i, SIZE * sizeof(float));
        }
    }
};

// A block of both operands in fixed point.
template <class Words>
struct FixedPanels {
    static constexpr int64_t PER_WORD = Words::PER_WORD;
    static constexpr int64_t STEP = RUN, MOST = PER_WORD * DEPTH, MOST_RUNS = MOST / RUN;
    int32_t *a = aligned<int32_t>(DEPTH * TALL), *b = aligned<int32_t>(DEPTH * WIDE);
    float *a_scales = aligned<float>(MOST_RUNS * TALL), *b_scales = aligned<float>(MOST_RUNS * WIDE);
    int32_t *starts = aligned<int32_t>(MOST_RUNS * WIDE);  // of sums, for each run and column
    int64_t depth;

    ~FixedPanels() { std::free(a), std::free(b), std::free(a_scales), std::free(b_scales), std::free(starts); }

    int64_t words() const { return (depth + PER_WORD - 1) / PER_WORD; }
    int64_t runs() const { return (depth + RUN - 1) / RUN; }

    template <bool LEFT, int SIZE>
    void pack(int32_t *to, float *to_scales, const float *from, int64_t outer, int64_t inner, int64_t count) {
        Strip<Words, LEFT, SIZE> strip;
        int64_t done = outer == 1 ? pack_adjacent(strip, to, to_scales, from, inner, count) : 0;
        for (int64_t i = done; i < count; i += strip.WIDTH)
            for (int64_t run = 0; run < runs(); run++) {
                int64_t length = length_of(run), lines = std::min(strip.WIDTH, count - i);
                const float *at = from + i * outer + run * RUN * inner;
                if (Words::QUADS && inner == 1 && length == RUN && lines == strip.WIDTH) {
                    for (int64_t line = 0; line < lines; line += LANES) strip.fix_contiguous(at + line * outer, outer, line);
                } else {
                    strip.read(at, outer, inner, lines, length);
                    strip.fix(lines, length);
                }
                put(strip, to, to_scales, i, run, lines);
            }
    }

    // Whole strips of lines that lie side by side; how many lines that is. Memory is read as it lies, once, and a run of
    // all lines, which is in the cache then, once more.
    template <bool LEFT, int SIZE>
    int64_t pack_adjacent(Strip<Words, LEFT, SIZE> &strip, int32_t *to, float *to_scales, const float *from,
                          int64_t inner, int64_t count) {
        if (depth % PER_WORD) return 0;
        constexpr bool TOTALS = Words::template TOTALS<LEFT>;
        alignas(64) float most[WIDE], total[WIDE];
        count -= count % strip.WIDTH;
        for (int64_t run = 0; run < runs(); run++, from += RUN * inner) {
            std::fill(most, most + count, 0.0f);
            if (TOTALS) std::fill(total, total + count, 0.0f);
            for (int64_t k = 0; k < length_of(run); k++)
                for (int64_t i = 0; i < count; i += LANES) {
                    __builtin_prefetch(from + (k + 8) * inner + i, 0, 2);
                    vf size = magnitude(load(from + k * inner + i));
                    store(most + i, larger(load(most + i), size));
                    if (TOTALS) store(total + i, load(total + i) + size);
                }
            for (int64_t i = 0; i < count; i += strip.WIDTH) {
                strip.scale(most + i, TOTALS ? total + i : nullptr);
                strip.fix(from + i, inner, strip.WIDTH, length_of(run));
                put(strip, to, to_scales, i, run, strip.WIDTH);
            }
        }
        return count;
    }

    template <bool LEFT, int SIZE>
    void put(const Strip<Words, LEFT, SIZE> &strip, int32_t *to, float *to_scales, int64_t line, int64_t run,
             int64_t lines) {
        int64_t at = line * runs() + run * SIZE;
        strip.cut(lines, length_of(run), to + line * words() + run * (RUN / PER_WORD) * SIZE, words() * SIZE,
                  to_scales + at, LEFT ? nullptr : starts + at, runs() * SIZE);
    }

    int64_t length_of(int64_t run) const { return std::min(RUN, depth - run * RUN); }

    void pack_left(Strided from, int64_t rows) {
        pack<true, TILE_ROWS>(a, a_scales, from.at, from.row, from.column, rows);
    }
    void pack_right(Strided from, int64_t columns) {
        pack<false, TILE_COLUMNS>(b, b_scales, from.at, from.column, from.row, columns);
    }

    MEMBER void multiply(int64_t i, int64_t j, Addend more, float *c, int64_t c_row) const {
        const int32_t *left = a + i * words(), *right = b + j * words(), *end = left + words() * TILE_ROWS;
        const float *left_scales = a_scales + i * runs(), *right_scales = b_scales + j * runs();
        const int32_t *start = starts + j * runs();
        vf totals[TILE_ROWS][2] = {};
        prefetch_tile(more, c, c_row);
        for (; left < end; left_scales += TILE_ROWS, right_scales += TILE_COLUMNS, start += TILE_COLUMNS) {
            vi sums[TILE_ROWS][2];
            for (int r = 0; r < TILE_ROWS; r++)
                for (int v = 0; v < 2; v++) sums[r][v] = Words::QUADS ? load(start + v * LANES) : vi{};
            const int32_t *until = std::min(end, left + RUN / PER_WORD * TILE_ROWS);
#pragma GCC unroll 4
            for (; left < until; left += TILE_ROWS, right += TILE_COLUMNS) {
                vi first = load(right), second = load(right + LANES);
#pragma GCC unroll 6
                for (int r = 0; r < TILE_ROWS; r++) {
                    vi factor = vi{} + left[r];
                    sums[r][0] = Words::add_products(factor, first, sums[r][0]);
                    sums[r][1] = Words::add_products(factor, second, sums[r][1]);
                }
            }
            for (int v = 0; v < 2; v++) {
                vf scale = load(right_scales + v * LANES);
                for (int r = 0; r < TILE_ROWS; r++)
                    totals[r][v] = fma(__builtin_convertvector(sums[r][v], vf), scale * left_scales[r], totals[r][v]);
            }
        }
        store_tile(totals, more, c, c_row);
    }
};
