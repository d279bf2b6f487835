/* plan.c - cut by size, order by element width inside a file, align data to page boundaries. */
#include "checkpoint/plan.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "checkpoint/safetensors.h"
#include "kernels/crc32c.h"

enum { PATH_COMPONENT_MAX = 128, HEADER_ALIGNMENT = 4096, ENTRY_BYTES = 64 };

typedef struct draft { /* a plan under construction */
    sw_plan *plan;
    size_t file_capacity;
    size_t next_source;
    uint64_t *sizes; /* owned; one a tensor of the group */
    sw_error *err;
} draft;

bool sw_plan_is_path(const char *path)
{
    int components = 1;
    size_t length = 0;
    for (const char *at = path; *at; ++at) {
        bool is_plain = (*at >= 'a' && *at <= 'z') || (*at >= 'A' && *at <= 'Z') ||
                        (*at >= '0' && *at <= '9') || *at == '.' || *at == '_' || *at == '-';
        if (*at == '/' && length > 0) {
            components++;
            length = 0;
        } else if (!is_plain || (length == 0 && *at == '.') || ++length > PATH_COMPONENT_MAX) {
            return false;
        }
    }
    return length > 0 && components <= 2;
}

static sw_status no_memory(const draft *d)
{
    SW_FAIL(d->err, SW_E_MEMORY, "no memory for the plan of a checkpoint (%zu files, %zu tensors)",
            d->plan->file_count, d->plan->piece_count);
}

static sw_status add_file(draft *d, const char *path, sw_plan_file **file)
{
    sw_plan *plan = d->plan;
    if (!sw_plan_is_path(path))
        SW_FAIL(d->err, SW_E_INVALID,
                "'%.200s' cannot name a file of a checkpoint: one or two parts of [A-Za-z0-9._-]",
                path);
    sw_plan_file *files =
        sw_grown(plan->files, &d->file_capacity, plan->file_count, sizeof *files, 8);
    if (!files)
        return no_memory(d);
    plan->files = files;
    char *copy = strdup(path);
    if (!copy)
        return no_memory(d);
    *file = &plan->files[plan->file_count++];
    **file = (sw_plan_file){.path = copy, .first_piece = plan->piece_count};
    return SW_OK;
}

/* Return the first tensor after the file that begins with `first`. */
static size_t cut(const sw_plan_group *group, const uint64_t *sizes, size_t first)
{
    uint64_t total = sizes[first];
    size_t end = first + 1;
    while (end < group->tensor_count &&
           (group->max_file_bytes == 0 || total + sizes[end] <= group->max_file_bytes))
        total += sizes[end++];
    return end;
}

static size_t count_files(const sw_plan_group *group, const uint64_t *sizes)
{
    size_t count = 0;
    for (size_t first = 0; first < group->tensor_count; first = cut(group, sizes, first))
        count++;
    return count ? count : 1; /* without tensors: one file that lists none */
}

static void print_entry(sw_text *text, const sw_plan_tensor *tensor, uint64_t begin, uint64_t end)
{
    sw_text_append(text, ",", 1);
    sw_text_quote(text, tensor->name);
    sw_text_print(text, ":{\"dtype\":\"%s\",\"shape\":[", tensor->dtype);
    for (int i = 0; i < tensor->ndim; ++i)
        sw_text_print(text, "%s%" PRId64, i ? "," : "", tensor->shape[i]);
    sw_text_print(text, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", begin, end);
}

static sw_status finish_header(draft *d, sw_plan_file *file, sw_text *text)
{
    sw_text_append(text, "}", 1);
    while (text->size_bytes % HEADER_ALIGNMENT && !text->is_out_of_memory)
        sw_text_append(text, " ", 1);
    SW_TRY(sw_text_check(text, file->path, d->err));
    uint64_t length = text->size_bytes - 8;
    if (length > SW_SAFETENSORS_HEADER_MAX)
        SW_FAIL(d->err, SW_E_INVALID,
                "'%s': names and shapes take %" PRIu64 " bytes, a safetensors header at most %d",
                file->path, length, SW_SAFETENSORS_HEADER_MAX);
    for (int i = 0; i < 8; ++i)
        text->data[i] = (char)(uint8_t)(length >> (8 * i));
    file->header = sw_shrunk(text->data, text->size_bytes);
    file->header_bytes = text->size_bytes;
    return SW_OK;
}

/* Add wider elements first, so that every tensor is aligned to its element size; keep registration
 * order among equals. */
static sw_status add_pieces(draft *d, sw_plan_file *file, const sw_plan_group *group, size_t first,
                            size_t end, sw_text *text)
{
    uint64_t data = 0;
    for (unsigned width = 8; width >= 1; width /= 2)
        for (size_t i = first; i < end; ++i) {
            const sw_plan_tensor *tensor = &group->tensors[i];
            if (sw_safetensors_element_bytes(tensor->dtype) != width)
                continue;
            print_entry(text, tensor, data, data + d->sizes[i]);
            d->plan->pieces[d->plan->piece_count++] =
                (sw_plan_piece){.source = (uint32_t)(d->next_source + i),
                                .begin = data,
                                .size_bytes = d->sizes[i],
                                .holder = tensor->holder};
            data += d->sizes[i];
        }
    SW_TRY(finish_header(d, file, text));
    file->piece_count = end - first;
    for (size_t i = 0; i < file->piece_count; ++i)
        d->plan->pieces[file->first_piece + i].begin += file->header_bytes;
    file->size_bytes = file->header_bytes + data;
    return SW_OK;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static sw_status check_names(draft *d, const sw_plan_group *group)
{
    sw_status status = SW_OK;
    const char **names = malloc((group->tensor_count + 1) * sizeof *names);
    if (!names)
        return no_memory(d);
    for (size_t i = 0; i < group->tensor_count; ++i)
        names[i] = group->tensors[i].name;
    qsort(names, group->tensor_count, sizeof *names, compare_names);
    for (size_t i = 0; i < group->tensor_count && status == SW_OK; ++i)
        if (strcmp(names[i], "__metadata__") == 0 || (i > 0 && strcmp(names[i - 1], names[i]) == 0))
            status = sw_error_set(d->err, SW_E_INVALID, -1, "%s: the tensor name '%.200s' is %s",
                                  group->stem, names[i],
                                  i > 0 && strcmp(names[i - 1], names[i]) == 0
                                      ? "used twice"
                                      : "reserved by safetensors");
    free(names);
    return status;
}

static sw_status add_group(draft *d, const sw_plan_group *group)
{
    free(d->sizes);
    d->sizes = calloc(group->tensor_count + 1, sizeof *d->sizes);
    if (!d->sizes)
        return no_memory(d);
    for (size_t i = 0; i < group->tensor_count; ++i) {
        const sw_plan_tensor *tensor = &group->tensors[i];
        SW_TRY(sw_safetensors_size(tensor->name, tensor->dtype, tensor->shape, tensor->ndim,
                                   &d->sizes[i], d->err));
    }
    SW_TRY(check_names(d, group));
    size_t count = count_files(group, d->sizes), first = 0;
    for (size_t number = 1; number <= count; ++number) {
        char path[2 * PATH_COMPONENT_MAX + 64];
        sw_plan_file *file = NULL;
        sw_text text = {0};
        if (count == 1 && !group->is_numbered)
            snprintf(path, sizeof path, "%s.safetensors", group->stem);
        else
            snprintf(path, sizeof path, "%s-%05zu-of-%05zu.safetensors", group->stem, number,
                     count);
        SW_TRY(add_file(d, path, &file));
        sw_text_append(&text, "\0\0\0\0\0\0\0\0", 8);
        sw_text_print(&text, "{\"__metadata__\":%s", group->metadata);
        size_t end = group->tensor_count ? cut(group, d->sizes, first) : 0;
        sw_status status = add_pieces(d, file, group, first, end, &text);
        if (status != SW_OK) {
            sw_text_fini(&text);
            return status;
        }
        first = end;
    }
    d->next_source += group->tensor_count;
    return SW_OK;
}

static sw_status add_text(draft *d, const sw_plan_text *text)
{
    sw_plan_file *file = NULL;
    if (text->size_bytes > SW_VALUES_MAX_BYTES && !strchr(text->path, '/'))
        SW_FAIL(d->err, SW_E_INVALID,
                "'%.200s' would have %" PRIu64
                " bytes; a file of values has at most %d: save large "
                "values as tensors or arrays",
                text->path, text->size_bytes, SW_VALUES_MAX_BYTES);
    SW_TRY(add_file(d, text->path, &file));
    d->plan->pieces[d->plan->piece_count++] = (sw_plan_piece){.source = (uint32_t)d->next_source++,
                                                              .size_bytes = text->size_bytes,
                                                              .holder = text->holder};
    file->piece_count = 1;
    file->size_bytes = text->size_bytes;
    return SW_OK;
}

static void number_blocks(draft *d)
{
    sw_plan *plan = d->plan;
    for (size_t i = 0; i < plan->file_count; ++i) {
        sw_plan_file *file = &plan->files[i];
        file->first_block = plan->block_count;
        file->block_count = (file->size_bytes + SW_BLOCK_BYTES - 1) / SW_BLOCK_BYTES;
        plan->block_count += file->block_count;
        plan->digest = sw_crc32c(plan->digest, file->path, strlen(file->path) + 1);
        plan->digest = sw_crc32c(plan->digest, &file->size_bytes, sizeof file->size_bytes);
        plan->digest = sw_crc32c(plan->digest, file->header, file->header_bytes);
        plan->manifest_bytes += strlen(file->path) + ENTRY_BYTES + 8 * file->block_count;
    }
}

/* Add bytes [begin, end) of a file that all ranks hold. Extend the last range if they follow it. */
static void add_common(sw_plan *plan, size_t file, uint64_t begin, uint64_t end)
{
    sw_plan_common *last = plan->common_count ? &plan->common[plan->common_count - 1] : NULL;
    uint64_t first = plan->common_blocks;
    if (begin == end)
        return;
    if (last && last->range.file == file && last->range.end == begin) {
        last->range.end = end;
        first = last->first;
        begin = last->range.begin;
    } else {
        if (last && last->range.file == file &&
            (last->range.end - 1) / SW_BLOCK_BYTES == begin / SW_BLOCK_BYTES)
            --first; /* one block belongs to both */
        plan->common[plan->common_count++] = (sw_plan_common){{file, begin, end}, first};
    }
    plan->common_blocks = first + (end - 1) / SW_BLOCK_BYTES - begin / SW_BLOCK_BYTES + 1;
}

static sw_status list_common(draft *d)
{
    sw_plan *plan = d->plan;
    plan->common = calloc(plan->file_count + plan->piece_count + 1, sizeof *plan->common);
    plan->piece_of = calloc(plan->source_count + 1, sizeof *plan->piece_of);
    if (!plan->common || !plan->piece_of)
        return no_memory(d);
    for (size_t f = 0; f < plan->file_count; ++f) {
        const sw_plan_file *file = &plan->files[f];
        add_common(plan, f, 0, file->header_bytes);
        for (size_t p = file->first_piece; p < file->first_piece + file->piece_count; ++p) {
            const sw_plan_piece *piece = &plan->pieces[p];
            plan->piece_of[piece->source] = (uint32_t)p;
            if (piece->holder == SW_HELD_BY_ALL)
                add_common(plan, f, piece->begin, piece->begin + piece->size_bytes);
            else if (piece->holder == SW_HELD_BY_FIRST)
                plan->first_bytes += piece->size_bytes;
        }
    }
    plan->common = sw_shrunk(plan->common, (plan->common_count + 1) * sizeof *plan->common);
    return SW_OK;
}

sw_status sw_plan_create(const sw_plan_group *groups, size_t group_count, const sw_plan_text *texts,
                         size_t text_count, sw_plan **plan, sw_error *err)
{
    draft d = {.plan = calloc(1, sizeof(sw_plan)), .err = err};
    sw_status status = SW_OK;
    size_t sources = text_count;
    if (!d.plan)
        SW_FAIL(err, SW_E_MEMORY, "no memory for the plan of a checkpoint");
    for (size_t i = 0; i < group_count; ++i)
        sources += groups[i].tensor_count;
    if (sources >= UINT32_MAX) {
        free(d.plan);
        SW_FAIL(err, SW_E_INVALID, "a checkpoint has at most %u tensors, not %zu", UINT32_MAX - 1,
                sources);
    }
    d.plan->pieces = calloc(sources + 1, sizeof *d.plan->pieces);
    if (!d.plan->pieces)
        status = no_memory(&d);
    for (size_t i = 0; i < group_count && status == SW_OK; ++i)
        status = add_group(&d, &groups[i]);
    for (size_t i = 0; i < text_count && status == SW_OK; ++i)
        status = add_text(&d, &texts[i]);
    d.plan->source_count = sources;
    if (status == SW_OK) {
        number_blocks(&d);
        status = list_common(&d);
    }
    free(d.sizes);
    if (status != SW_OK) {
        sw_plan_destroy(d.plan);
        return status;
    }
    *plan = d.plan;
    return SW_OK;
}

void sw_plan_destroy(sw_plan *plan)
{
    if (!plan)
        return;
    for (size_t i = 0; i < plan->file_count; ++i) {
        free(plan->files[i].path);
        free(plan->files[i].header);
    }
    free(plan->files);
    free(plan->pieces);
    free(plan->piece_of);
    free(plan->common);
    free(plan);
}

/* Return where a rank's part of the common blocks begins. Rank 0 also writes the bytes of
 * SW_HELD_BY_FIRST, so its part is smaller by as many bytes; the others take equal parts of the
 * rest. */
static uint64_t part_begin(const sw_plan *plan, int rank, int world_size)
{
    uint64_t all = plan->common_blocks, first = plan->first_bytes / SW_BLOCK_BYTES;
    uint64_t world = (uint64_t)world_size, equal = (all + first + world - 1) / world;
    uint64_t of_rank_0 = equal > first ? equal - first : 0;
    if (world == 1 || of_rank_0 > all)
        of_rank_0 = all;
    if (rank == 0)
        return 0;
    return world == 1 ? all : of_rank_0 + (all - of_rank_0) * (uint64_t)(rank - 1) / (world - 1);
}

static uint64_t block_count_of(const sw_plan_common *common)
{
    return (common->range.end - 1) / SW_BLOCK_BYTES - common->range.begin / SW_BLOCK_BYTES + 1;
}

/* Find the first common range with a block numbered `number` or higher. */
static size_t find_common(const sw_plan *plan, uint64_t number)
{
    size_t low = 0, high = plan->common_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (plan->common[middle].first + block_count_of(&plan->common[middle]) <= number)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Clip a common range to the blocks numbered [low, high); return false if no byte is left. */
static bool clip_common(const sw_plan_common *common, uint64_t low, uint64_t high,
                        sw_plan_range *clipped)
{
    uint64_t first_block = common->range.begin / SW_BLOCK_BYTES;
    *clipped = common->range;
    if (low > common->first)
        clipped->begin = (first_block + low - common->first) * SW_BLOCK_BYTES;
    if (high < common->first + block_count_of(common))
        clipped->end = high <= common->first
                           ? clipped->begin
                           : (first_block + high - common->first) * SW_BLOCK_BYTES;
    return clipped->begin < clipped->end;
}

int sw_plan_compare_ranges(const void *a, const void *b)
{
    const sw_plan_range *x = a, *y = b;
    if (x->file != y->file)
        return x->file < y->file ? -1 : 1;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

sw_status sw_plan_own_ranges(const sw_plan *plan, int rank, int world_size, sw_plan_range **ranges,
                             size_t *count, sw_error *err)
{
    uint64_t low = part_begin(plan, rank, world_size),
             high = part_begin(plan, rank + 1, world_size);
    size_t begin = find_common(plan, low), used = 0, most = 1;
    for (size_t i = begin; i < plan->common_count && plan->common[i].first < high; ++i)
        ++most;
    sw_plan_range *made = malloc((most + (rank == 0 ? plan->piece_count : 0)) * sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "no memory for the ranges of a plan of %zu files",
                plan->file_count);
    for (size_t i = begin; i < plan->common_count && plan->common[i].first < high; ++i)
        used += clip_common(&plan->common[i], low, high, &made[used]);
    for (size_t f = 0; rank == 0 && f < plan->file_count; ++f)
        for (size_t p = 0; p < plan->files[f].piece_count; ++p) {
            const sw_plan_piece *piece = &plan->pieces[plan->files[f].first_piece + p];
            if (piece->holder == SW_HELD_BY_FIRST && piece->size_bytes)
                made[used++] = (sw_plan_range){f, piece->begin, piece->begin + piece->size_bytes};
        }
    if (rank == 0 && used)
        qsort(made, used, sizeof *made, sw_plan_compare_ranges);
    *ranges = made;
    *count = used;
    return SW_OK;
}

void sw_plan_trim(sw_plan *plan, int rank, int world_size, uint64_t keep_bytes)
{
    sw_plan_range *ranges = NULL;
    size_t count = 0, next = 0;
    uint64_t header_bytes = 0;
    for (size_t f = 0; f < plan->file_count; ++f)
        header_bytes += plan->files[f].header_bytes;
    if (plan->is_trimmed || header_bytes <= keep_bytes ||
        sw_plan_own_ranges(plan, rank, world_size, &ranges, &count, NULL))
        return;
    plan->is_trimmed = true;
    for (size_t f = 0; f < plan->file_count; ++f) {
        sw_plan_file *file = &plan->files[f];
        while (next < count && ranges[next].file < f)
            ++next;
        if (next < count && ranges[next].file == f && ranges[next].begin < file->header_bytes)
            continue;
        free(file->header);
        file->header = NULL;
    }
    free(ranges);
}

size_t sw_plan_find_piece(const sw_plan *plan, const sw_plan_file *file, uint64_t offset)
{
    size_t low = file->first_piece, high = file->first_piece + file->piece_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (plan->pieces[middle].begin + plan->pieces[middle].size_bytes <= offset)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

const sw_plan_file *sw_plan_file_of(const sw_plan *plan, size_t piece)
{
    size_t low = 0, high = plan->file_count;
    while (high - low > 1) { /* files without a piece share a number: the last of them has it */
        size_t middle = low + (high - low) / 2;
        if (plan->files[middle].first_piece <= piece)
            low = middle;
        else
            high = middle;
    }
    return &plan->files[low];
}
