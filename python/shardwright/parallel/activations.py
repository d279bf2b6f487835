"""checkpoint_units: activations of a unit are computed again in its backward; its inputs may lie elsewhere meanwhile.

torch.utils.checkpoint does the work, without reentrant backwards. A unit's class becomes a subclass whose call runs
inside a checkpoint. So all hooks of the unit, ours included, run around the recomputation as around the forward.
docs/design/activations.md has the design.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.weak import WeakTensorKeyDictionary

from .._engine import Error
from ..comm.agreement import gather_answers
from ..layout.param_groups import RECOMPUTE
from ..layout.views import dense_strides
from ..options.checks import count, offload_folder, offload_kind
from ..torch_compat import autograd as _hooks
from ..torch_compat import cuda
from ..torch_compat.internals import flatten, unflatten
from .moved_tensors import DeviceStore, FileStore, Moved, Store
from .replica import live_replicas
from .unit_calls import COMPILED, change_calls, outermost_units

_logger = logging.getLogger("shardwright")
#: smaller inputs stay in memory
_MOVED_BYTES = 64 << 10
_count = count(1, 1 << 20, "the number of units that are recomputed together, at least 1")


def checkpoint_units(
    model: torch.nn.Module, every: int = 1, offload: str | None = None, policy: Any = None
) -> torch.nn.Module:
    """Keep no activations of the units of `model`: each backward computes them again from the units' inputs.

    Parameters
    ----------
    model : Module
        A module before or after sw.wrap, at any stage, or one of fully_shard. Its units are those of zero=3: modules
        that fully_shard was called on, those of `units=` of a wrapped module, or else repeated blocks. Of nested units
        the outer ones are recomputed.
    every : int
        The number of consecutive units of which only the first keeps its inputs, if each is called with the outputs of
        the one before. Activations of `every` units are whole at once in the backward.
    offload : {"cpu", "nvme:<folder>"}, optional
        Where inputs that carry gradients lie until their backward. "cpu": in pinned host memory, for GPUs; no effect on
        the CPU. "nvme:<folder>": in a file without a name, which is written and read in the background.
    policy : callable or list, optional
        torch's selective checkpointing: the argument of torch.utils.checkpoint.create_selective_checkpoint_contexts.
        What it saves stays in memory.

    Returns
    -------
    Module
        `model`. The class of each unit becomes a subclass. A copy, or a pickled unit, has its own class.

    Raises
    ------
    Error
        If the model has no units, was passed before, recomputes by itself (transformers) or is of TorchScript. In a
        forward: if a unit changes an input in place, or runs in torch.func.functional_call.
    ValueError
        For an argument out of range, or `policy` together with `every` above 1.
    OSError
        For a folder in which no file can be made; on all ranks if `model` is wrapped. A disk that fills up in a step
        ends the communicator with one sentence, which all ranks raise.

    Notes
    -----
    Not collective before sw.wrap, and collective with "nvme:" after it. Bits are those of the model without it: the
    state of torch's random generators and autocast is that of the forward, and a buffer that the forward changed has its
    earlier value again. A forward that draws from other generators, or reads attributes that it changes, differs.

    Cost: a forward of each unit in the backward, about a third of a step; at zero=3 no more gathers (every=1). Memory: the
    inputs of every `every`-th unit, and the activations of `every` units.

    References
    ----------
    T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.

    Examples
    --------
    >>> import torch, shardwright as sw
    >>> blocks = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    >>> model = sw.wrap(sw.checkpoint_units(blocks))
    >>> model(torch.ones(2, 4)).sum().backward()
    """
    _count("every", every)
    kind, folder = offload_kind(offload), offload_folder(offload)
    if policy is not None and every > 1:
        raise ValueError(f"policy= needs every=1, got every={every}: it saves outputs of operations of one unit")
    if policy is not None:
        create_selective_checkpoint_contexts(policy)  # raises for another kind of argument
    engine, bare, units = outermost_units(model, "checkpoint_units")
    for name, each in bare.named_modules():
        if getattr(type(each), RECOMPUTE, None) is not None:
            raise Error(f"checkpoint_units was called on unit {name!r} already: call it once")
        if getattr(each, "gradient_checkpointing", False) is True:
            raise Error(
                f"{name or 'this module'} recomputes its activations by itself (gradient_checkpointing): call "
                "gradient_checkpointing_disable() first, or leave checkpoint_units out"
            )
    if policy is not None and any(getattr(type(unit), COMPILED, False) for unit in units):
        raise ValueError(
            "compile_units hides the operations of a unit from checkpoint_units(policy=): leave one of them out"
        )
    settings = Recompute(every, policy, tuple(p for unit in units for p in unit.parameters()))
    on_gpu = any(cuda.runtime.holds(p) for unit in units for p in unit.parameters())
    if kind == "cpu" and not on_gpu:
        _logger.warning("checkpoint_units: offload='cpu' has no effect, the units' inputs are in host memory already")
    elif kind is not None:
        settings.store = _make_store(folder, type(bare).__name__, on_gpu, engine)
    change_calls(units, lambda kind: {"__call__": _call_of(kind), RECOMPUTE: settings})
    return model


def _make_store(folder: str | None, label: str, on_gpu: bool, engine: Any) -> Store:
    """Make the place of inputs. Collective if the module has replicas: a folder that fails on one rank fails on all."""
    made: list[Store] = []

    def make() -> bytes:
        file = None if folder is None else FileStore(folder, label)
        made.append(DeviceStore(file) if on_gpu or file is None else file)
        return b""

    if engine is None or not engine.made:
        make()
    else:
        where = f"checkpoint_units of {label}"
        gather_answers(engine.replica.group.comm, make, where, refusals=(OSError, MemoryError, Error), retell=_os_error)
    return made[0]


def _os_error(rank: int, sentence: str) -> Exception:
    return OSError(f"checkpoint_units on rank {rank}: {sentence}")


class Recompute:
    """The settings of one call of checkpoint_units."""

    def __init__(self, every: int, policy: Any, parameters: tuple[torch.Tensor, ...]) -> None:
        self.every = every
        self.store: Store | None = None
        self._identities = frozenset(map(id, parameters))
        self.options: dict[str, Any] = {}
        if policy is not None:
            self.options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
        #: (unit, which of its modules train) -> its modules whose buffers the forward changes
        self.changing: dict[Any, set[str]] = {}

    def run(self, unit: torch.nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a unit's call in a checkpoint."""
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        if _hooks.inside_functional_call():
            raise Error(
                f"torch.func.functional_call on {type(unit).__name__}, a unit of checkpoint_units: the backward would compute it "
                "again with the module's own parameters: leave checkpoint_units out, or write the values into the parameters"
            )
        region = _Region(self, unit, call, args, kwargs)
        output = checkpoint(region, region.anchor, use_reentrant=False, **self.options)
        region.end(output)
        return output

    def keep(self, tensor: torch.Tensor) -> Moved | None:
        """Move a tensor out, or return None if it stays."""
        moves = tensor.requires_grad and tensor.nbytes >= _MOVED_BYTES and type(tensor) is torch.Tensor
        if self.store is None or not moves or dense_strides(tensor) is None:
            return None
        with self._telling():
            return self.store.put(tensor)

    def get(self, moved: Moved) -> torch.Tensor:
        with self._telling():
            return moved.get()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """End the communicators of the units' replicas if this rank cannot go on: the peers would wait for it."""
        try:
            yield
        except OSError as error:
            for replica in live_replicas():
                if not self._identities.isdisjoint(replica.identities) and replica.group.comm.is_alive:
                    replica.group.comm.abort(f"rank {replica.group.rank}: inputs of a unit of {replica.label}: {error}")
            raise


class _Region:
    """One call of a unit: run by torch's checkpoint in the forward, and again in a backward from what is kept."""

    def __init__(
        self, settings: Recompute, unit: torch.nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        self._settings, self._unit, self._call = settings, unit, call
        self._leaves, self._spec = flatten((args, kwargs))
        self._is_first, self._has_end = True, False
        self.depth = 1  # the position in a chain of units that are recomputed together
        #: positions of outputs that other units keep nothing of -> the outputs of the latest recomputation, until taken
        self.wanted: set[int] = set()
        self.outputs: dict[int, torch.Tensor] = {}
        self.graph_task = -1  # the backward that they belong to
        # checkpoint() looks at its arguments for the device whose random state it keeps
        given = (each for each in (*self._leaves, *unit.parameters()) if isinstance(each, torch.Tensor))
        device = next((each.device for each in given if each.device.type != "cpu"), torch.device("cpu"))
        self.anchor = torch.empty(0, dtype=torch.float32, device=device, requires_grad=True)
        self._ending: Any = None
        self._buffers = _Buffers(settings, unit)

    def __call__(self, anchor: torch.Tensor) -> Any:
        leaves = [each.get() if isinstance(each, _Kept) else each for each in self._leaves]  # in the forward none is
        args, kwargs = unflatten(leaves, self._spec)
        del leaves
        if not self._is_first:
            with self._buffers.earlier():
                output = self._call(*args, **kwargs)
            if self.wanted:
                made = flatten(output)[0]
                self.graph_task = _hooks.graph_task_id()
                self.outputs = {position: made[position].detach() for position in self.wanted}
            if self._has_end:
                _End.apply(anchor)  # stops the recomputation, but not before the outputs are there
            return output
        self._buffers.note()
        tensors = [each for each in self._leaves if isinstance(each, torch.Tensor)]
        versions = [_version_of(each) for each in tensors]
        for each in tensors:
            source = _sources.get(each)
            if source is not None:
                self.depth = max(self.depth, source.region.depth + 1)
        output = self._call(*args, **kwargs)
        self._buffers.compare()
        for each, version in zip(tensors, versions):
            if _version_of(each) != version:
                raise Error(
                    f"the forward of unit {type(self._unit).__name__} changes an input of shape {list(each.shape)} in place, "
                    "and its backward would compute the unit again from the changed one: change a copy "
                    "(x = x + 1 for x += 1, inplace=False)"
                )
        self._has_end = self.depth < self._settings.every
        if self._has_end:
            self._ending = _End.apply(anchor)  # in torch 2.11 its node alone loses what it saved
        return output

    def end(self, output: Any) -> None:
        """Let go of the inputs, and tell the next unit where its inputs come from."""
        self._is_first = False
        chained = 1 < self.depth <= self._settings.every
        self._leaves = [
            _Kept(self._settings, each, chained) if isinstance(each, torch.Tensor) else each for each in self._leaves
        ]
        ending, self._ending = self._ending, None  # which refers to this object
        if ending is not None:
            for position, each in enumerate(flatten(output)[0]):
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    _sources[each] = _Source(self, ending, position, _version_of(each))

    def take_output(self, position: int, ending: Any) -> torch.Tensor:
        """Return an output for the backward that runs now, and recompute the unit if that was not done yet."""
        if self.graph_task != _hooks.graph_task_id() or position not in self.outputs:
            ending.grad_fn.saved_tensors  # noqa: B018  torch's checkpoint recomputes what it needs
        return self.outputs.pop(position)


class _Source:
    """Where a tensor comes from: an output of a region, which the node of `ending`, its graph's last tensor, recomputes."""

    def __init__(self, region: _Region, ending: Any, position: int, version: int) -> None:
        self.region, self.ending, self.position, self.version = region, ending, position, version

    def get(self) -> torch.Tensor:
        return self.region.take_output(self.position, self.ending)


#: a unit's output, while it is alive -> where it comes from; an attribute of it would be saved with it
_sources: MutableMapping[torch.Tensor, _Source] = WeakTensorKeyDictionary()


class _End(torch.autograd.Function):
    """The last operation of a region: what it saves is the last thing that a recomputation needs."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(anchor)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _Kept:
    """A tensor that a recomputation begins with: in memory, moved out, or the output of the unit before."""

    def __init__(self, settings: Recompute, tensor: torch.Tensor, chained: bool) -> None:
        self._settings, self._requires_grad = settings, tensor.requires_grad
        self._place: Any = _sources.pop(tensor, None) if chained else None  # a second unit keeps the tensor itself
        if self._place is not None:
            if self._place.version == _version_of(tensor):
                self._place.region.wanted.add(self._place.position)
                return
        moved = settings.keep(tensor)
        self._place, self._shape, self._version = moved, list(tensor.shape), _version_of(tensor)
        self._tensor = tensor.detach()
        if moved is not None:  # what remains counts versions and has no memory
            self._tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def get(self) -> torch.Tensor:
        if isinstance(self._place, _Source):
            return self._place.get().requires_grad_(self._requires_grad)
        # a moved one too: its bytes may have been on their way
        if _version_of(self._tensor) != self._version:
            raise RuntimeError(
                f"an input of a unit, of shape {self._shape}, was changed in place after the unit's forward, and its "
                "backward computes the unit again from it: change a copy"
            )
        found = self._tensor.detach() if self._place is None else self._settings.get(self._place)
        return found.requires_grad_(self._requires_grad)


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _Buffers:
    """The buffers of a unit that its forward changes, such as running means: a recomputation begins with the earlier ones."""

    def __init__(self, settings: Recompute, unit: torch.nn.Module) -> None:
        self._known, self._key = settings.changing, (id(unit), *(module.training for module in unit.modules()))
        self._named = {
            (name, key): module
            for name, module in unit.named_modules()
            for key, each in module._buffers.items()
            if each is not None
        }
        self._before: dict[Any, torch.Tensor] = {}

    def note(self) -> None:
        if not self._named:
            return
        now, changing = self._now(), self._known.get(self._key)
        self._state = {at: (id(each), each._version) for at, each in now.items()}
        with torch.no_grad():
            self._before = {at: each.clone() for at, each in now.items() if changing is None or at[0] in changing}

    def _now(self) -> dict[Any, torch.Tensor]:
        found = {at: module._buffers.get(at[1]) for at, module in self._named.items()}
        return {at: each for at, each in found.items() if each is not None}

    def compare(self) -> None:
        """Keep the earlier values of the buffers that the forward has changed."""
        if not self._named:
            return
        now = self._now()
        changed = {at for at, each in now.items() if (id(each), each._version) != self._state.get(at)}
        # batch_norm writes running means and counts no version
        changed |= {at for at, each in self._before.items() if at in now and not torch.equal(each, now[at])}
        unknown = changed - self._before.keys()
        if unknown:
            del self._known[self._key]  # the next forward finds all again
            name, key = min(unknown)
            raise Error(
                f"a unit's forward changes its buffer {f'{name}.{key}' if name else key!r} now, and did not before, so that its earlier value "
                "is lost: run the forward again"
            )
        # one that a first forward writes the same value to is seen by its neighbours
        known = self._known.setdefault(self._key, set())
        known.update(name for name, _ in changed)
        self._before = {at: each for at, each in self._before.items() if at[0] in known}

    @contextmanager
    def earlier(self) -> Iterator[None]:
        """Return a context in which the unit's buffers have the values of before its forward."""
        later = {at: self._named[at]._buffers[at[1]] for at in self._before}
        for at, each in self._before.items():
            self._named[at]._buffers[at[1]] = each.clone()
        try:
            yield
        finally:
            for at, buffer in later.items():
                self._named[at]._buffers[at[1]] = buffer


def _call_of(kind: Any) -> Callable[..., Any]:
    """Return the call of units of a class. A whole compiled module leaves it out of its graphs."""
    plain = kind.__call__
    run = _hooks.disable_compile(Recompute.run)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(getattr(self, RECOMPUTE), self, functools.partial(plain, self), args, kwargs)

    return call
