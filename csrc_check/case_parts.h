/* case_parts.h - what the files of cases share: the arena's regions, pseudo-random contents, and
 * the tables that block_cases.c and lowrank_cases.c have for kernel_cases.c.
 *
 * Thread rule: any.
 */
#pragma once

#include "kernel_cases.h"
#include "tensor/dtype.h"

enum { SW_CASE_REGIONS = 16 };

/* A case that is being made. Its arena is cut into SW_CASE_REGIONS regions of equal size. */
typedef struct sw_case_maker {
    unsigned char *arena; /* borrowed */
    size_t region_bytes;
    uint64_t state; /* state of the generator */
    sw_kernel_case *made;
} sw_case_maker;

typedef struct sw_case_table {
    size_t count;
    void (*make)(sw_case_maker *maker, size_t index);
    void (*settle)(const void *args); /* NULL: bytes are equal or wrong */
} sw_case_table;

/* Return the next 32 pseudo-random bits. */
uint32_t sw_case_draw(sw_case_maker *maker);

/* Return an ordinary number of up to 2; if `wild` now and then one of those that sw_case_fill
 * names. */
float sw_case_draw_float(sw_case_maker *maker, bool wild);

/* Return the place `offset` bytes behind the beginning of region `number`. */
static inline void *sw_case_region(const sw_case_maker *maker, size_t number, size_t offset)
{
    return maker->arena + number * maker->region_bytes + offset;
}

/* Return the next digit of a mixed-radix index, in [0, count). */
static inline size_t sw_case_pick(size_t *index, size_t count)
{
    size_t picked = *index % count;
    *index /= count;
    return picked;
}

/* Return one of the sizes: 0, 1, odd tails, several blocks of threads. */
enum { SW_CASE_NUMELS = 7 };
size_t sw_case_numel(size_t number);

/* Fill `numel` elements: ordinary numbers; if `wild` also infinities, subnormals and both zeros. */
void sw_case_fill(sw_case_maker *maker, void *at, size_t numel, sw_dtype dtype, bool wild);

/* Make each NaN of an array of floats the same NaN. */
void sw_case_settle_floats(void *at, size_t numel, sw_dtype dtype);

#define SW_CASE_TABLE(noun) extern const sw_case_table sw_##noun##_cases
SW_CASE_TABLE(quantize);
SW_CASE_TABLE(fold_records);
SW_CASE_TABLE(decode);
SW_CASE_TABLE(verdict);
SW_CASE_TABLE(owe);
SW_CASE_TABLE(project);
SW_CASE_TABLE(absorb);
SW_CASE_TABLE(expand);
SW_CASE_TABLE(orthonormalize);
SW_CASE_TABLE(finite);
