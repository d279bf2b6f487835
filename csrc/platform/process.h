/* process.h - watching a peer process: a descriptor that becomes readable when it ends.
 *
 * A pidfd speaks of the process itself: a forked child that lives on with copies of its sockets does not
 * hide its death, and it works across PID namespaces because the peer opens it on itself and passes it.
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

/* One letter of /proc/<pid>/stat ('R', 'S', 'T' stopped, 'Z' ended), or '?' when it cannot be read. The pid
 * is the peer's own view: only a hint for a message where PID namespaces differ. */
char sw_process_state(int pid);

/* Processors that this process may run on, at least 1. */
int sw_process_cores(void);

#endif
