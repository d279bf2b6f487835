/* socket.h - abstract Unix sockets that carry a few bytes and a file descriptor. No function waits,
 * except sw_socket_call briefly: a caller that must wait polls the sockets.
 *
 * Abstract names live in the network namespace and vanish with their socket. Every process of the
 * namespace can list and call them, so a name ends with the listener's uid, and both sides ask the
 * kernel for the other's uid. Thread rule: one at a time per socket.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { SW_SOCKET_NAME_BYTES = 64 };

/* Fills `bytes` from the kernel's random source. */
SW_MUST_USE sw_status sw_random_fill(void *bytes, size_t size_bytes, sw_error *err);

/* Listens on a fresh random name, written to `name` (printable, without the leading zero byte). */
SW_MUST_USE sw_status sw_socket_listen(int backlog, char name[SW_SOCKET_NAME_BYTES], int *fd,
                                       sw_error *err);

/* Returns the uid of the process at the other end: a caller's at the call, a listener's when it
 * began to listen. -1 if unknown. */
long sw_socket_peer_uid(int fd);

/* True if the uid is this process's own or the one at the end of `name`. */
bool sw_socket_uid_is_of(long uid, const char *name);

/* Connects; *fd is -1 if the listener's queue stayed full for 50 ms. SW_E_COMM: no process listens
 * there (another host or network namespace), or another user's process does.
 */
SW_MUST_USE sw_status sw_socket_call(const char *name, int *fd, sw_error *err);

/* True if the process that made `name` still listens, or if that is unknown. The listener sees a
 * call that hangs up, which occupies a place of its queue until accepted.
 */
bool sw_socket_listens(const char *name);

/* Accepts the next call; *fd is -1 if there is none. SW_E_MEMORY names `ulimit -n`. */
SW_MUST_USE sw_status sw_socket_accept(int listener, int *fd, sw_error *err);

/* Sends one message, whole or not at all, with descriptor `passed` unless that is -1. *sent is
 * false if the kernel takes no more for now. SW_E_COMM: the peer has hung up. */
SW_MUST_USE sw_status sw_socket_send(int fd, const void *bytes, size_t size_bytes, int passed,
                                     bool *sent, sw_error *err);

/* Receives one message of `size_bytes`; *received is false if none has arrived. *passed: the
 * descriptor that came with it, or -1; NULL: close it. SW_E_COMM: the peer has hung up or sent a
 * message of another size. SW_E_MEMORY: the bytes arrived, but this process has no descriptor free
 * (names `ulimit -n`). */
SW_MUST_USE sw_status sw_socket_receive(int fd, void *bytes, size_t size_bytes, int *passed,
                                        bool *received, sw_error *err);

/* Closes *fd and sets it to -1; no effect if it is -1. */
void sw_socket_close(int *fd);
