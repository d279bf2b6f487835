"""The state of one rank's slices of an optimizer, which must not be saved as if it were the whole state.

`if rank == 0: torch.save(optimizer.state_dict())` is how programs save an optimizer. Where its state is sliced over ranks that file would
hold the slices of rank 0, and the loss would be found when training is to go on. So state_dict() of a sliced optimizer puts its content into
an object that copies and loads, and that no pickler takes.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn

from .._engine import Error

#: the key of a state dict under which a rank's slices lie
MARK = "shardwright_slices"


class SlicedState:
    """A rank's slices of an optimizer's state.

    Not a mapping: what flattens state dicts (torch.distributed.checkpoint) takes it as one value, and pickles that.

    Parameters
    ----------
    content : dict
        "layout", "groups" and "state".
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def __repr__(self) -> str:
        rank, world_size = self.content["layout"][:2]
        return f"SlicedState(rank {rank} of {world_size}, {len(self.content['state'])} parameters)"

    def __copy__(self) -> SlicedState:
        return SlicedState(self.content)

    def __deepcopy__(self, memo: dict[int, Any]) -> SlicedState:
        return SlicedState(copy.deepcopy(self.content, memo))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        rank, world_size = self.content["layout"][:2]
        raise Error(
            f"this state_dict() of an optimizer holds the slices of rank {rank} of {world_size} and cannot be saved: save "
            "sw.full_optimizer_state_dict(module, optimizer), called on every rank, or state_dict() after "
            "optimizer.consolidate_state_dict(to=0), or let sw.Checkpointer save it"
        )
