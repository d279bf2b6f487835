/* nccl_state.h - an NCCL communicator: shared by nccl.c and nccl_register.c. Not for others.
 *
 * Thread rule: as peers.h; `calls` guards what says so.
 */
#ifndef SW_COMM_NCCL_STATE_H
#define SW_COMM_NCCL_STATE_H

#include <pthread.h>

#include "comm/nccl_library.h"
#include "comm/peers.h"

typedef struct nccl_comm {
    sw_peers base;
    const sw_nccl_library *library; /* borrowed */
    sw_nccl_comm handle;            /* owned, or borrowed; NULL once it has ended; under `calls` */
    int depth;             /* groups that are open in NCCL, one inside the other; under `calls` */
    pthread_mutex_t calls; /* held for each call of NCCL's that names the communicator */
} nccl_comm;

#endif
