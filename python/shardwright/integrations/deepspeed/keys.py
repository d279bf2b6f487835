"""The keys of DeepSpeed's JSON and their translation: keys.md, one table for the reader, the report and the document.

A row is `keys | state | text`. The states:

mapped      the key sets something here; the text says what
no meaning  any value is accepted, and nothing changes; the text says why
refused     a value that switches the feature on is an error; the text names the nearest thing

Inside a mapped section an unknown key is an error. Inside a section of another state any key is accepted.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Key(NamedTuple):
    """One key of DeepSpeed's JSON: its dotted name, its state and the text of its row."""

    name: str
    state: str
    text: str


_TABLE = Path(__file__).with_suffix(".md").read_text(encoding="utf-8").strip()
KEYS: dict[str, Key] = {}
for _row in _TABLE.splitlines()[2:]:
    _names, _state, _text = _row.removeprefix("| ").removesuffix(" |").split(" | ")
    KEYS.update({_name: Key(_name, _state, _text) for _name in _names.replace("`", "").split(", ")})


def key_of(name: str) -> Key | None:
    """Return the row of a dotted name, or of a section that contains it; None for an unknown name."""
    name = "bf16" + name.removeprefix("bfloat16") if name.startswith("bfloat16.") else name
    section = name
    while section:
        key = KEYS.get(section)
        if key is not None and (section == name or key.state != "mapped" or section.endswith("params")):
            return key
        if section == "shardwright":
            return key
        section = section.rpartition(".")[0]
    return None


def nearest(name: str) -> str:
    """Return the known name nearest to an unknown one, preferably of the same section; "" if none is near."""
    section, _, last = name.rpartition(".")
    siblings = {each.rpartition(".")[2]: each for each in KEYS if each.rpartition(".")[0] == section}
    found = difflib.get_close_matches(last, siblings, n=1)
    if found:
        return siblings[found[0]]
    lasts = {each.rpartition(".")[2]: each for each in reversed(KEYS)}
    found = difflib.get_close_matches(last, lasts, n=1, cutoff=0.8)
    return lasts[found[0]] if found else ""


def document() -> str:
    """Return the table in Markdown, as docs/deepspeed.md has it."""
    return _TABLE


def is_harmless(value: Any) -> bool:
    """Return True if a value of a refused key leaves the feature off."""
    if isinstance(value, dict):
        switches = list(_switches(value))
        return not any(switches) if switches else all(map(is_harmless, value.values()))
    return value is not True and value in (None, False, 0, 1, "none", "auto", "")


def _switches(section: dict[str, Any]) -> Iterator[Any]:
    """Yield the values of all keys "enabled" of a section."""
    for name, value in section.items():
        if name == "enabled":
            yield value
        elif isinstance(value, dict):
            yield from _switches(value)
