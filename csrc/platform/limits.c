/* limits.c - reads rlimits and the process's own cgroup (v2, or v1's memory controller at its usual
 * place). */
#include "platform/limits.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

static uint64_t read_number(const char *path)
{
    char text[64];
    FILE *file = fopen(path, "re");
    if (!file)
        return UINT64_MAX;
    char *line = fgets(text, sizeof text, file);
    fclose(file);
    if (!line || strncmp(line, "max", 3) == 0)
        return UINT64_MAX;
    unsigned long long value = strtoull(line, NULL, 10);
    return value >= (UINT64_C(1) << 62) ? UINT64_MAX
                                        : value; /* v1 reports "no limit" as a huge number */
}

/* Returns the bytes of file cache that the kernel drops before it refuses memory; 0 if
 * unreadable. */
static uint64_t read_reclaimable(const char *folder)
{
    static const char *const keys[] = {"inactive_file ",
                                       "total_inactive_file "}; /* v2, v1 with its children */
    char path[700], line[128];
    uint64_t bytes = 0;
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    FILE *file = fopen(path, "re");
    if (!file)
        return 0;
    while (fgets(line, sizeof line, file))
        for (size_t k = 0; k < sizeof keys / sizeof keys[0]; ++k)
            if (strncmp(line, keys[k], strlen(keys[k])) == 0)
                bytes = strtoull(line + strlen(keys[k]), NULL, 10);
    fclose(file);
    return bytes;
}

/* Returns a number of this running kernel, since groups of two hosts may have equal inodes.
 */
static uint64_t kernel_number(void)
{
    char text[64] = "";
    uint64_t number = 14695981039346656037u; /* FNV-1a */
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (file && !fgets(text, sizeof text, file))
        text[0] = '\0';
    if (file)
        fclose(file);
    for (const char *c = text; *c; ++c)
        number = (number ^ (uint8_t)*c) * 1099511628211u;
    return number;
}

/* Returns the memory left under one limit. */
static void tighten(sw_limits *limits, const char *folder, const char *limit_name,
                    const char *usage_name)
{
    struct stat status;
    char path[700];
    snprintf(path, sizeof path, "%s/%s", folder, limit_name);
    uint64_t limit = read_number(path);
    if (limit == UINT64_MAX)
        return;
    snprintf(path, sizeof path, "%s/%s", folder, usage_name);
    uint64_t usage = read_number(path);
    uint64_t cached = read_reclaimable(folder);
    usage -= cached < usage ? cached : usage;
    uint64_t left = usage < limit ? limit - usage : 0;
    if (limits->memory_max_bytes == UINT64_MAX ||
        left < limits->memory_max_bytes - limits->memory_current_bytes) {
        limits->memory_max_bytes = limit;
        limits->memory_current_bytes = limit - left;
        limits->memory_group =
            stat(folder, &status) == 0 ? (uint64_t)status.st_ino ^ kernel_number() : 0;
    }
}

/* Checks the group's folder and all above it, since any may have the tightest limit. In a container
 * the path may be the host's; then only the root exists, and it is the container's. */
static void read_hierarchy(sw_limits *limits, const char *root, const char *path,
                           const char *limit_name, const char *usage_name)
{
    char folder[640];
    snprintf(folder, sizeof folder, "%s%s", root, path);
    for (size_t end = strlen(folder); end >= strlen(root);
         end = (size_t)(strrchr(folder, '/') - folder)) {
        folder[end] = '\0';
        tighten(limits, folder, limit_name, usage_name);
    }
}

/* Lines of /proc/self/cgroup: "0::/path" for v2, "4:memory:/path" for v1's memory controller. */
static void read_cgroup(sw_limits *limits)
{
    char line[512];
    FILE *file = fopen("/proc/self/cgroup", "re");
    if (!file)
        return;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = '\0';
        const char *v1 = strstr(line, ":memory:");
        if (strncmp(line, "0::/", 4) == 0)
            read_hierarchy(limits, "/sys/fs/cgroup", line + 3, "memory.max", "memory.current");
        else if (v1)
            read_hierarchy(limits, "/sys/fs/cgroup/memory", v1 + strlen(":memory:"),
                           "memory.limit_in_bytes", "memory.usage_in_bytes");
    }
    fclose(file);
}

#ifdef __GLIBC__
typedef __rlimit_resource_t limited; /* an enumeration in C++ alone; elsewhere it is an int */
#else
typedef int limited;
#endif

static uint64_t read_rlimit(limited which)
{
    struct rlimit limit;
    if (getrlimit(which, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
        return UINT64_MAX;
    return limit.rlim_cur;
}

void sw_limits_read(sw_limits *limits)
{
    *limits = (sw_limits){.memory_max_bytes = UINT64_MAX, .memory_current_bytes = UINT64_MAX};
    read_cgroup(limits);
    limits->file_size_bytes = read_rlimit(RLIMIT_FSIZE);
    limits->open_files = read_rlimit(RLIMIT_NOFILE);
}

void sw_limits_read_need(size_t size_bytes, int rank, sw_memory_need *need)
{
    sw_limits limits;
    sw_limits_read(&limits);
    *need = (sw_memory_need){.size_bytes = size_bytes, .left_bytes = UINT64_MAX, .rank = rank};
    if (limits.memory_max_bytes == UINT64_MAX || limits.memory_current_bytes == UINT64_MAX)
        return;
    need->group = limits.memory_group;
    need->left_bytes = limits.memory_max_bytes > limits.memory_current_bytes
                           ? limits.memory_max_bytes - limits.memory_current_bytes
                           : 0;
}

sw_status sw_limits_check_memory(size_t size_bytes, const char *label, sw_error *err)
{
    sw_memory_need need;
    sw_limits_read_need(size_bytes, -1, &need);
    if (size_bytes > need.left_bytes)
        SW_FAIL(err, SW_E_MEMORY,
                "%s needs %zu bytes of memory, the cgroup's memory.max leaves %" PRIu64, label,
                size_bytes, need.left_bytes);
    return SW_OK;
}

static const sw_memory_need *need_of(const sw_memory_need *first, size_t stride_bytes, int rank)
{
    return (const void *)((const uint8_t *)first + (size_t)rank * stride_bytes);
}

sw_status sw_limits_check_needs(const sw_memory_need *first, size_t stride_bytes, int count,
                                const char *label, sw_error *err)
{
    for (int r = 0; r < count; ++r) {
        const sw_memory_need *last = need_of(first, stride_bytes, r);
        uint64_t together = 0, left = UINT64_MAX;
        int sharing = 0;
        for (int k = 0; last->group != 0 && k <= r; ++k) {
            const sw_memory_need *other = need_of(first, stride_bytes, k);
            if (other->group != last->group)
                continue;
            together += other->size_bytes;
            left = other->left_bytes < left ? other->left_bytes : left;
            sharing++;
        }
        if (together > left)
            return sw_error_set(err, SW_E_MEMORY, (int)last->rank,
                                "%s needs %" PRIu64 " bytes of memory on %d ranks up to rank %d "
                                "together, the cgroup's memory.max that they share leaves %" PRIu64,
                                label, together, sharing, (int)last->rank, left);
    }
    return SW_OK;
}

sw_status sw_limits_check_file(size_t size_bytes, const char *label, sw_error *err)
{
    uint64_t limit = read_rlimit(RLIMIT_FSIZE);
    if (size_bytes > limit)
        SW_FAIL(err, SW_E_MEMORY,
                "%s needs %zu bytes of shared memory, RLIMIT_FSIZE allows %" PRIu64, label,
                size_bytes, limit);
    return SW_OK;
}

static uint64_t count_open_descriptors(void)
{
    uint64_t count = 0;
    DIR *folder = opendir("/proc/self/fd");
    if (!folder)
        return UINT64_MAX; /* even this check needs one */
    while (readdir(folder))
        count++;
    closedir(folder);
    return count - 3; /* ".", ".." and the folder itself */
}

sw_status sw_limits_check_descriptors(unsigned count, const char *label, sw_error *err)
{
    uint64_t limit = read_rlimit(RLIMIT_NOFILE);
    uint64_t open_now = limit == UINT64_MAX ? 0 : count_open_descriptors();
    if (open_now == UINT64_MAX)
        SW_FAIL(err, SW_E_MEMORY,
                "%s needs %u descriptors, RLIMIT_NOFILE (ulimit -n) allows %" PRIu64
                " and all are open",
                label, count, limit);
    if (limit != UINT64_MAX && open_now + count > limit)
        SW_FAIL(err, SW_E_MEMORY,
                "%s needs %u descriptors, RLIMIT_NOFILE (ulimit -n) allows %" PRIu64 " and %" PRIu64
                " are open",
                label, count, limit, open_now);
    return SW_OK;
}

sw_status sw_limits_fail_descriptors(const char *what, int cause, sw_error *err)
{
    return sw_error_set(err, SW_E_MEMORY, cause,
                        "%s: this process may open no more descriptors (ulimit -n is %" PRIu64
                        "): %s",
                        what, read_rlimit(RLIMIT_NOFILE), strerror(cause));
}
