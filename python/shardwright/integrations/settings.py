"""Options of an integration from outside the program's source: one word, a list of options, or a file.

The text is an argument of the program or the value of SHARDWRIGHT_OPTIONS, which `shardwright run` sets:

    zero2
    zero=3,compress=int8,share_parameters=false
    zero=3,offload={"parameters":"cpu","optimizer":"cpu"}
    options.yaml                                    (or .json: a mapping of the same names)
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

from ..options.compressors import compressor_named
from ..options.mapping_files import read_mapping
from ..options.options import Options

VARIABLE = "SHARDWRIGHT_OPTIONS"
_OWN = ("zero", "compress", "partition")
#: not one inside a value of several parts
_COMMA = re.compile(r",(?![^{]*\})")


def read_settings(text: str) -> dict[str, Any]:
    """Parse a text into arguments of Accelerator. Raise ValueError or TypeError for another form, name or value."""
    found = (
        read_mapping(text) if text.endswith((".yaml", ".yml", ".json")) else dict(map(_read_item, _COMMA.split(text)))
    )
    if "compress" in found:
        found["compress"] = compressor_named("compress", found["compress"])
    Options.from_keywords(found)
    others = {name: value for name, value in found.items() if name not in _OWN}
    return {**{name: found[name] for name in _OWN if name in found}, **({"wrap_options": others} if others else {})}


def _read_item(item: str) -> tuple[str, Any]:
    stage = re.fullmatch(r"zero(\d{1,9})", item.strip())
    if stage:
        return "zero", int(stage[1])
    name, equals, value = (part.strip() for part in item.partition("="))
    if not equals or not name:
        raise ValueError(f"options must be 'zero2', 'name=value,...' or a file .yaml or .json, got {item!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def of_variable() -> dict[str, Any]:
    """Return what the variable's text gives; nothing without one."""
    text = os.environ.get(VARIABLE)
    return read_settings(text) if text else {}


def chosen(text: str, zero: int | None, **given: Any) -> dict[str, Any]:
    """Return the arguments of Accelerator: those given or, if no stage is given, those of a text or the variable."""
    found = {} if zero is not None else read_settings(text) if text else of_variable()
    asked = {name: value for name, value in given.items() if value not in (None, "auto")}
    return {**given, "zero": 0 if zero is None else zero, **found, **asked}
