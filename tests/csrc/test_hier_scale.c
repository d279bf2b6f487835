/* test_hier_scale.c - the control plane of a group of 16,384 ranks, with hosts as threads. Each
 * host is one thread and its carrier; its other ranks are its first one again, because their pages
 * and memory are the same.
 *
 * Laws, of each host: an agreement takes at most 7 ceil(log_8 H) messages, and as many frames of
 * bytes as docs/design/hosts.md says; what ranks say beside it adds (W - L) n bytes by
 * rank, (H - 1) n by host, and n a message where it is merged. A host has connections to the hosts
 * of these messages alone. Results are right. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "base/bytes.h"
#include "check.h"
#include "comm/descriptor.h"
#include "comm/fabric.h"
#include "comm/hier.h"
#include "comm/host_map.h"
#include "platform/clock.h"
#include "platform/memory.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { FEW_HOSTS = 32, MANY_HOSTS = 64 };
#else
enum { FEW_HOSTS = 256, MANY_HOSTS = 2048 }; /* the long form has many */
#endif
enum {
    WORLD = 16384,
    RADIX = SW_DISSEMINATION_RADIX,
    HEAD_BYTES = 32,
    SLACK_BYTES = 16, /* of what is said in a frame, at most */
    STACK_BYTES = 256 * 1024,
};

static int hosts, ranks_a_host;

/* ---- the wire ---- */

typedef struct letter {
    struct letter *next;
    int from;
    uint32_t tag;
    size_t size_bytes;
    uint8_t data[];
} letter;

typedef struct end { /* one a host */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    letter *letters; /* owned: that have come */
    bool closed;
    int host;
    bool *is_peer;              /* owned: by host, whether a message went to it */
    _Atomic uint64_t sent[16];  /* messages, by kind */
    _Atomic uint64_t bytes[16]; /* in them */
} end;

typedef struct work { /* of a receive; sends are complete at once */
    int from;
    uint32_t tag;
    void *data;
    size_t size_bytes;
} work;

static end ends[MANY_HOSTS];
static work sent_work;

static sw_status wire_send(void *context, int rank, uint32_t tag, const void *data, size_t bytes,
                           void **made, sw_error *err)
{
    end *from = context, *to = &ends[rank / ranks_a_host];
    letter *sent = malloc(sizeof *sent + bytes);
    if (!sent)
        SW_FAIL(err, SW_E_MEMORY, "no memory for a message");
    *sent = (letter){.from = from->host, .tag = tag, .size_bytes = bytes};
    memcpy(sent->data, data, bytes);
    atomic_fetch_add(&from->sent[tag >> 28], 1);
    atomic_fetch_add(&from->bytes[tag >> 28], bytes);
    from->is_peer[to->host] = true;
    pthread_mutex_lock(&to->lock);
    sent->next = to->letters;
    to->letters = sent;
    pthread_cond_broadcast(&to->changed);
    pthread_mutex_unlock(&to->lock);
    *made = &sent_work;
    return SW_OK;
}

static sw_status wire_receive(void *context, int rank, uint32_t tag, void *data, size_t bytes,
                              void **made, sw_error *err)
{
    (void)context;
    work *w = malloc(sizeof *w);
    if (!w)
        SW_FAIL(err, SW_E_MEMORY, "no memory for a message");
    *w = (work){.from = rank / ranks_a_host, .tag = tag, .data = data, .size_bytes = bytes};
    *made = w;
    return SW_OK;
}

/* Under the lock. */
static bool take(end *e, const work *w)
{
    for (letter **at = &e->letters; *at; at = &(*at)->next) {
        letter *found = *at;
        if (found->from != w->from || found->tag != w->tag)
            continue;
        memcpy(w->data, found->data, found->size_bytes);
        *at = found->next;
        free(found);
        return true;
    }
    return false;
}

static sw_status wire_wait(void *context, void *argument, sw_error *err)
{
    end *e = context;
    work *w = argument;
    bool has_come = w == &sent_work;
    if (has_come)
        return SW_OK;
    pthread_mutex_lock(&e->lock);
    while (!(has_come = take(e, w)) && !e->closed)
        pthread_cond_wait(&e->changed, &e->lock);
    pthread_mutex_unlock(&e->lock);
    free(w);
    return has_come ? SW_OK : sw_error_set(err, SW_E_COMM, -1, "the wire was closed");
}

static bool wire_close(void *context, bool gently)
{
    end *e = context;
    (void)gently;
    pthread_mutex_lock(&e->lock);
    e->closed = true;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
    return true;
}

static void wire_drop(void *context, void *argument)
{
    (void)context;
    if (argument != &sent_work)
        free(argument);
}

static void wire_release(void *context)
{
    (void)context;
}

/* ---- A host whose ranks are all the same one ---- */

typedef struct same_ranks {
    sw_fabric fabric;
} same_ranks;

static sw_status same_arena_create(sw_comm *comm, size_t size_bytes, const char *label,
                                   sw_arena **arena, sw_error *err)
{
    sw_arena *made = calloc(1, sizeof *made);
    uint8_t **base = calloc((size_t)comm->world_size, sizeof *base);
    uint8_t *memory = calloc(1, size_bytes + SW_ALIGNMENT_BYTES);
    if (!made || !base || !memory)
        SW_FAIL(err, SW_E_MEMORY, "no memory for %s", label);
    uintptr_t at = (uintptr_t)memory;
    at += SW_ALIGNMENT_BYTES - at % SW_ALIGNMENT_BYTES;
    ((uint8_t *)at)[-1] = (uint8_t)(at - (uintptr_t)memory);
    for (int r = 0; r < comm->world_size; ++r)
        base[r] = (uint8_t *)at;
    *made = (sw_arena){.size_bytes = size_bytes, .base = base, .world_size = comm->world_size};
    *arena = made;
    return SW_OK;
}

static void same_arena_destroy(sw_comm *comm, sw_arena *arena)
{
    (void)comm;
    free(arena->base[0] - arena->base[0][-1]);
    free(arena->base);
    free(arena);
}

static void same_destroy(sw_comm *comm)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    sw_memory_unmap((uint8_t *)fabric->control, (size_t)comm->world_size * sizeof *fabric->control);
    free(comm);
}

static bool same_ended(sw_fabric *fabric, int rank)
{
    (void)fabric;
    (void)rank;
    return false;
}

static const sw_comm_ops same_ops = {
    .arena_create = same_arena_create,
    .arena_destroy = same_arena_destroy,
    .abort = sw_fabric_abort,
    .request_end = sw_fabric_abort,
    .look = sw_fabric_look,
    .is_alive = sw_fabric_is_alive,
    .leave = sw_fabric_leave,
    .destroy = same_destroy,
};

/* ---- the hosts ---- */

typedef enum step { BARRIER = 0, MAXIMUM, SUM, GATHER, STEPS } step;
static const char *const step_names[] = {"barrier", "maximum of 4 bytes", "sum of 4 bytes",
                                         "all_gather of 1 byte"};

typedef struct outcome {
    uint64_t frames[STEPS], frame_bytes[STEPS], beside[STEPS], beside_bytes[STEPS];
    uint64_t join_messages, join_bytes;
    int connections;
} outcome;

static outcome outcomes[MANY_HOSTS];
static int host_of[WORLD];
static pthread_barrier_t meeting;

static sw_status run_step(sw_comm *comm, step which, uint8_t *all, sw_error *err)
{
    int32_t value = which == MAXIMUM ? comm->rank : 1;
    sw_op op = {.kind = which == BARRIER ? SW_OP_BARRIER : SW_OP_ALL_REDUCE,
                .dtype = which == BARRIER ? SW_DTYPE_UINT8 : SW_DTYPE_INT32,
                .redop = which == MAXIMUM ? SW_REDOP_MAX : SW_REDOP_SUM,
                .numel = which != BARRIER,
                .data = &value,
                .label = "a step"};
    if (which == GATHER) {
        uint8_t own = (uint8_t)(1 + host_of[comm->rank] % 251);
        SW_TRY(comm->ops->gather(comm, &own, 1, all, "a step", err));
        size_t wrong = 0;
        for (int h = 0; h < hosts; ++h)
            wrong += all[h * ranks_a_host] != 1 + h % 251;
        check(wrong == 0, "%zu hosts of %d were not gathered", wrong, hosts);
        return SW_OK;
    }
    SW_TRY(comm->ops->run(comm, &op, err));
    if (which == MAXIMUM)
        check(value == WORLD - ranks_a_host, "the maximum is %d", value);
    if (which == SUM)
        check(value == WORLD, "the sum is %d", value);
    return SW_OK;
}

static void count_step(const end *e, outcome *o, step which, bool begins)
{
    uint64_t now[4] = {
        atomic_load(&e->sent[SW_MESSAGE_FRAME]), atomic_load(&e->bytes[SW_MESSAGE_FRAME]),
        atomic_load(&e->sent[SW_MESSAGE_BESIDE]), atomic_load(&e->bytes[SW_MESSAGE_BESIDE])};
    uint64_t *of[4] = {&o->frames[which], &o->frame_bytes[which], &o->beside[which],
                       &o->beside_bytes[which]};
    for (int i = 0; i < 4; ++i)
        *of[i] = begins ? now[i] : now[i] - *of[i];
}

static sw_comm *join(int host, end *e, sw_wire *wire, sw_error *err)
{
    sw_comm *comm;
    same_ranks *inside = calloc(1, sizeof *inside);
    sw_identity own = {.pid = 1 + host};
    snprintf(own.host, sizeof own.host, "host%04d", host);
    inside->fabric.comm = (sw_comm){.ops = &same_ops,
                                    .rank = 0,
                                    .world_size = ranks_a_host,
                                    .timeout_ns = INT64_C(600) * 1000000000,
                                    .warn_after_ns = INT64_C(600) * 1000000000};
    inside->fabric.peer_ended = same_ended;
    check(sw_pages_map((size_t)ranks_a_host * sizeof *inside->fabric.control,
                       (uint8_t **)&inside->fabric.control, err) == SW_OK,
          "control pages: %s", err->message);
    atomic_store(&inside->fabric.is_open, true);
    *wire = (sw_wire){.context = e,
                      .send = wire_send,
                      .receive = wire_receive,
                      .wait = wire_wait,
                      .close = wire_close,
                      .drop = wire_drop,
                      .release = wire_release};
    sw_status status = sw_hier_comm_create(&inside->fabric.comm, host * ranks_a_host, WORLD,
                                           host_of, &own, wire, &comm, err);
    return check(status == SW_OK, "host %d did not join: %s", host, err->message) ? comm : NULL;
}

static void *run_host(void *argument)
{
    end *e = argument;
    outcome *o = &outcomes[e->host];
    sw_wire wire;
    sw_error err;
    uint8_t *all = malloc(WORLD);
    sw_comm *comm = join(e->host, e, &wire, &err);
    for (int kind = 0; kind < 16; ++kind)
        if (kind != SW_MESSAGE_PROBE && kind != SW_MESSAGE_END) {
            o->join_messages += atomic_load(&e->sent[kind]);
            o->join_bytes += atomic_load(&e->bytes[kind]);
        }
    if (comm) {
        char text[SW_COMM_PEER_BYTES];
        comm->ops->peer(comm, WORLD - ranks_a_host, text);
        check(strstr(text, "on host host") != NULL, "a peer is called %s", text);
    }
    for (int which = 0; comm && which < STEPS; ++which) {
        count_step(e, o, (step)which, true);
        if (!check(run_step(comm, (step)which, all, &err) == SW_OK, "%s of host %d: %s",
                   step_names[which], e->host, err.message))
            break;
        count_step(e, o, (step)which, false);
    }
    pthread_barrier_wait(&meeting); /* nobody leaves before all have counted */
    if (comm)
        comm->ops->destroy(comm);
    for (int h = 0; h < hosts; ++h)
        o->connections += e->is_peer[h];
    free(all);
    return NULL;
}

/* ---- the law ---- */

typedef struct formula { /* of docs/design/hosts.md */
    uint64_t messages, frame_bytes;
    uint64_t connections;
} formula;

static formula derive(void)
{
    formula f = {.messages = 0};
    for (int64_t far = 1; far < hosts; far *= RADIX)
        for (int64_t j = 1; j < RADIX && j * far < hosts; ++j)
            f.messages++;
    f.connections = 2 * f.messages;
    /* head, one side of a part and its length, a bit a host */
    size_t part = 4 + sizeof(sw_part_side) + 4;
    f.frame_bytes = HEAD_BYTES + (part + 15) / 16 * 16 + ((size_t)hosts + 7) / 8;
    return f;
}

static void check_host(const outcome *o, const formula *f, int host)
{
    const uint64_t said[STEPS] = {0, f->messages * 4, (uint64_t)(hosts - 1) * 4,
                                  (uint64_t)(WORLD - ranks_a_host)};
    for (int which = 0; which < STEPS; ++which) {
        uint64_t bytes = o->frame_bytes[which] + o->beside_bytes[which];
        uint64_t least = f->messages * f->frame_bytes + said[which];
        check(o->frames[which] == f->messages && o->beside[which] == 0,
              "host %d, %s: %llu messages and %llu beside them, not %llu", host, step_names[which],
              (unsigned long long)o->frames[which], (unsigned long long)o->beside[which],
              (unsigned long long)f->messages);
        check(bytes >= least && bytes <= least + f->messages * SLACK_BYTES,
              "host %d, %s: %llu bytes, not %llu", host, step_names[which],
              (unsigned long long)bytes, (unsigned long long)least);
    }
    check(o->connections <= (int)f->connections, "host %d has %d connections, not %llu", host,
          o->connections, (unsigned long long)f->connections);
}

static void print_table(const formula *f)
{
    const outcome *o = &outcomes[hosts - 1];
    printf("%d ranks on %d hosts; of a host, formula: %llu messages of %llu bytes\n", WORLD, hosts,
           (unsigned long long)f->messages, (unsigned long long)f->frame_bytes);
    for (int which = 0; which < STEPS; ++which)
        printf("%-22s %3llu messages %7llu bytes, %6.1f a rank\n", step_names[which],
               (unsigned long long)o->frames[which], (unsigned long long)o->frame_bytes[which],
               (double)o->frame_bytes[which] / ranks_a_host);
    printf("join                   %3llu messages %7llu bytes, %6.1f a rank\n",
           (unsigned long long)o->join_messages, (unsigned long long)o->join_bytes,
           (double)o->join_bytes / ranks_a_host);
    printf("connections sent to    %3d of a carrier, none of other ranks\n", o->connections);
}

/* As many hosts as threads can be had. */
static int start_hosts(pthread_t *threads)
{
    pthread_attr_t attributes;
    int started = 0;
    pthread_barrier_init(&meeting, NULL, (unsigned)hosts);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    for (int h = 0; h < hosts; ++h) {
        ends[h].host = h;
        ends[h].is_peer = calloc((size_t)hosts, sizeof(bool));
        pthread_mutex_init(&ends[h].lock, NULL);
        pthread_cond_init(&ends[h].changed, NULL);
    }
    while (started < hosts &&
           pthread_create(&threads[started], &attributes, run_host, &ends[started]) == 0)
        ++started;
    pthread_attr_destroy(&attributes);
    return started;
}

static void free_end(end *e)
{
    while (e->letters) {
        letter *next = e->letters->next;
        free(e->letters);
        e->letters = next;
    }
    free(e->is_peer);
}

int main(void)
{
    static pthread_t threads[MANY_HOSTS];
    struct rusage usage;
    const char *form = getenv("SW_TEST_LONG");
    hosts = form && strcmp(form, "1") == 0 ? MANY_HOSTS : FEW_HOSTS;
    ranks_a_host = WORLD / hosts;
    const formula f = derive();
    int64_t begun_ns = sw_clock_now_ns();
    for (int r = 0; r < WORLD; ++r)
        host_of[r] = r / ranks_a_host;
    int started = start_hosts(threads);
    if (!check(started == hosts, "only %d of %d threads could be started", started, hosts))
        return check_result();
    for (int h = 0; h < hosts; ++h)
        pthread_join(threads[h], NULL);
    for (int h = 0; h < hosts; ++h)
        check_host(&outcomes[h], &f, h);
    print_table(&f);
    for (int h = 0; h < hosts; ++h)
        free_end(&ends[h]);
    getrusage(RUSAGE_SELF, &usage);
    printf("%.1f s, %.2f GB\n", (double)(sw_clock_now_ns() - begun_ns) * 1e-9,
           (double)usage.ru_maxrss / (1 << 20));
    return check_result();
}
