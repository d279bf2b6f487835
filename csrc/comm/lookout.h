/* lookout.h - the view of the ranks' hosts that a transport between GPUs has.
 *
 * Idea: a GPU that waits for a peer gets no sign of its death, and a host that waits for a peer's
 * host gets no sign of a GPU's failure. The host's communicator knows the state of each rank, and
 * reaches every rank that waits in it. So a waiting transport asks it now and then. A failing
 * transport notifies it first, before it ends anything: NCCL's abort may wait until other ranks
 * abort too, and until the kernels of the process's other communicators return.
 *
 * Left out: the thread that releases a wait inside torch
 * (python/shardwright/backend/device_link.py).
 *
 * NULL is allowed for a lookout everywhere: every call returns at once.
 *
 * Thread rule: one at a time a lookout; the host's communicator may be in use by another thread. */
#ifndef SW_COMM_LOOKOUT_H
#define SW_COMM_LOOKOUT_H

#include "comm/wait.h"

typedef struct sw_lookout {
    sw_comm *host;      /* borrowed; NULL: every call returns at once */
    bool minds_leaving; /* while peers connect: one that leaves will not come */
    int64_t looked_ns;
    sw_wait wait; /* the wait of the last look */
} sw_lookout;

/* Call in every turn of a wait for `what` that began at `begun_ns`. Acts twenty times a second,
 * never in a wait shorter than that (it takes the GIL for the program's signals), and logs a long
 * wait. SW_OK: wait on. SW_E_COMM, or the reason for which the host's communicator ended: the wait
 * is in vain. SW_E_INTERRUPTED: a signal interrupted the program; *reason is the sentence for its
 * peers. */
SW_MUST_USE sw_status sw_lookout_look(sw_lookout *lookout, int64_t begun_ns, const char *what,
                                      sw_error *reason);

/* Report a failed transport to every rank of this host, also by ending the host's communicator.
 * Takes no GIL. */
void sw_lookout_report(const sw_lookout *lookout, const sw_error *reason);
/* Report it to the other hosts after that. Repeated, it does nothing. */
void sw_lookout_report_to_hosts(const sw_lookout *lookout);

/* Replace `reason`, a failure that some peer seems to have caused, by the reason that the peer has
 * published or publishes within a moment. */
void sw_lookout_find_cause(const sw_lookout *lookout, sw_error *reason);

#endif
