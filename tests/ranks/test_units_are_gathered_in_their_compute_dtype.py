"""Law: at zero=3 under a 16-bit policy modules compute with memory in that dtype. A forward leaves no copy of a released
parameter, gathers move 2 bytes a parameter, and losses, parameters and optimizer state have the bits of stage 0."""

import contextlib
import copy
import pathlib
import shutil
import tempfile
import weakref

import internals
import pytest
import test_units_are_whole_only_while_they_run as units
import torch
from harness import LONG, gather, in_turn, on_every_rank
from oracle.fold import bits_equal
from peer import PEER, batch, engine, sw
from test_hosts_fold_in_two_steps import hosts_of, on_hosts
from test_units_are_whole_only_while_they_run import WIDTH, Blocks, loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
PRIVATE, SHARED = {"zero": 3, "share_parameters": False}, {"zero": 3}


def wrap(build=Blocks, precision="bf16", **options):
    torch.manual_seed(0)
    module = build()
    trained = [p for name, p in module.named_parameters() if p.requires_grad and name != "left_alone"]
    return sw.wrap(
        module, torch.optim.AdamW(trained, lr=1e-2), precision=precision, **{"bucket_cap_mb": 0.004, **options}
    )


def outcome(model, optimizer, values):
    state = copy.deepcopy(sw.full_optimizer_state_dict(model, optimizer)["state"])
    found = list(sw.full_state_dict(model).values())
    return values, found + [entry[key] for _, entry in sorted(state.items()) for key in sorted(entry)]


def assert_same_training(train, build=Blocks, stages=(PRIVATE, SHARED), cut="blocks", first=0, **options):
    """Check that `train(model, optimizer)` gives the bits of stage `first`."""
    expected = None
    for stage in ({"zero": first}, *stages):
        chosen = {"units": units.CUTS[cut]} if stage == PRIVATE else {}
        model, optimizer = wrap(build, **stage, **chosen, **options)
        found = outcome(model, optimizer, train(model, optimizer))
        expected = expected or found
        assert found[0] == expected[0], (stage, found[0], expected[0])
        assert all(bits_equal(a, b) for a, b in zip(found[1], expected[1], strict=True)), stage
        if stage == PRIVATE and build is not Mixed:
            units.assert_released(model.module)
        gather(None)


class Wide(nn.Module):
    """Blocks that save both weights for the backward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 40, bias=False), nn.Tanh(), nn.Linear(40, 24, bias=False)) for _ in range(6)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class Watch:
    """Return the weights that a forward saves, and the bytes of those whose memory is not released after it."""

    def __init__(self, model):
        self.saved = []
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor):
            self.loss = model(torch.ones(2, 24).requires_grad_()).float().square().mean()

    def pack(self, tensor):
        if sorted(tensor.shape) == [24, 40]:
            self.saved.append(tensor)
        return tensor

    def bytes_held(self, released=lambda tensor: False):
        places = {
            each.data_ptr(): each for each in self.saved if each.untyped_storage().nbytes() and not released(each)
        }
        return sum(each.nbytes for each in places.values())


def bytes_of_fsdp2(world_size):
    """Return (bytes held after the forward, bytes gathered in a step) of FSDP2 with the same policy."""
    from torch.distributed import fsdp

    if not hasattr(getattr(fsdp, "FSDPModule", None), "set_custom_all_gather"):
        return None
    counted = [0]

    class Counting:
        def allocate(self, size, *, dtype, device):
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            counted[0] += output_tensor.nbytes
            return torch.distributed.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

    module, mesh = Wide(), init_device_mesh("cpu", (world_size,))
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for each in (*module.blocks, module):
        fsdp.fully_shard(each, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        each.set_custom_all_gather(Counting())
    watch = Watch(module)
    held = watch.bytes_held()
    watch.loss.backward()
    return held, counted[0]


def bytes_of_ours(**stage):
    model, optimizer = wrap(Wide, **stage)
    model(torch.ones(2, 24)).float().sum().backward()  # learns which unit the backward begins with
    optimizer.zero_grad()
    before = sw.stats()["models"][-1].get("gathered_bytes", 0)
    watch = Watch(model)
    storage = internals.replica(model).parameters()
    narrow = (
        {each.data_ptr() for each in getattr(storage, "_narrow", {}).values()}
        if "share_parameters" not in stage
        else ()
    )
    held = watch.bytes_held(
        lambda tensor: (
            tensor.data_ptr() in narrow
            or any(
                unit.holds(tensor) and storage.schedule.state(unit) == "sharded"
                for unit in (storage.schedule.units if not narrow else ())
            )
        )
    )
    watch.loss.backward()
    optimizer.step()
    return held, sw.stats()["models"][-1].get("gathered_bytes", 0) - before


@on_every_rank(at_least=2)
def test_bytes_saved_and_gathered_are_those_of_fsdp2(rank, world_size):
    numel = sum(p.numel() for p in Wide().parameters())
    unit = numel // 6
    assert bytes_of_ours(**SHARED) == (0, 0)  # the host's one cast
    held, gathered = bytes_of_ours(**PRIVATE)
    assert held == 2 * unit  # the unit that the backward begins with stays whole
    assert gathered == 2 * (2 * numel) - 2 * unit
    theirs = bytes_of_fsdp2(world_size)
    assert theirs is None or (held <= theirs[0] + 2 * unit and gathered <= theirs[1]), (held, gathered, theirs)


def gathered_on_a_gpu(rank, world_size):
    """Return (bytes gathered in a step, bytes of places) without and with a policy. test_units_on_simulated_gpus.py
    runs it.
    """
    found = []
    for precision in (None, "bf16"):
        model, optimizer = wrap(Wide, precision, **PRIVATE)
        for _ in range(3):
            before = sw.stats()["models"][-1]["gathered_bytes"]
            model(torch.ones(2, 24)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((sw.stats()["models"][-1]["gathered_bytes"] - before, sw.describe()["models"][-1]["unit_bytes"]))
    return found


@on_every_rank(at_least=2)
def test_pages_are_of_16_bits(rank, world_size):
    sizes = {}
    make = lambda: nn.Sequential(nn.Linear(2048, 1024, bias=False), nn.Linear(1024, 2048, bias=False))  # noqa: E731
    for precision in (None, "bf16"):
        model, _ = wrap(make, precision, **PRIVATE, units=nn.Linear)
        model(torch.ones(1, 2048)).float().sum().backward()
        sizes[precision] = sw.stats()["models"][-1]["most_unit_bytes"], sw.describe()["models"][-1]["unit_bytes"]
        gather(None)
    assert sizes["bf16"][0] <= 0.6 * sizes[None][0] and sizes["bf16"][1] <= 0.6 * sizes[None][1], sizes


@pytest.mark.parametrize(
    "build", [each for each in units.MODELS if each is not units.Normed]
)  # whose buffers are float32
@on_every_rank()
def test_every_module_has_the_bits_of_stage_0(rank, world_size, build):
    def train(model, optimizer):
        return units.steps(model, optimizer, rank)

    stages = in_turn((PRIVATE, SHARED), units.MODELS.index(build))
    for cut in units.CUTS if LONG else ("blocks",):
        if build is not units.Tied or cut in ("blocks", "whole"):
            assert_same_training(train, build, stages, cut=cut)


def in_inference_mode_between(model, optimizer, rank):
    losses = []
    for step in range(2):
        losses += units.steps(model, optimizer, rank, 1)
        with torch.inference_mode():
            losses.append(model(batch(rank, 6, 7, step=step)).float().sum().item())
    return losses


SHAPES = [
    units.several_forwards,
    units.the_same_graph_twice,
    units.gradients_of_inputs,
    units.accumulating,
    units.broken_off,
    units.penalty_on_gradients,
    in_inference_mode_between,
]


@pytest.mark.parametrize("train", SHAPES)
@on_every_rank()
def test_every_shape_of_a_step(rank, world_size, train):
    stages = in_turn((PRIVATE, SHARED), SHAPES.index(train))
    for cut in ("blocks", "nested") if LONG else ("nested",):
        assert_same_training(lambda model, optimizer: train(model, optimizer, rank), stages=stages, cut=cut)


class Casting(nn.Linear):
    def forward(self, x):
        return super().forward(x.to(self.weight.dtype))


class Mixed(Blocks):
    """A module with parameters of other dtypes, frozen and ignored ones, a buffer, and one that computes in two dtypes."""

    def __init__(self):
        super().__init__()
        self.blocks[0].wide.weight.requires_grad_(False)
        self.wide64 = Casting(WIDTH, WIDTH, dtype=torch.float64)
        self.low = Casting(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.last = Casting(WIDTH, 5)
        self.complex = nn.Parameter(torch.randn(20, dtype=torch.complex64))
        self.twin = Casting(WIDTH, 3 * WIDTH, bias=False)
        self.twin.weight = self.blocks[2].wide.weight
        self.left_alone = nn.Parameter(torch.randn(50))
        self.register_buffer("scale", torch.full((WIDTH,), 1.5))

    def run(self, x):
        x = super().run(x)
        x = self.low(self.wide64(x)).float() * self.scale + self.complex.abs().sum()
        return x + self.twin(x)[..., :WIDTH].float() * self.left_alone[:WIDTH]


POLICIES = {
    "one": "bf16",
    "halves": "fp16",
    "modules": {
        "": "bf16",
        "blocks.0": "fp16",
        "twin": "fp32",
        "blocks.1.norm": sw.Precision(torch.float32, output_dtype=torch.bfloat16),
    },
    "no masters": sw.Precision(torch.bfloat16, master=False),
    "a part": {"blocks.0": sw.Precision(torch.bfloat16, output_dtype=torch.float32)},
}


@pytest.mark.parametrize("policy", POLICIES)
@on_every_rank()
def test_every_kind_of_parameter_and_policy(rank, world_size, policy):
    def train(model, optimizer):
        losses = []
        for step in range(3):
            loss = model(batch(rank, 6, 7, step=step)).float().square().mean()
            loss.backward()
            model.module.left_alone.grad = None
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    stages, options = in_turn((PRIVATE, SHARED), list(POLICIES).index(policy)), {"ignored_params": ["left_alone"]}
    assert_same_training(*(train, Mixed, stages), precision=POLICIES[policy], cut="nested", **options)


@pytest.mark.parametrize("shape", ["2+1", "crosswise"])
@on_every_rank(at_least=3)
def test_over_hosts(rank, world_size, shape):
    def train(model, optimizer):
        return units.steps(model, optimizer, rank)

    with on_hosts(hosts_of(shape, world_size)) as group:
        assert_same_training(train, stages=in_turn((PRIVATE, SHARED), int(shape == "crosswise")), process_group=group)


@on_every_rank(at_least=3)
def test_whole_tensors_are_cast_by_any_rank(rank, world_size):
    found = []
    for stage in ({"zero": 1}, PRIVATE, SHARED):
        torch.manual_seed(0)
        module = Blocks()
        optimizer = torch.optim.Adafactor(module.parameters(), lr=1e-2)
        model, optimizer = sw.wrap(module, optimizer, precision="bf16", partition="tensor", **stage)
        found.append((units.steps(model, optimizer, rank), sw.full_state_dict(model)))
        gather(None)
    assert found[0][0] == found[1][0] == found[2][0]
    for other in found[1:]:
        assert all(bits_equal(value, other[1][name]) for name, value in found[0][1].items())


@on_every_rank()
def test_whole_parameters_are_exact_and_modules_compute_with_what_was_written(rank, world_size):
    x = batch(rank, 6, 7)
    found = {}
    for name, stage in {"0": {"zero": 0}, "private": PRIVATE, "shared": SHARED}.items():
        model, optimizer = wrap(**stage)
        units.steps(model, optimizer, rank, 1)
        seen = [model.module(x), model(x)]
        with sw.full_parameters(model):
            seen += [model(x), model.module(x), *(p.detach().clone() for p in model.parameters())]
            twin = copy.deepcopy(model.module)
        with sw.full_parameters(model, writable=True), torch.no_grad():
            for p in model.parameters():
                p.mul_(1.25)
            seen += [model(x), model.module(x)]
        seen += [model(x), twin(x)]
        sw.load_full_state_dict(model, twin.state_dict())
        seen += [model(x), *units.parameters_of(model)]
        found[name] = [each.detach() for each in seen]
        gather(None)
    for name in ("private", "shared"):
        for number, (ours, theirs) in enumerate(zip(found[name], found["0"], strict=True)):
            assert bits_equal(ours, theirs), (name, number)


@on_every_rank()
def test_a_restored_model_computes_with_what_was_saved(rank, world_size):
    folder, x = pathlib.Path(gather(tempfile.mkdtemp())[0]), batch(rank, 6, 7)
    for name, stage in {"private": PRIVATE, "shared": SHARED}.items():
        model, optimizer = wrap(**stage)
        units.steps(model, optimizer, rank, 2)
        sw.save(folder / name, model, optimizer)
        expected = model(x).detach()
        units.steps(model, optimizer, rank, 1)
        assert not bits_equal(model(x).detach(), expected)
        sw.load(folder / name, model, optimizer)
        assert bits_equal(model(x).detach(), expected), name
        optimizer.zero_grad()
        gather(None)
    if rank == 0:
        shutil.rmtree(folder)


@on_every_rank(at_least=2)
def test_ranks_that_run_out_of_inputs(rank, world_size):
    def train(model, optimizer):
        losses = []
        with model.join():
            for step in range(4 if rank == 0 else 2):
                losses += units.steps(model, optimizer, rank, 1)
        return losses

    assert_same_training(train, first=1)  # at zero=0 ranks that have run out step no more


@on_every_rank(at_least=2)
def test_casts_are_made_while_parameters_may_be_written(rank, world_size):
    model, optimizer = wrap(**SHARED, write_guard="samples")
    units.steps(model, optimizer, rank, 2)
    with sw.full_parameters(model, writable=True), torch.no_grad():
        model.module.first.weight.mul_(2)
    units.steps(model, optimizer, rank, 1)
    gather(None)


class Reads(Blocks):
    """A block that reads a parameter of another unit, which has already run."""

    def forward(self, x):
        x = super().forward(x)
        return x + self.blocks[1].wide.weight.sum()


class Clamped(units.Block):
    def forward(self, x):
        with torch.no_grad():
            self.wide.weight.clamp_(-0.01, 0.01)
        return super().forward(x)


class Writes(Blocks):
    def __init__(self):
        super().__init__()
        self.blocks[1] = Clamped()


@on_every_rank(spoils=True)
def test_misuse_is_named(rank, world_size):
    model, _ = wrap(Reads, **PRIVATE)
    with pytest.raises(engine.Error, match=r"parameter 'blocks\.1\.wide\.weight' is released"):
        model(batch(rank, 6, 7))
    for stage in (PRIVATE, SHARED) if world_size > 1 else (PRIVATE,):
        model, optimizer = wrap(**stage)
        early = loss_of(model, rank, 1)
        units.steps(model, optimizer, rank, 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            early.backward()
        optimizer.zero_grad()
        gather(None)
    model, _ = wrap(Writes, **PRIVATE, units=units.Block)
    with pytest.raises(engine.Error, match=r"'blocks\.1\.wide\.weight' was written to while it was whole"):
        model(batch(rank, 6, 7))


@on_every_rank()
def test_a_wrapper_that_is_dropped_leaves_float32_parameters(rank, world_size):
    for stage in (PRIVATE, SHARED):
        model, optimizer = wrap(**stage)
        units.steps(model, optimizer, rank, 1)
        module, expected = model.module, sw.full_state_dict(model)
        storage = weakref.ref(internals.replica(model).parameters())
        gather(None)
        del model, optimizer
        assert storage() is None
        assert all(bits_equal(value, expected[name]) for name, value in module.state_dict().items())
        assert module(batch(rank, 6, 7)).dtype == torch.float32
        gather(None)


@on_every_rank(at_least=3)
def test_hybrid_sharding_has_the_bits_of_every_rank_slicing(rank, world_size):
    """Rows of one rank and of all ranks: copies of the slices, and one slice."""
    if world_size % 2 and world_size != 3:
        return
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))

    def train(model, optimizer):
        return units.steps(model, optimizer, rank)

    assert_same_training(train, stages=[{**PRIVATE, "device_mesh": mesh}, {**SHARED, "device_mesh": mesh}])


@on_every_rank(exactly=None if LONG else 2)  # every rank compiles, for seconds
def test_compiled_blocks(rank, world_size):
    def train(model, optimizer):
        for block in model.module.blocks:
            block.forward = torch.compile(block.forward, backend="eager")
        return units.steps(model, optimizer, rank)

    with contextlib.ExitStack() as stack:
        stack.callback(torch._dynamo.reset)
        assert_same_training(train, stages=in_turn((PRIVATE, SHARED), 0))
