"""Laws of state beyond plain parameters, on one rank: it is restored, or named in an error before a byte is written; a
save captures one moment of it.
"""

from __future__ import annotations

import collections
import copy
import errno
import gc
import json
import logging
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy
import pytest
import shardwright as sw
import torch
from shardwright._engine import CheckpointPlan
from shardwright.checkpoint import files, inventory
from shardwright.checkpoint.folder import retention
from shardwright.checkpoint.state import content
from torch import nn


class Counting(nn.Linear):
    """A module with extra state that is not a tensor."""

    count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_state_of_every_kind_comes_back(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.bias.requires_grad_(False)
    state = {
        "zero-dim": torch.tensor(3.0), "none": None, "nested": {"x": torch.ones(2), "y": [1, torch.zeros(1, 2)]}, "yes": True,
        "half": torch.ones(2, 3, dtype=torch.bfloat16), "whole": torch.arange(3), "nothing": (), "empty": torch.zeros(0),
        "nan": float("nan"), "$key": 1, "turned": torch.arange(6.0).reshape(2, 3).t(), "wave": torch.ones(2, dtype=torch.complex64),
    }  # fmt: skip
    optimizer.state[model.weight], optimizer.state[model.bias] = dict(state), {"frozen": torch.ones(1)}
    sw.save(tmp_path / "a", model, optimizer)
    other = torch.optim.SGD(model.parameters(), lr=0.2)
    sw.load(tmp_path / "a", model, other)
    found = other.state[model.weight]
    assert repr(sorted(found.items())) == repr(sorted(state.items())) and found["half"].dtype == torch.bfloat16
    assert other.state[model.bias] == {"frozen": torch.ones(1)} and other.param_groups[0]["lr"] == 0.1


def test_what_changes_between_saves_is_saved(tmp_path: Path) -> None:
    """A save of the same tensors as the last one lists nothing again. Each change of a tensor or of an option's type is
    noticed.
    """
    model = nn.Sequential(collections.OrderedDict(first=nn.Linear(3, 2), norm=nn.BatchNorm1d(2)))
    model.register_buffer("table", torch.arange(9.0).reshape(3, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    weight, group = model.first.weight, optimizer.param_groups[0]

    def move() -> None:
        weight.data = weight.data.clone() + 1

    def replace() -> None:
        optimizer.state[weight]["exp_avg"] = optimizer.state[weight]["exp_avg"] + 1

    def rename() -> None:
        model._modules = {"other" if name == "first" else name: child for name, child in model._modules.items()}

    def turn() -> None:  # the same address, read in another order
        model.table.data = model.table.data.t()

    def shorten() -> None:  # the same address, fewer elements
        model.table.data = model.table.data[:1]

    def convert() -> None:  # the same address and size, other values
        model.table.data = model.table.data.view(torch.int32)

    changes: list[tuple[Callable[[], object], int]] = [
        (lambda: None, 0), (shorten, 1), (convert, 1), (lambda: group.update(lr=0.5), 0), (lambda: model.norm.running_mean.add_(1), 0), (move, 1), (replace, 1),
        (lambda: model.register_buffer("count", torch.ones(3)), 1), (rename, 1), (turn, 1), (lambda: group.update(lr=torch.tensor(0.25)), 1),
    ]  # fmt: skip
    with (
        mock.patch.object(inventory, "model_tensors", wraps=inventory.model_tensors) as listed,
        sw.Checkpointer(tmp_path, model, optimizer) as checkpoints,
    ):
        for number, (change, lists) in enumerate(changes):
            for step in (2 * number, 2 * number + 1):
                model(torch.randn(4, 3)).sum().backward()
                optimizer.step()
                listed.reset_mock()
                checkpoints.save(step)
                checkpoints.wait()
                if step % 2 == 0:
                    change()
            assert listed.call_count == lists, number
            sw.save(tmp_path / f"again-{number}", model, optimizer, step=step + 1)
            ours = tmp_path / f"step-{step + 1:06d}"
            for name in ("model.safetensors", "optimizer.json", "optimizer-00001-of-00001.safetensors"):
                assert (ours / name).read_bytes() == (tmp_path / f"again-{number}" / name).read_bytes(), (number, name)


def test_what_torch_would_not_match_is_named(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    sw.save(tmp_path / "a", model, optimizer)
    turned = torch.optim.SGD([{"params": [model.bias]}, {"params": [model.weight]}], lr=0.1)
    with pytest.raises(sw.CheckpointError, match="'bias' is in group 1 there, in group 0 here"):
        sw.load(tmp_path / "a", model, turned)
    optimizer.param_groups[1][3] = "no string"
    with pytest.raises(sw.CheckpointError, match=r"param_groups\.1 has an option whose name is not a string"):
        sw.save(tmp_path / "b", model, optimizer)
    assert not (tmp_path / "b").exists()
    with pytest.raises(
        ValueError, match="optimizer must be a torch.optim.Optimizer, or a list or dict of them, got a int"
    ):
        sw.save(tmp_path / "b", model, 3)
    with pytest.raises(ValueError, match="directory must be UTF-8, got b'.*xff'"):
        sw.Checkpointer(os.fsencode(tmp_path) + b"/\xff", model)


def test_extra_state_is_part_of_the_model(tmp_path: Path) -> None:
    model, plain = Counting(3, 2), nn.Linear(3, 2)
    model.count = 5
    sw.save(tmp_path / "a", model)
    sw.save(tmp_path / "b", plain)
    found = Counting(3, 2)
    sw.load(tmp_path / "a", found)
    assert found.count == 5
    before = model.weight.detach().clone()
    with pytest.raises(sw.CheckpointError, match="it lacks '_extra_state'") as caught:
        sw.load(tmp_path / "b", model)
    assert type(caught.value).__name__ == "CheckpointError"  # a subclass that has no name of its own outside
    assert torch.equal(model.weight, before)
    with pytest.raises(sw.CheckpointError, match="it has '_extra_state', which the model here lacks"):
        sw.load(tmp_path / "a", plain)


def test_what_a_checkpoint_does_not_hold_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sw.Checkpointer(tmp_path, model, optimizer) as checkpoints:
        checkpoints.save(0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with sw.Checkpointer(tmp_path, model, optimizer, scheduler=scheduler) as checkpoints:
        with caplog.at_level(logging.WARNING, "shardwright"):
            assert checkpoints.restore() == 1
    assert "holds no state of the scheduler" in caplog.text and "scaler" not in caplog.text


def test_modules_and_parameters_named_as_the_metadata_is(tmp_path: Path) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(2))
    model.other = nn.Parameter(torch.randn(3))
    model.format = model.other
    model.complex = nn.Module()
    model.complex.weight = model.other
    sw.save(tmp_path / "a", model)
    kept = {name: value.detach().clone() for name, value in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    sw.load(tmp_path / "a", model)
    assert all(torch.equal(value, kept[name]) for name, value in model.named_parameters())
    header = (tmp_path / "a" / "model.safetensors").read_bytes()
    metadata = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]
    assert metadata == {"format": "pt", "complex.weight": "other"}


def slow(tmp_path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> sw.Checkpointer:
    return sw.Checkpointer(tmp_path, model, optimizer, snapshot="lazy", bandwidth_bytes_per_s=32 << 20)


def test_a_learning_rate_that_is_a_tensor_belongs_to_the_snapshot(tmp_path: Path) -> None:
    model = nn.Linear(1024, 2048)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with slow(tmp_path, model, optimizer) as checkpoints:
        checkpoints.save(0)
        scheduler.step()
        assert checkpoints.progress["busy"] and optimizer.param_groups[0]["lr"] == 0.25
        optimizer.step()
        checkpoints.wait()
        assert checkpoints.restore() == 1 and optimizer.param_groups[0]["lr"] == 0.5


def test_a_save_that_fails_after_its_threads_began_ends_before_its_memory_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(1024, 2048)
    model.weight = nn.Parameter(model.weight.detach().t().clone().t())  # read from a copy that the save holds
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    class Broken:
        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            raise RuntimeError("a peer left")

    with slow(tmp_path, model, optimizer) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(inventory, "released_slices", lambda _: ({}, {0}))
            patch.setattr(inventory, "whole_parameters", lambda *_, **__: Broken())
            with pytest.raises(sw.CheckpointError, match="could not be saved: RuntimeError: a peer left"):
                checkpoints.save(0)
        assert not checkpoints.progress["busy"]
        checkpoints.save(1)
        checkpoints.wait()
        assert checkpoints.restore() == 2
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-000002"]


def test_a_manifest_that_cannot_be_read_for_a_moment_does_not_cost_the_best_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_descriptors(path: str) -> None:
        error = sw.CheckpointError("opening failed")
        error.errno = errno.EMFILE
        raise error

    with sw.Checkpointer(tmp_path, nn.Linear(2, 1), keep_best=1) as checkpoints:
        for step, metric in enumerate((1.0, 3.0, 2.0)):
            with monkeypatch.context() as patch:
                if step == 2:
                    folders = mock.Mock(wraps=retention.CheckpointFolder, side_effect=out_of_descriptors)
                    patch.setattr(retention, "CheckpointFolder", folders)
                checkpoints.save(step, metric=metric)
                checkpoints.wait()
    assert "step-000001" in os.listdir(tmp_path)


def test_a_failed_save_through_torch_leaves_the_old_folder_alone(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    model = nn.Linear(3, 2)

    def save(**more: object) -> None:
        writer = sw.checkpoint.StorageWriter(tmp_path / "a")
        dcp.save({"model": model.state_dict(), **more}, storage_writer=writer)

    save()
    before = (tmp_path / "a" / "MANIFEST.json").read_bytes()
    with pytest.raises(BaseException, match="what is a object: a checkpoint holds"):  # of torch, which is no Exception
        save(what=object())
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a" / "MANIFEST.json").read_bytes() == before


@pytest.mark.parametrize("step", [-1, 2**53, 2**64 + 3, 1.5, True])
def test_a_step_that_no_reader_would_take_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: object
) -> None:
    with pytest.raises(ValueError, match=r"step must be an integer in \[0, 2\*\*53\), got"):
        sw.save(tmp_path / "a", nn.Linear(2, 1), step=step)
    if type(step) is int:  # nor would the engine write it
        said = "the manifest to be written: step, .* is missing or out of range"
        with monkeypatch.context() as patch:
            patch.setattr(files, "check_step", lambda step: step)
            with pytest.raises(
                sw.CheckpointError, match=said if step == 2**53 else rf"begin: step must be .*, got {step}"
            ):
                sw.save(tmp_path / "a", nn.Linear(2, 1), step=step)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("step", [-1, 2**64])
def test_the_engine_refuses_a_step_that_no_word_holds(tmp_path: Path, step: int) -> None:
    plan = CheckpointPlan([], [])
    folder = str(tmp_path / "a")
    with pytest.raises(OverflowError, match=rf"commit: step must be an int in \[0, 2\*\*64\), got {step}"):
        plan.commit(folder=folder, replaces=None, nonce="n", step=step, world_size=1, tallies=[], creator=plan)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("how", ["data", "numpy", "a small tensor", "one value"])
def test_a_write_outside_the_step_fails_a_lazy_save(tmp_path: Path, how: str) -> None:
    model = nn.Module()
    model.large, model.small = nn.Parameter(torch.ones(12 << 18)), nn.Parameter(torch.ones(100))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with sw.Checkpointer(
        tmp_path, model, optimizer, snapshot="lazy", threads=1, bandwidth_bytes_per_s=4 << 20
    ) as checkpoints:
        checkpoints.save(0)
        if how == "data":
            model.large.data.clamp_(max=0.5)
        elif how == "numpy":
            model.large.detach().numpy()[:] = 2
        elif how == "one value":  # where no sample is, so the count of writes alone tells it
            with torch.no_grad():
                model.large[100_000] = 5
        else:
            model.small.data.lerp_(torch.zeros(100), 0.1)
        name = "small" if how == "a small tensor" else "large"
        optimizer.step()
        with pytest.raises(sw.CheckpointError, match=f"'{name}' was changed before the optimizer's step"):
            checkpoints.wait()
        assert not (tmp_path / "step-000001").exists()


def test_types_of_torch_and_ordered_dicts_come_back_as_they_were(tmp_path: Path) -> None:
    ordered = collections.OrderedDict([("b", torch.ones(2)), ("a", [1])])
    state = {
        "size": torch.Size([2, 3]),
        "device": torch.device("cuda", 1),
        "ordered": ordered,
        "keys": collections.OrderedDict({3: 4}),
    }
    model = nn.Linear(1, 1)
    sw.save(tmp_path / "a", model, extra=state)
    found = sw.load(tmp_path / "a", model)
    assert repr(found) == repr(state) and [type(each) for each in found.values()] == [
        type(each) for each in state.values()
    ]
    for value in (Path("/x"), collections.deque([1])):
        with pytest.raises(sw.CheckpointError, match=r"extra\.here is a (PosixPath|deque|collections.deque)"):
            sw.save(tmp_path / "b", model, extra={"here": value})


def test_numbers_of_numpy_are_numbers_and_others_are_named(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    with sw.Checkpointer(tmp_path, model, keep_last=numpy.int64(2), keep_every=numpy.int32(5)) as checkpoints:
        assert checkpoints.save(numpy.int64(2), every=numpy.int16(3))
    assert (tmp_path / "step-000003").exists()
    sw.save(tmp_path / "a", model, step=numpy.uint8(7), timeout_s=numpy.float32(20))
    for options in (
        {"timeout_s": "5"},
        {"timeout_s": True},
        {"bandwidth_bytes_per_s": True},
        {"keep_last": 1.0},
        {"threads": "2"},
    ):
        ((name, value),) = options.items()
        with pytest.raises(ValueError, match=f"{name} must be .*, got {value!r}"):
            sw.Checkpointer(tmp_path / "b", model, **options)
    assert not (tmp_path / "b").exists()


def test_a_zero_byte_in_a_name_is_told_with_the_name(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_parameter("wei\0ght", nn.Parameter(torch.ones(2)))
    with pytest.raises(sw.CheckpointError, match=r"tensor 'wei\\x00ght' has a zero byte in its name"):
        sw.save(tmp_path / "a", model)


class Wrapped(torch.optim.Optimizer):
    """An Optimizer by class only, like accelerate's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> dict:
        return self.optimizer.state

    @property
    def param_groups(self) -> list:
        return self.optimizer.param_groups

    def step(self, closure: object = None) -> None:
        self.optimizer.step()


class Stepping:
    """Not an Optimizer, but an object with groups and state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups, self.state = optimizer.param_groups, optimizer.state


def test_an_optimizer_in_a_wrapper_is_found_and_what_is_none_is_named(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    with sw.Checkpointer(tmp_path, model, Wrapped(inner), snapshot="lazy") as checkpoints:
        for step in range(2):
            checkpoints.save(step)
            inner.step()
    with pytest.raises(
        ValueError, match="it needs a torch.optim.Optimizer, got a Stepping, which has no register_step_pre_hook"
    ):
        sw.Checkpointer(tmp_path, model, Stepping(inner), snapshot="lazy")
    sw.Checkpointer(tmp_path, model, inner).close()


def test_what_fails_once_the_directory_is_taken_lets_go_of_it(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def refuse(hook: object) -> None:
        raise RuntimeError("no hooks here")

    optimizer.register_step_pre_hook = refuse
    with pytest.raises(RuntimeError, match="no hooks here"):
        sw.Checkpointer(tmp_path, model, optimizer, snapshot="lazy")
    sw.Checkpointer(tmp_path, model, optimizer).close()


def test_a_state_of_numpys_generator_that_is_kept_is_the_present_one() -> None:
    """A normal number is made with another, which stays pending outside the numbers of the generator."""
    before = numpy.random.get_state()
    numpy.random.seed(3)
    kept: dict[str, object] = {}
    numpy.random.normal()
    pending = numpy.random.get_state()
    changes: list[Callable[[], object]] = [lambda: None, numpy.random.normal, lambda: numpy.random.set_state(pending)]
    changes += [numpy.random.normal, numpy.random.rand, lambda: None, lambda: numpy.random.seed(3)]
    assert content._has_numpy_mark(numpy), "this numpy is read in the fast form"
    try:
        for number, change in enumerate(changes):
            change()
            found: dict[str, torch.Tensor] = {}
            expected: dict[str, torch.Tensor] = {}
            assert content.random_state(found, kept) == content.random_state(expected), number
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in found), number
    finally:
        numpy.random.set_state(before)


@pytest.mark.parametrize("how", ["load_state_dict", "load", "restore"])
@pytest.mark.parametrize("snapshot", ["copy", "lazy"])
def test_a_load_releases_the_tensors_that_it_replaces(tmp_path: Path, snapshot: str, how: str) -> None:
    """A Checkpointer keeps the tensors of its last save, to list nothing anew; not beyond a load, which would double them."""
    model = nn.Linear(30, 20)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    with sw.Checkpointer(tmp_path / "c", model, optimizer, snapshot=snapshot) as checkpoints:
        for step in range(2):
            checkpoints.save(step)
            checkpoints.wait()
        before = [weakref.ref(value) for state in optimizer.state.values() for value in state.values()]
        if how == "load_state_dict":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        else:
            optimizer.state.clear()
            if how == "restore":
                assert checkpoints.restore() == 2
            else:
                sw.load(tmp_path / "c" / "step-000002", model, optimizer)
        gc.collect()
        assert before and not any(each() is not None for each in before)
        checkpoints.save(2)  # finds all anew
        saved = [{key: value.clone() for key, value in state.items()} for state in optimizer.state.values()]
        optimizer.step()
        assert checkpoints.restore() == 3
    for state, before_step in zip(optimizer.state.values(), saved, strict=True):
        assert all(torch.equal(state[key], value) for key, value in before_step.items())


def test_a_lazy_save_keeps_what_a_load_replaces_while_it_runs(tmp_path: Path) -> None:
    """Its threads read the old tensors. A load into another model, in the middle of a save, changes nothing of it."""
    model, other = nn.Linear(1000, 1000), nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    sw.save(tmp_path / "other", other)

    class LoadsInside:
        def state_dict(self) -> dict[str, int]:
            sw.load(tmp_path / "other", other)
            return {"x": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    options = {"user_state": LoadsInside(), "snapshot": "lazy", "bandwidth_bytes_per_s": 30_000_000}
    with sw.Checkpointer(tmp_path / "c", model, optimizer, **options) as checkpoints:
        checkpoints.save(0)
        checkpoints.wait()
        checkpoints.save(1)
        old = [weakref.ref(value) for state in optimizer.state.values() for value in state.values()]
        saved = copy.deepcopy(optimizer.state_dict()["state"])
        newer = copy.deepcopy(optimizer.state_dict())
        for state in newer["state"].values():
            state["exp_avg"].fill_(7.0)
        optimizer.load_state_dict(newer)
        gc.collect()
        assert all(each() is not None for each in old)  # until wait(), whether or not the threads have ended
        checkpoints.wait()
        assert checkpoints.restore() == 2
    for state, expected in zip(optimizer.state_dict()["state"].values(), saved.values(), strict=True):
        assert all(torch.equal(state[key], value) for key, value in expected.items())


def test_conversions_to_and_from_torch_save_take_what_they_can_and_name_the_rest(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    sw.save(tmp_path / "a", model, extra={"epoch": 3, "seen": torch.ones(2)})
    sw.checkpoint.dcp_to_torch_save(tmp_path / "a", tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt")
    assert found["epoch"] == 3 and torch.equal(found["seen"], torch.ones(2))
    assert torch.equal(found["model"]["weight"], model.weight)
    (tmp_path / "junk.pt").write_bytes(b"junk" * 100)
    torch.save(model, tmp_path / "module.pt")
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / ".metadata").write_bytes(b"")
    for name, said in (
        ("junk.pt", "is no file of torch.save with tensors and plain values alone"),
        ("module.pt", "`shardwright ckpt import` takes the model of such a file"),
        ("tensor.pt", "holds a Tensor, and a checkpoint needs a dict"),
        ("none.pt", "does not exist"),
    ):
        with pytest.raises(sw.CheckpointError, match=said):
            sw.checkpoint.torch_save_to_dcp(tmp_path / name, tmp_path / "b")
    for name, said in (("theirs", "is a folder of torch's FileSystemWriter: convert it"), ("none", "MANIFEST.json")):
        with pytest.raises(sw.CheckpointError, match=said):
            sw.checkpoint.dcp_to_torch_save(tmp_path / name, tmp_path / "b.pt")
