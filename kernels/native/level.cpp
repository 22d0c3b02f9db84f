// Which of the x86-64 levels this machine can run: v2, v3, or v4 with VNNI. The baseline library answers for all.

#include "simd.h"

EXPORT int riftco_machine_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni");
    return v4 ? 4 : v3 ? 3 : 2;
#else
    return 2;
#endif
}

EXPORT int riftco_lanes() { return LANES; }
