/* The loops over words in AVX-512.
 *
 * Words are taken in blocks of 64. Their classes are 64 bytes of one register; how many words of each class
 * a block has is 16 bytes: a shuffle makes each class a single bit, an 8x8 bit transpose collects the bits of
 * eight words by class, a byte-wise population count adds them up.
 */
#ifndef HETERORL_AVX512_H
#define HETERORL_AVX512_H

#include "avx512_numbers.h"
#include "avx512_target.h"
#include "path.h"

enum { BLOCK = 64, LEAF_BLOCKS = LEAF_WORDS / BLOCK, HASH_BLOCKS = XXH3_BLOCK / (BLOCK * sizeof(uint16_t)) };

/* What is known of a leaf before its changes are looked at one by one. */
struct leaf {
    uint8_t class_[LEAF_BLOCKS][BLOCK] __attribute__((aligned(64)));
    uint16_t before[LEAF_BLOCKS][CLASSES] __attribute__((aligned(64))); /* Words of a class before a block. */
    uint16_t total[CLASSES] __attribute__((aligned(64)));
};

/* 64 words. */
struct block {
    __m512i low, high;
};

AVX512 static inline struct block load_block(const uint16_t *words)
{
    struct block block = {_mm512_loadu_si512(words), _mm512_loadu_si512(words + 32)};
    return block;
}

/* Give the words that have a bit in `valid`, zeros for the others. */
AVX512 static inline struct block load_words(const uint16_t *words, uint64_t valid)
{
    struct block block = {_mm512_maskz_loadu_epi16((__mmask32)valid, words),
                          _mm512_maskz_loadu_epi16((__mmask32)(valid >> 32), words + 32)};
    return block;
}

AVX512 static inline void store_block(uint16_t *words, struct block block)
{
    _mm512_store_si512(words, block.low);
    _mm512_store_si512(words + 32, block.high);
}

AVX512 static inline __m512i exponents_of(struct block block)
{
    /* Of each four words: bits 7, 23, 39 and 55 on, for the low words as the first four bytes of eight. */
    const __m512i where = _mm512_set1_epi64(0x3727170737271707);
    const __m512i in_order = _mm512_set_epi32(15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0);
    __m512i low = _mm512_multishift_epi64_epi8(where, block.low);
    __m512i both = _mm512_mask_multishift_epi64_epi8(low, 0xF0F0F0F0F0F0F0F0, where, block.high);
    return _mm512_permutexvar_epi32(in_order, both);
}

AVX512 static inline __m512i classes_of(__m512i exponents, unsigned first)
{
    __m512i above = _mm512_subs_epu8(exponents, _mm512_set1_epi8((char)first));
    return _mm512_min_epu8(above, _mm512_set1_epi8(CLASSES - 1));
}

/* Give 255, which is no class, where `valid` has no bit. */
AVX512 static inline __m512i only_valid(__m512i classes, uint64_t valid)
{
    return _mm512_mask_blend_epi8(valid, _mm512_set1_epi8((char)255), classes);
}

/* Give how many words of each class there are, as 16 bytes. */
AVX512 static inline __m128i population(__m512i classes)
{
    const __m512i bit_if_low = _mm512_broadcast_i32x4(_mm_set_epi64x(0, (long long)0x8040201008040201));
    const __m512i bit_if_high = _mm512_broadcast_i32x4(_mm_set_epi64x((long long)0x8040201008040201, 0));
    const __m512i unit = _mm512_set1_epi64((long long)0x8040201008040201);
    /* The affine product of the unit matrix with eight bytes is their transpose, the words in reverse order. */
    __m512i low = _mm512_gf2p8affine_epi64_epi8(unit, _mm512_shuffle_epi8(bit_if_low, classes), 0);
    __m512i high = _mm512_gf2p8affine_epi64_epi8(unit, _mm512_shuffle_epi8(bit_if_high, classes), 0);
    low = _mm512_popcnt_epi8(low);
    high = _mm512_popcnt_epi8(high);
    __m512i four = _mm512_add_epi8(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
    __m256i two = _mm256_add_epi8(_mm512_castsi512_si256(four), _mm512_extracti64x4_epi64(four, 1));
    return _mm_add_epi8(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
}

AVX512 static inline __m256i note_block(struct leaf *leaf, uint32_t block, __m512i classes, __m256i before)
{
    _mm512_store_si512(leaf->class_[block], classes);
    _mm256_store_si256((__m256i *)leaf->before[block], before);
    return _mm256_add_epi16(before, _mm256_cvtepu8_epi16(population(classes)));
}

/* Ask for what will be read next. Past the end of the words this asks for nothing.
 *
 * How far ahead was measured on whole models: in encoding a few lines into the first-level cache and some more into
 * the second, which goes on being filled while the first has all the lines on their way that it can; in decoding a
 * leaf into the second, since the changes of this leaf come before it. */
enum { NEAR_AHEAD = 1 << 10, FAR_AHEAD = 1 << 12, DECODE_AHEAD = sizeof(uint16_t) * LEAF_WORDS };

#define PREFETCH_BLOCK(words, ahead, hint)                                            \
    do {                                                                              \
        _mm_prefetch((const char *)(words) + (ahead), hint);                          \
        _mm_prefetch((const char *)(words) + (ahead) + sizeof(uint16_t) * BLOCK / 2, hint); \
    } while (0)

AVX512 static inline uint64_t differing(struct block left, struct block right)
{
    return _mm512_cmpneq_epi16_mask(left.low, right.low) |
           (uint64_t)_mm512_cmpneq_epi16_mask(left.high, right.high) << 32;
}

/* Give the bits of the words that the last block of `count` has. */
static inline uint64_t valid_words(uint32_t count)
{
    return count % BLOCK == 0 ? UINT64_MAX : ((uint64_t)1 << count % BLOCK) - 1;
}

enum { PLACES_AT_ONCE = 16 };

/* Append the places of the set bits, counted from `start`. There must be room for PLACES_AT_ONCE more: so many are
 * written without asking how many there are, which is a branch that cannot be predicted. */
AVX512 static inline uint16_t *append_places(uint16_t *places, uint64_t bits, uint32_t start)
{
    const __m512i each = _mm512_set_epi64(0x3F3E3D3C3B3A3938, 0x3736353433323130, 0x2F2E2D2C2B2A2928,
                                          0x2726252423222120, 0x1F1E1D1C1B1A1918, 0x1716151413121110,
                                          0x0F0E0D0C0B0A0908, 0x0706050403020100);
    const __m256i first = _mm256_set1_epi16((short)start);
    __m512i within = _mm512_maskz_compress_epi8(bits, each);
    uint16_t *end = places + _mm_popcnt_u64(bits);
    do {
        __m256i some = _mm256_cvtepu8_epi16(_mm512_castsi512_si128(within));
        _mm256_storeu_si256((__m256i *)places, _mm256_add_epi16(first, some));
        within = _mm512_alignr_epi64(within, within, PLACES_AT_ONCE / sizeof(uint64_t));
        places += PLACES_AT_ONCE;
    } while (__builtin_expect(places < end, 0));
    return end;
}

AVX512 static void count_changes_avx512(uint32_t by_exponent[EXPONENT_MASK + 1], const uint16_t *base,
                                        const uint16_t *words, uint32_t count)
{
    for (uint32_t i = 0; i < count; i += BLOCK) {
        uint64_t valid = count - i < BLOCK ? valid_words(count) : UINT64_MAX;
        uint64_t changed = differing(load_words(base + i, valid), load_words(words + i, valid));
        for (; changed != 0; changed = _blsr_u64(changed))
            by_exponent[exponent_of(base[i + _tzcnt_u64(changed)])]++;
    }
}

AVX512 static void hash_avx512(uint64_t lanes[XXH3_LANES], const uint8_t *data, size_t blocks)
{
    const __m512i prime = _mm512_set1_epi64(XXH3_PRIME32);
    __m512i sum = _mm512_loadu_si512(lanes);
    for (; blocks > 0; blocks--, data += XXH3_BLOCK) {
        for (int stripe = 0; stripe < XXH3_BLOCK_STRIPES; stripe++) {
            __m512i value = _mm512_loadu_si512(data + XXH3_STRIPE * stripe);
            __m512i key = _mm512_xor_si512(value, _mm512_loadu_si512(XXH3_SECRET + 8 * stripe));
            __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
            __m512i swapped = _mm512_shuffle_epi32(value, _MM_PERM_BADC);
            sum = _mm512_add_epi64(sum, _mm512_add_epi64(product, swapped));
        }
        sum = _mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47));
        sum = _mm512_xor_si512(sum, _mm512_loadu_si512(XXH3_SECRET + 128));
        sum = _mm512_mullo_epi64(sum, prime);
    }
    _mm512_storeu_si512(lanes, sum);
}

/* What is known of a leaf of which `block` blocks were looked at. */
struct progress {
    uint32_t block;
    __m256i before;
    __m512i largest_exponents;
    uint16_t *end_of_places;
};

AVX512 static inline void find_in_block(struct progress *at, struct leaf *leaf, struct block old, struct block new,
                                        unsigned first, uint64_t valid)
{
    __m512i exponents = exponents_of(old);
    at->largest_exponents = _mm512_max_epu8(at->largest_exponents, exponents);
    at->before = note_block(leaf, at->block, only_valid(classes_of(exponents, first), valid), at->before);
    at->end_of_places = append_places(at->end_of_places, differing(old, new), BLOCK * at->block);
    at->block++;
}

AVX512 static void find_avx512(struct changes *changes, const struct class_map *map, const uint16_t *base,
                               const uint16_t *words, uint32_t count, uint64_t lanes[XXH3_LANES], size_t hash_blocks)
{
    struct leaf leaf;
    uint16_t places[LEAF_WORDS + PLACES_AT_ONCE];
    struct progress at = {0, _mm256_setzero_si256(), _mm512_setzero_si512(), places};
    while (BLOCK * (at.block + 1) <= count) {
        const uint16_t *old = base + BLOCK * at.block, *new = words + BLOCK * at.block;
        PREFETCH_BLOCK(old, FAR_AHEAD, _MM_HINT_T1);
        PREFETCH_BLOCK(new, FAR_AHEAD, _MM_HINT_T1);
        PREFETCH_BLOCK(old, NEAR_AHEAD, _MM_HINT_T0);
        PREFETCH_BLOCK(new, NEAR_AHEAD, _MM_HINT_T0);
        find_in_block(&at, &leaf, load_block(old), load_block(new), map->first, UINT64_MAX);
        if (at.block % HASH_BLOCKS == 0 && at.block / HASH_BLOCKS <= hash_blocks)
            hash_avx512(lanes, (const uint8_t *)(new + BLOCK) - XXH3_BLOCK, 1);
    }
    if (BLOCK * at.block < count) {
        uint64_t valid = valid_words(count);
        struct block old = load_words(base + BLOCK * at.block, valid);
        find_in_block(&at, &leaf, old, load_words(words + BLOCK * at.block, valid), map->first, valid);
    }
    uint16_t largest = changes->largest;
    for (const uint16_t *place = places; place < at.end_of_places; place++) {
        uint16_t old = base[*place], new = words[*place];
        unsigned class_ = map->class_[exponent_of(old)];
        __m512i classes = _mm512_load_si512(leaf.class_[*place / BLOCK]);
        uint64_t same = _mm512_cmpeq_epi8_mask(classes, _mm512_set1_epi8((char)class_));
        uint32_t rank = changes->seen[class_] + leaf.before[*place / BLOCK][class_] +
                        (uint32_t)_mm_popcnt_u64(_bzhi_u64(same, *place % BLOCK));
        largest = (new & 0x7FFF) > largest ? new & 0x7FFF : largest;
        add_change(changes, class_, rank, (uint16_t)(new - old));
    }
    /* What did not change is as finite as the base. */
    if (_mm512_cmpeq_epi8_mask(at.largest_exponents, _mm512_set1_epi8((char)EXPONENT_MASK)) != 0)
        largest = INFINITY_BITS;
    changes->largest = largest;
    _mm256_store_si256((__m256i *)leaf.total, at.before);
    for (int class_ = 0; class_ < CLASSES; class_++)
        changes->seen[class_] += leaf.total[class_];
}

/* Give the block that the word of this rank within the leaf is in. */
static inline uint32_t block_of(const struct leaf *leaf, unsigned class_, uint32_t rank)
{
    uint32_t block = 0;
    for (uint32_t stride = LEAF_BLOCKS / 2; stride > 0; stride /= 2)
        block += leaf->before[block + stride][class_] <= rank ? stride : 0;
    return block;
}

AVX512 static void apply_avx512(struct cursors *cursors, const struct class_map *map, const uint16_t *base,
                                uint16_t *words, uint32_t count)
{
    struct leaf leaf;
    __m256i before = _mm256_setzero_si256();
    uint32_t block = 0;
    for (; BLOCK * (block + 1) <= count; block++) {
        struct block old = load_block(base + BLOCK * block);
        PREFETCH_BLOCK(base + BLOCK * block, DECODE_AHEAD, _MM_HINT_T1);
        before = note_block(&leaf, block, classes_of(exponents_of(old), map->first), before);
        store_block(words + BLOCK * block, old);
    }
    if (BLOCK * block < count) {
        uint64_t valid = valid_words(count);
        struct block old = load_words(base + BLOCK * block, valid);
        before = note_block(&leaf, block, only_valid(classes_of(exponents_of(old), map->first), valid), before);
        store_block(words + BLOCK * block, old);
        block++;
    }
    _mm256_store_si256((__m256i *)leaf.total, before);
    for (; block < LEAF_BLOCKS; block++)
        _mm256_store_si256((__m256i *)leaf.before[block], _mm256_set1_epi16(-1));
    for (unsigned class_ = 0; class_ < CLASSES; class_++) {
        uint32_t start = cursors->seen[class_], end = start + leaf.total[class_];
        const uint32_t *rank = cursors->rank[class_];
        const uint16_t *step = cursors->step[class_];
        const __m512i this_class = _mm512_set1_epi8((char)class_);
        for (; *rank < end; rank++, step++) {
            uint32_t within = *rank - start;
            uint32_t place = block_of(&leaf, class_, within);
            uint64_t same = _mm512_cmpeq_epi8_mask(_mm512_load_si512(leaf.class_[place]), this_class);
            uint64_t chosen = _pdep_u64((uint64_t)1 << (within - leaf.before[place][class_]), same);
            uint16_t *word = words + BLOCK * place + _tzcnt_u64(chosen);
            *word = (uint16_t)(*word + *step);
        }
        cursors->rank[class_] = rank;
        cursors->step[class_] = step;
        cursors->seen[class_] = end;
    }
}

/* Past the caches: a line that is only written need not be read first. */
AVX512 static void store_avx512(uint16_t *to, const uint16_t *from, uint32_t count, uint64_t lanes[XXH3_LANES],
                                size_t hash_blocks)
{
    uint32_t i = (uint32_t)(-(uintptr_t)to % 64 / sizeof *to);
    i = i < count ? i : count;
    memcpy(to, from, i * sizeof *to);
    for (uint32_t piece = 0; piece < count; piece += XXH3_BLOCK / sizeof *to) {
        if (piece / (XXH3_BLOCK / sizeof *to) < hash_blocks)
            hash_avx512(lanes, (const uint8_t *)(from + piece), 1);
        for (; i + 32 <= count && i < piece + XXH3_BLOCK / sizeof *to; i += 32)
            _mm512_stream_si512((__m512i *)(to + i), _mm512_loadu_si512(from + i));
    }
    memcpy(to + i, from + i, (count - i) * sizeof *to);
}

static const struct path AVX512_PATH = {count_changes_avx512, find_avx512,       apply_avx512,      store_avx512,
                                        sort_steps_avx512,    count_ones_avx512, put_numbers_avx512};

#endif
