/* bootstrap.h - how the ranks of a host meet: each proves to the first, the root, that it knows the
 * group's secret, and gets file descriptors from it. See docs/design/comm.md.
 *
 * Idea: the root creates shared memory and passes it on over a *star of links*, one connection from
 * each rank to it. Caller and listener first prove to each other that they know the secret, without
 * sending it; then the caller is *linked*. A file descriptor is passed in an *fd message*. The
 * kernel counts fd messages in flight until they are received, so at most 16 copies of an fd
 * message are in flight, and the next one is sent when a rank has answered.
 *
 * A proof: each process draws a nonce. It sends the HMAC-SHA-256, with the secret as key, of both
 * nonces, its role, the caller's rank and the listener's name. So no message can be replayed, used
 * in another role or for another rank, or forwarded by a process that impersonates the listener.
 *
 * Left out: the memory behind the file descriptors (shm.h), the liveness of a peer
 * (comm->ops->look).
 *
 * Thread rule: one at a time per bootstrap; a proof: any. */
#pragma once

#include "base/sha256.h"
#include "comm/wait.h"
#include "platform/socket.h"

/* ---- the proof ---- */

enum { SW_PROOF_SECRET_BYTES = 16, SW_PROOF_NONCE_BYTES = 16 };

typedef struct sw_proof_call { /* the caller's first message */
    uint32_t magic;            /* the version of the pages and messages */
    int32_t rank, world_size;
    uint8_t nonce[SW_PROOF_NONCE_BYTES];
} sw_proof_call;

typedef struct sw_proof_answer { /* the listener's */
    uint8_t nonce[SW_PROOF_NONCE_BYTES];
    uint8_t proof[SW_SHA256_BYTES];
} sw_proof_answer;

typedef enum sw_proof_role { SW_PROOF_CALLER = 1, SW_PROOF_LISTENER } sw_proof_role;

SW_MUST_USE sw_status sw_proof_begin(sw_proof_call *call, int rank, int world_size, sw_error *err);
/* Draw the listener's nonce and compute its proof. */
SW_MUST_USE sw_status sw_proof_answer_call(sw_proof_answer *answer, const sw_proof_call *call,
                                           const char *name, const uint8_t *secret, sw_error *err);
/* Compute the proof that `role` must send in this exchange. */
void sw_proof_make(uint8_t proof[SW_SHA256_BYTES], sw_proof_role role, const sw_proof_call *call,
                   const uint8_t *listener_nonce, const char *name, const uint8_t *secret);

/* ---- the links ---- */

enum { SW_BOOTSTRAP_IN_FLIGHT = 16, SW_BOOTSTRAP_UNPROVEN = 64 };

typedef struct sw_bootstrap {
    sw_comm *comm; /* borrowed: rank (0: the first), world_size, names, deadline, hooks, look */
    int listener;  /* owned; -1 once joined */
    int *link;     /* owned: the first rank's, world_size sockets of which its own is -1; another's,
                      the one to the first. NULL before the join */
    uint8_t *step; /* owned: the first rank's, the progress of each rank */
} sw_bootstrap;

typedef struct sw_fd_message {
    uint64_t size_bytes;
    uint32_t serial; /* 0: the control pages; else of an arena */
    uint32_t unused;
} sw_fd_message;

/* Listen, under a name that is written to `address`. */
SW_MUST_USE sw_status sw_bootstrap_open(sw_bootstrap *bootstrap, sw_comm *comm,
                                        char address[SW_SOCKET_NAME_BYTES], sw_error *err);
/* Close all connections. */
void sw_bootstrap_close(sw_bootstrap *bootstrap);

/* The first rank: link all others, whose addresses these are, and give them `fd`. A rank that
 * refuses it fails the join: SW_E_COMM with that rank's sentence. SW_E_MEMORY names `ulimit -n`.
 * Cost: 5 messages a rank; 64 sockets at most of callers without a proof. */
SW_MUST_USE sw_status sw_bootstrap_admit(sw_bootstrap *bootstrap, const char *const *addresses,
                                         const uint8_t *secret, const sw_fd_message *fd_message,
                                         int fd, sw_error *err);
/* Another rank: call the first and take its fd message, owned by the caller; then call
 * sw_bootstrap_answer. SW_E_COMM: the first rank has died or failed, is another process, or is not
 * on this host. */
SW_MUST_USE sw_status sw_bootstrap_call(sw_bootstrap *bootstrap, const char *const *addresses,
                                        const uint8_t *secret, sw_fd_message *fd_message, int *fd,
                                        sw_error *err);

/* Linked ranks: the first gives `fd` to all; each other rank takes it, then answers. `label`: its
 * name in messages. */
SW_MUST_USE sw_status sw_bootstrap_give(sw_bootstrap *bootstrap, const sw_fd_message *fd_message,
                                        int fd, const char *label, sw_error *err);
/* SW_E_MEMORY: the fd message came without its file descriptor, because this process has none free.
 * *fd is -1, and the rank must still answer. */
SW_MUST_USE sw_status sw_bootstrap_take(sw_bootstrap *bootstrap, const char *label,
                                        sw_fd_message *fd_message, int *fd, sw_error *err);
/* `status` SW_OK: taken. Else the reason why this rank cannot continue. */
SW_MUST_USE sw_status sw_bootstrap_answer(sw_bootstrap *bootstrap, const char *label,
                                          uint32_t serial, sw_status status, const sw_error *reason,
                                          sw_error *err);

/* ---- what its messages and waits are made of: for shm.c and the tests of unproven peers ---- */

static const char SW_BOOTSTRAP_JOINING[] = "joining the ranks of this host";

typedef struct sw_bootstrap_answer_message { /* to an fd message */
    uint32_t serial;
    int32_t status; /* sw_status: SW_OK if it was taken */
    char message[400];
} sw_bootstrap_answer_message;

/* A wait that ten times a second checks the clock, the program's signals and the linked peers. */
typedef struct sw_bootstrap_wait {
    const sw_bootstrap *bootstrap;
    sw_wait wait;
    int64_t looked_ns;
} sw_bootstrap_wait;

sw_bootstrap_wait sw_bootstrap_wait_begin(const sw_bootstrap *bootstrap, void *context,
                                          void (*describe)(void *context, sw_wait_text *text));
/* *is_due: true if it checked. An interrupted wait ends the communicator. */
SW_MUST_USE sw_status sw_bootstrap_look(sw_bootstrap_wait *wait, bool *is_due, sw_error *err);
