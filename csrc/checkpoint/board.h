/* board.h - a page a rank, seen by all: who failed, and what rank 0 decided.
 *
 * On one host pages are memory that all ranks map. Over several they are a file on the file system
 * that the hosts share, which holds them from before the first save: a rank writes its page there
 * whole, with a checksum, and reads those of others into memory of its own, at most every 20 ms. It
 * opens the file each time: a network file system shows what others wrote to who opens, not to who
 * has open.
 *
 * Idea: saves are numbered 1, 2, ... alike on every rank. A rank writes only its own page, a number
 * last; so a number read (acquire) says that the words before it belong to that save or to a later
 * one. Rank 0 decides a save only once every rank has acknowledged it or one has failed, and a rank
 * leaves a save only after rank 0's decision. Rank 0 may fail a few saves in a row before a
 * sleeping peer looks: its last four verdicts stand side by side. No file is made for it, so it
 * works when the disk is full.
 *
 * Thread rule: one at a time of a rank (the owner's, while no save runs; else the save's); the
 * memory outlives every user.
 */
#ifndef SW_CHECKPOINT_BOARD_H
#define SW_CHECKPOINT_BOARD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

typedef struct sw_board_page {
    _Atomic uint64_t begun; /* the save this rank began last, and its step */
    _Atomic uint64_t step;
    _Atomic uint64_t failed;  /* the save this rank failed last; reason in failure */
    _Atomic uint64_t decided; /* rank 0: the save it decided last */
    sw_error failure;
    sw_error verdicts[4]; /* of save n at n % 4 */
} sw_board_page;

enum { SW_BOARD_PAGE_BYTES = 4096 };

typedef struct sw_board {
    int rank, world_size;
    sw_board_page **pages;    /* owned array; pages are borrowed, or in own_pages */
    sw_board_page *own_pages; /* owned; NULL when pages are given */
    char *path;               /* owned; the file; NULL: pages are memory */
    int64_t looked_ns;        /* when it was read last */
    int64_t gone_ns;          /* since when it is not there; 0: it was there */
    bool is_told;             /* the file has this rank's page as it is now */
} sw_board;

/* `pages`: a zeroed page of SW_BOARD_PAGE_BYTES a rank; NULL at world size 1. */
SW_MUST_USE sw_status sw_board_init(sw_board *board, int rank, int world_size,
                                    uint8_t *const *pages, sw_error *err);
/* `path`: a file of at least that many pages, zeroed before any rank comes here. */
SW_MUST_USE sw_status sw_board_init_file(sw_board *board, int rank, int world_size,
                                         const char *path, sw_error *err);
void sw_board_fini(sw_board *board);

void sw_board_begin(sw_board *board, uint64_t number, uint64_t step);
/* Tells rank 0 that this rank failed save `number`. */
void sw_board_fail(sw_board *board, uint64_t number, const sw_error *reason);
/* Rank 0: whether a rank failed `number` or is at another step; *err then says which, in words for
 * everybody. */
bool sw_board_has_failure(sw_board *board, uint64_t number, uint64_t step, sw_error *err);
/* Rank 0: SW_OK or the error of save `number`. */
void sw_board_decide(sw_board *board, uint64_t number, const sw_error *verdict);
/* Whether rank 0 has decided `number`; *verdict is then filled (status SW_OK: committed). */
bool sw_board_is_decided(sw_board *board, uint64_t number, sw_error *verdict);
/* Whether the file of a board is gone for some seconds, as of the last look: no verdict can come,
 * and none is known; *why then says so. */
bool sw_board_is_gone(const sw_board *board, sw_error *why);

#endif
