// The newest tokens of sequences from embeddings to logits, in one call.
//
// A weight matrix lies in panels of PANEL outputs; a row of a panel holds what these outputs take from one input (two
// inputs in bf16, four in NF4). Every element of a product is one chain of multiply-adds over the inputs (in NF4 one
// for each run of inputs that share a scale, then one over the runs), whatever rows and panels are computed beside it
// and by which thread; norms and attention are computed row by row. So a row's logits have the same bits in any
// company. Reading the weights limits the speed of few rows, multiplying that of many; these take turns at a panel,
// which stays in the cache.

#include <memory>
#include <utility>
#include <vector>

#include "nf4_values.h"
#include "paged_row.h"

namespace {

constexpr int PANEL = 16;  // outputs, whatever the vectors' width: one line of the cache in float32
constexpr int VECTORS = PANEL / LANES;
constexpr int TILE_ROWS = LANES == 4 ? 3 : 6;
constexpr int MOST_SUMS = LANES == 16 ? 24 : 12;         // vectors of sums that leave registers for the operands
constexpr int64_t DEPTH = 256;                           // inputs whose weights of a panel fill half the nearest cache
constexpr int64_t GROUP = 8;                             // rows that meet a block of keys and values together
constexpr int64_t PARALLEL_WORK = int64_t(1) << 15;      // multiply-adds of a product that are worth a thread

enum Kind : int64_t { FLOAT32, BFLOAT16, NF4 };
enum After { STORE, ADD, GELU };

}  // namespace

// As `kernels/decode_step/cpu.py` fills them.
struct Matrix {
    const void *panels;   // [ceil(outputs / PANEL)] panels
    const float *scales;  // NF4: [panels, inputs / run, PANEL]
    const float *bias;    // [whole panels]
    int64_t kind, inputs, outputs, run;
};

struct Norm {
    const float *scale, *bias;
};

struct Layer {
    Norm attention_norm;
    Matrix query_key_value, output;
    Norm feed_forward_norm;
    Matrix expand, project;
};

struct Model {
    int64_t width, heads, blocks, inner, vocabulary;
    double epsilon;
    const float *token_embedding, *position_embedding;
    const Layer *layers;
    Norm final_norm;
    Matrix head;
};

struct Rows {
    int64_t count, table_width, pages, page_size, positions;
    const int64_t *token_ids, *position, *table;
    const uint8_t *needs_logits;                  // null: all
    void *const *key_pages, *const *value_pages;  // for each block [pages, heads, page_size, head width]
};

namespace {

// sums of each row += its input times the weights. Sums, weights and one factor fit 16 registers; the factors of all
// rows besides would not.
template <int ROWS, int COUNT>
INLINE void add_products(const float *x, int64_t x_row, const vf (&weights)[COUNT * VECTORS],
                         vf (&sums)[ROWS][COUNT * VECTORS]) {
    for (int r = 0; r < ROWS; r++) {
        vf factor = splat(x[r * x_row]);
        for (int j = 0; j < COUNT * VECTORS; j++) sums[r][j] = fma(factor, weights[j], sums[r][j]);
    }
}

// Where the weights of a kind come from. `add` adds what `STEP` inputs from k on give, to ROWS x COUNT panels' sums.
struct Floats {
    static constexpr int STEP = 1, SUMS = MOST_SUMS;
    const float *panels;
    int64_t panel_size;

    Floats(const Matrix &m, int64_t panel) : panel_size(m.inputs * PANEL) {
        panels = static_cast<const float *>(m.panels) + panel * panel_size;
    }
    Floats(const float *decoded) : panels(decoded), panel_size(0) {}

    template <int ROWS, int COUNT>
    __attribute__((always_inline)) void add(int64_t k, const float *x, int64_t x_row,
                                            vf (&sums)[ROWS][COUNT * VECTORS]) const {
        vf weights[COUNT * VECTORS];
        for (int j = 0; j < COUNT * VECTORS; j++)
            weights[j] = load(panels + j / VECTORS * panel_size + k * PANEL + j % VECTORS * LANES);
        add_products<ROWS, COUNT>(x + k, x_row, weights, sums);
    }
};

struct Halves {
    static constexpr int STEP = 2, SUMS = MOST_SUMS;
    const uint32_t *panels;  // an even input's weight in the lower half of a word, the next one's in the upper
    int64_t panel_size;

    Halves(const Matrix &m, int64_t panel) : panel_size((m.inputs + 1) / 2 * PANEL) {
        panels = static_cast<const uint32_t *>(m.panels) + panel * panel_size;
    }

    // Of input k, from the output `o` of the first panel on.
    __attribute__((always_inline)) vf weights(int64_t k, int64_t o) const {
        vu words;
        std::memcpy(&words, panels + o / PANEL * panel_size + k / 2 * PANEL + o % PANEL, sizeof words);
        return bits<vf>(k % 2 ? words & 0xFFFF0000u : words << 16);
    }

    template <int ROWS, int COUNT>
    __attribute__((always_inline)) void add(int64_t k, const float *x, int64_t x_row,
                                            vf (&sums)[ROWS][COUNT * VECTORS]) const {
        for (int odd = 0; odd < 2; odd++) {
            vf of_input[COUNT * VECTORS];
            for (int j = 0; j < COUNT * VECTORS; j++) of_input[j] = weights(k + odd, j * LANES);
            add_products<ROWS, COUNT>(x + k + odd, x_row, of_input, sums);
        }
    }
};

// The codes of 4 inputs x PANEL outputs lie in 32 bytes in the order that AVX2 decodes most cheaply: output o of input
// k in half o % 8 / 4, double word k % 2 * 2 + o / 8, byte o % 4, low nibble for k < 2.
struct Codes {
    static constexpr int STEP = 4, SUMS = MOST_SUMS / 6;  // decoding takes registers too
    const uint8_t *panels;
    int64_t panel_size;
#if defined(__AVX2__) && RIFTCO_LANES == 8
    __m256i planes[4];  // byte i of the float of each code: tables of bytes are twice as fast as tables of floats
#endif

    Codes(const Matrix &m, int64_t panel) : panel_size(m.inputs * PANEL / 2) {
        panels = static_cast<const uint8_t *>(m.panels) + panel * panel_size;
#if defined(__AVX2__) && RIFTCO_LANES == 8
        for (int plane = 0; plane < 4; plane++) {
            uint8_t table[32];
            for (int i = 0; i < 32; i++) table[i] = uint8_t(bits<uint32_t>(VALUES[i % 16]) >> (8 * plane));
            planes[plane] = _mm256_loadu_si256((const __m256i *)table);
        }
#endif
    }

    // Two inputs' weights, from the low nibbles or (`upper`) from the high ones.
    __attribute__((always_inline)) void decode(const uint8_t *from, bool upper, vf (&out)[2][VECTORS]) const {
#if defined(__AVX2__) && RIFTCO_LANES == 8
        __m256i words = _mm256_loadu_si256((const __m256i *)from);
        __m256i codes = _mm256_and_si256(upper ? _mm256_srli_epi16(words, 4) : words, _mm256_set1_epi8(15));
        __m256i a = _mm256_shuffle_epi8(planes[0], codes), b = _mm256_shuffle_epi8(planes[1], codes);
        __m256i c = _mm256_shuffle_epi8(planes[2], codes), d = _mm256_shuffle_epi8(planes[3], codes);
        __m256i low = _mm256_unpacklo_epi8(a, b), high = _mm256_unpacklo_epi8(c, d);
        out[0][0] = bits<vf>(_mm256_unpacklo_epi16(low, high));
        out[0][1] = bits<vf>(_mm256_unpackhi_epi16(low, high));
        low = _mm256_unpackhi_epi8(a, b), high = _mm256_unpackhi_epi8(c, d);
        out[1][0] = bits<vf>(_mm256_unpacklo_epi16(low, high));
        out[1][1] = bits<vf>(_mm256_unpackhi_epi16(low, high));
#elif defined(__AVX512F__) && defined(__AVX512VL__) && RIFTCO_LANES == 16
        __m256i words = _mm256_loadu_si256((const __m256i *)from);
        words = _mm256_and_si256(upper ? _mm256_srli_epi16(words, 4) : words, _mm256_set1_epi8(15));
        words = _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        __m512 table = _mm512_loadu_ps(VALUES);
        out[0][0] = bits<vf>(_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm256_castsi256_si128(words)), table));
        out[1][0] = bits<vf>(_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm256_extracti128_si256(words, 1)), table));
#else
        float values[2][PANEL];
        for (int k = 0; k < 2; k++)
            for (int o = 0; o < PANEL; o++)
                values[k][o] = VALUES[from[o % 8 / 4 * 16 + (k * 2 + o / 8) * 4 + o % 4] >> (upper ? 4 : 0) & 15];
        std::memcpy(&out, values, sizeof values);
#endif
    }

    template <int ROWS, int COUNT>
    __attribute__((always_inline)) void add(int64_t k, const float *x, int64_t x_row,
                                            vf (&sums)[ROWS][COUNT * VECTORS]) const {
        for (int panel = 0; panel < COUNT; panel++)
            for (int pair = 0; pair < 2; pair++) {
                vf weights[2][VECTORS];
                decode(panels + panel * panel_size + k * (PANEL / 2), pair, weights);
                for (int i = 0; i < 2; i++)
                    for (int r = 0; r < ROWS; r++) {
                        vf factor = splat(x[r * x_row + k + 2 * pair + i]);
                        for (int j = 0; j < VECTORS; j++)
                            sums[r][panel * VECTORS + j] = fma(factor, weights[i][j], sums[r][panel * VECTORS + j]);
                    }
            }
    }
};

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
    if (to.after == GELU) value = value * normal(value).cdf;
    if (column + LANES <= to.columns) store(out, value);
    else store_first(out, value, to.columns - column);
}

// ROWS rows of x times COUNT panels.
template <int ROWS, int COUNT, class Source>
void multiply_tile(const Source &source, const Matrix &m, int64_t panel, const float *x, int64_t x_row, int64_t row,
                   const Target &to) {
    vf sums[ROWS][COUNT * VECTORS];
    if (m.kind != NF4) {
        for (auto &of_row : sums)
            for (vf &one : of_row) one = vf{};
        for (int64_t k = 0; k < m.inputs; k += Source::STEP) source.template add<ROWS, COUNT>(k, x, x_row, sums);
    } else {
        vf totals[ROWS][COUNT * VECTORS];
        for (auto &of_row : totals)
            for (vf &one : of_row) one = vf{};
        for (int64_t begin = 0; begin < m.inputs; begin += m.run) {
            for (auto &of_row : sums)
                for (vf &one : of_row) one = vf{};
            for (int64_t k = begin; k < begin + m.run; k += Source::STEP)
                source.template add<ROWS, COUNT>(k, x, x_row, sums);
            for (int j = 0; j < COUNT * VECTORS; j++) {
                int64_t run = (panel + j / VECTORS) * (m.inputs / m.run) + begin / m.run;
                vf scale = load(m.scales + run * PANEL + j % VECTORS * LANES);
                for (int r = 0; r < ROWS; r++) totals[r][j] = fma(sums[r][j], scale, totals[r][j]);
            }
        }
        std::memcpy(&sums, &totals, sizeof sums);
    }
    for (int j = 0; j < COUNT * VECTORS; j++) {
        int64_t column = panel * PANEL + j * LANES;
        vf bias = load(m.bias + column);
        for (int r = 0; r < ROWS; r++) finish(to, row + r, column, sums[r][j] + bias);
    }
}

constexpr int panels_at_once(int rows, int sums) {
    int count = sums / (rows * VECTORS);
    return count >= 4 ? 4 : count >= 2 ? 2 : 1;
}

// `count` panels from `panel` on. `source(panel)` gives the weights.
template <int ROWS, class Source>
void multiply_panels(const Source &source, const Matrix &m, int64_t panel, int64_t count, const float *x,
                     int64_t x_row, int64_t row, const Target &to) {
    constexpr int COUNT = panels_at_once(ROWS, decltype(source(panel))::SUMS);
    x += row * x_row;
    for (; count >= COUNT; count -= COUNT, panel += COUNT)
        multiply_tile<ROWS, COUNT>(source(panel), m, panel, x, x_row, row, to);
    for (; count > 0; count--, panel++) multiply_tile<ROWS, 1>(source(panel), m, panel, x, x_row, row, to);
}

// Calls f.operator()<ROWS>() for a number of rows up to TILE_ROWS.
template <class F>
INLINE void with_rows(int64_t rows, const F &f) {
    [&]<int... LESS>(std::integer_sequence<int, LESS...>) {
        (void)((rows == LESS + 1 && (f.template operator()<LESS + 1>(), true)) || ...);
    }(std::make_integer_sequence<int, TILE_ROWS>());
}

// Up to TILE_ROWS rows of x times the panels [begin, end): each weight is read once, from memory.
template <class Source>
void multiply_few(const Matrix &m, int64_t begin, int64_t end, const float *x, int64_t x_row, int64_t rows,
                  const Target &to) {
    with_rows(rows, [&]<int ROWS>() {
        multiply_panels<ROWS>([&](int64_t panel) { return Source(m, panel); }, m, begin, end - begin, x, x_row, 0, to);
    });
}

// Some of a panel's inputs, their weights as floats (those of NF4 not yet scaled), and where what is read next lies:
// it is on its way to the cache, `pace` bytes for every two inputs of a tile.
struct Stretch {
    const float *weights;
    int64_t begin, count;
    const char *next;
    int64_t pace;
};

template <int ROWS>
INLINE void meet(const float *weights, int64_t count, const float *x, int64_t x_row, vf (&sums)[ROWS][VECTORS],
                 const char *next, int64_t pace) {
    Floats source(weights);
    int64_t k = 0;
    for (; k + 2 <= count; k += 2, next += pace) {
        __builtin_prefetch(next);
        source.add<ROWS, 1>(k, x, x_row, sums);
        source.add<ROWS, 1>(k + 1, x, x_row, sums);
    }
    if (k < count) source.add<ROWS, 1>(k, x, x_row, sums);
}

// A stretch of a panel met by ROWS rows; their sums so far lie in `partial` between stretches.
template <int ROWS>
void meet_stretch(const Matrix &m, int64_t panel, const Stretch &s, const float *x, int64_t x_row, float *partial,
                  int64_t row, const Target &to) {
    vf totals[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < VECTORS; j++)
            totals[r][j] = s.begin ? load(partial + (row + r) * PANEL + j * LANES) : vf{};
    x += row * x_row + s.begin;
    if (m.kind != NF4) meet<ROWS>(s.weights, s.count, x, x_row, totals, s.next, s.pace);
    else
        for (int64_t k = 0; k < s.count; k += m.run) {
            vf sums[ROWS][VECTORS] = {};
            meet<ROWS>(s.weights + k * PANEL, m.run, x + k, x_row, sums, s.next + k / 2 * s.pace, s.pace);
            const float *scales = m.scales + (panel * m.inputs + s.begin + k) / m.run * PANEL;
            for (int j = 0; j < VECTORS; j++)
                for (int r = 0; r < ROWS; r++)
                    totals[r][j] = fma(sums[r][j], load(scales + j * LANES), totals[r][j]);
        }
    bool last = s.begin + s.count == m.inputs;
    for (int j = 0; j < VECTORS; j++) {
        int64_t column = panel * PANEL + j * LANES;
        for (int r = 0; r < ROWS; r++)
            if (last) finish(to, row + r, column, totals[r][j] + load(m.bias + column));
            else store(partial + (row + r) * PANEL + j * LANES, totals[r][j]);
    }
}

// The inputs [begin, begin + count) of a panel as floats [count, PANEL]; where the weights themselves end.
const void *decode(const Matrix &m, int64_t panel, int64_t begin, int64_t count, float *out) {
    if (m.kind == BFLOAT16) {
        Halves halves(m, panel);
        for (int64_t k = begin; k < begin + count; k++)
            for (int o = 0; o < PANEL; o += LANES, out += LANES) store(out, halves.weights(k, o));
        return halves.panels + (begin + count + 1) / 2 * PANEL;
    }
    Codes codes(m, panel);
    const uint8_t *from = codes.panels + begin * (PANEL / 2);
    for (int64_t k = 0; k < count; k += Codes::STEP)
        for (int pair = 0; pair < 2; pair++, out += 2 * PANEL) {
            vf weights[2][VECTORS];
            codes.decode(from + k * (PANEL / 2), pair, weights);
            std::memcpy(out, &weights, sizeof weights);
        }
    return from + count * (PANEL / 2);
}

// How many inputs of a panel rows meet before they meet the next: in NF4 whole runs.
INLINE int64_t depth(const Matrix &m) {
    if (m.kind != NF4) return DEPTH;
    return m.run < DEPTH ? DEPTH / m.run * m.run : m.run;
}

// As `multiply_few` for any number of rows, which take turns at a stretch of a panel while it is in the nearest cache.
void multiply_many(const Matrix &m, int64_t begin, int64_t end, const float *x, int64_t x_row, int64_t rows,
                   float *scratch, const Target &to) {
    float *partial = scratch, *decoded = scratch + rows * PANEL;
    int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t panel = begin; panel < end; panel++)
        for (int64_t k = 0; k < m.inputs; k += depth(m)) {
            Stretch s{decoded, k, std::min(depth(m), m.inputs - k), nullptr, 0};
            if (m.kind == FLOAT32) {
                s.weights = Floats(m, panel).panels + k * PANEL;
                s.next = reinterpret_cast<const char *>(s.weights + s.count * PANEL);
                s.pace = 2 * PANEL * sizeof(float) / tiles;
            } else {
                s.next = static_cast<const char *>(decode(m, panel, k, s.count, decoded));
                s.pace = PANEL * sizeof(float) / tiles;
            }
            for (int64_t tile = 0; tile < tiles; tile++, s.next += s.count / 2 * s.pace) {
                int64_t row = rows * tile / tiles;
                with_rows(rows * (tile + 1) / tiles - row, [&]<int ROWS>() {
                    meet_stretch<ROWS>(m, panel, s, x, x_row, partial, row, to);
                });
            }
        }
}

// x [rows, inputs] W^T + bias, of the panels [begin, end).
void multiply(const Matrix &m, int64_t begin, int64_t end, const float *x, int64_t x_row, int64_t rows,
              float *scratch, const Target &to) {
    if (rows > TILE_ROWS) multiply_many(m, begin, end, x, x_row, rows, scratch, to);
    else if (m.kind == FLOAT32) multiply_few<Floats>(m, begin, end, x, x_row, rows, to);
    else if (m.kind == BFLOAT16) multiply_few<Halves>(m, begin, end, x, x_row, rows, to);
    else multiply_few<Codes>(m, begin, end, x, x_row, rows, to);
}

INLINE int64_t padded(int64_t count) { return (count + PANEL - 1) / PANEL * PANEL; }

// The sum of f over a row of whole vectors, each lane in order and then the lanes as a tree.
template <class F>
INLINE float row_sum(int64_t width, const F &f) {
    vf total = vf{};
    int64_t c = 0;
    for (; c + LANES <= width; c += LANES) total += f(c);
    if (c < width) {
        vf last = f(c);
        total += load_first(reinterpret_cast<const float *>(&last), width - c);
    }
    return sum(total);
}

// Rows are padded with zeros to whole panels, in x as in out.
void normalize(const float *x, const Norm &norm, int64_t width, double epsilon, float *out) {
    float mean = row_sum(width, [&](int64_t c) { return load(x + c); }) / float(width);
    float square = row_sum(width, [&](int64_t c) {
        vf d = load(x + c) - mean;
        return d * d;
    });
    float factor = float(1 / std::sqrt(double(square / float(width)) + epsilon));
    for (int64_t c = 0; c < width; c += LANES) {
        int64_t rest = std::min<int64_t>(LANES, width - c);
        vf scale = load_first(norm.scale + c, rest), bias = load_first(norm.bias + c, rest);
        store(out + c, fma((load(x + c) - mean) * factor, scale, bias));
    }
    std::fill(out + width, out + padded(width), 0.0f);
}

struct Group {  // rows of one sequence at positions one after another
    int64_t first, count;
};

template <class T>
struct Step {
    const Model &m;
    const Rows &rows;
    float *logits;
    int64_t head_width, width_row, inner_row, qkv_row;
    // [rows, a row padded to whole panels]. One panel more keeps the same input of a tile's rows in different sets of
    // the cache.
    float *x, *normed, *qkv, *context, *inner;
    float *product_scratch, *attention_scratch;  // of each part
    std::vector<Group> groups;
    int64_t product_size, attention_size;

    static int64_t lanes(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

    Step(const Model &model, const Rows &r, float *out)
        : m(model), rows(r), logits(out), head_width(model.width / model.heads), width_row(padded(model.width) + PANEL),
          inner_row(padded(model.inner) + PANEL), qkv_row(padded(3 * model.width)),
          product_size((r.count + std::max(model.width, model.inner)) * PANEL), attention_size(2 * GROUP * row_size()) {
        for (int64_t i = 0; i < rows.count; i++) {
            bool begins = groups.empty() || groups.back().count == GROUP || !is_followed(i - 1);
            if (begins) groups.push_back({i, 0});
            groups.back().count++;
        }
    }

    int64_t scratch_size(int threads) const {
        return rows.count * (3 * width_row + qkv_row + inner_row) + threads * (product_size + attention_size);
    }

    void divide(float *scratch, int threads) {
        auto take = [&](int64_t size) { return std::exchange(scratch, scratch + size); };
        x = take(rows.count * width_row);
        normed = take(rows.count * width_row);
        context = take(rows.count * width_row);
        qkv = take(rows.count * qkv_row);
        inner = take(rows.count * inner_row);
        product_scratch = take(threads * product_size);
        attention_scratch = take(threads * attention_size);
    }

    void run(int threads) const {
        auto each_row = [&](int64_t count, const auto &body) {
            parallel_for(count, PARALLEL_WORK / (8 * m.width), threads, [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; i++) body(i);
            });
        };
        auto product = [&](const Matrix &w, const float *from, int64_t from_row, int64_t count, Target to) {
            int64_t panels = (w.outputs + PANEL - 1) / PANEL, parts = std::min<int64_t>(threads, panels);
            parallel_parts(parts, [&](int64_t part) {
                multiply(w, panels * part / parts, panels * (part + 1) / parts, from, from_row, count,
                         product_scratch + part * product_size, to);
            });
        };
        auto norm = [&](const Norm &n) {
            each_row(rows.count, [&](int64_t i) {
                normalize(x + i * width_row, n, m.width, m.epsilon, normed + i * width_row);
            });
        };
        each_row(rows.count, [&](int64_t i) { embed(i); });
        for (int64_t layer = 0; layer < m.blocks; layer++) {
            const Layer &b = m.layers[layer];
            norm(b.attention_norm);
            product(b.query_key_value, normed, width_row, rows.count, {STORE, qkv, qkv_row, qkv_row});
            attention(layer, threads);
            product(b.output, context, width_row, rows.count, {ADD, x, width_row, width_row});
            norm(b.feed_forward_norm);
            product(b.expand, normed, width_row, rows.count, {GELU, inner, inner_row, inner_row});
            product(b.project, inner, inner_row, rows.count, {ADD, x, width_row, width_row});
        }
        int64_t needed = 0;
        for (int64_t i = 0; i < rows.count; i++)
            if (!rows.needs_logits || rows.needs_logits[i])
                normalize(x + i * width_row, m.final_norm, m.width, m.epsilon, normed + needed++ * width_row);
        product(m.head, normed, width_row, needed, {STORE, logits, m.vocabulary, m.vocabulary});
    }

    // Writes the rows' keys and values into their pages and attends to all that each sees.
    void attention(int64_t layer, int threads) const {
        bool whole_heads = m.heads % threads == 0;  // a part reads those that it has written, and no others
        int64_t band = whole_heads ? m.heads / threads : 1;
        int64_t all_rows = rows.count * m.heads, items = int64_t(groups.size()) * m.heads;
        auto write = [&](int64_t part) {
            for (int64_t i = all_rows * part / threads; i < all_rows * (part + 1) / threads; i++)
                write_pages(layer, place(i, rows.count, band));
        };
        auto read = [&](int64_t part) {
            attend(layer, items * part / threads, items * (part + 1) / threads, band, part);
        };
        if (!whole_heads) parallel_parts(threads, write);
        parallel_parts(threads, [&](int64_t part) {
            if (whole_heads) write(part);
            read(part);
        });
    }

    void embed(int64_t i) const {
        const float *token = m.token_embedding + rows.token_ids[i] * m.width;
        const float *position = m.position_embedding + rows.position[i] * m.width;
        float *out = x + i * width_row;
        for (int64_t c = 0; c < m.width; c++) out[c] = token[c] + position[c];
        std::fill(out + m.width, out + width_row, 0.0f);
        std::fill(context + i * width_row + m.width, context + (i + 1) * width_row, 0.0f);
    }

    struct Place {
        int64_t row, head;  // of a row or a group of them
    };

    // The i-th of all rows and heads: row by row in a band of heads, which are neighbours in a page, and band by band.
    static Place place(int64_t i, int64_t count, int64_t band) {
        int64_t size = count * band, j = i % size;
        return {j / band, i / size * band + j % band};
    }

    void write_pages(int64_t layer, Place place) const {
        auto [i, head] = place;
        int64_t page = rows.table[i * rows.table_width + rows.position[i] / rows.page_size];
        int64_t at = ((page * m.heads + head) * rows.page_size + rows.position[i] % rows.page_size) * head_width;
        const float *key = qkv + i * qkv_row + m.width + head * head_width, *value = key + m.width;
        T *keys = static_cast<T *>(rows.key_pages[layer]) + at;
        T *values = static_cast<T *>(rows.value_pages[layer]) + at;
        for (int64_t c = 0; c < head_width; c++) {
            keys[c] = from_float<T>(key[c]);
            values[c] = from_float<T>(value[c]);
        }
    }

    // Rows of one sequence and a head: they meet a block of its keys and values while it is in the cache.
    struct Item {
        Pages<T> pages;
        Row rows[GROUP];
        int64_t count;
        float *to;  // where the first row's result goes

        int64_t seen() const { return rows[count - 1].seen; }
        void find(int64_t at, int64_t width, Block<T> &block) const {
            pages.find(at, std::min(at + BLOCK, seen()), width, block);
        }
        void meet(const Block<T> &block, int64_t at, int64_t width) {
            for (int64_t i = 0; i < count; i++)
                if (rows[i].seen > at) meet_block(rows[i], block, std::min(BLOCK, rows[i].seen - at), width);
        }
    };

    // The items [begin, end). The next block is on its way to the cache while one is met.
    void attend(int64_t layer, int64_t begin, int64_t end, int64_t band, int64_t part) const {
        if (begin == end) return;
        Item items[2];
        Block<T> blocks[2];
        auto opened = [&](int64_t i) {
            open(layer, place(i, int64_t(groups.size()), band), attention_scratch + part * attention_size + i % 2 * GROUP * row_size(), items[i % 2]);
            return &items[i % 2];
        };
        Item *item = opened(begin);
        item->find(0, head_width, blocks[0]);
        for (int64_t number = 0, at = 0;; number++) {
            Item *next = item;
            int64_t next_at = at + BLOCK;
            if (next_at >= item->seen()) next = begin + 1 < end ? opened(begin + 1) : nullptr, next_at = 0;
            if (next) next->find(next_at, head_width, blocks[(number + 1) % 2]);
            item->meet(blocks[number % 2], at, head_width);
            if (next != item) close(*item), begin++;
            if (!next) return;
            item = next, at = next_at;
        }
    }

    void open(int64_t layer, Place place, float *scratch, Item &item) const {
        int64_t page = m.heads * rows.page_size * head_width, head = place.head;
        Group group = groups[place.row];
        auto of_head = [&](void *const *pages) {
            return static_cast<const T *>(pages[layer]) + head * rows.page_size * head_width;
        };
        const int64_t *table = rows.table + (group.first + group.count - 1) * rows.table_width;
        item.pages = {of_head(rows.key_pages), of_head(rows.value_pages), page, head_width, page, head_width, table,
                      rows.page_size};
        item.count = group.count;
        item.to = context + group.first * width_row + head * head_width;
        float scale = float(1 / std::sqrt(double(head_width)));
        for (int64_t r = 0; r < group.count; r++, scratch += row_size()) {
            const float *from = qkv + (group.first + r) * qkv_row + head * head_width;
            for (int64_t c = 0; c < head_width; c++) scratch[c] = from[c] * scale;
            std::fill(scratch + head_width, scratch + row_size(), 0.0f);
            float *out = scratch + row_size() / 2;
            item.rows[r] = {scratch, out, -INFINITY, vf{}, rows.position[group.first + r] + 1};
        }
    }

    void close(const Item &item) const {
        for (int64_t r = 0; r < item.count; r++) {
            float factor = 1 / sum(item.rows[r].total);
            for (int64_t c = 0; c < head_width; c++) item.to[r * width_row + c] = item.rows[r].out[c] * factor;
        }
    }

    // Whether the row after i is of its sequence, one position on.
    bool is_followed(int64_t i) const {
        const int64_t *table = rows.table + i * rows.table_width, used = rows.position[i] / rows.page_size + 1;
        return i + 1 < rows.count && rows.position[i + 1] == rows.position[i] + 1 &&
               std::equal(table, table + used, table + rows.table_width);
    }

    // Of a row's query and result.
    int64_t row_size() const { return 2 * lanes(head_width); }
};

template <class T>
void step(const Model &model, const Rows &rows, float *logits, int threads) {
    Step<T> work(model, rows, logits);
    std::unique_ptr<float[]> scratch(new float[work.scratch_size(threads)]);
    work.divide(scratch.get(), threads);
    work.run(threads);
}

bool fits(const Model &model, const Rows &rows) {
    for (int64_t i = 0; i < rows.count; i++) {
        int64_t used = rows.position[i] / rows.page_size + 1;
        if (rows.token_ids[i] < 0 || rows.token_ids[i] >= model.vocabulary) return false;
        if (rows.position[i] < 0 || rows.position[i] >= rows.positions || used > rows.table_width) return false;
        for (int64_t j = 0; j < used; j++)
            if (rows.table[i * rows.table_width + j] < 0 || rows.table[i * rows.table_width + j] >= rows.pages)
                return false;
    }
    return true;
}

int worthwhile(const Model &model, const Rows &rows, int threads) {
    int64_t between = rows.count * model.width * (4 * model.width + 2 * model.inner) / 5;
    return int(std::max<int64_t>(1, std::min<int64_t>(threads, between / PARALLEL_WORK)));
}

}  // namespace

// Writes the rows' keys and values into the pages and logits [rows that need them, vocabulary]. Returns 1, having done
// nothing, if a token, position or table does not fit.
EXPORT int riftco_decode_step(const Model *model, const Rows *rows, int64_t is_bf16, float *logits, int64_t threads) {
    if (!fits(*model, *rows)) return 1;
    auto run = is_bf16 ? step<bf16> : step<float>;
    run(*model, *rows, logits, worthwhile(*model, *rows, int(threads)));
    return 0;
}
