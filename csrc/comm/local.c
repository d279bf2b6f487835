/* local.c - control blocks and arenas are pages of this process; the fabric does all else. */
#include "comm/local.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/bytes.h"
#include "comm/fabric.h"
#include "platform/file_memory.h"
#include "platform/memory.h"

/* A rank's memory of an arena, or the first rank's of all parts in a file. It stays until all ranks
 * have destroyed their arena, because others may still read it, as with mappings of processes. If
 * some rank could not finish the arena, it stays until the group ends. */
typedef struct local_part {
    struct local_part *before, *next; /* in the group's `parts` */
    _Atomic int users;
    uint8_t *address; /* owned unless it is of the file; NULL: none */
    size_t size_bytes;
    sw_file_memory *file; /* owned; NULL: none */
} local_part;

struct sw_local_group {
    int world_size;
    uint8_t *pages;       /* owned: the fabric's */
    sw_control *control;  /* in them: world_size blocks */
    pthread_mutex_t lock; /* over `parts` */
    local_part *parts;    /* owned */
};

typedef struct local_comm {
    sw_fabric fabric; /* first */
    sw_local_group *group;
} local_comm;

typedef struct local_arena {
    sw_arena arena;     /* first */
    local_part **parts; /* owned, the table; a part: by its users */
} local_arena;

typedef struct arena_offer { /* a rank's part, as announced to the others */
    local_part *part;        /* NULL: could not allocate */
    int32_t code;            /* then: errno, or 0 */
    char message[256];
} arena_offer;

sw_status sw_local_group_create(int world_size, sw_local_group **group, sw_error *err)
{
    if (world_size < 1 || world_size > SW_COMM_MAX_WORLD)
        SW_FAIL(err, SW_E_INVALID, "local group: world_size must be in [1, %d], got %d",
                SW_COMM_MAX_WORLD, world_size);
    sw_local_group *made = calloc(1, sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "no memory for a local group of %d ranks", world_size);
    made->world_size = world_size;
    sw_status status = sw_pages_map(sw_fabric_pages_bytes(world_size), &made->pages, err);
    if (status != SW_OK) {
        free(made);
        return status;
    }
    made->control = (sw_control *)(void *)made->pages;
    pthread_mutex_init(&made->lock, NULL);
    for (int r = 0; r < world_size; ++r)
        sw_control_introduce(&made->control[r], "local");
    *group = made;
    return SW_OK;
}

/* Returns NULL if out of memory. The caller sets the address. */
static local_part *part_create(sw_local_group *group, size_t size_bytes)
{
    local_part *part = calloc(1, sizeof *part);
    if (!part)
        return NULL;
    atomic_init(&part->users, group->world_size);
    part->size_bytes = size_bytes;
    pthread_mutex_lock(&group->lock);
    part->next = group->parts;
    if (part->next)
        part->next->before = part;
    group->parts = part;
    pthread_mutex_unlock(&group->lock);
    return part;
}

static void part_destroy(sw_local_group *group, local_part *part)
{
    if (!part)
        return;
    pthread_mutex_lock(&group->lock);
    if (part->next)
        part->next->before = part->before;
    *(part->before ? &part->before->next : &group->parts) = part->next;
    pthread_mutex_unlock(&group->lock);
    if (part->file)
        sw_file_memory_fini(part->file);
    else
        sw_memory_unmap(part->address, part->size_bytes);
    free(part->file);
    free(part);
}

void sw_local_group_destroy(sw_local_group *group)
{
    if (!group)
        return;
    while (group->parts)
        part_destroy(group, group->parts);
    pthread_mutex_destroy(&group->lock);
    sw_memory_unmap(group->pages, sw_fabric_pages_bytes(group->world_size));
    free(group);
}

static bool peer_never_ends(sw_fabric *fabric, int rank)
{
    (void)fabric;
    (void)rank;
    return false;
}

static void arena_destroy(sw_comm *comm, sw_arena *arena)
{
    local_arena *held = (local_arena *)arena;
    if (!arena)
        return;
    for (int r = 0; r < comm->world_size; ++r) {
        local_part *part = held->parts[r];
        if (atomic_fetch_sub(&part->users, 1) == 1)
            part_destroy(((local_comm *)comm)->group, part);
    }
    free(held->parts);
    free(arena->base);
    free(held);
}

static sw_status check_offers(const arena_offer *offers, int world_size, const char *label,
                              sw_error *err)
{
    for (int r = 0; r < world_size; ++r)
        if (!offers[r].part && offers[r].code)
            return sw_error_set(err, SW_E_OS, offers[r].code, "%s", offers[r].message);
        else if (!offers[r].part)
            SW_FAIL(err, SW_E_MEMORY, "arena '%s': rank %d could not allocate: %s", label, r,
                    offers[r].message);
    return SW_OK;
}

/* Make a rank's memory; with `folder` the first rank's file of `count` parts. */
static sw_status part_fill(local_part *part, const char *folder, const char *label, size_t count,
                           sw_error *err)
{
    size_t whole;
    if (!folder)
        return sw_pages_map(part->size_bytes, &part->address, err);
    part->file = calloc(1, sizeof *part->file);
    if (part->file)
        part->file->fd = -1;
    if (!part->file || !sw_size_multiply(sw_memfd_stride(part->size_bytes), count, &whole))
        SW_FAIL(err, SW_E_MEMORY, "no memory for %zu parts of %zu bytes", count, part->size_bytes);
    SW_TRY(sw_file_memory_init(part->file, folder, label, whole, err));
    SW_TRY(sw_file_memory_create(part->file, folder, err));
    SW_TRY(sw_file_memory_map(part->file, err));
    part->address = part->file->begin;
    return SW_OK;
}

static sw_status create(sw_comm *comm, size_t size_bytes, const char *folder, const char *label,
                        sw_arena **arena, sw_error *err)
{
    uint32_t serial = ++comm->arenas;
    size_t count = (size_t)comm->world_size;
    sw_status status;
    sw_error cause = {.message = ""};
    arena_offer mine = {.part = NULL};
    sw_local_group *group = ((local_comm *)comm)->group;
    local_part *part = part_create(group, size_bytes);
    local_arena *made = calloc(1, sizeof *made);
    local_part **parts = calloc(count, sizeof *parts);
    uint8_t **base = calloc(count, sizeof *base);
    arena_offer *offers = calloc(count, sizeof *offers);
    if (!part || !made || !parts || !base || !offers) {
        status = sw_comm_give_up(comm, SW_E_MEMORY, err, "no memory for the tables of arena '%s'",
                                 label);
        goto free_tables;
    }
    status = folder && comm->rank != 0 ? SW_OK : part_fill(part, folder, label, count, &cause);
    if (status == SW_OK)
        mine.part = part;
    else
        snprintf(mine.message, sizeof mine.message, "%.255s", cause.message);
    mine.code = status == SW_E_OS ? (int32_t)cause.detail : 0;
    SW_TRY_GOTO(status, comm->ops->gather(comm, &mine, sizeof mine, offers, label, err),
                free_tables);
    status = check_offers(offers, comm->world_size, label, err);
    if (status != SW_OK) {
        mine.part = NULL; /* all ranks see that a part is missing, and none reads the others */
        goto free_tables;
    }
    for (size_t r = 0; r < count; ++r) {
        parts[r] = offers[r].part;
        base[r] = folder ? parts[0]->address + r * sw_memfd_stride(size_bytes) : parts[r]->address;
    }
    *made = (local_arena){.arena = {.size_bytes = size_bytes,
                                    .base = base,
                                    .world_size = comm->world_size,
                                    .serial = serial,
                                    .file = parts[0]->file},
                          .parts = parts};
    free(offers);
    *arena = &made->arena;
    return SW_OK;
free_tables: /* a part that was offered may be in use */
    if (!mine.part)
        part_destroy(group, part);
    free(made);
    free(parts);
    free(base);
    free(offers);
    return status;
}

static sw_status arena_create(sw_comm *comm, size_t size_bytes, const char *label, sw_arena **arena,
                              sw_error *err)
{
    return create(comm, size_bytes, NULL, label, arena, err);
}

static void destroy(sw_comm *comm)
{
    if (!comm)
        return;
    sw_fabric_fini((sw_fabric *)comm);
    free(comm);
}

static const sw_comm_ops local_ops = {
    .arena_create = arena_create,
    .mirror_create = arena_create,
    .home_create = create,
    .arena_destroy = arena_destroy,
    SW_FABRIC_OPS,
    .destroy = destroy,
};

sw_status sw_local_comm_create(sw_local_group *group, int rank, sw_comm **comm, sw_error *err)
{
    if (rank < 0 || rank >= group->world_size)
        SW_FAIL(err, SW_E_INVALID, "local communicator: rank must be in [0, %d), got %d",
                group->world_size, rank);
    local_comm *made = calloc(1, sizeof *made);
    if (!made) {
        sw_error reason;
        sw_error_set(&reason, SW_E_MEMORY, rank, "rank %d has no memory for a local communicator",
                     rank);
        sw_control_end(group->control, group->world_size, rank, SW_MEMBER_ENDED, &reason);
        SW_FAIL(err, SW_E_MEMORY, "%s", reason.message);
    }
    made->fabric.comm = (sw_comm){.ops = &local_ops,
                                  .timeout_ns = INT64_C(1800) * 1000000000,
                                  .warn_after_ns = INT64_C(30) * 1000000000};
    made->fabric.peer_ended = peer_never_ends;
    made->group = group;
    sw_status status = sw_fabric_init(&made->fabric, rank, group->world_size, group->pages, err);
    if (status != SW_OK) {
        destroy(&made->fabric.comm);
        return status;
    }
    *comm = &made->fabric.comm;
    return SW_OK;
}
