"""Laws of the documentation site: the navigation names each page, the reference each public name and option, drawings and the
page of the command line are what their programs make, quoted messages exist, and the built site has no broken link and fetches
nothing."""

import dataclasses
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import shardwright

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MODULES = ["optim", "checkpoint", "elastic", "hooks"]


def tool(name):
    spec = importlib.util.spec_from_file_location(f"site_{name}", DOCS / "site" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_navigation_names_each_page_once():
    named = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1])
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if page.parent.name != "design"}
    assert sorted(named) == sorted({*pages, "design/README.md", *OUTSIDE.values()} - {OUTSIDE["csrc/README.md"]})


#: pages of the site that lie outside of docs/, as in docs/site/hooks.py
OUTSIDE = dict(re.findall(r'"([\w/.]+\.md)": "([\w/.]+\.md)"', (DOCS / "site" / "hooks.py").read_text()))


def test_pages_outside_of_docs_exist():
    assert len(OUTSIDE) >= 6
    assert [name for name in OUTSIDE if not (ROOT / name).exists()] == []


def test_the_reference_has_each_public_name():
    found = set(
        re.findall(r"^::: (\S+)$", "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md")), re.M)
    )
    own = {*shardwright.__all__} - {*MODULES, "deepspeed", "__version__"}
    expected = {f"shardwright.{name}" for name in own}
    for module in MODULES:
        names = importlib.import_module(f"shardwright.{module}").__all__
        expected |= {f"shardwright.{module}.{name}" for name in names if name not in own}
    assert expected - found == set()


def test_each_option_has_an_example():
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", (DOCS / "reference" / "options.md").read_text(), re.M)
    names = {name for name, _ in rows}
    assert {field.name for field in dataclasses.fields(shardwright.Options)} - names == set()
    examples = (DOCS / "reference" / "options.md").read_text()
    assert [name for name in names if f"{name}=" not in examples] == []


def test_drawings_are_those_of_their_program():
    made = tool("draw").drawings()
    there = {file.name: file.read_text() for file in (DOCS / "images").glob("*.svg") if file.name != "favicon.svg"}
    assert there == made, "python docs/site/draw.py"


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="argparse prints help in other words in other versions")
def test_the_page_of_the_command_line_is_what_commands_print():
    assert (DOCS / "reference" / "command-line.md").read_text() == tool("command_line").page()


def test_each_quoted_message_is_in_the_source():
    source = "\n".join(
        file.read_text()
        for name in ("python", "csrc")
        for ending in ("py", "c", "h")
        for file in (ROOT / name).rglob(f"*.{ending}")
    )
    source = re.sub(r'"\s*f?"', "", source)  # adjacent literals are one
    rows = re.findall(r"^\| `(.*?)` \|", (DOCS / "messages.md").read_text(), re.M)
    assert len(rows) > 40
    pieces = [piece.strip() for row in rows for piece in re.split(r"<.*?>", row) if len(piece.strip()) > 3]
    assert [piece for piece in pieces if piece not in source] == []


def test_the_check_of_links_finds_what_is_broken(tmp_path):
    links = tool("links")
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here">x</a><a href="b.html#no">x</a><a href="no.html">x</a><a href="https://x.org/">x</a>'
        '<a href="https://">x</a><script src="https://x.org/a.js"></script><img src="data:,">'
    )
    (tmp_path / "b.html").write_text('<h2 id="here">x</h2><a href="#here">x</a><a href="#gone">x</a>')
    assert sorted(links.broken(tmp_path)) == [
        "a.html: b.html#no",
        "a.html: https://",
        "a.html: https://x.org/a.js",
        "a.html: no.html",
        "b.html: #gone",
    ]


@pytest.mark.timeout(900)
def test_the_site_builds_without_warnings_and_broken_links(tmp_path):
    mkdocs = ROOT / ".venv-docs" / "bin" / "mkdocs"
    if not mkdocs.exists():
        pytest.skip("make docs has not been run: requirements/docs.txt is not installed")
    site = tmp_path / "site"
    done = subprocess.run(
        [str(mkdocs), "build", "--site-dir", str(site)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert tool("links").broken(site) == []
