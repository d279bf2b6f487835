/* comm.h - collectives as one table of functions, independent of the transport.
 *
 * Idea: every rank issues the same operations in the same order; operation t has ticket t. An
 * operation on an arena is posted and completes while the caller computes (poll() advances it). An
 * operation on private memory is complete when its call returns. There is no progress thread: each
 * call advances all operations.
 *
 * Left out: the rendezvous of ranks (shm.h, local.h), the meaning of a bucket (reduce/).
 *
 * Thread rule: one at a time per communicator, except look, is_alive and request_end. Errors end
 * the communicator: every later call repeats the first error. If ranks disagree, every rank returns
 * the same message. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "comm/account.h"
#include "comm/exchange.h"
#include "kernels/kernels.h"
#include "tensor/dtype.h"

enum { SW_COMM_LABEL_BYTES = 96, SW_COMM_PEER_BYTES = 96, SW_COMM_MAX_WORLD = 1024 };

typedef enum sw_op_kind {
    SW_OP_BARRIER = 0,
    SW_OP_ALL_REDUCE,
    SW_OP_REDUCE_SCATTER, /* as all_reduce, but only the owner gets a slice's result */
    SW_OP_ALL_GATHER,
    SW_OP_BROADCAST,
    SW_OP_KIND_COUNT,
} sw_op_kind;

/* Memory of one size on every rank, mapped by all. Owned by the communicator's caller. */
typedef struct sw_arena {
    size_t size_bytes;
    uint8_t **base; /* owned; world_size addresses in this process, base[rank] is this rank's part;
                       NULL: on another host */
    int world_size;
    uint32_t serial;                   /* counted from 1 by arena_create, so equal on all ranks */
    const struct sw_file_memory *file; /* of this host's parts; NULL: they have no home on a disk */
} sw_arena;

/* The plan of a fold. The reducer decides it once every rank has posted, from the use bits beside
 * the data. */
typedef struct sw_fold_plan {
    void *context; /* borrowed until the operation is complete */
    /* Set the contributing ranks (world_size flags) and the factor of SW_REDOP_MEAN. */
    void (*resolve)(void *context, bool *contributes, double *scale);
    /* Return the next run of elements to fold at or after `cursor` and before `end`; false when
     * there is none. Elements between runs keep their bits on every rank. */
    bool (*next_run)(void *context, size_t cursor, size_t end, size_t *begin, size_t *numel);
    /* Valid once resolved: true if some rank's contributions lack the accumulated result, which
     * must be added to them. NULL: no contribution ever lacks it. */
    bool (*accumulates)(void *context);
    /* Before elements [begin, begin + numel) are folded, add the accumulated result to the
     * contributions that lack it and are mapped here. `accumulated`: `numel` elements of one slice.
     * Only the rank that folds these contributions reads them. */
    void (*add_accumulated)(void *context, size_t begin, size_t numel, const void *accumulated);
    /* With a codec: store float32 means of `numel` elements from `begin` on, all used, at `to` in
     * the buffer's dtype. They replace an accumulated result there, or add to the share of it that
     * contributions lack. */
    void (*store)(void *context, size_t begin, size_t numel, const float *mean, void *to);
    /* With a codec: return the next elements at or after `cursor` and before `end` that are
     * adjacent in the codec's memory, and *at, the first one's position there; false when there is
     * none. NULL: elements lie there as in the buffer. */
    bool (*next_coded)(void *context, size_t cursor, size_t end, size_t *begin, size_t *numel,
                       size_t *at);
} sw_fold_plan;

/* The slice of a buffer that each rank owns, if several own one: a *replica* is a set of ranks that
 * together own every slice once. Owners of one slice get the same bits. */
typedef struct sw_slices {
    int count;
    const int *of_rank; /* borrowed; world_size, each in [0, count) */
    const int *replica_of_rank;
} sw_slices;

typedef struct sw_op {
    sw_op_kind kind;
    sw_dtype dtype;
    sw_redop redop;
    int root;         /* broadcast only */
    uint32_t subject; /* distinguishes equal operations: a serial that must agree; 0: the arena's */
    uint32_t step,
        round;    /* the caller's counters, which must agree, except with a rank whose round is 0 */
    size_t numel; /* elements of the whole buffer on each rank */
    const sw_arena *arena;   /* borrowed until complete; NULL: private memory at data */
    size_t offset_bytes;     /* into the arena */
    void *data;              /* borrowed until complete; private memory, this rank's */
    const sw_slices *slices; /* NULL: rank r owns slice r of an arena's buffer. Borrowed until
                              * complete or given up */
    bool one_copy; /* all_gather: the ranks of a host (or of a replica on it) share their lowest
                    * rank's part, in which all of them have updated their slices */
    void *result;  /* reduce_scatter on an arena: destination of this rank's slice; NULL: into the
                      arena. Borrowed */
    const struct sw_arena *results; /* the arena of `result`, at results_offset_bytes of
                                       this rank's part: required with `slices` and is_carried.
                                       Borrowed */
    size_t results_offset_bytes;
    bool in_replica; /* reduce_scatter with `slices`: fold the contributions of this rank's replica
                      * alone, into this rank's result alone. Its ranks are on one host, on every
                      * host */
    const struct sw_arena *beside; /* mirrored: bytes [beside_offset_bytes, + beside_bytes) of each
                                      rank's part can be read on all ranks when `plan` is resolved,
                                      and when the operation is complete. NULL: none */
    size_t beside_offset_bytes, beside_bytes;
    const sw_fold_plan
        *plan;       /* borrowed until complete; NULL: fold everything, divide by world_size */
    sw_codec *codec; /* over hosts, for an arena: hosts exchange their sums through it, as bucket
                      * `codec_bucket`. NULL: as they are. The operation holds a reference */
    size_t codec_bucket,
        codec_numel; /* elements of the codec's memory; 0: as many as the buffer's */
    char label[SW_COMM_LABEL_BYTES]; /* equal on all ranks; named in errors */
} sw_op;

typedef struct sw_range { /* a range of private memory */
    void *address;        /* borrowed */
    size_t size_bytes;
} sw_range;

typedef struct sw_comm_hooks { /* both may be NULL; called by the waiting thread itself */
    void *context;
    bool (*interrupted)(void *context);
    void (*log)(void *context, const char *message);
} sw_comm_hooks;

typedef struct sw_comm_stats {
    uint64_t operations[SW_OP_KIND_COUNT];
    uint64_t bytes_reduced; /* size of buffers given to all_reduce and reduce_scatter */
    uint64_t bytes_staged;  /* bytes of private memory that went through slots */
    uint64_t waits;         /* times a thread went to sleep */
    uint64_t wait_ns;       /* total time asleep */
    uint64_t wire_bytes_sent, wire_bytes_received; /* bytes between this host and others */
} sw_comm_stats;

typedef struct sw_comm sw_comm;

typedef struct sw_comm_ops {
    /* Collective. On failure every rank gets the same SW_E_MEMORY, which names the rank that
     * failed. */
    sw_status (*arena_create)(sw_comm *comm, size_t size_bytes, const char *label, sw_arena **arena,
                              sw_error *err);
    /* The same for a few bytes a rank. Every rank can read every rank's bytes once an operation has
     * carried them (sw_op.beside). */
    sw_status (*mirror_create)(sw_comm *comm, size_t size_bytes, const char *label,
                               sw_arena **arena, sw_error *err);
    /* The same with a home on a disk: in one nameless file a host, in the `folder` of the host's
     * first rank. Also SW_E_OS, alike on all ranks: the folder, or its disk, has no place. */
    sw_status (*home_create)(sw_comm *comm, size_t size_bytes, const char *folder,
                             const char *label, sw_arena **arena, sw_error *err);
    void (*arena_destroy)(sw_comm *comm, sw_arena *arena);
    /* Issue an operation on an arena. */
    sw_status (*post)(sw_comm *comm, const sw_op *op, uint32_t *ticket, sw_error *err);
    /* Advance without waiting; *complete: `ticket` is complete. */
    sw_status (*poll)(sw_comm *comm, uint32_t ticket, bool *complete, sw_error *err);
    sw_status (*wait)(sw_comm *comm, uint32_t ticket, sw_error *err);
    /* Run an operation on private memory, or on an arena, to its end. */
    sw_status (*run)(sw_comm *comm, const sw_op *op, sw_error *err);
    /* Send the ranges of `root`, in order, to every other rank's ranges; return when done. NULL:
     * through `run`. */
    sw_status (*broadcast)(sw_comm *comm, const sw_range *ranges, size_t count, int root,
                           const char *label, sw_error *err);
    /* Gather every rank's `size_bytes` bytes, in rank order, into `all`. */
    sw_status (*gather)(sw_comm *comm, const void *mine, size_t size_bytes, void *all,
                        const char *label, sw_error *err);
    /* End the communicator on every rank with this reason. */
    void (*abort)(sw_comm *comm, const sw_error *reason);
    /* The same from any thread, even during another thread's call: a wait in it ends at once, other
     * calls at their next check. Peers are notified at once. No effect if the communicator has
     * ended. Over hosts it notifies the peers of this host and takes no lock of the program; see
     * sw_comm_request_end. */
    void (*request_end)(sw_comm *comm, const sw_error *reason);
    /* Notify the other hosts afterwards, by calls of the wire, which take the GIL. NULL: there are
     * none. */
    void (*tell_hosts)(sw_comm *comm);
    /* From any thread, without waiting: SW_OK, or the reason why some rank, possibly this one,
     * issues no more operations: it met an error, it died or, if `minds_leaving`, it left. */
    sw_status (*look)(sw_comm *comm, bool minds_leaving, sw_error *err);
    /* "rank 2 (pid 4711 on host a)". */
    void (*peer)(sw_comm *comm, int rank, char text[SW_COMM_PEER_BYTES]);
    /* Return the note (wait.h) of rank number `local` of this host, and its rank in the
     * communicator; NULL: there are no more. Any thread. */
    struct sw_wait_note *(*note)(sw_comm *comm, int local, int *rank);
    /* Return a rank of this host whose process has ended; -1: none is known. Any thread. */
    int (*dead)(sw_comm *comm);
    /* Return the process of a rank of this host and of this PID namespace; 0: unknown. */
    int (*pid)(sw_comm *comm, int rank);
    /* From any thread, without waiting: true unless some rank is known to have met an error or
     * left. */
    bool (*is_alive)(sw_comm *comm);
    /* Notify the peers that this rank issues no more operations; memory stays until destroy. Every
     * later call fails. */
    void (*leave)(sw_comm *comm);
    /* Called once in a forked child: give it pages of its own to write to, and publish nothing on
     * behalf of its parent. NULL: its memory is its own already. */
    sw_status (*forked)(sw_comm *comm, sw_error *err);
    void (*destroy)(sw_comm *comm);
} sw_comm_ops;

struct sw_comm {
    const sw_comm_ops *ops;
    int rank;
    int world_size;
    const int *names; /* borrowed: the ranks' numbers for messages; NULL: the numbers in this
                       * communicator */
    bool is_carried;  /* another process may execute an operation, so results must be in
                       * arenas */
    uint32_t arenas;  /* created so far */
    /* One thread may set these while another waits. */
    _Atomic int64_t timeout_ns;    /* limit of each wait */
    _Atomic int64_t warn_after_ns; /* a wait this long is logged, then again whenever it has
                                    * doubled; 0: no wait is */
    _Atomic int64_t silent_ns; /* a wait for a peer ends if the peer is stopped for this long; 0: it
                                * does not */
    sw_comm_hooks hooks;
    sw_comm_stats stats;
    uint64_t serial;        /* the newest operation's, in the account (account.h) */
    sw_account_use account; /* zeros: of no known group, over no link that counts */
};

/* The number of `rank` in messages: inside a host of several, its rank in the whole group. */
static inline int sw_comm_name(const sw_comm *comm, int rank)
{
    return rank >= 0 && comm->names ? comm->names[rank] : rank;
}

/* Both halves of request_end: this host, then the other hosts. */
static inline void sw_comm_request_end(sw_comm *comm, const sw_error *reason)
{
    comm->ops->request_end(comm, reason);
    if (comm->ops->tell_hosts)
        comm->ops->tell_hosts(comm);
}

static inline int sw_op_slice_count(const sw_op *op, int world_size)
{
    return op->slices ? op->slices->count : world_size;
}

static inline int sw_op_slice_of(const sw_op *op, int rank)
{
    return op->slices ? op->slices->of_rank[rank] : rank;
}

/* Return true if the contribution of `rank` is in the result of `owner`. */
static inline bool sw_op_joins(const sw_op *op, int rank, int owner)
{
    return !op->in_replica ||
           op->slices->replica_of_rank[rank] == op->slices->replica_of_rank[owner];
}

/* Set the flags of the ranks that contribute to an operation, and the factor of SW_REDOP_MEAN. */
static inline void sw_op_resolve(const sw_op *op, int world_size, bool *contributes, double *scale)
{
    *scale = 1.0 / world_size;
    for (int r = 0; r < world_size; ++r)
        contributes[r] = true;
    if (op->plan)
        op->plan->resolve(op->plan->context, contributes, scale);
}

/* Return the next run of elements to fold, at or after `cursor` and before `end`; false: there is
 * none. All three are counted from element `origin` of the plan. */
static inline bool sw_op_next_run(const sw_op *op, size_t origin, size_t cursor, size_t end,
                                  size_t *begin, size_t *numel)
{
    const sw_fold_plan *plan = op->plan;
    *begin = cursor;
    *numel = end - cursor;
    if (cursor >= end || !plan)
        return cursor < end;
    if (!plan->next_run(plan->context, cursor + origin, end + origin, begin, numel))
        return false;
    *begin -= origin;
    return true;
}

/* Elements of a rank's slice of `numel`: equal for all ranks, every cut on SW_ALIGNMENT_BYTES. */
size_t sw_comm_slice_numel(size_t numel, size_t element_bytes, int world_size);

/* Broadcast from `root`: by ops->broadcast, or small ranges together and large ones each. */
SW_MUST_USE sw_status sw_comm_broadcast(sw_comm *comm, const sw_range *ranges, size_t count,
                                        int root, const char *label, sw_error *err);

/* Set the label of an operation, cut at a character. */
void sw_op_set_label(sw_op *op, const char *label);

/* End the communicator because this rank lacks memory for the next operation's tables, so that no
 * peer waits for it. Every rank reports the reason. Returns `status`. */
sw_status sw_comm_give_up(sw_comm *comm, sw_status status, sw_error *err, const char *format, ...)
    SW_PRINTF(4, 5);

/* Count an operation that begins in the communicator's stats, and begin its entry of the account.
 */
void sw_comm_count(sw_comm *comm, const sw_op *op);

/* Count sleep since `begun_ns`, in a wait for `rank` (-1: unknown), likewise. */
void sw_comm_slept(sw_comm *comm, int64_t begun_ns, int rank);

const char *sw_op_kind_name(sw_op_kind kind);

/* ---- collectives that are one call: they run to their end ---- */

SW_MUST_USE sw_status sw_comm_barrier(sw_comm *comm, const char *label, sw_error *err);

typedef struct sw_span { /* a range of an arena */
    size_t offset_bytes, size_bytes;
} sw_span;

/* Gather every rank's slices of these ranges of op->arena, as `op` says otherwise, and wait. Every
 * range is checked before the first is issued: none runs if a later one is refused. */
SW_MUST_USE sw_status sw_comm_all_gather(sw_comm *comm, sw_op *op, const sw_span *ranges,
                                         size_t count, sw_error *err);

/* ---- agreement: all ranks get a resource, or none ---- */

/* Collective: exchange this rank's outcome `local`. It wants `size_bytes` of memory for "<noun>
 * '<label>'" ("arena") under the limit of its control group. SW_OK if every rank succeeded.
 * Otherwise all ranks return the same error: SW_E_MISMATCH if sizes differ, else SW_E_MEMORY with
 * the first failed rank and its *cause, or with the limit that the ranks together exceed. If `noun`
 * is NULL, it takes no memory, `cause` is the whole message, and its SW_E_OS stays one. */
SW_MUST_USE sw_status sw_agree(sw_comm *comm, const char *noun, const char *label,
                               size_t size_bytes, sw_status local, const sw_error *cause,
                               sw_error *err);
