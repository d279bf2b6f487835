"""Law: load(strict=False, include=, rename=) fills exactly the tensors and state that the map selects, bit for bit, at
stages 0 and 2, and changes nothing else. Without strict=False a tensor that only one side has is an error on every
rank.
"""

import pytest
import torch
from harness import on_every_rank
from peer import PEER, batch, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="shardwright's checkpoints")


class Old(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 5))
        self.old_head = nn.Linear(5, 2)

    def forward(self, x):
        return self.old_head(self.body(x))


class New(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 5))
        self.head = nn.Linear(5, 4)

    def forward(self, x):
        return self.head(self.layers(x))


RENAME = {r"^body\.": "layers."}


def trained(kind, seed, rank, zero):
    torch.manual_seed(seed)
    module = kind()
    model, optimizer = sw.wrap(module, torch.optim.Adam(module.parameters(), lr=0.25 + seed), zero=zero)
    model(batch(rank, 6, 7)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def state(model, optimizer):
    """Return tensors of the model and of the optimizer's state by name, and the learning rate."""
    full, names = sw.full_optimizer_state_dict(model, optimizer), [n for n, _ in sw.unwrap(model).named_parameters()]
    found = {**sw.full_state_dict(model)}
    found |= {f"{key} {names[n]}": value for n, values in full["state"].items() for key, value in values.items()}
    return {name: value.clone() for name, value in found.items()}, full["param_groups"][0]["lr"]


def changed(before, after):
    return {name for name in before[0] if not torch.equal(before[0][name], after[0][name])}


@pytest.mark.parametrize("zero", [0, 2])
@on_every_rank()
def test_what_is_taken_is_loaded_and_nothing_else(rank, world_size, zero):
    folder = shared_folder(rank)
    with sw.Checkpointer(f"{folder}/all", *trained(Old, 0, rank, 0)) as checkpoints:
        checkpoints.save(0)
    source = f"{folder}/all/step-000001"
    old = state(*trained(Old, 0, rank, 0))
    old = {name.replace("body", "layers"): value for name, value in old[0].items()}
    for include in ((), [r"layers\.[02]\."]):
        model, optimizer = trained(New, 1, rank, zero)
        before = state(model, optimizer)
        if include:
            sw.load(source, model, optimizer, strict=False, include=include, rename=RENAME)
        else:
            with sw.Checkpointer(f"{folder}/all", model, optimizer) as checkpoints:
                assert checkpoints.restore(strict=False, rename=lambda name: name.replace("body", "layers")) == 1
        after = state(model, optimizer)
        for name, value in after[0].items():
            taken = "layers" in name and (not include or ".1." not in name)
            assert torch.equal(value, old[name] if taken else before[0][name]), name
        assert after[1] == 0.25  # both have the group's common parameters
    model, optimizer = trained(New, 1, rank, zero)
    before = state(model, optimizer)
    for options, said in (
        ({"rename": RENAME}, "old_head.weight"),
        ({"strict": False, "rename": {"weight|bias": "x"}}, "two tensors the name"),
        ({"include": "head"}, "head.weight"),
        ({"include": ["head", "modle"]}, "include: 'modle' is found in no name of the checkpoint or of the model"),
        ({"strict": False, "include": "("}, "regular expressions"),
        *([({"strict": rank == 1, "rename": RENAME}, "strict")] if world_size > 1 else []),
    ):
        with pytest.raises((sw.CheckpointError, ValueError), match=said):
            sw.load(source, model, optimizer, **options)
    assert changed(before, state(model, optimizer)) == set()
    sw.load(source, model, optimizer, include="^layers", rename=RENAME)  # strict about what it takes
    after = state(model, optimizer)
    assert changed(before, after) == {n for n, v in before[0].items() if "layers" in n and not torch.equal(v, old[n])}
