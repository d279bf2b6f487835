"""Laws of the device kernels. Their text compiles for every architecture of the installed compilers, with the engine's
options. Run by the host's compiler it has the host kernels' bits. An image is found in the promised order. The cache is
private, complete or absent, and never stale.
"""

from __future__ import annotations

import json
import locale
import os
import re
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cuda_files
import pytest
from shardwright import _engine
from shardwright.torch_compat.cuda import CudaRuntime
from shardwright_tools.cli import main
from test_csrc import BUILDERS, ROOT, Builder, shipped_flags
from test_fake_gpu import kernel_text, libraries

LONG = os.environ.get("SW_TEST_LONG") == "1"
OLDEST, NEWEST = 75, 120
NVRTC = cuda_files.nvrtc_libraries()


def nvrtc_places() -> dict[str, str]:
    if not NVRTC:
        pytest.skip("no libnvrtc on this machine (requirements/abi.txt names a package that has it)")
    library, builtins = NVRTC[0]
    return {"nvrtc": str(library), "builtins": str(builtins)}


def nvcc_architectures() -> list[int]:
    if cuda_files.nvcc() is None:
        return []
    done = subprocess.run([cuda_files.nvcc(), "--list-gpu-arch"], capture_output=True, text=True)
    return sorted(arch for arch in map(int, re.findall(r"compute_(\d+)", done.stdout)) if OLDEST <= arch <= NEWEST)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    text, _ = _engine.device_kernel_source()
    (tmp_path / "shardwright.cu").write_text(text)
    return tmp_path / "shardwright.cu"


def targets(architectures: list[int]) -> list[list[str]]:
    """Return nvcc's options, one list a run.

    The long form (`make kernels`) compiles each architecture alone. The quick form makes machine code for one of them from the
    compiler's output for the oldest: the text asks for no architecture.
    """
    if LONG:
        return [[f"-arch=sm_{number}", "-cubin"] for number in architectures]
    pairs = [f"arch=compute_{OLDEST},code=sm_{number}" for number in architectures if number == 90]
    return [[part for pair in pairs for part in ("-gencode", pair)] + ["-fatbin"]] if pairs else []


@pytest.mark.parametrize("target", targets(nvcc_architectures()) or [None], ids=lambda t: t and t[0].strip("-"))
def test_nvcc_compiles_the_text_and_no_kernel_spills(target: list[str] | None, source: Path) -> None:
    if target is None:
        pytest.skip("no nvcc on this machine")
    text, options = _engine.device_kernel_source()
    assert "__CUDA_ARCH__" not in text
    command = [str(cuda_files.nvcc()), *options, *target, "-Werror", "all-warnings", "-Xptxas", "-v"]
    done = subprocess.run(
        [*command, "-o", str(source.with_suffix(".out")), str(source)], capture_output=True, text=True
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    compiled = re.findall(r"Compiling entry function '(\w+)' for '(\w+)'", said)
    spills = re.findall(r"properties for (\w+)\n.* (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert len(compiled) >= 17 and len(spills) >= len(compiled)
    assert [each for each in spills if each[1:] != ("0", "0")] == []


def test_the_text_includes_nothing() -> None:
    text, _ = _engine.device_kernel_source()
    assert re.findall(r"^\s*#\s*include", text, re.MULTILINE) == []
    files = sorted(path.name for path in (ROOT / "csrc" / "kernels" / "cuda").iterdir())
    named = (ROOT / "csrc" / "kernels" / "kernel_source.c").read_text()
    tested = (ROOT / "tests" / "fake" / "kernel_text.cpp").read_text()
    assert [name for name in files if f'"cuda/{name}"' not in named or f"cuda/{name}" not in tested] == []


@pytest.mark.parametrize("library", NVRTC if LONG else NVRTC[:1], ids=lambda pair: pair[0].name)
def test_nvrtc_compiles_the_text_at_run_time(library: tuple[Path, Path | None]) -> None:
    encoding = locale.getpreferredencoding(False)
    origin, image = _engine.device_kernel_image(9, 0, nvrtc=str(library[0]), builtins=str(library[1]))
    assert locale.getpreferredencoding(False) == encoding  # nvrtc 12.1 changes the calling thread's locale
    assert origin == "compiled, not cached" and image[:4] == b"\x7fELF"
    for kernel in (
        b"sw_cast",
        b"sw_pack",
        b"sw_fold",
        b"sw_adam",
        b"sw_sgd",
        b"sw_norm",
        b"sw_quantize",
        b"sw_fold_records",
        b"sw_decode",
        b"sw_project",
    ):
        assert kernel in image


def test_a_gpu_newer_than_the_compiler_gets_ptx() -> None:
    _, image = _engine.device_kernel_image(99, 0, **nvrtc_places())
    assert re.search(rb"\.target sm_\d+", image) and image.endswith(b"\0")


def test_a_gpu_older_than_the_compiler_is_named() -> None:
    with pytest.raises(
        NotImplementedError, match=r"no image of the kernels for sm_20.*no architecture as old as sm_20"
    ):
        _engine.device_kernel_image(2, 0, **nvrtc_places())


def test_the_second_process_finds_the_image_in_the_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    origin, first = _engine.device_kernel_image(9, 0, cache=str(cache), **nvrtc_places())
    assert origin == "compiled" and cache.stat().st_mode & 0o777 == 0o700
    origin, second = _engine.device_kernel_image(9, 0, cache=str(cache))
    assert origin == "cached" and second == first
    (file,) = cache.iterdir()
    assert re.fullmatch(r"shardwright-[0-9a-f]{16}-sm_90-nvrtc\d+\.\d+\.image", file.name)
    origin, third = _engine.device_kernel_image(9, 0, packaged=str(cache), nvrtc="/nowhere.so")
    assert origin == "packaged" and third == first

    whole = file.read_bytes()  # a file cut or changed at any byte is ignored and replaced
    for damaged in (whole[:-1], whole[:16], whole[:7], b"", whole[:40] + bytes([whole[40] ^ 1]) + whole[41:]):
        file.write_bytes(damaged)
        with pytest.raises(NotImplementedError, match="cached in .*: none"):
            _engine.device_kernel_image(9, 0, cache=str(cache))
    assert _engine.device_kernel_image(9, 0, cache=str(cache), **nvrtc_places()) == ("compiled", first)
    assert file.read_bytes() == whole


def test_hosts_with_different_compilers_share_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = str(libraries(BUILDERS["plain"].mode)["libcuda.so.1"])  # one that the tests made
    tmp_path.chmod(0o700)
    for version in ("13.0", "12.8", "12.10", "13.0"):
        monkeypatch.setenv("SIM_NVRTC_VERSION", version)
        before = {file.name for file in tmp_path.iterdir()}
        origin, _ = _engine.device_kernel_image(9, 0, cache=str(tmp_path), nvrtc=compiler)
        assert origin == ("cached" if any(f"-nvrtc{version}." in name for name in before) else "compiled"), version
    images = sorted(tmp_path.iterdir())
    assert [file.name.split("-nvrtc")[1] for file in images] == ["12.10.image", "12.8.image", "13.0.image"]
    for file in images[:1] + images[2:]:  # without a compiler the oldest one's file counts, here the only sound one
        file.write_bytes(b"damaged")
    assert _engine.device_kernel_image(9, 0, cache=str(tmp_path))[0] == "cached"
    assert _engine.device_kernel_image(9, 0, packaged=str(tmp_path))[0] == "packaged"


def test_a_cache_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    assert (
        _engine.device_kernel_image(9, 0, cache=str(tmp_path / "cache"), **nvrtc_places())[0] == "compiled, not cached"
    )
    (tmp_path / "link").symlink_to(tmp_path)
    assert (
        _engine.device_kernel_image(9, 0, cache=str(tmp_path / "link"), **nvrtc_places())[0] == "compiled, not cached"
    )
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.skipif(not LONG, reason="long form only (SW_TEST_LONG=1)")
def test_concurrent_writers_leave_one_complete_file(tmp_path: Path) -> None:
    places, stop = nvrtc_places(), threading.Event()
    seen: set[str] = set()

    def read() -> None:
        while not stop.is_set():
            try:
                seen.add(_engine.device_kernel_image(9, 0, cache=str(tmp_path))[0])
            except NotImplementedError:
                pass

    tmp_path.chmod(0o700)
    reader = threading.Thread(target=read)
    reader.start()
    with ThreadPoolExecutor(4) as pool:
        images = [
            image
            for _, image in pool.map(
                lambda _: _engine.device_kernel_image(9, 0, cache=str(tmp_path), **places), range(8)
            )
        ]
    stop.set()
    reader.join()
    assert len(set(images)) == 1 and seen <= {"cached"} and len(list(tmp_path.iterdir())) == 1


def test_without_any_image_the_error_names_each_place() -> None:
    with pytest.raises(NotImplementedError) as caught:
        _engine.device_kernel_image(9, 0, packaged="/no/images", cache="/no/cache", nvrtc="/no/libnvrtc.so")
    for piece in ("sm_90", "packaged in /no/images: none", "cached in /no/cache: none", "/no/libnvrtc.so"):
        assert piece in str(caught.value)


def test_images_are_compiled_ahead_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    folder, compiler = tmp_path / "images", nvrtc_places()["nvrtc"]
    assert main(["kernels", "--arch", "9.0", "--to", str(folder), "--nvrtc", compiler]) == 0
    assert re.fullmatch(r"sm_90: written, \d+ bytes of machine code\n", capsys.readouterr().out)
    assert main(["kernels", "--json", "--arch", "sm_90", "--to", str(folder), "--nvrtc", "/nowhere.so"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] and said["images"][0]["detail"].startswith("exists already")
    monkeypatch.setenv("SHARDWRIGHT_KERNELS", str(folder))  # as programs on hosts without a compiler find them
    places = CudaRuntime().libraries() | {"nvrtc": None}
    assert _engine.device_kernel_image(9, 0, **places)[0] == "packaged"
    assert main(["kernels", "--arch", "90"]) == 0 and "packaged" in capsys.readouterr().out

    assert main(["kernels", "--arch", "80", "90", "--nvrtc", "/nowhere.so"]) == 1
    told = capsys.readouterr()
    assert "sm_90: packaged" in told.out and "sm_80: no image" in told.err and "/nowhere.so" in told.err
    folder.chmod(0o777)
    shared = ["--arch", "90", "--to", str(folder)]
    # another test of this process may have loaded a simulated driver
    monkeypatch.setattr("shardwright_tools.cli.kernels._of_this_machine", list)
    for wrong in (["--arch", "70"], ["--arch", "hopper"], ["--to", "/proc/none/here", "--arch", "90"], shared, []):
        with pytest.raises(SystemExit) as usage:
            main(["kernels", *wrong])
        assert usage.value.code == 2
    assert "no GPU found" in capsys.readouterr().err


def text_program(builder: Builder) -> Path:
    """Return tests/fake/test_kernel_text.c, linked with the kernels' text as C++ and the engine."""
    text = kernel_text()
    own = ROOT / "tests" / "fake" / "test_kernel_text.c"
    return builder.program(own, [str(text), f"-Wl,-rpath,{text.parent}"])


def test_the_text_has_the_bits_of_the_host_kernels() -> None:
    assert "-ffp-contract=off" in shipped_flags()
    done = subprocess.run([str(text_program(BUILDERS["plain"]))], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
