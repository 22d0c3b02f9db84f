// Weights into the panels that decode_step.cpp reads, at the speed of memory: squares of 4 x 4 are transposed in
// registers and written past the cache.

#include "simd.h"

namespace {

constexpr int PANEL = 16;
constexpr int SIDE = 4;                       // of a square
constexpr int64_t GRAIN = int64_t(1) << 16;  // elements that are worth a thread

// One line of a square, of the same width on every machine.
typedef float Line __attribute__((vector_size(4 * SIDE)));
typedef uint32_t Words __attribute__((vector_size(4 * SIDE)));
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

// Rounded to bf16 as `store` rounds, in the upper half of each word.
INLINE Words upper_half(Line value) {
    Words b = bits<Words>(value);
    Words rounded = b + 0x7FFF + ((b >> 16) & 1);
    return (value != value ? b | 0x400000 : rounded) & 0xFFFF0000;
}

// The weights of SIDE outputs from `output` on, [inputs, SIDE], to where they lie in a panel.
INLINE void write(float *panel, int64_t input, int output, const Line (&weights)[SIDE], int64_t inputs) {
    for (int64_t i = 0; i < inputs; i++) stream(panel + (input + i) * PANEL + output, weights[i]);
}

INLINE void write(uint32_t *panel, int64_t input, int output, const Line (&weights)[SIDE], int64_t inputs) {
    for (int64_t i = 0; i < inputs; i += 2)
        stream(panel + (input + i) / 2 * PANEL + output, upper_half(weights[i]) >> 16 | upper_half(weights[i + 1]));
}

// A panel from its outputs' rows; where one is null, the weights are 0.
template <class T>
void pack_panel(T *panel, const float *const *rows, int64_t inputs) {
    auto squares = [&](int64_t input, int64_t count) __attribute__((always_inline)) {
        for (int output = 0; output < PANEL; output += SIDE) {
            Line square[SIDE] = {};
            for (int o = 0; o < SIDE; o++)
                if (rows[output + o]) std::memcpy(&square[o], rows[output + o] + input, count * sizeof(float));
            transpose(square);
            write(panel, input, output, square, count);
        }
    };
    int64_t input = 0;
    for (; input + SIDE <= inputs; input += SIDE) squares(input, SIDE);
    if (input < inputs) squares(input, inputs - input);
}

// `row_size` numbers hold what a panel takes from all inputs, for each output.
template <class T>
void pack(const float *const *matrices, int64_t count, int64_t outputs, int64_t inputs, int64_t row_size, T *panels,
          int threads) {
    int64_t all = count * outputs, panel_count = (all + PANEL - 1) / PANEL, panel_size = row_size * PANEL;
    parallel_for(panel_count, GRAIN / panel_size + 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; panel++) {
            const float *rows[PANEL] = {};
            for (int64_t i = 0, o = panel * PANEL; i < PANEL && o < all; i++, o++)
                rows[i] = matrices[o / outputs] + o % outputs * inputs;
            pack_panel(panels + panel * panel_size, rows, inputs);
        }
#ifdef __SSE__
        _mm_sfence();  // streamed lines are ordered by nothing else
#endif
    });
}

}  // namespace

// `count` float32 matrices [outputs, inputs], one below the other, to panels [panels, inputs, PANEL] or, rounded,
// [panels, ceil(inputs / 2), PANEL, 2] of bf16; outputs and inputs are padded with zeros. Panels begin at a line of the
// cache.
EXPORT int riftco_pack_panels(const float *const *matrices, int64_t count, int64_t outputs, int64_t inputs,
                              int64_t is_bf16, void *panels, int64_t threads) {
    if (is_bf16)
        pack(matrices, count, outputs, inputs, (inputs + 1) / 2, static_cast<uint32_t *>(panels), int(threads));
    else
        pack(matrices, count, outputs, inputs, inputs, static_cast<float *>(panels), int(threads));
    return 0;
}
