"""Law: checkpoints of the first release stay readable in every form, and bytes that docs/format.md fixes have not
changed.

`checkpoint` (test_checkpoint_seams.py) is one rank's. `two_ranks` has several model and optimizer files with their
index, written by `write_two_ranks` on two ranks. `through_dcp` was written by torch.distributed.checkpoint through
StorageWriter, by `write_through_dcp` on one rank.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import shardwright as sw
import torch
import torch.distributed.checkpoint as dcp
from shardwright.checkpoint import StorageReader, StorageWriter
from torch import nn

GOLDEN = Path(__file__).parent / "golden"
STEP = 7
EXTRA = {"epoch": 3, "seen": (1, "é")}


def numbered(tensor: torch.Tensor, first: int) -> torch.Tensor:
    """Fill tensors by arithmetic only, so that no torch release changes the values."""
    return ((torch.arange(tensor.numel()) % 97 + first) / 4).reshape(tensor.shape).to(tensor.dtype)


def training(filled: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 3))
    model[1].bfloat16()
    model.register_buffer("count", torch.zeros(3, dtype=torch.int64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 if filled else 0.25, momentum=0.875)
    with torch.no_grad():
        for number, tensor in enumerate([*model.parameters(), *model.buffers()]):
            tensor.copy_(numbered(tensor, number) if filled else torch.zeros_like(tensor))
    for number, parameter in enumerate(model.parameters() if filled else ()):
        optimizer.state[parameter] = {"momentum_buffer": numbered(parameter.detach(), 50 + number)}
    return model, optimizer


def write_two_ranks(path: Path) -> None:
    """Write the folder on two ranks, whose generators have short states."""
    random.setstate((3, (*[1] * 624, 624), None))
    sw.save(path, *training(), step=STEP, extra=EXTRA, max_file_bytes=400)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = [name for name, _ in model.named_parameters()]
    held = {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}
    groups = [{"params": names, "lr": optimizer.param_groups[0]["lr"], "momentum": 0.875}]
    return {"model": model.state_dict(), "optim": {"state": held, "param_groups": groups}, "extra": {"epoch": 3}}


def write_through_dcp(path: Path) -> None:
    writer = StorageWriter(path, step=STEP, max_file_bytes=400)
    dcp.save(state_of(*training()), storage_writer=writer, no_dist=True)


def assert_same(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    expected, expected_optimizer = training()
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert optimizer.param_groups[0]["lr"] == 0.5
    for ours, theirs in zip(model.parameters(), expected.parameters()):
        found, wanted = optimizer.state[ours], expected_optimizer.state[theirs]
        assert torch.equal(found["momentum_buffer"], wanted["momentum_buffer"])


@pytest.mark.parametrize("name", ["two_ranks", "through_dcp"])
def test_the_folders_load(tmp_path: Path, name: str) -> None:
    shutil.copytree(GOLDEN / name, tmp_path / name)
    model, optimizer = training(filled=False)
    extra = sw.load(tmp_path / name, model, optimizer)
    assert_same(model, optimizer)
    assert extra == EXTRA if name == "two_ranks" else extra["extra.epoch"] == 3
    assert json.loads((GOLDEN / name / "state.json").read_text())["step"] == STEP


def test_a_checkpointer_resumes_from_two_ranks(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "two_ranks", tmp_path / f"step-{STEP:06d}")
    model, optimizer = training(filled=False)
    with sw.Checkpointer(tmp_path, model, optimizer) as checkpoints:
        assert checkpoints.restore() == STEP
    assert_same(model, optimizer)


@pytest.mark.parametrize("name", ["two_ranks", "through_dcp"])
def test_torch_loads_the_folders(tmp_path: Path, name: str) -> None:
    shutil.copytree(GOLDEN / name, tmp_path / name)
    expected, zeros = (state_of(*training()) for _ in range(2))
    for values in (zeros["model"], *zeros["optim"]["state"].values()):
        for key, value in values.items():
            values[key] = torch.zeros_like(value)
    found = {"model": zeros["model"], "optim": {"state": zeros["optim"]["state"]}}
    dcp.load(found, storage_reader=StorageReader(tmp_path / name), no_dist=True)
    for key, value in expected["model"].items():
        assert torch.equal(found["model"][key], value), key
    for key, values in expected["optim"]["state"].items():
        assert torch.equal(found["optim"]["state"][key]["momentum_buffer"], values["momentum_buffer"]), key


def promised(folder: Path, names: list[str]) -> dict[str, Any]:
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    entries = {each["path"]: each for each in manifest["files"]}
    return {name: ((folder / name).read_bytes(), entries[name]) for name in names}


def test_one_rank_writes_what_two_have_written(tmp_path: Path) -> None:
    write_two_ranks(tmp_path / "new")
    golden = GOLDEN / "two_ranks"
    names = sorted(path.name for path in golden.iterdir() if path.name.startswith(("model", "optimizer")))
    assert sum(name.startswith("model-") for name in names) > 1 < sum(name.startswith("optimizer-") for name in names)
    assert "model.safetensors.index.json" in names
    assert promised(tmp_path / "new", names) == promised(golden, names)
    both = [sorted(p.name for p in each.iterdir()) for each in (golden, tmp_path / "new")]
    assert both[0] == both[1]


def test_torch_writes_through_us_what_it_has_written(tmp_path: Path) -> None:
    write_through_dcp(tmp_path / "new")
    golden = GOLDEN / "through_dcp"
    states = [json.loads((each / "state.json").read_text()) for each in (golden, tmp_path / "new")]
    added = [states[1]["dcp"].pop(name) for name in ("paths", "streams")]  # since the golden folder was written
    assert all(path[-1] for path in added[0].values()) and added[1] == []
    assert states[0] == states[1] and set(states[0]["dcp"]) == {"tensors", "objects"}
    if list(states[0]["dcp"]["tensors"]) == list(states[1]["dcp"]["tensors"]):
        names = sorted(p.name for p in golden.iterdir() if p.suffix == ".safetensors")  # the order is torch's to choose
        assert promised(tmp_path / "new", names) == promised(golden, names)
