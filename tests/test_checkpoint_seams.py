"""Laws of a checkpoint's interfaces, on one rank: safetensors and the command line read what was saved, names are those
of the bare model, and folders of the first release stay readable.
"""

from __future__ import annotations

import json
import locale
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import shardwright as sw
import torch
from shardwright._engine import CheckpointFolder
from shardwright.checkpoint.folder.retention import Kept, to_retire
from shardwright_tools.cli import main
from torch import nn

GOLDEN = Path(__file__).parent / "golden" / "checkpoint"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.odd = nn.Parameter(torch.arange(3, dtype=torch.uint8), requires_grad=False)
        self.wave = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.norm = nn.BatchNorm1d(8)


def read_by_hand(path: str | os.PathLike[str]) -> tuple[dict[str, bytes], dict]:
    """Read a safetensors file in a few lines. Return name -> bytes, and the header."""
    data = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 4096 == 0
    tensors = {
        n: data[8 + length + e["data_offsets"][0] : 8 + length + e["data_offsets"][1]]
        for n, e in header.items()
        if n != "__metadata__"
    }
    return tensors, header


def bytes_of(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def test_a_reader_of_safetensors_finds_every_tensor_of_the_bare_model(tmp_path: Path) -> None:
    model = Tied()
    inner = nn.Sequential(model)
    sw.save(tmp_path / "a", inner)
    tensors, header = read_by_hand(tmp_path / "a" / "model.safetensors")
    assert header["__metadata__"] == {"format": "pt", "0.head.weight": "0.embed.weight", "complex.0.wave": "complex64"}
    assert "0.head.weight" not in tensors and set(tensors) | {"0.head.weight"} == set(inner.state_dict())
    for name, value in inner.state_dict().items():
        if name in tensors:
            assert tensors[name] == bytes_of(value), name


def test_safetensors_itself_reads_the_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, other = Tied(), Tied()
    sw.save(tmp_path / "a", model, torch.optim.AdamW(model.parameters()))
    loaded = safetensors.load_file(tmp_path / "a" / "model.safetensors")
    assert torch.equal(loaded["embed.weight"], model.embed.weight) and loaded["odd"].dtype == torch.uint8
    del model.wave, other.wave
    sw.save(tmp_path / "b", model)
    safetensors.load_model(other, tmp_path / "b" / "model.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("wrap", ["ddp", "compiled", "compiled ddp", "compiled inside", "checkpointed inside"])
def test_wrappers_leave_no_trace_in_names(tmp_path: Path, wrap: str) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    bare = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    names = list(bare.state_dict())
    wrapped: nn.Module = bare
    if wrap == "compiled inside":
        wrapped[0] = torch.compile(bare[0])  # type: ignore[index, operator]
    if wrap == "checkpointed inside":
        wrapped[1] = checkpoint_wrapper(bare[1])  # type: ignore[index, operator]
    if "ddp" in wrap:
        wrapped = sw.wrap(wrapped)
    if wrap.startswith("compiled") and "inside" not in wrap:
        wrapped = torch.compile(wrapped)  # type: ignore[assignment]
    sw.save(tmp_path / "a", wrapped)
    tensors, _ = read_by_hand(tmp_path / "a" / "model.safetensors")
    assert sorted(tensors) == sorted(names)
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    sw.load(tmp_path / "a", other)
    assert all(torch.equal(v, tmp) for v, tmp in zip(other.state_dict().values(), wrapped.state_dict().values()))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, amsgrad=True, fused=True),
        lambda p: torch.optim.Adam(
            [{"params": [p[0]], "lr": 0.1}, {"params": p[1:], "weight_decay": 0.3}], lr=torch.tensor(0.01)
        ),
        lambda p: getattr(torch.optim, "Adafactor", torch.optim.Adagrad)(p),
        lambda p: torch.optim.LBFGS(p, max_iter=3),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.ASGD(p),
        lambda p: torch.optim.Rprop(p),
    ],
    ids=["SGD", "AdamW", "groups", "Adafactor", "LBFGS", "NAdam", "ASGD", "Rprop"],
)
def test_any_optimizer_goes_on_as_if_nothing_had_happened(tmp_path: Path, make) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
        return model, make(list(model.parameters()))

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.linspace(-1, 1, 10).reshape(2, 5)).square().sum()
            loss.backward()
            return loss

        for _ in range(steps):
            optimizer.step(closure)

    model, optimizer = build()
    train(model, optimizer, 3)
    optimizer.param_groups[0]["weight_decay"] = 0.25
    sw.save(tmp_path / "a", model, optimizer)
    other, other_optimizer = build()
    groups = other_optimizer.param_groups
    dicts = [id(group) for group in groups]
    sw.load(tmp_path / "a", other, other_optimizer)
    assert [id(group) for group in other_optimizer.param_groups] == dicts  # schedulers hold them
    assert other_optimizer.param_groups[0]["weight_decay"] == 0.25
    train(model, optimizer, 3)
    train(other, other_optimizer, 3)
    for ours, theirs in zip(other.parameters(), model.parameters()):
        assert torch.equal(ours, theirs)


def test_a_directory_behind_a_link_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    model = nn.Linear(3, 2)
    with sw.Checkpointer(tmp_path / "link", model) as checkpoints:
        checkpoints.save(0)
        assert checkpoints.restore() == 1
    (tmp_path / "best").symlink_to("real/step-000001")
    sw.load(tmp_path / "best", model)
    sw.save(tmp_path / "link" / "other", model)
    assert sorted(p.name for p in (tmp_path / "real").iterdir()) == [".lock", "other", "step-000001"]


def test_a_locale_with_a_decimal_comma_changes_no_byte_of_a_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, source = tmp_path / "comma.UTF-8", tmp_path / "source"
    source.write_text('LC_NUMERIC\ndecimal_point ","\nthousands_sep ""\ngrouping -1\nEND LC_NUMERIC\n')
    try:  # -c: it lacks all that no number needs, and says so
        subprocess.run(["localedef", "-c", "-i", source, "-f", "UTF-8", name], capture_output=True)
        monkeypatch.setenv("LOCPATH", str(tmp_path))
        before = locale.setlocale(locale.LC_NUMERIC)
        locale.setlocale(locale.LC_NUMERIC, "comma.UTF-8")
    except (OSError, locale.Error) as error:
        pytest.skip(f"no locale can be made here: {error}")
    try:
        assert locale.localeconv()["decimal_point"] == ","
        with sw.Checkpointer(tmp_path / "a", nn.Linear(2, 1), keep_best=1, keep_last=1) as checkpoints:
            for step, metric in enumerate((1.75, 1.25, 1.5)):
                checkpoints.save(step, metric=metric)
            checkpoints.wait()
            assert checkpoints.restore() == 3
        assert sorted(p.name for p in (tmp_path / "a").glob("step-*")) == ["step-000002", "step-000003"]
    finally:
        locale.setlocale(locale.LC_NUMERIC, before)
    assert json.loads((tmp_path / "a" / "step-000003" / "MANIFEST.json").read_text())["metric"] == 1.5


def test_retention_keeps_what_some_rule_names_and_always_the_newest() -> None:
    kept = [
        Kept(step, f"step-{step:06d}", metric)
        for step, metric in ((10, 3.0), (20, 1.0), (25, None), (30, 2.0), (40, 1.0))
    ]

    def stays(**rules) -> list[int]:
        rules = {"keep_last": None, "keep_every": None, "keep_best": None} | rules
        goes = to_retire(kept, **rules)
        return [k.step for k in kept if k not in goes]

    assert stays() == [10, 20, 25, 30, 40]
    assert stays(keep_last=2) == [30, 40]
    assert stays(keep_every=20) == [20, 40]
    assert stays(keep_every=25) == [25, 40]
    assert stays(keep_best=1) == [40]
    assert stays(keep_best=2) == [20, 40]
    assert stays(keep_best=1, largest=True) == [10, 40]
    assert stays(keep_last=1, keep_every=10, keep_best=1) == [10, 20, 30, 40]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict]:
    code = main(["ckpt", *map(str, words), "--json"])
    out = capsys.readouterr().out
    return code, json.loads(out) if out else {}


def test_the_command_line_sees_damage_and_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40))
    optimizer = torch.optim.AdamW(model.parameters())
    with sw.Checkpointer(tmp_path / "c", model, optimizer, max_file_bytes=3000) as checkpoints:
        for step in range(3):
            model(torch.randn(8, 30)).square().sum().backward()
            optimizer.step()
            checkpoints.save(step, metric=float(step))
    first, last = tmp_path / "c" / "step-000001", tmp_path / "c" / "step-000003"
    code, listing = run(capsys, "ls", tmp_path / "c")
    assert (
        code == 0
        and [c["step"] for c in listing["checkpoints"]] == [1, 2, 3]
        and listing["checkpoints"][2]["metric"] == 2
    )
    code, found = run(capsys, "inspect", last, "--tensors")
    assert code == 0 and found["tensors"]["model:0.weight"]["shape"] == [40, 30]
    assert run(capsys, "verify", tmp_path / "c")[0] == 0
    code, difference = run(capsys, "diff", first, last)
    assert code == 1 and {d["tensor"] for d in difference["differing"]} >= {
        "model:0.weight",
        "optimizer:exp_avg.0.weight",
    }
    assert run(capsys, "diff", first, first)[1]["equal"] is True
    code, exported = run(capsys, "export", last, tmp_path / "out", "--dtype", "bf16")
    assert code == 0 and exported["tensors"] == 7
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    tensors, header = read_by_hand(tmp_path / "out" / index["weight_map"]["0.weight"])
    assert header["0.weight"]["dtype"] == "BF16" and tensors["0.weight"] == bytes_of(model[0].weight.to(torch.bfloat16))
    tensors, header = read_by_hand(tmp_path / "out" / index["weight_map"]["1.num_batches_tracked"])
    assert header["1.num_batches_tracked"]["dtype"] == "I64"
    assert run(capsys, "export", last, tmp_path / "out")[0] == 2
    with (last / "optimizer.json").open("r+b") as file:
        file.write(b"[")
    code, verdict = run(capsys, "verify", tmp_path / "c")
    assert code == 1 and [c["ok"] for c in verdict["checkpoints"]] == [True, True, False]
    os.truncate(first / "state.json", 3)
    code, listing = run(capsys, "ls", tmp_path / "c")
    assert code == 1 and "has 3 bytes, the manifest says" in listing["checkpoints"][0]["error"]
    assert run(capsys, "inspect", tmp_path)[0] == 2 and run(capsys, "verify", tmp_path / "out")[0] == 2
    code, said = run(capsys, "prune", tmp_path / "c", "--keep-last", "1")
    assert code == 0 and len(said["checkpoints"]) == 2 and first.exists()
    (tmp_path / "c" / "step-000009.abc.partial").mkdir()
    code, done = run(capsys, "prune", tmp_path / "c", "--keep-last", "1", "--yes")
    assert code == 0 and sorted(p.name for p in (tmp_path / "c").iterdir()) == [".lock", "step-000003"]


def test_the_command_line_says_in_words_what_json_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 2)
    with sw.Checkpointer(tmp_path / "c", model) as checkpoints:
        checkpoints.save(0, metric=0.5)
        checkpoints.save(1)
    first, last = tmp_path / "c" / "step-000001", tmp_path / "c" / "step-000002"
    with sw.Checkpointer(tmp_path / "rated", model) as checkpoints:
        for step, metric in enumerate((0.5, 0.25, 0.75, 0.125)):
            checkpoints.save(step, metric=metric)

    def say(*words: object) -> tuple[int, str, str]:
        code = main(["ckpt", *map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    code, out, _ = say("ls", tmp_path / "c")
    assert code == 0 and "step-000001" in out and "metric 0.5" in out and "by 1 ranks" in out
    code, out, _ = say("inspect", first, "--tensors")
    assert code == 0 and "step 1, " in out and "F32 [2, 3]" in out and "model:weight" in out
    code, out, _ = say("verify", first)
    assert code == 0 and out.startswith("ok      ")
    code, out, _ = say("diff", first, last)
    assert code == 0 and out.startswith("equal: ")
    code, out, _ = say("export", first, tmp_path / "out", "--dtype", "bf16")
    assert code == 0 and "2 tensors" in out
    code, out, _ = say("diff", first, tmp_path / "nothing")
    assert code == 2
    code, out, _ = say("prune", tmp_path / "c", "--keep-last", "1")
    assert code == 0 and f"would remove {first}" in out and "--yes" in out and first.exists()
    for best, goes in (("min", (1, 2, 3)), ("max", (1, 2))):
        code, out, _ = say("prune", tmp_path / "rated", "--keep-best", "1", "--best", best)
        assert [n for n in (1, 2, 3, 4) if f"step-{n:06d}" in out] == list(goes), best
    assert say("prune", tmp_path / "c")[0] == 2 and say("ls", tmp_path / "nothing")[0] == 2
    with sw.Checkpointer(tmp_path / "c", model):
        code, _, error = say("prune", tmp_path / "c", "--keep-last", "1", "--yes")
        assert code == 1 and "Checkpointer" in error and first.exists()
    code, out, _ = say("prune", tmp_path / "c", "--keep-last", "1", "--yes")
    assert code == 0 and f"removed {first}" in out and not first.exists() and last.exists()
    with pytest.raises(SystemExit) as wrong:
        main(["ckpt", "prune", str(tmp_path), "--keep-last", "0"])
    assert wrong.value.code == 2


def golden_training() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Fill tensors by arithmetic only, so that no torch release changes the values."""
    model = Tied()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.125)
    with torch.no_grad():
        for number, tensor in enumerate([*model.parameters(), *model.buffers()]):
            flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            flat.copy_((torch.arange(flat.numel()) % 97 + number).reshape(flat.shape))
        for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
            optimizer.state[parameter] = {
                "step": torch.tensor(5.0),
                "exp_avg": torch.full_like(parameter, number),
                "exp_avg_sq": torch.full_like(parameter, number + 0.5),
            }
    return model, optimizer


def test_a_folder_of_version_1_is_read_and_its_model_and_optimizer_files_are_written_alike(tmp_path: Path) -> None:
    model, _ = golden_training()
    other = Tied()
    other_optimizer = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad])
    shutil.copytree(GOLDEN, tmp_path / "golden")
    assert sw.load(tmp_path / "golden", other, other_optimizer) == {"golden": (1, "é")}
    for name, value in model.state_dict().items():
        assert bytes_of(other.state_dict()[name]) == bytes_of(value), name
    assert other_optimizer.param_groups[0]["lr"] == 0.125
    sw.save(tmp_path / "new", other, other_optimizer)
    for name in ("model.safetensors", "optimizer-00001-of-00001.safetensors"):
        assert (tmp_path / "new" / name).read_bytes() == (GOLDEN / name).read_bytes(), name


def test_what_a_tree_cannot_hold_is_named_and_what_it_can_comes_back() -> None:
    from shardwright.formats import tree

    tensors: dict[str, torch.Tensor] = {}
    value = {
        "a": [1, -(1 << 80), 0.1, True, None, "é\n"],
        "b": (float("inf"), 1 + 2j, b"\x00\xff", {3, 1}),
        3: {"$odd": torch.bfloat16, "t": torch.arange(3)},
    }
    text = tree.dumps(tree.encode(value, "x", tensors))
    back = tree.decode(tree.loads(text), tensors)
    assert torch.equal(back[3].pop("t"), value[3].pop("t")) and back == value  # type: ignore[attr-defined]
    assert list(tensors) == ["x.3.t"]
    for wrong in (object(), lambda: 0, nn.Linear(1, 1)):
        with pytest.raises(sw.CheckpointError, match=r"x\.1\.k is a "):
            tree.encode([0, {"k": wrong}], "x", {})
    for text in ('{"$call":1}', '{"$dtype":"load"}', '{"$tensor":"none"}'):
        with pytest.raises(sw.CheckpointError):
            tree.decode(json.loads(text), {})


def test_names_that_would_meet_and_keys_of_any_kind_come_back_as_they_were(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    extra = {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2), "n": {1: torch.ones(3), "1": torch.zeros(3)}}
    sw.save(tmp_path / "a", model, extra=extra)
    back = sw.load(tmp_path / "a", model)
    assert torch.equal(back["a"]["b"], torch.ones(2)) and torch.equal(back["a.b"], torch.zeros(2))
    assert torch.equal(back["n"][1], torch.ones(3)) and torch.equal(back["n"]["1"], torch.zeros(3))
    user = {1: "one", "$tensor": 5, "plain": 6}
    with sw.Checkpointer(tmp_path / "b", model, user_state=user) as checkpoints:
        checkpoints.save(0)
        checkpoints.wait()
        user.update({1: None, "$tensor": None, "plain": None})
        checkpoints.restore()
    assert user == {1: "one", "$tensor": 5, "plain": 6}


class CountingFolder:
    """A CheckpointFolder that records which blocks are read."""

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder, self.blocks, self.files, self.block_count = folder, [], folder.files, folder.block_count
        self._first, count = {}, 0
        for path, nbytes in folder.files.items():
            self._first[path] = count
            count += -(-nbytes // (1 << 20))

    def load(self, ranges: list[tuple[str, int, int, int, int]], *options: object) -> None:
        self.blocks += {
            self._first[path] + block
            for path, begin, n, *_ in ranges
            for block in range(begin >> 20, ((begin + n - 1) >> 20) + 1)
        }
        self._folder.load(ranges, *options)


def test_state_that_is_not_there_yet_is_read_once_and_before_anything_is_changed(
    tmp_path: Path,
) -> None:
    from shardwright.checkpoint.restore import applying
    from shardwright.checkpoint.restore.agreeing import Restore
    from shardwright.checkpoint.restore.filling import Filler
    from shardwright.checkpoint.restore.fitting import Fit
    from shardwright.checkpoint.training import Training

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(1500, 1500)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = build()
    model(torch.ones(1, 1500)).sum().backward()
    optimizer.step()
    sw.save(tmp_path / "a", model, optimizer)
    fresh, fresh_optimizer = build()
    folder = CheckpointFolder(str(tmp_path / "a"))
    counting = CountingFolder(folder)
    restore = Restore("a", Fit(folder, Training(fresh, fresh_optimizer), 0, 1), Filler(counting, 0, 1))
    before = fresh.weight.detach().clone()
    restore.filler.share(restore.places, 0, [0], ())
    restore.read(None, verify=True)
    assert sorted(counting.blocks) == list(range(folder.block_count))  # every block once
    assert torch.equal(fresh.weight, before) and not fresh_optimizer.state
    counting.blocks.clear()
    restore.filler.read_rest()
    restore.filler.trade(lambda *_: None)
    applying.apply(restore.fit, restore.filler, restore.random)
    files = folder.files
    assert len(counting.blocks) <= sum(
        -(-n // (1 << 20)) for path, n in files.items() if not path.startswith("optimizer-")
    )
    for ours, theirs in zip(fresh.parameters(), model.parameters()):
        assert torch.equal(ours, theirs)
        for key, value in fresh_optimizer.state[ours].items():
            assert torch.equal(value, optimizer.state[theirs][key])


@pytest.mark.parametrize("ties", [0, 1, 2])
def test_what_was_tied_goes_to_all_who_are_not_tied_here(tmp_path: Path, ties: int) -> None:
    def build(tied: int) -> nn.Module:
        model = nn.Sequential(*(nn.Linear(600, 600, bias=False) for _ in range(3)))
        for layer in model[1 : 1 + tied]:
            layer.weight = model[0].weight
        return model

    saved, fresh = build(2), build(ties)
    sw.save(tmp_path / "a", saved)
    sw.load(tmp_path / "a", fresh)
    for layer in fresh:
        assert torch.equal(layer.weight, saved[0].weight)
