/* test_checkpoint_image.c - ranks as threads keep a step in one image: the files that a save to
 * disk writes, whatever the world size and the number of threads, and a reader that loads from it
 * sees a byte that was flipped. An image that is too small, and a rank that lacks a byte, are
 * errors. */
#include <sys/mman.h>

#include "checkpoint_case.h"

enum { IMAGE_BLOCKS = 16, IMAGE_BYTES = IMAGE_BLOCKS * SW_BLOCK_BYTES };

static int failed;

static void check(bool right, const char *what, const char *detail)
{
    if (!right) {
        printf("FAILED: %s: %s\n", what, detail);
        failed++;
    }
}

typedef struct keeper {
    int rank, world_size, thread_count;
    size_t source_count; /* of the shared plan; fewer: the rank lacks the last ones */
    uint64_t image_bytes;
    uint8_t *image;
    sw_plan *shared, *own;
    sw_save_kept kept;
    sw_status status;
    sw_error err;
} keeper;

static void *keep(void *argument)
{
    keeper *self = argument;
    sw_channel channel;
    sw_saver *saver = NULL;
    case_data data = {0};
    sw_saver_options options = {.thread_count = self->thread_count};
    case_fill(&data, 7, self->rank, self->world_size);
    if (sw_channel_init(&channel, self->rank, self->world_size, NULL, NULL, NULL, &self->err) !=
            SW_OK ||
        sw_saver_create(&channel, &options, &saver, &self->err) != SW_OK)
        exit(90);
    sw_save_request request = {.nonce = "n",
                               .shared = {self->shared, data.sources, self->source_count},
                               .own = {self->own, &data.own, self->own ? 1 : 0},
                               .timeout_ns = CASE_DEADLINE_S * INT64_C(1000000000)};
    self->status =
        sw_saver_keep(saver, &request, self->image, self->image_bytes, -1, &self->kept, &self->err);
    sw_saver_destroy(saver);
    sw_channel_fini(&channel);
    case_free(&data);
    return NULL;
}

static sw_plan *own_plan(void)
{
    sw_plan *plan = NULL;
    sw_error err;
    sw_plan_text text = {"state.json", strlen("{\"step\":7}\n"), SW_HELD_BY_ALL};
    if (sw_plan_create(NULL, 0, &text, 1, &plan, &err) != SW_OK)
        exit(91);
    return plan;
}

static void keep_together(keeper *ranks, int world_size, int thread_count, uint8_t *image)
{
    pthread_t threads[CASE_WORLD_MAX];
    for (size_t i = 0; i < CASE_TENSORS; ++i)
        (void)case_bytes(7, i);
    for (int r = 0; r < world_size; ++r) {
        ranks[r] = (keeper){.rank = r,
                            .world_size = world_size,
                            .thread_count = thread_count,
                            .source_count = CASE_TENSORS + 1,
                            .image_bytes = IMAGE_BYTES,
                            .image = image,
                            .own = r ? NULL : own_plan()};
        if (case_plan(world_size, &ranks[r].shared, &ranks[r].err) != SW_OK ||
            pthread_create(&threads[r], NULL, keep, &ranks[r]) != 0)
            exit(92);
    }
    for (int r = 0; r < world_size; ++r) {
        pthread_join(threads[r], NULL);
        check(ranks[r].status == SW_OK, "a rank keeps its part", ranks[r].err.message);
    }
}

/* Build the manifest that all ranks' tallies give; its files lie in `fd`. */
static void merge(const keeper *ranks, int world_size, int fd, sw_manifest *manifest)
{
    sw_error err = {0};
    const sw_plan *plans[] = {ranks[0].shared, ranks[0].own};
    *manifest = (sw_manifest){.step = 7, .world_size = world_size, .nonce = "n"};
    for (size_t p = 0; p < 2; ++p)
        for (size_t f = 0; f < plans[p]->file_count; ++f) {
            check(sw_manifest_add_file(manifest, plans[p]->files[f].path,
                                       plans[p]->files[f].size_bytes, &err) == SW_OK,
                  "add a file", err.message);
            sw_manifest_file *added = &manifest->files[manifest->file_count - 1];
            added->is_in_memory = true;
            added->memory_fd = fd;
            added->memory_begin = added->first_block * SW_BLOCK_BYTES;
        }
    for (int r = 0; r < world_size; ++r)
        check(sw_tally_list_read(ranks[r].kept.tallies.data, ranks[r].kept.tallies.size_bytes,
                                 sw_manifest_add_tally, manifest, &err) == SW_OK,
              "tallies", err.message);
    check(sw_manifest_complete(manifest, &err) == SW_OK, "ranks tile all blocks", err.message);
}

static void check_bytes(const sw_manifest *manifest, const sw_plan *plan)
{
    sw_error err = {0};
    for (size_t p = 0; p < plan->piece_count; ++p) {
        const sw_plan_piece *piece = &plan->pieces[p];
        if (piece->source >= CASE_TENSORS)
            continue;
        uint8_t *bytes = malloc(piece->size_bytes + 1);
        sw_read_range range = {piece->begin, piece->size_bytes, bytes};
        check(sw_checkpoint_read("memory", manifest, "model.safetensors", &range, 1, &err) ==
                      SW_OK &&
                  memcmp(bytes, case_bytes(7, piece->source), piece->size_bytes) == 0,
              "the bytes that were given", err.message);
        free(bytes);
    }
}

/* No run of a rank overlaps another's, and their bytes are those of all files. */
static void check_runs(const keeper *ranks, int world_size, const sw_manifest *manifest)
{
    static uint8_t owner[IMAGE_BYTES];
    uint64_t whole = 0, found = 0;
    memset(owner, 0, sizeof owner);
    for (size_t f = 0; f < manifest->file_count; ++f)
        whole += manifest->files[f].size_bytes;
    for (int r = 0; r < world_size; ++r)
        for (size_t i = 0; i < ranks[r].kept.run_count; ++i) {
            sw_save_run run = ranks[r].kept.runs[i];
            found += run.size_bytes;
            for (uint64_t b = run.begin; b < run.begin + run.size_bytes; ++b)
                check(owner[b]++ == 0, "one rank writes a byte", "");
        }
    check(found == whole, "runs are all bytes of the files", "");
}

static void an_image_has_the_files_of_a_save(int world_size, int thread_count)
{
    static keeper ranks[CASE_WORLD_MAX];
    sw_manifest manifest;
    sw_error err = {0};
    int fd = memfd_create("image", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, IMAGE_BYTES) != 0)
        exit(93);
    uint8_t *image = mmap(NULL, IMAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    keep_together(ranks, world_size, thread_count, image);
    merge(ranks, world_size, fd, &manifest);
    check(case_verify("memory", &manifest, NULL, &err) == SW_OK, "every block passes", err.message);
    check_bytes(&manifest, ranks[0].shared);
    check_runs(ranks, world_size, &manifest);
    image[ranks[world_size - 1].kept.runs[0].begin] ^= 1;
    check(case_verify("memory", &manifest, NULL, &err) == SW_E_INVALID &&
              strstr(err.message, "'memory/") != NULL,
          "a flipped byte is named", err.message);
    sw_manifest_fini(&manifest);
    for (int r = 0; r < world_size; ++r) {
        sw_save_kept_fini(&ranks[r].kept);
        sw_plan_destroy(ranks[r].shared);
        sw_plan_destroy(ranks[r].own);
    }
    munmap(image, IMAGE_BYTES);
    close(fd);
}

static void what_cannot_be_kept_is_an_error(void)
{
    uint8_t *image = malloc(IMAGE_BYTES);
    keeper small = {.world_size = 1,
                    .thread_count = 2,
                    .source_count = CASE_TENSORS + 1,
                    .image_bytes = 2 * SW_BLOCK_BYTES,
                    .image = image};
    keeper poor = small;
    poor.source_count = 1;
    poor.image_bytes = IMAGE_BYTES;
    for (int i = 0; i < 2; ++i) {
        keeper *rank = i ? &poor : &small;
        if (case_plan(1, &rank->shared, &rank->err) != SW_OK)
            exit(94);
        keep(rank);
        sw_plan_destroy(rank->shared);
    }
    check(small.status == SW_E_INVALID && strstr(small.err.message, "does not hold"),
          "an image that is too small", small.err.message);
    check(poor.status == SW_E_STATE && strstr(poor.err.message, "does not hold byte 0 of tensor"),
          "a byte that is not held", poor.err.message);
    free(image);
}

int main(void)
{
    for (int world_size = 1; world_size <= CASE_WORLD_MAX; world_size += 2)
        for (int thread_count = 1; thread_count <= 3; thread_count += 2)
            an_image_has_the_files_of_a_save(world_size, thread_count);
    what_cannot_be_kept_is_an_error();
    return failed ? 1 : 0;
}
