"""Ranks for tests: warm processes, forked from one parent that has imported torch and every test module.

Words
    forge   a process forked from pytest when collection is over. It runs no tensor operation and has no
            thread, so that forking it is cheap and safe; it forks ranks and reaps them.
    team    W ranks with a gloo process group over loopback. The suite keeps one team a world size; a test that
            fails, or that says `spoils=True`, costs its team, and the next test gets a new one; so does one whose
            bodies have left many threads.
    body    what every rank runs: a module-level function `body(rank, world_size, **arguments)`.

A run has a deadline. After it, and 3 s after a rank failed while another still waits for it, the ranks write
their stacks, are killed (through pidfds, so never a stranger), and the test fails with all that is known.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import gc
import hashlib
import importlib
import inspect
import json
import logging
import multiprocessing.connection
import os
import pathlib
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import network
import torch
import torch.distributed as dist
from oracle.pickled import all_gather, dumps

#: a module-level function(rank, world_size, folder, **arguments) and its arguments
Join = tuple[Callable[..., None], dict[str, Any]]

LONG = os.environ.get("SW_TEST_LONG") == "1"
DEADLINE_S = 180.0 if LONG else 45.0
GRACE_S = 3.0
#: a killed process ends within it, unless the kernel keeps it
END_S = 45.0
#: of the tests' own exchanges: far beyond every deadline, which says more
GATHER_LIMIT_S = 600.0
#: for the generators of a rank before each body
SEED = 20240607
#: a team is replaced beyond: bodies leave process groups behind, and each of gloo's threads wakes 100 times a second
WORN_THREADS = 24
#: objects that live and no collection has seen before the next one: ten times Python's own
YOUNG_OBJECTS = 7000
#: of garbage, after a body: a hundred thousand objects
SLOW_COLLECTION_S = 0.01
#: what a rank would import at its first wrap, forward or compilation: seconds, and objects for every later collection of garbage
IMPORTED_LATE = (
    "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.checkpoint", "torch.distributed.pipelining",
    "shardwright.wrapping", "shardwright.checkpoint", "shardwright.optim.diloco",
)  # fmt: skip
#: the interface that gloo uses; a machine's host name may resolve to nothing that can be reached
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def in_turn(values: Sequence[Any], at: int, of: int = 2) -> list[Any]:
    """Return all of them in the long form; else every `of`-th, beginning with the one whose turn it is in case `at` of a law."""
    found = list(values) if LONG else list(values)[at % of :: of]
    assert found, f"no value has a turn: {len(values)} values, of={of}, at={at}"
    return found


def world_sizes() -> list[int]:
    text = os.environ.get("SW_TEST_WORLDS") or ("1,2,3,5" if LONG else "1,3")
    return [int(word) for word in text.split(",")]


@dataclasses.dataclass
class Outcome:
    """How one rank's run ended: with a value, with an error, with its process, or not at all."""

    rank: int
    value: Any = None
    error: str | None = None
    """type: message"""
    trace: str = ""
    ended: str | None = None
    """how the process ended, if it did: "exit 3", "signal SIGKILL" """
    seconds: float = 0.0
    threads: int = 0
    """those the process has after it"""
    finished: bool = False

    @property
    def ok(self) -> bool:
        return self.finished and self.error is None and self.ended is None


class RanksFailed(AssertionError):
    """At least one rank did not do what it was asked; the message holds every rank's account."""

    def __init__(self, outcomes: Sequence[Outcome], why: str = "") -> None:
        accounts: dict[str, list[int]] = {}
        for outcome in outcomes:
            if outcome.error:
                text = outcome.trace.rstrip()
            elif outcome.ended:
                text = f"its process ended: {outcome.ended}\n{outcome.trace}".rstrip()
            elif not outcome.finished:
                text = f"had not finished; its stack:\n{outcome.trace}".rstrip()
            else:
                text = "finished"
            accounts.setdefault(text, []).append(outcome.rank)
        ordered = sorted(accounts.items(), key=lambda item: item[0].startswith(("finished", "had not")))
        lines = [why] if why else []
        for text, ranks in ordered:
            names = ", ".join(map(str, ranks))
            lines.append(f"--- rank {names} of {len(outcomes)}: {text}")
        super().__init__("\n".join(lines))
        self.outcomes = list(outcomes)


# ---------------------------------------------------------------- in a rank


#: a rank's connections to rank 0, or rank 0's to all others: pipes beside gloo, whose collectives cost a hundred times as much
_star: list[multiprocessing.connection.Connection] = []
#: called before a rank waits for others: simulated GPUs move only when they are asked to
before_waiting: list[Callable[[], None]] = []


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's `value`, in rank order: the tests' own way, independent of what is tested."""
    for call in before_waiting:
        call()
    if _star and group is None:
        return _gather_over_star(value)
    return all_gather(value, group)


def _gather_over_star(value: Any) -> list[Any]:
    own = dumps(value)
    if dist.get_rank() != 0:
        _star[0].send_bytes(own)
        pickled = pickle.loads(_receive(_star[0]))
    else:
        pickled = [own, *(_receive(connection) for connection in _star)]
        for connection in _star:
            connection.send_bytes(pickle.dumps(pickled))
    return [pickle.loads(item) for item in pickled]


def _receive(connection: multiprocessing.connection.Connection) -> bytes:
    if not connection.poll(GATHER_LIMIT_S):
        raise TimeoutError(f"a rank has not come to this gather within {GATHER_LIMIT_S:g} s")
    return connection.recv_bytes()


class Stopwatch:
    """Time as on a machine that does nothing else: the time that ranks stood ready, and did not run, is not counted.

    A bound then holds on a busy machine, and is as sharp as before on a quiet one.
    """

    def __init__(self) -> None:
        self._start, self._held_up = time.monotonic(), _held_up(_siblings())

    def elapsed(self) -> float:
        """Return the seconds of a clock."""
        return time.monotonic() - self._start

    def seconds(self) -> float:
        return self.elapsed() - _longest(self._held_up, _held_up(_siblings()))


def _siblings() -> set[int]:
    """Return this process and, in a rank, the other ranks."""
    parent, found = os.getppid(), {os.getpid()}
    with contextlib.suppress(OSError):  # of another namespace, or the kernel does not say
        found |= set(map(int, pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text().split()))
    return found


def _held_up(pids: Iterable[int]) -> dict[str, int]:
    """Return for how many nanoseconds each thread of processes has stood ready. One that has ended counts no more."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                    found[thread] = int(file.read().split()[1])
    return found


def _longest(before: Mapping[str, int], now: Mapping[str, int]) -> float:
    """Return for how many seconds the thread that stood ready longest did so meanwhile: others wait at the same time."""
    return max([now[thread] - before.get(thread, 0) for thread in now], default=0) * 1e-9


def same_everywhere(value: Any) -> bool:
    """Tensors inside of lists are compared by their bits."""
    values = gather(_in_short(value))
    return all(other == values[0] for other in values)


def _in_short(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_in_short(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    plain = value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    held = ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b""
    return str(value.dtype), tuple(value.shape), hashlib.sha256(held).digest()


def _join_group(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["SW_TEST_FOLDER"] = folder  # removed with the team
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=GATHER_LIMIT_S)
    )


def join_from_own_namespaces(rank: int, world_size: int, folder: str, pids: bool = False) -> None:
    """Join the group from namespaces of the rank's own; `joins` of a team."""
    network.leave_for_own(pids=pids)
    _join_group(rank, world_size, folder)


def _seed() -> None:
    random.seed(SEED)
    torch.default_generator.manual_seed(SEED)  # torch.manual_seed() also formats a stack for each kind of GPU
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(SEED)


_changed: list[tuple[Any, str, Any]] = []


def change(where: Any, **values: Any) -> None:
    """Set attributes of a module until the end of this body: the next one runs in the same processes."""
    for name, value in values.items():
        _changed.append((where, name, getattr(where, name)))
        setattr(where, name, value)


def _answer(connection: multiprocessing.connection.Connection, rank: int, world_size: int) -> bool:
    """Runs one body and sends its outcome. False when the parent is gone."""
    try:
        module, name, arguments = connection.recv()
    except (EOFError, OSError):
        return False
    outcome = Outcome(rank)
    start = time.monotonic()
    try:
        __import__(module)
        body = getattr(sys.modules[module], name)
        body = getattr(body, "body", body)
        if dist.is_initialized():  # a rank on a host of its own may do it in its body
            assert dist.get_world_size() == world_size and dist.get_rank() == rank
        _seed()  # ranks that ran other bodies before begin alike
        outcome.value = body(rank, world_size, **arguments)
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        outcome.error = f"{type(error).__name__}: {error}"
        outcome.trace = "".join(traceback.format_exception(error))
    finally:
        while _changed:
            where, name, value = _changed.pop()
            setattr(where, name, value)
    outcome.finished = True
    outcome.seconds = time.monotonic() - start
    outcome.threads = len(os.listdir("/proc/self/task"))
    try:
        message = dumps(outcome)
    except Exception as error:
        outcome.value, outcome.error = None, f"the value cannot be sent: {error}"
        message = pickle.dumps(outcome)
    connection.send_bytes(message)
    return True


def _collect() -> None:
    """What a body has dropped ends. What stays, where that is much (compiled modules, late imports), is not looked at again."""
    start_s = time.thread_time()
    gc.collect()
    if time.thread_time() - start_s > SLOW_COLLECTION_S:
        gc.freeze()


def _rank_main(
    fd: int, star: Sequence[socket.socket], rank: int, world_size: int, folder: str, join: Join | None
) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphan when the forge dies
    stacks = open(os.path.join(folder, f"stacks-{rank}"), "w")  # noqa: SIM115, lives as long as the process
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    # a rank's steps belong to many bodies: what the watcher says of them is noise to laws that count lines
    logging.getLogger("shardwright.watch").setLevel(logging.CRITICAL)
    connection = multiprocessing.connection.Connection(fd)
    _star[:] = [multiprocessing.connection.Connection(end.detach()) for end in star]
    code = 1
    try:
        if join is None:
            _join_group(rank, world_size, folder)
        else:
            function, arguments = join
            function(rank, world_size, folder, **arguments)
        while _answer(connection, rank, world_size):
            _collect()
        code = 0
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else 1
        gc.collect()
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc(file=stacks)
    finally:
        stacks.flush()
        os._exit(code)


# ---------------------------------------------------------------- the forge


def _isolate_shared_memory() -> bool:
    """A /dev/shm that no other program uses, for this process and its children; False where that is not permitted."""
    new_namespace, recursive_private = 0x20000, 0x4000 | 0x40000
    libc = ctypes.CDLL(None)
    return (
        libc.unshare(new_namespace) == 0
        and libc.mount(b"none", b"/", None, recursive_private, None) == 0
        and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None) == 0
    )


#: where this process sees the ranks' /dev/shm
shared_memory_folder = "/dev/shm"


class Forge:
    """Forks ranks from a warm process image. Lives in pytest's process; its other half is the forked child."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            try:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                theirs.sendall(b"1" if _isolate_shared_memory() else b"0")
                self._serve(theirs)
            finally:
                os._exit(0)
        theirs.close()
        self._socket = ours
        if ours.recv(1) == b"1":
            global shared_memory_folder
            shared_memory_folder = f"/proc/{self.pid}/root/dev/shm"

    @staticmethod
    def _serve(control: socket.socket) -> None:
        is_warm = False
        while True:
            message, fds, _, _ = socket.recv_fds(control, 1 << 16, 64)
            if not message:
                return
            request = pickle.loads(message)
            if request[0] == "fork":
                _, folder, niceness, joins = request
                if not is_warm:  # the first: not every test process comes here
                    for name in IMPORTED_LATE:
                        importlib.import_module(name)
                    gc.collect()
                    gc.freeze()
                    gc.set_threshold(YOUNG_OBJECTS)
                    is_warm = True
                pids = []
                star = [socket.socketpair() for _ in fds[1:]]  # (rank 0's end, the other's)
                for rank, fd in enumerate(fds):
                    pid = os.fork()
                    if pid == 0:
                        control.close()
                        os.setpriority(os.PRIO_PROCESS, 0, niceness)
                        for other in fds:
                            if other != fd:
                                os.close(other)
                        own = [ends[0] for ends in star] if rank == 0 else [star[rank - 1][1]]
                        for end in {end for ends in star for end in ends} - set(own):
                            end.close()
                        _rank_main(fd, own, rank, len(fds), folder, joins[rank] if joins else None)
                    pids.append(pid)
                for fd in fds:
                    os.close(fd)
                for ends in star:
                    for end in ends:
                        end.close()
                answer: Any = pids
            else:
                answer = [os.waitpid(pid, 0)[1] for pid in request[1]]
            control.sendall(pickle.dumps(answer))

    def fork(
        self, world_size: int, folder: str, joins: Sequence[Join] | None = None
    ) -> tuple[list[int], list[socket.socket]]:
        pairs = [socket.socketpair() for _ in range(world_size)]
        niceness = os.getpriority(os.PRIO_PROCESS, 0)  # of the test, which the forge does not know
        request = pickle.dumps(("fork", folder, niceness, joins))
        socket.send_fds(self._socket, [request], [theirs.fileno() for _, theirs in pairs])
        for _, theirs in pairs:
            theirs.close()
        pids = pickle.loads(self._socket.recv(1 << 16))
        return pids, [ours for ours, _ in pairs]

    def reap(self, pids: Sequence[int]) -> list[int]:
        """Wait statuses of processes that have ended."""
        self._socket.sendall(pickle.dumps(("reap", list(pids))))
        return pickle.loads(self._socket.recv(1 << 16))

    def close(self) -> None:
        self._socket.close()
        os.waitpid(self.pid, 0)


def _what_keeps(pid: int) -> str:
    """A process's number, state, and where the kernel has it."""
    found = []
    for name in ("status", "wchan", "stack"):
        try:
            found.append(pathlib.Path(f"/proc/{pid}/{name}").read_text()[:600])
        except OSError as error:
            found.append(str(error))
    return f"{pid}: {' | '.join(found)}"


def _status_text(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit {os.WEXITSTATUS(status)}"


# ---------------------------------------------------------------- teams


class Team:
    """W ranks that wait for bodies to run. A context manager: leaving it kills and reaps them.

    `joins`: what each rank does in place of joining a group through a file in the team's folder.
    """

    def __init__(self, forge: Forge, world_size: int, joins: Sequence[Join] | None = None) -> None:
        self.world_size = world_size
        self._forge = forge
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.pids, sockets = forge.fork(world_size, self._folder.name, joins)
        self._pidfds = [os.pidfd_open(pid) for pid in self.pids]
        self._connections = [multiprocessing.connection.Connection(s.detach()) for s in sockets]
        self._closed = False
        self.worn = False

    def ended(self) -> list[int]:
        """Return the exit code of each rank, as subprocess gives it; none while a rank runs."""
        if len(multiprocessing.connection.wait(self._pidfds, 0)) < self.world_size:
            return []
        return [os.waitstatus_to_exitcode(status) for status in self._reap_once(range(self.world_size))]

    def start(self, body: Callable[..., Any], **arguments: Any) -> None:
        for connection in self._connections:
            connection.send((body.__module__, body.__name__, arguments))

    def signal(self, rank: int, number: int) -> None:
        signal.pidfd_send_signal(self._pidfds[rank], number)

    def wait(
        self, deadline_s: float = DEADLINE_S, *, ignore: Sequence[int] = (), patient: bool = False
    ) -> list[Outcome]:
        """Outcomes in rank order, once all have one, or at the deadline, in seconds of a machine that does nothing else.

        `ignore`: ranks that are expected never to answer (stopped ones); nobody waits for them.
        `patient`: a rank's failure or end is part of the test and does not shorten the deadline.
        """
        outcomes = [Outcome(rank) for rank in range(self.world_size)]
        waiting = {rank for rank in range(self.world_size) if rank not in ignore}
        deadline, held_up = time.monotonic() + deadline_s, _held_up(self.pids)
        while waiting:
            left = deadline - time.monotonic()
            if left <= 0:  # a busy machine owes them the time for which they stood ready
                before, held_up = held_up, _held_up(self.pids)
                deadline += _longest(before, held_up)
                if (left := deadline - time.monotonic()) <= 0:
                    break
            sources = {self._connections[rank].fileno(): rank for rank in waiting}
            sources |= {self._pidfds[rank]: rank for rank in waiting}
            for ready in multiprocessing.connection.wait(list(sources), left):
                rank = sources[ready]
                if rank not in waiting:
                    continue
                waiting.discard(rank)
                try:
                    if not self._connections[rank].poll(0):  # dead, while a child of its own holds the socket
                        raise EOFError
                    outcomes[rank] = pickle.loads(self._connections[rank].recv_bytes())
                    failed = not outcomes[rank].ok
                except (EOFError, OSError):
                    outcomes[rank].ended, outcomes[rank].trace = "?", self._stack(rank)
                    failed = True
                if failed and not patient:
                    deadline, held_up = min(deadline, time.monotonic() + GRACE_S), _held_up(self.pids)
        for rank in waiting:
            self.signal(rank, signal.SIGUSR1)
        if waiting:
            time.sleep(0.3)
        for rank in waiting:
            outcomes[rank].trace = self._stack(rank)
        for rank in range(self.world_size):
            if outcomes[rank].ended:
                multiprocessing.connection.wait([self._pidfds[rank]], 10)
                (status,) = self._reap_once([rank])
                outcomes[rank].ended = _status_text(status)
        return outcomes

    def run(self, body: Callable[..., Any], deadline_s: float = DEADLINE_S, **arguments: Any) -> list[Any]:
        """The body's values in rank order; RanksFailed when a rank raised, ended or did not finish."""
        __tracebackhide__ = True
        self.start(body, **arguments)
        outcomes = self.wait(deadline_s)
        self.worn = any(outcome.threads > WORN_THREADS for outcome in outcomes)
        if all(outcome.ok for outcome in outcomes):
            return [outcome.value for outcome in outcomes]
        late = [str(o.rank) for o in outcomes if not o.finished and not o.ended]
        raise RanksFailed(outcomes, f"rank {', '.join(late)} did not finish in time" if late else "")

    def _stack(self, rank: int) -> str:
        lines = pathlib.Path(self._folder.name, f"stacks-{rank}").read_text().splitlines(keepends=True)
        below = next((n for n, line in enumerate(lines) if "in _rank_main" in line), len(lines))  # pytest's own
        return "".join(lines[:below])

    def _reap_once(self, ranks: Sequence[int]) -> list[int]:
        if not hasattr(self, "_statuses"):
            self._statuses: dict[int, int] = {}
        missing = [rank for rank in ranks if rank not in self._statuses]
        self._await_ends(missing)
        for rank, status in zip(missing, self._forge.reap([self.pids[r] for r in missing]) if missing else []):
            self._statuses[rank] = status
        return [self._statuses[rank] for rank in ranks]

    def _await_ends(self, ranks: Sequence[int]) -> None:
        """The forge, which serves all teams, is not to wait for a process that does not end."""
        alive, deadline = {self._pidfds[rank]: self.pids[rank] for rank in ranks}, time.monotonic() + END_S
        while alive and (left := deadline - time.monotonic()) > 0:
            for ended in multiprocessing.connection.wait(list(alive), left):
                del alive[ended]
        if alive:
            raise RuntimeError(f"processes that do not end: {[_what_keeps(pid) for pid in alive.values()]}")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for rank in range(self.world_size):
            try:
                self.signal(rank, signal.SIGKILL)
            except ProcessLookupError:
                pass  # reaped before
        self._reap_once(range(self.world_size))
        for connection in self._connections:
            connection.close()
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._folder.cleanup()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Teams:
    """One team a world size, for the whole suite."""

    def __init__(self, forge: Forge) -> None:
        self._forge = forge
        self._teams: dict[int, Team] = {}

    def run(
        self, world_size: int, body: Callable[..., Any], *, spoils: bool, deadline_s: float, arguments: dict[str, Any]
    ) -> list[Any]:
        __tracebackhide__ = True
        if world_size not in self._teams:
            self._teams[world_size] = Team(self._forge, world_size)
        keep = False
        try:
            values = self._teams[world_size].run(body, deadline_s, **arguments)
            keep = not spoils and not self._teams[world_size].worn
            return values
        finally:
            if not keep:
                self._teams.pop(world_size).close()

    def fresh(self, world_size: int, joins: Sequence[Join] | None = None) -> Team:
        """New ranks for a test that kills, stops or exits some: `with fresh_ranks(3) as team:`."""
        return Team(self._forge, world_size, joins)

    def close(self) -> None:
        for team in self._teams.values():
            team.close()
        self._teams.clear()


# ---------------------------------------------------------------- how a test says it


def on_every_rank(
    *, at_least: int = 1, exactly: int | None = None, spoils: bool = False, deadline_s: float = DEADLINE_S
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The test's function is a body: it runs on every rank of every world size in SW_TEST_WORLDS.

    Its parameters after `rank, world_size` are pytest's (parametrize only: they are pickled).

    Parameters
    ----------
    at_least : the smallest world size at which the law says anything.
    exactly : the only one, whatever the environment says.
    spoils : the test leaves ranks that no other test should use (an ended communicator, a changed limit).
    deadline_s : for one run on one world size.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(body)
        def test(world_size: int, teams: Teams, **arguments: Any) -> None:
            __tracebackhide__ = True
            teams.run(world_size, body, spoils=spoils, deadline_s=deadline_s, arguments=arguments)

        names = [name for name in inspect.signature(body).parameters if name not in ("rank", "world_size")]
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter(name, keyword) for name in ("world_size", "teams", *names)]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        test.body = body  # type: ignore[attr-defined]
        test.at_least = at_least  # type: ignore[attr-defined]
        test.exactly = exactly  # type: ignore[attr-defined]
        return test

    return decorate


# ---------------------------------------------------------------- ranks that are programs of their own


def at_least_two(test: Callable[..., Any]) -> Callable[..., Any]:
    """For a test whose law says nothing in a world of one."""
    test.at_least = 2  # type: ignore[attr-defined]
    return test


def run_programs(
    world_size: int,
    body: Callable[..., Any],
    folder: str,
    *,
    prefix: Sequence[str] = (),
    imported: Sequence[str] = (),
    limit_s: float = 50,
    **arguments: Any,
) -> tuple[list[str], list[int]]:
    """Run a body in W programs, forked from one that has imported its module, which end as any Python program does.

    Returns what each printed, and its exit status. `prefix`: a command that runs the one; `imported`: more modules that it
    imports; `limit_s`: how long they may take.
    """
    request = pickle.dumps(([*imported, body.__module__], body.__name__, arguments)).hex()
    command = [*prefix, sys.executable, str(pathlib.Path(__file__).resolve()), str(world_size), folder, request]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    program = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, start_new_session=True)
    try:
        statuses = json.loads(program.communicate(timeout=limit_s)[0])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
    return [pathlib.Path(folder, f"printed-{rank}").read_text() for rank in range(world_size)], statuses


def _fork_programs(world_size: int, folder: str) -> int | None:
    """Return the rank in each of W children; in their parent print their exit statuses and return None."""
    pids = []
    gc.collect()
    gc.freeze()  # collections in the children then neither look at what is imported nor copy its pages
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            printed = os.open(os.path.join(folder, f"printed-{rank}"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(printed, 1), os.dup2(printed, 2)
            return rank
        pids.append(pid)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))
    return None


if __name__ == "__main__":
    _world_size, _folder = int(sys.argv[1]), sys.argv[2]
    _modules, _name, _arguments = pickle.loads(bytes.fromhex(sys.argv[3]))
    for _module in _modules:
        __import__(_module)
    _rank = _fork_programs(_world_size, _folder)
    if _rank is not None:
        _join_group(_rank, _world_size, _folder)
        _body = getattr(sys.modules[_modules[-1]], _name)
        _body(_rank, _world_size, **_arguments)
