"""Law: model and optimizer files have the same bytes at every stage and under torch's FSDP2. Each of them reads what
any other wrote, and continues with the same bits. Sliced state is not gathered for a save.
"""

import os
import shutil
import tempfile
from unittest import mock

import internals
import pytest
import torch
from checkpoint_subjects import EveryKind, Small, assert_same_state, build, digest_of, state_of, train
from harness import LONG, gather, in_turn, on_every_rank
from peer import PEER, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder
from torch import nn

if PEER != "torch":
    from internals import Peers, inventory

pytestmark = pytest.mark.skipif(PEER == "torch", reason="shardwright's checkpoints")
QUICK_FORM_IS_THE_LARGEST_WORLD = True

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
    for stage in (0, *in_turn([*STAGES][1:], int(snapshot == "lazy"))):
        pair = wrapped(stage)
        torch.manual_seed(5)
        train(*pair, 3, width=24)
        with sw.Checkpointer(f"{folder}/{stage}", *pair, snapshot=snapshot) as checkpoints:
            checkpoints.save(2)
        digests[stage] = digest_of(f"{folder}/{stage}/step-000003")
    assert all(digest == digests[0] for digest in digests.values())
    order = list(digests)
    for number, writer in enumerate(order):
        for reader in order if LONG else (order[number - 1],):  # the bytes of all writers are the same
            pair = wrapped(reader, seed=9)
            sw.load(f"{folder}/{writer}/step-000003", *pair)
            sw.save(f"{folder}/{writer}-{reader}", *pair)
            assert digest_of(f"{folder}/{writer}-{reader}") == digests[0]
            torch.manual_seed(7)
            train(*pair, 2, width=24)
            sw.save(f"{folder}/{writer}-{reader}-on", *pair)
            after[writer, reader] = digest_of(f"{folder}/{writer}-{reader}-on")
    assert all(digest == next(iter(after.values())) for digest in after.values())


@on_every_rank(deadline_s=90)
def test_every_kind_of_tensor_is_written_alike_at_every_stage(rank, world_size):
    folder = shared_folder(rank)
    digests = {}
    for stage, cap in ((0, 25.0), *in_turn(((1, 25.0), (2, 0.3), (3, 1.0)), 0)):
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
    """A model of 5.3 MB of parameters in four buckets."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(575, 577) for _ in range(4)])

    def forward(self, x):
        return self.layers[:1](x).square().mean() + sum(layer.weight.square().mean() for layer in self.layers)


@on_every_rank(at_least=3)
def test_each_rank_writes_what_it_holds_and_tells_the_others_next_to_nothing(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = sw.wrap(*build(Wide), zero=2, bucket_cap_mb=4)
    train(model, optimizer, 1, width=575)
    with sw.Checkpointer(folder, model, optimizer) as checkpoints:
        staged = []
        for step in range(3):
            before = bytes_staged(model)
            checkpoints.save(step)
            staged.append(bytes_staged(model) - before)
            checkpoints.wait()
        written = gather(checkpoints.progress["bytes_total"])
    assert staged[0] < 30_000 and staged[2] <= 4096  # layout, once; then how the last one ended, and one agreement
    assert max(written) <= sum(written) / world_size + (2 << 20)
    sw.load(f"{folder}/step-000001", *sw.wrap(*build(Wide, seed=3), zero=3))


def bytes_staged(model):
    """Return the bytes that all_gather_bytes has sent through slots to every rank."""
    return Peers(model).group.comm.stats()["bytes_staged"]


def digest_at_stage_0(folder, rank, **options):
    """Return a Wide model and its optimizer, trained for one step."""
    model, optimizer = sw.wrap(*build(Wide), zero=0, **options)
    train(model, optimizer, 1, width=575)
    sw.save(f"{folder}/whole", model, optimizer)
    return digest_of(f"{folder}/whole")


@on_every_rank(at_least=3)
def test_slices_far_below_a_block_make_the_bytes_of_stage_0(rank, world_size):
    folder = shared_folder(rank)
    whole = digest_at_stage_0(folder, rank)
    for stage, cap in ((1, 0.05), (2, 0.5), (3, 4)):
        for snapshot in in_turn(("copy", "lazy"), stage):
            model, optimizer = sw.wrap(*build(Wide), zero=stage, bucket_cap_mb=cap)
            train(model, optimizer, 1, width=575)
            path = f"{folder}/{stage}-{snapshot}"
            with sw.Checkpointer(path, model, optimizer, snapshot=snapshot) as checkpoints:
                for step in (0, 1):  # the second one finds the layout as it was
                    checkpoints.save(step)
                    checkpoints.wait()
            assert [digest_of(f"{path}/step-{step:06d}") == whole for step in (1, 2)] == [True, True]


@on_every_rank(at_least=3)
def test_a_layout_that_changes_is_told_anew(rank, world_size):
    """Save with state that appears after the first save, a buffer that comes to differ, and a rank whose own state
    grows.
    """
    folder = shared_folder(rank)
    position = {"seen": [rank]}

    class Position:
        def state_dict(self):
            return dict(position)

        def load_state_dict(self, state):
            position.clear()
            position.update(state)

    model, optimizer = build(Small)
    model.register_buffer("steps", torch.zeros(3))
    model, optimizer = sw.wrap(model, optimizer, zero=2)
    saved = {}
    with sw.Checkpointer(folder, model, optimizer, dataloader=Position()) as checkpoints:
        for step in range(4):
            if step == 1:
                train(model, optimizer, 1, width=24)  # Adam's state is made
            if step == 2:
                model.module.steps.fill_(rank)
            if step == 3 and rank == world_size - 1:
                position["seen"] = list(range(5000))
                position["table"] = torch.arange(7)
            saved[step] = {**position}, model.module.steps.clone()
            checkpoints.save(step)
        checkpoints.wait()
        for step, (expected, steps) in saved.items():
            model.module.steps.fill_(-1)
            assert checkpoints.restore(step + 1) == step + 1
            assert position["seen"] == expected["seen"] and ("table" in position) == ("table" in expected)
            assert torch.equal(model.module.steps, steps)
    if rank == 0:
        assert all(len(os.listdir(f"{folder}/step-{step:06d}/ranks")) == 2 for step in (1, 2, 3, 4))
    gather(None)


def save_wide(rank, world_size, folder):
    """Return True if the bytes are those of stage 0, and the number of bytes that this rank wrote."""
    whole = digest_at_stage_0(folder, rank)
    model, optimizer = sw.wrap(*build(Wide), zero=1, bucket_cap_mb=0.5)
    train(model, optimizer, 1, width=575)
    with sw.Checkpointer(folder, model, optimizer) as checkpoints:
        checkpoints.save(0)
        checkpoints.wait()
        return digest_of(f"{folder}/step-000001") == whole, checkpoints.progress["bytes_total"]


def test_five_ranks_write_the_bytes_of_stage_0_and_about_as_much_each(fresh_ranks):
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder, fresh_ranks(5) as team:
        answers = team.run(save_wide, folder=folder)
    assert all(is_same for is_same, _ in answers)
    written = [nbytes for _, nbytes in answers]
    assert max(written) <= sum(written) / 5 + (2 << 20)


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


@needs_fsdp2_on_cpus
@on_every_rank(at_least=3)
def test_a_save_of_the_tensors_of_the_last_one_lists_nothing_anew(rank, world_size):
    """A repeated save has the bytes of a save that lists everything, also if a tensor was replaced in between."""
    folder = shared_folder(rank)
    makers = {0: lambda: wrapped(0), 2: lambda: wrapped(2), 3: lambda: wrapped(3), "fsdp2": lambda: fully_sharded(4)}
    for name, make in makers.items():
        model, optimizer = make()
        train(model, optimizer, 1, width=24)
        with (
            mock.patch.object(inventory, "model_tensors", wraps=inventory.model_tensors) as listed,
            sw.Checkpointer(f"{folder}/{name}", model, optimizer) as checkpoints,
        ):
            for step in range(4):
                checkpoints.save(step)
                assert listed.call_count == (1, 1, 1, 2)[step], (name, step, listed.call_count)
                train(model, optimizer, 1, width=24)
                if step == 2:
                    state = next(iter(optimizer.state.values()), {})
                    for key in state:
                        state[key] = state[key].clone()
                    listed.call_count += not state  # of another rank
            checkpoints.save(4)
            assert listed.call_count == 2
            sw.save(f"{folder}/{name}/again", model, optimizer)
            checkpoints.wait()
        assert digest_of(f"{folder}/{name}/step-000005") == digest_of(f"{folder}/{name}/again")


@needs_fsdp2_on_cpus
@on_every_rank(at_least=3)
def test_an_average_beside_fsdp2_s_parameters_is_written_and_read_in_parts(rank, world_size):
    folder = shared_folder(rank)

    def averaged(seed):
        model, optimizer = fully_sharded(seed)
        average = {name: (parameter.detach() * 0.5) for name, parameter in model.named_parameters()}
        return model, optimizer, {"average": average, "decay": 0.5, "table": torch.arange(6 + (rank == 1))}

    model, optimizer, user = averaged(seed=4)
    with sw.Checkpointer(folder, model, optimizer, user_state=user) as checkpoints:
        for step in range(2):
            checkpoints.save(step)
        checkpoints.wait()
        written = gather(checkpoints.progress["bytes_total"])
    expected = {name: value.full_tensor() for name, value in user["average"].items()}
    if rank == 0:
        header, entries = internals._engine.CheckpointFolder(f"{folder}/step-000002").tensors("state.safetensors")
        shapes = {name: shape for name, _, shape, _, _ in entries}
        assert shapes["user_state.table"] == (6,)  # rank 0's
        assert {n: tuple(t.shape) for n, t in expected.items()} == {
            n.removeprefix("user_state.average."): s for n, s in shapes.items() if "average" in n
        }
    assert max(written) < 1.3 * sum(written) / world_size
    other, other_optimizer, found = averaged(seed=9)
    with sw.Checkpointer(folder, other, other_optimizer, user_state=found) as checkpoints:
        assert checkpoints.restore() == 2
    assert all(torch.equal(value.full_tensor(), expected[name]) for name, value in found["average"].items())
    assert found["decay"] == 0.5 and found["table"].tolist() == [0, 1, 2, 3, 4, 5]
    plain, state = build(Small)[0], {}  # and one rank alone reads it whole
    alone = torch.distributed.new_group([0])
    if rank == 0:
        shutil.copytree(f"{folder}/step-000002", f"{folder}/alone/step-000002")
        with sw.Checkpointer(
            f"{folder}/alone", plain, torch.optim.AdamW(plain.parameters()), user_state=state, process_group=alone
        ) as checkpoints:
            assert checkpoints.restore() == 2
        assert all(torch.equal(value, expected[name]) for name, value in state["average"].items())
    gather(None)
