/* The loops in plain C.
 *
 * Eight words at a time: the classes of eight words are counted in the sixteen nibbles of one 64-bit integer, by
 * adding up a table of units; the nibbles are then added to sixteen bytes, and those, before they run over, to
 * the counters of the frame.
 */
#ifndef HETERORL_PORTABLE_H
#define HETERORL_PORTABLE_H

#include "path.h"

enum { GROUP = 8, FIND_GROUPS = 255 / GROUP, APPLY_GROUPS = 127 / GROUP };

static const uint64_t LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F;
static const uint64_t HIGH_BITS = 0x8080808080808080;

/* A byte for each class. */
struct class_bytes {
    uint64_t half[2];
};

static inline unsigned class_byte(const struct class_bytes *bytes, unsigned class_)
{
    return (uint8_t)(bytes->half[class_ / 8] >> 8 * (class_ % 8));
}

static inline void add_nibbles(struct class_bytes *bytes, uint64_t nibbles)
{
    bytes->half[0] += nibbles & LOW_NIBBLES;
    bytes->half[1] += nibbles >> 4 & LOW_NIBBLES;
}

static inline void empty_into(uint32_t seen[CLASSES], struct class_bytes *bytes)
{
    uint8_t counts[CLASSES];
    memcpy(counts, bytes->half, CLASSES);
    for (unsigned class_ = 0; class_ < CLASSES; class_++)
        seen[class_] += counts[class_];
    bytes->half[0] = bytes->half[1] = 0;
}

static inline uint64_t nibbles_of_four(const struct class_map *map, uint64_t four)
{
    return map->nibble[four >> EXPONENT_SHIFT & EXPONENT_MASK] +
           map->nibble[four >> (16 + EXPONENT_SHIFT) & EXPONENT_MASK] +
           map->nibble[four >> (32 + EXPONENT_SHIFT) & EXPONENT_MASK] +
           map->nibble[four >> (48 + EXPONENT_SHIFT) & EXPONENT_MASK];
}

static inline uint64_t four_words(const uint16_t *words)
{
    uint64_t four;
    memcpy(&four, words, sizeof four);
    return four;
}

static inline uint16_t largest_magnitude(const uint16_t *words, uint32_t count, uint16_t largest)
{
    for (uint32_t i = 0; i < count; i++) {
        uint16_t magnitude = words[i] & 0x7FFF;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

static void count_changes_portable(uint32_t by_exponent[EXPONENT_MASK + 1], const uint16_t *base,
                                   const uint16_t *words, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (i % 4 == 0 && i + 4 <= count && four_words(base + i) == four_words(words + i))
            i += 3;
        else
            by_exponent[exponent_of(base[i])] += base[i] != words[i];
}

static void find_portable(struct changes *changes, const struct class_map *map, const uint16_t *base,
                          const uint16_t *words, uint32_t count, uint64_t lanes[XXH3_LANES], size_t hash_blocks)
{
    struct class_bytes counted = {{0, 0}};
    uint32_t i = 0;
    for (unsigned groups = 0; i + GROUP <= count; i += GROUP) {
        uint64_t left = four_words(base + i), right = four_words(base + i + 4);
        if (left != four_words(words + i) || right != four_words(words + i + 4)) {
            uint64_t before = 0;
            for (uint32_t j = i; j < i + GROUP; j++) {
                unsigned class_ = map->class_[exponent_of(base[j])];
                if (base[j] != words[j]) {
                    uint32_t rank = class_byte(&counted, class_) + (uint32_t)(before >> nibble_shift(class_) & 15);
                    add_change(changes, class_, changes->seen[class_] + rank, (uint16_t)(words[j] - base[j]));
                }
                before += map->nibble[exponent_of(base[j])];
            }
        }
        add_nibbles(&counted, nibbles_of_four(map, left) + nibbles_of_four(map, right));
        if (++groups == FIND_GROUPS) {
            empty_into(changes->seen, &counted);
            groups = 0;
        }
    }
    empty_into(changes->seen, &counted);
    for (; i < count; i++) {
        unsigned class_ = map->class_[exponent_of(base[i])];
        if (base[i] != words[i])
            add_change(changes, class_, changes->seen[class_], (uint16_t)(words[i] - base[i]));
        changes->seen[class_]++;
    }
    changes->largest = largest_magnitude(words, count, changes->largest);
    xxh3_blocks(lanes, (const uint8_t *)words, hash_blocks);
}

/* How many words of each class, up to 127, may be counted before its next change is passed. */
static inline struct class_bytes words_until(const uint32_t next[CLASSES], const uint32_t seen[CLASSES])
{
    uint8_t counts[CLASSES];
    struct class_bytes until;
    for (unsigned class_ = 0; class_ < CLASSES; class_++) {
        uint32_t left = next[class_] - seen[class_];
        counts[class_] = (uint8_t)(left < 127 ? left : 127);
    }
    memcpy(until.half, counts, CLASSES);
    return until;
}

/* Say whether any of the bytes, all below 128, is above its bound. */
static inline int is_any_above(const struct class_bytes *bytes, const struct class_bytes *bounds)
{
    uint64_t low = (bounds->half[0] | HIGH_BITS) - bytes->half[0];
    uint64_t high = (bounds->half[1] | HIGH_BITS) - bytes->half[1];
    return (low & high & HIGH_BITS) != HIGH_BITS;
}

static inline void apply_one(struct cursors *cursors, uint32_t next[CLASSES], const struct class_map *map,
                             uint16_t base, uint16_t *word)
{
    unsigned class_ = map->class_[exponent_of(base)];
    *word = base;
    if (cursors->seen[class_]++ == next[class_]) {
        *word = (uint16_t)(base + *cursors->step[class_]++);
        next[class_] = *++cursors->rank[class_];
    }
}

static void apply_portable(struct cursors *cursors, const struct class_map *map, const uint16_t *base,
                           uint16_t *words, uint32_t count)
{
    uint32_t next[CLASSES], i = 0;
    for (unsigned class_ = 0; class_ < CLASSES; class_++)
        next[class_] = *cursors->rank[class_];
    struct class_bytes counted = {{0, 0}}, until = words_until(next, cursors->seen);
    for (unsigned groups = 0; i + GROUP <= count; i += GROUP) {
        uint64_t left = four_words(base + i), right = four_words(base + i + 4);
        struct class_bytes after = counted;
        add_nibbles(&after, nibbles_of_four(map, left) + nibbles_of_four(map, right));
        int has_change = is_any_above(&after, &until);
        if (!has_change) {
            memcpy(words + i, &left, sizeof left);
            memcpy(words + i + 4, &right, sizeof right);
            counted = after;
            if (++groups < APPLY_GROUPS)
                continue;
        }
        empty_into(cursors->seen, &counted);
        for (uint32_t j = i; has_change && j < i + GROUP; j++)
            apply_one(cursors, next, map, base[j], words + j);
        until = words_until(next, cursors->seen);
        groups = 0;
    }
    empty_into(cursors->seen, &counted);
    for (; i < count; i++)
        apply_one(cursors, next, map, base[i], words + i);
}

static void store_portable(uint16_t *to, const uint16_t *from, uint32_t count, uint64_t lanes[XXH3_LANES],
                           size_t hash_blocks)
{
    memcpy(to, from, count * sizeof *to);
    xxh3_blocks(lanes, (const uint8_t *)from, hash_blocks);
}

static void sort_steps_portable(struct sorted_steps *sorted, const uint16_t *steps, uint32_t count)
{
    uint32_t large = 0, gap = 0;
    for (uint32_t i = 0; i < count; i += 32) {
        uint32_t width = count - i < 32 ? count - i : 32, signs = 0;
        for (uint32_t j = 0; j < width; j++) {
            uint32_t is_down = steps[i + j] >> 15, size = is_down ? 0x10000u - steps[i + j] : steps[i + j];
            signs |= is_down << j;
            /* Written over by the next one unless it is large: no branch that nobody could predict. */
            sorted->large_gap[large] = gap;
            sorted->large_size[large] = size - 2;
            large += size > 1;
            gap = size > 1 ? 0 : gap + 1;
        }
        sorted->is_down[i / 32] = signs;
    }
    sorted->large = large;
}

static uint64_t count_ones_portable(const uint32_t *numbers, uint32_t count, unsigned low_bits)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t ones = numbers[i] >> low_bits;
        sum += ones < COST_ONES ? ones : COST_ONES;
    }
    return sum;
}

static void put_numbers_portable(struct bit_writer *writer, const uint32_t *numbers, uint32_t count,
                                 unsigned low_bits)
{
    struct bit_writer local = *writer; /* Nothing points to it, so it stays in registers. */
    for (uint32_t i = 0; i < count; i++)
        put_number(&local, numbers[i], low_bits);
    *writer = local;
}

static const struct path PORTABLE = {count_changes_portable, find_portable,       apply_portable,      store_portable,
                                     sort_steps_portable,    count_ones_portable, put_numbers_portable};

#endif
