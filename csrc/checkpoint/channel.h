/* channel.h - what ranks that save together tell each other while they write: a control page a
 * rank, and between hosts a file with a slot a host.
 *
 * Idea: a rank writes only its own page, which the ranks of its host map; the words first, the
 * number of the save they belong to last, so that a number read (acquire) says that the words
 * before it are of that save or of a later one. The lowest rank of a host is its carrier: it copies
 * what its host's ranks have said to the host's slot of the file, and what rank 0 has said from the
 * file to its own page, where the others of the host find it. So a host opens the file, and not
 * each rank, and all hosts together at most LOOKS_A_SECOND times a second. A rank whose carrier
 * could not begin the save looks at the file itself.
 *
 * No file is made while a save runs, so the channel works when the disk is full; and it needs no
 * communicator. Rank 0 may fail a few saves in a row before a sleeping peer looks: its last four
 * verdicts stand side by side. The file is opened for each look: a network file system shows what
 * others wrote to whoever opens, not to whoever has open.
 *
 * Thread rule: one at a time of a rank (the owner's, while no save runs; else the save's); the
 * pages outlive every user.
 */
#ifndef SW_CHECKPOINT_CHANNEL_H
#define SW_CHECKPOINT_CHANNEL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

enum { SW_CHANNEL_PAGE_BYTES = 4096, SW_CHANNEL_VERDICTS = 4 };

typedef struct sw_channel_page {
    _Atomic uint64_t
        opened; /* the save whose files are there: of rank 0, and as its carriers know */
    _Atomic uint64_t decided;    /* the save that rank 0 decided last, likewise */
    _Atomic uint64_t committing; /* the save whose commit rank 0 began last, likewise */
    _Atomic uint64_t written; /* the save of which this rank's ranges are durable; in a slot: all of
                                 the host's ranks' */
    _Atomic uint64_t failed;  /* the save that this rank, or one of the host's, failed last */
    _Atomic uint64_t tally_bytes; /* of a carrier: that its host's ranks have placed */
    int32_t failed_rank;
    sw_error failure;
    sw_error verdicts[SW_CHANNEL_VERDICTS]; /* of save n at n % 4 */
} sw_channel_page;

typedef struct sw_channel {
    int rank, world_size, carrier, host, host_count;
    int *host_of;            /* owned; of each rank */
    sw_channel_page **pages; /* owned array; of the ranks of this host, NULL: of another */
    sw_channel_page *slots;  /* owned; of each host, as the file has them; NULL: one host */
    sw_channel_page *alone;  /* owned page at world size 1 */
    char *path;              /* owned; the file; NULL: one host */
    int64_t looked_ns;       /* when it was read last */
    int64_t gone_ns;         /* since when it is not there; 0: it was there */
    bool is_told;            /* the file has this host's slot as it is now */
} sw_channel;

/* `pages`: of the ranks of this host, zeroed, SW_CHANNEL_PAGE_BYTES each; NULL at world size 1.
 * `host_of`: each rank's host, numbered by their lowest ranks; NULL: all on one. `path`: where
 * there are several, a file of as many pages as there are hosts, zeroed before any rank comes here.
 */
SW_MUST_USE sw_status sw_channel_init(sw_channel *channel, int rank, int world_size,
                                      uint8_t *const *pages, const int *host_of, const char *path,
                                      sw_error *err);
void sw_channel_fini(sw_channel *channel);

bool sw_channel_is_carrier(const sw_channel *channel);
/* Copies between the host's pages and the file, where this rank is the one to do so. Each of the
 * questions below does it first. */
void sw_channel_relay(sw_channel *channel, uint64_t number);

/* Rank 0: the files of save `number` are there. Another carrier: so is its host's. No tallies of
 * the save are placed yet. */
void sw_channel_say_open(sw_channel *channel, uint64_t number);
/* Whether this rank may write to them: its carrier has said so. */
bool sw_channel_is_open(sw_channel *channel, uint64_t number);
/* A carrier of another host than rank 0's: whether rank 0 has said so. */
bool sw_channel_is_open_at_first(sw_channel *channel, uint64_t number);

/* A place for `bytes` of tallies in the host's file; the offset of its first byte. */
uint64_t sw_channel_take_place(sw_channel *channel, uint64_t bytes);
void sw_channel_say_written(sw_channel *channel, uint64_t number);
/* Rank 0: the lowest rank that has not written, or whose host has not; -1: all have. */
int sw_channel_find_unwritten(sw_channel *channel, uint64_t number);
/* Rank 0: bytes of tallies of a host all of whose ranks have written. */
uint64_t sw_channel_tally_bytes(const sw_channel *channel, int host);

/* Tells rank 0 that this rank failed save `number`. Retries for at most 30 s if the file cannot be
 * written. */
void sw_channel_fail(sw_channel *channel, uint64_t number, const sw_error *reason);
/* Rank 0: whether a rank failed it; *err then says which, in the words that all ranks get. */
bool sw_channel_has_failure(sw_channel *channel, uint64_t number, sw_error *err);
/* Rank 0: from now on a verdict comes, however long the commit takes. A rank that gave up before it
 * heard of this has said so: sw_channel_has_failure. */
void sw_channel_say_committing(sw_channel *channel, uint64_t number);
bool sw_channel_is_committing(sw_channel *channel, uint64_t number);
/* Rank 0: SW_OK or the error of save `number`. Retries for at most 30 s if the file cannot be
 * written. */
void sw_channel_decide(sw_channel *channel, uint64_t number, const sw_error *verdict);
/* Whether rank 0 has decided `number`; *verdict is then filled (status SW_OK: committed). */
bool sw_channel_is_decided(sw_channel *channel, uint64_t number, sw_error *verdict);
/* Whether the file is gone for some seconds, as of the last look: no verdict can come, and none is
 * known; *why then says so. */
bool sw_channel_is_gone(const sw_channel *channel, sw_error *why);

#endif
