"""Laws of a load: any ranges, read by any number of threads, through the page cache or past it, have the bytes of the
files. A damaged block is named. Former values in live memory can be restored whatever the outcome.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import shardwright as sw
import torch
import torch.distributed.checkpoint
from shardwright._engine import CheckpointFolder
from shardwright.checkpoint import StorageWriter, dcp
from shardwright.checkpoint.restore import filling

BLOCK = 1 << 20
GUARD = 64


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three files of 3 to 6 blocks with a partial last block, and small files."""
    torch.manual_seed(0)
    model = torch.nn.ParameterList([torch.randn(n) for n in (1_000_003, 300_001, 7, 700_000, 1_200_011)])
    path = tmp_path_factory.mktemp("load") / "a"
    sw.save(path, model, max_file_bytes=6_000_000)
    return path


def forget(path: Path) -> None:
    """Drop the files from the page cache."""
    for file in path.rglob("*.*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class Memory:
    """Return random ranges, destinations between guard bytes, and copies of former values where `undo` asks for them."""

    def __init__(self, folder: CheckpointFolder, seed: int) -> None:
        chance = random.Random(seed)
        self.wanted: list[tuple[str, int, int, bytearray, bytearray | None]] = []
        for path, nbytes in sorted(folder.files.items()):
            at = chance.choice([0, 0, 1, chance.randrange(nbytes)])
            while at < nbytes:
                n = min(
                    nbytes - at,
                    chance.choice([1, 100, 4096, BLOCK, BLOCK + 1, 3 * BLOCK, chance.randrange(1, nbytes + 1)]),
                )
                undo = bytearray(n) if chance.random() < 0.5 else None
                self.wanted.append((path, at, n, bytearray(b"\x5a" * (n + 2 * GUARD)), undo))
                at += n + chance.choice([0, 0, 1, 5000, BLOCK])

    def ranges(self) -> Iterator[tuple[str, int, int, int, int]]:
        for path, at, n, memory, undo in self.wanted:
            yield path, at, n, address_of(memory) + GUARD, 0 if undo is None else address_of(undo)

    def check(self, folder: CheckpointFolder) -> None:
        for path, at, n, memory, undo in self.wanted:
            with open(f"{folder.path}/{path}", "rb") as file:
                file.seek(at)
                assert memory[GUARD : GUARD + n] == file.read(n), (path, at, n)
            assert memory[:GUARD] == memory[GUARD + n :] == b"\x5a" * GUARD
            assert undo is None or undo == b"\x5a" * n


def address_of(memory: bytearray) -> int:
    return ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))


@pytest.mark.parametrize("direct", [False, True], ids=["cached", "direct"])
@pytest.mark.parametrize("threads", [1, 4])
def test_ranges_are_the_bytes_of_the_files(saved: Path, threads: int, direct: bool) -> None:
    folder = CheckpointFolder(str(saved))
    for seed in range(40):
        memory = Memory(folder, seed)
        if direct and seed % 4 < 3:
            forget(saved)
        folder.load(list(memory.ranges()), threads, direct, (seed % 3, 3))
        memory.check(folder)


@pytest.mark.parametrize("direct", [False, True], ids=["cached", "direct"])
def test_a_damaged_block_is_named_and_what_stood_there_can_be_had_back(
    tmp_path: Path, saved: Path, direct: bool
) -> None:
    copy = tmp_path / "a"
    shutil.copytree(saved, copy)
    path = sorted(copy.glob("model-*.safetensors"))[1]
    for block in (0, 2):
        data = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(block * BLOCK + 77)
            file.write(bytes([data[block * BLOCK + 77] ^ 4]))
        folder = CheckpointFolder(str(copy))
        for seed in range(10):
            forget(copy)
            memory = Memory(folder, seed)
            memory.wanted = [(name, at, n, place, bytearray(n)) for name, at, n, place, _ in memory.wanted]
            touched = any(
                name == path.name and at < (block + 1) * BLOCK and at + n > block * BLOCK
                for name, at, n, *_ in memory.wanted
            )
            if touched:
                with pytest.raises(
                    sw.CheckpointError, match=f"{path.name}' was changed or did not survive: block {block} "
                ):
                    folder.load(list(memory.ranges()), 3, direct, (0, 1))
            else:
                folder.load(list(memory.ranges()), 3, direct, (0, 1))
            for _, _, n, _, undo in memory.wanted:
                assert undo == b"\x5a" * n
        path.write_bytes(data)


def test_what_cannot_be_loaded_is_named(saved: Path) -> None:
    folder = CheckpointFolder(str(saved))
    name, nbytes = next(iter(folder.files.items()))
    with pytest.raises(ValueError, match="has no file 'other'"):
        folder.load([("other", 0, 1, 0, 0)], 1, False, (0, 1))
    for ranges in (
        [(name, 0, nbytes + 1, 0, 0)],
        [(name, 5, 5, 0, 0), (name, 9, 1, 0, 0)],
        [(name, 2**64 - 1, 2, 0, 0)],
    ):
        with pytest.raises(sw.CheckpointError, match="ranges must ascend inside its"):
            folder.load(ranges, 1, False, (0, 1))
    folder.load([], 3, True, (0, 1))


@pytest.mark.parametrize("count", [1, 6000])
def test_a_catalog_has_whole_headers_and_a_rank_that_received_it_opens_no_file(tmp_path: Path, count: int) -> None:
    """6,000 names of 200 characters make a header of more than a block."""
    model = torch.nn.ParameterDict({f"{number:0200d}": torch.full((3,), float(number)) for number in range(count)})
    sw.save(tmp_path / "a", model)
    folder = CheckpointFolder(str(tmp_path / "a"))
    names = [each for each in folder.files if each.endswith(".safetensors")]
    there = CheckpointFolder.received(folder.path, folder.catalog([*names, "state.json"]))
    before = {name: folder.tensors(name) for name in names}, folder.read_bytes("state.json")
    (tmp_path / "a").rename(tmp_path / "elsewhere")
    assert ({name: there.tensors(name) for name in names}, there.read_bytes("state.json")) == before
    assert sum(len(tensors) for _, tensors in before[0].values()) >= count
    (data,) = (tmp_path / "elsewhere").glob("model*.safetensors")
    content = bytearray(data.read_bytes())
    block = 1 if count > 1 else 0  # the last of the header
    content[block * BLOCK + 1000] ^= 1
    data.write_bytes(content)
    with pytest.raises(sw.CheckpointError, match=f"was changed or did not survive: block {block} "):
        CheckpointFolder(str(tmp_path / "elsewhere")).catalog(names)


class Training:
    def __init__(self, folder: Path) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(900, 700)
        self.model.register_buffer("corner", self.model.weight.detach()[:2])  # a second tensor over the same memory
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.checkpoints = sw.Checkpointer(folder, self.model, self.optimizer)
        for step in range(2):
            self.step()
            self.checkpoints.save(step)
        self.checkpoints.wait()
        self.step()

    def step(self) -> None:
        self.model(torch.ones(1, 900)).square().sum().backward()
        self.optimizer.step()

    def state(self) -> list[torch.Tensor]:
        tensors = [*self.model.state_dict().values()]
        tensors += [value for state in self.optimizer.state.values() for value in state.values()]
        return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_live_tensors_are_what_they_were_if_a_restore_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error
) -> None:
    training = Training(tmp_path)
    before = training.state()
    verify = filling.Filler.verify

    def interrupted(filler: filling.Filler, first: int, end: int) -> None:
        verify(filler, first, end)
        assert not torch.equal(training.model.weight, before[0])  # they were read ahead
        raise error("now")

    with monkeypatch.context() as patch, training.checkpoints as checkpoints:
        patch.setattr(filling.Filler, "verify", interrupted)
        with pytest.raises((KeyboardInterrupt, sw.CheckpointError)):
            checkpoints.restore()
        assert all(torch.equal(a, b) for a, b in zip(training.state(), before))
        patch.undo()
        assert checkpoints.restore() == 2
        assert not torch.equal(training.model.weight, before[0])


@pytest.mark.parametrize("spare_blocks", [0, 1, 3, 100])
def test_any_amount_of_spare_memory_gives_the_same_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare_blocks: int
) -> None:
    training = Training(tmp_path)
    memory = [bytearray(BLOCK - 100) for _ in range(spare_blocks)]
    monkeypatch.setattr(
        sw.checkpoint.writing.Writer, "spare", lambda self: [(address_of(each), len(each)) for each in memory]
    )
    with training.checkpoints as checkpoints:
        assert checkpoints.restore() == 2
        restored = training.state()
        fresh = torch.nn.Linear(900, 700)
        fresh.register_buffer("corner", torch.zeros(2, 900))
        optimizer = torch.optim.AdamW(fresh.parameters())
        sw.load(tmp_path / "step-000002", fresh, optimizer)
        expected = [*fresh.state_dict().values()]
        expected += [value for state in optimizer.state.values() for value in state.values()]
        assert all(torch.equal(a, b) for a, b in zip(restored, expected, strict=True))
        version = training.model.weight._version
        assert checkpoints.restore() == 2 and training.model.weight._version > version


def test_torchs_save_copies_only_what_is_not_row_major_and_one_tensor_at_a_time(tmp_path: Path) -> None:
    whole = torch.randn(64, 48)
    tensors = {"row": whole, "part": whole[8:24], "turned": whole.t(), "again": torch.randn(9, 48).t()}
    written: dict[str, int] = {}
    alive: list[weakref.ref[torch.Tensor]] = []
    before = dcp._write

    def write(path: str, of_file: Any, ranges: Any, memory: torch.Tensor) -> Any:
        if path.endswith(".safetensors"):
            assert not [each for each in alive if each() is not None]
            alive.append(weakref.ref(memory))
            written[f"{ranges[0]}"] = memory.data_ptr()
        return before(path, of_file, ranges, memory)

    with mock.patch.object(dcp, "_write", write):
        torch.distributed.checkpoint.save(
            {"model": dict(tensors)}, storage_writer=StorageWriter(tmp_path / "a"), no_dist=True
        )
    lies_there = [address in {each.data_ptr() for each in tensors.values()} for address in written.values()]
    assert sorted(lies_there) == [False, False, True, True]
