/* device_powersgd_round.c - see the header. factor_message.h has the form of a message. */
#include "compress/device_powersgd_round.h"

#include <stdlib.h>

#include "base/bytes.h"
#include "comm/peers.h"
#include "compress/compressor.h"
#include "compress/device_codec.h"
#include "compress/device_powersgd.h"
#include "kernels/kernels.h"

typedef struct message { /* sizes of one; 16 bits: shares of factors and of small parameters */
    size_t head, small_numel, share, small_share, slice_bytes, scratch_numel;
    const sw_device_small *small;
    size_t small_count;
} message;

typedef struct device_round {
    const sw_device_factors *factors;
    const sw_device_factor_memory *memory;
    sw_device_comm *comm;
    sw_device_passes passes;
    sw_matrix_args *rows;     /* owned */
    sw_factor_args *to_basis; /* owned */
    size_t rank, ranks, left_numel, right_numel;
    message now;
    float *own, *whole, *sum, *term, *flat; /* 16 bits: parts of the scratch */
    uint64_t sent_bytes;
} device_round;

static size_t left_numel(const sw_powersgd *m)
{
    return m->rank * sw_powersgd_stride(m->rows);
}

static size_t right_numel(const sw_powersgd *m)
{
    return m->rank * sw_powersgd_stride(m->cols);
}

static size_t sum_of(const sw_device_factors *f, size_t (*numel)(const sw_powersgd *))
{
    size_t sum = 0;
    for (size_t i = 0; i < f->matrix_count; ++i)
        sum += numel(&f->matrices[i].matrix);
    return sum;
}

static message message_of(sw_dtype wire, size_t head, const sw_device_small *small, size_t count,
                          int world_size)
{
    message m = {.head = head, .small = small, .small_count = count};
    size_t ranks = (size_t)world_size;
    for (size_t i = 0; i < count; ++i)
        m.small_numel += small[i].numel;
    if (wire == SW_DTYPE_FLOAT32) {
        m.share = sw_compressor_slice_numel(head + m.small_numel, world_size);
        m.slice_bytes = m.share * sizeof(float);
        return m;
    }
    m.share = sw_compressor_slice_numel(head, world_size);
    m.small_share = m.small_numel ? sw_compressor_slice_numel(m.small_numel, world_size) : 0;
    m.slice_bytes = 2 * m.share + 4 * m.small_share;
    m.scratch_numel = 2 * ranks * m.share + 2 * m.share + ranks * m.small_share;
    return m;
}

void sw_device_factor_sizes(const sw_device_factors *f, int world_size, size_t *slice_bytes,
                            size_t *scratch_numel)
{
    message p = message_of(f->wire, sum_of(f, left_numel), f->small, f->small_count, world_size);
    message q = message_of(f->wire, sum_of(f, right_numel), NULL, 0, world_size);
    *slice_bytes = sw_size_max(p.slice_bytes, q.slice_bytes);
    *scratch_numel = sw_size_max(p.scratch_numel, q.scratch_numel);
}

/* ---- what is enqueued ---- */

static sw_status clear(const device_round *r, void *to, size_t size_bytes, sw_error *err)
{
    sw_device *device = r->passes.kernels->device;
    return size_bytes ? device->ops->fill_async(device, to, 0, size_bytes, r->passes.stream, err)
                      : SW_OK;
}

static sw_status cast(const device_round *r, void *to, sw_dtype to_dtype, const void *from,
                      sw_dtype from_dtype, size_t numel, float scale, sw_error *err)
{
    const sw_cast_args args = {.to = to,
                               .from = from,
                               .numel = numel,
                               .scale = scale,
                               .to_dtype = to_dtype,
                               .from_dtype = from_dtype};
    return numel ? sw_kernel_launch(r->passes.kernels, SW_KERNEL_CAST, &args, r->passes.stream, err)
                 : SW_OK;
}

/* Copies of which one launch takes up to 64. */
typedef struct copies {
    const device_round *round;
    sw_pack_args args;
} copies;

static sw_status flush(copies *c, sw_error *err)
{
    if (c->args.segment_count == 0)
        return SW_OK;
    SW_TRY(sw_kernel_launch(c->round->passes.kernels, SW_KERNEL_PACK, &c->args,
                            c->round->passes.stream, err));
    c->args.segment_count = 0;
    return SW_OK;
}

static sw_status copy(copies *c, void *to, const void *from, size_t size_bytes, sw_error *err)
{
    if (size_bytes == 0)
        return SW_OK;
    c->args.segment[c->args.segment_count++] =
        (sw_pack_segment){.to = to, .from = from, .size_bytes = size_bytes};
    return c->args.segment_count == SW_PACK_SEGMENT_MAX ? flush(c, err) : SW_OK;
}

static sw_status add_scaled(const device_round *r, float *to, const float *from, size_t numel,
                            float scale, sw_error *err)
{
    const sw_device_blocks blocks = {
        .codec = {32, 8}, .kernels = r->passes.kernels, .stream = r->passes.stream};
    const sw_owe_part part = {.error = to, .rest = from, .numel = numel};
    return sw_device_block_owe(&blocks, &part, 1, r->memory->verdict + 1, scale, err);
}

static sw_status scatter(device_round *r, sw_error *err)
{
    const sw_device_range range = {r->memory->message, r->now.slice_bytes * r->ranks,
                                   SW_DTYPE_UINT8};
    r->sent_bytes += (r->ranks - 1) * r->now.slice_bytes;
    return sw_device_comm_exchange(r->comm, &range, r->memory->received, r->passes.stream, err);
}

static sw_status gather(device_round *r, sw_error *err)
{
    const sw_device_range range = {r->memory->whole, r->now.slice_bytes * r->ranks, SW_DTYPE_UINT8};
    r->sent_bytes += (r->ranks - 1) * r->now.slice_bytes;
    return sw_device_comm_all_gather(r->comm, &range, 1, r->passes.stream, err);
}

/* Fold floats at `skip` bytes of every rank's slice into the same place of this rank's result. */
static sw_status fold_floats(const device_round *r, size_t skip, size_t numel, sw_error *err)
{
    size_t own = r->rank * r->now.slice_bytes;
    const sw_fold_args args = {.to = r->memory->whole + own + skip,
                               .own = r->memory->message + own + skip,
                               .rest = r->memory->received + skip,
                               .numel = numel,
                               .stride_bytes = r->now.slice_bytes,
                               .scale = 1.0 / (double)r->ranks,
                               .dtype = SW_DTYPE_FLOAT32,
                               .op = SW_REDOP_MEAN,
                               .own_index = (int)r->rank,
                               .source_count = (int)r->ranks};
    return sw_kernel_launch(r->passes.kernels, SW_KERNEL_FOLD, &args, r->passes.stream, err);
}

/* ---- a message ---- */

static float *begin(device_round *r, size_t head, const sw_device_small *small, size_t count)
{
    r->now = message_of(r->factors->wire, head, small, count, (int)r->ranks);
    if (r->factors->wire == SW_DTYPE_FLOAT32)
        return (float *)(void *)r->memory->message;
    r->own = r->memory->scratch;
    r->whole = r->own + r->ranks * r->now.share;
    r->sum = r->whole + r->ranks * r->now.share;
    r->term = r->sum + r->now.share;
    r->flat = r->term + r->now.share;
    return r->own;
}

/* Copy the small parameters one after the other, and append zeros up to `room` floats. */
static sw_status pack(const device_round *r, float *to, size_t room, sw_error *err)
{
    copies c = {.round = r};
    float *at = to;
    for (size_t i = 0; i < r->now.small_count; at += r->now.small[i++].numel)
        SW_TRY(copy(&c, at, r->now.small[i].values, r->now.small[i].numel * sizeof *at, err));
    SW_TRY(flush(&c, err));
    return clear(r, to + r->now.small_numel, (room - r->now.small_numel) * sizeof *to, err);
}

static sw_status unpack(const device_round *r, const float *from, sw_error *err)
{
    copies c = {.round = r};
    for (size_t i = 0; i < r->now.small_count; from += r->now.small[i++].numel)
        SW_TRY(copy(&c, r->now.small[i].values, from, r->now.small[i].numel * sizeof *from, err));
    return flush(&c, err);
}

static sw_status average_floats(device_round *r, float **mean, sw_error *err)
{
    float *own = (float *)(void *)r->memory->message;
    SW_TRY(pack(r, own + r->now.head, r->ranks * r->now.share - r->now.head, err));
    *mean = own;
    if (r->ranks > 1) {
        SW_TRY(scatter(r, err));
        SW_TRY(fold_floats(r, 0, r->now.share, err));
        SW_TRY(gather(r, err));
        *mean = (float *)(void *)r->memory->whole;
    }
    return unpack(r, *mean + r->now.head, err);
}

static sw_status encode(const device_round *r, sw_error *err)
{
    const message *m = &r->now;
    copies c = {.round = r};
    SW_TRY(pack(r, r->flat, r->ranks * m->small_share, err));
    for (size_t rank = 0; rank < r->ranks; ++rank) {
        uint8_t *slice = r->memory->message + rank * m->slice_bytes;
        size_t first = sw_size_min(rank * m->share, m->head);
        size_t numel = sw_size_min(m->share, m->head - first);
        SW_TRY(cast(r, slice, r->factors->wire, r->own + first, SW_DTYPE_FLOAT32, numel,
                    (float)(1.0 / (double)r->ranks), err));
        SW_TRY(clear(r, slice + 2 * numel, 2 * (m->share - numel), err));
        SW_TRY(copy(&c, slice + 2 * m->share, r->flat + rank * m->small_share, 4 * m->small_share,
                    err));
    }
    return flush(&c, err);
}

/* Sum in float32 and rank order, round once, and keep the sum before it is rounded. */
static sw_status fold_halves(const device_round *r, sw_error *err)
{
    const message *m = &r->now;
    uint8_t *result = r->memory->whole + r->rank * m->slice_bytes;
    SW_TRY(clear(r, r->sum, m->share * sizeof *r->sum, err));
    for (size_t rank = 0; rank < r->ranks; ++rank) {
        const uint8_t *piece =
            (rank == r->rank ? r->memory->message : r->memory->received) + rank * m->slice_bytes;
        SW_TRY(cast(r, r->term, SW_DTYPE_FLOAT32, piece, r->factors->wire, m->share, 1, err));
        SW_TRY(add_scaled(r, r->sum, r->term, m->share, 1, err));
    }
    SW_TRY(cast(r, result, r->factors->wire, r->sum, SW_DTYPE_FLOAT32, m->share, 1, err));
    return m->small_share ? fold_floats(r, 2 * m->share, m->small_share, err) : SW_OK;
}

/* Widen the factors of all slices of `from` to `to`. */
static sw_status decode(const device_round *r, float *to, const uint8_t *from, sw_error *err)
{
    for (size_t rank = 0; rank < r->ranks; ++rank)
        SW_TRY(cast(r, to + rank * r->now.share, SW_DTYPE_FLOAT32, from + rank * r->now.slice_bytes,
                    r->factors->wire, r->now.share, 1, err));
    return SW_OK;
}

static sw_status average_halves(device_round *r, float **mean, sw_error *err)
{
    const message *m = &r->now;
    const uint8_t *received = r->memory->message;
    copies c = {.round = r};
    SW_TRY(encode(r, err));
    if (r->ranks > 1) {
        SW_TRY(scatter(r, err));
        SW_TRY(fold_halves(r, err));
        SW_TRY(gather(r, err));
        received = r->memory->whole;
    }
    SW_TRY(decode(r, r->whole, received, err));
    for (size_t rank = 0; rank < r->ranks; ++rank)
        SW_TRY(copy(&c, r->flat + rank * m->small_share,
                    received + rank * m->slice_bytes + 2 * m->share, 4 * m->small_share, err));
    SW_TRY(flush(&c, err));
    *mean = r->whole;
    return unpack(r, r->flat, err);
}

static sw_status average(device_round *r, float **mean, sw_error *err)
{
    return r->factors->wire == SW_DTYPE_FLOAT32 ? average_floats(r, mean, err)
                                                : average_halves(r, mean, err);
}

/* Keep this rank's factors as the wire has counted them, unless the round is refused. */
static sw_status settle(const device_round *r, sw_error *err)
{
    float ranks = (float)r->ranks, *mine = r->own + r->rank * r->now.share;
    const float *from = r->own;
    copies c = {.round = r, .args = {.verdict = r->memory->verdict}};
    SW_TRY(decode(r, r->own, r->memory->message, err));
    if (r->ranks > 1) {
        SW_TRY(cast(r, r->own, SW_DTYPE_FLOAT32, r->own, SW_DTYPE_FLOAT32, r->ranks * r->now.share,
                    ranks, err));
        SW_TRY(add_scaled(r, mine, r->whole + r->rank * r->now.share, r->now.share, ranks, err));
        SW_TRY(add_scaled(r, mine, r->sum, r->now.share, -ranks, err));
    }
    for (size_t i = 0; i < r->factors->matrix_count; ++i) {
        const sw_powersgd *m = &r->factors->matrices[i].matrix;
        SW_TRY(copy(&c, m->right, from, right_numel(m) * sizeof *from, err));
        from += right_numel(m);
    }
    return flush(&c, err);
}

/* ---- the passes ---- */

static sw_matrix_args row_of(const sw_powersgd *m)
{
    return (sw_matrix_args){.gradient = m->gradient,
                            .memory = m->memory,
                            .left = m->left,
                            .right = m->right,
                            .basis = m->basis,
                            .rows = m->rows,
                            .cols = m->cols,
                            .rank = m->rank,
                            .memory_dtype = (int)m->memory_dtype};
}

static sw_status check_finite(const device_round *r, const float *values, size_t numel, int refusal,
                              sw_error *err)
{
    const sw_finite_args args = {
        .verdict = r->memory->verdict, .values = values, .numel = numel, .refusal = refusal};
    return sw_kernel_launch(r->passes.kernels, SW_KERNEL_FINITE, &args, r->passes.stream, err);
}

/* Draw the bases that begin in this round. */
static sw_status begin_bases(const device_round *r, sw_error *err)
{
    size_t count = 0;
    for (size_t i = 0; i < r->factors->matrix_count; ++i) {
        const sw_powersgd *m = &r->factors->matrices[i].matrix;
        if (!r->factors->matrices[i].begins)
            continue;
        SW_TRY(clear(r, m->basis, right_numel(m) * sizeof *m->basis, err));
        r->to_basis[count++] = (sw_factor_args){
            .to = m->basis, .from = m->basis, .count = m->cols, .rank = m->rank, .seed = m->seed};
    }
    return sw_device_powersgd_orthonormalize(&r->passes, r->to_basis, count, err);
}

static sw_status exchange_p(device_round *r, sw_error *err)
{
    const sw_device_factors *f = r->factors;
    float *p = begin(r, r->left_numel, f->small, f->small_count), *mean;
    for (size_t i = 0; i < f->matrix_count; p += left_numel(&f->matrices[i++].matrix)) {
        r->rows[i] = row_of(&f->matrices[i].matrix);
        r->rows[i].out = p;
    }
    SW_TRY(sw_device_powersgd_run(&r->passes, SW_KERNEL_PROJECT, r->rows, f->matrix_count, err));
    SW_TRY(average(r, &mean, err));
    if (f->matrix_count == 0)
        return SW_OK;
    SW_TRY(check_finite(r, mean, r->left_numel, SW_REFUSED, err));
    for (size_t i = 0; i < f->matrix_count; mean += left_numel(&f->matrices[i++].matrix)) {
        const sw_powersgd *m = &f->matrices[i].matrix;
        r->to_basis[i] = (sw_factor_args){
            .to = m->left, .from = mean, .count = m->rows, .rank = m->rank, .seed = m->seed + 1};
    }
    return sw_device_powersgd_orthonormalize(&r->passes, r->to_basis, f->matrix_count, err);
}

static sw_status exchange_q(device_round *r, sw_error *err)
{
    const sw_device_factors *f = r->factors;
    float *q = begin(r, r->right_numel, NULL, 0), *mean;
    for (size_t i = 0; i < f->matrix_count; q += right_numel(&f->matrices[i++].matrix)) {
        r->rows[i] = row_of(&f->matrices[i].matrix);
        r->rows[i].out = q;
        r->rows[i].copy = f->matrices[i].matrix.right;
    }
    SW_TRY(sw_device_powersgd_run(&r->passes, SW_KERNEL_ABSORB, r->rows, f->matrix_count, err));
    SW_TRY(average(r, &mean, err));
    SW_TRY(check_finite(r, mean, r->right_numel, SW_REFUSED_LATE, err));
    if (f->wire != SW_DTYPE_FLOAT32 && f->settles)
        SW_TRY(settle(r, err));
    for (size_t i = 0; i < f->matrix_count; mean += right_numel(&f->matrices[i++].matrix)) {
        const sw_powersgd *m = &f->matrices[i].matrix;
        r->rows[i] = row_of(m);
        r->rows[i].right = mean;
        r->rows[i].out = m->right;
        r->to_basis[i] = (sw_factor_args){
            .to = m->basis, .from = mean, .count = m->cols, .rank = m->rank, .seed = m->seed};
    }
    SW_TRY(sw_device_powersgd_run(&r->passes, SW_KERNEL_EXPAND, r->rows, f->matrix_count, err));
    return sw_device_powersgd_orthonormalize(&r->passes, r->to_basis, f->matrix_count, err);
}

static sw_status run(device_round *r, sw_error *err)
{
    SW_TRY(clear(r, r->memory->verdict, 2 * sizeof *r->memory->verdict, err));
    SW_TRY(begin_bases(r, err));
    SW_TRY(exchange_p(r, err));
    return r->factors->matrix_count ? exchange_q(r, err) : SW_OK;
}

sw_status sw_device_powersgd_round(sw_device_comm *comm, const sw_device_factors *factors,
                                   const sw_device_factor_memory *memory, sw_stream *stream,
                                   uint64_t *sent_bytes, sw_error *err)
{
    device_round r = {
        .factors = factors,
        .memory = memory,
        .comm = comm,
        .passes = {.kernels = &comm->kernels, .stream = stream, .verdict = memory->verdict},
        .rows = calloc(factors->matrix_count + 1, sizeof *r.rows),
        .to_basis = calloc(factors->matrix_count + 1, sizeof *r.to_basis),
        .rank = (size_t)comm->peers->rank,
        .ranks = (size_t)comm->peers->world_size,
        .left_numel = sum_of(factors, left_numel),
        .right_numel = sum_of(factors, right_numel)};
    sw_status status = SW_OK;
    if (!r.rows || !r.to_basis)
        SW_TRY_GOTO(status, sw_error_set(err, SW_E_MEMORY, -1, "no memory for a bucket's matrices"),
                    done);
    status = run(&r, err);
    *sent_bytes = r.sent_bytes;
done:
    free(r.rows);
    free(r.to_basis);
    return status;
}
