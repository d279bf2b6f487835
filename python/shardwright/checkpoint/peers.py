"""The ranks that save and load together: one communicator, and the page a rank through which they tell of failures."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.dlpack import from_dlpack

from .._engine import CheckpointError, CommError
from ..comm.process_group import HostGroup, host_group, resolve_group
from ..parallel.fully_shard import wrapper_of

_BOARD_BYTES = 4096


def whole_parameters(model: Any, *, writable: bool) -> contextlib.AbstractContextManager[Any]:
    """A context in which `model` has whole parameters that may be read, or written. Collective where parameters are sliced
    or shared."""
    import shardwright

    if wrapper_of(model) is None:
        return contextlib.nullcontext()
    return shardwright.full_parameters(model, writable=writable)


def averages_gradients(model: Any) -> bool:
    """Whether a wrapper is known to keep the ranks' parameters alike."""
    model = getattr(model, "_orig_mod", model)
    return isinstance(model, TorchDDP) or wrapper_of(model) is not None


def has_passing_parameters(model: Any) -> bool:
    """Whether whole parameters are there inside of whole_parameters() alone."""
    wrapped = wrapper_of(model)
    return wrapped is not None and wrapped._engine().releases_parameters


class Peers:
    """This rank among the ranks of a module's group.

    Parameters
    ----------
    model : Module
        Its process group is used if it is a DistributedDataParallel.
    process_group : ProcessGroup, optional
        Default: the model's, else the default group, else this rank alone.
    timeout_s : float
        Of the communicator, unless the model has one.
    """

    def __init__(self, model: Any, process_group: Any = None, timeout_s: float = 1800.0) -> None:
        if process_group is None and isinstance(model, TorchDDP):
            process_group = model.process_group
        options = getattr(model, "_options", None)
        timeout_s = getattr(options, "timeout_s", timeout_s)
        self._group = host_group(resolve_group(process_group, None), timeout_s)
        self.rank = self._group.rank
        self.world_size = self._group.world_size

    @property
    def host_of(self) -> list[int]:
        """Each rank's host, numbered by their lowest rank."""
        return [0] * self.world_size if self.world_size == 1 else self._group.host_of

    @property
    def has_hosts(self) -> bool:
        """Whether ranks are on several hosts."""
        return self._group.host_count > 1

    def board(self, path: str, nonce: str) -> Any:
        """What all ranks see, for a saver: memory, or over hosts a file at `path`; None at world size 1. Collective.

        Raises
        ------
        CheckpointError
            On every rank: the file cannot be made, or some rank does not see the one that rank 0 made.
        """
        if self.world_size == 1:
            return None
        if not self.has_hosts:
            return self._group.comm.arena(_BOARD_BYTES, "checkpoint board")
        self.together(lambda: self.make_board(path, nonce), f"making {path}")
        self.check_board(path, nonce)
        return path

    def check_board(self, path: str, nonce: str) -> None:
        """Raises CheckpointError on every rank if some rank does not see the board that rank 0 made. Called again once the file is
        open: a save to the same path by other ranks may have replaced it between. Collective over hosts."""
        if self.has_hosts:
            self.together(lambda: self._look_at_board(path, nonce), f"reading {path}")

    def make_board(self, path: str, nonce: str) -> None:
        """On rank 0: the file that board() gives, all of its disk space included. In place of one that is there."""
        if self.rank:
            return
        try:
            with open(f"{path}.new", "wb") as file:
                file.write(bytes(_BOARD_BYTES * self.world_size) + nonce.encode())
            os.replace(f"{path}.new", path)
        except OSError as error:
            raise os_error(f"'{path}' cannot be made: {error.strerror}", error.errno) from error

    def renew_board(self, path: str, nonce: str) -> None:
        """On rank 0: makes the file again if somebody took it away."""
        if self.rank == 0 and self.has_hosts and not os.path.exists(path):
            self.make_board(path, nonce)

    def remove_board(self, path: str) -> None:
        """Once every rank has come here. Collective over hosts."""
        if not self.has_hosts:
            return
        with contextlib.suppress(CommError):  # what went wrong is on its way already
            self.exchange("", f"leaving {path}")
        if self.rank == 0:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _look_at_board(self, path: str, nonce: str) -> None:
        found = b""
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(_BOARD_BYTES * self.world_size)
            found = file.read()
        if found.decode("ascii", "replace") != nonce:
            raise CheckpointError(
                f"host {self._group.hosts[self.rank]} does not see '{path}' as rank 0 made it: checkpoints over several hosts "
                "need a folder that all of them share, and that no other save writes to at the same time"
            )

    def exchange(self, value: Any, label: str) -> list[Any]:
        """Every rank's `value` (of JSON), in rank order. Collective."""
        if self.world_size == 1:
            return [value]
        return [json.loads(text) for text in self._group.comm.all_gather_bytes(json.dumps(value).encode(), label)]

    def together(self, make: Callable[[], Any], label: str) -> list[Any]:
        """Every rank's make(), of JSON. Collective: a rank whose make() raises takes part first, and then all raise."""
        value, failure = None, None
        try:
            value = make()
        except Exception as error:
            failure = error
        told = "" if failure is None else str(failure) or type(failure).__name__
        answers = self.exchange([told, value], label)
        if failure is not None:
            raise failure
        for rank, (why, _) in enumerate(answers):
            if why:
                raise CheckpointError(f"rank {rank}: {why}")
        return [each for _, each in answers]

    def agree(self, arguments: Callable[[], dict[str, Any]], call: str) -> None:
        """Checks a call's arguments by arguments(), whose values (of JSON) are the same on all ranks. Collective: every rank hears of
        one whose check raises, or that was given another value.

        Raises
        ------
        CheckpointError
            On every rank, but the own error on one whose check raised.
        """
        first, *others = self.together(arguments, f"arguments of {call}")
        for rank, other in enumerate(others, 1):
            for name, value in first.items():
                if other[name] != value:
                    raise CheckpointError(
                        f"{call}: {name} is {value!r} on rank 0 and {other[name]!r} on rank {rank}: all ranks give the same"
                    )

    def shared_memory(self, nbytes: int, label: str) -> SharedMemory:
        """Memory that this host's ranks all map, at world sizes above 1. Collective; MemoryError on every rank alike."""
        return SharedMemory(self._group, nbytes, label)

    def copied_memory(self, nbytes: int, label: str) -> CopiedMemory:
        """What goes where there is no shared memory. Collective; MemoryError on every rank alike."""
        made: list[CopiedMemory] = []
        self.together(lambda: made.append(CopiedMemory(self, nbytes, label)), label)
        return made[0]

    @property
    def is_alive(self) -> bool:
        """Whether no other rank is known to have failed or left."""
        return self.world_size == 1 or self._group.comm.is_alive


class SharedMemory:
    """Of one size on every host; the part of a host's lowest rank is what all of its ranks write to and read.

    Attributes
    ----------
    memory : Tensor
        Of uint8, one-dimensional.
    """

    def __init__(self, group: HostGroup, nbytes: int, label: str) -> None:
        self._comm, self._label = group.comm, label
        self._arena = group.comm.arena(nbytes, label, of_hosts=True)
        home = group.host_of.index(group.host_of[group.rank])
        self.memory: torch.Tensor = from_dlpack(self._arena.tensor(0, "uint8", [nbytes], None, home))

    def meet(self) -> None:
        """What every rank of this host wrote before is there for the others. Collective over all hosts."""
        self._comm.barrier(self._label)

    def spread(self, begin: int, nbytes: int) -> None:
        """As meet(), and of bytes [begin, begin + nbytes), cut into world_size equal slices, each rank's is there on every host."""
        self._comm.all_gather(self._arena, [(begin, nbytes)], self._label, one_copy=True)


class CopiedMemory:
    """Of every rank's own, where ranks cannot map each other's (a limit of files, of descriptors, of memory): what one has in its slot
    is copied to all of them, so that it costs what an all-gather does.

    Attributes
    ----------
    memory : Tensor
        As SharedMemory's.
    """

    def __init__(self, peers: Peers, nbytes: int, label: str) -> None:
        self._peers, self._label = peers, label
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def copy(self, begin: int, stride: int, nbytes: int) -> None:
        """The first `nbytes` of each rank's slot are there on every rank; slots begin at `begin`, each `stride` bytes on. Collective."""
        comm, own = self._peers._group.comm, self._slot(begin, stride, nbytes, self._peers.rank)
        for rank, data in enumerate(comm.all_gather_bytes(own.numpy().tobytes(), self._label)):
            if rank != self._peers.rank and nbytes:
                self._slot(begin, stride, nbytes, rank).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _slot(self, begin: int, stride: int, nbytes: int, rank: int) -> torch.Tensor:
        return self.memory[begin + rank * stride : begin + rank * stride + nbytes]


def os_error(sentence: str, errno: int | None) -> CheckpointError:
    """With the system's number; None: it refused nothing."""
    error = CheckpointError(sentence)
    error.errno = errno
    return error
