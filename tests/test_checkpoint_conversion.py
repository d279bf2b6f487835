"""Law: `ckpt import` keeps the bits of another library's checkpoint, and that library loads what `ckpt export` writes
with the same bits. Nothing in a pickle is executed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import shardwright as sw
import torch
import torch.distributed.checkpoint as dcp
from shardwright.optim import moments
from shardwright.options.name_map import NameMap
from shardwright_tools import convert
from shardwright_tools.cli import main
from shardwright_tools.convert.contents import Contents, Lazy
from shardwright_tools.convert.dcp_format import read_dcp
from shardwright_tools.convert.megatron import is_megatron
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

pytestmark = pytest.mark.timeout(300)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 3, dtype=torch.bfloat16)
        self.tied = self.first.weight


def trained(seed: int = 0, steps: int = 2) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    groups = [
        {"params": [*model.first.parameters()]},
        {"params": [*model.norm.parameters(), *model.last.parameters()], "lr": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.25)
    for _ in range(steps):
        model.last(model.norm(model.first(torch.randn(4, 5))).bfloat16()).float().square().sum().backward()
        optimizer.step()
    return model, optimizer


def assert_same(found: tuple[nn.Module, Any], expected: tuple[nn.Module, Any]) -> None:
    state = expected[0].state_dict()
    assert all(torch.equal(value, state[name]) for name, value in found[0].state_dict().items())
    if found[1] is not None:
        mine, theirs = found[1].state_dict(), expected[1].state_dict()
        assert [group["lr"] for group in mine["param_groups"]] == [group["lr"] for group in theirs["param_groups"]]
        assert mine["state"].keys() == theirs["state"].keys()
        for number, values in theirs["state"].items():
            assert values.keys() == mine["state"][number].keys()
            assert all(torch.equal(mine["state"][number][key], value) for key, value in values.items())


def run(*words: object) -> int:
    return main(["ckpt", *map(str, words)])


def test_dcp_folders_go_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = trained()
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save({**state, "epoch": 3, "note": {"x": [1, None]}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    flat = {f"model.{name}": value for name, value in model.state_dict().items()}
    dcp.save({"app": {"model": state["model"]}, "other": torch.ones(2)}, checkpoint_id=tmp_path / "app", no_dist=True)
    dcp.save(flat, checkpoint_id=tmp_path / "flat", no_dist=True)
    for name in ("dcp", "app", "flat"):
        assert run("import", tmp_path / name, tmp_path / f"{name}-ours", "--step", 9) == 0
        again = trained(1, 1)
        extra = sw.load(tmp_path / f"{name}-ours", again[0], again[1] if name == "dcp" else None)
        assert_same((again[0], again[1] if name == "dcp" else None), (model, optimizer))
        if name == "dcp":
            assert extra["epoch"] == 3 and extra["note.x"] == [1, None]
    sw.save(tmp_path / "saved", model, optimizer, extra={"mean": torch.arange(3.0)}, step=4)
    assert run("export", tmp_path / "saved", tmp_path / "out", "--to", "dcp") == 0
    again = trained(1, 1)
    state = {"model": get_model_state_dict(again[0]), "optim": get_optimizer_state_dict(*again), "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    again[0].load_state_dict(state["model"])
    torch.distributed.checkpoint.state_dict.set_optimizer_state_dict(*again, state["optim"])
    assert_same(again, (model, optimizer))
    assert state["step"] == 4 and len(os.listdir(tmp_path)) == 8


@pytest.mark.parametrize("to", ["torch", "dcp", "deepspeed-universal"])
def test_moments_in_blocks_of_int8_leave_as_float32(tmp_path: Path, to: str) -> None:
    model = torch.nn.Linear(5, 3)
    optimizer = sw.optim.AdamW(model.parameters(), state_dtype="int8")
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    sw.save(tmp_path / "saved", model, optimizer)
    assert run("export", tmp_path / "saved", tmp_path / "out", "--to", to) == 0
    expected = moments.decoded(optimizer.state[model.weight]["exp_avg"], "exp_avg", 15).reshape(3, 5)
    plain = torch.nn.Linear(5, 3)
    wide = torch.optim.AdamW(plain.parameters())
    if to == "torch":
        wide.load_state_dict(torch.load(tmp_path / "out", weights_only=True)["optimizer"])
    else:
        assert run("import", tmp_path / "out", tmp_path / "again") == 0
        sw.load(tmp_path / "again", plain, wide)
    assert torch.equal(wide.state[plain.weight]["exp_avg"], expected) and expected.any()


def test_torch_files_and_safetensors_go_both_ways(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, optimizer = trained()
    sw.save(tmp_path / "saved", model, optimizer, extra={"mean": torch.arange(3.0)}, step=4)
    assert run("export", tmp_path / "saved", tmp_path / "out.pt", "--to", "torch") == 0
    body = torch.load(tmp_path / "out.pt", weights_only=True)
    again = trained(1, 1)
    again[0].load_state_dict(body["model"])
    again[1].load_state_dict(body["optimizer"])
    assert_same(again, (model, optimizer))
    assert body["step"] == 4 and torch.equal(body["extra"]["mean"], torch.arange(3.0))
    assert body["model"]["tied"].data_ptr() == body["model"]["first.weight"].data_ptr()

    torch.save(
        {"state_dict": model.state_dict(), "epoch": 3}, tmp_path / "a.ckpt", _use_new_zipfile_serialization=False
    )
    parts = [{n: v for n, v in model.state_dict().items() if n.startswith("first")}]
    parts += [{n: v for n, v in model.state_dict().items() if n not in parts[0] and n != "tied"}]
    for number, part in enumerate(parts):
        (tmp_path / "hf").mkdir(exist_ok=True)
        safetensors.save_file(part, tmp_path / "hf" / f"model-{number}.safetensors")
    index = {"weight_map": {n: f"model-{number}.safetensors" for number, part in enumerate(parts) for n in part}}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "hf" / "config.json").write_text("{}")
    for name in ("out.pt", "a.ckpt", "hf"):
        assert run("import", tmp_path / name, tmp_path / f"{name}-ours") == 0
        other, _ = trained(1, 0)
        sw.load(tmp_path / f"{name}-ours", other)
        assert_same((other, None), (model, optimizer))
    assert (tmp_path / "hf-ours" / "config.json").exists() and run("verify", tmp_path / "hf-ours") == 0
    index["weight_map"]["first.weight"] = "../a.ckpt"
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run("import", tmp_path / "hf", tmp_path / "x") == 1 and not (tmp_path / "x").exists()


def test_a_folder_of_several_forms_is_read_in_one_order(tmp_path: Path) -> None:
    """A whole file before parts, safetensors before torch.save, as transformers has it."""
    forms = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"]
    for number, name in enumerate(forms):
        stem, _, end = name.removesuffix(".index.json").partition(".")
        file = tmp_path / (f"{stem}-1-of-1.{end}" if name.endswith("json") else name)
        torch.save({"w": torch.full((2,), float(number))}, file)
        if end == "safetensors":
            text = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
            file.write_bytes(len(text).to_bytes(8, "little") + text + struct.pack("<2f", number, number))
        if name.endswith("json"):
            (tmp_path / name).write_text(json.dumps({"weight_map": {"w": file.name}}))
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(2))
    model = sw.wrap(module)
    for number, name in enumerate(forms):
        assert convert.read(str(tmp_path)).model["w"].read().tolist() == [number] * 2
        sw.load_pretrained(model, tmp_path)
        assert module.w.tolist() == [number] * 2
        (tmp_path / name).unlink()


def test_names_and_dtypes_change_on_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    sw.save(tmp_path / "saved", model, optimizer)
    (tmp_path / "map.toml").write_text("include = ['^layers\\.0\\.']\n[rename]\n'^(\\d+)\\.' = 'layers.\\1.'\n")
    (tmp_path / "map.json").write_text(json.dumps({"rename": {r"^(\d+)\.": r"layers.\1."}}))
    assert (
        run(
            "export",
            tmp_path / "saved",
            tmp_path / "a",
            "--map",
            tmp_path / "map.json",
            "--dtype",
            "bf16",
            "--to",
            "dcp",
        )
        == 0
    )
    found = convert.read(str(tmp_path / "a"))
    assert list(found.model) == ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]
    assert found.groups is not None and found.groups[0]["params"] == list(found.model)
    weight, master = found.model["layers.0.weight"].read(), found.state["layers.0.weight"]["master"].read()
    assert (
        weight.dtype == torch.bfloat16
        and torch.equal(master, model[0].weight)
        and torch.equal(weight, master.bfloat16())
    )
    assert run("import", tmp_path / "a", tmp_path / "b", "--dtype", "fp32") == 0  # takes the masters
    holder = nn.Module()
    holder.layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    again = torch.optim.SGD(holder.parameters(), lr=0.1, momentum=0.5)
    sw.load(tmp_path / "b", holder, again)
    assert_same((holder.layers, again), (model, optimizer))
    if hasattr(__import__("sys"), "stdlib_module_names") and __import__("sys").version_info >= (3, 11):
        assert run("export", tmp_path / "saved", tmp_path / "c", "--map", tmp_path / "map.toml") == 0
        assert list(convert.read(str(tmp_path / "c")).model) == ["layers.0.weight", "layers.0.bias"]
    (tmp_path / "map.json").write_text(json.dumps({"rename": {"weight|bias": "x"}}))
    assert run("export", tmp_path / "saved", tmp_path / "d", "--map", tmp_path / "map.json") == 2
    assert "two tensors the name '0.x'" in capsys.readouterr().err and not (tmp_path / "d").exists()
    for bad in ({"rename": {"(": ""}}, {"rename": {"a": r"\1"}}, {"renames": {}}, {"include": "x"}, []):
        (tmp_path / "map.json").write_text(json.dumps(bad))
        with pytest.raises(ValueError):
            NameMap.from_file(tmp_path / "map.json")


class Attack:
    def __reduce__(self) -> Any:
        return (os.mkdir, (os.environ["TARGET_OF_ATTACK"],))


def test_nothing_pickled_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TARGET_OF_ATTACK", str(tmp_path / "executed"))
    torch.save({"model": {"w": torch.ones(2)}, "attack": Attack()}, tmp_path / "a.pt")
    dcp.save({"model": {"w": torch.ones(2)}, "attack": Attack()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name in ("a.pt", "dcp"):
        assert run("import", tmp_path / name, tmp_path / f"{name}-ours") == 0
        assert "left out: attack" in capsys.readouterr().out
    with open(tmp_path / "dcp" / ".metadata", "wb") as file:
        pickle.dump(Attack(), file)
    assert run("import", tmp_path / "dcp", tmp_path / "x") == 1
    assert "is not the metadata" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists() and not (tmp_path / "x").exists()
    for name, content in (
        ("b.pt", b"no zip"),
        ("c.safetensors", b"\xff" * 20),
        ("d.safetensors", b"\x02" + bytes(7) + b"{}"),
    ):
        (tmp_path / name).write_bytes(content)
        assert run("import", tmp_path / name, tmp_path / "x") == 1
        assert capsys.readouterr().err.count("\n") == 1
    assert run("import", tmp_path / "none", tmp_path / "x") == 2 and run("import", tmp_path, tmp_path / "x") == 1


GOLDEN = Path(__file__).parent / "golden" / "deepspeed"


class DeepSpeedNet(nn.Module):
    """The module that golden/deepspeed/make.py trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.frozen = nn.Parameter(torch.zeros(5), requires_grad=False)
        self.last = nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))


def deepspeed_training(low: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = DeepSpeedNet().to(torch.bfloat16 if low else torch.float32)
    groups = [{"params": [*model.first.parameters()]}, {"params": [*model.last.parameters()]}]
    return model, torch.optim.AdamW(groups, lr=0.0)


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: {"fp32": state.get("master", p.detach()), **state} for p, state in optimizer.state.items()}


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "universal"])
def test_deepspeeds_checkpoints_have_the_live_engines_bits(tmp_path: Path, name: str) -> None:
    expected = torch.load(GOLDEN / "expected.pt", weights_only=True)["zero2" if name == "universal" else name]
    low = name != "zero1"
    for options, is_low in (((), low), (("--dtype", "fp32"), False)):
        source = GOLDEN / name / "tag" if name == "universal" else GOLDEN / name
        assert run("import", source, tmp_path / f"ours{len(options)}", *options) == 0
        plain = deepspeed_training(is_low)
        model, optimizer = sw.wrap(*plain)
        sw.load(tmp_path / f"ours{len(options)}", model, optimizer)
        found = values_of(plain[0], optimizer)
        for parameter, values in expected.items():
            weight = plain[0].get_parameter(parameter)
            assert torch.equal(weight, values["fp32"].reshape(weight.shape).to(weight.dtype))
            for key, value in values.items():
                assert torch.equal(found[parameter][key], value.reshape(weight.shape)), (parameter, key)
            assert found[parameter]["step"] == 2
        assert found.keys() == expected.keys()
        assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5]
        assert torch.equal(plain[0].frozen.float(), torch.arange(5.0)) and plain[0].count.tolist() == [0, 1, 2]
        contents = convert.read(str(tmp_path / f"ours{len(options)}"))
        assert contents.step == 2 and contents.extra["extra"]["epoch"] == 3


def test_a_universal_export_reads_back(tmp_path: Path) -> None:
    assert run("import", GOLDEN / "zero2", tmp_path / "a") == 0
    assert run("export", tmp_path / "a", tmp_path / "b", "--to", "deepspeed-universal") == 0
    assert run("import", tmp_path / "b", tmp_path / "c") == 0
    assert run("diff", tmp_path / "a", tmp_path / "c", "--model") == 0
    first, second = (convert.read(str(tmp_path / name)) for name in "ac")
    for name, state in first.state.items():
        assert state.keys() == second.state[name].keys()
        assert all(torch.equal(value.read(), second.state[name][key].read()) for key, value in state.items())
    assert first.groups == second.groups and first.step == second.step == 2


class MegatronBlock(nn.Module):
    """The layout of a layer of golden/megatron/make.py, under the names in Megatron's checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention, self.mlp = nn.Module(), nn.Module()
        self.self_attention.linear_proj, self.mlp.linear_fc2 = nn.Linear(4, 4), nn.Linear(16, 4)
        for part, name, width in ((self.self_attention, "linear_qkv", 12), (self.mlp, "linear_fc1", 16)):
            layer = nn.Linear(4, width)
            layer.layer_norm_weight, layer.layer_norm_bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
            part.add_module(name, layer)


def megatron_training() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Module()
    model.embedding, model.decoder = nn.Module(), nn.Module()
    model.embedding.word_embeddings, model.embedding.position_embeddings = nn.Embedding(8, 4), nn.Embedding(4, 4)
    model.decoder.layers = nn.ModuleList(MegatronBlock() for _ in range(2))
    model.decoder.final_layernorm, model.output_layer = nn.LayerNorm(4), nn.Linear(4, 8, bias=False)
    return model, torch.optim.AdamW(model.parameters(), lr=0.0)


def test_a_checkpoint_of_megatron_has_the_live_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden = GOLDEN.with_name("megatron")
    expected = torch.load(golden / "expected.pt", weights_only=True)
    assert run("import", golden, tmp_path / "ours") == 0
    assert "common.pt.args, of class argparse.Namespace" in capsys.readouterr().out
    plain = megatron_training()
    model, optimizer = sw.wrap(*plain)
    sw.load(tmp_path / "ours", model, optimizer)
    stored = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    names = {p: name for name, p in plain[0].named_parameters()}
    found = {names[p]: state for p, state in optimizer.state.items()}
    for live, value in expected["model"].items():
        name = live
        for old, new in stored.items():
            name = name.replace(old, new)
        assert torch.equal(plain[0].get_parameter(name), value), name
        for key, each in expected["state"][live].items():
            assert torch.equal(found[name][key], each), (name, key)
    assert len(found) == len(expected["model"]) == len(names)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (1e-3, 0.1)
    contents = convert.read(str(tmp_path / "ours"))
    assert contents.step == 1 and contents.extra["extra"]["opt_param_scheduler"]["max_lr"] == 1e-3


def test_what_megatrons_files_do_not_say_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "megatron"
    weight = torch.arange(6.0).reshape(2, 3)
    state = {"block.layers.a.weight": weight, "block.layers.b.bias": weight[0], "other.layers.0.weight": weight}
    state["optimizer.distributed.dp_group_idx_0.gbuf_idx_0.param"] = weight
    state["optimizer.state.fp32_param.other.layers.0.weight"] = weight + 1
    dcp.save(state, checkpoint_id=source, no_dist=True)
    (source / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    groups = [{"lr": 0.5, "weight_decay": 0.1}, {"lr": 0.5, "weight_decay": 0.0}]
    torch.save({"optimizer": {"optimizer": {"param_groups": groups}}, "iteration": 4}, source / "common.pt")
    assert run("import", source, tmp_path / "ours") == 0
    said = capsys.readouterr().out
    assert (
        "1 of the distributed optimizer" in said.replace("0 more", "1") and "which of the optimizer's 2 groups" in said
    )
    contents = convert.read(str(tmp_path / "ours"))
    assert list(contents.model) == ["block.layers.a.weight", "block.layers.b.bias", "other.layers.0.weight"]  # no stack
    assert contents.groups == [{"lr": 0.5, "params": ["other.layers.0.weight"]}] and contents.step == 4
    assert torch.equal(contents.state["other.layers.0.weight"]["master"].read(), weight + 1)


def of_megatron(place: Path, state: dict[str, Any], optimizer: Any = None, **common: Any) -> Path:
    dcp.save(state, checkpoint_id=place, no_dist=True)
    (place / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({"optimizer": optimizer, **common}, place / "common.pt")
    return place


def test_each_block_of_megatrons_layers_is_taken_apart_or_named(tmp_path: Path, capsys: Any) -> None:
    weight = torch.arange(24.0).reshape(4, 2, 3)
    state = {
        "two.layers.a": weight, "two.layers.b": weight[:, 0],  # another depth than num_layers
        "one.layers.a": weight[:3], "optimizer.state.exp_avg.one.layers.a": weight[:3] + 1,
        "alone.layers.a": weight, "optimizer.state.exp_avg.alone.layers.a": weight + 1,
        "apart.layers.a": weight, "apart.layers.b": weight[:2],
        "scalar.layers.a": weight[0, 0, 1], "scalars.layers.a": weight[0, 0, 1], "scalars.layers.b": weight,
        "empty.layers.a": weight[:0], "empty.layers.b": weight[:0],
        "long.layers.a": torch.zeros(4097), "long.layers.b": torch.zeros(4097),
    }  # fmt: skip
    source = of_megatron(tmp_path / "source", state, args=argparse.Namespace(num_layers=3))
    assert run("import", source, tmp_path / "ours") == 0
    found = convert.read(str(tmp_path / "ours"))
    for block, names, length in (("two", "ab", 4), ("one", "a", 3)):
        for name, number in itertools.product(names, range(length)):
            own = f"{block}.layers.{number}.{name}"
            assert torch.equal(found.model.pop(own).read(), state[f"{block}.layers.{name}"][number])
            assert block == "two" or torch.equal(found.state[own]["exp_avg"].read(), weight[number] + 1)
    assert {name: each.shape for name, each in found.model.items()} == {
        name: tuple(each.shape) for name, each in state.items() if name[:3] not in ("two", "one", "opt")
    }
    said = [each for each in convert.read(str(source)).left_out if "stay stacked" in each]
    assert [each.split("'")[1] for each in said] == [
        f"{block}.layers" for block in ("alone", "apart", "scalar", "scalars", "empty", "long")
    ]
    assert "first dimension of 4, and args.num_layers is 3" in said[0] and "from 2 to 4" in said[1]
    assert "4097 is above 4096" in said[-1] and "'alone.layers' apart" in capsys.readouterr().out


def test_megatrons_layers_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = GOLDEN.with_name("megatron")
    contents = convert.read(str(golden))
    read, loads = contents.model["decoder.layers.1.mlp.linear_fc1.weight"].read, []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kw: loads.append(load(*args, **kw)) or loads[-1])
    assert read().shape == (16, 4) and [tuple(each.shape) for each in loads] == [(1, 16, 4)]


def changed_metadata(folder: Path, change: Any) -> None:
    found = pickle.loads((folder / ".metadata").read_bytes())
    change(found.state_dict_metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def test_sizes_that_no_file_holds_cost_nothing(tmp_path: Path) -> None:
    state = {f"b{n}.layers.{name}": torch.zeros(2, 3) for n in range(40) for name in "ab"}
    source = of_megatron(tmp_path / "source", state)

    def grow(length: int) -> Any:
        def change(entries: dict[str, Any]) -> None:
            for each in entries.values():
                each.size = torch.Size([length, 3])

        return change

    files = sum(each.stat().st_size for each in source.iterdir())
    for length in (10**9, 4096, 500):
        changed_metadata(source, grow(length))
        contents = convert.read(str(source))
        assert len(contents.model) < 80 + files // 64
        stacked = [each for each in contents.left_out if "stay stacked" in each]
        assert 30 < len(stacked) <= 40 and all(f"first dimension of {length} " in each for each in stacked)
    changed_metadata(source, grow(3))
    contents = convert.read(str(source))
    assert contents.model["b0.layers.1.a"].read().shape == (3,)
    for name, read in (
        ("row", contents.model["b0.layers.2.a"].read),
        ("all", read_dcp(str(source)).model["b0.layers.a"].read),
    ):
        with pytest.raises(sw.CheckpointError, match=f"the folder holds {0 if name == 'row' else 6} of the"):
            read()


def test_options_and_step_of_megatrons_chained_optimizers_are_read(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    state = {"dense": weight, "expert": weight + 1}
    state |= {f"chained_{n}.optimizer.state.exp_avg.{name}": weight + 2 for n, name in enumerate(["dense", "expert"])}

    def member(lr: float, step: object) -> dict[str, Any]:
        group = {"lr": lr, "eps": 1e-8, "params": [0]}
        return {"optimizer": {"param_groups": [group], "state": {"common_step": step}}, "grad_scaler": {}}

    one, other = member(0.5, torch.tensor(7.0)), member(0.25, torch.tensor(7.0))
    for number, body in enumerate([{0: one, 1: other}, {"0": one, "1": other["optimizer"]}]):
        found = convert.read(str(of_megatron(tmp_path / str(number), state, body)))
        assert found.groups == [{"eps": 1e-8, "params": ["dense", "expert"]}]
        assert all(each["step"].read() == 7 and len(each) == 2 for each in found.state.values())
        assert len(found.left_out) == 1 and "which of the optimizer's 2 groups" in found.left_out[0]
    # the step within the groups, as the distributed optimizer has it
    body = {n: {"optimizer": {"param_groups": [{"lr": 0.5, "step": 7}]}} for n in range(2)}
    found = convert.read(str(of_megatron(tmp_path / "groups", state, body)))
    assert [each["step"] for each in found.state.values()] == [7, 7] and found.groups[0]["lr"] == 0.5
    # what is not there, or not equal, is named
    for name, body, words in [
        (
            "steps",
            {0: one, 1: member(0.5, torch.tensor(8.0))},
            ["step, of which common.pt has unequal values", "2 groups"],
        ),
        ("none", {}, ["step, of which common.pt has none", "options, which common.pt does not have"]),
        (
            "odd",
            {0: {"param_groups": 5, "state": [2]}, 1: None},
            ["step, of which common.pt has none", "options, which"],
        ),
    ]:
        found = convert.read(str(of_megatron(tmp_path / name, state, body)))
        assert len(found.left_out) == 2 and all(w in each for w, each in zip(words, found.left_out, strict=True))
        assert all(each.keys() == {"exp_avg"} for each in found.state.values())


def test_what_is_no_small_file_says_nothing_about_megatron(tmp_path: Path) -> None:
    form = tmp_path / "metadata.json"
    (tmp_path / ".metadata").touch()
    text = '{"sharded_backend": "torch_dist"}'
    for length, expected in ((len(text), True), (1 << 16, True), ((1 << 16) + 1, False)):
        form.write_text(text.rjust(length))
        assert is_megatron(str(tmp_path)) is expected
    form.write_text("[" * 60_000)  # deeper than the interpreter follows
    assert not is_megatron(str(tmp_path))
    form.unlink()
    os.mkfifo(form)
    assert not is_megatron(str(tmp_path))


def test_incomplete_checkpoints_of_deepspeed_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for harm, said in (
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "lacks the file of rank 0"),
        ("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "for partitions of"),
    ):
        shutil.copytree(GOLDEN / "zero2", tmp_path / harm)
        (tmp_path / harm / "tag" / harm).unlink()
        assert run("import", tmp_path / harm, tmp_path / "x") == 1 and said in capsys.readouterr().err
    (tmp_path / harm / "tag" / "mp_rank_01_model_states.pt").write_bytes(b"")
    assert run("import", tmp_path / harm, tmp_path / "x") == 1 and "tensor or pipeline" in capsys.readouterr().err
    (tmp_path / harm / "latest").write_text("../../x")
    assert run("import", tmp_path / harm, tmp_path / "x") == 1 and "the tag of" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_weight_written_after_the_last_step_is_widened_itself() -> None:
    master = torch.tensor([1.0 + 2.0**-12, 1.0 + 2.0**-12])
    written = torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    contents = Contents({"w": Lazy.of(written)}, state={"w": {"master": Lazy.of(master)}})
    wide = contents.cast(torch.float32)
    assert torch.equal(wide.model["w"].read(), torch.tensor([1.0 + 2.0**-12, 3.0])) and wide.state["w"] == {}
