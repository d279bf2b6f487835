"""Uneven inputs: what a rank does that ran out of them, in torch's Join protocol.

A joined rank shadows each iteration of the others, collective for collective, in the order in which forward and
backward issue them: buffers, the flag that says whether this backward synchronises, the round. At the end all take the
model of the rank that trained longest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.algorithms.join import JoinHook, _JoinConfig

if TYPE_CHECKING:
    from .data_parallel import DistributedDataParallel


class ShadowHook(JoinHook):
    """The join hook of a wrapped module.

    Parameters
    ----------
    wrapper : DistributedDataParallel
    divide_by_initial_world_size : bool
        True: the mean divides by all ranks; False: by those that still train.
    """

    def __init__(self, wrapper: DistributedDataParallel, divide_by_initial_world_size: bool) -> None:
        self._wrapper = wrapper
        wrapper._divide_by_initial_world_size = divide_by_initial_world_size
        wrapper._engine().reducer.set_divide_by(not divide_by_initial_world_size)

    def main_hook(self) -> None:
        """One iteration of the others."""
        wrapper = self._wrapper
        if wrapper._check_sync_bufs_pre_fwd():
            wrapper._sync_buffers(candidate=False)
        synchronises = wrapper._agree_on_sync(False)
        wrapper.require_forward_param_sync = synchronises
        if synchronises:
            wrapper._engine().reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Everybody takes the model of the last rank that joined; among several, the highest."""
        wrapper = self._wrapper
        replica = wrapper._engine()
        root = replica.group.highest_rank_where(is_last_joiner, "last rank to join")
        wrapper._authoritative_rank = root
        wrapper._assign_modules_buffers()
        replica.broadcast_state(root, wrapper.modules_buffers if wrapper.forward_sync_buffers else ())
        replica.reducer.set_divide_by(False)
        replica.reducer.forget_steps()
        wrapper._join_config = _JoinConfig.construct_disabled_join_config()
