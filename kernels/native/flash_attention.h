// Causal attention over whole sequences without a [queries, keys] matrix (Dao et al. 2022): what forward and backward
// share.
//
// Everything is converted once to packed, padded rows of factors, float32 or, in pairs, bf16; sums, softmax and
// gradients stay in float32. The order of every sum depends on the sizes alone, not on the number of threads.

#pragma once
#include <vector>

#include "simd.h"
#include "tile.h"

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
    // Of a packed row whose words run along the width.
    template <class Word>
    int64_t words() const {
        return round_up(width, PER_WORD<Word> * LANES) / PER_WORD<Word>;
    }
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

// Words of `count` neighbours.
template <class Word>
static int64_t words_of(int64_t count) {
    return (count + PER_WORD<Word> - 1) / PER_WORD<Word>;
}

struct Document {  // of a row: its tokens [begin, begin + count) see each other and nothing else
    int64_t batch, begin, count;
};

// The documents of all rows where every row is made of some, and of several. None otherwise.
static inline std::vector<Document> documents(const Shape &shape) {
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
static const T *rows_of(const T *tensor, Layout layout, int64_t batch, int64_t head) {
    return tensor + batch * layout.batch + head * layout.head;
}

template <class T>
static T *rows_of(T *tensor, Layout layout, int64_t batch, int64_t head) {
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
static void parallel_ranges(int64_t items, int threads, const Body &body) {
    int64_t parts = std::min<int64_t>(threads, items);
    parallel_parts(parts, [&](int64_t part) { body(part, part * items / parts, (part + 1) * items / parts); });
}

// `body(part, document, head)`. Each part has all documents of some heads: documents differ in length.
template <class Body>
static void each_document(const std::vector<Document> &all, int64_t heads, int threads, const Body &body) {
    int64_t count = all.size();
    parallel_ranges(heads * count, threads, [&](int64_t part, int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; item++) body(part, all[item % count], item / count);
    });
}

// Item i of a row of blocks that grow costlier, from both ends in turn, so that every range of them costs the same.
static inline int64_t evened(int64_t item, int64_t count) { return item % 2 ? count - 1 - item / 2 : item / 2; }

// Scores before the first key of a row become -inf, as few rows of a tile have any.
INLINE void hide_begins(float *scores, int64_t stride, const Range visible[TILE_ROWS]) {
    for (int i = 0; i < TILE_ROWS; i++)
        if (visible[i].begin > 0) std::fill(scores + i * stride, scores + i * stride + visible[i].begin, -INFINITY);
}

// Scores from column j on of a row: those behind its last key become -inf.
INLINE vf hide_end(vf scores, Range visible, int64_t j) {
    return lanes() < int32_t(visible.end - j) ? scores : splat(-INFINITY);
}

// The numbers of factors whose words run along them.
INLINE float *numbers(float *words) { return words; }
INLINE Half *numbers(Pair *words) { return reinterpret_cast<Half *>(words); }

// e^x, as closely as factors in such words need it.
template <class Word>
INLINE vf antilog(vf x) {
    return PER_WORD<Word> == 1 ? exponential(x) : power_of_two(x * 1.44269504f);
}

// `run<T, Word>` for tensors of T, whose products have factors in words of one float or two bf16 numbers.
template <class Run>
static int64_t with_types(int is_bf16, int half, const Run &run) {
    if (half && has_bf16()) return is_bf16 ? run(bf16(), Pair()) : run(float(), Pair());
    return is_bf16 ? run(bf16(), float()) : run(float(), float());
}
