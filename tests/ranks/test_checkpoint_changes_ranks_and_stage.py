"""Law: 1 and 3 ranks at any stage restore bit for bit what 2 ranks at zero=2 saved, and continue with the bits of plain
torch filled with the same values.
"""

import copy
import tempfile

import pytest
import torch
from checkpoint_subjects import assert_same_state, digest_of
from harness import gather, same_everywhere
from peer import PEER, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="shardwright's checkpoints")
SAVED, ON = 3, 3


def built(seed):
    """A model of more than one block of 1 MiB, cut by buckets and slices: matrices, vectors and a buffer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(201, 333), nn.GELU(), nn.Linear(333, 777), nn.LayerNorm(777), nn.Linear(777, 201))
    model.register_buffer("scale", torch.rand(3))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, begin, end):
    """Return the same batch on every rank: the mean of 1 or 2 equal gradients is exactly their value."""
    for step in range(begin, end):
        batch = torch.randn(4, 201, generator=torch.Generator().manual_seed(step))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model, optimizer):
    """Return every tensor of model and optimizer by name."""
    found = {f"model.{name}": value for name, value in sw.full_state_dict(model).items()}
    for number, state in sw.full_optimizer_state_dict(model, optimizer)["state"].items():
        found |= {f"{number}.{key}": torch.as_tensor(value).clone() for key, value in sorted(state.items())}
    return found


def save_at_two(rank, world_size, folder):
    """Return the saved values, and those of the training that continued."""
    model, optimizer = sw.wrap(*built(1), zero=2, bucket_cap_mb=0.7)
    train(model, optimizer, 0, SAVED)
    with sw.Checkpointer(folder, model, optimizer) as checkpoints:
        checkpoints.save(SAVED - 1)
    moments = copy.deepcopy(sw.full_optimizer_state_dict(model, optimizer))  # as torch's, it may share what goes on
    saved = sw.full_state_dict(model), moments, whole(model, optimizer)
    train(model, optimizer, SAVED, SAVED + ON)
    return saved, whole(model, optimizer)


def restore_at_every_stage(rank, world_size, folder, model_state, optimizer_state):
    """Return each stage's values after restore() and after more steps, and the latter of plain torch at zero=0."""
    model, optimizer = built(2)
    model.load_state_dict(model_state)
    optimizer.load_state_dict(copy.deepcopy(optimizer_state))  # the ranks were sent one memory
    model, optimizer = sw.wrap(model, optimizer)
    train(model, optimizer, SAVED, SAVED + ON)
    expected = whole(model, optimizer)
    loaded, trained = {}, {}
    for zero in range(4):
        model, optimizer = sw.wrap(*built(3 + zero), zero=zero, bucket_cap_mb=0.4)
        with sw.Checkpointer(folder, model, optimizer) as checkpoints:
            assert checkpoints.restore() == SAVED
        loaded[zero] = whole(model, optimizer)
        assert same_everywhere({name: value.sum().item() for name, value in loaded[zero].items()})
        sw.save(f"{folder}/again-{world_size}-{zero}", model, optimizer)
        train(model, optimizer, SAVED, SAVED + ON)
        trained[zero] = whole(model, optimizer)
        gather(None)
    return loaded, trained, expected


@pytest.mark.timeout(120)
def test_two_ranks_at_zero_2_are_resumed_by_one_and_by_three_at_any_stage(fresh_ranks):
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder:
        with fresh_ranks(2) as team:
            ((model_state, optimizer_state, saved), uninterrupted), _ = team.run(save_at_two, folder=folder)
        digest = digest_of(f"{folder}/step-{SAVED:06d}")
        for world_size in (1, 3):
            with fresh_ranks(world_size) as team:
                answers = team.run(
                    restore_at_every_stage, folder=folder, model_state=model_state, optimizer_state=optimizer_state
                )
            for loaded, trained, expected in answers:
                for zero in range(4):
                    assert_same_state(loaded[zero], saved)
                    assert_same_state(trained[zero], expected)
                    assert digest_of(f"{folder}/again-{world_size}-{zero}") == digest
            if world_size == 1:
                assert_same_state(answers[0][2], uninterrupted)
