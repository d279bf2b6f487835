"""Errors of a memory that is full, in a forward, a backward or a step: what this rank holds, and what would make it less."""

from __future__ import annotations

import functools
import resource
from collections.abc import Callable
from typing import Any

import torch

from ..layout.param_groups import RECOMPUTE
from ..layout.rank_memory import Memory
from ..torch_compat import autograd as _hooks
from .replica import Replica, live_replicas

#: returns what a replica holds, or None if that is not known; set by the module that knows optimizers
memory_of: Callable[[Replica], Memory | None] = lambda replica: None
_MIB = 2.0**20
#: attributes of an error that has the plan, and of a step that adds it
_TOLD, _EXPLAINS = "_shardwright_told", "_shardwright_explains"
_CPU_TEXTS = ("can't allocate memory", "not enough memory")
#: the modules described in one error, at most
_MODULES_MAX = 3


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for torch's error of a GPU or of the host, or Python's own."""
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _CPU_TEXTS)


def explain(error: BaseException) -> None:
    """Add the plan of the wrapped modules to an error of a full memory, once; leave any other one alone."""
    if not is_out_of_memory(error) or getattr(error, _TOLD, False):
        return
    setattr(error, _TOLD, True)
    replicas = [each for each in live_replicas() if not each.retired]
    text = "\n".join(_plan(each) for each in replicas[-_MODULES_MAX:])
    if not text:
        return
    if hasattr(error, "add_note"):  # from Python 3.11
        error.add_note(text)
    else:
        error.args = (f"{error.args[0] if error.args else ''}\n{text}", *error.args[1:])


def _plan(replica: Replica) -> str:
    held, peak, place = memory_of(replica), _peak_bytes(replica), "this process"
    if replica.link is not None:
        place = "the GPU's memory"
    rank, stage = f"rank {replica.group.rank} of {replica.group.world_size}", f"zero={replica.zero}"
    head = f"{replica.label} at {stage} on {rank}"
    if held is None:
        return f"{head}: the peak of {place} is {_shown(peak)}; its optimizer's state has an unknown size. {_advice(replica, None, peak)}"
    parts = {"parameters": held.parameters, "gradients": held.gradients, "optimizer state": held.state}
    parts |= {name: size for name, size in (("units", held.units), ("buffers of offload", held.buffers)) if size}
    listed = ", ".join(f"{name} {_shown(size)}" for name, size in parts.items())
    rest = max(0, peak - held.model_state)
    return (
        f"{head}: {listed}, together {_shown(held.model_state)}; the peak of {place} is {_shown(peak)}, so activations and all else are about "
        f"{_shown(rest)}. {_advice(replica, held, peak)}"
    )


def _shown(size: int) -> str:
    return f"{size / _MIB:,.1f} MiB" if size >= _MIB else f"{size:,} bytes"


def _peak_bytes(replica: Replica) -> int:
    device = replica.table.parameters[0].device
    if replica.link is not None and device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _advice(replica: Replica, held: Memory | None, peak: int) -> str:
    """Return the next rungs of the ladder (docs/large-models.md), the one that frees most first."""
    engine, on_gpu = replica.engine(), replica.link is not None
    settings = [getattr(type(each), RECOMPUTE, None) for each in (engine.module.modules() if engine else ())]
    used = next((each for each in settings if each is not None), None)
    activations = ["sw.checkpoint_units(model)"] if used is None else []
    if used is not None and used.store is None:
        activations.append(f"checkpoint_units(offload='{'cpu' if on_gpu else 'nvme:<folder>'}')")
    activations.append("a smaller micro-batch")
    state = [f"zero={replica.zero + 1}"] if replica.zero < 3 else []
    if replica.zero == 3 and not replica.releases_parameters:
        state.append("share_parameters=False if ranks are on many hosts")
    if not replica.stores:
        state.append(f"offload='{'cpu' if on_gpu else 'nvme:<folder>'}' with sw.optim")
    if replica.zero == 3 and replica.stores and on_gpu and not replica.parameters().home_bytes:
        state.append("offload={'parameters': 'cpu', 'optimizer': 'cpu'}")
    if replica.zero == 3 and replica.releases_parameters and not on_gpu and not replica.parameters().is_in_file:
        state.append("offload={'parameters': 'nvme:<folder>'} with sw.optim")
    if held is not None and held.units > held.parameters:
        state.append("smaller units (units=)")
    first = held is None or peak - held.model_state > held.model_state
    rungs = [*activations, *state] if first else [*state, *activations]
    return f"Next: {rungs[0]}; then {', '.join([*rungs[1:], 'more ranks'])} (docs/large-models.md)"


def explain_steps(optimizer: torch.optim.Optimizer) -> None:
    """Explain errors of the steps of an optimizer's class from now on, as torch itself wraps them for its profiler."""
    kind: Any = type(optimizer)
    if not getattr(kind.step, _EXPLAINS, False):
        step = kind.step
        kind.step = _hooks.explained(step, explain)
        setattr(kind.step, _EXPLAINS, True)
        kind.step.__wrapped__ = getattr(step, "__wrapped__", step)  # the plan steps a copy without hooks


@functools.cache
def explain_all() -> None:
    """Explain errors of backwards from now on."""
    _hooks.explain_backwards(explain)
