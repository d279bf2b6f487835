"""Law: the first line of `shardwright why` names the rank that holds the others and what it does, while it hangs and from the files that
the ranks leave when all are killed."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import shardwright as sw
import torch
import torch.distributed as dist
from harness import at_least_two
from hosts import lab
from internals import account, process_group, waits
from models import Mlp
from shardwright_tools.cli import main, why

LONG_S = 600.0


def end_with_the_parent() -> None:
    """Let a worker, or another child, end with the rank that is killed; a rank ends with its own parent anyway."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class SlowData(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        end_with_the_parent()
        time.sleep(LONG_S)
        return torch.ones(7)


def evaluate_alone() -> None:
    time.sleep(LONG_S)


def hold_the_gil() -> None:
    left = int(LONG_S)
    while left > 0:  # the signal that asks for the stack ends a sleep
        left = ctypes.PyDLL(None).sleep(left)


def compute() -> None:
    while True:
        pass


def lock_twice() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def save_slowly() -> None:
    with waits.calling("sw.save()"):
        time.sleep(LONG_S)


def read_data() -> None:
    next(iter(torch.utils.data.DataLoader(SlowData())))


def read_data_of_a_worker() -> None:
    next(iter(torch.utils.data.DataLoader(SlowData(), num_workers=1)))


def attach_a_debugger() -> None:
    """A child traces this process, which stops."""
    libc, rank = ctypes.CDLL(None), os.getpid()
    if os.fork() == 0:
        end_with_the_parent()
        libc.ptrace(16, rank, None, None)  # PTRACE_ATTACH
        time.sleep(LONG_S)
        os._exit(0)
    time.sleep(LONG_S)


def wait_in_the_kernel() -> None:
    """In state D: the parent of a vfork() waits until its child, which runs in its memory, is another program."""
    if ctypes.PyDLL(None).vfork() == 0:
        end_with_the_parent()
        while True:
            time.sleep(LONG_S)


def read_pages_from_disk() -> None:
    """A working set that does not stay in memory, as when a rank swaps."""
    path = Path(os.environ[account.RUN_FOLDER], "pages")
    path.write_bytes(os.urandom(64 * mmap.PAGESIZE))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        while True:
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
                pages.madvise(mmap.MADV_RANDOM)  # no reading ahead
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                for at in range(0, len(pages), mmap.PAGESIZE):
                    pages[at]


def take_all_memory() -> None:
    """In a control group of 64 MiB more than this process has, so that the kernel kills it."""
    group = Path("/sys/fs/cgroup/memory", f"sw-test-{os.getpid()}")
    limit, kept = "memory.limit_in_bytes", []
    if not group.parent.is_dir():
        group, limit = Path("/sys/fs/cgroup", group.name), "memory.max"
    group.mkdir()
    (group / limit).write_text(str(64 * 2**20))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    while True:
        kept.append(bytearray(b"1" * 2**20))


def wait_at_a_barrier() -> None:
    dist.barrier()


def download() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.recv(1)


def gather_elsewhere() -> None:
    """A collective of a group that the other ranks did not come to."""
    sw.average_gradients(_of_two[0])


_of_two: list[Any] = []


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_a_program() -> None:
    subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL).wait()  # it ends with this process


#: name -> where rank 1 does it, what it does, words of the first line while it hangs, and when all ranks are dead
CASES: dict[str, tuple[str, Any, str, str]] = {
    "stopped": ("forward", stop, "is stopped, in its forward; ranks 0, 2 have waited", "was in its forward"),
    "gil": (
        "data",
        hold_the_gil,
        "sleeps or waits in the program's own code, between two steps at",
        "was between two steps",
    ),
    "branch": ("data", evaluate_alone, "in evaluate_alone", "was between two steps"),
    "loader": ("data", read_data, "waits for its data loader", "was between two steps"),
    "save": ("data", save_slowly, "is in a save, in sw.save()", "was in a save, in sw.save()"),
    "busy": ("forward", compute, "computes, in its forward at", "was in its forward"),
    "lock": (
        "optimizer",
        lock_twice,
        "sleeps or waits in the program's own code, in its optimizer at",
        "was in its optimizer",
    ),
    "program": ("forward", wait_for_a_program, "in its forward at", "was in its forward"),
    "dead": (
        "forward",
        die,
        "has died in its forward, without an error of the engine",
        "died or exited before its part of",
    ),
    "worker": ("data", read_data_of_a_worker, "waits for its data loader", "was between two steps"),
    "debugger": ("forward", attach_a_debugger, "is stopped by a debugger, in its forward", "was in its forward"),
    "kernel": ("forward", wait_in_the_kernel, "waits for a disk or device, in its forward", "was in its forward"),
    "swapping": (
        "forward",
        read_pages_from_disk,
        "swaps or reads mapped files",
        "was in its forward",
    ),
    "memory": (
        "forward",
        take_all_memory,
        "has died in its forward, without an error of the engine: the kernel killed it for want of memory",
        "died or exited before its part of",
    ),
    "barrier": ("data", wait_at_a_barrier, "sleeps or waits in the program's own code", "was between two steps"),
    "download": ("data", download, "sleeps or waits in the program's own code, between two steps at", "was between"),
    "groups": (
        "data",
        gather_elsewhere,
        "ranks wait in different collectives: ",
        "ranks wait in different collectives: ",
    ),
    "mismatch": ("data", None, "ended with: ranks disagree on collective", "ended with: ranks disagree on collective"),
    "start": ("start", evaluate_alone, "rank 1 of 3 did not come", "rank 1 of 3 did not come"),
}


def plant(rank: int, world_size: int, case: str, folder: str) -> None:
    os.environ[account.RUN_FOLDER] = folder
    where, act, *_ = CASES[case]

    def at(place: str, step: int) -> None:
        if rank == 1 and place == where and step == 2 and act is not None:
            act()

    at("start", 2)
    if case == "groups":
        pair = dist.new_group([1, 2])
        _of_two[:] = [sw.wrap(Mlp(), process_group=pair)] if rank else []
    torch.manual_seed(1)
    model = Mlp()
    model, optimizer = sw.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=1)
    for step in range(4):
        at("data", step)
        if case == "mismatch" and step == 2 and rank == 1:
            sw.full_state_dict(model)
            sw.average_gradients(model)
        loss = model(torch.ones(2, 7)).sum()
        at("forward", step)
        loss.backward()
        at("optimizer", step)
        optimizer.step()
        optimizer.zero_grad()


def first_line(folder: Path, capsys: Any, *options: str) -> str:
    (job,) = (folder / "account").iterdir()
    capsys.readouterr()
    assert main(["why", str(job), *options]) == 0
    printed: str = capsys.readouterr().out
    return printed.partition("\n")[0]


def hangs(folder: Path) -> bool:
    """Return True once a rank waits for a second, or has an error."""
    for job in (folder / "account").glob("*"):
        ranks = why.read_ranks(job)
        return any(each.reason or (each.waits and each.waited_s > 1) for each in ranks) or starts(ranks)
    return False


def line_with(words: str, folder: Path, capsys: Any, end_s: float) -> str:
    """Return the first line when it has these words: on a busy machine ranks wait for one another before the fault, too."""
    found = ""
    while words not in found:
        assert time.monotonic() < end_s, (found, list(folder.rglob("*")))
        time.sleep(0.1)
        found = first_line(folder, capsys) if hangs(folder) else found
    return found


def starts(ranks: list[Any]) -> bool:
    return (
        len(ranks) == 2
        and all(each.head.call == "sw.wrap()" for each in ranks)
        and ranks[0].now_ns - ranks[0].last_ns > 1e9
    )


def may_limit_memory() -> bool:
    folder = Path("/sys/fs/cgroup/memory")
    return os.access(folder if folder.is_dir() else "/sys/fs/cgroup/cgroup.procs", os.W_OK)


#: cases whose first line does not begin with the one rank
OF_SEVERAL = ("mismatch", "start", "groups")


@at_least_two
@pytest.mark.parametrize("case", CASES)
def test_the_first_line_is_right(case: str, world_size: int, fresh_ranks: Any, tmp_path: Path, capsys: Any) -> None:
    _, _, live, dead = CASES[case]
    if case == "memory" and not may_limit_memory():
        pytest.skip("this user may make no control group of memory")
    with fresh_ranks(3) as team:
        team.start(plant, case=case, folder=str(tmp_path))
        found = line_with(live, tmp_path, capsys, time.monotonic() + 60)
        assert case in OF_SEVERAL or found.startswith("rank 1 (pid "), found
    assert dead in (found := first_line(tmp_path, capsys)), found
    assert case in ("dead", "memory", *OF_SEVERAL) or found.startswith("rank 1 (pid "), found
    for group in Path("/sys/fs/cgroup").glob("**/sw-test-*"):
        group.rmdir()


# ---------------------------------------------------------------- programs that end


def raises() -> None:
    raise ValueError("planted")


def fills_a_disk() -> None:
    with open("/dev/full", "w") as file:
        file.write("a log")


def exits() -> None:
    os._exit(3)


def saves_to_a_slow_disk() -> None:
    os.environ["SLOW_FSYNC_MS"] = str(int(1000 * LONG_S))  # slow_files.c reads it at each call
    sw.save(os.environ["SLOW_SAVE"], *_trained)


_trained: list[Any] = []
#: name -> what rank 1's program does before its third step, and words of the first line, live and from files
PROGRAMS: dict[str, tuple[Any, str, str]] = {
    "exception": (raises, "rank 1 ended with: ValueError: planted", "rank 1 ended with: ValueError: planted"),
    "full disk": (
        fills_a_disk,
        "rank 1 ended with: OSError: [Errno 28] No space left on device",
        "[Errno 28] No space",
    ),
    "exit": (exits, "has died between two steps, without an error of the engine", "died or exited before its part of"),
    "slow disk": (saves_to_a_slow_disk, "is in a save, in sw.save()", "was in a save, in sw.save()"),
}


def train_until(rank: int, world_size: int, case: str) -> None:
    torch.manual_seed(1)
    model = Mlp()
    model, optimizer = sw.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=1)
    _trained[:] = model, optimizer
    try:
        for step in range(4):
            if step == 2 and (rank == 1 or case == "slow disk"):
                PROGRAMS[case][0]() if rank == 1 else sw.save(os.environ["SLOW_SAVE"], model, optimizer)
            model(torch.ones(2, 7)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except sw.CommError:
        time.sleep(LONG_S)  # the launcher has not noticed yet


@contextlib.contextmanager
def programs(case: str, folder: Path, **environment: str) -> Iterator[None]:
    """Three programs that train, until the end of the block, when they are killed."""
    request = pickle.dumps(([train_until.__module__], train_until.__name__, {"case": case})).hex()
    command = [sys.executable, harness.__file__, "3", str(folder), request]
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), account.RUN_FOLDER: str(folder)}
    program = subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.wait()


@at_least_two
@pytest.mark.parametrize("case", PROGRAMS)
def test_the_first_line_is_right_of_programs(case: str, world_size: int, tmp_path: Path, capsys: Any) -> None:
    environment = {"SLOW_SAVE": str(tmp_path / "save")}
    if case == "slow disk":
        source, library = Path(__file__).with_name("slow_files.c"), tmp_path / "slow_files.so"
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        environment["LD_PRELOAD"] = str(library)
    _, live, dead = PROGRAMS[case]
    with programs(case, tmp_path, **environment):
        end_s = time.monotonic() + 60
        while len(list(tmp_path.glob("account/*/rank-*.stacks"))) < 3:
            assert time.monotonic() < end_s, [each.read_text() for each in tmp_path.glob("printed-*")]
            time.sleep(0.1)
        found = line_with(live, tmp_path, capsys, end_s)
        assert found.startswith("rank 1 "), found
    time.sleep(0.3)
    assert dead in (found := first_line(tmp_path, capsys)), found


# ---------------------------------------------------------------- hosts


def train_on_hosts(rank: int, world_size: int, folder: str) -> None:
    os.environ[account.RUN_FOLDER] = f"{folder}/{os.uname().nodename}"
    model = sw.wrap(Mlp())
    while True:
        model(torch.ones(2, 7)).sum().backward()
        time.sleep(0.02)


@at_least_two
@pytest.mark.parametrize("fault", ["cut", "dead"])
def test_a_host_that_is_gone_is_the_cause(fault: str, world_size: int, teams: Any, tmp_path: Path, capsys: Any) -> None:
    """Its accounts lie elsewhere; the ranks here know for which rank they wait."""
    with lab(teams, 2, 1) as made:
        made.team.start(train_on_hosts, folder=str(tmp_path))
        own, end_s = tmp_path / made.network.name(0), time.monotonic() + 40
        accounts = (own / "account").glob
        while not any(e.head.op_count > 20 and not e.head.call for job in accounts("*") for e in why.read_ranks(job)):
            assert time.monotonic() < end_s
            time.sleep(0.1)
        made.network.unplug(1)
        if fault == "dead":
            made.kill(1)
        (job,) = (own / "account").iterdir()
        command = made.network.command(0, sys.executable, "-m", "shardwright", "why", str(job))
        found = ""
        while not found.startswith("all ranks here wait in all_reduce 'bucket "):
            assert time.monotonic() < end_s + 20, found
            time.sleep(0.5)
            found = subprocess.run(command, capture_output=True, text=True, timeout=40).stdout
        assert found.partition("\n")[0].endswith("for rank 2 of another host"), found
    assert "for rank 2 of another host" in (found := first_line(own, capsys)), found


# ---------------------------------------------------------------- torch's flight recorder


@at_least_two
def test_torchs_tool_reads_the_traces_of_a_dead_job(
    world_size: int, fresh_ranks: Any, tmp_path: Path, capsys: Any
) -> None:
    """It names the collective that did not complete, and the rank that did not come to it."""
    with fresh_ranks(3) as team:
        team.start(plant, case="groups", folder=str(tmp_path))
        line_with(CASES["groups"][2], tmp_path, capsys, time.monotonic() + 60)
    traces = tmp_path / "traces"
    (job,) = (tmp_path / "account").iterdir()
    assert main(["why", str(job), "--fr", str(traces)]) == 0
    assert "3 traces lie in" in capsys.readouterr().out
    assert {each.name for each in traces.iterdir()} == {f"nccl_trace_rank_{rank}" for rank in range(3)}
    tool = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(traces), "-o", str(tmp_path / "db")]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    _, found = pickle.loads((tmp_path / "db").read_bytes())
    assert {each.size for each in found.groups} == {2, 3}
    whole = [each for each in found.collectives if each.pass_check and not each.missing_ranks]
    assert whole and all(each.collective_state == "completed" for each in whole)
    missing = [each for each in found.collectives if each.missing_ranks]
    assert {tuple(sorted(each.missing_ranks)) for each in missing} == {(1,), (2,)}, done.stderr
    # a rank that never came has an empty trace
    for path in job.glob("rank-1.*"):
        path.unlink()
    assert main(["why", str(job), "--fr", str(traces)]) == 0
    assert pickle.loads((traces / "nccl_trace_rank_1").read_bytes())["entries"] == []
    assert subprocess.run(tool, capture_output=True, timeout=100).returncode == 0
    assert main(["why", str(job), "--fr", "/proc/none"]) == 2
    assert "--fr must be a folder that can be written, got '/proc/none'" in capsys.readouterr().err


@at_least_two
def test_a_rank_is_named_by_its_number_in_the_job(
    world_size: int, fresh_ranks: Any, tmp_path: Path, capsys: Any
) -> None:
    """Of a group of ranks 1 and 2, in which rank 2 is number 1."""
    with fresh_ranks(3) as team:
        team.start(wait_in_a_pair, folder=str(tmp_path))
        end_s = time.monotonic() + 40
        while not hangs(tmp_path):
            assert time.monotonic() < end_s
            time.sleep(0.1)
        (job,) = (tmp_path / "account").iterdir()
        ranks = {each.number: each for each in why.read_ranks(job)}
        assert ranks[1].head.wait_rank == 1 and ranks[1].awaited == 2
        assert "for rank 2" in ranks[1].line()
        assert first_line(tmp_path, capsys).startswith("rank 2 (pid ")


def wait_in_a_pair(rank: int, world_size: int, folder: str) -> None:
    os.environ[account.RUN_FOLDER] = folder
    whole, pair = sw.wrap(Mlp()), dist.new_group([1, 2])
    part = sw.wrap(Mlp(), process_group=pair) if rank else None
    whole(torch.ones(2, 7)).sum().backward()
    if rank == 1:
        part(torch.ones(2, 7)).sum().backward()
    time.sleep(LONG_S)


@at_least_two
def test_stacks_come_without_py_spy(
    world_size: int, fresh_ranks: Any, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """From a signal's handler, in C: also of a rank that holds the GIL. A stopped rank gets no signal."""
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with fresh_ranks(3) as team:
        team.start(plant, case="gil", folder=str(tmp_path))
        end_s = time.monotonic() + 40
        while not hangs(tmp_path):
            assert time.monotonic() < end_s
            time.sleep(0.1)
        (job,) = (tmp_path / "account").iterdir()
        ranks = why.read_ranks(job)
        stacks = [why.take_stack(rank) for rank in ranks]
        assert any("hold_the_gil" in each for each in stacks[1]), stacks
        assert any("backward" in each or "autograd" in each for each in stacks[0]), stacks
        team.signal(2, signal.SIGSTOP)
        time.sleep(0.2)
        (stopped,) = [each for each in why.read_ranks(job) if each.number == 2]
        assert why.take_stack(stopped) == []
        assert "in hold_the_gil" in first_line(tmp_path, capsys) or "rank 2" in first_line(tmp_path, capsys)


@at_least_two
def test_a_run_that_moves_hangs_nowhere(world_size: int, fresh_ranks: Any, tmp_path: Path, capsys: Any) -> None:
    with fresh_ranks(2) as team:
        team.run(moves, folder=str(tmp_path))
        assert first_line(tmp_path, capsys, "--no-stacks").startswith(
            "no rank waits for another: step 3, the last steps took "
        )
        pytest.importorskip("rich")
        (job,) = (tmp_path / "account").iterdir()
        assert main(["top", str(job), "--times", "2", "--every", "0.1"]) == 0
        assert "ms/step" in capsys.readouterr().out
    assert first_line(tmp_path, capsys).startswith("all ranks have ended without an error of the engine, at step 3")


@at_least_two
def test_a_job_is_found_among_those_of_other_hosts(
    world_size: int, fresh_ranks: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An account of another host does not tell whether its rank still runs, so it hides no job that runs here."""
    monkeypatch.setattr(why, "folders", lambda: [tmp_path / "account"])
    with fresh_ranks(2) as team:
        team.run(moves, folder=str(tmp_path))
        (job,) = (tmp_path / "account").iterdir()
        for number in range(3):
            for path in shutil.copytree(job, job.with_name(f"away-{number}")).glob("rank-?.*"):
                data = path.read_bytes()
                path.write_bytes(data[:72] + b"away".ljust(64, b"\0") + data[136:])
        assert main(["why", "--no-stacks"]) == 0
        assert capsys.readouterr().out.startswith("no rank waits for another: step 3")
        for number in range(9):
            shutil.copytree(job, job.with_name(f"run-{number}"))
        assert main(["why", "--no-stacks"]) == 2
        printed = capsys.readouterr().err
        assert "several jobs run here" in printed and printed.count("run-") + printed.count("pid-") == 8
        assert "or one of 2 older jobs" in printed and "away" not in printed


def moves(rank: int, world_size: int, folder: str) -> None:
    os.environ[account.RUN_FOLDER] = folder
    model, optimizer = sw.wrap(model := Mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()


@at_least_two
def test_what_is_no_account_is_one_sentence(world_size: int, fresh_ranks: Any, tmp_path: Path, capsys: Any) -> None:
    with fresh_ranks(2) as team:
        team.run(moves, folder=str(tmp_path))
    (job,) = (tmp_path / "account").iterdir()
    path = next(each for each in job.glob("rank-0.*") if each.suffix != ".stacks")
    data = bytearray(path.read_bytes())
    for change, sentence in (
        (
            lambda: data.__setitem__(slice(8, 12), (7).to_bytes(4, "little")),
            "is an account of version 7, and this shardwright reads version 2",
        ),
        (lambda: data.__setitem__(slice(0, 4), b"elf\0"), "is no account of steps"),
        (data.clear, "is empty: no account of steps"),
    ):
        change()
        path.write_bytes(data)
        assert main(["why", str(job)]) == 2
        assert sentence in capsys.readouterr().err
    path.unlink()
    assert main(["why", str(job)]) == 0
    assert capsys.readouterr().out


@at_least_two
def test_ranks_that_left_their_group_have_not_died(
    world_size: int, fresh_ranks: Any, tmp_path: Path, capsys: Any
) -> None:
    """Though os._exit() keeps their files."""
    with fresh_ranks(2) as team:
        team.start(leaves, folder=str(tmp_path))
        assert [each.ended for each in team.wait(patient=True)] == ["exit 0"] * 2
        (job,) = (tmp_path / "account").iterdir()
        assert [(each.head.ended, each.state) for each in why.read_ranks(job)] == [(True, "gone")] * 2
        assert first_line(tmp_path, capsys).startswith("all ranks have ended without an error of the engine, at step 3")


def leaves(rank: int, world_size: int, folder: str) -> None:
    moves(rank, world_size, folder)
    dist.barrier()
    for group in process_group.live_groups():
        group.close()
    os._exit(0)
