// GELU of x + bias: y = z Phi(z), dx = g (Phi(z) + z phi(z)) for z = x + bias, and the column sums of dx.

#include "simd.h"

constexpr int64_t GRAIN = 16384;  // elements that are worth a thread

// One vector of dx; `z` comes from lanes beyond the end as 0 and its gradient as 0.
template <class T>
INLINE vf derivative(vf gradient, vf z) {
    Normal n = normal<T>(z);
    return gradient * fma(z, n.density, n.cdf);
}

template <class T>
static void forward_row(const T *x, const float *bias, T *y, int64_t width) {
    auto one = [&](vf value, vf shift) __attribute__((always_inline)) {
        vf z = value + shift;
        return z * normal<T>(z).cdf;
    };
    int64_t c = 0;
    for (; c + LANES <= width; c += LANES) store(y + c, one(load(x + c), bias ? load(bias + c) : vf{}));
    if (int64_t rest = width - c)
        store_first(y + c, one(load_first(x + c, rest), bias ? load_first(bias + c, rest) : vf{}), rest);
}

// Adds dx to `sums` where that is given.
template <class T>
static void backward_row(const T *gradient, const T *x, const float *bias, T *dx, float *sums, int64_t width) {
    int64_t c = 0;
    for (; c + LANES <= width; c += LANES) {
        vf d = derivative<T>(load(gradient + c), load(x + c) + (bias ? load(bias + c) : vf{}));
        store(dx + c, d);
        if (sums) store(sums + c, load(sums + c) + d);
    }
    if (int64_t rest = width - c) {
        vf z = load_first(x + c, rest) + (bias ? load_first(bias + c, rest) : vf{});
        vf d = derivative<T>(load_first(gradient + c, rest), z);
        store_first(dx + c, d, rest);
        if (sums) store_first(sums + c, load_first(sums + c, rest) + d, rest);
    }
}

template <class T>
static void forward(const T *x, const float *bias, T *y, int64_t rows, int64_t width, int threads) {
    if (!bias) {  // the shape does not matter: one long row
        parallel_for(rows * width, GRAIN, threads, [&](int64_t begin, int64_t end) {
            forward_row(x + begin, bias, y + begin, end - begin);
        });
        return;
    }
    parallel_for(rows, GRAIN / width + 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) forward_row(x + r * width, bias, y + r * width, width);
    });
}

template <class T>
static void backward(const T *gradient, const T *x, const float *bias, T *dx, float *partial, int64_t parts,
                     int64_t rows, int64_t width, int threads) {
    if (!bias) {
        parallel_for(rows * width, GRAIN, threads, [&](int64_t begin, int64_t end) {
            backward_row(gradient + begin, x + begin, bias, dx + begin, nullptr, end - begin);
        });
        return;
    }
    parallel_for(parts, GRAIN * parts / (rows * width + 1) + 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t part = begin; part < end; part++) {
            float *sums = partial + part * width;
            std::fill(sums, sums + width, 0.0f);
            for (int64_t r = part * rows / parts; r < (part + 1) * rows / parts; r++)
                backward_row(gradient + r * width, x + r * width, bias, dx + r * width, sums, width);
        }
    });
}

// x, y `[rows, width]` float32 or (half) bf16; bias float32 `[width]` or null.
EXPORT int riftco_gelu_forward(const void *x, const float *bias, void *y, int64_t half, int64_t rows, int64_t width,
                               int64_t threads) {
    if (half)
        forward((const bf16 *)x, bias, (bf16 *)y, rows, width, threads);
    else
        forward((const float *)x, bias, (float *)y, rows, width, threads);
    return 0;
}

// partial: float32 `[parts, width]`, receives the column sums of dx over equal parts of the rows; unused without bias.
EXPORT int riftco_gelu_backward(const void *gradient, const void *x, const float *bias, void *dx, float *partial,
                                int64_t half, int64_t parts, int64_t rows, int64_t width, int64_t threads) {
    if (half)
        backward((const bf16 *)gradient, (const bf16 *)x, bias, (bf16 *)dx, partial, parts, rows, width, threads);
    else
        backward((const float *)gradient, (const float *)x, bias, (float *)dx, partial, parts, rows, width, threads);
    return 0;
}
