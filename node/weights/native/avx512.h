/* The loops in AVX-512 as it is since Ice Lake and Zen 4.
 *
 * Words are taken in blocks of 64. Their classes are 64 bytes of one register; how many words of each class
 * a block has is 16 bytes: a shuffle makes each class a single bit, an 8x8 bit transpose collects the bits of
 * eight words by class, a byte-wise population count adds them up.
 */
#ifndef HETERORL_AVX512_H
#define HETERORL_AVX512_H

#include <immintrin.h>

#include "path.h"

#define AVX512 \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512bitalg,gfni,bmi,bmi2,popcnt")))

static int has_avx512(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512bitalg") &&
           __builtin_cpu_supports("gfni") && __builtin_cpu_supports("bmi2");
}

enum { BLOCK = 64, LEAF_BLOCKS = LEAF_WORDS / BLOCK };

/* What is known of a leaf before its changes are looked at one by one. */
struct leaf {
    uint8_t class_[LEAF_BLOCKS][BLOCK] __attribute__((aligned(64)));
    uint16_t before[LEAF_BLOCKS][CLASSES] __attribute__((aligned(64))); /* Words of a class before a block. */
    uint16_t total[CLASSES] __attribute__((aligned(64)));
};

struct half_words {
    __m512i low, high;
};

AVX512 static inline struct half_words load_block(const uint16_t *words, uint64_t valid)
{
    struct half_words block = {_mm512_maskz_loadu_epi16((__mmask32)valid, words),
                               _mm512_maskz_loadu_epi16((__mmask32)(valid >> 32), words + 32)};
    return block;
}

/* Give the class of each word; 255, which is none, where `valid` has no bit. */
AVX512 static inline __m512i classes_of_block(struct half_words block, unsigned first, uint64_t valid)
{
    const __m512i even_bytes = _mm512_set_epi8(
        126, 124, 122, 120, 118, 116, 114, 112, 110, 108, 106, 104, 102, 100, 98, 96, 94, 92, 90, 88, 86, 84, 82, 80,
        78, 76, 74, 72, 70, 68, 66, 64, 62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24,
        22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    __m512i exponents = _mm512_permutex2var_epi8(_mm512_srli_epi16(block.low, EXPONENT_SHIFT), even_bytes,
                                                 _mm512_srli_epi16(block.high, EXPONENT_SHIFT));
    __m512i above = _mm512_subs_epu8(exponents, _mm512_set1_epi8((char)first));
    __m512i classes = _mm512_min_epu8(above, _mm512_set1_epi8(CLASSES - 1));
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

/* Ask for a block of the next leaf, so that memory is read while this one's changes are looked at. Past the end
 * of the words this asks for nothing. */
AVX512 static inline void prefetch_next_leaf(const uint16_t *words)
{
    _mm_prefetch((const char *)words + sizeof(uint16_t) * LEAF_WORDS, _MM_HINT_T1);
    _mm_prefetch((const char *)words + sizeof(uint16_t) * LEAF_WORDS + 64, _MM_HINT_T1);
}

AVX512 static inline __m256i note_block(struct leaf *leaf, uint32_t block, __m512i classes, __m256i before)
{
    _mm512_store_si512(leaf->class_[block], classes);
    _mm256_store_si256((__m256i *)leaf->before[block], before);
    return _mm256_add_epi16(before, _mm256_cvtepu8_epi16(population(classes)));
}

/* Give the bits of the last block of `count` words that stand for words. */
static inline uint64_t valid_words(uint32_t count, uint32_t block)
{
    uint32_t left = count - BLOCK * block;
    return left >= BLOCK ? UINT64_MAX : ((uint64_t)1 << left) - 1;
}

AVX512 static inline uint64_t differing(struct half_words left, struct half_words right)
{
    return _mm512_cmpneq_epi16_mask(left.low, right.low) |
           (uint64_t)_mm512_cmpneq_epi16_mask(left.high, right.high) << 32;
}

/* Append the places of the set bits, counted from `start`. Up to 64 entries are overwritten. */
AVX512 static inline uint16_t *append_places(uint16_t *places, uint64_t bits, uint32_t start, __m512i lane)
{
    __m512i low = _mm512_add_epi16(lane, _mm512_set1_epi16((short)start));
    __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(32));
    _mm512_storeu_si512(places, _mm512_maskz_compress_epi16((__mmask32)bits, low));
    places += __builtin_popcount((uint32_t)bits);
    _mm512_storeu_si512(places, _mm512_maskz_compress_epi16((__mmask32)(bits >> 32), high));
    return places + __builtin_popcount((uint32_t)(bits >> 32));
}

AVX512 static void find_avx512(struct changes *changes, const struct class_map *map, const uint16_t *base,
                               const uint16_t *words, uint32_t count)
{
    struct leaf leaf;
    uint16_t places[LEAF_WORDS + BLOCK], *end = places;
    const __m512i lane = _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13,
                                          12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m256i before = _mm256_setzero_si256();
    __m512i largest = _mm512_setzero_si512();
    for (uint32_t block = 0; block * BLOCK < count; block++) {
        uint64_t valid = valid_words(count, block);
        struct half_words old = load_block(base + BLOCK * block, valid);
        struct half_words new = load_block(words + BLOCK * block, valid);
        prefetch_next_leaf(base + BLOCK * block);
        prefetch_next_leaf(words + BLOCK * block);
        before = note_block(&leaf, block, classes_of_block(old, map->first, valid), before);
        end = append_places(end, differing(old, new), BLOCK * block, lane);
        const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
        largest = _mm512_max_epu16(largest, _mm512_and_si512(new.low, magnitude));
        largest = _mm512_max_epu16(largest, _mm512_and_si512(new.high, magnitude));
    }
    for (const uint16_t *place = places; place < end; place++) {
        const uint8_t *classes = leaf.class_[*place / BLOCK];
        unsigned class_ = classes[*place % BLOCK];
        uint64_t same = _mm512_cmpeq_epi8_mask(_mm512_load_si512(classes), _mm512_set1_epi8((char)class_));
        uint32_t rank = changes->seen[class_] + leaf.before[*place / BLOCK][class_] +
                        (uint32_t)__builtin_popcountll(_bzhi_u64(same, *place % BLOCK));
        add_change(changes, class_, rank, (uint16_t)(words[*place] - base[*place]));
    }
    _mm256_store_si256((__m256i *)leaf.total, before);
    for (int class_ = 0; class_ < CLASSES; class_++)
        changes->seen[class_] += leaf.total[class_];
    __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(largest), _mm512_extracti64x4_epi64(largest, 1));
    __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    /* The smallest of the complements is the complement of the largest. */
    uint16_t top = (uint16_t)~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1))), 0);
    changes->largest = top > changes->largest ? top : changes->largest;
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
    for (; block * BLOCK < count; block++) {
        uint64_t valid = valid_words(count, block);
        struct half_words old = load_block(base + BLOCK * block, valid);
        prefetch_next_leaf(base + BLOCK * block);
        before = note_block(&leaf, block, classes_of_block(old, map->first, valid), before);
        _mm512_mask_storeu_epi16(words + BLOCK * block, (__mmask32)valid, old.low);
        _mm512_mask_storeu_epi16(words + BLOCK * block + 32, (__mmask32)(valid >> 32), old.high);
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
AVX512 static void store_avx512(uint16_t *to, const uint16_t *from, uint32_t count)
{
    uint32_t i = (uint32_t)(-(uintptr_t)to % 64 / sizeof *to);
    i = i < count ? i : count;
    memcpy(to, from, i * sizeof *to);
    for (; i + 32 <= count; i += 32)
        _mm512_stream_si512((__m512i *)(to + i), _mm512_loadu_si512(from + i));
    memcpy(to + i, from + i, (count - i) * sizeof *to);
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

AVX512 static uint64_t count_ones_avx512(const uint32_t *numbers, uint32_t count, unsigned low_bits)
{
    const __m512i most = _mm512_set1_epi32(COST_ONES);
    const __m128i shift = _mm_cvtsi32_si128((int)low_bits);
    __m512i sum = _mm512_setzero_si512(); /* A frame has 2^20 words: 16 lanes of less than 2^21. */
    for (uint32_t i = 0; i < count; i += 16) {
        __mmask16 valid = count - i >= 16 ? 0xFFFF : (__mmask16)((1u << (count - i)) - 1);
        __m512i ones = _mm512_srl_epi32(_mm512_maskz_loadu_epi32(valid, numbers + i), shift);
        sum = _mm512_add_epi32(sum, _mm512_min_epu32(ones, most));
    }
    return (uint32_t)_mm512_reduce_add_epi32(sum);
}

static const struct path AVX512_PATH = {find_avx512, apply_avx512, store_avx512, hash_avx512, count_ones_avx512};

#endif
