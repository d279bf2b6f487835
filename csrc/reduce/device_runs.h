/* device_runs.h - the runs of a bucket that lie under contributions, in the parts that a mean on a
 * GPU needs: its rank's slice, or over hosts the pieces that the rank folds. Arithmetic only.
 *
 * Thread rule: as the reducer's. */
#pragma once

#include "reduce/device_mean.h"
#include "reduce/reducer_state.h"

/* Write the runs of `whole`, the bucket's memory, and return their number: at most its parameters
 * for each part, of which there are at most world_size. `kept`: those that this rank's row has
 * kept.
 */
size_t sw_device_runs_find(const sw_reducer *reducer, const bucket *b, const sw_device_mean *mean,
                           const sw_device_range *whole, bool kept, sw_device_run *runs);
/* Return true if the bucket has any on some rank. */
bool sw_device_runs_are_there(const sw_reducer *reducer, const bucket *b);
