"""Law: `python -m shardwright.gpu_check` starts every part on simulated GPUs and produces each row of its plan, in the
table and in both reports. A run that fails, hangs or has no GPU still has all rows, with the reason, and keeps finished
ones.

The quick form runs the bodies in warm interpreters, and one part by the command. SW_TEST_LONG=1 runs the whole command.
Figures mean nothing here.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpu_check_place import Simulated
from internals import VARIABLE
from peer import PEER
from shardwright_tools.gpu_check import report, runner
from shardwright_tools.gpu_check.child import load
from shardwright_tools.gpu_check.plan import Part, Run, parts
from shardwright_tools.gpu_check.report import row
from shardwright_tools.gpu_check.runner import compare, run_parts
from simulated_gpus import SimulatedGpus
from simulated_gpus import run as run_simulated

RANKS = Path(__file__).resolve().parent
LONG = os.environ.get("SW_TEST_LONG") == "1"
pytestmark = [pytest.mark.skipif(PEER == "torch", reason="ours"), pytest.mark.timeout(600)]
PLACE = "gpu_check_place:simulated"


@pytest.fixture
def simulation(paths: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make started processes find the simulated GPU, and a sanitizer that only runs its arguments."""
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\nwhile case "$1" in --*) ;; *) false ;; esac; do shift 2; done\nexec "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{RANKS}:{RANKS.parent}")
    monkeypatch.setenv("SW_TEST_FOLDER", str(tmp_path))
    text = {}
    if LONG:  # else launches run the references: test_kernels_are_checked_on_simulated_gpus.py runs the text
        from test_fake_gpu import kernel_text

        text = {"text": str(kernel_text())}
    monkeypatch.setenv("SW_TEST_SIMULATION", json.dumps({**paths, **text}))


def reported(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / "gpu-report.json").read_text())["rows"]
    return rows


def test_the_parts_fit_into_half_an_hour() -> None:
    assert sum(part.limit_s for part in parts()) <= 30 * 60
    assert [part.name for part in parts()] == [part.name for part in parts(is_quick=True)]
    assert all(part.least_s <= part.limit_s for part in parts())
    assert sum(part.least_s for part in parts()) <= 540  # all of them start in one command on a lent machine


@pytest.mark.parametrize("within", [0.0, 1.0, 59.0, 60.0, 300.0, 540.0, 3600.0])
@pytest.mark.parametrize("taken", [0.0, 0.5, 1.0])
def test_parts_end_within_the_time_given(
    within: float, taken: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, clock, started = parts(), Clock(), dict[str, float]()
    monkeypatch.setattr(runner, "time", clock)

    def rows_of_part(part: Part, most_s: float, *_: Any) -> list[dict[str, Any]]:
        started[part.name] = most_s
        clock.passed += taken * most_s  # a part takes nothing, half or all of its limit
        return []

    monkeypatch.setattr(runner, "_rows_of_part", rows_of_part)
    begun = clock.monotonic()
    run_parts(chosen, tmp_path, within_s=within)
    assert clock.monotonic() - begun <= within + 1.0  # and what this test takes
    kept = [part for part in chosen if started[part.name]]
    assert kept == list(chosen[: len(kept)])  # dropped from the end, and only what cannot have its least time
    assert all(part.least_s <= started[part.name] <= part.limit_s for part in kept)
    assert len(kept) == len(chosen) or sum(part.least_s for part in chosen[: len(kept) + 1]) > within


def test_the_command_gives_each_row(simulation: None, tmp_path: Path) -> None:
    names = [part.name for part in parts()] if LONG else ["machine"]
    words = [
        sys.executable,
        "-m",
        "shardwright",
        "gpu-check",
        "--within",
        "480",
        "--quick",
        "--to",
        str(tmp_path),
        "--place",
        PLACE,
    ]
    done = subprocess.run([*words, "--only", *names], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {(each["part"], each["case"]): each for each in reported(tmp_path)}
    expected = {(part.name, case) for part in parts(is_quick=True) if part.name in names for case in part.cases}
    assert set(found) == expected and all(case in done.stdout for _, case in expected)
    check_rows(list(found.values()))
    assert (tmp_path / "gpu-report.html").read_text().count("<tr") == len(found) + 1


def check_rows(found: list[dict[str, Any]]) -> None:
    """Ignore what the doctor finds on the machine that runs the test."""
    assert [tuple(each.values()) for each in found if each["status"] != "ok" and each["case"] != "doctor"] == []


# bodies, in interpreters that are there already ----------------------------------------------------------------------


RUNS = [(part.name, k, run) for part in parts(is_quick=True) for k, run in enumerate(part.runs)]
#: sanitizers run the same body
ALONE = [
    (name, k) for name, k, run in RUNS if run.ranks == 1 and (name, k) not in (("sanitizers", 1), ("sanitizers", 2))
]
#: the other numbers of ranks and ways are the long form's; a killed peer takes its interpreter along
WITH_PEERS = [
    (name, k) for name, k, run in RUNS if run.ranks == 2 and run.dying is None and "ipc" not in run.environment.values()
]


def test_every_body_of_one_rank_gives_its_rows(teams: Any, paths: dict[str, str]) -> None:
    run_simulated(teams, 1, paths, bodies, ALONE, policy="on demand")


@pytest.mark.parametrize(("name", "number"), WITH_PEERS)
def test_a_body_of_two_ranks_gives_its_rows(teams: Any, paths: dict[str, str], name: str, number: int) -> None:
    (way,) = {run.environment.get(VARIABLE, "shm") for part, k, run in RUNS if (part, k) == (name, number)}
    run_simulated(teams, 2, paths, bodies, [(name, number)], policy="on demand", transport=way)


def test_an_nccl_that_takes_one_rank_per_card_is_skipped(teams: Any, paths: dict[str, str]) -> None:
    run_simulated(teams, 1, paths, one_card, policy="on demand", transport="nccl")


def one_card(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    place = Simulated(gpus, gpus.paths["cuda"])
    place.shares_card = True
    for version, status in (("23004", "ok"), ("22100", "skipped")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SIM_NCCL_VERSION", version)
            found = list(load("correct:shared")(place, rank, world_size, label="2 ranks, nccl, "))
        assert [each["status"] for each in found] == [status] * 4
    assert "NCCL 2.21.0 takes one rank per GPU" in found[0]["note"]


def bodies(gpus: SimulatedGpus, rank: int, world_size: int, chosen: list[tuple[str, int]]) -> None:
    place = Simulated(gpus, gpus.paths["cuda"])
    for name, k, run in RUNS:
        if (name, k) in chosen:
            found = list(load(run.body)(place, rank, world_size, **run.arguments))
            if rank == 0:
                assert tuple(each["case"] for each in found) == run.cases
                check_rows(found)


# runs that do not end well -------------------------------------------------------------------------------------------


def be_a_program(rank: int, world_size: int, folder: str, arguments: list[str], output: str) -> None:
    """Run `python ARGUMENTS` in a forked interpreter, in its own session."""
    os.setsid()
    for standard in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), standard)
    assert arguments[0] == "-m"
    sys.argv = arguments[1:]
    try:
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        raise SystemExit(0)
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


class Forked:
    """A stand-in for subprocess.Popen that forks an interpreter with torch loaded."""

    def __init__(self, fresh_ranks: Any, command: list[str], stdout: Any, **_: Any) -> None:
        assert command[0] == sys.executable
        self._team = fresh_ranks(1, [(be_a_program, {"arguments": command[1:], "output": stdout.name})])
        (self.pid,) = self._team.pids
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and (ended := self._team.ended()):
            (self.returncode,) = ended
            self._team.close()
        return self.returncode


class Clock:
    """A clock that a test advances."""

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self.passed = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.passed


def test_a_run_that_ends_badly_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_ranks: Any
) -> None:
    starts = SimpleNamespace(Popen=functools.partial(Forked, fresh_ranks), STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(runner, "subprocess", starts)
    cases, here = ("first", "second"), "gpu_check_endings"
    limit = 120.0
    given = [
        Part("failing", limit, (Run(f"{here}:fail", cases),)),
        Part("refusing", limit, (Run(f"{here}:refuse", cases),)),
        Part("ending badly", limit, (Run(f"{here}:end_badly", cases),)),
        Part("unsanitized", limit, (Run(f"{here}:fail", cases, prefix=("no-such-sanitizer",)),)),
        Part("hanging", limit, (Run(f"{here}:hang", cases), Run(f"{here}:fail", ("too late",)))),
    ]
    clock = Clock()

    def write(folder: Path, about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        report.write(folder, about, rows)
        if rows and rows[-1]["part"] == "hanging":  # its first row is in the report, and its time is over
            clock.passed = limit

    monkeypatch.setattr(runner, "time", clock)
    monkeypatch.setattr(runner, "write", write)
    run_parts(given, tmp_path, f"{here}:nowhere")
    found = {(each["part"], each["case"]): (each["status"], each["note"]) for each in reported(tmp_path)}
    for part in ("failing", "refusing", "ending badly", "hanging"):
        assert found[part, "first"] == ("ok", "")
    assert found["failing", "second"][0] == "failed" and "the second case is missing" in found["failing", "second"][1]
    # the place was there, so a refusal of the engine is a failure: only a machine without a GPU skips
    assert found["refusing", "second"][0] == "failed" and "no such card" in found["refusing", "second"][1]
    assert found["ending badly", "end of second"][0] == "failed"
    assert found["unsanitized", "first"] == ("skipped", "no-such-sanitizer is not installed")
    assert found["hanging", "second"][0] == "cut" and found["hanging", "too late"][0] == "cut"


def test_a_comparison_has_a_row_with_and_without_figures() -> None:
    part = Part("training", 1.0, (), (("zero=3", "FSDP2", 1.0), ("zero=0", "DDP", 1.0)))
    rows = [{"part": "training", **row(case, value=value)} for case, value in (("zero=3", 3.0), ("FSDP2", 2.0))]
    beside, without = compare(part, rows)
    assert (beside["case"], beside["value"], beside["status"]) == ("zero=3 beside FSDP2", 1.5, "ok")
    assert without["status"] == "skipped"


def test_a_second_command_runs_what_the_first_had_no_time_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [Part(name, 100.0, (Run("a:body", (f"{name} case",)),), least_s=30.0) for name in ("one", "two", "three")]
    started: list[tuple[str, float]] = []
    clock = Clock()
    monkeypatch.setattr(runner, "time", clock)

    def rows_of(run: Run, limit_s: float, *_: Any) -> list[dict[str, Any]]:
        started.append((run.cases[0], limit_s))
        clock.passed += max(0.0, limit_s)  # each takes all that it may
        return [row(run.cases[0], "ok" if limit_s > 0 else "cut")]

    monkeypatch.setattr(runner, "rows_of", rows_of)
    first = run_parts(given, tmp_path, within_s=70.0)
    assert [each["status"] for each in first] == ["ok", "ok", "cut"]
    assert [limit > 0 for _, limit in started] == [True, True, False] and started[0][1] <= 40.0
    started.clear()
    second = run_parts(given, tmp_path, before=json.loads((tmp_path / "gpu-report.json").read_text()))
    assert [each["status"] for each in second] == ["ok"] * 3 and reported(tmp_path) == second
    assert [case for case, _ in started] == ["three case"]


def test_a_machine_without_a_gpu_has_another_exit_code_than_success(tmp_path: Path, monkeypatch: Any) -> None:
    def rows_of(run: Run, *_: Any) -> list[dict[str, Any]]:
        return [row(case, "skipped", note="the machine has no GPU") for case in run.cases]

    monkeypatch.setattr(runner, "rows_of", rows_of)
    assert runner.main(["--to", str(tmp_path), "--only", "machine"]) == 3


def test_a_machine_that_refuses_a_sanitizer_skips_it(tmp_path: Path) -> None:
    refuses = tmp_path / "sanitizer"
    refuses.write_text("#!/bin/sh\necho '========= Error: Device not supported. Please refer to ...'\nexit 1\n")
    refuses.chmod(0o755)
    run = Run("correct:sanitized", ("memcheck",), prefix=(str(refuses),))
    (found,) = runner.rows_of(run, 60.0, tmp_path, PLACE, lambda rows: None)
    assert found["status"] == "skipped" and "refused by the machine" in found["note"]
