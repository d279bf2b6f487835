"""The link of a rank's GPU to those of its peers.

All modules wrapped over one group and GPU share one DeviceLink: a communicator and one stream for it. The communicator
is our own in the NCCL that torch has loaded, or slots in memory of the host (see backend/transport.py). Over the host's
communicator ranks also report why they cannot use their GPU, before any rank waits.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .._engine import DeviceComm, DeviceHome, Error, device_tensor, nccl_unique_id, slot_part_bytes
from ..comm.agreement import gather_values
from ..comm.process_group import HostGroup, row_major
from ..comm.rendezvous import comm_error
from ..layout.views import as_real, dense_strides, dtype_name
from ..torch_compat import cuda
from ..torch_compat.engine_storage import engine_tensor
from ..torch_compat.interrupts import hear_interrupts
from . import transport as device_transport

_logger = logging.getLogger("shardwright")
_WATCH_PERIOD_S = 0.1
#: seconds for which a failure waits until its communicators have ended, before it is raised: other communicators'
#: kernels may delay that
_ENDING_S = 10.0
_OTHER_FAILED = "another communicator of this rank's GPU has failed"


def alias(
    link: DeviceLink, owner: Any, address: int, dtype: str, shape: Sequence[int], like: torch.Tensor
) -> torch.Tensor:
    """Return a tensor over exactly its bytes of `owner`, which it keeps alive, with the dense strides of `like`."""
    ordinal = link.ordinal if like.is_cuda else -1  # simulated GPUs are the CPU
    strides = dense_strides(like) if like.shape == torch.Size(shape) else None
    return engine_tensor(device_tensor(ordinal, owner, address, dtype, list(shape), strides))


class Homes:
    """Allocates zeroed pinned host memory, as tensors on the GPU of `like`, which reads and writes them over the bus."""

    def __init__(self, link: DeviceLink, like: torch.Tensor) -> None:
        self._link, self._like = link, like
        #: bytes that were allocated
        self.nbytes = 0

    def __call__(self, nbytes: int) -> torch.Tensor:
        home = DeviceHome(self._link.comm, nbytes, self._link.current_stream)
        self.nbytes += nbytes
        made: torch.Tensor = cuda.runtime.seen(alias(self._link, home, home.address, "uint8", [nbytes], self._like))
        return made


def _ranges_of(tensors: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], list[tuple[int, int, str]]]:
    """Copy tensors that are not dense; return the copies, and the engine's ranges of all tensors."""
    copies, ranges = [], []
    for tensor in tensors:
        real = as_real(tensor.detach())
        if dense_strides(real) is None:
            real = real.contiguous()
            copies.append(real)
        ranges.append((real.data_ptr(), real.numel(), dtype_name(real.dtype)))
    return copies, ranges


def _gather(group: HostGroup, make: Callable[[], Any], what: str) -> list[Any]:
    """Return each rank's result of `make`, plain values; raise on all ranks if it fails on one. Collective."""
    return gather_values(
        *(group.comm, make, what),
        refusals=(Exception,),  # any error: the peers must not wait for this rank
        retell=lambda rank, sentence: NotImplementedError(f"rank {rank} cannot use its GPU: {sentence}"),
    )


class Lender:
    """A torch process group that lends its communicator, at `address`, for one GPU (`communicator="borrow"`).

    torch still owns it: the engine neither destroys nor aborts it, but calls torch's `abort()`, which releases threads
    that wait in its kernels. Forwards and the watching thread check whether torch has ended it. NotImplementedError if
    there is none.
    """

    def __init__(self, runtime: Any, group: Any, ordinal: int) -> None:
        self._runtime, self._ordinal = runtime, ordinal
        self._backend = _backend_of(runtime, group)
        self.address = self._ask()
        if not self.address:
            raise NotImplementedError(
                "communicator='borrow': torch has made no NCCL communicator for this GPU yet: pass device_id= to init_process_group, or run one "
                "collective of GPU tensors over the group, on every rank, before wrapping"
            )

    def _ask(self) -> int:
        """Return the address of torch's communicator; 0 if it does not exist or has ended."""
        with contextlib.suppress(RuntimeError):
            return self._runtime.communicator(self._backend, self._ordinal)
        return 0

    @property
    def has_ended(self) -> bool:
        """Return True if torch has ended or replaced the communicator."""
        return self._ask() != self.address

    def abort(self) -> None:
        """Abort all communicators of the group through torch. torch's log repeats the known failure."""
        try:
            self._backend.abort()
        except Exception as error:
            _logger.warning("torch's abort of the borrowed communicator: %s", str(error))


def _backend_of(runtime: Any, group: Any) -> Any:
    if group is None:
        raise NotImplementedError(
            "communicator='borrow' requires torch's process group: call torch.distributed.init_process_group('nccl') before sw.wrap"
        )
    try:
        backend = runtime.backend(group)
    except RuntimeError as error:
        what = "communicator='borrow': the process group has no backend for GPUs"
        raise NotImplementedError(f"{what}: {error}") from error
    missing = [name for name in ("_comm_ptr", "abort") if not hasattr(backend, name)]
    if missing:
        raise NotImplementedError(
            f"communicator='borrow': the process group's backend for GPUs is {type(backend).__name__}, which has no {missing[0]}(): "
            "the ProcessGroupNCCL of a newer torch has"
        )
    return backend


class DeviceLink:
    """A rank's GPU among its peers'. Making it is collective.

    `rows` link each rank to the ranks of its row alone. A failure of a link or its `main` ends both; a link `beside` its
    main uses the same stream. `transport_reason` says why the transport is not NCCL. NotImplementedError on all ranks if
    one cannot use its GPU, or has no communicator to lend.
    """

    def __init__(
        self,
        group: HostGroup,
        ordinal: int,
        timeout_s: float,
        rows: Sequence[Sequence[int]] | None = None,
        main: DeviceLink | None = None,
        borrows: bool = False,
        beside: bool = False,
    ) -> None:
        self._main = main
        # links whose main link is this one; a tuple, which the watching thread reads while another thread adds one
        self._rows: tuple[weakref.ref[DeviceLink], ...] = ()
        self._lender: Lender | None = None
        self._aborting = threading.Lock()
        self._was_left = False
        self._measured: list[torch.Tensor] = []  # copies that the last clip()'s kernels still read
        self._failure: str | None = None
        row = next(each for each in rows or [range(group.world_size)] if group.rank in each)
        self.comm: DeviceComm
        self.ordinal, self.rank, self.world_size = ordinal, row.index(group.rank), len(row)
        #: Return torch's current stream in this thread.
        self.current_stream: Callable[[], int] = cuda.runtime.stream_reader(ordinal)
        self.host = group.comm  # the group holds its links, not the other way round
        libraries: dict[str, str | None] = {}

        def open_own() -> dict[str, Any]:
            libraries.update(cuda.runtime.libraries())
            self.comm = cuda.open_gpu(ordinal, libraries, self.host, main.comm if main and beside else None)
            return device_transport.offer_of(self.comm)

        offers = _gather(group, open_own, "opening the GPUs")
        chosen, self.transport_reason = device_transport.choose_transport(offers, group.host_of, borrows)
        if borrows:

            def borrow() -> None:
                lender = Lender(cuda.runtime, group.torch_group, ordinal)
                self.comm.borrow(lender.address, self.rank, self.world_size, timeout_s)
                self._lender = lender

            _gather(group, borrow, "borrowing torch's communicator of the GPUs")
        elif chosen == "nccl":

            def make_id() -> str:
                device_transport.settle_order()
                begins = self.rank == 0 and self.world_size > 1
                return nccl_unique_id(libraries.get("libnccl")).hex() if begins else ""

            ids = _gather(group, make_id, "the identifier of the GPUs' communicator")
            if self.world_size == 1:  # NCCL's would take memory, and move nothing
                self.comm.connect_alone(timeout_s)
            else:
                self.comm.connect(bytes.fromhex(ids[row[0]]), self.rank, self.world_size, timeout_s)
        else:
            slot_bytes = device_transport.SLOT_BYTES
            arena = group.comm.arena(slot_part_bytes(slot_bytes), "slots between GPUs")
            self.comm.connect_slots(arena, row, slot_bytes, chosen, self.rank, timeout_s)
        self._join_family()
        hear_interrupts()
        if cuda.runtime.watches:
            self.comm.start_watch()
            if borrows:
                watch = threading.Thread(target=_watch_lender, args=(weakref.ref(self),), daemon=True)
                watch.start()

    def refuse_capture(self, what: str) -> None:
        """Raise NotImplementedError, naming `what`, where torch's stream is being captured into a CUDA graph."""
        self.comm.refuse_capture(self.current_stream(), what)

    @property
    def borrows(self) -> bool:
        """Return True if the communicator is torch's."""
        return self._lender is not None

    def check(self) -> None:
        """Raise the error that has ended the communicator, if there is one. There is no driver call otherwise."""
        self._check_lender()
        if self._main is not None:
            if not self._main.comm.is_alive:
                self._failure = self._failure or self._main._failure or self.host.end_reason
                self.comm.abort(self._failure or "the communicator of the group's GPUs was closed")
        elif not self.host.is_alive:
            self._end(self._failure or self.host.end_reason or "a rank of the group has left")
        elif self._rows and any(row.comm.has_failed for row in self._live_rows()):
            self._end(self._failure or self.host.end_reason or _OTHER_FAILED)
        if not self.comm.is_alive:
            self._abort_lender()
            if self._was_left:  # the group's other ranks get the error, and the next wrap makes new links
                self.fail(self._failure or "")
            self.comm.watch()
            raise comm_error(self._failure or "the communicator of the GPUs was closed")

    def _join_family(self) -> None:
        if self._main is not None:
            self._main._rows = (*self._main._rows, weakref.ref(self))

    def _live_rows(self) -> list[DeviceLink]:
        return [row for row in (each() for each in self._rows) if row is not None]

    def _check_lender(self) -> None:
        """Drop a communicator that torch has ended; the next operation raises, since programs end groups at exit."""
        if self._lender is not None and self._lender.has_ended:
            self._lender, self._was_left = None, True
            self._failure = self._failure or "torch has ended the communicator that was borrowed from its process group"
            self.comm.abort(self._failure)

    def _abort_lender(self) -> None:
        """End torch's communicator through torch after ours failed, or wait for a thread that does so already."""
        if not self._aborting.acquire(timeout=_ENDING_S):
            return
        try:
            if self._lender is not None and not self.comm.is_alive:
                lender, self._lender = self._lender, None
                lender.abort()
        finally:
            self._aborting.release()

    def fail(self, reason: str) -> None:
        """End the communicators: peers that wait for this rank on the GPU or the host get the reason."""
        if self.host.is_alive:
            with contextlib.suppress(Error):  # another thread closed it meanwhile
                self.host.abort(reason)
        self._end(reason)

    def _end(self, reason: str) -> None:
        """End this rank's communicators of the family side by side: an abort waits for all kernels of the GPU."""
        main = self._main or self
        family = [main, *main._live_rows()]
        enders = [threading.Thread(target=link.comm.abort, args=(reason,), daemon=True) for link in family]
        for link, ender in zip(family, enders):
            link._failure = link._failure or reason
            ender.start()
        deadline = time.monotonic() + _ENDING_S
        for link, ender in zip(family, enders):
            ender.join(max(0.0, deadline - time.monotonic()))
            link._abort_lender()

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int) -> None:
        """Broadcast `root`'s values on torch's current stream. Strides may differ; version counters do not change."""
        with row_major(tensors, "a broadcast") as dense:
            if dense and self.world_size > 1:
                ranges = [(each.data_ptr(), each.nbytes, "uint8") for each in dense]
                self.comm.broadcast(ranges, root, self.current_stream())

    def norm_sum(self, gradients: Iterable[torch.Tensor]) -> bytes:
        """Return the exact sum of squares, like norm_sum(). The host waits for it."""
        _copies, ranges = _ranges_of(gradients)
        return self.comm.norm_sum(ranges, self.current_stream())

    def clip(
        self, gradients: Iterable[torch.Tensor], max_norm: float, result: torch.Tensor, *, is_sliced: bool
    ) -> None:
        """Write the exact 2-norm of all tensors and the factor that clips it to `result`; `is_sliced`: collective."""
        self._measured, ranges = _ranges_of(gradients)
        self.comm.clip(ranges, max_norm, is_sliced, result.data_ptr(), self.current_stream())

    def scale(self, tensors: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
        """Multiply dense tensors by a float32 on the GPU, each rounded to its dtype; a factor of 1 touches none."""
        together: dict[torch.dtype, list[tuple[int, int, int]]] = {}
        for tensor in tensors:
            address = tensor.data_ptr()
            together.setdefault(tensor.dtype, []).append((address, address, tensor.nbytes))
        for dtype, copies in together.items():
            name = dtype_name(dtype)
            self.comm.convert(copies, name, name, 1.0, self.current_stream(), factor.data_ptr())

    def close(self) -> None:
        """End the communicator, or return a borrowed one, once all enqueued operations have run."""
        self._lender = None
        self.comm.close()


def _watch_lender(reference: weakref.ref[DeviceLink]) -> None:
    """Watch a link whose communicator is torch's: only torch may end it, which releases its kernels."""
    while True:
        time.sleep(_WATCH_PERIOD_S)
        link = reference()
        if link is None:
            return
        link._check_lender()
        if not link.comm.is_alive:
            link._abort_lender()
            return
        del link


def device_link(
    group: HostGroup,
    tensor: torch.Tensor,
    timeout_s: float,
    rows: Sequence[Sequence[int]] | None = None,
    borrows: bool = False,
    beside: bool = False,
) -> DeviceLink:
    """Return the link of a group's GPUs, made at its first use (collective then) and shared afterwards.

    `rows` asks for the link inside this rank's row, with its own communicator (even if the row is the whole group) and
    its own stream. `beside`: use the group's stream. `borrows`: use torch's communicator of the group.
    """
    ordinal = cuda.runtime.ordinal(tensor)
    key = (ordinal, None if rows is None else tuple(map(tuple, rows)), borrows, beside)
    found: DeviceLink | None = group.links.get(key)
    if found is None:
        main = None if rows is None else device_link(group, tensor, timeout_s, borrows=borrows)
        found = group.links[key] = DeviceLink(group, ordinal, timeout_s, rows, main, borrows and rows is None, beside)
    return found


def mesh_links(
    group: HostGroup, tensor: torch.Tensor, timeout_s: float, rows: Sequence[Sequence[int]], borrows: bool = False
) -> tuple[DeviceLink, DeviceLink] | None:
    """Return the links of this rank's row and column that reduce means, on the group's stream. Collective.

    None if the group's transport is slots, which fold in rank order and stay inside one host.
    """
    if device_link(group, tensor, timeout_s, borrows=borrows).comm.describe()["transport"] != "nccl":
        return None
    both = (rows, [*zip(*rows, strict=True)])
    row, column = (device_link(group, tensor, timeout_s, each, borrows, beside=True) for each in both)
    return row, column
