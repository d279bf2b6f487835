"""Benchmark of checkpoint plans and commits at 1,024 to 16,384 ranks without tensor bytes; runs checkpoint_scale.c.

.venv/bin/python benchmarks/checkpoint_scale.py [--quick] [--json FILE]     # SW_BENCH_DIR: a directory for sparse files
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: (model, form, ranks, ranks per host)
CASES = [
    ("70B", "slices", 1024, 8),
    ("70B", "slices", 4096, 8),
    ("70B", "slices", 16384, 8),
    ("10TB", "slices", 1024, 8),
    ("70B", "rows", 1024, 8),
    ("70B", "rows", 4096, 8),
    ("70B", "rows", 16384, 8),
    ("10TB", "rows", 1024, 8),  # each takes a minute of processor time
    ("10TB", "rows", 1024, 1),
]
FOLDERS = ("checkpoint", "base", "platform", "device", "tensor")


def compile_driver(folder: Path) -> Path:
    """Build the program with the engine sources that it needs. Return its path."""
    sources = [path for each in FOLDERS for path in sorted((ROOT / "csrc" / each).rglob("*.c"))]
    sources.append(ROOT / "csrc/kernels/host/crc32c.c")
    made = folder / "checkpoint_scale"
    flags = ["-std=c11", "-O2", "-D_GNU_SOURCE", "-pthread", f"-I{ROOT / 'csrc'}"]
    driver = Path(__file__).with_suffix(".c")
    subprocess.run(["gcc", *flags, "-o", made, driver, *sources, "-lm"], check=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="slices of the 70B model alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("SW_BENCH_DIR")) as folder:
        program = compile_driver(Path(folder))
        for model, held, *numbers in CASES[:3] if options.quick else CASES:
            command = [program, folder, model, held, *map(str, numbers)]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rows.append(json.loads(text))
            print(text, end="", flush=True)
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
