// Attention of new tokens over keys and values in pages, and the writing of them there.
//
// Each (sequence, head, query) is computed alone, in the order that paged_row.h gives: its bits depend neither on the
// other queries and sequences nor on the number of threads.

#include "paged_row.h"
#include "simd.h"

namespace {

constexpr int64_t PARALLEL_WORK = int64_t(1) << 18;  // multiply-adds that are worth a thread

struct Layout {  // strides of a tensor with contiguous rows: of its first three dimensions
    int64_t first, second, third;
};

template <class T>
struct Paged {
    int64_t sequences, heads, queries, width, page_size, table_width;
    const T *q, *keys, *values;
    T *out;
    const int64_t *table, *lengths, *counts;
    Layout q_layout, key_layout, value_layout, out_layout;

    int64_t padded_width() const { return (width + LANES - 1) / LANES * LANES; }
    int64_t count(int64_t s) const { return counts ? counts[s] : queries; }

    // One sequence and head. `scratch`: a row of q and one of the result for each of GROUP queries.
    void attend(int64_t s, int64_t h, float *scratch) const {
        int64_t padded = padded_width(), rows = count(s), first = lengths[s] - rows;
        Pages<T> pages{keys + h * key_layout.second, values + h * value_layout.second, key_layout.first,
                       key_layout.third, value_layout.first, value_layout.third, table + s * table_width, page_size};
        Block<T> blocks[2];
        const T *from = q + s * q_layout.first + h * q_layout.second;
        T *to = out + s * out_layout.first + h * out_layout.second;
        for (int64_t i = rows; i < queries; i++) write(to + i * out_layout.third, nullptr, 0);
        // A few queries at a time share each block of rows while it is in the cache.
        for (int64_t begin = 0; begin < rows; begin += GROUP) {
            Row group[GROUP];
            int64_t size = std::min(GROUP, rows - begin);
            for (int64_t i = 0; i < size; i++)
                group[i] = read(from + (begin + i) * q_layout.third, scratch + 2 * i * padded, first + begin + i + 1);
            int64_t end = group[size - 1].seen;
            pages.find(0, std::min(BLOCK, end), width, blocks[0]);
            for (int64_t at = 0; at < end; at += BLOCK) {
                const Block<T> &block = blocks[at / BLOCK % 2];
                if (at + BLOCK < end)
                    pages.find(at + BLOCK, std::min(at + 2 * BLOCK, end), width, blocks[(at / BLOCK + 1) % 2]);
                meet_block(group, size, block, at, width);
            }
            for (int64_t i = 0; i < size; i++)
                write(to + (begin + i) * out_layout.third, group[i].out, 1 / sum(group[i].total));
        }
    }

    Row read(const T *from, float *scratch, int64_t seen) const {
        int64_t padded = padded_width(), whole = width / LANES * LANES;
        float scale = float(1 / std::sqrt(double(width)));
        for (int64_t c = 0; c < whole; c += LANES) store(scratch + c, load(from + c) * scale);
        if (whole < width) store(scratch + whole, load_first(from + whole, width - whole) * scale);
        std::fill(scratch + padded, scratch + 2 * padded, 0.0f);
        return {scratch, scratch + padded, -INFINITY, vf{}, seen};
    }

    void write(T *to, const float *row, float scale) const {
        for (int64_t c = 0; c < width; c += LANES) {
            vf value = row ? load(row + c) * scale : vf{};
            if (c + LANES <= width) store(to + c, value);
            else store_first(to + c, value, width - c);
        }
    }

    static constexpr int64_t GROUP = 8;

    int64_t work() const {
        int64_t total = 0;
        for (int64_t s = 0; s < sequences; s++) total += lengths[s] * count(s);
        return total * heads * width * 2;
    }

    void run(float *scratch, int threads) const {
        int64_t size = 2 * GROUP * padded_width(), items = sequences * heads;
        int64_t parts = std::min({int64_t(threads), items, work() / PARALLEL_WORK + 1});
        parallel_parts(parts, [&](int64_t part) {
            // All sequences of one head after another: lengths differ, so that this divides the work most evenly.
            for (int64_t item = part * items / parts; item < (part + 1) * items / parts; item++)
                attend(item % sequences, item / sequences, scratch + part * size);
        });
    }
};

bool fits(const int64_t *sizes, const int64_t *table, const int64_t *lengths, const int64_t *counts) {
    int64_t sequences = sizes[0], queries = sizes[2], page_size = sizes[4], table_width = sizes[5], pages = sizes[6];
    for (int64_t s = 0; s < sequences; s++) {
        int64_t count = counts ? counts[s] : queries;
        if (count < 0 || count > queries || lengths[s] < count || lengths[s] > table_width * page_size) return false;
        for (int64_t i = 0; i * page_size < lengths[s]; i++)
            if (table[s * table_width + i] < 0 || table[s * table_width + i] >= pages) return false;
    }
    return true;
}

template <class T>
void paged(const int64_t *sizes, void **tensors, const int64_t *table, const int64_t *lengths, const int64_t *counts,
           const Layout *layouts, float *scratch, int threads) {
    auto in = [&](int i) { return static_cast<const T *>(tensors[i]); };
    Paged<T>{sizes[0],   sizes[1],   sizes[2],   sizes[3],  sizes[4], sizes[5], in(0),  in(1),
             in(2),      static_cast<T *>(tensors[3]),      table,    lengths,  counts, layouts[0],
             layouts[1], layouts[2], layouts[3]}
        .run(scratch, threads);
}

}  // namespace

// `sizes`: sequences, heads, queries, width, page size, width of the table, pages. `tensors`: q, key pages, value
// pages, out. `table`: [sequences, width of the table]. `counts`: [sequences] or null, if all queries of each are
// meant. `scratch`: 16 padded rows for each thread. Returns 1, having done nothing, if a table or length does not fit.
EXPORT int riftco_paged_attention(const int64_t *sizes, void **tensors, const int64_t *table,
                                  const int64_t *lengths, const int64_t *counts, const Layout *layouts, int is_bf16,
                                  float *scratch, int threads) {
    if (!fits(sizes, table, lengths, counts)) return 1;
    auto run = is_bf16 ? paged<bf16> : paged<float>;
    run(sizes, tensors, table, lengths, counts, layouts, scratch, threads);
    return 0;
}

// `sizes`: tokens, heads, bytes of a row, page size, pages. `tensors`: key pages, value pages, keys, values. `layouts`:
// strides in bytes. Returns 1, having written nothing, if a slot is neither -1 nor in the pages.
EXPORT int riftco_kv_write(const int64_t *sizes, void **tensors, const int64_t *slots, const Layout *layouts) {
    int64_t tokens = sizes[0], heads = sizes[1], bytes = sizes[2], page_size = sizes[3], pages = sizes[4];
    for (int64_t i = 0; i < tokens; i++)
        if (slots[i] < -1 || slots[i] >= pages * page_size) return 1;
    for (int which = 0; which < 2; which++) {
        char *to = static_cast<char *>(tensors[which]);
        const char *from = static_cast<const char *>(tensors[which + 2]);
        Layout into = layouts[which], out_of = layouts[which + 2];
        for (int64_t i = 0; i < tokens; i++)
            for (int64_t h = 0; slots[i] >= 0 && h < heads; h++)
                std::memcpy(to + slots[i] / page_size * into.first + h * into.second +
                                slots[i] % page_size * into.third,
                            from + i * out_of.first + h * out_of.second, bytes);
    }
    return 0;
}
