"""The live state of ranks that have whole parameters (zero=0): the newest step that can be whole, without a copy of it.

Parameters and the optimizer's state change in optimizer.step() alone. So after a broken step they are still those of the step before
it, on each rank that has not begun to step; on one that has called save() since, they are those of this step. What else a step
changes is small, and is copied as it ends: buffers, generators of random numbers, schedulers, `user_state`.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch

from ..formats import tree
from ..parallel.engine import Engine
from ..torch_compat.optimizers import takes_hooks
from ..torch_compat.weak import weakly
from .joined import members_of
from .peers import Peers
from .restore.fitting import STATEFUL
from .state.content import load_stateful, random_state, set_random_state, stateful_tree
from .state.optimizer_extras import stepping_optimizer
from .training import Training

#: bytes of tensors that are copied in each step; with more, steps in memory or on disk are taken
_MOST_BYTES = 1 << 20
_KEPT = (*STATEFUL, "dataloader")
#: the number of a rank that was a spare, and has no state
NEW = -2


class Live:
    """This rank's live state, an observer of its Checkpointer's saves. `number`: of the next step; -1: unknown; NEW: none"""

    def __init__(self, training: Training, engines: Sequence[Engine]) -> None:
        self._training, self._engines = training, engines
        self._optimizers = members_of(training.optimizer)
        steppers = [stepping_optimizer(each) for each in self._optimizers]
        self.number = -1
        self.is_possible = (
            bool(engines)
            and all(
                not each.options.stage and each.options.compress is None and each.precision is None for each in engines
            )
            and all(takes_hooks(each) for each in steppers)
            and all(type(each).get_extra_state is torch.nn.Module.get_extra_state for each in training.model.modules())
        )
        self._rest: tuple[dict[str, Any], dict[str, torch.Tensor]] = {}, {}
        self._rest_of = -1
        self._buffers: list[torch.Tensor] = []
        self._generators: dict[str, Any] = {}
        self._hooks = [each.register_step_pre_hook(weakly(self._before_step)) for each in steppers if self.is_possible]

    def close(self) -> None:
        """Stop to watch the optimizers."""
        for each in self._hooks:
            each.remove()

    def _before_step(self, *_: Any) -> None:
        self.number = -1

    def on_save(self, step: int) -> None:
        """Take the state as it is for that of the step after `step`."""
        self.begin(step + 1)

    def on_restore(self, step: int) -> None:
        """Take the state as it is for that of `step`."""
        self.begin(step)

    def on_close(self) -> None:
        """Do nothing."""

    def begin(self, number: int) -> None:
        """Take the state as it is for that of step `number`: copy what is small. No effect if it is known."""
        if not self.is_possible or self.number == number:
            return
        tensors: dict[str, torch.Tensor] = {}
        nodes = {name: stateful_tree(getattr(self._training, name), name, tensors) for name in _KEPT}
        buffers = list(self._training.model.buffers())
        if sum(each.nbytes for each in (*tensors.values(), *buffers)) > _MOST_BYTES:
            self.is_possible, self.number = False, -1
            return
        tensors = {name: each.clone() for name, each in tensors.items()}
        nodes["random"] = random_state(tensors, self._generators)
        self._rest, self._buffers = (nodes, tensors), [each.clone() for each in buffers]
        self.number = self._rest_of = number

    def take(self, peers: Peers, *, serves_new: bool) -> int | None:
        """Make the newest live state that of all ranks. Return the number of the next step; None if no rank has one. Collective.

        `serves_new`: also if some rank is new; else None is returned then.
        """
        numbers = peers.exchange(self.number if self.is_possible or self.number == NEW else -1, "live states")
        newest = max(numbers)
        if newest < 0 or (NEW in numbers and not serves_new):
            return None
        with torch.no_grad():
            if newest in (
                self.number,
                self._rest_of,
            ):  # the latter: in its optimizer's step, which others have not begun
                self._take_back(_KEPT)
            if min(numbers) < newest:
                self._spread(peers, numbers.index(newest), newest)
        return newest

    def _take_back(self, names: Sequence[str]) -> None:
        nodes, tensors = self._rest
        tensors = {name: each.clone() for name, each in tensors.items()}
        for name in names:
            if nodes[name] is not None:
                load_stateful(getattr(self._training, name), tree.decode(nodes[name], tensors))
        set_random_state(tree.decode(nodes["random"], tensors))
        for live, kept in zip(self._training.model.buffers(), self._buffers):
            live.copy_(kept)

    def _spread(self, peers: Peers, root: int, newest: int) -> None:
        """Give the state of rank `root` to those that are a step behind. Collective."""
        for engine in self._engines:
            for replica in engine.replicas:
                replica.broadcast_state(root, engine.note_buffers().values())
        sent = b""
        if peers.rank == root:
            tensors: dict[str, torch.Tensor] = {}
            nodes = [
                tree.encode(each.state_dict(), f"optimizer.{n}", tensors) for n, each in enumerate(self._optimizers)
            ]
            nodes.append({name: self._rest[0][name] for name in STATEFUL})
            file = io.BytesIO()
            torch.save({**tensors, **self._rest[1]}, file)
            text = tree.dumps(nodes)
            sent = len(text).to_bytes(8, "little") + text + file.getvalue()
        data = peers.broadcast(sent, "a live state", root)
        if self.number == newest:
            return
        end = 8 + int.from_bytes(data[:8], "little")
        loaded = torch.load(io.BytesIO(data[end:]), weights_only=True)
        *of_optimizers, rest = tree.loads(data[8:end])
        for optimizer, node in zip(self._optimizers, of_optimizers):
            optimizer.load_state_dict(tree.decode(node, loaded))
        for name in STATEFUL:
            if rest[name] is not None:
                load_stateful(getattr(self._training, name), tree.decode(rest[name], loaded))
        self.begin(newest)
