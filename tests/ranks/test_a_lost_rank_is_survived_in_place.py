"""Law: when ranks are killed, at any place of a step, the others go on in the same processes with the bits of a run that was
started again with as many ranks, from the newest whole step; nothing grows with the number of faults; and who cannot go on says so.
"""

import fcntl
import gc
import os
import signal
import tempfile
import time
import zlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpoint_subjects import build
from harness import RanksFailed, on_every_rank
from internals import Board, Directory, Engine, Regroup, Writer
from peer import PEER, sw
from shardwright_tools.cli import main
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder
from test_twenty_steps_of_a_gpt import gpt, loss_of

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
STAGES = {stage: {"zero": stage} for stage in range(4)}
STAGES |= {"private": {"zero": 3, "share_parameters": False, "units": torch.nn.Linear}}
POLICY = {"precision": {f"blocks.{n}.mlp_{way}": "bf16" for n in (0, 1) for way in ("in", "out")}}
LOW = {"whole bf16": {"zero": 2} | POLICY, "private bf16": STAGES["private"] | POLICY}
#: buckets that leave, and are stepped on, before a rank dies in its backward
SMALL = {"step_in_backward": True, "bucket_cap_mb": 0.01}
STEPPING = {f"{stage} in the backward": options | SMALL for stage, options in STAGES.items()}
PLACES = ["forward", "backward", "step", "save"]
STOP = 10


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def prepare(stage, **options):
    module, optimizer, vocabulary = gpt()
    model, optimizer = sw.wrap(module, optimizer, timeout_s=20, **(STAGES | LOW | STEPPING)[stage], **options)
    return model, optimizer, vocabulary


def train_step(model, optimizer, vocabulary, step, place=None):
    """Train a step on data of the step and of this rank's number at this time; die at a place."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    loss = loss_of(model, vocabulary, generator)
    if place == "forward":
        die()
    if place == "backward":
        next(iter(model.parameters())).register_hook(lambda _: die())
    loss.backward()
    if place == "step":
        die()
    optimizer.step()
    optimizer.zero_grad()


def digest(model, optimizer):
    state = sw.full_state_dict(model), sw.full_optimizer_state_dict(model, optimizer)["state"]
    tensors = [*state[0].values(), *(each[name] for each in state[1].values() for name in sorted(each))]
    return [zlib.crc32(torch.as_tensor(each).contiguous().numpy()) for each in tensors]


def held():
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * 4096
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident


def survive(rank, world_size, folder, stage, faults, stop=STOP, **options):
    """Train in place. `faults`: step -> (number that a rank has then, the place where it dies). Return what happened."""
    model, optimizer, vocabulary = prepare(stage)
    checkpoints = sw.Checkpointer(folder, model, optimizer, memory_every=1)
    seen, holds, told, seconds = [], [], None, []
    for step in sw.steps(checkpoints, stop, **options):
        with step:
            seen.append((int(step), dist.get_world_size()))
            dead, place = faults.pop(int(step), (None, None))
            place = place if dead == dist.get_rank() else None
            try:
                train_step(model, optimizer, vocabulary, step, place)
                if place == "save":
                    die()
                checkpoints.save(step, every=4)
            except sw.CommError:
                told = time.monotonic()
                raise
            if place == "end":
                die()
            if told is not None:
                seconds.append(time.monotonic() - told)
                told = None
                while checkpoints.progress["busy"]:  # the save that the loss broke is made again, and has files open
                    time.sleep(0.001)
                holds.append(held())
    found = seen, digest(model, optimizer), seconds, holds
    checkpoints.close()
    return found


def again(rank, world_size, folder, begin, stop):
    """Train from a checkpoint, as a run that was started again."""
    model, optimizer, vocabulary = prepare(0)
    with sw.Checkpointer(folder, model, optimizer) as checkpoints:
        assert checkpoints.restore() == begin
        for step in range(begin, stop):
            train_step(model, optimizer, vocabulary, step)
        checkpoints.save(stop - 1)
        checkpoints.wait()
        return digest(model, optimizer)


def outcomes_of(team, dead, limit_s=60):
    """Return the values of the ranks that lived."""
    outcomes = team.wait(limit_s, patient=True)
    if any(outcome.ok == (outcome.rank in dead) for outcome in outcomes):
        raise RanksFailed(outcomes)
    return [outcome.value for outcome in outcomes if outcome.rank not in dead]


def restarted(teams, *starts):
    """Return the digests of a run after starts of (ranks, first step, stop)."""
    with tempfile.TemporaryDirectory() as folder:
        for world_size, begin, stop in starts:
            with teams.fresh(world_size) as team:
                found = team.run(again, folder=folder, begin=begin, stop=stop)
        return found[0]


@pytest.fixture(scope="module")
def expected(teams):
    """Digests of a run whose starts have 4, 3 and 2 ranks."""
    return restarted(teams, (4, 0, 5), (3, 5, 8), (2, 8, STOP))


@pytest.mark.parametrize("turn", [*range(len(STAGES)), 5, 8, 9])
def test_the_rest_go_on_with_the_bits_of_a_restart_with_as_many_ranks(fresh_ranks, expected, turn):
    stage, places = list(STAGES | STEPPING)[turn], (PLACES * 3)[turn : turn + 2]
    with tempfile.TemporaryDirectory() as folder, fresh_ranks(4) as team:
        # rank 0, which holds the store of torch's group, is the second to die
        team.start(survive, folder=folder, stage=stage, faults={5: (2, places[0]), 8: (0, places[1])})
        for seen, ended_as, seconds, _ in outcomes_of(team, dead=(0, 2)):
            sizes = dict(seen)
            assert [sizes[step] for step in range(STOP)] == [4] * 5 + [3] * 3 + [2] * 2
            assert len(seen) == STOP + 2, "at most the broken step is repeated"
            assert ended_as == expected
            assert max(seconds) < 10
        assert len([name for name in os.listdir(folder) if "attempts" in name]) == 1


def test_nothing_grows_with_the_number_of_faults(fresh_ranks):
    faults = {2 * number: (1, PLACES[number % 4]) for number in range(1, 6)}
    with tempfile.TemporaryDirectory() as folder, fresh_ranks(6) as team:
        team.start(survive, folder=folder, stage=2, faults=faults, stop=12)
        ((_, _, _, holds),) = outcomes_of(team, dead=range(1, 6))
        descriptors, threads, resident = zip(*holds)
        assert len(holds) == 5
        assert list(descriptors) == sorted(descriptors, reverse=True) and max(threads) <= threads[0], holds
        assert resident[-1] - resident[1] < 3 << 20, holds


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_dies_after_its_last_step_holds_up_no_other(fresh_ranks, stage):
    with tempfile.TemporaryDirectory() as folder, fresh_ranks(3) as team:
        team.start(survive, folder=folder, stage=stage, faults={3: (0, "end")}, stop=4)
        for seen, *_ in outcomes_of(team, dead=[0]):
            assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_modules_go_on_in_low_precision_with_the_same_bits_at_every_stage(fresh_ranks):
    ended_as = []
    for stage in LOW:
        with tempfile.TemporaryDirectory() as folder, fresh_ranks(3) as team:
            team.start(survive, folder=folder, stage=stage, faults={2: (2, "step")}, stop=4)
            for seen, found, *_ in outcomes_of(team, dead=[2]):
                assert seen == [(0, 3), (1, 3), (2, 3), (2, 2), (3, 2)]
                ended_as.append(found)
    assert len(ended_as) == 4 and len(set(map(str, ended_as))) == 1


def survive_twice(rank, world_size, folder, place):
    """As survive(), with a rank that dies while the others recover from the death of rank 3."""
    kind, name = {
        "group": (Regroup, "make_group"),
        "engine": (Engine, "_build"),
        "open": (sw.Checkpointer, "_come_back"),
        "lock": (Directory, "__init__"),
    }[place]
    as_usual = getattr(kind, name)

    def dies(self, *arguments, **options):
        if rank == 1 and dist.get_world_size() == (4 if place == "group" else 3):
            die()
        return as_usual(self, *arguments, **options)

    with mock.patch.object(kind, name, dies):
        return survive(rank, world_size, folder, 2, {3: (3, "step")}, stop=5)


@pytest.mark.parametrize("place", ["group", "engine", "open", "lock"])
def test_a_rank_that_dies_while_others_recover_is_survived(fresh_ranks, place):
    with tempfile.TemporaryDirectory() as folder, fresh_ranks(4) as team:
        team.start(survive_twice, folder=folder, place=place)
        for seen, *_ in outcomes_of(team, dead=[1, 3]):
            assert seen == [(0, 4), (1, 4), (2, 4), (3, 4), (3, 2), (4, 2)]


def survive_with_one_that_stops(rank, world_size, folder, word):
    """As survive(), with a rank that stops for good after rank 2's death: before a word, with the lock of torch's store, in wrap()."""
    places = {"store": (dist, "init_process_group"), "engine": (Engine, "_build")}
    kind, name = places.get(word, (Board, "say"))
    as_usual = getattr(kind, name)

    def stops(*arguments, **options):
        is_its = arguments[1].startswith(word) if name == "say" else word == "store" or dist.get_world_size() == 2
        if rank == 1 and is_its:
            (attempts,) = (each.path for each in os.scandir(folder) if "attempts" in each.name)
            with open(f"{attempts}/1/torch.store", "a") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                os.kill(os.getpid(), signal.SIGSTOP)
        return as_usual(*arguments, **options)

    with mock.patch.object(kind, name, stops):
        return survive(rank, world_size, folder, 2, {3: (2, "step")}, stop=5, wait_s=0.5)


@pytest.mark.parametrize("word", ["here", "ready", "came", "store", "engine"])
def test_a_rank_that_stops_while_others_recover_is_left_out(fresh_ranks, word):
    with tempfile.TemporaryDirectory() as folder, fresh_ranks(3) as team:
        team.start(survive_with_one_that_stops, folder=folder, word=word)
        ((seen, *_),) = outcomes_of(team, dead=[1, 2])
        assert seen == [(0, 3), (1, 3), (2, 3), (3, 3), (3, 1), (4, 1)]


def survive_a_broken_save(rank, world_size, folder, stage, broken, place):
    """As survive(), with a rank that dies in the save of step `broken`: as it begins, or as it would write."""
    as_usual = getattr(Writer, place)

    def dies(self, target, step, *arguments, **options):
        if rank == 1 and step == broken:
            die()
        return as_usual(self, target, step, *arguments, **options)

    with mock.patch.object(Writer, place, dies):
        return survive(rank, world_size, folder, stage, {}, stop=8)


@pytest.mark.parametrize(
    ("stage", "broken", "place"), [(0, 8, "begin"), (2, 4, "begin"), (3, 8, "begin"), (1, 8, "_start")]
)
def test_a_save_that_a_loss_breaks_is_made_by_the_others(fresh_ranks, stage, broken, place):
    """Of step 8, which is the last one, no other would be made."""
    with tempfile.TemporaryDirectory() as folder, fresh_ranks(3) as team:
        team.start(survive_a_broken_save, folder=folder, stage=stage, broken=broken, place=place)
        for seen, *_ in outcomes_of(team, dead=[1]):
            assert [step for step, _ in seen] == [*range(8)], "no step is repeated for it"
        names = sorted(name for name in os.listdir(folder) if name.startswith("step-"))
        assert names == ["step-000004", "step-000008"]
        for name in names:
            assert main(["ckpt", "verify", f"{folder}/{name}"]) == 0


def asked_to_stop(rank, world_size, folder, stage):
    """Rank 0 gets a signal to save and end, and rank 2 dies before all have heard of it. Return the steps that began."""
    model, optimizer, vocabulary = prepare(stage)
    checkpoints = sw.Checkpointer(folder, model, optimizer, memory_every=1, save_on=[signal.SIGTERM])
    began = []
    with pytest.raises(SystemExit):
        for step in sw.steps(checkpoints, 9):
            with step:
                began.append(int(step))
                if step == 2 and dist.get_rank() == 0 and dist.get_world_size() == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                train_step(model, optimizer, vocabulary, step, "forward" if step == 2 and rank == 2 else None)
                checkpoints.save(step, every=100)
    return began


@pytest.mark.parametrize("stage", [0, 2])
def test_a_request_to_stop_outlives_a_recovery(fresh_ranks, stage):
    with tempfile.TemporaryDirectory() as folder, fresh_ranks(3) as team:
        team.start(asked_to_stop, folder=folder, stage=stage)
        assert outcomes_of(team, dead=[2]) == [[0, 1, 2, 2]] * 2
        assert "step-000003" in os.listdir(folder)


class Varied(torch.nn.Module):
    """Changes buffers and draws random numbers in each forward."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        )

    def forward(self, x):
        return self.layers(x)


def live(rank, world_size, folder, faults):
    """Train at zero=0 without steps in memory. Return (steps that began, digests of all state before each)."""
    torch.manual_seed(rank)
    module = Varied()
    model, optimizer = sw.wrap(module, torch.optim.AdamW(module.parameters(), lr=0.1), timeout_s=20)
    scheduler, counts = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), {"samples": 0}
    checkpoints = sw.Checkpointer(folder, model, optimizer, scheduler=scheduler, user_state=counts)
    began, states = [], []
    for step in sw.steps(checkpoints, 7):
        with step:
            began.append((int(step), dist.get_world_size()))
            buffers = [*module.buffers(), torch.get_rng_state()]
            plain = [scheduler.state_dict(), dict(counts)]
            states.append((digest(model, optimizer), [zlib.crc32(each.numpy()) for each in buffers], repr(plain)))
            dead, place = faults.pop(int(step), (None, None))
            counts["samples"] += dist.get_world_size()
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(7 * step + dist.get_rank()))
            loss = model(x).square().sum()
            if place == "forward" and rank == dead:
                die()
            loss.backward()
            if place == "ahead" and rank == dead:
                time.sleep(0.3), die()
            if place == "ahead" and dist.get_rank() == 2:
                dist.barrier()  # it hears of the loss before its step, and rank 1 after it
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            checkpoints.save(step, every=100)
            if place == "ahead":
                dist.barrier()
    return began, states


def test_live_parameters_are_taken_at_zero_0_and_no_step_is_lost(fresh_ranks):
    with tempfile.TemporaryDirectory() as folder, fresh_ranks(4) as team:
        team.start(live, folder=folder, faults={3: (2, "forward"), 5: (0, "ahead")})
        found = outcomes_of(team, dead=[0, 2])
        for began, states in found:
            sizes = [(0, 4), (1, 4), (2, 4), (3, 4), (3, 3), (4, 3), (5, 3), (6, 2)]
            assert began == sizes, "the step that was broken before its end is repeated, and the other one is not"
            assert states[3] == states[4], "all that the broken step had changed is taken back"
        (_, first), (_, second) = found
        for one, other in zip(first[:1] + first[7:], second[:1] + second[7:], strict=True):
            assert (one[0], one[1][:-1], one[2]) == (other[0], other[1][:-1], other[2]), (
                "but for generators of random numbers"
            )


def outcomes_in_words(rank, world_size, folder, stage, **options):
    try:
        return survive(rank, world_size, folder, stage, **options)[0]
    except sw.Error as error:
        return f"{type(error).__name__}: {error}"


def test_fewer_ranks_than_asked_for_are_one_sentence(fresh_ranks):
    with tempfile.TemporaryDirectory() as folder, fresh_ranks(3) as team:
        team.start(outcomes_in_words, folder=folder, stage=1, faults={2: (1, "step")}, min_ranks=3)
        for text in outcomes_of(team, dead=[1]):
            assert text == "Error: 2 of 3 ranks are left, and min_ranks=3: this job cannot go on in place"


def stopped(rank, world_size, folder, place):
    """Rank 0 stops; by a function that trains from a step on. Return the numbers of ranks at each of its calls."""
    model, optimizer, vocabulary = prepare(3, silent_s=0.5)
    checkpoints = sw.Checkpointer(folder, model, optimizer, memory_every=1)
    calls, start_save = [], Writer._start

    def stops(here):
        if rank == 0 and place == here:
            os.kill(os.getpid(), signal.SIGSTOP)

    def train(begin):
        calls.append((begin, dist.get_world_size()))
        for step in range(begin, 5):
            if step == 3:
                stops("step")
            train_step(model, optimizer, vocabulary, step)
            if checkpoints.save(step, every=3):
                checkpoints.wait()
        return calls

    with mock.patch.object(Writer, "_start", lambda *each: (stops("save"), start_save(*each))):
        return sw.survive(train, checkpoints, wait_s=0.5)


@pytest.mark.parametrize("place", ["step", "save"])
def test_a_rank_that_stops_is_left_out_and_ended(fresh_ranks, place):
    with tempfile.TemporaryDirectory() as folder, fresh_ranks(3) as team:
        team.start(stopped, folder=folder, place=place)
        outcomes = team.wait(40, patient=True)
        if not all(outcome.ok for outcome in outcomes[1:]):
            raise RanksFailed(outcomes)
        assert outcomes[0].ended == "signal SIGKILL"
        assert [outcome.value for outcome in outcomes[1:]] == [[(0, 3), (3, 2)]] * 2
        assert "step-000003" in os.listdir(folder)


@on_every_rank(exactly=2)
def test_what_cannot_go_on_in_place_says_so(rank, world_size):
    model, optimizer = sw.wrap(*build(), zero=1, process_group=dist.new_group([0, 1]))
    with sw.Checkpointer(shared_folder(rank), model, optimizer) as checkpoints:
        with pytest.raises(ValueError, match="with a process group of its own: restart"):
            next(sw.steps(checkpoints, 2))
    model, optimizer, _ = prepare(0)
    with sw.Checkpointer(shared_folder(rank), model, optimizer) as checkpoints:
        with pytest.raises(ValueError, match=r"wait_s must be in \(0, 1e9\] seconds, got nan"):
            next(sw.steps(checkpoints, 2, wait_s=float("nan")))
        with pytest.raises(ValueError, match="min_ranks must be"):
            next(sw.steps(checkpoints, 2, min_ranks=3))
        with pytest.raises(sw.Error, match="inside `with step:`"):
            for _ in sw.steps(checkpoints, 2):
                pass
        with pytest.raises(ZeroDivisionError):
            for step in sw.steps(checkpoints, 2):
                with step:
                    1 / 0


@on_every_rank(exactly=2)
def test_an_error_that_comes_again_though_no_rank_is_lost_is_raised(rank, world_size):
    model, optimizer, _ = prepare(0)
    tried = []
    with sw.Checkpointer(shared_folder(rank), model, optimizer) as checkpoints:
        with pytest.raises(sw.CommError, match="planned"):
            for step in sw.steps(checkpoints, 2):
                with step:
                    tried.append(int(step))
                    raise sw.CommError("planned: rank 7 failed")
    assert tried == [0] * 4
