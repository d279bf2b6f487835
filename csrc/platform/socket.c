/* socket.c - SOCK_SEQPACKET keeps messages whole, so there is no framing to get wrong. */
#include "platform/socket.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "platform/clock.h"

enum { LOOK_MS = 100, QUEUE_LOOK_MS = 2 };
static const int64_t crowd_wait_ns = INT64_C(10000000000);

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
    return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
}

sw_status sw_socket_listen(int backlog, char name[SW_SOCKET_NAME_BYTES], int *fd, sw_error *err)
{
    uint64_t random[2];
    struct sockaddr_un address;
    SW_TRY(sw_random_fill(random, sizeof random, err));
    snprintf(name, SW_SOCKET_NAME_BYTES, "shardwright-%016llx%016llx",
             (unsigned long long)random[0], (unsigned long long)random[1]);
    int made = make_socket();
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

/* A connected socket; -1 with errno: EAGAIN where the listener's queue is full. */
static int call_once(const char *name)
{
    struct sockaddr_un address;
    socklen_t length = make_address(name, &address);
    int made = make_socket();
    if (made < 0)
        return -1;
    int flags = fcntl(made, F_GETFL);
    if (flags >= 0 && fcntl(made, F_SETFL, flags | O_NONBLOCK) == 0 &&
        connect(made, (struct sockaddr *)&address, length) == 0 && fcntl(made, F_SETFL, flags) == 0)
        return made;
    int cause = errno;
    close(made);
    errno = cause;
    return -1;
}

static bool is_deaf(int cause)
{
    return cause == ECONNREFUSED || cause == ENOENT;
}

bool sw_socket_listens(const char *name)
{
    int made = call_once(name), cause = errno;
    if (made < 0)
        return !is_deaf(cause);
    close(made);
    return true;
}

sw_status sw_socket_connect(const char *name, const sw_patience *patience, int *fd, sw_error *err)
{
    int64_t look_ns = sw_clock_now_ns() + LOOK_MS * INT64_C(1000000);
    for (;;) {
        int made = call_once(name), cause = errno;
        if (made >= 0) {
            *fd = made;
            return SW_OK;
        }
        if (is_deaf(cause))
            return sw_error_set(err, SW_E_COMM, -1, "nobody listens at %s on this host: %s", name,
                                strerror(cause));
        if (cause != EAGAIN && cause != EINTR)
            return sw_error_set(err, SW_E_OS, cause, "calling %s on this host failed: %s", name,
                                strerror(cause));
        int64_t now_ns = sw_clock_now_ns();
        if (now_ns > patience->deadline_ns)
            SW_FAIL(err, SW_E_TIMEOUT,
                    "no place in the queue of the host socket before the deadline");
        if (patience->look && now_ns > look_ns) {
            SW_TRY(patience->look(patience->context, err));
            look_ns = now_ns + LOOK_MS * INT64_C(1000000);
        }
        (void)poll(NULL, 0, QUEUE_LOOK_MS);
    }
}

/* Waits until `fd` can be read. */
static sw_status wait_readable(int fd, const sw_patience *patience, sw_error *err)
{
    for (;;) {
        int64_t left_ms = (patience->deadline_ns - sw_clock_now_ns() + 999999) / 1000000;
        if (left_ms <= 0)
            SW_FAIL(err, SW_E_TIMEOUT, "no answer on the host socket before the deadline");
        struct pollfd watch = {.fd = fd, .events = POLLIN};
        int ready = poll(&watch, 1, left_ms > LOOK_MS ? LOOK_MS : (int)left_ms);
        if (ready > 0)
            return SW_OK;
        if (ready < 0 && errno != EINTR)
            return sw_error_set(err, SW_E_OS, errno, "poll failed: %s", strerror(errno));
        if (patience->look)
            SW_TRY(patience->look(patience->context, err));
    }
}

sw_status sw_socket_accept(int listener, const sw_patience *patience, int *fd, sw_error *err)
{
    SW_TRY(wait_readable(listener, patience, err));
    int made = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (made < 0)
        return sw_error_set(err, SW_E_OS, errno, "accept failed: %s", strerror(errno));
    *fd = made;
    return SW_OK;
}

typedef union {
    struct cmsghdr header;
    char bytes[CMSG_SPACE(SW_SOCKET_FDS_MAX * sizeof(int))];
} control_buffer;

sw_status sw_socket_send(int fd, const void *bytes, size_t size_bytes, const int *fds, int fd_count,
                         sw_error *err)
{
    control_buffer control;
    struct iovec part = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = size_bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    memset(&control, 0, sizeof control);
    if (fd_count > 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE((size_t)fd_count * sizeof(int));
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN((size_t)fd_count * sizeof(int));
        memcpy(CMSG_DATA(header), fds, (size_t)fd_count * sizeof(int));
    }
    ssize_t sent;
    int64_t deadline_ns = sw_clock_now_ns() + crowd_wait_ns;
    for (;;) {
        sent = sendmsg(fd, &message, MSG_NOSIGNAL);
        if (sent >= 0 || (errno != EINTR && errno != ETOOMANYREFS) ||
            sw_clock_now_ns() > deadline_ns)
            break;
        if (errno == ETOOMANYREFS)
            (void)poll(NULL, 0, 1);
    }
    if (sent != (ssize_t)size_bytes)
        return sw_error_set(err, SW_E_COMM, -1,
                            "sending %zu bytes and %d descriptors to a peer failed: %s", size_bytes,
                            fd_count, strerror(errno));
    return SW_OK;
}

static void take_descriptors(struct msghdr *message, int *fds, int fd_count)
{
    for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header;
         header = CMSG_NXTHDR(message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
            continue;
        int count = (int)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        for (int i = 0; i < count; ++i) {
            int received;
            memcpy(&received, CMSG_DATA(header) + (size_t)i * sizeof(int), sizeof received);
            if (i < fd_count)
                fds[i] = received;
            else
                close(received);
        }
    }
}

sw_status sw_socket_receive(int fd, void *bytes, size_t size_bytes, int *fds, int fd_count,
                            const sw_patience *patience, sw_error *err)
{
    control_buffer control;
    struct iovec part = {.iov_base = bytes, .iov_len = size_bytes};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    for (int i = 0; i < fd_count; ++i)
        fds[i] = -1;
    SW_TRY(wait_readable(fd, patience, err));
    ssize_t received = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    if (received < 0)
        return sw_error_set(err, SW_E_COMM, -1, "receiving from a peer failed: %s",
                            strerror(errno));
    take_descriptors(&message, fds, fd_count);
    if (received != (ssize_t)size_bytes)
        SW_FAIL(err, SW_E_COMM, "a peer closed its socket (%zd of %zu bytes came)", received,
                size_bytes);
    return SW_OK;
}
