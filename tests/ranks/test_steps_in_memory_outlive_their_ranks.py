"""Law: with a memory tier a killed job goes on from the newest step that all its ranks had copied, bit for bit, at any world size
and stage; a torn copy is never taken; a host's memory may be lost where another host has a copy; strangers get nothing; and where
memory does not suffice the disk alone is used.

Hosts are simulated: ranks of this machine are told which host they are on, and each such host has a guardian of its own."""

import contextlib
import functools
import gc
import itertools
import logging
import os
import random
import signal
import tempfile
import time
import zlib
from unittest import mock

import network
import numpy
import pytest
import torch
from checkpoint_subjects import Small, build, train_steps
from harness import LONG, gather, on_every_rank
from hosts import Lab
from internals import Table, budget, client, process_group, restoring
from peer import PEER, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder
from test_checkpoint_survives_kill_at_any_moment import fill, kill_at_random, training, values_of

pytestmark = pytest.mark.skipif(PEER == "torch", reason="shardwright's checkpoints")
KILLS = 60 if LONG else 3
LEAST = 1 if LONG else 3  # ranks; one alone differs in nothing but agreements
TO_DISK = 4
STAGES = {stage: {"zero": stage} for stage in range(4)}
STAGES |= {"private": {"zero": 3, "share_parameters": False, "units": torch.nn.Linear}}
client.LINGER_S = 20.0  # a test that fails leaves no memory behind for long


def trained(rank, pair, checkpoints, begin, end):
    def save(step):
        if checkpoints is not None:
            checkpoints.save(step, every=TO_DISK)
            checkpoints._memory.wait()  # steps here take less time than the copy to another host, and some would be skipped

    return train_steps(rank, *pair, begin, end, save)


def state(pair):
    with sw.full_parameters(pair[0]):
        return [value.tolist() for value in pair[0].state_dict().values()]


def go_on(rank, world_size, folder, zero, steps, hosts=None, replicas=None, lose=(), step=None):
    """Restore, train `steps` more, and return (step restored, state then, losses, pid of the guardian)."""
    process_group._forced_hosts = hosts
    pair = sw.wrap(*build(Small, 3), timeout_s=20, **STAGES[zero])
    checkpoints = sw.Checkpointer(folder, *pair, memory_every=1, memory_replicas=replicas)
    tier = checkpoints._memory
    assert not tier.off, tier.off
    begin = checkpoints.restore(step)
    gather(None)  # the host's first rank drops what was made for the restore
    assert not open_images() and "whole" not in tier._client.ask("list")[0]["names"], "a restore leaves nothing open"
    restored = state(pair)
    losses = trained(rank, pair, checkpoints, begin, begin + steps)
    tier.wait()
    checkpoints.wait()
    pid = tier._client.ask("list")[0]["pid"]
    gather(None)
    if tier._host in lose and tier._is_first:
        os.kill(pid, signal.SIGKILL)
    gather(None)
    return begin, restored, losses, pid


def alone(rank, world_size, zero, steps, hosts=None):
    process_group._forced_hosts = hosts
    pair = sw.wrap(*build(Small, 3), **STAGES[zero])
    losses = trained(rank, pair, None, 0, steps)
    return losses, state(pair)


class Wide(torch.nn.Module):
    """Large beside a block, so that what a host does not read can stay away."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(24, 120_000), torch.nn.Linear(120_000, 24))

    forward = Small.forward


STATE_BYTES = 3 * 4 * (2 * 24 * 120_000 + 120_024)  # parameters and two moments
EDGES_BYTES = (
    13 << 20
)  # of the blocks at both ends of a slice, in parameters and two moments of two buckets, and headers


def fetch(rank, world_size, folder, zero, hosts, lose=()):
    """Restore, keep two steps, and train one more. Return (step restored, state then, bytes from other hosts, bytes of the image,
    states after each step)."""
    process_group._forced_hosts = hosts
    pair = sw.wrap(*build(Wide, 3), timeout_s=20, **STAGES[zero])
    checkpoints = sw.Checkpointer(folder, *pair, memory_every=1, memory_replicas=1)
    sizes, close = [0], restoring.Source.close

    def measured(source):
        sizes[0] = os.fstat(source._image.fd).st_blocks * 512
        close(source)

    with mock.patch.object(restoring.Source, "close", measured):
        begin = checkpoints.restore()
    restored, tier, states = state_digest(pair), checkpoints._memory, []
    for step in range(begin, begin + 3):
        trained(rank, pair, checkpoints if step < begin + 2 else None, step, step + 1)
        states.append(state_digest(pair))
    gather(None)
    if tier._host in lose and tier._is_first:
        os.kill(tier._client.ask("list")[0]["pid"], signal.SIGKILL)
    gather(None)
    return begin, restored, checkpoints.progress["memory_fetched"], sizes[0], states


def state_digest(pair):
    with sw.full_parameters(pair[0]):
        return zlib.crc32(b"".join(value.numpy().tobytes() for value in pair[0].state_dict().values()))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("zero", STAGES if LONG else [2])
def test_a_restore_brings_each_host_what_its_ranks_read(fresh_ranks, zero):
    """Host 2 is lost, and then the world is another: each host gets the slices that it lacks; at zero=0 all that it lacks."""
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder:
        runs = []
        for hosts, lose in (([0, 1, 2], [2]), ([0, 1, 2], []), ([0, 1], [])):
            with fresh_ranks(len(hosts)) as team:
                runs.append(team.run(fetch, folder=folder, zero=zero, hosts=hosts, lose=lose))
                killed(team)
    first, second, third = ([*zip(*run)] for run in runs)
    assert [run[0] for run in (first, second, third)] == [(0,) * 3, (2,) * 3, (4,) * 2]
    assert set(second[1]) == {first[4][0][1]} and second[4][0][0] == first[4][0][2], "moments, too"
    assert set(third[1]) == {second[4][0][1]}
    share = STATE_BYTES // 3
    if zero == 0:
        assert all(share - (1 << 20) < each < share + EDGES_BYTES for each in second[2][:2]), "they have two thirds"
        assert STATE_BYTES < second[2][2] < STATE_BYTES + (1 << 20)
        return
    parameters = 0 if zero in (3, "private") else share // 3  # at zero < 3 all ranks hold them, and any writes them
    assert all(each < parameters + EDGES_BYTES for each in second[2][:2]), second[2]
    assert share - EDGES_BYTES < second[2][2] < share + EDGES_BYTES, second[2]
    assert second[3][2] < share + EDGES_BYTES < STATE_BYTES / 1.8, "no room is taken for the rest"
    assert all(each < STATE_BYTES / 2 for each in third[2]), third[2]


class Loader:
    """A loader whose state fills more than a block, so that ranks' random states lie in others."""

    def __init__(self, rank):
        self.order = torch.arange(200_000, dtype=torch.float64) + rank

    def state_dict(self):
        return {"order": self.order}

    def load_state_dict(self, state):
        self.order = state["order"]


def fail_with(error, *_):
    raise error("a test's cable")


def transfer_fails(rank, world_size, folder):
    """The wire of a restore fails on one host; the next restore is well. Compressors owe each rank its own error."""
    process_group._forced_hosts = [0, 1, 2]
    torch.manual_seed(3)
    module = Small()
    options = {"compress": sw.PowerSGD(2)}
    model, optimizer = sw.wrap(module, torch.optim.AdamW(module.parameters(), lr=1e-2), timeout_s=20, **options)
    options, loader = {"memory_every": 1, "memory_replicas": 0}, Loader(rank)
    with sw.Checkpointer(folder, model, optimizer, dataloader=loader, **options) as checkpoints:
        trained(rank, (model, optimizer), checkpoints, 0, TO_DISK + 1)
        trained(rank, (model, optimizer), None, TO_DISK + 1, TO_DISK + 2)
        after = state_digest((model, optimizer))
        held = len(open_images())
        for error in (RuntimeError, MemoryError):
            cable = functools.partial(fail_with, error)  # a Mock would keep the images that it is called with
            with mock.patch.object(restoring.Source, "_round", cable if rank == 1 else restoring.Source._round):
                assert checkpoints.restore() == TO_DISK
        assert len(open_images()) == held and checkpoints._memory.off == ""
        loader.order = None
        assert checkpoints.restore() == TO_DISK + 1 and torch.equal(loader.order, Loader(rank).order)
        trained(rank, (model, optimizer), None, TO_DISK + 1, TO_DISK + 2)
        assert state_digest((model, optimizer)) == after


@pytest.mark.timeout(120)
def test_a_transfer_that_fails_leaves_the_disk(fresh_ranks):
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder, fresh_ranks(3) as team:
        team.run(transfer_fails, folder=folder)


def open_images():
    """Return the descriptors and mappings of images that this process has."""
    gc.collect()
    found = [each.path for each in os.scandir("/proc/self/fd") if "shardwright-image" in links(each.path)]
    with open("/proc/self/maps") as file:
        return found + [line for line in file if "shardwright-image" in line]


def links(path):
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""


@contextlib.contextmanager
def said_by(logger):
    """Yield the list of what a logger says."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger(logger).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(logger).removeHandler(handler)


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def killed(team):
    for rank in range(team.world_size):
        team.signal(rank, signal.SIGKILL)


@pytest.mark.parametrize("zero", STAGES if LONG else [2])
@pytest.mark.timeout(120)
def test_a_killed_job_goes_on_from_memory_at_any_world_size(world_size, fresh_ranks, zero):
    with fresh_ranks(world_size) as team:
        whole = team.run(alone, zero=zero, steps=9)
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder:
        arguments = {"folder": folder, "zero": zero}
        with fresh_ranks(world_size) as team:
            first = team.run(go_on, **arguments, steps=6)
            killed(team)
        with fresh_ranks(world_size) as team:
            second = team.run(go_on, **arguments, steps=3)
            killed(team)
        assert [each[0] for each in first] == [0] * world_size
        assert [each[0] for each in second] == [6] * world_size, "the disk has step 4, memory step 6"
        for rank in range(world_size):
            assert first[rank][2] + second[rank][2] == whole[rank][0], "losses as of a job that was not killed"
        with fresh_ranks(2) as team:  # other ranks
            third = team.run(go_on, **arguments, steps=0)
            killed(team)
        assert [(step, restored) for step, restored, *_ in third] == [(9, whole[0][1])] * 2
        with fresh_ranks(world_size) as team:
            team.run(ends_in_order, folder=folder)
        wait_for(lambda: not os.path.exists(f"/proc/{third[0][3]}"))  # the guardian ends with the job


def ends_in_order(rank, world_size, folder):
    pair = sw.wrap(*build(Small, 3), zero=0)
    other = torch.nn.Linear(3, 3)
    with pytest.raises(sw.CheckpointError, match="'step 9 in memory' does not fit the model"):
        with sw.Checkpointer(folder, other, memory_every=1) as checkpoints:
            checkpoints.restore()
        assert not open_images()
        with mock.patch("shardwright.checkpoint.memory.tier.Image.each_table", lambda self: 1 // 0):
            with pytest.raises(ZeroDivisionError), contextlib.ExitStack() as opened:
                checkpoints._memory.assemble(mock.Mock(world_size=1, best=lambda host: "own-0", is_whole=True), opened)
        assert not open_images()
    with sw.Checkpointer(folder, *pair, memory_every=2) as checkpoints:
        assert checkpoints.restore() == 9, "the other model has cost nothing"
        assert checkpoints.restore(step=4) == 4  # of the disk; a rollback
        assert checkpoints.restore() == 4, "memory forgot the later steps"
        trained(rank, pair, checkpoints, 4, 7)
        assert checkpoints.progress["memory_step"] == 6
        assert checkpoints.restore() == 6
        assert checkpoints.restore(step=4) == 4
        trained(rank, pair, checkpoints, 4, 6)
        assert checkpoints.restore() == 6, "in the images of before"


def keep_for_ever(rank, world_size, folder):
    """Keep steps whose every value tells the step; note each step that save() has returned from."""
    torch.manual_seed(rank)
    model, optimizer = training()
    checkpoints = sw.Checkpointer(folder, model, optimizer, memory_every=1)
    start = checkpoints.restore()
    assert start == 0 or values_of(model, optimizer) == {float(start)}
    with open(f"{folder}/rank{rank}", "wb", buffering=0) as noted:
        for step in itertools.count(start):
            fill(model, optimizer, step + 1)
            checkpoints.save(step, every=50)
            os.pwrite(noted.fileno(), b"%15d" % (step + 1), 0)


def restore_and_look(rank, world_size, folder):
    model, optimizer = training()
    checkpoints = sw.Checkpointer(folder, model, optimizer, memory_every=1)
    step = checkpoints.restore()
    return step, sorted(values_of(model, optimizer)) if step else []


@pytest.mark.timeout(900)
def test_a_copy_that_a_kill_has_torn_is_never_taken(world_size, fresh_ranks):
    seed = int(time.time())
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder:
        highest = 0
        for _ in range(KILLS):
            with fresh_ranks(world_size) as team:
                team.start(keep_for_ever, folder=folder)
                has_more = functools.partial(lambda least: noted(folder, world_size) > least, highest)
                kill_at_random(team, world_size, seed, chance, has_more, pause_s=0.1, share_of_all=0.7)
            highest = noted(folder, world_size)
            with fresh_ranks(world_size) as team:
                answers = team.run(restore_and_look, folder=folder)
                killed(team)
            (step,) = {step for step, _ in answers}
            assert highest <= step <= highest + 1, (seed, highest, answers)
            assert all(found == [float(step)] for _, found in answers), (seed, answers)


test_a_killed_job_goes_on_from_memory_at_any_world_size.at_least = LEAST
test_a_copy_that_a_kill_has_torn_is_never_taken.at_least = LEAST


def noted(folder, world_size):
    """Return the last step from whose save() all ranks have returned."""
    found = []
    for rank in range(world_size):
        try:
            found.append(int(open(f"{folder}/rank{rank}").read() or 0))
        except FileNotFoundError:
            found.append(0)
    return min(found)


def test_a_table_is_taken_whole_or_not_at_all():
    encoded = Table({"nonce": "1m1", "rank": 0}, b"0123456789abcdef", b"tally").encode()
    padded = encoded + bytes(64)
    assert Table.decode(padded) == Table({"nonce": "1m1", "rank": 0}, b"0123456789abcdef", b"tally")
    for length in range(len(encoded)):
        assert Table.decode(encoded[:length] + bytes(64 + len(encoded) - length)) is None
        flipped = bytearray(padded)
        flipped[length] ^= 0x10
        assert Table.decode(flipped) is None


@pytest.mark.timeout(120)
def test_a_host_that_is_lost_is_restored_from_its_buddy(fresh_ranks):
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder:
        arguments = {"folder": folder, "zero": 1, "hosts": [0, 1, 1]}
        with fresh_ranks(3) as team:
            first = team.run(go_on, **arguments, steps=3, replicas=1, lose=[1])
            killed(team)
        with fresh_ranks(3) as team:  # a new host 1, which has nothing
            second = team.run(go_on, **arguments, steps=2, replicas=1, lose=[0])
            killed(team)
        assert [each[0] for each in second] == [3] * 3
        with fresh_ranks(3) as team:
            third = team.run(go_on, **arguments, steps=0, replicas=1, lose=[0, 1])
            killed(team)
        assert [each[0] for each in third] == [5] * 3
        with fresh_ranks(3) as team:
            last = team.run(go_on, **arguments, steps=0, replicas=0)
            killed(team)
        assert [each[0] for each in last] == [4] * 3, "both are lost: the disk has step 4"
        with fresh_ranks(3) as team:
            whole = team.run(alone, zero=1, steps=5, hosts=[0, 1, 1])
        assert [each[1] for each in third] == [each[1] for each in whole]
        for rank in range(3):
            assert first[rank][2] + second[rank][2] == whole[rank][0]


@pytest.mark.timeout(120)
def test_a_host_that_was_away_does_not_bring_back_steps_that_a_rollback_abandoned(fresh_ranks):
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder:
        both, runs = {"hosts": [0, 1, 1], "replicas": 1}, []
        for hosts, steps, step in ((both, 6, None), ({"hosts": [0, 0]}, 1, 4), (both, 0, None), (both, 0, 5)):
            with fresh_ranks(len(hosts["hosts"])) as team:
                runs.append(team.run(go_on, folder=folder, zero=1, steps=steps, step=step, **hosts))
                killed(team)
        assert [run[0][0] for run in runs] == [0, 4, 5, 5], "the guardian of host 1 has all of step 6, the disk step 4"
        with fresh_ranks(3) as team:
            last = team.run(go_on, folder=folder, zero=1, steps=0, **both)
        assert last[0][0] == 5


@on_every_rank(at_least=LEAST)
def test_a_step_that_was_restored_stays_until_the_next_is_complete(rank, world_size):
    """The step after it, which the rollback abandoned, makes room."""
    folder = shared_folder(rank)
    pair = build(Small, 0)
    with sw.Checkpointer(folder, *pair, memory_every=1) as checkpoints:
        for begin, end, found in ((0, 3, [2, 3]), (2, 3, [2, 3]), (3, 4, [3, 4])):
            for step in range(begin, end):
                trained(0, pair, None, step, step + 1)
                checkpoints.save(step, every=100)
            assert [each.step for each in checkpoints._memory.candidates()] == found
            assert begin or checkpoints.restore(step=2) == 2


@on_every_rank(at_least=LEAST)
def test_where_memory_does_not_suffice_the_disk_alone_is_used(rank, world_size):
    folder = shared_folder(rank)
    pair = build(Small, 0)
    trained(0, pair, None, 0, 1)
    with pytest.raises(ValueError, match=r"memory_replicas must be in \[0, 0\].*all on host"):
        sw.Checkpointer(folder, *pair, memory_every=1, memory_replicas=1)
    few = 40_000 if rank == 0 else 1 << 30
    with (
        said_by("shardwright") as said,
        mock.patch("shardwright.checkpoint.memory.tier.memory_left", lambda: (few, "a test's limit")),
    ):
        with sw.Checkpointer(folder, *pair, memory_every=1) as checkpoints:
            assert checkpoints.restore() == 0
            trained(0, pair, checkpoints, 0, 5)
    assert "no number of replicas would fit" in checkpoints._memory.off and "a test's limit" in checkpoints._memory.off
    assert [each for each in said if "memory tier" in each] == [
        f"checkpoints go to the disk alone, without a memory tier: {checkpoints._memory.off}"
    ] * (rank == 0)
    assert [name for name in sorted(os.listdir(folder)) if name[0] != "."] == ["memory.json", "step-000004"]


@on_every_rank(at_least=LEAST)
def test_a_tier_that_fails_leaves_the_disk(rank, world_size):
    """One rank cannot copy, or the guardian is killed: training goes on, all ranks use the disk, and nothing stays open."""
    pair = build(Small, 0)
    counts = []
    for trouble in ("copy", "guardian", "copy"):
        folder = shared_folder(rank)
        with sw.Checkpointer(folder, *pair, memory_every=1) as checkpoints:
            tier = checkpoints._memory
            trained(0, pair, checkpoints, 0, 2)
            pid = tier._client.ask("list")[0]["pid"]
            gather(None)
            if trouble == "copy" and rank == world_size - 1:
                tier._write = mock.Mock(side_effect=MemoryError("no memory for a test"))
            elif rank == 0 and trouble == "guardian":
                os.kill(pid, signal.SIGKILL)
                wait_for(lambda client=tier._client: not client.is_alive)
            gather(None)
            trained(0, pair, checkpoints, 2, 5)
            assert ("no memory for a test" if trouble == "copy" else "its guardian has ended") in tier.off
            assert checkpoints.restore() == TO_DISK and checkpoints.describe()["memory"] == tier.off
        del tier, checkpoints
        gc.collect()
        gather(None)
        counts.append(len(os.listdir("/proc/self/fd")))  # the first Checkpointer made the communicator, too
    assert counts == counts[:1] * 3


def copy_fails(rank, world_size, folder):
    """The copy of a step fails on one rank, and restore() comes before the next save."""
    process_group._forced_hosts = [0, 1, 1]
    pair = sw.wrap(*build(Small, 3), timeout_s=20)
    with said_by("shardwright") as said, sw.Checkpointer(f"{folder}/same", *pair, memory_every=1) as checkpoints:
        assert checkpoints._memory.replicas == 0, "a copy on the same machine would be lost with it"
    named = (
        "hosts 0 and 1 are one machine: steps in memory are not copied to other hosts; memory_replicas=1 asks for it"
    )
    assert said == [named] * (rank == 0)
    for is_late in (False, True):
        with sw.Checkpointer(f"{folder}/{is_late}", *pair, memory_every=1, memory_replicas=1) as checkpoints:
            tier = checkpoints._memory
            assert not tier.off, tier.off
            trained(0, pair, checkpoints, 0, TO_DISK)
            write = mock.Mock(side_effect=MemoryError("no memory for a test")) if rank == 2 else tier._write
            with mock.patch.object(tier, "_write", write):
                checkpoints.save(TO_DISK, every=TO_DISK)
            if is_late and rank == 0:
                with mock.patch.object(tier, "_timeout_s", 1.0):
                    tier.wait()
                assert "nothing of the copy of a step to or from another host came in 1 s" in tier._failure
            assert checkpoints.restore() == TO_DISK
            assert ("came in 1 s" if is_late else "no memory for a test") in tier.off


@pytest.mark.timeout(120)
def test_a_copy_that_never_comes_is_not_waited_for(fresh_ranks):
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder, fresh_ranks(3) as team:
        team.run(copy_fails, folder=folder)


def stopped_guardian(rank, world_size, folder):
    """The guardian is stopped while the ranks, which wait for 8 s, train, and when they start again."""
    pair = sw.wrap(*build(Small, 3), timeout_s=8)
    reasons, pid = [], 0
    try:
        for begin in (0, TO_DISK):
            with sw.Checkpointer(folder, *pair, memory_every=1) as checkpoints:
                assert checkpoints.restore() == begin
                trained(rank, pair, checkpoints, begin, begin + 1)
                if begin == 0:
                    pid = checkpoints._memory._client.ask("list")[0]["pid"]
                    gather(None)
                    os.kill(pid, signal.SIGSTOP)
                trained(rank, pair, checkpoints, begin + 1, begin + TO_DISK)  # images of the second slot are made
                reasons.append(checkpoints._memory.off)
    finally:
        gather(None)
        os.kill(pid, signal.SIGCONT)
    return reasons


@pytest.mark.skipif(not LONG, reason="long form only (SW_TEST_LONG=1)")
@pytest.mark.timeout(120)
def test_a_stopped_guardian_leaves_the_disk(fresh_ranks):
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder, fresh_ranks(3) as team:
        told = team.run(stopped_guardian, folder=folder)
    assert all("this host's guardian does not answer: timed out" in each for reasons in told for each in reasons), told


def test_what_would_fit_is_named():
    gib = 1 << 30
    needs = [
        budget.Need("a", 2 * gib, [gib, gib], 0, 8 * gib, "MemAvailable"),
        budget.Need("b", gib, [gib], 0, 8 * gib, "x"),
    ]
    assert budget.refusal(needs, 1) == "" and "memory_replicas=1 would fit" in budget.refusal(needs[:1], 2)
    assert "2 images of 2.00 GiB of its ranks and of 2 other hosts" in budget.refusal(needs[:1], 2)
    assert budget.no_restore(needs[:1], 1) == "" and budget.no_restore(needs, 1) == ""
    needs[1] = budget.Need("b", gib, [gib], 0, 5 * gib, "x")
    assert (
        "host b has room for its images and not for a restore from memory, which needs 2.00 GiB more"
        in budget.no_restore(needs, 1)
    )
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) * 1024
    assert 0 < budget.memory_left()[0] < total


@on_every_rank(at_least=LEAST)
def test_a_step_with_other_tensors_is_not_taken_for_the_one_before(rank, world_size):
    """A step lists its tensors anew only if something has changed since the one before; each change must be seen."""
    folder = shared_folder(rank)
    pair = model, optimizer = build(Small, 0)
    weight, noted, own = model.layers[0].weight, {}, {}

    def move():
        weight.data = weight.data.clone()  # the same tensor in another place

    def replace():
        optimizer.state[weight]["exp_avg"] = optimizer.state[weight]["exp_avg"].clone()

    def leave_out():
        model.layers[2] = torch.nn.Identity()

    changes = [(lambda: None, True), (lambda: optimizer.param_groups[0].update(lr=0.5), True), (move, False)]
    changes += [(replace, False), (leave_out, False), (lambda: model.register_buffer("count", torch.ones(3)), False)]
    with sw.Checkpointer(folder, *pair, memory_every=1, user_state=noted, dataloader=own) as checkpoints:
        for number, (change, is_repeated) in enumerate(changes):
            for step in (2 * number, 2 * number + 1):
                noted["step"] = step
                own |= {"at": [step, rank], "order": torch.full((3,), step + rank / 8)}
                numpy.random.normal()  # of two that are made at once, each second one
                trained(0, pair, None, step, step + 1)
                checkpoints.save(step, every=100)
                change() if step % 2 == 0 else None
            assert checkpoints._memory.are_ready is is_repeated, number
            before = [*whole_state(*pair), own.pop("order")]
            trained(0, pair, None, 77, 78)
            random.random()
            next_normal = numpy.random.normal()
            assert checkpoints.restore() == step + 1 and noted == {"step": step}
            assert own["at"] == [step, rank] and numpy.random.normal() == next_normal
            for ours, theirs in zip([*whole_state(*pair), own["order"]], before):
                assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs, number


@on_every_rank(at_least=LEAST)
def test_an_array_among_the_options_comes_back_from_memory(rank, world_size):
    """It is a tensor of its own, for which the steps before have no room."""
    folder = shared_folder(rank)
    pair = build(Small, 0)
    group = pair[1].param_groups[0]
    with sw.Checkpointer(folder, *pair, memory_every=1) as checkpoints:
        for step in range(6):
            trained(0, pair, None, step, step + 1)
            if step == 2:
                group["curve"] = numpy.arange(3.0)
            checkpoints.save(step, every=100)
            assert checkpoints._memory.are_ready is (step == 1), step
        group["curve"] = None
        assert checkpoints.restore() == 6 and group["curve"].tolist() == [0.0, 1.0, 2.0]


def whole_state(model, optimizer):
    state = [each[key].clone() for each in optimizer.state.values() for key in sorted(each)]
    lr = optimizer.param_groups[0]["lr"]
    return [*(each.clone() for each in model.state_dict().values()), *state, lr, random.getstate()]


@pytest.mark.skipif(not LONG, reason="long form only (SW_TEST_LONG=1)")
@pytest.mark.timeout(180)
def test_hosts_that_are_apart_go_on_from_one_anothers_memory(hosts):
    """As with simulated hosts, over a network of two; every rank of host 1 and its guardian are lost."""
    (teams,) = hosts.args
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder, network.network(2, None) as made:
        arguments = {"folder": folder, "zero": 2, "replicas": 1}
        lab = Lab(teams, made, (2, 1), True)
        with lab.team as team:
            first = team.run(go_on, **arguments, steps=3, lose=[1])
            lab.kill(1)
            lab.kill(0)
        with Lab(teams, made, (1, 1), True).team as team:
            second = team.run(go_on, **arguments, steps=1)
        assert [each[0] for each in first] == [0] * 3 and [each[0] for each in second] == [3] * 2
