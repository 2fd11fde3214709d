/* The loops over numbers in plain C, for paths that have none of their own. PATH and TARGET are as in blocks.h. */

TARGET static void PATH(sort_steps)(struct sorted_steps *sorted, const uint16_t *steps, uint32_t count)
{
    uint32_t large = 0, gap = 0;
    for (uint32_t i = 0; i < count; i += 32) {
        uint32_t width = count - i < 32 ? count - i : 32, signs = 0;
        for (uint32_t j = 0; j < width; j++) {
            uint32_t is_down = steps[i + j] >> 15, size = is_down ? 0x10000u - steps[i + j] : steps[i + j];
            signs |= is_down << j;
            /* The next one overwrites it unless it is large: this saves a branch that cannot be predicted. */
            sorted->large_gap[large] = gap;
            sorted->large_size[large] = size - 2;
            large += size > 1;
            gap = size > 1 ? 0 : gap + 1;
        }
        sorted->is_down[i / 32] = signs;
    }
    sorted->large = large;
}

TARGET static uint64_t PATH(count_ones)(const uint32_t *numbers, uint32_t count, unsigned low_bits)
{
    uint32_t sum = 0; /* A frame has 2^20 words. */
    for (uint32_t i = 0; i < count; i++) {
        uint32_t ones = numbers[i] >> low_bits;
        sum += ones < COST_ONES ? ones : COST_ONES;
    }
    return sum;
}

TARGET static void PATH(put_numbers)(struct bit_writer *writer, const uint32_t *numbers, uint32_t count,
                                     unsigned low_bits)
{
    struct bit_writer local = *writer; /* Nothing points to it, so it stays in registers. */
    for (uint32_t i = 0; i < count; i++)
        put_number(&local, numbers[i], low_bits);
    *writer = local;
}
