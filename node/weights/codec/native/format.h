/* The constants of the exponent-conditioned format. proto/WEIGHTS.md has the format, payload_format.py the reasons. */
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

static inline unsigned exponent_of(uint16_t word)
{
    return word >> EXPONENT_SHIFT & EXPONENT_MASK;
}

/* The class of each exponent. */
struct class_map {
    unsigned first;
    uint8_t class_[EXPONENT_MASK + 1];
};

static inline struct class_map class_map_from(unsigned first)
{
    struct class_map map = {.first = first};
    for (unsigned exponent = 0; exponent <= EXPONENT_MASK; exponent++) {
        unsigned above = exponent > first ? exponent - first : 0;
        map.class_[exponent] = (uint8_t)(above < CLASSES ? above : CLASSES - 1);
    }
    return map;
}

/* How the next class is predicted to be coded, from the last. */
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
