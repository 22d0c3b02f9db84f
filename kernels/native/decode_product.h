// The products of a decode step: rows of x with a matrix in panels of PANEL outputs.
//
// A row of a panel holds what these outputs take from one input, or from two where weights have 16 bits and from four
// where they have 8 or are NF4. Every element is one chain of additions over the inputs, whatever rows and panels are computed beside it and
// by which thread. Reading the weights limits the speed of few rows, multiplying that of many; these take turns at a
// stretch of a panel, which stays in the cache.
//
// Weights of 16 and 4 bits are multiplied in fixed point, two inputs in one instruction. Over a run of inputs both
// factors are whole numbers times a scale; the sums of their products are exact in 32 bits, and floats add the runs.
// Weights keep 13 bits beside the sign. What they are multiplied with keeps 12 to 15, as many as no sum can overflow
// with. bf16 has 8. Weights of 8 bits keep 7 beside the sign, as what they are multiplied with.

#pragma once
#include <utility>

#include "fixed.h"
#include "nf4_values.h"
#include "panels.h"

namespace {

constexpr int VECTORS = PANEL / LANES;
constexpr int TILE_ROWS = LANES == 4 ? 3 : 6;
constexpr int MOST_SUMS = LANES == 16 ? 24 : 12;  // vectors of sums that leave registers for the operands
constexpr int SIDE_BY_SIDE = VECTORS == 1 ? 2 : 1;  // panels of a tile of many rows: two vectors at least
constexpr int64_t MOST_ROWS = 96;                 // of which a stretch fills a quarter of the second cache
constexpr int64_t DEPTH = 256;                    // inputs whose weights of a panel fill half the nearest cache

enum Kind : int64_t { FLOAT32, BFLOAT16, NF4, INT8 };
enum After { STORE, ADD, GELU };

}  // namespace

// As `kernels/decode_step/cpu.py` fills it.
struct Matrix {
    const void *panels;   // [ceil(outputs / PANEL)] panels
    const float *scales;  // of weights in fixed point: [panels, runs, PANEL]
    const float *bias;    // [whole panels]
    int64_t kind, inputs, outputs, run;

    int64_t runs() const { return (inputs + run - 1) / run; }
};

namespace {

// Where a product's rows go and what happens to them.
struct Target {
    After after;
    float *out;
    int64_t row, columns;  // no more columns than these are stored
};

INLINE void finish(const Target &to, int64_t row, int64_t column, vf value) {
    if (column >= to.columns) return;
    float *out = to.out + row * to.row + column;
    if (to.after == ADD) value = load(out) + value;
    if (to.after == GELU) value = value * normal<float>(value).cdf;
    if (column + LANES <= to.columns) store(out, value);
    else store_first(out, value, to.columns - column);
}

// What is read next, on its way to the cache: `pace` bytes of each panel for every step of a tile.
struct Prefetch {
    const char *next;
    int64_t pace, panel_size;

    template <int COUNT>
    MEMBER void fetch() {
        for (int i = 0; i < COUNT; i++) __builtin_prefetch(next + i * panel_size);
        next += pace;
    }
};
struct NoPrefetch {
    template <int COUNT>
    MEMBER void fetch() {}
};

// Rows of floats times panels of floats.
struct Floats {
    static constexpr int INPUTS = 2;  // of a step
    const float *x;
    int64_t row;
    const float *panels;
    int64_t panel_size;

    // sums += inputs [begin, begin + count) of ROWS rows from `first` on times COUNT panels. Sums, weights and one
    // factor fit 16 registers; the factors of all rows besides would not.
    template <int ROWS, int COUNT, class Ahead>
    MEMBER void add(int64_t panel, int64_t begin, int64_t count, int64_t first, vf (&sums)[ROWS][COUNT * VECTORS],
                    Ahead ahead) const {
        const float *from = x + first * row + begin, *weights = panels + panel * panel_size + begin * PANEL;
        auto one = [&](int64_t k) __attribute__((always_inline)) {
            vf w[COUNT * VECTORS];
            for (int j = 0; j < COUNT * VECTORS; j++)
                w[j] = load(weights + j / VECTORS * panel_size + k * PANEL + j % VECTORS * LANES);
            for (int r = 0; r < ROWS; r++) {
                vf factor = splat(from[r * row + k]);
                for (int j = 0; j < COUNT * VECTORS; j++) sums[r][j] = fma(factor, w[j], sums[r][j]);
            }
        };
        int64_t k = 0;
        for (; k + 2 <= count; k += 2) {
            ahead.template fetch<COUNT>();
            one(k);
            one(k + 1);
        }
        if (k < count) one(k);
    }
};

// Rows in fixed point: word i of a row holds its inputs 2 i and 2 i + 1, or what `Bytes` says, and runs have a scale.
struct Fixed {
    int32_t *words;
    int64_t row;
    float *scales;
    int32_t *offsets;  // what sums of a run begin with, for weights that are more than they mean
    int64_t runs;
};

// 16-bit weights: word i of an output holds those of its inputs 2 i and 2 i + 1. `first` and `begin`: the first panel and
// word that are there.
struct Words {
    static constexpr int INPUTS = 2, FACTORS = 1, LINE = PANEL, SUMS = MOST_SUMS;
    static constexpr bool SHIFTED = false;
    const int32_t *panels;
    int64_t panel_size, first, begin;

    const int32_t *at(int64_t panel, int64_t input) const {
        return panels + (panel - first) * panel_size + (input - begin) / INPUTS * PANEL;
    }

    template <int ROWS, int COUNT>
    MEMBER void add(const int32_t *from, const int32_t *x, int64_t row, vi (&sums)[ROWS][COUNT * VECTORS]) const {
        vi w[COUNT * VECTORS];
        for (int j = 0; j < COUNT * VECTORS; j++)
            w[j] = load(from + j / VECTORS * panel_size + j % VECTORS * LANES);
        for (int r = 0; r < ROWS; r++) {
            vi factor = vi{} + x[r * row];
            for (int j = 0; j < COUNT * VECTORS; j++) sums[r][j] = add_pair_products(factor, w[j], sums[r][j]);
        }
    }
};

// 8-bit weights, each 128 more than it means: a word of an output holds those of 4 inputs. The rows' words hold 4 inputs
// too where one instruction multiplies four; else 2, the first and third, then the second and fourth.
struct Bytes {
    static constexpr int INPUTS = 4, FACTORS = QUADS ? 1 : 2, LINE = PANEL, SUMS = MOST_SUMS;
    static constexpr bool SHIFTED = true;
    const int32_t *panels;
    int64_t panel_size;

    const int32_t *at(int64_t panel, int64_t input) const { return panels + panel * panel_size + input / INPUTS * PANEL; }

    template <int ROWS, int COUNT>
    MEMBER void add(const int32_t *from, const int32_t *x, int64_t row, vi (&sums)[ROWS][COUNT * VECTORS]) const {
        for (int part = 0; part < FACTORS; part++) {
            vi w[COUNT * VECTORS];
            for (int j = 0; j < COUNT * VECTORS; j++) {
                w[j] = load(from + j / VECTORS * panel_size + j % VECTORS * LANES);
                if (!QUADS) w[j] = w[j] >> (8 * part) & 0xFF00FF;
            }
            for (int r = 0; r < ROWS; r++) {
                vi factor = vi{} + x[r * row + part];
                for (int j = 0; j < COUNT * VECTORS; j++)
                    sums[r][j] = QUADS ? add_quad_products(w[j], factor, sums[r][j])
                                       : add_pair_products(factor, w[j], sums[r][j]);
            }
        }
    }
};

// NF4: 32 bytes hold the codes of 4 inputs x PANEL outputs in the order that AVX2 decodes most cheaply: output o of
// input k in half o / 4 % 2, byte o / 8 * 8 + o % 4 * 2 + k % 2, the low nibble for k < 2.
struct Codes {
    static constexpr int INPUTS = 4, FACTORS = 2, LINE = 2 * PANEL, SUMS = VECTORS;
    static constexpr bool SHIFTED = false;
    const uint8_t *panels;
    int64_t panel_size;
    int16_t values[16];
#if defined(__AVX2__)
    __m256i low, high;  // their bytes, twice
#endif

    explicit Codes(const Matrix &m) : panels(static_cast<const uint8_t *>(m.panels)), panel_size(m.inputs * PANEL / 2) {
        for (int i = 0; i < 16; i++) values[i] = int16_t(std::lrint(VALUES[i] * WEIGHT_ONE));
#if defined(__AVX2__)
        alignas(32) uint8_t bytes[2][32];
        for (int i = 0; i < 32; i++) bytes[0][i] = uint8_t(values[i % 16]), bytes[1][i] = uint8_t(values[i % 16] >> 8);
        low = _mm256_load_si256((const __m256i *)bytes[0]);
        high = _mm256_load_si256((const __m256i *)bytes[1]);
#endif
    }

    // Of two inputs, from the low nibbles or (`upper`) the high ones.
    MEMBER void decode(const uint8_t *from, bool upper, vi (&out)[VECTORS]) const {
#if defined(__AVX2__)
        __m256i bytes = _mm256_loadu_si256((const __m256i *)from);
        __m256i codes = _mm256_and_si256(upper ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(15));
        __m256i a = _mm256_shuffle_epi8(low, codes), b = _mm256_shuffle_epi8(high, codes);
        __m256i both[2] = {_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b)};
#if RIFTCO_LANES == 16  // through memory the wider load would wait for both stores
        out[0] = bits<vi>(_mm512_inserti64x4(_mm512_castsi256_si512(both[0]), both[1], 1));
#else
        std::memcpy(&out, both, sizeof out);
#endif
#else
        int16_t decoded[PANEL][2];
        for (int o = 0; o < PANEL; o++)
            for (int k = 0; k < 2; k++)
                decoded[o][k] = values[from[o / 4 % 2 * 16 + o / 8 * 8 + o % 4 * 2 + k] >> (upper ? 4 : 0) & 15];
        std::memcpy(&out, decoded, sizeof out);
#endif
    }

    const uint8_t *at(int64_t panel, int64_t input) const { return panels + panel * panel_size + input / INPUTS * LINE; }

    template <int ROWS, int COUNT>
    MEMBER void add(const uint8_t *from, const int32_t *x, int64_t row, vi (&sums)[ROWS][COUNT * VECTORS]) const {
        static_assert(COUNT == 1);
        for (int pair = 0; pair < 2; pair++) {
            vi w[VECTORS];
            decode(from, pair, w);
            for (int r = 0; r < ROWS; r++) {
                vi factor = vi{} + x[r * row + pair];
                for (int j = 0; j < VECTORS; j++) sums[r][j] = add_pair_products(factor, w[j], sums[r][j]);
            }
        }
    }
};

// Rows times panels, both in fixed point.
template <class Weights>
struct FixedProduct {
    static constexpr int INPUTS = Weights::INPUTS;
    const Matrix &m;
    const Fixed x;
    const Weights weights;

    // As `Floats::add`, of whole runs.
    template <int ROWS, int COUNT, class Ahead>
    MEMBER void add(int64_t panel, int64_t begin, int64_t count, int64_t first, vf (&totals)[ROWS][COUNT * VECTORS],
                    Ahead ahead) const {
        const float *scales = m.scales + (panel * x.runs + begin / m.run) * PANEL;
        int64_t place = first * x.runs + begin / m.run;
        for (int64_t k = begin; k < begin + count; k += m.run, scales += PANEL, place++) {
            vi sums[ROWS][COUNT * VECTORS] = {};
            if constexpr (Weights::SHIFTED)
                for (int r = 0; r < ROWS; r++)
                    for (int j = 0; j < COUNT * VECTORS; j++) sums[r][j] += x.offsets[place + r * x.runs];
            const auto *from = weights.at(panel, k);
            const int32_t *factors = x.words + first * x.row + k / INPUTS * Weights::FACTORS;
            const int32_t *end = factors + m.run / INPUTS * Weights::FACTORS;
            for (; factors < end; factors += Weights::FACTORS, from += Weights::LINE) {
                ahead.template fetch<COUNT>();
                weights.template add<ROWS, COUNT>(from, factors, x.row, sums);
            }
            for (int j = 0; j < COUNT * VECTORS; j++) {
                vf scale = load(scales + j / VECTORS * x.runs * PANEL + j % VECTORS * LANES);
                for (int r = 0; r < ROWS; r++) {
                    vf factor = scale * splat(x.scales[place + r * x.runs]);
                    totals[r][j] = fma(__builtin_convertvector(sums[r][j], vf), factor, totals[r][j]);
                }
            }
        }
    }
};

// A run of `count` inputs to words for `Bytes`, and what makes up for its weights being 128 too much; returns the scale.
INLINE float to_bytes(const float *x, int64_t count, int32_t *words, int32_t &offset) {
    int16_t numbers[RUN];
    float scale = run_to_fixed<false>(x, count, RUN, numbers, BYTE_ONE);
    int32_t sum = 0;
    for (int64_t i = 0; i < RUN; i++) sum += numbers[i];
    offset = -128 * sum;
    if (QUADS) {
        auto *to = reinterpret_cast<int8_t *>(words);
        for (int64_t i = 0; i < RUN; i++) to[i] = int8_t(numbers[i]);
    } else {
        auto *to = reinterpret_cast<int16_t *>(words);
        for (int64_t i = 0; i < RUN; i++) to[i] = numbers[i / 4 * 4 + (i % 4 * 2) % 4 + i % 4 / 2];
    }
    return scale;
}

// Row r of x, for a product with m.
INLINE void to_fixed(const Matrix &m, const float *x, int64_t r, const Fixed &out) {
    for (int64_t run = 0, begin = 0; run < out.runs; run++, begin += m.run) {
        int64_t count = std::min(m.run, m.inputs - begin), place = r * out.runs + run;
        if (m.kind == INT8) {
            auto *to = out.words + r * out.row + begin / Bytes::INPUTS * Bytes::FACTORS;
            out.scales[place] = to_bytes(x + begin, count, to, out.offsets[place]);
        } else {
            auto *to = reinterpret_cast<int16_t *>(out.words + r * out.row + begin / Words::INPUTS);
            out.scales[place] = run_to_fixed<true>(x + begin, count, m.run, to) / WEIGHT_ONE;
        }
    }
}

// The place in `scratch` of rows for a product with m, and how many floats that takes for any matrix.
Fixed fixed_rows(const Matrix &m, int64_t rows, float *scratch) {
    int64_t runs = m.runs(), in_word = m.kind == INT8 ? Bytes::INPUTS / Bytes::FACTORS : Words::INPUTS;
    auto *offsets = reinterpret_cast<int32_t *>(scratch + rows * runs);
    return {offsets + rows * runs, runs * m.run / in_word + PANEL, scratch, offsets, runs};
}
int64_t fixed_size(int64_t rows, int64_t most_inputs) { return rows * (most_inputs + RUN + PANEL); }

// Inputs [begin, begin + count) of ROWS rows from `first` on times COUNT panels. Where these are not all inputs, the
// sums so far lie in `partial` [rows, COUNT * PANEL] in between.
template <int ROWS, int COUNT, class Product, class Ahead>
void multiply_tile(const Product &product, const Matrix &m, int64_t panel, int64_t begin, int64_t count, int64_t first,
                   float *partial, const Target &to, Ahead ahead) {
    vf sums[ROWS][COUNT * VECTORS];
    auto place = [&](int r, int j) { return partial + (first + r) * COUNT * PANEL + j * LANES; };
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < COUNT * VECTORS; j++) sums[r][j] = begin ? load(place(r, j)) : vf{};
    product.template add<ROWS, COUNT>(panel, begin, count, first, sums, ahead);
    bool last = begin + count >= m.inputs;
    for (int j = 0; j < COUNT * VECTORS; j++) {
        int64_t column = panel * PANEL + j * LANES;
        for (int r = 0; r < ROWS; r++)
            if (last) finish(to, first + r, column, sums[r][j] + load(m.bias + column));
            else store(place(r, j), sums[r][j]);
    }
}

// Calls f.operator()<ROWS>() for a number of rows up to TILE_ROWS.
template <class F>
INLINE void with_rows(int64_t rows, const F &f) {
    [&]<int... LESS>(std::integer_sequence<int, LESS...>) {
        (void)((rows == LESS + 1 && (f.template operator()<LESS + 1>(), true)) || ...);
    }(std::make_integer_sequence<int, TILE_ROWS>());
}

constexpr int panels_at_once(int rows, int sums) {
    int count = sums / (rows * VECTORS);
    return count >= 4 ? 4 : count >= 2 ? 2 : 1;
}

// Up to TILE_ROWS rows times the panels [begin, end): each weight is read once, from memory.
template <int SUMS, class Product>
void multiply_few(const Product &product, const Matrix &m, int64_t begin, int64_t end, int64_t rows, const Target &to) {
    with_rows(rows, [&]<int ROWS>() {
        constexpr int COUNT = panels_at_once(ROWS, SUMS);
        NoPrefetch nothing;
        int64_t panel = begin;
        for (; panel + COUNT <= end; panel += COUNT)
            multiply_tile<ROWS, COUNT>(product, m, panel, 0, m.inputs, 0, nullptr, to, nothing);
        for (; panel < end; panel++) multiply_tile<ROWS, 1>(product, m, panel, 0, m.inputs, 0, nullptr, to, nothing);
    });
}

// Rows [top, bottom), which take turns at a stretch of COUNT panels. `bytes` of weights belong to a step's inputs, and
// `open(panel, panels, k, count, f)` calls f with the product of a stretch, where the next one lies and how far apart
// panels are.
template <int COUNT, class Open>
void multiply_block(const Matrix &m, int64_t panel, int64_t top, int64_t bottom, float *partial, const Target &to,
                    int64_t bytes, const Open &open) {
    int64_t rows = bottom - top, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    int64_t depth = m.kind == FLOAT32 ? DEPTH : DEPTH / m.run * m.run;
    for (int64_t k = 0; k < m.inputs; k += depth) {
        int64_t count = std::min(depth, m.inputs - k);
        auto tile_by_tile = [&](const auto &product, const void *next, int64_t size) __attribute__((always_inline)) {
            Prefetch ahead{static_cast<const char *>(next), bytes / tiles, size};
            constexpr int INPUTS = std::remove_cvref_t<decltype(product)>::INPUTS;
            for (int64_t tile = 0; tile < tiles; tile++, ahead.next += count / INPUTS * ahead.pace) {
                int64_t first = top + rows * tile / tiles;
                with_rows(top + rows * (tile + 1) / tiles - first, [&]<int ROWS>() {
                    multiply_tile<ROWS, COUNT>(product, m, panel, k, count, first, partial, to, ahead);
                });
            }
        };
        open(panel, COUNT, k, count, tile_by_tile);
    }
}

// Any number of rows, in blocks that stay in the second cache.
template <class Open>
void multiply_many(const Matrix &m, int64_t begin, int64_t end, int64_t rows, float *partial, const Target &to,
                   int64_t bytes, const Open &open) {
    int64_t blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t i = 0; i < blocks; i++) {
        int64_t top = rows * i / blocks, bottom = rows * (i + 1) / blocks, panel = begin;
        for (; panel + SIDE_BY_SIDE <= end; panel += SIDE_BY_SIDE)
            multiply_block<SIDE_BY_SIDE>(m, panel, top, bottom, partial, to, bytes, open);
        for (; panel < end; panel++) multiply_block<1>(m, panel, top, bottom, partial, to, bytes, open);
    }
}

// Where the weights go on after input `end` of `count` panels.
struct Place {
    int64_t panel, input;
};
Place following(const Matrix &m, int64_t panel, int64_t count, int64_t end) {
    return end < m.inputs ? Place{panel, end} : Place{panel + count, 0};
}

// Floats that `multiply` needs.
int64_t product_size(int64_t rows) { return SIDE_BY_SIDE * (rows * PANEL + DEPTH * PANEL / 2); }

// The words of the inputs [begin, begin + count) of a panel, from codes.
void decode(const Codes &codes, const Words &words, int64_t panel, int64_t begin, int64_t count) {
    auto *to = const_cast<int32_t *>(words.at(panel, begin));
    const uint8_t *from = codes.at(panel, begin);
    for (int64_t i = 0; i < count / Words::INPUTS; i++, to += PANEL) {
        vi w[VECTORS];
        codes.decode(from + i / 2 * Codes::LINE, i % 2, w);
        for (int j = 0; j < VECTORS; j++) store(to + j * LANES, w[j]);
    }
}

// x [rows, inputs] W^T + bias, of the panels [begin, end). `fixed`: x, unless the weights are floats.
void multiply(const Matrix &m, int64_t begin, int64_t end, const float *x, int64_t x_row, const Fixed &fixed,
              int64_t rows, float *scratch, const Target &to) {
    float *partial = scratch, *decoded = partial + SIDE_BY_SIDE * rows * PANEL;
    if (m.kind == FLOAT32) {
        Floats product{x, x_row, static_cast<const float *>(m.panels), m.inputs * PANEL};
        if (rows <= TILE_ROWS) return multiply_few<MOST_SUMS>(product, m, begin, end, rows, to);
        return multiply_many(m, begin, end, rows, partial, to, 2 * PANEL * sizeof(float),
                             [&](int64_t panel, int64_t panels, int64_t k, int64_t count, const auto &f) {
                                 Place next = following(m, panel, panels, k + count);
                                 const float *from = product.panels + next.panel * product.panel_size;
                                 f(product, from + next.input * PANEL, product.panel_size * sizeof(float));
                             });
    }
    auto whole = [&]<class Weights>(const Weights &weights) {
        FixedProduct<Weights> product{m, fixed, weights};
        if (rows <= TILE_ROWS) return multiply_few<Weights::SUMS>(product, m, begin, end, rows, to);
        return multiply_many(m, begin, end, rows, partial, to, PANEL * sizeof(int32_t),
                             [&](int64_t panel, int64_t panels, int64_t k, int64_t count, const auto &f) {
                                 Place next = following(m, panel, panels, k + count);
                                 f(product, weights.at(next.panel, next.input), weights.panel_size * sizeof(int32_t));
                             });
    };
    auto *words = static_cast<const int32_t *>(m.panels);
    if (m.kind == BFLOAT16) return whole(Words{words, m.runs() * m.run / Words::INPUTS * PANEL, 0, 0});
    if (m.kind == INT8) return whole(Bytes{words, m.runs() * m.run / Bytes::INPUTS * PANEL});
    Codes codes(m);
    if (rows <= TILE_ROWS)
        return multiply_few<Codes::SUMS>(FixedProduct<Codes>{m, fixed, codes}, m, begin, end, rows, to);
    multiply_many(m, begin, end, rows, partial, to, PANEL,
                  [&](int64_t panel, int64_t panels, int64_t k, int64_t count, const auto &f) {
                      Words words{reinterpret_cast<int32_t *>(decoded), count / Words::INPUTS * PANEL, panel, k};
                      for (int64_t p = panel; p < panel + panels; p++) decode(codes, words, p, k, count);
                      Place next = following(m, panel, panels, k + count);
                      f(FixedProduct<Words>{m, fixed, words}, codes.at(next.panel, next.input), codes.panel_size);
                  });
}

}  // namespace
