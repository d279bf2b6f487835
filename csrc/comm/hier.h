/* hier.h - a communicator over several hosts: shared memory inside each, a bridge across.
 *
 * Idea: ranks post operations as inside one host. One rank of each host, its carrier, has a thread
 * that executes in order the operations that all ranks of the host have posted. It folds the host's
 * contributions in rank order into partial sums and sends each host its slice of them. It folds
 * received sums in host order and stores the result into the memory of its host's ranks. Other
 * ranks do no work for it and wait only for results. See docs/design/hosts.md.
 *
 * Left out: arenas that would need memory of another host.
 *
 * Thread rule: one at a time per communicator, as comm.h. */
#pragma once

#include "comm/bridge.h"
#include "comm/comm.h"

typedef struct sw_identity { /* names a rank and its host in messages */
    int32_t pid;
    char host[64]; /* padded with zeros */
} sw_identity;

/* Collective over all hosts' ranks. `inside`: the joined communicator of this host's ranks (shm.h;
 * local.h in tests). `host_of`: each rank's host, numbered by its lowest rank. `own`: this rank's
 * identity. `wire`: NULL for one host, and on ranks that are not carriers. Takes ownership of
 * `inside` and `wire`, even on failure. Runs the first operation, an all_gather of identities: when
 * it returns on one rank, all ranks have joined. */
SW_MUST_USE sw_status sw_hier_comm_create(sw_comm *inside, int rank, int world_size,
                                          const int *host_of, const sw_identity *own,
                                          const sw_wire *wire, sw_comm **comm, sw_error *err);

/* Return the name of a host. */
const char *sw_hier_comm_host(const sw_comm *comm, int host);

const sw_host_map *sw_hier_comm_map(const sw_comm *comm);

/* Return the communicator of this host's ranks alone. */
const sw_comm *sw_hier_comm_inside(const sw_comm *comm);
