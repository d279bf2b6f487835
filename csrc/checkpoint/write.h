/* write.h - the simple ways to put bytes into a folder that is to become a checkpoint: for a
 * program that plans its own writes. A save of ours writes by save_write.c.
 *
 * Thread rule: any; of one file, ranges that do not overlap.
 */
#ifndef SW_CHECKPOINT_WRITE_H
#define SW_CHECKPOINT_WRITE_H

#include "base/status.h"
#include "checkpoint/manifest.h"
#include "checkpoint/plan.h"
#include "checkpoint/tally.h"

/* Makes every file of `plan` in `folder`, with its whole size and disk space. */
SW_MUST_USE sw_status sw_plan_create_files(const sw_plan *plan, const char *folder, sw_error *err);

typedef struct sw_write_file { /* one of a plan's */
    const char *path;          /* of the file itself */
    uint64_t size_bytes, first_block;
} sw_write_file;

typedef struct sw_write_range {
    uint64_t begin, size_bytes; /* in the file */
} sw_write_range;

/* Writes `ranges` (ascending, no overlap), whose bytes follow each other at `data`, through the
 * page cache, and adds what was written of each block to `tallies`. Not durable. */
SW_MUST_USE sw_status sw_checkpoint_write(const sw_write_file *file, const sw_write_range *ranges,
                                          size_t count, const void *data, sw_tally_list *tallies,
                                          sw_error *err);

/* Writes the headers of `plan` to its files in `folder`, and adds them to `manifest`, which lists
 * these files first. */
SW_MUST_USE sw_status sw_plan_write_headers(const sw_plan *plan, const char *folder,
                                            sw_manifest *manifest, sw_error *err);

#endif
