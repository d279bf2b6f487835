"""Mixed precision: forward and backward run in low-precision copies; parameters stay float32 and are their own masters.

While the wrapper's forward runs, each parameter's slot in its module holds `parameter.to(param_dtype)`, a node of the
autograd graph. Gradients therefore arrive in the parameter's dtype. Accumulation, averages, clipping, loss scaling,
optimizers and checkpoints work as for a float32 model, at every stage.

Activation checkpointing runs parts of the forward again inside the backward; each module then takes its copies for its
own call. At zero=3 parameters already lie in memory in their compute dtype, so slots hold views of that memory, and
nothing is copied (docs/design/store.md). Outside of the wrapper the module computes in float32.
docs/design/optim.md has the table.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from ..layout.local_parameters import local_of, module_parameter
from ..layout.views import made_dense
from ..options.compress import Compressor
from ..options.names import near
from ..options.precision import LOW_DTYPES, Precision
from ..torch_compat import autograd as _hooks
from ..torch_compat.dtensor import is_dtensor, placed_like, set_dtype
from ..torch_compat.internals import refresh_weights
from .sharded_parameter import leaf_of

#: modules -> the names of their parameters whose slots hold copies
_Taken = list[tuple[torch.nn.Module, list[str]]]


class PrecisionPlan:
    """The policies of one module and its submodules, and the copies that are in place.

    `precision` is one policy or maps module names to policies; "" is the module itself. The nearest name above a
    submodule applies to it; without one nothing is cast. `ignored`: names of parameters that are not cast.
    """

    def __init__(self, module: torch.nn.Module, precision: Any, ignored: Collection[str] = ()) -> None:
        given = precision if isinstance(precision, Mapping) else {"": precision}
        submodules = dict(module.named_modules())
        for name in given:
            if name not in submodules:
                raise ValueError(f"precision: no module is called {name!r}{near(str(name), submodules)}")
        where = "precision[{!r}]" if given is precision else "precision"
        self._policies = {name: Precision.of(value, where.format(name)) for name, value in given.items()}
        self._module = module
        self._root = self._nearest("")
        self._boundaries: dict[torch.nn.Module, tuple[Precision, torch.dtype | None]] = {
            submodules[name]: (policy, policy.output_dtype or self._nearest_dtype(name.rpartition(".")[0]))
            for name, policy in self._policies.items()
            if name
        }
        self._slots = {each: self._slots_of(name, each, set(ignored)) for name, each in submodules.items()}
        self._active = False
        self._swapped: dict[torch.nn.Module, dict[str, Any]] = {}  # the parameters that copies have replaced
        #: copies by parameter, dtype and kind, with what they were made of
        self._copies: dict[tuple[int, torch.dtype, bool, bool], tuple[torch.Tensor, torch.Tensor]] = {}
        self._recomputing: list[tuple[torch.nn.Module, _Taken]] = []
        #: one per engine: returns where it keeps a parameter
        self._sources: list[Callable[[torch.Tensor], torch.Tensor | None]] = []
        self._in_units = False
        self._handles: list[Any] = []
        #: parameters that became float32, with their old data; until keep()
        self._made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _nearest(self, name: str) -> Precision | None:
        while name and name not in self._policies:
            name = name.rpartition(".")[0]
        return self._policies.get(name)

    def _nearest_dtype(self, name: str) -> torch.dtype | None:
        policy = self._nearest(name)
        return None if policy is None else policy.param_dtype

    def _slots_of(self, name: str, module: torch.nn.Module, ignored: set[str]) -> dict[str, torch.dtype]:
        """Return the names of the module's own parameters that are cast, with their dtypes."""
        dtype = self._nearest_dtype(name)
        if dtype is None:
            return {}
        own = [each for each, p in module._parameters.items() if p is not None and p.is_floating_point()]
        return {each: dtype for each in own if (f"{name}.{each}" if name else each) not in ignored}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy: without units, not running."""
        return {**self.__dict__, "_sources": [], "_in_units": False, "_made": [], "_copies": {}}

    def __repr__(self) -> str:
        return f"PrecisionPlan({self._policies})"

    def compressor(self) -> Compressor | None:
        """Return the compressor for reduce_dtype. ValueError if policies differ: buckets mix their parameters."""
        asked = {policy.reduce_dtype for policy in self._policies.values() if policy.reduce_dtype is not None}
        if len(asked) > 1:
            raise ValueError(f"precision: reduce_dtype must be one for the whole module, got {sorted(map(str, asked))}")
        from ..options.compressors import Bf16, Fp16  # which few programs use

        return Bf16() if torch.bfloat16 in asked else Fp16() if torch.float16 in asked else None

    def adds_in_float32(self) -> bool:
        """Return True if low-precision gradients must be added in float32."""
        wide = any(policy.reduce_dtype is torch.float32 for policy in self._policies.values())
        return wide and bool(self.without_master())

    def without_master(self) -> list[torch.Tensor]:
        """Return the low-precision parameters that a policy with master=False leaves in their dtype."""
        denied = []
        for name, submodule in self._module.named_modules():
            policy = self._nearest(name)
            if policy is not None and not policy.master:
                denied += [p for p in submodule._parameters.values() if p is not None and p.dtype in LOW_DTYPES]
        return denied

    def compute_dtypes(self) -> dict[int, torch.dtype]:
        """Map the id of each parameter to the dtype in which modules compute with it, if they all use one dtype."""
        found: dict[int, set[torch.dtype]] = {}
        for submodule, slots in self._slots.items():
            for name, parameter in submodule._parameters.items():
                if parameter is not None:
                    found.setdefault(id(parameter), set()).add(slots.get(name, parameter.dtype))
        return {key: dtypes.pop() for key, dtypes in found.items() if len(dtypes) == 1}

    # installing ---------------------------------------------------------------------------------------------------

    def install(self, *, masters: bool = True) -> None:
        """Create masters, if `masters`, and register hooks; replace an earlier plan of the same module."""
        remove_plan(self._module)
        _plans[id(self._module)] = self
        for name, submodule in self._module.named_modules():
            policy = self._nearest(name)
            for each in self._slots[submodule] if masters and policy is not None and policy.master else ():
                parameter = submodule._parameters[each]
                if parameter is not None and parameter.dtype in LOW_DTYPES:
                    self._made.append((parameter, _set_data(parameter, parameter.detach().float())))
            if submodule is self._module:
                self._handles.append(submodule.register_forward_pre_hook(self._before_outermost, prepend=True))
            else:
                self._hook(submodule)

    def keep(self) -> None:
        """Forget the data for undo(), once the module is wrapped."""
        self._made.clear()

    def undo(self) -> None:
        """Restore the module to its state before install(), if it could not be wrapped."""
        remove_plan(self._module)
        for parameter, data in self._made:
            _set_data(parameter, data)
        self._made.clear()

    def _hook(self, module: torch.nn.Module) -> None:
        self._handles.append(module.register_forward_pre_hook(self._before_module, prepend=True))
        if module in self._boundaries:
            self._handles.append(module.register_forward_pre_hook(self._cast_inputs_of, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._cast_output_of))
        # always_call: a recomputation raises as soon as it has all activations that it needs.
        self._handles.append(module.register_forward_hook(self._after_module, always_call=True))

    def follow(
        self, source: Callable[[torch.Tensor], torch.Tensor | None], in_units: Collection[torch.Tensor] | None = None
    ) -> None:
        """Read parameters through `source`, which returns parameters of other engines unchanged. See Copies."""
        self._sources.append(source)
        self._in_units = self._in_units or in_units is not None
        managed = {id(module_parameter(each)) for each in in_units or ()}
        for submodule, slots in self._slots.items():
            for name, parameter in submodule._parameters.items():
                if parameter is not None and id(parameter) in managed:
                    slots.setdefault(name, parameter.dtype)

    def unfollow(self) -> None:
        """Read the parameters themselves again: the engines that kept them have ended."""
        self.leave()
        self._sources.clear()
        self._in_units = False

    def is_in_force(self) -> bool:
        """Return True if a module that is called now computes in its policy's dtype."""
        return self._active or (not _is_compiling() and _hooks.graph_task_id() != -1)

    def forget(self, parameters: Collection[torch.Tensor]) -> None:
        """Put released parameters, whose reads raise an error, back; with gradients, later calls use the same copies."""
        if not self._active:
            return
        ended = {id(module_parameter(parameter)) for parameter in parameters}
        ended |= {id(leaf) for parameter in parameters if (leaf := leaf_of(parameter)) is not None}
        for submodule, before in self._swapped.items():
            back = {name: each for name, each in before.items() if id(each) in ended}
            if back:
                self._put_back(submodule, list(back))
        if not torch.is_grad_enabled():
            self._copies = {key: copy for key, copy in self._copies.items() if key[0] not in ended}

    def remove(self) -> None:
        """Remove the hooks; parameters stay float32."""
        self.leave()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # the wrapper's forward ----------------------------------------------------------------------------------------

    def enter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Put copies in the parameters' slots and return the inputs for the module."""
        self._take_places()
        return _cast_inputs(self._root, inputs, kwargs) or (inputs, kwargs)

    def cast_output(self, output: Any) -> Any:
        """Cast the wrapper's result."""
        return output if self._root is None else _cast(output, self._root.output_dtype)

    @_hooks.disable_compile
    def leave(self) -> None:
        """Put the parameters back in their slots."""
        self._active = False
        self._restore_all()
        self._copies.clear()

    @_hooks.disable_compile
    def _take_places(self) -> None:
        self._restore_all()
        self._active = True
        if not self._in_units:
            self._swap(self._module)

    @_hooks.disable_compile
    def _swap(self, module: torch.nn.Module) -> _Taken:
        """Put copies in the slots of all parameters below `module` that have none; return the changed slots."""
        taken: _Taken = []
        for submodule in module.modules():
            slots = self._slots.get(submodule)
            if not slots:
                continue
            before = self._swapped.setdefault(submodule, {})
            names = []
            is_sparse = bool(getattr(submodule, "sparse", False))
            for name, dtype in slots.items():
                parameter = submodule._parameters[name]
                if name in before or parameter is None:
                    continue
                source = self._source_of(parameter)
                if source is None or (source is parameter and parameter.dtype is dtype):
                    continue
                before[name] = parameter
                submodule._parameters[name] = self._copy(parameter, source, dtype, is_sparse)  # type: ignore[assignment]
                names.append(name)
            if names:
                taken.append((submodule, names))
                refresh_weights(submodule)
        return taken

    def _source_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the parameter itself, a copy of its values in another dtype, or None while it is released."""
        local = local_of(parameter)
        for source in self._sources:
            found = source(local)
            if found is not local:
                return found
        return parameter

    def _copy(self, parameter: torch.Tensor, source: torch.Tensor, dtype: torch.dtype, is_sparse: bool) -> torch.Tensor:
        key = (id(parameter), dtype, is_sparse, source is parameter)  # tied parameters share one copy
        copy, earlier = self._copies.get(key, (parameter, parameter))
        if source is not earlier:  # the memory has moved: gradients still add up in the first copy
            copy = _hooks.run_when_ready(_ViewOfMemory.apply(copy, source))
        if copy.dtype is not dtype:
            copy = _hooks.run_when_ready(_CastOfSparse.apply(copy, dtype) if is_sparse else copy.to(dtype))
        if self._active:
            self._copies[key] = (copy, source)
        return copy

    def _put_back(self, submodule: torch.nn.Module, names: list[str]) -> None:
        before = self._swapped[submodule]
        submodule._parameters.update({name: before.pop(name) for name in names if name in before})
        refresh_weights(submodule)

    def _restore_all(self) -> None:
        for submodule, before in self._swapped.items():
            if before:
                self._put_back(submodule, list(before))
        self._swapped.clear()
        self._recomputing.clear()

    # hooks on submodules ------------------------------------------------------------------------------------------

    def _before_outermost(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._in_units and self._active:
            self._swap(module)

    def _before_module(self, module: torch.nn.Module, inputs: Any) -> None:
        """Put copies in a module's slots unless its parameters were gathered before; in a recomputation for this call alone."""
        if self._in_units and self._active:
            self._swap(module)
        elif not _is_compiling() and not self._active and _hooks.graph_task_id() != -1:
            taken = self._swap(module)
            if taken or not self._recomputing:  # always for the outermost module: inputs and outputs are cast inside it
                self._recomputing.append((module, taken))

    def _after_module(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if not _is_compiling() and self._recomputing and self._recomputing[-1][0] is module:
            for submodule, names in self._recomputing.pop()[1]:
                self._put_back(submodule, names)

    def _cast_inputs_of(self, module: torch.nn.Module, inputs: Any, kwargs: Any) -> Any:
        return _cast_inputs(self._boundaries[module][0], inputs, kwargs) if self.is_in_force() else None

    def _cast_output_of(self, module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        return _cast(output, self._boundaries[module][1]) if self.is_in_force() else None


#: id of a wrapped module -> its plan, which holds the module
_plans: weakref.WeakValueDictionary[int, PrecisionPlan] = weakref.WeakValueDictionary()
_is_compiling: Callable[[], bool] = torch.compiler.is_compiling


class _CastOfSparse(torch.autograd.Function):
    """A cast like Tensor.to(dtype), with the backward for sparse gradients that torch lacks."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = parameter.dtype
        return parameter.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return made_dense(gradient).to(ctx.dtype), None


class _ViewOfMemory(torch.autograd.Function):
    """A parameter's values in memory of another dtype, which may be released and refilled; gradients are those of a
    cast.

    Operations save a view of that memory for the backward, and no copy. The values of `parameter` are not read. For a
    DTensor, the memory is its local tensor's.
    """

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        ctx.dtype = parameter.dtype
        values = memory.detach()  # shares the version counter of `memory`
        return placed_like(values, parameter) if is_dtensor(parameter) else values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return made_dense(gradient).to(ctx.dtype), None


def _set_data(parameter: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Give a parameter the memory and the dtype of `data`. Return its previous data."""
    before = parameter.detach() if is_dtensor(parameter) else parameter.data
    parameter.data = data
    if is_dtensor(parameter):
        set_dtype(parameter, data)
    return before


def remove_plan(module: torch.nn.Module) -> None:
    """Remove the plan of an earlier wrapping of `module`."""
    earlier = _plans.pop(id(module), None)
    if earlier is not None:
        earlier.remove()


def _cast_inputs(policy: Precision | None, inputs: Any, kwargs: Any) -> Any:
    if policy is None or policy.param_dtype is None or not policy.cast_forward_inputs:
        return None
    return _cast(inputs, policy.param_dtype), _cast(kwargs, policy.param_dtype)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Cast floating-point tensors in nested tuples, lists, dicts and dataclasses to `dtype`.

    A container without a tensor of another dtype is returned itself, so that a cache filled in place stays the
    caller's.
    """
    if dtype is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        cast = {key: _cast(each, dtype) for key, each in value.items()}
        if all(cast[key] is each for key, each in value.items()):
            return value
        return cast if type(value) is dict else _rebuilt(value, cast)
    if isinstance(value, (list, tuple)):
        several = [_cast(each, dtype) for each in value]
        if all(new is old for new, old in zip(several, value)):
            return value
        return type(value)(*several) if hasattr(value, "_fields") else type(value)(several)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        fields = {name: _cast(each, dtype) for name, each in given.items()}
        changed = any(fields[name] is not each for name, each in given.items())
        return dataclasses.replace(value, **fields) if changed else value
    return value


def _rebuilt(value: Mapping[Any, Any], cast: dict[Any, Any]) -> Any:
    """Return a mapping of the same class, such as a model output that is both a dict and a dataclass."""
    try:
        return type(value)(**cast)
    except TypeError:
        return type(value)(cast)  # type: ignore[call-arg]
