// Cross-entropy of rows of logits: -log softmax(l)[target], exponentials in float32, their sums and the loss in double.

#include "simd.h"

struct Row {
    float largest, total;  // the maximum, and the sum of exp(l - maximum)
};

struct Found {
    Row row;
    double log_total;
};

constexpr int64_t STRETCH = 2048;  // elements summed in float32 lanes before the sum goes on in double

// Statistics of a row. With `out`, exp(l - maximum) is left there, which may be the row itself. NaN or +inf in the
// row makes the sum NaN.
template <class T>
static Found statistics(const T *row, T *out, int64_t count) {
    vf top[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
    int64_t c = 0;
    for (; c + 4 * LANES <= count; c += 4 * LANES)
        for (int k = 0; k < 4; k++) top[k] = maximum(top[k], load(row + c + k * LANES));
    float peak = largest(maximum(maximum(top[0], top[1]), maximum(top[2], top[3])));
    for (; c < count; c++) peak = std::max(peak, to_float(row[c]));
    vi bad = {};
    auto power = [&](vf value) __attribute__((always_inline)) {
        vf d = value - peak;
        bad |= d != d;
        return exponential(d);
    };
    double total = 0;
    c = 0;
    while (c + LANES <= count) {
        vf part[2] = {};
        int64_t end = std::min(count - LANES + 1, c + STRETCH);
        for (int k = 0; c < end; c += LANES, k ^= 1) {
            vf e = power(load(row + c));
            part[k] += e;
            if (out) store(out + c, e);
        }
        total += double(sum(part[0])) + double(sum(part[1]));
    }
    if (int64_t rest = count - c) {
        vf value = load_first(row + c, rest);
        for (int64_t i = rest; i < LANES; i++) value[i] = -INFINITY;
        vf e = power(value);
        total += sum(e);
        if (out) store_first(out + c, e, rest);
    }
    for (int i = 0; i < LANES; i++)
        if (bad[i]) total = NAN;
    return {{peak, float(total)}, std::log(total)};
}

// out = factor exp(l - maximum), where `from` holds l, or with POWERS already the exponentials; minus `onehot` at the
// target.
template <bool POWERS, class T>
static void gradient(const T *from, T *out, int64_t count, Row row, int64_t target, float coefficient) {
    float factor = coefficient / row.total;
    auto one = [&](vf value) __attribute__((always_inline)) { return (POWERS ? value : exponential(value - row.largest)) * factor; };
    float hit = to_float(from[target]);
    int64_t c = 0;
    for (; c + LANES <= count; c += LANES) store(out + c, one(load(from + c)));
    if (int64_t rest = count - c) store_first(out + c, one(load_first(from + c, rest)), rest);
    out[target] = from_float<T>(one(splat(hit))[0] - coefficient);
}

INLINE double loss_of(Found found, float target_logit) {
    return found.log_total - (double(target_logit) - double(found.row.largest));
}

// Rows that do not count have loss 0, and statistics that give a gradient of 0.
template <class T>
static void forward(const T *logits, const int64_t *targets, const uint8_t *mask, double *losses, Row *rows,
                    int64_t row_count, int64_t count, int threads) {
    parallel_for(row_count, 16384 / count + 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            if (mask && !mask[r]) {
                losses[r] = 0, rows[r] = {0, 1};
                continue;
            }
            Found found = statistics<T>(logits + r * count, nullptr, count);
            rows[r] = found.row;
            losses[r] = loss_of(found, to_float(logits[r * count + targets[r]]));
        }
    });
}

template <class T>
static void backward(const T *logits, const int64_t *targets, const uint8_t *mask, const Row *rows, T *out,
                     int64_t row_count, int64_t count, float coefficient, int threads) {
    parallel_for(row_count, 16384 / count + 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            if (mask && !mask[r])
                std::fill(out + r * count, out + (r + 1) * count, T(0));
            else
                gradient<false>(logits + r * count, out + r * count, count, rows[r], targets[r], coefficient);
        }
    });
}

// Both at once on rows `stride` elements apart: losses, and with `dlogits` the logits become their gradients.
template <class T>
static void in_place(T *logits, const int64_t *targets, double *losses, bool dlogits, int64_t row_count, int64_t count,
                     int64_t stride, float coefficient, int threads) {
    parallel_for(row_count, 16384 / count + 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            T *row = logits + r * stride;
            float target_logit = to_float(row[targets[r]]);
            // exponentials rounded to bf16 would lose what float32 statistics keep: only float32 leaves them behind
            constexpr bool KEEP = sizeof(T) == 4;
            Found found = statistics<T>(row, dlogits && KEEP ? row : nullptr, count);
            losses[r] = loss_of(found, target_logit);
            if (dlogits) gradient<KEEP>(row, row, count, found.row, targets[r], coefficient);
        }
    });
}

// logits `[rows, count]` float32 or (half) bf16, targets in range where the mask (or null) is set; losses double
// `[rows]`, statistics float32 `[rows, 2]`.
EXPORT int riftco_cross_entropy_forward(const void *logits, const int64_t *targets, const uint8_t *mask, double *losses,
                                        float *statistics, int64_t half, int64_t rows, int64_t count, int64_t threads) {
    if (half)
        forward((const bf16 *)logits, targets, mask, losses, (Row *)statistics, rows, count, threads);
    else
        forward((const float *)logits, targets, mask, losses, (Row *)statistics, rows, count, threads);
    return 0;
}

EXPORT int riftco_cross_entropy_backward(const void *logits, const int64_t *targets, const uint8_t *mask,
                                         const float *statistics, void *out, int64_t half, int64_t rows, int64_t count,
                                         float coefficient, int64_t threads) {
    const Row *found = (const Row *)statistics;
    if (half)
        backward((const bf16 *)logits, targets, mask, found, (bf16 *)out, rows, count, coefficient, threads);
    else
        backward((const float *)logits, targets, mask, found, (float *)out, rows, count, coefficient, threads);
    return 0;
}

EXPORT int riftco_cross_entropy_in_place(void *logits, const int64_t *targets, double *losses, int64_t dlogits,
                                         int64_t half, int64_t rows, int64_t count, int64_t stride, float coefficient,
                                         int64_t threads) {
    if (half)
        in_place((bf16 *)logits, targets, losses, dlogits, rows, count, stride, coefficient, threads);
    else
        in_place((float *)logits, targets, losses, dlogits, rows, count, stride, coefficient, threads);
    return 0;
}
