// Causal attention over whole sequences, forward and backward, without a [queries, keys] matrix (Dao et al. 2022).
//
// Everything is converted once to float32 in packed, padded rows; sums, softmax and gradients stay in float32.
// Forward: six queries at a time walk over blocks of keys with a running maximum and sum, and skip the keys that
// none of them sees. Backward: a block of keys meets each block of queries once; probabilities are computed again
// from the saved log-sum-exp. The order of every sum depends on the sizes alone, not on the number of threads.

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

    int64_t padded_width() const { return round_up(width, TILE_COLUMNS); }
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
            rows[i] = {std::clamp<int64_t>(one.begin - key, 0, block), std::clamp<int64_t>(one.end - key, 0, block)};
            if (rows[i].begin < rows[i].end) columns = std::max(columns, rows[i].end);
        }
        return columns;
    }
};

template <class T>
const T *rows_of(const T *tensor, Layout layout, int64_t batch, int64_t head) {
    return tensor + batch * layout.batch + head * layout.head;
}

template <class T>
T *rows_of(T *tensor, Layout layout, int64_t batch, int64_t head) {
    return tensor + batch * layout.batch + head * layout.head;
}

// `body(part, begin, end)` for parts of [0, items), one for each thread.
template <class Body>
void parallel_ranges(int64_t items, int threads, const Body &body) {
    int64_t parts = std::min<int64_t>(threads, items);
    parallel_parts(parts, [&](int64_t part) { body(part, part * items / parts, (part + 1) * items / parts); });
}

// Item i of a row of blocks that grow costlier, from both ends in turn, so that every range of them costs the same.
int64_t evened(int64_t item, int64_t count) { return item % 2 ? count - 1 - item / 2 : item / 2; }

// Scores outside a row's range become -inf.
INLINE void hide(float *scores, Range visible, int64_t columns) {
    if (visible.begin >= visible.end) visible = {0, 0};
    std::fill(scores, scores + visible.begin, -INFINITY);
    std::fill(scores + visible.end, scores + columns, -INFINITY);
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

// Turns a row's scores into exponentials against the maximum so far; what was summed before shrinks with a new one.
INLINE void advance_row(float *scores, int64_t columns, float &highest, vf &sum, float *out, int64_t width) {
    vf block_highest = load(scores);
    for (int64_t j = LANES; j < columns; j += LANES) block_highest = maximum(load(scores + j), block_highest);
    float before = highest;
    highest = std::max(before, largest(block_highest));
    if (highest > before) {
        vf shrink = exponential(splat(before - highest));  // 0 at first, when there was none
        sum = sum * shrink;
        for (int64_t j = 0; j < width; j += LANES) store(out + j, load(out + j) * shrink);
    }
    vf subtracted = splat(highest == -INFINITY ? 0.0f : highest);
    for (int64_t j = 0; j < columns; j += LANES) {
        vf p = exponential(load(scores + j) - subtracted);
        store(scores + j, p);
        sum += p;
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
    for (int64_t i = 0; i < TILE_ROWS; i++) {
        float *scores = scratch.scores + i * FORWARD_KEYS;
        hide(scores, visible[i], round_up(columns, LANES));
        advance_row(scores, columns, highest[i], sums[i], out + i * width, width);
    }
    multiply<true>(columns, {scratch.scores, FORWARD_KEYS, 1}, scratch.v + key * width, width, TILE_COLUMNS, out,
                   width, width);
}

template <class T>
struct Forward {
    Shape shape;
    const T *q, *k, *v;
    T *out;
    float *lse;
    Layout q_layout, k_layout, v_layout, out_layout;

    void pack_head(const ForwardScratch &scratch, int64_t b, int64_t h) const {
        int64_t width = shape.padded_width(), padded = round_up(shape.keys, FORWARD_KEYS);
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
        std::fill(highest, highest + rows, -INFINITY);
        std::fill(sums, sums + rows, vf{});
        std::fill(scratch.out, scratch.out + rows * width, 0.0f);
        pack_rows(scratch.q, rows_of(q, q_layout, b, h) + query * q_layout.token, q_layout.token, count, rows,
                  shape.width, width, shape.scale());
        Range keys = shape.seen_by(b, query, count);
        for (int64_t key = keys.begin / FORWARD_KEYS * FORWARD_KEYS; key < keys.end; key += FORWARD_KEYS)
            for (int64_t row = 0; row < rows; row += TILE_ROWS)
                forward_tile(shape, scratch, b, query, row, key, highest + row, sums + row);
        T *to = rows_of(out, out_layout, b, h) + query * out_layout.token;
        for (int64_t i = 0; i < count; i++) {
            float total = sum(sums[i]);
            unpack_rows(to + i * out_layout.token, 0, scratch.out + i * width, 1, shape.width, width,
                        total == 0 ? 0.0f : 1 / total);
            lse[(b * shape.heads + h) * shape.queries + query + i] = highest[i] + std::log(total);
        }
    }

    void run(float *scratch, int threads) const {
        int64_t blocks = (shape.queries + FORWARD_QUERIES - 1) / FORWARD_QUERIES;
        int64_t size = ForwardScratch::size(shape);
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
    int64_t queries, keys;  // rounded up to whole blocks
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

// Six queries meet one block of keys: rows of p = exp(score - lse) and ds = p (dp - delta). False if they see none.
bool backward_tile(const Shape &shape, const BackwardScratch &scratch, int64_t batch, int64_t query, int64_t key,
                   float *p, float *ds, bool queries_too) {
    int64_t width = shape.padded_width();
    Range visible[TILE_ROWS];
    int64_t columns = shape.mask_tile(batch, query, key, BACKWARD_KEYS, visible);
    int64_t stored = round_up(columns, LANES);
    if (columns) {
        multiply<false>(shape.width, {scratch.q + query * width, width, 1}, scratch.columns_of_k + key * width,
                        TILE_COLUMNS, TILE_COLUMNS * width, p, BACKWARD_KEYS, columns);
        multiply<false>(shape.width, {scratch.dout + query * width, width, 1}, scratch.columns_of_v + key * width,
                        TILE_COLUMNS, TILE_COLUMNS * width, ds, BACKWARD_KEYS, columns);
    }
    for (int64_t i = 0; i < TILE_ROWS; i++) {
        float *p_row = p + i * BACKWARD_KEYS, *ds_row = ds + i * BACKWARD_KEYS;
        hide(p_row, visible[i], stored);
        vf lse = splat(scratch.lse[query + i]), delta = splat(scratch.delta[query + i]);
        for (int64_t j = 0; j < stored; j += LANES) {
            vf probability = exponential(load(p_row + j) - lse);
            store(p_row + j, probability);
            store(ds_row + j, probability * (load(ds_row + j) - delta));
        }
        std::fill(p_row + stored, p_row + BACKWARD_KEYS, 0.0f);
        std::fill(ds_row + stored, ds_row + BACKWARD_KEYS, 0.0f);
    }
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
    T *dq, *dk, *dv;
    Layout dout_layout, q_layout, k_layout, v_layout, out_layout, dq_layout, dk_layout, dv_layout;

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
        const float *from = lse + (b * shape.heads + h) * shape.queries;
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
        std::fill(scratch.dk, scratch.dk + 2 * BACKWARD_KEYS * width, 0.0f);
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
        int64_t key_blocks = (shape.keys + BACKWARD_KEYS - 1) / BACKWARD_KEYS;
        int64_t query_blocks = (shape.queries + BACKWARD_QUERIES - 1) / BACKWARD_QUERIES;
        if (shape.batch * shape.heads >= threads) {
            each(scratch, 1, threads, [&](const BackwardScratch &own, int64_t b, int64_t h, int64_t) {
                for (int64_t block = 0; block < key_blocks; block++)
                    keys_block(own, b, h, block * BACKWARD_KEYS, true);
                write_queries(own, b, h, 0, shape.queries);
            });
            return;
        }
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
    Forward<T>{shape,      in(0),      in(1),      in(2),     static_cast<T *>(tensors[3]),
               lse,        layouts[0], layouts[1], layouts[2], layouts[3]}
        .run(scratch, threads);
    return 0;
}

template <class T>
int backward(const Shape &shape, void **tensors, const float *lse, const Layout *layouts, float *scratch,
             int threads) {
    auto in = [&](int i) { return static_cast<const T *>(tensors[i]); };
    auto out = [&](int i) { return static_cast<T *>(tensors[i]); };
    Backward<T>{shape,      in(0),      in(1),      in(2),      in(3),      in(4),      lse,       out(5), out(6),
                out(7),     layouts[0], layouts[1], layouts[2], layouts[3], layouts[4], layouts[5], layouts[6],
                layouts[7]}
        .run(scratch, threads);
    return 0;
}

}  // namespace

// `sizes`: batch, heads, queries, keys, width. `starts`: [batch, queries] or null. `layouts`: strides of batch, head
// and token for each tensor, in elements. `scratch`: for each thread as many floats as the function below says.

EXPORT int riftco_flash_attention_scratch(const int64_t *sizes, int for_backward) {
    Shape shape{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], nullptr};
    return int(for_backward ? BackwardScratch::size(shape) : ForwardScratch::size(shape));
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
