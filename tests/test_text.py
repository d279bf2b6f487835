"""Rules of the text, checked over docstrings, comments and documents: docs/glossary.md fixes the words, this file counts.

A docstring opens with a verb or a noun phrase, a sentence has at most 40 words, a line of a document fits the limit, and
words that the glossary bans do not occur. A rule that needs judgement is left to the reader. Files that are not rewritten
yet stand in STILL_TO_DO, which shrinks to nothing.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "python/shardwright"
PACKAGES = (PACKAGE, "python/shardwright_tools")
C_FOLDERS = ("csrc", "csrc_check")
FOLDERS = (*PACKAGES, *C_FOLDERS, "docs")

#: paths, or folders with a slash behind them, that are not rewritten yet
STILL_TO_DO: tuple[str, ...] = ()

#: openings of a docstring that make it a fragment
FRAGMENTS = frozenset(
    "of what whatever whether who whoever whom whose where wherever how why which as if when while since because so not "
    "in into from with without by at on for to".split()
)
FRAGMENT_SHARE_MAX = 0.03
WORDS_MAX = 40
LONG_SENTENCES_MAX = 0
LINE_MAX = 140

#: words of the glossary's "do not write" that are wrong in every sense; a rank or thread is "it" or "which"
BANNED = re.compile(
    r"\b(who|whom|whoever|nobody|everybody|everyone|somebody|someone|anybody|anyone)\b(?!['’]s name)"
    r"|\b(second transport|messenger|pool of memory|last word|sum up)\b",
    re.IGNORECASE,
)
#: identifiers, in which words are joined by underscores or capitals; the kernel's own constant is exempt
BANNED_NAME = re.compile(
    r"\b(?!IOPRIO_WHO_PROCESS\b)\w*?(?:nobody|everybody|somebody|whoever|everyone|(?:\b|_)who(?:_|\b)|(?:\b|_)whats\b)\w*\b",
    re.IGNORECASE,
)

C_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|(/\*.*?\*/|//[^\n]*)', re.DOTALL)
SENTENCE_END = re.compile(r"(?<=[.!?])[)\"'”`*]*\s+(?=[A-Z`\"'(*\d])")
WORD = re.compile(r"[A-Za-z0-9]")


class Text(NamedTuple):
    """A docstring, a comment or a paragraph of a document."""

    path: str
    line: int
    kind: str
    body: str

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}"


def files(root: Path, *endings: str, under: tuple[str, ...] = FOLDERS) -> list[Path]:
    found = (path for folder in under for path in (root / folder).rglob("*") if path.suffix in endings)
    return sorted(path for path in found if not is_still_to_do(str(path.relative_to(root))))


def is_still_to_do(path: str) -> bool:
    return any(path == entry or entry.endswith("/") and path.startswith(entry) for entry in STILL_TO_DO)


def docstrings(path: str, source: str) -> Iterator[Text]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            body = ast.get_docstring(node)
            if body:
                yield Text(path, node.body[0].lineno, "docstring", body)


def python_comments(path: str, source: str) -> Iterator[Text]:
    """Comments on consecutive lines are one text."""
    open_text: Text | None = None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"#\s*(noqa|type:|fmt:|!)", token.string):
            continue
        body, line = token.string.lstrip("#: ").rstrip("- "), token.start[0]
        is_own_line = not token.line[: token.start[1]].strip()
        if open_text and is_own_line and line == open_text.line + open_text.body.count("\n") + 1:
            open_text = open_text._replace(body=f"{open_text.body}\n{body}")
            continue
        if open_text:
            yield open_text
        open_text = Text(path, line, "comment", body)
    if open_text:
        yield open_text


def c_comments(path: str, source: str) -> Iterator[Text]:
    for match in C_COMMENT.finditer(source):
        if match[1]:
            lines = match[1].removeprefix("//").removeprefix("/*").removesuffix("*/").split("\n")
            body = "\n".join(re.sub(r"^\s*\* ?", "", line) for line in lines)
            yield Text(path, source.count("\n", 0, match.start()) + 1, "comment", body.strip(" "))


def paragraphs(path: str, source: str) -> Iterator[Text]:
    """Paragraphs and list items of a document, without tables, headings and code."""
    lines: list[str] = []
    start, is_code = 1, False

    def flush() -> Iterator[Text]:
        if lines:
            yield Text(path, start, "document", "\n".join(lines))
        lines.clear()

    for number, line in enumerate(source.split("\n"), 1):
        if line.startswith("```"):
            is_code = not is_code
        is_item = re.match(r"\s*([-*]|\d+\.)\s", line) is not None
        is_plain_code = line.startswith("    ") and not lines
        if is_code or is_plain_code or not line.strip() or line.startswith(("```", "|", "#")) or is_item:
            yield from flush()
        if is_code or is_plain_code or not line.strip() or line.startswith(("```", "|", "#")):
            continue
        if not lines:
            start = number
        lines.append(re.sub(r"^\s*([-*]|\d+\.)\s", "", line))
    yield from flush()


def sentences(text: Text) -> Iterator[str]:
    """Sentences of a text. Blank lines, other indentation, headings, tables and examples end one, too.

    Lines with `plain` or more blanks in front are code or formulas.
    """
    block: list[str] = []
    indent, plain = "", 5 if text.kind == "docstring" else 4

    def flush() -> Iterator[str]:
        joined = " ".join(block).strip()
        block.clear()
        yield from (each for each in SENTENCE_END.split(joined) if each)

    for line in text.body.split("\n"):
        here = line[: len(line) - len(line.lstrip())]
        is_break = (
            not line.strip() or re.match(r"\s*(-{3,}|=|>>>|\.\. |[-*] |\||[A-Z]\d )|.*\S {2,}\S", line) is not None
        )
        if is_break or here != indent:
            yield from flush()
        indent = here
        if line.strip() and len(here) < plain and not re.match(r"\s*(-{3,}|>>>|\||#)", line):
            block.append(line.strip())
    yield from flush()


def words_of(sentence: str) -> int:
    return sum(WORD.search(word) is not None for word in re.sub(r"`[^`]*`", "code", sentence).split())


def texts_of_code(root: Path) -> list[Text]:
    found: list[Text] = []
    for path in files(root, ".py", under=PACKAGES):
        source, name = path.read_text(encoding="utf-8"), str(path.relative_to(root))
        found += [*docstrings(name, source), *python_comments(name, source)]
    for path in files(root, ".c", ".h", ".cu", ".cuh", under=C_FOLDERS):
        found += c_comments(str(path.relative_to(root)), path.read_text(encoding="utf-8"))
    return found


def texts_of_documents(root: Path) -> list[Text]:
    documents = files(root, ".md", under=("docs", "csrc"))
    return [
        text
        for path in documents
        if path.name != "glossary.md"
        for text in paragraphs(str(path.relative_to(root)), path.read_text(encoding="utf-8"))
    ]


def is_fragment(docstring: str) -> bool:
    first = re.match(r"\W*([A-Za-z]+)", docstring)
    return first is not None and first[1].lower() in FRAGMENTS


def long_sentences(texts: list[Text]) -> list[str]:
    return [
        f"{text.place}: {count} words: {sentence[:80]}..."
        for text in texts
        for sentence in sentences(text)
        if (count := words_of(sentence)) > WORDS_MAX
    ]


def banned_words(texts: list[Text]) -> list[str]:
    return [f"{text.place}: {match[0]!r}" for text in texts for match in BANNED.finditer(text.body)]


def banned_names(root: Path) -> list[str]:
    """Identifiers of code outside of comments and strings."""
    found = []
    for path in files(root, ".py", under=PACKAGES):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            if token.type == tokenize.NAME and BANNED_NAME.fullmatch(token.string):
                found.append(f"{path.relative_to(root)}:{token.start[0]}: {token.string}")
    for path in files(root, ".c", ".h", ".cu", ".cuh", under=C_FOLDERS):
        code = C_COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), path.read_text(encoding="utf-8"))
        found += [
            f"{path.relative_to(root)}:{code.count(chr(10), 0, match.start()) + 1}: {match[0]}"
            for match in BANNED_NAME.finditer(code)
        ]
    return found


def long_lines(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}:{number}: {len(line)} characters"
        for path in files(root, ".md", under=("docs",))
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
        if len(line) > LINE_MAX and not line.startswith("|")
    ]


@pytest.fixture(scope="module")
def code() -> list[Text]:
    return texts_of_code(ROOT)


@pytest.fixture(scope="module")
def documents() -> list[Text]:
    return texts_of_documents(ROOT)


def test_docstrings_open_with_a_verb_or_a_noun_phrase(code: list[Text]) -> None:
    found = [text for text in code if text.kind == "docstring"]
    fragments = [f"{text.place}: {text.body[:60]!r}" for text in found if is_fragment(text.body)]
    assert len(found) > 100
    assert len(fragments) < FRAGMENT_SHARE_MAX * len(found), fragments


def test_headings_of_docstrings_stand_on_lines_of_their_own(code: list[Text]) -> None:
    found = [text for text in code if text.kind == "docstring"]
    joined = [text.place for text in found if re.search(r"[^\n-] *-{4,} *[^\n -]|>>> .*>>> ", text.body)]
    assert joined == []


def test_sentences_are_short(code: list[Text], documents: list[Text]) -> None:
    found = long_sentences([*code, *documents])
    assert len(found) <= LONG_SENTENCES_MAX, found


def test_lines_of_documents_fit_the_limit() -> None:
    assert long_lines(ROOT) == []


def test_banned_words_do_not_occur(code: list[Text], documents: list[Text]) -> None:
    assert banned_words([*code, *documents]) == []


def test_banned_words_are_in_no_identifier() -> None:
    assert banned_names(ROOT) == []


def test_every_entry_still_to_do_exists() -> None:
    missing = [entry for entry in STILL_TO_DO if not (ROOT / entry).exists()]
    assert missing == [], "remove them from STILL_TO_DO, or rename them there"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("Whether it is there.", True),
        ("Of one rank.", True),
        ("Return the sum.", False),
        ("A bucket of gradients.", False),
        ("`call()`, with hooks.", False),
    ],
)
def test_a_fragment_is_told_from_a_sentence(body: str, expected: bool) -> None:
    assert is_fragment(body) is expected


def test_a_planted_long_sentence_is_caught_in_each_kind_of_text(tmp_path: Path) -> None:
    words = " ".join(["word"] * 30)
    (tmp_path / PACKAGE).mkdir(parents=True)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / PACKAGE / "planted.py").write_text(
        f'"""Words.\n\n{words}\n{words}.\n"""\n# {words}\n# {words}\nx = 1\n'
    )
    (tmp_path / "csrc" / "planted.c").write_text(f"/* {words}\n * {words}. Short.\n *\n * {words} */\n")
    (tmp_path / "docs" / "planted.md").write_text(
        f"# Title\n\n{words}\n{words}.\n\n| {words} {words} |\n\n- {words}\n- {words}\n"
    )
    found = long_sentences([*texts_of_code(tmp_path), *texts_of_documents(tmp_path)])
    assert [line.split(":")[0] for line in found] == [f"{PACKAGE}/planted.py"] * 2 + [
        "csrc/planted.c",
        "docs/planted.md",
    ]


def test_planted_words_names_and_lines_are_caught(tmp_path: Path) -> None:
    (tmp_path / PACKAGE).mkdir(parents=True)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / PACKAGE / "planted.py").write_text(
        'x = "nobody reads this"  # nobody does\nis_everybodys = who_is_told = whose = 1\n'
    )
    (tmp_path / "csrc" / "planted.c").write_text('/* Whoever comes. */\nint whats; const char *s = "who";\n')
    (tmp_path / "docs" / "planted.md").write_text("Somebody waits.\n" + "x " * 80 + "\n| " + "x " * 80 + "|\n")
    texts = [*texts_of_code(tmp_path), *texts_of_documents(tmp_path)]
    assert [line.split(": ")[1] for line in banned_words(texts)] == ["'nobody'", "'Whoever'", "'Somebody'"]
    assert [line.split(": ")[1] for line in banned_names(tmp_path)] == ["is_everybodys", "who_is_told", "whats"]
    assert long_lines(tmp_path) == ["docs/planted.md:2: 160 characters"]
