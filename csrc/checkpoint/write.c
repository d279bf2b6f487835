/* write.c - see write.h. */
#include "checkpoint/write.h"

#include <string.h>

#include "kernels/crc32c.h"
#include "platform/file.h"

/* ---- LOCK ---- */

sw_status sw_save_lock_take(const char *partial, int *fd, sw_error *err)
{
    char temporary[SW_PATH_BYTES], path[SW_PATH_BYTES];
    bool ignored;
    SW_TRY(sw_path_join(temporary, partial, SW_LOCK_NAME ".tmp", err));
    SW_TRY(sw_path_join(path, partial, SW_LOCK_NAME, err));
    SW_TRY(sw_file_create(temporary, fd, err));
    (void)!sw_file_lock(*fd, temporary, &ignored, NULL);
    sw_status status = sw_file_rename(temporary, path, err);
    if (status != SW_OK)
        (void)!sw_file_close(fd, temporary, NULL);
    return status;
}

void sw_save_lock_release(const char *folder, int *fd)
{
    char path[SW_PATH_BYTES];
    if (*fd >= 0 && sw_path_join(path, folder, SW_LOCK_NAME, NULL) == SW_OK)
        (void)!sw_file_remove(path, NULL);
    (void)!sw_file_close(fd, folder, NULL); /* no data to lose */
}

sw_save_life sw_save_lock_look(const char *partial)
{
    char path[SW_PATH_BYTES];
    int fd = -1;
    bool is_taken = false;
    if (sw_path_join(path, partial, SW_LOCK_NAME, NULL) != SW_OK ||
        sw_file_open_write(path, false, &fd, NULL) != SW_OK)
        return SW_SAVE_UNKNOWN;
    sw_status status = sw_file_lock(fd, path, &is_taken, NULL);
    (void)!sw_file_close(&fd, path, NULL);
    if (status != SW_OK)
        return SW_SAVE_UNKNOWN;
    return is_taken ? SW_SAVE_DEAD : SW_SAVE_ALIVE;
}

/* ---- writes ---- */

/* Create the folder in a path of a plan, unless it was created for an earlier path. */
static sw_status make_parent(const char *path, sw_error *err)
{
    char parent[SW_PATH_BYTES];
    SW_TRY(sw_path_parent(path, parent, err));
    return sw_file_exists(parent) ? SW_OK : sw_folder_create(parent, err);
}

sw_status sw_plan_create_files(const sw_plan *plan, const char *folder, sw_error *err)
{
    char path[SW_PATH_BYTES];
    for (size_t i = 0; i < plan->file_count; ++i) {
        int fd = -1;
        SW_TRY(sw_path_join(path, folder, plan->files[i].path, err));
        if (strchr(plan->files[i].path, '/'))
            SW_TRY(make_parent(path, err));
        SW_TRY(sw_file_create(path, &fd, err));
        sw_status status = sw_file_allocate(fd, path, plan->files[i].size_bytes, err);
        SW_TRY(sw_file_close_after(&fd, path, status, err));
    }
    return SW_OK;
}

void sw_partial_abandon(const char *partial, int *lock_fd)
{
    sw_save_lock_release(partial, lock_fd);
    (void)!sw_folder_remove(partial, NULL);
}

sw_status sw_partial_create(const sw_plan *plan, const char *partial, int *lock_fd, sw_error *err)
{
    int fd = -1;
    SW_TRY(sw_folder_create(partial, err)); /* an existing folder belongs to another save */
    sw_status status = sw_save_lock_take(partial, &fd, err);
    if (status == SW_OK)
        status = sw_plan_create_files(plan, partial, err);
    if (status == SW_OK)
        *lock_fd = fd;
    else
        sw_partial_abandon(partial, &fd);
    return status;
}

static sw_status write_open(int fd, const sw_write_file *file, const sw_write_range *ranges,
                            size_t count, const uint8_t *data, sw_tally_list *tallies,
                            sw_error *err)
{
    for (size_t i = 0; i < count; ++i)
        for (uint64_t at = ranges[i].begin, end = at + ranges[i].size_bytes, next; at < end;
             at = next) {
            uint64_t block = at / SW_BLOCK_BYTES, stop = (block + 1) * SW_BLOCK_BYTES;
            next = stop < end ? stop : end;
            size_t size = (size_t)(next - at);
            struct iovec part = {.iov_base = (void *)(uintptr_t)data, .iov_len = size};
            sw_tally_list_add(tallies, file->first_block + block, sw_crc32c(0, data, size), at,
                              (uint32_t)size, file->size_bytes);
            SW_TRY(sw_file_write_at(fd, file->path, &part, 1, at, err));
            data += size;
        }
    sw_tally_list_end(tallies);
    if (tallies->is_out_of_memory)
        SW_FAIL(err, SW_E_MEMORY, "no memory for the tallies of '%.300s'", file->path);
    return SW_OK;
}

sw_status sw_checkpoint_write(const sw_write_file *file, const sw_write_range *ranges, size_t count,
                              const void *data, sw_tally_list *tallies, sw_error *err)
{
    int fd = -1;
    for (size_t i = 0; i < count; ++i) {
        uint64_t end, before = i ? ranges[i - 1].begin + ranges[i - 1].size_bytes : 0;
        if (__builtin_add_overflow(ranges[i].begin, ranges[i].size_bytes, &end) ||
            end > file->size_bytes || ranges[i].begin < before)
            SW_FAIL(err, SW_E_INVALID, "write to '%.300s': range %zu is not in order inside of it",
                    file->path, i);
    }
    SW_TRY(sw_file_open_write(file->path, false, &fd, err));
    sw_status status = write_open(fd, file, ranges, count, data, tallies, err);
    return sw_file_close_after(&fd, file->path, status, err);
}

sw_status sw_plan_write_headers(const sw_plan *plan, const char *folder, sw_manifest *manifest,
                                sw_error *err)
{
    char path[SW_PATH_BYTES];
    sw_status status = SW_OK;
    for (size_t i = 0; i < plan->file_count && status == SW_OK; ++i) {
        const sw_plan_file *file = &plan->files[i];
        sw_write_file target = {path, file->size_bytes, file->first_block};
        sw_write_range range = {0, file->header_bytes};
        sw_tally_list list = {0};
        if (file->header_bytes == 0)
            continue;
        if (!file->header)
            SW_FAIL(err, SW_E_STATE, "the header of '%.200s' was trimmed from its plan",
                    file->path);
        SW_TRY(sw_path_join(path, folder, file->path, err));
        status = sw_checkpoint_write(&target, &range, 1, file->header, &list, err);
        if (status == SW_OK && manifest)
            status = sw_tally_list_read(list.data, list.size_bytes, sw_manifest_add_tally, manifest,
                                        err);
        sw_tally_list_fini(&list);
    }
    return status;
}
