/* hier.c - creating and destroying a communicator over hosts, and its memory. */
#include "comm/hier.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/bytes.h"
#include "comm/comm.h"
#include "comm/hier_state.h"

/* ---- arenas ---- */

static size_t mirrored_bytes(size_t size_bytes)
{
    return (size_bytes + SW_ALIGNMENT_BYTES - 1) / SW_ALIGNMENT_BYTES * SW_ALIGNMENT_BYTES;
}

/* Create this host's part of an arena, with `folder` in a file of it. If mirrored, the carrier's
 * memory holds all ranks' parts. */
static sw_status create_inside(sw_hier *hier, size_t size_bytes, const char *folder,
                               const char *label, bool mirrored, sw_arena **arena, sw_error *err)
{
    size_t world_size = (size_t)hier->comm.world_size, stride = mirrored_bytes(size_bytes);
    sw_arena *inside;
    if (folder)
        SW_TRY(
            hier->inside->ops->home_create(hier->inside, size_bytes, folder, label, &inside, err));
    else
        SW_TRY(hier->inside->ops->arena_create(
            hier->inside, mirrored ? stride * world_size : size_bytes, label, &inside, err));
    sw_hier_arena *made = calloc(1, sizeof *made);
    uint8_t **base = calloc(world_size, sizeof *base);
    if (!made || !base) {
        free(made);
        free(base);
        hier->inside->ops->arena_destroy(hier->inside, inside);
        SW_FAIL(err, SW_E_MEMORY, "no memory for the tables of arena '%s'", label);
    }
    for (int l = 0; !mirrored && l < hier->local_count; ++l)
        base[hier->members[l]] = inside->base[l];
    for (size_t r = 0; mirrored && r < world_size; ++r)
        base[r] = inside->base[0] + r * stride;
    *made = (sw_hier_arena){.arena = {.size_bytes = size_bytes,
                                      .base = base,
                                      .world_size = hier->comm.world_size,
                                      .file = inside->file},
                            .inside = inside};
    *arena = &made->arena;
    return SW_OK;
}

static void destroy_inside(sw_hier *hier, sw_arena *arena)
{
    if (!arena)
        return;
    hier->inside->ops->arena_destroy(hier->inside, ((sw_hier_arena *)arena)->inside);
    free(arena->base);
    free(arena);
}

/* The wire may still read the memory of an incomplete operation, which therefore stays until the
 * wire is closed. (The carrier accesses no memory of a communicator that has ended.) */
static void arena_destroy(sw_comm *comm, sw_arena *arena)
{
    sw_hier *hier = (sw_hier *)comm;
    sw_hier_arena *held = (sw_hier_arena *)arena;
    bool in_use = hier->carrier && !sw_carrier_wire_is_closed(hier->carrier) &&
                  atomic_load(&sw_hier_page(hier, 0)->wired) != hier->posted;
    if (!in_use) {
        destroy_inside(hier, arena);
    } else if (held) {
        held->next = hier->kept;
        hier->kept = held;
    }
}

static sw_status create(sw_hier *hier, size_t size_bytes, const char *folder, const char *label,
                        bool mirrored, sw_arena **arena, sw_error *err)
{
    sw_error cause;
    sw_arena *made = NULL;
    uint32_t serial = ++hier->comm.arenas;
    SW_TRY(sw_hier_check_alive(hier, err));
    hier->inside->timeout_ns = hier->comm.timeout_ns;
    hier->inside->silent_ns = hier->comm.silent_ns;
    sw_status local = create_inside(hier, size_bytes, folder, label, mirrored, &made, &cause);
    if (local != SW_OK && local != SW_E_MEMORY && !(folder && local == SW_E_OS))
        return sw_hier_end_here(hier, &cause, err);
    /* Ranks of one host have agreed; now the hosts must. */
    sw_status status = sw_agree(&hier->comm, NULL, label, size_bytes, local, &cause, err);
    if (status != SW_OK) {
        destroy_inside(hier, made);
        return status;
    }
    made->serial = serial;
    *arena = made;
    return SW_OK;
}

static sw_status arena_create(sw_comm *comm, size_t size_bytes, const char *label, sw_arena **arena,
                              sw_error *err)
{
    return create((sw_hier *)comm, size_bytes, NULL, label, false, arena, err);
}

static sw_status home_create(sw_comm *comm, size_t size_bytes, const char *folder,
                             const char *label, sw_arena **arena, sw_error *err)
{
    return create((sw_hier *)comm, size_bytes, folder, label, false, arena, err);
}

static sw_status mirror_create(sw_comm *comm, size_t size_bytes, const char *label,
                               sw_arena **arena, sw_error *err)
{
    return create((sw_hier *)comm, size_bytes, NULL, label, true, arena, err);
}

/* ---- waiting ---- */

static sw_status wait_ticket(sw_comm *comm, uint32_t ticket, sw_error *err)
{
    return sw_hier_await((sw_hier *)comm, ticket, err);
}

static sw_status poll_ticket(sw_comm *comm, uint32_t ticket, bool *complete, sw_error *err)
{
    sw_hier *hier = (sw_hier *)comm;
    sw_error reason;
    sw_status alive = sw_ending_read(sw_hier_ending(hier), &reason); /* before it returns what is
                                                                      * complete */
    sw_hier_settle(hier, atomic_load(&sw_hier_page(hier, 0)->wired));
    *complete = sw_ticket_reached(hier->settled, ticket);
    return *complete || alive == SW_OK ? SW_OK : sw_hier_end_here(hier, &reason, err);
}

/* ---- lifecycle ---- */

static void abort_all(sw_comm *comm, const sw_error *reason)
{
    sw_hier_end_here((sw_hier *)comm, reason, NULL);
}

static void leave(sw_comm *comm)
{
    sw_hier *hier = (sw_hier *)comm;
    if (hier->carrier)
        sw_carrier_stop(hier->carrier, sw_hier_is_active(hier));
    hier->inside->ops->leave(hier->inside);
    sw_hier_await_untouched(hier);
    hier->end_is_known = true;
}

static void free_tables(sw_hier *hier)
{
    while (hier->tables) {
        sw_hier_table *next = hier->tables->next;
        sw_slice_table_fini(&hier->tables->table);
        free(hier->tables);
        hier->tables = next;
    }
    if (hier->pages)
        hier->inside->ops->arena_destroy(hier->inside, hier->pages);
    destroy_inside(hier, hier->bounce);
    destroy_inside(hier, hier->mirror);
    destroy_inside(hier, hier->ring);
    hier->inside->ops->destroy(hier->inside);
    sw_host_map_fini(&hier->map);
    sw_dissemination_fini(&hier->spread);
    free(hier->pid);
    free(hier->host_name);
    free(hier->contributes);
    pthread_mutex_destroy(&hier->lock);
    free(hier);
}

static void free_kept(sw_hier *hier)
{
    while (hier->kept) {
        sw_hier_arena *held = hier->kept;
        hier->kept = held->next;
        destroy_inside(hier, &held->arena);
    }
}

/* If the carrier's thread is still inside a call of the wire, the carrier and the state that its
 * thread reads first are never freed, and neither are arenas if the wire could not be closed. A
 * forked child frees nothing, because it has no such thread. */
static void destroy(sw_comm *comm)
{
    sw_hier *hier = (sw_hier *)comm;
    if (!comm || (int)getpid() != hier->owner_pid)
        return;
    leave(comm);
    bool is_left = hier->carrier && !sw_carrier_is_over(hier->carrier);
    if (is_left && !sw_carrier_wire_is_closed(hier->carrier))
        return;
    if (!is_left) {
        sw_carrier_destroy(hier->carrier);
        sw_hier_drop_codecs(hier);
    }
    free_kept(hier);
    destroy_inside(hier, hier->ring); /* a closed wire does not access it */
    hier->ring = NULL;
    if (!is_left)
        free_tables(hier);
}

static sw_status forked(sw_comm *comm, sw_error *err)
{
    sw_hier *hier = (sw_hier *)comm;
    sw_comm *inside = hier->inside;
    pthread_mutex_init(&hier->lock, NULL); /* the carrier's thread may have held it */
    return inside->ops->forked ? inside->ops->forked(inside, err) : SW_OK;
}

static const sw_comm_ops hier_ops = {
    .arena_create = arena_create,
    .mirror_create = mirror_create,
    .home_create = home_create,
    .arena_destroy = arena_destroy,
    .post = sw_hier_post,
    .poll = poll_ticket,
    .wait = wait_ticket,
    .run = sw_hier_run,
    .broadcast = sw_hier_broadcast,
    .gather = sw_hier_gather,
    .abort = abort_all,
    .request_end = sw_hier_request_end,
    .tell_hosts = sw_hier_tell_hosts,
    .look = sw_hier_look,
    .peer = sw_hier_peer,
    .note = sw_hier_note,
    .pid = sw_hier_pid,
    .dead = sw_hier_dead,
    .is_alive = sw_hier_is_alive,
    .leave = leave,
    .forked = forked,
    .destroy = destroy,
};

/* Create this host's shared memory for data to and from other hosts. */
static sw_status create_memory(sw_hier *hier, sw_error *err)
{
    size_t ranks = (size_t)hier->comm.world_size;
    size_t chunk = sw_size_max(SW_HIER_MIRROR_BYTES / ranks, SW_HIER_LEAST_CHUNK_BYTES);
    hier->mirror_chunk_bytes = sw_size_min(chunk, SW_HIER_CHUNK_BYTES);
    SW_TRY(hier->inside->ops->arena_create(hier->inside, sizeof(sw_page), "pages of hosts",
                                           &hier->pages, err));
    atomic_store(&sw_hier_page(hier, hier->local_rank)->awaiting, -1);
    SW_TRY(create_inside(hier, 2 * (size_t)SW_HIER_CHUNK_BYTES, NULL, "bounce memory of hosts",
                         false, &hier->bounce, err));
    SW_TRY(create_inside(hier, 2 * hier->mirror_chunk_bytes * ranks, NULL,
                         "mirrored memory of hosts", false, &hier->mirror, err));
    return create_inside(hier, (size_t)SW_STREAM_PLACES * SW_STREAM_PIECE_BYTES, NULL,
                         "ring of hosts", false, &hier->ring, err);
}

static sw_status init(sw_hier *hier, int rank, int world_size, const int *host_of, int radix,
                      sw_error *err)
{
    size_t count = (size_t)world_size;
    SW_TRY(sw_host_map_init(&hier->map, host_of, world_size, err));
    hier->comm = (sw_comm){.ops = &hier_ops,
                           .rank = rank,
                           .world_size = world_size,
                           .is_carried = true,
                           .timeout_ns = hier->inside->timeout_ns,
                           .warn_after_ns = hier->inside->warn_after_ns,
                           .hooks = hier->inside->hooks};
    hier->host = host_of[rank];
    SW_TRY(sw_dissemination_init(&hier->spread, hier->host, hier->map.host_count,
                                 radix ? radix : SW_DISSEMINATION_RADIX, err));
    hier->members = sw_host_members(&hier->map, hier->host);
    hier->local_count = sw_host_size(&hier->map, hier->host);
    hier->local_rank = hier->inside->rank;
    hier->pid = calloc(count, sizeof *hier->pid);
    hier->host_name = calloc((size_t)hier->map.host_count, sizeof *hier->host_name);
    hier->contributes = calloc(count, sizeof *hier->contributes);
    if (!hier->pid || !hier->host_name || !hier->contributes)
        SW_FAIL(err, SW_E_MEMORY, "no memory for a group of %d ranks", world_size);
    if (hier->local_count != hier->inside->world_size || hier->members[hier->local_rank] != rank)
        SW_FAIL(err, SW_E_INVALID, "rank %d: the map of hosts does not match the ranks that joined",
                rank);
    return create_memory(hier, err);
}

static void release_wire(const sw_wire *wire)
{
    if (wire)
        wire->release(wire->context);
}

enum { NAME_PIECE_BYTES = 8 };

/* Find the length of the longest host name. */
static sw_status find_longest_name(sw_hier *hier, const sw_identity *own, int32_t *bytes,
                                   sw_error *err)
{
    sw_op op = {.kind = SW_OP_ALL_REDUCE,
                .dtype = SW_DTYPE_INT32,
                .redop = SW_REDOP_MAX,
                .numel = 1,
                .data = bytes,
                .label = "joining hosts"};
    *bytes = (int32_t)strnlen(own->host, sizeof own->host - 1);
    return sw_hier_run(&hier->comm, &op, err);
}

/* Gather all ranks' pids and all hosts' names; names in pieces, so that a rank needs little
 * memory. */
static sw_status gather_identities(sw_hier *hier, const sw_identity *own, uint8_t *all,
                                   sw_error *err)
{
    int32_t bytes;
    SW_TRY(
        sw_hier_gather(&hier->comm, &own->pid, sizeof own->pid, hier->pid, "joining hosts", err));
    SW_TRY(find_longest_name(hier, own, &bytes, err));
    for (int32_t begin = 0; begin < bytes; begin += NAME_PIECE_BYTES) {
        SW_TRY(sw_hier_gather(&hier->comm, own->host + begin, NAME_PIECE_BYTES, all,
                              "joining hosts", err));
        for (int h = 0; h < hier->map.host_count; ++h)
            memcpy(hier->host_name[h].text + begin,
                   all + (size_t)sw_host_carrier(&hier->map, h) * NAME_PIECE_BYTES,
                   NAME_PIECE_BYTES);
    }
    for (int h = 0; h < hier->map.host_count; ++h)
        hier->host_name[h].text[sizeof hier->host_name[h].text - 1] = '\0';
    return SW_OK;
}

/* Exchange names and pids of ranks, for messages. */
static sw_status introduce(sw_hier *hier, const sw_identity *own, sw_error *err)
{
    uint8_t *all = calloc((size_t)hier->comm.world_size, NAME_PIECE_BYTES);
    if (!all)
        return sw_comm_give_up(&hier->comm, SW_E_MEMORY, err, "no memory for the names of %d ranks",
                               hier->comm.world_size);
    sw_status status = gather_identities(hier, own, all, err);
    atomic_store(&hier->is_introduced, status == SW_OK);
    free(all);
    return status;
}

sw_status sw_hier_comm_create(sw_comm *inside, int rank, int world_size, const int *host_of,
                              const sw_identity *own, const sw_wire *wire, sw_comm **comm,
                              sw_error *err)
{
    sw_hier *made = calloc(1, sizeof *made);
    if (!made) {
        inside->ops->destroy(inside);
        release_wire(wire);
        SW_FAIL(err, SW_E_MEMORY, "no memory for a group of %d ranks", world_size);
    }
    made->inside = inside;
    made->owner_pid = (int)getpid();
    pthread_mutex_init(&made->lock, NULL);
    sw_status status = init(made, rank, world_size, host_of, wire ? wire->radix : 0, err);
    if (status == SW_OK && made->local_rank == 0)
        status = sw_carrier_start(made, wire, err);
    else
        release_wire(wire);
    if (status != SW_OK) {
        free_tables(made);
        return status;
    }
    status = introduce(made, own, err);
    if (status != SW_OK) {
        destroy(&made->comm);
        return status;
    }
    *comm = &made->comm;
    return SW_OK;
}

const char *sw_hier_comm_host(const sw_comm *comm, int host)
{
    return ((const sw_hier *)comm)->host_name[host].text;
}

const sw_host_map *sw_hier_comm_map(const sw_comm *comm)
{
    return &((const sw_hier *)comm)->map;
}

const sw_comm *sw_hier_comm_inside(const sw_comm *comm)
{
    return ((const sw_hier *)comm)->inside;
}
