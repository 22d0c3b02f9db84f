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

// Elements of one tensor that lie together in every array.
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

// All arrays of a step, column by column. A tensor's moments lie in as many pages as `page_counts` says, one after
// another over all tensors.
struct Tensors {
    int64_t count;
    float *const *parameters;
    const float *const *gradients;
    const int64_t *sizes, *page_counts;
    float *const *first_moments, *const *second_moments;
    const int64_t *page_sizes;
};

struct Settings {
    double clip, beta1, beta2, correction1, correction2, learning_rate, epsilon;
};

// The largest bit patterns of parameters and first moments without their signs, and of second moments with it.
struct Largest {
    uint32_t parameter, first_moment, second_moment;

    void include(const Largest &other) {
        parameter = std::max(parameter, other.parameter);
        first_moment = std::max(first_moment, other.first_moment);
        second_moment = std::max(second_moment, other.second_moment);
    }
};

namespace {

std::vector<Item> items_of(const Tensors &t) {
    std::vector<Item> items;
    for (int64_t i = 0, page = 0; i < t.count; i++) {
        float *parameter = t.parameters[i];
        const float *gradient = t.gradients[i];
        for (const int64_t end = page + t.page_counts[i]; page < end; page++) {
            const int64_t size = t.page_sizes[page];
            for (int64_t j = 0; j < size; j += ITEM)
                items.push_back({parameter + j, gradient + j, t.first_moments[page] + j, t.second_moments[page] + j,
                                 std::min(ITEM, size - j)});
            parameter += size, gradient += size;
        }
    }
    return items;
}

void add_units(std::vector<Unit> &units, const float *values, int64_t count, int64_t step, Measure measure) {
    for (int64_t i = 0; i < count; i += step) units.push_back({values + i, std::min(step, count - i), measure});
}

std::vector<Unit> units_of(const Tensors &t, bool only_gradients) {
    std::vector<Unit> units;
    for (int64_t i = 0, page = 0; i < t.count; i++) {
        add_units(units, t.gradients[i], t.sizes[i], CHUNK, SQUARES);
        if (only_gradients) continue;
        add_units(units, t.parameters[i], t.sizes[i], ITEM, PARAMETER);
        for (const int64_t end = page + t.page_counts[i]; page < end; page++) {
            add_units(units, t.first_moments[page], t.page_sizes[page], ITEM, FIRST_MOMENT);
            add_units(units, t.second_moments[page], t.page_sizes[page], ITEM, SECOND_MOMENT);
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

// As many doubles as a register holds, four at least, and float32 values.
constexpr int64_t DOUBLES = std::max(LANES / 2, 4);
typedef double vd __attribute__((vector_size(8 * DOUBLES)));
typedef float vs __attribute__((vector_size(4 * DOUBLES)));
typedef uint32_t pattern __attribute__((vector_size(4 * DOUBLES)));

// What vector extensions lack, or what GCC 12 does in halves or lane by lane.
#if defined(__AVX512F__) && RIFTCO_LANES == 16
INLINE vd widen(vs x) { return bits<vd>(_mm512_cvtps_pd(bits<__m256>(x))); }
INLINE vs narrow(vd x) { return bits<vs>(_mm512_cvtpd_ps(bits<__m512d>(x))); }
INLINE vd square_root(vd x) { return bits<vd>(_mm512_sqrt_pd(bits<__m512d>(x))); }
INLINE vd fma(vd a, vd b, vd c) {
    return bits<vd>(_mm512_fmadd_pd(bits<__m512d>(a), bits<__m512d>(b), bits<__m512d>(c)));
}
#elif defined(__AVX2__) && defined(__FMA__) && RIFTCO_LANES == 8
INLINE vd widen(vs x) { return bits<vd>(_mm256_cvtps_pd(bits<__m128>(x))); }
INLINE vs narrow(vd x) { return bits<vs>(_mm256_cvtpd_ps(bits<__m256d>(x))); }
INLINE vd square_root(vd x) { return bits<vd>(_mm256_sqrt_pd(bits<__m256d>(x))); }
INLINE vd fma(vd a, vd b, vd c) {
    return bits<vd>(_mm256_fmadd_pd(bits<__m256d>(a), bits<__m256d>(b), bits<__m256d>(c)));
}
#else
INLINE vd widen(vs x) { return __builtin_convertvector(x, vd); }
INLINE vs narrow(vd x) { return __builtin_convertvector(x, vs); }
INLINE vd square_root(vd x) {
    for (int i = 0; i < DOUBLES; i++) x[i] = std::sqrt(x[i]);
    return x;
}
INLINE vd fma(vd a, vd b, vd c) {
    for (int i = 0; i < DOUBLES; i++) c[i] = __builtin_fma(a[i], b[i], c[i]);
    return c;
}
#endif

INLINE vd load_wide(const float *from) {
    vs values;
    std::memcpy(&values, from, sizeof values);
    return widen(values);
}

// Division by the same number d > 0 many times, rounded as a division is; without fused multiply-adds it is one.
struct Divisor {
    double d, reciprocal, rest;  // 1 / d, and what that lacks, each rounded
    bool two_terms;

    // 1 / d in two terms is off by 2^-108 at most, and the product by 2^-107 more (with d and x from 1 to 2): less than
    // x / d is away from what lies between two doubles, unless d ends in a one and x < d; then half as much has to do
    // (after Brisebarre, Muller & Raina 2004).
    explicit Divisor(double divisor) : d(divisor), reciprocal(1 / d), rest(std::fma(-d, reciprocal, 1.0) / d) {
        int exponent;
        std::frexp(d, &exponent);
        two_terms = !(bits<uint64_t>(d) & 1) || std::ldexp(std::fabs(rest), exponent - 1) <= 0x1p-55;
    }

    MEMBER vd of(vd x) const {
#if defined(__FMA__) || defined(__aarch64__)
        if (two_terms) return fma(x, vd{} + reciprocal, x * rest);
        // The product with 1 / d is off by an ulp at most, and its remainder, which is exact, corrects it (Markstein 1990).
        vd estimate = x * reciprocal;
        return fma(fma(-estimate, vd{} + d, x), vd{} + reciprocal, estimate);
#else
        return x / d;
#endif
    }
};

// Stores the new values of elements, a multiple of DOUBLES; without WRITE only returns their largest patterns.
template <bool WRITE>
Largest update_vectors(const Settings &settings, const Item &item) {
    const auto [clip, beta1, beta2, correction1, correction2, learning_rate, epsilon] = settings;
    const Divisor divisor1(correction1), divisor2(correction2);
    const auto [parameter, gradient, first, second, count] = item;
    pattern of_parameter = {}, of_first = {}, of_second = {};

    auto put = [](float *to, vd values, pattern &largest, uint32_t mask) __attribute__((always_inline)) {
        vs rounded = narrow(values);
        if constexpr (WRITE) {
            std::memcpy(to, &rounded, sizeof rounded);
        } else {
            pattern found = bits<pattern>(rounded) & mask;
            largest = largest > found ? largest : found;
        }
    };
    struct Terms {
        vd mean, variance;  // lr m / (1 - b1^t), v / (1 - b2^t)
    };
    auto moments = [&](int64_t i) __attribute__((always_inline)) -> Terms {
        vd g = load_wide(gradient + i) * clip;
        vd m = load_wide(first + i) * beta1 + g * (1.0 - beta1);
        vd v = load_wide(second + i) * beta2 + g * (1.0 - beta2) * g;
        put(first + i, m, of_first, 0x7FFFFFFF);
        put(second + i, v, of_second, 0xFFFFFFFF);
        return {divisor1.of(m) * learning_rate, divisor2.of(v)};
    };
    auto parameters = [&](int64_t i, Terms at) __attribute__((always_inline)) {
        vd change = at.mean / (square_root(at.variance) + epsilon);
        put(parameter + i, load_wide(parameter + i) - change, of_parameter, 0x7FFFFFFF);
    };
    // Root and division take most of the time: the next moments come before them, so that they wait for nothing.
    Terms next = moments(0);
    for (int64_t i = DOUBLES; i < count; i += DOUBLES) {
        const Terms terms = next;
        next = moments(i);
        parameters(i - DOUBLES, terms);
    }
    parameters(count - DOUBLES, next);
    Largest all = {};
    for (int i = 0; i < DOUBLES; i++) all.include({of_parameter[i], of_first[i], of_second[i]});
    return all;
}

// Fewer than DOUBLES elements, with zeros behind them to the width of a vector: zeros stay what they are.
template <bool WRITE>
Largest update_rest(const Settings &settings, const Item &item) {
    float parameter[DOUBLES] = {}, gradient[DOUBLES] = {}, first[DOUBLES] = {}, second[DOUBLES] = {};
    const size_t bytes = item.count * sizeof(float);
    std::memcpy(parameter, item.parameter, bytes);
    std::memcpy(gradient, item.gradient, bytes);
    std::memcpy(first, item.first_moment, bytes);
    std::memcpy(second, item.second_moment, bytes);
    const Largest largest = update_vectors<WRITE>(settings, {parameter, gradient, first, second, DOUBLES});
    if constexpr (WRITE) {
        std::memcpy(item.parameter, parameter, bytes);
        std::memcpy(item.first_moment, first, bytes);
        std::memcpy(item.second_moment, second, bytes);
    }
    return largest;
}

template <bool WRITE>
Largest update(const Settings &settings, const Item &item) {
    const auto [parameter, gradient, first, second, count] = item;
    const int64_t rest = count % DOUBLES, even = count - rest;
    Largest all = {};
    if (even) all.include(update_vectors<WRITE>(settings, {parameter, gradient, first, second, even}));
    if (rest)
        all.include(update_rest<WRITE>(settings, {parameter + even, gradient + even, first + even, second + even, rest}));
    return all;
}

template <bool WRITE>
Largest update_all(const std::vector<Item> &items, const Settings &settings, int threads) {
    std::vector<Largest> found(items.size());
    parallel_for(items.size(), 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) found[i] = update<WRITE>(settings, items[i]);
    });
    Largest all = {};
    for (const Largest &one : found) all.include(one);
    return all;
}

}  // namespace

// The sum of squares of all gradients, and the largest bit patterns, in the order of Largest, unless the caller knows
// them.
EXPORT int riftco_adam_measure(const Tensors *tensors, double *squares, uint32_t *largest, int64_t known,
                               int64_t threads) {
    const std::vector<Unit> units = units_of(*tensors, known);
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

// Stores the new values if `write` says so; else their largest bit patterns are found.
EXPORT int riftco_adam_update(const Tensors *tensors, const Settings *settings, Largest *largest, int64_t write,
                              int64_t threads) {
    const std::vector<Item> items = items_of(*tensors);
    *largest = write ? update_all<true>(items, *settings, threads) : update_all<false>(items, *settings, threads);
    return 0;
}
