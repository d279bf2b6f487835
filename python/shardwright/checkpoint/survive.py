"""Training that goes on in the same processes when a rank is lost. docs/design/in_place.md has the design.

for step in sw.steps(checkpoints, 1000, min_ranks=2):
    with step:
        loss(model(x), y).backward()
        optimizer.step()
        checkpoints.save(step, every=100)
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from .._engine import CommTimeoutError, Error
from ..comm import spares as waiting
from ..comm.board import ATTEMPTS, Member, own_member
from ..comm.failures import reports_peer
from ..comm.process_group import abort_all
from ..comm.regroup import Finished, Regroup
from ..optim.sharded import ShardedOptimizer
from ..options.checks import count
from ..torch_compat.internals import group_timeout
from .checkpointer import Checkpointer, failures_logged
from .joined import averaging, engines_of, members_of, sharded_of
from .live import NEW, Live
from .state.content import seed_anew

__all__ = ["Step", "steps", "survive"]

_logger = logging.getLogger("shardwright")
_Result = TypeVar("_Result")
#: seconds that the ranks which are left wait for a living one that does not come
_WAIT_S = 60.0
#: seconds within which a process that has closed its connections has ended
_SEEN_S = 1.0
#: recoveries in which no rank was lost and no step ended, one after another, before their error is raised
_TRIES = 3
#: the number of no step: train() has returned on all ranks
_ENDED = -1


class Step(int):
    """The number of a step, and the context of its body: an error that reports a lost rank ends the body, and not the loop."""

    _job: _Job
    is_entered = is_over = False

    def __enter__(self) -> Step:
        self.is_entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.is_over = error is None
        return error is not None and self._job.is_lost(error)


def steps(
    checkpointer: Checkpointer, stop: int, *, min_ranks: int = 1, wait_s: float = _WAIT_S, spares: int = 0
) -> Iterator[Step]:
    """Yield the steps that are left up to `stop`. When a rank is lost, the others go on in the same processes.

    Parameters
    ----------
    checkpointer : Checkpointer
        Its model, optimizer and other state go on from the newest step that is whole. It restores before the first step, so the
        program does not. Give it memory_every=1, which loses one step at most; without it the disk's newest step is taken.
    stop : int
        The number of steps of the whole training: the first one that is not taken.
    min_ranks : int
        With fewer living ranks the job ends with an Error.
    wait_s : float
        Seconds in (0, 1e9] after which a living rank that has not come is left out, and killed on this host. Longer than the longest
        pause of one rank. So long the others wait for a lost host.
    spares : int
        For so many lost ranks the others wait, up to `wait_s`, until a spare takes the place: the number of ranks, and with it the
        bits, stay. A spare that waits already is taken in any case. Needs `shardwright rank`, which starts spares and restarts ranks.
        Spares serve the first loop of a program, and end with it.

    Yields
    ------
    Step
        An int. The body of the loop stands inside `with step:`.

    Raises
    ------
    Error
        Fewer than `min_ranks` ranks are left, no step is whole, or this rank came too late.
    ValueError
        A number out of range, or a module that cannot change its ranks: on a GPU, over a mesh or process group of its own, with
        groups= or offload=, or of fully_shard.

    Notes
    -----
    Collective. Returns once the last save is durable. torch's default group is made anew: dist.get_rank() and dist.get_world_size()
    change, and groups that the program made itself have ended. The body reads them, and sw.elastic.batches(), anew in each step.
    State that `checkpointer` does not hold, such as an iterator over data, is not taken back.

    A spare runs the same program as rank 0 of 1 up to here, and waits. It goes on with the step of the others once it has a rank's
    place, or ends with SystemExit(0) after their last step.
    """
    job = _Job(checkpointer, min_ranks, wait_s, spares)
    try:
        number = job.restore()
        while number < stop or (number := job.finish(stop)) < stop:
            job.live.begin(number)
            if job.grows(number):
                number = job.recover()
                continue
            step = Step(number)
            step._job = job
            yield step
            if not step.is_entered:
                raise Error("sw.steps: put the body of the loop inside `with step:`")
            number = number + 1 if step.is_over else job.recover()
    finally:
        job.close()


def survive(
    train: Callable[[int], _Result],
    checkpointer: Checkpointer,
    *,
    min_ranks: int = 1,
    wait_s: float = _WAIT_S,
    spares: int = 0,
) -> _Result:
    """Return train(step), called with the restored step; when a rank is lost the others call it again. Options as in steps().

    A spare takes a place when a rank is lost, and not between two steps: train() would have to return.
    """
    if not callable(train):
        raise TypeError(f"survive: train must be a function of a step, got {train!r}")
    job = _Job(checkpointer, min_ranks, wait_s, spares)
    try:
        number = job.restore()
        while True:
            try:
                result = train(number)
            except Exception as error:
                if not job.is_lost(error):
                    raise
                number = job.recover()
                continue
            if (number := job.finish(_ENDED)) == _ENDED:
                return result
    finally:
        job.close()


class _Job:
    """The ranks, engines and optimizers of one training in place."""

    def __init__(self, checkpointer: Checkpointer, min_ranks: int, wait_s: float, spares: int) -> None:
        if not hasattr(checkpointer, "_peers"):
            raise TypeError(f"checkpointer must be a sw.Checkpointer, got {type(checkpointer).__name__}")
        self._checkpointer, self._tries, self._number = checkpointer, _TRIES, -1
        peers, training = checkpointer._peers, checkpointer._training
        timeout = group_timeout(dist.group.WORLD)
        found = waiting.begin_loop(timeout.total_seconds())
        self._seeded = torch.get_rng_state()  # of a spare, as it takes a place
        size = peers.world_size if found is None else len(found.members)

        def check() -> tuple[dict[str, int], None]:
            count(1, size, f"a number of ranks in [1, {size}]")("min_ranks", min_ranks)
            count(0, size, f"a number of ranks in [0, {size}]")("spares", spares)
            if spares and waiting.START not in os.environ:
                raise ValueError(
                    f"spares={spares} needs `shardwright rank`, which starts them: nothing else has started this rank"
                )
            if isinstance(wait_s, bool) or not isinstance(wait_s, (int, float)) or not 0 < wait_s <= 1e9:
                raise ValueError(f"wait_s must be in (0, 1e9] seconds, got {wait_s!r}")
            if why := self._unmovable():
                raise ValueError(
                    f"sw.steps and sw.survive do not go on in the same processes with {why}: restart after a lost rank"
                )
            return {"min_ranks": min_ranks, "spares": spares}, None

        peers.agree(check, "sw.steps()")
        self._engines = engines_of(training.model)
        self._sliced = [(o, e) for o in sharded_of(training.optimizer) for e in self._engines if o.replica in e.made]
        plain = [each for each in members_of(training.optimizer) if not isinstance(each, ShardedOptimizer)]
        self._plain = [(each, engine) for engine in self._engines for each in plain]
        self.live = Live(training, self._engines)
        checkpointer._observers.append(self.live)
        own = -1 if found else peers.rank
        if found is None:
            folder = peers.first(self._make_folder, "the folder of attempts")
            members = [Member(*each) for each in peers.exchange(own_member(), "processes of ranks")]
            found = waiting.Job(folder, members, dist.get_backend(), timeout.total_seconds(), {})
            waiting.publish(found, own)
        awaited = spares if waiting.can_come() else 0
        limits: dict[str, Any] = {"least": min_ranks, "wait_s": wait_s, "awaited": awaited, "backend": found.backend}
        self._ranks = Regroup(found.folder, found.members, own, timeout=timedelta(seconds=found.timeout_s), **limits)

    def _make_folder(self) -> str:
        """Return a new folder of attempts, in place of earlier ones."""
        directory = self._checkpointer.directory
        for name in os.listdir(directory):
            if name.startswith(ATTEMPTS):
                shutil.rmtree(os.path.join(directory, name), ignore_errors=True)
        folder = os.path.join(directory, ATTEMPTS + secrets.token_hex(8))
        os.mkdir(folder, 0o700)
        return folder

    def _unmovable(self) -> str:
        """Return what cannot change its ranks, or ""."""
        checkpointer = self._checkpointer
        training, peers = checkpointer._training, checkpointer._peers
        why = ""
        if training.stages or any(isinstance(each, TorchDDP) for each in averaging(training.model)):
            why = "stages of a pipeline, and wrappers of torch's own"
        if peers.world_size > 1 and peers.group.torch_group is not dist.group.WORLD:
            why = "a process group of its own"
        for engine in engines_of(training.model):
            options, replicas = engine.options, engine.replicas
            names = ("groups", "offload", "device_mesh", "process_group")
            given: dict[str, Any] = {f"{name}=": getattr(options, name) for name in names}
            given["a module of fully_shard"] = any(each.has_rows for each in replicas)
            given["a GPU"] = any(each.link is not None for each in replicas)
            given["DTensors"] = any(each.model_ranks is not None for each in replicas)
            given["a communication hook"] = engine.options.compress is None and engine.comm_hooks
            given["a wrapper inside a wrapper"] = engine.inner or engine.is_around
            why = why or next((name for name, value in given.items() if value), "")
        if not waiting.is_waiting() and checkpointer._place.read_only:
            why = why or "a directory that cannot be written to"
        return why

    def is_lost(self, error: BaseException) -> bool:
        """Return True for an error of a lost rank: one that reports it, a wait that was too long, or any while one has ended."""
        if self._ranks.is_over or not isinstance(error, Exception):
            return False
        if not self._tries:
            return self._ranks.has_lost()
        until = time.monotonic() + (_SEEN_S if isinstance(error, RuntimeError) else 0.0)
        is_lost = isinstance(error, CommTimeoutError) or reports_peer(error, self._ranks.own) or self._ranks.has_lost()
        while not is_lost and time.monotonic() < until:  # torch's own error may come before the process has ended
            time.sleep(_SEEN_S / 20)
            is_lost = self._ranks.has_lost()
        return is_lost

    def grows(self, number: int) -> bool:
        """Return True, on all ranks before the same step, if a spare takes a free place now. A save under way is over then.

        That step is live, or was kept or saved last: else the spare waits for a save, since all would go back.
        """
        if not self._ranks.grows(number) or not (
            (self.live.is_possible and not self._keeps()) or self._checkpointer._newest == number
        ):
            return False
        with failures_logged():  # a rank that died meanwhile is left out by recover()
            self._checkpointer._wait()
        return True

    def restore(self) -> int:
        """Restore the newest whole step, and keep the first one in memory if no step was saved. Collective. A spare waits here."""
        if waiting.is_waiting():
            self.live.number = NEW
            try:
                number = self.recover()
            except Finished:
                waiting.end_loop("done")
                raise SystemExit(0) from None
            if torch.equal(torch.get_rng_state(), self._seeded):
                _logger.warning(
                    "rank %d is new in step %d and draws random numbers from a new seed", self._ranks.own, number
                )
            return number
        number, memory = self._checkpointer.restore(), self._checkpointer._memory
        # at zero=0 all are whole, and an image without the optimizer's state would be too small for the next step
        if not number and memory is not None and all(each.options.stage for each in self._engines):
            self._checkpointer._keep(0, memory)
        self._number = number
        return number

    def finish(self, ended: int) -> int:
        """Return `ended` once all ranks have ended their last step; else, as a rank was lost, the number of the next step."""
        number = self._finish(ended)
        if number == ended:
            waiting.end_loop()
        return number

    def _finish(self, ended: int) -> int:
        try:
            if not self._checkpointer._closed:  # a rank that is lost in the last save is survived, too
                self._checkpointer._wait()
            self._checkpointer._peers.exchange("", "the end of the last step")
        except Exception as error:
            if not self.is_lost(error):
                raise
        else:
            self._ranks.finish()
            return ended
        try:
            return self.recover()
        except Finished:
            return ended

    def recover(self) -> int:
        """Go on with the ranks that are left. Return the number of the next step."""
        while True:
            before, own, attempt = self._ranks.members, self._ranks.own, self._ranks.attempt
            try:
                number = self._go_on()
                break
            except Exception as error:
                self._count(self._ranks.members != before or bool(self._ranks.dead()))
                if not self.is_lost(error) or self._ranks.attempt == attempt or not self._tries:
                    raise
                _logger.warning("a rank was lost while others went on in place, and they begin again: %s", error)
        self._count(self._ranks.members != before or number > self._number)
        self._number = number
        if self._ranks.own == 0:
            new = sum(each not in before for each in self._ranks.members)
            _logger.warning(
                "%d of %d ranks are left, %d spares take a place, and they go on in place with step %d (rank 0 was rank %d)",
                *(len(self._ranks.members) - new, len(before), new, number, own),
            )
        return number

    def _count(self, is_news: bool) -> None:
        self._tries = _TRIES if is_news else self._tries - 1

    def _go_on(self) -> int:
        abort_all(f"rank {self._ranks.own} heard of a lost rank")
        try:
            self._ranks.meet()  # first: it ends a stopped rank, whose commit of a save the others would await
        finally:
            self._checkpointer._leave()
            for each in self._engines:
                each.leave()
        if waiting.is_waiting():
            waiting.seat()
            # stays where the step has no generators for this seat: else they were those of rank 0, which this process has been
            seed_anew(f"attempt {self._ranks.attempt} rank {self._ranks.own}")
            self._seeded = torch.get_rng_state()
        self._ranks.make_group()
        for each in self._engines:
            each.replicas  # noqa: B018, makes them
        for optimizer, engine in self._sliced:
            optimizer.follow(engine.replicas)
        for optimizer, engine in self._plain:
            engine.replica.steppers.add_plain(optimizer)
        checkpointer = self._checkpointer
        checkpointer._come_back()
        checkpointer._observers.append(self.live)
        number = self.live.take(checkpointer._peers, serves_new=not self._keeps())
        if number is not None:
            checkpointer._go_on_from_live()
        else:
            number, memory = checkpointer.restore(), checkpointer._memory
            if not number and (memory is None or not memory.has_step):
                raise Error("no step is whole in memory or on disk, so the ranks that are left cannot go on")
        checkpointer._save_again(number)
        return number

    def _keeps(self) -> bool:
        """Return True if a new rank needs a kept step, for the generators and the position in data of its seat."""
        return self._checkpointer._memory_every == 1 or self._checkpointer._training.dataloader is not None

    def close(self) -> None:
        """Stop to watch the steps. The folder of attempts stays until the next start: a rank may still hear of a loss."""
        self.live.close()
        with contextlib.suppress(ValueError):
            self._checkpointer._observers.remove(self.live)
