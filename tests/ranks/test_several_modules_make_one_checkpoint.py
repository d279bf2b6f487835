"""Law: lists and dicts of modules and optimizers make one checkpoint, whose bytes depend on no module's stage and on no
number of ranks; each reads it back with its bits, at any other stage, and each keeps its own compressor.
"""

import os
import tempfile

import internals
import pytest
import torch
from checkpoint_subjects import assert_same_state, digest_of
from harness import gather, in_turn, on_every_rank
from peer import PEER, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder
from torch import nn

if PEER != "torch":
    from internals import join_modules, whole_parameters

pytestmark = pytest.mark.skipif(PEER == "torch", reason="shardwright's checkpoints")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
PRIVATE = {"zero": 3, "share_parameters": False, "units": nn.Linear}
#: the options of generator and discriminator
STAGES = {
    "0": ({"zero": 0}, {"zero": 0}),
    "1": ({"zero": 1}, {"zero": 1}),
    "2": ({"zero": 2}, {"zero": 2}),
    "3": ({"zero": 3}, {"zero": 3}),
    "3, private": (PRIVATE, PRIVATE),
    "3, 0": ({"zero": 3}, {"zero": 0}),
    "1, private": ({"zero": 1}, PRIVATE),
}


def built(options, seed):
    torch.manual_seed(seed)
    g = nn.Sequential(nn.Linear(5, 301), nn.BatchNorm1d(301), nn.Tanh(), nn.Linear(301, 7))
    d = nn.Sequential(nn.Linear(7, 203), nn.Tanh(), nn.Linear(203, 1))
    g, og = sw.wrap(g, torch.optim.Adam(g.parameters(), lr=0.01), **options[0])
    groups = [{"params": d[0].parameters()}, {"params": d[2].parameters(), "lr": 0.05}]
    d, od = sw.wrap(d, torch.optim.AdamW(groups, lr=0.02), **options[1])
    return [g, d], [og, od]


def train(modules, optimizers, steps):
    """Take steps on batches that are equal on all ranks, so that buffers are."""
    (g, d), (og, od) = modules, optimizers
    for step in steps:
        z = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        for optimizer, loss in (
            (od, lambda: d(g(z).detach()).square().mean()),
            (og, lambda: (d(g(z)) - 1).square().mean()),
        ):
            og.zero_grad(), od.zero_grad()
            loss().backward()
            optimizer.step()


@pytest.mark.parametrize("form", ["list", "dict"])
@on_every_rank(deadline_s=90)
def test_every_stage_writes_the_same_bytes_and_reads_every_others(rank, world_size, form):
    def given(pair):
        if form == "list":
            return pair
        return {"g": pair[0][0], "d": pair[0][1]}, {"d": pair[1][1], "g": pair[1][0]}

    folder = shared_folder(rank)
    stages = ["0", *in_turn([*STAGES][1:], int(form == "dict"))]
    digests, after = {}, {}
    for stage in stages:
        pair = built(STAGES[stage], 1)
        train(*pair, range(2))
        snapshot = "lazy" if stage in "02" else "copy"
        with sw.Checkpointer(f"{folder}/{stage}", *given(pair), snapshot=snapshot) as checkpoints:
            checkpoints.save(0)
            train(*pair, range(2, 3))
            checkpoints.save(1)  # repeats the sources of the first
            train(*pair, range(3, 4))
        digests[stage] = digest_of(f"{folder}/{stage}/step-000002")
        assert len(digests[stage]) == 3 and digests[stage] == digests["0"], stage
    for stage, other in zip(stages, [*stages[1:], stages[0]]):
        pair = built(STAGES[other], 2)
        with sw.Checkpointer(f"{folder}/{stage}", *given(pair)) as checkpoints:
            assert checkpoints.restore() == 2
        sw.save(f"{folder}/{stage}-again", *given(pair))
        assert digest_of(f"{folder}/{stage}-again") == digests["0"]
        train(*pair, range(3, 5))
        sw.save(f"{folder}/{stage}-on", *given(pair))
        after[stage] = digest_of(f"{folder}/{stage}-on")
    assert all(digest == after["0"] for digest in after.values())


def save_at(rank, world_size, folder):
    pair = built(STAGES["3, 0"], 1)
    train(*pair, range(2))
    sw.save(folder, *pair, extra={"seen": 7}, step=2)


def load_and_save(rank, world_size, folder):
    for number, options in enumerate((STAGES["0"], STAGES["1, private"])):
        pair = built(options, 2)
        assert sw.load(folder, *pair) == {"seen": 7}
        sw.save(f"{folder}.{number}", *pair)


@pytest.mark.timeout(120)
def test_the_number_of_ranks_changes_no_byte(fresh_ranks):
    with tempfile.TemporaryDirectory(prefix="ckpt-") as within:
        with fresh_ranks(3) as team:
            team.run(save_at, folder=f"{within}/a")
        with fresh_ranks(1) as team:
            team.run(load_and_save, folder=f"{within}/a")
        for name in ("a.0", "a.1"):
            assert digest_of(f"{within}/{name}") == digest_of(f"{within}/a")


@on_every_rank(deadline_s=90)
def test_each_compressor_gets_its_own_state(rank, world_size):
    """A compressor's error is the rank's own; steps after a restore have the bits of an uninterrupted run."""
    folder, whole = shared_folder(rank), []
    options = {"zero": 0, "compress": sw.Int8()}, {"zero": 2, "compress": sw.PowerSGD(rank=1)}
    for resumes in (False, True):
        pair = built(options, 1 + resumes)
        with sw.Checkpointer(f"{folder}/run", *pair, memory_every=1) as checkpoints:
            if resumes:
                assert checkpoints.restore() == 3
            else:
                train(*pair, range(3))
                checkpoints.save(2)
                checkpoints.wait()
        train(*pair, range(3, 5))
        whole.append({f"{n}.{k}": v for n, module in enumerate(pair[0]) for k, v in sw.full_state_dict(module).items()})
    assert_same_state(*whole)


@on_every_rank()
def test_what_cannot_be_joined_is_one_sentence(rank, world_size):
    folder = shared_folder(rank)
    (g, d), (og, od) = built(STAGES["1"], 1)
    plain = nn.Linear(3, 2)
    both = torch.optim.SGD([*plain.parameters()], lr=0.1), torch.optim.Adam([plain.weight])
    for modules, optimizers, said in (
        ([g, g], [og, od], "model '1' is the same module as another one"),
        ({"a.b": g}, [og], "a name must be a string that is not empty, has no '.'"),
        ([], [], "must be one, or a list or dict of at least one"),
        ([g, None], [og], "model '1' must be a torch.nn.Module, got a NoneType"),
        ([g, d], [og, 3], "optimizer '1' must be a torch.optim.Optimizer, got a int"),
        (plain, both, "optimizers '0' and '1' both have a parameter of shape [2, 3]"),
    ):
        for make in (sw.save, sw.Checkpointer, sw.load):
            with pytest.raises((ValueError, sw.CheckpointError), match="") as wrong:
                make(f"{folder}/a", modules, optimizers)
            assert said in str(wrong.value), wrong.value
    with sw.Checkpointer(f"{folder}/b", g, og, user_state={"d": d, "od": od}) as checkpoints:
        with pytest.raises(
            sw.CheckpointError, match="user_state.od is an optimizer of which each rank holds slices: give all"
        ):
            checkpoints.save(0)
    sw.save(f"{folder}/c", [g, d], [og, None])  # an optimizer that is not there
    with pytest.raises(sw.CheckpointError, match="lacks '1.0.bias'"):
        sw.load(f"{folder}/c", [g, d], [og, od])
    gather(None)
    assert "optimizer.json" in os.listdir(f"{folder}/c")


@on_every_rank()
def test_a_module_of_wrapped_modules_is_saved_whole(rank, world_size):
    """The user's own ModuleDict of wrapped modules, and two optimizers over one module."""
    folder = shared_folder(rank)
    for number, stage in enumerate(("3, private", "3, 0")):
        modules, optimizers = built(STAGES[stage], 1)
        sw.save(f"{folder}/{number}", nn.ModuleDict({"g": modules[0], "d": modules[1]}), optimizers)
        others, theirs = built(STAGES["0"], 2)
        sw.load(f"{folder}/{number}", nn.ModuleDict({"g": others[0], "d": others[1]}), theirs)
        for mine, other in zip(modules, others):
            assert_same_state(sw.full_state_dict(mine), sw.full_state_dict(other))
    plain = nn.Linear(3, 2)
    pair = torch.optim.SGD([plain.weight], lr=0.1, momentum=0.9), torch.optim.Adam([plain.bias])
    plain(torch.ones(1, 3)).sum().backward()
    for each in pair:
        each.step()
    sw.save(f"{folder}/two", plain, pair)
    other = nn.Linear(3, 2)
    theirs = torch.optim.SGD([other.weight], lr=0.1, momentum=0.9), torch.optim.Adam([other.bias])
    sw.load(f"{folder}/two", other, theirs)
    assert torch.equal(theirs[0].state[other.weight]["momentum_buffer"], pair[0].state[plain.weight]["momentum_buffer"])
    assert theirs[1].state[other.bias]["step"] == 1


@on_every_rank(deadline_s=90)
def test_modules_of_which_one_cannot_be_whole_are_all_released(rank, world_size):
    made = [sw.wrap(nn.Linear(5, 301), **PRIVATE) for _ in range(2)]
    newer = sw.wrap(sw.unwrap(made[1]), **PRIVATE)
    for writable in (False, True):
        with (
            pytest.raises(sw.Error, match="no longer in force"),
            whole_parameters(join_modules(made), writable=writable),
        ):
            pytest.fail("not whole")
        assert not internals.replica(made[0]).access.is_writing
        with pytest.raises(sw.Error, match="is released"):
            made[0].module.weight.sum()
    assert newer is not None
