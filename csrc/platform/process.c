/* process.c - see process.h. */
#include "platform/process.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

int sw_process_open_self(void)
{
    return (int)syscall(SYS_pidfd_open, getpid(), 0); /* pidfds are close-on-exec by themselves */
}

bool sw_process_has_ended(int pidfd)
{
    struct pollfd watch = {.fd = pidfd, .events = POLLIN};
    return pidfd >= 0 && poll(&watch, 1, 0) == 1 && (watch.revents & POLLIN);
}

static struct flock first_byte(void)
{
    return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
}

bool sw_process_hold_lock(int fd)
{
    struct flock lock = first_byte();
    return fcntl(fd, F_SETLK, &lock) == 0;
}

bool sw_process_lock_is_free(int fd)
{
    struct flock lock = first_byte();
    return fd >= 0 && fcntl(fd, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

char sw_process_state(int pid)
{
    char text[512];
    snprintf(text, sizeof text, "/proc/%d/stat", pid);
    FILE *file = fopen(text, "re");
    if (!file)
        return '?';
    char *line = fgets(text, sizeof text, file);
    fclose(file);
    char *end = line ? strrchr(line, ')') : NULL;
    return end && end[1] == ' ' ? end[2] : '?';
}

int sw_process_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return 1;
    int count = CPU_COUNT(&set);
    return count > 0 ? count : 1;
}
