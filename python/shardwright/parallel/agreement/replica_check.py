"""The check for silent corruption every n steps: equal parameters on all ranks, and finite averaged gradients.

A digest of the parameters joins the numbers that ranks compare in a round (sw_reducer_note_step), so a check sends no
message of its own. If digests differ, ranks exchange one number per parameter. docs/design/reduce.md has the
reasons.
"""

from __future__ import annotations

import collections
import functools
import weakref
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..._engine import Error, crc32c
from ...comm.agreement import gather_values
from ...comm.model_ranks import ModelRanks
from ...comm.process_group import group_ranks
from ...layout.views import as_real, dense_strides
from ...options.precision import LOW_DTYPES
from ...torch_compat import cuda
from ...torch_compat.dtensor import held_tensor, is_dtensor, waited
from ...torch_compat.weak import weakly

#: error of a rank that owns a slice of a gradient that is not finite; explain_not_finite() adds names
NOT_FINITE = "the averaged gradient is not finite"
#: largest number of rows in a message
_MOST_NAMED = 3
_INTEGERS = {4: torch.int32, 2: torch.int16, 1: torch.int8}


class _Steps:
    """The steps of one optimizer: with one count for two in turn, an even `every` would check only one of them."""

    def __init__(self) -> None:
        self.count, self.rounds = 0, -1


class ReplicaCheck:
    """The check of one module's replicas before steps 0, every, 2 * every and so on.

    Cost: one pass over the parameters and two over the gradients. GPUs wait for them, and exchange 4 bytes a rank.
    """

    def __init__(self, replica: Any, every: int) -> None:
        self._replica = weakref.ref(replica)
        self._every = every
        self._finite: dict[int, torch.Tensor] = {}  # True if this rank's gradients since the last zero_grad are finite
        self._is_stale = False  # True if a step has been counted since then
        self._stepped = 0  # the number of rounds at the last step
        self._since = "the start of these ranks"
        #: the lowest rank with the same parameters; a save uses it to tell ranks with other shards apart
        self.column = min(group_ranks(replica.group.torch_group))
        self._state_is_equal = True  # optimizer state at zero=0, equal unless a rank is faulty
        self._count_from_zero()
        self.handles = [
            parameter.register_hook(functools.partial(weakly(self.take), index, weakref.ref(parameter)))
            for index, parameter in enumerate(replica.table.module_parameters)  # autograd does not see local parameters
            if parameter.requires_grad and (parameter.is_floating_point() or parameter.is_complex())
        ]

    def _count_from_zero(self) -> None:
        self._steps = 0
        self._noted = self._digested = -1  # the steps of the last note and of the last digests
        self._digests: list[int] = []
        self._of_optimizer: weakref.WeakKeyDictionary[Any, _Steps] = weakref.WeakKeyDictionary()
        self._of_parameter: dict[int, _Steps] = {}  # by parameter index: the step count of its optimizer

    def begin_anew(self) -> None:
        """Count from 0 again on all ranks, after a join in which not all ranks counted."""
        self._count_from_zero()
        self._since, self._is_stale = "the last join", True
        self._state_is_equal = False  # a joined rank did not step

    @property
    def is_due(self) -> bool:
        """Return True if the next step is checked."""
        return self._steps % self._every == 0

    def count_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step of this optimizer, and one step for all optimizers that use the same round."""
        replica = self._replica()
        if replica is None:
            return
        rounds = replica.reducer.rounds
        own = self._of_optimizer.get(optimizer)
        if own is None:
            own = self._of_optimizer[optimizer] = _Steps()
            held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            self._of_parameter |= {i: own for i, p in enumerate(replica.table.module_parameters) if id(p) in held}
        own.count, own.rounds = own.count + (own.rounds != rounds), rounds
        if self._stepped == rounds:
            return
        self._stepped = rounds
        self._steps += 1
        self._is_stale = True

    # equal parameters -------------------------------------------------------------------------------------------------

    def note(self) -> None:
        """Add the digest of the parameters to the next round's comparison. Collective on GPUs, if due."""
        replica = self._replica()
        if replica is None or not self.is_due or self._noted == self._steps or not _has_replicas(replica):
            return
        travels = not _is_private(replica) and replica.link is None
        if not travels and replica.in_join:  # a joined rank would not take part in the exchange
            return
        self._noted, digest = self._steps, self._digest(replica)
        if travels:
            replica.reducer.note_step(digest)
            return
        comm, slicing = replica.group.comm, replica.slicing
        gathered = comm.all_gather_bytes(digest.to_bytes(4, "little"), f"replicas of {replica.label}")
        alike = collections.defaultdict(set)
        for rank, each in enumerate(gathered):
            alike[slicing.of_rank[rank] if _is_private(replica) else 0].add(each)
        if any(len(each) > 1 for each in alike.values()):
            self.explain()

    def _digest(self, replica: Any, optimizer: torch.optim.Optimizer | None = None) -> int:
        self._digested, self._digests = self._steps, digests(replica)
        if optimizer is not None:
            self._digests += _state_digests(replica, optimizer)
        words = torch.tensor(self._digests, dtype=torch.int64, device="cpu")
        return crc32c(words.data_ptr(), words.nbytes)

    def digest_of_save(self, optimizer: torch.optim.Optimizer | None) -> int:
        """Return a digest of what a save stores, equal on all healthy ranks: parameters, and at zero=0 optimizer state."""
        replica = self._replica()
        if replica is None or _is_private(replica) or not _has_replicas(replica):
            return 0
        return self._digest(replica, None if replica.zero or not self._state_is_equal else optimizer)

    def explain(self) -> None:
        """Raise Error, naming parameter and rank, if the last digests differ between ranks. Collective."""
        replica = self._replica()
        if replica is None:
            return
        names = [f"parameter {name!r}" for name in replica.table.names]
        names += [f"the optimizer's state for {name}" for name in names]
        rows = gather_values(
            replica.group.comm, lambda: [self._digested, self._digests], f"replicas of {replica.label}"
        )
        newest = max(row[0] for row in rows)  # a joined rank no longer checks
        ranks = [rank for rank, row in enumerate(rows) if row[0] == newest and newest >= 0]
        of_rank = replica.slicing.of_rank if _is_private(replica) else [0] * len(rows)
        for own in sorted({of_rank[rank] for rank in ranks}):
            column = [rank for rank in ranks if of_rank[rank] == own]
            found = _difference(names, {rank: rows[rank][1] for rank in column})
            if found:
                raise Error(
                    f"the replicas of {replica.label} differ {newest} steps after {self._since}: {found}; some rank wrote to its own parameters, or its memory or "
                    "processor failed: begin again from a checkpoint, without its host if that happens again"
                )

    # finite gradients -------------------------------------------------------------------------------------------------

    def take(self, index: int, of: weakref.ref[torch.Tensor], gradient: torch.Tensor) -> None:
        """Record a gradient of this rank before it is accumulated."""
        parameter = of()
        own = self._of_parameter.get(index)
        if own is not None and own.count % self._every:  # refuse() checks the first step of each optimizer
            return
        if self._is_stale:
            self._finite.clear()
            self._is_stale = False
        before = None if parameter is None or parameter.grad is None else self._finite.get(index)
        finite = is_finite(waited(held_tensor(gradient)) if is_dtensor(gradient) else gradient)
        self._finite[index] = finite if before is None else finite & before

    def refuse(
        self,
        optimizer: torch.optim.Optimizer,
        gradients: Iterable[torch.Tensor | None],
        model_ranks: Iterable[ModelRanks | None],
        refusal: Exception | None = None,
    ) -> None:
        """Raise Error(NOT_FINITE), or this rank's `refusal`, on all `model_ranks` if this step is checked. Collective then."""
        replica = self._replica()
        own = self._of_optimizer.get(optimizer)
        if replica is None or (own is not None and own.count % self._every) or replica.in_sliced_join:
            return

        @functools.cache
        def is_bad() -> bool:
            if refusal is not None:
                raise refusal
            known = [is_finite(each) for each in gradients if each is not None and each.numel()]
            return bool(known) and not bool(torch.stack([each.reshape(()) for each in known]).all())

        found = False
        try:
            for each in () if replica.in_join else filter(None, model_ranks):
                found = each.any_rank(lambda: bytes([found or is_bad()]), f"gradients of {replica.label}")
            if found or is_bad():
                raise Error(NOT_FINITE)
        finally:
            refusal = None  # its traceback would keep this frame alive

    def explain_not_finite(self, error: Error, parts: Sequence[ReplicaCheck] = ()) -> None:
        """Raise Error that names parameters and ranks, of `parts` too, if `error` is NOT_FINITE on some rank. Collective then."""
        replica = self._replica()
        if replica is None or str(error) != NOT_FINITE:
            return
        of_checks = [(check, other) for check in (self, *parts) if (other := check._replica()) is not None]
        found = ((other.table.names, check._finite) for check, other in of_checks)
        bad = [names[index] for names, all_finite in found for index, each in sorted(all_finite.items()) if not each]
        mine = [len(bad), bad[:_MOST_NAMED]]
        gathered: dict[int, Any] = {replica.group.rank: mine}
        if not replica.in_join:  # a joined rank would not take part in the exchange
            gathered = dict(enumerate(gather_values(replica.group.comm, lambda: mine, f"gradients of {replica.label}")))
        rows = [f"rank {rank} brought {_some(names, count)}" for rank, (count, names) in gathered.items() if count]
        more = f" and {len(rows) - _MOST_NAMED} more ranks" if len(rows) > _MOST_NAMED else ""
        none = "every rank's own gradients are finite, but their sum is not"
        if any(other.model_ranks is not None for _, other in of_checks):
            none = "the gradients of all ranks that average with this one are finite: see the ranks with other shards"
        if len(gathered) < replica.group.world_size:
            none = f"rank {replica.group.rank} brought none, and other ranks are not asked during a join"
        why = "; ".join(rows[:_MOST_NAMED]) + more or none
        # before the round whose gradients are used; another optimizer may have stepped since
        steps = self._steps - (self._steps > 0 and self._stepped == replica.reducer.rounds)
        raise Error(f"{replica.label}, {steps} steps after {self._since}: {NOT_FINITE}: {why}")


def is_finite(gradient: torch.Tensor) -> torch.Tensor:
    """Return a scalar: True if all elements are finite. One pass; the host does not wait for a GPU."""
    values = as_real((gradient._values() if gradient.is_sparse else gradient).detach())
    if cuda.runtime.holds(values):
        if values.element_size() == 8:
            return values.isfinite().all()
        return torch.isfinite(values.sum(dtype=torch.float64))  # a sum of narrower values cannot overflow
    finite = torch.isfinite(values.sum(dtype=torch.float32 if values.dtype in LOW_DTYPES else None))
    return finite if bool(finite) else values.isfinite().all()  # the sum itself may have overflowed


def digests(replica: Any) -> list[int]:
    """Return one number for the values of each parameter that this rank holds, equal for equal bits."""
    replica.access.before_evaluation()  # wait for the last step's gathers
    storage, found = replica.parameters(), []
    with torch.no_grad():
        for index, parameter in enumerate(replica.table.parameters):
            held = storage.slice(index) if storage.releases else parameter.detach()
            found.append(digest_of(held) if held is not None and held.numel() else 0)
    return _numbers(found)


def _state_digests(replica: Any, optimizer: torch.optim.Optimizer) -> list[int]:
    found: list[Any] = [0] * len(replica.table.parameters)
    states = getattr(optimizer, "state", {})
    for index, parameter in enumerate(replica.table.module_parameters):
        state = states.get(parameter, {})
        for key in sorted(state, key=str):
            found[index] = (found[index] * 31 + _digest_of_value(state[key])) % 2**57  # GPUs' numbers have 64 bits
    return _numbers(found)


def _digest_of_value(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return zlib.crc32(repr(value).encode()) if isinstance(value, (bool, int, float, str)) else 0
    held = value.detach()
    held = held_tensor(held) if is_dtensor(held) else held
    return digest_of(held) if type(held) is torch.Tensor and not held.is_sparse and held.numel() else 0


def _numbers(found: list[Any]) -> list[int]:
    there = [each for each in found if isinstance(each, torch.Tensor)]
    values = iter(torch.stack(there).tolist() if there else ())  # the only wait for the GPU
    return [next(values) if isinstance(each, torch.Tensor) else each for each in found]


def digest_of(held: torch.Tensor) -> Any:
    """Return a number for a dense tensor's bits, without a copy; on a GPU a scalar there, equal in any order of sums."""
    dense = held.contiguous() if dense_strides(held) is None else held.data
    if not cuda.runtime.holds(dense):
        return crc32c(dense.data_ptr(), dense.numel() * dense.element_size())
    words = torch.view_as_real(dense) if dense.is_complex() else dense
    if words.element_size() == 8:
        return words.view(torch.int64).sum()
    return words.view(_INTEGERS[words.element_size()]).sum(dtype=torch.int64)


def _is_private(replica: Any) -> bool:
    return bool(replica.parameters().releases)


def _has_replicas(replica: Any) -> bool:
    """Return True if several ranks hold some of the parameter data. Equal on all ranks."""
    group, storage = replica.group, replica.parameters()
    if group.world_size == 1:
        return False
    if storage.releases:
        return replica.slicing.is_replicated
    return not (replica.zero == 3 and storage.shared and group.host_count == 1 and not replica.slicing.is_replicated)


def _difference(names: Sequence[str], rows: dict[int, list[int]]) -> str:
    """Describe the ranks and parameters with other values than on most ranks."""
    columns = list(zip(*rows.values()))
    differing = [index for index, column in enumerate(columns) if len(set(column)) > 1]
    if not differing:
        return ""
    first, more = differing[0], len(differing) - 1
    counts = collections.Counter(row[first] for row in rows.values())
    (value, most), *others = counts.most_common()
    named = names[first] + (f" and {more} more" if more else "")
    if most == others[0][1]:
        one = next(rank for rank, row in rows.items() if row[first] != rows[min(rows)][first])
        return f"{named} of rank {min(rows)} and of rank {one} have other values, and it cannot be told which is right"
    wrong = [rank for rank, row in rows.items() if row[first] != value]
    ranks = ", ".join(map(str, wrong[:_MOST_NAMED])) + (" and more" if len(wrong) > _MOST_NAMED else "")
    return f"{named} of rank {ranks} has other values than on {most} ranks, which agree"


def _some(names: list[str], count: int) -> str:
    more = f" and {count - len(names)} more" if count > len(names) else ""
    return f"{'that of parameter' if count == 1 else 'those of'} {', '.join(map(repr, names))}{more}"
