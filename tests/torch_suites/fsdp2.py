"""torch's own tests of FSDP2, with our fully_shard in the place of its own, on CPU ranks.

`python tests/torch_suites/fsdp2.py PATH` runs those in PATH, which is test/distributed/_composable/fsdp of torch's source or
a file of it: the wheel does not hold them. Without PATH, TORCH_FSDP2_TESTS names it. `... PATH test_frozen ...` runs some, and
`--stock` runs them with torch's fully_shard, which shows what CPU ranks, another version of torch and the stand-in for GPUs
cost. `--outcomes FILE` adds a JSON line per test, and `--table FILE` prints such lines of both sides as a table. A test that
fails or is skipped with ours must be in fsdp2_differences.txt with a reason, and one that is there must not pass.

A test that starts threads as ranks starts processes here: with ours, a process is a rank.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import re
import sys
import time
import types
import unittest
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
LIMIT_S = float(os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "150"))

sys.path.insert(0, str(Path(__file__).parent))
import fsdp2_stand_in  # noqa: E402
import own_process  # noqa: E402
import stand_in  # noqa: E402
from outcomes import last_line, read_differences, run_all  # noqa: E402

GPUS = 4
DIFFERENCES = Path(__file__).with_name("fsdp2_differences.txt")
#: files that need a GPU throughout: its compiler, the overlap of its streams, its memory
_OF_GPUS = (
    "test_fully_shard_compile",
    "test_fully_shard_memory",
    "test_fully_shard_overlap",
    "test_fully_shard_copy_engine",
)
#: what a test uses if it looks into torch's FSDP, beside names from its private modules
_PRIVATE = re.compile(
    r"\bpatch_(?:unshard|reshard|post_backward|register_post_backward)|\._?(?:get_)?fsdp_(?:state|param)|\bFSDPParam|fully_shard\.state\(|_set_unshard_async_op|\._lazy_init|_comm_ctx\b"
)
_COLLECTIVES = re.compile(r"\bCommDebugMode|\bpatch_(?:all_gather|reduce_scatter|all_reduce|foreach)|\bcomm_counts")


def prepare(*, stock: bool) -> None:
    """Put ours and the stand-in for GPUs in their places, before a file of tests is imported."""
    stand_in.admit_gpu_tests()
    import torch
    from torch.testing._internal import common_device_type, common_distributed, common_fsdp, common_utils

    own_process.fork_ranks_on_cpu(LIMIT_S)
    stand_in.meshes_on_cpu()
    stand_in.attention_on_cpu()
    common_distributed.requires_nccl_version = lambda *_: lambda function: function
    for helpers in (common_fsdp, common_utils):
        helpers.get_cycles_per_ms, helpers.device_sleep = lambda *_: 1.0, lambda *_: None
    common_device_type.instantiate_device_type_tests = _instantiate_on_cpu
    common_fsdp.test_compiled_fsdp = lambda **_: lambda function: function
    common_fsdp.FSDPTestMultiThread = _processes_for_threads(common_fsdp.FSDPTest)
    common_fsdp.DEVICE_COUNT = GPUS
    torch.accelerator.device_count = lambda: 8
    torch.accelerator.synchronize = torch.cpu._sleep = lambda *_: None
    torch.amp.GradScaler.__init__.__defaults__ = ("cpu", *torch.amp.GradScaler.__init__.__defaults__[1:])
    torch.Tensor.pin_memory = lambda self, *_: self
    for name in ("_sleep", "empty_cache", "reset_peak_memory_stats"):
        setattr(torch.cuda, name, lambda *_: None)
    if not stock:
        fsdp2_stand_in.replace_functions()


def _processes_for_threads(base: type) -> type:
    class FSDPTestMultiThread(base):  # type: ignore[misc]
        def perThreadSetUp(self) -> None:
            pass

        def perThreadTearDown(self) -> None:
            pass

        def run_test(self, test_name: str, pipe: Any) -> None:
            self.perThreadSetUp()
            super().run_test(test_name, pipe)
            self.perThreadTearDown()

    return FSDPTestMultiThread


def _instantiate_on_cpu(kind: type, *_: Any, **__: Any) -> None:
    """Give a class's tests, which take a device, the CPU."""
    for name, test in [each for each in vars(kind).items() if each[0].startswith("test_")]:
        setattr(kind, name, functools.partialmethod(test, "cpu"))


def load(path: Path) -> types.ModuleType:
    """Import a file of tests, with the CPU for each GPU that it names."""
    text = path.read_text()
    text = re.sub(r'torch\.device\("cuda",[^()]*(?:\([^()]*\))?[^()]*\)', 'torch.device("cpu")', text)
    text = re.sub(r"torch\.accelerator\.current_accelerator\([^()]*\)", 'torch.device("cpu")', text)
    text = re.sub(
        r"torch\.device\(\s*device_type(?:\.type)?, [\w.]+(?:\([^()]*\)[\w.]*)*(?:\(\))?\s*\)",
        'torch.device("cpu")',
        text,
    )
    text = re.sub(r'"cuda(?::\d+)?"', '"cpu"', text).replace("not TEST_CUDA", "False")
    text = text.replace("torch.accelerator.is_available()", "True")
    text = text.replace("device(type='cuda'", "device(type='cpu'").replace("and cuda for FSDP", "and cpu for FSDP")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            _add_missing_names(node)
    module = sys.modules[path.stem] = types.ModuleType(path.stem)
    module.__file__ = str(path)
    exec(compile(text, str(path), "exec"), vars(module))
    return module


def _add_missing_names(node: ast.ImportFrom) -> None:
    """Have an import of another version's private name succeed; a test that uses the name fails alone."""
    assert node.module is not None
    try:
        module = __import__(node.module, fromlist=["_"])
    except ImportError:
        module = sys.modules[node.module] = types.ModuleType(node.module)
    for name in (each.name for each in node.names):
        if not hasattr(module, name):
            setattr(module, name, _Missing(f"{node.module}.{name}"))


class _Missing:
    """A name of another version of torch: it may be read, as a mark on a class is, and its call fails."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise AttributeError(f"{self._name}: not in this version of torch")


def cases(path: Path) -> Iterator[tuple[str, str, unittest.TestCase]]:
    """Yield (file.class.test, kind, test); `kind` is "private", "collectives" or "contract": what the test looks at."""
    found = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
    for each in found:
        if each.stem in _OF_GPUS or "fully_shard" not in each.read_text():
            continue
        module = load(each)
        kinds = _kinds(each.read_text())
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, unittest.TestCase) and kind.__module__ == module.__name__:
                for case in unittest.defaultTestLoader.loadTestsFromTestCase(kind):
                    title = f"{kind.__name__}.{case.id().rpartition('.')[2]}"
                    yield f"{each.stem}.{title}", kinds.get(title, "contract"), case


def _kinds(text: str) -> dict[str, str]:
    """Return class.test to what the test looks at, by names in it and in the methods that it calls."""
    tree = ast.parse(text)
    private = {
        name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and "._" in (node.module or "").removeprefix("torch.distributed._composable")
        for name in node.names
        if "fsdp" in (node.module or "") and "testing" not in (node.module or "")
    }
    words = re.compile("|".join([_PRIVATE.pattern, *(rf"\b{re.escape(each)}\b" for each in sorted(private))]))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    kinds = {}
    for name, node in classes.items():
        methods = {each.name: each for each in _methods(node, classes)}
        sources = {key: ast.get_source_segment(text, each) or "" for key, each in methods.items()}
        for test in (each for each in methods if each.startswith("test_")):
            source = "\n".join(sources[each] for each in _called(test, sources))
            looks = "private" if words.search(source) else "collectives" if _COLLECTIVES.search(source) else "contract"
            kinds[f"{name}.{test}"] = looks
    return kinds


def _methods(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[ast.FunctionDef]:
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _methods(classes[base.id], classes)
    yield from (each for each in node.body if isinstance(each, ast.FunctionDef))


def _called(name: str, sources: dict[str, str]) -> list[str]:
    found = [name]
    for each in found:
        found += [other for other in sources if other not in found and re.search(rf"\bself\.{other}\b", sources[each])]
    return found


def print_table(lines: Iterable[str]) -> None:
    """Print outcomes of both sides, a line per test, and counts."""
    rows: dict[str, dict[str, Any]] = {}
    for line in lines:
        outcome = json.loads(line)
        row = rows.setdefault(outcome["test"], {"kind": outcome["kind"]})
        row[outcome["side"]] = outcome["outcome"]
        row["why " + outcome["side"]] = outcome["why"]
    for name, row in sorted(rows.items()):
        why = "" if row.get("ours") == "passed" else row.get("why ours") or row.get("why stock", "")
        print(f"{name} | {row['kind']} | {row.get('stock', '-')} | {row.get('ours', '-')} | {why}")
    for kind in ("contract", "collectives", "private"):
        of = [row for row in rows.values() if row["kind"] == kind]
        stock = [row for row in of if row.get("stock") == "passed"]
        both = sum(row.get("ours") == "passed" for row in stock)
        print(f"{kind}: {len(of)} tests, stock passes {len(stock)}, of which ours passes {both}")


def differences(version: str) -> dict[str, str]:
    """Return test to reason, of the tests of one version of torch: `name@version` is of that one, `name` of all."""
    found = {}
    for name, reason in read_differences(DIFFERENCES.read_text()).items():
        test, _, of = name.partition("@")
        if of in ("", version):
            found[test] = reason
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/torch_suites/fsdp2.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "path", nargs="?", type=Path, default=os.environ.get("TORCH_FSDP2_TESTS"), help="folder or file"
    )
    parser.add_argument("names", nargs="*", help="words in names of tests to run; all if none")
    parser.add_argument("--stock", action="store_true", help="run torch's own")
    parser.add_argument("--verbose", action="store_true", help="print the whole trace of each failure")
    parser.add_argument("--list", action="store_true", help="print the names and kinds and end")
    parser.add_argument("--outcomes", type=Path, help="a file that gets a JSON line per test")
    parser.add_argument("--passed-by-stock", action="store_true", help="run only what --outcomes says stock passes")
    parser.add_argument("--of", default="2.13", help="the version of torch whose tests these are, as in the table")
    parser.add_argument("--table", type=Path, help="print what a file of --outcomes holds and end")
    options = parser.parse_intermixed_args()
    if options.table:
        print_table(options.table.read_text().splitlines())
        return 0
    if options.path is None:
        parser.error("no PATH, and TORCH_FSDP2_TESTS is not set")
    prepare(stock=options.stock)
    import torch

    found = {name: (kind, case) for name, kind, case in cases(Path(options.path))}
    names = [name for name in found if not options.names or any(word in name for word in options.names)]
    if options.list:
        print("\n".join(f"{name}: {found[name][0]}" for name in names))
        return 0
    if options.passed_by_stock:
        told = [json.loads(line) for line in options.outcomes.read_text().splitlines()]
        passed = {each["test"] for each in told if each["side"] == "stock" and each["outcome"] == "passed"}
        names = [name for name in names if name in passed]
    expected = {} if options.stock else differences(options.of)

    def run(name: str) -> tuple[str, str]:
        kind, case = found[name]
        gpus = getattr(getattr(type(case), case.id().rpartition(".")[2]), "gpus", GPUS)
        torch.cuda.device_count = torch.cpu.device_count = lambda: max(gpus, GPUS)
        start = time.monotonic()
        outcome, why = own_process.run_case_apart(case, LIMIT_S)
        if options.outcomes:
            side = "stock" if options.stock else "ours"
            shown = {"test": name, "kind": kind, "side": side, "outcome": outcome, "why": last_line(why)}
            with options.outcomes.open("a") as file:
                file.write(json.dumps({**shown, "seconds": round(time.monotonic() - start, 1)}) + "\n")
        return outcome, why

    return run_all("FSDP2", names, run, expected, verbose=options.verbose)


if __name__ == "__main__":
    sys.exit(main())
