"""Laws of the documentation: each link leads to a file and a heading that are there, each page is named in an index, and the
README shows the program whose output it prints. Blocks of code are of a known kind, and name commands and options that exist."""

import ast
import functools
import json
import re
import sys
from pathlib import Path

import pages
import pytest
from shardwright_tools.cli import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "benchmarks/*.md", "csrc/*.md")
    for page in ROOT.glob(pattern)
)

#: blocks of Python that may say why they do not run
NOT_RUN_MAX = 6
#: commands that are not ours, which pages may name
OTHER_PROGRAMS = frozenset(
    "accelerate cd export git kill kubectl pip python python3 sbatch scancel srun mpirun sky true .".split()
)


def anchors(page):
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        place, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / place).resolve() if place else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("folder", ["docs", "docs/design", "docs/howto", "docs/reference"])
def test_an_index_names_every_page_of_its_folder(folder):
    index = (ROOT / folder / "README.md").read_text()
    pages = {page.name for page in (ROOT / folder).glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"({page})" not in index and f"({page}#" not in index} == set()


def test_the_readme_shows_the_program_whose_output_it_prints():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert (ROOT / "examples" / "01_wrap_model.py").read_text() in blocks


def test_the_flows_name_calls_that_exist():
    """docs/design/python.md: at most twelve calls a flow, each in the file that it names."""
    text = (ROOT / "docs" / "design" / "python.md").read_text()
    flows = re.split(r"^\*\*", text.split("## Four flows")[1].split("**How it fails.**")[0], flags=re.M)[1:]
    assert len(flows) == 4
    for flow in flows:
        steps = re.findall(r"^\d+\. (.*(?:\n    .*)*)", flow, flags=re.M)
        assert 5 <= len(steps) <= 12, flow
        for step in steps:
            for file, name in re.findall(r"`([\w/]+\.(?:py|c))`(?:: `([\w.]+)`)?", step):
                path = ROOT / file if file.startswith("csrc/") else ROOT / "python" / "shardwright" / file
                assert path.exists(), step
                assert not name or name in _defined(ast.parse(path.read_text())), step


def test_the_design_is_at_most_twenty_chapters_that_name_files_which_exist():
    chapters = [page for page in (ROOT / "docs" / "design").glob("*.md") if page.name != "README.md"]
    assert len(chapters) <= 20
    for page in chapters:
        files = set(re.findall(r"`([\w./]+/\w+\.(?:c|h|cu|py|jsonl?|md))`", page.read_text()))
        roots = (ROOT, ROOT / "python", ROOT / "python" / "shardwright")
        assert files, page.name
        assert {file for file in files if not any((root / file).exists() for root in roots)} == set(), page.name


def test_the_recipes_name_places_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("### Add an option")[2].partition("## Style")[0]
    named = set(re.findall(r"`([\w/]+(?:/|\.(?:py|pyi|c|h|cu|md|txt|toml)))`", text))
    assert len(named) > 30
    assert {
        each for each in named if not any((ROOT / at / each).exists() for at in ("", "python/shardwright"))
    } == set()


def _defined(node: ast.AST, outer: str = "") -> set[str]:
    found: set[str] = set()
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.ClassDef | ast.FunctionDef):
            found |= {outer + each.name} | _defined(each, f"{outer}{each.name}.")
    return found


def test_all_code_of_a_page_is_of_a_kind_that_a_test_reads():
    """Python runs (tests/ranks/test_code_of_documents_runs.py), commands are looked up, JSON and TOML parse; the rest is shown."""
    blocks = [block for page in pages.PAGES for block in pages.blocks_of(page)]
    assert {block.language for block in blocks} <= {*pages.PYTHON, *pages.SHELL, *pages.SHOWN}
    for block in blocks:
        if block.language == "json":
            json.loads(block.code)
        if block.language == "toml" and sys.version_info >= (3, 11):
            __import__("tomllib").loads(block.code)


def test_a_page_says_in_comments_how_a_block_runs(tmp_path):
    (tmp_path / "page.md").write_text(
        "Text.\n<!-- run:\na = 1\n-->\n<!-- needs: math -->\n\n```python\nprint(a)\n```\n\n```text\n1\n```\n\n"
        "- item\n  ```diff\n  -b = 1\n  +b = 2\n   c = 3\n  ```\n\n<!-- not run: of the text -->\nText.\n```python\n3\n```\n"
    )
    first, shown, diff, last = pages.blocks_of(tmp_path / "page.md")
    assert first[1:] == (7, "python", "print(a)\n", "a = 1", ("math",), "", "1\n") and shown.language == "text"
    assert (diff.code, diff.printed) == ("b = 2\nc = 3\n", None) and last.reason == ""
    assert pages.is_printed("a\n...\nb\n", "a\nx\ny\nb\n") and not pages.is_printed("a\n", "a\nb\n")


def test_few_blocks_of_python_do_not_run_and_each_says_why():
    blocks = [block for page in pages.PAGES for block in pages.blocks_of(page) if block.language in pages.PYTHON]
    left_out = {block.place: block.reason for block in blocks if block.reason}
    assert len(left_out) <= NOT_RUN_MAX, left_out
    assert all(len(reason) > 10 for reason in left_out.values())
    assert len(blocks) - len(left_out) >= 30


@pytest.mark.parametrize(
    "page", [*pages.PAGES, *pages.PROGRAMS, ROOT / "examples" / "README.md"], ids=lambda page: page.stem
)
def test_the_commands_of_a_page_exist_with_their_options(page, capsys):
    shells = [block for block in pages.blocks_of(page) if block.language in pages.SHELL or block.code.startswith("$ ")]
    commands = [words for block in shells for words in pages.commands_of(block.code)]
    for text in re.findall(r"`([^`\n]+)`", page.read_text()):
        if re.match(r"(shardwright|torchrun|accelerate launch|make) |[A-Z_]+=\S+ torchrun ", text):
            commands += pages.commands_of(text)
    unknown = [f"{' '.join(words)}: {wrong}" for words in commands if (wrong := _wrong_in(words, capsys))]
    assert unknown == [], unknown


def _wrong_in(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what does not exist in a command; "" if all does."""
    program, *rest = words
    if program == "torchrun" or program == "accelerate":
        ends = (at for at, word in enumerate(rest) if word.endswith(".py") or word in ("-m", "shardwright"))
        at = next(ends, len(rest))
        known = _help_of_torchrun() if program == "torchrun" else "--multi_gpu --num_processes --cpu"
        missing = [each for each in _options(rest[:at]) if each not in known]
        behind = ["python", *rest[at:]] if at < len(rest) else ["true"]
        behind = behind[2:] if behind[1:2] == ["-m"] else behind[1:] if behind[1:2] == ["shardwright"] else behind
        return ", ".join(missing) or _wrong_in(behind, capsys)
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        return ", ".join(each for each in rest if "=" not in each and each not in targets)
    if program == "shardwright":
        own = [word for word in rest if not word.startswith("-")][: 2 if rest[:1] == ["ckpt"] else 1]
        with pytest.raises(SystemExit) as ending:
            main([*own, "--help"])
        known = capsys.readouterr().out
        missing = [each for each in _options(rest) if not re.search(rf"{each}\b", known)]
        return f"no command {own}" if ending.value.code else ", ".join(missing)
    paths = [word for word in words if re.match(r"(\./)?(examples|benchmarks|tests)/", word)]
    missing = [path for path in paths if not (ROOT / path).exists()]
    return ", ".join(missing) or ("" if paths or program in OTHER_PROGRAMS else f"{program} is not known here")


def _options(words: list[str]) -> list[str]:
    before = words[: words.index("--")] if "--" in words else words
    return [word.partition("=")[0] for word in before if word.startswith("--")]


@functools.cache
def _help_of_torchrun() -> str:
    from torch.distributed.run import get_args_parser

    return get_args_parser().format_help()
