/* socket.h - abstract Unix sockets that carry a few bytes and a file descriptor. No function waits,
 * except sw_socket_call for a moment: a caller that waits polls the sockets.
 *
 * Abstract names live in the network namespace and vanish with their socket: nothing is left
 * behind. Every process of the namespace can read and call them, so a name ends with the listener's
 * uid, and both sides ask the kernel for the other's. Thread rule: one at a time a socket.
 */
#ifndef SW_PLATFORM_SOCKET_H
#define SW_PLATFORM_SOCKET_H

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

/* Returns the uid of the process at the other end: a caller's when it called, a listener's when it
 * began to listen. -1 where the kernel does not say. */
long sw_socket_peer_uid(int fd);

/* True if it is this process's own, or the one that `name` ends with. */
bool sw_socket_uid_is_of(long uid, const char *name);

/* A connection; *fd is -1 where the listener's queue has stayed full for 50 ms. SW_E_COMM: no
 * process listens there (another host or another network namespace), or one of another user does.
 */
SW_MUST_USE sw_status sw_socket_call(const char *name, int *fd, sw_error *err);

/* True if the process that made `name` still listens, or if this process cannot find out. To the
 * listener it is a call that hangs up. It fills a place of its queue until it is taken.
 */
bool sw_socket_listens(const char *name);

/* The next call; *fd is -1 where there is none. SW_E_MEMORY names `ulimit -n`. */
SW_MUST_USE sw_status sw_socket_accept(int listener, int *fd, sw_error *err);

/* One message, whole or not at all, with descriptor `passed` unless that is -1. *sent is false
 * where the kernel takes no more for now: too much is on its way. SW_E_COMM: the peer is gone. */
SW_MUST_USE sw_status sw_socket_send(int fd, const void *bytes, size_t size_bytes, int passed,
                                     bool *sent, sw_error *err);

/* One message of `size_bytes`; *received is false where none has come. `passed` NULL: descriptors
 * that come with it are closed; else the one that did, or -1. SW_E_COMM: the peer has hung up, or
 * sent a message of another size. SW_E_MEMORY: the bytes are whole, and this process may have no
 * more descriptors (names `ulimit -n`). */
SW_MUST_USE sw_status sw_socket_receive(int fd, void *bytes, size_t size_bytes, int *passed,
                                        bool *received, sw_error *err);

/* Closes *fd and makes it -1; nothing where it is. */
void sw_socket_close(int *fd);

#endif
