"""Laws of a directory of checkpoints: it has one writer at any time; restoring needs no write permission; a rollback is
permanent; and a file that is not a checkpoint is refused before it costs memory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import shardwright as sw
import torch
import torch.distributed.checkpoint as dcp
from shardwright._engine import CheckpointPlan, CheckpointSaver, crc32c
from shardwright.checkpoint import StorageReader, StorageWriter
from shardwright.checkpoint.folder import directory, retention
from shardwright_tools.cli import main
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

NOBODY = 65534


def trained(value: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = nn.Linear(8, 4)
    nn.init.constant_(module.weight, value)
    return module, torch.optim.SGD(module.parameters(), lr=0.1)


def run(program: str, *arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, **options)


@contextlib.contextmanager
def second_process(path: Path) -> Iterator[Callable[[], str]]:
    """Give opens(): a process that was forked here opens a Checkpointer on `path`; its error, or "-"."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            ours.close()
            while theirs.recv(1):
                said = "-"
                try:
                    sw.Checkpointer(path, nn.Linear(8, 4)).close()
                except sw.CheckpointError as error:
                    said = str(error)
                theirs.sendall(said.encode())
        finally:
            os._exit(0)
    theirs.close()

    def opens() -> str:
        ours.sendall(b"?")
        return ours.recv(1 << 16).decode()

    try:
        yield opens
    finally:
        ours.close()
        os.waitpid(child, 0)


def test_a_copy_of_the_directory_does_not_let_a_second_process_in(tmp_path):
    with second_process(tmp_path / "a") as opens:
        with sw.Checkpointer(tmp_path / "a", *trained()) as checkpoints:
            checkpoints.save(0)
            checkpoints.wait()
            shutil.copytree(tmp_path / "a", tmp_path / "copy")  # opens and closes `.lock` in this process
            assert f"process {os.getpid()} on host" in opens()
            with pytest.raises(sw.CheckpointError, match="another Checkpointer of this program"):
                sw.Checkpointer(tmp_path / "a", *trained())
        assert opens() == "-"


def test_a_forked_child_does_not_keep_the_directory_beyond_its_parents_end(tmp_path):
    program = """
        import os, sys, time, torch, shardwright as sw
        checkpoints = sw.Checkpointer(sys.argv[1], torch.nn.Linear(8, 4))
        child = os.fork()
        if child == 0:
            os.close(1), os.close(2)
            time.sleep(120)
            os._exit(0)
        print(child, flush=True)
        os.kill(os.getpid(), 9)
    """
    child = int(run(program, str(tmp_path)).stdout)
    try:
        os.kill(child, 0)
        sw.Checkpointer(tmp_path, *trained()).close()
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is tried as root only")
def test_another_user_restores_and_may_not_save():
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        os.chmod(folder, 0o755)
        check_another_user(Path(folder))


def check_another_user(tmp_path: Path) -> None:
    with sw.Checkpointer(tmp_path / "a", *trained(3.0)) as checkpoints:
        checkpoints.save(4)
    (tmp_path / "a").chmod(0o755)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([]), os.setgid(NOBODY), os.setuid(NOBODY)
            module, optimizer = trained()
            with sw.Checkpointer(tmp_path / "a", module, optimizer) as checkpoints:
                assert checkpoints.restore() == 5 and checkpoints.restore(step=5) == 5
                assert float(module.weight.detach()[0, 0]) == 3.0
                assert checkpoints.steps() == [5]
                try:
                    checkpoints.save(5)
                except sw.CheckpointError as error:
                    code = 0 if "cannot be written to: Permission denied" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sorted(os.listdir(tmp_path / "a")) == [".lock", "step-000005"]


def test_a_read_only_file_system_is_restored_from(tmp_path):
    save_steps(tmp_path, {5: 3.0})
    refusal = OSError(errno.EROFS, os.strerror(errno.EROFS))
    with mock.patch.object(directory, "DirectoryLock", side_effect=refusal):
        module, optimizer = trained()
        with sw.Checkpointer(tmp_path, module, optimizer) as checkpoints:
            assert checkpoints.restore() == 5 and checkpoints.restore(step=5) == 5
            assert float(module.weight.detach()[0, 0]) == 3.0
            with pytest.raises(sw.CheckpointError, match="cannot be written to: Read-only file system"):
                checkpoints.save(5)


@pytest.mark.parametrize("body", ["[]", "null", '{"step":1}', '{"a":' * 3000, '{"$tensor":"x"}', "{", "\xff"])
def test_a_malformed_state_is_refused_before_anything_changes(tmp_path, body):
    sw.save(tmp_path / "a", trained(1.0)[0])
    reseal(tmp_path / "a", "state.json", body.encode("latin-1"))
    module, _ = trained(2.0)
    with pytest.raises(sw.CheckpointError, match=r"state\.json"):
        sw.load(tmp_path / "a", module)
    assert float(module.weight.detach()[0, 0]) == 2.0


def test_a_ranks_own_tree_of_another_shape_is_refused_before_anything_changes(tmp_path):
    module = nn.Sequential(trained(1.0)[0], nn.BatchNorm1d(2))
    with sw.Checkpointer(tmp_path / "c", module, dataloader=[nn.Linear(1, 1)]) as checkpoints:
        checkpoints.save(0)
    folder = tmp_path / "c" / "step-000001"
    line = (folder / "ranks/all.jsonl").read_text()
    body = json.loads(line)
    generator, odd = body["random"]["torch"], body["random"] | {"torch": 5}
    cases: list[tuple[dict, str]] = [
        (body | {"random": {}}, "python"),
        (body | {"random": odd}, "ranks/ of rank 0"),
        (body | {"random": [1]}, "ranks/ of rank 0"),
        (
            body | {"buffers": {"1.running_mean": generator}},
            r"1\.running_mean: the checkpoint has U8 \[\d+\], the model F32 \[2\]",
        ),
        (body | {"buffers": [1]}, "ranks/ of rank 0"),
        (body | {"buffers": {"1.running_mean": 7}}, "ranks/ of rank 0"),
        (
            body | {"dataloader": body["dataloader"] * 2},
            "dataloader: the checkpoint holds 2 objects, this program has 1",
        ),
        (body | {"dataloader": {}}, "dataloader: the checkpoint holds no list of objects, this program has 1"),
    ]
    for malformed, sentence in cases:
        reseal(folder, "ranks/all.jsonl", json.dumps(malformed).ljust(len(line) - 1).encode() + b"\n")
        with torch.no_grad():
            module[0].weight.fill_(2.0)
        with sw.Checkpointer(tmp_path / "c", module, dataloader=[nn.Linear(1, 1)]) as checkpoints:
            with pytest.raises(sw.CheckpointError, match=sentence):
                checkpoints.restore()
        assert float(module[0].weight.detach()[0, 0]) == 2.0


def reseal(folder: Path, name: str, data: bytes) -> None:
    """Replace a file of less than a block in a checkpoint by another one, with valid checksums."""

    def checksum(text: bytes) -> int:
        memory = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return crc32c(memory.data_ptr(), memory.numel())

    (folder / name).write_bytes(data)
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    del manifest["self_crc32c"]
    entry = next(each for each in manifest["files"] if each["path"] == name)
    entry.update(bytes=len(data), crc32c=f"{checksum(data):08x}")
    text = json.dumps(manifest, separators=(",", ":"))[:-1].encode()
    (folder / "MANIFEST.json").write_bytes(text + b',"self_crc32c":"%08x"}\n' % checksum(text))


def value_after(directory: Path, **options) -> tuple[int, float]:
    module, optimizer = trained()
    with sw.Checkpointer(directory, module, optimizer) as checkpoints:
        return checkpoints.restore(**options), float(module.weight.detach()[0, 0])


def save_steps(directory: Path, values: dict[int, float]) -> None:
    for step, value in values.items():
        with sw.Checkpointer(directory, *trained(value)) as checkpoints:
            checkpoints.save(step - 1)


def test_a_rollback_stays_rolled_back(tmp_path):
    save_steps(tmp_path, {1: 1.0, 2: 2.0, 5: 5.0})
    assert value_after(tmp_path) == (5, 5.0)
    assert value_after(tmp_path, step=2) == (2, 2.0)
    assert value_after(tmp_path) == (2, 2.0)  # a crash before the first save of the new course
    save_steps(tmp_path, {3: 3.5})
    assert value_after(tmp_path) == (3, 3.5)
    save_steps(tmp_path, {5: 5.5})  # the new course has come so far: this one is not abandoned
    assert value_after(tmp_path) == (5, 5.5)
    save_steps(tmp_path, {6: 6.0})
    assert value_after(tmp_path, step=3) == (3, 3.5)
    assert value_after(tmp_path, step=6) == (6, 6.0)  # asked for again
    assert value_after(tmp_path) == (6, 6.0)


def test_an_abandoned_checkpoint_is_better_than_none(tmp_path):
    save_steps(tmp_path, {2: 2.0, 5: 5.0})
    assert value_after(tmp_path, step=2) == (2, 2.0)
    (tmp_path / "step-000002" / "MANIFEST.json").write_text("{")
    assert value_after(tmp_path) == (5, 5.0)
    for damage in ("[", "[]", '{"abandoned": [], "rollbacks": [1e999]}'):
        (tmp_path / ".branch").write_text(damage)  # costs no checkpoint
        assert value_after(tmp_path) == (5, 5.0)


def test_retention_counts_no_checkpoint_of_an_abandoned_course(tmp_path, capsys):
    save_steps(tmp_path, {2: 2.0, 5: 5.0})
    assert value_after(tmp_path, step=2) == (2, 2.0)
    assert main(["ckpt", "prune", str(tmp_path), "--keep-last", "1", "--yes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["checkpoints"] == [] and found["stays"] == []
    for step, there in ((4, [2, 4, 5]), (6, [4, 5, 6]), (8, [6, 8])):
        with sw.Checkpointer(tmp_path, *trained(float(step)), keep_last=2, keep_best=1) as checkpoints:
            checkpoints.save(step - 1)
            checkpoints.wait()
            assert checkpoints.steps() == there


def test_a_save_beside_many_checkpoints_opens_the_newest_alone(tmp_path):
    """Retention reads each manifest once, and notices a folder that has changed since."""
    known: retention.Known = {}
    with sw.Checkpointer(tmp_path, *trained(), keep_last=20) as checkpoints:
        with mock.patch.object(retention, "_look", wraps=retention._look) as looks:
            for step in range(5):
                checkpoints.save(step)
                checkpoints.wait()
                assert looks.call_count == step, step  # the one that the save before made
    assert [kept.state for kept in retention.list_checkpoints(str(tmp_path), look=True, known=known)] == ["sound"] * 5
    os.truncate(tmp_path / "step-000002" / "model.safetensors", 4096)
    (tmp_path / "step-000003" / "state.json").unlink()
    states = [kept.state for kept in retention.list_checkpoints(str(tmp_path), look=True, known=known)]
    assert states == ["sound", "damaged", "damaged", "sound", "sound"]


def test_an_exported_model_goes_to_a_path_and_to_no_address(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sw.save("a", trained()[0])
    assert main(["ckpt", "export", "a", "s3://bucket/model"]) == 2
    assert (
        "output must be a path of a mounted file system, got the address 's3://bucket/model'" in capsys.readouterr().err
    )
    assert main(["ckpt", "export", "a", "model"]) == 0
    assert sorted(os.listdir()) == ["a", "model"] and os.listdir("model") == ["model.safetensors"]


def test_the_name_to_which_saves_move_what_they_replace_is_no_path_of_a_save(tmp_path):
    with pytest.raises(ValueError, match="path must not end with '.replaced', got 'a.replaced': a save to 'a' moves"):
        sw.save(tmp_path / "a.replaced", trained()[0])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("address", ["s3://", "gs:///", "memory://", "s3:///"])
def test_a_scheme_alone_is_refused_and_makes_no_folder(tmp_path, monkeypatch, address):
    """As f"s3://{bucket}" is with an empty name."""
    pytest.importorskip("fsspec")
    monkeypatch.chdir(tmp_path)
    module, optimizer = trained()
    for call in (sw.save, sw.load, lambda *args: sw.Checkpointer(*args, optimizer)):
        with pytest.raises(ValueError, match=f"got the address '{address}', with no place behind its scheme"):
            call(address, module)
    assert os.listdir(tmp_path) == []


ADDRESSES = ["s3://bucket/run", "gs://b/a", "file:///tmp/a", "x://b/a", "1s3://b/a", Path("s3://b/a")]


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_without_fsspec_is_no_path(tmp_path, monkeypatch, address):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    module, optimizer = trained()
    calls = [
        lambda: sw.save(address, module),
        lambda: sw.load(address, module),
        lambda: sw.Checkpointer(address, module, optimizer),
        lambda: dcp.load(module.state_dict(), storage_reader=StorageReader(address), no_dist=True),
        lambda: dcp.save(module.state_dict(), storage_writer=StorageWriter(address), no_dist=True),
    ]
    for call in calls:
        with pytest.raises(
            (ValueError, CheckpointException), match=r"must be a path of a mounted file system, got the address"
        ):
            call()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("more", [[1], [1] * 300_000])
def test_a_manifest_of_a_newer_version_is_told_apart_from_a_damaged_one_by_its_head(tmp_path, more):
    """restore() must not go back to an older checkpoint, whatever values the newer format has."""
    model, optimizer = trained()
    with sw.Checkpointer(tmp_path, model, optimizer) as checkpoints:
        for step in range(2):
            checkpoints.save(step)
            checkpoints.wait()
        path = tmp_path / "step-000002" / "MANIFEST.json"
        found = json.loads(path.read_text())
        del found["self_crc32c"]
        head = json.dumps({**found, "version": 99, "more": more}, separators=(",", ":")).encode()[:-1]
        text = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        path.write_bytes(head + f',"self_crc32c":"{crc32c(text.data_ptr(), text.numel()):08x}"}}\n'.encode())
        with pytest.raises(sw.CheckpointError, match="it has version 99, this program reads up to 1"):
            checkpoints.restore()


@pytest.mark.parametrize("has_holes", [False, True])
@pytest.mark.parametrize("nbytes", [3 << 20, 64 << 20])
def test_a_manifest_that_its_folder_does_not_warrant_costs_no_memory(tmp_path, nbytes, has_holes):
    """A sparse file beside it, of which no byte is on the disk, warrants its length, but not its values."""
    sw.save(tmp_path / "a", trained()[0])
    path = tmp_path / "a" / "MANIFEST.json"
    found = json.loads(path.read_text())
    del found["self_crc32c"]
    head = json.dumps({**found, "more": []}, separators=(",", ":")).encode()[:-2]
    text = torch.frombuffer(bytearray(head + b"0," * (nbytes // 2) + b"0]"), dtype=torch.uint8)
    seal = crc32c(text.data_ptr(), text.numel())
    path.write_bytes(text.numpy().tobytes() + f',"self_crc32c":"{seal:08x}"}}\n'.encode())
    del text
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if has_holes:
        with (tmp_path / "a" / "big").open("wb") as file:
            file.truncate(2 << 40)
    why = "too many values" if has_holes else "is too long for this folder"
    with pytest.raises(sw.CheckpointError, match=why):
        sw.load(tmp_path / "a", trained()[0])
    if nbytes > 8 << 20:  # its values would take 2 GiB
        allowed = 2 * nbytes if has_holes else 0  # the text, and its strings decoded
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < (allowed >> 10) + (64 << 10)  # KiB


def test_more_state_than_a_manifest_can_list_is_refused_before_a_byte_is_written(tmp_path):
    plan = CheckpointPlan([("model", False, 2**53, "{}", [("a", "U8", [33 << 40], 2)])], [])
    saver = CheckpointSaver(0, 1)
    with pytest.raises((sw.CheckpointError, ValueError), match="manifest"):
        saver.begin(
            folder=str(tmp_path / "a"), nonce="n1", replaces="", number=1, step=1, metric=None, shared=plan,
            shared_sources=[], own=None, own_sources=[], lazy=False, stale=[], retired=[], timeout_s=20.0, device=None,
        )  # fmt: skip
    saver.close()
    assert os.listdir(tmp_path) == []
