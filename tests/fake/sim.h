/* sim.h - the simulated GPUs behind the fake libcuda.so.1 and libnccl.so.2: the controls for tests,
 * and declarations shared by the files of this folder.
 *
 * The sequence of API calls fixes CUDA's order: stream order, the record that an event wait saw,
 * and host synchronisation. Vector clocks are therefore computed when an operation is enqueued, and
 * a report of a race does not depend on the schedule. The schedule, seeded, decides only if values
 * go wrong too.
 *
 * Ranks are threads or processes. Of threads, one runs at a time and hands over inside driver calls
 * alone, so a run is repeatable. Processes have a simulation each: memory and streams belong to one
 * rank in any case, and collectives meet in files (fake_nccl_files.c). Numbers that streams write
 * and wait for (fake_numbers.c) carry the writer's clock to the waiter, so memory that ranks share
 * is held to the same rules. Between processes only the memory is shared, not the clocks.
 *
 * Words: an actor is a stream or a rank's host thread; a block is an allocation; a segment is a
 * part of a block with one history; a site is the place where an operation was enqueued.
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
#include "kernel_references.h"

#define SIM_API __attribute__((visibility("default")))

enum {
    SIM_ACTOR_MAX = 64,
    SIM_DEVICE_MAX = 8,
    SIM_SITE_DEPTH = 6,
    SIM_CALL_MAX = 64,
    SIM_NOTE_MAX = 8,
    SIM_GIL_MAX = 32
};

typedef enum sim_policy {
    SIM_EAGER = 0, /* everything runs as soon as it can: events are ready at once */
    SIM_ON_DEMAND, /* only operations that a wait needs run: all others as late as possible */
    SIM_RANDOM,    /* some operations of some streams run, by the seed */
    SIM_LATE,      /* as ON_DEMAND, and a query reports "not ready" a few times first */
    SIM_POLICY_COUNT,
} sim_policy;

/* What a driver or NCCL may do in the worst case: words of the environment's SIM_STRICT, "all" for
 * every one, read by reset. */
enum {
    SIM_STRICT_DEVICE = 1, /* "device": calls that allocate, free or load a module wait for all work of
                              the rank's GPU */
    SIM_STRICT_ORDER = 2,  /* "order": a GPU has room for one collective at a time, and starts them in
                              the order of its host's calls, as with NCCL_LAUNCH_ORDER_IMPLICIT */
    SIM_STRICT_LAZY = 4,   /* "lazy": torch's first operation of a kind loads a kernel, which waits for
                              all work of the GPU */
    SIM_STRICT_LONE = 8,   /* "lone": calls of a communicator of one rank are done at once, also where
                              ranks are threads */
};

/* ---- controls for tests (looked up by dlsym) ---- */

typedef struct sim_controls {
    /* Forget everything; `ranks` threads will come, each with sim_rank_begin. */
    void (*reset)(int ranks, sim_policy policy, uint64_t seed);
    void (*use_kernels)(const sw_kernel_reference *references, int count);
    void (*rank_begin)(int rank);
    void (*rank_end)(void);
    /* Note that the rank's host itself reads or writes memory that the device knows. */
    void (*host_access)(const void *begin, size_t size_bytes, sw_access access, const char *label);
    /* Count calls from now on: the nth (from 1) fails with this result; 0: none. */
    void (*fail_call)(int rank, long nth, int result);
    long (*calls)(int rank);
    const char *(*failed_call)(void); /* the name of the call that fail_call hit, "" if none */
    void (*set_devices)(int count, int version);
    /* Set the result of every later cuThreadExchangeStreamCaptureMode; 0: success. */
    void (*refuse_exemptions)(int result);
    /* Return the number of reports and their text; `sites` adds call sites (slow: addr2line). */
    int (*reports)(const char **text, bool sites);
    /* Return the remaining allocations as text; "" if there are none. */
    const char *(*leaks)(void);
} sim_controls;

SIM_API const sim_controls *sim_get_controls(void);

/* ---- shared by the files of this folder ---- */

typedef struct sim_clock {
    uint32_t at[SIM_ACTOR_MAX];
} sim_clock;

typedef struct sim_site {
    const char *operation; /* static text */
    int rank, depth;
    void *frame[SIM_SITE_DEPTH];
} sim_site;

typedef struct sim_touch { /* one access of an actor, at that actor's time */
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
    sim_touch read[SIM_ACTOR_MAX]; /* last, so that unused ones are not copied */
} sim_segment;

typedef struct sim_block {
    unsigned char *memory;
    size_t size_bytes;
    bool pinned, freed;
    bool foreign;      /* torch's memory, or registered memory: adopted, not freed here */
    bool torch_writes; /* an operation of torch's has written to it: foreign, or lent to torch */
    int registered;    /* count of registrations; host memory, which the host may write, too */
    bool mapped;       /* its pages are its own: it may be exported */
    int file;          /* exported: the file behind it; 0: none */
    int open_count;    /* peers that are threads and have it open */
    int rank;          /* device ordinal */
    sim_site freed_at;
    unsigned char *before; /* its bytes before the running kernel, if they are compared */
    sim_segment *segments;
    struct sim_block *next;
} sim_block;

struct CUevent_st {
    uint64_t recorded, done; /* generations */
    bool destroyed;          /* kept until the next reset: enqueued operations may name it */
    bool reads_torchs;       /* as its stream's */
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
    const sw_kernel_reference *reference;
    unsigned char *args; /* owned */
    void *to;
    const void *from;
    size_t size_bytes;
    unsigned char value;
    uint32_t number; /* written to `to`, or awaited there */
    sw_cu_event event;
    uint64_t generation;
    void *group;  /* OP_COLLECTIVE: fake_nccl.c's */
    sw_grid grid; /* of a kernel */
    sim_site site;
    struct sim_op *next;
} sim_op;

struct CUstream_st {
    int actor, rank;
    bool destroyed;       /* kept until the next reset, like an event */
    bool is_torch;        /* torch's: see sim_torch.c */
    bool reads_torchs;    /* since its last event a kernel on this other stream reads torch's memory */
    bool capturing;       /* into a graph: an operation enqueued meanwhile is a report */
    bool capture_broken;  /* by a call of any thread that captures forbid: a report */
    const void *capturer; /* the thread that began it in global mode */
    sim_clock clock;
    sim_clock before; /* the clock before the last operation that is no record */
    sim_op *first, *last;
    struct CUstream_st *next;
};

/* Added to the stream handle of a cuEventRecord, these stand for a record in the wrong place, for
 * mutations (tests/test_event_mutations.py). The event then orders less than it should. */
enum { SIM_RECORD_EARLY = 1, SIM_RECORD_ELSEWHERE = 2, SIM_RECORD_WRONG = 3 };

typedef struct sim_told { /* a number that a stream has been given to write */
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

/* Runs kernel number `kernel` over a grid; false if its threads wait for one another. */
typedef bool sim_kernel_text(int kernel, const void *args, unsigned blocks, unsigned threads);

typedef struct sim_rank {
    bool alive, begun;
    int actor;
    sim_clock clock;
    long calls, fail_nth;
    int fail_result;
} sim_rank;

struct CUctx_st {
    int ordinal, retained;
    sw_cu_stream legacy; /* its default stream, whose handle is NULL; only if torch uses it */
};

typedef struct sim_state {
    sim_policy policy;
    uint64_t seed;
    int rank_count, baton;
    int device_count, version;
    int actor_count;
    long idle_polls;          /* queries since an operation last ran */
    unsigned long host_calls; /* calls of any kind */
    bool deadlocked;
    const void *host_thread; /* ranks are processes: the thread of torch's operations; else NULL */
    bool has_peers;          /* ranks are processes: waits are limited by seconds, not by polls */
    int64_t idle_since_ns;
    sim_rank rank[SIM_DEVICE_MAX];
    struct CUctx_st context[SIM_DEVICE_MAX];
    sim_block *blocks;
    sw_cu_stream streams;
    sw_cu_event events;
    sim_told *told; /* the newest first */
    int modules, comms;
    int (*holds_gil)(void); /* whether the calling thread holds the interpreter's lock; NULL: nobody
                               asks */
    sim_site gil_site[SIM_GIL_MAX]; /* distinct calls that enqueued with it */
    int gil_count;
    int queue_limit;    /* operations that a stream holds before a call that adds one blocks; 0: any */
    int strict;         /* SIM_STRICT_... */
    bool stalled;       /* nothing runs */
    int blocked;        /* threads inside such a call */
    long blocked_calls; /* calls that blocked so far */
    uint64_t memory_limit_bytes; /* of device memory that is allocated and cached; 0: none */
    uint64_t cached_bytes;       /* torch's allocator holds them */
    const sw_kernel_reference *references;
    int reference_count;
    sim_kernel_text *text; /* runs kernels in place of their references; or NULL */
    int spoiled;           /* the kernel, from 1, whose first written byte comes out wrong; 0: none */
    int report_count;
    sim_note note[SIM_NOTE_MAX];  /* the first reports are kept */
    char report[1 << 16];         /* their text, made when it is asked for */
    char fail_name[SIM_CALL_MAX]; /* the next call of that name fails, too; "": none */
    int fail_name_result;
    char slow_name[SIM_CALL_MAX]; /* the next call of that name takes so long; "": none */
    long slow_ms;
    int exemption_result; /* of cuThreadExchangeStreamCaptureMode, if it fails */
    char failed[SIM_CALL_MAX];
    /* Report if the collective at the head of its stream can run; run and pop it on all ranks. */
    bool (*collective_ready)(sim_op *op);
    void (*collective_run)(sim_op *op);
    /* On demand: drive the streams that must reach their part of it. */
    void (*collective_drive)(sim_op *op, int depth);
} sim_state;

SIM_API extern sim_state sim;

/* Take the baton for the calling rank and count the call. Return false with *result if the call
 * must fail. */
SIM_API bool sim_enter(const char *call, int *result);
SIM_API void sim_leave(void);
/* Hand the baton to the next live rank. */
SIM_API void sim_yield(void);
SIM_API int sim_current_rank(void);
SIM_API sw_cu_context sim_current_context(void);
SIM_API sw_cu_stream sim_stream(sw_cu_stream handle);
/* Return the identity of the calling thread: the address of a thread-local variable. */
SIM_API const void *sim_thread(void);
/* Return true if a capture into a graph forbids this thread calls outside of stream order: a
 * capture that it began itself, or any in the modes that forbid other threads. Such a call ends the
 * capture, which is reported. Call it with the gate held. */
SIM_API bool sim_capture_forbids(const char *call);

SIM_API sim_site sim_here(const char *operation);
SIM_API void sim_report(const char *kind, const char *detail, const sim_site *a, const sim_site *b);
SIM_API sim_block *sim_block_of(const void *address);
/* Bytes of device memory that are allocated, without torch's. */
SIM_API uint64_t sim_memory_in_use(void);
/* Note an access by `actor` at `clock`, and report conflicts. */
SIM_API void sim_track(const sim_clock *clock, int actor, const void *begin, size_t size_bytes,
                       sw_access access, const sim_site *site);
SIM_API void sim_join(sim_clock *into, const sim_clock *from);

/* Advance the stream's clock by one operation, which comes after all that the host has seen. */
SIM_API void sim_tick(sw_cu_stream stream);
SIM_API sim_op *sim_op_new(sim_op_kind kind, const char *operation);
SIM_API void sim_enqueue(sw_cu_stream stream, sim_op *op);
/* Before an operation is enqueued: block while the stream's queue is full, as a driver does, without
 * the gate, so that other threads' calls and the GPU go on. */
SIM_API void sim_wait_for_room(sw_cu_stream stream);
/* Where an operation was enqueued, as text: slow, addr2line is asked. */
SIM_API void sim_site_describe(char *out, size_t bytes, const sim_site *site);
SIM_API void sim_pop(sw_cu_stream stream);
/* Run operations by the policy: after an enqueue, and when a query asks for `event`. */
void sim_elapse(void);
SIM_API void sim_progress(void);
SIM_API void sim_demand(sw_cu_event event);
SIM_API void sim_drive(sw_cu_stream stream, sim_op *until, int depth);
/* Return the first number at that address that ends a wait for `number`; NULL if none was told yet.
 */
sim_told *sim_told_find(const uint32_t *at, uint32_t number);
bool sim_number_has_come(const sim_op *op);
/* Report remaining uses of exported memory that is freed. */
void sim_exported_free(const sim_block *block, const sim_site *site);
SIM_API uint64_t sim_draw(void);
/* Run all that is enqueued on the stream, waiting for peers. Return false, after a report, at a
 * deadlock. Call it without the gate. */
SIM_API bool sim_drain(sw_cu_stream stream);
/* Wait until all that the calling rank's GPU has enqueued has run, or report a deadlock. Call it with
 * the gate held. */
SIM_API void sim_wait_for_device(const char *call);
/* Take the gate alone, for the simulation's own threads. */
SIM_API void sim_lock(void);
/* Return true if nothing has run for so long that nothing will. Call it with the gate held. */
SIM_API bool sim_is_stuck(void);

#endif
