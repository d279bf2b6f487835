/* kernel_check.c - see kernel_check.h. */
#include "kernel_check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernel_cases.h"
#include "kernel_references.h"

enum { GRIDS = 3, WARP = 32 };

typedef struct checking {
    const sw_kernel_set *set; /* borrowed */
    const sw_kernel_check_config *config;
    sw_stream *stream;
    sw_event *event;
    unsigned char *made, *expected, *got; /* arenas; owned */
    void *device_arena;                   /* owned */
    size_t room_bytes;                    /* size of device_arena */
    sw_kernel_case here;                  /* its arguments point into `made` */
    sw_kernel_check_result *result;
} checking;

/* A range of the arena, copied to the device or back. */
typedef struct transfer {
    checking *c;
    sw_access wanted;
    bool is_down;
    sw_status status;
    sw_error *err;
} transfer;

static sw_status wait(checking *c, sw_error *err)
{
    const sw_device_ops *ops = c->set->device->ops;
    SW_TRY(ops->event_record(c->set->device, c->event, c->stream, err));
    return ops->event_wait(c->set->device, c->event, c->config->timeout_ns, "a kernel's case", err);
}

static sw_status copy(checking *c, size_t at, size_t bytes, bool is_down, sw_error *err)
{
    const sw_device_ops *ops = c->set->device->ops;
    unsigned char *there = (unsigned char *)c->device_arena + at;
    if (is_down)
        return ops->copy_async(c->set->device, c->got + at, there, bytes, c->stream, err);
    return ops->copy_async(c->set->device, there, c->made + at, bytes, c->stream, err);
}

static void copy_range(void *context, const void *begin, size_t size_bytes, sw_access access)
{
    transfer *t = context;
    if (t->status == SW_OK && access & t->wanted && size_bytes > 0)
        t->status = copy(t->c, (size_t)((const unsigned char *)begin - t->c->made), size_bytes,
                         t->is_down, t->err);
}

/* All of the arena; if strict, the ranges that the contract declares. */
static sw_status move(checking *c, bool is_down, sw_error *err)
{
    transfer t = {.c = c,
                  .wanted = is_down ? SW_ACCESS_WRITE : SW_ACCESS_BOTH,
                  .is_down = is_down,
                  .err = err};
    if (!c->config->strict)
        return copy(c, 0, c->here.arena_bytes, is_down, err);
    sw_kernel_references()[c->config->kernel].accesses(c->here.args.bytes, copy_range, &t);
    return t.status;
}

static sw_grid grid_of(const checking *c, int number)
{
    const sw_kernel_contract *contract = &sw_kernel_contracts()[c->config->kernel];
    sw_grid grid =
        contract->grid(c->here.args.bytes, number == 0 ? c->set->device->processor_count : 1);
    if (number == 2 && c->config->kernel != SW_KERNEL_CLIP)
        grid = (sw_grid){.block_count = 1, .thread_count = WARP};
    return grid;
}

static void report_difference(checking *c, size_t index, sw_grid grid)
{
    sw_kernel_check_result *result = c->result;
    size_t at = 0;
    while (c->got[at] == c->expected[at])
        ++at;
    if (result->differences++ < SW_KERNEL_CHECK_SENTENCES)
        snprintf(result->sentence[result->differences - 1], SW_ERROR_MESSAGE_BYTES,
                 "%s, case %zu (%s), grid %u x %u: byte %zu of the arena is %02x, not %02x",
                 sw_kernel_contracts()[c->config->kernel].name, index, c->here.label,
                 grid.block_count, grid.thread_count, at, c->got[at], c->expected[at]);
}

static sw_status run_grid(checking *c, size_t index, int number, sw_error *err)
{
    sw_device *device = c->set->device;
    sw_kernel kernel = c->config->kernel;
    sw_kernel_case there = c->here, back = c->here;
    sw_grid grid = grid_of(c, number);
    size_t bytes = c->here.arena_bytes;
    if (c->config->strict || c->room_bytes < bytes) {
        device->ops->memory_free(device, c->device_arena);
        c->device_arena = NULL;
        c->room_bytes = bytes;
        SW_TRY(device->ops->memory_alloc(device, bytes, &c->device_arena, err));
    }
    sw_kernel_case_move(kernel, &there, c->made, (uintptr_t)c->device_arena);
    sw_kernel_case_move(kernel, &back, c->made, (uintptr_t)c->got);
    SW_TRY(move(c, false, err));
    memcpy(c->got, c->made, bytes);
    SW_TRY(device->ops->launch_async(device, c->set->function[kernel], grid, there.args.bytes,
                                     c->stream, err));
    SW_TRY(move(c, true, err));
    SW_TRY(wait(c, err));
    c->result->launches++;
    sw_kernel_case_settle(kernel, back.args.bytes);
    if (memcmp(c->got, c->expected, bytes) != 0)
        report_difference(c, index, grid);
    return SW_OK;
}

static sw_status run_case(checking *c, size_t index, sw_error *err)
{
    sw_kernel kernel = c->config->kernel;
    sw_kernel_case_make(kernel, index, c->made, &c->here);
    SW_TRY(sw_kernel_contracts()[kernel].check(c->here.args.bytes, err));
    sw_kernel_case expected = c->here;
    sw_kernel_case_move(kernel, &expected, c->made, (uintptr_t)c->expected);
    memcpy(c->expected, c->made, c->here.arena_bytes);
    sw_kernel_references()[kernel].reference(expected.args.bytes);
    sw_kernel_case_settle(kernel, expected.args.bytes);
    c->result->cases++;
    for (int number = 0; number < GRIDS; ++number)
        SW_TRY(run_grid(c, index, number, err));
    return SW_OK;
}

static sw_status open_checking(checking *c, sw_error *err)
{
    sw_device *device = c->set->device;
    c->made = aligned_alloc(SW_CASE_ALIGNMENT, SW_CASE_BYTES_MAX);
    c->expected = aligned_alloc(SW_CASE_ALIGNMENT, SW_CASE_BYTES_MAX);
    c->got = aligned_alloc(SW_CASE_ALIGNMENT, SW_CASE_BYTES_MAX);
    if (!c->made || !c->expected || !c->got)
        SW_FAIL(err, SW_E_MEMORY, "check of a kernel: no memory for three arenas of %d bytes",
                SW_CASE_BYTES_MAX);
    return device->ops->event_create(device, &c->event, err);
}

/* After an error copies may still run. */
static void close_checking(checking *c)
{
    sw_device *device = c->set->device;
    if (c->event)
        (void)!wait(c, NULL);
    device->ops->memory_free(device, c->device_arena);
    device->ops->event_destroy(device, c->event);
    free(c->made);
    free(c->expected);
    free(c->got);
}

sw_status sw_kernel_check(const sw_kernel_set *set, const sw_kernel_check_config *config,
                          sw_stream *stream, sw_kernel_check_result *result, sw_error *err)
{
    checking c = {.set = set, .config = config, .stream = stream, .result = result};
    size_t step = config->step ? config->step : 1;
    *result = (sw_kernel_check_result){0};
    sw_status status = open_checking(&c, err);
    for (size_t i = config->first; status == SW_OK && i < sw_kernel_case_count(config->kernel);
         i += step)
        status = run_case(&c, i, err);
    close_checking(&c);
    return status;
}
