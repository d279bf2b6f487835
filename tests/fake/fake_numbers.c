/* fake_numbers.c - memory that ranks share: registered host memory, numbers that streams write and
 * wait for, memory of one process's GPU that another opens. See sim.h.
 *
 * A wait for a number joins the writer's clock. With ranks as threads the writer may come after the
 * waiter, so the waiter's host lets other ranks run first; the order in which hosts enqueue is
 * arbitrary anyway. If no writer comes the wait joins nothing, and later accesses are a race. With
 * ranks as processes, a helper thread takes part in a round that peers have reached while this
 * rank's host is busy elsewhere, as a GPU would.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "fake_entry.h"

enum { YIELDS_MAX = 200, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713 };

/* ---- registered memory ---- */

/* Ranks as processes may register one another's parts; ranks as threads all register the same. */
SIM_API int cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags)
{
    ENTER_CONTEXT_APART("cuMemHostRegister");
    sim_block *block = sim_block_of(memory);
    if (!memory || !bytes || !(flags & SW_CU_MEMHOSTREGISTER_DEVICEMAP))
        LEAVE(SW_CU_INVALID_VALUE);
    if (block && (!block->registered || block->memory != memory || block->size_bytes != bytes ||
                  block->registered >= sim.rank_count))
        LEAVE(ALREADY_REGISTERED);
    if (!block) {
        block = calloc(1, sizeof *block);
        block->memory = memory;
        block->size_bytes = bytes;
        block->pinned = block->foreign = true;
        block->segments = calloc(1, sizeof *block->segments);
        block->segments->end = bytes;
        block->next = sim.blocks;
        sim.blocks = block;
    }
    block->registered++;
    LEAVE(SW_CU_SUCCESS);
}

static bool is_own_actor(int actor)
{
    if (actor == sim.rank[sim_current_rank()].actor)
        return true;
    for (sw_cu_stream s = sim.streams; s; s = s->next)
        if (s->actor == actor)
            return s->rank == sim_current_context()->ordinal;
    return false;
}

/* Check that this rank's own streams are done with the memory; peers have their own registrations.
 */
static void check_over(const sim_block *block, const sim_site *site, const char *operation)
{
    const sim_clock *clock = &sim.rank[sim_current_rank()].clock;
    for (const sim_segment *s = block->segments; s; s = s->next) {
        const sim_touch *late = NULL;
        if (s->written && is_own_actor(s->write.actor) &&
            s->write.time > clock->at[s->write.actor])
            late = &s->write;
        for (int r = 0; r < s->read_count; ++r)
            if (is_own_actor(s->read[r].actor) && s->read[r].time > clock->at[s->read[r].actor])
                late = &s->read[r];
        if (late) {
            sim_report("race", operation, site, &late->site);
            return;
        }
    }
}

SIM_API int cuMemHostUnregister(void *memory)
{
    ENTER_CONTEXT_APART("cuMemHostUnregister");
    sim_block **at = &sim.blocks;
    sim_site site = sim_here("cuMemHostUnregister");
    while (*at && ((*at)->memory != memory || !(*at)->registered))
        at = &(*at)->next;
    if (!*at)
        LEAVE(NOT_REGISTERED);
    sim_block *block = *at;
    check_over(block, &site, "memory is unregistered while the device may use it");
    if (--block->registered == 0) { /* ordinary memory again: forget its history */
        *at = block->next;
        while (block->segments) {
            sim_segment *s = block->segments;
            block->segments = s->next;
            free(s);
        }
        free(block);
    }
    LEAVE(SW_CU_SUCCESS);
}

SIM_API int cuMemHostGetDevicePointer_v2(sw_cu_address *address, void *memory, unsigned flags)
{
    ENTER_CONTEXT("cuMemHostGetDevicePointer");
    const sim_block *block = sim_block_of(memory);
    *address = (sw_cu_address)(uintptr_t)memory;
    LEAVE(block && block->pinned && !flags ? SW_CU_SUCCESS : SW_CU_INVALID_VALUE);
}

/* ---- numbers ---- */

static bool is_there(uint32_t found, uint32_t wanted)
{
    return (int32_t)(found - wanted) >= 0;
}

bool sim_number_has_come(const sim_op *op)
{
    return is_there(__atomic_load_n((const uint32_t *)op->to, __ATOMIC_ACQUIRE), op->number);
}

sim_told *sim_told_find(const uint32_t *at, uint32_t number)
{
    sim_told *found = NULL;
    for (sim_told *told = sim.told; told; told = told->next)
        if (told->at == at && is_there(told->number, number) &&
            (!found || is_there(found->number, told->number)))
            found = told;
    return found;
}

static void run_write(sim_op *op)
{
    for (sim_told *told = sim.told; told; told = told->next)
        if (told->op == op)
            told->op = NULL;
    __atomic_store_n((uint32_t *)op->to, op->number, __ATOMIC_RELEASE);
}

static bool is_registered(const void *at)
{
    const sim_block *block = sim_block_of(at);
    return block && block->registered && (uintptr_t)at % sizeof(uint32_t) == 0;
}

SIM_API int cuStreamWriteValue32_v2(sw_cu_stream stream, sw_cu_address address, unsigned value,
                                    unsigned flags)
{
    ENTER_CONTEXT("cuStreamWriteValue32");
    QUEUED_STREAM(stream);
    uint32_t *at = (uint32_t *)(uintptr_t)address;
    if (flags || !is_registered(at))
        LEAVE(SW_CU_INVALID_VALUE);
    sim_op *op = sim_op_new(OP_WORK, "cuStreamWriteValue32");
    op->run = run_write;
    op->to = at;
    op->number = value;
    sim_tick(stream);
    if (sim.rank_count > 1) { /* else the waiters are in other processes */
        sim_told *told = calloc(1, sizeof *told);
        *told = (sim_told){.at = at,
                           .number = value,
                           .clock = stream->clock,
                           .stream = stream,
                           .op = op,
                           .next = sim.told};
        sim.told = told;
    }
    sim_enqueue(stream, op);
    LEAVE(SW_CU_SUCCESS);
}

/* ---- ranks as processes: the work of a GPU without its host ---- */

static void help_one(sw_cu_stream stream)
{
    sim_op *due = NULL;
    for (sim_op *op = stream->first; op; op = op->next)
        if (op->kind == OP_AWAIT_NUMBER && sim_number_has_come(op))
            due = op;
    if (due)
        sim_drive(stream, due, 0);
}

static void *help(void *unused)
{
    const struct timespec nap = {.tv_nsec = 500000};
    (void)unused;
    for (;;) {
        nanosleep(&nap, NULL);
        sim_lock();
        for (sw_cu_stream s = sim.streams; s; s = s->next)
            help_one(s);
        sim_leave();
    }
    return NULL;
}

static void expect_peers(void)
{
    static bool is_helping;
    pthread_t thread;
    sim.has_peers = true;
    if (!is_helping && pthread_create(&thread, NULL, help, NULL) == 0)
        is_helping = pthread_detach(thread) == 0;
}

SIM_API int cuStreamWaitValue32_v2(sw_cu_stream stream, sw_cu_address address, unsigned value,
                                   unsigned flags)
{
    ENTER_CONTEXT("cuStreamWaitValue32");
    QUEUED_STREAM(stream);
    const uint32_t *at = (const uint32_t *)(uintptr_t)address;
    if (flags != SW_CU_STREAM_WAIT_VALUE_GEQ || !is_registered(at))
        LEAVE(SW_CU_INVALID_VALUE);
    if (sim.rank_count == 1)
        expect_peers();
    for (int i = 0; sim.rank_count > 1 && i < YIELDS_MAX && !sim_told_find(at, value); ++i)
        sim_yield();
    sim_op *op = sim_op_new(OP_AWAIT_NUMBER, "cuStreamWaitValue32");
    op->to = (void *)(uintptr_t)at;
    op->number = value;
    sim_tick(stream);
    const sim_told *told = sim_told_find(at, value);
    if (told)
        sim_join(&stream->clock, &told->clock);
    sim_enqueue(stream, op);
    LEAVE(SW_CU_SUCCESS);
}

/* ---- memory of another process's GPU ---- */

typedef struct ipc_handle { /* stored in the 64 bytes of a handle */
    int pid, file;
    void *memory; /* its address in that process */
    size_t size_bytes;
} ipc_handle;

/* Move the block's pages to a file that other processes can map. */
static bool move_to_file(sim_block *block)
{
    int file = memfd_create("simulated GPU memory", 0);
    if (file < 0 || ftruncate(file, (off_t)block->size_bytes) != 0 ||
        pwrite(file, block->memory, block->size_bytes, 0) != (ssize_t)block->size_bytes ||
        mmap(block->memory, block->size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file,
             0) == MAP_FAILED)
        return false;
    block->file = file;
    return true;
}

SIM_API int cuIpcGetMemHandle(sw_cu_ipc_handle *handle, sw_cu_address address)
{
    ENTER_CONTEXT("cuIpcGetMemHandle");
    sim_block *block = sim_block_of((void *)(uintptr_t)address);
    if (getenv("SIM_NO_IPC") || !block || !block->mapped || block->freed ||
        (!block->file && !move_to_file(block)))
        LEAVE(SW_CU_INVALID_VALUE);
    ipc_handle made = {getpid(), block->file, block->memory, block->size_bytes};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &made, sizeof made);
    LEAVE(SW_CU_SUCCESS);
}

SIM_API int cuIpcOpenMemHandle_v2(sw_cu_address *address, sw_cu_ipc_handle handle, unsigned flags)
{
    ENTER_CONTEXT_APART("cuIpcOpenMemHandle");
    ipc_handle given;
    char path[64];
    memcpy(&given, &handle, sizeof given);
    if (flags != SW_CU_IPC_LAZY_ENABLE_PEER_ACCESS)
        LEAVE(SW_CU_INVALID_VALUE);
    const char *refused = getenv("SIM_NO_IPC_OPEN"); /* the ordinal of a GPU that refuses */
    if (refused && atoi(refused) == sim_current_context()->ordinal)
        LEAVE(SW_CU_INVALID_VALUE);
    if (given.pid == getpid()) { /* ranks are threads */
        sim_block_of(given.memory)->open_count++;
        *address = (sw_cu_address)(uintptr_t)given.memory;
        LEAVE(SW_CU_SUCCESS);
    }
    snprintf(path, sizeof path, "/proc/%d/fd/%d", given.pid, given.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    void *memory = file < 0 ? MAP_FAILED
                            : mmap(NULL, given.size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0)
        close(file);
    if (memory == MAP_FAILED)
        LEAVE(SW_CU_INVALID_VALUE);
    *address = (sw_cu_address)(uintptr_t)memory;
    LEAVE(SW_CU_SUCCESS);
}

/* Hosts of peers may have said in memory that they are done, which no clock shows. So only their
 * operations that have not run count. */
void sim_exported_free(const sim_block *block, const sim_site *site)
{
    check_over(block, site, "memory is freed while its device may use it");
    if (block->open_count)
        sim_report("use after free", "memory that a peer has open", site, NULL);
    for (sw_cu_stream s = sim.streams; s; s = s->next)
        for (const sim_op *op = s->first; op; op = op->next)
            if (op->kind == OP_WORK && op->size_bytes &&
                (sim_block_of(op->from) == block || sim_block_of(op->to) == block)) {
                sim_report("use after free", "memory that a peer has yet to read", site, &op->site);
                return;
            }
}

/* The mapping stays, since enqueued operations may name it. */
SIM_API int cuIpcCloseMemHandle(sw_cu_address address)
{
    ENTER_CONTEXT_APART("cuIpcCloseMemHandle");
    sim_block *block = sim_block_of((void *)(uintptr_t)address);
    if (block)
        block->open_count--;
    LEAVE(address ? SW_CU_SUCCESS : SW_CU_INVALID_VALUE);
}
