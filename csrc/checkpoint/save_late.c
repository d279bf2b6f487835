/* save_late.c - files of other ranks, which a client of a network file system may not show at once.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "checkpoint/save_job.h"
#include "platform/clock.h"

enum { LATE_S = 10 };

/* True if an existing name may be missing for a moment: a network file system's caches. */
static bool is_of_a_moment(const sw_error *why)
{
    return why->status == SW_E_OS &&
           (why->detail == ENOENT || why->detail == ESTALE || why->detail == EIO);
}

sw_status sw_save_open_late(sw_saver *saver, const char *path, bool direct, bool is_first_thread,
                            int *fd, sw_error *err)
{
    int64_t until_ns = sw_clock_now_ns() + LATE_S * INT64_C(1000000000);
    for (sw_error why = {0}, verdict;;) {
        sw_status status = sw_file_open_write(path, direct, fd, &why);
        if (status == SW_OK)
            return SW_OK;
        bool is_over =
            sw_save_check(saver, NULL) != SW_OK ||
            (is_first_thread && sw_channel_is_decided(saver->channel, saver->number, &verdict));
        if (!is_of_a_moment(&why) || is_over || saver->channel->rank == 0 ||
            sw_clock_now_ns() > until_ns) {
            if (err)
                *err = why;
            return status;
        }
        sw_thread_sleep_ns(SW_SAVE_LOOK_NS);
    }
}

sw_status sw_save_read_late(sw_saver *saver, const char *path, uint64_t expected, char **data,
                            sw_error *err)
{
    int64_t until_ns = sw_clock_now_ns() + LATE_S * INT64_C(1000000000);
    for (sw_error why = {0};;) {
        size_t size_bytes = 0;
        sw_status status = sw_file_read_whole(path, expected, data, &size_bytes, &why);
        if (status == SW_OK && size_bytes == expected)
            return SW_OK;
        if (status == SW_OK) {
            free(*data);
            status = sw_error_set(&why, SW_E_OS, EIO,
                                  "'%.300s' has %zu bytes where %" PRIu64 " were written", path,
                                  size_bytes, expected);
        }
        if (!is_of_a_moment(&why) || sw_clock_now_ns() > until_ns) {
            *err = why;
            return status;
        }
        SW_TRY(sw_save_check(saver, err));
        sw_thread_sleep_ns(SW_SAVE_LOOK_NS);
    }
}
