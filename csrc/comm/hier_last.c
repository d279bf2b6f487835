/* hier_last.c - messages that arrive while the carriers of all hosts are inside calls of the wire.
 *
 * An end message announces that a host has ended, and why. Any thread of the ending host's carrier
 * sends it. Its receive is posted from the start; the receiver polls the buffer instead of waiting,
 * and a checksum shows that all of it has arrived. It goes to the hosts that exchange frames with
 * this one, which then send their own, so an end spreads to all. A host sends up to four, because
 * it may learn a better reason from the hosts for which it waits.
 *
 * A probe detects a lost connection that the waiting call does not notice. The reset of a killed
 * process can get lost, and a pure receiver sends nothing that would cause another. Gloo also
 * reports no error to a wait for a partly received message. A probe is a few bytes that the peer's
 * kernel must acknowledge; once the connection is known to be lost, sending fails. The receiver
 * polls the next probe's buffer before it sends a frame, and reports in the frame how many it has
 * received, so that probes do not pile up. */
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#include "comm/hier_carrier_state.h"
#include "kernels/crc32c.h"

enum { END_MAGIC = 0x5357454f /* "SWEO" */ };

_Static_assert(sizeof(sw_end_message) % sizeof(uint32_t) == 0, "whole words");

static const uint64_t probe_text = UINT64_C(0x5357505200000000);

static uint32_t checksum(const sw_end_message *end)
{
    return sw_crc32c(0, end, offsetof(sw_end_message, crc));
}

static sw_status expect_probe(sw_carrier *carrier, sw_carrier_hop *hop, int from, sw_error *err)
{
    atomic_store(&hop->probe_place, 0);
    return sw_bridge_expect(&carrier->bridge, from, SW_MESSAGE_PROBE, hop->probes_taken + 1,
                            (void *)&hop->probe_place, sizeof hop->probe_place, &hop->probe_in,
                            err);
}

sw_status sw_carrier_expect_ends(sw_carrier *carrier, sw_error *err)
{
    const sw_dissemination *spread = &carrier->hier->spread;
    sw_status status = SW_OK;
    for (int p = 0; p < spread->peer_count; ++p)
        for (uint32_t i = 0; i < SW_HIER_ENDS && status == SW_OK; ++i)
            status = sw_bridge_expect(&carrier->bridge, spread->peers[p], SW_MESSAGE_END, i,
                                      &carrier->peers[p].end[i], sizeof(sw_end_message),
                                      &carrier->peers[p].in[i], err);
    for (int i = 0; i < spread->hop_count && status == SW_OK; ++i)
        status = expect_probe(carrier, &carrier->hops[i], spread->hops[i].to, err);
    return status == SW_OK ? SW_OK : sw_carrier_blame(carrier, "waiting for operations", err);
}

/* ---- end messages ---- */

/* Return the number of a new message; -1: its reason was sent already, or too many were. */
static int new_end(sw_carrier *carrier, const sw_error *reason)
{
    int number = -1;
    pthread_mutex_lock(&carrier->ends_lock);
    int sent = carrier->ends_sent;
    bool is_news =
        sent == 0 || strcmp(carrier->ends[sent - 1].reason.message, reason->message) != 0;
    if (is_news && sent < SW_HIER_ENDS) {
        sw_end_message *end = &carrier->ends[sent];
        end->magic = END_MAGIC;
        end->reason = *reason;
        end->crc = checksum(end);
        number = carrier->ends_sent++;
    }
    pthread_mutex_unlock(&carrier->ends_lock);
    return number;
}

void sw_carrier_send_end(sw_carrier *carrier, const sw_error *reason)
{
    const sw_dissemination *spread = &carrier->hier->spread;
    sw_error ignored;
    if ((int)getpid() != carrier->hier->owner_pid)
        return;
    int number = new_end(carrier, reason);
    for (int p = 0; p < spread->peer_count && number >= 0; ++p) {
        sw_transfer *transfer = &carrier->peers[p].out[number];
        if (sw_bridge_send(&carrier->bridge, spread->peers[p], SW_MESSAGE_END, (uint32_t)number,
                           &carrier->ends[number], sizeof carrier->ends[number], transfer,
                           &ignored) != SW_OK)
            transfer->work = NULL; /* it has ended already */
    }
}

/* The wire may write `place` meanwhile. */
static bool has_arrived(const sw_end_message *place, sw_end_message *end)
{
    const _Atomic uint32_t *arriving = (const void *)place;
    uint32_t words[sizeof *end / sizeof(uint32_t)];
    if (atomic_load_explicit(arriving, memory_order_relaxed) != END_MAGIC)
        return false;
    for (size_t i = 0; i < sizeof words / sizeof *words; ++i)
        words[i] = atomic_load_explicit(&arriving[i], memory_order_relaxed);
    memcpy(end, words, sizeof *end);
    return checksum(end) == end->crc;
}

bool sw_carrier_received_end(const sw_carrier *carrier, int peer, sw_error *reason)
{
    sw_end_message end;
    int last = SW_HIER_ENDS - 1;
    while (last >= 0 && !has_arrived(&carrier->peers[peer].end[last], &end))
        --last;
    if (last < 0)
        return false;
    *reason = end.reason;
    sw_carrier_take_reason(reason);
    return true;
}

/* ---- probes ---- */

static sw_carrier_hop *hop_from(const sw_carrier *carrier, int host)
{
    const sw_dissemination *spread = &carrier->hier->spread;
    for (int i = 0; i < spread->hop_count; ++i)
        if (spread->hops[i].from == host)
            return &carrier->hops[i];
    return NULL;
}

sw_status sw_carrier_probe(sw_carrier *carrier, int host, const char *what, sw_error *err)
{
    sw_carrier_hop *hop = hop_from(carrier, host);
    if (!hop)
        return SW_OK;
    uint32_t number = atomic_load(&hop->probes_sent) + 1, at = number % SW_HIER_PROBES;
    if (number - atomic_load(&hop->probes_settled) > SW_HIER_PROBES)
        return SW_OK;
    hop->probe_text[at] = probe_text | number;
    sw_status status = sw_bridge_probe(&carrier->bridge, host, number, &hop->probe_text[at],
                                       sizeof hop->probe_text[at], &hop->probe_out[at], err);
    if (status != SW_OK) {
        hop->probe_out[at].work = NULL;
        status = sw_carrier_blame(carrier, what, err);
    }
    atomic_store(&hop->probes_sent, number);
    return status;
}

sw_status sw_carrier_take_probes(sw_carrier *carrier, sw_carrier_hop *hop, int from, sw_error *err)
{
    while (atomic_load(&hop->probe_place) == (probe_text | (hop->probes_taken + 1))) {
        SW_TRY(sw_carrier_wait(carrier, &hop->probe_in, err));
        hop->probes_taken++;
        if (expect_probe(carrier, hop, from, err) != SW_OK)
            return sw_carrier_blame(carrier, carrier->what, err);
    }
    return SW_OK;
}

sw_status sw_carrier_settle_probes(sw_carrier *carrier, sw_carrier_hop *hop, int to, uint32_t taken,
                                   sw_error *err)
{
    uint32_t settled = atomic_load(&hop->probes_settled), sent = atomic_load(&hop->probes_sent);
    if (taken - settled > SW_HIER_PROBES)
        return sw_error_set(err, SW_E_COMM, sw_host_carrier(&carrier->hier->map, to),
                            "a frame acknowledges %u probes, but %u were sent", taken, sent);
    /* A peer may receive a probe while the posting thread is still inside the send: a later frame
     * acknowledges it again. */
    for (; settled != taken && settled != sent; atomic_store(&hop->probes_settled, ++settled))
        SW_TRY(sw_carrier_wait(carrier, &hop->probe_out[(settled + 1) % SW_HIER_PROBES], err));
    return SW_OK;
}
