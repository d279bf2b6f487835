/* tally.h - combine the ranks' knowledge of a block into its checksum, if several ranks wrote it.
 *
 * Idea: a CRC is linear. The checksum of a block is the XOR of each range's checksum, advanced over
 * the bytes that follow the range in the block. A second word checks that ranges tile a block: the
 * sum of h(end) - h(begin), where h hashes an offset in the block. It is h(block's end) - h(0) if
 * each byte was written once; holes and bytes written twice give another sum, except in one case of
 * 65,536. Neither word depends on the order of ranges.
 *
 * A rank's tallies travel as a list of entries, ascending by block in a save. A host's ranks append
 * their lists, each after a head, to one file, which the host's carrier merges. The first carrier
 * of a group of hosts (channel.h) merges the files of the group.
 *
 * Thread rule: any. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct sw_tally { /* of one rank and one block */
    uint32_t crc;
    uint16_t cover;
} sw_tally;

/* Add a range with checksum `crc` at [offset, offset + size_bytes) of a block of `block_bytes`. */
void sw_tally_add(sw_tally *tally, uint32_t crc, uint32_t offset, uint32_t size_bytes,
                  uint32_t block_bytes);

/* Return the second word of a whole block of `block_bytes`. */
uint16_t sw_tally_whole(uint32_t block_bytes);

/* A list of tallies in encoded form. A failed allocation is recorded: check `is_out_of_memory`
 * once. */
typedef struct sw_tally_list {
    uint8_t *data; /* owned */
    size_t size_bytes, capacity;
    uint64_t next_block; /* the block after that of the last entry */
    uint64_t open_block; /* of ranges, one after the other; valid if is_open */
    sw_tally open;
    bool is_open, is_out_of_memory;
} sw_tally_list;

void sw_tally_list_append(sw_tally_list *list, uint64_t block, sw_tally tally);
/* Add a range of a block, at `offset` of a file of `file_bytes`. Ranges of one block follow one
 * another, and after the last range comes an end. */
void sw_tally_list_add(sw_tally_list *list, uint64_t block, uint32_t crc, uint64_t offset,
                       uint32_t size_bytes, uint64_t file_bytes);
void sw_tally_list_end(sw_tally_list *list);
void sw_tally_list_fini(sw_tally_list *list);

/* Add the entries of another list; both ascend. SW_E_INVALID: bytes are not a list. SW_E_MEMORY. */
SW_MUST_USE sw_status sw_tally_list_merge(sw_tally_list *list, const uint8_t *data,
                                          size_t size_bytes, sw_error *err);

typedef sw_status sw_tally_take(void *context, uint64_t block, sw_tally tally, sw_error *err);

/* Call `take` for each whole entry of a part of a list. *block: block of the last entry, UINT64_MAX
 * before the first. *used: bytes consumed; the next part begins after them. SW_E_INVALID: the bytes
 * are not a list. */
SW_MUST_USE sw_status sw_tally_list_read_part(const uint8_t *data, size_t size_bytes, bool is_last,
                                              uint64_t *block, size_t *used, sw_tally_take *take,
                                              void *context, sw_error *err);
/* The same for a whole list. */
SW_MUST_USE sw_status sw_tally_list_read(const uint8_t *data, size_t size_bytes,
                                         sw_tally_take *take, void *context, sw_error *err);

typedef struct sw_tally_head { /* precedes a list in a host's file */
    uint64_t size_bytes;       /* size of the list that follows */
    uint32_t plan_digest;      /* digest of its writer's plan */
    uint32_t rank;             /* its writer, or the carrier that merged */
    uint32_t host_count;       /* number of hosts in the list: 1, or those of a group */
    uint32_t reserved;
} sw_tally_head;
