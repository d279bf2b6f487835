/* memory.c - memfd with seals; see memory.h. Limits are compared with the need before the kernel says no in
 * ways that kill (SIGXFSZ beyond RLIMIT_FSIZE, SIGBUS on a full cgroup). */
#include "platform/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

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

enum { SIZE_SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };

sw_status sw_memfd_create(size_t size_bytes, const char *label, int *fd, sw_error *err)
{
    SW_TRY(sw_limits_check_file(size_bytes, label, err));
    int made = (int)syscall(SYS_memfd_create, "shardwright", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (made < 0)
        return sw_error_set(err, errno == EMFILE || errno == ENFILE ? SW_E_MEMORY : SW_E_OS, errno,
                            "%s: memfd_create of %zu bytes failed: %s", label, size_bytes, strerror(errno));
    if (ftruncate(made, (off_t)size_bytes) != 0 || fcntl(made, F_ADD_SEALS, SIZE_SEALS) != 0) {
        int cause = errno;
        close(made);
        return sw_error_set(err, SW_E_MEMORY, cause, "%s: sizing a memfd to %zu bytes failed: %s", label,
                            size_bytes, strerror(cause));
    }
    *fd = made;
    return SW_OK;
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
    void *mapped = mmap(NULL, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (mapped == MAP_FAILED)
        return sw_error_set(err, SW_E_MEMORY, errno, "mapping %zu shared bytes failed: %s", size_bytes,
                            strerror(errno));
    *address = mapped;
    return SW_OK;
}

sw_status sw_pages_map(size_t size_bytes, uint8_t **address, sw_error *err)
{
    void *mapped = mmap(NULL, size_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED)
        return sw_error_set(err, SW_E_MEMORY, errno, "mapping %zu private bytes failed: %s", size_bytes,
                            strerror(errno));
    *address = mapped;
    return SW_OK;
}

void sw_memory_unmap(uint8_t *address, size_t size_bytes)
{
    if (address)
        munmap(address, size_bytes);
}

void sw_memory_populate(uint8_t *address, size_t size_bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uintptr_t begin = (uintptr_t)address & ~(uintptr_t)(page - 1);
    uintptr_t end = ((uintptr_t)address + size_bytes + page - 1) & ~(uintptr_t)(page - 1);
    if (end > begin)
        (void)madvise((void *)begin, end - begin, MADV_POPULATE_WRITE);
}
