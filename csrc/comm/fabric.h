/* fabric.h - a group of ranks that share pages; fabric_state.h has its protocol and memory.
 *
 * Thread rule: one at a time per fabric, except where it says any. */
#ifndef SW_COMM_FABRIC_H
#define SW_COMM_FABRIC_H

#include "comm/fabric_state.h"

/* Bytes of the pages that `world_size` ranks share. They begin with the control blocks. */
size_t sw_fabric_pages_bytes(int world_size);

/* Join with rank, world_size and pages; the transport has already written its pid and host. On
 * failure peers get the same message. */
SW_MUST_USE sw_status sw_fabric_init(sw_fabric *fabric, int rank, int world_size, uint8_t *pages,
                                     sw_error *err);
/* Leave the group (notifying peers that wait for this rank) and free the scratch. */
void sw_fabric_fini(sw_fabric *fabric);

/* Functions of sw_comm_ops that need no transport. */
SW_MUST_USE sw_status sw_fabric_post(sw_comm *comm, const sw_op *op, uint32_t *ticket,
                                     sw_error *err);
SW_MUST_USE sw_status sw_fabric_poll(sw_comm *comm, uint32_t ticket, bool *complete, sw_error *err);
SW_MUST_USE sw_status sw_fabric_wait(sw_comm *comm, uint32_t ticket, sw_error *err);
SW_MUST_USE sw_status sw_fabric_run(sw_comm *comm, const sw_op *op, sw_error *err);
SW_MUST_USE sw_status sw_fabric_gather(sw_comm *comm, const void *mine, size_t size_bytes,
                                       void *all, const char *label, sw_error *err);
void sw_fabric_abort(sw_comm *comm, const sw_error *reason);
SW_MUST_USE sw_status sw_fabric_look(sw_comm *comm, bool minds_leaving, sw_error *err);
void sw_fabric_leave(sw_comm *comm);
bool sw_fabric_is_alive(sw_comm *comm);
void sw_fabric_peer(sw_comm *comm, int rank, char text[SW_COMM_PEER_BYTES]);
sw_wait_note *sw_fabric_note(sw_comm *comm, int local, int *rank);
int sw_fabric_pid(sw_comm *comm, int rank);
int sw_fabric_dead(sw_comm *comm);
/* Publish this process in the block of its rank. */
void sw_control_introduce(sw_control *own, const char *host);

/* Record the end of `rank` in its block, and wake all sleepers of all blocks. The first reason
 * wins. */
void sw_control_end(sw_control *control, int world_size, int rank, sw_member_state how,
                    const sw_error *reason);

#endif
