"""The sum of what a rank holds, of a wrapped model (describe()) and of one that is not there yet (`shardwright plan`)."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one rank, by what they hold. The plan also says which part of the gradients are buckets in flight, and which
    part of the state are float32 masters.
    """

    parameters: int = 0
    units: int = 0
    gradients: int = 0
    state: int = 0
    buffers: int = 0
    activations: int = 0
    workspace: int = 0
    runtime: int = 0
    buckets: int = 0
    masters: int = 0

    @property
    def model_state(self) -> int:
        """Return what describe() calls planned_bytes: all but activations and the runtime."""
        return self.parameters + self.units + self.gradients + self.state + self.buffers

    @property
    def total(self) -> int:
        return self.model_state + self.activations + self.workspace + self.runtime
