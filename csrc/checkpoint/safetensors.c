/* safetensors.c - see docs/format.md. The reader checks sizes for overflow, and ranges for holes
 * and overlaps. */
#include "checkpoint/safetensors.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

unsigned sw_safetensors_element_bytes(const char *dtype)
{
    static const struct {
        const char *name;
        unsigned bytes;
    } known[] = {
        {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1},
        {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},     {"U32", 4},
        {"F32", 4},  {"F64", 8}, {"I64", 8}, {"U64", 8},     {"C64", 8},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; ++i)
        if (strcmp(known[i].name, dtype) == 0)
            return known[i].bytes;
    return 0;
}

sw_status sw_safetensors_size(const char *name, const char *dtype, const int64_t *shape, int ndim,
                              uint64_t *size_bytes, sw_error *err)
{
    uint64_t size = sw_safetensors_element_bytes(dtype);
    if (size == 0)
        SW_FAIL(err, SW_E_INVALID, "tensor '%.200s': safetensors has no dtype '%.32s'", name,
                dtype);
    for (int i = 0; i < ndim; ++i) {
        if (shape[i] < 0)
            SW_FAIL(err, SW_E_INVALID,
                    "tensor '%.200s': dimension %d must be at least 0, not %" PRId64, name, i,
                    shape[i]);
        if (__builtin_mul_overflow(size, (uint64_t)shape[i], &size) || size > (UINT64_C(1) << 53))
            SW_FAIL(err, SW_E_INVALID, "tensor '%.200s': its shape has more than 2^53 bytes", name);
    }
    *size_bytes = size;
    return SW_OK;
}

sw_status sw_safetensors_header_size(const uint8_t first[8], uint64_t file_bytes, const char *path,
                                     size_t *header_bytes, sw_error *err)
{
    uint64_t size = 0;
    for (int i = 8; i-- > 0;)
        size = size << 8 | first[i];
    if (size < 2 || size > SW_SAFETENSORS_HEADER_MAX || file_bytes < 8 || size > file_bytes - 8)
        SW_FAIL(err, SW_E_INVALID,
                "'%.300s': a header of %" PRIu64 " bytes in a file of %" PRIu64
                " (legal: 2 to %d, inside the file)",
                path, size, file_bytes, SW_SAFETENSORS_HEADER_MAX);
    *header_bytes = (size_t)size + 8;
    return SW_OK;
}

static sw_status read_shape(const sw_json_node *shape, const char *name, const char *dtype,
                            uint64_t *size_bytes, sw_error *err)
{
    int64_t sizes[SW_SAFETENSORS_DIMENSIONS_MAX];
    if (shape->count > SW_SAFETENSORS_DIMENSIONS_MAX)
        SW_FAIL(err, SW_E_INVALID, "tensor '%.200s': %" PRIu32 " dimensions, at most %d are read",
                name, shape->count, SW_SAFETENSORS_DIMENSIONS_MAX);
    const sw_json_node *item = sw_json_first(shape);
    for (size_t i = 0; i < shape->count; ++i, item = sw_json_next(item)) {
        if (item->kind != SW_JSON_INTEGER)
            SW_FAIL(err, SW_E_INVALID, "tensor '%.200s': a dimension is not an integer", name);
        sizes[i] = item->integer;
    }
    return sw_safetensors_size(name, dtype, sizes, (int)shape->count, size_bytes, err);
}

static sw_status read_entry(const sw_json_node *node, size_t header_bytes, uint64_t file_bytes,
                            sw_safetensors_entry *entry, sw_error *err)
{
    const sw_json_node *dtype = sw_json_find(node, "dtype"), *shape = sw_json_find(node, "shape");
    const sw_json_node *offsets = sw_json_find(node, "data_offsets");
    if (!dtype || dtype->kind != SW_JSON_STRING || !shape || shape->kind != SW_JSON_ARRAY ||
        !offsets || offsets->kind != SW_JSON_ARRAY || offsets->count != 2)
        SW_FAIL(err, SW_E_INVALID,
                "tensor '%.200s': dtype, shape and data_offsets [begin, end] are needed",
                node->key);
    const sw_json_node *begin = sw_json_first(offsets), *end = sw_json_next(begin);
    uint64_t data_bytes = file_bytes - header_bytes;
    if (begin->kind != SW_JSON_INTEGER || end->kind != SW_JSON_INTEGER || begin->integer < 0 ||
        end->integer < begin->integer || (uint64_t)end->integer > data_bytes)
        SW_FAIL(err, SW_E_INVALID,
                "tensor '%.200s': its data_offsets leave the %" PRIu64 " bytes of data", node->key,
                data_bytes);
    *entry = (sw_safetensors_entry){.name = node->key,
                                    .dtype = dtype->text,
                                    .shape = shape,
                                    .begin = (uint64_t)begin->integer + header_bytes};
    SW_TRY(read_shape(shape, node->key, dtype->text, &entry->size_bytes, err));
    if (entry->size_bytes != (uint64_t)(end->integer - begin->integer))
        SW_FAIL(err, SW_E_INVALID,
                "tensor '%.200s': dtype and shape make %" PRIu64 " bytes, data_offsets %" PRId64,
                node->key, entry->size_bytes, end->integer - begin->integer);
    return SW_OK;
}

static int compare_begin(const void *a, const void *b)
{
    const sw_safetensors_entry *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return x->size_bytes < y->size_bytes ? -1
                                         : x->size_bytes > y->size_bytes; /* empty ones first */
}

static sw_status check_ranges(const sw_safetensors *made, size_t header_bytes, uint64_t file_bytes,
                              sw_error *err)
{
    uint64_t at = header_bytes;
    for (size_t i = 0; i < made->entry_count; ++i) {
        const sw_safetensors_entry *entry = &made->entries[i];
        if (entry->begin != at)
            SW_FAIL(err, SW_E_INVALID,
                    "tensor '%.200s' begins at byte %" PRIu64 ", the one before ends at %" PRIu64,
                    entry->name, entry->begin, at);
        at += entry->size_bytes;
    }
    if (at != file_bytes)
        SW_FAIL(err, SW_E_INVALID, "the last tensor ends at byte %" PRIu64 ", the file at %" PRIu64,
                at, file_bytes);
    return SW_OK;
}

static sw_status check_metadata(const sw_json_node *metadata, sw_error *err)
{
    const sw_json_node *member = sw_json_first(metadata);
    if (metadata->kind != SW_JSON_OBJECT)
        SW_FAIL(err, SW_E_INVALID, "__metadata__ is not an object");
    for (size_t i = 0; i < metadata->count; ++i, member = sw_json_next(member))
        if (member->kind != SW_JSON_STRING)
            SW_FAIL(err, SW_E_INVALID, "__metadata__ '%.200s' is not a string", member->key);
    return SW_OK;
}

static sw_status read_entries(sw_safetensors *made, size_t header_bytes, uint64_t file_bytes,
                              sw_error *err)
{
    const sw_json_node *root = made->json.nodes;
    if (root->kind != SW_JSON_OBJECT)
        SW_FAIL(err, SW_E_INVALID, "the header is not a JSON object");
    made->entries = calloc((size_t)root->count + 1, sizeof *made->entries);
    if (!made->entries)
        SW_FAIL(err, SW_E_MEMORY, "no memory for %" PRIu32 " tensor entries", root->count);
    const sw_json_node *member = sw_json_first(root);
    for (size_t i = 0; i < root->count; ++i, member = sw_json_next(member)) {
        if (strcmp(member->key, "__metadata__") == 0) {
            SW_TRY(check_metadata(member, err));
            made->metadata = member;
        } else {
            SW_TRY(read_entry(member, header_bytes, file_bytes, &made->entries[made->entry_count],
                              err));
            made->entry_count++;
        }
    }
    qsort(made->entries, made->entry_count, sizeof *made->entries, compare_begin);
    return check_ranges(made, header_bytes, file_bytes, err);
}

sw_status sw_safetensors_read(const uint8_t *header, size_t header_bytes, uint64_t file_bytes,
                              const char *path, sw_safetensors *made, sw_error *err)
{
    sw_safetensors result = {0};
    size_t stated = 0;
    SW_TRY(sw_safetensors_header_size(header, file_bytes, path, &stated, err));
    if (stated != header_bytes)
        SW_FAIL(err, SW_E_INVALID, "'%s': %zu bytes of header were given, it has %zu", path,
                header_bytes, stated);
    SW_TRY(sw_json_parse((const char *)header + 8, header_bytes - 8, SIZE_MAX, path, &result.json,
                         err));
    sw_error inner = {0};
    sw_status status = read_entries(&result, header_bytes, file_bytes, &inner);
    if (status != SW_OK) {
        sw_safetensors_fini(&result);
        SW_FAIL(err, status, "'%.300s': %.280s", path, inner.message);
    }
    *made = result;
    return SW_OK;
}

void sw_safetensors_fini(sw_safetensors *safetensors)
{
    sw_json_fini(&safetensors->json);
    free(safetensors->entries);
    *safetensors = (sw_safetensors){0};
}
