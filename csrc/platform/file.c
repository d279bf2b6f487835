/* file.c - one small function for each system call: retries on EINTR, completes short counts, names
 * errors. */
#include "platform/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    EXCHANGE = 2, /* RENAME_EXCHANGE of linux/fs.h */
    ZEROS_BYTES = 1 << 20,
};

static sw_status fail_os(sw_error *err, const char *operation, const char *path)
{
    int code = errno;
    return sw_error_set(err, SW_E_OS, code, "%s '%s' failed: %s", operation, path, strerror(code));
}

/* True if the error says that the file system has no such operation, not that it failed. */
static bool is_not_offered(int code)
{
    return code == EINVAL || code == ENOSYS || code == EOPNOTSUPP;
}

static int open_retried(const char *path, int flags)
{
    int fd;
    do
        fd = open(path, flags | O_CLOEXEC | O_NOFOLLOW, 0666);
    while (fd < 0 && errno == EINTR);
    return fd;
}

size_t sw_file_page_bytes(void)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return page > SW_FILE_ALIGNMENT_BYTES ? page : SW_FILE_ALIGNMENT_BYTES;
}

sw_status sw_file_create(const char *path, int *fd, sw_error *err)
{
    int made = open_retried(path, O_WRONLY | O_CREAT | O_EXCL);
    if (made < 0)
        return fail_os(err, "creating", path);
    *fd = made;
    return SW_OK;
}

sw_status sw_file_lock(int fd, const char *path, bool *is_taken, sw_error *err)
{
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    *is_taken = fcntl(fd, F_OFD_SETLK, &whole) == 0;
    if (!*is_taken && is_not_offered(errno))
        *is_taken = flock(fd, LOCK_EX | LOCK_NB) == 0;
    if (*is_taken || errno == EAGAIN || errno == EACCES)
        return SW_OK;
    int code = errno;
    return sw_error_set(err, SW_E_OS, code, "'%s' cannot be locked: %s", path, strerror(code));
}

sw_status sw_file_allocate(int fd, const char *path, uint64_t size_bytes, sw_error *err)
{
    int code;
    if (size_bytes == 0)
        return SW_OK;
    do /* not posix_fallocate: it writes if the file system lacks support, and hides the lack */
        code = fallocate(fd, 0, 0, (off_t)size_bytes);
    while (code != 0 && errno == EINTR);
    if (code != 0 && is_not_offered(errno))
        code = ftruncate(fd, (off_t)size_bytes);
    if (code != 0) {
        code = errno;
        return sw_error_set(err, SW_E_OS, code, "allocating %" PRIu64 " bytes for '%s' failed: %s",
                            size_bytes, path, strerror(code));
    }
    return SW_OK;
}

static int open_nameless(const char *folder, const char *path, int form, int direct)
{
    if (form == 0)
        return open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC | direct, 0600);
    int fd = open(path, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC | O_NOFOLLOW | direct, 0600);
    if (fd >= 0 && unlink(path) != 0) { /* the folder allows new files but not their removal */
        int code = errno;
        close(fd);
        errno = code;
        return -1;
    }
    return fd;
}

sw_status sw_file_create_nameless(const char *folder, const char *path, bool direct, int *fd,
                                  sw_error *err)
{
    int made = -1;
    for (int form = 0; form < 2 && made < 0; ++form) {
        made = direct ? open_nameless(folder, path, form, O_DIRECT) : -1;
        if (made < 0)
            made = open_nameless(folder, path, form, 0);
    }
    if (made < 0)
        return fail_os(err, "creating", path);
    *fd = made;
    return SW_OK;
}

void sw_file_shorten(int fd, uint64_t size_bytes)
{
    (void)!ftruncate(fd, (off_t)size_bytes);
}

static sw_status write_zeros(int fd, const char *path, uint64_t offset, uint64_t more_bytes,
                             sw_error *err)
{
    sw_status status = SW_OK;
    uint64_t step = more_bytes < ZEROS_BYTES ? more_bytes : ZEROS_BYTES;
    void *zeros = aligned_alloc(SW_FILE_ALIGNMENT_BYTES, (size_t)step);
    if (!zeros)
        SW_FAIL(err, SW_E_MEMORY, "no memory to write zeros to '%s'", path);
    memset(zeros, 0, (size_t)step);
    for (uint64_t done = 0; done < more_bytes && status == SW_OK; done += step) {
        uint64_t left = more_bytes - done;
        struct iovec part = {.iov_base = zeros, .iov_len = (size_t)(left < step ? left : step)};
        status = sw_file_write_at(fd, path, &part, 1, offset + done, err);
    }
    free(zeros);
    return status;
}

sw_status sw_file_reserve(int fd, const char *path, uint64_t offset, uint64_t size_bytes,
                          sw_error *err)
{
    int code;
    do
        code = fallocate(fd, 0, (off_t)offset, (off_t)size_bytes);
    while (code != 0 && errno == EINTR);
    if (code == 0)
        return SW_OK;
    if (is_not_offered(errno))
        return write_zeros(fd, path, offset, size_bytes, err);
    code = errno;
    return sw_error_set(err, SW_E_OS, code, "allocating %" PRIu64 " bytes for '%s' failed: %s",
                        size_bytes, path, strerror(code));
}

sw_status sw_file_extend(int fd, const char *path, uint64_t size_bytes, uint64_t more_bytes,
                         sw_error *err)
{
    sw_status status = sw_file_reserve(fd, path, size_bytes, more_bytes, err);
    if (status != SW_OK)
        sw_file_shorten(fd, size_bytes);
    return status;
}

static sw_status check_regular(int fd, const char *path, uint64_t *size_bytes, sw_error *err)
{
    struct stat info;
    if (fstat(fd, &info) != 0)
        return fail_os(err, "looking at", path);
    if (!S_ISREG(info.st_mode))
        SW_FAIL(err, SW_E_INVALID, "'%s' is not a regular file", path);
    *size_bytes = (uint64_t)info.st_size;
    return SW_OK;
}

static sw_status open_existing(const char *path, int flags, int *fd, uint64_t *size_bytes,
                               sw_error *err)
{
    int opened =
        open_retried(path, flags | O_NONBLOCK); /* a pipe instead of a file must not block */
    if (opened < 0 && errno == ELOOP)
        return sw_error_set(err, SW_E_OS, ELOOP,
                            "'%s' is a symbolic link, and a checkpoint's files must be none: copy "
                            "the folder with cp -rL",
                            path);
    if (opened < 0)
        return fail_os(err, "opening", path);
    sw_status status = check_regular(opened, path, size_bytes, err);
    if (status != SW_OK) {
        close(opened);
        return status;
    }
    *fd = opened;
    return SW_OK;
}

sw_status sw_file_open_write(const char *path, bool direct, int *fd, sw_error *err)
{
    uint64_t size_bytes;
    if (direct && open_existing(path, O_WRONLY | O_DIRECT, fd, &size_bytes, NULL) == SW_OK)
        return SW_OK;
    return open_existing(path, O_WRONLY, fd, &size_bytes, err);
}

sw_status sw_file_open_read(const char *path, bool direct, int *fd, uint64_t *size_bytes,
                            sw_error *err)
{
    if (direct && open_existing(path, O_RDONLY | O_DIRECT, fd, size_bytes, NULL) == SW_OK)
        return SW_OK;
    return open_existing(path, O_RDONLY, fd, size_bytes, err);
}

bool sw_file_is_direct(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && (flags & O_DIRECT) != 0;
}

/* cachestat(2) of Linux 6.5, which has one number on all architectures. It takes no lock of the
 * address space, for which mmap() of several reading threads waits. -1: not supported. */
static long cached_pages(int fd, uint64_t offset, size_t size_bytes)
{
    enum { SYS_CACHESTAT = 451 };
    uint64_t range[2] = {offset, size_bytes}, found[5] = {0}; /* the first: pages in the cache */
    return syscall(SYS_CACHESTAT, fd, range, found, 0u) == 0 ? (long)found[0] : -1;
}

bool sw_file_is_cached(int fd, uint64_t offset, size_t size_bytes)
{
    enum { PAGES_AT_ONCE = 512 };
    unsigned char is_there[PAGES_AT_ONCE];
    size_t page = (size_t)sysconf(_SC_PAGESIZE), count = (size_bytes + page - 1) / page;
    long found = cached_pages(fd, offset, size_bytes);
    if (found >= 0)
        return (size_t)found >= count;
    void *view = mmap(NULL, size_bytes, PROT_READ, MAP_SHARED, fd, (off_t)offset);
    if (view == MAP_FAILED)
        return true;
    bool is_cached = true;
    for (size_t done = 0; done < count && is_cached; done += PAGES_AT_ONCE) {
        size_t some = count - done < PAGES_AT_ONCE ? count - done : PAGES_AT_ONCE;
        if (mincore((uint8_t *)view + done * page, some * page, is_there) != 0)
            break;
        for (size_t i = 0; i < some; ++i)
            is_cached = is_cached && (is_there[i] & 1) != 0;
    }
    munmap(view, size_bytes);
    return is_cached;
}

/* Stops bypassing the page cache; returns true if the descriptor did. */
static bool leave_direct(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && (flags & O_DIRECT) && fcntl(fd, F_SETFL, flags & ~O_DIRECT) == 0;
}

sw_status sw_file_write_at(int fd, const char *path, struct iovec *parts, int part_count,
                           uint64_t offset, sw_error *err)
{
    while (part_count > 0) {
        ssize_t count = pwritev(fd, parts, part_count, (off_t)offset);
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0 && errno == EINVAL && leave_direct(fd))
            continue;
        if (count < 0)
            return fail_os(err, "writing", path);
        if (count == 0)
            return sw_error_set(err, SW_E_OS, EIO, "writing '%s' stopped at byte %" PRIu64, path,
                                offset);
        offset += (uint64_t)count;
        while (part_count > 0 && (size_t)count >= parts->iov_len) {
            count -= (ssize_t)parts->iov_len;
            parts++;
            part_count--;
        }
        if (part_count > 0) {
            parts->iov_base = (uint8_t *)parts->iov_base + count;
            parts->iov_len -= (size_t)count;
        }
    }
    return SW_OK;
}

sw_status sw_file_read_at(int fd, const char *path, void *data, size_t size_bytes, uint64_t offset,
                          sw_error *err)
{
    uint8_t *to = data;
    while (size_bytes > 0) {
        ssize_t count = pread(fd, to, size_bytes, (off_t)offset);
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0 && errno == EINVAL && leave_direct(fd))
            continue;
        if (count < 0)
            return fail_os(err, "reading", path);
        if (count == 0)
            return sw_error_set(err, SW_E_OS, EIO,
                                "'%s' ends at byte %" PRIu64 ", %zu bytes too early", path, offset,
                                size_bytes);
        to += count;
        offset += (uint64_t)count;
        size_bytes -= (size_t)count;
    }
    return SW_OK;
}

sw_status sw_file_sync(int fd, const char *path, sw_error *err)
{
    int code;
    do
        code = fsync(fd);
    while (code != 0 && errno == EINTR);
    return code == 0 ? SW_OK : fail_os(err, "fsync of", path);
}

sw_status sw_file_close(int *fd, const char *path, sw_error *err)
{
    int closing = *fd;
    *fd = -1;
    /* After EINTR Linux has closed it: a second close could close another thread's descriptor. */
    if (closing >= 0 && close(closing) != 0 && errno != EINTR)
        return fail_os(err, "closing", path);
    return SW_OK;
}

sw_status sw_file_close_after(int *fd, const char *path, sw_status status, sw_error *err)
{
    sw_status closed = sw_file_close(fd, path, status == SW_OK ? err : NULL);
    return status == SW_OK ? closed : status;
}

sw_status sw_file_write_new(const char *path, const void *data, size_t size_bytes, bool sync,
                            sw_error *err)
{
    int fd = -1;
    struct iovec part = {.iov_base = (void *)(uintptr_t)data, .iov_len = size_bytes};
    SW_TRY(sw_file_create(path, &fd, err));
    sw_status status = size_bytes ? sw_file_write_at(fd, path, &part, 1, 0, err) : SW_OK;
    if (status == SW_OK && sync)
        status = sw_file_sync(fd, path, err);
    return sw_file_close_after(&fd, path, status, err);
}

sw_status sw_file_read_whole(const char *path, uint64_t limit_bytes, char **data,
                             size_t *size_bytes, sw_error *err)
{
    int fd = -1;
    uint64_t size = 0;
    char *made = NULL;
    sw_status status;
    SW_TRY(sw_file_open_read(path, false, &fd, &size, err));
    if (size > limit_bytes) {
        status = sw_error_set(err, SW_E_INVALID, -1,
                              "'%s' has %" PRIu64 " bytes, more than the %" PRIu64 " allowed", path,
                              size, limit_bytes);
        goto close;
    }
    made = malloc((size_t)size + 1);
    if (!made) {
        status = sw_error_set(err, SW_E_MEMORY, -1, "no memory for the %" PRIu64 " bytes of '%s'",
                              size, path);
        goto close;
    }
    SW_TRY_GOTO(status, sw_file_read_at(fd, path, made, (size_t)size, 0, err), close);
    made[size] = '\0';
    *data = made;
    *size_bytes = (size_t)size;
close:
    close(fd);
    if (status != SW_OK)
        free(made);
    return status;
}

bool sw_file_exists(const char *path)
{
    struct stat info;
    return lstat(path, &info) == 0;
}

sw_status sw_folder_create(const char *path, sw_error *err)
{
    return mkdir(path, 0777) == 0 ? SW_OK : fail_os(err, "creating the folder", path);
}

sw_status sw_folder_make(const char *path, sw_error *err)
{
    char parent[SW_PATH_BYTES];
    int code = mkdir(path, 0777) == 0 ? 0 : errno;
    if (code == ENOENT) {
        SW_TRY(sw_path_parent(path, parent, err));
        if (strcmp(parent, path) != 0 && strcmp(parent, ".") != 0) {
            SW_TRY(sw_folder_make(parent, err));
            code = mkdir(path, 0777) == 0 ? 0 : errno; /* ENOENT again: in /proc */
        }
    }
    if (code == 0) {
        SW_TRY(sw_path_parent(path, parent, err));
        return sw_folder_sync(parent, err);
    }
    struct stat info;
    if (code == EEXIST && stat(path, &info) == 0 && S_ISDIR(info.st_mode))
        return SW_OK;
    if ((code == EACCES || code == EROFS) && stat(path, &info) == 0 && S_ISDIR(info.st_mode))
        return SW_OK; /* some systems check permissions first */
    errno = code;
    return fail_os(err, "creating the folder", path);
}

sw_status sw_folder_sync(const char *path, sw_error *err)
{
    int fd =
        open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC); /* the user's own path may contain a link */
    if (fd < 0)
        return fail_os(err, "opening the folder", path);
    sw_error why = {0};
    sw_status status = sw_file_sync(fd, path, &why);
    if (status == SW_E_OS && is_not_offered(why.detail))
        status = SW_OK;
    else if (status != SW_OK)
        status = sw_error_pass(err, &why);
    return sw_file_close_after(&fd, path, status, err);
}

sw_status sw_file_remove(const char *path, sw_error *err)
{
    return unlink(path) == 0 || errno == ENOENT ? SW_OK : fail_os(err, "removing", path);
}

sw_status sw_file_rename(const char *from, const char *to, sw_error *err)
{
    return rename(from, to) == 0 ? SW_OK : fail_os(err, "renaming", from);
}

sw_status sw_file_exchange(const char *a, const char *b, bool *swapped, sw_error *err)
{
    /* By number, because renameat2 came with glibc 2.28, the oldest that we support. */
    *swapped = syscall(SYS_renameat2, AT_FDCWD, a, AT_FDCWD, b, EXCHANGE) == 0;
    if (*swapped || is_not_offered(errno) || errno == EPERM) /* EPERM: of a seccomp filter */
        return SW_OK;
    return fail_os(err, "exchanging", a);
}

/* Return 0 or the errno of the first failure. */
static int remove_at(int folder, const char *name, int depth)
{
    if (unlinkat(folder, name, 0) == 0 || errno == ENOENT)
        return 0;
    int first = 0, refusal = errno;
    int fd = openat(folder, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *stream = fd < 0 || depth == 0 ? NULL : fdopendir(fd);
    if (!stream) {
        if (fd < 0 && errno == ENOENT) /* another process has removed it */
            return 0;
        refusal = fd < 0 && refusal == EISDIR ? errno : refusal;
        if (fd >= 0)
            close(fd);
        return refusal;
    }
    for (struct dirent *entry; (entry = readdir(stream));)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            int code = remove_at(dirfd(stream), entry->d_name, depth - 1);
            first = first ? first : code;
        }
    closedir(stream);
    if (unlinkat(folder, name, AT_REMOVEDIR) == 0 || errno == ENOENT)
        return 0;
    return first ? first : errno;
}

sw_status sw_folder_remove(const char *path, sw_error *err)
{
    errno = remove_at(AT_FDCWD, path, 3);
    return errno ? fail_os(err, "removing", path) : SW_OK;
}

sw_status sw_folder_list(const char *path, bool (*entry)(void *context, const char *name),
                         void *context, sw_error *err)
{
    DIR *stream = opendir(path);
    const struct dirent *found;
    if (!stream)
        return fail_os(err, "opening the folder", path);
    do {
        errno = 0; /* readdir returns NULL at the end and after an error */
        found = readdir(stream);
    } while (found && (strcmp(found->d_name, ".") == 0 || strcmp(found->d_name, "..") == 0 ||
                       entry(context, found->d_name)));
    sw_status status = found || errno == 0 ? SW_OK : fail_os(err, "listing the folder", path);
    closedir(stream);
    return status;
}

sw_status sw_path_parent(const char *path, char parent[SW_PATH_BYTES], sw_error *err)
{
    const char *slash = strrchr(path, '/');
    size_t length = slash ? (size_t)(slash - path) : 1;
    if (length >= SW_PATH_BYTES)
        SW_FAIL(err, SW_E_INVALID, "a path must be shorter than %d bytes, not %zu", SW_PATH_BYTES,
                strlen(path));
    memcpy(parent, slash ? path : ".", length);
    parent[length] = '\0';
    if (length == 0)
        memcpy(parent, "/", 2);
    return SW_OK;
}

sw_status sw_path_join(char path[SW_PATH_BYTES], const char *folder, const char *name,
                       sw_error *err)
{
    if (snprintf(path, SW_PATH_BYTES, "%s/%s", folder, name) >= SW_PATH_BYTES)
        SW_FAIL(err, SW_E_INVALID,
                "a path must be shorter than %d bytes: folder '%.200s', name '%.200s'",
                SW_PATH_BYTES, folder, name);
    return SW_OK;
}
