"""Law: beside tensor parallelism, and with experts in groups of their own, a compressed gradient is the naive compressor's mean over
the ranks that average the parameter. The stage changes no bit of it, and a checkpoint keeps the error."""

import os
from pathlib import Path

import pytest
import torch
from composed_subjects import SUBJECTS, gathered, local, own, part_of, placed_as, whole_of
from harness import LONG, in_turn, on_every_rank, same_everywhere
from oracle.compression import BlockFeedback, block_mean, half_mean
from oracle.fold import bits_equal
from peer import PEER, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
STAGES = (0, 1, 2, 3, "private", "by hand")
CODECS = {
    "fp16": sw.Fp16(),
    "bf16": sw.Bf16(),
    "int8": sw.Int8(),
    "int4": sw.Int4(),
    "powersgd": sw.PowerSGD(rank=2, warmup_steps=1, min_compression_rate=0),
}


class Naive:
    """The compressor's mean of each parameter's gradient over the ranks that average it, from gradients of an unwrapped model."""

    def __init__(self, name, model, world_size):
        self.name, self.places, self.feedback = name, {}, {}
        engines = own(model).replicas
        for engine in engines:
            ranks, reducer = engine.group.world_size, engine.reducer
            for index, each in enumerate(engine.table.names):
                bucket, begin, numel = reducer.place(index)
                width = reducer.bucket_shape(bucket)[1] // ranks
                owners = [(begin + element) // width for element in range(numel)]
                self.places[each] = engine.group.torch_group, ranks / engines[0].group.world_size
                self.feedback[each] = BlockFeedback(numel, ranks, 64, 7, owners)

    def mean(self, each, parameter):
        group, factor = self.places[each]
        theirs = [part * factor for part in gathered(local(placed_as(parameter.grad, parameter)), group)]
        if self.name == "int4":
            found = self.feedback[each].mean(theirs)
        elif self.name == "int8":
            found = block_mean(theirs, 256, 127)
        else:
            found = half_mean(theirs, CODECS[self.name].dtype)
        return whole_of(found, parameter)


@pytest.mark.parametrize("kind", SUBJECTS)
@on_every_rank(exactly=4)
def test_gradients_are_the_naive_compressor_s(rank, world_size, kind):
    subject = SUBJECTS[kind]()
    placed = {"int4": "private", "fp16": 2, "int8": 0, "bf16": 3}  # the stage of each in the quick form
    for name in in_turn([*placed], [*SUBJECTS].index(kind)):
        for stage in STAGES if LONG else (placed[name],):
            model, optimizer = subject.wrapped(stage, compress=CODECS[name])
            sw.full_state_dict(model)  # by hand, there is no engine before
            naive, plain = Naive(name, model, world_size), subject.plain()
            for step in range(2):
                whole = sw.full_state_dict(model)
                with torch.no_grad():
                    for each, parameter in plain.named_parameters():
                        local(parameter).copy_(part_of(whole[each], parameter))
                plain.zero_grad()
                subject.backward(plain, step, rank)
                optimizer.zero_grad()
                subject.backward(model, step, rank)
                found = sw.full_gradients(model)
                for each, parameter in plain.named_parameters():
                    assert bits_equal(found[each], naive.mean(each, parameter)), (name, stage, step, each)
                optimizer.step()


@pytest.mark.parametrize("kind", SUBJECTS)
@on_every_rank(exactly=4)
def test_the_stage_changes_no_bit_and_a_checkpoint_keeps_the_error(rank, world_size, kind):
    subject, folder = SUBJECTS[kind](), Path(os.environ["SW_TEST_FOLDER"]) / f"compressed-{kind}"

    def train(model, optimizer, first, steps):
        for step in range(first, first + steps):
            optimizer.zero_grad()
            subject.backward(model, step, rank)
            optimizer.step()
        return sw.full_state_dict(model)

    few = 3 if LONG else 2  # steps before the checkpoint, and after it
    for name in CODECS if LONG else in_turn(("int4", "powersgd"), 1 + [*SUBJECTS].index(kind)):
        expected = None
        for stage in STAGES if LONG else (0, *in_turn((2, "private"), [*SUBJECTS].index(kind))):
            model, optimizer = subject.wrapped(stage, compress=CODECS[name])
            with sw.Checkpointer(folder / name, model, optimizer) as checkpoints:
                if expected is None:
                    train(model, optimizer, 0, few)
                    checkpoints.save(few - 1)
                    expected = train(model, optimizer, few, few)
                    assert same_everywhere([*expected.values()])
                    continue
                assert checkpoints.restore() == few  # at another stage, the errors too
            found = train(model, optimizer, few, few)
            for each, value in expected.items():
                assert bits_equal(found[each], value), (name, stage, each)

    exact = {}  # of the rank of every matrix: no more is left out than rounding
    for compress in (None, sw.PowerSGD(rank=16, warmup_steps=1, min_compression_rate=0)):
        model, optimizer = subject.wrapped(2, compress=compress)
        for each, value in train(model, optimizer, 0, 3).items():
            assert torch.allclose(value, exact.setdefault(each, value), rtol=0, atol=2e-2 * 3e-2), each
