/* hier_last.c - what is said while the carriers of all hosts are inside calls of the wire.
 *
 * A host's last word: that it has ended, and why. Any thread of the ending host's carrier says it,
 * once; its place to arrive at is there from the beginning, and it is not waited for but looked at:
 * a checksum tells when all of it has come.
 *
 * Probes: a connection may be gone without the waiting call's knowing. The reset of a killed
 * process can be lost, and who only receives sends nothing that would bring another; and Gloo tells
 * nobody who waits for a message of which a part has come. A probe is a few bytes that ask for an
 * acknowledgement; where the connection is known to be gone, beginning to send it fails. The next
 * frame says how many were sent, so that the other side takes them in and nothing piles up. */
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#include "comm/hier_carrier.h"
#include "kernels/crc32c.h"

enum { LAST_MAGIC = 0x5357454e /* "SWEN" */ };

_Static_assert(sizeof(sw_last_word) % sizeof(uint32_t) == 0, "whole words");

static const uint64_t probe_text = UINT64_C(0x5357505253575052);

static uint32_t checksum(const sw_last_word *word)
{
    return sw_crc32c(0, word, offsetof(sw_last_word, crc));
}

sw_status sw_carrier_expect_last_words(sw_carrier *carrier, sw_error *err)
{
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        if (sw_bridge_receive(&carrier->bridge, g, SW_MESSAGE_LAST, 0, &carrier->last_words[g],
                              sizeof *carrier->last_words, &carrier->last_in[g], err) != SW_OK)
            return sw_carrier_blame(carrier, "waiting for operations", err);
    }
    return SW_OK;
}

void sw_carrier_say_last_word(sw_carrier *carrier, const sw_error *reason)
{
    sw_error ignored;
    if ((int)getpid() != carrier->hier->owner_pid || atomic_exchange(&carrier->last_said, true))
        return;
    sw_last_word *word = &carrier->last_words[carrier->hier->host];
    word->magic = LAST_MAGIC;
    word->reason = *reason;
    word->crc = checksum(word);
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        if (sw_bridge_send(&carrier->bridge, g, SW_MESSAGE_LAST, 0, word, sizeof *word,
                           &carrier->last_out[g], &ignored) != SW_OK)
            carrier->last_out[g].work = NULL; /* it has gone already */
    }
}

bool sw_carrier_hears_last_word(const sw_carrier *carrier, int host, sw_error *reason)
{
    /* The wire writes it meanwhile. */
    const _Atomic uint32_t *arriving = (const void *)&carrier->last_words[host];
    uint32_t words[sizeof(sw_last_word) / sizeof(uint32_t)];
    sw_last_word word;
    if (host == carrier->hier->host ||
        atomic_load_explicit(arriving, memory_order_relaxed) != LAST_MAGIC)
        return false;
    for (size_t i = 0; i < sizeof words / sizeof *words; ++i)
        words[i] = atomic_load_explicit(&arriving[i], memory_order_relaxed);
    memcpy(&word, words, sizeof word);
    if (checksum(&word) != word.crc)
        return false;
    *reason = word.reason;
    reason->message[sizeof reason->message - 1] = '\0';
    return true;
}

static sw_transfer *probe_at(const sw_carrier *carrier, uint32_t number, int host)
{
    size_t row = number % SW_HIER_PROBES;
    return &carrier->probe_out[row * (size_t)carrier->hier->map.host_count + (size_t)host];
}

sw_status sw_carrier_probe(sw_carrier *carrier, int host, const char *what, sw_error *err)
{
    uint32_t number = atomic_load(&carrier->probes_sent) + 1;
    sw_status status = SW_OK;
    sw_error failure;
    if (number - atomic_load(&carrier->probes_settled) > SW_HIER_PROBES)
        return SW_OK;
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        sw_transfer *transfer = probe_at(carrier, number, g);
        if (sw_bridge_probe(&carrier->bridge, g, number, &probe_text, sizeof probe_text, transfer,
                            &failure) == SW_OK)
            continue;
        transfer->work = NULL;
        if (g == host) {
            *err = failure;
            status = sw_carrier_blame(carrier, what, err);
        }
    }
    atomic_store(&carrier->probes_sent, number);
    return status;
}

sw_status sw_carrier_settle_probes(sw_carrier *carrier, const char *what, sw_error *err)
{
    uint64_t text;
    uint32_t settled = atomic_load(&carrier->probes_settled);
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        uint32_t *heard = &carrier->probes_heard[g], sent = carrier->in[g].probes;
        if (sent - *heard > SW_HIER_PROBES)
            return sw_error_set(err, SW_E_COMM, sw_host_carrier(&carrier->hier->map, g),
                                "a frame tells of %u probes after %u", sent, *heard);
        while (*heard != sent) {
            sw_transfer transfer;
            ++*heard;
            if (sw_bridge_receive(&carrier->bridge, g, SW_MESSAGE_PROBE, *heard, &text, sizeof text,
                                  &transfer, err) != SW_OK)
                return sw_carrier_blame(carrier, what, err);
            SW_TRY(sw_carrier_wait(carrier, &transfer, what, err));
        }
    }
    for (; settled != carrier->out.probes; atomic_store(&carrier->probes_settled, ++settled)) {
        SW_FOR_OTHER_HOSTS(carrier, g)
        {
            SW_TRY(sw_carrier_wait(carrier, probe_at(carrier, settled + 1, g), what, err));
        }
    }
    return SW_OK;
}
