"""The cut of a module into units: parameters that are gathered together.

A unit is a module. It holds the parameters of its subtree that no inner unit holds. The outermost module is always a
unit. A parameter that several modules share belongs to the innermost unit that contains all of them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..options.checks import unit_types
from .local_parameters import module_parameter
from .param_table import ParameterTable

_logger = logging.getLogger("shardwright")

_MIB = 1024 * 1024
#: the attribute of a unit's class that has the settings of checkpoint_units
RECOMPUTE = "_shardwright_recompute"
#: least bytes of parameters of a unit, when units are cut by size
_SIZE_BYTES = 32 * _MIB
#: containers: they have no forward
_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)


def mark_of(module: torch.nn.Module) -> Any:
    """Return the mark of fully_shard on a module (fully_shard.Mark); None if it has none."""
    return getattr(type(module), "_shardwright_mark", None)


def check_marks(module: torch.nn.Module) -> None:
    """Raise ValueError if sw.wrap is called on a module with parameters that fully_shard has cut."""
    marked = next((name for name, each in module.named_modules() if mark_of(each) is not None), None)
    if marked is not None:
        raise ValueError(
            f"sw.fully_shard was called on {marked or 'the module'!r}, whose parameters are DTensors of rows: use sw.fully_shard on the "
            "outermost module too, and do not wrap it"
        )


def check_inner(module: torch.nn.Module, ranks: Any, ignored: Collection[str]) -> None:
    """Raise NotImplementedError for fully_shard's options on inner modules that the outermost engine would silently ignore."""
    known = {id(p): name for name, p in module.named_parameters(remove_duplicate=False)}
    for name, each in module.named_modules():
        mark = mark_of(each)
        if mark is None or each is module or _is_apart(each, known, ignored):
            continue
        mesh = mark.options.get("device_mesh")
        if mesh is not None and mesh.mesh.tolist() != ranks:
            raise NotImplementedError(
                f"sw.fully_shard of the inner module {name!r} names a device_mesh of other ranks than the outermost module's: all units are sliced "
                "over the outermost one's ranks, which start with rank 0's values, so that what differs over ranks (experts) would be lost: leave the mesh out there; or pass "
                f"its parameters as ignored_params to the outermost call, which leaves {name!r} an engine of its own over its own mesh"
            )
        own = {known[id(p)] for p in mark.options.get("ignored_params", ()) if id(p) in known}
        if not own <= set(ignored):
            raise NotImplementedError(
                f"sw.fully_shard of the inner module {name!r} ignores parameter {sorted(own - set(ignored))[0]!r}, and the outermost call does not: pass "
                "ignored_params to the outermost one"
            )


def check_hookable(module: torch.nn.Module) -> None:
    """Raise NotImplementedError for a module with parameters inside which torch runs no hooks, so that no unit is gathered."""
    for name, each in module.named_modules():
        if isinstance(each, torch.jit.ScriptModule) and any(True for _ in each.parameters()):
            what = f"submodule {name!r}" if name else "the module"
            raise NotImplementedError(
                f"{what} is a TorchScript module (torch.jit.script or torch.jit.trace), inside which no hooks run that gather parameters at "
                "zero=3 with private parameters: wrap with zero=2, leave share_parameters=False out on the host, or put the module that was "
                "scripted in its place"
            )


def _is_apart(module: torch.nn.Module, names: Mapping[int, str], ignored: Collection[str]) -> bool:
    own = [names[id(p)] for p in module.parameters()]
    return bool(own) and all(name in ignored for name in own)


class UnitPlan(NamedTuple):
    """The plan of a unit: its module and name, its parameters' numbers, and the rest of a list that fully_shard got."""

    name: str
    module: torch.nn.Module
    indices: tuple[int, ...]
    reshard_after_forward: bool
    beside: tuple[tuple[str, torch.nn.Module], ...] = ()
    #: on GPUs the number of ranks that keep it between them from its forward to its backward; 0: all of them
    near: int = 0

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        return (self.module, *(each for _, each in self.beside))

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *(name for name, _ in self.beside))


def comparable(units: Any) -> Any:
    """Return the option in a form that ranks compare: types by sorted names."""
    types = unit_types(units)
    return sorted(f"{each.__module__}.{each.__qualname__}" for each in types) if types else units


def cut(
    module: torch.nn.Module, table: ParameterTable, units: Any = "auto", reshard_after_forward: bool = True
) -> list[UnitPlan]:
    """Return the units of `module` in the order of modules().

    The outermost stays whole until its backward ends, unless fully_shard was told otherwise.
    """
    chosen = unit_modules(module, units, table.module_parameters)
    if unit_types(units) and not chosen:
        _logger.warning(
            "units: %s holds no %s: it is gathered whole", type(module).__name__, ", ".join(comparable(units))
        )
    first = _first_of_each(module, chosen)
    owners: dict[int, list[list[torch.nn.Module]]] = {}
    paths = _paths(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        path = paths[name.rpartition(".")[0]]
        around = [first.get(id(each), each) for each in path if each is module or id(each) in chosen]
        owners.setdefault(id(parameter), []).append(around)
    members: dict[int, list[int]] = {}
    for index, parameter in enumerate(table.parameters):
        chains = owners[id(module_parameter(parameter))]
        common = [each for each in chains[0] if all(any(each is other for other in chain) for chain in chains)]
        members.setdefault(id(common[-1]), []).append(index)
    plans = []
    listed = [(name, each) for name, each in module.named_modules() if id(each) in first]
    for name, each in module.named_modules():
        if (each is not module and id(each) not in chosen) or first.get(id(each), each) is not each:
            continue
        mark = mark_of(each)
        reshards = mark.reshard_after_forward if mark is not None else reshard_after_forward
        reshards = reshards and (each is not module or (mark is not None and mark.releases_outermost))
        beside = tuple(pair for pair in listed if pair[1] is not each and first[id(pair[1])] is each)
        near = mark.near if mark is not None and reshards else 0
        plans.append(UnitPlan(name, each, tuple(members.get(id(each), ())), reshards, beside, near))
    return plans


def _first_of_each(module: torch.nn.Module, chosen: Collection[int]) -> dict[int, torch.nn.Module]:
    """Map the identity of each module of a fully_shard list to the list's first module, which represents the unit."""
    found: dict[int, torch.nn.Module] = {}
    lists: dict[int, torch.nn.Module] = {}
    for each in module.modules():
        mark = mark_of(each)
        if mark is not None and mark.is_list and id(each) in chosen:
            found[id(each)] = lists.setdefault(id(mark), each)
    return found


def unit_modules(module: torch.nn.Module, units: Any, parameters: Iterable[torch.Tensor] | None = None) -> set[int]:
    """Return the identities of the modules that are units, without the outermost. `parameters`: the table's; None: all."""
    if units == "auto":
        held = {id(p) for p in (module.parameters() if parameters is None else parameters)}
        marked = {
            id(each)
            for each in module.modules()
            if mark_of(each) is not None and each is not module and not _holds_none(each, held)
        }
        return marked or {id(each) for each in repeated_blocks(module)}
    if units == "size" or isinstance(units, (int, float)):
        return _by_size(module, _SIZE_BYTES if units == "size" else int(units * _MIB))
    kinds = unit_types(units)
    return {id(each) for each in module.modules() if isinstance(each, kinds) and not isinstance(each, _CONTAINERS)}


def _holds_none(module: torch.nn.Module, held: Collection[int]) -> bool:
    """Return True if all parameters of a module are ignored. It is then no unit, and may have its own engine."""
    own = list(module.parameters())
    return bool(own) and not any(id(p) in held for p in own)


def repeated_blocks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the outermost modules with a sibling of the same class and parameters of equal names, shapes, dtypes."""
    found: list[torch.nn.Module] = []
    waiting = [module]
    while waiting:
        children = [child for child in waiting.pop(0).children() if any(True for _ in child.parameters())]
        kinds = Counter(map(_kind, children))
        for child in children:
            repeated = kinds[_kind(child)] > 1 and not isinstance(child, _CONTAINERS)
            (found if repeated else waiting).append(child)
    return found


def _kind(module: torch.nn.Module) -> Any:
    return type(module), tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())


def _by_size(module: torch.nn.Module, least_bytes: int) -> set[int]:
    """Return units by size, innermost first: modules whose parameters outside inner units reach `least_bytes`."""
    chosen: set[int] = set()
    taken: set[int] = set()

    def visit(each: torch.nn.Module) -> None:
        for child in each.children():
            visit(child)
        if each is module or isinstance(each, _CONTAINERS):
            return
        own = [p for p in each.parameters() if id(p) not in taken]
        if sum(p.numel() * p.element_size() for p in own) >= least_bytes:
            taken.update(map(id, own))
            chosen.add(id(each))

    visit(module)
    return chosen


def _paths(module: torch.nn.Module) -> dict[str, list[torch.nn.Module]]:
    """Map each name of a module to the path of modules from the outermost module to it."""
    found = {"": [module]}
    for name, each in module.named_modules(remove_duplicate=False):
        if name:
            found[name] = [*found[name.rpartition(".")[0]], each]
    return found
