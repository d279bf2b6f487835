/* hier_last.c - what is said while the carriers of all hosts are inside calls of the wire.
 *
 * Last words: that a host has ended, and why. Any thread of the ending host's carrier says one; its
 * place to arrive at is there from the beginning, and it is not waited for but looked at: a
 * checksum tells when all of it has come. They go to the hosts that frames go to and come from, and
 * those say it again of themselves: an end spreads as operations do. A host says up to four: it may
 * learn a better reason from those whom it asks what they wait for.
 *
 * Probes: a connection may be gone without the waiting call's knowing. The reset of a killed
 * process can be lost, and who only receives sends nothing that would bring another; and Gloo tells
 * nobody who waits for a message of which a part has come. A probe is a few bytes that ask for an
 * acknowledgement; where the connection is known to be gone, beginning to send it fails. The one
 * that is waited for looks at the next one's place before it sends a frame, and says in it how many
 * it has taken in, so that nothing piles up. */
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#include "comm/hier_carrier.h"
#include "kernels/crc32c.h"

enum { LAST_MAGIC = 0x5357454f /* "SWEO" */ };

_Static_assert(sizeof(sw_last_word) % sizeof(uint32_t) == 0, "whole words");

static const uint64_t probe_text = UINT64_C(0x5357505200000000);

static uint32_t checksum(const sw_last_word *word)
{
    return sw_crc32c(0, word, offsetof(sw_last_word, crc));
}

static sw_status expect_probe(sw_carrier *carrier, sw_carrier_hop *hop, int from, sw_error *err)
{
    atomic_store(&hop->probe_place, 0);
    return sw_bridge_expect(&carrier->bridge, from, SW_MESSAGE_PROBE, hop->probes_heard + 1,
                            (void *)&hop->probe_place, sizeof hop->probe_place, &hop->probe_in,
                            err);
}

sw_status sw_carrier_expect_words(sw_carrier *carrier, sw_error *err)
{
    const sw_dissemination *spread = &carrier->hier->spread;
    sw_status status = SW_OK;
    for (int p = 0; p < spread->peer_count; ++p)
        for (uint32_t i = 0; i < SW_HIER_WORDS && status == SW_OK; ++i)
            status = sw_bridge_expect(&carrier->bridge, spread->peers[p], SW_MESSAGE_LAST, i,
                                      &carrier->peers[p].word[i], sizeof(sw_last_word),
                                      &carrier->peers[p].in[i], err);
    for (int i = 0; i < spread->hop_count && status == SW_OK; ++i)
        status = expect_probe(carrier, &carrier->hops[i], spread->hops[i].to, err);
    return status == SW_OK ? SW_OK : sw_carrier_blame(carrier, "waiting for operations", err);
}

/* Last words
 * ------------------------------------------------------------------------------------------ */

/* The number of a word that says this; -1: it has been said, or too much has. */
static int new_word(sw_carrier *carrier, const sw_error *reason)
{
    int number = -1;
    pthread_mutex_lock(&carrier->words_lock);
    int said = carrier->words_said;
    bool is_news =
        said == 0 || strcmp(carrier->said[said - 1].reason.message, reason->message) != 0;
    if (is_news && said < SW_HIER_WORDS) {
        sw_last_word *word = &carrier->said[said];
        word->magic = LAST_MAGIC;
        word->reason = *reason;
        word->crc = checksum(word);
        number = carrier->words_said++;
    }
    pthread_mutex_unlock(&carrier->words_lock);
    return number;
}

void sw_carrier_say_last_word(sw_carrier *carrier, const sw_error *reason)
{
    const sw_dissemination *spread = &carrier->hier->spread;
    sw_error ignored;
    if ((int)getpid() != carrier->hier->owner_pid)
        return;
    int number = new_word(carrier, reason);
    for (int p = 0; p < spread->peer_count && number >= 0; ++p) {
        sw_transfer *transfer = &carrier->peers[p].out[number];
        if (sw_bridge_send(&carrier->bridge, spread->peers[p], SW_MESSAGE_LAST, (uint32_t)number,
                           &carrier->said[number], sizeof carrier->said[number], transfer,
                           &ignored) != SW_OK)
            transfer->work = NULL; /* it has gone already */
    }
}

/* The wire writes it meanwhile. */
static bool has_come(const sw_last_word *place, sw_last_word *word)
{
    const _Atomic uint32_t *arriving = (const void *)place;
    uint32_t words[sizeof *word / sizeof(uint32_t)];
    if (atomic_load_explicit(arriving, memory_order_relaxed) != LAST_MAGIC)
        return false;
    for (size_t i = 0; i < sizeof words / sizeof *words; ++i)
        words[i] = atomic_load_explicit(&arriving[i], memory_order_relaxed);
    memcpy(word, words, sizeof *word);
    return checksum(word) == word->crc;
}

bool sw_carrier_hears_last_word(const sw_carrier *carrier, int peer, sw_error *reason)
{
    sw_last_word word;
    int last = SW_HIER_WORDS - 1;
    while (last >= 0 && !has_come(&carrier->peers[peer].word[last], &word))
        --last;
    if (last < 0)
        return false;
    *reason = word.reason;
    reason->message[sizeof reason->message - 1] = '\0';
    return true;
}

/* Probes
 * ------------------------------------------------------------------------------------------ */

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

sw_status sw_carrier_take_probes(sw_carrier *carrier, sw_carrier_hop *hop, int from,
                                 const char *what, sw_error *err)
{
    while (atomic_load(&hop->probe_place) == (probe_text | (hop->probes_heard + 1))) {
        SW_TRY(sw_carrier_wait(carrier, &hop->probe_in, what, err));
        hop->probes_heard++;
        if (expect_probe(carrier, hop, from, err) != SW_OK)
            return sw_carrier_blame(carrier, what, err);
    }
    return SW_OK;
}

sw_status sw_carrier_settle_probes(sw_carrier *carrier, sw_carrier_hop *hop, int to, uint32_t taken,
                                   const char *what, sw_error *err)
{
    uint32_t settled = atomic_load(&hop->probes_settled), sent = atomic_load(&hop->probes_sent);
    if (taken - settled > SW_HIER_PROBES)
        return sw_error_set(err, SW_E_COMM, sw_host_carrier(&carrier->hier->map, to),
                            "a frame tells of %u probes, of %u sent", taken, sent);
    /* A probe may be taken in while the posting thread is still inside its send: a later frame
     * tells of it again. */
    for (; settled != taken && settled != sent; atomic_store(&hop->probes_settled, ++settled))
        SW_TRY(
            sw_carrier_wait(carrier, &hop->probe_out[(settled + 1) % SW_HIER_PROBES], what, err));
    return SW_OK;
}
