"""Laws of the GPU part of the doctor. Each finding has a value, a verdict and, unless it is ok, a fix in one line. A
host without GPUs, or with hidden ones, is not an error. Findings come from the given folders, whatever bytes these
contain.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from shardwright_tools.doctor import machine as doctor_machine
from shardwright_tools.doctor import settings as doctor_settings
from shardwright_tools.doctor.gpu import findings
from shardwright_tools.doctor.machine import Finding, Machine

NO_DRIVER = "/nowhere/libcuda.so.1"


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode(errors="surrogateescape"))
    return root


def absent(words: list[str]) -> str:
    raise OSError(f"no {words[0]}")


def look(tmp_path: Path, environment: dict[str, str] | None = None, **other: Any) -> dict[str, Finding]:
    """Return findings by name; each name occurs once."""
    confs = (tmp_path / "home.conf", tmp_path / "etc.conf")
    (tmp_path / "proc" / "self").mkdir(parents=True, exist_ok=True)
    (tmp_path / "proc" / "self" / "maps").touch()
    folders = {"sys_root": tmp_path / "sys", "proc_root": tmp_path / "proc", "confs": confs}
    given = {"libcuda": NO_DRIVER, "nvrtc": "/nowhere/libnvrtc.so", "command": absent, **folders, **other}
    found = findings(Machine(environment or {}, **given))
    counts = Counter(finding.name for finding in found)
    assert max(counts.values()) == 1, counts
    for finding in found:
        assert finding.value and finding.verdict in ("ok", "note", "slow", "bad"), finding
        assert (finding.verdict == "ok") == (not finding.fix), finding
        assert "\n" not in finding.fix
    return {finding.name: finding for finding in found}


def library(folder: Path, name: str, text: str) -> Path:
    """Build a shared library of a few lines of C."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.c").write_text(text)
    made = folder / name
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(made), str(folder / f"{name}.c")], check=True)
    return made


# settings -----------------------------------------------------------------------------------------------------------


def test_harmful_settings_are_named_with_a_fix(tmp_path: Path) -> None:
    plant(tmp_path, {"etc.conf": "NCCL_P2P_DISABLE=1\nNCCL_ALGO=Ring\n", "home.conf": "NCCL_ALGO=Tree\nNCCL_ALGO=X\n"})
    found = look(tmp_path, {"NCCL_P2P_DISABLE": "0", "NCCL_SHM_DISABLE": "1", "NCCL_MIN_NCHANNELS": "4"})
    assert found["NCCL_P2P_DISABLE"] == Finding("NCCL_P2P_DISABLE", "0")  # the environment wins
    assert (
        found["NCCL_ALGO"].value == "Tree" and found["NCCL_ALGO"].verdict == "slow"
    )  # the user's file wins, and its first line
    assert found["NCCL_SHM_DISABLE"].verdict == "slow" and "unset it" in found["NCCL_SHM_DISABLE"].fix
    assert found["NCCL_MIN_NCHANNELS"].verdict == "ok"


HURTING = {
    "CUDA_DEVICE_MAX_CONNECTIONS": ("1", "slow", "8"),
    "CUDA_LAUNCH_BLOCKING": ("1", "slow", "0"),
    "CUDA_MODULE_LOADING": ("EAGER", "note", "LAZY"),
    "NCCL_BUFFSIZE": ("65536", "slow", "8388608"),
    "NCCL_CHECK_POINTERS": ("1", "slow", "0"),
    "NCCL_COMM_BLOCKING": ("1", "note", "0"),
    "NCCL_CUMEM_ENABLE": ("0", "note", "1"),
    "NCCL_DEBUG": ("info", "note", "WARN"),
    "NCCL_IB_DISABLE": ("0x1", "slow", "0"),
    "NCCL_LAUNCH_MODE": ("GROUP", "slow", "PARALLEL"),
    "NCCL_MAX_CTAS": ("1", "slow", "32"),
    "NCCL_MAX_NCHANNELS": ("1", "slow", "16"),
    "NCCL_NET": ("Socket", "slow", "IB"),
    "NCCL_NTHREADS": ("64", "slow", "512"),
    "NCCL_NVLS_ENABLE": ("0", "slow", "1"),
    "NCCL_P2P_LEVEL": ("LOC", "slow", "NVL"),
    "NCCL_PXN_DISABLE": ("1", "note", "0"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "slow", ""),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "slow", "INFO"),
    "TORCH_NCCL_BLOCKING_WAIT": ("true", "slow", "0"),
    "SHARDWRIGHT_GPU_TRANSPORT": ("shm", "slow", "auto"),
}


@pytest.mark.parametrize("way", ["hurting", "sound"])
def test_each_setting_has_a_harmful_and_a_harmless_value(tmp_path: Path, way: str) -> None:
    given = {name: hurts if way == "hurting" else sound for name, (hurts, _, sound) in HURTING.items()}
    given = {name: value for name, value in given.items() if value}
    found = look(tmp_path, given)
    for name, value in given.items():
        assert (found[name].value, found[name].verdict) == (value, HURTING[name][1] if way == "hurting" else "ok"), name


def test_the_requested_transport_is_judged(tmp_path: Path) -> None:
    for value, verdict in {"auto": "ok", "nccl": "ok", "ipc": "ok", "shm": "slow", "gloo": "bad"}.items():
        found = look(tmp_path, {"SHARDWRIGHT_GPU_TRANSPORT": value})["SHARDWRIGHT_GPU_TRANSPORT"]
        assert (found.value, found.verdict) == (value, verdict) and bool(found.fix) == (verdict != "ok")


def test_numbers_are_read_as_nccl_reads_them() -> None:
    read = {"1": 1, " 7 # x": 7, "0x10": 16, "010": 8, "-2": -2, "0": 0, "08": 0, "1e3": 1, "": None, "x1": None}
    assert {text: doctor_settings._number(text) for text in read} == read


def test_lines_that_nccl_misreads_are_named(tmp_path: Path) -> None:
    """Lines of a file in which NCCL takes all text before '=' as the name and all text after it as the value."""
    lines = {
        "NCCL_PROTO = Simple": "bad",
        " NCCL_NTHREADS=64": "bad",
        "NCCL_ALGO=Ring # by the vendor": "bad",
        "NCCL_P2P_DISABLE=1 # by the vendor": "note",
        "NCCL_IB_DISABLE=1\r": "note",
        "NCCL_SHM_DISABLE": "note",
        "# NCCL_MAX_CTAS = 1": None,
        "NCCL_NVLS_ENABLE=0": None,
        "": None,
    }
    plant(tmp_path, {"home.conf": "\n".join(lines)})
    found = look(tmp_path)
    for number, verdict in enumerate(lines.values(), 1):
        said = found.get(f"{tmp_path}/home.conf:{number}")
        assert (said and said.verdict) == verdict, number
    assert (
        not {"NCCL_PROTO", "NCCL_NTHREADS", "NCCL_MAX_CTAS", "NCCL_SHM_DISABLE"} & found.keys()
    )  # these lines have no effect
    for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_NVLS_ENABLE"):
        assert found[name].verdict == "slow", name


def test_another_file_may_be_named_and_must_exist(tmp_path: Path) -> None:
    plant(tmp_path, {"home.conf": "NCCL_ALGO=Tree", "etc.conf": "NCCL_PROTO=LL", "other.conf": "NCCL_ALGO=Ring"})
    found = look(tmp_path, {"NCCL_CONF_FILE": str(tmp_path / "other.conf")})
    assert found["NCCL_ALGO"].value == "Ring" and found["NCCL_PROTO"].value == "LL"
    lost = str(tmp_path / "lost.conf")
    assert look(tmp_path, {"NCCL_CONF_FILE": lost})[lost].verdict == "bad"


# interfaces ---------------------------------------------------------------------------------------------------------

SOCKETS = {
    "": "ok", "eth": "ok", "=eth0": "ok", "^docker": "ok", "eth,ib": "ok", "ib,eth": "ok", "eth0:1": "ok", "=eth0:1,ib9": "ok", "^=eth": "ok",
    "lo": "note", "^eth": "note",
    "ib0": "bad", "=eth": "bad", "ib,mlx": "bad", "^eth,lo,docker": "bad", "^e,l": "bad", "eth01": "bad", "bonding_masters": "bad",
}  # fmt: skip
WHOLE = {"": "ok", "eth0": "ok", "eth0,lo": "ok", "eth": "bad", "eth0,ib0": "bad"}
CARDS = {
    "": "ok", "mlx5": "ok", "mlx5_1:1": "ok", "=mlx5_0": "ok", "mlx5_7,mlx5_0": "ok", "^mlx5_0": "ok",
    "mlx4": "slow", "mlx5_0:2": "slow", "=mlx5": "slow", "^mlx5": "slow",
}  # fmt: skip


def with_network(tmp_path: Path) -> None:
    files = {"class/net/eth0/mtu": "1500", "class/net/lo/mtu": "65536", "class/net/bonding_masters": ""}
    files |= {f"class/infiniband/mlx5_{k}/ports/1/state": "4: ACTIVE" for k in (0, 1)}
    plant(tmp_path / "sys", files)


@pytest.mark.parametrize(
    ("variable", "cases"),
    [
        ("NCCL_SOCKET_IFNAME", SOCKETS),
        ("GLOO_SOCKET_IFNAME", WHOLE),
        ("TP_SOCKET_IFNAME", WHOLE),
        ("NCCL_IB_HCA", CARDS),
    ],
)
def test_names_of_interfaces_are_matched_as_nccl_and_torch_match_them(
    tmp_path: Path, variable: str, cases: dict[str, str]
) -> None:
    with_network(tmp_path)
    for value, verdict in cases.items():
        if value:
            found = look(tmp_path, {variable: value})[variable]
            assert (found.value, found.verdict) == (value, verdict)
            assert verdict != "bad" or "eth0, lo" in found.fix


def test_names_are_not_judged_without_a_list_of_interfaces(tmp_path: Path) -> None:
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA"):
        assert look(tmp_path, {variable: "eth0"})[variable].verdict == "note"


def test_the_out_of_band_network_needs_its_switch_and_a_device(tmp_path: Path) -> None:
    with_network(tmp_path)
    for value, switch, verdict in (("mlx5_0", "1", "ok"), ("eth", "1", "ok"), ("ib", "1", "bad"), ("eth0", "", "note")):
        environment = {"NCCL_OOB_NET_IFNAME": value, "NCCL_OOB_NET_ENABLE": switch or "0"}
        assert look(tmp_path, environment)["NCCL_OOB_NET_IFNAME"].verdict == verdict


# topology -----------------------------------------------------------------------------------------------------------


def with_gpus(tmp_path: Path, count: int, **more: str) -> None:
    gpu = {"vendor": "0x10de\n", "class": "0x030200\n", "numa_node": "1\n", "max_link_width": "16\n", **more}
    for number in range(count):
        plant(tmp_path / f"sys/bus/pci/devices/0000:1{number}:00.0", gpu)


def test_topology_comes_from_sys(tmp_path: Path) -> None:
    with_gpus(tmp_path, 1, current_link_width="8\n")
    files = {"bus/pci/devices/0000:00:00.0/vendor": "0x8086\n", "class/infiniband/mlx5_0/ports/1/state": "1: DOWN\n"}
    plant(tmp_path / "sys", {**files, "class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n"})
    found = look(tmp_path)
    assert found["PCI 0000:10:00.0"].value == "NUMA node 1, PCIe x8 of x16"
    assert found["PCI 0000:10:00.0"].verdict == "slow" and found["InfiniBand mlx5_0:1"].verdict == "slow"
    assert "PCI 0000:00:00.0" not in found
    assert found["GPU links"] == Finding("GPU links", "not needed: one GPU")


def matrix(cells: list[list[str]]) -> str:
    """Return the matrix as nvidia-smi prints it: an underlined head, then GPUs, then network cards and a legend."""
    names = [f"GPU{k}" for k in range(len(cells))]
    lines = ["\t\x1b[4m" + "\t".join([*names, "NIC0", "CPU Affinity", "NUMA Affinity"]) + "\x1b[0m"]
    lines += ["\t".join([name, *row, "SYS", "0-63", "0"]) for name, row in zip(names, cells)]
    lines += ["\t".join(["NIC0", *["SYS"] * len(cells), " X "]), "", "Legend:", "", "  X    = Self"]
    return "\n".join(lines)


def test_links_between_gpus_come_from_the_driver_or_are_unknown(tmp_path: Path) -> None:
    assert look(tmp_path)["GPU links"].verdict == "ok"
    with_gpus(tmp_path, 3)
    unknown = look(tmp_path)["GPU links"]
    assert unknown.verdict == "note" and unknown.value == "unknown (no nvidia-smi); no NVSwitch in /sys"
    plant(tmp_path / "sys/bus/pci/devices/0000:90:00.0", {"vendor": "0x10de", "class": "0x068000"})
    assert "1 NVSwitches in /sys" in look(tmp_path)["GPU links"].value
    asked: list[list[str]] = []

    def smi(cells: list[list[str]]) -> Any:
        return lambda words: asked.append(words) or matrix(cells)

    linked = [[" X ", "NV18", "NV18"], ["NV18", " X ", "NV18"], ["NV18", "NV18", " X "]]
    assert look(tmp_path, command=smi(linked))["GPU links"] == Finding("GPU links", "NV18: 0-1, 0-2, 1-2")
    mixed = [[" X ", "NV4", "SYS"], ["NV4", " X ", "PHB"], ["SYS", "PHB", " X "]]
    found = look(tmp_path, command=smi(mixed))["GPU links"]
    assert (found.value, found.verdict) == ("NV4: 0-1; PHB: 1-2; SYS: 0-2", "note") and asked[0][0] == "nvidia-smi"


def test_a_system_program_may_be_missing_fail_or_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, limit_s, sentence in (
        (["/nowhere/nvidia-smi"], 60.0, "No such file"),
        (["sh", "-c", "echo it failed >&2; exit 9"], 60.0, "exit 9: it failed"),
        (["sleep", "600"], 0.2, "did not end within"),
    ):
        monkeypatch.setattr(doctor_machine, "_COMMAND_TIMEOUT_S", limit_s)
        with pytest.raises(OSError, match=sentence):
            doctor_machine.run_command(words)
    monkeypatch.setattr(doctor_machine, "_COMMAND_TIMEOUT_S", 60.0)
    assert doctor_machine.run_command(["printf", "\\377"]) == "\\xff"


# libraries ----------------------------------------------------------------------------------------------------------

NCCL_C = "int ncclGetVersion(int *version) { *version = %d; return 0; }"


def maps(tmp_path: Path, *paths: str) -> None:
    lines = [f"7f0{k}-7f1{k} r-xp 00000000 08:01 1{k}                         {path}" for k, path in enumerate(paths)]
    plant(tmp_path / "proc/self", {"maps": "\n".join(["7f00-7f01 rw-p 0 00:00 0 ", *lines, ""])})


def test_nccl_is_named_with_its_version_and_two_are_bad(tmp_path: Path) -> None:
    import ctypes

    made = library(tmp_path / "a folder", "libnccl.so.2", NCCL_C % 23007)
    held = ctypes.CDLL(str(made))  # loaded, as torch's is
    maps(tmp_path, str(made), str(made), "/lib/libnccl-net.so")
    assert look(tmp_path)["NCCL"] == Finding("NCCL", f"{made} (2.30.7)")
    maps(tmp_path, str(made), "/b/libnccl.so.2.21")
    found = look(tmp_path)["NCCL"]
    assert found.verdict == "bad" and f"{made} (2.30.7)" in found.value and "/b/libnccl.so.2.21" in found.value
    maps(tmp_path, f"{made} (deleted)")
    found = look(tmp_path)["NCCL"]
    assert found.verdict == "note" and f"{made} (2.30.7), replaced on disk since" in found.value
    old = library(tmp_path / "old", "libnccl.so.2", NCCL_C % 21305)
    also = ctypes.CDLL(str(old))
    maps(tmp_path, str(old))
    assert look(tmp_path)["NCCL"].verdict == "bad" and held is not also


def test_the_compiler_and_the_driver_are_named_with_their_versions(tmp_path: Path) -> None:
    text = "int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 2; return 0; }"
    nvrtc = str(library(tmp_path, "libnvrtc.so.13", text))
    assert look(tmp_path)["NVRTC"].verdict == "note"
    assert look(tmp_path, nvrtc=nvrtc)["NVRTC"] == Finding("NVRTC", f"{nvrtc} (13.2)")
    driver = "int cuDriverGetVersion(int *version) { *version = %d; return 0; }"
    newer = str(library(tmp_path / "13", "libcuda.so.1", driver % 13010))
    assert look(tmp_path, nvrtc=nvrtc, libcuda=newer)["NVRTC"].verdict == "ok"
    older = str(library(tmp_path / "12", "libcuda.so.1", driver % 12080))
    found = look(tmp_path, nvrtc=nvrtc, libcuda=older)
    assert found["NVRTC"].verdict == "note" and "not needed here" in found["NVRTC"].fix  # the driver shows no GPU
    gpus = " int cuInit(unsigned flags) { return flags; } int cuDeviceGetCount(int *count) { *count = %d; return 0; }"
    for count, verdict in ((0, "note"), (2, "bad")):
        told = str(library(tmp_path / f"of {count}", "libcuda.so.1", driver % 12080 + gpus % count))
        nvrtc_of = look(tmp_path, nvrtc=nvrtc, libcuda=told)["NVRTC"]
        assert (
            nvrtc_of.verdict == verdict and "install a driver for CUDA 13, or a torch built for CUDA 12" in nvrtc_of.fix
        )
    assert found["CUDA driver"].value.startswith("CUDA 12.8: ")
    module = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
    plant(tmp_path / "proc/driver/nvidia", {"version": module})
    assert look(tmp_path)["NVIDIA kernel module"].value == "550.54.15"


def test_gpus_are_hidden_only_where_there_is_a_driver(tmp_path: Path) -> None:
    text = "int cuDriverGetVersion(int *version) { *version = 13000; return 0; }"
    driver = str(library(tmp_path, "libcuda.so.1", text))
    for visible in ("", "-1"):
        hidden = {"CUDA_VISIBLE_DEVICES": visible}
        assert look(tmp_path, hidden)["CUDA driver"].fix == "not needed on a host without GPUs"
        assert "unset CUDA_VISIBLE_DEVICES" in look(tmp_path, hidden, libcuda=driver)["CUDA driver"].fix


def test_a_user_without_a_home_has_the_systems_file_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_machine.nccl_confs()[1] == Path("/etc/nccl.conf")

    def unknown(number: int) -> Any:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(doctor_machine.pwd, "getpwuid", unknown)
    assert doctor_machine.nccl_confs() == (None, Path("/etc/nccl.conf"))
    assert findings(Machine({}, libcuda=NO_DRIVER, command=absent))


# any input ------------------------------------------------------------------------------------------------------------


def test_undecodable_bytes_do_not_end_a_report(tmp_path: Path) -> None:
    odd = "\udcff\udcfe"
    plant(tmp_path, {"home.conf": f"NCCL_{odd}=1\nNCCL_ALGO={odd}\n", "proc/driver/nvidia/version": odd})
    plant(tmp_path / "sys", {"class/net/eth0/mtu": "1500", "class/infiniband/mlx5_0/ports/1/state": odd})
    with_gpus(tmp_path, 2, numa_node=odd)
    maps(tmp_path, f"/{odd}/libnccl.so.2")
    found = look(tmp_path, {"NCCL_SOCKET_IFNAME": odd, "NCCL_TOPO_FILE": odd})
    assert "\\xff\\xfe" in found["NCCL"].value and found["NCCL_ALGO"].value == "\\xff\\xfe"
    for finding in found.values():
        str(finding).encode("ascii", "strict") if finding.name.startswith("NCCL") else str(finding).encode()


def test_a_section_that_fails_is_a_finding_and_the_others_stay(tmp_path: Path) -> None:
    def broken(words: list[str]) -> str:
        raise ArithmeticError("as the test asked")

    with_gpus(tmp_path, 2)
    found = look(tmp_path, command=broken)
    assert found["topology"].verdict == "note" and "ArithmeticError: as the test asked" in found["topology"].value
    assert "PCI 0000:10:00.0" in found and "nofile" in found
    (tmp_path / "proc/self/maps").unlink()
    found = {each.name: each for each in findings(Machine({}, tmp_path / "sys", tmp_path / "proc", (None, tmp_path)))}
    assert "FileNotFoundError" in found["NCCL"].value and "nofile" in found
    assert found[str(tmp_path)].verdict == "note"  # a folder in a file's place


def test_hidden_gpus_are_no_error_and_odd_bytes_are_printed(tmp_path: Path) -> None:
    plant(tmp_path, {"conf": "NCCL_ALGO=\udcff\n"})
    environment = {**os.environb, b"CUDA_VISIBLE_DEVICES": b"", b"NCCL_CONF_FILE": os.fsencode(tmp_path / "conf")}
    environment |= {b"NCCL_DEBUG": b"\xfe", b"PYTHONIOENCODING": b"ascii"}
    both = "from shardwright_tools.cli import main; ends = main(['doctor']), print('-'), main(['doctor', '--json']); print(ends)"
    done = subprocess.run([sys.executable, "-c", both], capture_output=True, text=True, env=environment)
    text, _, rest = done.stdout.partition("\n-\n")
    *json_lines, ends = rest.splitlines()
    assert (done.returncode, ends) == (0, "(0, None, 0)"), done.stderr
    assert "NCCL_ALGO: \\xff -> unset it" in text
    report = json.loads("\n".join(json_lines))
    assert report["ok"]
    (driver,) = [found for found in report["gpu"] if found["name"] == "CUDA driver"]
    assert driver["verdict"] == "note" and driver["fix"]
    for found in report["gpu"]:
        assert found["value"] and found["verdict"] in ("ok", "note", "slow", "bad")
        assert (found["verdict"] == "ok") or found["fix"], found
