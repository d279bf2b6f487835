/* shm.h - a communicator whose ranks are processes of one host. The first rank makes memfds and
 * passes them over abstract Unix sockets (bootstrap.h); the protocol on the mapped pages is in
 * fabric.h.
 *
 * Joining has two steps, because the addresses travel through a store of the caller: create
 * listens and returns its address; connect takes all addresses. Thread rule: one at a time a
 * communicator. */
#pragma once

#include "comm/bootstrap.h"

enum { SW_SHM_SECRET_BYTES = SW_PROOF_SECRET_BYTES };

/* Listen; peers connect to `address`. SW_E_MEMORY names the limit that was hit. Set timeouts and
 * hooks in *comm before connecting. Cost: one file descriptor for any world_size. */
SW_MUST_USE sw_status sw_shm_comm_create(int rank, int world_size, const char *host, sw_comm **comm,
                                         char address[SW_SOCKET_NAME_BYTES], sw_error *err);

/* Before connect: restrict the communicator to the ranks `members` of this host, ascending, this
 * rank among them. They become ranks 0 to count - 1; messages keep their former numbers. */
SW_MUST_USE sw_status sw_shm_comm_narrow(sw_comm *comm, const int *members, int count,
                                         sw_error *err);

/* Join the peers: `addresses` has world_size names, `secret` SW_SHM_SECRET_BYTES bytes equal on all
 * ranks. At most SW_COMM_MAX_WORLD ranks, after sw_shm_comm_narrow. SW_E_COMM names the first rank
 * if it is unreachable (another host), or a rank that died or could not join; SW_E_TIMEOUT the
 * first late rank; SW_E_MEMORY a limit (`ulimit -n`: the first rank needs world_size file
 * descriptors). Cost: 5 messages a rank, to or from the first rank. */
SW_MUST_USE sw_status sw_shm_comm_connect(sw_comm *comm, const char *const *addresses,
                                          const uint8_t *secret, sw_error *err);

/* Return how deaths of peers are detected: "file lock"; "none" without peers. */
const char *sw_shm_comm_watch(const sw_comm *comm);
