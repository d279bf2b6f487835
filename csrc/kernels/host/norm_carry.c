/* norm_carry.c - the canonical form of a sum of squares, and its square root. */
#include <math.h>

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

double sw_norm_value(const sw_norm_sum *sum)
{
    sw_norm_sum closed = *sum;
    sw_norm_sum_carry(&closed);
    if (sum->nan)
        return (double)NAN;
    if (sum->infinite)
        return (double)INFINITY;
    int top = SW_NORM_DIGIT_COUNT - 1;
    while (top > 2 && closed.digit[top] == 0)
        --top;
    /* The three highest digits hold at least 65 bits of the number, or all of it. The first 64 go
     * into one integer. The bits below set its last bit, so that the conversion to double rounds
     * correctly. */
    uint64_t head = (uint64_t)closed.digit[top], next = (uint64_t)closed.digit[top - 1];
    uint64_t last = (uint64_t)closed.digit[top - 2];
    int shift = head ? __builtin_clzll(head) : 64;
    uint64_t low = next << 32 | last;
    uint64_t bits = shift == 64 ? low : head << shift | low >> (64 - shift);
    bool sticky = shift == 64 ? false : (low << shift) != 0;
    for (int i = 0; i < top - 2 && !sticky; ++i)
        sticky = closed.digit[i] != 0;
    int exponent = SW_NORM_LOWEST_EXPONENT + 32 * top - shift;
    /* Take an even power of two out of the square root, since the sum may exceed double's range. */
    double square = (double)(bits | sticky);
    if (exponent % 2 != 0) {
        square *= 2.0;
        --exponent;
    }
    return ldexp(sqrt(square), exponent / 2);
}
