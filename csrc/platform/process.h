/* process.h - watching a peer process: a descriptor that becomes readable when it ends, or a lock
 * that it loses.
 *
 * Both speak of the process itself: a forked child that lives on with copies of its descriptors
 * does not hide its death (a POSIX record lock is not inherited), and both work across PID
 * namespaces because the peer opens the descriptor itself and passes it. A pidfd is a kernel's
 * newer gift and may be forbidden; the lock is everywhere.
 *
 * Thread rule: any.
 */
#ifndef SW_PLATFORM_PROCESS_H
#define SW_PLATFORM_PROCESS_H

#include <stdbool.h>

/* A pidfd on the calling process, close-on-exec; -1 where the kernel refuses. */
int sw_process_open_self(void);

/* Whether the process behind `pidfd` has ended. false for -1. */
bool sw_process_has_ended(int pidfd);

/* Locks the first byte of file `fd` for as long as this process lives and has not closed any
 * descriptor of that file. Returns false where the kernel refuses. */
bool sw_process_hold_lock(int fd);

/* Whether the holder of the lock on `fd`, another process, has ended (or let go). false for -1. */
bool sw_process_lock_is_free(int fd);

/* One letter of /proc/<pid>/stat ('R', 'S', 'T' stopped, 'Z' ended), or '?' when it cannot be read.
 * The pid is the peer's own view: only a hint for a message where PID namespaces differ. */
char sw_process_state(int pid);

/* Processors that this process may run on, at least 1. */
int sw_process_cores(void);

#endif
