"""Checkpointer: saves while training goes on, and resumes from the newest checkpoint that is whole."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import functools
import logging
import math
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .._engine import CheckpointError, CheckpointFolder, Error
from ..parallel.fully_shard import wrapper_of
from .calls import OneCall
from .files import MAX_FILE_BYTES, absolute_path, check_options, in_words, integer, usable_timeout
from .optimizer_extras import stepping_optimizer
from .peers import Peers, os_error
from .reading import agree_on, apply_together
from .retention import (
    BOARD,
    DAMAGED,
    REPLACED,
    STEP_LIMIT,
    DirectoryLock,
    Kept,
    folder_name,
    go_on_from,
    in_order,
    left_overs,
    list_checkpoints,
    replaced_ones,
    to_retire,
)
from .writing import Training, Writer, new_nonce

logger = logging.getLogger("shardwright")
_live: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


class Checkpointer:
    """Checkpoints of one training in one directory, a folder `step-000100` a checkpoint.

    Parameters
    ----------
    directory : path-like
        Made if it is not there. One Checkpointer writes to it at a time. One that may not be written to can be restored from.
    model : Module
        Plain, or wrapped by torch or shardwright.
    optimizer : Optimizer, optional
    scheduler, scaler : object with state_dict() and load_state_dict(), or a list or dict of such, optional
        Rank 0's state is stored.
    dataloader : object with state_dict() and load_state_dict(), optional
        Every rank's own state is stored, and restored at the same world size.
    user_state : such an object, or a dict of plain values and tensors, optional
        Rank 0's is stored; a dict is updated in place.
    keep_last, keep_every, keep_best : int, optional
        What stays: that many of the newest; those whose step is a multiple; that many of the best metric. Without any of
        them everything stays. The newest always does. Damaged checkpoints count for nothing, and what is no checkpoint alone in its
        folder, or of a newer version, stays; so do, uncounted, those of later steps than the one that is saved (after
        ``restore(step=...)``).
    best : {"min", "max"}
        Which metric is better.
    snapshot : {"copy", "lazy"}
        "copy": save() copies this rank's share of the state. "lazy": save() copies next to nothing; what is not written
        yet when the optimizer steps is copied then. Parameters and optimizer state must change in optimizer.step() and in
        full_parameters(writable=True) only; what else writes to them makes the save fail if it runs still, and else is warned of.
        Of writes that torch does not count (`p.data`, `.numpy()`) those are seen that change one of these bytes of a tensor, in a
        MiB not written yet: its first or last 64, or 64 at every 256 KiB. So what changes a whole tensor is seen, and what changes
        a few values need not be: use "copy" then, or wait() before.
        What is on a GPU is copied before save() returns in either form.
    on_busy : {"wait", "skip", "raise"}
        What save() does while the one before is being written. All ranks do alike.
    process_group : ProcessGroup, optional
        Default: the model's, else the default group, else this rank alone.
    max_file_bytes : int
        Of tensors in one file.
    threads : int
        Writing threads a rank, in [1, 16].
    direct_io : bool
        Write past the page cache where the file system allows it.
    idle_io : bool
        Write only while no other program uses the disk, where its I/O scheduler has priorities (bfq, cfq). A disk that is always busy
        may keep such a save from its end until `timeout_s`.
    bandwidth_bytes_per_s : int
        Limit of this rank's writing; 0: none.
    verify : bool
        restore() checks every block before it changes anything.
    timeout_s : float
        Seconds from a save() until it is given up if some rank does not come.

    Notes
    -----
    Collective, as are save(), restore(), wait() and close(). Over several hosts `directory` is one that all of them share.
    One call at a time: a second thread, or a signal's handler in the midst of a call, gets a CheckpointError (`progress` is free).
    The random generators of torch, Python, numpy and CUDA are stored a rank and restored at the same world size.

    Examples
    --------
    >>> import tempfile, torch, shardwright as sw
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with tempfile.TemporaryDirectory() as folder, sw.Checkpointer(folder, model, optimizer, keep_last=2) as checkpoints:
    ...     for step in range(checkpoints.restore(), 10):
    ...         model(torch.ones(4)).sum().backward()
    ...         optimizer.step()
    ...         _ = checkpoints.save(step, every=5)
    ...     checkpoints.wait()
    ...     checkpoints.restore()
    10
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        model: torch.nn.Module,
        optimizer: Any = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        dataloader: Any = None,
        user_state: Any = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        best: str = "min",
        snapshot: str = "copy",
        on_busy: str = "wait",
        process_group: Any = None,
        max_file_bytes: int = MAX_FILE_BYTES,
        threads: int = 2,
        direct_io: bool = True,
        idle_io: bool = False,
        bandwidth_bytes_per_s: int = 0,
        verify: bool = True,
        timeout_s: float = 1800.0,
    ) -> None:
        self._peers = Peers(model, process_group, usable_timeout(timeout_s))
        checked: list[tuple[int, int, int]] = []

        def check() -> dict[str, Any]:
            _check_choice("snapshot", snapshot, ("copy", "lazy"))
            _check_choice("on_busy", on_busy, ("wait", "skip", "raise"))
            _check_choice("best", best, ("min", "max"))
            self._rules = {
                "keep_last": _count("keep_last", keep_last),
                "keep_every": _count("keep_every", keep_every),
                "keep_best": _count("keep_best", keep_best),
                "largest": best == "max",
            }
            file_bytes, _ = check_options(max_file_bytes, timeout_s)
            bandwidth = integer("bandwidth_bytes_per_s", bandwidth_bytes_per_s, 0, 2**63, "an integer in [0, 2**63)")
            checked.append((file_bytes, integer("threads", threads, 1, 17, "an integer in [1, 16]"), bandwidth))
            self.directory = absolute_path("directory", directory)
            self._training = Training(model, optimizer, scheduler, scaler, dataloader, user_state)
            if snapshot == "lazy" and not hasattr(self._training.optimizer, "register_step_pre_hook"):
                given = (
                    "none"
                    if optimizer is None
                    else f"a {type(optimizer).__name__}, which has no register_step_pre_hook()"
                )
                raise ValueError(
                    f"snapshot='lazy' copies in the optimizer's step: it needs a torch.optim.Optimizer, got {given}"
                )
            return {"on_busy": on_busy, "max_file_bytes": file_bytes, "verify": bool(verify)}

        self._peers.agree(check, "Checkpointer()")
        ((max_file_bytes, threads, bandwidth),) = checked
        timeout_s = float(timeout_s)
        self._lazy = snapshot == "lazy"
        self._on_busy = on_busy
        self._verify = verify
        self._closed = False
        self._rejected: set[str] = set()  # nonces of what restore() has found damaged
        self._warned: set[str] = set()
        self._call = OneCall()
        self._lock: DirectoryLock | None = None
        self._read_only = ""  # why nothing can be saved
        self._every: int | None = None  # of the first save(), which all ranks agree on
        self._hooks: list[Any] = []
        nonce = self._take_directory()
        try:
            board = None if self._read_only else os.path.join(self.directory, BOARD)
            self._writer = Writer(
                self._peers, nonce, board, threads=threads, direct=direct_io, idle_io=idle_io, bandwidth=bandwidth,
                timeout_s=timeout_s, max_file_bytes=max_file_bytes,
            )  # fmt: skip
            if self._lazy:
                self._hooks = _before_writes(
                    model, stepping_optimizer(self._training.optimizer), _protector(self._writer)
                )
        except BaseException:
            self._release()
            raise
        self._warm_staging()
        self._retire = weakref.finalize(self, _finish, self._writer, self._lock, os.getpid())
        self._retire.atexit = False  # _finish_all does it
        self._owner_pid = os.getpid()
        _live.add(self)
        _register_exit()

    def _warm_staging(self) -> None:
        """Prepare for the model now, and for the optimizer's state once it is there: after its first step."""
        if self._read_only:
            return
        optimizer = stepping_optimizer(self._training.optimizer)
        self._writer.warm(self._training, lazy=self._lazy)
        if hasattr(optimizer, "register_step_post_hook") and not optimizer.state:
            with contextlib.suppress(
                TypeError
            ):  # a class that keeps its hooks in a plain dict: the first save touches staging
                self._hooks.append(optimizer.register_step_post_hook(_warmer(weakref.ref(self), len(self._hooks))))

    def _take_directory(self) -> str:
        """The directory is rank 0's to make and to lock; every rank hears of a refusal, or the nonce of this Checkpointer. A directory
        that may only be read is taken."""
        refusal, code, is_readable = "", None, False
        if self._peers.rank == 0:
            try:
                self._lock = _lock_directory(self.directory)
            except CheckpointError as error:
                refusal, code = str(error), error.errno
            except Exception as error:
                refusal = f"'{self.directory}' cannot be written to: {in_words(error)}"
                code = getattr(error, "errno", None)
                is_readable = code in (errno.EACCES, errno.EPERM, errno.EROFS) and os.path.isdir(self.directory)
        told = [refusal, code, is_readable, new_nonce()]
        refusal, code, is_readable, nonce = self._peers.exchange(told, f"Checkpointer for {self.directory}")[0]
        if is_readable:
            self._read_only = refusal
        elif refusal:
            self._release()
            raise os_error(refusal, code)
        return str(nonce)

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # saving -----------------------------------------------------------------------------------------------------------

    def save(self, step: int, *, every: int = 1, metric: float | None = None) -> bool:
        """Saves after step `step`, counted from 0, is complete, if `step + 1` is a multiple of `every`.

        Parameters
        ----------
        step : int
            The folder is called after `step + 1`, the count of completed steps.
        every : int
        metric : float, optional
            What keep_best compares. Finite.

        Returns
        -------
        bool
            Whether a save was begun. It is durable only after a later wait(), save() or close() returned.

        Raises
        ------
        CheckpointError
            The save before this one failed, on whatever rank (this one is then not begun); or this one cannot begin.
        """
        with self._call.of("save()"):
            return self._save(step, every, metric)

    def _save(self, step: int, every: int, metric: float | None) -> bool:
        self._check_open()
        if self._read_only:
            raise CheckpointError(self._read_only)
        refusal = None
        try:
            step = integer("step", step, 0, STEP_LIMIT - 1, f"an integer in [0, {STEP_LIMIT - 1})")
            every = integer("every", every, 1, 2**63, "an integer of at least 1")
        except ValueError as error:
            refusal = error
        if self._every is None:
            self._agree_on_first(every, refusal)
        if refusal is not None and every != 1:  # whether the others save now is not known
            raise refusal
        if refusal is None and (step + 1) % every:
            return False
        if self._on_busy != "wait" and any(self._peers.exchange(self._writer.is_busy, "is a save under way")):
            if refusal is not None:
                raise refusal
            if self._on_busy == "raise":
                raise CheckpointError(f"step {step + 1} was not saved: the save before it is still being written")
            return False
        self._settle(f"saves step {step + 1}" if refusal is None else "", refusal)
        if not _is_finite(metric):  # it may be one rank's alone: the others do begin
            self._writer.skip(f"metric must be finite, got {metric!r}")
            raise ValueError(f"metric must be finite, got {metric!r}")
        self._begin(step + 1, metric)
        return True

    def _agree_on_first(self, every: int, refusal: ValueError | None) -> None:
        """That the first call is the same on all ranks: with another `every` some would wait for others that train on."""

        def check() -> dict[str, Any]:
            if refusal is not None:
                raise refusal
            return {"every": every}

        self._peers.agree(check, "save()")
        self._every = every

    def _settle(self, what: str, refusal: Exception | None = None) -> None:
        """Wait as wait() does, and raise on all ranks what some have heard, or `refusal`, or that ranks come here for other calls. A rank
        that could not begin has raised its part at that save, and would begin the next one while the others do not. Collective."""
        failure: Exception | None = None
        try:
            self._wait()
        except Exception as error:
            failure = error
        told = "" if failure is None else str(failure) or type(failure).__name__
        if failure is None and refusal is not None:
            failure, told = refusal, f"rank {self._peers.rank}: {refusal}"
        try:
            heard = self._peers.exchange([told, what], "how the save before ended")
        except Error:  # a rank died, or came with something else
            if failure is None:
                raise
            heard = []
        if failure is not None:
            raise failure
        for sentence, _ in heard:
            if sentence:
                raise CheckpointError(sentence)
        for rank, (_, theirs) in enumerate(heard):
            if theirs != heard[0][1]:
                raise CheckpointError(f"rank 0 {heard[0][1]} while rank {rank} {theirs}")

    def _begin(self, step: int, metric: float | None) -> None:
        folder = os.path.join(self.directory, folder_name(step))
        stale: list[str] = []
        retired: list[str] = []
        replaces = ""
        if self._peers.rank == 0:
            try:
                replaces = CheckpointFolder.identity(folder)  # sw.save() and dcp need no lock on the directory
                stale = left_overs(self.directory)
                retired = self._to_retire(Kept(step, folder, metric))
            except Exception as error:
                refusal = f"'{self.directory}' cannot be read: {in_words(error)}"
                self._writer.skip(refusal)
                raise os_error(refusal, getattr(error, "errno", None)) from error
        self._writer.begin(
            folder,
            step,
            self._training,
            lazy=self._lazy,
            metric=None if metric is None else float(metric),
            stale=stale,
            retired=retired,
            replaces=replaces,
        )

    def _to_retire(self, new: Kept) -> list[str]:
        """Paths that go once `new` is durable."""
        same = (new.path, new.path + REPLACED)  # which the commit replaces
        has_rules = any(self._rules[name] for name in ("keep_last", "keep_every", "keep_best"))
        kept = list_checkpoints(self.directory, look=has_rules)
        kept = [dataclasses.replace(k, state=DAMAGED) if k.nonce in self._rejected else k for k in kept]
        kept = [k for k in kept if k.step <= new.step]  # a rollback to an older one does not say that the newer ones go
        goes = to_retire([*(k for k in kept if k.path not in same), new], **self._rules)  # type: ignore[arg-type]
        # in this order: without its successor, what was replaced is a checkpoint again
        paths = [path for path in replaced_ones(self.directory) if path not in same]
        paths += [k.path for k in goes if k.path != new.path]
        return [path for path in paths if self._is_removable(path)]

    def _is_removable(self, path: str) -> bool:
        try:
            CheckpointFolder.check_removable(path)
        except CheckpointError as error:
            if path not in self._warned:
                self._warned.add(path)
                logger.warning("a checkpoint that no rule keeps stays: %s", error)
            return False
        return True

    def wait(self) -> None:
        """Returns when the save under way is durable.

        Raises
        ------
        CheckpointError
            It failed, on whatever rank: the same sentence on every rank, once. `errno` where the system refused something.
        """
        with self._call.of("wait()"):
            self._wait()

    def _wait(self) -> None:
        self._check_open()
        self._writer.wait()

    @property
    def progress(self) -> dict[str, int]:
        """Return counts of this rank's part: bytes_total, bytes_written, staging_bytes (memory held), direct_bytes, device_bytes (came down from a GPU, in all saves), busy. No communication."""
        self._check_open()
        return self._writer.progress()

    # restoring --------------------------------------------------------------------------------------------------------

    def restore(self, step: int | None = None) -> int:
        """Fills everything from the newest checkpoint that every rank finds whole.

        Parameters
        ----------
        step : int, optional
            Take the checkpoint of that many completed steps, and no other. Newer ones stay, abandoned: a later restore() takes
            one of them only if nothing else can be read, or if it is asked for by its step.

        Returns
        -------
        int
            The count of completed steps, which is the next step to run; 0 if there is no checkpoint.

        Raises
        ------
        CheckpointError
            On every rank: there are checkpoints, and none can be read; or the newest sound one is of another model, or of a newer
            version than this program reads; or there is none of `step`.
        """
        with self._call.of("restore()"):
            return self._restore(step)

    def _restore(self, step: int | None) -> int:
        def check() -> int | None:
            return None if step is None else integer("step", step, -(2**63), 2**63, "None or an integer")

        self._settle("restores")
        asked = self._peers.together(check, "step to restore")
        if any(each != asked[0] for each in asked):
            raise CheckpointError(f"restore: ranks ask for different steps: {', '.join(map(str, asked))}, by rank")
        listed = self._list(is_preference=step is None)
        if step is not None:
            chosen = [path for found, path in listed if found == asked[0]]
            if not chosen:
                there = ", ".join(str(found) for found, _ in listed[-5:]) or "none"
                raise CheckpointError(
                    f"restore: '{self.directory}' has no checkpoint of step {asked[0]!r}; the newest are of: {there}"
                )
            listed = [(asked[0], path) for path in chosen]
        refusals = []
        for _, path in reversed(listed):
            spare = self._writer.spare()
            reader, why = agree_on(path, self._training, self._peers, verify=self._verify, spare=spare)
            if reader is not None:
                apply_together(reader, self._peers, everything=True)
                if step is not None:
                    self._go_on_from(Kept(asked[0], path, nonce=reader.folder.nonce))
                if not self._read_only:
                    self._writer.warm(self._training, lazy=self._lazy)
                return int(reader.folder.step)
            logger.warning("checkpoint passed over: %s", why)
            refusals.append(why)
            self._reject(path)
        if refusals:
            raise CheckpointError(
                f"none of the {len(refusals)} checkpoints in '{self.directory}' can be read; the newest: {refusals[0]}"
                if step is None
                else f"the checkpoint of step {step} cannot be read: {refusals[0]}"
            )
        return 0

    def _go_on_from(self, chosen: Kept) -> None:
        """Later checkpoints are abandoned, as far as the directory can hold a note of it. Collective."""

        def note() -> None:
            if self._peers.rank == 0 and self._lock is not None:
                try:
                    go_on_from(self.directory, chosen)
                except Exception as error:
                    why = f"step {chosen.step} was restored, but later checkpoints could not be noted as abandoned"
                    raise os_error(f"{why}: {in_words(error)}", getattr(error, "errno", None)) from error

        self._peers.together(note, f"rollback to step {chosen.step}")

    def _list(self, *, is_preference: bool = False) -> list[tuple[int, str]]:
        """(step, path) of the folders that claim to be checkpoints, as rank 0 sees them: oldest first, or the one last that restore()
        prefers."""
        listed: list[tuple[int, str]] = []
        refusal, code = "", None
        if self._peers.rank == 0:
            try:
                found = list_checkpoints(self.directory)
                found = in_order(self.directory, found) if is_preference else found
                listed = [(kept.step, kept.path) for kept in found]
            except Exception as error:
                refusal = f"'{self.directory}' cannot be read: {in_words(error)}"
                code = getattr(error, "errno", None)
        listed, refusal, code = self._peers.exchange([listed, refusal, code], f"checkpoints in {self.directory}")[0]
        if refusal:
            raise os_error(refusal, code)
        return [(step, path) for step, path in listed]

    def _reject(self, path: str) -> None:
        """Retention counts it no more: some rank has found it damaged."""
        if self._peers.rank == 0:
            with contextlib.suppress(CheckpointError, OSError, MemoryError):  # then the manifest says so itself
                self._rejected.add(CheckpointFolder(path).nonce)

    def steps(self) -> list[int]:
        """Completed steps of the checkpoints in the directory, oldest first; those of saves that are durable. None is read but its
        name. Collective."""
        with self._call.of("steps()"):
            self._check_open()
            return [step for step, _ in self._list()]

    @property
    def latest(self) -> int | None:
        """The last of steps(), or None. Collective."""
        steps = self.steps()
        return steps[-1] if steps else None

    # the end ----------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError("this Checkpointer was closed: make a new one")

    def close(self) -> None:
        """Waits for the save under way, and lets go of the directory. Idempotent.

        Raises
        ------
        CheckpointError
            As wait().
        """
        with self._call.of("close()", waits=True):
            self._close(self._writer.wait)

    def _close(self, wait: Callable[[], None]) -> None:
        if self._closed:
            return
        try:
            wait()
        finally:
            self._closed = True
            for hook in self._hooks:
                hook.remove()
            self._retire.detach()
            try:
                self._writer.close()
            finally:
                self._release()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.close()
            return
        try:  # the error on its way out is the one to hear of; the other ranks may not be here
            with self._call.of("close()", waits=True):
                self._close(self._writer.wait_alone)
        except CheckpointError as failure:
            logger.warning("the last save failed: %s", failure)

    def describe(self) -> dict[str, Any]:
        """Return the entry of sw.describe()."""
        state = "closed" if self._closed else self._writer.progress()
        return {"directory": self.directory, "snapshot": "lazy" if self._lazy else "copy", "state": state}


def _lock_directory(directory: str) -> DirectoryLock:
    try:
        CheckpointFolder.make(directory)
    except CheckpointError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno)) from None
    return DirectoryLock(directory)


def live_checkpointers() -> list[Checkpointer]:
    """Those of this process that are open."""
    return [each for each in _live if not each._closed]


def _warmer(checkpointer: weakref.ref[Checkpointer], place: int) -> Any:
    """A hook of a step that is called once."""

    def warm(*_: Any) -> None:
        alive = checkpointer()
        if alive is not None and not alive._closed:
            alive._hooks[place].remove()
            alive._writer.warm(alive._training, lazy=alive._lazy)

    return warm


def _before_writes(model: torch.nn.Module, optimizer: torch.optim.Optimizer, protect: Any) -> list[Any]:
    """Handles of what calls `protect` before each step of an optimizer, and before the engine writes otherwise."""
    wrapped = wrapper_of(model)
    replica = None if wrapped is None else wrapped._replica
    engine = [] if replica is None else [replica.register_before_writes(protect)]
    return [optimizer.register_step_pre_hook(protect), *engine]


def _protector(writer: Writer) -> Any:
    reference = weakref.ref(writer)

    def protect(*_: Any) -> None:
        alive = reference()
        if alive is not None:
            alive.protect()

    return protect


@functools.cache
def _register_exit() -> None:
    """After the communicators': functions of exit run in reverse, and a save needs its peers until the verdict."""
    atexit.register(_finish_all)


def _finish_all() -> None:
    for each in live_checkpointers():
        if each._owner_pid == os.getpid():
            try:
                each._close(each._writer.wait_alone)
            except CheckpointError as error:
                logger.warning("the last save failed: %s", error)


def _finish(writer: Writer, lock: DirectoryLock | None, pid: int) -> None:
    """Bring to its end what was begun, once the Checkpointer is gone."""
    if os.getpid() != pid:
        return
    try:
        writer.wait_alone()
    except CheckpointError as error:
        logger.warning("the last save failed: %s", error)
    writer.close()
    if lock is not None:
        lock.release()


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def _is_finite(metric: Any) -> bool:
    try:
        return metric is None or math.isfinite(metric)
    except Exception:  # no number, or one beyond floats
        return False


def _count(name: str, value: Any) -> int | None:
    return None if value is None else integer(name, value, 1, 2**63, "None or an integer of at least 1")
