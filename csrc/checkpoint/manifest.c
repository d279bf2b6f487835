/* manifest.c - see manifest.h and docs/format.md. */
#include "checkpoint/manifest.h"
#include "base/bytes.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "checkpoint/json.h"
#include "kernels/crc32c.h"
#include "platform/file.h"

#define FORMAT_NAME "shardwright.checkpoint"
#define SEAL_KEY ",\"self_crc32c\":\""
enum { WORLD_MAX = 1 << 20, PART_BYTES = 64 << 10 };
enum { SHORT_BYTES = 1 << 20, NAME_BYTES = 4096, BLOCK_TEXT_BYTES = 64 };
enum { HEADING_VALUES = 1024, FILE_VALUES = 16 };
static const int64_t INTEGER_MAX = INT64_C(1) << 53;

void sw_manifest_fini(sw_manifest *manifest)
{
    for (size_t i = 0; i < manifest->file_count; ++i) {
        free(manifest->files[i].path);
        free(manifest->files[i].crcs);
        free(manifest->files[i].covers);
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
                           sw_manifest_file **file, sw_error *err)
{
    sw_manifest_file *files =
        sw_grown(manifest->files, &manifest->file_capacity, manifest->file_count, sizeof *files, 8);
    if (!files)
        SW_FAIL(err, SW_E_MEMORY, "no memory for a manifest of %zu files",
                manifest->file_count + 1);
    manifest->files = files;
    sw_manifest_file made = {.path = strdup(path),
                             .size_bytes = size_bytes,
                             .first_block = manifest->block_count,
                             .block_count = blocks_of(size_bytes)};
    made.crcs = calloc((size_t)made.block_count + 1, sizeof *made.crcs);
    if (!made.path || !made.crcs) {
        free(made.path);
        free(made.crcs);
        SW_FAIL(err, SW_E_MEMORY, "no memory for the %" PRIu64 " block checksums of '%s'",
                blocks_of(size_bytes), path);
    }
    manifest->block_count += made.block_count;
    *file = &manifest->files[manifest->file_count++];
    **file = made;
    return SW_OK;
}

sw_status sw_manifest_add_file(sw_manifest *manifest, const char *path, uint64_t size_bytes,
                               sw_error *err)
{
    sw_manifest_file *file = NULL;
    if (!sw_plan_is_path(path))
        SW_FAIL(err, SW_E_INVALID, "manifest: '%.200s' is not a path of a checkpoint", path);
    SW_TRY(add_entry(manifest, path, size_bytes, &file, err));
    file->covers = calloc((size_t)file->block_count + 1, sizeof *file->covers);
    if (!file->covers)
        SW_FAIL(err, SW_E_MEMORY, "no memory for the %" PRIu64 " blocks of '%s'", file->block_count,
                path);
    return SW_OK;
}

static int compare_paths(const void *a, const void *b)
{
    return strcmp(((const sw_manifest_file *)a)->path, ((const sw_manifest_file *)b)->path);
}

const sw_manifest_file *sw_manifest_find(const sw_manifest *manifest, const char *path)
{
    sw_manifest_file key = {.path = (char *)(uintptr_t)path};
    return manifest->file_count ? bsearch(&key, manifest->files, manifest->file_count,
                                          sizeof *manifest->files, compare_paths)
                                : NULL;
}

/* Return the file of a block; files without blocks share a number with the next one. */
static sw_manifest_file *file_of(sw_manifest *manifest, uint64_t block)
{
    sw_manifest_file *last = &manifest->files[manifest->last_file];
    if (block - last->first_block < last->block_count)
        return last;
    size_t low = 0, high = manifest->file_count;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (manifest->files[middle].first_block <= block)
            low = middle;
        else
            high = middle;
    }
    manifest->last_file = low;
    return &manifest->files[low];
}

sw_status sw_manifest_add_tally(void *context, uint64_t block, sw_tally tally, sw_error *err)
{
    sw_manifest *manifest = context;
    if (block >= manifest->block_count)
        SW_FAIL(err, SW_E_INVALID,
                "a rank has written block %" PRIu64 " of a checkpoint of %" PRIu64 " blocks", block,
                manifest->block_count);
    sw_manifest_file *file = file_of(manifest, block);
    block -= file->first_block;
    file->crcs[block] ^= tally.crc;
    file->covers[block] = (uint16_t)(file->covers[block] + tally.cover);
    return SW_OK;
}

static sw_status check_covers(const sw_manifest_file *file, sw_error *err)
{
    uint16_t whole = sw_tally_whole(SW_BLOCK_BYTES);
    for (uint64_t b = 0; b < file->block_count; ++b) {
        uint64_t left = file->size_bytes - b * SW_BLOCK_BYTES;
        if (file->covers[b] != (left < SW_BLOCK_BYTES ? sw_tally_whole((uint32_t)left) : whole))
            SW_FAIL(err, SW_E_STATE,
                    "of block %" PRIu64
                    " of '%.200s' some bytes were written by no rank, or by two",
                    b, file->path);
    }
    return SW_OK;
}

/* True if parse_root() can read the fields back. */
static bool has_readable_fields(const sw_manifest *manifest)
{
    return manifest->step < (uint64_t)INTEGER_MAX && manifest->world_size >= 1 &&
           manifest->world_size <= WORLD_MAX && sw_manifest_is_nonce(manifest->nonce) &&
           (!manifest->has_metric || isfinite(manifest->metric));
}

sw_status sw_manifest_complete(sw_manifest *manifest, sw_error *err)
{
    if (!has_readable_fields(manifest))
        SW_FAIL(err, SW_E_INVALID,
                "the manifest to be written: step, world_size or nonce is missing or out of range");
    if (manifest->file_count)
        qsort(manifest->files, manifest->file_count, sizeof *manifest->files, compare_paths);
    manifest->block_count = 0;
    manifest->last_file = 0;
    for (size_t i = 0; i < manifest->file_count; ++i) {
        sw_manifest_file *file = &manifest->files[i];
        SW_TRY(check_covers(file, err));
        free(file->covers);
        file->covers = NULL;
        file->first_block = manifest->block_count;
        manifest->block_count += file->block_count;
        if (i > 0 && compare_paths(file - 1, file) == 0)
            SW_FAIL(err, SW_E_INVALID, "manifest: '%.200s' appears twice", file->path);
    }
    return SW_OK;
}

/* ---- the text ---- */

typedef struct printer {
    sw_text text; /* owned; text not yet given to write() */
    uint32_t crc; /* CRC of the text given to write() */
    uint64_t size_bytes;
    sw_manifest_write *write;
    void *context;
} printer;

static sw_status flush(printer *p, sw_error *err)
{
    SW_TRY(sw_text_check(&p->text, SW_MANIFEST_NAME, err));
    p->crc = sw_crc32c(p->crc, p->text.data, p->text.size_bytes);
    p->size_bytes += p->text.size_bytes;
    if (p->size_bytes > SW_MANIFEST_MAX_BYTES)
        SW_FAIL(err, SW_E_INVALID, "the manifest would have more than the %d bytes it may have",
                SW_MANIFEST_MAX_BYTES);
    SW_TRY(p->write(p->context, p->text.data, p->text.size_bytes, err));
    p->text.size_bytes = 0;
    return SW_OK;
}

static void put_hex8(char to[8], uint32_t value)
{
    for (int i = 7; i >= 0; --i, value >>= 4)
        to[i] = "0123456789abcdef"[value & 15];
}

static sw_status print_file(printer *p, const sw_manifest_file *file, sw_error *err)
{
    sw_text_print(&p->text, "\n{\"path\":\"%s\",\"bytes\":%" PRIu64 ",\"crc32c\":\"", file->path,
                  file->size_bytes);
    for (uint64_t b = 0; b < file->block_count; ++b) {
        char digits[8];
        put_hex8(digits, file->crcs[b]);
        sw_text_append(&p->text, digits, sizeof digits);
        if (p->text.size_bytes > PART_BYTES)
            SW_TRY(flush(p, err));
    }
    sw_text_append(&p->text, "\"}", 2);
    return SW_OK;
}

static sw_status print_all(printer *p, const sw_manifest *manifest, sw_error *err)
{
    sw_text_print(&p->text,
                  "{\"format\":\"" FORMAT_NAME "\",\"version\":%d,\"step\":%" PRIu64
                  ",\"world_size\":%d,\"nonce\":\"%s\",",
                  SW_MANIFEST_VERSION, manifest->step, manifest->world_size, manifest->nonce);
    if (manifest->has_metric) {
        sw_text_append(&p->text, "\"metric\":", 9);
        sw_text_number(&p->text, manifest->metric);
        sw_text_append(&p->text, ",", 1);
    }
    sw_text_print(&p->text, "\"block_bytes\":%d,\"files\":[", SW_BLOCK_BYTES);
    for (size_t i = 0; i < manifest->file_count; ++i) {
        sw_text_append(&p->text, ",", i > 0);
        SW_TRY(print_file(p, &manifest->files[i], err));
    }
    sw_text_append(&p->text, "]", 1);
    SW_TRY(flush(p, err));
    sw_text_print(&p->text, SEAL_KEY "%08x\"}\n", p->crc);
    return flush(p, err);
}

sw_status sw_manifest_print(const sw_manifest *manifest, sw_manifest_write *write, void *context,
                            sw_error *err)
{
    printer p = {.write = write, .context = context};
    sw_status status = print_all(&p, manifest, err);
    sw_text_fini(&p.text);
    return status;
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

static sw_status parse_file(const sw_json_node *node, const char *label, sw_manifest *manifest,
                            sw_error *err)
{
    int64_t size = 0;
    const char *path = get_string(node, "path"), *crcs = get_string(node, "crc32c");
    if (!path || !crcs || !sw_plan_is_path(path) || !get_integer(node, "bytes", 0, &size))
        SW_FAIL(err, SW_E_INVALID,
                "%s: a file needs a path inside the folder, bytes and crc32c; got path '%.200s'",
                label, path ? path : "");
    size_t digits = strlen(crcs);
    if (digits % 8 || digits / 8 != blocks_of((uint64_t)size))
        SW_FAIL(err, SW_E_INVALID, "%s: '%.200s' has %" PRId64 " bytes and %zu digits of checksums",
                label, path, size, digits);
    sw_manifest_file *file = NULL;
    SW_TRY(add_entry(manifest, path, (uint64_t)size, &file, err));
    for (uint64_t b = 0; b < file->block_count; ++b)
        if (!read_hex8(crcs + 8 * b, &file->crcs[b]))
            SW_FAIL(err, SW_E_INVALID, "%s: '%.200s': a checksum is not 8 hex digits", label, path);
    return SW_OK;
}

static sw_status parse_files(const sw_json_node *files, const char *label, sw_manifest *manifest,
                             sw_error *err)
{
    if (!files || files->kind != SW_JSON_ARRAY)
        SW_FAIL(err, SW_E_INVALID, "%s: the list of files is missing", label);
    const sw_json_node *node = sw_json_first(files);
    for (size_t i = 0; i < files->count; ++i, node = sw_json_next(node)) {
        SW_TRY(parse_file(node, label, manifest, err));
        if (i > 0 && compare_paths(&manifest->files[i - 1], &manifest->files[i]) >= 0)
            SW_FAIL(err, SW_E_INVALID, "%s: files are not in the order of their paths at '%.200s'",
                    label, manifest->files[i].path);
    }
    return SW_OK;
}

static sw_status refuse_version(int64_t version, const char *label, sw_error *err)
{
    SW_FAIL(err, SW_E_UNSUPPORTED,
            "%s: it has version %" PRId64 ", this program reads up to %d: use a newer shardwright",
            label, version, SW_MANIFEST_VERSION);
}

static sw_status parse_root(const sw_json_node *root, const char *label, sw_manifest *manifest,
                            sw_error *err)
{
    const char *format = get_string(root, "format"), *nonce = get_string(root, "nonce");
    int64_t version = 0, step = 0, world_size = 0, block_bytes = 0;
    if (!format || strcmp(format, FORMAT_NAME) != 0)
        SW_FAIL(err, SW_E_INVALID, "%s: it is not the manifest of a checkpoint (format '%.64s')",
                label, format ? format : "");
    if (!get_integer(root, "version", 1, &version) || version > SW_MANIFEST_VERSION)
        return refuse_version(version, label, err);
    char wrong[96] = "";
    if (!nonce || !sw_manifest_is_nonce(nonce))
        snprintf(wrong, sizeof wrong, "'nonce' must be 1 to %d of [0-9a-z]", SW_NONCE_BYTES - 1);
    if (!get_integer(root, "block_bytes", SW_BLOCK_BYTES, &block_bytes) ||
        block_bytes != SW_BLOCK_BYTES)
        snprintf(wrong, sizeof wrong, "'block_bytes' must be %d", SW_BLOCK_BYTES);
    if (!get_integer(root, "world_size", 1, &world_size) || world_size > WORLD_MAX)
        snprintf(wrong, sizeof wrong, "'world_size' must be an integer in [1, %d]", WORLD_MAX);
    if (!get_integer(root, "step", 0, &step))
        snprintf(wrong, sizeof wrong, "'step' must be an integer in [0, 2^53)");
    if (wrong[0])
        SW_FAIL(err, SW_E_INVALID, "%.300s: %s; it is missing or has another value", label, wrong);
    const sw_json_node *metric = sw_json_find(root, "metric");
    manifest->has_metric = metric &&
                           (metric->kind == SW_JSON_INTEGER || metric->kind == SW_JSON_NUMBER) &&
                           isfinite(sw_json_number(metric));
    manifest->metric = manifest->has_metric ? sw_json_number(metric) : 0;
    manifest->step = (uint64_t)step;
    manifest->world_size = (int)world_size;
    snprintf(manifest->nonce, sizeof manifest->nonce, "%s", nonce);
    return parse_files(sw_json_find(root, "files"), label, manifest, err);
}

/* Refuse a newer version by the head of the text: the rest may have values that this reader would
 * not take. */
static sw_status check_head(const char *text, size_t size_bytes, const char *label, sw_error *err)
{
    static const char HEAD[] = "{\"format\":\"" FORMAT_NAME "\",\"version\":";
    const size_t length = sizeof HEAD - 1;
    int64_t version = 0;
    if (size_bytes < length || memcmp(text, HEAD, length) != 0)
        return SW_OK;
    for (size_t i = length; i < size_bytes && text[i] >= '0' && text[i] <= '9'; ++i)
        version = version < INTEGER_MAX / 10 ? 10 * version + (text[i] - '0') : INTEGER_MAX - 1;
    return version > SW_MANIFEST_VERSION ? refuse_version(version, label, err) : SW_OK;
}

static sw_status parse(const char *text, size_t size_bytes, size_t most_values, const char *label,
                       sw_manifest *manifest, sw_error *err)
{
    sw_json json = {0};
    sw_manifest made = {0};
    SW_TRY(check_seal(text, size_bytes, label, err));
    SW_TRY(check_head(text, size_bytes, label, err));
    SW_TRY(sw_json_parse(text, size_bytes, most_values, label, &json, err));
    sw_status status = parse_root(json.nodes, label, &made, err);
    sw_json_fini(&json);
    if (status == SW_OK)
        *manifest = made;
    else
        sw_manifest_fini(&made);
    return status;
}

sw_status sw_manifest_parse(const char *text, size_t size_bytes, const char *label,
                            sw_manifest *manifest, sw_error *err)
{
    return parse(text, size_bytes, SIZE_MAX, label, manifest, err);
}

typedef struct weight { /* upper bound of a manifest's length, from a folder's contents */
    const char *folder;
    uint64_t limit_bytes;
    size_t most_values;
    bool is_inner;
} weight;

static bool weigh(void *context, const char *name)
{
    weight *w = context;
    char path[SW_PATH_BYTES];
    struct stat info;
    if (sw_path_join(path, w->folder, name, NULL) != SW_OK || lstat(path, &info) != 0)
        return true;
    w->limit_bytes += NAME_BYTES;
    w->most_values += FILE_VALUES;
    if (S_ISREG(info.st_mode))
        w->limit_bytes += BLOCK_TEXT_BYTES * blocks_of((uint64_t)info.st_size);
    if (S_ISDIR(info.st_mode) && !w->is_inner) {
        weight inner = *w;
        inner.folder = path;
        inner.is_inner = true;
        if (sw_folder_list(path, weigh, &inner, NULL) == SW_OK) {
            w->limit_bytes = inner.limit_bytes;
            w->most_values = inner.most_values;
        }
    }
    return true;
}

/* A text of 256 MiB can hold values that take gigabytes after parsing. Accept a short text; a long
 * one must belong to a folder with enough files and bytes. `most_values` is the limit for its
 * values: the bytes of these files may be holes, so their number counts. */
static sw_status check_length(const char *folder, const char *path, size_t *most_values,
                              sw_error *err)
{
    struct stat info;
    weight w = {.folder = folder, .limit_bytes = SHORT_BYTES, .most_values = HEADING_VALUES};
    *most_values = SIZE_MAX;
    if (lstat(path, &info) != 0 || info.st_size <= SHORT_BYTES ||
        info.st_size > SW_MANIFEST_MAX_BYTES) /* longer than any manifest; refused later */
        return SW_OK;
    SW_TRY(sw_folder_list(folder, weigh, &w, err));
    if ((uint64_t)info.st_size > w.limit_bytes)
        SW_FAIL(err, SW_E_INVALID,
                "'%.300s' is too long for this folder: it has %" PRId64
                " bytes, and a manifest of the files beside it at most %" PRIu64,
                path, (int64_t)info.st_size, w.limit_bytes);
    *most_values = w.most_values;
    return SW_OK;
}

sw_status sw_manifest_read(const char *folder, sw_manifest *manifest, sw_error *err)
{
    char path[SW_PATH_BYTES];
    char *text = NULL;
    size_t size_bytes = 0, most_values = 0;
    SW_TRY(sw_path_join(path, folder, SW_MANIFEST_NAME, err));
    SW_TRY(check_length(folder, path, &most_values, err));
    SW_TRY(sw_file_read_whole(path, SW_MANIFEST_MAX_BYTES, &text, &size_bytes, err));
    sw_status status = parse(text, size_bytes, most_values, path, manifest, err);
    free(text);
    return status;
}
