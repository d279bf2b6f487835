/* test_offload.c - a step through a file has the bits of a step in memory, for every cut, dtype and
 * layout of arrays. A failure leaves nothing behind; if state has changed, every later step fails.
 */
#include "optim_oracle.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "faults.h"
#include "optim/offload.h"
#include "optim/optim.h"

enum { M, V, V_MAX, P, G, ARRAY_COUNT, RUN_COUNT = 9, BUFFER = SW_OFFLOAD_LEAST_BUFFER_BYTES };

static const size_t sizes[RUN_COUNT] = {1, 0, 4096, 4097, 33, 20001, 65536, 7, 12345};

static sw_adam_options adam(bool amsgrad)
{
    return (sw_adam_options){.lr = 1e-2,
                             .beta1 = 0.9,
                             .beta2 = 0.99,
                             .eps = 1e-8,
                             .weight_decay = 0.1,
                             .grad_scale = 0.5,
                             .amsgrad = amsgrad};
}

static sw_status step(const void *options, const sw_optim_run *runs, size_t count, sw_error *err)
{
    return sw_adam_step(options, runs, count, err);
}

static size_t pages(size_t bytes)
{
    return (bytes + SW_FILE_ALIGNMENT_BYTES - 1) / SW_FILE_ALIGNMENT_BYTES *
           SW_FILE_ALIGNMENT_BYTES;
}

/* The same runs in memory, and with m, v, v_max (and p, if it is a master) in the file. */
typedef struct pair {
    sw_optim_run plain[RUN_COUNT], filed[RUN_COUNT];
    sw_offload offload;
    sw_dtype state;
    bool master;
} pair;

static void *new_array(sw_dtype dtype, size_t numel, const void *like)
{
    size_t bytes = numel * sw_dtype_size_bytes(dtype) + 1;
    uint8_t *made = malloc(bytes);
    for (size_t i = 0; i < numel; ++i) {
        float value = (float)(random_bits() % 2000) / 1000.0f;
        if (dtype == SW_DTYPE_FLOAT32)
            memcpy(made + 4 * i, &value, 4);
        else
            ((uint16_t *)(void *)made)[i] = oracle_narrow(dtype, value);
    }
    if (like)
        memcpy(made, like, bytes - 1);
    return made;
}

static void *in_file(pair *p, uint8_t **at, sw_dtype dtype, const void *from, size_t numel)
{
    uint8_t *data = *at;
    memcpy(data, from, numel * sw_dtype_size_bytes(dtype)); /* through the mapping */
    *at += pages(numel * sw_dtype_size_bytes(dtype));
    return p->offload.file.fd >= 0 ? data : NULL;
}

static void pair_init(pair *p, const char *folder, sw_dtype state, bool master)
{
    sw_error err;
    uint8_t *at = NULL, *second = NULL;
    size_t total = 0;
    *p = (pair){.state = state, .master = master};
    for (size_t i = 0; i < RUN_COUNT; ++i)
        total += 4 * pages(sizes[i] * 4);
    expect(sw_offload_init(&p->offload, folder, "test", BUFFER, &err) == SW_OK, "made");
    expect(sw_state_file_grow(&p->offload.file, total / 2, &at, &err) == SW_OK, "grown");
    expect(sw_state_file_grow(&p->offload.file, total, &second, &err) == SW_OK,
           "the file grows again");
    for (size_t i = 0; i < total / 2; i += 4096)
        expect(at[i] == 0, "zeroed");
    for (size_t i = 0; i < RUN_COUNT; ++i) {
        sw_optim_run *a = &p->plain[i], *b = &p->filed[i];
        if (i == RUN_COUNT / 2)
            at = second; /* a batch of two segments */
        *a = (sw_optim_run){.numel = sizes[i],
                            .step = 3,
                            .p_dtype = SW_DTYPE_FLOAT32,
                            .state_dtype = state,
                            .g_dtype = SW_DTYPE_BFLOAT16,
                            .copy_dtype = SW_DTYPE_BFLOAT16};
        a->m = new_array(state, sizes[i], NULL);
        a->v = new_array(state, sizes[i], NULL);
        a->v_max = new_array(state, sizes[i], NULL);
        a->p = new_array(a->p_dtype, sizes[i], NULL);
        a->g = new_array(a->g_dtype, sizes[i], NULL);
        *b = *a;
        b->m = in_file(p, &at, state, a->m, sizes[i]);
        b->v = in_file(p, &at, state, a->v, sizes[i]);
        b->v_max = in_file(p, &at, state, a->v_max, sizes[i]);
        if (master) {
            b->p = in_file(p, &at, a->p_dtype, a->p, sizes[i]);
            a->copy = new_array(a->copy_dtype, sizes[i], NULL);
            b->copy = new_array(a->copy_dtype, sizes[i], a->copy);
        } else {
            b->p = new_array(a->p_dtype, sizes[i], a->p);
        }
    }
}

static void pair_fini(pair *p)
{
    for (size_t i = 0; i < RUN_COUNT; ++i) {
        free(p->plain[i].m);
        free(p->plain[i].v);
        free(p->plain[i].v_max);
        free(p->plain[i].p);
        free((void *)(uintptr_t)p->plain[i].g);
        free(p->plain[i].copy);
        free(p->filed[i].copy);
        if (!p->master)
            free(p->filed[i].p);
    }
    sw_offload_fini(&p->offload);
}

static bool is_same(const pair *p)
{
    bool same = true;
    for (size_t i = 0; i < RUN_COUNT; ++i) {
        const sw_optim_run *a = &p->plain[i], *b = &p->filed[i];
        size_t state_bytes = sizes[i] * sw_dtype_size_bytes(p->state);
        same = same && memcmp(a->p, b->p, sizes[i] * 4) == 0 &&
               memcmp(a->m, b->m, state_bytes) == 0 && memcmp(a->v, b->v, state_bytes) == 0 &&
               memcmp(a->v_max, b->v_max, state_bytes) == 0 &&
               (!a->copy || memcmp(a->copy, b->copy, sizes[i] * 2) == 0);
    }
    return same;
}

static void test_bits(const char *folder)
{
    static const sw_dtype dtypes[] = {SW_DTYPE_FLOAT32, SW_DTYPE_BFLOAT16, SW_DTYPE_FLOAT16};
    for (int kind = 0; kind < 6; ++kind) {
        pair p;
        sw_error err;
        sw_adam_options options = adam(true);
        pair_init(&p, folder, dtypes[kind / 2], kind % 2);
        expect(is_same(&p), "the mapping shows the file");
        for (int round = 0; round < 3; ++round) {
            expect(sw_adam_step(&options, p.plain, RUN_COUNT, &err) == SW_OK,
                   "the step in memory succeeds");
            expect(sw_offload_step(&p.offload, step, &options, p.filed, RUN_COUNT, &err) == SW_OK,
                   "the step through the file succeeds");
            expect(is_same(&p), "both have the same bits");
            ((float *)p.plain[5].p)[17] = 2.5f; /* a write through the mapping */
            ((float *)p.filed[5].p)[17] = 2.5f;
        }
        pair_fini(&p);
    }
}

/* A cut of records is whole pages, so that a run of several buffers has the bits of one in memory.
 */
static void test_records(const char *folder)
{
    enum { NUMEL = 300001 };
    const size_t bytes = sw_optim_bytes(NUMEL, SW_DTYPE_UINT8);
    sw_error err;
    sw_adam_options options = adam(false);
    sw_optim_run plain = {.numel = NUMEL, .step = 1, .state_dtype = SW_DTYPE_UINT8};
    plain.m = calloc(1, bytes);
    plain.v = calloc(1, bytes);
    plain.p = new_array(SW_DTYPE_FLOAT32, NUMEL, NULL);
    plain.g = new_array(SW_DTYPE_FLOAT32, NUMEL, NULL);
    plain.is_random = true;
    for (size_t buffers = 1; buffers <= 5; buffers += 4) {
        sw_offload offload;
        sw_optim_run filed = plain;
        uint8_t *at = NULL;
        expect(sw_offload_init(&offload, folder, "test", buffers * BUFFER, &err) == SW_OK &&
                   sw_state_file_grow(&offload.file, 2 * pages(bytes), &at, &err) == SW_OK,
               "a file");
        filed.m = at;
        filed.v = at + pages(bytes);
        filed.p = new_array(SW_DTYPE_FLOAT32, NUMEL, plain.p);
        for (int round = 0; round < 2 && buffers > 1; ++round) {
            expect(sw_adam_step(&options, &plain, 1, &err) == SW_OK &&
                       sw_offload_step(&offload, step, &options, &filed, 1, &err) == SW_OK,
                   "both steps succeed");
            expect(memcmp(plain.m, filed.m, bytes) == 0 && memcmp(plain.v, filed.v, bytes) == 0 &&
                       memcmp(plain.p, filed.p, 4 * NUMEL) == 0,
                   "records have the same bits");
        }
        expect(buffers > 1 ||
                   (sw_offload_step(&offload, step, &options, &filed, 1, &err) == SW_E_INVALID &&
                    strstr(err.message, "65536 bytes holds no cut of records")),
               "a buffer that is too small is refused");
        free(filed.p);
        sw_offload_fini(&offload);
    }
    free(plain.m);
    free(plain.v);
    free(plain.p);
    free((void *)(uintptr_t)plain.g);
}

static void test_failures(const char *folder)
{
    sw_error err;
    sw_offload none;
    sw_adam_options options = adam(true);
    expect(sw_offload_init(&none, "/nowhere/at/all", "x", BUFFER, &err) == SW_E_OS &&
               err.detail == ENOENT && strstr(err.message, "/nowhere/at/all"),
           "a missing folder is refused");
    expect(sw_offload_init(&none, folder, "x", 1000, &err) == SW_E_INVALID,
           "a buffer that is too small is refused");
    pair p;
    pair_init(&p, folder, SW_DTYPE_FLOAT32, true);
    uint64_t size = p.offload.file.size_bytes;
    uint8_t *address;
    expect(sw_state_file_grow(&p.offload.file, (size_t)1 << 50, &address, &err) == SW_E_OS &&
               p.offload.file.size_bytes == size,
           "a size beyond the disk is refused");
    expect(sw_state_file_grow(&p.offload.file, 0, &address, &err) == SW_E_INVALID, "nothing");
    p.filed[5].m = (uint8_t *)p.filed[5].m + 4;
    expect(sw_offload_step(&p.offload, step, &options, p.filed, RUN_COUNT, &err) == SW_E_INVALID,
           "an array that begins inside a page is refused");
    p.filed[5].m = (uint8_t *)p.filed[5].m - 4;
    expect(ftruncate(p.offload.file.fd, 0) == 0, "the file loses all bytes");
    expect(sw_offload_step(&p.offload, step, &options, p.filed, RUN_COUNT, &err) == SW_E_OS &&
               err.detail == EIO && p.offload.file.failure.status == SW_OK,
           "a failure before the first change leaves the state valid");
    expect(ftruncate(p.offload.file.fd, (off_t)size / 2) == 0, "the file loses half of its bytes");
    expect(sw_offload_step(&p.offload, step, &options, p.filed, RUN_COUNT, &err) == SW_E_OS &&
               err.detail == EIO,
           "the first error is returned");
    expect(sw_offload_step(&p.offload, step, &options, p.filed, RUN_COUNT, &err) == SW_E_STATE &&
               strstr(err.message, "ends at byte"),
           "later steps fail with it, since the state is invalid");
    expect(ftruncate(p.offload.file.fd, (off_t)size) == 0, "the file is extended for the mapping");
    pair_fini(&p);
}

static void test_every_allocation_fails_in_turn(const char *folder)
{
    sw_error err;
    sw_adam_options options = adam(true);
    long mapped = faults_mapped();
    for (long nth = 1;; ++nth) {
        pair p;
        uint8_t *address;
        pair_init(&p, folder, SW_DTYPE_FLOAT32, false);
        faults_arm(nth);
        sw_status status = sw_state_file_grow(&p.offload.file, 5000, &address, &err);
        if (status == SW_OK)
            status = sw_offload_step(&p.offload, step, &options, p.filed, RUN_COUNT, &err);
        bool failed = faults_count() >= nth;
        faults_arm(0);
        expect(status == (failed ? SW_E_MEMORY : SW_OK), "a failed allocation is SW_E_MEMORY");
        expect(sw_offload_step(&p.offload, step, &options, p.filed, RUN_COUNT, &err) == SW_OK,
               "the next step succeeds");
        pair_fini(&p);
        expect(faults_mapped() == mapped, "nothing stays mapped");
        if (!failed)
            break;
    }
}

/* Whole arrays of any address and size come back, beside one another, in several requests. */
static void test_store_and_fetch(const char *folder)
{
    sw_error err;
    sw_offload offload;
    uint8_t *at = NULL;
    size_t lengths[] = {1, 4096, BUFFER + 4097}, total = 3 * (BUFFER + 8192);
    expect(sw_offload_init(&offload, folder, "test", BUFFER, &err) == SW_OK &&
               sw_state_file_grow(&offload.file, total, &at, &err) == SW_OK,
           "a file");
    uint8_t *data = malloc(3 * total), *back = data + total;
    for (size_t i = 0; i < 3 * total; ++i)
        data[i] = (uint8_t)(i * 2654435761u >> 13);
    for (size_t i = 0; i < 3; ++i)
        expect(sw_offload_store(&offload, at + i * (BUFFER + 8192), data + 7 * i, lengths[i],
                                &err) == SW_OK,
               "stored");
    for (size_t i = 0; i < 3; ++i) {
        back[lengths[i]] = 77;
        expect(sw_offload_fetch(&offload, at + i * (BUFFER + 8192), back, lengths[i], &err) ==
                       SW_OK &&
                   memcmp(back, data + 7 * i, lengths[i]) == 0 && back[lengths[i]] == 77,
               "the same bytes, and none behind them");
    }
    expect(sw_offload_store(&offload, at + 1, data, 10, &err) == SW_E_INVALID &&
               sw_offload_fetch(&offload, at + total - 4096, back, 4097, &err) == SW_E_INVALID &&
               sw_offload_store(&offload, data, data, 10, &err) == SW_E_INVALID,
           "parts of pages and pages outside are refused");
    sw_file_shorten(offload.file.fd, 4096);
    expect(sw_offload_fetch(&offload, at + BUFFER + 8192, back, 10, &err) == SW_E_OS,
           "a file that is shorter is an error");
    free(data);
    sw_offload_fini(&offload);
}

int main(void)
{
    char folder[] = "/tmp/sw-offload-XXXXXX";
    expect(mkdtemp(folder) != NULL, "a folder is created");
    test_bits(folder);
    test_records(folder);
    test_failures(folder);
    test_store_and_fetch(folder);
    test_every_allocation_fails_in_turn(folder);
    expect(rmdir(folder) == 0, "the folder is empty");
    fprintf(stderr, "%ld passed, %ld failed\n", passed_count, failed_count);
    return failed_count != 0;
}
