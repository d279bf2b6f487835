"""Law: a rank that skips a backward and a step alone, while others go on, is named on all ranks by the next backward that it
takes part in; a rank that skips only the step gets an error with a remedy, on all ranks.
"""

import logging

import pytest
import torch
from harness import on_every_rank, same_everywhere
from models import Mlp
from peer import PEER, batch, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
STAGES = [
    {"zero": 0},
    {"zero": 1},
    {"zero": 2},
    {"zero": 3},
    {"zero": 3, "share_parameters": False, "units": torch.nn.Linear},
]


class Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


def wrapped(options):
    torch.manual_seed(0)
    module = Mlp()
    return sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), **options)


def losses(model, rank, count):
    for step in range(count):
        yield step, model(batch(rank, 6, 7, step=step)).square().mean()


@pytest.mark.parametrize("options", STAGES, ids=str)
@on_every_rank(at_least=2)
def test_a_backward_and_a_step_left_out_are_told_of_once(rank, world_size, options):
    model, optimizer = wrapped(options)
    lines = Lines()
    logging.getLogger("shardwright").addHandler(lines)
    try:
        said = {}
        for step, loss in losses(model, rank, 7 if rank == world_size - 1 else 5):
            if rank == world_size - 1 and step in (1, 3):
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            said[len(said)] = list(lines.said)
    finally:
        logging.getLogger("shardwright").removeHandler(lines)
    assert said[0] == []
    assert len(said[1]) == 1 and said[1] == said[4]
    assert (
        f"rank {world_size - 1} ran 2 forwards of Mlp before its backward 1 of step 2, and rank 0 ran 1" in said[1][0]
    )
    assert same_everywhere(said[1][0])


@pytest.mark.parametrize("options", STAGES, ids=str)
@on_every_rank(at_least=2, spoils=True)
def test_a_step_left_out_alone_is_an_error_with_a_remedy(rank, world_size, options):
    model, optimizer = wrapped(options)

    def train():
        for step, loss in losses(model, rank, 4):
            loss.backward()
            if rank != world_size - 1 or step != 1:
                optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(
        sw.Error, match=r"disagree.*call backward\(\) and optimizer.step\(\) on every rank or on none"
    ) as raised:
        train()
    assert f"rank {world_size - 1} came" in str(raised.value)
