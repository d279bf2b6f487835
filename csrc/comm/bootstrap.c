/* bootstrap.c - see the header. All ranks but the first call, take and answer. The first accepts
 * calls, asks for proofs, gives, and receives answers, in one loop. It serves all processes in
 * turn, so that a slow or silent one delays no other:
 *
 *   rank       not linked -> linked -> has been given -> has answered
 *   unproven   has connected -> has called: at most 5 s, then the connection is closed
 *
 * A later fd message is the same loop without a listener. */
#include "comm/bootstrap.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "platform/clock.h"
#include "platform/limits.h"

/* ---- the proof ---- */

enum { MAGIC = 0x53574833 /* "SWH3": changes with the pages and messages between ranks */ };

typedef struct transcript {
    uint32_t role;
    sw_proof_call call;
    uint8_t listener_nonce[SW_PROOF_NONCE_BYTES];
    char name[SW_SOCKET_NAME_BYTES];
} transcript;

sw_status sw_proof_begin(sw_proof_call *call, int rank, int world_size, sw_error *err)
{
    *call = (sw_proof_call){.magic = MAGIC, .rank = rank, .world_size = world_size};
    return sw_random_fill(call->nonce, sizeof call->nonce, err);
}

/* Return true if a message may be a call of this version. */
static bool is_call(const sw_proof_call *call)
{
    return call->magic == MAGIC;
}

void sw_proof_make(uint8_t proof[SW_SHA256_BYTES], sw_proof_role role, const sw_proof_call *call,
                   const uint8_t *listener_nonce, const char *name, const uint8_t *secret)
{
    transcript exchanged;
    memset(&exchanged, 0, sizeof exchanged); /* padding bytes are compared too */
    exchanged.role = (uint32_t)role;
    exchanged.call = *call;
    memcpy(exchanged.listener_nonce, listener_nonce, sizeof exchanged.listener_nonce);
    memcpy(exchanged.name, name, strnlen(name, sizeof exchanged.name));
    sw_hmac_sha256(secret, SW_PROOF_SECRET_BYTES, &exchanged, sizeof exchanged, proof);
}

sw_status sw_proof_answer_call(sw_proof_answer *answer, const sw_proof_call *call, const char *name,
                               const uint8_t *secret, sw_error *err)
{
    SW_TRY(sw_random_fill(answer->nonce, sizeof answer->nonce, err));
    sw_proof_make(answer->proof, SW_PROOF_LISTENER, call, answer->nonce, name, secret);
    return SW_OK;
}

/* ---- every rank ---- */

enum { LOOK_MS = 100, QUEUE_MIN = 1024, CALLS_MAX = 100, CALL_AGAIN_MS = 20 };

sw_status sw_bootstrap_open(sw_bootstrap *bootstrap, sw_comm *comm,
                            char address[SW_SOCKET_NAME_BYTES], sw_error *err)
{
    int queue = comm->world_size > QUEUE_MIN / 2 ? 2 * comm->world_size : QUEUE_MIN;
    bootstrap->comm = comm;
    /* The queue holds a probe and a call of every peer, and calls of unproven peers; the kernel
     * limits it to net.core.somaxconn. */
    return sw_socket_listen(queue, address, &bootstrap->listener, err);
}

void sw_bootstrap_close(sw_bootstrap *bootstrap)
{
    int count = bootstrap->link && bootstrap->comm->rank == 0 ? bootstrap->comm->world_size
                                                              : !!bootstrap->link;
    for (int r = 0; r < count; ++r)
        sw_socket_close(&bootstrap->link[r]);
    sw_socket_close(&bootstrap->listener);
    free(bootstrap->link);
    free(bootstrap->step);
    bootstrap->link = NULL;
    bootstrap->step = NULL;
}

/* ---- waiting ---- */

sw_bootstrap_wait sw_bootstrap_wait_begin(const sw_bootstrap *bootstrap, void *context,
                                          void (*describe)(void *context, sw_wait_text *text))
{
    sw_wait wait = sw_wait_begin(bootstrap->comm, context, describe);
    return (sw_bootstrap_wait){.bootstrap = bootstrap, .wait = wait, .looked_ns = wait.begun_ns};
}

sw_status sw_bootstrap_look(sw_bootstrap_wait *wait, bool *is_due, sw_error *err)
{
    sw_comm *comm = wait->bootstrap->comm;
    int64_t now_ns = sw_clock_now_ns();
    sw_error reason;
    *is_due = now_ns - wait->looked_ns >= LOOK_MS * INT64_C(1000000);
    if (!*is_due && now_ns - wait->wait.begun_ns < wait->wait.timeout_ns)
        return SW_OK;
    wait->looked_ns = now_ns;
    sw_status status = sw_wait_check(&wait->wait, &reason);
    if (status == SW_E_INTERRUPTED) {
        comm->ops->abort(comm, &reason);
        return sw_wait_interrupted(err);
    }
    if (status != SW_OK)
        return sw_error_pass(err, &reason);
    return comm->ops->look(comm, true, err);
}

/* Return why a linked rank closed its connection; prefer a recorded reason. */
static sw_status name_lost(const sw_bootstrap *bootstrap, int rank, const char *label,
                           sw_error *err)
{
    sw_comm *comm = bootstrap->comm;
    char peer[SW_COMM_PEER_BYTES];
    SW_TRY(comm->ops->look(comm, true, err));
    comm->ops->peer(comm, rank, peer);
    return sw_error_set(err, SW_E_COMM, sw_comm_name(comm, rank),
                        "%s died, exited or left before its part of %s", peer, label);
}

/* Set up a wait for the first rank in operation `what`. */
typedef struct call_wait {
    const sw_bootstrap *bootstrap;
    char what[120];
} call_wait;

static void describe(void *context, sw_wait_text *text)
{
    const call_wait *call = context;
    snprintf(text->what, sizeof text->what, "%s", call->what);
    (void)sw_wait_add_missing(text, call->bootstrap->comm, 0);
}

/* Receive the next message of the first rank. */
static sw_status receive(sw_bootstrap_wait *wait, int socket, void *bytes, size_t size_bytes,
                         int *passed, sw_error *err)
{
    bool received, unused;
    for (;;) {
        struct pollfd watch = {.fd = socket, .events = POLLIN};
        SW_TRY(sw_socket_receive(socket, bytes, size_bytes, passed, &received, err));
        if (received)
            return SW_OK;
        (void)poll(&watch, 1, LOOK_MS);
        SW_TRY(sw_bootstrap_look(wait, &unused, err));
    }
}

static sw_status send(int socket, const void *bytes, size_t size_bytes, sw_error *err)
{
    bool sent;
    SW_TRY(sw_socket_send(socket, bytes, size_bytes, -1, &sent, err));
    if (!sent) /* the first rank receives each message before it asks for the next */
        SW_FAIL(err, SW_E_COMM, "the queue of a peer's socket is full");
    return SW_OK;
}

/* ---- joining ---- */

static sw_status connect(sw_bootstrap_wait *wait, const char *name, int *socket, sw_error *err)
{
    bool unused;
    for (;;) {
        SW_TRY(sw_socket_call(name, socket, err));
        if (*socket >= 0)
            return SW_OK;
        SW_TRY(sw_bootstrap_look(wait, &unused, err));
    }
}

static sw_status prove(sw_bootstrap_wait *wait, int socket, const char *name, const uint8_t *secret,
                       sw_error *err)
{
    const sw_comm *comm = wait->bootstrap->comm;
    sw_proof_call call;
    sw_proof_answer answer;
    uint8_t proof[SW_SHA256_BYTES];
    SW_TRY(sw_proof_begin(&call, comm->rank, comm->world_size, err));
    SW_TRY(send(socket, &call, sizeof call, err));
    SW_TRY(receive(wait, socket, &answer, sizeof answer, NULL, err));
    sw_proof_make(proof, SW_PROOF_LISTENER, &call, answer.nonce, name, secret);
    if (!sw_sha256_equal(proof, answer.proof))
        return sw_error_set(err, SW_E_STATE, sw_comm_name(comm, 0),
                            "the process at rank %d's address does not know the group's secret",
                            sw_comm_name(comm, 0));
    sw_proof_make(proof, SW_PROOF_CALLER, &call, answer.nonce, name, secret);
    return send(socket, proof, sizeof proof, err);
}

/* Make one attempt; SW_E_COMM: the first rank closed the connection or does not listen. */
static sw_status call_once(sw_bootstrap_wait *wait, const char *name, const uint8_t *secret,
                           int *socket, sw_fd_message *fd_message, int *fd, bool *is_there,
                           sw_error *err)
{
    *is_there = false;
    SW_TRY(connect(wait, name, socket, err));
    *is_there = true;
    SW_TRY(prove(wait, *socket, name, secret, err));
    return receive(wait, *socket, fd_message, sizeof *fd_message, fd, err);
}

static sw_status answer(int socket, uint32_t serial, sw_status status, const sw_error *reason,
                        sw_error *err)
{
    sw_bootstrap_answer_message message = {.serial = serial, .status = (int32_t)status};
    if (status != SW_OK)
        snprintf(message.message, sizeof message.message, "%.390s", reason->message);
    return send(socket, &message, sizeof message, err);
}

/* A first rank with too many callers closes the oldest connection; that caller calls again. */
sw_status sw_bootstrap_call(sw_bootstrap *bootstrap, const char *const *addresses,
                            const uint8_t *secret, sw_fd_message *fd_message, int *fd,
                            sw_error *err)
{
    const sw_comm *comm = bootstrap->comm;
    int first = sw_comm_name(comm, 0), socket = -1;
    bool is_there = true;
    sw_error cause;
    sw_status status = SW_E_COMM;
    call_wait context = {.bootstrap = bootstrap};
    snprintf(context.what, sizeof context.what, "%s", SW_BOOTSTRAP_JOINING);
    sw_bootstrap_wait wait = sw_bootstrap_wait_begin(bootstrap, &context, describe);
    for (int call = 0; status == SW_E_COMM && is_there && call < CALLS_MAX; ++call) {
        if (call > 0)
            (void)poll(NULL, 0, CALL_AGAIN_MS);
        sw_socket_close(&socket);
        status = call_once(&wait, addresses[0], secret, &socket, fd_message, fd, &is_there, &cause);
    }
    if (status == SW_OK) {
        bootstrap->link = malloc(sizeof *bootstrap->link);
        if (bootstrap->link) {
            bootstrap->link[0] = socket;
            return SW_OK;
        }
        sw_socket_close(fd);
        status = sw_error_set(&cause, SW_E_MEMORY, -1, "no memory");
    }
    if (status == SW_E_MEMORY) /* the fd message arrived, but there is no file descriptor for it */
        (void)!answer(socket, fd_message->serial, status, &cause, NULL);
    sw_socket_close(&socket);
    if (status == SW_E_TIMEOUT || status == SW_E_INTERRUPTED)
        return sw_error_pass(err, &cause);
    return sw_error_set(err, status == SW_E_STATE ? SW_E_COMM : status, first,
                        "%s: calling rank %d failed: %.350s", SW_BOOTSTRAP_JOINING, first,
                        cause.message);
}

/* ---- messages with a file descriptor ---- */

sw_status sw_bootstrap_take(sw_bootstrap *bootstrap, const char *label, sw_fd_message *fd_message,
                            int *fd, sw_error *err)
{
    sw_error cause;
    call_wait context = {.bootstrap = bootstrap};
    snprintf(context.what, sizeof context.what, "%.100s", label);
    sw_bootstrap_wait wait = sw_bootstrap_wait_begin(bootstrap, &context, describe);
    sw_status status =
        receive(&wait, bootstrap->link[0], fd_message, sizeof *fd_message, fd, &cause);
    if (status == SW_E_COMM && cause.detail < 0) /* a lost connection */
        return name_lost(bootstrap, 0, label, err);
    return status == SW_OK ? SW_OK : sw_error_pass(err, &cause);
}

sw_status sw_bootstrap_answer(sw_bootstrap *bootstrap, const char *label, uint32_t serial,
                              sw_status status, const sw_error *reason, sw_error *err)
{
    return answer(bootstrap->link[0], serial, status, reason, NULL) == SW_OK
               ? SW_OK
               : name_lost(bootstrap, 0, label, err);
}

/* ---- the first rank ---- */

enum { TURN_MS = 100, CROWDED_MS = 1, CALLS_A_TURN = 64, PROBES_MIN = 8, PROBES_PART = 5 };

static const int64_t hello_ns = INT64_C(5000000000), crowded_ns = INT64_C(10000000000);

typedef enum rank_step { NOT_LINKED = 0, LINKED, GIVEN, ANSWERED } rank_step;

typedef struct unproven_peer {
    int socket; /* owned */
    bool has_called;
    int64_t deadline_ns;
    sw_proof_call call;
    sw_proof_answer answer;
} unproven_peer;

typedef struct reception {
    sw_bootstrap *bootstrap;
    const char *const *addresses; /* NULL: all are linked */
    const uint8_t *secret;
    const sw_fd_message *fd_message;
    int fd;
    const char *label;
    uint8_t *step; /* borrowed from the bootstrap: a rank_step a rank */
    int in_flight, answered;
    int probed;               /* the rank whose listener was checked last */
    int64_t crowded_since_ns; /* 0: the kernel accepts messages */
    sw_bootstrap_wait wait;
    unproven_peer unproven[SW_BOOTSTRAP_UNPROVEN]; /* the oldest first */
    int unproven_count;
} reception;

static int name_of(const reception *r, int rank)
{
    return sw_comm_name(r->bootstrap->comm, rank);
}

static void name_missing(void *context, sw_wait_text *text)
{
    const reception *r = context;
    snprintf(text->what, sizeof text->what, "%.100s", r->label);
    for (int k = 1; k < r->bootstrap->comm->world_size; ++k)
        if (r->step[k] != ANSWERED && !sw_wait_add_missing(text, r->bootstrap->comm, k))
            return;
}

/* ---- unproven peers ---- */

/* Remove an unproven peer. `keep`: its socket has become a link. */
static void forget(reception *r, int index, bool keep)
{
    if (!keep)
        sw_socket_close(&r->unproven[index].socket);
    memmove(&r->unproven[index], &r->unproven[index + 1],
            (size_t)(--r->unproven_count - index) * sizeof *r->unproven);
}

static bool is_of_the_job(const reception *r, long uid)
{
    for (int k = 0; k < r->bootstrap->comm->world_size; ++k)
        if (sw_socket_uid_is_of(uid, r->addresses[k]))
            return true;
    return false;
}

static sw_status take_calls(reception *r, sw_error *err)
{
    for (int call = 0; call < CALLS_A_TURN; ++call) {
        int socket;
        sw_status status = sw_socket_accept(r->bootstrap->listener, &socket, err);
        if (status == SW_E_MEMORY && r->unproven_count > 0) {
            forget(r, 0, false);
            continue;
        }
        if (status != SW_OK || socket < 0)
            return status;
        if (!is_of_the_job(r, sw_socket_peer_uid(socket))) {
            sw_socket_close(&socket);
            continue;
        }
        if (r->unproven_count == SW_BOOTSTRAP_UNPROVEN)
            forget(r, 0, false);
        r->unproven[r->unproven_count++] =
            (unproven_peer){.socket = socket, .deadline_ns = sw_clock_now_ns() + hello_ns};
    }
    return SW_OK;
}

/* Link a caller with a valid proof, if the rank and world size that it gives fit. */
static sw_status link_rank(reception *r, const unproven_peer *s, sw_error *err)
{
    int rank = s->call.rank, world_size = r->bootstrap->comm->world_size;
    if (s->call.world_size != world_size || rank < 1 || rank >= world_size ||
        r->step[rank] != NOT_LINKED)
        return sw_error_set(err, SW_E_COMM, rank >= 0 && rank < world_size ? name_of(r, rank) : -1,
                            "%s: a peer joined as number %d of %d of this host, expected a number "
                            "not yet joined of %d",
                            r->label, rank, s->call.world_size, world_size);
    r->bootstrap->link[rank] = s->socket;
    r->step[rank] = LINKED;
    return SW_OK;
}

/* *Returns true if it is still unproven and has sent nothing wrong. */
static sw_status serve_unproven(reception *r, unproven_peer *s, bool *keeps, bool *is_linked,
                                sw_error *err)
{
    uint8_t proof[SW_SHA256_BYTES], expected[SW_SHA256_BYTES];
    const char *name = r->addresses[0];
    bool received, sent;
    *keeps = *is_linked = false;
    if (!s->has_called) {
        if (sw_socket_receive(s->socket, &s->call, sizeof s->call, NULL, &received, NULL) != SW_OK)
            return SW_OK;
        if (received && !is_call(&s->call))
            return SW_OK;
        *keeps = true;
        if (!received)
            return SW_OK;
        s->has_called = true;
        SW_TRY(sw_proof_answer_call(&s->answer, &s->call, name, r->secret, err));
        *keeps =
            sw_socket_send(s->socket, &s->answer, sizeof s->answer, -1, &sent, NULL) == SW_OK &&
            sent;
        return SW_OK;
    }
    if (sw_socket_receive(s->socket, proof, sizeof proof, NULL, &received, NULL) != SW_OK)
        return SW_OK;
    *keeps = !received;
    if (!received)
        return SW_OK;
    sw_proof_make(expected, SW_PROOF_CALLER, &s->call, s->answer.nonce, name, r->secret);
    if (!sw_sha256_equal(proof, expected))
        return SW_OK;
    SW_TRY(link_rank(r, s, err));
    *is_linked = true;
    return SW_OK;
}

static sw_status serve_all_unproven(reception *r, const struct pollfd *polled, sw_error *err)
{
    int64_t now_ns = sw_clock_now_ns();
    /* Go downwards: `polled` has the indices from before any of them is removed. */
    for (int i = r->unproven_count - 1; i >= 0; --i) {
        bool keeps = true, is_linked = false;
        if (polled[i].revents)
            SW_TRY(serve_unproven(r, &r->unproven[i], &keeps, &is_linked, err));
        if (!keeps || now_ns > r->unproven[i].deadline_ns)
            forget(r, i, is_linked);
    }
    return SW_OK;
}

/* Check that ranks that have not called yet are alive: each listens until it has joined. Checks
 * some of them in turn. */
static sw_status look_for_callers(reception *r, sw_error *err)
{
    int world_size = r->bootstrap->comm->world_size, missing = 0;
    for (int k = 1; k < world_size; ++k)
        missing += r->step[k] == NOT_LINKED;
    int budget = missing / PROBES_PART > PROBES_MIN ? missing / PROBES_PART : PROBES_MIN;
    for (int turn = 1; turn < world_size && budget > 0; ++turn) {
        int k = r->probed = 1 + r->probed % (world_size - 1);
        if (r->step[k] != NOT_LINKED)
            continue;
        budget--;
        if (!sw_socket_listens(r->addresses[k]))
            return sw_error_set(err, SW_E_COMM, name_of(r, k),
                                "%s: rank %d died or failed before it had joined", r->label,
                                name_of(r, k));
    }
    return SW_OK;
}

/* ---- ranks ---- */

/* Send as many fd messages as may be in flight. */
static sw_status give(reception *r, sw_error *err)
{
    bool sent = true;
    for (int k = 1;
         k < r->bootstrap->comm->world_size && r->in_flight < SW_BOOTSTRAP_IN_FLIGHT && sent; ++k) {
        if (r->step[k] != LINKED)
            continue;
        if (sw_socket_send(r->bootstrap->link[k], r->fd_message, sizeof *r->fd_message, r->fd,
                           &sent, NULL) != SW_OK)
            return name_lost(r->bootstrap, k, r->label, err);
        if (!sent)
            break;
        r->step[k] = GIVEN;
        r->in_flight++;
    }
    if (sent)
        r->crowded_since_ns = 0;
    else if (r->crowded_since_ns == 0)
        r->crowded_since_ns = sw_clock_now_ns();
    else if (sw_clock_now_ns() - r->crowded_since_ns > crowded_ns)
        SW_FAIL(err, SW_E_MEMORY,
                "%s: for 10 s the kernel has accepted no file descriptor of rank %d to pass on: "
                "other programs of this user have as many in flight as ulimit -n allows",
                r->label, name_of(r, 0));
    return SW_OK;
}

static sw_status receive_answer(reception *r, int rank, sw_error *err)
{
    sw_bootstrap_answer_message answer;
    bool received;
    if (sw_socket_receive(r->bootstrap->link[rank], &answer, sizeof answer, NULL, &received,
                          NULL) != SW_OK)
        return name_lost(r->bootstrap, rank, r->label, err);
    if (!received)
        return SW_OK;
    answer.message[sizeof answer.message - 1] = '\0';
    if (answer.serial != r->fd_message->serial)
        return sw_error_set(err, SW_E_STATE, name_of(r, rank),
                            "%s: rank %d answered to shared memory %u, expected %u", r->label,
                            name_of(r, rank), answer.serial, r->fd_message->serial);
    if (answer.status != SW_OK)
        return sw_error_set(err, SW_E_COMM, name_of(r, rank), "rank %d could not join: %.390s",
                            name_of(r, rank), answer.message);
    r->step[rank] = ANSWERED;
    r->in_flight--;
    r->answered++;
    return SW_OK;
}

static sw_status turn(reception *r, sw_error *err)
{
    struct pollfd watched[1 + SW_BOOTSTRAP_UNPROVEN + SW_BOOTSTRAP_IN_FLIGHT];
    int rank_of[SW_BOOTSTRAP_IN_FLIGHT], given = 0, unproven = r->unproven_count;
    bool is_due;
    struct pollfd *from_unproven = watched + 1, *from_ranks = watched + 1 + unproven;
    watched[0] = (struct pollfd){.fd = r->bootstrap->listener, .events = POLLIN}; /* -1: ignored */
    for (int i = 0; i < unproven; ++i)
        from_unproven[i] = (struct pollfd){.fd = r->unproven[i].socket, .events = POLLIN};
    for (int k = 1; k < r->bootstrap->comm->world_size && given < r->in_flight; ++k) {
        if (r->step[k] != GIVEN)
            continue;
        from_ranks[given] = (struct pollfd){.fd = r->bootstrap->link[k], .events = POLLIN};
        rank_of[given++] = k;
    }
    if (poll(watched, (nfds_t)(1 + unproven + given), r->crowded_since_ns ? CROWDED_MS : TURN_MS) <
            0 &&
        errno != EINTR)
        return sw_error_set(err, SW_E_OS, errno, "poll failed: %s", strerror(errno));
    for (int i = 0; i < given; ++i)
        if (from_ranks[i].revents)
            SW_TRY(receive_answer(r, rank_of[i], err));
    SW_TRY(serve_all_unproven(r, from_unproven, err));
    if (watched[0].revents)
        SW_TRY(take_calls(r, err));
    SW_TRY(give(r, err));
    SW_TRY(sw_bootstrap_look(&r->wait, &is_due, err));
    return is_due && r->addresses ? look_for_callers(r, err) : SW_OK;
}

static sw_status serve(reception *r, rank_step begin, sw_error *err)
{
    sw_bootstrap *bootstrap = r->bootstrap;
    sw_status status = SW_OK;
    r->step = bootstrap->step;
    memset(r->step, (int)begin, (size_t)bootstrap->comm->world_size);
    r->wait = sw_bootstrap_wait_begin(bootstrap, r, name_missing);
    if (begin == LINKED)
        status = give(r, err);
    while (status == SW_OK && r->answered < bootstrap->comm->world_size - 1)
        status = turn(r, err);
    while (r->unproven_count > 0)
        forget(r, 0, false);
    return status;
}

sw_status sw_bootstrap_admit(sw_bootstrap *bootstrap, const char *const *addresses,
                             const uint8_t *secret, const sw_fd_message *fd_message, int fd,
                             sw_error *err)
{
    size_t world_size = (size_t)bootstrap->comm->world_size;
    reception r = {.bootstrap = bootstrap,
                   .addresses = addresses,
                   .secret = secret,
                   .fd_message = fd_message,
                   .fd = fd,
                   .label = SW_BOOTSTRAP_JOINING};
    /* One more for a caller without a proof. */
    SW_TRY(sw_limits_check_descriptors((unsigned)world_size, SW_BOOTSTRAP_JOINING, err));
    bootstrap->link = malloc(world_size * sizeof *bootstrap->link);
    bootstrap->step = malloc(world_size * sizeof *bootstrap->step);
    if (!bootstrap->link || !bootstrap->step) {
        free(bootstrap->link); /* its entries are not set */
        bootstrap->link = NULL;
        SW_FAIL(err, SW_E_MEMORY, "%s: no memory for tables of %zu ranks", SW_BOOTSTRAP_JOINING,
                world_size);
    }
    for (size_t k = 0; k < world_size; ++k)
        bootstrap->link[k] = -1;
    return serve(&r, NOT_LINKED, err);
}

sw_status sw_bootstrap_give(sw_bootstrap *bootstrap, const sw_fd_message *fd_message, int fd,
                            const char *label, sw_error *err)
{
    reception r = {.bootstrap = bootstrap, .fd_message = fd_message, .fd = fd, .label = label};
    return serve(&r, LINKED, err);
}
