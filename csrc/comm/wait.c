/* wait.c - see the header. */
#include "comm/wait.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "platform/clock.h"
#include "platform/process.h"

static const int64_t look_ns = 100 * 1000 * 1000, grace_ns = INT64_C(1000) * 1000 * 1000;

int64_t sw_wait_warn_ns(const sw_comm *comm)
{
    return comm->warn_after_ns > 0 ? comm->warn_after_ns : INT64_MAX;
}

sw_wait sw_wait_begin(const sw_comm *comm, void *context,
                      void (*describe)(void *context, sw_wait_text *text))
{
    return (sw_wait){.comm = comm,
                     .begun_ns = sw_clock_now_ns(),
                     .timeout_ns = comm->timeout_ns,
                     .warn_ns = sw_wait_warn_ns(comm),
                     .context = context,
                     .describe = describe};
}

/* Return the note of a rank of this host, and its number in messages; NULL: there are no more. */
static sw_wait_note *note_of(const sw_comm *comm, int local, int *name)
{
    sw_comm *plain = (sw_comm *)(uintptr_t)comm;
    sw_wait_note *found = comm->ops->note ? comm->ops->note(plain, local, name) : NULL;
    if (found)
        *name = sw_comm_name(comm, *name);
    return found;
}

static sw_wait_note *own_note(const sw_comm *comm)
{
    sw_wait_note *found;
    int name, own = sw_comm_name(comm, comm->rank);
    for (int l = 0; (found = note_of(comm, l, &name)) && name != own; ++l)
        ;
    return found;
}

/* Keep this rank's note valid. Its text may change during the wait, and costs a file of each
 * missing rank, so it is renewed a few times before each warning. */
static void keep_note(sw_wait *wait, int64_t waited_ns)
{
    const sw_comm *comm = wait->comm;
    int64_t now_ns = wait->begun_ns + waited_ns;
    if (waited_ns < sw_wait_warn_ns(comm) / 2)
        return;
    sw_wait_note *own = own_note(comm);
    if (!own)
        return;
    if (wait->noted_ns == 0 || now_ns - wait->noted_ns >= sw_wait_warn_ns(comm) / 4) {
        sw_wait_text text = {.rank = -1};
        wait->describe(wait->context, &text);
        sw_wait_note_write(own, text.what, text.rank);
        wait->noted_ns = now_ns;
    }
    sw_wait_note_renew(own, now_ns);
}

typedef struct line {
    char text[2 * SW_ERROR_MESSAGE_BYTES];
    size_t used;
} line;

static void SW_PRINTF(2, 3) add(line *to, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int more = vsnprintf(to->text + to->used, sizeof to->text - to->used, format, arguments);
    va_end(arguments);
    to->used = strnlen(to->text, sizeof to->text - 1);
    (void)more;
}

/* The lowest waiting rank of a host tells what the others wait for. */
static void add_others(const sw_comm *comm, const sw_wait_text *mine, int64_t now_ns, line *to)
{
    int own = sw_comm_name(comm, comm->rank), name, awaited, alike = 0;
    char what[SW_WAIT_NOTE_BYTES], same[SW_WAIT_NOTE_BYTES];
    line others = {.used = 0}, names = {.used = 0};
    const sw_wait_note *note;
    snprintf(same, sizeof same, "%.*s", sw_text_fit(mine->what, sizeof same - 1), mine->what);
    for (int l = 0; (note = note_of(comm, l, &name)); ++l) {
        if (name == own || !sw_wait_note_read(note, now_ns, what, &awaited))
            continue;
        if (name < own)
            return;
        if (awaited == mine->rank && strcmp(what, same) == 0)
            add(&names, "%s%d", alike++ > 0 ? ", " : "", name);
        else if (awaited >= 0)
            add(&others, "; rank %d waits in %s for rank %d", name, what, awaited);
    }
    if (alike > 0)
        add(to, ", and so %s %.300s", alike == 1 ? "does rank" : "do ranks", names.text);
    add(to, "%.400s", others.text);
}

static void warn(sw_wait *wait, const sw_wait_text *text, int64_t waited_ns)
{
    const sw_comm *comm = wait->comm;
    line message = {.used = 0};
    wait->warn_ns *= 2;
    if (!comm->hooks.log)
        return;
    add(&message, "rank %d has waited %.1f s in %.120s for %.250s", sw_comm_name(comm, comm->rank),
        (double)waited_ns * 1e-9, text->what, text->missing);
    add_others(comm, text, wait->begun_ns + waited_ns, &message);
    add(&message, "; the deadline is %.1f s", (double)comm->timeout_ns * 1e-9);
    sw_text_mend(message.text);
    comm->hooks.log(comm->hooks.context, message.text);
}

static sw_status give_up(const sw_wait *wait, const sw_wait_text *text, int64_t waited_ns,
                         sw_error *reason)
{
    return sw_error_set(reason, SW_E_TIMEOUT, text->rank,
                        "waited %.1f s (timeout_s=%.1f) in %s for %s", (double)waited_ns * 1e-9,
                        (double)wait->comm->timeout_ns * 1e-9, text->what, text->missing);
}

sw_status sw_wait_give_up(const sw_wait *wait, sw_error *reason)
{
    sw_wait_text text = {.rank = -1};
    wait->describe(wait->context, &text);
    return give_up(wait, &text, sw_clock_now_ns() - wait->begun_ns, reason);
}

bool sw_wait_add_missing(sw_wait_text *text, sw_comm *comm, int rank)
{
    char peer[SW_COMM_PEER_BYTES];
    size_t used = strlen(text->missing);
    sw_process_state state = sw_process_state_of(comm->ops->pid ? comm->ops->pid(comm, rank) : 0);
    bool is_stopped = state == SW_PROCESS_STOPPED;
    if (text->rank < 0)
        text->rank = sw_comm_name(comm, rank);
    if (is_stopped && !text->is_stopped)
        text->stopped = sw_comm_name(comm, rank);
    text->is_stopped = text->is_stopped || is_stopped;
    comm->ops->peer(comm, rank, peer);
    bool is_known = state != SW_PROCESS_UNKNOWN;
    snprintf(text->missing + used, sizeof text->missing - used, "%s%s%s%s%s", used ? ", " : "",
             peer, is_known ? " (" : "", sw_process_state_text(state), is_known ? ")" : "");
    return strlen(text->missing) + 1 < sizeof text->missing;
}

/* Check for stopped peers from time to time, since it reads a file of each missing one. If one goes
 * on and another is stopped, their times add up. Time without checks does not count: then this rank
 * was stopped too, as in a suspended job. */
static sw_status check_stopped(sw_wait *wait, sw_error *reason)
{
    int64_t now_ns = sw_clock_now_ns(), silent_ns = wait->comm->silent_ns;
    int64_t pause_ns = silent_ns / 4 < look_ns ? silent_ns / 4 : look_ns;
    int64_t passed_ns = now_ns - wait->looked_ns;
    sw_wait_text text = {.rank = -1};
    if (silent_ns == 0 || passed_ns < pause_ns)
        return SW_OK;
    if (wait->stopped_ns != 0 && passed_ns > 4 * pause_ns)
        wait->stopped_ns += passed_ns - pause_ns;
    wait->looked_ns = now_ns;
    wait->describe(wait->context, &text);
    if (!text.is_stopped)
        wait->stopped_ns = 0;
    else if (wait->stopped_ns == 0)
        wait->stopped_ns = now_ns;
    else if (now_ns - wait->stopped_ns >= silent_ns)
        return sw_error_set(
            reason, SW_E_COMM, text.stopped,
            "rank %d has been stopped for %.1f s (silent_s=%g) in %s, waited for: %s", text.stopped,
            (double)(now_ns - wait->stopped_ns) * 1e-9, (double)silent_ns * 1e-9, text.what,
            text.missing);
    return SW_OK;
}

sw_status sw_wait_check(sw_wait *wait, sw_error *reason)
{
    const sw_comm *comm = wait->comm;
    int64_t waited_ns = sw_clock_now_ns() - wait->begun_ns;
    sw_wait_text text = {.rank = -1};
    bool is_interrupted = comm->hooks.interrupted && comm->hooks.interrupted(comm->hooks.context);
    keep_note(wait, waited_ns);
    if (!is_interrupted && waited_ns < wait->warn_ns && waited_ns < wait->timeout_ns)
        return check_stopped(wait, reason);
    wait->describe(wait->context, &text);
    if (is_interrupted) {
        int name = sw_comm_name(comm, comm->rank);
        sw_error_set(reason, SW_E_COMM, name, "rank %d was interrupted while it waited in %s", name,
                     text.what);
        return SW_E_INTERRUPTED;
    }
    /* If all have come meanwhile, this thread was not run for long: the caller looks once more. */
    bool has_come = text.missing[0] == '\0' && waited_ns - wait->timeout_ns < grace_ns;
    if (waited_ns >= wait->timeout_ns && !has_come)
        return give_up(wait, &text, waited_ns, reason);
    if (text.missing[0] != '\0')
        warn(wait, &text, waited_ns);
    return SW_OK;
}

sw_status sw_wait_interrupted(sw_error *err)
{
    SW_FAIL(err, SW_E_INTERRUPTED, "interrupted while waiting for a peer");
}

/* ---- notes ---- */

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
