"""Law: settings of accelerate's own FSDP and DeepSpeed plugins, by launch or by plugin, become stages of ours with one line
in the log, and training has the bits of that stage. What does not exist here is one sentence."""

import contextlib
import logging
import os

import pytest
import torch
from harness import gather, on_every_rank
from oracle.fold import bits_equal
from peer import PEER, batch, sw
from torch import nn

accelerate = pytest.importorskip("accelerate", reason="an optional extra")
pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

if PEER != "torch":
    from shardwright.integrations import plugins
    from shardwright.integrations.accelerate import Accelerator
    from test_accelerate_trains_with_ours import AcceleratorState, GradientState, launched


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.wide(x))


def net():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 3))


@contextlib.contextmanager
def variables(given):
    before = dict(os.environ)
    os.environ.update(given)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


def trained(rank, clips=None, **arguments):
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    lines = Lines()
    logging.getLogger("shardwright").addHandler(lines)
    try:
        accelerator = Accelerator(**arguments)
        model = net()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        for step in range(3):
            accelerator.backward(model(batch(rank, 6, 8, step=step)).square().mean() * 50)
            if clips is not None:
                accelerator.clip_grad_norm_(model.parameters(), clips)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        logging.getLogger("shardwright").removeHandler(lines)
    state = sw.full_state_dict(model)
    return accelerator, state, [each for each in lines.said if "taken over" in each]


def same(a, b):
    return a.keys() == b.keys() and all(bits_equal(value, b[name]) for name, value in a.items())


@on_every_rank(exactly=3)
def test_by_launch(rank, world_size):
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT", "FSDP_VERSION": "1"}
    units = {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block"}
    deepspeed = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none"}
    cases = [
        ({**fsdp, "FSDP_SHARDING_STRATEGY": "FULL_SHARD", **units}, 3, None),
        ({**fsdp, "FSDP_SHARDING_STRATEGY": "2", "FSDP_ACTIVATION_CHECKPOINTING": "true"}, 2, None),
        ({**fsdp, "FSDP_SHARDING_STRATEGY": "NO_SHARD"}, 0, None),
        ({**fsdp, "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_OFFLOAD_PARAMS": "true"}, 3, None),
        ({**fsdp, "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}, 2, None),
        ({**deepspeed, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}, 2, None),
        ({**deepspeed, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1", "ACCELERATE_GRADIENT_CLIPPING": "0.5"}, 1, 0.5),
    ]
    with launched(rank, world_size):
        expected = {clips: trained(rank, clips, zero=0)[1] for clips in (None, 0.5)}
        for given, zero, clips in cases:
            with variables(given):
                accelerator, state, said = trained(rank)
            assert accelerator.zero == zero, given
            assert len(said) == (rank == 0) and all(f"zero={zero}" in each for each in said), said
            assert same(state, expected[clips]), given
    gather(None)


@on_every_rank(exactly=3)
def test_by_plugin(rank, world_size):
    from accelerate.utils import FullyShardedDataParallelPlugin

    with launched(rank, world_size):
        expected = trained(rank, zero=0)[1]
        for plugin, zero in (
            (FullyShardedDataParallelPlugin(sharding_strategy="SHARD_GRAD_OP"), 2),
            (FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True), 3),
        ):
            accelerator, state, said = trained(rank, fsdp_plugin=plugin)
            assert accelerator.wrap_options == {}
            assert accelerator.zero == zero and len(said) == (rank == 0)
            assert same(state, expected)
        with variables({"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_DEEPSPEED": "true"}):
            with pytest.raises(ValueError, match="both given"):
                trained(rank)
        with variables({"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}):
            assert [trained(rank)[0].zero for _ in range(2)] == [2, 2]  # a second Accelerator of one process too
        with variables({"ACCELERATE_USE_FSDP": "true"}):  # a stage that the program gives wins
            accelerator, state, said = trained(rank, zero=1)
            assert accelerator.zero == 1 and said == [] and same(state, expected)
        run = {
            "SHARDWRIGHT_OPTIONS": "zero=1,partition=flat"
        }  # and one that `shardwright run` was given, with all that it was given
        with variables({"ACCELERATE_USE_FSDP": "true", **run}):
            accelerator, state, said = trained(rank)
            assert (accelerator.zero, accelerator.partition) == (1, "flat") and said == [] and same(state, expected)
        run = {"SHARDWRIGHT_OPTIONS": "partition=flat,bucket_cap_mb=1,compress=fp16"}  # without a stage: the launch's
        with variables({"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP", **run}):
            accelerator = trained(rank)[0]
            assert (accelerator.zero, accelerator.partition) == (2, "flat")
            assert accelerator.wrap_options == {"bucket_cap_mb": 1} and accelerator.compress is not None
    gather(None)


def test_what_is_refused_or_has_no_effect():
    for given, sentence in (
        ({"ignored_modules": "head"}, "ignored_params"),
        ({"sharding_strategy": "SHARD_ALL"}, "must be one of FULL_SHARD, .*got 'SHARD_ALL'"),
        ({"shard_strategy": "FULL_SHARD"}, "unknown FSDP setting 'shard_strategy'.*sharding_strategy"),
        ({"auto_wrap_policy": "BY_NAME"}, "auto_wrap_policy must be"),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=sentence):
            plugins.of_fsdp(given)
    with variables({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}):
        with pytest.raises(NotImplementedError, match="HYBRID_SHARD over 2 hosts: pass wrap_options"):
            plugins.of_fsdp({"sharding_strategy": "HYBRID_SHARD"})
    made = plugins.of_fsdp({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_to_wrap": "Layer,Block"})
    with pytest.raises(ValueError, match="names the class 'Layer', and Sequential has no module of it"):
        made.options_for(net())
    made = plugins.of_fsdp({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": "1048576"})
    assert made.options_for(net()) == {"units": 4.0}
    made = plugins.of_fsdp({"offload_params": "true", "forward_prefetch": "true", "version": "2"})
    assert made.wrap_options == {"offload": "cpu"} and [row[0] for row in made.rows][-1] == "forward_prefetch"
    made = plugins.of_deepspeed({"bf16": {"enabled": True}, "gradient_accumulation_steps": 4})
    assert made.mixed_precision == "bf16" and made.accumulation_steps == 4 and "accumulation_steps=4" in made.sentence()
    with pytest.raises(NotImplementedError, match="the optimizer section"):
        plugins.of_deepspeed({"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1}})
    with pytest.raises(ValueError, match="distributed_type is 'MULTI_GPU'"):
        plugins.of_file({"distributed_type": "MULTI_GPU"}, "default_config.yaml")
