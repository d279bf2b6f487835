/* kernel_image.c - find, check and write image files; see kernel_image.h. */
#include "kernels/kernel_image.h"

#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/crc32c.h"
#include "kernels/kernel_source.h"
#include "kernels/nvrtc.h"
#include "platform/clock.h"
#include "platform/file.h"

enum { HEADER_BYTES = 16, CHECKSUM_AT = 8, NAME_BYTES = 96, IMAGE_BYTES_MAX = 64 << 20 };

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

typedef struct version {
    int major, minor; /* of NVRTC; 0.0: of none */
} version;

/* Write the name up to the compiler's version. */
static int name_start(char name[NAME_BYTES], int major, int minor)
{
    return snprintf(name, NAME_BYTES, "shardwright-%016llx-sm_%d%d",
                    (unsigned long long)sw_image_hash(), major, minor);
}

static sw_status image_path(char path[SW_PATH_BYTES], const char *folder, int major, int minor,
                            version by, sw_error *err)
{
    char name[NAME_BYTES];
    int used = name_start(name, major, minor);
    if (by.major)
        used +=
            snprintf(name + used, sizeof name - (size_t)used, "-nvrtc%d.%d", by.major, by.minor);
    snprintf(name + used, sizeof name - (size_t)used, ".image");
    return sw_path_join(path, folder, name, err);
}

/* Parse what follows a name's start. Return false if it is not an image's. */
static bool read_version(const char *rest, version *by)
{
    int end = 0;
    *by = (version){0};
    if (strcmp(rest, ".image") == 0)
        return true;
    return sscanf(rest, "-nvrtc%d.%d.image%n", &by->major, &by->minor, &end) == 2 && end > 0 &&
           rest[end] == 0;
}

static bool is_older(version a, version b)
{
    return a.major != b.major ? a.major < b.major : a.minor < b.minor;
}

/* Find the oldest compiler's file in a folder. Return false if there is none. */
static bool find_oldest(const char *folder, int major, int minor, version *oldest)
{
    char start[NAME_BYTES];
    size_t length = (size_t)name_start(start, major, minor);
    bool found = false;
    DIR *open = opendir(folder);
    const struct dirent *each;
    version by;
    while (open && (each = readdir(open))) {
        if (strncmp(each->d_name, start, length) != 0 || !read_version(each->d_name + length, &by))
            continue;
        if (!found || is_older(by, *oldest))
            *oldest = by;
        found = true;
    }
    if (open)
        closedir(open);
    return found;
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

/* Read the file of that compiler, or with NULL of the oldest one. */
static bool read_from(sw_image *image, const char *folder, int major, int minor, const version *by)
{
    char path[SW_PATH_BYTES];
    version oldest;
    if (!by && !find_oldest(folder, major, minor, &oldest))
        return false;
    return image_path(path, folder, major, minor, by ? *by : oldest, NULL) == SW_OK &&
           read_image(image, path);
}

/* Compile, and write to the cache. A cache that cannot be written costs time, not correctness. */
static sw_status compile_to(const char *cache, sw_image *image, int major, int minor, version by,
                            const sw_image_places *places, sw_error *err)
{
    char path[SW_PATH_BYTES];
    SW_TRY(compile_image(image, major, minor, places, err));
    bool is_written = cache && image_path(path, cache, major, minor, by, NULL) == SW_OK &&
                      write_image(image, path, NULL) == SW_OK;
    image->origin = is_written ? SW_IMAGE_COMPILED : SW_IMAGE_COMPILED_UNCACHED;
    return SW_OK;
}

sw_status sw_image_find(sw_image *image, int major, int minor, const sw_image_places *places,
                        sw_error *err)
{
    sw_error reason = {.message = "no compiler was named"};
    sw_image found = {0};
    version by;
    if (places->packaged_folder && read_from(&found, places->packaged_folder, major, minor, NULL)) {
        found.origin = SW_IMAGE_PACKAGED;
        *image = found;
        return SW_OK;
    }
    const char *cache = places->cache_folder && folder_is_private(places->cache_folder)
                            ? places->cache_folder
                            : NULL;
    sw_status status = SW_E_UNSUPPORTED;
    if (places->nvrtc)
        status =
            sw_nvrtc_version(places->nvrtc, places->nvrtc_builtins, &by.major, &by.minor, &reason);
    if (cache && !places->replaces_cached &&
        read_from(&found, cache, major, minor, status == SW_OK ? &by : NULL)) {
        found.origin = SW_IMAGE_CACHED;
        *image = found;
        return SW_OK;
    }
    if (status == SW_OK)
        status = compile_to(cache, &found, major, minor, by, places, &reason);
    if (status == SW_E_UNSUPPORTED)
        return fail_everywhere(major, minor, places, reason.message, err);
    if (status != SW_OK)
        return sw_error_pass(err, &reason);
    *image = found;
    return SW_OK;
}

void sw_image_fini(sw_image *image)
{
    free(image->data);
    *image = (sw_image){0};
}
