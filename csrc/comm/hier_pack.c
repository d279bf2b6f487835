/* hier_pack.c - see the header. */
#include "comm/hier_pack.h"

#include <string.h>

#include "kernels/compress_kernels.h"
#include "kernels/kernels.h"

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
