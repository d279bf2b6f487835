/* reducer_base.c - the parts common to all reducers: layout, buckets, names. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "base/text.h"
#include "reduce/reducer_state.h"

enum { LABEL_BYTES = 16 }; /* bytes of a model's label in the name of a bucket */

static void name_bucket(sw_reducer *reducer, bucket *b)
{
    const sw_layout_bucket *shape = sw_bucket_shape(reducer, b);
    const char *first = reducer->names[reducer->layout.order[shape->first]];
    const char *last = reducer->names[reducer->layout.order[shape->first + shape->count - 1]];
    snprintf(b->label, sizeof b->label, "bucket %zu of %.*s, %.*s to %.*s", b->index,
             sw_text_fit(reducer->label, LABEL_BYTES), reducer->label, sw_text_fit(first, 24),
             first, sw_text_fit(last, 24), last);
}

void sw_bucket_name_unfrozen(const sw_reducer *reducer, bucket *b, size_t param)
{
    const char *name = reducer->names[param];
    snprintf(b->label, sizeof b->label, "bucket %zu of %.*s with '%.*s' unfrozen", b->index,
             sw_text_fit(reducer->label, LABEL_BYTES), reducer->label, sw_text_fit(name, 36), name);
}

bool sw_bucket_next_run(const sw_reducer *reducer, const bucket *b, size_t slice, bool kept,
                        size_t *next, size_t *begin, size_t *end)
{
    const sw_layout *layout = &reducer->layout;
    const sw_layout_bucket *shape = sw_bucket_shape(reducer, b);
    bool found = false;
    for (; *next < shape->count; ++*next) {
        size_t param = layout->order[shape->first + *next];
        const param_state *state = &reducer->params[param];
        sw_layout_run run = sw_layout_run_in(layout, param, slice, (size_t)reducer->slice_count);
        bool counts = (kept ? state->kept : state->accumulated) && run.begin < run.end;
        if (found && !counts)
            break;
        if (counts)
            *end = run.first + (run.end - run.begin);
        if (counts && !found)
            *begin = run.first;
        found |= counts;
    }
    return found;
}

static sw_status copy_names(sw_reducer *reducer, const char *const *names, size_t count,
                            sw_error *err)
{
    for (size_t i = 0; i < count; ++i) {
        size_t length = strlen(names[i]) + 1;
        reducer->names[i] = malloc(length);
        if (!reducer->names[i])
            SW_FAIL(err, SW_E_MEMORY, "reducer: no memory for %zu names", count);
        memcpy(reducer->names[i], names[i], length);
    }
    return SW_OK;
}

sw_status sw_reducer_init(sw_reducer *reducer, const sw_layout_param *params,
                          const char *const *names, size_t param_count,
                          const sw_reducer_options *options, int slice_count, int pieces,
                          sw_error *err)
{
    const sw_slices *slices = options->slices;
    reducer->contributes = true;
    reducer->takes_means = options->takes_means;
    reducer->slice_count = slices ? slices->count : reducer->world_size;
    reducer->own_slice = slices ? slices->of_rank[reducer->rank] : reducer->rank;
    snprintf(reducer->label, sizeof reducer->label, "%.*s",
             sw_text_fit(options->label, sizeof reducer->label - 1), options->label);
    SW_TRY(sw_layout_init(&reducer->layout, params, param_count, slice_count,
                          (sw_layout_caps){.bytes = options->bucket_cap_bytes,
                                           .first_bytes = options->first_cap_bytes,
                                           .pieces = (size_t)pieces},
                          err));
    reducer->buckets = calloc(reducer->layout.bucket_count + 1, sizeof *reducer->buckets);
    reducer->params = calloc(param_count + 1, sizeof *reducer->params);
    reducer->names = calloc(param_count + 1, sizeof *reducer->names);
    if (!reducer->buckets || !reducer->params || !reducer->names)
        SW_FAIL(err, SW_E_MEMORY, "reducer: no memory for %zu parameters", param_count);
    SW_TRY(copy_names(reducer, names, param_count, err));
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i) {
        reducer->buckets[i].index = i;
        name_bucket(reducer, &reducer->buckets[i]);
    }
    return SW_OK;
}

void sw_reducer_fini(sw_reducer *reducer)
{
    for (size_t i = 0; reducer->names && i < reducer->layout.param_count; ++i)
        free(reducer->names[i]);
    free(reducer->buckets);
    free(reducer->params);
    free(reducer->names);
    sw_compressor_release(reducer->compressor);
    sw_layout_fini(&reducer->layout);
}
