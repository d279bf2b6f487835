/* save_lock.h - LOCK: the file by which a folder that is being written tells that its save is
 * alive.
 *
 * The kernel releases the lock when the process ends, also over NFS. LOCK is locked before it has
 * its name, so that no process can find it unlocked while its save is alive.
 *
 * Thread rule: any.
 */
#ifndef SW_CHECKPOINT_SAVE_LOCK_H
#define SW_CHECKPOINT_SAVE_LOCK_H

#include "base/status.h"

#define SW_LOCK_NAME "LOCK"

typedef enum sw_save_life {
    SW_SAVE_DEAD,
    SW_SAVE_ALIVE,
    SW_SAVE_UNKNOWN, /* no LOCK that can be opened, or a file system without locks */
} sw_save_life;

/* Makes LOCK in the folder `partial`. The lock lasts until *fd is closed, at the latest until the
 * process and its children forked meanwhile end. A file system without locks has the file alone. */
SW_MUST_USE sw_status sw_save_lock_take(const char *partial, int *fd, sw_error *err);

/* Removes LOCK from `folder`, which the folder is called now, and closes *fd; -1: nothing to do. */
void sw_save_lock_release(const char *folder, int *fd);

sw_save_life sw_save_lock_look(const char *partial);

#endif
