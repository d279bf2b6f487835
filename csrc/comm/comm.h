/* comm.h - collectives as one table of functions, whatever carries the bytes.
 *
 * Idea: every rank issues the same operations in the same order; operation t has ticket t. An
 * operation on an arena is posted and completes while the caller computes (progress() helps it on);
 * an operation on private memory runs to its end. There is no progress thread: whoever calls,
 * helps.
 *
 * What it leaves out: how ranks find each other (shm.h, local.h), what a bucket is (reduce/).
 *
 * Thread rule: one at a time a communicator, but for look, is_alive and request_end. Errors end
 * the communicator: every later call repeats the first error, on every rank the same sentence where
 * ranks disagree.
 */
#ifndef SW_COMM_COMM_H
#define SW_COMM_COMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "kernels/kernels.h"
#include "tensor/dtype.h"

enum { SW_COMM_LABEL_BYTES = 96, SW_COMM_PEER_BYTES = 96, SW_COMM_MAX_WORLD = 1024 };

typedef enum sw_op_kind {
    SW_OP_BARRIER = 0,
    SW_OP_ALL_REDUCE,
    SW_OP_REDUCE_SCATTER, /* as all_reduce, but the result reaches the owner's slice alone */
    SW_OP_ALL_GATHER,
    SW_OP_BROADCAST,
    SW_OP_KIND_COUNT,
} sw_op_kind;

/* Memory of one size on every rank, mapped by all. owned by the communicator's caller. */
typedef struct sw_arena {
    size_t size_bytes;
    uint8_t **base; /* owned; world_size addresses in this process, base[rank] is the own part;
                       NULL: on another host */
    int world_size;
    uint32_t serial; /* counted from 1 by arena_create, so alike on all ranks */
} sw_arena;

/* What to fold, decided when every rank has posted: by the reducer, from the use bits beside the
 * data. */
typedef struct sw_fold_plan {
    void *context; /* borrowed until the operation is complete */
    /* Which ranks contribute (world_size flags) and the factor of SW_REDOP_MEAN. */
    void (*resolve)(void *context, bool *contributes, double *scale);
    /* The next run of elements to fold at or after `cursor` and before `end`; false when there is
     * none. Elements between runs keep their bits on every rank. */
    bool (*next_run)(void *context, size_t cursor, size_t end, size_t *begin, size_t *numel);
    /* Once resolved: whether contributions of some rank lack the standing result, which has to be
     * added to them. NULL: none ever does. */
    bool (*stands)(void *context);
    /* Adds it, before elements [begin, begin + numel) are folded, to the contributions that lack it
     * and are mapped here. `standing`: that many elements, all of one slice. Only who folds these
     * contributions reads them. */
    void (*add_standing)(void *context, size_t begin, size_t numel, const void *standing);
} sw_fold_plan;

/* Which slice of a buffer each rank owns, where several own one: a *replica* is a set of ranks that
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
    uint32_t subject; /* what it is about, when several are alike: a serial that must agree; 0: the
                         arena's */
    uint32_t step,
        round;    /* a caller's counters that must agree, except with a rank whose round is 0 */
    size_t numel; /* elements a rank; of the whole buffer */
    const sw_arena *arena;   /* borrowed until complete; NULL: private memory at data */
    size_t offset_bytes;     /* into the arena */
    void *data;              /* borrowed until complete; private memory, this rank's */
    const sw_slices *slices; /* of an arena's buffer; NULL: rank r owns slice r. Borrowed until
                                complete, or given up */
    bool one_copy; /* all_gather: the ranks of a host (of a replica on it) share the part of their
                      lowest rank, in which all of them have updated their slices */
    void *result;  /* reduce_scatter on an arena: this rank's slice goes here; NULL: into the arena.
                      Borrowed */
    const struct sw_arena *results; /* where `result` lies in it, at results_offset_bytes of this
                                       rank's part: needed with `slices`, and where is_carried.
                                       Borrowed */
    size_t results_offset_bytes;
    const struct sw_arena *beside; /* mirrored: what each rank says in [beside_offset_bytes, +
                                      beside_bytes) of its part can be read on all ranks when `plan`
                                      is resolved, and when the operation is complete. NULL: none */
    size_t beside_offset_bytes, beside_bytes;
    const sw_fold_plan
        *plan; /* borrowed until complete; NULL: fold everything, divide by world_size */
    char label[SW_COMM_LABEL_BYTES]; /* must agree between ranks; named in errors */
} sw_op;

typedef struct sw_range { /* of private memory */
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
    uint64_t bytes_reduced; /* of buffers given to all_reduce and reduce_scatter */
    uint64_t bytes_staged;  /* of private memory that went through slots */
    uint64_t waits;         /* times a thread went to sleep */
    uint64_t wait_ns;       /* asleep, in all */
    uint64_t wire_bytes_sent, wire_bytes_received; /* to and from other hosts, by this host */
} sw_comm_stats;

typedef struct sw_comm sw_comm;

typedef struct sw_comm_ops {
    /* Collective. On failure every rank gets the same SW_E_MEMORY naming the rank that could not.
     */
    sw_status (*arena_create)(sw_comm *comm, size_t size_bytes, const char *label, sw_arena **arena,
                              sw_error *err);
    /* The same for few bytes a rank that every rank can read of every rank, once an operation has
     * carried them (sw_op.beside). */
    sw_status (*mirror_create)(sw_comm *comm, size_t size_bytes, const char *label,
                               sw_arena **arena, sw_error *err);
    void (*arena_destroy)(sw_comm *comm, sw_arena *arena);
    /* Issues an operation on an arena. */
    sw_status (*post)(sw_comm *comm, const sw_op *op, uint32_t *ticket, sw_error *err);
    /* Does what can be done without waiting; *complete tells whether `ticket` is. */
    sw_status (*poll)(sw_comm *comm, uint32_t ticket, bool *complete, sw_error *err);
    sw_status (*wait)(sw_comm *comm, uint32_t ticket, sw_error *err);
    /* Runs an operation on private memory, or on an arena, to its end. */
    sw_status (*run)(sw_comm *comm, const sw_op *op, sw_error *err);
    /* What `root` has in its ranges, one behind the other, to every other rank's, to the end. NULL:
     * through `run`. */
    sw_status (*broadcast)(sw_comm *comm, const sw_range *ranges, size_t count, int root,
                           const char *label, sw_error *err);
    /* Every rank's `size_bytes` bytes, in rank order, to `all` (world_size * size_bytes). */
    sw_status (*gather)(sw_comm *comm, const void *mine, size_t size_bytes, void *all,
                        const char *label, sw_error *err);
    /* Ends the communicator for every rank, with this sentence. */
    void (*abort)(sw_comm *comm, const sw_error *reason);
    /* The same from any thread, beside a call of another's: peers are told at once, and that call
     * ends where it looks next, in a wait at once. Nothing where it has ended. Over hosts the peers
     * are those of this host, which takes no lock of the program's; see sw_comm_request_end. */
    void (*request_end)(sw_comm *comm, const sw_error *reason);
    /* Behind it: tells the other hosts, in calls of the wire, which take the GIL. NULL: there are
     * none. */
    void (*tell_hosts)(sw_comm *comm);
    /* From any thread, without waiting: SW_OK, or why nothing more will come of some rank, this one
     * too. It met an error (its own), it died, or, if `minds_leaving`, it left. */
    sw_status (*look)(sw_comm *comm, bool minds_leaving, sw_error *err);
    /* "rank 2 (pid 4711 on host a)". */
    void (*peer)(sw_comm *comm, int rank, char text[SW_COMM_PEER_BYTES]);
    /* From any thread: whether no rank, as far as it can be seen without waiting, has met an error
     * or left. */
    bool (*is_alive)(sw_comm *comm);
    /* Tells the peers that this rank issues nothing more; memory stays until destroy. Every later
     * call fails. */
    void (*leave)(sw_comm *comm);
    /* In a child forked from the owner: from here on it writes to pages of its own, and says
     * nothing in its parent's name. Once; NULL: its memory is its own anyway. */
    sw_status (*forked)(sw_comm *comm, sw_error *err);
    void (*destroy)(sw_comm *comm);
} sw_comm_ops;

struct sw_comm {
    const sw_comm_ops *ops;
    int rank;
    int world_size;
    const int *names;      /* borrowed: what messages call each rank; NULL: what it is here */
    bool is_carried;       /* another process may do an operation, so that results lie in arenas */
    uint32_t arenas;       /* asked for so far */
    int64_t timeout_ns;    /* of each wait */
    int64_t warn_after_ns; /* a wait this long is logged; again at twice that, and so on */
    sw_comm_hooks hooks;
    sw_comm_stats stats;
};

/* What messages and errors call `rank`: inside a host of several, its rank in the whole group. */
static inline int sw_comm_name(const sw_comm *comm, int rank)
{
    return rank >= 0 && comm->names ? comm->names[rank] : rank;
}

/* Both halves of a requested end. */
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

/* Elements of a rank's slice of `numel` elements: equal, and every cut on SW_ALIGNMENT_BYTES. */
size_t sw_comm_slice_numel(size_t numel, size_t element_bytes, int world_size);

/* Bytes of `root` to all ranks: ops->broadcast, or small ranges together and large ones each. */
SW_MUST_USE sw_status sw_comm_broadcast(sw_comm *comm, const sw_range *ranges, size_t count,
                                        int root, const char *label, sw_error *err);

/* This rank cannot take its part in what its peers go on to (it has no memory for its tables): ends
 * the communicator, so that nobody waits for it, and says why on every rank. Returns `status`. */
sw_status sw_comm_give_up(sw_comm *comm, sw_status status, sw_error *err, const char *format, ...)
    SW_PRINTF(4, 5);

/* The sentence where `rank` asks for another size of an arena than rank 0: SW_E_MISMATCH. */
sw_status sw_comm_arena_differs(const sw_comm *comm, const char *label, uint64_t first_bytes,
                                int rank, uint64_t size_bytes, sw_error *err);

/* Adds an operation that begins to the communicator's stats. */
void sw_comm_count(sw_comm *comm, const sw_op *op);

const char *sw_op_kind_name(sw_op_kind kind);

#endif
