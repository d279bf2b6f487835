/* device_offload.c - plan batches and run them; device_offload.h has the table of events. */
#include "zero/device_offload.h"

#include <stdlib.h>

#include "base/bytes.h"
#include "platform/thread.h"

enum { PIECE_NUMEL = 64 << 10, CUT_NUMEL = 32, ELEMENT_BYTES_MAX = 4, HALVES = 2 };

typedef struct offload_slot { /* half for gradients, half for parameters or their copies */
    uint8_t *memory;          /* owned, pinned */
    sw_event *fetched, *sent; /* owned */
} offload_slot;

struct sw_device_offload {
    sw_device_comm *comm; /* borrowed */
    sw_stream *down, *up; /* owned */
    offload_slot slot[SW_DEVICE_OFFLOAD_SLOTS];
    size_t slot_bytes;
    int thread_count;
    sw_error failure; /* the error of a step that failed after it changed state; SW_OK: none */
    sw_device_offload_stats stats;
};

typedef struct offload_copy { /* contiguous on both sides, moved by one call */
    uint8_t *device, *pinned;
    size_t size_bytes;
} offload_copy;

typedef struct copy_list { /* gradients, or parameters and their copies */
    offload_copy *copy;    /* owned */
    size_t count;
} copy_list;

typedef struct batch_half { /* half a slot, and the copies to or from it */
    size_t first, count, used_bytes;
} batch_half;

typedef struct offload_batch {
    size_t first_piece, piece_count;
    batch_half gradients, values;
} offload_batch;

typedef struct offload_plan {
    sw_optim_run *pieces; /* owned; arrays on the GPU point into the batch's slot */
    copy_list gradients, values;
    offload_batch *batches; /* owned */
    size_t piece_count, batch_count;
} offload_plan;

/* ---- life ---- */

static sw_status create_all(sw_device_offload *o, sw_error *err)
{
    sw_device *device = o->comm->device;
    SW_TRY(device->ops->stream_create(device, false, &o->down, err));
    SW_TRY(device->ops->stream_create(device, false, &o->up, err));
    for (int s = 0; s < SW_DEVICE_OFFLOAD_SLOTS; ++s) {
        void *memory;
        SW_TRY(device->ops->pinned_alloc(device, o->slot_bytes, &memory, err));
        o->slot[s].memory = memory;
        SW_TRY(device->ops->event_create(device, &o->slot[s].fetched, err));
        SW_TRY(device->ops->event_create(device, &o->slot[s].sent, err));
        /* Zero the slot, so that earlier contents of the memory are never copied up. */
        SW_TRY(device->ops->fill_async(device, memory, 0, o->slot_bytes, o->down, err));
    }
    return SW_OK;
}

sw_status sw_device_offload_create(sw_device_comm *comm, size_t slot_bytes, int thread_count,
                                   sw_device_offload **offload, sw_error *err)
{
    if (slot_bytes == 0 || slot_bytes % SW_DEVICE_OFFLOAD_LEAST_SLOT_BYTES != 0)
        SW_FAIL(err, SW_E_INVALID,
                "device offload: slot_bytes must be a positive multiple of %d, not %zu",
                SW_DEVICE_OFFLOAD_LEAST_SLOT_BYTES, slot_bytes);
    if (thread_count < 1)
        SW_FAIL(err, SW_E_INVALID, "device offload: thread_count must be at least 1, not %d",
                thread_count);
    if (!comm->peers)
        SW_FAIL(err, SW_E_STATE, "device offload: the communicator is not connected");
    sw_device_offload *made = calloc(1, sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "device offload: no memory for %zu bytes", sizeof *made);
    *made =
        (sw_device_offload){.comm = comm, .slot_bytes = slot_bytes, .thread_count = thread_count};
    sw_status status = create_all(made, err);
    if (status != SW_OK) {
        sw_device_offload_destroy(made);
        return status;
    }
    *offload = made;
    return SW_OK;
}

/* Wait for all pending copies. Record new events first, since a batch that failed left old ones. */
static void drain(const sw_device_offload *o)
{
    sw_device *device = o->comm->device;
    const sw_device_ops *ops = device->ops;
    const offload_slot *slot = &o->slot[0];
    if (slot->fetched && ops->event_record(device, slot->fetched, o->down, NULL) == SW_OK)
        sw_device_comm_await(o->comm, slot->fetched, "gradients");
    if (slot->sent && ops->event_record(device, slot->sent, o->up, NULL) == SW_OK)
        sw_device_comm_await(o->comm, slot->sent, "new parameters");
}

void sw_device_offload_destroy(sw_device_offload *o)
{
    if (!o)
        return;
    sw_device *device = o->comm->device;
    const sw_device_ops *ops = device->ops;
    drain(o);
    for (int s = 0; s < SW_DEVICE_OFFLOAD_SLOTS; ++s) {
        offload_slot *slot = &o->slot[s];
        ops->event_destroy(device, slot->fetched);
        ops->event_destroy(device, slot->sent);
        ops->pinned_free(device, slot->memory);
    }
    ops->stream_destroy(device, o->down);
    ops->stream_destroy(device, o->up);
    free(o);
}

size_t sw_device_offload_pinned_bytes(const sw_device_offload *o)
{
    return SW_DEVICE_OFFLOAD_SLOTS * o->slot_bytes;
}

int sw_device_offload_thread_count(const sw_device_offload *o)
{
    return o->thread_count;
}

sw_device_offload_stats sw_device_offload_get_stats(const sw_device_offload *o)
{
    return o->stats;
}

/* ---- the plan ---- */

static size_t half_bytes(const sw_device_offload *o)
{
    return o->slot_bytes / HALVES;
}

static size_t piece_numel(const sw_device_offload *o)
{
    size_t most = half_bytes(o) / ELEMENT_BYTES_MAX / CUT_NUMEL * CUT_NUMEL;
    return sw_size_min(most, PIECE_NUMEL);
}

static size_t whole_lines(size_t bytes)
{
    return (bytes + SW_ALIGNMENT_BYTES - 1) & ~(size_t)(SW_ALIGNMENT_BYTES - 1);
}

/* Place an array in its half of the slot. If it follows the last array in GPU memory, one copy
 * moves both; else it starts a new copy on a new cache line. */
static void *place(copy_list *list, batch_half *half, uint8_t *memory, offload_copy added)
{
    offload_copy *last = half->count ? &list->copy[list->count - 1] : NULL;
    if (last && last->device + last->size_bytes == added.device) {
        last->size_bytes += added.size_bytes;
    } else {
        half->used_bytes = whole_lines(half->used_bytes);
        added.pinned = memory + half->used_bytes;
        list->copy[list->count++] = added;
        half->count++;
    }
    void *found = memory + half->used_bytes;
    half->used_bytes += added.size_bytes;
    return found;
}

/* Return a batch with room for these bytes in each half: the last one, or a new one. */
static offload_batch *batch_for(const sw_device_offload *o, offload_plan *plan, size_t gradient,
                                size_t value)
{
    offload_batch *last = plan->batch_count ? &plan->batches[plan->batch_count - 1] : NULL;
    if (last && whole_lines(last->gradients.used_bytes) + gradient <= half_bytes(o) &&
        whole_lines(last->values.used_bytes) + value <= half_bytes(o))
        return last;
    last = &plan->batches[plan->batch_count++];
    *last = (offload_batch){.first_piece = plan->piece_count,
                            .gradients.first = plan->gradients.count,
                            .values.first = plan->values.count};
    return last;
}

/* An array in pinned memory is at home (device_home.h): the host works on it in place. */
static sw_status inspect(const sw_device_offload *o, const void *array, bool *is_home,
                         sw_error *err)
{
    sw_pointer pointer;
    SW_TRY(o->comm->device->ops->pointer_inspect(o->comm->device, array, &pointer, err));
    *is_home = pointer.kind == SW_MEMORY_PINNED;
    return SW_OK;
}

static void *behind(const void *array, size_t begin, sw_dtype dtype)
{
    return array ? (uint8_t *)(uintptr_t)array + sw_optim_bytes(begin, dtype) : NULL;
}

typedef struct run_place { /* which arrays of a run that the GPU knows are at home */
    bool gradient, value;
} run_place;

static void add_piece(const sw_device_offload *o, offload_plan *plan, const sw_optim_run *run,
                      run_place home, size_t begin, size_t numel)
{
    sw_dtype value_dtype = run->copy ? run->copy_dtype : run->p_dtype;
    offload_copy gradient = {.device = behind(run->g, begin, run->g_dtype),
                             .size_bytes =
                                 home.gradient ? 0 : numel * sw_dtype_size_bytes(run->g_dtype)};
    offload_copy value = {.device = behind(run->copy ? run->copy : run->p, begin, value_dtype),
                          .size_bytes = home.value ? 0 : numel * sw_dtype_size_bytes(value_dtype)};
    offload_batch *into = batch_for(o, plan, gradient.size_bytes, value.size_bytes);
    uint8_t *memory = o->slot[(plan->batch_count - 1) % SW_DEVICE_OFFLOAD_SLOTS].memory;
    sw_optim_run *piece = &plan->pieces[plan->piece_count++];
    *piece = *run;
    piece->numel = numel;
    piece->origin += begin;
    piece->m = behind(run->m, begin, run->state_dtype);
    piece->v = behind(run->v, begin, run->state_dtype);
    piece->v_max = behind(run->v_max, begin, run->state_dtype);
    piece->g = home.gradient ? gradient.device
                             : place(&plan->gradients, &into->gradients, memory, gradient);
    void *there = home.value ? value.device
                             : place(&plan->values, &into->values, memory + half_bytes(o), value);
    piece->p = run->copy ? behind(run->p, begin, run->p_dtype) : there;
    piece->copy = run->copy ? there : NULL;
    into->piece_count++;
}

static void plan_fini(offload_plan *plan)
{
    free(plan->pieces);
    free(plan->gradients.copy);
    free(plan->values.copy);
    free(plan->batches);
}

static sw_status plan_init(const sw_device_offload *o, offload_plan *plan, const sw_optim_run *runs,
                           size_t count, sw_error *err)
{
    size_t most = 1,
           cut = piece_numel(o); /* bounds the pieces, the batches and the copies of a half */
    for (size_t i = 0; i < count; ++i)
        most += runs[i].numel / cut + 1;
    *plan = (offload_plan){.pieces = calloc(most, sizeof *plan->pieces),
                           .gradients.copy = calloc(most, sizeof *plan->gradients.copy),
                           .values.copy = calloc(most, sizeof *plan->values.copy),
                           .batches = calloc(most, sizeof *plan->batches)};
    if (!plan->pieces || !plan->gradients.copy || !plan->values.copy || !plan->batches) {
        plan_fini(plan);
        SW_FAIL(err, SW_E_MEMORY, "device offload: no memory to plan a step over %zu runs", count);
    }
    for (size_t i = 0; i < count; ++i) {
        run_place home = {false, false};
        const void *value = runs[i].copy ? runs[i].copy : runs[i].p;
        sw_status status = inspect(o, runs[i].g, &home.gradient, err);
        if (status == SW_OK)
            status = inspect(o, value, &home.value, err);
        if (status != SW_OK) {
            plan_fini(plan);
            return status;
        }
        for (size_t begin = 0; begin < runs[i].numel; begin += cut)
            add_piece(o, plan, &runs[i], home, begin, sw_size_min(cut, runs[i].numel - begin));
    }
    return SW_OK;
}

/* ---- a step ---- */

typedef struct step_pass {
    sw_device_offload *offload;
    offload_plan plan;
    sw_crew crew;
    sw_device_offload_fn *step;
    const void *options;
    const sw_optim_run *pieces; /* pieces of the batch in the current step */
    bool has_changed;           /* some state has changed */
} step_pass;

/* Start the copy of a batch to the host, after the slot's contents have been copied up. */
static sw_status fetch(step_pass *pass, size_t number, sw_error *err)
{
    sw_device_offload *o = pass->offload;
    sw_device *device = o->comm->device;
    const offload_batch *batch = &pass->plan.batches[number];
    offload_slot *slot = &o->slot[number % SW_DEVICE_OFFLOAD_SLOTS];
    SW_TRY(device->ops->stream_wait(device, o->down, slot->sent, err));
    for (size_t i = 0; i < batch->gradients.count; ++i) {
        const offload_copy *copy = &pass->plan.gradients.copy[batch->gradients.first + i];
        SW_TRY(device->ops->copy_async(device, copy->pinned, copy->device, copy->size_bytes,
                                       o->down, err));
        o->stats.bytes_down += copy->size_bytes;
    }
    for (size_t i = 0; i < batch->values.count; ++i) {
        const offload_copy *copy = &pass->plan.values.copy[batch->values.first + i];
        SW_TRY(device->ops->copy_async(device, copy->pinned, copy->device, copy->size_bytes,
                                       o->down, err));
        o->stats.bytes_down += copy->size_bytes;
    }
    return device->ops->event_record(device, slot->fetched, o->down, err);
}

static sw_status step_on_piece(void *context, size_t item, sw_error *err)
{
    const step_pass *pass = context;
    return pass->step(pass->options, &pass->pieces[item], 1, err);
}

/* Wait for the batch and step on it. */
static sw_status step_on_batch(step_pass *pass, size_t number, sw_error *err)
{
    sw_device_offload *o = pass->offload;
    const offload_batch *batch = &pass->plan.batches[number];
    SW_TRY(sw_peers_wait(o->comm->peers, o->slot[number % SW_DEVICE_OFFLOAD_SLOTS].fetched,
                         "gradients on their way to the host", err));
    pass->has_changed = true;
    pass->pieces = &pass->plan.pieces[batch->first_piece];
    o->stats.batches++;
    return sw_crew_run(&pass->crew, step_on_piece, pass, batch->piece_count, err);
}

static sw_status send(step_pass *pass, size_t number, sw_error *err)
{
    sw_device_offload *o = pass->offload;
    sw_device *device = o->comm->device;
    const offload_batch *batch = &pass->plan.batches[number];
    for (size_t i = 0; i < batch->values.count; ++i) {
        const offload_copy *copy = &pass->plan.values.copy[batch->values.first + i];
        SW_TRY(device->ops->copy_async(device, copy->device, copy->pinned, copy->size_bytes, o->up,
                                       err));
        o->stats.bytes_up += copy->size_bytes;
    }
    return device->ops->event_record(device, o->slot[number % SW_DEVICE_OFFLOAD_SLOTS].sent, o->up,
                                     err);
}

static sw_status run_pass(step_pass *pass, sw_stream *user, sw_error *err)
{
    sw_device_offload *o = pass->offload;
    size_t count = pass->plan.batch_count;
    SW_TRY(sw_device_refuse_capture(o->comm->device, user, "an optimizer's step", err));
    SW_TRY(sw_device_comm_follow(o->comm, o->down, user, err));
    if (count > 0)
        SW_TRY(fetch(pass, 0, err));
    for (size_t b = 0; b < count; ++b) {
        if (b + 1 < count)
            SW_TRY(fetch(pass, b + 1, err));
        SW_TRY(step_on_batch(pass, b, err));
        SW_TRY(send(pass, b, err));
    }
    return sw_device_comm_follow(o->comm, user, o->up, err);
}

sw_status sw_device_offload_step(sw_device_offload *o, sw_device_offload_fn *step,
                                 const void *options, const sw_optim_run *runs, size_t count,
                                 sw_stream *user, sw_error *err)
{
    if (o->failure.status != SW_OK)
        SW_FAIL(
            err, SW_E_STATE,
            "optimizer state is invalid, since an earlier step failed while changing it: %.400s",
            o->failure.message);
    step_pass pass = {.offload = o, .step = step, .options = options};
    sw_error failure = {.status = SW_OK};
    SW_TRY(plan_init(o, &pass.plan, runs, count, err));
    sw_status status = sw_crew_init(&pass.crew, o->thread_count - 1, "sw-offload", &failure);
    if (status == SW_OK) {
        status = run_pass(&pass, user, &failure);
        sw_crew_fini(&pass.crew);
    }
    plan_fini(&pass.plan);
    if (status != SW_OK && pass.has_changed)
        o->failure = failure;
    if (err && status != SW_OK)
        *err = failure;
    return status;
}
