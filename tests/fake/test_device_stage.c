/* test_device_stage.c - batches of a simulated GPU's memory are copied to the host.
 *
 * Laws: over 2 works each batch is consumed once, in order, with the values that the caller's
 * stream had written before the work, for any schedule, though that stream overwrites them as soon
 * as the work returns. A work waits on the host once for each batch that has copies. No schedule
 * gives a race or a leak, also if the caller frees its memory at once after a work that failed.
 * Each driver call that fails ends in a named error and leaves nothing, and the next work runs.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint/device_stage.h"
#include "gpu_ranks.h"

enum { BATCHES = 13, COPIES = 5, EMPTY = 4, WORKS = 2, SEEDS = 3, FAILURE = 999 };
enum { SLOT = 1024, PIECE = 150, ARENA = BATCHES * COPIES * 256 };
static const int64_t TIMEOUT_NS = 2000000000;

typedef struct staging {
    long fail_nth;
    int wrong, seen;
    char message[SW_ERROR_MESSAGE_BYTES];
} staging;

typedef struct loop {
    gpu_rank *self;
    staging *run;
    sw_device *device;
    sw_device_stage *stage;
    sw_stream *user;
    sw_event *written;
    unsigned char *memory, *given; /* device memory; pinned memory */
    sw_device_stage_copy copies[BATCHES * COPIES];
    sw_device_stage_batch batches[BATCHES];
    int work;
} loop;

static unsigned char value_of(int work, size_t at)
{
    return (unsigned char)(at * 31 + at / 251 + (size_t)work * 77 + 1);
}

static sw_status prepare(loop *l)
{
    sw_error *err = &l->self->err;
    void *memory;
    SW_TRY(sw_device_cuda_create(gpu_cuda_library, 0, &l->device, err));
    SW_TRY(l->device->ops->stream_create(l->device, false, &l->user, err));
    SW_TRY(l->device->ops->event_create(l->device, &l->written, err));
    SW_TRY(l->device->ops->memory_alloc(l->device, ARENA, &memory, err));
    l->memory = memory;
    SW_TRY(l->device->ops->pinned_alloc(l->device, 2 * ARENA, &memory, err));
    l->given = memory;
    for (size_t b = 0; b < BATCHES; ++b) {
        size_t count = b == EMPTY ? 0 : 1 + b % COPIES;
        l->batches[b] = (sw_device_stage_batch){b * COPIES, count};
        for (size_t c = 0; c < count; ++c)
            l->copies[b * COPIES + c] = (sw_device_stage_copy){
                l->memory + (b * COPIES + c) * 256 + c, c * 200 + b, PIECE - c};
    }
    return sw_device_stage_create(gpu_cuda_library, 0, SLOT, &l->stage, err);
}

static void consume(void *context, size_t number, const uint8_t *memory)
{
    loop *l = context;
    const sw_device_stage_batch *batch = &l->batches[number];
    check(l->run->seen++ == l->work * BATCHES + (int)number, "batch %zu is not the next one",
          number);
    check(!memory == !batch->count, "batch %zu of %zu copies", number, batch->count);
    for (size_t c = batch->first; c < batch->first + batch->count; ++c) {
        const sw_device_stage_copy *copy = &l->copies[c];
        size_t begin = (size_t)((const unsigned char *)copy->data - l->memory);
        gpu_sim->host_access(memory + copy->at, copy->size_bytes, SW_ACCESS_READ, "the consumer");
        for (size_t i = 0; i < copy->size_bytes; ++i)
            l->run->wrong += memory[copy->at + i] != value_of(l->work, begin + i);
    }
}

/* Write new values without a wait, as training does. */
static sw_status write_values(loop *l)
{
    unsigned char *from = l->given + l->work * ARENA;
    for (size_t i = 0; i < ARENA; ++i)
        from[i] = value_of(l->work, i);
    gpu_sim->host_access(from, ARENA, SW_ACCESS_WRITE, "the test's values");
    SW_TRY(l->device->ops->copy_async(l->device, l->memory, from, ARENA, l->user, &l->self->err));
    return l->device->ops->event_record(l->device, l->written, l->user, &l->self->err);
}

static sw_status bring_down(loop *l)
{
    sw_device_stage_work work = {l->copies, l->batches, BATCHES, consume, l};
    uint64_t waits = sw_device_stage_get_stats(l->stage).host_waits;
    SW_TRY(write_values(l));
    SW_TRY(sw_device_stage_run(l->stage, &work, l->user, TIMEOUT_NS, &l->self->err));
    waits = sw_device_stage_get_stats(l->stage).host_waits - waits;
    check(waits == BATCHES - 1, "%d waits of the host", (int)waits);
    check(sw_device_stage_pinned_bytes(l->stage) == SW_DEVICE_STAGE_SLOTS * SLOT,
          "the pinned bytes are wrong");
    return SW_OK;
}

static sw_status stage_all(loop *l)
{
    sw_error refused;
    check(sw_device_stage_create(gpu_cuda_library, 0, 0, &l->stage, &refused) == SW_E_INVALID &&
              strstr(refused.message, "slot_bytes must be above 0"),
          "no slots: %s", refused.message);
    SW_TRY(prepare(l));
    check(sw_device_stage_pinned_bytes(l->stage) == 0, "memory is allocated before the first work");
    for (l->work = 0; l->work < WORKS; ++l->work)
        SW_TRY(bring_down(l));
    return SW_OK;
}

/* Wait for the caller's own stream alone: the stage no longer uses its memory. */
static void tear_down(loop *l, bool failed)
{
    const sw_device_ops *ops = l->device ? l->device->ops : NULL;
    if (!ops)
        return;
    if (failed && l->written && ops->event_record(l->device, l->written, l->user, NULL) == SW_OK)
        (void)ops->event_wait(l->device, l->written, TIMEOUT_NS, "the test's values", NULL);
    ops->memory_free(l->device, l->memory);
    if (failed && l->given && l->stage) { /* a failed work may be tried again */
        void *again;
        l->memory = NULL;
        l->work = 0;
        l->run->seen = 0;
        if (check(ops->memory_alloc(l->device, ARENA, &again, NULL) == SW_OK,
                  "memory cannot be allocated again")) {
            for (size_t c = 0; c < BATCHES * COPIES; ++c)
                if (l->copies[c].data)
                    l->copies[c].data = (unsigned char *)again + c / COPIES * COPIES * 256 +
                                        c % COPIES * 256 + c % COPIES;
            l->memory = again;
            sw_error err = l->self->err;
            check(bring_down(l) == SW_OK, "a work after one that failed: %s", l->self->err.message);
            l->self->err = err;
        }
        ops->memory_free(l->device, l->memory);
    }
    sw_device_stage_destroy(l->stage);
    ops->pinned_free(l->device, l->given);
    ops->event_destroy(l->device, l->written);
    ops->stream_destroy(l->device, l->user);
    sw_device_destroy(l->device);
}

static bool stage_on(gpu_rank *self)
{
    staging *run = self->context;
    loop l = {.self = self, .run = run};
    self->sim->fail_call(0, run->fail_nth, FAILURE);
    sw_status status = stage_all(&l);
    self->sim->fail_call(0, 0, 0);
    snprintf(run->message, sizeof run->message, "%s", self->err.message);
    tear_down(&l, status != SW_OK);
    return status == SW_OK;
}

static bool fail_at(long nth, void *context)
{
    staging *run = context;
    *run = (staging){.fail_nth = nth};
    bool done = gpu_ranks_run(1, SIM_EAGER, 1, stage_on, run);
    const char *text;
    check(gpu_sim->reports(&text, false) == 0, "call %ld, %s: %s", nth, gpu_sim->failed_call(),
          text);
    return done;
}

int main(int argc, char **argv)
{
    static staging run;
    if (!gpu_ranks_init(argc, argv))
        return check_result();
    for (int policy = 0; policy < SIM_POLICY_COUNT; ++policy)
        for (uint64_t seed = 1; seed <= SEEDS; ++seed) {
            char label[64];
            snprintf(label, sizeof label, "policy %d, seed %d", policy, (int)seed);
            run = (staging){0};
            bool done = gpu_ranks_run(1, (sim_policy)policy, seed, stage_on, &run);
            check(done && run.seen == WORKS * BATCHES, "%s: %s", label, run.message);
            check(run.wrong == 0, "%s: %d wrong bytes", label, run.wrong);
            gpu_expect_clean(label);
        }
    gpu_check_failing_calls(fail_at, &run, run.message);
    return check_result();
}
