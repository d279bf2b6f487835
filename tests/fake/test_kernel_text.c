/* test_kernel_text.c - compare the .cu text, compiled by the host's compiler, with the contracts'
 * references.
 *
 * Law: for every case of csrc_check/kernel_cases.h and several grids, the arena after the text ran
 * equals the arena after the reference ran, guard bytes included, and only declared bytes changed.
 * Every kernel has cases, and making a case twice gives the same bytes. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "kernel_cases.h"
#include "kernel_references.h"

bool run_kernel_text(int kernel, const void *args, unsigned blocks, unsigned threads);

static bool is_long;
static unsigned char *arena, *before, *by_reference, *writable;

static void mark(void *context, const void *begin, size_t size_bytes, sw_access access)
{
    (void)context;
    if (size_bytes > 0 && access & SW_ACCESS_WRITE)
        memset(writable + ((const unsigned char *)begin - arena), 1, size_bytes);
}

/* Return the first byte of the arena that differs from `expected` and is not allowed to (NULL:
 * none is); `bytes` if there is none. */
static size_t first_difference(const unsigned char *expected, const unsigned char *allowed,
                               size_t bytes)
{
    enum { PIECE_BYTES = 4096 };
    for (size_t at = 0; at < bytes; at += PIECE_BYTES)
        if (memcmp(arena + at, expected + at, PIECE_BYTES) != 0)
            for (size_t i = at; i < at + PIECE_BYTES; ++i)
                if (arena[i] != expected[i] && !(allowed && allowed[i]))
                    return i;
    return bytes;
}

static void run_text(sw_kernel kernel, size_t index, const sw_kernel_case *made, sw_grid grid)
{
    const char *name = sw_kernel_contracts()[kernel].name;
    size_t bytes = made->arena_bytes;
    memcpy(arena, before, bytes);
    check(run_kernel_text((int)kernel, made->args.bytes, grid.block_count, grid.thread_count),
          "%s case %zu: threads wait for one another", name, index);
    size_t stray = first_difference(before, writable, bytes);
    sw_kernel_case_settle(kernel, made->args.bytes);
    size_t differ = first_difference(by_reference, NULL, bytes);
    check(differ == bytes, "%s case %zu (%s), grid %u x %u: byte %zu is %02x, not %02x", name,
          index, made->label, grid.block_count, grid.thread_count, differ, arena[differ % bytes],
          by_reference[differ % bytes]);
    check(stray == bytes, "%s case %zu (%s): byte %zu was written undeclared", name, index,
          made->label, stray);
}

static void run_case(sw_kernel kernel, size_t index)
{
    const sw_kernel_contract *contract = &sw_kernel_contracts()[kernel];
    /* These kernels need whole warps. */
    const bool is_warps =
        (kernel >= SW_KERNEL_QUANTIZE && kernel <= SW_KERNEL_DECODE) || kernel == SW_KERNEL_PROJECT;
    const sw_grid grids[] = {{1, 32}, {3, 64}, {is_warps ? 2 : 5, is_warps ? 96 : 17}};
    size_t grid_count = kernel == SW_KERNEL_CLIP ? 1 : sizeof grids / sizeof *grids;
    static sw_kernel_case made;
    sw_error err = {0};
    sw_kernel_case_make(kernel, index, arena, &made);
    if (!check(contract->check(made.args.bytes, &err) == SW_OK, "%s: %s", contract->name,
               err.message))
        return;
    memcpy(before, arena, made.arena_bytes);
    memset(writable, 0, made.arena_bytes);
    sw_kernel_references()[kernel].accesses(made.args.bytes, mark, NULL);
    sw_kernel_references()[kernel].reference(made.args.bytes);
    sw_kernel_case_settle(kernel, made.args.bytes);
    memcpy(by_reference, arena, made.arena_bytes);
    /* In turns, since the text runs one thread at a time; every grid in the long form. */
    if (made.arena_bytes > SW_CASE_BYTES)
        grid_count = 1;
    for (size_t g = 0; g < grid_count; ++g)
        if (is_long || g == index % grid_count)
            run_text(kernel, index, &made, grids[g]);
}

/* A case that was made again, and moved to an address that is far away. */
static void check_that_cases_repeat(sw_kernel kernel)
{
    static sw_kernel_case once, again, moved;
    sw_kernel_case_make(kernel, 1, arena, &once);
    memcpy(before, arena, once.arena_bytes);
    sw_kernel_case_make(kernel, 1, arena, &again);
    check(memcmp(&once, &again, sizeof once) == 0 &&
              first_difference(before, NULL, once.arena_bytes) == once.arena_bytes,
          "%s: case 1 is another the second time", sw_kernel_contracts()[kernel].name);
    moved = once;
    sw_kernel_case_move(kernel, &moved, arena, UINT64_C(0x700000000000));
    check(memcmp(&once, &moved, sizeof once) != 0, "%s: case 1 has no pointers",
          sw_kernel_contracts()[kernel].name);
}

int main(void)
{
    const char *asked = getenv("SW_TEST_LONG");
    is_long = asked && strcmp(asked, "1") == 0;
    arena = aligned_alloc(SW_CASE_ALIGNMENT, SW_CASE_BYTES_MAX);
    before = malloc(SW_CASE_BYTES_MAX);
    by_reference = malloc(SW_CASE_BYTES_MAX);
    writable = malloc(SW_CASE_BYTES_MAX);
    for (int k = 0; k < SW_KERNEL_COUNT; ++k) {
        size_t count = sw_kernel_case_count((sw_kernel)k);
        check(count > 4, "kernel %d has no cases", k);
        check_that_cases_repeat((sw_kernel)k);
        for (size_t index = 0; index < count; ++index)
            run_case((sw_kernel)k, index);
    }
    free(arena);
    free(before);
    free(by_reference);
    free(writable);
    return check_result();
}
