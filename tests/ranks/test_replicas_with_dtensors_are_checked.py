"""Law of check_every beside tensor parallelism, and with experts in groups of their own: a fault on one rank, in one
shard, is an error with one sentence on all ranks of the model.
"""

import os
import tempfile

import pytest
import torch
from composed_subjects import SUBJECTS, local
from harness import LONG, gather, on_every_rank
from peer import PEER, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
SHARDED = {"experts": "layers.0.experts.up", "tensors": "blocks.0.up.weight"}
BAD = 3


def told_everywhere(call, *words):
    """Return the sentence that all ranks raise."""
    said = ""
    try:
        call()
    except sw.Error as error:
        said = str(error)
    said = gather(said)
    assert all(word in each for each in said for word in words), said
    return said


def step(subject, model, optimizer, number, rank):
    optimizer.zero_grad()
    subject.backward(model, number, rank)
    optimizer.step()


def flip_a_bit(tensor):
    tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 3)


def spoil_first(parameter, is_bad):
    """Make a rank produce a gradient that is not finite, before any other hook sees it."""

    def spoil(gradient):
        if is_bad:
            local(gradient).view(-1)[:1] = float("nan")

    handle = parameter.register_hook(spoil)
    hooks = parameter._backward_hooks
    *others, own = list(hooks.items())
    hooks.clear()  # autograd goes by the order of insertion: move_to_end() does not change it
    hooks.update([own, *others])
    return handle


@pytest.mark.parametrize("kind", SUBJECTS)
@on_every_rank(exactly=4)
def test_a_gradient_that_is_not_finite_in_one_shard_stops_all_ranks(rank, world_size, kind):
    subject = SUBJECTS[kind]()
    for stage in (0, 1, 2, 3) if LONG else (0,):
        model, optimizer = subject.wrapped(stage, check_every=1)
        step(subject, model, optimizer, 0, rank)
        before = sw.full_state_dict(model)
        parameter = dict(sw.unwrap(model).named_parameters())[SHARDED[kind]]
        handle = spoil_first(parameter, rank == BAD)
        optimizer.zero_grad()
        subject.backward(model, 1, rank)
        handle.remove()
        said = told_everywhere(optimizer.step, "averaged gradient is not finite")
        assert f"brought that of parameter '{SHARDED[kind]}'" in said[BAD], (stage, said[BAD][-200:])
        after = sw.full_state_dict(model)
        assert all(torch.equal(a, b) for a, b in zip(before.values(), after.values(), strict=True)), stage
        step(subject, model, optimizer, 2, rank)


@pytest.mark.parametrize("kind", SUBJECTS)
@on_every_rank(exactly=4)
def test_a_save_of_shards_that_differ_begins_on_no_rank(rank, world_size, kind):
    subject = SUBJECTS[kind]()
    for at, kept in (("parameter", None), ("state", None), ("state", 1)):
        model, optimizer = subject.wrapped(0, check_every=100)
        parameter = dict(sw.unwrap(model).named_parameters())[SHARDED[kind]]
        folder = gather(tempfile.mkdtemp(dir=os.environ["SW_TEST_FOLDER"]))[0]
        with sw.Checkpointer(folder, model, optimizer, memory_every=kept) as saver:
            step(subject, model, optimizer, 0, rank)
            assert saver.save(0)
            saver.wait()
            step(subject, model, optimizer, 1, rank)
            if rank == BAD:
                flip_a_bit(local(parameter.detach() if at == "parameter" else optimizer.state[parameter]["exp_avg"]))
            words = ["differ 2 steps after", SHARDED[kind], "the optimizer's state" if at == "state" else ""]
            said = told_everywhere(lambda: saver.save(1, every=1 if kept is None else 7), *words)
            assert len(set(said)) == 1 and saver.steps() == [1], said
            assert saver.restore() == 1
