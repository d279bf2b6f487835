/* save_lock.c - see save_lock.h. */
#include "checkpoint/save_lock.h"

#include "platform/file.h"

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
