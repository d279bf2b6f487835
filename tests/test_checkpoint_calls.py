"""Law: calls of one Checkpointer come one at a time; a second thread, and a signal's handler in the midst of one, are told so, and
what they did not begin is not hurt."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
import torch

import shardwright as sw

REFUSED = "one call at a time"


def training(folder: Path, **options) -> tuple[torch.nn.Module, torch.optim.Optimizer, sw.Checkpointer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model, optimizer, sw.Checkpointer(folder, model, optimizer, **options)


@pytest.mark.parametrize(
    "call", [lambda c: c.wait(), lambda c: c.save(3), lambda c: c.progress], ids=["wait", "save", "progress"]
)
def test_two_threads_are_told_and_the_process_lives(tmp_path: Path, call) -> None:
    _, _, checkpoints = training(tmp_path, keep_last=1)
    over, heard = threading.Event(), []

    def other() -> None:
        while not over.is_set():
            try:
                call(checkpoints)
            except sw.CheckpointError as error:
                heard.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    for step in range(10):
        try:
            checkpoints.save(step)
        except sw.CheckpointError as error:
            heard.append(str(error))
    over.set()
    thread.join()
    assert all(REFUSED in sentence for sentence in heard)
    checkpoints.save(30)
    assert checkpoints.restore() == 31
    checkpoints.close()


def test_the_engine_itself_refuses_a_second_thread(tmp_path: Path) -> None:
    _, _, checkpoints = training(tmp_path, bandwidth_bytes_per_s=8 << 20)
    checkpoints.save(0)
    saver, begun = checkpoints._writer._saver, threading.Event()

    def wait() -> None:
        begun.set()
        saver.wait(0.3)

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    refusals = 0
    while thread.is_alive() and not refusals:
        for call in (lambda: saver.wait(0.0), saver.protect, saver.spare, saver.close):
            try:
                call()
            except sw.CheckpointError as error:
                assert REFUSED in str(error)
                refusals += 1
    thread.join()
    assert refusals >= 1
    checkpoints.close()


def test_a_step_beside_a_call_of_another_thread_fails_the_save(tmp_path: Path) -> None:
    """What the step overwrites could not be copied: nothing torn may be committed."""
    _, optimizer, checkpoints = training(tmp_path, snapshot="lazy", bandwidth_bytes_per_s=8 << 20)
    checkpoints.save(0)
    heard: list[str] = []

    def wait() -> None:
        try:
            checkpoints.wait()
        except sw.CheckpointError as error:
            heard.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while checkpoints._call._lock.acquire(blocking=False):
        checkpoints._call._lock.release()
    for _ in range(50):  # wait() looks at the save again and again
        optimizer.step()
    thread.join()
    checkpoints.close()
    steps = [path.name for path in tmp_path.iterdir() if path.name.startswith("step-")]
    assert (heard and "the optimizer stepped" in heard[0] and not steps) or (not heard and steps == ["step-000001"])


def test_a_handler_of_a_signal_is_told(tmp_path: Path) -> None:
    _, _, checkpoints = training(tmp_path, keep_last=1)
    heard, count = [], [0]

    def handler(*_: object) -> None:
        count[0] += 1
        try:
            checkpoints.save(1000 + count[0])
        except sw.CheckpointError as error:
            heard.append(str(error))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        while len(heard) < 3:
            checkpoints.save(0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert all(REFUSED in sentence and "sets a flag" in sentence for sentence in heard)
    checkpoints.close()
