"""Law: behind `shardwright rank` a rank that dies ends neither its launcher's other ranks nor the job, which has the others' code.
One that dies in sw.steps is started again as a spare, and no spare outlives the ranks.
"""

import os
import signal
import subprocess
import sys
import time

import pytest
from shardwright.comm.board import Board

WAITS = "import pathlib, time\nwhile not pathlib.Path('{go}').exists(): time.sleep(0.02)\n"
DIES = "import os; os.kill(os.getpid(), 9)"
#: the rank is in sw.steps
ENTERS = """
import os, pathlib, sys, time
loops = pathlib.Path(os.environ["SHARDWRIGHT_START"], "loops")
loops.mkdir(exist_ok=True), (loops / "1").touch()
"""
#: a spare notes what it is given, and takes a place once it may
SPARE = """
import os, pathlib, time
path, names = os.environ.get("SHARDWRIGHT_SPARE"), ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
if path:
    print(*(os.environ[name] for name in names), file=open(f"{folder}/{{pathlib.Path(path).name}}", "a"))
    while not pathlib.Path("{folder}/free").exists(): time.sleep(0.02)
    pathlib.Path(path).write_text("runs")
    {then}
"""


def start(programs, restart=0, *options, others=0):
    """Start a rank for each program, as torchrun does. `others`: ranks on other hosts."""
    environment = {**os.environ, "WORLD_SIZE": str(len(programs) + others), "LOCAL_WORLD_SIZE": str(len(programs))}
    environment["TORCHELASTIC_RESTART_COUNT"] = str(restart)
    command = [sys.executable, "-m", "shardwright", "rank", *options, "--", sys.executable, "-c"]
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


def spare(folder, then):
    return SPARE.format(folder=folder, then=then)


def await_(path, text):
    """Wait for a file that says this: a writer's file is empty first."""
    deadline = time.monotonic() + 30
    while not path.exists() or path.read_text() != text:
        assert time.monotonic() < deadline, path.exists() and path.read_text()
        time.sleep(0.02)


def test_a_rank_that_is_lost_in_its_steps_comes_back_as_a_spare(tmp_path):
    waits = ENTERS + WAITS.format(go=tmp_path / "go")
    parents = start([waits, spare(tmp_path, "raise SystemExit(0)") + ENTERS + DIES, waits])
    assert "rank 1 ended with code 137, and is started again as a spare" in parents[1].stderr.readline()
    await_(tmp_path / "slot-1", "0 1 0 1\n")
    (tmp_path / "free").touch(), (tmp_path / "go").touch()
    assert codes_of(parents) == [0, 0, 0] and not folders(tmp_path)


def test_a_rank_comes_back_so_often_and_no_more(tmp_path):
    (tmp_path / "free").touch()
    always = spare(tmp_path, "pass") + ENTERS + DIES
    parents = start([WAITS.format(go=tmp_path / "go"), always], 0, "--restarts", "2")
    assert ["again" in parents[1].stderr.readline() for _ in range(3)] == [True, True, False]
    (tmp_path / "go").touch()
    assert codes_of(parents) == [0, 0] and len((tmp_path / "slot-1").read_text().splitlines()) == 2


ENDS = """
import os, pathlib
pathlib.Path(os.environ["SHARDWRIGHT_SLOT"]).write_text("ended")
"""


def test_a_rank_that_fails_after_its_steps_fails_the_job(tmp_path):
    fails = ENTERS + ENDS + "raise SystemExit(3)"
    parents = start([spare(tmp_path, "pass") + fails, ENTERS + ENDS], 0, "--spares", "1")
    assert "rank 0 ended with code 3; this process waits" in parents[0].stderr.readline()
    assert codes_of(parents) == [3, 0]


def test_spares_that_wait_end_with_the_last_rank(tmp_path):
    parents = start([spare(tmp_path, "pass") + "raise SystemExit(3)"] * 2, 0, "--spares", "2")
    assert codes_of(parents) == [3, 3] and not folders(tmp_path)


def test_a_spare_that_has_a_place_is_a_rank(tmp_path):
    (tmp_path / "free").touch()
    finishes = spare(tmp_path, f"pathlib.Path('{tmp_path}/seated').touch(); raise SystemExit(0)")
    parents = start([finishes + WAITS.format(go=tmp_path / "seated") + DIES] * 2, 0, "--spares", "1")
    assert codes_of(parents) == [0, 0] and not folders(tmp_path)


#: a rank comes to its job and dies; as a spare it waits until all others have ended
COMES = """
import os, pathlib, time
from shardwright.comm.board import Board, own_member
if path := os.environ.get("SHARDWRIGHT_SPARE"):
    while not pathlib.Path("{folder}/go").exists(): time.sleep(0.02)
    pathlib.Path(path).write_text("{state}")
    raise SystemExit({code})
jobs, own = "{folder}/attempts", own_member()
os.makedirs(jobs, exist_ok=True)
Board(jobs + "/job").say("1", [jobs, []])
Board(jobs + "/spares").say(own.name, own)
Board(os.environ["SHARDWRIGHT_START"] + "/loops").say("1", jobs)
"""


def test_a_rank_that_leaves_its_loop_early_is_told_to_the_others(tmp_path):
    """A break, or an end by save_on=: its code is 0, and spares of other hosts wait for it."""
    parents = start([COMES.format(folder=tmp_path, state="done", code=0)] * 2, others=2)
    assert codes_of(parents) == [0, 0]
    told = Board(str(tmp_path / "attempts" / "ended")).said()
    assert told.keys() == Board(str(tmp_path / "attempts" / "spares")).said().keys()


@pytest.mark.parametrize(("state", "code"), [("done", 0), ("waits", 1)])
def test_a_host_whose_ranks_have_died_tells_the_others_and_has_the_code_of_the_job(tmp_path, state, code):
    """Ranks of other hosts may be left, so its spares wait on. "waits": they find that no rank is left anywhere."""
    parents = start([COMES.format(folder=tmp_path, state=state, code=code) + DIES] * 2, others=2)
    assert all("again as a spare" in each.stderr.readline() for each in parents)
    deadline = time.monotonic() + 30
    ended = Board(str(tmp_path / "attempts" / "ended"))
    while len(ended.said()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert ended.said().keys() == Board(str(tmp_path / "attempts" / "spares")).said().keys()
    time.sleep(0.5)
    assert [each.poll() for each in parents] == [None, None]
    (tmp_path / "go").touch()
    assert codes_of(parents) == ([0, 0] if code == 0 else [137, 137]) and not folders(tmp_path)


def test_what_cannot_be_outlived_is_one_sentence(tmp_path):
    command = [sys.executable, "-m", "shardwright", "rank"]
    bare = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    far = {**bare, "RANK": "0", "WORLD_SIZE": "4"}
    near = {**far, "LOCAL_WORLD_SIZE": "4"}
    for environment, more, sentence in (
        (bare, ["--", "true"], "RANK is not set"),
        (far, ["--", "true"], "LOCAL_WORLD_SIZE is not set"),
        (bare, ["--join", str(tmp_path), "--", "true"], f"no job has come to sw.steps or sw.survive in {tmp_path}"),
        (far, [], "no command given"),
        (near, ["--spares", "-1", "--", "true"], "--spares must be a number from 0, got -1"),
    ):
        found = subprocess.run([*command, *more], env=environment, capture_output=True, text=True)
        assert found.returncode == 2 and sentence in found.stderr and found.stderr.count("\n") == 1
