/* norm_carry.c - the canonical form of a sum of squares. */
#include "kernels/optim_kernels.h"

void sw_norm_sum_carry(sw_norm_sum *sum)
{
    int64_t carry = 0;
    for (int i = 0; i + 1 < SW_NORM_DIGIT_COUNT; ++i) {
        int64_t value = sum->digit[i] + carry;
        int64_t low = value & INT64_C(0xffffffff);
        carry = (value - low) / (INT64_C(1) << 32); /* exact; rounds towards minus infinity */
        sum->digit[i] = low;
    }
    sum->digit[SW_NORM_DIGIT_COUNT - 1] += carry;
    sum->additions = 0;
}
