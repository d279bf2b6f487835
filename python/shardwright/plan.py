"""The memory that a wrapped model uses on a rank, in bytes, before its first step.

Wrapping lays out parameters and gradients. A copy of the optimizer steps on one small tensor to measure its state. For
an elementwise optimizer this gives the bytes per element.
"""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ._engine import host_limits
from .comm.agreement import gather_values
from .layout.rank_memory import Memory
from .optim.master_weights import MasterOptimizer
from .optim.rules import is_elementwise

if TYPE_CHECKING:
    from .parallel.replica import Replica

_PROBE_NUMEL = 32
#: the state of an optimizer, at most, in bytes of parameters and gradients: below this share of a limit it is not measured
_STATE_MOST = 8
#: (group of the parameter, elements that this rank steps on, their dtype, True if they are masters)
_Held = tuple[Mapping[str, Any], int, torch.dtype, bool]


def memory_plan(replica: Replica) -> dict[str, Any]:
    """Return `optimizer_state_bytes` and `planned_bytes` of this rank for describe(); None if not yet known."""
    held, is_known = memory_of(replica), any(each is not None for each in replica.steppers.all())
    plan: dict[str, Any] = {"optimizer_state_bytes": _states_bytes(replica)} if is_known else {}
    return {**plan, "planned_bytes": None if held is None else held.model_state}


def _states_bytes(replica: Replica) -> int | None:
    optimizers = [optimizer for optimizer in replica.steppers.all() if optimizer is not None]
    states = [_state_bytes(replica, optimizer) for optimizer in optimizers]
    known = [each for each in states if each is not None]
    return sum(known) if len(known) == len(states) else None


def memory_of(replica: Replica) -> Memory | None:
    """Return what a model holds on this rank between steps; None if its optimizer's state is not known."""
    in_memory = 0 if replica.stores else _states_bytes(replica)
    if in_memory is None:
        return None
    parameters, units = _parameter_bytes(replica)
    buffers, gradients = sum(store.planned_nbytes for store in replica.stores), replica.reducer.planned_bytes
    gradients -= getattr(replica.reducer, "home_bytes", 0)  # of a GPU's alone
    return Memory(parameters=parameters, units=units, gradients=gradients, state=in_memory, buffers=buffers)


def check_fits(replicas: Sequence[Replica]) -> None:
    """Raise MemoryError on all ranks if the plans of the ranks under one limit exceed it. Collective.

    Limits are those that no program can pass: a control group's, and the memory and swap of a host. What other programs
    hold does not count, since it may go.
    """
    first = replicas[0]
    group, label = first.group, first.label
    if any(each.link is not None for each in replicas):
        return

    def need() -> list[Any]:
        limits, installed = host_limits(), _installed_bytes()
        bounds = [limits["memory_max_bytes"], installed]
        least = min((each for each in bounds if each is not None), default=0)
        total = sum(sum(_parameter_bytes(each)) + each.reducer.planned_bytes for each in replicas)
        if total * _STATE_MOST * group.world_size > least:
            plans = [memory_of(each) for each in replicas]
            total = sum(each.model_state for each in plans if each is not None)
        return [total, [limits["memory_max_bytes"], limits["memory_group"]], [installed, group.host_of[group.rank]]]

    rows = gather_values(group.comm, need, f"memory of {label}")
    for at, what in ((1, "their control group (memory.max)"), (2, "the memory and swap of their host")):
        for limit, place in sorted({(*row[at],) for row in rows if row[at][0] is not None}):
            ranks = [rank for rank, row in enumerate(rows) if row[at][1] == place]
            total = sum(rows[rank][0] for rank in ranks)
            if total > limit:
                raise MemoryError(
                    f"{label} needs {total:,} bytes on {len(ranks)} ranks for parameters, gradients, units and the optimizer's state, and "
                    f"{what} has {limit:,}: use more hosts, a higher stage, or offload= (docs/large-models.md)"
                )


def _installed_bytes() -> int | None:
    """Return the bytes of memory and swap of this host; None if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo", encoding="ascii") as file:
        lines = [line.split() for line in file]
        return 1024 * sum(int(line[1]) for line in lines if line[0] in ("MemTotal:", "SwapTotal:")) or None
    return None


def _parameter_bytes(replica: Replica) -> tuple[int, int]:
    """Return the bytes of parameters, and of whole units; if a host shares one copy, this rank's part of it."""
    sizes = [p.numel() * p.element_size() for p in replica.table.parameters]
    if not replica.zero:
        return sum(sizes), 0
    memory = replica.parameters()
    if memory.releases:
        held = 0 if memory.is_in_file else memory.bytes_held - memory.home_bytes
        return held, int(memory.plan()["unit_bytes"])
    held = memory.bytes_held // replica.group.world_size if memory.shared else memory.bytes_held
    return held + sum(size for index, size in enumerate(sizes) if not memory.is_moved(index)), 0


def _state_bytes(replica: Replica, optimizer: Any) -> int | None:
    inner = getattr(optimizer, "_inner", optimizer)
    if replica.zero and optimizer.partition == "tensor" and not is_elementwise(inner):
        return None  # the size of the state depends on shapes
    total, rates = 0, {}
    for group, numel, dtype, has_master in _held(replica, optimizer):
        key = (id(group), dtype, has_master)
        if key not in rates:
            rates[key] = _element_bytes(inner, group, torch.float32 if has_master else dtype)
        rate = rates[key]
        if rate is None:
            return None
        total += numel * (rate + 4 * has_master)
    return total


def _held(replica: Replica, optimizer: Any) -> Iterator[_Held]:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not p.requires_grad or not (replica.zero or replica.holds(p)):  # another engine of the wrapper counts it
                continue
            if not replica.zero:
                yield group, p.numel(), p.dtype, isinstance(optimizer, MasterOptimizer) and optimizer.has_master(p)
            elif (piece := optimizer.piece_of(p)) is not None:
                yield group, piece.numel(), p.dtype, optimizer.has_master(p)


def _element_bytes(inner: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> int | None:
    """Return the bytes of state per element; None if neither a copy of the optimizer nor a new one can step."""
    tensor = torch.zeros(_PROBE_NUMEL, dtype=dtype, device="cpu", requires_grad=True)
    tensor.grad = torch.zeros_like(tensor)
    step = type(inner).step
    # a new instance serves classes that need state from their constructor (Adagrad in torch 2.4)
    for make in (_emptied, lambda *_: type(inner)([tensor], **inner.defaults)):
        try:
            twin = make(inner, group, tensor)
            getattr(step, "__wrapped__", step)(twin)  # a copy without hooks
        except Exception:
            continue
        values = [value for value in twin.state[tensor].values() if isinstance(value, torch.Tensor)]
        return sum(value.element_size() for value in values if value.numel() == _PROBE_NUMEL)
    return None


def _emptied(inner: torch.optim.Optimizer, group: Mapping[str, Any], tensor: torch.Tensor) -> torch.optim.Optimizer:
    twin = copy.copy(inner)
    twin.state = collections.defaultdict(dict)
    twin.param_groups = [{**group, "params": [tensor]}]
    return twin
