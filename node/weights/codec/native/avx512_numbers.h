/* The loops over numbers in AVX-512. */
#ifndef HETERORL_AVX512_NUMBERS_H
#define HETERORL_AVX512_NUMBERS_H

#include "avx512_target.h"
#include "path.h"

enum { LANES = 16 };

/* Return a mask of the lanes that have a number. */
AVX512 static inline __mmask16 valid_lanes(uint32_t numbers)
{
    return (__mmask16)_bzhi_u32(0xFFFF, numbers < LANES ? numbers : LANES);
}

/* Append the chosen ones of 16 numbers; return how many. */
AVX512 static inline uint32_t append_chosen(uint32_t *to, __m512i numbers, __mmask16 chosen)
{
    uint32_t count = (uint32_t)_mm_popcnt_u32(chosen);
    _mm512_mask_storeu_epi32(to, (__mmask16)_bzhi_u32(0xFFFF, count), _mm512_maskz_compress_epi32(chosen, numbers));
    return count;
}

AVX512 static void sort_steps_avx512(struct sorted_steps *sorted, const uint16_t *steps, uint32_t count)
{
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    uint32_t *place = sorted->large_gap, *size = sorted->large_size;
    for (uint32_t i = 0; i < count; i += 32) {
        __mmask32 valid = _bzhi_u32(UINT32_MAX, count - i < 32 ? count - i : 32);
        __m512i some = _mm512_maskz_loadu_epi16(valid, steps + i), sizes = _mm512_abs_epi16(some);
        sorted->is_down[i / 32] = _mm512_movepi16_mask(some);
        __mmask32 is_large = _mm512_cmpgt_epu16_mask(sizes, _mm512_set1_epi16(1));
        __m512i less_two = _mm512_sub_epi16(sizes, _mm512_set1_epi16(2));
        for (int half = 0; half < 2; half++, is_large >>= 16) {
            __m256i half_sizes = half ? _mm512_extracti64x4_epi64(less_two, 1) : _mm512_castsi512_si256(less_two);
            size += append_chosen(size, _mm512_cvtepu16_epi32(half_sizes), (__mmask16)is_large);
            __m512i places = _mm512_add_epi32(lane, _mm512_set1_epi32((int)i + 16 * half));
            place += append_chosen(place, places, (__mmask16)is_large);
        }
    }
    sorted->large = (uint32_t)(size - sorted->large_size);
    for (uint32_t i = sorted->large; i > 1; i--)
        sorted->large_gap[i - 1] -= sorted->large_gap[i - 2] + 1;
}

AVX512 static uint64_t count_ones_avx512(const uint32_t *numbers, uint32_t count, unsigned low_bits)
{
    const __m512i most = _mm512_set1_epi32(COST_ONES);
    const __m128i shift = _mm_cvtsi32_si128((int)low_bits);
    __m512i sum = _mm512_setzero_si512(); /* A frame has 2^20 words: 16 lanes of less than 2^21. */
    for (uint32_t i = 0; i < count; i += LANES) {
        __m512i ones = _mm512_srl_epi32(_mm512_maskz_loadu_epi32(valid_lanes(count - i), numbers + i), shift);
        sum = _mm512_add_epi32(sum, _mm512_min_epu32(ones, most));
    }
    return (uint32_t)_mm512_reduce_add_epi32(sum);
}

/* Makes as many codes as there are lanes at once, joins them in pairs and writes each pair at once. */
AVX512 static void put_numbers_avx512(struct bit_writer *writer, const uint32_t *numbers, uint32_t count,
                                      unsigned low_bits)
{
    const __m512i one = _mm512_set1_epi32(1), first_of_pair = _mm512_set1_epi64(UINT32_MAX);
    const __m128i shift = _mm_cvtsi32_si128((int)low_bits);
    struct bit_writer local = *writer; /* Nothing points to it, so it stays in registers. */
    for (uint32_t i = 0; i < count; i += LANES) {
        __mmask16 valid = valid_lanes(count - i);
        __m512i some = _mm512_maskz_loadu_epi32(valid, numbers + i), ones = _mm512_srl_epi32(some, shift);
        int is_any_long = _mm512_cmpge_epu32_mask(ones, _mm512_set1_epi32(GROWS_AT)) != 0;
        if (__builtin_expect(is_any_long || count - i < LANES, 0)) {
            for (uint32_t j = i; j < count && j < i + LANES; j++)
                put_number(&local, numbers[j], low_bits);
            continue;
        }
        /* At most 7 ones, a zero and 20 bits: a pair has at most 56, which put_bits takes. */
        __m512i low = _mm512_sub_epi32(some, _mm512_sll_epi32(ones, shift));
        __m512i unary = _mm512_sub_epi32(_mm512_sllv_epi32(one, ones), one);
        __m512i code = _mm512_or_si512(unary, _mm512_sllv_epi32(low, _mm512_add_epi32(ones, one)));
        __m512i width = _mm512_add_epi32(ones, _mm512_set1_epi32(1 + (int)low_bits));
        __m512i first_width = _mm512_and_si512(width, first_of_pair);
        __m512i second = _mm512_sllv_epi64(_mm512_srli_epi64(code, 32), first_width);
        uint64_t pairs[LANES / 2], widths[LANES / 2];
        _mm512_storeu_si512(pairs, _mm512_or_si512(_mm512_and_si512(code, first_of_pair), second));
        _mm512_storeu_si512(widths, _mm512_add_epi64(first_width, _mm512_srli_epi64(width, 32)));
        for (int pair = 0; pair < LANES / 2; pair++)
            put_bits(&local, pairs[pair], (unsigned)widths[pair]);
    }
    *writer = local;
}

#endif
