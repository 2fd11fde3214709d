/* The path of every processor: vectors of 16 bytes, SSE2 on x86-64 and NEON on 64-bit ARM. */
#ifndef HETERORL_PORTABLE_H
#define HETERORL_PORTABLE_H

#include "leaf.h"
#include "vectors.h"

#define VECTOR 16
#define PATH(name) name##_portable
#define TARGET
#include "vector_blocks.h"

#include "blocks.h"
#include "numbers.h"
#undef VECTOR
#undef PATH
#undef TARGET

static const struct path PORTABLE = {count_changes_portable, find_portable,       apply_portable,      store_portable,
                                     sort_steps_portable,    count_ones_portable, put_numbers_portable};

#endif
