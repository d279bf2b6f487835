/* sim.h - the simulated GPUs behind the fake libcuda.so.1 and libnccl.so.2: what tests control, and
 * what the files of this folder share.
 *
 * Idea: CUDA's order is fixed by the sequence of API calls (stream order, what an event had
 * recorded when it was waited for, host synchronisation), so vector clocks are computed when an
 * operation is enqueued and the verdict on races does not depend on the schedule. The schedule,
 * seeded, decides only whether values go wrong too. Ranks are threads; one runs at a time and hands
 * over inside driver calls alone, so a run is repeatable. Or they are processes, each a simulation
 * of its own: memory and streams are a rank's own in any case, and collectives meet in files
 * (fake_nccl_files.c). Numbers that streams write and wait for (fake_numbers.c) carry the writer's
 * clock to the waiter, so memory that ranks share is held to the same rules; between processes
 * there is the memory alone.
 *
 * Words: an actor is a stream or a rank's host thread; a block is an allocation; a segment is a
 * part of a block with one history; a site is where an operation was enqueued.
 *
 * Not covered: the legacy default stream's implicit order (blocking streams are a report), graphs,
 * peer access, real allocators.
 * Thread rule: every entry point takes the gate.
 */
#ifndef SW_TEST_SIM_H
#define SW_TEST_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/nccl_abi.h"
#include "device/cuda_abi.h"
#include "kernels/device_kernels.h"

#define SIM_API __attribute__((visibility("default")))

enum {
    SIM_ACTOR_MAX = 64,
    SIM_DEVICE_MAX = 8,
    SIM_SITE_DEPTH = 6,
    SIM_CALL_MAX = 64,
    SIM_NOTE_MAX = 8
};

typedef enum sim_policy {
    SIM_EAGER = 0, /* everything runs as soon as it may: events are ready at once */
    SIM_ON_DEMAND, /* only what a wait needs runs: all else is as late as possible */
    SIM_RANDOM,    /* some operations of some streams, by the seed */
    SIM_LATE,      /* as ON_DEMAND, and a query says "not ready" a few times first */
    SIM_POLICY_COUNT,
} sim_policy;

/* ---- what tests control (looked up by dlsym) ---- */

typedef struct sim_controls {
    /* Forgets everything; `ranks` threads will come, each with sim_rank_begin. */
    void (*reset)(int ranks, sim_policy policy, uint64_t seed);
    void (*use_kernels)(const sw_kernel_contract *contracts, int count);
    void (*rank_begin)(int rank);
    void (*rank_end)(void);
    /* The rank's host itself reads or writes memory that the device knows. */
    void (*host_access)(const void *begin, size_t size_bytes, sw_access access, const char *label);
    /* Counted calls from now on: the nth (from 1) fails with this result; 0: none. */
    void (*fail_call)(int rank, long nth, int result);
    long (*calls)(int rank);
    const char *(*failed_call)(void); /* the name of the call that fail_call hit, "" if none */
    void (*set_devices)(int count, int version);
    /* What every cuThreadExchangeStreamCaptureMode gives from now on; 0: it works. */
    void (*refuse_exemptions)(int result);
    /* Reports so far, and their text; with `sites` also where (slow: addr2line is asked). */
    int (*reports)(const char **text, bool sites);
    /* What is still allocated, as text; "" if nothing is. */
    const char *(*leaks)(void);
} sim_controls;

SIM_API const sim_controls *sim_get_controls(void);

/* ---- shared by the files of this folder ---- */

typedef struct sim_clock {
    uint32_t at[SIM_ACTOR_MAX];
} sim_clock;

typedef struct sim_site {
    const char *what; /* static text */
    int rank, depth;
    void *frame[SIM_SITE_DEPTH];
} sim_site;

typedef struct sim_touch { /* one access of one actor, at that actor's time */
    int actor;
    uint32_t time;
    sim_site site;
} sim_touch;

typedef struct sim_segment {
    size_t begin, end;
    bool written;
    sim_touch write;
    struct sim_segment *next;
    int read_count;
    sim_touch read[SIM_ACTOR_MAX]; /* last: those that are not used are not copied */
} sim_segment;

typedef struct sim_block {
    unsigned char *memory;
    size_t size_bytes;
    bool pinned, freed;
    bool foreign;   /* torch's memory: adopted, not ours to free; so is registered memory */
    bool torch_writes; /* an operation of torch's has written it: foreign, or of ours and lent */
    int registered; /* times; the host's memory, which others than the device may write */
    bool mapped;    /* its pages are its own: it may be exported */
    int file;       /* exported: the file behind it; 0: none */
    int open_count; /* of peers that are threads, and have it open */
    int rank;       /* device ordinal */
    sim_site freed_at;
    unsigned char *before; /* its bytes before the kernel that runs, if those are compared */
    sim_segment *segments;
    struct sim_block *next;
} sim_block;

struct CUevent_st {
    uint64_t recorded, done; /* generations */
    bool destroyed;          /* kept till the next reset: what is enqueued may name it */
    sim_clock clock;
    struct CUevent_st *next;
};

typedef enum sim_op_kind {
    OP_WORK,
    OP_RECORD,
    OP_WAIT,
    OP_COLLECTIVE,
    OP_AWAIT_NUMBER,
} sim_op_kind;

typedef struct sim_op {
    sim_op_kind kind;
    void (*run)(struct sim_op *op); /* OP_WORK */
    const sw_kernel_contract *contract;
    unsigned char *args; /* owned */
    void *to;
    const void *from;
    size_t size_bytes;
    unsigned char value;
    uint32_t number; /* written to, or awaited at, `to` */
    sw_cu_event event;
    uint64_t generation;
    void *group; /* OP_COLLECTIVE: fake_nccl.c's */
    sim_site site;
    struct sim_op *next;
} sim_op;

struct CUstream_st {
    int actor, rank;
    bool destroyed;       /* as an event */
    bool is_torch;        /* torch's: see sim_torch.c */
    bool capturing;       /* into a graph: what is enqueued here then is a report */
    bool capture_broken;  /* by a call that captures forbid, of whatever thread: a report */
    const void *capturer; /* the thread that began it, in global mode */
    sim_clock clock;
    sim_clock before; /* the same before the last operation that is no record */
    sim_op *first, *last;
    struct CUstream_st *next;
};

/* Added to the stream of a cuEventRecord, they stand for one in the wrong place: of mutations
 * (tests/test_event_mutations.py). The event then knows less than it should. */
enum { SIM_RECORD_EARLY = 1, SIM_RECORD_ELSEWHERE = 2, SIM_RECORD_WRONG = 3 };

typedef struct sim_told { /* a number that some stream was given to write */
    const uint32_t *at;
    uint32_t number;
    sim_clock clock;
    sw_cu_stream stream;
    sim_op *op; /* NULL once it has run */
    struct sim_told *next;
} sim_told;

typedef struct sim_note { /* a report */
    const char *kind;
    char detail[256];
    sim_site site[2];
    int site_count;
} sim_note;

typedef struct sim_rank {
    bool alive, begun;
    int actor;
    sim_clock clock;
    long calls, fail_nth;
    int fail_result;
} sim_rank;

struct CUctx_st {
    int ordinal, retained;
    sw_cu_stream legacy; /* its default stream, whose handle is NULL; only where torch is on it */
};

typedef struct sim_state {
    sim_policy policy;
    uint64_t seed;
    int rank_count, baton;
    int device_count, version;
    int actor_count;
    long idle_polls;          /* queries since something last moved */
    unsigned long host_calls; /* of whatever kind */
    bool deadlocked;
    const void
        *host_thread; /* where a rank is a process: torch's operations run in it; else NULL */
    bool has_peers;   /* ranks are processes: whoever waits does so for seconds, not for polls */
    int64_t idle_since_ns;
    sim_rank rank[SIM_DEVICE_MAX];
    struct CUctx_st context[SIM_DEVICE_MAX];
    sim_block *blocks;
    sw_cu_stream streams;
    sw_cu_event events;
    sim_told *told; /* the newest first */
    int modules, comms;
    const sw_kernel_contract *contracts;
    int contract_count;
    int report_count;
    sim_note note[SIM_NOTE_MAX];  /* the first ones tell */
    char report[1 << 16];         /* their text, made when it is asked for */
    char fail_name[SIM_CALL_MAX]; /* the next call of that name fails, too; "": none */
    int fail_name_result;
    char slow_name[SIM_CALL_MAX]; /* the next call of that name takes so long; "": none */
    long slow_ms;
    int exemption_result; /* of cuThreadExchangeStreamCaptureMode, if it fails */
    char failed[SIM_CALL_MAX];
    /* Whether the collective at the head of its stream can run; runs it on all ranks and pops it.
     */
    bool (*collective_ready)(sim_op *op);
    void (*collective_run)(sim_op *op);
    /* For on-demand runs: the streams that must reach their part of it. */
    void (*collective_drive)(sim_op *op, int depth);
} sim_state;

SIM_API extern sim_state sim;

/* The calling rank gets the baton and this call is counted; false with *result when it is to fail.
 */
SIM_API bool sim_enter(const char *call, int *result);
SIM_API void sim_leave(void);
/* Hands the baton to the next rank that lives. */
SIM_API void sim_yield(void);
SIM_API int sim_current_rank(void);
SIM_API sw_cu_context sim_current_context(void);
SIM_API sw_cu_stream sim_stream(sw_cu_stream handle);
/* The calling thread's own: the address of something that each has. */
SIM_API const void *sim_thread(void);
/* Whether a capture into a graph forbids this thread calls that are not of a stream's order: one
 * that it began itself, or any where it minds those of others. Such a call ends the capture, which
 * is reported. With the gate held. */
SIM_API bool sim_capture_forbids(const char *call);

SIM_API sim_site sim_here(const char *what);
SIM_API void sim_report(const char *kind, const char *detail, const sim_site *a, const sim_site *b);
SIM_API sim_block *sim_block_of(const void *address);
/* Notes an access by `actor` at `clock`, and reports what it conflicts with. */
SIM_API void sim_track(const sim_clock *clock, int actor, const void *begin, size_t size_bytes,
                       sw_access access, const sim_site *site);
SIM_API void sim_join(sim_clock *into, const sim_clock *from);

/* The stream's clock moves on by one operation, which comes after what the host has seen. */
SIM_API void sim_tick(sw_cu_stream stream);
SIM_API sim_op *sim_op_new(sim_op_kind kind, const char *what);
SIM_API void sim_enqueue(sw_cu_stream stream, sim_op *op);
SIM_API void sim_pop(sw_cu_stream stream);
/* Runs operations as the policy has it: after an enqueue, and when a query asks for `event`. */
void sim_elapse(void);
SIM_API void sim_progress(void);
SIM_API void sim_demand(sw_cu_event event);
SIM_API void sim_drive(sw_cu_stream stream, sim_op *until, int depth);
/* The first number at that place that ends a wait for `number`; NULL if none was told yet. */
sim_told *sim_told_find(const uint32_t *at, uint32_t number);
bool sim_number_has_come(const sim_op *op);
/* Exported memory is freed: reports who still uses it. */
void sim_exported_free(const sim_block *block, const sim_site *site);
SIM_API uint64_t sim_draw(void);
/* Runs all that is enqueued on the stream, waiting for peers; false, and a report, at a deadlock.
 * Not with the gate held. */
SIM_API bool sim_drain(sw_cu_stream stream);
/* The gate alone: for threads of the simulation's own. */
SIM_API void sim_lock(void);
/* Whether nothing has moved for so long that nothing will; with the gate held. */
SIM_API bool sim_is_stuck(void);

#endif
