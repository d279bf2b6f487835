"""Law: a program written for accelerate runs with our Accelerator at every stage. accelerate's own scripts pass at 2
processes. Training has the bits of a plain loop over sw.wrap for any order of preparation. The files of save_state()
depend on no stage."""

import contextlib
import functools
import importlib.util
import io
import itertools
import os
import pickle
import tempfile

import pytest
import torch
from harness import LONG, gather, on_every_rank, same_everywhere
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch, sw
from torch import nn

accelerate = pytest.importorskip("accelerate", reason="an optional extra")
pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

if PEER != "torch":
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType
    from shardwright.integrations.accelerate import Accelerator, CompressionHandler


@contextlib.contextmanager
def launched(rank, world_size):
    """Set the variables of `ACCELERATE_USE_CPU=1 torchrun`."""
    environment = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
    environment |= dict(ACCELERATE_USE_CPU=1, OMP_NUM_THREADS=1, MASTER_ADDR="127.0.0.1")
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update({name: str(value) for name, value in environment.items()})
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def launches(body):
    @functools.wraps(body)
    def launched_body(rank, world_size, **arguments):
        with launched(rank, world_size):
            return body(rank, world_size, **arguments)

    return launched_body


def fresh(zero, **options):
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(zero=zero, **options)


# ---------------------------------------------------------------- accelerate's own scripts


def run_script(rank, world_size, name, zero):
    made = []

    class OfThisStage(Accelerator):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, zero=zero, **kwargs)
            assert self.num_processes == world_size == 2
            made.append(self)

    with launched(rank, world_size), contextlib.redirect_stdout(io.StringIO()):
        script = importlib.import_module(f"accelerate.test_utils.scripts.{name}")
        if hasattr(script, "Accelerator"):
            script.Accelerator = OfThisStage
        if hasattr(script, "RegressionDataset"):  # its data is random: two ranks' gradients may be close
            dataset = script.RegressionDataset
            script.RegressionDataset = lambda *args, **kwargs: dataset(*args, **{"seed": 7, **kwargs})
        if name == "test_sync":
            for options in itertools.product([True, False], repeat=3):  # main() skips them on the CPU
                script.test_gradient_accumulation(*options)
                script.test_gradient_accumulation_with_opt_and_scheduler(*options)
        script.main()
    assert len(made) >= {"test_ops": 0, "test_sync": 19}.get(name, 5), len(made)


SCRIPTS = [(name, zero) for name in ("test_script", "test_ops") for zero in (0, 1, 2, 3)]
SCRIPTS += [
    ("external_deps.test_metrics", zero) for zero in ((0, 1, 2, 3) if LONG else (0, 3))
]  # its imports take seconds
SCRIPTS += [("test_sync", zero) for zero in ((0, 1, 2, 3) if LONG else (0, 3))]


@pytest.mark.parametrize(("name", "zero"), SCRIPTS)
def test_a_script_of_accelerate_passes_at_2_processes(fresh_ranks, name, zero):
    for package in ("datasets", "evaluate", "transformers") if name.endswith("test_metrics") else ():
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{name} imports {package}, which is not installed")
    with fresh_ranks(2) as team:
        team.run(run_script, name=name, zero=zero)


# ---------------------------------------------------------------- training


def build():
    torch.manual_seed(0)
    module = Mlp()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    return module, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def train(accelerator, model, optimizer, scheduler, rank, steps=range(6)):
    """Take steps of two backwards each, with clipping."""
    losses = []
    for step in steps:
        with accelerator.accumulate(model):
            loss = model(batch(rank, 6, 7, step=step)).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.02)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def prepare(accelerator, order):
    """`order`: the order of model, optimizer and scheduler; an upper-case letter is a separate call."""
    objects = dict(zip("mos", build()))
    if order.isupper():
        objects = {key: accelerator.prepare(objects[key]) for key in order.lower()}
    else:
        objects = dict(zip(order, accelerator.prepare(*[objects[key] for key in order])))
    return [objects[key] for key in "mos"]


def parameters_of(model):
    return [p.detach().clone() for p in model.parameters()]


def assert_same(left, right, what=None):
    assert all(bits_equal(a, b) for a, b in zip(left, right, strict=True)), what


@on_every_rank()
@launches
def test_any_order_at_any_stage_is_the_plain_loop(rank, world_size):
    module, optimizer, scheduler = build()
    model, optimizer = sw.wrap(module, optimizer)
    losses = []
    for step in range(0, 6, 2):
        with model.no_sync():
            losses.append(model(batch(rank, 6, 7, step=step)).square().mean())
            (losses[-1] / 2).backward()
        losses.append(model(batch(rank, 6, 7, step=step + 1)).square().mean())
        (losses[-1] / 2).backward()
        sw.clip_grad_norm_(model, 0.02)
        optimizer.step()
        for _ in range(world_size):
            scheduler.step()
        optimizer.zero_grad()
    expected, losses = parameters_of(module), [loss.item() for loss in losses]
    for zero, order in [(0, "mos"), (1, "oms"), (1, "SOM"), (2, "som"), (2, "OMS"), (3, "MSO"), (3, "som")]:
        accelerator = fresh(zero, gradient_accumulation_steps=2)
        model, optimizer, scheduler = prepare(accelerator, order)
        assert train(accelerator, model, optimizer, scheduler, rank) == losses, (zero, order)
        if world_size == 1:  # accelerate then clips by itself, with torch's rounding
            assert all(torch.allclose(a, b) for a, b in zip(parameters_of(model), expected, strict=True))
        else:
            assert isinstance(model, sw.DistributedDataParallel)
            assert_same(parameters_of(model), expected, (zero, order))
        assert type(accelerator.unwrap_model(model)) is Mlp
        state = accelerator.get_state_dict(model)
        assert_same(state.values(), parameters_of(model))
        assert list(state) == list(Mlp().state_dict())
        assert accelerator.prepare(model) is model
        assert len(accelerator._models) == 1
        gather(None)


def files_of(folder):
    """Return weights and optimizer state, by name and entry."""
    from safetensors.torch import load_file

    weights = load_file(f"{folder}/model.safetensors")
    return weights, torch.load(f"{folder}/optimizer.bin", weights_only=True)


@on_every_rank()
@launches
def test_save_state_loads_from_any_stage_at_any_other(rank, world_size):
    found = []
    root = gather(tempfile.mkdtemp() if rank == 0 else None)[0]
    for zero in (0, 1, 2, 3):
        accelerator = fresh(zero)
        objects = prepare(accelerator, "mos")
        losses = train(accelerator, *objects, rank, range(4))
        accelerator.save_state(f"{root}/{zero}")
        losses += train(accelerator, *objects, rank, range(4, 7))
        found.append((losses, parameters_of(objects[0])))
        gather(None)
    for zero, (losses, parameters) in enumerate(found):
        assert losses == found[0][0], zero
        assert_same(parameters, found[0][1], zero)
        weights, optimizer = files_of(f"{root}/{zero}")
        expected_weights, expected = files_of(f"{root}/0")
        assert_same([weights[name] for name in expected_weights], expected_weights.values(), zero)
        assert optimizer["param_groups"] == expected["param_groups"]
        for position, entry in expected["state"].items():
            assert_same([optimizer["state"][position][key] for key in entry], entry.values(), (zero, position))
        other = (zero + 2) % 4
        accelerator = fresh(other)
        objects = prepare(accelerator, "oms")
        accelerator.load_state(f"{root}/{zero}")
        assert train(accelerator, *objects, rank, range(4, 7)) == losses[4:], (zero, other)
        assert_same(parameters_of(objects[0]), parameters, (zero, other))
        gather(None)


@on_every_rank()
@launches
def test_fp16_scales_the_loss_and_skips_where_any_rank_overflowed(rank, world_size):
    found = []
    for zero in (0, 1, 2, 3):
        accelerator = fresh(zero, mixed_precision="fp16")
        assert isinstance(accelerator.scaler, torch.amp.GradScaler)
        model, optimizer, scheduler = prepare(accelerator, "som")
        losses, skipped = [], []
        for step in range(4):
            loss = model(batch(rank, 6, 7, step=step)).square().mean()
            assert loss.dtype == torch.float32
            accelerator.backward(loss * (1e30 if step == 1 and rank == world_size - 1 else 1.0))
            if step == 2:
                accelerator.clip_grad_norm_(model.parameters(), 0.02)
            optimizer.step()
            skipped.append(optimizer.step_was_skipped)
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert skipped == [False, True, False, False]
        found.append((losses, parameters_of(model), accelerator.scaler.get_scale(), scheduler.get_last_lr()))
        gather(None)
    for zero, (losses, parameters, scale, rate) in enumerate(found):
        assert (losses, scale, rate) == (found[0][0], found[0][2], found[0][3]), zero
        assert_same(parameters, found[0][1], zero)


@on_every_rank()
@launches
def test_an_existing_accelerator_becomes_ours(rank, world_size):
    """Covers programs that create their accelerator themselves, like transformers' Trainer."""
    found = []
    for zero in (None, 1, 3):
        stock = accelerate.Accelerator(gradient_accumulation_steps=2) if zero is not None else None
        accelerator = (
            Accelerator.of_stock(stock, zero=zero) if stock is not None else fresh(2, gradient_accumulation_steps=2)
        )
        assert stock is None or accelerator is stock
        model, optimizer, scheduler = prepare(accelerator, "mos")
        losses = train(accelerator, model, optimizer, scheduler, rank)
        bare = accelerator.unwrap_model(model)
        addresses = [p.data_ptr() for p in bare.parameters()]
        assert world_size == 1 or accelerator.prepare_model(bare, evaluation_mode=True) is bare
        assert addresses == [p.data_ptr() for p in bare.parameters()]  # wrapped parameters stay in place
        losses += train(accelerator, model, optimizer, scheduler, rank)
        found.append((losses, parameters_of(model)))
        with pytest.raises(ValueError, match="prepared no model"):
            Accelerator.of_stock(accelerator)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        gather(None)
    for losses, parameters in found[1:]:
        assert losses == found[0][0]
        assert_same(parameters, found[0][1])


@on_every_rank(at_least=2)
@launches
def test_a_bf16_forward_autocasts(rank, world_size):
    found = []
    for zero in (0, 3):
        accelerator = fresh(zero, mixed_precision="bf16")
        seen = []
        module, optimizer, _ = build()
        module[0].register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(output.dtype))
        model, optimizer = accelerator.prepare(module, optimizer)
        accelerator.backward(model(batch(rank, 6, 7)).square().mean())
        optimizer.step()
        assert seen == [torch.bfloat16]
        found.append(parameters_of(model))
        gather(None)
    assert_same(*found)


@on_every_rank(at_least=2)
@launches
def test_join_uneven_inputs_joins(rank, world_size):
    found = []
    for zero in (0, 1, 2, 3):
        accelerator = fresh(zero)
        model, optimizer, _ = prepare(accelerator, "mos")
        loader = accelerator.prepare(torch.utils.data.DataLoader(batch(9, 5, 7), batch_size=1))
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for x in loader:
                accelerator.backward(model(x).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 0.02)
                optimizer.step()
                optimizer.zero_grad()
        assert loader.batch_sampler.even_batches
        found.append(parameters_of(model))
        assert same_everywhere([*found[-1]])
        gather(None)
    for zero, parameters in enumerate(found):
        assert_same(parameters, found[0], zero)


# ---------------------------------------------------------------- compressed gradients


@pytest.mark.parametrize("name", ["Fp16", "Bf16", "Int8", "Int4", "PowerSGD"])
@on_every_rank(at_least=2)
@launches
def test_a_compression_handler_serves_the_stock_class_and_ours(rank, world_size, name):
    compress = getattr(sw, name)()
    gradients = []
    for own in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        handler = CompressionHandler(compress=compress, bucket_cap_mb=12)
        assert handler.to_kwargs() == {"bucket_cap_mb": 12}
        if own:
            accelerator = Accelerator(zero=1, kwargs_handlers=[handler])
        else:
            accelerator = accelerate.Accelerator()
            accelerator.ddp_handler = handler
        assert accelerator.num_processes == world_size
        model, optimizer, _ = prepare(accelerator, "mos")
        assert isinstance(model, sw.DistributedDataParallel) is own
        for step in range(3):
            optimizer.zero_grad()
            accelerator.backward(model(batch(rank, 6, 7, step=step)).square().mean())
        gradients.append([p.grad.clone() for p in model.parameters()])
        if own:
            assert list(accelerator._wrappers) == [model]
            assert model.compression_state is not None or name in ("Fp16", "Bf16")
        assert same_everywhere([*gradients[-1]])
    for stock, ours in zip(*gradients, strict=True):
        assert torch.allclose(stock, ours, rtol=0.05, atol=0.02), name


@on_every_rank(at_least=2)
@launches
def test_a_launch_on_gpus_is_admitted_and_trains_alike(rank, world_size):
    """Launch as accelerate does with GPUs, with the tensors on the CPU."""
    found = []
    for zero, kind in [(0, "MULTI_CPU"), (0, "MULTI_GPU"), (2, "MULTI_GPU"), (3, "MULTI_GPU")]:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType[kind]
        accelerator = Accelerator(zero=zero, gradient_accumulation_steps=2)
        assert accelerator.distributed_type.value == kind
        model, optimizer, scheduler = prepare(accelerator, "mos")
        assert isinstance(model, sw.DistributedDataParallel)
        train(accelerator, model, optimizer, scheduler, rank, range(4))
        with accelerator.join_uneven_inputs([model], even_batches=False):
            pass
        found.append(parameters_of(model))
    for each in found[1:]:
        assert_same(each, found[0])
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
    stock = accelerate.Accelerator.__new__(accelerate.Accelerator)
    stock.state, stock._models, stock._optimizers = AcceleratorState(), [], []
    with pytest.raises(NotImplementedError, match="FSDP is not supported.*on CUDA GPUs"):
        Accelerator.of_stock(stock, zero=1)
    gather(None)


@on_every_rank()
@launches
def test_an_accelerator_is_pickled_with_its_settings_alone(rank, world_size):
    for zero in (0, 3):
        accelerator = fresh(zero, gradient_accumulation_steps=2)
        loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2)
        model, optimizer, scheduler = prepare(accelerator, "mos")
        accelerator.prepare(loader)
        train(accelerator, model, optimizer, scheduler, rank, range(2))
        other = pickle.loads(pickle.dumps(accelerator))
        assert (other.zero, other.gradient_accumulation_steps) == (zero, 2)
        assert other.state.__dict__ == accelerator.state.__dict__
        assert not other._models + other._optimizers + other._schedulers + list(other._wrappers)
        train(accelerator, model, optimizer, scheduler, rank, range(2))
    gather(None)


@on_every_rank(at_least=2)
@launches
def test_an_iterable_loader_that_cannot_be_uneven_is_a_warning(rank, world_size):
    accelerator = fresh(0)
    model = accelerator.prepare(nn.Linear(3, 3))
    accelerator._dataloaders = [torch.utils.data.DataLoader(iter([1]), batch_size=None)]
    with pytest.warns(UserWarning, match="only supported for map-style datasets"):
        with accelerator.join_uneven_inputs([model], even_batches=False):
            pass


# ---------------------------------------------------------------- refusals


@on_every_rank()
@launches
def test_unsupported_options_are_a_sentence(rank, world_size):
    with pytest.raises(ValueError, match="zero must be 0, 1, 2 or 3, got 4"):
        fresh(4)
    with pytest.raises(ValueError, match="compress was given more than once"):
        fresh(0, compress=sw.Int8(), kwargs_handlers=[CompressionHandler(compress=sw.Int8())])
    with pytest.raises(ValueError, match="partition must be"):
        fresh(1, partition="half")
    if world_size > 1:
        accelerator = fresh(1)
        module = nn.Linear(3, 3)
        with pytest.raises(ValueError, match="partition="):
            accelerator.prepare(module, Stranger(module.parameters(), lr=0.1))
        accelerator = fresh(1)
        frozen = nn.Linear(3, 3).requires_grad_(False)
        assert accelerator.prepare(frozen) is frozen
        with pytest.raises(TypeError, match="unknown option 'bucket_cap'"):
            fresh(1, wrap_options=dict(bucket_cap=3)).prepare(nn.Linear(3, 3))
    gather(None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="accelerate takes the GPU")
@on_every_rank(at_least=2)
@launches
def test_ranks_that_accelerate_would_train_apart_are_refused(rank, world_size):
    """Run as under torchrun on a machine without GPUs and without an explicit CPU setting."""
    del os.environ["ACCELERATE_USE_CPU"]
    with pytest.raises(NotImplementedError, match=f"{world_size} ranks were launched .* ACCELERATE_USE_CPU=1"):
        fresh(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    stock = accelerate.Accelerator()
    assert stock.num_processes == 1
    with pytest.raises(NotImplementedError, match="would train each by itself"):
        Accelerator.of_stock(stock, zero=1)
    assert type(stock) is accelerate.Accelerator
    os.environ["WORLD_SIZE"] = "1"
    assert fresh(1).num_processes == 1
    gather(None)


class Stranger(torch.optim.SGD):
    """An optimizer of an unknown class."""
