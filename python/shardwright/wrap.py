"""wrap: the one verb, and its inverse."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ._engine import Error
from .data_parallel import DistributedDataParallel
from .options import Options

_LATER = {
    "precision": "precision policies are not there yet: use torch.autocast around the forward",
    "compress": "compression is not there yet: use register_comm_hook with one of torch's hooks",
    "clip_grad_norm": "clip_grad_norm is not there yet: call torch.nn.utils.clip_grad_norm_ before optimizer.step()",
    "offload": "offload is not there yet: leave it None",
}


@overload
def wrap(
    module: torch.nn.Module, optimizer: None = None, *, zero: int = 0, **options: Any
) -> DistributedDataParallel: ...
@overload
def wrap(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, *, zero: int = 0, **options: Any
) -> tuple[DistributedDataParallel, torch.optim.Optimizer]: ...


def wrap(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    zero: int = 0,
    precision: Any = None,
    compress: Any = None,
    clip_grad_norm: float | None = None,
    offload: Any = None,
    partition: str = "auto",
    **options: Any,
) -> Any:
    """Makes `module` train together with the other ranks.

    Parameters
    ----------
    module : Module
        On the CPU. It is not changed; its parameters keep their identity.
    optimizer : Optimizer, optional
        Returned as it is at zero=0.
    zero : {0}
        What is sliced over ranks: nothing at 0. Stages 1 to 3 are not there yet.
    precision, compress, clip_grad_norm, offload
        Not there yet: None.
    partition : {"auto", "flat", "tensor"}
        How an optimizer is sliced at zero >= 1; no effect at 0.
    **options
        Fields of Options.

    Returns
    -------
    DistributedDataParallel or (DistributedDataParallel, Optimizer)
        The module alone when no optimizer was given.

    Raises
    ------
    Error
        The module is wrapped already, or ranks disagree about it.
    TypeError
        An unknown option; the nearest known one is offered.
    NotImplementedError
        A stage or feature that does not exist yet.

    Notes
    -----
    Collective. Without a process group torchrun's environment is read; without that it is one rank.

    Examples
    --------
    >>> import torch, shardwright as sw
    >>> model = torch.nn.Linear(4, 1)
    >>> model, optimizer = sw.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> optimizer.step()
    """
    _check_later(zero, dict(precision=precision, compress=compress, clip_grad_norm=clip_grad_norm, offload=offload))
    if partition not in ("auto", "flat", "tensor"):
        raise ValueError(f"partition must be 'auto', 'flat' or 'tensor', got {partition!r}")
    Options.from_keywords(options, also_known=("zero", "partition", *_LATER))
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"wrap needs a torch.nn.Module, got {type(module).__name__}")
    if unwrap(module) is not module and isinstance(_original(module), TorchDDP):
        raise Error("this module is wrapped already: use it as it is, or pass sw.unwrap(module) to wrap it again")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"wrap needs a torch.optim.Optimizer or None, got {type(optimizer).__name__}")
    wrapped = DistributedDataParallel(module, **options)
    return wrapped if optimizer is None else (wrapped, optimizer)


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The user's own module inside a wrapper (also inside torch.compile(wrapper)); a bare module as it is."""
    inner = _original(module)
    return inner.module if isinstance(inner, TorchDDP) else module


def _original(module: torch.nn.Module) -> torch.nn.Module:
    return getattr(module, "_orig_mod", module)


def _check_later(zero: int, later: dict[str, Any]) -> None:
    if isinstance(zero, bool) or zero not in (0, 1, 2, 3):
        raise ValueError(f"zero must be 0, 1, 2 or 3, got {zero!r}")
    if zero:
        raise NotImplementedError(
            f"zero={zero} is not there yet: only zero=0, whole copies with averaged gradients, is"
        )
    for name, value in later.items():
        if value is not None:
            raise NotImplementedError(_LATER[name])
