"""Law: the threads of a save yield to training. Their writes have the idle I/O class, they reuse staging memory, and an
abandoned save does not touch live memory again.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import platform
import time

import pytest
import shardwright as sw
import torch

MIB = 1 << 20
IDLE_CLASS = 3 << 13
_IOPRIO_GET = {"x86_64": 252, "aarch64": 31}.get(platform.machine())


class Training:
    """Train 24 MiB of parameters, which every step overwrites, during a save at 40 MB/s."""

    def __init__(self, folder: pathlib.Path, **options) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.ParameterList([torch.randn(6, MIB // 4) for _ in range(4)])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        for parameter in self.model:
            parameter.grad = torch.ones_like(parameter)
        options = {"snapshot": "lazy", "threads": 1, "bandwidth_bytes_per_s": 40_000_000} | options
        self.checkpoints = sw.Checkpointer(folder, self.model, self.optimizer, **options)


def save_threads() -> dict[str, list[int]]:
    """Return name -> thread ids of this process's saving threads."""
    found: dict[str, list[int]] = {}
    for task in os.listdir("/proc/self/task"):
        try:
            name = pathlib.Path("/proc/self/task", task, "comm").read_text().strip()
        except OSError:  # it has ended
            continue
        if name.startswith("sw-save"):
            found.setdefault(name, []).append(int(task))
    return found


def wait_for(condition, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.002)
    return bool(condition())


@pytest.mark.skipif(_IOPRIO_GET is None, reason="the number of ioprio_get is not known here")
@pytest.mark.parametrize("idle_io", [False, True])
def test_the_idle_class_of_the_disk_is_an_option(tmp_path: pathlib.Path, idle_io: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    training = Training(tmp_path, threads=3, idle_io=idle_io)
    with training.checkpoints as checkpoints:
        checkpoints.save(0)

        def classes() -> list[int]:
            return [libc.syscall(_IOPRIO_GET, 1, task) for task in save_threads().get("sw-save", [])]

        assert wait_for(lambda: checkpoints.progress["bytes_written"] > 0)
        wanted = IDLE_CLASS if idle_io else libc.syscall(_IOPRIO_GET, 1, 0)
        assert wait_for(lambda: classes() == [wanted] * 3), classes()
        assert libc.syscall(_IOPRIO_GET, 1, 0) != IDLE_CLASS, "the training's own"


def test_runs_are_copied_through_memory_that_is_kept(tmp_path: pathlib.Path) -> None:
    training = Training(tmp_path)
    with training.checkpoints as checkpoints:
        staged = set()
        for step in range(3):
            checkpoints.save(step)
            checkpoints.wait()
            training.optimizer.step()
            staged.add(checkpoints.progress["staging_bytes"])
        assert max(staged) <= 24 * MIB  # what two threads write at a time, and small files
        assert min(staged) >= 8 * MIB, (
            "runs are copied on the way through memory that is kept, not mapped for each save"
        )


def test_a_save_that_is_given_up_leaves_live_memory_alone(tmp_path: pathlib.Path) -> None:
    training = Training(tmp_path)
    with training.checkpoints as checkpoints:
        checkpoints.save(0)
        training.optimizer.step()
        checkpoints.wait()
        checkpoints.save(1)
        with torch.no_grad():
            training.model[0].mul_(2)  # not by the optimizer: the save cannot go on
        training.optimizer.step()
        with pytest.raises(sw.CheckpointError, match="was changed before the optimizer's step"):
            checkpoints.wait()
        values = [parameter.detach().clone() for parameter in training.model]
        checkpoints.save(2)
        training.optimizer.step()
        checkpoints.wait()
        assert checkpoints.restore() == 3
        assert all(torch.equal(a, b) for a, b in zip(training.model, values))
