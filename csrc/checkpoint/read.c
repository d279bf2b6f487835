/* read.c - simple reads from a checkpoint: each is a load on the caller's thread alone. */
#include "checkpoint/read.h"

#include <inttypes.h>
#include <stdlib.h>

static const sw_load_options ALONE = {.thread_count = 1};

sw_status sw_checkpoint_check_values(const char *folder, const sw_manifest_file *file,
                                     sw_error *err)
{
    if (file->size_bytes > SW_VALUES_MAX_BYTES)
        SW_FAIL(err, SW_E_INVALID,
                "'%.300s/%.120s' has %" PRIu64 " bytes; a file of values has at most %d", folder,
                file->path, file->size_bytes, SW_VALUES_MAX_BYTES);
    return SW_OK;
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
