/* save_lock.h - LOCK: the file that shows that the process that saves to a folder is alive.
 *
 * The kernel releases the lock when the process ends, also over NFS. LOCK is locked before it gets
 * its name, so no process can find it unlocked while its save is alive.
 *
 * Thread rule: any. */
#ifndef SW_CHECKPOINT_SAVE_LOCK_H
#define SW_CHECKPOINT_SAVE_LOCK_H

#include "base/status.h"

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

#endif
