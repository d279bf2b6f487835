"""Directory: the local directory of a Checkpointer's checkpoints, with its lock and its uploads to an address."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..._engine import CheckpointError, CheckpointFolder
from ..peers import Peers, in_words, os_error, told
from ..remote.mirror import Mirror
from ..remote.store import Store, is_of_content, on_first
from ..writing import Target, new_nonce
from . import retention
from .partial import make_folder
from .retention import REPLACED, DirectoryLock, Kept, Known, list_checkpoints

logger = logging.getLogger("shardwright")
_ROUND_S = 0.5


class Directory:
    """The directory of one Checkpointer. Rank 0 locks it, lists it and uploads from it. `rules`: arguments of to_retire().

    `nonce` is equal on all ranks and unique to this object. `read_only`: the reason why saves are impossible, or "".
    """

    def __init__(self, peers: Peers, path: str, address: str | None, rules: Mapping[str, Any]) -> None:
        self._peers, self.path, self._address, self._rules = peers, path, address, rules
        self.mirror: Mirror | None = None  # on rank 0, after open_mirror()
        self.rejected: set[str] = set()  # on rank 0: nonces of checkpoints that restore() found damaged
        self._warned: set[str] = set()
        self._known: Known = {}
        self._lock: DirectoryLock | None = None
        try:
            answers = peers.first(self._take, f"Checkpointer for {path}")
        except BaseException:  # the error holds this object, and with it the lock
            self.close()
            raise
        self.nonce, self.read_only = str(answers[0]), str(answers[1])

    def _take(self) -> list[str]:
        """Create and lock the directory. Return a nonce, and the reason why it cannot be written to if it can be read."""
        is_made = False
        try:
            make_folder(self.path)
            is_made = True
            self._lock = DirectoryLock(self.path)
        except Exception as error:
            code = getattr(error, "errno", None)
            if isinstance(error, CheckpointError) and (is_made or code is None):  # it names the lock, or its holder
                raise
            why = os.strerror(code) if code is not None else in_words(error)
            refusal = f"'{self.path}' cannot be written to: {why}"
            if code not in (errno.EACCES, errno.EPERM, errno.EROFS) or not os.path.isdir(self.path):
                raise os_error(refusal, code) from error
            return [new_nonce(), refusal]
        return [new_nonce(), ""]

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
            answers = ("", True) if self.mirror is None else self.mirror.wait(_ROUND_S)
            failure, is_done = self._peers.exchange(answers, f"upload to {self._address}")[0]
            if failure:
                raise CheckpointError(f"{failure}; the checkpoints are in '{self.path}'")

    def target(self, step: int, metric: float | None) -> Target:
        """Return the folder of a save. Raise CheckpointError on rank 0 if the directory cannot be read."""
        folder = os.path.join(self.path, f"step-{step:06d}")
        if self._peers.rank:
            return Target(folder)
        with told(f"'{self.path}' cannot be read"):
            replaces = CheckpointFolder.identity(folder)  # sw.save() and dcp do not take the directory's lock
            retired = self._to_retire(Kept(step, folder, metric))
            return Target(folder, replaces, retention.left_overs(self.path), retired)

    def _to_retire(self, new: Kept) -> list[str]:
        """Return the paths to remove once `new` is durable."""
        same = (new.path, new.path + REPLACED)  # the commit replaces these
        has_rules = any(self._rules[name] for name in ("keep_last", "keep_every", "keep_best"))
        kept = retention.removable_ones(list_checkpoints(self.path, look=has_rules, known=self._known))
        self._known = {k.path: self._known[k.path] for k in kept if k.path in self._known}
        kept = [dataclasses.replace(k, state=retention.DAMAGED) if k.nonce in self.rejected else k for k in kept]
        kept = [k for k in kept if k.step <= new.step]  # a rollback keeps later steps
        goes = retention.to_retire([*(k for k in kept if k.path not in same), new], **self._rules)
        # remove replaced folders first: without its successor, a replaced folder counts as a checkpoint again
        paths = [path for path in retention.replaced_ones(self.path) if path not in same]
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

    def list(self, *, is_preference: bool = False) -> list[tuple[int, str]]:
        """Return rank 0's list of (step, path) of folders with a manifest: oldest first, or in order of preference, best last."""

        def look() -> list[tuple[int, str]]:
            if self._address is not None and self.mirror is None:
                raise CheckpointError(
                    f"{self.read_only}; checkpoints of '{self._address}' are copied there: name another local_directory"
                )
            with told(f"'{self.path}' cannot be read"):
                found = list_checkpoints(self.path)
                found = found if self.mirror is None else self.mirror.listed(found)
                found = retention.in_order(self.path, found) if is_preference else found
            return [(kept.step, kept.path) for kept in found]

        listed = self._peers.first(look, f"checkpoints in {self.path}")
        return [(step, path) for step, path in listed]

    def fetch(self, path: str) -> str:
        """Download a checkpoint that only the address has. Return "" or what is damaged; raise on a failed transfer. Collective."""

        def download() -> str:
            try:
                if self.mirror is not None:
                    self.mirror.fetch(path)
            except Exception as error:
                if not is_of_content(error):
                    raise
                return f"download from {self._address} failed: {in_words(error)}"
            return ""

        return "" if self._address is None else str(on_first(self._peers, download, f"download from {self._address}"))

    def torn(self) -> Sequence[int]:
        """Return the steps whose saves were cut off, and not done again. Collective."""

        def look() -> Sequence[int]:
            with told(f"'{self.path}' cannot be read"):
                return retention.torn_steps(self.path)

        steps: Sequence[int] = self._peers.first(look, f"saves cut off in {self.path}")
        return steps

    def go_on_from(self, chosen: Kept) -> None:
        """Mark later checkpoints as abandoned, if the directory is writable. Collective."""

        def note() -> None:
            if self._lock is None:
                return
            with told(f"step {chosen.step} was restored, but later checkpoints could not be noted as abandoned"):
                retention.go_on_from(self.path, chosen, () if self.mirror is None else self.mirror.remote_only)

        self._peers.first(note, f"rollback to step {chosen.step}")

    def reject(self, path: str) -> None:
        """Record that some rank found `path` damaged: retention no longer counts it."""
        if self._peers.rank == 0:
            with contextlib.suppress(CheckpointError, OSError, MemoryError):  # retention detects a bad manifest itself
                self.rejected.add(CheckpointFolder(path).nonce)
