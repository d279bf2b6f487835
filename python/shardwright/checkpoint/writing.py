"""Writer: one rank's part in a series of saves, from its inventory to the outcome."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from .._engine import CheckpointError, CheckpointSaver, CommError, Error, account_slept
from ..comm.failures import PEER_LOST
from ..comm.waits import Wait
from .device_staging import DeviceStaging
from .folder.partial import is_abandoned
from .inventory import Inventory, Listed
from .memory.local import LocalTier
from .memory.tier import MemoryTier
from .peers import Peers, os_error
from .slices import Sliced, held_bytes, loads_slices
from .training import Training

logger = logging.getLogger("shardwright")
_POLL_S, _ROUND_S = 0.1, 0.5
#: seconds for which a save goes on after a rank was lost: its outcome may still arrive; or cannot, as far as this rank knows
_GRACE_S, _HURRIED_S = 5.0, 0.2
#: the same if a rank of another host was lost: its peers there report it, unless it was alone
_FAR_S = 0.5
_BASE36 = "0123456789abcdefghijklmnopqrstuvwxyz"
#: limit of the names kept for messages; beyond it a lazy save reports a changed tensor by its position in a file
_NAMES_KEPT_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class Target:
    """The folder of a save; on rank 0 also the existing folder's identity, remains, and folders to retire."""

    folder: str
    replaces: str = ""
    stale: list[str] = dataclasses.field(default_factory=list)
    retired: list[str] = dataclasses.field(default_factory=list)


class Writer:
    """A rank's part in saves, one at a time. `nonce`: rank 0's new_nonce(). `board`: a file of its own for hosts' reports."""

    def __init__(
        self,
        peers: Peers,
        nonce: str,
        board: str | None,
        *,
        threads: int,
        direct: bool,
        idle_io: bool = False,
        bandwidth: int,
        timeout_s: float,
        max_file_bytes: int,
        inventory: Callable[[Peers, DeviceStaging, int], Inventory] = Inventory,
    ) -> None:
        self._peers = peers
        self._timeout_s = timeout_s
        self._nonce_prefix = nonce
        self._number = self._kept = 0
        self._held: object = None  # memory that a lazy save reads
        self._target = "", ""  # folder and nonce of the last save
        self._has_lost_host = False
        self._spoiled = ""  # the reason why the beginning save must be cancelled
        self._versions: list[tuple[str, torch.Tensor, int]] = []
        self._staging = DeviceStaging()
        self.inventory = inventory(peers, self._staging, max_file_bytes)
        self._board = board
        channel: tuple[Any, ...] = (0, 1)
        if board is not None:
            channel = (peers.rank, peers.world_size, *peers.channel(board, nonce))
        self._saver = CheckpointSaver(*channel, threads=threads, direct=direct, idle_io=idle_io, bandwidth=bandwidth)
        if board is not None:
            peers.check_board(board, nonce)

    def begin(
        self,
        target: Target,
        step: int,
        training: Training,
        *,
        lazy: bool = False,
        metric: float | None = None,
        local: LocalTier | None = None,
    ) -> None:
        """Take the snapshot and start writing. Every rank calls begin() or refuse() at the same steps.

        `local`, after is_due(): the snapshot is an image there, which is durable by itself."""
        assert self._board is not None
        try:
            self._peers.renew_board(self._board, self._nonce_prefix)
        except CheckpointError as error:
            self.refuse(error)
        self._number += 1
        listed: Listed | None = None
        try:
            with contextlib.ExitStack() as opened:
                listed = self.inventory.agree(training, step, opened)
                self._start(target, step, training, listed, lazy, metric, local)
        except BaseException as error:
            sentence = str(error)
            if not isinstance(error, CheckpointError):
                sentence = f"'{target.folder}' could not be saved: {type(error).__name__}: {error}"
            self._give_up(_tellable(sentence))
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            if listed is not None and self._peers.world_size > 1:  # the others raise it in their next save() or wait()
                sentence = f"rank {self._peers.rank}: {sentence}"
            elif isinstance(error, CheckpointError):
                raise
            raise os_error(sentence, getattr(error, "errno", None)) from error

    def _start(
        self,
        target: Target,
        step: int,
        training: Training,
        listed: Listed,
        lazy: bool,
        metric: float | None,
        local: LocalTier | None,
    ) -> None:
        sources, (own, own_sources) = self.inventory.sources(training, listed), self.inventory.own_sources(listed)
        self._target = target.folder, self._nonce_prefix + _base36(self._number)
        content: dict[str, Any] = {
            "shared": listed.plan, "shared_sources": sources, "own": own, "own_sources": own_sources, "device": self._staging.for_saver(),
        }  # fmt: skip
        share = functools.partial(self._share, training)
        image = None if local is None else local.put(step, self._target[1], self.inventory.layout, content, share)
        if image is not None and local is not None:
            content |= local.content_in(image, content)
        self._held, self._spoiled = listed.shared if lazy and image is None else None, ""
        listed.plan.trim(self._peers.rank, self._peers.world_size, _NAMES_KEPT_BYTES if lazy else 0)
        self._saver.begin(
            **vars(target), **content, nonce=self._target[1], number=self._number, step=step, metric=metric,
            lazy=lazy or image is not None, timeout_s=self._timeout_s,
        )  # fmt: skip
        if self._spoiled:
            self._saver.cancel(_tellable(self._spoiled))
        if self._held is not None:
            ahead, groups = listed.shared.ahead, listed.shared.groups
            groups = groups if ahead is None else [*ahead.groups, *groups]
            live = [(n, t) for g in groups for n, t in g.tensors.items() if n not in g.eager]
            watched = [(n, each) for n, t in live for each in (t.live if isinstance(t, Sliced) else (t,))]
            self._versions = [(n, each, each._version) for n, each in watched if not self._staging.takes(each)]

    def keep(self, step: int, training: Training, tier: MemoryTier, ready: Listed | None) -> None:
        """Copy this rank's share to `tier`, after tier.is_due(). `ready`: of inventory.repeat(), if all ranks have one."""
        self._kept += 1
        nonce, share = f"{self._nonce_prefix}m{_base36(self._kept)}", functools.partial(self._share, training)
        with contextlib.ExitStack() as opened:
            listed = ready or self.inventory.agree(training, step, opened)
            own, own_sources = self.inventory.own_sources(listed)
            sources = self.inventory.sources(training, listed) if listed.sources is None else listed.sources
            content = {"shared": listed.plan, "shared_sources": sources, "own": own, "own_sources": own_sources}
            tier.put(step, nonce, self.inventory.layout, {**content, "device": self._staging.for_saver()}, share)

    def _share(self, training: Training) -> tuple[int, bool]:
        """Return the bytes that this rank writes, and True if it reads only its slices at a restore."""
        return held_bytes(training.model, training.optimizer, self._peers.world_size), loads_slices(training.model)

    def _give_up(self, reason: str) -> None:
        """Abandon a save that is being started. Its threads may already read memory that this writer keeps alive."""
        if self.is_busy:
            self._saver.cancel(reason)
            with contextlib.suppress(CheckpointError, MemoryError):  # the caller raises the first error
                self.wait_alone()
        else:
            self._saver.fail(self._number, reason)
        self._held, self._versions = None, []

    def warm(self, training: Training, *, lazy: bool) -> None:
        """Fault in the staging memory of the first save, in the background and without communication."""
        nbytes = held_bytes(training.model, training.optimizer, self._peers.world_size)
        self._saver.warm(nbytes // 2 if lazy else nbytes)  # a lazy save writes most chunks from live memory

    def refuse(self, error: Exception) -> NoReturn:
        """Report a failure in the agreement, so that no rank begins this save. All ranks raise; see Peers.together()."""
        self._number += 1
        try:
            self.inventory.refuse(error)
        except CheckpointError:
            if isinstance(error, CheckpointError):
                raise
        except Exception as lost:  # the own error is the cause to report
            raise error from lost
        raise error

    def protect(self, *_: Any) -> None:
        """Copy what a lazy snapshot has not read yet, before a write to it. Never raises: wait() reports a failure."""
        if self._held is None:
            return
        try:
            self._cancel_if_changed()
            self._saver.protect()
            self._held = None
        except (CheckpointError, MemoryError) as error:
            logger.warning("the save under way failed: %s", error)
            self._spoiled = f"the state that optimizer.step() overwrites could not be copied: {error}"
            self._saver.cancel(_tellable(self._spoiled))  # another thread that is starting the save reads _spoiled

    def _cancel_if_changed(self) -> None:
        """Cancel a lazy save if anything but the optimizer's step wrote to its tensors: it may mix old and new."""
        changed = next((name for name, tensor, version in self._versions if tensor._version != version), None)
        self._versions = []
        if changed is not None and self.is_busy:
            self._saver.cancel(
                f"'{changed}' was changed before the optimizer's step, while it was being saved: use snapshot='copy'"
            )
        elif changed is not None:
            logger.warning(
                "'%s' was changed outside the optimizer's step since the last save with snapshot='lazy' began. That save has ended; if "
                "the change came before its end, it holds values of two moments: use snapshot='copy', or wait() before the change",
                changed,
            )

    @property
    def is_busy(self) -> bool:
        return bool(self._saver.progress()["busy"])

    def wait(self, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Wait until no save runs. Collective over several hosts, because only an exchange detects a dead rank there."""
        self._cancel_if_changed()
        failure: CheckpointError | None = None
        over, of_all = False, [False]
        while self._peers.has_hosts and not all(of_all):
            try:
                over = over or self._saver.wait(_ROUND_S)
            except CheckpointError as error:
                over, failure = True, error
            try:
                of_all = self._peers.exchange(over, "waiting for a checkpoint")
            except Error as error:  # a rank died or made a different collective call; the outcome may still arrive
                self._has_lost_host = type(error) is CommError and self._peers.dead_rank is None
                break
        if failure is not None:
            raise failure
        self.wait_alone(is_hurried)

    def wait_alone(self, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Wait as wait() does, without communication. `is_hurried`: a launcher is ending this rank: wait less for lost peers."""
        lost_at: float | None = None
        wait: Wait | None = None
        stopped_s = 0.0
        while not self._saver.wait(_POLL_S):
            if lost_at is None and not self._peers.is_alive:
                lost_at = time.monotonic()
            if lost_at is not None and time.monotonic() - lost_at > self._grace_s(is_hurried):
                reason = self._peers.end_reason
                self._saver.cancel(_tellable(f"{PEER_LOST} while the checkpoint was written{reason and ': ' + reason}"))
            unwritten = self._saver.unwritten()
            if self._peers.rank not in unwritten:  # it waits for others, and does not work any more
                wait = wait or self._peers.wait()
                wait.look(functools.partial(self._waits_for, unwritten))
                account_slept(_POLL_S, self._peers.global_ranks[unwritten[0] if unwritten else 0])
            stopped = self._peers.stopped(unwritten or [0]) if self._peers.silent_s else None
            stopped_s = 0.0 if stopped is None else stopped_s + _POLL_S
            # the save goes on: that rank may yet commit it
            if stopped is not None and stopped_s >= self._peers.silent_s:
                raise CheckpointError(
                    f"{PEER_LOST} while the checkpoint was written: rank {stopped} has been stopped for {stopped_s:.1f} s "
                    f"(silent_s={self._peers.silent_s:g})"
                )
        self._held = None

    def _grace_s(self, is_hurried: Callable[[], bool]) -> float:
        """Return how long to wait for an outcome after a peer was lost: briefly if none can come."""
        dead = self._peers.dead_rank  # before it had written, it takes the save with it; so does rank 0, which decides
        is_lost = dead is not None and (dead in self._saver.unwritten() or (dead == 0 and not self._peers.has_hosts))
        if is_lost or is_hurried() or is_abandoned(*self._target):
            return _HURRIED_S
        return _FAR_S if self._has_lost_host else _GRACE_S

    def _waits_for(self, unwritten: Sequence[int], waited_s: float) -> str:
        peers = self._peers
        awaited = f"{peers.names_of(unwritten)} to write" if unwritten else f"{peers.names_of([0])} to commit"
        if not unwritten and peers.has_hosts:
            awaited = "the other hosts to write, or for " + awaited
        return (
            f"rank {peers.rank} has waited {waited_s:.1f} s in the save to '{self._target[0]}' for {awaited}; "
            f"the deadline of the save is {self._timeout_s:g} s"
        )

    def progress(self) -> dict[str, int]:
        return {**self._saver.progress(), "device_bytes": self._staging.stats().get("bytes_down", 0)}

    def spare(self) -> list[tuple[int, int]]:
        """Return (address, nbytes) of staging memory that is free until the next save."""
        return self._saver.spare()

    def close(self) -> None:
        """Cancel a running save and free all memory. Call wait() first."""
        self._held = None
        self._saver.close()
        self._staging.close()


def new_nonce() -> str:
    return secrets.token_hex(12)


def _tellable(reason: str) -> str:
    """Return the reason as valid UTF-8 for the engine: it may quote a name that is not valid UTF-8."""
    return reason.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


def _base36(number: int) -> str:
    digits = _BASE36[number % 36]
    while number := number // 36:
        digits = _BASE36[number % 36] + digits
    return "n" + digits
