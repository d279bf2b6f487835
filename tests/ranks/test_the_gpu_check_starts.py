"""Law: `python -m shardwright.gpu_check` starts every part on simulated GPUs and gives each row that its plan names, in the table and in both
reports. A run that fails, hangs or has no GPU has its rows all the same, with the reason, and keeps those that it had found.

The quick form has the first run of each part; SW_TEST_LONG=1 has the command whole. Figures mean nothing here."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peer import PEER

from shardwright.gpu_check.plan import Part, Run, parts
from shardwright.gpu_check.report import row
from shardwright.gpu_check.runner import compare, run_parts

RANKS = Path(__file__).resolve().parent
LONG = os.environ.get("SW_TEST_LONG") == "1"
pytestmark = [pytest.mark.skipif(PEER == "torch", reason="ours"), pytest.mark.timeout(600)]
PLACE = "gpu_check_place:simulated"


@pytest.fixture
def simulation(paths: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started find the simulated GPU, and a sanitizer that only runs what it is given."""
    from test_fake_gpu import kernel_text

    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\nshift 4\nexec "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{RANKS}:{RANKS.parent}")
    monkeypatch.setenv("SW_TEST_FOLDER", str(tmp_path))
    monkeypatch.setenv("SW_TEST_SIMULATION", json.dumps({**paths, "text": str(kernel_text())}))


def reported(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / "gpu-report.json").read_text())["rows"]
    return rows


def test_every_part_starts_and_every_row_appears(simulation: None, tmp_path: Path) -> None:
    chosen = parts(is_quick=True)
    assert [part.name for part in chosen] == [part.name for part in parts()]
    assert sum(part.limit_s for part in chosen) <= 30 * 60
    if LONG:
        words = [sys.executable, "-m", "shardwright.gpu_check", "--quick", "--to", str(tmp_path), "--place", PLACE]
        done = subprocess.run(words, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        chosen = tuple(dataclasses.replace(part, runs=part.runs[:1]) for part in chosen)
        run_parts(chosen, tmp_path, PLACE)
    found = {(each["part"], each["case"]): each for each in reported(tmp_path)}
    assert set(found) == {(part.name, case) for part in chosen for case in part.cases}
    wrong = [each for each in found.values() if each["status"] != "ok" and each["case"] != "doctor"]
    assert wrong == []
    page = (tmp_path / "gpu-report.html").read_text()
    assert page.count("<tr") == len(found) + 1


# runs that do not end well -------------------------------------------------------------------------------------------


class Nowhere:
    backend = "gloo"

    def __enter__(self) -> Nowhere:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def nowhere(rank: int, world_size: int, folder: str) -> Nowhere:
    return Nowhere()


def hang(place: Any, rank: int, world_size: int) -> Iterator[Any]:
    yield row("first")
    time.sleep(1000)


def fail(place: Any, rank: int, world_size: int) -> Iterator[Any]:
    yield row("first")
    raise ValueError("the second case is missing")


def refuse(place: Any, rank: int, world_size: int) -> Iterator[Any]:
    yield row("first")
    raise NotImplementedError("no such card")


def end_badly(place: Any, rank: int, world_size: int) -> Iterator[Any]:
    yield row("first")
    yield row("second")
    raise ValueError("at the end")


def test_a_run_that_ends_badly_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{RANKS}:{RANKS.parent}")
    cases, here = ("first", "second"), __name__
    limit = 20.0
    given = [
        Part("failing", limit, (Run(f"{here}:fail", cases),)),
        Part("refusing", limit, (Run(f"{here}:refuse", cases),)),
        Part("ending badly", limit, (Run(f"{here}:end_badly", cases),)),
        Part("unsanitized", limit, (Run(f"{here}:fail", cases, prefix=("no-such-sanitizer",)),)),
        Part("hanging", limit, (Run(f"{here}:hang", cases), Run(f"{here}:fail", ("too late",)))),
    ]
    begin = time.monotonic()
    run_parts(given, tmp_path, f"{here}:nowhere")
    assert time.monotonic() - begin < 4 * limit + 10
    found = {(each["part"], each["case"]): (each["status"], each["note"]) for each in reported(tmp_path)}
    for part in ("failing", "refusing", "ending badly", "hanging"):
        assert found[part, "first"] == ("ok", "")
    assert found["failing", "second"][0] == "failed" and "the second case is missing" in found["failing", "second"][1]
    assert found["refusing", "second"] == ("skipped", "no such card")
    assert found["ending badly", "end of second"][0] == "failed"
    assert found["unsanitized", "first"] == ("skipped", "no-such-sanitizer is not installed")
    assert found["hanging", "second"][0] == "cut" and found["hanging", "too late"][0] == "cut"


def test_a_comparison_has_a_row_with_and_without_figures() -> None:
    part = Part("training", 1.0, (), (("zero=3", "FSDP2", 1.0), ("zero=0", "DDP", 1.0)))
    rows = [{"part": "training", **row(case, value=value)} for case, value in (("zero=3", 3.0), ("FSDP2", 2.0))]
    beside, without = compare(part, rows)
    assert (beside["case"], beside["value"], beside["status"]) == ("zero=3 beside FSDP2", 1.5, "ok")
    assert without["status"] == "skipped"
