"""Law: a rank slowed 1.3 times is named within 50 steps, and no other; rank 0 reports what bounds the steps; a wait for data and a sampler
whose epoch stays are named once; a tracker that fails stops nothing."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import shardwright as sw
import torch
from harness import DEADLINE_S, LONG, gather, on_every_rank
from internals import AccountFile, account, goodput, waits, watch
from torch.utils.data import DistributedSampler


def needs(package: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """A context with the package's lines from INFO on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("shardwright", "shardwright.watch")]
    before = [each.level for each in loggers]
    loggers[0].addHandler(handler)
    for each in loggers:
        each.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        loggers[0].removeHandler(handler)
        for each, level in zip(loggers, before):
            each.setLevel(level)


def wrapped() -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 3)
    return sw.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=1)


def run(model: Any, optimizer: Any, steps: int, forward_s: float = 0.0, data_s: float = 0.0) -> None:
    for _ in range(steps):
        time.sleep(data_s)
        loss = model(torch.ones(2, 4)).sum()
        time.sleep(forward_s)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_slowed_rank_is_named_within_50_steps(ranks: int, teams: Any) -> None:
    teams.run(ranks, slowed, spoils=True, deadline_s=DEADLINE_S, arguments={})


def slowed(rank: int, world_size: int) -> None:
    """Steps of 90 ms, that are mostly asleep: the machine may be full."""
    with heard() as lines:
        model, optimizer = wrapped()
        run(model, optimizer, 50, 0.126 if rank == 1 else 0.09)
    named = gather([each for each in lines if "is slow" in each])
    assert len(named[0]) == 1 and named[0][0].startswith("rank 1 (pid "), named
    assert not any(named[1:]), named


@pytest.mark.skipif(not LONG, reason="the long form: a rank that gets no core of a busy machine is slow")
@on_every_rank(at_least=2, spoils=True, deadline_s=600)
def test_quiet_steps_name_no_rank(rank: int, world_size: int) -> None:
    with heard() as lines:
        model, optimizer = wrapped()
        run(model, optimizer, 1000, 0.004)
    assert gather([each for each in lines if "is slow" in each or "waits for data" in each]) == [[]] * world_size


@on_every_rank(spoils=True)
def test_rank_0_reports(rank: int, world_size: int) -> None:
    os.environ[watch.EVERY] = "20"
    watch.begin.cache_clear()
    with heard() as lines:
        model, optimizer = wrapped()
        run(model, optimizer, 41, data_s=0.004)  # behind the steps of whatever these ranks ran before
    reports = gather([each for each in lines if " ms a step" in each])
    told = [int(each.partition(":")[0].removeprefix("step ")) for each in reports[0]]
    assert told and told == list(range(told[0], told[-1] + 1, 20)) and told[0] % 20 == 0, reports[0]
    assert len(told) in (2, 3) and not any(reports[1:]), reports
    assert "-bound: " in reports[0][0] and "share of memory" in reports[0][0]
    waits = gather([each for each in lines if "waits for data" in each])
    assert len(waits[0]) == 1 and not any(waits[1:]), waits
    for word in ("num_workers", "persistent_workers", "prefetch_factor", "pin_memory"):
        assert word in waits[0][0]


@on_every_rank(exactly=1, spoils=True)
def test_the_newest_metrics_that_is_open_has_the_lines_throughput(rank: int, world_size: int) -> None:
    """Whatever the order in which they end."""
    os.environ[watch.EVERY] = "2"
    watch.begin.cache_clear()
    with heard() as lines:
        model, optimizer = wrapped()
        opened = [sw.metrics(model, tokens=tokens, every=2) for tokens in (10**3, 10**6, 10**9)]
        for closed in (None, 0, 2, 1):
            if closed is not None:
                opened[closed].close()
            run(model, optimizer, 2, 0.005)
    found = [float(each.partition(" tokens/s")[0].rpartition(" ")[2].replace(",", "")) for each in lines[:3]]
    steps = [float(each.partition(" ms a step")[0].rpartition(" ")[2]) * 1e-3 for each in lines[:3]]
    assert [each * step > 10 ** (power - 1) for each, step, power in zip(found, steps, (9, 9, 6))] == [True] * 3, lines
    assert found[2] * steps[2] < 10**8 and len(lines) == 4 and "tokens/s" not in lines[3], lines


@on_every_rank(exactly=1, spoils=True)
def test_the_memory_of_a_gpu_is_in_the_line(rank: int, world_size: int) -> None:
    """As torch counts it, asked for at a line alone."""
    asked = []

    def stats() -> dict[str, int]:
        asked.append(1)
        return {
            "allocated_bytes.all.current": 3 * 2**30,
            "reserved_bytes.all.current": 4 * 2**30,
            "num_alloc_retries": 2,
        }

    os.environ[watch.EVERY] = "20"
    watch.begin.cache_clear()
    torch.cuda.is_initialized, torch.cuda.memory_stats = lambda: True, stats  # type: ignore[assignment]
    with heard() as lines:
        model, optimizer = wrapped()
        run(model, optimizer, 45)
    lines = [each for each in lines if " ms a step" in each]
    assert len(lines) == len(asked) == 2
    assert all("GPU memory 3,072 MiB allocated, 4,096 reserved, 2 retries" in each for each in lines), lines


@on_every_rank(exactly=1, spoils=True)
def test_a_tracker_passes_an_interrupt_on(rank: int, world_size: int) -> None:
    """Ctrl-C while a tracker sends: no error of a tracker's."""

    def interrupted(step: int, scalars: Any) -> None:
        raise KeyboardInterrupt

    model, optimizer = wrapped()
    with sw.metrics(model, to=[interrupted], every=1), pytest.raises(KeyboardInterrupt):
        run(model, optimizer, 3)


def test_goodput_counts_a_restart(fresh_ranks: Any, tmp_path: Path) -> None:
    """The first start is killed five steps after a save; the second one knows what that cost."""
    with fresh_ranks(1) as team:
        (saved_ns, _), *_ = team.run(starts, folder=str(tmp_path), steps=8)
    with fresh_ranks(1) as team:
        ((_, begun_ns), head, text, left), *_ = [team.run(starts, folder=str(tmp_path), steps=3, tells=True)[0]]
    assert head.restarts == 1 and left == 1
    lost_ns = int(text.partition(": ")[2].partition(" s ")[0].replace(",", "")) * 1e9
    assert abs(lost_ns - (begun_ns - saved_ns)) < 1e9, (lost_ns, saved_ns, begun_ns)
    assert text.startswith("goodput ") and text.endswith(" s lost to 1 restart")


test_goodput_counts_a_restart.exactly = 1  # type: ignore[attr-defined]


def starts(rank: int, world_size: int, folder: str, steps: int, tells: bool = False) -> Any:
    """Return when step 3 was saved and when the first step began, since 1970; with `tells`, what the account says, too."""
    os.environ.update({account.RUN_FOLDER: folder, "TORCHELASTIC_RUN_ID": "a"})
    model, optimizer = wrapped()
    begun_ns = time.time_ns()
    run(model, optimizer, 3)
    saved_ns = time.time_ns()
    with waits.calling("sw.save()"):
        pass
    run(model, optimizer, steps - 3, 0.3)
    if not tells:
        return saved_ns, begun_ns
    path = account.own_file()
    assert path is not None
    head, own = AccountFile(path).head(), AccountFile(path).rows(10)
    files = [each for each in path.parent.iterdir() if each.suffix != ".stacks"]
    return (saved_ns, begun_ns), head, goodput.text(head, own[0].begun_ns), len(files)


@on_every_rank(exactly=1, spoils=True)
def test_the_variable_is_checked(rank: int, world_size: int) -> None:
    os.environ[watch.EVERY] = "often"
    watch.begin.cache_clear()
    with pytest.raises(ValueError, match="must be a whole number of steps, or 0 for no lines, got 'often'"):
        wrapped()


@on_every_rank(spoils=True)
def test_a_sampler_whose_epoch_stays_is_named_once(rank: int, world_size: int) -> None:
    with heard() as lines:
        wrapped()
        sampler = DistributedSampler(range(8), shuffle=True)
        quiet = DistributedSampler(range(8), shuffle=False)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            assert len(list(sampler)) == len(list(quiet))
        assert lines == []
        for _ in range(3):  # a look at the first batch is no epoch
            next(iter(torch.utils.data.DataLoader(range(8), batch_size=2, sampler=sampler)))
        assert lines == []
        for _ in range(3):
            list(sampler)
    assert len(lines) == 1 and "sampler.set_epoch(epoch)" in lines[0]


@on_every_rank()
def test_scalars_go_to_each_tracker(rank: int, world_size: int) -> None:
    folder = Path(tempfile.mkdtemp())
    calls: list[Any] = []
    model, optimizer = wrapped()

    def fails(step: int, scalars: Any) -> None:
        raise RuntimeError("no network")

    with (
        heard() as lines,
        sw.metrics(
            model,
            tokens=lambda step: 1000,
            to=[f"jsonl:{folder}/m.jsonl", lambda *each: calls.append(each), fails, "prometheus:0", "jsonl:/proc/none"],
            every=4,
            peak_flops=1e9,
        ),
    ):
        run(model, optimizer, 20, 0.002)
    count = len(calls)
    run(model, optimizer, 8)
    assert len(calls) == count
    if rank != 0:
        assert calls == [] and not list(folder.iterdir())
        return
    written = [json.loads(each) for each in (folder / "m.jsonl").read_text().splitlines()]
    assert len(written) == len(calls) and len(calls) in (4, 5)
    for row, (step, scalars) in zip(written, calls):
        assert row["step"] == step and step % 4 == 0 and scalars.items() <= row.items()
        assert scalars["step_s"] == pytest.approx(
            sum(scalars[f"{p}_s"] for p in ("data", "forward", "backward", "optimizer", "save"))
        )
        assert scalars["tokens_per_s"] == pytest.approx(1000 * world_size / scalars["step_s"], rel=1e-3)
        assert scalars["mfu"] == pytest.approx(6 * 15 * 1000 / scalars["step_s"] / 1e9, rel=1e-3)
    assert [each for each in lines if "jsonl is left out" in each] and [
        each for each in lines if "fails failed at step" in each
    ]
    assert len([each for each in lines if "fails failed" in each]) == 1


@on_every_rank(exactly=1)
def test_prometheus_is_scraped(rank: int, world_size: int) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    model, optimizer = wrapped()
    with sw.metrics(model, to=[f"prometheus:{port}"], every=1):
        run(model, optimizer, 3)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
    assert answer.status == 200 and "# TYPE shardwright_step_s gauge\nshardwright_step_s 0." in text
    if importlib.util.find_spec("prometheus_client") is None:
        return
    parser = importlib.import_module("prometheus_client.parser")
    families = {each.name: each.samples[0].value for each in parser.text_string_to_metric_families(text)}
    assert families["shardwright_step"] >= 3 and families["shardwright_share_compute"] > 0


@needs("tensorboard")
@on_every_rank(exactly=1)
def test_tensorboard_reads_what_is_written(rank: int, world_size: int) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tempfile.mkdtemp()
    model, optimizer = wrapped()
    with sw.metrics(model, to=[f"tensorboard:{folder}"], every=2):
        run(model, optimizer, 8)
    read = EventAccumulator(folder)
    read.Reload()
    assert len(read.Scalars("shardwright/step_s")) == 4


@needs("wandb")
@on_every_rank(exactly=1, spoils=True)
def test_wandb_has_the_run_offline(rank: int, world_size: int) -> None:
    folder = tempfile.mkdtemp()
    os.environ.update(WANDB_MODE="offline", WANDB_DIR=folder, WANDB_SILENT="true")
    model, optimizer = wrapped()
    with sw.metrics(model, to=["wandb:shardwright-test"], every=2):
        run(model, optimizer, 8)
    assert [each for each in Path(folder).rglob("run-*.wandb") if each.stat().st_size > 0]


class Runs:
    """A stand-in for wandb: the runs that were begun, and what each logged."""

    def __init__(self) -> None:
        self.run: Any = None
        self.begun: list[dict[str, Any]] = []
        self.logged: list[Any] = []

    def init(self, **options: Any) -> Any:
        self.begun.append(options)
        self.run, self.id = self, options["id"]
        return self

    def log(self, scalars: dict[str, Any]) -> None:
        self.logged.append(scalars["shardwright/step"])

    def finish(self) -> None:
        self.run = None


def trained_with_a_run(folder: str, tracker: Any, steps: int, restores_first: bool) -> int:
    """Train and save `steps` more in a job that has just begun. Return the first step."""
    assert account.tracker_runs == {}, "of another training"
    model, optimizer = wrapped()
    sys.modules["wandb"] = tracker
    with contextlib.ExitStack() as stack:
        stack.callback(sys.modules.pop, "wandb")
        checkpoints = stack.enter_context(sw.Checkpointer(f"{folder}/steps", model, optimizer))
        begin = checkpoints.restore() if restores_first else -1
        stack.enter_context(sw.metrics(model, to=["wandb:project"], every=1))
        begin = begin if restores_first else checkpoints.restore()
        before = len(tracker.logged)
        for step in range(begin, begin + steps):
            run(model, optimizer, 1)
            checkpoints.save(step)
        if begin and tracker.logged:
            assert tracker.logged[before:] == [*range(begin + 1, begin + steps + 1)]
    return begin


@on_every_rank(spoils=True)
def test_a_restart_goes_on_with_the_run_of_its_checkpoint(rank: int, world_size: int) -> None:
    folder, tracker = gather(tempfile.mkdtemp())[0], Runs()
    account.tracker_runs.clear()
    assert trained_with_a_run(folder, tracker, 3, True) == 0
    assert trained_with_a_run(folder, tracker, 2, True) == 3
    assert trained_with_a_run(folder, tracker, 2, False) == 5
    if rank == 0:
        (first, *later), names = tracker.begun, {"project", "id", "resume"}
        assert set(first) == names and later == [first] * 2 and first["resume"] == "allow"
        body = json.loads(Path(folder, "steps", "step-000007", "state.json").read_text())
        assert body["trackers"] == {"wandb": first["id"]}
    assert trained_with_a_run(f"{folder}/other", tracker, 1, True) == 0  # another training of this process
    model, optimizer = wrapped()
    with sw.Checkpointer(f"{folder}/steps", model, optimizer) as source:
        source.restore()
    sys.modules["wandb"] = tracker
    with sw.metrics(model, to=["wandb:tuned"]):  # which begins at once: no Checkpointer waits for its restore()
        assert (tracker.run is not None) == (rank == 0)
    del sys.modules["wandb"]
    runs = [each["id"] for each in tracker.begun]
    assert len(runs) == (5 if rank == 0 else 0) and len({*runs[2:]}) == min(3, len(runs))


@on_every_rank()
def test_wrong_input_is_one_sentence(rank: int, world_size: int) -> None:
    model, _ = wrapped()
    for options, sentence in (
        ({"to": ["mlflow:x"]}, "to= takes 'jsonl:PATH'"),
        ({"to": ["jsonl:"]}, "to= takes 'jsonl:PATH'"),
        ({"to": "wandb"}, "takes a list of trackers"),
        ({"to": ["prometheus:http"]}, "must end with a port"),
        ({"every": 0}, "every must be a whole number of steps from 1 on, got 0"),
        ({"tokens": 0}, "tokens must be at least 1 a step"),
        ({"peak_flops": -1.0}, "peak_flops must be above 0"),
    ):
        with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
            sw.metrics(model, **options)  # type: ignore[arg-type]
    sys.modules["torch.utils.tensorboard"] = None  # type: ignore[assignment]
    with heard() as lines, sw.metrics(model, to=["tensorboard:x"]):
        pass
    del sys.modules["torch.utils.tensorboard"]
    assert (rank != 0) == (lines == []), lines
