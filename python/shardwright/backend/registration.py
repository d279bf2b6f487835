"""Memory that NCCL reads and writes in place (`communicator="register"`): see docs/design/gpu_communication.md.

NCCL's rule is that all ranks pass registered memory to an operation, at the same offset, or none does. So all ranks try
and exchange the outcome over the hosts' communicator. Then all ranks keep the memory, or all go on with torch's memory
and one line in the log.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

import torch

from .._engine import DeviceRegion
from ..torch_compat import cuda
from .device_link import DeviceLink, alias

_logger = logging.getLogger("shardwright")
#: bytes to which each buffer is aligned: more than any of NCCL's algorithms asks for
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

    Attributes
    ----------
    reason : str
        The reason why nothing is registered; empty if it is.
    buffers : list of torch.Tensor
        Byte tensors, zeroed on torch's current stream; empty where nothing is registered.

    Notes
    -----
    The memory is NCCL's: torch's statistics do not count it. It is freed after the last tensor over it, once torch's
    current stream has passed the work that it was given. `record_stream` has no effect on it.
    """

    def __init__(self, link: DeviceLink, sizes: Sequence[int], like: torch.Tensor, what: str) -> None:
        begins, nbytes = [], 0
        for size in sizes:
            begins.append(nbytes)
            nbytes += -(-(size or 1) // _ALIGNMENT) * _ALIGNMENT
        self._region: DeviceRegion | None = None
        self.buffers: list[torch.Tensor] = []
        self.reason = "there is nothing to share"
        if link.world_size == 1 or not sizes:
            return
        self.reason = _agree(link, self._try(link, nbytes), list(sizes))
        if self.reason:
            _logger.warning("%s: not registered with NCCL: %s", what, self.reason)
            # The region gives the memory back. Where that fails the memory stays unused, and the communicator lives.
            self._region = None
            return
        region = self._region
        assert region is not None
        self.buffers = [_over(region, begin, size, link, like) for begin, size in zip(begins, sizes)]

    def _try(self, link: DeviceLink, nbytes: int) -> str:
        """Return the reason why this rank cannot register; empty if it has."""
        try:
            self._region = DeviceRegion(link.comm, nbytes, link.current_stream())
        except Exception as error:  # any error: the peers must not wait for this rank
            return str(error) or type(error).__name__
        return ""

    @property
    def nbytes(self) -> int:
        """Return the bytes that are registered now."""
        return self._region.nbytes if self._region is not None and self._region.is_registered else 0

    def end(self, reason: str) -> None:
        """Stop registering on all ranks; the buffers stay. Waits for the communicator's stream."""
        region, self._region = self._region, None
        self.reason = self.reason or reason
        if region is not None:
            region.deregister()


def _agree(link: DeviceLink, failure: str, sizes: list[int]) -> str:
    """Return the reason why not all ranks have registered the same; the same sentence on all of them."""
    said = json.dumps([failure, sizes]).encode()
    answers = [json.loads(each) for each in link.host.all_gather_bytes(said, "registering buckets with NCCL")]
    for rank, (why, theirs) in enumerate(answers):
        if why:
            return f"rank {rank}: {why}"
        if theirs != answers[0][1]:
            return f"rank {rank}: its buckets have other sizes than rank 0's"
    return ""


def _over(region: DeviceRegion, begin: int, size: int, link: DeviceLink, like: torch.Tensor) -> torch.Tensor:
    """Return a zeroed tensor over `size` bytes of the region. It keeps the region, and has an address if empty, too."""
    memory = alias(link, region, region.address + begin, "uint8", [size or _ALIGNMENT], like)
    made: torch.Tensor = cuda.runtime.seen(memory.zero_())
    return made
