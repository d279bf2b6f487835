"""Law: a hostile file ends in an error of one sentence. It runs no code, changes no class of this process, forges no
numpy memory, and touches nothing outside its folder. An additional value never replaces the model.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from shardwright import CheckpointError
from shardwright.formats.unpickle import Unpickler, load_torch_file, without_placeholders
from shardwright_tools import convert
from shardwright_tools.convert.contents import Contents, Lazy

pytestmark = pytest.mark.timeout(300)


def a_model(**others: Any) -> Contents:
    return Contents({"w": Lazy.of(torch.ones(2))}, **others)


@pytest.mark.parametrize("extra_record", ["constants.pkl", "code/__torch__.py"])
def test_torchscript_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra_record: str) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(torch.jit, "load", lambda *a, **_: loaded.append(a))
    path = str(tmp_path / "a.pt")
    torch.save({"w": torch.ones(2)}, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"a/{extra_record}", b"")
    for source in (path, io.BytesIO(Path(path).read_bytes())):
        with pytest.raises(CheckpointError, match="TorchScript archive"):
            load_torch_file(source)
    assert not loaded


@dataclasses.dataclass
class Call:
    """An object whose pickle calls a function and then sets the state of the result, if given."""

    function: Any
    arguments: tuple[Any, ...]
    state: Any = None

    def __reduce__(self) -> Any:
        return (self.function, self.arguments, *(() if self.state is None else (self.state,)))


def of_pickle(value: Any) -> Any:
    return Unpickler(io.BytesIO(pickle.dumps(value, 2))).load()


def test_numpy_gets_plain_numbers_alone() -> None:
    core = numpy._core.multiarray
    of_pointers = Call(numpy.dtype, ("O8", False, True), (3, "|", None, None, None, -1, -1, 0))  # not marked as objects
    of_fields = Call(
        numpy.dtype, ("V8", False, True), (3, "|", None, ("x",), {"x": (numpy.dtype("i8"), 1 << 20)}, 8, 1, 0)
    )
    doubles, pointer = numpy.dtype("f8"), b"\x10" * 8
    for dtype, data, shape in (
        (of_pointers, pointer, (1,)),
        (of_fields, pointer, (1,)),
        (doubles, pointer, (1 << 20,)),
        (doubles, pointer, (-1,)),
        ("f8", pointer, (1,)),
    ):
        left_out: list[str] = []
        found = of_pickle({"x": Call(core._reconstruct, (numpy.ndarray, (0,), b"b"), (1, shape, dtype, False, data))})
        assert without_placeholders(found, "file", left_out) == {} and "numpy" in left_out[0]
    for forged in (Call(core.scalar, (of_pointers, pointer)), Call(core.scalar, (doubles, pointer[1:]))):
        assert without_placeholders({"x": of_pickle(forged)}, "file", []) == {}
    plain = {
        "a": numpy.arange(6.0, dtype=">f4").reshape(2, 3), "f": numpy.asfortranarray(numpy.arange(6).reshape(2, 3)),
        "b": numpy.array([True, False]), "s": numpy.float64(0.5), "n": numpy.array(3, dtype="u2"),
    }  # fmt: skip
    found = without_placeholders(of_pickle(plain), "file", [])
    for key, value in plain.items():
        assert numpy.array_equal(found[key], value) and found[key].dtype == value.dtype.newbyteorder("="), key


def test_build_changes_no_class_of_this_process(tmp_path: Path) -> None:
    sets = b"(N}X\x08\x00\x00\x00poisonedK\x01stb."  # BUILD with the state (None, {"poisoned": 1})
    for home, name, alive in (
        ("collections", "Counter", collections.Counter),
        ("torch.distributed.checkpoint.metadata", "Metadata", dcp.Metadata),
    ):
        (tmp_path / ".metadata").write_bytes(b"\x80\x02c" + home.encode() + b"\n" + name.encode() + b"\n" + sets)
        try:
            with pytest.raises(CheckpointError, match="which it did not make"):
                convert.read(str(tmp_path), kind="dcp")
            assert not hasattr(alive, "poisoned")
        finally:
            if hasattr(alive, "poisoned"):
                del alive.poisoned


def dcp_folder(path: Path, state: Any) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def test_dcp_reads_inside_its_folder_and_keeps_the_step(tmp_path: Path) -> None:
    folder = dcp_folder(tmp_path / "a", {"model": {"w": torch.ones(2)}, "step": 7})
    found = convert.read(str(folder))
    assert found.step == 7 and "step" not in found.extra
    assert (
        convert.read(str(dcp_folder(tmp_path / "t", {"model": {"w": torch.ones(2)}, "step": torch.tensor(5)}))).step
        == 5
    )
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (data,) = folder.glob("*.distcp")
    os.rename(data, tmp_path / "outside")
    for outside in ("../outside", str(tmp_path / "outside"), "x/../../outside"):
        for each in metadata.storage_data.values():
            each.relative_path = outside
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match="not in its folder"):
            convert.read(str(folder)).model["w"].read()


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_a_further_value_never_replaces_the_model(tmp_path: Path, kind: str) -> None:
    for taken in ("model", "step"):
        with pytest.raises(CheckpointError, match=f"under '{taken}'"):
            convert.write(a_model(extra={taken: {"w": 0}}), str(tmp_path / taken), kind, lambda _: None)
        assert not os.path.lexists(tmp_path / taken)
    convert.write(a_model(extra={"more": 1}, step=3), str(tmp_path / "x.pt"), kind, lambda _: None)
    assert convert.read(str(tmp_path / "x.pt"), kind=kind).step == 3


def test_universal_files_stay_in_their_folders(tmp_path: Path) -> None:
    value = Lazy.of(torch.zeros(2))
    for key in ("../../../../escaped", "a/b", "fp32", ".hidden"):
        contents = a_model(groups=[{"params": ["w"]}], state={"w": {key: value, "exp_avg": value}})
        with pytest.raises(CheckpointError, match="cannot be the name of a file|the weights' own file"):
            convert.write(contents, str(tmp_path / "x"), "deepspeed-universal", lambda _: None)
    name = "../../../secret"
    contents = Contents({name: Lazy.of(torch.ones(2))}, groups=[{"params": [name]}], state={name: {}})
    with pytest.raises(CheckpointError, match="cannot be the name of a file"):
        convert.write(contents, str(tmp_path / "x"), "deepspeed-universal", lambda _: None)
    assert os.listdir(tmp_path) == []
    secret, folder = tmp_path / "secret", tmp_path / "in" / "tag"
    (folder / "zero").mkdir(parents=True), secret.mkdir()
    torch.save({"param": torch.full((2,), 42.0)}, secret / "fp32.pt")
    body = {"module": {name: torch.ones(2)}, "param_shapes": [{name: torch.Size([2])}]}
    torch.save(body, folder / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="cannot be the name of a file"):
        convert.read(str(folder))
