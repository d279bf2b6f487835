/* wait_note.c - see wait_note.h. */
#include "comm/wait_note.h"

#include <string.h>

#include "base/text.h"

/* A turn of a wait takes 20 to 100 ms on a quiet machine. */
static const int64_t valid_ns = INT64_C(1000) * 1000 * 1000;

void sw_wait_note_write(sw_wait_note *note, const char *what, int awaited)
{
    uint64_t words[SW_WAIT_NOTE_WORDS] = {0};
    uint32_t version = atomic_load(&note->version);
    memcpy(words, what, (size_t)sw_text_fit(what, sizeof words - 1));
    if (version % 2 == 1 || !atomic_compare_exchange_strong(&note->version, &version, version + 1))
        return; /* another thread of this rank writes one */
    for (int i = 0; i < SW_WAIT_NOTE_WORDS; ++i)
        atomic_store(&note->what[i], words[i]);
    atomic_store(&note->awaited, awaited);
    atomic_store(&note->version, version + 2);
}

bool sw_wait_note_read(const sw_wait_note *note, int64_t now_ns, char what[SW_WAIT_NOTE_BYTES],
                       int *awaited)
{
    uint64_t words[SW_WAIT_NOTE_WORDS];
    uint32_t version = atomic_load(&note->version);
    int64_t renewed_ns = atomic_load(&note->renewed_ns);
    if (renewed_ns == 0 || now_ns - renewed_ns > valid_ns || version % 2 == 1)
        return false;
    for (int i = 0; i < SW_WAIT_NOTE_WORDS; ++i)
        words[i] = atomic_load(&note->what[i]);
    *awaited = atomic_load(&note->awaited);
    memcpy(what, words, sizeof words);
    what[SW_WAIT_NOTE_BYTES - 1] = '\0';
    return atomic_load(&note->version) == version;
}
