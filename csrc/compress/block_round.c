/* block_round.c - a bucket as records of block-scaled integers: see docs/design/compress.md.
 */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "comm/comm.h"
#include "compress/block_cut.h"
#include "compress/compressor_state.h"

typedef struct block_round {
    sw_block_cut cut; /* first */
    sw_exchange *exchange;
    uint8_t *message, *result;
    const uint8_t *whole;
    bool keeps_error;
    bool keeps; /* the verdict: errors change */
} block_round;

static const block_round *round_of(const sw_block_cut *cut)
{
    return (const block_round *)(const void *)cut;
}

static void encode(const sw_block_cut *cut, const sw_block_part *p, void *context)
{
    (void)context;
    sw_block_encode(&cut->codec, round_of(cut)->message + p->at * cut->record_bytes, p->values,
                    p->error, p->numel);
}

static void decode(const sw_block_cut *cut, const sw_block_part *p, void *context)
{
    const block_round *r = round_of(cut);
    size_t at = p->at * cut->record_bytes;
    (void)context;
    sw_block_decode(&cut->codec, p->values, r->whole + at, r->keeps ? p->error : NULL,
                    r->message + at, p->numel);
}

/* The decoded message replaces the gradient; results overwrite it afterwards. */
static void keep_error(const sw_block_cut *cut, const sw_block_part *p, void *context)
{
    const uint8_t *own = round_of(cut)->message + p->at * cut->record_bytes;
    (void)context;
    if (!p->is_copy)
        sw_block_decode(&cut->codec, p->values, own, p->error, own, p->numel);
}

static void decode_own(const sw_block_cut *cut, const sw_block_part *p, void *context)
{
    size_t at = p->at - (size_t)cut->rank * cut->each;
    (void)context;
    if (sw_block_cut_is_own(cut, p))
        sw_block_decode(&cut->codec, p->values, round_of(cut)->result + at * cut->record_bytes,
                        NULL, NULL, p->numel);
}

/* Decode every owner's results. */
static sw_status take_whole(block_round *r, sw_error *err)
{
    uint8_t *whole;
    SW_TRY(sw_exchange_gather(r->exchange, &whole, err));
    r->whole = whole;
    r->keeps = r->keeps_error &&
               sw_block_is_finite(&r->cut.codec, whole, r->cut.each * (size_t)r->cut.world_size);
    sw_block_cut_visit(&r->cut, decode, NULL);
    return SW_OK;
}

/* The same for this rank's results alone. */
static sw_status take_slice(block_round *r, sw_error *err)
{
    bool finite = sw_block_is_finite(&r->cut.codec, r->result, r->cut.each);
    SW_TRY(sw_exchange_agree(r->exchange, &finite, err));
    r->keeps = finite && r->keeps_error;
    if (r->keeps)
        sw_block_cut_visit(&r->cut, keep_error, NULL);
    sw_block_cut_visit(&r->cut, decode_own, NULL);
    return SW_OK;
}

/* The owner takes the rounding error of its folds: W times, as the next mean divides by W. */
static sw_status add_rest(const block_round *r, const float *rest, sw_error *err)
{
    float ranks = (float)r->cut.world_size;
    sw_block_rest *rests = calloc(r->cut.span_count + 1, sizeof *rests);
    if (!rests)
        SW_FAIL(err, SW_E_MEMORY, "no memory for a bucket's rounding errors");
    for (size_t k = sw_block_cut_rests(&r->cut, rests); k-- > 0;)
        for (size_t i = 0; i < rests[k].numel; ++i)
            rests[k].error[i] += rest[rests[k].place + i] * ranks;
    free(rests);
    return SW_OK;
}

static sw_status run(block_round *r, sw_compressor *c, bool keeps_slice, sw_error *err)
{
    const void *pieces[SW_COMM_MAX_WORLD];
    const sw_block_cut *cut = &r->cut;
    size_t ranks = (size_t)cut->world_size;
    float *rest = NULL;
    if (r->keeps_error && !(rest = sw_scratch_reserve(&c->rest, cut->each * cut->codec.block, err)))
        return SW_E_MEMORY;
    SW_TRY(sw_exchange_begin(r->exchange, cut->each * cut->record_bytes, &r->message, &r->result,
                             err));
    sw_block_cut_visit(cut, encode, NULL);
    for (size_t rank = 0; rank < ranks; ++rank) {
        size_t used = cut->owners[rank].end - cut->owners[rank].begin;
        memset(r->message + (rank * cut->each + used) * cut->record_bytes, 0,
               (cut->each - used) * cut->record_bytes);
    }
    SW_TRY(sw_exchange_scatter(r->exchange, pieces, err));
    sw_block_fold(&cut->codec, r->result, (const unsigned char *const *)(const void *)pieces, ranks,
                  cut->each, (float)(1.0 / cut->world_size), rest);
    SW_TRY(keeps_slice ? take_slice(r, err) : take_whole(r, err));
    return r->keeps ? add_rest(r, rest, err) : SW_OK;
}

sw_status sw_block_round(sw_compressor *c, const sw_compressor_bucket *bucket, float *flat,
                         sw_exchange *exchange, sw_error *err)
{
    block_round r = {.exchange = exchange, .keeps_error = c->settings.error_feedback};
    sw_block_span *spans = calloc(bucket->count + 1, sizeof *spans);
    size_t count = 0;
    sw_status status = SW_OK;
    if (!spans)
        SW_FAIL(err, SW_E_MEMORY, "no memory for a bucket's records");
    for (const sw_compressor_member *m = bucket->members; m < bucket->members + bucket->count;
         ++m) {
        if (!m->used)
            continue;
        if (r.keeps_error)
            SW_TRY_GOTO(status, sw_compressor_make(c, m->entry, err), done);
        spans[count++] = (sw_block_span){.values = flat + m->offset,
                                         .error = c->entries[m->entry].part[SW_PART_ERROR],
                                         .offset = m->offset,
                                         .numel = m->numel};
    }
    SW_TRY_GOTO(status,
                sw_block_cut_init(&r.cut, &c->settings.blocks, spans, count, bucket->share,
                                  bucket->keeps_slice, exchange->rank, exchange->world_size, err),
                done);
    status = run(&r, c, bucket->keeps_slice, err);
    sw_block_cut_fini(&r.cut);
done:
    free(spans);
    return status;
}
