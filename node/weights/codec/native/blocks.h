/* The loops over words, in blocks of 64. Each path includes this file after defining
 *
 *     PATH(name)     the name with the path's own ending
 *     TARGET         the attribute that lets the compiler use the path's instructions
 *     SLOT(class_)   the index of a class among the CLASSES counters
 *
 * and these operations, each for one block:
 *
 *     note_classes(leaf, block, words, first)   Store the class of each word; add them to the leaf's counts.
 *     differing(left, right)                    Return a bit for each word that differs.
 *     equal(classes, class_)                    Return a bit for each word of that class.
 *     append_places(places, bits, start)        Append the places of the bits that are set, counted from `start`;
 *                                               up to PLACES_AT_ONCE more may be written. Return the end.
 *     count_bits(bits), nth_bit(bits, n)        Return how many bits are set; the place of bit n of those.
 *     hash(lanes, data)                         Hash XXH3_BLOCK bytes.
 *     stream(to, from)                          Copy half a block past the caches, to an address aligned to 64.
 */

TARGET static void PATH(count_changes)(uint32_t by_exponent[EXPONENT_MASK + 1], const uint16_t *base,
                                       const uint16_t *words, uint32_t count)
{
    uint32_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK)
        for (uint64_t changed = PATH(differing)(base + i, words + i); changed != 0; changed &= changed - 1)
            by_exponent[exponent_of(base[i + (uint32_t)__builtin_ctzll(changed)])]++;
    for (; i < count; i++)
        by_exponent[exponent_of(base[i])] += base[i] != words[i];
}

/* Store the classes of the last block of a frame, which has `count` words, fewer than BLOCK. Zeros, which are of
 * class 0, fill it up after the words, where no count up to a word includes them. */
TARGET static void PATH(note_last_classes)(struct leaf *leaf, uint32_t block, const uint16_t *words, uint32_t count,
                                           unsigned first)
{
    uint16_t padded[BLOCK] __attribute__((aligned(64))) = {0};
    memcpy(padded, words, count * sizeof *words);
    PATH(note_classes)(leaf, block, padded, first);
    leaf->total[SLOT(0)] = (uint16_t)(leaf->total[SLOT(0)] - (BLOCK - count));
}

TARGET static void PATH(find)(struct changes *changes, const struct class_map *map, const uint16_t *base,
                              const uint16_t *words, uint32_t count, uint64_t lanes[XXH3_LANES], size_t hash_blocks)
{
    struct leaf leaf;
    uint16_t places[LEAF_WORDS + PLACES_AT_ONCE], *end_of_places = places;
    const unsigned first = map->first; /* A copy: by the rules of C, storing a byte could change the original. */
    uint32_t block = 0;
    begin_leaf(&leaf);
    for (; BLOCK * (block + 1) <= count; block++) {
        const uint16_t *old = base + BLOCK * block, *new = words + BLOCK * block;
        PREFETCH_BLOCK(old, FAR_AHEAD, INTO_SECOND);
        PREFETCH_BLOCK(new, FAR_AHEAD, INTO_SECOND);
        PREFETCH_BLOCK(old, NEAR_AHEAD, INTO_FIRST);
        PREFETCH_BLOCK(new, NEAR_AHEAD, INTO_FIRST);
        PATH(note_classes)(&leaf, block, old, first);
        end_of_places = PATH(append_places)(end_of_places, PATH(differing)(old, new), BLOCK * block);
        if ((block + 1) % HASH_BLOCKS == 0 && (block + 1) / HASH_BLOCKS <= hash_blocks)
            PATH(hash)(lanes, (const uint8_t *)(new + BLOCK) - XXH3_BLOCK);
    }
    if (BLOCK * block < count) {
        PATH(note_last_classes)(&leaf, block, base + BLOCK * block, count - BLOCK * block, first);
        for (uint32_t i = BLOCK * block; i < count; i++) {
            *end_of_places = (uint16_t)i;
            end_of_places += base[i] != words[i];
        }
    }
    uint16_t largest = changes->largest;
    for (const uint16_t *place = places; place < end_of_places; place++) {
        uint16_t old = base[*place], new = words[*place];
        unsigned class_ = map->class_[exponent_of(old)];
        uint64_t same = PATH(equal)(leaf.class_[*place / BLOCK], class_);
        uint64_t same_before = same & (((uint64_t)1 << *place % BLOCK) - 1);
        uint32_t rank = changes->seen[class_] + leaf.before[*place / BLOCK][SLOT(class_)] +
                        PATH(count_bits)(same_before);
        largest = (new & 0x7FFF) > largest ? new & 0x7FFF : largest;
        add_change(changes, class_, rank, (uint16_t)(new - old));
    }
    /* Words that did not change are as finite as the base. */
    for (int i = 0; i < BLOCK; i++)
        largest = leaf.largest_exponent[i] == EXPONENT_MASK ? INFINITY_BITS : largest;
    changes->largest = largest;
    for (unsigned class_ = 0; class_ < CLASSES; class_++)
        changes->seen[class_] += leaf.total[SLOT(class_)];
}

/* Apply the changes of one class. */
TARGET static void PATH(change)(struct cursors *cursors, const struct leaf *leaf, unsigned class_, uint16_t *words)
{
    const unsigned slot = SLOT(class_);
    const uint32_t start = cursors->seen[class_], end = start + leaf->total[slot];
    const uint32_t *rank = cursors->rank[class_];
    const uint16_t *step = cursors->step[class_];
    /* Two loops: in a single one, a rank takes so many instructions that the processor overlaps few of them and
     * waits. Two are 1.15 times as fast at 3 % of changes. */
    uint8_t blocks[LEAF_WORDS];
    uint32_t count = 0;
    for (; rank[count] < end; count++)
        blocks[count] = (uint8_t)block_of(leaf, slot, rank[count] - start);
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t block = blocks[i], within = rank[i] - start - leaf->before[block][slot];
        uint16_t *word = words + BLOCK * block + PATH(nth_bit)(PATH(equal)(leaf->class_[block], class_), within);
        *word = (uint16_t)(*word + step[i]);
    }
    cursors->rank[class_] = rank + count;
    cursors->step[class_] = step + count;
    cursors->seen[class_] = end;
}

TARGET static void PATH(apply)(struct cursors *cursors, const struct class_map *map, const uint16_t *base,
                               uint16_t *words, uint32_t count)
{
    struct leaf leaf;
    const unsigned first = map->first;
    uint32_t block = 0;
    begin_leaf(&leaf);
    for (; BLOCK * (block + 1) <= count; block++) {
        const uint16_t *old = base + BLOCK * block;
        PREFETCH_BLOCK(old, DECODE_AHEAD, INTO_SECOND);
        PATH(note_classes)(&leaf, block, old, first);
        memcpy(words + BLOCK * block, old, BLOCK * sizeof *words);
    }
    if (BLOCK * block < count) {
        PATH(note_last_classes)(&leaf, block, base + BLOCK * block, count - BLOCK * block, first);
        memcpy(words + BLOCK * block, base + BLOCK * block, (count - BLOCK * block) * sizeof *words);
        block++;
    }
    memset(leaf.before + block, 0xFF, (LEAF_BLOCKS - block) * sizeof *leaf.before);
    for (unsigned class_ = 0; class_ < CLASSES; class_++)
        PATH(change)(cursors, &leaf, class_, words);
}

/* Past the caches, so that lines that are only written are not read first. */
TARGET static void PATH(store)(uint16_t *to, const uint16_t *from, uint32_t count, uint64_t lanes[XXH3_LANES],
                               size_t hash_blocks)
{
    const uint32_t hash_words = XXH3_BLOCK / sizeof *to;
    uint32_t i = (uint32_t)(-(uintptr_t)to % 64 / sizeof *to);
    i = i < count ? i : count;
    memcpy(to, from, i * sizeof *to);
    for (uint32_t piece = 0; piece < count; piece += hash_words) {
        if (piece / hash_words < hash_blocks)
            PATH(hash)(lanes, (const uint8_t *)(from + piece));
        for (; i + BLOCK / 2 <= count && i < piece + hash_words; i += BLOCK / 2)
            PATH(stream)(to + i, from + i);
    }
    memcpy(to + i, from + i, (count - i) * sizeof *to);
}
