"""Peers: the ranks that save and load together, their communicator and the channel on which they report during a save."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from .._engine import CheckpointError, CommError
from ..comm.agreement import gather_values
from ..comm.process_group import host_group, resolve_group
from ..comm.waits import Wait
from ..layout.memory import bytes_of
from ..parallel.engine import engine_of
from ..wrapping import whole_replicas
from .joined import averaging, engines_of, parts_of

_PAGE_BYTES = 4096
#: ranks that a message names
_NAMED = 8


@contextlib.contextmanager
def whole_parameters(model: Any, *, writable: bool) -> Iterator[None]:
    """Return a context in which `model` has whole parameters to read, or to write. Collective if they are sliced or shared."""
    with contextlib.ExitStack() as stack:
        for each in engines_of(model):
            if not each.replica.parameters().rows:  # else state dicts have DTensors
                stack.enter_context(whole_replicas(each.replicas, writable=writable))
        yield


def averages_gradients(model: Any) -> bool:
    """Return whether wrappers average the gradients of all trained parameters, which keeps these equal on all ranks."""
    averaged = {
        id(parameter)
        for each in averaging(model)
        for name, parameter in each.module.named_parameters()
        if name not in each.parameters_to_ignore
    }
    return bool(averaged) and all(id(each) in averaged for each in model.parameters() if each.requires_grad)


class Peers:
    """A rank's view of its module's group: `process_group`, else the model's, else the default one, else this rank alone."""

    def __init__(self, model: Any, process_group: Any = None, timeout_s: float = 1800.0) -> None:
        replicas = [replica for engine in engines_of(model) if engine.made for replica in engine.replicas]
        #: mesh of DTensors -> (this rank's number among the ranks that hold equal shards of them, count of these ranks)
        self.replicas: dict[Any, tuple[int, int]] = {}
        for each in replicas:
            if each.table.model_mesh is not None:
                self.replicas[each.table.model_mesh.mesh] = each.group.rank, each.group.world_size
        replica = next((each for each in replicas if each.model_ranks is not None), None)
        if replica is not None:
            assert replica.model_ranks is not None
            process_group = process_group or replica.model_ranks.with_group(replica.group)
        of_torch = [each.process_group for each in parts_of(model).values() if isinstance(each, TorchDDP)]
        if process_group is None and replica is None and of_torch:
            process_group = of_torch[0]
        engines = (engine_of(each, make=False) for each in parts_of(model).values())
        timeout_s = next((each.options.timeout_s for each in engines if each is not None), timeout_s)
        self.group = host_group(resolve_group(process_group, None), timeout_s)
        #: deadline of an exchange; a rank's own work before an exchange must take less
        self.timeout_s = float(timeout_s)
        self.rank, self.world_size = self.group.rank, self.group.world_size
        group = self.group.torch_group
        #: each rank's number in torch's default group, and its host; the lowest rank of each host
        self.global_ranks = [0] if group is None else dist.get_process_group_ranks(group)
        self.host_of, self.carriers = list(self.group.host_of), self.group.carriers
        self.host_count = self.group.host_count
        self.has_hosts = self.host_count > 1
        #: this rank's host, the ranks of it, and this rank's position among them
        self.host = self.host_of[self.rank]
        self.here = [rank for rank, host in enumerate(self.host_of) if host == self.host]
        self.index = self.here.index(self.rank)

    @property
    def simulated_host(self) -> int | None:
        """Return this rank's host if a test has chosen it; else None."""
        return self.group.simulated_host

    def channel(self, path: str, nonce: str) -> tuple[Any, list[int] | None, str | None]:
        """Return a host's control pages and, across hosts, the hosts and a file: a save's reports go there. Collective."""
        if self.world_size == 1:
            return None, None, None
        pages = self.group.comm.arena(_PAGE_BYTES, "pages of checkpoints", of_hosts=True)
        if not self.has_hosts:
            return pages, None, None
        self.together(lambda: self._make_board(path, nonce), f"making {path}")
        self.check_board(path, nonce)
        return pages, self.host_of, path

    def check_board(self, path: str, nonce: str) -> None:
        """Raise CheckpointError on every rank if some rank does not see the file that rank 0 made. Collective over hosts."""
        if self.has_hosts:
            self.together(lambda: self._look_at_board(path, nonce), f"reading {path}")

    def _make_board(self, path: str, nonce: str) -> None:
        """Create the file of a channel on rank 0, with its disk space allocated. Replaces an older file."""
        if self.rank:
            return
        with told(f"'{path}' cannot be made"):
            with open(f"{path}.new", "wb") as file:
                file.write(bytes(_PAGE_BYTES * self.host_count) + nonce.encode())
            os.replace(f"{path}.new", path)

    def renew_board(self, path: str, nonce: str) -> None:
        """Recreate the file on rank 0 if it was removed."""
        if self.rank == 0 and self.has_hosts and not os.path.exists(path):
            self._make_board(path, nonce)

    def remove_board(self, path: str) -> None:
        """Remove the file on rank 0 once every rank has called this. Collective over hosts."""
        if not self.has_hosts:
            return
        with contextlib.suppress(CommError):  # the failure has already been reported
            self.exchange("", f"leaving {path}")
        if self.rank == 0:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _look_at_board(self, path: str, nonce: str) -> None:
        found = b""
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(_PAGE_BYTES * self.host_count)
            found = file.read()
        if found.decode("ascii", "replace") != nonce:
            raise CheckpointError(
                f"host {self.group.hosts[self.rank]} does not see '{path}' as rank 0 made it: checkpoints over several hosts "
                "need a folder that all hosts share, and one save at a time in it"
            )

    def exchange(self, value: Any, label: str) -> list[Any]:
        """Return every rank's `value` (of JSON), in rank order. Collective."""
        texts = [] if self.world_size == 1 else self.all_gather(json.dumps(value).encode(), label)
        return [json.loads(text) for text in texts] or [value]

    def all_gather(self, data: bytes, label: str) -> list[bytes]:
        """Return every rank's `data`, in rank order. Collective."""
        return [data] if self.world_size == 1 else list(self.group.comm.all_gather_bytes(data, label))

    def agreement(self, value: Any, label: str) -> list[Any] | None:
        """Return None if all ranks gave the same `value` (of JSON), the fast path; else all values. Collective."""
        mine = json.dumps(value).encode()
        answers = self.all_gather(mine, label)
        return None if all(each == mine for each in answers) else [json.loads(each) for each in answers]

    def broadcast(self, data: bytes, label: str, root: int = 0) -> bytes:
        """Return the `data` of rank `root`. Collective."""
        if self.world_size == 1:
            return data
        memory = torch.empty(self.exchange(len(data), label)[root], dtype=torch.uint8, device="cpu")
        if self.rank == root:
            memory.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.group.comm.broadcast([(memory.data_ptr(), memory.nbytes)], root, label)
        return data if self.rank == root else bytes_of(memory)

    def send(self, root: int, ranges: Sequence[tuple[int, int]], label: str) -> None:
        """Copy memory, (address, nbytes), from rank `root` to the other ranks. Collective."""
        self.group.comm.broadcast(ranges, root, label)

    def together(
        self, make: Callable[[], Any], label: str, keeps: tuple[type[Exception], ...] = (ValueError, TypeError)
    ) -> list[Any]:
        """Return the result of make() (of JSON) on every rank. Collective. If make() raises on one rank, the exchange
        still completes and all raise the same CheckpointError, but for a rank whose error is one of `keeps`."""
        if self.world_size == 1:
            return [make()]
        own: list[Exception] = []

        def answer() -> Any:
            try:
                return make()
            except Exception as error:
                own.append(error)
                why = f"rank {self.rank}: {str(error) or type(error).__name__}"
                raise os_error(why, getattr(error, "errno", None)) from error

        options: dict[str, Any] = {"refusals": (CheckpointError,), "retell": lambda _, why: CheckpointError(why)}
        try:
            return gather_values(self.group.comm, answer, label, alike=True, **options)
        except CheckpointError:
            if not own or not isinstance(own[0], keeps):
                raise
        raise own[0]

    def first(self, make: Callable[[], Any], label: str) -> Any:
        """Return rank 0's result of make() (of JSON) on every rank. Collective. If it raises, all raise its sentence."""
        reply: list[Any] = ["", None, None]
        if self.rank == 0:
            try:
                reply[2] = make()
            except Exception as error:
                reply = [str(error) or type(error).__name__, getattr(error, "errno", None), None]
        why, errno, value = self.exchange(reply, label)[0]
        if why:
            raise os_error(why, errno)
        return value

    def agree(self, check: Callable[[], tuple[dict[str, Any], Any]], call: str) -> Any:
        """Check a call's arguments: return the second result of check(); the first (of JSON) must be equal on all ranks. Collective."""
        checked: list[tuple[dict[str, Any], Any]] = []

        def arguments() -> dict[str, Any]:
            checked.append(check())
            return checked[0][0]

        first, *others = self.together(arguments, f"arguments of {call}")
        for rank, other in enumerate(others, 1):
            for name, value in first.items():
                if other[name] != value:
                    raise CheckpointError(
                        f"{call}: {name} is {value!r} on rank 0 and {other[name]!r} on rank {rank}: give the same on all ranks"
                    )
        return checked[0][1]

    @property
    def is_alive(self) -> bool:
        """Return False once another rank failed or left."""
        return self.world_size == 1 or self.group.comm.is_alive

    @property
    def dead_rank(self) -> int | None:
        """Return a rank of this host whose process has ended; None if none is known."""
        return None if self.world_size == 1 else self.group.comm.dead_rank

    @property
    def silent_s(self) -> float:
        """Return the seconds after which a stopped rank counts as lost; 0: never."""
        return float(self.group.comm.silent_s)

    def stopped(self, ranks: Sequence[int]) -> int | None:
        """Return one of these ranks of this host whose process is stopped; None if none is."""
        return next((each for each in ranks if self.group.comm.peer(each).endswith("(stopped)")), None)

    def wait(self) -> Wait:
        """Return a wait that logs as the communicator's waits do."""
        return Wait(self.group.comm.warn_after_s)

    def names_of(self, ranks: Sequence[int]) -> str:
        """Return ranks, their processes and hosts, and what the processes do, for messages."""
        more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
        return ", ".join(map(self.group.comm.peer, ranks[:_NAMED])) + more

    @property
    def end_reason(self) -> str:
        """Return why is_alive is False, as this rank knows it: a text that names the rank that failed or left; "" if unknown."""
        return "" if self.world_size == 1 else self.group.comm.end_reason or ""


def os_error(sentence: str, errno: int | None) -> CheckpointError:
    """Return a CheckpointError with the system's error number; None: no system call failed."""
    error = CheckpointError(sentence)
    error.errno = errno
    return error


def in_words(error: Exception) -> str:
    """Return the error's text, or the name of its class if it has none."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


@contextlib.contextmanager
def told(sentence: str) -> Iterator[None]:
    """Return a context that raises its errors as CheckpointError: the sentence, and the error with its number."""
    try:
        yield
    except Exception as error:
        raise os_error(f"{sentence}: {in_words(error)}", getattr(error, "errno", None)) from error
