/* What vector_blocks.h needs at every width of vectors. */
#ifndef HETERORL_VECTORS_H
#define HETERORL_VECTORS_H

#include <stdint.h>

/* HETERORL_PLAIN: as on a processor that is neither. The tests have no such processor. */
#if defined(__x86_64__) && !defined(HETERORL_PLAIN)
#define HAS_SSE2 1
#include <immintrin.h>
#elif defined(__aarch64__) && !defined(HETERORL_PLAIN)
#define HAS_NEON 1
#include <arm_neon.h>
#endif

typedef uint32_t lanes_of_16 __attribute__((vector_size(16), may_alias));

/* Return the elements of two vectors that have these indices. */
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(left, right, ...) __builtin_shufflevector(left, right, __VA_ARGS__)
#else
#define SHUFFLE(left, right, ...) __builtin_shuffle(left, right, (__typeof__(left)){__VA_ARGS__})
#endif

#define BYTE_ONES ((uint64_t)0x0101010101010101)

/* Return the number of set bits in each byte. */
static inline uint64_t bits_by_byte(uint64_t bits)
{
    bits -= bits >> 1 & 0x55 * BYTE_ONES;
    bits = (bits & 0x33 * BYTE_ONES) + (bits >> 2 & 0x33 * BYTE_ONES);
    return (bits + (bits >> 4)) & 0x0F * BYTE_ONES;
}

#endif
