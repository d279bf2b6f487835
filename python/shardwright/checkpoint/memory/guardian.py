"""The guardian: a process that holds a host's images of steps, for ranks that may be killed.

It is run by its path, `python -I -S guardian.py NAME PID START LINGER_S`, and uses only the standard library, so it is
small and shares nothing with a rank. It never maps an image: it creates memfds and passes them to processes of its
user.

It ends when the launcher (PID, started at START) has ended, when the last rank has left in order, or LINGER_S seconds
after the last rank ended otherwise. Then the kernel frees the images.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import select
import socket
import struct
import sys
import time

MESSAGE_BYTES = 1 << 16
PEER = struct.Struct("3i")  # struct ucred
ADD_SEALS, SEAL_SIZE = 1033, 1 | 2 | 4  # F_ADD_SEALS; F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW
LOOK_S = 1.0  # between looks at a launcher without a pidfd


def peer_uid(connection: socket.socket) -> int:
    """Return the uid of the process at the other end."""
    return int(PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))[1])


def fields_of(pid: int) -> list[bytes]:
    """Return the fields of a process from its state on (proc(5)); [] if it has ended, reaped or not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return []
    return [] if len(fields) < 20 or fields[0] in (b"Z", b"X") else fields


def start_of(pid: int) -> int:
    """Return the start time of a process in kernel ticks; 0 if it has ended."""
    fields = fields_of(pid)
    return int(fields[19]) if fields else 0


class Guardian:
    """The images of one job on this host."""

    def __init__(self, listener: socket.socket, launcher: int, started: int, linger_s: float) -> None:
        self.listener, self.launcher, self.started, self.linger_s = listener, launcher, started, linger_s
        self.images: dict[str, tuple[int, object]] = {}  # name -> (fd, meta)
        self.ranks: dict[int, socket.socket] = {}  # by file descriptor
        self.runs: dict[int, object] = {}  # file descriptor -> the rank's start of the job
        self.run: object = None  # the current start: the latest one
        self.past: set[object] = set()  # earlier starts
        self.parting: set[int] = set()  # ranks that have said goodbye
        self.is_wanted = True  # no rank has connected yet, or one ended without goodbye: the job may restart
        self.alone_since = time.monotonic()
        self.poll = select.poll()
        self.poll.register(listener, select.POLLIN)
        try:
            self.pidfd = os.pidfd_open(launcher)
            self.poll.register(self.pidfd, select.POLLIN)
        except (AttributeError, OSError):
            self.pidfd = -1

    def serve(self) -> None:
        while start_of(self.launcher) == self.started:  # the pidfd may belong to a later process with this number
            left_s = self.linger_s - (time.monotonic() - self.alone_since)
            if not self.ranks and (not self.is_wanted or left_s <= 0):
                return
            wait_s = None if self.ranks else left_s
            if self.pidfd < 0:
                wait_s = LOOK_S if wait_s is None else min(wait_s, LOOK_S)
            for fd, _ in self.poll.poll(None if wait_s is None else 1000 * wait_s + 1):
                if fd == self.listener.fileno():
                    self.accept()
                elif fd in self.ranks:
                    self.receive(fd)

    def accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return
        if peer_uid(connection) != os.geteuid():
            connection.close()
            return
        connection.setblocking(False)
        self.ranks[connection.fileno()] = connection
        self.poll.register(connection, select.POLLIN)

    def receive(self, fd: int) -> None:
        connection = self.ranks[fd]
        try:
            message = connection.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self.leave(fd)
            return
        passed: list[int] = []
        try:
            answer = self.answer(fd, json.loads(message), passed)
        except Exception as error:  # report it to the rank and continue
            answer = {"error": f"{type(error).__name__}: {error}"}
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))] if passed else []
        try:
            connection.sendmsg([json.dumps(answer).encode()], ancillary)
        except OSError:
            self.leave(fd)

    def leave(self, fd: int) -> None:
        self.poll.unregister(fd)
        self.ranks.pop(fd).close()
        if self.runs.pop(fd, None) == self.run:  # ranks of an earlier start do not count
            self.is_wanted |= fd not in self.parting
        self.parting.discard(fd)
        self.alone_since = time.monotonic()

    def answer(self, fd: int, asked: dict[str, object], passed: list[int]) -> dict[str, object]:
        what, name = asked["what"], str(asked["name"])
        if what in ("make", "open", "drop") and self.runs.get(fd) != self.run:  # a rank of an earlier start
            raise PermissionError("a later start of this job has come")
        if what == "make":
            image = os.memfd_create("shardwright-image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.fchmod(image, 0o600)
                os.ftruncate(image, int(str(asked["nbytes"])))
                fcntl.fcntl(image, ADD_SEALS, SEAL_SIZE)
            except BaseException:
                os.close(image)
                raise
            self.drop(name)
            self.images[name] = image, asked["meta"]
        if what in ("make", "open"):
            image, meta = self.images[name]
            passed.append(image)
            return {"meta": meta}
        if what == "drop":
            self.drop(name)
        elif what == "hello":
            self.runs[fd] = name
            if name not in self.past:
                self.is_wanted &= name == self.run
                self.past |= {self.run} - {name}
                self.run = name
        elif what == "bye":
            self.parting.add(fd)
        elif what == "list":
            held = sum(512 * os.fstat(image).st_blocks for image, _ in self.images.values())
            return {"names": sorted(self.images), "nbytes": held, "pid": os.getpid()}
        return {}

    def drop(self, name: str) -> None:
        if name in self.images:
            os.close(self.images.pop(name)[0])


def main(name: str, launcher: str, started: str, linger_s: str) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(f"\0{name}")
    except OSError:  # another guardian was faster
        return
    listener.listen(1024)
    if os.fork():  # the caller waits only for this process: from here on ranks can connect
        return
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    Guardian(listener, int(launcher), int(started), float(linger_s)).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
