/* checkpoint_plan_type.c - shardwright._engine.CheckpointPlan: maps tensors' names, shapes and
 * sizes to files and offsets. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint/commit.h"
#include "checkpoint/write.h"
#include "platform/file.h"
#include "python/method.h"

static bool fill_holder(int number, sw_plan_holder *holder)
{
    if (number < SW_HELD_BY_ALL || number > SW_HELD_IN_PARTS)
        return sw_py_refuse(PyExc_ValueError, "CheckpointPlan: holder must be in [0, 2], got %d",
                            number);
    *holder = (sw_plan_holder)number;
    return true;
}

/* A tensor owns its shape, which free_shapes() frees. */
static bool fill_tensor(const sw_py_arg *a, void *row, void *Py_UNUSED(unused))
{
    sw_plan_tensor *tensor = row;
    sw_py_table sizes;
    bool is_read =
        sw_py_table_init(&sizes, a[2].o, "tensor size:n", sizeof(int64_t), sw_py_fill_size, NULL);
    tensor->name = a[0].s;
    tensor->dtype = a[1].s;
    tensor->shape = sizes.rows;
    tensor->ndim = (int)sizes.count;
    sizes.rows = NULL;
    sw_py_table_fini(&sizes);
    return is_read && fill_holder(a[3].i, &tensor->holder);
}

static bool fill_group(const sw_py_arg *a, void *row, void *groups)
{
    const sw_py_table *tensors =
        sw_py_nested_add(groups, a[4].o, "tensor name:s dtype:s shape:O holder:i",
                         sizeof(sw_plan_tensor), fill_tensor);
    if (tensors)
        *(sw_plan_group *)row = (sw_plan_group){.stem = a[0].s,
                                                .is_numbered = a[1].p,
                                                .max_file_bytes = a[2].word,
                                                .metadata = a[3].s,
                                                .tensors = tensors->rows,
                                                .tensor_count = tensors->count};
    return tensors != NULL;
}

static bool fill_text(const sw_py_arg *a, void *row, void *Py_UNUSED(unused))
{
    sw_plan_text *text = row;
    text->path = a[0].s;
    text->size_bytes = a[1].word;
    return fill_holder(a[2].i, &text->holder);
}

static void free_shapes(const sw_py_nested *groups)
{
    for (size_t g = 0; g < groups->begun; ++g)
        for (size_t i = 0; groups->inner[g].rows && i < groups->inner[g].count; ++i)
            free((void *)(uintptr_t)((sw_plan_tensor *)groups->inner[g].rows)[i].shape);
}

static sw_plan *read_plan(PyTypeObject *type, const sw_py_arg *a)
{
    SW_PY_NESTED groups = {.begun = 0};
    SW_PY_TABLE texts = {0};
    sw_error err = {0};
    sw_plan *plan = NULL;
    if (sw_py_nested_init(&groups, a[0].o,
                          "group stem:s is_numbered:p max_file_bytes:K metadata:s tensors:L",
                          sizeof(sw_plan_group), fill_group) &&
        sw_py_table_init(&texts, a[1].o, "text path:s nbytes:K holder:i", sizeof(sw_plan_text),
                         fill_text, NULL) &&
        sw_plan_create(groups.outer.rows, groups.outer.count, texts.rows, texts.count, &plan,
                       &err) != SW_OK)
        (void)sw_py_raise_checkpoint(type, &err);
    free_shapes(&groups);
    return plan;
}

static PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    sw_py_arg a[2];
    if (!sw_py_read("CheckpointPlan groups:L texts:L", args, kwargs, a))
        return NULL;
    sw_plan *plan = read_plan(type, a);
    plan_object *self = plan ? sw_py_alloc(type) : NULL;
    if (self) {
        self->plan = plan;
        self->lock_fd = -1;
    } else {
        sw_plan_destroy(plan);
    }
    return (PyObject *)self;
}

/* ---- use: reading is shared; what changes the plan or its folder is done alone ---- */

bool sw_py_plan_enter(plan_object *self, sw_py_use_kind kind)
{
    return sw_py_use_enter(&self->use, kind, 0, sw_py_state_of(self)->checkpoint_error, "plan",
                           ", or a save with it is under way");
}

static void plan_dealloc(PyObject *op)
{
    (void)!sw_file_close(&((plan_object *)op)->lock_fd, "LOCK", NULL);
    sw_plan_destroy(((plan_object *)op)->plan);
    free(((plan_object *)op)->partial);
    sw_py_free(op);
}

static PyObject *describe_piece(const sw_plan_piece *piece)
{
    return Py_BuildValue("(nKK)", (Py_ssize_t)piece->source, (unsigned long long)piece->begin,
                         (unsigned long long)piece->size_bytes);
}

static PyObject *describe_file(const sw_plan *plan, const sw_plan_file *file)
{
    PyObject *pieces =
        SW_PY_LIST(i, file->piece_count, describe_piece(&plan->pieces[file->first_piece + i]));
    return pieces ? Py_BuildValue("(sKKN)", file->path, (unsigned long long)file->size_bytes,
                                  (unsigned long long)file->first_block, pieces)
                  : NULL;
}

static PyObject *plan_files(PyObject *op, PyObject *Py_UNUSED(unused))
{
    const sw_plan *plan = ((plan_object *)op)->plan;
    return SW_PY_LIST(f, plan->file_count, describe_file(plan, &plan->files[f]));
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

static bool check_rank(const char *call, int rank, int world_size)
{
    return (rank >= 0 && rank < world_size) ||
           sw_py_refuse(PyExc_ValueError, "%s: rank must be in [0, world_size), got %d of %d", call,
                        rank, world_size);
}

static PyObject *plan_needed(PyObject *op, PyObject *args)
{
    const sw_plan *plan = ((plan_object *)op)->plan;
    sw_py_arg a[2];
    sw_plan_range *ranges = NULL;
    size_t count = 0;
    sw_error err = {0};
    if (!sw_py_read("needed rank:i world_size:i", args, NULL, a) ||
        !check_rank("needed", a[0].i, a[1].i))
        return NULL;
    if (sw_plan_own_ranges(plan, a[0].i, a[1].i, &ranges, &count, &err) != SW_OK)
        return sw_py_raise_checkpoint(op, &err);
    bool *needed = calloc(plan->source_count + 1, sizeof *needed);
    PyObject *result = needed ? PyList_New(0) : PyErr_NoMemory();
    if (needed)
        mark_needed(plan, ranges, count, needed);
    for (size_t i = 0; result && i < plan->source_count; ++i)
        if (needed[i])
            sw_py_append(&result, PyLong_FromSize_t(i));
    free(needed);
    free(ranges);
    return result;
}

SW_PY_METHOD(plan_trim, plan_object, "trim rank:i world_size:i | keep_bytes:K",
             check_rank("trim", a[0].i, a[1].i) && sw_py_plan_enter(self, SW_PY_ALONE),
             (sw_plan_trim(self->plan, a[0].i, a[1].i, a[2].word), SW_OK),
             sw_py_finish_checkpoint(self, &self->use, status, &err))

SW_PY_GETTER(plan_get_digest, plan_object, PyLong_FromUnsignedLong(self->plan->digest))

static PyObject *plan_create(PyObject *op, PyObject *args)
{
    plan_object *self = (plan_object *)op;
    sw_py_arg a[1];
    sw_error err = {0};
    if (!sw_py_read("create partial:s", args, NULL, a))
        return NULL;
    if (self->lock_fd >= 0)
        return PyErr_Format(PyExc_ValueError,
                            "create: commit or abandon this plan's folder first, got '%s'", a[0].s);
    char *kept = strdup(a[0].s);
    if (!kept)
        return PyErr_NoMemory();
    if (!sw_py_plan_enter(self, SW_PY_ALONE)) {
        free(kept);
        return NULL;
    }
    free(self->partial);
    self->partial = kept;
    sw_status status = SW_PY_WITHOUT_GIL(sw_partial_create(self->plan, kept, &self->lock_fd, &err));
    return sw_py_finish_checkpoint(self, &self->use, status, &err);
}

/* It is committed or abandoned already if no lock is held. */
SW_PY_METHOD(plan_abandon, plan_object, "abandon", sw_py_plan_enter(self, SW_PY_ALONE),
             (self->lock_fd >= 0 ? sw_partial_abandon(self->partial, &self->lock_fd) : (void)0,
              SW_OK),
             sw_py_finish_checkpoint(self, &self->use, status, &err))

static sw_status create_files(const sw_plan *plan, const char *folder, sw_error *err)
{
    SW_TRY(sw_plan_create_files(plan, folder, err));
    return sw_plan_write_headers(plan, folder, NULL, err);
}

SW_PY_METHOD(plan_create_files, plan_object, "create_files folder:s",
             sw_py_plan_enter(self, SW_PY_SHARED), create_files(self->plan, a[0].s, &err),
             sw_py_finish_checkpoint(self, &self->use, status, &err))

SW_PY_ROW(fill_write_range, sw_write_range, a[0].word, a[1].word)

/* Returns the tallies, and frees them. */
static PyObject *tallies_of(PyTypeObject *type, sw_status status, sw_tally_list *tallies,
                            const sw_error *err)
{
    PyObject *result = sw_py_bytes_if(sw_py_finish_checkpoint(type, NULL, status, err),
                                      tallies->data, tallies->size_bytes);
    sw_tally_list_fini(tallies);
    return result;
}

SW_PY_METHOD_ON_ROWS(plan_write, PyTypeObject,
                     "write path:s nbytes:K first_block:K ranges:L address:A",
                     sw_tally_list tallies = {0}, 3, "write begin:K nbytes:K", sw_write_range,
                     fill_write_range, true,
                     sw_checkpoint_write(&(sw_write_file){a[0].s, a[1].word, a[2].word}, rows.rows,
                                         rows.count, a[4].address, &tallies, &err),
                     tallies_of(self, status, &tallies, &err))

static sw_status sync_file(const char *path, sw_error *err)
{
    int fd = -1;
    SW_TRY(sw_file_open_write(path, false, &fd, err));
    sw_status status = sw_file_sync(fd, path, err);
    return sw_file_close_after(&fd, path, status, err);
}

SW_PY_METHOD(plan_sync, PyTypeObject, "sync path:s", true, sync_file(a[0].s, &err),
             sw_py_finish_checkpoint(self, NULL, status, &err))

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

/* Writes the headers, makes the folder a checkpoint, and removes what the save leaves behind. */
static sw_status commit(const sw_plan *plan, plan_object *creator, sw_manifest *manifest,
                        const char *folder, const char *replaces, sw_error *err)
{
    SW_TRY(sw_plan_write_headers(plan, creator->partial, manifest, err));
    SW_TRY(sw_manifest_complete(manifest, err));
    SW_TRY(sw_commit(creator->partial, folder, replaces, manifest, err));
    sw_save_lock_release(folder, &creator->lock_fd);
    sw_commit_clean(creator->partial, folder, manifest->nonce);
    return SW_OK;
}

/* Both plans are entered. */
static PyObject *commit_entered(plan_object *self, plan_object *creator, const sw_py_arg *a)
{
    sw_manifest manifest = {.step = a[3].word, .world_size = a[4].i};
    sw_error err = {0};
    sw_status status = SW_OK;
    snprintf(manifest.nonce, sizeof manifest.nonce, "%s", a[2].s);
    for (size_t f = 0; f < self->plan->file_count && status == SW_OK; ++f)
        status = sw_manifest_add_file(&manifest, self->plan->files[f].path,
                                      self->plan->files[f].size_bytes, &err);
    if (status == SW_OK && sw_py_add_tallies(a[5].o, &manifest, &err) < 0)
        status = SW_E_INVALID;
    if (status == SW_OK)
        status = SW_PY_WITHOUT_GIL(commit(self->plan, creator, &manifest, a[0].s, a[1].s, &err));
    sw_manifest_fini(&manifest);
    return PyErr_Occurred() ? NULL : sw_py_finish_checkpoint(self, NULL, status, &err);
}

static PyObject *plan_commit(PyObject *op, PyObject *args, PyObject *kwargs)
{
    plan_object *self = (plan_object *)op, *creator;
    sw_py_arg a[7];
    PyObject *done = NULL;
    if (!sw_py_read("commit $ folder:s replaces:z nonce:s step:K world_size:i tallies:L creator:O",
                    args, kwargs, a))
        return NULL;
    creator = (plan_object *)a[6].o;
    if (Py_TYPE(creator) != sw_py_state_of(op)->plan_type || creator->lock_fd < 0)
        return PyErr_Format(PyExc_ValueError,
                            "commit: `creator` holds no folder of create() for '%s'", a[0].s);
    if (!sw_py_plan_enter(creator, SW_PY_ALONE))
        return NULL;
    if (self == creator) {
        done = commit_entered(self, creator, a);
    } else if (sw_py_plan_enter(self, SW_PY_SHARED)) {
        done = commit_entered(self, creator, a);
        sw_py_use_leave(&self->use);
    }
    sw_py_use_leave(&creator->use);
    return done;
}

static PyMethodDef plan_methods[] = {
    SW_PY_OF_TYPE(plan, write, "path, nbytes, first_block, ranges, address, /",
                  "Write [(begin, nbytes)] of a file of a plan; return the tallies for commit()."),
    SW_PY_OF_TYPE(plan, sync, "path, /", "Make a file durable."),
    SW_PY_ARGS(plan, create, "partial, /", "Make a folder with LOCK and files with disk space."),
    SW_PY_ARGS(plan, abandon, "/",
               "Release LOCK and remove the folder of create(), unless committed."),
    SW_PY_ARGS(plan, create_files, "folder, /", "Make all files, with disk space and header."),
    {"commit", SW_PY_NAMED(plan_commit),
     "Makes the folder of creator.create() a checkpoint, headers included, and releases its LOCK."},
    SW_PY_NONE(plan, files, "[(path, nbytes, first block, [(source, begin, nbytes)])], in order."),
    SW_PY_ARGS(plan, needed, "rank, world_size, /",
               "Return the sources whose bytes this rank writes, except for those held in parts."),
    SW_PY_ARGS(plan, trim, "rank, world_size, keep_bytes=0, /",
               "Forget the headers that other ranks write, if all take more than keep_bytes."),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef plan_properties[] = {
    {"digest", plan_get_digest, NULL, "digest of paths, headers and sizes", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

SW_PY_TYPE(sw_py_checkpoint_plan_type_spec, "CheckpointPlan", plan_object, 0,
           "CheckpointPlan(groups, texts)\n--\n\nWhich bytes stand where in which file of a "
           "checkpoint. groups: [(stem, numbered, max_file_bytes, metadata, [(name, dtype, shape, "
           "holder)])]; texts: [(path, nbytes, holder)]. holder 0: all ranks have it; 1: rank 0 "
           "writes; 2: each writes its sources.",
           {Py_tp_new, plan_new}, {Py_tp_dealloc, plan_dealloc}, {Py_tp_methods, plan_methods},
           {Py_tp_getset, plan_properties})
