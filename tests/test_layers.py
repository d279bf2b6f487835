"""The house rules of the engine and of the package, checked on their text and on what the compiler made of it.

The table of csrc/README.md says which folder may include which; this file reads it there. The other rules are
in the same spirit: one folder knows Python, the library neither prints nor exits, every global name begins
with sw_, no files need one another in a circle, file names are unique and files stay short. Binary checks read
the built extension and its objects.
The table of docs/design/python.md says in which order folders of the Python package may import one another.
"""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
CHECK = ROOT / "csrc_check"
PACKAGE = ROOT / "python" / "shardwright"
TOOLS = ROOT / "python" / "shardwright_tools"
ENGINE = PACKAGE / "_engine.abi3.so"
LINES_MAX = 800

# What writes to the terminal, ends the process or overruns a buffer. Fortified forms are matched too.
BANNED_CALLS = {
    *("printf", "vprintf", "puts", "putchar", "putc", "fputs", "perror"),
    *("exit", "abort", "quick_exit", "atexit", "system"),
    *("sprintf", "vsprintf", "strcpy", "strcat", "gets"),
}
BANNED_SYMBOLS = BANNED_CALLS | {"stdout", "stderr", "__assert_fail"}

ROW = re.compile(r"^\|\s*([a-z_]+)\s*\|[^|]*\|([^|]*)\|\s*$")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
COMMENT_OR_STRING = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|/\*.*?\*/|//[^\n]*', re.DOTALL)


def read_table(csrc: Path) -> dict[str, set[str]]:
    """Return folder -> folders that it may include: itself and those that the table allows it, transitively."""
    rows = [ROW.match(line) for line in (csrc / "README.md").read_text().splitlines()]
    direct = {row[1]: set(re.findall(r"[a-z_]+", row[2])) for row in rows if row and row[1] != "folder"}

    def reach(folder: str) -> set[str]:
        return {folder}.union(*(reach(below) for below in direct[folder]))

    return {folder: reach(folder) for folder in direct}


def c_files(csrc: Path) -> list[Path]:
    return sorted([*csrc.rglob("*.c"), *csrc.rglob("*.h")])


def included_folder(csrc: Path, file: Path, target: str) -> str | None:
    """Return the layer of an included file; None if the file is not in the tree."""
    for base in (file.parent, csrc):
        found = (base / target).resolve()
        if found.exists() and csrc.resolve() in found.parents:
            return found.relative_to(csrc.resolve()).parts[0]
    return None


def wrong_includes(csrc: Path) -> list[str]:
    """Return one sentence for each include that the table does not allow."""
    table, wrong = read_table(csrc), []
    for file in c_files(csrc):
        layer, name = file.relative_to(csrc).parts[0], file.relative_to(csrc)
        if layer not in table:
            wrong.append(f"{name}: the table has no row for the folder {layer!r}")
            continue
        for kind, target in INCLUDE.findall(COMMENT.sub(r"\1", file.read_text())):
            folder = included_folder(csrc, file, target)
            if folder is None and kind == '"':
                wrong.append(f'{name}: "{target}" is no file of csrc (system headers go in <>)')
            elif folder is not None and folder not in table[layer]:
                wrong.append(f"{name}: {layer} may not include {folder} ({target})")
    return wrong


def code_of(file: Path) -> str:
    """Return the text without comments and string literals, with its line breaks."""
    return COMMENT_OR_STRING.sub(lambda match: '""' + "\n" * match[0].count("\n"), file.read_text())


def banned_calls(csrc: Path) -> list[str]:
    pattern = re.compile(rf"(?<![\w.>])({'|'.join(sorted(BANNED_CALLS))})\s*\(|\b(stdout|stderr)\b|\bassert\s*\(")
    return [
        f"{file.relative_to(csrc)}:{number}: {match[0].strip()}"
        for file in c_files(csrc)
        for number, line in enumerate(code_of(file).splitlines(), 1)
        for match in pattern.finditer(line)
    ]


def symbols(path: Path, *options: str) -> set[str]:
    """Return the names that nm prints, without versions."""
    return symbols_of([path], *options)[path]


def symbols_of(paths: Iterable[Path], *options: str) -> dict[Path, set[str]]:
    """Return the names that one call of nm prints, by file."""
    found: dict[Path, set[str]] = {path: set() for path in paths}
    done = subprocess.run(["nm", "-A", *options, *map(str, found)], capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        name, _, rest = line.partition(":")
        found[Path(name)].add(rest.split()[-1].split("@")[0])
    return found


def circles_of(below: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected lists of names."""
    reached: dict[str, set[str]] = {}
    while below != reached:
        reached = below
        below = {name: targets.union(*(below.get(each, set()) for each in targets)) for name, targets in below.items()}
    both = {tuple(sorted(each for each in reached[name] if name in reached.get(each, ()))) for name in reached}
    return sorted(list(names) for names in both if len(names) > 1)


def file_circles(objects: dict[Path, Path], root: Path) -> list[list[str]]:
    """Return circles of source files by the symbols of their objects: each file calls, or names an object of, the next."""
    names = {source: str(source.relative_to(root).with_suffix("")) for source in objects}
    defined, needed = symbols_of(objects.values(), "-g", "--defined-only"), symbols_of(objects.values(), "-u")
    owner = {symbol: names[source] for source, made in objects.items() for symbol in defined[made]}
    return circles_of(
        {
            names[source]: {owner[symbol] for symbol in needed[made] if symbol in owner}
            for source, made in objects.items()
        }
    )


def header_circles(csrc: Path) -> list[list[str]]:
    """Return circles of headers: each includes the next."""
    below = {}
    for file in csrc.rglob("*.h"):
        targets = INCLUDE.findall(COMMENT.sub(r"\1", file.read_text()))
        found = {(base / target).resolve() for _, target in targets for base in (file.parent, csrc)}
        below[str(file.relative_to(csrc))] = {
            str(path.relative_to(csrc.resolve())) for path in found if path.exists() and csrc.resolve() in path.parents
        }
    return circles_of(below)


def plain_name(symbol: str) -> str:
    """Return the plain name: __printf_chk is printf."""
    fortified = re.fullmatch(r"__(\w+)_chk", symbol)
    return fortified[1] if fortified else symbol


def built_objects() -> dict[Path, Path]:
    """Return source -> the newest object that setup.py made of it."""
    found: dict[Path, Path] = {}
    for source in CSRC.rglob("*.c"):
        relative = source.relative_to(ROOT).with_suffix(".o")
        made = sorted(ROOT.glob(f"build/temp.*/{relative}"), key=lambda path: path.stat().st_mtime)
        if made:
            found[source] = made[-1]
    return found


@pytest.fixture(scope="module")
def engine() -> Path:
    assert ENGINE.exists(), f"{ENGINE} is missing: run `make build`"
    return ENGINE


@pytest.fixture(scope="module")
def objects() -> dict[Path, Path]:
    made = built_objects()
    missing = sorted(str(source.relative_to(ROOT)) for source in set(CSRC.rglob("*.c")) - set(made))
    assert missing == [], "not compiled: run `make build`"
    return made


def copy_tree(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CSRC, tmp_path / "csrc"))


def test_the_table_has_a_row_for_every_folder_and_no_other() -> None:
    folders = {path.name for path in CSRC.iterdir() if path.is_dir()}
    assert folders == set(read_table(CSRC))


def test_every_include_points_down_the_table() -> None:
    assert wrong_includes(CSRC) == []


def test_a_planted_upward_include_is_caught(tmp_path: Path) -> None:
    csrc = copy_tree(tmp_path)
    (csrc / "base" / "planted.c").write_text('#include "kernels/kernels.h"\n')
    assert wrong_includes(csrc) == ["base/planted.c: base may not include kernels (kernels/kernels.h)"]


def test_a_planted_upward_include_by_relative_path_is_caught(tmp_path: Path) -> None:
    csrc = copy_tree(tmp_path)
    (csrc / "tensor" / "planted.h").write_text('#include "../kernels/kernels.h"\n')
    assert wrong_includes(csrc) == ["tensor/planted.h: tensor may not include kernels (../kernels/kernels.h)"]


def test_a_planted_include_in_a_comment_is_no_include(tmp_path: Path) -> None:
    csrc = copy_tree(tmp_path)
    (csrc / "base" / "planted.c").write_text('/*\n#include "kernels/kernels.h"\n*/\n')
    assert wrong_includes(csrc) == []


def test_only_the_python_folder_includes_python_headers() -> None:
    users = {
        file.relative_to(CSRC).parts[0]
        for file in c_files(CSRC)
        for _, target in INCLUDE.findall(COMMENT.sub(r"\1", file.read_text()))
        if re.search(r"(^|/)(Python|structmember|frameobject)\.h$", target)
    }
    assert users <= {"python"}


@pytest.mark.parametrize("folder", (CSRC, CHECK), ids=lambda path: path.name)
def test_no_source_calls_a_banned_function(folder: Path) -> None:
    assert banned_calls(folder) == []


def test_a_planted_banned_call_is_caught_and_a_lookalike_is_not(tmp_path: Path) -> None:
    csrc = copy_tree(tmp_path)
    (csrc / "base" / "planted.c").write_text(
        'void f(void)\n{\n    my_exit(1); snprintf(b, 4, "exit(1)"); /* abort() */\n    exit(1);\n}\n'
    )
    assert banned_calls(csrc) == ["base/planted.c:4: exit("]


def test_the_extension_asks_libc_for_no_banned_function(engine: Path) -> None:
    undefined = {plain_name(symbol) for symbol in symbols(engine, "-D", "--undefined-only")}
    assert undefined & BANNED_SYMBOLS == set()


def test_the_extension_exports_its_init_function_and_nothing_without_the_prefix(engine: Path) -> None:
    exported = symbols(engine, "-D", "--defined-only") - {"_init", "_fini"}
    assert "PyInit__engine" in exported
    assert {name for name in exported if not name.startswith("sw_")} == {"PyInit__engine"}


def test_every_global_name_in_the_objects_begins_with_sw(objects: dict[Path, Path]) -> None:
    defined = symbols_of(objects.values(), "-g", "--defined-only")
    wrong = {
        str(source.relative_to(ROOT)): names
        for source, made in objects.items()
        if (names := {n for n in defined[made] if not n.startswith("sw_")} - {"PyInit__engine"})
    }
    assert wrong == {}


def test_no_c_files_need_one_another(objects: dict[Path, Path]) -> None:
    assert file_circles(objects, CSRC) == []


def test_a_planted_circle_of_c_files_is_caught(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no compiler on this machine")
    texts = {
        "one": "int sw_two(void); int sw_one(void) { return sw_two(); }",
        "two": "extern int (*sw_table[])(void); int sw_two(void) { return sw_table[0](); }",
        "three": "int sw_one(void); int (*sw_table[])(void) = {sw_one};",
        "above": "int sw_one(void); int sw_above(void) { return sw_one(); }",
    }
    made = {}
    for name, text in texts.items():
        source = tmp_path / f"{name}.c"
        source.write_text(text)
        made[source] = source.with_suffix(".o")
        subprocess.run([compiler, "-c", str(source), "-o", str(made[source])], check=True)
    assert file_circles(made, tmp_path) == [["one", "three", "two"]]
    del made[tmp_path / "three.c"]
    assert file_circles(made, tmp_path) == []


def test_no_headers_include_one_another() -> None:
    assert header_circles(CSRC) == []


def test_a_planted_circle_of_headers_is_caught(tmp_path: Path) -> None:
    csrc = copy_tree(tmp_path)
    (csrc / "base" / "planted.h").write_text('#include "base/other.h"\n')
    (csrc / "base" / "other.h").write_text('#include "planted.h"\n')
    assert header_circles(csrc) == [["base/other.h", "base/planted.h"]]


def test_file_names_are_unique_in_the_tree() -> None:
    names = [file.name for file in [*c_files(CSRC), *c_files(CHECK)]]
    assert sorted(names) == sorted(set(names))


def test_no_file_is_longer_than_800_lines() -> None:
    files = [*c_files(CSRC), *c_files(CHECK)]
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in files}
    assert {name: length for name, length in lengths.items() if length > LINES_MAX} == {}


# Python -----------------------------------------------------------------------------------------------------------

FOLDER = re.compile(r"^\| ([a-z_]+) \|[^|]*\|[^|]*\|$", re.MULTILINE)
#: what imports from every folder, and what every folder may import
EVERYWHERE, FREE = {"", "__main__", "description"}, {"_engine", "_version"}


def modules(package: Path) -> dict[str, Path]:
    """Return dotted name below the package -> file. The package itself has the empty name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    """Return the nodes of a file's tree. Tests look at the same files, and at copies of them."""
    return tuple(ast.walk(ast.parse(text)))


def imports(package: Path) -> Iterator[tuple[str, str]]:
    """Return pairs (module, imported module), wherever in the file the import stands."""
    known = modules(package)
    for name, path in known.items():
        for node in nodes_of(path.read_text()):
            if not isinstance(node, ast.ImportFrom):
                continue
            if node.level:
                own = name.split(".") if name else []
                base = own if path.name == "__init__.py" else own[:-1]
                base = base[: len(base) - node.level + 1]
                target = ".".join([*base, *([node.module] if node.module else [])])
            elif node.module and node.module.split(".")[0] == package.name:
                target = node.module[len(package.name) + 1 :]
            else:
                continue
            for alias in node.names:
                whole = f"{target}.{alias.name}".strip(".")
                if whole.split(".")[0] not in FREE:
                    yield name, whole if whole in known else target


def rows_of(package: str) -> list[str]:
    """Return folders in the order of the package's table in docs/design/python.md; "root" stands for files beside them."""
    tables = re.split(r"^\| folder of (\w+) \|", (ROOT / "docs/design/python.md").read_text(), flags=re.MULTILINE)
    return FOLDER.findall(dict(zip(tables[1::2], tables[2::2]))[package])


def wrong_imports(package: Path) -> list[str]:
    """Return one sentence for each import that the table of docs/design/python.md does not allow."""
    order = rows_of(package.name)

    def place(module: str) -> int:
        top = module.split(".")[0]
        return order.index(top if (package / top).is_dir() and top else "root")

    return sorted(
        {
            f"{name} may not import {target}"
            for name, target in imports(package)
            if name not in EVERYWHERE and (target == "description" or place(target) > place(name))
        }
    )


def circles(package: Path) -> list[list[str]]:
    """Return circles: lists of modules that import one another."""
    below: dict[str, set[str]] = {name: set() for name in modules(package)}
    for name, target in imports(package):
        if name not in EVERYWHERE and name != target:
            below[name].add(target)
    return circles_of(below)


def copy_package(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("*.so", "__pycache__")))


@pytest.mark.parametrize("package", (PACKAGE, TOOLS), ids=lambda path: path.name)
def test_the_python_table_has_a_row_for_every_folder_and_no_other(package: Path) -> None:
    assert set(rows_of(package.name)) - {"root"} == {path.parent.name for path in package.glob("*/__init__.py")}


@pytest.mark.parametrize("package", (PACKAGE, TOOLS), ids=lambda path: path.name)
def test_every_python_import_points_up_the_table(package: Path) -> None:
    assert wrong_imports(package) == []


@pytest.mark.parametrize("package", (PACKAGE, TOOLS), ids=lambda path: path.name)
def test_no_python_modules_import_one_another(package: Path) -> None:
    assert circles(package) == []


def test_the_engine_does_not_import_the_tools() -> None:
    """The two doors, `python -m shardwright` and `-m shardwright.gpu_check`, load them by name when they run."""
    doors = {"__main__.py", "gpu_check.py"}
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"shardwright_tools\b", "".join(re.findall(r"^.*import.*$", path.read_text(), re.MULTILINE)))
    }
    assert found == doors


def test_a_planted_python_import_is_caught_wherever_it_stands(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    planted = "def f():\n    from ..parallel.ddp import DistributedDataParallel\n    return DistributedDataParallel\n"
    (package / "layout" / "planted.py").write_text(planted)
    assert wrong_imports(package) == ["layout.planted may not import parallel.ddp"]


def test_a_planted_circle_is_caught(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    (package / "layout" / "one.py").write_text("from .other import x\n")
    (package / "layout" / "other.py").write_text("def f():\n    from .one import y\n    return y\n\n\nx = 1\n")
    assert [{"layout.one", "layout.other"} <= set(each) for each in circles(package)] == [True]


def test_no_folder_has_more_than_twenty_files() -> None:
    folders = [path for package in (PACKAGE, TOOLS) for path in package.iterdir() if path.is_dir()]
    counts = {path.name: len(list(path.glob("*.py"))) for path in folders}
    assert {name: count for name, count in counts.items() if count > 20} == {}


# Private names of torch ----------------------------------------------------------------------------------------------

#: a name that torch_compat need not hold -> why
NOT_HIDDEN = {
    **dict.fromkeys(("_foreach_", "_amp_foreach_", "_to_copy"), "beginnings of operators, which have no other name"),
    "_version": "a tensor's counter of writes, which autograd documents",
    **dict.fromkeys(("_parameters", "_buffers", "_modules"), "a module's tables, whose order its named_ methods hide"),
    **dict.fromkeys(
        ("_assign_modules_buffers", "_authoritative_rank", "_check_comm_hook", "_check_sync_bufs", "_check_input_dim"),
        "what classes of ours inherit from classes of torch",
    ),
    **dict.fromkeys(("_dataloaders", "_models", "_is_accelerate_prepared"), "accelerate's"),
    **dict.fromkeys(("_actions", "_SubParsersAction"), "argparse's, which shtab reads as well"),
    **dict.fromkeys(("_bit_generator", "_Unpickler", "_exit"), "NumPy's and Python's"),
}


#: variables that hold objects of ours where an attribute is first set
OURS = ("self", "cls", "made", "each")


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def defined_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that a file gives to functions, classes, arguments, variables and attributes of `self`."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in OURS:
                yield node.attr


def private_uses(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of private names of torch's modules, and of attributes that are read or set, by name too."""
    for node in nodes:
        if isinstance(node, ast.Import):
            found = [each.name for each in node.names if each.name.startswith("torch.")]
            yield from ((node.lineno, part) for name in found for part in name.split(".") if is_private(part))
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(each.name for each in node.names)]
            yield from ((node.lineno, name) for name in names if is_private(name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("getattr", "hasattr", "setattr") and len(node.args) > 1:
                name = getattr(node.args[1], "value", None)
                if is_private(name):
                    yield node.lineno, str(name)


def private_names(*packages: Path) -> list[str]:
    """Return one sentence for each private name that no file of ours defines, outside of torch_compat."""
    trees = {path: nodes_of(path.read_text()) for package in packages for path in package.rglob("*.py")}
    own = {name for tree in trees.values() for name in defined_in(tree)}
    return sorted(
        f"{path.name}:{line}: {name}"
        for path, tree in trees.items()
        if path.parent.name != "torch_compat"
        for line, name in private_uses(tree)
        if name not in own and not any(name.startswith(each) for each in NOT_HIDDEN)
    )


def test_private_names_of_torch_are_in_torch_compat_alone() -> None:
    assert private_names(PACKAGE, TOOLS) == []


def test_planted_private_names_of_torch_are_caught(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    planted = (
        "import torch._dynamo\nfrom torch.utils._pytree import tree_map\n\n\n"
        "def f(module, _own):\n    torch._C._functorch, module._forward_pre_hooks\n"
        "    return getattr(module, '_orig_mod', _own)._own\n"
    )
    (package / "layout" / "planted.py").write_text(planted)
    names = ("1: _dynamo", "2: _pytree", "6: _C", "6: _forward_pre_hooks", "6: _functorch", "7: _orig_mod")
    assert private_names(package, TOOLS) == [f"planted.py:{name}" for name in names]


#: what a program may import of the package, besides its names
PUBLIC = {"checkpoint", "deepspeed", "elastic", "hooks", "optim"}


def inner_uses(tests: Path) -> list[str]:
    """Return one sentence for each inner name of the package that a test of ranks uses, but for internals.py."""
    found = []
    for path in sorted(tests.glob("*.py")):
        if path.name == "internals.py":
            continue
        for node in nodes_of(path.read_text()):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{each.name}" for each in node.names]
            inner = [name for name in names if is_inner(name)]
            if isinstance(node, ast.Attribute) and node.attr == "_engine":
                inner += [] if ast.unparse(node.value) == "internals" else [ast.unparse(node)]
            found += [f"{path.name}:{node.lineno}: {name}" for name in inner]  # type: ignore[attr-defined]
    return found


def is_inner(name: str) -> bool:
    """Return whether an imported name lies behind the package's public ones."""
    package, *parts = name.split(".")
    if package != "shardwright" or not parts or parts[0] in ("deepspeed", "integrations"):
        return False
    files = [PACKAGE.joinpath(*parts[: n + 1]).with_suffix(".py") for n in range(len(parts))]
    modules = [file for file in files if file.exists() or (file.with_suffix("") / "__init__.py").exists()]
    return parts[0].startswith("_engine") or len(modules) > (parts[0] in PUBLIC)


def test_tests_of_ranks_use_public_names_and_internals_alone() -> None:
    assert inner_uses(ROOT / "tests" / "ranks") == []


def test_planted_inner_names_are_caught(tmp_path: Path) -> None:
    planted = (
        "from shardwright.comm import wire\nfrom shardwright import wrap, _engine, optim\nx = model._engine.made\n"
    )
    (tmp_path / "test_planted.py").write_text(planted)
    names = ("1: shardwright.comm.wire", "2: shardwright._engine", "3: model._engine")
    assert inner_uses(tmp_path) == [f"test_planted.py:{name}" for name in names]
