"""Law: the first line of `shardwright why` names the rank that holds the others and what it does, while it hangs and from the files that
the ranks leave when all are killed."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import shardwright as sw
import torch
from harness import at_least_two
from internals import account, waits
from models import Mlp
from shardwright_tools.cli import main, why

LONG_S = 600.0


class SlowData(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(LONG_S)
        return torch.ones(7)


def evaluate_alone() -> None:
    time.sleep(LONG_S)


def hold_the_gil() -> None:
    left = int(LONG_S)
    while left > 0:  # the signal that asks for the stack ends a sleep
        left = ctypes.PyDLL(None).sleep(left)


def compute() -> None:
    while True:
        pass


def lock_twice() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def save_slowly() -> None:
    with waits.calling("sw.save()"):
        time.sleep(LONG_S)


def read_data() -> None:
    next(iter(torch.utils.data.DataLoader(SlowData())))


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_a_program() -> None:
    subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL).wait()  # it ends with this process


#: name -> where rank 1 does it, what it does, words of the first line while it hangs, and when all ranks are dead
CASES: dict[str, tuple[str, Any, str, str]] = {
    "stopped": ("forward", stop, "is stopped, in its forward; ranks 0, 2 have waited", "was in its forward"),
    "gil": (
        "data",
        hold_the_gil,
        "sleeps or waits in the program's own code, between two steps at",
        "was between two steps",
    ),
    "branch": ("data", evaluate_alone, "in evaluate_alone", "was between two steps"),
    "loader": ("data", read_data, "waits for its data loader", "was between two steps"),
    "save": ("data", save_slowly, "is in a save, in sw.save()", "was in a save, in sw.save()"),
    "busy": ("forward", compute, "computes, in its forward at", "was in its forward"),
    "lock": (
        "optimizer",
        lock_twice,
        "sleeps or waits in the program's own code, in its optimizer at",
        "was in its optimizer",
    ),
    "program": ("forward", wait_for_a_program, "in its forward at", "was in its forward"),
    "dead": (
        "forward",
        die,
        "has died in its forward, without an error of the engine",
        "died or exited before its part of",
    ),
    "mismatch": ("data", None, "ended with: ranks disagree on collective", "ended with: ranks disagree on collective"),
    "start": ("start", evaluate_alone, "rank 1 of 3 did not come", "rank 1 of 3 did not come"),
}


def plant(rank: int, world_size: int, case: str, folder: str) -> None:
    os.environ[account.RUN_FOLDER] = folder
    where, act, *_ = CASES[case]

    def at(place: str, step: int) -> None:
        if rank == 1 and place == where and step == 2 and act is not None:
            act()

    at("start", 2)
    torch.manual_seed(1)
    model = Mlp()
    model, optimizer = sw.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=1)
    for step in range(4):
        at("data", step)
        if case == "mismatch" and step == 2 and rank == 1:
            sw.full_state_dict(model)
            sw.average_gradients(model)
        loss = model(torch.ones(2, 7)).sum()
        at("forward", step)
        loss.backward()
        at("optimizer", step)
        optimizer.step()
        optimizer.zero_grad()


def first_line(folder: Path, capsys: Any, *options: str) -> str:
    (job,) = (folder / "account").iterdir()
    capsys.readouterr()
    assert main(["why", str(job), *options]) == 0
    printed: str = capsys.readouterr().out
    return printed.partition("\n")[0]


def hangs(folder: Path) -> bool:
    """Return True once a rank waits for a second, or has an error."""
    for job in (folder / "account").glob("*"):
        ranks = why.read_ranks(job)
        return any(each.reason or (each.waits and each.waited_s > 1) for each in ranks) or starts(ranks)
    return False


def starts(ranks: list[Any]) -> bool:
    return (
        len(ranks) == 2
        and all(each.head.call == "sw.wrap()" for each in ranks)
        and ranks[0].now_ns - ranks[0].last_ns > 1e9
    )


@at_least_two
@pytest.mark.parametrize("case", CASES)
def test_the_first_line_is_right(case: str, world_size: int, fresh_ranks: Any, tmp_path: Path, capsys: Any) -> None:
    _, _, live, dead = CASES[case]
    with fresh_ranks(3) as team:
        team.start(plant, case=case, folder=str(tmp_path))
        end_s = time.monotonic() + 40
        while not hangs(tmp_path):
            assert time.monotonic() < end_s, list(tmp_path.rglob("*"))
            time.sleep(0.1)
        found = first_line(tmp_path, capsys)
        assert live in found, found
        assert case in ("mismatch", "start") or found.startswith("rank 1 (pid "), found
    assert dead in (found := first_line(tmp_path, capsys)), found
    assert case in ("dead", "mismatch", "start") or found.startswith("rank 1 (pid "), found


@at_least_two
def test_stacks_come_without_py_spy(
    world_size: int, fresh_ranks: Any, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """From a signal's handler, in C: also of a rank that holds the GIL. A stopped rank gets no signal."""
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with fresh_ranks(3) as team:
        team.start(plant, case="gil", folder=str(tmp_path))
        end_s = time.monotonic() + 40
        while not hangs(tmp_path):
            assert time.monotonic() < end_s
            time.sleep(0.1)
        (job,) = (tmp_path / "account").iterdir()
        ranks = why.read_ranks(job)
        stacks = [why.take_stack(rank) for rank in ranks]
        assert any("hold_the_gil" in each for each in stacks[1]), stacks
        assert any("backward" in each or "autograd" in each for each in stacks[0]), stacks
        team.signal(2, signal.SIGSTOP)
        time.sleep(0.2)
        (stopped,) = [each for each in why.read_ranks(job) if each.number == 2]
        assert why.take_stack(stopped) == []
        assert "in hold_the_gil" in first_line(tmp_path, capsys) or "rank 2" in first_line(tmp_path, capsys)


@at_least_two
def test_a_run_that_moves_hangs_nowhere(world_size: int, fresh_ranks: Any, tmp_path: Path, capsys: Any) -> None:
    with fresh_ranks(2) as team:
        team.run(moves, folder=str(tmp_path))
        assert first_line(tmp_path, capsys, "--no-stacks").startswith(
            "no rank waits for another: step 3, the last steps took "
        )
        pytest.importorskip("rich")
        (job,) = (tmp_path / "account").iterdir()
        assert main(["top", str(job), "--times", "2", "--every", "0.1"]) == 0
        assert "ms/step" in capsys.readouterr().out
    assert first_line(tmp_path, capsys).startswith("all ranks have ended without an error of the engine, at step 3")


def moves(rank: int, world_size: int, folder: str) -> None:
    os.environ[account.RUN_FOLDER] = folder
    model, optimizer = sw.wrap(model := Mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()


@at_least_two
def test_what_is_no_account_is_one_sentence(world_size: int, fresh_ranks: Any, tmp_path: Path, capsys: Any) -> None:
    with fresh_ranks(2) as team:
        team.run(moves, folder=str(tmp_path))
    (job,) = (tmp_path / "account").iterdir()
    path = next(each for each in job.glob("rank-0.*") if each.suffix != ".stacks")
    data = bytearray(path.read_bytes())
    for change, sentence in (
        (
            lambda: data.__setitem__(slice(8, 12), (7).to_bytes(4, "little")),
            "is an account of version 7, and this shardwright reads version 1",
        ),
        (lambda: data.__setitem__(slice(0, 4), b"elf\0"), "is no account of steps"),
        (data.clear, "is empty: no account of steps"),
    ):
        change()
        path.write_bytes(data)
        assert main(["why", str(job)]) == 2
        assert sentence in capsys.readouterr().err
    path.unlink()
    assert main(["why", str(job)]) == 0
    assert capsys.readouterr().out
