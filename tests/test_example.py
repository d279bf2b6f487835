"""Laws of the main job: it runs unchanged under torchrun, as one process and under accelerate; the loss falls; a resumed
or killed run goes on with the losses of the uninterrupted one; neither depends on what ranks slice; the last line is the one that README
quotes."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
EXAMPLE = str(ROOT / "examples" / "train_gpt.py")
SMALL = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--seed", "3", "--minutes", "5"]
LAST_LINE = re.compile(r"demo: validation loss ([\d.]+) -> ([\d.]+) nats/byte, (\d+) ranks?, ([\d,]+) tokens/s")

LAUNCHERS = {
    "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"],
    "one process": [sys.executable],
    "accelerate": [
        str(BIN / "accelerate"),
        "launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--main_process_port",
        "0",
    ],
}


def start(launcher, *arguments):
    """The process: in a session of its own, the launcher and its ranks, nobody else."""
    command = LAUNCHERS[launcher]
    if not Path(command[0]).exists():
        pytest.skip(f"{command[0]} is not installed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "python"), environment.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [*command, EXAMPLE, *SMALL, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
    )  # fmt: skip


def children_of(pid):
    """Ranks: torchrun gives each a session of its own, out of reach of killpg."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def run(launcher, *arguments):
    """Everything printed."""
    process = start(launcher, *arguments)
    try:
        output, errors = process.communicate(timeout=150)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
    assert process.returncode == 0, output + errors
    return output


def losses(output):
    return re.findall(r"step +(\d+) +validation ([\d.]+)", output)


@pytest.mark.parametrize(("launcher", "ranks"), [("torchrun", 2), ("one process", 1), ("accelerate", 2)])
def test_the_loss_falls_under_every_launcher(tmp_path, launcher, ranks):
    output = run(launcher, "--steps", "60", "--out", str(tmp_path))
    found = LAST_LINE.fullmatch(output.strip().splitlines()[-1])
    assert found, output
    first, last, world, _ = found.groups()
    assert int(world) == ranks
    assert float(last) < 0.8 * float(first), output
    assert "sample:" in output
    assert newest(tmp_path) == "step-000060"


def test_a_resumed_run_goes_on_where_the_first_stopped(tmp_path):
    whole = run("torchrun", "--steps", "20", "--out", str(tmp_path / "whole"))
    run("torchrun", "--steps", "10", "--out", str(tmp_path / "halves"))
    resumed = run("torchrun", "--steps", "20", "--resume", "--out", str(tmp_path / "halves"))
    assert losses(whole)[-1] == losses(resumed)[-1]
    assert losses(whole)[-1][0] == "20", json.dumps([whole, resumed])


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run("torchrun", "--steps", "300", "--out", str(whole))
    process = start("torchrun", "--steps", "300", "--out", str(killed))
    try:
        deadline = time.monotonic() + 60
        while not newest(killed) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        for pid in [*children_of(process.pid), process.pid]:  # every rank, in the middle of a step
            os.kill(pid, 9)
        process.communicate()
    assert "step-000100" <= newest(killed) < "step-000300"
    run("torchrun", "--steps", "300", "--resume", "--zero", "2", "--out", str(killed))
    assert saved_losses(killed) == saved_losses(whole)


def report_without_speed(output):
    """The printed losses."""
    return re.sub(r" +[\d,]+ tokens/s", "", "\n".join(line for line in output.splitlines() if line.startswith("step")))


def newest(folder):
    """The newest checkpoint's name, or ""."""
    if not (folder / "checkpoints").exists():
        return ""
    names = [n for n in os.listdir(folder / "checkpoints") if re.fullmatch(r"step-\d+", n)]
    return max(names, default="")


def saved_losses(folder):
    """(step, loss) of training and of validation, every digit."""
    state = json.loads((folder / "checkpoints" / newest(folder) / "state.json").read_text())["user_state"]
    return tuple([tuple(pair["$tuple"]) for pair in state[kind]] for kind in ("train", "validation"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """20 steps with nothing sliced: what was printed, and the losses."""
    folder = tmp_path_factory.mktemp("whole")
    output = run("torchrun", "--steps", "20", "--zero", "0", "--out", str(folder))
    assert "step    20" in output
    return report_without_speed(output), saved_losses(folder)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_losses_are_the_same_at_every_stage(tmp_path, whole, zero):
    output = run("torchrun", "--steps", "20", "--zero", str(zero), "--out", str(tmp_path))
    assert report_without_speed(output) == whole[0]
    assert saved_losses(tmp_path) == whole[1]


def test_a_run_stopped_at_one_stage_goes_on_at_another(tmp_path, whole):
    for steps, zero in ((5, 2), (10, 0), (15, 3), (20, 1)):
        resume = ["--resume"] if steps > 5 else []
        run("torchrun", "--steps", str(steps), "--zero", str(zero), "--out", str(tmp_path), *resume)
    train, validation = saved_losses(tmp_path)
    assert [step for step, _ in train] == list(range(1, 21))
    assert (train, validation[-1]) == (whole[1][0], whole[1][1][-1])


@pytest.mark.parametrize("compress", ["bf16", "int4"])
def test_the_loss_falls_with_compressed_gradients(tmp_path, compress):
    output = run("torchrun", "--steps", "40", "--compress", compress, "--zero", "2", "--out", str(tmp_path))
    first, last, *_ = LAST_LINE.fullmatch(output.strip().splitlines()[-1]).groups()
    assert float(last) < 0.85 * float(first), output


def test_the_compression_study_in_its_short_form(tmp_path):
    study = str(ROOT / "examples" / "compression_study.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "python"), environment.get("PYTHONPATH", "")])
    short = ["--seeds", "1", "--steps", "20", "--width", "32", "--out", str(tmp_path)]
    done = subprocess.run(
        [*LAUNCHERS["torchrun"], study, *short],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    head, *rows = [json.loads(line) for line in (tmp_path / "compression_study.jsonl").read_text().splitlines()]
    assert head["seeds"] == 1 and len(rows) == 14
    for row in rows:
        wide = {"none": 0.0, "bf16": 1.0, "fp16": 1.0, "int8": 3.0}.get(row["arm"], 15.0)
        assert abs(row["difference"]) <= wide, row
