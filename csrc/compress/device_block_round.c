/* device_block_round.c - see the header. A pass is one launch over all parts of the message. */
#include "compress/device_block_round.h"

#include <stdlib.h>

#include "comm/peers.h"
#include "compress/device_codec.h"
#include "kernels/kernels.h"

typedef struct device_round {
    const sw_block_cut *cut;
    const sw_device_block_memory *memory;
    sw_device_comm *comm;
    const sw_device_hosts *hosts; /* NULL: one host */
    sw_device_blocks blocks;
    sw_block_part *parts; /* owned */
    size_t part_count;
    sw_decode_part *rows; /* owned: as many; one of the tables of a pass at a time */
    uint8_t *result;
    float *rest; /* this rank's part of the memory's; NULL: no error feedback */
    bool keeps_error;
    uint64_t sent_bytes;
} device_round;

static void add_part(const sw_block_cut *cut, const sw_block_part *part, void *context)
{
    device_round *r = context;
    (void)cut;
    r->parts[r->part_count++] = *part;
}

static uint8_t *record(const device_round *r, uint8_t *memory, size_t number)
{
    return memory + number * r->cut->record_bytes;
}

/* Encode all parts, and fill up the slices with records of zeros. */
static sw_status encode(const device_round *r, sw_error *err)
{
    size_t ranks = (size_t)r->cut->world_size, count = 0;
    sw_quantize_part *rows = calloc(r->part_count + ranks, sizeof *rows);
    if (!rows)
        SW_FAIL(err, SW_E_MEMORY, "no memory for a bucket's records");
    for (size_t i = 0; i < r->part_count; ++i)
        rows[count++] = (sw_quantize_part){.records = record(r, r->memory->message, r->parts[i].at),
                                           .source = r->parts[i].values,
                                           .error = r->parts[i].error,
                                           .numel = r->parts[i].numel};
    for (size_t rank = 0; rank < ranks; ++rank) {
        size_t used = r->cut->owners[rank].end - r->cut->owners[rank].begin;
        if (used < r->cut->each)
            rows[count++] = (sw_quantize_part){
                .records = record(r, r->memory->message, rank * r->cut->each + used),
                .numel = (r->cut->each - used) * r->cut->codec.block};
    }
    sw_status status = sw_device_block_encode(&r->blocks, rows, count, err);
    free(rows);
    return status;
}

static sw_status scatter(device_round *r, sw_error *err)
{
    size_t slice = r->cut->each * r->cut->record_bytes, ranks = (size_t)r->cut->world_size;
    const sw_device_range range = {r->memory->message, slice * ranks, SW_DTYPE_UINT8};
    if (r->hosts) {
        r->sent_bytes += (r->hosts->folded_count - 1) * slice;
        return sw_device_hosts_exchange(r->hosts, &range, r->memory->received, r->blocks.stream,
                                        err);
    }
    r->sent_bytes += (ranks - 1) * slice;
    return sw_device_comm_exchange(r->comm, &range, r->memory->received, r->blocks.stream, err);
}

static sw_status gather(device_round *r, void *data, size_t numel, sw_dtype dtype, sw_error *err)
{
    const sw_device_range range = {data, numel, dtype};
    r->sent_bytes += (uint64_t)(r->cut->world_size - 1) *
                     (numel / (size_t)r->cut->world_size * sw_dtype_size_bytes(dtype));
    return sw_device_comm_all_gather(r->comm, &range, 1, r->blocks.stream, err);
}

static sw_status gather_records(device_round *r, sw_error *err)
{
    size_t slice = r->cut->each * r->cut->record_bytes, ranks = (size_t)r->cut->world_size;
    const sw_device_range range = {r->memory->whole, slice * ranks, SW_DTYPE_UINT8};
    if (!r->hosts)
        return gather(r, range.data, range.numel, range.dtype, err);
    size_t beside = (size_t)sw_host_size(&r->hosts->map, r->hosts->host) - 1;
    r->sent_bytes += ((size_t)r->hosts->map.host_count - 1) * slice;
    r->sent_bytes += beside * r->hosts->folded_count * slice;
    return sw_device_hosts_gather_slices(r->hosts, &range, r->blocks.stream, err);
}

/* Return the number of contributions to a record: one a rank, or one a host. */
static int sources_of(const device_round *r)
{
    return r->hosts ? r->hosts->map.host_count : r->cut->world_size;
}

/* Replace the values of this host's ranks by their mean, as the mean over hosts counts it. */
static sw_status add_inside(device_round *r, sw_error *err)
{
    const sw_device_hosts *h = r->hosts;
    uint64_t sent;
    SW_TRY(sw_device_hosts_add_inside(h, &r->memory->flat,
                                      (double)h->map.host_count / h->map.world_size,
                                      r->blocks.stream, &sent, err));
    r->sent_bytes += sent;
    return SW_OK;
}

static sw_status fold(device_round *r, sw_error *err)
{
    const sw_device_wires wires = {
        .own = record(r, r->memory->message, (size_t)r->cut->rank * r->cut->each),
        .others = r->memory->received,
        .stride_bytes = r->cut->each * r->cut->record_bytes,
        .own_index = r->hosts ? r->hosts->host : r->cut->rank,
        .count = sources_of(r)};
    return sw_device_block_fold(&r->blocks, r->result, &wires, r->cut->each,
                                (float)(1.0 / wires.count), r->rest, err);
}

/* Give the other ranks of this host the rounding errors of this rank's folds: they have the same
 * error, and send other records of it. */
static sw_status share_rest(device_round *r, sw_error *err)
{
    size_t bytes = r->cut->each * r->cut->codec.block * sizeof *r->rest;
    if (!r->hosts || !r->keeps_error)
        return SW_OK;
    r->sent_bytes += ((size_t)sw_host_size(&r->hosts->map, r->hosts->host) - 1) * bytes;
    return sw_device_hosts_swap_inside(r->hosts, r->memory->rest, bytes, r->blocks.stream, err);
}

/* Decode every owner's results and keep errors. */
static sw_status take_whole(device_round *r, sw_error *err)
{
    const sw_device_block_memory *m = r->memory;
    size_t records = r->cut->each * (size_t)r->cut->world_size;
    SW_TRY(gather_records(r, err));
    if (r->keeps_error)
        SW_TRY(sw_device_block_verdict(&r->blocks, m->flags, m->whole, records, err));
    for (size_t i = 0; i < r->part_count; ++i)
        r->rows[i] = (sw_decode_part){.values = r->parts[i].values,
                                      .error = r->parts[i].error,
                                      .records = record(r, m->whole, r->parts[i].at),
                                      .own = record(r, m->message, r->parts[i].at),
                                      .numel = r->parts[i].numel};
    return sw_device_block_decode(&r->blocks, r->rows, r->part_count, m->flags, err);
}

/* Sum the ranks' verdicts into the last flag, and keep the errors of all parts. */
static sw_status keep_errors(device_round *r, sw_error *err)
{
    int32_t *flags = r->memory->flags, world_size = r->cut->world_size;
    size_t count = 0;
    SW_TRY(sw_device_block_verdict(&r->blocks, flags + r->cut->rank, r->result, r->cut->each, err));
    SW_TRY(gather(r, flags, (size_t)world_size, SW_DTYPE_INT32, err));
    const sw_fold_args sum = {.to = flags + world_size,
                              .rest = flags,
                              .numel = 1,
                              .stride_bytes = sizeof *flags,
                              .scale = 1,
                              .dtype = SW_DTYPE_INT32,
                              .op = SW_REDOP_SUM,
                              .own_index = -1,
                              .source_count = world_size};
    SW_TRY(sw_kernel_launch(r->blocks.kernels, SW_KERNEL_FOLD, &sum, r->blocks.stream, err));
    for (size_t i = 0; i < r->part_count; ++i)
        if (!r->parts[i].is_copy)
            r->rows[count++] =
                (sw_decode_part){.values = r->parts[i].values,
                                 .error = r->parts[i].error,
                                 .own = record(r, r->memory->message, r->parts[i].at),
                                 .numel = r->parts[i].numel};
    return sw_device_block_decode(&r->blocks, r->rows, count, flags + world_size, err);
}

/* Keep errors, then decode this rank's results alone. */
static sw_status take_slice(device_round *r, sw_error *err)
{
    size_t first = (size_t)r->cut->rank * r->cut->each, count = 0;
    if (r->keeps_error)
        SW_TRY(keep_errors(r, err));
    for (size_t i = 0; i < r->part_count; ++i)
        if (sw_block_cut_is_own(r->cut, &r->parts[i]))
            r->rows[count++] =
                (sw_decode_part){.values = r->parts[i].values,
                                 .records = record(r, r->result, r->parts[i].at - first),
                                 .numel = r->parts[i].numel};
    return sw_device_block_decode(&r->blocks, r->rows, count, NULL, err);
}

/* Add what the folds of this rank, or of all ranks of its host, have rounded. */
static sw_status owe(const device_round *r, const int32_t *verdict, sw_error *err)
{
    int members = r->hosts ? sw_host_size(&r->hosts->map, r->hosts->host) : 1;
    size_t most = (size_t)members * r->cut->span_count + 1, count = 0;
    sw_block_rest *rests = calloc(r->cut->span_count + 1, sizeof *rests);
    sw_owe_part *rows = calloc(most, sizeof *rows);
    sw_status status = SW_OK;
    if (!rests || !rows)
        status = sw_error_set(err, SW_E_MEMORY, -1, "no memory for a bucket's rounding errors");
    for (int l = 0; status == SW_OK && l < members; ++l) {
        sw_block_cut cut = *r->cut;
        const float *rest = r->memory->rest + (size_t)l * cut.each * cut.codec.block;
        cut.rank = r->hosts ? sw_host_members(&r->hosts->map, r->hosts->host)[l] : cut.rank;
        for (size_t k = 0, some = sw_block_cut_rests(&cut, rests); k < some; ++k)
            rows[count++] = (sw_owe_part){
                .error = rests[k].error, .rest = rest + rests[k].place, .numel = rests[k].numel};
    }
    if (status == SW_OK)
        status = sw_device_block_owe(&r->blocks, rows, count, verdict, (float)sources_of(r), err);
    free(rests);
    free(rows);
    return status;
}

static sw_status run(device_round *r, bool keeps_slice, sw_error *err)
{
    if (r->hosts)
        SW_TRY(add_inside(r, err));
    SW_TRY(encode(r, err));
    SW_TRY(scatter(r, err));
    SW_TRY(fold(r, err));
    SW_TRY(share_rest(r, err));
    SW_TRY(keeps_slice ? take_slice(r, err) : take_whole(r, err));
    return r->keeps_error ? owe(r, r->memory->flags + (keeps_slice ? r->cut->world_size : 0), err)
                          : SW_OK;
}

sw_status sw_device_block_round(sw_device_comm *comm, const sw_device_hosts *hosts,
                                const sw_block_cut *cut, const sw_device_block_memory *memory,
                                bool keeps_slice, sw_stream *stream, uint64_t *sent_bytes,
                                sw_error *err)
{
    size_t most = sw_block_cut_parts(cut) + 1;
    device_round r = {.cut = cut,
                      .memory = memory,
                      .comm = comm,
                      .hosts = hosts,
                      .blocks = {.codec = cut->codec, .kernels = &comm->kernels, .stream = stream},
                      .parts = calloc(most, sizeof *r.parts),
                      .rows = calloc(most, sizeof *r.rows),
                      .result = memory->whole + (size_t)cut->rank * cut->each * cut->record_bytes,
                      .keeps_error = memory->rest != NULL};
    sw_status status = SW_OK;
    size_t place = hosts ? (size_t)hosts->local * cut->each * cut->codec.block : 0;
    r.rest = memory->rest ? memory->rest + place : NULL;
    if (!r.parts || !r.rows)
        SW_TRY_GOTO(status, sw_error_set(err, SW_E_MEMORY, -1, "no memory for a bucket's records"),
                    done);
    sw_block_cut_visit(cut, add_part, &r);
    status = run(&r, keeps_slice, err);
    *sent_bytes = r.sent_bytes;
done:
    free(r.parts);
    free(r.rows);
    return status;
}
