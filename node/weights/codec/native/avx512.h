/* The path of x86-64 since Ice Lake and Zen 4, in AVX-512.
 *
 * The classes of a block are 64 bytes of one register, and their counts 16 bytes. A shuffle turns each class into a
 * single bit, an 8x8 bit transpose collects the bits of eight words by class, and a byte-wise population count
 * counts them.
 */
#ifndef HETERORL_AVX512_H
#define HETERORL_AVX512_H

#include "avx512_numbers.h"
#include "avx512_target.h"
#include "leaf.h"

#define PATH(name) name##_avx512
#define TARGET AVX512
#undef SLOT
#define SLOT(class_) (class_)

AVX512 static inline __m512i exponents_of(const uint16_t *words)
{
    /* From each four words, the bits from 7, 23, 39 and 55 on; from the low words as the first four bytes of eight. */
    const __m512i where = _mm512_set1_epi64(0x3727170737271707);
    const __m512i in_order = _mm512_set_epi32(15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0);
    __m512i low = _mm512_multishift_epi64_epi8(where, _mm512_loadu_si512(words));
    __m512i both = _mm512_mask_multishift_epi64_epi8(low, 0xF0F0F0F0F0F0F0F0, where, _mm512_loadu_si512(words + 32));
    return _mm512_permutexvar_epi32(in_order, both);
}

AVX512 static inline __m512i classes_of(__m512i exponents, unsigned first)
{
    __m512i above = _mm512_subs_epu8(exponents, _mm512_set1_epi8((char)first));
    return _mm512_min_epu8(above, _mm512_set1_epi8(CLASSES - 1));
}

/* Return the number of words of each class, as 16 bytes. */
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

AVX512 static inline void note_classes_avx512(struct leaf *leaf, uint32_t block, const uint16_t *words,
                                              unsigned first)
{
    const __m512i exponents = exponents_of(words), classes = classes_of(exponents, first);
    const __m512i largest = _mm512_load_si512(leaf->largest_exponent);
    const __m256i before = _mm256_load_si256((const __m256i *)leaf->total);
    _mm512_store_si512(leaf->largest_exponent, _mm512_max_epu8(largest, exponents));
    _mm512_store_si512(leaf->class_[block], classes);
    _mm256_store_si256((__m256i *)leaf->before[block], before);
    _mm256_store_si256((__m256i *)leaf->total, _mm256_add_epi16(before, _mm256_cvtepu8_epi16(population(classes))));
}

AVX512 static inline uint64_t differing_avx512(const uint16_t *left, const uint16_t *right)
{
    uint32_t low = _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(left), _mm512_loadu_si512(right));
    uint32_t high = _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(left + 32), _mm512_loadu_si512(right + 32));
    return low | (uint64_t)high << 32;
}

AVX512 static inline uint64_t equal_avx512(const uint8_t classes[BLOCK], unsigned class_)
{
    return _mm512_cmpeq_epi8_mask(_mm512_load_si512(classes), _mm512_set1_epi8((char)class_));
}

AVX512 static inline uint32_t count_bits_avx512(uint64_t bits)
{
    return (uint32_t)_mm_popcnt_u64(bits);
}

AVX512 static inline uint32_t nth_bit_avx512(uint64_t bits, uint32_t n)
{
    return (uint32_t)_tzcnt_u64(_pdep_u64((uint64_t)1 << n, bits));
}

/* Always writes sixteen: to ask how many there are is a branch that cannot be predicted. */
AVX512 static inline uint16_t *append_places_avx512(uint16_t *places, uint64_t bits, uint32_t start)
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

AVX512 static inline void hash_avx512(uint64_t lanes[XXH3_LANES], const uint8_t *data)
{
    __m512i sum = _mm512_loadu_si512(lanes);
    for (int stripe = 0; stripe < XXH3_BLOCK_STRIPES; stripe++) {
        __m512i value = _mm512_loadu_si512(data + XXH3_STRIPE * stripe);
        __m512i key = _mm512_xor_si512(value, _mm512_loadu_si512(XXH3_SECRET + 8 * stripe));
        __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
        __m512i swapped = _mm512_shuffle_epi32(value, _MM_PERM_BADC);
        sum = _mm512_add_epi64(sum, _mm512_add_epi64(product, swapped));
    }
    sum = _mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47));
    sum = _mm512_xor_si512(sum, _mm512_loadu_si512(XXH3_SECRET + 128));
    _mm512_storeu_si512(lanes, _mm512_mullo_epi64(sum, _mm512_set1_epi64(XXH3_PRIME32)));
}

AVX512 static inline void stream_avx512(uint16_t *to, const uint16_t *from)
{
    _mm512_stream_si512((__m512i *)to, _mm512_loadu_si512(from));
}

#include "blocks.h"
#undef PATH
#undef TARGET
#undef SLOT

static const struct path AVX512_PATH = {count_changes_avx512, find_avx512,       apply_avx512,      store_avx512,
                                        sort_steps_avx512,    count_ones_avx512, put_numbers_avx512};

#endif
