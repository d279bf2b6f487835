"""Law: with step_in_backward=True losses, parameters and optimizer state have the bits of ordinary steps, at every stage; gradients
never stand at once; and what cannot be right is one sentence on all ranks, before a parameter has changed.
"""

import copy
import shutil
import tempfile

import pytest
import simulated_gpus
import torch
from harness import gather, on_every_rank, same_everywhere
from models import Fragile, Heads, Mlp, Raises
from oracle.fold import bits_equal
from peer import PEER, batch, sw
from test_hosts_fold_in_two_steps import hosts_of, on_hosts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward, _get_in_backward_optimizers
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "ours AdamW": lambda p: sw.optim.AdamW(p, lr=1e-2),
    "ours SGD": lambda p: sw.optim.SGD(p, lr=0.1, momentum=0.9),
    "ours bfloat16": lambda p: sw.optim.AdamW(p, lr=1e-2, state_dtype=torch.bfloat16, seed=3),
    "ours int8": lambda p: sw.optim.AdamW(p, lr=1e-2, state_dtype="int8", seed=3),
}
STAGES = {
    "0": {"zero": 0},
    "1": {"zero": 1},
    "2": {"zero": 2},
    "3": {"zero": 3},
    "3, private": {"zero": 3, "share_parameters": False, "units": nn.Linear},
}
#: several buckets, more than have a place at once
SMALL = {"bucket_cap_mb": 0.002}


def begin(make=Mlp, optimizer="AdamW", dtype=torch.float32, **options):
    torch.manual_seed(0)
    module = make().to(dtype)
    return sw.wrap(module, OPTIMIZERS[optimizer](groups_of(module)), **{**SMALL, **options})


def groups_of(module):
    named = dict(module.named_parameters())
    vectors = [p for p in named.values() if p.dim() < 2]
    return [{"params": [p for p in named.values() if p.dim() > 1]}, {"params": vectors, "weight_decay": 0.0}]


def loss_of(model, rank, step):
    dtype = next(model.parameters()).dtype
    return model(batch(rank, 6, 7, step=step).to(dtype)).square().mean()


def train(model, optimizer, rank, steps=4, first=0, after=lambda: None):
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after()
        losses.append(loss.item())
    return losses


def outcome(model, optimizer):
    with sw.full_parameters(model):
        values = [p.detach().clone() for p in model.parameters()]
    return values, sw.full_optimizer_state_dict(model, optimizer)


def assert_equal(mine, theirs, what):
    for one, other in zip(mine[0], theirs[0], strict=True):
        assert bits_equal(one, other), what
    assert mine[1]["param_groups"] == theirs[1]["param_groups"], what
    assert mine[1]["state"].keys() == theirs[1]["state"].keys(), what
    for key, state in mine[1]["state"].items():
        for name, value in state.items():
            other = theirs[1]["state"][key][name]
            same = bits_equal(value, other) if isinstance(value, torch.Tensor) else value == other
            assert same, (what, key, name)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@on_every_rank()
def test_every_stage_and_optimizer_has_the_bits_of_ordinary_steps(rank, world_size, stage, optimizer):
    found = []
    for steps in (False, True):
        model, stepper = begin(optimizer=optimizer, step_in_backward=steps, **STAGES[stage])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(stepper, 0.5)
        found.append((train(model, stepper, rank, after=scheduler.step), outcome(model, stepper)))
    assert found[0][0] == found[1][0]
    assert_equal(found[1][1], found[0][1], (stage, optimizer))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, sw.optim.AdamW])
@on_every_rank()
def test_optimizers_that_torch_gave_to_parameters_step_on_buckets_too(rank, world_size, stage, kind):
    own = {"state_dtype": "int8", "seed": 3} if kind is sw.optim.AdamW else {"fused": True}
    found = []
    for steps in (False, True):
        torch.manual_seed(0)
        module, decay = Mlp(), {True: 0.25, False: 0.0}
        of = {key: [p for p in module.parameters() if (p.dim() > 1) is key] for key in decay}
        options = {"lr": 1e-2, **own}
        if steps:
            for key, value in decay.items():
                _apply_optimizer_in_backward(kind, of[key], {**options, "weight_decay": value})
            old = _get_in_backward_optimizers(module)
            model = sw.wrap(module, step_in_backward=True, **{**SMALL, **STAGES[stage]})
            stepper = _get_in_backward_optimizers(model)[0]
            assert {*_get_in_backward_optimizers(model)} == {stepper}
            for read in (lambda: old[0].param_groups[0], lambda: [*old[0].param_groups], old[0].state_dict):
                with pytest.raises(RuntimeError, match=r"taken over .*_in_backward_optimizers\[0\], and give that one"):
                    read()
            with pytest.raises(ValueError, match="needs the optimizer"):  # which the second wrap would lose
                sw.wrap(sw.unwrap(model), step_in_backward=True)
        else:
            groups = [{"params": of[key], "weight_decay": value} for key, value in decay.items()]
            model, stepper = sw.wrap(module, kind(groups, **options), **{**SMALL, **STAGES[stage]})
        losses = []
        for step in range(4):
            loss = loss_of(model, rank, step)
            loss.backward()
            if steps:
                assert all(p.grad is None for p in module.parameters())
            else:
                stepper.step()
                stepper.zero_grad()
            for group in stepper.param_groups:
                group["lr"] *= 0.5
            losses.append(loss.item())
        found.append((losses, outcome(model, stepper)))
    assert found[0][0] == found[1][0]
    for group in (*found[0][1][1]["param_groups"], *found[1][1][1]["param_groups"]):
        del group["params"]
    assert_equal(found[1][1], found[0][1], (stage, kind))


@on_every_rank()
def test_optimizers_of_parameters_that_are_no_one_optimizer_are_refused(rank, world_size):
    module = Mlp()
    first, *rest = module.parameters()
    _apply_optimizer_in_backward(torch.optim.SGD, [first], {"lr": 0.1})
    _apply_optimizer_in_backward(torch.optim.Adam, rest, {"lr": 0.1})
    with pytest.raises(
        ValueError, match=r"one class of optimizer .*SGD\(\) and .*Adam\(\): pass sw.wrap one optimizer"
    ):
        sw.wrap(module, step_in_backward=True)
    for twice in (True, False):
        module = Mlp()
        for seed in (1, 1 if twice else 2):
            options = {"lr": 0.1, "state_dtype": torch.bfloat16, "seed": seed}
            parameters = [*module.parameters()][: None if twice else seed]
            _apply_optimizer_in_backward(sw.optim.AdamW, parameters, options)
        with pytest.raises(ValueError, match="and one optimizer for each parameter; got"):
            sw.wrap(module, step_in_backward=True)
    model = sw.wrap(Mlp(), zero=2)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(
        sw.Error, match=r"sw.wrap\(module, zero=2, step_in_backward=True\) after _apply_optimizer_in_backward"
    ):
        model(batch(rank, 6, 7))


@pytest.mark.parametrize("stage", STAGES)
@on_every_rank()
def test_masters_and_policies_have_them_too(rank, world_size, stage):
    for options in ({"dtype": torch.bfloat16}, {"precision": "bf16"}):
        found = []
        for steps in (False, True):
            model, stepper = begin(step_in_backward=steps, **options, **STAGES[stage])
            found.append((train(model, stepper, rank), outcome(model, stepper)))
        assert found[0][0] == found[1][0]
        assert_equal(found[1][1], found[0][1], (stage, options))


@pytest.mark.parametrize("stage", STAGES)
@on_every_rank()
def test_parameters_that_some_ranks_use_are_stepped_on_and_others_are_not(rank, world_size, stage):
    heads = [["left", "left right", "", "right"][(rank + step) % 4 if step < 3 else 0] for step in range(5)]
    found = []
    for steps in (False, True):
        options = {**STAGES[stage]} | ({"units": "auto"} if "units" in STAGES[stage] else {})
        model, stepper = begin(Heads, step_in_backward=steps, **options)
        for step, used in enumerate(heads):
            model(batch(rank, 6, 7, step=step), used).backward()
            stepper.step()
            stepper.zero_grad()
        found.append(outcome(model, stepper))
    assert_equal(found[1], found[0], stage)


@pytest.mark.parametrize("stage", STAGES)
@on_every_rank()
def test_a_rank_whose_forward_has_no_backward_steps_as_its_peers_do(rank, world_size, stage):
    found = []
    for steps in (False, True):
        model, stepper = begin(step_in_backward=steps, **STAGES[stage])
        train(model, stepper, rank, 2)
        loss = loss_of(model, rank, 2)
        if rank:  # rank 0 drops its loss
            loss.backward()
        stepper.step()
        stepper.zero_grad()
        train(model, stepper, rank, 2, first=3)
        found.append(outcome(model, stepper))
    assert_equal(found[1], found[0], stage)


@pytest.mark.parametrize("stage", STAGES)
@on_every_rank()
def test_a_frozen_parameter_that_is_unfrozen_is_stepped_on(rank, world_size, stage):
    found = []
    for steps in (False, True):
        torch.manual_seed(0)
        module = Mlp()
        module[2].requires_grad_(False)
        options = {**SMALL, **STAGES[stage]}
        model, stepper = sw.wrap(
            module, torch.optim.AdamW(module.parameters(), lr=1e-2), step_in_backward=steps, **options
        )
        train(model, stepper, rank, 2)
        module[2].requires_grad_(True)
        train(model, stepper, rank, 3, first=2)
        found.append(outcome(model, stepper))
    assert_equal(found[1], found[0], stage)


@on_every_rank()
def test_states_load_between_both_ways_of_stepping_and_stages(rank, world_size):
    plain, ordinary = begin(zero=0)
    train(plain, ordinary, rank, 2)
    weights, state = sw.full_state_dict(plain), sw.full_optimizer_state_dict(plain, ordinary)
    train(plain, ordinary, rank, 2, first=2)
    for stage, options in STAGES.items():
        model, stepper = begin(step_in_backward=True, **options)
        sw.load_full_state_dict(model, weights)
        sw.load_full_optimizer_state_dict(model, stepper, copy.deepcopy(state))
        train(model, stepper, rank, 2, first=2)
        assert_equal(outcome(model, stepper), outcome(plain, ordinary), stage)


class Tied(nn.Module):
    """An embedding that is its head, and layers that are recomputed in the backward, one of them twice in a forward."""

    def __init__(self, reentrant):
        super().__init__()
        self.table, self.layers = nn.Embedding(13, 9), nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x):
        x = self.table((x * 100).long().abs() % 13)
        for layer in (*self.layers, self.layers[0]):
            x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return nn.functional.linear(x, self.table.weight)


@pytest.mark.parametrize("stage", STAGES)
@on_every_rank()
def test_tied_and_recomputed_layers_have_them_too(rank, world_size, stage):
    for reentrant in (False, True):
        found = []
        for steps in (False, True):
            options = {**STAGES[stage]} | ({"units": "auto"} if "units" in STAGES[stage] else {})
            model, stepper = begin(lambda: Tied(reentrant), step_in_backward=steps, **options)
            found.append((train(model, stepper, rank), outcome(model, stepper)))
        assert found[0][0] == found[1][0]
        assert_equal(found[1][1], found[0][1], (stage, reentrant))


@pytest.mark.parametrize("stage", STAGES)
@on_every_rank(exactly=4)
def test_rows_of_a_mesh_have_them_too(rank, world_size, stage):
    found = []
    for steps in (False, True):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model, stepper = begin(step_in_backward=steps, device_mesh=mesh, **STAGES[stage])
        found.append((train(model, stepper, rank), outcome(model, stepper)))
    assert found[0][0] == found[1][0]
    assert_equal(found[1][1], found[0][1], stage)


@pytest.mark.parametrize("stage", STAGES)
@on_every_rank(exactly=3)
def test_hosts_have_them_too(rank, world_size, stage):
    found = []
    for steps in (False, True):
        with on_hosts(hosts_of("2+1", world_size)) as group:
            model, stepper = begin(step_in_backward=steps, process_group=group, timeout_s=20, **STAGES[stage])
        found.append((train(model, stepper, rank), outcome(model, stepper)))
    assert found[0][0] == found[1][0]
    assert_equal(found[1][1], found[0][1], stage)


@pytest.mark.parametrize("zero", [0, 2, 3])
@on_every_rank()
def test_state_and_parameters_in_a_file_have_them_too(rank, world_size, zero):
    folders = gather(tempfile.mkdtemp() if rank == 0 else "")
    place = f"nvme:{folders[0]}"
    options = {
        **STAGES["3, private" if zero == 3 else str(zero)],
        "optimizer": "ours AdamW",
        "offload": place if zero < 3 else {"parameters": place, "optimizer": place},
    }
    found = []
    for steps in (False, True):
        model, stepper = begin(step_in_backward=steps, **options)
        train(model, stepper, rank)
        found.append(outcome(model, stepper))
    assert_equal(found[1], found[0], zero)
    if gather(None) and rank == 0:
        shutil.rmtree(folders[0])


@on_every_rank()
def test_a_checkpoint_restores_between_both_ways_of_stepping(rank, world_size):
    folders = gather(tempfile.mkdtemp() if rank == 0 else "")
    for first, then in (({"zero": 0}, {"zero": 2}), ({"zero": 3}, {"zero": 0})):
        for steps in (False, True):
            model, stepper = begin(step_in_backward=steps, **first)
            train(model, stepper, rank, 2)
            folder = f"{folders[0]}/{first['zero']}-{steps}"
            with sw.Checkpointer(folder, model, stepper) as checkpoints:
                checkpoints.save(1)
            train(model, stepper, rank, 2, first=2)
            other, others = begin(step_in_backward=not steps, **then)
            with sw.Checkpointer(folder, other, others) as checkpoints:
                assert checkpoints.restore() == 2
            train(other, others, rank, 2, first=2)
            assert_equal(outcome(other, others), outcome(model, stepper), (first, then, steps))
    if gather(None) and rank == 0:
        shutil.rmtree(folders[0])


@pytest.mark.parametrize("stage", ["0", "2", "3"])
@on_every_rank(spoils=True)
def test_a_backward_that_reads_a_weight_after_its_step_raises(rank, world_size, stage):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layers = nn.Linear(7, 7), nn.Sequential(*(nn.Linear(7, 7) for _ in range(4)))

        def forward(self, x):
            x = self.first(x)
            return self.layers(nn.functional.linear(x, self.layers[3].weight.detach()))

    model, stepper = begin(Twice, step_in_backward=True, **{**STAGES[stage], "bucket_cap_mb": 1e-4})
    with pytest.raises(
        (RuntimeError, sw.Error), match="modified by an inplace operation|begin again from a checkpoint"
    ):
        for step in range(3):
            loss_of(model, rank, step).backward()
            stepper.step()


# memory


@pytest.mark.parametrize("stage", STAGES)
@on_every_rank()
def test_gradients_have_memory_of_two_buckets_and_no_more(rank, world_size, stage):
    found = []
    for steps in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(24)))
        options = {**STAGES[stage], "bucket_cap_mb": 96 * 96 * 4 / 2**20}
        model, stepper = sw.wrap(module, torch.optim.AdamW(module.parameters()), step_in_backward=steps, **options)
        for step in range(3):
            model(batch(rank, 2, 96, step=step)).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
        found.append(outcome(model, stepper))
    assert_equal(found[1], found[0], stage)
    slices = 1 if stage == "0" else world_size
    bucket = 96 * 96 * 4
    planned = next(each for each in reversed(sw.describe()["models"]))["gradient_bytes"]
    assert planned == 2 * bucket + (0 if slices == 1 else 2 * bucket // slices)
    assert sw.stats(model)["models"][0]["buckets_early"] > 24 * 2, "the first round, too, sends in the backward"


# refusals


def refused(match, call):
    with pytest.raises(sw.Error, match=match) as caught:
        call()
    assert same_everywhere(str(caught.value))


@pytest.mark.parametrize("stage", STAGES)
@on_every_rank(spoils=True)
def test_what_reads_gradients_is_refused_alike_on_all_ranks(rank, world_size, stage):
    model, stepper = begin(step_in_backward=True, **STAGES[stage])
    loss_of(model, rank, 0).backward()
    gone = "stepped on inside the backward"
    refused(gone, lambda: sw.clip_grad_norm_(model, 1.0))
    refused(gone, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    refused(gone, lambda: sw.full_gradients(model))
    refused(gone, lambda: next(iter(model.parameters())).grad.norm())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    refused(gone, lambda: scaler.unscale_(stepper))
    refused("without a closure", lambda: stepper.step(lambda: None))
    again = loss_of(model, rank, 1)
    refused("each backward is a step", again.backward)


@pytest.mark.parametrize("stage", STAGES)
@on_every_rank()
def test_what_does_not_synchronise_is_refused(rank, world_size, stage):
    model, stepper = begin(step_in_backward=True, **STAGES[stage])
    beside = "does not go together with step_in_backward=True"
    refused(beside, lambda: model.no_sync().__enter__())
    refused(beside, lambda: sw.average_gradients(model))
    refused(beside, lambda: model.join())
    refused(beside, lambda: model.register_comm_hook(None, lambda state, bucket: None))
    train(model, stepper, rank, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip_grad_norm": 1.0}, "clip_grad_norm= needs the norm of all of them"),
        ({"compress": sw.Bf16()}, "compress= averages"),
        ({"partition": "tensor"}, "partition= 'tensor' collects"),
        ({"check_every": 3}, "check_every= looks at all"),
    ],
)
@on_every_rank()
def test_options_that_need_all_gradients_are_refused(rank, world_size, options, words):
    with pytest.raises(ValueError, match=words):
        begin(step_in_backward=True, **options)


@on_every_rank()
def test_other_classes_and_hooked_optimizers_are_refused(rank, world_size):
    class Odd(torch.optim.SGD):
        pass

    for make in (Odd, torch.optim.Adafactor):
        module = Mlp()
        with pytest.raises(
            ValueError, match="elementwise optimizers of torch.optim and sw.optim, got .*(Odd|Adafactor)"
        ):
            sw.wrap(module, make(module.parameters(), lr=0.1), step_in_backward=True, zero=1)
    module = Mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ValueError, match="would run once a bucket"):
        sw.wrap(module, optimizer, step_in_backward=True)
    with pytest.raises(ValueError, match="needs the optimizer"):
        sw.wrap(Mlp(), step_in_backward=True)


@on_every_rank()
def test_a_transport_without_shared_memory_is_refused(rank, world_size):
    refused("here they are staged: asked for", lambda: begin(step_in_backward=True, transport="staged"))


def test_a_gpu_is_refused(teams, paths):
    simulated_gpus.run(teams, 2, paths, on_a_gpu)


def on_a_gpu(gpus, rank, world_size):
    for zero in (0, 2):
        module = gpus.adopt_module(Mlp())
        with pytest.raises(NotImplementedError, match="step_in_backward=True is for modules on the CPU"):
            sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), zero=zero, step_in_backward=True)


@pytest.mark.parametrize("stage", STAGES)
@on_every_rank(exactly=3, spoils=True)
def test_ranks_that_differ_in_a_rate_step_on_nothing(rank, world_size, stage):
    model, stepper = begin(step_in_backward=True, **STAGES[stage])
    train(model, stepper, rank, 2)
    before = outcome(model, stepper)[0]
    stepper.param_groups[1]["lr"] = 0.5 if rank == 1 else 0.25
    refused("lr=0.25 on rank 0, lr=0.5 on rank 1; no parameter has changed", loss_of(model, rank, 2).backward)
    for group in stepper.param_groups:
        group["lr"] = 0.125
    stepper.step()
    for mine, theirs in zip(outcome(model, stepper)[0], before, strict=True):
        assert bits_equal(mine, theirs)
    train(model, stepper, rank, 2, first=2)


class Deep(nn.Module):
    """Layers above and below a point at which a backward fails on request."""

    def __init__(self):
        super().__init__()
        self.lower, self.upper = nn.Linear(7, 9), nn.Sequential(*(nn.Linear(9, 9) for _ in range(4)))

    def forward(self, x, fails=False):
        return self.upper(Raises.apply(self.lower(x), fails))


@pytest.mark.parametrize("stage", STAGES)
@on_every_rank(exactly=3, spoils=True)
def test_a_backward_that_fails_half_way_ends_with_one_sentence(rank, world_size, stage):
    model, stepper = begin(Deep, step_in_backward=True, **{**STAGES[stage], "bucket_cap_mb": 1e-4})
    for step in range(2):
        loss_of(model, rank, step).backward()
        stepper.step()
    loss = model(batch(rank, 6, 7), rank == 1).square().mean()
    words = "failed on rank 1 after buckets had left.*begin again from a checkpoint"
    if rank == 1:
        with pytest.raises(ArithmeticError):
            loss.backward()
    else:
        with pytest.raises(sw.CommError, match=words):
            loss.backward()
    with pytest.raises(sw.Error, match=words):
        loss_of(model, rank, 2).backward()


@pytest.mark.parametrize("stage", STAGES)
@on_every_rank(exactly=3)
def test_a_backward_that_fails_before_a_bucket_has_left_changes_nothing(rank, world_size, stage):
    found = []
    for steps in (False, True):
        model, stepper = begin(Fragile, step_in_backward=steps, **STAGES[stage])
        train(model, stepper, rank, 2)
        with pytest.raises(
            ArithmeticError if rank == 1 else sw.Error, match="as the test asked|left a backward unfinished"
        ):
            model(batch(rank, 6, 7), rank == 1).square().mean().backward()
        stepper.zero_grad()
        train(model, stepper, rank, 2, first=3)
        found.append(outcome(model, stepper))
    assert_equal(found[1], found[0], stage)


class Adapted(nn.Module):
    """Frozen layers, each with two small ones that train beside it."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(96, 96, bias=False), nn.Linear(96, 24), nn.Linear(24, 96)
        self.base.weight.requires_grad_(False)

    def forward(self, x):
        return x + 0.1 * (self.base(x) + self.up(self.down(x)))


@pytest.mark.parametrize("stage", STAGES)
@on_every_rank()
def test_frozen_buckets_between_trained_ones_keep_no_place(rank, world_size, stage):
    found = []
    for steps in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(*(Adapted() for _ in range(12)))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        options = {"step_in_backward": steps, **STAGES[stage], "bucket_cap_mb": 0.02}
        model, stepper = sw.wrap(module, optimizer, **options)
        for step in range(9):
            for number in (4, 5, 9) if step == 5 else ():
                module[number].base.weight.requires_grad_(True)
            model(batch(rank, 48, 96, step=step)).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
        found.append(outcome(model, stepper))
    assert_equal(found[1], found[0], stage)


class Embedded(nn.Module):
    """A frozen weight of many buckets' size between layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
        self.large = nn.Parameter(torch.randn(16, 512) / 16, requires_grad=False)
        self.second = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x) @ self.large) @ self.large.T)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("trains", ["layers", "a bias"])
@on_every_rank()
def test_a_large_frozen_parameter_takes_no_memory_until_it_trains(rank, world_size, stage, trains):
    found, planned = [], []
    for steps in (False, True):
        torch.manual_seed(0)
        module = Embedded()
        for p in module.parameters() if trains == "a bias" else ():
            p.requires_grad_(p is module.second[5].bias)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        options = {"step_in_backward": steps, **STAGES[stage], "bucket_cap_mb": 0.001}
        model, stepper = sw.wrap(module, optimizer, **options)
        planned.append(sw.describe()["models"][-1]["gradient_bytes"])
        x = batch(rank, 48, 16)
        for step in range(9):
            if step == 3:
                for p in module.first.parameters():
                    p.requires_grad_(True)
            if step == 5:
                module.large.requires_grad_(True)
            model(x + step).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
        found.append(outcome(model, stepper))
        planned.append(sw.describe()["models"][-1]["gradient_bytes"])
    assert_equal(found[1], found[0], stage)
    large = 16 * 512 * 4
    slices = 1 if stage == "0" else world_size
    used = planned[2] * (1 if slices == 1 else slices / (1 + slices))
    assert 0 < used < large / (8 if trains == "layers" else 64), (planned, used)
    assert planned[3] >= large


@pytest.mark.parametrize("stage", STAGES)
@on_every_rank()
def test_a_change_between_backward_and_step_raises_and_training_goes_on(rank, world_size, stage):
    model, stepper = begin(step_in_backward=True, **STAGES[stage])
    train(model, stepper, rank, 2)

    def rate():
        stepper.param_groups[0]["lr"] *= 0.5

    def gradient():
        next(model.parameters()).grad = torch.ones_like(next(model.parameters()))

    for change, words in ((rate, "a group's value"), (gradient, "a gradient was changed")):
        loss_of(model, rank, 2).backward()
        if change is rate or stage == "0":
            change()
            refused(words, stepper.step)
        else:
            stepper.step()
        train(model, stepper, rank, 1, first=3)
    if stage == "3, private":  # where released parameters cannot be read
        return
    with pytest.raises(sw.Error, match="of no forward of the module"):
        sum(p.square().sum() for p in model.parameters() if p.numel()).backward()
    train(model, stepper, rank, 1, first=4)


@pytest.mark.parametrize("stage", STAGES)
@on_every_rank()
def test_a_forward_after_the_step_in_the_backward_is_not_of_this_step(rank, world_size, stage):
    found = []
    for steps in (False, True):
        model, stepper = begin(step_in_backward=steps, **STAGES[stage])
        for step in range(3):
            loss_of(model, rank, step).backward()
            if steps:
                loss_of(model, rank, 9)  # its graph is dropped
            stepper.step()
            stepper.zero_grad()
        found.append(outcome(model, stepper))
    assert_equal(found[1], found[0], stage)
    loss_of(model, rank, 3).backward()
    loss = loss_of(model, rank, 4)
    with pytest.raises(sw.Error, match="each backward is a step"):
        loss.backward()
    stepper.step()
    train(model, stepper, rank, 1, first=5)


@pytest.mark.parametrize("stage", STAGES)
@on_every_rank()
def test_a_lazy_save_beside_a_step_in_the_backward_is_whole(rank, world_size, stage):
    folder = gather(tempfile.mkdtemp() if rank == 0 else "")[0]
    model, stepper = begin(step_in_backward=True, **STAGES[stage])
    with sw.Checkpointer(folder, model, stepper, snapshot="lazy") as saves:
        train(model, stepper, rank, 2)
        expected = outcome(model, stepper)
        saves.save(1)
        train(model, stepper, rank, 1, first=2)
        saves.wait()
    model, stepper = begin(step_in_backward=True, **STAGES[stage])
    with sw.Checkpointer(folder, model, stepper) as saves:
        assert saves.restore() == 2
        assert_equal(outcome(model, stepper), expected, stage)
    gather(None)
    if rank == 0:
        shutil.rmtree(folder)


@pytest.mark.parametrize("stage", STAGES)
@on_every_rank()
def test_two_models_in_one_loss_that_send_in_one_order_have_them_too(rank, world_size, stage):
    found = []
    for steps in (False, True):
        first, second = (begin(step_in_backward=steps, **STAGES[stage]) for _ in range(2))
        losses = []
        for step in range(3):
            loss = loss_of(first[0], rank, step) + loss_of(second[0], rank, step + 9)
            loss.backward()
            for _, stepper in (first, second):
                stepper.step()
                stepper.zero_grad()
            losses.append(loss.item())
        found.append((losses, outcome(*first), outcome(*second)))
    assert found[0][0] == found[1][0]
    for mine, theirs in zip(found[1][1:], found[0][1:], strict=True):
        assert_equal(mine, theirs, stage)


@pytest.mark.parametrize("stage", STAGES)
@on_every_rank()
def test_gradients_that_a_rank_asks_for_are_no_part_of_a_step(rank, world_size, stage):
    found = []
    for asking in ((), (0,), range(world_size)):
        model, stepper = begin(step_in_backward=True, **STAGES[stage])
        for step in range(4):
            train(model, stepper, rank, 1, first=step)
            for _ in range(2) if rank in asking else ():
                x = batch(rank, 6, 7).requires_grad_()
                assert torch.autograd.grad(model(x).sum(), [x])[0].shape == x.shape
            for group in stepper.param_groups:
                group["lr"] *= 0.5
        found.append(outcome(model, stepper))
    for asked in found[1:]:
        assert_equal(asked, found[0], stage)
