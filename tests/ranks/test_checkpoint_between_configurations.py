"""Law: a checkpoint has the same bytes for any arrangement of state (stages, units sharded by hand, a mesh of two
dimensions, state in files), and each arrangement continues from every other's with the same bits, with low precision,
masters, scaler and schedule.
"""

import itertools
import os
import shutil
import tempfile

import pytest
import torch
from checkpoint_subjects import digest_of
from harness import LONG, gather, on_every_rank
from peer import PEER, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

pytestmark = pytest.mark.skipif(PEER == "torch", reason="shardwright's checkpoints")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
STOP, STEPS = 3, 5


class Block(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.up, self.down = nn.Linear(31, 67, dtype=dtype), nn.Linear(67, 31, dtype=dtype)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Layered(nn.Module):
    """A model with blocks in bfloat16 beside float32, a tensor larger than a block of a file, one that is not
    row-major, and one that is not trained.
    """

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(torch.bfloat16), Block(torch.float32)])
        self.table = nn.Parameter(torch.randn(600, 450))
        self.turned = nn.Parameter(torch.randn(13, 31).t())
        self.frozen = nn.Parameter(torch.randn(31), requires_grad=False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        x = self.blocks[0](x.bfloat16()).float()
        x = self.blocks[1](x) @ self.turned * 0.1
        return x.square().mean() + self.table.square().mean() + (self.frozen * 0.1).sum()


def built(seed):
    torch.manual_seed(seed)
    module = Layered()
    return module, optimizer_of(module)


def optimizer_of(module):
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [{"params": trained[:3], "weight_decay": 0.1}, {"params": trained[3:], "lr": 3e-3}]
    return sw.optim.AdamW(groups, lr=1e-2)


def by_hand(seed):
    torch.manual_seed(seed)
    module = Layered()
    module.turned = nn.Parameter(module.turned.detach().contiguous())  # as FSDP2 demands
    for block in module.blocks:
        sw.fully_shard(block)
    return sw.fully_shard(module), optimizer_of(module)


def on_a_mesh(seed, **options):
    world_size = torch.distributed.get_world_size()
    rows = 2 if world_size % 2 == 0 else 1
    mesh = DeviceMesh("cpu", torch.arange(world_size).reshape(rows, -1), mesh_dim_names=("replicate", "shard"))
    return sw.wrap(*built(seed), device_mesh=mesh, **options)


def in_files(seed, **options):
    return sw.wrap(*built(seed), offload=f"nvme:{os.environ['SW_TEST_FOLDER']}", **options)


PRIVATE = {"zero": 3, "share_parameters": False, "units": Block}
#: how state is arranged -> (module, optimizer) of a seed
ARRANGED = {
    "0": lambda seed: sw.wrap(*built(seed)),
    "1": lambda seed: sw.wrap(*built(seed), zero=1, bucket_cap_mb=0.01),
    "2": lambda seed: sw.wrap(*built(seed), zero=2),
    "3": lambda seed: sw.wrap(*built(seed), zero=3),
    "3, private": lambda seed: sw.wrap(*built(seed), **PRIVATE),
    "by hand": by_hand,
    "2 on a mesh": lambda seed: on_a_mesh(seed, zero=2),
    "3 on a mesh": lambda seed: on_a_mesh(seed, **PRIVATE),
    "0 in files": in_files,
    "2 in files": lambda seed: in_files(seed, zero=2),
    "3 in files": lambda seed: in_files(seed, **PRIVATE),
}


class Training:
    def __init__(self, folder, arranged, seed, **options):
        self.model, self.optimizer = ARRANGED[arranged](seed)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.checkpoints = sw.Checkpointer(
            folder, self.model, self.optimizer, scheduler=self.scheduler, scaler=self.scaler, **options
        )

    def run(self, begin, end):
        """Return the same batch on every rank, so that world sizes that are powers of 2 have the same bits."""
        for step in range(begin, end):
            x = torch.randn(4, 31, generator=torch.Generator().manual_seed(step))
            self.scaler.scale(self.model(x)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.checkpoints.save(step, every=STOP)
        self.checkpoints.wait()

    def end(self, folder):
        """Return digests of the state's tensors, its plain values, and the scaler's state."""
        sw.save(folder, self.model, self.optimizer)
        learning = [group["lr"] for group in self.optimizer.param_groups]
        return digest_of(folder), learning, self.scaler.state_dict(), self.scheduler.last_epoch


def through(folder, arranged, snapshot="copy"):
    """Return the digest of the checkpoint at STOP, and the end of the uninterrupted run."""
    with (training := Training(folder, arranged, 0, snapshot=snapshot)).checkpoints:
        training.run(0, STEPS)
    return digest_of(f"{folder}/step-{STOP:06d}"), training.end(f"{folder}/end")


def resumed(origin, folder, arranged, rank):
    """Return the digest of the state restored from `origin`, and the end of the run that continued with it."""
    if rank == 0:  # several read it at their own place
        shutil.copytree(f"{origin}/step-{STOP:06d}", f"{folder}/step-{STOP:06d}", copy_function=os.link)
    gather(None)
    with (training := Training(folder, arranged, 7)).checkpoints:
        assert training.checkpoints.restore() == STOP
        restored, *_ = training.end(f"{folder}/again")
        training.run(STOP, STEPS)
    return restored, training.end(f"{folder}/end")


#: between other numbers of ranks: (ranks that read, ranks that wrote, pairs (writer, reader))
BETWEEN = (
    (3, 4, [("2 on a mesh", "0"), ("2 on a mesh", "3 in files"), ("3 on a mesh", "by hand")]),
    (1, 4, [("2 on a mesh", "0"), ("3 on a mesh", "0 in files")]),
    (4, 3, [("2 in files", "0"), ("by hand", "2 on a mesh"), ("2 in files", "3 on a mesh")]),
)


def pairs(writers, readers):
    """Return all pairs (writer, reader). In the quick form, return one for each reader that BETWEEN lacks."""
    if LONG:
        return list(itertools.product(writers, readers))
    turned = itertools.islice(itertools.cycle(writers), 4, None)
    elsewhere = {reader for _, _, some in BETWEEN for _, reader in some}
    return [(a, b) for a, b in zip(turned, readers) if b not in elsewhere]


@pytest.mark.parametrize("snapshot", ["copy", "lazy"] if LONG else ["copy"])
@on_every_rank(deadline_s=120)
def test_every_arrangement_writes_the_same_bytes_and_goes_on_from_every_other(rank, world_size, snapshot):
    folder = shared_folder(rank)
    found = {name: through(f"{folder}/{name}", name, snapshot) for name in ARRANGED}
    assert not [name for name, each in found.items() if each != found["0"]]
    ends = {(a, b): resumed(f"{folder}/{a}", f"{folder}/{a} {b}", b, rank) for a, b in pairs(ARRANGED, ARRANGED)}
    assert not [pair for pair, each in ends.items() if each != found["0"]]


def all_through(rank, world_size, folder, names):
    return {name: through(f"{folder}/{name}", name) for name in names}


def all_resumed(rank, world_size, folder, pairs):
    return {(a, b): resumed(f"{folder}/{a}", f"{folder}/{world_size} {a} {b}", b, rank) for a, b in pairs}


@pytest.mark.timeout(300)
def test_a_mesh_of_four_ranks_is_resumed_by_three_and_by_one_and_the_other_way(fresh_ranks):
    """Compare with stage 0 resumed by as many ranks."""
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder:
        saved = {}
        for world_size, names in ((4, ["2 on a mesh", "3 on a mesh"]), (3, ["2 in files", "by hand"])):
            with fresh_ranks(world_size) as team:
                found = team.run(all_through, folder=f"{folder}/{world_size}", names=names)[0]
            saved[world_size] = found[names[0]][0]
            assert all(each == found[names[0]] for each in found.values())
        for world_size, origin, some in BETWEEN:
            with fresh_ranks(world_size) as team:
                ends = team.run(all_resumed, folder=f"{folder}/{origin}", pairs=some)[0]
            assert all(restored == saved[origin] for restored, _ in ends.values())
            assert all(end == ends[some[0]][1] for _, end in ends.values())
