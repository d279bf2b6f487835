/* fake_cuda.c - a libcuda.so.1 with simulated GPUs behind it: see sim.h. Only the functions of
 * csrc/device/cuda_abi.h exist. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "fake_entry.h"

enum { KERNEL_MAX = 64, POISON = 0xf7, CONTEXT_DEPTH = 8, PAGE_BYTES = 4096 };

static __thread sw_cu_context stack[CONTEXT_DEPTH];
static __thread int depth;

sw_cu_context sim_current_context(void)
{
    return depth ? stack[depth - 1] : NULL;
}

/* ---- the driver and its devices ---- */

SIM_API int cuInit(unsigned flags)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    return flags                                             ? SW_CU_INVALID_VALUE
           : sim.device_count == 0 || (visible && !*visible) ? SW_CU_NO_DEVICE
                                                             : SW_CU_SUCCESS;
}

SIM_API int cuDriverGetVersion(int *version)
{
    *version = sim.version;
    return SW_CU_SUCCESS;
}

SIM_API int cuGetErrorName(int result, const char **name)
{
    *name = result == SW_CU_OUT_OF_MEMORY     ? "CUDA_ERROR_OUT_OF_MEMORY"
            : result == SW_CU_INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
            : result == SW_CU_NOT_FOUND       ? "CUDA_ERROR_NOT_FOUND"
            : result == 999                   ? "CUDA_ERROR_UNKNOWN"
            : result == 702                   ? "CUDA_ERROR_LAUNCH_TIMEOUT"
                                              : "CUDA_ERROR_OTHER";
    return SW_CU_SUCCESS;
}

SIM_API int cuDeviceGetCount(int *count)
{
    *count = sim.device_count;
    return SW_CU_SUCCESS;
}

SIM_API int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return ordinal >= 0 && ordinal < sim.device_count ? SW_CU_SUCCESS : SW_CU_INVALID_DEVICE;
}

SIM_API int cuDeviceGetName(char *name, int length, int device)
{
    snprintf(name, (size_t)length, "Simulated GPU %d", device);
    return SW_CU_SUCCESS;
}

/* Ranks that are processes have one card each unless SIM_BUS says otherwise. */
static int bus_of(int device)
{
    const char *named = getenv("SIM_BUS");
    return named ? atoi(named) + device : device;
}

SIM_API int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    *value = attribute == SW_CU_ATTRIBUTE_CAPABILITY_MAJOR       ? 9
             : attribute == SW_CU_ATTRIBUTE_MULTIPROCESSOR_COUNT ? 4
             : attribute == SW_CU_ATTRIBUTE_PCI_BUS_ID           ? bus_of(device)
                                                                 : 0;
    return SW_CU_SUCCESS;
}

SIM_API int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    (void)device;
    *bytes = (size_t)1 << 30;
    return SW_CU_SUCCESS;
}

SIM_API int cuDevicePrimaryCtxRetain(sw_cu_context *context, int device)
{
    ENTER("cuDevicePrimaryCtxRetain");
    sim.context[device].retained++;
    *context = &sim.context[device];
    LEAVE(SW_CU_SUCCESS);
}

SIM_API int cuDevicePrimaryCtxRelease_v2(int device)
{
    sim.context[device].retained--;
    return SW_CU_SUCCESS;
}

SIM_API int cuCtxGetCurrent(sw_cu_context *context)
{
    *context = sim_current_context();
    return SW_CU_SUCCESS;
}

SIM_API int cuCtxPushCurrent_v2(sw_cu_context context)
{
    if (depth == CONTEXT_DEPTH)
        return SW_CU_INVALID_CONTEXT;
    stack[depth++] = context;
    return SW_CU_SUCCESS;
}

SIM_API int cuCtxPopCurrent_v2(sw_cu_context *context)
{
    if (!depth)
        return SW_CU_INVALID_CONTEXT;
    *context = stack[--depth];
    return SW_CU_SUCCESS;
}

/* Return the stream of a handle. NULL is the legacy default stream of the current context, which
 * torch uses unless a program says otherwise. Return NULL if there is no such stream. */
sw_cu_stream sim_stream(sw_cu_stream handle)
{
    return handle ? handle : sim_current_context()->legacy;
}

/* ---- captures ---- */

static __thread int capture_mode = SW_CU_CAPTURE_MODE_GLOBAL;

const void *sim_thread(void)
{
    return &capture_mode;
}

/* The rule of cuThreadExchangeStreamCaptureMode in cuda.h. */
bool sim_capture_forbids(const char *call)
{
    bool forbidden = false;
    for (sw_cu_stream s = sim.streams; s && capture_mode != SW_CU_CAPTURE_MODE_RELAXED;
         s = s->next) {
        bool is_own = s->capturer == sim_thread();
        if (!s->capturing || (!is_own && capture_mode != SW_CU_CAPTURE_MODE_GLOBAL))
            continue;
        forbidden = s->capture_broken = true;
        sim_site site = sim_here(call);
        sim_report("broken capture", call, &site, NULL);
    }
    return forbidden;
}

/* Not counted, since each call of the engine makes two of these. */
SIM_API int cuThreadExchangeStreamCaptureMode(int *mode)
{
    int before = capture_mode;
    if (sim.exemption_result)
        return sim.exemption_result;
    if (*mode < SW_CU_CAPTURE_MODE_GLOBAL || *mode > SW_CU_CAPTURE_MODE_RELAXED)
        return SW_CU_INVALID_VALUE;
    capture_mode = *mode;
    *mode = before;
    return SW_CU_SUCCESS;
}

/* ---- memory ---- */

static sim_block *block_new(size_t size_bytes, bool pinned)
{
    sim_block *block = calloc(1, sizeof *block);
    block->size_bytes = size_bytes;
    block->pinned = pinned;
    block->rank = sim_current_context()->ordinal;
    block->mapped = !pinned && size_bytes % PAGE_BYTES == 0;
    if (block->mapped)
        block->memory =
            mmap(NULL, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    else
        block->memory = aligned_alloc(256, (size_bytes + 255) / 256 * 256);
    memset(block->memory, POISON, size_bytes);
    block->segments = calloc(1, sizeof *block->segments);
    block->segments->end = size_bytes;
    block->next = sim.blocks;
    sim.blocks = block;
    return block;
}

/* A free is a write by the host: every use of the memory must be ordered before it. */
static int block_free(void *address, bool pinned, const char *operation)
{
    sim_block *block = sim_block_of(address);
    sim_rank *rank = &sim.rank[sim_current_rank()];
    sim_site site = sim_here(operation);
    if (!block || block->memory != address || block->pinned != pinned)
        return SW_CU_INVALID_VALUE;
    if (block->file)
        sim_exported_free(block, &site);
    else
        sim_track(&rank->clock, rank->actor, address, block->size_bytes, SW_ACCESS_WRITE, &site);
    block->freed = true;
    block->freed_at = site;
    return SW_CU_SUCCESS;
}

uint64_t sim_memory_in_use(void)
{
    uint64_t bytes = 0;
    for (const sim_block *block = sim.blocks; block; block = block->next)
        bytes += block->freed || block->foreign || block->pinned ? 0 : block->size_bytes;
    return bytes;
}

SIM_API int cuMemAlloc_v2(sw_cu_address *address, size_t bytes)
{
    ENTER_DEVICE_WIDE("cuMemAlloc");
    if (sim.memory_limit_bytes &&
        sim_memory_in_use() + sim.cached_bytes + bytes > sim.memory_limit_bytes)
        LEAVE(SW_CU_OUT_OF_MEMORY);
    *address = (sw_cu_address)(uintptr_t)block_new(bytes, false)->memory;
    LEAVE(SW_CU_SUCCESS);
}

SIM_API int cuMemFree_v2(sw_cu_address address)
{
    ENTER_DEVICE_WIDE("cuMemFree");
    LEAVE(block_free((void *)(uintptr_t)address, false, "cuMemFree"));
}

SIM_API int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags)
{
    (void)flags;
    ENTER_DEVICE_WIDE("cuMemHostAlloc");
    *memory = block_new(bytes, true)->memory;
    LEAVE(SW_CU_SUCCESS);
}

SIM_API int cuMemFreeHost(void *memory)
{
    ENTER_DEVICE_WIDE("cuMemFreeHost");
    LEAVE(block_free(memory, true, "cuMemFreeHost"));
}

SIM_API int cuPointerGetAttribute(void *value, int attribute, sw_cu_address address)
{
    ENTER_CONTEXT("cuPointerGetAttribute");
    sim_block *block = sim_block_of((void *)(uintptr_t)address);
    if (!block || block->freed)
        LEAVE(SW_CU_INVALID_VALUE);
    if (attribute == SW_CU_POINTER_MEMORY_TYPE)
        *(int *)value = block->pinned ? SW_CU_MEMORYTYPE_HOST : SW_CU_MEMORYTYPE_DEVICE;
    else
        *(int *)value = block->rank;
    LEAVE(SW_CU_SUCCESS);
}

/* ---- work ---- */

/* Limit a size to the rest of the block that holds `at`. An access beyond it was reported, and the
 * memory there does not belong to the simulation. */
static uint64_t within_block(const void *at, uint64_t size_bytes)
{
    const sim_block *block = sim_block_of(at);
    uint64_t left = block
                        ? (uint64_t)(block->memory + block->size_bytes - (const unsigned char *)at)
                        : size_bytes;
    return left < size_bytes ? left : size_bytes;
}

static void run_copy(sim_op *op)
{
    memmove(op->to, op->from, within_block(op->from, within_block(op->to, op->size_bytes)));
}

static void run_fill(sim_op *op)
{
    memset(op->to, op->value, op->size_bytes);
}

/* The bytes that the running kernel may write, and a copy of all memory before it. Kept from kernel
 * to kernel, since new pages cost more than the copies. Guarded by the gate. */
static struct {
    struct {
        sim_block *block;
        size_t from, size_bytes;
    } *writable;
    size_t writable_count, writable_room;
    unsigned char *memory;
    size_t room_bytes;
} kept;

static bool is_compared(const sim_block *b)
{
    if (b->registered || b->file) /* other processes write to it */
        return false;
    /* The host writes to pinned memory and to all that torch's operations write, inside an
     * operation of torch's or a step. It cannot do so during this call, which is certain only if
     * that thread made the call. */
    if ((b->torch_writes || b->pinned) && sim.host_thread && sim.host_thread != sim_thread())
        return false;
    /* Blocks of saves that are over, and of checks of kernels: large, and many. */
    return !(b->freed && (b->pinned || sim.text));
}

static void mark_writable(void *context, const void *begin, size_t size_bytes, sw_access access)
{
    (void)context;
    sim_block *block = size_bytes && access & SW_ACCESS_WRITE ? sim_block_of(begin) : NULL;
    if (!block)
        return;
    if (kept.writable_count == kept.writable_room) {
        kept.writable_room = 2 * kept.writable_room + 64;
        kept.writable = realloc(kept.writable, kept.writable_room * sizeof *kept.writable);
    }
    kept.writable[kept.writable_count].block = block;
    kept.writable[kept.writable_count].from =
        (size_t)((const unsigned char *)begin - block->memory);
    kept.writable[kept.writable_count++].size_bytes = within_block(begin, size_bytes);
}

/* Flip a bit of the first byte that a kernel writes. */
static void spoil(void *context, const void *begin, size_t size_bytes, sw_access access)
{
    bool *is_done = context;
    if (*is_done || !size_bytes || !(access & SW_ACCESS_WRITE))
        return;
    *(unsigned char *)(uintptr_t)begin ^= 1;
    *is_done = true;
}

/* By the host reference, or by the kernel's own text. */
static void compute(const sim_op *op)
{
    int kernel = (int)(op->reference - sim.references);
    bool is_done = kernel + 1 != sim.spoiled;
    if (!sim.text)
        op->reference->reference(op->args);
    else if (!sim.text(kernel, op->args, op->grid.block_count, op->grid.thread_count))
        sim_report("stuck kernel", op->reference->name, &op->site, NULL);
    if (!is_done)
        op->reference->accesses(op->args, spoil, &is_done);
}

/* Run the host reference and look for bytes that changed although the contract does not declare
 * them: copy the declared bytes to the old copy, which must then equal the memory. */
static void run_kernel(sim_op *op)
{
    size_t total = 0;
    kept.writable_count = 0;
    op->reference->accesses(op->args, mark_writable, NULL);
    for (const sim_block *b = sim.blocks; b; b = b->next)
        total += is_compared(b) ? b->size_bytes : 0;
    if (total > kept.room_bytes) {
        free(kept.memory);
        kept.room_bytes = total + total / 2;
        kept.memory = malloc(kept.room_bytes);
    }
    unsigned char *before = kept.memory;
    for (sim_block *b = sim.blocks; b; b = b->next)
        if (is_compared(b)) {
            b->before = before;
            memcpy(before, b->memory, b->size_bytes);
            before += b->size_bytes;
        }
    compute(op);
    for (size_t i = 0; i < kept.writable_count; ++i) {
        const sim_block *b = kept.writable[i].block;
        size_t from = kept.writable[i].from;
        if (is_compared(b))
            memcpy(b->before + from, b->memory + from, kept.writable[i].size_bytes);
    }
    for (const sim_block *b = sim.blocks; b; b = b->next)
        if (is_compared(b) && memcmp(b->before, b->memory, b->size_bytes) != 0)
            sim_report("undeclared write", op->reference->name, &op->site, NULL);
}

typedef struct tracking {
    sw_cu_stream stream;
    const sim_site *site;
} tracking;

static void track_access(void *context, const void *begin, size_t size_bytes, sw_access access)
{
    const tracking *t = context;
    if (!t->stream->is_torch && access & SW_ACCESS_READ && size_bytes && !sim_block_of(begin))
        t->stream->reads_torchs = true;
    sim_track(&t->stream->clock, t->stream->actor, begin, size_bytes, access, t->site);
}

SIM_API int cuMemcpyAsync(sw_cu_address to, sw_cu_address from, size_t bytes, sw_cu_stream stream)
{
    ENTER_CONTEXT("cuMemcpyAsync");
    QUEUED_STREAM(stream);
    sim_op *op = sim_op_new(OP_WORK, "cuMemcpyAsync");
    tracking t = {.stream = stream, .site = &op->site};
    op->run = run_copy;
    op->to = (void *)(uintptr_t)to;
    op->from = (void *)(uintptr_t)from;
    op->size_bytes = bytes;
    sim_tick(stream);
    track_access(&t, op->from, bytes, SW_ACCESS_READ);
    track_access(&t, op->to, bytes, SW_ACCESS_WRITE);
    sim_enqueue(stream, op);
    LEAVE(SW_CU_SUCCESS);
}

SIM_API int cuMemsetD8Async(sw_cu_address to, unsigned char value, size_t bytes,
                            sw_cu_stream stream)
{
    ENTER_CONTEXT("cuMemsetD8Async");
    QUEUED_STREAM(stream);
    sim_op *op = sim_op_new(OP_WORK, "cuMemsetD8Async");
    tracking t = {.stream = stream, .site = &op->site};
    op->run = run_fill;
    op->to = (void *)(uintptr_t)to;
    op->value = value;
    op->size_bytes = bytes;
    sim_tick(stream);
    track_access(&t, op->to, bytes, SW_ACCESS_WRITE);
    sim_enqueue(stream, op);
    LEAVE(SW_CU_SUCCESS);
}

/* Kernels whose code is loaded; guarded by the gate. */
static bool is_loaded[KERNEL_MAX];

SIM_API int cuModuleLoadData(sw_cu_module *module, const void *image)
{
    ENTER_DEVICE_WIDE("cuModuleLoadData");
    sim.modules += image != NULL;
    *module = (sw_cu_module)(void *)&sim;
    LEAVE(image ? SW_CU_SUCCESS : SW_CU_INVALID_VALUE);
}

SIM_API int cuModuleUnload(sw_cu_module module)
{
    (void)module;
    ENTER_DEVICE_WIDE("cuModuleUnload");
    sim.modules--;
    LEAVE(SW_CU_SUCCESS);
}

SIM_API int cuModuleGetFunction(sw_cu_function *function, sw_cu_module module, const char *name)
{
    (void)module;
    ENTER_CONTEXT("cuModuleGetFunction");
    for (int k = 0; k < sim.reference_count; ++k)
        if (strcmp(sim.references[k].name, name) == 0) {
            *function = (sw_cu_function)(void *)(uintptr_t)&sim.references[k];
            LEAVE(SW_CU_SUCCESS);
        }
    LEAVE(SW_CU_NOT_FOUND);
}

SIM_API int cuFuncLoad(sw_cu_function function)
{
    ENTER_CONTEXT_APART("cuFuncLoad");
    is_loaded[(const sw_kernel_reference *)(void *)function - sim.references] = true;
    LEAVE(SW_CU_SUCCESS);
}

SIM_API int cuLaunchKernel(sw_cu_function function, unsigned grid_x, unsigned grid_y,
                           unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
                           unsigned shared_bytes, sw_cu_stream stream, void **parameters,
                           void **extra)
{
    ENTER_CONTEXT("cuLaunchKernel");
    QUEUED_STREAM(stream);
    const sw_kernel_reference *reference = (const sw_kernel_reference *)(void *)function;
    if (extra || !grid_x || grid_y != 1 || grid_z != 1 || !block_x ||
        block_x * block_y * block_z > 1024)
        LEAVE(SW_CU_INVALID_VALUE);
    (void)shared_bytes;
    sim_op *op = sim_op_new(OP_WORK, reference->name);
    tracking t = {.stream = stream, .site = &op->site};
    op->run = run_kernel;
    op->reference = reference;
    op->grid = (sw_grid){.block_count = grid_x, .thread_count = block_x};
    op->args = malloc(reference->args_bytes);
    memcpy(op->args, parameters[0], reference->args_bytes);
    sim_tick(stream);
    reference->accesses(op->args, track_access, &t);
    if (!is_loaded[reference - sim.references])
        sim_report("lazy load", reference->name, &op->site, NULL);
    bool is_torch = stream->is_torch;
    sim_enqueue(stream, op);
    sim_leave();
    /* Torch may free its memory at once, so all reads of it must have run. */
    return !is_torch || sim_drain(stream) ? SW_CU_SUCCESS : 702;
}

/* ---- streams and events ---- */

SIM_API int cuStreamCreateWithPriority(sw_cu_stream *stream, unsigned flags, int priority)
{
    (void)priority;
    ENTER_CONTEXT("cuStreamCreate");
    if (flags != SW_CU_STREAM_NON_BLOCKING) { /* it and torch's stream would wait for each other */
        sim_site site = sim_here("cuStreamCreate");
        sim_report("blocking stream", "ordered by the legacy default stream", &site, NULL);
    }
    if (sim.actor_count == SIM_ACTOR_MAX)
        LEAVE(SW_CU_OUT_OF_MEMORY);
    sw_cu_stream made = calloc(1, sizeof *made);
    made->actor = sim.actor_count++;
    made->rank = sim_current_context()->ordinal;
    made->next = sim.streams;
    sim.streams = made;
    *stream = made;
    LEAVE(SW_CU_SUCCESS);
}

/* As in the driver, enqueued operations still run. */
SIM_API int cuStreamDestroy_v2(sw_cu_stream stream)
{
    ENTER_CONTEXT("cuStreamDestroy");
    stream->destroyed = true;
    LEAVE(SW_CU_SUCCESS);
}

SIM_API int cuStreamWaitEvent(sw_cu_stream stream, sw_cu_event event, unsigned flags)
{
    (void)flags;
    ENTER_CONTEXT("cuStreamWaitEvent");
    QUEUED_STREAM(stream);
    sim_op *op = sim_op_new(OP_WAIT, "cuStreamWaitEvent");
    op->event = event;
    op->generation = event->recorded;
    sim_tick(stream);
    sim_join(&stream->clock, &event->clock);
    bool frees = stream->is_torch && event->reads_torchs;
    sim_enqueue(stream, op);
    sim_leave();
    /* Torch may free what kernels before the event read. */
    return !frees || sim_drain(stream) ? SW_CU_SUCCESS : 702;
}

SIM_API int cuStreamIsCapturing(sw_cu_stream stream, int *status)
{
    ENTER_CONTEXT("cuStreamIsCapturing");
    NAMED_STREAM(stream);
    *status = stream->capturing ? SW_CU_CAPTURE_NONE + 1 : SW_CU_CAPTURE_NONE;
    LEAVE(SW_CU_SUCCESS);
}

SIM_API int cuEventCreate(sw_cu_event *event, unsigned flags)
{
    ENTER_CONTEXT("cuEventCreate");
    if (flags != SW_CU_EVENT_DISABLE_TIMING) { /* each record would write a time stamp */
        sim_site site = sim_here("cuEventCreate");
        sim_report("timed event", "an event with timing that is never read", &site, NULL);
    }
    sw_cu_event made = calloc(1, sizeof *made);
    made->next = sim.events;
    sim.events = made;
    *event = made;
    LEAVE(SW_CU_SUCCESS);
}

SIM_API int cuEventDestroy_v2(sw_cu_event event)
{
    ENTER_CONTEXT("cuEventDestroy");
    event->destroyed = true;
    LEAVE(SW_CU_SUCCESS);
}

/* Enqueue before the last operation that has not run, if there is one. */
static void enqueue_early(sw_cu_stream stream, sim_op *op)
{
    sim_op **last = NULL;
    for (sim_op **at = &stream->first; *at; at = &(*at)->next)
        if ((*at)->kind != OP_RECORD)
            last = at;
    if (!last) {
        sim_enqueue(stream, op);
        return;
    }
    op->next = *last;
    *last = op;
    sim_progress();
}

SIM_API int cuEventRecord(sw_cu_event event, sw_cu_stream given)
{
    ENTER_CONTEXT("cuEventRecord");
    int wrong = (int)((uintptr_t)given & SIM_RECORD_WRONG);
    sw_cu_stream stream = (sw_cu_stream)(void *)((char *)given - wrong);
    QUEUED_STREAM(stream);
    sim_op *op = sim_op_new(OP_RECORD, "cuEventRecord");
    sim_clock before = stream->before;
    sim_tick(stream);
    stream->before = before;
    event->clock = wrong == SIM_RECORD_EARLY ? before
                   : wrong                   ? sim.rank[sim_current_rank()].clock
                                             : stream->clock;
    event->reads_torchs = stream->reads_torchs;
    stream->reads_torchs = false;
    op->event = event;
    op->generation = ++event->recorded;
    if (wrong == SIM_RECORD_ELSEWHERE) { /* on an idle stream: done at once */
        event->done = op->generation;
        free(op);
    } else if (wrong == SIM_RECORD_EARLY) {
        enqueue_early(stream, op);
    } else {
        sim_enqueue(stream, op);
    }
    LEAVE(SW_CU_SUCCESS);
}

SIM_API int cuEventQuery(sw_cu_event event)
{
    ENTER_CONTEXT_APART("cuEventQuery");
    sim_demand(event);
    if (event->done >= event->recorded) {
        sim_join(&sim.rank[sim_current_rank()].clock, &event->clock);
        sim_yield(); /* a thread that keeps polling waits for another rank's host */
        LEAVE(SW_CU_SUCCESS);
    }
    if (sim_is_stuck() && !sim.deadlocked) {
        sim.deadlocked = true;
        for (sw_cu_stream s = sim.streams; s; s = s->next)
            if (s->first)
                sim_report("deadlock", "the head of a stream cannot run", &s->first->site, NULL);
    }
    if (sim.deadlocked)
        LEAVE(702);
    sim_yield();
    LEAVE(SW_CU_NOT_READY);
}
