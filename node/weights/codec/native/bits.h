/* Bit streams, lowest bit of the first byte first, and the number code that bits.py describes. */
#ifndef HETERORL_BITS_H
#define HETERORL_BITS_H

#include <string.h>

#include "format.h"

struct bit_writer {
    uint8_t *bytes;
    size_t limit, size; /* Whole bytes. Bytes from `limit` on are not stored. */
    uint64_t pending;
    unsigned pending_bits; /* Fewer than 8 between calls. */
};

/* Write `width` bits, at most 56. The higher bits of `value` are zero. */
static inline void put_bits(struct bit_writer *writer, uint64_t value, unsigned width)
{
    writer->pending |= value << writer->pending_bits;
    writer->pending_bits += width;
    /* Store everything pending, though the last bits are stored again later: this saves a branch on how much. */
    if (__builtin_expect(writer->size + 8 <= writer->limit, 1))
        memcpy(writer->bytes + writer->size, &writer->pending, 8);
    else if (writer->size < writer->limit)
        memcpy(writer->bytes + writer->size, &writer->pending, writer->limit - writer->size);
    writer->size += writer->pending_bits / 8;
    writer->pending >>= writer->pending_bits & ~7u;
    writer->pending_bits %= 8;
}

static inline void put_number(struct bit_writer *writer, uint32_t number, unsigned low_bits)
{
    uint32_t ones = number >> low_bits, low = number & ((1u << low_bits) - 1);
    unsigned width = low_bits;
    if (__builtin_expect(ones >= GROWS_AT, 0)) {
        unsigned growth = 31 - (unsigned)__builtin_clz(ones - (GROWS_AT - 1));
        low = number - ((GROWS_AT - 1 + (1u << growth)) << low_bits);
        ones = GROWS_AT + growth;
        width += growth;
    }
    put_bits(writer, (uint64_t)low << (ones + 1) | ((1u << ones) - 1), ones + 1 + width);
}

/* Return the size of everything written, in bytes. */
static inline size_t bytes_written(const struct bit_writer *writer)
{
    return writer->size + (writer->pending_bits > 0);
}

struct bit_reader {
    const uint8_t *bytes;
    size_t size;
    uint64_t at, end; /* Bits. A field may be read while at <= end. */
};

/* Return the number of leading ones, at most 63. */
static inline unsigned leading_ones(uint64_t window)
{
    return (unsigned)__builtin_ctzll(~window | (uint64_t)1 << 63);
}

/* Return the next 57 bits or more; past the end of the payload they are zeros. */
static inline uint64_t peek_bits(const struct bit_reader *reader)
{
    size_t byte = reader->at >> 3;
    uint64_t window = 0;
    if (byte + 8 <= reader->size)
        memcpy(&window, reader->bytes + byte, 8);
    else if (byte < reader->size)
        memcpy(&window, reader->bytes + byte, reader->size - byte);
    return window >> (reader->at & 7);
}

static inline enum fault skip_bits(struct bit_reader *reader, unsigned width)
{
    reader->at += width;
    return reader->at > reader->end ? TRUNCATED : NONE;
}

/* Read `width` bits, at most 32. */
static inline enum fault take_bits(struct bit_reader *reader, unsigned width, uint32_t *value)
{
    *value = (uint32_t)(peek_bits(reader) & (((uint64_t)1 << width) - 1));
    return skip_bits(reader, width);
}

/* Read a number with `low_bits` <= NUMBER_BITS; it is below 2^24. */
static inline enum fault take_number(struct bit_reader *reader, unsigned low_bits, uint32_t *number)
{
    /* At most 8 + 20 ones, a zero and 20 bits: always within the window. */
    uint64_t window = peek_bits(reader);
    unsigned ones = leading_ones(window);
    uint32_t start = ones;
    unsigned width = low_bits;
    if (__builtin_expect(ones >= GROWS_AT, 0)) {
        unsigned growth = ones - GROWS_AT;
        if (low_bits + growth > NUMBER_BITS)
            return NUMBER;
        start = GROWS_AT - 1 + (1u << growth);
        width += growth;
    }
    *number = (start << low_bits) + (uint32_t)(window >> (ones + 1) & (((uint64_t)1 << width) - 1));
    return skip_bits(reader, ones + 1 + width);
}

/* Bits that were loaded and not yet used. Reading is limited by the dependency of each number on the one before;
 * this halves it. */
struct bit_window {
    uint64_t bits;
    unsigned valid;
};

/* Read a number as take_number does. */
static inline enum fault take_number_from(struct bit_reader *reader, struct bit_window *window, unsigned low_bits,
                                          uint32_t *number)
{
    if (window->valid < GROWS_AT + low_bits) {
        window->bits = peek_bits(reader);
        window->valid = 64 - (unsigned)(reader->at & 7);
    }
    unsigned ones = leading_ones(window->bits);
    if (__builtin_expect(ones >= GROWS_AT, 0)) {
        window->valid = 0;
        return take_number(reader, low_bits, number);
    }
    unsigned width = ones + 1 + low_bits;
    *number = (ones << low_bits) + (uint32_t)(window->bits >> (ones + 1) & ((1u << low_bits) - 1));
    window->bits >>= width;
    window->valid -= width;
    return skip_bits(reader, width);
}

#endif
