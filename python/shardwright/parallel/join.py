"""Uneven inputs: the work of a rank that ran out of inputs, in torch's Join protocol; docs/design/zero.md explains it.

A joined rank shadows each iteration of the training ranks, collective for collective, in the order in which forward and
backward issue them. At zero >= 1 it still owns slices, and training ranks announce each operation in which it takes
part. At the end all ranks take the model of the rank that trained longest.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, JoinHook

from .._engine import Error
from ..gradients.module_gradients import NO_GRADIENT, ZEROED, states_of
from ..gradients.sharded_gradient import ShardedGradient
from ..layout.memory import bytes_of
from ..layout.shard_runs import memory_order
from ..torch_compat.internals import JoinConfig
from ..torch_compat.weak import weakly
from .engine import Engine, no_member
from .replica import Replica


class ShadowHook(JoinHook):
    """The join hook of a wrapped module. Means divide by the number of all ranks, or of those that still train."""

    def __init__(self, wrapper: Any, engine: Engine, divide_by_initial_world_size: bool) -> None:
        self._wrapper, self._engine = wrapper, engine
        engine.join_member = weakref.ref(wrapper)
        replica = engine.replica
        replica.reducer.set_divide_by(not divide_by_initial_world_size)
        _connect(replica, Announcer(engine))
        wrapper.logger._set_uneven_input_join()
        _forget(engine)
        _joining.append(weakref.ref(engine))

    def main_hook(self) -> None:
        """Shadow one iteration of the training ranks; at zero >= 1, one announced operation."""
        announcer = self._engine.replica.announcer
        assert announcer is not None
        if not announcer.is_on:
            _shadow_forward(self._engine)
        elif self._wrapper._join_config.is_first_joinable:  # the first module's hook serves all modules
            member, announced = announcer.listen()
            if announced["kind"] == "forward":
                _shadow_forward(member)
            else:
                _shadow(member.replica, announced)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give all ranks the model of the last rank that joined; of several, the highest."""
        engine, replica = self._engine, self._engine.replica
        _connect(replica, None)
        replica.parameters().gather_anew()
        _forget(engine)
        root = replica.group.highest_rank_where(is_last_joiner, "last rank to join")
        self._wrapper._authoritative_rank = root
        replica.access.before_writes()
        replica.broadcast_state(root, engine.note_buffers().values() if engine.forward_sync_buffers else ())
        replica.reducer.set_divide_by(False)
        replica.reducer.forget_steps()
        replica.steppers.begin_anew()
        if replica.stop is not None:
            replica.stop.renew()
        if replica.check is not None:
            replica.check.begin_anew()
        self._wrapper._join_config = JoinConfig.construct_disabled_join_config()
        engine.join_member = no_member


def _announces_rounds(replica: Replica) -> bool:
    """Return True if opening a round must be announced to joined ranks."""
    return replica.zero >= 2 and not replica.backend.capabilities.tells_accumulated


def _connect(replica: Replica, announcer: Announcer | None) -> None:
    """Announce collectives through `announcer`; None stops announcements."""
    replica.announcer = announcer
    replica.gradients.announce = (lambda *_: None) if announcer is None else weakly(replica.announce)
    if _announces_rounds(replica):
        replica.reducer.set_announcer(None if announcer is None else announcer.announce_round)
    if not replica.backend.capabilities.free_unit_order:
        replica.parameters().announce_units(None if announcer is None else announcer.announce_unit)


def _shadow_forward(engine: Engine) -> None:
    """Shadow a forward of the training ranks and, if they synchronise, its round."""
    replica = engine.replica
    replica.steppers.has_joined = True
    if engine.syncs_buffers(before=True):
        engine.sync_buffers(candidate=False)
    engine.require_forward_param_sync = synchronises = engine.agree_on_sync(False, trains=False)
    if synchronises and not _announces_rounds(replica):
        replica.gradients.shadow()


#: engines with a live join hook, in order of creation; engines of one Join are adjacent
_joining: list[weakref.ref[Engine]] = []


def _forget(engine: Engine) -> None:
    _joining[:] = [each for each in _joining if each() not in (None, engine)]


class Announcer:
    """The announcements of training ranks to joined ranks at zero >= 1."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        #: ranks that had joined by the last announcement, and the lowest that still trained
        self.joined: list[int] = []
        self.lowest = 0
        #: the count of completed rounds when joined ranks began to wait for the next one; None if none waits
        self.owes: int | None = None

    def _members(self) -> list[Engine]:
        """Return the engines of this Join, in its order; none if its first module belongs to another library."""
        found = [engine for each in _joining if (engine := each()) is not None]
        if self._engine() not in found:
            return []
        at = found.index(self._engine())  # type: ignore[arg-type]
        faces = [each.join_member() for each in found]
        firsts = [i for i, each in enumerate(faces) if each is not None and each._join_config.is_first_joinable]
        begin = max((i for i in firsts if i <= at), default=None)
        return [] if begin is None else found[begin : min((i for i in firsts if i > at), default=len(found))]

    @property
    def is_joining(self) -> bool:
        """Return True inside a join, unless it has enable=False."""
        engine = self._engine()
        return engine is not None and engine.is_joining

    @property
    def is_on(self) -> bool:
        """Return True inside a join with sliced state."""
        engine = self._engine()
        if engine is None or not engine.is_joining:
            return False
        return bool(engine.options.zero) or any(each.options.zero for each in self._members())

    def announce(self, kind: str, number: float, groups: Any) -> None:
        """Announce an operation in which joined ranks must take part, before it begins, on every training rank. Collective.

        `number` names the optimizer, the order of the norm, or the parameter whose gradient is read.
        """
        members = self._members()
        if not members:
            raise NotImplementedError(
                "a Join at zero >= 1 begins with a module that shardwright wrapped, and holds no others: pass only wrapped modules to it"
            )
        for each in members if kind not in _INSIDE else ():
            _check_ended(each.replica, kind)
        work = Join.notify_join_context(members[0].join_member())
        if work is not None:
            work.wait()
        engine = self._engine()
        assert engine is not None
        replica = engine.replica
        announced: dict[str, Any] = {"kind": kind, "member": members.index(engine), "number": number, "groups": groups}
        if kind not in ("forward", *_INSIDE):
            announced["gradients"] = states_of(replica.table.parameters)
            announced["factors"] = replica.gradients.factors()
        self._exchange(members, json.dumps(announced).encode())
        if kind == "forward" and torch.is_grad_enabled() and engine.require_backward_grad_sync and self.joined:
            self.owes = replica.reducer.rounds

    def listen(self) -> tuple[Engine, dict[str, Any]]:
        """Receive an announcement. Return the module that it names, and the lowest training rank's content."""
        members = self._members()
        announced: dict[str, Any] = self._exchange(members, b"")
        return members[announced["member"]], announced

    def announce_round(self, accumulated: bytes) -> None:
        """Announce a round as it opens, on GPUs at zero >= 2, and which contributions add to an accumulated mean. Collective."""
        self._announce_to_joined("round", 0, list(accumulated))

    def announce_unit(self, unit: int) -> None:
        """Announce the gather of a unit, a collective on GPUs at zero=3. Collective if a rank has joined."""
        self._announce_to_joined("unit", unit, None)

    def _announce_to_joined(self, kind: str, number: int, groups: Any) -> None:
        """Announce only if a rank has already joined; one that joins later still takes part in the operation itself."""
        if self.joined and self.is_on:
            self.announce(kind, number, groups)

    def _exchange(self, members: Sequence[Engine], mine: bytes) -> dict[str, Any]:
        first = members[0].replica
        gathered = first.group.comm.all_gather_bytes(mine, f"next operation in the join of {first.label}")
        trains = {rank: json.loads(each) for rank, each in enumerate(gathered) if each}
        lowest = min(trains)
        announced: dict[str, Any] = trains[lowest]
        for rank, other in trains.items():
            if any(other[key] != announced[key] for key in ("kind", "member", "number")):
                one, two = (
                    f"{_WORDS[each['kind']]} of {members[each['member']].replica.label}" for each in (announced, other)
                )
                raise Error(
                    f"ranks disagree inside join: rank {lowest} comes to {one}, rank {rank} to {two} "
                    f"({announced['number']:g}, {other['number']:g})"
                )
        for each in members:
            announcer = each.replica.announcer
            if announcer is not None:
                announcer.joined = [rank for rank, text in enumerate(gathered) if not text]
                announcer.lowest = lowest
        return announced


def _check_ended(replica: Replica, kind: str) -> None:
    """Raise Error if joined ranks still wait in a round that has not ended."""
    announcer = replica.announcer
    if announcer is None or announcer.owes is None or replica.reducer.rounds != announcer.owes:
        return
    message = (
        f"inside join, {_WORDS[kind]} begins before the backward of the last forward of {replica.label}, while a rank that has run out of "
        "inputs waits in that backward: run each forward's backward before anything else, or wrap what is trained together as one module"
    )
    if replica.group.comm.is_alive:
        replica.group.comm.abort(message)
    raise Error(message)


#: an operation of a forward or a backward
_INSIDE = ("round", "unit")
_WORDS = {
    "round": "a backward",
    "unit": "a unit",
    "forward": "a forward",
    "step": "a step of an optimizer",
    "norm": "clipping by the norm",
    "norms": "the norms of gradients",
    "vote": "unscaling gradients",
    "read": "a read of a whole gradient",
}


def _piece_of(view: Any) -> torch.Tensor:
    assert isinstance(view, ShardedGradient)
    return view.piece


def _own_slices(replica: Replica, states: Sequence[int]) -> list[torch.Tensor | None]:
    """Return this rank's slices of the averaged gradients, scaled as on the training ranks."""
    pairs = zip(map(_piece_of, replica.gradients.views), states)
    held = [(torch.zeros_like(piece) if state == ZEROED else piece, state) for piece, state in pairs]
    return [None if state == NO_GRADIENT else piece for piece, state in held]


def _shadow(replica: Replica, announced: dict[str, Any]) -> None:
    """Take part in an announced operation."""
    kind, number, gradients = announced["kind"], announced["number"], replica.gradients
    if kind == "round":
        gradients.shadow(announced["groups"])
        return
    if kind == "unit":
        replica.parameters().gather_beside(int(number))
        return
    states = announced["gradients"]
    overflowed = kind == "vote" and any(
        piece is not None and not bool(piece.isfinite().all()) for piece in _own_slices(replica, states)
    )
    gradients.follow_factors(announced["factors"])
    if kind == "norm":
        gradients.squares_of(lambda: _own_slices(replica, states))
    elif kind == "norms":
        gradients.gather_norms(number)
    elif kind == "vote":
        gradients.any_rank(lambda: overflowed)
    elif kind == "read":
        gradients.gathered(int(number), _piece_of(gradients.views[int(number)]))
    else:
        optimizer = replica.steppers.sliced()[int(number)]
        is_whole = replica.zero == 1
        own = exchange_slices(replica, optimizer.run, states) if is_whole else _own_slices(replica, states)
        optimizer.shadow_step(announced["groups"], own, states)


def exchange_slices(
    replica: Replica, run: Callable[[int, int], tuple[int, int]], states: Sequence[int] | None = None
) -> list[torch.Tensor | None]:
    """Send joined ranks their slices of the lowest training rank's gradients, as scaled there, at zero=1. Collective.

    run(index, rank) returns the elements on which a rank steps. A joined rank passes `states` and gets its gradients.
    """
    announcer = replica.announcer
    assert announcer is not None
    if not announcer.joined:
        return []
    parameters, rank = replica.table.parameters, replica.group.rank
    runs = [(to, index, *run(index, to)) for to in announcer.joined for index in range(len(parameters))]
    mine = []
    for _, index, low, high in runs if rank == announcer.lowest else ():
        gradient = parameters[index].grad
        if gradient is not None and low < high:
            mine.append(bytes_of(memory_order(gradient.detach(), parameters[index])[low:high]))
    label = f"gradients for ranks that have joined, of {replica.label}"
    data = replica.group.comm.all_gather_bytes(b"".join(mine), label)[announcer.lowest]
    if states is None:
        return []
    found: list[torch.Tensor | None] = [None] * len(parameters)
    at = 0
    for to, index, low, high in runs:
        if states[index] == NO_GRADIENT:
            continue
        like, begin = parameters[index], at
        at += (high - low) * like.element_size()
        if to == rank:
            piece = bytearray(data[begin:at])
            found[index] = (torch.frombuffer(piece, dtype=like.dtype) if piece else like.new_empty(0)).to(like.device)
    return found
