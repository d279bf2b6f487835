/* sim_torch.c - torch on the simulated GPUs: its tensors are on the CPU, its operations run as they
 * are called, and one stream stands for the order that they have on a GPU.
 *
 * Idea: before an operation runs, all that torch's stream was given runs (and what that waits for);
 * then the operation's reads and writes are noted at the stream's clock. So an operation that is
 * not ordered after what it needs is a race, whatever the values are. Memory of torch's that the
 * engine's streams touch is adopted; the rest nobody but torch's stream sees.
 *
 * Called from Python, through ctypes; ranks are processes. Thread rule: the rank's own thread;
 * look() is for another.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

typedef struct sim_torch_access {
    const void *begin;
    uint64_t size_bytes;
    int access; /* sw_access */
} sim_torch_access;

static sw_cu_stream make_stream(void)
{
    sw_cu_stream made = calloc(1, sizeof *made);
    made->actor = sim.actor_count++;
    made->is_torch = true;
    made->next = sim.streams;
    sim.streams = made;
    return made;
}

/* A stream of torch's own, beside its default one. */
SIM_API void *sim_torch_stream(void)
{
    sim_lock();
    sw_cu_stream made = make_stream();
    sim_leave();
    return made;
}

/* Of a handle that torch has: NULL is the legacy default stream, on which it is at first. */
static sw_cu_stream stream_of(void *handle)
{
    return handle ? handle : sim.context[0].legacy;
}

/* A simulation of one rank begins; its kernels by their contracts. */
SIM_API void sim_torch_begin(int policy, uint64_t seed, const sw_kernel_contract *contracts,
                             int count)
{
    sim_get_controls()->reset(1, (sim_policy)policy, seed);
    sim_get_controls()->use_kernels(contracts, count);
    sim.host_thread = sim_thread();
    sim_lock();
    sim.context[0].legacy = make_stream();
    sim_leave();
}

/* Memory that torch has written, on its stream. */
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

/* Torch writes this block from now on, in the host's thread and without the gate, also where the
 * block is not its own: it is given memory that is registered with NCCL. */
static void note_writer(const sim_torch_access *access)
{
    sim_block *block =
        access->size_bytes && access->access & SW_ACCESS_WRITE ? sim_block_of(access->begin) : NULL;
    if (block)
        block->torch_writes = true;
}

/* An operation of torch's named `label` is about to run. 0, or -1 at a deadlock. */
SIM_API int sim_torch_op(void *stream, const sim_torch_access *access, int count, const char *label)
{
    sw_cu_stream torch_stream = stream_of(stream);
    if (!sim_drain(torch_stream))
        return -1;
    if (count ==
        0) /* nothing that has an order: the results of what is enqueued were needed at most */
        return 0;
    sim_lock();
    sim_site site = sim_here(label);
    if (sim.host_thread != sim_thread()) /* what kernels are held to rests on it */
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

/* Called now and then by a thread that looks after nothing else: where the host has called nothing
 * since, it computes, or waits for other ranks in ways that the simulation does not see, and what
 * those wait for may be enqueued here. A GPU would have run it by then. */
SIM_API void sim_torch_look(void)
{
    static unsigned long seen; /* under the lock */
    sim_lock();
    if (sim.host_calls == seen)
        sim_elapse();
    seen = sim.host_calls;
    sim_leave();
}

/* The host has waited for torch's stream. */
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

/* A stream of torch's begins to be captured, in global mode as torch does it, or ends. -1 where
 * the capture was broken meanwhile. */
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

/* Reports so far, and their text, with call sites. */
SIM_API int sim_torch_reports(const char **text)
{
    return sim_get_controls()->reports(text, true);
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
