/* board.c - a few words written before a number, read after it. */
#include "checkpoint/board.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/crc32c.h"
#include "platform/clock.h"
#include "platform/file.h"

enum { CRC_AT = SW_BOARD_PAGE_BYTES - 4, LOOK_EVERY_NS = 20000000, GONE_S = 5 };
_Static_assert(sizeof(sw_board_page) <= CRC_AT, "a rank's words and their checksum fit its page");

/* `pages` NULL: of the board's own. */
static sw_status make(sw_board *board, int rank, int world_size, uint8_t *const *pages,
                      sw_error *err)
{
    sw_board made = {.rank = rank,
                     .world_size = world_size,
                     .pages = calloc((size_t)world_size, sizeof *made.pages)};
    if (made.pages && !pages)
        made.own_pages = calloc((size_t)world_size, sizeof *made.own_pages);
    if (!made.pages || (!pages && !made.own_pages)) {
        free(made.pages);
        SW_FAIL(err, SW_E_MEMORY, "no memory for the board of %d ranks", world_size);
    }
    for (int r = 0; r < world_size; ++r)
        made.pages[r] = pages ? (sw_board_page *)(void *)pages[r] : &made.own_pages[r];
    *board = made;
    return SW_OK;
}

sw_status sw_board_init(sw_board *board, int rank, int world_size, uint8_t *const *pages,
                        sw_error *err)
{
    return make(board, rank, world_size, pages, err);
}

sw_status sw_board_init_file(sw_board *board, int rank, int world_size, const char *path,
                             sw_error *err)
{
    SW_TRY(make(board, rank, world_size, NULL, err));
    board->path = strdup(path);
    if (!board->path) {
        sw_board_fini(board);
        SW_FAIL(err, SW_E_MEMORY, "no memory for the name of a board of %d ranks", world_size);
    }
    return SW_OK;
}

void sw_board_fini(sw_board *board)
{
    free(board->pages);
    free(board->own_pages);
    free(board->path);
    *board = (sw_board){0};
}

/* This rank's page to the file; again at the next look if it cannot be done. */
static void tell(sw_board *board)
{
    uint8_t bytes[SW_BOARD_PAGE_BYTES] = {0};
    struct iovec part = {.iov_base = bytes, .iov_len = sizeof bytes};
    int fd = -1;
    sw_error ignored;
    if (!board->path)
        return;
    memcpy(bytes, board->pages[board->rank], sizeof(sw_board_page));
    uint32_t crc = sw_crc32c(0, bytes, CRC_AT);
    memcpy(bytes + CRC_AT, &crc, sizeof crc);
    board->is_told = false;
    if (sw_file_open_write(board->path, false, &fd, &ignored) != SW_OK)
        return;
    sw_status status = sw_file_write_at(fd, board->path, &part, 1,
                                        (uint64_t)board->rank * SW_BOARD_PAGE_BYTES, &ignored);
    sw_status closed = sw_file_close(&fd, board->path, &ignored);
    board->is_told = status == SW_OK && closed == SW_OK;
}

/* Takes a page from the file; one that is being written, or was never, stays as it was. */
static void take(sw_board *board, int fd, int rank)
{
    uint8_t bytes[SW_BOARD_PAGE_BYTES];
    uint32_t crc;
    sw_error ignored;
    if (sw_file_read_at(fd, board->path, bytes, sizeof bytes, (uint64_t)rank * sizeof bytes,
                        &ignored) != SW_OK)
        return;
    memcpy(&crc, bytes + CRC_AT, sizeof crc);
    if (crc == sw_crc32c(0, bytes, CRC_AT))
        memcpy(board->pages[rank], bytes, sizeof(sw_board_page));
}

/* Others' pages [0, count) from the file. */
static void look(sw_board *board, int count)
{
    int fd = -1;
    uint64_t size_bytes;
    sw_error why = {0};
    int64_t now_ns = sw_clock_now_ns();
    if (!board->path || (board->looked_ns && now_ns - board->looked_ns < LOOK_EVERY_NS))
        return;
    board->looked_ns = now_ns;
    sw_status status = sw_file_open_read(board->path, false, &fd, &size_bytes, &why);
    if (status == SW_OK)
        board->gone_ns = 0;
    else if (why.detail == ENOENT && !board->gone_ns)
        board->gone_ns = now_ns;
    if (status != SW_OK)
        return;
    if (!board->is_told)
        tell(board);
    for (int r = 0; r < count; ++r)
        if (r != board->rank)
            take(board, fd, r);
    status = sw_file_close(&fd, board->path, NULL);
    (void)status;
}

void sw_board_begin(sw_board *board, uint64_t number, uint64_t step)
{
    sw_board_page *page = board->pages[board->rank];
    atomic_store_explicit(&page->step, step, memory_order_relaxed);
    atomic_store_explicit(&page->begun, number, memory_order_release);
    tell(board);
}

void sw_board_fail(sw_board *board, uint64_t number, const sw_error *reason)
{
    sw_board_page *page = board->pages[board->rank];
    page->failure = *reason;
    atomic_store_explicit(&page->failed, number, memory_order_release);
    tell(board);
}

/* Rank 0 makes it anew before it begins a save: others may come a moment earlier. */
bool sw_board_is_gone(const sw_board *board, sw_error *why)
{
    bool is_gone =
        board->gone_ns && board->looked_ns - board->gone_ns > GONE_S * INT64_C(1000000000);
    if (is_gone)
        (void)sw_error_set(why, SW_E_OS, ENOENT,
                           "'%.400s', by which the ranks of other hosts are heard, is gone",
                           board->path);
    return is_gone;
}

bool sw_board_has_failure(sw_board *board, uint64_t number, uint64_t step, sw_error *err)
{
    look(board, board->world_size);
    if (sw_board_is_gone(board, err))
        return true;
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
    tell(board);
}

bool sw_board_is_decided(sw_board *board, uint64_t number, sw_error *verdict)
{
    sw_board_page *page = board->pages[0];
    look(board, 1);
    if (atomic_load_explicit(&page->decided, memory_order_acquire) < number)
        return false;
    *verdict = page->verdicts[number % 4];
    return true;
}
