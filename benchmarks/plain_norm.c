/* plain_norm.c - a plain sum of squares: in double, 32 lanes that the compiler vectorises for this
 * processor. Neither exact nor independent of order. Built by bench_adamw. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 32 };

static double total(const double *lane)
{
    double sum = 0.0;
    for (int k = 0; k < LANES; ++k)
        sum += lane[k];
    return sum;
}

double plain_float32(const float *x, size_t numel)
{
    double lane[LANES] = {0};
    for (size_t i = 0; i + LANES <= numel; i += LANES)
        for (int k = 0; k < LANES; ++k)
            lane[k] += (double)x[i + (size_t)k] * (double)x[i + (size_t)k];
    return total(lane);
}

double plain_bfloat16(const uint16_t *x, size_t numel)
{
    double lane[LANES] = {0};
    for (size_t i = 0; i + LANES <= numel; i += LANES)
        for (int k = 0; k < LANES; ++k) {
            uint32_t bits = (uint32_t)x[i + (size_t)k] << 16;
            float value;
            memcpy(&value, &bits, sizeof value);
            lane[k] += (double)value * (double)value;
        }
    return total(lane);
}
