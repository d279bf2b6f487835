/* save_late.c - files of other ranks, which a network file system may show with a delay. */
#include <errno.h>
#include <inttypes.h>
#include <unistd.h>

#include "checkpoint/save_job.h"
#include "platform/clock.h"

enum { LATE_S = 10 };

/* True if the name may exist but be hidden for a moment by a network file system's caches. */
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

static sw_status open_whole(sw_save_late_file *file, sw_error *err)
{
    uint64_t size_bytes = 0;
    SW_TRY(sw_file_open_read(file->path, false, &file->fd, &size_bytes, err));
    if (size_bytes == file->size_bytes)
        return SW_OK;
    return sw_error_set(err, SW_E_OS, EIO,
                        "'%.300s' has %" PRIu64 " bytes where %" PRIu64 " were written", file->path,
                        size_bytes, file->size_bytes);
}

sw_status sw_save_read_late(sw_saver *saver, sw_save_late_file *file, void *data, size_t size_bytes,
                            uint64_t offset, sw_error *err)
{
    int64_t until_ns = sw_clock_now_ns() + LATE_S * INT64_C(1000000000);
    for (sw_error why = {0};;) {
        sw_status status = file->fd < 0 ? open_whole(file, &why) : SW_OK;
        if (status == SW_OK)
            status = sw_file_read_at(file->fd, file->path, data, size_bytes, offset, &why);
        if (status == SW_OK)
            return SW_OK;
        sw_save_close_late(file);
        if (!is_of_a_moment(&why) || sw_clock_now_ns() > until_ns) {
            *err = why;
            return status;
        }
        SW_TRY(sw_save_check(saver, err));
        sw_thread_sleep_ns(SW_SAVE_LOOK_NS);
    }
}

void sw_save_close_late(sw_save_late_file *file)
{
    if (file->fd >= 0)
        close(file->fd);
    file->fd = -1;
}
