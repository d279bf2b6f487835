"""Folders that are being written, and what tells them from those of saves that died: a locked file, LOCK, in each.

The kernel lets go of the lock when the process ends, over NFS too. A save to a path of its own has no lock on the directory, and so
removes what lies there by its name alone: a nonce as this package makes them, and a lock without a holder.
"""

from __future__ import annotations

import contextlib
import os
import re
import time

from .._engine import CheckpointError, CheckpointFolder

LOCK = "LOCK"
#: for this descriptor alone: False where another open file has the lock
lock_file = CheckpointFolder.lock
#: a name, and the nonces of Writer and of StorageWriter
_OF_A_SAVE = re.compile(r"(.+)\.(?:[0-9a-f]{24}n[0-9a-z]{1,13}|d[0-9a-f]{24})\.(partial|trash)\Z", re.DOTALL)
#: seconds after which a folder without LOCK is an orphan: one of an earlier release, or whose save is just about to make the file, or
#: to commit; by the clocks of this host and of the file system
_ORPHAN_S = 3600.0
_OF_DCP = re.compile(r".+\.d[0-9a-f]{24}\.partial\Z", re.DOTALL)


class PartialLock:
    """Made in a new folder that is being written; ends with release(), or with the process and its forked children."""

    def __init__(self, partial: str) -> None:
        self._path = os.path.join(partial, LOCK)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(CheckpointError):  # a file system without locks: no process is told, then
            lock_file(self._fd, self._path)

    def release(self, folder: str | None = None) -> None:
        """The file goes, and the lock. Idempotent. `folder`: what the new folder has become."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._path if folder is None else os.path.join(folder, LOCK))
            os.close(self._fd)
            self._fd = -1


def is_alive(partial: str) -> bool | None:
    """Return whether the save that writes to `partial` lives; None: it has no file to lock, or the file system no locks."""
    try:
        fd = os.open(os.path.join(partial, LOCK), os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return not lock_file(fd, partial)
    except CheckpointError:
        return None
    finally:
        os.close(fd)


def of_saves(directory: str, name: str | None = None) -> list[str]:
    """Return what dead saves to paths in `directory`, or to `name` there alone, have left; nothing where it may not be listed."""
    found: list[str] = []
    try:
        names = os.listdir(directory)
    except OSError:
        return found
    for each in names:
        match = _OF_A_SAVE.match(each)
        path = os.path.join(directory, each)
        if match and name in (None, match[1]) and os.path.isdir(path) and not os.path.islink(path):
            if match[2] == "trash" or _is_dead(path):
                found.append(path)
    return sorted(found)


def is_left(partial: str) -> bool:
    """Return whether no process writes to `partial` any more. The caller holds the lock on its directory, so no Checkpointer does."""
    return _is_dead(partial) if _OF_DCP.match(partial) else is_alive(partial) is not True


def _is_dead(partial: str) -> bool:
    alive = is_alive(partial)
    if alive is not None:
        return not alive
    try:
        return not os.path.lexists(os.path.join(partial, LOCK)) and time.time() - os.stat(partial).st_mtime > _ORPHAN_S
    except OSError:
        return False
