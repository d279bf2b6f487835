"""torch's own tests of FSDP2 beside tensor parallelism and pipelines, with our fully_shard and PipelineStage in their places.

`python tests/torch_suites/compose.py PATH` runs those in PATH, which is a file of test/distributed/_composable of torch's
source, or that folder: the wheel does not hold them. `... PATH test_train_parity ...` runs some, and `--stock` runs them with
torch's own, which shows what the stand-in for GPUs and another version of torch cost. A test that fails or is skipped with
ours must be in compose_differences.txt with a reason, and one that is there must not pass.
"""

from __future__ import annotations

import argparse
import os
import sys
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "300")

sys.path.insert(0, str(Path(__file__).parent))
import fsdp2_stand_in  # noqa: E402
import own_process  # noqa: E402
import stand_in  # noqa: E402
from outcomes import read_differences, run_all  # noqa: E402

DIFFERENCES = Path(__file__).with_name("compose_differences.txt")
LIMIT_S = 300.0
GPUS = 8
#: classes of tests in which FSDP2 meets another dimension
_CLASSES = ("2D", "3D", "ND", "Composability", "ManualTest")


def prepare(*, stock: bool) -> None:
    """Put ours and the stand-in for GPUs in their places, before a file of tests is imported."""
    stand_in.admit_gpu_tests()
    import torch
    import torch.distributed as dist
    import torch.distributed.pipelining
    from torch.testing._internal import common_distributed as common

    own_process.fork_ranks_on_cpu(LIMIT_S)
    common.at_least_x_gpu = lambda count: True
    common.requires_accelerator_dist_backend = lambda *_: lambda function: function
    torch.cuda.device_count = torch.accelerator.device_count = lambda: GPUS
    torch.accelerator.set_device_index = lambda *_: None
    to = torch.nn.Module.to
    torch.nn.Module.to = lambda self, *args, **options: to(self, *map(stand_in.on_cpu, args), **options)
    barrier = dist.barrier
    dist.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)
    stand_in.meshes_on_cpu()
    stand_in.attention_on_cpu()
    if not stock:
        fsdp2_stand_in.install(torch)
    pipelining = torch.distributed.pipelining
    stage = pipelining.PipelineStage

    def place_stage(module: Any, index: int, count: int, device: Any, *args: Any, **options: Any) -> Any:
        return stage(module, index, count, stand_in.on_cpu(device), *args, **options)

    pipelining.PipelineStage = place_stage


def files(path: Path) -> list[Path]:
    """Return the files of tests at a path of which some classes are of compositions."""
    found = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
    return [each for each in found if _composes(each)]


def _composes(path: Path) -> bool:
    text = path.read_text()
    return "fully_shard" in text and any(line.startswith("class ") and _names(line) for line in text.splitlines())


def _names(title: str) -> bool:
    return any(each in title for each in _CLASSES)


def load(path: Path) -> types.ModuleType:
    """Import a file of tests. Ours leaves placements as they are, so that over tp is the last of any number."""
    module = sys.modules[path.stem] = types.ModuleType(path.stem)
    module.__file__ = str(path)
    text = path.read_text().replace(".placements[1]", ".placements[-1]")
    exec(compile(text, str(path), "exec"), vars(module))
    return module


def cases(path: Path) -> Iterator[tuple[str, unittest.TestCase]]:
    """Yield (file.test, test) of each test of a composition."""
    for each in files(path):
        module = load(each)
        fsdp2_stand_in.adopt(module)
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, unittest.TestCase) and kind.__module__ == module.__name__:
                for case in unittest.defaultTestLoader.loadTestsFromTestCase(kind) if _names(kind.__name__) else ():
                    yield f"{each.stem}.{case.id().rpartition('.')[2]}", case


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/torch_suites/compose.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "path", type=Path, help="a file of test/distributed/_composable of torch's source, or the folder"
    )
    parser.add_argument("names", nargs="*", help="words in names of tests to run; all if none")
    parser.add_argument("--stock", action="store_true", help="run torch's own")
    parser.add_argument("--verbose", action="store_true", help="print the whole trace of each failure")
    options = parser.parse_args()
    prepare(stock=options.stock)
    found = dict(cases(options.path))
    names = [name for name in found if not options.names or any(word in name for word in options.names)]
    expected = {} if options.stock else read_differences(DIFFERENCES.read_text())
    return run_all(
        "FSDP2 in compositions",
        names,
        lambda name: own_process.run_case_apart(found[name], LIMIT_S),
        expected,
        verbose=options.verbose,
    )


if __name__ == "__main__":
    sys.exit(main())
