/* host_build.c - creates a reducer over host memory: its buckets, their places, and the owners of
 * slices. Rounds are in host_rounds.c. */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "comm/hier.h"
#include "platform/memory.h"
#include "reduce/host_rounds_state.h"

static sw_status init_buckets(host_rounds *host, const sw_reducer_options *options, sw_error *err)
{
    sw_redop redop = options->sums ? SW_REDOP_SUM : SW_REDOP_MEAN;
    const sw_layout *layout = &host->base.layout;
    size_t offset = 0;
    for (size_t i = 0; i < layout->bucket_count; ++i) {
        host_bucket *b = &host->buckets[i];
        const sw_layout_bucket *shape = &layout->bucket[i];
        b->host = host;
        b->common = &host->base.buckets[i];
        b->trailer_offset_bytes = offset;
        b->trailer_bytes = sizeof(trailer) + 2 * sw_words_of(shape->count) * sizeof(uint32_t);
        offset +=
            (b->trailer_bytes + SW_ALIGNMENT_BYTES - 1) / SW_ALIGNMENT_BYTES * SW_ALIGNMENT_BYTES;
        b->any = calloc(sw_words_of(shape->count) + 1, sizeof *b->any);
        if (!b->any)
            SW_FAIL(err, SW_E_MEMORY, "reducer of '%s': no memory for use bits", options->label);
        b->common->takes_part = shape->trainable;
        b->op = (sw_op){.kind = SW_OP_ALL_REDUCE,
                        .dtype = shape->dtype,
                        .redop = redop,
                        .slices = host->owners && !sw_host_rounds_is_in_place(host) ? &host->slices
                                                                                    : NULL,
                        .numel = shape->numel,
                        .offset_bytes = shape->offset_bytes};
        memcpy(b->op.label, b->common->label, sizeof b->op.label);
        sw_bucket_plan(b, false);
        if (shape->trainable)
            SW_TRY(sw_redop_check(redop, shape->dtype, err));
    }
    host->trailer_stride_bytes = offset;
    return SW_OK;
}

/* Sizes of the buckets, by transport. */
static sw_gradient_sizes sizes_of(host_rounds *host)
{
    const sw_layout *layout = &host->base.layout;
    sw_gradient_sizes sizes = {.pool = layout->size_bytes,
                               .staged = layout->size_bytes,
                               .trailers = 2 * host->trailer_stride_bytes,
                               .results_mapped = host->owners != NULL};
    for (size_t i = 0; host->ring && i < layout->bucket_count; ++i) {
        host->buckets[i].result_offset_bytes = sizes.results;
        sizes.results += sw_bucket_bytes(&host->base, i) / (size_t)host->base.slice_count;
    }
    if (host->ring) /* space for frozen buckets; its pages are touched when they are unfrozen */
        sizes.pool =
            sw_size_max(sw_host_rounds_lay_ring(host, true), sw_host_rounds_lay_ring(host, false));
    if (host->base.takes_means)
        sizes.results =
            sw_host_rounds_is_in_place(host) ? 0 : sizes.pool / (size_t)host->base.slice_count;
    return sizes;
}

static void bind_ring(host_rounds *host)
{
    host->ring_bytes = sw_host_rounds_lay_ring(host, false);
    for (size_t i = 0; !sw_host_rounds_is_in_place(host) && i < host->base.layout.bucket_count;
         ++i) {
        host_bucket *b = &host->buckets[i];
        if (host->base.takes_means) /* two results overlap where two contributions do */
            b->result_offset_bytes = b->op.offset_bytes / (size_t)host->base.slice_count;
        b->op.kind = SW_OP_REDUCE_SCATTER;
        b->op.result = host->memory->results + b->result_offset_bytes;
        b->op.results = host->memory->result_arena;
        b->op.results_offset_bytes = b->result_offset_bytes;
        sw_bucket_plan(b, true);
    }
    host->unfrozen = true; /* the first round populates it: parameters that load need its memory */
}

static void bind_memory(host_rounds *host)
{
    size_t begin = 0,
           end = 0; /* bytes to populate: adjacent buckets that take part form one range */
    bool pool = host->memory->transport == SW_TRANSPORT_POOL;
    for (size_t i = 0; i < host->base.layout.bucket_count; ++i) {
        host_bucket *b = &host->buckets[i];
        b->op.subject = host->memory->trailers->serial;
        if (pool)
            b->op.arena = host->memory->arena;
        else
            b->op.data = host->memory->base + host->base.layout.bucket[i].offset_bytes;
    }
    host->ring &= pool; /* private buckets are whole */
    if (host->ring) {
        bind_ring(host);
        return;
    }
    for (size_t i = 0; i < host->base.layout.bucket_count; ++i) {
        host_bucket *b = &host->buckets[i];
        b->op.offset_bytes = host->base.layout.bucket[i].offset_bytes;
        b->before = NULL;
        if (!b->common->takes_part)
            continue;
        if (b->op.offset_bytes != end) {
            sw_memory_populate(host->memory->base + begin, end - begin);
            begin = b->op.offset_bytes;
        }
        end = b->op.offset_bytes + sw_bucket_bytes(&host->base, i);
    }
    sw_memory_populate(host->memory->base + begin, end - begin);
}

static sw_status copy_slices(host_rounds *host, const sw_slices *slices, sw_error *err)
{
    size_t ranks = (size_t)host->comm->world_size;
    if (!slices)
        return SW_OK;
    host->owners = calloc(2 * ranks, sizeof *host->owners);
    if (!host->owners)
        SW_FAIL(err, SW_E_MEMORY, "reducer: no memory for %zu ranks", ranks);
    memcpy(host->owners, slices->of_rank, ranks * sizeof(int));
    memcpy(host->owners + ranks, slices->replica_of_rank, ranks * sizeof(int));
    host->slices = (sw_slices){
        .count = slices->count, .of_rank = host->owners, .replica_of_rank = host->owners + ranks};
    host->rows_on_hosts = true;
    const sw_host_map *map = host->comm->is_carried ? sw_hier_comm_map(host->comm) : NULL;
    for (size_t i = 0; map && i < ranks * ranks; ++i)
        host->rows_on_hosts &= host->owners[ranks + i / ranks] != host->owners[ranks + i % ranks] ||
                               map->host_of[i / ranks] == map->host_of[i % ranks];
    return SW_OK;
}

/* Prepare everything that needs no peer. */
static sw_status prepare(host_rounds *host, const sw_layout_param *params, const char *const *names,
                         size_t param_count, const sw_reducer_options *options, sw_error *err)
{
    int slice_count = options->slices ? options->slices->count : host->comm->world_size;
    bool is_whole = options->takes_means && slice_count == 1; /* and is folded by all ranks */
    SW_TRY(copy_slices(host, options->slices, err));
    SW_TRY(sw_reducer_init(&host->base, params, names, param_count, options, slice_count,
                           is_whole ? host->comm->world_size : 1, err));
    host->buckets = calloc(host->base.layout.bucket_count + 1, sizeof *host->buckets);
    host->contributors = calloc((size_t)host->comm->world_size, sizeof *host->contributors);
    if (!host->buckets || !host->contributors)
        SW_FAIL(err, SW_E_MEMORY, "reducer: no memory for %zu parameters", param_count);
    return init_buckets(host, options, err);
}

sw_status sw_reducer_create(sw_comm *comm, const sw_layout_param *params, const char *const *names,
                            size_t param_count, const sw_reducer_options *options,
                            sw_reducer **reducer, sw_error *err)
{
    sw_error cause;
    host_rounds *made = calloc(1, sizeof *made);
    if (!made)
        return sw_comm_give_up(comm, SW_E_MEMORY, err, "no memory for a reducer");
    made->base = (sw_reducer){
        .ops = &sw_host_rounds_ops, .rank = comm->rank, .world_size = comm->world_size};
    made->comm = comm;
    sw_status status = prepare(made, params, names, param_count, options, &cause);
    if (status == SW_E_MEMORY) { /* an error of only this rank: the peers continue with the
                                    gradients' memory. An invalid table is invalid on all ranks */
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
    sw_gradient_sizes sizes = sizes_of(made);
    SW_TRY_GOTO(status,
                sw_gradient_memory_create(comm, &sizes, options->transport, options->label,
                                          &made->memory, err),
                destroy);
    bind_memory(made);
    *reducer = &made->base;
    return SW_OK;
destroy:
    made->base.ops->destroy(&made->base);
    return status;
}
