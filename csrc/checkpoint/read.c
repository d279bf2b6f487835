/* read.c - the simple ways to read from a checkpoint: each is a load by the caller's thread alone.
 */
#include "checkpoint/read.h"

#include <stdlib.h>

static const sw_load_options ALONE = {.thread_count = 1};

sw_status sw_checkpoint_verify(const char *folder, const sw_manifest *manifest, uint64_t first,
                               uint64_t end, sw_error *err)
{
    sw_load_range *ranges = calloc(manifest->file_count + 1, sizeof *ranges);
    size_t count = 0;
    if (!ranges)
        SW_FAIL(err, SW_E_MEMORY, "no memory to check %zu files", manifest->file_count);
    for (size_t i = 0; i < manifest->file_count; ++i) {
        const sw_manifest_file *file = &manifest->files[i];
        uint64_t low = first > file->first_block ? first - file->first_block : 0;
        uint64_t high = end > file->first_block ? end - file->first_block : 0;
        uint64_t begin = low * SW_BLOCK_BYTES, stop = file->size_bytes;
        if (high < file->block_count)
            stop = high * SW_BLOCK_BYTES;
        if (low < file->block_count && begin < stop)
            ranges[count++] =
                (sw_load_range){.file = i, .begin = begin, .size_bytes = (size_t)(stop - begin)};
    }
    sw_status status = sw_checkpoint_load(folder, manifest, ranges, count, &ALONE, err);
    free(ranges);
    return status;
}

sw_status sw_checkpoint_read(const char *folder, const sw_manifest *manifest, const char *path,
                             const sw_read_range *ranges, size_t range_count, sw_error *err)
{
    const sw_manifest_file *file = sw_manifest_find(manifest, path);
    if (!file)
        SW_FAIL(err, SW_E_INVALID, "the checkpoint '%.300s' has no file '%.120s'", folder, path);
    sw_load_range *loads = calloc(range_count + 1, sizeof *loads);
    if (!loads)
        SW_FAIL(err, SW_E_MEMORY, "no memory to read %zu ranges of '%s'", range_count, path);
    for (size_t i = 0; i < range_count; ++i)
        loads[i] = (sw_load_range){.file = (size_t)(file - manifest->files),
                                   .begin = ranges[i].begin,
                                   .size_bytes = ranges[i].size_bytes,
                                   .destination = ranges[i].destination};
    sw_status status = sw_checkpoint_load(folder, manifest, loads, range_count, &ALONE, err);
    free(loads);
    return status;
}
