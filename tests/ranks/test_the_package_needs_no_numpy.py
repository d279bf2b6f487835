"""The package needs no numpy: programs that cannot import it train, gather, join, save and resume as others do.

Whole results at each stage equal those of zero=0, and a checkpoint with a numpy generator's state is read without it.
"""

import os
import sys
import tempfile

import harness
import pytest
import shardwright as sw
import torch
from torch import nn

pytestmark = pytest.mark.timeout(150)  # programs start torch anew

BLOCKER = 'import sys\nsys.modules["numpy"] = None\n'


def without_numpy(tmp_path, world_size, body, **arguments):
    """Return what rank 0 printed; every program must end well."""
    blocker, folder = tmp_path / "blocker", tmp_path / "ranks"
    blocker.mkdir(), folder.mkdir()
    (blocker / "sitecustomize.py").write_text(BLOCKER)
    prefix = ("env", f"PYTHONPATH={os.pathsep.join([str(blocker), *sys.path])}")
    printed, statuses = harness.run_programs(world_size, body, str(folder), prefix=prefix, limit_s=100, **arguments)
    assert statuses == [0] * world_size, "\n".join(printed)
    return printed[0]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table, self.head = nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, rows):
        return self.head(self.table(rows)).square().mean()


def make(zero, rank, **options):
    module = Model()
    options |= {"sparse_gradients": "dense"} if zero else {}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9 if zero else 0.0)
    return sw.wrap(module, optimizer, zero=zero, timeout_s=30, **options)


def steps(model, optimizer, rank, count):
    for step in range(count):
        optimizer.zero_grad()
        model(torch.tensor([rank % 6, step % 6, 5])).backward()
        optimizer.step()


def every_exchange(rank, world_size, path, theirs):
    assert sys.modules["numpy"] is None
    cases = [(0, {}), (1, {}), (2, {}), (2, {"partition": "tensor"}), (3, {}), (3, {"share_parameters": False})]
    for zero, options in cases if harness.LONG else cases[::3] + cases[2::3]:
        model, optimizer = make(zero, rank, **options)
        steps(model, optimizer, rank, 2)
        found = sw.full_gradients(model)
        assert all(torch.as_tensor(each.to_dense()).isfinite().all() for each in found.values()), zero
        state = sw.full_optimizer_state_dict(model, optimizer)
        assert zero == 0 or {len(each) for each in state["state"].values()} == {1}, state
        sw.clip_grad_norm_(model, 1.0)
        if not options:  # some ranks run out of inputs
            with model.join():
                steps(model, optimizer, rank, 1 + rank)
        saved = f"{path}/{zero}-{len(options)}"
        sw.save(saved, model, optimizer)
        again, its = make(zero, rank, **options)
        sw.load(saved, again, its)
        for name, value in sw.full_state_dict(again).items():
            assert torch.equal(value, sw.full_state_dict(model)[name]), (zero, name)
    with sw.Checkpointer(f"{path}/all", model, optimizer, memory_every=1) as checkpoints:
        for step in range(2):
            checkpoints.save(step)
        checkpoints.wait()
        assert checkpoints.restore() == 2
    plain = sw.wrap(nn.Linear(4, 4), timeout_s=30)
    sw.headroom(plain, lambda: plain(torch.ones(1, 4)).sum().backward(), repeat=3, bandwidth=1e6)
    if rank == 0:
        print("as with numpy")
    if theirs:
        restores(theirs)


def saved_with_numpy(folder):
    """Save two checkpoints of a program with numpy. Return their place, or "" in an environment without it."""
    try:
        import numpy
    except ImportError:
        return ""
    module = nn.Linear(3, 3)
    with sw.Checkpointer(folder, module, torch.optim.SGD(module.parameters(), lr=0.1)) as checkpoints:
        checkpoints.save(4)
        checkpoints.wait()
    with sw.Checkpointer(f"{folder}-array", module, user_state={"x": numpy.arange(3)}) as checkpoints:
        checkpoints.save(4)
        checkpoints.wait()
    return str(folder)


@harness.at_least_two
def test_training_gathering_joining_saving_and_restoring_need_no_numpy(world_size, tmp_path):
    """Of a checkpoint that a program with numpy saved, a numpy generator's state alone is left out. A user's own array is
    refused by name."""
    theirs = saved_with_numpy(tmp_path / "theirs")
    with tempfile.TemporaryDirectory() as folder:
        printed = without_numpy(tmp_path, world_size, every_exchange, path=folder, theirs=theirs)
    assert "as with numpy" in printed and "Traceback" not in printed, printed
    assert not theirs or ("restored 5\n" in printed and "install numpy to load it" in printed), printed


def restores(path):
    module = nn.Linear(3, 3)
    with sw.Checkpointer(path, module, torch.optim.SGD(module.parameters(), lr=0.1)) as checkpoints:
        print("restored", checkpoints.restore())
    read = {}
    try:
        sw.Checkpointer(f"{path}-array", module, user_state=read).restore()
    except sw.CheckpointError as error:
        print(error)
