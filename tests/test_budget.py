"""The size of the product, which may only fall. A change that adds a feature raises its folder's line by a stated amount."""

from __future__ import annotations

import collections
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: lines of Python by folder, at most; the files beside a package's folders stand under the package's name
LINES = {
    "shardwright": 2_230,
    "shardwright/backend": 582,
    "shardwright/checkpoint": 10_138,
    "shardwright/comm": 2_999,
    "shardwright/compress": 1_160,
    "shardwright/deepspeed": 9,
    "shardwright/formats": 1_893,
    "shardwright/gradients": 1_617,
    "shardwright/integrations": 3_270,
    "shardwright/layout": 1_287,
    "shardwright/observe": 1_530,
    "shardwright/optim": 4_560,
    "shardwright/options": 1_217,
    "shardwright/parallel": 6_288,
    "shardwright/parameters": 5_163,
    "shardwright/torch_compat": 1_662,
    "shardwright_tools": 317,
    "shardwright_tools/cli": 3_295,
    "shardwright_tools/convert": 1_290,
    "shardwright_tools/doctor": 1_198,
    "shardwright_tools/gpu_check": 1_306,
    "shardwright_tools/planner": 2_351,
}
#: lines of C, headers and sources: the engine, and the check of its kernels that the tools import
C_LINES = {"csrc": 52_568, "csrc_check": 2_321}


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def python_lines(root: Path) -> dict[str, int]:
    found: collections.Counter[str] = collections.Counter()
    for path in root.rglob("*.py"):
        package, *folders = path.relative_to(root).parts[:-1]
        found["/".join([package, *folders[:1]])] += lines_of(path)
    return dict(found)


def test_no_folder_of_python_has_more_lines_than_before() -> None:
    found = python_lines(ROOT / "python")
    assert found.keys() == LINES.keys()
    assert {name: (count, LINES[name]) for name, count in found.items() if count > LINES[name]} == {}


def test_c_has_no_more_lines_than_before() -> None:
    found = {name: sum(lines_of(path) for path in (ROOT / name).rglob("*.[ch]")) for name in C_LINES}
    assert {name: (count, C_LINES[name]) for name, count in found.items() if count > C_LINES[name]} == {}


def test_a_planted_line_is_counted(tmp_path: Path) -> None:
    for name in ("one/__init__.py", "one/a/b/c.py", "one/a/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    assert python_lines(tmp_path) == {"one": 1, "one/a": 2}
