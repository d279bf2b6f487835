"""Law: with `local` a save is durable on the hosts' own disks before its copy to the shared directory is. After a kill at any
moment restore() takes the newest step that is whole in either place, bit for bit, and names a step that a lost disk takes with it.
The shared directory holds whole checkpoints at every instant. A full disk on either side costs what was to be there.

Hosts are simulated: ranks of this machine are told which host they are on, and each such host has a folder of its own."""

import contextlib
import ctypes
import errno
import functools
import itertools
import os
import random
import shutil
import tempfile
import time
from unittest import mock

import pytest
import torch
from checkpoint_subjects import Small, build
from harness import LONG, gather, join_from_own_namespaces, on_every_rank
from internals import Image, local, partial, process_group
from peer import PEER, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder
from test_checkpoint_survives_kill_at_any_moment import fill, kill_at_random, training, values_of
from test_hosts_fold_in_two_steps import on_hosts
from test_steps_in_memory_outlive_their_ranks import killed, noted, said_by, state, trained

pytestmark = pytest.mark.skipif(PEER == "torch", reason="shardwright's checkpoints")
KILLS = 60 if LONG else 2
SLOW = 2_000  # bytes a second of a copy that never ends
left_open = []
STAGES = {stage: {"zero": stage} for stage in range(4)}


def go_on(rank, world_size, folder, zero, steps, hosts=None, slow=False):
    """Restore, train `steps` more, save, and train one more. Return (step restored, state then, states after, last loss, warnings)."""
    process_group._forced_hosts = hosts
    pair = sw.wrap(*build(Small, 3), timeout_s=20, **STAGES[zero])
    options = {"bandwidth_bytes_per_s": SLOW if slow else 0}
    with said_by("shardwright") as said:
        checkpoints = sw.Checkpointer(f"{folder}/shared", *pair, local=f"{folder}/local", keep_last=2, **options)
        begin = checkpoints.restore()
    left_open.append(checkpoints)  # its end would wait for the copy
    states, losses = [state(pair)], []
    for first, last in ((0, steps), (steps, steps + 1)) if steps else ():
        losses += trained(rank, pair, None, begin + first, begin + last)
        states.append(state(pair))
        if last == steps:
            checkpoints.save(begin + steps - 1)
            checkpoints.wait()
            assert checkpoints.progress["busy"] or not slow
            if not slow:
                checkpoints.close()
    gather(None)
    return begin, states, losses, [each for each in said if "is lost" in each]


def run(fresh_ranks, count, **arguments):
    with fresh_ranks(count) as team:
        found = team.run(go_on, **arguments)
        killed(team)
    assert all(each[:2] == found[0][:2] for each in found)
    return *found[0][:2], [losses for _, _, losses, _ in found], found[0][3]


def shared(folder):
    """Return the steps in the shared directory, each of which must be whole."""
    names = sorted(each for each in os.listdir(f"{folder}/shared") if each.startswith("step-") and "." not in each)
    for name in names:
        from shardwright_tools.cli import main

        assert main(["ckpt", "verify", f"{folder}/shared/{name}"]) == 0
    return [int(name.removeprefix("step-")) for name in names]


@pytest.mark.parametrize("zero", STAGES if LONG else [2])
@pytest.mark.timeout(180)
def test_a_killed_job_goes_on_from_the_disks_of_its_hosts(fresh_ranks, zero):
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder, tempfile.TemporaryDirectory(prefix="ckpt-") as other:
        begin, (_, second, _), _, _ = run(fresh_ranks, 3, folder=folder, zero=zero, steps=2)
        assert begin == 0
        begin, (restored, fourth, fifth), losses, _ = run(fresh_ranks, 3, folder=folder, zero=zero, steps=2, slow=True)
        assert begin == 2 and restored == second and shared(folder) == [2], "the copy of step 4 was cut off"
        shutil.copytree(f"{folder}/shared", f"{other}/shared")
        begin, states, again, said = run(fresh_ranks, 3, folder=folder, zero=zero, steps=1)
        assert begin == 4 and states[:2] == [fourth, fifth] and not said
        assert [each[0] for each in again] == [each[2] for each in losses], "the loss of a job that was not killed"
        assert shared(folder) == [2, 5], "and then it is copied"
        begin, states, _, said = run(
            fresh_ranks, 2, folder=other, zero=0, steps=0
        )  # a copy has no local steps; other ranks
        assert begin == 2 and states == [second] and "step 4 is lost: " in said[0] and len(said) == 1


@pytest.mark.timeout(180)
def test_a_lost_host_costs_what_was_not_copied(fresh_ranks):
    """Until it is back: what it brings then was abandoned."""
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder:
        go = functools.partial(run, fresh_ranks, folder=folder, zero=1)
        go(3, hosts=[0, 1, 1], steps=2)
        _, (_, third, _), _, _ = go(3, hosts=[0, 1, 1], steps=1, slow=True)
        begin, states, _, said = go(3, hosts=[0, 0, 1], steps=0)
        assert begin == 3 and states == [third] and not said, "hosts send one another what they lack"
        (away,) = [each for each in os.listdir(f"{folder}/local") if each.endswith("-1")]
        os.rename(f"{folder}/local/{away}", f"{folder}/away")
        begin, _, _, said = go(2, hosts=[0, 1], steps=0)
        assert begin == 2 and "step 3 is lost: " in said[0] and len(said) == 1
        shutil.rmtree(f"{folder}/local/{away}")
        os.rename(f"{folder}/away", f"{folder}/local/{away}")
        assert go(2, hosts=[0, 1], steps=0)[0] == 2


def beside_memory(rank, world_size, folder, begin, saves, every=1, is_cut=False, **options):
    """Restore and save some steps, each `every` of them also outside of memory. `is_cut`: no image on a disk is ever finished."""
    pair = training()
    options = {"local": f"{folder}/local", "bandwidth_bytes_per_s": SLOW, **options}
    checkpoints = sw.Checkpointer(f"{folder}/shared", *pair, **options)
    left_open.append(checkpoints)
    assert checkpoints.restore() == begin
    with mock.patch.object(local.LocalTier, "_finish") if is_cut else contextlib.nullcontext():
        for step in range(begin, begin + saves):
            fill(*pair, step + 1)
            checkpoints.save(step, every=every)
            if not is_cut:
                checkpoints.wait()
    gather(None)
    return checkpoints._local._complete


@pytest.mark.timeout(120)
def test_a_restore_from_memory_leaves_the_step_on_the_disk(fresh_ranks):
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder:
        memory = {"memory_every": 1}
        found = []
        for arguments in (
            {"begin": 0, "saves": 3, "every": 2, **memory},
            {"begin": 3, "saves": 1, "every": 2, "is_cut": True, **memory},
            {"begin": 2, "saves": 0},
        ):
            with fresh_ranks(3) as team:
                found.append(team.run(beside_memory, folder=folder, **arguments))
                killed(team)
        assert found[1:] == [[(0, 2)] * 3] * 2


def save_for_ever(rank, world_size, folder):
    torch.manual_seed(rank)
    model, optimizer = training()
    checkpoints = sw.Checkpointer(f"{folder}/shared", model, optimizer, local=f"{folder}/local", keep_last=2)
    start = checkpoints.restore()
    assert start == 0 or values_of(model, optimizer) == {float(start)}
    with open(f"{folder}/rank{rank}", "wb", buffering=0) as noted_here:
        for step in itertools.count(start):
            fill(model, optimizer, step + 1)
            checkpoints.save(step)
            checkpoints.wait()
            os.pwrite(noted_here.fileno(), b"%15d" % (step + 1), 0)


def restore_and_look(rank, world_size, folder, local):
    model, optimizer = training()
    checkpoints = sw.Checkpointer(f"{folder}/shared", model, optimizer, **local)
    step = checkpoints.restore()
    return step, sorted(values_of(model, optimizer)) if step else []


@pytest.mark.timeout(900)
def test_after_a_kill_at_any_moment_the_newest_step_of_both_places_is_taken(world_size, fresh_ranks):
    seed = int(time.time())
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder:
        highest = 0
        for turn in range(KILLS):
            with fresh_ranks(world_size) as team:
                team.start(save_for_ever, folder=folder)
                has_more = functools.partial(lambda least: noted(folder, world_size) > least, highest)
                kill_at_random(team, world_size, seed, chance, has_more, pause_s=0.25, share_of_all=0.7)
            highest, copied = noted(folder, world_size), shared(folder)
            copied = copied[-1] if copied else 0
            assert highest - 2 <= copied <= highest + 1, (seed, highest, copied)
            disk = {"local": f"{folder}/local"} if turn % 3 != 1 else {}  # or without the hosts' disks
            with fresh_ranks(world_size) as team:
                answers = team.run(restore_and_look, folder=folder, local=disk)
                killed(team)
            (step,) = {step for step, _ in answers}
            least, most = (highest, highest + 1) if disk else (copied, copied)
            assert least <= step <= most, (seed, highest, copied, answers)
            expected = [float(step)] if step else []  # the first copy may not have ended
            assert all(found == expected for _, found in answers), (seed, answers)
            highest = max(highest, step)


def small_disk(folder, nbytes):
    os.makedirs(folder)
    return ctypes.CDLL(None).mount(b"tmpfs", folder.encode(), b"tmpfs", 0, b"size=%d" % nbytes) == 0


def on_full_disks(rank, world_size, folder):
    """Each rank is a host, with namespaces and a disk of its own; that of the last is full."""
    process_group._forced_hosts = [*range(world_size)]
    if not small_disk(f"{folder}/local{rank}", 32 << 20):
        return "mounting is not permitted"
    pair = training()
    fill(*pair, 1)
    with said_by("shardwright") as said:
        checkpoints = sw.Checkpointer(f"{folder}/shared", *pair, local=f"{folder}/local{rank}")
        checkpoints.save(0)
        checkpoints.wait()
        if rank == world_size - 1:  # behind the budget's back
            with open(f"{folder}/local{rank}/rest", "wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 12))
        for step in (1, 2):  # the first is copied from memory; the second knows
            fill(*pair, step + 1)
            checkpoints.save(step)
            checkpoints.wait()
        off = checkpoints._local.off
        checkpoints.close()
    fill(*pair, 99)
    with sw.Checkpointer(f"{folder}/shared", *pair) as again:
        assert again.restore() == 3 and values_of(*pair) == {3.0}
    said = [each for each in said if "alone" in each]
    assert "No space left on device" in off and len(said) == (rank == 0), (off, said)
    return ""


@pytest.mark.timeout(120)
def test_a_full_disk_of_a_host_leaves_the_shared_directory(fresh_ranks):
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder:
        with fresh_ranks(3, [(join_from_own_namespaces, {})] * 3) as team:
            why = team.run(on_full_disks, folder=folder)
        if why[0]:
            pytest.skip(why[0])


def on_a_full_share(rank, world_size, folder):
    if not small_disk(f"{folder}/shared", 64 << 10):
        return "mounting is not permitted"
    pair = training()
    fill(*pair, 1)
    checkpoints = sw.Checkpointer(f"{folder}/shared", *pair, local=f"{folder}/local")
    checkpoints.save(0)
    with contextlib.suppress(sw.CheckpointError):  # it may know already
        checkpoints.wait()
        checkpoints._wait()
    fill(*pair, 2)
    with pytest.raises(sw.CheckpointError, match="No space left"):
        checkpoints.save(1)
        checkpoints.close()
    fill(*pair, 99)
    checkpoints = sw.Checkpointer(f"{folder}/shared", *pair, local=f"{folder}/local")
    step = checkpoints.restore()
    assert step == 2 and values_of(*pair) == {2.0}
    return ""


@pytest.mark.timeout(120)
def test_a_full_shared_directory_leaves_the_disks_of_the_hosts(fresh_ranks):
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder:
        with fresh_ranks(1, [(join_from_own_namespaces, {})]) as team:
            why = team.run(on_a_full_share, folder=folder)
        if why[0]:
            pytest.skip(why[0])


@on_every_rank(at_least=3)
def test_a_bad_local_folder_is_one_sentence_on_every_rank(rank, world_size):
    folder = shared_folder(rank)
    pair = build(Small, 0)
    if rank == 0:
        os.mkdir(f"{folder}/shared")
        open(f"{folder}/file", "w").close()
        os.symlink(f"{folder}/shared", f"{folder}/link")
    gather(None)
    outside = "local must be a folder outside of the directory"
    cases = {
        "shared": outside,
        "shared/inside": outside,
        "link": outside,
        "file": "local must be a folder of this host",
    }
    for name, words in cases.items():
        with pytest.raises((ValueError, sw.CheckpointError), match=words):
            sw.Checkpointer(f"{folder}/shared", *pair, local=f"{folder}/{name}")
    with pytest.raises((ValueError, sw.CheckpointError), match="got the address 's3://a/b'"):
        sw.Checkpointer(f"{folder}/shared", *pair, local="s3://a/b" if rank else f"{folder}/local")
    with pytest.raises(sw.CheckpointError, match="local is True on rank 0 and False on rank 1"):
        sw.Checkpointer(f"{folder}/shared", *pair, local=None if rank else f"{folder}/local")
    with on_hosts([0, *[1] * (world_size - 1)]) as group:
        pair, options = build(Small, 0), {"local": f"{folder}/local", "process_group": group}
        with mock.patch.object(process_group.HostGroup, "simulated_host", None):  # as if they were on machines
            with pytest.raises(
                sw.CheckpointError, match="sees the same folder .*local= needs a disk that each host has"
            ):
                sw.Checkpointer(f"{folder}/shared", *pair, **options)
    gather(None)
    left = [each for _, _, files in os.walk(f"{folder}/local") for each in files]
    assert gather(left) == [[]] * world_size


@on_every_rank()
def test_a_file_system_that_ends_early_is_named_once(rank, world_size):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, said_by("shardwright") as said:
        partial._known.clear()
        folder = gather(folder)[0]
        for name in "ab":
            with sw.Checkpointer(f"{folder}/{name}", *build(Small, 0)):
                pass
        gather(None)
    words = f"the file system of '{folder}/a' lies in memory, whose files end with the machine"
    assert said == [words] * (rank == 0)


def saved_twice(rank):
    """Return a folder with two steps in both places, and the model and optimizer."""
    folder = shared_folder(rank)
    pair = training()
    with sw.Checkpointer(f"{folder}/shared", *pair, local=f"{folder}/local") as checkpoints:
        for step in range(2):
            fill(*pair, step + 1)
            checkpoints.save(step)
    return folder, pair


@on_every_rank(at_least=3)
def test_a_damaged_image_is_passed_over(rank, world_size):
    folder, pair = saved_twice(rank)
    with sw.Checkpointer(f"{folder}/shared", *pair, local=f"{folder}/local") as checkpoints:
        if rank == 0:
            for image in (Image.open(checkpoints._local._client, name) for name in ("own-0", "own-1")):
                for begin, nbytes in itertools.chain.from_iterable(t.each_run() for t in image.each_table()):
                    image.view[begin + nbytes - 1] ^= 1
                image.close()
        gather(None)
        fill(*pair, 99)
        assert checkpoints.restore() == 2 and values_of(*pair) == {2.0}, "the shared directory has it"


@on_every_rank(at_least=3)
def test_an_image_that_cannot_be_read_hides_no_other(rank, world_size):
    folder, pair = saved_twice(rank)
    if rank == 0:
        (at,) = os.listdir(f"{folder}/local")
        for name in ("whole.1048576.0.image", ".host-0-1", "own-0.1048576.3.image.new"):  # by a start that was killed
            open(f"{folder}/local/{at}/{name}", "w").close()
    gather(None)
    with sw.Checkpointer(f"{folder}/shared", *pair, local=f"{folder}/local") as checkpoints:
        if rank == 0:
            images = checkpoints._local._client
            assert sorted(each.partition(".")[0] for each in os.listdir(images.path)) == ["own-0", "own-1"]
            os.truncate(os.path.join(images.path, images._files()["own-1"]), 0)
            for step in (1, 2):
                shutil.rmtree(f"{folder}/shared/step-{step:06}")
            os.mkdir(f"{folder}/shared/step-000002.0.partial")  # its copy was cut off
        gather(None)
        assert checkpoints.restore() == 1 and values_of(*pair) == {1.0}
        assert not os.path.exists(f"{folder}/shared/.branch"), "step 2 may be there at the next start"


def test_an_image_has_its_bytes_before_its_name(tmp_path):
    images, seen = local.ImageFolder(str(tmp_path)), []

    def full(fd, nbytes):
        seen.append(images.ask("list")[0]["names"])
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(os, "ftruncate", full), pytest.raises(sw.CheckpointError, match="No space left"):
        images.ask("make", "own-0", nbytes=1 << 20, meta={"data": 0, "tables": 1})
    assert seen == [[]] and os.listdir(tmp_path) == []


@on_every_rank(at_least=3)
def test_a_refusal_of_one_rank_is_heard_by_all(rank, world_size):
    folder, pair = shared_folder(rank), training()
    with sw.Checkpointer(f"{folder}/shared", *pair, local=f"{folder}/local", timeout_s=20) as checkpoints:
        with pytest.raises((ValueError, sw.CheckpointError), match="metric must be finite, got nan"):
            checkpoints.save(0, metric=float("nan") if rank == 1 else 1.0)
        broken = mock.patch.object(checkpoints._place, "target", side_effect=sw.CheckpointError("no place"))
        with broken if rank == 0 else contextlib.nullcontext(), pytest.raises(sw.CheckpointError, match="no place"):
            checkpoints.save(0)
        checkpoints.save(0)
        assert checkpoints.restore() == 1


@on_every_rank(at_least=3)
def test_a_step_that_no_thread_syncs_is_not_there(rank, world_size):
    folder, pair = shared_folder(rank), training()
    with said_by("shardwright") as said:
        with sw.Checkpointer(f"{folder}/shared", *pair, local=f"{folder}/local", timeout_s=20) as checkpoints:
            fill(*pair, 1)
            checkpoints.save(0)
            checkpoints.wait()
            fill(*pair, 2)
            refused = mock.patch.object(
                local.threading.Thread, "start", side_effect=RuntimeError("can't start new thread")
            )
            with refused if rank == 1 else contextlib.nullcontext():
                checkpoints.save(1)
            fill(*pair, 3)
            checkpoints.save(2)
            assert "can't start new thread" in checkpoints._local.off
    assert [each for each in said if "alone" in each] == [each for each in said if "alone" in each][: rank == 0]
    with sw.Checkpointer(f"{folder}/shared", *pair) as checkpoints:
        assert checkpoints.restore() == 3 and values_of(*pair) == {3.0}


def test_a_local_folder_is_made_durably(tmp_path):
    with mock.patch.object(local.CheckpointFolder, "make", side_effect=local.CheckpointFolder.make) as make:
        path = f"{tmp_path}/new/local"
        assert local.checked_folder(path, f"{tmp_path}/shared") == path and os.path.isdir(path)
    make.assert_called_once_with(path)


@on_every_rank(at_least=3)
def test_what_a_host_has_alone_is_abandoned_without_it(rank, world_size):
    folder, pair, away, here = shared_folder(rank), training(), "away", "here"

    def opened(at):
        return sw.Checkpointer(f"{folder}/shared", *pair, local=f"{folder}/{at}")

    with opened(away) as checkpoints:
        for step in range(2):
            fill(*pair, step + 1)
            checkpoints.save(step)
    if rank == 0:
        shutil.rmtree(f"{folder}/shared/step-000002")  # as if the directory had been full
    gather(None)
    for at, words in ((here, ["step 2 is lost: "]), (here, []), (away, [])):
        with said_by("shardwright") as said, opened(at) as checkpoints:
            assert checkpoints.restore() == 1 and values_of(*pair) == {1.0}
        assert [each[: len("step 2 is lost: ")] for each in said if "is lost" in each] == words * (rank == 0)
