"""The optimizer in the backward (step_in_backward=True): each bucket is stepped on as its mean is complete, then forgotten.

docs/design/optim.md has the idea. A round's calls, in this order: begin() before the first gradient is sent, step_on() for each
bucket in index order, then finish(), or cancel() if it fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch

from .._engine import Error
from ..gradients.sharded_gradient import SteppedGradient
from ..layout.memory import trim
from ..parallel.agreement.optimizer_agreement import check_groups
from ..torch_compat.autograd import set_gradient, unguarded
from ..torch_compat.optimizers import bare_step, give_optimizer, hooks_around, optimizers_of, options_of, take_hooks
from .master_weights import masters_in_place
from .ownership import Entry
from .rules import is_elementwise, name_of
from .sharded import ShardedOptimizer

_UNLIKE = "ranks disagree about {}; no parameter has changed: step with the same values on every rank"
_LATE = (
    "{} was changed between backward() and step(), and step_in_backward=True has made the step in the backward: change it before the "
    "backward, or leave step_in_backward out"
)
_TWICE = (
    "with step_in_backward=True each backward is a step, so gradients do not accumulate over several: call optimizer.step() after "
    "each backward, or leave step_in_backward out"
)


def check_class(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer that cannot step on some of its parameters at a time."""
    name = name_of(optimizer)
    if not name.startswith(("torch.optim.", "shardwright.optim.")) or not is_elementwise(optimizer):
        raise ValueError(
            f"step_in_backward=True is for the elementwise optimizers of torch.optim and sw.optim, got {name}: another class may count its "
            "steps by calls, or need a whole tensor"
        )
    if any(hooks_around(optimizer, "step")):
        raise ValueError(
            f"step_in_backward=True: this {name} has step hooks, which would run once a bucket: register them on the optimizer that "
            "sw.wrap returns"
        )


def optimizer_of(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer | None:
    """Return one optimizer with the groups and the state of those of _apply_optimizer_in_backward; None if there are none."""
    pairs = [(p, each) for p in parameters for each in optimizers_of(p)]
    groups: list[dict[str, Any]] = []
    made: dict[str, tuple[Any, dict[str, Any]]] = {}
    for parameter, each in pairs:
        values = {key: value for key, value in each.param_groups[0].items() if key != "params"}
        others = {key: value for key, value in options_of(parameter).items() if key not in values}
        made[f"{name_of(each)}({', '.join(f'{key}={value}' for key, value in others.items())})"] = type(each), others
        group = next((one for one in groups if {**one, "params": 0} == {**values, "params": 0}), None)
        if group is None:
            groups.append(group := {**values, "params": []})
        group["params"].append(parameter)
    if not pairs:
        return None
    if len(made) > 1 or len(pairs) > len({id(p) for p, _ in pairs}):
        raise ValueError(
            "step_in_backward=True takes one class of optimizer from _apply_optimizer_in_backward, and one optimizer for each parameter; got "
            f"{len(pairs)} of {' and '.join(made)}: pass sw.wrap one optimizer of all parameters"
        )
    kind, others = next(iter(made.values()))
    optimizer: torch.optim.Optimizer = kind(groups, **others)
    optimizer.state.update((p, each.state[p]) for p, each in pairs if each.state.get(p))
    return optimizer


class _TakenOver(list[Any]):
    """The groups of an optimizer that another one has replaced: a rate that is set there, also by a scheduler, would change nothing."""

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError(
            "this optimizer of _apply_optimizer_in_backward was taken over by sw.wrap(step_in_backward=True): read and set groups of "
            "parameter._in_backward_optimizers[0], and give that one to schedulers"
        )

    __iter__ = __getitem__ = __len__ = __reversed__ = _refuse


class BackwardOptimizer(ShardedOptimizer):
    """The optimizer that `sw.wrap(module, optimizer, step_in_backward=True)` returns: step() finds its work done."""

    _buckets: dict[int, list[list[Entry]]]
    _members_were: Sequence[Sequence[int]] = ()
    #: True from the end of a round to step()
    has_stepped = False
    #: True if the end of a round calls step(), as after _apply_optimizer_in_backward
    has_taken_over = False
    _digest = 0

    def __init__(self, *given: Any) -> None:
        self._changes = contextlib.ExitStack()
        super().__init__(*given)
        self._attach()

    def _attach(self) -> None:
        self.replica.steppers.unlike_steps = _UNLIKE
        self.replica.gradients.step_by(self)

    def take_over(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take the place of the optimizers of optimizer_of(), whose hooks would step on this rank's gradient alone."""
        taken = [p for p in parameters if optimizers_of(p)]
        take_hooks(taken)
        for each in taken:
            for old in optimizers_of(each):
                old.param_groups = _TakenOver()
            give_optimizer(each, self)
        self.has_taken_over = True

    def follow(self, replicas: Any) -> None:
        super().follow(replicas)
        self._members_were, self.has_stepped = (), False
        self._attach()

    def begin(self) -> None:
        """Begin a round, and let its first bucket carry the digest of what this rank steps with."""
        if self.has_stepped:
            raise Error(_TWICE)
        check_groups(self, self._inner)
        replica, members = self.replica, [[id(p) for p in group["params"]] for group in self.param_groups]
        if members != self._members_were:
            self._members_were, self._buckets = members, self._by_bucket()
        replica.access.before_writes()
        if getattr(self._inner, "state_dtype", None) is not None:
            vars(self._inner).update(origins=self._origins())
        if replica.access.shows_writes:
            self._changes.enter_context(replica.access)
        self._changes.enter_context(replica.access.writing())
        if replica.zero == 3:
            replica.parameters().take_writes()
        self._digest = replica.steppers.note(self)
        if replica.group.world_size > 1:
            replica.reducer.note_step(self._digest)

    def _by_bucket(self) -> dict[int, list[list[Entry]]]:
        """Return for each bucket the entries of each group in it."""
        found: dict[int, list[list[Entry]]] = {}
        for number, group in enumerate(self.param_groups):
            for entry in map(self._entry, group["params"]):
                bucket = self.replica.reducer.place(entry.at)[0]
                found.setdefault(bucket, [[] for _ in self.param_groups])[number].append(entry)
        return found

    def step_on(self, bucket: int) -> None:
        """Step on this rank's slices of a bucket, whose mean is complete."""
        groups, views, used = (
            self._buckets.get(bucket, []),
            self.replica.gradients.views,
            self.replica.reducer.used_by_any,
        )
        entries = list(chain.from_iterable(groups))
        with unguarded():
            for entry in entries:
                piece, view = entry.piece if entry.is_final else self._piece(entry), views[entry.at]
                if piece is not None and view is not None and used(entry.at):
                    piece.grad = view.piece  # type: ignore[attr-defined]
            try:
                with self._on_slices(groups) as low:
                    with masters_in_place(self._inner, low) if low else contextlib.nullcontext():
                        bare_step(self._inner)
            finally:
                for entry in entries:
                    if entry.piece is not None:
                        entry.piece.grad = None
        # what is left of the backward may not read these, as through weight.detach(); a released one is as it was
        for entry in entries if not self.replica.releases_parameters else ():
            torch.autograd.graph.increment_version(entry.member)

    def finish(self) -> None:
        """Show all ranks what the round has stepped on. Collective."""
        replica = self.replica
        vars(self).update(
            _consolidated=None, _state_names=None, rounds_at_step=replica.reducer.rounds, has_stepped=True
        )
        self._owner.publish(self.replicas, False)
        self._changes.close()
        if self.rounds_at_step == 1:  # new state lies between gradients that are gone
            trim()
        members = (entry for entry in self._members() if replica.reducer.used_by_any(entry.at))
        replica.access.count_writes([entry.member for entry in members])
        if self.has_taken_over:
            self.step()

    def cancel(self) -> None:
        """End a round that has failed."""
        access, comm = self.replica.access, self.replica.group.comm
        if access.shows_writes:
            access.refuse_change(comm)
        self._changes.close()
        if not comm.is_alive:  # peers' steps are no writes of the program
            access.guard = None
        access.count_writes(())

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(True)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """End the step that the last backward has made: `.grad` is None. Not collective.

        Raises Error for a closure, which would run backwards of its own.
        """
        if closure is not None:
            raise Error(
                "step(closure) evaluates the module inside the step, which step_in_backward=True has made in the backward: call step() "
                "without a closure"
            )
        had, self.has_stepped = self.has_stepped, False
        is_changed = had and self.replica.steppers.note(self) != self._digest
        by_hand = False
        with unguarded():
            for group in self.param_groups:
                for parameter in group["params"]:
                    grad = parameter.grad
                    by_hand |= (
                        had and grad is not None and not (isinstance(grad, SteppedGradient) and grad._pending is None)
                    )
                    set_gradient(parameter, None)
        if is_changed or by_hand:
            raise Error(_LATE.format("a gradient" if by_hand else "a group's value, such as lr,"))
        return None
