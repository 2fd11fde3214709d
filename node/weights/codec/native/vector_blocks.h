/* The operations blocks.h needs, in the vectors that GCC and Clang provide on every processor. Each width includes
 * this file after defining
 *
 *     VECTOR         bytes of a vector: 16 (SSE2, NEON, or whatever the compiler makes of it) or 32 (AVX2)
 *     PATH, TARGET   as in blocks.h
 *
 * Classes are counted without a table: a unit is shifted to the place of the class among the sixteen bit pairs of a
 * 32-bit lane. Pairs are summed to nibbles, nibbles to bytes, and then the lanes.
 */

typedef uint8_t PATH(bytes) __attribute__((vector_size(VECTOR), may_alias));
typedef uint16_t PATH(words) __attribute__((vector_size(2 * VECTOR), may_alias, aligned(2)));
typedef uint32_t PATH(lanes) __attribute__((vector_size(VECTOR), may_alias));
typedef uint64_t PATH(pairs) __attribute__((vector_size(VECTOR), may_alias));

/* Return the lower byte of each of VECTOR words. */
#undef LOW_BYTES
#define LOW_BYTES(vector) __builtin_convertvector((PATH(words))(vector) & 0xFF, PATH(bytes))

/* Return the highest bits of the bytes, which are 0 or 255. */
TARGET static inline uint64_t PATH(high_bits)(const uint8_t bytes[BLOCK])
{
    uint64_t bits = 0;
#if VECTOR == 32
    for (int i = BLOCK / VECTOR - 1; i >= 0; i--)
        bits = bits << VECTOR | (uint32_t)_mm256_movemask_epi8(_mm256_loadu_si256((const __m256i *)bytes + i));
#elif defined(HAS_SSE2)
    for (int i = BLOCK / VECTOR - 1; i >= 0; i--)
        bits = bits << VECTOR | (uint32_t)_mm_movemask_epi8(_mm_loadu_si128((const __m128i *)bytes + i));
#elif defined(HAS_NEON)
    /* Each byte keeps the bit of its place among eight; then eight bytes are summed. */
    const uint8x16_t place = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
    uint8x16_t low = vpaddq_u8(vandq_u8(vld1q_u8(bytes), place), vandq_u8(vld1q_u8(bytes + 16), place));
    uint8x16_t high = vpaddq_u8(vandq_u8(vld1q_u8(bytes + 32), place), vandq_u8(vld1q_u8(bytes + 48), place));
    low = vpaddq_u8(low, high);
    bits = vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(low, low)), 0);
#else
    for (int i = 0; i < BLOCK / 8; i++) {
        uint64_t eight;
        memcpy(&eight, bytes + 8 * i, 8);
        bits |= (eight >> 7 & BYTE_ONES) * 0x0102040810204080 >> 56 << 8 * i;
    }
#endif
    return bits;
}

TARGET static inline uint64_t PATH(differing)(const uint16_t *left, const uint16_t *right)
{
    uint8_t flags[BLOCK] __attribute__((aligned(64)));
    for (int i = 0; i < BLOCK; i++)
        flags[i] = left[i] != right[i] ? 0xFF : 0;
    return PATH(high_bits)(flags);
}

TARGET static inline uint64_t PATH(equal)(const uint8_t classes[BLOCK], unsigned class_)
{
    PATH(bytes) flags[BLOCK / VECTOR];
    for (int i = 0; i < BLOCK / VECTOR; i++)
        flags[i] = (PATH(bytes))(((const PATH(bytes) *)classes)[i] == (uint8_t)class_);
    return PATH(high_bits)((const uint8_t *)flags);
}

/* Return left - right, or 0 where that is negative. */
TARGET static inline PATH(bytes) PATH(excess)(PATH(bytes) left, PATH(bytes) right)
{
#if VECTOR == 32
    return (PATH(bytes))_mm256_subs_epu8((__m256i)left, (__m256i)right);
#elif defined(HAS_SSE2)
    return (PATH(bytes))_mm_subs_epu8((__m128i)left, (__m128i)right);
#elif defined(HAS_NEON)
    return (PATH(bytes))vqsubq_u8((uint8x16_t)left, (uint8x16_t)right);
#else
    return (left - right) & (PATH(bytes))(left > right);
#endif
}

/* Return each lane's unit of the class in byte `number` of `four`. */
#undef UNIT
#if VECTOR == 16 && defined(HAS_SSE2)
/* SSE2 shifts all lanes by the same amount. But 2^n is the float whose biased exponent is n. */
#define UNIT(four, number) \
    ((PATH(lanes))_mm_cvttps_epi32((__m128)(((four) << 8 * (3 - (number)) & 0x0F000000) + 0x3F800000)))
#else
#define UNIT(four, number) \
    (((PATH(lanes)){0} + 1) << ((number) == 3 ? (four) * 2 >> 24 : (four) * 2 >> 8 * (number) & 0xFF))
#endif

/* The order in which add_to_counts leaves the counters. */
#undef SLOT
#define SLOT(class_) ((class_) % 4 * 4 + (class_) / 4)

/* Add the words of a block to the counts of their classes. */
TARGET static inline void PATH(add_to_counts)(struct leaf *leaf, uint32_t block)
{
    const PATH(lanes) *classes = (const PATH(lanes) *)leaf->class_[block];
    PATH(lanes) counts[4] = {{0}, {0}, {0}, {0}}; /* Byte b of each lane of counts[i] is for class 4 b + i. */
    for (int part = 0; part < BLOCK / VECTOR; part += 2) {
        /* A bit pair takes three units, a nibble eight. */
        const PATH(lanes) left = classes[part], right = classes[part + 1];
        const PATH(lanes) some = UNIT(left, 0) + UNIT(left, 1) + UNIT(left, 2);
        const PATH(lanes) more = UNIT(left, 3) + UNIT(right, 0) + UNIT(right, 1);
        const PATH(lanes) rest = UNIT(right, 2) + UNIT(right, 3);
        const PATH(lanes) even = (some & 0x33333333) + (more & 0x33333333) + (rest & 0x33333333);
        const PATH(lanes) odd = (some >> 2 & 0x33333333) + (more >> 2 & 0x33333333) + (rest >> 2 & 0x33333333);
        counts[0] += even & 0x0F0F0F0F;
        counts[1] += odd & 0x0F0F0F0F;
        counts[2] += even >> 4 & 0x0F0F0F0F;
        counts[3] += odd >> 4 & 0x0F0F0F0F;
    }
    lanes_of_16 sums[4];
    for (int i = 0; i < 4; i++) {
        const lanes_of_16 *halves = (const lanes_of_16 *)(counts + i);
        sums[i] = halves[0];
        if (VECTOR == 32)
            sums[i] += halves[VECTOR / 32];
    }
    /* The sum of each vector's lanes becomes one lane. */
    sums[0] = SHUFFLE(sums[0], sums[1], 0, 4, 1, 5) + SHUFFLE(sums[0], sums[1], 2, 6, 3, 7);
    sums[2] = SHUFFLE(sums[2], sums[3], 0, 4, 1, 5) + SHUFFLE(sums[2], sums[3], 2, 6, 3, 7);
    sums[0] = SHUFFLE(sums[0], sums[2], 0, 1, 4, 5) + SHUFFLE(sums[0], sums[2], 2, 3, 6, 7);
    const uint8_t *in_block = (const uint8_t *)sums;
    for (int i = 0; i < CLASSES; i++) {
        leaf->before[block][i] = leaf->total[i];
        leaf->total[i] = (uint16_t)(leaf->total[i] + in_block[i]);
    }
}

TARGET static inline void PATH(note_classes)(struct leaf *leaf, uint32_t block, const uint16_t *words, unsigned first)
{
    PATH(bytes) *classes = (PATH(bytes) *)leaf->class_[block], *largest = (PATH(bytes) *)leaf->largest_exponent;
    const PATH(bytes) none = {0}, lowest = none + (uint8_t)first, most = none + (CLASSES - 1);
    for (int part = 0; part < BLOCK / VECTOR; part++) {
        const PATH(bytes) exponents = LOW_BYTES(((const PATH(words) *)words)[part] >> EXPONENT_SHIFT);
        const PATH(bytes) above = PATH(excess)(exponents, lowest);
        classes[part] = above - PATH(excess)(above, most);
        largest[part] = exponents + PATH(excess)(largest[part], exponents);
    }
    PATH(add_to_counts)(leaf, block);
}

TARGET static inline uint32_t PATH(count_bits)(uint64_t bits)
{
#if VECTOR == 16 && defined(HAS_SSE2) && !defined(__POPCNT__)
    return (uint32_t)(bits_by_byte(bits) * BYTE_ONES >> 56);
#else
    return (uint32_t)__builtin_popcountll(bits);
#endif
}

/* Always writes four places: to ask how many there are is a branch that cannot be predicted. */
TARGET static inline uint16_t *PATH(append_places)(uint16_t *places, uint64_t bits, uint32_t start)
{
    uint16_t *end = places + PATH(count_bits)(bits);
    do
        for (int i = 0; i < 4; i++, bits &= bits - 1)
            *places++ = (uint16_t)(start + (uint32_t)__builtin_ctzll(bits | (uint64_t)1 << 63));
    while (__builtin_expect(places < end, 0));
    return end;
}

/* Does without PDEP, which is slow before Zen 3. */
TARGET static inline uint32_t PATH(nth_bit)(uint64_t bits, uint32_t n)
{
    const uint64_t high = 0x80 * BYTE_ONES;
    const uint64_t up_to = bits_by_byte(bits) * BYTE_ONES; /* Byte b: the bits in bytes 0 to b. */
    const uint32_t byte = PATH(count_bits)(((n * BYTE_ONES | high) - up_to) & high);
    const uint64_t within = n - (up_to << 8 >> 8 * byte & 0xFF);
    /* The same for the bits of that byte, each in a byte of its own. */
    uint64_t spread = (bits >> 8 * byte & 0xFF) * BYTE_ONES & 0x8040201008040201;
    spread = ((spread + 0x7F * BYTE_ONES) >> 7 & BYTE_ONES) * BYTE_ONES;
    return 8 * byte + PATH(count_bits)(((within * BYTE_ONES | high) - spread) & high);
}

/* Multiply the lower halves of 64-bit elements. */
TARGET static inline PATH(pairs) PATH(multiply)(PATH(pairs) left, PATH(pairs) right)
{
#if VECTOR == 32
    return (PATH(pairs))_mm256_mul_epu32((__m256i)left, (__m256i)right);
#elif defined(HAS_SSE2)
    return (PATH(pairs))_mm_mul_epu32((__m128i)left, (__m128i)right);
#elif defined(HAS_NEON)
    return (PATH(pairs))vmull_u32(vmovn_u64((uint64x2_t)left), vmovn_u64((uint64x2_t)right));
#else
    return (left & UINT32_MAX) * (right & UINT32_MAX);
#endif
}

TARGET static inline PATH(pairs) PATH(load)(const uint8_t *bytes)
{
    PATH(pairs) loaded;
    memcpy(&loaded, bytes, VECTOR);
    return loaded;
}

TARGET static inline void PATH(hash)(uint64_t lanes[XXH3_LANES], const uint8_t *data)
{
    enum { PARTS = XXH3_STRIPE / VECTOR };
    const PATH(pairs) prime = (PATH(pairs)){0} + XXH3_PRIME32;
    PATH(pairs) sums[PARTS];
    memcpy(sums, lanes, sizeof sums);
    for (int stripe = 0; stripe < XXH3_BLOCK_STRIPES; stripe++, data += XXH3_STRIPE)
        for (int part = 0; part < PARTS; part++) {
            const PATH(pairs) value = PATH(load)(data + VECTOR * part);
            const PATH(pairs) key = value ^ PATH(load)(XXH3_SECRET + 8 * stripe + VECTOR * part);
#if VECTOR == 32
            const PATH(pairs) swapped = SHUFFLE(value, value, 1, 0, 3, 2);
#else
            const PATH(pairs) swapped = SHUFFLE(value, value, 1, 0);
#endif
            sums[part] += PATH(multiply)(key, key >> 32) + swapped;
        }
    for (int part = 0; part < PARTS; part++) {
        const PATH(pairs) mixed = sums[part] ^ sums[part] >> 47 ^ PATH(load)(XXH3_SECRET + 128 + VECTOR * part);
        sums[part] = PATH(multiply)(mixed, prime) + (PATH(multiply)(mixed >> 32, prime) << 32);
    }
    memcpy(lanes, sums, sizeof sums);
}

TARGET static inline void PATH(stream)(uint16_t *to, const uint16_t *from)
{
#if VECTOR == 32
    for (int i = 0; i < 2; i++)
        _mm256_stream_si256((__m256i *)to + i, _mm256_loadu_si256((const __m256i *)from + i));
#elif defined(HAS_SSE2)
    for (int i = 0; i < 4; i++)
        _mm_stream_si128((__m128i *)to + i, _mm_loadu_si128((const __m128i *)from + i));
#else
    memcpy(to, from, BLOCK / 2 * sizeof *to);
#endif
}
