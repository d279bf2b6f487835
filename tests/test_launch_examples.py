"""Laws of examples/launch: each file sets exactly the variables that sw.wrap reads, and gives every rank the right
number.

srun and torchrun are stand-ins that set the documented variables. The programs are stand-ins that print what sw.wrap
would read. `torch.distributed.run` itself parses the arguments for torchrun.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[1] / "examples" / "launch"
LAUNCH_PY = Path(__file__).resolve().parents[1] / "python" / "shardwright" / "comm/launch.py"
SCRIPTS = sorted(path.name for path in LAUNCH.iterdir() if path.suffix in (".sh", ".sbatch"))

#: variables for others than sw.wrap: threads, Gloo's interface, the scripts themselves
FOR_OTHERS = {"OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "PATH", "NODES", "NODE_RANK", "RANKS", "SW_TWO_HOSTS"}

SAYS_WHAT_IT_READS = f"""#!{sys.executable}
import dataclasses, importlib.util, json, os, sys
spec = importlib.util.spec_from_file_location("launch", {str(LAUNCH_PY)!r})
launch = sys.modules["launch"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launch)
print(json.dumps([dataclasses.asdict(launch.read_launch(os.environ)), sys.argv[1:]]))
"""

SRUN = f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
step = dict(SLURM_NTASKS="4", SLURM_STEP_NUM_TASKS="4", SLURM_STEP_ID="0", SLURM_STEP_NODELIST="cn[07,12]")
for task in range(4):
    own = dict(SLURM_PROCID=str(task), SLURM_LOCALID=str(task % 2), SLURMD_NODENAME=("cn07", "cn12")[task // 2])
    subprocess.run(words, env=os.environ | step | own, check=True)
"""

SAYS_ITS_ARGUMENTS = f"""#!{sys.executable}
import json, sys
print(json.dumps(sys.argv[1:]))
"""


@pytest.fixture
def run(tmp_path):
    """Return run(file or text, *arguments, **environment), which returns the JSON lines that the stand-ins printed."""
    for name, text in (("python", SAYS_WHAT_IT_READS), ("srun", SRUN), ("torchrun", SAYS_ITS_ARGUMENTS)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*command, **environment):
        done = subprocess.run(
            ["bash", *command], env={"PATH": f"{tmp_path}:/usr/bin:/bin", **environment}, cwd=LAUNCH.parents[1],
            capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_bash(name):
    subprocess.run(["bash", "-n", str(LAUNCH / name)], check=True)


@pytest.mark.parametrize("name", sorted(path.name for path in LAUNCH.iterdir()))
def test_exported_variables_are_read(name):
    from shardwright.comm.launch import VARIABLES

    exported = re.findall(r"^\s*export ([^#\n]+)", (LAUNCH / name).read_text(), re.MULTILINE)
    names = {word for line in exported for word in re.findall(r"\b([A-Z_]+)=", line)}
    assert names <= {*VARIABLES, *FOR_OTHERS}, names


def test_slurm_tasks_are_ranks_that_meet_on_the_first_node(run):
    batch = {"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
    found = run(
        str(LAUNCH / "slurm.sbatch"), "train.py", "--steps", "5", **batch,
        SLURM_JOB_ID="4242", SLURM_JOB_NODELIST="cn[07,12]", SLURM_CPUS_PER_TASK="2",
    )  # fmt: skip
    port = 10_000 + (101 * 4242) % 19_997
    for task, (launch, arguments) in enumerate(found):
        assert launch == {
            "launcher": "SLURM",
            "rank": task,
            "world_size": 4,
            "local_rank": task % 2,
            "master_addr": "cn07",
            "master_port": port,
        }
        assert arguments == ["train.py", "--steps", "5"]
    assert len(found) == 4


def torchrun_reads(arguments):
    """Parse arguments as torchrun does."""
    from torch.distributed.run import parse_args

    read = parse_args(arguments)
    return read.nnodes, read.node_rank, read.nproc_per_node, read.master_addr, read.master_port, read.training_script


def test_torchrun_gets_the_hosts_and_the_meeting_point(run):
    variables = {"MASTER_ADDR": "node0", "NODES": "3", "NODE_RANK": "2", "RANKS": "4"}
    (arguments,) = run(str(LAUNCH / "torchrun.sh"), "train.py", "--steps", "5", **variables)
    assert torchrun_reads(arguments) == ("3", 2, "4", "node0", 29500, "train.py")
    assert arguments[-2:] == ["--steps", "5"]


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "NODES", "NODE_RANK"])
def test_torchrun_sh_names_a_missing_variable(missing):
    variables = {"MASTER_ADDR": "node0", "NODES": "3", "NODE_RANK": "2"}
    del variables[missing]
    script = ["bash", str(LAUNCH / "torchrun.sh"), "train.py"]
    done = subprocess.run(script, env={"PATH": os.environ["PATH"], **variables}, capture_output=True, text=True)
    assert done.returncode and missing in done.stderr


def test_skypilot_nodes_are_torchrun_nodes(run):
    yaml = pytest.importorskip("yaml")
    task = yaml.safe_load((LAUNCH / "sky.yaml").read_text())
    assert task["num_nodes"] == 2
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n", "-c", task[part]], check=True)
    ours_first = 'export PATH="$PWD/.venv/bin:$PATH"\n'
    assert ours_first in task["run"]
    script = task["run"].replace(ours_first, "")  # else a real torchrun of this checkout would replace the stand-in
    for node in range(2):
        sets = {"SKYPILOT_NODE_IPS": "10.1.0.5\n10.1.0.9", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": str(node)}
        (arguments,) = run("-c", script, **sets, **{name: str(value) for name, value in task["envs"].items()})
        assert torchrun_reads(arguments) == ("2", node, "2", "10.1.0.5", 29500, "examples/train_gpt.py")


def needs_namespaces():
    probe = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, text=True)
    if probe.returncode or not shutil.which("tc") or not shutil.which("ip"):
        pytest.skip(f"no hosts here: {probe.stderr.strip() or 'ip and tc are needed'}")


def test_two_hosts_are_created_limited_and_removed(tmp_path):
    needs_namespaces()
    (tmp_path / "torchrun").write_text(
        '#!/bin/sh\necho "$(hostname) $(ip -4 -br addr show eth0)" $* $(getent hosts $MASTER_ADDR)\n'
    )
    (tmp_path / "torchrun").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RANKS": "3"}
    done = subprocess.run(
        ["bash", str(LAUNCH / "two_hosts.sh"), "x.py"], env=environment, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    *lines, sent = done.stdout.splitlines()
    for node, line in enumerate(sorted(lines)):
        assert line.startswith(f"host{node} eth0@") and f"10.77.0.{node + 1}/24" in line, line
        assert "--nnodes 2" in line and f"--node-rank {node}" in line and "--nproc-per-node 3" in line, line
        assert line.endswith("x.py 10.77.0.1 host0")  # torch warns about an address without a name
    assert re.fullmatch(r"host0 sent \d+ MB", sent)


@pytest.mark.skipif(os.environ.get("SW_TEST_LONG") != "1", reason="the long form: SW_TEST_LONG=1")
def test_the_demo_trains_on_two_hosts_and_saves_once(tmp_path):
    needs_namespaces()
    root = LAUNCH.parents[1]
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(root / "python")}
    small = [
        "--layers",
        "1",
        "--width",
        "32",
        "--heads",
        "2",
        "--context",
        "32",
        "--steps",
        "10",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(
        ["bash", str(LAUNCH / "two_hosts.sh"), str(root / "examples" / "train_gpt.py"), *small],
        env=os.environ | path, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *_, last, sent = done.stdout.splitlines()
    assert re.fullmatch(r"demo: validation loss .* nats/byte, 4 ranks, .*", last), done.stdout
    assert sent.startswith("host0 sent ") and [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == [
        "step-000010"
    ]


def test_two_hosts_end_with_the_script_even_if_it_is_killed(tmp_path):
    needs_namespaces()
    (tmp_path / "torchrun").write_text(f"#!/bin/sh\nexec sleep {SLEEP}\n")
    (tmp_path / "torchrun").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = subprocess.Popen(["bash", str(LAUNCH / "two_hosts.sh"), "x.py"], env=environment)
    try:
        wait_until(lambda: len(sleepers()) == 2)
    finally:
        script.kill()
        script.wait()
    wait_until(lambda: not sleepers())


SLEEP = f"{1000 + os.getpid()}.25"  # unique to this process


def sleepers():
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if SLEEP.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
        except OSError:
            pass
    return found


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
