// Adam over many tensors, in the float64 arithmetic of the contract: everything is measured, then the caller decides
// whether the step is allowed, then it is applied. Per element, one square root and one division are left of the
// arithmetic; measuring reads 16 bytes and applying reads 16 and writes 12.

#include <vector>

#include "simd.h"

namespace {

// Squares are summed in chunks of a tensor, CHUNK = ROWS * COLUMNS elements: down the ROWS of each column, then the
// columns by halves, then the chunks in order. So a norm depends neither on threads nor on the instruction set.
constexpr int64_t ROWS = 16, COLUMNS = 256, CHUNK = ROWS * COLUMNS;
constexpr int64_t ITEM = 16384;  // elements that a thread takes at a time

struct Item {
    float *parameter;
    const float *gradient;
    float *first_moment, *second_moment;
    int64_t count;
};

// What is measured of an array: the sum of squares, or the largest bit pattern. Without the sign bit that orders
// magnitudes, infinities and NaN on top; with it, negative values come out above everything.
enum Measure { SQUARES, PARAMETER, FIRST_MOMENT, SECOND_MOMENT };

struct Unit {
    const float *values;
    int64_t count;
    Measure measure;
};

}  // namespace

struct Tensor {
    float *parameter;
    const float *gradient;
    int64_t count, pages;
};

struct Settings {
    double clip, beta1, beta2, correction1, correction2, learning_rate, epsilon;
};

// The largest bit patterns of parameters and first moments without their signs, and of second moments with it.
struct Largest {
    uint32_t parameter, first_moment, second_moment;
};

// The moments of consecutive elements of a tensor.
struct Page {
    float *first_moment, *second_moment;
    int64_t count;
};

namespace {

// Elements of one tensor that lie together in every array.
std::vector<Item> items_of(const Tensor *tensors, int64_t count, const Page *page) {
    std::vector<Item> items;
    for (const Tensor *t = tensors; t != tensors + count; t++) {
        int64_t at = 0;
        for (int64_t i = 0; i < t->pages; at += page->count, page++, i++)
            for (int64_t j = 0; j < page->count; j += ITEM)
                items.push_back({t->parameter + at + j, t->gradient + at + j, page->first_moment + j,
                                 page->second_moment + j, std::min(ITEM, page->count - j)});
    }
    return items;
}

void add_units(std::vector<Unit> &units, const float *values, int64_t count, int64_t step, Measure measure) {
    for (int64_t i = 0; i < count; i += step) units.push_back({values + i, std::min(step, count - i), measure});
}

// Tensor by tensor, so that what is measured last is still in the cache when the update begins with it.
std::vector<Unit> units_of(const Tensor *tensors, int64_t count, const Page *page, bool only_gradients) {
    std::vector<Unit> units;
    for (const Tensor *t = tensors; t != tensors + count; t++) {
        add_units(units, t->gradient, t->count, CHUNK, SQUARES);
        if (only_gradients) continue;
        add_units(units, t->parameter, t->count, ITEM, PARAMETER);
        for (int64_t i = 0; i < t->pages; i++, page++) {
            add_units(units, page->first_moment, page->count, ITEM, FIRST_MOMENT);
            add_units(units, page->second_moment, page->count, ITEM, SECOND_MOMENT);
        }
    }
    return units;
}

double sum_by_halves(double *columns) {
    for (int64_t width = COLUMNS / 2; width > 0; width /= 2)
        for (int64_t i = 0; i < width; i++) columns[i] += columns[i + width];
    return columns[0];
}

// The square of a float32 is exact in float64, so a fused multiply-add rounds as the two operations do.
double sum_of_squares(const float *__restrict values, int64_t count) {
    alignas(64) double columns[COLUMNS] = {};
    for (int64_t row = 0; row * COLUMNS < count; row++) {
        const float *from = values + row * COLUMNS;
        int64_t width = std::min(COLUMNS, count - row * COLUMNS);
        if (width == COLUMNS)
            for (int64_t i = 0; i < COLUMNS; i++) columns[i] += double(from[i]) * from[i];
        else
            for (int64_t i = 0; i < width; i++) columns[i] += double(from[i]) * from[i];
    }
    return sum_by_halves(columns);
}

uint32_t largest_bits(const float *__restrict values, int64_t count, uint32_t mask) {
    uint32_t most = 0;
    for (int64_t i = 0; i < count; i++) most = std::max(most, bits<uint32_t>(values[i]) & mask);
    return most;
}

// x / d, rounded as the division is: the product with 1 / d is off by an ulp at most, and its remainder, exact in a
// fused multiply-add, corrects it (Markstein 1990). Without that instruction a division is faster.
INLINE double quotient(double x, double d, double reciprocal) {
#if defined(__FMA__) || defined(__aarch64__)
    double estimate = x * reciprocal;
    return __builtin_fma(__builtin_fma(-estimate, d, x), reciprocal, estimate);
#else
    (void)reciprocal;
    return x / d;
#endif
}

// New values of [0, count), of which the largest patterns are returned; with WRITE they are stored.
template <bool WRITE>
Largest update(const Settings &s, int64_t count, float *__restrict parameter, const float *__restrict gradient,
               float *__restrict first, float *__restrict second) {
    const double reciprocal1 = 1.0 / s.correction1, reciprocal2 = 1.0 / s.correction2;
    uint32_t of_parameter = 0, of_first = 0, of_second = 0;
    for (int64_t i = 0; i < count; i++) {
        double g = s.clip * gradient[i];
        double m = s.beta1 * first[i] + (1.0 - s.beta1) * g;
        double v = s.beta2 * second[i] + (1.0 - s.beta2) * g * g;
        double denominator = std::sqrt(quotient(v, s.correction2, reciprocal2)) + s.epsilon;
        float theta = float(parameter[i] - s.learning_rate * quotient(m, s.correction1, reciprocal1) / denominator);
        of_parameter = std::max(of_parameter, bits<uint32_t>(theta) & 0x7FFFFFFF);
        of_first = std::max(of_first, bits<uint32_t>(float(m)) & 0x7FFFFFFF);
        of_second = std::max(of_second, bits<uint32_t>(float(v)));
        if constexpr (WRITE) {
            parameter[i] = theta;
            first[i] = float(m);
            second[i] = float(v);
        }
    }
    return {of_parameter, of_first, of_second};
}

template <bool WRITE>
Largest update_all(const std::vector<Item> &items, const Settings &settings, int threads) {
    std::vector<Largest> found(items.size());
    parallel_for(items.size(), 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = end - 1; i >= begin; i--) {
            const Item &at = items[i];
            found[i] =
                update<WRITE>(settings, at.count, at.parameter, at.gradient, at.first_moment, at.second_moment);
        }
    });
    Largest all = {};
    for (const Largest &one : found) {
        all.parameter = std::max(all.parameter, one.parameter);
        all.first_moment = std::max(all.first_moment, one.first_moment);
        all.second_moment = std::max(all.second_moment, one.second_moment);
    }
    return all;
}

}  // namespace

// The sum of squares of all gradients, and the largest bit patterns, in the order of Largest, unless the caller knows
// them.
EXPORT int riftco_adam_measure(const Tensor *tensors, int64_t count, const Page *pages, double *squares,
                               uint32_t *largest, int64_t known, int64_t threads) {
    const std::vector<Unit> units = units_of(tensors, count, pages, known);
    std::vector<double> sums(units.size());
    std::vector<uint32_t> most(units.size());
    parallel_for(units.size(), 8, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const auto &[values, length, measure] = units[i];
            if (measure == SQUARES) sums[i] = sum_of_squares(values, length);
            else most[i] = largest_bits(values, length, measure == SECOND_MOMENT ? 0xFFFFFFFF : 0x7FFFFFFF);
        }
    });
    *squares = 0;
    for (size_t i = 0; i < units.size(); i++) {
        if (units[i].measure == SQUARES) *squares += sums[i];
        else largest[units[i].measure - 1] = std::max(largest[units[i].measure - 1], most[i]);
    }
    return 0;
}

// The largest bit patterns of the new values, which are stored if `write` says so.
EXPORT int riftco_adam_update(const Tensor *tensors, int64_t count, const Page *pages, const Settings *settings,
                              Largest *largest, int64_t write, int64_t threads) {
    const std::vector<Item> items = items_of(tensors, count, pages);
    *largest = write ? update_all<true>(items, *settings, threads) : update_all<false>(items, *settings, threads);
    return 0;
}
