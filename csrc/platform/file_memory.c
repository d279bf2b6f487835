/* file_memory.c - see the header. Ranges are widened to whole pages. */
#include "platform/file_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "platform/limits.h"
#include "platform/memory.h"

/* Linux, include/uapi/linux/magic.h */
enum { TMPFS = 0x01021994, RAMFS = (int)0x858458f6u };

typedef struct pages { /* of the file */
    off_t begin;
    size_t size_bytes;
} pages;

static pages pages_of(const sw_file_memory *m, const uint8_t *from, size_t size_bytes)
{
    size_t page = sw_file_page_bytes(), begin = (size_t)(from - m->begin) / page * page;
    size_t end = ((size_t)(from - m->begin) + size_bytes + page - 1) / page * page;
    return (pages){(off_t)begin, (end < m->size_bytes ? end : m->size_bytes) - begin};
}

sw_status sw_file_memory_init(sw_file_memory *m, const char *folder, const char *label,
                              size_t size_bytes, sw_error *err)
{
    char name[256];
    *m = (sw_file_memory){.fd = -1, .size_bytes = size_bytes};
    snprintf(name, sizeof name, "shardwright %.80s-%d", label, (int)getpid());
    for (char *at = name; *at; ++at) /* a label may hold any byte, a name no separator */
        *at = *at == '/' ? '_' : *at;
    return sw_path_join(m->path, folder, name, err);
}

sw_status sw_file_memory_create(sw_file_memory *m, const char *folder, sw_error *err)
{
    SW_TRY(sw_limits_check_file(m->size_bytes, m->path, err));
    sw_status status = sw_file_create_nameless(folder, m->path, false, &m->fd, err);
    if (status == SW_E_OS && (err->detail == EMFILE || err->detail == ENFILE))
        return sw_limits_fail_descriptors(m->path, (int)err->detail, err);
    if (status == SW_OK)
        status = sw_file_extend(m->fd, m->path, 0, m->size_bytes, err);
    if (status != SW_E_OS)
        return status;
    int cause =
        (int)err->detail; /* before the path, which may be long: messages that travel are cut */
    return sw_error_set(err, SW_E_OS, cause, "%s: no place for %zu bytes in '%s'", strerror(cause),
                        m->size_bytes, m->path);
}

sw_status sw_file_memory_map(sw_file_memory *m, sw_error *err)
{
    uint8_t *range = sw_memory_reserve(m->size_bytes);
    void *mapped =
        range ? mmap(range, m->size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, m->fd, 0)
              : MAP_FAILED;
    if (mapped == MAP_FAILED) {
        int cause = errno;
        sw_memory_unmap(range, m->size_bytes);
        return sw_error_set(err, SW_E_MEMORY, cause, "mapping %zu bytes of '%s' failed: %s",
                            m->size_bytes, m->path, strerror(cause));
    }
    m->begin = mapped;
    sw_memory_prefer_huge(m->begin, m->size_bytes);
    return SW_OK;
}

void sw_file_memory_fini(sw_file_memory *m)
{
    sw_memory_unmap(m->begin, m->size_bytes);
    (void)!sw_file_close(&m->fd, m->path, NULL);
    m->begin = NULL;
}

sw_status sw_file_memory_read(const sw_file_memory *m, void *to, const uint8_t *from,
                              size_t size_bytes, sw_error *err)
{
    return sw_file_read_at(m->fd, m->path, to, size_bytes, (uint64_t)(from - m->begin), err);
}

void sw_file_memory_read_ahead(const sw_file_memory *m, const uint8_t *from, size_t size_bytes)
{
    pages range = pages_of(m, from, size_bytes);
    (void)posix_fadvise(m->fd, range.begin, (off_t)range.size_bytes, POSIX_FADV_WILLNEED);
}

sw_status sw_file_memory_write_back(const sw_file_memory *m, uint8_t *begin, size_t size_bytes,
                                    sw_error *err)
{
    pages range = pages_of(m, begin, size_bytes);
    int failed = 0;
    if (size_bytes == 0)
        return SW_OK;
    /* pages that only this process's tables know as changed are known to the file once they are
     * unmapped, so first let them go */
    (void)madvise(m->begin + range.begin, range.size_bytes, MADV_DONTNEED);
    do
        failed = sync_file_range(m->fd, range.begin, (off_t)range.size_bytes,
                                 SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE);
    while (failed != 0 && errno == EINTR);
    if (failed == 0 || errno == ENOSYS || errno == ESPIPE || errno == EINVAL)
        return SW_OK; /* without the call the kernel writes when it likes */
    int cause = errno;
    return sw_error_set(err, SW_E_OS, cause, "writing %zu bytes back to '%s' failed: %s",
                        range.size_bytes, m->path, strerror(cause));
}

bool sw_file_memory_is_ram(const sw_file_memory *m)
{
    struct statfs found;
    return fstatfs(m->fd, &found) == 0 &&
           ((unsigned)found.f_type == (unsigned)TMPFS || (unsigned)found.f_type == (unsigned)RAMFS);
}
