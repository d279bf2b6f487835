/* watchdog.h - how a transport between GPUs sees failures through the ranks' host communicator.
 *
 * Idea: a GPU that waits for a peer does not notice its death, and a host that waits for a peer's
 * host does not notice a GPU's failure. The host communicator knows the state of each rank and
 * reaches every rank that waits in it. So a waiting transport queries it regularly. A failing
 * transport notifies it before it ends anything: NCCL's abort may wait until other ranks abort too,
 * and until the kernels of the process's other communicators return.
 *
 * Left out: the thread that releases a wait inside torch
 * (python/shardwright/backend/device_link.py).
 *
 * NULL is allowed for a watchdog everywhere: every call returns at once.
 *
 * Thread rule: one at a time per watchdog; the host's communicator may be in use by another thread.
 */
#ifndef SW_COMM_WATCHDOG_H
#define SW_COMM_WATCHDOG_H

#include "comm/wait.h"

typedef struct sw_watchdog {
    sw_comm *host;      /* borrowed; NULL: every call returns at once */
    bool minds_leaving; /* true while peers connect: a peer that leaves will not come */
    int64_t looked_ns;
    const char *what; /* borrowed during a check: what the wait is for */
    sw_wait wait;     /* the wait of the last check */
} sw_watchdog;

/* Call in every turn of a wait for `what` that began at `begun_ns`. Checks twenty times a second,
 * never in a shorter wait (it takes the GIL for the program's signals), and logs a long wait.
 * SW_OK: wait on. SW_E_COMM, or the reason of the host communicator's end: stop waiting.
 * SW_E_INTERRUPTED: a signal interrupted the program; *reason is the message for its peers. */
SW_MUST_USE sw_status sw_watchdog_look(sw_watchdog *watchdog, int64_t begun_ns, const char *what,
                                       sw_error *reason);

/* Report a failed transport to every rank of this host and end the host communicator. Takes no
 * GIL. */
void sw_watchdog_report(const sw_watchdog *watchdog, const sw_error *reason);
/* Then report it to the other hosts. A second call has no effect. */
void sw_watchdog_report_to_hosts(const sw_watchdog *watchdog);

/* Replace `reason`, a failure that a peer seems to have caused, by the reason that the peer has
 * published or soon publishes. */
void sw_watchdog_find_cause(const sw_watchdog *watchdog, sw_error *reason);

#endif
