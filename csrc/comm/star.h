/* star.h - the connections of a host's ranks: one from each rank to the first, through which it
 * gets descriptors. See docs/design/comm.md.
 *
 * Idea: the first rank makes what all share, and passes it. A caller proves that it knows the
 * group's secret, and is proved to, before anything else is said; then it is *linked*. A descriptor
 * is a *gift*: the kernel counts it as in flight until it is received, so of each gift at most 16
 * are on their way, and the next is sent when a rank has said that it has taken its own.
 *
 * What it leaves out: what the descriptors are (shm.h), whether a peer lives (comm->ops->look).
 *
 * Thread rule: one at a time a star.
 */
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
    uint8_t *step; /* owned: the first rank's, how far each rank is (star_first.c) */
} sw_star;

typedef struct sw_gift {
    uint64_t size_bytes;
    uint32_t serial; /* 0: the control pages; else of an arena */
    uint32_t unused;
} sw_gift;

/* Listens, under a name that is written to `address`. */
SW_MUST_USE sw_status sw_star_open(sw_star *star, sw_comm *comm, char address[SW_SOCKET_NAME_BYTES],
                                   sw_error *err);
/* Closes all connections. */
void sw_star_close(sw_star *star);

/* The first rank: links all others, whose addresses these are, and gives them `fd`. A rank that
 * refuses it fails the join: SW_E_COMM with that rank's sentence. SW_E_MEMORY names `ulimit -n`.
 * Cost: 5 messages a rank; 64 sockets at most of callers that have not proved themselves. */
SW_MUST_USE sw_status sw_star_admit(sw_star *star, const char *const *addresses,
                                    const uint8_t *secret, const sw_gift *gift, int fd,
                                    sw_error *err);
/* Another rank: calls the first, and takes what it gives, owned by the caller. sw_star_answer comes
 * next. SW_E_COMM: the first rank has died or failed, is another process, or is not on this host.
 */
SW_MUST_USE sw_status sw_star_call(sw_star *star, const char *const *addresses,
                                   const uint8_t *secret, sw_gift *gift, int *fd, sw_error *err);

/* Of linked ranks: the first gives `fd` to all, and each other takes it, then answers. `label` is
 * what messages call it. */
SW_MUST_USE sw_status sw_star_give(sw_star *star, const sw_gift *gift, int fd, const char *label,
                                   sw_error *err);
/* SW_E_MEMORY: the gift has come without its descriptor, for which this process has no room (*fd is
 * -1; the answer is due all the same). */
SW_MUST_USE sw_status sw_star_take(sw_star *star, const char *label, sw_gift *gift, int *fd,
                                   sw_error *err);
/* `status` SW_OK: taken. Else the reason why this rank cannot go on. */
SW_MUST_USE sw_status sw_star_answer(sw_star *star, const char *label, uint32_t serial,
                                     sw_status status, const sw_error *reason, sw_error *err);

#endif
