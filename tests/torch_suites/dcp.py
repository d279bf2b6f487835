"""torch's own tests of torch.distributed.checkpoint, with our StorageWriter and StorageReader in the place of its own.

`python tests/torch_suites/dcp.py FOLDER` runs those in FOLDER, which is test/distributed/checkpoint of torch's source: the
wheel does not hold them. `... FOLDER test_overwrite ...` runs some, and `--stock` runs them with torch's classes, which
shows what the stand-in for GPUs and another version of torch cost. A test that fails or is skipped with ours must be in
dcp_differences.txt with a reason, and one that is there must not pass; those that fail with torch's classes are listed there too.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "60")

sys.path.insert(0, str(Path(__file__).parent))
import own_process  # noqa: E402
import stand_in  # noqa: E402
from outcomes import read_differences, run_all  # noqa: E402

DIFFERENCES = Path(__file__).with_name("dcp_differences.txt")
LIMIT_S = 120.0
#: of torch's files, those whose tests write or read a checkpoint with a storage that is FileSystemWriter's kind
_USES = ("FileSystemWriter", "FileSystemReader", "FsspecWriter", "checkpoint_id=")

#: in names of tests whose models torch compiles, for minutes; the same tests run without
_COMPILES = "compile_True"


def prepare(*, stock: bool) -> None:
    """Put ours and the stand-in for GPUs in their places, before a file of tests is imported."""
    stand_in.admit_gpu_tests()
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint import _fsspec_filesystem, _storage_utils, filesystem, format_utils
    from torch.testing._internal import common_distributed as common
    from torch.testing._internal.distributed._shard import sharded_tensor
    from torch.testing._internal.distributed._tensor import common_dtensor

    own_process.fork_ranks_on_cpu(LIMIT_S)
    common.requires_nccl = common_dtensor.requires_nccl = lambda: lambda function: function

    def begin(self: Any, *_: Any, **__: Any) -> None:
        dist.init_process_group(
            "gloo", world_size=self.world_size, rank=self.rank, init_method=f"file://{self.file_name}"
        )

    common_dtensor.DTensorTestBase.init_pg = sharded_tensor.ShardedTensorTestBase.init_pg = begin
    with_comms = sharded_tensor.with_comms
    sharded_tensor.with_comms = lambda function=None, init_rpc=True, backend="gloo": with_comms(
        function, init_rpc, "gloo"
    )
    _move_to_cpu(torch)
    if stock:
        return
    import shardwright

    writer, reader = shardwright.checkpoint.StorageWriter, shardwright.checkpoint.StorageReader
    for module in (checkpoint, filesystem, format_utils, _storage_utils):
        module.FileSystemWriter, module.FileSystemReader = writer, reader
    apart = {"validate_checkpoint_id": classmethod(lambda cls, checkpoint_id: "://" not in str(checkpoint_id))}
    _fsspec_filesystem.FsspecWriter = type("FsspecWriter", (writer,), apart)
    _fsspec_filesystem.FsspecReader = type("FsspecReader", (reader,), apart)


def _move_to_cpu(torch: Any) -> None:
    """Have shards and FSDP's units lie on the CPU, and tests that start a rank a GPU start some."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.remote_device import _remote_device

    place, wrap = _remote_device.__init__, FullyShardedDataParallel.__init__
    _remote_device.__init__ = lambda self, given: place(
        self, re.sub(r"cuda:\d+", "cpu", given) if isinstance(given, str) else given
    )

    def wrap_on_cpu(self: Any, *args: Any, **options: Any) -> None:
        wrap(self, *args, **{"device_id": torch.device("cpu"), **options})

    FullyShardedDataParallel.__init__ = wrap_on_cpu
    torch.cuda.device_count = lambda: 2


def load(path: Path) -> types.ModuleType:
    """Import a file of tests."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases(folder: Path) -> Iterator[tuple[str, unittest.TestCase]]:
    """Yield (file.test, test) of each test in the files that use a storage."""
    for path in sorted(folder.rglob("test_*.py")):
        if any(word in path.read_text() for word in _USES):
            for case in _flat(unittest.defaultTestLoader.loadTestsFromModule(load(path))):
                name = f"{path.stem}.{case.id().rpartition('.')[2]}"
                if _COMPILES not in name:
                    yield name, case


def _flat(suite: Any) -> Iterator[unittest.TestCase]:
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from _flat(each)
        else:
            yield each


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/torch_suites/dcp.py", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="test/distributed/checkpoint of torch's source")
    parser.add_argument("names", nargs="*", help="words in names of tests to run; all if none")
    parser.add_argument("--stock", action="store_true", help="run torch's classes")
    parser.add_argument("--verbose", action="store_true", help="print the whole trace of each failure")
    options = parser.parse_args()
    prepare(stock=options.stock)
    found = dict(cases(options.folder))
    names = [name for name in found if not options.names or any(word in name for word in options.names)]
    expected = {} if options.stock else read_differences(DIFFERENCES.read_text())
    unknown = [] if options.names else sorted(set(expected) - set(names))
    return run_all(
        "torch.distributed.checkpoint",
        names,
        lambda name: own_process.run_case_apart(found[name], LIMIT_S),
        expected,
        unknown,
        verbose=options.verbose,
    )


if __name__ == "__main__":
    sys.exit(main())
