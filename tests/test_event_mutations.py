"""Law of the GPU path's order: each wait is needed. Every wait of a stream, for an event or a peer's number, and of the host, and every
place where one stream follows another (but those inside csrc/device, which are the calls themselves), is deleted in turn, and the simulated training must then fail, or the wait
stands in REDUNDANT with its reason. `make mutate-events` runs this; the quick form of the tests leaves it out.

Waits of the host that poll by themselves (sw_device_comm_await, sw_slot_drain, is_closed_elsewhere) are no single call that could go: they are in POLLS, and
their loop's condition is what is replaced.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from test_csrc import BUILDERS, CSRC, ROOT, run_checked
from test_fake_gpu import FAKE, SHARED, libraries

LONG = os.environ.get("SW_TEST_LONG") == "1"
NOUNS = ("device_reducer", "device_units", "device_offload", "device_stage")
#: the program that must fail without a wait of a file; the first one's for those of other files
PROGRAMS = {f"{noun}.c": FAKE / f"test_{noun}.c" for noun in NOUNS}
PROGRAMS.update({f"slot_{part}.c": FAKE / "test_slot_transport.c" for part in ("rounds", "memory", "transport")})
NAMES = r"(?:ops->(?:stream_wait|stream_wait_number|event_wait)|\bsw_(?:nccl_wait|peers_wait|device_comm_follow|device_comm_await|slot_wait|slot_meet))"
CALL = NAMES + r"\([^;]*"
#: csrc/device is the calls themselves, csrc/python makes none of its own accord
OTHERS = ("device", "python")
WAIT = re.compile(rf"(?:SW_TRY\(|\(void\)|return |(?<!void )(?=sw_device_comm_await))\s*(?:\w+->)*{CALL};")

#: (file, a loop that polls for what a wait would wait for, how it looks without)
POLLS = (
    ("device_comm.c", "while (!done && sw_clock_now_ns() - start < c->timeout_ns) {", "while (false) {"),
    ("slot_rounds.c", "while (!done && sw_clock_now_ns() - start < limit_ns) {", "while (false) {"),
    ("slot_memory.c", "if (t->own_slots && is_closed_elsewhere(t))", "if (t->own_slots)"),
)
#: of one stream after another, in Python: the tests that must fail without it
PYTHON = ROOT / "python" / "shardwright"
FOLLOW = re.compile(r"comm\.follow\(")
SCENES = {
    "device_rounds.py": ("tests/ranks/test_modules_on_simulated_gpus.py", "on_two_streams"),
    "device_slices.py": ("tests/ranks/test_stages_on_simulated_gpus.py", "made_anew"),
}

#: (file, text of the wait, spaces squeezed) -> why nothing can tell that it is gone
REDUNDANT: dict[tuple[str, str], str] = {}


@dataclass(frozen=True)
class Mutation:
    file: Path
    start: int
    end: int
    text: str

    @property
    def name(self) -> str:
        line = self.file.read_text().count("\n", 0, self.start) + 1
        return f"{self.file.name}:{line}"

    def mutated(self) -> str:
        """The file without the wait; a function whose value it was says that all is well."""
        text = self.file.read_text()
        instead = "return SW_OK;" if self.text.startswith("return") else ";"
        instead = {polled: without for _, polled, without in POLLS}.get(self.text, instead)
        lines = "\n" * self.text.count("\n")  # later lines keep their numbers
        return text[: self.start] + instead + lines + text[self.end :]


def mutations() -> list[Mutation]:
    files = [path for path in sorted(CSRC.rglob("*.c")) if path.parent.name not in OTHERS]
    return [
        Mutation(path, match.start(), match.end(), " ".join(match[0].split()))
        for path in files
        for match in WAIT.finditer(path.read_text())
    ]


def test_every_wait_of_the_engine_is_seen_by_the_pattern() -> None:
    found = {(mutation.file.name, mutation.text) for mutation in mutations()}
    calls = [
        (path.name, number)
        for path in sorted(CSRC.rglob("*.c"))
        if path.parent.name not in OTHERS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(NAMES + r"\(", line) and not line.startswith(("sw_status", "static", "void"))
    ]
    assert len(mutations()) == len(calls) > 0, calls
    assert set(REDUNDANT) <= found, "a wait in REDUNDANT does not exist"


def follows() -> list[tuple[Path, int]]:
    """(file, line from 0) of each place where Python has one stream follow another."""
    return [
        (path, number)
        for path in sorted(PYTHON.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines())
        if FOLLOW.search(line)
    ]


def test_every_follow_in_python_has_a_scene() -> None:
    assert {path.name for path, _ in follows()} == set(SCENES)


@pytest.mark.skipif(not LONG, reason="long form only (SW_TEST_LONG=1, make mutate-events)")
@pytest.mark.parametrize(
    "path, number", follows(), ids=lambda part: part.name if isinstance(part, Path) else str(part + 1)
)
def test_without_this_follow_a_scene_fails(path: Path, number: int, tmp_path: Path) -> None:
    copy = tmp_path / "python" / "shardwright"
    shutil.copytree(PYTHON, copy, ignore=shutil.ignore_patterns("__pycache__"))
    test, scene = SCENES[path.name]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test, "-k", scene]
    plain = {key: value for key, value in os.environ.items() if key != "SW_TEST_LONG"}
    plain.update(PYTHONPATH=str(copy.parent), SW_TEST_WORLDS="3")

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, env=plain)

    whole = run()
    assert whole.returncode == 0, whole.stdout[-2000:]
    lines = path.read_text().splitlines(keepends=True)
    indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
    lines[number] = indent + "pass\n"
    (copy / path.relative_to(PYTHON)).write_text("".join(lines))
    without = run()
    assert without.returncode == 1 and "race" in without.stdout, without.stdout[-2000:]


def polls() -> list[Mutation]:
    found = []
    for name, text, _ in POLLS:
        path = next(CSRC.rglob(name))
        start = path.read_text().index(text)
        found.append(Mutation(path, start, start + len(text), text))
    return found


@pytest.mark.skipif(not LONG, reason="long form only (SW_TEST_LONG=1, make mutate-events)")
@pytest.mark.parametrize("mutation", [*mutations(), *polls()], ids=lambda mutation: mutation.name)
def test_without_this_wait_a_test_fails(mutation: Mutation, tmp_path: Path) -> None:
    builder = BUILDERS["plain"]
    fakes = libraries(builder.mode)
    shared = [str(builder.compile(path)) for path in SHARED]
    source = PROGRAMS.get(mutation.file.name, PROGRAMS["device_reducer.c"])
    builder.program(source, [*shared, "-ldl"])  # as it is: all objects are made
    changed = tmp_path / mutation.file.name
    changed.write_text(mutation.mutated())
    made = tmp_path / "mutated.o"
    relaxed = [flag for flag in builder.command if flag != "-Werror"]
    run_checked([builder.mode.compiler, *relaxed, "-c", str(changed), "-o", str(made)])
    own = str(builder.compile(mutation.file))
    objects = [str(made) if str(path) == own else str(path) for path in builder.objects or []]
    assert str(made) in objects
    program = tmp_path / "program"
    test = str(builder.compile(source))
    wrapped = "-Wl," + ",".join(f"--wrap={name}" for name in ("malloc", "calloc", "realloc", "mmap", "munmap"))
    run_checked(
        [builder.mode.compiler, "-pthread", wrapped, test, *objects, *shared, "-lm", "-ldl", "-o", str(program)]
    )
    plain = {key: value for key, value in os.environ.items() if key not in ("CUDA_VISIBLE_DEVICES", "SW_TEST_LONG")}
    command = [str(program), *map(str, fakes.values()), str(tmp_path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, env=plain)
        survived = done.returncode == 0
    except subprocess.TimeoutExpired:
        survived = False
    reason = REDUNDANT.get((mutation.file.name, mutation.text))
    if reason is not None:
        assert survived, f"{mutation.name} is listed as redundant ({reason}), but a test fails without it"
    else:
        assert not survived, f"no test fails without {mutation.name}: {mutation.text}"
