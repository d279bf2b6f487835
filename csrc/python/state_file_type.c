/* state_file_type.c - shardwright._engine.StateFile: optimizer state in a file, mapped as tensors.
 *
 * A tensor over the file keeps an owner that the caller chose alive, and the owner keeps the
 * StateFile alive: the mapping lives as long as the last tensor. */
#include <stdlib.h>

#include "optim/offload.h"
#include "python/method.h"
#include "python/owner.h"
#include "zero/store.h"

static sw_offload *offload_of(const sw_py_owner *self)
{
    return self->made;
}

static void destroy(void *offload)
{
    sw_offload_fini(offload);
    free(offload);
}

static int state_file_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    sw_py_owner *self = (sw_py_owner *)op;
    sw_py_arg a[3];
    PyObject *encoded = NULL;
    sw_error err;
    if (!sw_py_read("StateFile folder:O label:s buffer_bytes:N", args, kwargs, a) ||
        !PyUnicode_FSConverter(a[0].o, &encoded))
        return -1;
    SW_PY_OWNED *folder = encoded;
    if (!sw_py_use_make(&self->use, "StateFile"))
        return -1;
    sw_offload *made = calloc(1, sizeof *made);
    if (!made) {
        PyErr_NoMemory();
        return -1;
    }
    const char *path = PyBytes_AsString(folder);
    sw_status status = SW_PY_WITHOUT_GIL(sw_offload_init(made, path, a[1].s, a[2].size, &err));
    if (status != SW_OK) {
        free(made);
        made = NULL;
    }
    return sw_py_owner_made(self, made, destroy, status, &err);
}

static bool enter(sw_py_owner *self, sw_py_use_kind kind)
{
    return (self->made || sw_py_refuse(PyExc_RuntimeError, "StateFile: not made yet")) &&
           sw_py_use_enter(&self->use, kind, SW_PY_PATIENCE_NS, PyExc_RuntimeError, "StateFile",
                           "");
}

/* Leaves, and returns the address, unless that is NULL, or None. */
static PyObject *finish(sw_py_owner *self, sw_status status, uint8_t *address, const sw_error *err)
{
    sw_py_use_leave(&self->use);
    return status == SW_OK && address ? PyLong_FromVoidPtr(address)
                                      : sw_py_finish(self, status, err);
}

SW_PY_METHOD_WITH(state_file_grow, sw_py_owner, "grow nbytes:N", uint8_t *address = NULL,
                  enter(self, SW_PY_ALONE),
                  sw_state_file_grow(&offload_of(self)->file, a[0].size, &address, &err),
                  finish(self, status, address, &err))

static PyObject *state_file_tensor(PyObject *op, PyObject *args)
{
    sw_py_owner *self = (sw_py_owner *)op;
    sw_py_arg a[5];
    sw_py_layout layout;
    if (!sw_py_read("StateFile.tensor address:A dtype:T shape:O strides:O owner:O", args, NULL,
                    a) ||
        !sw_py_layout_init(&layout, a[1].dtype, a[2].o, a[3].o, "StateFile.tensor") ||
        !enter(self, SW_PY_SHARED))
        return NULL;
    uint64_t place = sw_state_file_locate(&offload_of(self)->file, a[0].address, layout.bytes);
    sw_py_use_leave(&self->use);
    if (place == UINT64_MAX)
        return PyErr_Format(PyExc_ValueError, "StateFile.tensor: %zu bytes leave the file",
                            layout.bytes);
    return sw_py_dlpack_capsule_on(-1, a[4].o, a[0].address, &layout);
}

SW_PY_METHOD(state_file_forget, sw_py_owner, "forget", enter(self, SW_PY_ALONE),
             (sw_state_file_forget(&offload_of(self)->file), SW_OK),
             finish(self, status, NULL, &err))

static PyObject *state_file_let_go(PyObject *op, PyObject *args)
{
    sw_py_owner *self = (sw_py_owner *)op;
    sw_py_arg a[1];
    if (!sw_py_read("StateFile.let_go store:O", args, NULL, a))
        return NULL;
    sw_py_owner *store = (sw_py_owner *)a[0].o;
    if (Py_TYPE(store) != sw_py_state_of(op)->store_type || !store->made)
        return PyErr_Format(PyExc_TypeError, "StateFile.let_go: store must be a Store");
    if (!enter(self, SW_PY_ALONE))
        return NULL;
    offload_of(self)->home = sw_store_file(store->made);
    sw_py_use_leave(&self->use);
    sw_py_set(&self->kept[0], Py_NewRef((PyObject *)store));
    return sw_py_none();
}

SW_PY_METHOD(state_file_store, sw_py_owner, "store address:A source:A nbytes:N",
             enter(self, SW_PY_SHARED),
             sw_offload_store(offload_of(self), a[0].address, a[1].address, a[2].size, &err),
             finish(self, status, NULL, &err))

SW_PY_METHOD(state_file_fetch, sw_py_owner, "fetch address:A target:A nbytes:N",
             enter(self, SW_PY_SHARED),
             sw_offload_fetch(offload_of(self), a[0].address, a[1].address, a[2].size, &err),
             finish(self, status, NULL, &err))

SW_PY_GETTER(get_nbytes, sw_py_owner,
             PyLong_FromUnsignedLongLong(self->made ? offload_of(self)->file.size_bytes : 0))
SW_PY_GETTER(get_buffer_nbytes, sw_py_owner,
             PyLong_FromSize_t(self->made ? SW_OFFLOAD_BUFFERS * offload_of(self)->buffer_bytes
                                          : 0))
SW_PY_GETTER(get_direct, sw_py_owner,
             PyBool_FromLong(self->made &&sw_state_file_is_direct(&offload_of(self)->file)))

static PyMethodDef state_file_methods[] = {
    SW_PY_ARGS(state_file, grow, "nbytes, /", "Append zeroed bytes; return their address."),
    SW_PY_ARGS(state_file, tensor, "address, dtype, shape, strides, owner, /",
               "Return a DLPack capsule that keeps owner alive."),
    SW_PY_ARGS(state_file, store, "address, source, nbytes, /",
               "Write memory to whole pages of the file."),
    SW_PY_ARGS(state_file, fetch, "address, target, nbytes, /", "Read what store() wrote."),
    SW_PY_ARGS(state_file, let_go, "store, /",
               "Let pages of stepped parameters that lie in the Store's file go, batch by batch."),
    SW_PY_ARGS(state_file, forget, "/", "Drop the file's pages from this process's memory."),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef state_file_properties[] = {
    {"nbytes", get_nbytes, NULL, "of the file", NULL},
    {"buffer_nbytes", get_buffer_nbytes, NULL, "bytes of the buffers that a step uses", NULL},
    {"direct", get_direct, NULL, "True if steps bypass the page cache", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

SW_PY_TYPE(sw_py_state_file_type_spec, "StateFile", sw_py_owner, 0,
           "Optimizer state in a file without a name, seen as memory.",
           {Py_tp_init, state_file_init}, {Py_tp_dealloc, sw_py_owner_dealloc},
           {Py_tp_methods, state_file_methods}, {Py_tp_getset, state_file_properties})
