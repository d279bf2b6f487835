"""The files of accounts: what a sweep removes, whose folders are used, a full disk, what a forked child takes along, and what restarts
cost a job."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from shardwright.comm import account
from shardwright.observe.goodput import Starts, starts_of, text
from shardwright.observe.metrics import Recent
from shardwright.observe.rings import Head, Row
from shardwright_tools.cli import main

HOST = os.uname().nodename
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
from shardwright_tools.cli.why import Rank


def job(folder: Path, name: str, *, host: str = HOST, pid: int = 4194305, age_s: float = 0.0, more: str = "") -> Path:
    """Make a job's folder with the file of one rank; no process has a number above 2**22."""
    path = folder / name
    path.mkdir(parents=True)
    (path / f"rank-0.{pid}").write_bytes(bytes(72) + struct.pack("64s", host.encode()) + bytes(64))
    (path / f"rank-0.{pid}.stacks").touch()
    if more:
        (path / more).touch()
    for each in (*path.iterdir(), path):
        os.utime(each, times=(time.time() - age_s, time.time() - age_s))
    return path


def test_a_sweep_removes_dead_jobs_and_those_of_other_hosts_that_write_no_more(tmp_path: Path) -> None:
    kept = [
        job(tmp_path, "run-live", pid=os.getpid(), age_s=1e6),
        job(tmp_path, "run-elsewhere", host="another", age_s=3e5),
        job(tmp_path, "run-with-a-file-of-the-program", more="notes.txt", age_s=1e6),
        job(tmp_path, "results", age_s=1e6),
        *(job(tmp_path, f"pid-{n}", age_s=n) for n in range(account._KEPT)),
    ]
    gone = [job(tmp_path, "run-old", age_s=8 * 24 * 3600.0), job(tmp_path, "slurm-1.0", age_s=3600.0)]
    gone += [job(tmp_path, "run-old-elsewhere", host="another", age_s=8 * 24 * 3600.0)]
    (tmp_path / "run-empty").mkdir()
    account._sweep(tmp_path)
    assert [each.name for each in gone if each.exists()] == []
    assert [each.name for each in kept if not each.exists()] == []


def test_an_earlier_start_on_another_host_is_left_alone(tmp_path: Path, monkeypatch: Any) -> None:
    """Its process cannot be seen here, and may live."""
    monkeypatch.setattr(account, "_file", None)
    monkeypatch.setattr(account, "earlier", [])
    monkeypatch.setattr(account, "_of", (3, 8))
    opened: list[Path] = []
    monkeypatch.setattr(account, "account_open", lambda path, *_: opened.append(Path(path)) or Path(path).touch())
    monkeypatch.setattr(account, "_register_stacks", lambda path: None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    folder = tmp_path / "run-a"
    folder.mkdir(mode=0o700)
    for name, host in (("rank-3.4194305", "another"), ("rank-3.4194306", HOST)):
        (folder / name).write_bytes(bytes(72) + struct.pack("64s", host.encode()))
        (folder / f"{name}.stacks").touch()
    account._open(tmp_path, 3, 8)
    assert {each.name for each in folder.iterdir()} == {
        *("rank-3.4194305", "rank-3.4194305.stacks", f"rank-3.{os.getpid()}")
    }


BEGINS = """
import os, sys
sys.path[:0] = {path!r}
from shardwright.comm import account
{first}
account.begin(0, 1)
print(account.own_file(), flush=True)
"""


#: once it has imported what only root may read
BECOMES_NOBODY = "os.setgroups([]); os.setgid(65534); os.setuid(65534)"


def begin_in_a_program(
    folder: Path, tail: str = "", prefix: tuple[str, ...] = (), first: str = "", **variables: str
) -> list[str]:
    """Return what a program prints that begins an account."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    code = BEGINS.format(path=[each for each in sys.path if each], first=first) + tail
    done = subprocess.run(
        [*prefix, sys.executable, "-c", code],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_root
def test_another_users_folder_is_neither_used_nor_trusted(tmp_path: Path, capsys: Any) -> None:
    """A folder of root, one that all can write to, a link; and what nobody has written is not read by root."""
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    for each in (tmp_path, *tmp_path.parents):
        if each.stat().st_uid == 0 and each != Path("/"):
            each.chmod(each.stat().st_mode | 0o755)
    planted = open_to_all / "shardwright-65534"
    planted.mkdir()
    planted.chmod(0o777)
    (run := tmp_path / "run").mkdir(mode=0o755)
    (run / "account").mkdir(mode=0o755)
    as_nobody: dict[str, Any] = {"first": BECOMES_NOBODY}
    assert begin_in_a_program(open_to_all, **as_nobody, **{account.RUN_FOLDER: str(run)}) == ["None"]
    planted.rmdir()
    planted.symlink_to(run)
    assert begin_in_a_program(open_to_all, **as_nobody) == ["None"]
    planted.unlink()
    (own,) = begin_in_a_program(open_to_all, "os._exit(0)", **as_nobody)
    assert Path(own).parent.parent == planted and Path(own).stat().st_mode & 0o777 == 0o600
    assert main(["why", str(Path(own).parent)]) == 2
    assert "belongs to another user" in capsys.readouterr().err


@needs_root
def test_of_several_jobs_the_newest_are_named_with_what_tells_them_apart(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    (tmp_path / "train.py").write_text("input()")
    with subprocess.Popen([sys.executable, str(tmp_path / "train.py")], stdin=subprocess.PIPE) as program:

        def ranks_of(folder: Path) -> list[Any]:
            number = int(folder.name.removeprefix("run-"))
            head = types.SimpleNamespace(pid=program.pid, unix_ns=number, world_size=1 + number % 2, steps=10 * number)
            return [types.SimpleNamespace(head=head, state="gone" if number == 20 else "running")]

        for number in range(21):
            (tmp_path / "jobs" / f"run-{number}").mkdir(parents=True, mode=0o755)
        monkeypatch.setattr("shardwright_tools.cli.why.folders", lambda: [tmp_path / "jobs"])
        monkeypatch.setattr("shardwright_tools.cli.why.read_ranks", ranks_of)
        assert main(["why"]) == 2
        program.communicate(b"\n")
    (line,) = capsys.readouterr().err.splitlines()
    assert "needed: run-19 (train.py, 2 ranks, step 190), run-18 (train.py, 1 rank, step 180), run-17 (" in line
    assert line.endswith("run-12 (train.py, 1 rank, step 120), or one of 12 older jobs")


def test_a_full_disk_leaves_the_account_in_memory(tmp_path: Path) -> None:
    """A file with holes would be a SIGBUS at a later store."""
    mount = 'mount -t tmpfs -o size=1m,mode=700 none $0 && exec env TMPDIR=$0 "$@"'
    prefix = ("unshare", "-m", "sh", "-c", mount, str(tmp_path))
    tail = """
from shardwright import _engine
for _ in range(300):
    _engine.account_call("a call", False)
    _engine.account_call_end()
print([each for _, _, names in os.walk(os.environ["TMPDIR"]) for each in names])
"""
    found = begin_in_a_program(tmp_path, tail, prefix)
    assert found == ["None", "[]"]


CHILD = """
import faulthandler, multiprocessing
from shardwright.comm.account import earlier, own_file, own_rank
parent = own_file()
def child(fails):
    assert own_file() is None and own_rank() is None
    account.begin(1, 2)
    assert own_file() != parent and own_file().exists() and str(os.getpid()) in own_file().name
    print(own_file(), flush=True)
    if fails:
        raise ValueError("planted")
for fails in (False, True):
    process = multiprocessing.get_context("fork").Process(target=child, args=(fails,))
    process.start()
    process.join()
print(parent.exists())
"""


def test_a_forked_child_that_becomes_a_rank_has_an_account_of_its_own(tmp_path: Path) -> None:
    """It goes as the child ends, though multiprocessing runs no atexit; after an exception it stays, and has it."""
    parent, ended, failed, is_there = begin_in_a_program(tmp_path, CHILD)
    assert is_there == "True" and len({parent, ended, failed}) == 3
    assert not Path(parent).exists() and not Path(ended).exists()
    assert b"ValueError: planted" in Path(failed).read_bytes()


# ---------------------------------------------------------------- goodput


class Account:
    """An account of one start: its rows take a second each, from `begun_s` of a clock that both starts share."""

    def __init__(self, begun_s: int, steps: int, saves: tuple[int, ...] = (), starts: Starts | None = None) -> None:
        fields = dict.fromkeys(Head._fields, 0) | {"unix_ns": begun_s * 10**9}
        if starts:
            fields |= dict(zip(("first_unix_ns", "kept_unix_ns", "lost_ns", "restarts"), starts))
        self._head = Head(**fields)  # type: ignore[arg-type]
        self._rows = [
            Row(n, (n + 2) * 10**9, (n + 3) * 10**9, (0, 0, 0, 0, int(n in saves)), (0,) * 5, 0, -1, 1, 0)
            for n in range(1, steps + 1)
        ]

    def head(self) -> Head:
        return self._head

    def rows(self, most: int) -> list[Row]:
        return self._rows


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ([], Starts()),
        # five steps, to second 1008, and no save of ours: all are kept
        ([Account(1000, 5)], Starts(1000, 1008, 0, 1)),
        # saved before the fourth step, which began at second 1006
        ([Account(1000, 5, (4,))], Starts(1000, 1006, 0, 1)),
        # the next one's first step began at 1103: 97 s are lost
        ([Account(1000, 5, (4,)), Account(1100, 2)], Starts(1000, 1105, 97, 2)),
        # a start that came to no step costs all of its time
        ([Account(1000, 5, (4,)), Account(1050, 0), Account(1100, 2)], Starts(1000, 1105, 97, 3)),
        ([Account(1000, 0), Account(1100, 2)], Starts(1000, 1105, 103, 2)),
        # what the last one knew already
        ([Account(1100, 2, starts=Starts(1000, 1006 * 10**9, 50, 3))], Starts(1000, 1105, 97, 4)),
    ],
)
def test_time_from_the_last_kept_step_to_the_next_first_one_is_lost(files: list[Account], found: Starts) -> None:
    first, kept, lost, restarts = starts_of(files)  # type: ignore[arg-type]
    if files and files[0]._head.restarts:
        assert (kept // 10**9, restarts) == (found.kept_ns, found.restarts) and lost == 97 * 10**9 + 50
        return
    assert (first // 10**9, kept // 10**9, lost // 10**9, restarts) == found


def test_goodput_is_the_rest() -> None:
    now_s = int(time.time())
    fields = dict.fromkeys(Head._fields, 0) | {
        "unix_ns": (now_s - 100) * 10**9,
        "first_unix_ns": (now_s - 1000) * 10**9,
        "kept_unix_ns": (now_s - 200) * 10**9,
        "lost_ns": 50 * 10**9,
    }
    assert text(Head(**fields), 0) == ""  # type: ignore[arg-type]
    head = Head(**(fields | {"restarts": 2}))  # type: ignore[arg-type]
    assert text(head, 50 * 10**9) == "goodput 80 %: 200 s lost to 2 restarts"


def test_a_wait_is_for_a_rank_of_its_group():
    """A job of 4, of which ranks 2 and 3 have met: rank 1 of these two is rank 3 of the job."""
    rank = Rank.__new__(Rank)
    for number, group, groups, expected in [
        (1, 1, [(7, [2, 3])], 3),
        (1, 0, [(7, [2, 3])], 3),
        (1, 2, [(7, [2, 3]), (8, [0, 1, 2, 3])], 1),
        (1, 0, [], 1),
        (3, 1, [(7, [2, 3])], -1),
    ]:
        rank.head = types.SimpleNamespace(wait_rank=number, wait_group=group, world_size=4)
        rank.groups = groups
        assert rank.awaited == expected, (number, group, groups)


def test_trackers_get_nothing_of_an_account_that_has_gone(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(account, "own_rank", lambda: 0)
    for path in (tmp_path / "gone", tmp_path / "torn"):
        (tmp_path / "torn").write_bytes(b"torn")
        monkeypatch.setattr(account, "own_file", lambda path=path: path)
        assert Recent()() == {}
