/* XXH3-64 (seed 0) of more than 240 bytes, in pieces, so that words are hashed while they are in the cache.
 *
 * Source: the XXH3 specification, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
 */
#ifndef HETERORL_XXH3_H
#define HETERORL_XXH3_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { XXH3_LANES = 8, XXH3_STRIPE = 64, XXH3_BLOCK_STRIPES = 16, XXH3_BLOCK = 1024, XXH3_LONG = 240 };

static const uint8_t XXH3_SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static const uint64_t XXH3_FIRST[XXH3_LANES] = {
    0x00000000C2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x0000000085EBCA77, 0x27D4EB2F165667C5, 0x000000009E3779B1,
};

static const uint32_t XXH3_PRIME32 = 0x9E3779B1;
static const uint64_t XXH3_PRIME64 = 0x9E3779B185EBCA87;

static inline uint64_t xxh3_load(const uint8_t *bytes)
{
    uint64_t value;
    memcpy(&value, bytes, 8);
    return value;
}

static inline void xxh3_stripe(uint64_t lanes[XXH3_LANES], const uint8_t *data, const uint8_t *secret)
{
    for (int lane = 0; lane < XXH3_LANES; lane++) {
        uint64_t value = xxh3_load(data + 8 * lane);
        uint64_t key = value ^ xxh3_load(secret + 8 * lane);
        lanes[lane ^ 1] += value;
        lanes[lane] += (uint64_t)(uint32_t)key * (key >> 32);
    }
}

/* Take in whole blocks. */
static void xxh3_blocks(uint64_t lanes[XXH3_LANES], const uint8_t *data, size_t blocks)
{
    for (; blocks > 0; blocks--, data += XXH3_BLOCK) {
        for (int stripe = 0; stripe < XXH3_BLOCK_STRIPES; stripe++)
            xxh3_stripe(lanes, data + XXH3_STRIPE * stripe, XXH3_SECRET + 8 * stripe);
        for (int lane = 0; lane < XXH3_LANES; lane++) {
            lanes[lane] ^= lanes[lane] >> 47;
            lanes[lane] ^= xxh3_load(XXH3_SECRET + 128 + 8 * lane);
            lanes[lane] *= XXH3_PRIME32;
        }
    }
}

/* How many of `size` bytes' blocks are to be taken in before the end; never all of them. */
static inline size_t xxh3_block_count(size_t size)
{
    return (size - 1) / XXH3_BLOCK;
}

static inline uint64_t xxh3_fold(uint64_t left, uint64_t right)
{
    unsigned __int128 product = (unsigned __int128)left * right;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Give the digest, after all whole blocks but the last were taken in. */
static uint64_t xxh3_finish(uint64_t lanes[XXH3_LANES], const uint8_t *data, size_t size)
{
    size_t done = XXH3_BLOCK * xxh3_block_count(size);
    size_t stripes = (size - 1 - done) / XXH3_STRIPE;
    for (size_t stripe = 0; stripe < stripes; stripe++)
        xxh3_stripe(lanes, data + done + XXH3_STRIPE * stripe, XXH3_SECRET + 8 * stripe);
    xxh3_stripe(lanes, data + size - XXH3_STRIPE, XXH3_SECRET + 192 - 64 - 7);
    uint64_t digest = size * XXH3_PRIME64;
    for (int pair = 0; pair < XXH3_LANES / 2; pair++) {
        const uint8_t *secret = XXH3_SECRET + 11 + 16 * pair;
        digest += xxh3_fold(lanes[2 * pair] ^ xxh3_load(secret), lanes[2 * pair + 1] ^ xxh3_load(secret + 8));
    }
    digest ^= digest >> 37;
    digest *= 0x165667919E3779F9;
    return digest ^ digest >> 32;
}

#endif
