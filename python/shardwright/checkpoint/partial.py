"""Folders that are being written, and what tells them from those of saves that died: a locked file, LOCK, in each.

The kernel lets go of the lock when the process ends, over NFS too. A save to a path of its own has no lock on the directory, and so
removes what lies there by its name alone: a nonce as this package makes them, and a lock without a holder.
"""

from __future__ import annotations

import os
import re
import time

from .._engine import CheckpointFolder

LOCK = "LOCK"
#: for this descriptor alone: False where another open file has the lock
lock_file = CheckpointFolder.lock
#: a name, and the nonces of Writer and of StorageWriter
_OF_A_SAVE = re.compile(r"(.+)\.(?:[0-9a-f]{24}n[0-9a-z]{1,13}|d[0-9a-f]{24})\.(partial|trash)\Z", re.DOTALL)
#: seconds after which a folder without LOCK is an orphan: one of an earlier release, or whose save is just about to make the file, or
#: to commit; by the clocks of this host and of the file system
_ORPHAN_S = 3600.0
#: of a save to a path over several hosts; it is written to when a host has news
_BOARD = re.compile(r"(.+)\.[0-9a-f]{24}\.board\Z", re.DOTALL)
_OF_DCP = re.compile(r".+\.d[0-9a-f]{24}\.partial\Z", re.DOTALL)


class PartialLock:
    """Made in a new folder that is being written; ends with release(), or with the process and its forked children."""

    def __init__(self, partial: str) -> None:
        self._partial = partial
        self._fd = CheckpointFolder.lock_partial(partial)

    def release(self, folder: str | None = None) -> None:
        """The file goes, and the lock. Idempotent. `folder`: what the new folder has become."""
        if self._fd >= 0:
            CheckpointFolder.unlock_partial(folder or self._partial, self._fd)
            self._fd = -1


#: of a folder that is being written: None if it has no file to lock, or the file system no locks
is_alive = CheckpointFolder.is_alive


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
        board = _BOARD.match(each)
        if board and name in (None, board[1]) and os.path.isfile(path) and _is_old(path):
            found.append(path)
    return sorted(found)


def is_left(partial: str) -> bool:
    """Return whether no process writes to `partial` any more. The caller holds the lock on its directory, so no Checkpointer does."""
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
