"""The reducer of a GPU, whose memory is torch's.

Rounds are the engine's, as on the host (docs/design/reduce.md). The engine asks for buckets with `allocate`; at
zero >= 2 for this rank's slices of the means and for the place in which buckets travel. csrc/python calls the
underscored methods for the steps of a round that need torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from .._engine import Reducer
from ..backend.device_link import DeviceLink, Homes
from ..layout.shard_mesh import Slicing
from ..torch_compat import cuda


class DeviceReducer(Reducer):
    """Buckets of gradients on a GPU and their mean, round by round.

    `rows`: those of Reducer, one for each parameter. `like`: any tensor on the GPU.
    `deterministic`: fold in rank order, with the host's bits. `sliced`: keep this rank's slices of the means, by `slicing`.
    `wire`: the 16-bit dtype in which the mean travels. `mesh`: links of this rank's row and column. `at_home`: slices of
    means lie in pinned host memory, where the optimizer steps.
    """

    def __init__(
        self,
        link: DeviceLink,
        rows: Sequence[Any],
        like: torch.Tensor,
        *,
        bucket_cap_bytes: int,
        reduce: str,
        deterministic: bool,
        label: str,
        sliced: bool,
        slicing: Slicing,
        wire: str | None = None,
        mesh: tuple[DeviceLink, DeviceLink] | None = None,
        at_home: bool = False,
    ) -> None:
        row, column = mesh or (None, None)
        self._homes = Homes(link, like) if at_home else None
        super().__init__(
            link.comm,
            rows,
            bucket_cap_bytes=bucket_cap_bytes,
            reduce=reduce,
            deterministic=deterministic,
            sliced=sliced,
            wire=wire,
            slices=slicing.for_engine() if sliced else None,
            label=label,
            row=None if row is None else row.comm,
            column=None if column is None else column.comm,
            allocate=lambda nbytes: cuda.runtime.zeros(nbytes, torch.uint8, like),
            home=self._homes,
        )
        self._bucket_link = row or link  # on a mesh the column reduces the slices further
        self._link, self._sliced, self.wire = link, sliced, wire
        self._kept: dict[int, torch.Tensor] = {}
        self._by_rows = [len(row) > 5 and row[5] > 0 for row in rows]

    @property
    def home_bytes(self) -> int:
        """Return the bytes of slices in pinned host memory."""
        return 0 if self._homes is None else self._homes.nbytes

    def attach(self, parameters: Any, views: Any, **others: Any) -> None:
        """Attach as Reducer does, and read torch's current stream before each enqueue. `renew(i)` also makes a missing views[i]."""
        self._views = views
        super().attach(parameters, views, stream=cuda.runtime.stream_reader(self._link.ordinal), **others)

    # rounds ---------------------------------------------------------------------------------------------------------

    def set_divide_by(self, active_only: bool) -> None:
        """Set whether means divide by the number of ranks that still train, which set_active() gives."""
        super().set_divide_by(active_only)
        self.set_active(bytes([1] * self._link.world_size))

    def shadow(self, accumulated: Sequence[int] = ()) -> None:
        """Run a round without a contribution. This rank still averages its slices."""
        self._link.check()
        super().shadow(accumulated)

    def _target(self, index: int) -> torch.Tensor:
        view = self._views[index]
        return view.piece if self._sliced else view

    @torch.no_grad()
    def _keep(self, index: int) -> None:
        """Keep a gradient until the ranks know which parameters some rank used."""
        self._kept[index] = self._target(index).clone(memory_format=torch.preserve_format)

    @torch.no_grad()
    def _restore(self) -> None:
        """Restore the gradients of parameters that no rank used."""
        kept, self._kept = self._kept, {}
        for index, before in kept.items():
            if not self.used_by_any(index):
                self._target(index).copy_(before)

    def _blank(self, index: int) -> torch.Tensor | None:
        """Contribute nothing to a mean: return what to write where there is no one range to write to."""
        if not self._by_rows[index]:
            _fill_with_nothing(from_dlpack(self.gradient(index, [self.place(index)[2]])))
            return None
        view = self._views[index]
        nothing = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=view.piece.device)
        _fill_with_nothing(nothing)
        return nothing

    def _blank_bucket(self, bucket: int) -> None:
        _fill_with_nothing(from_dlpack(self.bucket(bucket)))

    def _end(self, reason: str) -> None:
        """End the communicators on every rank and raise the reason."""
        self._link.fail(reason)
        self._link.check()

    # choices ------------------------------------------------------------------------------------------------

    @property
    def transport(self) -> str:  # type: ignore[override]
        """Return the transport: "nccl", "one rank", or "shm" or "ipc" for slots in host or GPU memory."""
        return str(self._link.comm.describe()["transport"])

    @property
    def transport_reason(self) -> str:  # type: ignore[override]
        found = self._link.comm.describe()
        places = {"shm": "slots in the host's memory", "ipc": "slots in the GPUs' memory", "one rank": "one rank"}
        whose = ", torch's communicator" if self._link.borrows else ""
        way = places.get(found["transport"], f"NCCL {'.'.join(map(str, found['nccl']))}{whose}")
        way += ", means by rows and columns" * (self._bucket_link is not self._link)
        why = f" ({self._link.transport_reason})" if self._link.transport_reason else ""
        return f"GPU {found['ordinal']}, {found['name']}; {way}{why}; kernels {found['kernels']}"


def _fill_with_nothing(memory: torch.Tensor) -> None:
    """Fill with -0.0, the neutral element of a sum: x + -0.0 is x for every x."""
    real = torch.view_as_real(memory) if memory.is_complex() else memory
    real.fill_(-0.0 if real.is_floating_point() else 0)
