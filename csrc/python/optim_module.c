/* optim_module.c - the optimizers and the norm on lists of torch tensors.
 *
 * Idea: all arguments are read and checked first, with the GIL; the pass then processes runs of
 * addresses without it. Tuples keep the tensors alive meanwhile. Differing layouts are reported,
 * not refused: the caller rearranges the tensors and calls again. */
#include <stdlib.h>
#include <string.h>

#include "optim/device_step.h"
#include "optim/norm.h"
#include "optim/offload.h"
#include "optim/optim.h"
#include "python/method.h"
#include "python/owner.h"
#include "zero/device_offload.h"

enum {
    LIST_PARAMS,
    LIST_GRADS,
    LIST_FIRST,
    LIST_SECOND,
    LIST_MAXIMUM,
    LIST_STEPS,
    LIST_COPIES,
    LIST_COUNT
};

typedef struct step_call {
    const char *operation;
    const char *names[LIST_COUNT];
    char full_names[LIST_COUNT][64]; /* "adam_step: grads", for messages about one tensor */
    PyObject *lists[LIST_COUNT];     /* owned tuples; NULL if not passed */
    Py_ssize_t count;
    sw_optim_run *runs;   /* owned */
    void **steps;         /* owned; address of each step scalar */
    bool *wide_steps;     /* owned; float64 rather than float32 */
    PyObject *mismatched; /* owned list of indices */
    const void *table;
    sw_py_owner *file; /* borrowed; NULL if state is in memory */
    /* One of the two at most. `gpu`: all arrays but step counts are on the GPU. `offload`: only
     * gradients are, and copies, or parameters without copies. Borrowed. */
    device_comm_object *gpu;
    sw_device_offload *offload;
    sw_stream *stream;
    const void *clip;  /* a float32 on the GPU that first multiplies gradients, or NULL */
    PyObject *origins; /* borrowed; a number per parameter, or NULL: rounding is not random */
    const sw_adam_options *adam; /* borrowed; or */
    const sw_sgd_options *sgd;
} step_call;

static void step_call_fini(step_call *call)
{
    for (int k = 0; k < LIST_COUNT; ++k)
        ENGINE_CLEAR(call->lists[k]);
    ENGINE_CLEAR(call->mismatched);
    free(call->runs);
    free(call->steps);
    free(call->wide_steps);
}

static bool read_file(step_call *call, PyObject *module, PyObject *file)
{
    const engine_state *state = sw_py_state_of(module);
    if (file == Py_None)
        return true;
    if (Py_TYPE(file) != state->state_file_type)
        return sw_py_refuse(PyExc_TypeError, "%s: state_file must be a StateFile or None, not %R",
                            call->operation, (PyObject *)Py_TYPE(file));
    call->file = (sw_py_owner *)file;
    return call->file->made ||
           sw_py_refuse(PyExc_RuntimeError, "%s: the StateFile is not initialised",
                        call->operation);
}

/* Parses the place of the step: None for the CPU, (DeviceComm, stream), or (DeviceOffload, stream)
 * for the CPU while parameters are on a GPU. */
static bool read_place(step_call *call, PyObject *module, PyObject *place)
{
    const engine_state *state = sw_py_state_of(module);
    sw_py_arg a[2];
    if (place == Py_None)
        return true;
    if (!PyTuple_Check(place) || PyTuple_Size(place) != 2)
        return sw_py_refuse(PyExc_TypeError,
                            "gpu must be None or (DeviceComm or DeviceOffload, stream)");
    if (!sw_py_read("gpu comm:O stream:A", place, NULL, a))
        return false;
    bool offloads = PyObject_TypeCheck(a[0].o, state->device_offload_type);
    if (!offloads && (!PyObject_TypeCheck(a[0].o, state->device_comm_type) || call->file))
        return sw_py_refuse(
            PyExc_TypeError,
            "%s: gpu must be (DeviceComm or DeviceOffload, stream), with a StateFile "
            "(DeviceOffload, stream)",
            call->operation);
    call->offload = offloads ? ((sw_py_owner *)a[0].o)->made : NULL;
    call->gpu = offloads ? ((sw_py_owner *)a[0].o)->comm : (device_comm_object *)a[0].o;
    call->stream = a[1].address;
    return !offloads || call->offload ||
           sw_py_refuse(PyExc_RuntimeError, "%s: the DeviceOffload is not initialised",
                        call->operation);
}

static bool read_clip(step_call *call, const void *address)
{
    call->clip = address;
    return (!address || (call->gpu && !call->offload)) ||
           sw_py_refuse(PyExc_ValueError,
                        "%s: clip needs gpu=(DeviceComm, stream), whose kernels read it",
                        call->operation);
}

typedef struct array {
    void *data;
    sw_dtype dtype;
} array;

/* Returns true if tensors of a list are on the GPU. */
static bool is_on_gpu(const step_call *call, int list)
{
    if (!call->offload)
        return call->gpu && list != LIST_STEPS;
    return list == LIST_GRADS || list == LIST_COPIES ||
           (list == LIST_PARAMS && !call->lists[LIST_COPIES]);
}

static bool read_tensor(const step_call *call, int list, Py_ssize_t index, tensor_reading *out)
{
    const char *name = call->full_names[list];
    PyObject *tensor = PyTuple_GetItem(call->lists[list], index);
    if (!sw_py_tensor_read(call->table, tensor, name, index, is_on_gpu(call, list), out))
        return false;
    bool has_records = out->dtype == SW_DTYPE_UINT8 && (list == LIST_FIRST || list == LIST_SECOND);
    bool is_wide = out->dtype == SW_DTYPE_FLOAT64 && list != LIST_STEPS;
    if (is_wide || (out->dtype == SW_DTYPE_UINT8 && !has_records))
        return sw_py_refuse(PyExc_ValueError,
                            "%s[%zd] must be float32, bfloat16 or float16, not torch.%s", name,
                            index, sw_dtype_name(out->dtype));
    return true;
}

/* Accepts the records of a moment: (blocks, bytes of a record), without gaps. */
static bool read_records(const step_call *call, int list, Py_ssize_t index,
                         const tensor_reading *parameter, const tensor_reading *seen)
{
    int64_t blocks =
        (int64_t)((parameter->numel + SW_MOMENT_BLOCK_NUMEL - 1) / SW_MOMENT_BLOCK_NUMEL);
    bool fits = seen->ndim == 2 && seen->shape[0] == blocks &&
                seen->shape[1] == SW_MOMENT_RECORD_BYTES && seen->strides[1] == 1 &&
                (blocks < 2 || seen->strides[0] == SW_MOMENT_RECORD_BYTES);
    return fits ||
           sw_py_refuse(PyExc_ValueError, "%s: %s[%zd] of uint8 must be %lld records of %d bytes",
                        call->operation, call->names[list], index, (long long)blocks,
                        SW_MOMENT_RECORD_BYTES);
}

/* Reads one more array of parameter `index`. Different strides only mark the parameter as
 * mismatched. Returns false with an exception. */
static bool read_like(const step_call *call, int list, Py_ssize_t index,
                      const tensor_reading *parameter, array *out, bool *matches)
{
    tensor_reading seen;
    if (!read_tensor(call, list, index, &seen))
        return false;
    *out = (array){seen.data, seen.dtype};
    if (seen.dtype == SW_DTYPE_UINT8)
        return read_records(call, list, index, parameter, &seen);
    *matches = *matches && sw_py_tensor_same_strides(parameter, &seen);
    if (sw_py_tensor_same_shape(parameter, &seen))
        return true;
    SW_PY_OWNED *own = PyObject_GetAttrString(PyTuple_GetItem(call->lists[list], index), "shape");
    SW_PY_OWNED *wanted =
        PyObject_GetAttrString(PyTuple_GetItem(call->lists[LIST_PARAMS], index), "shape");
    return own && wanted &&
           sw_py_refuse(PyExc_ValueError,
                        "%s: %s[%zd] must have the shape of its parameter, %S, not %S",
                        call->operation, call->names[list], index, wanted, own);
}

static bool read_step(step_call *call, Py_ssize_t index, sw_optim_run *run)
{
    tensor_reading seen;
    double value;
    if (!read_tensor(call, LIST_STEPS, index, &seen))
        return false;
    if (seen.numel != 1 || (seen.dtype != SW_DTYPE_FLOAT32 && seen.dtype != SW_DTYPE_FLOAT64))
        return sw_py_refuse(
            PyExc_ValueError, "%s: steps[%zd] must be one float32 or float64, not %zd of %s",
            call->operation, index, (Py_ssize_t)seen.numel, sw_dtype_name(seen.dtype));
    call->steps[index] = seen.data;
    call->wide_steps[index] = seen.dtype == SW_DTYPE_FLOAT64;
    value = call->wide_steps[index] ? *(double *)seen.data : (double)*(float *)seen.data;
    if (!(value >= 0.0 && value < 9e15)) {
        SW_PY_OWNED *text = PyFloat_FromDouble(value);
        return text && sw_py_refuse(PyExc_ValueError, "%s: steps[%zd] must be at least 0, not %S",
                                    call->operation, index, text);
    }
    run->step = (int64_t)value + 1;
    return true;
}

static bool read_origin(const step_call *call, Py_ssize_t index, sw_optim_run *run)
{
    SW_PY_OWNED *origin = PySequence_GetItem(call->origins, index);
    run->is_random = origin != NULL;
    run->origin = origin ? PyLong_AsUnsignedLongLong(origin) : 0;
    return origin && !PyErr_Occurred();
}

static bool read_run(step_call *call, Py_ssize_t index)
{
    sw_optim_run *run = &call->runs[index];
    tensor_reading parameter;
    array arrays[LIST_COUNT] = {{.data = NULL}};
    bool matches = true;
    if (!read_tensor(call, LIST_PARAMS, index, &parameter))
        return false;
    if (!sw_py_tensor_is_dense(&parameter))
        return sw_py_refuse(
            PyExc_ValueError,
            "%s: params[%zd] must cover its memory without gaps or overlaps; its strides do not",
            call->operation, index);
    for (int list = LIST_GRADS; list < LIST_COUNT; ++list) {
        bool is_read = call->lists[list] && list != LIST_STEPS;
        if (is_read && !read_like(call, list, index, &parameter, &arrays[list], &matches))
            return false;
        if (is_read && (list == LIST_SECOND || list == LIST_MAXIMUM) &&
            arrays[list].dtype != arrays[LIST_FIRST].dtype)
            return sw_py_refuse(
                PyExc_ValueError, "%s: %s[%zd] must have the dtype of %s, %s, not %s",
                call->operation, call->names[list], index, call->names[LIST_FIRST],
                sw_dtype_name(arrays[LIST_FIRST].dtype), sw_dtype_name(arrays[list].dtype));
    }
    *run = (sw_optim_run){.p = parameter.data,
                          .numel = parameter.numel,
                          .p_dtype = parameter.dtype,
                          .step = 1,
                          .g = arrays[LIST_GRADS].data,
                          .g_dtype = arrays[LIST_GRADS].dtype,
                          .m = arrays[LIST_FIRST].data,
                          .v = arrays[LIST_SECOND].data,
                          .v_max = arrays[LIST_MAXIMUM].data,
                          .state_dtype = arrays[LIST_FIRST].dtype,
                          .copy = arrays[LIST_COPIES].data,
                          .copy_dtype = arrays[LIST_COPIES].dtype};
    if (call->lists[LIST_STEPS] && !read_step(call, index, run))
        return false;
    if (call->origins && !read_origin(call, index, run))
        return false;
    if (matches)
        return true;
    SW_PY_OWNED *number = PyLong_FromSsize_t(index);
    return number && PyList_Append(call->mismatched, number) == 0;
}

/* Reads the arguments, tuples of equal length, into runs. */
static bool step_call_init(step_call *call, PyObject *const *given)
{
    for (int k = 0; k < LIST_COUNT; ++k) {
        if (given[k] == NULL || given[k] == Py_None)
            continue;
        PyOS_snprintf(call->full_names[k], sizeof call->full_names[k], "%s: %s", call->operation,
                      call->names[k]);
        call->lists[k] = PySequence_Tuple(given[k]);
        if (!call->lists[k])
            return false;
        Py_ssize_t count = PyTuple_Size(call->lists[k]);
        call->count = k == LIST_PARAMS ? count : call->count;
        if (count != call->count)
            return sw_py_refuse(PyExc_ValueError,
                                "%s: %s must have one tensor a parameter, %zd, not %zd",
                                call->operation, call->names[k], call->count, count);
    }
    size_t room = call->count ? (size_t)call->count : 1;
    call->runs = calloc(room, sizeof *call->runs);
    call->steps = calloc(room, sizeof *call->steps);
    call->wide_steps = calloc(room, sizeof *call->wide_steps);
    call->mismatched = PyList_New(0);
    if (!call->runs || !call->steps || !call->wide_steps)
        return PyErr_NoMemory() != NULL;
    if (call->count)
        call->table = sw_py_tensor_exchange_table(PyTuple_GetItem(call->lists[LIST_PARAMS], 0));
    bool is_read = call->mismatched != NULL;
    for (Py_ssize_t i = 0; is_read && i < call->count; ++i)
        is_read = read_run(call, i);
    return is_read;
}

static void count_steps(const step_call *call)
{
    for (Py_ssize_t i = 0; i < call->count && call->lists[LIST_STEPS]; ++i) {
        if (call->wide_steps[i])
            *(double *)call->steps[i] += 1.0;
        else
            *(float *)call->steps[i] += 1.0f;
    }
}

static sw_status step_on_host(const void *given, const sw_optim_run *runs, size_t count,
                              sw_error *err)
{
    const step_call *call = given;
    return call->adam ? sw_adam_step(call->adam, runs, count, err)
                      : sw_sgd_step(call->sgd, runs, count, err);
}

/* Steps on the host for a GPU: gradients are copied down, parameters up. State may be in memory, or
 * read into a file's buffers. */
static sw_status step_for_gpu(const void *given, const sw_optim_run *runs, size_t count,
                              sw_error *err)
{
    const step_call *call = given;
    return sw_device_offload_step(call->offload, step_on_host, call, runs, count, call->stream,
                                  err);
}

/* Enqueues a step on the GPU. */
static sw_status step_on_gpu(const step_call *call, sw_error *err)
{
    const sw_kernel_set *kernels = &call->gpu->comm->kernels;
    size_t count = (size_t)call->count;
    if (call->origins)
        SW_FAIL(err, SW_E_INVALID,
                "%s: kernels of a GPU do not round at random: leave state_dtype out, or wrap with "
                "offload=\"cpu\"",
                call->operation);
    return call->adam ? sw_device_adam_step(kernels, call->adam, call->runs, count, call->clip,
                                            call->stream, err)
                      : sw_device_sgd_step(kernels, call->sgd, call->runs, count, call->clip,
                                           call->stream, err);
}

/* Steps without the GIL. All options and runs are checked before the first run is stepped on. */
static sw_status step_anywhere(const step_call *call, sw_error *err)
{
    sw_offload_step_fn *step = call->offload ? step_for_gpu : step_on_host;
    size_t count = (size_t)call->count;
    if (call->gpu && !call->offload)
        return step_on_gpu(call, err);
    SW_TRY(call->adam ? sw_adam_check(call->adam, call->runs, count, err)
                      : sw_sgd_check(call->sgd, call->runs, count, err));
    return call->file ? sw_offload_step(call->file->made, step, call, call->runs, count, err)
                      : step(call, call->runs, count, err);
}

/* Runs the step on the device of `call`. Returns false with an exception. */
static bool run_step(const step_call *call, PyObject *module)
{
    sw_error err;
    bool is_lent = call->gpu && !call->offload, is_entered = call->gpu && call->offload;
    if ((is_lent && !sw_py_device_lend_kernels(call->gpu)) ||
        (is_entered && !sw_py_device_enter(call->gpu)))
        return false;
    bool runs = !call->file || sw_py_use_enter(&call->file->use, SW_PY_ALONE, 0, PyExc_RuntimeError,
                                               "StateFile", "");
    sw_status status = runs ? SW_PY_WITHOUT_GIL(step_anywhere(call, &err)) : SW_E_STATE;
    if (runs && call->file)
        sw_py_use_leave(&call->file->use);
    if (is_entered)
        sw_py_device_leave(call->gpu);
    if (runs && status != SW_OK)
        sw_py_raise(module, &err, NULL);
    return status == SW_OK;
}

/* Reads state_file, gpu and clip, which both optimizers have last, and then the lists, and steps.
 * `step`: the number of the step where no list has it, or 0. */
static PyObject *take_step(step_call *call, PyObject *module, const sw_py_arg *last,
                           PyObject *const *given, int step)
{
    PyObject *result = NULL;
    if (read_file(call, module, last[0].o) && read_place(call, module, last[1].o) &&
        read_clip(call, last[2].address) && step_call_init(call, given)) {
        bool matches = PyList_Size(call->mismatched) == 0;
        for (Py_ssize_t i = 0; step && i < call->count; ++i)
            call->runs[i].step = step;
        if (!matches || run_step(call, module))
            sw_py_set(&result, call->mismatched);
        if (matches && result)
            count_steps(call);
    }
    step_call_fini(call);
    return result;
}

static PyObject *adam_step(PyObject *module, PyObject *args, PyObject *kwargs)
{
    step_call call = {.operation = "adam_step",
                      .names = {"params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs",
                                "steps", "copies"}};
    PyObject *given[LIST_COUNT];
    sw_py_arg a[20] = {
        [14] = {.d = 1.0}, [15] = {.o = Py_None}, [16] = {.o = Py_None}, [18] = {.o = Py_None}};
    if (!sw_py_read("adam_step params:O grads:O exp_avgs:O exp_avg_sqs:O max_exp_avg_sqs:O steps:O "
                    "copies:O $ lr:d beta1:d beta2:d eps:d weight_decay:d decoupled:p | maximize:p "
                    "grad_scale:d state_file:O gpu:O clip:A origins:O seed:K",
                    args, kwargs, a))
        return NULL;
    for (int k = 0; k < LIST_COUNT; ++k)
        given[k] = a[k].o;
    const sw_adam_options options = {.lr = a[7].d,
                                     .beta1 = a[8].d,
                                     .beta2 = a[9].d,
                                     .eps = a[10].d,
                                     .weight_decay = a[11].d,
                                     .decoupled = a[12].p,
                                     .maximize = a[13].p,
                                     .grad_scale = a[14].d,
                                     .amsgrad = given[LIST_MAXIMUM] != Py_None,
                                     .seed = a[19].word};
    call.adam = &options;
    call.origins = a[18].o == Py_None ? NULL : a[18].o;
    return take_step(&call, module, &a[15], given, 0);
}

static PyObject *sgd_step(PyObject *module, PyObject *args, PyObject *kwargs)
{
    step_call call = {.operation = "sgd_step",
                      .names = {"params", "grads", "momentum_buffers", "", "", "", "copies"}};
    sw_py_arg a[15] = {[11] = {.d = 1.0}, [12] = {.o = Py_None}, [13] = {.o = Py_None}};
    if (!sw_py_read("sgd_step params:O grads:O momentum_buffers:O copies:O $ lr:d momentum:d "
                    "dampening:d weight_decay:d nesterov:p first:p | maximize:p grad_scale:d "
                    "state_file:O gpu:O clip:A",
                    args, kwargs, a))
        return NULL;
    PyObject *const given[LIST_COUNT] = {[LIST_PARAMS] = a[0].o,
                                         [LIST_GRADS] = a[1].o,
                                         [LIST_FIRST] = a[2].o,
                                         [LIST_COPIES] = a[3].o};
    const sw_sgd_options options = {.lr = a[4].d,
                                    .momentum = a[5].d,
                                    .dampening = a[6].d,
                                    .weight_decay = a[7].d,
                                    .nesterov = a[8].p,
                                    .maximize = a[10].p,
                                    .grad_scale = a[11].d};
    call.sgd = &options;
    return take_step(&call, module, &a[12], given, a[9].p ? 1 : 2);
}

/* ---- the norm ---- */

static bool read_norm_arrays(PyObject *held, sw_norm_array *arrays)
{
    Py_ssize_t count = PyTuple_Size(held);
    const void *table = count ? sw_py_tensor_exchange_table(PyTuple_GetItem(held, 0)) : NULL;
    tensor_reading seen;
    for (Py_ssize_t i = 0; i < count; ++i) {
        if (!sw_py_tensor_read(table, PyTuple_GetItem(held, i), "norm_sum: tensors", i, false,
                               &seen))
            return false;
        if (!sw_py_tensor_is_dense(&seen))
            return sw_py_refuse(PyExc_ValueError,
                                "norm_sum: tensors[%zd] must cover its memory without gaps or "
                                "overlaps; its strides do not",
                                i);
        arrays[i] = (sw_norm_array){seen.data, seen.numel, seen.dtype};
    }
    return true;
}

static sw_status add_arrays(sw_norm_sum *sum, const sw_norm_array *arrays, size_t count,
                            sw_error *err)
{
    sw_norm_init(sum);
    sw_status status = sw_norm_add(sum, arrays, count, err);
    sw_norm_close(sum);
    return status;
}

static PyObject *norm_sum(PyObject *module, PyObject *tensors)
{
    sw_norm_sum sum;
    sw_error err;
    SW_PY_OWNED *held = PySequence_Tuple(tensors);
    size_t count = held ? (size_t)PyTuple_Size(held) : 0;
    sw_norm_array *arrays = held ? calloc(count + 1, sizeof *arrays) : NULL;
    PyObject *result = held && !arrays ? PyErr_NoMemory() : NULL;
    if (arrays && read_norm_arrays(held, arrays)) {
        sw_status status = SW_PY_WITHOUT_GIL(add_arrays(&sum, arrays, count, &err));
        result = sw_py_bytes_if(sw_py_finish(module, status, &err), &sum, sizeof sum);
    }
    free(arrays);
    return result;
}

static bool read_sum(PyObject *bytes, sw_norm_sum *sum)
{
    if (!PyBytes_Check(bytes) || PyBytes_Size(bytes) != sizeof *sum)
        return sw_py_refuse(
            PyExc_ValueError,
            "norm_value: a sum must be the %zd bytes that norm_sum() returned, not %R",
            (Py_ssize_t)sizeof *sum, (PyObject *)Py_TYPE(bytes));
    memcpy(sum, PyBytes_AsString(bytes), sizeof *sum);
    return true;
}

static PyObject *norm_value(PyObject *Py_UNUSED(module), PyObject *sums)
{
    sw_norm_sum total, one;
    SW_PY_OWNED *held = PySequence_Tuple(sums);
    sw_norm_init(&total);
    for (Py_ssize_t i = 0; held && i < PyTuple_Size(held); ++i) {
        if (!read_sum(PyTuple_GetItem(held, i), &one))
            return NULL;
        sw_norm_merge(&total, &one);
    }
    return held ? PyFloat_FromDouble(sw_norm_value(&total)) : NULL;
}

PyMethodDef sw_py_optim_functions[] = {
    SW_PY_FUNCTION_AS(adam_step, METH_VARARGS | METH_KEYWORDS,
                      "params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, copies, *, "
                      "lr, beta1, beta2, eps, weight_decay, decoupled, maximize=False, "
                      "grad_scale=1.0, state_file=None, gpu=None, clip=0, origins=None, seed=0",
                      "Take one step of Adam, or AdamW if decoupled. Return the indices of "
                      "parameters whose arrays have other strides; nothing was done if there are "
                      "any. gpu: (DeviceComm or DeviceOffload, stream). clip: the address of a "
                      "float32 on the GPU that multiplies gradients first. origins: a number per "
                      "parameter, its own << 40 plus that of its first element: second moments "
                      "and parameters without a copy are rounded at random where they are "
                      "bfloat16. Not on a GPU."),
    SW_PY_FUNCTION_AS(
        sgd_step, METH_VARARGS | METH_KEYWORDS,
        "params, grads, momentum_buffers, copies, *, lr, momentum, dampening, weight_decay, "
        "nesterov, first, maximize=False, grad_scale=1.0, state_file=None, gpu=None, clip=0",
        "Take one step of SGD, like adam_step. first: the momentum buffers become the gradient."),
    SW_PY_FUNCTION_AS(norm_sum, METH_O, "tensors, /",
                      "Return the exact sum of squares, as bytes that can be merged."),
    SW_PY_FUNCTION_AS(norm_value, METH_O, "sums, /",
                      "Return the square root of the total of all sums."),
    {NULL, NULL, 0, NULL},
};
