/* fake_nccl.c - a libnccl.so.2 on the simulated GPUs: see sim.h. Only the functions of
 * csrc/comm/nccl_abi.h exist.
 *
 * A group of calls is one operation of a stream. It runs for all ranks at once, when the group of
 * the same number is at the head of its stream on every rank. Sums begin at rank 1 and end with
 * rank 0, an order that is not the engine's, since NCCL promises none.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fake_entry.h"
#include "fake_nccl.h"
#include "kernels/kernels.h"

enum { ABORT_MS_MAX = 20000 };

static const char *const kind_name[] = {"all_reduce", "reduce_scatter", "all_gather",
                                        "broadcast",  "send",           "recv"};

static clique *cliques;
sw_nccl_comm nccl_comms;
static int id_count;
static __thread int group_depth, group_error;
static __thread nccl_group open_group;

int nccl_group_depth(void)
{
    return group_depth;
}

static size_t call_bytes(const nccl_call *call)
{
    return call->count * nccl_element_bytes(call->dtype);
}

/* Return the bytes that the call reads on its own rank. */
size_t nccl_read_bytes(const nccl_call *call, int world_size)
{
    return call->kind == REDUCE_SCATTER ? call_bytes(call) * (size_t)world_size : call_bytes(call);
}

size_t nccl_written_bytes(const nccl_call *call, int world_size)
{
    return call->kind == ALL_GATHER ? call_bytes(call) * (size_t)world_size : call_bytes(call);
}

/* ---- running ---- */

static nccl_group *group_of(const sim_op *op)
{
    return op->group;
}

/* Return a group of the same rank that must run before `g`, or NULL: those of all communicators run
 * one after the other, if that is asked for. */
static const nccl_group *group_before(const nccl_group *g)
{
    const nccl_group *found = NULL;
    for (sw_nccl_comm c = nccl_comms; c && sim.strict & SIM_STRICT_ORDER; c = c->next)
        if (c->first && c->first->turn < (found ? found : g)->turn &&
            c->first->stream->rank == g->stream->rank)
            found = c->first;
    return found;
}

static bool all_there(const clique *c)
{
    for (int r = 0; r < c->world_size; ++r) {
        const nccl_group *g = c->comm[r] ? c->comm[r]->first : NULL;
        if (!g || !g->stream->first || g->stream->first->group != g || group_before(g))
            return false;
    }
    return true;
}

static bool ready(sim_op *op)
{
    nccl_group *g = group_of(op);
    if (!g->dropped && g->comm->clique->in_files)
        return g->comm->first == g && !group_before(g) && nccl_files_ready(g);
    return g->dropped || (g->comm->first == g && all_there(g->comm->clique));
}

/* Drive the stream of a group until that is its head; if it is, run it. */
static void drive_group(const nccl_group *g, int depth)
{
    sim_op *until = g->stream->first;
    while (until && until->group != g && until->next && until->next->group != g)
        until = until->next;
    if (until)
        sim_drive(g->stream, until, depth);
}

static void drive(sim_op *op, int depth)
{
    const nccl_group *g = group_of(op), *before = g->dropped ? NULL : group_before(g);
    sw_nccl_comm comm = g->comm;
    const clique *c = comm->clique;
    if (comm->driving)
        return;
    comm->driving = true;
    if (before)
        drive_group(before, depth);
    for (int r = 0; !before && !c->in_files && r < c->world_size && comm->first == g;
         ++r) { /* driving may run the operation */
        const nccl_group *other = c->comm[r] ? c->comm[r]->first : NULL;
        const nccl_group *earlier = other && other != g ? group_before(other) : NULL;
        if (earlier)
            drive_group(earlier, depth);
        else if (other && other != g && other->stream->first && other->stream->first->group != other)
            drive_group(other, depth);
    }
    comm->driving = false;
}

static const nccl_call *nth_call(const nccl_group *g, call_kind kind, int peer, int nth)
{
    for (int i = 0; i < g->call_count; ++i)
        if (g->call[i].kind == kind && g->call[i].peer == peer && nth-- == 0)
            return &g->call[i];
    return NULL;
}

/* Count the calls of that kind and peer before call `at`. */
static int place_of(const nccl_group *g, int at)
{
    int place = 0;
    for (int i = 0; i < at; ++i)
        place += g->call[i].kind == g->call[at].kind && g->call[i].peer == g->call[at].peer;
    return place;
}

static bool is_paired(const clique *c, int rank, int at)
{
    const nccl_group *g = c->comm[rank]->first;
    const nccl_call *call = &g->call[at], *other;
    if (call->kind != SEND && call->kind != RECEIVE) {
        const nccl_group *base = c->comm[0]->first;
        other = at < base->call_count ? &base->call[at] : NULL;
        return other && other->kind == call->kind && other->count == call->count &&
               other->dtype == call->dtype && other->op == call->op && other->peer == call->peer &&
               base->call_count == g->call_count;
    }
    other = nth_call(c->comm[call->peer]->first, call->kind == SEND ? RECEIVE : SEND, rank,
                     place_of(g, at));
    return other && other->count == call->count && other->dtype == call->dtype;
}

/* Return false, after a report, if a call of some rank has no counterpart. All ranks then fail. */
static bool matches(const clique *c)
{
    for (int r = 0; r < c->world_size; ++r) {
        const nccl_group *g = c->comm[r]->first;
        for (int i = 0; i < g->call_count; ++i) {
            if (is_paired(c, r, i))
                continue;
            char detail[256];
            const nccl_group *base = c->comm[0]->first;
            snprintf(detail, sizeof detail,
                     "rank %d: %s of %zu x dtype %d; rank 0: %s of %zu x dtype %d", r,
                     kind_name[g->call[i].kind], g->call[i].count, g->call[i].dtype,
                     kind_name[base->call[0].kind], base->call[0].count, base->call[0].dtype);
            sim_report("mismatched collective", detail, &g->stream->first->site,
                       &base->stream->first->site);
            return false;
        }
    }
    return true;
}

/* ---- bytes between nodes ---- */

static int node_of[SIM_DEVICE_MAX];
static double sent_across[SIM_DEVICE_MAX];

/* For tests: the node of the calling rank; 0 at first. */
SIM_API void sim_nccl_set_node(int node)
{
    sim_lock();
    node_of[sim_current_rank()] = node;
    sim_leave();
}

/* For tests: the bytes that the calling rank has sent to other nodes. A ring of NCCL's leaves each
 * node once, and the ranks of a node share out the rings. */
SIM_API double sim_nccl_sent_across(void)
{
    sim_lock();
    double sent = sent_across[sim_current_rank()];
    sim_leave();
    return sent;
}

static double sent_by(const clique *c, const nccl_group *own, const nccl_call *call)
{
    double bytes = (double)(call->count * nccl_element_bytes(call->dtype)), beside = 0;
    double world_size = c->world_size;
    for (int r = 0; r < c->world_size; ++r)
        beside += c->comm[r]->first->node == own->node;
    if (call->kind == SEND)
        return c->comm[call->peer]->first->node == own->node ? 0 : bytes;
    if (call->kind == RECEIVE || beside == world_size)
        return 0;
    double turns = call->kind == ALL_REDUCE  ? 2 * (world_size - 1) / world_size
                   : call->kind == BROADCAST ? 1
                                             : world_size - 1;
    return bytes * turns / beside;
}

/* Compute the result of call `at` for `rank` from the inputs of all ranks. */
static void compute(const clique *c, int rank, int at, unsigned char *out)
{
    const nccl_group *own = c->comm[rank]->first;
    const nccl_call *call = &own->call[at];
    size_t bytes = call_bytes(call), world = (size_t)c->world_size;
    unsigned char *inputs = malloc(bytes * world + 1);
    if (call->kind == RECEIVE) {
        const nccl_call *send = nth_call(c->comm[call->peer]->first, SEND, rank, place_of(own, at));
        memcpy(out, send->from, bytes);
    } else if (call->kind == BROADCAST) {
        memcpy(out, c->comm[call->peer]->first->call[at].from, bytes);
    } else {
        for (size_t k = 0; k < world; ++k) {
            const unsigned char *from = c->comm[k]->first->call[at].from;
            from += call->kind == REDUCE_SCATTER ? bytes * (size_t)rank : 0;
            memcpy(inputs + k * bytes, from, bytes);
        }
        if (call->kind == ALL_GATHER)
            memcpy(out, inputs, bytes * world);
        else
            nccl_fold(out, inputs, bytes, c->world_size, call);
    }
    free(inputs);
}

/* Return true if this process has the memory of that rank. */
static bool is_here(const clique *c, int rank)
{
    return !c->in_files || rank == c->own_rank;
}

static void execute(const clique *c)
{
    unsigned char *out[SIM_DEVICE_MAX][CALL_MAX];
    for (int r = 0; r < c->world_size; ++r)
        for (int i = 0; is_here(c, r) && i < c->comm[r]->first->call_count; ++i) {
            sent_across[c->comm[r]->first->stream->rank] +=
                sent_by(c, c->comm[r]->first, &c->comm[r]->first->call[i]);
            out[r][i] = malloc(nccl_written_bytes(&c->comm[r]->first->call[i], c->world_size) + 1);
            if (c->comm[r]->first->call[i].kind != SEND)
                compute(c, r, i, out[r][i]);
        }
    for (int r = 0; r < c->world_size; ++r)
        for (int i = 0; is_here(c, r) && i < c->comm[r]->first->call_count; ++i) {
            const nccl_call *call = &c->comm[r]->first->call[i];
            if (call->kind != SEND)
                memcpy(call->to, out[r][i], nccl_written_bytes(call, c->world_size));
            free(out[r][i]);
        }
}

static void finish_first(sw_nccl_comm comm)
{
    nccl_group *g = comm->first;
    comm->first = g->next;
    if (!comm->first)
        comm->last = NULL;
    sim_pop(g->stream);
    free(g);
}

static void run(sim_op *op)
{
    nccl_group *g = group_of(op);
    if (g->dropped) {
        sim_pop(g->stream);
        free(g);
        return;
    }
    clique *c = g->comm->clique;
    bool right = matches(c);
    if (right)
        execute(c);
    for (int r = 0; r < c->world_size; ++r) {
        if (!right)
            c->comm[r]->error = SW_NCCL_INVALID_USAGE;
        if (is_here(c, r))
            finish_first(c->comm[r]);
    }
    if (c->in_files)
        nccl_files_next(c);
}

/* ---- calls ---- */

static long settlements; /* calls that came back before they were done */
static int64_t settling_ns;

/* For tests: the time that calls of non-blocking communicators take from now on. */
SIM_API void sim_nccl_settle_after(long ns)
{
    settling_ns = ns;
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* NCCL connects peers at the first operation that needs it, which waits for all hosts: those of
 * collectives from 2.22 on, unless NCCL_RUNTIME_CONNECT is 0, and those of sends always. */
static void connect_lazily(sw_nccl_comm comm, call_kind kind)
{
    const char *lazily = getenv("NCCL_RUNTIME_CONNECT");
    clique *c = comm->clique;
    kind = kind == RECEIVE ? SEND : kind;
    if (comm->is_connected[kind] || (kind != SEND && lazily && strcmp(lazily, "0") == 0))
        return;
    comm->is_connected[kind] = true;
    comm->awaited |= 1u << kind;
    c->met[kind]++;
    if (c->in_files)
        nccl_files_meet(c, kind_name[kind]);
}

static bool has_met(sw_nccl_comm comm)
{
    const clique *c = comm->clique;
    for (int k = 0; k < KIND_COUNT; ++k)
        if (comm->awaited & 1u << k &&
            (c->in_files ? nccl_files_met(c, kind_name[k]) : c->met[k]) >= c->world_size)
            comm->awaited &= ~(1u << k);
    return !comm->awaited;
}

static long turns; /* guarded by the gate */

static int enqueue_group(const nccl_group *group)
{
    nccl_group *g = malloc(sizeof *g);
    *g = *group;
    g->next = NULL;
    g->node = node_of[sim_current_rank()];
    g->turn = turns++;
    sim_op *op = sim_op_new(OP_COLLECTIVE, kind_name[g->call[0].kind]);
    op->group = g;
    sim_tick(g->stream);
    int world = g->comm->clique->world_size;
    sim_track(&g->stream->clock, g->stream->actor, &g->comm->order, 1, SW_ACCESS_WRITE, &op->site);
    for (int i = 0; i < g->call_count; ++i) {
        const nccl_call *call = &g->call[i];
        if (!g->comm->blocks && world > 1)
            connect_lazily(g->comm, call->kind);
        if (call->kind != RECEIVE && (call->kind != BROADCAST || call->peer == g->comm->rank))
            sim_track(&g->stream->clock, g->stream->actor, call->from, nccl_read_bytes(call, world),
                      SW_ACCESS_READ, &op->site);
        if (call->kind != SEND)
            sim_track(&g->stream->clock, g->stream->actor, call->to,
                      nccl_written_bytes(call, world), SW_ACCESS_WRITE, &op->site);
    }
    if (g->comm->last)
        g->comm->last->next = g;
    else
        g->comm->first = g;
    g->comm->last = g;
    sim_enqueue(g->stream, op);
    return SW_NCCL_SUCCESS;
}

/* A call of a non-blocking communicator may return before it is done. No other call may follow
 * before ncclCommGetAsyncError reports success: NCCL's init.cc, ncclCommEnsureReady. */
static int come_back(sw_nccl_comm comm, int result, int questions)
{
    /* NCCL has no thread for one rank: enqueue.cc, ncclLaunchOneRank. C programs test polls there */
    bool is_lone = (comm->clique->in_files || sim.strict & SIM_STRICT_LONE) && comm->clique->world_size == 1;
    if (result != SW_NCCL_SUCCESS || comm->blocks || is_lone)
        return result;
    comm->unsettled = questions;
    comm->busy_until_ns = settling_ns ? now_ns() + settling_ns : 0;
    settlements++;
    return SW_NCCL_IN_PROGRESS;
}

SIM_API long sim_nccl_settlements(void)
{
    return settlements;
}

static bool is_settled(sw_nccl_comm comm, const char *call)
{
    sim_site site = sim_here(call);
    bool settled = !comm->unsettled && !comm->awaited;
    if (!settled)
        sim_report("unsettled communicator", call, &site, NULL);
    return settled;
}

static size_t sent_bytes;

/* Count the bytes that this rank sends for a call, by rings. */
static void count_sent(const nccl_call *call, size_t world_size)
{
    size_t bytes = call_bytes(call);
    switch (call->kind) {
    case ALL_REDUCE:
        sent_bytes += 2 * bytes * (world_size - 1) / world_size;
        break;
    case REDUCE_SCATTER:
    case ALL_GATHER: /* of a slice */
        sent_bytes += bytes * (world_size - 1);
        break;
    case BROADCAST:
        sent_bytes += bytes * (world_size - 1) / world_size;
        break;
    case SEND:
        sent_bytes += bytes;
        break;
    case RECEIVE:
        break;
    }
}

SIM_API size_t sim_nccl_sent_bytes(void)
{
    return sent_bytes;
}

static int issue(const nccl_call *call, sw_nccl_comm comm, sw_cu_stream stream)
{
    if (comm && !is_settled(comm, kind_name[call->kind]))
        return SW_NCCL_INVALID_ARGUMENT;
    if (!comm || !nccl_element_bytes(call->dtype) || call->peer >= comm->clique->world_size)
        return SW_NCCL_INVALID_ARGUMENT;
    if (comm->error)
        return comm->error;
    if (!stream) /* the legacy default stream of the communicator's GPU */
        stream = sim.context[comm->clique->in_files ? 0 : comm->rank].legacy;
    if (!stream)
        return SW_NCCL_UNHANDLED_CUDA_ERROR;
    if (open_group.call_count && (open_group.comm != comm || open_group.stream != stream))
        return SW_NCCL_INVALID_USAGE;
    if (open_group.call_count == CALL_MAX)
        return SW_NCCL_INTERNAL_ERROR;
    open_group.comm = comm;
    open_group.stream = stream;
    open_group.call[open_group.call_count] = *call;
    open_group.call_count++;
    count_sent(call, (size_t)comm->clique->world_size);
    if (group_depth > 0)
        return SW_NCCL_SUCCESS;
    int result = come_back(comm, enqueue_group(&open_group), 1);
    open_group.call_count = 0;
    return result;
}

SIM_API int ncclGetVersion(int *version)
{
    const char *pretended = getenv("SIM_NCCL_VERSION");
    *version = pretended ? atoi(pretended) : 22100;
    return SW_NCCL_SUCCESS;
}

SIM_API const char *ncclGetErrorString(int result)
{
    return result == SW_NCCL_SYSTEM_ERROR    ? "unhandled system error"
           : result == SW_NCCL_INVALID_USAGE ? "invalid usage"
                                             : "an error of the simulation";
}

SIM_API const char *ncclGetLastError(sw_nccl_comm comm)
{
    (void)comm;
    return "";
}

SIM_API int ncclGetUniqueId(sw_nccl_id *id)
{
    ENTER("ncclGetUniqueId");
    memset(id, 0, sizeof *id);
    if (nccl_files_id(id))
        LEAVE(SW_NCCL_SUCCESS);
    snprintf(id->internal, sizeof id->internal, "simulated %d", ++id_count);
    LEAVE(SW_NCCL_SUCCESS);
}

/* A thread that leaves a group open adds every later communicator to that group. */
static void outside_groups(const char *call)
{
    sim_site site = sim_here(call);
    if (group_depth != 0)
        sim_report("open group", call, &site, NULL);
}

/* Let the simulation watch the communicator's own memory like the caller's. */
static void watch(sw_nccl_comm comm)
{
    sim_block *block = calloc(1, sizeof *block);
    block->memory = &comm->order;
    block->size_bytes = 1;
    block->foreign = true;
    block->rank = sim_current_rank();
    block->segments = calloc(1, sizeof *block->segments);
    block->segments->end = 1;
    block->next = sim.blocks;
    sim.blocks = block;
}

static bool has_all(clique *c)
{
    return (c->in_files ? nccl_files_arrived(c) : c->arrived) == c->world_size;
}

SIM_API int ncclCommInitRankConfig(sw_nccl_comm *comm, int world_size, sw_nccl_id id, int rank,
                                   sw_nccl_config *config)
{
    ENTER("ncclCommInitRankConfig");
    FORBIDDEN_IN_CAPTURES("ncclCommInitRankConfig");
    outside_groups("ncclCommInitRankConfig");
    sim.collective_ready = ready;
    sim.collective_run = run;
    sim.collective_drive = drive;
    if (config->size != sizeof *config || config->magic != SW_NCCL_CONFIG_MAGIC || rank < 0 ||
        rank >= world_size || world_size > SIM_DEVICE_MAX || !sim_current_context())
        LEAVE(SW_NCCL_INVALID_ARGUMENT);
    clique *c = cliques;
    while (c && memcmp(&c->id, &id, sizeof id) != 0)
        c = c->next;
    if (!c) {
        c = calloc(1, sizeof *c);
        c->id = id;
        c->world_size = world_size;
        c->next = cliques;
        cliques = c;
    }
    if (nccl_files_is_id(&id))
        nccl_files_join(c, rank);
    sw_nccl_comm made = calloc(1, sizeof *made);
    if (!sim.comms) /* those of an earlier simulation, whose streams are gone */
        nccl_comms = NULL;
    made->clique = c;
    made->rank = rank;
    made->blocks = config->blocking != 0;
    made->next = nccl_comms;
    nccl_comms = made;
    c->comm[rank] = made;
    c->arrived++;
    watch(made);
    sim.comms++;
    *comm = made;
    if (!made->blocks)
        LEAVE(SW_NCCL_IN_PROGRESS);
    while (!has_all(c)) {
        sim_yield();
        sim_leave();
        nanosleep(&(const struct timespec){.tv_nsec = 1000000}, NULL);
        sim_lock();
    }
    LEAVE(SW_NCCL_SUCCESS);
}

/* Return true if a rank that had joined has ended the communicator while operations of this one
 * wait.
 */
static bool has_lost_one(const clique *c, sw_nccl_comm comm)
{
    bool lost = c->in_files && nccl_files_gone(c) >= 0;
    for (int r = 0; !c->in_files && r < c->world_size; ++r)
        lost |= !c->comm[r];
    return comm->first && lost;
}

SIM_API int ncclCommGetAsyncError(sw_nccl_comm comm, sw_nccl_result *result)
{
    ENTER("ncclCommGetAsyncError");
    clique *c = comm->clique;
    bool all = has_all(c), met = has_met(comm);
    bool is_done = (!comm->unsettled || --comm->unsettled == 0) && met &&
                   (!comm->busy_until_ns || now_ns() >= comm->busy_until_ns);
    if (!comm->error && all && has_lost_one(c, comm))
        comm->error = SW_NCCL_REMOTE_ERROR;
    if (comm->finalizing && comm->first)
        sim_drive(comm->first->stream, NULL, 0);
    bool is_busy = !all || !is_done || (comm->finalizing && comm->first);
    *result = comm->error ? comm->error : is_busy ? SW_NCCL_IN_PROGRESS : SW_NCCL_SUCCESS;
    if (!all || !met)
        sim_yield();
    LEAVE(SW_NCCL_SUCCESS);
}

SIM_API int ncclCommCount(sw_nccl_comm comm, int *count)
{
    ENTER("ncclCommCount");
    if (!is_settled(comm, "ncclCommCount"))
        LEAVE(SW_NCCL_INVALID_ARGUMENT);
    *count = comm->clique->world_size;
    LEAVE(SW_NCCL_SUCCESS);
}

SIM_API int ncclCommUserRank(sw_nccl_comm comm, int *rank)
{
    ENTER("ncclCommUserRank");
    if (!is_settled(comm, "ncclCommUserRank"))
        LEAVE(SW_NCCL_INVALID_ARGUMENT);
    *rank = comm->rank;
    LEAVE(SW_NCCL_SUCCESS);
}

SIM_API int ncclCommCuDevice(sw_nccl_comm comm, int *ordinal)
{
    ENTER("ncclCommCuDevice");
    if (!is_settled(comm, "ncclCommCuDevice"))
        LEAVE(SW_NCCL_INVALID_ARGUMENT);
    *ordinal = comm->clique->in_files ? 0 : comm->rank;
    LEAVE(SW_NCCL_SUCCESS);
}

SIM_API int ncclCommFinalize(sw_nccl_comm comm)
{
    ENTER("ncclCommFinalize");
    if (!is_settled(comm, "ncclCommFinalize"))
        LEAVE(SW_NCCL_INVALID_ARGUMENT);
    comm->finalizing = comm->clique->in_files && comm->first;
    if (comm->finalizing) /* peers need time */
        LEAVE(come_back(comm, SW_NCCL_SUCCESS, 2));
    while (comm->first && comm->first->stream->first) { /* enqueued groups run first */
        const nccl_group *before = comm->first;
        sim_drive(before->stream, NULL, 0);
        if (comm->first == before)
            break;
    }
    LEAVE(come_back(comm, SW_NCCL_SUCCESS, 2));
}

/* Release its waiting kernels. */
static void let_go(sw_nccl_comm comm)
{
    for (nccl_group *g = comm->first; g; g = g->next)
        g->dropped = true;
    comm->first = comm->last = NULL;
    comm->clique->is_left = true;
    if (comm->clique->in_files)
        nccl_files_end(comm->clique);
}

/* Its memory stays until the process ends, since other ranks' groups may name it. */
static void drop(sw_nccl_comm comm)
{
    let_go(comm);
    if (comm->clique->in_files)
        nccl_files_leave(comm->clique);
    comm->clique->comm[comm->rank] = NULL;
    sim.comms--;
}

SIM_API int ncclCommDestroy(sw_nccl_comm comm)
{
    ENTER("ncclCommDestroy");
    FORBIDDEN_IN_CAPTURES("ncclCommDestroy");
    outside_groups("ncclCommDestroy");
    if (!is_settled(comm, "ncclCommDestroy"))
        LEAVE(SW_NCCL_INVALID_ARGUMENT);
    drop(comm);
    LEAVE(SW_NCCL_SUCCESS);
}

static bool aborts_wait;

/* For tests: from now on aborts wait as NCCL's do in the worst case. */
SIM_API void sim_nccl_let_aborts_wait(int wait)
{
    aborts_wait = wait;
}

/* An abort frees memory, so it waits for all work of the GPU. That includes kernels of other
 * communicators (NVIDIA/nccl issues 549, 564, 1013), which only an abort of those releases. In the
 * worst case it also waits for work enqueued behind, and for a peer that has not begun to end its
 * part, since the peer may still read this rank's memory (863). */
static bool abort_waits(const clique *own)
{
    for (sw_cu_stream s = sim.streams; s; s = s->next)
        if (s->first && s->first->kind == OP_COLLECTIVE && !group_of(s->first)->dropped)
            return true;
    for (const clique *c = cliques; aborts_wait && c; c = c->next)
        if (c != own && c->in_files && !c->is_left && c->comm[c->own_rank]->first)
            return true;
    return aborts_wait && nccl_files_stay(own);
}

SIM_API int ncclCommAbort(sw_nccl_comm comm)
{
    ENTER("ncclCommAbort");
    FORBIDDEN_IN_CAPTURES("ncclCommAbort");
    outside_groups("ncclCommAbort");
    const clique *own = comm->clique;
    let_go(comm);
    /* With ranks as threads this one has the baton, so no other rank could release them. */
    for (int ms = 0; own->in_files && abort_waits(own); ++ms) {
        const struct timespec nap = {.tv_nsec = 1000000};
        sim_leave();
        nanosleep(&nap, NULL);
        sim_lock();
        if (ms == ABORT_MS_MAX) {
            sim_site site = sim_here("ncclCommAbort");
            sim_report("deadlock", "an abort waits for other communicators or ranks", &site, NULL);
            break;
        }
    }
    drop(comm);
    LEAVE(SW_NCCL_SUCCESS);
}

/* For tests: the communicators of this process. */
SIM_API int sim_nccl_communicators(void)
{
    return sim.comms;
}

SIM_API int ncclGroupStart(void)
{
    if (group_depth == GROUP_DEPTH_MAX)
        return SW_NCCL_INVALID_USAGE;
    group_depth++;
    return SW_NCCL_SUCCESS;
}

/* A group with a call that failed is dropped. */
SIM_API int ncclGroupEnd(void)
{
    int result = SW_NCCL_SUCCESS;
    if (group_depth == 0)
        return SW_NCCL_INVALID_USAGE;
    bool is_outermost = --group_depth == 0, enters = sim_enter("ncclGroupEnd", &result);
    if (is_outermost && enters && !group_error && open_group.call_count)
        result = come_back(open_group.comm, enqueue_group(&open_group), 1);
    if (is_outermost && group_error)
        result = group_error;
    if (is_outermost)
        open_group.call_count = group_error = 0;
    if (enters)
        sim_leave();
    return result;
}

/* Issue a call that is counted and may be told to fail. */
static int issue_counted(const char *name, const nccl_call *call, sw_nccl_comm comm,
                         sw_cu_stream stream)
{
    int result = SW_NCCL_SUCCESS;
    if (sim_enter(name, &result)) {
        result = issue(call, comm, stream);
        sim_leave();
    }
    if (result != SW_NCCL_SUCCESS && group_depth > 0 && !group_error)
        group_error = result;
    return result;
}

#define ISSUE(name, ...)                                  \
    do {                                                  \
        nccl_call call_ = {__VA_ARGS__};                  \
        return issue_counted(name, &call_, comm, stream); \
    } while (0)

static long averages; /* reductions with ncclAvg that were asked for */

SIM_API long sim_nccl_averages(void)
{
    return averages;
}

SIM_API int ncclAllReduce(const void *from, void *to, size_t count, int dtype, int op,
                          sw_nccl_comm comm, sw_cu_stream stream)
{
    averages += op == SW_NCCL_AVG;
    ISSUE("ncclAllReduce", .kind = ALL_REDUCE, .from = from, .to = to, .count = count,
          .dtype = dtype, .op = op);
}

SIM_API int ncclReduceScatter(const void *from, void *to, size_t count, int dtype, int op,
                              sw_nccl_comm comm, sw_cu_stream stream)
{
    averages += op == SW_NCCL_AVG;
    ISSUE("ncclReduceScatter", .kind = REDUCE_SCATTER, .from = from, .to = to, .count = count,
          .dtype = dtype, .op = op);
}

SIM_API int ncclAllGather(const void *from, void *to, size_t count, int dtype, sw_nccl_comm comm,
                          sw_cu_stream stream)
{
    ISSUE("ncclAllGather", .kind = ALL_GATHER, .from = from, .to = to, .count = count,
          .dtype = dtype);
}

SIM_API int ncclBroadcast(const void *from, void *to, size_t count, int dtype, int root,
                          sw_nccl_comm comm, sw_cu_stream stream)
{
    ISSUE("ncclBroadcast", .kind = BROADCAST, .from = from, .to = to, .count = count,
          .dtype = dtype, .peer = root);
}

SIM_API int ncclSend(const void *from, size_t count, int dtype, int peer, sw_nccl_comm comm,
                     sw_cu_stream stream)
{
    ISSUE("ncclSend", .kind = SEND, .from = from, .count = count, .dtype = dtype, .peer = peer);
}

SIM_API int ncclRecv(void *to, size_t count, int dtype, int peer, sw_nccl_comm comm,
                     sw_cu_stream stream)
{
    ISSUE("ncclRecv", .kind = RECEIVE, .to = to, .count = count, .dtype = dtype, .peer = peer);
}
