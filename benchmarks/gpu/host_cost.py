"""Benchmark of the host's time per training step on a GPU that takes no time: 303 parameters of 64 elements in 34
units, two ranks.

Calls of the driver and NCCL succeed and do nothing (idle/), and in all arms torch computes on the CPU what a GPU would
compute. So the time of an arm beyond the bare module's is its engine's cost on the host, without the time inside a real
driver. Values are not averaged and mean nothing.

FSDP2 shards each block as its own unit, over torch's fake process group, which does nothing.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import common  # noqa: E402
import shardwright as sw  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from shardwright.torch_compat import cuda  # noqa: E402
from torch import nn  # noqa: E402

PARAMETERS, UNITS, WIDTH = 303, 34, 64
STAGES = (0, 1, 2, 3)
REPEAT = 3


class Block(nn.Module):
    """Nine parameters, and `extra` more."""

    def __init__(self, extra: int = 0) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((WIDTH,), 0.1 * (k + 1)) for k in range(9 + extra))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(torch.stack([x * weight for weight in self.weights]).sum(0))


def model() -> nn.Sequential:
    return nn.Sequential(Block(-1), *(Block() for _ in range(UNITS - 2)), Block(-2))


class IdleGpu(cuda.CudaRuntime):
    """A stand-in for torch.cuda that the engine sees."""

    def __init__(self, library: str) -> None:
        super().__init__()
        self._library = library

    def holds(self, tensor: torch.Tensor) -> bool:
        return True

    def stages(self, tensor: torch.Tensor) -> bool:
        return True

    def ordinal(self, tensor: torch.Tensor) -> int:
        return 0

    def current_stream(self, ordinal: int) -> int:
        return 0

    def stream_reader(self, ordinal: int) -> Callable[[], int]:
        return int  # returns 0 without a Python frame

    def libraries(self) -> dict[str, str | None]:
        return {"libcuda": self._library, "libnccl": self._library, "nvrtc": self._library}


def build(folder: str) -> str:
    """Compile the idle libraries; return their folder."""
    path = f"{folder}/idle.so"
    sources = sorted(str(each) for each in (Path(__file__).parent / "idle").glob("*.c"))
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}", "-o", path, *sources], check=True)
    return path


def ddp(module: nn.Module, group: Any) -> nn.Module:
    def mean(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped = nn.parallel.DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, mean)  # futures of the fake backend hold no tensors
    return wrapped


def fsdp2(module: nn.Sequential, group: Any) -> nn.Module:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for block in module:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def arms(library: str) -> dict[str, Callable[[], Any]]:
    """Return the training step of each arm."""
    found: dict[str, Callable[[], Any]] = {}

    def add(name: str, module: Callable[..., Any], optimizer: torch.optim.Optimizer) -> None:
        x = torch.ones(WIDTH)

        def step() -> None:
            module(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        found[name] = step

    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

    group = dist.new_group(backend="fake")
    for name, wrap in {
        "bare": lambda module: module,
        "DDP": lambda module: ddp(module, group),
        "FSDP2": lambda module: fsdp2(module, group),
    }.items():
        peer = wrap(model())
        add(name, peer, torch.optim.AdamW(peer.parameters(), fused=True))
    cuda.runtime = IdleGpu(library)
    for zero in STAGES:
        module = model()
        options: dict[str, Any] = {"units": [Block]} if zero == 3 else {}
        add(f"zero={zero}", *sw.wrap(module, sw.optim.AdamW(module.parameters()), zero=zero, **options))
    module = model()
    for block in module:
        sw.fully_shard(block)
    sw.fully_shard(module)
    add("fully_shard", module, torch.optim.AdamW(module.parameters(), fused=True))
    return found


def work(rank: int, world_size: int, library: str, quick: bool) -> Any:
    rounds, budget_s = common.effort(quick)
    return common.interleave(arms(library), dist.barrier, rounds=rounds, budget_s=budget_s, warmup=3, repeat=REPEAT)


def main() -> None:
    report, quick = common.begin("gpu_host_cost", __doc__)
    with tempfile.TemporaryDirectory() as folder:
        times = common.timings(common.run_ranks(2, work, build(folder), quick), REPEAT)
    bare = 1e3 * times["bare"].median
    for zero in STAGES:
        peer = "FSDP2" if zero == 3 else "DDP"
        report.add_times(
            f"a step on an idle GPU, zero={zero}", times[f"zero={zero}"], times[peer], peer, bare_ms=bare, goal=None
        )
    name = "a step on an idle GPU, fully_shard with torch's AdamW(fused=True)"
    report.add_times(name, times["fully_shard"], times["FSDP2"], "FSDP2", bare_ms=bare, goal=0.4)


if __name__ == "__main__":
    main()
