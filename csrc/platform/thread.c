/* thread.c - see thread.h. */
#include "platform/thread.h"

#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "platform/clock.h"

/* ---- one thread: pthread_create with signals blocked ---- */

enum { REST_SPIN_NS = 50000, REST_NAP_NS = 50000 }; /* yields for this long, then sleeps */

enum { STACK_BYTES = 1 << 20 };

enum {
    IOPRIO_WHO_PROCESS = 1,
    IOPRIO_CLASS_IDLE = 3,
    IOPRIO_CLASS_SHIFT = 13
}; /* linux/ioprio.h */

/* A thread that names another opens /proc/self/task, whose entries slow the end of the process. */
static void *begin(void *thread_)
{
    sw_thread *thread = thread_;
    prctl(PR_SET_NAME, thread->name);
    return thread->body(thread->argument);
}

sw_status sw_thread_start(sw_thread *thread, void *(*body)(void *), void *argument,
                          const char *name, sw_error *err)
{
    sigset_t all, before;
    *thread = (sw_thread){.body = body, .argument = argument};
    strncat(thread->name, name, sizeof thread->name - 1);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* a thread inherits its creator's mask */
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
#ifndef __GLIBC__ /* musl gives a thread 128 KiB, and a codec's frame takes 40 */
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
#endif
    int code = pthread_create(&thread->handle, &attributes, begin, thread);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code != 0)
        return sw_error_set(err, SW_E_OS, code, "a thread for '%s' could not be started: %s", name,
                            strerror(code));
    thread->is_started = true;
    return SW_OK;
}

void sw_thread_join(sw_thread *thread)
{
    if (thread->is_started)
        pthread_join(thread->handle, NULL);
    thread->is_started = false;
}

void sw_thread_lower_io_priority(void)
{
    syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, IOPRIO_CLASS_IDLE << IOPRIO_CLASS_SHIFT);
}

void sw_thread_lower_priority(void)
{
    (void)setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), 5); /* on Linux: of one thread */
}

void sw_thread_sleep_ns(long nanoseconds)
{
    struct timespec time = {.tv_sec = nanoseconds / 1000000000,
                            .tv_nsec = nanoseconds % 1000000000};
    nanosleep(&time, NULL);
}

void sw_thread_rest_after(int64_t waited_ns, int64_t yields_ns)
{
    if (waited_ns < yields_ns)
        sched_yield();
    else
        sw_thread_sleep_ns(REST_NAP_NS);
}

void sw_thread_rest(int64_t waited_ns)
{
    sw_thread_rest_after(waited_ns, REST_SPIN_NS);
}

void sw_thread_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
}

struct timespec sw_thread_time_after(int64_t nanoseconds)
{
    int64_t when = sw_clock_now_ns() + nanoseconds;
    return (struct timespec){.tv_sec = (time_t)(when / 1000000000),
                             .tv_nsec = (long)(when % 1000000000)};
}

/* ---- a crew: one mutex suffices, since an item takes far longer than a lock ---- */

/* Takes items until none is left. The mutex is held at the start and at the end. */
static void take_items_locked(sw_crew *crew)
{
    while (crew->next < crew->items) {
        size_t item = crew->next++;
        sw_crew_fn *work = crew->work;
        void *context = crew->context;
        sw_error err;
        pthread_mutex_unlock(&crew->mutex);
        sw_status status = work(context, item, &err);
        pthread_mutex_lock(&crew->mutex);
        crew->done++;
        if (status != SW_OK) {
            if (crew->failure.status == SW_OK)
                crew->failure = err;
            crew->done += crew->items - crew->next; /* no thread will start them */
            crew->next = crew->items;
        }
    }
    if (crew->done == crew->items)
        pthread_cond_signal(&crew->finished);
}

static void *help(void *argument)
{
    sw_crew *crew = argument;
    pthread_mutex_lock(&crew->mutex);
    while (!crew->ends) {
        take_items_locked(crew);
        if (!crew->ends)
            pthread_cond_wait(&crew->called, &crew->mutex);
    }
    pthread_mutex_unlock(&crew->mutex);
    return NULL;
}

sw_status sw_crew_init(sw_crew *crew, int helper_count, const char *name, sw_error *err)
{
    *crew = (sw_crew){.helper_count = helper_count};
    crew->helpers = calloc((size_t)helper_count + 1, sizeof *crew->helpers);
    if (!crew->helpers)
        SW_FAIL(err, SW_E_MEMORY, "crew '%s': no memory for %d threads", name, helper_count);
    pthread_mutex_init(&crew->mutex, NULL);
    pthread_cond_init(&crew->called, NULL);
    pthread_cond_init(&crew->finished, NULL);
    for (int i = 0; i < helper_count; ++i) {
        sw_status status = sw_thread_start(&crew->helpers[i], help, crew, name, err);
        if (status != SW_OK) {
            sw_crew_fini(crew);
            return status;
        }
    }
    return SW_OK;
}

sw_status sw_crew_run(sw_crew *crew, sw_crew_fn *work, void *context, size_t items, sw_error *err)
{
    pthread_mutex_lock(&crew->mutex);
    crew->work = work;
    crew->context = context;
    crew->items = items;
    crew->next = crew->done = 0;
    crew->failure.status = SW_OK;
    pthread_cond_broadcast(&crew->called);
    take_items_locked(crew);
    while (crew->done < crew->items)
        pthread_cond_wait(&crew->finished, &crew->mutex);
    sw_status status = crew->failure.status;
    if (err && status != SW_OK)
        *err = crew->failure;
    crew->items = crew->next = crew->done = 0;
    pthread_mutex_unlock(&crew->mutex);
    return status;
}

void sw_crew_fini(sw_crew *crew)
{
    pthread_mutex_lock(&crew->mutex);
    crew->ends = true;
    pthread_cond_broadcast(&crew->called);
    pthread_mutex_unlock(&crew->mutex);
    for (int i = 0; i < crew->helper_count; ++i)
        sw_thread_join(&crew->helpers[i]);
    pthread_cond_destroy(&crew->finished);
    pthread_cond_destroy(&crew->called);
    pthread_mutex_destroy(&crew->mutex);
    free(crew->helpers);
}
