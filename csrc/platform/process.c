/* process.c - see process.h. */
#include "platform/process.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
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

sw_process_state sw_process_state_of(int pid)
{
    char text[512];
    if (pid <= 0)
        return SW_PROCESS_UNKNOWN;
    snprintf(text, sizeof text, "/proc/%d/stat", pid);
    FILE *file = fopen(text, "re");
    if (!file)
        return errno == ENOENT && access("/proc/self/stat", R_OK) == 0 ? SW_PROCESS_GONE
                                                                       : SW_PROCESS_UNKNOWN;
    char *line = fgets(text, sizeof text, file);
    fclose(file);
    char *end = line ? strrchr(line, ')') : NULL;
    if (!end || end[1] != ' ')
        return SW_PROCESS_UNKNOWN;
    switch (end[2]) {
    case 'R':
        return SW_PROCESS_RUNNING;
    case 'S':
    case 'I':
        return SW_PROCESS_SLEEPING;
    case 'D':
        return SW_PROCESS_IN_KERNEL;
    case 'T':
    case 't':
        return SW_PROCESS_STOPPED;
    case 'Z':
    case 'X':
        return SW_PROCESS_GONE;
    default:
        return SW_PROCESS_UNKNOWN;
    }
}

const char *sw_process_state_text(sw_process_state state)
{
    static const char *const texts[] = {
        [SW_PROCESS_UNKNOWN] = "",          [SW_PROCESS_RUNNING] = "running",
        [SW_PROCESS_SLEEPING] = "sleeping", [SW_PROCESS_IN_KERNEL] = "waiting for a disk or device",
        [SW_PROCESS_STOPPED] = "stopped",   [SW_PROCESS_GONE] = "gone"};
    return texts[state];
}

uint64_t sw_process_space(void)
{
    struct stat found;
    return stat("/proc/self/ns/pid", &found) == 0 ? (uint64_t)found.st_ino : 0;
}

int sw_process_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return 1;
    int count = CPU_COUNT(&set);
    return count > 0 ? count : 1;
}
