/* round_tag.c - see round_tag.h. */
#include "reduce/round_tag.h"

#include "kernels/crc32c.h"

enum { GREATEST = 255 };
static const uint64_t NUMBERS = 0xffffffffu; /* a tag's low bits: steps and rounds; then a digest */

uint64_t sw_round_tag_next(sw_reducer *reducer, bool sliced)
{
    if (sliced)
        reducer->history = sw_crc32c(reducer->history, &reducer->digest, sizeof reducer->digest);
    for (size_t i = 0; sliced && i < reducer->layout.param_count; ++i)
        reducer->history = sw_crc32c(reducer->history, &reducer->params[i].accumulated, 1);
    if (reducer->stays_in_rows)
        reducer->history = sw_crc32c(reducer->history, &reducer->stays_in_rows, 1);
    uint32_t digest = sliced ? reducer->history : reducer->stepped;
    return (uint64_t)digest << 32 | (reducer->step & 0xffffu) << 16 | (reducer->rounds & 0xffffu);
}

unsigned char sw_round_tag_byte(uint64_t tag, size_t k)
{
    unsigned part = (unsigned)(tag >> 8 * (k / 2)) & 0xffu;
    return (unsigned char)(k % 2 ? GREATEST - part : part);
}

sw_status sw_round_tag_compare(sw_reducer *reducer, const uint8_t *maxima, uint64_t tag,
                               bool sliced, sw_error *err)
{
    uint64_t unlike = 0; /* a mask of bytes */
    for (size_t k = 0; k < SW_TAG_BYTES; k += 2)
        if (maxima[k] + maxima[k + 1] != GREATEST)
            unlike |= (uint64_t)GREATEST << 8 * (k / 2);
    if (!unlike)
        return SW_OK;
    unsigned step = (unsigned)(tag >> 16) & 0xffffu, round = (unsigned)tag & 0xffffu;
    if (unlike & NUMBERS)
        SW_FAIL(err, SW_E_MISMATCH,
                "ranks ran different numbers of backwards or optimizer steps of %s: their "
                "gradients were averaged while rank %d was in backward %u after step %u, and "
                "others were not; the average, and what was stepped on since, is wrong: begin "
                "again from a checkpoint, with the same number on every rank",
                reducer->label, reducer->rank, round, step);
    reducer->stepped_unlike = !sliced;
    if (reducer->stepped_unlike)
        SW_FAIL(err, SW_E_MISMATCH,
                "ranks disagree about the optimizer of %s: before backward %u after step %u they "
                "have stepped with different hyperparameters, so that their parameters differ: "
                "begin again from a checkpoint, with the same on every rank",
                reducer->label, round, step);
    SW_FAIL(err, SW_E_MISMATCH,
            "ranks cleared different gradients of %s (zero_grad, or .grad = None, on some ranks "
            "only), or at zero=3 ran different units or the same in another order: on GPUs all do "
            "the same; the average of backward %u after step %u, and what was stepped on since, is "
            "wrong: begin again from a checkpoint",
            reducer->label, round, step);
}
