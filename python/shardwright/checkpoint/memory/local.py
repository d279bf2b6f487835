"""LocalTier: steps on the hosts' own disks, where a save is durable before its copy to the directory is.

A step is an image for each host, as in memory (image.py), in a file of a folder that each host has for itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from ..._engine import CheckpointError, CheckpointFolder
from ...options.places import absolute_path
from ..folder.partial import make_folder
from ..peers import Peers, in_words
from .budget import SLOTS, Need, in_gib
from .image import Image, Table
from .ranges import in_blocks, on_hosts
from .restoring import WHOLE
from .tier import MemoryTier, job_of

_logger = logging.getLogger("shardwright")
_SUFFIX, _HOST_MARK = ".image", ".host-"
#: file of the checkpoint directory: its job, and the newest step that came to the hosts' disks. Nothing else tells that a host
#: which was replaced has a step that the directory could not take
NEWEST = "local.step"
_ROUND_S = 0.5


def checked_folder(local: str | os.PathLike[str], directory: str) -> str:
    """Return `local` as an absolute path, and make the folder. Raise ValueError unless it is one outside of `directory`."""
    found = absolute_path("local", local)
    real, shared = os.path.realpath(found), os.path.realpath(directory)
    if os.path.commonpath([real, shared]) == shared:
        raise ValueError(
            f"local must be a folder outside of the directory '{directory}', which saves go to, got '{found}'"
        )
    try:
        CheckpointFolder.make(found)
        if not os.access(found, os.W_OK | os.X_OK):
            raise PermissionError("it cannot be written to")
    except (OSError, CheckpointError) as error:
        raise ValueError(f"local must be a folder of this host, got '{found}': {in_words(error)}") from None
    return found


class ImageFolder:
    """The images of one directory's steps in a folder. It answers what a guardian answers to its Client.

    The name of a file has what a guardian knows of an image: `own-0.3145728.2.image` has 3 MiB and 2 tables.
    """

    is_silent, is_alive, on_disk = False, True, True

    def __init__(self, path: str) -> None:
        self.path = path

    def ask(self, what: str, name: str = "", nbytes: int = 0, meta: Any = None) -> tuple[dict[str, Any], int]:
        """Return the answer of a guardian, and the file descriptor in it; -1 without one."""
        try:
            if what == "list":
                held = sum(512 * os.stat(os.path.join(self.path, each)).st_blocks for each in self._files().values())
                return {"names": sorted(self._files()), "nbytes": held}, -1
            file = self._files().get(name)
            if what in ("make", "drop") and file is not None:
                os.unlink(os.path.join(self.path, file))
            if what == "drop":
                return {}, -1
            if what == "make":
                return {"meta": meta}, self._make(f"{name}.{meta['data']}.{meta['tables']}{_SUFFIX}", nbytes)
            if file is None:
                raise FileNotFoundError(f"no image {name}")
            _, data, tables, _ = file.split(".")
            fd = os.open(os.path.join(self.path, file), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            return {"meta": {"data": int(data), "tables": int(tables)}}, fd
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot {what} an image in '{self.path}': {in_words(error)}") from error

    def _files(self) -> dict[str, str]:
        """Return the file of each image."""
        files = (each for each in os.listdir(self.path) if each.endswith(_SUFFIX) and each.count(".") == 3)
        return {each.partition(".")[0]: each for each in files}

    def _make(self, file: str, nbytes: int) -> int:
        path = os.path.join(self.path, file)
        fd = os.open(f"{path}.new", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, nbytes)
            os.rename(f"{path}.new", path)  # an image that has a name has its bytes
            CheckpointFolder.sync(self.path)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(f"{path}.new")
            raise
        return fd

    def remove_left_overs(self) -> None:
        """Remove what a killed start has left here beside its steps."""
        for each in os.listdir(self.path):
            if each.startswith((f"{WHOLE}.", _HOST_MARK)) or each.endswith(f"{_SUFFIX}.new"):
                os.unlink(os.path.join(self.path, each))

    def close(self, *, goodbye: bool) -> None:
        """Do nothing: images on a disk stay."""


class LocalTier(MemoryTier):
    """This rank's part of the steps in `folder`, a folder of its host's own. An impossible image turns it off, said once."""

    def __init__(self, peers: Peers, directory: str, folder: str, run: str, *, threads: int, timeout_s: float) -> None:
        self.folder = folder
        self._sync_thread: threading.Thread | None = None
        self._lost: set[int] = set()
        super().__init__(peers, directory, run, 0, threads=threads, timeout_s=timeout_s)

    def _begin(self, directory: str, run: str, replicas: int | None) -> None:
        """Make this directory's folder on each host. An error is equal on all ranks. Collective."""
        self.where, self._without = (
            f"in '{self.folder}'",
            f"saves go to '{directory}' alone, and not first to '{self.folder}'",
        )
        self._has_warned = True  # of room for a restore, which `_left` of that time decides

        def describe() -> list[Any]:
            if self._peers.rank != 0:
                return []
            self._job = job_of(directory)
            self._note(self._noted())
            CheckpointFolder.sync(directory)
            return [self._job, self._rollbacks()]

        self._job, rollbacks = on_hosts(self._peers, describe, "images on disk")[0]
        self._branch = len(rollbacks)
        host = self._peers.simulated_host
        path = os.path.join(self.folder, self._job if host is None else f"{self._job}-{host}")
        self._client = ImageFolder(path)  # type: ignore[assignment]

        def make() -> None:
            if self._is_first:
                make_folder(path)
                self._client.remove_left_overs()  # type: ignore[union-attr]

        self._first_then_others(make, "folders of images")
        if self._peers.has_hosts:
            self._look_for_hosts(path, run)

    def _noted(self) -> int:
        """Return the newest step that came to the hosts' disks, on rank 0; 0 without one."""
        with (
            contextlib.suppress(FileNotFoundError, ValueError),
            open(os.path.join(self._directory, NEWEST), "rb") as file,
        ):
            job, step = file.read(1 << 10).decode("ascii").split()
            return int(step) if job == self._job else 0
        return 0

    def _note(self, step: int) -> None:
        """Make `step` durable as the newest one. It is written in place, so a full directory takes it, too."""
        fd = os.open(
            os.path.join(self._directory, NEWEST), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        with open(fd, "wb", buffering=0) as file:
            file.write(b"%s %15d\n" % (self._job.encode(), step))
            os.fsync(fd)

    def _note_later(self, step: int) -> None:
        """Note it on rank 0. If the directory fails, the step stays durable on the hosts' disks."""
        try:
            if self._peers.rank == 0:
                self._note(step)
        except OSError as error:
            _logger.warning("'%s' cannot note step %d: %s", self._directory, step, in_words(error))

    def _look_for_hosts(self, path: str, run: str) -> None:
        """Raise CheckpointError on all ranks if hosts see one another's folders. Collective."""
        mark = f"{_HOST_MARK}{run}-"
        mine = os.path.join(path, f"{mark}{self._host}")

        def look() -> None:
            others = {each for each in os.listdir(path) if each.startswith(mark)} - {os.path.basename(mine)}
            if others:
                raise CheckpointError(
                    f"host {others.pop().removeprefix(mark)} sees the same folder '{self.folder}': local= needs a disk that "
                    "each host has for itself"
                )

        try:
            on_hosts(self._peers, lambda: open(mine, "w").close() if self._is_first else None, "marks of hosts")
            on_hosts(self._peers, look, "hosts of a folder")
        finally:
            if self._is_first:
                with contextlib.suppress(OSError):
                    os.unlink(mine)

    def _left(self) -> tuple[int, str]:
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize, f"the disk of '{self.folder}'"

    def _refusal(self, needs: Sequence[Need]) -> str:
        short = next((need for need in needs if not need.fits(0)), None)
        if short is None:
            return ""
        return (
            f"host {short.host} needs {in_gib(short.nbytes(0))} for {SLOTS} images of {in_gib(short.own)} of its ranks, and "
            f"{in_gib(short.left)} are left ({short.limit})"
        )

    # saving -----------------------------------------------------------------------------------------------------------

    def _finish(self, image: Image, table: Table) -> None:
        thread = threading.Thread(target=self._sync, args=(image, table), name="sw-local", daemon=True)
        thread.start()
        self._sync_thread = thread

    def _sync(self, image: Image, table: Table) -> None:
        """Make what this rank wrote durable, then its table."""
        try:
            os.fsync(image.fd)
            image.write(self._index, table)
            os.fsync(image.fd)
            self._note_later(table.head["step"])
        except Exception as error:
            self._failure = f"a step cannot be written to '{self.folder}': {in_words(error)}"

    @property
    def _is_syncing(self) -> bool:
        return self._sync_thread is not None and self._sync_thread.is_alive()

    def is_durable(self, is_copying: bool) -> bool:
        """Return True once the last step is durable on all hosts; False if it is not, or no rank copies it any more. Collective."""
        until = time.monotonic() + self._timeout_s
        while not self.off and self._last is not None:
            if self._is_syncing and time.monotonic() > until:
                self.wait(0)
            mine = [self._is_syncing, self._trouble(), is_copying]
            syncing, troubles, copying = zip(*self._peers.exchange(mine, "a step on the hosts' disks"))
            if any(troubles) or not all(copying):
                return False
            if not any(syncing):
                return True
            if self._sync_thread is not None:
                self._sync_thread.join(_ROUND_S)
        return False

    def wait(self, timeout_s: float | None = None) -> None:
        if self._sync_thread is not None:
            self._sync_thread.join(self._timeout_s if timeout_s is None else timeout_s)
        if self._is_syncing:
            self._failure = f"'{self.folder}' has not made a step durable in {self._timeout_s:g} s"

    def content_in(self, image: Image, content: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of CheckpointSaver.begin() that name the same bytes at their places in the image."""
        found: dict[str, Any] = {"device": None}
        at = image.address
        for part in ("shared", "own"):
            places: dict[int, int] = {}
            for _, nbytes, _, placed in [] if content[part] is None else content[part].files():
                places |= {source: at + begin for source, begin, _ in placed}
                at += in_blocks(nbytes)
            sources = content[f"{part}_sources"]
            found[f"{part}_sources"] = [
                (n, begin, size, places[n] + begin, False, False) for n, begin, size, *_ in sources
            ]
        return found

    # restoring --------------------------------------------------------------------------------------------------------

    def _pass_over(self, step: int) -> None:
        self._lost.add(step)

    def lost_after(self, step: int, listed: Sequence[int], torn: Sequence[int]) -> int | None:
        """Return the newest step after `step` that was saved here and is not `listed`, or whose copy in `torn` was cut off.

        None without one, and while an image cannot be read: what is in it may not be lost. Collective."""
        if not self._has_seen_all:
            return None
        is_first = self._peers.rank == 0
        noted = self._peers.exchange(self._noted() if is_first else 0, "the newest step on the hosts' disks")[0]
        lost = [each for each in {*self._lost, *torn, *({noted} - {*listed})} if each > step]
        if lost and self._peers.rank == 0:
            _logger.warning(
                "step %d is lost: its save ended before '%s' had it, and the hosts that are here do not have it whole in '%s'; "
                "restore() goes on from step %d",
                *(max(lost), self._directory, self.folder, step),
            )
        return max(lost, default=None)

    def forget_after(self, step: int) -> None:
        super().forget_after(step)
        self._lost.clear()
        self._note_later(step)

    def progress(self) -> dict[str, int]:
        return {"local_step": 0 if self._last is None else self._last[1], "local_bytes": self.kept_bytes}

    def close(self, *, goodbye: bool) -> None:
        if self._sync_thread is not None:
            self._sync_thread.join(self._timeout_s)
        super().close(goodbye=goodbye)
