"""The words of a job that goes on in place, and its processes: files in the folder of its attempts. docs/design/in_place.md has the design.

Without torch, for `shardwright rank`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import zlib
from typing import Any, NamedTuple

from .account import is_running

#: in the directory of checkpoints, the folder in which the ranks of one start meet
ATTEMPTS = ".attempts-"
#: in that folder: what rank 0 says of its job, by the number of its loop; the spares; the processes that have ended
JOB, SPARES, ENDED = "job", "spares", "ended"


class Member(NamedTuple):
    """A process of the job. `place`: equal where processes see one another's numbers."""

    pid: int
    start: int
    place: str
    host: str

    @property
    def name(self) -> str:
        """Its key on a board."""
        return f"s{self.pid}x{self.start}x{zlib.crc32(self.place.encode()):08x}"


def place() -> str:
    """Return a text that is equal for processes of one running kernel and network namespace; empty if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


def own_member() -> Member:
    """Return this process as a member."""
    with open("/proc/self/stat", "rb") as file:
        start = int(file.read().rpartition(b")")[2].split()[19])
    return Member(os.getpid(), start, f"{place()} {os.stat('/proc/self/ns/pid').st_ino}", socket.gethostname())


class Board:
    """Words in a folder, a file each, linked once. No lock is held, so a stopped rank holds up no other.

    `is_far`: other hosts speak, too. A network file system's client then shows an old list of files until it changes the folder.
    """

    def __init__(self, folder: str, is_far: bool = False) -> None:
        self._folder, self.is_far = folder, is_far
        self._said: dict[str, Any] = {}
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)

    def say(self, key: str, value: Any) -> None:
        """Say a word, unless some rank has said it."""
        path = os.path.join(self._folder, key.replace("/", "-"))
        hidden = f"{path}.{secrets.token_hex(8)}"
        with open(hidden, "w", encoding="ascii") as file:
            json.dump(value, file)
        with contextlib.suppress(FileExistsError):
            os.link(hidden, path)
        os.unlink(hidden)

    def said(self) -> dict[str, Any]:
        """Return all words so far."""
        if self.is_far:
            hidden = os.path.join(self._folder, f".{secrets.token_hex(8)}")
            open(hidden, "w").close()
            os.unlink(hidden)
        for name in os.listdir(self._folder):
            key = name.replace("-", "/")
            if "." not in name and key not in self._said:
                with open(os.path.join(self._folder, name), encoding="ascii") as file:
                    self._said[key] = json.load(file)
        return self._said


def tell_ended(folder: str) -> None:
    """Tell the processes of the job in this folder which of them have ended on this host: other hosts cannot see it."""
    told, here = Board(os.path.join(folder, ENDED)), own_member().place
    jobs, spares = (Board(os.path.join(folder, name)).said().values() for name in (JOB, SPARES))
    for each in map(Member._make, [*(member for _, members, *_ in jobs for member in members), *spares]):
        if each.place == here and each.name not in told.said() and not is_running(each.pid, each.start):
            told.say(each.name, True)
