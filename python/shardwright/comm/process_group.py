"""The ranks that train together, their hosts, and the communicator that joins them. The only user of torch.distributed.

All modules wrapped over one group share one communicator; its deadline is the latest wrapper's. It lives as long as
torch's group, not as long as a wrapper: ranks collect garbage at different times, so some might already have dropped
it. Between hosts bytes go through our own Gloo group (comm/wire.py), which only moves them and never adds.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import hashlib
import json
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .._engine import HostComm, account_call, account_call_end, forked
from ..layout.memory import check_sendable
from ..layout.shard_mesh import Slicing
from ..torch_compat.internals import default_store, make_gloo
from ..torch_compat.interrupts import check_interrupt
from . import account, wire
from .attempt import attempt_store
from .board import place
from .failures import report_failures
from .launch import Launch, read_launch
from .rendezvous import SECRET_BYTES, Line, Meeting, Rendezvous, assembly_of, no_thread
from .waits import START_S, WARN_AFTER_S, Wait, log, seconds_of, start_s

_logger = logging.getLogger("shardwright")

#: threads that Gloo, a store and the engine start
_JOIN_THREADS = 6
#: pause between two attempts to reach the store
_CONNECT_S = 0.1
#: the longest attempt to connect: a host that drops packets answers none, and the kernel would try for two minutes
_ATTEMPT_S = 5.0
#: For tests: the host of each rank, used for every group instead of the detected one.
_forced_hosts: Sequence[int] | None = None
#: the longest wait for a rank of a group to come, once ranks go on in place; None: that of a start
_coming_s: float | None = None


class HostGroup:
    """The ranks of one process group, joined by shared memory inside each host and by a bridge across.

    `host_of` is each rank's host, numbered by its lowest rank; `hosts` their names, for messages.
    """

    def __init__(self, group: Any, name: str, timeout_s: float, warn_after_s: float | None = WARN_AFTER_S) -> None:
        self.name = name
        self._group = (lambda: None) if group is None else weakref.ref(group)  # the cache's key
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world_size = dist.get_world_size(group) if group is not None else 1
        #: DeviceLinks by GPU; they end before the host's communicator
        self.links: dict[Any, Any] = {}
        self._wire: wire.Wire | None = None  # the communicator's bridge; on carriers
        self._warn_start_s = start_s(warn_after_s)
        account.begin(*((dist.get_rank(), dist.get_world_size()) if group is not None else (0, 1)))
        self._join(group, timeout_s)
        self.warn_after(warn_after_s)
        if self.rank == self.host_of.index(self.host_of[self.rank]):  # the lowest rank of the host
            self._warn_of_threads()
        self._leave = weakref.finalize(self, _close_comms, self.comm, self.links, self._store_name, os.getpid())
        self._leave.atexit = False  # _close_all closes it

    @property
    def torch_group(self) -> Any:
        """Return torch's group; None without one."""
        return self._group()

    def is_of(self, torch_group: Any) -> bool:
        """Return True if torch's `group` has these ranks; None is the default group."""
        return (torch_group if torch_group is not None else dist.group.WORLD) is self.torch_group

    @property
    def is_usable(self) -> bool:
        """Return True if no communicator has failed; a GPU's failure may be news to the hosts'."""
        return self.comm.is_alive and not any(link.comm.has_failed for link in self.links.values())

    @property
    def host_count(self) -> int:
        """Return the number of hosts that the ranks run on."""
        return max(self.host_of) + 1

    @property
    def carriers(self) -> list[int]:
        """Return the lowest rank of each host."""
        return [self.host_of.index(host) for host in range(self.host_count)]

    def sharers(self, slicing: Slicing) -> list[int]:
        """Return the ranks that share the host's copy of the slices with this rank, itself included."""
        return [each for each in slicing.replica() if self.host_of[each] == self.host_of[self.rank]]

    def is_apart(self, slicing: Slicing) -> bool:
        """Return True if some replica's slices are updated on several hosts."""
        return self.host_count > 1 and (not slicing.is_replicated or slicing.crosses(self.host_of))

    def host_map(self) -> dict[str, str]:
        """Return each host's name and its ranks, the carrier first, for describe()."""
        found: dict[str, str] = {}
        for host, carrier in enumerate(self.carriers):
            ranks = [str(rank) for rank, each in enumerate(self.host_of) if each == host]
            found[f"host {host}"] = f"{self.hosts[carrier]}, ranks {', '.join(ranks)}"
        return found

    def _join(self, group: Any, timeout_s: float) -> None:
        host, failure = socket.gethostname(), ""
        try:
            self.comm = HostComm(
                *(self.rank, self.world_size),
                timeout_s=timeout_s,
                warn_after_s=self._warn_start_s,
                host=host,
                log=log,
                interrupted=check_interrupt,
            )
        except (MemoryError, OSError) as error:
            failure = str(error)
        cores = hex(sum(1 << core for core in os.sched_getaffinity(0)))
        address = "" if failure else self.comm.address
        line = Line(self.rank, address, host, place(), torch.get_num_threads(), cores, failure)
        try:
            if self.world_size == 1 and failure:
                raise MemoryError(f"rank 0 on host {host} cannot join: {failure}")
            met, meeting = self._meet(group, line, timeout_s)
            self.host_of, self._here = met.host_of, met.here
            self._store_name = f"shardwright/{hashlib.sha256(met.secret).hexdigest()}"
            number = account.met(self._store_name, group_ranks(group))
            try:
                hosts = [each.host for each in met.here]
                addresses, members = [each.address for each in met.here], [each.rank for each in met.here]
                self.comm.connect(addresses, met.secret, hosts, members=members)
                if meeting is not None and (self.host_count > 1 or _forced_hosts is not None):
                    self._join_hosts(met, meeting, host, timeout_s)
            except TimeoutError:
                raise
            except (RuntimeError, MemoryError, OSError) as error:
                raise (error if meeting is None else meeting.fail(error)) from error
            self.comm.account(number, len(met.here) > 1)
            self.hosts = self.comm.hosts
        except BaseException:
            if not failure:
                self.comm.close()
            raise

    def _meet(self, group: Any, line: Line, timeout_s: float) -> tuple[Meeting, Rendezvous | None]:
        if self.world_size == 1:
            return Meeting(secrets.token_bytes(SECRET_BYTES), [0], [line]), None
        meeting = Rendezvous(
            dist.PrefixStore(_next_meeting(self.name, group), default_store()),
            *(self.rank, self.world_size, line.host, timeout_s),
            assembly=assembly_of(group),
            warn_after_s=self._warn_start_s,
            coming_s=_coming_s,
        )
        return meeting.meet(line, _forced_hosts), meeting

    def _join_hosts(self, met: Meeting, meeting: Rendezvous, host: str, timeout_s: float) -> None:
        bridge = None
        carriers = self.carriers
        try:
            if self.host_count > 1 and self.rank in carriers:
                meeting.go(self.host_count)
                bridge = self._wire = self.make_wire("wire", met.secret, timeout_s)
        except (RuntimeError, MemoryError, OSError) as error:
            with contextlib.suppress(RuntimeError):  # the wire has ended already
                self.comm.abort(str(error))
            raise
        self.comm.extend(self.host_of, host, wire=bridge)

    def end_silence_after(self, silent_s: float | None) -> None:
        """End waits `silent_s` after a peer was stopped or another host acknowledges nothing; None: at the deadline."""
        if silent_s is not None or self.comm.silent_s:
            self.comm.silent_s = silent_s or 0.0
            if self._wire is not None:
                self._wire.end_silence_after(silent_s)

    def warn_after(self, warn_after_s: float | None) -> None:
        """Log a wait after `warn_after_s`, then whenever it has doubled; 0 or None: never."""
        self.comm.warn_after_s = seconds_of(warn_after_s)

    def _warn_of_threads(self) -> None:
        """Warn if this host's ranks compute on more threads than they have cores."""
        here, mask = self._here, 0
        for each in here:
            mask |= int(each.cores, 16)
        cores, threads = bin(mask).count("1"), sum(each.threads for each in here)
        if len(here) > 1 and threads > cores and max(each.threads for each in here) > 1:
            _logger.warning(
                "the %d ranks on host %s compute on %d threads, and have %d cores: threads of torch's that wait for one another spin, "
                "and steps take many times as long; set OMP_NUM_THREADS=%d (torchrun sets it to 1) or call torch.set_num_threads(%d)",
                *(len(here), self.hosts[self.rank], threads, cores),
                *[max(1, cores // len(here))] * 2,
            )

    def make_wire(self, name: str, secret: bytes, timeout_s: float) -> wire.Wire:
        """Return a wire between the carriers. Collective over them; the timeout bounds the rendezvous."""
        others, carriers = wire.sockets(), self.carriers
        store = dist.PrefixStore(f"{self._store_name}/{name}", default_store())
        most_s = 1e6 if _coming_s is None else _coming_s / 2  # a rank that waits here comes to the next attempt in time
        timeout, connects_late = timedelta(seconds=min(timeout_s, most_s)), self.host_count > wire.EAGER_HOSTS
        # torch's new_group() needs every rank
        gloo = make_gloo(store, carriers.index(self.rank), len(carriers), timeout, connects_late)
        return wire.Wire(gloo, carriers, secret, others, lambda: _exits)

    @property
    def simulated_host(self) -> int | None:
        """Return this rank's host number if a test has set it, since all such hosts are one machine; else None."""
        return None if _forced_hosts is None else self.host_of[self.rank]

    def close(self) -> None:
        """Leave the group; peers that wait for this rank get a CommError. No effect twice and in a forked child."""
        self._leave()

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int, label: str) -> None:
        """Broadcast the values of `root`, in any strides, to all ranks. Version counters do not change. Cost: the bytes, once."""
        if self.world_size == 1:
            check_sendable(tensors, label)
            return
        with row_major(tensors, label) as dense:
            if dense:
                self.comm.broadcast([(t.data_ptr(), t.nbytes) for t in dense], root, label)

    def highest_rank_where(self, condition: bool, label: str) -> int:
        """Return the highest rank on which `condition` holds, -1 if none. Collective."""
        verdicts = self.comm.all_gather_bytes(b"\1" if condition else b"\0", label)
        return max((rank for rank, verdict in enumerate(verdicts) if verdict == b"\1"), default=-1)


@contextlib.contextmanager
def row_major(tensors: Sequence[torch.Tensor], label: str) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors' memory, of copies where it is not row-major; on exit what these hold is written back."""
    check_sendable(tensors, label)
    plain = [tensor.data for tensor in tensors if tensor.numel()]
    dense = [each.resolve_conj().resolve_neg().contiguous() for each in plain]
    yield dense
    for tensor, copy in zip(plain, dense):
        if copy is not tensor:
            tensor.copy_(copy)


#: count of rendezvous by the name and the ranks of their group: equal on these ranks
_meetings: collections.Counter[tuple[str, tuple[int, ...]]] = collections.Counter()


def _next_meeting(name: str, group: Any) -> str:
    """Return the name of the next rendezvous of `group`, equal on all its ranks and used once in this job."""
    ranks = tuple(dist.get_process_group_ranks(group))
    _meetings[name, ranks] += 1
    digest = hashlib.sha256(json.dumps([name, ranks]).encode()).hexdigest()[:16]
    return f"shardwright/{digest}/{_meetings[name, ranks]}"


#: torch's group -> ours. A HostGroup does not hold torch's group, so an entry ends with its group.
_groups: weakref.WeakKeyDictionary[Any, HostGroup] = weakref.WeakKeyDictionary()
_single: dict[None, HostGroup] = {}


def live_groups() -> list[HostGroup]:
    """Return every communicator of this process that is in use."""
    return [group for group in (*_single.values(), *_groups.values()) if group._leave.alive]


def abort_all(reason: str) -> None:
    """Abort every communicator: peers that wait for this rank get a CommError."""
    for group in live_groups():
        with contextlib.suppress(RuntimeError):
            group.comm.abort(reason)


def begin_anew(coming_s: float | None = None) -> None:
    """Close every communicator, and count meetings from the first one: the next default group has a store of its own.

    `coming_s`: that wait in all groups from now on.
    """
    global _coming_s
    _coming_s = coming_s
    for group in live_groups():
        group.close()
    _groups.clear()
    _meetings.clear()


def resolve_group(process_group: Any, device_mesh: Any, *, trains: bool = False) -> Any:
    """Return torch's group for these options, or None. ValueError if this rank is not in it.

    With `trains` and without a launcher, make a default group of one rank, and log a line.
    """
    if device_mesh is not None:
        ranks = tuple(sorted(device_mesh.mesh.flatten().tolist()))
        if dist.get_rank() not in ranks:  # torch would only raise an IndexError
            raise ValueError(
                f"this rank, {dist.get_rank()}, is not part of the device_mesh given, which has ranks "
                f"{', '.join(map(str, ranks))}: wrap the module on those only"
            )
        process_group = device_mesh.get_group() if device_mesh.ndim == 1 else group_over(ranks)
    if process_group is not None:
        if process_group is not dist.GroupMember.NON_GROUP_MEMBER and not hasattr(process_group, "rank"):
            raise TypeError(f"process_group must be a torch.distributed.ProcessGroup or None, got {process_group!r}")
        if dist.get_rank(process_group) < 0:
            raise ValueError(
                "this rank is not part of the process group given; wrap the module on the group's ranks only"
            )
        return process_group
    if not dist.is_available():
        return None
    if not dist.is_initialized():
        launch = read_launch(os.environ)
        if launch is None and not trains:
            return None
        _join(launch)
    return dist.group.WORLD


#: the default group -> groups over all ranks of meshes, by these ranks
_mesh_groups: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()


def group_over(ranks: tuple[int, ...]) -> Any:
    """Return the group over ascending global ranks, this rank among them. Collective over them at first use."""
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    made = _mesh_groups.setdefault(dist.group.WORLD, {})
    if ranks not in made:
        made[ranks] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return made[ranks]


#: the default group -> meshes in rank order, by the rows, type and names of those that are not
_ordered_meshes: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def in_rank_order(mesh: Any) -> Any:
    """Return a mesh of the ranks of `mesh`, each row in ascending order. Collective over a column if order changes columns.

    torch's groups number their ranks in ascending order, and DTensors by the mesh: only in such a mesh do both agree.
    """
    from torch.distributed.device_mesh import DeviceMesh

    rows = mesh.mesh.tolist()
    ordered = sorted(rows) if mesh.ndim == 1 else [sorted(row) for row in rows]
    if ordered == rows or mesh.ndim > 2:
        return mesh
    made = _ordered_meshes.setdefault(dist.group.WORLD, {})
    key = repr((rows, mesh.device_type, mesh.mesh_dim_names))
    if key not in made:
        last: Any = mesh.get_group(mesh.ndim - 1)
        if mesh.ndim == 1:
            made[key] = DeviceMesh.from_group(last, mesh.device_type, mesh_dim_names=mesh.mesh_dim_names)
        else:
            own = next(row for row in ordered if dist.get_rank() in row).index(dist.get_rank())
            column = group_over(tuple(sorted(row[own] for row in ordered)))
            names = mesh.mesh_dim_names
            made[key] = DeviceMesh.from_group([column, last], mesh.device_type, mesh=ordered, mesh_dim_names=names)
    return made[key]


def mesh_rows(device_mesh: Any, group: Any) -> list[list[int]]:
    """Return the ranks of `group` in each row of a mesh of two dimensions."""
    return [[dist.get_group_rank(group, rank) for rank in row] for row in device_mesh.mesh.tolist()]


def group_ranks(group: Any) -> list[int]:
    """Return the global numbers of the ranks of torch's `group`; None: one rank."""
    return [0] if group is None else list(dist.get_process_group_ranks(group))


def init_process_group(backend: str = "gloo", *, timeout: timedelta | None = None, **options: Any) -> None:
    """Make torch's default process group from the launcher's variables, also after a restart by torchrun. Collective.

    Arguments are those of torch.distributed.init_process_group; rank, world size and store are the launcher's.

    Raises
    ------
    ValueError
        If a variable of the launcher is missing or contradicts another, or an option sets what the launcher decides.
    TimeoutError
        Some ranks did not come.

    Notes
    -----
    torchrun's agents keep the store of a job over restarts. torch's own function then waits for addresses of dead
    processes, unless torchrun ran with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and the c10d rendezvous.
    """
    for name in ("store", "rank", "world_size", "init_method"):
        if name in options:
            raise ValueError(
                f"init_process_group: {name} comes from the launcher; call torch.distributed's own function to set it"
            )
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"init_process_group: timeout must be a datetime.timedelta or None, got {timeout!r}")
    _join(read_launch(os.environ), backend, timeout, **options)


def _join(launch: Launch | None, backend: str = "gloo", timeout: timedelta | None = None, **options: Any) -> None:
    if launch is None:
        _logger.warning(
            "no launcher has started this process (RANK, OMPI_COMM_WORLD_RANK and SLURM_PROCID are not set): it trains as one rank; "
            "`torchrun --nproc-per-node N PROGRAM` starts N ranks"
        )
    account.begin(*((launch.rank, launch.world_size) if launch else (0, 1)))
    account_call("init_process_group()", False)
    if timeout is not None:
        options["timeout"] = timeout
    if launch is None or not launch.master_addr:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    else:
        options |= {"store": _store_of(launch, timeout), "rank": launch.rank, "world_size": launch.world_size}
    try:
        dist.init_process_group(backend, **options)
    except RuntimeError as error:
        if "Unable to find address for" not in str(error):
            raise
        named, known = os.environ.get("GLOO_SOCKET_IFNAME"), ", ".join(name for _, name in socket.if_nameindex())
        raise ValueError(
            f"GLOO_SOCKET_IFNAME must name a network interface of this host with an address ({known}), got {named!r}"
        ) from error
    account_call_end()


def _store_of(launch: Launch, timeout: timedelta | None) -> Any:
    """Return a store for this start of the ranks, once all have come: inside that of torchrun's agent, or rank 0's own."""
    timeout = timeout or dist.distributed_c10d.default_pg_timeout
    agents = launch.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = _connect(launch, launch.rank == 0 and not agents, timeout.total_seconds())
    store.set_timeout(timeout)
    return attempt_store(store, launch.rank, launch.world_size, timeout.total_seconds(), _try_threads())


def _try_threads() -> str:
    """Return why joining cannot start its threads, where torch would fail on this rank alone; "" if it can."""
    end, started = threading.Event(), []
    try:
        for _ in range(_JOIN_THREADS):
            started.append(threading.Thread(target=end.wait, name="sw-try", daemon=True))
            started[-1].start()
    except RuntimeError as error:
        started.pop()
        return no_thread(error)
    finally:
        end.set()
        for each in started:
            each.join()
    return ""


def _connect(launch: Launch, is_master: bool, timeout_s: float) -> Any:
    """Return torch's store at the launch's address. Its constructor would wait for a listener without a word."""
    host, port, wait = launch.master_addr.strip("[]"), launch.master_port, Wait(START_S)
    while not is_master:
        try:
            socket.create_connection((host, port), timeout=min(max(timeout_s - wait.waited_s, 0.1), _ATTEMPT_S)).close()
            break
        except OSError as error:
            why = f"rank 0, whose store at {launch.master_addr}:{port} does not answer: {error.strerror or error}"
        if wait.waited_s >= timeout_s:
            raise TimeoutError(f"joining: rank {launch.rank} of {launch.world_size} waited {timeout_s:g} s for {why}")
        wait.look(
            lambda s: (
                f"joining: rank {launch.rank} of {launch.world_size} has waited {s:.1f} s for {why}; "  # noqa: B023, called at once
                f"the deadline is {timeout_s:g} s"
            )
        )
        time.sleep(_CONNECT_S)
    return dist.TCPStore(
        *(host, port, launch.world_size, is_master),
        timeout=timedelta(seconds=max(timeout_s - wait.waited_s, 1.0)),
        wait_for_workers=False,
        multi_tenant=True,
        use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
    )


def is_default_group(group: Any) -> bool:
    """Return True if an unpickled copy would find `group` again."""
    return group is None or (dist.is_initialized() and group is dist.group.WORLD)


def host_group(group: Any, timeout_s: float, warn_after_s: float | None = -1.0) -> HostGroup:
    """Return the communicator of torch's `group`, made at first use, collectively; `warn_after_s` -1 leaves its own."""
    is_given = warn_after_s is None or warn_after_s >= 0
    table: Any = _single if group is None else _groups
    found = table.get(group)
    if found is not None and found.is_usable:
        found.comm.timeout_s = timeout_s
        if is_given:
            found.warn_after(warn_after_s)
        return found
    _register_ends()
    if found is not None:
        found.close()
    name = "single rank" if group is None else str(getattr(group, "group_name", "unnamed"))
    table[group] = made = HostGroup(group, name, timeout_s, warn_after_s if is_given else WARN_AFTER_S)
    return made


@functools.cache
def _register_ends() -> None:
    report_failures()
    atexit.register(_close_all)
    for end in (forked, wire.let_go):
        os.register_at_fork(after_in_child=end)


#: once the process is about to end
_exits = False


def _close_all() -> None:
    global _exits
    _exits = True
    account.note_error()  # before peers are told that this rank leaves
    for group in live_groups():
        group.close()


def _close_comms(comm: HostComm, links: dict[Any, Any], name: str, pid: int) -> None:
    if os.getpid() == pid:  # a forked child must not leave on behalf of its parent
        # A row's link first: it would take the end of the link of all ranks for a failure.
        ends = *reversed(links.values()), comm
        with contextlib.ExitStack() as closing:  # close all of them, even if an interrupt ends one call
            for each in reversed(ends):
                closing.callback(each.close)
        account.left(name)


def group_size(group: Any) -> int:
    """Return the number of ranks of torch's `group` (None: the default one); 1 if there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size(group)


def gather_in_rank_order(row: torch.Tensor, group: Any) -> tuple[torch.Tensor, ...]:
    """Return every rank's `row` over torch's `group`, by a sum with zeros, which every backend supports."""
    rows = row.new_zeros(dist.get_world_size(group), row.numel())
    rows[dist.get_rank(group)] = row
    dist.all_reduce(rows, group=group)
    return rows.unbind()


def describe_group() -> str:
    """Return one line for describe(): the state of torch.distributed in this process."""
    if not dist.is_available():
        return "torch.distributed is not in this build of torch"
    if not dist.is_initialized():
        return "no default process group"
    return f"rank {dist.get_rank()} of {dist.get_world_size()}, backend {dist.get_backend()}"
