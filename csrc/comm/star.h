/* star.h - the connections of a host's ranks: one from each rank to the first, through which it
 * gets file descriptors. See docs/design/comm.md.
 *
 * Idea: the first rank creates shared memory and passes it on. Caller and listener first prove to
 * each other that they know the group's secret; then the caller is *linked*. A file descriptor is
 * passed as a *gift*. The kernel counts gifts in flight until they are received, so at most 16
 * copies of a gift are in flight, and the next one is sent when a rank has answered.
 *
 * Left out: the memory behind the file descriptors (shm.h), the liveness of a peer
 * (comm->ops->look).
 *
 * Thread rule: one at a time per star. */
#ifndef SW_COMM_STAR_H
#define SW_COMM_STAR_H

#include "comm/comm.h"
#include "platform/socket.h"

enum { SW_STAR_IN_FLIGHT = 16, SW_STAR_STRANGERS = 64 };

typedef struct sw_star {
    sw_comm *comm; /* borrowed: rank (0: the first), world_size, names, deadline, hooks, look */
    int listener;  /* owned; -1 once joined */
    int *link;     /* owned: the first rank's, world_size sockets of which its own is -1; another's,
                      the one to the first. NULL before the join */
    uint8_t *step; /* owned: the first rank's, the progress of each rank (star_first.c) */
} sw_star;

typedef struct sw_gift {
    uint64_t size_bytes;
    uint32_t serial; /* 0: the control pages; else of an arena */
    uint32_t unused;
} sw_gift;

/* Listen, under a name that is written to `address`. */
SW_MUST_USE sw_status sw_star_open(sw_star *star, sw_comm *comm, char address[SW_SOCKET_NAME_BYTES],
                                   sw_error *err);
/* Close all connections. */
void sw_star_close(sw_star *star);

/* The first rank: link all others, whose addresses these are, and give them `fd`. A rank that
 * refuses it fails the join: SW_E_COMM with that rank's sentence. SW_E_MEMORY names `ulimit -n`.
 * Cost: 5 messages a rank; 64 sockets at most of callers without a proof. */
SW_MUST_USE sw_status sw_star_admit(sw_star *star, const char *const *addresses,
                                    const uint8_t *secret, const sw_gift *gift, int fd,
                                    sw_error *err);
/* Another rank: call the first and take its gift, owned by the caller; then call sw_star_answer.
 * SW_E_COMM: the first rank has died or failed, is another process, or is not on this host. */
SW_MUST_USE sw_status sw_star_call(sw_star *star, const char *const *addresses,
                                   const uint8_t *secret, sw_gift *gift, int *fd, sw_error *err);

/* Linked ranks: the first gives `fd` to all; each other rank takes it, then answers. `label`: its
 * name in messages. */
SW_MUST_USE sw_status sw_star_give(sw_star *star, const sw_gift *gift, int fd, const char *label,
                                   sw_error *err);
/* SW_E_MEMORY: the gift came without its file descriptor, because this process has none free. *fd
 * is -1, and the rank must still answer. */
SW_MUST_USE sw_status sw_star_take(sw_star *star, const char *label, sw_gift *gift, int *fd,
                                   sw_error *err);
/* `status` SW_OK: taken. Else the reason why this rank cannot continue. */
SW_MUST_USE sw_status sw_star_answer(sw_star *star, const char *label, uint32_t serial,
                                     sw_status status, const sw_error *reason, sw_error *err);

#endif
