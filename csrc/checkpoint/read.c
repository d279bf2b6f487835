/* read.c - one block at a time: read to where it goes and checked there, or, where only a part of
 * it is wanted, through a buffer that stays in the second-level cache. */
#include "checkpoint/read.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/crc32c.h"
#include "platform/file.h"

typedef struct block_reader {
    const char *folder;
    const sw_manifest_file *file; /* open, or NULL */
    char path[SW_PATH_BYTES];
    int fd;
    uint8_t *buffer; /* owned; one block */
} block_reader;

/* A component in the middle of a path could be a link that leads out of the folder: `ranks` must be
 * a folder itself. */
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

static sw_status open_listed(const char *folder, const sw_manifest_file *file,
                             char path[SW_PATH_BYTES], int *fd, sw_error *err)
{
    uint64_t size_bytes = 0;
    SW_TRY(sw_path_join(path, folder, file->path, err));
    SW_TRY(check_folders(folder, file->path, err));
    SW_TRY(sw_file_open_read(path, fd, &size_bytes, err));
    if (size_bytes != file->size_bytes) {
        close(*fd);
        *fd = -1;
        SW_FAIL(err, SW_E_INVALID, "'%s' has %" PRIu64 " bytes, the manifest says %" PRIu64, path,
                size_bytes, file->size_bytes);
    }
    return SW_OK;
}

sw_status sw_checkpoint_open(const char *folder, sw_manifest *manifest, sw_error *err)
{
    sw_manifest made = {0};
    char path[SW_PATH_BYTES];
    SW_TRY(sw_manifest_read(folder, &made, err));
    for (size_t i = 0; i < made.file_count; ++i) {
        int fd = -1;
        sw_status status = open_listed(folder, &made.files[i], path, &fd, err);
        if (status != SW_OK) {
            sw_manifest_fini(&made);
            return status;
        }
        close(fd);
    }
    *manifest = made;
    return SW_OK;
}

static sw_status reader_init(block_reader *reader, const char *folder, sw_error *err)
{
    *reader = (block_reader){.folder = folder, .fd = -1, .buffer = malloc(SW_BLOCK_BYTES)};
    if (!reader->buffer)
        SW_FAIL(err, SW_E_MEMORY, "no memory for a buffer of %d bytes", SW_BLOCK_BYTES);
    return SW_OK;
}

static void reader_fini(block_reader *reader)
{
    if (reader->fd >= 0)
        close(reader->fd);
    free(reader->buffer);
}

static sw_status reader_open(block_reader *reader, const sw_manifest_file *file, sw_error *err)
{
    if (reader->file == file)
        return SW_OK;
    if (reader->fd >= 0)
        close(reader->fd);
    reader->fd = -1;
    reader->file = NULL;
    SW_TRY(open_listed(reader->folder, file, reader->path, &reader->fd, err));
    (void)posix_fadvise(reader->fd, 0, 0, POSIX_FADV_SEQUENTIAL); /* a hint: larger read-ahead */
    reader->file = file;
    return SW_OK;
}

/* Block `number` of the open file to `destination`, checked there. */
static sw_status load_block(block_reader *reader, uint64_t number, uint8_t *destination,
                            size_t *size_bytes, sw_error *err)
{
    uint64_t offset = number * SW_BLOCK_BYTES, left = reader->file->size_bytes - offset;
    size_t size = left < SW_BLOCK_BYTES ? (size_t)left : SW_BLOCK_BYTES;
    SW_TRY(sw_file_read_at(reader->fd, reader->path, destination, size, offset, err));
    uint32_t found = sw_crc32c(0, destination, size), stated = reader->file->crcs[number];
    if (found != stated)
        SW_FAIL(err, SW_E_INVALID,
                "'%s' was changed or did not survive: block %" PRIu64 " (bytes %" PRIu64
                " to %" PRIu64 ") has checksum %08x, the manifest says %08x",
                reader->path, number, offset, offset + size, found, stated);
    *size_bytes = size;
    return SW_OK;
}

static sw_status verify_range(block_reader *reader, const sw_manifest *manifest, uint64_t first,
                              uint64_t end, sw_error *err)
{
    for (size_t i = 0; i < manifest->file_count; ++i) {
        const sw_manifest_file *file = &manifest->files[i];
        uint64_t begin = first > file->first_block ? first - file->first_block : 0;
        for (uint64_t b = begin; b < file->block_count && file->first_block + b < end; ++b) {
            size_t size_bytes;
            SW_TRY(reader_open(reader, file, err));
            SW_TRY(load_block(reader, b, reader->buffer, &size_bytes, err));
        }
    }
    return SW_OK;
}

sw_status sw_checkpoint_verify(const char *folder, const sw_manifest *manifest, uint64_t first,
                               uint64_t end, sw_error *err)
{
    block_reader reader;
    SW_TRY(reader_init(&reader, folder, err));
    sw_status status = verify_range(&reader, manifest, first, end, err);
    reader_fini(&reader);
    return status;
}

static sw_status read_ranges(block_reader *reader, const sw_read_range *ranges, size_t count,
                             sw_error *err)
{
    uint64_t loaded = UINT64_MAX;
    for (size_t i = 0; i < count; ++i) {
        uint64_t at = ranges[i].begin, end = at + ranges[i].size_bytes;
        uint8_t *to = ranges[i].destination;
        while (at < end) {
            uint64_t block = at / SW_BLOCK_BYTES, inside = at % SW_BLOCK_BYTES;
            size_t size_bytes;
            if (block != loaded && inside == 0 && end - at >= SW_BLOCK_BYTES) { /* all of it */
                SW_TRY(load_block(reader, block, to, &size_bytes, err));
                to += size_bytes;
                at += size_bytes;
                continue;
            }
            if (block != loaded) /* neighbours share it */
                SW_TRY(load_block(reader, block, reader->buffer, &size_bytes, err));
            loaded = block;
            size_t piece =
                (size_t)(end - at < SW_BLOCK_BYTES - inside ? end - at : SW_BLOCK_BYTES - inside);
            memcpy(to, reader->buffer + inside, piece);
            to += piece;
            at += piece;
        }
    }
    return SW_OK;
}

sw_status sw_checkpoint_read(const char *folder, const sw_manifest *manifest, const char *path,
                             const sw_read_range *ranges, size_t range_count, sw_error *err)
{
    const sw_manifest_file *file = sw_manifest_find(manifest, path);
    uint64_t after = 0;
    block_reader reader;
    if (!file)
        SW_FAIL(err, SW_E_INVALID, "the checkpoint '%.300s' has no file '%.120s'", folder, path);
    for (size_t i = 0; i < range_count; ++i) {
        uint64_t end = 0;
        if (ranges[i].begin < after ||
            __builtin_add_overflow(ranges[i].begin, ranges[i].size_bytes, &end) ||
            end > file->size_bytes)
            SW_FAIL(err, SW_E_INVALID,
                    "read of '%s': ranges must ascend inside its %" PRIu64
                    " bytes; number %zu is [%" PRIu64 ", +%zu)",
                    path, file->size_bytes, i, ranges[i].begin, ranges[i].size_bytes);
        after = end;
    }
    SW_TRY(reader_init(&reader, folder, err));
    sw_status status = reader_open(&reader, file, err);
    if (status == SW_OK)
        status = read_ranges(&reader, ranges, range_count, err);
    reader_fini(&reader);
    return status;
}
