// Weights into the panels that decode_step.cpp reads, at the speed of memory: squares of 4 x 4 are transposed in
// registers and written past the cache.

#include "fixed.h"
#include "panels.h"

namespace {

constexpr int SIDE = 4;                       // of a square
constexpr int64_t GRAIN = int64_t(1) << 16;  // elements that are worth a thread

// One line of a square, of the same width on every machine.
typedef float Line __attribute__((vector_size(4 * SIDE)));
typedef int32_t Order __attribute__((vector_size(4 * SIDE)));

// Panels are read only much later: the cache is left to the rows, and no line is fetched to be overwritten.
INLINE void stream(void *to, const auto &line) {
#ifdef __SSE__
    _mm_stream_ps(static_cast<float *>(to), bits<__m128>(line));
#else
    std::memcpy(to, &line, sizeof line);
#endif
}

INLINE void transpose(Line (&square)[SIDE]) {
    constexpr Order low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, left = {0, 1, 4, 5}, right = {2, 3, 6, 7};
    Line top[2] = {__builtin_shuffle(square[0], square[1], low), __builtin_shuffle(square[0], square[1], high)};
    Line bottom[2] = {__builtin_shuffle(square[2], square[3], low), __builtin_shuffle(square[2], square[3], high)};
    for (int i = 0; i < 2; i++) {
        square[2 * i] = __builtin_shuffle(top[i], bottom[i], left);
        square[2 * i + 1] = __builtin_shuffle(top[i], bottom[i], right);
    }
}

// The rows of a panel's outputs; beyond the last one they are null.
struct Outputs {
    const float *rows[PANEL] = {};

    Outputs(const float *const *matrices, int64_t count, int64_t outputs, int64_t inputs, int64_t panel) {
        for (int64_t i = 0, o = panel * PANEL; i < PANEL && o < count * outputs; i++, o++)
            rows[i] = matrices[o / outputs] + o % outputs * inputs;
    }
};

// A panel [inputs, PANEL].
void pack_panel(float *panel, const Outputs &outputs, int64_t inputs) {
    auto squares = [&](int64_t input, int64_t count) __attribute__((always_inline)) {
        for (int output = 0; output < PANEL; output += SIDE) {
            Line square[SIDE] = {};
            for (int o = 0; o < SIDE; o++)
                if (const float *row = outputs.rows[output + o])
                    std::memcpy(&square[o], row + input, count * sizeof(float));
            transpose(square);
            for (int64_t i = 0; i < count; i++) stream(panel + (input + i) * PANEL + output, square[i]);
        }
    };
    int64_t input = 0;
    for (; input + SIDE <= inputs; input += SIDE) squares(input, SIDE);
    if (input < inputs) squares(input, inputs - input);
}

// A run of `count` weights, rounded to bf16, as whole numbers, zeros beyond; returns what WEIGHT_ONE stands for.
float to_fixed(const float *weights, int64_t count, int16_t *out) {
    float rounded[RUN] = {};
    for (int64_t i = 0; i < count; i++) rounded[i] = to_float(from_float<bf16>(weights[i]));
    return run_to_fixed<false>(rounded, RUN, RUN, out) * WEIGHT_ONE;
}

// The nearest whole numbers, 128 more than they are, as bytes; returns what 1 stands for.
float to_fixed(const float *weights, int64_t count, uint8_t *out) {
    int16_t numbers[RUN];
    float scale = run_to_fixed<false>(weights, count, RUN, numbers, BYTE_ONE);
    for (int64_t i = 0; i < RUN; i++) out[i] = uint8_t(numbers[i] + 128);
    return scale;
}

// A panel [runs, words of a run, PANEL], the weights of as many inputs in a word as fit, and its scales [runs, PANEL].
template <class Number>
void pack_fixed_panel(int32_t *panel, float *scales, const Outputs &outputs, int64_t inputs) {
    constexpr int64_t IN_WORD = sizeof(int32_t) / sizeof(Number), WORDS = RUN / IN_WORD;
    for (int64_t begin = 0; begin < inputs; begin += RUN, panel += WORDS * PANEL, scales += PANEL) {
        Number numbers[PANEL][RUN] = {};
        for (int o = 0; o < PANEL; o++)
            scales[o] = outputs.rows[o]
                            ? to_fixed(outputs.rows[o] + begin, std::min(RUN, inputs - begin), numbers[o])
                            : 0;
        for (int64_t word = 0; word < WORDS; word += SIDE)
            for (int output = 0; output < PANEL; output += SIDE) {
                Line square[SIDE];
                for (int o = 0; o < SIDE; o++) std::memcpy(&square[o], numbers[output + o] + IN_WORD * word, sizeof(Line));
                transpose(square);
                for (int i = 0; i < SIDE; i++) stream(panel + (word + i) * PANEL + output, square[i]);
            }
    }
}

// Calls f(panel) for each panel of `outputs` rows, `work` elements each.
template <class F>
void each_panel(int64_t outputs, int64_t work, int threads, const F &f) {
    parallel_for((outputs + PANEL - 1) / PANEL, GRAIN / (work + 1) + 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; panel++) f(panel);
#ifdef __SSE__
        _mm_sfence();  // streamed lines are ordered by nothing else
#endif
    });
}

}  // namespace

// `count` float32 matrices [outputs, inputs], one below the other, to panels [panels, inputs, PANEL]; outputs are padded
// with zeros. Panels begin at a line of the cache.
EXPORT int riftco_pack_panels(const float *const *matrices, int64_t count, int64_t outputs, int64_t inputs,
                              float *panels, int64_t threads) {
    each_panel(count * outputs, inputs * PANEL, int(threads), [&](int64_t panel) {
        pack_panel(panels + panel * inputs * PANEL, {matrices, count, outputs, inputs, panel}, inputs);
    });
    return 0;
}

// The same in fixed point, rounded to bf16 or in bytes: words [panels, runs, RUN / 2 or RUN / 4, PANEL] and scales
// [panels, runs, PANEL].
EXPORT int riftco_pack_fixed(const float *const *matrices, int64_t count, int64_t outputs, int64_t inputs,
                                    int32_t *panels, float *scales, int64_t in_bytes, int64_t threads) {
    int64_t runs = (inputs + RUN - 1) / RUN, size = runs * RUN * PANEL / (in_bytes ? 4 : 2);
    auto pack = in_bytes ? pack_fixed_panel<uint8_t> : pack_fixed_panel<int16_t>;
    each_panel(count * outputs, inputs * PANEL, int(threads), [&](int64_t panel) {
        pack(panels + panel * size, scales + panel * runs * PANEL, {matrices, count, outputs, inputs, panel}, inputs);
    });
    return 0;
}
