// Products of a wide matrix with one of few columns, as an adapter's are: what is wide is read once, as it lies.

#include <vector>

#include "simd.h"

namespace {

constexpr int64_t RANKS = std::min(8, LANES);    // columns of the narrow matrix at a time
constexpr int64_t TOGETHER = LANES / RANKS;      // rows at a time: as many sums as `sums_of` takes
constexpr int64_t AHEAD = 6 * TOGETHER;          // rows on their way to the cache
constexpr int64_t BLOCK = 8;                     // rows whose products are added before a sum goes back to memory
constexpr int64_t SLAB = 256;                    // rows whose sums are float32
constexpr int64_t GRAIN = 32768;                 // elements that are worth a thread

struct Matrix {
    const float *at;
    int64_t rows, width, stride;

    int64_t whole() const { return width / LANES * LANES; }
    template <bool WHOLE>
    MEMBER vf vector(int64_t row, int64_t column) const {
        const float *from = at + row * stride + column;
        return WHOLE ? load(from) : load_first(from, width - column);
    }
};

// Rows [row, row + count) of x, up to TOGETHER, times a panel of factors [vectors, RANKS].
void multiply_rows(const Matrix &x, int64_t row, int64_t count, const vf *panel, float scale, float *out,
                   int64_t rank) {
    vf sums[LANES];
    for (vf &each : sums) each = vf{};
    auto add = [&]<bool WHOLE>(int64_t c) __attribute__((always_inline)) {
        vf wide[TOGETHER];
        for (int r = 0; r < TOGETHER; r++) {
            wide[r] = x.vector<WHOLE>(row + std::min<int64_t>(r, count - 1), c);
            __builtin_prefetch(x.at + (row + r + AHEAD) * x.stride + c, 0, 2);
        }
        for (int j = 0; j < RANKS; j++)
            for (int r = 0; r < TOGETHER; r++) sums[r * RANKS + j] = fma(wide[r], panel[j], sums[r * RANKS + j]);
    };
    int64_t c = 0;
    for (; c < x.whole(); c += LANES, panel += RANKS) add.template operator()<true>(c);
    if (c < x.width) add.template operator()<false>(c);
    float found[LANES];
    store(found, sums_of(sums) * scale);
    for (int64_t r = 0; r < count; r++) std::memcpy(out + (row + r) * rank, found + r * RANKS, RANKS * sizeof(float));
}

// Factors [rank, width] as panels [rank / RANKS, vectors, RANKS].
std::vector<vf> panels_of(const Matrix &factors) {
    std::vector<vf> panels;
    panels.reserve(factors.rows * (factors.width / LANES + 1));
    for (int64_t first = 0; first < factors.rows; first += RANKS)
        for (int64_t c = 0; c < factors.width; c += LANES)
            for (int64_t j = first; j < first + RANKS; j++)
                panels.push_back(c < factors.whole() ? factors.vector<true>(j, c) : factors.vector<false>(j, c));
    return panels;
}

// sums [RANKS, vectors] += left^T x over rows [row, row + count), up to BLOCK, in vectors [begin, end).
void add_block(const Matrix &x, int64_t row, int64_t count, const float *left, int64_t rank, vf *sums, int64_t vectors,
               int64_t begin, int64_t end) {
    auto add = [&]<bool WHOLE>(int64_t v) __attribute__((always_inline)) {
        vf total[RANKS];
        for (int j = 0; j < RANKS; j++) total[j] = sums[j * vectors + v];
        for (int64_t i = row; i < row + count; i++) {
            vf wide = x.vector<WHOLE>(i, v * LANES);
            __builtin_prefetch(x.at + (i + BLOCK) * x.stride + v * LANES, 0, 2);
            for (int j = 0; j < RANKS; j++) total[j] = fma(splat(left[i * rank + j]), wide, total[j]);
        }
        for (int j = 0; j < RANKS; j++) sums[j * vectors + v] = total[j];
    };
    const int64_t whole = std::min(end, x.width / LANES);
    for (int64_t v = begin; v < whole; v++) add.template operator()<true>(v);
    for (int64_t v = std::max(begin, whole); v < end; v++) add.template operator()<false>(v);
}

}  // namespace

// out [rows, rank] = scale x factors^T; x [rows, width] with rows `stride` apart, factors [rank, width], rank a multiple
// of 8.
EXPORT int riftco_narrow_product(const float *x, int64_t rows, int64_t width, int64_t stride, const float *factors,
                                 int64_t rank, float scale, float *out, int64_t threads) {
    const Matrix wide{x, rows, width, stride};
    const int64_t tiles = (rows + TOGETHER - 1) / TOGETHER, vectors = (width + LANES - 1) / LANES;
    const std::vector<vf> panels = panels_of({factors, rank, width, width});
    parallel_for(tiles, GRAIN / (width * TOGETHER) + 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin * TOGETHER; row < std::min(end * TOGETHER, rows); row += TOGETHER)
            for (int64_t j = 0; j < rank; j += RANKS)
                multiply_rows(wide, row, std::min(TOGETHER, rows - row), &panels[j * vectors], scale, out + j, rank);
    });
    return 0;
}

// out [rank, width] = scale left^T x; left [rows, rank], x as above. Sums of slabs are added up in float64.
EXPORT int riftco_narrow_gradient(const float *x, int64_t rows, int64_t width, int64_t stride, const float *left,
                                  int64_t rank, float scale, float *out, int64_t threads) {
    const Matrix wide{x, rows, width, stride};
    const int64_t vectors = (width + LANES - 1) / LANES;
    std::vector<vf> sums(rank * vectors);
    std::vector<double> totals(rank * width);
    parallel_for(vectors, GRAIN / (rows * LANES) + 1, threads, [&](int64_t begin, int64_t end) {
        const int64_t first = begin * LANES, last = std::min(end * LANES, width);
        for (int64_t slab = 0; slab < rows; slab += SLAB) {
            for (int64_t row = slab; row < std::min(slab + SLAB, rows); row += BLOCK)
                for (int64_t j = 0; j < rank; j += RANKS)
                    add_block(wide, row, std::min(BLOCK, rows - row), left + j, rank, &sums[j * vectors], vectors,
                              begin, end);
            for (int64_t j = 0; j < rank; j++) {
                const float *of_slab = reinterpret_cast<const float *>(&sums[j * vectors]);
                for (int64_t c = first; c < last; c++) totals[j * width + c] += of_slab[c];
                std::fill(&sums[j * vectors + begin], &sums[j * vectors] + end, vf{});
            }
        }
        for (int64_t j = 0; j < rank; j++)
            for (int64_t c = first; c < last; c++) out[j * width + c] = float(totals[j * width + c] * scale);
    });
    return 0;
}
