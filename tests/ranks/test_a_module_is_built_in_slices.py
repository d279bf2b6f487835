"""Law: wrap(init=) of a module on the meta device has the bits of materialize() from rank 0's seed and then wrap, at every
stage; no rank holds more than its slices and two units at private zero=3. An error leaves the module on the meta device.
"""

import copy
import ctypes
import gc
import threading
import weakref

import pytest
import torch
from harness import gather, on_every_rank
from internals import _Units
from oracle.fold import bits_equal
from peer import PEER, batch, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder
from test_memory_is_held_to_the_plan import pss_bytes, settled
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

PRIVATE = {"zero": 3, "share_parameters": False}
STAGES = {"0": {"zero": 0}, "1": {"zero": 1}, "2": {"zero": 2}, "3": {"zero": 3}, "3, private": PRIVATE}
every_stage = pytest.mark.parametrize("stage", STAGES)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x + self.scale * self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    """A tied head, blocks, a buffer, and a parameter of its own, so that init() sees it last."""

    def __init__(self, width=40, layers=3):
        super().__init__()
        self.first, self.norm = nn.Linear(7, width), nn.BatchNorm1d(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head, self.tied = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.tied.weight = self.head.weight
        self.gain, self.none = nn.Parameter(torch.ones(width)), nn.Parameter(torch.empty(0))

    def forward(self, x):
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.tied(self.head(x)) * self.gain


def init(module):
    """Initialise a module, and as a parent its children again: of all blocks, forwards, and one from another."""
    if isinstance(module, Model):
        nn.init.uniform_(module.gain)
        assert module.none.numel() == 0
        for block in module.blocks:
            block.down.weight.data.mul_(0.5)
            nn.init.normal_(block.up.weight)
        module.blocks[0].up.weight.copy_(module.blocks[-1].up.weight)
    elif isinstance(module, Block):
        nn.init.normal_(module.scale)
        module.down.weight.div_(3)
    else:
        module.reset_parameters()


def on_meta(build=Model):
    with torch.device("meta"):
        return build()


def assert_is(model, twin):
    found = sw.full_state_dict(model)
    assert found.keys() == twin.keys()
    assert [name for name in twin if not bits_equal(found[name], twin[name])] == []


def train(model, optimizer, rank, steps=3):
    losses = []
    for step in range(steps):
        loss = model(batch(rank, 6, 7, step=step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@every_stage
@on_every_rank()
def test_it_is_the_materialized_module(rank, world_size, stage):
    options = STAGES[stage]
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(7)
        twin = sw.materialize(on_meta().to(dtype), init=init)
        after = torch.get_rng_state()
        values = copy.deepcopy(twin.state_dict())
        torch.manual_seed(7)
        module = on_meta().to(dtype)
        parameters = list(module.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)  # made on the meta device
        model, optimizer = sw.wrap(module, optimizer, init=init, **options)
        assert torch.equal(torch.get_rng_state(), after)
        assert [id(p) for p in parameters] == [id(p) for p in module.parameters()]
        assert module.tied.weight is module.head.weight
        assert_is(model, values)
        other, plain = sw.wrap(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2), **options)
        if dtype is torch.float32:
            losses = train(model, optimizer, rank)
            assert losses == train(other, plain, rank) and losses[0] == losses[0]
        gather(None)


@every_stage
@on_every_rank()
def test_the_seed_is_rank_0s_and_others_keep_their_stream(rank, world_size, stage):
    torch.manual_seed(0)
    values = copy.deepcopy(sw.materialize(on_meta(), init=init).state_dict())
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    model, optimizer = sw.wrap(on_meta(), init=init, **STAGES[stage]), None
    assert torch.equal(before, torch.get_rng_state()) is (rank > 0)
    assert_is(model, values)
    optimizer = (
        sw.shard_optimizer(model, torch.optim.SGD(model.module.parameters(), lr=0.1)) if STAGES[stage]["zero"] else None
    )
    if optimizer is not None:  # made after
        assert all(map(torch.isfinite, map(torch.tensor, train(model, optimizer, rank))))
    gather(None)


@pytest.mark.parametrize(
    "options", [{}, {"units": 0.001}, {"units": (Block, nn.Linear)}, {"precision": "bf16"}, {"gather": "int8"}]
)
@on_every_rank()
def test_units_of_every_cut(rank, world_size, options):
    torch.manual_seed(3)
    values = copy.deepcopy(sw.materialize(on_meta(), init=init).state_dict())
    torch.manual_seed(3)
    assert_is(sw.wrap(on_meta(), init=init, **PRIVATE, **options), values)
    torch.manual_seed(3)
    values = copy.deepcopy(
        sw.materialize(on_meta(lambda: nn.Sequential(*(nn.Linear(50, 50) for _ in range(4))))).state_dict()
    )
    torch.manual_seed(3)
    model = sw.wrap(
        on_meta(lambda: nn.Sequential(*(nn.Linear(50, 50) for _ in range(4)))), init=True, **PRIVATE, **options
    )
    assert_is(model, values)
    gather(None)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3000))

    def forward(self, x):
        return x


@every_stage
@on_every_rank()
def test_an_error_is_one_on_all_ranks_and_the_next_wrap_works(rank, world_size, stage):
    options = STAGES[stage]

    def refused(match, *, build=lambda: nn.Sequential(nn.Linear(60, 60), nn.Linear(60, 60)), **given):
        module = on_meta(build)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1) if given.pop("with_optimizer", False) else None
        if given.pop("with_state", False):
            optimizer.state[next(module.parameters())] = {"step": 1}
        with pytest.raises((sw.Error, RuntimeError, TypeError, ValueError), match=match):
            sw.wrap(module, optimizer, **options, **given)
        return module

    def torn(module):
        module.reset_parameters()
        if rank == world_size - 1:
            raise RuntimeError("no values here")

    module = refused("no values here", init=torn)
    assert all(p.is_meta for p in module.parameters())
    torch.manual_seed(1)
    model = sw.wrap(module, init=True, **options)
    assert all(bool(torch.isfinite(each).all()) for each in sw.full_state_dict(model).values())
    refused(
        "'1', a Own, has tensors on the meta device and no reset",
        build=lambda: nn.Sequential(nn.Linear(3, 3), Own()),
        init=True,
    )
    refused("init must be", init=7)
    refused("holds state of parameter '0.weight'", init=True, with_optimizer=True, with_state=True)
    watched = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(30, 30)))
    reference = weakref.ref(watched[1].weight)
    with pytest.raises(sw.Error, match="'1.weight' cannot get memory in place: .*weakref"):
        sw.wrap(watched, init=True, **options)
    assert all(p.is_meta for p in watched.parameters()) and reference() is watched[1].weight
    del reference
    watched[1].seen = [weakref.ref(watched[1].weight)]
    with pytest.raises(
        sw.Error, match=r"'1.weight' cannot get memory .*weakref.* \(in 1.seen\): drop them, or .*materialize"
    ):
        sw.wrap(watched, init=True, **options)
    del watched[1].seen
    watched[1].weight.register_post_accumulate_grad_hook(print)
    with pytest.raises(sw.Error, match="'1.weight' cannot get memory in place: it has hooks"):
        sw.wrap(watched, init=True, **options)
    mixed = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    mixed[1].to_empty(device="cpu")
    with pytest.raises(sw.Error, match=r"'1.weight' has memory and '0.weight' is on the meta"):
        sw.wrap(mixed, init=True, **options)
    assert mixed[0].weight.is_meta
    with pytest.raises(sw.Error, match="needs all parameters on the meta device"):
        sw.wrap(nn.Linear(3, 3), init=True, **options)
    with pytest.raises(sw.Error, match=r"meta device.*init= or weights=.*sw\.materialize"):
        sw.wrap(on_meta(), **options)
    gather(None)


@every_stage
@on_every_rank(at_least=2)
def test_ranks_that_build_in_other_ways_are_told(rank, world_size, stage):
    stored = nn.Linear(3, 3).state_dict()
    ways = [{}, {"init": True}, {"init": init}, {"weights": stored}, {"weights": stored, "init": True}]
    for at, way in enumerate(ways):
        other = ways[(at + 1) % len(ways)]
        module = on_meta(lambda: nn.Linear(3, 3))
        with pytest.raises(sw.Error, match="ranks disagree about option (init|weights): .* on rank 0, .* on rank"):
            sw.wrap(module, **(way if rank else other), **STAGES[stage])
        assert module.weight.is_meta
    gather(None)


@every_stage
@on_every_rank()
def test_recurrent_layers_are_built(rank, world_size, stage):
    options = STAGES[stage]

    def build():
        return nn.ModuleList([nn.LSTM(7, 30, num_layers=2), nn.GRU(30, 30), nn.RNN(30, 40)])

    def run(model):
        x = batch(rank, 6, 7)
        for each in model:
            x = each(x)[0]
        return x.square().mean()

    def torn(each):
        each.reset_parameters()
        raise RuntimeError("no values here")

    torch.manual_seed(2)
    twin = sw.materialize(on_meta(build))
    module = on_meta(build)
    with pytest.raises((RuntimeError, sw.Error), match="no values here"):
        sw.wrap(module, init=torn, **options)
    assert all(p.is_meta for p in module.parameters())
    for each in (*twin, *module):
        assert [id(ref()) for ref in each._flat_weight_refs] == [id(p) for p in each.parameters()]
    torch.manual_seed(2)
    wanted, state = run(twin), {name: each.clone() for name, each in twin.state_dict().items()}
    for given in ({"init": True}, {"weights": state}):
        module = on_meta(build)
        model = sw.wrap(module, **given, **options)
        assert_is(model, state)
        with sw.full_parameters(model):
            assert bits_equal(run(module), wanted)
        del model
        gather(None)


class Marked(nn.Parameter):
    pass


@every_stage
@on_every_rank()
def test_parameters_keep_their_class(rank, world_size, stage):
    def build():
        module = nn.Linear(40, 40)
        module.weight, module.bias = Marked(module.weight.data), Marked(module.bias.data, requires_grad=False)
        module.weight.hint = "kept"
        return module

    made = sw.materialize(on_meta(build))
    module = on_meta(build)
    sw.wrap(module, init=True, **STAGES[stage])
    for each in (made, module):
        assert type(each.weight) is Marked and each.weight.hint == "kept" and each.weight.requires_grad
        assert type(each.bias) is Marked and not each.bias.requires_grad
    gather(None)


class Replacing(nn.Module):
    """It replaces the data of its children, of which most are written to slices by then."""

    def __init__(self):
        super().__init__()
        self.lines = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))
        self.gain = nn.Parameter(torch.empty(40))

    def reset_parameters(self):
        nn.init.ones_(self.gain)
        for each in self.lines:
            each.weight.data = torch.rand(40, 40)
        self.lines[0].bias.add_(1)  # this one's unit becomes whole meanwhile
        self.lines[1].weight.data.mul_(2)
        self.lines[2].weight.data = self.lines[2].weight.data.t()
        self.lines[3].bias.data = self.lines[0].bias.data.clone()


@every_stage
@on_every_rank()
def test_replaced_data_are_the_values(rank, world_size, stage):
    torch.manual_seed(6)
    values = copy.deepcopy(sw.materialize(on_meta(Replacing)).state_dict())
    torch.manual_seed(6)
    assert_is(sw.wrap(on_meta(Replacing), init=True, **STAGES[stage]), values)
    gather(None)

    def short(each):
        each.reset_parameters()
        each.weight.data = torch.ones(3, 3)

    if stage == "3, private":
        with pytest.raises(sw.Error, match="init= gave 'weight' data of another shape"):
            sw.wrap(on_meta(lambda: nn.Linear(40, 40)), init=short, **PRIVATE)
    gather(None)


class Masked(nn.Linear):
    """It inherits reset_parameters(), which does not know of its scale and mask."""

    def __init__(self):
        super().__init__(40, 40)
        self.scale = nn.Parameter(torch.ones(40))
        self.register_buffer("mask", torch.tril(torch.ones(40, 40)), persistent=False)


@every_stage
@on_every_rank()
def test_what_no_call_has_written_is_named(rank, world_size, stage):
    options = STAGES[stage]

    def build():
        return nn.Sequential(nn.Linear(40, 40), Masked())

    def writes(each):
        each.reset_parameters()
        if isinstance(each, Masked):
            each.scale.data = torch.full((40,), 2.0)
            torch._foreach_copy_([each.mask], [torch.tril(torch.ones(40, 40))])

    stored = gather(build().state_dict())[0]
    left = "no call of the initialisation wrote {} .*init=.*off the meta device"
    for given, names in (({"init": True}, "'1.mask', '1.scale'"), ({"weights": stored}, "'1.mask'")):
        module = on_meta(build)
        with pytest.raises(sw.Error, match=left.format(names)):
            sw.wrap(module, **given, **options)
        assert all(t.is_meta for t in (*module.parameters(), *module.buffers()))
        if "weights" in given:
            module[1].mask = torch.tril(torch.ones(40, 40))
            assert_is(sw.wrap(module, **given, **options), stored)
        else:
            values = sw.full_state_dict(sw.wrap(module, init=writes, **options))
            assert values["1.scale"].tolist() == [2.0] * 40
        assert bits_equal(module[1].mask, torch.tril(torch.ones(40, 40)))
    module = on_meta(build)
    with pytest.raises(sw.Error, match="materialize: " + left.format("'1.mask', '1.scale'")):
        sw.materialize(module)
    assert all(t.is_meta for t in (*module.parameters(), *module.buffers()))
    spectral = nn.Sequential(nn.utils.spectral_norm(nn.Linear(40, 40))).to("meta")
    with pytest.raises(sw.Error, match="weight_orig"):
        sw.wrap(spectral, init=True, **options)
    gather(None)


@on_every_rank(at_least=2)
def test_ranks_that_write_other_values_are_told(rank, world_size):
    def unlike(module):
        module.weight.fill_(rank)
        module.bias.zero_()

    module = on_meta(lambda: nn.Sequential(nn.Linear(60, 60), nn.Linear(60, 60)))
    with pytest.raises(sw.Error, match="disagree about the initial values of unit '1': rank 1"):
        sw.wrap(module, init=unlike, **PRIVATE)

    def unlike_in_one_element(module):
        module.weight.fill_(1)
        module.bias.zero_()
        module.weight[17, 30] += rank

    with pytest.raises(sw.Error, match="disagree about the initial values of unit '1': rank 1"):
        sw.wrap(module, init=unlike_in_one_element, **PRIVATE)

    def replaces(module):
        module.weight = nn.Parameter(torch.zeros(60, 60))
        module.bias.zero_()

    for options in STAGES.values():
        module = on_meta(lambda: nn.Sequential(nn.Linear(60, 60), nn.Linear(60, 60)))
        parameters = list(module.parameters())
        with pytest.raises(sw.Error, match=r"init= replaced parameter '0.weight'"):
            sw.wrap(module, init=replaces, **options)
        assert [id(p) for p in parameters] == [id(p) for p in module.parameters()]
        assert all(p.is_meta for p in parameters)
    gather(None)


WIDTH, LAYERS = 1024, 24  # 24 units of 16 MiB


@pytest.mark.timeout(170)
@on_every_rank(exactly=4, deadline_s=150)
def test_a_rank_holds_its_slices_and_two_units(rank, world_size):
    def build():
        return nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False))
                for _ in range(LAYERS)
            )
        )

    module = on_meta(build)
    unit = 4 * WIDTH * 2 * WIDTH * 2
    sw.wrap(nn.Linear(4, 4), **PRIVATE)
    gather(None)
    before, peak = settled(), 0

    def fills(each):
        nonlocal peak
        each.weight.uniform_(-1, 1)
        peak = max(peak, pss_bytes())

    model = sw.wrap(module, init=fills, **PRIVATE)
    peak = max(peak, pss_bytes())
    slices = LAYERS * unit // world_size
    gc.collect()
    found = gather((peak - before) >> 20)
    assert max(found) <= (slices + 2 * unit + (64 << 20)) >> 20, found
    assert sw.describe()["models"][-1]["parameter_bytes"] <= slices + 4096
    print("peak PSS of ranks, MiB:", found, "slices and two units:", (slices + 2 * unit) >> 20)
    del model
    gather(None)


@on_every_rank()
def test_a_unit_that_no_parent_writes_to_is_sliced_once(rank, world_size):
    class Parents(nn.Module):  # their calls come last, and look at all parameters below
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
            self.gain = nn.Parameter(torch.ones(64))

        def forward(self, x):
            return self.body(x) * self.gain

    def fills(each):
        for parameter in each.parameters(recurse=False):
            parameter.uniform_(-1, 1)

    sliced, put = [], _Units._put
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Units, "_put", lambda self, number: (sliced.append(number), put(self, number)))
        model = sw.wrap(on_meta(Parents), init=fills, units=(nn.Linear,), **PRIVATE)
    assert sorted(sliced) == list(range(5)), sliced
    del model
    gather(None)


@pytest.mark.parametrize("how", ["file", "tensor", "low"])
@every_stage
@on_every_rank()
def test_optimizers_of_every_kind_take_parameters_of_the_meta_device(rank, world_size, stage, how):
    options = {**STAGES[stage]}
    if how == "tensor":
        options["partition"] = "tensor"
    if how == "file":
        options["offload"] = f"nvme:{shared_folder(rank)}"
    losses = []
    for builds in (True, False):
        torch.manual_seed(4)
        module = on_meta(lambda: nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 40)))
        module = module.to(torch.bfloat16) if how == "low" else module
        how_built = {"init": True} if builds else {}
        if not builds:
            sw.materialize(module)
        kind = sw.optim.AdamW if how == "file" else torch.optim.AdamW
        model, optimizer = sw.wrap(module, kind(module.parameters(), lr=1e-2), **how_built, **options)
        losses.append([])
        for step in range(3):
            x = batch(rank, 6, 7, step=step).to(module[0].weight.dtype)
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    gather(None)


@every_stage
@on_every_rank()
def test_a_tensor_that_is_written_in_parts_needs_all_of_them(rank, world_size, stage):
    def thirds(count):
        def write(module):
            for part in module.weight.chunk(3)[:count]:
                nn.init.normal_(part)
            module.weight[torch.tensor([0, 2])] = 1.0
            module.weight.masked_fill_(torch.eye(96, 60) > 0, 0.0)
            nn.init.zeros_(module.bias)

        return write

    for build in (sw.materialize, lambda module, init: sw.wrap(module, init=init, **STAGES[stage])):
        with pytest.raises(sw.Error, match="no call of the initialisation wrote 1[0-9]{3} elements of 'weight'"):
            build(on_meta(lambda: nn.Linear(60, 96)), init=thirds(2))
        build(on_meta(lambda: nn.Linear(60, 96)), init=thirds(3))
    gather(None)


@pytest.mark.parametrize("how", ["thread", "address"])
@on_every_rank()
def test_a_write_past_torch_is_kept_or_an_error(rank, world_size, how):
    def past(tensor):
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        act = (lambda: tensor.fill_(2.0)) if how == "thread" else (lambda: ctypes.memset(address, 1, nbytes))
        thread = threading.Thread(target=torch.no_grad()(act))
        thread.start()
        thread.join()

    def build(write):
        def init(module):
            if isinstance(module, (Block, Model)):
                nn.init.ones_(module.gain if isinstance(module, Model) else module.scale)
                write(module)
            else:
                module.reset_parameters()

        return sw.wrap(on_meta(), init=init, **PRIVATE)

    with pytest.raises(sw.Error, match="wrote to 'blocks.2.up.weight' or read it through numpy, an address or another"):
        build(lambda module: past(module.blocks[2].up.weight) if isinstance(module, Model) else None)  # sliced long ago
    model = build(lambda module: past(module.up.weight) if isinstance(module, Block) else None)  # still whole
    assert sw.full_state_dict(model)["blocks.1.up.weight"].unique().numel() == 1
    gather(None)


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


@on_every_rank()
def test_fully_shard_builds_as_wrap_does(rank, world_size):
    for how in ({"init": init}, {"weights": None}, {}):
        torch.manual_seed(3)
        twin = copy.deepcopy(sw.materialize(on_meta(), init=init).state_dict())
        module = on_meta()
        if "weights" in how:
            how["weights"] = gather(twin)[0]
        for block in module.blocks:
            sw.fully_shard(block)
        sw.fully_shard(module, **how)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)  # of parameters that have no memory yet
        torch.manual_seed(3)
        if not how:  # as programs of FSDP2 write it
            module.to_empty(device="cpu")
            module.apply(lambda each: [nn.init.constant_(p, 0.02) for p in each.parameters(recurse=False)])
            module.norm.reset_running_stats()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            twin = {n: full(each) for n, each in module.state_dict().items()}
        assert_is(module, twin)
        assert all(map(torch.isfinite, map(torch.tensor, train(module, optimizer, rank))))
        gather(None)
