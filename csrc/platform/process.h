/* process.h - liveness of a process: a lock on one byte of a file that it shares with its peers.
 *
 * A POSIX record lock belongs to the process. The kernel drops it when the process ends in any way,
 * even if children live on with copies of its descriptors (a fork does not inherit it). It works
 * across PID namespaces. The lock is also dropped when the process closes any descriptor of that
 * file, so a process opens the file only once.
 *
 * Thread rule: any.
 */
#ifndef SW_PLATFORM_PROCESS_H
#define SW_PLATFORM_PROCESS_H

#include <stdbool.h>

/* Locks byte `byte` of file `fd` until this process closes the file or ends. False if another
 * process holds it or the kernel refuses. */
bool sw_process_hold_lock(int fd, int byte);

/* True if no process holds the lock. False for -1, and if the kernel cannot tell. */
bool sw_process_lock_is_free(int fd, int byte);

/* Returns true if a signal or a debugger has stopped the process; false for 0, or if unreadable.
 * The pid is that of the peer's own PID namespace; if it differs, the result is only a hint for
 * messages. */
bool sw_process_is_stopped(int pid);

/* Returns the number of processors on which this process may run, at least 1. */
int sw_process_cores(void);

#endif
