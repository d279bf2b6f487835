/* tally.c - entries of (blocks skipped since the last entry, checksum, cover). The first number has
 * 7 bits a byte, lowest first, so an entry takes 7 bytes if few blocks are skipped. */
#include "checkpoint/tally.h"

#include <stdlib.h>
#include <string.h>

#include "checkpoint/plan.h"
#include "kernels/crc32c.h"

enum { TALLY_BYTES = 6, ENTRY_BYTES_MAX = 10 + TALLY_BYTES, FIRST_CAPACITY = 4096 };

/* Hash an offset in a block. With a linear hash a hole and a byte written twice could cancel. */
static uint16_t hash(uint32_t place)
{
    place ^= place >> 16;
    place *= UINT32_C(0x85ebca6b);
    place ^= place >> 13;
    place *= UINT32_C(0xc2b2ae35);
    return (uint16_t)(place >> 16);
}

void sw_tally_add(sw_tally *tally, uint32_t crc, uint32_t offset, uint32_t size_bytes,
                  uint32_t block_bytes)
{
    uint32_t end = offset + size_bytes;
    tally->crc ^= end == block_bytes ? crc : sw_crc32c_join(crc, 0, block_bytes - end);
    tally->cover = (uint16_t)(tally->cover + hash(end) - hash(offset));
}

uint16_t sw_tally_whole(uint32_t block_bytes)
{
    return (uint16_t)(hash(block_bytes) - hash(0));
}

static bool make_room(sw_tally_list *list, size_t bytes)
{
    if (list->size_bytes + bytes > list->capacity) {
        size_t capacity = list->capacity ? 2 * list->capacity : FIRST_CAPACITY;
        uint8_t *grown = list->is_out_of_memory ? NULL : realloc(list->data, capacity);
        list->is_out_of_memory = !grown;
        if (!grown)
            return false;
        list->data = grown;
        list->capacity = capacity;
    }
    return true;
}

void sw_tally_list_append(sw_tally_list *list, uint64_t block, sw_tally tally)
{
    if (!make_room(list, ENTRY_BYTES_MAX))
        return;
    uint8_t *to = list->data + list->size_bytes;
    for (uint64_t gap = block - list->next_block; true; gap >>= 7) {
        *to++ = (uint8_t)(gap < 128 ? gap : gap | 128);
        if (gap < 128)
            break;
    }
    memcpy(to, &tally.crc, sizeof tally.crc);
    memcpy(to + sizeof tally.crc, &tally.cover, sizeof tally.cover);
    list->size_bytes = (size_t)(to - list->data) + TALLY_BYTES;
    list->next_block = block + 1;
}

void sw_tally_list_add(sw_tally_list *list, uint64_t block, uint32_t crc, uint64_t offset,
                       uint32_t size_bytes, uint64_t file_bytes)
{
    uint64_t in_block = offset % SW_BLOCK_BYTES, left = file_bytes - (offset - in_block);
    if (block != list->open_block)
        sw_tally_list_end(list);
    list->is_open = true;
    list->open_block = block;
    sw_tally_add(&list->open, crc, (uint32_t)in_block, size_bytes,
                 (uint32_t)(left < SW_BLOCK_BYTES ? left : SW_BLOCK_BYTES));
}

void sw_tally_list_end(sw_tally_list *list)
{
    if (list->is_open)
        sw_tally_list_append(list, list->open_block, list->open);
    list->is_open = false;
    list->open = (sw_tally){0};
}

void sw_tally_list_fini(sw_tally_list *list)
{
    free(list->data);
    *list = (sw_tally_list){0};
}

typedef struct reader {
    const uint8_t *at, *end;
    uint64_t block; /* block of the last entry, followed by its tally */
    sw_tally tally;
    bool has_entry; /* false: the list has ended */
} reader;

static reader read_list(const uint8_t *data, size_t size_bytes)
{
    return (reader){.at = data, .end = data + size_bytes, .block = UINT64_MAX};
}

static sw_status fail_damaged(const reader *r, sw_error *err)
{
    SW_FAIL(err, SW_E_INVALID, "a list of tallies is damaged or cut off %td bytes before its end",
            r->end - r->at);
}

/* Take the next entry, or none at the end. */
static sw_status next_entry(reader *r, sw_error *err)
{
    uint64_t gap = 0;
    uint8_t digits = 128;
    r->has_entry = r->at < r->end;
    if (!r->has_entry)
        return SW_OK;
    for (unsigned shift = 0; digits >= 128; shift += 7) {
        if (r->at == r->end || shift > 63)
            return fail_damaged(r, err);
        digits = *r->at++;
        gap |= (uint64_t)(digits & 127) << shift;
    }
    if (r->end - r->at < TALLY_BYTES)
        return fail_damaged(r, err);
    memcpy(&r->tally.crc, r->at, sizeof r->tally.crc);
    memcpy(&r->tally.cover, r->at + sizeof r->tally.crc, sizeof r->tally.cover);
    r->at += TALLY_BYTES;
    r->block += gap + 1;
    return SW_OK;
}

sw_status sw_tally_list_read_part(const uint8_t *data, size_t size_bytes, bool is_last,
                                  uint64_t *block, size_t *used, sw_tally_take *take, void *context,
                                  sw_error *err)
{
    reader r = {.at = data, .end = data + size_bytes, .block = *block};
    while (is_last ? r.at < r.end : r.end - r.at >= ENTRY_BYTES_MAX) {
        SW_TRY(next_entry(&r, err));
        SW_TRY(take(context, r.block, r.tally, err));
    }
    *block = r.block;
    *used = (size_t)(r.at - data);
    return SW_OK;
}

sw_status sw_tally_list_read(const uint8_t *data, size_t size_bytes, sw_tally_take *take,
                             void *context, sw_error *err)
{
    uint64_t block = UINT64_MAX;
    size_t used;
    return sw_tally_list_read_part(data, size_bytes, true, &block, &used, take, context, err);
}

static sw_status merge(sw_tally_list *to, reader *a, reader *b, sw_error *err)
{
    SW_TRY(next_entry(a, err));
    SW_TRY(next_entry(b, err));
    while (a->has_entry || b->has_entry) {
        bool takes_a = a->has_entry && (!b->has_entry || a->block <= b->block);
        bool takes_b = b->has_entry && (!a->has_entry || b->block <= a->block);
        uint64_t block = takes_a ? a->block : b->block;
        sw_tally sum = takes_a ? a->tally : (sw_tally){0};
        if (takes_b) {
            sum.crc ^= b->tally.crc;
            sum.cover = (uint16_t)(sum.cover + b->tally.cover);
        }
        sw_tally_list_append(to, block, sum);
        if (takes_a)
            SW_TRY(next_entry(a, err));
        if (takes_b)
            SW_TRY(next_entry(b, err));
    }
    return SW_OK;
}

sw_status sw_tally_list_merge(sw_tally_list *list, const uint8_t *data, size_t size_bytes,
                              sw_error *err)
{
    sw_tally_list sum = {0};
    reader a = read_list(list->data, list->size_bytes), b = read_list(data, size_bytes);
    sw_status status = merge(&sum, &a, &b, err);
    if (status == SW_OK && (sum.is_out_of_memory || list->is_out_of_memory))
        status = sw_error_set(err, SW_E_MEMORY, -1, "no memory to merge %zu bytes of tallies",
                              list->size_bytes + size_bytes);
    sw_tally_list *old = status == SW_OK ? list : &sum;
    free(old->data);
    if (status == SW_OK)
        *list = sum;
    return status;
}
