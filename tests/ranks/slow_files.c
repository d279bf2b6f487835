/* slow_files.c - to be preloaded: a file system that is slow, or that remembers missing names.
 *
 * SLOW_FSYNC_MS, SLOW_UNLINK_MS: what each fsync and each removal of a name takes at least.
 * SYNCED: a file to which the path of each file and folder that was synced is appended.
 * SLOW_MISSING_S: a name in SLOW_FOLDER that was not there stays missing for this long to the
 * process that looked, unless it makes the name itself, as a client of a network file system
 * remembers it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { NAMES_MAX = 4096, PATH_BYTES = 1024 };

static char missing[NAMES_MAX][PATH_BYTES];
static time_t since[NAMES_MAX];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static long setting(const char *name)
{
    const char *text = getenv(name);
    return text ? atol(text) : 0;
}

static void rest(const char *name)
{
    long ms = setting(name);
    struct timespec time = {ms / 1000, ms % 1000 * 1000000};
    if (ms)
        nanosleep(&time, NULL);
}

static int is_ours(const char *path)
{
    const char *folder = getenv("SLOW_FOLDER");
    return folder && setting("SLOW_MISSING_S") && strncmp(path, folder, strlen(folder)) == 0 &&
           strlen(path) < PATH_BYTES;
}

static int is_remembered(const char *path)
{
    int found = 0;
    if (!is_ours(path))
        return 0;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < NAMES_MAX && !found; ++i)
        found = strcmp(missing[i], path) == 0 && time(NULL) - since[i] < setting("SLOW_MISSING_S");
    pthread_mutex_unlock(&mutex);
    if (found)
        errno = ENOENT;
    return found;
}

static int remember(const char *path, int result)
{
    if (result >= 0 || errno != ENOENT || !is_ours(path))
        return result;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < NAMES_MAX; ++i)
        if (!missing[i][0] || strcmp(missing[i], path) == 0) {
            strcpy(missing[i], path);
            since[i] = time(NULL);
            break;
        }
    pthread_mutex_unlock(&mutex);
    errno = ENOENT;
    return result;
}

static void forget(const char *path)
{
    size_t length = strlen(path);
    int code = errno;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < NAMES_MAX; ++i)
        if (strncmp(missing[i], path, length) == 0 && strchr("/", missing[i][length]))
            missing[i][0] = 1;
    pthread_mutex_unlock(&mutex);
    errno = code;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPEN(name)                                     \
    int name(const char *path, int flags, ...)         \
    {                                                  \
        va_list list;                                  \
        va_start(list, flags);                         \
        mode_t mode = va_arg(list, mode_t);            \
        va_end(list);                                  \
        if (!(flags & O_CREAT) && is_remembered(path)) \
            return -1;                                 \
        int result = REAL(name)(path, flags, mode);    \
        if (result >= 0 && (flags & O_CREAT))          \
            forget(path);                              \
        return remember(path, result);                 \
    }
OPEN(open)
OPEN(open64)

#define LOOK(name, type)                               \
    int name(const char *path, struct type *info)      \
    {                                                  \
        if (is_remembered(path))                       \
            return -1;                                 \
        return remember(path, REAL(name)(path, info)); \
    }
LOOK(stat, stat)
LOOK(lstat, stat)
LOOK(stat64, stat64)
LOOK(lstat64, stat64)

int mkdir(const char *path, mode_t mode)
{
    int result = REAL(mkdir)(path, mode);
    if (result == 0)
        forget(path);
    return result;
}

int rename(const char *from, const char *to)
{
    int result = REAL(rename)(from, to);
    if (result == 0)
        forget(to);
    return result;
}

static void note(int fd)
{
    char link[64], path[PATH_BYTES];
    const char *log = getenv("SYNCED");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = log ? readlink(link, path, sizeof path - 1) : -1;
    int to = length > 0 ? REAL(open)(log, O_WRONLY | O_CREAT | O_APPEND, 0666) : -1;
    if (to < 0)
        return;
    path[length] = '\n';
    if (write(to, path, (size_t)length + 1) != length + 1)
        abort();
    close(to);
}

int fsync(int fd)
{
    rest("SLOW_FSYNC_MS");
    int result = REAL(fsync)(fd);
    if (result == 0)
        note(fd);
    return result;
}

int unlinkat(int folder, const char *name, int flags)
{
    rest("SLOW_UNLINK_MS");
    return REAL(unlinkat)(folder, name, flags);
}
