/* limits.c - reads rlimits and the process's own cgroup (v2, or v1's memory controller at its usual place). */
#include "platform/limits.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

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
    return value >= (UINT64_C(1) << 62) ? UINT64_MAX : value; /* v1 says "no limit" by a huge number */
}

/* The v2 cgroup of this process: "0::/path" in /proc/self/cgroup. Empty when there is none. */
static void find_cgroup(char *path, size_t capacity)
{
    char line[512];
    path[0] = '\0';
    FILE *file = fopen("/proc/self/cgroup", "re");
    if (!file)
        return;
    while (fgets(line, sizeof line, file))
        if (strncmp(line, "0::", 3) == 0) {
            line[strcspn(line, "\n")] = '\0';
            snprintf(path, capacity, "/sys/fs/cgroup%s", line + 3);
        }
    fclose(file);
}

static void read_cgroup(sw_limits *limits)
{
    char folder[560];
    char path[600];
    find_cgroup(folder, sizeof folder);
    if (folder[0]) {
        snprintf(path, sizeof path, "%s/memory.max", folder);
        limits->memory_max_bytes = read_number(path);
        snprintf(path, sizeof path, "%s/memory.current", folder);
        limits->memory_current_bytes = read_number(path);
    }
    if (limits->memory_max_bytes == UINT64_MAX) {
        limits->memory_max_bytes = read_number("/sys/fs/cgroup/memory/memory.limit_in_bytes");
        limits->memory_current_bytes = read_number("/sys/fs/cgroup/memory/memory.usage_in_bytes");
    }
}

static uint64_t read_rlimit(int which)
{
    struct rlimit limit;
    if (getrlimit((__rlimit_resource_t)which, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
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

sw_status sw_limits_check_file(size_t size_bytes, const char *label, sw_error *err)
{
    sw_limits limits;
    sw_limits_read(&limits);
    if (size_bytes > limits.file_size_bytes)
        SW_FAIL(err, SW_E_MEMORY, "%s needs %zu bytes of shared memory, RLIMIT_FSIZE allows %" PRIu64, label,
                size_bytes, limits.file_size_bytes);
    if (limits.memory_max_bytes != UINT64_MAX && limits.memory_current_bytes != UINT64_MAX) {
        uint64_t used = limits.memory_current_bytes;
        uint64_t left = limits.memory_max_bytes > used ? limits.memory_max_bytes - used : 0;
        if (size_bytes > left)
            SW_FAIL(err, SW_E_MEMORY,
                    "%s needs %zu bytes of shared memory, the cgroup's memory.max leaves %" PRIu64, label,
                    size_bytes, left);
    }
    return SW_OK;
}

static uint64_t count_open_descriptors(void)
{
    uint64_t count = 0;
    DIR *folder = opendir("/proc/self/fd");
    if (!folder)
        return UINT64_MAX; /* not even the one this needs */
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
        SW_FAIL(err, SW_E_MEMORY, "%s needs %u descriptors, RLIMIT_NOFILE allows %" PRIu64 " and all are open", label, count,
                limit);
    if (limit != UINT64_MAX && open_now + count > limit)
        SW_FAIL(err, SW_E_MEMORY, "%s needs %u descriptors, RLIMIT_NOFILE allows %" PRIu64 " and %" PRIu64 " are open", label,
                count, limit, open_now);
    return SW_OK;
}
