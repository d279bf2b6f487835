"""Law: stages of a pipeline, wrapped at any stage of ZeRO, train as the whole model does in one process, under every schedule, with
one round a step; the norm of all stages is one number on all ranks; tensor parallelism composes with it."""

import contextlib
import io
import os
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from harness import LONG, gather, on_every_rank
from oracle.fold import bits_equal
from peer import PEER, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

WIDTH, MICRO_BATCHES, STEPS, MAX_NORM = 8, 4, 5 if LONG else 3, 0.05
ZERO_BUBBLE, INTERLEAVED, ONE = "ScheduleInterleavedZeroBubble", "ScheduleInterleaved1F1B", "Schedule1F1B"
#: stages 0 and 3 are of one rank
IN_V = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
STAGES = (0, 1, 2, 3, "private", "whole", "by hand")
#: schedule, sizes of (pp, dp, tp), stages of ZeRO
CASES = (
    [(name, (2, 2, 1), STAGES) for name in (ZERO_BUBBLE, INTERLEAVED, ONE, "ScheduleGPipe", *IN_V)]
    + [(ONE, (2, 1, 2), STAGES)]
    if LONG
    else [
        (ZERO_BUBBLE, (2, 2, 1), (1, "private")),
        (ONE, (2, 2, 1), ("whole", "by hand")),
        (ONE, (2, 1, 2), (0, 2, 3)),
    ]
)


def block(index):
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


def data(step, place):
    generator = torch.Generator().manual_seed(100 * step + place)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def optimizer_of(module):
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def oracle(count, data_ranks):
    model, norms = nn.Sequential(*map(block, range(count))), []
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for place in range(data_ranks):
            x, y = data(step, place)
            for inputs, targets in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES)):
                (nn.functional.mse_loss(model(inputs), targets) / MICRO_BATCHES / data_ranks).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    return model.state_dict(), norms


def wrapped(index, stage, mesh, is_sharded):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    module = block(index)
    if is_sharded:
        parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if stage == "by hand":
        sw.fully_shard(module, mesh=mesh["dp"])
        return module, sw.shard_optimizer(module, optimizer_of(module))
    options = {"zero": 3, "share_parameters": False} if stage in ("private", "whole") else {"zero": stage}
    return sw.wrap(module, optimizer_of(module), device_mesh=mesh["dp"], **options)


def train(mesh, name, stage):
    """Return parameters by their names in the whole model, norms, and rounds."""
    from torch.distributed.pipelining import schedules

    kind = getattr(schedules, name)
    several = issubclass(kind, schedules.PipelineScheduleMulti)
    place = mesh.get_local_rank("pp")
    own = [place, (3 - place) if name in IN_V else (place + 2)] if several else [place]
    count = 4 if several else 2
    pairs = [wrapped(index, stage, mesh, mesh["tp"].size() > 1) for index in own]
    group = mesh["pp"].get_group()
    stages = [
        sw.PipelineStage(module, index, count, torch.device("cpu"), group=group, keep_whole=stage == "whole")
        for index, (module, _) in zip(own, pairs)
    ]
    schedule = kind(stages if several else stages[0], n_microbatches=MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    norms = []
    for step in range(STEPS):
        x, y = data(step, mesh.get_local_rank("dp"))
        for _, optimizer in pairs:
            optimizer.zero_grad()
        schedule.step(*([x] if 0 in own else []), **({"target": y} if count - 1 in own else {}))
        norms.append(sw.clip_grad_norm_([module for module, _ in pairs], MAX_NORM, pp_mesh=mesh["pp"]).item())
        for _, optimizer in pairs:
            optimizer.step()
    rounds = [each["rounds"] for each in sw.stats()["models"]][-len(own) :]
    found = {}
    for index, (module, _) in zip(own, pairs):
        found |= {f"{index}.{key}": value for key, value in sw.full_state_dict(module).items()}
    return found, norms, rounds


@pytest.mark.parametrize("case", range(len(CASES)))
@on_every_rank(exactly=4)
def test_a_pipeline_trains_as_one_process(rank, world_size, case):
    from torch.distributed.device_mesh import init_device_mesh

    name, sizes, stages = CASES[case]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))
    expected, expected_norms = oracle(2 if name in (ONE, "ScheduleGPipe") else 4, sizes[1])
    first = None
    for stage in stages:
        found, norms, rounds = train(mesh, name, stage)
        assert rounds == [STEPS] * len(rounds), (stage, rounds)
        assert norms == pytest.approx(expected_norms, rel=1e-5) and gather(norms) == [norms] * world_size, stage
        first = first or (found, norms)
        assert norms == first[1], stage
        for key, value in found.items():
            assert bits_equal(value, first[0][key]), (stage, key)
            assert torch.allclose(value, expected[key], rtol=0, atol=1e-6), (stage, key)


def pipeline(mesh, own, count, stage):
    """(stages of this rank, their optimizers), with the names of the whole model."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    stages, optimizers = [], []
    for index in own:
        module = nn.Sequential(OrderedDict([(str(index), block(index))]))
        if mesh["tp"].size() > 1:
            parallelize_module(module, mesh["tp"], {"*.0": ColwiseParallel(), "*.2": RowwiseParallel()})
        options = {"zero": 3, "share_parameters": False} if stage == "private" else {"zero": stage}
        module, optimizer = sw.wrap(module, optimizer_of(module), device_mesh=mesh["dp"], **options)
        stages.append(sw.PipelineStage(module, index, count, torch.device("cpu"), group=mesh["pp"].get_group()))
        optimizers.append(optimizer)
    return stages, optimizers


def whole(count, stage):
    module = nn.Sequential(*map(block, range(count)))
    return sw.wrap(module, optimizer_of(module), zero=stage)


def bytes_of(folder):
    return {
        each.name: each.read_bytes() for each in folder.iterdir() if each.is_file() and each.name != "MANIFEST.json"
    }


@on_every_rank(exactly=4)
def test_one_checkpoint_holds_all_stages_and_loads_over_any_number_of_them(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh

    folder = Path(os.environ["SW_TEST_FOLDER"])
    names = ("pp", "dp", "tp")
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=names)
    place = mesh.get_local_rank("pp")
    stages, optimizers = pipeline(mesh, [place, place + 2], 4, 2)
    for stage, optimizer in zip(stages, optimizers):
        stage.submod(torch.randn(3, WIDTH)).square().mean().backward()
        optimizer.step()
    sw.save(folder / "two", stages, optimizers, step=7, extra={"epoch": 3})
    kept = bytes_of(folder / "two")
    assert {"model.safetensors", "optimizer.json"} <= kept.keys()

    if rank == 0:
        from shardwright_tools.cli import main as command

        with contextlib.redirect_stdout(io.StringIO()) as shown:
            assert command(["ckpt", "inspect", "--tensors", str(folder / "two")]) == 0
        assert all(name in shown.getvalue() for name in nn.Sequential(*map(block, range(4))).state_dict())
    model, optimizer = whole(4, 1)  # pp 2 -> 1
    assert sw.load(folder / "two", model, optimizer) == {"epoch": 3}
    found = sw.full_state_dict(model)
    for stage in stages:
        for key, value in sw.full_state_dict(stage.submod).items():
            assert bits_equal(value, found[key]), key
    assert sw.full_optimizer_state_dict(model, optimizer)["state"][0]["step"].item() == 1
    sw.save(folder / "one", model, optimizer, step=7, extra={"epoch": 3})
    assert bytes_of(folder / "one") == kept

    cases = [((4, 1, 1), 0), ((2, 1, 2), "private")] + ([((2, 2, 1), 3), ((2, 1, 2), 1)] if LONG else [])
    for sizes, stage in cases:  # 1 -> 4, and 1 -> 2 with tensor parallelism
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        count, place = 4 // sizes[0], mesh.get_local_rank("pp")
        own = range(count * place, count * (place + 1))
        stages, optimizers = pipeline(mesh, own, 4, stage)
        assert sw.load(folder / "one", stages, optimizers) == {"epoch": 3}
        path = folder / f"{sizes}-{stage}"
        sw.save(path, stages, optimizers, step=7, extra={"epoch": 3})
        assert bytes_of(path) == kept, sizes

    with pytest.raises(sw.CheckpointError, match="exists already|is there already|already"):
        sw.save(folder / "one", stages, optimizers)
    with pytest.raises(ValueError, match="each stage needs its optimizer"):
        sw.save(folder / "x", stages, optimizers[:-1] or [None, None])
    with pytest.raises(sw.CheckpointError, match="which no stage of the pipeline has"):
        sw.load(folder / "one", stages[:1] if place == 0 else stages, optimizers[:1] if place == 0 else optimizers)


@on_every_rank(exactly=4)
def test_a_checkpointer_saves_all_stages_behind_training(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh

    folder = Path(os.environ["SW_TEST_FOLDER"]) / "checkpointer"
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "dp", "tp"))
    place = mesh.get_local_rank("pp")

    def step(stages, optimizers):
        for stage, optimizer in zip(stages, optimizers):
            optimizer.zero_grad()
            stage.submod(torch.randn(3, WIDTH)).square().mean().backward()
            optimizer.step()

    def values(stages, optimizers):
        pairs = [(s.submod, o) for s, o in zip(stages, optimizers)]
        tensors = [each for module, _ in pairs for each in sw.full_state_dict(module).values()]
        states = [sw.full_optimizer_state_dict(module, o)["state"] for module, o in pairs]
        return tensors + [each[key] for state in states for each in state.values() for key in sorted(each)]

    own, expected, notes = [place, place + 2], {}, {"epoch": 0}
    held = pipeline(mesh, own, 4, 2)
    with sw.Checkpointer(folder, *held, user_state=notes) as checkpoints:
        for number in range(4):
            step(*held)
            notes["epoch"] = number
            checkpoints.save(number)
            expected[number + 1] = values(*held), torch.get_rng_state()
    if rank == 0:  # the newest is damaged
        name = next(folder.glob("step-*4/model*"))
        name.write_bytes(name.read_bytes()[:-1] + b"?")
    gather(None)
    for stage in (0, "private"):
        held, notes = pipeline(mesh, own, 4, stage), {}
        with sw.Checkpointer(folder, *held, user_state=notes) as checkpoints:
            torch.manual_seed(99)
            assert checkpoints.restore() == 3 and notes == {"epoch": 2}
            assert all(map(bits_equal, values(*held), expected[3][0]))
            assert torch.equal(torch.get_rng_state(), expected[3][1])
            with pytest.raises(ValueError, match="include is not supported for stages"):
                checkpoints.restore(include="x")
            if stage == "private":
                assert checkpoints.restore(2) == 2  # later steps are abandoned
                assert all(map(bits_equal, values(*held), expected[2][0]))
    model, optimizer = whole(4, 3)  # the folder is that of the whole model
    with sw.Checkpointer(folder, model, optimizer) as checkpoints:
        assert checkpoints.restore() == 2
        found = sw.full_state_dict(model)
        for stage in held[0]:
            for key, value in sw.full_state_dict(stage.submod).items():
                assert bits_equal(value, found[key]), key
        checkpoints.save(8)
    with sw.Checkpointer(folder, *held) as checkpoints:
        assert checkpoints.restore() == 9

    def refused(text, **options):
        with pytest.raises(ValueError, match=text) as caught:
            sw.Checkpointer(folder, *held, **options)
        assert len(set(gather(str(caught.value).split("ValueError: ")[-1].split(": ", 1)[-1]))) == 1

    refused("snapshot='lazy' is not supported for stages", snapshot="lazy")
    refused("memory_every=2 is not supported for stages", memory_every=2)


class Counted(torch.optim.SGD):
    """An optimizer with a number of Python's in the state of each parameter."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1


class Further(torch.optim.SGD):
    """An optimizer with state of its own beside that of parameters."""

    told = 0

    def state_dict(self):
        return {**super().state_dict(), "told": self.told}


@on_every_rank(exactly=4)
def test_what_one_checkpoint_of_stages_cannot_hold_is_refused_on_all_ranks(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh

    folder = Path(os.environ["SW_TEST_FOLDER"])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    index = mesh.get_local_rank("pp")

    def stage_of(name, optimizer, *, zero=2, buffer=None, more=False):
        module = nn.Sequential(OrderedDict([(name, block(index))]))
        if more:
            module.register_parameter("more", nn.Parameter(torch.zeros(2)))
        if buffer is not None:
            module.register_buffer("shared", torch.full((2,), float(buffer)))
        options = {"zero": zero, "partition": "flat"} if zero else {}
        module, optimizer = sw.wrap(module, optimizer(module.parameters(), lr=0.1), device_mesh=mesh["dp"], **options)
        return sw.PipelineStage(module, index, 2, torch.device("cpu"), group=mesh["pp"].get_group()), optimizer

    def refused(pattern, call):
        with pytest.raises(sw.CheckpointError, match=pattern) as caught:
            call()
        assert len({*gather(str(caught.value))}) == 1

    stage, optimizer = stage_of(str(index), Counted, buffer=1)  # a buffer of equal bits may be in all stages
    stage.submod(torch.randn(3, WIDTH)).square().mean().backward()
    optimizer.step()
    sw.save(folder / "counted", stage, optimizer)
    module = nn.Sequential(*map(block, range(2)))
    module.register_buffer("shared", torch.zeros(2))
    module, optimizer = sw.wrap(module, Counted(module.parameters(), lr=0.1), zero=1, partition="flat")
    sw.load(folder / "counted", module, optimizer)
    found = sw.full_optimizer_state_dict(module, optimizer)["state"]
    assert [found[number]["count"] for number in range(8)] == [1] * 8

    stage, optimizer = stage_of(str(index), Counted, buffer=index)
    refused("'shared' is in stage 0 and in stage 1", lambda: sw.save(folder / "x", stage, optimizer))
    stage, optimizer = stage_of("0", Counted)
    refused("'0.0.weight' is in stage 0 and in stage 1", lambda: sw.save(folder / "x", stage, optimizer))
    stage, optimizer = stage_of(str(index), Further, zero=0)
    optimizer.told = index
    refused("the optimizer of stage 1 has other state beside", lambda: sw.save(folder / "x", stage, optimizer))
    stage, optimizer = stage_of(str(index), Counted)
    if rank == 1:
        stage.submod.register_buffer("odd", torch.eye(2).to_sparse())
    refused("rank 1: .*odd", lambda: sw.load(folder / "counted", stage, optimizer))
    refused("odd", lambda: sw.save(folder / "x", stage, optimizer))
    assert not (folder / "x").exists()

    for verify in (True, False):  # what does not fit one stage changes none
        stage, optimizer = stage_of(str(index), Counted, buffer=5, more=index == 1)
        before = sw.full_state_dict(stage.submod)
        refused("lacks 'more'", lambda: sw.load(folder / "counted", stage, optimizer, verify=verify))
        assert all(bits_equal(value, before[key]) for key, value in sw.full_state_dict(stage.submod).items())


@on_every_rank(exactly=2)
def test_a_module_that_is_not_wrapped_is_refused(rank, world_size):
    with pytest.raises(sw.Error, match=r"needs a wrapped module, .*got Sequential"):
        sw.PipelineStage(block(0), rank, 2, torch.device("cpu"))
    with pytest.raises(TypeError, match="pipeline stages must be wrapped modules"):
        sw.clip_grad_norm_([block(0), block(1)], 1.0)
    module = sw.wrap(block(0))
    stage = sw.PipelineStage(module, 0, 4, torch.device("cpu"))
    with pytest.raises(sw.Error, match="needs a wrapped module, .*got PipelineStage"):
        sw.PipelineStage(stage, 0, 4, torch.device("cpu"))
    with pytest.raises(
        ValueError, match="this Sequential is stage 0 already, got stage_index=2: wrap a module of its own"
    ):
        sw.PipelineStage(module, 2, 4, torch.device("cpu"))
    again = sw.PipelineStage(module, 0, 4, torch.device("cpu"))  # the same place, for another schedule
    del stage, again
    sw.PipelineStage(module, 2, 4, torch.device("cpu"))  # the earlier stages have ended
