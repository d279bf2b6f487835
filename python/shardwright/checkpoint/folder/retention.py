"""Retention: list the folders of a checkpoint directory and choose the ones to remove. Runs on rank 0 alone."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..._engine import CheckpointError, CheckpointFolder, NewerCheckpointError
from .partial import NO_LOCKS, closed_in_children, is_left, lock_file, of_saves

logger = logging.getLogger("shardwright")
_STEP = re.compile(r"step-(\d{6,15})(\.replaced)?\Z")
_LEFT_OVER = re.compile(r"step-\d{6,15}(\.replaced)?\.[0-9a-z]{1,64}\.(partial|trash)\Z")
#: suffix of a folder while it is replaced, on file systems that cannot exchange two names (docs/format.md)
REPLACED = ".replaced"
#: errors of a damaged manifest, or of another object in its place; any other error may be transient
_NOT_A_MANIFEST = (None, errno.ELOOP, errno.ENOENT, errno.ENOTDIR, errno.ENXIO)
#: seconds for which the threads of a killed process may hold its lock
_ENDING_S = 10.0
BOARD = ".board"  # never removed, like .lock, because a slower rank may still read the last verdict
STEP_LIMIT = 10**15  # a folder's number has at most 15 digits
#: file with the nonces that a rollback abandoned. After restore(step=2), training continues from step 2 while
#: step-000005 of the abandoned history still exists; a restore() after a crash must not prefer it. It lists all rollbacks,
#: too: a step in the memory of a host that is away has no folder
BRANCH = ".branch"
_BRANCH_BYTES = 1 << 20


#: states of a checkpoint. SOUND: manifest and file sizes are valid, or were not read. UNKNOWN: a transient error, or a
#: newer version wrote it
SOUND, DAMAGED, UNKNOWN = "sound", "damaged", "unknown"
#: sound, but abandoned by a rollback: no rule counts it, and it is removed like a damaged one
ABANDONED = "abandoned"


@dataclasses.dataclass(frozen=True)
class Kept:
    """A folder with a manifest."""

    step: int
    path: str
    metric: float | None = None
    state: str = SOUND
    nonce: str = ""


#: path -> (names, sizes and times in a sound folder, content of its manifest)
Known = dict[str, tuple[list[tuple[Any, ...]], tuple[float | None, str, str]]]


def list_checkpoints(directory: str, *, look: bool = False, known: Known | None = None) -> list[Kept]:
    """Return the folders, or links to them, that have a manifest, oldest first; with `look`, with the content of their manifests.

    `known`: results of earlier calls. A folder with unchanged files is not opened again."""
    found = []
    left = branch_of(directory).abandoned if look else set()
    for name in {name.removesuffix(REPLACED) for name in os.listdir(directory) if _STEP.match(name)}:
        path = CheckpointFolder.find(os.path.join(directory, name))
        if path is None:
            path = os.path.join(directory, name)
            if path not in _dangling and os.path.islink(path) and not os.path.exists(path):
                _dangling.add(path)
                logger.warning("'%s' is a symbolic link that leads nowhere, and is passed over", path)
        else:
            each = Kept(int(name.removeprefix("step-")), path, *(_look_again(path, known) if look else ()))
            found.append(dataclasses.replace(each, state=ABANDONED) if each.nonce in left else each)
    return sorted(found, key=lambda kept: (kept.step, kept.path))


def removable_ones(kept: Sequence[Kept]) -> list[Kept]:
    """Return the checkpoints that are no symbolic links: rules of retention count those alone."""
    return [each for each in kept if not os.path.islink(each.path)]


_dangling: set[str] = set()


def left_overs(directory: str) -> list[str]:
    """Return the remains of dead saves of steps, and folders half removed. The caller holds the directory's lock."""
    steps = [os.path.join(directory, name) for name in os.listdir(directory) if _LEFT_OVER.match(name)]
    return sorted(path for path in steps if is_left(path))


def torn_steps(directory: str) -> list[int]:
    """Return the steps of dead saves, whose folders are still partial."""
    names = (os.path.basename(path) for path in left_overs(directory) if path.endswith(".partial"))
    return [int(name.removeprefix("step-").partition(".")[0]) for name in names]


def all_left_overs(directory: str) -> list[str]:
    """Return left_overs() and the remains of dead saves to other paths in the directory."""
    return sorted({*left_overs(directory), *of_saves(directory)})


def replaced_ones(directory: str) -> list[str]:
    """Return folders under replaced names with a successor. Remove them only after its name is durable."""
    paths = [os.path.join(directory, name) for name in os.listdir(directory) if _STEP.match(name)]
    return sorted(p for p in paths if p.endswith(REPLACED) and os.path.lexists(p.removesuffix(REPLACED)))


def _look_again(path: str, known: Known | None) -> tuple[float | None, str, str]:
    """Return _look(), or the result in `known` if the folder has not changed."""
    try:
        files = [] if known is None else [*_files_of(path), *_files_of(os.path.join(path, "ranks"))]
    except OSError:
        known = None
    if known is None:
        return _look(path)
    if known.get(path, (None, None))[0] != files:
        found = _look(path)
        known.pop(path, None)
        if found[1] != SOUND:
            return found
        known[path] = files, found
    return known[path][1]


def _files_of(folder: str) -> list[tuple[Any, ...]]:
    if not os.path.isdir(folder):
        return []
    with os.scandir(folder) as entries:
        stats = [(each.name, each.stat(follow_symlinks=False)) for each in entries]
    return sorted((name, each.st_mode, each.st_ino, each.st_size, each.st_mtime_ns) for name, each in stats)


def _look(path: str) -> tuple[float | None, str, str]:
    """Return metric, state and nonce. A transient failure gives UNKNOWN, so that it does not cost a checkpoint."""
    try:  # the engine's reader refuses links, pipes and endless manifests
        folder = CheckpointFolder(path)
        return folder.metric, SOUND, folder.nonce
    except NewerCheckpointError:
        return None, UNKNOWN, ""
    except (CheckpointError, OSError, MemoryError) as error:
        is_known = isinstance(error, CheckpointError) and error.errno in _NOT_A_MANIFEST
        return None, DAMAGED if is_known else UNKNOWN, ""


def discard(path: str) -> None:
    """Remove as much as possible of a folder."""
    with contextlib.suppress(CheckpointError):
        CheckpointFolder.remove(path)


def to_retire(
    kept: Sequence[Kept], *, keep_last: int | None, keep_every: int | None, keep_best: int | None, largest: bool = False
) -> list[Kept]:
    """Return the checkpoints that no rule keeps; none if there is no rule. The newest sound one always stays.

    Rules count only sound checkpoints: the newest `keep_last`, multiples of `keep_every`, and the `keep_best` with the smallest
    metric, or the largest, newer ones first among equals. A damaged one is returned once `keep_last` sound ones (one without that
    rule) are newer, unless another rule would keep it if it were sound: the damage may be transient. An UNKNOWN one stays.
    """
    if keep_last is None and keep_every is None and keep_best is None:
        return []
    known = sorted((k for k in kept if k.state != UNKNOWN), key=lambda k: k.step, reverse=True)
    sound = [k for k in known if k.state == SOUND]
    last = sound[: keep_last or 1]
    safe = set(last)
    if keep_every:
        safe |= {k for k in known if k.step % keep_every == 0}
    for each in (sound, known) if keep_best else ():
        rated = [(-k.metric if largest else k.metric, k) for k in each if k.metric is not None]
        safe |= {k for _, k in sorted(rated, key=lambda pair: pair[0])[:keep_best]}
    if len(last) < (keep_last or 1):
        safe |= {k for k in known if k.state != SOUND}
    return [k for k in kept if k.state != UNKNOWN and k not in safe and (k.state == SOUND or k.step < last[-1].step)]


class Branch(NamedTuple):
    """The nonces of abandoned checkpoints, and the step of each rollback so far, oldest first.

    A step that was made when `rollbacks` had n entries is abandoned if a later entry is less than it."""

    abandoned: set[str]
    rollbacks: list[int]


def branch_of(directory: str) -> Branch:
    """Return what the rollbacks in a directory have noted."""
    path = os.path.join(directory, BRANCH)
    try:
        with open(path, "rb") as file:
            noted = json.loads(file.read(_BRANCH_BYTES))
        nonces = {nonce for nonce in noted["abandoned"] if isinstance(nonce, str)}
        return Branch(nonces, [int(step) for step in noted.get("rollbacks", [])])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        logger.warning("'%s' cannot be read (%s): restore() takes the newest checkpoint", path, error)
    return Branch(set(), [])


def in_order(directory: str, kept: Sequence[Kept]) -> list[Kept]:
    """Return checkpoints in restore()'s order of preference, best last. Abandoned ones are first."""
    nonces = branch_of(directory).abandoned
    if not nonces:
        return list(kept)
    left = {each.path for each in (*list_checkpoints(directory, look=True), *kept) if each.nonce in nonces}
    return sorted(kept, key=lambda each: (each.path not in left, each.step, each.path))


def go_on_from(directory: str, chosen: Kept, elsewhere: Sequence[Kept] = ()) -> None:
    """Mark checkpoints later than `chosen`, also those `elsewhere`, as abandoned, and `chosen` as not abandoned. Durable."""
    path = os.path.join(directory, BRANCH)
    listed = [*list_checkpoints(directory, look=True), *elsewhere]
    before, steps = branch_of(directory)
    after = {k.nonce for k in listed if k.nonce and (k.step > chosen.step or k.nonce in before)} - {chosen.nonce}
    with open(f"{path}.new", "wb") as file:
        file.write(json.dumps({"abandoned": sorted(after), "rollbacks": [*steps, chosen.step]}).encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)
    CheckpointFolder.sync(directory)


def _is_ending(holder: str) -> bool:
    """Return True if the process of a lock was killed, and a thread of it, such as one in fsync, has not ended yet."""
    _, pid, _, _, host = [*holder.split(" "), "", "", "", ""][:5]
    if host != os.uname().nodename or not pid.isdigit():
        return False
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[:1] == [b"Z"]
    return False


class DirectoryLock:
    """A lock that gives a directory one writer. It belongs to the open file, and the kernel releases it when the process ends."""

    def __init__(self, directory: str) -> None:
        path = os.path.join(directory, ".lock")
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            self._take(directory, path)
        except BaseException:
            os.close(self._fd)
            raise
        _held.add(self)

    def _take(self, directory: str, path: str) -> None:
        mine, until = f"process {os.getpid()} on host {os.uname().nodename}", time.monotonic() + _ENDING_S
        holder = ""
        while not (is_taken := self._try(path)):
            holder = os.pread(self._fd, 200, 0).decode("utf-8", "replace").strip() or "another program"
            if not _is_ending(holder) or time.monotonic() > until:
                break
            time.sleep(0.01)
        if not is_taken:
            if holder == mine:
                raise CheckpointError(f"another Checkpointer of this program writes to '{directory}': close it first")
            raise CheckpointError(f"{holder} writes to '{directory}': one directory has one writer")
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{mine}\n".encode(), 0)

    def _try(self, path: str) -> bool:
        try:
            return lock_file(self._fd, path)
        except CheckpointError as error:
            if error.errno not in NO_LOCKS:  # make_folder() has logged it
                raise
            return True

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._fd >= 0:
            _held.discard(self)
            os.close(self._fd)
            self._fd = -1


_held = closed_in_children(DirectoryLock.release)
