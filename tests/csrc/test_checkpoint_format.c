/* test_checkpoint_format.c - checksums, JSON, safetensors headers, manifests and plans: known
 * answers, laws over many random inputs, and texts that are cut off at every byte, changed at every
 * byte, or made of random pieces. */
#include <inttypes.h>

#include "checkpoint/json.h"
#include "checkpoint/read.h"
#include "checkpoint_case.h"
#include "kernels/crc32c.h"

static int failed;

static void check(bool right, const char *what, const char *detail)
{
    if (!right) {
        printf("FAILED: %s: %s\n", what, detail);
        failed++;
    }
}

static unsigned seed = 4711;

static size_t chance(size_t limit)
{
    return (size_t)rand_r(&seed) % limit;
}

static void checksums(void)
{
    enum { SIZE = 100000 };
    uint8_t *data = malloc(SIZE + 64), *copy = malloc(SIZE + 64);
    uint8_t zeros[32] = {0}, ones[32];
    memset(ones, 0xff, sizeof ones);
    check(sw_crc32c(0, "123456789", 9) == 0xe3069283, "check value", "");
    check(sw_crc32c(0, zeros, 32) == 0x8a9136aa && sw_crc32c(0, ones, 32) == 0x62a8ab43,
          "RFC 3720 B.4", "");
    check(sw_crc32c(0x1234, NULL, 0) == 0x1234, "nothing", "");
    for (int i = 0; i < SIZE + 64; ++i)
        data[i] = (uint8_t)rand_r(&seed);
    for (int round = 0; round < 400; ++round) {
        size_t begin = chance(64), size = round < 300 ? chance(300) : chance(SIZE - 64),
               cut = chance(size + 1), to = 1 + chance(63);
        memset(copy, 0x5a, SIZE + 64);
        uint32_t whole = sw_crc32c(7, data + begin, size);
        check(whole == sw_crc32c_portable(7, data + begin, size), "table and instruction", "");
        check(whole == sw_crc32c(sw_crc32c(7, data + begin, cut), data + begin + cut, size - cut),
              "in two parts", "");
        check(whole == sw_crc32c_join(sw_crc32c(7, data + begin, cut),
                                      sw_crc32c(0, data + begin + cut, size - cut), size - cut),
              "joined", "");
        check(whole == sw_crc32c_copy(7, copy + to, data + begin, size), "with a copy", "");
        check(memcmp(copy + to, data + begin, size) == 0 && copy[to - 1] == 0x5a &&
                  copy[to + size] == 0x5a,
              "the copy", "");
    }
    free(data);
    free(copy);
}

static bool is_json(const char *text)
{
    sw_json json = {0};
    sw_error err = {0};
    sw_status status = sw_json_parse(text, strlen(text), SIZE_MAX, "text", &json, &err);
    sw_json_fini(&json);
    return status == SW_OK;
}

static void json_texts(void)
{
    static const char *const good[] = {"null",
                                       " [1, -2.5e3 ,\"x\\u00e9\\ud83d\\ude00\\n\"] ",
                                       "{}",
                                       "[]",
                                       "{\"a\":{\"b\":[true,false,null]}}",
                                       "123456789012345678901234567890",
                                       "\"\xc3\xa9\"",
                                       "0",
                                       "-0"};
    static const char *const bad[] = {"",
                                      " ",
                                      "[",
                                      "]",
                                      "[1,]",
                                      "[1 2]",
                                      "{\"a\"}",
                                      "{\"a\":1,}",
                                      "{a:1}",
                                      "01",
                                      "1.",
                                      ".5",
                                      "1e",
                                      "+1",
                                      "nul",
                                      "\"",
                                      "\"\\",
                                      "\"\\x\"",
                                      "\"\\u12\"",
                                      "\"\\ud800\"",
                                      "\"\\udc00\"",
                                      "\"\\u0000\"",
                                      "\"\t\"",
                                      "\"\xff\"",
                                      "\"\xc0\xaf\"",
                                      "\"\xed\xa0\x80\"",
                                      "\"\xf4\x90\x80\x80\"",
                                      "\"\xe2\x82\"",
                                      "1 1",
                                      "{\"a\":1,\"b\":2,\"a\":3}",
                                      "NaN",
                                      "Infinity",
                                      "[\"a\":1]",
                                      "{\"a\":1]",
                                      "-"};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; ++i)
        check(is_json(good[i]), "is JSON", good[i]);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; ++i)
        check(!is_json(bad[i]), "is no JSON", bad[i]);
    char deep[400];
    memset(deep, '[', 200);
    memset(deep + 200, ']', 199);
    deep[399] = '\0';
    check(!is_json(deep), "depth", "");
    sw_json json = {0};
    sw_error err = {0};
    const char *text = "{\"k\\n\":[10,{\"x\":\"y\"},2.5],\"last\":9223372036854775807,\"more\":"
                       "9223372036854775808}";
    check(sw_json_parse(text, strlen(text), SIZE_MAX, "text", &json, &err) == SW_OK, "parse",
          err.message);
    const sw_json_node *list = sw_json_find(json.nodes, "k\n"),
                       *last = sw_json_find(json.nodes, "last");
    const sw_json_node *more = sw_json_find(json.nodes, "more");
    check(list && list->count == 3 && last && last->kind == SW_JSON_INTEGER &&
              last->integer == INT64_MAX,
          "values", "");
    check(more && more->kind == SW_JSON_NUMBER && more->number > 9e18 &&
              !sw_json_find(json.nodes, "none"),
          "values", "");
    check(list && sw_json_find(sw_json_next(sw_json_first(list)), "x") != NULL, "siblings", "");
    sw_json_fini(&json);
}

/* A text may not take many times its size: of `pattern` repeated, at most as many values as the
 * limits allow are read. */
static bool reads_many(const char *pattern, size_t most_values)
{
    enum { SIZE = 4 << 20 };
    size_t unit = strlen(pattern), used = 1;
    char *text = malloc(SIZE + 64);
    sw_json json = {0};
    sw_error err = {0};
    check(text != NULL, "memory", "");
    text[0] = '[';
    for (; used + unit < SIZE; used += unit)
        memcpy(text + used, pattern, unit);
    text[used - 1] = ']'; /* in place of the last comma */
    bool is_read = sw_json_parse(text, used, most_values, "text", &json, &err) == SW_OK;
    check(is_read || strstr(err.message, "too many values") != NULL, "values", err.message);
    if (is_read)
        sw_json_fini(&json);
    free(text);
    return is_read;
}

static void values_by_the_million(void)
{
    check(!reads_many("0,", SIZE_MAX) && !reads_many("{},", SIZE_MAX) &&
              !reads_many("[[],[]],", SIZE_MAX) && !reads_many("\"\",", SIZE_MAX),
          "bombs", "");
    check(reads_many("1234,", SIZE_MAX) && reads_many("\"a long string\",", SIZE_MAX), "lists", "");
    check(!reads_many("\"a long string\",", 1000) && reads_many("\"a long string\",", 1000000),
          "limit", "");
}

/* A header around `entries` with `data` bytes behind it. */
static bool is_safetensors(const char *entries, uint64_t data, char *message)
{
    uint8_t header[2048] = {0};
    size_t length = strlen(entries);
    sw_safetensors found = {0};
    sw_error err = {0};
    for (int i = 0; i < 8; ++i)
        header[i] = (uint8_t)((uint64_t)length >> (8 * i));
    memcpy(header + 8, entries, length);
    sw_status status =
        sw_safetensors_read(header, length + 8, length + 8 + data, "file", &found, &err);
    snprintf(message, SW_ERROR_MESSAGE_BYTES, "%s", err.message);
    sw_safetensors_fini(&found);
    return status == SW_OK;
}

static void safetensors_headers(void)
{
    char message[SW_ERROR_MESSAGE_BYTES];
    static const struct {
        const char *entries;
        uint64_t data;
        const char *why; /* NULL: sound */
    } cases[] = {
        {"{}", 0, NULL},
        {"{\"__metadata__\":{\"a\":\"b\"}}", 0, NULL},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}}", 24, NULL},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[2,6]},\"y\":{\"dtype\":\"BF16\","
         "\"shape\":[1],\"data_offsets\":[0,2]}}",
         6, NULL},
        {"{\"x\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[4,4]},\"y\":{\"dtype\":\"I32\","
         "\"shape\":[1],\"data_offsets\":[0,4]}}",
         4, NULL},
        {"[]", 0, "not a JSON object"},
        {"{}", 1, "the last tensor ends"},
        {"{\"__metadata__\":{\"a\":1}}", 0, "is not a string"},
        {"{\"x\":{\"dtype\":\"F31\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "no dtype 'F31'"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,7]}}", 7,
         "dtype and shape make 8 bytes"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 4,
         "leave the 4 bytes"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]}}", 8,
         "leave the 8 bytes"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}", 8, "at least 0"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296,4294967296],\"data_offsets\":["
         "0,0]}}",
         0, "more than 2^53"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[1.5],\"data_offsets\":[0,4]}}", 4, "not an integer"},
        {"{\"x\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},\"y\":{\"dtype\":\"U8\","
         "\"shape\":[2],\"data_offsets\":[1,3]}}",
         3, "the one before ends"},
        {"{\"x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"y\":{\"dtype\":\"U8\","
         "\"shape\":[1],\"data_offsets\":[2,3]}}",
         3, "the one before ends"},
        {"{\"x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"x\":{\"dtype\":\"U8\","
         "\"shape\":[1],\"data_offsets\":[1,2]}}",
         2, "appears twice"},
        {"{\"x\":7}", 0, "are needed"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        bool sound = is_safetensors(cases[i].entries, cases[i].data, message);
        check(sound == !cases[i].why && (sound || strstr(message, cases[i].why)), cases[i].entries,
              message);
    }
    uint8_t large[8] = {0x01, 0xe1, 0xf5, 0x05}; /* 100,000,001 */
    size_t bytes;
    sw_error err = {0};
    check(sw_safetensors_header_size(large, UINT64_C(1) << 40, "file", &bytes, &err) ==
              SW_E_INVALID,
          "100 MB", err.message);
    memset(large, 0xff, 8);
    check(sw_safetensors_header_size(large, UINT64_MAX, "file", &bytes, &err) == SW_E_INVALID,
          "2^64", err.message);
}

static sw_status append_part(void *context, const char *part, size_t size, sw_error *err)
{
    (void)err;
    sw_text_append(context, part, size);
    return SW_OK;
}

/* The tally of a whole block with checksum `crc`. */
static sw_tally whole_block(uint32_t crc, uint32_t size)
{
    return (sw_tally){crc, sw_tally_whole(size)};
}

static char *print_case(size_t *size)
{
    sw_manifest manifest = {
        .step = 12, .world_size = 3, .nonce = "abc9", .has_metric = true, .metric = 0.125};
    sw_error err = {0};
    sw_text text = {0};
    bool made = sw_manifest_add_file(&manifest, "ranks/00001.json", 10, &err) == SW_OK &&
                sw_manifest_add_file(&manifest, "model.safetensors",
                                     3 * (uint64_t)SW_BLOCK_BYTES + 1, &err) == SW_OK &&
                sw_manifest_add_file(&manifest, "empty", 0, &err) == SW_OK;
    for (uint64_t b = 0; b < 4; ++b)
        made = made && sw_manifest_add_tally(
                           &manifest, 1 + b,
                           whole_block(0xdeadbeef + (uint32_t)b, b < 3 ? SW_BLOCK_BYTES : 1),
                           &err) == SW_OK;
    made = made && sw_manifest_add_tally(&manifest, 0, whole_block(5, 10), &err) == SW_OK;
    check(sw_manifest_add_tally(&manifest, 5, whole_block(5, 10), &err) != SW_OK, "a block beyond",
          err.message);
    check(sw_manifest_complete(&manifest, &err) == SW_OK, "completeness", err.message);
    check(made && sw_manifest_print(&manifest, append_part, &text, &err) == SW_OK, "print",
          err.message);
    sw_manifest_fini(&manifest);
    *size = text.size_bytes;
    return text.data;
}

/* A file of values is refused before it is read, and before it is written; one for all ranks may
 * be large. */
static void values_are_bounded(void)
{
    sw_manifest manifest = {.step = 1, .world_size = 1, .nonce = "n"};
    sw_catalog catalog = {0};
    sw_plan *plan = NULL;
    sw_error err = {0};
    const char *paths[] = {"state.json"};
    sw_plan_text texts[] = {{"ranks/all.jsonl", UINT64_C(1) << 40, SW_HELD_IN_PARTS},
                            {"state.json", SW_VALUES_MAX_BYTES, SW_HELD_BY_ALL}};
    check(sw_manifest_add_file(&manifest, "state.json", SW_VALUES_MAX_BYTES + 1, &err) == SW_OK,
          "add", err.message);
    check(sw_catalog_read("/nowhere", &manifest, paths, 1, &catalog, &err) == SW_E_INVALID &&
              strstr(err.message, "'/nowhere/state.json' has 268435457 bytes"),
          "a file to read", err.message);
    sw_manifest_fini(&manifest);
    check(sw_plan_create(NULL, 0, texts, 2, &plan, &err) == SW_OK, "a plan", err.message);
    sw_plan_destroy(plan);
    texts[1].size_bytes++;
    check(sw_plan_create(NULL, 0, texts, 2, &plan, &err) == SW_E_INVALID &&
              strstr(err.message, "'state.json' would have 268435457 bytes"),
          "a file to write", err.message);
}

/* What may not become a manifest. */
static void incomplete_manifests(void)
{
    static const struct {
        sw_tally second;
        const char *said; /* NULL: complete */
    } cases[] = {{{7, 0}, "block 1 of 'model.safetensors'"}, {{7, 1}, "block 1 of"}};
    for (size_t i = 0; i < 5; ++i) {
        sw_manifest manifest = {.step = 1, .world_size = 2, .nonce = "n"};
        sw_error err = {0};
        const char *said = i < 2 ? cases[i].said : NULL;
        check(sw_manifest_add_file(&manifest, "model.safetensors", SW_BLOCK_BYTES + 9, &err) ==
                      SW_OK &&
                  sw_manifest_add_tally(&manifest, 0, whole_block(3, SW_BLOCK_BYTES), &err) ==
                      SW_OK &&
                  sw_manifest_add_tally(&manifest, 1, i < 2 ? cases[i].second : whole_block(7, 9),
                                        &err) == SW_OK,
              "add", err.message);
        if (i == 2) {
            manifest.step = UINT64_C(1) << 53;
            said = "step, world_size or nonce is missing or out of range";
        } else if (i == 3) {
            check(sw_manifest_add_file(&manifest, "model.safetensors", 0, &err) == SW_OK, "add",
                  "");
            said = "'model.safetensors' appears twice";
        }
        bool is_complete = sw_manifest_complete(&manifest, &err) == SW_OK;
        check(said ? !is_complete && strstr(err.message, said) : is_complete,
              said ? said : "complete", err.message);
        sw_manifest_fini(&manifest);
    }
}

typedef struct sum { /* of one block's tallies */
    sw_tally total;
    uint64_t block;
    size_t count;
} sum;

static sw_status add_to_sum(void *context, uint64_t block, sw_tally tally, sw_error *err)
{
    sum *to = context;
    (void)err;
    if (block == to->block) {
        to->count++;
        to->total.crc ^= tally.crc;
        to->total.cover = (uint16_t)(to->total.cover + tally.cover);
    }
    return SW_OK;
}

/* Law: ranges that tile a block make its checksum and its cover in whatever order; a hole, a byte
 * twice, and both at once do not make its cover. */
static void tallies(void)
{
    enum { CUTS = 9 };
    uint8_t *data = malloc(SW_BLOCK_BYTES);
    int missed = 0, tried = 0;
    for (size_t i = 0; i < SW_BLOCK_BYTES; ++i)
        data[i] = (uint8_t)rand_r(&seed);
    for (int round = 0; round < 100; ++round) {
        uint32_t size = round % 3 ? 1 + (uint32_t)chance(SW_BLOCK_BYTES) : SW_BLOCK_BYTES;
        uint32_t cuts[CUTS + 1] = {0};
        sw_tally total = {0};
        sw_tally_list list = {0};
        bool is_end[2 * CUTS * 16 + 1] = {false}; /* of an entry */
        for (int i = 1; i < CUTS; ++i)
            cuts[i] = cuts[i - 1] + (uint32_t)chance((size - cuts[i - 1]) / 2 + 1);
        cuts[CUTS] = size;
        size_t first = chance(CUTS);
        for (size_t i = 0; i < CUTS; ++i) {
            size_t c = (first + i * 4) % CUTS;
            sw_tally one = {0};
            if (cuts[c] == cuts[c + 1])
                continue;
            sw_tally_add(&one, sw_crc32c(0, data + cuts[c], cuts[c + 1] - cuts[c]), cuts[c],
                         cuts[c + 1] - cuts[c], size);
            sw_tally_list_append(&list, 7 + i % 2, one); /* in any order */
            is_end[list.size_bytes] = true;
            sw_tally_list_append(&list, 20, one);
            is_end[list.size_bytes] = true;
            total.crc ^= one.crc;
            total.cover = (uint16_t)(total.cover + one.cover);
        }
        check(total.crc == sw_crc32c(0, data, size) && total.cover == sw_tally_whole(size),
              "tiles make the block", "");
        sum read = {.block = 20};
        check(!list.is_out_of_memory &&
                  sw_tally_list_read(list.data, list.size_bytes, add_to_sum, &read, NULL) ==
                      SW_OK &&
                  read.total.crc == total.crc && read.total.cover == total.cover,
              "a list", "");
        for (size_t end = 1; end < list.size_bytes; ++end)
            check((sw_tally_list_read(list.data, end, add_to_sum, &read, NULL) == SW_OK) ==
                      is_end[end],
                  "a list that is cut off", "");
        sw_tally_list_fini(&list);
        for (int i = 0; i < 20 && size > 64; ++i, ++tried) {
            uint32_t at = (uint32_t)chance(size - 32), other = (uint32_t)chance(size - 32),
                     length = 1 + (uint32_t)chance(31);
            sw_tally wrong = total;
            if (at == other)
                continue;
            if (i % 3 != 1)
                sw_tally_add(&wrong, 0, at, length, size);
            if (i % 3 != 0) { /* taken out */
                sw_tally gone = {0};
                sw_tally_add(&gone, 0, other, length, size);
                wrong.cover = (uint16_t)(wrong.cover - gone.cover);
            }
            missed += wrong.cover == sw_tally_whole(size);
        }
    }
    check(missed <= tried / 1000, "holes and bytes twice are seen", "");
    free(data);
}

/* Law: a merged list has each block of either list once, and reads as both do. */
static void merged_tallies(void)
{
    enum { LISTS = 4, BLOCKS = 700 };
    for (int round = 0; round < 40; ++round) {
        sw_tally expected[BLOCKS] = {{0}};
        sw_tally_list merged = {0};
        sw_error err = {0};
        size_t blocks = 0;
        for (int l = 0; l < LISTS; ++l) {
            sw_tally_list list = {0};
            size_t step = 1 + chance(round % 2 ? 3 : 200);
            for (uint64_t block = chance(BLOCKS); block < BLOCKS; block += step) {
                sw_tally one = {(uint32_t)rand_r(&seed), (uint16_t)rand_r(&seed)};
                sw_tally_list_append(&list, block, one);
                expected[block].crc ^= one.crc;
                expected[block].cover = (uint16_t)(expected[block].cover + one.cover);
            }
            check(sw_tally_list_merge(&merged, list.data, list.size_bytes - 1, &err) ==
                      SW_E_INVALID,
                  "a list that is cut off", err.message);
            check(sw_tally_list_merge(&merged, list.data, list.size_bytes, &err) == SW_OK, "merge",
                  err.message);
            sw_tally_list_fini(&list);
        }
        for (size_t block = 0; block < BLOCKS; ++block) {
            sum read = {.block = block};
            check(sw_tally_list_read(merged.data, merged.size_bytes, add_to_sum, &read, NULL) ==
                          SW_OK &&
                      read.count <= 1 && read.total.crc == expected[block].crc &&
                      read.total.cover == expected[block].cover,
                  "a block of both", "");
            blocks += read.count;
        }
        check(merged.size_bytes <= 8 * blocks, "few bytes a block", "");
        sw_tally_list_fini(&merged);
    }
}

static bool is_manifest(const char *text, size_t size, sw_manifest *found)
{
    sw_error err = {0};
    char *exact = malloc(size + 1); /* so that the address sanitizer sees a read beyond */
    memcpy(exact, text, size);
    bool sound = sw_manifest_parse(exact, size, "text", found, &err) == SW_OK;
    free(exact);
    return sound;
}

/* A changed text with a right checksum of its own: what the parser itself must refuse. */
static bool survives_change(const char *text, size_t size, const char *from, const char *to)
{
    sw_text made = {0};
    sw_manifest found = {0};
    const char *seal = strstr(text, ",\"self_crc32c\"");
    const char *place = strstr(text, from);
    (void)size;
    if (!place || !seal)
        exit(99);
    sw_text_append(&made, text, (size_t)(place - text));
    sw_text_append(&made, to, strlen(to));
    sw_text_append(&made, place + strlen(from), (size_t)(seal - place) - strlen(from));
    sw_text_print(&made, ",\"self_crc32c\":\"%08x\"}\n", sw_crc32c(0, made.data, made.size_bytes));
    bool sound = is_manifest(made.data, made.size_bytes, &found);
    sw_manifest_fini(&found);
    sw_text_fini(&made);
    return sound;
}

static void manifests(void)
{
    static const char *const changes[][2] = {
        {"shardwright.checkpoint", "other"},
        {"\"version\":1", "\"version\":2"},
        {"\"version\":1", "\"version\":0"},
        {"\"step\":12", "\"step\":-1"},
        {"\"step\":12", "\"step\":1.5"},
        {"\"step\":12", "\"stop\":12"},
        {"\"world_size\":3", "\"world_size\":0"},
        {"abc9", "ABC"},
        {"abc9", ""},
        {"1048576", "1048577"},
        {"\"empty\"", "\"../empty\""},
        {"\"empty\"", "\"/empty\""},
        {"\"empty\"", "\"a/../b\""},
        {"\"empty\"", "\"a/b/c\""},
        {"\"empty\"", "\".hidden\""},
        {"\"empty\"", "\"ranks/.x\""},
        {"\"empty\"", "\"\""},
        {"\"empty\"", "\"a//b\""},
        {"\"empty\"", "\"a/\""},
        {"\"empty\"", "\"a b\""},
        {"\"empty\"", "\"zzz\""},
        {"\"empty\"", "\"model.safetensors\""},
        {"\"bytes\":10", "\"bytes\":1048577"},
        {"\"bytes\":10", "\"bytes\":-10"},
        {"\"bytes\":10", "\"bytes\":9007199254740993"},
        {"deadbeef", "deadbee"},
        {"deadbeef", "deadbeeg"},
        {"deadbeef", "DEADBEEF"},
        {"\"files\"", "\"filez\""},
    };
    size_t size = 0;
    char *text = print_case(&size);
    sw_manifest found = {0};
    check(is_manifest(text, size, &found), "reads what it wrote", "");
    const sw_manifest_file *model = sw_manifest_find(&found, "model.safetensors");
    check(found.step == 12 && found.world_size == 3 && strcmp(found.nonce, "abc9") == 0 &&
              found.metric == 0.125,
          "fields", "");
    check(found.file_count == 3 && found.block_count == 5 && model &&
              model->crcs[3] == 0xdeadbeef + 3 && model->first_block == 0,
          "files", "");
    sw_manifest_fini(&found);
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; ++i)
        check(!survives_change(text, size, changes[i][0], changes[i][1]), "refused", changes[i][1]);
    check(survives_change(text, size, "\"step\":12", "\"step\":12,\"new\":[1]"),
          "unknown keys are ignored", "");
    for (size_t end = 0; end < size; ++end)
        check(!is_manifest(text, end, &found), "cut off", "");
    for (size_t at = 0; at < size; ++at)
        for (int bit = 0; bit < 8; ++bit) {
            text[at] = (char)(text[at] ^ (1 << bit));
            check(!is_manifest(text, size, &found), "a bit changed", "");
            text[at] = (char)(text[at] ^ (1 << bit));
        }
    free(text);
}

/* Random edits of sound texts: no crash, no overrun (the sanitizers look), and JSON that is read
 * keeps to its buffer. */
static void fuzz(int rounds)
{
    static const char *const pieces[] = {"{",   "}", "[", "]", ",", ":",    "\"",           "\\",
                                         "\\u", "0", "-", "e", "9", "null", "data_offsets", "\xff",
                                         " "};
    static const char *const texts[] = {
        "{\"__metadata__\":{\"format\":\"pt\"},\"x\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_"
        "offsets\":[0,24]},\"y\\n\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[24,25]}}",
        "{\"a\":[1,2.5,{\"b\":\"\\u00e9\\ud83d\\ude00\"}],\"c\":null}",
    };
    for (int round = 0; round < rounds; ++round) {
        const char *origin = texts[round % 2];
        size_t size = strlen(origin);
        char buffer[1024];
        memcpy(buffer, origin, size);
        for (size_t edits = 1 + chance(4); edits > 0; --edits) {
            const char *piece = pieces[chance(sizeof pieces / sizeof pieces[0])];
            size_t length = strlen(piece), at = chance(size), gone = chance(4);
            if (gone > size - at)
                gone = size - at;
            if (size - gone + length > 1000)
                break;
            memmove(buffer + at + length, buffer + at + gone, size - at - gone);
            memcpy(buffer + at, piece, length);
            size = size - gone + length;
            if (size == 0)
                break;
        }
        uint8_t *exact = malloc(size + 8);
        sw_safetensors found = {0};
        sw_json json = {0};
        for (int i = 0; i < 8; ++i)
            exact[i] = (uint8_t)((uint64_t)size >> (8 * i));
        memcpy(exact + 8, buffer, size);
        if (sw_safetensors_read(exact, size + 8, size + 8 + 25, "fuzz", &found, NULL) == SW_OK) {
            uint64_t at = size + 8;
            for (size_t i = 0; i < found.entry_count; at += found.entries[i++].size_bytes)
                check(found.entries[i].begin == at, "ranges", "");
            check(at == size + 8 + 25, "ranges", "end");
        }
        if (sw_json_parse((char *)exact + 8, size, SIZE_MAX, "fuzz", &json, NULL) == SW_OK)
            check(json.nodes[0].span == json.node_count, "span", "");
        sw_safetensors_fini(&found);
        sw_json_fini(&json);
        free(exact);
    }
}

/* Over all ranks every byte that is not held in parts, once; ascending; about as much each. */
static void check_own_ranges(const sw_plan *plan, int world)
{
    uint64_t all = 0, most = 0, expected = 0, first = plan->first_bytes;
    uint8_t **seen = calloc(plan->file_count + 1, sizeof *seen);
    for (size_t f = 0; f < plan->file_count; ++f) {
        const sw_plan_file *file = &plan->files[f];
        seen[f] = calloc(file->size_bytes + 1, 1);
        expected += file->header_bytes;
        for (size_t p = 0; p < file->piece_count; ++p) {
            const sw_plan_piece *piece = &plan->pieces[file->first_piece + p];
            check(plan->piece_of[piece->source] == file->first_piece + p &&
                      (piece->size_bytes == 0 ||
                       sw_plan_file_of(plan, file->first_piece + p) == file),
                  "where a source is", file->path);
            if (piece->holder == SW_HELD_IN_PARTS)
                memset(seen[f] + piece->begin, 1, piece->size_bytes);
            else
                expected += piece->size_bytes;
        }
    }
    for (int rank = 0; rank < world; ++rank) {
        sw_plan_range *ranges = NULL;
        size_t count = 0;
        uint64_t bytes = 0;
        check(sw_plan_own_ranges(plan, rank, world, &ranges, &count, NULL) == SW_OK, "ranges", "");
        for (size_t i = 0; i < count; ++i) {
            check(i == 0 || ranges[i].file > ranges[i - 1].file ||
                      ranges[i].begin >= ranges[i - 1].end,
                  "ascending", "");
            uint8_t *bytes_of = seen[ranges[i].file] + ranges[i].begin;
            check(!memchr(bytes_of, 1, ranges[i].end - ranges[i].begin), "each byte once", "");
            memset(bytes_of, 1, ranges[i].end - ranges[i].begin);
            bytes += ranges[i].end - ranges[i].begin;
        }
        all += bytes;
        most = bytes > most ? bytes : most;
        free(ranges);
    }
    check(all == expected, "every byte", "");
    uint64_t fair = expected / (uint64_t)world + 3 * (uint64_t)SW_BLOCK_BYTES;
    check(most <= (fair > first ? fair : first + SW_BLOCK_BYTES), "balanced", "");
    for (size_t f = 0; f < plan->file_count; ++f)
        free(seen[f]);
    free(seen);
}

static void check_plan(const sw_plan *plan, const sw_plan_tensor *tensors, size_t count,
                       uint64_t limit)
{
    bool *seen = calloc(count + 1, sizeof *seen);
    for (size_t f = 0; f < plan->file_count; ++f) {
        const sw_plan_file *file = &plan->files[f];
        sw_safetensors found = {0};
        sw_error err = {0};
        uint64_t data = file->size_bytes - file->header_bytes;
        check(file->header_bytes % 4096 == 0 && (data <= limit || file->piece_count == 1), "size",
              file->path);
        check(sw_safetensors_read((uint8_t *)file->header, file->header_bytes, file->size_bytes,
                                  file->path, &found, &err) == SW_OK,
              "a strict reader reads it", err.message);
        for (size_t p = 0; p < file->piece_count; ++p) {
            const sw_plan_piece *piece = &plan->pieces[file->first_piece + p];
            unsigned width = sw_safetensors_element_bytes(tensors[piece->source].dtype);
            check(!seen[piece->source] && piece->begin % width == 0,
                  "once, and aligned to its element", tensors[piece->source].name);
            seen[piece->source] = true;
        }
        sw_safetensors_fini(&found);
    }
    for (size_t i = 0; i < count; ++i)
        check(seen[i], "every tensor", tensors[i].name);
    for (int world = 1; world <= 9; ++world)
        check_own_ranges(plan, world);
    free(seen);
}

/* Each rank keeps the headers that it writes, and no other. */
static void check_trimmed(const sw_plan_group *group, int world)
{
    for (int rank = 0; rank < world; ++rank) {
        sw_plan *plan = NULL;
        sw_plan_range *ranges = NULL;
        size_t count = 0;
        check(sw_plan_create(group, 1, NULL, 0, &plan, NULL) == SW_OK &&
                  sw_plan_own_ranges(plan, rank, world, &ranges, &count, NULL) == SW_OK,
              "plan", "");
        sw_plan_trim(plan, rank, world, UINT64_MAX);
        check(!plan->is_trimmed, "short headers stay", "");
        sw_plan_trim(plan, rank, world, 0);
        sw_plan_trim(plan, rank, world, 0);
        for (size_t f = 0; f < plan->file_count; ++f) {
            bool writes = false;
            for (size_t i = 0; i < count; ++i)
                writes |= ranges[i].file == f && ranges[i].begin < plan->files[f].header_bytes;
            check(writes == (plan->files[f].header != NULL), "a header", plan->files[f].path);
        }
        free(ranges);
        sw_plan_destroy(plan);
    }
}

static void plans(void)
{
    static const char *const dtypes[] = {"U8", "BF16", "F32", "I64", "BOOL", "F64", "F16"};
    enum { COUNT = 40 };
    for (int round = 0; round < 60; ++round) {
        sw_plan_tensor tensors[COUNT];
        int64_t shapes[COUNT][2];
        char names[COUNT][48];
        size_t count = chance(COUNT);
        uint64_t limit = 1 + chance(4 << 20);
        for (size_t i = 0; i < count; ++i) {
            shapes[i][0] = (int64_t)chance(700);
            shapes[i][1] = (int64_t)chance(900);
            snprintf(names[i], sizeof names[i], "layer.%zu.\"w\\", i);
            tensors[i] = (sw_plan_tensor){names[i], dtypes[chance(7)], shapes[i], (int)chance(3),
                                          (sw_plan_holder)(round % 4 ? chance(6) % 3 : 0)};
        }
        sw_plan_group group = {"model", round % 2, limit, "{}", tensors, count};
        sw_plan *plan = NULL, *again = NULL;
        sw_error err = {0};
        check(sw_plan_create(&group, 1, NULL, 0, &plan, &err) == SW_OK &&
                  sw_plan_create(&group, 1, NULL, 0, &again, &err) == SW_OK,
              "plan", err.message);
        check(plan->digest == again->digest, "digest", "");
        check_plan(plan, tensors, count, limit);
        check_trimmed(&group, 1 + round % 5);
        sw_plan_destroy(plan);
        sw_plan_destroy(again);
    }
    int64_t shape[1] = {3};
    sw_plan_tensor twice[2] = {{"x", "U8", shape, 1, SW_HELD_BY_ALL},
                               {"x", "U8", shape, 1, SW_HELD_BY_ALL}};
    sw_plan_group group = {"model", false, 0, "{}", twice, 2};
    sw_plan *plan = NULL;
    sw_error err = {0};
    check(sw_plan_create(&group, 1, NULL, 0, &plan, &err) == SW_E_INVALID &&
              strstr(err.message, "used twice"),
          "a name twice", err.message);
    twice[1].name = "__metadata__";
    check(sw_plan_create(&group, 1, NULL, 0, &plan, &err) == SW_E_INVALID &&
              strstr(err.message, "reserved"),
          "a reserved name", err.message);
    twice[1].name = "y";
    twice[1].dtype = "F4";
    check(sw_plan_create(&group, 1, NULL, 0, &plan, &err) == SW_E_INVALID, "a dtype", err.message);
    group.tensor_count = 1;
    group.stem = "../x";
    check(sw_plan_create(&group, 1, NULL, 0, &plan, &err) == SW_E_INVALID &&
              strstr(err.message, "cannot name a file"),
          "a path", err.message);
}

int main(void)
{
    checksums();
    json_texts();
    safetensors_headers();
    manifests();
    incomplete_manifests();
    values_are_bounded();
    values_by_the_million();
    tallies();
    merged_tallies();
    plans();
    fuzz(getenv("SW_TEST_LONG") ? 2000000 : 100000);
    return failed ? 1 : 0;
}
