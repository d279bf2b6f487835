"""Laws of the GPU path's Python that need no GPU: where the kernel compiler is searched, the error for a module on
several devices, the accepted device_ids, and the reason that the GPU benchmark prints when it is skipped.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import cuda_files
import pytest
import shardwright as sw
import torch
from shardwright import _engine
from shardwright.backend.device_link import DeviceLink
from shardwright.layout.param_table import _check_one_device
from shardwright.parallel.ddp_compat import check_device_ids, to_device
from shardwright.torch_compat import interrupts
from shardwright.torch_compat.cuda import CudaRuntime, _cache_folder, find_nvrtc

ROOT = Path(__file__).resolve().parents[1]


def test_the_compiler_is_that_of_torchs_cuda(tmp_path: Path) -> None:
    for name in (
        "cuda_nvrtc/lib/libnvrtc.so.12",
        "cuda_nvrtc/lib/libnvrtc-builtins.so.12.8",
        "cu13/lib/libnvrtc.so.13",
        "of 11/lib/libnvrtc.so.11.2",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    lib = tmp_path / "cuda_nvrtc" / "lib"
    assert find_nvrtc([tmp_path], "12.8") == (str(lib / "libnvrtc.so.12"), str(lib / "libnvrtc-builtins.so.12.8"))
    assert find_nvrtc([tmp_path], "11.8") == (str(tmp_path / "of 11/lib/libnvrtc.so.11.2"), None)
    assert find_nvrtc([tmp_path], "13.0") == (str(tmp_path / "cu13/lib/libnvrtc.so.13"), None)
    assert find_nvrtc([tmp_path / "elsewhere"], "12.8") == ("libnvrtc.so.12", None)  # the loader's to find
    assert find_nvrtc([tmp_path], None) == (None, None)


def test_a_real_nccl_gives_identifiers_and_stays() -> None:
    """The library stays loaded even if no other code holds it: each identifier has a thread inside it."""
    libraries = cuda_files.nccl_libraries()
    if not libraries:
        pytest.skip("no libnccl on this machine: torch's CUDA wheels bring one")
    code = """
import sys
import torch
from shardwright import _engine
mapped = lambda: {line.split()[-1] for line in open("/proc/self/maps") if "libnccl.so" in line}
try:
    first = _engine.nccl_unique_id()  # torch's
except NotImplementedError as error:
    assert "libnccl.so.2 cannot be used" in str(error) and not mapped()
    first = _engine.nccl_unique_id(sys.argv[1])
second = _engine.nccl_unique_id()  # by its name: the one that is loaded
assert len(mapped()) == 1 and len(first) == len(second) == 128 and first != second
"""
    environment = {**os.environ, "NCCL_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", code, str(libraries[0])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no HOME and no entry in passwd
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert _cache_folder() is None and CudaRuntime().libraries()["cache"] is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert _cache_folder() == str(tmp_path / "cache" / "shardwright") and (tmp_path / "cache").is_dir()


def test_a_module_on_several_devices_is_an_error_that_names_two_of_its_tensors() -> None:
    pairs = [("a.weight", torch.empty(2)), ("b.weight", torch.empty(2, device="meta"))]
    with pytest.raises(
        sw.Error, match="'a.weight' is on cpu and 'b.weight' on meta: a wrapped module must be on one device"
    ):
        _check_one_device(pairs)
    _check_one_device(pairs[:1])


def test_a_row_of_ranks_may_be_linked_while_the_group_of_all_is_looked_after() -> None:
    """The program's thread changes the table while another thread iterates over it. An exception there would end all
    communicators.
    """
    main, first, second = (DeviceLink.__new__(DeviceLink) for _ in range(3))
    for link in (main, first, second):
        link._main, link._rows, link._lender = (None if link is main else main), (), None
        link.comm = mock.Mock(is_alive=True, has_failed=False)
    main.host = mock.Mock(is_alive=True)
    first._join_family()

    class Linking:
        @property
        def has_failed(self) -> bool:
            second._join_family()
            return False

    first.comm = Linking()
    main.check()
    assert main._live_rows() == [first, second]


@pytest.mark.parametrize("kind", [sw.optim.AdamW, lambda p: sw.optim.SGD(p, momentum=0.9)], ids=["AdamW", "SGD"])
def test_state_that_did_not_follow_its_parameter_is_named(kind: Any) -> None:
    parameter = torch.nn.Parameter(torch.empty(3, device="meta"))  # which stands for a GPU's
    optimizer = kind([parameter])
    kept = {name: torch.zeros(3) for name in ("exp_avg", "exp_avg_sq", "momentum_buffer")}
    optimizer.state[parameter] = {"step": torch.tensor(1.0), **kept}
    parameter.grad = torch.empty(3, device="meta")
    with pytest.raises(ValueError, match="the state 'exp_avg' of a parameter on meta is on cpu"):
        optimizer.step()


def test_device_ids_name_the_modules_own_gpu() -> None:
    first = torch.device("cuda", 0)
    check_device_ids(None, None, torch.device("cpu"))
    for ids, output in (([0], None), (["cuda:0"], 0), ([first], first), (None, None)):
        check_device_ids(ids, output, first)
    for ids, output, device in (
        ([1], None, first),
        ([0, 1], None, first),
        ([0], 1, first),
        ([0], None, torch.device("cpu")),
    ):
        with pytest.raises(ValueError, match="must name the one GPU that the module is on"):
            check_device_ids(ids, output, device)


def test_inputs_are_moved_whatever_they_are_in() -> None:
    moved = to_device(({"x": [torch.ones(2)], "n": 3}, "text"), torch.device("meta"))
    assert moved[0]["x"][0].is_meta and moved[0]["n"] == 3 and moved[1] == "text"


def test_a_packed_sequence_moves_and_its_lengths_stay_on_the_cpu() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    moved = to_device([packed], torch.device("meta"))[0]
    assert moved.data.device.type == "meta" and moved.batch_sizes.device.type == "cpu"


def test_the_benchmark_on_gpus_says_why_it_was_skipped() -> None:
    try:
        _engine.cuda_devices()
        pytest.skip("there is a GPU")
    except NotImplementedError as error:
        reason = str(error)
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "bench_gpu.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"bench": "gpu", "skipped": reason}


def test_loaded_state_lies_beside_its_slice_but_for_a_count_of_steps_on_the_host() -> None:
    from shardwright.optim.sliced_state import beside

    piece = torch.empty(3, device="meta")
    state = {"step": torch.tensor(2.0), "exp_avg": torch.zeros(3), "row": torch.zeros(1), "name": "x"}
    for group, counts in (
        ({}, "cpu"),
        ({"fused": None}, "cpu"),
        ({"fused": True}, "meta"),
        ({"capturable": True}, "meta"),
    ):
        found = beside(state, piece, group)
        devices = {key: value.device.type for key, value in found.items() if isinstance(value, torch.Tensor)}
        assert devices == {"step": counts, "exp_avg": "meta", "row": "meta"} and found["name"] == "x"


@pytest.mark.parametrize("handler", [signal.default_int_handler, lambda *_: None], ids=["Python's", "the program's"])
@pytest.mark.parametrize("task", [0, -1], ids=["of the backward", "of another kind"])
def test_torchs_thread_hears_an_interrupt_of_the_main_one(task: int, handler: Any) -> None:
    """And only that thread, and only if the handler is sure to raise. Whoever else reads signals misses none."""
    heard: list[bool] = []
    read, write = os.pipe()
    os.set_blocking(write, False)

    def wait() -> None:
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        end = time.monotonic() + 0.3
        while time.monotonic() < end and not heard:
            try:
                interrupts.check_interrupt()
            except KeyboardInterrupt:
                heard.append(True)
            time.sleep(0.01)

    def run() -> None:
        thread = threading.Thread(target=wait)
        thread.start()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # C's handler runs in the other thread
        try:
            ctypes.CDLL(None).usleep(500_000)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            thread.join()

    before, fd = signal.signal(signal.SIGINT, handler), signal.set_wakeup_fd(write)
    try:
        with mock.patch.object(interrupts, "graph_task_id", lambda: task):
            interrupts._hearing(run)()
    except KeyboardInterrupt:
        pass
    finally:
        restored = signal.set_wakeup_fd(fd)
        signal.signal(signal.SIGINT, before)
    assert restored == write
    assert os.read(read, 8) == bytes([signal.SIGINT])
    assert bool(heard) == (task == 0 and handler is signal.default_int_handler)
    os.close(read)
    os.close(write)
