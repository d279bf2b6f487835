"""One save after another: what is saved, under which nonce, and how its outcome comes back."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import secrets
import time
from collections.abc import Sequence
from typing import Any

import torch

from .._engine import CheckpointError, CheckpointSaver, Error
from ..optim.sharded import ShardedOptimizer
from . import tree
from .content import Content, Group, model_group, optimizer_content, random_state, stateful_tree
from .cuts import CutExchange
from .device_staging import DeviceStaging
from .names import ModelTensors, check_wrappers, model_tensors
from .optimizer_extras import bare_optimizer, check_inside, unseen_attributes
from .peers import Peers, averages_gradients, has_passing_parameters, whole_parameters
from .samples import Samples, check_alike, digest, take_samples
from .slices import Sliced, describe_state, is_sliced, sliced_state

logger = logging.getLogger("shardwright")
_POLL_S, _ROUND_S = 0.1, 0.5
_GRACE_S = 5.0
_BASE36 = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclasses.dataclass
class Training:
    """Everything that a checkpoint holds. `extra` is a tree of plain values and tensors."""

    model: torch.nn.Module
    optimizer: Any = None
    scheduler: Any = None
    scaler: Any = None
    dataloader: Any = None
    user_state: Any = None
    extra: Any = None

    def __post_init__(self) -> None:
        from ..optim.diloco import DiLoCo

        if isinstance(self.optimizer, DiLoCo):
            raise ValueError(
                "optimizer is a DiLoCo, whose ranks differ between exchanges: save after its synchronise(), with the DiLoCo in "
                "user_state={'trainer': ...}, which any number of ranks takes back, and in dataloader=[...], which holds each "
                "rank's own"
            )
        self.optimizer = bare_optimizer(self.optimizer)
        if not isinstance(self.model, torch.nn.Module):
            raise ValueError(f"model must be a torch.nn.Module, got a {type(self.model).__name__}")
        check_wrappers(self.model)
        if not (self.optimizer is None or hasattr(self.optimizer, "param_groups")):
            raise ValueError(
                f"optimizer must be one torch.optim.Optimizer, got a {type(self.optimizer).__name__}: pass the others in user_state={{...}}"
            )
        user_state = self.user_state.values() if isinstance(self.user_state, dict) else (self.user_state,)
        if any(isinstance(each, DiLoCo) and each.is_sliced for each in user_state):
            raise ValueError(
                "user_state, which is rank 0's, has a DiLoCo over a mesh, and this DiLoCo keeps slices of each rank's own: pass it in "
                "dataloader=[...], and give each replica a folder of its own"
            )


#: tensors, buffers unlike rank 0's, content, plan, sources, the tree of optimizer.json
_Parts = tuple[ModelTensors, dict[str, torch.Tensor], Content, Any, list[Any], dict[str, Any] | None]


class Writer:
    """This rank's part in saves. One at a time; save() is a collective call.

    Collective when it is made: the nonce is agreed on, and the page through which failures are told. `board`: the path of
    the file that holds it where ranks are on several hosts.
    """

    def __init__(
        self,
        peers: Peers,
        board: str,
        *,
        threads: int,
        direct: bool,
        bandwidth: int,
        timeout_s: float,
        max_file_bytes: int,
    ) -> None:
        self._peers = peers
        self._timeout_s = timeout_s
        self._max_file_bytes = max_file_bytes
        self._nonce_prefix = peers.exchange(secrets.token_hex(12), "nonce of checkpoints")[0]
        self._number = 0
        self._held: Content | None = None
        self._spoiled = ""  # why the save that begins may not go on
        self._versions: list[tuple[str, torch.Tensor, int]] = []
        self._staging = DeviceStaging()
        self._cuts = CutExchange(peers)
        self._received_bytes = 0
        self._warned: set[str] = set()
        self._board = board
        self._saver = CheckpointSaver(
            peers.rank,
            peers.world_size,
            peers.board(board, self._nonce_prefix),
            threads=threads,
            direct=direct,
            bandwidth=bandwidth,
        )
        peers.check_board(board, self._nonce_prefix)

    def begin(
        self,
        folder: str,
        step: int,
        training: Training,
        *,
        lazy: bool = False,
        metric: float | None = None,
        stale: Sequence[str] = (),
        retired: Sequence[str] = (),
        replaces: str | None = None,
    ) -> None:
        """Takes the snapshot and returns. Every rank calls it, or skip(), at the same steps.

        `replaces`: on rank 0, CheckpointFolder.identity(folder) when the save began; a folder with another identity fails
        the commit. None for a caller whose lock on the directory keeps other saves away.

        Raises
        ------
        CheckpointError
            What is wrong on this rank. The other ranks hear of it at their next save() or wait().
        """
        try:
            self._peers.renew_board(self._board, self._nonce_prefix)
        except CheckpointError as error:
            self.skip(str(error), training)
            raise
        self._number += 1
        try:
            with whole_parameters(training.model, writable=False):
                self._begin(folder, step, training, lazy, metric, stale, retired, replaces)
        except BaseException as error:
            self._give_up(_tellable(str(error) or type(error).__name__))
            if isinstance(error, (CheckpointError, KeyboardInterrupt, SystemExit)):
                raise
            raise CheckpointError(f"'{folder}' could not be saved: {type(error).__name__}: {error}") from error

    def _give_up(self, reason: str) -> None:
        """The save that is being begun: its threads may run already, and read memory that is held for them."""
        if self.is_busy:
            self._saver.cancel(reason)
            with contextlib.suppress(CheckpointError, MemoryError):  # the error on its way is the one to hear of
                self.wait_alone()
        else:
            self._saver.fail(self._number, reason)
        self._held, self._versions = None, []

    def skip(self, reason: str, training: Training) -> None:
        """This rank begins no save, which the others may: it then fails for all. It takes part first in what they exchange."""
        self._number += 1
        with contextlib.suppress(Exception), whole_parameters(training.model, writable=False):  # what is told matters
            if is_sliced(training.model, training.optimizer):
                self._sliced_parts(training, refusal=reason)
            else:
                self._look_together(training, refusal=reason)
        self._saver.fail(self._number, _tellable(reason))

    def _begin(
        self,
        folder: str,
        step: int,
        training: Training,
        lazy: bool,
        metric: float | None,
        stale: Sequence[str],
        retired: Sequence[str],
        replaces: str | None,
    ) -> None:
        if is_sliced(training.model, training.optimizer):
            parts = self._sliced_parts(training)
        else:
            parts = self._whole_parts(training)
        found, divergent, shared, plan, sources, optimizer_tree = parts
        own = self._own_content(training, divergent)
        if self._peers.rank == 0:
            _add_rank0_content(own, training, found, step, plan, optimizer_tree)
        self._held, self._spoiled = shared if lazy else None, ""
        self._saver.begin(
            folder=folder,
            nonce=self._nonce_prefix + _base36(self._number),
            replaces=replaces,
            number=self._number,
            step=step,
            metric=metric,
            shared=plan,
            shared_sources=sources,
            own=own.plan(),
            own_sources=own.sources(),
            lazy=lazy,
            stale=list(stale),
            retired=list(retired),
            timeout_s=self._timeout_s,
            device=self._staging.for_saver(),
        )
        if self._spoiled:
            self._saver.cancel(_tellable(self._spoiled))
        if lazy:
            live = [(n, t) for g in shared.groups for n, t in g.tensors.items() if n not in g.eager]
            watched = [(n, each) for n, t in live for each in (t.live if isinstance(t, Sliced) else (t,))]
            self._versions = [(n, each, each._version) for n, each in watched if not self._staging.takes(each)]

    def _whole_parts(self, training: Training) -> _Parts:
        """Of a training whose ranks hold everything. Each then waits for nobody."""
        found, divergent = self._look_together(training)
        shared, optimizer_tree = self._shared_content(training, found, None)
        plan = shared.plan()
        sources = shared.sources(plan.needed(self._peers.rank, self._peers.world_size))
        return found, divergent, shared, plan, sources, optimizer_tree

    def _sliced_parts(self, training: Training, refusal: str = "") -> _Parts:
        """Of one that is spread over ranks. Three exchanges, in which a rank takes part whatever goes wrong on it; `refusal`:
        what has gone wrong on this one before."""
        optimizer = training.optimizer
        looked: list[tuple[ModelTensors, dict[str, torch.Tensor]]] = []
        made: list[tuple[Content, Any, dict[str, Any] | None]] = []
        tables: list[dict[str, str]] = []
        failure: Exception | None = None
        try:
            looked.append(self._look_together(training, refusal=refusal))
        except Exception as error:
            failure = error

        def describe() -> dict[str, str]:
            if failure is not None:
                raise failure
            return describe_state(optimizer) if isinstance(optimizer, ShardedOptimizer) else {}

        tables += self._peers.together(describe, "optimizer state of a checkpoint")

        def plan_all() -> int:
            states = sliced_state(optimizer, tables) if isinstance(optimizer, ShardedOptimizer) else None
            content, optimizer_tree = self._shared_content(training, looked[0][0], states)
            content.slice_tensors()
            made.append((content, content.plan(), optimizer_tree))
            return 0

        self._peers.together(plan_all, "plan of a checkpoint")
        content, plan, optimizer_tree = made[0]
        sources = content.slice_sources(plan, self._peers, self._cuts)
        self._received_bytes = content.received_bytes
        sources += content.sources(plan.needed(self._peers.rank, self._peers.world_size))
        return *looked[0], content, plan, sorted(sources), optimizer_tree

    def _shared_content(
        self, training: Training, found: ModelTensors, states: Any
    ) -> tuple[Content, dict[str, Any] | None]:
        model = model_group(found, self._max_file_bytes)
        if has_passing_parameters(training.model):  # a lazy snapshot would read them too late
            model.eager = frozenset(model.tensors)
        shared = Content([model], self._staging)
        if training.optimizer is None:
            return shared, None
        self._look_for_more(training)
        group, optimizer_tree = optimizer_content(training.optimizer, found, self._max_file_bytes, states)
        shared.groups.append(group)
        return shared, optimizer_tree

    def _look_for_more(self, training: Training) -> None:
        """Raises CheckpointError for state of the optimizer that no checkpoint would have, and warns of what may be some."""
        check_inside(training.optimizer, training.user_state, training.extra)
        for name in unseen_attributes(training.optimizer):
            if name not in self._warned:
                self._warned.add(name)
                logger.warning(
                    "the optimizer has tensors in its attribute '%s', which neither its state nor its state_dict() has: if that is state, "
                    "no checkpoint holds it",
                    name,
                )

    def _look_together(self, training: Training, refusal: str = "") -> tuple[ModelTensors, dict[str, torch.Tensor]]:
        """The model's tensors, and this rank's buffers whose bytes are not rank 0's, which are the model's. CheckpointError on every
        rank for another tensor whose sample is not alike on all of them, of a model whose gradients nobody is known to average.

        Collective; a rank whose own part goes wrong, or has gone wrong before (`refusal`), takes part before it raises.
        """
        found, checksums, failure = None, None, None
        samples: Samples = {}
        try:
            if refusal:
                raise CheckpointError(refusal)
            found = model_tensors(training.model)
            if self._peers.world_size > 1:
                is_whole = not is_sliced(training.model, training.optimizer)
                samples = take_samples(found, training.optimizer if is_whole else None)
                checksums = self._staging.checksums(found.buffers)
        except Exception as error:
            failure = error
        first: dict[str, int] | None = None
        if self._peers.world_size > 1:
            mine = [None, None] if checksums is None else [checksums, digest(samples)]
            answers = self._peers.exchange(mine, "what ranks hold alike")
            first = answers[0][0]
            if len({theirs for _, theirs in answers if theirs is not None}) > 1:
                everyones = self._peers.exchange(samples, "what ranks hold apart")
                if failure is None:
                    check_alike(everyones, is_averaged=averages_gradients(training.model))
        if failure is not None:
            raise failure
        assert found is not None
        if first is None or checksums is None:  # one rank; or rank 0 has none: its save has failed already
            return found, {}
        return found, {name: found.buffers[name] for name, crc in checksums.items() if first.get(name) != crc}

    def _own_content(self, training: Training, divergent: dict[str, torch.Tensor]) -> Content:
        stem = f"ranks/{self._peers.rank:05d}"
        tensors: dict[str, torch.Tensor] = {}
        body = {
            "random": random_state(tensors),
            "dataloader": stateful_tree(training.dataloader, "dataloader", tensors),
            "compressor": tree.encode(_compressor_state(training.model), "compressor", tensors),
            "buffers": {name: tree.encode(value, f"buffer.{name}", tensors) for name, value in divergent.items()},
        }
        content = Content([Group(stem, tensors, {"format": "pt"})], self._staging)
        content.texts[f"{stem}.json"] = tree.dumps(body)
        return content

    # outcome ----------------------------------------------------------------------------------------------------------

    def protect(self) -> None:
        """Copies what a lazy snapshot has not read yet: before anything writes to it. Raises nothing: wait() does."""
        if self._held is None:
            return
        try:
            self._cancel_if_changed()
            self._saver.protect()
            self._held = None
        except (CheckpointError, MemoryError) as error:
            logger.warning("the save under way failed: %s", error)
            self._spoiled = f"the optimizer stepped, and what it overwrites could not be copied: {error}"
            self._saver.cancel(_tellable(self._spoiled))  # which may be another thread's, that is beginning it

    def _cancel_if_changed(self) -> None:
        """A lazy save of what something other than the optimizer's step has written to may hold values of two moments."""
        changed = next((name for name, tensor, version in self._versions if tensor._version != version), None)
        self._versions = []
        if changed is not None and self.is_busy:
            self._saver.cancel(
                f"'{changed}' was changed before the optimizer's step, while it was being saved: use snapshot='copy'"
            )
        elif changed is not None:
            logger.warning(
                "'%s' was changed by something other than the optimizer's step since the last save with snapshot='lazy' began. The save has "
                "ended meanwhile; if that was while it read, it holds values of two moments: use snapshot='copy', or wait() before the change",
                changed,
            )

    @property
    def is_busy(self) -> bool:
        return bool(self._saver.progress()["busy"])

    def wait(self) -> None:
        """Until no save runs. Collective over several hosts, whose ranks see only then that one of them has died.

        Raises
        ------
        CheckpointError
            The save failed, on whatever rank: the same sentence on all. Once a save.
        """
        self._cancel_if_changed()
        failure: CheckpointError | None = None
        over, everyone = False, [False]
        while self._peers.has_hosts and not all(everyone):
            try:
                over = over or self._saver.wait(_ROUND_S)
            except CheckpointError as error:
                over, failure = True, error
            try:
                everyone = self._peers.exchange(over, "waiting for a checkpoint")
            except Error:  # a rank died, or came with something else: the verdict may be on its way
                break
        if failure is not None:
            raise failure
        self.wait_alone()

    def wait_alone(self) -> None:
        """As wait(), whatever the other ranks do."""
        lost_at: float | None = None
        while not self._saver.wait(_POLL_S):
            if lost_at is None and not self._peers.is_alive:
                lost_at = time.monotonic()
            if lost_at is not None and time.monotonic() - lost_at > _GRACE_S:  # a verdict on its way may still come
                self._saver.cancel("another rank failed or left while the checkpoint was written")
        self._held = None

    def progress(self) -> dict[str, int]:
        device_bytes = self._staging.stats().get("bytes_down", 0)
        return {**self._saver.progress(), "received_bytes": self._received_bytes, "device_bytes": device_bytes}

    def spare(self) -> list[tuple[int, int]]:
        """(address, nbytes) of memory that is anybody's until the next save."""
        return self._saver.spare()

    def close(self) -> None:
        """Gives up what runs. wait() first."""
        self._held = None
        self._saver.close()
        self._cuts.close()
        self._staging.close()


def _compressor_state(model: Any) -> dict[str, Any] | None:
    """What a compressor of `model` remembers on this rank; None if there is none."""
    state = getattr(getattr(model, "_orig_mod", model), "compression_state", None)
    return None if state is None else state.state_dict()


def _add_rank0_content(
    own: Content, training: Training, found: ModelTensors, step: int, plan: Any, optimizer_tree: dict[str, Any] | None
) -> None:
    tensors: dict[str, torch.Tensor] = {}
    body = {
        "step": step,
        "scheduler": stateful_tree(training.scheduler, "scheduler", tensors),
        "scaler": stateful_tree(training.scaler, "scaler", tensors),
        "user_state": stateful_tree(training.user_state, "user_state", tensors),
        "model_extra_state": {
            n: tree.encode(m.get_extra_state(), f"model.{n}", tensors) for n, m in found.extras.items()
        },
        "extra": tree.encode(training.extra, "extra", tensors),
    }
    own.groups.append(Group("state", tensors, {"format": "pt"}))
    own.texts["state.json"] = tree.dumps(body)
    if optimizer_tree is not None:
        own.texts["optimizer.json"] = tree.dumps(optimizer_tree)
    index = _model_index(plan, list(found.all()))
    if index:
        own.texts["model.safetensors.index.json"] = index


def _model_index(plan: Any, names: Sequence[str]) -> bytes:
    """The index of several model files, as transformers writes it; nothing for one file."""
    files = [(path, pieces) for path, _, pieces in plan.files() if path.startswith("model")]
    if len(files) < 2:
        return b""
    weight_map = {names[source]: path for path, pieces in files for source, _, _ in pieces}
    total = sum(size for _, pieces in files for _, _, size in pieces)
    return (
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
    ).encode()


def _tellable(reason: str) -> str:
    """What the engine takes: a message may quote a name that is no UTF-8."""
    return reason.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


def _base36(number: int) -> str:
    digits = ""
    while True:
        number, digit = divmod(number, 36)
        digits = _BASE36[digit] + digits
        if not number:
            return "n" + digits
