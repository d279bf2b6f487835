/* test_device.c - both forms of a device, and the communicator: named errors for missing parts of a
 * host, and the same results from both forms. */
#include <stdatomic.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>

#include "device_host.h"
#include "gpu_ranks.h"

static const int64_t TIMEOUT_NS = 200000000;

static void expect(sw_status status, const sw_error *err, sw_status wanted, const char *words)
{
    check(status == wanted, "%s, not %s: %s", sw_status_name(status), sw_status_name(wanted),
          err->message);
    check(strstr(err->message, words) != NULL, "'%s' does not contain '%s'", err->message, words);
}

static void check_missing_pieces(void)
{
    sw_device *device = NULL;
    sw_nccl_library nccl;
    sw_error err = {0};
    gpu_sim->reset(1, SIM_EAGER, 1);
    expect(sw_device_cuda_create("/nowhere/libcuda.so.1", 0, &device, &err), &err, SW_E_UNSUPPORTED,
           "/nowhere/libcuda.so.1 cannot be used");
    expect(sw_device_cuda_create("libm.so.6", 0, &device, &err), &err, SW_E_UNSUPPORTED,
           "libm.so.6 has no function cuInit");
    gpu_sim->set_devices(0, 13000);
    expect(sw_device_cuda_create(gpu_cuda_library, 0, &device, &err), &err, SW_E_UNSUPPORTED,
           "shows no GPU (CUDA_VISIBLE_DEVICES is unset)");
    gpu_sim->set_devices(2, 13000);
    setenv("CUDA_VISIBLE_DEVICES", "", 1);
    expect(sw_device_cuda_create(gpu_cuda_library, 0, &device, &err), &err, SW_E_UNSUPPORTED,
           "shows no GPU (CUDA_VISIBLE_DEVICES is \"\")");
    unsetenv("CUDA_VISIBLE_DEVICES");
    gpu_sim->set_devices(2, 11020);
    expect(sw_device_cuda_create(gpu_cuda_library, 0, &device, &err), &err, SW_E_UNSUPPORTED,
           "offers CUDA 11.2: install a driver for CUDA 11.4 or newer");
    gpu_sim->set_devices(2, 13000);
    expect(sw_device_cuda_create(gpu_cuda_library, 2, &device, &err), &err, SW_E_INVALID,
           "ordinal must be in [0, 2), not 2");
    setenv("SIM_NCCL_VERSION", "21305", 1);
    expect(sw_nccl_library_init(&nccl, gpu_nccl_library, &err), &err, SW_E_UNSUPPORTED,
           "is NCCL 2.13.5: 2.14 or newer is needed");
    unsetenv("SIM_NCCL_VERSION");
    expect(sw_nccl_library_init(&nccl, gpu_cuda_library, &err), &err, SW_E_UNSUPPORTED,
           "has no function ncclGetVersion");
    gpu_sim->set_devices(SIM_DEVICE_MAX, 13000);
    check(device == NULL, "a device was made");
    gpu_expect_clean("missing pieces");
}

/* Copy and inspect on one form. */
static void check_form(sw_device *device, const sw_kernel_set *kernels)
{
    const sw_device_ops *ops = device->ops;
    sw_error err = {0};
    sw_stream *stream;
    sw_event *event;
    void *memory, *pinned;
    bool made = ops->stream_create(device, true, &stream, &err) == SW_OK &&
                ops->event_create(device, &event, &err) == SW_OK &&
                ops->memory_alloc(device, 64, &memory, &err) == SW_OK &&
                ops->pinned_alloc(device, 128, &pinned, &err) == SW_OK;
    if (!check(made, "%s: %s", device->name, err.message))
        return;
    float *host = pinned;
    for (int i = 0; i < 16; ++i)
        host[i] = (float)i;
    gpu_sim->host_access(host, 64, SW_ACCESS_WRITE, "the test");
    sw_cast_args cast = {.to = memory, .from = memory, .numel = 16, .scale = 3.0f};
    bool ran = ops->copy_async(device, memory, host, 64, stream, &err) == SW_OK &&
               sw_kernel_launch(kernels, SW_KERNEL_CAST, &cast, stream, &err) == SW_OK &&
               ops->copy_async(device, host + 16, memory, 64, stream, &err) == SW_OK &&
               ops->event_record(device, event, stream, &err) == SW_OK &&
               ops->event_wait(device, event, TIMEOUT_NS, "the copies", &err) == SW_OK;
    check(ran, "%s: %s", device->name, err.message);
    gpu_sim->host_access(host + 16, 64, SW_ACCESS_READ, "the test");
    for (int i = 0; i < 16; ++i)
        check(host[16 + i] == 3.0f * (float)i, "%s: element %d is %g", device->name, i,
              (double)host[16 + i]);
    sw_pointer at;
    bool cuda = device->kind == SW_DEVICE_CUDA;
    check(ops->pointer_inspect(device, (char *)memory + 8, &at, &err) == SW_OK &&
              at.kind == (cuda ? SW_MEMORY_DEVICE : SW_MEMORY_UNKNOWN),
          "%s: device memory", device->name);
    check(ops->pointer_inspect(device, pinned, &at, &err) == SW_OK &&
              at.kind == (cuda ? SW_MEMORY_PINNED : SW_MEMORY_UNKNOWN),
          "%s: pinned memory", device->name);
    check(ops->pointer_inspect(device, &at, &at, &err) == SW_OK && at.kind == SW_MEMORY_UNKNOWN,
          "%s: the stack", device->name);
    cast.to_dtype = (int)SW_DTYPE_INT8;
    expect(sw_kernel_launch(kernels, SW_KERNEL_CAST, &cast, stream, &err), &err, SW_E_INVALID,
           "cast: dtype must be float32, float16 or bfloat16, not int8");
    ops->memory_free(device, memory);
    ops->pinned_free(device, pinned);
    ops->event_destroy(device, event);
    ops->stream_destroy(device, stream);
}

/* Return true if the driver refused the image, the first of `places`. `then`: the origin of the one
 * that it takes; SW_IMAGE_NONE: there is none. */
static bool load_refused(sw_device *device, const sw_image_places *places, sw_image_origin then,
                         long nth)
{
    sw_kernel_set kernels;
    sw_error err = {0};
    gpu_sim->fail_call(0, nth, 209); /* CUDA_ERROR_NO_BINARY_FOR_GPU */
    sw_status status = sw_kernel_set_init(&kernels, device, places, &err);
    bool is_refused = strcmp(gpu_sim->failed_call(), "cuModuleLoadData") == 0;
    gpu_sim->fail_call(0, 0, 0);
    if (is_refused && then != SW_IMAGE_NONE) {
        check(status == SW_OK && kernels.origin == then, "%s", err.message);
    } else if (is_refused) {
        expect(status, &err, SW_E_DEVICE,
               places->packaged_folder ? "packaged image of the kernels: "
                                       : "cached image of the kernels: ");
        check(strstr(err.message, "(209)") && strstr(err.message, "without it: no image"), "%s",
              err.message);
    }
    if (status == SW_OK)
        sw_kernel_set_fini(&kernels);
    return is_refused;
}

/* The fake driver is a compiler, too. */
static void check_refused_image(sw_device *device)
{
    char cache[1024];
    snprintf(cache, sizeof cache, "%s/cache", gpu_folder);
    const struct {
        sw_image_places places;
        sw_image_origin then;
    } cases[] = {
        {{.packaged_folder = gpu_folder}, SW_IMAGE_NONE},
        {{.packaged_folder = gpu_folder, .cache_folder = gpu_folder}, SW_IMAGE_CACHED},
        {{.packaged_folder = gpu_folder, .nvrtc = gpu_cuda_library}, SW_IMAGE_COMPILED_UNCACHED},
        {{.packaged_folder = gpu_folder, .cache_folder = cache, .nvrtc = gpu_cuda_library},
         SW_IMAGE_COMPILED},
        {{.cache_folder = cache, .nvrtc = gpu_cuda_library}, SW_IMAGE_COMPILED},
        {{.cache_folder = cache}, SW_IMAGE_NONE},
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; ++k) {
        long nth = 1;
        while (nth < 9 && !load_refused(device, &cases[k].places, cases[k].then, nth))
            ++nth;
        check(nth < 9, "case %zu: cuModuleLoadData was not among the first calls", k);
    }
}

static void check_forms(void)
{
    sw_image_places places = {.packaged_folder = gpu_folder}, nowhere = {0};
    sw_device *device;
    sw_kernel_set kernels;
    sw_error err = {0};
    gpu_sim->reset(1, SIM_LATE, 1);
    if (check(sw_device_host_create(&device, &err) == SW_OK &&
                  sw_kernel_set_init(&kernels, device, &nowhere, &err) == SW_OK,
              "%s", err.message)) {
        check_form(device, &kernels);
        sw_kernel_set_fini(&kernels);
        sw_device_destroy(device);
    }
    if (!check(sw_device_cuda_create(gpu_cuda_library, 1, &device, &err) == SW_OK, "%s",
               err.message))
        return;
    check(device->major == 9 && strcmp(device->name, "Simulated GPU 1") == 0, "%s", device->name);
    expect(sw_kernel_set_init(&kernels, device, &nowhere, &err), &err, SW_E_UNSUPPORTED,
           "no image of the kernels for sm_90");
    if (check(sw_kernel_set_init(&kernels, device, &places, &err) == SW_OK, "%s", err.message)) {
        check(kernels.origin == SW_IMAGE_PACKAGED, "origin %d", (int)kernels.origin);
        check_form(device, &kernels);
        sw_kernel_set_fini(&kernels);
    }
    check_refused_image(device);
    sw_device_destroy(device);
    gpu_expect_clean("both forms");
}

/* A driver that cannot exempt calls from captures: the calls still succeed, and a call that fails
 * reports its own name. */
static void check_refused_exemptions(void)
{
    sw_image_places places = {.packaged_folder = gpu_folder};
    sw_device *device;
    sw_kernel_set kernels;
    sw_error err = {0};
    void *memory;
    gpu_sim->reset(1, SIM_RANDOM, 1);
    gpu_sim->refuse_exemptions(700);
    if (!check(sw_device_cuda_create(gpu_cuda_library, 1, &device, &err) == SW_OK, "%s",
               err.message))
        return;
    if (check(sw_kernel_set_init(&kernels, device, &places, &err) == SW_OK, "%s", err.message)) {
        check_form(device, &kernels);
        sw_kernel_set_fini(&kernels);
    }
    gpu_sim->fail_call(0, 1, 700);
    expect(device->ops->memory_alloc(device, 64, &memory, &err), &err, SW_E_DEVICE,
           "cuMemAlloc_v2 failed for 64 bytes on GPU 1");
    sw_device_destroy(device);
    gpu_expect_clean("refused exemptions");
}

typedef struct absence {
    bool creation;
    atomic_bool is_over;
} absence;

/* Stay until all peers have left: their leaving is seen before the deadline. */
static void stay_away(gpu_rank *self, absence *away)
{
    const sw_device_ops *ops = self->device->ops;
    sw_event *event = NULL;
    bool unused;
    check(ops->event_create(self->device, &event, &self->err) == SW_OK, "%s", self->err.message);
    while (!atomic_load(&away->is_over) &&
           ops->event_query(self->device, event, &unused, NULL) == SW_OK)
        ;
    ops->event_destroy(self->device, event);
}

/* Rank 1 never comes: creation, and then an operation, end at the deadline with a sentence. */
static bool come_alone(gpu_rank *self)
{
    absence *away = self->context;
    bool creation = away->creation;
    if (creation && self->rank == 1)
        return true;
    sw_status status = gpu_rank_open(self, TIMEOUT_NS);
    if (creation)
        expect(status, &self->err, SW_E_TIMEOUT,
               "creation of the communicator was not done within 0.2 s");
    if (!creation && check(status == SW_OK, "%s", self->err.message) && self->rank == 0) {
        const sw_device_ops *ops = self->device->ops;
        sw_stream *stream = NULL;
        sw_event *event = NULL;
        void *data = NULL;
        sw_error *err = &self->err;
        check(ops->stream_create(self->device, false, &stream, err) == SW_OK &&
                  ops->event_create(self->device, &event, err) == SW_OK &&
                  ops->memory_alloc(self->device, 64, &data, err) == SW_OK &&
                  ops->fill_async(self->device, data, 0, 64, stream, err) == SW_OK &&
                  sw_peers_all_reduce(self->comm, data, 16, SW_DTYPE_FLOAT32, SW_REDOP_SUM, stream,
                                      err) == SW_OK &&
                  ops->event_record(self->device, event, stream, err) == SW_OK,
              "%s", err->message);
        status = sw_peers_wait(self->comm, event, "all_reduce of bucket 0", err);
        check(status == SW_E_TIMEOUT || status == SW_E_DEVICE, "%s", err->message);
        status =
            sw_peers_all_reduce(self->comm, data, 16, SW_DTYPE_FLOAT32, SW_REDOP_SUM, stream, err);
        check(status != SW_OK, "a failed communicator went on");
        (void)!ops->event_wait(self->device, event, TIMEOUT_NS, "the end", NULL);
        ops->memory_free(self->device, data);
        ops->event_destroy(self->device, event);
        ops->stream_destroy(self->device, stream);
    }
    if (self->rank == 0)
        atomic_store(&away->is_over, true);
    else if (!creation && status == SW_OK)
        stay_away(self, away);
    gpu_rank_close(self);
    return true;
}

int main(int argc, char **argv)
{
    setenv("NCCL_RUNTIME_CONNECT", "0", 1); /* the peer's absence is the GPU's to see, not NCCL's */
    if (!gpu_ranks_init(argc, argv))
        return check_result();
    check_missing_pieces();
    check_forms();
    check_refused_exemptions();
    for (int creation = 0; creation < 2; ++creation) {
        static absence away;
        away.creation = creation;
        atomic_store(&away.is_over, false);
        gpu_ranks_run(3, SIM_RANDOM, 3, come_alone, &away);
        check(*gpu_sim->leaks() == '\0', "left allocated: %s", gpu_sim->leaks());
    }
    return check_result();
}
