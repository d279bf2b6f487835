"""Contents: a checkpoint as names, shapes and one read function per tensor. Readers produce it, writers consume it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from typing import IO, Any

import torch
from shardwright._engine import CheckpointError
from shardwright.formats.lazy import Lazy as Lazy
from shardwright.optim.master_weights import as_written
from shardwright.options.name_map import NameMap

LOW = (torch.bfloat16, torch.float16)
MASTER = "master"


@dataclasses.dataclass
class Contents:
    """The contents of a checkpoint."""

    model: dict[str, Lazy]
    #: additional name of a tensor -> its name in `model`
    tied: dict[str, str] = dataclasses.field(default_factory=dict)
    #: options of each group of the optimizer, with `params`, a list of names; None: no optimizer
    groups: list[dict[str, Any]] | None = None
    #: parameter -> key -> Lazy or plain value
    state: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    #: all other state: plain values, containers and Lazy
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    step: int = 0
    #: paths of further files that from_pretrained reads
    beside: list[str] = dataclasses.field(default_factory=list)
    #: sentences about state of the source that these contents lack
    left_out: list[str] = dataclasses.field(default_factory=list)

    def under(self, names: NameMap) -> Contents:
        """Return the contents that `names` selects, renamed."""
        model = {name: each for name, each in names.renamed(self.model).items() if names.takes(name)}
        tied = {new: names.new(kept) for new, kept in names.renamed(self.tied).items() if names.takes(new)}
        for name, kept in list(tied.items()):
            if kept not in model:  # `names` selects only the tied name
                model[name] = self.model[self.tied[next(n for n in self.tied if names.new(n) == name)]]
                del tied[name]
        state = {name: each for name, each in names.renamed(self.state).items() if names.takes(name)}
        groups = None if self.groups is None else [
            {**group, "params": [new for new in map(names.new, group["params"]) if names.takes(new)]}
            for group in self.groups
        ]  # fmt: skip
        return dataclasses.replace(self, model=model, tied=tied, state=state, groups=groups)

    def cast(self, dtype: torch.dtype) -> Contents:
        """Return the contents with the model's floating-point tensors in `dtype`; float32 takes masters as weights."""
        model, state = {}, dict(self.state)
        for name, each in self.model.items():
            if not each.dtype.is_floating_point or each.dtype.itemsize == 1 or each.dtype == dtype:
                model[name] = each
                continue
            if dtype == torch.float32 and MASTER in state.get(name, {}):
                model[name] = self.wide(name)
                state[name] = {key: value for key, value in state[name].items() if key != MASTER}
                continue
            model[name] = each.to(dtype)
            if name in state and dtype in LOW and each.dtype == torch.float32:  # float32 weights become masters
                state[name] = {**state[name], MASTER: each}
        return dataclasses.replace(self, model=model, state=state)

    def wide(self, name: str) -> Lazy:
        """Return a weight in float32: its master if there is one, and the weight itself where other code has written it."""
        weight, master = self.model[name], self.state.get(name, {}).get(MASTER)
        if not isinstance(master, Lazy) or master.dtype != torch.float32:
            return weight.to(torch.float32)
        if weight.dtype not in LOW or weight.shape != master.shape:
            return dataclasses.replace(master, file=weight.file)
        return dataclasses.replace(
            master, file=weight.file, part=None, read=lambda: as_written(master.read(), weight.read())
        )

    def with_extra(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return `body`, a writer's model, optimizer and step, merged with `extra`, which must not replace them."""
        if taken := [key for key in self.extra if key in body]:
            sentence = f"the checkpoint has a further value under '{taken[0]}', where the written file has its own"
            raise CheckpointError(sentence)
        return {**body, **self.extra}

    def take_step(self) -> None:
        """Move the count of completed steps out of `extra`, if a program stored it there as the plain number `step`."""
        step = self.extra.get("step")
        if isinstance(step, Lazy) and math.prod(step.shape) == 1 and not step.dtype.is_floating_point:
            step = step.read().item()
        if type(step) is int and step >= 0:
            self.step = step
            del self.extra["step"]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in leaves([self.model, self.state, self.groups, self.extra]))


def leaves(tree: Any) -> list[Lazy]:
    """Return the Lazy tensors in dicts, lists and tuples."""
    found: list[Lazy] = []
    replaced(tree, found.append)
    return found


def replaced(tree: Any, function: Callable[[Any], Any], kind: type = Lazy) -> Any:
    """Return the tree with function(leaf) in place of each leaf of a kind."""
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, dict):
        return {key: replaced(value, function, kind) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(replaced(value, function, kind) for value in tree)
    return tree


def lazily(tree: Any) -> Any:
    """Return the tree with a Lazy in place of each tensor."""
    return replaced(tree, Lazy.of, torch.Tensor)


@contextlib.contextmanager
def durable_file(path: str) -> Iterator[IO[bytes]]:
    """Open a new file to write, which is on disk afterwards."""
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
