/* nccl_library.h - the NCCL that torch has loaded: its functions and its version.
 *
 * Thread rule: any.
 */
#ifndef SW_COMM_NCCL_LIBRARY_H
#define SW_COMM_NCCL_LIBRARY_H

#include "base/status.h"
#include "comm/nccl_abi.h"

typedef struct sw_nccl_library {
    sw_nccl_table call;
    int version;  /* 10000 * major + 100 * minor + patch */
    void *handle; /* owned */
} sw_nccl_library;

/* `library`: a path, or NULL for the libnccl.so.2 that the process has loaded already. No second
 * NCCL is searched for, since its communicators would be separate from torch's. A library opened by
 * its path stays loaded: the thread that waits for the ranks of an id runs in it. SW_E_UNSUPPORTED
 * if it is not loaded, lacks a function, or is older than 2.14. */
SW_MUST_USE sw_status sw_nccl_library_init(sw_nccl_library *nccl, const char *library,
                                           sw_error *err);
void sw_nccl_library_fini(sw_nccl_library *nccl);

#endif
