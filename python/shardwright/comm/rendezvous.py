"""The rendezvous of a group's ranks before they share memory: through torch's store, as a tree (docs/design/hosts.md).

Rank r writes its own line and the lines of its subtree (FAN_OUT children a rank) under one key, which its parent reads.
Rank 0 thus gets all lines, finds which ranks share a host, and writes one key a host and one with the map.

A rank that cannot go on writes its reason under a separate key; all ranks raise the first one. If torch's group has
Gloo, ranks first meet in a Gloo collective: a dead process ends it, and a rank that cannot reach the store (a FileStore
opens a file at each call) reports it there.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._engine import CommError, CommTimeoutError
from ..layout.memory import bytes_of
from ..torch_compat.internals import cpu_backend
from .waits import START_S, Wait, log

#: children of a rank in the tree
FAN_OUT = 64
SECRET_BYTES = 16
#: a rank's shortest deadline for late peers: torch's default
_COMING_S = 1800.0
#: pause between two reads of the store: the first and the longest
_LOOK_S = (0.001, 0.5)
#: pause between two polls of torch's barrier, which does not load the store
_BARRIER_LOOK_S = 0.02
#: seconds by which other ranks wait longer for rank 0 than it waits for them, so that it can name the absent rank
_LATER_S = 2.0
#: bytes of the message of a rank that cannot reach the store, and characters of its error in it
_WORDS_BYTES, _WORDS_TEXT = 4096, 256
#: seconds for which a rank that learned of a failure waits for the failed rank's reason
_REASONS_S = 0.5
#: ranks that a message names
_NAMED = 16


class Line(NamedTuple):
    """A rank's line. `place`: equal on one host; `cores`: a mask in hexadecimal; `failure`: why it cannot join."""

    rank: int
    address: str
    host: str
    place: str
    threads: int
    cores: str
    failure: str


class Meeting(NamedTuple):
    """The result: the secret of this group, the host of each rank, and the lines of this host's ranks."""

    secret: bytes
    host_of: list[int]
    here: list[Line]


class Rendezvous:
    """One rendezvous of a group's ranks, through a store for it alone; in `assembly` all meet first, and a dead one ends it.

    `timeout_s` bounds each wait once all ranks have come; until then `coming_s`, else torch's default, if that is later.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        host: str,
        timeout_s: float,
        assembly: Assembly | None = None,
        warn_after_s: float | None = START_S,
        log: Callable[[str], None] = log,
        coming_s: float | None = None,
    ) -> None:
        self._coming_s = max(timeout_s, _COMING_S) if coming_s is None else coming_s
        self._store = _Caller(store, rank, timeout_s)
        self._rank, self._world_size, self._host = rank, world_size, host
        self._timeout_s, self._has_met = timeout_s, False
        self._assembly = assembly
        self._warn_after_s, self._log = warn_after_s, log

    def meet(self, line: Line, forced_hosts: Sequence[int] | None = None) -> Meeting:
        """Exchange the lines; `forced_hosts` are tests'. MemoryError: one cannot join. CommError, CommTimeoutError: one is lost."""
        line = line._replace(failure=line.failure or self._store.failure)
        try:
            return self._exchange(line, forced_hosts)
        except CommTimeoutError as error:
            raise self.fail(error) from None

    def _exchange(self, line: Line, forced_hosts: Sequence[int] | None) -> Meeting:
        lines = [line]
        below = children(self._rank, self._world_size)
        trouble: CommError | None = None
        try:
            if below or self._rank == 0:
                self._reason()  # raises if the store cannot be reached
            else:
                self._tell(lines)
        except CommError as error:
            trouble = error
        try:
            if self._assembly is not None:
                self._assemble(trouble)
            if trouble is not None:
                raise trouble
        finally:
            trouble = None  # its traceback holds this frame
        for child in below:
            lines += [Line(*each) for each in json.loads(self._await(f"lines/{child}", f"rank {child}"))]
            with contextlib.suppress(RuntimeError):  # the store does not support deletion
                self._store.call("delete_key", f"lines/{child}")
        if self._rank == 0:
            self._answer(sorted(lines, key=lambda each: each.rank), forced_hosts)
        elif below:
            self._tell(lines)
        answer = json.loads(zlib.decompress(self._await("map", "rank 0", _LATER_S)))
        self._has_met = True
        if answer["failure"]:
            raise MemoryError(answer["failure"])
        host_of = [host for host, length in answer["runs"] for _ in range(length)]
        here = json.loads(self._await(f"host/{host_of[self._rank]}", "rank 0"))
        return Meeting(bytes.fromhex(here["secret"]), host_of, [Line(*each) for each in here["lines"]])

    def go(self, host_count: int) -> None:
        """Return once the lowest rank of each host has called this, so that all ranks of all hosts have joined."""
        if self._store.call("add", "joined", 1) == host_count:
            self._store.call("set", "go", "1")
        self._await("go", "the other hosts")

    def fail(self, error: Exception) -> Exception:
        """Return the error that all ranks raise: the first reason, which a rank writes before peers report it."""
        heard = isinstance(error, CommError) and getattr(error, "rank", self._rank) != self._rank
        mine = self._words_of(error)
        deadline_s = time.monotonic() + (_REASONS_S if heard else 0.0)
        try:
            while (reason := self._reason()) is None and time.monotonic() < deadline_s:
                time.sleep(0.02)
            if reason is None:
                reason = json.loads(self._store.call("compare_set", "why", "", json.dumps(mine)))
        except (RuntimeError, ValueError):  # the store is gone
            return error
        return _error_of(reason)

    def _words_of(self, error: Exception) -> dict[str, Any]:
        return {
            **{"rank": self._rank, "host": self._host, "text": str(error), "at": getattr(error, "rank", self._rank)},
            "is_timeout": isinstance(error, TimeoutError),
        }

    def _answer(self, lines: Sequence[Line], forced_hosts: Sequence[int] | None) -> None:
        failing = next((each for each in lines if each.failure), None)
        failure, runs = "", []
        if failing is not None:
            failure = f"rank {failing.rank} on host {failing.host} cannot join its peers: {failing.failure}"
        else:
            host_of = list(forced_hosts) if forced_hosts is not None else find_hosts(lines)
            secret = secrets.token_hex(SECRET_BYTES)
            here: list[list[Any]] = [[] for _ in range(max(host_of) + 1)]
            for each in lines:
                here[host_of[each.rank]].append(each)
            for host, rows in enumerate(here):
                self._store.call("set", f"host/{host}", json.dumps({"secret": secret, "lines": rows}))
            runs = [(host, len(list(run))) for host, run in groupby(host_of)]
        self._store.call("set", "map", zlib.compress(json.dumps({"failure": failure, "runs": runs}).encode()))

    def _tell(self, lines: Sequence[Line]) -> None:
        self._store.call("set", f"lines/{self._rank}", json.dumps(lines))

    def _assemble(self, trouble: CommError | None) -> None:
        """Wait for all ranks. Raise on all of them the `trouble` of the highest rank that has one."""
        assembly = self._assembly
        assert assembly is not None
        try:
            assembly.begin(-1 if trouble is None else self._rank)
            later_s = _LATER_S if self._rank else 0.0  # rank 0 publishes which ranks are absent
            self._until(assembly.is_done, self._absent, _BARRIER_LOOK_S, later_s, asks=trouble is None)
            self._has_met = True
            speaker = assembly.result()
            if speaker >= 0:
                mine = self._words_of(trouble) if trouble is not None else {"text": ""}
                mine["text"] = mine["text"][:_WORDS_TEXT]
                raise _error_of(json.loads(assembly.hear(speaker, json.dumps(mine))))
        except CommError:
            raise
        except RuntimeError as error:
            said = str(error).partition(". This is typically")[0]  # Gloo's advice
            gone = "; a rank ended before it joined: its own log says why" if "closed by peer" in said else ""
            raise self.fail(comm_error(f"joining: torch's own group failed: {said}{gone}")) from error

    def _await(self, key: str, awaited: str, later_s: float = 0.0) -> bytes:
        """Return the value of `key` once `awaited` has written it; wait `later_s` longer than that rank."""
        self._until(lambda: self._store.call("check", [key]), awaited, later_s=later_s)
        return bytes(self._store.call("get", key))

    def _until(
        self,
        is_done: Callable[[], bool],
        awaited: str | Callable[[], str],
        most_s: float = _LOOK_S[1],
        later_s: float = 0.0,
        *,
        asks: bool = True,
    ) -> None:
        """Return once `is_done`, polled ever less often; with `asks`, raise the store's reason of a failed rank."""
        wait = Wait(self._warn_after_s, self._log)
        pause_s, look_s = _LOOK_S

        def sentence(waited_s: float) -> str:
            absent = awaited if isinstance(awaited, str) else awaited()
            return f"joining: rank {self._rank} of {self._world_size} on host {self._host} has waited {waited_s:.1f} s for {absent}"

        while not is_done():
            waited_s = wait.waited_s
            if waited_s > look_s:
                look_s = waited_s + _LOOK_S[1]
                if asks and (reason := self._reason()) is not None:
                    raise _error_of(reason)
            deadline_s = self._timeout_s if self._has_met else self._coming_s
            if waited_s > deadline_s + later_s:
                text = f"{sentence(waited_s)}; the deadline was {deadline_s:g} s"
                raise comm_error(text, self._rank, self._host, CommTimeoutError)
            wait.look(lambda waited_s: f"{sentence(waited_s)}; the deadline is {deadline_s:g} s")  # noqa: B023, called at once
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, most_s)

    def _absent(self) -> str:
        """Return which ranks have not come. Rank 0 asks and publishes: every rank's own look would make W * W calls."""
        all_ranks = "all ranks of the group"
        try:
            if self._rank == 0:
                leaves = (rank for rank in range(1, self._world_size) if not children(rank, self._world_size))
                # ranks without children write their lines when they come
                absent = [rank for rank in leaves if not self._store.call("check", [f"lines/{rank}"])]
                self._store.call("set", "absent", not_come(absent) if absent else all_ranks)
            elif not self._store.call("check", ["absent"]):
                return "rank 0 or ranks that it waits for"
            return str(self._store.call("get", "absent").decode())
        except CommError:
            return all_ranks

    def _reason(self) -> dict[str, Any] | None:
        return json.loads(self._store.call("get", "why")) if self._store.call("check", ["why"]) else None


class _Caller:
    """A store whose calls, made by a thread, have a deadline; torch's own wait for ever if the link is cut."""

    def __init__(self, store: Any, rank: int, timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_stuck = False
        self._close = weakref.finalize(self, self._asked.put, None)
        self._store: Any = None
        #: the reason why this rank cannot join, for its line
        self.failure = ""
        arguments = (store, self._asked, self._answers)
        try:
            threading.Thread(target=_answer_calls, args=arguments, name="sw-join", daemon=True).start()
        except RuntimeError as error:  # it can still tell its peers
            self._store, self.failure = store, no_thread(error)

    def call(self, name: str, *arguments: Any) -> Any:
        """Return `store.name(*arguments)`. CommError if the store fails, CommTimeoutError if it does not answer."""
        failed = f"joining: the store of torch.distributed failed on rank {self._rank}"
        if self._is_stuck:
            raise comm_error(f"{failed}: it did not answer")
        try:
            if self._store is not None:
                answer, error = _answer(self._store, name, arguments)
            else:
                self._asked.put((name, arguments))
                self._is_stuck = True  # even if a signal ends the wait
                answer, error = self._answers.get(timeout=min(self._timeout_s, 1e6))
                self._is_stuck = False
        except queue.Empty:
            text = f"{failed}: it did not answer {name}() within {self._timeout_s:g} s"
            raise comm_error(text, kind=CommTimeoutError) from None
        if error is not None:
            raise comm_error(f"{failed}: {error}") from error
        return answer


def _answer_calls(store: Any, asked: queue.SimpleQueue[Any], answers: queue.SimpleQueue[Any]) -> None:
    while (call := asked.get()) is not None:
        answers.put(_answer(store, *call))


def _answer(store: Any, name: str, arguments: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    try:
        return getattr(store, name)(*arguments), None
    except Exception as error:
        return None, error


def no_thread(error: Exception) -> str:
    """Return the sentence of a thread that cannot be started."""
    return (
        f"no thread can be started ({error}): the limit of processes and threads of this user (ulimit -u), of the cgroup (pids.max) or "
        "of the address space (ulimit -v) is too low"
    )


def not_come(ranks: Sequence[int]) -> str:
    """Return "rank 2, which has not come" or "ranks 2, 3, which have not come", with the first few ranks only."""
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    named = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_NAMED]))}{more}"
    return f"{named}, which {'have' if len(ranks) > 1 else 'has'} not come"


def children(rank: int, world_size: int) -> range:
    """Return the ranks whose lines `rank` reads."""
    return range(min(FAN_OUT * rank + 1, world_size), min(FAN_OUT * (rank + 1) + 1, world_size))


def find_hosts(lines: Sequence[Line]) -> list[int]:
    """Return the host of each rank, numbered by its lowest rank. Ranks without a known place are grouped by host name."""
    number: dict[tuple[str, str], int] = {}
    return [number.setdefault((each.place, "" if each.place else each.host), len(number)) for each in lines]


class Assembly:
    """A rendezvous of all ranks through torch's Gloo group: O(log W) messages a rank, no file descriptor."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def begin(self, speaker: int) -> None:
        """Start the first collective. `speaker`: this rank if it has a message for all; else -1."""
        self._highest = torch.tensor([speaker], dtype=torch.int64, device="cpu")
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._work: Any = self._backend.allreduce([self._highest], options)

    def is_done(self) -> bool:
        return bool(self._work.is_completed())

    def result(self) -> int:
        """Return the highest rank that has a message, -1 if none has. Raise RuntimeError if a rank has died."""
        self._work.wait()
        return int(self._highest.item())

    def hear(self, speaker: int, words: str) -> str:
        """Return the message of rank `speaker`, at most _WORDS_BYTES bytes. Collective."""
        memory = torch.frombuffer(bytearray(words.encode().ljust(_WORDS_BYTES)), dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = speaker, 0
        self._backend.broadcast([memory], options).wait()
        return bytes_of(memory).decode()


def assembly_of(group: Any) -> Assembly | None:
    """Return the assembly of torch's `group`, if that has Gloo for the CPU."""
    if "cpu:gloo" not in str(dist.get_backend_config(group)):
        return None
    return Assembly(cpu_backend(group))


def _error_of(reason: dict[str, Any]) -> CommError:
    at = reason["at"]
    text = f"joining failed on rank {reason['rank']} on host {reason['host']}: {reason['text']}"
    kind = CommTimeoutError if reason["is_timeout"] else CommError
    return comm_error(text, at, reason["host"] if at == reason["rank"] else "", kind)


def comm_error(message: str, rank: int = -1, host: str = "", kind: type[CommError] = CommError) -> CommError:
    """Return an error with its attributes set."""
    error = kind(message)
    error.rank, error.host = rank, host
    return error
