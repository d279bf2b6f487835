"""Law: a frozen parameter of any 8-bit float is sliced, gathered, saved and loaded byte for byte, at each stage and by rows."""

import os
import tempfile

import pytest
import torch
from harness import gather, on_every_rank
from peer import PEER, batch, sw
from torch import nn

NAMES = [name for name in dir(torch) if name.startswith("float8_")]


def can_lie_in_memory_of_others(name):
    try:
        return torch.from_dlpack(torch.zeros(1, dtype=getattr(torch, name)).__dlpack__()) is not None
    except (RuntimeError, BufferError):  # an older torch
        return False


NAMES = [name for name in NAMES if can_lie_in_memory_of_others(name)]
SAVED = [name for name in NAMES if not name.endswith("fnuz")]  # which safetensors can name
pytestmark = [
    pytest.mark.skipif(PEER == "torch", reason="ours"),
    pytest.mark.skipif(not NAMES, reason="this torch's DLPack has no 8-bit floats"),
]


class Coded(nn.Module):
    def __init__(self, names=NAMES, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(5, 3)
        self.codes = nn.ParameterDict()
        for name in names:
            bytes_of_codes = torch.randint(0, 256, (7, 5), dtype=torch.uint8)
            self.codes[name] = nn.Parameter(bytes_of_codes.view(getattr(torch, name)), requires_grad=False)

    def forward(self, x):
        self.seen = [codes.detach().view(torch.uint8).clone() for codes in self.codes.values()]
        return self.linear(x)


def trained(how, names=NAMES, seed=0):
    module = Coded(names, seed)
    if how == "rows":
        sw.fully_shard(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    else:
        module, optimizer = sw.wrap(module, torch.optim.SGD(module.linear.parameters(), lr=0.1), zero=how)
    for step in range(2):
        module(batch(0, 4, 5, step=step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return module, optimizer


def codes_of(module):
    whole = sw.full_state_dict(module)
    return [value.view(torch.uint8) for name, value in whole.items() if "codes" in name]


@pytest.mark.parametrize("how", [0, 1, 2, 3, "rows"])
@on_every_rank()
def test_bytes_stay_as_they_are(rank, world_size, how):
    expected = [codes.detach().view(torch.uint8) for codes in Coded().codes.values()]
    module, optimizer = trained(how)
    seen = (module if how == "rows" else module.module).seen
    assert all(map(torch.equal, seen, expected)) and all(map(torch.equal, codes_of(module), expected))
    module, optimizer = trained(how, SAVED)
    saved, folder = (
        codes_of(module),
        gather(tempfile.mkdtemp(dir=os.environ.get("SW_TEST_FOLDER")) if rank == 0 else None)[0],
    )
    held = (module, None) if how == "rows" else (module, optimizer)
    sw.save(os.path.join(folder, "saved"), *held)
    other, its = trained(how, SAVED, seed=1)
    assert not any(map(torch.equal, codes_of(other), saved))
    sw.load(os.path.join(folder, "saved"), other, *([] if how == "rows" else [its]))
    assert all(map(torch.equal, codes_of(other), saved))


@on_every_rank()
def test_one_that_trains_is_refused_on_all_ranks(rank, world_size):
    module = Coded()
    module.codes[NAMES[0]].requires_grad_(True)
    with pytest.raises(ValueError, match=f"mean is not defined on dtype {NAMES[0]}"):
        sw.wrap(module, torch.optim.SGD(module.linear.parameters(), lr=0.1))
    gather(None)
