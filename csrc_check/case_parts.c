/* case_parts.c - the generator, and arrays with pseudo-random contents. */
#include "case_parts.h"

#include <string.h>

#include "kernels/compress_kernels.h"
#include "kernels/kernels.h"

static const size_t numels[SW_CASE_NUMELS] = {0, 1, 31, 33, 256, 777, 1000};

size_t sw_case_numel(size_t number)
{
    return numels[number];
}

uint32_t sw_case_draw(sw_case_maker *maker)
{
    maker->state ^= maker->state << 13;
    maker->state ^= maker->state >> 7;
    maker->state ^= maker->state << 17;
    return (uint32_t)(maker->state >> 16);
}

float sw_case_draw_float(sw_case_maker *maker, bool wild)
{
    static const float odd[] = {0.0f, -0.0f, 1e-41f, -3e-39f, 3e38f, -3e38f, 65504.0f, 1e-8f};
    float value = (float)(int32_t)sw_case_draw(maker) * 0x1p-30f;
    if (wild && sw_case_draw(maker) % 8 == 0)
        value = odd[sw_case_draw(maker) % 8];
    if (wild && sw_case_draw(maker) % 64 == 0)
        value = sw_case_draw(maker) % 2 ? __builtin_inff() : -__builtin_inff();
    return value;
}

static bool is_half(sw_dtype dtype)
{
    return dtype == SW_DTYPE_FLOAT16 || dtype == SW_DTYPE_BFLOAT16;
}

void sw_case_fill(sw_case_maker *maker, void *at, size_t numel, sw_dtype dtype, bool wild)
{
    unsigned char *bytes = at;
    if (dtype == SW_DTYPE_COMPLEX64 || dtype == SW_DTYPE_COMPLEX128) {
        numel *= 2;
        dtype = dtype == SW_DTYPE_COMPLEX64 ? SW_DTYPE_FLOAT32 : SW_DTYPE_FLOAT64;
    }
    const size_t width = sw_dtype_size_bytes(dtype);
    for (size_t i = 0; i < numel; ++i, bytes += width) {
        float value = sw_case_draw_float(maker, wild);
        double wide = (double)value * (wild ? 0x1p-1000 : 1.0);
        if (dtype == SW_DTYPE_FLOAT32)
            memcpy(bytes, &value, sizeof value);
        else if (dtype == SW_DTYPE_FLOAT64)
            memcpy(bytes, &wide, sizeof wide);
        else if (is_half(dtype))
            sw_kernels()->compress->half_narrow((uint16_t *)(void *)bytes, &value, 1, 1.0f, dtype);
        else
            for (size_t b = 0; b < width; ++b)
                bytes[b] = (unsigned char)sw_case_draw(maker);
    }
}

void sw_case_settle_floats(void *at, size_t numel, sw_dtype dtype)
{
    unsigned char *bytes = at;
    if (dtype == SW_DTYPE_COMPLEX64 || dtype == SW_DTYPE_COMPLEX128) {
        numel *= 2;
        dtype = dtype == SW_DTYPE_COMPLEX64 ? SW_DTYPE_FLOAT32 : SW_DTYPE_FLOAT64;
    }
    const size_t width = sw_dtype_size_bytes(dtype);
    const uint16_t infinity = dtype == SW_DTYPE_FLOAT16 ? 0x7c00 : 0x7f80;
    for (size_t i = 0; i < numel; ++i, bytes += width) {
        float value;
        double wide;
        uint16_t half;
        if (dtype == SW_DTYPE_FLOAT32 && (memcpy(&value, bytes, sizeof value), value != value))
            memcpy(bytes, &(float){__builtin_nanf("")}, sizeof value);
        if (dtype == SW_DTYPE_FLOAT64 && (memcpy(&wide, bytes, sizeof wide), wide != wide))
            memcpy(bytes, &(double){__builtin_nan("")}, sizeof wide);
        if (is_half(dtype) && (memcpy(&half, bytes, sizeof half), (half & 0x7fff) > infinity))
            memcpy(bytes, &(uint16_t){(uint16_t)(infinity + 1)}, sizeof half);
    }
}
