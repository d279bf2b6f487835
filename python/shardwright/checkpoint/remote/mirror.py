"""Mirror: a thread that copies the checkpoints of a local directory to a store, newest first."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

from ..._engine import CheckpointError, CheckpointFolder
from ..folder.retention import SOUND, Kept, discard, list_checkpoints, to_retire
from .store import MANIFEST, Store

logger = logging.getLogger("shardwright")
_POLL_S, _ROUND_S = 0.2, 0.5
#: pauses between retries of an upload
_PAUSES_S = (1.0, 2.0, 4.0, 8.0)
#: folder of hard links, which keep the files of an upload if retention removes their checkpoint
_LINKS = ".upload"
#: errors of a file system without hard links, and of a checkpoint behind a symbolic link to another one
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK, errno.EINVAL)


class Mirror:
    """The copies of a directory's `step-*` folders, including earlier ones, in a store. `rules`: arguments of to_retire() there."""

    def __init__(self, store: Store, directory: str, rules: Mapping[str, Any]) -> None:
        self._store, self._directory, self._rules = store, directory, rules
        self._changed = threading.Condition()
        self._asked = self._answered = 0
        self._failure = ""
        self._closing = False
        self.remote_only: list[Kept] = []  # at the last call of listed()
        self._copied: set[str] | None = None  # nonces in the store; None: not yet listed
        discard(os.path.join(directory, _LINKS))
        self._thread = threading.Thread(target=self._run, name="shardwright upload", daemon=True)
        self._thread.start()

    def listed(self, local: list[Kept]) -> list[Kept]:
        """Return local checkpoints, plus the store's of other steps under local paths, oldest first."""
        steps = {kept.step for kept in local}
        remote = (kept for kept in self._store.checkpoints() if kept.step not in steps)
        self.remote_only = [dataclasses.replace(k, path=os.path.join(self._directory, k.path)) for k in remote]
        return sorted([*self.remote_only, *local], key=lambda kept: (kept.step, kept.path))

    def fetch(self, path: str) -> None:
        """Download the checkpoint of this local path, unless it exists locally."""
        if not os.path.lexists(path):
            self._store.download(os.path.basename(path), path)

    def wait(self, timeout_s: float) -> tuple[str, bool]:
        """Wait until all checkpoints are copied, at most `timeout_s`. Return (failure, is done); a failure is returned once."""
        with self._changed:
            if not self._asked > self._answered:
                self._asked += 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._answered >= self._asked or self._failure, timeout_s)
            failure, self._failure = self._failure, ""
            return failure, self._answered >= self._asked

    def close(self) -> None:
        """End the thread after its current upload."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        seen: set[tuple[str, int]] | None = None  # the folders of the last upload without a failure
        while True:
            with self._changed:
                asked = self._asked
                if self._closing:
                    return
            now = self._names()
            failure = "" if now == seen and asked == self._answered else self._copy_all()
            seen = None if failure else now
            with self._changed:
                self._failure = failure  # a success clears an older failure: nothing is missing any more
                if now == self._names():
                    self._answered = max(self._answered, asked)
                self._changed.notify_all()
                pause = 5.0 if failure else _POLL_S
                self._changed.wait_for(lambda: self._closing or self._asked > self._answered, pause)

    def _names(self) -> set[tuple[str, int]]:
        """Return the folders with their manifests' inodes, which change with each save."""
        found = set()
        with contextlib.suppress(OSError):
            for each in os.scandir(self._directory):
                with contextlib.suppress(OSError):
                    if each.name.startswith("step-"):
                        found.add((each.name, os.stat(os.path.join(each.path, MANIFEST)).st_ino))
        return found

    def _copy_all(self) -> str:
        """Copy checkpoints that the store lacks, newest first. Return the reason of a failure, or ""."""
        failure = ""
        for number, pause in enumerate((*_PAUSES_S, 0.0)):
            try:
                self._copy_each()
                return ""
            except Exception as error:
                failure = f"upload to '{self._store.address}' failed: {error or type(error).__name__}"
                logger.warning("%s (try %d)", failure, number + 1)
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, pause):
                    break
        return failure

    def _copy_each(self) -> None:
        if self._copied is None:
            self._copied = {kept.nonce for kept in self._store.checkpoints()}
        kept = [k for k in list_checkpoints(self._directory, look=True) if k.state == SOUND]
        for each in reversed(kept):
            if each.nonce not in self._copied and not self._closing:
                links = self._linked(each)
                if links is None:
                    continue
                try:
                    self._store.upload(links, os.path.basename(each.path))
                finally:
                    if links != each.path:
                        discard(links)
                self._copied.add(each.nonce)
                self._retire(each)

    def _linked(self, kept: Kept) -> str | None:
        """Return a folder of links to a checkpoint's files; its own path if links are refused; None if retention removed it."""
        links = os.path.join(self._directory, _LINKS, f"{os.path.basename(kept.path)}.{kept.nonce}")
        discard(links)
        try:
            for path in [*CheckpointFolder(kept.path).files, MANIFEST]:
                os.makedirs(os.path.dirname(os.path.join(links, path)), exist_ok=True)
                os.link(os.path.join(kept.path, path), os.path.join(links, path))
        except (OSError, CheckpointError) as error:
            discard(links)
            if isinstance(error, (FileNotFoundError, CheckpointError)):
                return None
            if error.errno not in _NO_LINKS:
                raise
            return kept.path
        return links

    def _retire(self, new: Kept) -> None:
        """Remove the store's checkpoints that no rule keeps. After a rollback later steps stay."""
        there = [k for k in self._store.checkpoints() if k.step <= new.step]
        for each in to_retire(there, **self._rules):
            self._store.remove(each.path)
