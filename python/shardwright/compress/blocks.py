"""The state of compressors to block-scaled integers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .._engine import Codec, block_record_bytes
from .state import CompressionState


class BlockState(CompressionState):
    """The state of int8_compress_hook and int4_compress_hook.

    Parameters
    ----------
    process_group : ProcessGroup or None
        None: the default group.
    bits : {8, 4}
    block : int
        Elements that share a scale: a multiple of 32 in [32, 4096]. ValueError for others, as for bits.
    error_feedback : bool
        Add the rounding error of a step to the next step, on the rank where it arose. The owner of a slice also takes
        the rounding error of the mean, times W: the sum over steps of applied means plus the ranks' mean error is that
        of the mean gradients. Costs a float32 an element. A value that is not finite leaves a bucket's error unchanged.
    named_parameters : iterable of (str, Parameter), optional
        Names for state_dict().
    """

    def __init__(
        self,
        process_group: Any = None,
        bits: int = 8,
        block: int = 256,
        error_feedback: bool = False,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    ) -> None:
        self.kind = f"int{bits}"
        block_record_bytes(block, bits)  # raises for a setting out of range
        self.bits, self.block, self.error_feedback = bits, block, error_feedback
        codec = Codec("blocks", block=block, bits=bits, error_feedback=error_feedback)
        super().__init__(codec, process_group, named_parameters)

    def settings(self) -> dict[str, Any]:
        return {"bits": self.bits, "block": self.block, "error_feedback": self.error_feedback}
