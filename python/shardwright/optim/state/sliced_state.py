"""An optimizer's state on one rank, in a form that cannot be pickled as if it were the whole state.

Programs save an optimizer with `if rank == 0: torch.save(optimizer.state_dict())`. With sliced state that file would
hold only rank 0's slices, and the loss would show up at the resume. So state_dict() of a sliced optimizer returns its
content in an object that can be copied and loaded but not pickled.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn

from ..._engine import Error

#: the state dict's key for a rank's slices
MARK = "shardwright_slices"


class SlicedState:
    """A rank's slices of an optimizer's state.

    Not a mapping, so torch.distributed.checkpoint does not flatten it but pickles it, which raises.

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
