/* account.c - see the header. */
#include "comm/account.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/text.h"
#include "platform/clock.h"
#include "platform/file.h"
#include "platform/memory.h"
#include "platform/spans.h"

_Static_assert(sizeof(sw_account_row) == 152, "the file's format");
_Static_assert(sizeof(sw_account_op) == 128, "the file's format");
_Static_assert(offsetof(sw_account_head, call) == 208, "the file's format");
_Static_assert(offsetof(sw_account_head, first_unix_ns) == 1232, "the file's format");
_Static_assert(sizeof(sw_account_group) == 136, "the file's format");
_Static_assert(offsetof(sw_account, rows) == 4096, "the file's format");

/* A name has so many words; the rest is for sentences. */
enum { CALL_WORDS = 12 };
/* A wait whose last turn is older has ended. */
static const int64_t same_wait_ns = INT64_C(1000) * 1000 * 1000;

static sw_account plain = {.head = {.magic = "swstep", .wait_rank = -1}};
static sw_account *_Atomic current = &plain;
static uint8_t *mapping; /* owned: of `current`; NULL while that is `plain` */
static uint8_t *before;  /* owned: of the file before, or NULL */

/* What belongs to the step that is on, and is no part of the file. */
static struct {
    sw_phase phase, around;     /* around: the phase that a save interrupts */
    int64_t since_ns, begun_ns; /* begun_ns: 0 before the first forward */
    int64_t phase_ns[SW_PHASE_COUNT];
    uint32_t forwards; /* since the last row */
    bool is_in_step;   /* an optimizer's step is on: a closure's forward may begin in it */
    bool is_stepping;  /* an optimizer has stepped since the last forward */
    bool is_saving;
} now;
static _Atomic int64_t waited_ns[SW_PHASE_COUNT], slept_for_ns[SW_ACCOUNT_RANKS];
static _Atomic int slept_for_count; /* ranks in slept_for_ns so far */
static _Atomic uint64_t begun_bytes, moved_bytes[SW_LINK_COUNT];

static sw_account *account(void)
{
    return atomic_load_explicit(&current, memory_order_acquire);
}

const sw_account *sw_account_get(void)
{
    return account();
}

/* ---- where it lies ---- */

/* The 22nd field of /proc/self/stat, after the name, which may contain spaces. */
static uint64_t start_ticks(void)
{
    char text[1024] = "";
    int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    const char *at = length > 0 ? strrchr(text, ')') : NULL;
    for (int field = 2; at && field < 22; ++field)
        at = strchr(at + 1, ' ');
    return at ? strtoull(at + 1, NULL, 10) : 0;
}

static void introduce(sw_account_head *head, int rank, int world_size, const char *host)
{
    struct timespec unix_now;
    memcpy(head->magic, "swstep\0", sizeof head->magic);
    head->version = SW_ACCOUNT_VERSION;
    head->head_bytes = offsetof(sw_account, rows);
    head->row_bytes = sizeof(sw_account_row);
    head->rows = SW_ACCOUNT_ROWS;
    head->op_bytes = sizeof(sw_account_op);
    head->ops = SW_ACCOUNT_OPS;
    head->pid = (int32_t)getpid();
    head->rank = rank;
    head->world_size = world_size;
    head->start_ticks = start_ticks();
    head->clock_ns = sw_clock_now_ns();
    clock_gettime(CLOCK_REALTIME, &unix_now);
    head->unix_ns = (int64_t)unix_now.tv_sec * 1000000000 + unix_now.tv_nsec;
    snprintf(head->host, sizeof head->host, "%.*s", sw_text_fit(host, sizeof head->host - 1), host);
}

/* Return the file's mapping; it has pages of the file system at once, so no later store fails. */
static sw_status map(int fd, const char *path, uint8_t **mapped, sw_error *err)
{
    /* never a file with holes: on a full disk a store into one is a SIGBUS */
    if (fallocate(fd, 0, 0, sizeof(sw_account)) != 0)
        return sw_error_set(err, SW_E_OS, errno, "the account of steps: %s has no room: %s", path,
                            strerror(errno));
    *mapped = sw_memory_reserve(sizeof(sw_account));
    if (!*mapped)
        SW_FAIL(err, SW_E_MEMORY, "the account of steps: no address space for %zu bytes",
                sizeof(sw_account));
    sw_status status = sw_memory_remap(*mapped, sizeof(sw_account), fd, 0, true, err);
    if (status != SW_OK)
        sw_memory_unmap(*mapped, sizeof(sw_account));
    return status;
}

sw_status sw_account_open(const char *path, int rank, int world_size, const char *host,
                          sw_error *err)
{
    uint8_t *mapped = NULL;
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return sw_error_set(err, SW_E_OS, errno, "the account of steps: cannot make %s: %s", path,
                            strerror(errno));
    sw_status status = fchmod(fd, 0600) == 0 /* whatever the umask */
                           ? map(fd, path, &mapped, err)
                           : sw_error_set(err, SW_E_OS, errno, "the account of steps: chmod %s: %s",
                                          path, strerror(errno));
    (void)!sw_file_close(&fd, path, NULL);
    if (status != SW_OK) {
        (void)!sw_file_remove(path, NULL);
        return status;
    }
    sw_account *moved = (sw_account *)(void *)mapped;
    memcpy(mapped, account(), sizeof *moved);
    if (mapping) { /* a later start in this process: the end of the one before is not its own */
        memset(&moved->head.reason, 0, sizeof moved->head.reason);
        atomic_store(&moved->head.ended, 0);
    }
    introduce(&moved->head, rank, world_size, host);
    atomic_store_explicit(&current, moved, memory_order_release);
    if (before) /* another thread may still store into the last one, so that stays mapped */
        sw_memory_unmap(before, sizeof(sw_account));
    before = mapping;
    mapping = mapped;
    return SW_OK;
}

static void forget_since_the_last_row(void)
{
    for (int i = 0; i < SW_PHASE_COUNT; ++i)
        atomic_store(&waited_ns[i], 0);
    for (int i = 0; i < SW_LINK_COUNT; ++i)
        atomic_store(&moved_bytes[i], 0);
    for (int i = 0; i < SW_ACCOUNT_RANKS; ++i)
        atomic_store(&slept_for_ns[i], 0);
    atomic_store(&begun_bytes, 0);
}

void sw_account_forget(void)
{
    if (mapping)
        sw_memory_unmap(mapping, sizeof(sw_account));
    if (before)
        sw_memory_unmap(before, sizeof(sw_account));
    before = mapping = NULL;
    memset(&plain, 0, sizeof plain);
    atomic_store(&plain.head.wait_rank, -1);
    atomic_store(&current, &plain);
    memset(&now, 0, sizeof now);
    forget_since_the_last_row();
    atomic_store(&slept_for_count, 0);
}

/* ---- texts ---- */

static void write_words(_Atomic uint64_t *words, size_t count, const char *text)
{
    uint64_t copy[63] = {0};
    memcpy(copy, text, (size_t)sw_text_fit(text, count * sizeof *copy - 1));
    for (size_t i = 0; i < count; ++i)
        atomic_store_explicit(&words[i], copy[i], memory_order_relaxed);
}

void sw_account_fail(const char *sentence)
{
    sw_account_text *reason = &account()->head.reason;
    if (reason->begun_ns != 0)
        return;
    write_words(reason->words, 63, sentence);
    reason->begun_ns = sw_clock_now_ns();
}

bool sw_account_end(void)
{
    atomic_store(&account()->head.ended, 1);
    return account()->head.reason.begun_ns == 0;
}

void sw_account_set_stack_signal(int number)
{
    atomic_store(&account()->head.stack_signal, number);
}

int sw_account_met(const sw_account_group *group, bool leads)
{
    sw_account_head *head = &account()->head;
    uint64_t count = atomic_load(&head->group_count), number = 1;
    if (leads) {
        atomic_store(&head->ended, 0);
        atomic_store(&head->group, group->id);
    }
    while (number <= count && head->groups[number - 1].id != group->id)
        number++;
    if (number > SW_ACCOUNT_GROUPS && !leads)
        return 0;
    if (number > SW_ACCOUNT_GROUPS) { /* the last one's place; its collectives lose their group */
        number = count;
        for (int i = 0; i < SW_ACCOUNT_OPS; ++i)
            if (atomic_load(&account()->operations[i].group) == number)
                atomic_store(&account()->operations[i].group, 0);
    }
    head->groups[number - 1] = *group;
    if (number > count)
        atomic_store_explicit(&head->group_count, number, memory_order_release);
    return (int)number;
}

void sw_account_restarted(int64_t first_unix_ns, int64_t kept_unix_ns, int64_t lost_ns,
                          uint64_t restarts)
{
    sw_account_head *head = &account()->head;
    head->first_unix_ns = first_unix_ns;
    head->kept_unix_ns = kept_unix_ns;
    head->lost_ns = lost_ns;
    head->restarts = restarts;
}

/* ---- phases ---- */

static void turn_to(sw_phase phase)
{
    sw_account_head *head = &account()->head;
    int64_t time_ns = sw_clock_now_ns();
    if (now.since_ns)
        now.phase_ns[now.phase] += time_ns - now.since_ns;
    sw_spans_add(SW_SPAN_PHASE, now.phase, now.since_ns, time_ns);
    now.since_ns = time_ns;
    now.phase = phase;
    atomic_store_explicit(&head->phase, (uint32_t)phase, memory_order_relaxed);
    atomic_store_explicit(&head->phase_begun_ns, time_ns, memory_order_release);
}

/* Find the rank for which most was slept since the last row. */
static void take_waits(sw_account_row *row)
{
    for (int r = 0; r < atomic_load_explicit(&slept_for_count, memory_order_relaxed); ++r) {
        int64_t slept_ns = 0;
        if (atomic_load_explicit(&slept_for_ns[r], memory_order_relaxed))
            slept_ns = atomic_exchange_explicit(&slept_for_ns[r], 0, memory_order_relaxed);
        if (slept_ns > row->late_ns) {
            row->late_ns = slept_ns;
            row->late_rank = r;
        }
    }
}

/* Add the time since the last row to row `step`: a new one, or the last one again for a second
 * optimizer, all of whose time is its own. */
static void write_row(sw_account *to, uint64_t step, bool again)
{
    sw_account_row *row = &to->rows[(step - 1) % SW_ACCOUNT_ROWS];
    atomic_store_explicit(&row->step, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    if (!again) {
        memset((char *)row + sizeof row->step, 0, sizeof *row - sizeof row->step);
        row->begun_ns = now.begun_ns;
        row->late_rank = -1;
    }
    for (int i = 0; i < SW_PHASE_COUNT; ++i) {
        int at = again && i == SW_PHASE_DATA ? SW_PHASE_OPTIMIZER : i;
        row->phase_ns[at] += now.phase_ns[i];
        row->wait_ns[at] += atomic_exchange_explicit(&waited_ns[i], 0, memory_order_relaxed);
        now.phase_ns[i] = 0;
    }
    take_waits(row);
    row->forwards += now.forwards;
    row->size_bytes += atomic_exchange_explicit(&begun_bytes, 0, memory_order_relaxed);
    for (int i = 1; i < SW_LINK_COUNT; ++i)
        if (atomic_load_explicit(&moved_bytes[i], memory_order_relaxed))
            row->link_bytes[i - 1] +=
                atomic_exchange_explicit(&moved_bytes[i], 0, memory_order_relaxed);
    row->ended_ns = now.begun_ns = now.since_ns;
    atomic_store_explicit(&to->head.ended, 0,
                          memory_order_relaxed); /* it goes on in other groups */
    now.forwards = 0;
    atomic_store_explicit(&row->step, step, memory_order_release);
}

void sw_account_enter(sw_phase phase)
{
    if (now.is_saving) { /* it ends with the call */
        now.around = phase;
        return;
    }
    if (phase == SW_PHASE_FORWARD && now.phase == SW_PHASE_OPTIMIZER && !now.is_stepping)
        now.phase = SW_PHASE_DATA; /* no step followed the backward */
    turn_to(phase);
    if (phase != SW_PHASE_FORWARD)
        return;
    if (now.begun_ns == 0) { /* what came before the first forward is no part of a step */
        memset(now.phase_ns, 0, sizeof now.phase_ns);
        forget_since_the_last_row();
        now.begun_ns = now.since_ns;
    }
    now.forwards++;
    now.is_stepping = now.is_in_step;
}

void sw_account_stepping(void)
{
    now.is_stepping = now.is_in_step = true;
}

uint64_t sw_account_stepped(void)
{
    sw_account *to = account();
    uint64_t step = atomic_load_explicit(&to->head.steps, memory_order_relaxed);
    bool again = now.forwards == 0;
    now.is_in_step = false;
    if (!now.is_stepping || now.begun_ns == 0 || (again && step == 0) || now.is_saving)
        return 0;
    turn_to(SW_PHASE_DATA);
    write_row(to, again ? step : ++step, again);
    atomic_store_explicit(&to->head.steps, step, memory_order_release);
    return again ? 0 : step;
}

void sw_account_call(const char *name, bool saves)
{
    sw_account_text *call = &account()->head.call;
    write_words(call->words, CALL_WORDS, name);
    call->begun_ns = sw_clock_now_ns();
    if (!saves || now.is_saving)
        return;
    now.around = now.phase;
    turn_to(SW_PHASE_SAVE);
    now.is_saving = true;
}

void sw_account_call_end(void)
{
    account()->head.call.begun_ns = 0;
    if (!now.is_saving)
        return;
    now.is_saving = false;
    turn_to(now.around);
}

/* ---- collectives and waits ---- */

void sw_account_moved(sw_link link, uint64_t size_bytes)
{
    atomic_fetch_add_explicit(&moved_bytes[link], size_bytes, memory_order_relaxed);
}

uint64_t sw_account_begin(const sw_account_use *use, uint32_t kind, const char *label,
                          uint64_t size_bytes, uint32_t step, uint32_t round)
{
    sw_account *to = account();
    uint64_t serial = atomic_fetch_add(&to->head.op_count, 1) + 1;
    sw_account_op *op = &to->operations[(serial - 1) % SW_ACCOUNT_OPS];
    atomic_store_explicit(&op->serial, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    op->kind = (uint16_t)kind;
    op->group = (uint16_t)use->group;
    op->number = use->number;
    op->step = step;
    op->round = round;
    op->size_bytes = size_bytes;
    atomic_fetch_add_explicit(&begun_bytes, size_bytes, memory_order_relaxed);
    sw_account_moved(use->link, size_bytes);
    write_words(op->label, sizeof op->label / sizeof *op->label, label);
    atomic_store_explicit(&op->posted, 0, memory_order_relaxed);
    atomic_store_explicit(&op->done, 0, memory_order_relaxed);
    atomic_store_explicit(&op->done_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&op->posted_ns, sw_clock_now_ns(), memory_order_relaxed);
    atomic_store_explicit(&op->serial, serial, memory_order_release);
    return serial;
}

static sw_account_op *find(uint64_t serial)
{
    sw_account_op *op = &account()->operations[(serial - 1) % SW_ACCOUNT_OPS];
    bool is_there = serial > 0 && atomic_load_explicit(&op->serial, memory_order_acquire) == serial;
    return is_there ? op : NULL;
}

void sw_account_post(uint64_t serial)
{
    sw_account_op *op = find(serial);
    if (op)
        atomic_fetch_add_explicit(&op->posted, 1, memory_order_relaxed);
}

void sw_account_done(uint64_t serial)
{
    sw_account_op *op = find(serial);
    if (!op)
        return;
    atomic_store_explicit(&op->done_ns, sw_clock_now_ns(), memory_order_relaxed);
    atomic_fetch_add_explicit(&op->done, 1, memory_order_release);
}

/* Return the number in the job of rank `rank` of a group; -1: it is not known. */
static int rank_in_job(const sw_account_head *head, int rank, int group)
{
    if (group <= 0)
        return group < 0 || atomic_load(&head->group_count) == 0 ? rank : -1;
    for (int found = 0; found < SW_ACCOUNT_RANKS; ++found)
        if ((head->groups[group - 1].ranks[found / 64] >> (found % 64) & 1) && rank-- == 0)
            return found;
    return -1;
}

int64_t sw_account_slept(int64_t begun_ns, int rank, int group)
{
    sw_account_head *head = &account()->head;
    int64_t time_ns = sw_clock_now_ns(), slept_ns = time_ns - begun_ns;
    sw_phase phase = (sw_phase)atomic_load_explicit(&head->phase, memory_order_relaxed);
    uint64_t serial = atomic_load_explicit(&head->op_count, memory_order_relaxed);
    int64_t turned_ns = atomic_load_explicit(&head->wait_turn_ns, memory_order_relaxed);
    atomic_fetch_add_explicit(&waited_ns[phase], slept_ns, memory_order_relaxed);
    int late = rank_in_job(head, rank, group);
    sw_spans_add(SW_SPAN_WAIT, late, begun_ns, time_ns);
    int count = atomic_load_explicit(&slept_for_count, memory_order_relaxed);
    while (late < SW_ACCOUNT_RANKS && late >= count &&
           !atomic_compare_exchange_weak(&slept_for_count, &count, late + 1))
        continue;
    if (late >= 0 && late < SW_ACCOUNT_RANKS)
        atomic_fetch_add_explicit(&slept_for_ns[late], slept_ns, memory_order_relaxed);
    if (serial != atomic_load_explicit(&head->wait_serial, memory_order_relaxed) ||
        begun_ns - turned_ns > same_wait_ns)
        atomic_store_explicit(&head->wait_begun_ns, begun_ns, memory_order_relaxed);
    atomic_store_explicit(&head->wait_serial, serial, memory_order_relaxed);
    atomic_store_explicit(&head->wait_rank, rank, memory_order_relaxed);
    atomic_store_explicit(&head->wait_group, (uint32_t)group, memory_order_relaxed);
    atomic_store_explicit(&head->wait_turn_ns, time_ns, memory_order_release);
    return slept_ns;
}
