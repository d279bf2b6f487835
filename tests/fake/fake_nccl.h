/* fake_nccl.h - what fake_nccl.c and fake_nccl_files.c share: groups of calls, and who they are
 * between. */
#ifndef SW_TEST_FAKE_NCCL_H
#define SW_TEST_FAKE_NCCL_H

#include "sim.h"

enum { CALL_MAX = 64, GROUP_DEPTH_MAX = 8, PLAIN = -1, HALF = -2 };

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
    int dtype, op, peer; /* peer: root, or the other end */
    /* Where they lie in memory that is registered; PLAIN: in none, HALF: not all of it is. */
    long from_registered, to_registered;
} nccl_call;

typedef struct nccl_group {
    nccl_call call[CALL_MAX];
    int call_count;
    sw_nccl_comm comm;
    sw_cu_stream stream;
    bool dropped;
    struct nccl_group *next; /* of its communicator, in order */
} nccl_group;

typedef struct clique {
    sw_nccl_id id;
    int world_size, arrived;
    bool in_files; /* ranks are processes: comm[own_rank] is real, the others hold what files say */
    int own_rank;
    long sequence; /* of the group that is due, from 0 */
    bool posted;   /* this rank's part of it is in its file */
    bool loaded;   /* the peers' parts are in comm[...]->first */
    sw_nccl_comm comm[SIM_DEVICE_MAX];
    bool is_left; /* by this rank: aborted or destroyed */
    struct clique *next, *next_joined;
} clique;

typedef struct registration {
    const unsigned char *begin, *end;
    int actor; /* the stream of the last operation on it, and when */
    uint32_t time;
    struct registration *next;
} registration;

struct ncclComm {
    clique *clique;
    int rank;
    sw_nccl_result error;
    bool blocks;         /* its calls come back when they are done, as those of torch's own do */
    int unsettled;       /* questions that its owner has yet to ask before it takes another call */
    bool finalizing;     /* ranks are processes: until what was enqueued has run */
    unsigned char order; /* which each operation writes: two that no event orders are a race */
    nccl_group *first, *last; /* enqueued and not yet run */
    registration *registered; /* list */
    sw_nccl_comm next;        /* of this process */
};
extern sw_nccl_comm nccl_comms;

/* How deep this thread is in groups. */
int nccl_group_depth(void);

/* Bytes that a call reads on its own rank. */
size_t nccl_read_bytes(const nccl_call *call, int world_size);

size_t nccl_written_bytes(const nccl_call *call, int world_size);

/* ---- fake_nccl_register.c: NCCL's rule is that all ranks pass registered memory to an operation,
 * at the same distance from its beginning, or none does; what breaks it is undefined, here a
 * report ---- */

/* Notes where a call's memory lies. */
void nccl_registered_note(nccl_call *call, sw_nccl_comm comm);
/* The call was enqueued on the stream. */
void nccl_registered_use(const nccl_call *call, sw_nccl_comm comm, sw_cu_stream stream);
/* Reports where `other`, of another rank, or the other end of a send, does not go with it. */
void nccl_registered_compare(const nccl_call *call, const nccl_call *other, const sim_site *site);
/* The communicator ends; `orderly`: nothing may be registered any more. */
void nccl_registered_end(sw_nccl_comm comm, bool orderly);

/* ---- fake_nccl_files.c: ranks are processes, and meet in the folder that the id names ---- */

/* Makes the folder, if the environment's SIM_NCCL_FOLDER says where; else false. */
bool nccl_files_id(sw_nccl_id *id);
bool nccl_files_is_id(const sw_nccl_id *id);
/* This rank is there; its peers get a place in the clique. */
void nccl_files_join(clique *c, int rank);
/* Ranks that are there. */
int nccl_files_arrived(clique *c);
/* A rank that ended the communicator before this group came about; -1 if none. */
int nccl_files_gone(const clique *c);
/* This rank begins to end the communicator; whether one is there that does not. */
void nccl_files_end(const clique *c);
bool nccl_files_stay(const clique *c);
/* This rank's part of group `g` is told, and the others' parts are there and loaded. */
bool nccl_files_ready(nccl_group *g);
/* The group that was loaded has run. */
void nccl_files_next(clique *c);
void nccl_files_leave(clique *c);

#endif
