/* block_round.c - a bucket as records of block-scaled integers: see docs/design/compress_codecs.md.
 *
 * Records are counted over the parameters that take part, each from its own first element. A record
 * belongs to the rank whose slice holds its first element. With kept slices, the rank whose slice
 * begins inside a record folds it too. */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "comm/comm.h"
#include "compress/compressor_state.h"

typedef struct span { /* a parameter's run in the bucket, and its first record */
    float *values, *error;
    size_t offset, numel, first;
} span;

typedef struct owner { /* folds records [begin, end); owns those from `own` on */
    size_t begin, own, end;
} owner;

typedef struct part { /* records of one parameter in one owner's slice of the message */
    size_t at;        /* number of the first record in the message */
    float *values, *error;
    size_t numel;
    bool is_copy; /* the previous owner has these records, too */
} part;

typedef struct block_round {
    const sw_block_codec *codec;
    sw_exchange *exchange;
    span *spans; /* owned */
    size_t span_count, record_count;
    owner *owners; /* owned; world_size */
    size_t each;   /* records of a slice of the message */
    size_t record_bytes;
    uint8_t *message, *result;
    bool keeps_error;
} block_round;

static size_t records_of(const block_round *r, size_t numel)
{
    return (numel + r->codec->block - 1) / r->codec->block;
}

/* Return the first record that begins at `element` of the bucket or after it. */
static size_t first_record(const block_round *r, size_t element)
{
    for (const span *s = r->spans; s < r->spans + r->span_count; ++s)
        if (element < s->offset + s->numel)
            return s->first + (element > s->offset ? records_of(r, element - s->offset) : 0);
    return r->record_count;
}

/* Return the record that crosses `element`; `own` if there is none. */
static size_t record_across(const block_round *r, size_t element, size_t own)
{
    for (const span *s = r->spans; s < r->spans + r->span_count; ++s) {
        size_t inside = element > s->offset ? element - s->offset : 0;
        if (0 < inside && inside < s->numel && inside % r->codec->block)
            return s->first + inside / r->codec->block;
    }
    return own;
}

static void cut(block_round *r, const sw_compressor_bucket *bucket)
{
    size_t ranks = (size_t)r->exchange->world_size;
    size_t each = sw_size_max(1, (r->record_count + ranks - 1) / ranks);
    r->each = 1;
    for (size_t rank = 0; rank < ranks; ++rank) {
        owner *o = &r->owners[rank];
        if (!bucket->share) {
            o->begin = o->own = sw_size_min(rank * each, r->record_count);
            o->end = sw_size_min((rank + 1) * each, r->record_count);
        } else {
            o->own = first_record(r, rank * bucket->share);
            o->begin =
                bucket->keeps_slice ? record_across(r, rank * bucket->share, o->own) : o->own;
            o->end = first_record(r, (rank + 1) * bucket->share);
        }
        r->each = sw_size_max(r->each, o->end - o->begin);
    }
}

typedef void part_fn(const block_round *r, const part *p, void *context);

/* Call `visit` for the parts of one owner's records from `low` to `high`. */
static void visit_between(const block_round *r, size_t rank, size_t low, size_t high,
                          part_fn *visit, void *context)
{
    const owner *o = &r->owners[rank];
    for (const span *s = r->spans; s < r->spans + r->span_count; ++s) {
        size_t begin = sw_size_max(low, s->first);
        size_t end = sw_size_min(high, s->first + records_of(r, s->numel));
        if (begin >= end)
            continue;
        size_t skip = (begin - s->first) * r->codec->block;
        part p = {.at = rank * r->each + begin - o->begin,
                  .values = s->values + skip,
                  .error = s->error ? s->error + skip : NULL,
                  .numel = sw_size_min((end - begin) * r->codec->block, s->numel - skip),
                  .is_copy = low < o->own};
        visit(r, &p, context);
    }
}

static void visit_parts(const block_round *r, part_fn *visit, void *context)
{
    for (size_t rank = 0; rank < (size_t)r->exchange->world_size; ++rank) {
        const owner *o = &r->owners[rank];
        visit_between(r, rank, o->begin, o->own, visit, context);
        visit_between(r, rank, o->own, o->end, visit, context);
    }
}

static void encode(const block_round *r, const part *p, void *context)
{
    (void)context;
    sw_block_encode(r->codec, r->message + p->at * r->record_bytes, p->values, p->error, p->numel);
}

typedef struct decoding {
    const uint8_t *whole;
    bool keeps;
} decoding;

static void decode(const block_round *r, const part *p, void *context)
{
    const decoding *d = context;
    size_t at = p->at * r->record_bytes;
    sw_block_decode(r->codec, p->values, d->whole + at, d->keeps ? p->error : NULL, r->message + at,
                    p->numel);
}

/* The decoded message replaces the gradient; results overwrite it afterwards. */
static void keep_error(const block_round *r, const part *p, void *context)
{
    const uint8_t *own = r->message + p->at * r->record_bytes;
    (void)context;
    if (!p->is_copy)
        sw_block_decode(r->codec, p->values, own, p->error, own, p->numel);
}

static void decode_own(const block_round *r, const part *p, void *context)
{
    size_t first = (size_t)r->exchange->rank * r->each;
    (void)context;
    if (first <= p->at && p->at < first + r->each)
        sw_block_decode(r->codec, p->values, r->result + (p->at - first) * r->record_bytes, NULL,
                        NULL, p->numel);
}

/* Decode every owner's results. *keeps: the verdict, that errors change. */
static sw_status take_whole(block_round *r, bool *keeps, sw_error *err)
{
    uint8_t *whole;
    SW_TRY(sw_exchange_gather(r->exchange, &whole, err));
    *keeps = r->keeps_error &&
             sw_block_is_finite(r->codec, whole, r->each * (size_t)r->exchange->world_size);
    decoding d = {.whole = whole, .keeps = *keeps};
    visit_parts(r, decode, &d);
    return SW_OK;
}

/* The same for this rank's results alone. */
static sw_status take_slice(block_round *r, bool *keeps, sw_error *err)
{
    bool finite = sw_block_is_finite(r->codec, r->result, r->each);
    SW_TRY(sw_exchange_agree(r->exchange, &finite, err));
    *keeps = finite && r->keeps_error;
    if (*keeps)
        visit_parts(r, keep_error, NULL);
    visit_parts(r, decode_own, NULL);
    return SW_OK;
}

/* The owner takes the rounding error of its folds, which began at record `begin`: W times, as the
 * next mean divides by W. */
static void add_rest(const block_round *r, const float *rest)
{
    const owner *o = &r->owners[r->exchange->rank];
    float ranks = (float)r->exchange->world_size;
    for (const span *s = r->spans; s < r->spans + r->span_count; ++s) {
        size_t block = r->codec->block, start = s->first * block;
        size_t low = sw_size_max(start, o->own * block);
        size_t high = sw_size_min(start + s->numel, o->end * block);
        for (size_t i = low; i < high; ++i)
            s->error[i - start] += rest[i - o->begin * block] * ranks;
    }
}

static sw_status run(block_round *r, sw_compressor *c, const sw_compressor_bucket *bucket,
                     sw_error *err)
{
    const void *pieces[SW_COMM_MAX_WORLD];
    size_t ranks = (size_t)r->exchange->world_size;
    float *rest = NULL;
    bool keeps = false;
    if (r->keeps_error && !(rest = sw_scratch_reserve(&c->rest, r->each * r->codec->block, err)))
        return SW_E_MEMORY;
    SW_TRY(sw_exchange_begin(r->exchange, r->each * r->record_bytes, &r->message, &r->result, err));
    visit_parts(r, encode, NULL);
    for (size_t rank = 0; rank < ranks; ++rank) {
        size_t used = r->owners[rank].end - r->owners[rank].begin;
        memset(r->message + (rank * r->each + used) * r->record_bytes, 0,
               (r->each - used) * r->record_bytes);
    }
    SW_TRY(sw_exchange_scatter(r->exchange, pieces, err));
    sw_block_fold(r->codec, r->result, (const unsigned char *const *)(const void *)pieces, ranks,
                  r->each, (float)(1.0 / r->exchange->world_size), rest);
    SW_TRY(bucket->keeps_slice ? take_slice(r, &keeps, err) : take_whole(r, &keeps, err));
    if (keeps)
        add_rest(r, rest);
    return SW_OK;
}

sw_status sw_block_round(sw_compressor *c, const sw_compressor_bucket *bucket, float *flat,
                         sw_exchange *exchange, sw_error *err)
{
    block_round r = {.codec = &c->settings.blocks,
                     .exchange = exchange,
                     .record_bytes = sw_block_codec_record_bytes(&c->settings.blocks),
                     .keeps_error = c->settings.error_feedback,
                     .spans = calloc(bucket->count + 1, sizeof *r.spans),
                     .owners = calloc((size_t)exchange->world_size, sizeof *r.owners)};
    sw_status status = SW_OK;
    if (!r.spans || !r.owners)
        SW_TRY_GOTO(status, sw_error_set(err, SW_E_MEMORY, -1, "no memory for a bucket's records"),
                    done);
    for (const sw_compressor_member *m = bucket->members; m < bucket->members + bucket->count;
         ++m) {
        if (!m->used)
            continue;
        if (r.keeps_error)
            SW_TRY_GOTO(status, sw_compressor_make(c, m->entry, err), done);
        r.spans[r.span_count++] = (span){.values = flat + m->offset,
                                         .error = c->entries[m->entry].part[SW_PART_ERROR],
                                         .offset = m->offset,
                                         .numel = m->numel,
                                         .first = r.record_count};
        r.record_count += records_of(&r, m->numel);
    }
    cut(&r, bucket);
    status = run(&r, c, bucket, err);
done:
    free(r.spans);
    free(r.owners);
    return status;
}
