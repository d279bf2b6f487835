/* channel.h - how ranks that save together exchange progress while they write: a control page a
 * rank, and between hosts a file with a slot a host.
 *
 * Idea: a rank writes only its own page, which the ranks of its host map. It writes the words first
 * and the number of their save last. A reader that sees the number (acquire) reads words of that
 * save or of a later one. The lowest rank of a host is its carrier. It copies its host's words to
 * the host's slot of the file, and rank 0's words from the file to its own page. The other ranks of
 * the host read them there. So one rank a host opens the file, and all hosts together at most
 * LOOKS_A_SECOND times a second. A rank whose carrier could not begin the save reads the file
 * itself.
 *
 * Hosts form groups of SW_CHANNEL_GROUP. The carrier of a group's first host reads the slots of the
 * group too, and merges its tallies; of the first group rank 0 does.
 *
 * No file is created while a save runs, so the channel works on a full disk; it needs no
 * communicator. Rank 0 may fail several saves before a sleeping peer looks, so the last four
 * verdicts are kept. The file is opened for each look: a network file system shows new data at
 * open, not before.
 *
 * Thread rule: one at a time a rank (the owner's between saves, else the save's). Pages outlive all
 * users. */
#ifndef SW_CHECKPOINT_CHANNEL_H
#define SW_CHECKPOINT_CHANNEL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

enum { SW_CHANNEL_PAGE_BYTES = 4096, SW_CHANNEL_VERDICTS = 4, SW_CHANNEL_GROUP = 16 };

typedef struct sw_channel_page {
    _Atomic uint64_t opened;  /* the save whose files exist: by rank 0, and as its carriers know */
    _Atomic uint64_t decided; /* the save that rank 0 decided last, likewise */
    _Atomic uint64_t committing; /* the save whose commit rank 0 began last, likewise */
    _Atomic uint64_t written; /* the save of which this rank's ranges are durable; in a slot: those
                               * of all ranks of the host */
    _Atomic uint64_t failed;  /* the save that this rank, or a rank of the host, failed last */
    _Atomic uint64_t tally_bytes; /* of a carrier: bytes that its host's ranks have reserved */
    int32_t failed_rank;
    sw_error failure;
    sw_error verdicts[SW_CHANNEL_VERDICTS]; /* of save n at n % 4 */
} sw_channel_page;

typedef struct sw_channel {
    int rank, world_size, carrier, host, host_count;
    int *host_of;            /* owned; a host number a rank */
    sw_channel_page **pages; /* owned array; a page a rank of this host, NULL: on another host */
    sw_channel_page *slots;  /* owned; a slot a host, as the file has them; NULL: one host */
    sw_channel_page *alone;  /* owned page at world size 1 */
    char *path;              /* owned; the file; NULL: one host */
    int64_t looked_ns;       /* time of the last read */
    int64_t gone_ns;         /* since when the file is missing; 0: it exists */
    bool is_told;            /* the file has this host's present slot */
} sw_channel;

/* `pages`: one for each rank of this host, zeroed, SW_CHANNEL_PAGE_BYTES each; NULL at world size
 * 1. `host_of`: each rank's host, numbered by lowest ranks; NULL: one host. `path`: with several
 * hosts, a file of one page a host, zeroed before any rank calls this. */
SW_MUST_USE sw_status sw_channel_init(sw_channel *channel, int rank, int world_size,
                                      uint8_t *const *pages, const int *host_of, const char *path,
                                      sw_error *err);
void sw_channel_fini(sw_channel *channel);

bool sw_channel_is_carrier(const sw_channel *channel);
/* Copy between the host's pages and the file, if that is this rank's task. The queries below do so
 * first, except those of a const channel. */
void sw_channel_relay(sw_channel *channel, uint64_t number);

/* Rank 0: announce that the files of save `number` exist. Another carrier: that its host's file
 * does. No tallies of the save have a place yet. */
void sw_channel_say_open(sw_channel *channel, uint64_t number);
/* True once this rank may write to them: its carrier has announced them. */
bool sw_channel_is_open(sw_channel *channel, uint64_t number);
/* A carrier of another host than rank 0's: true once rank 0 has announced its files. */
bool sw_channel_is_open_at_first(sw_channel *channel, uint64_t number);

/* Reserve `bytes` for tallies in the host's file; return the offset of the first one. */
uint64_t sw_channel_take_place(sw_channel *channel, uint64_t bytes);
/* A carrier: the file has `bytes` now. */
void sw_channel_set_tally_bytes(sw_channel *channel, uint64_t bytes);
/* Return the host behind the last one of which this carrier merges the tallies: its own, or those
 * of its group from its own on. */
int sw_channel_merges_until(const sw_channel *channel);
/* A carrier: true once the other ranks of its host have written, and the other hosts whose tallies
 * it merges. */
bool sw_channel_have_others_written(sw_channel *channel, uint64_t number);
void sw_channel_say_written(sw_channel *channel, uint64_t number);
/* Rank 0: return the lowest rank that, or whose host, has not written; -1: all have. A group's
 * first host says "written" after the others of its group, so those come before it. */
int sw_channel_find_unwritten(sw_channel *channel, uint64_t number);
/* Return the bytes of tallies of a host whose ranks have all written: of any on rank 0, of those
 * that it merges on a carrier. */
uint64_t sw_channel_tally_bytes(const sw_channel *channel, int host);

/* Report to rank 0 that this rank failed save `number`. Retry for at most 30 s if the file cannot
 * be written. */
void sw_channel_fail(sw_channel *channel, uint64_t number, const sw_error *reason);
/* Rank 0: true if a rank failed it; *err then names the rank, in the sentence that all ranks
 * get. */
bool sw_channel_has_failure(sw_channel *channel, uint64_t number, sw_error *err);
/* Rank 0: announce that a verdict will come, however long the commit takes. A rank that gave up
 * before it read this has reported a failure: sw_channel_has_failure. */
void sw_channel_say_committing(sw_channel *channel, uint64_t number);
bool sw_channel_is_committing(sw_channel *channel, uint64_t number);
/* Rank 0: publish SW_OK or the error of save `number`. Retry for at most 30 s if the file cannot be
 * written. */
void sw_channel_decide(sw_channel *channel, uint64_t number, const sw_error *verdict);
/* True once rank 0 has decided `number`; *verdict is then filled (status SW_OK: committed). */
bool sw_channel_is_decided(sw_channel *channel, uint64_t number, sw_error *verdict);
/* True if the last look found the file missing for some seconds: no verdict is known and none can
 * come. *why then says so. */
bool sw_channel_is_gone(const sw_channel *channel, sw_error *why);

#endif
