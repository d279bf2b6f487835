/* manifest.c - see manifest.h and docs/format.md. */
#include "checkpoint/manifest.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint/json.h"
#include "kernels/crc32c.h"
#include "platform/file.h"

#define FORMAT_NAME "shardwright.checkpoint"
#define SEAL_KEY ",\"self_crc32c\":\""
static const int64_t INTEGER_MAX = INT64_C(1) << 53;

void sw_manifest_fini(sw_manifest *manifest)
{
    for (size_t i = 0; i < manifest->file_count; ++i) {
        free(manifest->files[i].path);
        free(manifest->files[i].crcs);
        free(manifest->files[i].is_written);
    }
    free(manifest->files);
    *manifest = (sw_manifest){0};
}

bool sw_manifest_is_nonce(const char *nonce)
{
    size_t length = strspn(nonce, "0123456789abcdefghijklmnopqrstuvwxyz");
    return length > 0 && length < SW_NONCE_BYTES && nonce[length] == '\0';
}

static uint64_t blocks_of(uint64_t size_bytes)
{
    return size_bytes / SW_BLOCK_BYTES + (size_bytes % SW_BLOCK_BYTES != 0);
}

static sw_status add_entry(sw_manifest *manifest, const char *path, uint64_t size_bytes,
                           uint64_t block_count, sw_manifest_file **file, sw_error *err)
{
    if (manifest->file_count == manifest->file_capacity) {
        size_t capacity = manifest->file_capacity ? 2 * manifest->file_capacity : 8;
        sw_manifest_file *grown = realloc(manifest->files, capacity * sizeof *grown);
        if (!grown)
            SW_FAIL(err, SW_E_MEMORY, "no memory for a manifest of %zu files", capacity);
        manifest->files = grown;
        manifest->file_capacity = capacity;
    }
    sw_manifest_file made = {
        .path = strdup(path), .size_bytes = size_bytes, .block_count = block_count};
    made.crcs = calloc((size_t)block_count + 1, sizeof *made.crcs);
    made.is_written = calloc((size_t)block_count + 1, sizeof *made.is_written);
    if (!made.path || !made.crcs || !made.is_written) {
        free(made.path);
        free(made.crcs);
        free(made.is_written);
        SW_FAIL(err, SW_E_MEMORY, "no memory for the %" PRIu64 " block checksums of '%s'",
                block_count, path);
    }
    *file = &manifest->files[manifest->file_count++];
    **file = made;
    return SW_OK;
}

sw_status sw_manifest_add_file(sw_manifest *manifest, const char *path, uint64_t size_bytes,
                               sw_error *err)
{
    sw_manifest_file *file;
    if (!sw_plan_is_path(path) || sw_manifest_find(manifest, path))
        SW_FAIL(err, SW_E_INVALID, "manifest: '%.200s' is no path of a checkpoint, or stands twice",
                path);
    return add_entry(manifest, path, size_bytes, blocks_of(size_bytes), &file, err);
}

const sw_manifest_file *sw_manifest_find(const sw_manifest *manifest, const char *path)
{
    for (size_t i = 0; i < manifest->file_count; ++i)
        if (strcmp(manifest->files[i].path, path) == 0)
            return &manifest->files[i];
    return NULL;
}

sw_status sw_manifest_add_block(sw_manifest *manifest, const char *path, uint64_t block,
                                uint32_t crc, sw_error *err)
{
    const sw_manifest_file *file = sw_manifest_find(manifest, path);
    if (!file || block >= file->block_count || file->is_written[block])
        SW_FAIL(err, SW_E_INVALID, "manifest: block %" PRIu64 " of '%.200s' %s", block, path,
                file && block < file->block_count ? "was written twice" : "does not exist");
    file->crcs[block] = crc;
    file->is_written[block] = true;
    return SW_OK;
}

sw_status sw_manifest_merge(sw_manifest *manifest, const sw_manifest *acknowledgement, int rank,
                            sw_error *err)
{
    char own[32];
    snprintf(own, sizeof own, "ranks/%05d.", rank);
    for (size_t i = 0; i < acknowledgement->file_count; ++i) {
        const sw_manifest_file *run = &acknowledgement->files[i];
        const sw_manifest_file *known = sw_manifest_find(manifest, run->path);
        if (!known) {
            if (strncmp(run->path, own, strlen(own)) != 0)
                SW_FAIL(err, SW_E_INVALID, "rank %d acknowledges '%.200s', which is not its own",
                        rank, run->path);
            SW_TRY(sw_manifest_add_file(manifest, run->path, run->size_bytes, err));
        } else if (known->size_bytes != run->size_bytes) {
            SW_FAIL(err, SW_E_MISMATCH,
                    "rank %d wrote '%.200s' as %" PRIu64 " bytes, rank 0 as %" PRIu64, rank,
                    run->path, run->size_bytes, known->size_bytes);
        }
        for (uint64_t b = 0; b < run->block_count; ++b)
            SW_TRY(sw_manifest_add_block(manifest, run->path, run->first_block + b, run->crcs[b],
                                         err));
    }
    return SW_OK;
}

static int compare_paths(const void *a, const void *b)
{
    return strcmp(((const sw_manifest_file *)a)->path, ((const sw_manifest_file *)b)->path);
}

sw_status sw_manifest_complete(sw_manifest *manifest, sw_error *err)
{
    if (manifest->file_count)
        qsort(manifest->files, manifest->file_count, sizeof *manifest->files, compare_paths);
    manifest->block_count = 0;
    for (size_t i = 0; i < manifest->file_count; ++i) {
        sw_manifest_file *file = &manifest->files[i];
        for (uint64_t b = 0; b < file->block_count; ++b)
            if (!file->is_written[b])
                SW_FAIL(err, SW_E_STATE, "no rank wrote block %" PRIu64 " of '%.200s'", b,
                        file->path);
        file->first_block = manifest->block_count;
        manifest->block_count += file->block_count;
    }
    return SW_OK;
}

static void print_crcs(sw_text *text, const uint32_t *crcs, uint64_t count)
{
    sw_text_append(text, "\"crc32c\":\"", 10);
    for (uint64_t b = 0; b < count; ++b)
        sw_text_print(text, "%08x", crcs[b]);
    sw_text_append(text, "\"}", 2);
}

static void print_file(sw_text *text, const sw_manifest_file *file)
{
    sw_text_print(text, "\n{\"path\":\"%s\",\"bytes\":%" PRIu64 ",", file->path, file->size_bytes);
    print_crcs(text, file->crcs, file->block_count);
}

/* Its runs of written blocks; a file without blocks as one empty run. */
static void print_runs(sw_text *text, const sw_manifest_file *file, bool *is_first)
{
    uint64_t b = 0;
    bool is_empty = file->block_count == 0;
    while (is_empty || b < file->block_count) {
        uint64_t end = b;
        while (end < file->block_count && file->is_written[end])
            end++;
        if (end > b || is_empty) {
            sw_text_print(text,
                          "%s\n{\"path\":\"%s\",\"bytes\":%" PRIu64 ",\"first_block\":%" PRIu64 ",",
                          *is_first ? "" : ",", file->path, file->size_bytes, b);
            print_crcs(text, file->crcs + b, end - b);
            *is_first = false;
        }
        is_empty = false;
        b = end > b ? end : b + 1;
    }
}

sw_status sw_manifest_print(const sw_manifest *manifest, bool is_acknowledgement, char **made,
                            size_t *size_bytes, sw_error *err)
{
    sw_text text = {0};
    bool is_first = true;
    sw_text_print(&text,
                  "{\"format\":\"" FORMAT_NAME "\",\"version\":%d,\"step\":%" PRIu64
                  ",\"world_size\":%d,\"nonce\":\"%s\",",
                  SW_MANIFEST_VERSION, manifest->step, manifest->world_size, manifest->nonce);
    if (manifest->has_metric) {
        sw_text_append(&text, "\"metric\":", 9);
        sw_text_number(&text, manifest->metric);
        sw_text_append(&text, ",", 1);
    }
    sw_text_print(&text, "\"block_bytes\":%d,\"files\":[", SW_BLOCK_BYTES);
    for (size_t i = 0; i < manifest->file_count; ++i) {
        if (is_acknowledgement) {
            print_runs(&text, &manifest->files[i], &is_first);
        } else {
            sw_text_append(&text, ",", i > 0);
            print_file(&text, &manifest->files[i]);
        }
    }
    sw_text_append(&text, "]", 1);
    uint32_t crc = sw_crc32c(0, text.data, text.size_bytes);
    sw_text_print(&text, SEAL_KEY "%08x\"}\n", crc);
    sw_status status = sw_text_check(&text, SW_MANIFEST_NAME, err);
    if (status != SW_OK) {
        sw_text_fini(&text);
        return status;
    }
    *made = text.data;
    *size_bytes = text.size_bytes;
    return SW_OK;
}

static bool read_hex8(const char *text, uint32_t *value)
{
    uint32_t result = 0;
    for (int i = 0; i < 8; ++i) {
        char c = text[i];
        if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f')))
            return false;
        result = result << 4 | (uint32_t)(c <= '9' ? c - '0' : c - 'a' + 10);
    }
    *value = result;
    return true;
}

/* The text ends with SEAL_KEY, 8 digits, quote, brace, newline. */
static sw_status check_seal(const char *text, size_t size_bytes, const char *label, sw_error *err)
{
    const size_t key = sizeof SEAL_KEY - 1, tail = key + 8 + 3;
    uint32_t stated = 0;
    if (size_bytes < tail || memcmp(text + size_bytes - tail, SEAL_KEY, key) != 0 ||
        !read_hex8(text + size_bytes - 11, &stated) ||
        memcmp(text + size_bytes - 3, "\"}\n", 3) != 0)
        SW_FAIL(err, SW_E_INVALID,
                "%s is cut off or was changed: it does not end with its checksum", label);
    uint32_t found = sw_crc32c(0, text, size_bytes - tail);
    if (found != stated)
        SW_FAIL(err, SW_E_INVALID, "%s was changed: its checksum is %08x, it states %08x", label,
                found, stated);
    return SW_OK;
}

static bool get_integer(const sw_json_node *object, const char *key, int64_t least, int64_t *value)
{
    const sw_json_node *node = sw_json_find(object, key);
    if (!node || node->kind != SW_JSON_INTEGER || node->integer < least ||
        node->integer >= INTEGER_MAX)
        return false;
    *value = node->integer;
    return true;
}

static const char *get_string(const sw_json_node *object, const char *key)
{
    const sw_json_node *node = sw_json_find(object, key);
    return node && node->kind == SW_JSON_STRING ? node->text : NULL;
}

static sw_status parse_file(const sw_json_node *node, bool is_acknowledgement, const char *label,
                            sw_manifest *manifest, sw_error *err)
{
    int64_t size = 0, first = 0;
    const char *path = get_string(node, "path"), *crcs = get_string(node, "crc32c");
    if (!path || !crcs || !sw_plan_is_path(path) || !get_integer(node, "bytes", 0, &size) ||
        (is_acknowledgement && !get_integer(node, "first_block", 0, &first)))
        SW_FAIL(err, SW_E_INVALID,
                "%s: a file needs a path inside the folder, bytes and crc32c; got path '%.200s'",
                label, path ? path : "");
    size_t digits = strlen(crcs);
    uint64_t count = digits / 8, whole = blocks_of((uint64_t)size);
    if (digits % 8 ||
        (is_acknowledgement ? (uint64_t)first > whole || count > whole - (uint64_t)first
                            : count != whole))
        SW_FAIL(err, SW_E_INVALID, "%s: '%.200s' has %" PRId64 " bytes and %zu digits of checksums",
                label, path, size, digits);
    sw_manifest_file *file = NULL;
    SW_TRY(add_entry(manifest, path, (uint64_t)size, count, &file, err));
    file->first_block = is_acknowledgement ? (uint64_t)first : manifest->block_count;
    manifest->block_count += count;
    for (uint64_t b = 0; b < count; ++b)
        if (!read_hex8(crcs + 8 * b, &file->crcs[b]))
            SW_FAIL(err, SW_E_INVALID, "%s: '%.200s': a checksum is not 8 hex digits", label, path);
    free(file->is_written);
    file->is_written = NULL;
    return SW_OK;
}

static sw_status parse_files(const sw_json_node *files, bool is_acknowledgement, const char *label,
                             sw_manifest *manifest, sw_error *err)
{
    if (!files || files->kind != SW_JSON_ARRAY)
        SW_FAIL(err, SW_E_INVALID, "%s: the list of files is missing", label);
    const sw_json_node *node = sw_json_first(files);
    for (size_t i = 0; i < files->count; ++i, node = sw_json_next(node)) {
        SW_TRY(parse_file(node, is_acknowledgement, label, manifest, err));
        size_t last = manifest->file_count - 1;
        if (!is_acknowledgement && last > 0 &&
            strcmp(manifest->files[last - 1].path, manifest->files[last].path) >= 0)
            SW_FAIL(err, SW_E_INVALID, "%s: files are not in the order of their paths at '%.200s'",
                    label, manifest->files[last].path);
    }
    return SW_OK;
}

static sw_status parse_root(const sw_json_node *root, bool is_acknowledgement, const char *label,
                            sw_manifest *manifest, sw_error *err)
{
    const char *format = get_string(root, "format"), *nonce = get_string(root, "nonce");
    int64_t version = 0, step = 0, world_size = 0, block_bytes = 0;
    if (!format || strcmp(format, FORMAT_NAME) != 0)
        SW_FAIL(err, SW_E_INVALID, "%s: it is not the manifest of a checkpoint (format '%.64s')",
                label, format ? format : "");
    if (!get_integer(root, "version", 1, &version) || version > SW_MANIFEST_VERSION)
        SW_FAIL(err, SW_E_UNSUPPORTED,
                "%s: it has version %" PRId64
                ", this program reads up to %d: use a newer shardwright",
                label, version, SW_MANIFEST_VERSION);
    if (!get_integer(root, "step", 0, &step) || !get_integer(root, "world_size", 1, &world_size) ||
        world_size > 1 << 20 || !get_integer(root, "block_bytes", 1, &block_bytes) ||
        block_bytes != SW_BLOCK_BYTES || !nonce || !sw_manifest_is_nonce(nonce))
        SW_FAIL(err, SW_E_INVALID,
                "%s: step, world_size, nonce or block_bytes (%d) is missing or out of range", label,
                SW_BLOCK_BYTES);
    const sw_json_node *metric = sw_json_find(root, "metric");
    manifest->has_metric = metric &&
                           (metric->kind == SW_JSON_INTEGER || metric->kind == SW_JSON_NUMBER) &&
                           isfinite(metric->number);
    manifest->metric = manifest->has_metric ? metric->number : 0;
    manifest->step = (uint64_t)step;
    manifest->world_size = (int)world_size;
    snprintf(manifest->nonce, sizeof manifest->nonce, "%s", nonce);
    return parse_files(sw_json_find(root, "files"), is_acknowledgement, label, manifest, err);
}

sw_status sw_manifest_parse(const char *text, size_t size_bytes, bool is_acknowledgement,
                            const char *label, sw_manifest *manifest, sw_error *err)
{
    sw_json json = {0};
    sw_manifest made = {0};
    SW_TRY(check_seal(text, size_bytes, label, err));
    SW_TRY(sw_json_parse(text, size_bytes, label, &json, err));
    sw_status status = parse_root(json.nodes, is_acknowledgement, label, &made, err);
    sw_json_fini(&json);
    if (status == SW_OK)
        *manifest = made;
    else
        sw_manifest_fini(&made);
    return status;
}

sw_status sw_manifest_read(const char *folder, sw_manifest *manifest, sw_error *err)
{
    char path[SW_PATH_BYTES];
    char *text = NULL;
    size_t size_bytes = 0;
    SW_TRY(sw_path_join(path, folder, SW_MANIFEST_NAME, err));
    SW_TRY(sw_file_read_whole(path, SW_MANIFEST_MAX_BYTES, &text, &size_bytes, err));
    sw_status status = sw_manifest_parse(text, size_bytes, false, path, manifest, err);
    free(text);
    return status;
}
