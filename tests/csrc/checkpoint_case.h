/* checkpoint_case.h - what the C tests of checkpoints save, and how they look at what lies in a
 * directory. The value of every byte tells the step and its place, so that a mixture of two saves
 * shows. */
#ifndef CHECKPOINT_CASE_H
#define CHECKPOINT_CASE_H

#include <dirent.h>
#include <ftw.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checkpoint/commit.h"
#include "checkpoint/read.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/save.h"
#include "platform/file.h"

enum {
    CASE_TENSORS = 6,
    CASE_WORLD_MAX = 5,
    CASE_HOSTS_MAX = 20,
    CASE_NAMES_MAX = 16,
    CASE_LINE_BYTES = 64
};
enum { CASE_DEADLINE_S = 120 }; /* no save comes near it, on a machine that has work for 40 */

#ifndef CASE_ROWS
#define CASE_ROWS 600 /* of one tensor: three blocks in all */
#endif

typedef struct case_tensor {
    const char *name, *dtype;
    int64_t rows, columns;
    sw_plan_holder holder;
} case_tensor;

static const case_tensor case_model[CASE_TENSORS] = {
    {"a", "U8", 3, 1, SW_HELD_BY_ALL},
    {"b", "F32", 700, 401, SW_HELD_BY_ALL}, /* more than a block */
    {"c", "F32", 0, 5, SW_HELD_BY_ALL},
    {"d", "I64", 77, 1, SW_HELD_BY_FIRST},
    {"e", "F32", CASE_ROWS, 501, SW_HELD_IN_PARTS}, /* cuts fall anywhere */
    {"f", "U8", 5003, 1, SW_HELD_IN_PARTS},
};

static inline uint8_t case_byte(int step, size_t tensor, uint64_t place)
{
    return (uint8_t)((uint64_t)step * 101 + tensor * 31 + place * 7 + place / 4096);
}

static inline uint64_t case_size(size_t tensor)
{
    return (uint64_t)(case_model[tensor].rows * case_model[tensor].columns) *
           sw_safetensors_element_bytes(case_model[tensor].dtype);
}

/* A tensor's bytes at a step (below 8), made once; first by the main thread. */
static inline const uint8_t *case_bytes(int step, size_t tensor)
{
    static uint8_t *made[8][CASE_TENSORS];
    if (!made[step][tensor]) {
        uint64_t size = case_size(tensor);
        uint8_t *bytes = malloc(size + 1);
        for (uint64_t b = 0; b < size; ++b)
            bytes[b] = case_byte(step, tensor, b);
        made[step][tensor] = bytes;
    }
    return made[step][tensor];
}

static inline sw_status case_plan(int world_size, sw_plan **plan, sw_error *err)
{
    int64_t shapes[CASE_TENSORS][2];
    sw_plan_tensor tensors[CASE_TENSORS];
    for (size_t i = 0; i < CASE_TENSORS; ++i) {
        shapes[i][0] = case_model[i].rows;
        shapes[i][1] = case_model[i].columns;
        tensors[i] = (sw_plan_tensor){case_model[i].name, case_model[i].dtype, shapes[i], 2,
                                      case_model[i].holder};
    }
    sw_plan_group group = {"model", false, 0, "{\"format\":\"pt\"}", tensors, CASE_TENSORS};
    sw_plan_text lines = {"ranks/all.jsonl", (uint64_t)world_size * CASE_LINE_BYTES,
                          SW_HELD_IN_PARTS};
    return sw_plan_create(&group, 1, &lines, 1, plan, err);
}

/* One rank's data of a step: what sw_save_source points to. `own` is rank 0's file. */
typedef struct case_data {
    uint8_t *bytes[CASE_TENSORS];
    sw_save_source sources[CASE_TENSORS + 1];
    char line[CASE_LINE_BYTES + 1], text[64];
    sw_save_source own;
} case_data;

/* Of what is held in parts a rank gives the bytes from size * rank / world_size on, in two ranges
 * of memory where there are two bytes. */
static inline void case_fill(case_data *data, int step, int rank, int world_size)
{
    for (size_t i = 0; i < CASE_TENSORS; ++i) {
        uint64_t size = case_size(i), begin = 0, end = size;
        if (case_model[i].holder == SW_HELD_IN_PARTS) {
            begin = size * (uint64_t)rank / (uint64_t)world_size;
            end = size * (uint64_t)(rank + 1) / (uint64_t)world_size;
        }
        data->bytes[i] = malloc(size + 1);
        memcpy(data->bytes[i], case_bytes(step, i), size);
        data->sources[i] = (sw_save_source){i, begin, end - begin, data->bytes[i] + begin, false};
    }
    snprintf(data->line, sizeof data->line, "{\"step\":%d,\"rank\":%d}", step, rank);
    memset(data->line + strlen(data->line), ' ', sizeof data->line - strlen(data->line));
    data->line[CASE_LINE_BYTES - 1] = '\n';
    data->sources[CASE_TENSORS] = (sw_save_source){CASE_TENSORS, (uint64_t)rank * CASE_LINE_BYTES,
                                                   CASE_LINE_BYTES, data->line, false};
    snprintf(data->text, sizeof data->text, "{\"step\":%d}\n", step);
    data->own = (sw_save_source){0, 0, strlen(data->text), data->text, false};
}

static inline void case_free(case_data *data)
{
    for (size_t i = 0; i < CASE_TENSORS; ++i)
        free(data->bytes[i]);
}

typedef struct case_rank {
    int rank, world_size, step;
    const char *directory;
    uint8_t *const *pages;
    const int *host_of;     /* several hosts, whose ranks map no other's pages; NULL: one */
    const char *board_path; /* the file between them */
    const char *const *stale, *const *retired;
    size_t stale_count, retired_count;
    bool is_direct, is_lazy;
    int thread_count;
    uint64_t number;
    const char *nonce, *replaces; /* NULL: what is there now */
    sw_status status;
    sw_error err;
} case_rank;

/* A whole save on the calling thread: begin, protect, change the data, wait. */
static inline void *case_save(void *argument)
{
    case_rank *self = argument;
    char folder[SW_PATH_BYTES];
    sw_channel channel;
    sw_saver *saver = NULL;
    sw_plan *shared = NULL, *own = NULL;
    case_data data = {0};
    char found[SW_IDENTITY_BYTES];
    sw_saver_options options = {.thread_count = self->thread_count, .use_direct = self->is_direct};
    bool is_over = false;
    snprintf(folder, sizeof folder, "%s/step-%06d", self->directory, self->step);
    sw_checkpoint_identify(folder, found);
    case_fill(&data, self->step, self->rank, self->world_size);
    sw_plan_text text = {"state.json", data.own.size_bytes, SW_HELD_BY_ALL};
    self->status = sw_channel_init(&channel, self->rank, self->world_size,
                                   self->world_size > 1 ? self->pages : NULL, self->host_of,
                                   self->board_path, &self->err);
    if (self->status != SW_OK || sw_saver_create(&channel, &options, &saver, &self->err) != SW_OK ||
        case_plan(self->world_size, &shared, &self->err) != SW_OK ||
        sw_plan_create(NULL, 0, &text, 1, &own, &self->err) != SW_OK)
        exit(90);
    sw_save_request request = {.folder = folder,
                               .nonce = self->nonce,
                               .replaces = self->replaces ? self->replaces : found,
                               .number = self->number,
                               .step = (uint64_t)self->step,
                               .shared = {shared, data.sources, CASE_TENSORS + 1},
                               .own = {self->rank ? NULL : own, &data.own, self->rank ? 0 : 1},
                               .is_lazy = self->is_lazy,
                               .stale = self->stale,
                               .stale_count = self->stale_count,
                               .retired = self->retired,
                               .retired_count = self->retired_count,
                               .timeout_ns = CASE_DEADLINE_S * INT64_C(1000000000)};
    self->status = sw_saver_begin(saver, &request, &self->err);
    if (self->status == SW_OK && sw_saver_protect(saver, &self->err) == SW_OK)
        for (size_t i = 0; i < CASE_TENSORS; ++i)
            memset(data.bytes[i], 0xee, case_size(i)); /* the next step has begun */
    while (self->status == SW_OK && !is_over)
        self->status = sw_saver_wait(saver, 1000000000, &is_over, &self->err);
    sw_saver_destroy(saver);
    sw_channel_fini(&channel);
    sw_plan_destroy(shared);
    sw_plan_destroy(own);
    case_free(&data);
    return NULL;
}

/* A save by `world_size` threads; the first rank's outcome, to err too. Every rank must have the
 * same. */
static inline sw_status case_save_together(case_rank settings, sw_error *err)
{
    static uint8_t memory[CASE_HOSTS_MAX][SW_CHANNEL_PAGE_BYTES] __attribute__((aligned(4096)));
    uint8_t *pages[CASE_HOSTS_MAX];
    case_rank ranks[CASE_HOSTS_MAX];
    pthread_t threads[CASE_HOSTS_MAX];
    memset(memory, 0, sizeof memory);
    for (size_t i = 0; i < CASE_TENSORS; ++i)
        (void)case_bytes(settings.step, i);
    for (int r = 0; r < settings.world_size; ++r)
        pages[r] = memory[r];
    for (int r = 0; r < settings.world_size; ++r) {
        ranks[r] = settings;
        ranks[r].rank = r;
        ranks[r].pages = pages;
        if (pthread_create(&threads[r], NULL, case_save, &ranks[r]) != 0)
            exit(91);
    }
    for (int r = 0; r < settings.world_size; ++r)
        pthread_join(threads[r], NULL);
    for (int r = 1; r < settings.world_size; ++r)
        if (ranks[r].status != ranks[0].status ||
            strcmp(ranks[r].err.message, ranks[0].err.message) != 0) {
            printf("rank %d: %s\nrank 0: %s\n", r, ranks[r].err.message, ranks[0].err.message);
            exit(92);
        }
    *err = ranks[0].err;
    return ranks[0].status;
}

/* Check every block. `model`: memory for the bytes of model.safetensors; NULL: none. */
static inline sw_status case_verify(const char *folder, const sw_manifest *manifest, uint8_t *model,
                                    sw_error *err)
{
    sw_load_options options = {.thread_count = 1};
    sw_load_range *all = calloc(manifest->file_count + 1, sizeof *all);
    for (size_t i = 0; i < manifest->file_count; ++i) {
        const sw_manifest_file *file = &manifest->files[i];
        bool is_model = strcmp(file->path, "model.safetensors") == 0;
        all[i] = (sw_load_range){
            .file = i, .size_bytes = file->size_bytes, .destination = is_model ? model : NULL};
    }
    sw_status status =
        sw_checkpoint_load(folder, manifest, all, manifest->file_count, &options, err);
    free(all);
    return status;
}

/* Whether `folder` is a checkpoint that passes, and holds the very bytes of its step; *step is then
 * set. */
static inline bool case_is_valid(const char *folder, int *step, sw_error *err)
{
    sw_manifest manifest = {0};
    bool right = true;
    if (sw_checkpoint_open(folder, &manifest, err) != SW_OK)
        return false;
    sw_plan *plan = NULL;
    const sw_manifest_file *file = sw_manifest_find(&manifest, "model.safetensors");
    uint8_t *model = file ? malloc(file->size_bytes + 1) : NULL;
    if (!model || case_verify(folder, &manifest, model, err) != SW_OK ||
        case_plan(manifest.world_size, &plan, err) != SW_OK)
        right = false;
    for (size_t p = 0; right && p < plan->piece_count; ++p) {
        const sw_plan_piece *piece = &plan->pieces[p];
        if (piece->source < CASE_TENSORS &&
            (piece->begin + piece->size_bytes > file->size_bytes ||
             memcmp(model + piece->begin, case_bytes((int)manifest.step, piece->source),
                    piece->size_bytes) != 0)) {
            printf("%s: a passing checkpoint holds a wrong byte in tensor %u\n", folder,
                   piece->source);
            exit(93); /* a silent corruption */
        }
    }
    free(model);
    sw_plan_destroy(plan);
    *step = (int)manifest.step;
    sw_manifest_fini(&manifest);
    return right;
}

/* Whether `path` is the name of what a save has replaced; *stands: so has what took its place. */
static inline bool case_is_replaced(const char *path, bool *stands)
{
    char folder[SW_PATH_BYTES];
    size_t length = strlen(path), suffix = strlen(".replaced");
    if (length <= suffix || strcmp(path + length - suffix, ".replaced") != 0)
        return false;
    snprintf(folder, sizeof folder, "%.*s", (int)(length - suffix), path);
    *stands = sw_file_exists(folder);
    return true;
}

/* The highest step among valid checkpoints called step-NNNNNN in `directory`, or
 * step-NNNNNN.replaced where the other is missing; 0 if none. Names of others to `left`. */
static inline int case_newest(const char *directory, char left[CASE_NAMES_MAX][SW_PATH_BYTES],
                              size_t *left_count)
{
    int newest = 0;
    DIR *stream = opendir(directory);
    *left_count = 0;
    for (struct dirent *entry; stream && (entry = readdir(stream));) {
        char path[SW_PATH_BYTES];
        sw_error err;
        int step = 0;
        bool stands = true;
        if (entry->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "%s/%s", directory, entry->d_name);
        if (strlen(entry->d_name) != strlen("step-000001") &&
            (!case_is_replaced(path, &stands) || stands)) {
            if (*left_count < CASE_NAMES_MAX)
                snprintf(left[(*left_count)++], SW_PATH_BYTES, "%s", path);
        } else if (case_is_valid(path, &step, &err) && step > newest) {
            newest = step;
        }
    }
    if (stream)
        closedir(stream);
    return newest;
}

static inline int case_remove(const char *path, const struct stat *info, int kind,
                              struct FTW *place)
{
    (void)info;
    (void)kind;
    (void)place;
    return remove(path);
}

/* Removes a directory of checkpoints, if it is there. */
static inline void case_clear(const char *directory)
{
    (void)nftw(directory, case_remove, 16, FTW_DEPTH | FTW_PHYS);
}

static inline const char *case_root(void)
{
    return access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
}

#endif
