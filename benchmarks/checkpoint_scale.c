/* checkpoint_scale.c - what a save costs beside its bytes, at world sizes that no test machine has:
 * planning on a rank, and rank 0's commit, over sparse files.
 *
 * Every rank's ranges are listed by the code that a save runs, one rank after the other; their
 * tallies are merged, first those of a host, as its carrier does, then those of a group of hosts,
 * as its first carrier does, then all by rank 0; the files are created without disk space, and the
 * folder is committed. No byte of a tensor is
 * read or written, so checksums are zero; that ranges tile every block is checked by the commit, as
 * in a save. "file system" is what the same system calls take alone.
 *
 *     checkpoint_scale FOLDER 70B|10TB slices|rows WORLD_SIZE RANKS_A_HOST
 *
 * slices: each rank owns the W-th part of each unit (a layer), as with zero=3. rows: of each
 * tensor, as with FSDP2. Prints one JSON object.
 */
#include <inttypes.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "checkpoint/commit.h"
#include "checkpoint/save_job.h"

enum { STATES = 3, MODEL_TENSORS_MAX = 80000, ELEMENT_BYTES = 4, STATE_BYTES = 20000 };
enum { WINDOW_BYTES = 1 << 20 }; /* of tallies that rank 0 reads at once */

typedef struct tensor {
    char name[64];
    int64_t shape[2];
    int ndim;
    size_t unit;
} tensor;

static tensor tensors[MODEL_TENSORS_MAX];
static size_t tensor_count, unit_count;

static void must(sw_status status, const sw_error *err, const char *what)
{
    if (status == SW_OK)
        return;
    fprintf(stderr, "%s: %s\n", what, err->message);
    exit(1);
}

/* In the processor's time, since other programs may run, but where a program waits for the file
 * system. */
static double seconds(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static size_t held(void)
{
    struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
}

/* ---- models ---- */

static void add(const char *prefix, long number, const char *name, int64_t rows, int64_t columns)
{
    tensor *t = &tensors[tensor_count++];
    if (number >= 0)
        snprintf(t->name, sizeof t->name, "%s.%ld.%s.weight", prefix, number, name);
    else
        snprintf(t->name, sizeof t->name, "%s%s.weight", prefix, name);
    t->shape[0] = rows;
    t->shape[1] = columns;
    t->ndim = columns ? 2 : 1;
    t->unit = unit_count;
}

static void add_attention(long layer, int64_t width, int64_t kv)
{
    add("model.layers", layer, "self_attn.q_proj", width, width);
    add("model.layers", layer, "self_attn.k_proj", kv, width);
    add("model.layers", layer, "self_attn.v_proj", kv, width);
    add("model.layers", layer, "self_attn.o_proj", width, width);
    add("model.layers", layer, "input_layernorm", width, 0);
    add("model.layers", layer, "post_attention_layernorm", width, 0);
}

static void make_dense(long layers, int64_t width, int64_t inner, int64_t kv, int64_t words)
{
    add("model.", -1, "embed_tokens", words, width);
    ++unit_count;
    for (long layer = 0; layer < layers; ++layer, ++unit_count) {
        add_attention(layer, width, kv);
        add("model.layers", layer, "mlp.gate_proj", inner, width);
        add("model.layers", layer, "mlp.up_proj", inner, width);
        add("model.layers", layer, "mlp.down_proj", width, inner);
    }
    add("model.", -1, "norm", width, 0);
    add("", -1, "lm_head", words, width);
    ++unit_count;
}

static void make_experts(long layers, long experts, int64_t width, int64_t inner, int64_t words)
{
    add("model.", -1, "embed_tokens", words, width);
    ++unit_count;
    for (long layer = 0; layer < layers; ++layer, ++unit_count) {
        char prefix[40];
        add_attention(layer, width, 1024);
        snprintf(prefix, sizeof prefix, "model.layers.%ld.experts", layer);
        for (long e = 0; e < experts; ++e) {
            add(prefix, e, "gate", inner, width);
            add(prefix, e, "up", inner, width);
            add(prefix, e, "down", width, inner);
        }
    }
    add("", -1, "lm_head", words, width);
    ++unit_count;
}

static uint64_t numel(const tensor *t)
{
    return (uint64_t)t->shape[0] * (uint64_t)(t->ndim == 2 ? t->shape[1] : 1);
}

/* ---- plan ---- */

static sw_plan *make_plan(sw_error *err)
{
    static const char *const keys[] = {"", "exp_avg.", "exp_avg_sq."};
    sw_plan_tensor *list = calloc(STATES * tensor_count, sizeof *list);
    char (*names)[80] = calloc(STATES * tensor_count, sizeof *names);
    sw_plan *plan = NULL;
    if (!list || !names)
        exit(1);
    for (size_t s = 0, n = 0; s < STATES; ++s)
        for (size_t i = 0; i < tensor_count; ++i, ++n) {
            snprintf(names[n], sizeof names[n], "%.11s%.63s", keys[s], tensors[i].name);
            list[n] = (sw_plan_tensor){names[n], "F32", tensors[i].shape, tensors[i].ndim,
                                       SW_HELD_IN_PARTS};
        }
    sw_plan_group groups[] = {
        {"model", false, UINT64_C(5000000000), "{\"format\":\"pt\"}", list, tensor_count},
        {"optimizer", true, UINT64_C(5000000000), "{\"format\":\"pt\"}", list + tensor_count,
         (STATES - 1) * tensor_count}};
    sw_plan_text texts[] = {{"state.json", STATE_BYTES, SW_HELD_BY_FIRST}};
    must(sw_plan_create(groups, 2, texts, 1, &plan, err), err, "plan");
    free(list);
    free(names);
    return plan;
}

/* ---- a rank's ranges ---- */

typedef struct holding {
    sw_save_source *list;
    size_t count, capacity;
} holding;

static void hold(holding *h, size_t source, uint64_t begin, uint64_t end)
{
    if (begin >= end)
        return;
    if (h->count == h->capacity) {
        h->capacity = h->capacity ? 2 * h->capacity : 64;
        h->list = realloc(h->list, h->capacity * sizeof *h->list);
        if (!h->list)
            exit(1);
    }
    h->list[h->count++] = (sw_save_source){.source = source,
                                           .begin = begin * ELEMENT_BYTES,
                                           .size_bytes = (end - begin) * ELEMENT_BYTES,
                                           .data = ""};
}

static uint64_t part(uint64_t count, uint64_t rank, uint64_t world)
{
    return count / world * rank + (rank < count % world ? rank : count % world);
}

static void hold_own(holding *h, bool by_rows, uint64_t rank, uint64_t world)
{
    h->count = 0;
    for (size_t s = 0; s < STATES; ++s)
        for (size_t i = 0, end = 0; i < tensor_count; i = end) {
            uint64_t all = 0, at = 0;
            for (end = i; end < tensor_count && tensors[end].unit == tensors[i].unit; ++end)
                all += numel(&tensors[end]);
            uint64_t low = part(all, rank, world), high = part(all, rank + 1, world);
            for (size_t t = i; t < end; ++t) {
                uint64_t n = numel(&tensors[t]), row = n / (uint64_t)tensors[t].shape[0];
                uint64_t rows = (uint64_t)tensors[t].shape[0];
                if (by_rows)
                    hold(h, s * tensor_count + t, part(rows, rank, world) * row,
                         part(rows, rank + 1, world) * row);
                else if (low < at + n && high > at)
                    hold(h, s * tensor_count + t, low > at ? low - at : 0,
                         high < at + n ? high - at : n);
                at += n;
            }
        }
    if (rank == 0)
        hold(h, STATES * tensor_count, 0, STATE_BYTES / ELEMENT_BYTES);
}

typedef struct totals {
    double list_worst_s, list_all_s, host_s, host_worst_s, group_s, group_worst_s, merge_s;
    size_t memory_worst, memory_first, list_first;
    uint64_t ranges_worst, ranges, tally_bytes;
} totals;

static void add_rank(const sw_plan *plan, bool by_rows, int rank, int world, holding *h,
                     sw_tally_list *host, totals *sum)
{
    static sw_saver saver;
    sw_error err = {0};
    sw_channel channel = {.rank = rank, .world_size = world};
    sw_tally_list list = {0};
    hold_own(h, by_rows, (uint64_t)rank, (uint64_t)world);
    sw_save_request request = {.shared = {plan, h->list, h->count}};
    memset(&saver, 0, sizeof saver);
    saver.channel = &channel;
    size_t before = held();
    double begin = seconds(CLOCK_PROCESS_CPUTIME_ID);
    must(sw_save_list_ranges(&saver, &request, &err), &err, "ranges");
    must(sw_save_list_tallies(&saver, &list, &err), &err, "tallies");
    double took = seconds(CLOCK_PROCESS_CPUTIME_ID) - begin;
    size_t memory = held() - before;
    begin = seconds(CLOCK_PROCESS_CPUTIME_ID);
    must(sw_tally_list_merge(host, list.data, list.size_bytes, &err), &err, "merge");
    sum->host_s += seconds(CLOCK_PROCESS_CPUTIME_ID) - begin;
    sum->list_all_s += took;
    sum->list_worst_s = took > sum->list_worst_s ? took : sum->list_worst_s;
    sum->memory_worst = memory > sum->memory_worst ? memory : sum->memory_worst;
    if (rank == 0) {
        sum->list_first = list.size_bytes;
        sum->memory_first = memory;
    }
    sum->ranges_worst = h->count > sum->ranges_worst ? h->count : sum->ranges_worst;
    sum->ranges += h->count;
    sw_tally_list_fini(&list);
    free(saver.chunks);
    free(saver.ranges);
    free(saver.sources);
}

/* Rank 0 reads a list. */
static void add_list(sw_tally_list *list, sw_manifest *manifest, totals *sum)
{
    sw_error err = {0};
    double begin = seconds(CLOCK_PROCESS_CPUTIME_ID);
    must(sw_tally_list_read(list->data, list->size_bytes, sw_manifest_add_tally, manifest, &err),
         &err, "merge");
    sum->merge_s += seconds(CLOCK_PROCESS_CPUTIME_ID) - begin;
    sum->tally_bytes += list->size_bytes;
    sw_tally_list_fini(list);
}

/* What a group's ranks do, then the carriers of its hosts, then the first of these, then rank 0
 * with what that sends. Of the first group rank 0 reads what carriers send. */
static void add_group(const sw_plan *plan, bool by_rows, int first, int world, int ranks_a_host,
                      holding *h, sw_manifest *manifest, totals *sum)
{
    sw_tally_list group = {0};
    sw_error err = {0};
    int end = first + ranks_a_host * SW_CHANNEL_GROUP;
    sum->group_s = 0;
    for (int host_first = first; host_first < end && host_first < world;
         host_first += ranks_a_host) {
        sw_tally_list host = {0};
        sum->host_s = 0;
        for (int rank = host_first; rank < host_first + ranks_a_host && rank < world; ++rank)
            add_rank(plan, by_rows, rank, world, h, &host, sum);
        sum->host_worst_s = sum->host_s > sum->host_worst_s ? sum->host_s : sum->host_worst_s;
        if (first == 0) {
            add_list(&host, manifest, sum);
            continue;
        }
        double begin = seconds(CLOCK_PROCESS_CPUTIME_ID);
        must(sw_tally_list_merge(&group, host.data, host.size_bytes, &err), &err, "merge");
        sum->group_s += seconds(CLOCK_PROCESS_CPUTIME_ID) - begin;
        sw_tally_list_fini(&host);
    }
    sum->group_worst_s = sum->group_s > sum->group_worst_s ? sum->group_s : sum->group_worst_s;
    add_list(&group, manifest, sum);
}

/* ---- files ---- */

static void create_sparse(const sw_plan *plan, const char *folder)
{
    sw_error err = {0};
    must(sw_folder_create(folder, &err), &err, "folder");
    for (size_t f = 0; f < plan->file_count; ++f) {
        char path[SW_PATH_BYTES];
        int fd = -1;
        must(sw_path_join(path, folder, plan->files[f].path, &err), &err, "path");
        must(sw_file_create(path, &fd, &err), &err, "file");
        sw_file_shorten(fd, plan->files[f].size_bytes);
        must(sw_file_close(&fd, path, &err), &err, "file");
    }
}

typedef struct span { /* of wall time, and of the processor's */
    double wall_s, cpu_s;
} span;

static span since(span begin)
{
    return (span){seconds(CLOCK_MONOTONIC) - begin.wall_s,
                  seconds(CLOCK_PROCESS_CPUTIME_ID) - begin.cpu_s};
}

/* The calls that a commit makes, and nothing else. */
static span time_file_system(const sw_plan *plan, const char *folder, const char *named,
                             size_t manifest_bytes)
{
    sw_error err = {0};
    char path[SW_PATH_BYTES];
    char *text = calloc(manifest_bytes + 1, 1);
    create_sparse(plan, folder);
    span begin = since((span){0});
    for (size_t f = 0; f < plan->file_count; ++f) {
        int fd = -1;
        must(sw_path_join(path, folder, plan->files[f].path, &err), &err, "path");
        must(sw_file_open_write(path, false, &fd, &err), &err, "file");
        must(sw_file_sync(fd, path, &err), &err, "file");
        must(sw_file_close(&fd, path, &err), &err, "file");
    }
    must(sw_path_join(path, folder, "MANIFEST.tmp", &err), &err, "path");
    must(sw_file_write_new(path, text, manifest_bytes, true, &err), &err, "manifest");
    must(sw_folder_sync(folder, &err), &err, "folder");
    must(sw_file_rename(folder, named, &err), &err, "rename");
    span took = since(begin);
    free(text);
    (void)!sw_folder_remove(named, NULL);
    return took;
}

int main(int argc, char **argv)
{
    char partial[SW_PATH_BYTES], folder[SW_PATH_BYTES];
    sw_error err = {0};
    sw_manifest manifest = {.step = 1, .nonce = "scale"};
    totals sum = {0};
    holding h = {0};
    if (argc != 6)
        return fprintf(stderr, "checkpoint_scale FOLDER 70B|10TB slices|rows WORLD_SIZE "
                               "RANKS_A_HOST\n"),
               2;
    bool by_rows = strcmp(argv[3], "rows") == 0;
    int world = atoi(argv[4]), ranks_a_host = atoi(argv[5]);
    snprintf(partial, sizeof partial, "%.2000s/scale.partial", argv[1]);
    snprintf(folder, sizeof folder, "%.2000s/scale", argv[1]);
    if (strcmp(argv[2], "70B") == 0)
        make_dense(80, 8192, 28672, 1024, 128256);
    else
        make_experts(60, 320, 7168, 2048, 129280);
    manifest.world_size = world;
    size_t before = held();
    double begin = seconds(CLOCK_PROCESS_CPUTIME_ID);
    sw_plan *plan = make_plan(&err);
    double plan_s = seconds(CLOCK_PROCESS_CPUTIME_ID) - begin;
    size_t whole_plan_bytes = held() - before;
    sw_plan *whole = make_plan(&err); /* the ranks below are many, and a trimmed plan is one's */
    before = held();
    sw_plan_trim(plan, 0, world, 0);
    size_t plan_bytes = whole_plan_bytes - (before - held());
    before = held();
    for (size_t f = 0; f < plan->file_count; ++f)
        must(sw_manifest_add_file(&manifest, plan->files[f].path, plan->files[f].size_bytes, &err),
             &err, "manifest");
    size_t manifest_held = held() - before;
    for (int rank = 0; rank < world; rank += ranks_a_host * SW_CHANNEL_GROUP)
        add_group(whole, by_rows, rank, world, ranks_a_host, &h, &manifest, &sum);
    size_t at_merge = manifest_held + sum.list_first + WINDOW_BYTES;
    size_t first_bytes = plan_bytes + (sum.memory_first > at_merge ? sum.memory_first : at_merge);
    span system = time_file_system(plan, partial, folder, plan->manifest_bytes);
    create_sparse(plan, partial);
    span commit = since((span){0});
    must(sw_manifest_complete(&manifest, &err), &err, "complete");
    must(sw_commit(partial, folder, NULL, &manifest, &err), &err, "commit");
    commit = since(commit);
    (void)!sw_folder_remove(folder, NULL);
    printf(
        "{\"model\": \"%s\", \"held\": \"%s\", \"world_size\": %d, \"ranks_a_host\": %d, "
        "\"tensors\": %zu, \"files\": "
        "%zu, \"blocks\": %" PRIu64 ", \"TB\": %.2f, \"first_plan_ms\": %.1f, \"plan_MiB\": %.1f, "
        "\"whole_plan_MiB\": %.1f, "
        "\"rank_plan_ms\": %.2f, \"rank_plan_mean_ms\": %.2f, \"rank_MiB\": %.1f, "
        "\"ranges_a_rank\": %" PRIu64 ", \"tally_MiB\": %.1f, \"host_merge_ms\": %.1f, "
                                      "\"group_merge_ms\": %.1f, \"merge_s\": %.3f, \"commit_s\": "
        "%.3f, \"file_system_s\": %.3f, \"commit_cpu_s\": %.3f, \"file_system_cpu_s\": %.3f, "
        "\"rank0_MiB\": %.1f}\n",
        argv[2], argv[3], world, ranks_a_host, plan->source_count, plan->file_count,
        plan->block_count, (double)plan->block_count / (1 << 20) * 1.099511627776, 1e3 * plan_s,
        (double)plan_bytes / (1 << 20), (double)whole_plan_bytes / (1 << 20),
        1e3 * sum.list_worst_s, 1e3 * sum.list_all_s / world, (double)sum.memory_worst / (1 << 20),
        sum.ranges_worst, (double)sum.tally_bytes / (1 << 20), 1e3 * sum.host_worst_s,
        1e3 * sum.group_worst_s, sum.merge_s, commit.wall_s, system.wall_s, commit.cpu_s,
        system.cpu_s, (double)first_bytes / (1 << 20));
    sw_manifest_fini(&manifest);
    sw_plan_destroy(plan);
    sw_plan_destroy(whole);
    free(h.list);
    return 0;
}
