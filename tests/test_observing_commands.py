"""Law: from one real run of two ranks `shardwright trace` makes one trace of both, `shardwright report` one page without network that
shows what the run had, and `shardwright scale` the speed of one and two; bad input is a sentence."""

from __future__ import annotations

import functools
import html.parser
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from shardwright_tools.cli import main, page, scale
from shardwright_tools.cli.children import run_child
from shardwright_tools.cli.report import Nothing

PROGRAM = Path(__file__).parent / "ranks" / "observed_program.py"
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, with a trace of it."""
    folder = tmp_path_factory.mktemp("runs") / "a <b>"
    folder.mkdir()
    words = [sys.executable, "-m", "shardwright", "trace", "--steps", "4", "-o", str(folder / "trace.json"), "--"]
    words += [sys.executable, *TORCHRUN, str(PROGRAM), str(folder), "60"]
    environment = {**os.environ, "SHARDWRIGHT_RUN_FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "open it at https://ui.perfetto.dev" in done.stdout, done.stdout + done.stderr
    return folder


def test_a_program_is_traced_unchanged(run: Path) -> None:
    found = json.loads((run / "trace.json").read_text())
    steps = [(each["pid"], each["name"]) for each in found["traceEvents"] if each.get("cat") == "step"]
    assert sorted(steps) == [(rank, f"step {step}") for rank in (1, 2) for step in (3, 4, 5, 6)]
    assert {each.get("cat") for each in found["traceEvents"]} >= {"phase", "collective", "cpu_op", "wait"}
    assert found["otherData"]["ranks"] == 2 and not list(run.glob("*.part"))


class Links(html.parser.HTMLParser):
    """The attributes by which a page loads something, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text = ""
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.loads += [f"{tag} {name}={value}" for name, value in attributes if name in ("src", "href") and value]
        self.loads = [each for each in self.loads if "href=#" not in each]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_shows_the_run_and_loads_nothing(run: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["report", str(run), "-o", str(run / "r.html")]) == 0
    text = (run / "r.html").read_text()
    found = Links()
    found.feed(text)
    assert found.loads == [] and "@import" not in text and "<script" not in text
    assert not re.search(r"url\((?!#)", text) and len(text) < 400_000
    for head in ("Loss", "Throughput", "Step time of rank 0", "Stragglers", "Waits by cause", "Checkpoints", "Faults"):
        assert f"<h2>{head}</h2>" in text
    assert text.count("<svg") == 4 and "2 of 2 ranks" in text and "saved/step-" in text
    assert "Rank 1: " in text and "times the others" in text  # it was slow
    assert "Run a &lt;b&gt;" in text and "<b>" not in text
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    assert not any(mark in text for mark in page._MARKS)  # each colour follows the scheme
    ranks, notes = page.accounts_of(run)
    assert [each.head.rank for each in ranks] == [0, 1] and all(each.head.ended for each in ranks) and notes == []
    assert all(len(each.rows) == 60 for each in ranks)


def test_a_page_fits_a_phone_and_a_desk(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    image = pytest.importorskip("PIL.Image")
    assert main(["report", str(run), "-o", str(tmp_path / "r.html")]) == 0
    corners = {}
    for scheme, number in (("light", 1), ("dark", 0)):
        for width in (390, 1280):
            shot = tmp_path / f"{scheme}-{width}.png"
            words = [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--screenshot={shot}",
            ]
            words += [f"--user-data-dir={tmp_path / 'profile'}", f"--blink-settings=preferredColorScheme={number}"]
            words += [f"--window-size={width},1200", f"file://{tmp_path / 'r.html'}"]
            subprocess.run(words, capture_output=True, timeout=120, check=True)
            with image.open(shot) as opened:
                pixels = opened.convert("L")
                assert pixels.width == width
                corners[scheme, width] = pixels.getpixel((2, 2))
                right = [pixels.getpixel((width - 2, y)) for y in range(0, 1200, 10)]
                assert len(set(right)) == 1  # nothing reaches over the right margin
    assert all(corners["light", width] > 240 and corners["dark", width] < 40 for width in (390, 1280)), corners


def test_counts_of_ranks_are_timed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = [sys.executable, *TORCHRUN, str(PROGRAM), str(tmp_path), "100000"]
    assert main(["scale", "--seconds", "1.5", "--tokens", "100", "--json", "--", *program]) == 0
    one, two = json.loads(capfd.readouterr().out)["counts"]
    assert (one["ranks"], two["ranks"]) == (1, 2) and one["efficiency"] == 1 and one["steps"] > 5
    assert two["efficiency"] == pytest.approx(two["steps_per_s"] / one["steps_per_s"])
    assert two["efficiency"] < 0.8  # its second rank sleeps five times as long
    assert "-bound: " in two["account"][0]


def test_the_option_is_found_and_replaced() -> None:
    words = ["torchrun", "--nproc_per_node=6", "x.py"]
    assert scale.counts_of(words) == ([1, 2, 4, 6], 1, True)
    assert scale.with_ranks(words, 1, True, 4) == ["torchrun", "--nproc_per_node=4", "x.py"]
    words = ["torchrun", "--nproc-per-node", "1", "x.py"]
    assert scale.counts_of(words) == ([1], 1, False)
    assert scale.with_ranks(words, 1, False, 1) == ["torchrun", "--nproc-per-node=1", "x.py"]
    for bad in (
        ["torchrun", "x.py"],
        ["torchrun", "--nproc-per-node", "auto", "x.py"],
        ["torchrun", "--nproc-per-node"],
    ):
        with pytest.raises(Nothing, match="nproc-per-node"):
            scale.counts_of(bad)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["report", "{folder}/none"], "there is no run"),
        (["report", "{folder}"], "is no run's folder"),
        (["report", "{folder}/old"], "is an account of version 99, and this shardwright reads version"),
        (["trace", "--"], "no command given"),
        (["trace", "--steps", "0", "--", "true"], "--steps must be at least 1"),
        (["trace", "--", "no-such-command"], "was not found, or is not executable"),
        (["trace", "-o", "{folder}/no/t", "--", "true"], "there is no folder to write it to"),
        (["trace", "-o", "{folder}/t", "--", "true"], "no trace: the program ended with code 0"),
        (["trace", "--merge", "{folder}/t"], "there are no parts of a trace"),
        (["scale", "--"], "no command given"),
        (["scale", "--seconds", "0", "--", "true"], "must be above 0"),
        (["scale", "--", "true"], "true has no --nproc-per-node N"),
        (["scale", "--", "true", "--nproc-per-node", "2"], "1 rank ended with code 0, 0 steps after the first 3"),
    ],
)
def test_wrong_input_is_one_sentence(
    words: list[str], sentence: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old" / "ended").mkdir(parents=True)
    head = b"swstep\0\0" + (99).to_bytes(4, sys.byteorder)
    (tmp_path / "old" / "ended" / "rank-0").write_bytes(head + bytes(5000))
    assert main([word.format(folder=tmp_path) for word in words]) == 2
    found = capfd.readouterr()
    assert sentence in found.err and "Traceback" not in found.err, found.err


def test_a_missing_matplotlib_is_one_sentence(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(run)]) == 2 and "needs matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"shardwright_trace": 1}', "is a part of a trace without a right 'rank'"),
        (b"\xff\xfe", "is no part of a trace"),
        (b"[" * 100_000, "is no part of a trace"),
        (b'{"shardwright_trace": 7}', "is of version 7"),
    ],
)
def test_a_wrong_part_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, sentence: str
) -> None:
    (tmp_path / "t.rank-7.part").write_bytes(content)
    assert main(["trace", "--merge", str(tmp_path / "t")]) == 2
    said = capsys.readouterr().err
    assert sentence in said and "Traceback" not in said


def test_what_a_command_has_started_ends_with_it(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"#!/bin/sh\nsleep 300 & echo $! > {tmp_path}/pid\nwait\n")
    script.chmod(0o755)
    assert (
        run_child([str(script)], {}, lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").stat().st_size > 1)
        is None
    )
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not os.path.exists(f"/proc/{pid}") or " Z " in Path(f"/proc/{pid}/stat").read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"{pid} goes on")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_as_a_command_starts_leaves_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    started: list[int] = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *words: Any, **given: Any) -> None:
            super().__init__(*words, **given)
            started.append(self.pid)
            signal.raise_signal(number)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a command in the background has none
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
        run_child(["/bin/sleep", "300"], {}, lambda: False)
    assert len(started) == 1 and not os.path.exists(f"/proc/{started[0]}")
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_a_command_that_is_interrupted_says_nothing(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/begun\nsleep 300\n")
    script.chmod(0o755)
    words = [sys.executable, "-m", "shardwright", "trace", "-o", str(tmp_path / "t"), "--", str(script)]
    listens = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also where this process ignores it
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=listens
    ) as command:
        for _ in range(600):
            if (tmp_path / "begun").exists():
                break
            time.sleep(0.05)
        command.send_signal(signal.SIGINT)
        printed, _ = command.communicate(timeout=60)
    assert (command.returncode, printed) == (130, "")
