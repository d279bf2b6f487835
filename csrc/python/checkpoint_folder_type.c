/* checkpoint_folder_type.c - shardwright._engine.CheckpointFolder: an open checkpoint. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "checkpoint/commit.h"
#include "checkpoint/read.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/write.h"
#include "platform/file.h"
#include "python/method.h"
#include <structmember.h>

typedef struct folder_object {
    PyObject_HEAD char *path; /* owned */
    sw_manifest manifest;
    PyObject *files;    /* owned; path -> bytes, NULL until requested */
    sw_catalog catalog; /* the contents of small files; empty until read or received */
    sw_py_use use;      /* shared by reads; catalog() and lies_in() change what they read */
} folder_object;

static bool enter(folder_object *self, sw_py_use_kind kind)
{
    return sw_py_use_enter(&self->use, kind, SW_PY_PATIENCE_NS,
                           sw_py_state_of(self)->checkpoint_error, "checkpoint", "");
}

/* Takes ownership of the manifest and the catalog, unless there was an error, which it raises. */
static PyObject *make_folder(PyTypeObject *type, sw_status status, const sw_error *err,
                             const char *path, sw_manifest *manifest, sw_catalog *catalog)
{
    folder_object *self = status == SW_OK ? sw_py_alloc(type) : NULL;
    char *copy = self ? strdup(path) : NULL;
    if (copy) {
        self->path = copy;
        self->manifest = *manifest;
        self->catalog = *catalog;
        return (PyObject *)self;
    }
    sw_manifest_fini(manifest);
    sw_catalog_fini(catalog);
    Py_XDECREF(self);
    return self ? PyErr_NoMemory() : status == SW_OK ? NULL : sw_py_raise_checkpoint(type, err);
}

static PyObject *folder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    sw_py_arg a[1];
    char found[SW_PATH_BYTES];
    sw_error err = {0};
    sw_manifest manifest = {0};
    sw_catalog catalog = {0};
    if (!sw_py_read("CheckpointFolder path:s", args, kwargs, a))
        return NULL;
    sw_status status = SW_PY_WITHOUT_GIL(sw_checkpoint_find(a[0].s, found, &manifest, &err));
    return make_folder(type, status, &err, found, &manifest, &catalog);
}

static PyObject *folder_received(PyObject *type, PyObject *args)
{
    sw_py_arg a[2];
    sw_error err = {0};
    sw_manifest manifest = {0};
    sw_catalog catalog = {0};
    if (!sw_py_read("received path:s catalog:B", args, NULL, a))
        return NULL;
    char *data = PyBytes_AsString(a[1].o);
    size_t size_bytes = (size_t)PyBytes_Size(a[1].o);
    sw_status status =
        SW_PY_WITHOUT_GIL(sw_catalog_copy(data, size_bytes, &catalog, &manifest, &err));
    return make_folder((PyTypeObject *)type, status, &err, a[0].s, &manifest, &catalog);
}

typedef struct sized_path {
    const char *path;
    uint64_t size_bytes;
} sized_path;

SW_PY_ROW(fill_sized_path, sized_path, a[0].s, a[1].word)

/* Adds files to a manifest. */
static sw_status add_files(const sw_py_table *files, sw_manifest *manifest, sw_error *err)
{
    const sized_path *file = files->rows;
    for (size_t i = 0; i < files->count; ++i)
        SW_TRY(sw_manifest_add_file(manifest, file[i].path, file[i].size_bytes, err));
    return SW_OK;
}

static PyObject *folder_merged(PyObject *type, PyObject *args)
{
    sw_py_arg a[6];
    SW_PY_TABLE files = {0};
    sw_catalog catalog = {0};
    sw_error err = {0};
    if (!sw_py_read("merged path:s step:K world_size:i nonce:s files:L tallies:L", args, NULL, a))
        return NULL;
    sw_manifest manifest = {.step = a[1].word, .world_size = a[2].i};
    snprintf(manifest.nonce, sizeof manifest.nonce, "%s", a[3].s);
    if (sw_py_table_init(&files, a[4].o, "merged path:s nbytes:K", sizeof(sized_path),
                         fill_sized_path, NULL) &&
        add_files(&files, &manifest, &err) == SW_OK &&
        sw_py_add_tallies(a[5].o, &manifest, &err) == 0)
        (void)!sw_manifest_complete(&manifest, &err);
    if (!PyErr_Occurred())
        return make_folder((PyTypeObject *)type, err.status, &err, a[0].s, &manifest, &catalog);
    sw_manifest_fini(&manifest);
    return NULL;
}

static PyObject *folder_lies_in(PyObject *op, PyObject *args)
{
    folder_object *self = (folder_object *)op;
    sw_py_arg a[2];
    if (!sw_py_read("lies_in fd:i begins:D", args, NULL, a) || !enter(self, SW_PY_ALONE))
        return NULL;
    for (size_t i = 0; i < self->manifest.file_count && !PyErr_Occurred(); ++i) {
        sw_manifest_file *file = &self->manifest.files[i];
        PyObject *begin = PyDict_GetItemString(a[1].o, file->path);
        unsigned long long place = begin ? PyLong_AsUnsignedLongLong(begin) : 0;
        if (!begin)
            PyErr_Format(PyExc_ValueError, "lies_in: no begin is given for '%s'", file->path);
        if (PyErr_Occurred())
            break;
        file->memory_begin = place;
        file->memory_fd = a[0].i;
        file->is_in_memory = true;
    }
    sw_py_use_leave(&self->use);
    return PyErr_Occurred() ? NULL : sw_py_none();
}

/* Keeps the catalog that was read, and returns its bytes. */
static PyObject *keep_catalog(folder_object *self, sw_status status, const sw_catalog *catalog,
                              const sw_error *err)
{
    if (status != SW_OK)
        return sw_py_finish_checkpoint(self, &self->use, status, err);
    sw_catalog_fini(&self->catalog);
    self->catalog = *catalog;
    sw_py_use_leave(&self->use);
    return PyBytes_FromStringAndSize((const char *)catalog->data, (Py_ssize_t)catalog->size_bytes);
}

SW_PY_METHOD_ON_ROWS(folder_catalog, folder_object, "catalog paths:L", sw_catalog catalog = {0}, 0,
                     "catalog path:s", const char *, sw_py_fill_text, enter(self, SW_PY_ALONE),
                     sw_catalog_read(self->path, &self->manifest, rows.rows, rows.count, &catalog,
                                     &err),
                     keep_catalog(self, status, &catalog, &err))

static void folder_dealloc(PyObject *op)
{
    folder_object *self = (folder_object *)op;
    sw_manifest_fini(&self->manifest);
    sw_catalog_fini(&self->catalog);
    Py_XDECREF(self->files);
    free(self->path);
    sw_py_free(op);
}

static bool fill_load_range(const sw_py_arg *a, void *row, void *context)
{
    const folder_object *self = context;
    const sw_manifest_file *file = sw_manifest_find(&self->manifest, a[0].s);
    if (!file)
        return sw_py_refuse(PyExc_ValueError, "load: the checkpoint '%s' has no file '%s'",
                            self->path, a[0].s);
    *(sw_load_range *)row = (sw_load_range){.file = (size_t)(file - self->manifest.files),
                                            .begin = a[1].word,
                                            .size_bytes = (size_t)a[2].word,
                                            .destination = a[3].address,
                                            .undo = a[4].address};
    return true;
}

static PyObject *folder_load(PyObject *op, PyObject *args)
{
    folder_object *self = (folder_object *)op;
    sw_py_arg a[4] = {[1] = {.i = 1}}, turn[2] = {{.word = 0}, {.word = 1}};
    SW_PY_TABLE ranges = {0};
    sw_error err = {0};
    if (!sw_py_read("load ranges:L | threads:i direct:p turn:U", args, NULL, a) ||
        (a[3].o && !sw_py_read("turn number:K count:K", a[3].o, NULL, turn)) ||
        !sw_py_table_init(&ranges, a[0].o, "load path:s begin:K nbytes:K address:A undo:A",
                          sizeof(sw_load_range), fill_load_range, self) ||
        !enter(self, SW_PY_SHARED))
        return NULL;
    const sw_load_options options = {.thread_count = a[1].i,
                                     .is_direct = a[2].p,
                                     .turn = (size_t)turn[0].word,
                                     .turn_count = (size_t)turn[1].word};
    sw_status status = SW_PY_WITHOUT_GIL(
        sw_checkpoint_load(self->path, &self->manifest, ranges.rows, ranges.count, &options, &err));
    return sw_py_finish_checkpoint(self, &self->use, status, &err);
}

/* A file of the checkpoint or, if that is NULL, an open one. */
typedef struct source {
    const folder_object *folder;
    int fd;
    const char *path;
} source;

/* Reads its first bytes, from the catalog if that holds them. */
static sw_status read_start(const source *from, void *into, size_t size_bytes, sw_error *err)
{
    const folder_object *folder = from->folder;
    if (!folder)
        return sw_file_read_at(from->fd, from->path, into, size_bytes, 0, err);
    size_t known_bytes = 0;
    const uint8_t *known = sw_catalog_find(&folder->catalog, from->path, &known_bytes);
    const sw_read_range range = {.size_bytes = size_bytes, .destination = into};
    if (!known || size_bytes > known_bytes)
        return sw_checkpoint_read(folder->path, &folder->manifest, from->path, &range, 1, err);
    memcpy(into, known, size_bytes);
    return SW_OK;
}

/* Does the same into malloc'ed memory. */
static sw_status read_part(const source *from, size_t size_bytes, uint8_t **data, sw_error *err)
{
    uint8_t *made = malloc(size_bytes + 1);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "no memory for %zu bytes of '%s'", size_bytes, from->path);
    sw_status status = read_start(from, made, size_bytes, err);
    if (status == SW_OK)
        *data = made;
    else
        free(made);
    return status;
}

static sw_status read_whole(const folder_object *self, const char *path, uint8_t **data,
                            size_t *size_bytes, sw_error *err)
{
    const source from = {.folder = self, .path = path};
    const sw_manifest_file *file = sw_manifest_find(&self->manifest, path);
    *size_bytes = file ? (size_t)file->size_bytes : 0;
    if (file)
        SW_TRY(sw_checkpoint_check_values(self->path, file, err));
    return read_part(&from, *size_bytes, data, err);
}

/* Does the same as sw_py_bytes_if, and frees the data. */
static PyObject *bytes_of(PyObject *finished, uint8_t *data, size_t size_bytes)
{
    PyObject *bytes = sw_py_bytes_if(finished, data, size_bytes);
    free(data);
    return bytes;
}

SW_PY_METHOD_WITH(folder_read_bytes, folder_object, "read_bytes path:s", uint8_t *data = NULL;
                  size_t size_bytes = 0, enter(self, SW_PY_SHARED),
                  read_whole(self, a[0].s, &data, &size_bytes, &err),
                  bytes_of(sw_py_finish_checkpoint(self, &self->use, status, &err), data,
                           size_bytes))

/* `full`: the file's path, for messages. */
static sw_status read_header(const source *from, uint64_t file_bytes, const char *full,
                             sw_safetensors *found, sw_error *err)
{
    uint8_t first[8], *header = NULL;
    size_t header_bytes = 0;
    SW_TRY(read_start(from, first, sizeof first, err));
    SW_TRY(sw_safetensors_header_size(first, file_bytes, full, &header_bytes, err));
    SW_TRY(read_part(from, header_bytes, &header, err));
    sw_status status = sw_safetensors_read(header, header_bytes, file_bytes, full, found, err);
    free(header);
    return status;
}

static sw_status read_own_header(const folder_object *self, const char *path, sw_safetensors *found,
                                 sw_error *err)
{
    const source from = {.folder = self, .path = path};
    const sw_manifest_file *file = sw_manifest_find(&self->manifest, path);
    char full[SW_PATH_BYTES];
    SW_TRY(sw_path_join(full, self->path, path, err));
    if (!file || file->size_bytes < 8)
        SW_FAIL(err, SW_E_INVALID, "the checkpoint '%.300s' has no safetensors file '%.120s'",
                self->path, path);
    return read_header(&from, file->size_bytes, full, found, err);
}

static sw_status read_plain_header(int fd, const char *path, sw_safetensors *found, sw_error *err)
{
    const source from = {.fd = fd, .path = path};
    struct stat info;
    if (fstat(fd, &info) != 0)
        return sw_error_set(err, SW_E_OS, errno, "'%.300s': %s", path, strerror(errno));
    if (info.st_size < 8)
        SW_FAIL(err, SW_E_INVALID, "'%.300s' has %lld bytes, fewer than any safetensors file", path,
                (long long)info.st_size);
    return read_header(&from, (uint64_t)info.st_size, path, found, err);
}

static PyObject *build_shape(const sw_json_node *shape)
{
    const sw_json_node *item = sw_json_first(shape);
    SW_PY_OWNED *sizes = SW_PY_LIST(
        i, shape->count, PyLong_FromLongLong((i ? (item = sw_json_next(item)) : item)->integer));
    return sizes ? PyList_AsTuple(sizes) : NULL;
}

static PyObject *build_tensor(const sw_safetensors_entry *entry)
{
    PyObject *shape = build_shape(entry->shape);
    return shape ? Py_BuildValue("(ssNKK)", entry->name, entry->dtype, shape,
                                 (unsigned long long)entry->begin,
                                 (unsigned long long)entry->size_bytes)
                 : NULL;
}

static PyObject *build_metadata(const sw_json_node *metadata)
{
    PyObject *made = PyDict_New();
    const sw_json_node *member = metadata ? sw_json_first(metadata) : NULL;
    for (size_t i = 0; made && metadata && i < metadata->count; ++i, member = sw_json_next(member))
        sw_py_put(&made, member->key, PyUnicode_FromString(member->text));
    return made;
}

/* Drops the result of a method's finish(), and returns (metadata, tensors) in its place. */
static PyObject *header_of(PyObject *finished, sw_safetensors *found)
{
    SW_PY_OWNED *done = finished;
    SW_PY_OWNED *metadata = done ? build_metadata(found->metadata) : NULL;
    SW_PY_OWNED *tensors =
        metadata ? SW_PY_LIST(i, found->entry_count, build_tensor(&found->entries[i])) : NULL;
    sw_safetensors_fini(found);
    return tensors ? PyTuple_Pack(2, metadata, tensors) : NULL;
}

SW_PY_METHOD_WITH(folder_tensors, folder_object, "tensors path:s", sw_safetensors found = {0},
                  enter(self, SW_PY_SHARED), read_own_header(self, a[0].s, &found, &err),
                  header_of(sw_py_finish_checkpoint(self, &self->use, status, &err), &found))
SW_PY_METHOD_WITH(folder_header, PyTypeObject, "header fd:i path:s", sw_safetensors found = {0},
                  true, read_plain_header(a[0].i, a[1].s, &found, &err),
                  header_of(sw_py_finish_checkpoint(self, NULL, status, &err), &found))

static PyObject *build_files(const sw_manifest *manifest)
{
    PyObject *files = PyDict_New();
    for (size_t i = 0; files && i < manifest->file_count; ++i)
        sw_py_put(&files, manifest->files[i].path,
                  PyLong_FromUnsignedLongLong(manifest->files[i].size_bytes));
    return files;
}

/* Loops over blocks read it in each turn. */
static PyObject *folder_get_files(PyObject *op, void *Py_UNUSED(unused))
{
    folder_object *self = (folder_object *)op;
    PyObject *made = self->files ? NULL : build_files(&self->manifest);
    if (made)
        sw_py_set(&self->files, made);
    Py_XDECREF(made);
    Py_XINCREF(self->files);
    return self->files;
}

static PyObject *folder_checksums(PyObject *op, PyObject *args)
{
    sw_py_arg a[1];
    if (!sw_py_read("checksums path:s", args, NULL, a))
        return NULL;
    const sw_manifest_file *file = sw_manifest_find(&((folder_object *)op)->manifest, a[0].s);
    if (!file)
        return PyErr_Format(PyExc_KeyError, "the manifest lists no file '%s'", a[0].s);
    return SW_PY_LIST(b, file->block_count, PyLong_FromUnsignedLong(file->crcs[b]));
}

SW_PY_GETTER(folder_get_metric, folder_object,
             self->manifest.has_metric ? PyFloat_FromDouble(self->manifest.metric) : sw_py_none())

/* ---- paths, without an object ---- */

#define PATH_METHOD(name, call)                                            \
    SW_PY_METHOD(folder_##name, PyTypeObject, #name " path:s", true, call, \
                 sw_py_finish_checkpoint(self, NULL, status, &err))

PATH_METHOD(check_removable, sw_checkpoint_check_removable(a[0].s, &err))
PATH_METHOD(check_replaceable, sw_checkpoint_check_replaceable(a[0].s, &err))
PATH_METHOD(make, sw_folder_make(a[0].s, &err))
PATH_METHOD(sync, sw_folder_sync(a[0].s, &err))
PATH_METHOD(remove, sw_folder_remove(a[0].s, &err))

SW_PY_METHOD_WITH(folder_identity, PyTypeObject, "identity path:s", char found[SW_IDENTITY_BYTES],
                  true, (sw_checkpoint_identify(a[0].s, found), SW_OK), PyUnicode_FromString(found))
SW_PY_METHOD_WITH(folder_find, PyTypeObject, "find path:s", char found[SW_PATH_BYTES], true,
                  sw_checkpoint_stands(a[0].s, found) ? SW_OK : SW_E_STATE,
                  status == SW_OK ? PyUnicode_FromString(found) : sw_py_none())
SW_PY_METHOD_WITH(folder_lock, PyTypeObject, "lock fd:i path:s", bool is_taken = false, true,
                  sw_file_lock(a[0].i, a[1].s, &is_taken, &err),
                  status == SW_OK ? PyBool_FromLong(is_taken)
                                  : sw_py_finish_checkpoint(self, NULL, status, &err))
SW_PY_METHOD_WITH(folder_exchange, PyTypeObject, "exchange path:s other:s", bool swapped = false,
                  true, sw_file_exchange(a[0].s, a[1].s, &swapped, &err),
                  status == SW_OK ? PyBool_FromLong(swapped)
                                  : sw_py_finish_checkpoint(self, NULL, status, &err))
SW_PY_METHOD_WITH(folder_is_alive, PyTypeObject, "is_alive path:s", sw_save_life found, true,
                  (found = sw_save_lock_look(a[0].s), SW_OK),
                  found == SW_SAVE_UNKNOWN ? sw_py_none() : PyBool_FromLong(found == SW_SAVE_ALIVE))

static PyMethodDef folder_methods[] = {
    SW_PY_OF_TYPE(folder, lock, "fd, path, /", "Lock an open file; False if it is locked."),
    SW_PY_OF_TYPE(folder, exchange, "path, other, /",
                  "Exchange two names; False where the file system cannot."),
    SW_PY_OF_TYPE(folder, is_alive, "path, /",
                  "Return whether the save that writes to `path` is alive; None if unknown."),
    SW_PY_OF_TYPE(folder, make, "path, /", "Make a folder and those above it, durable."),
    SW_PY_OF_TYPE(folder, sync, "path, /", "Make the names in a folder durable."),
    SW_PY_OF_TYPE(folder, remove, "path, /", "Remove a file, link, or folder with its contents."),
    SW_PY_OF_TYPE(folder, check_removable, "path, /", "Raise unless it holds only a checkpoint."),
    SW_PY_OF_TYPE(folder, check_replaceable, "path, /",
                  "Do it for all that a save there replaces."),
    SW_PY_OF_TYPE(folder, received, "path, catalog, /",
                  "Open one whose catalog another rank read."),
    SW_PY_OF_TYPE(folder, merged, "path, step, world_size, nonce, files, tallies, /",
                  "Return a checkpoint of [(path, nbytes)] from the ranks' lists of tallies."),
    SW_PY_ARGS(folder, lies_in, "fd, begins, /", "Read each file from fd, at begins[path]."),
    SW_PY_ARGS(folder, catalog, "paths, /", "Return the manifest, headers, and other files whole."),
    SW_PY_OF_TYPE(
        folder, find, "path, /",
        "Return where checkpoint `path` is: there or at its replaced name; None for neither."),
    SW_PY_OF_TYPE(folder, identity, "path, /", "Identify the checkpoint there now; '' for none."),
    SW_PY_ARGS(folder, load, "ranges, threads=1, direct=False, turn=(0, 1), /",
               "Fill or check [(path, begin, nbytes, address or 0, undo or 0)], with threads."),
    SW_PY_ARGS(folder, read_bytes, "path, /", "Return a whole file, checked."),
    SW_PY_ARGS(folder, tensors, "path, /", "(metadata, [(name, dtype, shape, begin, nbytes)])."),
    SW_PY_OF_TYPE(folder, header, "fd, path, /", "Do tensors() for a file outside a checkpoint."),
    SW_PY_ARGS(folder, checksums, "path, /", "Return the CRC32C of each block from the manifest."),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef folder_properties[] = {
    {"metric", folder_get_metric, NULL, "the value that keep_best compares, or None", NULL},
    {"files", folder_get_files, NULL, "path -> bytes", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef folder_members[] = {
    {"path", T_STRING, offsetof(folder_object, path), READONLY, "the folder"},
    {"step", T_ULONGLONG, offsetof(folder_object, manifest.step), READONLY, "completed steps"},
    {"world_size", T_INT, offsetof(folder_object, manifest.world_size), READONLY,
     "number of ranks that wrote it"},
    {"nonce", T_STRING_INPLACE, offsetof(folder_object, manifest.nonce), READONLY,
     "identifier of the save"},
    {"block_count", T_ULONGLONG, offsetof(folder_object, manifest.block_count), READONLY,
     "of all files"},
    {NULL, 0, 0, 0, NULL},
};

SW_PY_TYPE(sw_py_checkpoint_folder_type_spec, "CheckpointFolder", folder_object, 0,
           "CheckpointFolder(path)\n--\n\nA checkpoint to read from: its manifest is sound and its "
           "files have their sizes.",
           {Py_tp_new, folder_new}, {Py_tp_dealloc, folder_dealloc},
           {Py_tp_methods, folder_methods}, {Py_tp_getset, folder_properties},
           {Py_tp_members, folder_members})
