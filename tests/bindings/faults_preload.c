/* faults_preload.c - preloaded into Python: lets the nth allocation of the thread that arms it
 * fail, Python's own included (PYTHONMALLOC=malloc). Thread rule: any; the count belongs to the
 * calling thread. */
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

static bool fails(void)
{
    if (++counted != failing)
        return false;
    errno = ENOMEM;
    return true;
}

void *malloc(size_t size)
{
    return fails() ? NULL : __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    return fails() ? NULL : __libc_calloc(count, size);
}

void *realloc(void *pointer, size_t size)
{
    return fails() ? NULL : __libc_realloc(pointer, size);
}

void *mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset)
{
    if (fails())
        return MAP_FAILED;
    return (void *)syscall(SYS_mmap, address, size, protection, flags, fd, offset); // NOLINT
}
