// One query's attention over keys and values in pages, block by block of logical positions.
//
// A score is one chain of multiply-adds for each lane over the width and then a tree over the lanes; a block's weights
// are taken against the running maximum; each element of the result is one chain over positions. So the bits depend
// neither on page size and place nor on what else is computed at the same time. Nothing beyond what a query sees is
// read for it, as the unwritten tail of a page may hold anything.

#pragma once
#include <vector>

#include "simd.h"

namespace {

constexpr int64_t BLOCK = 64;
constexpr int64_t LINE = 64;                      // bytes that the memory brings at once
constexpr int TOGETHER = 4;                       // rows whose values are added together

template <class T>
struct Block {  // where the keys and values of a block of positions lie
    const T *keys[BLOCK], *values[BLOCK];
};

// What a sequence's queries share.
template <class T>
struct Pages {
    const T *keys, *values;  // of one head
    int64_t key_page, key_slot, value_page, value_slot;
    const int64_t *table;
    int64_t page_size;

    // Where the rows of a block's positions [begin, end) lie; they are on their way to the second cache then, because two
    // blocks fill the first.
    void find(int64_t begin, int64_t end, int64_t width, Block<T> &block) const {
        const T **key_rows = block.keys, **value_rows = block.values;
        for (int64_t logical = begin / page_size, slot = begin % page_size; begin < end; logical++, slot = 0) {
            int64_t stop = std::min(end, begin + page_size - slot), page = table[logical];
            for (; begin < stop; begin++, slot++) {
                *key_rows++ = keys + page * key_page + slot * key_slot;
                *value_rows++ = values + page * value_page + slot * value_slot;
                for (int64_t c = 0; c < width; c += LINE / int64_t(sizeof(T))) {
                    __builtin_prefetch(key_rows[-1] + c, 0, 2);
                    __builtin_prefetch(value_rows[-1] + c, 0, 2);
                }
            }
        }
    }
};

// scores[j] = q . key j. q is padded with zeros to whole vectors.
template <class T>
void score(const float *q, const T *const *keys, int64_t count, int64_t width, float *scores) {
    int64_t whole = width / LANES * LANES, j = 0;
    for (; j + LANES <= count; j += LANES) {
        vf totals[LANES];
        for (int i = 0; i < LANES; i++) totals[i] = vf{};
        for (int64_t c = 0; c < whole; c += LANES) {
            vf factor = load(q + c);
            for (int i = 0; i < LANES; i++) totals[i] = fma(load(keys[j + i] + c), factor, totals[i]);
        }
        if (whole < width)
            for (int i = 0; i < LANES; i++)
                totals[i] = fma(load_first(keys[j + i] + whole, width - whole), load(q + whole), totals[i]);
        store(scores + j, sums_of(totals));
    }
    for (; j < count; j++) {
        vf total{};
        for (int64_t c = 0; c < whole; c += LANES) total = fma(load(keys[j] + c), load(q + c), total);
        if (whole < width) total = fma(load_first(keys[j] + whole, width - whole), load(q + whole), total);
        scores[j] = sum(total);
    }
}

// One query's running softmax and sum of values.
struct Row {
    float *q, *out;  // [padded width]
    float highest;
    vf total;
    int64_t seen;  // how many positions it sees
};

// A block's first `count` keys with their elements side by side, [padded width, BLOCK], and zeros beyond both.
template <class T>
void transpose_keys(const T *const *keys, int64_t count, int64_t width, float *out) {
    for (int64_t j = 0; j < count; j += LANES)
        for (int64_t c = 0; c < width; c += LANES) {
            vf square[LANES];
            for (int64_t i = 0; i < LANES; i++) {
                if (j + i >= count) square[i] = vf{};
                else if (c + LANES <= width) square[i] = load(keys[j + i] + c);
                else square[i] = load_first(keys[j + i] + c, width - c);
            }
            transpose(square);
            for (int64_t i = 0; i < LANES; i++) store(out + (c + i) * BLOCK + j, square[i]);
        }
}

// The branch of `sum`'s tree that holds each STEP-th lane from `lane` on, for a vector of keys and ROWS rows.
template <int ROWS, int STEP = 1>
INLINE void score_branch(const Row *rows, const float *keys, int64_t width, int64_t lane, vf (&out)[ROWS]) {
    if constexpr (STEP < LANES) {
        vf other[ROWS];
        score_branch<ROWS, 2 * STEP>(rows, keys, width, lane, out);
        score_branch<ROWS, 2 * STEP>(rows, keys, width, lane + STEP, other);
        for (int r = 0; r < ROWS; r++) out[r] += other[r];
    } else {
        for (int r = 0; r < ROWS; r++) out[r] = vf{};
        for (int64_t c = lane; c < width; c += LANES) {
            vf key = load(keys + c * BLOCK);
            for (int r = 0; r < ROWS; r++) out[r] = fma(key, splat(rows[r].q[c]), out[r]);
        }
    }
}

// As `score`, for ROWS rows and whole vectors of keys from `transpose_keys`: without a sum over lanes.
template <int ROWS>
void score_together(const Row *rows, const float *keys, int64_t count, int64_t width, float (*scores)[BLOCK]) {
    for (int64_t j = 0; j < count; j += LANES) {
        vf totals[ROWS];
        score_branch<ROWS>(rows, keys + j, width, 0, totals);
        for (int r = 0; r < ROWS; r++) store(scores[r] + j, totals[r]);
    }
}

// out[COUNT vectors from c on] += sum of weight j times value j, for ROWS rows. `rest` < LANES: how many lanes of the
// last vector are there, or 0 for all.
template <int ROWS, int COUNT, class T>
INLINE void add_slab(const Row *rows, const float (*weights)[BLOCK], const T *const *values, int64_t begin, int64_t end,
                     int64_t c, int64_t rest) {
    vf totals[ROWS][COUNT];
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < COUNT; i++) totals[r][i] = load(rows[r].out + c + i * LANES);
    for (int64_t j = begin; j < end; j++)
        for (int i = 0; i < COUNT; i++) {
            vf value = rest ? load_first(values[j] + c, rest) : load(values[j] + c + i * LANES);
            for (int r = 0; r < ROWS; r++) totals[r][i] = fma(splat(weights[r][j]), value, totals[r][i]);
        }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < COUNT; i++) store(rows[r].out + c + i * LANES, totals[r][i]);
}

// The values of positions [begin, end). Chains of additions wait for themselves: several together do not.
template <int ROWS, class T>
void add_values(const Row *rows, const float (*weights)[BLOCK], const T *const *values, int64_t begin, int64_t end,
                int64_t width) {
    int64_t c = 0;
    auto add = [&]<int COUNT>() __attribute__((always_inline)) {
        for (; c + COUNT * LANES <= width; c += COUNT * LANES)
            add_slab<ROWS, COUNT>(rows, weights, values, begin, end, c, 0);
    };
    if constexpr (ROWS == 1) add.template operator()<4>();
    add.template operator()<2>();
    add.template operator()<1>();
    if (c < width) add_slab<ROWS, 1>(rows, weights, values, begin, end, c, width - c);
}

// Scores to weights of a block's first `count` positions for a row, against its running maximum.
inline void weigh(Row &row, int64_t count, int64_t width, float scores[BLOCK]) {
    int64_t padded = (count + LANES - 1) / LANES * LANES;
    std::fill(scores + count, scores + padded, -INFINITY);
    vf block_highest = load(scores);
    for (int64_t j = LANES; j < padded; j += LANES) block_highest = maximum(load(scores + j), block_highest);
    float highest = std::max(row.highest, largest(block_highest));
    if (highest > row.highest) {
        vf shrink = exponential(splat(row.highest - highest));
        row.total = row.total * shrink;
        for (int64_t c = 0; c < width; c += LANES) store(row.out + c, load(row.out + c) * shrink);
        row.highest = highest;
    }
    for (int64_t j = 0; j < padded; j += LANES) {
        vf weight = exponential(load(scores + j) - highest);
        store(scores + j, weight);
        row.total += weight;
    }
}

// The first `count` rows of keys or values as floats in `wide`, [count, width].
inline void widen(const bf16 *const *from, int64_t count, int64_t width, float *wide, const float **rows) {
    for (int64_t j = 0; j < count; j++, wide += width) {
        rows[j] = wide;
        int64_t c = 0;
        for (; c + LANES <= width; c += LANES) store(wide + c, load(from[j] + c));
        if (c < width) store_first(wide + c, load_first(from[j] + c, width - c), width - c);
    }
}

// Rows of one sequence, each seeing at least as much as the one before, meet the block of positions from `at` on.
template <class T>
void meet_block(Row *rows, int64_t row_count, const Block<T> &block, int64_t at, int64_t width) {
    auto count = [&](const Row &row) { return std::min(BLOCK, row.seen - at); };
    static thread_local std::vector<float> transposed, wide;
    bool together = row_count >= TOGETHER;  // worth turning the keys
    int64_t all = count(rows[row_count - 1]);
    if (together) {
        transposed.resize((width + LANES) * BLOCK);
        transpose_keys(block.keys, all, width, transposed.data());
    }
    auto meet = [&](const auto *const *values) {
        float weights[TOGETHER][BLOCK];
        for (int64_t first = 0; first < row_count; first += TOGETHER) {
            Row *some = rows + first;
            int64_t size = std::min<int64_t>(TOGETHER, row_count - first);
            int64_t shared = size == TOGETHER ? std::max<int64_t>(0, count(some[0])) : 0;  // what all of them see
            if (together && size == TOGETHER)
                score_together<TOGETHER>(some, transposed.data(), count(some[size - 1]), width, weights);
            for (int64_t r = 0; r < size; r++) {
                if (some[r].seen <= at) continue;
                if (!together) score(some[r].q, block.keys, count(some[r]), width, weights[r]);
                else if (size < TOGETHER) score_together<1>(some + r, transposed.data(), count(some[r]), width, weights + r);
                weigh(some[r], count(some[r]), width, weights[r]);
            }
            if (shared) add_values<TOGETHER>(some, weights, values, 0, shared, width);
            for (int64_t r = 0; r < size; r++)
                if (count(some[r]) > shared)
                    add_values<1>(some + r, weights + r, values, shared, count(some[r]), width);
        }
    };
    if constexpr (sizeof(T) == sizeof(bf16))
        if (together) {  // widened once for all
            const float *values[BLOCK];
            wide.resize(all * width);
            widen(block.values, all, width, wide.data(), values);
            return meet(values);
        }
    meet(block.values);
}

}  // namespace
