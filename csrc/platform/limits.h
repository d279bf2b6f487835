/* limits.h - what this process may take: cgroup memory, file size, open files. Thread rule: any. */
#ifndef SW_PLATFORM_LIMITS_H
#define SW_PLATFORM_LIMITS_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct sw_limits { /* UINT64_MAX where there is no limit or it cannot be read */
    uint64_t
        memory_max_bytes; /* of the control group that has least left, this one or an outer one */
    uint64_t memory_current_bytes; /* used of it, file cache that can be dropped left out */
    uint64_t file_size_bytes;      /* RLIMIT_FSIZE: a memfd counts as a file */
    uint64_t open_files;           /* RLIMIT_NOFILE */
} sw_limits;

void sw_limits_read(sw_limits *limits);

/* Whether that much more memory of any kind can be had; SW_E_MEMORY names memory.max, what it
 * leaves and the need. */
SW_MUST_USE sw_status sw_limits_check_memory(size_t size_bytes, const char *label, sw_error *err);

/* Whether a memfd of `size_bytes` can be made; SW_E_MEMORY names the limit, its value and the need.
 */
SW_MUST_USE sw_status sw_limits_check_file(size_t size_bytes, const char *label, sw_error *err);

/* Whether `count` more descriptors can be opened; SW_E_MEMORY names RLIMIT_NOFILE, what is open and
 * the need. */
SW_MUST_USE sw_status sw_limits_check_descriptors(unsigned count, const char *label, sw_error *err);

#endif
