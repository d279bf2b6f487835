/* channel.c - words published by a number that is written last; a file with one slot per host. */
#include "checkpoint/channel.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/crc32c.h"
#include "platform/clock.h"
#include "platform/file.h"
#include "platform/thread.h"

enum {
    CRC_AT = SW_CHANNEL_PAGE_BYTES - 4,
    LOOK_EVERY_NS = 20000000,
    LOOKS_A_SECOND = 1000,
    GONE_S = 5,
    TELL_S = 30
};
_Static_assert(sizeof(sw_channel_page) <= CRC_AT, "a page and its checksum fit their slot");

static sw_status no_memory(int world_size, sw_error *err)
{
    SW_FAIL(err, SW_E_MEMORY, "no memory for the channel of %d ranks", world_size);
}

sw_status sw_channel_init(sw_channel *channel, int rank, int world_size, uint8_t *const *pages,
                          const int *host_of, const char *path, sw_error *err)
{
    size_t world = (size_t)world_size;
    sw_channel made = {.rank = rank, .world_size = world_size, .carrier = rank, .host_count = 1};
    made.host_of = calloc(world, sizeof *made.host_of);
    made.pages = calloc(world, sizeof *made.pages);
    made.alone = world_size == 1 ? calloc(1, sizeof *made.alone) : NULL;
    made.path = path ? strdup(path) : NULL;
    if (!made.host_of || !made.pages || (path && !made.path) || (world_size == 1 && !made.alone)) {
        sw_channel_fini(&made);
        return no_memory(world_size, err);
    }
    if (host_of)
        memcpy(made.host_of, host_of, world * sizeof *host_of);
    made.host = made.host_of[rank];
    for (int r = world_size; r-- > 0;) {
        if (made.host_of[r] >= made.host_count)
            made.host_count = made.host_of[r] + 1;
        if (made.host_of[r] != made.host)
            continue;
        made.carrier = r;
        made.pages[r] = pages ? (sw_channel_page *)(void *)pages[r] : made.alone;
    }
    if (made.host_count > 1)
        made.slots = calloc((size_t)made.host_count, sizeof *made.slots);
    if (made.host_count > 1 && !made.slots) {
        sw_channel_fini(&made);
        return no_memory(world_size, err);
    }
    *channel = made;
    return SW_OK;
}

void sw_channel_fini(sw_channel *channel)
{
    free(channel->host_of);
    free(channel->pages);
    free(channel->slots);
    free(channel->alone);
    free(channel->path);
    *channel = (sw_channel){0};
}

bool sw_channel_is_carrier(const sw_channel *channel)
{
    return channel->carrier == channel->rank;
}

static uint64_t get(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_acquire);
}

static void set(_Atomic uint64_t *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_release);
}

/* ---- between hosts ---- */

/* Return the host's slot; NULL: there is one host. */
static sw_channel_page *own_slot(const sw_channel *channel)
{
    return channel->slots ? &channel->slots[channel->host] : NULL;
}

/* Find a failure of save `number` in a page of this host; NULL: none. */
static const sw_channel_page *find_failure(const sw_channel *channel, uint64_t number)
{
    for (int r = 0; r < channel->world_size; ++r)
        if (channel->pages[r] && get(&channel->pages[r]->failed) >= number)
            return channel->pages[r];
    return NULL;
}

static bool have_others_written(const sw_channel *channel, uint64_t number)
{
    for (int r = 0; r < channel->world_size; ++r)
        if (r != channel->rank && channel->pages[r] && get(&channel->pages[r]->written) < number)
            return false;
    return true;
}

/* Merge what this host's ranks published of save `number` into its slot; true: it changed. */
static bool collect(sw_channel *channel, uint64_t number)
{
    sw_channel_page *slot = own_slot(channel), *own = channel->pages[channel->rank];
    const sw_channel_page *failure = find_failure(channel, number);
    bool is_news = false;
    if (failure && get(&slot->failed) < number) {
        slot->failure = failure->failure;
        slot->failed_rank = failure->failed_rank;
        set(&slot->failed, get(&failure->failed));
        is_news = true;
    }
    if (get(&slot->written) < number && get(&own->written) >= number &&
        have_others_written(channel, number)) {
        set(&slot->tally_bytes, get(&own->tally_bytes));
        set(&slot->written, number);
        is_news = true;
    }
    if (channel->rank == 0 && (get(&slot->opened) != get(&own->opened) ||
                               get(&slot->committing) != get(&own->committing) ||
                               get(&slot->decided) != get(&own->decided))) {
        memcpy(slot->verdicts, own->verdicts, sizeof slot->verdicts);
        set(&slot->opened, get(&own->opened));
        set(&slot->committing, get(&own->committing));
        set(&slot->decided, get(&own->decided));
        is_news = true;
    }
    return is_news;
}

/* Write this host's slot to the file; the next look retries a failure. */
static void tell(sw_channel *channel)
{
    uint8_t bytes[SW_CHANNEL_PAGE_BYTES] = {0};
    struct iovec part = {.iov_base = bytes, .iov_len = sizeof bytes};
    int fd = -1;
    sw_error ignored;
    memcpy(bytes, own_slot(channel), sizeof(sw_channel_page));
    uint32_t crc = sw_crc32c(0, bytes, CRC_AT);
    memcpy(bytes + CRC_AT, &crc, sizeof crc);
    channel->is_told = false;
    if (sw_file_open_write(channel->path, false, &fd, &ignored) != SW_OK)
        return;
    sw_status status = sw_file_write_at(fd, channel->path, &part, 1,
                                        (uint64_t)channel->host * SW_CHANNEL_PAGE_BYTES, &ignored);
    sw_status closed = sw_file_close(&fd, channel->path, &ignored);
    channel->is_told = status == SW_OK && closed == SW_OK;
}

/* Read a slot from the file. Keep the old one if the new one is incomplete or was never written. */
static void take(sw_channel *channel, int fd, int host)
{
    uint8_t bytes[SW_CHANNEL_PAGE_BYTES];
    uint32_t crc;
    sw_error ignored;
    if (sw_file_read_at(fd, channel->path, bytes, sizeof bytes, (uint64_t)host * sizeof bytes,
                        &ignored) != SW_OK)
        return;
    memcpy(&crc, bytes + CRC_AT, sizeof crc);
    if (crc == sw_crc32c(0, bytes, CRC_AT))
        memcpy(&channel->slots[host], bytes, sizeof(sw_channel_page));
}

int sw_channel_merges_until(const sw_channel *channel)
{
    int end =
        channel->host % SW_CHANNEL_GROUP ? channel->host + 1 : channel->host + SW_CHANNEL_GROUP;
    return end < channel->host_count ? end : channel->host_count;
}

/* True if this rank reads the slot of another host. */
static bool reads(const sw_channel *channel, int host)
{
    return channel->rank == 0 || host == 0 ||
           (sw_channel_is_carrier(channel) && host > channel->host &&
            host < sw_channel_merges_until(channel));
}

/* Read other hosts' slots from the file. Rank 0 reads all of them; other ranks read rank 0's slot
 * and the slots that they wait for. */
static void look(sw_channel *channel)
{
    int fd = -1;
    uint64_t size_bytes;
    sw_error why = {0};
    int64_t now_ns = sw_clock_now_ns();
    int64_t fair_ns = channel->host_count * (INT64_C(1000000000) / LOOKS_A_SECOND);
    int64_t every_ns = fair_ns > LOOK_EVERY_NS ? fair_ns : LOOK_EVERY_NS;
    if (channel->looked_ns && now_ns - channel->looked_ns < every_ns)
        return;
    channel->looked_ns = now_ns;
    sw_status status = sw_file_open_read(channel->path, false, &fd, &size_bytes, &why);
    if (status == SW_OK)
        channel->gone_ns = 0;
    else if (why.detail == ENOENT && !channel->gone_ns)
        channel->gone_ns = now_ns;
    if (status != SW_OK)
        return;
    for (int h = 0; h < channel->host_count; ++h)
        if (h != channel->host && reads(channel, h))
            take(channel, fd, h);
    status = sw_file_close(&fd, channel->path, NULL);
    (void)status;
}

/* True if this rank reads the file: it is a carrier, or its carrier does not take part in this
 * save. */
static bool carries(const sw_channel *channel, uint64_t number)
{
    return channel->slots && (sw_channel_is_carrier(channel) ||
                              get(&channel->pages[channel->carrier]->failed) >= number);
}

/* Copy rank 0's verdicts to this carrier's page, which its host's ranks read. */
static void mirror(sw_channel *channel)
{
    sw_channel_page *own = channel->pages[channel->rank];
    const sw_channel_page *first = &channel->slots[0];
    uint64_t decided = get(&first->decided);
    if (channel->rank == 0)
        return;
    set(&own->committing, get(&first->committing));
    if (decided <= get(&own->decided))
        return;
    memcpy(own->verdicts, first->verdicts, sizeof own->verdicts);
    set(&own->decided, decided);
}

void sw_channel_relay(sw_channel *channel, uint64_t number)
{
    if (!carries(channel, number))
        return;
    bool is_carrier = sw_channel_is_carrier(channel);
    if (is_carrier && (collect(channel, number) || !channel->is_told))
        tell(channel);
    look(channel);
    if (is_carrier)
        mirror(channel);
}

/* Relay until the file has this host's slot, because the save may never call again. */
static void relay_until_told(sw_channel *channel, uint64_t number)
{
    int64_t until_ns = sw_clock_now_ns() + TELL_S * INT64_C(1000000000);
    sw_channel_relay(channel, number);
    while (channel->slots && sw_channel_is_carrier(channel) && !channel->is_told &&
           !sw_channel_is_gone(channel, NULL) && sw_clock_now_ns() < until_ns) {
        sw_thread_sleep_ns(LOOK_EVERY_NS);
        sw_channel_relay(channel, number);
    }
}

/* ---- publish and query ---- */

/* Return the page in which this rank reads rank 0's words. */
static const sw_channel_page *first_page(const sw_channel *channel, uint64_t number)
{
    bool is_own = channel->slots && channel->host != 0 && !sw_channel_is_carrier(channel) &&
                  carries(channel, number);
    return is_own ? &channel->slots[0] : channel->pages[channel->carrier];
}

void sw_channel_say_open(sw_channel *channel, uint64_t number)
{
    set(&channel->pages[channel->rank]->tally_bytes, 0);
    set(&channel->pages[channel->rank]->opened, number);
    sw_channel_relay(channel, number);
}

bool sw_channel_is_open(sw_channel *channel, uint64_t number)
{
    sw_channel_relay(channel, number);
    return get(&channel->pages[channel->carrier]->opened) >= number;
}

bool sw_channel_is_open_at_first(sw_channel *channel, uint64_t number)
{
    sw_channel_relay(channel, number);
    return get(&channel->slots[0].opened) >= number;
}

uint64_t sw_channel_take_place(sw_channel *channel, uint64_t bytes)
{
    sw_channel_page *page = channel->pages[channel->carrier];
    return atomic_fetch_add_explicit(&page->tally_bytes, bytes, memory_order_acq_rel);
}

void sw_channel_set_tally_bytes(sw_channel *channel, uint64_t bytes)
{
    set(&channel->pages[channel->rank]->tally_bytes, bytes);
}

bool sw_channel_have_others_written(sw_channel *channel, uint64_t number)
{
    sw_channel_relay(channel, number);
    for (int h = channel->host + 1; h < sw_channel_merges_until(channel); ++h)
        if (get(&channel->slots[h].written) < number)
            return false;
    return have_others_written(channel, number);
}

void sw_channel_say_written(sw_channel *channel, uint64_t number)
{
    set(&channel->pages[channel->rank]->written, number);
    sw_channel_relay(channel, number);
}

static bool has_written(const sw_channel *channel, int rank, uint64_t number)
{
    const sw_channel_page *page = channel->pages[rank];
    return get(page ? &page->written : &channel->slots[channel->host_of[rank]].written) >= number;
}

int sw_channel_find_unwritten_here(const sw_channel *channel, uint64_t number, int from)
{
    for (int r = from; r < channel->world_size; ++r)
        if (channel->pages[r] && get(&channel->pages[r]->written) < number)
            return r;
    return -1;
}

int sw_channel_find_unwritten(sw_channel *channel, uint64_t number)
{
    int found = -1, first = 0;
    sw_channel_relay(channel, number);
    for (int r = 0; r < channel->world_size; ++r) {
        int host = channel->host_of[r];
        if (has_written(channel, r, number))
            continue;
        if (found >= 0 && host > first && host < first + SW_CHANNEL_GROUP)
            return r;
        if (found >= 0)
            continue;
        found = r;
        first = host;
        if (host == 0 || host % SW_CHANNEL_GROUP != 0) /* a first host may wait for its group */
            return r;
    }
    return found;
}

uint64_t sw_channel_tally_bytes(const sw_channel *channel, int host)
{
    return get(host == channel->host ? &channel->pages[channel->carrier]->tally_bytes
                                     : &channel->slots[host].tally_bytes);
}

void sw_channel_fail(sw_channel *channel, uint64_t number, const sw_error *reason)
{
    sw_channel_page *page = channel->pages[channel->rank];
    page->failure = *reason;
    page->failed_rank = channel->rank;
    set(&page->failed, number);
    relay_until_told(channel, number);
}

/* Without the file no verdict can arrive. Rank 0 creates it before it begins a save; other ranks
 * may look slightly earlier. */
bool sw_channel_is_gone(const sw_channel *channel, sw_error *why)
{
    bool is_gone =
        channel->gone_ns && channel->looked_ns - channel->gone_ns > GONE_S * INT64_C(1000000000);
    if (is_gone)
        (void)sw_error_set(why, SW_E_OS, ENOENT,
                           "'%.400s', by which the ranks of other hosts are heard, is gone",
                           channel->path);
    return is_gone;
}

bool sw_channel_has_failure(sw_channel *channel, uint64_t number, sw_error *err)
{
    sw_channel_relay(channel, number);
    if (sw_channel_is_gone(channel, err))
        return true;
    const sw_channel_page *found = find_failure(channel, number);
    for (int h = 0; !found && channel->slots && h < channel->host_count; ++h)
        if (get(&channel->slots[h].failed) >= number)
            found = &channel->slots[h];
    if (!found)
        return false;
    if (channel->world_size == 1)
        *err = found->failure;
    else
        (void)sw_error_set(err, found->failure.status, found->failure.detail, "rank %d: %.480s",
                           (int)found->failed_rank, found->failure.message);
    return true;
}

void sw_channel_say_committing(sw_channel *channel, uint64_t number)
{
    set(&channel->pages[channel->rank]->committing, number);
    sw_channel_relay(channel, number);
}

bool sw_channel_is_committing(sw_channel *channel, uint64_t number)
{
    sw_channel_relay(channel, number);
    return get(&first_page(channel, number)->committing) >= number;
}

void sw_channel_decide(sw_channel *channel, uint64_t number, const sw_error *verdict)
{
    sw_channel_page *page = channel->pages[channel->rank];
    page->verdicts[number % SW_CHANNEL_VERDICTS] = *verdict;
    set(&page->decided, number);
    relay_until_told(channel, number);
}

bool sw_channel_is_decided(sw_channel *channel, uint64_t number, sw_error *verdict)
{
    sw_channel_relay(channel, number);
    const sw_channel_page *page = first_page(channel, number);
    if (get(&page->decided) < number)
        return false;
    *verdict = page->verdicts[number % SW_CHANNEL_VERDICTS];
    return true;
}
