/* fake_nccl.h - groups of calls and their cliques, shared by the fake_nccl*.c files. */
#ifndef SW_TEST_FAKE_NCCL_H
#define SW_TEST_FAKE_NCCL_H

#include "sim.h"

enum { CALL_MAX = 64, GROUP_DEPTH_MAX = 8, KIND_COUNT = 6 };

typedef enum call_kind {
    ALL_REDUCE,
    REDUCE_SCATTER,
    ALL_GATHER,
    BROADCAST,
    SEND,
    RECEIVE
} call_kind;

typedef struct nccl_call {
    call_kind kind;
    const void *from;
    void *to;
    size_t count;
    int dtype, op, peer; /* peer: the root, or the other end */
} nccl_call;

typedef struct nccl_group {
    nccl_call call[CALL_MAX];
    int call_count;
    sw_nccl_comm comm;
    sw_cu_stream stream;
    bool dropped;
    long turn;               /* number of the group among those of all communicators */
    int node;                /* of the rank that made it: sim_nccl_set_node */
    struct nccl_group *next; /* the next group of its communicator */
} nccl_group;

typedef struct clique {
    sw_nccl_id id;
    int world_size, arrived;
    int met[KIND_COUNT]; /* ranks that have come to the first operation of that kind */
    bool in_files; /* ranks are processes: comm[own_rank] is real, the others mirror files */
    int own_rank;
    long sequence; /* number of the group that is due, from 0 */
    bool posted;   /* this rank's part of it is in its file */
    bool loaded;   /* the peers' parts are in comm[...]->first */
    sw_nccl_comm comm[SIM_DEVICE_MAX];
    bool is_left; /* this rank has aborted or destroyed it */
    struct clique *next, *next_joined;
} clique;

struct ncclComm {
    clique *clique;
    int rank;
    sw_nccl_result error;
    bool blocks;              /* calls return when they are done, as on torch's own communicator */
    int unsettled;            /* state queries still needed before it takes another call */
    int64_t busy_until_ns;    /* nor does it before this time */
    unsigned awaited;         /* bits of kinds whose first operation waits for all hosts */
    bool is_connected[KIND_COUNT];
    bool driving;             /* its head is being driven: others' heads may need it in turn */
    bool finalizing;          /* ranks are processes: enqueued groups have yet to run */
    unsigned char order;      /* written by each operation: two unordered ones are a race */
    nccl_group *first, *last; /* enqueued and not yet run */
    sw_nccl_comm next;        /* the next communicator of this process */
};
extern sw_nccl_comm nccl_comms;

/* Return the depth of open groups of this thread. */
int nccl_group_depth(void);

/* Return the bytes that a call reads, or writes, on its own rank. */
size_t nccl_read_bytes(const nccl_call *call, int world_size);

size_t nccl_written_bytes(const nccl_call *call, int world_size);

/* ---- fake_nccl_arithmetic.c ---- */

/* Return 0 for a dtype that NCCL does not have. */
size_t nccl_element_bytes(int dtype);
/* Reduce the contributions of `call`, which lie `stride` bytes apart, in NCCL's own order. */
void nccl_fold(void *to, const unsigned char *inputs, size_t stride, int world_size,
               const nccl_call *call);

/* ---- fake_nccl_files.c: ranks are processes, and meet in the folder that the id names ---- */

/* Create the folder in the environment's SIM_NCCL_FOLDER. Return false if that is not set. */
bool nccl_files_id(sw_nccl_id *id);
bool nccl_files_is_id(const sw_nccl_id *id);
/* Announce this rank and add its peers to the clique. */
void nccl_files_join(clique *c, int rank);
/* Count the ranks that have joined. */
int nccl_files_arrived(clique *c);
/* Return a rank that ended the communicator before this group, or -1. */
int nccl_files_gone(const clique *c);
/* Announce this rank's first operation of a kind; count the ranks that have come to theirs. */
void nccl_files_meet(const clique *c, const char *kind);
int nccl_files_met(const clique *c, const char *kind);
/* Announce that this rank begins to end the communicator; report if a peer stays in it. */
void nccl_files_end(const clique *c);
bool nccl_files_stay(const clique *c);
/* Post this rank's part of group `g`. Return true once all peers' parts are loaded. */
bool nccl_files_ready(nccl_group *g);
/* Move on after the loaded group has run. */
void nccl_files_next(clique *c);
void nccl_files_leave(clique *c);
#endif
