// Layer norm over rows, optionally of x + residual: population variance in two passes, statistics in float32.

#include "simd.h"

constexpr int64_t GRAIN = 16384;  // elements that are worth a thread

// Calls body(column, count) for each vector of a row; count < LANES at most once, at the end.
template <class Body>
INLINE void columns(int64_t width, const Body &body) {
    int64_t c = 0;
    for (; c + LANES <= width; c += LANES) body(c, int64_t(LANES));
    if (c < width) body(c, width - c);
}

template <class T>
INLINE vf get(const T *from, int64_t count) {
    return count == LANES ? load(from) : load_first(from, count);
}

template <class T>
INLINE void put(T *to, vf value, int64_t count) {
    if (count == LANES)
        store(to, value);
    else
        store_first(to, value, count);
}

// The sum over a row of body(column, count), in four interleaved sums; body gives 0 in lanes beyond the end.
template <class Body>
INLINE float row_sum(int64_t width, const Body &body) {
    vf total[4] = {};
    int64_t c = 0;
    for (; c + 4 * LANES <= width; c += 4 * LANES)
        for (int k = 0; k < 4; k++) total[k] += body(c + k * LANES, int64_t(LANES));
    for (; c + LANES <= width; c += LANES) total[0] += body(c, int64_t(LANES));
    if (c < width) total[1] += body(c, width - c);
    return sum((total[0] + total[1]) + (total[2] + total[3]));
}

INLINE vf first_lanes(vf value, int64_t count) {
    vf out = value;
    for (int64_t i = count; i < LANES; i++) out[i] = 0.0f;
    return out;
}

template <class T>
static void forward(const T *x, const T *residual, const float *scale, const float *bias, T *y, T *total, float *means,
                    float *rstds, int64_t rows, int64_t width, float epsilon, int threads) {
    parallel_for(rows, GRAIN / width + 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            const T *row = x + r * width;
            if (residual) {
                T *sums = total + r * width;
                columns(width, [&](int64_t c, int64_t count) __attribute__((always_inline)) {
                    put(sums + c, get(row + c, count) + get(residual + r * width + c, count), count);
                });
                row = sums;  // rounded, as backward will see it
            }
            float mean = row_sum(width, [&](int64_t c, int64_t n) __attribute__((always_inline)) { return get(row + c, n); }) / width;
            float squares = row_sum(width, [&](int64_t c, int64_t n) __attribute__((always_inline)) {
                vf d = get(row + c, n) - mean;
                if (n < LANES) d = first_lanes(d, n);
                return d * d;
            });
            float rstd = 1.0f / std::sqrt(squares / width + epsilon);
            T *out = y + r * width;
            columns(width, [&](int64_t c, int64_t n) __attribute__((always_inline)) {
                vf normed = (get(row + c, n) - mean) * rstd;
                put(out + c, fma(normed, get(scale + c, n), get(bias + c, n)), n);
            });
            means[r] = mean;
            rstds[r] = rstd;
        }
    });
}

// dx = rstd (g scale - mean(g scale) - normed mean(g scale normed)) [+ the gradient of the sum itself]
template <class T>
static void backward_row(const T *g, const T *extra, const T *x, const float *scale, float mean, float rstd, T *dx,
                         float *dscale, float *dbias, int64_t width) {
    vf s1[2] = {}, s2[2] = {};
    int k = 0;
    columns(width, [&](int64_t c, int64_t n) __attribute__((always_inline)) {
        vf gradient = get(g + c, n), normed = (get(x + c, n) - mean) * rstd;
        vf scaled = gradient * get(scale + c, n);
        s1[k] += scaled;
        s2[k] = fma(scaled, normed, s2[k]);
        put(dscale + c, fma(gradient, normed, get(dscale + c, n)), n);
        put(dbias + c, get(dbias + c, n) + gradient, n);
        k ^= 1;
    });
    float m1 = sum(s1[0] + s1[1]) / width, m2 = sum(s2[0] + s2[1]) / width;
    columns(width, [&](int64_t c, int64_t n) __attribute__((always_inline)) {
        vf normed = (get(x + c, n) - mean) * rstd;
        vf d = (get(g + c, n) * get(scale + c, n) - m1 - normed * m2) * rstd;
        put(dx + c, extra ? d + get(extra + c, n) : d, n);
    });
}

template <class T>
static void backward(const T *g, const T *extra, const T *x, const float *scale, const float *means, const float *rstds,
                     T *dx, float *partial, int64_t parts, int64_t rows, int64_t width, int threads) {
    parallel_for(parts, GRAIN * parts / (rows * width + 1) + 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t part = begin; part < end; part++) {
            float *dscale = partial + part * 2 * width, *dbias = dscale + width;
            std::fill(dscale, dscale + 2 * width, 0.0f);
            for (int64_t r = part * rows / parts; r < (part + 1) * rows / parts; r++)
                backward_row(g + r * width, extra ? extra + r * width : nullptr, x + r * width, scale, means[r], rstds[r],
                             dx + r * width, dscale, dbias, width);
        }
    });
}

// x, residual or null, y, total (unused without residual) `[rows, width]` float32 or (half) bf16; the rest float32.
EXPORT int riftco_layer_norm_forward(const void *x, const void *residual, const float *scale, const float *bias, void *y,
                                     void *total, float *means, float *rstds, int64_t half, int64_t rows, int64_t width,
                                     float epsilon, int64_t threads) {
    auto run = [&](auto *first) {
        using T = std::remove_pointer_t<decltype(first)>;
        forward<T>(first, (T *)residual, scale, bias, (T *)y, (T *)total, means, rstds, rows, width, epsilon, threads);
    };
    half ? run((bf16 *)x) : run((float *)x);
    return 0;
}

// extra: the gradient of x + residual as an output, or null. partial: float32 `[parts, 2, width]`, receives the sums
// of dscale and dbias over equal parts of the rows.
EXPORT int riftco_layer_norm_backward(const void *g, const void *extra, const void *x, const float *scale,
                                      const float *means, const float *rstds, void *dx, float *partial, int64_t half,
                                      int64_t parts, int64_t rows, int64_t width, int64_t threads) {
    auto run = [&](auto *first) {
        using T = std::remove_pointer_t<decltype(first)>;
        backward<T>((T *)g, (T *)extra, first, scale, means, rstds, (T *)dx, partial, parts, rows, width, threads);
    };
    half ? run((bf16 *)x) : run((float *)x);
    return 0;
}
