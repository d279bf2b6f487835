/* offload.c - cut runs into batches that three threads read, step on and write.
 *
 * The threads synchronise by three counts that only grow: batches read, stepped on, written. Batch
 * b uses buffer b mod 3, so it may be read once batch b - 3 is written.
 */
#include "optim/offload.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "platform/memory.h"
#include "platform/thread.h"

/* The arrays of a cut are whole pages: of two-byte elements, and of the records of 32 elements. */
enum { ARRAY_COUNT = 4, CUT_NUMEL = 4096, RECORDS_CUT_NUMEL = 32 * 4096 };

typedef struct file_extent { /* contiguous in the file and in the buffer, moved by one call */
    uint64_t offset;
    size_t at, size_bytes;
} file_extent;

typedef struct step_batch {
    size_t first_piece, piece_count, first_extent, extent_count, used_bytes;
} step_batch;

typedef struct step_plan {
    sw_optim_run *pieces; /* owned; arrays of the file point into the batch's buffer */
    file_extent *extents; /* owned */
    step_batch *batches;  /* owned */
    size_t piece_count, extent_count, batch_count;
} step_plan;

typedef struct step_pass {
    sw_offload *offload;
    step_plan plan;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    size_t read_count, stepped_count, written_count; /* mutex: all */
    sw_error failure;                                /* mutex: the first failure */
} step_pass;

sw_status sw_offload_init(sw_offload *offload, const char *folder, const char *label,
                          size_t buffer_bytes, sw_error *err)
{
    if (buffer_bytes == 0 || buffer_bytes % SW_OFFLOAD_LEAST_BUFFER_BYTES != 0)
        SW_FAIL(err, SW_E_INVALID,
                "offload: buffer_bytes must be a positive multiple of %d, not %zu",
                SW_OFFLOAD_LEAST_BUFFER_BYTES, buffer_bytes);
    *offload = (sw_offload){.buffer_bytes = buffer_bytes};
    return sw_state_file_init(&offload->file, folder, label, err);
}

void sw_offload_fini(sw_offload *offload)
{
    sw_memory_unmap(offload->buffers, SW_OFFLOAD_BUFFERS * offload->buffer_bytes);
    offload->buffers = NULL;
    sw_state_file_fini(&offload->file);
}

static sw_status make_buffers(sw_offload *offload, sw_error *err)
{
    return offload->buffers
               ? SW_OK
               : sw_pages_map(SW_OFFLOAD_BUFFERS * offload->buffer_bytes, &offload->buffers, err);
}

/* ---- the plan ---- */

typedef struct file_array { /* an array of a run that lies in the file */
    void **field;           /* the array's field in the piece */
    uint64_t offset;
    sw_dtype dtype;
} file_array;

static sw_status find_array(const sw_offload *offload, void **field, void *data, size_t numel,
                            sw_dtype dtype, file_array *found, size_t *count, sw_error *err)
{
    uint64_t offset = data
                          ? sw_state_file_locate(&offload->file, data, sw_optim_bytes(numel, dtype))
                          : UINT64_MAX;
    if (offset == UINT64_MAX)
        return SW_OK;
    if (offset % SW_FILE_ALIGNMENT_BYTES != 0)
        SW_FAIL(err, SW_E_INVALID,
                "offload: state at byte %" PRIu64 " of '%s' must begin on a page", offset,
                offload->file.path);
    found[(*count)++] = (file_array){field, offset, dtype};
    return SW_OK;
}

/* List arrays in the order in which they are allocated in the file, so that contiguous arrays form
 * one extent. */
static sw_status find_arrays(const sw_offload *offload, const sw_optim_run *run,
                             sw_optim_run *piece, file_array *found, size_t *count, sw_error *err)
{
    *count = 0;
    SW_TRY(find_array(offload, &piece->m, run->m, run->numel, run->state_dtype, found, count, err));
    SW_TRY(find_array(offload, &piece->v, run->v, run->numel, run->state_dtype, found, count, err));
    SW_TRY(find_array(offload, &piece->v_max, run->v_max, run->numel, run->state_dtype, found,
                      count, err));
    return find_array(offload, &piece->p, run->p, run->numel, run->p_dtype, found, count, err);
}

static size_t whole_pages(size_t bytes)
{
    return (bytes + SW_FILE_ALIGNMENT_BYTES - 1) & ~(size_t)(SW_FILE_ALIGNMENT_BYTES - 1);
}

/* Return the elements of a run that one buffer holds. */
static size_t cut_of(const sw_offload *offload, const file_array *arrays, size_t count)
{
    size_t bytes = 0, numel = CUT_NUMEL;
    for (size_t i = 0; i < count; ++i)
        numel = arrays[i].dtype == SW_DTYPE_UINT8 ? RECORDS_CUT_NUMEL : numel;
    for (size_t i = 0; i < count; ++i)
        bytes += sw_optim_bytes(numel, arrays[i].dtype);
    return bytes ? offload->buffer_bytes / bytes * numel : SIZE_MAX;
}

static void move_on(void **field, size_t begin, sw_dtype dtype)
{
    if (*field)
        *field = (uint8_t *)*field + sw_optim_bytes(begin, dtype);
}

static sw_optim_run piece_of(const sw_optim_run *run, size_t begin, size_t numel)
{
    sw_optim_run piece = *run;
    void *gradient = (void *)(uintptr_t)run->g;
    piece.numel = numel;
    move_on(&piece.p, begin, run->p_dtype);
    move_on(&piece.m, begin, run->state_dtype);
    move_on(&piece.v, begin, run->state_dtype);
    move_on(&piece.v_max, begin, run->state_dtype);
    move_on(&gradient, begin, run->g_dtype);
    move_on(&piece.copy, begin, run->copy_dtype);
    piece.g = gradient;
    piece.origin += begin;
    return piece;
}

static void add_extent(step_plan *plan, step_batch *into, uint64_t offset, size_t size_bytes)
{
    file_extent *last = into->extent_count ? &plan->extents[plan->extent_count - 1] : NULL;
    if (last && last->offset + last->size_bytes == offset) {
        last->size_bytes += size_bytes;
    } else {
        plan->extents[plan->extent_count++] =
            (file_extent){.offset = offset, .at = into->used_bytes, .size_bytes = size_bytes};
        into->extent_count++;
    }
    into->used_bytes += size_bytes;
}

/* Return the batch that has room for `bytes` more: the last one, or a new one. */
static step_batch *batch_for(const sw_offload *offload, step_plan *plan, size_t bytes)
{
    step_batch *last = plan->batch_count ? &plan->batches[plan->batch_count - 1] : NULL;
    if (last && last->used_bytes + bytes <= offload->buffer_bytes)
        return last;
    last = &plan->batches[plan->batch_count++];
    *last = (step_batch){.first_piece = plan->piece_count, .first_extent = plan->extent_count};
    return last;
}

static sw_status add_run(const sw_offload *offload, step_plan *plan, const sw_optim_run *run,
                         sw_error *err)
{
    file_array arrays[ARRAY_COUNT];
    sw_optim_run unused = *run;
    size_t count, numel;
    SW_TRY(find_arrays(offload, run, &unused, arrays, &count, err));
    size_t cut = cut_of(offload, arrays, count);
    for (size_t begin = 0; begin < run->numel; begin += numel) {
        size_t bytes = 0;
        numel = sw_size_min(cut, run->numel - begin);
        for (size_t i = 0; i < count; ++i)
            bytes += whole_pages(sw_optim_bytes(numel, arrays[i].dtype));
        step_batch *into = batch_for(offload, plan, bytes);
        sw_optim_run *piece = &plan->pieces[plan->piece_count];
        *piece = piece_of(run, begin, numel);
        SW_TRY(find_arrays(offload, run, piece, arrays, &count, err));
        for (size_t i = 0; i < count; ++i) {
            *arrays[i].field =
                offload->buffers +
                (plan->batch_count - 1) % SW_OFFLOAD_BUFFERS * offload->buffer_bytes +
                into->used_bytes;
            add_extent(plan, into, arrays[i].offset + sw_optim_bytes(begin, arrays[i].dtype),
                       whole_pages(sw_optim_bytes(numel, arrays[i].dtype)));
        }
        plan->piece_count++;
        into->piece_count++;
    }
    return SW_OK;
}

static void plan_fini(step_plan *plan)
{
    free(plan->pieces);
    free(plan->extents);
    free(plan->batches);
}

static sw_status plan_init(const sw_offload *offload, step_plan *plan, const sw_optim_run *runs,
                           size_t count, sw_error *err)
{
    size_t most = 1; /* pieces: a run of n elements has at most n / CUT_NUMEL cuts */
    *plan = (step_plan){0};
    for (size_t i = 0; i < count; ++i) {
        file_array arrays[ARRAY_COUNT];
        sw_optim_run unused = runs[i];
        size_t found;
        SW_TRY(find_arrays(offload, &runs[i], &unused, arrays, &found, err));
        size_t cut = cut_of(offload, arrays, found);
        if (cut == 0)
            SW_FAIL(err, SW_E_INVALID, "offload: a buffer of %zu bytes holds no cut of records",
                    offload->buffer_bytes);
        most += runs[i].numel / cut + 1;
    }
    plan->pieces = calloc(most, sizeof *plan->pieces);
    plan->extents = calloc(most, ARRAY_COUNT * sizeof *plan->extents);
    plan->batches = calloc(most, sizeof *plan->batches);
    sw_status status = SW_OK;
    if (!plan->pieces || !plan->extents || !plan->batches)
        status =
            sw_error_set(err, SW_E_MEMORY, -1, "no memory to plan a step over %zu runs", count);
    for (size_t i = 0; i < count && status == SW_OK; ++i)
        status = add_run(offload, plan, &runs[i], err);
    if (status != SW_OK)
        plan_fini(plan);
    return status;
}

/* ---- the pass ---- */

static uint8_t *buffer_of(const step_pass *pass, size_t number)
{
    return pass->offload->buffers + number % SW_OFFLOAD_BUFFERS * pass->offload->buffer_bytes;
}

/* Wait until *done exceeds `number`. Return false if a thread has failed. */
static bool await(step_pass *pass, const size_t *done, size_t number)
{
    pthread_mutex_lock(&pass->mutex);
    while (*done <= number && pass->failure.status == SW_OK)
        pthread_cond_wait(&pass->changed, &pass->mutex);
    bool goes_on = pass->failure.status == SW_OK;
    pthread_mutex_unlock(&pass->mutex);
    return goes_on;
}

static void advance(step_pass *pass, size_t *done, sw_status status, const sw_error *err)
{
    pthread_mutex_lock(&pass->mutex);
    if (status == SW_OK)
        ++*done;
    else if (pass->failure.status == SW_OK)
        pass->failure = *err;
    pthread_cond_broadcast(&pass->changed);
    pthread_mutex_unlock(&pass->mutex);
}

static sw_status move_batch(step_pass *pass, size_t number, bool reads, sw_error *err)
{
    const step_batch *batch = &pass->plan.batches[number];
    sw_state_file *file = &pass->offload->file;
    for (size_t i = 0; i < batch->extent_count; ++i) {
        const file_extent *extent = &pass->plan.extents[batch->first_extent + i];
        uint8_t *data = buffer_of(pass, number) + extent->at;
        if (reads)
            SW_TRY(sw_state_file_read(file, data, extent->size_bytes, extent->offset, err));
        else
            SW_TRY(sw_state_file_write(file, data, extent->size_bytes, extent->offset, err));
    }
    return SW_OK;
}

static void *read_all(void *argument)
{
    step_pass *pass = argument;
    sw_error err;
    for (size_t b = 0; b < pass->plan.batch_count; ++b) {
        if (b >= SW_OFFLOAD_BUFFERS && !await(pass, &pass->written_count, b - SW_OFFLOAD_BUFFERS))
            break;
        sw_status status = move_batch(pass, b, true, &err);
        advance(pass, &pass->read_count, status, &err);
        if (status != SW_OK)
            break;
    }
    return NULL;
}

static void *write_all(void *argument)
{
    step_pass *pass = argument;
    sw_error err;
    for (size_t b = 0; b < pass->plan.batch_count; ++b) {
        if (!await(pass, &pass->stepped_count, b))
            break;
        sw_status status = move_batch(pass, b, false, &err);
        advance(pass, &pass->written_count, status, &err);
        if (status != SW_OK)
            break;
    }
    return NULL;
}

/* Let the pages of stepped parameters that lie in a file go; neighbours together. A short rest
 * leaves memory as the step is published. */
static sw_status let_go(const sw_offload *offload, const sw_optim_run *pieces, size_t count,
                        sw_error *err)
{
    const sw_file_memory *home = offload->home;
    uint8_t *begin = NULL, *end = NULL;
    for (size_t i = 0; home && i <= count; ++i) {
        const sw_optim_run *piece = &pieces[i];
        uint8_t *next = i == count ? NULL : piece->copy ? piece->copy : piece->p;
        size_t item =
            i == count ? 0 : sw_dtype_size_bytes(piece->copy ? piece->copy_dtype : piece->p_dtype);
        if (next && next == end) {
            end += piece->numel * item;
            continue;
        }
        if ((size_t)(end - begin) >= SW_OFFLOAD_LEAST_BUFFER_BYTES)
            SW_TRY(sw_file_memory_write_back(home, begin, (size_t)(end - begin), err));
        bool lies_there = next && next >= home->begin && next < home->begin + home->size_bytes;
        begin = lies_there ? next : NULL;
        end = lies_there ? next + piece->numel * item : NULL;
    }
    return SW_OK;
}

static void step_all(step_pass *pass, sw_offload_step_fn *step, const void *options)
{
    sw_error err;
    for (size_t b = 0; b < pass->plan.batch_count && await(pass, &pass->read_count, b); ++b) {
        const step_batch *batch = &pass->plan.batches[b];
        const sw_optim_run *pieces = &pass->plan.pieces[batch->first_piece];
        sw_status status = step(options, pieces, batch->piece_count, &err);
        if (status == SW_OK)
            status = let_go(pass->offload, pieces, batch->piece_count, &err);
        advance(pass, &pass->stepped_count, status, &err);
        if (status != SW_OK)
            break;
    }
}

static void run_pass(step_pass *pass, sw_offload_step_fn *step, const void *options)
{
    sw_thread reader = {.is_started = false}, writer = {.is_started = false};
    sw_error err;
    sw_status status = sw_thread_start(&reader, read_all, pass, "sw-state-read", &err);
    if (status == SW_OK)
        status = sw_thread_start(&writer, write_all, pass, "sw-state-write", &err);
    if (status == SW_OK)
        step_all(pass, step, options);
    else
        advance(pass, &pass->read_count, status, &err);
    sw_thread_join(&reader);
    sw_thread_join(&writer);
}

sw_status sw_offload_step(sw_offload *offload, sw_offload_step_fn *step, const void *options,
                          const sw_optim_run *runs, size_t count, sw_error *err)
{
    sw_state_file *file = &offload->file;
    if (file->failure.status != SW_OK)
        SW_FAIL(
            err, SW_E_STATE,
            "optimizer state is invalid, since an earlier step failed while changing it: %.400s",
            file->failure.message);
    SW_TRY(make_buffers(offload, err));
    step_pass pass = {.offload = offload};
    SW_TRY(plan_init(offload, &pass.plan, runs, count, err));
    pthread_mutex_init(&pass.mutex, NULL);
    pthread_cond_init(&pass.changed, NULL);
    run_pass(&pass, step, options);
    pthread_cond_destroy(&pass.changed);
    pthread_mutex_destroy(&pass.mutex);
    plan_fini(&pass.plan);
    sw_state_file_forget(file);
    if (pass.failure.status != SW_OK && pass.stepped_count > 0)
        file->failure = pass.failure;
    if (err && pass.failure.status != SW_OK)
        *err = pass.failure;
    return pass.failure.status;
}

/* ---- whole arrays, without a step ---- */

enum { STORE_BUFFER, FETCH_BUFFER }; /* a writer and a reader share no buffer */

static sw_status locate_pages(const sw_offload *offload, const void *address, size_t size_bytes,
                              uint64_t *offset, sw_error *err)
{
    *offset = sw_state_file_locate(&offload->file, address, whole_pages(size_bytes));
    if (*offset == UINT64_MAX || *offset % SW_FILE_ALIGNMENT_BYTES != 0)
        SW_FAIL(err, SW_E_INVALID, "%zu bytes are no whole pages of '%s'", size_bytes,
                offload->file.path);
    return SW_OK;
}

sw_status sw_offload_store(sw_offload *offload, const void *address, const void *data,
                           size_t size_bytes, sw_error *err)
{
    uint64_t offset = 0;
    SW_TRY(locate_pages(offload, address, size_bytes, &offset, err));
    SW_TRY(make_buffers(offload, err));
    uint8_t *buffer = offload->buffers + STORE_BUFFER * offload->buffer_bytes;
    for (size_t at = 0; at < size_bytes; at += offload->buffer_bytes) {
        size_t left = size_bytes - at;
        size_t part = left < offload->buffer_bytes ? left : offload->buffer_bytes;
        memcpy(buffer, (const uint8_t *)data + at, part);
        SW_TRY(sw_state_file_write(&offload->file, buffer, whole_pages(part), offset + at, err));
    }
    return SW_OK;
}

sw_status sw_offload_fetch(sw_offload *offload, const void *address, void *data, size_t size_bytes,
                           sw_error *err)
{
    uint64_t offset = 0;
    SW_TRY(locate_pages(offload, address, size_bytes, &offset, err));
    SW_TRY(make_buffers(offload, err));
    uint8_t *buffer = offload->buffers + FETCH_BUFFER * offload->buffer_bytes;
    for (size_t at = 0; at < size_bytes; at += offload->buffer_bytes) {
        size_t left = size_bytes - at;
        size_t part = left < offload->buffer_bytes ? left : offload->buffer_bytes;
        SW_TRY(sw_state_file_read(&offload->file, buffer, whole_pages(part), offset + at, err));
        memcpy((uint8_t *)data + at, buffer, part);
    }
    return SW_OK;
}
