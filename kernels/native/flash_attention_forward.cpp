// Causal attention, forward: six queries at a time walk over blocks of keys with a running maximum and sum, and skip the
// keys that none of them sees.

#include "flash_attention.h"

namespace {

constexpr int64_t FORWARD_KEYS = 128;    // keys in a block
constexpr int64_t FORWARD_QUERIES = 48;  // queries that share the blocks of keys in the cache

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

template <class Word>
struct Scratch {
    float *out, *scores;
    Word *rows, *columns_of_k, *lines_of_v, *q, *p;  // p: probabilities; floats lie where scores did
    int64_t size;

    Scratch(float *at, const Shape &shape) {
        int64_t width = shape.padded_width(), words = shape.words<Word>(), keys = round_up(shape.keys, FORWARD_KEYS);
        out = at, scores = out + FORWARD_QUERIES * width;
        rows = reinterpret_cast<Word *>(scores + TILE_ROWS * FORWARD_KEYS), columns_of_k = rows + keys * words;
        q = columns_of_k + keys * words;
        Word *end = q + FORWARD_QUERIES * words;
        if constexpr (PER_WORD<Word> == 1) lines_of_v = rows, p = scores;
        else lines_of_v = end, p = lines_of_v + keys / 2 * width, end = p + TILE_ROWS * FORWARD_KEYS / 2;
        size = reinterpret_cast<float *>(end) - at;
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
template <class Word>
INLINE void raise(float &highest, float block_highest, vf &sum, float *out, int64_t width) {
    if (!(block_highest > highest)) return;
    if (highest > -INFINITY) {
        vf shrink = antilog<Word>(splat(highest - block_highest));
        sum = sum * shrink;
        for (int64_t j = 0; j < width; j += LANES) store(out + j, load(out + j) * shrink);
    }
    highest = block_highest;
}

// Exponentials of the scores of six rows against the maximum so far of each, which are added to its sums.
template <class Word>
INLINE void exponentials(const float *scores, Word *p, int64_t columns, const float *highest, vf *sums) {
    for (int64_t j = 0; j < columns; j += LANES)
        for (int i = 0; i < TILE_ROWS; i++) {
            vf score = load(scores + i * FORWARD_KEYS + j);
            vf power = antilog<Word>(score - splat(highest[i] == -INFINITY ? 0.0f : highest[i]));
            store(numbers(p) + i * FORWARD_KEYS + j, power);
            sums[i] += power;
        }
}

// Six queries meet one block of keys.
template <class Word>
void forward_tile(const Shape &shape, const Scratch<Word> &scratch, int64_t batch, int64_t query, int64_t row,
                  int64_t key, float *highest, vf *sums) {
    constexpr int64_t P_ROW = FORWARD_KEYS / PER_WORD<Word>;
    int64_t width = shape.padded_width(), words = shape.words<Word>();
    Range visible[TILE_ROWS];
    int64_t columns = shape.mask_tile(batch, query + row, key, FORWARD_KEYS, visible);
    if (!columns) return;
    float *out = scratch.out + row * width;
    multiply<false, Word>(words_of<Word>(shape.width), {scratch.q + row * words, words, 1},
                          scratch.columns_of_k + key * words, TILE_COLUMNS, TILE_COLUMNS * words, scratch.scores,
                          FORWARD_KEYS, columns);
    vf block_highest[TILE_ROWS];
    hide(scratch.scores, visible, columns, block_highest);
    for (int64_t i = 0; i < TILE_ROWS; i++)
        raise<Word>(highest[i], block_highest[i][0], sums[i], out + i * width, width);
    exponentials(scratch.scores, scratch.p, columns, highest, sums);
    multiply<true, Word>(words_of<Word>(columns), {scratch.p, P_ROW, 1},
                         scratch.lines_of_v + key / PER_WORD<Word> * width, width, TILE_COLUMNS, out, width, width);
}

template <class T, class Word>
struct Forward {
    using Own = Scratch<Word>;
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

    void pack(Word *to, const T *from, Layout layout, int64_t count, int64_t padded, float scale = 1) const {
        pack_rows(numbers(to), from, layout.token, count, padded, shape.width, shape.words<Word>() * PER_WORD<Word>,
                  scale);
    }

    void pack_head(const Own &scratch, int64_t b, int64_t h) const {
        int64_t words = shape.words<Word>(), padded = round_up(shape.keys, LANES);
        pack(scratch.rows, rows_of(k, k_layout, b, h), k_layout, shape.keys, padded);
        pack_columns(scratch.columns_of_k, scratch.rows, padded, words);
        pack(scratch.rows, rows_of(v, v_layout, b, h), v_layout, shape.keys, padded);
        pack_lines(scratch.lines_of_v, scratch.rows, padded, words, shape.padded_width());
    }

    void attend(const Own &scratch, int64_t b, int64_t h, int64_t query) const {
        int64_t width = shape.padded_width(), count = std::min(FORWARD_QUERIES, shape.queries - query);
        int64_t rows = round_up(count, TILE_ROWS);
        float highest[FORWARD_QUERIES];
        vf sums[FORWARD_QUERIES];
        std::fill(highest, highest + FORWARD_QUERIES, -INFINITY);
        std::fill(sums, sums + FORWARD_QUERIES, vf{});
        std::fill(scratch.out, scratch.out + rows * width, 0.0f);
        pack(scratch.q, rows_of(q, q_layout, b, h) + query * q_layout.token, q_layout, count, rows, shape.scale());
        Range keys = shape.seen_by(b, query, count);
        for (int64_t key = keys.begin / FORWARD_KEYS * FORWARD_KEYS; key < keys.end; key += FORWARD_KEYS)
            for (int64_t row = 0; row < rows; row += TILE_ROWS)
                forward_tile(shape, scratch, b, query, row, key, highest + row, sums + row);
        write(scratch, b, h, query, count, highest, sums);
    }

    void write(const Own &scratch, int64_t b, int64_t h, int64_t query, int64_t count,
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
        int64_t size = Own(scratch, shape).size;
        if (std::vector<Document> all = documents(shape); !all.empty())
            return each_document(all, shape.heads, threads, [&](int64_t part, const Document &d, int64_t h) {
                Forward one = alone(d);
                Own own(scratch + part * size, one.shape);
                one.pack_head(own, 0, h);
                for (int64_t query = 0; query < d.count; query += FORWARD_QUERIES) one.attend(own, 0, h, query);
            });
        int64_t blocks = (shape.queries + FORWARD_QUERIES - 1) / FORWARD_QUERIES;
        parallel_ranges(shape.batch * shape.heads * blocks, threads, [&](int64_t part, int64_t begin, int64_t end) {
            Own own(scratch + part * size, shape);
            for (int64_t item = begin, packed = -1; item < end; item++) {
                int64_t head = item / blocks, b = head / shape.heads, h = head % shape.heads;
                if (head != packed) pack_head(own, b, h), packed = head;
                attend(own, b, h, evened(item % blocks, blocks) * FORWARD_QUERIES);
            }
        });
    }
};

}  // namespace

// `sizes`: batch, heads, queries, keys, width. `starts`: [batch, queries] or null. `tensors`: q, k, v, out. `lse`:
// float32 [batch, heads, queries]. `layouts`: strides of batch, head and token for each tensor, in elements. `half`:
// products in bf16, where the CPU has them. `scratch`: for each thread as many floats as the function below says.
EXPORT int riftco_flash_attention_forward(const int64_t *sizes, const int64_t *starts, void **tensors, float *lse,
                                          const Layout *layouts, int is_bf16, int half, float *scratch, int threads) {
    Shape shape{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], starts};
    return with_types(is_bf16, half, [&]<class T, class Word>(T, Word) {
        auto in = [&](int i) { return static_cast<const T *>(tensors[i]); };
        Forward<T, Word>{shape,      in(0),      in(1),      in(2),     static_cast<T *>(tensors[3]), lse, shape.queries,
                         layouts[0], layouts[1], layouts[2], layouts[3]}
            .run(scratch, shape.worth(threads));
        return 0;
    });
}

EXPORT int64_t riftco_flash_attention_forward_scratch(const int64_t *sizes, int half) {
    Shape shape{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], nullptr};
    float origin;
    return with_types(0, half, [&]<class T, class Word>(T, Word) { return Scratch<Word>(&origin, shape).size; });
}
