"""Rows, and the report made from them.

A row is one finding: part, case, status, value, unit, goal, note. Statuses:

    ok       as expected
    wrong    bits, a count or a message differ from what was expected
    slow     a goal was missed
    skipped  the machine has no GPU, or a tool is not installed; the note says which
    failed   the process ended with an error; the note quotes it
    cut      the part's time limit passed first
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
REPORT = "gpu-report.json"
BAD = ("wrong", "failed", "cut")
_COLUMNS = ("part", "case", "status", "value", "unit", "goal", "note")
_NOTE = 300


def row(
    case: str, status: str = "ok", value: float | None = None, unit: str = "", goal: float | None = None, note: str = ""
) -> Row:
    """Return one finding of a body. The runner adds the part's name."""
    return {"case": case, "status": status, "value": value, "unit": unit, "goal": goal, "note": note[:_NOTE]}


def least(case: str, value: float, unit: str, goal: float, note: str = "") -> Row:
    return row(case, "ok" if value >= goal else "slow", value, unit, goal, note)


def _cells(found: Row) -> list[str]:
    value, goal = found["value"], found["goal"]
    shown = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    aim = "" if goal is None else f"{goal:.4g}"
    return [found["part"], found["case"], found["status"], shown, found["unit"], aim, found["note"]]


def table(rows: Iterable[Row]) -> str:
    cells = [list(_COLUMNS), *map(_cells, rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_COLUMNS) - 1)]
    padded = ([*(cell.ljust(width) for cell, width in zip(line, widths)), line[-1]] for line in cells)
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _page(title: str, rows: Sequence[Row]) -> str:
    def line(cells: Iterable[str], tag: str, kind: str = "") -> str:
        inside = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
        return f'<tr class="{kind}">{inside}</tr>'

    body = "\n".join([line(_COLUMNS, "th"), *(line(_cells(each), "td", each["status"]) for each in rows)])
    style = (
        "body{font-family:sans-serif}td,th{padding:2px 8px;text-align:left}"
        ".wrong,.failed,.cut{background:#fbb}.slow{background:#fe9}.skipped{color:#777}"
    )
    return (
        f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{style}</style>"
        f"<h1>{html.escape(title)}</h1><table>\n{body}\n</table>\n"
    )


def write(folder: Path, about: dict[str, Any], rows: Sequence[Row]) -> None:
    """Replace gpu-report.json and gpu-report.html atomically, so that a reader always finds a complete file."""
    texts = {
        REPORT: json.dumps({**about, "rows": list(rows)}, indent=1) + "\n",
        "gpu-report.html": _page(f"GPU check, {about['begun']}", rows),
    }
    for name, text in texts.items():
        made = folder / (name + ".new")
        made.write_text(text)
        os.replace(made, folder / name)
