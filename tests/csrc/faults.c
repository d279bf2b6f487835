/* faults.c - count allocations and let one fail; see faults.h. */
#include "faults.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *pointer, size_t size);
void *__real_mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset);
int __real_munmap(void *address, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *pointer, size_t size);
void *__wrap_mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset);
int __wrap_munmap(void *address, size_t size);

static _Thread_local long failing, counted;
static atomic_long mapped;

void faults_arm(long nth)
{
    failing = nth;
    counted = 0;
}

long faults_count(void)
{
    return counted;
}

long faults_mapped(void)
{
    return atomic_load(&mapped);
}

static long whole_pages(size_t size)
{
    long page = sysconf(_SC_PAGESIZE);
    return ((long)size + page - 1) / page;
}

static bool fails(void)
{
    if (++counted != failing)
        return false;
    errno = ENOMEM;
    return true;
}

void *__wrap_malloc(size_t size)
{
    return fails() ? NULL : __real_malloc(size);
}

void *__wrap_calloc(size_t count, size_t size)
{
    return fails() ? NULL : __real_calloc(count, size);
}

void *__wrap_realloc(void *pointer, size_t size)
{
    return fails() ? NULL : __real_realloc(pointer, size);
}

void *__wrap_mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset)
{
    void *made = fails() ? MAP_FAILED : __real_mmap(address, size, protection, flags, fd, offset);
    if (made != MAP_FAILED && !(flags & MAP_FIXED)) /* MAP_FIXED replaces pages already counted */
        atomic_fetch_add(&mapped, whole_pages(size));
    return made;
}

int __wrap_munmap(void *address, size_t size)
{
    atomic_fetch_sub(&mapped, whole_pages(size));
    return __real_munmap(address, size);
}
