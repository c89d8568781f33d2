// Reports the best instruction set that this processor and this library have, by its number in runtime/cpu.py.
#if defined(__x86_64__)
#include <cpuid.h>

namespace {

// x86-64-v3 needs these as well, which not every compiler's __builtin_cpu_supports knows by name.
bool has_f16c_movbe_lzcnt() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & 1u << 29) || !(c & 1u << 22)) return false;
    return __get_cpuid(0x80000001u, &a, &b, &c, &d) && c & 1u << 5;
}

// Asks for features, since clang, and gcc before 12, do not know the names of the levels.
bool is_v3() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && has_f16c_movbe_lzcnt();
}
bool is_v4() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}

}  // namespace
#endif

extern "C" __attribute__((visibility("default"))) int instruction_set() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return !is_v3() ? -1 : HAS_V4 && is_v4() ? 2 : 1;  // -1: none
#else
    return 0;
#endif
}
