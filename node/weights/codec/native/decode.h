/* Decodes a payload to the changes of a frame. Every field is checked. */
#ifndef HETERORL_DECODE_H
#define HETERORL_DECODE_H

#include "bits.h"
#include "path.h"

/* Memory for the changes of a frame by class; NO_RANK follows the ranks of each class. */
struct decode_room {
    uint32_t *rank, *large;
    uint16_t *step;
};

/* Bytes of all this: for each word, and in addition. */
enum { DECODE_ROOM = 2 * sizeof(uint32_t) + sizeof(uint16_t), DECODE_ROOM_MORE = CLASSES * sizeof(uint32_t) };

static struct decode_room decode_room_in(void *memory, uint32_t words)
{
    struct decode_room room;
    room.rank = memory;
    room.large = room.rank + words + CLASSES;
    room.step = (uint16_t *)(room.large + words);
    return room;
}

#define CHECK(fault_or_none)                \
    do {                                    \
        enum fault fault_ = (fault_or_none); \
        if (fault_ != NONE)                 \
            return fault_;                  \
    } while (0)

static enum fault take_surprise(struct bit_reader *reader, int *value)
{
    uint32_t zigzag;
    CHECK(take_number(reader, 0, &zigzag));
    *value += zigzag & 1 ? -(int)((zigzag + 1) / 2) : (int)(zigzag / 2);
    return NONE;
}

static enum fault take_gaps(struct bit_reader *reader, unsigned low_bits, uint32_t count, uint32_t end,
                            uint32_t *members)
{
    struct bit_reader local = *reader; /* Nothing points to it, so it stays in registers. */
    struct bit_window window = {0, 0};
    uint32_t next = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t gap;
        CHECK(take_number_from(&local, &window, low_bits, &gap));
        if (gap >= end - next)
            return POSITION;
        members[i] = next + gap;
        next += gap + 1;
    }
    *reader = local;
    return NONE;
}

static enum fault take_runs(struct bit_reader *reader, unsigned low_bits, uint32_t count, uint32_t end,
                            uint32_t *members)
{
    uint32_t next = 0;
    for (uint32_t made = 0; made < count; next++) {
        uint32_t run;
        CHECK(take_number(reader, low_bits, &run));
        /* Each run is followed by a place that is no member, so that empty runs end too. */
        if (run > count - made || next > end || run > end - next)
            return POSITION;
        for (uint32_t after = next + run; next < after; next++)
            members[made++] = next;
    }
    return NONE;
}

/* Read up to `most` of the places below `end`, ascending. */
static enum fault take_subset(struct bit_reader *reader, struct subset_prediction *next, uint32_t most, uint32_t end,
                              uint32_t *members, uint32_t *count)
{
    *count = 0;
    CHECK(take_surprise(reader, &next->width));
    if (next->width < 0 || next->width > NUMBER_BITS + 1)
        return PARAMETER;
    if (next->width == 0)
        return NONE;
    CHECK(take_bits(reader, (unsigned)next->width - 1, count));
    *count |= 1u << (next->width - 1);
    if (*count > most)
        return COUNT;
    next->mode += 1;
    CHECK(take_surprise(reader, &next->mode));
    int low_bits = next->mode >= 0 ? next->mode : -1 - next->mode;
    if (low_bits > NUMBER_BITS)
        return PARAMETER;
    if (next->mode >= 0)
        return take_gaps(reader, (unsigned)low_bits, *count, end, members);
    return take_runs(reader, (unsigned)low_bits, *count, end, members);
}

/* Read a sign for each change, and store it as a step of size 1. */
static enum fault take_signs(struct bit_reader *reader, uint32_t count, uint16_t *steps)
{
    for (uint32_t i = 0; i < count; i += 32) {
        uint32_t width = count - i < 32 ? count - i : 32, signs;
        CHECK(take_bits(reader, width, &signs));
        for (uint32_t j = 0; j < width; j++)
            steps[i + j] = (uint16_t)(1 - 2 * (signs >> j & 1));
    }
    return NONE;
}

/* Read the changes of one class. */
static enum fault take_class(struct bit_reader *reader, struct predictions *next, uint32_t words_left, uint32_t words,
                             uint32_t *ranks, uint16_t *steps, uint32_t *large, uint32_t *count)
{
    uint32_t large_count;
    CHECK(take_subset(reader, &next->positions, words_left, words, ranks, count));
    if (*count == 0)
        return COUNT;
    CHECK(take_signs(reader, *count, steps));
    CHECK(take_subset(reader, &next->large, *count, *count, large, &large_count));
    if (large_count == 0)
        return NONE;
    next->size_bits -= 1;
    CHECK(take_surprise(reader, &next->size_bits));
    if (next->size_bits < 0 || next->size_bits > NUMBER_BITS)
        return PARAMETER;
    for (uint32_t i = 0; i < large_count; i++) {
        uint32_t number;
        CHECK(take_number(reader, (unsigned)next->size_bits, &number));
        uint16_t *step = steps + large[i];
        int is_down = *step != 1;
        /* As in two's complement, the largest step goes down only. */
        if (number > LARGEST_STEP - 3u + (unsigned)is_down)
            return SIZE;
        *step = (uint16_t)(is_down ? 0u - (number + 2) : number + 2);
    }
    return NONE;
}

/* Read all changes; `cursors` point into `room` afterwards. */
static enum fault read_payload(const uint8_t *payload, size_t size, uint32_t words, struct decode_room *room,
                               unsigned *first, struct cursors *cursors)
{
    struct bit_reader reader = {payload, size, 0, 8 * (uint64_t)size};
    struct predictions predictions = FIRST_PREDICTIONS;
    uint32_t exponent, present, *rank = room->rank, words_left = words;
    uint16_t *step = room->step;
    CHECK(take_bits(&reader, 8, &exponent));
    CHECK(take_bits(&reader, CLASSES, &present));
    if (present == 0)
        return COUNT;
    for (int class_ = 0; class_ < CLASSES; class_++) {
        uint32_t count = 0;
        cursors->rank[class_] = rank;
        cursors->step[class_] = step;
        cursors->seen[class_] = 0;
        if (present >> class_ & 1)
            CHECK(take_class(&reader, &predictions, words_left, words, rank, step, room->large, &count));
        words_left -= count;
        rank += count;
        step += count;
        *rank++ = NO_RANK;
    }
    uint64_t left = reader.end - reader.at;
    uint32_t filling;
    if (left > 7 || take_bits(&reader, (unsigned)left, &filling) != NONE || filling != 0)
        return TRAILING;
    *first = exponent;
    return NONE;
}

#endif
