/* arena_type.c - shardwright._engine.Arena, and tensors over its memory.
 *
 * A tensor over engine memory is made from a DLPack capsule whose deleter drops a reference on the
 * Arena: the pages live as long as the last tensor. */
#include <stdlib.h>

#include "platform/memory.h"
#include "python/dlpack_abi.h"
#include "python/engine.h"

static uint8_t dl_code(sw_dtype dtype)
{
    switch (dtype) {
    case SW_DTYPE_BFLOAT16:
        return DL_BFLOAT;
    case SW_DTYPE_INT8:
    case SW_DTYPE_INT16:
    case SW_DTYPE_INT32:
    case SW_DTYPE_INT64:
        return DL_INT;
    case SW_DTYPE_UINT8:
        return DL_UINT;
    case SW_DTYPE_COMPLEX64:
    case SW_DTYPE_COMPLEX128:
        return DL_COMPLEX;
    case SW_DTYPE_BOOL:
        return DL_BOOL;
    default:
        return DL_FLOAT;
    }
}

static void managed_delete(dl_managed_tensor *managed)
{
    if (Py_IsInitialized()) { /* at interpreter exit the kernel frees the pages */
        PyGILState_STATE gil = PyGILState_Ensure();
        Py_DECREF((PyObject *)managed->context);
        PyGILState_Release(gil);
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

static int read_sizes(PyObject *sizes, int64_t *out, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject *item = PySequence_GetItem(sizes, i);
        out[i] = item ? PyLong_AsLongLong(item) : -1;
        Py_XDECREF(item);
        if (PyErr_Occurred())
            return -1;
    }
    return 0;
}

static void contiguous_strides(const int64_t *shape, int64_t *strides, Py_ssize_t count)
{
    int64_t stride = 1;
    for (Py_ssize_t i = count; i-- > 0;) {
        strides[i] = stride;
        stride *= shape[i] > 0 ? shape[i] : 1;
    }
}

PyObject *sw_py_dlpack_capsule_new(PyObject *owner, void *address, sw_dtype dtype, PyObject *shape,
                                   PyObject *strides)
{
    return sw_py_dlpack_capsule_on(-1, owner, address, dtype, shape, strides);
}

PyObject *sw_py_dlpack_capsule_on(int ordinal, PyObject *owner, void *address, sw_dtype dtype,
                                  PyObject *shape, PyObject *strides)
{
    Py_ssize_t count = PySequence_Size(shape);
    if (count < 0)
        return NULL;
    dl_managed_tensor *managed =
        calloc(1, sizeof *managed + 2 * (size_t)(count + 1) * sizeof(int64_t));
    if (!managed)
        return PyErr_NoMemory();
    int64_t *sizes = (int64_t *)(managed + 1);
    managed->tensor.data = address;
    managed->tensor.device_type = ordinal < 0 ? DL_CPU : DL_CUDA;
    managed->tensor.device_id = ordinal < 0 ? 0 : ordinal;
    managed->tensor.ndim = (int32_t)count;
    managed->tensor.code = dl_code(dtype);
    managed->tensor.bits = (uint8_t)(dtype == SW_DTYPE_BOOL ? 8 : sw_dtype_size_bytes(dtype) * 8);
    managed->tensor.lanes = 1;
    managed->tensor.shape = sizes;
    managed->tensor.strides = sizes + count;
    managed->deleter = managed_delete;
    managed->context = owner;
    contiguous_strides(sizes, sizes + count, 0);
    if (read_sizes(shape, sizes, count) < 0)
        goto failed;
    contiguous_strides(sizes, sizes + count, count);
    if (strides != Py_None) {
        if (PySequence_Size(strides) != count) {
            PyErr_Format(PyExc_ValueError, "strides must have %zd values, as shape has, got %zd",
                         count, PySequence_Size(strides));
            goto failed;
        }
        if (read_sizes(strides, sizes + count, count) < 0)
            goto failed;
    }
    PyObject *capsule = PyCapsule_New(managed, "dltensor", capsule_delete);
    if (!capsule)
        goto failed;
    Py_INCREF(owner);
    return capsule;
failed:
    free(managed);
    return NULL;
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

static void arena_dealloc(PyObject *op)
{
    arena_object *self = (arena_object *)op;
    PyTypeObject *type = Py_TYPE(op);
    if (self->arena)
        self->owner->comm->ops->arena_destroy(self->owner->comm, self->arena);
    sw_gradient_memory_destroy(self->memory);
    sw_py_comm_release(self->owner);
    Py_DECREF(self->owner);
    PyObject_Free(op);
    Py_DECREF(type);
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
    arena_object *self = (arena_object *)op;
    Py_ssize_t offset;
    const char *name;
    PyObject *shape, *strides = Py_None;
    int rank = -1;
    if (!PyArg_ParseTuple(args, "nsO|Oi:tensor", &offset, &name, &shape, &strides, &rank))
        return NULL;
    if (rank != -1 && (!self->arena || rank < 0 || rank >= self->arena->world_size))
        return PyErr_Format(PyExc_ValueError, "Arena.tensor: rank must be in [0, %d), got %d",
                            self->arena ? self->arena->world_size : 0, rank);
    sw_dtype dtype = sw_dtype_from_name(name);
    if (dtype == SW_DTYPE_COUNT)
        return PyErr_Format(PyExc_ValueError,
                            "Arena.tensor: dtype '%s' is not one the engine moves", name);
    Py_ssize_t count = PySequence_Size(shape);
    size_t bytes = sw_dtype_size_bytes(dtype);
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject *item = PySequence_GetItem(shape, i);
        size_t size = item ? PyLong_AsSize_t(item) : 0;
        Py_XDECREF(item);
        if (PyErr_Occurred())
            return NULL;
        if (__builtin_mul_overflow(bytes, size, &bytes))
            return PyErr_Format(PyExc_ValueError,
                                "Arena.tensor: shape overflows the address space");
    }
    if (count < 0)
        return NULL;
    if (offset < 0 || (size_t)offset > arena_size(self) ||
        bytes > arena_size(self) - (size_t)offset)
        return PyErr_Format(PyExc_ValueError,
                            "Arena.tensor: [%zd, +%zu) bytes leave the arena of %zu", offset, bytes,
                            arena_size(self));
    uint8_t *base = rank == -1 ? arena_base(self) : self->arena->base[rank];
    if (!base)
        return PyErr_Format(PyExc_ValueError,
                            "Arena.tensor: the part of rank %d is on another host", rank);
    return sw_py_dlpack_capsule_new(op, base + offset, dtype, shape, strides);
}

static PyObject *arena_protect(PyObject *op, PyObject *args)
{
    arena_object *self = (arena_object *)op;
    int writable;
    sw_error err;
    if (!PyArg_ParseTuple(args, "p:protect", &writable))
        return NULL;
    for (int r = 0; self->arena && r < self->arena->world_size; ++r) {
        uint8_t *base = self->arena->base[r];
        if (base && sw_memory_protect(base, self->arena->size_bytes, writable, &err) != SW_OK)
            return sw_py_raise(sw_py_state_of(op), &err, self->owner);
    }
    Py_RETURN_NONE;
}

static PyObject *arena_populate(PyObject *op, PyObject *args)
{
    arena_object *self = (arena_object *)op;
    Py_ssize_t offset, nbytes;
    if (!PyArg_ParseTuple(args, "nn:populate", &offset, &nbytes))
        return NULL;
    if (offset < 0 || nbytes < 0 || (size_t)offset > arena_size(self) ||
        (size_t)nbytes > arena_size(self) - (size_t)offset)
        return PyErr_Format(PyExc_ValueError,
                            "Arena.populate: [%zd, +%zd) bytes leave the arena of %zu", offset,
                            nbytes, arena_size(self));
    if (nbytes > 0) {
        Py_BEGIN_ALLOW_THREADS
        sw_memory_populate(arena_base(self) + offset, (size_t)nbytes);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static PyObject *arena_get_nbytes(PyObject *op, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(arena_size((arena_object *)op));
}

static PyObject *arena_get_address(PyObject *op, void *unused)
{
    (void)unused;
    return PyLong_FromVoidPtr(arena_base((arena_object *)op));
}

static PyMethodDef arena_methods[] = {
    {"tensor", arena_tensor, METH_VARARGS,
     "tensor($self, offset_bytes, dtype, shape, strides=None, rank=-1, /)\n--\n\n"
     "Return a DLPack capsule over this rank's part, or over a peer's."},
    {"protect", arena_protect, METH_VARARGS,
     "protect($self, writable, /)\n--\n\n"
     "Allow or forbid this process to write to the parts that it maps; a forbidden write is a "
     "SIGSEGV."},
    {"populate", arena_populate, METH_VARARGS,
     "populate($self, offset_bytes, nbytes, /)\n--\n\n"
     "Allocate the pages of this rank's part now, as huge pages if the kernel can."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef arena_properties[] = {
    {"nbytes", arena_get_nbytes, NULL, "bytes on each rank", NULL},
    {"address", arena_get_address, NULL, "address of this rank's part", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot arena_slots[] = {
    {Py_tp_dealloc, arena_dealloc},
    {Py_tp_methods, arena_methods},
    {Py_tp_getset, arena_properties},
    {Py_tp_doc,
     "Memory of one size on every rank, mapped by all of them. Made by HostComm.arena()."},
    {0, NULL},
};

PyType_Spec sw_py_arena_type_spec = {
    .name = "shardwright._engine.Arena",
    .basicsize = sizeof(arena_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = arena_slots,
};
