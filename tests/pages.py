"""The blocks of code of README and docs, and what the page says of them in comments that a reader does not see.

Before a block of Python there may stand, each in a comment of its own:

    <!-- run: CODE -->          Python that runs before the block
    <!-- needs: MODULE -->      the block runs where the module can be imported
    <!-- not run: REASON -->    the block is compiled only

A block of `text` right behind a block of Python is what it prints; a line `...` stands for any lines. Of a diff the new side runs.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
#: pages whose first block of Python is a whole program of several ranks: tests/ranks/test_programs_of_pages_run.py runs it
PROGRAMS = sorted((ROOT / "docs" / "howto").glob("*.md")) + sorted((ROOT / "docs" / "reference").glob("*.md"))
#: other pages for users; a new one is taken without a word here
PAGES = [ROOT / "README.md"] + sorted(
    page
    for page in (ROOT / "docs").rglob("*.md")
    if page.relative_to(ROOT).parts[1] != "design" and page not in PROGRAMS
)
#: languages whose blocks run, are read as commands, or are only shown
PYTHON, SHELL = ("python", "py", "diff"), ("sh", "bash", "shell", "console")
SHOWN = ("", "text", "json", "yaml", "toml", "ini", "dockerfile", "c", "mermaid")

FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!-- (run|needs|not run):\s(.*?)\s*-->\s*", re.DOTALL)


class Block(NamedTuple):
    """A block of code: its page, the line of its fence, its language and text; what comments say; what it should print."""

    page: Path
    line: int
    language: str
    code: str
    before: str
    needs: tuple[str, ...]
    reason: str
    printed: str | None

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    fences = list(FENCE.finditer(text))
    found, end = [], 0
    for fence, following in zip(fences, [*fences[1:], None]):
        said = _comments_before(text[end : fence.start()])
        code = textwrap.dedent(fence[3])
        if fence[2] == "diff":
            code = "".join(line[1:] + "\n" for line in code.splitlines() if not line.startswith("-"))
        shows = following is not None and following[2] == "text" and not text[fence.end() : following.start()].strip()
        printed = textwrap.dedent(following[3]) if shows and following is not None else None
        line = text.count("\n", 0, fence.start()) + 1
        before = "\n".join(textwrap.dedent(each) for kind, each in said if kind == "run")
        needs = tuple(each for kind, each in said if kind == "needs")
        reason = next((each for kind, each in said if kind == "not run"), "")
        found.append(Block(page, line, fence[2], code, before, needs, reason, printed))
        end = fence.end()
    return found


def _comments_before(text: str) -> list[tuple[str, str]]:
    """Return the kind and the body of each comment at the end of a text."""
    found: list[tuple[str, str]] = []
    at = 0
    for match in COMMENT.finditer(text):
        if text[at : match.start()].strip():
            found.clear()
        found.append((match[1], match[2]))
        at = match.end()
    return found if not text[at:].strip() else []


def is_printed(expected: str, printed: str) -> bool:
    """Return True if a program printed what a page shows, in which a line `...` stands for any lines."""
    pattern = "\n".join(
        r"(.*\n)*?.*" if line.strip() == "..." else re.escape(line.rstrip()) for line in expected.splitlines()
    )
    return re.fullmatch(pattern, "\n".join(line.rstrip() for line in printed.splitlines())) is not None


def commands_of(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in a block of a shell, without variables, comments, and what it prints."""
    lines = text.replace("\\\n", " ").splitlines()
    shows_prompts = any(line.startswith("$ ") for line in lines)
    for line in lines:
        if shows_prompts and not line.startswith("$ "):
            continue
        for part in re.split(r"&&|\|(?!\w)|;", re.sub(r"(^|\s)#.*", "", line.removeprefix("$ "))):
            words = shlex.split(re.sub(r"[\[\]<>|]|\d?>\s*\S+", " ", part))
            while words and re.match(r"[A-Z_]+=", words[0]):
                del words[0]
            if words:
                yield words
