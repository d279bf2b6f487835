"""Leaves: what stands in the slots of a gathered unit where that is not the engine's parameter itself.

Autograd brings a leaf's gradient; it is handed over to the engine's parameter, whose hooks then run as if it had arrived
there. So rounds, factors and scales know nothing of leaves (docs/design/fully_shard.md).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..torch_compat.autograd import gradient_hooks, passed_through_hooks, unguarded
from ..torch_compat.dtensor import (
    held_tensor,
    is_dtensor,
    like_dtensor,
    made_dtensor,
    redistributed,
    set_held_tensor,
    waited,
)
from ..torch_compat.weak import weakly


class Leaf:
    """A leaf of one parameter, whose ShardedParameter is `owner`. `whole`: the object in the slots; None before it is made."""

    #: True if the engine's parameter has no memory, since what ranks gather is not its values
    is_extension = False

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self.whole: torch.nn.Parameter | None = None
        self._is_hooked = False

    def show(self) -> torch.Tensor:
        """Return the leaf with the values of a unit that has been gathered."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what the leaf has of its own: its unit is released."""

    def follow(self, trains: bool) -> None:
        """Let the leaf require a gradient, or none."""
        if self.whole is None or (self.whole.requires_grad is trains and (self._is_hooked or not trains)):
            return
        self.whole.requires_grad_(trains)
        if trains and not self._is_hooked:
            self._is_hooked = True
            self.whole.register_post_accumulate_grad_hook(weakly(self._hand_over))

    def _begin(self, data: torch.Tensor) -> None:
        self.whole = torch.nn.Parameter(data, requires_grad=False)
        self._owner.note_leaf(self.whole)
        self.follow(self._owner.sharded.requires_grad)

    def _hand_over(self, leaf: torch.Tensor) -> None:
        """Bring the leaf's gradient to the engine's parameter, and run that one's hooks, as autograd would."""
        gradient, leaf.grad = leaf.grad, None
        entry: Any = self._owner.whole
        assert gradient is not None
        with torch.no_grad():
            gradient = passed_through_hooks(self._for_engine(gradient, entry), entry)
            if entry.grad is None:
                entry.grad = gradient
            else:
                entry.grad.add_(gradient)
        for hook in list((gradient_hooks(entry) or {}).values()):
            hook(entry)

    def _for_engine(self, gradient: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
        """Return a gradient in the dtype of `entry`, and without a subclass but DTensor."""
        if is_dtensor(gradient):
            made = self._for_engine(held_tensor(gradient), entry)
            return gradient if made is held_tensor(gradient) else like_dtensor(made, gradient)
        if type(gradient) is torch.Tensor:
            return gradient.to(entry.dtype)
        made = torch.empty(gradient.shape, dtype=entry.dtype, device=gradient.device)
        return made.copy_(gradient)


class PlacedLeaf(Leaf):
    """A DTensor on a mesh that has the dimensions `data`, over which ranks average, beside those of the model.

    The engine's parameter is its local tensor, or a DTensor of the other dimensions over that.
    """

    def __init__(self, owner: Any, mesh: Any, placements: Sequence[Any], data: Collection[int], of_all: Any) -> None:
        super().__init__(owner)
        self._mesh, self._placements, self._data, self._of_all = mesh, placements, data, of_all

    def show(self) -> torch.Tensor:
        entry = self._owner.whole
        with unguarded():  # it may be released, while its compute form is whole
            local = held_tensor(entry).detach() if is_dtensor(entry) else entry.detach()
        if self.whole is None:
            self._begin(made_dtensor(local, self._mesh, self._placements, *self._of_all))
        else:
            set_held_tensor(self.whole, local)
        assert self.whole is not None
        return self.whole

    def _for_engine(self, gradient: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
        """Return this rank's contribution: over the data dimensions the engine averages what is there."""
        placed: Any = gradient
        wanted = [placed.placements[at] if at in self._data else each for at, each in enumerate(self._placements)]
        local = waited(held_tensor(redistributed(placed, wanted))).to(entry.dtype)
        return like_dtensor(local, entry) if is_dtensor(entry) else local
