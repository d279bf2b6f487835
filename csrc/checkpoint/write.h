/* write.h - a folder that will become a checkpoint: its LOCK, and simple writes into it, for
 * programs that plan their own. Our own saves write by save_write.c.
 *
 * Thread rule: any; threads that write one file need ranges without overlap. */
#pragma once

#include "base/status.h"
#include "checkpoint/manifest.h"
#include "checkpoint/plan.h"
#include "checkpoint/tally.h"

/* ---- LOCK: the file that shows that the process that saves to a folder is alive ---- */

/* The kernel releases the lock when the process ends, also over NFS. LOCK is locked before it gets
 * its name, so no process can find it unlocked while its save is alive. */

#define SW_LOCK_NAME "LOCK"

typedef enum sw_save_life {
    SW_SAVE_DEAD,
    SW_SAVE_ALIVE,
    SW_SAVE_UNKNOWN, /* LOCK cannot be opened, or the file system has no locks */
} sw_save_life;

/* Create LOCK in the folder `partial`. The lock lasts until *fd is closed, or until the process and
 * all children forked meanwhile have ended. On a file system without locks only the file is
 * created. */
SW_MUST_USE sw_status sw_save_lock_take(const char *partial, int *fd, sw_error *err);

/* Remove LOCK from `folder`, the current name of the folder, and close *fd; -1: do nothing. */
void sw_save_lock_release(const char *folder, int *fd);

sw_save_life sw_save_lock_look(const char *partial);

/* ---- writes ---- */

/* Create every file of `plan` in `folder`, at full size and with its disk space allocated; also the
 * inner folders of paths. */
SW_MUST_USE sw_status sw_plan_create_files(const sw_plan *plan, const char *folder, sw_error *err);

/* Create the folder `partial` with LOCK, held by *lock_fd, and every file of `plan`.
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
