"""Law: model and optimizer files have the same bytes at every stage that this engine has, and under torch's FSDP2; any of
them reads what any other wrote, and goes on with the same bits. What is spread over ranks is not gathered for it."""

import itertools
import os
import resource
import tempfile
from unittest import mock

import pytest
import torch
from checkpoint_subjects import EveryKind, Small, assert_same_state, build, digest_of, state_of, train
from harness import gather, on_every_rank
from peer import PEER, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder
from torch import nn

if PEER != "torch":
    from shardwright.checkpoint import cuts
    from shardwright.checkpoint.cuts import CutExchange
    from shardwright.checkpoint.peers import Peers, SharedMemory

pytestmark = pytest.mark.skipif(PEER == "torch", reason="shardwright's checkpoints")


STAGES = {
    **{stage: {"zero": stage} for stage in range(4)},
    "3, private": {"zero": 3, "share_parameters": False, "units": nn.Linear},
}


def wrapped(stage, seed=0):
    model, optimizer = build(Small, seed)
    return sw.wrap(model, optimizer, **STAGES[stage])


@pytest.mark.parametrize("snapshot", ["copy", "lazy"])
@on_every_rank()
def test_every_stage_writes_the_same_bytes_and_reads_every_others(rank, world_size, snapshot):
    folder = shared_folder(rank)
    digests, after = {}, {}
    for stage in STAGES:
        pair = wrapped(stage)
        torch.manual_seed(5)
        train(*pair, 3, width=24)
        with sw.Checkpointer(f"{folder}/{stage}", *pair, snapshot=snapshot) as checkpoints:
            checkpoints.save(2)
        digests[stage] = digest_of(f"{folder}/{stage}/step-000003")
    assert all(digest == digests[0] for digest in digests.values())
    for writer in digests:
        for reader in digests:
            pair = wrapped(reader, seed=9)
            sw.load(f"{folder}/{writer}/step-000003", *pair)
            sw.save(f"{folder}/{writer}-{reader}", *pair)
            assert digest_of(f"{folder}/{writer}-{reader}") == digests[0]
            torch.manual_seed(7)
            train(*pair, 2, width=24)
            sw.save(f"{folder}/{writer}-{reader}-on", *pair)
            after[writer, reader] = digest_of(f"{folder}/{writer}-{reader}-on")
    assert all(digest == after[0, 0] for digest in after.values())


@on_every_rank(deadline_s=90)
def test_every_kind_of_tensor_is_written_alike_at_every_stage(rank, world_size):
    folder = shared_folder(rank)
    digests = {}
    for stage, cap in ((0, 25.0), (1, 25.0), (2, 0.3), (3, 1.0)):
        model, optimizer = build(EveryKind)
        model, optimizer = sw.wrap(model, optimizer, zero=stage, bucket_cap_mb=cap)
        torch.manual_seed(5)
        train(model, optimizer, 2)
        sw.save(f"{folder}/{stage}", model, optimizer)
        digests[stage] = digest_of(f"{folder}/{stage}")
        other, other_optimizer = build(EveryKind, seed=8)
        other, other_optimizer = sw.wrap(other, other_optimizer, zero=stage, bucket_cap_mb=2 * cap)
        sw.load(f"{folder}/{0 if stage else stage}", other, other_optimizer)
        sw.save(f"{folder}/{stage}-again", other, other_optimizer)
        assert digest_of(f"{folder}/{stage}-again") == digests[0]
        bare, bare_optimizer = build(EveryKind, seed=9)
        sw.load(f"{folder}/{stage}", bare, bare_optimizer)
        reference, reference_optimizer = build(EveryKind, seed=7)
        sw.load(f"{folder}/0", reference, reference_optimizer)
        assert_same_state(state_of(bare, bare_optimizer), state_of(reference, reference_optimizer))
    assert all(digest == digests[0] for digest in digests.values())


class Wide(torch.nn.Module):
    """5.3 MB of parameters in four buckets' worth of layers."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(575, 577) for _ in range(4)])

    def forward(self, x):
        return self.layers[:1](x).square().mean() + sum(layer.weight.square().mean() for layer in self.layers)


@on_every_rank(at_least=3)
def test_only_what_lies_at_cuts_is_exchanged_and_reaches_who_writes_it_alone(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = sw.wrap(*build(Wide), zero=2, bucket_cap_mb=4)
    train(model, optimizer, 1, width=575)
    with sw.Checkpointer(folder, model, optimizer) as checkpoints:
        staged = bytes_staged(model)
        checkpoints.save(0)
        staged = bytes_staged(model) - staged
        checkpoints.wait()
        received = gather(checkpoints.progress["received_bytes"])
        written = gather(checkpoints.progress["bytes_total"])
    buckets, states = 2, 2
    assert 0 < sum(received) <= buckets * states * world_size * (1 << 20) / 2  # half a block a cut, at most
    assert staged < 100_000  # what all ranks get: tables alone
    assert max(written) <= sum(written) / world_size + (2 << 20)
    sw.load(f"{folder}/step-000001", *sw.wrap(*build(Wide, seed=3), zero=3))


def bytes_staged(model):
    """Through slots, to every rank: what all_gather_bytes has carried."""
    return Peers(model)._group.comm.stats()["bytes_staged"]


def digest_at_stage_0(folder, rank, **options):
    """Of Wide, trained for a step."""
    model, optimizer = sw.wrap(*build(Wide), zero=0, **options)
    train(model, optimizer, 1, width=575)
    sw.save(f"{folder}/whole", model, optimizer)
    return digest_of(f"{folder}/whole")


@on_every_rank(at_least=3)
def test_streams_longer_than_the_window_pass_in_rounds(rank, world_size):
    folder = shared_folder(rank)
    whole = digest_at_stage_0(folder, rank)
    rounds = itertools.count()
    meet = SharedMemory.meet

    def counted(self):
        next(rounds)
        meet(self)

    with (
        mock.patch.multiple(cuts, _SLOT_BYTES=12 << 10, _SLOT_BYTES_MIN=4 << 10),
        mock.patch.object(SharedMemory, "meet", counted),
    ):
        for stage, cap in ((1, 0.5), (3, 4)):
            model, optimizer = sw.wrap(*build(Wide), zero=stage, bucket_cap_mb=cap)
            train(model, optimizer, 1, width=575)
            with sw.Checkpointer(f"{folder}/{stage}", model, optimizer, snapshot="lazy") as checkpoints:
                checkpoints.save(0)
                first = next(rounds)
                checkpoints.wait()
                checkpoints.save(1)  # through the same window
            assert first > 4
            for step in (1, 2):
                assert digest_of(f"{folder}/{stage}/step-{step:06d}") == whole


@on_every_rank(at_least=3)
def test_a_rank_that_cannot_copy_goes_through_all_rounds_and_the_save_fails_for_all(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = sw.wrap(*build(Wide), zero=2, bucket_cap_mb=0.5)
    train(model, optimizer, 1, width=575)
    slot, calls = CutExchange._slot, itertools.count()

    def failing(self, *given):
        if rank == 1 and next(calls) == 3:
            raise RuntimeError("the GPU fell off the bus")
        return slot(self, *given)

    with sw.Checkpointer(folder, model, optimizer) as checkpoints:
        with mock.patch.object(CutExchange, "_slot", failing):
            heard = ""
            for call in (lambda: checkpoints.save(0), checkpoints.wait):
                try:
                    call()
                except sw.CheckpointError as error:
                    heard = heard or str(error)
        assert all("fell off the bus" in each for each in gather(heard))
        checkpoints.save(1)
        checkpoints.wait()
    sw.load(f"{folder}/step-000002", *sw.wrap(*build(Wide, seed=3), zero=1))


def save_wide_under_a_limit(rank, world_size, folder):
    """One rank may make no file, and so no shared memory, of more than 2 MiB."""
    model, optimizer = sw.wrap(*build(Wide), zero=0)
    train(model, optimizer, 1, width=575)
    sw.save(f"{folder}/whole", model, optimizer, max_file_bytes=1 << 20)
    whole = digest_of(f"{folder}/whole")
    model, optimizer = sw.wrap(*build(Wide), zero=1, bucket_cap_mb=0.5)
    train(model, optimizer, 1, width=575)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
    with mock.patch.multiple(cuts, _SLOT_BYTES=400 << 10):  # more than the limit in all
        checkpoints = sw.Checkpointer(folder, model, optimizer, max_file_bytes=1 << 20)
    with checkpoints:
        for step in range(2):
            checkpoints.save(step)
            checkpoints.wait()
        received = checkpoints.progress["received_bytes"]
    return received, [digest_of(f"{folder}/step-{step:06d}") == whole for step in (1, 2)]


def test_where_ranks_cannot_map_a_window_pieces_are_copied(fresh_ranks):
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder, fresh_ranks(3) as team:
        answers = team.run(save_wide_under_a_limit, folder=folder)
    assert all(all(same) for _, same in answers) and sum(received for received, _ in answers) > 0


def save_wide(rank, world_size, folder):
    """Whether the bytes are those of stage 0, what this rank received, and what it had to write."""
    whole = digest_at_stage_0(folder, rank)
    model, optimizer = sw.wrap(*build(Wide), zero=1, bucket_cap_mb=0.5)
    train(model, optimizer, 1, width=575)
    with sw.Checkpointer(folder, model, optimizer) as checkpoints:
        checkpoints.save(0)
        checkpoints.wait()
        is_same = digest_of(f"{folder}/step-000001") == whole
        return is_same, checkpoints.progress["received_bytes"], checkpoints.progress["bytes_total"]


def test_five_ranks_write_the_bytes_of_stage_0_and_get_no_more_than_they_write(fresh_ranks):
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder, fresh_ranks(5) as team:
        answers = team.run(save_wide, folder=folder)
    assert all(is_same for is_same, _, _ in answers)
    assert sum(received for _, received, _ in answers) > 1 << 20
    assert all(received < written for _, received, written in answers)


@on_every_rank()
def test_blocks_go_to_who_holds_most_of_them_and_every_byte_is_somebodys(rank, world_size):
    from shardwright._engine import CheckpointPlan

    generator = torch.Generator().manual_seed(3)
    mib = 1 << 20
    for world in (1, 2, 3, 5):
        sizes = [int(n) for n in torch.randint(1, 3 * mib, (7,), generator=generator)]
        tensors = [(f"t{i}", "U8", [n], i == 4) for i, n in enumerate(sizes)]
        plan = CheckpointPlan([("model", False, 0, '{"format":"pt"}', tensors)], [])
        held = {}
        for source in (0, 1, 3, 4, 6):
            cuts = sorted(
                {0, sizes[source], *(int(c) for c in torch.randint(0, sizes[source], (world,), generator=generator))}
            )
            for low, high in itertools.pairwise(cuts):
                held[source, low] = (high - low, int(torch.randint(0, world, (1,), generator=generator)))
        holdings = [(source, low, n, who) for (source, low), (n, who) in sorted(held.items())]
        transfers = plan.assign(holdings, world)
        ((_, size, pieces),) = plan.files()
        owner, count = {}, [0] * ((size + mib - 1) // mib)
        for each in range(world):
            for source in plan.needed(each, world):
                owner.setdefault(source, set()).add(each)
        bytes_of = [[0] * world for _ in count]
        place = {source: begin for source, begin, _ in pieces}
        for source, low, n, who in holdings:
            for byte in range(place[source] + low, place[source] + low + n, 1 << 10):
                bytes_of[byte // mib][who] += min(1 << 10, place[source] + low + n - byte)
        moved = {}
        for source, low, n, holder, to in transfers:
            assert holder != to and (place[source] + low) // mib <= (place[source] + low + n - 1) // mib
            for block in range((place[source] + low) // mib, (place[source] + low + n - 1) // mib + 1):
                moved.setdefault(block, set()).add(to)
        pinned = {b for s, at, n in pieces if s == 4 for b in range(at // mib, (at + n - 1) // mib + 1)}
        for block, owners in moved.items():
            (one,) = owners
            assert one == 0 if block in pinned else bytes_of[block][one] >= max(bytes_of[block]) - (64 + 8) * 1024
        assert sum(n for _, _, n, _, _ in transfers) <= sum(
            sum(b) - (b[0] if i in pinned else max(b)) for i, b in enumerate(bytes_of)
        ) + (64 + 16) * 1024 * len(count)


#: torch's own FSDP2 asks for CUDA on a CPU mesh in 2.4
needs_fsdp2_on_cpus = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 5), reason="torch's FSDP2 has no CPU path in 2.4"
)


def fully_sharded(seed):
    """A model and its optimizer under torch's FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        from torch.distributed._composable.fsdp import fully_shard
    torch.manual_seed(seed)
    model = Small()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@needs_fsdp2_on_cpus
@on_every_rank()
def test_what_is_spread_over_ranks_beside_state_is_named_before_a_byte_is_written(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = fully_sharded(seed=4)
    optimizer.register_state_dict_post_hook(
        lambda _, state: {**state, "slow": [p.detach().clone() for p in model.parameters()]}
    )
    with pytest.raises(sw.CheckpointError, match="has a DTensor under 'slow'"):
        sw.save(f"{folder}/a", model, optimizer)
    assert not os.path.exists(f"{folder}/a")
    gather(None)


@needs_fsdp2_on_cpus
@pytest.mark.parametrize("snapshot", ["copy", "lazy"])
@on_every_rank()
def test_fsdp2_writes_what_it_holds_and_reads_its_part(rank, world_size, snapshot):
    folder = shared_folder(rank)
    model, optimizer = wrapped(2)
    torch.manual_seed(5)
    train(model, optimizer, 3, width=24)
    sw.save(f"{folder}/ours", model, optimizer)
    other, other_optimizer = fully_sharded(seed=4)
    sw.load(f"{folder}/ours", other, other_optimizer)
    with sw.Checkpointer(f"{folder}/theirs", other, other_optimizer, snapshot=snapshot) as checkpoints:
        checkpoints.save(2)
        torch.manual_seed(7)
        train(other, other_optimizer, 1, width=24)
    assert digest_of(f"{folder}/theirs/step-000003") == digest_of(f"{folder}/ours")
    again, again_optimizer = wrapped(3, seed=9)
    sw.load(f"{folder}/theirs/step-000003", again, again_optimizer)
    sw.save(f"{folder}/again", again, again_optimizer)
    assert digest_of(f"{folder}/again") == digest_of(f"{folder}/ours")
