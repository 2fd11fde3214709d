/* Encodes the changes of a frame as its payload. reference.py is a shorter version of the same. */
#ifndef HETERORL_ENCODE_H
#define HETERORL_ENCODE_H

#include "path.h"

/* Memory for the changes of a frame, in the order they are found and by class, and for numbers made of them. */
struct encode_room {
    uint32_t *found_gap, *gap, *number;
    uint16_t *found_step, *step;
    uint8_t *found_class;
};

/* Bytes of all this for each word of the frame. */
enum { ENCODE_ROOM = 3 * sizeof(uint32_t) + 2 * sizeof(uint16_t) + sizeof(uint8_t) };

static struct encode_room encode_room_in(void *memory, uint32_t words)
{
    struct encode_room room;
    room.found_gap = memory;
    room.gap = room.found_gap + words;
    room.number = room.gap + words;
    room.found_step = (uint16_t *)(room.number + words);
    room.step = room.found_step + words;
    room.found_class = (uint8_t *)(room.step + words);
    return room;
}

/* Count the changes in the first of every `stride` blocks, by exponent; return their number. */
static uint32_t sample_changes(const struct path *path, const uint16_t *base, const uint16_t *words, uint32_t count,
                               uint32_t stride, uint32_t by_exponent[EXPONENT_MASK + 1])
{
    memset(by_exponent, 0, (EXPONENT_MASK + 1) * sizeof *by_exponent);
    const size_t step = (size_t)SAMPLE_BLOCK * stride;
    for (size_t start = 0; start < count; start += step) {
        if (start + step + SAMPLE_BLOCK <= count)
            for (size_t line = 0; line < SAMPLE_BLOCK; line += 32) {
                __builtin_prefetch(base + start + step + line);
                __builtin_prefetch(words + start + step + line);
            }
        path->count_changes(by_exponent, base + start, words + start,
                            count - start < SAMPLE_BLOCK ? (uint32_t)(count - start) : SAMPLE_BLOCK);
    }
    uint32_t changes = 0;
    for (int exponent = 0; exponent <= EXPONENT_MASK; exponent++)
        changes += by_exponent[exponent];
    return changes;
}

/* Return the exponent of class 0: the highest from which CLASSES exponents have the most changes. */
static unsigned first_exponent(const struct path *path, const uint16_t *base, const uint16_t *words, uint32_t count)
{
    uint32_t by_exponent[EXPONENT_MASK + 1];
    uint32_t stride = count < SAMPLE_WORDS ? 1 : count / SAMPLE_WORDS;
    if (sample_changes(path, base, words, count, stride, by_exponent) < SAMPLE_CHANGES)
        sample_changes(path, base, words, count, 1, by_exponent);
    uint32_t window = 0, most = 0;
    unsigned first = 0;
    for (unsigned end = 0; end <= EXPONENT_MASK; end++) {
        window += by_exponent[end];
        if (end < CLASSES - 1)
            continue;
        if (window >= most) {
            most = window;
            first = end - (CLASSES - 1);
        }
        window -= by_exponent[end - (CLASSES - 1)];
    }
    return first;
}

static uint64_t sum_of(const uint32_t *numbers, uint32_t count)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < count; i++)
        sum += numbers[i];
    return sum;
}

/* Return how many low bits code the numbers shortest, or nearly: the first minimum down from their mean. */
static unsigned best_low_bits(const struct path *path, const uint32_t *numbers, uint32_t count)
{
    unsigned low_bits = 0;
    for (uint64_t mean = sum_of(numbers, count) / count; mean > 0; mean >>= 1)
        low_bits++;
    uint64_t cost = (uint64_t)count * low_bits + path->count_ones(numbers, count, low_bits);
    for (; low_bits > 0; low_bits--) {
        uint64_t lower = (uint64_t)count * (low_bits - 1) + path->count_ones(numbers, count, low_bits - 1);
        if (lower >= cost)
            break;
        cost = lower;
    }
    return low_bits;
}

static void put_surprise(struct bit_writer *writer, int surprise)
{
    put_number(writer, (uint32_t)(surprise >= 0 ? 2 * surprise : -2 * surprise - 1), 0);
}

/* Write the runs of members: before each non-member that has a member after it, and after the last such one.
 * Return their number, the sum of the gaps + 1. */
static uint32_t runs_of(const uint32_t *gaps, uint32_t count, uint32_t *runs)
{
    uint32_t run = 0, made = 0;
    for (uint32_t i = 0; i < count; i++, run++)
        for (uint32_t gap = gaps[i]; gap > 0; gap--, run = 0)
            runs[made++] = run;
    runs[made++] = run;
    return made;
}

/* Write which places are members, given the gap before each. `room` has memory for as many numbers. */
static void put_subset(struct bit_writer *writer, const struct path *path, struct subset_prediction *next,
                       const uint32_t *gaps, uint32_t count, uint32_t *room)
{
    int width = count == 0 ? 0 : 32 - __builtin_clz(count);
    put_surprise(writer, width - next->width);
    next->width = width;
    if (count == 0)
        return;
    put_bits(writer, count & ~(1u << (width - 1)), (unsigned)width - 1);
    int has_runs = sum_of(gaps, count) < count;
    const uint32_t *numbers = has_runs ? room : gaps;
    uint32_t number_count = has_runs ? runs_of(gaps, count, room) : count;
    unsigned low_bits = best_low_bits(path, numbers, number_count);
    int mode = has_runs ? -1 - (int)low_bits : (int)low_bits;
    put_surprise(writer, mode - (next->mode + 1));
    next->mode = mode;
    path->put_numbers(writer, numbers, number_count, low_bits);
}

/* Write the changes of one class. Overwrites `gaps`. */
static void put_class(struct bit_writer *writer, const struct path *path, struct predictions *next, uint32_t *gaps,
                      const uint16_t *steps, uint32_t count, struct encode_room *room)
{
    put_subset(writer, path, &next->positions, gaps, count, room->number);
    struct sorted_steps sorted = {.is_down = room->number, .large_gap = gaps, .large_size = room->found_gap};
    path->sort_steps(&sorted, steps, count);
    for (uint32_t i = 0; i < count; i += 32)
        put_bits(writer, sorted.is_down[i / 32], count - i < 32 ? count - i : 32);
    put_subset(writer, path, &next->large, sorted.large_gap, sorted.large, room->number);
    if (sorted.large == 0)
        return;
    unsigned size_bits = best_low_bits(path, sorted.large_size, sorted.large);
    put_surprise(writer, (int)size_bits - (next->size_bits - 1));
    next->size_bits = (int)size_bits;
    path->put_numbers(writer, sorted.large_size, sorted.large, size_bits);
}

/* Write the payload and return its size; if it is over the limit, return any size over the limit. Sorts what was
 * found by class, and reuses its memory. */
static size_t write_payload(const struct path *path, const struct changes *found, unsigned first,
                            struct encode_room *room, uint8_t *payload, size_t limit)
{
    uint32_t start[CLASSES + 1] = {0}, next[CLASSES], present = 0;
    for (int class_ = 0; class_ < CLASSES; class_++) {
        present |= (uint32_t)(found->of_class[class_] > 0) << class_;
        next[class_] = start[class_];
        start[class_ + 1] = start[class_] + found->of_class[class_];
    }
    for (uint32_t i = 0; i < found->count; i++) {
        uint32_t place = next[found->class_[i]]++;
        room->gap[place] = found->gap[i];
        room->step[place] = found->step[i];
    }
    struct bit_writer writer = {payload, limit, 0, 0, 0};
    struct predictions predictions = FIRST_PREDICTIONS;
    put_bits(&writer, first, 8);
    put_bits(&writer, present, CLASSES);
    for (int class_ = 0; class_ < CLASSES; class_++)
        if (present >> class_ & 1)
            put_class(&writer, path, &predictions, room->gap + start[class_], room->step + start[class_],
                      start[class_ + 1] - start[class_], room);
    return bytes_written(&writer);
}

#endif
