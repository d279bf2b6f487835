"""Law: twenty steps of the example's GPT have the bits of the naive loop at every stage, with any bucket cap, shared
and private parameters, both forms of accumulation, and clipping. (Low precision:
test_precision_is_the_same_at_every_stage.)
"""

import contextlib
import math
import pathlib
import sys

import pytest
import torch
from harness import LONG, gather, in_turn, on_every_rank
from oracle.data_parallel import NaiveDataParallel
from oracle.fold import bits_equal
from peer import PEER, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
STEPS = 20  # of the plain training; the others take as many in the long form
FEW = 20 if LONG else 6
STAGES = [
    {"zero": 0},
    {"zero": 1, "bucket_cap_mb": 0.01},
    {"zero": 2, "bucket_cap_mb": 0.03},
    {"zero": 2},
    {"zero": 3},
    {"zero": 3, "share_parameters": False, "bucket_cap_mb": 0.02},
]
#: (backwards a step, whether all but the last are inside no_sync, clipping)
TRAININGS = {
    "plain": (1, False, None),
    "inside no_sync": (2, True, None),
    "onto the average": (2, False, None),
    "clipped": (1, False, 0.5),
}


def gpt():
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "examples"))
    from gpt.model import GPT, VOCABULARY

    torch.manual_seed(0)
    module = GPT(context=8, layers=2, width=16, heads=2)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-3), VOCABULARY


def loss_of(model, vocabulary, generator):
    tokens = torch.randint(vocabulary, (2, 9), generator=generator)
    return nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, -2), tokens[:, 1:].flatten())


def naive(rank, count, backwards, local, clip):
    module, optimizer, vocabulary = gpt()
    model, losses, generator = NaiveDataParallel(module), [], torch.Generator().manual_seed(rank)
    for _ in range(count):
        for part in range(backwards):
            loss = loss_of(model, vocabulary, generator)
            loss.backward()
            losses.append(loss.item())
            if not local or part == backwards - 1:
                model.synchronise()
        if clip is not None:
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            norm = math.sqrt(math.fsum(x * x for g in gradients for x in g.double().flatten().tolist()))
            if clip / (norm + 1e-6) < 1:
                for gradient in gradients:
                    gradient.mul_(clip / (norm + 1e-6))
        optimizer.step()
        module.zero_grad()
    return losses, module.state_dict()


def ours(rank, count, backwards, local, clip, options):
    module, optimizer, vocabulary = gpt()
    model, optimizer = sw.wrap(module, optimizer, clip_grad_norm=clip, **options)
    losses, generator = [], torch.Generator().manual_seed(rank)
    for _ in range(count):
        for part in range(backwards):
            inside = local and part < backwards - 1
            with model.no_sync() if inside else contextlib.nullcontext():
                loss = loss_of(model, vocabulary, generator)
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, sw.full_state_dict(model)


@pytest.mark.parametrize("training", TRAININGS)
@on_every_rank()
def test_every_stage_has_the_bits_of_the_naive_loop(rank, world_size, training):
    given = (rank, STEPS if training == "plain" else FEW, *TRAININGS[training])
    expected = naive(*given)
    for options in in_turn(STAGES, [*TRAININGS].index(training)):
        found = ours(*given, options)
        assert found[0] == expected[0], options
        assert all(bits_equal(value, found[1][name]) for name, value in expected[1].items()), options
        gather(None)
