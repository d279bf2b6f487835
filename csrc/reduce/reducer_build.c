/* reducer_build.c - how a reducer is made and taken apart: its buckets, where they lie, and who
 * owns which slice. Rounds are in reducer.c. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "base/text.h"
#include "platform/memory.h"
#include "reduce/reducer_state.h"

static sw_status init_buckets(sw_reducer *reducer, const sw_reducer_options *options, sw_error *err)
{
    const char *label = options->label;
    sw_redop redop = options->sums ? SW_REDOP_SUM : SW_REDOP_MEAN;
    const sw_layout *layout = &reducer->layout;
    size_t offset = 0;
    for (size_t i = 0; i < layout->bucket_count; ++i) {
        bucket *b = &reducer->buckets[i];
        const sw_layout_bucket *shape = &layout->bucket[i];
        b->reducer = reducer;
        b->index = i;
        b->tail_offset_bytes = offset;
        b->tail_bytes = sizeof(tail) + 2 * sw_words_of(shape->count) * sizeof(uint32_t);
        offset +=
            (b->tail_bytes + SW_ALIGNMENT_BYTES - 1) / SW_ALIGNMENT_BYTES * SW_ALIGNMENT_BYTES;
        b->any = calloc(sw_words_of(shape->count) + 1, sizeof *b->any);
        if (!b->any)
            SW_FAIL(err, SW_E_MEMORY, "reducer of '%s': no memory for use bits", label);
        b->takes_part = shape->trainable;
        b->op = (sw_op){.kind = SW_OP_ALL_REDUCE,
                        .dtype = shape->dtype,
                        .redop = redop,
                        .slices = reducer->owners ? &reducer->slices : NULL,
                        .numel = shape->numel,
                        .offset_bytes = shape->offset_bytes};
        sw_bucket_plan(b, false);
        sw_bucket_name(b, label);
        if (shape->trainable)
            SW_TRY(sw_redop_check(redop, shape->dtype, err));
    }
    reducer->tail_stride_bytes = offset;
    return SW_OK;
}

/* How much memory the buckets need, by transport. */
static sw_gradient_sizes sizes_of(sw_reducer *reducer)
{
    sw_gradient_sizes sizes = {.pool = reducer->layout.size_bytes,
                               .staged = reducer->layout.size_bytes,
                               .tails = 2 * reducer->tail_stride_bytes,
                               .results_mapped = reducer->owners != NULL};
    for (size_t i = 0; reducer->ring && i < reducer->layout.bucket_count; ++i) {
        reducer->buckets[i].result_offset_bytes = sizes.results;
        sizes.results +=
            sw_bucket_bytes(&reducer->buckets[i]) / (size_t)sw_reducer_slice_count(reducer);
    }
    if (reducer->ring) /* room for what is frozen, which is touched when it is unfrozen */
        sizes.pool =
            sw_size_max(sw_reducer_lay_ring(reducer, true), sw_reducer_lay_ring(reducer, false));
    return sizes;
}

static void bind_ring(sw_reducer *reducer)
{
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i) {
        bucket *b = &reducer->buckets[i];
        b->op.kind = SW_OP_REDUCE_SCATTER;
        b->op.result = reducer->memory->results + b->result_offset_bytes;
        b->op.results = reducer->memory->result_arena;
        b->op.results_offset_bytes = b->result_offset_bytes;
        sw_bucket_plan(b, true);
    }
    reducer->ring_bytes = sw_reducer_lay_ring(reducer, false);
    sw_memory_populate(reducer->memory->base, reducer->ring_bytes);
}

static void bind_memory(sw_reducer *reducer)
{
    size_t begin = 0,
           end = 0; /* bytes to populate: neighbouring buckets that take part, as one range */
    bool pool = reducer->memory->transport == SW_TRANSPORT_POOL;
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i) {
        bucket *b = &reducer->buckets[i];
        b->op.subject = reducer->memory->tails->serial;
        if (pool)
            b->op.arena = reducer->memory->arena;
        else
            b->op.data = reducer->memory->base + reducer->layout.bucket[i].offset_bytes;
    }
    reducer->ring &= pool; /* private buckets are whole */
    if (reducer->ring) {
        bind_ring(reducer);
        return;
    }
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i) {
        bucket *b = &reducer->buckets[i];
        b->op.offset_bytes = reducer->layout.bucket[i].offset_bytes;
        b->before = NULL;
        if (!b->takes_part)
            continue;
        if (b->op.offset_bytes != end) {
            sw_memory_populate(reducer->memory->base + begin, end - begin);
            begin = b->op.offset_bytes;
        }
        end = b->op.offset_bytes + sw_bucket_bytes(b);
    }
    sw_memory_populate(reducer->memory->base + begin, end - begin);
}

static sw_status copy_names(sw_reducer *reducer, const char *const *names, size_t count,
                            sw_error *err)
{
    for (size_t i = 0; i < count; ++i) {
        size_t length = strlen(names[i]) + 1;
        reducer->names[i] = malloc(length);
        if (!reducer->names[i])
            SW_FAIL(err, SW_E_MEMORY, "reducer: no memory for %zu names", count);
        memcpy(reducer->names[i], names[i], length);
    }
    return SW_OK;
}

static sw_status copy_slices(sw_reducer *reducer, const sw_slices *slices, sw_error *err)
{
    size_t ranks = (size_t)reducer->comm->world_size;
    if (!slices)
        return SW_OK;
    reducer->owners = calloc(2 * ranks, sizeof *reducer->owners);
    if (!reducer->owners)
        SW_FAIL(err, SW_E_MEMORY, "reducer: no memory for %zu ranks", ranks);
    memcpy(reducer->owners, slices->of_rank, ranks * sizeof(int));
    memcpy(reducer->owners + ranks, slices->replica_of_rank, ranks * sizeof(int));
    reducer->slices = (sw_slices){.count = slices->count,
                                  .of_rank = reducer->owners,
                                  .replica_of_rank = reducer->owners + ranks};
    return SW_OK;
}

/* All that needs no peer. */
static sw_status prepare(sw_reducer *reducer, const sw_layout_param *params,
                         const char *const *names, size_t param_count,
                         const sw_reducer_options *options, sw_error *err)
{
    SW_TRY(copy_slices(reducer, options->slices, err));
    SW_TRY(sw_layout_init(&reducer->layout, params, param_count, sw_reducer_slice_count(reducer),
                          (sw_layout_caps){.bytes = options->bucket_cap_bytes,
                                           .first_bytes = options->first_cap_bytes},
                          err));
    reducer->buckets = calloc(reducer->layout.bucket_count + 1, sizeof *reducer->buckets);
    reducer->params = calloc(param_count + 1, sizeof *reducer->params);
    reducer->names = calloc(param_count + 1, sizeof *reducer->names);
    reducer->contributors =
        calloc((size_t)reducer->comm->world_size, sizeof *reducer->contributors);
    if (!reducer->buckets || !reducer->params || !reducer->names || !reducer->contributors)
        SW_FAIL(err, SW_E_MEMORY, "reducer: no memory for %zu parameters", param_count);
    SW_TRY(copy_names(reducer, names, param_count, err));
    return init_buckets(reducer, options, err);
}

sw_status sw_reducer_create(sw_comm *comm, const sw_layout_param *params, const char *const *names,
                            size_t param_count, const sw_reducer_options *options,
                            sw_reducer **reducer, sw_error *err)
{
    sw_error cause;
    sw_reducer *made = calloc(1, sizeof *made);
    if (!made)
        return sw_comm_give_up(comm, SW_E_MEMORY, err, "no memory for a reducer");
    made->comm = comm;
    made->contributes = true;
    sw_status status = prepare(made, params, names, param_count, options, &cause);
    if (status == SW_E_MEMORY) { /* here alone: the peers go on to the gradients' memory. An illegal
                                    table is everybody's */
        sw_comm_give_up(comm, status, err, "%s", cause.message);
        goto destroy;
    }
    if (status != SW_OK) {
        if (err)
            *err = cause;
        goto destroy;
    }
    made->ring = options->sliced;
    made->cap_bytes = options->bucket_cap_bytes;
    snprintf(made->label, sizeof made->label, "%.*s", sw_text_fit(options->label, 16),
             options->label);
    sw_gradient_sizes sizes = sizes_of(made);
    SW_TRY_GOTO(status,
                sw_gradient_memory_create(comm, &sizes, options->transport, options->label,
                                          &made->memory, err),
                destroy);
    bind_memory(made);
    *reducer = made;
    return SW_OK;
destroy:
    sw_reducer_destroy(made);
    return status;
}

sw_gradient_memory *sw_reducer_take_memory(sw_reducer *reducer)
{
    sw_gradient_memory *memory = reducer->memory;
    reducer->memory = NULL;
    return memory;
}

/* Peers fold with what was posted, and wait for this rank's part of the rest of the round: its
 * memory must not go in silence. */
static void give_up_posted(sw_reducer *reducer)
{
    const bucket *unfinished = NULL;
    bool sent = false;
    for (size_t i = 0; reducer->state == SW_ROUND_OPEN && i < reducer->layout.bucket_count; ++i) {
        const bucket *b = &reducer->buckets[i];
        if (!b->takes_part || !b->op.arena)
            continue;
        sent |= b->state != BUCKET_FILLING;
        if (b->state != BUCKET_DONE && !unfinished)
            unfinished = b;
    }
    if (sent && unfinished)
        (void)sw_comm_give_up(reducer->comm, SW_E_COMM, NULL,
                              "%s was dropped in the middle of a backward", unfinished->op.label);
}

void sw_reducer_destroy(sw_reducer *reducer)
{
    if (!reducer)
        return;
    give_up_posted(reducer);
    sw_gradient_memory_destroy(reducer->memory);
    for (size_t i = 0; reducer->buckets && i < reducer->layout.bucket_count; ++i)
        free(reducer->buckets[i].any);
    for (size_t i = 0; reducer->names && i < reducer->layout.param_count; ++i)
        free(reducer->names[i]);
    free(reducer->buckets);
    free(reducer->params);
    free(reducer->names);
    free(reducer->contributors);
    free(reducer->owners);
    sw_layout_fini(&reducer->layout);
    free(reducer);
}

size_t sw_reducer_planned_bytes(const sw_reducer *reducer)
{
    if (!reducer->ring)
        return reducer->layout.trainable_bytes;
    size_t results = 0;
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i)
        if (reducer->buckets[i].takes_part)
            results +=
                sw_bucket_bytes(&reducer->buckets[i]) / (size_t)sw_reducer_slice_count(reducer);
    return reducer->ring_bytes + results;
}
