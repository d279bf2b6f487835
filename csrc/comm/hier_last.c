/* hier_last.c - a host's last word: that it has ended, and why, to be heard while the carriers of
 * all hosts are inside calls of the wire. Any thread of the ending host's carrier says it, once;
 * its place to arrive at is there from the beginning, and it is not waited for but looked at: a
 * checksum tells when all of it has come. */
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#include "comm/hier_carrier.h"
#include "kernels/crc32c.h"

enum { LAST_MAGIC = 0x5357454e /* "SWEN" */ };

static uint32_t checksum(const sw_last_word *word)
{
    return sw_crc32c(0, word, offsetof(sw_last_word, crc));
}

sw_status sw_carrier_expect_last_words(sw_carrier *carrier, sw_error *err)
{
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        sw_transfer never_waited_for;
        if (sw_bridge_receive(&carrier->bridge, g, SW_MESSAGE_LAST, 0, &carrier->last_words[g],
                              sizeof *carrier->last_words, &never_waited_for, err) != SW_OK)
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
        sw_transfer never_waited_for;
        if (sw_bridge_send(&carrier->bridge, g, SW_MESSAGE_LAST, 0, word, sizeof *word,
                           &never_waited_for, &ignored) != SW_OK)
            continue; /* it has gone already */
    }
}

bool sw_carrier_hears_last_word(const sw_carrier *carrier, int host, sw_error *reason)
{
    const volatile sw_last_word *arriving = &carrier->last_words[host];
    if (host == carrier->hier->host || arriving->magic != LAST_MAGIC)
        return false;
    sw_last_word word;
    memcpy(&word, &carrier->last_words[host], sizeof word);
    if (checksum(&word) != word.crc)
        return false;
    *reason = word.reason;
    reason->message[sizeof reason->message - 1] = '\0';
    return true;
}
