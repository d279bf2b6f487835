"""Law: several hosts that share a folder have the checkpoints of one host: the same bytes for any hosts and stage, a
resumed run with the bits of an uninterrupted one, and one sentence on every rank for a failure.

Ranks of one machine are told their host, as in test_hosts_fold_in_two_steps.py. The last tests use separate hosts.
"""

import os
import shutil
import signal
import tempfile
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_subjects import Small, build, digest_of, train, train_steps
from harness import LONG, Stopwatch, gather, in_turn, on_every_rank
from internals import Peers, Writer, process_group
from peer import PEER, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder
from test_checkpoint_bytes_do_not_depend_on_the_stage import Wide, digest_at_stage_0, fully_sharded, needs_fsdp2_on_cpus
from test_hosts_fold_in_two_steps import hosts_of, on_hosts
from test_torch_dcp_reads_and_writes_our_folders import state_dict, whole
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

STAGES = {
    **{stage: {"zero": stage} for stage in range(4)},
    "3, private": {"zero": 3, "share_parameters": False, "units": torch.nn.Linear},
}
STOP, STEPS = 3, 6
TIMEOUT_S = 20.0


def trained_on(rank, model, optimizer, begin, end, checkpoints=None):
    def save(step):
        if checkpoints is not None:
            checkpoints.save(step, every=STOP)

    return train_steps(rank, model, optimizer, begin, end, save)


def wrapped(group, stage, seed, **options):
    return sw.wrap(
        *build(Small, seed), process_group=group, bucket_cap_mb=0.01, timeout_s=TIMEOUT_S, **STAGES[stage], **options
    )


@pytest.mark.parametrize(("shape", "snapshot"), [("2+1", "copy"), ("crosswise", "lazy")])
@on_every_rank(at_least=3)
def test_every_stage_saves_the_same_bytes_and_resumes_every_others(rank, world_size, shape, snapshot):
    folder = shared_folder(rank)
    with on_hosts(hosts_of(shape, world_size)) as group:
        expected, digests = None, {}
        stages = list(STAGES) if LONG else [0, 2, "3, private"]
        for stage in stages:
            pair = wrapped(group, stage, 0)
            with sw.Checkpointer(f"{folder}/{stage}", *pair, snapshot=snapshot) as checkpoints:
                losses = trained_on(rank, *pair, 0, STEPS, checkpoints)
            digests[stage] = digest_of(f"{folder}/{stage}/step-{STOP:06d}")
            expected = expected or losses
            assert losses == expected and digests[stage] == digests[0], stage
        for writer, reader in zip(stages, [*stages[2:], *stages[:2]]):
            pair = wrapped(group, reader, 9)
            shutil.rmtree(f"{folder}/{writer}/step-{STEPS:06d}") if rank == 0 else None
            gather(None)
            with sw.Checkpointer(f"{folder}/{writer}", *pair) as checkpoints:
                assert checkpoints.restore() == STOP
            assert trained_on(rank, *pair, STOP, STEPS) == expected[STOP:], (writer, reader)
            sw.save(f"{folder}/{writer}/again", *pair)
            gather(None)
            assert sorted(os.listdir(f"{folder}/{writer}")) == [".board", ".lock", "again", f"step-{STOP:06d}"]
            gather(None)
    alone, one = build(Small, 5), dist.new_group([0])
    if rank == 0:  # and one host of one rank reads it
        sw.load(f"{folder}/2/step-{STOP:06d}", *alone, process_group=one)
        sw.save(f"{folder}/alone", *alone, process_group=one)
        assert digest_of(f"{folder}/alone") == digests[0]
    gather(None)


@pytest.mark.parametrize("shape", ["2+1", "crosswise"])
@on_every_rank(at_least=3)
def test_frozen_parameters_of_a_sharded_model_are_restored_on_every_host(rank, world_size, shape):
    folder = shared_folder(rank)

    def frozen(seed):
        torch.manual_seed(seed)
        module = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Linear(40, 8, bias=False), torch.nn.Linear(8, 3))
        module[1].requires_grad_(False)
        module[2].bias.requires_grad_(False)  # too small to be released
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
        whole = {name: value.clone() for name, value in module.state_dict().items()}
        return whole, *sw.wrap(
            module, optimizer, process_group=group, timeout_s=TIMEOUT_S, bucket_cap_mb=0.0001, **STAGES["3, private"]
        )

    with on_hosts(hosts_of(shape, world_size)) as group:
        saved, *pair = frozen(0)
        sw.save(f"{folder}/a", *pair)
        _, *pair = frozen(9)
        sw.load(f"{folder}/a", *pair)
        with sw.full_parameters(pair[0]):
            for name, value in pair[0].module.state_dict().items():
                assert torch.equal(value, saved[name]), name


@pytest.mark.parametrize("shape", ["2+1", "crosswise"])
@on_every_rank(at_least=3)
def test_slices_far_below_a_block_are_written_by_each_host(rank, world_size, shape):
    folder = shared_folder(rank)
    with on_hosts(hosts_of(shape, world_size)) as group:
        whole = digest_at_stage_0(folder, rank, process_group=group, timeout_s=TIMEOUT_S)
        for stage, cap in in_turn(((1, 0.5), (2, 4), (3, 4)), int(shape == "crosswise")):
            model, optimizer = sw.wrap(
                *build(Wide), process_group=group, zero=stage, bucket_cap_mb=cap, timeout_s=TIMEOUT_S
            )
            train(model, optimizer, 1, width=575)
            with sw.Checkpointer(f"{folder}/{stage}", model, optimizer) as checkpoints:
                for step in (0, 1):
                    checkpoints.save(step)
                checkpoints.wait()
            for step in (1, 2):
                assert digest_of(f"{folder}/{stage}/step-{step:06d}") == whole


@on_every_rank(at_least=3)
def test_what_goes_wrong_on_one_host_is_heard_on_the_others(rank, world_size):
    folder = shared_folder(rank)
    with on_hosts(hosts_of("2+1", world_size)) as group:
        for stage in (0, 2):
            pair = wrapped(group, stage, 0)
            trained_on(rank, *pair, 0, 1)
            checkpoints = sw.Checkpointer(f"{folder}/{stage}", *pair)
            begin = Stopwatch()
            checkpoints.save(0)
            checkpoints.wait()
            # rank 2 is on host 1
            if rank == 2:

                class Full:
                    def state_dict(self):
                        raise OSError(28, "No space left on device")

                    def load_state_dict(self, state):
                        pass

                checkpoints._training.dataloader = Full()
            sentence = None
            for call in (lambda: checkpoints.save(1), checkpoints.wait):  # noqa: B023
                try:
                    call()
                except sw.CheckpointError as error:
                    sentence = str(error)
            said = gather(sentence)
            assert all(said) and all("No space left" in text for text in said), said
            assert said[0] == said[1] and "rank 2" in said[0], said
            checkpoints._training.dataloader = None
            checkpoints.save(2)
            checkpoints.close()
            assert begin.seconds() < 10
            assert sorted(os.listdir(f"{folder}/{stage}")) == [".board", ".lock", "step-000001", "step-000003"]
            gather(None)


@on_every_rank(at_least=3)
def test_a_folder_that_hosts_do_not_share_is_named(rank, world_size):
    folder = shared_folder(rank)
    with on_hosts(hosts_of("2+1", world_size)) as group:
        pair = wrapped(group, 2, 0)
        look = Peers._look_at_board

        def elsewhere(self, path, nonce):  # rank 2's folder of that name is its host's own
            return look(self, path if self.rank != 2 else f"{folder}/elsewhere", nonce)

        with mock.patch.object(Peers, "_look_at_board", elsewhere):
            for make in (lambda: sw.Checkpointer(folder, *pair), lambda: sw.save(f"{folder}/a", *pair)):
                with pytest.raises(sw.CheckpointError, match="need a folder that all hosts share") as caught:
                    make()
                assert "rank 2: " in str(caught.value) or rank == 2
                gather(None)
        assert sorted(os.listdir(folder)) == [".board", ".lock"] or rank  # the Checkpointer's; a save leaves nothing
        with sw.Checkpointer(f"{folder}/all", *pair) as checkpoints:  # and the ranks are together as before
            checkpoints.save(0)
        assert os.path.exists(f"{folder}/all/step-000001/MANIFEST.json")
        gather(None)


@on_every_rank(at_least=3)
def test_a_board_that_was_taken_away_is_made_again(rank, world_size):
    folder = shared_folder(rank)
    with on_hosts(hosts_of("2+1", world_size)) as group:
        pair = wrapped(group, 0, 0)
        with sw.Checkpointer(folder, *pair) as checkpoints:
            checkpoints.save(0)
            checkpoints.wait()
            gather(None)
            if rank == 0:
                os.unlink(f"{folder}/.board")
            gather(None)
            checkpoints.save(1)
            checkpoints.wait()
            assert os.path.exists(f"{folder}/step-000002/MANIFEST.json")
            gather(None)


@pytest.mark.parametrize("overwrite", [False, True])
@on_every_rank(exactly=4)
def test_saves_of_two_groups_to_one_path_do_not_hear_each_other(rank, world_size, overwrite):
    """Each group is on two hosts, and each of its saves is the first of a new channel."""
    folder = shared_folder(rank)
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    leaders = dist.new_group([0, 2])
    module = torch.nn.Linear(300, 40)
    torch.nn.init.constant_(module.weight, float(rank // 2))
    open(f"{folder}/a.{'0' * 24}.board", "w").close()  # of a save that lives, or died a moment ago
    begin, failure = Writer.begin, ""

    def begin_together(self, *args, **options):
        if rank in (0, 2):
            dist.barrier(leaders)
        begin(self, *args, **options)

    with mock.patch.object(process_group, "_forced_hosts", [0, 1]), mock.patch.object(Writer, "begin", begin_together):
        try:
            sw.save(f"{folder}/a", module, process_group=pairs[rank // 2], overwrite=overwrite, timeout_s=TIMEOUT_S)
        except sw.CheckpointError as error:
            failure = str(error)
    said = gather(failure)
    assert said[0] == said[1] and said[2] == said[3] and (said[0] == "") != (said[2] == ""), said
    assert "was written by another save after this one began" in said[0] + said[2]
    sw.load(f"{folder}/a", module, process_group=pairs[rank // 2])
    assert float(module.weight.detach()[0, 0]) == (0.0 if said[0] == "" else 1.0)
    assert sorted(os.listdir(folder)) == ["a", f"a.{'0' * 24}.board"]
    gather(None)
    if rank == 0:
        os.utime(f"{folder}/a.{'0' * 24}.board", (time.time() - 7200,) * 2)
    gather(None)
    with mock.patch.object(process_group, "_forced_hosts", [0, 1]):
        sw.save(f"{folder}/a", module, process_group=pairs[0], overwrite=True) if rank < 2 else None
    gather(None)
    assert os.listdir(folder) == ["a"]
    gather(None)


COMPRESSORS = {"powersgd": sw.PowerSGD(rank=2, min_compression_rate=0), "int4": sw.Int4(error_feedback=True)}


@pytest.mark.parametrize("name", COMPRESSORS)
@on_every_rank(at_least=3)
def test_what_hosts_owe_is_kept(rank, world_size, name):
    """Over the same hosts the error is kept bit for bit; over others its mean is kept."""
    folder = shared_folder(rank)

    def mean_owed(model):
        state = model.compression_state
        owed = {}
        for key, entry in state.state_dict()["parameters"].items():
            if "error" in entry:
                owed[key] = entry["error"].double()
            elif "memory" in entry:
                rows, cols = entry["memory"].shape
                owed[key] = (
                    entry["memory"].double() - entry["left"][:, :rows].double().T @ entry["right"][:, :cols].double()
                )
        of_all = [each for each in gather(owed) if each]
        return {key: sum(each[key] for each in of_all) / len(of_all) for key in of_all[0]}

    with on_hosts(hosts_of("2+1", world_size)) as group:
        pair = wrapped(group, 0, 0, compress=COMPRESSORS[name])
        with sw.Checkpointer(folder, *pair, keep_last=1) as checkpoints:
            trained_on(rank, *pair, 0, STOP, checkpoints)
            owed = mean_owed(pair[0])
            expected = trained_on(rank, *pair, STOP, STEPS)
        pair = wrapped(group, 0, 9, compress=COMPRESSORS[name])
        with sw.Checkpointer(folder, *pair) as checkpoints:
            assert checkpoints.restore() == STOP
        assert trained_on(rank, *pair, STOP, STEPS) == expected
    assert any(value.abs().max() > 0 for value in owed.values())
    for shape in ("1+2", "one host"):
        with on_hosts(hosts_of(shape, world_size)) as group:
            pair = wrapped(group, 0, 9, compress=COMPRESSORS[name])
            with sw.Checkpointer(folder, *pair) as checkpoints:
                assert checkpoints.restore() == STOP
            found = mean_owed(pair[0])
            for key, value in owed.items():
                assert torch.allclose(found[key], value, atol=1e-6), (shape, key)
            trained_on(rank, *pair, STOP, STEPS)


# hosts that are apart ---------------------------------------------------------------------------------------------------


def train_and_save(rank, world_size, folder, stop):
    """Return losses and their mean over ranks, step by step. Resume if there is a checkpoint."""
    found = {}
    for stage in (0, 2, 3) if LONG else (2,):
        pair = wrapped(None, stage, rank)
        with sw.Checkpointer(f"{folder}/{stage}", *pair) as checkpoints:
            begin = checkpoints.restore()
            found[stage] = begin, trained_on(rank, *pair, begin, stop, checkpoints)
        dist.barrier()
    return found


def save_slowly(rank, world_size, folder):
    pair = wrapped(None, 2, 0)
    checkpoints = sw.Checkpointer(folder, *pair, bandwidth_bytes_per_s=2_000, timeout_s=600)
    checkpoints.save(STOP - 1)
    dist.barrier()
    begin = Stopwatch()
    with pytest.raises(sw.CheckpointError) as caught:
        checkpoints.wait()
    return begin.seconds(), str(caught.value)


def lose_rank_0(rank, world_size, folder, hosts):
    process_group._forced_hosts = hosts
    pair = wrapped(None, 2, 0)
    checkpoints = sw.Checkpointer(folder, *pair, bandwidth_bytes_per_s=2_000, timeout_s=600)
    checkpoints.save(STOP - 1)
    while not any(os.path.exists(f"{folder}/{name}/LOCK") for name in os.listdir(folder)):
        time.sleep(0.01)
    gather(None)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = Stopwatch()
    with pytest.raises(sw.CheckpointError, match="another rank failed or left"):
        checkpoints.wait()
    return begin.seconds()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]])
def test_no_verdict_of_a_dead_rank_0_is_waited_for(fresh_ranks, hosts):
    """Other ranks look at rank 0's lock. From a dead peer alone they would wait 5 s for the verdict."""
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder, fresh_ranks(2) as team:
        team.start(lose_rank_0, folder=f"{folder}/of", hosts=hosts)
        outcome = team.wait(40, patient=True)[1]
    assert outcome.ok, outcome.trace
    assert outcome.value < 4, outcome.value


@pytest.mark.timeout(120)
def test_hosts_that_are_apart_save_and_other_hosts_resume(hosts, fresh_ranks):
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder:
        with hosts(2, 1) as lab:
            through = lab.team.run(train_and_save, folder=f"{folder}/through", stop=STEPS)
        with hosts(2, 1) as lab:
            lab.team.run(train_and_save, folder=f"{folder}/cut", stop=STOP)
        with hosts(2, 1) as lab:
            rest = lab.team.run(train_and_save, folder=f"{folder}/cut", stop=STEPS)
        for whole, half in zip(through, rest):
            for stage, (begin, losses) in half.items():
                assert begin == STOP and losses == whole[stage][1][STOP:]
        with fresh_ranks(3) as team:  # and one host goes on
            assert [each[2][0] for each in team.run(train_and_save, folder=f"{folder}/cut", stop=STEPS + 1)] == [
                STEPS
            ] * 3


def through_dcp(rank, world_size, folder, sharded):
    """Save with torch's two calls, load into other tensors, and return the values of both."""
    found = {}
    model, optimizer = fully_sharded(0) if sharded else build(Small, 0)
    train(model, optimizer, 2, width=24)
    for call in (dcp.save, dcp.async_save):
        path = f"{folder}/{call.__name__}"
        future = call(state_dict(model, optimizer, epoch=3), storage_writer=sw.checkpoint.StorageWriter(path, step=2))
        if future is not None and call is dcp.async_save:
            getattr(future, "upload_completion", future).result()
        dist.barrier()
        other, other_optimizer = fully_sharded(7) if sharded else build(Small, 7)
        train(other, other_optimizer, 1, width=24)
        state = state_dict(other, other_optimizer, epoch=0)
        dcp.load(state, storage_reader=sw.checkpoint.StorageReader(path))
        set_model_state_dict(other, state["model"])
        set_optimizer_state_dict(other, other_optimizer, state["optim"])
        assert state["epoch"] == 3
        expected, read = whole(model, optimizer), whole(other, other_optimizer)
        assert read.keys() == expected.keys() and all(torch.equal(read[name], expected[name]) for name in expected)
        found[call.__name__] = digest_of(path)
    return found


def read_through_dcp(rank, world_size, folder):
    model, optimizer = build(Small, 3)
    train(model, optimizer, 1, width=24)
    state = state_dict(model, optimizer, epoch=0)
    with pytest.raises(dcp.api.CheckpointException, match="was changed or did not survive"):
        dcp.load(state, storage_reader=sw.checkpoint.StorageReader(f"{folder}/save"))
    dcp.load(state, storage_reader=sw.checkpoint.StorageReader(f"{folder}/async_save"))
    return whole(model, optimizer)


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=needs_fsdp2_on_cpus)], ids=["plain", "fsdp2"])
@pytest.mark.timeout(120)
def test_hosts_that_are_apart_go_through_dcp(hosts, sharded):
    """The bytes do not depend on which hosts wrote them. A damaged block is named on all hosts."""
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder:
        with hosts(2, 1) as lab:
            digests = lab.team.run(through_dcp, folder=f"{folder}/3", sharded=sharded)
        assert digests == [digests[0]] * 3 and digests[0]["save"] == digests[0]["async_save"]
        with hosts(1, 1) as lab:
            of_two = lab.team.run(through_dcp, folder=f"{folder}/2", sharded=sharded)
        assert of_two[0] == of_two[1]
        if not sharded:  # three ranks' mean is rounded otherwise than two's
            assert of_two == digests[:2]
        if sharded and not LONG:  # a folder of the same form is read in the other case
            return
        with open(f"{folder}/3/save/model.safetensors", "r+b") as file:
            file.seek(5000)
            file.write(b"\xff\x01\x02")
        with hosts(1, 2) as lab:  # and other hosts read it
            read = lab.team.run(read_through_dcp, folder=f"{folder}/3")
        assert all(each.keys() == read[0].keys() for each in read)
        assert all(torch.equal(each[name], read[0][name]) for each in read for name in each)


@pytest.mark.timeout(120)
def test_a_host_that_dies_while_it_writes_ends_the_save_of_the_others_soon(hosts, fresh_ranks):
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder:
        with hosts(1, 1, 1) as lab:
            lab.team.run(train_and_save, folder=folder, stop=STOP)
        with hosts(1, 1, 1) as lab:
            lab.team.start(save_slowly, folder=f"{folder}/2")
            until = time.monotonic() + 20
            while not any(name.endswith("partial") for name in os.listdir(f"{folder}/2")) and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(0.5)
            lab.team.signal(2, signal.SIGKILL)
            outcomes = lab.team.wait(40, patient=True)
        for outcome in outcomes[:2]:
            assert outcome.ok, outcome.trace
            seconds, sentence = outcome.value
            assert seconds < 20 and "another rank failed or left" in sentence, outcome.value
        with hosts(1, 1, 1) as lab:
            assert [each[2][0] for each in lab.team.run(train_and_save, folder=folder, stop=STEPS)] == [STOP] * 3
