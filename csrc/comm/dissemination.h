/* dissemination.h - the order of messages in an all-gather between hosts. Arithmetic only.
 *
 * In round k a host sends all data that it has to the hosts j * radix^k before it, and receives
 * from those j * radix^k after it, j = 1 to radix - 1, all modulo the number of hosts. Before round
 * k it has the data of radix^k hosts, itself first. After ceil(log_radix hosts) rounds it has the
 * data of all, each received once. (Hensgen, Finkel and Manber, 1988; as an all-gather Bruck et
 * al., 1997.)
 *
 *   20 hosts, radix 8, host 18     round 0: from 19, 0, 1, ... 5, each about itself
 *                                  round 1: from 6 about 6 to 13, from 14 about 14 to 17
 *
 * Thread rule: any, once made. */
#ifndef SW_COMM_DISSEMINATION_H
#define SW_COMM_DISSEMINATION_H

#include "base/status.h"

enum { SW_DISSEMINATION_RADIX = 8 };

typedef struct sw_hop {
    int round;
    int to;    /* the receiver of the data of this host and the count - 1 hosts after it */
    int from;  /* the sender of its own data and that of the hosts after it */
    int count; /* hosts in the message, sender first, modulo the number of hosts */
} sw_hop;

typedef struct sw_dissemination {
    int host, host_count, rounds;
    int hop_count; /* at most (radix - 1) * rounds; in the order of rounds */
    sw_hop *hops;  /* owned */
    int peer_count;
    int *peers; /* owned: every host of some hop, ascending */
} sw_dissemination;

/* `radix` >= 2. SW_E_MEMORY is the only failure. */
SW_MUST_USE sw_status sw_dissemination_init(sw_dissemination *made, int host, int host_count,
                                            int radix, sw_error *err);
void sw_dissemination_fini(sw_dissemination *made);

#endif
