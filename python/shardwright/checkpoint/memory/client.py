"""Client: a rank's connection to its host's guardian, which it starts if none runs."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ..._engine import CheckpointError
from ..folder.partial import closed_in_children
from .guardian import MESSAGE_BYTES, fields_of, peer_uid

#: seconds that a guardian waits for the job to restart after its last rank ended without goodbye
LINGER_S = 600.0
_STARTS = 3  # tries: a guardian that is about to end still holds the name
ANSWER_S = 20.0
_PROGRAM = str(Path(__file__).with_name("guardian.py"))


def ancestors() -> list[tuple[int, int]]:
    """Return (pid, start) of this process and of its visible ancestors."""
    found: list[tuple[int, int]] = []
    pid = os.getpid()
    while pid > 0 and (fields := fields_of(pid)) and len(found) < 64:
        found.append((pid, int(fields[19])))
        pid = int(fields[1])
    return found


def launcher_of(chains: list[list[tuple[int, int]]], session: int) -> tuple[int, int]:
    """Return (pid, start) of the process that started a host's ranks: the nearest common ancestor.

    For a single rank, the session's leader if that is an ancestor: a wrapper between them, such as `timeout`, ends with the rank.
    """
    shared = set(chains[0][1:]).intersection(*chains[1:])
    leaders = [each for each in shared if each[0] == session and len(chains) == 1]
    found = next(iter(leaders), next((each for each in chains[0][1:] if each in shared), None))
    if found is None:
        raise CheckpointError("no process is above the ranks of this host, with which a guardian could end")
    return found


def name_of(job: str, place: int | None) -> str:
    """Return the abstract name of this host's guardian of a job. `place`: the number of a simulated host."""
    namespace = 0
    with contextlib.suppress(OSError):
        namespace = os.stat("/proc/self/ns/pid").st_ino  # of two containers that share a network
    return f"shardwright-memory-{os.geteuid()}-{job}-{namespace}" + ("" if place is None else f"-{place}")


class Silent(CheckpointError):
    """An error for a guardian that exists but does not answer."""


class Client:
    """A connection to a guardian of the same user. `run` identifies this start of the job. `is_silent`: an answer was too late."""

    on_disk = False

    def __init__(self, name: str, run: str, answer_s: float = ANSWER_S) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asking = threading.Lock()  # threads that receive images of other hosts also ask
        self.is_silent = False
        try:
            self._socket.settimeout(answer_s)
            self._socket.connect(f"\0{name}")
            uid = peer_uid(self._socket)
            if uid != os.geteuid():
                raise CheckpointError(f"a process of user {uid} answers in place of this host's guardian")
        except OSError as error:
            self._socket.close()
            raise CheckpointError(f"this host's guardian does not answer: {error.strerror or error}") from error
        except BaseException:
            self._socket.close()
            raise
        _open.add(self)
        self.ask("hello", run)

    @classmethod
    def start(
        cls, name: str, run: str, launcher: tuple[int, int], linger_s: float | None = None, answer_s: float = ANSWER_S
    ) -> Client:
        """Return a connection to the guardian with this name. Start it if none runs; takes about 2 * answer_s at most."""
        options = ["-I", "-S", _PROGRAM, name, *map(str, launcher), str(linger_s or LINGER_S)]
        until = time.monotonic() + 2 * answer_s
        starts = 0
        while True:
            try:
                made = cls(name, run, min(answer_s, max(until - time.monotonic(), 0.001)))
                made._socket.settimeout(answer_s)
                return made
            except CheckpointError as error:  # no other guardian can take the name of one that is silent
                if isinstance(error, Silent) or starts == _STARTS or time.monotonic() >= until:
                    raise
            starts += 1
            try:
                subprocess.run(
                    [sys.executable or "python3", *options], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    start_new_session=True, timeout=max(until - time.monotonic(), 0.001), check=True,
                )  # fmt: skip
            except (OSError, subprocess.SubprocessError) as error:
                raise CheckpointError(f"the guardian cannot be started: {error}") from error

    def ask(self, what: str, name: str = "", **arguments: Any) -> tuple[dict[str, Any], int]:
        """Return the guardian's answer and the file descriptor in it, which the caller closes; -1 without one."""
        with self._asking:
            if self.is_silent:  # set while this thread waited: the next message may answer an earlier request
                raise Silent("this host's guardian does not answer")
            try:
                self._socket.sendall(json.dumps({"what": what, "name": name, **arguments}).encode())
                message, passed, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 1)
            except BaseException as error:
                self.is_silent = True  # a late answer would be mistaken for that to the next request
                self._socket.close()
                if not isinstance(error, OSError):
                    raise
                kind = Silent if isinstance(error, TimeoutError) else CheckpointError
                raise kind(f"this host's guardian does not answer: {error.strerror or error}") from error
        if not message:
            raise CheckpointError("this host's guardian has ended")
        answer = json.loads(message)
        if "error" in answer:
            raise CheckpointError(f"this host's guardian cannot {what} an image: {answer['error']}")
        for fd in passed:
            os.set_inheritable(fd, False)
        if what in ("make", "open") and not passed:  # the kernel drops a descriptor if the process has too many
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise CheckpointError(
                f"an image of a step cannot be opened: this process may open {most} files (ulimit -n), and has them"
            )
        return answer, passed[0] if passed else -1

    @property
    def is_alive(self) -> bool:
        """Return False once the guardian has ended or the connection is closed. It sends nothing between two calls."""
        if not self._asking.acquire(blocking=False):  # a readable message is an answer to another thread
            return True
        try:
            fd = self._socket.fileno()
            if self.is_silent or fd < 0:
                return False
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            return not poll.poll(0)
        finally:
            self._asking.release()

    def _hang_up(self) -> None:
        self._socket.close()

    def close(self, *, goodbye: bool) -> None:
        """Disconnect. After a `goodbye` of every rank of a start, the guardian ends and frees the images."""
        if goodbye:
            with contextlib.suppress(CheckpointError):
                self.ask("bye")
        self._socket.close()


#: an inherited connection would make the rank look alive to the guardian
_open = closed_in_children(Client._hang_up)
