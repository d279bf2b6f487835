/* limits.h - the limits of this process: cgroup memory, file size, open files. Thread rule: any. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct sw_limits {     /* UINT64_MAX if there is no limit or it cannot be read */
    uint64_t memory_max_bytes; /* limit of the control group with the least memory left, this one or
                                * an outer one */
    uint64_t memory_current_bytes; /* bytes used, without file cache that can be dropped */
    uint64_t memory_group;         /* the group's number on this host; 0: none */
    uint64_t file_size_bytes;      /* RLIMIT_FSIZE: a memfd counts as a file */
    uint64_t open_files;           /* RLIMIT_NOFILE */
} sw_limits;

void sw_limits_read(sw_limits *limits);

/* Checks that this much more memory is available; SW_E_MEMORY names memory.max, the rest and the
 * need. */
SW_MUST_USE sw_status sw_limits_check_memory(size_t size_bytes, const char *label, sw_error *err);

/* A process's need of memory under a limit that it may share with others. */
typedef struct sw_memory_need {
    uint64_t size_bytes;
    uint64_t group, left_bytes; /* the control group with the least memory left; group 0: no
                                 * limit */
    int64_t rank;               /* name in messages */
} sw_memory_need;

void sw_limits_read_need(size_t size_bytes, int rank, sw_memory_need *need);

/* Checks that the needs of `count` ranks, each possible alone, fit together under the limits that
 * they share. `stride_bytes`: from one need to the next. SW_E_MEMORY names the number of ranks,
 * memory.max, the rest and the need; its detail is the group's last rank. */
SW_MUST_USE sw_status sw_limits_check_needs(const sw_memory_need *first, size_t stride_bytes,
                                            int count, const char *label, sw_error *err);

/* Checks that a file of `size_bytes` is allowed; SW_E_MEMORY names RLIMIT_FSIZE and the need. */
SW_MUST_USE sw_status sw_limits_check_file(size_t size_bytes, const char *label, sw_error *err);

/* Checks that `count` more file descriptors can be opened; SW_E_MEMORY names RLIMIT_NOFILE, the
 * open ones and the need. */
SW_MUST_USE sw_status sw_limits_check_descriptors(unsigned count, const char *label, sw_error *err);

/* Writes the error for a refused file descriptor (EMFILE, ENFILE): always SW_E_MEMORY. */
sw_status sw_limits_fail_descriptors(const char *what, int cause, sw_error *err);
