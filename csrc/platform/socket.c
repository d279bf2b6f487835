/* socket.c - SOCK_SEQPACKET keeps messages whole, so no framing is needed. */
#include "platform/socket.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "platform/limits.h"

enum { PLACE_MS = 50 };

sw_status sw_random_fill(void *bytes, size_t size_bytes, sw_error *err)
{
    if (syscall(SYS_getrandom, bytes, size_bytes, 0) != (long)size_bytes)
        return sw_error_set(err, SW_E_OS, errno, "getrandom of %zu bytes failed: %s", size_bytes,
                            strerror(errno));
    return SW_OK;
}

static socklen_t make_address(const char *name, struct sockaddr_un *address)
{
    size_t length = strlen(name);
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    if (length > sizeof address->sun_path - 1)
        length = sizeof address->sun_path - 1;
    memcpy(address->sun_path + 1, name, length);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length);
}

static int make_socket(void)
{
    return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

sw_status sw_socket_listen(int backlog, char name[SW_SOCKET_NAME_BYTES], int *fd, sw_error *err)
{
    uint64_t random[2];
    struct sockaddr_un address;
    SW_TRY(sw_random_fill(random, sizeof random, err));
    snprintf(name, SW_SOCKET_NAME_BYTES, "shardwright-%016llx%016llx.%lu",
             (unsigned long long)random[0], (unsigned long long)random[1],
             (unsigned long)geteuid());
    int made = make_socket();
    if (made < 0 && (errno == EMFILE || errno == ENFILE))
        return sw_limits_fail_descriptors("host socket", errno, err);
    if (made < 0)
        return sw_error_set(err, SW_E_OS, errno, "socket failed: %s", strerror(errno));
    socklen_t length = make_address(name, &address);
    if (bind(made, (struct sockaddr *)&address, length) != 0 || listen(made, backlog) != 0) {
        int cause = errno;
        close(made);
        return sw_error_set(err, SW_E_OS, cause, "listening on an abstract socket failed: %s",
                            strerror(cause));
    }
    *fd = made;
    return SW_OK;
}

long sw_socket_peer_uid(int fd)
{
    struct ucred peer;
    socklen_t length = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 ? (long)peer.uid : -1;
}

bool sw_socket_uid_is_of(long uid, const char *name)
{
    const char *suffix = strrchr(name, '.');
    return uid >= 0 && (uid == (long)geteuid() || (suffix && uid == strtol(suffix + 1, NULL, 10)));
}

/* Returns a connected socket; -1 with errno: EAGAIN if the listener's queue is full. With
 * `patience` it waits for a place in the kernel's queue; a caller that only retried would lose the
 * place to others that wait. */
static int call_once(const char *name, const struct timeval *patience)
{
    struct sockaddr_un address;
    socklen_t length = make_address(name, &address);
    int made = patience ? socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0) : make_socket();
    if (made < 0)
        return -1;
    if (patience)
        (void)setsockopt(made, SOL_SOCKET, SO_SNDTIMEO, patience, sizeof *patience);
    if (connect(made, (struct sockaddr *)&address, length) == 0 &&
        (!patience || fcntl(made, F_SETFL, fcntl(made, F_GETFL) | O_NONBLOCK) == 0))
        return made;
    int cause = errno;
    close(made);
    errno = cause;
    return -1;
}

static bool connection_refused(int cause)
{
    return cause == ECONNREFUSED || cause == ENOENT;
}

bool sw_socket_listens(const char *name)
{
    int made = call_once(name, NULL), cause = errno;
    if (made < 0)
        return !connection_refused(cause);
    bool is_ours = sw_socket_uid_is_of(sw_socket_peer_uid(made), name);
    close(made);
    return is_ours;
}

sw_status sw_socket_call(const char *name, int *fd, sw_error *err)
{
    static const struct timeval patience = {.tv_usec = PLACE_MS * 1000};
    int made = call_once(name, &patience), cause = errno;
    long uid = made >= 0 ? sw_socket_peer_uid(made) : -1;
    *fd = -1;
    if (made >= 0 && !sw_socket_uid_is_of(uid, name)) {
        close(made);
        SW_FAIL(err, SW_E_COMM, "%s on this host belongs to a process of another user (uid %ld)",
                name, uid);
    }
    *fd = made;
    if (made >= 0 || cause == EAGAIN || cause == EINTR)
        return SW_OK;
    if (connection_refused(cause))
        return sw_error_set(err, SW_E_COMM, -1, "no process listens at %s on this host: %s", name,
                            strerror(cause));
    if (cause == EMFILE || cause == ENFILE)
        return sw_limits_fail_descriptors("calling a peer", cause, err);
    return sw_error_set(err, SW_E_OS, cause, "calling %s on this host failed: %s", name,
                        strerror(cause));
}

sw_status sw_socket_accept(int listener, int *fd, sw_error *err)
{
    *fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (*fd >= 0 || errno == EAGAIN || errno == EINTR || errno == ECONNABORTED)
        return SW_OK;
    if (errno == EMFILE || errno == ENFILE)
        return sw_limits_fail_descriptors("taking a peer's call", errno, err);
    return sw_error_set(err, SW_E_OS, errno, "accept failed: %s", strerror(errno));
}

typedef union {
    struct cmsghdr header;
    char bytes[CMSG_SPACE(sizeof(int))];
} control_buffer;

sw_status sw_socket_send(int fd, const void *bytes, size_t size_bytes, int passed, bool *sent,
                         sw_error *err)
{
    control_buffer control;
    struct iovec part = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = size_bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (passed >= 0) {
        memset(&control, 0, sizeof control);
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof passed);
        memcpy(CMSG_DATA(header), &passed, sizeof passed);
    }
    ssize_t count = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    *sent = count == (ssize_t)size_bytes;
    if (*sent || (count < 0 &&
                  (errno == EAGAIN || errno == EINTR || errno == ENOBUFS || errno == ETOOMANYREFS)))
        return SW_OK;
    return sw_error_set(err, SW_E_COMM, -1, "sending to a peer failed: %s", strerror(errno));
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wsign-conversion" /* in musl's CMSG_NXTHDR */
static void take_descriptors(struct msghdr *message, int *passed)
{
    for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header;
         header = CMSG_NXTHDR(message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
            continue;
        size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; ++i) {
            int received;
            memcpy(&received, CMSG_DATA(header) + i * sizeof(int), sizeof received);
            if (*passed < 0)
                *passed = received;
            else
                close(received);
        }
    }
}
#pragma GCC diagnostic pop

sw_status sw_socket_receive(int fd, void *bytes, size_t size_bytes, int *passed, bool *received,
                            sw_error *err)
{
    control_buffer control;
    struct iovec part = {.iov_base = bytes, .iov_len = size_bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (passed) { /* without room for descriptors the kernel closes them */
        *passed = -1;
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
    }
    ssize_t count = recvmsg(fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    *received = count >= 0;
    if (count < 0 && (errno == EAGAIN || errno == EINTR))
        return SW_OK;
    if (count < 0)
        return sw_error_set(err, SW_E_COMM, -1, "receiving from a peer failed: %s",
                            strerror(errno));
    if (passed)
        take_descriptors(&message, passed);
    bool is_whole = count == (ssize_t)size_bytes && !(message.msg_flags & MSG_TRUNC);
    if (!is_whole && passed) /* an empty message may bring one, too */
        sw_socket_close(passed);
    if (count == 0)
        SW_FAIL(err, SW_E_COMM, "a peer has hung up");
    if (!is_whole)
        SW_FAIL(err, SW_E_COMM, "a peer sent a message of %zd bytes, expected %zu", count,
                size_bytes);
    if (passed && (message.msg_flags & MSG_CTRUNC)) {
        sw_socket_close(passed);
        return sw_limits_fail_descriptors("receiving a descriptor from a peer", EMFILE, err);
    }
    return SW_OK;
}

void sw_socket_close(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}
