/* poor_files.c - to be preloaded: a file system that lacks operations. Each setting is the errno with
 * which one fails; it is read at each call and concerns what lies in POOR_FOLDER.
 *
 * POOR_SYNC_FOLDER, POOR_SYNC_FILE: fsync. POOR_LOCK: every lock. POOR_OPEN_FILE_LOCK: locks of open
 * files, but not flock(). POOR_ALLOCATE: fallocate. POOR_LINK: hard links. POOR_DIRECT: O_DIRECT.
 * POOR_NAMELESS: O_TMPFILE. POOR_EXCHANGE: renameat2.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REAL(type, name) ((type)dlsym(RTLD_NEXT, name))

static int lacks(const char *name)
{
    const char *value = getenv(name);
    if (value && *value)
        errno = atoi(value);
    return value && *value;
}

static int is_ours(const char *path)
{
    const char *folder = getenv("POOR_FOLDER");
    return folder && strncmp(path, folder, strlen(folder)) == 0;
}

static int is_open_there(int fd)
{
    char link[64], at[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, at, sizeof at - 1);
    at[length < 0 ? 0 : length] = 0;
    return is_ours(at);
}

int fsync(int fd)
{
    struct stat info;
    if (fstat(fd, &info) == 0 && is_open_there(fd) &&
        lacks(S_ISDIR(info.st_mode) ? "POOR_SYNC_FOLDER" : "POOR_SYNC_FILE"))
        return -1;
    return REAL(int (*)(int), "fsync")(fd);
}

static int control(const char *name, int fd, int command, void *argument)
{
    int is_lock = command == F_OFD_SETLK || command == F_OFD_SETLKW || command == F_SETLK;
    if (is_lock && is_open_there(fd)) {
        if (lacks("POOR_LOCK") || (command != F_SETLK && lacks("POOR_OPEN_FILE_LOCK")))
            return -1;
    }
    return REAL(int (*)(int, int, ...), name)(fd, command, argument);
}

int fcntl(int fd, int command, ...)
{
    va_list more;
    va_start(more, command);
    void *argument = va_arg(more, void *);
    va_end(more);
    return control("fcntl", fd, command, argument);
}

int fcntl64(int fd, int command, ...)
{
    va_list more;
    va_start(more, command);
    void *argument = va_arg(more, void *);
    va_end(more);
    return control("fcntl64", fd, command, argument);
}

int flock(int fd, int operation)
{
    if (is_open_there(fd) && lacks("POOR_LOCK"))
        return -1;
    return REAL(int (*)(int, int), "flock")(fd, operation);
}

int fallocate(int fd, int mode, off_t at, off_t size)
{
    if (is_open_there(fd) && lacks("POOR_ALLOCATE"))
        return -1;
    return REAL(int (*)(int, int, off_t, off_t), "fallocate")(fd, mode, at, size);
}

int link(const char *from, const char *to)
{
    if (is_ours(to) && lacks("POOR_LINK"))
        return -1;
    return REAL(int (*)(const char *, const char *), "link")(from, to);
}

static int refuses(const char *path, int flags)
{
    return is_ours(path) && (((flags & O_DIRECT) && lacks("POOR_DIRECT")) ||
                             ((flags & O_TMPFILE) == O_TMPFILE && lacks("POOR_NAMELESS")));
}

int open(const char *path, int flags, ...)
{
    va_list more;
    va_start(more, flags);
    mode_t mode = va_arg(more, mode_t);
    va_end(more);
    if (refuses(path, flags))
        return -1;
    return REAL(int (*)(const char *, int, ...), "open")(path, flags, mode);
}

int open64(const char *path, int flags, ...)
{
    va_list more;
    va_start(more, flags);
    mode_t mode = va_arg(more, mode_t);
    va_end(more);
    if (refuses(path, flags))
        return -1;
    return REAL(int (*)(const char *, int, ...), "open64")(path, flags, mode);
}

long syscall(long number, ...)
{
    long a[6];
    va_list more;
    va_start(more, number);
    for (int i = 0; i < 6; ++i)
        a[i] = va_arg(more, long);
    va_end(more);
    if (number == SYS_renameat2 && lacks("POOR_EXCHANGE"))
        return -1;
    return REAL(long (*)(long, ...), "syscall")(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
