/* The numbers of the exponent-conditioned format: proto/WEIGHTS.md, and format.py, which gives the reasons. */
#ifndef HETERORL_FORMAT_H
#define HETERORL_FORMAT_H

#include <stddef.h>
#include <stdint.h>

enum {
    EXPONENT_SHIFT = 7,
    EXPONENT_MASK = 0xFF,
    INFINITY_BITS = 0x7F80,
    CLASSES = 16,
    NUMBER_BITS = 20,
    GROWS_AT = 8,
    LARGEST_STEP = 1 << 15,
    FIRST_POSITIONS_WIDTH = 7,
    FIRST_POSITIONS_MODE = -7,
    FIRST_LARGE_WIDTH = 7,
    FIRST_LARGE_MODE = -6,
    FIRST_SIZE_BITS = 6,
    SAMPLE_BLOCK = 1024,
    SAMPLE_WORDS = 1 << 15,
    SAMPLE_CHANGES = 32,
    COST_ONES = 24,
};

/* Why a payload is refused. */
enum fault { NONE, TRUNCATED, TRAILING, NUMBER, PARAMETER, COUNT, POSITION, SIZE };

/* Where a class is counted in 64 bits: the low nibble of its byte for one half of the classes, the high one for
 * the other. */
static inline unsigned nibble_shift(unsigned class_)
{
    return 8 * (class_ % (CLASSES / 2)) + (class_ < CLASSES / 2 ? 0 : 4);
}

static inline unsigned exponent_of(uint16_t word)
{
    return word >> EXPONENT_SHIFT & EXPONENT_MASK;
}

/* The class of each exponent, and the same as a 1 in the nibble of the class. */
struct class_map {
    unsigned first;
    uint8_t class_[EXPONENT_MASK + 1];
    uint64_t nibble[EXPONENT_MASK + 1];
};

static inline struct class_map class_map_from(unsigned first)
{
    struct class_map map = {.first = first};
    for (unsigned exponent = 0; exponent <= EXPONENT_MASK; exponent++) {
        unsigned above = exponent > first ? exponent - first : 0;
        unsigned class_ = above < CLASSES ? above : CLASSES - 1;
        map.class_[exponent] = (uint8_t)class_;
        map.nibble[exponent] = (uint64_t)1 << nibble_shift(class_);
    }
    return map;
}

/* What is predicted of the next class, from the last. */
struct subset_prediction {
    int width, mode;
};

struct predictions {
    struct subset_prediction positions, large;
    int size_bits;
};

static const struct predictions FIRST_PREDICTIONS = {
    {FIRST_POSITIONS_WIDTH, FIRST_POSITIONS_MODE}, {FIRST_LARGE_WIDTH, FIRST_LARGE_MODE}, FIRST_SIZE_BITS};

#endif
