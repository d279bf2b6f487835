/* powersgd_round.c - a bucket through matrices of low rank: one message with P and all small
 * parameters, one with Q. See powersgd.h and docs/design/compress.md. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "compress/factor_message.h"

typedef struct powersgd_round {
    sw_compressor *compressor;
    sw_exchange *exchange;
    sw_powersgd *matrices; /* owned */
    sw_small *small;       /* owned */
    size_t matrix_count, small_count;
    size_t left_numel, right_numel; /* of all matrices */
    sw_factor_message message;
} powersgd_round;

static size_t left_numel(const sw_powersgd *m)
{
    return m->rank * sw_powersgd_stride(m->rows);
}

static size_t right_numel(const sw_powersgd *m)
{
    return m->rank * sw_powersgd_stride(m->cols);
}

/* A cold start has another basis each round. */
static uint64_t seed_of(const sw_compressor *c, const sw_compressor_entry *e)
{
    const sw_compressor_settings *s = &c->settings;
    uint64_t seed = s->seed * 1000003 + e->seed * 8191 + (s->warm_start ? 0 : c->rounds * 131);
    return seed & (UINT64_MAX >> 1);
}

static sw_status add_matrix(powersgd_round *r, const sw_compressor_member *member, float *flat,
                            sw_error *err)
{
    sw_compressor *c = r->compressor;
    sw_compressor_entry *e = &c->entries[member->entry];
    bool is_new = !e->is_made;
    SW_TRY(sw_compressor_make(c, member->entry, err));
    sw_powersgd *m = &r->matrices[r->matrix_count++];
    *m = (sw_powersgd){.gradient = flat + member->offset,
                       .memory = e->part[SW_PART_MEMORY],
                       .left = e->part[SW_PART_LEFT],
                       .right = e->part[SW_PART_RIGHT],
                       .basis = e->part[SW_PART_BASIS],
                       .rows = e->rows,
                       .cols = e->cols,
                       .rank = e->rank,
                       .seed = seed_of(c, e),
                       .memory_dtype = c->settings.memory};
    SW_TRY(sw_powersgd_check(m, err));
    if (is_new || !c->settings.warm_start)
        sw_powersgd_init_basis(m);
    r->left_numel += left_numel(m);
    r->right_numel += right_numel(m);
    return SW_OK;
}

/* Make P orthonormal and compute this rank's Q into `own`; *finite: false if some P is not, and
 * nothing has changed. */
static sw_status exchange_p(powersgd_round *r, float *own, bool *finite, sw_error *err)
{
    float *p, *mean;
    SW_TRY(sw_factor_message_begin(&r->message, r->compressor, r->left_numel, r->small,
                                   r->small_count, r->exchange, &p, err));
    for (size_t i = 0; i < r->matrix_count; p += left_numel(&r->matrices[i++]))
        sw_powersgd_project(&r->matrices[i], p);
    SW_TRY(sw_factor_message_average(&r->message, &mean, err));
    *finite = sw_powersgd_is_finite(mean, r->left_numel);
    for (size_t i = 0; *finite && i < r->matrix_count; ++i) {
        sw_powersgd_absorb(&r->matrices[i], mean, own);
        mean += left_numel(&r->matrices[i]);
        own += right_numel(&r->matrices[i]);
    }
    return SW_OK;
}

/* Finite gradients whose sums overflow would overflow for ever if they were kept. */
static void restart(const sw_powersgd *m)
{
    if (m->memory)
        memset(m->memory, 0, m->rows * m->cols * sw_dtype_size_bytes(m->memory_dtype));
    memset(m->right, 0, right_numel(m) * sizeof *m->right);
}

static sw_status exchange_q(powersgd_round *r, const float *own, bool *finite, sw_error *err)
{
    float *q, *mean;
    SW_TRY(sw_factor_message_begin(&r->message, r->compressor, r->right_numel, NULL, 0, r->exchange,
                                   &q, err));
    memcpy(q, own, r->right_numel * sizeof *q);
    SW_TRY(sw_factor_message_average(&r->message, &mean, err));
    *finite = sw_powersgd_is_finite(mean, r->right_numel);
    for (size_t i = 0; !*finite && i < r->matrix_count; ++i)
        restart(&r->matrices[i]);
    if (!*finite)
        return SW_OK;
    bool settles = r->message.wire != SW_DTYPE_FLOAT32 && r->compressor->settings.error_feedback;
    const float *settled = settles ? sw_factor_message_settle(&r->message) : NULL;
    for (size_t i = 0; i < r->matrix_count; ++i) {
        const sw_powersgd *m = &r->matrices[i];
        if (settled) {
            memcpy(m->right, settled, right_numel(m) * sizeof *settled);
            settled += right_numel(m);
        }
        sw_powersgd_decompress(m, mean);
        mean += right_numel(m);
    }
    return SW_OK;
}

static sw_status run(powersgd_round *r, sw_error *err)
{
    float *own = sw_scratch_reserve(&r->compressor->own_q, r->right_numel, err);
    bool finite;
    if (!own)
        return SW_E_MEMORY;
    SW_TRY(exchange_p(r, own, &finite, err));
    if (finite && r->matrix_count)
        SW_TRY(exchange_q(r, own, &finite, err));
    for (size_t i = 0; !finite && i < r->matrix_count; ++i)
        for (size_t k = 0; k < r->matrices[i].rows * r->matrices[i].cols; ++k)
            r->matrices[i].gradient[k] = NAN;
    return SW_OK;
}

sw_status sw_powersgd_round(sw_compressor *c, const sw_compressor_bucket *bucket, float *flat,
                            sw_exchange *exchange, sw_error *err)
{
    powersgd_round r = {.compressor = c,
                        .exchange = exchange,
                        .matrices = calloc(bucket->count + 1, sizeof *r.matrices),
                        .small = calloc(bucket->count + 1, sizeof *r.small)};
    sw_status status = SW_OK;
    if (!r.matrices || !r.small)
        SW_TRY_GOTO(status, sw_error_set(err, SW_E_MEMORY, -1, "no memory for a bucket's matrices"),
                    done);
    for (const sw_compressor_member *m = bucket->members; m < bucket->members + bucket->count;
         ++m) {
        if (!m->used || m->numel == 0)
            continue;
        if (c->entries[m->entry].rank)
            SW_TRY_GOTO(status, add_matrix(&r, m, flat, err), done);
        else
            r.small[r.small_count++] = (sw_small){.values = flat + m->offset, .numel = m->numel};
    }
    status = run(&r, err);
done:
    free(r.matrices);
    free(r.small);
    return status;
}
