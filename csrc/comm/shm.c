/* shm.c - joining, passing memory, watching peers. The protocol itself is the fabric's. */
#include "comm/shm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/fabric.h"
#include "platform/clock.h"
#include "platform/limits.h"
#include "platform/memory.h"
#include "platform/process.h"

enum { HELLO_MAGIC = 0x53574832 /* "SWH2": changes when a page or a message between ranks does */ };

typedef struct hello {
    uint32_t magic;
    int32_t rank, world_size;
    int32_t has_pidfd;
    uint64_t control_bytes;
    uint8_t secret[SW_SHM_SECRET_BYTES];
} hello;

typedef struct peer_link {
    int socket;  /* owned; -1: none (self) */
    int pidfd;   /* owned; -1: refused, then */
    int lock_fd; /* owned: its control memfd, which it holds locked while it lives; -1: not needed
                  */
} peer_link;

typedef struct shm_arena {
    sw_arena arena; /* first */
    int own_fd;     /* owned: of this rank's part; -1 in a forked child */
    int lowest_fd;  /* owned: of rank 0's, which holds what the host has one copy of; -1: the
                       same, or a forked child */
    struct shm_arena *next; /* in shm->arenas */
} shm_arena;

/* What passes a part of an arena. */
typedef struct arena_part {
    uint64_t size_bytes;
    uint32_t serial, unused;
} arena_part;

typedef struct shm_comm {
    sw_fabric fabric;             /* first */
    shm_arena *arenas;            /* not owned: all that live */
    sw_control **control;         /* owned, mapped blocks included */
    peer_link *link;              /* owned, world_size */
    int listener;                 /* owned; -1 once connected */
    int control_fd;               /* owned, and locked by this process while it is open */
    int pidfd;                    /* owned; on this process */
    int owner_pid;                /* who may tell the group that it leaves */
    int *names;                   /* owned; NULL unless narrowed */
    const char *const *addresses; /* borrowed while joining */
    sw_patience patience;         /* while joining */
} shm_comm;

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static bool peer_ended(sw_fabric *fabric, int rank)
{
    const peer_link *link = &((shm_comm *)fabric)->link[rank];
    return sw_process_has_ended(link->pidfd) || sw_process_lock_is_free(link->lock_fd);
}

static void destroy(sw_comm *comm)
{
    shm_comm *shm = (shm_comm *)comm;
    if (!comm)
        return;
    /* A forked child has a copy of everything: it must not speak for its parent. */
    if (getpid() != shm->owner_pid)
        shm->fabric.ended = SW_E_STATE;
    sw_fabric_fini(&shm->fabric);
    for (int r = 0; r < comm->world_size; ++r) {
        if (shm->control)
            sw_memory_unmap((uint8_t *)shm->control[r], sizeof(sw_control));
        if (shm->link) {
            close_fd(&shm->link[r].socket);
            close_fd(&shm->link[r].pidfd);
            close_fd(&shm->link[r].lock_fd);
        }
    }
    close_fd(&shm->listener);
    close_fd(&shm->control_fd);
    close_fd(&shm->pidfd);
    free(shm->control);
    free(shm->link);
    free(shm->names);
    free(shm);
}

typedef struct arena_verdict {
    uint64_t size_bytes;
    sw_memory_need need;
    uint32_t failed;
    char message[244];
} arena_verdict;

/* Tells every rank whether `local` succeeded here, and fails everywhere alike if it did not
 * somewhere. */
static sw_status agree(sw_comm *comm, const char *label, size_t size_bytes, sw_status local,
                       const sw_error *cause, sw_error *err)
{
    arena_verdict mine = {.size_bytes = size_bytes, .failed = local != SW_OK};
    sw_limits_read_need(size_bytes, &mine.need);
    arena_verdict *all = calloc((size_t)comm->world_size, sizeof *all);
    if (!all)
        return sw_comm_give_up(comm, SW_E_MEMORY, err, "no memory to agree on arena '%s'", label);
    if (local != SW_OK)
        snprintf(mine.message, sizeof mine.message, "%.240s", cause->message);
    sw_status status = comm->ops->gather(comm, &mine, sizeof mine, all, label, err);
    for (int r = 1; status == SW_OK && r < comm->world_size; ++r)
        if (all[r].size_bytes != all[0].size_bytes)
            status =
                sw_comm_arena_differs(comm, label, all[0].size_bytes, r, all[r].size_bytes, err);
    for (int r = 0; status == SW_OK && r < comm->world_size; ++r)
        if (all[r].failed)
            status = sw_error_set(err, SW_E_MEMORY, sw_comm_name(comm, r),
                                  "arena '%s' is not possible on rank %d: %s", label,
                                  sw_comm_name(comm, r), all[r].message);
    if (status == SW_OK)
        status = sw_limits_check_needs(&all[0].need, sizeof *all, comm->world_size, label, err);
    free(all);
    return status;
}

typedef struct awaited {
    shm_comm *shm;
    int rank; /* of the peer whose message is awaited */
} awaited;

static sw_status look_for_peer(void *context, sw_error *err)
{
    const awaited *await = context;
    sw_comm *comm = &await->shm->fabric.comm;
    const sw_control *control = await->shm->fabric.control[await->rank];
    char peer[SW_COMM_PEER_BYTES];
    if (comm->hooks.interrupted && comm->hooks.interrupted(comm->hooks.context))
        SW_FAIL(err, SW_E_INTERRUPTED, "interrupted while waiting for a peer");
    if (atomic_load(&control->state) == SW_MEMBER_ENDED) { /* it gave up on this very arena */
        sw_error reason = control->reason;
        reason.message[sizeof reason.message - 1] = '\0';
        return sw_fabric_end(&await->shm->fabric, &reason, err);
    }
    if (atomic_load(&control->state) == SW_MEMBER_ACTIVE &&
        !peer_ended(&await->shm->fabric, await->rank))
        return SW_OK;
    sw_fabric_peer(comm, await->rank, peer);
    return sw_error_set(err, SW_E_COMM, sw_comm_name(comm, await->rank),
                        "%s died, exited or left before it had passed its memory", peer);
}

static sw_status send_part(shm_comm *shm, const shm_arena *made, sw_error *err)
{
    const sw_comm *comm = &shm->fabric.comm;
    arena_part part = {.size_bytes = made->arena.size_bytes, .serial = made->arena.serial};
    for (int r = 0; r < comm->world_size; ++r)
        if (r != comm->rank)
            SW_TRY(sw_socket_send(shm->link[r].socket, &part, sizeof part, &made->own_fd, 1, err));
    return SW_OK;
}

/* Maps what `rank` has sent. A part that cannot be mapped here is `*refused`, and no error yet: the
 * others have sent theirs, which must not wait in their sockets for the next arena. */
static sw_status receive_part(shm_comm *shm, shm_arena *made, int rank, int64_t deadline_ns,
                              sw_status *refused, sw_error *cause, sw_error *err)
{
    sw_arena *arena = &made->arena;
    arena_part part;
    int fd = -1;
    awaited await = {.shm = shm, .rank = rank};
    sw_patience patience = {.deadline_ns = deadline_ns, .look = look_for_peer, .context = &await};
    SW_TRY(sw_socket_receive(shm->link[rank].socket, &part, sizeof part, &fd, 1, &patience, err));
    if (part.serial != arena->serial || part.size_bytes != arena->size_bytes) {
        close_fd(&fd);
        return sw_error_set(err, SW_E_STATE, rank,
                            "rank %d passed %llu bytes of shared memory %u, expected %zu bytes of "
                            "%u",
                            sw_comm_name(&shm->fabric.comm, rank),
                            (unsigned long long)part.size_bytes, part.serial, arena->size_bytes,
                            arena->serial);
    }
    if (*refused == SW_OK)
        *refused = sw_memfd_map(fd, arena->size_bytes, &arena->base[rank], cause);
    if (rank == 0 && *refused == SW_OK)
        made->lowest_fd = fd;
    else
        close_fd(&fd);
    return SW_OK;
}

/* To all, and from all. An error ends the communicator, for all; what this rank alone cannot map is
 * `*refused`, with `cause`. */
static sw_status exchange_parts(shm_comm *shm, shm_arena *made, sw_status *refused, sw_error *cause,
                                sw_error *err)
{
    sw_comm *comm = &shm->fabric.comm;
    int64_t deadline_ns = sw_clock_now_ns() + comm->timeout_ns;
    sw_error why;
    sw_status status = send_part(shm, made, &why);
    for (int r = 0; status == SW_OK && r < comm->world_size; ++r)
        if (r != comm->rank)
            status = receive_part(shm, made, r, deadline_ns, refused, cause, &why);
    if (status == SW_OK)
        return SW_OK;
    (void)sw_comm_give_up(comm, status == SW_E_INTERRUPTED ? SW_E_COMM : status, NULL, "%s",
                          why.message);
    if (err)
        *err = why;
    return status;
}

static void unlink_arena(shm_comm *shm, const shm_arena *gone)
{
    for (shm_arena **at = &shm->arenas; *at; at = &(*at)->next)
        if (*at == gone) {
            *at = gone->next;
            return;
        }
}

static void arena_destroy(sw_comm *comm, sw_arena *arena)
{
    shm_arena *gone = (shm_arena *)arena;
    if (!arena)
        return;
    unlink_arena((shm_comm *)comm, gone);
    for (int r = 0; r < comm->world_size; ++r)
        sw_memory_unmap(arena->base[r], arena->size_bytes);
    close_fd(&gone->own_fd);
    close_fd(&gone->lowest_fd);
    free(arena->base);
    free(gone);
}

/* This rank's part. */
static sw_status make_part(sw_comm *comm, size_t size_bytes, const char *label, shm_arena **arena,
                           sw_error *err)
{
    uint32_t serial = ++comm->arenas;
    shm_arena *made = calloc(1, sizeof *made);
    uint8_t **base = calloc((size_t)comm->world_size, sizeof *base);
    if (!made || !base) {
        free(made);
        free(base);
        SW_FAIL(err, SW_E_MEMORY, "no memory for its tables");
    }
    made->arena = (sw_arena){
        .size_bytes = size_bytes, .base = base, .world_size = comm->world_size, .serial = serial};
    made->own_fd = made->lowest_fd = -1;
    sw_status status = sw_memfd_create(size_bytes, label, &made->own_fd, err);
    if (status == SW_OK)
        status = sw_memfd_map(made->own_fd, size_bytes, &base[comm->rank], err);
    if (status != SW_OK) {
        arena_destroy(comm, &made->arena);
        return status;
    }
    *arena = made;
    return SW_OK;
}

static sw_status arena_create(sw_comm *comm, size_t size_bytes, const char *label, sw_arena **arena,
                              sw_error *err)
{
    shm_comm *shm = (shm_comm *)comm;
    shm_arena *made = NULL;
    sw_error cause;
    sw_status status = make_part(comm, size_bytes, label, &made, &cause), refused = SW_OK;
    SW_TRY_GOTO(status, agree(comm, label, size_bytes, status, &cause, err), undo);
    SW_TRY_GOTO(status, exchange_parts(shm, made, &refused, &cause, err), undo);
    SW_TRY_GOTO(status, agree(comm, label, size_bytes, refused, &cause, err), undo);
    made->next = shm->arenas;
    shm->arenas = made;
    *arena = &made->arena;
    return SW_OK;
undo:
    arena_destroy(comm, made ? &made->arena : NULL);
    return status;
}

/* The parts that tensors lie in show the parent's pages from here on, until this process writes to
 * them. Others are read and written by the engine alone, which works in the parent only. */
static sw_status forked(sw_comm *comm, sw_error *err)
{
    shm_comm *shm = (shm_comm *)comm;
    sw_status status = SW_OK;
    for (shm_arena *each = shm->arenas; each; each = each->next) {
        sw_arena *arena = &each->arena;
        if (each->own_fd >= 0 && status == SW_OK)
            status = sw_memory_remap(arena->base[comm->rank], arena->size_bytes, each->own_fd, 0,
                                     false, err);
        if (each->lowest_fd >= 0 && status == SW_OK)
            status =
                sw_memory_remap(arena->base[0], arena->size_bytes, each->lowest_fd, 0, false, err);
        close_fd(&each->own_fd);
        close_fd(&each->lowest_fd);
    }
    if (shm->fabric.ended == SW_OK)
        shm->fabric.ended = sw_error_set(&shm->fabric.reason, SW_E_STATE, -1,
                                         "this process was forked from the one that joined");
    return status;
}

static const sw_comm_ops shm_ops = {
    .arena_create = arena_create,
    .mirror_create = arena_create,
    .arena_destroy = arena_destroy,
    .post = sw_fabric_post,
    .poll = sw_fabric_poll,
    .wait = sw_fabric_wait,
    .run = sw_fabric_run,
    .gather = sw_fabric_gather,
    .abort = sw_fabric_abort,
    .request_end = sw_fabric_request_end,
    .look = sw_fabric_look,
    .peer = sw_fabric_peer,
    .is_alive = sw_fabric_is_alive,
    .leave = sw_fabric_leave,
    .forked = forked,
    .destroy = destroy,
};

static sw_status open_own(shm_comm *shm, const char *host, char address[SW_SOCKET_NAME_BYTES],
                          sw_error *err)
{
    sw_comm *comm = &shm->fabric.comm;
    sw_control **own = &shm->control[comm->rank];
    /* A socket and a pidfd a peer, its memfd while it is mapped, and our own four. */
    SW_TRY(
        sw_limits_check_descriptors((unsigned)comm->world_size * 2 + 6, "host communicator", err));
    SW_TRY(sw_memfd_create(sizeof(sw_control), "host communicator", &shm->control_fd, err));
    SW_TRY(sw_memfd_map(shm->control_fd, sizeof(sw_control), (uint8_t **)own, err));
    (*own)->pid = (int32_t)getpid();
    snprintf((*own)->host, sizeof(*own)->host, "%s", host);
    shm->pidfd = sw_process_open_self();
    if (!sw_process_hold_lock(shm->control_fd) && shm->pidfd < 0)
        SW_FAIL(err, SW_E_OS,
                "host communicator: neither a pidfd nor a file lock is allowed here, so that the "
                "death of "
                "rank %d could not be seen",
                comm->rank);
    /* Every peer may probe, and then join. */
    return sw_socket_listen(2 * comm->world_size, address, &shm->listener, err);
}

sw_status sw_shm_comm_create(int rank, int world_size, const char *host, sw_comm **comm,
                             char address[SW_SOCKET_NAME_BYTES], sw_error *err)
{
    if (world_size < 1 || world_size > SW_COMM_MAX_WORLD)
        SW_FAIL(err, SW_E_INVALID, "host communicator: world_size must be in [1, %d], got %d",
                SW_COMM_MAX_WORLD, world_size);
    if (rank < 0 || rank >= world_size)
        SW_FAIL(err, SW_E_INVALID, "host communicator: rank must be in [0, %d), got %d", world_size,
                rank);
    shm_comm *made = calloc(1, sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "no memory for a host communicator");
    made->fabric.comm = (sw_comm){.ops = &shm_ops,
                                  .rank = rank,
                                  .world_size = world_size,
                                  .timeout_ns = INT64_C(1800) * 1000000000,
                                  .warn_after_ns = INT64_C(30) * 1000000000};
    made->fabric.peer_ended = peer_ended;
    made->listener = made->control_fd = made->pidfd = -1;
    made->owner_pid = (int)getpid();
    made->control = calloc((size_t)world_size, sizeof *made->control);
    made->link = calloc((size_t)world_size, sizeof *made->link);
    sw_status status = SW_E_MEMORY;
    if (!made->control || !made->link) {
        sw_error_set(err, status, -1, "no memory for the peers of a host communicator of %d ranks",
                     world_size);
    } else {
        for (int r = 0; r < world_size; ++r)
            made->link[r] = (peer_link){.socket = -1, .pidfd = -1, .lock_fd = -1};
        status = open_own(made, host, address, err);
    }
    if (status != SW_OK) {
        destroy(&made->fabric.comm);
        return status;
    }
    *comm = &made->fabric.comm;
    return SW_OK;
}

static sw_status send_hello(const shm_comm *shm, int socket, const uint8_t *secret, sw_error *err)
{
    hello message = {.magic = HELLO_MAGIC,
                     .rank = shm->fabric.comm.rank,
                     .world_size = shm->fabric.comm.world_size,
                     .has_pidfd = shm->pidfd >= 0,
                     .control_bytes = sizeof(sw_control)};
    int fds[2] = {shm->control_fd, shm->pidfd};
    memcpy(message.secret, secret, sizeof message.secret);
    return sw_socket_send(socket, &message, sizeof message, fds, message.has_pidfd ? 2 : 1, err);
}

static bool secrets_equal(const uint8_t *a, const uint8_t *b)
{
    uint8_t difference = 0;
    for (int i = 0; i < SW_SHM_SECRET_BYTES; ++i)
        difference |= (uint8_t)(a[i] ^ b[i]);
    return difference == 0;
}

/* Whether the ranks that have not called yet can still do so: each listens until it has joined, and
 * it joins this rank first. Called while this rank waits to be called. */
static sw_status look_for_callers(void *context, sw_error *err)
{
    const shm_comm *shm = context;
    const sw_comm *comm = &shm->fabric.comm;
    if (comm->hooks.interrupted && comm->hooks.interrupted(comm->hooks.context))
        SW_FAIL(err, SW_E_INTERRUPTED, "interrupted while joining the ranks of this host");
    for (int r = comm->rank + 1; r < comm->world_size; ++r)
        if (shm->link[r].socket < 0 && !sw_socket_listens(shm->addresses[r]))
            return sw_error_set(
                err, SW_E_COMM, sw_comm_name(comm, r),
                "joining the ranks of this host: rank %d died or failed before it had "
                "joined",
                sw_comm_name(comm, r));
    return SW_OK;
}

/* Says which peer a failed step of joining was about; or what that peer itself has said, where it
 * failed first. */
static sw_status name_peer(const shm_comm *shm, sw_status status, int rank, const char *step,
                           sw_error *err)
{
    const sw_control *control = shm->control[rank];
    char cause[SW_ERROR_MESSAGE_BYTES];
    if (status == SW_OK)
        return status;
    if (control && atomic_load(&control->state) == SW_MEMBER_ENDED) {
        *err = control->reason;
        err->message[sizeof err->message - 1] = '\0';
        return err->status;
    }
    snprintf(cause, sizeof cause, "%.300s", err->message);
    rank = sw_comm_name(&shm->fabric.comm, rank);
    return sw_error_set(err, status, rank, "joining the ranks of this host: %s rank %d failed: %s",
                        step, rank, cause);
}

/* Keeps a peer that has proved itself: its control page, and what tells of its end. Owns socket and
 * fds. */
static sw_status link_peer(shm_comm *shm, int socket, const hello *message, int fds[2],
                           int expected, sw_error *err)
{
    const sw_comm *comm = &shm->fabric.comm;
    sw_status status;
    int r = message->rank;
    if (message->world_size != comm->world_size || message->control_bytes != sizeof(sw_control) ||
        r < 0 || r >= comm->world_size || r == comm->rank || (expected >= 0 && r != expected) ||
        shm->link[r].socket >= 0) {
        status =
            sw_error_set(err, SW_E_COMM, r,
                         "a peer joined as rank %d of %d, expected a rank not yet joined of %d (or "
                         "another version)",
                         r, message->world_size, comm->world_size);
        goto close_all;
    }
    SW_TRY_GOTO(
        status,
        name_peer(shm, sw_memfd_map(fds[0], sizeof(sw_control), (uint8_t **)&shm->control[r], err),
                  r, "mapping the control page of", err),
        close_all);
    shm->link[r] = (peer_link){.socket = socket, .pidfd = -1, .lock_fd = -1};
    if (message->has_pidfd) {
        shm->link[r].pidfd = fds[1];
        close_fd(&fds[0]);
    } else {
        shm->link[r].lock_fd = fds[0];
    }
    return SW_OK;
close_all:
    close_fd(&fds[0]);
    close_fd(&fds[1]);
    close(socket);
    return status;
}

/* Takes a peer's hello from `socket` (owned from here on). `expected` -1: any rank not yet linked.
 * Sets *caller to -1, and no error, for a stranger: who does not know the secret, or hangs up (a
 * peer's probe). */
static sw_status receive_hello(shm_comm *shm, int socket, int expected, const uint8_t *secret,
                               int *caller, sw_error *err)
{
    hello message;
    int fds[2];
    *caller = -1;
    sw_status status =
        sw_socket_receive(socket, &message, sizeof message, fds, 2, &shm->patience, err);
    if (status == SW_OK && message.magic == HELLO_MAGIC && secrets_equal(message.secret, secret)) {
        SW_TRY(link_peer(shm, socket, &message, fds, expected, err));
        *caller = message.rank;
        return SW_OK;
    }
    close_fd(&fds[0]);
    close_fd(&fds[1]);
    close(socket);
    return status == SW_E_COMM && expected < 0 ? SW_OK : status;
}

/* Those that have joined already go on to wait for this rank. */
static void tell_that_it_failed(shm_comm *shm, const sw_error *cause)
{
    sw_error reason;
    int name = sw_comm_name(&shm->fabric.comm, shm->fabric.comm.rank);
    sw_error_set(&reason, SW_E_COMM, name, "rank %d could not join: %.400s", name, cause->message);
    sw_control_end(shm->control[shm->fabric.comm.rank], &reason);
}

/* Waits for a call, and answers it. *caller -1: a stranger's. */
static sw_status answer_call(shm_comm *shm, const uint8_t *secret, int *caller, sw_error *err)
{
    int socket;
    SW_TRY(sw_socket_accept(shm->listener, &shm->patience, &socket, err));
    SW_TRY(receive_hello(shm, socket, -1, secret, caller, err));
    if (*caller < 0)
        return SW_OK;
    return name_peer(shm, send_hello(shm, socket, secret, err), *caller, "answering", err);
}

/* Lower ranks are called, higher ranks call: nobody waits before it has sent, so nobody waits
 * crosswise. */
static sw_status join(shm_comm *shm, const char *const *addresses, const uint8_t *secret,
                      sw_error *err)
{
    sw_comm *comm = &shm->fabric.comm;
    int *called = malloc(((size_t)comm->rank + 1) * sizeof *called), opened = 0, caller;
    sw_status status = SW_OK;
    if (!called)
        status = sw_error_set(err, SW_E_MEMORY, -1, "no memory to join %d ranks", comm->world_size);
    for (; opened < comm->rank && status == SW_OK; ++opened) {
        called[opened] = -1;
        status = sw_socket_connect(addresses[opened], &shm->patience, &called[opened], err);
        if (status == SW_OK)
            status = send_hello(shm, called[opened], secret, err);
        status = name_peer(shm, status, opened, "calling", err);
    }
    for (int joined = comm->rank + 1; joined < comm->world_size && status == SW_OK;) {
        status = answer_call(shm, secret, &caller, err);
        joined += caller >= 0;
    }
    for (int r = 0; r < opened && status == SW_OK; ++r) {
        int socket = called[r];
        called[r] = -1; /* receive_hello closes it, or keeps it */
        status = name_peer(shm, receive_hello(shm, socket, r, secret, &caller, err), r,
                           "hearing from", err);
        if (status == SW_OK && caller < 0)
            status =
                sw_error_set(err, SW_E_COMM, sw_comm_name(comm, r),
                             "rank %d does not know the group's secret", sw_comm_name(comm, r));
    }
    if (status != SW_OK)
        tell_that_it_failed(shm, err); /* before any socket of it closes */
    for (int r = 0; r < opened; ++r)
        close_fd(&called[r]);
    free(called);
    return status;
}

sw_status sw_shm_comm_connect(sw_comm *comm, const char *const *addresses, const uint8_t *secret,
                              sw_error *err)
{
    shm_comm *shm = (shm_comm *)comm;
    sw_error cause;
    shm->addresses = addresses;
    shm->patience = (sw_patience){.deadline_ns = sw_clock_now_ns() + comm->timeout_ns,
                                  .look = look_for_callers,
                                  .context = shm};
    sw_status status = join(shm, addresses, secret, &cause);
    close_fd(&shm->listener);
    if (status == SW_OK)
        return sw_fabric_init(&shm->fabric, comm->rank, comm->world_size, shm->control, err);
    if (err)
        *err = cause;
    return status;
}

void sw_shm_comm_probe(const sw_comm *comm, const char *const *addresses, bool *reached)
{
    for (int r = 0; r < comm->world_size; ++r)
        reached[r] = r == comm->rank || sw_socket_listens(addresses[r]);
}

sw_status sw_shm_comm_narrow(sw_comm *comm, const int *members, int count, sw_error *err)
{
    shm_comm *shm = (shm_comm *)comm;
    int *names = calloc((size_t)count, sizeof *names);
    if (!names)
        SW_FAIL(err, SW_E_MEMORY, "no memory to join %d ranks", count);
    memcpy(names, members, (size_t)count * sizeof *names);
    sw_control *own = shm->control[comm->rank];
    shm->control[comm->rank] = NULL;
    for (int r = 0; r < count; ++r)
        if (members[r] == comm->rank) {
            shm->control[r] = own;
            comm->rank = r;
            break;
        }
    free(shm->names);
    shm->names = names;
    comm->names = names;
    comm->world_size = count;
    return SW_OK;
}

const char *sw_shm_comm_watch(const sw_comm *comm)
{
    const shm_comm *shm = (const shm_comm *)comm;
    for (int r = 0; r < comm->world_size; ++r)
        if (shm->link[r].lock_fd >= 0)
            return "file lock";
    return "pidfd";
}
