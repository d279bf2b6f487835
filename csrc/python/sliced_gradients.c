/* sliced_gradients.c - contributions to rounds in which this rank keeps only its slices of the
 * means (zero >= 2).
 *
 * `.grad` is then None, one of autograd's tensors, or the parameter's ShardedGradient. That has no
 * memory but may hold a pending tensor, the sum of backwards since the last round. A contribution
 * moves from `.grad` into the bucket's slot as soon as the slot is free, and at the latest when the
 * bucket is sent. The ShardedGradient is put back when the round ends. A gradient taken from a
 * ShardedGradient that was not cleared is marked as accumulated: the owners of slices add the old
 * mean to it. */
#include <string.h>

#include "python/reducer_object.h"

static bool is_pool(const reducer_object *self)
{
    const sw_gradient_memory *memory = sw_reducer_memory(self->reducer);
    return !memory || memory->transport == SW_TRANSPORT_POOL; /* a GPU behaves like a pool */
}

/* Writes the neutral element of addition: -0.0 + x is x for every x, while 0.0 + -0.0 is not -0.0.
 */
static void write_negative_zeros(reducer_object *self, size_t index)
{
    const sw_layout *layout = sw_reducer_layout(self->reducer);
    sw_dtype dtype = layout->bucket[layout->place[index].bucket].dtype;
    size_t element_bytes = sw_dtype_size_bytes(dtype), real_bytes = element_bytes, numel;
    if (dtype == SW_DTYPE_COMPLEX64 || dtype == SW_DTYPE_COMPLEX128)
        real_bytes /= 2;
    for (size_t begin = 0; begin < layout->place[index].numel; begin += numel) {
        uint8_t *memory = sw_reducer_run(self->reducer, index, begin, &numel);
        memset(memory, 0, numel * element_bytes);
        for (size_t i = real_bytes - 1; i < numel * element_bytes; i += real_bytes)
            memory[i] = 0x80;
    }
}

/* Takes the result of a callback that writes a contribution into its one range of memory. By rows
 * there is none, and the callback returns a tensor that lies as the parameter does. */
static int take_written(reducer_object *self, size_t index, PyObject *result, bool add)
{
    SW_PY_OWNED *made = result;
    if (!made || made == Py_None)
        return made ? 0 : -1;
    return sw_py_gradient_write_plain(self, index, made, add);
}

/* Torch's own writes to a GPU's place follow the mean that leaves it. */
static int lend_place(reducer_object *self)
{
    return self->gpu ? REDUCER_ENQUEUE(self, sw_reducer_lend_place(self->reducer, &err)) : 0;
}

static int place_nothing(reducer_object *self, size_t index, bool accumulated)
{
    if (!accumulated)
        return sw_py_gradient_clear(self, index);
    if (self->gpu)
        return lend_place(self) < 0
                   ? -1
                   : take_written(self, index, sw_py_call_at(self, "_blank", index), false);
    write_negative_zeros(self, index);
    return 0;
}

/* Writes `grad` as the contribution, or adds it with `add`. */
static int place_gradient(reducer_object *self, size_t index, PyObject *grad, bool add)
{
    SW_PY_OWNED *like = sw_py_item(self->layouts == Py_None ? self->params : self->layouts, index);
    int written = like ? sw_py_gradient_write(self, index, like, grad, add) : -1;
    self->copies += self->gpu || written == 1;
    if (written < 1 || lend_place(self) < 0)
        return written < 1 ? written : -1;
    return take_written(
        self, index,
        PyObject_CallFunction(self->copy, "nOO", (Py_ssize_t)index, grad, add ? Py_True : Py_False),
        add);
}

static int flag_of(PyObject *view, const char *name)
{
    SW_PY_OWNED *value = PyObject_GetAttrString(view, name);
    return value ? PyObject_IsTrue(value) : -1;
}

/* Returns whether the contribution of a parameter adds to the accumulated mean; -1 with an
 * exception.
 */
static int accumulates(reducer_object *self, size_t index, bool *is_ours)
{
    SW_PY_OWNED *param = sw_py_item(self->params, index);
    SW_PY_OWNED *grad = param ? PyObject_GetAttr(param, self->grad_name) : NULL;
    int is_view = !grad ? -1 : grad == Py_None ? 0 : reducer_is_view(self, index, grad);
    *is_ours = is_view > 0;
    int cleared = *is_ours ? flag_of(grad, "_cleared") : is_view < 0 ? -1 : 1;
    return cleared < 0 ? -1 : !cleared;
}

/* Removes a contribution that was taken from `.grad` of `holder`, or from a ShardedGradient. */
static int take_away(reducer_object *self, size_t index, bool is_ours, PyObject *holder)
{
    bool used = sw_reducer_state(self->reducer) == SW_ROUND_CLOSED /* during a hook */
                    ? sw_reducer_used_by_any(self->reducer, index)
                    : sw_reducer_is_used(self->reducer, index);
    if (is_ours)
        return PyObject_SetAttrString(holder, "_pending", Py_None);
    return used ? PyObject_SetAttr(holder, self->grad_name, Py_None) : 0;
}

/* Places what the ShardedGradient or the parameter, `holder`, has. */
static int place_from(reducer_object *self, size_t index, bool is_ours, bool accumulated,
                      PyObject *holder)
{
    bool pool = is_pool(self);
    SW_PY_OWNED *source = is_ours ? PyObject_GetAttrString(holder, "_pending")
                                  : PyObject_GetAttr(holder, self->grad_name);
    if (!source)
        return -1;
    /* A second gradient in one backward adds to the first. Private buckets hold the accumulated
     * mean themselves. */
    bool add = sw_reducer_is_placed(self->reducer, index) || (accumulated && !pool);
    int failed = 0;
    if (accumulated && !sw_reducer_is_used(self->reducer, index)) /* stays if no rank used it */
        failed = sw_py_gradient_keep(self, index);
    if (!failed && source != Py_None)
        failed = place_gradient(self, index, source, add);
    else if (!failed && !add)
        failed = place_nothing(self, index, accumulated && pool);
    if (!failed && source != Py_None)
        failed = take_away(self, index, is_ours, holder);
    if (!failed)
        sw_reducer_place(self->reducer, index, accumulated && pool);
    return failed;
}

int sw_py_sliced_place(reducer_object *self, size_t index)
{
    bool is_ours;
    int accumulated = accumulates(self, index, &is_ours);
    SW_PY_OWNED *holder =
        accumulated < 0 ? NULL : sw_py_item(is_ours ? self->views : self->params, index);
    return holder ? place_from(self, index, is_ours, accumulated, holder) : -1;
}

int sw_py_sliced_declare_accumulated(reducer_object *self)
{
    const sw_layout *layout = sw_reducer_layout(self->reducer);
    if (!is_pool(self))
        return 0;
    for (size_t i = 0; i < layout->param_count; ++i) {
        bool is_ours;
        int accumulated =
            sw_reducer_is_placed(self->reducer, i) ? 0 : accumulates(self, i, &is_ours);
        if (accumulated < 0)
            return -1;
        if (accumulated)
            sw_reducer_accumulate(self->reducer, i);
    }
    return 0;
}

int sw_py_sliced_announce(reducer_object *self)
{
    size_t count = sw_reducer_layout(self->reducer)->param_count;
    SW_PY_OWNED *said = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)count);
    char *bytes = said ? PyBytes_AsString(said) : NULL;
    bool is_ours;
    for (size_t i = 0; bytes && i < count; ++i) {
        int accumulated = accumulates(self, i, &is_ours);
        if (accumulated < 0)
            return -1;
        bytes[i] = accumulated == 1;
    }
    return said ? reducer_called(PyObject_CallFunctionObjArgs(self->announcer, said, NULL)) : -1;
}

/* Ends a round: every parameter that some rank used gets its ShardedGradient, unless the sum stays
 * in rows. A ShardedGradient that zero_grad has removed from `.grad` may still hold contributions
 * of earlier backwards. */
int sw_py_sliced_publish(reducer_object *self)
{
    size_t count = sw_reducer_layout(self->reducer)->param_count;
    for (size_t i = 0; i < count; ++i) {
        if (!sw_reducer_used_by_any(self->reducer, i))
            continue;
        SW_PY_OWNED *param = sw_py_item(self->params, i), *view = sw_py_item(self->views, i);
        if (!param || !view || PyObject_SetAttrString(view, "_pending", Py_None) < 0)
            return -1;
        if (!sw_reducer_stays_in_rows(self->reducer) &&
            (PyObject_SetAttrString(view, "_cleared", Py_False) < 0 ||
             PyObject_SetAttr(param, self->grad_name, view) < 0))
            return -1;
    }
    return 0;
}
