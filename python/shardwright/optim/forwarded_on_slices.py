"""A call of a method of the user's optimizer, other than step, on the slices of all ranks.

It writes to this rank's slices of parameters, which are then published, and of gradients: ranks exchange which ones it
cleared or wrote to, and every rank's `.grad` follows. It can clear a gradient that is not averaged, but not read it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch

from .._engine import Error
from ..comm.agreement import gather_values
from ..layout.shard_runs import memory_order
from ..parallel.agreement.optimizer_agreement import Row, agree, check_groups
from ..torch_compat.autograd import unguarded
from .forwarding import NotAveraged, WithoutReductions, reads_only
from .ownership import Entry, fill_from_ranks

#: a ShardedOptimizer, which imports this file
ShardedOptimizer = Any


class _GradientWrites:
    """A context that finds which gradients of this rank's slices a method clears or writes to, and their new values."""

    def __init__(self, entries: list[Entry], name: str) -> None:
        self._entries, self._name = entries, name
        self.cleared: set[Entry] = set()
        self.written: set[Entry] = set()
        self.values: dict[Entry, torch.Tensor] = {}  # of all averaged ones afterwards, in memory order

    def __enter__(self) -> None:
        self._given = [(e, e.piece, e.piece.grad) for e in self._entries if e.piece is not None]
        averaged = [(e, given) for e, _, given in self._given if given is not None]
        self._before = {e: given.clone() for e, given in averaged if not isinstance(given, NotAveraged)}

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            return
        for entry, piece, given in self._given:
            now = piece.grad
            if now is None:
                self.cleared |= {entry} if given is not None else set()
            elif entry in self._before:
                self.values[entry] = memory_order(now, piece)
                self.written |= set() if torch.equal(now, self._before[entry]) else {entry}
            elif now is not given:
                raise Error(
                    f"optimizer.{self._name}() sets a gradient where ranks have no averaged one: use zero=0 for this optimizer"
                )


def call_on_slices(optimizer: ShardedOptimizer, name: str, method: Callable[[], Any]) -> Any:
    """Call a method of the user's optimizer on this rank's slices and publish what it writes. Collective."""
    if reads_only(name):  # not collective
        with optimizer._on_slices():
            return method()
    replica, label = optimizer.replica, f"optimizer.{name}()"
    refusal: Exception | None = None
    reasons: dict[Entry, str] = {}
    try:
        if replica.in_sliced_join:
            raise Error(
                f"{label} writes to slices on all ranks, and inside join a rank that ran out of inputs takes no part in it: call it "
                "after the join"
            )
        check_groups(optimizer, optimizer._inner)
        for each in optimizer.replicas:
            each.gradients.close_pending()
        reasons = _not_averaged(optimizer)
    except (Error, NotImplementedError) as error:
        refusal = error

    def rows() -> list[Row]:
        if refusal is not None:
            raise refusal
        return [("it", [], {"method": name})]

    def call() -> Any:
        cut = optimizer.partition != "tensor" and replica.slicing.count > 1
        shapes = {each.piece.shape for each in optimizer._entries if each.piece is not None} if cut else set()
        with WithoutReductions(name, shapes):
            return method()

    with optimizer._changing(lambda: agree(replica.group.comm, rows, label)):
        optimizer._consolidated = optimizer._state_names = None
        not_averaged = _over_ranks(optimizer, reasons, label)

        def gradient_of(entry: Entry) -> torch.Tensor | None:
            if entry not in not_averaged:
                return optimizer._owner.gradient(entry)
            reason = reasons.get(entry, "another rank has added to a gradient since it was averaged")
            return None if entry.piece is None else NotAveraged(entry.piece, reason)

        optimizer._take_gradients(gradient_of, optimizer._members())
        writes = _GradientWrites(optimizer._entries, name)
        result = optimizer._write_together(call, name, optimizer._members(), writes)
    cleared = _over_ranks(optimizer, writes.cleared, label)
    with unguarded(), torch.no_grad():
        for entry in cleared:
            entry.parameter.grad = None
        written = _over_ranks(optimizer, writes.written, label) - cleared
        for entry in sorted(written, key=lambda each: each.index):
            flat = torch.empty(entry.like.numel(), dtype=entry.like.dtype, device=entry.like.device)
            run = functools.partial(optimizer.run, entry.index)
            fill_from_ranks(entry.replica, flat, writes.values.get(entry), run, label)
            entry.replica.gradients.rewrite(entry.at, flat)
    return result


def _not_averaged(optimizer: ShardedOptimizer) -> dict[Entry, str]:
    """Return the parameters whose gradient a step would refuse, with the reason."""
    reasons = {}
    with unguarded():
        for entry in optimizer._members():
            try:
                optimizer._owner.gradient(entry)
            except Error as error:
                reasons[entry] = str(error)
    return reasons


def _over_ranks(optimizer: ShardedOptimizer, found: Collection[Entry], label: str) -> set[Entry]:
    """Return the parameters that are in `found` on some rank. Collective."""
    everywhere: set[Entry] = set()
    for replica in optimizer.replicas:
        entries = [each for each in optimizer._entries if each.replica is replica]
        for numbers in gather_values(replica.group.comm, lambda: [e.at for e in entries if e in found], label):
            everywhere |= {entries[at] for at in numbers}
    return everywhere
