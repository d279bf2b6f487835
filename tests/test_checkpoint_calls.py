"""Law: one Checkpointer runs one call at a time. A second thread, or a signal handler during a call, gets an error, and
the running call is not disturbed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import shardwright as sw
import torch

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


def test_the_engine_itself_bears_a_second_thread(tmp_path: Path) -> None:
    _, _, checkpoints = training(tmp_path, bandwidth_bytes_per_s=8 << 20)
    checkpoints.save(0)
    saver = checkpoints._writer._saver
    thread = threading.Thread(target=lambda: saver.wait(0.3))
    thread.start()
    while thread.is_alive():
        for call in (lambda: saver.wait(0.0), saver.protect, saver.spare):
            try:
                call()
            except sw.CheckpointError as error:
                assert REFUSED in str(error)
    thread.join()
    checkpoints.close()


def waiting(checkpoints: sw.Checkpointer) -> threading.Thread:
    """A program with a thread inside wait()."""
    thread = threading.Thread(target=checkpoints.wait, daemon=True)
    thread.start()
    while checkpoints._call._lock.acquire(blocking=False):
        checkpoints._call._lock.release()
    return thread


def test_steps_go_on_while_another_thread_waits_for_a_lazy_save(tmp_path: Path) -> None:
    model, optimizer, checkpoints = training(tmp_path, snapshot="lazy", bandwidth_bytes_per_s=8 << 20)
    before = model.weight.detach().clone()
    checkpoints.save(0)
    thread = waiting(checkpoints)
    for _ in range(50):
        optimizer.step()
    thread.join()
    assert checkpoints.restore() == 1 and torch.equal(model.weight, before)
    checkpoints.close()


def test_closing_and_leaving_wait_for_another_threads_wait(tmp_path: Path) -> None:
    for number, leave in enumerate((lambda c: c.close(), lambda c: c.__exit__(ValueError, ValueError("x"), None))):
        model, optimizer, checkpoints = training(tmp_path / str(number), bandwidth_bytes_per_s=8 << 20)
        checkpoints.save(0)
        thread = waiting(checkpoints)
        leave(checkpoints)
        thread.join()
        with sw.Checkpointer(tmp_path / str(number), model, optimizer) as again:  # the directory is free
            assert again.restore() == 1


def test_a_save_is_brought_to_its_end_at_exit_though_a_thread_waits_for_it(tmp_path: Path) -> None:
    program = f"""
import threading, torch, shardwright as sw
model = torch.nn.Linear(1024, 1024)
checkpoints = sw.Checkpointer({str(tmp_path)!r}, model, bandwidth_bytes_per_s=16 << 20)
checkpoints.save(0)
threading.Thread(target=checkpoints.wait, daemon=True).start()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert "step-000001" in os.listdir(tmp_path)


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


def test_who_goes_back_keeps_what_he_went_back_to(tmp_path: Path) -> None:
    _, _, checkpoints = training(tmp_path, keep_last=2)
    for step in (9, 19, 29):
        checkpoints.save(step)
        checkpoints.wait()
    assert checkpoints.restore(step=20) == 20
    for step in (20, 21):
        checkpoints.save(step)
        checkpoints.wait()
    assert checkpoints.steps() == [21, 22, 30]
    checkpoints.close()
