"""Law: after a kill at any moment the directory holds the newest committed checkpoint, whole, and the next run
continues from it. If a rank dies while others save, these get an error soon.
"""

import functools
import itertools
import os
import random
import signal
import tempfile
import time

import pytest
import torch
from harness import LONG, Stopwatch, gather, on_every_rank, run_programs
from peer import PEER, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder

pytestmark = pytest.mark.skipif(PEER == "torch", reason="shardwright's checkpoints")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
KILLS = 40 if LONG else 4


def training():
    """A state whose every value is the step, so that a torn or mixed checkpoint shows."""
    model = torch.nn.Sequential(torch.nn.Linear(600, 700), torch.nn.Linear(500, 400, dtype=torch.float64))
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer


def fill(model, optimizer, step):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
            optimizer.state[parameter] = {key: torch.full_like(parameter, step) for key in ("exp_avg", "exp_avg_sq")}


def values_of(model, optimizer):
    tensors = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    return {value for tensor in tensors for value in tensor.detach().unique().tolist()}


def save_for_ever(rank, world_size, folder):
    torch.manual_seed(rank)
    model, optimizer = training()
    with sw.Checkpointer(folder, model, optimizer, keep_last=2) as checkpoints:
        start = checkpoints.restore()
        assert start == 0 or values_of(model, optimizer) == {float(start)}
        for step in itertools.count(start):
            fill(model, optimizer, step + 1)
            checkpoints.save(step)


def restore_and_look(rank, world_size, folder):
    model, optimizer = training()
    with sw.Checkpointer(folder, model, optimizer) as checkpoints:
        step = checkpoints.restore()
        found = values_of(model, optimizer) if step else set()
        fill(model, optimizer, step + 1)
        checkpoints.save(step)  # and it removes what the dead have left
    left_overs = [name for name in os.listdir(folder) if name.endswith(("partial", "trash"))]
    return step, sorted(found), left_overs


def checkpoints_in(folder):
    return sorted(name for name in os.listdir(folder) if len(name) == 11)


def kill_at_random(team, world_size, seed, chance, has_begun, *, pause_s, share_of_all):
    """Kill all ranks, or one, at a random moment within `pause_s` after has_begun() returned true."""
    deadline = time.monotonic() + 20
    while not has_begun():
        if time.monotonic() > deadline:
            pytest.fail(f"seed {seed}: no save in time: {team.wait(1)}")
        time.sleep(0.005)
    time.sleep(chance.uniform(0, pause_s))
    victims = range(world_size) if chance.random() < share_of_all else [chance.randrange(world_size)]
    for rank in victims:
        team.signal(rank, signal.SIGKILL)


@pytest.mark.timeout(600)
def test_after_a_kill_at_a_random_moment_the_newest_checkpoint_loads(world_size, fresh_ranks):
    seed = int(time.time())
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder:
        highest = 0
        for _ in range(KILLS):
            with fresh_ranks(world_size) as team:
                team.start(save_for_ever, folder=folder)
                has_more = functools.partial(lambda least: checkpoints_in(folder)[-1:] > [least], f"step-{highest:06d}")
                kill_at_random(team, world_size, seed, chance, has_more, pause_s=0.25, share_of_all=0.5)
            listed = checkpoints_in(folder)
            with fresh_ranks(world_size) as team:
                answers = team.run(restore_and_look, folder=folder)
            steps = {step for step, _, _ in answers}
            assert steps == {int(listed[-1][5:])}, (seed, listed, answers)
            (step,) = steps
            assert step > highest and all(found == [float(step)] for _, found, _ in answers), (seed, answers)
            assert answers[0][2] == [], (seed, answers)
            highest = step + 1


def save_until_a_rank_dies(rank, world_size, folder):
    model, optimizer = training()
    fill(model, optimizer, 1)
    checkpoints = sw.Checkpointer(folder, model, optimizer, bandwidth_bytes_per_s=1_000_000, timeout_s=600)
    checkpoints.save(0)
    gather(None)
    if rank == 2:
        os._exit(9)
    begin = Stopwatch()
    with pytest.raises(sw.CheckpointError) as caught:
        checkpoints.wait()
    return begin.seconds(), str(caught.value)


@pytest.mark.timeout(120)
def test_the_death_of_a_rank_ends_the_save_of_the_others_soon(fresh_ranks):
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder, fresh_ranks(3) as team:
        team.start(save_until_a_rank_dies, folder=folder)
        outcomes = team.wait(60, patient=True)
    for outcome in outcomes[:2]:
        assert outcome.ok, outcome
        seconds, sentence = outcome.value
        assert seconds < 20 and "another rank failed or left while the checkpoint was written" in sentence
        assert "rank 2 (pid " in sentence.rpartition("written")[2], sentence
    assert outcomes[2].ended == "exit 9"


def ends_beside_a_killed_rank(rank, world_size, folder, call, zero, victim):
    """Return the seconds from the kill to the error, and the error. The victim is killed while it writes."""
    module, inner = training()
    fill(module, inner, 1)
    model, optimizer = (module, inner) if zero is None else sw.wrap(module, inner, zero=zero, timeout_s=600.0)
    stamp = os.path.join(folder, "killed")
    if rank == victim:
        from internals import CheckpointSaver

        begin = CheckpointSaver.begin

        def begin_and_die(self, *arguments, **options):
            if call != "sw.save()":
                begin(self, *arguments, **options)
            with open(stamp, "w") as file:
                file.write(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        from internals import writing

        writing.CheckpointSaver = type(
            "Dies", (), {"__new__": lambda cls, *a, **k: Dying(CheckpointSaver(*a, **k), begin_and_die)}
        )
    watch = Stopwatch()
    with pytest.raises(sw.CheckpointError) as caught:
        if call == "sw.save()":
            sw.save(os.path.join(folder, "alone"), model, optimizer, timeout_s=600.0)
        else:
            options = {"snapshot": call, "bandwidth_bytes_per_s": 1_000_000, "timeout_s": 600.0}
            checkpoints = sw.Checkpointer(folder, model, optimizer, **options)
            checkpoints.save(0)
            checkpoints.wait()
    held_up_s = watch.elapsed() - watch.seconds()
    with open(stamp) as file:
        return time.monotonic() - float(file.read()) - held_up_s, str(caught.value)


class Dying:
    """A saver whose begin() kills its process."""

    def __init__(self, saver, begin):
        self._saver, self.begin = saver, lambda *a, **k: begin(saver, *a, **k)

    def __getattr__(self, name):
        return getattr(self._saver, name)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "call, zero, victim",
    [("sw.save()", 2, 1), ("sw.save()", 0, 0), ("copy", 3, 1), ("copy", 1, 0), ("lazy", 2, 2), ("copy", None, 1)],
)
def test_a_rank_that_is_killed_while_it_writes_ends_the_save_within_a_second(fresh_ranks, call, zero, victim):
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder, fresh_ranks(3) as team:
        team.start(ends_beside_a_killed_rank, folder=folder, call=call, zero=zero, victim=victim)
        outcomes = team.wait(60, patient=True)
    for rank in {0, 1, 2} - {victim}:
        assert outcomes[rank].ok, outcomes[rank]
        seconds, sentence = outcomes[rank].value
        print(f"{seconds:.2f} s: {sentence}")
        assert f"rank {victim} (pid " in sentence, sentence
        assert seconds < 2.5, (seconds, sentence)  # 0.5 s on a quiet machine, and 5.2 s before


def asked_to_end_beside_a_dead_rank(rank, world_size, folder):
    """A launcher ends the remaining ranks. They stop waiting for a save that rank 0 can no longer finish."""
    model, optimizer = training()
    fill(model, optimizer, 1)
    options = {"bandwidth_bytes_per_s": 1_000_000, "save_on": [signal.SIGUSR1]}
    checkpoints = sw.Checkpointer(folder, model, optimizer, **options)
    checkpoints.save(0)
    gather(None)
    if rank == 0:
        os._exit(9)
    os.kill(os.getpid(), signal.SIGUSR1)
    begin = time.monotonic()
    with pytest.raises(sw.CheckpointError, match="another rank failed or left"):
        checkpoints.wait()
    return time.monotonic() - begin


@pytest.mark.timeout(120)
def test_a_rank_that_is_asked_to_end_beside_a_dead_one_ends_at_once(fresh_ranks):
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder, fresh_ranks(3) as team:
        team.start(asked_to_end_beside_a_dead_rank, folder=folder)
        outcomes = team.wait(60, patient=True)
    assert all(outcome.ok and outcome.value < 3 for outcome in outcomes[1:]), outcomes  # 0.3 s, and 6.2 s before


def save_and_end(rank, world_size, directory):
    model, optimizer = training()
    fill(model, optimizer, 1)
    checkpoints = sw.Checkpointer(directory, model, optimizer, bandwidth_bytes_per_s=8_000_000)
    checkpoints.save(0)
    assert checkpoints.progress["busy"]


@pytest.mark.timeout(120)
def test_a_program_that_ends_brings_its_save_to_the_end(world_size, tmp_path):
    (tmp_path / "store").mkdir()
    said, statuses = run_programs(
        world_size,
        save_and_end,
        str(tmp_path / "store"),
        imported=["torch._dynamo"],
        limit_s=100,
        directory=str(tmp_path / "c"),
    )
    assert statuses == [0] * world_size, said
    assert sorted(os.listdir(tmp_path / "c")) == [".lock", "step-000001"] and not any(
        "failed" in text for text in said
    ), said


if not LONG:
    test_a_program_that_ends_brings_its_save_to_the_end.exactly = 2


@on_every_rank(spoils=True, deadline_s=120)
def test_many_saves_leave_memory_descriptors_and_threads_as_they_were(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = training()
    fill(model, optimizer, 1)
    torch.manual_seed(0)
    small = torch.nn.Linear(10, 10)
    with sw.Checkpointer(folder, small, keep_last=1) as checkpoints:
        for step in range(1000 if LONG else 60):
            checkpoints.save(step)
            if step == 20:
                checkpoints.wait()
                before = usage()
        checkpoints.wait()
        after = usage()
        assert after[1:] == before[1:] and after[0] - before[0] < 4096, (before, after)
        assert checkpoints.progress["staging_bytes"] < 20 << 20
        gather(None)  # rank 0 returns from wait() when it has removed what retention does not keep
        assert len([name for name in os.listdir(folder) if name.startswith("step")]) == 1


def usage():
    """Return (resident KiB, file descriptors, threads)."""
    status = open("/proc/self/status").read()
    resident, threads = (int(status.split(key)[1].split()[0]) for key in ("VmRSS:", "Threads:"))
    return resident, len(os.listdir("/proc/self/fd")), threads
