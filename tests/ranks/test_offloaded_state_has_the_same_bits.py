"""Law of offload="nvme:<folder>": losses, parameters, states and checkpoints have the bits of no offload at every
stage. The file has no name, so it vanishes with the process. Training works with more state than a memory limit holds.
A failure is one error that names its cause.
"""

import copy
import ctypes
import errno
import os
import pathlib
import resource
import signal
import tempfile

import pytest
import torch
from harness import LONG, change, gather, in_turn, on_every_rank, same_everywhere
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
OPTIMIZERS = {
    "AdamW": lambda p: sw.optim.AdamW(p, lr=1e-2),
    "Adam amsgrad": lambda p: sw.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "SGD momentum": lambda p: sw.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD": lambda p: sw.optim.SGD(p, lr=0.1),
    "AdamW master=False": lambda p: sw.optim.AdamW(p, lr=1e-2, master=False),
    "AdamW bfloat16 moments": lambda p: sw.optim.AdamW(p, lr=1e-2, state_dtype=torch.bfloat16),
    "AdamW bfloat16 moments, master=False": lambda p: sw.optim.AdamW(
        p, lr=1e-2, master=False, state_dtype=torch.bfloat16
    ),
}
STAGES = [
    {"zero": 0},
    {"zero": 1, "bucket_cap_mb": 0.001},
    {"zero": 2},
    {"zero": 3},
    {"zero": 3, "share_parameters": False, "units": nn.Linear},
]


class Mixed(nn.Module):
    """A model with float32 and bfloat16 parameters, a transposed one, and one of several buffers of 64 KiB."""

    def __init__(self):
        super().__init__()
        self.body = Mlp()
        self.low = nn.Linear(5, 9).to(torch.bfloat16)
        self.turned = nn.Parameter(torch.randn(9, 11).t())
        self.large = nn.Parameter(torch.randn(200, 301))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        x = self.low(self.body(x).to(torch.bfloat16)).float() @ self.turned.t()
        return x + self.large.square().mean() + self.empty.sum()


def folder_of(rank, name="offload"):
    folder = pathlib.Path(os.environ["SW_TEST_FOLDER"], name)
    folder.mkdir(exist_ok=True)
    return str(folder)


def build(make, seed=0):
    torch.manual_seed(seed)
    module = Mixed()
    return module, make(module.parameters())


def train(model, optimizer, rank, steps=range(4)):
    losses = []
    for step in steps:
        loss = model(batch(rank, 6, 7, step=step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(model, optimizer):
    state = copy.deepcopy(sw.full_optimizer_state_dict(model, optimizer))
    with sw.full_parameters(model):
        parameters = [p.detach().clone() for p in sw.unwrap(model).parameters()]
    gather(None)
    return parameters, state


def assert_same(found, expected, what):
    assert all(map(bits_equal, found[0], expected[0])), what
    assert found[1]["state"].keys() == expected[1]["state"].keys(), what
    for position, entry in expected[1]["state"].items():
        assert found[1]["state"][position].keys() == entry.keys(), what
        for key, value in entry.items():
            assert bits_equal(found[1]["state"][position][key], value), (what, position, key)


def small_buffers():
    """Force several batches in a step of a small model."""
    from internals import offload

    change(offload, BUFFER_BYTES=64 << 10)


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_every_rank()
def test_every_stage_has_the_bits_of_no_offload(rank, world_size, name):
    small_buffers()
    folder = folder_of(rank)
    for options in in_turn(STAGES, list(OPTIMIZERS).index(name), of=3):
        model, optimizer = sw.wrap(*build(OPTIMIZERS[name]), clip_grad_norm=1.0, **options)
        losses, expected = train(model, optimizer, rank), whole(model, optimizer)
        model, optimizer = sw.wrap(*build(OPTIMIZERS[name]), clip_grad_norm=1.0, offload=f"nvme:{folder}", **options)
        assert train(model, optimizer, rank) == losses, options
        assert_same(whole(model, optimizer), expected, options)
        described = sw.describe()["models"][-1]
        assert described["offload"] == f"nvme:{folder}" and "page cache" in described["offload_io"]
        assert os.listdir(folder) == []


def rows(name, **options):
    module, _ = build(OPTIMIZERS[name])
    module.turned = nn.Parameter(module.turned.detach().contiguous())  # FSDP2's rule
    sw.fully_shard(module, **options)
    return module, sw.shard_optimizer(module, OPTIMIZERS[name](module.parameters()))


def rows_loaded(name, place):
    module, optimizer = rows(name)
    sw.load(place, module, optimizer)
    return module, optimizer


@pytest.mark.parametrize("name", ["AdamW", "Adam amsgrad", "SGD momentum", "AdamW bfloat16 moments, master=False"])
@on_every_rank()
def test_rows_of_fully_shard_have_the_bits_of_no_offload(rank, world_size, name):
    small_buffers()
    folder = folder_of(rank)
    module, optimizer = rows(name)
    losses, expected = train(module, optimizer, rank), whole(module, optimizer)
    module, optimizer = rows(name, offload=f"nvme:{folder}")
    assert train(module, optimizer, rank) == losses
    assert_same(whole(module, optimizer), expected, name)
    assert sw.describe()["models"][-1]["offload"] == f"nvme:{folder}" and optimizer.store.file is not None
    place = pathlib.Path(os.environ["SW_TEST_FOLDER"], "rows")
    sw.save(place, module, optimizer, step=4, overwrite=True)
    loaded, optimizer = rows(name, offload=f"nvme:{folder}")
    sw.load(place, loaded, optimizer)
    assert_same(whole(loaded, optimizer), expected, f"{name}, loaded")
    assert train(loaded, optimizer, rank) == train(*rows_loaded(name, place), rank)
    assert os.listdir(folder) == []


@pytest.mark.parametrize("first", [0, 2, 4])
@on_every_rank(at_least=3)
def test_states_are_saved_and_loaded(rank, world_size, first):
    small_buffers()
    make, offload = OPTIMIZERS["Adam amsgrad"], f"nvme:{folder_of(rank)}"
    model, optimizer = sw.wrap(*build(make), **STAGES[first])
    losses = train(model, optimizer, rank)
    expected = whole(model, optimizer)
    model, optimizer = sw.wrap(*build(make), offload=offload, **STAGES[first])
    begun = train(model, optimizer, rank, range(2))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    weights, state = sw.full_state_dict(model), whole(model, optimizer)[1]
    assert begun + train(model, optimizer, rank, range(2, 4)) == losses
    assert_same(whole(model, optimizer), expected, first)
    for second in in_turn((1, 3), first // 2):  # into another stage's file, and out of it
        module, optimizer = build(make, seed=3)
        module.load_state_dict(weights)
        model, optimizer = sw.wrap(module, optimizer, offload=offload, **STAGES[second])
        sw.load_full_optimizer_state_dict(model, optimizer, state)
        assert begun + train(model, optimizer, rank, range(2, 4)) == losses
        assert_same(whole(model, optimizer), expected, (first, second))


def saved_bytes(folder):
    files = [each for kind in ("model", "optimizer") for each in pathlib.Path(folder).rglob(f"{kind}*")]
    return {each.name: each.read_bytes() for each in files}


@pytest.mark.parametrize("snapshot", ["copy", "lazy"])
@on_every_rank(at_least=3)
def test_checkpoints_have_the_bytes_of_no_offload_and_are_restored(rank, world_size, snapshot):
    small_buffers()
    make, saved, losses = OPTIMIZERS["AdamW"], {}, {}
    forms = list(enumerate([*STAGES, {"zero": 2, "partition": "tensor"}]))
    for number, options in forms if LONG else forms[snapshot == "lazy" :: 2]:
        for offload in (None, f"nvme:{folder_of(rank)}"):
            folder = os.path.join(os.environ["SW_TEST_FOLDER"], f"{snapshot}-{number}-{offload is None}")
            for seed in (0, 1):
                model, optimizer = sw.wrap(*build(make, seed), offload=offload, **options)
                with sw.Checkpointer(folder, model, optimizer, snapshot=snapshot) as checkpoints:
                    start = checkpoints.restore()
                    losses[seed] = train(model, optimizer, rank, range(start, 2))
                    if start == 0:
                        checkpoints.save(1)
                    losses[seed] = train(model, optimizer, rank, range(2, 4))
                assert start == 2 * seed
                gather(None)
            assert losses[0] == losses[1], (options, offload)
            saved[number, offload is None] = saved_bytes(os.path.join(folder, "step-000002"))
    assert all(each == next(iter(saved.values())) for each in saved.values())


@on_every_rank()
def test_state_that_comes_later_makes_the_file_grow_without_its_folder(rank, world_size):
    small_buffers()
    found = []
    for offload in (False, True):
        folder = tempfile.mkdtemp(dir=os.environ["SW_TEST_FOLDER"])
        torch.manual_seed(0)
        module = Mixed()
        optimizer = sw.optim.AdamW(module.body.parameters(), lr=1e-2)
        model, optimizer = sw.wrap(module, optimizer, zero=2, offload=f"nvme:{folder}" if offload else None)
        losses = train(model, optimizer, rank, range(2))
        os.rmdir(folder)  # it is empty and no longer needed
        optimizer.add_param_group({"params": [module.large, module.low.weight], "lr": 1e-3})
        optimizer.param_groups[0]["amsgrad"] = True
        losses += train(model, optimizer, rank, range(2, 4))
        found.append((losses, whole(model, optimizer)))
    assert found[1][0] == found[0][0]
    assert_same(found[1][1], found[0][1], "grown")


@on_every_rank()
def test_a_rank_holds_its_slices_on_disk_and_regions_are_used_again(rank, world_size):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(7, 256), *(nn.Linear(256, 256) for _ in range(4)))
    whole_bytes = 8 * sum(p.numel() for p in module.parameters())
    model, optimizer = sw.wrap(
        module, sw.optim.AdamW(module.parameters()), zero=2, offload=f"nvme:{folder_of(rank)}", bucket_cap_mb=0.1
    )
    planned = sw.describe()["models"][-1]["offload_bytes"]
    assert whole_bytes / world_size * 0.7 <= planned <= whole_bytes / world_size * 1.3 + 20 * 2 * 4096
    for step in range(4):
        model(batch(rank, 6, 7, step=step)).square().mean().backward()
        optimizer.step()
        optimizer.load_state_dict(
            copy.deepcopy(optimizer.state_dict())
        )  # a second set of state for a while, but not a third
    assert sw.describe()["models"][-1]["offload_bytes"] <= planned + max(planned, 16 << 20)
    gather(None)


class Wide(nn.Module):
    """A model with 2 MiB of parameters per layer, and eight times that of state under Adam with amsgrad."""

    def __init__(self, parts):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(1 << 20).bfloat16()) for _ in range(parts))

    def forward(self, scale):
        return sum(p.dot(p.detach()) for p in self.parts).float() * scale


def within_a_limit(rank, world_size, folder, saves):
    from internals import offload

    change(offload, BUFFER_BYTES=1 << 20)
    ctypes.CDLL(None).mallopt(
        -3, 1 << 20
    )  # M_MMAP_THRESHOLD: freed memory returns to the kernel, so that the limit counts
    torch.manual_seed(0)
    parts = 80 if world_size > 3 else 36 if saves else 24  # more if more threads run, or a rank's slice is smaller
    module = Wide(parts)
    optimizer = sw.optim.Adam(module.parameters(), amsgrad=True)
    model, optimizer = sw.wrap(module, optimizer, zero=2, offload=f"nvme:{folder}")
    model(1.0 + rank).backward()  # torch's one-time allocations
    model.zero_grad()
    with open("/proc/self/status") as file:
        used = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData:"))
    state_bytes = sw.describe()["models"][-1]["offload_bytes"]
    allowed = (
        2 * parts + (52 if saves else 40)
    ) << 20  # gradients that wait for peers, buffers, 8 MiB of stack a thread
    assert state_bytes > (1.4 if world_size <= 3 else 1.2) * allowed
    resource.setrlimit(resource.RLIMIT_DATA, (used + allowed, resource.RLIM_INFINITY))
    with pytest.raises(RuntimeError, match="allocate"):
        torch.empty(state_bytes, dtype=torch.uint8)
    model(1.0 + rank).backward()
    optimizer.step()
    model.zero_grad()
    if not saves:
        return [p[:9].tolist() for p in module.parameters()]
    with sw.Checkpointer(f"{folder}/saved", model, optimizer, snapshot="lazy") as checkpoints:
        checkpoints.save(2)
        checkpoints.wait()
        before = [p.detach().clone() for p in list(module.parameters())[:2]]
        model(1.0 + rank).backward()
        optimizer.step()
        model.zero_grad()
        assert checkpoints.restore() == 3
        assert all(map(torch.equal, before, list(module.parameters())[:2]))
    model(1.0 + rank).backward()
    optimizer.step()
    return [p[:9].tolist() for p in module.parameters()]


def test_more_state_than_a_memory_limit(fresh_ranks, world_size, tmp_path):
    with fresh_ranks(world_size) as team:
        saves = (
            LONG and world_size <= 3
        )  # the exchange at the ends of slices goes to all ranks: at 5 more than the limit leaves
        values = team.run(within_a_limit, folder=str(tmp_path), saves=saves)
    assert all(each == values[0] for each in values) and os.listdir(tmp_path) == ["saved"] * saves


# failures -------------------------------------------------------------------------------------------------------------


@on_every_rank()
def test_bad_values_are_refused(rank, world_size):
    module = Mlp()
    for value in ("disk", "nvme:", 3, True, "NVME:/tmp"):
        with pytest.raises(ValueError, match="offload must be None, 'cpu' or 'nvme:<folder>', got"):
            sw.wrap(module, sw.optim.AdamW(module.parameters()), offload=value)
        with pytest.raises(ValueError, match="offload must be"):
            sw.fully_shard(nn.Linear(2, 2), offload=value)
    for zero in (0, 2):
        with pytest.raises(ValueError, match=r"needs an optimizer of sw.optim .* got torch.optim.adamw.AdamW"):
            sw.wrap(module, torch.optim.AdamW(module.parameters()), zero=zero, offload="nvme:/tmp")
    with pytest.raises(ValueError, match=r"needs an optimizer of sw.optim .* got none"):
        sw.wrap(module, offload="nvme:/tmp")


@on_every_rank()
def test_cpu_is_accepted_and_does_nothing(rank, world_size):
    model, optimizer = sw.wrap(*build(OPTIMIZERS["AdamW"]), zero=2)
    losses = train(model, optimizer, rank)
    expected = whole(model, optimizer)
    model, optimizer = sw.wrap(*build(OPTIMIZERS["AdamW"]), zero=2, offload="cpu")
    assert train(model, optimizer, rank) == losses
    assert_same(whole(model, optimizer), expected, "cpu")
    assert "no effect" in sw.describe()["models"][-1]["offload"]


@on_every_rank()
def test_a_missing_folder_is_one_error_on_every_rank(rank, world_size):
    folder = folder_of(rank)
    for zero in (0, 2, 3):
        module, optimizer = build(OPTIMIZERS["AdamW"])
        mine = f"{folder}/gone" if rank == world_size - 1 else folder
        with pytest.raises(OSError, match=f"on rank {world_size - 1}: .*gone") as caught:
            sw.wrap(module, optimizer, zero=zero, offload=f"nvme:{mine}")
        assert caught.value.errno == errno.ENOENT
        assert same_everywhere(caught.value.strerror.replace("/gone'", "'", 1)) or world_size == 1
        model, optimizer = sw.wrap(module, optimizer, zero=zero, offload=f"nvme:{folder}")  # the same module again
        train(model, optimizer, rank, range(1))
        gather(None)


@on_every_rank(at_least=2)
def test_ranks_that_disagree_about_the_offload_get_an_error(rank, world_size):
    module, optimizer = build(OPTIMIZERS["AdamW"])
    with pytest.raises(sw.Error, match="offload"):
        sw.wrap(module, optimizer, zero=2, offload=f"nvme:{folder_of(rank)}" if rank else None)


def mount_small(folder):
    """Mount a disk of 64 KiB; return False if that is not permitted."""
    libc = ctypes.CDLL(None)
    return (
        libc.unshare(0x20000) == 0
        and libc.mount(b"none", b"/", None, 0x44000, None) == 0
        and libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, b"size=64k") == 0
    )


def on_a_full_disk(rank, world_size, folder):
    if rank == 0 and not mount_small(folder):
        return gather("not permitted")
    if gather("")[0]:
        return "not permitted"
    with pytest.raises(OSError, match="on rank 0: allocating .* bytes .* No space left") as caught:
        sw.wrap(*build(OPTIMIZERS["AdamW"]), zero=1, offload=f"nvme:{folder}")
    assert caught.value.errno == errno.ENOSPC
    assert os.statvfs(folder).f_bfree * os.statvfs(folder).f_frsize > 40 << 10
    module = Mlp()
    model, optimizer = sw.wrap(module, sw.optim.AdamW(module.parameters()), zero=1, offload=f"nvme:{folder}")
    for step in range(2):
        model(batch(rank, 6, 7, step=step)).square().mean().backward()
        optimizer.step()
    assert os.listdir(folder) == []
    return "done"


def test_a_full_disk_is_an_error_before_the_first_step(fresh_ranks, world_size, tmp_path):
    with fresh_ranks(world_size) as team:
        if "not permitted" in team.run(on_a_full_disk, folder=str(tmp_path)):
            pytest.skip("mounting is not permitted here")


def files_without_name(folder):
    """Return the file descriptors of this process for unnamed files in the folder."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(folder) and target.endswith("(deleted)"):
            found.append(int(name))
    return found


def with_a_broken_disk(rank, world_size, folder):
    small_buffers()
    model, optimizer = sw.wrap(*build(OPTIMIZERS["AdamW"]), zero=1, offload=f"nvme:{folder}")
    train(model, optimizer, rank, range(1))
    if rank == world_size - 1:
        (file,) = files_without_name(folder)
        os.truncate(f"/proc/self/fd/{file}", 8192)
    model(batch(rank, 6, 7, step=1)).square().mean().backward()
    if rank == world_size - 1:
        with pytest.raises(OSError, match=f"{folder}.*rank{rank}.* ends at byte") as caught:
            optimizer.step()
        assert caught.value.errno == errno.EIO
    else:
        with pytest.raises(sw.Error, match=f"rank {world_size - 1}: the optimizer's step failed, .* ends at byte"):
            optimizer.step()
    optimizer.zero_grad()
    model(batch(rank, 6, 7, step=2)).square().mean().backward()
    with pytest.raises((OSError, sw.Error), match="ends at byte"):  # each later step fails with it on all ranks
        optimizer.step()


def test_a_disk_that_fails_in_a_step_is_named_on_every_rank(fresh_ranks, world_size, tmp_path):
    with fresh_ranks(world_size) as team:
        team.run(with_a_broken_disk, folder=str(tmp_path))


def killed_in_the_middle(rank, world_size, folder, of_parameters):
    place, options = (
        f"nvme:{folder}",
        {"zero": 3, "share_parameters": False, "units": nn.Linear} if of_parameters else {"zero": 1},
    )
    offload = {"parameters": place} if of_parameters else place
    model, optimizer = sw.wrap(*build(OPTIMIZERS["AdamW"]), offload=offload, **options)
    train(model, optimizer, rank, range(2))
    assert len(files_without_name(folder)) == 1
    gather(None)
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(sw.CommError):
        train(model, optimizer, rank, range(2, 4))


@pytest.mark.parametrize("of_parameters", [False, True])
def test_a_killed_rank_leaves_nothing_behind(fresh_ranks, tmp_path, of_parameters):
    """Of the optimizer's state, or of parameters at home in a file."""
    with fresh_ranks(3) as team:
        team.start(killed_in_the_middle, folder=str(tmp_path), of_parameters=of_parameters)
        outcomes = team.wait(patient=True)
    assert [outcome.ok for outcome in outcomes] == [True, True, False], outcomes
    assert os.listdir(tmp_path) == []
