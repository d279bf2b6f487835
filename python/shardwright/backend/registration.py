"""Memory that NCCL reads and writes in place (`communicator="register"`): see docs/design/gpu_communication.md.

NCCL requires that all ranks pass registered memory to an operation, at the same offset, or none. So all ranks allocate
and exchange the outcome over the hosts' communicator. Then they register, and exchange that outcome and whether NCCL
made a window. All ranks keep the memory, or all use torch's memory and log one line.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence

import torch

from .._engine import DeviceRegion, Error
from ..torch_compat import cuda
from .device_link import DeviceLink, alias

_logger = logging.getLogger("shardwright")
#: alignment of each buffer in bytes; NCCL's algorithms need less
_ALIGNMENT = 512


class Registration:
    """Buffers in one region that is registered on all ranks, or on none. Making it is collective over the group.

    Parameters
    ----------
    link : DeviceLink
        The link whose communicator passes the buffers.
    sizes : sequence of int
        Bytes of each buffer, alike on all ranks.
    like : torch.Tensor
        A tensor on the same GPU.
    what : str
        A name for the line of the log.
    adds : bool
        NCCL reduces in this memory, so it gets no window: window kernels add in another order.

    Attributes
    ----------
    reason : str
        The reason why nothing is registered; empty if it is.
    buffers : list of torch.Tensor
        Byte tensors, zeroed on torch's current stream; empty where nothing is registered.

    Notes
    -----
    The memory is NCCL's: torch's statistics do not count it. It is freed after the last tensor over it, once torch's
    current stream has run its work. `record_stream` has no effect on it.
    """

    def __init__(
        self, link: DeviceLink, sizes: Sequence[int], like: torch.Tensor, what: str, *, adds: bool = True
    ) -> None:
        self._link = link
        begins, nbytes = [], 0
        for size in sizes:
            begins.append(nbytes)
            nbytes += -(-(size or 1) // _ALIGNMENT) * _ALIGNMENT
        self._region: DeviceRegion | None = None
        self.buffers: list[torch.Tensor] = []
        self.reason = "there is nothing to share"
        if link.world_size == 1 or not sizes:
            return
        # NCCL's offset of a window depends on the windows that exist, and ranks free theirs at different times: so one
        # at most.
        windows = not adds and not link.had_window and link.comm.describe()["windows"]
        self.reason, windows = _agree(link, _try(lambda: self._allocate(nbytes)), list(sizes), windows)
        if not self.reason:
            failure = _try(lambda: self._register(windows))
            region = self._region
            is_window = not failure and region is not None and region.is_window
            link.had_window = link.had_window or is_window
            kind = "as a window" if is_window else "without a window"  # each rank's NCCL decides
            self.reason, _ = _agree(link, failure, kind, windows)
        if self.reason:
            _logger.warning("%s: not registered with NCCL: %s", what, self.reason)
            # The region frees the memory. If that fails the memory stays unused and the communicator goes on.
            self._region = None
            return
        region = self._region
        assert region is not None
        self.buffers = [_over(region, begin, size, link, like) for begin, size in zip(begins, sizes)]

    def _allocate(self, nbytes: int) -> None:
        self._region = DeviceRegion(self._link.comm, nbytes, self._link.current_stream())

    def _register(self, as_window: bool) -> None:
        assert self._region is not None
        self._region.register(as_window)

    @property
    def nbytes(self) -> int:
        """Return the bytes that are registered now."""
        return self._region.nbytes if self._region is not None and self._region.is_registered else 0

    def end(self, reason: str) -> None:
        """Stop registering on all ranks, because later messages lie outside the region; the buffers stay.

        Between two rounds. Waits for the communicator's stream.
        """
        if not self.nbytes:
            return
        region, self._region = self._region, None
        self.reason = self.reason or reason
        assert region is not None
        try:
            region.deregister()
        except Error as error:
            self._link.fail(f"rank {self._link.host.rank}: {error}")
            raise


def _try(act: Callable[[], None]) -> str:
    """Return the reason why this rank could not allocate or register; empty if it did."""
    try:
        act()
    except Exception as error:  # any error: the peers must not wait for this rank
        return str(error) or type(error).__name__
    return ""


def _agree(link: DeviceLink, failure: str, outcome: list[int] | str, windows: bool) -> tuple[str, bool]:
    """Return why some rank failed or differs, the same sentence on all ranks, and whether all can have windows.
    `outcome`: sizes of buckets, or the kind of a registration.
    """
    said = json.dumps([failure, outcome, windows]).encode()
    answers = [json.loads(each) for each in link.host.all_gather_bytes(said, "registering memory with NCCL")]
    for rank, (why, theirs, _) in enumerate(answers):
        if why:
            return f"rank {rank}: {why}", False
        if theirs != answers[0][1] and isinstance(outcome, str):
            return f"rank {rank}: memory was registered {theirs}, and on rank 0 {answers[0][1]}", False
        if theirs != answers[0][1]:
            return f"rank {rank}: its buckets have other sizes than rank 0's", False
    return "", all(each for _, _, each in answers)


def _over(region: DeviceRegion, begin: int, size: int, link: DeviceLink, like: torch.Tensor) -> torch.Tensor:
    """Return a zeroed tensor over `size` bytes of the region. It keeps the region alive, and has an address even if
    empty.
    """
    memory = alias(link, region, region.address + begin, "uint8", [size or _ALIGNMENT], like)
    made: torch.Tensor = cuda.runtime.seen(memory.zero_())
    return made
