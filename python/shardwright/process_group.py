"""Which ranks train together, on which hosts, and the communicator that joins them. The only user of torch.distributed.

One communicator a group, shared by all modules wrapped over it; its deadline is the latest wrapper's. It lives as long as torch's group does, not
as long as a wrapper: ranks collect garbage at different times, and must not differ in whether they still have one. At exit
it is closed: a rank that leaves says so, and peers that wait for it learn it at once. Addresses, the secret and host names
travel once, by an all_gather over torch's own group. Between hosts bytes go through a Gloo group of our own (_Wire), which
never adds two of them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import json
import logging
import os
import pickle
import secrets
import socket
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import _hooks
from ._engine import CommError, HostComm, forked
from .launch import Launch, read_launch
from .slicing import Slicing

_logger = logging.getLogger("shardwright")
_SECRET_BYTES = 16
#: how long a rank that could not join waits for what the others say of it: those that live fail in the same moment
_REASONS_S = 0.5


#: A test's entry: the host of each rank, instead of what the handshake finds, whatever the group.
_forced_hosts: Sequence[int] | None = None


class HostGroup:
    """The ranks of one process group, joined by shared memory inside each host and by a bridge across.

    Attributes
    ----------
    comm : HostComm
    rank, world_size : int
        Inside the group.
    name : str
        torch's name of the group.
    hosts : list of str
        Each rank's host name; for messages alone.
    host_of : list of int
        Each rank's host, numbered by their lowest rank: who can map whose memory.
    """

    def __init__(self, group: Any, name: str, timeout_s: float, device: torch.device | None = None) -> None:
        self.name = name
        self._device = device
        self._group = (lambda: None) if group is None else weakref.ref(group)  # which is the key that it is found by
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world_size = dist.get_world_size(group) if group is not None else 1
        failure = ""
        try:
            self.comm = HostComm(
                self.rank, self.world_size, timeout_s=timeout_s, host=socket.gethostname(), log=_logger.warning
            )
        except (MemoryError, OSError) as error:
            failure = str(error)
        addresses, secret, self.hosts, pids, places = self._exchange(group, failure)
        self._store_name = f"shardwright/{hashlib.sha256(secret).hexdigest()}"
        self._children: list[HostComm] = []
        #: DeviceLinks by GPU; they end before the host's communicator
        self.links: dict[Any, Any] = {}
        try:
            self.host_of = self._find_hosts(group, addresses, places)
            if self.host_count == 1 and (_forced_hosts is None or self.world_size == 1):
                self._join_one_host(addresses, secret)
            else:
                self._join_hosts(group, addresses, secret, pids, timeout_s)
        except BaseException:
            self.comm.close()
            raise
        if self.rank == self.host_of.index(self.host_of[self.rank]):  # the host's lowest
            self._warn_of_threads()
        self._leave = weakref.finalize(self, _close_comms, self.comm, self._children, self.links, os.getpid())
        self._leave.atexit = False  # _close_all does it

    @property
    def torch_group(self) -> Any:
        """torch's; None without one."""
        return self._group()

    def is_of(self, torch_group: Any) -> bool:
        """Whether these are the ranks of that very group of torch's; None: of its default one."""
        return (torch_group if torch_group is not None else dist.group.WORLD) is self.torch_group

    @property
    def is_usable(self) -> bool:
        """Whether neither the hosts' communicator nor one of the GPUs' has ended with an error: the thread that looks after the latter may
        not have told the former yet."""
        return self.comm.is_alive and not any(link.comm.has_failed for link in self.links.values())

    @property
    def host_count(self) -> int:
        """Hosts that the ranks run on."""
        return max(self.host_of) + 1

    def home_of(self, slicing: Slicing, rank: int | None = None) -> int:
        """The lowest rank of `rank`'s (this one's) replica on its host: its memory holds what these have one copy of."""
        rank = self.rank if rank is None else rank
        return next(r for r in slicing.replica(rank) if self.host_of[r] == self.host_of[rank])

    def is_apart(self, slicing: Slicing) -> bool:
        """Whether some replica's slices are updated on several hosts."""
        return self.host_count > 1 and (not slicing.is_replicated or slicing.crosses(self.host_of))

    def host_map(self) -> dict[str, str]:
        """For describe(): what each host is called and which ranks it has, the one that carries first."""
        found: dict[str, str] = {}
        for host in range(self.host_count):
            ranks = [rank for rank, its_host in enumerate(self.host_of) if its_host == host]
            found[f"host {host}"] = f"{self.hosts[ranks[0]]}, ranks {', '.join(map(str, ranks))}"
        return found

    def _exchange(self, group: Any, failure: str) -> tuple[list[str], bytes, list[str], list[int], list[str]]:
        """Addresses, hosts and pids of all ranks, and rank 0's secret. A rank that cannot join says why here, to all."""
        host = socket.gethostname()
        secret = secrets.token_bytes(_SECRET_BYTES)
        address = "" if failure else self.comm.address
        threads = (torch.get_num_threads(), sorted(os.sched_getaffinity(0)))
        mine = (address, secret if self.rank == 0 else b"", host, os.getpid(), _place(), threads, failure)
        everyone = self._everyone(group, mine)
        addresses, secrets_, hosts, pids, places, self._threads, failures = (list(column) for column in zip(*everyone))
        for rank, reason in enumerate(failures):
            if reason:
                raise MemoryError(f"rank {rank} on host {hosts[rank]} cannot join the others: {reason}")
        return addresses, secrets_[0], hosts, pids, places

    def _warn_of_threads(self) -> None:
        """Where this host's ranks compute on more threads than they have cores: as a rule nobody has meant that."""
        here = [threads for threads, host in zip(self._threads, self.host_of) if host == self.host_of[self.rank]]
        cores, threads = len({core for _, own in here for core in own}), sum(count for count, _ in here)
        if len(here) > 1 and threads > cores and max(count for count, _ in here) > 1:
            _logger.warning(
                "the %d ranks on host %s compute on %d threads, and have %d cores: threads of torch's that wait for one another spin, "
                "and steps take many times as long; set OMP_NUM_THREADS=%d (torchrun sets it to 1) or call torch.set_num_threads(%d)",
                *(len(here), self.hosts[self.rank], threads, cores),
                *[max(1, cores // len(here))] * 2,
            )

    def _everyone(self, group: Any, mine: Any) -> list[Any]:
        if self.world_size == 1:
            return [mine]
        try:
            return _gather_objects(mine, group, self._device)
        except RuntimeError as error:
            raise comm_error(f"joining the ranks of group {self.name!r}: torch's own group failed: {error}") from error

    def _find_hosts(self, group: Any, addresses: Sequence[str], places: Sequence[str]) -> list[int]:
        """The host of each rank: ranks that can call one another over this machine's abstract sockets share one.

        Ranks of one place can; the join proves it. Otherwise each tries them all.
        """
        if _forced_hosts is not None and self.world_size > 1:
            return list(_forced_hosts)
        if places[0] and len(set(places)) == 1:
            return [0] * self.world_size
        return group_by_reach(self._everyone(group, self.comm.probe(addresses)))

    def _join_one_host(self, addresses: list[str], secret: bytes) -> None:
        """Joins through memory. What fails on one rank fails on all; with one sentence, as far as they live and have a store."""
        try:
            self.comm.connect(addresses, secret, self.hosts)
            if self.world_size > 1:
                self.comm.barrier("joining")  # nobody goes on alone
        except TimeoutError:
            raise
        except (RuntimeError, MemoryError, OSError) as error:
            raise self._first_cause(error) from error

    def _first_cause(self, error: Exception) -> Exception:
        """What all ranks raise instead of each its own `error`: a rank's own trouble before what is heard of others'."""
        mine = {"text": str(error), "heard": isinstance(error, CommError), "at": getattr(error, "rank", self.rank)}
        said, deadline_s = {self.rank: mine}, time.monotonic() + _REASONS_S
        try:
            store = dist.PrefixStore(f"{self._store_name}/not joined", dist.distributed_c10d._get_default_store())
            store.set(str(self.rank), json.dumps(mine))
            for rank in range(self.world_size):
                left_s = max(deadline_s - time.monotonic(), 0.001)
                try:
                    store.wait([str(rank)], timedelta(seconds=left_s))
                    said[rank] = json.loads(store.get(str(rank)))
                except RuntimeError:  # it does not live, or does not know yet
                    continue
        except (RuntimeError, ValueError):  # no store any more
            return error
        rank = min(said, key=lambda each: (said[each]["heard"], each))
        at = said[rank]["at"]
        text = f"joining failed on rank {rank} on host {self.hosts[rank]}: {said[rank]['text']}"
        return comm_error(text, at, self.hosts[at] if 0 <= at < self.world_size else "")

    def _join_hosts(self, group: Any, addresses: list[str], secret: bytes, pids: list[int], timeout_s: float) -> None:
        """Joins over a map of hosts. What fails on one rank fails on all, with its sentence."""
        failure: BaseException | None = None
        try:
            wire = None
            if self.host_count > 1:
                carriers = [self.host_of.index(host) for host in range(self.host_count)]
                if self.rank in carriers:
                    others = _sockets()
                    gloo = self.gloo_group("wire", carriers, timeout_s)
                    wire = _Wire(gloo, carriers, _sockets() - others)
            self.comm.connect(addresses, secret, self.hosts, host_of=self.host_of, pids=pids, wire=wire)
        except (RuntimeError, MemoryError, OSError) as error:
            failure = error
        verdicts = self._everyone(group, "" if failure is None else str(failure))
        for rank, reason in enumerate(verdicts):
            if reason:
                raise comm_error(
                    f"joining {self.host_count} hosts failed on rank {rank} on host {self.hosts[rank]}: {reason}",
                    rank,
                    self.hosts[rank],
                ) from failure

    @property
    def is_closed(self) -> bool:
        """Whether close() was called."""
        return not self._leave.alive

    def gloo_group(self, name: str, ranks: Sequence[int], timeout_s: float) -> Any:
        """A Gloo group of our own over `ranks` of this one, this rank among them: a backend, without torch's dispatch.
        Collective over `ranks` alone; its timeout is for finding one another too.

        torch's new_group() would either need every rank of the job, or name the group after the number of groups that a
        process has: ranks that are in different numbers of groups would wait for one another in vain.
        """
        store = dist.PrefixStore(f"{self._store_name}/{name}", dist.distributed_c10d._get_default_store())
        timeout = timedelta(seconds=min(timeout_s, 1e6))
        return dist.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), timeout)

    def join_inside(self, timeout_s: float) -> HostComm | None:
        """A communicator of the ranks of this rank's host alone, in order; None for one alone. Collective over all hosts."""
        here = [rank for rank in range(self.world_size) if self.host_of[rank] == self.host_of[self.rank]]
        comm, said, failure = None, {"address": "", "secret": "", "failure": ""}, None
        if len(here) > 1:
            try:
                comm = HostComm(
                    here.index(self.rank),
                    len(here),
                    timeout_s=timeout_s,
                    host=self.hosts[self.rank],
                    log=_logger.warning,
                )
                said = {**said, "address": comm.address, "secret": secrets.token_hex(_SECRET_BYTES)}
            except (MemoryError, OSError) as error:
                said["failure"] = str(error)
        everyone = [
            json.loads(each) for each in self.comm.all_gather_bytes(json.dumps(said).encode(), "joining a host")
        ]
        if comm is not None and not any(each["failure"] for each in everyone):
            try:
                secret = bytes.fromhex(everyone[here[0]]["secret"])
                comm.connect([everyone[rank]["address"] for rank in here], secret, [self.hosts[rank] for rank in here])
                self._children.append(comm)
            except (RuntimeError, MemoryError, OSError) as error:
                said["failure"], failure = str(error), error
        verdicts = self.comm.all_gather_bytes(said["failure"].encode(), "joining a host")
        for rank, reason in enumerate(verdicts):
            if reason:
                if comm is not None:
                    comm.close()
                raise comm_error(
                    f"joining the ranks of a host failed on rank {rank} on host {self.hosts[rank]}: {reason.decode()}",
                    rank,
                    self.hosts[rank],
                ) from failure
        return comm

    def close(self) -> None:
        """Takes leave of the peers, once; those that wait for this rank get a CommError. No effect in a forked child."""
        self._leave()

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int, label: str) -> None:
        """Values of `root` to all ranks, whatever the strides of each rank's tensors. Version counters stay.

        Cost: the bytes of `tensors`, once; tensors that are not contiguous go through a copy.
        """
        plain = [tensor.data for tensor in tensors if tensor.numel()]
        dense = [t if t.is_contiguous() and not t.is_conj() and not t.is_neg() else _row_major(t) for t in plain]
        ranges = [(t.data_ptr(), t.numel() * t.element_size()) for t in dense]
        if ranges and self.world_size > 1:
            self.comm.broadcast(ranges, root, label)
            for tensor, copy in zip(plain, dense):
                if copy is not tensor:
                    tensor.copy_(copy)

    def highest_rank_where(self, condition: bool, label: str) -> int:
        """The highest rank on which `condition` holds, -1 if none. Collective."""
        verdicts = self.comm.all_gather_bytes(b"\1" if condition else b"\0", label)
        return max((rank for rank, verdict in enumerate(verdicts) if verdict == b"\1"), default=-1)


#: how long _gather_objects waits for a thread of torch that does not let go; as a rule it takes microseconds
_LETTING_GO_S = 1.0


def _gather_objects(mine: Any, group: Any, device: torch.device | None = None) -> list[Any]:
    """Every rank's `mine`, over torch's `group`, as all_gather_object does; no thread of torch's has a part of it afterwards.

    `device`: this rank's. A group of GPUs alone sends from the current one, which is the first on all ranks of a program that chooses none.

    A thread of torch's Gloo lets go of the tensors of a collective when its caller has gone on already, and takes the GIL for it: an
    interpreter that ends in this moment, with the error that the exchange has brought, ends the thread inside a destructor, and
    the program aborts instead of saying what is wrong.
    """
    world_size = dist.get_world_size(group)
    if "cpu:gloo" not in str(dist.get_backend_config(group)):  # other backends' tensors are on their devices
        everyone: list[Any] = [None] * world_size
        on_gpu = device is not None and device.type == "cuda"
        with torch.cuda.device(device) if on_gpu else contextlib.nullcontext():
            dist.all_gather_object(everyone, mine, group=group)
        return everyone
    data = pickle.dumps(mine)
    length = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
    lengths = [torch.zeros_like(length) for _ in range(world_size)]
    dist.all_gather(lengths, length, group=group)
    longest = max(int(each) for each in lengths)
    padded = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
    parts = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(parts, padded, group=group)
    _wait_until_ours([length, *lengths, padded, *parts])
    return [pickle.loads(part.numpy().tobytes()) for part in parts]


def _wait_until_ours(tensors: Sequence[torch.Tensor]) -> None:
    """Until nobody else refers to `tensors`, which have no views."""
    deadline_s = time.monotonic() + _LETTING_GO_S
    while any(map(_hooks.is_shared, tensors)) and time.monotonic() < deadline_s:
        time.sleep(1e-4)  # without the GIL


def _row_major(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().clone(memory_format=torch.contiguous_format)


def comm_error(message: str, rank: int = -1, host: str = "") -> CommError:
    """A CommError with its attributes set."""
    error = CommError(message)
    error.rank, error.host = rank, host
    return error


def _place() -> str:
    """Equal for processes under one running kernel in one network namespace; empty where it cannot be known."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


def group_by_reach(reach: Sequence[bytes]) -> list[int]:
    """The host of each rank, numbered by their lowest rank, from who can call whom (reach[a][b] is 1).

    Raises
    ------
    CommError
        Two ranks can both call a third, but not one another: they are neither on one host nor on two.
    """
    host_of: list[int] = []
    for rank in range(len(reach)):
        friends = [other for other in range(len(reach)) if reach[rank][other] and reach[other][rank]]
        lowest = min(friends)
        host_of.append(host_of[lowest] if lowest < rank else max(host_of, default=-1) + 1)
        for other in friends:
            if any(reach[rank][third] != reach[other][third] for third in friends):
                raise comm_error(
                    f"ranks {rank} and {other} can call one another, but not the same other ranks of this machine: ranks of "
                    "one host must all share one network namespace",
                    rank,
                )
    return host_of


#: longer than any deadline of ours, which is kept by those who wait for the carrier
_FOR_EVER = timedelta(days=1000)
#: tags of _Wire's own, among those of SW_MESSAGE_LAST (csrc/comm/bridge.h)
_FAREWELL, _NEVER_SENT = (6 << 28) + 1, (6 << 28) + 2
_FAREWELL_S = 0.2


class _Wire:
    """Moves bytes between the carriers of hosts through a Gloo group of our own: what csrc/comm/bridge.h asks of a wire.

    Parameters
    ----------
    gloo : ProcessGroupGloo
    carriers : sequence of int
        The rank of each of its ranks.
    sockets : set of (int, str)
        That came with it, as _sockets() has them. A forked child lets go of them: where it lives on, the peers of a process that was
        killed would not see its connections end.
    """

    #: of gradients; over what is slower float32 blocks are packed (docs/design/hosts.md). Read once, by the engine
    slow_bytes_per_s = 300_000_000

    def __init__(self, gloo: Any, carriers: Sequence[int], sockets: set[tuple[int, str]]) -> None:
        self._group = gloo  # its timeout is for finding one another; see _FOR_EVER
        self._place = {rank: place for place, rank in enumerate(carriers)}
        self._sockets = sockets
        _wires.add(self)

    def send(self, rank: int, tag: int, address: int, nbytes: int) -> Any:
        """Begins; what it returns is to be waited for."""
        return self._group.send([_bytes_at(address, nbytes)], self._place[rank], tag)

    def receive(self, rank: int, tag: int, address: int, nbytes: int) -> Any:
        return self._group.recv([_bytes_at(address, nbytes)], self._place[rank], tag)

    def wait(self, work: Any) -> None:
        work.wait(_FOR_EVER)

    def close(self, gently: bool) -> bool:
        """Closes all connections, whoever waits for them; `gently`: after the others' farewell, or a moment.

        Gloo has no call for it, but a receive that is not fulfilled in its time closes all connections of its group. At
        exit nothing is done, and false: the kernel closes them, and who takes long to say what it has to say still can.
        """
        if _exits:
            return False
        others = [place for place in range(self._group.size()) if place != self._group.rank()]
        if gently:
            self._exchange_farewells(others)
        nothing = torch.zeros(1, dtype=torch.uint8, device="cpu")
        for other in others:
            try:
                receiving = self._group.recv([nothing], other, _NEVER_SENT)
            except RuntimeError:  # that connection has been closed already
                continue
            with contextlib.suppress(RuntimeError):
                receiving.wait(timedelta(milliseconds=1))
        return True

    def let_go(self) -> None:
        """In a forked child. Each number stays taken: whoever still has it would close somebody else's file."""
        nothing = os.open(os.devnull, os.O_RDONLY)
        for fd, _ in self._sockets & _sockets():
            os.dup2(nothing, fd)
        os.close(nothing)

    def _exchange_farewells(self, others: Sequence[int]) -> None:
        """What was sent to a peer has arrived when it says farewell; one that does not is about something else."""
        word = torch.zeros(1, dtype=torch.uint8, device="cpu")
        heard = [torch.zeros_like(word) for _ in others]
        deadline_s = time.monotonic() + _FAREWELL_S
        with contextlib.suppress(RuntimeError):  # an end of the connection is one, too
            sending = [self._group.send([word], other, _FAREWELL) for other in others]
            receiving = [self._group.recv([each], other, _FAREWELL) for each, other in zip(heard, others)]
            for work in (*receiving, *sending):
                work.wait(timedelta(seconds=max(deadline_s - time.monotonic(), 1e-3)))


#: that live
_wires: weakref.WeakSet[_Wire] = weakref.WeakSet()


def _sockets() -> set[tuple[int, str]]:
    """Of this process: descriptors, and what the kernel calls what is behind each."""
    found = set()
    for fd in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):  # the folder's own has gone
            found.add((int(fd), os.readlink(f"/proc/self/fd/{fd}")))
    return {(fd, name) for fd, name in found if name.startswith("socket:")}


def _forked() -> None:
    forked()
    for wire in _wires:
        wire.let_go()


#: one type for memory of any length: ctypes takes 80 to 170 us, with the GIL, to make one for each
_Bytes = ctypes.c_uint8 * (1 << 46)


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(_Bytes.from_address(address), dtype=torch.uint8, count=nbytes)


#: torch's group -> ours. A HostGroup does not hold torch's group, so an entry ends with its group.
_groups: weakref.WeakKeyDictionary[Any, HostGroup] = weakref.WeakKeyDictionary()
_single: dict[None, HostGroup] = {}


def live_groups() -> list[HostGroup]:
    """Every communicator of this process that is in use."""
    return [group for group in (*_single.values(), *_groups.values()) if not group.is_closed]


def resolve_group(process_group: Any, device_mesh: Any) -> Any:
    """torch's group for these options; None for a single rank without one.

    Raises
    ------
    ValueError
        This rank is not part of the group.
    """
    if device_mesh is not None:
        process_group = device_mesh.get_group() if device_mesh.ndim == 1 else _group_of_mesh(device_mesh)
    if process_group is not None:
        if dist.get_rank(process_group) < 0:
            raise ValueError(
                "this rank is not part of the process group given; wrap the module on the group's ranks only"
            )
        return process_group
    if not dist.is_available():
        return None
    if not dist.is_initialized():
        launch = read_launch(os.environ)
        if launch is None:
            return None
        _join(launch)
    return dist.group.WORLD


#: the default group -> groups over all ranks of meshes, by these ranks
_mesh_groups: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()


def _group_of_mesh(device_mesh: Any) -> Any:
    """Over all its dimensions. Collective over its ranks where it has none yet."""
    ranks = tuple(sorted(device_mesh.mesh.flatten().tolist()))
    if dist.get_rank() not in ranks:
        raise ValueError(
            f"this rank, {dist.get_rank()}, is not part of the device_mesh given, which has ranks "
            f"{', '.join(map(str, ranks))}: wrap the module on those only"
        )
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    made = _mesh_groups.setdefault(dist.group.WORLD, {})
    if ranks not in made:
        made[ranks] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return made[ranks]


def mesh_rows(device_mesh: Any, group: Any) -> list[list[int]]:
    """The ranks of `group` in each row of a mesh of two dimensions, which is made of them."""
    return [[dist.get_group_rank(group, rank) for rank in row] for row in device_mesh.mesh.tolist()]


def _join(launch: Launch) -> None:
    """Makes the default process group."""
    if not launch.master_addr:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    elif launch.launcher == "torchrun":  # its own way: after a restart its agent keeps the store
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=launch.init_method, rank=launch.rank, world_size=launch.world_size)


def is_default_group(group: Any) -> bool:
    """Whether `group` is what an unpickled copy would find."""
    return group is None or (dist.is_initialized() and group is dist.group.WORLD)


def host_group(group: Any, timeout_s: float, device: torch.device | None = None) -> HostGroup:
    """The communicator of torch's `group`, made at its first use (collective then) and shared afterwards. `device`: of this rank's module.

    One that ended with an error, on whatever rank, gives way to a new one.
    """
    table: Any = _single if group is None else _groups
    found = table.get(group)
    if found is not None and found.is_usable:
        found.comm.timeout_s = timeout_s
        return found
    _register_ends()
    if found is not None:
        found.close()
    name = "single rank" if group is None else str(getattr(group, "group_name", "unnamed"))
    table[group] = made = HostGroup(group, name, timeout_s, device)
    return made


@functools.cache
def _register_ends() -> None:
    atexit.register(_close_all)
    os.register_at_fork(after_in_child=_forked)


#: once the process is about to end
_exits = False


def _close_all() -> None:
    global _exits
    _exits = True
    for group in live_groups():
        group.close()


def _close_comms(comm: HostComm, children: list[HostComm], links: dict[Any, Any], pid: int) -> None:
    if os.getpid() == pid:  # a forked child must not take leave in its parent's name
        # A row's link before the one of all ranks, whose end would be taken for its failure.
        ends = *reversed(links.values()), *children, comm
        with contextlib.ExitStack() as closing:  # all of them, whatever interrupts one
            for each in reversed(ends):
                closing.callback(each.close)


def group_size(group: Any) -> int:
    """Ranks of torch's `group` (None: the default one); 1 where there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size(group)


def gather_in_rank_order(row: torch.Tensor, group: Any) -> tuple[torch.Tensor, ...]:
    """Every rank's `row`, over torch's `group`: by a sum with zeros, which every backend has for its devices, and which is exact."""
    rows = row.new_zeros(dist.get_world_size(group), row.numel())
    rows[dist.get_rank(group)] = row
    dist.all_reduce(rows, group=group)
    return rows.unbind()


def describe_group() -> str:
    """One line for describe(): what torch.distributed is in this process."""
    if not dist.is_available():
        return "torch.distributed is not in this build of torch"
    if not dist.is_initialized():
        return "no default process group"
    return f"rank {dist.get_rank()} of {dist.get_world_size()}, backend {dist.get_backend()}"
