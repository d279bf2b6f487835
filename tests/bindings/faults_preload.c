/* faults_preload.c - preloaded into Python: lets the nth allocation of the thread that arms it
 * fail, Python's own included (PYTHONMALLOC=malloc), but not those of the simulated drivers.
 * Thread rule: any; the count belongs to the calling thread. */
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *pointer, size_t size);
void faults_arm(long nth);
long faults_count(void);
void faults_spare(const char *begin, const char *end);

static _Thread_local long failing, counted;

/* The nth allocation from here on fails once; 0: none. */
void faults_arm(long nth)
{
    failing = nth;
    counted = 0;
}

long faults_count(void)
{
    return counted;
}

static const char *spared[8][2];
static int spared_count;

/* Calls from code in [begin, end) never fail. Before the first other thread. */
void faults_spare(const char *begin, const char *end)
{
    if (spared_count < 8) {
        spared[spared_count][0] = begin;
        spared[spared_count++][1] = end;
    }
}

static bool fails(const char *caller)
{
    for (int i = 0; i < spared_count; ++i)
        if (caller >= spared[i][0] && caller < spared[i][1])
            return false;
    if (++counted != failing)
        return false;
    errno = ENOMEM;
    return true;
}

void *malloc(size_t size)
{
    return fails(__builtin_return_address(0)) ? NULL : __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    return fails(__builtin_return_address(0)) ? NULL : __libc_calloc(count, size);
}

void *realloc(void *pointer, size_t size)
{
    return fails(__builtin_return_address(0)) ? NULL : __libc_realloc(pointer, size);
}

void *mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset)
{
    if (fails(__builtin_return_address(0)))
        return MAP_FAILED;
    return (void *)syscall(SYS_mmap, address, size, protection, flags, fd, offset); // NOLINT
}
