"""Data parallelism without a bucket, a view or an overlap: gather every gradient as bytes, fold, set `.grad`."""

from typing import Any

import torch
import torch.distributed as dist

from .fold import fold
from .pickled import all_gather


class NaiveDataParallel:
    """A module and the law of its gradients.

    A contribution is this rank's `.grad` when the round closes, zeros if it is None. A parameter that no rank touched
    since the last synchronisation keeps its `.grad`, None included.
    """

    def __init__(self, module: torch.nn.Module, group: dist.ProcessGroup | None = None, reduce: str = "mean") -> None:
        self.module, self.group, self.reduce, self.touched = module, group, reduce, set[str]()
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self.watch(name, parameter)

    def watch(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Mark uses of a parameter from now on, for a parameter that was frozen at first."""
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.touched.add(name))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.module(*arguments, **keywords)

    def synchronise(self, *, active: bool = True, over_active: bool = False) -> None:
        """Run a round.

        A rank with `active=False` contributes nothing; `over_active`: the mean is over the active ranks.
        """
        mine = {}
        for name, parameter in self.module.named_parameters():
            grad = parameter.grad
            if grad is not None and grad.is_sparse:
                grad = grad.to_dense()
            mine[name] = (name in self.touched, grad if grad is None else grad.detach().contiguous())
            if not active:
                mine[name] = (False, None)
        everyone = all_gather((active, mine), self.group)
        everyone = [theirs for is_active, theirs in everyone if is_active or not over_active]
        for name, parameter in self.module.named_parameters():
            if any(theirs[name][0] for theirs in everyone):
                zeros = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
                grads = [theirs[name][1] for theirs in everyone]
                parameter.grad = fold([zeros if grad is None else grad for grad in grads], self.reduce)
        self.touched.clear()
