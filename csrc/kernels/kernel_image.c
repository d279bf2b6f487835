/* kernel_image.c - find, check and write image files; see kernel_image.h. */
#include "kernels/kernel_image.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "kernels/crc32c.h"
#include "kernels/kernel_source.h"
#include "kernels/nvrtc.h"
#include "platform/clock.h"
#include "platform/file.h"

enum { HEADER_BYTES = 16, CHECKSUM_AT = 8, NAME_BYTES = 64, IMAGE_BYTES_MAX = 64 << 20 };

static const char magic[CHECKSUM_AT] = {'S', 'W', 'I', 'M', 'A', 'G', 'E', '1'};

static uint64_t hash_text(uint64_t hash, const char *text)
{
    for (; *text; ++text)
        hash = (hash ^ (unsigned char)*text) * UINT64_C(0x100000001b3);
    return hash;
}

uint64_t sw_image_hash(void)
{
    uint64_t hash = hash_text(UINT64_C(0xcbf29ce484222325), sw_kernel_source());
    for (const char *const *option = sw_kernel_options; *option; ++option)
        hash = hash_text(hash, *option);
    return hash;
}

const char *sw_image_origin_name(sw_image_origin origin)
{
    static const char *const names[] = {"none", "packaged", "cached", "compiled",
                                        "compiled, not cached"};
    return (unsigned)origin < sizeof names / sizeof *names ? names[origin] : "invalid";
}

static sw_status image_path(char path[SW_PATH_BYTES], const char *folder, int major, int minor,
                            sw_error *err)
{
    char name[NAME_BYTES];
    snprintf(name, sizeof name, "shardwright-%016llx-sm_%d%d.image",
             (unsigned long long)sw_image_hash(), major, minor);
    return sw_path_join(path, folder, name, err);
}

static uint32_t read_checksum(const unsigned char *header)
{
    return (uint32_t)header[CHECKSUM_AT] | (uint32_t)header[CHECKSUM_AT + 1] << 8 |
           (uint32_t)header[CHECKSUM_AT + 2] << 16 | (uint32_t)header[CHECKSUM_AT + 3] << 24;
}

/* Read the image of a file. Return false if the file is missing or invalid. */
static bool read_image(sw_image *image, const char *path)
{
    char *file = NULL;
    size_t size = 0;
    if (!sw_file_exists(path) || sw_file_read_whole(path, IMAGE_BYTES_MAX, &file, &size, NULL))
        return false;
    bool valid = size > HEADER_BYTES && memcmp(file, magic, sizeof magic) == 0 &&
                 sw_crc32c(0, file + HEADER_BYTES, size - HEADER_BYTES) ==
                     read_checksum((const unsigned char *)file);
    if (!valid) {
        free(file);
        return false;
    }
    image->size_bytes = size - HEADER_BYTES;
    memmove(file, file + HEADER_BYTES, image->size_bytes);
    image->data = file;
    return true;
}

/* Check that the folder is the user's own and that no other user may write to it. Create it if it
 * is missing. */
static bool folder_is_private(const char *folder)
{
    struct stat info;
    (void)mkdir(folder, 0700);
    return lstat(folder, &info) == 0 && S_ISDIR(info.st_mode) && info.st_uid == geteuid() &&
           (info.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

static sw_status write_image(const sw_image *image, const char *path, sw_error *err)
{
    char partial[SW_PATH_BYTES];
    size_t size = HEADER_BYTES + image->size_bytes;
    if (snprintf(partial, sizeof partial, "%s.%ld.%lld.partial", path, (long)getpid(),
                 (long long)sw_clock_now_ns()) >= (int)sizeof partial)
        SW_FAIL(err, SW_E_INVALID, "image cache: path is too long: %s", path);
    unsigned char *file = calloc(size, 1);
    if (!file)
        SW_FAIL(err, SW_E_MEMORY, "image cache: no memory for %zu bytes", size);
    uint32_t checksum = sw_crc32c(0, image->data, image->size_bytes);
    memcpy(file, magic, sizeof magic);
    for (int i = 0; i < 4; ++i)
        file[CHECKSUM_AT + i] = (unsigned char)(checksum >> (8 * i));
    memcpy(file + HEADER_BYTES, image->data, image->size_bytes);
    sw_status status = sw_file_write_new(partial, file, size, false, err);
    if (status == SW_OK)
        status = sw_file_rename(partial, path, err);
    if (status != SW_OK)
        (void)unlink(partial);
    free(file);
    return status;
}

static sw_status compile_image(sw_image *image, int major, int minor, const sw_image_places *places,
                               sw_error *err)
{
    return sw_nvrtc_compile(places->nvrtc, places->nvrtc_builtins, sw_kernel_source(),
                            sw_kernel_options, major, minor, &image->data, &image->size_bytes, err);
}

static sw_status fail_everywhere(int major, int minor, const sw_image_places *places,
                                 const char *compiler, sw_error *err)
{
    SW_FAIL(err, SW_E_UNSUPPORTED,
            "no image of the kernels for sm_%d%d: packaged in %.80s: none; cached in %.80s: none; "
            "nvrtc: %.200s",
            major, minor, places->packaged_folder ? places->packaged_folder : "no folder",
            places->cache_folder ? places->cache_folder : "no folder", compiler);
}

sw_status sw_image_find(sw_image *image, int major, int minor, const sw_image_places *places,
                        sw_error *err)
{
    char path[SW_PATH_BYTES];
    sw_error reason = {.message = "no compiler was named"};
    sw_image found = {0};
    if (places->packaged_folder) {
        SW_TRY(image_path(path, places->packaged_folder, major, minor, err));
        if (read_image(&found, path)) {
            found.origin = SW_IMAGE_PACKAGED;
            *image = found;
            return SW_OK;
        }
    }
    bool cached = places->cache_folder && folder_is_private(places->cache_folder);
    if (cached) {
        SW_TRY(image_path(path, places->cache_folder, major, minor, err));
        if (read_image(&found, path)) {
            found.origin = SW_IMAGE_CACHED;
            *image = found;
            return SW_OK;
        }
    }
    sw_status status = SW_E_UNSUPPORTED;
    if (places->nvrtc)
        status = compile_image(&found, major, minor, places, &reason);
    if (status == SW_E_UNSUPPORTED)
        return fail_everywhere(major, minor, places, reason.message, err);
    if (status != SW_OK)
        return sw_error_set(err, status, reason.detail, "%s", reason.message);
    if (cached) /* a cache that cannot be written costs time, not correctness */
        cached = write_image(&found, path, NULL) == SW_OK;
    found.origin = cached ? SW_IMAGE_COMPILED : SW_IMAGE_COMPILED_UNCACHED;
    *image = found;
    return SW_OK;
}

void sw_image_fini(sw_image *image)
{
    free(image->data);
    *image = (sw_image){0};
}
