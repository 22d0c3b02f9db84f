// Which of the x86-64 levels (v2, v3, v4) this machine can run; the baseline library answers for all.

#include "simd.h"

EXPORT int riftco_machine_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return v4 ? 4 : v3 ? 3 : 2;
#else
    return 2;
#endif
}

EXPORT int riftco_lanes() { return LANES; }
