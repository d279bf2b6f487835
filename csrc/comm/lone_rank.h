/* lone_rank.h - the transport of a rank without peers: no library, no memory, no launch.
 *
 * Idea: what one rank reduces, gathers or broadcasts is there already, so each operation is a copy
 * where its result has another place, and else nothing. NCCL would make a communicator, some
 * hundred MB of a GPU's memory, to do the same.
 *
 * Thread rule: as peers.h. */
#ifndef SW_COMM_LONE_RANK_H
#define SW_COMM_LONE_RANK_H

#include "comm/peers.h"

/* `device` and `watchdog` are borrowed. SW_E_MEMORY. */
SW_MUST_USE sw_status sw_lone_rank_create(sw_device *device, int64_t timeout_ns,
                                          sw_watchdog *watchdog, sw_peers **peers, sw_error *err);

#endif
