"""Law: behind `shardwright rank` a rank that dies ends neither its launcher's other ranks nor the job, which has the others' code."""

import os
import signal
import subprocess
import sys
import time

import pytest

WAITS = "import pathlib, time\nwhile not pathlib.Path('{go}').exists(): time.sleep(0.02)\n"
DIES = "import os; os.kill(os.getpid(), 9)"


def start(programs, restart=0):
    """Start a rank for each program, as torchrun does."""
    environment = {**os.environ, "WORLD_SIZE": str(len(programs)), "LOCAL_WORLD_SIZE": str(len(programs))}
    environment["TORCHELASTIC_RESTART_COUNT"] = str(restart)
    command = [sys.executable, "-m", "shardwright", "rank", "--", sys.executable, "-c"]
    return [
        subprocess.Popen([*command, text], env={**environment, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank, text in enumerate(programs)
    ]


def codes_of(parents):
    try:
        return [each.wait(30) for each in parents]
    finally:
        for each in parents:
            each.kill()
            each.wait()
            each.stderr.close()


def folders(tmp_path):
    return list(tmp_path.glob("shardwright-*/ranks-*"))


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_the_job_has_the_code_of_the_ranks_that_finish(tmp_path):
    go = tmp_path / "go"
    parents = start([WAITS.format(go=go), DIES, WAITS.format(go=go)])
    assert "rank 1 ended with code 137" in parents[1].stderr.readline()
    time.sleep(0.3)
    assert [each.poll() for each in parents] == [None] * 3, "a dead rank ends no other"
    go.touch()
    assert codes_of(parents) == [0, 0, 0] and not folders(tmp_path)


def test_a_job_of_which_nothing_finishes_fails(tmp_path):
    assert codes_of(start([DIES, "raise SystemExit(3)"])) == [137, 3] and not folders(tmp_path)
    assert codes_of(start([DIES, "pass"], restart=1)) == [0, 0], "an earlier start's ends are not these"


def test_a_launcher_that_ends_its_ranks_ends_them_and_their_parents(tmp_path):
    waits = f"import signal; signal.signal(15, lambda *_: exit(7)); {DIES.split(';')[0]}; open(r'{tmp_path}/up', 'w').close()\n"
    parents = start([DIES, waits + WAITS.format(go=tmp_path / "go")])
    parents[0].stderr.readline()
    while not (tmp_path / "up").exists():
        time.sleep(0.02)
    for each in parents:
        each.send_signal(signal.SIGTERM)
    assert codes_of(parents) == [137, 7]


def test_what_cannot_be_outlived_is_one_sentence():
    command = [sys.executable, "-m", "shardwright", "rank"]
    bare = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    far = {**bare, "RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    for environment, more, sentence in (
        (bare, ["--", "true"], "RANK is not set"),
        (far, ["--", "true"], "on several hosts"),
        (far, [], "no command given"),
    ):
        found = subprocess.run([*command, *more], env=environment, capture_output=True, text=True)
        assert found.returncode == 2 and sentence in found.stderr and found.stderr.count("\n") == 1
