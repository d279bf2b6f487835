"""A call of a method of the user's optimizer, other than step, on the slices of all ranks.

The method writes to this rank's slices of parameters, which are then published, and to its slices of gradients. Ranks
have slices of different parameters, so they exchange which gradients a method cleared or wrote to, and every rank's
`.grad` follows. A gradient that is not averaged yet, as between the micro-batches of no_sync(), stays as it is: the
method may clear it and cannot read it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection
from typing import Any

import torch

from .._engine import Error
from ..layout.memory import bytes_of
from ..layout.shard_runs import memory_order
from ..parallel.agreement.optimizer_agreement import agree
from ..torch_compat.autograd import unguarded
from .forwarding import NotAveraged, WithoutReductions, reads_only
from .master_weights import check_groups

#: a ShardedOptimizer, which imports this file
ShardedOptimizer = Any


class _GradientWrites:
    """A context that finds the gradients which a method clears or writes to on this rank's slices.

    Attributes
    ----------
    cleared, written : set of int
        Numbers of parameters.
    values : dict of int to Tensor
        The gradients of slices after the call, in memory order, by their parameters' numbers.
    """

    def __init__(self, optimizer: ShardedOptimizer, name: str) -> None:
        self._optimizer, self._name = optimizer, name
        self.cleared: set[int] = set()
        self.written: set[int] = set()
        self.values: dict[int, torch.Tensor] = {}

    def __enter__(self) -> None:
        pieces = [(i, piece) for i, piece in self._optimizer._slices.items() if piece is not None]
        averaged = [(i, p, p.grad) for i, p in pieces if p.grad is not None and not isinstance(p.grad, NotAveraged)]
        self._before = {i: gradient.clone() for i, _, gradient in averaged}
        self._pieces = [(i, piece, piece.grad) for i, piece in pieces]

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            return
        for index, piece, given in self._pieces:
            now = piece.grad
            if now is None:
                self.cleared |= {index} if given is not None else set()
            elif index in self._before:
                self.values[index] = memory_order(now, piece)
                self.written |= set() if torch.equal(now, self._before[index]) else {index}
            elif now is not given:
                raise Error(
                    f"optimizer.{self._name}() sets a gradient where ranks have no averaged one: use zero=0 for this optimizer"
                )


def call_on_slices(optimizer: ShardedOptimizer, name: str, method: Callable[[], Any]) -> Any:
    """Call a method of the user's optimizer on this rank's slices and publish what it writes.

    Collective, unless the method's name says that it only reads.
    """
    if reads_only(name):
        with optimizer._on_slices():
            return method()
    replica, label = optimizer._replica, f"optimizer.{name}()"
    refusal: Exception | None = None
    if replica.join_link.is_on:
        refusal = Error(
            f"{label} writes to slices on all ranks, and inside join a rank that ran out of inputs takes no part in it: call it "
            "after the join"
        )
    reasons: dict[int, str] = {}
    try:
        check_groups(optimizer, optimizer._inner)
        for each in optimizer.replicas:
            each.rounds.close_pending()
        reasons = _not_averaged(optimizer)
    except (Error, NotImplementedError) as error:
        refusal = refusal or error

    def call() -> Any:
        cut = optimizer.partition != "tensor" and replica.slicing.count > 1
        shapes = {piece.shape for piece in optimizer._slices.values() if piece is not None} if cut else set()
        with WithoutReductions(name, shapes):
            return method()

    with contextlib.ExitStack() as announced:
        for each in optimizer.replicas:
            announced.enter_context(each.access.changing())
        try:
            agree(replica.group.comm.all_gather_bytes, [("it", [], {"method": name})], refusal, label)
        except Exception:
            optimizer.refuse_change()
            raise
        finally:
            refusal = None  # its traceback holds this frame
        optimizer._consolidated = optimizer._state_names = None
        not_averaged = _over_ranks(optimizer, reasons, label)

        def gradient_of(index: int) -> torch.Tensor | None:
            if index not in not_averaged:
                return optimizer._own_gradient(index)
            piece = optimizer.slice_of(index)
            reason = reasons.get(index, "another rank has added to a gradient since it was averaged")
            return None if piece is None else NotAveraged(piece, reason)

        optimizer._take_gradients(gradient_of)
        writes = _GradientWrites(optimizer, name)
        members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        result = optimizer._write_together(call, name, members, writes)
    cleared = _over_ranks(optimizer, writes.cleared, label)
    with unguarded(), torch.no_grad():
        for index in cleared:
            optimizer._parameters[index].grad = None
        for index in sorted(_over_ranks(optimizer, writes.written, label) - cleared):
            _send_gradient(optimizer, index, writes.values.get(index), label)
    return result


def _not_averaged(optimizer: ShardedOptimizer) -> dict[int, str]:
    """Return the parameters whose gradient a step would refuse, with the reason."""
    reasons = {}
    with unguarded():
        for index in optimizer._positions():
            try:
                optimizer._own_gradient(index)
            except Error as error:
                reasons[index] = str(error)
    return reasons


def _over_ranks(optimizer: ShardedOptimizer, found: Collection[int], label: str) -> set[int]:
    """Return the numbers that are in `found` on some rank. Collective."""
    everywhere: set[int] = set()
    for replica in optimizer.replicas:
        numbers = {at: index for index, (of, _, at) in enumerate(optimizer._places) if of is replica}
        mine = json.dumps([at for at, index in numbers.items() if index in found])
        for said in replica.group.comm.all_gather_bytes(mine.encode(), label):
            everywhere |= {numbers[at] for at in json.loads(said)}
    return everywhere


def _send_gradient(optimizer: ShardedOptimizer, index: int, mine: torch.Tensor | None, label: str) -> None:
    """Write a gradient that ranks have changed on their slices to `.grad` on all ranks. Collective."""
    replica, _, at = optimizer._places[index]
    like = optimizer._like(index)
    flat = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
    data = b"" if mine is None or not replica.slicing.speaks else bytes_of(mine)
    for rank, said in enumerate(replica.group.comm.all_gather_bytes(data, label)):
        low, high = optimizer.run(index, rank)
        if low < high and said:
            flat[low:high] = torch.frombuffer(bytearray(said), dtype=flat.dtype)
    replica.gradients.rewrite(at, flat)
