"""torch's NCCL communicator, borrowed (`communicator="borrow"`).

torch's ProcessGroupNCCL gives its communicator's address (`_comm_ptr`) and still owns it. The engine neither destroys
nor aborts it: after a failure or a deadline it calls torch's `abort()`, which releases threads that wait in the
communicator's kernels. Each forward, and the thread that watches the link, check whether torch has ended it.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

_logger = logging.getLogger("shardwright")


class Lender:
    """A torch process group that lends its communicator, at `address`, for one GPU. NotImplementedError if it has none."""

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
            address: int = self._runtime.communicator(self._backend, self._ordinal)
            return address
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
