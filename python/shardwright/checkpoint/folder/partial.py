"""Partial folders: the locked file LOCK in each distinguishes a running save from a dead one.

The kernel releases the lock when the process ends, also over NFS. The function sw.save() has no lock on the directory,
so it removes a partial folder only if the name has a nonce of this package and no process holds the lock.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import tempfile
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from ..._engine import CheckpointError, CheckpointFolder

logger = logging.getLogger("shardwright")

_T = TypeVar("_T")
LOCK = "LOCK"
#: lock a file for one file descriptor; return False if another open file holds the lock
lock_file = CheckpointFolder.lock
#: folder name, nonce of Writer or StorageWriter, and kind
_OF_A_SAVE = re.compile(r"(.+)\.(?:[0-9a-f]{24}n[0-9a-z]{1,13}|d[0-9a-f]{24})\.(partial|trash)\Z", re.DOTALL)
#: seconds after which a folder without LOCK is an orphan, by the clocks of this host and the file system. A running save has
#: no LOCK just after it made the folder and just before it commits; earlier releases made none
_ORPHAN_S = 3600.0
#: name of the file through which hosts exchange progress of a save to a path
_BOARD = re.compile(r"(.+)\.[0-9a-f]{24}\.board\Z", re.DOTALL)
_OF_DCP = re.compile(r".+\.d[0-9a-f]{24}\.partial\Z", re.DOTALL)
#: errors of a file system without locks: Lustre without -o flock, NFS without lockd, some FUSE
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
#: types of file systems whose files end before the disks of a machine do
_SHORT_LIVED = {
    "overlay": "is an overlay, whose files end with their container: mount a volume",
    **dict.fromkeys(("tmpfs", "ramfs"), "lies in memory, whose files end with the machine"),
}
#: file systems, by device, whose limits are logged or that have none
_known: set[int] = set()


def make_folder(folder: str) -> None:
    """Make a folder for checkpoints, durably, and log once for each file system which promises it cannot keep."""
    CheckpointFolder.make(folder)
    device = os.stat(folder or ".").st_dev
    if device in _known:
        return
    _known.add(device)
    short_lived = _SHORT_LIVED.get(type_of(device))
    lacks = [short_lived] if short_lived else []
    with contextlib.suppress(OSError):  # a folder that cannot be written or read fails where it is used
        with tempfile.TemporaryFile(dir=folder or ".") as file:
            try:
                lock_file(file.fileno(), folder)
            except CheckpointError as error:
                if error.errno in NO_LOCKS:
                    lacks.append(
                        f"has no locks ({os.strerror(error.errno)}): a second program that writes to the same checkpoints is not "
                        "noticed, and remains of a killed sw.save() stay"
                    )
        fd = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        except OSError as error:
            lacks.append(
                f"cannot fsync a folder ({error.strerror}): after a power cut the newest checkpoint's name may be lost"
            )
        finally:
            os.close(fd)
    if lacks:
        logger.warning("the file system of '%s' %s", folder, ", and ".join(lacks))


def type_of(device: int) -> str:
    """Return the type of a mounted file system, such as "tmpfs"; "" if it is not known, as for a subvolume of btrfs."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        for line in file:  # number, parent, device, root, place, options, optional fields, "-", type, ...
            mount, _, source = line.partition(" - ")
            if mount.split(" ")[2] == number:
                return source.split(" ")[0]
    return ""


#: return whether the save that writes to a folder runs; None without a LOCK, or on a file system without locks
is_alive = CheckpointFolder.is_alive


def is_abandoned(folder: str, nonce: str) -> bool:
    """Return whether rank 0 of a save to `folder` has died: the save's LOCK is there, and has no holder."""
    looks = [is_alive(path) for path in (f"{folder}.{nonce}.partial", folder)]
    return False in looks and True not in looks


def of_saves(directory: str, name: str | None = None) -> list[str]:
    """Return the folders that dead saves left in `directory`, only those of `name` if given; [] if listing fails."""
    found: list[str] = []
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(directory)
    for each in names:
        match = _OF_A_SAVE.match(each)
        path = os.path.join(directory, each)
        if match and name in (None, match[1]) and os.path.isdir(path) and not os.path.islink(path):
            if match[2] == "trash" or _is_dead(path):
                found.append(path)
        board = _BOARD.match(each)
        if board and name in (None, board[1]) and os.path.isfile(path) and _is_old(path):
            found.append(path)
    return sorted(found)


def closed_in_children(close: Callable[[_T], None]) -> weakref.WeakSet[_T]:
    """Return a set on whose members close() is called in each forked child, so that what it inherits does not outlive the parent."""
    members: weakref.WeakSet[_T] = weakref.WeakSet()

    def close_all() -> None:
        for each in list(members):
            close(each)

    os.register_at_fork(after_in_child=close_all)
    return members


def is_left(partial: str) -> bool:
    """Return whether no process writes to `partial`. The caller holds the directory's lock, so no Checkpointer does."""
    return _is_dead(partial) if _OF_DCP.match(partial) else is_alive(partial) is not True


def _is_dead(partial: str) -> bool:
    alive = is_alive(partial)
    if alive is not None:
        return not alive
    return not os.path.lexists(os.path.join(partial, LOCK)) and _is_old(partial)


def _is_old(path: str) -> bool:
    try:
        return time.time() - os.lstat(path).st_mtime > _ORPHAN_S
    except OSError:
        return False
