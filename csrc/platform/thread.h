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

/* Runs body(argument) with every signal blocked: handlers belong to the program's own threads.
 * `name` is cut to 15 bytes. SW_E_OS when the system has no thread left. */
SW_MUST_USE sw_status sw_thread_start(sw_thread *thread, void *(*body)(void *), void *argument,
                                      const char *name, sw_error *err);

/* Waits for the thread's end; nothing when it was never started. */
void sw_thread_join(sw_thread *thread);

/* Lets reads and writes of the calling thread yield to all others, where the I/O scheduler knows
 * priorities. */
void sw_thread_lower_io_priority(void);

/* Lets the calling thread yield to others, for good: beside one of them it gets a quarter of a
 * core. A hint. */
void sw_thread_lower_priority(void);

/* Sleeps; a hint, may end early. */
void sw_thread_sleep_ns(long nanoseconds);

/* Between two looks at something that is polled: gives the core away while little was waited, and
 * sleeps afterwards. */
void sw_thread_rest(int64_t waited_ns);

#endif
