"""torch's own tests of DistributedDataParallel, out of the installed torch, with our class in its place.

`python tests/torch_suites` runs all of them, `python tests/torch_suites test_ddp_inference ...` some; `--stock` runs them
with torch's class, which shows what the stand-in for GPUs costs. Two ranks a test (TORCH_SUITES_WORLD), gloo, one after
another. A test that fails or is skipped must be in ddp_differences.txt with a reason, and one that is there must not pass.
"""

from __future__ import annotations

import argparse
import ast
import logging
import os
import re
import sys
import unittest
from pathlib import Path
from typing import Any

os.environ.setdefault("BACKEND", "gloo")
os.environ["WORLD_SIZE"] = os.environ.get("TORCH_SUITES_WORLD", "2")
os.environ.setdefault("TEMP_DIR", "/tmp")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "60")

sys.path.insert(0, str(Path(__file__).parent))
import stand_in  # noqa: E402
from outcomes import read_differences, run_all, run_case  # noqa: E402

DIFFERENCES = Path(__file__).with_name("ddp_differences.txt")
LIMIT_S = 60.0
#: tests that train or compile for long
LONG_LIMITS_S = {"test_ddp_uneven_inputs": 180.0, "test_ddp_compile_static_graph": 300.0}
_NAMES_DDP = re.compile(r"DistributedDataParallel|ddp_model|_ddp\b|DDP\(")


def ddp_tests(source: str) -> list[str]:
    """Return the tests of torch's class that wrap a module, by themselves or through a method that they call."""
    base = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef) and n.name == "_DistTestBase")
    methods = {n.name: n for n in base.body if isinstance(n, ast.FunctionDef)}
    text = {name: ast.get_source_segment(source, node) or "" for name, node in methods.items()}
    calls = {name: {m for m in methods if m != name and f"self.{m}(" in text[name]} for name in methods}

    def wraps(name: str, seen: frozenset[str] = frozenset()) -> bool:
        if _NAMES_DDP.search(text[name]):
            return True
        return any(wraps(other, seen | {name}) for other in calls[name] - seen)

    return [name for name in methods if name.startswith("test_") and (wraps(name) or "ddp" in name)]


def make_suite(*, stock: bool) -> tuple[type[unittest.TestCase], list[str]]:
    """Return a TestCase with torch's tests, each of which forks its ranks."""
    stand_in.admit_gpu_tests()
    import torch
    import torch.testing._internal.distributed.distributed_test as suite
    from torch.testing._internal import common_distributed as common

    wrapper = stock_on_cpu(torch) if stock else ours_on_cpu(torch)
    torch.nn.parallel.DistributedDataParallel = suite.DistributedDataParallel = wrapper
    common.logger.setLevel(logging.CRITICAL)
    common.TIMEOUT_OVERRIDE = LONG_LIMITS_S
    common.TIMEOUT_DEFAULT = LIMIT_S
    suite.autocast = lambda *args, **kwargs: torch.autocast("cpu", *args, **kwargs)
    suite.GradScaler = lambda *args, **kwargs: torch.amp.GradScaler("cpu", *args, **kwargs)

    class TorchsTests(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def run_test(self, test_name: str, pipe: Any) -> None:
            torch.set_num_threads(1)
            with open(os.devnull, "w") as nowhere:  # the parent gets the trace through the pipe
                os.dup2(nowhere.fileno(), 2)
            with stand_in.gpus_on_cpu():
                super().run_test(test_name, pipe)

    return TorchsTests, ddp_tests(Path(suite.__file__).read_text())


def ours_on_cpu(torch: Any) -> type:
    import shardwright

    torch.nn.SyncBatchNorm = shardwright.SyncBatchNorm  # torch's has no form for CPUs
    return _without_devices(shardwright.DistributedDataParallel)


def stock_on_cpu(torch: Any) -> type:
    return _without_devices(torch.nn.parallel.DistributedDataParallel)


def _without_devices(wrapper: type) -> type:
    """Return the class with the CPU for `device_ids`, as in gpus_on_cpu()."""

    class DistributedDataParallel(wrapper):  # type: ignore[misc]
        def __init__(self, module: Any, device_ids: Any = None, output_device: Any = None, *rest: Any, **more: Any):
            super().__init__(module, None, None, *rest, **more)

    DistributedDataParallel.__qualname__ = "DistributedDataParallel"
    globals()["DistributedDataParallel"] = DistributedDataParallel  # pickle finds it here
    return DistributedDataParallel


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/torch_suites", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="tests to run; all if none")
    parser.add_argument("--stock", action="store_true", help="run torch's class")
    parser.add_argument("--verbose", action="store_true", help="print the whole trace of each failure")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    options = parser.parse_args()
    case, names = make_suite(stock=options.stock)
    names = options.names or names
    if options.list:
        print("\n".join(names))
        return 0
    expected = {} if options.stock else read_differences(DIFFERENCES.read_text())
    unknown = sorted(set(expected) - set(names)) if not options.names else []
    return run_all(
        "DistributedDataParallel", names, lambda name: run_case(case(name)), expected, unknown, verbose=options.verbose
    )


if __name__ == "__main__":
    sys.exit(main())
