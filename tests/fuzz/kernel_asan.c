/* Runs the kernel, on each path of this processor, on frames and on mutated payloads, in memory of exactly the size
 * it was promised, so that the address sanitizer sees every step beyond. Arguments: seed, frames. Prints how many
 * payloads were refused, of how many; a digest of every payload and every answer, which is the same on all
 * processors; and the number of the best path.
 */
#include "../../node/weights/codec/native/kernel.c"

#include <stdio.h>
#include <stdlib.h>

static uint64_t state, digest = 0xCBF29CE484222325;

static uint32_t draw(uint32_t below) /* xorshift64* */
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (uint32_t)((state * 0x2545F4914F6CDD1D >> 32) % below);
}

static void check(int is_true, const char *what)
{
    if (!is_true) {
        fprintf(stderr, "not so: %s\n", what);
        exit(1);
    }
}

static void note(const void *data, size_t size) /* FNV-1a */
{
    for (size_t i = 0; i < size; i++)
        digest = (digest ^ ((const uint8_t *)data)[i]) * 0x100000001B3;
}

/* Words around a few exponents; a few changed, at any density and size of step. */
static void draw_frame(uint16_t *base, uint16_t *words, uint32_t count)
{
    uint32_t spread = 1 + draw(40), sparsity = 1 + draw(1u << draw(12)), largest = 1u << draw(16);
    uint32_t lowest = draw(8) ? 90 : 220; /* Some with infinities in the base. */
    for (uint32_t i = 0; i < count; i++) {
        base[i] = (uint16_t)(draw(2) << 15 | ((lowest + draw(spread)) & 0xFF) << 7 | draw(128));
        words[i] = base[i];
        if (draw(sparsity) == 0)
            words[i] = (uint16_t)(base[i] + (draw(2) ? 1 + draw(largest) : 0u - 1 - draw(largest)));
    }
}

static int is_any_infinite(const uint16_t *words, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if ((words[i] & 0x7FFF) >= 0x7F80)
            return 1;
    return 0;
}

static size_t encode_on(int path, const uint16_t *base, const uint16_t *words, uint32_t count, uint8_t **payload,
                        uint64_t *words_digest)
{
    struct frame_facts facts;
    size_t limit = 2 * (size_t)count;
    void *memory = malloc(heterorl_room(count));
    uint8_t *room = malloc(limit);
    size_t size = heterorl_encode(path, base, words, count, memory, room, limit, &facts);
    check(size == 0 || facts.changes > 0, "a payload has changes");
    check((facts.largest >= 0x7F80) == is_any_infinite(words, count), "the largest tells what is infinite");
    *payload = malloc(size <= limit && size > 0 ? size : 1);
    if (size <= limit)
        memcpy(*payload, room, size);
    free(room);
    free(memory);
    *words_digest = facts.digest;
    return size <= limit ? size : 0;
}

static int decode_on(int path, const uint8_t *payload, size_t size, const uint16_t *base, uint16_t *words,
                     uint32_t count)
{
    struct frame_facts facts;
    void *memory = malloc(heterorl_room(count));
    uint8_t *exact = malloc(size ? size : 1);
    memcpy(exact, payload, size);
    int fault = heterorl_decode(path, exact, size, base, words, count, memory, &facts);
    free(exact);
    free(memory);
    return fault;
}

static size_t mutate(uint8_t *payload, size_t size)
{
    for (uint32_t hit = draw(4); hit > 0; hit--) {
        uint32_t at = draw(draw(2) && size > 16 ? 16 : (uint32_t)size);
        payload[at] = (uint8_t)(draw(2) ? payload[at] ^ 1u << draw(8) : draw(3) == 0 ? 0xFF : draw(256));
    }
    return draw(4) == 0 ? draw((uint32_t)size) : size;
}

int main(int argc, char **argv)
{
    check(argc == 3, "there are two arguments");
    state = 0x9E3779B97F4A7C15 + strtoull(argv[1], NULL, 10);
    long frames = strtol(argv[2], NULL, 10), refused = 0, tried = 0;
    int best = heterorl_best_path();
    for (; frames > 0; frames--) {
        uint32_t count = 1 + draw(draw(8) ? 3000 : 3 * LEAF_WORDS);
        uint16_t *base = malloc(2 * (size_t)count), *words = malloc(2 * (size_t)count);
        uint16_t *made = malloc(2 * (size_t)count), *other_made = malloc(2 * (size_t)count);
        uint8_t *payload, *other;
        uint64_t words_digest, other_digest;
        draw_frame(base, words, count);
        size_t size = encode_on(0, base, words, count, &payload, &words_digest);
        note(payload, size);
        note(&words_digest, sizeof words_digest);
        for (int path = 0; path <= best; path++) {
            check(encode_on(path, base, words, count, &other, &other_digest) == size, "all payloads have one size");
            check(memcmp(payload, other, size) == 0, "all paths make the same payload");
            check(other_digest == words_digest, "all paths hash the words alike");
            free(other);
            if (size > 0) {
                check(decode_on(path, payload, size, base, made, count) == NONE, "a payload is sound");
                check(memcmp(made, words, 2 * (size_t)count) == 0, "what was coded comes back");
            }
        }
        other = malloc(size > 0 ? size : 1);
        for (int round = 0; size > 0 && round < 40; round++) {
            memcpy(other, payload, size);
            size_t cut = mutate(other, size);
            int fault = decode_on(0, other, cut, base, made, count);
            for (int path = 1; path <= best; path++) {
                check(decode_on(path, other, cut, base, other_made, count) == fault, "all paths find the same fault");
                if (fault == NONE)
                    check(memcmp(made, other_made, 2 * (size_t)count) == 0, "all paths make the same words");
            }
            note(&fault, sizeof fault);
            if (fault == NONE)
                note(made, 2 * (size_t)count);
            refused += fault != NONE;
            tried++;
        }
        free(base), free(words), free(made), free(other_made), free(payload), free(other);
    }
    printf("%ld %ld %016llx %d\n", refused, tried, (unsigned long long)digest, best);
    return 0;
}
