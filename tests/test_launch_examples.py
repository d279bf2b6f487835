"""Laws of examples/launch: each file is what `shardwright plan` prints for the command in its first comment, starts its
ranks on CPUs, and sets exactly the variables that sw.wrap reads.

srun, scontrol and ssh are stand-ins: two agents on this host are the nodes. Only two_hosts.sh is written by hand.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[1] / "examples" / "launch"
LAUNCH_PY = Path(__file__).resolve().parents[1] / "python" / "shardwright" / "comm/launch.py"
SCRIPTS = sorted(path.name for path in LAUNCH.iterdir() if path.suffix in (".sh", ".sbatch"))
LONG = os.environ.get("SW_TEST_LONG") == "1"
MADE = sorted({path.name for path in LAUNCH.iterdir()} - {"two_hosts.sh", "hosts"})

#: variables for others than sw.wrap: threads, Gloo's interface, the scripts themselves
FOR_OTHERS = {"OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "SW_TWO_HOSTS", "RUN_FOLDER"}
FOR_OTHERS |= {"ACCELERATE_USE_CPU"}

SAYS_WHAT_IT_READS = f"""#!{sys.executable}
import importlib.util, json, os, sys
spec = importlib.util.spec_from_file_location("launch", {str(LAUNCH_PY)!r})
launch = sys.modules["launch"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launch)
print(json.dumps([launch.read_launch(os.environ)._asdict(), sys.argv[1:]]))
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


@pytest.fixture
def run(tmp_path):
    """Return run(file or text, *arguments, **environment), which returns the JSON lines that the stand-ins printed."""
    for name, text in (("python", SAYS_WHAT_IT_READS), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*command, **environment):
        done = subprocess.run(
            ["bash", *command], env={"PATH": f"{tmp_path}:/usr/bin:/bin", **environment}, cwd=LAUNCH.parents[1],
            capture_output=True, text=True, timeout=170,
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
        "-c", "srun --kill-on-bad-exit=1 python train.py --steps 5", **batch,
        SLURM_JOB_ID="4242", SLURM_JOB_NODELIST="cn[07,12]",
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


@pytest.mark.parametrize("name", MADE)
def test_a_file_is_what_the_plan_prints(name, capsys, monkeypatch):
    from shardwright_tools.cli import main

    text = (LAUNCH / name).read_text()
    made_by = next(line for line in text.splitlines() if line.startswith("# "))
    monkeypatch.chdir(LAUNCH.parents[1])
    assert main(shlex.split(made_by.removeprefix("# made by: shardwright "))) == 0
    assert capsys.readouterr().out == text


SRUN_TORCHRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
"$@" &
"$@" &
trap 'kill $(jobs -p)' TERM
echo $$ > srun.pid
status=0
for child in $(jobs -p); do
    wait $child || status=$?
    wait $child || status=$?
done
exit $status
"""
SCANCEL = """#!/bin/sh
[ "$*" = "--signal=TERM 7" ] && kill $(cat srun.pid)
"""
SCONTROL = """#!/bin/sh
[ "$1" = show ] && echo 127.0.0.1 || echo "$@" > asked
"""


def started(name, folder, program):
    """Start the command of a file with another program, as its scheduler does, and return the processes."""
    tools = {"srun": SRUN_TORCHRUN, "scontrol": SCONTROL, "scancel": SCANCEL, "ssh": '#!/bin/sh\nexec bash -c "$2"\n'}
    for tool, text in tools.items():
        (folder / tool).write_text(text)
        (folder / tool).chmod(0o755)
    (folder / "train.py").write_text(program)
    text = (LAUNCH / name).read_text()
    if name.endswith(".yaml"):
        whole = pytest.importorskip("yaml").safe_load(text)
        text = whole.get("run") or "".join(
            whole["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["args"]
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for old, new in (("29500", port), ("examples/train_gpt.py", "train.py"), ('t="node0', 't="127.0.0.1')):
        text = text.replace(old, new)
    text = text.replace("gpt-ranks-0-0.gpt", "127.0.0.1")
    root = LAUNCH.parents[1]
    environment = {
        "PATH": f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(root / "python"),
        "HOME": str(folder), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "cn[07,12]", "SLURM_CPUS_PER_TASK": "2",
        "MASTER_ADDR": "127.0.0.1", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_TASK_ID": "t-1", "RUN_ROOT": "runs",
    }  # fmt: skip
    nodes = 1 if name in ("slurm.sbatch", "hostfile.sh") else 2
    return [
        subprocess.Popen(
            ["bash", "-c", text],
            cwd=folder,
            env={**environment, "NODE_RANK": str(node)},
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        for node in range(nodes)
    ]


WRITES_ITS_PLACE = "import os\nopen('-'.join(map(os.environ.get, ('RANK', 'WORLD_SIZE', 'OMP_NUM_THREADS'))), 'w')\n"


def assert_four_ranks_ran(folder, out):
    assert sorted(path.name for path in folder.glob("?-?-?")) == [f"{rank}-4-1" for rank in range(4)], out


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MADE if LONG else ["accelerate.sh"])  # the next law starts slurm.sbatch
def test_its_command_starts_ranks_on_cpus(name, tmp_path):
    nodes = started(name, tmp_path, WRITES_ITS_PLACE)
    try:
        out = "".join(node.communicate(timeout=240)[0] for node in nodes)
    finally:
        [os.killpg(node.pid, signal.SIGKILL) for node in nodes if node.poll() is None]
    assert [node.returncode for node in nodes] == [0] * len(nodes), out
    assert_four_ranks_ran(tmp_path, out)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("end", ["saved", "done", "failed"] if LONG else ["saved"])
def test_slurm_takes_a_job_back_that_was_told_to_end(end, tmp_path):
    """A job that the time limit ends is queued again; one that is done, or fails, is not."""
    program = (
        WRITES_ITS_PLACE + "import signal, sys, time\n"
        "def told(*_):\n    " + ("open('done', 'w'); " * (end == "done")) + "sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, told)\n"
        "open('ready' + os.environ['RANK'], 'w')\n" + ("sys.exit(3)\n" if end == "failed" else "time.sleep(200)\n")
    )
    (job,) = started("slurm.sbatch", tmp_path, program)
    try:
        if end != "failed":
            wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 4, 200)
            job.send_signal(signal.SIGUSR1)
        out, _ = job.communicate(timeout=240)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert_four_ranks_ran(tmp_path, out)
    assert (job.returncode != 0) == (end == "failed"), out
    assert (tmp_path / "asked").exists() == (end == "saved"), out


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
        ["bash", str(LAUNCH / "two_hosts.sh"), "x.py"], env=environment, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr
    *lines, sent = done.stdout.splitlines()
    for node, line in enumerate(sorted(lines)):
        assert line.startswith(f"host{node} eth0@") and f"10.77.0.{node + 1}/24" in line, line
        assert "--nnodes 2" in line and f"--node-rank {node}" in line and "--nproc-per-node 3" in line, line
        assert line.endswith("x.py 10.77.0.1 host0")  # torch warns about an address without a name
    assert re.fullmatch(r"host0 sent \d+ MB", sent)


@pytest.mark.skipif(not LONG, reason="the long form: SW_TEST_LONG=1")
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
