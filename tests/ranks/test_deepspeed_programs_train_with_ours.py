"""Law: a program written for DeepSpeed trains with the bits of a plain loop over sw.wrap, at every stage. It counts
micro-batches, skips steps that overflow, saves and resumes at another stage, and writes to gathered parameters."""

import argparse
import logging
import math
import os
import tempfile

import pytest
import torch
from harness import gather, on_every_rank
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

SCHEDULE = {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 3}


def configuration(stage, **others):
    return {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.02,
        "zero_optimization": {"stage": stage, "overlap_comm": True, "reduce_bucket_size": 128},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": SCHEDULE},
        **others,
    }


def begin(stage, **others):
    torch.manual_seed(0)
    return sw.deepspeed.initialize(model=Mlp(), config=configuration(stage, **others))


def train(engine, rank, steps=range(8)):
    losses = []
    for step in steps:
        loss = engine(batch(rank, 6, 7, step=step)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def values(model):
    with sw.full_parameters(list(model.parameters())):
        return [p.detach().clone() for p in model.parameters()]


def assert_same(left, right, what):
    assert all(bits_equal(a, b) for a, b in zip(left, right, strict=True)), what


def plain(rank):
    """Return losses, norms and parameters of the loop without an engine."""
    torch.manual_seed(0)
    module = Mlp()
    model, optimizer = sw.wrap(module, sw.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1))
    scheduler = sw.deepspeed.WarmupLR(optimizer, **SCHEDULE)
    losses, norms = [], []
    for step in range(0, 8, 2):
        with model.no_sync():
            losses.append(model(batch(rank, 6, 7, step=step)).square().mean())
            (losses[-1] / 2).backward()
        losses.append(model(batch(rank, 6, 7, step=step + 1)).square().mean())
        (losses[-1] / 2).backward()
        norms.append(float(sw.clip_grad_norm_(model, 0.02)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses], norms[-1], [p.detach().clone() for p in module.parameters()]


def assert_rank_0_decides_and_its_errors_are_everybodys(rank, engine, root):
    told = engine.micro_steps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            os.path, "isfile", lambda path: False if rank and path.endswith("latest") else os.path.exists(path)
        )
        assert (
            engine.load_checkpoint(root)[0] == f"{root}/of 3" and engine.micro_steps != told
        )  # only rank 0 sees `latest`
    for path, call in (("latest.new", engine.save_checkpoint), ("weights.bin", engine.save_16bit_model)):
        folder = f"{root}/{path} of ranks"
        if rank == 0:
            os.makedirs(f"{folder}/{path}")  # a folder where rank 0 wants to write a file
        with pytest.raises((OSError, RuntimeError, sw.Error), match="[Dd]irectory"):
            call(folder, *(["weights.bin"] if path == "weights.bin" else []))


@on_every_rank()
def test_an_engine_is_the_plain_loop_at_every_stage_and_resumes_at_any_other(rank, world_size):
    losses, norm, expected = plain(rank)
    root = gather(tempfile.mkdtemp() if rank == 0 else None)[0]
    for stage in (0, 1, 2, 3):
        engine, optimizer, loader, scheduler = begin(stage)
        assert engine.train_batch_size() == 12 * world_size and loader is None and engine.optimizer is optimizer
        assert (engine.zero_optimization_stage(), engine.gradient_accumulation_steps()) == (stage, 2)
        assert not engine.is_gradient_accumulation_boundary() and engine.get_global_grad_norm() is None
        assert train(engine, rank, range(4)) == losses[:4], stage
        engine.save_checkpoint(root, tag=f"of {stage}", client_state={"epoch": stage})
        assert train(engine, rank, range(4, 8)) == losses[4:], stage
        assert engine.get_global_grad_norm() == norm and engine.global_steps == 4
        assert_same(values(engine.module), expected, stage)
        assert engine.get_lr() == scheduler.get_last_lr() == pytest.approx([0.01]), stage
        assert [*engine.state_dict()][0] == "module.0.weight"
        other, *_ = begin((stage + 2) % 4)
        assert other.load_checkpoint(root)[1] == {"epoch": stage}  # the one in latest
        assert (other.micro_steps, other.global_samples) == (4, 24 * world_size)
        assert train(other, rank, range(4, 8)) == losses[4:], stage
        assert_same(values(other.module), expected, stage)
        engine.save_16bit_model(root, "weights.bin")
        assert_same(torch.load(f"{root}/weights.bin").values(), expected, stage)
        engine.destroy()
        assert_same([p.detach() for p in engine.module.parameters()], expected, stage)
    assert other.load_checkpoint(f"{root}/nowhere") == (None, {})
    assert_rank_0_decides_and_its_errors_are_everybodys(rank, other, root)


@on_every_rank()
def test_parameters_are_gathered_and_written_by_one_rank(rank, world_size):
    deepspeed = sw.deepspeed
    for stage, kind in ((0, {}), (2, {}), (3, {}), (3, {"shardwright": {"share_parameters": False}})):
        with deepspeed.zero.Init(config_dict_or_path={}):
            engine, *_ = begin(stage, **kind)
        first, last = engine.module[0].weight, engine.module[4].bias
        free = torch.nn.Parameter(torch.ones(3))
        with deepspeed.zero.GatheredParameters([first, last, free], modifier_rank=world_size - 1):
            if rank == world_size - 1:
                with torch.no_grad():
                    first.fill_(3.0)
                    last.copy_(torch.arange(5.0))
        with deepspeed.zero.GatheredParameters(first):
            assert first.shape == (33, 7) and bool((first == 3.0).all())
        with sw.full_parameters([last]):
            assert torch.equal(last, torch.arange(5.0))
        before = train(engine, rank, range(2))  # the write was told: no guard raises
        assert all(map(math.isfinite, before))
    with pytest.raises(sw.Error, match="got 1 of no wrapped module"), sw.full_parameters([free]):
        pass
    with deepspeed.zero.GatheredParameters(free, modifier_rank=0), torch.no_grad():
        free.zero_()


@on_every_rank()
def test_overflows_skip_steps_and_boundaries_may_be_set(rank, world_size):
    for stage in (0, 2):
        scaling = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 100}
        engine, optimizer, *_ = begin(stage, fp16=scaling, gradient_accumulation_steps=1)
        start = values(engine.module)
        loss = engine(batch(rank, 6, 7)).float().square().mean()
        engine.backward(loss * (math.inf if rank == world_size - 1 else 1.0))
        engine.step()
        assert (engine.skipped_steps, engine.global_steps, engine.cur_scale) == (1, 1, 128.0)
        assert_same(values(engine.module), start, stage)
        assert not engine.was_step_applied() and optimizer.param_groups[0]["lr"] == 0.001
        train(engine, rank, range(2))
        assert (engine.skipped_steps, engine.global_steps) == (1, 3) and engine.was_step_applied()
        assert not bits_equal(values(engine.module)[0], start[0]) and engine.fp16_enabled()
        assert 0 < engine.get_global_grad_norm() < 100  # without the scale
    engine, *_ = begin(2)
    for micro, is_last in enumerate((False, False, True)):
        engine.set_gradient_accumulation_boundary(is_last)
        train(engine, rank, [micro])
    assert (engine.global_steps, engine.micro_steps) == (1, 3)
    with engine.no_sync(), pytest.raises(sw.Error, match="inside engine.no_sync"):
        engine.step()


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(4))


@on_every_rank()
def test_arguments_of_initialize(rank, world_size):
    parser = sw.deepspeed.add_config_arguments(argparse.ArgumentParser())
    sw.deepspeed.init_distributed(dist_backend="nccl")
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", os.devnull])
    with pytest.raises(ValueError, match="is not JSON"):
        sw.deepspeed.initialize(args, model=Mlp())
    config = configuration(1, dataloader_drop_last=True, torch_autocast={"enabled": True})
    model, data = Mlp(), torch.utils.data.TensorDataset(batch(0, 80, 7))
    engine, optimizer, loader, scheduler = sw.deepspeed.initialize(
        model=model,
        config=config,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5),
        training_data=data,
    )
    assert len(loader) == 80 // world_size // 6 and engine.get_lr() == [0.25]
    (rows,) = next(iter(loader))
    assert engine(rows).dtype == torch.bfloat16 and rows.shape == (6, 7)
    engine.eval()
    assert not engine.module.training and not engine.wrapped.training
    counted = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3])
    engine.lr_scheduler, told = counted, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("shardwright"), "warning", lambda text, *words: told.append(text % words))
        kept = [engine._plain_scheduler_state() for _ in range(2)]
    assert "milestones" not in kept[0] and "last_epoch" in kept[1]
    assert told == [] if rank else len(told) == 1 and "leaves out 'milestones' of the MultiStepLR" in told[0]
    stream = Stream()
    if world_size > 1:
        with pytest.raises(ValueError, match="training_data is an IterableDataset, which cannot be divided"):
            sw.deepspeed.initialize(model=Mlp(), config=config, training_data=stream)
    with pytest.raises(NotImplementedError, match="mpu does not exist here"):
        sw.deepspeed.initialize(model=model, config=config, mpu=object())
