/* The loops over words and numbers that take most of the time. A path is a set of them for some processors:
 *
 *     blocks.h                      the loops over words, for all paths, and the operations each path provides
 *     vector_blocks.h               these operations in vectors of any width: portable.h has 16 bytes, avx2.h 32
 *     avx512.h                      these operations in AVX-512
 *     numbers.h, avx512_numbers.h   the loops over numbers
 *
 * Everything else in the kernel is shared, so that paths cannot differ in the format. */
#ifndef HETERORL_PATH_H
#define HETERORL_PATH_H

#include "bits.h"
#include "xxh3.h"

/* Words processed at a time: they and the data about them stay in the first-level cache. A multiple of the hash's
 * blocks. */
enum { LEAF_WORDS = 1 << 12 };

/* The changes of a frame in the order of their positions. */
struct changes {
    uint32_t count;
    uint8_t *class_;
    uint32_t *gap;  /* Unchanged words of the class since its last change. */
    uint16_t *step; /* New - old, modulo 2^16. */
    uint32_t seen[CLASSES];       /* Words of each class so far. */
    uint32_t after_last[CLASSES]; /* Words of each class up to and including its last change. */
    uint32_t of_class[CLASSES];   /* Changes of each class. */
    uint16_t largest; /* No less than the largest of the new words, signs aside; INFINITY_BITS or more only if the
                       * base or the new words have a NaN or an infinity. */
};

static inline void add_change(struct changes *changes, unsigned class_, uint32_t rank, uint16_t step)
{
    changes->class_[changes->count] = (uint8_t)class_;
    changes->gap[changes->count] = rank - changes->after_last[class_];
    changes->step[changes->count] = step;
    changes->after_last[class_] = rank + 1;
    changes->of_class[class_]++;
    changes->count++;
}

/* The changes of a frame by class. The ranks of a class end with NO_RANK. */
struct cursors {
    const uint32_t *rank[CLASSES];
    const uint16_t *step[CLASSES];
    uint32_t seen[CLASSES];
};

static const uint32_t NO_RANK = UINT32_MAX;

/* What is written of the steps of a class. */
struct sorted_steps {
    uint32_t *is_down;    /* A bit for each step, 32 to an element. */
    uint32_t *large_gap;  /* Steps of size 1 before each larger one. */
    uint32_t *large_size; /* Less 2. */
    uint32_t large;
};

/* Both directions are limited by memory. So words are hashed in the loop that reads or writes them, instead of in a
 * loop of its own while memory idles. */
struct path {
    /* Count the changes of `count` words by the exponent of their base. */
    void (*count_changes)(uint32_t by_exponent[EXPONENT_MASK + 1], const uint16_t *base, const uint16_t *words,
                          uint32_t count);
    /* Add the changes of the next `count` <= LEAF_WORDS words of the frame, and hash `hash_blocks` blocks of them. */
    void (*find)(struct changes *changes, const struct class_map *map, const uint16_t *base, const uint16_t *words,
                 uint32_t count, uint64_t lanes[XXH3_LANES], size_t hash_blocks);
    /* Make the next `count` <= LEAF_WORDS words of the frame. `words` is aligned to 64 bytes. */
    void (*apply)(struct cursors *cursors, const struct class_map *map, const uint16_t *base, uint16_t *words,
                  uint32_t count);
    /* Copy words to memory that is not read soon, and hash `hash_blocks` blocks of them. */
    void (*store)(uint16_t *to, const uint16_t *from, uint32_t count, uint64_t lanes[XXH3_LANES],
                  size_t hash_blocks);
    void (*sort_steps)(struct sorted_steps *sorted, const uint16_t *steps, uint32_t count);
    /* The sum of numbers >> low_bits, each taken as COST_ONES at most. */
    uint64_t (*count_ones)(const uint32_t *numbers, uint32_t count, unsigned low_bits);
    /* Write numbers, each below 2^NUMBER_BITS. */
    void (*put_numbers)(struct bit_writer *writer, const uint32_t *numbers, uint32_t count, unsigned low_bits);
};

#endif
