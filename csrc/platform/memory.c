/* memory.c - memfd with seals; see memory.h. Limits are checked first, because the kernel's own
 * refusal kills (SIGXFSZ beyond RLIMIT_FSIZE, SIGBUS on a full cgroup). */
#include "platform/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/bytes.h"
#include "platform/clock.h"
#include "platform/limits.h"

#ifndef MFD_CLOEXEC
#define MFD_CLOEXEC 1U
#endif
#ifndef MFD_ALLOW_SEALING
#define MFD_ALLOW_SEALING 2U
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

enum { SIZE_SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };

/* A huge page saves 511 of 512 address translations; measured on two cores of a virtual machine, a
 * fold of 104 MiB takes 0.70 of the time and a copy 0.55. */
static const size_t huge_page_bytes = 2u << 20, collapse_chunk_bytes = 32u << 20;
static const int64_t collapse_budget_ns = INT64_C(2000000000);

static sw_status create(size_t size_bytes, const char *label, int *fd, sw_error *err)
{
    int made = (int)syscall(SYS_memfd_create, "shardwright", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (made < 0 && (errno == EMFILE || errno == ENFILE))
        return sw_limits_fail_descriptors(label, errno, err);
    if (made < 0)
        return sw_error_set(err, SW_E_OS, errno, "%s: memfd_create of %zu bytes failed: %s", label,
                            size_bytes, strerror(errno));
    if (ftruncate(made, (off_t)size_bytes) != 0 || fcntl(made, F_ADD_SEALS, SIZE_SEALS) != 0) {
        int cause = errno;
        close(made);
        return sw_error_set(err, SW_E_MEMORY, cause, "%s: sizing a memfd to %zu bytes failed: %s",
                            label, size_bytes, strerror(cause));
    }
    *fd = made;
    return SW_OK;
}

sw_status sw_memfd_create(size_t size_bytes, const char *label, int *fd, sw_error *err)
{
    SW_TRY(sw_limits_check_file(size_bytes, label, err));
    SW_TRY(sw_limits_check_memory(size_bytes, label, err));
    return create(size_bytes, label, fd, err);
}

size_t sw_memfd_stride(size_t part_bytes)
{
    size_t unit = part_bytes >= huge_page_bytes ? huge_page_bytes : (size_t)sysconf(_SC_PAGESIZE);
    size_t stride;
    return sw_size_round_up(part_bytes, unit, &stride) ? stride : 0;
}

sw_status sw_memfd_create_parts(size_t part_bytes, int count, const char *label, int *fd,
                                sw_error *err)
{
    size_t stride = sw_memfd_stride(part_bytes), size_bytes;
    if (stride == 0 || !sw_size_multiply(stride, (size_t)count, &size_bytes))
        SW_FAIL(err, SW_E_MEMORY, "%s: %d parts of %zu bytes overflow the address space", label,
                count, part_bytes);
    SW_TRY(sw_limits_check_file(size_bytes, label, err));
    SW_TRY(sw_limits_check_memory(part_bytes, label, err));
    return create(size_bytes, label, fd, err);
}

/* Reserves an address range of PROT_NONE pages, aligned to huge pages if it is that large. Owned by
 * the caller. */
static void *reserve(size_t size_bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t slack = size_bytes >= huge_page_bytes ? huge_page_bytes - page : 0;
    size_t size = (size_bytes + page - 1) / page * page;
    uint8_t *begin =
        mmap(NULL, size + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (begin == MAP_FAILED || slack == 0)
        return begin;
    size_t head = (huge_page_bytes - (uintptr_t)begin % huge_page_bytes) % huge_page_bytes;
    if (head > 0)
        munmap(begin, head);
    if (slack > head)
        munmap(begin + head + size, slack - head);
    return begin + head;
}

/* Maps over a reserved range; if that is refused, returns MAP_FAILED with errno and releases the
 * range. */
static void *map_reserved(size_t size_bytes, int flags, int fd)
{
    void *range = reserve(size_bytes);
    if (range == MAP_FAILED)
        return range;
    void *mapped =
        mmap(range, size_bytes, PROT_READ | PROT_WRITE, flags | MAP_FIXED | MAP_NORESERVE, fd, 0);
    if (mapped == MAP_FAILED) {
        int cause = errno;
        munmap(range, size_bytes);
        errno = cause;
    }
    return mapped;
}

sw_status sw_memfd_map(int fd, size_t size_bytes, uint8_t **address, sw_error *err)
{
    struct stat status;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW))
        SW_FAIL(err, SW_E_STATE, "shared memory from a peer is not sealed against resizing");
    if (fstat(fd, &status) != 0 || (size_t)status.st_size < size_bytes)
        SW_FAIL(err, SW_E_STATE, "shared memory from a peer has %lld bytes, expected at least %zu",
                (long long)status.st_size, size_bytes);
    void *mapped = map_reserved(size_bytes, MAP_SHARED, fd);
    if (mapped == MAP_FAILED)
        return sw_error_set(err, SW_E_MEMORY, errno, "mapping %zu shared bytes failed: %s",
                            size_bytes, strerror(errno));
    *address = mapped;
    return SW_OK;
}

sw_status sw_pages_map(size_t size_bytes, uint8_t **address, sw_error *err)
{
    void *mapped = map_reserved(size_bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    if (mapped == MAP_FAILED)
        return sw_error_set(err, SW_E_MEMORY, errno, "mapping %zu private bytes failed: %s",
                            size_bytes, strerror(errno));
    if (size_bytes >= huge_page_bytes)
        (void)madvise(mapped, size_bytes, MADV_HUGEPAGE);
    *address = mapped;
    return SW_OK;
}

void sw_memory_prefer_huge(uint8_t *address, size_t size_bytes)
{
    uintptr_t begin =
                  ((uintptr_t)address + huge_page_bytes - 1) / huge_page_bytes * huge_page_bytes,
              end = ((uintptr_t)address + size_bytes) / huge_page_bytes * huge_page_bytes;
    if (begin < end)
        (void)madvise((void *)begin, end - begin, MADV_HUGEPAGE);
}

uint8_t *sw_memory_reserve(size_t size_bytes)
{
    void *range = reserve(size_bytes);
    return range == MAP_FAILED ? NULL : range;
}

sw_status sw_memory_remap(uint8_t *address, size_t size_bytes, int fd, size_t offset_bytes,
                          bool shared, sw_error *err)
{
    int flags = MAP_FIXED | MAP_NORESERVE | (shared ? MAP_SHARED | MAP_POPULATE : MAP_PRIVATE);
    if (mmap(address, size_bytes, PROT_READ | PROT_WRITE, flags, fd, (off_t)offset_bytes) ==
        MAP_FAILED)
        return sw_error_set(err, SW_E_MEMORY, errno,
                            "mapping %zu bytes over others failed (vm.max_map_count bounds how "
                            "many mappings a process has): %s",
                            size_bytes, strerror(errno));
    return SW_OK;
}

sw_status sw_memory_own(uint8_t *address, size_t size_bytes, sw_error *err)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)address / page * page;
    size_t whole = ((uintptr_t)address + size_bytes + page - 1) / page * page - begin;
    uint8_t *made;
    if (size_bytes == 0)
        return SW_OK;
    SW_TRY(sw_pages_map(whole, &made, err));
    memcpy(made, (void *)begin, whole);
    if (mremap(made, whole, whole, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)begin) == MAP_FAILED) {
        int cause = errno;
        munmap(made, whole);
        return sw_error_set(err, SW_E_MEMORY, cause, "moving %zu private bytes failed: %s", whole,
                            strerror(cause));
    }
    return SW_OK;
}

int sw_memory_watch(void)
{
    return open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
}

/* Linux, Documentation/admin-guide/mm/pagemap.rst: bit 63 present, 62 swapped, 61 of a file. An
 * unwritten page of a private view is the file's. */
static bool is_own_page(uint64_t entry)
{
    return (entry >> 62 & 3) != 0 && (entry >> 61 & 1) == 0;
}

size_t sw_memory_find_write(int watch, const uint8_t *address, size_t size_bytes, uint8_t byte)
{
    uint64_t entries[512];
    size_t page = (size_t)sysconf(_SC_PAGESIZE), first = (uintptr_t)address / page,
           count = (size_bytes + page - 1) / page;
    for (size_t done = 0, got; watch >= 0 && done < count; done += got) {
        size_t wanted = sw_size_min(count - done, sizeof entries / sizeof *entries);
        ssize_t bytes = pread(watch, entries, wanted * sizeof *entries,
                              (off_t)((first + done) * sizeof *entries));
        if (bytes < (ssize_t)sizeof *entries)
            break;
        got = (size_t)bytes / sizeof *entries;
        for (size_t i = 0; i < got; ++i)
            for (size_t at = (done + i) * page, end = at + page;
                 is_own_page(entries[i]) && at < end; ++at)
                if (address[at] != byte)
                    return at;
    }
    return SIZE_MAX;
}

void sw_memory_discard(int fd, size_t offset_bytes, size_t size_bytes)
{
    (void)fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset_bytes,
                    (off_t)size_bytes);
}

void sw_memory_unmap(uint8_t *address, size_t size_bytes)
{
    if (address)
        munmap(address, size_bytes);
}

/* Makes [begin, end) huge pages: one small page of each is made present, and the kernel adds and
 * clears the rest as it collapses them, which takes a tenth of the time of 512 small pages. Stops
 * at the first refusal (an old kernel, fragmented memory) or after the time limit: small pages only
 * are slower. */
static void collapse(uintptr_t begin, uintptr_t end)
{
    int64_t deadline_ns = sw_clock_now_ns() + collapse_budget_ns;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    begin = (begin + huge_page_bytes - 1) / huge_page_bytes * huge_page_bytes;
    end = end / huge_page_bytes * huge_page_bytes;
    while (begin < end && sw_clock_now_ns() < deadline_ns) {
        size_t chunk = sw_size_min(collapse_chunk_bytes, end - begin);
        for (size_t at = 0; at < chunk; at += huge_page_bytes)
            if (madvise((void *)(begin + at), page, MADV_POPULATE_WRITE) != 0)
                return;
        if (madvise((void *)begin, chunk, MADV_COLLAPSE) != 0 && errno != EAGAIN)
            return;
        begin += chunk;
    }
}

void sw_memory_touch(uint8_t *address, size_t size_bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (madvise(address, size_bytes, MADV_POPULATE_WRITE) == 0)
        return;
    for (size_t at = 0; at < size_bytes; at += page) /* Linux < 5.14 */
        __atomic_fetch_or(address + at, 0, __ATOMIC_RELAXED);
}

void sw_memory_populate(uint8_t *address, size_t size_bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uintptr_t begin = (uintptr_t)address & ~(uintptr_t)(page - 1);
    uintptr_t end = ((uintptr_t)address + size_bytes + page - 1) & ~(uintptr_t)(page - 1);
    if (end <= begin)
        return;
    collapse(begin, end);
    (void)madvise((void *)begin, end - begin, MADV_POPULATE_WRITE);
}
