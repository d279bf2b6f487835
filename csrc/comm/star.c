/* star.c - the star on all ranks but the first: they call, take and answer. See star.h. */
#include "comm/star.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/proof.h"
#include "comm/star_messages.h"
#include "platform/clock.h"

enum { LOOK_MS = 100, QUEUE_MIN = 1024, CALLS_MAX = 100, CALL_AGAIN_MS = 20 };

sw_status sw_star_open(sw_star *star, sw_comm *comm, char address[SW_SOCKET_NAME_BYTES],
                       sw_error *err)
{
    int queue = comm->world_size > QUEUE_MIN / 2 ? 2 * comm->world_size : QUEUE_MIN;
    star->comm = comm;
    /* The queue holds a probe and a call of every peer, and calls of strangers; the kernel limits
     * it to net.core.somaxconn. */
    return sw_socket_listen(queue, address, &star->listener, err);
}

void sw_star_close(sw_star *star)
{
    int count = star->link && star->comm->rank == 0 ? star->comm->world_size : !!star->link;
    for (int r = 0; r < count; ++r)
        sw_socket_close(&star->link[r]);
    sw_socket_close(&star->listener);
    free(star->link);
    free(star->step);
    star->link = NULL;
    star->step = NULL;
}

/* Waiting
 * ------------------------------------------------------------------------------------------ */

sw_star_wait sw_star_wait_begin(const sw_star *star, void *context,
                                void (*describe)(void *context, sw_wait_text *text))
{
    sw_wait wait = sw_wait_begin(star->comm, context, describe);
    return (sw_star_wait){.star = star, .wait = wait, .looked_ns = wait.begun_ns};
}

sw_status sw_star_look(sw_star_wait *wait, bool *is_due, sw_error *err)
{
    sw_comm *comm = wait->star->comm;
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
        return sw_error_set(err, status, reason.detail, "%s", reason.message);
    return comm->ops->look(comm, true, err);
}

sw_status sw_star_name_lost(const sw_star *star, int rank, const char *label, sw_error *err)
{
    sw_comm *comm = star->comm;
    char peer[SW_COMM_PEER_BYTES];
    SW_TRY(comm->ops->look(comm, true, err));
    comm->ops->peer(comm, rank, peer);
    return sw_error_set(err, SW_E_COMM, sw_comm_name(comm, rank),
                        "%s died, exited or left before its part of %s", peer, label);
}

/* Set up a wait for the first rank in operation `what`. */
typedef struct call_wait {
    const sw_star *star;
    char what[120];
} call_wait;

static void describe(void *context, sw_wait_text *text)
{
    const call_wait *call = context;
    snprintf(text->what, sizeof text->what, "%s", call->what);
    (void)sw_wait_add_missing(text, call->star->comm, 0);
}

/* Receive the next message of the first rank. */
static sw_status receive(sw_star_wait *wait, int socket, void *bytes, size_t size_bytes,
                         int *passed, sw_error *err)
{
    bool received, unused;
    for (;;) {
        struct pollfd watch = {.fd = socket, .events = POLLIN};
        SW_TRY(sw_socket_receive(socket, bytes, size_bytes, passed, &received, err));
        if (received)
            return SW_OK;
        (void)poll(&watch, 1, LOOK_MS);
        SW_TRY(sw_star_look(wait, &unused, err));
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

/* Joining
 * ------------------------------------------------------------------------------------------ */

static sw_status connect(sw_star_wait *wait, const char *name, int *socket, sw_error *err)
{
    bool unused;
    for (;;) {
        SW_TRY(sw_socket_call(name, socket, err));
        if (*socket >= 0)
            return SW_OK;
        SW_TRY(sw_star_look(wait, &unused, err));
    }
}

static sw_status prove(sw_star_wait *wait, int socket, const char *name, const uint8_t *secret,
                       sw_error *err)
{
    const sw_comm *comm = wait->star->comm;
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
static sw_status call_once(sw_star_wait *wait, const char *name, const uint8_t *secret, int *socket,
                           sw_gift *gift, int *fd, bool *is_there, sw_error *err)
{
    *is_there = false;
    SW_TRY(connect(wait, name, socket, err));
    *is_there = true;
    SW_TRY(prove(wait, *socket, name, secret, err));
    return receive(wait, *socket, gift, sizeof *gift, fd, err);
}

static sw_status answer(int socket, uint32_t serial, sw_status status, const sw_error *reason,
                        sw_error *err)
{
    sw_star_answer_message message = {.serial = serial, .status = (int32_t)status};
    if (status != SW_OK)
        snprintf(message.message, sizeof message.message, "%.390s", reason->message);
    return send(socket, &message, sizeof message, err);
}

/* A first rank with too many callers closes the oldest connection; that caller calls again. */
sw_status sw_star_call(sw_star *star, const char *const *addresses, const uint8_t *secret,
                       sw_gift *gift, int *fd, sw_error *err)
{
    const sw_comm *comm = star->comm;
    int first = sw_comm_name(comm, 0), socket = -1;
    bool is_there = true;
    sw_error cause;
    sw_status status = SW_E_COMM;
    call_wait context = {.star = star};
    snprintf(context.what, sizeof context.what, "%s", SW_STAR_JOINING);
    sw_star_wait wait = sw_star_wait_begin(star, &context, describe);
    for (int call = 0; status == SW_E_COMM && is_there && call < CALLS_MAX; ++call) {
        if (call > 0)
            (void)poll(NULL, 0, CALL_AGAIN_MS);
        sw_socket_close(&socket);
        status = call_once(&wait, addresses[0], secret, &socket, gift, fd, &is_there, &cause);
    }
    if (status == SW_OK) {
        star->link = malloc(sizeof *star->link);
        if (star->link) {
            star->link[0] = socket;
            return SW_OK;
        }
        sw_socket_close(fd);
        status = sw_error_set(&cause, SW_E_MEMORY, -1, "no memory");
    }
    if (status == SW_E_MEMORY) /* the gift arrived, but there is no file descriptor for it */
        (void)!answer(socket, gift->serial, status, &cause, NULL);
    sw_socket_close(&socket);
    if (status == SW_E_TIMEOUT || status == SW_E_INTERRUPTED)
        return sw_error_set(err, status, cause.detail, "%s", cause.message);
    return sw_error_set(err, status == SW_E_STATE ? SW_E_COMM : status, first,
                        "%s: calling rank %d failed: %.350s", SW_STAR_JOINING, first,
                        cause.message);
}

/* Gifts
 * ------------------------------------------------------------------------------------------ */

sw_status sw_star_take(sw_star *star, const char *label, sw_gift *gift, int *fd, sw_error *err)
{
    sw_error cause;
    call_wait context = {.star = star};
    snprintf(context.what, sizeof context.what, "%.100s", label);
    sw_star_wait wait = sw_star_wait_begin(star, &context, describe);
    sw_status status = receive(&wait, star->link[0], gift, sizeof *gift, fd, &cause);
    if (status == SW_E_COMM && cause.detail < 0) /* a lost connection */
        return sw_star_name_lost(star, 0, label, err);
    return status == SW_OK ? SW_OK
                           : sw_error_set(err, cause.status, cause.detail, "%s", cause.message);
}

sw_status sw_star_answer(sw_star *star, const char *label, uint32_t serial, sw_status status,
                         const sw_error *reason, sw_error *err)
{
    return answer(star->link[0], serial, status, reason, NULL) == SW_OK
               ? SW_OK
               : sw_star_name_lost(star, 0, label, err);
}
