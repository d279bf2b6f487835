"""Directory: the local directory of a Checkpointer's checkpoints, with its lock and its uploads to an address."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import logging
import os
from collections.abc import Mapping
from typing import Any

from ..._engine import CheckpointError, CheckpointFolder
from ..files import in_words
from ..peers import Peers, os_error
from ..remote.mirror import Mirror
from ..remote.store import Store, is_of_content, on_first
from ..writing import Target, new_nonce
from .partial import make_folder
from .retention import (
    DAMAGED,
    REPLACED,
    DirectoryLock,
    Kept,
    Known,
    folder_name,
    go_on_from,
    in_order,
    left_overs,
    list_checkpoints,
    removable_ones,
    replaced_ones,
    to_retire,
)

logger = logging.getLogger("shardwright")
_ROUND_S = 0.5


class Directory:
    """The directory of one Checkpointer. Rank 0 locks it, lists it and uploads from it. The constructor is collective.

    Parameters
    ----------
    peers : Peers
    path : str
        Created if it does not exist.
    address : str, optional
        The address for which `path` is the local directory.
    rules : mapping
        Arguments of to_retire().

    Attributes
    ----------
    nonce : str
        Equal on all ranks and unique to this object.
    read_only : str
        The reason why saves are impossible; "" if they are possible.
    mirror : Mirror, optional
        On rank 0, after open_mirror().
    rejected : set of str
        On rank 0: nonces of checkpoints that restore() found damaged.
    """

    def __init__(self, peers: Peers, path: str, address: str | None, rules: Mapping[str, Any]) -> None:
        self._peers, self.path, self._address, self._rules = peers, path, address, rules
        self.mirror: Mirror | None = None
        self.rejected: set[str] = set()
        self.read_only = ""
        self._warned: set[str] = set()
        self._known: Known = {}
        self._lock: DirectoryLock | None = None
        self.nonce = self._take()

    def _take(self) -> str:
        """Create and lock the directory on rank 0, and return the nonce. A failure raises on all ranks, a read-only
        directory does not."""
        refusal, code, is_readable = "", None, False
        if self._peers.rank == 0:
            try:
                self._lock = _lock_directory(self.path)
            except CheckpointError as error:
                refusal, code = str(error), error.errno
            except Exception as error:
                refusal = f"'{self.path}' cannot be written to: {in_words(error)}"
                code = getattr(error, "errno", None)
                is_readable = code in (errno.EACCES, errno.EPERM, errno.EROFS) and os.path.isdir(self.path)
        told = [refusal, code, is_readable, new_nonce()]
        refusal, code, is_readable, nonce = self._peers.exchange(told, f"Checkpointer for {self.path}")[0]
        if is_readable:
            self.read_only = refusal
        elif refusal:
            self.close()
            raise os_error(refusal, code)
        return str(nonce)

    def open_mirror(self) -> None:
        """Begin to upload, on rank 0. Collective."""

        def begin() -> None:
            if self._address is not None and self._peers.rank == 0 and not self.read_only:
                self.mirror = Mirror(Store(self._address), self.path, self._rules)

        self._peers.together(begin, f"opening {self._address}")

    def close(self) -> None:
        """End the uploads and release the lock. Idempotent."""
        try:
            if self.mirror is not None:
                self.mirror.close()
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def upload(self) -> None:
        """Wait until all checkpoints are uploaded. Collective. Raise CheckpointError on every rank if rank 0 cannot upload."""
        is_done = self._address is None
        while not is_done:
            told = ("", True) if self.mirror is None else self.mirror.wait(_ROUND_S)
            failure, is_done = self._peers.exchange(told, f"upload to {self._address}")[0]
            if failure:
                raise CheckpointError(f"{failure}; the checkpoints are in '{self.path}'")

    # replacing and removing --------------------------------------------------------------------------------

    def target(self, step: int, metric: float | None) -> Target:
        """Return the folder of a save. Raise CheckpointError on rank 0 if the directory cannot be read."""
        folder = os.path.join(self.path, folder_name(step))
        if self._peers.rank:
            return Target(folder)
        try:
            replaces = CheckpointFolder.identity(folder)  # sw.save() and dcp need no lock on the directory
            return Target(folder, replaces, left_overs(self.path), self._to_retire(Kept(step, folder, metric)))
        except Exception as error:
            refusal = f"'{self.path}' cannot be read: {in_words(error)}"
            raise os_error(refusal, getattr(error, "errno", None)) from error

    def _to_retire(self, new: Kept) -> list[str]:
        """Return the paths to remove once `new` is durable."""
        same = (new.path, new.path + REPLACED)  # the commit replaces these
        has_rules = any(self._rules[name] for name in ("keep_last", "keep_every", "keep_best"))
        kept = removable_ones(list_checkpoints(self.path, look=has_rules, known=self._known))
        self._known = {k.path: self._known[k.path] for k in kept if k.path in self._known}
        kept = [dataclasses.replace(k, state=DAMAGED) if k.nonce in self.rejected else k for k in kept]
        kept = [k for k in kept if k.step <= new.step]  # a rollback keeps later steps
        goes = to_retire([*(k for k in kept if k.path not in same), new], **self._rules)
        # remove replaced folders first: without its successor, a replaced folder counts as a checkpoint again
        paths = [path for path in replaced_ones(self.path) if path not in same]
        paths += [k.path for k in goes if k.path != new.path]
        return [path for path in paths if self._is_removable(path)]

    def _is_removable(self, path: str) -> bool:
        try:
            CheckpointFolder.check_removable(path)
        except CheckpointError as error:
            if path not in self._warned:
                self._warned.add(path)
                logger.warning("retention cannot remove a checkpoint: %s", error)
            return False
        return True

    # candidates of a restore -------------------------------------------------------------------------------------------

    def list(self, *, is_preference: bool = False) -> list[tuple[int, str]]:
        """Return rank 0's list of (step, path) of folders with a manifest: oldest first, or in order of preference, best last."""
        listed: list[tuple[int, str]] = []
        refusal, code = "", None
        if self._address is not None and self._peers.rank == 0 and self.mirror is None:
            refusal = (
                f"{self.read_only}; checkpoints of '{self._address}' are copied there: name another local_directory"
            )
        elif self._peers.rank == 0:
            try:
                found = list_checkpoints(self.path)
                found = found if self.mirror is None else self.mirror.listed(found)
                found = in_order(self.path, found) if is_preference else found
                listed = [(kept.step, kept.path) for kept in found]
            except Exception as error:
                refusal = f"'{self.path}' cannot be read: {in_words(error)}"
                code = getattr(error, "errno", None)
        listed, refusal, code = self._peers.exchange([listed, refusal, code], f"checkpoints in {self.path}")[0]
        if refusal:
            raise os_error(refusal, code)
        return [(step, path) for step, path in listed]

    def fetch(self, path: str) -> str:
        """Download a checkpoint that only the address has. Return, equal on all ranks, "" or what is missing or
        damaged. Collective.

        Raises
        ------
        CheckpointError
            On every rank: the transfer failed. The checkpoint itself may be sound.
        """
        if self._address is None:
            return ""
        return str(on_first(self._peers, functools.partial(self._download, path), f"download from {self._address}"))

    def _download(self, path: str) -> str:
        """Download the checkpoint on rank 0. Return "" or what is missing or damaged; raise if the transfer fails."""
        try:
            if self.mirror is not None:
                self.mirror.fetch(path)
        except Exception as error:
            if not is_of_content(error):
                raise
            return f"download from {self._address} failed: {in_words(error)}"
        return ""

    def go_on_from(self, chosen: Kept) -> None:
        """Mark later checkpoints as abandoned, if the directory is writable. Collective."""

        def note() -> None:
            if self._peers.rank == 0 and self._lock is not None:
                try:
                    go_on_from(self.path, chosen, () if self.mirror is None else self.mirror.remote_only)
                except Exception as error:
                    why = f"step {chosen.step} was restored, but later checkpoints could not be noted as abandoned"
                    raise os_error(f"{why}: {in_words(error)}", getattr(error, "errno", None)) from error

        self._peers.together(note, f"rollback to step {chosen.step}")

    def reject(self, path: str) -> None:
        """Record that some rank found `path` damaged: retention no longer counts it."""
        if self._peers.rank == 0:
            with contextlib.suppress(CheckpointError, OSError, MemoryError):  # retention detects a bad manifest itself
                self.rejected.add(CheckpointFolder(path).nonce)


def _lock_directory(directory: str) -> DirectoryLock:
    try:
        make_folder(directory)
    except CheckpointError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno)) from None
    return DirectoryLock(directory)
