/* crew.h - a few threads that share the items of one piece of work at a time.
 *
 * Idea: threads take items one by one, so a delayed thread leaves the rest to the others. The
 * caller takes items too, so a crew without helpers is a plain loop. An item's result must not
 * depend on its thread.
 *
 * Thread rule: owner only; helpers call nothing but the work.
 */
#ifndef SW_PLATFORM_CREW_H
#define SW_PLATFORM_CREW_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "platform/thread.h"

/* Runs item `item` of the work behind `context`. */
typedef sw_status sw_crew_fn(void *context, size_t item, sw_error *err);

typedef struct sw_crew {
    sw_thread *helpers; /* owned */
    int helper_count;
    pthread_mutex_t mutex;
    pthread_cond_t called, finished;
    sw_crew_fn *work;         /* mutex, as all below */
    void *context;            /* borrowed for one sw_crew_run */
    size_t items, next, done; /* items of this work: total, started, ended */
    sw_error failure;         /* the first failure */
    bool ends;
} sw_crew;

/* Starts `helper_count` >= 0 threads besides the caller's. `name` as in sw_thread_start. SW_E_OS if
 * the system can start no more threads; SW_E_MEMORY. On failure no thread is left running. */
SW_MUST_USE sw_status sw_crew_init(sw_crew *crew, int helper_count, const char *name,
                                   sw_error *err);

/* Runs work(context, i) for each i below `items` and returns when all have ended. After the first
 * failure, which is returned, no more are started. Cost: a lock for each item. */
SW_MUST_USE sw_status sw_crew_run(sw_crew *crew, sw_crew_fn *work, void *context, size_t items,
                                  sw_error *err);

/* Ends the helpers. */
void sw_crew_fini(sw_crew *crew);

#endif
