/* process.c - see process.h. */
#include "platform/process.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#ifndef F_OFD_GETLK
#define F_OFD_GETLK 36
#endif

static struct flock one_byte(int byte)
{
    return (struct flock){
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)byte, .l_len = 1};
}

bool sw_process_hold_lock(int fd, int byte)
{
    struct flock lock = one_byte(byte);
    return fcntl(fd, F_SETLK, &lock) == 0;
}

/* F_GETLK ignores locks of this process, even another thread's; F_OFD_GETLK sees them. Older
 * kernels only have F_GETLK. */
bool sw_process_lock_is_free(int fd, int byte)
{
    struct flock lock = one_byte(byte);
    if (fd < 0 ||
        (fcntl(fd, F_OFD_GETLK, &lock) != 0 && (errno != EINVAL || fcntl(fd, F_GETLK, &lock) != 0)))
        return false;
    return lock.l_type == F_UNLCK;
}

bool sw_process_is_stopped(int pid)
{
    char text[512];
    if (pid <= 0)
        return false;
    snprintf(text, sizeof text, "/proc/%d/stat", pid);
    FILE *file = fopen(text, "re");
    if (!file)
        return false;
    char *line = fgets(text, sizeof text, file);
    fclose(file);
    char *end = line ? strrchr(line, ')') : NULL;
    return end && end[1] == ' ' && (end[2] == 'T' || end[2] == 't');
}

int sw_process_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return 1;
    int count = CPU_COUNT(&set);
    return count > 0 ? count : 1;
}
