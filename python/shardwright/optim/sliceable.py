"""The optimizers that can be sliced, and the hyperparameters of their groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._engine import Error
from ..options.options import FIELDS
from ..parallel.agreement.optimizer_agreement import plain

__all__ = ["ELEMENTWISE", "adopt", "check_sliceable", "members_of"]

#: torch's elementwise optimizers, which give a slice the same bits as the whole
ELEMENTWISE = frozenset(
    f"torch.optim.{module}.{name}"
    for module, name in [
        ("sgd", "SGD"), ("adam", "Adam"), ("adamw", "AdamW"), ("adagrad", "Adagrad"), ("adadelta", "Adadelta"),
        ("adamax", "Adamax"), ("nadam", "NAdam"), ("radam", "RAdam"), ("rmsprop", "RMSprop"), ("asgd", "ASGD"),
        ("rprop", "Rprop"),
    ]
) | {f"shardwright.optim.{name}" for name in ("AdamW", "Adam", "SGD")}  # fmt: skip


def members_of(param_group: Any) -> list[torch.Tensor]:
    """Return the tensors of a new group, named or not; turn an iterator into a list."""
    given = param_group.get("params", ()) if isinstance(param_group, dict) else ()
    if isinstance(given, torch.Tensor):
        return [given]
    if not isinstance(given, (list, tuple, set)):
        given = param_group["params"] = list(given)
    named = (each[1] if isinstance(each, tuple) and len(each) == 2 else each for each in given)
    return [each for each in named if isinstance(each, torch.Tensor)]  # torch refuses everything else


def check_sliceable(optimizer: torch.optim.Optimizer, partition: str) -> None:
    """Raise an error for an optimizer that cannot be sliced in this way."""
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    FIELDS["partition"]["check"]("partition", partition)
    if any(each.__name__ == "ShardedOptimizer" for each in kind.__mro__):
        raise Error("this optimizer is sliced already: pass the one that it was made from")
    if kind.__name__ == "ZeroRedundancyOptimizer":
        raise ValueError(f"{kind.__name__} slices state itself: pass the optimizer whose class it was given, or zero=0")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(f"optimizer {name} steps on all parameters as one vector and cannot be sliced: use zero=0")
    if partition == "auto" and name not in ELEMENTWISE:
        raise ValueError(
            f"optimizer {name} is not known to be elementwise, so it cannot be sliced automatically: pass "
            "partition='tensor' to give whole tensors to ranks, or partition='flat' if it is elementwise (the update of an "
            "element depends only on that element)"
        )


def adopt(group: dict[str, Any], theirs: Mapping[str, Any]) -> None:
    """Copy another rank's hyperparameters; write a tensor's value in place."""
    for key, value in theirs.items():
        mine = group.get(key)
        if plain(mine) == value:
            continue
        if isinstance(mine, torch.Tensor):
            mine.copy_(torch.tensor(value, dtype=mine.dtype, device="cpu"))
        else:
            group[key] = tuple(value) if isinstance(mine, tuple) else value
