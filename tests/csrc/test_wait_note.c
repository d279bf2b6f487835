/* test_wait_note.c - two threads of a rank write its note: whoever reads it sees one text whole. A
 * deadline that passes while this thread is not run ends no wait whose ranks have come meanwhile.
 */
#include <pthread.h>
#include <string.h>

#include "check.h"
#include "comm/wait.h"

enum { NOTES = 1000000 };

static sw_wait_note shared;
static _Atomic int left = 2;

static void *write_notes(void *argument)
{
    const char *letter = argument;
    char text[SW_WAIT_NOTE_BYTES];
    memset(text, *letter, sizeof text - 1);
    text[sizeof text - 1] = '\0';
    for (int i = 0; i < NOTES; ++i) {
        sw_wait_note_write(&shared, text, *letter);
        sw_wait_note_renew(&shared, 1);
    }
    atomic_fetch_sub(&left, 1);
    return NULL;
}

static bool is_one_text(const char *text, int letter)
{
    size_t length = strlen(text);
    for (size_t i = 0; i < length; ++i)
        if (text[i] != letter)
            return false;
    return length == SW_WAIT_NOTE_BYTES - 1;
}

static void describe(void *context, sw_wait_text *text)
{
    strcpy(text->what, "barrier 'b'");
    strcpy(text->missing, context);
}

static void test_a_deadline_that_nobody_missed(void)
{
    static const sw_comm_ops none;
    sw_comm comm = {.ops = &none, .world_size = 2, .timeout_ns = 1000};
    char missing[] = "rank 1";
    sw_error reason;
    sw_wait wait = sw_wait_begin(&comm, missing, describe);
    wait.begun_ns -= 2000;
    check(sw_wait_check(&wait, &reason) == SW_E_TIMEOUT, "a rank is missing at the deadline");
    missing[0] = '\0';
    check(sw_wait_check(&wait, &reason) == SW_OK, "all have come by the deadline");
    wait.begun_ns -= INT64_C(2000) * 1000 * 1000;
    check(sw_wait_check(&wait, &reason) == SW_E_TIMEOUT, "long after the deadline");
}

int main(void)
{
    test_a_deadline_that_nobody_missed();
    pthread_t writers[2];
    char text[SW_WAIT_NOTE_BYTES], letters[] = "ab";
    int letter;
    check(!sw_wait_note_read(&shared, 1, text, &letter), "a note before the first");
    for (int i = 0; i < 2; ++i)
        if (pthread_create(&writers[i], NULL, write_notes, &letters[i]) != 0)
            return 1;
    while (atomic_load(&left) > 0)
        if (sw_wait_note_read(&shared, 1, text, &letter))
            check(is_one_text(text, letter), "a mixed note: '%s' of %c", text, letter);
    for (int i = 0; i < 2; ++i)
        pthread_join(writers[i], NULL);
    check(sw_wait_note_read(&shared, 1, text, &letter) && is_one_text(text, letter),
          "the last note");
    return check_result();
}
