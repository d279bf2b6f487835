/* nccl.c - see nccl.h. */
#include "comm/nccl.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "platform/clock.h"
#include "platform/library.h"

/* ---- the library ---- */

static const char DEFAULT_LIBRARY[] = "libnccl.so.2";

static const sw_library_symbol symbols[] = {
#define SYMBOL(name, parameters) {#name, offsetof(sw_nccl_table, name)},
    SW_NCCL_FUNCTIONS(SYMBOL) SYMBOL(ncclGetErrorString, ) SYMBOL(ncclGetLastError, )
#undef SYMBOL
};

/* Read the version before the functions are looked up, so that the error for an old library names
 * its version instead of a missing function. */
static sw_status read_version(void *handle, const char *name, int *version, sw_error *err)
{
    static const sw_library_symbol one[] = {{"ncclGetVersion", 0}};
    sw_nccl_result (*get_version)(int *);
    SW_TRY(sw_library_bind(handle, name, one, 1, &get_version, err));
    int result = get_version(version);
    if (result != SW_NCCL_SUCCESS)
        return sw_error_set(err, SW_E_DEVICE, result, "%s: ncclGetVersion failed with %d", name,
                            result);
    if (*version < SW_NCCL_OLDEST_VERSION)
        return sw_error_set(err, SW_E_UNSUPPORTED, *version,
                            "%s is NCCL %d.%d.%d: 2.14 or newer is needed", name, *version / 10000,
                            *version % 10000 / 100, *version % 100);
    return SW_OK;
}

sw_status sw_nccl_library_init(sw_nccl_library *nccl, const char *library, sw_error *err)
{
    sw_nccl_library made = {0};
    const char *name = library ? library : DEFAULT_LIBRARY;
    sw_status status;
    sw_library_kind kind = library ? SW_LIBRARY_STAYING : SW_LIBRARY_LOADED; /* the thread that
                                                                              * waits for an id's
                                                                              * ranks */
    SW_TRY(sw_library_open(name, kind, &made.handle, err));
    SW_TRY_GOTO(status, read_version(made.handle, name, &made.version, err), close);
    SW_TRY_GOTO(status,
                sw_library_bind(made.handle, name, symbols, sizeof symbols / sizeof *symbols,
                                &made.call, err),
                close);
    *nccl = made;
    return SW_OK;
close:
    sw_library_close(made.handle);
    return status;
}

void sw_nccl_library_fini(sw_nccl_library *nccl)
{
    sw_library_close(nccl->handle);
    nccl->handle = NULL;
}

/* ---- communicators ---- */

/* An NCCL communicator. Thread rule: as peers.h; `calls` guards the fields that name it. */
typedef struct nccl_comm {
    sw_peers base;
    const sw_nccl_library *library; /* borrowed */
    sw_nccl_comm handle;            /* owned, or borrowed; NULL once it has ended; under `calls` */
    int depth;                      /* depth of open NCCL groups; under `calls` */
    pthread_mutex_t calls;          /* held for each NCCL call that names the communicator */
} nccl_comm;

static nccl_comm *comm_of(sw_peers *peers)
{
    return (nccl_comm *)(void *)peers;
}

/* ---- failing ---- */

static sw_status refuse_failed(const nccl_comm *comm, sw_error *err)
{
    return sw_ending_await(&comm->base.ending, err);
}

/* Take the handle, so that no thread calls NCCL with it again. An open group needs it until its
 * end. */
static sw_nccl_comm take_handle(nccl_comm *comm)
{
    sw_nccl_comm handle = comm->handle;
    if (comm->depth > 0)
        return NULL;
    comm->handle = NULL;
    atomic_store(&comm->base.has_failed, true);
    return comm->base.is_borrowed ? NULL : handle;
}

/* Abort, so that NCCL's kernels stop waiting for peers; a borrowed communicator's owner does it
 * instead. The abort may wait until the thread that sees this communicator's end also aborts the
 * process's others. So it is marked as failed before the abort returns. No lock is held. */
static void abort_handle(const nccl_comm *comm, sw_nccl_comm handle)
{
    sw_device *device = comm->base.device;
    sw_device_visit visit;
    bool entered = device->ops->enter(device, &visit, NULL) == SW_OK;
    if (handle)
        (void)comm->library->call.ncclCommAbort(handle);
    if (entered)
        device->ops->leave(device, &visit);
}

static void end(nccl_comm *comm)
{
    pthread_mutex_lock(&comm->calls);
    sw_nccl_comm handle = take_handle(comm);
    pthread_mutex_unlock(&comm->calls);
    abort_handle(comm, handle);
}

/* Inside a group, end only with the outermost one: NCCL keeps an open group for the thread, so an
 * abort inside it would break the thread's later communicators. */
static void nccl_end(sw_peers *peers, const sw_error *reason)
{
    (void)reason;
    end(comm_of(peers));
}

/* During a NCCL call or an open group, that call's thread ends the communicator. Otherwise any
 * thread may: the program may be blocked in a launch that waits for NCCL's kernels. */
static void nccl_end_beside(sw_peers *peers, const sw_error *reason)
{
    nccl_comm *comm = comm_of(peers);
    sw_error first;
    if (pthread_mutex_trylock(&comm->calls) != 0)
        return;
    bool is_free = comm->handle && comm->depth == 0;
    sw_nccl_comm handle = is_free ? take_handle(comm) : NULL;
    pthread_mutex_unlock(&comm->calls);
    if (!is_free)
        return;
    (void)!sw_peers_report(peers, reason, &first);
    abort_handle(comm, handle);
}

/* Describe a NCCL result in a message. Call it without the lock. */
static void explain(nccl_comm *comm, sw_nccl_result result, const char *what, sw_error *reason)
{
    char last[SW_ERROR_MESSAGE_BYTES / 2] = "";
    sw_status status = result == SW_NCCL_REMOTE_ERROR ? SW_E_COMM
                       : result == SW_NCCL_TIMEOUT    ? SW_E_TIMEOUT
                                                      : SW_E_DEVICE;
    if (pthread_mutex_trylock(&comm->calls) == 0) {
        const char *text = comm->handle ? comm->library->call.ncclGetLastError(comm->handle) : NULL;
        snprintf(last, sizeof last, "%s", text ? text : "");
        pthread_mutex_unlock(&comm->calls);
    }
    sw_error_set(reason, status, status == SW_E_DEVICE ? result : -1,
                 "NCCL on rank %d of %d: %s failed: %s (%d)%s%.200s", comm->base.rank,
                 comm->base.world_size, what, comm->library->call.ncclGetErrorString(result),
                 result, *last ? "; " : "", last);
    if (status == SW_E_COMM)
        sw_watchdog_find_cause(comm->base.watchdog, reason);
}

static sw_status fail_result(nccl_comm *comm, sw_nccl_result result, const char *what,
                             sw_error *err)
{
    sw_error reason;
    explain(comm, result, what, &reason);
    return sw_peers_fail(&comm->base, &reason, err);
}

/* Query NCCL's asynchronous state. There is none once another thread has ended the communicator;
 * the caller checks that next. */
static sw_nccl_result ask(nccl_comm *comm, sw_nccl_result *state)
{
    sw_nccl_result asked = SW_NCCL_SUCCESS;
    pthread_mutex_lock(&comm->calls);
    if (comm->handle)
        asked = comm->library->call.ncclCommGetAsyncError(comm->handle, state);
    pthread_mutex_unlock(&comm->calls);
    return asked;
}

/* Wait until a call of a non-blocking communicator, which returned `result`, has a final result. In
 * a group it has one at the group's end. */
static sw_status settle(nccl_comm *comm, sw_nccl_result result, const char *what, sw_error *err)
{
    int64_t start = sw_clock_now_ns();
    if (comm->depth > 0 && result == SW_NCCL_IN_PROGRESS)
        return SW_OK;
    while (result == SW_NCCL_IN_PROGRESS) {
        SW_TRY(sw_peers_check_request(&comm->base, err)); /* first, since a lender may have freed
                                                           * the communicator */
        sw_nccl_result asked = ask(comm, &result);
        if (asked != SW_NCCL_SUCCESS)
            return fail_result(comm, asked, what, err);
        if (result != SW_NCCL_IN_PROGRESS)
            break;
        SW_TRY(sw_peers_turn(&comm->base, start, what, err));
    }
    return result == SW_NCCL_SUCCESS ? SW_OK : fail_result(comm, result, what, err);
}

/* End one NCCL call, as open_call began it. */
static void close_call(nccl_comm *comm, sw_device_visit *visit)
{
    pthread_mutex_unlock(&comm->calls);
    comm->base.device->ops->leave(comm->base.device, visit);
}

/* Prepare one NCCL call: make the device current. Another thread may have ended the
 * communicator. */
static sw_status open_call(nccl_comm *comm, sw_device_visit *visit, sw_error *err)
{
    if (comm->base.is_failing)
        return refuse_failed(comm, err);
    if (comm->depth == 0)
        SW_TRY(sw_peers_check_request(&comm->base, err));
    SW_TRY(comm->base.device->ops->enter(comm->base.device, visit, err));
    pthread_mutex_lock(&comm->calls);
    if (comm->handle)
        return SW_OK;
    close_call(comm, visit);
    return refuse_failed(comm, err);
}

#define NCCL_CALL(comm, err, what, invocation)                     \
    do {                                                           \
        sw_device_visit visit_;                                    \
        SW_TRY(open_call((comm), &visit_, (err)));                 \
        sw_nccl_result result_ = (comm)->library->call.invocation; \
        close_call((comm), &visit_);                               \
        SW_TRY(settle((comm), result_, (what), (err)));            \
    } while (0)

/* ---- operations ---- */

static const int nccl_dtypes[SW_DTYPE_COUNT] = {
    [SW_DTYPE_FLOAT32] = SW_NCCL_FLOAT32,
    [SW_DTYPE_FLOAT64] = SW_NCCL_FLOAT64,
    [SW_DTYPE_FLOAT16] = SW_NCCL_FLOAT16,
    [SW_DTYPE_BFLOAT16] = SW_NCCL_BFLOAT16,
    [SW_DTYPE_INT8] = SW_NCCL_INT8,
    [SW_DTYPE_UINT8] = SW_NCCL_UINT8,
    [SW_DTYPE_INT16] = -1,
    [SW_DTYPE_INT32] = SW_NCCL_INT32,
    [SW_DTYPE_INT64] = SW_NCCL_INT64,
    [SW_DTYPE_COMPLEX64] = -1,
    [SW_DTYPE_COMPLEX128] = -1,
    [SW_DTYPE_BOOL] = -1, /* and those behind it, which sw_redop_check refuses */
};

/* Complex sums are sums of their parts; NCCL has no int16. */
static sw_status as_reduced(sw_dtype dtype, sw_redop op, int *nccl_dtype, int *nccl_op,
                            size_t *count, sw_error *err)
{
    static const int ops[SW_REDOP_COUNT] = {[SW_REDOP_SUM] = SW_NCCL_SUM,
                                            [SW_REDOP_MEAN] = SW_NCCL_AVG,
                                            [SW_REDOP_MIN] = SW_NCCL_MIN,
                                            [SW_REDOP_MAX] = SW_NCCL_MAX};
    SW_TRY(sw_redop_check(op, dtype, err));
    if (dtype == SW_DTYPE_COMPLEX64 || dtype == SW_DTYPE_COMPLEX128) {
        dtype = dtype == SW_DTYPE_COMPLEX64 ? SW_DTYPE_FLOAT32 : SW_DTYPE_FLOAT64;
        *count *= 2;
    }
    if (nccl_dtypes[dtype] < 0)
        SW_FAIL(err, SW_E_UNSUPPORTED,
                "NCCL cannot reduce dtype %s; the deterministic reduction can",
                sw_dtype_name(dtype));
    *nccl_dtype = nccl_dtypes[dtype];
    *nccl_op = ops[op];
    return SW_OK;
}

static sw_cu_stream cuda_stream(sw_stream *stream)
{
    return (sw_cu_stream)(void *)stream;
}

static sw_status nccl_group_begin(sw_peers *peers, sw_error *err)
{
    nccl_comm *comm = comm_of(peers);
    sw_device_visit visit;
    SW_TRY(open_call(comm, &visit, err));
    sw_nccl_result result = comm->library->call.ncclGroupStart();
    comm->depth += result == SW_NCCL_SUCCESS; /* other threads see both together */
    close_call(comm, &visit);
    return result == SW_NCCL_SUCCESS ? SW_OK : fail_result(comm, result, "group start", err);
}

static sw_status nccl_group_end(sw_peers *peers, sw_error *err)
{
    nccl_comm *comm = comm_of(peers);
    sw_device_visit visit;
    bool entered = comm->base.device->ops->enter(comm->base.device, &visit, NULL) == SW_OK;
    pthread_mutex_lock(&comm->calls);
    sw_nccl_result result = comm->library->call.ncclGroupEnd();
    bool is_outermost = --comm->depth == 0;
    pthread_mutex_unlock(&comm->calls);
    if (entered)
        comm->base.device->ops->leave(comm->base.device, &visit);
    if (comm->base.is_failing) {
        if (is_outermost)
            end(comm);
        return refuse_failed(comm, err);
    }
    return settle(comm, result, "group end", err);
}

static sw_status nccl_all_reduce(sw_peers *peers, void *data, size_t numel, sw_dtype dtype,
                                 sw_redop op, sw_stream *stream, sw_error *err)
{
    nccl_comm *comm = comm_of(peers);
    int nccl_dtype = 0, nccl_op = 0;
    SW_TRY(as_reduced(dtype, op, &nccl_dtype, &nccl_op, &numel, err));
    NCCL_CALL(
        comm, err, "all_reduce",
        ncclAllReduce(data, data, numel, nccl_dtype, nccl_op, comm->handle, cuda_stream(stream)));
    return SW_OK;
}

static sw_status nccl_reduce_scatter(sw_peers *peers, const void *data, void *to,
                                     size_t slice_numel, sw_dtype dtype, sw_redop op,
                                     sw_stream *stream, sw_error *err)
{
    nccl_comm *comm = comm_of(peers);
    int nccl_dtype = 0, nccl_op = 0;
    SW_TRY(as_reduced(dtype, op, &nccl_dtype, &nccl_op, &slice_numel, err));
    NCCL_CALL(comm, err, "reduce_scatter",
              ncclReduceScatter(data, to, slice_numel, nccl_dtype, nccl_op, comm->handle,
                                cuda_stream(stream)));
    return SW_OK;
}

static sw_status nccl_gather_slices(sw_peers *peers, const void *slice, void *data,
                                    size_t slice_bytes, sw_stream *stream, sw_error *err)
{
    nccl_comm *comm = comm_of(peers);
    NCCL_CALL(
        comm, err, "all_gather",
        ncclAllGather(slice, data, slice_bytes, SW_NCCL_UINT8, comm->handle, cuda_stream(stream)));
    return SW_OK;
}

static sw_status nccl_send(sw_peers *peers, const void *data, size_t size_bytes, int rank,
                           sw_stream *stream, sw_error *err)
{
    nccl_comm *comm = comm_of(peers);
    NCCL_CALL(comm, err, "send of a slice",
              ncclSend(data, size_bytes, SW_NCCL_UINT8, rank, comm->handle, cuda_stream(stream)));
    return SW_OK;
}

static sw_status nccl_receive(sw_peers *peers, void *data, size_t size_bytes, int rank,
                              sw_stream *stream, sw_error *err)
{
    nccl_comm *comm = comm_of(peers);
    NCCL_CALL(comm, err, "receive of a slice",
              ncclRecv(data, size_bytes, SW_NCCL_UINT8, rank, comm->handle, cuda_stream(stream)));
    return SW_OK;
}

/* Send one slice to a peer, receive one from it. */
static sw_status exchange_with(nccl_comm *comm, int peer, const char *to_send, char *to_receive,
                               size_t slice_bytes, sw_stream *stream, sw_error *err)
{
    SW_TRY(nccl_send(&comm->base, to_send, slice_bytes, peer, stream, err));
    return nccl_receive(&comm->base, to_receive, slice_bytes, peer, stream, err);
}

static sw_status end_exchange(nccl_comm *comm, sw_status status, sw_error *err)
{
    sw_status ended = nccl_group_end(&comm->base, status == SW_OK ? err : NULL);
    return status != SW_OK ? status : ended;
}

static sw_status nccl_exchange_slices(sw_peers *peers, const void *data, void *contributions,
                                      size_t slice_bytes, const int *slice_of_rank,
                                      sw_stream *stream, sw_error *err)
{
    nccl_comm *comm = comm_of(peers);
    sw_status status = SW_OK;
    if (comm->base.world_size == 1 || slice_bytes == 0)
        return comm->base.is_failing ? refuse_failed(comm, err) : SW_OK;
    SW_TRY(nccl_group_begin(&comm->base, err));
    for (int peer = 0; peer < comm->base.world_size && status == SW_OK; ++peer) {
        size_t slice = (size_t)(slice_of_rank ? slice_of_rank[peer] : peer);
        if (peer != comm->base.rank)
            status = exchange_with(comm, peer, (const char *)data + slice * slice_bytes,
                                   (char *)contributions + (size_t)peer * slice_bytes, slice_bytes,
                                   stream, err);
    }
    return end_exchange(comm, status, err);
}

static sw_status nccl_gather_among(sw_peers *peers, void *data, size_t slice_bytes,
                                   const int *ranks, int count, sw_stream *stream, sw_error *err)
{
    nccl_comm *comm = comm_of(peers);
    const char *own = NULL;
    sw_status status = SW_OK;
    for (int k = 0; k < count; ++k)
        if (ranks[k] == comm->base.rank)
            own = (char *)data + (size_t)k * slice_bytes;
    if (count == 1 || slice_bytes == 0)
        return comm->base.is_failing ? refuse_failed(comm, err) : SW_OK;
    SW_TRY(nccl_group_begin(&comm->base, err));
    for (int k = 0; k < count && status == SW_OK; ++k)
        if (ranks[k] != comm->base.rank)
            status = exchange_with(comm, ranks[k], own, (char *)data + (size_t)k * slice_bytes,
                                   slice_bytes, stream, err);
    return end_exchange(comm, status, err);
}

static sw_status nccl_broadcast(sw_peers *peers, void *data, size_t size_bytes, int root,
                                sw_stream *stream, sw_error *err)
{
    nccl_comm *comm = comm_of(peers);
    if (root < 0 || root >= comm->base.world_size)
        SW_FAIL(err, SW_E_INVALID, "NCCL broadcast: root must be in [0, %d), not %d",
                comm->base.world_size, root);
    NCCL_CALL(comm, err, "broadcast",
              ncclBroadcast(data, data, size_bytes, SW_NCCL_UINT8, root, comm->handle,
                            cuda_stream(stream)));
    return SW_OK;
}

/* ---- watching ---- */

static sw_status nccl_check(sw_peers *peers, sw_error *err)
{
    nccl_comm *comm = comm_of(peers);
    sw_nccl_result result = SW_NCCL_SUCCESS;
    if (!peers->is_failing)
        SW_TRY(sw_peers_check_request(peers, err));
    NCCL_CALL(comm, err, "query", ncclCommGetAsyncError(comm->handle, &result));
    if (result == SW_NCCL_SUCCESS || result == SW_NCCL_IN_PROGRESS)
        return SW_OK;
    return fail_result(comm, result, "an operation", err);
}

static sw_status nccl_look(sw_peers *peers, sw_error *reason)
{
    nccl_comm *comm = comm_of(peers);
    sw_nccl_result asked = SW_NCCL_SUCCESS, result = SW_NCCL_SUCCESS;
    if (pthread_mutex_trylock(&comm->calls) != 0)
        return SW_OK;
    if (comm->handle)
        asked = comm->library->call.ncclCommGetAsyncError(comm->handle, &result);
    pthread_mutex_unlock(&comm->calls);
    result = asked == SW_NCCL_SUCCESS ? result : asked;
    if (result == SW_NCCL_SUCCESS || result == SW_NCCL_IN_PROGRESS)
        return SW_OK;
    explain(comm, result, "an operation", reason);
    return reason->status;
}

/* ---- life ---- */

static void free_comm(nccl_comm *comm)
{
    pthread_mutex_destroy(&comm->calls);
    free(comm);
}

static sw_status finalize(nccl_comm *comm, sw_error *err)
{
    NCCL_CALL(comm, err, "finalize", ncclCommFinalize(comm->handle));
    return SW_OK;
}

static void nccl_destroy(sw_peers *peers)
{
    nccl_comm *comm = comm_of(peers);
    sw_device_visit visit;
    if (comm->base.is_borrowed)
        comm->handle = NULL;
    if (comm->handle && finalize(comm, NULL) == SW_OK &&
        comm->base.device->ops->enter(comm->base.device, &visit, NULL) == SW_OK) {
        /* On failure the communicator is unusable; abort frees it. */
        if (comm->library->call.ncclCommDestroy(comm->handle) != SW_NCCL_SUCCESS)
            (void)comm->library->call.ncclCommAbort(comm->handle);
        comm->handle = NULL;
        comm->base.device->ops->leave(comm->base.device, &visit);
    }
    end(comm);
    free_comm(comm);
}

static const sw_peers_ops nccl_ops = {
    .group_begin = nccl_group_begin,
    .group_end = nccl_group_end,
    .all_reduce = nccl_all_reduce,
    .reduce_scatter = nccl_reduce_scatter,
    .gather_slices = nccl_gather_slices,
    .exchange_slices = nccl_exchange_slices,
    .gather_among = nccl_gather_among,
    .send = nccl_send,
    .receive = nccl_receive,
    .broadcast = nccl_broadcast,
    .check = nccl_check,
    .end = nccl_end,
    .look = nccl_look,
    .end_beside = nccl_end_beside,
    .destroy = nccl_destroy,
};

static sw_status make(const sw_nccl_library *nccl, sw_device *device, int rank, int world_size,
                      int64_t timeout_ns, nccl_comm **comm, sw_error *err)
{
    nccl_comm *made = calloc(1, sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "NCCL: no memory for %zu bytes", sizeof *made);
    *made = (nccl_comm){.base = {.ops = &nccl_ops,
                                 .name = "nccl",
                                 .link = SW_LINK_NCCL,
                                 .title = "NCCL",
                                 .rank = rank,
                                 .world_size = world_size,
                                 .rounds_divisor = true,
                                 .device = device,
                                 .timeout_ns = timeout_ns},
                        .library = nccl};
    pthread_mutex_init(&made->calls, NULL);
    *comm = made;
    return SW_OK;
}

sw_status sw_nccl_id_create(const sw_nccl_library *nccl, sw_nccl_id *id, sw_error *err)
{
    sw_nccl_result result = nccl->call.ncclGetUniqueId(id);
    if (result != SW_NCCL_SUCCESS)
        return sw_error_set(err, SW_E_DEVICE, result, "NCCL: ncclGetUniqueId failed: %s (%d)",
                            nccl->call.ncclGetErrorString(result), result);
    return SW_OK;
}

static sw_status connect(nccl_comm *comm, const sw_nccl_id *id, sw_error *err)
{
    sw_nccl_config config = {.size = sizeof config,
                             .magic = SW_NCCL_CONFIG_MAGIC,
                             .version = SW_NCCL_CONFIG_VERSION,
                             .blocking = 0};
    sw_device_visit visit;
    sw_error cause;
    if (comm->base.device->ops->enter(comm->base.device, &visit, &cause) != SW_OK)
        return sw_peers_fail_driver(&comm->base, "creation of the communicator", &cause, err);
    sw_nccl_result result = comm->library->call.ncclCommInitRankConfig(
        &comm->handle, comm->base.world_size, *id, comm->base.rank, &config);
    comm->base.device->ops->leave(comm->base.device, &visit);
    if (!comm->handle)
        result = result == SW_NCCL_IN_PROGRESS ? SW_NCCL_INTERNAL_ERROR : result;
    return settle(comm, result, "creation of the communicator", err);
}

sw_status sw_nccl_create(const sw_nccl_library *nccl, sw_device *device, const sw_nccl_id *id,
                         int rank, int world_size, int64_t timeout_ns, sw_watchdog *watchdog,
                         sw_peers **peers, sw_error *err)
{
    if (world_size < 1 || rank < 0 || rank >= world_size)
        SW_FAIL(err, SW_E_INVALID, "NCCL: rank must be in [0, world_size), not %d of %d", rank,
                world_size);
    nccl_comm *made = NULL;
    SW_TRY(make(nccl, device, rank, world_size, timeout_ns, &made, err));
    made->base.watchdog = watchdog;
    sw_status status = connect(made, id, err);
    if (status != SW_OK) {
        end(made);
        free_comm(made);
        return status;
    }
    *peers = &made->base;
    return SW_OK;
}

/* Check that the borrowed communicator is ready and has the expected rank, size and GPU. */
static sw_status check_lent(nccl_comm *comm, sw_error *err)
{
    int rank = -1, world_size = 0, ordinal = -1;
    SW_TRY(settle(comm, SW_NCCL_IN_PROGRESS, "readiness of a borrowed communicator", err));
    NCCL_CALL(comm, err, "query", ncclCommUserRank(comm->handle, &rank));
    NCCL_CALL(comm, err, "query", ncclCommCount(comm->handle, &world_size));
    NCCL_CALL(comm, err, "query", ncclCommCuDevice(comm->handle, &ordinal));
    if (rank != comm->base.rank || world_size != comm->base.world_size ||
        ordinal != comm->base.device->ordinal)
        SW_FAIL(err, SW_E_INVALID,
                "NCCL: a borrowed communicator must be of rank %d of %d on GPU %d, not of rank %d "
                "of %d on GPU %d",
                comm->base.rank, comm->base.world_size, comm->base.device->ordinal, rank,
                world_size, ordinal);
    return SW_OK;
}

sw_status sw_nccl_borrow(const sw_nccl_library *nccl, sw_device *device, sw_nccl_comm handle,
                         int rank, int world_size, int64_t timeout_ns, sw_watchdog *watchdog,
                         sw_peers **peers, sw_error *err)
{
    if (!handle)
        SW_FAIL(err, SW_E_INVALID, "NCCL: a borrowed communicator must not be NULL");
    nccl_comm *made = NULL;
    SW_TRY(make(nccl, device, rank, world_size, timeout_ns, &made, err));
    made->handle = handle;
    made->base.is_borrowed = true;
    sw_status status = check_lent(made, err);
    if (status != SW_OK) {
        free_comm(made);
        return status;
    }
    made->base.watchdog = watchdog; /* the caller reports earlier failures itself */
    *peers = &made->base;
    return SW_OK;
}
