// The draw of a token for rows of logits, exact to the sampler's contract: candidates in the order of (-logit, id),
// weights by the C library's exp in binary64, their exactly rounded sum, and a walk in that order.
//
// The sum does not need the order, so that only as many candidates are sorted as the walk passes; a row is computed
// alone by one thread.

#include <functional>
#include <type_traits>
#include <vector>

#include "simd.h"

namespace {

constexpr int64_t FIRST_SORTED = 64;
constexpr int64_t GRAIN = 16384;  // logits that are worth a thread

// A sum of doubles in [0, 1] that never rounds: a fixed-point number down to the least double, 32 bits in a limb.
class ExactSum {
    static constexpr int LIMBS = 36;
    uint64_t limbs[LIMBS] = {};  // room for 2^32 sums of carries

  public:
    void add(double value) {
        uint64_t b = bits<uint64_t>(value), exponent = b >> 52, mantissa = b & ((uint64_t(1) << 52) - 1);
        if (exponent) mantissa |= uint64_t(1) << 52, exponent--;
        unsigned __int128 shifted = (unsigned __int128)mantissa << (exponent % 32);
        uint64_t *to = limbs + exponent / 32;
        to[0] += uint32_t(shifted);
        to[1] += uint32_t(shifted >> 32);
        to[2] += uint64_t(shifted >> 64);
    }

    // The nearest double, ties to even; the sum is at least 1.
    double rounded() const {
        uint32_t digits[LIMBS];
        uint64_t carry = 0;
        for (int i = 0; i < LIMBS; i++) {
            carry += limbs[i];
            digits[i] = uint32_t(carry);
            carry >>= 32;
        }
        int top = LIMBS - 1;
        while (!digits[top]) top--;
        unsigned __int128 head = 0;  // the highest 96 bits or more, without those below
        for (int i = 0; i < 4; i++) head = head << 32 | digits[top - i];
        bool below = false;
        for (int i = top - 4; i >= 0; i--) below |= digits[i] != 0;
        int length = 96 + 32 - __builtin_clz(digits[top]), drop = length - 53;
        uint64_t mantissa = uint64_t(head >> drop);
        unsigned __int128 rest = head & (((unsigned __int128)1 << drop) - 1), half = (unsigned __int128)1 << (drop - 1);
        if (rest > half || (rest == half && (below || mantissa & 1))) mantissa++;
        return std::ldexp(double(mantissa), drop + 32 * (top - 3) - 1074);
    }
};

struct Candidate {
    double logit, weight;
    int64_t id;

    bool operator<(const Candidate &other) const {
        return logit > other.logit || (logit == other.logit && id < other.id);
    }
};

}  // namespace

// As `kernels/sampling/cpu.py` fills it, of one row in `settings`.
struct Settings {
    double temperature, top_p, min_p, repetition, presence, frequency;

    bool penalize() const { return repetition != 1 || presence != 0 || frequency != 0; }
};

namespace {

// The row's weighted candidates, the first of them sorted as far as asked for.
struct Ranking {
    std::vector<Candidate> &all;
    int64_t sorted = 0;

    const Candidate &operator[](int64_t i) {
        if (i >= sorted) {
            int64_t count = all.size(), end = std::min(count, std::max(FIRST_SORTED, 4 * sorted));
            if (end < count) std::nth_element(all.begin() + sorted, all.begin() + end, all.end());
            std::sort(all.begin() + sorted, all.begin() + end);
            sorted = end;
        }
        return all[i];
    }
};

// The draw among candidates with weights and their exact sum.
int64_t draw(std::vector<Candidate> &candidates, double total, const Settings &s, double uniform) {
    Ranking ranking{candidates};
    int64_t kept = candidates.size();
    double cumulative = 0;
    if (s.top_p < 1)
        for (int64_t i = 0; i < kept; i++)
            if ((cumulative += ranking[i].weight) >= s.top_p * total) kept = i + 1;
    if (s.min_p > 0)
        for (int64_t i = 1; i < kept; i++)
            if (ranking[i].weight < s.min_p) kept = i;
    if (kept < int64_t(candidates.size())) {
        ExactSum sum;
        for (int64_t i = 0; i < kept; i++) sum.add(candidates[i].weight);
        total = sum.rounded();
    }
    double threshold = uniform * total;
    cumulative = 0;
    for (int64_t i = 0; i < kept; i++)
        if (threshold < (cumulative += ranking[i].weight)) return ranking[i].id;
    return ranking[kept - 1].id;
}

template <class T>
struct Row {
    const T *logits;
    int64_t count;

    bool finite() const {
        using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
        const Bits exponent = bits<Bits>(T(INFINITY));
        Bits wrong = 0;
        for (int64_t i = 0; i < count; i++) wrong |= (bits<Bits>(logits[i]) & exponent) == exponent;
        return !wrong;
    }

    T highest() const {
        T most = logits[0];
        int64_t i = 0;
        if constexpr (sizeof(T) == 4) {
            vf part = splat(most);
            for (; i + LANES <= count; i += LANES) part = maximum(part, load(logits + i));
            most = largest(part);
        }
        for (; i < count; i++) most = std::max(most, logits[i]);
        return most;
    }

    // log softmax(logits)[id], at least the lowest float.
    float log_probability(int64_t id) const {
        double most = highest(), total = 0;
        if constexpr (sizeof(T) == 4) {
            constexpr int64_t PART = 64 * LANES;  // few enough to be summed in float32
            for (int64_t begin = 0; begin < count; begin += PART) {
                vf part = vf{};
                int64_t end = std::min(begin + PART, count), i = begin;
                for (; i + LANES <= end; i += LANES) part += exponential(load(logits + i) - float(most));
                for (; i < end; i++) total += std::exp(double(logits[i]) - most);
                total += sum(part);
            }
        } else {
            for (int64_t i = 0; i < count; i++) total += std::exp(logits[i] - most);
        }
        return float(std::max(double(logits[id]) - most - std::log(total), -3.4028234663852886e38));
    }

    double penalized(const Settings &s, const int64_t *counts, const uint8_t *prompt, int64_t i) const {
        double logit = logits[i];
        int64_t used = counts ? counts[i] : 0;
        if (used > 0 || (prompt && prompt[i])) logit = logit > 0 ? logit / s.repetition : logit * s.repetition;
        logit -= s.frequency * double(used);
        return used > 0 ? logit - s.presence : logit;
    }

    int64_t first_highest() const {
        T most = highest();
        return std::find(logits, logits + count, most) - logits;
    }

    // The id, or -1 if a logit is not finite before or after penalties.
    int64_t pick(const Settings &s, int64_t top_k, double uniform, const int64_t *counts, const uint8_t *prompt,
                 std::vector<Candidate> &candidates) const {
        if (!finite()) return -1;
        bool penalize = s.penalize();
        if (s.temperature == 0 && !penalize) return first_highest();
        if (!penalize && s.temperature > 0 && gather(top_k, candidates)) return choose(s, top_k, uniform, candidates);
        candidates.resize(count);
        for (int64_t i = 0; i < count; i++) {
            double logit = penalize ? penalized(s, counts, prompt, i) : double(logits[i]);
            if (!std::isfinite(logit)) return -1;
            candidates[i] = {logit, 0, i};
        }
        if (s.temperature == 0) return std::min_element(candidates.begin(), candidates.end())->id;
        return choose(s, top_k, uniform, candidates);
    }

    // Candidates that include the top_k first; false if they would be too many to be worth it. The top_k-th highest of
    // the maxima of as many parts of the row or more is at most the top_k-th highest logit.
    bool gather(int64_t top_k, std::vector<Candidate> &candidates) const {
        if constexpr (sizeof(T) != 4) return false;
        else {
            constexpr int64_t DEPTH = 16, PART = DEPTH * LANES;  // a lane of DEPTH vectors is a part
            if (top_k * DEPTH > count) return false;
            int64_t whole = count / PART * PART;
            std::vector<float> maxima(whole / DEPTH);
            for (int64_t begin = 0; begin < whole; begin += PART) {
                vf most = load(logits + begin);
                for (int i = 1; i < DEPTH; i++) most = maximum(most, load(logits + begin + i * LANES));
                store(maxima.data() + begin / DEPTH, most);
            }
            maxima.insert(maxima.end(), logits + whole, logits + count);
            std::vector<float> ranked(maxima);
            std::nth_element(ranked.begin(), ranked.begin() + top_k - 1, ranked.end(), std::greater<float>());
            float bound = ranked[top_k - 1];
            candidates.clear();
            auto meet = [&](int64_t id) {
                if (logits[id] >= bound) candidates.push_back({logits[id], 0, id});
            };
            for (int64_t part = 0; part < whole / DEPTH; part++)
                if (maxima[part] >= bound)
                    for (int i = 0; i < DEPTH; i++) meet(part / LANES * PART + i * LANES + part % LANES);
            for (int64_t id = whole; id < count; id++) meet(id);
            return true;
        }
    }

    // The draw among the first top_k of the candidates.
    static int64_t choose(const Settings &s, int64_t top_k, double uniform, std::vector<Candidate> &candidates) {
        if (top_k < int64_t(candidates.size())) {
            std::nth_element(candidates.begin(), candidates.begin() + top_k, candidates.end());
            candidates.resize(top_k);
        }
        double best = std::min_element(candidates.begin(), candidates.end())->logit;
        ExactSum sum;
        for (Candidate &c : candidates) {
            c.weight = std::exp((c.logit - best) / s.temperature);
            sum.add(c.weight);
        }
        return draw(candidates, sum.rounded(), s, uniform);
    }
};

template <class T>
void sample(const T *logits, int64_t rows, int64_t count, const double *uniforms, const int64_t *top_k,
            const Settings *settings, const int64_t *counts, const uint8_t *prompt, int64_t *ids,
            float *log_probabilities, int64_t threads) {
    parallel_for(rows, GRAIN / count + 1, int(threads), [&](int64_t begin, int64_t end) {
        std::vector<Candidate> candidates;
        for (int64_t r = begin; r < end; r++) {
            Row<T> row{logits + r * count, count};
            ids[r] = row.pick(settings[r], top_k[r], uniforms[r], counts ? counts + r * count : nullptr,
                              prompt ? prompt + r * count : nullptr, candidates);
            if (ids[r] >= 0) log_probabilities[r] = row.log_probability(ids[r]);
        }
    });
}

}  // namespace

// logits [rows, count] float32 or (`wide`) float64; counts int64 and prompt bool [rows, count] or null. ids and
// log_probabilities [rows]; id -1 for a row that has logits which are not finite.
EXPORT int riftco_sample(const void *logits, int64_t wide, int64_t rows, int64_t count, const double *uniforms,
                         const int64_t *top_k, const Settings *settings, const int64_t *counts, const uint8_t *prompt,
                         int64_t *ids, float *log_probabilities, int64_t threads) {
    if (wide)
        sample((const double *)logits, rows, count, uniforms, top_k, settings, counts, prompt, ids, log_probabilities,
               threads);
    else
        sample((const float *)logits, rows, count, uniforms, top_k, settings, counts, prompt, ids, log_probabilities,
               threads);
    return 0;
}

// The highest logit's id in each row of logits [rows, count], the lowest among equals; -1 for a row that has logits which
// are not finite.
EXPORT int riftco_greedy(const float *logits, int64_t rows, int64_t count, int64_t *ids) {
    for (int64_t r = 0; r < rows; r++) {
        Row<float> row{logits + r * count, count};
        ids[r] = row.finite() ? row.first_highest() : -1;
    }
    return 0;
}
