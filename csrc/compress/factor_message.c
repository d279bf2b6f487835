/* factor_message.c - see the header. */
#include "compress/factor_message.h"

#include <string.h>

#include "base/bytes.h"
#include "comm/comm.h"
#include "kernels/compress_kernels.h"
#include "kernels/kernels.h"

static size_t ranks_of(const sw_factor_message *m)
{
    return (size_t)m->exchange->world_size;
}

/* Copy the small parameters one after the other, and append zeros up to `room` floats. */
static void pack(const sw_factor_message *m, float *to, size_t room)
{
    for (const sw_small *s = m->small; s < m->small + m->small_count; ++s) {
        memcpy(to, s->values, s->numel * sizeof *to);
        to += s->numel;
    }
    memset(to, 0, (room - m->small_numel) * sizeof *to);
}

static void unpack(const sw_factor_message *m, const float *from)
{
    for (const sw_small *s = m->small; s < m->small + m->small_count; ++s) {
        memcpy(s->values, from, s->numel * sizeof *from);
        from += s->numel;
    }
}

static sw_status reserve(sw_factor_message *m, sw_compressor *c, sw_error *err)
{
    size_t whole = ranks_of(m) * m->share, small = ranks_of(m) * m->small_share;
    float *at = sw_scratch_reserve(&c->factors, 2 * whole + 2 * m->share + small, err);
    if (!at)
        return SW_E_MEMORY;
    m->own = at;
    m->whole = at + whole;
    m->sum = m->whole + whole;
    m->term = m->sum + m->share;
    m->flat = m->term + m->share;
    return SW_OK;
}

sw_status sw_factor_message_begin(sw_factor_message *m, sw_compressor *c, size_t head,
                                  const sw_small *small, size_t small_count, sw_exchange *exchange,
                                  float **own, sw_error *err)
{
    *m = (sw_factor_message){.exchange = exchange,
                             .wire = c->settings.wire,
                             .head = head,
                             .small = small,
                             .small_count = small_count};
    for (size_t i = 0; i < small_count; ++i)
        m->small_numel += small[i].numel;
    if (m->wire == SW_DTYPE_FLOAT32) {
        m->share = sw_compressor_slice_numel(head + m->small_numel, exchange->world_size);
        m->slice_bytes = m->share * sizeof(float);
        SW_TRY(sw_exchange_begin(exchange, m->slice_bytes, &m->message, &m->result, err));
        *own = (float *)(void *)m->message;
        return SW_OK;
    }
    m->share = sw_compressor_slice_numel(head, exchange->world_size);
    m->small_share =
        m->small_numel ? sw_compressor_slice_numel(m->small_numel, exchange->world_size) : 0;
    m->slice_bytes = 2 * m->share + 4 * m->small_share;
    SW_TRY(sw_exchange_begin(exchange, m->slice_bytes, &m->message, &m->result, err));
    SW_TRY(reserve(m, c, err));
    *own = m->own;
    return SW_OK;
}

static void encode(const sw_factor_message *m)
{
    pack(m, m->flat, ranks_of(m) * m->small_share);
    for (size_t rank = 0; rank < ranks_of(m); ++rank) {
        uint8_t *slice = m->message + rank * m->slice_bytes;
        size_t begin = sw_size_min(rank * m->share, m->head);
        size_t numel = sw_size_min(m->share, m->head - begin);
        sw_kernels()->compress->half_narrow((void *)slice, m->own + begin, numel,
                                            (float)(1.0 / m->exchange->world_size), m->wire);
        memset(slice + 2 * numel, 0, 2 * (m->share - numel));
        memcpy(slice + 2 * m->share, m->flat + rank * m->small_share, 4 * m->small_share);
    }
}

/* Sum in float32 and rank order, round once, and keep the sum before it is rounded. */
static sw_status fold(sw_factor_message *m, sw_error *err)
{
    const void *pieces[SW_COMM_MAX_WORLD];
    SW_TRY(sw_exchange_scatter(m->exchange, pieces, err));
    memset(m->sum, 0, m->share * sizeof *m->sum);
    for (size_t rank = 0; rank < ranks_of(m); ++rank) {
        sw_kernels()->compress->half_widen(m->term, pieces[rank], m->share, m->wire);
        for (size_t i = 0; i < m->share; ++i)
            m->sum[i] += m->term[i];
        pieces[rank] = (const uint8_t *)pieces[rank] + 2 * m->share;
    }
    sw_kernels()->compress->half_narrow((void *)m->result, m->sum, m->share, 1, m->wire);
    if (m->small_share)
        sw_exchange_fold(m->exchange, m->result + 2 * m->share, pieces, m->small_share,
                         SW_DTYPE_FLOAT32, SW_REDOP_MEAN);
    return SW_OK;
}

static sw_status average_half(sw_factor_message *m, float **mean, sw_error *err)
{
    uint8_t *received = m->message;
    encode(m);
    if (m->exchange->world_size > 1) {
        SW_TRY(fold(m, err));
        SW_TRY(sw_exchange_gather(m->exchange, &received, err));
    }
    for (size_t rank = 0; rank < ranks_of(m); ++rank) {
        const uint8_t *slice = received + rank * m->slice_bytes;
        sw_kernels()->compress->half_widen(m->whole + rank * m->share, (const void *)slice,
                                           m->share, m->wire);
        memcpy(m->flat + rank * m->small_share, slice + 2 * m->share, 4 * m->small_share);
    }
    unpack(m, m->flat);
    *mean = m->whole;
    return SW_OK;
}

sw_status sw_factor_message_average(sw_factor_message *m, float **mean, sw_error *err)
{
    uint8_t *whole;
    if (m->wire != SW_DTYPE_FLOAT32)
        return average_half(m, mean, err);
    pack(m, (float *)(void *)m->message + m->head, ranks_of(m) * m->share - m->head);
    SW_TRY(sw_exchange_fold_message(m->exchange, m->message, m->result, m->share, SW_DTYPE_FLOAT32,
                                    SW_REDOP_MEAN, &whole, err));
    *mean = (float *)(void *)whole;
    unpack(m, *mean + m->head);
    return SW_OK;
}

const float *sw_factor_message_settle(sw_factor_message *m)
{
    float ranks = (float)m->exchange->world_size;
    size_t first = (size_t)m->exchange->rank * m->share;
    for (size_t rank = 0; rank < ranks_of(m); ++rank)
        sw_kernels()->compress->half_widen(m->own + rank * m->share,
                                           (void *)(m->message + rank * m->slice_bytes), m->share,
                                           m->wire);
    for (size_t i = 0; m->exchange->world_size > 1 && i < ranks_of(m) * m->share; ++i)
        m->own[i] *= ranks;
    for (size_t i = 0; m->exchange->world_size > 1 && i < m->share; ++i) {
        float *own = &m->own[first + i];
        *own = *own + ranks * m->whole[first + i];
        *own = *own - ranks * m->sum[i];
    }
    return m->own;
}
