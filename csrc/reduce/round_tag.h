/* round_tag.h - a round's number and digests on a GPU, where ranks do not wait for one another.
 *
 * Idea: each byte of the tag travels with its complement. The maxima over the ranks are
 * complementary if and only if all tags are equal.
 *
 * Thread rule: as the reducer's. */
#pragma once

#include "reduce/reducer_state.h"

enum { SW_TAG_BYTES = 2 * sizeof(uint64_t) };

/* Return the tag of a round, which must be equal on all ranks. It also covers earlier rounds, since
 * a host that is ahead of its GPU does not send every tag. */
uint64_t sw_round_tag_next(sw_reducer *reducer, bool sliced);

/* Return byte k of SW_TAG_BYTES. */
unsigned char sw_round_tag_byte(uint64_t tag, size_t k);

/* Return SW_OK if the ranks' maxima say that their tags were equal, else SW_E_MISMATCH with what
 * ranks did differently. `tag`: this rank's. */
SW_MUST_USE sw_status sw_round_tag_compare(sw_reducer *reducer, const uint8_t *maxima, uint64_t tag,
                                           bool sliced, sw_error *err);
