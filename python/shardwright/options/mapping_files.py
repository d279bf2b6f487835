"""Files that a user writes: a mapping in JSON, TOML or YAML, known by the ending of its name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any


def read_mapping(path: str | os.PathLike[str], otherwise: str = "JSON") -> dict[str, Any]:
    """Return the mapping in a file, whose form is `otherwise` if its name does not tell. Raise OSError or ValueError."""
    ending = os.path.splitext(path)[1]
    form = {".json": "JSON", ".toml": "TOML", ".yaml": "YAML", ".yml": "YAML"}.get(ending, otherwise)
    with open(path, "rb") as file:
        text = file.read()
    try:
        found = _READERS[form](text.decode("utf-8"))
    except Exception as error:  # each reader has its own
        raise ValueError(f"{os.fspath(path)} is not {form}: {' '.join(str(error).split())}") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{os.fspath(path)} must hold a mapping, got {type(found).__name__}")
    return dict(found)


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_without_repeats)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"the key {twice!r} appears twice in one section")
    return dict(pairs)


def _toml(text: str) -> Any:
    try:
        import tomllib
    except ModuleNotFoundError:
        raise ValueError("this Python has no reader of TOML, which came with 3.11: write JSON") from None
    return tomllib.loads(text)


def _yaml(text: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped, unused-ignore]  # a dependency of accelerate
    except ModuleNotFoundError:
        raise ValueError("its reader PyYAML is not installed: pip install pyyaml") from None
    return yaml.safe_load(text)


_READERS = {"JSON": _json, "TOML": _toml, "YAML": _yaml}
