"""The table of optimizer classes: an update of an element reads the element, its whole tensor, or all parameters.

`partition="auto"` looks an optimizer's class up in this table; docs/optimizers.md prints it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .._engine import Error
from ..options.options import FIELDS

__all__ = ["Rule", "matrix_cost", "register", "resolve", "rule_of"]

#: work of a step on a tensor of this shape, in operations, with a group's options
Cost = Callable[[Sequence[int], Mapping[str, Any]], float]

#: an elementwise update moves some 28 bytes an element; a core multiplies this often meanwhile
_ELEMENT = 100.0


def element_cost(shape: Sequence[int], group: Mapping[str, Any]) -> float:
    """Return the work of an update that is bound by memory."""
    return _ELEMENT * torch.Size(shape).numel()


def matrix_cost(shape: Sequence[int], group: Mapping[str, Any]) -> float:
    """Return the work of Newton-Schulz on a matrix, on its blocks of rows, or on a stack of matrices."""
    if len(shape) < 2 or group.get("algorithm") == "adamw":
        return element_cost(shape, group)
    *stack, rows, columns = shape
    blocks = group.get("rows") or (rows,)
    each = 0.0
    for block in blocks:
        small, large = sorted((block, columns))
        each += 2 * (2 * small * small * large + small**3) * group.get("ns_steps", 5)
    return torch.Size(stack).numel() * each + element_cost(shape, group)


def factor_cost(shape: Sequence[int], group: Mapping[str, Any]) -> float:
    """Return the work of preconditioners on both sides of a matrix."""
    if len(shape) < 2:
        return element_cost(shape, group)
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    return 4.0 * rows * columns * (rows + columns) + element_cost(shape, group)


@dataclasses.dataclass(frozen=True)
class Rule:
    """`partition`: "flat", "tensor", or "" for a class that cannot be sliced, because of `why`. `switch`: an option of the
    class that makes it "flat".
    """

    partition: str
    cost: Cost = element_cost
    why: str = ""
    switch: str = ""


def _known() -> dict[str, Rule]:
    flat, tensor = Rule("flat"), Rule("tensor")
    found = {"torch.optim.Muon": Rule("tensor", matrix_cost), "shardwright.optim.Muon": Rule("tensor", matrix_cost)}
    names = "sgd.SGD adam.Adam adamw.AdamW adagrad.Adagrad adadelta.Adadelta adamax.Adamax nadam.NAdam radam.RAdam "
    names += "rmsprop.RMSprop asgd.ASGD rprop.Rprop"
    found |= {f"torch.optim.{name}": flat for name in names.split()}
    found |= {f"shardwright.optim.{name}": flat for name in ("AdamW", "Adam", "SGD")}
    found |= {f"lion_pytorch.lion_pytorch.{name}": flat for name in ("Lion",)}
    found |= {f"schedulefree.{n.lower()}_schedulefree.{n}ScheduleFree": flat for n in ("AdamW", "SGD", "RAdam")}
    found |= {"torch.optim.Adafactor": tensor, "transformers.optimization.Adafactor": tensor}
    found |= {f"pytorch_optimizer.optimizer.{name}": Rule("tensor", factor_cost) for name in (
        "soap.SOAP", "shampoo.Shampoo", "shampoo.ScalableShampoo")}  # fmt: skip
    sums = "its step size is a sum over all parameters, of which a rank sees its own"
    found |= {
        f"dadaptation.dadapt_{n.lower()}.DAdapt{n}": Rule("", why=sums, switch="fsdp_in_use") for n in ("Adam", "SGD")
    }
    found["dadaptation.dadapt_adagrad.DAdaptAdaGrad"] = Rule("", why=sums)
    found["dadaptation.dadapt_lion.DAdaptLion"] = Rule("", why=sums, switch="fsdp_in_use")
    found["prodigyopt.prodigy.Prodigy"] = Rule("", why=sums, switch="fsdp_in_use")
    found["pytorch_optimizer.optimizer.prodigy.Prodigy"] = Rule("", why=sums)
    return found


#: by class name; a subclass may have another step
_RULES = _known()
_registered: dict[type, Rule] = {}


def register(kind: type[torch.optim.Optimizer], *, partition: str, cost: Cost | None = None) -> None:
    """Tell how ranks divide the work of an optimizer class: what partition="auto" means for it.

    Parameters
    ----------
    kind : class
        A torch.optim.Optimizer. Its subclasses are not meant.
    partition : {"flat", "tensor"}
        "flat": the update of an element reads that element of parameter, gradient and state alone, so each rank steps on
        slices. "tensor": it reads whole tensors, so each tensor belongs to one rank.
    cost : callable, optional
        cost(shape, group) returns the work of a step on a tensor, in any unit: whole tensors are divided so that ranks
        have equal work. By default it grows with the number of elements.

    Raises
    ------
    TypeError
        If `kind` is no optimizer class, or `cost` is not callable.
    ValueError
        For another partition.

    Examples
    --------
    >>> import torch, shardwright as sw
    >>> class Signs(torch.optim.Optimizer):
    ...     "Steps by the sign of the gradient."
    >>> sw.optim.register(Signs, partition="flat")
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        got = repr(kind) if isinstance(kind, type) else f"an object of {type(kind).__name__}"
        raise TypeError(f"register: kind must be a class of torch.optim.Optimizer, got {got}")
    if partition not in ("flat", "tensor"):
        raise ValueError(f"register: partition must be 'flat' or 'tensor', got {partition!r}")
    if cost is not None and not callable(cost):
        raise TypeError(f"register: cost must be a function of (shape, group), got {cost!r}")
    _registered[kind] = Rule(partition, cost or element_cost)


def name_of(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


def rule_of(optimizer: torch.optim.Optimizer) -> Rule | None:
    """Return the rule of an optimizer's class; None for one that is not known."""
    return _registered.get(type(optimizer)) or _RULES.get(name_of(optimizer))


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    rule = rule_of(optimizer)
    return rule is not None and rule.partition == "flat"


def resolve(optimizer: torch.optim.Optimizer, partition: str, ranks: int) -> str:
    """Return "flat" or "tensor", what `partition` means for an optimizer. An error if it cannot be sliced so."""
    name, rule = name_of(optimizer), rule_of(optimizer)
    FIELDS["partition"]["check"]("partition", partition)
    if any(each.__name__ == "ShardedOptimizer" for each in type(optimizer).__mro__):
        raise Error("this optimizer is sliced already: pass the one that it was made from")
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise ValueError(
            "ZeroRedundancyOptimizer slices state itself: pass the optimizer whose class it was given, or zero=0"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(f"optimizer {name} steps on all parameters as one vector and cannot be sliced: use zero=0")
    if rule is not None and not rule.partition and ranks == 1:
        return "flat"
    if rule is not None and not rule.partition:
        on_host = any(p.is_cpu for group in optimizer.param_groups for p in group["params"])
        if rule.switch and not on_host and all(group.get(rule.switch) for group in optimizer.param_groups):
            return "flat"
        remedy = "use zero=0"
        if rule.switch:
            sums = f"{rule.switch}=True, which sums over ranks on GPUs alone"
            remedy += f" ({sums}, is of no help on a CPU)" if on_host else f", or make it with {sums}"
        raise ValueError(f"optimizer {name} cannot be sliced, since {rule.why}: {remedy}")
    if partition != "auto":
        return partition
    if rule is None:
        raise ValueError(
            f"optimizer {name} is not known to be elementwise, so it cannot be sliced automatically: pass "
            "partition='tensor' to give whole tensors to ranks, or partition='flat' if it is elementwise (the update of an "
            "element depends only on that element); sw.optim.register says so for all of its class"
        )
    return rule.partition
