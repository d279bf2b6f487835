/* nccl_state.h - an NCCL communicator, private to nccl.c and nccl_register.c.
 *
 * Thread rule: as peers.h; `calls` guards the fields that name it. */
#ifndef SW_COMM_NCCL_STATE_H
#define SW_COMM_NCCL_STATE_H

#include <pthread.h>

#include "comm/nccl_library.h"
#include "comm/peers.h"

typedef struct nccl_comm {
    sw_peers base;
    const sw_nccl_library *library; /* borrowed */
    sw_nccl_comm handle;            /* owned, or borrowed; NULL once it has ended; under `calls` */
    int depth;                      /* depth of open NCCL groups; under `calls` */
    pthread_mutex_t calls;          /* held for each NCCL call that names the communicator */
} nccl_comm;

#endif
