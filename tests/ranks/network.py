"""Simulated hosts on one machine: network and UTS namespaces, connected by veth pairs and a bridge.

Processes on two hosts share no more than processes on two machines. Abstract sockets do not cross, each host has its
own name, and traffic between hosts passes an interface that counts it, that can be slow, and that can fail.

    host0 [eth0 10.77.0.1] ---- p0 ]        [ p1 ---- [eth0 10.77.0.2] host1
                                   [ switch ]

The namespaces have no names. They are file descriptors of this process, so the kernel removes them and their interfaces
when the process closes them or ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence

_COMMAND_S = 10
#: nobody's address: what is sent there is dropped by every receiver
_NOBODY = "02:00:00:00:00:99"
#: bytes that may pass at once at full rate
_BURST_BYTES = 256 * 1024


class Refused(RuntimeError):
    """Hosts cannot be made on this machine; the message has the reason."""


def enter(namespaces: Sequence[str]) -> None:
    """Move this process, which must have one thread, onto a host of Network.namespaces()."""
    libc = ctypes.CDLL(None, use_errno=True)
    for path in namespaces:
        fd = os.open(path, os.O_RDONLY)
        if libc.setns(fd, 0):
            raise Refused(f"setns({path}): {os.strerror(ctypes.get_errno())}")
        os.close(fd)


def leave_for_own(*, pids: bool) -> None:
    """Move this process, which must have one thread, into new user and mount namespaces, where it is root.

    `pids`: into a new PID namespace with its own /proc, too, as the first process. A process that has its number waits for it.
    """
    new_mounts, new_user, new_pids, private, parent_death = 0x20000, 0x10000000, 0x20000000, 0x4000 | 0x40000, 1
    libc, uid, gid = ctypes.CDLL(None, use_errno=True), os.geteuid(), os.getegid()

    def check(what: str, failed: int) -> None:
        if failed:
            raise Refused(f"{what}: {os.strerror(ctypes.get_errno())}")

    check("unshare", libc.unshare(new_user | new_mounts | (new_pids if pids else 0)))
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    check("mount /", libc.mount(b"none", b"/", None, private, None))
    if not pids:
        return
    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    libc.prctl(parent_death, signal.SIGKILL)
    check("mount /proc", libc.mount(b"proc", b"/proc", b"proc", 0, None))


class Network:
    """A context manager of `count` hosts, numbered from 0.

    Parameters
    ----------
    rate : str, optional
        Of each host's link in each direction, in tc's words ("1gbit"); headers count. Default: no limit.
    """

    def __init__(self, count: int, rate: str | None = None) -> None:
        self.count = count
        self.rate = rate
        self._spaces: list[dict[str, int]] = []  # of the hosts, then of the switch: fds by kind
        holders: list[subprocess.Popen[str]] = []
        try:
            for name in [*map(self.name, range(count)), "switch"]:
                holders.append(self._hold(name))
            self._connect([holder.pid for holder in holders])
        except BaseException:
            self.close()
            raise
        finally:
            for holder in holders:
                holder.communicate()  # ends its `cat`; our descriptors keep the namespaces
        if rate:
            for host in range(count):
                self.limit(host, rate)

    @staticmethod
    def name(host: int) -> str:
        return f"host{host}"

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{host + 1}"

    def namespaces(self, host: int) -> list[str]:
        """Return paths for setns(2), valid while this process lives and the network is open."""
        return [f"/proc/{os.getpid()}/fd/{fd}" for fd in self._spaces[host].values()]

    def command(self, host: int, *words: str) -> list[str]:
        """Return a command that runs `words` on a host, as its own program."""
        net, uts = self.namespaces(host)
        return ["nsenter", f"--net={net}", f"--uts={uts}", *words]

    # what a link does ------------------------------------------------------------------------------------------------

    def limit(self, host: int, rate: str, burst_bytes: int = _BURST_BYTES) -> None:
        """Limit a host's link to `rate` in each direction."""
        shape = ["root", "tbf", "rate", rate, "burst", str(burst_bytes), "latency", "100ms"]
        self._run(host, "tc", "qdisc", "replace", "dev", "eth0", *shape)
        self._run(self.count, "tc", "qdisc", "replace", "dev", f"p{host}", *shape)

    def stall(self, host: int) -> None:
        """Stall a host's link: it stays up, and passes a packet every few minutes."""
        self.limit(host, "64bit", 1600)

    def unplug(self, host: int) -> None:
        """Cut a host's link in both directions, at the switch."""
        self._run(self.count, "ip", "link", "set", f"p{host}", "down")

    def plug(self, host: int) -> None:
        """Undo unplug(), stall() and limit()."""
        self._run(self.count, "ip", "link", "set", f"p{host}", "up")
        if self.rate:
            self.limit(host, self.rate)
            return
        for place, interface in ((host, "eth0"), (self.count, f"p{host}")):
            with contextlib.suppress(Refused):  # there may be none
                self._run(place, "tc", "qdisc", "del", "dev", interface, "root")

    def mute(self, host: int) -> None:
        """Cut a host's link in one direction: the host receives, but nothing that it sends arrives."""
        for other in range(self.count):
            if other != host:
                peer = [self.address(other), "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent"]
                self._run(host, "ip", "neigh", "replace", *peer)

    def bytes_sent(self, host: int) -> int:
        """Return the bytes that a host's interface has sent since the network was made, counted as frames at the link."""
        (link,) = json.loads(self._run(host, "ip", "-s", "-j", "link", "show", "dev", "eth0"))
        return int(link["stats64"]["tx"]["bytes"])

    # making and unmaking ---------------------------------------------------------------------------------------------

    def _hold(self, name: str) -> subprocess.Popen[str]:
        """Start a process in new namespaces, and keep their file descriptors."""
        script = (
            'echo "$0" >/proc/sys/kernel/hostname && echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6; echo; exec cat'
        )
        holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "sh", "-c", script, name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert holder.stdout is not None
        if holder.stdout.readline() != "\n":
            _, errors = holder.communicate()
            raise Refused(f"no network namespaces here: {errors.strip()}")
        self._spaces.append({kind: os.open(f"/proc/{holder.pid}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts")})
        return holder

    def _connect(self, pids: Sequence[int]) -> None:
        switch = self.count
        lines = ["link add bridge type bridge", "link set bridge up"]
        for host in range(self.count):
            lines += [
                f"link add p{host} type veth peer name eth0 netns {pids[host]}",
                f"link set p{host} master bridge up",
            ]
        self._run(switch, "ip", "-batch", "-", text="\n".join(lines))
        for host in range(self.count):
            address = f"addr add {self.address(host)}/24 dev eth0"
            self._run(host, "ip", "-batch", "-", text=f"link set lo up\n{address}\nlink set eth0 up")

    def _run(self, place: int, *words: str, text: str | None = None) -> str:
        done = subprocess.run(
            self.command(place, *words), input=text, capture_output=True, text=True, timeout=_COMMAND_S
        )
        if done.returncode:
            raise Refused(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        for spaces in self._spaces:
            for fd in spaces.values():
                os.close(fd)
        self._spaces.clear()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def network(count: int, rate: str | None = None) -> Iterator[Network]:
    """Yield a Network; skip with the reason if there is none."""
    import pytest

    try:
        made = Network(count, rate)
    except (Refused, OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"hosts cannot be made here: {error}")
    with made:
        yield made
