"""Laws of the tests' own hosts: what they share, each way in which a link fails, and that nothing of them stays behind."""

import os
import signal
import socket
import subprocess
import time

import network
import pytest
import torch
import torch.distributed as dist
from harness import gather


def where_it_is(rank, world_size):
    name = f"\0{os.environ['MASTER_PORT']}-{rank}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen()
    gather(None)
    reached = []
    for other in range(world_size):
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(f"\0{os.environ['MASTER_PORT']}-{other}")
                reached.append(other)
            except OSError:
                pass
    gather(None)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return socket.gethostname(), reached, total.item(), int(os.environ["LOCAL_RANK"]), os.environ["LOCAL_WORLD_SIZE"]


def test_abstract_sockets_stay_on_their_host_and_a_process_group_spans_all(hosts):
    with hosts(2, 1) as lab:
        values = lab.team.run(where_it_is)
    assert values == [
        ("host0", [0, 1], 3.0, 0, "2"),
        ("host0", [0, 1], 3.0, 1, "2"),
        ("host1", [2], 3.0, 0, "1"),
    ]


HEAR = "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('', 5000)); print(flush=True)\n"
HEAR += "for _ in range(1000): print(s.recv(99).decode(), flush=True)"
SAY = "import socket, sys; socket.socket(type=socket.SOCK_DGRAM).sendto(sys.argv[2].encode(), (sys.argv[1], 5000))"


@pytest.fixture
def pair():
    """Two hosts without ranks. heard(host) returns the next datagram there, or ""; say(host, text) sends one."""
    with network.network(2) as made:
        ears = [
            subprocess.Popen(made.command(host, "python3", "-c", HEAR), stdout=subprocess.PIPE, text=True)
            for host in range(2)
        ]
        try:
            for ear in ears:
                ear.stdout.readline()
                os.set_blocking(ear.stdout.fileno(), False)

            def arrives(host, text, within_s=3.0):
                """Send repeatedly: a link that has just come up drops packets until the kernel has noticed."""
                say = made.command(host, "python3", "-c", SAY, made.address(1 - host), text)
                deadline = None
                while deadline is None or time.monotonic() < deadline:
                    subprocess.run(say, capture_output=True, timeout=10)
                    said = time.monotonic()
                    deadline = deadline or said + within_s
                    while time.monotonic() < min(deadline, said + 0.3):
                        if ears[1 - host].stdout.readline().strip() == text:  # an older one may come late
                            return True
                        time.sleep(0.01)
                return False

            made.arrives = arrives
            yield made
        finally:
            for ear in ears:
                ear.kill()
                ear.wait()
                ear.stdout.close()


def test_a_cut_is_both_ways_and_a_mute_host_still_hears(pair):
    assert pair.arrives(0, "a") and pair.arrives(1, "b")
    pair.unplug(1)
    assert not pair.arrives(0, "c", 0.4) and not pair.arrives(1, "d", 0.4)
    pair.plug(1)
    assert pair.arrives(0, "e") and pair.arrives(1, "f")
    pair.mute(0)
    assert pair.arrives(1, "g") and not pair.arrives(0, "h", 0.4)


def sends(rank, world_size, size_bytes):
    dist.barrier()
    begin = time.monotonic()
    if rank == 0:
        dist.send(torch.empty(size_bytes, dtype=torch.uint8), 1)
    else:
        dist.recv(torch.empty(size_bytes, dtype=torch.uint8), 0)
    dist.barrier()
    return time.monotonic() - begin


def test_a_limited_link_passes_its_rate_and_counts_its_bytes(hosts):
    size = 10_000_000
    with hosts(1, 1, rate="400mbit") as lab:
        lab.team.run(sends, size_bytes=1000)
        before = lab.network.bytes_sent(0)
        seconds = lab.team.run(sends, size_bytes=size)
        sent = lab.network.bytes_sent(0) - before
    assert 0.95 * size * 8 / 400e6 < min(seconds), seconds
    assert size <= sent < 1.02 * size, sent


def test_killing_a_host_ends_its_ranks_and_no_other(hosts):
    with hosts(1, 2) as lab:
        lab.team.run(where_it_is)
        lab.team.start(sleeps)
        lab.kill(1)
        outcomes = lab.team.wait(20, patient=True)
    assert outcomes[0].ok and [outcome.ended for outcome in outcomes[1:]] == ["signal SIGKILL"] * 2


def sleeps(rank, world_size):
    time.sleep(1)


def test_hosts_end_with_the_process_that_made_them_even_if_it_is_killed():
    with network.network(1):
        pass  # or skip
    script = "import network, os, sys; n = network.Network(2)\n"
    script += (
        "print(*(os.readlink(path) for host in range(3) for path in n.namespaces(host)), flush=True); sys.stdin.read()"
    )
    maker = subprocess.Popen(
        ["python3", "-c", script],
        cwd=os.path.dirname(__file__),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    spaces = set(maker.stdout.readline().split())
    assert len(spaces) == 6 and spaces <= namespaces_in_use()
    maker.send_signal(signal.SIGKILL)
    maker.communicate()
    deadline = time.monotonic() + 10
    while spaces & namespaces_in_use():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def namespaces_in_use():
    """Return the namespaces in which a process runs, or of which one holds a file descriptor."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for folder in (f"/proc/{pid}/ns", f"/proc/{pid}/fd"):
            try:
                found |= {os.readlink(f"{folder}/{name}") for name in os.listdir(folder)}
            except OSError:
                continue  # it ended
    return found
