/* checkpoint_plan_type.c - shardwright._engine.CheckpointPlan: maps tensors' names, shapes and
 * sizes to files and offsets. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint/commit.h"
#include "checkpoint/save_lock.h"
#include "checkpoint/write.h"
#include "platform/file.h"
#include "python/engine.h"

/* Borrowed by sw_plan_create() while it runs. Python objects own the strings. */
typedef struct plan_input {
    sw_plan_group *groups;
    sw_plan_text *texts;
    sw_plan_tensor **tensors; /* one list per group */
    size_t group_count, text_count;
} plan_input;

static void input_fini(plan_input *input)
{
    for (size_t g = 0; input->tensors && g < input->group_count; ++g) {
        for (size_t i = 0; input->tensors[g] && i < input->groups[g].tensor_count; ++i)
            free((void *)(uintptr_t)input->tensors[g][i].shape);
        free(input->tensors[g]);
    }
    free(input->tensors);
    free(input->groups);
    free(input->texts);
}

static int read_shape(PyObject *shape, sw_plan_tensor *tensor)
{
    Py_ssize_t count = PySequence_Size(shape);
    int64_t *sizes = count < 0 ? NULL : calloc((size_t)count + 1, sizeof *sizes);
    if (!sizes) {
        if (count >= 0)
            PyErr_NoMemory();
        return -1;
    }
    tensor->shape = sizes;
    tensor->ndim = (int)count;
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject *item = PySequence_GetItem(shape, i);
        sizes[i] = item ? PyLong_AsLongLong(item) : -1;
        Py_XDECREF(item);
        if (PyErr_Occurred())
            return -1;
    }
    return 0;
}

static int read_holder(int number, sw_plan_holder *holder)
{
    if (number < SW_HELD_BY_ALL || number > SW_HELD_IN_PARTS) {
        PyErr_Format(PyExc_ValueError, "CheckpointPlan: holder must be in [0, 2], got %d", number);
        return -1;
    }
    *holder = (sw_plan_holder)number;
    return 0;
}

static int read_tensors(PyObject *tensors, sw_plan_group *group, sw_plan_tensor **list)
{
    Py_ssize_t count = PyList_Check(tensors) ? PyList_Size(tensors) : -1;
    if (count < 0) {
        PyErr_SetString(
            PyExc_TypeError,
            "CheckpointPlan: tensors must be a list of (name, dtype, shape, holder) tuples");
        return -1;
    }
    *list = calloc((size_t)count + 1, sizeof **list);
    if (!*list) {
        PyErr_NoMemory();
        return -1;
    }
    group->tensors = *list;
    group->tensor_count = (size_t)count;
    for (Py_ssize_t i = 0; i < count; ++i) {
        sw_plan_tensor *tensor = &(*list)[i];
        PyObject *shape;
        int holder;
        if (!PyArg_ParseTuple(PyList_GetItem(tensors, i), "ssOi", &tensor->name, &tensor->dtype,
                              &shape, &holder) ||
            read_shape(shape, tensor) < 0 || read_holder(holder, &tensor->holder) < 0)
            return -1;
    }
    return 0;
}

static int read_input(PyObject *groups, PyObject *texts, plan_input *input)
{
    input->group_count = (size_t)PyList_Size(groups);
    input->text_count = (size_t)PyList_Size(texts);
    input->groups = calloc(input->group_count + 1, sizeof *input->groups);
    input->tensors = calloc(input->group_count + 1, sizeof(sw_plan_tensor *));
    input->texts = calloc(input->text_count + 1, sizeof *input->texts);
    if (!input->groups || !input->tensors || !input->texts) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t g = 0; g < input->group_count; ++g) {
        sw_plan_group *group = &input->groups[g];
        PyObject *tensors;
        int numbered;
        unsigned long long max_file_bytes;
        if (!PyArg_ParseTuple(PyList_GetItem(groups, (Py_ssize_t)g), "spKsO", &group->stem,
                              &numbered, &max_file_bytes, &group->metadata, &tensors) ||
            read_tensors(tensors, group, &input->tensors[g]) < 0)
            return -1;
        group->is_numbered = numbered != 0;
        group->max_file_bytes = max_file_bytes;
    }
    for (size_t i = 0; i < input->text_count; ++i) {
        unsigned long long size_bytes;
        int holder;
        if (!PyArg_ParseTuple(PyList_GetItem(texts, (Py_ssize_t)i), "sKi", &input->texts[i].path,
                              &size_bytes, &holder) ||
            read_holder(holder, &input->texts[i].holder) < 0)
            return -1;
        input->texts[i].size_bytes = size_bytes;
    }
    return 0;
}

static PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *groups, *texts;
    plan_input input = {0};
    sw_error err = {0};
    sw_plan *plan = NULL;
    if (kwargs && PyDict_Size(kwargs) > 0)
        return PyErr_Format(PyExc_TypeError, "CheckpointPlan: no keyword is known");
    if (!PyArg_ParseTuple(args, "O!O!:CheckpointPlan", &PyList_Type, &groups, &PyList_Type, &texts))
        return NULL;
    sw_status status = SW_E_INVALID;
    if (read_input(groups, texts, &input) == 0)
        status = sw_plan_create(input.groups, input.group_count, input.texts, input.text_count,
                                &plan, &err);
    input_fini(&input);
    if (status != SW_OK)
        return PyErr_Occurred() ? NULL : sw_py_raise_checkpoint(PyType_GetModuleState(type), &err);
    plan_object *self = (plan_object *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) {
        sw_plan_destroy(plan);
        return NULL;
    }
    self->plan = plan;
    self->lock_fd = -1;
    return (PyObject *)self;
}

static void plan_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    (void)!sw_file_close(&((plan_object *)op)->lock_fd, "LOCK", NULL);
    sw_plan_destroy(((plan_object *)op)->plan);
    free(((plan_object *)op)->partial);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(op);
    Py_DECREF(type);
}

static PyObject *describe_file(const sw_plan *plan, const sw_plan_file *file)
{
    PyObject *pieces = PyList_New((Py_ssize_t)file->piece_count);
    for (size_t i = 0; pieces && i < file->piece_count; ++i) {
        const sw_plan_piece *piece = &plan->pieces[file->first_piece + i];
        PyObject *item =
            Py_BuildValue("(nKK)", (Py_ssize_t)piece->source, (unsigned long long)piece->begin,
                          (unsigned long long)piece->size_bytes);
        if (!item || PyList_SetItem(pieces, (Py_ssize_t)i, item) < 0)
            ENGINE_CLEAR(pieces);
    }
    return pieces ? Py_BuildValue("(sKKN)", file->path, (unsigned long long)file->size_bytes,
                                  (unsigned long long)file->first_block, pieces)
                  : NULL;
}

static PyObject *plan_files(PyObject *op, PyObject *unused)
{
    const sw_plan *plan = ((plan_object *)op)->plan;
    PyObject *files = PyList_New((Py_ssize_t)plan->file_count);
    (void)unused;
    for (size_t f = 0; files && f < plan->file_count; ++f) {
        PyObject *file = describe_file(plan, &plan->files[f]);
        if (!file || PyList_SetItem(files, (Py_ssize_t)f, file) < 0)
            ENGINE_CLEAR(files);
    }
    return files;
}

/* Sets the flag of each source that a range touches. */
static void mark_needed(const sw_plan *plan, const sw_plan_range *ranges, size_t count,
                        bool *needed)
{
    for (size_t i = 0; i < count; ++i) {
        const sw_plan_file *file = &plan->files[ranges[i].file];
        size_t end = file->first_piece + file->piece_count;
        for (size_t p = sw_plan_find_piece(plan, file, ranges[i].begin);
             p < end && plan->pieces[p].begin < ranges[i].end; ++p)
            needed[plan->pieces[p].source] |= plan->pieces[p].size_bytes > 0;
    }
}

static int check_rank(const char *call, int rank, int world_size)
{
    if (rank >= 0 && rank < world_size)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s: rank must be in [0, world_size), got %d of %d", call, rank,
                 world_size);
    return -1;
}

static PyObject *plan_needed(PyObject *op, PyObject *args)
{
    const sw_plan *plan = ((plan_object *)op)->plan;
    int rank, world_size;
    sw_plan_range *ranges = NULL;
    size_t count = 0;
    sw_error err = {0};
    if (!PyArg_ParseTuple(args, "ii:needed", &rank, &world_size) ||
        check_rank("needed", rank, world_size) < 0)
        return NULL;
    if (sw_plan_own_ranges(plan, rank, world_size, &ranges, &count, &err) != SW_OK)
        return sw_py_raise_checkpoint(sw_py_state_of(op), &err);
    bool *needed = calloc(plan->source_count + 1, sizeof *needed);
    PyObject *result = needed ? PyList_New(0) : PyErr_NoMemory();
    if (needed)
        mark_needed(plan, ranges, count, needed);
    for (size_t i = 0; result && i < plan->source_count; ++i) {
        PyObject *index = needed[i] ? PyLong_FromSize_t(i) : NULL;
        if (needed[i] && (!index || PyList_Append(result, index) < 0))
            ENGINE_CLEAR(result);
        Py_XDECREF(index);
    }
    free(needed);
    free(ranges);
    return result;
}

static PyObject *plan_trim(PyObject *op, PyObject *args)
{
    int rank, world_size;
    unsigned long long keep_bytes = 0;
    if (!PyArg_ParseTuple(args, "ii|K:trim", &rank, &world_size, &keep_bytes) ||
        check_rank("trim", rank, world_size) < 0)
        return NULL;
    sw_plan_trim(((plan_object *)op)->plan, rank, world_size, keep_bytes);
    Py_RETURN_NONE;
}

static PyObject *plan_get_digest(PyObject *op, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLong(((plan_object *)op)->plan->digest);
}

static PyObject *plan_create(PyObject *op, PyObject *args)
{
    plan_object *self = (plan_object *)op;
    const char *partial;
    sw_error err = {0};
    sw_status status;
    if (!PyArg_ParseTuple(args, "s:create", &partial))
        return NULL;
    if (self->lock_fd >= 0)
        return PyErr_Format(PyExc_ValueError,
                            "create: commit or abandon this plan's folder first, got '%s'",
                            partial);
    char *kept = strdup(partial);
    if (!kept)
        return PyErr_NoMemory();
    free(self->partial);
    self->partial = kept;
    Py_BEGIN_ALLOW_THREADS
    status = sw_partial_create(self->plan, kept, &self->lock_fd, &err);
    Py_END_ALLOW_THREADS
    if (status != SW_OK)
        return sw_py_raise_checkpoint(sw_py_state_of(op), &err);
    Py_RETURN_NONE;
}

static PyObject *plan_abandon(PyObject *op, PyObject *unused)
{
    plan_object *self = (plan_object *)op;
    (void)unused;
    if (self->lock_fd < 0) /* already committed or abandoned */
        Py_RETURN_NONE;
    Py_BEGIN_ALLOW_THREADS
    sw_partial_abandon(self->partial, &self->lock_fd);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *plan_create_files(PyObject *op, PyObject *args)
{
    const char *folder;
    sw_error err = {0};
    sw_status status;
    if (!PyArg_ParseTuple(args, "s:create_files", &folder))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sw_plan_create_files(((plan_object *)op)->plan, folder, &err);
    if (status == SW_OK)
        status = sw_plan_write_headers(((plan_object *)op)->plan, folder, NULL, &err);
    Py_END_ALLOW_THREADS
    if (status != SW_OK)
        return sw_py_raise_checkpoint(sw_py_state_of(op), &err);
    Py_RETURN_NONE;
}

/* Parses [(begin, nbytes)]. Returns NULL with an exception. */
static sw_write_range *read_ranges(PyObject *list)
{
    Py_ssize_t count = PyList_Size(list);
    sw_write_range *ranges = calloc((size_t)count + 1, sizeof *ranges);
    if (!ranges)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; ranges && i < count; ++i) {
        unsigned long long begin, size_bytes;
        if (!PyArg_ParseTuple(PyList_GetItem(list, i), "KK", &begin, &size_bytes)) {
            free(ranges);
            return NULL;
        }
        ranges[i] = (sw_write_range){begin, size_bytes};
    }
    return ranges;
}

static PyObject *plan_write(PyObject *type, PyObject *args)
{
    const char *path;
    unsigned long long size_bytes, first_block, address;
    PyObject *list;
    sw_tally_list tallies = {0};
    sw_error err = {0};
    sw_status status;
    if (!PyArg_ParseTuple(args, "sKKO!K:write", &path, &size_bytes, &first_block, &PyList_Type,
                          &list, &address))
        return NULL;
    sw_write_range *ranges = read_ranges(list);
    if (!ranges)
        return NULL;
    size_t count = (size_t)PyList_Size(list);
    sw_write_file file = {path, size_bytes, first_block};
    Py_BEGIN_ALLOW_THREADS
    status =
        sw_checkpoint_write(&file, ranges, count, (const void *)(uintptr_t)address, &tallies, &err);
    Py_END_ALLOW_THREADS
    free(ranges);
    PyObject *result = NULL;
    if (status == SW_OK)
        result =
            PyBytes_FromStringAndSize((const char *)tallies.data, (Py_ssize_t)tallies.size_bytes);
    else
        sw_py_raise_checkpoint(PyType_GetModuleState((PyTypeObject *)type), &err);
    sw_tally_list_fini(&tallies);
    return result;
}

static PyObject *plan_sync(PyObject *type, PyObject *args)
{
    const char *path;
    int fd = -1;
    sw_error err = {0};
    sw_status status;
    if (!PyArg_ParseTuple(args, "s:sync", &path))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sw_file_open_write(path, false, &fd, &err);
    if (status == SW_OK)
        status = sw_file_sync(fd, path, &err);
    sw_status closed = sw_file_close(&fd, path, status == SW_OK ? &err : NULL);
    status = status == SW_OK ? closed : status;
    Py_END_ALLOW_THREADS
    if (status != SW_OK)
        return sw_py_raise_checkpoint(PyType_GetModuleState((PyTypeObject *)type), &err);
    Py_RETURN_NONE;
}

int sw_py_add_tallies(PyObject *lists, sw_manifest *manifest, sw_error *err)
{
    for (Py_ssize_t i = 0; i < PyList_Size(lists); ++i) {
        char *data;
        Py_ssize_t size_bytes;
        if (PyBytes_AsStringAndSize(PyList_GetItem(lists, i), &data, &size_bytes) < 0 ||
            sw_tally_list_read((const uint8_t *)data, (size_t)size_bytes, sw_manifest_add_tally,
                               manifest, err) != SW_OK)
            return -1;
    }
    return 0;
}

static PyObject *plan_commit(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"folder",     "replaces", "nonce",   "step",
                            "world_size", "tallies",  "creator", NULL};
    const sw_plan *plan = ((plan_object *)op)->plan;
    const char *folder, *replaces, *nonce;
    unsigned long long step;
    PyObject *lists;
    plan_object *creator;
    sw_manifest manifest = {0};
    sw_error err = {0};
    sw_status status = SW_OK;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$szsKiO!O!:commit", names, &folder, &replaces,
                                     &nonce, &step, &manifest.world_size, &PyList_Type, &lists,
                                     sw_py_state_of(op)->plan_type, &creator))
        return NULL;
    if (creator->lock_fd < 0)
        return PyErr_Format(PyExc_ValueError,
                            "commit: `creator` holds no folder of create() for '%s'", folder);
    const char *partial = creator->partial;
    manifest.step = step;
    snprintf(manifest.nonce, sizeof manifest.nonce, "%s", nonce);
    for (size_t f = 0; f < plan->file_count && status == SW_OK; ++f)
        status =
            sw_manifest_add_file(&manifest, plan->files[f].path, plan->files[f].size_bytes, &err);
    if (status == SW_OK && sw_py_add_tallies(lists, &manifest, &err) < 0)
        status = SW_E_INVALID;
    if (status == SW_OK) {
        Py_BEGIN_ALLOW_THREADS
        status = sw_plan_write_headers(plan, partial, &manifest, &err);
        if (status == SW_OK)
            status = sw_manifest_complete(&manifest, &err);
        if (status == SW_OK)
            status = sw_commit(partial, folder, replaces, &manifest, &err);
        if (status == SW_OK) {
            sw_save_lock_release(folder, &creator->lock_fd);
            sw_commit_clean(partial, folder, nonce);
        }
        Py_END_ALLOW_THREADS
    }
    sw_manifest_fini(&manifest);
    if (status == SW_OK)
        Py_RETURN_NONE;
    return PyErr_Occurred() ? NULL : sw_py_raise_checkpoint(sw_py_state_of(op), &err);
}

static PyMethodDef plan_methods[] = {
    {"write", plan_write, METH_VARARGS | METH_CLASS,
     "write($type, path, nbytes, first_block, ranges, address, /)\n--\n\n"
     "Write [(begin, nbytes)] of a file of a plan; return the tallies for commit()."},
    {"sync", plan_sync, METH_VARARGS | METH_CLASS,
     "sync($type, path, /)\n--\n\nMake a file durable."},
    {"create", plan_create, METH_VARARGS,
     "create($self, partial, /)\n--\n\nMake a folder with LOCK and every file, with its whole size "
     "and disk space."},
    {"abandon", plan_abandon, METH_NOARGS,
     "abandon($self, /)\n--\n\nRelease LOCK and remove the folder of create(), unless it is "
     "committed."},
    {"create_files", plan_create_files, METH_VARARGS,
     "create_files($self, folder, /)\n--\n\nMake every file in a folder, with disk space and "
     "header."},
    {"commit", (PyCFunction)(void (*)(void))plan_commit, METH_VARARGS | METH_KEYWORDS,
     "Makes the folder of creator.create() a checkpoint, headers included, and releases its LOCK."},
    {"files", plan_files, METH_NOARGS,
     "files($self, /)\n--\n\n[(path, nbytes, first block, [(source, begin, nbytes)])], in order."
     ""},
    {"needed", plan_needed, METH_VARARGS,
     "needed($self, rank, world_size, /)\n--\n\n"
     "Return the sources whose bytes this rank writes, except for those held in parts."},
    {"trim", plan_trim, METH_VARARGS,
     "trim($self, rank, world_size, keep_bytes=0, /)\n--\n\nForget the headers that other ranks "
     "write, if all take more than keep_bytes."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef plan_properties[] = {
    {"digest", plan_get_digest, NULL, "digest of paths, headers and sizes", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot plan_slots[] = {
    {Py_tp_new, plan_new},
    {Py_tp_dealloc, plan_dealloc},
    {Py_tp_methods, plan_methods},
    {Py_tp_getset, plan_properties},
    {Py_tp_doc,
     "CheckpointPlan(groups, texts)\n--\n\nWhich bytes stand where in which file of a checkpoint."},
    {0, NULL},
};

PyType_Spec sw_py_checkpoint_plan_type_spec = {
    .name = "shardwright._engine.CheckpointPlan",
    .basicsize = sizeof(plan_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = plan_slots,
};
