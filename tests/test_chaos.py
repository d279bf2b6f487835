"""Law of `shardwright chaos`: each fault of the plan happens once, in its step, and the report says what it cost; a training under faults ends
with the bits of one without."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from shardwright_tools import chaos
from shardwright_tools.cli import main
from shardwright_tools.cli.chaos import Result, Run, lines_of, report_of

ROOT = Path(__file__).resolve().parents[1]
LONG = os.environ.get("SW_TEST_LONG") == "1"


def plan_file(folder, text, name="plan.json"):
    path = folder / name
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return str(path)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"fault": [{"kind": "kil", "rank": 0, "step": 1}]}, "fault 0 has the unknown kind 'kil': did you mean 'kill'?"),
        ({"fault": [{"kind": "earthquake", "rank": 0, "step": 1}]}, "unknown kind 'earthquake'; known are kill, stop, slow, raise, flip, disk, cut"),
        ({"fault": [{"kind": "kill", "step": 1}]}, "fault 0: rank must be a whole number of at least 0, got None"),
        ({"fault": [{"kind": "kill", "rank": 0, "step": 1, "when": 2}]}, "fault 0 has an unknown key 'when'"),
        ({"fault": [{"kind": "slow", "rank": 0, "step": 1, "seconds": -1}]}, "fault 0: seconds must be from 0 to 1e6, got -1"),
        ({"fault": [{"kind": "cut", "rank": 0, "step": 1}]}, "which needs the commands link.down and link.up"),
        ({"random": {"count": 0, "ranks": 2, "steps": 9}}, "random: count must be a whole number of at least 1, got 0"),
        ({"random": {"count": 3, "ranks": 2, "steps": 9, "kinds": ["kill", "boom"]}}, "random has the unknown kind 'boom'"),
        ({}, "the plan has no fault"),
        ("[", "Expecting value"),
        ([], "must hold a mapping, got list"),
    ],
)  # fmt: skip
def test_a_wrong_plan_is_one_sentence(tmp_path, capsys, given, sentence):
    path = plan_file(tmp_path, given)
    assert main(["chaos", "--plan", path, "--", "true"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"shardwright chaos: {path}") and sentence in said and said.count("\n") == 1


def test_a_plan_of_a_seed_is_the_same_each_time(tmp_path):
    entry = {"count": 50, "ranks": 3, "steps": 40, "seconds": 2.0}
    plans = [chaos.read_plan(plan_file(tmp_path, {"seed": seed, "random": entry})) for seed in (5, 5, 6)]
    assert plans[0] == plans[1] != plans[2]
    faults = plans[0].faults
    assert len(faults) == 50 and list(faults) == sorted(faults, key=lambda fault: fault.step)
    assert {fault.rank for fault in faults} == {0, 1, 2} and all(1 <= fault.step < 40 for fault in faults)
    assert all(0 <= fault.at < 1 and fault.seconds <= 2 for fault in faults)
    if sys.version_info >= (3, 11):
        toml = plan_file(
            tmp_path, "seed = 5\nrandom = {count = 50, ranks = 3, steps = 40, seconds = 2.0}\n", "plan.toml"
        )
        assert chaos.read_plan(toml) == plans[0]
    assert main(["chaos", "--plan", str(tmp_path / "none.json"), "--", "true"]) == 2


def test_a_report_tells_times_and_lost_steps():
    def event(time, name, rank=0, **facts):
        return {"event": name, "rank": rank, "pid": 1, "time": time, **facts}

    events = [
        event(0.0, "start", attempt="0"), event(0.1, "restored", step=0), event(1.0, "step", step=0), event(2.0, "step", step=1),
        event(2.5, "fault", 1, number=0, kind="kill"), event(2.6, "error", message="CommError: rank 1 died"),
        event(4.0, "start", attempt="1"), event(4.5, "restored", step=1), event(4.75, "stepping", step=1),
        event(5.0, "step", step=1), event(5.5, "fault", number=1, kind="slow"), event(6.0, "step", step=2),
        event(7.0, "end", digest=[7]),
    ]  # fmt: skip
    plan = chaos.Plan((chaos.Fault("kill", 1, 2), chaos.Fault("slow", 0, 3), chaos.Fault("kill", 0, 9)))
    report = report_of(plan, Result(events, 0, 7.0), Result([event(3.0, "end", digest=[7])], 0, 3.0))
    killed, slowed, never = report["faults"]
    assert (killed["detected_s"], killed["started_s"], killed["restarted_s"], killed["steps_lost"]) == (
        0.1,
        1.5,
        2.25,
        1,
    )
    assert slowed == {"kind": "slow", "rank": 0, "step": 3, "fired": True} and not never["fired"]
    assert report["state_equal"] is True and report["starts"] == 2
    text = "\n".join(lines_of(report))
    assert "kill      1      2     0.10 s     2.25 s          1" in text and "did not happen" in text
    other = report_of(plan, Result(events, 0, 7.0), Result([event(3.0, "end", digest=[8])], 0, 3.0))
    assert other["state_equal"] is False and "NOT EQUAL" in lines_of(other)[-1]
    assert report_of(plan, Result(events, 0, 7.0), None)["state_equal"] is None
    ended = report_of(plan, Result(events[:-1], None, 7.0), Result([event(3.0, "end", digest=[7])], 0, 3.0))
    assert ended["state_equal"] is None and "not compared: the command did not end" in lines_of(ended)[-1]


PROGRAM = """
import sys, torch, shardwright as sw
torch.manual_seed(0)
model = torch.nn.Linear(6, 3)
model, optimizer = sw.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), check_every=1)
with sw.Checkpointer(sys.argv[1], model, optimizer, keep_last=2) as checkpoints:
    for step in range(checkpoints.restore(), 8):
        model(torch.full((2, 6), step + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        try:
            checkpoints.save(step)
        except sw.CheckpointError as error:
            print("no room:", error.errno)
"""


def run_chaos(tmp_path, plan, *command):
    report = tmp_path / "report.json"
    words = [sys.executable, "-m", "shardwright", "chaos", "--plan", plan, "--report", str(report)]
    words += ["--timeout", "7000", "--", *command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=7100 if LONG else 150)
    return done, json.loads(report.read_text()) if report.exists() else {}


@pytest.mark.skipif(not LONG, reason="with steps in memory, below, the same faults beside a kill")
def test_faults_that_need_no_restart_leave_one_rank_with_the_same_bits(tmp_path):
    """One rank without a launcher. A full disk costs a save, a pause costs time."""
    program = plan_file(tmp_path, PROGRAM, "train.py")
    kinds = [("slow", 2), ("disk", 3), ("stop", 5)]
    plan = plan_file(
        tmp_path, {"fault": [{"kind": kind, "rank": 0, "step": step, "seconds": 0.2} for kind, step in kinds]}
    )
    done, report = run_chaos(tmp_path, plan, sys.executable, program, str(tmp_path / "{run}"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["fired"] for row in report["faults"]] == [True] * 3 and report["state_equal"] is True
    assert "no room: 27" in done.stdout  # EFBIG


WARM = (sys.executable, str(ROOT / "tests" / "warm_launcher.py"))
SURVIVE = str(ROOT / "examples" / "10_survive.py")


def test_descriptors_of_ranks_that_have_ended_are_closed():
    run, open_before = Run(chaos.Plan(()), ["true"], "run"), len(os.listdir("/proc/self/fd"))
    for _ in range(4):
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as rank:
            for _ in range(2):  # a program may say so twice
                run._take({"event": "start", "pid": rank.pid})
            assert list(run._pidfds) == [rank.pid]
            rank.kill()
            rank.wait()
    os.close(run._pidfds.pop(rank.pid))
    assert len(os.listdir("/proc/self/fd")) == open_before


@pytest.fixture
def in_memory():
    """A folder in which a save does not wait for a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="sw-test-chaos-") as folder:
        yield folder


@pytest.mark.skipif(not LONG, reason="starts ranks six times")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_killed_rank_and_a_flipped_bit_leave_the_bits_of_a_run_without(tmp_path, in_memory, zero):
    flip = [{"kind": "flip", "rank": 0, "step": 18}] if zero == 0 else []
    faults = [{"kind": "kill", "rank": 1, "step": 7}, *flip, {"kind": "raise", "rank": 0, "step": 25}]
    plan = plan_file(tmp_path, {"fault": faults})
    done, report = run_chaos(tmp_path, plan, *WARM, "3", "9", SURVIVE, in_memory + "/{run}", "--zero", str(zero))
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["state_equal"] is True and all(row["fired"] for row in report["faults"])
    assert all(row["steps_lost"] <= 2 for row in report["faults"])


@pytest.mark.skipif(not LONG, reason="starts ranks of torchrun six times")
@pytest.mark.timeout(900)
def test_the_plan_of_the_examples_leaves_the_bits_of_a_run_without(tmp_path, in_memory):
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "9",
    ]
    plan = str(ROOT / "examples" / "10_faults.json")
    done, report = run_chaos(tmp_path, plan, *torchrun, SURVIVE, in_memory + "/{run}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["state_equal"] is True and [row["fired"] for row in report["faults"]] == [True] * 3, report


@pytest.mark.skipif(not LONG, reason="starts ranks of torchrun four times")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_torchruns_defaults_restart(tmp_path, in_memory, rendezvous):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    options = ["--standalone"] if rendezvous == "c10d" else ["--master-port", port]
    plan = plan_file(tmp_path, {"fault": [{"kind": "kill", "rank": 1, "step": 7}]})
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node", "2", "--max-restarts", "3"]
    done, report = run_chaos(tmp_path, plan, *torchrun, SURVIVE, in_memory + "/{run}", "--steps", "12")
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["state_equal"] is True and report["starts"] == 2


def test_with_steps_in_memory_at_most_the_running_one_is_lost(tmp_path, in_memory):
    """The disk has no checkpoint when a rank is killed, nor when the disk is full."""
    kinds = [("kill", 1, 5), ("disk", 0, 9), ("stop", 1, 10), ("slow", 0, 11)]
    faults = [{"kind": kind, "rank": rank, "step": step, "seconds": 0.1} for kind, rank, step in kinds]
    plan = plan_file(tmp_path, {"fault": faults})
    words = [*WARM, "2", "9", SURVIVE, in_memory + "/{run}", "--steps", "13", "--memory", "1", "--every", "12"]
    done, report = run_chaos(tmp_path, plan, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["state_equal"] is True and all(row["fired"] for row in report["faults"])
    assert [row.get("steps_lost", 0) <= 1 for row in report["faults"]] == [True] * 4, report["faults"]
    assert report["starts"] == 2


IN_MEMORY = ("--memory", "1", "--every", "10")


@pytest.mark.skipif(not LONG, reason="hundreds of faults, of which most restart all ranks")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("count", "tier"), [(1000, ()), (100, IN_MEMORY)], ids=["disk", "memory"])
def test_random_faults_leave_the_bits_of_a_run_without(tmp_path, in_memory, count, tier):
    kinds, steps = ["kill", "stop", "slow", "raise", "disk", "flip"], count * 11 // 10
    random = {"count": count, "ranks": 2, "steps": steps, "seconds": 1.0, "kinds": kinds}
    plan = plan_file(tmp_path, {"seed": 7, "random": random})
    words = [*WARM, "2", str(2 * count), SURVIVE, in_memory + "/{run}", "--steps", str(steps), *tier]
    done, report = run_chaos(tmp_path, plan, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["state_equal"] is True, report["faults"]
    assert not tier or {row.get("steps_lost", 0) for row in report["faults"]} <= {0, 1}, report["faults"]
    fired = [row for row in report["faults"] if row["fired"]]
    ended = {row["step"] for row in fired if row["kind"] not in ("slow", "disk")}
    alone = [row for row in report["faults"] if not row["fired"] and row["step"] not in ended]
    assert len(fired) >= 0.9 * count and not alone, (
        alone
    )  # a fault of a rank that another has ended in that step does not fire


@pytest.mark.skipif(not LONG, reason="starts ranks of two agents of torchrun six times")
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="network namespaces need root and iproute2")
@pytest.mark.timeout(600)
def test_a_cut_link_between_hosts_and_a_killed_one_leave_the_bits_of_a_run_without(tmp_path, in_memory, monkeypatch):
    name = f"sw{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr}")
    subprocess.run(["ip", "netns", "del", name], check=True)
    monkeypatch.setenv("SW_HOSTS", name)
    monkeypatch.setenv("PATH", f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    plan = json.loads((ROOT / "examples" / "10_cut.json").read_text().replace("sw-b", f"{name}-b"))
    hosts = str(ROOT / "examples" / "10_two_hosts.sh")
    options = ["--memory", "1", "--replicas", "1", "--every", "10", "--silent", "1"]
    done, report = run_chaos(tmp_path, plan_file(tmp_path, plan), hosts, in_memory + "/{run}", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    cut, killed = report["faults"]
    assert report["state_equal"] is True and cut["detected_s"] < 3 and killed["detected_s"] < 2, report
    assert cut["restarted_s"] < 60 and killed["restarted_s"] < 60, report


@pytest.mark.skipif(not LONG, reason="starts ranks of torchrun twice")
@pytest.mark.timeout(600)
def test_a_signal_saves_ends_with_0_and_another_world_size_goes_on(tmp_path, in_memory):
    """Each rank's weights after 40 steps of 2 and 3 ranks are those of 2 ranks alone, up to rounding."""

    def run(world_size, folder, steps):
        words = [*WARM, str(world_size), "0", SURVIVE, folder, "--steps", str(steps)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stdout + done.stderr
        return [float(line.split("weights ")[1]) for line in done.stdout.splitlines() if "weights" in line]

    alone = run(2, in_memory + "/alone", 40)
    run(2, in_memory + "/changed", 20)
    found = run(3, in_memory + "/changed", 40)
    assert len(found) == 3 and len(set(found)) == 1 and found[0] == pytest.approx(alone[0], rel=1e-6)
    steps = in_memory + "/signal"
    words = [*WARM, "2", "0", SURVIVE, steps, "--steps", "100000"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while process.poll() is None and not list(Path(steps).glob("step-0*")):
            time.sleep(0.05)
        (rank, *_) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(rank), signal.SIGUSR1)
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0 and said.count("is saved after a signal") == 2, said
