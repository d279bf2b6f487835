/* thread.h - a background thread that no signal interrupts, and a crew of them that share a work.
 *
 * Thread rule: owner only; a crew's helpers call nothing but the work. */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "base/status.h"

/* ---- one thread ---- */

typedef struct sw_thread {
    pthread_t handle;
    bool is_started;
    void *(*body)(void *);
    void *argument;
    char name[16];
} sw_thread;

/* Runs body(argument) with every signal blocked, so that handlers run on the program's threads.
 * `name` is cut to 15 bytes. SW_E_OS if the system can start no more threads. */
SW_MUST_USE sw_status sw_thread_start(sw_thread *thread, void *(*body)(void *), void *argument,
                                      const char *name, sw_error *err);

/* Waits for the thread's end; no effect if it was never started. */
void sw_thread_join(sw_thread *thread);

/* Gives the calling thread's reads and writes the lowest priority, if the I/O scheduler has
 * priorities. */
void sw_thread_lower_io_priority(void);

/* Lets the calling thread yield to others from now on: beside one of them it gets a quarter of a
 * core. A hint. */
void sw_thread_lower_priority(void);

/* Sleeps; may end early. */
void sw_thread_sleep_ns(long nanoseconds);

/* Pauses between two polls: yields the core during a short wait, then sleeps. The second one yields
 * for `yields_ns`, for waits that end soon and are many: a sleep takes twice its time. */
void sw_thread_rest(int64_t waited_ns);
void sw_thread_rest_after(int64_t waited_ns, int64_t yields_ns);

/* A condition on the monotonic clock, and a time of that clock for it. */
void sw_thread_cond_init(pthread_cond_t *cond);
struct timespec sw_thread_time_after(int64_t nanoseconds);

/* ---- a crew ---- */

/* A few threads share the items of one piece of work at a time. They take items one by one, so a
 * delayed thread leaves the rest to the others. The caller takes items too, so a crew without
 * helpers is a plain loop. An item's result must not depend on its thread. */

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
