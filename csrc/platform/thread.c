/* thread.c - pthread_create with signals blocked, and a system call that glibc does not wrap.
 */
#include "platform/thread.h"

#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { REST_SPIN_NS = 50000, REST_NAP_NS = 50000 }; /* yields for this long, then sleeps */

enum {
    IOPRIO_WHO_PROCESS = 1,
    IOPRIO_CLASS_IDLE = 3,
    IOPRIO_CLASS_SHIFT = 13
}; /* linux/ioprio.h */

sw_status sw_thread_start(sw_thread *thread, void *(*body)(void *), void *argument,
                          const char *name, sw_error *err)
{
    sigset_t all, before;
    char short_name[16] = "";
    strncat(short_name, name, sizeof short_name - 1);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* a thread inherits its creator's mask */
    int code = pthread_create(&thread->handle, NULL, body, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code != 0)
        return sw_error_set(err, SW_E_OS, code, "a thread for '%s' could not be started: %s", name,
                            strerror(code));
    thread->is_started = true;
    pthread_setname_np(thread->handle, short_name);
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
