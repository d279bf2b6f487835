/* hier_block.c - see the header. */
#include "comm/hier_block.h"

#include <stdbool.h>
#include <string.h>

#include "base/bytes.h"
#include "kernels/compress_kernels.h"
#include "kernels/kernels.h"

/* ---- partial sums: halves go through float32 in blocks that stay in the L1 cache ---- */

enum { BLOCK_NUMEL = 1024 };

static bool is_half(sw_dtype dtype)
{
    return dtype == SW_DTYPE_FLOAT16 || dtype == SW_DTYPE_BFLOAT16;
}

sw_dtype sw_partial_dtype(sw_dtype dtype)
{
    return is_half(dtype) ? SW_DTYPE_FLOAT32 : dtype;
}

static void fold_halves(float *partial, const void *const *source, int source_count, size_t numel,
                        sw_dtype dtype, sw_redop op)
{
    float wide[BLOCK_NUMEL];
    for (size_t begin = 0; begin < numel; begin += BLOCK_NUMEL) {
        size_t count = sw_size_min(BLOCK_NUMEL, numel - begin);
        void *out = partial + begin;
        for (int s = 0; s < source_count; ++s) {
            const uint16_t *half = (const uint16_t *)source[s] + begin;
            const void *both[] = {out, wide};
            sw_kernels()->compress->half_widen(s ? wide : out, half, count, dtype);
            if (s)
                sw_kernels()->fold[SW_DTYPE_FLOAT32](&out, 1, both, 2, count, 1, op);
        }
    }
}

void sw_partial_fold(void *partial, const void *const *source, int source_count, size_t numel,
                     sw_dtype dtype, sw_redop op)
{
    op = op == SW_REDOP_MEAN ? SW_REDOP_SUM : op;
    if (is_half(dtype))
        fold_halves(partial, source, source_count, numel, dtype, op);
    else
        sw_kernels()->fold[dtype](&partial, 1, source, source_count, numel, 1, op);
}

static void finish_halves(void *const *destination, int destination_count,
                          const void *const *partial, int partial_count, size_t numel,
                          sw_dtype dtype, double scale, sw_redop op)
{
    float sum[BLOCK_NUMEL], next[BLOCK_NUMEL];
    uint16_t half[BLOCK_NUMEL];
    sw_redop joined = op == SW_REDOP_MEAN ? SW_REDOP_SUM : op;
    for (size_t begin = 0; begin < numel; begin += BLOCK_NUMEL) {
        size_t count = sw_size_min(BLOCK_NUMEL, numel - begin);
        void *out = sum;
        memcpy(sum, (const float *)partial[0] + begin, count * sizeof *sum);
        for (int p = 1; p < partial_count; ++p) {
            memcpy(next, (const float *)partial[p] + begin, count * sizeof *next);
            sw_kernels()->fold[SW_DTYPE_FLOAT32](&out, 1, (const void *const[]){sum, next}, 2,
                                                 count, 1, joined);
        }
        if (op == SW_REDOP_MEAN)
            sw_kernels()->fold[SW_DTYPE_FLOAT32](&out, 1, (const void *const[]){sum}, 1, count,
                                                 scale, op);
        sw_kernels()->compress->half_narrow(half, sum, count, 1, dtype);
        for (int d = 0; d < destination_count; ++d)
            memcpy((uint16_t *)destination[d] + begin, half, count * sizeof *half);
    }
}

void sw_partial_finish(void *const *destination, int destination_count, const void *const *partial,
                       int partial_count, size_t numel, sw_dtype dtype, double scale, sw_redop op)
{
    if (is_half(dtype))
        finish_halves(destination, destination_count, partial, partial_count, numel, dtype, scale,
                      op);
    else
        sw_kernels()->fold[dtype](destination, destination_count, partial, partial_count, numel,
                                  scale, op);
}

/* ---- packets ---- */

static const uint64_t counted_bytes = 512 << 10; /* a smaller batch measures latency */
static const uint64_t telling_bytes = 4 << 20;   /* total of consecutive batches */
static const uint32_t pause_batches = 64;

size_t sw_packet_fill(uint8_t *packet, const void *source, size_t numel)
{
    uint64_t record_bytes = sw_kernels()->compress->exact_pack(
        packet + SW_PACKET_HEAD_BYTES, numel * sizeof(float) - 1, source, numel);
    memcpy(packet, &record_bytes, sizeof record_bytes);
    if (record_bytes > 0)
        return SW_PACKET_HEAD_BYTES + (size_t)record_bytes;
    memcpy(packet + SW_PACKET_HEAD_BYTES, source, numel * sizeof(float));
    return sw_packet_most_bytes(numel);
}

sw_status sw_packet_open(void *out, const uint8_t *packet, size_t numel, size_t *size_bytes,
                         sw_error *err)
{
    uint64_t record_bytes;
    memcpy(&record_bytes, packet, sizeof record_bytes);
    if (record_bytes == 0) {
        memcpy(out, packet + SW_PACKET_HEAD_BYTES, numel * sizeof(float));
        *size_bytes = sw_packet_most_bytes(numel);
        return SW_OK;
    }
    if (record_bytes >= numel * sizeof(float) ||
        !sw_kernels()->compress->exact_unpack(out, packet + SW_PACKET_HEAD_BYTES,
                                              (size_t)record_bytes, numel))
        SW_FAIL(err, SW_E_COMM, "a packet of %zu elements has an invalid record of %llu bytes",
                numel, (unsigned long long)record_bytes);
    *size_bytes = SW_PACKET_HEAD_BYTES + (size_t)record_bytes;
    return SW_OK;
}

/* Return true if `part` is at least 31/32 of `whole`. */
static bool is_most(uint64_t part, uint64_t whole)
{
    return part > whole - whole / 32;
}

void sw_packing_learn(sw_packing *packing, bool packed, uint64_t slow_bytes_per_s,
                      int64_t elapsed_ns)
{
    sw_packing_span batch = packing->batch, *seen = &packing->seen;
    packing->batch = (sw_packing_span){.plain_bytes = 0};
    if (slow_bytes_per_s == 0 || slow_bytes_per_s == UINT64_MAX) {
        packing->on = slow_bytes_per_s > 0;
        return;
    }
    if (packing->pause > 0 && --packing->pause > 0)
        return;
    if (batch.plain_bytes < counted_bytes)
        return;
    if (packed != packing->seen_packed) /* the choice has changed since the last sample */
        *seen = (sw_packing_span){.plain_bytes = 0};
    packing->seen_packed = packed;
    seen->plain_bytes += batch.plain_bytes;
    seen->sent_bytes += batch.sent_bytes;
    seen->elapsed_ns += elapsed_ns > 0 ? elapsed_ns : 1;
    if (seen->plain_bytes < telling_bytes)
        return;
    /* Packing itself raises the rate; the margin keeps that from switching packing off. */
    double rate = (double)seen->plain_bytes * 1e9 / (double)seen->elapsed_ns;
    packing->on = rate < (double)slow_bytes_per_s * (packed ? 1.5 : 1.0);
    if (packed && is_most(seen->sent_bytes, seen->plain_bytes)) {
        packing->on = false;
        packing->pause = pause_batches;
    }
    *seen = (sw_packing_span){.plain_bytes = 0};
}
