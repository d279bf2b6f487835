/* channel.h - exchange of a save's progress between ranks: one control page per rank, and between
 * hosts a file with one slot per host.
 *
 * Idea: a rank writes only its own page, which the ranks of its host map. It writes the words first
 * and the number of the save last, so a reader that sees the number (acquire) reads words of that
 * save or of a later one. The lowest rank of a host is its carrier. It copies its host's words to
 * the host's slot of the file, and rank 0's words from the file to its own page. The other ranks of
 * the host read that page. So only one rank of each host opens the file, and all hosts together at
 * most LOOKS_A_SECOND times a second. If the carrier could not begin the save, its host's ranks
 * read the file themselves.
 *
 * Hosts form groups of SW_CHANNEL_GROUP. The carrier of a group's first host also reads the slots
 * of the group and merges its tallies; for the first group that is rank 0.
 *
 * No file is created while a save runs, so the channel works on a full disk; it needs no
 * communicator. Rank 0 may fail several saves before a sleeping peer looks, so it keeps the last
 * four verdicts. Each look opens the file, because a network file system shows new data only at
 * open.
 *
 * Thread rule: one at a time on each rank (the owner's between saves, else the save's). Pages
 * outlive all users. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

enum { SW_CHANNEL_PAGE_BYTES = 4096, SW_CHANNEL_VERDICTS = 4, SW_CHANNEL_GROUP = 16 };

typedef struct sw_channel_page {
    _Atomic uint64_t opened;  /* save with existing files, set by rank 0 and copied by carriers */
    _Atomic uint64_t decided; /* save that rank 0 decided last, likewise */
    _Atomic uint64_t committing; /* save that rank 0 began to commit last, likewise */
    _Atomic uint64_t written; /* save of which this rank's ranges are durable; in a slot: the ranges
                                 of all ranks of the host */
    _Atomic uint64_t failed;  /* save that this rank, or a rank of the host, failed last */
    _Atomic uint64_t tally_bytes; /* on a carrier: bytes that its host's ranks have reserved */
    int32_t failed_rank;
    sw_error failure;
    sw_error verdicts[SW_CHANNEL_VERDICTS]; /* verdict of save n at n % 4 */
} sw_channel_page;

typedef struct sw_channel {
    int rank, world_size, carrier, host, host_count;
    int *host_of;            /* owned; one host number per rank */
    sw_channel_page **pages; /* owned array; one page per rank, NULL: on another host */
    sw_channel_page *slots;  /* owned; one slot per host, as in the file; NULL: one host */
    sw_channel_page *alone;  /* owned page at world size 1 */
    char *path;              /* owned; the file; NULL: one host */
    int64_t looked_ns;       /* time of the last read */
    int64_t gone_ns;         /* time at which the file was first missing; 0: it exists */
    bool is_told;            /* true: the file has this host's current slot */
} sw_channel;

/* `pages`: one for each rank of this host, zeroed, SW_CHANNEL_PAGE_BYTES each; NULL at world size
 * 1. `host_of`: each rank's host, numbered by lowest ranks; NULL: one host. `path`: with several
 * hosts, a file of one page a host, zeroed before any rank calls this. */
SW_MUST_USE sw_status sw_channel_init(sw_channel *channel, int rank, int world_size,
                                      uint8_t *const *pages, const int *host_of, const char *path,
                                      sw_error *err);
void sw_channel_fini(sw_channel *channel);

bool sw_channel_is_carrier(const sw_channel *channel);
/* Copy between the host's pages and the file, if this rank has that task. The queries below call
 * this first, except those of a const channel. */
void sw_channel_relay(sw_channel *channel, uint64_t number);

/* Announce that the files of save `number` exist (rank 0), or that its host's file exists (another
 * carrier). Resets the reserved bytes of tallies. */
void sw_channel_say_open(sw_channel *channel, uint64_t number);
/* True once this rank may write to the files: its carrier has announced them. */
bool sw_channel_is_open(sw_channel *channel, uint64_t number);
/* On a carrier of another host than rank 0's: true once rank 0 has announced its files. */
bool sw_channel_is_open_at_first(sw_channel *channel, uint64_t number);

/* Reserve `bytes` for tallies in the host's file; return the offset of the first one. */
uint64_t sw_channel_take_place(sw_channel *channel, uint64_t bytes);
/* On a carrier: record that the host's file of tallies now has `bytes`. */
void sw_channel_set_tally_bytes(sw_channel *channel, uint64_t bytes);
/* Return the host after the last one with tallies that this carrier merges. It merges those of its
 * own host; the first carrier of a group, those of the group. */
int sw_channel_merges_until(const sw_channel *channel);
/* On a carrier: true once the other ranks of its host have written, and so have the other hosts
 * with tallies that it merges. */
bool sw_channel_have_others_written(sw_channel *channel, uint64_t number);
void sw_channel_say_written(sw_channel *channel, uint64_t number);
/* On rank 0: return the lowest rank that has not written, or with a host that has not; -1: all have
 * written. A group's first host reports after the others of its group, so those come before it. */
int sw_channel_find_unwritten(sw_channel *channel, uint64_t number);
/* Return the lowest rank from `from` on, of this host, that has not written; -1: none. Any thread.
 */
int sw_channel_find_unwritten_here(const sw_channel *channel, uint64_t number, int from);
/* Return the bytes of tallies of a host after all of its ranks have written. Rank 0 may ask for any
 * host, a carrier for those that it merges. */
uint64_t sw_channel_tally_bytes(const sw_channel *channel, int host);

/* Report to rank 0 that this rank failed save `number`. Retry for at most 30 s if the file cannot
 * be written. */
void sw_channel_fail(sw_channel *channel, uint64_t number, const sw_error *reason);
/* On rank 0: true if a rank failed the save; *err then names the rank, in the message that all
 * ranks get. */
bool sw_channel_has_failure(sw_channel *channel, uint64_t number, sw_error *err);
/* On rank 0: announce that a verdict will follow, however long the commit takes. A rank that gave
 * up before it read this has reported a failure: sw_channel_has_failure. */
void sw_channel_say_committing(sw_channel *channel, uint64_t number);
bool sw_channel_is_committing(sw_channel *channel, uint64_t number);
/* On rank 0: publish SW_OK or the error of save `number`. Retry for at most 30 s if the file cannot
 * be written. */
void sw_channel_decide(sw_channel *channel, uint64_t number, const sw_error *verdict);
/* True once rank 0 has decided `number`; *verdict is then filled (status SW_OK: committed). */
bool sw_channel_is_decided(sw_channel *channel, uint64_t number, sw_error *verdict);
/* True if the file has been missing for some seconds: no verdict is known and none can arrive. *why
 * then says so. */
bool sw_channel_is_gone(const sw_channel *channel, sw_error *why);
