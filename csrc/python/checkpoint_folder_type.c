/* checkpoint_folder_type.c - shardwright._engine.CheckpointFolder: an open checkpoint. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "checkpoint/catalog.h"
#include "checkpoint/commit.h"
#include "checkpoint/open.h"
#include "checkpoint/read.h"
#include "checkpoint/removable.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/save_lock.h"
#include "platform/file.h"
#include "python/engine.h"

typedef struct folder_object {
    PyObject_HEAD char *path; /* owned */
    sw_manifest manifest;
    PyObject *files;    /* owned; path -> bytes, NULL until requested */
    sw_catalog catalog; /* the contents of small files; empty until read or received */
} folder_object;

static PyObject *fail(PyObject *op, const sw_error *err)
{
    return sw_py_raise_checkpoint(sw_py_state_of(op), err);
}

/* Takes ownership of the manifest and the catalog. */
static PyObject *make_folder(PyTypeObject *type, const char *path, sw_manifest *manifest,
                             sw_catalog *catalog)
{
    folder_object *self = (folder_object *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    char *copy = strdup(path);
    if (!self || !copy) {
        sw_manifest_fini(manifest);
        sw_catalog_fini(catalog);
        free(copy);
        Py_XDECREF(self);
        return self ? PyErr_NoMemory() : NULL;
    }
    self->path = copy;
    self->manifest = *manifest;
    self->catalog = *catalog;
    return (PyObject *)self;
}

static PyObject *folder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    const char *path;
    char found[SW_PATH_BYTES];
    sw_error err = {0};
    sw_manifest manifest = {0};
    sw_catalog catalog = {0};
    sw_status status;
    if (kwargs && PyDict_Size(kwargs) > 0)
        return PyErr_Format(PyExc_TypeError, "CheckpointFolder: no keyword is known");
    if (!PyArg_ParseTuple(args, "s:CheckpointFolder", &path))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sw_checkpoint_find(path, found, &manifest, &err);
    Py_END_ALLOW_THREADS
    if (status != SW_OK)
        return sw_py_raise_checkpoint(PyType_GetModuleState(type), &err);
    return make_folder(type, found, &manifest, &catalog);
}

static PyObject *folder_received(PyObject *type, PyObject *args)
{
    const char *path;
    char *data;
    Py_ssize_t size_bytes;
    PyObject *bytes;
    sw_error err = {0};
    sw_manifest manifest = {0};
    sw_catalog catalog = {0};
    sw_status status;
    if (!PyArg_ParseTuple(args, "sS:received", &path, &bytes) ||
        PyBytes_AsStringAndSize(bytes, &data, &size_bytes) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sw_catalog_copy(data, (size_t)size_bytes, &catalog, &manifest, &err);
    Py_END_ALLOW_THREADS
    if (status != SW_OK)
        return sw_py_raise_checkpoint(PyType_GetModuleState((PyTypeObject *)type), &err);
    return make_folder((PyTypeObject *)type, path, &manifest, &catalog);
}

/* Adds [(path, bytes)] to a manifest. Returns -1 with an exception, or sets *err. */
static int add_files(PyObject *files, sw_manifest *manifest, sw_error *err)
{
    for (Py_ssize_t i = 0; i < PyList_Size(files); ++i) {
        const char *path;
        unsigned long long size_bytes;
        if (!PyArg_ParseTuple(PyList_GetItem(files, i), "sK", &path, &size_bytes) ||
            sw_manifest_add_file(manifest, path, size_bytes, err) != SW_OK)
            return -1;
    }
    return 0;
}

static PyObject *folder_merged(PyObject *type, PyObject *args)
{
    const char *path, *nonce;
    unsigned long long step;
    PyObject *files, *lists;
    sw_manifest manifest = {0};
    sw_catalog catalog = {0};
    sw_error err = {0};
    if (!PyArg_ParseTuple(args, "sKisO!O!:merged", &path, &step, &manifest.world_size, &nonce,
                          &PyList_Type, &files, &PyList_Type, &lists))
        return NULL;
    manifest.step = step;
    snprintf(manifest.nonce, sizeof manifest.nonce, "%s", nonce);
    if (add_files(files, &manifest, &err) < 0 || sw_py_add_tallies(lists, &manifest, &err) < 0 ||
        sw_manifest_complete(&manifest, &err) != SW_OK) {
        sw_manifest_fini(&manifest);
        if (PyErr_Occurred())
            return NULL;
        return sw_py_raise_checkpoint(PyType_GetModuleState((PyTypeObject *)type), &err);
    }
    return make_folder((PyTypeObject *)type, path, &manifest, &catalog);
}

static PyObject *folder_lies_in(PyObject *op, PyObject *args)
{
    sw_manifest *manifest = &((folder_object *)op)->manifest;
    PyObject *begins;
    int fd;
    if (!PyArg_ParseTuple(args, "iO!:lies_in", &fd, &PyDict_Type, &begins))
        return NULL;
    for (size_t i = 0; i < manifest->file_count; ++i) {
        sw_manifest_file *file = &manifest->files[i];
        PyObject *begin = PyDict_GetItemString(begins, file->path);
        if (!begin)
            return PyErr_Format(PyExc_ValueError, "lies_in: no begin is given for '%s'",
                                file->path);
        file->memory_begin = PyLong_AsUnsignedLongLong(begin);
        if (PyErr_Occurred())
            return NULL;
        file->memory_fd = fd;
        file->is_in_memory = true;
    }
    Py_RETURN_NONE;
}

static PyObject *folder_catalog(PyObject *op, PyObject *args)
{
    folder_object *self = (folder_object *)op;
    PyObject *list;
    sw_error err = {0};
    sw_catalog catalog = {0};
    sw_status status;
    if (!PyArg_ParseTuple(args, "O!:catalog", &PyList_Type, &list))
        return NULL;
    size_t count = (size_t)PyList_Size(list);
    const char **paths = calloc(count + 1, sizeof *paths);
    if (!paths)
        return PyErr_NoMemory();
    for (size_t i = 0; i < count; ++i)
        if (!(paths[i] = PyUnicode_AsUTF8AndSize(PyList_GetItem(list, (Py_ssize_t)i), NULL))) {
            free((void *)paths);
            return NULL;
        }
    Py_BEGIN_ALLOW_THREADS
    status = sw_catalog_read(self->path, &self->manifest, paths, count, &catalog, &err);
    Py_END_ALLOW_THREADS
    free((void *)paths);
    if (status != SW_OK)
        return fail(op, &err);
    sw_catalog_fini(&self->catalog);
    self->catalog = catalog;
    return PyBytes_FromStringAndSize((const char *)catalog.data, (Py_ssize_t)catalog.size_bytes);
}

static void folder_dealloc(PyObject *op)
{
    folder_object *self = (folder_object *)op;
    PyTypeObject *type = Py_TYPE(op);
    sw_manifest_fini(&self->manifest);
    sw_catalog_fini(&self->catalog);
    Py_XDECREF(self->files);
    free(self->path);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(op);
    Py_DECREF(type);
}

/* Parses (path, begin, nbytes, address, undo). */
static int parse_load_range(const folder_object *self, PyObject *item, sw_load_range *range)
{
    const char *path;
    unsigned long long begin, size_bytes, address, undo;
    if (!PyArg_ParseTuple(item, "sKKKK", &path, &begin, &size_bytes, &address, &undo))
        return -1;
    const sw_manifest_file *file = sw_manifest_find(&self->manifest, path);
    if (!file) {
        PyErr_Format(PyExc_ValueError, "load: the checkpoint '%s' has no file '%s'", self->path,
                     path);
        return -1;
    }
    *range = (sw_load_range){.file = (size_t)(file - self->manifest.files),
                             .begin = begin,
                             .size_bytes = (size_t)size_bytes,
                             .destination = (uint8_t *)(uintptr_t)address,
                             .undo = (uint8_t *)(uintptr_t)undo};
    return 0;
}

static PyObject *folder_load(PyObject *op, PyObject *args)
{
    folder_object *self = (folder_object *)op;
    PyObject *list;
    int threads = 1, is_direct = 0;
    unsigned long long turn = 0, turn_count = 1;
    sw_error err = {0};
    sw_status status;
    if (!PyArg_ParseTuple(args, "O!|ip(KK):load", &PyList_Type, &list, &threads, &is_direct, &turn,
                          &turn_count))
        return NULL;
    size_t count = (size_t)PyList_Size(list);
    sw_load_range *ranges = calloc(count + 1, sizeof *ranges);
    if (!ranges)
        return PyErr_NoMemory();
    for (size_t i = 0; i < count; ++i)
        if (parse_load_range(self, PyList_GetItem(list, (Py_ssize_t)i), &ranges[i]) != 0) {
            free(ranges);
            return NULL;
        }
    sw_load_options options = {.thread_count = threads,
                               .is_direct = is_direct != 0,
                               .turn = (size_t)turn,
                               .turn_count = (size_t)turn_count};
    Py_BEGIN_ALLOW_THREADS
    status = sw_checkpoint_load(self->path, &self->manifest, ranges, count, &options, &err);
    Py_END_ALLOW_THREADS
    free(ranges);
    if (status != SW_OK)
        return fail(op, &err);
    Py_RETURN_NONE;
}

/* Reads bytes [0, size) of a file into malloc'ed memory, from the catalog if it holds them. */
static sw_status read_part(const folder_object *self, const char *path, size_t size_bytes,
                           uint8_t **data, sw_error *err)
{
    size_t known_bytes = 0;
    const uint8_t *known = sw_catalog_find(&self->catalog, path, &known_bytes);
    sw_read_range range = {.size_bytes = size_bytes, .destination = malloc(size_bytes + 1)};
    if (!range.destination)
        SW_FAIL(err, SW_E_MEMORY, "no memory for %zu bytes of '%s'", size_bytes, path);
    sw_status status = SW_OK;
    if (known && size_bytes <= known_bytes)
        memcpy(range.destination, known, size_bytes);
    else
        status = sw_checkpoint_read(self->path, &self->manifest, path, &range, 1, err);
    if (status == SW_OK)
        *data = range.destination;
    else
        free(range.destination);
    return status;
}

static PyObject *folder_read_bytes(PyObject *op, PyObject *args)
{
    folder_object *self = (folder_object *)op;
    const char *path;
    uint8_t *data = NULL;
    sw_error err = {0};
    sw_status status;
    if (!PyArg_ParseTuple(args, "s:read_bytes", &path))
        return NULL;
    const sw_manifest_file *file = sw_manifest_find(&self->manifest, path);
    size_t size_bytes = file ? (size_t)file->size_bytes : 0;
    Py_BEGIN_ALLOW_THREADS
    status = file ? sw_checkpoint_check_values(self->path, file, &err) : SW_OK;
    if (status == SW_OK)
        status = read_part(self, path, size_bytes, &data, &err);
    Py_END_ALLOW_THREADS
    if (status != SW_OK)
        return fail(op, &err);
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)data, (Py_ssize_t)size_bytes);
    free(data);
    return bytes;
}

static sw_status read_header(const folder_object *self, const char *path, sw_safetensors *found,
                             uint8_t **header, sw_error *err)
{
    const sw_manifest_file *file = sw_manifest_find(&self->manifest, path);
    uint8_t *first = NULL;
    size_t header_bytes = 0;
    char full[SW_PATH_BYTES]; /* for messages */
    SW_TRY(sw_path_join(full, self->path, path, err));
    if (!file || file->size_bytes < 8)
        SW_FAIL(err, SW_E_INVALID, "the checkpoint '%.300s' has no safetensors file '%.120s'",
                self->path, path);
    SW_TRY(read_part(self, path, 8, &first, err));
    sw_status status =
        sw_safetensors_header_size(first, file->size_bytes, full, &header_bytes, err);
    free(first);
    SW_TRY(status);
    SW_TRY(read_part(self, path, header_bytes, header, err));
    status = sw_safetensors_read(*header, header_bytes, file->size_bytes, full, found, err);
    free(*header);
    *header = NULL;
    return status;
}

/* The same for an open file outside a checkpoint; `path`: for messages. */
static sw_status read_plain_header(int fd, const char *path, sw_safetensors *found, sw_error *err)
{
    uint8_t first[8];
    struct stat info;
    size_t header_bytes = 0;
    if (fstat(fd, &info) != 0)
        return sw_error_set(err, SW_E_OS, errno, "'%.300s': %s", path, strerror(errno));
    if (info.st_size < (off_t)sizeof first)
        SW_FAIL(err, SW_E_INVALID, "'%.300s' has %lld bytes, fewer than any safetensors file", path,
                (long long)info.st_size);
    SW_TRY(sw_file_read_at(fd, path, first, sizeof first, 0, err));
    SW_TRY(sw_safetensors_header_size(first, (uint64_t)info.st_size, path, &header_bytes, err));
    uint8_t *header = malloc(header_bytes);
    if (!header)
        SW_FAIL(err, SW_E_MEMORY, "no memory for the header of '%.300s'", path);
    sw_status status = sw_file_read_at(fd, path, header, header_bytes, 0, err);
    if (status == SW_OK)
        status =
            sw_safetensors_read(header, header_bytes, (uint64_t)info.st_size, path, found, err);
    free(header);
    return status;
}

static PyObject *build_shape(const sw_json_node *shape)
{
    PyObject *tuple = PyTuple_New((Py_ssize_t)shape->count);
    const sw_json_node *item = sw_json_first(shape);
    for (size_t i = 0; tuple && i < shape->count; ++i, item = sw_json_next(item)) {
        PyObject *size = PyLong_FromLongLong(item->integer);
        if (!size || PyTuple_SetItem(tuple, (Py_ssize_t)i, size) < 0)
            ENGINE_CLEAR(tuple);
    }
    return tuple;
}

static PyObject *build_tensors(const sw_safetensors *found)
{
    PyObject *list = PyList_New((Py_ssize_t)found->entry_count);
    for (size_t i = 0; list && i < found->entry_count; ++i) {
        const sw_safetensors_entry *entry = &found->entries[i];
        PyObject *shape = build_shape(entry->shape);
        PyObject *item = shape ? Py_BuildValue("(ssNKK)", entry->name, entry->dtype, shape,
                                               (unsigned long long)entry->begin,
                                               (unsigned long long)entry->size_bytes)
                               : NULL;
        if (!item || PyList_SetItem(list, (Py_ssize_t)i, item) < 0)
            ENGINE_CLEAR(list);
    }
    return list;
}

static PyObject *build_metadata(const sw_json_node *metadata)
{
    PyObject *made = PyDict_New();
    const sw_json_node *member = metadata ? sw_json_first(metadata) : NULL;
    for (size_t i = 0; made && metadata && i < metadata->count;
         ++i, member = sw_json_next(member)) {
        PyObject *text = PyUnicode_FromString(member->text);
        if (!text || PyDict_SetItemString(made, member->key, text) < 0)
            ENGINE_CLEAR(made);
        Py_XDECREF(text);
    }
    return made;
}

/* Returns (metadata, tensors), and frees what was read. */
static PyObject *build_header(sw_safetensors *found)
{
    PyObject *metadata = build_metadata(found->metadata);
    PyObject *tensors = metadata ? build_tensors(found) : NULL;
    sw_safetensors_fini(found);
    if (!tensors) {
        Py_XDECREF(metadata);
        return NULL;
    }
    return Py_BuildValue("(NN)", metadata, tensors);
}

static PyObject *folder_tensors(PyObject *op, PyObject *args)
{
    folder_object *self = (folder_object *)op;
    const char *path;
    sw_safetensors found = {0};
    uint8_t *header = NULL;
    sw_error err = {0};
    sw_status status;
    if (!PyArg_ParseTuple(args, "s:tensors", &path))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = read_header(self, path, &found, &header, &err);
    Py_END_ALLOW_THREADS
    if (status != SW_OK)
        return fail(op, &err);
    return build_header(&found);
}

static PyObject *folder_header(PyObject *type, PyObject *args)
{
    const char *path;
    int fd;
    sw_safetensors found = {0};
    sw_error err = {0};
    sw_status status;
    if (!PyArg_ParseTuple(args, "is:header", &fd, &path))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = read_plain_header(fd, path, &found, &err);
    Py_END_ALLOW_THREADS
    if (status != SW_OK)
        return sw_py_raise_checkpoint(PyType_GetModuleState((PyTypeObject *)type), &err);
    return build_header(&found);
}

static PyObject *build_files(const sw_manifest *manifest)
{
    PyObject *files = PyDict_New();
    for (size_t i = 0; files && i < manifest->file_count; ++i) {
        PyObject *size = PyLong_FromUnsignedLongLong(manifest->files[i].size_bytes);
        if (!size || PyDict_SetItemString(files, manifest->files[i].path, size) < 0)
            ENGINE_CLEAR(files);
        Py_XDECREF(size);
    }
    return files;
}

/* Loops over blocks read it in each turn. */
static PyObject *folder_get_files(PyObject *op, void *unused)
{
    folder_object *self = (folder_object *)op;
    (void)unused;
    if (!self->files)
        self->files = build_files(&self->manifest);
    Py_XINCREF(self->files);
    return self->files;
}

static PyObject *folder_checksums(PyObject *op, PyObject *args)
{
    const char *path;
    if (!PyArg_ParseTuple(args, "s:checksums", &path))
        return NULL;
    const sw_manifest_file *file = sw_manifest_find(&((folder_object *)op)->manifest, path);
    if (!file)
        return PyErr_Format(PyExc_KeyError, "the manifest lists no file '%s'", path);
    PyObject *list = PyList_New((Py_ssize_t)file->block_count);
    for (uint64_t b = 0; list && b < file->block_count; ++b) {
        PyObject *crc = PyLong_FromUnsignedLong(file->crcs[b]);
        if (!crc || PyList_SetItem(list, (Py_ssize_t)b, crc) < 0)
            ENGINE_CLEAR(list);
    }
    return list;
}

static PyObject *folder_get_path(PyObject *op, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(((folder_object *)op)->path);
}

static PyObject *folder_get_step(PyObject *op, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(((folder_object *)op)->manifest.step);
}

static PyObject *folder_get_world_size(PyObject *op, void *unused)
{
    (void)unused;
    return PyLong_FromLong(((folder_object *)op)->manifest.world_size);
}

static PyObject *folder_get_nonce(PyObject *op, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(((folder_object *)op)->manifest.nonce);
}

static PyObject *folder_get_metric(PyObject *op, void *unused)
{
    const sw_manifest *manifest = &((folder_object *)op)->manifest;
    (void)unused;
    if (!manifest->has_metric)
        Py_RETURN_NONE;
    return PyFloat_FromDouble(manifest->metric);
}

static PyObject *folder_get_block_count(PyObject *op, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(((folder_object *)op)->manifest.block_count);
}

static PyObject *check_path(PyObject *type, PyObject *args,
                            sw_status (*check)(const char *path, sw_error *err))
{
    const char *path;
    sw_error err = {0};
    sw_status status;
    if (!PyArg_ParseTuple(args, "s", &path))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = check(path, &err);
    Py_END_ALLOW_THREADS
    if (status != SW_OK)
        return sw_py_raise_checkpoint(PyType_GetModuleState((PyTypeObject *)type), &err);
    Py_RETURN_NONE;
}

static PyObject *folder_check_removable(PyObject *type, PyObject *args)
{
    return check_path(type, args, sw_checkpoint_check_removable);
}

static PyObject *folder_check_replaceable(PyObject *type, PyObject *args)
{
    return check_path(type, args, sw_checkpoint_check_replaceable);
}

static PyObject *folder_identity(PyObject *type, PyObject *args)
{
    const char *path;
    char identity[SW_IDENTITY_BYTES];
    (void)type;
    if (!PyArg_ParseTuple(args, "s:identity", &path))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    sw_checkpoint_identify(path, identity);
    Py_END_ALLOW_THREADS
    return PyUnicode_FromString(identity);
}

static PyObject *folder_find(PyObject *type, PyObject *args)
{
    const char *path;
    char found[SW_PATH_BYTES];
    bool stands;
    (void)type;
    if (!PyArg_ParseTuple(args, "s:find", &path))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    stands = sw_checkpoint_stands(path, found);
    Py_END_ALLOW_THREADS
    if (!stands)
        Py_RETURN_NONE;
    return PyUnicode_FromString(found);
}

static PyObject *folder_lock(PyObject *type, PyObject *args)
{
    const char *path;
    int fd;
    bool is_taken = false;
    sw_error err = {0};
    if (!PyArg_ParseTuple(args, "is:lock", &fd, &path))
        return NULL;
    if (sw_file_lock(fd, path, &is_taken, &err) != SW_OK)
        return sw_py_raise_checkpoint(PyType_GetModuleState((PyTypeObject *)type), &err);
    return PyBool_FromLong(is_taken);
}

static PyObject *folder_is_alive(PyObject *type, PyObject *args)
{
    const char *path;
    (void)type;
    if (!PyArg_ParseTuple(args, "s:is_alive", &path))
        return NULL;
    sw_save_life found = sw_save_lock_look(path);
    if (found == SW_SAVE_UNKNOWN)
        Py_RETURN_NONE;
    return PyBool_FromLong(found == SW_SAVE_ALIVE);
}

static PyObject *folder_make(PyObject *type, PyObject *args)
{
    return check_path(type, args, sw_folder_make);
}

static PyObject *folder_sync(PyObject *type, PyObject *args)
{
    return check_path(type, args, sw_folder_sync);
}

static PyObject *folder_remove(PyObject *type, PyObject *args)
{
    return check_path(type, args, sw_folder_remove);
}

static PyMethodDef folder_methods[] = {
    {"lock", folder_lock, METH_VARARGS | METH_CLASS,
     "lock($type, fd, path, /)\n--\n\n"
     "Lock an open file; return False if another open file has the lock."},
    {"is_alive", folder_is_alive, METH_VARARGS | METH_CLASS,
     "is_alive($type, path, /)\n--\n\nReturn whether the save that writes to `path` is alive; None "
     "if that is unknown."},
    {"make", folder_make, METH_VARARGS | METH_CLASS,
     "make($type, path, /)\n--\n\nMake a folder and those above it, durable."},
    {"sync", folder_sync, METH_VARARGS | METH_CLASS,
     "sync($type, path, /)\n--\n\nMake the names in a folder durable."},
    {"remove", folder_remove, METH_VARARGS | METH_CLASS,
     "remove($type, path, /)\n--\n\nRemove a file, a link, or a folder with its contents."},
    {"check_removable", folder_check_removable, METH_VARARGS | METH_CLASS,
     "check_removable($type, path, /)\n--\n\n"
     "Raise CheckpointError unless the folder holds only a checkpoint."},
    {"check_replaceable", folder_check_replaceable, METH_VARARGS | METH_CLASS,
     "check_replaceable($type, path, /)\n--\n\n"
     "Do the same for everything that a save to `path` replaces."},
    {"received", folder_received, METH_VARARGS | METH_CLASS,
     "received($type, path, catalog, /)\n--\n\n"
     "Return a checkpoint whose catalog another rank has read."},
    {"merged", folder_merged, METH_VARARGS | METH_CLASS,
     "merged($type, path, step, world_size, nonce, files, tallies, /)\n--\n\n"
     "Return a checkpoint of [(path, nbytes)] from the ranks' lists of tallies."},
    {"lies_in", folder_lies_in, METH_VARARGS,
     "lies_in($self, fd, begins, /)\n--\n\n"
     "Read from an open file, in which each file begins at begins[path]."},
    {"catalog", folder_catalog, METH_VARARGS,
     "catalog($self, paths, /)\n--\n\n"
     "Return the manifest, headers of safetensors files, and other files whole."},
    {"find", folder_find, METH_VARARGS | METH_CLASS,
     "find($type, path, /)\n--\n\n"
     "Return where checkpoint `path` is, found by its manifest: `path` or its replaced name; None "
     "for neither."},
    {"identity", folder_identity, METH_VARARGS | METH_CLASS,
     "identity($type, path, /)\n--\n\n"
     "Return a text that identifies the checkpoint there now; '' for none."},
    {"load", folder_load, METH_VARARGS,
     "load($self, ranges, threads=1, direct=False, turn=(0, 1), /)\n--\n\n"
     "Fill or check [(path, begin, nbytes, address or 0, undo or 0)] with several threads."},
    {"read_bytes", folder_read_bytes, METH_VARARGS,
     "read_bytes($self, path, /)\n--\n\nReturn a whole file, checked."},
    {"tensors", folder_tensors, METH_VARARGS,
     "tensors($self, path, /)\n--\n\nReturn (metadata, [(name, dtype, shape, begin, nbytes)])."},
    {"header", folder_header, METH_VARARGS | METH_CLASS,
     "header($type, fd, path, /)\n--\n\n"
     "Return what tensors() does, for an open file outside a checkpoint."},
    {"checksums", folder_checksums, METH_VARARGS,
     "checksums($self, path, /)\n--\n\nReturn the CRC32C of each block from the manifest."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef folder_properties[] = {
    {"path", folder_get_path, NULL, "the folder", NULL},
    {"step", folder_get_step, NULL, "completed steps", NULL},
    {"world_size", folder_get_world_size, NULL, "number of ranks that wrote it", NULL},
    {"nonce", folder_get_nonce, NULL, "identifier of the save", NULL},
    {"metric", folder_get_metric, NULL, "the value that keep_best compares, or None", NULL},
    {"files", folder_get_files, NULL, "path -> bytes", NULL},
    {"block_count", folder_get_block_count, NULL, "of all files", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot folder_slots[] = {
    {Py_tp_new, folder_new},
    {Py_tp_dealloc, folder_dealloc},
    {Py_tp_methods, folder_methods},
    {Py_tp_getset, folder_properties},
    {Py_tp_doc, "CheckpointFolder(path)\n--\n\nA checkpoint to read from: its manifest is sound "
                "and its files have their sizes."},
    {0, NULL},
};

PyType_Spec sw_py_checkpoint_folder_type_spec = {
    .name = "shardwright._engine.CheckpointFolder",
    .basicsize = sizeof(folder_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = folder_slots,
};
