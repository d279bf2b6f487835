"""The names of deepspeed.zero: a context with whole parameters, and a context in which to build a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ...parallel.replica import live_replicas
from ...wrapping import full_parameters
from ..meta_loading import automatic_loading

__all__ = ["GatheredParameters", "Init"]


@contextlib.contextmanager
def GatheredParameters(
    params: torch.Tensor | Iterable[torch.Tensor],
    modifier_rank: int | None = None,
    fwd_module: Any = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Return a context in which every rank has whole `params`, of any modules. Collective.

    `modifier_rank` is the rank that writes to them inside; afterwards all ranks have its values (None: no writes).
    `fwd_module` has no effect; `enabled=False` does nothing. Cost at stage 3: all parameters of each wrapped module
    that holds one of them, see full_parameters.
    """
    given = [params] if isinstance(params, torch.Tensor) else list(params)
    homes = {id(p): each for each in live_replicas() for p in each.table.parameters}
    held = [p for p in given if id(p) in homes] if enabled else []
    with full_parameters(held, writable=modifier_rank is not None):
        yield
        if modifier_rank:  # full_parameters gives all ranks the values of rank 0
            for replica in dict.fromkeys(homes[id(p)] for p in held):
                ours = [p for p in held if homes[id(p)] is replica]
                replica.group.broadcast(ours, modifier_rank, f"parameters that rank {modifier_rank} wrote")


class Init(contextlib.ContextDecorator):
    """A context in which transformers' from_pretrained leaves tensors in their files: see sw.meta_loading.

    Accepts DeepSpeed's arguments; only `enabled` has an effect. `initialize` reads each rank's part. A model that is built
    otherwise is built as without it: each rank holds all of it until `initialize` gives all ranks rank 0's values and
    slices them. One of the meta device holds none until sw.materialize(model), which must come before its optimizer.
    """

    def __init__(self, module: Any = None, *args: Any, enabled: bool = True, **kwargs: Any) -> None:
        self.module, self._enabled = module, enabled
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> Init:
        self._entered.append(automatic_loading() if self._enabled else contextlib.nullcontext())
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)
