/* open.c - see read.h. */
#include "checkpoint/read.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "platform/file.h"

#define REPLACED ".replaced"

/* A component in the middle of a path could be a link that leads out of the folder: `ranks` must be
 * a real folder. */
static sw_status check_folders(const char *folder, const char *path, sw_error *err)
{
    char part[SW_PATH_BYTES];
    struct stat info;
    const char *slash = strchr(path, '/');
    if (!slash)
        return SW_OK;
    if (snprintf(part, sizeof part, "%s/%.*s", folder, (int)(slash - path), path) >= SW_PATH_BYTES)
        SW_FAIL(err, SW_E_INVALID, "a path must be shorter than %d bytes: '%.200s'", SW_PATH_BYTES,
                folder);
    if (lstat(part, &info) != 0 || !S_ISDIR(info.st_mode))
        SW_FAIL(err, SW_E_INVALID, "'%s' is not a folder", part);
    return SW_OK;
}

/* Return the other name that a checkpoint has while it is replaced. */
static bool other_name(const char *folder, char other[SW_PATH_BYTES])
{
    size_t length = strlen(folder), suffix = strlen(REPLACED);
    if (length > suffix && strcmp(folder + length - suffix, REPLACED) == 0)
        return snprintf(other, SW_PATH_BYTES, "%.*s", (int)(length - suffix), folder) <
               SW_PATH_BYTES;
    return sw_checkpoint_replaced_name(other, folder, NULL) == SW_OK;
}

static sw_status open_under(const char *folder, const char *name, bool direct,
                            char path[SW_PATH_BYTES], int *fd, uint64_t *size_bytes, sw_error *err)
{
    SW_TRY(sw_path_join(path, folder, name, err));
    SW_TRY(check_folders(folder, name, err));
    return sw_file_open_read(path, direct, fd, size_bytes, err);
}

static sw_status open_in_memory(const char *folder, const sw_manifest_file *file,
                                char path[SW_PATH_BYTES], int *fd, sw_error *err)
{
    SW_TRY(sw_path_join(path, folder, file->path, err));
    *fd = fcntl(file->memory_fd, F_DUPFD_CLOEXEC, 0);
    if (*fd < 0)
        return sw_error_set(err, SW_E_OS, errno, "'%s' cannot be opened in memory: %s", path,
                            strerror(errno));
    return SW_OK;
}

sw_status sw_checkpoint_open_file(const char *folder, const sw_manifest_file *file, bool direct,
                                  char path[SW_PATH_BYTES], int *fd, sw_error *err)
{
    if (file->is_in_memory)
        return open_in_memory(folder, file, path, fd, err);
    uint64_t size_bytes = 0;
    int opened = -1;
    char other[SW_PATH_BYTES];
    sw_error why = {0};
    sw_status status = open_under(folder, file->path, direct, path, &opened, &size_bytes, &why);
    if (status != SW_OK && !sw_file_exists(folder) && other_name(folder, other))
        status = open_under(other, file->path, direct, path, &opened, &size_bytes, NULL);
    if (status != SW_OK)
        return sw_error_pass(err, &why);
    if (size_bytes != file->size_bytes) {
        close(opened);
        SW_FAIL(err, SW_E_INVALID, "'%s' has %" PRIu64 " bytes, the manifest says %" PRIu64, path,
                size_bytes, file->size_bytes);
    }
    *fd = opened;
    return SW_OK;
}

sw_status sw_checkpoint_replaced_name(char replaced[SW_PATH_BYTES], const char *folder,
                                      sw_error *err)
{
    size_t length = strlen(folder);
    while (length > 1 && folder[length - 1] == '/')
        --length;
    if (length >= SW_PATH_BYTES ||
        snprintf(replaced, SW_PATH_BYTES, "%.*s" REPLACED, (int)length, folder) >= SW_PATH_BYTES)
        SW_FAIL(err, SW_E_INVALID, "a path must be shorter than %d bytes: '%.200s'", SW_PATH_BYTES,
                folder);
    return SW_OK;
}

sw_status sw_checkpoint_locate(const char *folder, char found[SW_PATH_BYTES], sw_error *err)
{
    if (snprintf(found, SW_PATH_BYTES, "%s", folder) >= SW_PATH_BYTES)
        SW_FAIL(err, SW_E_INVALID, "a path must be shorter than %d bytes: '%.200s'", SW_PATH_BYTES,
                folder);
    if (sw_file_exists(folder) || sw_checkpoint_replaced_name(found, folder, NULL) != SW_OK ||
        sw_file_exists(found))
        return SW_OK;
    memcpy(found, folder, strlen(folder) + 1);
    return SW_OK;
}

/* A writer replaces in three steps (`folder` becomes the replaced name, the new one becomes
 * `folder`, the replaced one goes). The first step, and the last two together, may each make one
 * look fail. */
enum { LOOKS = 3 };

bool sw_checkpoint_stands(const char *folder, char found[SW_PATH_BYTES])
{
    char manifest[SW_PATH_BYTES];
    for (int look = 0; look < LOOKS; ++look)
        if (sw_checkpoint_locate(folder, found, NULL) == SW_OK &&
            sw_path_join(manifest, found, SW_MANIFEST_NAME, NULL) == SW_OK &&
            sw_file_exists(manifest))
            return true;
    return false;
}

sw_status sw_checkpoint_open(const char *folder, sw_manifest *manifest, sw_error *err)
{
    sw_manifest made = {0};
    char path[SW_PATH_BYTES];
    SW_TRY(sw_manifest_read(folder, &made, err));
    for (size_t i = 0; i < made.file_count; ++i) {
        int fd = -1;
        sw_status status = sw_checkpoint_open_file(folder, &made.files[i], false, path, &fd, err);
        if (status != SW_OK) {
            sw_manifest_fini(&made);
            return status;
        }
        close(fd);
    }
    *manifest = made;
    return SW_OK;
}

sw_status sw_checkpoint_find(const char *folder, char found[SW_PATH_BYTES], sw_manifest *manifest,
                             sw_error *err)
{
    for (int look = 1;; ++look) {
        struct stat before = {0}, after;
        sw_error why = {0};
        SW_TRY(sw_checkpoint_locate(folder, found, err));
        bool was = lstat(found, &before) == 0;
        sw_status status = sw_checkpoint_open(found, manifest, &why);
        if (status == SW_OK)
            return SW_OK;
        bool stays = was && lstat(found, &after) == 0 && before.st_dev == after.st_dev &&
                     before.st_ino == after.st_ino;
        if (stays || look == LOOKS)
            return sw_error_pass(err, &why);
    }
}
