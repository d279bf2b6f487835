/* arena_type.c - shardwright._engine.Arena, and tensors over its memory.
 *
 * A tensor over engine memory is made from a DLPack capsule whose deleter drops a reference on the
 * Arena: the pages live as long as the last tensor. */
#include <stdlib.h>
#include <string.h>

#include "python/dlpack_abi.h"
#include "python/method.h"

static const uint8_t dl_codes[SW_DTYPE_COUNT] = {[SW_DTYPE_FLOAT16] = DL_FLOAT,
                                                 [SW_DTYPE_BFLOAT16] = DL_BFLOAT,
                                                 [SW_DTYPE_FLOAT32] = DL_FLOAT,
                                                 [SW_DTYPE_FLOAT64] = DL_FLOAT,
                                                 [SW_DTYPE_INT8] = DL_INT,
                                                 [SW_DTYPE_INT16] = DL_INT,
                                                 [SW_DTYPE_INT32] = DL_INT,
                                                 [SW_DTYPE_INT64] = DL_INT,
                                                 [SW_DTYPE_UINT8] = DL_UINT,
                                                 [SW_DTYPE_BOOL] = DL_BOOL,
                                                 [SW_DTYPE_COMPLEX64] = DL_COMPLEX,
                                                 [SW_DTYPE_COMPLEX128] = DL_COMPLEX,
                                                 [SW_DTYPE_FLOAT8_E4M3FN] = DL_FLOAT8_E4M3FN,
                                                 [SW_DTYPE_FLOAT8_E4M3FNUZ] = DL_FLOAT8_E4M3FNUZ,
                                                 [SW_DTYPE_FLOAT8_E5M2] = DL_FLOAT8_E5M2,
                                                 [SW_DTYPE_FLOAT8_E5M2FNUZ] = DL_FLOAT8_E5M2FNUZ,
                                                 [SW_DTYPE_FLOAT8_E8M0FNU] = DL_FLOAT8_E8M0FNU};

static void managed_delete(dl_managed_tensor *managed)
{
    if (Py_IsInitialized()) { /* at interpreter exit the kernel frees the pages */
        SW_PY_GIL(gil);
        Py_DECREF((PyObject *)managed->context);
    }
    free(managed);
}

static void capsule_delete(PyObject *capsule)
{
    /* A consumer renames the capsule when it takes ownership of the tensor. */
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        dl_managed_tensor *managed = PyCapsule_GetPointer(capsule, "dltensor");
        managed->deleter(managed);
    }
}

/* Counts the elements, and the bytes up to the last that the strides reach. Returns false if a
 * number overflows. */
static bool measure(sw_py_layout *of)
{
    size_t last = 0, far;
    of->numel = 1;
    for (size_t i = 0; i < of->ndim; ++i) {
        bool is_empty = of->sizes[i] == 0 || of->numel == 0;
        if (__builtin_mul_overflow(of->numel, (size_t)of->sizes[i], &of->numel) ||
            (!is_empty &&
             (__builtin_mul_overflow((size_t)of->sizes[i] - 1, (size_t)of->strides[i], &far) ||
              __builtin_add_overflow(last, far, &last))))
            return false;
    }
    of->bytes = 0;
    return of->numel == 0 ||
           (!__builtin_add_overflow(last, 1, &last) &&
            !__builtin_mul_overflow(last, sw_dtype_size_bytes(of->dtype), &of->bytes));
}

/* Sets the strides of a dense array, C order. Returns false if one overflows. */
static bool set_dense(sw_py_layout *of)
{
    int64_t stride = 1;
    for (size_t i = of->ndim; i-- > 0;) {
        of->strides[i] = stride;
        if (__builtin_mul_overflow(stride, of->sizes[i] > 0 ? of->sizes[i] : 1, &stride))
            return false;
    }
    return true;
}

bool sw_py_layout_init(sw_py_layout *layout, sw_dtype dtype, PyObject *shape, PyObject *strides,
                       const char *what)
{
    SW_PY_TABLE sizes = {0}, steps = {0};
    *layout = (sw_py_layout){.dtype = dtype};
    if (!sw_py_table_init(&sizes, shape, "shape size:N", sizeof(int64_t), sw_py_fill_size, NULL) ||
        (strides != Py_None && !sw_py_table_init(&steps, strides, "strides stride:N",
                                                 sizeof(int64_t), sw_py_fill_size, NULL)))
        return false;
    if (sizes.count > SW_PY_TENSOR_DIMS_MAX)
        return sw_py_refuse(PyExc_ValueError, "shape must have at most %d dimensions, got %zu",
                            SW_PY_TENSOR_DIMS_MAX, sizes.count);
    if (strides != Py_None && steps.count != sizes.count)
        return sw_py_refuse(PyExc_ValueError, "strides must have %zu values, as shape has, got %zu",
                            sizes.count, steps.count);
    layout->ndim = sizes.count;
    memcpy(layout->sizes, sizes.rows, sizes.count * sizeof(int64_t));
    if (steps.count)
        memcpy(layout->strides, steps.rows, steps.count * sizeof(int64_t));
    return ((strides != Py_None || set_dense(layout)) && measure(layout)) ||
           sw_py_refuse(PyExc_ValueError, "%s: shape overflows the address space", what);
}

PyObject *sw_py_dlpack_capsule_on(int ordinal, PyObject *owner, void *address,
                                  const sw_py_layout *layout)
{
    size_t sizes_bytes = layout->ndim * sizeof(int64_t);
    dl_managed_tensor *managed = calloc(1, sizeof *managed + 2 * sizes_bytes);
    if (!managed)
        return PyErr_NoMemory();
    sw_dtype dtype = layout->dtype;
    int64_t *sizes = (int64_t *)(managed + 1);
    *managed = (dl_managed_tensor){
        .tensor = {.data = address,
                   .device_type = ordinal < 0 ? DL_CPU : DL_CUDA,
                   .device_id = ordinal < 0 ? 0 : ordinal,
                   .ndim = (int32_t)layout->ndim,
                   .code = dl_codes[dtype],
                   .bits = (uint8_t)(dtype == SW_DTYPE_BOOL ? 8 : sw_dtype_size_bytes(dtype) * 8),
                   .lanes = 1,
                   .shape = sizes,
                   .strides = sizes + layout->ndim},
        .context = owner,
        .deleter = managed_delete};
    memcpy(sizes, layout->sizes, sizes_bytes);
    memcpy(sizes + layout->ndim, layout->strides, sizes_bytes);
    PyObject *capsule = PyCapsule_New(managed, "dltensor", capsule_delete);
    if (capsule)
        Py_INCREF(owner);
    else
        free(managed);
    return capsule;
}

PyObject *sw_py_arena_object_new(engine_state *state, comm_object *owner, sw_arena *arena,
                                 sw_gradient_memory *memory)
{
    arena_object *made = PyObject_New(arena_object, state->arena_type);
    if (!made)
        return NULL;
    Py_INCREF(owner);
    made->owner = owner;
    made->arena = arena;
    made->memory = memory;
    sw_py_comm_acquire(owner);
    return (PyObject *)made;
}

sw_arena *sw_py_arena_of(const void *op, PyObject *arena)
{
    return Py_TYPE(arena) == sw_py_state_of(op)->arena_type ? ((arena_object *)arena)->arena : NULL;
}

static void arena_dealloc(PyObject *op)
{
    arena_object *self = (arena_object *)op;
    SW_PY_ASIDE(pending); /* a signal handler may raise as a closed communicator is destroyed */
    if (self->arena)
        self->owner->comm->ops->arena_destroy(self->owner->comm, self->arena);
    sw_gradient_memory_destroy(self->memory);
    sw_py_comm_release(self->owner);
    Py_DECREF(self->owner);
    sw_py_free(op);
}

static uint8_t *arena_base(const arena_object *self)
{
    return self->arena ? self->arena->base[self->owner->comm->rank] : self->memory->base;
}

static size_t arena_size(const arena_object *self)
{
    return self->arena ? self->arena->size_bytes : self->memory->size_bytes;
}

static PyObject *arena_tensor(PyObject *op, PyObject *args)
{
    const arena_object *self = (arena_object *)op;
    sw_py_arg a[5] = {[3] = {.o = Py_None}, [4] = {.i = -1}};
    sw_py_layout layout;
    if (!sw_py_read("Arena.tensor offset_bytes:n dtype:T shape:O | strides:O rank:i", args, NULL,
                    a))
        return NULL;
    int rank = a[4].i;
    if (rank != -1 && (!self->arena || rank < 0 || rank >= self->arena->world_size))
        return PyErr_Format(PyExc_ValueError, "Arena.tensor: rank must be in [0, %d), got %d",
                            self->arena ? self->arena->world_size : 0, rank);
    if (!sw_py_layout_init(&layout, a[1].dtype, a[2].o, a[3].o, "Arena.tensor"))
        return NULL;
    if (a[0].n < 0 || a[0].size > arena_size(self) || layout.bytes > arena_size(self) - a[0].size)
        return PyErr_Format(PyExc_ValueError,
                            "Arena.tensor: [%zd, +%zu) bytes leave the arena of %zu", a[0].n,
                            layout.bytes, arena_size(self));
    uint8_t *base = rank == -1 ? arena_base(self) : self->arena->base[rank];
    if (!base)
        return PyErr_Format(PyExc_ValueError,
                            "Arena.tensor: the part of rank %d is on another host", rank);
    return sw_py_dlpack_capsule_on(-1, op, base + a[0].n, &layout);
}

SW_PY_GETTER(arena_get_nbytes, arena_object, PyLong_FromSize_t(arena_size(self)))
SW_PY_GETTER(arena_get_address, arena_object, PyLong_FromVoidPtr(arena_base(self)))

static PyMethodDef arena_methods[] = {
    SW_PY_ARGS(arena, tensor, "offset_bytes, dtype, shape, strides=None, rank=-1, /",
               "Return a DLPack capsule over this rank's part, or over a peer's."),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef arena_properties[] = {
    {"nbytes", arena_get_nbytes, NULL, "bytes on each rank", NULL},
    {"address", arena_get_address, NULL, "address of this rank's part", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

SW_PY_TYPE(sw_py_arena_type_spec, "Arena", arena_object, Py_TPFLAGS_DISALLOW_INSTANTIATION,
           "Memory of one size on every rank, mapped by all of them. Made by HostComm.arena().",
           {Py_tp_dealloc, arena_dealloc}, {Py_tp_methods, arena_methods},
           {Py_tp_getset, arena_properties})
