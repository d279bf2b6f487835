/* engine.h - declarations shared by the files of the extension module. CPython's limited API
 * of 3.10 only.
 *
 * Idea: plain C first (csrc/reduce, csrc/comm), then the object, its methods, its slots; one type
 * per file. No global state: exceptions and types live in the module's state. Calls that may wait
 * release the GIL.
 *
 * Thread rule: with the GIL held, unless stated. */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

/* PyType_Slot stores functions in void pointers: CPython's idiom, which ISO C does not define. */
#pragma GCC diagnostic ignored "-Wpedantic"

#include "base/status.h"
#include "checkpoint/manifest.h"
#include "checkpoint/plan.h"
#include "comm/account.h"
#include "comm/comm.h"
#include "comm/hier.h"
#include "comm/local.h"
#include "python/arguments.h"
#include "python/use.h"
#include "reduce/gradient_memory.h"
#include "reduce/reducer.h"

typedef struct engine_state {
    PyObject *error, *comm_error, *comm_timeout_error, *checkpoint_error;
    PyObject *newer_checkpoint_error;
    PyTypeObject *arena_type, *comm_type, *reducer_type, *hook_type;
    PyTypeObject *plan_type, *saver_type, *folder_type, *store_type, *state_file_type;
    PyTypeObject *device_comm_type, *device_units_type, *device_offload_type;
    PyTypeObject *device_home_type, *device_stage_type, *codec_type, *exchange_type;
    struct comm_object *comms; /* borrowed: all live HostComms; comm_use.c */
    PyObject *on_step;         /* owned, or NULL: called after each on_step_every-th row */
    unsigned long long on_step_every;
} engine_state;

typedef struct comm_object {
    PyObject_HEAD sw_comm *comm; /* owned; NULL during connect() and once closed */
    sw_local_group *group;       /* owned; at world size 1 */
    PyObject *log;               /* owned, or NULL */
    PyObject *interrupted;       /* owned, or NULL: called in waits, raises what ends them */
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

/* slices.c: parses None, or (of_rank, replica_of_rank). Returns -1 with an exception. */
typedef struct sw_py_slices {
    sw_slices slices;
    int *numbers;           /* owned */
    const sw_slices *given; /* `slices`; NULL: one slice per rank */
} sw_py_slices;
int sw_py_slices_init(sw_py_slices *slices, PyObject *given, int world_size);
void sw_py_slices_fini(sw_py_slices *slices);
#define SW_PY_SLICES __attribute__((cleanup(sw_py_slices_fini))) sw_py_slices

/* errors.c. In all of them `op` is an instance of one of our types, such a type, or the module. */
int sw_py_errors_init(PyObject *module, engine_state *state);
/* Sets the Python exception for `err` and returns NULL. `comm` names the peer's host, and may be
 * NULL. The second raises CheckpointError with `errno` (None unless a system call failed), or
 * MemoryError. */
PyObject *sw_py_raise(const void *op, const sw_error *err, const comm_object *comm);
PyObject *sw_py_raise_checkpoint(const void *op, const sw_error *err);
/* Returns None, or NULL with the exception of `err`. */
PyObject *sw_py_finish(const void *op, sw_status status, const sw_error *err);
/* The same for checkpoints; leaves `use` first, unless that is NULL. */
PyObject *sw_py_finish_checkpoint(const void *op, sw_py_use *use, sw_status status,
                                  const sw_error *err);
/* Returns a str of text that may quote names in any language, or bytes of a name that are no UTF-8:
 * a decoding error must not replace what is reported. */
PyObject *sw_py_text(const char *text);

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

/* comm_use.c: the communicators that a forked child inherits. */
void sw_py_comm_link(engine_state *state, comm_object *self);
void sw_py_comm_unlink(engine_state *state, const comm_object *self);

/* comm_join.c: methods */
PyObject *sw_py_comm_connect(PyObject *op, PyObject *args, PyObject *kwargs);
PyObject *sw_py_comm_extend(PyObject *op, PyObject *args, PyObject *kwargs);

/* arena_type.c */
/* Returns the memory of an Arena that ranks share; NULL, without an exception, for other objects.
 * `op`: as above. */
sw_arena *sw_py_arena_of(const void *op, PyObject *arena);
/* Takes ownership of `arena` or `memory` on success. */
PyObject *sw_py_arena_object_new(engine_state *state, comm_object *owner, sw_arena *arena,
                                 sw_gradient_memory *memory);
/* A shape and its strides, read once, so that what was checked is what a tensor gets. */
enum { SW_PY_TENSOR_DIMS_MAX = 64 }; /* torch's own limit */
typedef struct sw_py_layout {
    sw_dtype dtype;
    size_t ndim, numel, bytes; /* bytes: up to the last that it reaches */
    int64_t sizes[SW_PY_TENSOR_DIMS_MAX], strides[SW_PY_TENSOR_DIMS_MAX];
} sw_py_layout;
/* Reads them; strides of None are those of a dense array. Returns false with an exception, which
 * begins with `what` where a number overflows. */
bool sw_py_layout_init(sw_py_layout *layout, sw_dtype dtype, PyObject *shape, PyObject *strides,
                       const char *what);
/* Makes a DLPack capsule over elements at `address`, of which the caller has checked the bytes, on
 * GPU `ordinal` or, for -1, on the CPU. Its tensor keeps `owner` alive. */
PyObject *sw_py_dlpack_capsule_on(int ordinal, PyObject *owner, void *address,
                                  const sw_py_layout *layout);

/* hook_type.c: a hook's link to its reducer, which may be freed first. The GIL guards the count. */
typedef struct reducer_link {
    struct reducer_object *reducer; /* borrowed; NULL once it is gone */
    Py_ssize_t references;
} reducer_link;
void sw_py_reducer_link_release(reducer_link *link);
PyObject *sw_py_hook_object_new(engine_state *state, reducer_link *link, size_t index);
/* gradient_round.c: the body of a hook: takes the gradient of parameter `index`. Returns -1 with an
 * exception. */
int sw_py_reducer_take_gradient(struct reducer_object *self, size_t index, PyObject *param);

/* checkpoint_plan_type.c */
typedef struct plan_object {
    PyObject_HEAD sw_plan *plan; /* owned */
    int lock_fd;                 /* owned descriptor of the folder that create() made; -1: none */
    char *partial;               /* owned path of that folder; NULL: not made yet */
    sw_py_use use;               /* shared by a save that is under way with it */
} plan_object;
/* Enters a plan, or raises CheckpointError. */
bool sw_py_plan_enter(plan_object *self, sw_py_use_kind kind);
/* Merges lists of what ranks wrote. Returns -1 with an exception, or sets *err. */
int sw_py_add_tallies(PyObject *lists, sw_manifest *manifest, sw_error *err);

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
 * view (sparse, ...). The bytes are those before a lazy conjugation or negation. */
bool sw_py_tensor_view_get(const void *table, PyObject *tensor, tensor_view *view);

/* Reads data_ptr(). Returns false with an exception, and then NULL. */
bool sw_py_tensor_address(PyObject *tensor, void **address);

/* Reads a tensor through `table` if that is not NULL, else through data_ptr(), shape and stride().
 * Returns false with an exception that begins with `what` if the tensor has no such memory (sparse,
 * ...), an unknown dtype, or, unless `anywhere`, a device other than the CPU. Shape and strides are
 * borrowed from the tensor or from `out` itself. */
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

/* The module's types, each in the file of its name, and its functions. */
extern PyType_Spec sw_py_arena_type_spec, sw_py_comm_type_spec, sw_py_reducer_type_spec,
    sw_py_hook_type_spec, sw_py_store_type_spec, sw_py_state_file_type_spec,
    sw_py_checkpoint_plan_type_spec, sw_py_checkpoint_saver_type_spec,
    sw_py_checkpoint_folder_type_spec, sw_py_device_comm_type_spec, sw_py_device_units_type_spec,
    sw_py_device_offload_type_spec, sw_py_device_stage_type_spec, sw_py_codec_type_spec,
    sw_py_exchange_type_spec, sw_py_device_home_type_spec;
extern PyMethodDef sw_py_kernel_functions[], sw_py_optim_functions[], sw_py_compress_functions[],
    sw_py_device_functions[], sw_py_device_compress_functions[], sw_py_fork_functions[],
    sw_py_account_functions[], sw_py_marks_functions[];

/* module_state.c */
engine_state *sw_py_state_of(const void *op); /* an instance of our types, a type, or the module */
void *sw_py_alloc(PyTypeObject *type);        /* for tp_new: a zeroed object; NULL, exception */
void sw_py_free(PyObject *op);                /* the last of tp_dealloc */

/* Calls self.name(), self.name(a) or self.name(a, b). With Py_ssize_t lengths PyObject_CallMethod
 * expands to a private name, which the stable ABI lacks. */
PyObject *sw_py_call(void *self, const char *name, PyObject *a, PyObject *b);
PyObject *sw_py_call_at(void *self, const char *name, size_t index);

/* An exception that is set, put aside while a call runs that may raise one of its own. It replaces
 * that one; where none was set, the call's own stays. */
typedef struct sw_py_pending {
    PyObject *type, *value, *trace; /* owned */
} sw_py_pending;
sw_py_pending sw_py_set_aside(void);
void sw_py_bring_back(sw_py_pending *pending);
/* The same where nothing can raise: the call's own exception is reported. */
void sw_py_bring_back_quietly(sw_py_pending *pending);
void sw_py_let_go(sw_py_pending *pending);
/* Puts it aside, quietly, until the block ends. */
#define SW_PY_ASIDE(name)                                                           \
    __attribute__((cleanup(sw_py_bring_back_quietly), unused)) sw_py_pending name = \
        sw_py_set_aside()

/* Holds the GIL, on a thread of the engine, until the block ends. */
static inline void sw_py_release_gil(const PyGILState_STATE *gil)
{
    PyGILState_Release(*gil);
}
#define SW_PY_GIL(name) \
    __attribute__((cleanup(sw_py_release_gil), unused)) PyGILState_STATE name = PyGILState_Ensure()
/* The opposite, for one expression. */
#define SW_PY_DO_WITHOUT_GIL(expression) \
    do {                                 \
        Py_BEGIN_ALLOW_THREADS           \
        expression;                      \
        Py_END_ALLOW_THREADS             \
    } while (0)

/* Drops the reference of a local variable that ends, as in SW_PY_OWNED *list = PyList_New(0); */
static inline void sw_py_drop(PyObject **object)
{
    Py_XDECREF(*object);
}
#define SW_PY_OWNED __attribute__((cleanup(sw_py_drop))) PyObject

/* Clears *object before it drops the reference, so that a destructor cannot see it. */
#define ENGINE_CLEAR(object)                          \
    do {                                              \
        PyObject *engine_old_ = (PyObject *)(object); \
        (object) = NULL;                              \
        Py_XDECREF(engine_old_);                      \
    } while (0)

/* Returns bytes in place of what a method finished with, whose reference it takes, unless that is
 * NULL. */
PyObject *sw_py_bytes_if(PyObject *finished, const void *data, size_t size_bytes);

/* Appends `item`, whose reference it takes; NULL, with an exception, or a failure clears *list. */
void sw_py_append(PyObject **list, PyObject *item);
/* The same for a dict. */
void sw_py_put(PyObject **dict, const char *key, PyObject *value);
/* A list of `count` items, the expression `item` of the index `i`; NULL with an exception. */
#define SW_PY_LIST(i, count, item)                               \
    __extension__({                                              \
        PyObject *sw_list_ = PyList_New(0);                      \
        for (size_t i = 0; sw_list_ && i < (size_t)(count); ++i) \
            sw_py_append(&sw_list_, item);                       \
        sw_list_;                                                \
    })

/* Stores `value` and then drops the old object, whose destructor may run any code. */
void sw_py_set(PyObject **slot, PyObject *value);
/* The same, or stores NULL for None. */
void sw_py_set_or_clear(PyObject **slot, PyObject *value);
/* Returns a new reference to an item: code that runs meanwhile may take it out of the list. NULL
 * with an exception. */
PyObject *sw_py_item(PyObject *list, size_t index);
