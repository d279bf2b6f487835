/* shared_exchange.h - an exchange over memory that all ranks of a communicator map: a rank reads
 * its pieces where the peers wrote them. It takes two barriers.
 *
 * A rank's memory holds its result, then its message. After the second barrier no rank reads
 * messages, and after the next exchange's first one no rank reads results, so neither is
 * overwritten while a slower rank reads it.
 *
 * Thread rule: as the communicator's. Every rank of it makes the same calls. */
#pragma once

#include "comm/comm.h"
#include "comm/exchange.h"

/* `comm` is borrowed: it outlives the exchange. */
SW_MUST_USE sw_status sw_shared_exchange_create(sw_comm *comm, sw_exchange **exchange,
                                                sw_error *err);
void sw_shared_exchange_destroy(sw_exchange *exchange);
