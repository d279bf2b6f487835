"""Count of the Python calls that a step makes inside the package: a profile of one step of a small module, by phase.

    python -m pytest -rP tests/ranks/test_a_step_makes_few_python_calls.py

prints calls/files/hops/engine calls of each stage, on the host and on simulated GPUs. A *call* is a frame of the
package, a *hop* a call from a frame in another file of the package, and an *engine call* a call of the C module by such
a frame.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shardwright as sw
import torch
from internals import _engine, autograd, watch

_PACKAGE = str(Path(sw.__file__).parent)
UNITS = 5
#: name -> options of wrap
STAGES: dict[str, dict[str, Any]] = {
    "zero=0": {},
    "zero=2": {"zero": 2},
    "zero=3": {"zero": 3, "share_parameters": False, "units": [torch.nn.Linear]},
    "fully_shard": {"by_hand": True},
}


@dataclasses.dataclass
class Counts:
    """The calls of one phase."""

    calls: Counter[str] = dataclasses.field(default_factory=Counter)
    engine: Counter[str] = dataclasses.field(default_factory=Counter)
    hops: int = 0

    @property
    def files(self) -> int:
        return len({name.partition(":")[0] for name in self.calls})

    def __str__(self) -> str:
        return f"{sum(self.calls.values())}/{self.files}/{self.hops}/{sum(self.engine.values())}"


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """A context that counts this thread's calls."""
    counts = Counts()

    def note(frame: Any, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE):
            return
        name = file[len(_PACKAGE) + 1 :]
        if event == "call":
            counts.calls[
                f"{name}:{frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name}"
            ] += 1
            caller = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
            counts.hops += caller.startswith(_PACKAGE) and caller != file
        elif event == "c_call" and _is_engine(argument):
            counts.engine[f"{type(argument.__self__).__name__}.{argument.__name__}"] += 1

    sys.setprofile(note)
    try:
        yield counts
    finally:
        sys.setprofile(None)


def _is_engine(function: Any) -> bool:
    bound = getattr(function, "__self__", None)
    owner = bound if isinstance(bound, type(sys)) else type(bound)
    name = getattr(owner, "__name__", "") if isinstance(bound, type(sys)) else ""
    return name.endswith("_engine") or any(each.__module__.endswith("_engine") for each in type(bound).__mro__)


def profile_step(adopt: Any, by_hand: bool = False, **options: Any) -> dict[str, Counts]:
    """Return the counts of one step, after the steps that make buckets leave early and units be gathered ahead.
    `by_hand`: with sw.fully_shard and a fused optimizer of torch's. Collective.
    """
    gc.collect()
    for listener in list(autograd._listeners):  # an earlier test's that still lives is told of steps, too
        autograd.ignore_steps(listener)
    torch.manual_seed(0)
    module = adopt(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(UNITS))))
    if by_hand:
        for each in (*module, module):
            sw.fully_shard(each)
        wrapped, optimizer = module, torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
    else:
        wrapped, optimizer = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), **options)
    found: dict[str, Counts] = {}
    _engine.account_watch(
        1 << 40, watch.begin().look
    )  # each tenth step of the process has a look, outside of its phases
    for _ in range(4):
        x = torch.ones(2, 8)
        with counting() as found["forward"]:
            loss = wrapped(x)
        loss = loss.square().mean()
        with counting() as found["backward"]:
            loss.backward()
        with counting() as found["step"]:
            optimizer.step()
        optimizer.zero_grad()
    watch.begin().arm()
    return found
