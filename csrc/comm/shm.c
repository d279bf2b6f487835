/* shm.c - the memory that a host's ranks share: control pages and arenas, which the first rank
 * makes and passes on over its links. A lock on a byte of the control pages shows that a rank
 * lives. The protocol is the fabric's. */
#include "comm/shm.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/bytes.h"
#include "comm/comm.h"
#include "comm/fabric.h"
#include "platform/file_memory.h"
#include "platform/futex.h"
#include "platform/limits.h"
#include "platform/memory.h"
#include "platform/process.h"

static const int64_t slice_ns = 20 * 1000 * 1000;

typedef struct shm_arena {
    sw_arena arena; /* first */
    uint8_t *whole; /* owned mapping, whole_bytes: all parts, a stride each */
    size_t stride_bytes, whole_bytes;
    int fd;                 /* owned; -1 in a forked child */
    sw_file_memory *file;   /* owned; NULL: a memfd. Borrows whole and fd */
    struct shm_arena *next; /* in shm->arenas */
} shm_arena;

typedef struct shm_comm {
    sw_fabric fabric; /* first */
    sw_bootstrap bootstrap;
    shm_arena *arenas; /* not owned: all live arenas; under `listing`, since any thread may drop
                        * one */
    pthread_mutex_t listing;
    char host[64];
    size_t control_bytes; /* length of the mapping, which is owned */
    int control_fd;       /* owned; byte r is locked by rank r. Never open another file descriptor
                             of it: closing one would drop the lock */
    int owner_pid;        /* the process that may announce this rank's leave */
    int *names;           /* owned; NULL unless narrowed */
} shm_comm;

static bool peer_ended(sw_fabric *fabric, int rank)
{
    return atomic_load(&fabric->control[rank].has_joined) &&
           sw_process_lock_is_free(((shm_comm *)fabric)->control_fd, rank);
}

static void destroy(sw_comm *comm)
{
    shm_comm *shm = (shm_comm *)comm;
    if (!comm)
        return;
    /* A forked child has a copy of everything: it must publish nothing in its parent's name. */
    shm->fabric.is_foreign |= getpid() != shm->owner_pid;
    sw_fabric_fini(&shm->fabric);
    sw_memory_unmap((uint8_t *)shm->fabric.control, shm->control_bytes);
    sw_bootstrap_close(&shm->bootstrap);
    sw_socket_close(&shm->control_fd);
    pthread_mutex_destroy(&shm->listing);
    free(shm->names);
    free(shm);
}

/* ---- arenas ---- */

static void unlink_arena(shm_comm *shm, const shm_arena *gone)
{
    pthread_mutex_lock(&shm->listing);
    shm_arena **at = &shm->arenas;
    while (*at && *at != gone)
        at = &(*at)->next;
    if (*at)
        *at = gone->next;
    pthread_mutex_unlock(&shm->listing);
}

static void arena_destroy(sw_comm *comm, sw_arena *arena)
{
    shm_arena *gone = (shm_arena *)arena;
    if (!arena)
        return;
    unlink_arena((shm_comm *)comm, gone);
    sw_memory_unmap(gone->whole, gone->whole_bytes);
    sw_socket_close(&gone->fd);
    free(gone->file);
    free(arena->base);
    free(gone);
}

static sw_status make_file(sw_comm *comm, shm_arena *made, const char *folder, const char *label,
                           sw_error *err)
{
    size_t size_bytes;
    sw_file_memory *file = made->file = calloc(1, sizeof *file);
    made->arena.file = file;
    if (!file || !sw_size_multiply(made->stride_bytes, (size_t)comm->world_size, &size_bytes))
        SW_FAIL(err, SW_E_MEMORY, "no memory for %d parts of %zu bytes", comm->world_size,
                made->arena.size_bytes);
    SW_TRY(sw_file_memory_init(file, folder, label, size_bytes, err));
    if (comm->rank != 0)
        return SW_OK;
    sw_status status = sw_file_memory_create(file, folder, err);
    made->fd = file->fd;
    return status;
}

/* Create the tables, and on the first rank the memory. */
static sw_status make(sw_comm *comm, size_t size_bytes, const char *folder, const char *label,
                      shm_arena **arena, sw_error *err)
{
    uint32_t serial = ++comm->arenas;
    shm_arena *made = calloc(1, sizeof *made);
    uint8_t **base = calloc((size_t)comm->world_size, sizeof *base);
    if (!made || !base) {
        free(made);
        free(base);
        SW_FAIL(err, SW_E_MEMORY, "no memory for its tables");
    }
    *made = (shm_arena){.arena = {.size_bytes = size_bytes,
                                  .base = base,
                                  .world_size = comm->world_size,
                                  .serial = serial},
                        .stride_bytes = sw_memfd_stride(size_bytes),
                        .fd = -1};
    *arena = made;
    if (folder)
        return make_file(comm, made, folder, label, err);
    return comm->rank == 0
               ? sw_memfd_create_parts(size_bytes, comm->world_size, label, &made->fd, err)
               : sw_limits_check_memory(size_bytes, label, err);
}

/* Pass the memory from the first rank to the others. A rank without a free file descriptor sets
 * *refused with `cause`; that is not an error yet. */
static sw_status pass(shm_comm *shm, shm_arena *made, const char *label, sw_status *refused,
                      sw_error *cause, sw_error *err)
{
    const sw_arena *arena = &made->arena;
    sw_fd_message fd_message = {.size_bytes = arena->size_bytes, .serial = arena->serial};
    char what[120];
    snprintf(what, sizeof what, "arena '%.90s'", label);
    if (shm->fabric.comm.rank == 0)
        return sw_bootstrap_give(&shm->bootstrap, &fd_message, made->fd, what, err);
    sw_status status = sw_bootstrap_take(&shm->bootstrap, what, &fd_message, &made->fd, err);
    if (status == SW_E_MEMORY) {
        *cause = *err;
        *refused = status;
    } else if (status != SW_OK) {
        return status;
    }
    if (fd_message.serial != arena->serial || fd_message.size_bytes != arena->size_bytes)
        SW_FAIL(err, SW_E_STATE, "%s: got %llu bytes of shared memory %u, expected %zu of %u", what,
                (unsigned long long)fd_message.size_bytes, fd_message.serial, arena->size_bytes,
                arena->serial);
    return sw_bootstrap_answer(&shm->bootstrap, what, arena->serial, SW_OK, NULL, err);
}

static sw_status map(shm_arena *made, sw_error *err)
{
    sw_arena *arena = &made->arena;
    made->whole_bytes = made->stride_bytes * (size_t)arena->world_size;
    if (made->file) {
        made->file->fd = made->fd;
        SW_TRY(sw_file_memory_map(made->file, err));
        made->whole = made->file->begin;
    } else {
        SW_TRY(sw_memfd_map(made->fd, made->whole_bytes, &made->whole, err));
    }
    for (int r = 0; r < arena->world_size; ++r)
        arena->base[r] = made->whole + (size_t)r * made->stride_bytes;
    return SW_OK;
}

static sw_status create(sw_comm *comm, size_t size_bytes, const char *folder, const char *label,
                        sw_arena **arena, sw_error *err)
{
    shm_comm *shm = (shm_comm *)comm;
    shm_arena *made = NULL;
    sw_error cause, why;
    const char *noun = folder ? NULL : "arena";
    sw_status refused = SW_OK, status = make(comm, size_bytes, folder, label, &made, &cause);
    SW_TRY_GOTO(status, sw_agree(comm, noun, label, size_bytes, status, &cause, err), undo);
    status = pass(shm, made, label, &refused, &cause, &why);
    if (status != SW_OK) { /* on all ranks */
        sw_status ended = sw_fabric_end(&shm->fabric, &why, err);
        status = status == SW_E_INTERRUPTED ? sw_wait_interrupted(err) : ended;
        goto undo;
    }
    if (refused == SW_OK)
        refused = map(made, &cause);
    SW_TRY_GOTO(status, sw_agree(comm, noun, label, size_bytes, refused, &cause, err), undo);
    pthread_mutex_lock(&shm->listing);
    made->next = shm->arenas;
    shm->arenas = made;
    pthread_mutex_unlock(&shm->listing);
    *arena = &made->arena;
    return SW_OK;
undo:
    arena_destroy(comm, made ? &made->arena : NULL);
    return status;
}

static sw_status arena_create(sw_comm *comm, size_t size_bytes, const char *label, sw_arena **arena,
                              sw_error *err)
{
    return create(comm, size_bytes, NULL, label, arena, err);
}

/* Map the parent's pages copy-on-write, so that the child's writes stay its own. A page that it has
 * not written still shows what the ranks write later (sw_memory_own). */
static sw_status forked(sw_comm *comm, sw_error *err)
{
    shm_comm *shm = (shm_comm *)comm;
    sw_status status = SW_OK;
    sw_error reason;
    for (shm_arena *each = shm->arenas; each; each = each->next) {
        if (each->fd < 0)
            continue;
        if (sw_memory_remap(each->whole, each->whole_bytes, each->fd, 0, false, err) == SW_OK) {
            sw_socket_close(&each->fd);
            if (each->file)
                each->file->fd = -1;
        } else /* another call tries again */
            status = SW_E_MEMORY;
    }
    pthread_mutex_init(&shm->listing, NULL); /* one of the parent's threads may have held it */
    shm->fabric.is_foreign = true;
    sw_error_set(&reason, SW_E_STATE, -1, "this process was forked from the one that joined");
    sw_ending_force(&shm->fabric.ending, &reason);
    sw_bootstrap_close(&shm->bootstrap); /* the parent's peers must see its sockets close */
    sw_socket_close(&shm->control_fd);
    return status;
}

static const sw_comm_ops shm_ops = {
    .arena_create = arena_create,
    .mirror_create = arena_create,
    .home_create = create,
    .arena_destroy = arena_destroy,
    SW_FABRIC_OPS,
    .forked = forked,
    .destroy = destroy,
};

/* ---- joining ---- */

sw_status sw_shm_comm_create(int rank, int world_size, const char *host, sw_comm **comm,
                             char address[SW_SOCKET_NAME_BYTES], sw_error *err)
{
    if (world_size < 1)
        SW_FAIL(err, SW_E_INVALID, "host communicator: world_size must be at least 1, got %d",
                world_size);
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
    made->bootstrap.listener = made->control_fd = -1;
    made->owner_pid = (int)getpid();
    pthread_mutex_init(&made->listing, NULL);
    snprintf(made->host, sizeof made->host, "%s", host);
    sw_status status = sw_bootstrap_open(&made->bootstrap, &made->fabric.comm, address, err);
    if (status != SW_OK) {
        destroy(&made->fabric.comm);
        return status;
    }
    *comm = &made->fabric.comm;
    return SW_OK;
}

/* Join the control pages: from here on all ranks see that this one lives. */
static sw_status appear(shm_comm *shm, sw_error *err)
{
    sw_comm *comm = &shm->fabric.comm;
    size_t size_bytes = sw_fabric_pages_bytes(comm->world_size);
    uint8_t *pages;
    if (sw_memfd_map(shm->control_fd, size_bytes, &pages, err) != SW_OK) {
        char cause[SW_ERROR_MESSAGE_BYTES];
        snprintf(cause, sizeof cause, "%.300s", err->message);
        return sw_error_set(err, err->status, err->detail,
                            "mapping the control pages of %d ranks failed: %s", comm->world_size,
                            cause);
    }
    sw_control *own = (sw_control *)(void *)pages + comm->rank;
    shm->fabric.control = (sw_control *)(void *)pages;
    shm->control_bytes = size_bytes;
    sw_control_introduce(own, shm->host);
    if (!sw_process_hold_lock(shm->control_fd, comm->rank))
        SW_FAIL(err, SW_E_OS,
                "host communicator: byte %d of a memfd cannot be locked here, so the death of rank "
                "%d could not be detected",
                comm->rank, sw_comm_name(comm, comm->rank));
    SW_TRY(sw_fabric_init(&shm->fabric, comm->rank, comm->world_size, pages, err));
    atomic_store(&own->has_joined, SW_FABRIC_JOINED);
    return SW_OK;
}

static void describe_missing(void *context, sw_wait_text *text)
{
    shm_comm *shm = context;
    sw_comm *comm = &shm->fabric.comm;
    snprintf(text->what, sizeof text->what, "%s", SW_BOOTSTRAP_JOINING);
    for (int r = 0; r < comm->world_size; ++r)
        if (!atomic_load(&shm->fabric.control[r].has_joined) && !sw_wait_add_missing(text, comm, r))
            return;
}

/* Wait until the first rank has all answers; no rank continues before that. */
static sw_status wait_for_all(shm_comm *shm, sw_error *err)
{
    _Atomic uint32_t *word = &shm->fabric.control[0].has_joined;
    sw_bootstrap_wait wait = sw_bootstrap_wait_begin(&shm->bootstrap, shm, describe_missing);
    bool unused;
    while (atomic_load(word) != SW_FABRIC_ALL_JOINED) {
        sw_futex_wait(word, SW_FABRIC_JOINED, slice_ns);
        SW_TRY(sw_bootstrap_look(&wait, &unused, err));
    }
    return SW_OK;
}

static sw_status join_as_first(shm_comm *shm, const char *const *addresses, const uint8_t *secret,
                               sw_error *err)
{
    const sw_comm *comm = &shm->fabric.comm;
    size_t count = (size_t)comm->world_size;
    sw_fd_message fd_message = {.size_bytes = sw_fabric_pages_bytes(comm->world_size)};
    SW_TRY(sw_memfd_create_parts((fd_message.size_bytes + count - 1) / count, comm->world_size,
                                 "host communicator", &shm->control_fd, err));
    SW_TRY(appear(shm, err));
    SW_TRY(
        sw_bootstrap_admit(&shm->bootstrap, addresses, secret, &fd_message, shm->control_fd, err));
    atomic_store(&shm->fabric.control[0].has_joined, SW_FABRIC_ALL_JOINED);
    sw_futex_wake_all(&shm->fabric.control[0].has_joined);
    return SW_OK;
}

static sw_status join_another(shm_comm *shm, const char *const *addresses, const uint8_t *secret,
                              sw_error *err)
{
    const sw_comm *comm = &shm->fabric.comm;
    sw_fd_message fd_message;
    sw_error cause;
    SW_TRY(
        sw_bootstrap_call(&shm->bootstrap, addresses, secret, &fd_message, &shm->control_fd, err));
    sw_status status = SW_OK;
    if (fd_message.size_bytes != sw_fabric_pages_bytes(comm->world_size))
        status = sw_error_set(&cause, SW_E_STATE, -1,
                              "the control pages of %d ranks have %llu bytes, expected %zu: "
                              "another version of the engine",
                              comm->world_size, (unsigned long long)fd_message.size_bytes,
                              sw_fabric_pages_bytes(comm->world_size));
    if (status == SW_OK)
        status = appear(shm, &cause);
    (void)!sw_bootstrap_answer(&shm->bootstrap, SW_BOOTSTRAP_JOINING, fd_message.serial, status,
                               &cause, NULL);
    if (status == SW_OK)
        return wait_for_all(shm, err);
    return sw_error_set(err, cause.status, cause.detail, "joining the ranks of this host: %.400s",
                        cause.message);
}

/* Ranks that have already joined wait for this rank: report its error to them, whatever its
 * cause. */
static void report_failure(shm_comm *shm, const sw_error *cause)
{
    sw_error reason = *cause;
    int name = sw_comm_name(&shm->fabric.comm, shm->fabric.comm.rank);
    if (cause->status != SW_E_COMM || cause->detail < 0 || cause->detail == name)
        sw_error_set(&reason, SW_E_COMM, name, "rank %d could not join: %.400s", name,
                     cause->message);
    sw_fabric_end(&shm->fabric, &reason, NULL);
}

sw_status sw_shm_comm_connect(sw_comm *comm, const char *const *addresses, const uint8_t *secret,
                              sw_error *err)
{
    shm_comm *shm = (shm_comm *)comm;
    sw_error cause;
    if (comm->world_size > SW_COMM_MAX_WORLD)
        SW_FAIL(err, SW_E_INVALID, "host communicator: a host has at most %d ranks, got %d",
                SW_COMM_MAX_WORLD, comm->world_size);
    sw_status status = comm->rank == 0 ? join_as_first(shm, addresses, secret, &cause)
                                       : join_another(shm, addresses, secret, &cause);
    if (status == SW_OK) /* another thread may have ended it meanwhile */
        status = sw_ending_read(&shm->fabric.ending, &cause);
    if (status != SW_OK)
        report_failure(shm, &cause); /* before any socket of it closes */
    sw_socket_close(&shm->bootstrap.listener);
    return status == SW_OK ? SW_OK : sw_error_pass(err, &cause);
}

sw_status sw_shm_comm_narrow(sw_comm *comm, const int *members, int count, sw_error *err)
{
    shm_comm *shm = (shm_comm *)comm;
    int *names = calloc((size_t)count, sizeof *names);
    if (!names)
        SW_FAIL(err, SW_E_MEMORY, "no memory to join %d ranks", count);
    memcpy(names, members, (size_t)count * sizeof *names);
    for (int r = 0; r < count; ++r)
        if (members[r] == comm->rank) {
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
    return comm->world_size > 1 ? "file lock" : "none";
}
