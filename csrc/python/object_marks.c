/* object_marks.c - what identifies the tensors of a training, as bytes that a later call compares:
 * the objects in containers, and where tensors have their memory. One call each instead of one a
 * tensor. The caller keeps the objects alive, so that no other takes their address. */
#include <stdlib.h>

#include "base/bytes.h"
#include "python/method.h"

typedef struct word_list {
    uint64_t *words; /* owned */
    size_t count, room;
    bool is_out_of_memory;
} word_list;

static void append(word_list *list, uint64_t word)
{
    uint64_t *words = sw_grown(list->words, &list->room, list->count, sizeof *words, 256);
    list->is_out_of_memory |= !words;
    if (!words)
        return;
    list->words = words;
    list->words[list->count++] = word;
}

/* Returns the words as bytes, and frees them. */
static PyObject *take(word_list *list)
{
    PyObject *bytes = list->is_out_of_memory || PyErr_Occurred()
                          ? NULL
                          : PyBytes_FromStringAndSize((const char *)list->words,
                                                      (Py_ssize_t)(list->count * sizeof(uint64_t)));
    if (!bytes && !PyErr_Occurred())
        PyErr_NoMemory();
    free(list->words);
    return bytes;
}

static void append_members(word_list *list, PyObject *container)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    if (PyDict_Check(container)) {
        append(list, (uint64_t)PyDict_Size(container));
        while (PyDict_Next(container, &at, &key, &value)) {
            append(list, (uintptr_t)key);
            append(list, (uintptr_t)value);
        }
    } else if (PyList_Check(container)) {
        append(list, (uint64_t)PyList_Size(container));
        for (; at < PyList_Size(container); ++at)
            append(list, (uintptr_t)PyList_GetItem(container, at));
    } else {
        append(list, (uintptr_t)container);
    }
}

static PyObject *addresses_of(PyObject *containers)
{
    word_list list = {0};
    for (Py_ssize_t i = 0; i < PyList_Size(containers); ++i)
        append_members(&list, PyList_GetItem(containers, i));
    return take(&list);
}

SW_PY_VALUE(object_addresses, PyObject, "object_addresses containers:L", true, addresses_of(a[0].o))

static void append_view(word_list *list, const tensor_view *view)
{
    append(list, (uintptr_t)view->data);
    append(list, (uint64_t)view->device_type << 32 | (uint64_t)view->ndim << 16 |
                     (uint64_t)view->code << 8 | view->bits);
    for (int d = 0; d < view->ndim; ++d) {
        append(list, (uint64_t)view->shape[d]);
        append(list, (uint64_t)view->strides[d]);
    }
}

static PyObject *places_of(PyObject *tensors)
{
    word_list list = {0};
    tensor_view view;
    Py_ssize_t count = PyList_Size(tensors);
    const void *table = count ? sw_py_tensor_exchange_table(PyList_GetItem(tensors, 0)) : NULL;
    for (Py_ssize_t i = 0; i < PyList_Size(tensors); ++i) { /* finding the table runs code */
        if (!sw_py_tensor_view_get(table, PyList_GetItem(tensors, i), &view)) {
            free(list.words);
            Py_RETURN_NONE;
        }
        append_view(&list, &view);
    }
    return take(&list);
}

SW_PY_VALUE(tensor_places, PyObject, "tensor_places tensors:L", true, places_of(a[0].o))

PyMethodDef sw_py_marks_functions[] = {
    SW_PY_FUNCTION(
        object_addresses, "containers, /",
        "Return the identities of the members of dicts and lists, and of other objects, as bytes."),
    SW_PY_FUNCTION(tensor_places, "tensors, /",
                   "Return address, device type, dtype, shape and strides of tensors, as bytes; "
                   "None if some tensor has no such view."),
    {NULL, NULL, 0, NULL},
};
