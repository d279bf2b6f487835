"""Hooks of mkdocs: pages of the repository outside docs/, links to its files, drawings inside pages, and the order of the design book.

A link to a file outside docs/ leads to its page where the site has one (PAGES), else it becomes the file's path: the site is built
without knowing where the repository is published.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[2]
#: files of the repository -> their pages
PAGES = {
    "examples/README.md": "examples.md",
    "benchmarks/README.md": "benchmarks.md",
    "csrc/README.md": "design/csrc.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_DRAWING = re.compile(r'<img alt="([^"]*)" src="([^"]*?images/[^"]*\.svg)" ?/?>')


def on_config(config: Any) -> Any:
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")  # GitHub's anchors
    _replace_design(config.nav)
    return config


def _replace_design(nav: Any) -> None:
    """Put the pages that docs/design/README.md names, in its order, in the place of the index alone."""
    for entry in nav:
        for title, value in entry.items() if isinstance(entry, dict) else ():
            if value == "design/README.md":
                entry[title] = [value, *design_pages()]
            elif isinstance(value, list):
                _replace_design(value)


def design_pages() -> list[str]:
    index = (ROOT / "docs/design/README.md").read_text(encoding="utf-8")
    named = re.findall(r"\]\(([\w-]+\.md)", index)
    there = sorted(page.name for page in (ROOT / "docs/design").glob("*.md"))
    return [f"design/{name}" for name in dict.fromkeys([*named, *there]) if name in there and name != "README.md"] + [
        "design/csrc.md"
    ]


def on_files(files: Any, config: Any) -> Any:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    here = page.file.src_uri
    source = {to: name for name, to in PAGES.items()}.get(here, f"docs/{here}")
    return "".join(
        part if part.startswith("```") else _LINK.sub(lambda match: _link(match, source, here), part)
        for part in re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    )


def _link(match: re.Match[str], source: str, here: str) -> str:
    text, place, anchor = match[1], match[2], match[3] or ""
    if not place or "://" in place or place.startswith("mailto:"):
        return match[0]
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), place))
    if target.startswith("docs/") and (ROOT / target).is_file():
        page = target.removeprefix("docs/")
    elif target in PAGES:
        page = PAGES[target]
    elif (ROOT / target).exists():
        return text if text.strip("`") in target else f"{text} (`{target}`)"
    else:
        return match[0]  # mkdocs warns
    return f"[{text}]({posixpath.relpath(page, posixpath.dirname(here) or '.')}{anchor})"


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Put drawings into the page, where they take its colours; elsewhere they have their own."""

    def inline(match: re.Match[str]) -> str:
        name = posixpath.basename(match[2])
        drawing = (ROOT / "docs/images" / name).read_text(encoding="utf-8")
        drawing = drawing.replace("<svg ", f'<svg role="img" aria-label="{match[1]}" ', 1)
        return f'<span class="drawing">{drawing}</span>'

    return _DRAWING.sub(inline, html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Take our own shim for search without a server, where the theme names one of another site."""
    here = posixpath.relpath("site/worker.js", posixpath.dirname(page.file.dest_uri) or ".")
    return output.replace("https://unpkg.com/iframe-worker/shim", here)
