"""Drift: a module that is no longer the one that was wrapped.

The engine's table holds the parameters of one moment. A parameter added, replaced, moved or cast afterwards would train
without its gradient being averaged, silently. So each forward and each step compare the identities and data addresses
in the module's own dictionaries, at C speed: about 43 us for 400 parameters in 400 modules.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from .._engine import Error
from ..layout.local_parameters import is_local
from ..layout.param_table import ParameterTable
from ..torch_compat.autograd import inside_functional_call, unguarded

_requires_grad = operator.attrgetter("requires_grad")
_REMEDY = "wrap again after such a change: sw.wrap(sw.unwrap(model), ...), with its optimizer at zero >= 1"


class DriftCheck:
    """A check that compares a module with the table it was wrapped with, but for `ignored` names.

    `pinned`: parameters must stay at their addresses, since an optimizer steps on slices. `shared`: their data is the host's
    one copy. `places` returns the expected address of every parameter's data, if the engine itself moves it.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        table: ParameterTable,
        ignored: frozenset[str],
        *,
        pinned: bool = False,
        shared: bool = False,
        places: Callable[[], list[int]] | None = None,
    ) -> None:
        self._table = table
        self._ignored = ignored
        self._pinned = pinned
        self._places = places
        self._spares_frozen = places is None and not shared  # frozen parameters stay in torch's memory until they train
        self.frozen = {i: p for i, p in enumerate(table.parameters) if not p.requires_grad}
        self._kinds = [(p.dtype, p.shape, p.device) for p in table.parameters]
        with unguarded():
            self._addresses = list(map(torch.Tensor.data_ptr, table.parameters))
        self._local = [
            (name, p, tuple(p.owner.placements)) for name, p in zip(table.names, table.parameters) if is_local(p)
        ]
        self._versions = self._read_versions() if shared else None
        #: True while other tensors replace some parameters during a call
        self.is_stateless = False
        self._take_snapshot(module)

    def _take_snapshot(self, module: torch.nn.Module) -> None:
        modules = list(module.modules())
        dictionaries: list[dict[str, Any]] = [each for m in modules for each in (m._parameters, m._modules)]
        self._empty = [each for each in dictionaries if not each]
        self._views = [each.values() for each in dictionaries if each]  # live views
        self._members = [*chain.from_iterable(self._views)]
        # Comparing lists tests identity first. If it then compares two tensors it raises or is False, except that two
        # different tensors of one element may be equal.
        with unguarded():  # an ignored parameter's class may lack these attributes
            self._single = [
                (d, name, p)
                for d in dictionaries
                for name, p in d.items()
                if isinstance(p, torch.Tensor) and p.numel() == 1
            ]

    def take_unfrozen(self) -> list[int]:
        """Return the indices of frozen parameters that require a gradient since the last call."""
        if not any(map(_requires_grad, self.frozen.values())):
            return []
        return [index for index, p in list(self.frozen.items()) if p.requires_grad and self.frozen.pop(index) is p]

    def check(self, module: torch.nn.Module) -> None:
        """Raise Error if a parameter was added, replaced or removed, or changed dtype, shape or device."""
        self.is_stateless = False
        if self._table.is_by_rows:  # which the meeting before a forward has looked at, slot by slot
            return
        try:
            same = [*chain.from_iterable(self._views)] == self._members and not any(self._empty)
        except RuntimeError:  # two tensors were compared: they are different objects
            same = False
        for members, name, parameter in self._single if same else ():
            same = same and name in members and members[name] is parameter
        if not same:
            self.is_stateless = self._is_swapped()
            if not self.is_stateless:
                self._compare_names(module)
        for name, local, placements in self._local:
            if not local.is_in_place() or tuple(local.owner.placements) != placements:
                raise Error(
                    f"parameter {name!r} is a DTensor whose local tensor or placements were replaced after the module was wrapped; {_REMEDY}"
                )
        with unguarded():
            addresses = list(map(torch.Tensor.data_ptr, self._table.parameters))
        if self._places is not None:
            self._addresses = self._places()
        if addresses != self._addresses:
            self._compare_kinds()
            if self._pinned:
                self._compare_addresses(addresses)
            self._addresses = addresses
        if self._versions is not None:
            self.check_writes()

    def _is_swapped(self) -> bool:
        """Return True if what differs are tensors in place of parameters for one call: plain, or of torch's functional_call."""
        now = [*chain.from_iterable(self._views)]
        if any(self._empty) or len(now) != len(self._members):
            return False
        swapped = [(new, old) for new, old in zip(now, self._members) if new is not old]
        if not all(isinstance(each, torch.Tensor) for pair in swapped for each in pair):
            return False
        return not any(isinstance(new, torch.nn.Parameter) for new, _ in swapped) or inside_functional_call()

    def none_in_place(self) -> bool:
        """Return True if no parameter of the table is in its place; for is_stateless some suffice."""
        present = {id(each) for each in chain.from_iterable(self._views)}
        return not any(id(parameter) in present for parameter in self._table.module_parameters)

    def _compare_names(self, module: torch.nn.Module) -> None:
        known = dict(zip(self._table.names, self._table.module_parameters))
        found = {name: p for name, p in module.named_parameters() if name not in self._ignored}
        for name, parameter in found.items():
            if name not in known:
                raise Error(
                    f"parameter {name!r} was added after the module was wrapped and would not be averaged; {_REMEDY}"
                )
            if parameter is not known[name]:
                raise Error(
                    f"parameter {name!r} was replaced by another Parameter after the module was wrapped "
                    f"(as load_state_dict(assign=True) does) and would not be averaged; {_REMEDY}"
                )
        for name in known:
            if name not in found:
                raise Error(f"parameter {name!r} is no longer in the module that was wrapped; {_REMEDY}")
        self._take_snapshot(module)  # modules were rearranged, the parameters are the same

    def accept_writes(self) -> None:
        """Note that parameters were written legally."""
        if self._versions is not None:
            self._versions = self._read_versions()

    def _read_versions(self) -> list[int]:
        return [parameter._version for parameter in self._table.parameters]

    def check_writes(self) -> None:
        """Raise Error if a parameter that a host shares was written to since the last call or accept_writes()."""
        before, self._versions = self._versions, None if self._versions is None else self._read_versions()
        for name, old, new in zip(self._table.names, before or (), self._versions or ()):
            if old != new:
                raise Error(
                    f"parameter {name!r} was written to, and the host's ranks share it: each rank that wrote has changed it for "
                    "all; write inside `with sw.full_parameters(module, writable=True)`"
                )

    def forget_address(self, index: int) -> None:
        """Note that the engine itself has moved a parameter."""
        self._addresses[index] = self._table.parameters[index].data_ptr()

    def _compare_addresses(self, addresses: list[int]) -> None:
        for index, (name, before, now) in enumerate(zip(self._table.names, self._addresses, addresses)):
            if before != now and not (self._spares_frozen and index in self.frozen):
                raise Error(
                    f"the data of parameter {name!r} was replaced (p.data = ...) after the module was wrapped, and slices of the "
                    f"old are stepped on: write into it instead, p.data.copy_(...), or {_REMEDY}"
                )

    def _compare_kinds(self) -> None:
        for name, parameter, (dtype, shape, device) in zip(self._table.names, self._table.parameters, self._kinds):
            if (parameter.dtype, parameter.shape, parameter.device) != (dtype, shape, device):
                raise Error(
                    f"parameter {name!r} was {dtype} {tuple(shape)} on {device} when the module was wrapped and is now "
                    f"{parameter.dtype} {tuple(parameter.shape)} on {parameter.device}; {_REMEDY}"
                )
