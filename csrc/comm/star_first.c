/* star_first.c - the first rank's loop: it accepts calls, asks for proofs, gives, and receives
 * answers. It serves all processes in turn, so that a slow or silent one delays no other.
 *
 *   rank       not linked -> linked -> has been given -> has answered
 *   stranger   has connected -> has called: at most 5 s, then the connection is closed
 *
 * A later gift is the same loop without a listener. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/proof.h"
#include "comm/star_messages.h"
#include "platform/clock.h"
#include "platform/limits.h"

enum { TURN_MS = 100, CROWDED_MS = 1, CALLS_A_TURN = 64, PROBES_MIN = 8, PROBES_PART = 5 };

static const int64_t hello_ns = INT64_C(5000000000), crowded_ns = INT64_C(10000000000);

typedef enum rank_step { NOT_LINKED = 0, LINKED, GIVEN, ANSWERED } rank_step;

typedef struct stranger {
    int socket; /* owned */
    bool has_called;
    int64_t deadline_ns;
    sw_proof_call call;
    sw_proof_answer answer;
} stranger;

typedef struct reception {
    sw_star *star;
    const char *const *addresses; /* NULL: all are linked */
    const uint8_t *secret;
    const sw_gift *gift;
    int fd;
    const char *label;
    uint8_t *step; /* borrowed from the star: a rank_step a rank */
    int in_flight, answered;
    int probed;               /* the rank whose listener was checked last */
    int64_t crowded_since_ns; /* 0: the kernel accepts messages */
    sw_star_wait wait;
    stranger strangers[SW_STAR_STRANGERS]; /* the oldest first */
    int stranger_count;
} reception;

static int name_of(const reception *r, int rank)
{
    return sw_comm_name(r->star->comm, rank);
}

static void describe(void *context, sw_wait_text *text)
{
    const reception *r = context;
    snprintf(text->what, sizeof text->what, "%.100s", r->label);
    for (int k = 1; k < r->star->comm->world_size; ++k)
        if (r->step[k] != ANSWERED && !sw_wait_add_missing(text, r->star->comm, k))
            return;
}

/* Strangers
 * ------------------------------------------------------------------------------------------ */

/* Remove a stranger. `keep`: its socket has become a link. */
static void forget(reception *r, int index, bool keep)
{
    if (!keep)
        sw_socket_close(&r->strangers[index].socket);
    memmove(&r->strangers[index], &r->strangers[index + 1],
            (size_t)(--r->stranger_count - index) * sizeof *r->strangers);
}

static bool is_of_the_job(const reception *r, long uid)
{
    for (int k = 0; k < r->star->comm->world_size; ++k)
        if (sw_socket_uid_is_of(uid, r->addresses[k]))
            return true;
    return false;
}

static sw_status take_calls(reception *r, sw_error *err)
{
    for (int call = 0; call < CALLS_A_TURN; ++call) {
        int socket;
        sw_status status = sw_socket_accept(r->star->listener, &socket, err);
        if (status == SW_E_MEMORY && r->stranger_count > 0) {
            forget(r, 0, false);
            continue;
        }
        if (status != SW_OK || socket < 0)
            return status;
        if (!is_of_the_job(r, sw_socket_peer_uid(socket))) {
            sw_socket_close(&socket);
            continue;
        }
        if (r->stranger_count == SW_STAR_STRANGERS)
            forget(r, 0, false);
        r->strangers[r->stranger_count++] =
            (stranger){.socket = socket, .deadline_ns = sw_clock_now_ns() + hello_ns};
    }
    return SW_OK;
}

/* Link a caller with a valid proof, if the rank and world size that it gives fit. */
static sw_status link_rank(reception *r, const stranger *s, sw_error *err)
{
    int rank = s->call.rank, world_size = r->star->comm->world_size;
    if (s->call.world_size != world_size || rank < 1 || rank >= world_size ||
        r->step[rank] != NOT_LINKED)
        return sw_error_set(err, SW_E_COMM, rank >= 0 && rank < world_size ? name_of(r, rank) : -1,
                            "%s: a peer joined as number %d of %d of this host, expected a number "
                            "not yet joined of %d",
                            r->label, rank, s->call.world_size, world_size);
    r->star->link[rank] = s->socket;
    r->step[rank] = LINKED;
    return SW_OK;
}

/* *Returns true if it is still a stranger and has sent nothing wrong. */
static sw_status serve_stranger(reception *r, stranger *s, bool *keeps, bool *is_linked,
                                sw_error *err)
{
    uint8_t proof[SW_SHA256_BYTES], expected[SW_SHA256_BYTES];
    const char *name = r->addresses[0];
    bool received, sent;
    *keeps = *is_linked = false;
    if (!s->has_called) {
        if (sw_socket_receive(s->socket, &s->call, sizeof s->call, NULL, &received, NULL) != SW_OK)
            return SW_OK;
        if (received && !sw_proof_is_call(&s->call))
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

static sw_status serve_strangers(reception *r, const struct pollfd *polled, sw_error *err)
{
    int64_t now_ns = sw_clock_now_ns();
    /* Go downwards: `polled` has the indices from before any of them is removed. */
    for (int i = r->stranger_count - 1; i >= 0; --i) {
        bool keeps = true, is_linked = false;
        if (polled[i].revents)
            SW_TRY(serve_stranger(r, &r->strangers[i], &keeps, &is_linked, err));
        if (!keeps || now_ns > r->strangers[i].deadline_ns)
            forget(r, i, is_linked);
    }
    return SW_OK;
}

/* Check that ranks that have not called yet are alive: each listens until it has joined. Checks
 * some of them in turn. */
static sw_status look_for_callers(reception *r, sw_error *err)
{
    int world_size = r->star->comm->world_size, missing = 0;
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

/* Ranks
 * ------------------------------------------------------------------------------------------ */

/* Send as many gifts as may be in flight. */
static sw_status give(reception *r, sw_error *err)
{
    bool sent = true;
    for (int k = 1; k < r->star->comm->world_size && r->in_flight < SW_STAR_IN_FLIGHT && sent;
         ++k) {
        if (r->step[k] != LINKED)
            continue;
        if (sw_socket_send(r->star->link[k], r->gift, sizeof *r->gift, r->fd, &sent, NULL) != SW_OK)
            return sw_star_name_lost(r->star, k, r->label, err);
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
    sw_star_answer_message answer;
    bool received;
    if (sw_socket_receive(r->star->link[rank], &answer, sizeof answer, NULL, &received, NULL) !=
        SW_OK)
        return sw_star_name_lost(r->star, rank, r->label, err);
    if (!received)
        return SW_OK;
    answer.message[sizeof answer.message - 1] = '\0';
    if (answer.serial != r->gift->serial)
        return sw_error_set(err, SW_E_STATE, name_of(r, rank),
                            "%s: rank %d answered to shared memory %u, expected %u", r->label,
                            name_of(r, rank), answer.serial, r->gift->serial);
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
    struct pollfd watched[1 + SW_STAR_STRANGERS + SW_STAR_IN_FLIGHT];
    int rank_of[SW_STAR_IN_FLIGHT], given = 0, strangers = r->stranger_count;
    bool is_due;
    struct pollfd *from_strangers = watched + 1, *from_ranks = watched + 1 + strangers;
    watched[0] = (struct pollfd){.fd = r->star->listener, .events = POLLIN}; /* -1: ignored */
    for (int i = 0; i < strangers; ++i)
        from_strangers[i] = (struct pollfd){.fd = r->strangers[i].socket, .events = POLLIN};
    for (int k = 1; k < r->star->comm->world_size && given < r->in_flight; ++k) {
        if (r->step[k] != GIVEN)
            continue;
        from_ranks[given] = (struct pollfd){.fd = r->star->link[k], .events = POLLIN};
        rank_of[given++] = k;
    }
    if (poll(watched, (nfds_t)(1 + strangers + given), r->crowded_since_ns ? CROWDED_MS : TURN_MS) <
            0 &&
        errno != EINTR)
        return sw_error_set(err, SW_E_OS, errno, "poll failed: %s", strerror(errno));
    for (int i = 0; i < given; ++i)
        if (from_ranks[i].revents)
            SW_TRY(receive_answer(r, rank_of[i], err));
    SW_TRY(serve_strangers(r, from_strangers, err));
    if (watched[0].revents)
        SW_TRY(take_calls(r, err));
    SW_TRY(give(r, err));
    SW_TRY(sw_star_look(&r->wait, &is_due, err));
    return is_due && r->addresses ? look_for_callers(r, err) : SW_OK;
}

static sw_status serve(reception *r, rank_step begin, sw_error *err)
{
    sw_star *star = r->star;
    sw_status status = SW_OK;
    r->step = star->step;
    memset(r->step, (int)begin, (size_t)star->comm->world_size);
    r->wait = sw_star_wait_begin(star, r, describe);
    if (begin == LINKED)
        status = give(r, err);
    while (status == SW_OK && r->answered < star->comm->world_size - 1)
        status = turn(r, err);
    while (r->stranger_count > 0)
        forget(r, 0, false);
    return status;
}

sw_status sw_star_admit(sw_star *star, const char *const *addresses, const uint8_t *secret,
                        const sw_gift *gift, int fd, sw_error *err)
{
    size_t world_size = (size_t)star->comm->world_size;
    reception r = {.star = star,
                   .addresses = addresses,
                   .secret = secret,
                   .gift = gift,
                   .fd = fd,
                   .label = SW_STAR_JOINING};
    /* One more for a caller without a proof. */
    SW_TRY(sw_limits_check_descriptors((unsigned)world_size, SW_STAR_JOINING, err));
    star->link = malloc(world_size * sizeof *star->link);
    star->step = malloc(world_size * sizeof *star->step);
    if (!star->link || !star->step) {
        free(star->link); /* its entries are not set */
        star->link = NULL;
        SW_FAIL(err, SW_E_MEMORY, "%s: no memory for tables of %zu ranks", SW_STAR_JOINING,
                world_size);
    }
    for (size_t k = 0; k < world_size; ++k)
        star->link[k] = -1;
    return serve(&r, NOT_LINKED, err);
}

sw_status sw_star_give(sw_star *star, const sw_gift *gift, int fd, const char *label, sw_error *err)
{
    reception r = {.star = star, .gift = gift, .fd = fd, .label = label};
    return serve(&r, LINKED, err);
}
