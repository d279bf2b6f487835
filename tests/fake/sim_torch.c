/* sim_torch.c - torch on the simulated GPUs. Its tensors are on the CPU, its operations run as they
 * are called, and one stream stands for their order on a GPU.
 *
 * Before an operation of torch's runs, everything enqueued on torch's stream runs, and all that it
 * waits for. Then the reads and writes of the operation are noted at the stream's clock. An
 * operation that is not ordered after what it needs is therefore a race, whatever the values are.
 * Memory of torch's that the engine's streams touch is adopted; only torch's stream uses the rest.
 *
 * Python calls this through ctypes; ranks are processes. Thread rule: one thread of the rank's at a
 * time, move() says which; look() is for another.
 */
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

typedef struct sim_torch_access {
    const void *begin;
    uint64_t size_bytes;
    int access; /* sw_access */
} sim_torch_access;

enum { LABEL_MAX = 512 };
static char *loaded[LABEL_MAX]; /* owned: operations of torch's whose kernels are loaded; guarded by the gate */

static sw_cu_stream make_stream(void)
{
    sw_cu_stream made = calloc(1, sizeof *made);
    made->actor = sim.actor_count++;
    made->is_torch = true;
    made->next = sim.streams;
    sim.streams = made;
    return made;
}

/* Create a stream of torch's, beside its default one. */
SIM_API void *sim_torch_stream(void)
{
    sim_lock();
    sw_cu_stream made = make_stream();
    sim_leave();
    return made;
}

/* Return the stream of a handle of torch's. NULL is the legacy default stream, torch's first. */
static sw_cu_stream stream_of(void *handle)
{
    return handle ? handle : sim.context[0].legacy;
}

/* Begin a simulation of one rank with the kernels of these references. */
SIM_API void sim_torch_begin(int policy, uint64_t seed, const sw_kernel_reference *references,
                             int count)
{
    sim_get_controls()->reset(1, (sim_policy)policy, seed);
    sim_get_controls()->use_kernels(references, count);
    sim.host_thread = sim_thread();
    sim_lock();
    for (int i = 0; i < LABEL_MAX && loaded[i]; ++i) {
        free(loaded[i]);
        loaded[i] = NULL;
    }
    sim.context[0].legacy = make_stream();
    sim_leave();
}

/* The thread that runs torch's operations from now on: the caller's. */
SIM_API void sim_torch_move(void)
{
    sim_lock();
    sim.host_thread = sim_thread();
    sim_leave();
}

/* Wait for sim_torch_done, as torch's C++ waits for its thread of a GPU: a signal interrupts neither. */
static sem_t done;

SIM_API void sim_torch_await(void)
{
    while (sem_wait(&done) != 0)
        continue;
}

SIM_API void sim_torch_done(void)
{
    sem_post(&done);
}

/* Adopt memory that torch has written, on its stream. */
SIM_API void sim_torch_adopt(void *stream, void *memory, uint64_t size_bytes)
{
    sw_cu_stream torch_stream = stream_of(stream);
    sim_lock();
    sim_block *block = calloc(1, sizeof *block);
    block->size_bytes = size_bytes;
    block->foreign = block->torch_writes = true;
    block->memory = memory;
    block->segments = calloc(1, sizeof *block->segments);
    block->segments->end = size_bytes;
    block->next = sim.blocks;
    sim.blocks = block;
    sim_site site = sim_here("torch's own write");
    sim_tick(torch_stream);
    sim_track(&torch_stream->clock, torch_stream->actor, memory, size_bytes, SW_ACCESS_WRITE,
              &site);
    sim_leave();
}

/* Mark the block that an operation of torch's writes to. The host's thread writes it from now on,
 * without the gate. */
static void note_writer(const sim_torch_access *access)
{
    sim_block *block =
        access->size_bytes && access->access & SW_ACCESS_WRITE ? sim_block_of(access->begin) : NULL;
    if (block)
        block->torch_writes = true;
}

/* Return true at the first operation with that label in this simulation. Labels live as long as the
 * process; full: false. */
static bool is_first(const char *label)
{
    int i = 0;
    while (i < LABEL_MAX && loaded[i] && strcmp(loaded[i], label) != 0)
        ++i;
    if (i == LABEL_MAX || loaded[i])
        return false;
    loaded[i] = strdup(label);
    return true;
}

/* Run before an operation of torch's named `label`. Return 0, or -1 at a deadlock. */
SIM_API int sim_torch_op(void *stream, const sim_torch_access *access, int count, const char *label)
{
    sw_cu_stream torch_stream = stream_of(stream);
    sim_lock();
    if (sim.strict & SIM_STRICT_LAZY && is_first(label))
        sim_wait_for_device(label);
    bool is_stuck = sim.deadlocked;
    sim_leave();
    if (is_stuck || !sim_drain(torch_stream))
        return -1;
    if (count == 0) /* no access to order; enqueued results may have been needed */
        return 0;
    sim_lock();
    sim_site site = sim_here(label);
    if (sim.host_thread != sim_thread()) /* the check of undeclared writes relies on it */
        sim_report("torch elsewhere", "an operation in a thread that began no simulation", &site,
                   NULL);
    sim_tick(torch_stream);
    for (int i = 0; i < count; ++i)
        note_writer(&access[i]);
    for (int i = 0; i < count; ++i)
        sim_track(&torch_stream->clock, torch_stream->actor, access[i].begin, access[i].size_bytes,
                  (sw_access)access[i].access, &site);
    sim_leave();
    return 0;
}

/* Run what can run if the host has made no call since the last look. A thread with no other work
 * calls it now and then: the host then computes, or waits for other ranks in ways that the
 * simulation does not see. They may wait for operations enqueued here, which a GPU would have run
 * by then. */
SIM_API void sim_torch_look(void)
{
    static unsigned long seen; /* guarded by the gate */
    sim_lock();
    if (sim.host_calls == seen)
        sim_elapse();
    seen = sim.host_calls;
    sim_leave();
}

/* Note that the host has waited for torch's stream. */
SIM_API int sim_torch_synchronize(void *stream)
{
    sw_cu_stream torch_stream = stream_of(stream);
    if (!sim_drain(torch_stream))
        return -1;
    sim_lock();
    sim_join(&sim.rank[0].clock, &torch_stream->clock);
    sim_leave();
    return 0;
}

/* Begin or end the capture of a stream of torch's, in global mode as torch does. Return -1 if the
 * capture was broken meanwhile. */
SIM_API int sim_torch_capture(void *stream, int on)
{
    sw_cu_stream torch_stream = stream_of(stream);
    sim_lock();
    int result = torch_stream->capture_broken ? -1 : 0;
    torch_stream->capturing = on != 0;
    torch_stream->capture_broken = false;
    torch_stream->capturer = on ? sim_thread() : NULL;
    sim_leave();
    return result;
}

/* Return the number of reports and their text, with call sites. */
SIM_API int sim_torch_reports(const char **text)
{
    return sim_get_controls()->reports(text, true);
}

/* From now on calls that enqueue are noted if their thread holds the GIL, of which `ask` knows. */
SIM_API void sim_torch_watch_gil(int (*ask)(void))
{
    sim_lock();
    sim.holds_gil = ask;
    sim.gil_count = 0;
    sim_leave();
}

/* Distinct calls that were noted; the chain of callers of number `index` as text, "" beyond. */
SIM_API const char *sim_torch_gil_site(int index)
{
    static char text[4096];
    text[0] = '\0';
    if (index < sim.gil_count)
        sim_site_describe(text, sizeof text, &sim.gil_site[index]);
    return text;
}

/* A stream holds so many operations before a call that adds one blocks, 0: any number. */
SIM_API void sim_torch_limit_queue(int operations)
{
    sim_lock();
    sim.queue_limit = operations;
    sim_leave();
}

/* Nothing runs on the GPU from now on, or again. */
SIM_API void sim_torch_stall(int on)
{
    sim_lock();
    sim.stalled = on != 0;
    sim_leave();
}

/* Threads that are inside a call which found a full queue; and such calls so far. */
SIM_API int sim_torch_blocked(long *calls)
{
    sim_lock();
    int blocked = sim.blocked;
    *calls = sim.blocked_calls;
    sim_leave();
    return blocked;
}

/* Device memory that allocations of the driver may have, 0: any; and what of it torch's cache holds.
 */
SIM_API void sim_torch_limit_memory(uint64_t limit_bytes)
{
    sim_lock();
    sim.memory_limit_bytes = limit_bytes;
    sim_leave();
}

SIM_API void sim_torch_cache(uint64_t cached_bytes)
{
    sim_lock();
    sim.cached_bytes = cached_bytes;
    sim_leave();
}

SIM_API uint64_t sim_torch_memory_in_use(void)
{
    sim_lock();
    uint64_t bytes = sim_memory_in_use();
    sim_leave();
    return bytes;
}

/* Kernels run by `text` from now on, NULL: by their references; number `spoiled`, from 0, comes out
 * wrong, -1: none does. */
SIM_API void sim_torch_run_kernels(sim_kernel_text *text, int spoiled)
{
    sim_lock();
    sim.text = text;
    sim.spoiled = spoiled + 1;
    sim_leave();
}

SIM_API const char *sim_torch_leaks(void)
{
    return sim_get_controls()->leaks();
}

SIM_API void sim_torch_fail(long nth, int result)
{
    sim_get_controls()->fail_call(0, nth, result);
}

SIM_API void sim_torch_fail_named(const char *name, int result)
{
    sim_lock();
    snprintf(sim.fail_name, sizeof sim.fail_name, "%s", name);
    sim.fail_name_result = result;
    sim_leave();
}

SIM_API void sim_torch_slow_named(const char *name, long ms)
{
    sim_lock();
    snprintf(sim.slow_name, sizeof sim.slow_name, "%s", name);
    sim.slow_ms = ms;
    sim_leave();
}

SIM_API const char *sim_torch_failed(void)
{
    return sim_get_controls()->failed_call();
}

SIM_API long sim_torch_calls(void)
{
    return sim_get_controls()->calls(0);
}
