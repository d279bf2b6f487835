"""Parts: parameters of a module, such as experts, that other ranks average than those of the rest (`groups=`)."""

from __future__ import annotations

import dataclasses
import fnmatch
import glob
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..._engine import Error
from ...comm.agreement import verify
from ...comm.process_group import HostGroup, group_ranks, host_group, resolve_group
from ...layout.model_mesh import first_mesh, mesh_text, numbers_of
from ...options.names import near
from ...options.options import Options, text_of_group
from ...torch_compat.dtensor import is_dtensor


class Part(NamedTuple):
    """The parameters of all entries of `groups=` with the same ranks."""

    title: str  # keys of the entries, for messages
    names: frozenset[str]  # all names of the parameters in the module
    ranks: tuple[int, ...]  # global numbers of the ranks that average the part
    options: Options  # the engine's, with the entry's ranks as the group

    def group(self) -> HostGroup:
        """Return the communicator. Collective over its ranks at first use."""
        torch_group = resolve_group(self.options.process_group, self.options.device_mesh)
        return host_group(torch_group, self.options.timeout_s, self.options.warn_after_s)


def by_name(module: torch.nn.Module, groups: Any) -> Any:
    """Return the option with inner modules replaced by their names, which are also valid in a copy of `module`."""
    names = {id(each): name for name, each in module.named_modules() if name}
    return groups and {glob.escape(names[id(key)]) if id(key) in names else key: ranks for key, ranks in groups.items()}


def states_of_parts(state: Any, groups: Any, module: torch.nn.Module, replicas: Sequence[Any]) -> list[Any]:
    """Return the state of a communication hook for each replica: with `groups`, that of a key of a dict; None: the rest."""
    if groups is None:
        return [state]
    if not isinstance(state, dict):
        raise TypeError(
            "register_comm_hook of a module with groups=: state must be a dict with a state for each key of groups=, and for None (the rest), "
            f"got {type(state).__name__}"
        )
    given = by_name(module, state)
    if given.keys() != {None, *groups}:
        keys, found = (sorted(map(str, each)) for each in ({None, *groups}, given))
        raise ValueError(f"register_comm_hook of a module with groups=: state must have the keys {keys}, got {found}")
    states: dict[frozenset[int], Any] = {}
    for key, ranks in groups.items():  # entries of the same ranks are one part, with the first one's state
        states.setdefault(frozenset(_ranks_of(ranks)), given[key])
    return [given[None], *(states[frozenset(group_ranks(each.group.torch_group))] for each in replicas[1:])]


def find_parts(module: torch.nn.Module, options: Options, ignored: frozenset[str], group: HostGroup) -> list[Part]:
    """Return the parts of a module averaged over `group`, in order of `groups=`. Collective; all raise the same error."""
    if options.groups is None:
        return []
    label = type(module).__name__
    parts: list[Part] = []

    def check() -> list[list[str]]:
        parts[:] = _assign(module, options, ignored)
        named = {n: p for n, p in module.named_parameters(remove_duplicate=False) if n not in ignored}
        ranks = group_ranks(group.torch_group)
        for part in parts:
            _check(part, named, ranks)
        _check_together(parts, named, ranks)
        return [[f"group {p.title}", f"of {len(p.ranks)} ranks, {', '.join(sorted(p.names))}"] for p in parts]

    verify(group.comm, check, f"the wrapped {label}", alike=True)
    return parts


def _assign(module: torch.nn.Module, options: Options, ignored: frozenset[str]) -> list[Part]:
    named = [(n, p) for n, p in module.named_parameters(remove_duplicate=False) if n not in ignored]
    taken: dict[int, str] = {}
    parts: list[Part] = []
    groups: Mapping[Any, Any] = options.groups or {}
    for key, ranks in groups.items():
        title = text_of_group(key)
        if isinstance(key, str):
            members = {id(p) for n, p in named if fnmatch.filter(_prefixes(n), key)}
        else:
            members = set(map(id, key.parameters()))
        names = frozenset(n for n, p in named if id(p) in members)
        if not names:
            known = {prefix for n, _ in named for prefix in _prefixes(n)}
            hint = near(key, known) if isinstance(key, str) else ""
            raise ValueError(f"groups: {title} matches no parameter of {type(module).__name__}{hint}")
        for name, parameter in named:
            if id(parameter) in members and taken.setdefault(id(parameter), title) != title:
                raise ValueError(
                    f"groups: {taken[id(parameter)]} and {title} both match parameter {name!r}: match it once"
                )
        is_mesh = hasattr(ranks, "get_group")
        own = dataclasses.replace(
            options, groups=None, device_mesh=ranks if is_mesh else None, process_group=None if is_mesh else ranks
        )
        numbers = _ranks_of(ranks)
        same = next((each for each in parts if each.ranks == numbers), None)
        if same is None:
            parts.append(Part(title, names, numbers, own))
        else:  # entries of the same ranks are one part
            parts[parts.index(same)] = Part(f"{same.title}, {title}", same.names | names, numbers, same.options)
    return parts


def _ranks_of(ranks: Any) -> tuple[int, ...]:
    return tuple(ranks.mesh.flatten().tolist() if hasattr(ranks, "get_group") else group_ranks(ranks))


def _prefixes(name: str) -> list[str]:
    """Return the names of the modules that hold `name`, and itself."""
    return list(itertools.accumulate(name.split("."), "{}.{}".format))


def _check(part: Part, named: Mapping[str, torch.Tensor], ranks: Sequence[int]) -> None:
    """Raise if a part's group and DTensors do not fit `ranks`, which average the rest."""
    for name in sorted(part.names):
        parameter = named[name]
        if not is_dtensor(parameter):
            raise Error(
                f"groups: parameter {name!r} of {part.title} is a plain tensor, and ranks outside of its group have other values under that name: "
                "make it a DTensor over them, distribute_tensor(tensor, mesh['ep'], [Shard(0)])"
            )
        mesh = parameter.device_mesh.mesh.flatten().tolist()
        shards = [rank for rank in mesh if rank in ranks]
        is_apart = set(part.ranks) <= set(ranks) and len(set(part.ranks) & set(mesh)) == 1
        if not is_apart or len(part.ranks) * len(shards) != len(ranks):
            raise Error(
                f"groups: ranks {numbers_of(sorted(part.ranks))} average {name!r} of {part.title}, and ranks {numbers_of(sorted(mesh))} hold its shards; together "
                f"they must be the ranks that average the rest, {numbers_of(sorted(ranks))}"
            )


def _check_together(parts: Sequence[Part], named: Mapping[str, torch.Tensor], ranks: Sequence[int]) -> None:
    """Raise if all parameters are in parts, or a part is on other ranks than the rest, which checkpoints cannot write."""
    apart = {name for part in parts for name in part.names}
    outside = [p for name, p in named.items() if name not in apart]
    if parts and not any(p.requires_grad for p in outside):
        title, numbers = parts[0].title, numbers_of(sorted(parts[0].ranks))
        raise Error(
            f"groups: every parameter that requires a gradient is in groups, and ranks {numbers_of(sorted(ranks))} have none to average: wrap a module around "
            "it that has others too, such as the router of the experts, or wrap it without groups= over the ranks of one group, such as "
            f"{numbers} of {title}, whose mean is then its gradient"
        )
    rest = first_mesh(outside, ranks)
    count = len(ranks) * (1 if rest is None else rest.mesh.size())
    for part in parts:
        name = min(part.names)
        mesh = named[name].device_mesh  # type: ignore[attr-defined]
        if len(part.ranks) * mesh.size() != count:
            where = "plain tensors" if rest is None else f"on {mesh_text(rest.mesh)}"
            raise Error(
                f"groups: parameter {name!r} of {part.title} is a DTensor on {mesh_text(mesh)}, and parameters outside of groups are {where}: "
                f"{len(part.ranks) * mesh.size()} ranks have the one, {count} the others; place both over the same dimensions, as Replicate where "
                "they are whole, such as distribute_tensor(tensor, mesh['ep', 'tp'], [Shard(0), Replicate()])"
            )
