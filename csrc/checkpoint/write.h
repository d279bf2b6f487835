/* write.h - simple writes into a folder that will become a checkpoint: for programs that plan their
 * own writes. Our own saves use save_write.c.
 *
 * Thread rule: any; threads that write one file need ranges without overlap. */
#ifndef SW_CHECKPOINT_WRITE_H
#define SW_CHECKPOINT_WRITE_H

#include "base/status.h"
#include "checkpoint/manifest.h"
#include "checkpoint/plan.h"
#include "checkpoint/tally.h"

/* Create every file of `plan` in `folder`, at full size and with its disk space allocated; also the
 * inner folders of paths. */
SW_MUST_USE sw_status sw_plan_create_files(const sw_plan *plan, const char *folder, sw_error *err);

/* Create the folder `partial` with LOCK (save_lock.h), held by *lock_fd, and every file of `plan`.
 * An error leaves no files. */
SW_MUST_USE sw_status sw_partial_create(const sw_plan *plan, const char *partial, int *lock_fd,
                                        sw_error *err);

/* Abandon the folder: release LOCK and remove everything. */
void sw_partial_abandon(const char *partial, int *lock_fd);

typedef struct sw_write_file { /* a file of a plan */
    const char *path;          /* path of the file */
    uint64_t size_bytes, first_block;
} sw_write_file;

typedef struct sw_write_range {
    uint64_t begin, size_bytes; /* in the file */
} sw_write_range;

/* Write `ranges` (ascending, no overlap), contiguous at `data`, through the page cache, and add a
 * tally of each block to `tallies`. Not durable. */
SW_MUST_USE sw_status sw_checkpoint_write(const sw_write_file *file, const sw_write_range *ranges,
                                          size_t count, const void *data, sw_tally_list *tallies,
                                          sw_error *err);

/* Write the headers of `plan` to its files in `folder`, and add them to `manifest`, which lists
 * these files first. NULL: the folder gets none. */
SW_MUST_USE sw_status sw_plan_write_headers(const sw_plan *plan, const char *folder,
                                            sw_manifest *manifest, sw_error *err);

#endif
