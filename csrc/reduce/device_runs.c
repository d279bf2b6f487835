/* device_runs.c - see device_runs.h. */
#include "reduce/device_runs.h"

#include "base/bytes.h"

size_t sw_device_runs_find(const sw_reducer *reducer, const bucket *b, const sw_device_mean *mean,
                           const sw_device_range *whole, bool kept, sw_device_run *runs)
{
    sw_device_part part;
    size_t count = 0, first = 0, begin, end;
    for (size_t i = 0; sw_device_mean_part(mean, whole, i, &part); ++i) {
        for (size_t next = 0;
             sw_bucket_next_run(reducer, b, part.slice, kept, &next, &begin, &end);) {
            begin = sw_size_max(begin, part.begin);
            end = sw_size_min(end, part.end);
            if (begin < end)
                runs[count++] =
                    (sw_device_run){first + begin - part.begin, first + end - part.begin};
        }
        first += part.end - part.begin;
    }
    return count;
}

bool sw_device_runs_are_there(const sw_reducer *reducer, const bucket *b)
{
    const sw_layout_bucket *shape = sw_bucket_shape(reducer, b);
    for (size_t k = 0; k < shape->count; ++k)
        if (reducer->params[reducer->layout.order[shape->first + k]].accumulated)
            return true;
    return false;
}
