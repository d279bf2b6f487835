/* nccl.c - see nccl.h. */
#include "comm/nccl.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "comm/ending.h"
#include "platform/clock.h"
#include "platform/thread.h"

struct sw_nccl {
    const sw_nccl_library *library; /* borrowed */
    sw_device *device;              /* borrowed */
    sw_nccl_comm handle;            /* owned, or borrowed; NULL once it has ended; under `calls` */
    bool is_borrowed;
    int rank, world_size;
    int64_t timeout_ns;
    sw_lookout *lookout;     /* borrowed */
    int depth;               /* groups that are open in NCCL, one inside the other; under `calls` */
    pthread_mutex_t calls;   /* held for each call of NCCL's that names the communicator */
    sw_ending ending;        /* by any thread */
    _Atomic bool has_failed; /* some thread has acted on `ending` */
    _Atomic bool has_ended;  /* with it, or behind the group that was open: nothing comes of it */
};

/* ---- failing ---- */

static bool has_failed(const sw_nccl *comm)
{
    return atomic_load(&comm->has_failed);
}

/* An open group still needs it until its end. Else it counts before the abort has come back: that
 * may wait for the kernels of this GPU's other communicators, which are ended by who sees this. */
bool sw_nccl_has_failed(const sw_nccl *comm)
{
    return atomic_load(&comm->has_ended);
}

static sw_status refuse_failed(const sw_nccl *comm, sw_error *err)
{
    return sw_ending_await(&comm->ending, err);
}

/* Take the handle out, unless a group is open, whose end needs it: from then on no thread calls
 * NCCL with it. */
static sw_nccl_comm take_handle(sw_nccl *comm)
{
    sw_nccl_comm handle = comm->handle;
    if (comm->depth > 0)
        return NULL;
    comm->handle = NULL;
    atomic_store(&comm->has_ended, true);
    return comm->is_borrowed ? NULL : handle;
}

/* NCCL's kernels that wait for peers are let go: of a borrowed communicator, by its owner. The
 * abort may wait until those of the process's other communicators are, too, by whoever sees that
 * this one has ended. No lock is held. */
static void abort_handle(const sw_nccl *comm, sw_nccl_comm handle)
{
    sw_device_visit visit;
    bool entered = comm->device->ops->enter(comm->device, &visit, NULL) == SW_OK;
    if (handle)
        (void)comm->library->call.ncclCommAbort(handle);
    if (entered)
        comm->device->ops->leave(comm->device, &visit);
}

static void end(sw_nccl *comm)
{
    pthread_mutex_lock(&comm->calls);
    sw_nccl_comm handle = take_handle(comm);
    pthread_mutex_unlock(&comm->calls);
    abort_handle(comm, handle);
}

/* Every rank is told before anything ends, by the first thread that comes here. */
static void tell(sw_nccl *comm, const sw_error *reason)
{
    sw_error first;
    sw_ending_say(&comm->ending, SW_MEMBER_ENDED, reason);
    if (atomic_exchange(&comm->has_failed, true))
        return;
    (void)!sw_ending_await(&comm->ending, &first);
    sw_lookout_tell(comm->lookout, &first);
}

/* Later calls repeat this. Inside a group the end waits for the outermost one's: what NCCL keeps of
 * an open group is its thread's, so a communicator that ends there would take the thread's later
 * ones along. */
static sw_status fail(sw_nccl *comm, const sw_error *reason, sw_error *err)
{
    tell(comm, reason);
    end(comm);
    return refuse_failed(comm, err);
}

/* A result of NCCL's as a sentence. Without the lock. */
static void explain(sw_nccl *comm, sw_nccl_result result, const char *what, sw_error *reason)
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
                 "NCCL on rank %d of %d: %s failed: %s (%d)%s%.200s", comm->rank, comm->world_size,
                 what, comm->library->call.ncclGetErrorString(result), result, *last ? "; " : "",
                 last);
    if (status == SW_E_COMM)
        sw_lookout_hear(comm->lookout, reason);
}

static sw_status fail_result(sw_nccl *comm, sw_nccl_result result, const char *what, sw_error *err)
{
    sw_error reason;
    explain(comm, result, what, &reason);
    return fail(comm, &reason, err);
}

/* A call of the driver's has failed. */
static sw_status fail_driver(sw_nccl *comm, const char *what, const sw_error *cause, sw_error *err)
{
    sw_error reason;
    sw_error_set(&reason, cause->status, cause->detail, "NCCL on rank %d of %d: %s: %.300s",
                 comm->rank, comm->world_size, what, cause->message);
    return fail(comm, &reason, err);
}

void sw_nccl_explain_late(const sw_nccl *comm, const char *what, sw_error *reason)
{
    sw_error_set(reason, SW_E_TIMEOUT, -1,
                 "NCCL on rank %d of %d: %s was not done within %.3g s; a peer has not come to it",
                 comm->rank, comm->world_size, what, (double)comm->timeout_ns * 1e-9);
}

static sw_status fail_late(sw_nccl *comm, const char *what, sw_error *err)
{
    sw_error reason;
    sw_nccl_explain_late(comm, what, &reason);
    return fail(comm, &reason, err);
}

/* Somebody else has asked for the end. */
static sw_status check_request(sw_nccl *comm, sw_error *err)
{
    sw_error reason;
    return sw_ending_read(&comm->ending, &reason) == SW_OK ? SW_OK : fail(comm, &reason, err);
}

/* What the ranks' hosts say of a wait. */
static sw_status look_out(sw_nccl *comm, int64_t begun_ns, const char *what, sw_error *err)
{
    sw_error reason;
    sw_status status = sw_lookout_look(comm->lookout, begun_ns, what, &reason);
    if (status == SW_OK)
        return SW_OK;
    sw_status failed = fail(comm, &reason, err);
    if (status == SW_E_INTERRUPTED)
        SW_FAIL(err, status, "interrupted while waiting for %s", what);
    return failed;
}

/* NCCL's asynchronous state; none once another thread has ended the communicator, which the caller
 * looks at next. */
static sw_nccl_result ask(sw_nccl *comm, sw_nccl_result *state)
{
    sw_nccl_result asked = SW_NCCL_SUCCESS;
    pthread_mutex_lock(&comm->calls);
    if (comm->handle)
        asked = comm->library->call.ncclCommGetAsyncError(comm->handle, state);
    pthread_mutex_unlock(&comm->calls);
    return asked;
}

/* A call of a non-blocking communicator returned `result`: waits until it is decided. */
static sw_status settle(sw_nccl *comm, sw_nccl_result result, const char *what, sw_error *err)
{
    int64_t start = sw_clock_now_ns();
    while (result == SW_NCCL_IN_PROGRESS) {
        SW_TRY(check_request(comm, err)); /* first: a lender may have freed what is asked */
        sw_nccl_result asked = ask(comm, &result);
        if (asked != SW_NCCL_SUCCESS)
            return fail_result(comm, asked, what, err);
        if (result != SW_NCCL_IN_PROGRESS)
            break;
        if (sw_clock_now_ns() - start > comm->timeout_ns)
            return fail_late(comm, what, err);
        SW_TRY(look_out(comm, start, what, err));
        sw_thread_rest(sw_clock_now_ns() - start);
    }
    return result == SW_NCCL_SUCCESS ? SW_OK : fail_result(comm, result, what, err);
}

/* One NCCL call with the device current. Another thread may have ended the communicator. */
#define NCCL_CALL(comm, err, what, invocation)                              \
    do {                                                                    \
        sw_device_visit visit_;                                             \
        sw_nccl_result result_ = SW_NCCL_SUCCESS;                           \
        if (has_failed(comm))                                               \
            return refuse_failed((comm), (err));                            \
        if ((comm)->depth == 0)                                             \
            SW_TRY(check_request((comm), (err)));                           \
        SW_TRY((comm)->device->ops->enter((comm)->device, &visit_, (err))); \
        pthread_mutex_lock(&(comm)->calls);                                 \
        bool is_there_ = (comm)->handle != NULL;                            \
        if (is_there_)                                                      \
            result_ = (comm)->library->call.invocation;                     \
        pthread_mutex_unlock(&(comm)->calls);                               \
        (comm)->device->ops->leave((comm)->device, &visit_);                \
        if (!is_there_)                                                     \
            return refuse_failed((comm), (err));                            \
        if ((comm)->depth > 0 && result_ == SW_NCCL_IN_PROGRESS)            \
            result_ = SW_NCCL_SUCCESS; /* decided at the group's end */     \
        SW_TRY(settle((comm), result_, (what), (err)));                     \
    } while (0)

/* ---- life ---- */

sw_status sw_nccl_id_create(const sw_nccl_library *nccl, sw_nccl_id *id, sw_error *err)
{
    sw_nccl_result result = nccl->call.ncclGetUniqueId(id);
    if (result != SW_NCCL_SUCCESS)
        return sw_error_set(err, SW_E_DEVICE, result, "NCCL: ncclGetUniqueId failed: %s (%d)",
                            nccl->call.ncclGetErrorString(result), result);
    return SW_OK;
}

static void free_comm(sw_nccl *comm)
{
    pthread_mutex_destroy(&comm->calls);
    free(comm);
}

static sw_status connect(sw_nccl *comm, const sw_nccl_id *id, sw_error *err)
{
    sw_nccl_config config = {.size = sizeof config,
                             .magic = SW_NCCL_CONFIG_MAGIC,
                             .version = SW_NCCL_CONFIG_VERSION,
                             .blocking = 0};
    sw_device_visit visit;
    sw_error cause;
    if (comm->device->ops->enter(comm->device, &visit, &cause) != SW_OK)
        return fail_driver(comm, "creation of the communicator", &cause, err);
    sw_nccl_result result = comm->library->call.ncclCommInitRankConfig(
        &comm->handle, comm->world_size, *id, comm->rank, &config);
    comm->device->ops->leave(comm->device, &visit);
    if (!comm->handle)
        result = result == SW_NCCL_IN_PROGRESS ? SW_NCCL_INTERNAL_ERROR : result;
    return settle(comm, result, "creation of the communicator", err);
}

sw_status sw_nccl_create(const sw_nccl_library *nccl, sw_device *device, const sw_nccl_id *id,
                         int rank, int world_size, int64_t timeout_ns, sw_lookout *lookout,
                         sw_nccl **comm, sw_error *err)
{
    if (world_size < 1 || rank < 0 || rank >= world_size)
        SW_FAIL(err, SW_E_INVALID, "NCCL: rank must be in [0, world_size), not %d of %d", rank,
                world_size);
    sw_nccl *made = calloc(1, sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "NCCL: no memory for %zu bytes", sizeof *made);
    *made = (sw_nccl){.library = nccl,
                      .device = device,
                      .rank = rank,
                      .world_size = world_size,
                      .timeout_ns = timeout_ns,
                      .lookout = lookout};
    pthread_mutex_init(&made->calls, NULL);
    sw_status status = connect(made, id, err);
    if (status != SW_OK) {
        end(made);
        free_comm(made);
        return status;
    }
    *comm = made;
    return SW_OK;
}

/* That the lent communicator is ready, and the one that is meant. */
static sw_status check_lent(sw_nccl *comm, sw_error *err)
{
    int rank = -1, world_size = 0, ordinal = -1;
    SW_TRY(settle(comm, SW_NCCL_IN_PROGRESS, "readiness of a borrowed communicator", err));
    NCCL_CALL(comm, err, "query", ncclCommUserRank(comm->handle, &rank));
    NCCL_CALL(comm, err, "query", ncclCommCount(comm->handle, &world_size));
    NCCL_CALL(comm, err, "query", ncclCommCuDevice(comm->handle, &ordinal));
    if (rank != comm->rank || world_size != comm->world_size || ordinal != comm->device->ordinal)
        SW_FAIL(err, SW_E_INVALID,
                "NCCL: a borrowed communicator must be of rank %d of %d on GPU %d, not of rank %d "
                "of %d on GPU %d",
                comm->rank, comm->world_size, comm->device->ordinal, rank, world_size, ordinal);
    return SW_OK;
}

sw_status sw_nccl_borrow(const sw_nccl_library *nccl, sw_device *device, sw_nccl_comm handle,
                         int rank, int world_size, int64_t timeout_ns, sw_lookout *lookout,
                         sw_nccl **comm, sw_error *err)
{
    if (!handle)
        SW_FAIL(err, SW_E_INVALID, "NCCL: a borrowed communicator must not be NULL");
    sw_nccl *made = calloc(1, sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "NCCL: no memory for %zu bytes", sizeof *made);
    *made = (sw_nccl){.library = nccl,
                      .device = device,
                      .handle = handle,
                      .is_borrowed = true,
                      .rank = rank,
                      .world_size = world_size,
                      .timeout_ns = timeout_ns};
    pthread_mutex_init(&made->calls, NULL);
    sw_status status = check_lent(made, err);
    if (status != SW_OK) {
        free_comm(made);
        return status;
    }
    made->lookout = lookout; /* what cannot be lent the caller tells himself */
    *comm = made;
    return SW_OK;
}

bool sw_nccl_is_borrowed(const sw_nccl *comm)
{
    return comm->is_borrowed;
}

static sw_status finalize(sw_nccl *comm, sw_error *err)
{
    NCCL_CALL(comm, err, "finalize", ncclCommFinalize(comm->handle));
    return SW_OK;
}

void sw_nccl_destroy(sw_nccl *comm)
{
    sw_device_visit visit;
    if (!comm)
        return;
    if (comm->is_borrowed)
        comm->handle = NULL;
    if (comm->handle && finalize(comm, NULL) == SW_OK &&
        comm->device->ops->enter(comm->device, &visit, NULL) == SW_OK) {
        /* What fails here is a communicator that is gone either way; abort frees it. */
        if (comm->library->call.ncclCommDestroy(comm->handle) != SW_NCCL_SUCCESS)
            (void)comm->library->call.ncclCommAbort(comm->handle);
        comm->handle = NULL;
        comm->device->ops->leave(comm->device, &visit);
    }
    end(comm);
    free_comm(comm);
}

int sw_nccl_rank(const sw_nccl *comm)
{
    return comm->rank;
}

int sw_nccl_world_size(const sw_nccl *comm)
{
    return comm->world_size;
}

sw_nccl_view sw_nccl_view_of(const sw_nccl *comm)
{
    return (sw_nccl_view){.library = comm->library,
                          .device = comm->device,
                          .handle = comm->handle,
                          .timeout_ns = comm->timeout_ns};
}

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
    [SW_DTYPE_BOOL] = -1,
};

/* A dtype that only moves goes as bytes. */
static int as_moved(sw_dtype dtype, size_t *count)
{
    if (nccl_dtypes[dtype] >= 0)
        return nccl_dtypes[dtype];
    *count *= sw_dtype_size_bytes(dtype);
    return SW_NCCL_UINT8;
}

/* Complex sums go as their parts; an int16 has no like in NCCL. */
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
                "NCCL: it cannot reduce dtype %s; the deterministic reduction can",
                sw_dtype_name(dtype));
    *nccl_dtype = nccl_dtypes[dtype];
    *nccl_op = ops[op];
    return SW_OK;
}

static sw_cu_stream cuda_stream(sw_stream *stream)
{
    return (sw_cu_stream)(void *)stream;
}

sw_status sw_nccl_group_begin(sw_nccl *comm, sw_error *err)
{
    sw_device_visit visit;
    if (comm->depth == 0)
        SW_TRY(check_request(comm, err));
    if (has_failed(comm))
        return refuse_failed(comm, err);
    SW_TRY(comm->device->ops->enter(comm->device, &visit, err));
    pthread_mutex_lock(&comm->calls); /* an open group and its count are seen together */
    bool is_there = comm->handle != NULL;
    sw_nccl_result result = is_there ? comm->library->call.ncclGroupStart() : SW_NCCL_SUCCESS;
    comm->depth += is_there && result == SW_NCCL_SUCCESS;
    pthread_mutex_unlock(&comm->calls);
    comm->device->ops->leave(comm->device, &visit);
    if (!is_there)
        return refuse_failed(comm, err);
    return result == SW_NCCL_SUCCESS ? SW_OK : fail_result(comm, result, "group start", err);
}

sw_status sw_nccl_group_end(sw_nccl *comm, sw_error *err)
{
    sw_device_visit visit;
    bool entered = comm->device->ops->enter(comm->device, &visit, NULL) == SW_OK;
    pthread_mutex_lock(&comm->calls);
    sw_nccl_result result = comm->library->call.ncclGroupEnd();
    bool is_outermost = --comm->depth == 0;
    pthread_mutex_unlock(&comm->calls);
    if (entered)
        comm->device->ops->leave(comm->device, &visit);
    if (has_failed(comm)) {
        if (is_outermost)
            end(comm);
        return refuse_failed(comm, err);
    }
    if (!is_outermost && result == SW_NCCL_IN_PROGRESS)
        return SW_OK; /* decided at the end of the outermost */
    return settle(comm, result, "group end", err);
}

sw_status sw_nccl_all_reduce(sw_nccl *comm, void *data, size_t numel, sw_dtype dtype, sw_redop op,
                             sw_stream *stream, sw_error *err)
{
    int nccl_dtype = 0, nccl_op = 0;
    SW_TRY(as_reduced(dtype, op, &nccl_dtype, &nccl_op, &numel, err));
    NCCL_CALL(
        comm, err, "all_reduce",
        ncclAllReduce(data, data, numel, nccl_dtype, nccl_op, comm->handle, cuda_stream(stream)));
    return SW_OK;
}

sw_status sw_nccl_reduce_scatter(sw_nccl *comm, void *data, size_t slice_numel, sw_dtype dtype,
                                 sw_redop op, sw_stream *stream, sw_error *err)
{
    int nccl_dtype = 0, nccl_op = 0;
    char *own = (char *)data + (size_t)comm->rank * slice_numel * sw_dtype_size_bytes(dtype);
    SW_TRY(as_reduced(dtype, op, &nccl_dtype, &nccl_op, &slice_numel, err));
    NCCL_CALL(comm, err, "reduce_scatter",
              ncclReduceScatter(data, own, slice_numel, nccl_dtype, nccl_op, comm->handle,
                                cuda_stream(stream)));
    return SW_OK;
}

sw_status sw_nccl_all_gather(sw_nccl *comm, void *data, size_t slice_numel, sw_dtype dtype,
                             sw_stream *stream, sw_error *err)
{
    char *own = (char *)data + (size_t)comm->rank * slice_numel * sw_dtype_size_bytes(dtype);
    int nccl_dtype = as_moved(dtype, &slice_numel);
    NCCL_CALL(comm, err, "all_gather",
              ncclAllGather(own, data, slice_numel, nccl_dtype, comm->handle, cuda_stream(stream)));
    return SW_OK;
}

sw_status sw_nccl_gather_slices(sw_nccl *comm, const void *slice, void *data, size_t slice_bytes,
                                sw_stream *stream, sw_error *err)
{
    NCCL_CALL(
        comm, err, "all_gather",
        ncclAllGather(slice, data, slice_bytes, SW_NCCL_UINT8, comm->handle, cuda_stream(stream)));
    return SW_OK;
}

/* One slice to a peer, one from it. */
static sw_status exchange_with(sw_nccl *comm, int peer, const char *to_send, char *to_receive,
                               size_t slice_bytes, sw_stream *stream, sw_error *err)
{
    NCCL_CALL(
        comm, err, "send of a slice",
        ncclSend(to_send, slice_bytes, SW_NCCL_UINT8, peer, comm->handle, cuda_stream(stream)));
    NCCL_CALL(
        comm, err, "receive of a slice",
        ncclRecv(to_receive, slice_bytes, SW_NCCL_UINT8, peer, comm->handle, cuda_stream(stream)));
    return SW_OK;
}

static sw_status end_exchange(sw_nccl *comm, sw_status status, sw_error *err)
{
    sw_status ended = sw_nccl_group_end(comm, status == SW_OK ? err : NULL);
    return status != SW_OK ? status : ended;
}

sw_status sw_nccl_exchange_slices(sw_nccl *comm, const void *data, void *contributions,
                                  size_t slice_numel, sw_dtype dtype, const int *slice_of_rank,
                                  sw_stream *stream, sw_error *err)
{
    size_t slice_bytes = slice_numel * sw_dtype_size_bytes(dtype);
    sw_status status = SW_OK;
    if (comm->world_size == 1 || slice_bytes == 0)
        return has_failed(comm) ? refuse_failed(comm, err) : SW_OK;
    SW_TRY(sw_nccl_group_begin(comm, err));
    for (int peer = 0; peer < comm->world_size && status == SW_OK; ++peer) {
        size_t slice = (size_t)(slice_of_rank ? slice_of_rank[peer] : peer);
        if (peer != comm->rank)
            status = exchange_with(comm, peer, (const char *)data + slice * slice_bytes,
                                   (char *)contributions + (size_t)peer * slice_bytes, slice_bytes,
                                   stream, err);
    }
    return end_exchange(comm, status, err);
}

sw_status sw_nccl_gather_among(sw_nccl *comm, void *data, size_t slice_bytes, const int *ranks,
                               int count, sw_stream *stream, sw_error *err)
{
    const char *own = NULL;
    sw_status status = SW_OK;
    for (int k = 0; k < count; ++k)
        if (ranks[k] == comm->rank)
            own = (char *)data + (size_t)k * slice_bytes;
    if (count == 1 || slice_bytes == 0)
        return has_failed(comm) ? refuse_failed(comm, err) : SW_OK;
    SW_TRY(sw_nccl_group_begin(comm, err));
    for (int k = 0; k < count && status == SW_OK; ++k)
        if (ranks[k] != comm->rank)
            status = exchange_with(comm, ranks[k], own, (char *)data + (size_t)k * slice_bytes,
                                   slice_bytes, stream, err);
    return end_exchange(comm, status, err);
}

sw_status sw_nccl_broadcast(sw_nccl *comm, void *data, size_t numel, sw_dtype dtype, int root,
                            sw_stream *stream, sw_error *err)
{
    if (root < 0 || root >= comm->world_size)
        SW_FAIL(err, SW_E_INVALID, "NCCL broadcast: root must be in [0, %d), not %d",
                comm->world_size, root);
    int nccl_dtype = as_moved(dtype, &numel);
    NCCL_CALL(
        comm, err, "broadcast",
        ncclBroadcast(data, data, numel, nccl_dtype, root, comm->handle, cuda_stream(stream)));
    return SW_OK;
}

/* ---- waiting ---- */

sw_status sw_nccl_check(sw_nccl *comm, sw_error *err)
{
    sw_nccl_result result = SW_NCCL_SUCCESS;
    if (!has_failed(comm))
        SW_TRY(check_request(comm, err));
    NCCL_CALL(comm, err, "query", ncclCommGetAsyncError(comm->handle, &result));
    if (result == SW_NCCL_SUCCESS || result == SW_NCCL_IN_PROGRESS)
        return SW_OK;
    return fail_result(comm, result, "an operation", err);
}

sw_status sw_nccl_give_up(sw_nccl *comm, const char *what, sw_error *err)
{
    return has_failed(comm) ? refuse_failed(comm, err) : fail_late(comm, what, err);
}

void sw_nccl_abort(sw_nccl *comm, const sw_error *reason)
{
    if (!has_failed(comm))
        (void)!fail(comm, reason, NULL);
}

/* While a call of NCCL's is under way or a group is open, the thread that has it ends the
 * communicator. Otherwise nothing in NCCL needs it: the program may be blocked in a launch that
 * waits for NCCL's kernels. */
void sw_nccl_request_end(sw_nccl *comm, const sw_error *reason)
{
    sw_ending_say(&comm->ending, SW_MEMBER_ENDED, reason);
    if (pthread_mutex_trylock(&comm->calls) != 0)
        return;
    bool is_free = comm->handle && comm->depth == 0;
    sw_nccl_comm handle = is_free ? take_handle(comm) : NULL;
    pthread_mutex_unlock(&comm->calls);
    if (!is_free)
        return;
    tell(comm, reason);
    abort_handle(comm, handle);
}

sw_status sw_nccl_watch(sw_nccl *comm, sw_error *err)
{
    sw_nccl_result asked = SW_NCCL_SUCCESS, result = SW_NCCL_SUCCESS;
    sw_error reason;
    if (sw_ending_read(&comm->ending, &reason) != SW_OK) {
        sw_nccl_request_end(comm, &reason);
        return refuse_failed(comm, err);
    }
    if (pthread_mutex_trylock(&comm->calls) != 0)
        return SW_OK;
    if (comm->handle)
        asked = comm->library->call.ncclCommGetAsyncError(comm->handle, &result);
    pthread_mutex_unlock(&comm->calls);
    result = asked == SW_NCCL_SUCCESS ? result : asked;
    if (result == SW_NCCL_SUCCESS || result == SW_NCCL_IN_PROGRESS)
        return SW_OK;
    explain(comm, result, "an operation", &reason);
    sw_nccl_request_end(comm, &reason);
    return refuse_failed(comm, err);
}

sw_status sw_nccl_wait(sw_nccl *comm, sw_event *event, const char *what, sw_error *err)
{
    int64_t start = sw_clock_now_ns();
    comm->device->stats.host_waits++;
    for (;;) {
        bool done;
        sw_error reason;
        if (comm->device->ops->event_query(comm->device, event, &done, &reason) != SW_OK)
            return fail_driver(comm, what, &reason, err);
        if (done)
            return sw_nccl_check(comm, err);
        SW_TRY(sw_nccl_check(comm, err));
        if (sw_clock_now_ns() - start > comm->timeout_ns)
            return fail_late(comm, what, err);
        SW_TRY(look_out(comm, start, what, err));
        sw_thread_rest(sw_clock_now_ns() - start);
    }
}
