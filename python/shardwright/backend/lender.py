"""torch's NCCL communicator, borrowed (`communicator="borrow"`).

torch's ProcessGroupNCCL tells its communicator's address (`_comm_ptr`), and keeps owning it: we neither destroy nor abort it behind torch's
back. What ends ours, a failure or a deadline, is told to torch by its own `abort()`, which lets go whoever waits in the
communicator's kernels; what torch ends itself is seen before each forward, and by the thread that looks after the link.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

_logger = logging.getLogger("shardwright")


class Lender:
    """A torch process group whose communicator for one GPU is lent.

    Parameters
    ----------
    runtime
        What the engine uses of torch.cuda (device.CudaRuntime).
    group : ProcessGroup or None
    ordinal : int

    Attributes
    ----------
    address : int
        Of the communicator.

    Raises
    ------
    NotImplementedError
        There is no group, its backend on GPUs is not NCCL, this torch does not tell the address, or it has no communicator yet.
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
        """0: there is none, or it was ended."""
        with contextlib.suppress(RuntimeError):
            address: int = self._runtime.communicator(self._backend, self._ordinal)
            return address
        return 0

    @property
    def has_ended(self) -> bool:
        """Whether torch has ended it, or made another."""
        return self._ask() != self.address

    def abort(self) -> None:
        """torch's own, of all of the group's communicators. What it says is logged: the failure is known already."""
        try:
            self._backend.abort()
        except Exception as error:
            _logger.warning("torch's abort of the borrowed communicator: %s", str(error))


def _backend_of(runtime: Any, group: Any) -> Any:
    if group is None:
        raise NotImplementedError("communicator='borrow' needs a torch process group, and there is none")
    try:
        backend = runtime.backend(group)
    except RuntimeError as error:
        raise NotImplementedError(
            f"communicator='borrow': the process group has no backend for GPUs: {error}"
        ) from error
    missing = [name for name in ("_comm_ptr", "abort") if not hasattr(backend, name)]
    if missing:
        raise NotImplementedError(
            f"communicator='borrow': the process group's backend for GPUs is {type(backend).__name__}, which has no {missing[0]}(): "
            "the ProcessGroupNCCL of a newer torch has"
        )
    return backend
