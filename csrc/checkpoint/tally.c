/* tally.c - a head of 16 bytes a run of blocks (first block, count), 8 bytes an entry. */
#include "checkpoint/tally.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/crc32c.h"

enum { HEAD_BYTES = 16, ENTRY_BYTES = 8, FIRST_CAPACITY = 4096 };

/* Hash a place in a block. With a linear hash a hole and a byte written twice could cancel. */
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

static uint8_t *make_room(sw_tally_list *list, size_t bytes)
{
    if (list->size_bytes + bytes > list->capacity) {
        size_t capacity = list->capacity ? 2 * list->capacity : FIRST_CAPACITY;
        uint8_t *grown = list->is_out_of_memory ? NULL : realloc(list->data, capacity);
        if (!grown) {
            list->is_out_of_memory = true;
            return NULL;
        }
        list->data = grown;
        list->capacity = capacity;
    }
    list->size_bytes += bytes;
    return list->data + list->size_bytes - bytes;
}

void sw_tally_list_append(sw_tally_list *list, uint64_t block, sw_tally tally)
{
    uint64_t count = 0;
    if (list->size_bytes == 0 || block != list->next_block) {
        uint8_t *head = make_room(list, HEAD_BYTES);
        if (!head)
            return;
        list->run_at = (size_t)(head - list->data);
        memcpy(head, &block, sizeof block);
        memcpy(head + 8, &count, sizeof count);
    }
    uint8_t *entry = make_room(list, ENTRY_BYTES);
    if (!entry)
        return;
    memset(entry, 0, ENTRY_BYTES);
    memcpy(entry, &tally.crc, sizeof tally.crc);
    memcpy(entry + 4, &tally.cover, sizeof tally.cover);
    uint8_t *head = list->data + list->run_at;
    memcpy(&count, head + 8, sizeof count);
    ++count;
    memcpy(head + 8, &count, sizeof count);
    list->next_block = block + 1;
}

void sw_tally_list_fini(sw_tally_list *list)
{
    free(list->data);
    *list = (sw_tally_list){0};
}

sw_status sw_tally_list_read(const uint8_t *data, size_t size_bytes,
                             sw_status (*take)(void *context, uint64_t block, sw_tally tally,
                                               sw_error *err),
                             void *context, sw_error *err)
{
    size_t at = 0;
    while (at < size_bytes) {
        uint64_t first, count;
        if (size_bytes - at < HEAD_BYTES)
            SW_FAIL(err, SW_E_INVALID, "a list of tallies ends inside a run, at byte %zu", at);
        memcpy(&first, data + at, sizeof first);
        memcpy(&count, data + at + 8, sizeof count);
        at += HEAD_BYTES;
        if (count > (size_bytes - at) / ENTRY_BYTES)
            SW_FAIL(err, SW_E_INVALID, "a list of tallies ends inside a run, at byte %zu", at);
        for (uint64_t i = 0; i < count; ++i, at += ENTRY_BYTES) {
            sw_tally tally;
            memcpy(&tally.crc, data + at, sizeof tally.crc);
            memcpy(&tally.cover, data + at + 4, sizeof tally.cover);
            SW_TRY(take(context, first + i, tally, err));
        }
    }
    return SW_OK;
}
