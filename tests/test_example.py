"""Laws of the main example, and of 14 to 16. It runs unchanged under torchrun, as one process and under accelerate, and the loss falls.
A resumed or killed run continues with the losses of an uninterrupted one, at every stage. Its last line is the one that
the README quotes. Its number of threads fits the machine's free cores.

Programs start slowly: tests that are not about a launcher run in ranks forked from one process with all imports done.
"""

import contextlib
import json
import os
import re
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
EXAMPLE = str(ROOT / "examples" / "train_gpt.py")
LONG = os.environ.get("SW_TEST_LONG") == "1"
LIMIT_S = 600 if LONG else 150  # for a program at low priority beside five ranks
SMALL = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--seed", "3", "--minutes", "5"]
LAST_LINE = re.compile(r"demo: validation loss ([\d.]+) -> ([\d.]+) nats/byte, (\d+) ranks?, ([\d,]+) tokens/s")

LAUNCHERS = {
    "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"],
    "one process": [sys.executable],
    "accelerate": [
        str(BIN / "accelerate"),
        "launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--main_process_port",
        "0",
    ],
}


def test_the_readme_program_without_a_launcher_trains_as_one_rank_and_says_so():
    text = (ROOT / "README.md").read_text()
    program = next(part for part in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "sw.wrap(" in part)
    of_launchers = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
    bare = {name: value for name, value in environment().items() if name not in of_launchers}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=bare, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"rank 0: first weight [+-]0\.\d{6}\n", done.stdout)
    lines = [line for line in done.stderr.splitlines() if "rank" in line]
    assert len(lines) == 1 and "it trains as one rank; `torchrun --nproc-per-node N PROGRAM` starts N ranks" in lines[0]


def environment():
    path = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "1", "PYTHONPATH": path}
    return {**os.environ, **settings}


def start(launcher, *arguments):
    """Start a process in its own session, with the launcher and its ranks."""
    command = LAUNCHERS[launcher]
    if not Path(command[0]).exists():
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.Popen(
        [*command, EXAMPLE, *SMALL, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True,
    )  # fmt: skip


#: In the quick form a rank skips the interpreter's own end, which costs more than 20 steps. Ranks that a launcher starts run it.
_FORGE = """
import atexit, gc, importlib, json, os, runpy, sys
gc.disable()
for name in ("torch._dynamo", "torch.distributed", "shardwright.wrapping", "shardwright.checkpoint"):
    importlib.import_module(name)
sys.modules["matplotlib"] = None  # a curve costs more than 20 steps; test_the_loss_falls_under_every_launcher draws in the long form
gc.freeze(), gc.enable()  # a collection in a rank would copy all that was imported
for line in sys.stdin:
    request, pids = json.loads(line), []
    for rank, variables in enumerate(request["variables"]):
        pid = os.fork()
        if pid == 0:
            os.environ.update(variables)
            out = os.open(request["output"], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(out, 1), os.dup2(out, 2)
            sys.argv = request["arguments"]
            sys.path.insert(0, os.path.dirname(sys.argv[0]))
            runpy.run_path(sys.argv[0], run_name="__main__")
            if os.environ.get("SW_TEST_LONG") == "1":
                sys.exit()
            atexit._run_exitfuncs()
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(0)
        pids.append(pid)
    print(json.dumps(pids), flush=True)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
"""


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    """Return forked(program, *arguments), which returns the output of two ranks with torchrun's variables.

    `ranks=1`: of one process without any. `killed_when`: a function; once it is true, all ranks are killed.
    """
    folder = tmp_path_factory.mktemp("forked")
    forge = subprocess.Popen(
        [sys.executable, "-c", _FORGE],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(), start_new_session=True,
    )  # fmt: skip

    def run_forked(program, *arguments, ranks=2, killed_when=None):
        output = folder / f"{len(os.listdir(folder))}.txt"
        with socket.create_server(("127.0.0.1", 0)) as free:
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        variables = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **sizes, **meeting} for rank in range(ranks)]
        request = {"output": str(output), "arguments": [str(program), *map(str, arguments)]}
        request["variables"] = variables if ranks > 1 else [{}]
        print(json.dumps(request), file=forge.stdin, flush=True)
        pids = json.loads(forge.stdout.readline())
        deadline = time.monotonic() + 60
        while killed_when and not killed_when() and time.monotonic() < deadline:
            time.sleep(0.01)
        for pid in pids if killed_when else []:
            os.kill(pid, 9)
        assert select.select([forge.stdout], [], [], LIMIT_S)[0], output.read_text()
        codes = json.loads(forge.stdout.readline())
        assert codes == [-9 if killed_when else 0] * ranks, output.read_text()
        return output.read_text()

    yield run_forked
    os.killpg(forge.pid, 9)
    forge.communicate()


@pytest.fixture
def train(forked):
    """Return train(*arguments), which returns the output of the main example."""
    return lambda *arguments, **options: forked(EXAMPLE, *SMALL, *arguments, **options)


def children_of(pid):
    """Return the ranks; torchrun gives each its own session, out of reach of killpg."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def kill_under_torchrun(folder, *arguments):
    """Kill all ranks and their launcher once the run has a checkpoint in `folder`."""
    process = start("torchrun", *arguments, "--out", str(folder))
    try:
        deadline = time.monotonic() + 60
        while not newest(folder) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        for pid in [*children_of(process.pid), process.pid]:
            os.kill(pid, 9)
        process.communicate()


def run(launcher, *arguments):
    """Run a program and return all of its output."""
    process = start(launcher, *arguments)
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
    assert process.returncode == 0, output + errors
    return output


def losses(output):
    return re.findall(r"step +(\d+) +validation ([\d.]+)", output)


@pytest.mark.parametrize(
    ("launcher", "ranks"), [("torchrun", 2), ("one process", 1), *([("accelerate", 2)] if LONG else [])]
)
def test_the_loss_falls_under_every_launcher(tmp_path, train, launcher, ranks):
    words = ["--steps", "40", "--out", str(tmp_path)]
    # In the quick form launchers start other programs: test_wheel.py torchrun, test_launch_examples.py accelerate, the readme's
    # program one process. Ranks get the same variables here
    output = run(launcher, *words) if LONG else train(*words, ranks=ranks)
    assert (tmp_path / "loss.png").exists() or "matplotlib is not installed" in output
    found = LAST_LINE.fullmatch(output.strip().splitlines()[-1])
    assert found, output
    first, last, world, _ = found.groups()
    assert int(world) == ranks
    assert float(last) < 0.85 * float(first), output
    assert "sample:" in output
    assert newest(tmp_path) == "step-000040"


def test_a_killed_run_continues_from_its_last_checkpoint(tmp_path, train):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    length = ["--steps", "60", "--validate-every", "20"]
    train(*length, "--out", whole)
    if LONG:
        kill_under_torchrun(killed, *length)
    else:
        train(*length, "--out", killed, killed_when=lambda: newest(killed))  # every rank, in the middle of a step
    assert "step-000020" <= newest(killed) < "step-000060"
    train(*length, "--resume", "--zero", "2", "--out", killed)
    assert saved_losses(killed) == saved_losses(whole)


def report_without_speed(output):
    """Return the printed losses."""
    return re.sub(r" +[\d,]+ tokens/s", "", "\n".join(line for line in output.splitlines() if line.startswith("step")))


def newest(folder):
    """Return the newest checkpoint's name, or ""."""
    if not (folder / "checkpoints").exists():
        return ""
    names = [n for n in os.listdir(folder / "checkpoints") if re.fullmatch(r"step-\d+", n)]
    return max(names, default="")


def saved_losses(folder):
    """Return (step, loss) of training and of validation, with every digit."""
    state = json.loads((folder / "checkpoints" / newest(folder) / "state.json").read_text())["user_state"]
    return tuple([tuple(pair["$tuple"]) for pair in state[kind]] for kind in ("train", "validation"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, forked):
    """Run 20 steps with nothing sliced; return the output and the losses."""
    folder = tmp_path_factory.mktemp("whole")
    output = forked(EXAMPLE, *SMALL, "--steps", "20", "--zero", "0", "--out", folder)
    assert "step    20" in output
    return report_without_speed(output), saved_losses(folder)


@pytest.mark.parametrize("zero", [1, 2, 3] if LONG else [1])  # 2 and 3 are in the next one
def test_the_losses_are_the_same_at_every_stage(tmp_path, train, whole, zero):
    output = train("--steps", "20", "--zero", zero, "--out", tmp_path)
    assert report_without_speed(output) == whole[0]
    assert saved_losses(tmp_path) == whole[1]


def test_a_run_stopped_at_one_stage_continues_at_another(tmp_path, train, whole):
    parts = ((7, 2, []), (14, 0, ["--resume"]), (20, 3, ["--resume"]))
    for steps, zero, resume in parts if LONG else parts[::2]:
        output = train("--steps", steps, "--zero", zero, "--out", tmp_path, *resume)
    assert losses(output)[-1] == losses(whole[0])[-1] and losses(output)[-1][0] == "20", output
    train_losses, validation = saved_losses(tmp_path)
    assert [step for step, _ in train_losses] == list(range(1, 21))
    assert (train_losses, validation[-1]) == (whole[1][0], whole[1][1][-1])


@pytest.mark.parametrize("compress", ["bf16", "int4"] if LONG else ["int4"])
def test_the_loss_falls_with_compressed_gradients(tmp_path, train, compress):
    output = train("--steps", "40", "--compress", compress, "--zero", "2", "--out", tmp_path)
    first, last, *_ = LAST_LINE.fullmatch(output.strip().splitlines()[-1]).groups()
    assert float(last) < 0.85 * float(first), output


def test_the_compression_study_in_its_short_form(tmp_path, forked):
    short = ["--seeds", "1", "--width", "32", "--out", tmp_path]
    short += ["--steps", "12"] if LONG else ["--steps", "4", "--context", "16", "--batch-size", "8"]
    forked(ROOT / "examples" / "compression_study.py", *short)
    head, *rows = [json.loads(line) for line in (tmp_path / "compression_study.jsonl").read_text().splitlines()]
    assert head["seeds"] == 1 and len(rows) == 14
    for row in rows:
        wide = {"none": 0.0, "bf16": 1.0, "fp16": 1.0, "int8": 3.0}.get(row["arm"], 15.0)
        assert abs(row["difference"]) <= wide, row


@pytest.mark.timeout(2 * LIMIT_S + 60)
def test_a_model_larger_than_a_rank_goes_on_with_fewer_ranks(tmp_path, forked):
    """The program itself ends if a rank holds the whole model while it builds, loads or generates."""
    name, steps = "14_larger_than_a_rank.py", re.compile(r"^step (\d+): loss ([\d.]+)$", re.MULTILINE)
    output = "".join(forked(ROOT / "examples" / name, tmp_path, ranks=ranks) for ranks in (4, 2))
    section = (ROOT / "examples" / "README.md").read_text().partition(f"## {name}")[2].partition("\n## ")[0]
    found, quoted = ([(int(step), float(loss)) for step, loss in steps.findall(text)] for text in (output, section))
    assert [step for step, _ in found] == list(range(8))
    assert found == [(step, pytest.approx(loss, abs=2e-3)) for step, loss in quoted], output
    assert output.count("loaded what was exported") == 2 and os.path.isdir(tmp_path / "checkpoints" / "step-000008-hf")


def test_a_program_of_fsdp2_goes_on_with_ours_and_back(tmp_path, forked):
    name, line = "16_fsdp2_with_one_import.py", re.compile(r"^step (\d+): loss ([\d.]+), norm ([\d.]+)$", re.MULTILINE)
    path = ROOT / "examples" / name
    found = [
        each for way in ([], ["--torch"]) for each in line.findall(forked(path, tmp_path, *way, ranks=2 + len(way)))
    ]
    quoted = line.findall(
        (ROOT / "examples" / "README.md").read_text().partition(f"## {name}")[2].partition("\n## ")[0]
    )
    assert [int(step) for step, *_ in found] == [int(step) for step, *_ in quoted] == list(range(8))
    for ours, theirs in zip(found, quoted, strict=True):
        assert list(map(float, ours)) == pytest.approx(list(map(float, theirs)), rel=1e-3), found


@pytest.mark.skipif(not LONG, reason="seven programs that import torch; the quick form has its parts, in forked ranks")
def test_a_killed_rank_behind_torchrun_costs_no_restart_and_no_bit(tmp_path, forked):
    name = "18_never_restart.py"
    program = str(ROOT / "examples" / name)
    undisturbed = forked(program, tmp_path / "one", "--fewer", ranks=3)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "--no-python"]
    own = [sys.executable, "-m", "shardwright", "rank", "--spares", "1", "--", sys.executable, program]
    done = subprocess.run(
        [*torchrun, *own, str(tmp_path / "other"), "--kill", "7"],
        capture_output=True, text=True, env=environment(), timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rank 1 ended with code 137, and is started again as a spare" in done.stderr
    steps = re.findall(r"step (\d+): 3 ranks", done.stdout)
    assert sorted(set(map(int, steps))) == list(range(12)) and "2 ranks" not in done.stdout
    assert done.stdout.splitlines()[-1] == undisturbed.splitlines()[-1]
    section = (ROOT / "examples" / "README.md").read_text().partition(f"## {name}")[2].partition("\n## ")[0]
    assert all(f"\nstep {step}: 3 ranks, loss " in section for step in range(12))


def test_the_engine_gets_the_weights_of_each_step(forked):
    printed = forked(ROOT / "examples" / "15_weights_to_an_engine.py")
    found = re.findall(r"step \d: the engine took (\d+) tensors and says the last word with (\d\.\d+)", printed)
    assert [int(count) for count, _ in found] == [5, 10, 15, 20, 25]
    assert float(found[0][1]) < 0.3 and float(found[-1][1]) > 0.7


@pytest.fixture
def gpt_threads(monkeypatch):
    """Return the example's module. Restore this process's number of threads afterwards."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from gpt import threads

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    before = torch.get_num_threads()
    yield threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("user", [{"OMP_NUM_THREADS": "2"}, {"LOCAL_WORLD_SIZE": "2"}])
def test_nothing_is_timed_if_the_user_has_chosen_or_cores_are_few(gpt_threads, monkeypatch, user):
    monkeypatch.setattr(gpt_threads, "seconds_with", lambda *_: pytest.fail("was timed"))
    monkeypatch.setenv(*next(iter(user.items())))
    before = torch.get_num_threads()
    chosen = gpt_threads.Threads()
    assert [chosen.after_step(seconds) for seconds in (1.0, 1.0, 50.0)] == ["", "", ""]
    assert torch.get_num_threads() == before


def test_threads_are_as_many_as_there_are_free_cores(gpt_threads, monkeypatch):
    """The number of threads is chosen at once, after a slow step, and a while after it fell to one."""
    costs = {1: 1.0, 2: 0.6}
    asked = []
    monkeypatch.setattr(gpt_threads, "seconds_with", lambda n, enough_s: asked.append(n) or costs[n])
    chosen = gpt_threads.Threads()
    assert torch.get_num_threads() == 2 and chosen.after_step(1.0) == chosen.after_step(1.9) == ""
    assert asked == [1, 2]
    costs[2] = 9.0  # another program takes cores
    sentence = chosen.after_step(2.1)
    assert "1 thread instead of 2" in sentence and "9.0 times" in sentence and "OMP_NUM_THREADS" in sentence
    assert torch.get_num_threads() == 1 and asked == [1, 2, 1, 2]
    costs[2] = 0.6  # and frees them; not every step measures
    assert [chosen.after_step(9.0) for _ in range(gpt_threads.AGAIN_AFTER - 1)] == [""] * (gpt_threads.AGAIN_AFTER - 1)
    assert torch.get_num_threads() == 1 and len(asked) == 4
    chosen.after_step(1.0)
    assert torch.get_num_threads() == 2 and len(asked) == 6
    costs[2] = 9.0
    assert chosen.after_step(1.0) == "" and "" == chosen.after_step(2.1)  # printed before
    assert torch.get_num_threads() == 1


def test_timing_too_many_threads_costs_no_more_than_one_does(gpt_threads, monkeypatch):
    """A slow operator ends the measurement."""
    clock = iter(range(10**6))
    monkeypatch.setattr(gpt_threads.time, "perf_counter", lambda: float(next(clock)))  # each operator takes a second
    assert gpt_threads.seconds_with(1, float("inf")) == gpt_threads.OPERATORS
    used = next(clock)
    assert gpt_threads.seconds_with(1, 2.5) == gpt_threads.OPERATORS
    assert next(clock) - used == 5  # the start, three operators, and this call
