// Causal attention over whole sequences, forward and backward, without a [queries, keys] matrix (Dao et al. 2022).
//
// Everything is converted once to float32 in packed, padded rows; sums, softmax and gradients stay in float32.
// Forward: six queries at a time walk over blocks of keys with a running maximum and sum, and skip the keys that
// none of them sees. Backward: a block of keys meets each block of queries once; probabilities are computed again
// from the saved log-sum-exp. The order of every sum depends on the sizes alone, not on the number of threads.

#include <vector>

#include "simd.h"
#include "tile.h"

namespace {

constexpr int64_t FORWARD_KEYS = 128;     // keys in a block, forward
constexpr int64_t FORWARD_QUERIES = 48;   // queries that share the blocks of keys in the cache
constexpr int64_t BACKWARD_KEYS = 96;     // a multiple of TILE_ROWS and of TILE_COLUMNS for 4, 8 and 16 lanes
constexpr int64_t BACKWARD_QUERIES = 48;
constexpr int64_t PARALLEL_WORK = int64_t(1) << 18;  // multiply-adds that are worth a thread

struct Range {  // of positions, the end excluded
    int64_t begin, end;
};

struct Layout {  // strides of [batch, heads, tokens, width], whose rows are contiguous
    int64_t batch, head, token;
};

struct Shape {
    int64_t batch, heads, queries, keys, width;
    const int64_t *starts;  // [batch, queries]: the first key that a query may see; or null

    int64_t padded_width() const { return round_up(width, LANES); }
    // Threads that the work is worth; no result depends on it.
    int worth(int threads) const {
        int64_t work = batch * heads * queries * keys * width;
        return int(std::min<int64_t>(threads, work / PARALLEL_WORK + 1));
    }

    float scale() const { return float(1 / std::sqrt(double(width))); }

    // The keys that a query sees; {0, 0} if none, as for the rows that pad a block.
    Range seen(int64_t batch_index, int64_t query) const {
        if (query >= queries) return {0, 0};
        int64_t end = query + 1 + keys - queries;
        int64_t begin = starts ? std::max<int64_t>(starts[batch_index * queries + query], 0) : 0;
        return begin < end ? Range{begin, end} : Range{0, 0};
    }

    // The keys from the first to the last that any of `count` queries sees.
    Range seen_by(int64_t batch_index, int64_t query, int64_t count) const {
        if (!starts) return seen(batch_index, std::min(query + count, queries) - 1);
        Range all{keys, 0};
        for (int64_t i = query; i < std::min(query + count, queries); i++) {
            Range one = seen(batch_index, i);
            if (one.begin < one.end) all = {std::min(all.begin, one.begin), std::max(all.end, one.end)};
        }
        return all;
    }

    // How many of `block` keys from `key` on any of six queries sees, up to the last; and which each of them sees.
    int64_t mask_tile(int64_t batch_index, int64_t query, int64_t key, int64_t block,
                      Range rows[TILE_ROWS]) const {
        int64_t columns = 0;
        for (int64_t i = 0; i < TILE_ROWS; i++) {
            Range one = seen(batch_index, query + i);
            rows[i] = {std::max<int64_t>(one.begin - key, 0), std::min(one.end - key, block)};
            if (rows[i].begin >= rows[i].end) rows[i] = {0, 0};
            columns = std::max(columns, rows[i].end);
        }
        return columns;
    }
};

struct Document {  // of a row: its tokens [begin, begin + count) see each other and nothing else
    int64_t batch, begin, count;
};

// The documents of all rows where every row is made of some, and of several. None otherwise.
std::vector<Document> documents(const Shape &shape) {
    std::vector<Document> found;
    if (!shape.starts || shape.queries != shape.keys) return found;
    for (int64_t b = 0; b < shape.batch; b++)
        for (int64_t i = 0; i < shape.queries; i++) {
            int64_t start = shape.starts[b * shape.queries + i];
            if (start == i) found.push_back({b, i, 0});
            else if (!i || start != found.back().begin) return {};
            found.back().count++;
        }
    if (int64_t(found.size()) == shape.batch) found.clear();
    return found;
}

template <class T>
const T *rows_of(const T *tensor, Layout layout, int64_t batch, int64_t head) {
    return tensor + batch * layout.batch + head * layout.head;
}

template <class T>
T *rows_of(T *tensor, Layout layout, int64_t batch, int64_t head) {
    return tensor + batch * layout.batch + head * layout.head;
}

// The index of each lane.
INLINE vi lanes() {
    vi index{};
    for (int i = 0; i < LANES; i++) index[i] = i;
    return index;
}

// `body(part, begin, end)` for parts of [0, items), one for each thread.
template <class Body>
void parallel_ranges(int64_t items, int threads, const Body &body) {
    int64_t parts = std::min<int64_t>(threads, items);
    parallel_parts(parts, [&](int64_t part) { body(part, part * items / parts, (part + 1) * items / parts); });
}

// `body(part, document, head)`. Each part has all documents of some heads: documents differ in length.
template <class Body>
void each_document(const std::vector<Document> &all, int64_t heads, int threads, const Body &body) {
    int64_t count = all.size();
    parallel_ranges(heads * count, threads, [&](int64_t part, int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; item++) body(part, all[item % count], item / count);
    });
}

// Item i of a row of blocks that grow costlier, from both ends in turn, so that every range of them costs the same.
int64_t evened(int64_t item, int64_t count) { return item % 2 ? count - 1 - item / 2 : item / 2; }

// Scores before the first key of a row become -inf, as few rows of a tile have any.
INLINE void hide_begins(float *scores, int64_t stride, const Range visible[TILE_ROWS]) {
    for (int i = 0; i < TILE_ROWS; i++)
        if (visible[i].begin > 0) std::fill(scores + i * stride, scores + i * stride + visible[i].begin, -INFINITY);
}

// Scores from column j on of a row: those behind its last key become -inf.
INLINE vf hide_end(vf scores, Range visible, int64_t j) {
    return lanes() < int32_t(visible.end - j) ? scores : splat(-INFINITY);
}

// The largest of the lanes, in every lane.
INLINE vf largest_lane(vf a) {
    for (int step = LANES / 2; step > 0; step /= 2) a = maximum(a, __builtin_shuffle(a, lanes() ^ step));
    return a;
}

// log x to about 1 ulp for normal x > 0, -inf for 0, NaN for NaN. x = 2^n (1 + f), 0.7 <= 1 + f < 1.42; Cephes' series.
INLINE vf logarithm(vf x) {
    vi exponent = (bits<vi>(x) - 0x3F3504F3) >> 23;
    vf n = __builtin_convertvector(exponent, vf), f = bits<vf>(bits<vi>(x) - (exponent << 23)) - 1.0f;
    vf p = splat(7.0376836292e-2f);
    p = fma(p, f, splat(-1.1514610310e-1f));
    p = fma(p, f, splat(1.1676998740e-1f));
    p = fma(p, f, splat(-1.2420140846e-1f));
    p = fma(p, f, splat(1.4249322787e-1f));
    p = fma(p, f, splat(-1.6668057665e-1f));
    p = fma(p, f, splat(2.0000714765e-1f));
    p = fma(p, f, splat(-2.4999993993e-1f));
    p = fma(p, f, splat(3.3333331174e-1f));
    vf square = f * f, small = fma(n, splat(-2.12194440e-4f), p * square * f - 0.5f * square);
    vf log = fma(n, splat(0.693359375f), f + small);
    return x > 0.0f ? log : x == 0.0f ? splat(-INFINITY) : x;
}

// ---- forward ----

struct ForwardScratch {
    float *columns_of_k, *v, *q, *out, *scores;

    ForwardScratch(float *at, const Shape &shape) {
        int64_t width = shape.padded_width(), keys = round_up(shape.keys, FORWARD_KEYS);
        columns_of_k = at, v = columns_of_k + keys * width, q = v + keys * width;
        out = q + FORWARD_QUERIES * width, scores = out + FORWARD_QUERIES * width;
    }

    static int64_t size(const Shape &shape) {
        int64_t keys = round_up(shape.keys, FORWARD_KEYS), rows = 2 * keys + 2 * FORWARD_QUERIES;
        return rows * shape.padded_width() + TILE_ROWS * FORWARD_KEYS;
    }
};

// Hides the scores that six rows do not see; the largest of each row that are left.
INLINE void hide(float *scores, const Range visible[TILE_ROWS], int64_t columns, vf highest[TILE_ROWS]) {
    for (int i = 0; i < TILE_ROWS; i++) highest[i] = splat(-INFINITY);
    hide_begins(scores, FORWARD_KEYS, visible);
    for (int64_t j = 0; j < columns; j += LANES)
        for (int i = 0; i < TILE_ROWS; i++) {
            float *at = scores + i * FORWARD_KEYS + j;
            vf score = hide_end(load(at), visible[i], j);
            store(at, score);
            highest[i] = maximum(score, highest[i]);
        }
    for (int i = 0; i < TILE_ROWS; i++) highest[i] = largest_lane(highest[i]);
}

// A row meets a new maximum: what was summed against the one before shrinks.
INLINE void raise(float &highest, float block_highest, vf &sum, float *out, int64_t width) {
    if (!(block_highest > highest)) return;
    if (highest > -INFINITY) {
        vf shrink = exponential(splat(highest - block_highest));
        sum = sum * shrink;
        for (int64_t j = 0; j < width; j += LANES) store(out + j, load(out + j) * shrink);
    }
    highest = block_highest;
}

// Turns the scores of six rows into exponentials against the maximum so far of each, and adds these to its sums.
INLINE void exponentials(float *scores, int64_t columns, const float *highest, vf *sums) {
    for (int64_t j = 0; j < columns; j += LANES)
        for (int i = 0; i < TILE_ROWS; i++) {
            float *at = scores + i * FORWARD_KEYS + j;
            vf p = exponential(load(at) - splat(highest[i] == -INFINITY ? 0.0f : highest[i]));
            store(at, p);
            sums[i] += p;
        }
}

// Six queries meet one block of keys.
void forward_tile(const Shape &shape, const ForwardScratch &scratch, int64_t batch, int64_t query, int64_t row,
                  int64_t key, float *highest, vf *sums) {
    int64_t width = shape.padded_width();
    Range visible[TILE_ROWS];
    int64_t columns = shape.mask_tile(batch, query + row, key, FORWARD_KEYS, visible);
    if (!columns) return;
    float *out = scratch.out + row * width;
    multiply<false>(shape.width, {scratch.q + row * width, width, 1}, scratch.columns_of_k + key * width,
                    TILE_COLUMNS, TILE_COLUMNS * width, scratch.scores, FORWARD_KEYS, columns);
    vf block_highest[TILE_ROWS];
    hide(scratch.scores, visible, columns, block_highest);
    for (int64_t i = 0; i < TILE_ROWS; i++)
        raise(highest[i], block_highest[i][0], sums[i], out + i * width, width);
    exponentials(scratch.scores, columns, highest, sums);
    multiply<true>(columns, {scratch.scores, FORWARD_KEYS, 1}, scratch.v + key * width, width, TILE_COLUMNS, out,
                   width, width);
}

template <class T>
struct Forward {
    Shape shape;
    const T *q, *k, *v;
    T *out;
    float *lse;
    int64_t lse_row;  // from one head's to the next one's
    Layout q_layout, k_layout, v_layout, out_layout;

    // A document as a sequence of its own.
    Forward alone(const Document &d) const {
        Forward one = *this;
        one.shape = {1, shape.heads, d.count, d.count, shape.width, nullptr};
        auto move = [&](auto *&tensor, const Layout &layout) {
            tensor += d.batch * layout.batch + d.begin * layout.token;
        };
        move(one.q, q_layout), move(one.k, k_layout), move(one.v, v_layout), move(one.out, out_layout);
        one.lse += d.batch * shape.heads * lse_row + d.begin;
        return one;
    }

    void pack_head(const ForwardScratch &scratch, int64_t b, int64_t h) const {
        int64_t width = shape.padded_width(), padded = round_up(shape.keys, LANES);
        // The columns of k come from rows of it, which lie for a moment where those of v will.
        pack_rows(scratch.v, rows_of(k, k_layout, b, h), k_layout.token, shape.keys, padded, shape.width, width);
        pack_columns(scratch.columns_of_k, scratch.v, padded, width);
        pack_rows(scratch.v, rows_of(v, v_layout, b, h), v_layout.token, shape.keys, padded, shape.width, width);
    }

    void attend(const ForwardScratch &scratch, int64_t b, int64_t h, int64_t query) const {
        int64_t width = shape.padded_width(), count = std::min(FORWARD_QUERIES, shape.queries - query);
        int64_t rows = round_up(count, TILE_ROWS);
        float highest[FORWARD_QUERIES];
        vf sums[FORWARD_QUERIES];
        std::fill(highest, highest + FORWARD_QUERIES, -INFINITY);
        std::fill(sums, sums + FORWARD_QUERIES, vf{});
        std::fill(scratch.out, scratch.out + rows * width, 0.0f);
        pack_rows(scratch.q, rows_of(q, q_layout, b, h) + query * q_layout.token, q_layout.token, count, rows,
                  shape.width, width, shape.scale());
        Range keys = shape.seen_by(b, query, count);
        for (int64_t key = keys.begin / FORWARD_KEYS * FORWARD_KEYS; key < keys.end; key += FORWARD_KEYS)
            for (int64_t row = 0; row < rows; row += TILE_ROWS)
                forward_tile(shape, scratch, b, query, row, key, highest + row, sums + row);
        write(scratch, b, h, query, count, highest, sums);
    }

    void write(const ForwardScratch &scratch, int64_t b, int64_t h, int64_t query, int64_t count,
               const float *highest, vf *sums) const {
        int64_t width = shape.padded_width();
        T *to = rows_of(out, out_layout, b, h) + query * out_layout.token;
        float *to_lse = lse + (b * shape.heads + h) * lse_row + query, inverse[FORWARD_QUERIES];
        for (int64_t i = 0; i < count; i += LANES) {
            vf total = sums_of(sums + i), row_lse = load(highest + i) + logarithm(total);
            store(inverse + i, total == 0.0f ? vf{} : 1.0f / total);
            if (i + LANES <= count) store(to_lse + i, row_lse);
            else store_first(to_lse + i, row_lse, count - i);
        }
        for (int64_t i = 0; i < count; i++)
            unpack_rows(to + i * out_layout.token, 0, scratch.out + i * width, 1, shape.width, width, inverse[i]);
    }

    void run(float *scratch, int threads) const {
        int64_t size = ForwardScratch::size(shape);
        if (std::vector<Document> all = documents(shape); !all.empty())
            return each_document(all, shape.heads, threads, [&](int64_t part, const Document &d, int64_t h) {
                Forward one = alone(d);
                ForwardScratch own(scratch + part * size, one.shape);
                one.pack_head(own, 0, h);
                for (int64_t query = 0; query < d.count; query += FORWARD_QUERIES) one.attend(own, 0, h, query);
            });
        int64_t blocks = (shape.queries + FORWARD_QUERIES - 1) / FORWARD_QUERIES;
        parallel_ranges(shape.batch * shape.heads * blocks, threads, [&](int64_t part, int64_t begin, int64_t end) {
            ForwardScratch own(scratch + part * size, shape);
            for (int64_t item = begin, packed = -1; item < end; item++) {
                int64_t head = item / blocks, b = head / shape.heads, h = head % shape.heads;
                if (head != packed) pack_head(own, b, h), packed = head;
                attend(own, b, h, evened(item % blocks, blocks) * FORWARD_QUERIES);
            }
        });
    }
};

// ---- backward ----

struct BackwardScratch {
    int64_t queries, keys;  // rounded up to whole tiles
    float *q, *dout, *dq, *k, *columns_of_k, *columns_of_v, *dk, *dv, *p, *ds, *lse, *delta;

    BackwardScratch(float *at, const Shape &shape) {
        int64_t width = shape.padded_width();
        queries = round_up(shape.queries, BACKWARD_QUERIES), keys = round_up(shape.keys, BACKWARD_KEYS);
        q = at, dout = q + queries * width, dq = dout + queries * width;
        k = dq + queries * width, columns_of_k = k + keys * width, columns_of_v = columns_of_k + keys * width;
        dk = columns_of_v + keys * width, dv = dk + BACKWARD_KEYS * width;
        p = dv + BACKWARD_KEYS * width, ds = p + BACKWARD_QUERIES * BACKWARD_KEYS;
        lse = ds + BACKWARD_QUERIES * BACKWARD_KEYS, delta = lse + queries;
    }

    static int64_t size(const Shape &shape) {
        int64_t queries = round_up(shape.queries, BACKWARD_QUERIES), keys = round_up(shape.keys, BACKWARD_KEYS);
        return (3 * queries + 3 * keys + 2 * BACKWARD_KEYS) * shape.padded_width() +
               2 * BACKWARD_QUERIES * BACKWARD_KEYS + 2 * queries;
    }
};

// The scores of six rows become probabilities p, and the gradients of these, in `ds`, those of the scores.
INLINE void differentiate(float *p, float *ds, const Range visible[TILE_ROWS], int64_t columns, const float *lse,
                          const float *delta) {
    hide_begins(p, BACKWARD_KEYS, visible);
    for (int64_t j = 0; j < columns; j += LANES)
        for (int i = 0; i < TILE_ROWS; i++) {
            int64_t at = i * BACKWARD_KEYS + j;
            vf probability = exponential(hide_end(load(p + at), visible[i], j) - splat(lse[i]));
            store(p + at, probability);
            store(ds + at, probability * (load(ds + at) - splat(delta[i])));
        }
}

// Six queries meet one block of keys: rows of p = exp(score - lse) and ds = p (dp - delta). False if they see none.
bool backward_tile(const Shape &shape, const BackwardScratch &scratch, int64_t batch, int64_t query, int64_t key,
                   float *p, float *ds, bool queries_too) {
    int64_t width = shape.padded_width();
    Range visible[TILE_ROWS];
    int64_t columns = shape.mask_tile(batch, query, key, BACKWARD_KEYS, visible);
    // The products for keys read what a causal mask leaves to any of the rows, up to a whole tile.
    int64_t causal = query + 2 * TILE_ROWS + shape.keys - shape.queries - key;
    int64_t reached = std::clamp<int64_t>(causal, 0, BACKWARD_KEYS);
    if (columns) {
        multiply<false>(shape.width, {scratch.q + query * width, width, 1}, scratch.columns_of_k + key * width,
                        TILE_COLUMNS, TILE_COLUMNS * width, p, BACKWARD_KEYS, columns);
        multiply<false>(shape.width, {scratch.dout + query * width, width, 1}, scratch.columns_of_v + key * width,
                        TILE_COLUMNS, TILE_COLUMNS * width, ds, BACKWARD_KEYS, columns);
    }
    differentiate(p, ds, visible, columns, scratch.lse + query, scratch.delta + query);
    for (int64_t i = 0; i < TILE_ROWS * BACKWARD_KEYS; i += BACKWARD_KEYS)
        for (int64_t j = round_up(columns, LANES); j < reached; j += LANES)
            store(p + i + j, vf{}), store(ds + i + j, vf{});
    if (columns && queries_too)
        multiply<true>(columns, {ds, BACKWARD_KEYS, 1}, scratch.k + key * width, width, TILE_COLUMNS,
                       scratch.dq + query * width, width, width);
    return columns > 0;
}

// A block of queries meets a block of keys and adds to the gradients of either or both.
void backward_block(const Shape &shape, const BackwardScratch &scratch, int64_t batch, int64_t query, int64_t key,
                    bool keys_too, bool queries_too) {
    int64_t width = shape.padded_width(), rows = std::min(BACKWARD_QUERIES, shape.queries - query), seeing = -1;
    rows = round_up(rows, TILE_ROWS);
    for (int64_t row = 0; row < rows; row += TILE_ROWS) {
        int64_t at = row * BACKWARD_KEYS;
        bool sees = backward_tile(shape, scratch, batch, query + row, key, scratch.p + at, scratch.ds + at,
                                  queries_too);
        if (sees && seeing < 0) seeing = row;
    }
    if (seeing < 0 || !keys_too) return;
    for (int64_t column = 0; column < std::min(BACKWARD_KEYS, shape.keys - key); column += TILE_ROWS) {
        int64_t first = std::max(seeing, key + column - (shape.keys - shape.queries) - query);
        if (first >= rows) break;  // causal: no query of the block sees this key, nor a later one
        int64_t at = first * BACKWARD_KEYS + column, row = (query + first) * width;
        multiply<true>(rows - first, {scratch.p + at, 1, BACKWARD_KEYS}, scratch.dout + row, width, TILE_COLUMNS,
                       scratch.dv + column * width, width, width);
        multiply<true>(rows - first, {scratch.ds + at, 1, BACKWARD_KEYS}, scratch.q + row, width, TILE_COLUMNS,
                       scratch.dk + column * width, width, width);
    }
}

template <class T>
struct Backward {
    Shape shape;
    const T *dout, *q, *k, *v, *out;
    const float *lse;
    int64_t lse_row;
    T *dq, *dk, *dv;
    Layout dout_layout, q_layout, k_layout, v_layout, out_layout, dq_layout, dk_layout, dv_layout;

    Backward alone(const Document &d) const {
        Backward one = *this;
        one.shape = {1, shape.heads, d.count, d.count, shape.width, nullptr};
        auto move = [&](auto *&tensor, const Layout &layout) {
            tensor += d.batch * layout.batch + d.begin * layout.token;
        };
        move(one.dout, dout_layout), move(one.q, q_layout), move(one.k, k_layout), move(one.v, v_layout);
        move(one.out, out_layout), move(one.dq, dq_layout), move(one.dk, dk_layout), move(one.dv, dv_layout);
        one.lse += d.batch * shape.heads * lse_row + d.begin;
        return one;
    }

    void pack_head(const BackwardScratch &scratch, int64_t b, int64_t h) const {
        int64_t width = shape.padded_width();
        pack_rows(scratch.q, rows_of(q, q_layout, b, h), q_layout.token, shape.queries, scratch.queries,
                  shape.width, width, shape.scale());
        pack_rows(scratch.dout, rows_of(dout, dout_layout, b, h), dout_layout.token, shape.queries,
                  scratch.queries, shape.width, width);
        // The columns of v come from rows of it, which lie for a moment where those of k will.
        pack_rows(scratch.k, rows_of(v, v_layout, b, h), v_layout.token, shape.keys, scratch.keys, shape.width,
                  width);
        pack_columns(scratch.columns_of_v, scratch.k, scratch.keys, width);
        pack_rows(scratch.k, rows_of(k, k_layout, b, h), k_layout.token, shape.keys, scratch.keys, shape.width,
                  width);
        pack_columns(scratch.columns_of_k, scratch.k, scratch.keys, width);
        std::fill(scratch.dq, scratch.dq + scratch.queries * width, 0.0f);
        pack_statistics(scratch, b, h);
    }

    // For each query its log-sum-exp (0 where there is none) and delta = dout . out.
    void pack_statistics(const BackwardScratch &scratch, int64_t b, int64_t h) const {
        int64_t width = shape.padded_width();
        const float *from = lse + (b * shape.heads + h) * lse_row;
        std::fill(scratch.lse, scratch.lse + 2 * scratch.queries, 0.0f);
        for (int64_t i = 0; i < shape.queries; i++) {
            const T *row = rows_of(out, out_layout, b, h) + i * out_layout.token;
            vf total{};
            int64_t j = 0;
            for (; j + LANES <= shape.width; j += LANES)
                total = fma(load(scratch.dout + i * width + j), load(row + j), total);
            if (j < shape.width)
                total = fma(load(scratch.dout + i * width + j), load_first(row + j, shape.width - j), total);
            scratch.delta[i] = sum(total);
            scratch.lse[i] = from[i] == -INFINITY ? 0.0f : from[i];
        }
    }

    // One block of keys meets every query: its dk and dv, and its part of dq if `queries_too`.
    void keys_block(const BackwardScratch &scratch, int64_t b, int64_t h, int64_t key, bool queries_too) const {
        int64_t width = shape.padded_width(), count = std::min(BACKWARD_KEYS, shape.keys - key);
        int64_t rows = round_up(count, TILE_ROWS);
        std::fill(scratch.dk, scratch.dk + rows * width, 0.0f);
        std::fill(scratch.dv, scratch.dv + rows * width, 0.0f);
        int64_t first = std::max<int64_t>(key - (shape.keys - shape.queries), 0);
        for (int64_t query = first / BACKWARD_QUERIES * BACKWARD_QUERIES; query < shape.queries;
             query += BACKWARD_QUERIES)
            backward_block(shape, scratch, b, query, key, true, queries_too);
        unpack_rows(rows_of(dk, dk_layout, b, h) + key * dk_layout.token, dk_layout.token, scratch.dk, count,
                    shape.width, width);
        unpack_rows(rows_of(dv, dv_layout, b, h) + key * dv_layout.token, dv_layout.token, scratch.dv, count,
                    shape.width, width);
    }

    // One block of queries meets every key that it sees.
    void queries_block(const BackwardScratch &scratch, int64_t b, int64_t query) const {
        Range keys = shape.seen_by(b, query, BACKWARD_QUERIES);
        for (int64_t key = keys.begin / BACKWARD_KEYS * BACKWARD_KEYS; key < keys.end; key += BACKWARD_KEYS)
            backward_block(shape, scratch, b, query, key, false, true);
    }

    void write_queries(const BackwardScratch &scratch, int64_t b, int64_t h, int64_t query, int64_t count) const {
        int64_t width = shape.padded_width();
        unpack_rows(rows_of(dq, dq_layout, b, h) + query * dq_layout.token, dq_layout.token,
                    scratch.dq + query * width, count, shape.width, width, shape.scale());
    }

    void whole_head(const BackwardScratch &scratch, int64_t b, int64_t h) const {
        for (int64_t key = 0; key < shape.keys; key += BACKWARD_KEYS) keys_block(scratch, b, h, key, true);
        write_queries(scratch, b, h, 0, shape.queries);
    }

    // `body(scratch, b, h, item of the head)` for every item of every head, which is packed before.
    template <class Body>
    void each(float *scratch, int64_t items, int threads, const Body &body) const {
        int64_t size = BackwardScratch::size(shape);
        parallel_ranges(shape.batch * shape.heads * items, threads, [&](int64_t part, int64_t begin, int64_t end) {
            BackwardScratch own(scratch + part * size, shape);
            for (int64_t item = begin, packed = -1; item < end; item++) {
                int64_t head = item / items, b = head / shape.heads, h = head % shape.heads;
                if (head != packed) pack_head(own, b, h), packed = head;
                body(own, b, h, item % items);
            }
        });
    }

    // With a head for every thread, each is one pass. With fewer, dk with dv and then dq are passes of their own,
    // parallel over blocks: more work in all, but every sum keeps its order.
    void run(float *scratch, int threads) const {
        if (std::vector<Document> all = documents(shape); !all.empty())
            return each_document(all, shape.heads, threads, [&](int64_t part, const Document &d, int64_t h) {
                Backward one = alone(d);
                BackwardScratch own(scratch + part * BackwardScratch::size(shape), one.shape);
                one.pack_head(own, 0, h);
                one.whole_head(own, 0, h);
            });
        int64_t key_blocks = (shape.keys + BACKWARD_KEYS - 1) / BACKWARD_KEYS;
        int64_t query_blocks = (shape.queries + BACKWARD_QUERIES - 1) / BACKWARD_QUERIES;
        if (shape.batch * shape.heads >= threads)
            return each(scratch, 1, threads, [&](const BackwardScratch &own, int64_t b, int64_t h, int64_t) {
                whole_head(own, b, h);
            });
        each(scratch, key_blocks, threads, [&](const BackwardScratch &own, int64_t b, int64_t h, int64_t item) {
            keys_block(own, b, h, evened(item, key_blocks) * BACKWARD_KEYS, false);
        });
        each(scratch, query_blocks, threads, [&](const BackwardScratch &own, int64_t b, int64_t h, int64_t item) {
            int64_t query = evened(item, query_blocks) * BACKWARD_QUERIES;
            queries_block(own, b, query);
            write_queries(own, b, h, query, std::min(BACKWARD_QUERIES, shape.queries - query));
        });
    }
};

template <class T>
int forward(const Shape &shape, void **tensors, float *lse, const Layout *layouts, float *scratch, int threads) {
    auto in = [&](int i) { return static_cast<const T *>(tensors[i]); };
    Forward<T>{shape, in(0),      in(1),      in(2),      static_cast<T *>(tensors[3]), lse, shape.queries,
               layouts[0],        layouts[1], layouts[2], layouts[3]}
        .run(scratch, threads);
    return 0;
}

template <class T>
int backward(const Shape &shape, void **tensors, const float *lse, const Layout *layouts, float *scratch,
             int threads) {
    auto in = [&](int i) { return static_cast<const T *>(tensors[i]); };
    auto out = [&](int i) { return static_cast<T *>(tensors[i]); };
    Backward<T>{shape,      in(0),      in(1),      in(2),      in(3),      in(4),      lse,        shape.queries,
                out(5),     out(6),     out(7),     layouts[0], layouts[1], layouts[2], layouts[3], layouts[4],
                layouts[5], layouts[6], layouts[7]}
        .run(scratch, threads);
    return 0;
}

}  // namespace

// `sizes`: batch, heads, queries, keys, width. `starts`: [batch, queries] or null. `layouts`: strides of batch, head
// and token for each tensor, in elements. `scratch`: for each thread as many floats as the function below says.

EXPORT int64_t riftco_flash_attention_scratch(const int64_t *sizes, int for_backward) {
    Shape shape{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], nullptr};
    return for_backward ? BackwardScratch::size(shape) : ForwardScratch::size(shape);
}

// `tensors`: q, k, v, out. `lse`: float32 [batch, heads, queries].
EXPORT int riftco_flash_attention_forward(const int64_t *sizes, const int64_t *starts, void **tensors, float *lse,
                                          const Layout *layouts, int is_bf16, float *scratch, int threads) {
    Shape shape{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], starts};
    auto run = is_bf16 ? forward<bf16> : forward<float>;
    return run(shape, tensors, lse, layouts, scratch, shape.worth(threads));
}

// `tensors`: dout, q, k, v, out, dq, dk, dv.
EXPORT int riftco_flash_attention_backward(const int64_t *sizes, const int64_t *starts, void **tensors,
                                           const float *lse, const Layout *layouts, int is_bf16, float *scratch,
                                           int threads) {
    Shape shape{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], starts};
    auto run = is_bf16 ? backward<bf16> : backward<float>;
    return run(shape, tensors, lse, layouts, scratch, shape.worth(threads));
}
