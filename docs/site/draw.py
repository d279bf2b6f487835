"""Draw the pictures of the documentation, docs/images/*.svg: those of architecture.md, and the plots of performance.md.

python docs/site/draw.py

Needs Python alone. Colours are CSS variables with a value of their own, so a drawing follows the scheme of the page that it stands in
and can be read by itself. tests/test_site.py compares the files with what this program draws.
"""

from __future__ import annotations

import json
import math
import re
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
PAPER, INK, LINE, QUIET = (
    "var(--sw-paper,#fff)",
    "var(--sw-ink,#1f2a30)",
    "var(--sw-line,#78909c)",
    "var(--sw-quiet,#607d8b)",
)
RANKS = ("var(--sw-a,#b2dfdb)", "var(--sw-b,#ffe0b2)", "var(--sw-c,#c5cae9)", "var(--sw-d,#f8bbd0)")
GOOD, BAD = "var(--sw-good,#00796b)", "var(--sw-bad,#bf360c)"


class Drawing:
    """An SVG of fixed size, in user units of a pixel at full width."""

    def __init__(self, width: float, height: float) -> None:
        self._size = width, height
        self._parts: list[str] = [f'<rect width="{width:g}" height="{height:g}" style="fill:{PAPER}"/>']

    def box(self, x: float, y: float, w: float, h: float, text: str = "", fill: str = "none", size: float = 13) -> None:
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" style="fill:{fill};stroke:{LINE}"/>'
        )
        lines = text.split("\n") if text else []
        for number, line in enumerate(lines):
            middle = y + h / 2 + (number - (len(lines) - 1) / 2) * (size + 3) + size * 0.35
            self.text(x + w / 2, middle, line, size=size, anchor="middle")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 13,
        anchor: str = "start",
        fill: str = INK,
        bold: bool = False,
    ) -> None:
        weight = ";font-weight:600" if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" style="fill:{fill};font-size:{size:g}px{weight}">{escape(text)}</text>'
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, color: str = LINE, dash: str = "", arrow: bool = False
    ) -> None:
        style = f"stroke:{color};stroke-width:1.5" + (f";stroke-dasharray:{dash}" if dash else "")
        self._parts.append(f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" style="fill:none;{style}"/>')
        if arrow:
            angle = math.atan2(y2 - y1, x2 - x1)
            ends = [(x2 - 8 * math.cos(angle + turn), y2 - 8 * math.sin(angle + turn)) for turn in (0.4, -0.4)]
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(x2, y2), *ends])
            self._parts.append(f'<polygon points="{points}" style="fill:{color}"/>')

    def dot(self, x: float, y: float, fill: str, *, is_round: bool = True) -> None:
        if is_round:
            self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" style="fill:{fill}"/>')
        else:
            self._parts.append(f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" style="fill:{fill}"/>')

    def svg(self) -> str:
        width, height = self._size
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif">'
        return "\n".join([head, *self._parts, "</svg>\n"])


def layers() -> Drawing:
    """The parts: a program, the package in Python, the engine in C, and what they run on."""
    d = Drawing(720, 300)
    d.box(20, 15, 680, 42, "your program: a torch module, an optimizer, a loop", RANKS[2])
    d.text(20, 82, "Python: thin", bold=True)
    for x, w, text in ((20, 160, "wrap, options\nerrors agreed by ranks"), (193, 160, "hooks of autograd\n.grad, steps"),
                       (366, 160, "checkpoints\nplans, names"), (539, 161, "accelerate, Trainer,\nLightning, DeepSpeed")):  # fmt: skip
        d.box(x, 90, w, 48, text, RANKS[0], 12)
    d.text(20, 163, "C: the engine, no torch inside", bold=True)
    for x, w, text in ((20, 128, "reduce\nbuckets, rounds"), (158, 128, "zero\nslices, units"), (296, 128, "optim\nfused steps"),
                       (434, 128, "compress\ncodecs"), (572, 128, "checkpoint\nwriter threads")):  # fmt: skip
        d.box(x, 171, w, 44, text, RANKS[1], 12)
    d.box(
        20,
        221,
        680,
        30,
        "comm: shared memory in a host, Gloo or NCCL beyond · kernels: one body per instruction set, CUDA text",
        RANKS[1],
        12,
    )
    d.box(20, 262, 680, 26, "Linux, CPUs, GPUs, network, disk", "none", 12)
    return d


def layout() -> Drawing:
    """Parameters, their buckets, and the slice of each bucket that each of three ranks owns."""
    d = Drawing(720, 290)
    d.text(20, 24, "parameters, in the module's order", bold=True)
    names = [("embedding", 150), ("block 0", 120), ("block 1", 120), ("block 2", 120), ("head", 90)]
    x, starts = 20.0, []
    for name, w in names:
        d.box(x, 34, w, 34, name)
        starts.append((x, w))
        x += w + 4
    buckets = [("bucket 0", 3, 5, 20.0, 214.0), ("bucket 1", 1, 3, 242.0, 244.0), ("bucket 2", 0, 1, 494.0, 150.0)]
    for name, first, last, bx, bw in buckets:
        for place in range(first, last):
            px, pw = starts[place]
            d.line(px + pw / 2, 68, bx + bw / 2, 116, dash="3 3")
        d.box(bx, 116, bw, 30, name)
    d.text(20, 162, "buckets of gradients, the last parameters first: their gradients come first", size=12)
    d.text(20, 186, "each bucket has one slice per rank (zero ≥ 1)", bold=True)
    for _, _, _, bx, bw in buckets:
        for rank in range(3):
            d.box(bx + rank * bw / 3, 196, bw / 3, 34, f"rank {rank}" if bw > 160 else str(rank), RANKS[rank], 12)
    d.text(
        20,
        250,
        "A slice's rank alone has: zero=1 its optimizer state, zero=2 its averaged gradient too, zero=3 its parameters too.",
        size=11.5,
    )
    d.text(
        20,
        272,
        "A slice begins on a multiple of 128 bytes, so no two ranks write to one cache line.",
        size=12,
        fill=QUIET,
    )
    return d


def round_() -> Drawing:
    """A round: three ranks run a backward, post buckets, and each folds its slice in rank order."""
    d = Drawing(720, 300)
    d.text(90, 22, "backward", bold=True)
    for number, x in enumerate((200, 300, 400)):
        d.text(x, 22, f"bucket {number} full", size=12, fill=QUIET)
    for rank in range(3):
        y = 36 + 56 * rank
        d.text(20, y + 22, f"rank {rank}")
        d.box(84, y, 400, 34, "", "none")
        for number, x in enumerate((200, 300, 400)):
            d.box(x, y, 70, 34, f"post {number}", RANKS[rank], 12)
        d.box(500, y, 200, 34, f"fold slice {rank} of each bucket", RANKS[rank], 12)
    d.text(500, 212, "or earlier: once all have posted it", size=12, fill=QUIET)
    d.text(20, 226, "The fold, for each element of a slice, always in rank order:", bold=True)
    for rank, x in enumerate((40, 160, 280)):
        d.box(x, 238, 90, 30, f"g of rank {rank}", RANKS[rank], 12)
        d.text(x + 105, 258, "+" if rank < 2 else "→", anchor="middle")
    d.box(400, 238, 130, 30, "mean, seen by all", "none", 12)
    d.text(
        20,
        290,
        "So the bits depend on the inputs alone: not on bucket sizes, timing, transport, or the stage.",
        size=12,
        fill=QUIET,
    )
    return d


def unit() -> Drawing:
    """A unit at private zero=3: gathered, run and released in the forward, and again in the backward."""
    d = Drawing(720, 250)
    lanes = ("unit 0", "unit 1", "unit 2")
    d.text(250, 20, "forward", bold=True, anchor="middle")
    d.text(560, 20, "backward", bold=True, anchor="middle")
    d.line(408, 26, 408, 172, dash="4 3")
    for lane, name in enumerate(lanes):
        y = 34 + 46 * lane
        d.text(20, y + 22, name)
        x = 84 + 100 * lane
        d.box(x, y, 40, 34, "gather", RANKS[2], 10)
        d.box(x + 42, y, 62, 34, "run", RANKS[0], 12)
        x = 414 + 100 * (2 - lane)
        d.box(x, y, 40, 34, "gather", RANKS[2], 10)
        d.box(x + 42, y, 38, 34, "run", RANKS[0], 12)
        d.box(x + 82, y, 16, 34, "", RANKS[1])
    d.line(84, 180, 712, 180, arrow=True)
    d.text(712, 196, "time", anchor="end", size=12, fill=QUIET)
    d.box(20, 204, 16, 14, "", RANKS[1])
    d.text(42, 216, "gradient averaged: each rank keeps its slice", size=12)
    d.text(
        20,
        240,
        "Outside of its boxes a rank has only its slice of the unit. Reading the whole then is an error with its name.",
        size=12,
        fill=QUIET,
    )
    return d


def save() -> Drawing:
    """A save: a copy in the loop, everything else in threads in C behind training."""
    d = Drawing(720, 250)
    d.text(20, 46, "loop")
    x = 90
    for number in range(6):
        if number == 2:
            d.box(x, 28, 34, 30, "copy", RANKS[1], 11)
            x += 37
        d.box(x, 28, 86, 30, f"step {number}", RANKS[0], 12)
        x += 89
    d.line(285, 58, 285, 92, arrow=True)
    d.text(296, 80, "save() returns after the copy of this rank's share, with its checksums", size=12, fill=QUIET)
    d.text(20, 116, "C threads")
    for x, w, text in ((285, 120, "write"), (407, 60, "fsync"), (469, 98, "manifest"), (569, 68, "rename")):
        d.box(x, 98, w, 30, text, RANKS[2], 12)
    d.line(637, 128, 637, 166, arrow=True)
    d.text(20, 186, "disk")
    d.box(90, 168, 547, 30, "step-000001: the old checkpoint stays whole", "none", 12)
    d.box(640, 168, 70, 30, "step-000002", RANKS[0], 10)
    d.text(
        20,
        224,
        "A folder is a checkpoint only if its MANIFEST.json is whole: a kill at any instant leaves the old or the new one.",
        size=12,
    )
    d.text(
        20,
        242,
        "Every rank writes the bytes that it holds to their places; the files' bytes do not depend on ranks or stage.",
        size=12,
        fill=QUIET,
    )
    return d


def tier() -> Drawing:
    """Steps in memory: a guardian on each host holds them, the next host has a copy."""
    d = Drawing(720, 270)
    for host, x in enumerate((20, 380)):
        d.box(x, 20, 320, 168, "", "none")
        d.text(x + 12, 40, f"host {host}", bold=True)
        for rank in range(2):
            d.box(x + 14 + 148 * rank, 52, 140, 32, f"rank {2 * host + rank}", RANKS[2 * host + rank], 12)
            d.line(x + 84 + 148 * rank, 84, x + 84 + 148 * rank, 116, arrow=True)
        d.box(
            x + 14,
            116,
            288,
            58,
            "guardian: memory that outlives the ranks\nslot 0: step 41, slot 1: step 42",
            "none",
            12,
        )
    d.line(334, 136, 392, 136, arrow=True)
    d.line(394, 154, 336, 154, arrow=True)
    d.text(363, 206, "copies on the next host (memory_replicas=1), beside training", anchor="middle", size=12)
    d.box(20, 222, 680, 30, "disk, or s3://: each save(every=1000)", RANKS[1], 12)
    d.line(120, 188, 120, 222, arrow=True)
    d.line(600, 188, 600, 222, arrow=True)
    return d


#: rows that compare with a program or with the machine; others compare with a goal, a formula or a prediction
_PEERS_LEFT_OUT = (
    "goal",
    "one second",
    "10 ms",
    "a whole copy",
    "compute +",
    "the goal",
    "the step",
    "its slices",
    "the model's",
)
#: plot -> its file of results, a word that a row must have, and a title
PLOTS = {
    "ddp": ("ddp", "", "zero=0 beside torch DistributedDataParallel"),
    "stages": ("zero", " step ", "Steps of stages beside torch's and DeepSpeed's"),
    "memory": ("zero", " peak ", "Peak memory of stages (PSS of all ranks)"),
    "hosts": ("hosts", "", "Between hosts, 1 Gbit/s"),
    "compression": ("compress_hosts", "", "Compressed, between hosts, 1 Gbit/s"),
    "allreduce": ("allreduce", "", "All-reduce between ranks of a host"),
    "optimizers": ("adamw", "", "Optimizer steps and norms"),
    "checkpoints": ("checkpoint", "1024 MiB", "Checkpoints of 1 GiB"),
}


def rows_of(name: str, word: str) -> dict[tuple[str, str], list[tuple[str, float]]]:
    """Return (case, peer) -> runs, each a machine and our time or bytes over the peer's, of every row that is left in."""
    found: dict[tuple[str, str], list[tuple[str, float]]] = {}
    machine = ""
    for line in (ROOT / "benchmarks" / "results" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        machine = row.get("machine", machine)
        peer = row.get("peer_name", "")
        value = row.get("ratio") or (1 / row["speedup"] if row.get("speedup") else None)
        is_floor = re.search(
            r"(?<!against) none", row.get("case", "")
        )  # the step without communication beside a peer: not ours
        if (
            "case" in row
            and not is_floor
            and peer
            and value
            and word in row["case"]
            and not peer.startswith(_PEERS_LEFT_OUT)
        ):
            short = (
                re.sub(r"torch DDP view.*", "torch DDP", peer)
                .replace("ZeroRedundancyOptimizer", "ZeroRedundancy")
                .removesuffix(" view")
            )
            case = row["case"].replace("1024 MiB ", "").replace(" there yet", "")
            found.setdefault((case, short), []).append((machine, value))
    return found


def plot(name: str, word: str, title: str) -> Drawing:
    """Draw one line per case and peer, one mark per run: left of 1 ours takes less."""
    rows = rows_of(name, word)
    low = min(0.25, *(value for runs in rows.values() for _, value in runs))
    high = max(2.0, *(value for runs in rows.values() for _, value in runs))
    left, right, top = 400.0, 650.0, 62.0
    height = top + 20 * len(rows) + 34
    d = Drawing(744, height)

    def at(value: float) -> float:
        return left + (right - left) * (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))

    d.text(12, 22, title, bold=True, size=14)
    d.text(12, 42, "ours / peer: left of 1 is better. Circle: Intel Xeon. Square: AMD EPYC.", size=11, fill=QUIET)
    for tick in (0.002, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4):
        if low * 0.99 <= tick <= high * 1.01:
            d.line(at(tick), top - 6, at(tick), height - 26, dash="" if tick == 1 else "2 4")
            d.text(at(tick), height - 10, f"{tick:g}", size=11, anchor="middle", fill=QUIET)
    for number, ((case, peer), runs) in enumerate(rows.items()):
        y = top + 20 * number + 8
        d.text(left - 14, y + 4, f"{case} | {peer}", size=10, anchor="end")
        for machine, value in runs:
            d.dot(at(value), y, GOOD if value <= 1 else BAD, is_round=machine.startswith("Intel"))
        d.text(right + 12, y + 4, _between([value for _, value in runs]), size=10)
    return d


def _between(values: list[float]) -> str:
    """Return the smallest and the largest number."""
    ends = [f"{each:.2f}" if each >= 0.095 else f"{each:.3f}" for each in (min(values), max(values))]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def drawings() -> dict[str, str]:
    """Return the text of each file by its name."""
    pictures = {"layers": layers, "layout": layout, "round": round_, "unit": unit, "save": save, "tier": tier}
    made = {f"{name}.svg": draw().svg() for name, draw in pictures.items()}
    return made | {f"performance-{name}.svg": plot(*arguments).svg() for name, arguments in PLOTS.items()}


if __name__ == "__main__":
    for file, text in drawings().items():
        (IMAGES / file).write_text(text, encoding="utf-8")
