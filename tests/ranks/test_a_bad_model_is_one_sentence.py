"""Law: what a program gives wrongly, through weights= or sw.meta_loading(), is one sentence on all ranks before a step; the model
has no memory after it, the folder of a file tier is empty, and the same wrap works once the cause is gone.
"""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from harness import gather, on_every_rank, same_everywhere
from internals import Stored, plan
from peer import PEER, batch, sw
from test_a_module_is_built_in_slices import PRIVATE, STAGES, every_stage
from test_a_poor_host_still_trains import memory_group
from test_a_pretrained_model_stays_in_its_files import WIDTH, stand_in, write
from test_offloaded_state_has_the_same_bits import mount_small
from test_weights_are_loaded_in_slices import shared_folder, write_safetensors
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")


def on_meta():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Linear(40, 40, bias=False))


def refused(
    module, match, world_size, errors=(sw.Error, sw.CheckpointError, OSError, MemoryError, ValueError), **options
):
    """Check that a wrap is one sentence on all ranks, and leaves the module without memory."""
    optimizer = sw.optim.AdamW([p for p in module.parameters() if p.is_floating_point()])
    before = [(id(p), type(p)) for p in module.parameters()]
    with pytest.raises(errors, match=match) as caught:
        sw.wrap(module, optimizer, **options)
    said = str(caught.value)
    assert "\n" not in said and len(said) < 600, said
    assert same_everywhere(re.sub(r"^(\[Errno \d+\] |load_pretrained: rank \d+: )", "", said)) or world_size == 1, said
    assert [(id(p), type(p)) for p in module.parameters()] == before
    assert all(p.is_meta or isinstance(p, Stored) for p in module.parameters())
    gather(None)
    return said


def values():
    torch.manual_seed(1)
    state = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Linear(40, 40, bias=False)).state_dict()
    return {name: each.clone() for name, each in state.items()}


@every_stage
@on_every_rank()
def test_a_folder_of_weights(rank, world_size, stage):
    folder, state = shared_folder(rank), values()
    whole = str(folder / "model.safetensors")
    if rank == 0:
        write_safetensors(whole, state)
        data = Path(whole).read_bytes()
        bad = {
            "torn": data[:-40],
            "headless": data[:20],
            "garbled": data[:8] + b"!" + data[9:],
            "empty": b"",
        }
        for name, text in bad.items():
            (folder / name).mkdir()
            (folder / name / "model.safetensors").write_bytes(text)
        for name, changed in (
            ("lacking", {n: v for n, v in state.items() if n != "2.weight"}),
            ("shaped", {**state, "2.weight": state["2.weight"][:39]}),
            ("integer", {**state, "2.weight": state["2.weight"].to(torch.int64)}),
            ("more", {**state, "2.weigth": state["2.weight"]}),
        ):
            (folder / name).mkdir()
            write_safetensors(str(folder / name / "model.safetensors"), changed)
        (folder / "twice").mkdir()
        for number in (1, 2):
            write_safetensors(str(folder / "twice" / f"{number}.safetensors"), {"0.bias": state["0.bias"]})
        index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
        (folder / "twice" / "model.safetensors.index.json").write_text(json.dumps(index))
    gather(None)
    for name, sentence in (
        ("torn", "torn/model.safetensors"),
        ("headless", "headless/model.safetensors"),
        ("garbled", "garbled/model.safetensors"),
        ("empty", "empty/model.safetensors"),
        ("gone", "does not exist"),
        ("lacking", "lacks '2.weight'"),
        ("shaped", r"'2.weight' has shape \(39, 40\), and the module's \(40, 40\)"),
        ("integer", "'2.weight' is int64, which cannot be cast to the module's float32"),
        ("more", r"the module lacks '2.weigth' \(did you mean '2.weight'\?\)"),
        ("twice", "holds the tensor '0.bias' twice"),
    ):
        refused(on_meta(), sentence, world_size, weights=folder / name, **STAGES[stage])
    mixed = on_meta()
    mixed[2] = nn.Linear(40, 40, bias=False)
    optimizer = sw.optim.AdamW(mixed.parameters())
    with pytest.raises(sw.Error, match="'2.weight' has memory and '0.weight' is on the meta device"):
        sw.wrap(mixed, optimizer, weights=whole, **STAGES[stage])
    left = on_meta()
    left[1].register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    left[1].reset_parameters = lambda: None
    refused(left, "1.table", world_size, weights=whole, **STAGES[stage])
    alone = folder / "model.safetensors" if rank != world_size - 1 else folder / "gone"
    if world_size > 1:
        refused(on_meta(), "gone' does not exist", world_size, weights=alone, **STAGES[stage])
    model = sw.wrap(on_meta(), weights=whole, **STAGES[stage])
    found = sw.full_state_dict(model)
    assert all(torch.equal(found[name], each) for name, each in state.items())


@every_stage
@on_every_rank()
def test_a_model_that_from_pretrained_left_in_its_files(rank, world_size, stage):
    folder, options = write(rank), STAGES[stage]
    path = folder / "model.safetensors"
    with stand_in() as kind, sw.meta_loading():
        model = kind.from_pretrained(folder)
        model.score.weight, model.score.bias = model.head.weight, model.body.query.bias  # all of it stays in files
        data, times = path.read_bytes(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
        gather(None)
        for cut in (data[: len(data) // 2], data[: len(data) - 8], b"", None):
            if rank == 0:
                path.unlink()
                if cut is not None:
                    path.write_bytes(cut)
            gather(None)
            what = "was replaced or written" if cut is not None else "No such file"
            refused(model, f"model.safetensors.*{what}|{what}.*model.safetensors", world_size, **options)
        if rank == 0:
            path.write_bytes(data)
            os.utime(path, ns=times)
        gather(None)
        again = kind.from_pretrained(folder)
        again.score = nn.Linear(WIDTH, 5, device="meta")
        told = "is on the meta device and came from no file"
        with pytest.raises(sw.Error, match=told):
            sw.wrap(again, **options)
        left = kind.from_pretrained(folder)
        left.score.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
        left.score.reset_parameters = lambda: None
        with pytest.raises(sw.Error, match="score.table"):
            sw.wrap(left, **options)
        whole = kind.from_pretrained(folder)
        wrapped = sw.wrap(whole, **options)
    assert wrapped(batch(rank, 6, 7)).isfinite().all()
    gather(None)


def on_a_full_disk(rank, world_size, folder, weights):
    if rank == 0 and not mount_small(folder):
        return gather("not permitted")
    if gather("")[0]:
        return "not permitted"
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(160, 160) for _ in range(4)))
    for tier in ("parameters", "optimizer"):
        place = {tier: f"nvme:{folder}"}
        sentence = "No space left on device"
        refused(module, sentence, world_size, weights=weights, offload=place, units=nn.Linear, **PRIVATE)
        assert os.listdir(folder) == []
    model, _ = sw.wrap(module, sw.optim.AdamW(module.parameters()), weights=weights, units=nn.Linear, **PRIVATE)
    return [each.sum().item() for each in sw.full_state_dict(model).values()]


def test_a_disk_that_fills_is_said_before_the_first_byte(fresh_ranks, world_size, tmp_path):
    torch.manual_seed(2)
    module = nn.Sequential(*(nn.Linear(160, 160) for _ in range(4)))
    (tmp_path / "small").mkdir()
    torch.save(module.state_dict(), tmp_path / "a.pt")
    with fresh_ranks(world_size) as team:
        found = team.run(on_a_full_disk, folder=str(tmp_path / "small"), weights=str(tmp_path / "a.pt"))
    if "not permitted" in found:
        pytest.skip("mounting is not permitted here")
    assert all(each == [value.sum().item() for value in module.state_dict().values()] for each in found)


@every_stage
@on_every_rank()
def test_less_memory_than_the_plan(rank, world_size, stage):
    folder, state = shared_folder(rank), values()
    path = str(folder / "model.safetensors")
    if rank == 0:
        write_safetensors(path, state)
    gather(None)
    with pytest.MonkeyPatch.context() as patch:
        plain = plan.host_limits
        patch.setattr(plan, "host_limits", lambda: {**plain(), "memory_max_bytes": 20_000, "memory_group": 7})
        sentence = (
            r"Sequential needs [\d,]+ bytes on \d ranks? for parameters, .* control group \(memory.max\) has 20,000"
        )
        said = refused(on_meta(), sentence, world_size, errors=MemoryError, weights=path, **STAGES[stage])
        assert f"on {world_size} rank" in said
        patch.setattr(plan, "host_limits", lambda: {**plain(), "memory_max_bytes": 20_000, "memory_group": 7 + rank})
        refused(on_meta(), "on 1 rank", world_size, errors=MemoryError, weights=path, **STAGES[stage])
        patch.setattr(plan, "host_limits", lambda: {**plain(), "memory_max_bytes": None})
        patch.setattr(plan, "_installed_bytes", lambda: 25_000 if rank == world_size - 1 else 1 << 60)
        refused(
            on_meta(),
            "memory and swap of their host has 25,000",
            world_size,
            errors=MemoryError,
            weights=path,
            **STAGES[stage],
        )
        trained = values()
        module = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Linear(40, 40, bias=False))
        module.load_state_dict(trained)
        with pytest.raises(MemoryError, match="their host has 25,000"):
            sw.wrap(module, sw.optim.AdamW(module.parameters()), **STAGES[stage])
        assert all(torch.equal(each, trained[name]) for name, each in module.state_dict().items())
    model, optimizer = sw.wrap(module, sw.optim.AdamW(module.parameters()), **STAGES[stage])
    model(batch(rank, 6, 40)).square().mean().backward()
    optimizer.step()


def under_a_limit(rank, world_size, folder, weights):
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    with open(f"{folder}/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
    gather(None)
    return refused(module, r"memory\.max", world_size, errors=MemoryError, weights=weights, **PRIVATE)


def test_a_real_limit_is_one_sentence_before_training(fresh_ranks, world_size, tmp_path):
    module = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    torch.save(module.state_dict(), tmp_path / "a.pt")  # 32 MiB; with gradients and AdamW's state 128 MiB, and units
    with memory_group(110 << 20) as folder, fresh_ranks(world_size) as team:
        said = team.run(under_a_limit, 60, folder=folder, weights=str(tmp_path / "a.pt"))
    assert all(each == said[0] for each in said)
