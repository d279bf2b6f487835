"""Checkpointer: save in the background of training, resume from the newest sound checkpoint."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from .._engine import CheckpointError, Error
from ..comm import account
from ..comm.signals import SaveSignals, StopRequest, check_signals
from ..comm.spares import is_waiting
from ..comm.waits import on_every_rank
from ..options.name_map import NameMap, Rename
from ..options.names import offers_names
from ..options.places import absolute_path, address_of
from ..parallel.agreement.save_check import SaveCheck
from ..parallel.engine import engine_of
from ..torch_compat.optimizers import takes_hooks
from ..torch_compat.weak import weakly
from .calls import Interval, OneCall
from .files import MAX_FILE_BYTES, check_options, integer, usable_timeout
from .folder.directory import Directory
from .folder.retention import BOARD, STEP_LIMIT, Kept
from .joined import Modules, engines_of, members_of, parts_of
from .memory.local import LocalTier, checked_folder
from .memory.restoring import Candidate
from .memory.tier import MemoryTier
from .observers import observers_of
from .pipeline import inventory_of, load_stages, peers_of
from .remote.store import local_folder
from .restore.agreeing import Rejected, Restore, agree_on, apply_together, rejected
from .state.optimizer_extras import stepping_optimizer
from .training import Training, is_pipeline
from .writing import Writer

logger = logging.getLogger("shardwright")
_live: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


class Checkpointer:
    """The checkpoints of one training in one directory. Each checkpoint is a folder such as `step-000100`.

    Parameters
    ----------
    directory : path-like, or an address of fsspec such as s3://bucket/run
        Created if it does not exist. One Checkpointer writes to it at a time. A read-only directory allows restore()
        only. With an address, a save writes to `local_directory` and rank 0 uploads in the background, resuming after a
        restart. wait() and close() return when the upload is complete. restore() downloads what exists only at the
        address.
    model : Module, or list or dict of Module
        Plain, or wrapped by torch or shardwright. Or this rank's sw.PipelineStage, or a list of them, as in sw.save().
        Stages need snapshot="copy", no `memory_every`, and a `process_group` with the ranks of all stages.
    optimizer : Optimizer, or list or dict of Optimizer, optional
        For stages: a list with one optimizer per stage.
    scheduler, scaler : object with state_dict() and load_state_dict(), or a list or dict of such, optional
        The checkpoint stores rank 0's state.
    dataloader : object with state_dict() and load_state_dict(), optional
        The checkpoint stores each rank's own state; restore() needs the same world size for it.
    user_state : such an object, or a dict of plain values and tensors, optional
        The checkpoint stores rank 0's. restore() updates a dict in place.
    keep_last, keep_every, keep_best : int, optional
        Retention keeps the newest `keep_last`, every step that is a multiple of `keep_every`, the `keep_best` best metrics, and
        always the newest. Without a rule it keeps all. Rules count only sound checkpoints up to the step being saved.
        Retention never removes a later step (after ``restore(step=...)``), a checkpoint of a newer version, or a folder that
        holds anything else.
    best : {"min", "max"}
        Which metric is better.
    snapshot : {"copy", "lazy"}
        "copy": save() copies this rank's share of the state. "lazy": save() copies almost nothing; the next
        optimizer.step() copies what is not written yet. Only optimizer.step() and full_parameters(writable=True) may
        then write to parameters and optimizer state. Any other write fails a running save; after the save it is logged.
        A write that bypasses torch's version counter (`p.data`, `.numpy()`) is detected only in samples: the first and
        last 64 bytes of a tensor, and 64 bytes every 256 KiB. Samples reveal writes to a whole tensor; before writing a
        few values call wait(), or use "copy". In both forms save() copies GPU state before it returns.
    on_busy : {"wait", "skip", "raise"}
        What save() does while the previous save is still being written; must be equal on all ranks.
    process_group : ProcessGroup, optional
        Default: the model's, else the default group, else this rank alone.
    max_file_bytes : int
        Bytes of tensors in one file.
    threads : int
        Writing threads of each rank, in [1, 16].
    direct_io : bool
        Bypass the page cache where the file system allows it.
    idle_io : bool
        Write only while no other program uses the disk, where its I/O scheduler has priorities (bfq, cfq). On a disk that is
        always busy a save may not end before `timeout_s`.
    bandwidth_bytes_per_s : int
        Write bandwidth limit of this rank; 0: unlimited.
    verify : bool
        Make restore() check every block before it changes anything.
    timeout_s : float
        Seconds after which a save() fails if a rank is missing.
    save_on : collection of signal.Signals
        After such a signal on any rank the next save() ignores `every`, saves, waits, and raises SystemExit(0) on all
        ranks. A launcher counts that as success. Call save() after each step. Needs the main thread.
    local_directory : path-like, optional
        The local directory for an address, shared by the hosts. Default: one below ~/.cache/shardwright.
    local : path-like, optional
        A folder outside of `directory`, on a disk that each host has for itself, such as its NVMe. A save copies this rank's
        share there, whatever `snapshot` is, and the hosts copy it on to `directory` behind training. After wait() the step is
        durable on the hosts' disks, after close() in `directory`, too. A restore() takes the newest step that is whole in
        either place, and logs a step that a lost host takes with it. The last two steps stay in the folder: twice the bytes
        of this host's share. If its disk is full, saves go to `directory` alone, and the log gives the reason.
    memory_every : int, optional
        save() also copies every step that is a multiple of it into memory that survives killed ranks, independent of
        saves to disk. restore() takes the newest complete step of both. Uses twice the bytes of this host's share of a
        checkpoint, plus twice another host's share per replica. If memory is short, saves go to disk only, and the log
        gives the reason. close() frees the memory, so save the last step to disk. Default: disk only.
    memory_replicas : int, optional
        Number of other hosts that hold a copy of each host's share; a step survives the loss of that many adjacent
        hosts. Default: 1 if the next host is another machine, else 0.

    Notes
    -----
    The constructor, save(), restore(), wait() and close() are collective. Ranks on several hosts need a shared `directory`.
    A call from a second thread or a signal handler during another call raises CheckpointError, except `progress`.
    The random generators of torch, Python, numpy and CUDA are stored for each rank; restore() needs the same world size.

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

    _is_back = False  # True once ranks were lost

    @offers_names
    @on_every_rank("sw.Checkpointer()")
    def __init__(
        self,
        directory: str | os.PathLike[str],
        model: Any,
        optimizer: Any = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        dataloader: Any = None,
        user_state: Any = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        best: Literal["min", "max"] = "min",
        snapshot: Literal["copy", "lazy"] = "copy",
        on_busy: Literal["wait", "skip", "raise"] = "wait",
        process_group: Any = None,
        max_file_bytes: int = MAX_FILE_BYTES,
        threads: int = 2,
        direct_io: bool = True,
        idle_io: bool = False,
        bandwidth_bytes_per_s: int = 0,
        verify: bool = True,
        timeout_s: float = 1800.0,
        save_on: Iterable[int] = (),
        local_directory: str | os.PathLike[str] | None = None,
        local: str | os.PathLike[str] | None = None,
        memory_every: int | None = None,
        memory_replicas: int | None = None,
    ) -> None:
        self._given = {name: value for name, value in locals().items() if name != "self"}
        self._peers = peers_of(model, process_group, usable_timeout(timeout_s))

        def check() -> tuple[dict[str, Any], tuple[Any, ...]]:
            choices = {"snapshot": ("copy", "lazy"), "on_busy": ("wait", "skip", "raise"), "best": ("min", "max")}
            for (name, legal), value in zip(choices.items(), (snapshot, on_busy, best)):
                if value not in legal:
                    raise ValueError(f"{name} must be one of {', '.join(map(repr, legal))}, got {value!r}")
            rules: dict[str, Any] = {"keep_last": keep_last, "keep_every": keep_every, "keep_best": keep_best}
            for name, value in rules.items():
                if value is not None:
                    rules[name] = integer(name, value, 1, 2**63, "None or an integer of at least 1")
            rules["largest"] = best == "max"
            file_bytes, _ = check_options(max_file_bytes, timeout_s)
            integer("memory_every", 1 if memory_every is None else memory_every, 1, 2**63, "an integer of at least 1")
            integer("memory_replicas", memory_replicas or 0, 0, 2**31, "None or an integer of at least 0")
            if memory_every is None and memory_replicas is not None:
                raise ValueError(f"memory_replicas={memory_replicas} needs memory_every: nothing goes into memory")
            bandwidth = integer("bandwidth_bytes_per_s", bandwidth_bytes_per_s, 0, 2**63, "an integer in [0, 2**63)")
            writers = integer("threads", threads, 1, 17, "an integer in [1, 16]")
            self._save_on = check_signals(save_on)
            address = address_of(directory, "directory")
            place = directory if address is None else local_folder(address, local_directory)
            self.directory = absolute_path("directory", place)
            limits = (("snapshot", snapshot, "copy"), ("memory_every", memory_every, None), ("local", local, None))
            for name, given, needed in limits if is_pipeline(model) else ():
                if given != needed:
                    raise ValueError(
                        f"{name}={given!r} is not supported for stages of a pipeline: it must be {needed!r}"
                    )
            disk = None if local is None else checked_folder(local, self.directory)
            self._training = Training(model, optimizer, scheduler, scaler, dataloader, user_state)
            steppers = members_of(self._training.optimizer)
            can_hook = bool(steppers) and all(takes_hooks(stepping_optimizer(each)) for each in steppers)
            if snapshot == "lazy" and not can_hook:
                kind = type(optimizer).__name__
                got = (
                    "none" if optimizer is None else f"a {kind}, which has no register_step_pre_hook() that torch calls"
                )
                raise ValueError(
                    f"snapshot='lazy' copies in the optimizer's step: it needs a torch.optim.Optimizer, got {got}"
                )
            self._observers = observers_of(model)
            compared: dict[str, Any] = {"on_busy": on_busy, "max_file_bytes": file_bytes, "verify": bool(verify)}
            compared |= {"save_on": [each.name for each in self._save_on]}
            compared |= {"memory_every": memory_every, "memory_replicas": memory_replicas, "local": local is not None}
            return compared, (file_bytes, writers, bandwidth, address, rules, disk)

        max_file_bytes, threads, bandwidth, address, rules, disk = self._peers.agree(check, "Checkpointer()")
        self._timeout_s = timeout_s = float(timeout_s)
        self._lazy = snapshot == "lazy"
        self._on_busy = on_busy
        self._verify = verify
        self._closed = False
        self._call = OneCall()
        self._every: int | None = None  # `every` of the first save(), equal on all ranks
        self._hooks: list[Any] = []
        self._memory: MemoryTier | None = None
        self._local: LocalTier | None = None
        self._memory_every = memory_every
        self._newest = -1  # the step that was last copied into memory, or whose save last began
        self._begun = -1  # the step whose save last began
        self._stop = StopRequest(self._peers.rank, 1)
        #: the last step that was due, and its metric, until it is durable
        self._owed: tuple[int, float | None] = (-1, None)
        if is_waiting():  # a spare opens nothing until it has a rank's place: see _come_back()
            self._closed = True
            return
        self._place = Directory(self._peers, self.directory, address, rules)
        nonce, is_read_only = self._place.nonce, bool(self._place.read_only)
        with contextlib.ExitStack() as held:  # without references to this object, whose end it outlives
            held.callback(self._place.close)
            self._place.open_mirror()
            board = None if is_read_only else os.path.join(self.directory, BOARD)
            self._writer = Writer(
                self._peers, nonce, board, threads=threads, direct=direct_io, idle_io=idle_io, bandwidth=bandwidth,
                timeout_s=timeout_s, max_file_bytes=max_file_bytes, inventory=functools.partial(inventory_of, self._training),
            )  # fmt: skip
            if memory_every is not None and not is_read_only:
                if self._is_back and memory_replicas:  # on the hosts that are left
                    memory_replicas = min(memory_replicas, self._peers.host_count - 1)
                self._memory = MemoryTier(
                    self._peers, self.directory, nonce, memory_replicas, threads=threads, timeout_s=timeout_s
                )
                held.callback(self._memory.close, goodbye=False)
            if disk is not None and not is_read_only:
                options: Any = {"threads": threads, "timeout_s": timeout_s}
                self._local = LocalTier(self._peers, self.directory, disk, nonce, **options)
                held.callback(self._local.close, goodbye=False)
            held.callback(self._writer.close)
            held.callback(_remove, self._hooks)
            if self._lazy:
                self._hooks += _before_writes(self._training, weakly(self._writer.protect))
            self._held = held.pop_all()
        self._release_after_loads()
        self._warm_staging()
        self._owner_pid = os.getpid()
        engine = None if isinstance(self._training.model, Modules) else engine_of(model)
        pairs = ((module, t.optimizer) for t in self._training.parts for module in parts_of(t.model).values())
        self._check = SaveCheck(pairs)
        self._signals = None
        if self._save_on:
            of_engine = engine.replica.stop_request() if engine is not None and engine.made else None
            self._exchanges_stop = of_engine is None  # save() itself exchanges the request
            self._stop = of_engine or self._stop
            self._signals = SaveSignals(self._save_on, functools.partial(setattr, self._stop, "is_asked", True))
            self._held.callback(self._signals.close)
        self._retire = weakref.finalize(self, _finish, self._owner_pid, self._writer, self._held)
        self._retire.atexit = False  # _finish_all() finishes all saves at exit
        self._interval = Interval(self._peers)
        _live.add(self)
        account.awaits_runs = True
        _register_exit()

    def _release_after_loads(self) -> None:
        """Release the optimizer's old state when load_state_dict() has replaced it, not only at the next save."""
        forget = weakly(self._writer.inventory.forget)
        for optimizer in (stepping_optimizer(o) for each in self._training.parts for o in members_of(each.optimizer)):
            if hasattr(optimizer, "register_load_state_dict_post_hook"):
                with contextlib.suppress(TypeError, AttributeError):  # it keeps its hooks in a plain dict, or has none
                    self._hooks.append(optimizer.register_load_state_dict_post_hook(forget))

    def _warm(self) -> None:
        """Allocate staging, unless the snapshot of a save lies on a disk."""
        if not self._place.read_only and (self._local is None or self._local.off):
            self._writer.warm(self._training, lazy=self._lazy)

    def _warm_staging(self) -> None:
        """Allocate staging for the model now, and for the optimizer's state after the first step."""
        if self._place.read_only:
            return
        optimizer = stepping_optimizer(next(reversed(members_of(self._training.optimizer)), None))
        self._warm()
        if takes_hooks(optimizer) and not optimizer.state:
            with contextlib.suppress(TypeError):  # it keeps its hooks in a plain dict: the first save allocates staging
                self._warming = optimizer.register_step_post_hook(weakly(self._warm_after_step))
                self._hooks.append(self._warming)

    def _warm_after_step(self, *_: Any) -> None:
        if not self._closed:
            self._warming.remove()
            self._warm()

    # saving -----------------------------------------------------------------------------------------------------------

    @on_every_rank("Checkpointer.save()")
    def save(self, step: int, *, every: int = 1, every_s: float | None = None, metric: float | None = None) -> bool:
        """Save the state after step `step`, counted from 0, if `step + 1` is a multiple of `every` or it is time.

        Parameters
        ----------
        step : int
            The folder is named after `step + 1`, the count of completed steps.
        every : int
        every_s : float, optional
            Instead of `every`: save once this many seconds have passed since the last save or the first call, by rank
            0's clock and at the same step on all ranks. `shardwright plan` says how many.
        metric : float, optional
            A finite value for keep_best.

        Returns
        -------
        bool
            True if a save began. It is durable once a later wait(), save() or close() returned.

        Raises
        ------
        CheckpointError
            This save did not begin: the previous one failed on some rank, or this one cannot begin.
        """
        for observer in self._observers:
            observer.on_save(step)
        with self._call.of("save()"):
            if not self._must_stop():
                return self._save(step, every, metric, every_s)
            self._save(step, 1, metric, is_last=True)
            self._wait()
            self._place.upload()
        self.close()
        gc.freeze()  # saves 0.7 s at the interpreter's exit: a launcher soon kills ranks that are slow to end
        logger.warning("step %d is saved after a signal: this rank ends", step + 1)
        raise SystemExit(0)

    def _must_stop(self) -> bool:
        """Return True on all ranks once any rank received a signal of `save_on`."""
        if self._signals is not None and self._exchanges_stop:
            return any(self._peers.exchange(self._stop.is_asked, "was a rank asked to stop"))
        return self._stop.is_agreed

    def _save(
        self, step: int, every: int, metric: float | None, every_s: float | None = None, *, is_last: bool = False
    ) -> bool:
        """Save as save() does. `is_last`: wait for the previous save, regardless of `on_busy`."""
        self._check_open()
        if self._place.read_only:
            raise CheckpointError(self._place.read_only)
        refusal = None
        try:
            step = integer("step", step, 0, STEP_LIMIT - 1, f"an integer in [0, {STEP_LIMIT - 1})")
            every = integer("every", every, 1, 2**63, "an integer of at least 1")
            every_s = Interval.checked(every_s, every)
        except ValueError as error:
            refusal = error
        if self._every is None:
            self._agree_on_first(every, every_s, refusal)
        if refusal is not None and (every != 1 or every_s is not None):
            raise refusal  # without a step it cannot know if its peers save
        if refusal is None and every_s is None and (step + 1) % every == 0:
            self._owed = step + 1, float(metric) if metric is not None and _is_finite(metric) else None
        if self._memory is not None and refusal is None and (step + 1) % (self._memory_every or 1) == 0:
            self._keep(step + 1, self._memory)
        if refusal is None and ((step + 1) % every if every_s is None else not self._interval.is_due(every_s)):
            return False
        waits = is_last or self._on_busy == "wait"
        if not waits and any(self._peers.exchange(self._writer.is_busy, "is a save under way")):
            if refusal is not None:
                raise refusal
            if self._on_busy == "raise":
                raise CheckpointError(f"step {step + 1} was not saved: the save before it is still being written")
            return False
        self._settle(f"saves step {step + 1}" if refusal is None else "", refusal)
        # before a rank may refuse
        local = self._local if self._local is not None and self._local.is_due(step + 1, False) else None
        if not _is_finite(metric):  # the metric of a peer may be finite: that rank begins
            self._writer.refuse(ValueError(f"metric must be finite, got {metric!r}"))
        try:
            target = self._place.target(step + 1, metric)
        except CheckpointError as error:
            self._writer.refuse(error)
        metric = None if metric is None else float(metric)
        self._writer.begin(target, step + 1, self._training, lazy=self._lazy, metric=metric, local=local)
        self._interval.restart()
        self._newest = self._begun = step + 1
        return True

    def _keep(self, step: int, memory: MemoryTier) -> None:
        """Copy this rank's share of a step into memory, unless the tier is busy or off. Collective."""
        ready, rows = None, []
        if not memory.off and not memory.is_busy:
            ready = self._writer.inventory.repeat(step, self._training)
            rows = self._check.rows()
        if memory.is_due(step, ready is not None, rows):
            self._check.compare(memory.answers, self._peers.exchange)
            self._writer.keep(step, self._training, memory, ready if memory.are_ready else None)
            self._newest = self._newest if memory.off else step

    def _agree_on_first(self, every: int, every_s: float | None, refusal: ValueError | None) -> None:
        """Check that the first call's interval is equal on all ranks; else some wait for ranks that do not save."""

        def check() -> tuple[dict[str, Any], None]:
            if refusal is not None:
                raise refusal
            return {"every": every, "every_s": every_s}, None

        self._peers.agree(check, "save()")
        self._every = every

    def _settle(self, what: str, refusal: Exception | None = None, *, checks: bool = True) -> None:
        """Wait for the previous save. On all ranks, raise its failure, `refusal`, or a mismatch of calls. Collective."""
        failure: Exception | None = None
        try:
            self._wait()
        except Exception as error:
            failure = error
        sentence = "" if failure is None else str(failure) or type(failure).__name__
        if failure is None and refusal is not None:
            failure, sentence = refusal, f"rank {self._peers.rank}: {refusal}"
        try:  # a rank that could not begin the previous save raised then: without this it would begin the next alone
            rows = self._check.rows() if checks else []
            answers = self._peers.exchange([sentence, what, rows], "how the save before ended")
        except Error:  # a rank died, or made a different collective call
            if failure is None:
                raise
        if failure is not None:
            raise failure
        for sentence, *_ in answers:
            if sentence:
                raise CheckpointError(sentence)
        for rank, (_, theirs, _) in enumerate(answers):
            if theirs != answers[0][1]:
                raise CheckpointError(f"rank 0 {answers[0][1]} while rank {rank} {theirs}")
        self._check.compare([each[2] for each in answers], self._peers.exchange)

    @on_every_rank("Checkpointer.wait()")
    def wait(self) -> None:
        """Wait until the running save is durable. With `local` that is on the hosts' disks; close() waits for the copy, too.

        Raises
        ------
        CheckpointError
            The save failed on some rank. All ranks raise the same message, once; `errno` is the system's error, if any.
        """
        with self._call.of("wait()"):
            self._check_open()
            if self._local is None or not self._local.is_durable(self._writer.is_busy):
                self._wait()
                self._place.upload()

    def _wait(self) -> None:
        self._check_open()
        if self._local is not None:
            self._local.wait()
        begun, self._begun = self._begun, -1  # also if it fails: its outcome is told once
        self._writer.wait(lambda: self._stop.is_asked)
        self._note_durable(begun)

    def _note_durable(self, begun: int) -> None:
        if self._owed[0] == begun:
            self._owed = -1, None

    @property
    def progress(self) -> dict[str, int]:
        """Return this rank's counts, without communication: bytes_total, bytes_written, staging_bytes (memory held),
        direct_bytes, device_bytes (copied from a GPU in all saves), busy.

        A memory tier adds memory_step (the newest step that this rank has copied), memory_bytes (of its share), and memory_skipped
        (steps skipped because the previous copy was still in transfer to another host). On the first rank of a host,
        memory_fetched counts the bytes that the last restore fetched from other hosts. `local` adds local_step, the newest step that
        this rank has copied to its host's disk, and local_bytes (of its share)."""
        self._check_open()
        found = self._writer.progress()
        for tier in self._tiers:
            found |= tier.progress()
        return found

    @property
    def _tiers(self) -> list[MemoryTier]:
        return [tier for tier in (self._memory, self._local) if tier is not None]

    # restoring --------------------------------------------------------------------------------------------------------

    @on_every_rank("Checkpointer.restore()")
    def restore(
        self,
        step: int | None = None,
        *,
        strict: bool = True,
        include: str | Iterable[str] = (),
        rename: Rename = None,
    ) -> int:
        """Restore all state from the newest checkpoint that every rank finds sound.

        Parameters
        ----------
        step : int, optional
            Restore only the checkpoint with this count of completed steps. Later checkpoints stay but are marked as
            abandoned: restore() takes one only if its step is requested, or if no other can be read.
        strict, include, rename
            As in load(), for the model and the optimizer.

        Returns
        -------
        int
            The count of completed steps, which is the number of the next step; 0 if no checkpoint exists.

        Raises
        ------
        CheckpointError
            On every rank: no checkpoint can be read, or none has `step`; or the newest sound one belongs to another
            model or has a newer format than this program supports.
        """
        if is_waiting():
            return 0
        with self._call.of("restore()"):
            completed = self._restore(step, include, rename, strict)
        for observer in self._observers:
            observer.on_restore(completed)
        return completed

    def _restore(self, step: int | None, *names: Any) -> int:
        def check() -> tuple[dict[str, Any], tuple[int | None, NameMap]]:
            wanted = None if step is None else integer("step", step, -(2**63), 2**63, "None or an integer")
            name_map = self._training.names(*names)
            return {"step": wanted, **name_map.describe()}, (wanted, name_map)

        self._settle("restores", checks=False)
        step, name_map = self._peers.agree(check, "restore()")
        listed = self._place.list(is_preference=step is None)
        kept = whole = [each for tier in self._tiers for each in tier.candidates()]
        if step is not None:
            chosen = [path for found, path in listed if found == step]
            kept = [each for each in kept if each.step == step]
            if not chosen and not kept:
                there = ", ".join(str(found) for found, _ in listed[-5:]) or "none"
                raise CheckpointError(
                    f"restore: '{self.directory}' has no checkpoint of step {step!r}; the newest are of: {there}"
                )
            listed = [(step, path) for path in chosen]
        refusals = []
        for _, place in reversed(_merged(listed, kept)):
            path = place.label if isinstance(place, Candidate) else place
            with contextlib.ExitStack() as opened:
                try:
                    restored = self._agree_on(place, path, name_map, opened)
                except Rejected as error:
                    refusals.append(str(error))
                    if self._peers.rank == 0:
                        logger.warning("restore() passes over a checkpoint: %s", error)
                    if isinstance(place, Candidate):
                        whole = [each for each in whole if each is not place]
                    else:
                        self._place.reject(path)
                    continue
                self._fill_stages(restored, path, name_map)
                apply_together(restored, self._peers)
            found = int(restored.folder.step)
            runs = restored.fit.state.get("trackers")
            account.go_on_from(found, runs if isinstance(runs, dict) else {})
            for each in [*(each for each in whole if each.step <= found), place]:  # the last one of a tier stays
                if isinstance(each, Candidate):
                    each.tier.took(each)
            if step is not None or self._has_lost_after(found, listed):
                self._go_on_from(Kept(found, path, nonce=restored.folder.nonce))
            self._warm()
            return found
        if refusals:
            raise CheckpointError(
                f"none of the {len(refusals)} checkpoints in '{self.directory}' can be read; the newest: {refusals[0]}"
                if step is None
                else f"the checkpoint of step {step} cannot be read: {refusals[0]}"
            )
        if self._has_lost_after(0, listed):
            self._go_on_from(Kept(0, self.directory))
        account.go_on_from(0, {})
        return 0

    def _has_lost_after(self, step: int, listed: list[tuple[int, str]]) -> bool:
        """Return True if a later step was durable on the hosts' disks and is not whole there; log it. Collective."""
        tier, steps = self._local, [each for each, _ in listed]
        return tier is not None and tier.lost_after(step, steps, self._place.torn()) is not None

    def _go_on_from(self, chosen: Kept) -> None:
        """Abandon what is later than `chosen`, also on hosts that are away now. Collective."""
        self._place.go_on_from(chosen)
        for tier in self._tiers:
            tier.forget_after(chosen.step)

    def _fill_stages(self, restored: Restore, path: str, names: NameMap) -> None:
        """Fill the stages of a pipeline, if any, from a folder that `restored` has verified. Collective."""
        if not self._training.stages:
            return
        try:
            load_stages(path, self._peers, self._training.stages, verify=False, names=names, timeout_s=self._timeout_s)
        except BaseException:
            restored.filler.take_back()
            raise

    def _agree_on(self, place: str | Candidate, path: str, names: NameMap, opened: contextlib.ExitStack) -> Restore:
        """Open a checkpoint on disk or in memory, until `opened` ends. Raise Rejected to pass it over. Collective."""
        source = None
        if isinstance(place, Candidate):
            with rejected():
                source = place.tier.assemble(place, opened)
        elif why := self._place.fetch(path):
            raise Rejected(why)
        if self._training.stages:  # all but the model is restored: see _fill_stages()
            names = NameMap(include="(?!)", strict=False)
        options: Any = {"verify": self._verify, "names": names, "source": source, "spare": self._writer.spare()}
        return agree_on(path, self._training, self._peers, everything=True, **options)

    @on_every_rank("Checkpointer.steps()")
    def steps(self) -> list[int]:
        """Return the completed steps of the durable checkpoints in the directory, oldest first. Reads names only. Collective."""
        if is_waiting():  # as restore(): a spare has opened nothing
            return []
        with self._call.of("steps()"):
            self._check_open()
            return [step for step, _ in self._place.list()]

    @property
    def latest(self) -> int | None:
        """Return the last of steps(), or None. Collective."""
        return max(self.steps(), default=None)

    # the end ----------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            is_spare = is_waiting()
            raise CheckpointError(
                "a spare opens its Checkpointer in sw.steps or sw.survive, and not before" if is_spare
                else "this Checkpointer was closed: make a new one"
            )  # fmt: skip

    def close(self) -> None:
        """Wait for the running save and release the directory. Idempotent. Raises the errors of wait()."""
        with self._call.of("close()", waits=True):
            if not self._closed:
                for observer in self._observers:
                    observer.on_close()
                try:
                    self._wait()
                    self._place.upload()
                    for tier in self._tiers:
                        tier.close(goodbye=True)
                finally:
                    self._close(self._writer.wait)
                    account.tracker_runs.clear()  # one that still logs says again that it does

    def _close(self, wait: Callable[[], None]) -> None:
        if self._closed:
            return
        try:
            wait()
        finally:
            self._closed = True
            self._retire.detach()
            self._held.close()

    def _leave(self) -> None:
        """End without communication, since ranks were lost: a save that they took part in fails; steps in memory stay."""
        if self._closed:  # by an attempt before, or a spare's
            return
        with failures_logged():
            self._close(functools.partial(self._writer.wait_alone, lambda: True))
            self._note_durable(self._begun)

    def _come_back(self) -> None:
        """Open again after _leave(), as it was made, over the ranks of the model at this time. Collective."""
        self._is_back = True
        owed, is_asked = self._owed, self._stop.is_asked or self._stop.is_agreed
        try:
            self.__init__(**self._given)  # type: ignore[misc]
            self._owed = owed
            self._stop.is_asked |= is_asked
        except BaseException:
            self._closed = True
            self._held.close()
            raise

    def _go_on_from_live(self) -> None:
        """Begin after the live state, which no restore has taken: the newest step of a tier stays until one is complete. Collective."""
        for tier in self._tiers:
            for candidate in tier.candidates()[-1:]:
                tier.took(candidate)
        self._warm()

    def _save_again(self, step: int) -> None:
        """Save `step`, which all have, if a save of it was due and the loss of a rank broke it. Collective."""
        due, metric = max(self._peers.exchange(self._owed, "saves that were broken"), key=lambda each: each[0])
        if due == step:
            self._save(step - 1, 1, metric)
            self._every = None  # the next save() gives it

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None or self._closed:
            self.close()
            return
        # the block's own error propagates, and other ranks may not exit the block: wait without communication
        with failures_logged(), self._call.of("close()", waits=True):
            self._close(functools.partial(self._writer.wait_alone, lambda: self._stop.is_asked))

    def describe(self) -> dict[str, Any]:
        """Return the entry of sw.describe()."""
        state = "closed" if self._closed else self._writer.progress()
        found = {"directory": self.directory, "snapshot": "lazy" if self._lazy else "copy", "state": state}
        if self._memory is not None:
            found["memory"] = self._memory.off or f"each {self._memory_every}, {self._memory.replicas} replicas"
        if self._local is not None:
            found["local"] = self._local.off or self._local.folder
        return found


def _merged(listed: list[tuple[int, str]], kept: list[Candidate]) -> list[tuple[int, str | Candidate]]:
    """Return checkpoints in the directory and in tiers in order of preference, best last. A tier is better at equal steps."""
    found: list[tuple[int, str | Candidate]] = [*listed]
    for each in kept:
        at = len(found)
        while at > 0 and found[at - 1][0] > each.step:
            at -= 1
        found.insert(at, (each.step, each))
    return found


def live_checkpointers() -> list[Checkpointer]:
    """Return the open Checkpointers of this process."""
    return [each for each in _live if not each._closed]


def _before_writes(training: Training, protect: Any) -> list[Any]:
    """Call `protect` before each optimizer step and each other write of the engine. Return the hooks' handles."""
    replicas = [replica for engine in engines_of(training.model) if engine.made for replica in engine.replicas]
    return [
        *(stepping_optimizer(each).register_step_pre_hook(protect) for each in members_of(training.optimizer)),
        *(replica.access.register_before_writes(protect) for replica in replicas),
    ]


@functools.cache
def _register_exit() -> None:
    """Register after the communicators' exit function: atexit runs in reverse order, and a save needs its peers."""
    atexit.register(_finish_all)


@contextlib.contextmanager
def failures_logged() -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        logger.warning("the last save failed: %s", error)


def _finish_all() -> None:
    for each in live_checkpointers():
        if each._owner_pid == os.getpid():
            with failures_logged():
                each._close(each._writer.wait_alone)


def _finish(pid: int, writer: Writer, held: contextlib.ExitStack) -> None:
    """Finish the running save of a Checkpointer that was garbage-collected."""
    if os.getpid() == pid:
        with failures_logged():
            writer.wait_alone()
        held.close()


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _is_finite(metric: Any) -> bool:
    try:
        return metric is None or math.isfinite(metric)
    except Exception:  # not a number, or too large for a float
        return False
