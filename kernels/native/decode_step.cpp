// The newest tokens of sequences from embeddings to logits, in one call.
//
// Products are those of `decode_product.h`, every element in an order of its own; norms and attention are computed row
// by row. So a row's logits have the same bits in any company.

#include <memory>
#include <vector>

#include "decode_product.h"
#include "paged_row.h"

namespace {

constexpr int64_t GROUP = 16;                        // rows that meet a block of keys and values together
constexpr int64_t PARALLEL_WORK = int64_t(1) << 15;  // multiply-adds of a product that are worth a thread

}  // namespace

// As `kernels/decode_step/cpu.py` fills them.
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
    auto put = [&](int64_t c, vf scale, vf bias) __attribute__((always_inline)) {
        store(out + c, fma((load(x + c) - mean) * factor, scale, bias));
    };
    int64_t c = 0;
    for (; c + LANES <= width; c += LANES) put(c, load(norm.scale + c), load(norm.bias + c));
    if (c < width) put(c, load_first(norm.scale + c, width - c), load_first(norm.bias + c, width - c));
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
    float *fixed;
    float *product_scratch, *attention_scratch;  // of each part
    std::vector<Group> groups;
    int64_t attention_size;

    static int64_t lanes(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

    Step(const Model &model, const Rows &r, float *out)
        : m(model), rows(r), logits(out), head_width(model.width / model.heads), width_row(padded(model.width) + PANEL),
          inner_row(padded(model.inner) + PANEL), qkv_row(padded(3 * model.width)),
          attention_size(2 * GROUP * row_size()) {
        for (int64_t i = 0; i < rows.count; i++) {
            bool begins = groups.empty() || groups.back().count == GROUP || !is_followed(i - 1);
            if (begins) groups.push_back({i, 0});
            groups.back().count++;
        }
    }

    int64_t scratch_size(int threads) const {
        return rows.count * (3 * width_row + qkv_row + inner_row) + fixed_size(rows.count, most_inputs()) +
               threads * (product_size(rows.count) + attention_size);
    }

    int64_t most_inputs() const { return std::max(m.width, m.inner); }

    void divide(float *scratch, int threads) {
        auto take = [&](int64_t size) { return std::exchange(scratch, scratch + size); };
        x = take(rows.count * width_row);
        normed = take(rows.count * width_row);
        context = take(rows.count * width_row);
        qkv = take(rows.count * qkv_row);
        inner = take(rows.count * inner_row);
        fixed = take(fixed_size(rows.count, most_inputs()));
        product_scratch = take(threads * product_size(rows.count));
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
            Fixed x = fixed_rows(w, count, fixed);
            if (w.kind != FLOAT32) each_row(count, [&](int64_t i) { to_fixed(w, from + i * from_row, i, x); });
            parallel_parts(parts, [&](int64_t part) {
                multiply(w, panels * part / parts, panels * (part + 1) / parts, from, from_row, x, count,
                         product_scratch + part * product_size(count), to);
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
            meet_block(item->rows, item->count, blocks[number % 2], at, head_width);
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
