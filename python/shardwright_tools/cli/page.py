"""`shardwright report FOLDER`: one HTML page of a run, without network. Its plots are SVG of matplotlib."""

from __future__ import annotations

import argparse
import glob
import html
import io
import json
import os
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.observe import verdict
from shardwright.observe.rings import PHASES, AccountError, AccountFile, Head, Row

from .report import Nothing, guarded, show, size_text

EPILOG = """The folder is that of SHARDWRIGHT_RUN_FOLDER. The page shows what it finds there: accounts, JSON lines of sw.metrics
with `step` (and `loss`, by Metrics.add), plan.json of `shardwright plan --json`, and checkpoints.

Exit codes: 0 the page is written, 1 it cannot be written, 2 there is no such run, or matplotlib is missing."""
#: series are coloured in this order; matplotlib draws with these names of colours, and the page's style has the real ones
_MARKS = {f"#0{n}0{n}0{n}": f"var(--c{n})" for n in range(1, 9)} | {"#0a0a0a": "var(--ink)", "#0b0b0b": "var(--line)"}
_INK, _LINE = "#0a0a0a", "#0b0b0b"
_POINTS = 400
_STYLE = """
:root { color-scheme: light dark; --back: #fff; --card: #f6f7f9; --ink: #1d2330; --soft: #5b6472; --line: #cdd3dc;
  --c1: #2563a8; --c2: #b45309; --c3: #15803d; --c4: #9d3a7f; --c5: #6b5bd2; --c6: #0f7f86; --c7: #a83232; --c8: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --back: #14171d; --card: #1d222b; --ink: #e6e9ef; --soft: #a3acba; --line: #3c4452;
  --c1: #6aa9f0; --c2: #f0a24a; --c3: #5fc583; --c4: #e07fc0; --c5: #a99cf5; --c6: #4fc6cd; --c7: #f08080; --c8: #9aa3b2; } }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: .5rem 0; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 0 0 .5rem; }
p { margin: .3rem 0; } h1 + p { margin-bottom: 1rem; }
.keys { font-size: .85rem; } .keys span { white-space: nowrap; margin-right: .8rem; }
.keys i { display: inline-block; width: .75em; height: .75em; border-radius: .2em; margin-right: .35em; } .soft { color: var(--soft); }
main { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
section { background: var(--card); border-radius: .6rem; padding: 1rem; min-width: 0; overflow-x: auto; }
svg { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--line); }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
"""


class RankOfRun(NamedTuple):
    """A rank's account at its end."""

    head: Head
    rows: list[Row]


class Run(NamedTuple):
    """The contents of a run's folder."""

    folder: Path
    lines: list[dict[str, Any]]
    ranks: list[RankOfRun]
    plan: dict[str, Any] | None
    checkpoints: list[tuple[str, int, float]]
    notes: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="of a run")
    parser.add_argument("-o", "--output", metavar="FILE", help="(default: FOLDER/report.html)")


@guarded
def run(options: argparse.Namespace) -> int:
    found = read_run(Path(options.folder))
    path = Path(options.output) if options.output else found.folder / "report.html"
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise Nothing('shardwright report needs matplotlib (pip install "shardwright[observe]")') from None
    path.write_text(page_of(found), encoding="utf-8")
    show(f"{path}: {len(found.ranks)} ranks, {len(found.lines)} lines of metrics, {len(found.checkpoints)} checkpoints")
    return 0


# ---------------------------------------------------------------- reading


def read_run(folder: Path) -> Run:
    """Read a run's folder. Nothing, with a sentence, if there is none, or it has nothing of a run."""
    if not folder.is_dir():
        raise Nothing(f"there is no run {str(folder)!r}: pass the folder that SHARDWRIGHT_RUN_FOLDER named")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise Nothing(f"{folder} belongs to another user and cannot be read: run shardwright report as that user")
    notes: list[str] = []
    lines = sorted(_lines(folder, notes), key=lambda each: each.get("time", 0.0))
    ranks, found = accounts_of(folder)
    notes += found
    plan = _plan(folder, notes)
    saved = _checkpoints(folder)
    if not (lines or ranks or saved):
        raise Nothing(
            ". ".join(
                [f"{folder} has no account of a rank, no metrics and no checkpoint: it is no run's folder", *notes]
            )
        )
    return Run(folder, lines, ranks, plan, saved, notes)


def _lines(folder: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.jsonl")):
        bad = 0
        try:
            text = path.read_text(errors="replace")
        except OSError as error:
            notes.append(f"{path.name} cannot be read: {error.strerror}")
            continue
        for line in text.splitlines():
            try:
                each = json.loads(line)
            except (ValueError, RecursionError):
                each = None
            numbers = [each.get("step"), each.get("time", 0)] if isinstance(each, dict) else [None]
            if all(isinstance(value, int | float) and abs(value) < 1e15 for value in numbers):
                yield {k: v for k, v in each.items() if not isinstance(v, int | float) or abs(v) < 1e30}
            else:
                bad += 1
        if bad:
            notes.append(f"{path.name} has {bad} lines that are no metrics of a step")


def accounts_of(folder: Path) -> tuple[list[RankOfRun], list[str]]:
    """Return the newest account of each rank that is in a run's folder, also of those that ended in order; and what cannot be read."""
    found: dict[int, RankOfRun] = {}
    notes: list[str] = []
    for path in [*folder.glob("account/*/rank-*"), *folder.glob("ended/rank-*")]:
        if path.suffix == ".stacks":
            continue
        try:
            file = AccountFile(path)
        except PermissionError:
            notes.append(f"{path} belongs to another user")
            continue
        except FileNotFoundError:  # it has ended meanwhile
            continue
        except (AccountError, OSError) as error:
            notes.append(str(error))
            continue
        each = RankOfRun(file.head(), file.rows(10_000))
        file.close()
        if each.head.rank not in found or found[each.head.rank].head.unix_ns < each.head.unix_ns:
            found[each.head.rank] = each
    newest = max((each.head for each in found.values()), key=lambda head: head.unix_ns, default=None)
    of_run = [rank for rank in sorted(found) if newest is not None and found[rank].head.world_size == newest.world_size]
    return [found[rank] for rank in of_run], notes


def _plan(folder: Path, notes: list[str]) -> dict[str, Any] | None:
    path = folder / "plan.json"
    if not path.exists():
        return None
    try:
        plan = json.loads(path.read_text())
        seconds = plan["seconds_per_step"] or {}
        return {
            "seconds": float(sum(seconds.get(each, 0) for each in ("compute", "exposed"))),
            "tokens": float(plan["tokens_per_step"]),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        notes.append("plan.json is no output of shardwright plan --json")
        return None


def _checkpoints(folder: Path) -> list[tuple[str, int, float]]:
    found = []
    for depth in ("", "*/", "*/*/"):
        for path in glob.glob(f"{glob.escape(str(folder))}/{depth}MANIFEST.json"):
            place = Path(path).parent
            size = sum(each.stat().st_size for each in place.rglob("*") if each.is_file())
            found.append((str(place.relative_to(folder)), size, os.stat(path).st_mtime))
    return sorted(found, key=lambda each: each[2])


# ---------------------------------------------------------------- plots


def _svg(draw: Callable[[Any], None], label: str) -> str:
    """Return a plot as SVG whose colours are variables of the page's style."""
    import matplotlib

    with matplotlib.rc_context(
        {"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10, "svg.hashsalt": label}
    ):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.2, 2.5), layout="constrained")
        figure.patch.set_alpha(0)
        axes: Any = figure.add_subplot()
        axes.patch.set_alpha(0)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(_LINE)
        axes.tick_params(colors=_INK, color=_LINE)
        axes.grid(axis="y", color=_LINE, linewidth=0.5)
        axes.set_axisbelow(True)
        axes.xaxis.get_major_locator().set_params(integer=True)
        draw(axes)
        for text in (axes.xaxis.label, axes.yaxis.label):
            text.set_color(_INK)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1
    )
    for mark, colour in _MARKS.items():
        svg = svg.replace(mark, colour)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)


def _colour(number: int) -> str:
    return f"#0{number % 8 + 1}" + f"0{number % 8 + 1}" * 2


def _thinned(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return at most _POINTS points: medians of equal parts."""
    size = -(-len(xs) // _POINTS)
    parts = [slice(at, at + size) for at in range(0, len(xs), size or 1)]
    return [statistics.median(xs[each]) for each in parts], [statistics.median(ys[each]) for each in parts]


def _line_plot(series: Mapping[str, tuple[Sequence[float], Sequence[float]]], y: str, label: str) -> str:
    def draw(axes: Any) -> None:
        for number, (name, (xs, ys)) in enumerate(series.items()):
            axes.plot(
                *_thinned(xs, ys), color=_colour(number), linewidth=1.6, label=name, marker="o" if len(xs) < 3 else None
            )
        if y != "loss":
            axes.set_ylim(bottom=0)
        axes.set_xlabel("step")
        axes.set_ylabel(y)

    return _svg(draw, label)


def _bars(names: Sequence[str], values: Sequence[float], x: str, y: str, label: str) -> str:
    def draw(axes: Any) -> None:
        axes.bar(names, values, color=_colour(0), width=0.7)
        axes.set_xlim(-0.6, max(len(names), 8) - 0.4)
        axes.set_xlabel(x)
        axes.set_ylabel(y)

    return _svg(draw, label)


def _legend(names: Sequence[str]) -> str:
    keys = (
        f'<span><i style="background: var(--c{n})"></i>{html.escape(name)}</span>' for n, name in enumerate(names, 1)
    )
    return f'<p class="keys">{"".join(keys)}</p>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        made = (f"<{tag}{' class=n' if n in numbers else ''}>{html.escape(c)}</{tag}>" for n, c in enumerate(cells))
        return f"<tr>{''.join(made)}</tr>"

    return f"<table>{row(heads, 'th')}{''.join(row(each, 'td') for each in rows)}</table>"


# ---------------------------------------------------------------- the page


def page_of(run: Run) -> str:
    """Return the page: each section has a plot or table, or says what would give it."""
    title = f"Run {run.folder.resolve().name}"
    parts = (_loss, _throughput, _step_time, _stragglers, _waits, _plan_and_truth, _saves, _faults)
    made = "".join(f"<section><h2>{name}</h2>{body}</section>" for name, body in (part(run) for part in parts))
    notes = "".join(f'<p class="soft">{html.escape(each)}</p>' for each in run.notes)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, '
        f'initial-scale=1"><title>{html.escape(title)}</title><style>{_STYLE}</style></head><body><h1>{html.escape(title)}'
        f"</h1><p>{html.escape(_summary(run))}</p>{notes}<main>{made}</main></body></html>\n"
    )


def _soft(text: str) -> str:
    return f'<p class="soft">{html.escape(text)}</p>'


def _summary(run: Run) -> str:
    rows = run.ranks[0].rows if run.ranks else []
    if not rows:
        return f"{len(run.lines)} lines of metrics; no account of a rank"
    world = run.ranks[0].head.world_size
    tokens = next((each["tokens_per_s"] for each in reversed(run.lines) if "tokens_per_s" in each), None)
    return f"{len(run.ranks)} of {world} ranks. Rank {run.ranks[0].head.rank}: {verdict.line(rows[-100:], tokens, None, None)}"


def _series(run: Run, names: Sequence[str]) -> tuple[list[float], list[float]]:
    found = [
        (each["step"], each[name]) for each in run.lines for name in names if isinstance(each.get(name), int | float)
    ]
    return [float(step) for step, _ in found], [float(value) for _, value in found]


def _loss(run: Run) -> tuple[str, str]:
    xs, ys = _series(run, ("loss", "train_loss", "train/loss"))
    hint = "No line of metrics has a loss: call add(loss=...) of the handle that sw.metrics returns."
    return "Loss", _line_plot({"loss": (xs, ys)}, "loss", "Loss by step") if xs else _soft(hint)


def _throughput(run: Run) -> tuple[str, str]:
    xs, ys = _series(run, ("tokens_per_s",))
    if xs:
        return "Throughput", _line_plot({"tokens/s": (xs, ys)}, "tokens/s", "Tokens per second by step")
    rows = [row for row in run.ranks[0].rows if row.total_ns > 0] if run.ranks else []
    if not rows:
        return "Throughput", _soft("No metrics and no account: give sw.metrics to=['jsonl:FOLDER/metrics.jsonl'].")
    rate = {"steps/s": ([row.step for row in rows], [1e9 / row.total_ns for row in rows])}
    return "Throughput", _line_plot(rate, "steps/s", "Steps per second by step")


def _step_time(run: Run) -> tuple[str, str]:
    rows = run.ranks[0].rows if run.ranks else []
    if not rows:
        return "Step time", _soft("No account of a rank is in the folder.")

    def draw(axes: Any) -> None:
        xs = [float(row.step) for row in rows]
        parts = [_thinned(xs, [max(row.phases[n] - row.waits[n], 0) / 1e6 for row in rows]) for n in range(len(PHASES))]
        parts.append(_thinned(xs, [min(sum(row.waits), row.total_ns) / 1e6 for row in rows]))
        axes.stackplot(
            parts[0][0], *(each for _, each in parts), colors=list(map(_colour, range(len(parts)))), linewidth=0
        )
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step")
        axes.set_ylabel("ms")

    return f"Step time of rank {run.ranks[0].head.rank}", _legend([*PHASES, "waits"]) + _svg(
        draw, "Step time by phase, stacked"
    )


def _stragglers(run: Run) -> tuple[str, str]:
    ranks = [each for each in run.ranks if each.rows]
    if len(ranks) < 2:
        return "Stragglers", _soft("Accounts of two ranks or more show who is slow; the folder has fewer.")
    own = {each.head.rank: {row.step: row.own_ns for row in each.rows} for each in ranks}
    steps = sorted(set.intersection(*(set(each) for each in own.values())))
    slow = verdict.slow_ranks({rank: [each[step] for step in steps] for rank, each in own.items()})
    named = [
        f"Rank {rank}: {ratio:.2f} times the others' own time, in {often} of the last steps."
        for rank, (ratio, often) in slow.items()
    ]
    text = "".join(f"<p>{each}</p>" for each in named) or _soft("No rank was slow in the last 40 steps.")
    shown = ranks[:64]
    means = [statistics.median(row.own_ns for row in each.rows) / 1e6 for each in shown]
    names = [str(each.head.rank) for each in shown]
    return "Stragglers", text + _bars(names, means, "rank", "own ms a step", "Own time by rank")


def _waits(run: Run) -> tuple[str, str]:
    causes: dict[int, int] = {}
    for each in run.ranks:
        for row in each.rows:
            if row.late_rank >= 0:
                causes[row.late_rank] = causes.get(row.late_rank, 0) + row.late_ns
    if not causes:
        return "Waits by cause", _soft("No rank has waited for another one.")
    order = sorted(causes, key=lambda rank: -causes[rank])[:16]
    total = sum(causes.values())
    rows = [(f"rank {rank}", f"{causes[rank] / 1e9:.2f} s", f"{100 * causes[rank] / total:.0f} %") for rank in order]
    return "Waits by cause", _soft(
        "Each step's longest wait, by the rank that came last, over all ranks here."
    ) + _table(("waited for", "seconds", "share"), rows, (1, 2))


def _plan_and_truth(run: Run) -> tuple[str, str]:
    name = "Plan beside truth"
    if run.plan is None:
        return name, _soft("No plan.json is in the folder: shardwright plan ... --json > FOLDER/plan.json writes one.")
    rows = []
    steps = run.ranks[0].rows if run.ranks else []
    planned, tokens = run.plan["seconds"], run.plan["tokens"]
    if planned > 0 and steps:
        true_s = statistics.median(row.total_ns for row in steps) * 1e-9
        rows.append(
            ("step", f"{planned * 1e3:.3g} ms", f"{true_s * 1e3:.3g} ms", f"{100 * (true_s / planned - 1):+.0f} %")
        )
    rates = _series(run, ("tokens_per_s",))[1]
    if planned > 0 and tokens and rates:
        rate, true = tokens / planned, statistics.median(rates)
        rows.append(("tokens/s", f"{rate:,.0f}", f"{true:,.0f}", f"{100 * (true / rate - 1):+.0f} %"))
    if not rows:
        return name, _soft("plan.json and this folder have no number in common: a plan has times with --gpu or --peak.")
    return name, _table(("", "planned", "measured", "difference"), rows, (1, 2, 3))


def _saves(run: Run) -> tuple[str, str]:
    if not run.checkpoints:
        return "Checkpoints", _soft("No checkpoint lies in the folder.")
    first = min([each[2] for each in run.checkpoints] + [each["time"] for each in run.lines if "time" in each])
    rows = [(name, size_text(size), f"{time_s - first:+,.1f} s") for name, size, time_s in run.checkpoints[-20:]]
    spent = sum(row.phases[-1] for each in run.ranks[:1] for row in each.rows) * 1e-9
    return "Checkpoints", _table(("checkpoint", "size", "since begin"), rows, (1, 2)) + _soft(
        f"Steps spent {spent:.2f} s in saves."
    )


def _faults(run: Run) -> tuple[str, str]:
    rows = []
    lines = [each for each in run.lines if "step_s" in each]
    for before, after in zip(lines, lines[1:]):
        if after["step"] <= before["step"]:
            lost = after.get("time", 0.0) - before.get("time", 0.0)
            rows.append(("restart", f"after step {before['step']}: {lost:.1f} s until the next line of metrics"))
    for each in run.ranks:
        name = f"rank {each.head.rank}"
        if each.head.reason:
            rows.append((name, each.head.reason))
        elif not each.head.ended:
            rows.append((name, f"runs, or was killed, at step {each.head.steps}: its account has not ended"))
    return "Faults", _table(("", ""), rows) if rows else _soft("No restart and no error.")
