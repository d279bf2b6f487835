"""Fault injection in a rank of `shardwright chaos`: the plan, and the agent that executes it and reports.

The runner (cli/chaos.py) names this module to Checkpointers as an observer, and VARIABLE names a folder with the plan
and a socket. save() and restore() give the step: "rank 1 in step 7" is the same moment in each run. A fault happens
once, even if a restart repeats its step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from shardwright.options.mapping_files import read_mapping
from shardwright.options.names import near

VARIABLE = "SHARDWRIGHT_CHAOS"
#: a Checkpointer takes observers from the modules that this variable names
OBSERVERS, MODULE = "SHARDWRIGHT_OBSERVERS", __name__
#: kind of fault -> its effect on the rank
KINDS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP, and SIGCONT after `seconds`",
    "slow": "a pause of `seconds` before the step",
    "raise": "a RuntimeError before the step",
    "flip": "one bit of an averaged gradient is another",
    "disk": "no file can grow (RLIMIT_FSIZE) while this step is saved, and the next one",
    "cut": "the link of the rank's host is down for `seconds`, by the plan's commands `link.down` and `link.up`",
}
_KEYS = {"kind", "rank", "step", "seconds"}
_RANDOM_KEYS = {"count", "kinds", "ranks", "steps", "seconds"}
_PLAN_KEYS = {"seed", "fault", "random", "link"}
_BIT = 1 << 22  # the highest bit of a float32's fraction
SOCKET_NAME, PLAN_NAME = "socket", "plan.json"


@dataclasses.dataclass(frozen=True)
class Fault:
    kind: str
    rank: int
    step: int
    seconds: float = 1.0
    at: float = 0.0  # of kill and stop: when in the step, in [0, 1) of the duration of the previous step


@dataclasses.dataclass(frozen=True)
class Plan:
    """Faults in order of steps, and the commands that cut and restore the network link of the host of "{rank}"."""

    faults: tuple[Fault, ...]
    link: tuple[str, str] = ("", "")


def read_plan(path: str) -> Plan:
    """Read a plan, .toml or .json. Raises ValueError, one sentence with the path and the fault."""
    try:
        given = read_mapping(path, "TOML")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    try:
        return _plan_of(given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _plan_of(given: Mapping[str, Any]) -> Plan:
    _check_keys(given, _PLAN_KEYS, "the plan")
    draw = random.Random(_number(given, "seed", 0, 0, "the plan"))
    faults = []
    for number, entry in enumerate(given.get("fault", [])):
        where = f"fault {number}"
        _check_keys(entry, _KEYS, where)
        rank, step = _number(entry, "rank", None, 0, where), _number(entry, "step", None, 0, where)
        faults.append(Fault(_kind(entry.get("kind"), where), rank, step, _seconds(entry, where), draw.random()))
    if "random" in given:
        faults += _draw(given["random"], draw)
    if not faults:
        raise ValueError("the plan has no fault")
    entry = given.get("link", {"down": "", "up": ""})
    _check_keys(entry, {"down", "up"}, "link")
    link = entry.get("down"), entry.get("up")
    if not all(isinstance(each, str) for each in link):
        raise ValueError(f"link needs two commands, down and up, got {dict(entry)!r}")
    if "" in link and any(fault.kind == "cut" for fault in faults):
        raise ValueError(
            "a fault cuts a link, which needs the commands link.down and link.up, with {rank} for the rank's number"
        )
    return Plan(tuple(sorted(faults, key=lambda fault: fault.step)), link)


def _draw(entry: Any, draw: random.Random) -> Iterable[Fault]:
    where = "random"
    _check_keys(entry, _RANDOM_KEYS, where)
    count, ranks = _number(entry, "count", None, 1, where), _number(entry, "ranks", None, 1, where)
    steps, seconds = _number(entry, "steps", None, 2, where), _seconds(entry, where)
    kinds = [_kind(kind, where) for kind in entry.get("kinds", ["kill", "stop", "slow", "raise", "disk"])]
    for _ in range(count):
        fault = Fault(draw.choice(kinds), draw.randrange(ranks), draw.randrange(1, steps), seconds, draw.random())
        yield dataclasses.replace(fault, seconds=seconds * draw.random())


def _check_keys(entry: Any, known: set[str], where: str) -> None:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} is not a table")
    for key in entry:
        if key not in known:
            raise ValueError(f"{where} has an unknown key {key!r}; known are {', '.join(sorted(known))}")


def _kind(kind: Any, where: str) -> str:
    if kind not in KINDS:
        offer = near(str(kind), KINDS, nothing=f"; known are {', '.join(KINDS)}")
        raise ValueError(f"{where} has the unknown kind {kind!r}{offer}")
    return str(kind)


def _number(entry: Mapping[str, Any], key: str, default: int | None, least: int, where: str) -> int:
    value = entry.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{where}: {key} must be a whole number of at least {least}, got {value!r}")
    return value


def _seconds(entry: Mapping[str, Any], where: str) -> float:
    value = entry.get("seconds", 1.0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e6:
        raise ValueError(f"{where}: seconds must be from 0 to 1e6, got {value!r}")
    return float(value)


def mark_of(folder: str, number: int) -> str:
    """Return the path of the folder that marks a fault as done."""
    return os.path.join(folder, f"fired-{number}")


@functools.cache
def _agent(folder: str, pid: int) -> Agent:
    return Agent(folder)


def observer_of(model: Any) -> Agent | None:
    """Return this process's agent and let it watch `model`; None outside of `shardwright chaos`."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    agent = _agent(folder, os.getpid())
    agent.watch(model)
    return agent


class Agent:
    """The faults of one rank, and its reports, sent as datagrams because the disk may be full."""

    def __init__(self, folder: str) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._folder = folder
        self._rank = int(os.environ.get("RANK", "0"))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with open(os.path.join(folder, PLAN_NAME), encoding="utf-8") as file:
            faults = [Fault(**entry) for entry in json.load(file)]
        self._faults = {number: fault for number, fault in enumerate(faults) if fault.rank == self._rank}
        self._step = self._began_ns = self._took_ns = 0
        self._limit: tuple[int, int] | None = None
        self._limited = 0
        self._model: Any = lambda: None
        self._timers: list[tuple[threading.Timer, int, Fault]] = []  # timers of this step
        self.report("start", attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        register_optimizer_step_pre_hook(self._before_step)
        self._stepped = -1
        sys.excepthook = functools.partial(self._failed, sys.excepthook)

    def watch(self, model: Any) -> None:
        """Choose the model; on_close() reports the digest of its parameters."""
        self._model = weakref.ref(model)

    def report(self, event: str, **facts: Any) -> None:
        message = {"event": event, "rank": self._rank, "pid": os.getpid(), "time": time.time(), **facts}
        with contextlib.suppress(OSError):  # the runner has ended
            self._socket.sendto(json.dumps(message).encode(), os.path.join(self._folder, SOCKET_NAME))

    def on_restore(self, step: int) -> None:
        """Report a restore; the next step is `step`."""
        self.report("restored", step=step)
        self._begin(step)

    def on_save(self, step: int) -> None:
        """Report the end of step `step`, just before it is saved."""
        for timer, number, fault in self._timers:  # the step was shorter than the previous one: fire now
            timer.cancel()
            self._signal(number, fault)
        self.report("step", step=step)
        self._limit_disk(step)
        self._began_ns, self._took_ns = time.monotonic_ns(), time.monotonic_ns() - self._began_ns
        self._begin(step + 1)

    def _begin(self, step: int) -> None:
        self._step = step
        self._began_ns = time.monotonic_ns()
        self._timers = []
        for number, fault in self._due("kill", "stop"):
            delay_s = min(self._took_ns / 1e9, 1.0) * fault.at
            timer = threading.Timer(delay_s, self._signal, (number, fault))
            timer.daemon = True
            self._timers.append((timer, number, fault))
        for timer, *_ in self._timers:
            timer.start()

    def _limit_disk(self, step: int) -> None:
        """Set or lift the limit. It lasts for two saves, because the next save waits for the end of this one."""
        for number, fault in self._due("disk"):
            self._fire(number, fault)
            self._limit = resource.getrlimit(resource.RLIMIT_FSIZE) if self._limit is None else self._limit
            self._limited = step
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, self._limit[1]))
        if self._limit is not None and step >= self._limited + 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._limit)
            self._limit = None

    def _due(self, *kinds: str) -> list[tuple[int, Fault]]:
        found = [(n, each) for n, each in self._faults.items() if each.kind in kinds and each.step == self._step]
        return [(n, each) for n, each in found if not os.path.exists(mark_of(self._folder, n))]

    def _fire(self, number: int, fault: Fault) -> None:
        os.mkdir(mark_of(self._folder, number))
        self.report("fault", number=number, step=self._step, kind=fault.kind, seconds=fault.seconds)

    def _signal(self, number: int, fault: Fault) -> None:
        try:
            self._fire(number, fault)
        except FileExistsError:  # the fault's timer was first
            return
        os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._stepped != self._step:
            self._stepped = self._step
            self.report("stepping", step=self._step)
        for number, fault in self._due("slow", "raise", "flip", "cut"):
            self._fire(number, fault)
            if fault.kind == "slow":
                time.sleep(fault.seconds)
            elif fault.kind == "raise":
                raise RuntimeError(f"chaos: rank {self._rank} fails in step {self._step}")
            elif fault.kind == "flip":
                _flip(optimizer, fault.at)

    def _failed(self, before: Any, kind: Any, error: BaseException, trace: Any) -> None:
        self.report("error", message=f"{kind.__name__}: {error}"[:2000])
        before(kind, error, trace)

    def on_close(self) -> None:
        """Report the digest of this rank's parameters, just before the training ends."""
        from shardwright._engine import Error
        from shardwright.parallel.agreement.replica_check import digests
        from shardwright.parallel.engine import engine_of

        model = self._model()
        engine = engine_of(model)
        if engine is not None and engine.made:
            with contextlib.suppress(Error):  # ranks that failed; those that ended have published their slices
                self.report("end", step=self._step, digest=digests(engine.made[0]))


def _flip(optimizer: Any, at: float) -> None:
    """Flip one bit of a gradient. At zero=0 only this rank's memory holds it."""
    import torch

    held = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    flats = [getattr(each, "piece", each) for each in held]
    flats = [each for each in flats if each.numel() and each.dtype == torch.float32 and each.is_contiguous()]
    place = int(at * sum(each.numel() for each in flats))
    for each in flats:
        if place < each.numel():
            each.data.view(-1)[place : place + 1].view(torch.int32).bitwise_xor_(_BIT)
            return
        place -= each.numel()
