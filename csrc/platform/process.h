/* process.h - liveness of a process: a lock on one byte of a file that it shares with its peers.
 *
 * A POSIX record lock belongs to the process. The kernel drops it when the process ends in any way,
 * even if children live on with copies of its descriptors (a fork does not inherit it). It works
 * across PID namespaces. The lock is also dropped when the process closes any descriptor of that
 * file, so a process opens the file only once.
 *
 * Thread rule: any.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* Locks byte `byte` of file `fd` until this process closes the file or ends. False if another
 * process holds it or the kernel refuses. */
bool sw_process_hold_lock(int fd, int byte);

/* True if no process holds the lock. False for -1, and if the kernel cannot tell. */
bool sw_process_lock_is_free(int fd, int byte);

/* What a process does, by the state of its main thread. */
typedef enum sw_process_state {
    SW_PROCESS_UNKNOWN = 0,
    SW_PROCESS_RUNNING,
    SW_PROCESS_SLEEPING,
    SW_PROCESS_IN_KERNEL, /* cannot be interrupted: it waits for a disk or another device */
    SW_PROCESS_STOPPED,   /* by a signal or a debugger */
    SW_PROCESS_GONE,      /* it has ended */
} sw_process_state;

/* Returns UNKNOWN for 0, or if unreadable. The pid is that of this process's PID namespace
 * (sw_process_space); in another one the result is only a hint for messages. */
sw_process_state sw_process_state_of(int pid);
/* "stopped", "running", ...; "" for UNKNOWN. */
const char *sw_process_state_text(sw_process_state state);

/* Returns a number that processes of one PID namespace have in common; 0: unknown. */
uint64_t sw_process_space(void);

/* Returns the number of processors on which this process may run, at least 1. */
int sw_process_cores(void);
