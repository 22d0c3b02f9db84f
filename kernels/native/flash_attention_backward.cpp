// Causal attention, backward: a block of keys meets each block of queries once; probabilities are computed again from
// the saved log-sum-exp.

#include "flash_attention.h"

namespace {

constexpr int64_t BACKWARD_KEYS = 96;  // a multiple of TILE_ROWS and of TILE_COLUMNS for 4, 8 and 16 lanes
constexpr int64_t BACKWARD_QUERIES = 48;

template <class Word>
struct Scratch {
    int64_t queries, keys;  // rounded up to whole tiles
    float *dq, *dk, *dv, *lse, *delta, *scores, *dp;
    // Factors: rows, whose words run along the width, and lines, whose words run down them. p and ds are lines of
    // probabilities and of the gradients of scores, of one block; of one tile, `ds_rows` are rows of the latter.
    Word *rows, *columns_of_k, *columns_of_v, *lines_of_k, *q, *lines_of_q, *dout, *lines_of_dout, *p, *ds, *ds_rows;
    int64_t size;

    Scratch(float *at, const Shape &shape) {
        constexpr int64_t BLOCK = BACKWARD_QUERIES * BACKWARD_KEYS, TILE = TILE_ROWS * BACKWARD_KEYS;
        int64_t width = shape.padded_width(), words = shape.words<Word>();
        queries = round_up(shape.queries, BACKWARD_QUERIES), keys = round_up(shape.keys, BACKWARD_KEYS);
        float *next = at;
        auto take = [&](auto *&array, int64_t count) {
            array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(next), next += count;
        };
        take(dq, queries * width), take(dk, BACKWARD_KEYS * width), take(dv, BACKWARD_KEYS * width);
        take(lse, queries), take(delta, queries);
        take(rows, keys * words), take(columns_of_k, keys * words), take(columns_of_v, keys * words);
        take(q, queries * words), take(dout, queries * words);
        take(p, BLOCK / PER_WORD<Word>), take(ds, BLOCK / PER_WORD<Word>);
        if constexpr (PER_WORD<Word> == 1) {  // rows are lines
            lines_of_k = rows, lines_of_q = q, lines_of_dout = dout;
        } else {
            take(lines_of_k, keys / 2 * width), take(lines_of_q, queries / 2 * width);
            take(lines_of_dout, queries / 2 * width), take(ds_rows, TILE / 2), take(scores, TILE), take(dp, TILE);
        }
        size = next - at;
    }

    // Six rows of what is on its way from scores to factors. Floats lie where the factors will.
    struct Tile {
        float *scores, *dp;
        Word *p, *ds, *ds_rows;
    };

    Tile tile(int64_t row) const {
        Word *p_at = p + row / PER_WORD<Word> * BACKWARD_KEYS, *ds_at = ds + row / PER_WORD<Word> * BACKWARD_KEYS;
        if constexpr (PER_WORD<Word> == 1) return {p_at, ds_at, p_at, ds_at, ds_at};
        else return {scores, dp, p_at, ds_at, ds_rows};
    }
};

template <class Word>
INLINE void store_zeros(Word *to) {
    std::memset(to, 0, LANES * sizeof(Word));
}

INLINE void store_line(float *to, const vf (&rows)[1]) { store(to, rows[0]); }
INLINE void store_line(Pair *to, const vf (&rows)[2]) {
    vu lower = widened(round_to_bf16(rows[0])), upper = widened(round_to_bf16(rows[1]));
    store(to, bits<vi>(lower | upper << 16));
}

// The scores of six rows become probabilities p, and the gradients of these those of the scores, ds.
template <class Word>
INLINE void differentiate(const typename Scratch<Word>::Tile &tile, const Range visible[TILE_ROWS], int64_t columns,
                          const float *lse, const float *delta) {
    constexpr int PER = PER_WORD<Word>;
    hide_begins(tile.scores, BACKWARD_KEYS, visible);
    for (int64_t j = 0; j < columns; j += LANES)
        for (int i = 0; i < TILE_ROWS; i += PER) {
            vf p[PER], ds[PER];
            for (int r = 0; r < PER; r++) {
                int64_t at = (i + r) * BACKWARD_KEYS + j;
                p[r] = antilog<Word>(hide_end(load(tile.scores + at), visible[i + r], j) - splat(lse[i + r]));
                ds[r] = p[r] * (load(tile.dp + at) - splat(delta[i + r]));
                if (PER > 1) store(numbers(tile.ds_rows) + (i + r) * BACKWARD_KEYS + j, ds[r]);
            }
            store_line(tile.p + i / PER * BACKWARD_KEYS + j, p);
            store_line(tile.ds + i / PER * BACKWARD_KEYS + j, ds);
        }
}

// Six queries meet one block of keys: lines of p = exp(score - lse) and ds = p (dp - delta). False if they see none.
template <class Word>
bool backward_tile(const Shape &shape, const Scratch<Word> &scratch, int64_t batch, int64_t query, int64_t key,
                   const typename Scratch<Word>::Tile &tile, bool queries_too) {
    int64_t width = shape.padded_width(), words = shape.words<Word>(), count = words_of<Word>(shape.width);
    Range visible[TILE_ROWS];
    int64_t columns = shape.mask_tile(batch, query, key, BACKWARD_KEYS, visible);
    // The products for keys read what a causal mask leaves to any of the rows, up to a whole tile.
    int64_t causal = query + 2 * TILE_ROWS + shape.keys - shape.queries - key;
    int64_t reached = std::clamp<int64_t>(causal, 0, BACKWARD_KEYS);
    if (columns) {
        multiply<false, Word>(count, {scratch.q + query * words, words, 1}, scratch.columns_of_k + key * words,
                              TILE_COLUMNS, TILE_COLUMNS * words, tile.scores, BACKWARD_KEYS, columns);
        multiply<false, Word>(count, {scratch.dout + query * words, words, 1}, scratch.columns_of_v + key * words,
                              TILE_COLUMNS, TILE_COLUMNS * words, tile.dp, BACKWARD_KEYS, columns);
    }
    differentiate<Word>(tile, visible, columns, scratch.lse + query, scratch.delta + query);
    for (int64_t i = 0; i < TILE_ROWS / PER_WORD<Word> * BACKWARD_KEYS; i += BACKWARD_KEYS)
        for (int64_t j = round_up(columns, LANES); j < reached; j += LANES)
            store_zeros(tile.p + i + j), store_zeros(tile.ds + i + j);
    if (columns && queries_too)
        multiply<true, Word>(words_of<Word>(columns), {tile.ds_rows, BACKWARD_KEYS / PER_WORD<Word>, 1},
                             scratch.lines_of_k + key / PER_WORD<Word> * width, width, TILE_COLUMNS,
                             scratch.dq + query * width, width, width);
    return columns > 0;
}

// A block of queries meets a block of keys and adds to the gradients of either or both.
template <class Word>
void backward_block(const Shape &shape, const Scratch<Word> &scratch, int64_t batch, int64_t query, int64_t key,
                    bool keys_too, bool queries_too) {
    constexpr int64_t PER = PER_WORD<Word>;
    int64_t width = shape.padded_width(), rows = std::min(BACKWARD_QUERIES, shape.queries - query), seeing = -1;
    rows = round_up(rows, TILE_ROWS);
    for (int64_t row = 0; row < rows; row += TILE_ROWS) {
        bool sees = backward_tile(shape, scratch, batch, query + row, key, scratch.tile(row), queries_too);
        if (sees && seeing < 0) seeing = row;
    }
    if (seeing < 0 || !keys_too) return;
    for (int64_t column = 0; column < std::min(BACKWARD_KEYS, shape.keys - key); column += TILE_ROWS) {
        int64_t first = std::max(seeing, key + column - (shape.keys - shape.queries) - query);
        if (first >= rows) break;  // causal: no query of the block sees this key, nor a later one
        int64_t line = first / PER, at = line * BACKWARD_KEYS + column, right = (query / PER + line) * width;
        multiply<true, Word>(rows / PER - line, {scratch.p + at, 1, BACKWARD_KEYS}, scratch.lines_of_dout + right,
                             width, TILE_COLUMNS, scratch.dv + column * width, width, width);
        multiply<true, Word>(rows / PER - line, {scratch.ds + at, 1, BACKWARD_KEYS}, scratch.lines_of_q + right, width,
                             TILE_COLUMNS, scratch.dk + column * width, width, width);
    }
}

template <class T, class Word>
struct Backward {
    using Own = Scratch<Word>;
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

    void pack_head(const Own &scratch, int64_t b, int64_t h) const {
        int64_t width = shape.padded_width(), words = shape.words<Word>();
        auto pack = [&](Word *to, const T *from, Layout layout, int64_t count, int64_t padded, float scale = 1) {
            pack_rows(numbers(to), rows_of(from, layout, b, h), layout.token, count, padded, shape.width,
                      words * PER_WORD<Word>, scale);
        };
        pack(scratch.q, q, q_layout, shape.queries, scratch.queries, shape.scale());
        pack_lines(scratch.lines_of_q, scratch.q, scratch.queries, words, width);
        pack(scratch.dout, dout, dout_layout, shape.queries, scratch.queries);
        pack_lines(scratch.lines_of_dout, scratch.dout, scratch.queries, words, width);
        pack(scratch.rows, v, v_layout, shape.keys, scratch.keys);
        pack_columns(scratch.columns_of_v, scratch.rows, scratch.keys, words);
        pack(scratch.rows, k, k_layout, shape.keys, scratch.keys);
        pack_columns(scratch.columns_of_k, scratch.rows, scratch.keys, words);
        pack_lines(scratch.lines_of_k, scratch.rows, scratch.keys, words, width);
        std::fill(scratch.dq, scratch.dq + scratch.queries * width, 0.0f);
        pack_statistics(scratch, b, h);
    }

    // For each query its log-sum-exp (0 where there is none) and delta = dout . out.
    void pack_statistics(const Own &scratch, int64_t b, int64_t h) const {
        const float *from = lse + (b * shape.heads + h) * lse_row;
        std::fill(scratch.lse, scratch.lse + scratch.queries, 0.0f);
        std::fill(scratch.delta, scratch.delta + scratch.queries, 0.0f);
        for (int64_t i = 0; i < shape.queries; i++) {
            const auto *gradient = numbers(scratch.dout + i * shape.words<Word>());  // rounded as it is in dp
            const T *row = rows_of(out, out_layout, b, h) + i * out_layout.token;
            vf total{};
            int64_t j = 0;
            for (; j + LANES <= shape.width; j += LANES) {
                __builtin_prefetch(row + 64 * out_layout.token + j, 0, 2);
                total = fma(load(gradient + j), load(row + j), total);
            }
            if (j < shape.width) total = fma(load(gradient + j), load_first(row + j, shape.width - j), total);
            scratch.delta[i] = sum(total);
            scratch.lse[i] = from[i] == -INFINITY ? 0.0f : from[i];
        }
    }

    // One block of keys meets every query: its dk and dv, and its part of dq if `queries_too`.
    void keys_block(const Own &scratch, int64_t b, int64_t h, int64_t key, bool queries_too) const {
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
    void queries_block(const Own &scratch, int64_t b, int64_t query) const {
        Range keys = shape.seen_by(b, query, BACKWARD_QUERIES);
        for (int64_t key = keys.begin / BACKWARD_KEYS * BACKWARD_KEYS; key < keys.end; key += BACKWARD_KEYS)
            backward_block(shape, scratch, b, query, key, false, true);
    }

    void write_queries(const Own &scratch, int64_t b, int64_t h, int64_t query, int64_t count) const {
        int64_t width = shape.padded_width();
        unpack_rows(rows_of(dq, dq_layout, b, h) + query * dq_layout.token, dq_layout.token,
                    scratch.dq + query * width, count, shape.width, width, shape.scale());
    }

    void whole_head(const Own &scratch, int64_t b, int64_t h) const {
        for (int64_t key = 0; key < shape.keys; key += BACKWARD_KEYS) keys_block(scratch, b, h, key, true);
        write_queries(scratch, b, h, 0, shape.queries);
    }

    // `body(scratch, b, h, item of the head)` for every item of every head, which is packed before.
    template <class Body>
    void each(float *scratch, int64_t items, int threads, const Body &body) const {
        int64_t size = Own(scratch, shape).size;
        parallel_ranges(shape.batch * shape.heads * items, threads, [&](int64_t part, int64_t begin, int64_t end) {
            Own own(scratch + part * size, shape);
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
                Own own(scratch + part * Own(scratch, shape).size, one.shape);
                one.pack_head(own, 0, h);
                one.whole_head(own, 0, h);
            });
        int64_t key_blocks = (shape.keys + BACKWARD_KEYS - 1) / BACKWARD_KEYS;
        int64_t query_blocks = (shape.queries + BACKWARD_QUERIES - 1) / BACKWARD_QUERIES;
        if (shape.batch * shape.heads >= threads)
            return each(scratch, 1, threads, [&](const Own &own, int64_t b, int64_t h, int64_t) {
                whole_head(own, b, h);
            });
        each(scratch, key_blocks, threads, [&](const Own &own, int64_t b, int64_t h, int64_t item) {
            keys_block(own, b, h, evened(item, key_blocks) * BACKWARD_KEYS, false);
        });
        each(scratch, query_blocks, threads, [&](const Own &own, int64_t b, int64_t h, int64_t item) {
            int64_t query = evened(item, query_blocks) * BACKWARD_QUERIES;
            queries_block(own, b, query);
            write_queries(own, b, h, query, std::min(BACKWARD_QUERIES, shape.queries - query));
        });
    }
};

}  // namespace

// As the forward function, but `tensors`: dout, q, k, v, out, dq, dk, dv.
EXPORT int riftco_flash_attention_backward(const int64_t *sizes, const int64_t *starts, void **tensors,
                                           const float *lse, const Layout *layouts, int is_bf16, int half,
                                           float *scratch, int threads) {
    Shape shape{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], starts};
    return with_types(is_bf16, half, [&]<class T, class Word>(T, Word) {
        auto in = [&](int i) { return static_cast<const T *>(tensors[i]); };
        auto out = [&](int i) { return static_cast<T *>(tensors[i]); };
        Backward<T, Word>{shape,      in(0),      in(1),      in(2),      in(3),      in(4),      lse,        shape.queries,
                          out(5),     out(6),     out(7),     layouts[0], layouts[1], layouts[2], layouts[3], layouts[4],
                          layouts[5], layouts[6], layouts[7]}
            .run(scratch, shape.worth(threads));
        return 0;
    });
}

EXPORT int64_t riftco_flash_attention_backward_scratch(const int64_t *sizes, int half) {
    Shape shape{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], nullptr};
    float origin;
    return with_types(0, half, [&]<class T, class Word>(T, Word) { return Scratch<Word>(&origin, shape).size; });
}
