/* sim_core.c - the baton, clocks, histories of memory, and reports. */
#include "sim.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { TEXT_BYTES = 4096, IDLE_POLLS_MAX = 1000 };
/* Idle for so long, the device is stuck. ALONE_NS, where all ranks are threads, needs IDLE_POLLS_MAX
 * polls as well, and is longer than the shortest deadline of a test. */
static const int64_t PATIENCE_NS = 20000000000, ALONE_NS = 120000000;

sim_state sim = {.device_count = SIM_DEVICE_MAX, .version = 13000};

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
/* One condition a rank, since waking the other ranks as well costs more than their work. */
static pthread_cond_t turn[SIM_DEVICE_MAX] = {
    [0 ... SIM_DEVICE_MAX - 1] = PTHREAD_COND_INITIALIZER};
static __thread int own_rank;

/* ---- the baton ---- */

int sim_current_rank(void)
{
    return own_rank;
}

static void pass_baton(void)
{
    for (int i = 1; i <= sim.rank_count; ++i) {
        int next = (sim.baton + i) % sim.rank_count;
        if (sim.rank[next].alive) {
            sim.baton = next;
            break;
        }
    }
    pthread_cond_broadcast(&turn[sim.baton]); /* the rank may have several threads */
}

static void take_baton(void)
{
    while (sim.baton != own_rank && sim.rank[own_rank].alive)
        pthread_cond_wait(&turn[own_rank], &gate);
}

/* Let a call return late, as a driver's may. */
static void dawdle(const char *call)
{
    struct timespec nap = {.tv_sec = sim.slow_ms / 1000, .tv_nsec = sim.slow_ms % 1000 * 1000000};
    if (strcmp(sim.slow_name, call) != 0)
        return;
    sim.slow_name[0] = '\0';
    pthread_mutex_unlock(&gate);
    nanosleep(&nap, NULL);
    pthread_mutex_lock(&gate);
}

bool sim_enter(const char *call, int *result)
{
    pthread_mutex_lock(&gate);
    dawdle(call);
    take_baton();
    sim_rank *rank = &sim.rank[own_rank];
    rank->clock.at[rank->actor]++;
    sim.host_calls++;
    bool is_named = strcmp(sim.fail_name, call) == 0;
    if (++rank->calls != rank->fail_nth && !is_named)
        return true;
    snprintf(sim.failed, sizeof sim.failed, "%s", call);
    *result = is_named ? sim.fail_name_result : rank->fail_result;
    sim.fail_name[0] = '\0';
    pthread_mutex_unlock(&gate);
    return false;
}

void sim_lock(void)
{
    pthread_mutex_lock(&gate);
}

void sim_leave(void)
{
    pthread_mutex_unlock(&gate);
}

void sim_yield(void)
{
    pass_baton();
    take_baton();
}

static void rank_begin(int rank)
{
    pthread_mutex_lock(&gate);
    own_rank = rank;
    sim.rank[rank].begun = true;
    for (int r = 0; r < sim.rank_count; ++r)
        pthread_cond_broadcast(&turn[r]);
    for (int r = 0; r < sim.rank_count; ++r)
        while (!sim.rank[r].begun)
            pthread_cond_wait(&turn[own_rank], &gate);
    take_baton();
    pthread_mutex_unlock(&gate);
}

static void rank_end(void)
{
    pthread_mutex_lock(&gate);
    take_baton();
    sim.rank[own_rank].alive = false;
    pass_baton();
    own_rank = 0;
    pthread_mutex_unlock(&gate);
}

bool sim_is_stuck(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t now_ns = now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
    if (sim.idle_polls++ == 0)
        sim.idle_since_ns = now_ns;
    if (!sim.has_peers && sim.idle_polls <= IDLE_POLLS_MAX)
        return false;
    return now_ns - sim.idle_since_ns > (sim.has_peers ? PATIENCE_NS : ALONE_NS);
}

/* ---- clocks ---- */

void sim_join(sim_clock *into, const sim_clock *from)
{
    for (int a = 0; a < SIM_ACTOR_MAX; ++a)
        into->at[a] = from->at[a] > into->at[a] ? from->at[a] : into->at[a];
}

void sim_tick(sw_cu_stream stream)
{
    stream->before = stream->clock;
    sim_join(&stream->clock, &sim.rank[own_rank].clock);
    stream->clock.at[stream->actor]++;
}

uint64_t sim_draw(void)
{
    sim.seed ^= sim.seed << 13;
    sim.seed ^= sim.seed >> 7;
    sim.seed ^= sim.seed << 17;
    return sim.seed >> 11;
}

/* ---- reports ---- */

sim_site sim_here(const char *operation)
{
    sim_site site = {.operation = operation, .rank = own_rank};
    void *frames[SIM_SITE_DEPTH + 3];
    int depth = backtrace(frames, SIM_SITE_DEPTH + 3);
    for (int i = 3; i < depth; ++i) /* skip this function and the fake's own two */
        site.frame[site.depth++] = frames[i];
    return site;
}

/* Write "cuLaunchKernel on rank 1, from f at file.c:12 < g at ...", by addr2line if it exists. */
void sim_site_describe(char *out, size_t bytes, const sim_site *site)
{
    size_t used = (size_t)snprintf(out, bytes, "%s on rank %d", site->operation, site->rank);
    for (int i = 0; i < site->depth && used < bytes; ++i) {
        Dl_info info;
        char command[TEXT_BYTES], line[512] = "";
        if (!dladdr(site->frame[i], &info) || !info.dli_fname)
            continue;
        snprintf(command, sizeof command, "addr2line -f -p -s -e '%s' %#lx 2>/dev/null",
                 info.dli_fname,
                 (unsigned long)((char *)site->frame[i] - (char *)info.dli_fbase) - 1);
        FILE *pipe = popen(command, "r");
        if (pipe) {
            if (!fgets(line, sizeof line, pipe))
                line[0] = '\0';
            pclose(pipe);
        }
        line[strcspn(line, "\n")] = '\0';
        if (line[0] && line[0] != '?' && used < bytes)
            used += (size_t)snprintf(out + used, bytes - used, "%s%s", i ? " < " : ", from ", line);
    }
}

void sim_report(const char *kind, const char *detail, const sim_site *a, const sim_site *b)
{
    if (sim.report_count++ >= SIM_NOTE_MAX)
        return;
    sim_note *note = &sim.note[sim.report_count - 1];
    *note = (sim_note){.kind = kind};
    snprintf(note->detail, sizeof note->detail, "%s", detail);
    if (a)
        note->site[note->site_count++] = *a;
    if (b)
        note->site[note->site_count++] = *b;
}

/* ---- memory ---- */

sim_block *sim_block_of(const void *address)
{
    const unsigned char *at = address;
    for (sim_block *block = sim.blocks; block; block = block->next)
        if (at >= block->memory && at < block->memory + block->size_bytes)
            return block;
    return NULL;
}

/* Cut the segment that holds `at` so that one begins there. */
static void cut(sim_block *block, size_t at)
{
    for (sim_segment *s = block->segments; s; s = s->next)
        if (s->begin < at && at < s->end) {
            sim_segment *rest = malloc(sizeof *rest);
            memcpy(rest, s, offsetof(sim_segment, read) + (size_t)s->read_count * sizeof *s->read);
            rest->begin = s->end = at;
            s->next = rest;
            return;
        }
}

static bool is_before(const sim_touch *touch, const sim_clock *clock)
{
    return touch->time <= clock->at[touch->actor];
}

/* Note an access to a segment. `is_shared`: other processes may have written it. */
static void note(sim_segment *s, const sim_touch *touch, const sim_clock *clock, sw_access access,
                 bool is_shared)
{
    char detail[256];
    size_t size = s->end - s->begin;
    if (access & SW_ACCESS_READ && !s->written && !is_shared) {
        snprintf(detail, sizeof detail, "%zu bytes that were never written", size);
        sim_report("uninitialised read", detail, &touch->site, NULL);
    }
    if (s->written && !is_before(&s->write, clock)) {
        snprintf(detail, sizeof detail, "%s of %zu bytes is not ordered after the write of them",
                 access & SW_ACCESS_WRITE ? "a write" : "a read", size);
        sim_report("race", detail, &touch->site, &s->write.site);
    }
    for (int r = 0; access & SW_ACCESS_WRITE && r < s->read_count; ++r)
        if (!is_before(&s->read[r], clock)) {
            snprintf(detail, sizeof detail,
                     "a write of %zu bytes is not ordered after the read of them", size);
            sim_report("race", detail, &touch->site, &s->read[r].site);
        }
    if (access & SW_ACCESS_WRITE) {
        s->written = true;
        s->write = *touch;
        s->read_count = 0;
        return;
    }
    int slot = 0;
    while (slot < s->read_count && s->read[slot].actor != touch->actor)
        slot++;
    s->read_count = slot == s->read_count ? slot + 1 : s->read_count;
    s->read[slot] = *touch;
}

void sim_track(const sim_clock *clock, int actor, const void *begin, size_t size_bytes,
               sw_access access, const sim_site *site)
{
    sim_block *block = size_bytes ? sim_block_of(begin) : NULL;
    sim_touch touch = {.actor = actor, .time = clock->at[actor], .site = *site};
    if (!block)
        return; /* ordinary host memory */
    size_t from = (size_t)((const unsigned char *)begin - block->memory), to = from + size_bytes;
    if (block->freed)
        sim_report("use after free", "memory that was freed", site, &block->freed_at);
    if (to > block->size_bytes) {
        sim_report("out of bounds", "a range that exceeds its allocation", site, NULL);
        to = block->size_bytes;
    }
    cut(block, from);
    cut(block, to);
    for (sim_segment *s = block->segments; s; s = s->next)
        if (s->begin >= from && s->end <= to)
            note(s, &touch, clock, access, block->registered || block->file);
}

static void host_access(const void *begin, size_t size_bytes, sw_access access, const char *label)
{
    pthread_mutex_lock(&gate);
    sim_rank *rank = &sim.rank[own_rank];
    sim_site site = sim_here(label);
    rank->clock.at[rank->actor]++;
    sim_track(&rank->clock, rank->actor, begin, size_bytes, access, &site);
    pthread_mutex_unlock(&gate);
}

/* ---- controls for tests ---- */

static void forget(void)
{
    while (sim.blocks) {
        sim_block *block = sim.blocks;
        sim.blocks = block->next;
        while (block->segments) {
            sim_segment *s = block->segments;
            block->segments = s->next;
            free(s);
        }
        if (block->file)
            close(block->file);
        if (block->mapped)
            munmap(block->memory, block->size_bytes);
        else if (!block->foreign)
            free(block->memory);
        free(block);
    }
    while (sim.told) {
        sim_told *told = sim.told;
        sim.told = told->next;
        free(told);
    }
    while (sim.streams) {
        sw_cu_stream stream = sim.streams;
        sim.streams = stream->next;
        while (stream->first)
            sim_pop(stream);
        free(stream);
    }
    while (sim.events) {
        sw_cu_event event = sim.events;
        sim.events = event->next;
        free(event);
    }
}

static int strict_of(const char *words)
{
    static const char *const word[] = {"device", "order", "lazy", "lone"};
    int found = 0;
    for (int i = 0; words && i < 4; ++i)
        found |= strstr(words, word[i]) || strcmp(words, "all") == 0 ? 1 << i : 0;
    return found;
}

static void reset(int ranks, sim_policy policy, uint64_t seed)
{
    pthread_mutex_lock(&gate);
    forget();
    memset(sim.rank, 0, sizeof sim.rank);
    memset(sim.context, 0, sizeof sim.context);
    sim.policy = policy;
    sim.seed = seed * 2654435761u + 88172645463325252u;
    sim.rank_count = ranks;
    sim.baton = sim.report_count = sim.modules = sim.comms = 0;
    sim.idle_polls = 0;
    sim.deadlocked = sim.has_peers = false;
    sim.host_thread = NULL;
    sim.report[0] = sim.failed[0] = sim.fail_name[0] = sim.slow_name[0] = '\0';
    sim.exemption_result = 0;
    sim.memory_limit_bytes = sim.cached_bytes = 0;
    sim.queue_limit = 0;
    sim.holds_gil = NULL;
    sim.gil_count = 0;
    sim.stalled = false;
    sim.strict = strict_of(getenv("SIM_STRICT"));
    sim.blocked_calls = 0;
    sim.text = NULL;
    sim.spoiled = 0;
    sim.actor_count = ranks;
    for (int r = 0; r < SIM_DEVICE_MAX; ++r)
        sim.context[r].ordinal = r;
    for (int r = 0; r < ranks; ++r) {
        sim.rank[r].alive = true;
        sim.rank[r].actor = r;
    }
    own_rank = 0;
    pthread_mutex_unlock(&gate);
}

static void use_kernels(const sw_kernel_reference *references, int count)
{
    sim.references = references;
    sim.reference_count = count;
}

static void fail_call(int rank, long nth, int result)
{
    sim.rank[rank].calls = 0;
    sim.rank[rank].fail_nth = nth;
    sim.rank[rank].fail_result = result;
}

static long calls(int rank)
{
    return sim.rank[rank].calls;
}

static const char *failed_call(void)
{
    return sim.failed;
}

static void set_devices(int count, int version)
{
    sim.device_count = count;
    sim.version = version;
}

static void refuse_exemptions(int result)
{
    sim.exemption_result = result;
}

static int reports(const char **text, bool sites)
{
    size_t used = 0;
    sim.report[0] = '\0';
    for (int i = 0; i < sim.report_count && i < SIM_NOTE_MAX; ++i) {
        const sim_note *note = &sim.note[i];
        used += (size_t)snprintf(sim.report + used, sizeof sim.report - used, "%s: %s\n",
                                 note->kind, note->detail);
        for (int k = 0; sites && k < note->site_count && used < sizeof sim.report - TEXT_BYTES;
             ++k) {
            char where[TEXT_BYTES];
            sim_site_describe(where, sizeof where, &note->site[k]);
            used +=
                (size_t)snprintf(sim.report + used, sizeof sim.report - used, "    %s\n", where);
        }
    }
    *text = sim.report;
    return sim.report_count;
}

static const char *leaks(void)
{
    static char text[256];
    int blocks = 0, registered = 0, streams = 0, events = 0, contexts = 0;
    for (sim_block *block = sim.blocks; block; block = block->next)
        blocks += !block->freed && !block->foreign, registered += block->registered;
    for (sw_cu_stream stream = sim.streams; stream; stream = stream->next)
        streams += !stream->destroyed && !stream->is_torch;
    for (sw_cu_event event = sim.events; event; event = event->next)
        events += !event->destroyed;
    for (int r = 0; r < SIM_DEVICE_MAX; ++r)
        contexts += sim.context[r].retained;
    text[0] = '\0';
    if (blocks || registered || streams || events || contexts || sim.modules || sim.comms)
        snprintf(text, sizeof text,
                 "%d allocations, %d registrations, %d streams, %d events, %d modules, %d contexts, "
                 "%d communicators",
                 blocks, registered, streams, events, sim.modules, contexts, sim.comms);
    return text;
}

const sim_controls *sim_get_controls(void)
{
    static const sim_controls controls = {
        .reset = reset,
        .use_kernels = use_kernels,
        .rank_begin = rank_begin,
        .rank_end = rank_end,
        .host_access = host_access,
        .fail_call = fail_call,
        .calls = calls,
        .failed_call = failed_call,
        .set_devices = set_devices,
        .refuse_exemptions = refuse_exemptions,
        .reports = reports,
        .leaks = leaks,
    };
    return &controls;
}
