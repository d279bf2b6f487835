"""Law: steps in memory need no room in /dev/shm; and a host that is killed with its agent leaves its last step to the others, by the
copy that its buddy keeps."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import test_hosts_join_and_leave as hosts

LONG = os.environ.get("SW_TEST_LONG") == "1"

IN_A_FULL_SHM = """
import os, sys, torch, shardwright as sw
for size in (4096, 1):
    try:
        with open("/dev/shm/full", "ab", buffering=0) as file:
            while True:
                file.write(bytes(size))
    except OSError as error:
        print("full:", error.errno)
model = torch.nn.Linear(300, 300)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with sw.Checkpointer(sys.argv[1], model, optimizer, memory_every=1) as checkpoints:
    for step in range(3):
        model(torch.ones(1, 300)).sum().backward()
        optimizer.step()
        checkpoints.save(step, every=100)
    weight = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    assert not checkpoints._memory.off, checkpoints._memory.off
    assert checkpoints.restore() == 3 and torch.equal(model.weight, weight)
    print("restored:", [name for name in os.listdir(sys.argv[1]) if name.startswith("step-")])
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="a mount of its own needs root and unshare"
)
def test_a_full_dev_shm_does_not_matter(tmp_path):
    script = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"'
    words = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        script,
        "sh",
        sys.executable,
        "-c",
        IN_A_FULL_SHM,
        str(tmp_path / "steps"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    if "mount:" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:3] == ["full: 28"] * 2 + ["restored: []"], done.stdout  # ENOSPC


#: each rank is a host; PLACE tells agents of one machine apart, as the network does those of several
CHANGES = {
    "folder = sys.argv[1]": """from shardwright.checkpoint.peers import Peers
from shardwright.comm import process_group
process_group._forced_hosts = [*range(int(os.environ.get("WORLD_SIZE", "1")))]
Peers.simulated_host = property(lambda self: int(os.environ.get("PLACE", "9")))
folder = sys.argv[1]""",
    "save_on=[signal.SIGTERM]": "memory_every=1, memory_replicas=int(count > 1)",
    "    step = checkpoints.restore()\n": """    step = checkpoints.restore()
    log.write(json.dumps(["start", rank, count, step]) + "\\n")
""",
    "checkpoints.save(step)": "checkpoints.save(step, every=10**6)",
}


def program_of_hosts():
    text = hosts.PROGRAM
    for old, new in CHANGES.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    assert text.count(str(hosts.STEPS)) == 2
    return text.replace(str(hosts.STEPS), "120")


@pytest.mark.skipif(not LONG, reason="starts ranks of torchrun four times")
@pytest.mark.timeout(900)
def test_a_host_that_is_killed_with_its_agent_leaves_its_last_step_to_its_buddy(tmp_path, monkeypatch):
    program = tmp_path / "train.py"
    program.write_text(program_of_hosts())
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="sw-test-hosts-") as folder, hosts.agents() as start:
        port = hosts.free_port()
        agents = []
        for number in range(2):
            monkeypatch.setenv("PLACE", str(number))
            agents.append(start(str(program), folder, port, number))
        for _ in range(2):
            hosts.wait_for_step_of(folder, 2)
        hosts.end(agents[1])
        reached = max(row[0] for row in hosts.rows(folder) if row[0] not in ("start", "end"))
        hosts.wait_for_step_of(folder, 1)
        assert not list(Path(folder, "steps").glob("step-*")), "the disk has nothing to go on from"
        begun = [row[3] for row in hosts.rows(folder) if row[0] == "start" and row[2] == 1]
        assert begun and begun[-1] >= reached > 1, (
            begun,
            reached,
            hosts.said(folder),
        )  # `reached` may have been under way
        Path(folder, "quick").touch()
        assert agents[0].wait(300) == 0, hosts.said(folder)
        alone = f"{folder}/alone"
        os.mkdir(alone)
        Path(alone, "quick").touch()
        subprocess.run([sys.executable, str(program), alone], check=True, timeout=400)
        (expected,), (found,) = ([row[3] for row in hosts.rows(each) if row[0] == "end"] for each in (alone, folder))
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
