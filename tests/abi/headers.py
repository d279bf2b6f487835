"""Fetch the headers that tests/test_abi.py compiles against out of pip packages.

    .venv/bin/python tests/abi/headers.py FOLDER requirements/abi.txt [requirements/abi-more.txt]

The program downloads a package's wheel, unpacks its include folders into FOLDER, and removes the wheel. It downloads
some hundred MB, of which a few MB stay. Headers that exist are not fetched again. A package that cannot be fetched is
no error: FOLDER/missing.txt has the reason, and its tests skip with it. Exit code 0: everything exists; 1: something
is missing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_LIMIT_S = 120


def folder_of(name: str, version: str) -> str:
    """Return the folder of a package: CUDA's packages share one, every other package has its own."""
    return f"cuda-{version.split('.')[0]}" if name.startswith("nvidia-cuda-") else f"{name}-{version}"


def fetch(name: str, version: str, folder: Path) -> str:
    """Fetch a package. Return the reason if that failed, else ""."""
    with tempfile.TemporaryDirectory() as wheels:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--no-cache-dir",
        ]
        pip += ["--timeout", "20", "--retries", "1", "--dest", wheels, f"{name}=={version}"]
        try:
            done = subprocess.run(pip, capture_output=True, text=True, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"pip did not end within {_LIMIT_S} s"
        found = next(Path(wheels).glob("*.whl"), None)
        if done.returncode or found is None:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return errors[-1] if errors else f"pip: exit {done.returncode}"
        with zipfile.ZipFile(found) as wheel:
            for entry in wheel.infolist():
                if "/include/" in entry.filename and not entry.is_dir():
                    wheel.extract(entry, folder)
    return ""


def main(folder: Path, files: list[Path]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [line.split("#")[0].strip() for file in files for line in file.read_text().splitlines()]

    def bring(line: str) -> str:
        """Fetch one package and return a sentence about a failure, else ""."""
        name, _, version = line.partition("==")
        stamp = folder / f".{name}-{version}"
        reason = "" if stamp.exists() else fetch(name, version, folder / folder_of(name, version))
        if not reason:
            stamp.touch()
        return reason and f"{line}: {reason}"

    with ThreadPoolExecutor(4) as fetchers:
        missing = list(filter(None, fetchers.map(bring, filter(None, lines))))
    note = folder / "missing.txt"
    note.unlink(missing_ok=True)
    if missing:
        note.write_text("\n".join(missing) + "\n")
        print("These headers could not be fetched, and the tests that need them skip:", *missing, sep="\n  ")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [Path(each) for each in sys.argv[2:]]))
