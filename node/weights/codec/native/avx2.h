/* The path of x86-64 since Haswell and Zen: vectors of 32 bytes. */
#ifndef HETERORL_AVX2_H
#define HETERORL_AVX2_H

#include "leaf.h"
#include "vectors.h"

#define VECTOR 32
#define PATH(name) name##_avx2
#define TARGET __attribute__((target("avx2,bmi,bmi2,popcnt")))
#include "vector_blocks.h"

#include "blocks.h"
#include "numbers.h"
#undef VECTOR
#undef PATH
#undef TARGET

static int has_avx2(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
           __builtin_cpu_supports("popcnt");
}

static const struct path AVX2_PATH = {count_changes_avx2, find_avx2,       apply_avx2,      store_avx2,
                                      sort_steps_avx2,    count_ones_avx2, put_numbers_avx2};

#endif
