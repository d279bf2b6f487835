/* hier_pack.c - see the header. */
#include "comm/hier_pack.h"

#include <string.h>

#include "kernels/compress_kernels.h"
#include "kernels/kernels.h"

static const uint64_t telling_bytes = 4 << 20; /* less is latency more than rate */
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
        SW_FAIL(err, SW_E_COMM, "a block of %zu elements came as a record of %llu bytes", numel,
                (unsigned long long)record_bytes);
    *size_bytes = SW_PACKET_HEAD_BYTES + (size_t)record_bytes;
    return SW_OK;
}

/* Whether `part` is at least 31/32 of `whole`. */
static bool is_most(uint64_t part, uint64_t whole)
{
    return part > whole - whole / 32;
}

void sw_packing_learn(sw_packing *packing, bool packed, uint64_t slow_bytes_per_s,
                      int64_t elapsed_ns)
{
    uint64_t plain = packing->plain_bytes, sent = packing->sent_bytes;
    packing->plain_bytes = packing->sent_bytes = 0;
    if (slow_bytes_per_s == 0 || slow_bytes_per_s == UINT64_MAX) {
        packing->on = slow_bytes_per_s > 0;
        return;
    }
    if (packing->pause > 0 && --packing->pause > 0)
        return;
    if (plain < telling_bytes)
        return;
    if (packed && is_most(sent, plain)) {
        packing->on = false;
        packing->pause = pause_batches;
        return;
    }
    /* Once packed it is faster: what it was before must not come back by that alone. */
    double rate = (double)plain * 1e9 / (double)(elapsed_ns > 0 ? elapsed_ns : 1);
    packing->on = rate < (double)slow_bytes_per_s * (packed ? 1.5 : 1.0);
}
