/* thread.h - a background thread that no signal interrupts. Thread rule: owner only. */
#ifndef SW_PLATFORM_THREAD_H
#define SW_PLATFORM_THREAD_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

typedef struct sw_thread {
    pthread_t handle;
    bool is_started;
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

#endif
