/* socket.h - abstract Unix sockets that carry a few bytes and file descriptors, every call under a
 * deadline.
 *
 * Abstract names live in the network namespace and vanish with their socket: nothing is left
 * behind. Deadlines are absolute, in sw_clock_now_ns() time. Thread rule: one at a time a socket.
 */
#ifndef SW_PLATFORM_SOCKET_H
#define SW_PLATFORM_SOCKET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { SW_SOCKET_NAME_BYTES = 64, SW_SOCKET_FDS_MAX = 2 };

/* Fills `bytes` from the kernel's random source. */
SW_MUST_USE sw_status sw_random_fill(void *bytes, size_t size_bytes, sw_error *err);

/* Listens on a fresh random name, written to `name` (printable, without the leading zero byte). */
SW_MUST_USE sw_status sw_socket_listen(int backlog, char name[SW_SOCKET_NAME_BYTES], int *fd,
                                       sw_error *err);

/* How long to wait, and what may end it earlier. */
typedef struct sw_patience {
    int64_t deadline_ns; /* of sw_clock_now_ns() */
    sw_status (*look)(
        void *context,
        sw_error *err); /* called ten times a second; not SW_OK ends the wait. NULL: none */
    void *context;      /* borrowed */
} sw_patience;

/* SW_E_COMM when nobody listens there (another host or another network namespace), SW_E_TIMEOUT
 * when who listens has taken no call up to the deadline and its queue is full. */
SW_MUST_USE sw_status sw_socket_connect(const char *name, const sw_patience *patience, int *fd,
                                        sw_error *err);

/* Whether somebody listens there; true also where this process cannot find out. Never waits. To the
 * listener it is a call that hangs up, and as long as nobody takes that it fills a place of its
 * queue. */
bool sw_socket_listens(const char *name);

/* SW_E_TIMEOUT at the deadline. */
SW_MUST_USE sw_status sw_socket_accept(int listener, const sw_patience *patience, int *fd,
                                       sw_error *err);

/* One message of `size_bytes` (small: it must fit the socket's buffer) with `fd_count` descriptors.
 * Waits a few seconds, no more, while the kernel holds too many descriptors on their way
 * (RLIMIT_NOFILE counts those too). */
SW_MUST_USE sw_status sw_socket_send(int fd, const void *bytes, size_t size_bytes, const int *fds,
                                     int fd_count, sw_error *err);

/* Receives exactly one such message; missing descriptors are left as -1. SW_E_COMM when the peer is
 * gone, SW_E_TIMEOUT at the deadline. */
SW_MUST_USE sw_status sw_socket_receive(int fd, void *bytes, size_t size_bytes, int *fds,
                                        int fd_count, const sw_patience *patience, sw_error *err);

#endif
