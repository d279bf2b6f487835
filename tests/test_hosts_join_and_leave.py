"""Law: under `torchrun --nnodes 1:3` hosts join and leave a running job. Each step trains its samples once at any world
size, and the final parameters are those of one rank, up to rounding. All agents run on one machine.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

LONG = os.environ.get("SW_TEST_LONG") == "1"
STEPS, SIZE, GLOBAL_BATCH = 400, 200, 12

PROGRAM = f"""
import json, os, signal, sys, time, torch, shardwright as sw
folder = sys.argv[1]
torch.manual_seed(0)
data = torch.randn({SIZE}, 8)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
model, optimizer = sw.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), zero=1, timeout_s=60.0)
batches = sw.elastic.batches({GLOBAL_BATCH}, micro_batch=4)
sampler = sw.elastic.Sampler({SIZE}, batches, seed=3)
scheduler = sw.elastic.by_samples(optimizer, sampler, lambda samples: 0.5 ** (samples / 3000))
rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
log = open(f"{{folder}}/{{time.time():.6f}}-{{os.getpid()}}", "w", buffering=1)
with sw.Checkpointer(
    f"{{folder}}/steps", model, optimizer, scheduler=[scheduler, sampler], keep_last=2, save_on=[signal.SIGTERM]
) as checkpoints:
    step = checkpoints.restore()
    while step < {STEPS}:
        mine, total = [], 0.0
        for samples in sampler:
            mine += samples
            with model.no_sync() if sampler.accumulates() else torch.enable_grad():
                x = data[samples]
                loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).sin())
                (loss * batches.scale(len(x))).backward()
            if sampler.is_last:
                optimizer.step()
                optimizer.zero_grad()
                sampler.step()
                scheduler.step()
                log.write(json.dumps([step, rank, count, mine, optimizer.param_groups[0]["lr"]]) + "\\n")
                mine = []
                checkpoints.save(step)
                step += 1
                time.sleep(0 if os.path.exists(f"{{folder}}/quick") else 0.5)
                if step == {STEPS}:
                    break
    with sw.full_parameters(model):
        found = [parameter.double().sum().item() for parameter in model.parameters()]
    log.write(json.dumps(["end", rank, count, found]) + "\\n")
"""


def free_port():
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


def rows(folder):
    """Return what ranks wrote, in the order of their starts."""
    found = []
    for path in sorted(Path(folder).glob("*-*")):
        if path.is_file():
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # of a rank that was killed
                    found.append(json.loads(line))
    return found


def said(folder):
    return "".join(path.read_text() for path in sorted(Path(folder).glob("agent*")))


def wait_for_step_of(folder, world_size, limit_s=400.0):
    """Wait until ranks of this world size have trained two more steps."""
    deadline = time.monotonic() + limit_s
    had = sum(row[2] == world_size for row in rows(folder))
    while sum(row[2] == world_size for row in rows(folder)) < had + 2 * world_size:
        assert time.monotonic() < deadline, (world_size, rows(folder)[-3:], said(folder))
        time.sleep(0.1)


@contextlib.contextmanager
def agents():
    """Yield a function that starts an agent of one rank in its own session."""
    started = []

    def start(program, folder, port, number):
        words = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "1:3",
            "--nproc-per-node",
            "1",
            "--max-restarts",
            "20",
        ]
        words += [
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"127.0.0.1:{port}",
            "--local-addr",
            "127.0.0.1",
            "--monitor-interval",
            "0.1",
        ]
        conf = f"is_host={int(number == 0)},last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
        words += ["--rdzv-id", "one", "--rdzv-conf", conf, program, folder]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        # without it an agent of torch 2.13 that joins waits for an address that the first one has told in its own first round alone
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with open(f"{folder}/agent{number}", "w") as said:
            started.append(subprocess.Popen(words, env=environment, stdout=said, stderr=said, start_new_session=True))
        return started[-1]

    try:
        yield start
    finally:
        for agent in started:
            end(agent)


def children_of(pid):
    with contextlib.suppress(FileNotFoundError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def end(agent):
    """Kill an agent and its rank by pid, as if the host were lost."""
    ranks = children_of(agent.pid)
    agent.kill()
    agent.wait()
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(not LONG, reason="starts ranks of torchrun eight times")
@pytest.mark.timeout(900)
def test_hosts_join_and_leave_a_training(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="sw-test-hosts-") as folder, agents() as start:
        port = free_port()
        first = start(str(program), folder, port, 0)
        wait_for_step_of(folder, 1)
        second = start(str(program), folder, port, 1)
        wait_for_step_of(folder, 2)
        third = start(str(program), folder, port, 2)
        wait_for_step_of(folder, 3)
        end(third)
        wait_for_step_of(folder, 2)
        Path(folder, "quick").touch()
        assert first.wait(300) == 0 and second.wait(60) == 0, said(folder)
        found = rows(folder)
        alone = f"{folder}/alone"
        os.mkdir(alone)
        Path(alone, "quick").touch()
        subprocess.run([sys.executable, str(program), alone], check=True, timeout=120)
        (expected,) = [row[3] for row in rows(alone) if row[0] == "end"]
        ends = [row[3] for row in found if row[0] == "end"]
        assert len(ends) == 2 and ends[0] == ends[1] == pytest.approx(expected, rel=1e-5, abs=1e-6)
        lasts = {}
        for step, rank, count, samples, rate in (row for row in found if row[0] != "end"):
            if lasts.get(step, (0,))[0] != count or rank in lasts[step][1]:
                lasts[step] = count, {}, rate  # trained again after a start
            lasts[step][1][rank] = samples
        stream = [
            sample for step in range(STEPS) for _, samples in sorted(lasts[step][1].items()) for sample in samples
        ]
        epochs = [stream[begin : begin + SIZE] for begin in range(0, len(stream) - SIZE + 1, SIZE)]
        assert len(epochs) == STEPS * GLOBAL_BATCH // SIZE and all(sorted(each) == [*range(SIZE)] for each in epochs)
        assert {lasts[step][0] for step in range(STEPS)} == {1, 2, 3}
        of_one = [row[4] for row in rows(alone) if row[0] != "end"]
        assert [lasts[step][2] for step in range(STEPS)] == pytest.approx(of_one)
