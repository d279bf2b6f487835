/* gpu_ranks.c - ranks as threads on the fake libraries, which this program opens by path, as the
 * engine does. */
#include "gpu_ranks.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/crc32c.h"

const sim_controls *gpu_sim;
gpu_slots gpu_ranks_slots;
const char *gpu_cuda_library, *gpu_nccl_library, *gpu_folder;

static bool write_image(void)
{
    static const char body[] = "an image that only the simulation takes";
    unsigned char header[16] = "SWIMAGE1";
    uint32_t checksum = sw_crc32c(0, body, sizeof body);
    char path[4096];
    memcpy(header + 8, &checksum, sizeof checksum);
    snprintf(path, sizeof path, "%s/shardwright-%016llx-sm_90.image", gpu_folder,
             (unsigned long long)sw_image_hash());
    FILE *file = fopen(path, "wb");
    bool written = file && fwrite(header, sizeof header, 1, file) == 1 &&
                   fwrite(body, sizeof body, 1, file) == 1;
    return file && fclose(file) == 0 && written;
}

bool gpu_ranks_init(int argc, char **argv)
{
    if (argc != 4)
        return check(false, "usage: %s LIBCUDA LIBNCCL FOLDER", argv[0]);
    gpu_cuda_library = argv[1];
    gpu_nccl_library = argv[2];
    gpu_folder = argv[3];
    void *handle = dlopen(gpu_cuda_library, RTLD_NOW);
    if (!check(handle != NULL, "%s", handle ? "" : dlerror()))
        return false;
    if (!dlopen(gpu_nccl_library, RTLD_NOW)) /* never closed: reports point into it */
        return check(false, "%s", dlerror());
    const sim_controls *(*get)(void);
    void *symbol = dlsym(handle, "sim_get_controls");
    memcpy(&get, &symbol, sizeof get);
    gpu_sim = get();
    gpu_sim->use_kernels(sw_kernel_references(), SW_KERNEL_COUNT);
    return check(write_image(), "no image in %s", gpu_folder);
}

typedef struct thread_of {
    gpu_rank rank;
    bool (*body)(gpu_rank *self);
    bool ok;
} thread_of;

static void *run_thread(void *argument)
{
    thread_of *thread = argument;
    gpu_sim->rank_begin(thread->rank.rank);
    thread->ok = thread->body(&thread->rank);
    gpu_sim->rank_end();
    return NULL;
}

/* Allocate the parts of all ranks one by one, so that sanitizers see an access beyond a part. */
static void make_parts(int world_size, uint8_t *part[GPU_RANKS_MAX])
{
    size_t bytes = sw_slot_part_bytes(gpu_ranks_slots.slot_bytes);
    for (int r = 0; r < world_size; ++r) {
        part[r] = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
        if (check(part[r] != NULL, "no memory for a part"))
            memset(part[r], 0, bytes);
    }
}

bool gpu_ranks_run(int world_size, sim_policy policy, uint64_t seed, bool (*body)(gpu_rank *self),
                   void *context)
{
    static int runs;
    thread_of thread[GPU_RANKS_MAX];
    pthread_t handle[GPU_RANKS_MAX];
    sw_nccl_id id = {{0}};
    bool ok = true;
    uint8_t *part[GPU_RANKS_MAX] = {NULL};
    if (gpu_ranks_slots.slot_bytes)
        make_parts(world_size, part);
    snprintf(id.internal, sizeof id.internal, "run %d", ++runs);
    gpu_sim->reset(world_size, policy, seed);
    for (int r = 0; r < world_size; ++r) {
        thread[r] = (thread_of){.rank = {.rank = r,
                                         .world_size = world_size,
                                         .sim = gpu_sim,
                                         .id = id,
                                         .part = part[0] ? part : NULL,
                                         .context = context},
                                .body = body};
        check(pthread_create(&handle[r], NULL, run_thread, &thread[r]) == 0, "pthread_create");
    }
    for (int r = 0; r < world_size; ++r) {
        pthread_join(handle[r], NULL);
        ok = ok && thread[r].ok;
    }
    for (int r = 0; r < world_size; ++r)
        free(part[r]);
    return ok;
}

sw_status gpu_rank_create(gpu_rank *self)
{
    sw_device_comm_config config = {.cuda_library = gpu_cuda_library,
                                    .nccl_library = gpu_nccl_library,
                                    .ordinal = self->rank,
                                    .places = {.packaged_folder = gpu_folder}};
    SW_TRY(sw_device_comm_create(&config, &self->all, &self->err));
    self->device = self->all->device;
    self->kernels = self->all->kernels;
    return SW_OK;
}

sw_status gpu_rank_open(gpu_rank *self, int64_t timeout_ns)
{
    SW_TRY(gpu_rank_create(self));
    sw_slot_parts parts = {
        .base = self->part, .slot_bytes = gpu_ranks_slots.slot_bytes, .place = gpu_ranks_slots.place};
    if (self->part)
        SW_TRY(sw_device_comm_connect_slots(self->all, &parts, self->rank, self->world_size,
                                            timeout_ns, &self->err));
    else
        SW_TRY(sw_device_comm_connect(self->all, &self->id, self->rank, self->world_size,
                                      timeout_ns, &self->err));
    self->comm = self->all->peers;
    return SW_OK;
}

void gpu_rank_close(gpu_rank *self)
{
    sw_device_comm_destroy(self->all);
    self->all = NULL;
    self->comm = NULL;
    self->device = NULL;
}

void gpu_check_failing_calls(bool (*attempt)(long nth, void *context), void *context,
                             const char *message)
{
    long failed = 0;
    for (long nth = 1; nth < 4000; ++nth) {
        bool ok = attempt(nth, context);
        const char *name = gpu_sim->failed_call();
        if (!*name) { /* the run has fewer calls */
            check(ok, "a run without a failing call: %s", message);
            break;
        }
        failed++;
        check(!ok, "call %ld, %s, failed unseen", nth, name);
        check(strlen(message) > 10, "call %ld, %s: no sentence", nth, name);
        check(*gpu_sim->leaks() == '\0', "call %ld, %s (%s) left %s", nth, name, message,
              gpu_sim->leaks());
    }
    check(failed > 100, "only %ld calls failed", failed);
}

void gpu_check_failing_rank(bool (*attempt)(long nth, void *context), void *context,
                            char (*messages)[SW_ERROR_MESSAGE_BYTES], const bool *failed,
                            long stride)
{
    long runs = 0;
    for (long nth = 1; nth < 4000; nth += stride, ++runs) {
        bool ok = attempt(nth, context);
        const char *name = gpu_sim->failed_call();
        if (!*name) { /* the run has fewer calls */
            check(ok, "three ranks, no failing call: %s", messages[0]);
            break;
        }
        check(failed[0], "call %ld, %s, failed unseen", nth, name);
        for (int r = 0; r < 3; ++r)
            check(!failed[r] || strlen(messages[r]) > 10, "call %ld, %s: no sentence on rank %d",
                  nth, name, r);
        check(*gpu_sim->leaks() == '\0', "call %ld, %s (%s) left %s", nth, name, messages[0],
              gpu_sim->leaks());
    }
    check(runs > 5, "only %ld calls failed", runs);
}

void gpu_expect_clean(const char *subject)
{
    const char *text;
    int count = gpu_sim->reports(&text, false);
    static int told;
    if (count > 0 && told++ < 2) /* with call sites, by addr2line, which is slow */
        gpu_sim->reports(&text, true);
    check(count == 0, "%s: %d reports: %s", subject, count, text);
    check(*gpu_sim->leaks() == '\0', "%s: left allocated: %s", subject, gpu_sim->leaks());
}

void gpu_expect_report(const char *kind, bool both_sites)
{
    const char *text;
    int count = gpu_sim->reports(&text, false);
    check(count > 0 && strstr(text, kind), "a report of %s was expected, there are %d: %s", kind,
          count, text);
    if (!both_sites)
        return;
    gpu_sim->reports(&text, true);
    const char *first = strstr(text, ", from "),
               *second = first ? strstr(first + 1, ", from ") : NULL;
    check(second != NULL, "a report of %s without both call sites: %s", kind, text);
}
