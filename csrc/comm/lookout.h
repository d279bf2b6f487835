/* lookout.h - what the transports between GPUs know of the ranks' hosts.
 *
 * Idea: a GPU that waits for a peer learns of its death from nobody, and a host that waits for a
 * peer's host learns of a GPU's failure from nobody. The host's communicator knows of every rank
 * whether it lives, and reaches every rank that waits in it. So a transport that waits asks it, now
 * and then; and one that fails tells it first, before it ends anything: NCCL's abort may wait until
 * other ranks abort, too, and until the kernels of the process's other communicators are let go.
 *
 * What it leaves out: the thread that lets go who waits inside torch
 * (python/shardwright/backend/device_link.py).
 *
 * Everywhere NULL is allowed for a lookout: nobody is asked or told.
 *
 * Thread rule: one at a time a lookout; the host's communicator may be in use by another thread.
 */
#ifndef SW_COMM_LOOKOUT_H
#define SW_COMM_LOOKOUT_H

#include "comm/wait.h"

typedef struct sw_lookout {
    sw_comm *host;      /* borrowed; NULL: nobody is asked or told */
    bool minds_leaving; /* while peers are joined: one that takes its leave will not come */
    int64_t looked_ns;
    sw_wait wait; /* that was looked at last */
} sw_lookout;

/* For every turn of a wait for `what` that began at `begun_ns`; does something twenty times a
 * second, nothing in a wait shorter than that (the program is asked with its GIL), and logs a wait
 * that is long. SW_OK to wait on. SW_E_COMM, or what the host's communicator has ended with: the
 * wait is in vain. SW_E_INTERRUPTED: the program was interrupted (a signal), and *reason is what
 * its peers are to hear. */
SW_MUST_USE sw_status sw_lookout_look(sw_lookout *lookout, int64_t begun_ns, const char *what,
                                      sw_error *reason);

/* A transport has failed: every rank of this host hears it, in the host's communicator too, which
 * ends. Takes no GIL. */
void sw_lookout_tell(const sw_lookout *lookout, const sw_error *reason);
/* Behind it: so do the other hosts. Repeated, it does nothing. */
void sw_lookout_tell_hosts(const sw_lookout *lookout);

/* The failure is some peer's doing, as far as this rank can see: what that peer has said of it, or
 * says within a moment, takes the place of `reason`. */
void sw_lookout_hear(const sw_lookout *lookout, sw_error *reason);

#endif
