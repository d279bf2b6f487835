"""Law: `shardwright ckpt` ends for any contents of a directory of checkpoints. Exit code 1 comes with one sentence
about damage; exit code 2 means that there is no checkpoint. The command follows no link in a checkpoint, says what it
leaves out of a model, and leaves nothing half done.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import shardwright as sw
import torch
from shardwright import _engine
from shardwright_tools.cli import main
from torch import nn

pytestmark = pytest.mark.timeout(300)  # a pipe in a file's place must not block


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(30, 40)
        self.tied = self.layer.weight
        self.wave = nn.Parameter(torch.randn(5, 6, dtype=torch.complex64))
        self.register_parameter("steers\x1b[2J", nn.Parameter(torch.ones(2)))
        self.register_buffer("count", torch.arange(3))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Make three checkpoints with equal metrics."""
    torch.manual_seed(0)
    model = Kinds()
    with sw.Checkpointer(tmp_path / "c", model) as checkpoints:
        for step in range(3):
            checkpoints.save(step, metric=1.0)
    return tmp_path / "c"


def rewritten(manifest: Path, old: bytes, new: bytes) -> None:
    """Return the changed manifest with a valid checksum."""
    body, _, _ = manifest.read_bytes().rpartition(b',"self_crc32c"')
    assert old in body
    body = body.replace(old, new)
    crc = 0xFFFFFFFF
    for byte in body:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    manifest.write_bytes(body + b',"self_crc32c":"%08x"}\n' % (crc ^ 0xFFFFFFFF))


def as_link(path: Path) -> None:
    path.rename(path.parent.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent.parent / "elsewhere")


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_hole(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, size)


MANIFEST, MODEL = "MANIFEST.json", "model.safetensors"
#: damage -> (file, change, expected sentence, True if verify alone sees it)
DAMAGE = {
    "a link": (MANIFEST, as_link, "symbolic link", False),
    "a pipe": (MANIFEST, as_pipe, "is not a regular file", False),
    "a folder": (MANIFEST, as_folder, "is not a regular file", False),
    "without end": (MANIFEST, lambda p: os.truncate(p, 400 << 20), "more than the 268435456 allowed", False),
    "newer": (MANIFEST, lambda p: rewritten(p, b'"version":1', b'"version":2'), "version", False),
    "a name that leads out": (MANIFEST, lambda p: rewritten(p, b'"model.', b'"../mod.'), "../mod", False),
    "a linked file": (MODEL, as_link, "symbolic link", False),
    "a pipe of data": (MODEL, as_pipe, "is not a regular file", False),
    "a hole": (MODEL, as_hole, "was changed or did not survive: block 0", True),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_sentence_and_exit_code_1(
    directory: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    name, harm, said, hidden = DAMAGE[damage]
    first, last, out = directory / "step-000001", directory / "step-000003", directory.parent / "out"
    harm(first / name)
    looks_sound = 0 if hidden else 1

    def run(*words: object) -> tuple[int, str, str]:
        code = main(["ckpt", *map(str, words)])
        return code, *capsys.readouterr()

    code, listing, _ = run("ls", directory)
    assert code == looks_sound and ("DAMAGED" in listing and said in listing) == (not hidden)
    code, verdict, _ = run("verify", directory)
    assert code == 1 and verdict.count("DAMAGED") == 1 and verdict.count("ok  ") == 2 and said in verdict
    for words in (("inspect", first), ("diff", first, last), ("diff", last, first), ("export", first, out)):
        code, _, sentence = run(*words)
        assert code == 1 and said in sentence and sentence.count("\n") == 1, words
        code, found, _ = run(*words, "--json")
        assert code == 1 and json.loads(found)["ok"] is False and said in json.loads(found)["error"], words
    assert not out.exists() and sorted(p.name for p in directory.parent.iterdir() if "out" in p.name) == []
    code, pruned, _ = run("prune", directory, "--keep-best", "1", "--yes")
    assert code == 0 and str(first) in pruned and last.exists()
    assert first.exists() == (damage == "newer")  # a newer version may be sound
    if harm is as_link:
        assert (directory.parent / "elsewhere").exists()


def test_prune_removes_left_overs_of_any_form(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = directory.parent / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    shutil.copytree(directory / "step-000001", directory / "step-000001.prune.trash")  # left by a prune that died
    (directory / "step-000011.abc.partial").symlink_to("/nowhere")
    (directory / "step-000012.abc.partial").symlink_to(kept)
    (directory / "step-000013.abc.trash").write_text("x")
    (directory / "step-000014").symlink_to(kept)
    (directory / "mine").write_text("x")
    assert main(["ckpt", "prune", str(directory), "--keep-last", "1", "--yes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["checkpoints"]) == 2 and len(found["left_over"]) == 4
    assert sorted(p.name for p in directory.iterdir()) == [".lock", "mine", "step-000003", "step-000014"]
    assert (kept / "file").exists()


def test_a_missing_checkpoint_is_exit_code_2(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    top = directory.parent
    (top / "file").write_text("x")
    sw.save(top / "bare" / "a", nn.Module())
    for words, said in (
        (("ls", top / "file"), "is not a directory"),
        (("ls", ""), "is not a directory"),
        (("verify", top / "none"), "is not a directory"),
        (("verify", top), "holds no checkpoint"),
        (("ls", top / "bare" / "a"), "use `shardwright ckpt inspect"),
        (("inspect", top), "has no MANIFEST.json"),
        (("diff", directory / "step-000001", top), "has no MANIFEST.json"),
        (("export", directory / "step-000001", top), "already exists"),
        (("export", top / "bare" / "a", top / "out"), "holds no model"),
        (("prune", top / "none", "--keep-last", "1"), "is not a directory"),
        (("prune", directory), "no rule given"),
    ):
        assert main(["ckpt", *map(str, words), "--json"]) == 2, words
        out, sentence = capsys.readouterr()
        assert said in sentence and sentence.count("\n") == 1 and said in json.loads(out)["error"], words
    assert not (top / "out").exists()
    for words in (("frob",), (), ("prune", str(directory), "--keep-last", "x")):
        with pytest.raises(SystemExit) as wrong:
            main(["ckpt", *words])
        assert wrong.value.code == 2 and not (said := capsys.readouterr()).out
        with pytest.raises(SystemExit) as wrong:
            main(["ckpt", *words, "--json"])
        out, sentence = capsys.readouterr()
        found = json.loads(out)
        assert wrong.value.code == 2 and found["ok"] is False and found["error"] in sentence
    assert "must be an integer of at least 1, got 'x'" in said.err and "got 'x'" in found["error"]


def test_ls_of_a_checkpoint_names_the_right_command(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "ls", str(directory / "step-000001")]) == 2
    assert f"shardwright ckpt inspect {directory / 'step-000001'}" in capsys.readouterr().err


def test_a_dry_run_of_prune_writes_nothing(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / ".lock").unlink()
    before = sorted(os.listdir(directory))
    with mock.patch.object(os, "open", side_effect=PermissionError):
        assert main(["ckpt", "prune", str(directory), "--keep-last", "1"]) == 0
    assert "would remove" in capsys.readouterr().out and sorted(os.listdir(directory)) == before


def test_diff_compares_options_and_extra(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def saved(name: str, lr: float = 0.1, step: int = 0, **extra: object) -> Path:
        model = nn.Linear(2, 2)
        nn.init.ones_(model.weight), nn.init.ones_(model.bias)
        sw.save(tmp_path / name, model, torch.optim.SGD(model.parameters(), lr=lr), step=step, extra=extra)
        return tmp_path / name

    first = saved("first", epoch=1)
    for name, differs in (
        ("same", ""),
        ("rate", "optimizer.groups.0.lr: 0.1 against 0.9"),
        ("step", ""),  # identifies the checkpoint, not its contents
        ("extra", "state.extra.epoch: 1 against 2"),
        ("more", "state.extra.seen"),
    ):
        other = saved(
            name,
            lr=0.9 if name == "rate" else 0.1,
            step=5 if name == "step" else 0,
            epoch=2 if name == "extra" else 1,
            **({"seen": [1]} if name == "more" else {}),
        )
        code = main(["ckpt", "diff", str(first), str(other)])
        out = capsys.readouterr().out
        assert code == bool(differs) and differs in out and ("equal" in out) == (not differs), name
        assert main(["ckpt", "diff", str(first), str(other), "--model"]) == 0
        assert main(["ckpt", "diff", str(first), str(other), "--json"]) == code
        assert json.loads(capsys.readouterr().out.split("tensors\n")[1])["equal"] == (not differs)


def test_export_copies_the_files_that_from_pretrained_reads(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = directory / "step-000001"
    (first / "config.json").write_text("{}")
    (first / "notes.txt").write_text("of somebody")
    (first / "vocab.json").symlink_to("/etc/hostname")
    for source, beside in ((first, ["config.json"]), (directory / "step-000002", [])):
        out = directory.parent / f"out-{source.name}"
        assert main(["ckpt", "export", str(source), str(out), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["copied"] == beside
        assert found["left_out"] == (["vocab.json, a symbolic link"] if beside else [])
        assert sorted(os.listdir(out)) == sorted([*beside, MODEL])


def hub_snapshot(top: Path) -> Path:
    """Make a model as the Hub's cache holds it: each file is a link to a blob."""
    blobs, snapshot = top / "models--x--y" / "blobs", top / "models--x--y" / "snapshots" / "0123"
    blobs.mkdir(parents=True), snapshot.mkdir(parents=True)
    pytest.importorskip("safetensors.torch").save_file({"w": torch.ones(3)}, blobs / "aa")
    for name, blob, text in (("config.json", "bb", "{}"), ("tokenizer.json", "cc", "[]"), (MODEL, "aa", "")):
        if text:
            (blobs / blob).write_text(text)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return snapshot


def test_import_takes_a_snapshot_of_the_hub_and_names_what_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = hub_snapshot(tmp_path)
    (snapshot / "vocab.json").symlink_to("/etc/hostname")
    (snapshot / "vocab.txt").symlink_to("../../blobs/gone")
    (snapshot / "merges.txt").mkdir()
    (tmp_path / "main").symlink_to(snapshot)
    for number, source in enumerate((snapshot, tmp_path / "main")):
        out = tmp_path / f"step-{number:06d}"
        assert main(["ckpt", "import", str(source), str(out), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["copied"] == ["config.json", "tokenizer.json"] and (out / "tokenizer.json").read_text() == "[]"
        assert found["left_out"] == [
            "vocab.json, a symbolic link to '/etc/hostname', which is not where the model's files lie",
            "vocab.txt, a symbolic link to nothing",
            "merges.txt, no regular file of at most 64 MiB",
        ]


def test_checkpoints_behind_links_are_listed_and_are_not_removed(
    directory: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A folder may be a link, for a restore too. Links in place of its files are named, with the command that helps."""
    elsewhere = directory.parent / "elsewhere"
    (directory / "step-000003").rename(elsewhere)
    (directory / "step-000003").symlink_to(elsewhere)
    (directory / "step-000009").symlink_to("gone")
    with sw.Checkpointer(directory, Kinds(), keep_last=1) as checkpoints:
        assert checkpoints.restore() == 3 and "step-000009' is a symbolic link that leads nowhere" in caplog.text
        checkpoints.save(3)
    assert main(["ckpt", "prune", str(directory), "--keep-last", "1", "--yes"]) == 0
    assert main(["ckpt", "verify", str(directory)]) == 0
    kept = ["step-000003", "step-000004", "step-000009"]
    assert sorted(p.name for p in directory.iterdir() if not p.name.startswith(".")) == kept
    assert elsewhere.exists() and "step-000003: " in capsys.readouterr().out
    linked = directory.parent / "linked"
    (linked / "ranks").mkdir(parents=True)
    for path in elsewhere.rglob("*.*"):
        (linked / path.relative_to(elsewhere)).symlink_to(path)
    with pytest.raises(sw.CheckpointError, match="MANIFEST.json' is a symbolic link, .*: copy the folder with cp -rL"):
        sw.load(linked, Kinds())


def test_tags_of_a_deepspeed_folder_are_listed_and_verified(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Folders of any name with a manifest, such as those of the DeepSpeed engine's save_checkpoint(), by their steps."""
    for step in (12, 3):
        sw.save(directory / f"global_step{step}", Kinds(), step=step)
        assert sw.checkpoint.step_of(directory / f"global_step{step}") == step
    with pytest.raises(sw.CheckpointError, match="exists already: pass overwrite=True, save to another path, or"):
        sw.save(directory / "global_step3", Kinds())
    (directory / "latest").write_text("global_step12")
    assert main(["ckpt", "ls", str(directory)]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["step-000001", "step-000002", "step-000003", "global_step3", "global_step12"]
    os.truncate(directory / "global_step3" / MODEL, 100)
    assert main(["ckpt", "verify", str(directory)]) == 1
    out = capsys.readouterr().out
    assert out.count("ok  ") == 4 and "DAMAGED" in out and f"{directory}/global_step12: " in out


#: runs the command in a Python without torch
WITHOUT_TORCH = """
import sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nothing())
from shardwright_tools.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run_program(*words: object, **environment: str) -> tuple[int, str]:
    """Return the exit code and what was said."""
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, env={**os.environ, **environment}, timeout=250
    )
    return done.returncode, (done.stdout + done.stderr).decode("ascii", "backslashreplace")


def test_ls_inspect_verify_and_prune_need_no_torch(directory: Path) -> None:
    for words, code, said in (
        (("ls", directory), 0, "step-000003"),
        (("inspect", directory / "step-000001"), 0, "step 1"),
        (("verify", directory), 0, "ok  "),
        (("prune", directory, "--keep-last", "1"), 0, "would remove"),
        (("diff", directory / "step-000001", directory / "step-000002"), 2, "this command needs torch"),
    ):
        found = run_program("-c", WITHOUT_TORCH, "ckpt", *words)
        assert found[0] == code and said in found[1] and "Traceback" not in found[1], found


def test_an_ascii_locale_is_one_sentence(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would pass other bytes to the system than the engine: the sentence names PYTHONUTF8."""
    ascii_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    sw.save(directory / "\u0444", Kinds())
    for words, code, said in (
        (("ls", directory / "\u0444"), 2, "directory must be ASCII where Python encodes file names in ascii"),
        (("verify", directory / "\u0444"), 2, "set PYTHONUTF8=1, or a UTF-8 locale"),
        (("ls", directory), 1, "is not UTF-8 to Python: rename it, or set PYTHONUTF8=1"),
        (("inspect", directory / "step-000001"), 0, "step 1"),
    ):
        found = run_program("-m", "shardwright", "ckpt", *words, **ascii_locale)
        assert found[0] == code and said in found[1] and "Traceback" not in found[1], found
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "iso8859-1")
    for call in (sw.save, sw.load, sw.Checkpointer):
        with pytest.raises(ValueError, match="must be ASCII where Python encodes file names in iso8859-1, got '/"):
            call(directory / "\u0444", Kinds())


def test_long_commands_show_progress_on_a_terminal_alone(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, out = directory / "step-000001", directory / "step-000002", directory.parent / "out"
    commands = (
        ["diff", first, second],
        ["export", first, out],
        ["verify", first],
        ["prune", directory, "--keep-last", "1", "--yes"],
    )
    for is_terminal in (False, True):
        with mock.patch.object(sys.stderr, "isatty", lambda: is_terminal):  # noqa: B023
            for words in commands:
                main(["ckpt", *map(str, words)])
                said = capsys.readouterr().err
                assert ("100 %" in said) == is_terminal and said.endswith("\r\033[K" if is_terminal else ""), words
        if not is_terminal:
            shutil.rmtree(out)
            shutil.copytree(directory / "step-000003", first)
            shutil.copytree(directory / "step-000003", second)


def test_a_name_does_not_steer_the_terminal(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "inspect", str(directory / "step-000001"), "--tensors"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and r"model:steers\x1b[2J" in out


def test_an_exported_model_is_read_by_safetensors_and_torch(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    first, out = directory / "step-000001", directory.parent / "out"
    assert main(["ckpt", "export", str(first), str(out), "--dtype", "bf16"]) == 0
    stored, exported = (safetensors.load_file(folder / MODEL) for folder in (first, out))
    assert exported.keys() == stored.keys()
    for name, value in exported.items():
        as_it_was = name in ("wave", "count")  # complex tensors as real views, and integers
        expected = stored[name] if as_it_was else stored[name].to(torch.bfloat16)
        assert value.dtype == expected.dtype and torch.equal(value, expected), name
    with pytest.raises(_engine.CheckpointError):
        _engine.CheckpointFolder(str(out))  # model files alone are no checkpoint


def test_from_pretrained_reads_an_exported_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    sw.save(tmp_path / "saved", model, max_file_bytes=60_000)
    assert main(["ckpt", "export", str(tmp_path / "saved"), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    config.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", torch_dtype=torch.bfloat16)
    for name, value in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], value.to(torch.bfloat16)), name
    assert re.search(r"\d+ tensors", capsys.readouterr().out)
