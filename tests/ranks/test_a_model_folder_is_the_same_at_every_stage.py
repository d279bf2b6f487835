"""Law: save_pretrained() writes the same bytes at any world size and stage, which from_pretrained() and load_pretrained() read:
whole, cast, converted back and merged. After a kill at any moment the folder is the old one or the new one, with all other
files and folders in it. An error is one on all ranks, and the folder is as it was.
"""

import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import random
import resource
import signal
import sys
import tempfile
import time
import types
from unittest import mock

import pytest
import torch
from harness import LONG, gather, on_every_rank
from internals import model_folder, writes_in_parts
from oracle.fold import bits_equal
from peer import PEER, sw
from test_a_module_is_built_in_slices import PRIVATE, STAGES, Model, every_stage
from test_hosts_fold_in_two_steps import hosts_of, on_hosts
from test_memory_is_held_to_the_plan import pss_bytes, settled
from test_weights_are_loaded_in_slices import shared_folder
from test_whole_parameters_are_streamed import Lora, model_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
KILLS = 40 if LONG else 3
TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}


def stored(folder):
    """Read a folder as the formats' texts have it."""
    folder = pathlib.Path(folder)
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"] if index.exists() else None
    files = sorted({*names.values()}) if names else ["model.safetensors"]
    found = {}
    for file in files:
        data = (folder / file).read_bytes()
        size = int.from_bytes(data[:8], "little")
        for name, each in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                begin, end = (8 + size + at for at in each["data_offsets"])
                flat = torch.frombuffer(bytearray(data[begin:end]) or bytearray(8), dtype=TYPES[each["dtype"]])
                found[name] = flat[: (end - begin) // flat.itemsize].view(each["shape"])
                assert names is None or names[name] == file
    return found


def digest(folder):
    found = hashlib.sha256()
    for path in sorted(pathlib.Path(folder).iterdir()):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def wanted_of(model):
    """Return the whole state, each tensor under its first name."""
    state = sw.full_state_dict(model)
    return {name: each for name, each in state.items() if name != "tied.weight"}


def assert_stored(folder, wanted):
    found = stored(folder)
    assert found.keys() == wanted.keys()
    assert [name for name, each in found.items() if not bits_equal(each, wanted[name].contiguous())] == []


@on_every_rank()
def test_the_bytes_are_the_same_at_every_stage_and_loadable(rank, world_size):
    folder = shared_folder(rank)
    seen = set()
    for stage, options in STAGES.items():
        model = sw.wrap(model_of(), **options)
        wanted = wanted_of(model)
        sw.save_pretrained(model, folder / stage, max_shard_size="60KB")
        gather(None)
        assert_stored(folder / stage, wanted)
        seen.add(digest(folder / stage))
        assert len(list((folder / stage).iterdir())) > 2
        assert sw.load_pretrained(model, folder / stage) == ([], [])
        sw.save_pretrained(model, folder / f"{stage} low", dtype=torch.bfloat16)
        gather(None)
        floats = {n: each.bfloat16() if each.is_floating_point() else each for n, each in wanted.items()}
        assert_stored(folder / f"{stage} low", floats)
        assert sorted(os.listdir(folder / f"{stage} low")) == ["model.safetensors"]
    assert len(seen) == 1
    digests = pathlib.Path(os.environ["SW_TEST_FOLDER"], "digest-of-a-model")
    if rank == 0:  # of other world sizes
        before = digests.read_text() if digests.exists() else seen.copy().pop()
        digests.write_text(before)
        assert {before} == seen
    assert sorted(os.listdir(folder)) == sorted(s + low for s in STAGES for low in ("", " low"))
    gather(None)


@every_stage
@on_every_rank(exactly=4)
def test_a_mesh_of_rows_writes_alike(rank, world_size, stage):
    folder = shared_folder(rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sw.wrap(model_of(), device_mesh=mesh, **STAGES[stage])
    wanted = wanted_of(model)
    sw.save_pretrained(model, folder / "model", max_shard_size=30_000)
    gather(None)
    assert_stored(folder / "model", wanted)
    gather(None)


@every_stage
@on_every_rank(at_least=3)
def test_several_hosts_write_alike(rank, world_size, stage):
    folder = shared_folder(rank)
    with on_hosts(hosts_of("2+1", world_size)) as group:
        model = sw.wrap(model_of(), process_group=group, **STAGES[stage])
        wanted = wanted_of(model)
        sw.save_pretrained(model, folder / "model")
        gather(None)
        assert_stored(folder / "model", wanted)


class Config:
    """A stand-in for a transformers configuration."""

    def __init__(self):
        self.kind = "stand-in"

    def save_pretrained(self, folder):
        pathlib.Path(folder, "config.json").write_text(json.dumps(vars(self), sort_keys=True))


class Tied(Model):
    """A stand-in for a model of transformers before version 5."""

    _checkpoint_conversion_mapping = {"^model\\.layers": "blocks"}
    _tied_weights_keys = ["head.weight"]
    _keys_to_ignore_on_save = ["gain"]

    def __init__(self):
        super().__init__()
        self.config, self.dtype = Config(), torch.float32

    def save_pretrained(self, *_):
        raise AssertionError("not used")


@every_stage
@on_every_rank()
def test_a_model_is_stored_under_the_names_that_it_is_loaded_from(rank, world_size, stage):
    folder = shared_folder(rank)
    model = sw.wrap(Tied(), **STAGES[stage])
    state = sw.full_state_dict(model)
    sw.save_pretrained(model, folder / "model")
    gather(None)
    names = {n: n.replace("blocks", "model.layers") for n in state if n not in ("head.weight", "gain")}
    assert_stored(folder / "model", {new: state[name] for name, new in names.items()})
    config = json.loads((folder / "model" / "config.json").read_text())
    assert config == {"kind": "stand-in", "dtype": "float32", "architectures": ["Tied"]}
    assert vars(model.module.config) == {"kind": "stand-in"}  # the live one is as it was
    gather(None)


class Stock(nn.Linear):
    """A stand-in for transformers' PreTrainedModel."""

    def save_pretrained(self, folder):
        pass

    def is_remote_code(self):
        return False


class Overriding(Stock):
    def save_pretrained(self, folder):
        pathlib.Path(folder, "more.json").write_text("{}")


class OfAHub(nn.Linear):
    def save_pretrained(self, folder):
        pass


@on_every_rank()
def test_the_trainer_saves_in_parts_what_transformers_own_method_saves(rank, world_size):
    stand_in = types.SimpleNamespace(PreTrainedModel=Stock)
    found = {}
    for kind in (Stock, Overriding, OfAHub):
        model = kind(3, 4)
        wrapped = sw.wrap(model, **PRIVATE)
        with mock.patch.dict(sys.modules, {"transformers.modeling_utils": stand_in}):
            found[kind] = writes_in_parts(wrapped, model, "/folder")
            model.save_pretrained = print
            assert not writes_in_parts(wrapped, model, "/folder")
    assert found == {Stock: True, Overriding: False, OfAHub: False}
    gather(None)


@every_stage
@on_every_rank()
def test_merged_adapters_are_stored(rank, world_size, stage):
    folder = shared_folder(rank)
    torch.manual_seed(6)
    model = sw.wrap(nn.Sequential(nn.Linear(7, 40), Lora(nn.Linear(40, 50))), **STAGES[stage])
    wanted = dict(sw.iter_full_parameters(model, merge_lora=True))
    with pytest.raises(ValueError, match="merge_lora=True writes the merged model"):
        sw.save_pretrained(model, folder / "model")
    sw.save_pretrained(model, folder / "model", merge_lora=True)
    gather(None)
    assert_stored(folder / "model", wanted)
    gather(None)


@every_stage
@on_every_rank()
def test_an_error_is_one_on_all_ranks_and_the_folder_stays(rank, world_size, stage):
    folder = shared_folder(rank)
    model = sw.wrap(model_of(), **STAGES[stage])
    sw.save_pretrained(model, folder / "model")
    gather(None)
    before = digest(folder / "model")
    bad = [
        ({"max_shard_size": "5 apples"}, ValueError, "a text such as \"5GB\", got '5 apples'"),
        ({"max_shard_size": 0}, ValueError, "max_shard_size must be a number of bytes"),
        ({"dtype": torch.int8}, ValueError, "dtype must be a floating-point torch.dtype or None, got torch.int8"),
    ]
    for given, kind, match in bad:
        with pytest.raises(kind, match=match):
            sw.save_pretrained(model, folder / "model", **given)
    for place in (os.getcwd(), "/", os.path.dirname(os.getcwd())):
        with pytest.raises(ValueError, match="folder must be no mount and not hold the working directory"):
            sw.save_pretrained(model, place)
    if rank == 0:
        (folder / "file").write_text("")
    gather(None)
    with pytest.raises(sw.CheckpointError, match="'.*file' cannot be written: '.*file' is no folder"):
        sw.save_pretrained(model, folder / "file")
    if world_size > 1:
        with pytest.raises(sw.CheckpointError, match="plan is .* on rank 0 and .* on rank"):
            sw.save_pretrained(model, folder / "model", dtype=torch.bfloat16 if rank else None)
    limits, victim = resource.getrlimit(resource.RLIMIT_FSIZE), world_size - 1
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for poor in (0, victim):  # no space as rank 0 makes the files, and as another one writes
        if rank == poor:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            with pytest.raises(sw.CheckpointError, match="File too large|RLIMIT_FSIZE") as told:
                sw.save_pretrained(model, folder / "model")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert len({*gather(str(told.value))}) == 1
    assert digest(folder / "model") == before
    assert sorted(os.listdir(folder)) == ["file", "model"]
    gather(None)


@on_every_rank()
def test_other_files_and_folders_stay(rank, world_size):
    folder = shared_folder(rank)
    model = sw.wrap(model_of(), **PRIVATE)
    sw.save_pretrained(model, folder / "model", max_shard_size=30_000)
    if rank == 0:
        (folder / "model" / "checkpoint-5").mkdir()
        (folder / "model" / "checkpoint-5" / "rng.pth").write_text("state")
        (folder / "model" / "tokenizer.json").write_text("words")
        (folder / "model" / "pytorch_model.bin").write_text("an older form of the weights")
        (folder / "model" / "link").symlink_to("tokenizer.json")
    for swaps in (True, False):  # a file system that can exchange names, and one that cannot
        with mock.patch.object(model_folder, "exchange", model_folder.exchange if swaps else cannot):
            gather(None)
            sw.save_pretrained(model, folder / "model")
        names = ["checkpoint-5", "link", "model.safetensors", "tokenizer.json"]
        assert sorted(os.listdir(folder / "model")) == names
        assert (folder / "model" / "checkpoint-5" / "rng.pth").read_text() == "state"
        assert not (folder / "model" / "checkpoint-5").is_symlink() and (folder / "model" / "link").is_symlink()
        assert os.listdir(folder) == ["model"]
    gather(None)


@on_every_rank(exactly=1)
def test_what_the_save_does_not_write_outlives_it(rank, world_size):
    """The configurations, the folder's mode, and what another program makes in it as the save commits."""
    folder = shared_folder(rank) / "model"
    model = sw.wrap(nn.Linear(30, 30), **PRIVATE)
    exchange = model_folder._Folder._exchange
    for swaps in (True, False):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o2710)
        for name in ("config.json", "generation_config.json"):
            (folder / name).write_text(name)

        def late(self):
            (folder / f"late {swaps}").write_text("log")
            (folder / f"late folder {swaps}").mkdir()
            exchange(self)

        with mock.patch.object(model_folder, "exchange", model_folder.exchange if swaps else cannot):
            with mock.patch.object(model_folder._Folder, "_exchange", late):
                sw.save_pretrained(model, folder)
        assert (folder / "config.json").read_text() == "config.json"
        assert (folder / "generation_config.json").exists() and (folder / "model.safetensors").exists()
        assert (folder / f"late {swaps}").read_text() == "log" and (folder / f"late folder {swaps}").is_dir()
        assert folder.stat().st_mode & 0o7777 == 0o2710
        assert os.listdir(folder.parent) == ["model"]


@on_every_rank(exactly=1)
def test_the_next_save_ends_what_a_killed_one_began(rank, world_size):
    """On a file system that cannot exchange names, with the process's end at each change of a name, in turn."""
    model = sw.wrap(nn.Linear(30, 30), **PRIVATE)
    with mock.patch.object(model_folder, "exchange", cannot):
        for at in itertools.count():
            with tempfile.TemporaryDirectory(prefix="model-") as parent:
                folder = pathlib.Path(parent, "model")
                (folder / "checkpoint-5").mkdir(parents=True)
                (folder / "checkpoint-5" / "file").write_text("state")
                (folder / "words").write_text("words")
                with names_counted(counted_down(at)):
                    try:
                        sw.save_pretrained(model, folder)
                        is_over = True
                    except (Killed, sw.CheckpointError):
                        is_over = False
                if at % 2:
                    folder.mkdir(exist_ok=True)  # as programs do as they start
                sw.save_pretrained(model, folder)
                assert (folder / "checkpoint-5" / "file").read_text() == "state", at
                assert not (folder / "checkpoint-5").is_symlink(), at
                assert sorted(os.listdir(folder)) == ["checkpoint-5", "model.safetensors", "words"], at
                assert os.listdir(parent) == ["model"], at
            if is_over:
                break
        assert at > 7


def cannot(*_):
    return False


def fill(model, value):
    with sw.full_parameters(model, writable=True), torch.no_grad():
        for each in model.module.parameters():
            each.fill_(value)


def save_for_ever(rank, world_size, folder):
    model = sw.wrap(nn.Sequential(nn.Linear(600, 700), nn.Linear(500, 400), nn.Linear(30, 30)), **PRIVATE)
    for value in itertools.count(1):
        fill(model, value)
        sw.save_pretrained(model, folder, max_shard_size="1MB" if value % 2 else "5GB")


def values_of(folder):
    return {value for each in stored(folder).values() for value in each.unique().tolist()}


@pytest.mark.timeout(600)
def test_after_a_kill_at_any_moment_the_folder_is_old_or_new(world_size, fresh_ranks):
    seed = int(time.time())
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="model-") as parent:
        folder = pathlib.Path(parent, "model")
        (folder / "checkpoint-5").mkdir(parents=True)
        (folder / "checkpoint-5" / "file").write_text("state")
        for _ in range(KILLS):
            with fresh_ranks(world_size) as team:
                team.start(save_for_ever, folder=str(folder))
                begun = time.monotonic()
                first = (
                    (folder / "model.safetensors").stat().st_mtime_ns if (folder / "model.safetensors").exists() else 0
                )
                while time.monotonic() < begun + 30:
                    found = [each for each in folder.glob("model*") if each.stat().st_mtime_ns > first]
                    if found:
                        break
                    time.sleep(0.005)
                time.sleep(chance.uniform(0, 0.2))
                for rank in range(world_size) if chance.random() < 0.5 else [chance.randrange(world_size)]:
                    team.signal(rank, signal.SIGKILL)
                if chance.random() < 0.5:
                    time.sleep(0.1)
            assert len(values_of(folder)) == 1, seed
            assert (folder / "checkpoint-5" / "file").read_text() == "state", seed
        with fresh_ranks(world_size) as team:
            team.run(save_once, folder=str(folder))
        assert os.listdir(parent) == ["model"], seed  # and the next save removes what the dead have left
        assert values_of(folder) == {7.0}
        assert sorted(os.listdir(folder)) == ["checkpoint-5", "model.safetensors"]
        assert not (folder / "checkpoint-5").is_symlink()


def save_once(rank, world_size, folder):
    model = sw.wrap(nn.Linear(30, 30), **PRIVATE)
    fill(model, 7)
    sw.save_pretrained(model, folder)


class Killed(Exception):
    pass


@on_every_rank(exactly=1)
def test_each_step_of_the_commit_leaves_one_folder_or_the_other(rank, world_size):
    """As the test above, with the process's end at each change of a name, in turn."""
    old = sw.wrap(nn.Linear(30, 30), **PRIVATE)
    with tempfile.TemporaryDirectory(prefix="model-") as parent:
        folder = pathlib.Path(parent, "model")
        for at in itertools.count():
            fill(old, 1)
            sw.save_pretrained(old, folder)
            (folder / "checkpoint-5").mkdir(exist_ok=True)
            fill(old, 2)
            with names_counted(counted_down(at)):
                try:
                    sw.save_pretrained(old, folder)
                    is_over = True
                except (Killed, sw.CheckpointError):
                    is_over = False
            assert values_of(folder) in ({1.0}, {2.0}), at
            assert (folder / "checkpoint-5").is_dir(), at
            if is_over:
                break
        assert at > 5 and values_of(folder) == {2.0} and os.listdir(parent) == ["model"]


def counted_down(left):
    """Return a wrapper of functions of which call number `left`, and all later ones, end the process."""

    def counted(function):
        def call(*arguments, **options):
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return function(*arguments, **options)

        return call

    return counted


def names_counted(counted):
    """Return a context in which each change of a name is one of counted(), and a killed process cleans up nothing."""
    stack = contextlib.ExitStack()
    for name in ("rename", "link", "symlink", "unlink", "mkdir"):
        stack.enter_context(mock.patch.object(os, name, counted(getattr(os, name))))
    stack.enter_context(mock.patch.object(model_folder, "exchange", counted(model_folder.exchange)))
    stack.enter_context(mock.patch.object(model_folder._Folder, "abandon", model_folder._Folder._end))
    return stack


@on_every_rank(at_least=2)
def test_no_rank_holds_more_than_its_slices(rank, world_size):
    folder = shared_folder(rank)
    model = sw.wrap(nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(8)]), **PRIVATE)
    gather(None)
    before, peak = settled(), []
    write = os.pwrite

    def watched(*arguments):
        peak.append(pss_bytes())
        return write(*arguments)

    with mock.patch.object(os, "pwrite", watched):
        sw.save_pretrained(model, folder / "model", max_shard_size="40MB")
    assert max(peak) - before <= 32 << 20, (max(peak) - before) >> 20
    gather(None)
