"""Law of the GPU path's order: each wait is needed. Each wait of a stream (for an event or a peer's number) and of the
host, and each place where one stream follows another, is deleted in turn, except inside csrc/device, which implements
the calls. The simulated training must then fail, or REDUNDANT lists the wait with a reason. `make mutate-events` runs
this; the quick form of the tests leaves it out.

Each event is also recorded too early: before the last operation of its stream, and on a stream without operations
(sim.h does that). A training must fail, or UNSEEN lists the record with a reason.

Host waits that poll (sw_slot_drain, is_closed_elsewhere, sw_device_comm_await) are not single calls that can be
deleted. POLLS lists them, and the condition of their loop is replaced.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_csrc import BUILDERS, ROOT, engine_sources, run_checked
from test_fake_gpu import FAKE, SHARED, libraries

#: a program that has not ended by then hangs; on a busy machine one without a mutation takes minutes
LIMIT_S = 900
LONG = os.environ.get("SW_TEST_LONG") == "1"
NOUNS = ("device_rounds", "device_units", "device_offload", "device_stage", "kernel_check")
#: the programs of which one must fail without a wait of a file, and those for other files
PROGRAMS = {f"{noun}.c": ("test_" + noun,) for noun in NOUNS}
PROGRAMS.update({f"slot_{part}.c": ("test_slot_transport",) for part in ("rounds", "memory", "transport")})
#: the shorter ones first: one that fails decides
FOR_OTHERS = ("test_device_lending", "test_device_training")
PROGRAMS["device_home.c"] = ("test_device_units",)
PROGRAMS["device_comm.c"] = ("test_device_comm", *FOR_OTHERS)
PROGRAMS["device_rounds.c"] = ("test_device_rounds", *FOR_OTHERS)
NAMES = r"(?:ops->(?:stream_wait|stream_wait_number|event_wait)|\bsw_(?:nccl_wait|peers_wait|device_comm_follow|device_comm_await|slot_wait|slot_meet))"
CALL = NAMES + r"\([^;]*"
#: csrc/device is the calls themselves, csrc/python makes none of its own accord
FILES = [path for path in engine_sources() if path.parent.name != "device"]
WAIT = re.compile(rf"(?:SW_TRY\(|\(void\)!?|return |(?<!void )(?=sw_device_comm_await))\s*(?:\w+->)*{CALL};")

#: (file, a loop that polls for what a wait would wait for, how it looks without)
POLLS = (
    ("device_comm.c", "while (!done && sw_clock_now_ns() - start < c->timeout_ns) {", "while (false) {"),
    ("slot_rounds.c", "while (!done && sw_clock_now_ns() - start < limit_ns) {", "while (false) {"),
    ("slot_memory.c", "if (t->own_slots && is_closed_elsewhere(t))", "if (t->own_slots)"),
)
#: where Python must not order streams itself
PYTHON = ROOT / "python" / "shardwright"
FOLLOW = re.compile(r"comm\.follow\(")

#: (file, text of the wait, spaces squeezed) -> why nothing can tell that it is gone
REDUNDANT: dict[tuple[str, str], str] = {}

#: an event that is recorded, and the stream: of the first three arguments, none has a comma
RECORD = re.compile(r"ops->event_record\(\s*[^,;]+,\s*[^,;]+,\s*(?P<stream>[^,;]+),")
#: how a record is wrong -> what is added to the stream (enum of sim.h)
WRONG = {"early": 1, "elsewhere": 2}
#: (file, text of the record, how it is wrong) -> why nothing can tell
UNSEEN: dict[tuple[str, str, str], str] = {
    (
        "device_units.c",
        "ops->event_record(device, u->idle, streams[i],",
        "early",
    ): "a gather follows each copy of a slice, so the last operation reads none",
}


@dataclass(frozen=True)
class Mutation:
    file: Path
    start: int
    end: int
    text: str
    wrong: str = ""  # of a record; of a wait, which goes: ""

    @property
    def name(self) -> str:
        line = self.file.read_text().count("\n", 0, self.start) + 1
        return f"{self.file.name}:{line}{self.wrong and '-'}{self.wrong}"

    def mutated(self) -> str:
        """Return the source without the wait, with success in place of its return value; or with the event recorded
        elsewhere.
        """
        text = self.file.read_text()
        if self.wrong:
            stream = f"(sw_stream *)(void *)((char *)({text[self.start : self.end]}) + {WRONG[self.wrong]})"
            return text[: self.start] + stream + text[self.end :]
        instead = "return SW_OK;" if self.text.startswith("return") else ";"
        instead = {polled: without for _, polled, without in POLLS}.get(self.text, instead)
        lines = "\n" * self.text.count("\n")  # later lines keep their numbers
        return text[: self.start] + instead + lines + text[self.end :]


def mutations() -> list[Mutation]:
    return [
        Mutation(path, match.start(), match.end(), " ".join(match[0].split()))
        for path in FILES
        for match in WAIT.finditer(path.read_text())
    ]


def records() -> list[Mutation]:
    """Run each mutation of each place."""
    return [
        Mutation(path, match.start("stream"), match.end("stream"), " ".join(match[0].split()), wrong)
        for path in FILES
        for match in RECORD.finditer(path.read_text())
        for wrong in WRONG
    ]


def test_every_record_of_the_engine_is_seen_by_the_pattern() -> None:
    texts = [path.read_text() for path in FILES]
    assert len(records()) == len(WRONG) * sum(text.count("event_record(") for text in texts) > 0
    assert set(UNSEEN) <= {(record.file.name, record.text, record.wrong) for record in records()}


def test_every_wait_of_the_engine_is_seen_by_the_pattern() -> None:
    found = {(mutation.file.name, mutation.text) for mutation in mutations()}
    calls = [
        (path.name, number)
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(NAMES + r"\(", line) and not line.startswith(("sw_status", "static", "void"))
    ]
    assert len(mutations()) == len(calls) > 0, calls
    assert set(REDUNDANT) <= found, "a wait in REDUNDANT does not exist"


def test_streams_are_ordered_by_the_engine_alone() -> None:
    """A mutation in Python would need a scene of its own."""
    assert not [path.name for path in PYTHON.rglob("*.py") if FOLLOW.search(path.read_text())]


def polls() -> list[Mutation]:
    found = []
    for name, text, _ in POLLS:
        (path,) = (path for path in FILES if path.name == name)
        start = path.read_text().index(text)
        found.append(Mutation(path, start, start + len(text), text))
    return found


def succeeds(source: Path, file: Path, changed: Path, folder: Path) -> bool:
    """Build the program of `source` on the fakes, with the file `changed` in place of the engine's `file`."""
    builder = BUILDERS["plain"]
    fakes = libraries(builder.mode)
    shared = [str(builder.compile(path)) for path in SHARED]
    builder.program(source, [*shared, "-ldl"])  # as it is: all objects are made
    made = folder / "mutated.o"
    relaxed = [flag for flag in builder.command if flag != "-Werror"]
    run_checked([builder.mode.compiler, *relaxed, "-c", str(changed), "-o", str(made)])
    own = str(builder.compile(file))
    objects = [str(made) if str(path) == own else str(path) for path in builder.objects or []]
    assert str(made) in objects
    program = folder / source.stem
    test = str(builder.compile(source))
    wrapped = "-Wl," + ",".join(f"--wrap={name}" for name in ("malloc", "calloc", "realloc", "mmap", "munmap"))
    run_checked(
        [builder.mode.compiler, "-pthread", wrapped, test, *objects, *shared, "-lm", "-ldl", "-o", str(program)]
    )
    plain = {key: value for key, value in os.environ.items() if key not in ("CUDA_VISIBLE_DEVICES", "SW_TEST_LONG")}
    plain["SW_CHECK_FIRST"] = "1"  # one failure decides
    command = [str(program), *map(str, fakes.values()), str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=LIMIT_S, env=plain)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


@pytest.mark.skipif(not LONG, reason="long form only (SW_TEST_LONG=1, make mutate-events)")
@pytest.mark.parametrize("source", sorted({*FOR_OTHERS, *(each for some in PROGRAMS.values() for each in some)}))
def test_without_a_mutation_a_program_succeeds(source: str, tmp_path: Path) -> None:
    (file,) = (path for path in FILES if path.name == "device_comm.c")
    same = tmp_path / file.name
    same.write_text(file.read_text())
    assert succeeds(FAKE / f"{source}.c", file, same, tmp_path)


@pytest.mark.skipif(not LONG, reason="long form only (SW_TEST_LONG=1, make mutate-events)")
@pytest.mark.parametrize("mutation", [*mutations(), *polls(), *records()], ids=lambda mutation: mutation.name)
def test_with_a_wait_less_or_a_record_elsewhere_a_test_fails(mutation: Mutation, tmp_path: Path) -> None:
    changed = tmp_path / mutation.file.name
    changed.write_text(mutation.mutated())
    sources = PROGRAMS.get(mutation.file.name, FOR_OTHERS)
    survived = all(succeeds(FAKE / f"{source}.c", mutation.file, changed, tmp_path) for source in sources)
    where = (mutation.file.name, mutation.text)
    reason = UNSEEN.get((*where, mutation.wrong)) if mutation.wrong else REDUNDANT.get(where)
    if reason is not None:
        assert survived, f"{mutation.name} is listed as one that nothing sees ({reason}), but a test fails"
    else:
        assert not survived, f"no test fails with this changed: {mutation.name}: {mutation.text}"
