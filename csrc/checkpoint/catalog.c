/* catalog.c - entries of (bytes of the name, bytes of the data, name, data); the first is the
 * manifest. */
#include "checkpoint/read.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checkpoint/json.h"
#include "checkpoint/safetensors.h"
#include "platform/file.h"

enum { HEAD_BYTES = 16 };

static sw_status append_part(void *context, const char *part, size_t size_bytes, sw_error *err)
{
    (void)err;
    sw_text_append(context, part, size_bytes);
    return SW_OK;
}

static void append_head(sw_text *text, const char *path, uint64_t size_bytes)
{
    uint64_t head[2] = {strlen(path), size_bytes};
    sw_text_append(text, (const char *)head, sizeof head);
    sw_text_append(text, path, strlen(path));
}

/* Set the size of the data in the entry that begins at `head`. */
static void set_size(sw_text *text, size_t head, uint64_t size_bytes)
{
    memcpy(text->data + head + sizeof size_bytes, &size_bytes, sizeof size_bytes);
}

static bool is_safetensors(const char *path)
{
    static const char SUFFIX[] = ".safetensors";
    size_t length = strlen(path), suffix = sizeof SUFFIX - 1;
    return length > suffix && strcmp(path + length - suffix, SUFFIX) == 0;
}

/* Read bytes [0, *size_bytes) of a file behind `text`; of a safetensors file only the header, whose
 * size is then set. A read checks whole blocks, so the first block is read at once. */
static sw_status read_behind(const char *folder, const sw_manifest *manifest,
                             const sw_manifest_file *file, sw_text *text, size_t *size_bytes,
                             sw_error *err)
{
    bool has_header = is_safetensors(file->path);
    char path[SW_PATH_BYTES]; /* for messages */
    SW_TRY(sw_path_join(path, folder, file->path, err));
    *size_bytes = (size_t)file->size_bytes;
    if (!has_header)
        SW_TRY(sw_checkpoint_check_values(folder, file, err));
    else if (*size_bytes < sizeof(uint64_t))
        SW_FAIL(err, SW_E_INVALID, "'%.300s' is not a safetensors file: it has %zu bytes", path,
                *size_bytes);
    size_t first = *size_bytes;
    if (has_header && first > SW_BLOCK_BYTES)
        first = SW_BLOCK_BYTES;
    for (size_t wanted = first;; wanted = *size_bytes) {
        (void)sw_text_reserve(text, wanted);
        SW_TRY(sw_text_check(text, file->path, err));
        uint8_t *data = (uint8_t *)text->data + text->size_bytes;
        sw_read_range range = {0, wanted, data};
        SW_TRY(sw_checkpoint_read(folder, manifest, file->path, &range, 1, err));
        if (has_header)
            SW_TRY(sw_safetensors_header_size(data, file->size_bytes, path, size_bytes, err));
        if (*size_bytes <= wanted)
            return SW_OK;
    }
}

static sw_status append_file(const char *folder, const sw_manifest *manifest, const char *path,
                             sw_text *text, sw_error *err)
{
    const sw_manifest_file *file = sw_manifest_find(manifest, path);
    size_t size_bytes = 0, head = text->size_bytes;
    if (!file)
        SW_FAIL(err, SW_E_INVALID, "the checkpoint '%.300s' has no file '%.120s'", folder, path);
    append_head(text, path, 0);
    SW_TRY(sw_text_check(text, path, err));
    SW_TRY(read_behind(folder, manifest, file, text, &size_bytes, err));
    set_size(text, head, size_bytes);
    text->size_bytes += size_bytes;
    return SW_OK;
}

/* Ask the system for a file's first block, which is read next. A hint: asked for all files, the
 * disk reads their blocks at once. */
static void prefetch(const char *folder, const sw_manifest *manifest, const char *path)
{
    const sw_manifest_file *file = sw_manifest_find(manifest, path);
    char full[SW_PATH_BYTES];
    int fd = -1;
    if (file && sw_checkpoint_open_file(folder, file, false, full, &fd, NULL) == SW_OK) {
        (void)posix_fadvise(fd, 0, SW_BLOCK_BYTES, POSIX_FADV_WILLNEED);
        close(fd);
    }
}

static sw_status append_all(const char *folder, const sw_manifest *manifest,
                            const char *const *paths, size_t count, sw_text *text, sw_error *err)
{
    append_head(text, SW_MANIFEST_NAME, 0);
    size_t at = text->size_bytes;
    SW_TRY(sw_manifest_print(manifest, append_part, text, err));
    SW_TRY(sw_text_check(text, folder, err));
    set_size(text, 0, text->size_bytes - at);
    for (size_t i = 0; i < count; ++i)
        prefetch(folder, manifest, paths[i]);
    for (size_t i = 0; i < count; ++i)
        SW_TRY(append_file(folder, manifest, paths[i], text, err));
    return SW_OK;
}

sw_status sw_catalog_read(const char *folder, const sw_manifest *manifest, const char *const *paths,
                          size_t count, sw_catalog *catalog, sw_error *err)
{
    sw_text text = {0};
    sw_status status = append_all(folder, manifest, paths, count, &text, err);
    if (status != SW_OK) {
        sw_text_fini(&text);
        return status;
    }
    *catalog = (sw_catalog){(uint8_t *)text.data, text.size_bytes};
    return SW_OK;
}

/* Read the entry at *at and advance *at; false: none is left, or it would leave the catalog. */
static bool next_entry(const sw_catalog *catalog, size_t *at, const char **name, size_t *name_bytes,
                       const uint8_t **data, size_t *size_bytes)
{
    uint64_t head[2];
    size_t left = catalog->size_bytes - *at;
    if (left < HEAD_BYTES)
        return false;
    memcpy(head, catalog->data + *at, sizeof head);
    left -= HEAD_BYTES;
    if (head[0] > left || head[1] > left - head[0])
        return false;
    *name = (const char *)catalog->data + *at + HEAD_BYTES;
    *name_bytes = (size_t)head[0];
    *data = catalog->data + *at + HEAD_BYTES + head[0];
    *size_bytes = (size_t)head[1];
    *at += HEAD_BYTES + (size_t)head[0] + (size_t)head[1];
    return true;
}

const uint8_t *sw_catalog_find(const sw_catalog *catalog, const char *path, size_t *size_bytes)
{
    const char *name;
    const uint8_t *data;
    size_t at = 0, name_bytes, length = strlen(path);
    while (next_entry(catalog, &at, &name, &name_bytes, &data, size_bytes))
        if (name_bytes == length && memcmp(name, path, length) == 0)
            return data;
    return NULL;
}

sw_status sw_catalog_copy(const void *data, size_t size_bytes, sw_catalog *catalog,
                          sw_manifest *manifest, sw_error *err)
{
    sw_catalog made = {malloc(size_bytes + 1), size_bytes};
    size_t manifest_bytes = 0;
    if (!made.data)
        SW_FAIL(err, SW_E_MEMORY, "no memory for a catalog of %zu bytes", size_bytes);
    memcpy(made.data, data, size_bytes);
    const uint8_t *text = sw_catalog_find(&made, SW_MANIFEST_NAME, &manifest_bytes);
    sw_status status =
        text
            ? sw_manifest_parse((const char *)text, manifest_bytes, SW_MANIFEST_NAME, manifest, err)
            : sw_error_set(err, SW_E_INVALID, -1, "the catalog of a checkpoint has no manifest");
    if (status == SW_OK)
        *catalog = made;
    else
        sw_catalog_fini(&made);
    return status;
}

void sw_catalog_fini(sw_catalog *catalog)
{
    free(catalog->data);
    *catalog = (sw_catalog){0};
}
