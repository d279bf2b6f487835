"""Law: with a spare in the place of a lost rank the others go on with the bits of a run that lost none; a spare that comes later joins
between two steps; and one that does not fit says why.
"""

import datetime
import os
import tempfile
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from internals import Board, leave, own_member, spares
from peer import PEER, sw
from test_a_lost_rank_is_survived_in_place import STAGES, die, digest, outcomes_of, prepare, restarted, train_step

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
RANKS, STOP = 3, 8


def take_part(rank, world_size, folder):
    """Make a group of the first ranks. Each other process is what `shardwright rank` starts: a spare, rank 0 of 1."""
    os.makedirs(f"{folder}/start", exist_ok=True)
    open(f"{folder}/up-{rank}", "w").close()
    await_(lambda: all(os.path.exists(f"{folder}/up-{each}") for each in range(world_size)))  # none is still connecting
    leave()
    os.environ |= {spares.START: f"{folder}/start", spares.SLOT: f"{folder}/slot-{rank}"}
    is_spare = rank >= RANKS
    store = dist.HashStore() if is_spare else dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=0 if is_spare else rank, world_size=1 if is_spare else RANKS)
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    if is_spare:
        os.environ[spares.SPARE] = os.environ[spares.SLOT]
    return is_spare


def await_(condition, limit_s=50):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def attempts(folder, path):
    """Return what lies there in the folder of attempts."""
    found = [f"{each.path}/{path}" for each in os.scandir(folder) if ".attempts" in each.name]
    return [each for each in found if os.path.exists(each)]


def announced(folder):
    """Return how many spares have come to the ranks' loop."""
    return sum(len(os.listdir(each)) for each in attempts(folder, "spares"))


class Position:
    """A dataloader that says where it is."""

    def __init__(self):
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def spared(
    rank, world_size, folder, stage, faults, comes=None, stop=STOP, memory_every=1, every=100, has_data=False, **options
):
    """Train with spares. `faults`: step -> (number, place of death). `comes`: the step at which the ranks wait for a spare, or "loss"."""
    is_spare = take_part(rank, world_size, folder)
    if is_spare and comes is not None:
        await_(lambda: attempts(folder, "1/here-2") if comes == "loss" else os.path.exists(f"{folder}/comes"))
    model, optimizer, vocabulary = prepare(stage)
    if is_spare:
        with sw.full_parameters(model, writable=True), torch.no_grad():
            next(iter(model.parameters())).zero_()
    torch.manual_seed(1 + dist.get_rank())
    data = Position() if has_data else None
    checkpoints = sw.Checkpointer(folder, model, optimizer, memory_every=memory_every, dataloader=data)
    assert checkpoints.restore() == 0 and checkpoints.latest is None
    if is_spare:
        with pytest.raises(sw.CheckpointError, match="a spare opens its Checkpointer in sw.steps"):
            checkpoints.wait()
    seen = []
    try:
        for step in sw.steps(checkpoints, stop, **options):
            with step:
                seen.append((int(step), dist.get_rank(), dist.get_world_size()))
                assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == tuple(map(str, seen[-1][1:]))
                if step == 0:
                    await_(lambda: announced(folder) == world_size - RANKS or comes is not None)
                if step == comes:
                    open(f"{folder}/comes", "w").close()
                    await_(lambda: announced(folder))
                dead, place = faults.pop(int(step), (None, None))
                place = place if dead == dist.get_rank() and not is_spare else None
                train_step(model, optimizer, vocabulary, step, place)
                if place == "save":
                    die()
                if checkpoints.save(step, every=every) and memory_every is None:
                    checkpoints.wait()
    except SystemExit as end:
        return f"left with {end.code}", seen
    except sw.Error as error:
        return f"{type(error).__name__}: {error}", seen
    with open(f"{folder}/drawn", "a") as file:
        print(torch.rand(1).item(), file=file)
    with open(os.environ[spares.SLOT]) as file:
        assert file.read() == "ended", "`shardwright rank` starts it again no more"
    found = digest(model, optimizer)
    checkpoints.close()
    return found, seen


@pytest.fixture(scope="module")
def undisturbed(teams):
    return restarted(teams, (RANKS, 0, STOP))


@pytest.fixture(scope="module")
def grown(teams):
    """Digests of a run whose starts have 3, 2 and 3 ranks."""
    return restarted(teams, (3, 0, 2), (2, 2, 6), (3, 6, STOP))


@pytest.mark.parametrize("turn", range(len(STAGES)))
def test_the_bits_are_those_of_a_run_that_lost_no_rank(fresh_ranks, undisturbed, turn):
    places = (["forward", "backward", "step", "save"] * 2)[turn : turn + 2]
    with tempfile.TemporaryDirectory() as folder, fresh_ranks(RANKS + 2) as team:
        # rank 0, which holds the store of torch's group, is the second to die
        faults = {3: (2, places[0]), 5: (0, places[1])}
        team.start(spared, folder=folder, stage=list(STAGES)[turn], faults=faults)
        for found, seen in outcomes_of(team, dead=(0, 2)):
            assert found == undisturbed
            assert {size for *_, size in seen} == {RANKS} and len({number for _, number, _ in seen}) == 1
            assert len(seen) <= STOP + 2, "at most the broken step is repeated"


def test_a_spare_that_nobody_needs_ends_with_the_others(fresh_ranks, undisturbed):
    with tempfile.TemporaryDirectory() as folder, fresh_ranks(RANKS + 1) as team:
        team.start(spared, folder=folder, stage=2, faults={})
        *found, left = outcomes_of(team, dead=())
        assert [each for each, _ in found] == [undisturbed] * RANKS and left == ("left with 0", [])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_spare_that_comes_later_joins_between_two_steps(fresh_ranks, grown, stage):
    with tempfile.TemporaryDirectory() as folder, fresh_ranks(RANKS + 1) as team:
        team.start(spared, folder=folder, stage=stage, faults={2: (1, "forward")}, comes=4)
        outcomes = outcomes_of(team, dead=(1,))
        sizes = [[(step, size) for step, _, size in seen] for _, seen in outcomes]
        # rank 0 sees it before step 5, and says that it joins before step 6
        assert sizes[0] == sizes[1] == [(0, 3), (1, 3), (2, 3), (2, 2), (3, 2), (4, 2), (5, 2), (6, 3), (7, 3)]
        assert sizes[2] == [(6, 3), (7, 3)]
        assert [found for found, _ in outcomes] == [grown] * RANKS
        with open(f"{folder}/drawn") as file:
            assert len(set(file)) == RANKS, "the new rank draws random numbers of its own"


def spared_with_a_save_that_fails(rank, world_size, folder, **options):
    """As spared(), with a save that has failed when the spare joins."""
    as_usual = sw.Checkpointer._wait

    def fails(self):
        if os.path.exists(f"{folder}/comes") and dist.get_world_size() == RANKS - 1:
            raise sw.CheckpointError("planned")
        as_usual(self)

    with mock.patch.object(sw.Checkpointer, "_wait", fails):
        return spared(rank, world_size, folder, **options)


def test_a_spare_joins_after_a_save_that_failed(fresh_ranks, grown):
    with tempfile.TemporaryDirectory() as folder, fresh_ranks(RANKS + 1) as team:
        team.start(spared_with_a_save_that_fails, folder=folder, stage=2, faults={2: (1, "forward")}, comes=4)
        assert [found for found, _ in outcomes_of(team, dead=(1,))] == [grown] * RANKS


def test_the_others_wait_for_a_spare_that_they_are_promised(fresh_ranks, undisturbed):
    with tempfile.TemporaryDirectory() as folder, fresh_ranks(RANKS + 1) as team:
        team.start(spared, folder=folder, stage=1, faults={3: (1, "step")}, comes="loss", spares=1)
        for found, seen in outcomes_of(team, dead=(1,)):
            assert found == undisturbed and {size for *_, size in seen} == {RANKS}


def test_without_steps_in_memory_a_spare_gets_the_live_state_at_zero_0(fresh_ranks, undisturbed):
    with tempfile.TemporaryDirectory() as folder, fresh_ranks(RANKS + 1) as team:
        team.start(spared, folder=folder, stage=0, faults={3: (1, "forward")}, memory_every=None)
        for found, seen in outcomes_of(team, dead=(1,)):
            assert found == undisturbed and [step for step, *_ in seen][-5:] == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(("stage", "has_data"), [(2, False), (0, True)])
def test_a_spare_joins_at_a_save_if_no_step_is_kept(fresh_ranks, stage, has_data):
    options = {"stage": stage, "has_data": has_data, "memory_every": None, "every": 4, "comes": 5, "stop": 9}
    with tempfile.TemporaryDirectory() as folder, fresh_ranks(RANKS + 1) as team:
        team.start(spared, folder=folder, faults={4: (1, "forward")}, **options)
        *found, last = outcomes_of(team, dead=(1,))
        late = [(4, 2), (5, 2), (6, 2), (7, 2), (8, 3)]
        for _, seen in found:
            assert [(step, size) for step, _, size in seen][5:] == late, "no step is repeated for a spare"
        assert [step for step, *_ in last[1]] == [8] and last[0] == found[0][0]


def spared_twice(rank, world_size, folder, word, **options):
    """As spared(), with a spare that dies when it is about to say a word."""
    as_usual = Board.say

    def dies(self, key, value):
        if rank == RANKS and key.startswith(word):
            die()
        as_usual(self, key, value)

    with mock.patch.object(Board, "say", dies):
        return spared(rank, world_size, folder, **options)


@pytest.mark.parametrize("word", ["ready", "came"])
def test_a_spare_that_dies_while_it_takes_a_place_is_survived(fresh_ranks, word):
    with tempfile.TemporaryDirectory() as folder, fresh_ranks(RANKS + 1) as team:
        team.start(spared_twice, folder=folder, word=word, stage=2, faults={3: (1, "step")}, stop=5)
        for found, seen in outcomes_of(team, dead=(1, RANKS)):
            assert isinstance(found, list) and [size for *_, size in seen] == [3, 3, 3, 3, 2, 2]


def test_too_few_ranks_end_the_spares_too_with_one_sentence(fresh_ranks):
    with tempfile.TemporaryDirectory() as folder, fresh_ranks(RANKS + 1) as team:
        team.start(spared_twice, folder=folder, word="ready", stage=2, faults={3: (1, "step")}, min_ranks=3)
        for found, _ in outcomes_of(team, dead=(1, RANKS)):
            assert found == "Error: 2 of 3 ranks are left, and min_ranks=3: this job cannot go on in place"


def of_another_program(rank, world_size, folder, what, own):
    if rank == RANKS:
        with mock.patch.dict(spares._runs.__globals__, {"_runs": lambda runs=spares._runs: runs() | {what: own}}):
            return spared(rank, world_size, folder, 1, {}, comes=0)
    with mock.patch(f"{__name__}.announced", lambda _: True):  # it never comes
        return spared(rank, world_size, folder, 1, {}, comes=0)


@pytest.mark.parametrize(("what", "own"), [("torch", "1.0.0"), ("the program", "x.py with SHA-256 00")])
def test_a_spare_of_another_program_or_torch_is_one_sentence(fresh_ranks, what, own):
    with tempfile.TemporaryDirectory() as folder, fresh_ranks(RANKS + 1) as team:
        team.start(of_another_program, folder=folder, what=what, own=own)
        *others, (text, _) = outcomes_of(team, dead=())
        assert all(isinstance(found, list) for found, _ in others)
        assert (
            text.startswith("Error: a spare, process ") and f" has {what} {own}, and the ranks of its job have " in text
        )


def alone(rank, world_size, folder, why):
    """A spare whose ranks have ended, or whose folder of attempts is that of an earlier start."""
    leave()
    limit = datetime.timedelta(seconds=1 if why == "late" else 60)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    model, optimizer, _ = prepare(1)
    with sw.Checkpointer(folder, model, optimizer) as checkpoints:
        with pytest.raises(ValueError, match="spares=1 needs `shardwright rank`"):
            next(sw.steps(checkpoints, 2, spares=1))
    os.makedirs(f"{folder}/start")
    os.environ |= {spares.START: f"{folder}/start", spares.SPARE: f"{folder}/spare"}
    member = own_member()
    if why != "late":
        os.mkdir(f"{folder}/attempts")
    if why == "ended":
        member = member._replace(start=1)
    spares._begun = 1
    why == "late" or spares.publish(spares.Job(f"{folder}/attempts", [member] * 3, "gloo", 60.0, {}), 0)
    if why == "removed":
        os.rename(f"{folder}/attempts", f"{folder}/old")
    spares._begun = 0
    with sw.Checkpointer(folder, model, optimizer) as checkpoints, pytest.raises(sw.Error) as caught:
        next(sw.steps(checkpoints, 2))
    return str(caught.value)


@pytest.mark.parametrize(
    ("why", "sentence"),
    [
        ("ended", "all 3 ranks have ended while a spare"),
        ("removed", "a later start of the job has removed"),
        ("late", "waited 1 s for the ranks of its job to come to sw.steps"),
    ],
)
def test_a_spare_without_its_ranks_is_one_sentence(fresh_ranks, why, sentence):
    with tempfile.TemporaryDirectory() as folder, fresh_ranks(1) as team:
        (text,) = team.run(alone, folder=folder, why=why)
        assert sentence in text and str(team.pids[0]) in text
