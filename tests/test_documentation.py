"""Laws of the documentation: each link leads to a file and a heading that are there, each page is named in an index, and the
README shows the program whose output it prints."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "benchmarks/*.md", "csrc/*.md")
    for page in ROOT.glob(pattern)
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


def _defined(node: ast.AST, outer: str = "") -> set[str]:
    found: set[str] = set()
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.ClassDef | ast.FunctionDef):
            found |= {outer + each.name} | _defined(each, f"{outer}{each.name}.")
    return found
