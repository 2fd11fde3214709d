/* The exponent-conditioned codec as a shared library that depends on nothing, not even on Python.
 *
 * The caller provides the memory; `heterorl_room` returns how much. Nothing is allocated or kept here, so any
 * thread may call. Little-endian machines only.
 */
#include "decode.h"
#include "encode.h"
#include "portable.h"

#ifdef HAS_SSE2
#include "avx2.h"
#include "avx512.h"
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words and digests are little-endian"
#endif

/* What coding or making the words of a frame also finds out about them. */
struct frame_facts {
    uint64_t digest;  /* Of the new words; 0 unless they are more than XXH3_LONG bytes. */
    uint32_t changes;
    uint32_t largest; /* The largest of the new words, signs aside: a NaN or an infinity is INFINITY_BITS or more. */
};

enum { PATH_PORTABLE, PATH_AVX2, PATH_AVX512 };

/* Raise it with each change of an exported function, of its arguments and structures, or of the format. A library
 * left over from older sources answers with another number, and is not used. */
enum { ABI = 2 };

#define EXPORTED __attribute__((visibility("default")))

static const struct path *path_of(int number)
{
#ifdef HAS_SSE2
    if (number == PATH_AVX512)
        return &AVX512_PATH;
    if (number == PATH_AVX2)
        return &AVX2_PATH;
#endif
    return number == PATH_PORTABLE ? &PORTABLE : NULL;
}

EXPORTED int heterorl_abi(void)
{
    return ABI;
}

/* Return the best path that this machine supports. */
EXPORTED int heterorl_best_path(void)
{
#ifdef HAS_SSE2
    if (has_avx512())
        return PATH_AVX512;
    if (has_avx2())
        return PATH_AVX2;
#endif
    return PATH_PORTABLE;
}

/* Return the bytes of memory that encoding or decoding a frame of `words` words needs. */
EXPORTED size_t heterorl_room(uint32_t words)
{
    size_t encode = (size_t)words * ENCODE_ROOM, decode = (size_t)words * DECODE_ROOM + DECODE_ROOM_MORE;
    return encode > decode ? encode : decode;
}

static uint16_t largest_magnitude(const uint16_t *words, uint32_t count)
{
    uint16_t largest = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint16_t magnitude = words[i] & 0x7FFF;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

/* Return how many blocks of a leaf are hashed with it. The last block of the frame is left to xxh3_finish. */
static size_t hash_blocks_of(uint32_t start, uint32_t leaf_words, uint32_t count)
{
    size_t left = xxh3_block_count(2 * (size_t)count) - 2 * (size_t)start / XXH3_BLOCK;
    size_t here = 2 * (size_t)leaf_words / XXH3_BLOCK;
    return here < left ? here : left;
}

/* Return the digest of a frame whose leaves were hashed; 0 if it is too short for this hash. */
static uint64_t finish_hash(uint64_t lanes[XXH3_LANES], const uint16_t *words, uint32_t count)
{
    size_t size = 2 * (size_t)count;
    return size > XXH3_LONG ? xxh3_finish(lanes, (const uint8_t *)words, size) : 0;
}

static inline uint32_t leaf_words_at(uint32_t start, uint32_t count)
{
    return count - start < LEAF_WORDS ? count - start : LEAF_WORDS;
}

/* Encode `count` >= 1 words. Return the size of the payload in bytes: 0 if nothing changed; more than `limit` if it
 * would be longer than that, and then the payload is worthless. */
EXPORTED size_t heterorl_encode(int path_number, const uint16_t *base, const uint16_t *words, uint32_t count,
                                void *memory, uint8_t *payload, size_t limit, struct frame_facts *facts)
{
    const struct path *path = path_of(path_number);
    struct encode_room room = encode_room_in(memory, count);
    struct changes changes = {.class_ = room.found_class, .gap = room.found_gap, .step = room.found_step};
    uint64_t lanes[XXH3_LANES];
    memcpy(lanes, XXH3_FIRST, sizeof lanes);
    const struct class_map map = class_map_from(first_exponent(path, base, words, count));
    for (uint32_t start = 0, leaf; start < count; start += leaf) {
        leaf = leaf_words_at(start, count);
        path->find(&changes, &map, base + start, words + start, leaf, lanes, hash_blocks_of(start, leaf, count));
    }
    /* It may be the base that is not finite: look at the new words alone. */
    if (changes.largest >= INFINITY_BITS)
        changes.largest = largest_magnitude(words, count);
    facts->digest = finish_hash(lanes, words, count);
    facts->changes = changes.count;
    facts->largest = changes.largest;
    return changes.count == 0 ? 0 : write_payload(path, &changes, map.first, &room, payload, limit);
}

/* Make `count` >= 1 words from a payload and their base, which may be the same memory. Return a fault; unless it is
 * NONE, `words` are worthless. */
EXPORTED int heterorl_decode(int path_number, const uint8_t *payload, size_t size, const uint16_t *base,
                             uint16_t *words, uint32_t count, void *memory, struct frame_facts *facts)
{
    const struct path *path = path_of(path_number);
    struct decode_room room = decode_room_in(memory, count);
    struct cursors cursors;
    uint16_t made[LEAF_WORDS] __attribute__((aligned(64)));
    unsigned first;
    CHECK(read_payload(payload, size, count, &room, &first, &cursors));
    const struct class_map map = class_map_from(first);
    uint64_t lanes[XXH3_LANES];
    memcpy(lanes, XXH3_FIRST, sizeof lanes);
    for (uint32_t start = 0, leaf; start < count; start += leaf) {
        leaf = leaf_words_at(start, count);
        path->apply(&cursors, &map, base + start, made, leaf);
        path->store(words + start, made, leaf, lanes, hash_blocks_of(start, leaf, count));
    }
    for (int class_ = 0; class_ < CLASSES; class_++)
        if (*cursors.rank[class_] != NO_RANK)
            return POSITION;
    facts->digest = finish_hash(lanes, words, count);
    return NONE;
}

/* Make `count` >= 1 words from two bytes each: sign and mantissa in one, the exponent in the other. */
EXPORTED void heterorl_join(int path_number, const uint8_t *rest, const uint8_t *exponents, uint16_t *words,
                            uint32_t count, struct frame_facts *facts)
{
    const struct path *path = path_of(path_number);
    uint16_t made[LEAF_WORDS] __attribute__((aligned(64)));
    uint64_t lanes[XXH3_LANES];
    memcpy(lanes, XXH3_FIRST, sizeof lanes);
    for (uint32_t start = 0, leaf; start < count; start += leaf) {
        leaf = leaf_words_at(start, count);
        for (uint32_t i = 0; i < leaf; i++)
            made[i] = (uint16_t)((rest[start + i] & 0x80) << 8 | exponents[start + i] << EXPONENT_SHIFT |
                                 (rest[start + i] & 0x7F));
        path->store(words + start, made, leaf, lanes, hash_blocks_of(start, leaf, count));
    }
    facts->digest = finish_hash(lanes, words, count);
}
