"""The gradients of one module: the `.grad` of each parameter, and the checks before a step."""

from __future__ import annotations

import functools
import json
import math
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from .._engine import Error, Reducer
from ..backend.base import Backend
from ..comm.agreement import gather_answers, sums_over_ranks
from ..layout.local_parameters import local_of, whole_of
from ..layout.memory import bytes_of
from ..layout.param_table import ParameterTable
from ..layout.shard_mesh import Slicing
from ..layout.shard_runs import Storage, memory_order
from ..layout.views import copy_gradient, gradient_view
from .rounds import Rounds
from .sharded_gradient import GradientBoard, ShardedGradient

_NOT_AVERAGED = (
    "a parameter has a gradient of this rank that is not averaged yet: run a backward outside of no_sync() before "
    "stepping, clipping or reading gradients"
)
_BY_HAND = (
    "parameter {name!r} has a gradient that no backward of the module brought (torch.autograd.grad, or weight.grad += ... without hooks), so it is "
    "not averaged: call sw.average_gradients(module) before the step"
)
_FAILED_ROUND = (
    "parameter {name!r} has a gradient of a round that failed (a rank left a backward unfinished, or the communicator ended), which is not "
    "averaged: clear the gradients and run the step again, on every rank"
)
_BY_HAND_AT_0 = ", or run such forwards inside no_sync() if each rank steps separately"


class ModuleGradients:
    """Gradients of a module's parameters, which the reducer of `rounds` averages.

    `last_step_on` returns the number of rounds when a parameter was stepped on last. `warns_of_sparse`: warn when a
    sparse gradient is made dense. `views` has the tensor that becomes each parameter's `.grad`: a view of its bucket, or
    at zero >= 2 a ShardedGradient; None if it has no memory.
    """

    def __init__(
        self,
        table: ParameterTable,
        storage: Storage,
        backend: Backend,
        reducer: Reducer,
        rounds: Rounds,
        slicing: Slicing,
        zero: int,
        label: str,
        last_step_on: Callable[[torch.Tensor], int],
        *,
        warns_of_sparse: bool = True,
    ) -> None:
        #: writes a gradient into a view
        self.copy: Callable[..., None] = (
            copy_gradient if warns_of_sparse else functools.partial(copy_gradient, warns=False)
        )
        self._table, self._storage, self._backend, self._reducer = table, storage, backend, reducer
        self._rounds, self._slicing, self._zero, self._label = rounds, slicing, zero, label
        self._last_step_on = last_step_on
        self._group = backend.group
        #: None below zero=2
        self.sliced_board: GradientBoard | None = None
        if zero >= 2:
            self.sliced_board = GradientBoard(self._group.comm, reducer, label, speaks=slicing.speaks)
            self.sliced_board.whole_of = weakref.WeakMethod(self.gathered)
        self.views = [self._make_view(i) if reducer.has_memory(i) else None for i in range(len(table.parameters))]
        self._accepted: dict[int, weakref.ref[torch.Tensor]] = {}
        self._slices: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}

    # views ----------------------------------------------------------------------------------------------------------

    def _make_view(self, index: int) -> torch.Tensor:
        like = self._storage.like(index)
        if self.sliced_board is None:
            return gradient_view(like, self._reducer, index)
        held = gradient_view(like, self._reducer, index) if self._reducer.transport == "staged" else None
        return ShardedGradient(index, like, from_dlpack(self._reducer.result(index)), self.sliced_board, held)

    def renew_view(self, index: int) -> None:
        """Make the view of a gradient. An old view that the user kept is moved to separate memory."""
        kept = self.views[index]
        if kept is not None:
            kept.data = kept.detach().clone(memory_format=torch.preserve_format)
        self.views[index] = self._make_view(index)

    def write_contribution(self, index: int, gradient: torch.Tensor, add: bool) -> None:
        """Write a gradient that the engine cannot read (other strides, sparse), at zero >= 2."""
        memory = gradient_view(self._storage.like(index), self._reducer, index)
        if add:
            whole = torch.empty_like(memory)
            self.copy(whole, gradient)
            memory.add_(whole)
        else:
            self.copy(memory, gradient)

    def drop(self) -> None:
        """Set every sliced `.grad` to None."""
        for parameter in self._table.parameters:
            if isinstance(parameter.grad, ShardedGradient):
                parameter.grad = None

    # for a step -------------------------------------------------------------------------------------------------------

    def slices(self) -> list[torch.Tensor | None]:
        """Return slice_of() for every parameter."""
        return [self.slice_of(index) for index in range(len(self._table.parameters))]

    def slice_of(self, index: int) -> torch.Tensor | None:
        """Return this rank's elements of a parameter's `.grad`, one-dimensional; None if there is no gradient. Raise
        Error if it is not averaged, or if the parameter is frozen.
        """
        parameter = self._table.parameters[index]
        gradient = parameter.grad
        if isinstance(gradient, ShardedGradient):
            plain = gradient._pending is None and not gradient._cleared
            return gradient.piece if plain else gradient.averaged_piece()
        if gradient is None:
            return None
        if self._reducer.is_used(index):
            raise Error(_NOT_AVERAGED)
        if not self._storage.is_stepped(index):
            raise Error(
                f"parameter {self._table.names[index]!r} is frozen and has a gradient from before the module was wrapped, so a step would change it only on this rank: call zero_grad() before the step"
            )
        if self._zero >= 2 or not self._is_averaged(index, gradient, self._last_step_on(parameter)):
            raise Error(_BY_HAND.format(name=self._table.names[index]))
        low, high = self._storage.own_run(index)
        if gradient is self.views[index]:
            kept, address = self._slices.get(index), gradient.data_ptr()
            if kept is None or kept[0]() is not gradient or kept[1] != address:
                own = memory_order(gradient.detach(), parameter)[low:high]
                # weak, since a view with another reference counts as kept by the user
                kept = self._slices[index] = (weakref.ref(gradient), address, own)
            return kept[2]
        return memory_order(gradient.detach(), parameter)[low:high]

    def _is_averaged(self, index: int, gradient: torch.Tensor, since: int) -> bool:
        """Return True if a whole gradient is a round's result or the user's change of it, as far as can be known.

        A round leaves our view, whose values may be changed in place (clipping, noise). Another tensor counts as the
        user's change if a round after `since` averaged the parameter, if the parameter was stepped on before, or if the
        tensor is zero. After a forward without a backward our view is judged like another tensor.
        """
        if self._group.world_size == 1:
            return True
        averaged = self._reducer.averaged_in(index) > since
        if gradient is self.views[index] and not self._rounds.closed_without_backward:
            return True
        if averaged:
            self._accepted[index] = weakref.ref(gradient)
        kept = self._accepted.get(index)
        return (kept is not None and kept() is gradient) or not bool(gradient.any())

    def check_averaged(self, optimizer: torch.optim.Optimizer, since: int) -> None:
        """Raise Error at zero=0 for a gradient that was not averaged, before a step of `optimizer`, and end the
        communicators with its sentence. `since`: the number of rounds at its previous step.
        """
        suspects = range(len(self.views)) if self._rounds.closed_without_backward else self._reducer.foreign()
        if not suspects:
            return
        for index, gradient in self._stepped_on(optimizer, suspects):
            # a sparse mean is never a view
            if index not in self._table.sparse and not self._is_averaged(index, gradient, since):
                message = _BY_HAND.format(name=self._table.names[index]) + _BY_HAND_AT_0
                self._backend.abort(message)
                raise Error(message)

    def refuse_failed_round(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise Error at zero=0 for a gradient of the last round, which averaged nothing."""
        for index, gradient in self._stepped_on(optimizer, range(len(self.views))):
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            if self._reducer.is_used(index) and bool(values.any()):
                raise Error(_FAILED_ROUND.format(name=self._table.names[index]))

    def _stepped_on(
        self, optimizer: torch.optim.Optimizer, indices: Sequence[int]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield those of the parameters, with their gradients, that `optimizer` steps on."""
        members = {id(local_of(p)) for group in optimizer.param_groups for p in group["params"]}
        for index in indices:
            parameter = self._table.parameters[index]
            if id(parameter) in members and parameter.requires_grad and parameter.grad is not None:
                yield index, parameter.grad

    # values over all ranks -----------------------------------------------------------------------------------------

    @property
    def board(self) -> GradientBoard:
        """The board of sliced gradients; only at zero >= 2."""
        assert self.sliced_board is not None
        return self.sliced_board

    def squares_of(self, slices: Callable[[], Sequence[torch.Tensor | None]], *, over_ranks: bool = True) -> bytes:
        """Return the exact sums of squares of all ranks' gradients; `slices` returns this rank's. Collective
        `over_ranks`.

        There is one sum for each set of dimensions of the model mesh over which parameters are sharded. If `slices`
        raises Error on some rank, all raise.
        """
        kinds = self._table.sharded_kinds

        def sums() -> bytes:
            found = slices()
            speaks = self._slicing.speaks or not over_ranks
            held = [(kind, each) for kind, each in zip(kinds, found, strict=True) if each is not None and speaks]
            kept = sorted(set(kinds))
            return b"".join(self._backend.norm_sums([each for of, each in held if of == kind]) for kind in kept)

        return sums_over_ranks(self._group.comm, sums, self._label) if over_ranks else sums()

    def agree_on_clipping(self, max_norm: float) -> tuple[float, list[torch.Tensor]]:
        """Return rank 0's `max_norm`, and this rank's part of the gradients that all ranks clip to it. Collective
        between hosts. All ranks raise Error if gradients are not averaged on some, or if `max_norm` differs by more than
        rounding.
        """
        found: list[torch.Tensor | None] = []

        def answer() -> bytes:
            found.extend(self.slices())
            return struct.pack("d", max_norm)

        said = gather_answers(self._group.comm, answer, f"clipping the gradients of {self._label}")
        norms = [struct.unpack("d", each)[0] for each in said]
        other = next((rank for rank, each in enumerate(norms) if not math.isclose(each, norms[0], rel_tol=1e-3)), None)
        if other is not None:
            raise Error(
                f"clip_grad_norm_: max_norm must be equal on all ranks; of {self._label} it is {norms[0]!r} on rank 0 and {norms[other]!r} on rank "
                f"{other}"
            )
        return norms[0], [each for each in found if each is not None] if self._slicing.speaks else []

    def follow_factors(self, factors: list[list[Any]]) -> None:
        """Scale this rank's part of the gradients by the factors of the training ranks."""
        done = self.sliced_board.factors() if self.sliced_board is not None else []
        for index, name, factor in factors[len(done) :]:
            view = self.views[index]
            assert isinstance(view, ShardedGradient)
            getattr(view._held, name)(factor)
            done.append([index, name, factor])

    def whole(self) -> dict[str, torch.Tensor | None]:
        """Return whole averaged gradients by bare name. Collective at zero >= 2; below it returns the gradients
        unchanged."""
        if self.sliced_board is not None:
            self._agree()
        found: dict[str, torch.Tensor | None] = {}
        for index, (name, parameter) in enumerate(zip(self._table.names, self._table.parameters)):
            gradient = parameter.grad
            if gradient is not None and self._reducer.is_used(index):
                raise Error(_NOT_AVERAGED)
            if not isinstance(gradient, ShardedGradient):
                found[name] = None if gradient is None else whole_of(parameter, gradient)
                continue
            found[name] = whole_of(parameter, self.gathered(index, gradient.averaged_piece()))
        return found

    def gathered(self, index: int, piece: torch.Tensor) -> torch.Tensor:
        """Return a whole gradient from all ranks' slices. Collective."""
        parameter, name = self._table.parameters[index], self._table.names[index]
        data = bytes_of(piece) if self._slicing.speaks else b""
        flat = parameter.new_empty(parameter.numel(), dtype=piece.dtype)
        label = f"the whole gradient of {name} of {self._label}"
        for rank, each in enumerate(self._group.comm.all_gather_bytes(data, label)):
            low, high = self._storage.run(index, rank)
            if low < high and each:
                flat[low:high] = torch.frombuffer(bytearray(each), dtype=flat.dtype)
        return flat.as_strided(parameter.shape, self._storage.like(index).stride())

    def rewrite(self, index: int, flat: torch.Tensor) -> None:
        """Write a whole gradient in memory order, equal on all ranks, in place of an averaged one."""
        gradient, like = self._table.parameters[index].grad, self._storage.like(index)
        whole = flat.as_strided(like.shape, like.stride())
        if isinstance(gradient, ShardedGradient):
            gradient.rewrite(whole, flat[slice(*self._storage.own_run(index))])
        elif gradient is not None:
            gradient.copy_(whole)

    def _agree(self) -> None:
        """Raise Error on all ranks if one has gradients that are not averaged, or if ranks scaled by different factors."""

        def answer() -> bytes:
            for index, parameter in enumerate(self._table.parameters):
                if isinstance(parameter.grad, ShardedGradient):
                    parameter.grad.averaged_piece()
                elif parameter.grad is not None and self._reducer.is_used(index):
                    raise Error(_NOT_AVERAGED)
            return json.dumps(self.board.factors()).encode()

        def compare(answers: Sequence[bytes]) -> str:
            other = next(rank for rank, each in enumerate(answers) if each != answers[0])
            ours, theirs = (self._describe(json.loads(answers[rank])) for rank in (0, other))
            return (
                f"ranks disagree about what the averaged gradients of {self._label} were scaled by: rank 0 by {ours}, rank {other} by "
                f"{theirs}; each rank keeps slices of them: scale them equally on all ranks"
            )

        gather_answers(self._group.comm, answer, f"factors of the gradients of {self._label}", compare=compare)
        self.board.accept_factors()

    def _describe(self, factors: list[list[Any]]) -> str:
        names = self._table.names
        return ", ".join(f"{name}({factor:g}) of {names[i]!r}" for i, name, factor in factors[:3]) or "nothing"
