"""Benchmark of building modules that are larger than a rank: wrap(weights=) and wrap(init=) at private zero=3.

weights, init: the peak memory (PSS) of 8 ranks above their start, while a folder of safetensors with holes loads, or an
initialisation runs, against the model's bytes. disk: a load with the page cache dropped and with a warm one, 4 ranks,
against 4 processes that read as many bytes of the same files, into one buffer again and again, or into fresh memory, as a
load must. The module on the meta device is made before. peers: memory and warm time of a Llama, 4 ranks, against
accelerate's FSDP2 (cpu_ram_efficient_loading) and DeepSpeed's zero.Init. SW_BENCH_DIR names a folder on the measured
disk (default: the working directory).
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import shardwright as sw
import torch
import torch.distributed as dist
from pss import pss_bytes
from shardwright.comm.process_group import host_group
from shardwright.layout.memory import private_memory
from torch import nn

LAYERS, FILES, VERIFIED_MIB = 32, 4, 16
PRIVATE: dict[str, Any] = {"zero": 3, "share_parameters": False}
SPARE = 64 << 20  # bytes of a rank beside its slices and two units
SUM_GOAL, DISK_GOAL = 1.1, 1.15
#: below it what a rank holds besides its slices is a larger share, and there is no goal for all ranks together
GOAL_MIB = 4096
PARTS = ["weights", "init", "disk", "peers"]
PEER_GOALS = {"largest rank's peak PSS": 0.5, "all ranks' peak PSS": 0.7, "warm time": 0.7}
READ_BYTES = 8 << 20
#: keeps modules alive while the parent watches
_kept: list[Any] = []


# Models and their folders ---------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def layers(mib: int) -> nn.Module:
    """Return LAYERS equal layers of about `mib` MiB in all, on the meta device."""
    width = int((mib * 2**20 / LAYERS / 16) ** 0.5) // 16 * 16
    with torch.device("meta"):
        return nn.Sequential(*(Layer(width) for _ in range(LAYERS)))


def llama(mib: int) -> nn.Module:
    """Return a Llama of about `mib` MiB, on the meta device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    width = 1024 if mib >= 256 else 64
    like = {"hidden_size": width, "intermediate_size": 2752 * width // 1024, "num_attention_heads": 16}
    like |= {"vocab_size": 8 * width, "max_position_embeddings": 256, "tie_word_embeddings": False}
    config = LlamaConfig(**like, num_hidden_layers=1, dtype=torch.float32)
    ends = 2 * config.vocab_size * width
    config.num_hidden_layers = max(2, (mib * 2**18 - ends) // (width * (4 * width + 3 * config.intermediate_size)))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def nbytes_of(module: nn.Module) -> int:
    return sum(each.nbytes for each in module.parameters())


def largest_unit(module: nn.Module) -> int:
    return max(map(nbytes_of, module.children()))


def write_folder(folder: Path, module: nn.Module, *, sparse: bool) -> None:
    """Write files of safetensors: with holes and a one at the end of each tensor, or random values."""
    state = list(module.state_dict().items())
    noise = torch.rand(8 << 20, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    index: dict[str, str] = {}
    for number in range(FILES):
        name = f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        part = state[number * len(state) // FILES : (number + 1) * len(state) // FILES]
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for key, each in part:
            header[key] = {"dtype": "F32", "shape": list(each.shape), "data_offsets": [at, at + each.nbytes]}
            index[key], at = name, at + each.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for key, each in part:
                if sparse:
                    file.seek(each.nbytes - 4, os.SEEK_CUR)
                    file.write(b"\0\0\x80\x3f")
                for first in range(0, 0 if sparse else each.numel(), noise.numel() // 2):
                    count, shift = min(each.numel() - first, noise.numel() // 2), 997 * (len(key) + first) % 4093
                    file.write(memoryview(noise[shift : shift + count].numpy()).cast("B"))
            os.fsync(file.fileno())
    size = {"total_size": sum(each.nbytes for _, each in state)}  # transformers reads "metadata"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": size, "weight_map": index}))
    if hasattr(module, "config"):
        module.config.save_pretrained(folder)


@contextlib.contextmanager
def folder_of(module: nn.Module, *, sparse: bool) -> Iterator[str]:
    parent = os.environ.get("SW_BENCH_DIR", ".")
    with tempfile.TemporaryDirectory(dir=parent, prefix="bench-load-") as folder:
        write_folder(Path(folder), module, sparse=sparse)
        yield folder


def differing(found: Mapping[str, torch.Tensor], folder: str) -> list[str]:
    """Return the names of tensors that are not the folder's. The files are small."""
    wrong = []
    for path in sorted(Path(folder).glob("*.safetensors")):
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:begin]).items():
            if name != "__metadata__":
                low, high = entry["data_offsets"]
                stored = torch.frombuffer(bytearray(data[begin + low : begin + high]), dtype=torch.float32)
                wrong += [] if torch.equal(found[name].flatten(), stored) else [name]
    return wrong


# slices: memory of ranks ----------------------------------------------------------------------------------------------


class Watch:
    """The highest PSS of each rank, and of all together, in bytes."""

    def __init__(self) -> None:
        self.ranks: list[int] = []
        self.all = 0

    def __call__(self, pids: Sequence[int]) -> None:
        now = [pss_bytes(pid) for pid in pids]
        self.ranks = [max(pair) for pair in zip(self.ranks or now, now)]
        self.all = max(self.all, sum(now))


def above(watch: Watch, starts: Sequence[int]) -> tuple[float, float]:
    """Return (largest rank's peak, all ranks' peak) in MiB above the ranks' starts, in bytes."""
    return max(p - s for p, s in zip(watch.ranks, starts)) / 2**20, (watch.all - sum(starts)) / 2**20


def peaks(world_size: int, work: Callable[..., Any], *args: Any) -> tuple[float, float]:
    """Return above() of ranks that run `work`, which returns a rank's PSS at its start."""
    watch = Watch()
    return above(watch, common.run_ranks(world_size, work, *args, watch=watch, warm=False))


def start_bytes() -> int:
    dist.barrier()
    start = pss_bytes("self")
    dist.barrier()
    return start


def load_layers(rank: int, world_size: int, mib: int, folder: str) -> int:
    module, start = layers(mib), start_bytes()
    _kept.append(sw.wrap(module, weights=folder, **PRIVATE))
    time.sleep(0.1)
    return start


def initialise_layers(rank: int, world_size: int, mib: int) -> int:
    module, start = layers(mib), start_bytes()
    _kept.append(sw.wrap(module, init=True, **PRIVATE))
    time.sleep(0.1)
    return start


def verify_layers(rank: int, world_size: int, folders: Sequence[str]) -> None:
    for folder in folders:
        wrong = differing(sw.full_state_dict(sw.wrap(layers(VERIFIED_MIB), weights=folder, **PRIVATE)), folder)
        assert not wrong, f"{wrong[:3]} are not the folder's"
    torch.manual_seed(5)
    twin = sw.materialize(layers(VERIFIED_MIB)).state_dict()
    torch.manual_seed(5)
    made = sw.full_state_dict(sw.wrap(layers(VERIFIED_MIB), init=True, **PRIVATE))
    assert all(torch.equal(made[name], each) for name, each in twin.items()), "init= has other values"


def measure_slices(report: common.Report, mib: int, world_size: int, rounds: int, what: str) -> None:
    module = layers(mib)
    model, unit = nbytes_of(module) / 2**20, largest_unit(module) / 2**20
    size = f"{what} {model:.0f} MiB, {world_size} ranks"
    if what == "init=":
        extra, found = 2 * unit * world_size, [peaks(world_size, initialise_layers, mib) for _ in range(rounds)]
    else:
        with folder_of(module, sparse=True) as folder:
            extra, found = 0.0, [peaks(world_size, load_layers, mib, folder) for _ in range(rounds)]
    largest, together = (statistics.median(each) for each in zip(*found))
    is_large = mib >= GOAL_MIB
    report.add(
        f"{size}: all ranks' peak PSS above the start", "MiB", together, model + extra,
        f"the model's bytes{' and 2 units a rank' if extra else ''}", samples=rounds,
        goal=round((SUM_GOAL * model + extra) / (model + extra), 3) if is_large else None,
        samples_each=[round(each[1]) for each in found],
    )  # fmt: skip
    report.add(
        f"{size}: largest rank's", "MiB", largest, model / world_size + 2 * unit + SPARE / 2**20,
        "its slices, 2 units and 64 MiB", goal=1.0, samples=rounds, slices_mib=model / world_size, unit_mib=unit,
    )  # fmt: skip


# disk: time with the page cache dropped -------------------------------------------------------------------------------


def drop_cache(folder: str) -> None:
    for path in Path(folder).glob("*.safetensors"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Reader:
    """Reads this rank's part of all files, a contiguous range of each file, into one buffer, or into fresh huge pages."""

    def __init__(self, folder: str, rank: int, world_size: int, *, fresh: bool = False) -> None:
        self._paths, self._rank, self._count = sorted(Path(folder).glob("*.safetensors")), rank, world_size
        self._buffer = None if fresh else memoryview(bytearray(READ_BYTES))

    def __call__(self) -> None:
        for path in self._paths:
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                at, end = (size * (self._rank + each) // self._count for each in (0, 1))
                into = self._buffer
                if into is None:
                    _kept.append(private_memory(end - at))
                    into = memoryview(_kept[-1])
                while at < end:
                    done = os.preadv(file.fileno(), [into[: min(end - at, READ_BYTES)]], at)
                    at, into = at + done, into if self._buffer is not None else into[done:]


def time_disk(rank: int, world_size: int, mib: int, folder: str, rounds: int, budget_s: float) -> Any:
    comm = host_group(dist.group.WORLD, 1800.0).comm

    made: list[nn.Module] = []

    def load() -> None:
        _kept.append(sw.wrap(made.pop() if made else layers(mib), weights=folder, **PRIVATE))

    def stay() -> None:
        _kept.clear()
        made[:] = [layers(mib)]
        gc.collect()
        comm.barrier()  # no rank reads any longer

    def meet() -> None:
        stay()
        if rank == 0:
            drop_cache(folder)
        comm.barrier()

    meet()
    work: dict[str, Callable[[], None]] = {"ours": load, "readers": Reader(folder, rank, world_size)}
    work["fresh readers"] = Reader(folder, rank, world_size, fresh=True)
    cold = common.interleave(work, meet, rounds=rounds, budget_s=budget_s, warmup=0 if mib > 1024 else 1)
    warm = common.interleave(work, stay, rounds=rounds, budget_s=budget_s, warmup=1)
    return {**cold, **{f"warm {name}": each for name, each in warm.items()}}


def measure_disk(report: common.Report, mib: int, world_size: int, rounds: int, budget_s: float) -> None:
    module = layers(mib)
    with folder_of(module, sparse=False) as folder:
        times = common.timings(common.run_ranks(world_size, time_disk, mib, folder, rounds, budget_s))
    for arm, text in (("", "page cache dropped"), ("warm ", "page cache warm")):
        for peer, into in (("readers", "one buffer"), ("fresh readers", "fresh memory")):
            report.add_times(
                f"weights= {nbytes_of(module) >> 20} MiB, {world_size} ranks, {text}", times[f"{arm}ours"],
                times[f"{arm}{peer}"], f"{world_size} readers into {into}",
                goal=None if arm or peer != "readers" else DISK_GOAL,
                readers_GBps=nbytes_of(module) / times[f"{arm}{peer}"].median / 1e9,
            )  # fmt: skip


# peers: accelerate and DeepSpeed --------------------------------------------------------------------------------------


def prepare_ours(rank: int, world_size: int) -> Callable[[str], nn.Module]:
    from transformers import AutoConfig, AutoModelForCausalLM

    def load(folder: str) -> nn.Module:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        return sw.wrap(module, weights=folder, **PRIVATE)

    return load


def prepare_accelerate(rank: int, world_size: int) -> Callable[[str], nn.Module]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}
    settings |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    os.environ.update({**settings, **{name: str(number) for name, number in numbers.items()}})
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from transformers import AutoModelForCausalLM

    def load(folder: str) -> nn.Module:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, reshard_after_forward=True, cpu_ram_efficient_loading=True,
            auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )  # fmt: skip
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = (
            DistributedType.FSDP,
            plugin,
        )  # else DDP, on CPUs
        model = AutoModelForCausalLM.from_pretrained(folder)
        return accelerator.prepare(model, torch.optim.SGD(model.parameters()))[0]  # it wants an optimizer with it

    return load


def prepare_deepspeed(rank: int, world_size: int) -> Callable[[str], nn.Module]:
    os.environ.update({"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank), "LOCAL_SIZE": str(world_size)})
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world_size)})
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo", dist_init_required=False)
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    config |= {"train_batch_size": world_size, "train_micro_batch_size_per_gpu": 1}
    _kept.append(HfDeepSpeedConfig(config))  # from_pretrained then runs in zero.Init
    return lambda folder: AutoModelForCausalLM.from_pretrained(folder)


PREPARE = {"ours": prepare_ours, "accelerate FSDP2": prepare_accelerate, "DeepSpeed zero.Init": prepare_deepspeed}
NEEDS = {"ours": "transformers", "accelerate FSDP2": "accelerate", "DeepSpeed zero.Init": "deepspeed"}


def whole_state(arm: str, model: nn.Module) -> dict[str, torch.Tensor]:
    if arm == "ours":
        return sw.full_state_dict(model)
    if arm.startswith("accelerate"):
        state = model.state_dict().items()  # buffers are plain
        return {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in state}
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: each.detach().clone() for name, each in model.named_parameters()}


def load_with(rank: int, world_size: int, arm: str, small: str, folder: str) -> Any:
    """Return (PSS at the start, time of a load), after a small load that is verified; or why the arm cannot run."""
    load = PREPARE[arm](rank, world_size)
    try:
        model = load(small)
        wrong = differing(whole_state(arm, model), small)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    assert not wrong, f"{arm}: {wrong[:3]} are not the folder's"
    del model
    gc.collect()
    start = start_bytes()
    sample = common.take_sample(lambda: _kept.append(load(folder)), dist.barrier, 1)
    time.sleep(0.1)
    dist.barrier()
    return start, sample


def measure_peers(report: common.Report, mib: int, world_size: int, rounds: int) -> None:
    absent = [name for name in NEEDS.values() if importlib.util.find_spec(name) is None]
    if "transformers" in absent:
        report.add_no_result("weights= of a Llama", "transformers is not installed")
        return
    module = llama(mib)
    case = f"Llama of {nbytes_of(module) >> 20} MiB, {world_size} ranks"
    sizes: dict[str, list[tuple[float, float]]] = {arm: [] for arm in NEEDS}
    samples: list[dict[str, list[Any]]] = [{arm: [] for arm in NEEDS} for _ in range(world_size)]
    reasons = {arm: f"{package} is not installed" for arm, package in NEEDS.items() if package in absent}
    with folder_of(llama(VERIFIED_MIB), sparse=False) as small, folder_of(module, sparse=False) as folder:
        for turn in range(rounds):
            for arm in [*NEEDS][turn % len(NEEDS) :] + [*NEEDS][: turn % len(NEEDS)]:
                if arm in reasons:
                    continue
                watch = Watch()
                try:
                    found = common.run_ranks(world_size, load_with, arm, small, folder, watch=watch, warm=False)
                except SystemExit as error:
                    found = [str(error)]
                if isinstance(found[0], str):
                    reasons[arm] = found[0]
                    continue
                starts, each = zip(*found)
                sizes[arm].append(above(watch, starts))
                for rank, sample in enumerate(each):
                    samples[rank][arm].append(sample)
    for arm, reason in reasons.items():
        report.add_no_result(f"{case}: {arm}", reason)
    times = common.timings([{arm: each for arm, each in rank.items() if each} for rank in samples])
    for arm in [*NEEDS][1:]:
        if arm in reasons or "ours" in reasons:
            continue
        for at, what in enumerate(("largest rank's peak PSS", "all ranks' peak PSS")):
            ours, peer = (statistics.median(each[at] for each in sizes[name]) for name in ("ours", arm))
            report.add(
                f"{case}: {what} above the start", "MiB", ours, peer, arm, goal=PEER_GOALS[what],
                samples=len(sizes["ours"]) + len(sizes[arm]),
            )  # fmt: skip
        report.add_times(f"{case}: warm time", times["ours"], times[arm], arm, goal=PEER_GOALS["warm time"])


def main() -> None:
    numbers = {
        "mib": (512, "size of the model"),
        "rounds": (common.LEAST_ROUNDS, "samples of each arm of slices and peers"),
    }
    report, quick = common.begin("load", __doc__, PARTS, numbers)
    mib, rounds = (128, 1) if quick else (report.numbers["mib"], report.numbers["rounds"])
    common.TIMEOUT_S = 1800.0
    small = layers(VERIFIED_MIB)
    with folder_of(small, sparse=True) as holes, folder_of(small, sparse=False) as dense:
        common.run_ranks(3, verify_layers, [holes, dense])
    for what in ("weights=", "init="):
        if report.wants(what.strip("=")):
            measure_slices(report, mib, 4 if quick else 8, rounds, what)
    if report.wants("disk"):
        measure_disk(report, mib, 4, *common.effort(quick))
    if report.wants("peers") and not quick:
        measure_peers(report, mib, 4, rounds)


if __name__ == "__main__":
    main()
