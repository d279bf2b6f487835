"""Law of the GPU path's order: each wait is needed. Every wait of a stream, for an event or a peer's number, and of the host, and every
place where one stream follows another (but those inside csrc/device, which are the calls themselves), is deleted in turn, and the simulated training must then fail, or the wait
stands in REDUNDANT with its reason. `make mutate-events` runs this; the quick form of the tests leaves it out.
"""

from __future__ import annotations

import os
import re
import subprocess
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
NAMES = r"(?:ops->(?:stream_wait|stream_wait_number|event_wait)|\bsw_(?:nccl_wait|peers_wait|device_comm_follow|slot_wait|slot_meet))"
CALL = NAMES + r"\([^;]*"
#: csrc/device is the calls themselves, csrc/python makes none of its own accord
OTHERS = ("device", "python")
WAIT = re.compile(rf"(?P<head>SW_TRY\(|\(void\)|return )\s*(?:\w+->)*{CALL};")

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
        if re.search(NAMES + r"\(", line) and not line.startswith(("sw_status", "static"))
    ]
    assert len(mutations()) == len(calls) > 0, calls
    assert set(REDUNDANT) <= found, "a wait in REDUNDANT does not exist"


@pytest.mark.skipif(not LONG, reason="long form only (SW_TEST_LONG=1, make mutate-events)")
@pytest.mark.parametrize("mutation", mutations(), ids=lambda mutation: mutation.name)
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
