"""Law: a DiLoCo saved when its ranks have exchanged continues with the bits of an uninterrupted one at the same world
size. At another world size it continues from the same parameters, anchors and outer momentum."""

import pytest
import torch
from harness import gather, on_every_rank, same_everywhere
from oracle.fold import bits_equal
from peer import PEER, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder
from test_local_steps_are_averaged import made, steps

pytestmark = pytest.mark.skipif(PEER == "torch", reason="torch has none")
STOP, STEPS = 4, 9


def training(folder, rank, **options):
    model, trainer = made(2, fragments=1, rank=rank, **options)
    group = options.get("process_group")
    return model, trainer, sw.Checkpointer(
        folder, model, user_state={"trainer": trainer}, dataloader=[trainer], process_group=group
    )  # fmt: skip


@pytest.mark.parametrize("wire", ["float32", "int8"])
@on_every_rank()
def test_outer_steps_continue(rank, world_size, wire):
    folder = shared_folder(rank)
    model, trainer, checkpoints = training(folder, rank, wire=wire)
    with checkpoints:
        steps(model, trainer, rank, 0, STOP)
        trainer.synchronise()
        checkpoints.save(STOP - 1)
        anchors = [anchor.clone() for anchor in trainer._anchors]
        momentum = [state["momentum_buffer"].clone() for state in trainer.outer_optimizer.state.values()]
        steps(model, trainer, rank, STOP, STEPS - STOP)
    again, other, checkpoints = training(folder, rank, wire=wire)
    with checkpoints:
        assert checkpoints.restore() == STOP and other.steps == STOP
        steps(again, other, rank, STOP, STEPS - STOP)
    assert all(map(bits_equal, again.parameters(), model.parameters()))
    for name, value in trainer.state_dict()["anchors"].items():
        assert bits_equal(value, other.state_dict()["anchors"][name])
    groups = [torch.distributed.new_group([each]) for each in range(world_size)]
    alone, third, checkpoints = training(f"{folder}/{rank}", rank, wire=wire, process_group=groups[rank])
    checkpoints.close()
    if rank == 0:
        with sw.Checkpointer(folder, alone, user_state={"trainer": third}, process_group=groups[0]) as checkpoints:
            assert checkpoints.restore() == STOP and third.steps == STOP
        assert all(map(bits_equal, alone.parameters(), anchors)) and all(map(bits_equal, third._anchors, anchors))
        found = [state["momentum_buffer"] for state in third.outer_optimizer.state.values()]
        assert len(found) == len(momentum) and all(map(bits_equal, found, momentum))
    gather(None)
    assert same_everywhere(len(anchors))


@on_every_rank()
def test_it_is_not_an_optimizer_that_ranks_share(rank, world_size):
    folder = shared_folder(rank)
    model, trainer = made(2, rank=rank)
    for call in (lambda: sw.Checkpointer(folder, model, trainer), lambda: sw.save(f"{folder}/a", model, trainer)):
        with pytest.raises(ValueError, match="optimizer is a DiLoCo, whose ranks differ between exchanges"):
            call()
    gather(None)
