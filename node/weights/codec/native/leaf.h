/* The classes of the words of a leaf, collected before its changes are processed one by one. */
#ifndef HETERORL_LEAF_H
#define HETERORL_LEAF_H

#include "path.h"

enum {
    BLOCK = 64, /* Words processed together: as many as a mask has bits. */
    LEAF_BLOCKS = LEAF_WORDS / BLOCK,
    HASH_BLOCKS = XXH3_BLOCK / (BLOCK * sizeof(uint16_t)),
    PLACES_AT_ONCE = 16, /* Places that may be written beyond the last. */
};

struct leaf {
    uint8_t class_[LEAF_BLOCKS][BLOCK] __attribute__((aligned(64)));
    uint16_t before[LEAF_BLOCKS][CLASSES] __attribute__((aligned(64))); /* Words of each class before the block. */
    uint16_t total[CLASSES] __attribute__((aligned(64)));               /* Words of each class in the blocks so far. */
    uint8_t largest_exponent[BLOCK] __attribute__((aligned(64)));       /* Of each column of the blocks. */
};

static inline void begin_leaf(struct leaf *leaf)
{
    memset(leaf->total, 0, sizeof leaf->total);
    memset(leaf->largest_exponent, 0, sizeof leaf->largest_exponent);
}

/* Return the block that the word of this rank within the leaf is in; `slot` is where its class is counted. */
static inline uint32_t block_of(const struct leaf *leaf, unsigned slot, uint32_t rank)
{
    const uint16_t *const first = &leaf->before[0][slot], *block = first;
    for (uint32_t stride = LEAF_BLOCKS / 2; stride > 0; stride /= 2)
#if defined(__clang__) /* Which turns the other form into a branch, one that cannot be predicted. */
        block += (block[stride * CLASSES] <= rank) * (stride * CLASSES);
#else
        block = block[stride * CLASSES] <= rank ? block + stride * CLASSES : block;
#endif
    return (uint32_t)(block - first) / CLASSES;
}

/* Prefetch what is read next. Past the end of the words this does nothing.
 *
 * The distances were measured on whole models. Encoding prefetches a few lines into the first-level cache and some
 * more into the second, which is still filled when the first has as many lines in flight as it can. Decoding
 * prefetches a leaf into the second, because the changes of the current leaf are applied first. */
enum { NEAR_AHEAD = 1 << 10, FAR_AHEAD = 1 << 12, DECODE_AHEAD = sizeof(uint16_t) * LEAF_WORDS };
enum { INTO_SECOND = 2, INTO_FIRST = 3 };

#define PREFETCH_BLOCK(words, ahead, into)                                                                \
    do {                                                                                                  \
        __builtin_prefetch((const char *)(words) + (ahead), 0, into);                                     \
        __builtin_prefetch((const char *)(words) + (ahead) + sizeof(uint16_t) * BLOCK / 2, 0, into);      \
    } while (0)

#endif
