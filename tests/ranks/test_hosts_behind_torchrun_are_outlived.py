"""Law: with `shardwright rank` between torchrun's agents of two hosts and their ranks, a killed rank, all ranks of a host and a whole host
are survived in place; the ranks come back as spares between two steps, those of a lost host by --join; and the job ends whole.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import LONG
from network import Network, network
from peer import PEER
from shardwright_tools.cli import main

pytestmark = pytest.mark.skipif(
    PEER == "torch" or not LONG, reason="thirteen programs that import torch; the quick form has its parts"
)
STOP, LIMIT_S = 1200, 240
PROGRAM = f"""
import os, sys, time, torch, shardwright as sw, torch.distributed as dist
folder = sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = sw.wrap(model, optimizer, zero=2, timeout_s=30.0, silent_s=2.0)
checkpoints = sw.Checkpointer(folder + "/steps", model, optimizer, memory_every=1, memory_replicas=1)
for step in sw.steps(checkpoints, {STOP}, wait_s=5.0):
    with step:
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.save(step, every={STOP})
        path = f"{{folder}}/at-{{os.uname().nodename}}-{{os.getpid()}}"
        with open(path + ".new", "w") as file:
            file.write(f"{{int(step)}} {{dist.get_world_size()}}")
        os.replace(path + ".new", path)
        time.sleep(0 if os.path.exists(folder + "/quick") else 0.1)
checkpoints.close()
"""


def at(folder: Path) -> dict[tuple[str, int], tuple[int, int]]:
    """Return the step and number of ranks of each process, by host and number."""
    found = {}
    for path in folder.glob("at-*[0-9]"):
        _, host, pid = path.name.split("-")
        step, size = path.read_text().split()
        found[host, int(pid)] = int(step), int(size)
    return found


def running(folder: Path, count: int) -> list[tuple[str, int]]:
    """Wait until `count` ranks train together and go on. Return them."""
    deadline, before = time.monotonic() + LIMIT_S, at(folder)
    while True:
        now = at(folder)
        moving = [each for each, (step, size) in now.items() if size == count and step > before.get(each, (-1, 0))[0]]
        if len(moving) == count:
            return moving
        assert time.monotonic() < deadline, (before, now)
        time.sleep(0.1)


def inside(made: Network, host: int) -> list[int]:
    """Return the processes on a host, all of which this test has started."""
    own, found = os.stat(made.namespaces(host)[0]).st_ino, []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}/ns/net").st_ino == own:
                found.append(int(name))
        except OSError:
            continue
    return found


def lose(made: Network, host: int) -> None:
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in inside(made, host):
            os.kill(pid, number)


@pytest.mark.timeout(900)
def test_what_is_lost_behind_torchrun_comes_back(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    own = [sys.executable, "-m", "shardwright", "rank"]
    (tmp_path / "train.py").write_text(PROGRAM)
    train = ["--", sys.executable, str(tmp_path / "train.py"), str(tmp_path)]
    with network(2) as made:
        started = []
        try:
            for host in range(2):
                torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(host)]
                torchrun += ["--master-addr", made.address(0), "--nproc-per-node", "2", "--no-python"]
                started.append(subprocess.Popen(made.command(host, *torchrun, *own, *train)))
            far = [pid for host, pid in running(tmp_path, 4) if host == "host1"]
            os.kill(far[0], signal.SIGKILL)
            running(tmp_path, 3)
            far = [pid for host, pid in running(tmp_path, 4) if host == "host1"]
            for pid in far:
                os.kill(pid, signal.SIGKILL)
            running(tmp_path, 2)
            running(tmp_path, 4)
            lose(made, 1)
            running(tmp_path, 2)
            join = ["--join", str(tmp_path / "steps"), "--spares", "2"]
            started.append(subprocess.Popen(made.command(1, *own, *join, *train)))
            running(tmp_path, 4)
            assert started[0].poll() is None, "torchrun's other agent keeps its ranks"
            (tmp_path / "quick").touch()
            assert started[2].wait(LIMIT_S) == 0
        finally:
            for host in range(2):
                lose(made, host)
            for each in started:
                each.wait()
    assert main(["ckpt", "verify", str(tmp_path / "steps" / f"step-{STOP:06d}")]) == 0
