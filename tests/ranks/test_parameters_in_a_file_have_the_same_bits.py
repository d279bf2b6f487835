"""Law of offload={"parameters": "nvme:<folder>"} at private zero=3: losses, parameters, states and checkpoints have the bits of
slices in memory, on one host and several. The host has one file, without a name, that ends with its ranks. A folder
without a place, a limit or a disk that fails is one sentence on all ranks.
"""

import contextlib
import copy
import errno
import os
import pathlib
import re
import resource
import stat
import tempfile

import pytest
import torch
from harness import LONG, change, gather, in_turn, on_every_rank, same_everywhere
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch, sw
from test_a_module_is_built_in_slices import assert_is, init, on_meta
from test_hosts_fold_in_two_steps import hosts_of, on_hosts
from test_memory_is_held_to_the_plan import pss_bytes, settled
from test_offloaded_state_has_the_same_bits import (
    Mixed,
    assert_same,
    build,
    files_without_name,
    folder_of,
    mount_small,
    saved_bytes,
    train,
    whole,
)
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
PRIVATE = {"zero": 3, "share_parameters": False, "units": nn.Linear}
OPTIMIZERS = {
    "AdamW": lambda p: sw.optim.AdamW(p, lr=1e-2),
    "SGD momentum": lambda p: sw.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW master=False": lambda p: sw.optim.AdamW(p, lr=1e-2, master=False),
}
FORMS = {
    "plain": {},
    "bf16": {"precision": {"body": "bf16"}},
    "int8": {"gather": "int8"},
    "kept": {"reshard_after_forward": False},
}


def places(rank, optimizer=None, name="offload"):
    folder = folder_of(rank, name)
    return folder, {"parameters": f"nvme:{folder}", "optimizer": optimizer and f"{optimizer}:{folder}"}


def assert_alike(rank, options, name):
    found, planned = [], []
    folder, offload = places(rank, "nvme")
    for place in (None, offload, {"parameters": offload["parameters"]}):
        model, optimizer = sw.wrap(*build(OPTIMIZERS[name]), clip_grad_norm=1.0, offload=place, **PRIVATE, **options)
        described = sw.describe()["models"][-1]
        assert described.get("parameters_home") == (place and f"nvme:{folder}: a file")
        planned.append((described["planned_bytes"], described.get("parameter_bytes", 0)))
        found.append((train(model, optimizer, rank), whole(model, optimizer)))
        gather(None)
        assert os.listdir(folder) == []
    for losses, ends in found[1:]:
        assert losses == found[0][0], options
        assert_same(ends, found[0][1], options)
    assert planned[2][0] == planned[0][0] - planned[0][1] or not planned[0][1]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("form", FORMS)
@on_every_rank()
def test_slices_in_a_file_have_the_bits_of_slices_in_memory(rank, world_size, form, name):
    if LONG or in_turn(list(OPTIMIZERS), list(FORMS).index(form), of=3)[0] == name:
        assert_alike(rank, FORMS[form], name)


@pytest.mark.parametrize("shape", ["2+1", "crosswise"])
@on_every_rank(at_least=3)
def test_a_host_has_one_file(rank, world_size, shape):
    with on_hosts(hosts_of(shape, world_size)) as group:
        assert_alike(rank, {"process_group": group}, "AdamW")


@on_every_rank(at_least=3)
def test_checkpoints_have_the_same_bytes_and_are_restored(rank, world_size):
    _, offload = places(rank, "nvme")
    saved = {}
    for place in (None, offload):
        folder, losses = os.path.join(os.environ["SW_TEST_FOLDER"], f"saved-{place is None}"), {}
        for seed in (0, 1):
            model, optimizer = sw.wrap(*build(OPTIMIZERS["AdamW"], seed), offload=place, **PRIVATE)
            with sw.Checkpointer(folder, model, optimizer) as checkpoints:
                start = checkpoints.restore()
                train(model, optimizer, rank, range(start, 2))
                if start == 0:
                    checkpoints.save(1)
                losses[seed] = train(model, optimizer, rank, range(2, 4))
            assert start == 2 * seed
            gather(None)
        assert losses[0] == losses[1]
        saved[place is None] = saved_bytes(os.path.join(folder, "step-000002"))
    assert saved[True] == saved[False] and saved[True]


@on_every_rank(exactly=8 if LONG else 4)
def test_a_checkpoint_of_all_ranks_goes_on_at_half_of_them(rank, world_size):
    half, losses = world_size // 2, []
    group = torch.distributed.new_group(range(half))
    for number, place in enumerate((None, places(rank, "nvme")[1])):
        folder = os.path.join(os.environ["SW_TEST_FOLDER"], f"half-{number}")
        model, optimizer = sw.wrap(*build(OPTIMIZERS["AdamW"]), offload=place, **PRIVATE)
        train(model, optimizer, rank, range(2))
        sw.save(folder, model, optimizer)
        weights = os.path.join(os.environ["SW_TEST_FOLDER"], f"weights-{number}")
        sw.save_pretrained(model, weights)
        if rank >= half:
            continue
        model, optimizer = sw.wrap(*build(OPTIMIZERS["AdamW"], 1), offload=place, process_group=group, **PRIVATE)
        sw.load(folder, model, optimizer)
        losses.append((train(model, optimizer, rank, range(2, 4)), whole_of_some(model, optimizer, group)))
        loaded = sw.wrap(Mixed(), process_group=group, offload=place, weights=weights, **PRIVATE)
        saved = sw.full_state_dict(loaded)
        losses[-1] += (saved,)
    if rank < half:
        assert losses[0][0] == losses[1][0]
        assert_same(losses[1][1], losses[0][1], "half")
        assert all(bits_equal(losses[1][2][name], each) for name, each in losses[0][2].items())
    gather(None)


def whole_of_some(model, optimizer, group):
    state = copy.deepcopy(sw.full_optimizer_state_dict(model, optimizer))
    with sw.full_parameters(model):
        parameters = [p.detach().clone() for p in sw.unwrap(model).parameters()]
    gather(None, group)
    return parameters, state


@on_every_rank()
def test_a_module_of_the_meta_device_is_built_in_the_file(rank, world_size):
    from internals import sharded_groups

    _, offload = places(rank)
    found = []
    change(sharded_groups, _SETTLED_BYTES=1 << 10)  # pages leave in the middle
    for place in (None, offload):
        torch.manual_seed(5)
        module = on_meta()
        optimizer = sw.optim.AdamW(module.parameters())
        model, optimizer = sw.wrap(module, optimizer, init=init, offload=place, zero=3, share_parameters=False)
        found.append(sw.full_state_dict(model))
    assert_is(model, found[0])
    folder = os.path.join(folder_of(rank, "weights"), "model")
    sw.save_pretrained(model, folder)
    module = on_meta()
    optimizer = sw.optim.AdamW(module.parameters())
    model, _ = sw.wrap(module, optimizer, weights=folder, offload=offload, zero=3, share_parameters=False)
    assert_is(model, {name: found[0][name] for name in sw.full_state_dict(model)})


@on_every_rank()
def test_fully_shard_and_both_calls_of_states(rank, world_size):
    _, offload = places(rank)
    found = []
    for place in (None, offload):
        module, _ = build(OPTIMIZERS["AdamW"])
        module.turned = nn.Parameter(module.turned.detach().contiguous())  # as fully_shard demands
        sw.fully_shard(module, offload=place, units=nn.Linear)
        optimizer = sw.shard_optimizer(module, OPTIMIZERS["AdamW"](module.parameters()))
        train(module, optimizer, rank, range(2))
        weights, state = sw.full_state_dict(module), sw.full_optimizer_state_dict(module, optimizer)
        with sw.full_parameters(module, writable=True), torch.no_grad():
            for each in module.parameters():
                each.mul_(2)
        sw.load_full_state_dict(module, weights)
        sw.load_full_optimizer_state_dict(module, optimizer, copy.deepcopy(state))
        found.append((train(module, optimizer, rank, range(2, 4)), whole(module, optimizer)))
    assert found[0][0] == found[1][0]
    assert_same(found[1][1], found[0][1], "fully_shard")


@on_every_rank()
def test_a_deepspeed_program_with_offload_param(rank, world_size):
    folder, losses = folder_of(rank), []
    for home in ({}, {"offload_param": {"device": "nvme", "nvme_path": folder, "pin_memory": True}}):
        config = {
            "train_micro_batch_size_per_gpu": 6,
            "zero_optimization": {"stage": 3, **home},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        }
        torch.manual_seed(0)
        engine, *_ = sw.deepspeed.initialize(model=Mlp(), config=config)
        for step in range(3):
            loss = engine(batch(rank, 6, 7, step=step)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    assert sw.describe()["models"][-1]["parameters_home"] == f"nvme:{folder}: a file"
    assert losses[:3] == losses[3:]


class Long(nn.Module):
    """A model of layers of 4 MiB."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@on_every_rank(at_least=3)
def test_pages_leave_memory(rank, world_size):
    layers, held = 24, {}
    for place in (None, places(rank)[1]):
        torch.manual_seed(0)
        module = Long(layers)
        for each in module.parameters():
            each.requires_grad_(False)
        module.layers[0].weight.requires_grad_(True)
        model, optimizer = sw.wrap(module, sw.optim.SGD(module.parameters(), lr=0.1), offload=place, **PRIVATE)
        model(batch(rank, 2, 1024)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        settled()
        held[place is None] = pss_bytes()
        gather(None)
        del model, optimizer, module
    slices = layers * (4 << 20) / world_size
    assert held[True] - held[False] >= 0.8 * slices, (held, slices)


class LowWide(nn.Module):
    """One unit of bfloat16 layers: the pages of units are a fraction of their slices."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def peak_above_now(call):
    """Return the bytes of this process's highest resident memory during a call, above that before it."""

    def line(name):
        text = pathlib.Path("/proc/self/status").read_text()
        return int(re.search(rf"{name}:\s+(\d+) kB", text)[1]) << 10

    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = line("VmRSS")
    call()
    return line("VmHWM") - before


@on_every_rank(at_least=3)
def test_a_step_holds_no_more_than_its_buffers(rank, world_size):
    layers = 64
    _, offload = places(rank, "nvme")
    with torch.device("meta"):
        module = LowWide(layers)
    optimizer = sw.optim.AdamW(module.parameters(), lr=1e-2)
    model, optimizer = sw.wrap(module, optimizer, init=True, offload=offload, **PRIVATE)
    slices = layers * (2 << 20) // world_size
    settled()
    for step in range(2):  # the first one makes masters, of twice the slices' bytes
        model(batch(rank, step, 1024).bfloat16()).float().square().mean().backward()
        above = peak_above_now(optimizer.step)
        buffers = 3 * (16 << 20) if step == 0 else 0  # which stay
        assert above < buffers + slices // 2, (step, above, slices)
        optimizer.zero_grad()


# failures -------------------------------------------------------------------------------------------------------------


@on_every_rank()
def test_bad_values_are_refused(rank, world_size):
    module, folder = Mixed(), folder_of(rank)
    ours = sw.optim.AdamW(module.parameters())
    for value, sentence in (
        ({"activations": "cpu"}, r"may have the keys 'parameters' and 'optimizer', got 'activations'"),
        ({"parameters": "disk"}, r"offload\['parameters'\] must be None, 'cpu' or 'nvme:<folder>', got 'disk'"),
        ({"optimizer": 3}, r"offload\['optimizer'\] must be None, 'cpu' or 'nvme:<folder>', got 3"),
    ):
        with pytest.raises(ValueError, match=sentence):
            sw.wrap(module, ours, zero=3, share_parameters=False, offload=value)
    place = {"parameters": f"nvme:{folder}"}
    for options in ({"zero": 0}, {"zero": 2}, {"zero": 3}, {"zero": 3, "share_parameters": True}):
        with pytest.raises(ValueError, match="which needs zero=3 and share_parameters=False, got zero="):
            sw.wrap(module, ours, offload=place, **options)
    with pytest.raises(ValueError, match=r"needs an optimizer of sw.optim .* got torch.optim.adamw.AdamW"):
        sw.wrap(module, torch.optim.AdamW(module.parameters()), offload=place, **PRIVATE)
    with pytest.raises(ValueError, match="checkpoint_units|offload must be None, 'cpu' or 'nvme:<folder>', got"):
        sw.checkpoint_units(module, offload=place)
    for kind in ({"parameters": "cpu"}, {"parameters": "cpu", "optimizer": "cpu"}, {}):  # no effect here
        model, optimizer = sw.wrap(*build(OPTIMIZERS["AdamW"]), offload=kind, zero=2)
        train(model, optimizer, rank, range(1))


def assert_refused(world_size, place, error, sentence, number=None):
    """Check that a wrap is one sentence on all ranks, and that the same module trains then."""
    module, optimizer = build(OPTIMIZERS["AdamW"])
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(error, match=sentence) as caught:
        sw.wrap(module, optimizer, offload=place, **PRIVATE)
    assert number is None or caught.value.errno == number
    assert same_everywhere(str(caught.value)) or world_size == 1
    assert all(map(torch.equal, module.parameters(), before))
    return module, optimizer


@on_every_rank()
def test_a_folder_without_a_place_is_one_sentence(rank, world_size):
    folder, place = places(rank)
    gone = {"parameters": f"nvme:{folder}/gone"}
    module, optimizer = assert_refused(
        world_size, gone, OSError, "No such file or directory: no place for .*gone", errno.ENOENT
    )
    model, optimizer = sw.wrap(module, optimizer, offload=place, **PRIVATE)
    train(model, optimizer, rank, range(1))
    file = {"parameters": f"nvme:{folder_of(rank, 'other')}/file"}
    pathlib.Path(file["parameters"].removeprefix("nvme:")).touch()
    gather(None)
    assert_refused(world_size, file, OSError, "Not a directory: no place for .*file", errno.ENOTDIR)
    if os.geteuid() != 0:
        locked = tempfile.mkdtemp(dir=os.environ["SW_TEST_FOLDER"])
        os.chmod(locked, stat.S_IRUSR | stat.S_IXUSR)
        assert_refused(
            world_size, {"parameters": f"nvme:{gather(locked)[0]}"}, OSError, "Permission denied", errno.EACCES
        )


def on_a_full_disk(rank, world_size, folder):
    if rank == 0 and not mount_small(folder):
        return gather("not permitted")
    if gather("")[0]:
        return "not permitted"
    place = {"parameters": f"nvme:{folder}"}
    module, optimizer = assert_refused(
        world_size, place, OSError, "No space left on device: no place for ", errno.ENOSPC
    )
    assert os.listdir(folder) == []
    model, optimizer = sw.wrap(module, optimizer, **PRIVATE)
    train(model, optimizer, rank, range(1))
    small = nn.Linear(7, 9)  # a disk in memory has a place for it
    model, optimizer = sw.wrap(small, sw.optim.AdamW(small.parameters()), zero=3, share_parameters=False, offload=place)
    model(batch(rank, 6, 7)).square().mean().backward()
    optimizer.step()
    assert rank or "a file system in memory" in sw.describe()["models"][-1]["parameters_home"]
    return "done"


def test_a_full_disk_is_one_sentence_before_the_first_step(fresh_ranks, world_size, tmp_path):
    with fresh_ranks(world_size) as team:
        if "not permitted" in team.run(on_a_full_disk, folder=str(tmp_path)):
            pytest.skip("mounting is not permitted here")


def descriptors_but(spare, hard):
    """Take all file descriptors of a limit of 1024 but `spare`."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    held = []
    with contextlib.suppress(OSError):
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    for _ in range(spare):
        os.close(held.pop())
    return held


def under_limits(rank, world_size, folder):
    place = {"parameters": f"nvme:{folder}"}
    model, optimizer = sw.wrap(*build(OPTIMIZERS["AdamW"]), **PRIVATE)  # makes the group
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    assert_refused(world_size, place, (MemoryError, OSError), "RLIMIT_FSIZE|File too large")
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = len(os.listdir("/proc/self/fd"))
    for _ in range(12):
        model, optimizer = sw.wrap(*build(OPTIMIZERS["AdamW"]), offload=place, **PRIVATE)
        train(model, optimizer, rank, range(1))
    assert len(files_without_name(folder)) <= 2
    del model, optimizer
    gather(None)
    said = []
    for spare in range(12):
        held = [] if rank else descriptors_but(spare, hard)
        module, optimizer = build(OPTIMIZERS["AdamW"])
        try:
            sw.wrap(module, optimizer, offload=place, **PRIVATE)
            said.append("")
        except (MemoryError, OSError, sw.Error) as error:
            said.append(str(error))
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert same_everywhere(said[-1]) or world_size == 1
        assert not said[-1] or re.search("ulimit -n|RLIMIT_NOFILE", said[-1]), said[-1]
    assert said[-1] == "" and any(folder in each for each in said), said
    del module, optimizer
    assert len(os.listdir("/proc/self/fd")) <= count + 4
    return os.listdir(folder)


def test_limits_are_one_sentence_and_no_descriptor_stays(fresh_ranks, world_size, tmp_path):
    with fresh_ranks(world_size) as team:
        assert all(each == [] for each in team.run(under_limits, folder=str(tmp_path)))


def with_a_broken_disk(rank, world_size, folder):
    model, optimizer = sw.wrap(*build(OPTIMIZERS["AdamW"]), offload={"parameters": f"nvme:{folder}"}, **PRIVATE)
    train(model, optimizer, rank, range(1))
    gather(None)
    if rank == world_size - 1:
        (file,) = files_without_name(folder)
        os.truncate(f"/proc/self/fd/{file}", 4096)
    gather(None)
    with pytest.raises((sw.CommError, OSError), match="ends at byte"):
        train(model, optimizer, rank, range(1, 3))


def test_a_disk_that_fails_in_a_gather_is_named_on_every_rank(fresh_ranks, world_size, tmp_path):
    with fresh_ranks(world_size) as team:
        team.run(with_a_broken_disk, folder=str(tmp_path))
