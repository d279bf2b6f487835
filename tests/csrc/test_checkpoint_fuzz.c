/* test_checkpoint_fuzz.c - manifests, lists of tallies, safetensors headers and catalogs of any
 * bytes: they are refused, or what they say holds to the last word.
 *
 * One target, two drivers: libFuzzer (`make fuzz`, clang; compiled with SW_LIBFUZZER), and a plain
 * one (fuzz.h), which the suite runs for a moment in its sanitizer modes. Random bytes would all
 * fail at the manifest's checksum: the target closes each text with a right one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint/manifest.h"
#include "checkpoint/read.h"
#include "checkpoint/safetensors.h"
#include "fuzz.h"
#include "kernels/crc32c.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static sw_status append_part(void *context, const char *part, size_t size, sw_error *err)
{
    (void)err;
    sw_text_append(context, part, size);
    return SW_OK;
}

static sw_status count_tally(void *context, uint64_t block, sw_tally tally, sw_error *err)
{
    (void)block;
    (void)tally;
    (void)err;
    ++*(size_t *)context;
    return SW_OK;
}

static void try_tallies(const uint8_t *data, size_t size)
{
    size_t count = 0;
    uint8_t *exact = malloc(size + 1); /* not one byte of it is read beyond its size */
    if (!exact)
        return;
    uint8_t *shorter = realloc(exact, size ? size : 1);
    exact = shorter ? shorter : exact;
    memcpy(exact, data, size);
    (void)!sw_tally_list_read(exact, size, count_tally, &count, NULL);
    fuzz_require(count <= size / 7, "more tallies than there are bytes for");
    free(exact);
}

static void try_manifest(const uint8_t *data, size_t size)
{
    char seal[32];
    sw_text again = {0};
    sw_manifest found = {0}, twice = {0};
    int seal_bytes =
        snprintf(seal, sizeof seal, ",\"self_crc32c\":\"%08x\"}\n", sw_crc32c(0, data, size));
    char *text = malloc(size + (size_t)seal_bytes); /* exact: a sanitizer sees a read beyond */
    if (!text)
        return;
    memcpy(text, data, size);
    memcpy(text + size, seal, (size_t)seal_bytes);
    if (sw_manifest_parse(text, size + (size_t)seal_bytes, "fuzz", &found, NULL) == SW_OK) {
        uint64_t blocks = 0;
        fuzz_require(sw_manifest_is_nonce(found.nonce) && found.world_size > 0,
                     "nonce, world size");
        for (size_t i = 0; i < found.file_count; ++i) {
            const sw_manifest_file *file = &found.files[i];
            uint64_t all =
                file->size_bytes / SW_BLOCK_BYTES + (file->size_bytes % SW_BLOCK_BYTES != 0);
            fuzz_require(file->path[0] != '/' && file->path[0] != '.' && !strstr(file->path, "/."),
                         "a path that may leave the folder");
            fuzz_require(file->block_count == all && file->first_block == blocks,
                         "blocks of a file");
            for (size_t j = 0; j < i; ++j)
                fuzz_require(strcmp(found.files[j].path, file->path) != 0, "a path twice");
            blocks += file->block_count;
        }
        fuzz_require(sw_manifest_print(&found, append_part, &again, NULL) == SW_OK, "print");
        fuzz_require(sw_manifest_parse(again.data, again.size_bytes, "again", &twice, NULL) ==
                             SW_OK &&
                         twice.file_count == found.file_count && twice.step == found.step,
                     "what was printed is not what was read");
        sw_manifest_fini(&twice);
        sw_text_fini(&again);
        sw_manifest_fini(&found);
    }
    free(text);
}

static void check_entries(const sw_safetensors *found, size_t header_bytes, uint64_t file_bytes)
{
    uint64_t at = header_bytes;
    for (size_t i = 0; i < found->entry_count; ++i) {
        const sw_safetensors_entry *entry = &found->entries[i];
        uint64_t size = sw_safetensors_element_bytes(entry->dtype);
        const sw_json_node *length = sw_json_first(entry->shape);
        fuzz_require(size > 0, "a dtype");
        for (size_t d = 0; d < entry->shape->count; ++d, length = sw_json_next(length))
            fuzz_require(length->integer >= 0 &&
                             !__builtin_mul_overflow(size, (uint64_t)length->integer, &size),
                         "a shape");
        fuzz_require(entry->begin == at && entry->size_bytes == size,
                     "a hole, an overlap or a size");
        at += size;
        for (size_t j = 0; j < i; ++j)
            fuzz_require(strcmp(found->entries[j].name, entry->name) != 0, "a name twice");
    }
    fuzz_require(at == file_bytes, "bytes behind the last tensor");
}

/* Two bytes say how much data follows the header, the rest is the header's text. */
static void try_safetensors(const uint8_t *data, size_t size)
{
    sw_safetensors found = {0};
    size_t header_bytes = 0;
    if (size < 2 || size > 4096)
        return;
    uint64_t length = size - 2, file_bytes = 8 + length + data[0] + 256u * data[1];
    uint8_t *header = malloc(8 + length);
    if (!header)
        return;
    for (int i = 0; i < 8; ++i)
        header[i] = (uint8_t)(length >> (8 * i));
    memcpy(header + 8, data + 2, length);
    if (sw_safetensors_header_size(header, file_bytes, "fuzz", &header_bytes, NULL) != SW_OK) {
        free(header);
        return;
    }
    fuzz_require(header_bytes == 8 + length, "the header's length");
    if (sw_safetensors_read(header, header_bytes, file_bytes, "fuzz", &found, NULL) == SW_OK) {
        check_entries(&found, header_bytes, file_bytes);
        sw_safetensors_fini(&found);
    }
    free(header);
}

static void try_header_size(const uint8_t *data, size_t size)
{
    uint64_t length = 0, file_bytes = 0;
    size_t header_bytes = 0;
    if (size < 16)
        return;
    memcpy(&length, data, 8);
    memcpy(&file_bytes, data + 8, 8);
    if (sw_safetensors_header_size(data, file_bytes, "fuzz", &header_bytes, NULL) == SW_OK)
        fuzz_require(length <= SW_SAFETENSORS_HEADER_MAX && header_bytes == length + 8 &&
                         header_bytes <= file_bytes,
                     "a header beyond 100 MB or its file");
}

/* A catalog whose manifest is sound, and behind it any bytes. */
static void try_catalog(const uint8_t *data, size_t size)
{
    char text[256];
    sw_manifest found = {0};
    sw_catalog catalog = {0};
    static const char inside[] =
        "{\"format\":\"shardwright.checkpoint\",\"version\":1,\"step\":1,\"world_size\":1,"
        "\"nonce\":"
        "\"n\",\"block_bytes\":1048576,\"files\":[{\"path\":\"t\",\"bytes\":0,\"crc32c\":\"\"}]";
    int bytes = snprintf(text, sizeof text, "%s,\"self_crc32c\":\"%08x\"}\n", inside,
                         sw_crc32c(0, inside, sizeof inside - 1));
    const uint64_t head[2] = {strlen(SW_MANIFEST_NAME), (uint64_t)bytes};
    bool is_whole = size > 0 && data[0] % 4 > 0; /* else all of it is any bytes */
    size_t before = is_whole ? sizeof head + (size_t)(head[0] + head[1]) : 0;
    uint8_t *exact = malloc(before + size + 1);
    if (!exact)
        return;
    if (is_whole) {
        memcpy(exact, head, sizeof head);
        memcpy(exact + sizeof head, SW_MANIFEST_NAME, (size_t)head[0]);
        memcpy(exact + sizeof head + head[0], text, (size_t)head[1]);
    }
    if (size > 0)
        memcpy(exact + before, data + 1, size - 1);
    size_t whole = before + (size > 0 ? size - 1 : 0), part_bytes = 0;
    bool is_read = sw_catalog_copy(exact, whole, &catalog, &found, NULL) == SW_OK;
    fuzz_require(is_read || !is_whole, "a sound manifest was refused");
    free(exact);
    if (!is_read)
        return;
    const uint8_t *part = sw_catalog_find(&catalog, "t", &part_bytes);
    fuzz_require(!part || (part >= catalog.data && part_bytes <= whole &&
                           part + part_bytes <= catalog.data + whole),
                 "a file outside of its catalog");
    for (size_t i = 0; part && i < part_bytes; ++i)
        (void)*(const volatile uint8_t *)(part + i); /* a sanitizer sees a read beyond */
    sw_catalog_fini(&catalog);
    sw_manifest_fini(&found);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1)
        return 0;
    switch (data[0] % 8) {
    case 0:
        try_manifest(data + 1, size - 1);
        break;
    case 1:
        try_tallies(data + 1, size - 1);
        break;
    case 2:
        try_safetensors(data + 1, size - 1);
        break;
    case 4:
        try_catalog(data + 1, size - 1);
        break;
    default:
        try_header_size(data + 1, size - 1);
    }
    return 0;
}

#ifndef SW_LIBFUZZER
#define MANIFEST                                                                                  \
    "{\"format\":\"shardwright.checkpoint\",\"version\":1,\"step\":12,\"world_size\":3,"          \
    "\"nonce\":\"abc9\",\"metric\":0.125,\"block_bytes\":1048576,\"files\":[{\"path\":\"empty\"," \
    "\"bytes\":0,\"crc32c\":\"\"},{\"path\":\"model.safetensors\",\"bytes\":1048577,\"crc32c\":"  \
    "\"deadbeef00000001\"},{\"path\":\"ranks/00001.json\",\"bytes\":10,\"crc32c\":\"00000005\"}]"
static const fuzz_seed seeds[] = {
    FUZZ_SEED("0" MANIFEST),
    FUZZ_SEED("1" MANIFEST),
    FUZZ_SEED(
        "2\x1c\x01{\"__metadata__\":{\"a\":\"b\"},\"x\":{\"dtype\":\"F32\",\"shape\":[2,3],"
        "\"data_offsets\":[0,24]},\"y\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[24,"
        "28]},\"z\":{\"dtype\":\"U8\",\"shape\":[256,1],\"data_offsets\":[28,284]}}"),
    FUZZ_SEED("3\x00\xe1\xf5\x05\x01\x02\x03\x04\x00\x00\x00\x00\x01\x00\x00\x00"),
    FUZZ_SEED("4\x01\x01\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0tabc\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0u"),
};
/* What a grammar of these texts is made of, and numbers at every edge. */
static const char *const pieces[] = {
    "\"",
    "\\",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "-1",
    "0",
    "1e999",
    "9007199254740992",
    "18446744073709551615",
    "9223372036854775807",
    "4294967296",
    "../x",
    "/",
    "ranks/",
    "\"x\":",
    "null",
    "\"bytes\":",
    "\"path\":",
    "\\u0000",
    "\\ud800",
    "\"F64\"",
    "[0,0]",
    ".",
    "model",
};

int main(int argc, char **argv)
{
    const fuzz_plan plan = {.target = LLVMFuzzerTestOneInput,
                            .seeds = seeds,
                            .seed_count = sizeof seeds / sizeof *seeds,
                            .pieces = pieces,
                            .piece_count = sizeof pieces / sizeof *pieces,
                            .quick = 60000,
                            .thorough = 2000000};
    return fuzz_main(argc, argv, &plan);
}
#endif
