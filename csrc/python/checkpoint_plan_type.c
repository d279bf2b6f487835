/* checkpoint_plan_type.c - shardwright._engine.CheckpointPlan: names, shapes and sizes in, files
 * and places out. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint/commit.h"
#include "python/engine.h"

typedef struct plan_input { /* what sw_plan_create() borrows while it runs; the strings live in
                               Python objects */
    sw_plan_group *groups;
    sw_plan_text *texts;
    sw_plan_tensor **tensors; /* a list a group */
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

static int read_tensors(PyObject *tensors, sw_plan_group *group, sw_plan_tensor **list)
{
    Py_ssize_t count = PyList_Check(tensors) ? PyList_Size(tensors) : -1;
    if (count < 0) {
        PyErr_SetString(
            PyExc_TypeError,
            "CheckpointPlan: tensors must be a list of (name, dtype, shape, pinned) tuples");
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
        int pinned;
        if (!PyArg_ParseTuple(PyList_GetItem(tensors, i), "ssOp", &tensor->name, &tensor->dtype,
                              &shape, &pinned) ||
            read_shape(shape, tensor) < 0)
            return -1;
        tensor->is_pinned = pinned != 0;
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
        if (!PyArg_ParseTuple(PyList_GetItem(texts, (Py_ssize_t)i), "sK", &input->texts[i].path,
                              &size_bytes))
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
    return (PyObject *)self;
}

static void plan_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    sw_plan_destroy(((plan_object *)op)->plan);
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
    return pieces ? Py_BuildValue("(sKN)", file->path, (unsigned long long)file->size_bytes, pieces)
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

/* Flags of the sources that the rank's blocks touch. */
static void mark_needed(const sw_plan *plan, const uint64_t *blocks, size_t count, bool *needed)
{
    for (size_t i = 0; i < count; ++i) {
        uint64_t offset;
        size_t size_bytes;
        const sw_plan_file *file = sw_plan_locate(plan, blocks[i], &offset, &size_bytes);
        for (size_t p = file->first_piece; p < file->first_piece + file->piece_count; ++p) {
            const sw_plan_piece *piece = &plan->pieces[p];
            if (piece->begin >= offset + size_bytes)
                break;
            if (piece->begin + piece->size_bytes > offset)
                needed[piece->source] = true;
        }
    }
}

static PyObject *plan_needed(PyObject *op, PyObject *args)
{
    const sw_plan *plan = ((plan_object *)op)->plan;
    int rank, world_size;
    uint64_t *blocks = NULL;
    size_t count = 0;
    sw_error err = {0};
    if (!PyArg_ParseTuple(args, "ii:needed", &rank, &world_size))
        return NULL;
    if (world_size < 1 || rank < 0 || rank >= world_size)
        return PyErr_Format(PyExc_ValueError,
                            "needed: rank must be in [0, world_size), got %d of %d", rank,
                            world_size);
    if (sw_plan_owned(plan, rank, world_size, &blocks, &count, &err) != SW_OK)
        return sw_py_raise_checkpoint(sw_py_state_of(op), &err);
    bool *needed = calloc(plan->source_count + 1, sizeof *needed);
    PyObject *result = needed ? PyList_New(0) : PyErr_NoMemory();
    if (needed)
        mark_needed(plan, blocks, count, needed);
    for (size_t i = 0; result && i < plan->source_count; ++i) {
        PyObject *index = needed[i] ? PyLong_FromSize_t(i) : NULL;
        if (needed[i] && (!index || PyList_Append(result, index) < 0))
            ENGINE_CLEAR(result);
        Py_XDECREF(index);
    }
    free(needed);
    free(blocks);
    return result;
}

static int read_holdings(PyObject *list, sw_plan_holding **holdings)
{
    Py_ssize_t count = PyList_Size(list);
    *holdings = calloc((size_t)count + 1, sizeof **holdings);
    if (!*holdings) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
        Py_ssize_t source;
        unsigned long long begin, size_bytes;
        int rank;
        if (!PyArg_ParseTuple(PyList_GetItem(list, i), "nKKi", &source, &begin, &size_bytes, &rank))
            return -1;
        (*holdings)[i] = (sw_plan_holding){(size_t)source, begin, size_bytes, rank};
    }
    return 0;
}

static PyObject *describe_transfers(const sw_plan_transfer *transfers, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; ++i) {
        const sw_plan_transfer *t = &transfers[i];
        PyObject *item =
            Py_BuildValue("(nKKii)", (Py_ssize_t)t->source, (unsigned long long)t->begin,
                          (unsigned long long)t->size_bytes, t->holder, t->owner);
        if (!item || PyList_SetItem(list, (Py_ssize_t)i, item) < 0)
            ENGINE_CLEAR(list);
    }
    return list;
}

static PyObject *plan_assign(PyObject *op, PyObject *args)
{
    PyObject *list, *result = NULL;
    int world_size;
    sw_plan_holding *holdings = NULL;
    sw_plan_transfer *transfers = NULL;
    size_t count = 0;
    sw_error err = {0};
    if (!PyArg_ParseTuple(args, "O!i:assign", &PyList_Type, &list, &world_size))
        return NULL;
    if (world_size < 1)
        return PyErr_Format(PyExc_ValueError, "assign: world_size must be at least 1, got %d",
                            world_size);
    if (read_holdings(list, &holdings) == 0) {
        if (sw_plan_assign(((plan_object *)op)->plan, holdings, (size_t)PyList_Size(list),
                           world_size, &transfers, &count, &err) == SW_OK)
            result = describe_transfers(transfers, count);
        else
            sw_py_raise_checkpoint(sw_py_state_of(op), &err);
    }
    free(transfers);
    free(holdings);
    return result;
}

static PyObject *plan_headers(PyObject *op, PyObject *unused)
{
    const sw_plan *plan = ((plan_object *)op)->plan;
    PyObject *headers = PyList_New((Py_ssize_t)plan->file_count);
    (void)unused;
    for (size_t f = 0; headers && f < plan->file_count; ++f) {
        const sw_plan_file *file = &plan->files[f];
        PyObject *header = PyBytes_FromStringAndSize(file->header ? file->header : "",
                                                     (Py_ssize_t)file->header_bytes);
        if (!header || PyList_SetItem(headers, (Py_ssize_t)f, header) < 0)
            ENGINE_CLEAR(headers);
    }
    return headers;
}

/* One file with the checksums of its blocks; -1 with a Python error or *err set. */
static int add_checksums(const sw_plan_file *file, PyObject *list, sw_manifest *manifest,
                         sw_error *err)
{
    if (!PyList_Check(list) || (uint64_t)PyList_Size(list) != file->block_count) {
        PyErr_Format(PyExc_ValueError, "commit: '%s' needs a list with a checksum a block",
                     file->path);
        return -1;
    }
    if (sw_manifest_add_file(manifest, file->path, file->size_bytes, err) != SW_OK)
        return -1;
    for (uint64_t block = 0; block < file->block_count; ++block) {
        unsigned long crc = PyLong_AsUnsignedLong(PyList_GetItem(list, (Py_ssize_t)block));
        if (PyErr_Occurred() ||
            sw_manifest_add_block(manifest, file->path, block, (uint32_t)crc, err) != SW_OK)
            return -1;
    }
    return 0;
}

static PyObject *plan_commit(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"partial", "folder",     "replaces",  "nonce",
                            "step",    "world_size", "checksums", NULL};
    const sw_plan *plan = ((plan_object *)op)->plan;
    const char *partial, *folder, *replaces, *nonce;
    unsigned long long step;
    PyObject *lists;
    sw_manifest manifest = {0};
    sw_error err = {0};
    sw_status status = SW_OK;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$sszsKiO!:commit", names, &partial, &folder,
                                     &replaces, &nonce, &step, &manifest.world_size, &PyList_Type,
                                     &lists))
        return NULL;
    if (!sw_manifest_is_nonce(nonce) || (size_t)PyList_Size(lists) != plan->file_count)
        return PyErr_Format(PyExc_ValueError,
                            "commit: nonce must be 1 to 64 of [0-9a-z], and every file needs its "
                            "checksums; got '%.80s'",
                            nonce);
    manifest.step = step;
    snprintf(manifest.nonce, sizeof manifest.nonce, "%s", nonce);
    for (size_t f = 0; f < plan->file_count && status == SW_OK; ++f)
        if (add_checksums(&plan->files[f], PyList_GetItem(lists, (Py_ssize_t)f), &manifest, &err) <
            0)
            status = SW_E_INVALID;
    if (status == SW_OK) {
        Py_BEGIN_ALLOW_THREADS
        status = sw_manifest_complete(&manifest, &err);
        if (status == SW_OK)
            status = sw_commit(partial, folder, replaces, &manifest, &err);
        Py_END_ALLOW_THREADS
    }
    sw_manifest_fini(&manifest);
    if (status == SW_OK)
        Py_RETURN_NONE;
    return PyErr_Occurred() ? NULL : sw_py_raise_checkpoint(sw_py_state_of(op), &err);
}

static PyMethodDef plan_methods[] = {
    {"headers", plan_headers, METH_NOARGS,
     "headers()\n--\n\nWhat stands before the tensors of each file."},
    {"commit", (PyCFunction)(void (*)(void))plan_commit, METH_VARARGS | METH_KEYWORDS,
     "Makes a folder that holds every file of this plan a checkpoint."},
    {"assign", plan_assign, METH_VARARGS,
     "assign(holdings, world_size)\n--\n\nBlocks to the ranks that hold most of them; what those "
     "lack."},
    {"files", plan_files, METH_NOARGS,
     "files()\n--\n\n[(path, nbytes, [(source, begin, nbytes)])], in order."},
    {"needed", plan_needed, METH_VARARGS,
     "needed(rank, world_size)\n--\n\nSources that lie in blocks of the rank."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot plan_slots[] = {
    {Py_tp_new, plan_new},
    {Py_tp_dealloc, plan_dealloc},
    {Py_tp_methods, plan_methods},
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
