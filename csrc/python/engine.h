/* engine.h - declarations shared by the files of the extension module. CPython's limited API
 * of 3.10 only.
 *
 * Idea: plain C first (csrc/reduce, csrc/comm), then the object, its methods, its slots; one type
 * per file. No global state: exceptions and types live in the module's state. Calls that may wait
 * release the GIL.
 *
 * Thread rule: with the GIL held, unless stated. */
#ifndef SW_PYTHON_ENGINE_H
#define SW_PYTHON_ENGINE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

/* PyType_Slot stores functions in void pointers: CPython's idiom, which ISO C does not define. */
#pragma GCC diagnostic ignored "-Wpedantic"

#include "base/status.h"
#include "checkpoint/manifest.h"
#include "checkpoint/plan.h"
#include "comm/comm.h"
#include "comm/hier.h"
#include "comm/local.h"
#include "python/use.h"
#include "reduce/gradient_memory.h"
#include "reduce/reducer.h"

typedef struct engine_state {
    PyObject *error, *comm_error, *comm_timeout_error, *checkpoint_error;
    PyObject *newer_checkpoint_error;
    PyTypeObject *arena_type, *comm_type, *reducer_type, *hook_type;
    PyTypeObject *plan_type, *saver_type, *folder_type, *units_type, *state_file_type;
    PyTypeObject *device_comm_type, *device_units_type, *device_offload_type;
    PyTypeObject *device_stage_type;
    struct comm_object *comms; /* borrowed: all live HostComms; fork.c */
} engine_state;

typedef struct comm_object {
    PyObject_HEAD sw_comm *comm; /* owned; NULL during connect() and once closed */
    sw_local_group *group;       /* owned; at world size 1 */
    PyObject *log;               /* owned, or NULL */
    PyObject *hosts;             /* owned list of str; NULL before connect */
    char address[64];
    int rank, world_size; /* as passed by the caller */
    sw_py_use use;
    Py_ssize_t
        users; /* arenas, reducers and calls that need comm; the last destroys a closed one */
    bool connected, closed;
    bool spans_hosts;         /* comm is over a map of hosts (comm/hier) */
    struct comm_object *next; /* in engine_state.comms */
} comm_object;

typedef struct arena_object {         /* an owner of memory: an arena, or a reducer's gradients */
    PyObject_HEAD comm_object *owner; /* owned */
    sw_arena *arena;                  /* owned; or */
    sw_gradient_memory *memory;       /* owned */
} arena_object;

/* wire.c: makes a wire from `group`, which has send(rank, tag, address, nbytes) and receive(...),
 * both returning a work for wait(work), and close(gently), which returns true once no transfer is
 * running. release() frees the wire. Returns NULL with an exception. */
const sw_wire *sw_py_wire_new(PyObject *group);

/* slices.c: parses None, or (of_rank, replica_of_rank). Returns -1 with an exception, and then
 * needs no fini. */
typedef struct sw_py_slices {
    sw_slices slices;
    int *numbers; /* owned; NULL: one slice per rank */
} sw_py_slices;
int sw_py_slices_init(sw_py_slices *slices, PyObject *given, int world_size);
void sw_py_slices_fini(sw_py_slices *slices);
const sw_slices *sw_py_slices_get(const sw_py_slices *slices);

/* errors.c */
int sw_py_errors_init(PyObject *module, engine_state *state);
/* Sets the Python exception for `err` and returns NULL. `comm` names the peer's host, and may be
 * NULL. */
PyObject *sw_py_raise(engine_state *state, const sw_error *err, const comm_object *comm);

/* Ends a function of the module: returns None, or NULL with the exception of `err`. */
PyObject *sw_py_finish(PyObject *module, sw_status status, const sw_error *err);

/* Raises CheckpointError with `errno` (None unless a system call failed), or MemoryError. Returns
 * NULL. */
PyObject *sw_py_raise_checkpoint(engine_state *state, const sw_error *err);

/* Returns a str of text that may quote names in any language, or bytes of a name that are no UTF-8:
 * a decoding error must not replace what is reported. */
PyObject *sw_py_text(const char *text);

/* module_state.c */
engine_state *sw_py_state_of(PyObject *self); /* `self` is an instance of one of our types */

/* Calls self.name(), self.name(a) or self.name(a, b). With Py_ssize_t lengths PyObject_CallMethod
 * expands to a private name, which the stable ABI lacks. */
static inline PyObject *sw_py_call(PyObject *self, const char *name, PyObject *a, PyObject *b)
{
    PyObject *method = PyObject_GetAttrString(self, name);
    PyObject *result = method ? PyObject_CallFunctionObjArgs(method, a, b, NULL) : NULL;
    Py_XDECREF(method);
    return result;
}

static inline PyObject *sw_py_call_at(PyObject *self, const char *name, size_t index)
{
    PyObject *position = PyLong_FromSize_t(index);
    PyObject *result = position ? sw_py_call(self, name, position, NULL) : NULL;
    Py_XDECREF(position);
    return result;
}

/* comm_type.c */
extern PyType_Spec sw_py_comm_type_spec;

/* comm_use.c */
/* Marks the communicator as in use by this thread. Returns false with an exception if it is closed,
 * not joined, in use by another thread, or inherited by a forked child. A concurrent close() ends
 * the call inside, and sw_py_comm_leave() destroys the communicator. */
bool sw_py_comm_enter(comm_object *self);
void sw_py_comm_leave(comm_object *self);
/* Does the same before the rank has joined, for connect(). */
bool sw_py_comm_enter_to_join(comm_object *self);
void sw_py_comm_acquire(comm_object *self);
void sw_py_comm_release(comm_object *self);
/* Leaves the communicator. Returns None, or NULL with the exception of `err`. */
PyObject *sw_py_comm_finish(comm_object *self, sw_status status, const sw_error *err);

/* fork.c: the communicators that a forked child inherits. */
void sw_py_comm_link(engine_state *state, comm_object *self);
void sw_py_comm_unlink(engine_state *state, const comm_object *self);
extern PyMethodDef sw_py_fork_functions[];
/* object_marks.c */
extern PyMethodDef sw_py_marks_functions[];

/* comm_waits.c: about waits */
/* Returns false with an exception. */
bool sw_py_read_warn_after(double seconds, _Atomic int64_t *warn_after_ns);
PyObject *sw_py_comm_get_waits(PyObject *op, void *unused);
int sw_py_comm_set_waits(PyObject *op, PyObject *value, void *unused);
PyObject *sw_py_comm_get_dead(PyObject *op, void *unused);
PyObject *sw_py_comm_peer(PyObject *op, PyObject *args);

/* comm_join.c: methods */
PyObject *sw_py_comm_connect(PyObject *op, PyObject *args, PyObject *kwargs);
PyObject *sw_py_comm_extend(PyObject *op, PyObject *args, PyObject *kwargs);

/* arena_type.c */
extern PyType_Spec sw_py_arena_type_spec;
/* Takes ownership of `arena` or `memory` on success. */
PyObject *sw_py_arena_object_new(engine_state *state, comm_object *owner, sw_arena *arena,
                                 sw_gradient_memory *memory);
/* Multiplies the sizes of a shape, and the dtype's. Returns false with an exception that begins
 * with `what`. */
bool sw_py_shape_bytes(PyObject *shape, sw_dtype dtype, const char *what, size_t *bytes);
/* Makes a DLPack capsule over elements at `address`. Its tensor keeps `owner` alive. */
PyObject *sw_py_dlpack_capsule_new(PyObject *owner, void *address, sw_dtype dtype, PyObject *shape,
                                   PyObject *strides);
/* Makes the same on GPU `ordinal`, or on the CPU if that is -1. */
PyObject *sw_py_dlpack_capsule_on(int ordinal, PyObject *owner, void *address, sw_dtype dtype,
                                  PyObject *shape, PyObject *strides);

/* reducer_type.c, hook_type.c */
extern PyType_Spec sw_py_reducer_type_spec;
extern PyType_Spec sw_py_hook_type_spec;

/* A hook's link to its reducer, which may be freed first. The GIL guards the count. */
typedef struct reducer_link {
    struct reducer_object *reducer; /* borrowed; NULL once it is gone */
    Py_ssize_t references;
} reducer_link;
void sw_py_reducer_link_release(reducer_link *link);
PyObject *sw_py_hook_object_new(engine_state *state, reducer_link *link, size_t index);
/* The body of a hook: takes the gradient of parameter `index`. Returns -1 with an exception. */
int sw_py_reducer_take_gradient(struct reducer_object *self, size_t index, PyObject *param);

/* checkpoint_plan_type.c, checkpoint_saver_type.c, checkpoint_folder_type.c */
typedef struct plan_object {
    PyObject_HEAD sw_plan *plan; /* owned */
    int lock_fd;                 /* owned descriptor of the folder that create() made; -1: none */
    char *partial;               /* owned path of that folder; NULL: not made yet */
    sw_py_use use;               /* shared by a save that is under way with it */
} plan_object;
/* checkpoint_plan_type.c: merges lists of what ranks wrote. Returns -1 with an exception, or sets
 * *err. */
int sw_py_add_tallies(PyObject *lists, sw_manifest *manifest, sw_error *err);
extern PyType_Spec sw_py_checkpoint_plan_type_spec;
extern PyType_Spec sw_py_checkpoint_saver_type_spec;
extern PyType_Spec sw_py_checkpoint_folder_type_spec;

/* units_type.c */
extern PyType_Spec sw_py_units_type_spec;

/* kernels_module.c */
extern PyMethodDef sw_py_kernel_functions[];

/* tensor_access.c: data pointers of torch tensors without torch's headers. */
enum { TENSOR_CODE_COMPLEX = 5 }; /* dmlc/dlpack: kDLComplex */
typedef struct tensor_view {
    void *data;
    int ndim;
    int device_type;
    uint8_t code, bits;
    const int64_t *shape, *strides; /* borrowed from the tensor */
} tensor_view;
/* Returns torch's DLPack C exchange table from type(tensor); NULL without an exception where torch
 * has none. */
const void *sw_py_tensor_exchange_table(PyObject *tensor);
/* Reads a tensor through the table. Returns false without an exception if the tensor has no such
 * view (sparse, ...). The bytes are those before a lazy conjugation or negation.
 */
bool sw_py_tensor_view_get(const void *table, PyObject *tensor, tensor_view *view);

/* Reads data_ptr(). Returns false with an exception, and then NULL. */
bool sw_py_tensor_address(PyObject *tensor, void **address);

/* Reads a tensor through `table` if that is not NULL, else through data_ptr(), shape and stride().
 * Returns false with an exception that begins with `what` if the tensor has no such memory (sparse,
 * ...), an unknown dtype, or, unless `anywhere`, a device other than the CPU. Shape and strides are
 * borrowed from the tensor or from `out` itself. */
enum { SW_PY_TENSOR_DIMS_MAX = 64 }; /* torch's own limit */
typedef struct tensor_reading {
    void *data;
    size_t numel;
    sw_dtype dtype;
    int ndim;
    const int64_t *shape, *strides;
    int64_t own[2 * SW_PY_TENSOR_DIMS_MAX];
} tensor_reading;
bool sw_py_tensor_read(const void *table, PyObject *tensor, const char *what, Py_ssize_t index,
                       bool anywhere, tensor_reading *out);
/* Same shape; same strides of dimensions longer than one; one memory range without gaps or
 * overlaps. */
bool sw_py_tensor_same_shape(const tensor_reading *a, const tensor_reading *b);
bool sw_py_tensor_same_strides(const tensor_reading *a, const tensor_reading *b);
bool sw_py_tensor_is_dense(const tensor_reading *a);

/* state_file_type.c: a sw_py_owner (owner.h) of a sw_offload */
extern PyType_Spec sw_py_state_file_type_spec;

/* optim_module.c */
extern PyMethodDef sw_py_optim_functions[];

/* compress_module.c */
extern PyMethodDef sw_py_compress_functions[];

/* device_comm_type.c, device_units_type.c */
extern PyType_Spec sw_py_device_comm_type_spec;
extern PyType_Spec sw_py_device_units_type_spec;
extern PyType_Spec sw_py_device_offload_type_spec;
extern PyType_Spec sw_py_device_stage_type_spec;

/* device_module.c */
extern PyMethodDef sw_py_device_functions[];

/* device_codec_module.c */
extern PyMethodDef sw_py_device_codec_functions[];
extern PyMethodDef sw_py_device_powersgd_functions[];

/* Enters a plan, or raises CheckpointError. */
bool sw_py_plan_enter(plan_object *self, sw_py_use_kind kind);

/* Clears *object before it drops the reference, so that a destructor cannot see it. */
#define ENGINE_CLEAR(object)                          \
    do {                                              \
        PyObject *engine_old_ = (PyObject *)(object); \
        (object) = NULL;                              \
        Py_XDECREF(engine_old_);                      \
    } while (0)

/* Appends `item`, whose reference it takes; NULL, with an exception, or a failure clears *list. */
void sw_py_append(PyObject **list, PyObject *item);
/* The same for a dict. */
void sw_py_put(PyObject **dict, const char *key, PyObject *value);

/* Stores `value` and then drops the old object, whose destructor may run any code. */
static inline void sw_py_set(PyObject **slot, PyObject *value)
{
    PyObject *old = *slot;
    Py_INCREF(value);
    *slot = value;
    Py_XDECREF(old);
}

/* The same, or stores NULL for None. */
static inline void sw_py_set_or_clear(PyObject **slot, PyObject *value)
{
    if (value != Py_None)
        sw_py_set(slot, value);
    else
        ENGINE_CLEAR(*slot);
}

/* Returns a new reference to an item: code that runs meanwhile may take it out of the list. NULL
 * with an exception. */
static inline PyObject *sw_py_item(PyObject *list, size_t index)
{
    PyObject *item = PyList_GetItem(list, (Py_ssize_t)index);
    Py_XINCREF(item);
    return item;
}

#endif
