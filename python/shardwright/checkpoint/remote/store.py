"""Store: the checkpoints below one address. A folder with MANIFEST.json, written last and removed first, is a
checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import posixpath
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ..._engine import CheckpointError, CheckpointFolder, CheckpointPlan
from ...options.places import cache_folder, is_writable
from ..folder.retention import Kept, discard
from ..peers import Peers

MANIFEST = "MANIFEST.json"
_STEP = re.compile(r"step-(\d{6,15})\Z")
#: file with the nonce of the save that is being uploaded
_MARKER = "UPLOADING"
_ROUND_S = 0.5
_NO_FILE = (FileNotFoundError, NotADirectoryError, KeyError)


def local_folder(address: str, chosen: str | os.PathLike[str] | None) -> str:
    """Return the local folder of an address: `chosen`, or one below the user's cache. Raise ValueError without a cache."""
    if chosen is not None:
        return os.path.abspath(os.fsdecode(chosen))
    cache = cache_folder()
    if cache is None or not is_writable(cache):
        why = "HOME and passwd name no home" if cache is None else f"this user cannot write to '{cache}'"
        raise ValueError(
            f"checkpoints at '{address}' need a local folder, and {why}: pass local_directory=, or set XDG_CACHE_HOME"
        )
    return os.path.join(cache, hashlib.sha256(address.encode("utf-8", "surrogateescape")).hexdigest()[:24])


def is_of_content(error: Exception) -> bool:
    """Return True if the checkpoint's content made a download fail, not the transfer or the disk."""
    return isinstance(error, _NO_FILE) or (isinstance(error, CheckpointError) and error.errno is None)


def on_first(peers: Peers, work: Callable[[], Any], label: str) -> Any:
    """Return the result of work() (of JSON) on rank 0; if it fails, raise CheckpointError on all ranks. Collective."""
    done: list[Any] = []  # exchanged again and again, since a transfer has no deadline

    def run() -> None:
        try:
            done.append(["", work()])
        except Exception as error:
            done.append([f"{label} failed: {error or type(error).__name__}", None])

    thread = threading.Thread(target=run, name="shardwright transfer", daemon=True) if peers.rank == 0 else None
    if thread is not None:
        thread.start()
    while True:
        if thread is not None:
            thread.join(_ROUND_S)
        answers = peers.exchange(done, label)[0]
        if answers:
            failure, value = answers[0]
            if failure:
                raise CheckpointError(failure)
            return value


class Store:
    """The checkpoints at an address, through fsspec. CheckpointError: it lacks the scheme, or a package for it."""

    def __init__(self, address: str) -> None:
        import fsspec

        self.address = address
        try:
            self._fs, self._base = fsspec.core.url_to_fs(address)
        except Exception as error:
            raise CheckpointError(f"'{address}' cannot be opened: {error or type(error).__name__}") from error

    def _path(self, *parts: str) -> str:
        return posixpath.join(self._base, *filter(None, parts))

    def _read(self, path: str) -> bytes | None:
        try:
            found: bytes = self._fs.cat_file(path)
        except _NO_FILE:
            return None
        return found

    def _size(self, path: str) -> int | None:
        try:
            return int(self._fs.info(path)["size"])
        except _NO_FILE:
            return None

    def manifest(self, name: str) -> Mapping[str, Any] | None:
        """Return the manifest of a checkpoint, unchecked; None if it is missing or invalid JSON."""
        text = self._read(self._path(name, MANIFEST))
        try:
            found = json.loads(text) if text is not None else None
        except ValueError:
            return None
        return found if isinstance(found, dict) and isinstance(found.get("files"), list) else None

    def checkpoints(self) -> list[Kept]:
        """Return the checkpoints of steps, oldest first; `path` is the name."""
        self._fs.invalidate_cache()
        try:
            paths = self._fs.ls(self._base, detail=False)
        except _NO_FILE:
            return []
        found = []
        for name in {posixpath.basename(str(path).rstrip("/")) for path in paths}:
            match = _STEP.match(name)
            manifest = match and self.manifest(name)
            if match and manifest is not None:
                found.append(Kept(int(match[1]), name, manifest.get("metric"), nonce=str(manifest.get("nonce", ""))))
        return sorted(found, key=lambda kept: kept.step)

    def upload(self, local: str, name: str) -> None:
        """Copy the checkpoint in the folder `local`. Resume an interrupted upload of the same save."""
        folder = CheckpointFolder(local)
        with open(os.path.join(local, MANIFEST), "rb") as file:
            manifest = file.read()
        self._fs.invalidate_cache()
        if self._read(self._path(name, MANIFEST)) == manifest:
            return
        marker = self._path(name, _MARKER)
        goes_on = self._read(marker) == folder.nonce.encode()
        if not goes_on:
            with contextlib.suppress(*_NO_FILE):
                self._fs.rm_file(self._path(name, MANIFEST))  # from now on the old folder is not a checkpoint
            self._fs.makedirs(self._path(name), exist_ok=True)
            self._fs.pipe_file(marker, folder.nonce.encode())
        for path, nbytes in folder.files.items():
            place = self._path(name, path)
            if not goes_on or self._size(place) != nbytes:
                self._fs.makedirs(posixpath.dirname(place), exist_ok=True)
                self._fs.put_file(os.path.join(local, path), place)
        self._fs.pipe_file(self._path(name, MANIFEST), manifest)
        self._fs.rm_file(marker)

    def download(self, name: str, local: str) -> None:
        """Copy a checkpoint to the new folder `local`, which appears when it is complete and durable."""
        manifest = self.manifest(name)
        if manifest is None:
            raise CheckpointError(f"'{self.address}' has no checkpoint{f' {name!r}' if name else ''}")
        paths = [str(each.get("path")) if isinstance(each, dict) else "" for each in manifest["files"]]
        if not all(re.fullmatch(r"(?:[A-Za-z0-9_-][\w.-]*/)?[A-Za-z0-9_-][\w.-]*", p) for p in paths):
            raise CheckpointError(f"'{self.address}': the manifest of '{name}' names files that no checkpoint has")
        partial = f"{local}.{os.urandom(12).hex()}.partial"
        CheckpointFolder.make(partial)
        try:
            for path in [*map(str, paths), MANIFEST]:
                place = os.path.join(partial, path)
                os.makedirs(os.path.dirname(place), exist_ok=True)
                self._fs.get_file(self._path(name, path), place)
                CheckpointPlan.sync(place)
            for folder, _, _ in os.walk(partial):
                CheckpointFolder.sync(folder)
            os.rename(partial, local)
            CheckpointFolder.sync(os.path.dirname(local))
        except BaseException:
            discard(partial)
            raise

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its manifest first."""
        with contextlib.suppress(*_NO_FILE):  # an interrupted removal left only files
            self._fs.rm_file(self._path(name, MANIFEST))
        with contextlib.suppress(*_NO_FILE):
            self._fs.rm(self._path(name), recursive=True)
