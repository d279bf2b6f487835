/* board.c - a few words written before a number, read after it. */
#include "checkpoint/board.h"

#include <inttypes.h>
#include <stdlib.h>

_Static_assert(sizeof(sw_board_page) <= SW_BOARD_PAGE_BYTES, "a rank's words fit its page");

sw_status sw_board_init(sw_board *board, int rank, int world_size, uint8_t *const *pages,
                        sw_error *err)
{
    sw_board made = {.rank = rank,
                     .world_size = world_size,
                     .pages = calloc((size_t)world_size, sizeof *made.pages)};
    if (made.pages && !pages)
        made.alone = calloc(1, sizeof *made.alone);
    if (!made.pages || (!pages && !made.alone)) {
        free(made.pages);
        SW_FAIL(err, SW_E_MEMORY, "no memory for the board of %d ranks", world_size);
    }
    for (int r = 0; r < world_size; ++r)
        made.pages[r] = pages ? (sw_board_page *)(void *)pages[r] : made.alone;
    *board = made;
    return SW_OK;
}

void sw_board_fini(sw_board *board)
{
    free(board->pages);
    free(board->alone);
    *board = (sw_board){0};
}

void sw_board_begin(sw_board *board, uint64_t number, uint64_t step)
{
    sw_board_page *page = board->pages[board->rank];
    atomic_store_explicit(&page->step, step, memory_order_relaxed);
    atomic_store_explicit(&page->begun, number, memory_order_release);
}

void sw_board_fail(sw_board *board, uint64_t number, const sw_error *reason)
{
    sw_board_page *page = board->pages[board->rank];
    page->failure = *reason;
    atomic_store_explicit(&page->failed, number, memory_order_release);
}

bool sw_board_has_failure(const sw_board *board, uint64_t number, uint64_t step, sw_error *err)
{
    for (int r = 0; r < board->world_size; ++r) {
        sw_board_page *page = board->pages[r];
        if (atomic_load_explicit(&page->failed, memory_order_acquire) >= number) {
            if (board->world_size == 1)
                *err = page->failure;
            else
                (void)sw_error_set(err, page->failure.status, page->failure.detail,
                                   "rank %d: %.480s", r, page->failure.message);
            return true;
        }
        if (atomic_load_explicit(&page->begun, memory_order_acquire) == number) {
            uint64_t theirs = atomic_load_explicit(&page->step, memory_order_relaxed);
            if (theirs != step) {
                (void)sw_error_set(err, SW_E_MISMATCH, -1,
                                   "rank 0 saves step %" PRIu64
                                   " while rank %d saves step %" PRIu64,
                                   step, r, theirs);
                return true;
            }
        }
    }
    return false;
}

void sw_board_decide(sw_board *board, uint64_t number, const sw_error *verdict)
{
    sw_board_page *page = board->pages[0];
    page->verdicts[number % 4] = *verdict;
    atomic_store_explicit(&page->decided, number, memory_order_release);
}

bool sw_board_is_decided(const sw_board *board, uint64_t number, sw_error *verdict)
{
    sw_board_page *page = board->pages[0];
    if (atomic_load_explicit(&page->decided, memory_order_acquire) < number)
        return false;
    *verdict = page->verdicts[number % 4];
    return true;
}
