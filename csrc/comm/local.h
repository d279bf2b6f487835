/* local.h - a communicator whose ranks are threads of one process: the protocol of fabric.h,
 * for tests and for a world of one. Ranks share the mappings themselves: a part of an arena stays
 * until the last rank has destroyed it. If its creation failed, it stays until the group ends.
 * Thread rule: each rank's communicator is used by one thread; the group by all. */
#pragma once

#include "comm/comm.h"

typedef struct sw_local_group sw_local_group;

/* Memory that `world_size` ranks share. Destroy it after all of its communicators. */
SW_MUST_USE sw_status sw_local_group_create(int world_size, sw_local_group **group, sw_error *err);
void sw_local_group_destroy(sw_local_group *group);

/* Create the communicator of one rank; the caller sets its timeouts. On failure the peers get its
 * message. */
SW_MUST_USE sw_status sw_local_comm_create(sw_local_group *group, int rank, sw_comm **comm,
                                           sw_error *err);
