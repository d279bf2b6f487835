"""Laws of the doctor on GPUs: each finding has a value, a verdict and, unless all is well, one line that mends it; a
machine without a GPU, or one whose GPUs are hidden, is no error; what is told comes from the folders it is given.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from shardwright.cli.doctor_gpu import Finding, findings


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def look(tmp_path: Path, environment: dict[str, str] | None = None) -> dict[str, Finding]:
    confs = (str(tmp_path / "etc.conf"), str(tmp_path / "home.conf"))
    maps = tmp_path / "maps"
    maps.touch()
    return {found.name: found for found in findings(environment or {}, tmp_path / "sys", confs, maps)}


def test_settings_that_hurt_are_named_with_what_to_do(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {"etc.conf": "NCCL_P2P_DISABLE=1 # by the vendor\nNCCL_ALGO=Ring\n", "home.conf": "NCCL_ALGO = Tree\n"},
    )
    found = look(tmp_path, {"NCCL_P2P_DISABLE": "0", "NCCL_SHM_DISABLE": "1", "NCCL_MIN_NCHANNELS": "4"})
    assert found["NCCL_P2P_DISABLE"] == Finding("NCCL_P2P_DISABLE", "0")  # the environment wins
    assert found["NCCL_ALGO"].value == "Tree" and found["NCCL_ALGO"].verdict == "slow"  # the user's file wins
    assert found["NCCL_SHM_DISABLE"].verdict == "slow" and "unset it" in found["NCCL_SHM_DISABLE"].fix
    assert found["NCCL_MIN_NCHANNELS"].verdict == "ok"


def test_the_transport_that_was_asked_for_is_judged(tmp_path: Path) -> None:
    for value, verdict in {"auto": "ok", "nccl": "ok", "ipc": "ok", "shm": "slow", "gloo": "bad"}.items():
        found = look(tmp_path, {"SHARDWRIGHT_GPU_TRANSPORT": value})["SHARDWRIGHT_GPU_TRANSPORT"]
        assert (found.value, found.verdict) == (value, verdict) and bool(found.fix) == (verdict != "ok")


def test_an_interface_that_does_not_exist_is_named(tmp_path: Path) -> None:
    plant(tmp_path / "sys", {"class/net/eth0/mtu": "1500", "class/net/lo/mtu": "65536"})
    for value, verdict in {"eth": None, "=eth0": None, "^docker": None, "ib0": "bad", "=eth": "bad"}.items():
        found = look(tmp_path, {"NCCL_SOCKET_IFNAME": value})["NCCL_SOCKET_IFNAME"]
        assert found.verdict == (verdict or "ok"), value
        assert verdict is None or "eth0, lo" in found.fix


def test_topology_comes_from_sys(tmp_path: Path) -> None:
    gpu = {"vendor": "0x10de\n", "class": "0x030200\n", "numa_node": "1\n", "max_link_width": "16\n"}
    files = {f"bus/pci/devices/0000:1b:00.0/{name}": text for name, text in gpu.items()}
    files["bus/pci/devices/0000:1b:00.0/current_link_width"] = "8\n"
    files["bus/pci/devices/0000:00:00.0/vendor"] = "0x8086\n"
    files["class/infiniband/mlx5_0/ports/1/state"] = "1: DOWN\n"
    files["class/infiniband/mlx5_0/ports/1/rate"] = "400 Gb/sec (4X NDR)\n"
    plant(tmp_path / "sys", files)
    found = look(tmp_path)
    assert found["PCI 0000:1b:00.0"].value == "NUMA node 1, PCIe x8 of x16"
    assert found["PCI 0000:1b:00.0"].verdict == "slow" and found["InfiniBand mlx5_0:1"].verdict == "slow"
    assert "PCI 0000:00:00.0" not in found


def test_two_nccls_in_a_process_are_bad(tmp_path: Path) -> None:
    (tmp_path / "maps").write_text("7f00-7f01 r-xp 0 0 1 /a/libnccl.so.2\n7f02-7f03 r-xp 0 0 1 /b/libnccl.so.2.21\n")
    found = look(tmp_path)["NCCL"]
    assert found.verdict == "bad" and "/a/libnccl.so.2, /b/libnccl.so.2.21" in found.value and found.fix


def test_hidden_gpus_are_no_error() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "shardwright", "doctor", "--json"], capture_output=True, text=True, env=environment
    )
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["ok"]
    (driver,) = [found for found in report["gpu"] if found["name"] == "CUDA driver"]
    assert driver["verdict"] == "note" and driver["fix"]
    for found in report["gpu"]:
        assert found["value"] and found["verdict"] in ("ok", "note", "slow", "bad")
        assert (found["verdict"] == "ok") or found["fix"], found
