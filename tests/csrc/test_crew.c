/* test_crew.c - a crew does each item once, on any thread; the first failure is returned, and no
 * item starts after it; a crew without helpers is a loop. */
#include <stdatomic.h>
#include <string.h>

#include "check.h"
#include "platform/thread.h"

enum { ITEMS = 2000, ROUNDS = 50, HELPERS = 3, FAILS_AT = 7 };

typedef struct work {
    int done[ITEMS]; /* each item is written by one thread */
    atomic_int begun;
    size_t fails_at;
} work;

static sw_status do_item(void *context, size_t item, sw_error *err)
{
    work *w = context;
    atomic_fetch_add(&w->begun, 1);
    if (item == w->fails_at)
        SW_FAIL(err, SW_E_INVALID, "item %zu is refused", item);
    w->done[item]++;
    return SW_OK;
}

static void check_rounds(int helpers)
{
    static work w;
    sw_crew crew;
    sw_error err;
    if (!check(sw_crew_init(&crew, helpers, "test", &err) == SW_OK, "%d helpers", helpers))
        return;
    memset(&w, 0, sizeof w);
    w.fails_at = ITEMS;
    for (int round = 0; round < ROUNDS; ++round)
        check(sw_crew_run(&crew, do_item, &w, (size_t)(round == 0 ? 0 : ITEMS), &err) == SW_OK,
              "round %d", round);
    int wrong = 0;
    for (int i = 0; i < ITEMS; ++i)
        wrong += w.done[i] != ROUNDS - 1;
    check(wrong == 0, "%d helpers: %d items not done once a round", helpers, wrong);
    w.fails_at = FAILS_AT;
    w.begun = 0;
    err.message[0] = '\0';
    check(sw_crew_run(&crew, do_item, &w, ITEMS, &err) == SW_E_INVALID &&
              strcmp(err.message, "item 7 is refused") == 0,
          "a failure: %s", err.message);
    if (helpers == 0)
        check(w.begun == FAILS_AT + 1, "%d items begun", (int)w.begun);
    w.fails_at = ITEMS;
    check(sw_crew_run(&crew, do_item, &w, ITEMS, NULL) == SW_OK, "the round after a failure");
    sw_crew_fini(&crew);
}

int main(void)
{
    check_rounds(0);
    check_rounds(1);
    check_rounds(HELPERS);
    return check_result();
}
