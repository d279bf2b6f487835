/* process.h - the sign of life of a process: a lock on one byte of a file that it shares with its
 * peers.
 *
 * A POSIX record lock belongs to the process. The kernel drops it when the process ends, however it
 * ends and whatever children live on with copies of its descriptors (a fork does not inherit it);
 * other PID namespaces see it as this one does. It also goes when the process closes any descriptor
 * of that file, so a file is opened once in a process.
 *
 * Thread rule: any.
 */
#ifndef SW_PLATFORM_PROCESS_H
#define SW_PLATFORM_PROCESS_H

#include <stdbool.h>

/* Locks byte `byte` of file `fd` until this process closes the file or ends. False where another
 * process holds it, or the kernel refuses. */
bool sw_process_hold_lock(int fd, int byte);

/* True if no process holds it. False for -1, and where the kernel does not say. */
bool sw_process_lock_is_free(int fd, int byte);

/* Whether a signal or a debugger has stopped the process; false for 0, and where it cannot be read.
 * The pid is the peer's own view: only a hint for a message where PID namespaces differ. */
bool sw_process_is_stopped(int pid);

/* Processors that this process may run on, at least 1. */
int sw_process_cores(void);

#endif
