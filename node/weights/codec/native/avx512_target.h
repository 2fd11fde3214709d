/* The AVX-512 extensions of Ice Lake and Zen 4, and later. */
#ifndef HETERORL_AVX512_TARGET_H
#define HETERORL_AVX512_TARGET_H

#include <immintrin.h>

#define AVX512 \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512bitalg,gfni,bmi,bmi2,popcnt")))

static int has_avx512(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512bitalg") &&
           __builtin_cpu_supports("gfni") && __builtin_cpu_supports("bmi2");
}

#endif
