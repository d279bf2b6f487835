/* sim_run.c - run enqueued operations: one FIFO a stream, run lazily by policy and seed. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sim.h"

enum { DRIVE_DEPTH_MAX = 64 };
static const int64_t BLOCKED_NS = INT64_C(15) * 1000000000;

sim_op *sim_op_new(sim_op_kind kind, const char *operation)
{
    sim_op *op = calloc(1, sizeof *op);
    op->kind = kind;
    op->site = sim_here(operation);
    return op;
}

void sim_enqueue(sw_cu_stream stream, sim_op *op)
{
    if (stream->capturing)
        sim_report("captured", "an operation on a stream that is being captured", &op->site, NULL);
    if (stream->last)
        stream->last->next = op;
    else
        stream->first = op;
    stream->last = op;
    sim.idle_polls = 0;
    sim_progress();
}

static int pending(const struct CUstream_st *stream)
{
    int count = 0;
    for (const sim_op *op = stream->first; op; op = op->next)
        count++;
    return count;
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Note a call that would block all of the interpreter's threads if it blocked. */
static void note_gil(void)
{
    if (!sim.holds_gil || !sim.holds_gil() || sim.gil_count == SIM_GIL_MAX)
        return;
    sim_site site = sim_here("with the GIL");
    for (int i = 0; i < sim.gil_count; ++i)
        if (memcmp(sim.gil_site[i].frame, site.frame, sizeof site.frame) == 0)
            return;
    sim.gil_site[sim.gil_count++] = site;
}

void sim_wait_for_room(sw_cu_stream stream)
{
    const struct timespec nap = {.tv_nsec = 1000000};
    int64_t begun = sim.queue_limit ? now_ns() : 0;
    bool has_blocked = false;
    note_gil();
    while (sim.queue_limit && pending(stream) >= sim.queue_limit) {
        sim_elapse(); /* the GPU goes on */
        if (pending(stream) < sim.queue_limit)
            break;
        if (now_ns() - begun > BLOCKED_NS) {
            sim_report("blocked for good", "a call that found a full queue", &stream->first->site,
                       NULL);
            sim.stalled = false;
            sim.queue_limit = 0;
            break;
        }
        sim.blocked_calls += !has_blocked;
        has_blocked = true;
        sim.blocked++;
        sim_leave();
        nanosleep(&nap, NULL);
        sim_lock();
        sim.blocked--;
        sim.idle_polls = 0;
    }
}

void sim_pop(sw_cu_stream stream)
{
    sim_op *op = stream->first;
    stream->first = op->next;
    if (!stream->first)
        stream->last = NULL;
    free(op->args);
    free(op);
    sim.idle_polls = 0;
}

/* Return the record that makes `event` reach `generation`, and its stream; NULL if it is not
 * enqueued.
 */
static sim_op *find_record(const struct CUevent_st *event, uint64_t generation,
                           sw_cu_stream *stream)
{
    for (*stream = sim.streams; *stream; *stream = (*stream)->next)
        for (sim_op *op = (*stream)->first; op; op = op->next)
            if (op->kind == OP_RECORD && op->event == event && op->generation == generation)
                return op;
    return NULL;
}

static bool is_ready(const sim_op *op)
{
    sw_cu_stream stream;
    if (op->kind == OP_WAIT)
        return op->event->done >= op->generation && /* later records on other streams may have run */
               !find_record(op->event, op->generation, &stream);
    if (op->kind == OP_COLLECTIVE)
        return sim.collective_ready((sim_op *)(uintptr_t)op);
    return op->kind != OP_AWAIT_NUMBER || sim_number_has_come(op);
}

/* Run the head of the stream, if it can run. */
static bool run_head(sw_cu_stream stream)
{
    sim_op *op = stream->first;
    if (!op || sim.stalled || !is_ready(op))
        return false;
    if (op->kind == OP_COLLECTIVE) {
        sim.collective_run(op); /* also pops it on every rank */
        return true;
    }
    if (op->kind == OP_RECORD && op->event->done < op->generation)
        op->event->done = op->generation;
    if (op->kind == OP_WORK)
        op->run(op);
    sim_pop(stream);
    return true;
}

static bool run_any(void)
{
    int count = 0;
    for (sw_cu_stream s = sim.streams; s; s = s->next)
        count++;
    int start = count ? (int)(sim_draw() % (uint64_t)count) : 0;
    for (int i = 0; i < count; ++i) {
        sw_cu_stream s = sim.streams;
        for (int k = (start + i) % count; k > 0; --k)
            s = s->next;
        if (run_head(s))
            return true;
    }
    return false;
}

void sim_progress(void)
{
    if (sim.policy == SIM_EAGER)
        while (run_any())
            continue;
    else if (sim.policy == SIM_RANDOM)
        for (uint64_t n = sim_draw() % 4; n > 0; --n)
            run_any();
}

/* Let time pass: everything that can run does. */
void sim_elapse(void)
{
    while (run_any())
        continue;
}

/* Run the operations that `until` (NULL: the whole stream) needs, and no more. */
void sim_drive(sw_cu_stream stream, sim_op *until, int depth)
{
    while (stream->first && depth < DRIVE_DEPTH_MAX) {
        sim_op *head = stream->first;
        sw_cu_stream other;
        sim_op *record = head->kind == OP_WAIT && !is_ready(head)
                             ? find_record(head->event, head->generation, &other)
                             : NULL;
        if (record)
            sim_drive(other, record, depth + 1);
        const sim_told *told = head->kind == OP_AWAIT_NUMBER && !is_ready(head)
                                   ? sim_told_find(head->to, head->number)
                                   : NULL;
        if (told && told->op)
            sim_drive(told->stream, told->op, depth + 1);
        if (head->kind == OP_COLLECTIVE && !is_ready(head))
            sim.collective_drive(head, depth + 1);
        if (stream->first == head && !run_head(stream))
            return;
        if (head == until)
            return;
    }
}

bool sim_drain(sw_cu_stream stream)
{
    bool is_blocked = false;
    const struct timespec nap = {.tv_nsec = 100000};
    for (;;) {
        sim_lock();
        sim.host_calls++;
        sim_drive(stream, NULL, 0);
        bool done = !stream->first, stuck = !done && (sim.deadlocked || sim_is_stuck());
        if (stuck && !sim.deadlocked) {
            sim.deadlocked = true;
            sim_report("deadlock", "the head of torch's stream cannot run", &stream->first->site,
                       NULL);
        }
        sim.blocked += !done && !stuck && !is_blocked;
        sim.blocked -= (done || stuck) && is_blocked;
        is_blocked = !done && !stuck;
        sim_leave();
        if (done || stuck)
            return done;
        nanosleep(&nap, NULL);
    }
}

/* Return a stream of the rank's GPU on which something is enqueued. */
static sw_cu_stream busy_stream(int rank)
{
    sw_cu_stream s = sim.streams;
    while (s && (!s->first || s->rank != rank))
        s = s->next;
    return s;
}

void sim_wait_for_device(const char *call)
{
    const struct timespec nap = {.tv_nsec = 100000};
    sw_cu_stream stream;
    sim.idle_polls = 0;
    while ((stream = busy_stream(sim_current_rank())) && !sim.stalled && !sim.deadlocked) {
        sim_elapse();
        if (stream != busy_stream(sim_current_rank()))
            continue;
        if (sim_is_stuck()) {
            sim_site site = sim_here(call);
            sim.deadlocked = true;
            sim_report("deadlock", "a call that waits for the whole GPU", &site,
                       &stream->first->site);
        }
        sim_yield(); /* ranks that are threads */
        sim_leave();
        nanosleep(&nap, NULL);
        sim_lock();
    }
}

void sim_demand(sw_cu_event event)
{
    if (sim.policy == SIM_RANDOM) {
        for (uint64_t n = 1 + sim_draw() % 4; n > 0; --n)
            run_any();
        return;
    }
    if (sim.policy == SIM_LATE && sim_draw() % 4 != 0)
        return;
    if (sim.policy == SIM_EAGER)
        sim_progress();
    while (event->done < event->recorded) {
        sw_cu_stream stream;
        sim_op *record = find_record(event, event->recorded, &stream);
        const sim_op *before = record ? stream->first : NULL;
        if (record)
            sim_drive(stream, record, 0);
        if (!record || stream->first == before)
            return;
    }
}
