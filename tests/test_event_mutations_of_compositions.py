"""Law of the GPU path's order under compositions: the scenes of tensor parallelism, pipelines and experts beside data parallelism
(tests/ranks/test_compositions_on_simulated_gpus.py) fail without a wait or a record that they reach, or UNSEEN has the reason why not.

The mutations are those of test_event_mutations.py, and each is built into the engine of the ranks. An engine that notes each place
finds the scenes that reach it.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from test_csrc import CHECK, ROOT, run_checked, shipped_flags
from test_event_mutations import LONG, PYTHON, Mutation, mutations, polls, records
from test_layers import built_objects

SCENES = "tests/ranks/test_compositions_on_simulated_gpus.py"
#: scenes, the shorter ones first
KINDS = (
    "of_experts",
    "of_idle_experts",
    "of_lean_experts",
    "of_tensors",
    "of_stages",
    "of_saved_tensors",
    "of_offloaded_tensors",
    "of_home_tensors",
)
#: file -> the scene that reaches most of it, which runs first
FIRST = {
    "device_stage.c": "of_saved_tensors",
    "device_offload.c": "of_offloaded_tensors",
    "device_units.c": "of_home_tensors",
    "device_home.c": "of_home_tensors",
    "device_rounds.c": "of_tensors",
    "device_norm.c": "of_tensors",
}
IMPORTS = ("torch.distributed.pipelining", "torch.distributed.tensor.parallel", "torch._dynamo", "pytest")
LIMIT_S = 600
#: whether mutations with a reason are run, too, which takes an hour more: make mutate-events-unseen
SEARCHES = os.environ.get("SW_TEST_UNSEEN") == "1"
ALL = [each for each in [*mutations(), *polls(), *records()] if CHECK not in each.file.parents]
#: (reason why no scene fails, file, parts of the texts of its waits and records, see text_of()); test_event_mutations.py sees each of them
UNSEEN = (
    (
        "a save has compared equal tensors, for which the host waits",
        "device_stage.c",
        "stage->met, user",
        "down, stage->met",
    ),
    ("a save that failed", "device_stage.c", "stage->met, stage->down", "a work that failed"),
    (
        "a borrowed communicator",
        "device_comm.c",
        "c->met, c->stream",
        "our last operation",
        "return sw_device_comm_follow(",
    ),
    ("for threads that watch, which simulated ranks do not start", "device_comm.c", "c->marked"),
    ("clipping without a wait, which DTensors lack", "device_norm.c", "return sw_device_comm_follow("),
    (
        "slots in a GPU's memory; simulated ranks have the host's",
        "slot_memory.c",
        "the GPUs' memory",
        "is_closed_elsewhere",
    ),
    ("the ranks agree right after it", "slot_memory.c", "creation of the communicator"),
    ("a transport's creation or failure", "slot_rounds.c", "t->ended", "limit_ns"),
    ("the end of a transport", "slot_transport.c", "t->ended"),
    ("a module ends after the host has read its values", "device_home.c", "home->left"),
    ("a module ends after the host has read its values", "device_units.c", "u->idle"),
    (
        "a module ends after the host has read its values, or with all of its work done",
        "device_rounds.c",
        "the comm stream",
        "d->gathered, d->comm->stream",
    ),
    ("the end of a module", "device_comm.c", "while (!done"),
    ("the host reads tags a step later, when their copy has run", "device_rounds.c", "d->told"),
    ("the optimizer is in the backward's stream", "device_rounds.c", "d->consumed, d->consumer"),
    ("the optimizer is in the backward's stream", "device_rounds.c", "d->stream, d->consumed"),
    ("the optimizer is in the backward's stream", "device_rounds.c", "d->stream, d->comm->stream"),
    ("a backward in several streams", "device_rounds.c", "producers->stream[i]"),
    (
        "each copy of a step that succeeds has been waited for",
        "device_offload.c",
        '"gradients"',
        "slot->fetched, o->down",
    ),
    (
        "the last copy of a batch alone: no later batch of the scene writes where it reads",
        "device_offload.c",
        ".sent, o->up, early",
    ),
    ("a unit that is under way as its module ends", "device_units.c", "the gathering of a unit"),
    ("a program that reads a unit on the host", "device_units.c", '"a unit"'),
)


def text_of(mutation: Mutation) -> str:
    """Return the text of a mutation's call, and how its record is wrong."""
    return f"{mutation.text} {mutation.wrong}".rstrip()


def reason_unseen(mutation: Mutation) -> str | None:
    """Return the reason why a mutation may stay unseen; None: it may not."""
    for reason, file, *parts in UNSEEN:
        if file == mutation.file.name and any(part in text_of(mutation) for part in parts):
            return reason
    return None


NOTE = """
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
void note_place(int number);
void note_place(int number)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%d", getenv("SW_PLACES"), number);
    close(open(path, O_CREAT | O_WRONLY, 0600));
}
"""


def noting() -> dict[Path, str]:
    """Return the files with mutations, in which each place calls note_place()."""
    changed: dict[Path, str] = {}
    at_once = sorted(enumerate(ALL), key=lambda pair: pair[1].start, reverse=True)
    for number, mutation in at_once:
        if mutation.wrong == "elsewhere":  # the same place as "early"
            continue
        text = changed.get(mutation.file) or mutation.file.read_text()
        own, call = text[mutation.start : mutation.end], f"note_place({number})"
        if mutation.wrong:
            noted = f"({call}, {own})"
        elif own.startswith(("while (", "if (")):
            opened = own.index("(") + 1
            noted = f"{own[:opened]}({call}, true) && {own[opened:]}"
        else:
            noted = f"{{ {call}; {own} }}"
        changed[mutation.file] = text[: mutation.start] + noted + text[mutation.end :]
    return {file: f"void note_place(int number);\n{text}" for file, text in changed.items()}


def engine(folder: Path, changed: dict[Path, str], more: str = "") -> Path:
    """Build a package with the tree's Python and an engine in which files are changed. Return the folder that holds it."""
    include = ["-Icsrc", "-include", "csrc/platform/glibc_compat.h"]
    relaxed = [flag for flag in shipped_flags() if flag != "-Werror"]
    command = [os.environ.get("CC", "gcc"), *relaxed, "-w", "-D_GNU_SOURCE", "-fPIC", "-pthread"]
    objects = dict(built_objects())
    assert changed.keys() <= objects.keys(), "run `make build`"
    for file, text in {**changed, Path("more.c"): more}.items():
        source = folder / file.name
        source.write_text(text)
        objects[file] = source.with_suffix(".o")
        run_checked([*command, *include, "-c", str(source), "-o", str(objects[file])])
    place = folder / "python" / PYTHON.name
    place.mkdir(parents=True)
    for each in PYTHON.iterdir():
        if not each.name.startswith(("_engine.abi3", "__pycache__")):
            (place / each.name).symlink_to(each)
    linked = [str(made) for _, made in sorted(objects.items())]
    run_checked([*command, "-shared", *linked, "-lm", "-ldl", "-o", str(place / "_engine.abi3.so")])
    return place.parent


@functools.cache
def warm() -> subprocess.Popen[str]:
    """Return the process that forks the scenes."""
    command = [sys.executable, str(ROOT / "tests" / "warm_pytest.py"), *IMPORTS]
    started = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(started.terminate)
    return started


def play(package: Path, kind: str, transport: str, places: str = "") -> tuple[bool, str]:
    """Run a scene with an engine. Return whether it succeeds, and what it said if all that went wrong is that it ran out of time."""
    environment = {"SHARDWRIGHT_GPU_TRANSPORT": transport, "SW_PLACES": places, "PYTHONDONTWRITEBYTECODE": "1"}
    arguments = ["-q", "-x", "-p", "no:cacheprovider", SCENES, "-k", f"[{kind}]"]
    output = package / "output.txt"
    given = {"path": str(package), "environment": environment, "arguments": arguments, "output": str(output)}
    process = warm()
    assert process.stdin is not None and process.stdout is not None
    print(json.dumps(given | {"limit_s": LIMIT_S}), file=process.stdin, flush=True)
    code = int(process.stdout.readline())
    assert code in (-1, 0, 1), f"pytest ended with {code}: {' '.join(arguments)}"
    said = output.read_text(errors="replace")
    is_late = code == -1 or ("did not finish in time" in said and "Traceback" not in said)
    return code == 0, said[-2000:] if is_late else ""


def succeeds(package: Path, kind: str, transport: str) -> bool:
    """Return whether a scene succeeds with a changed engine.

    A scene that hangs counts as failed if it succeeds with the unchanged engine right after it. If not, there is no verdict, and the
    test fails.
    """
    has_succeeded, late = play(package, kind, transport)
    if late:
        with tempfile.TemporaryDirectory() as places:
            is_quick, _ = play(unchanged(), kind, transport, places)
        assert is_quick, f"no verdict, scene {kind} over {transport} ran out of time: {late}"
    return has_succeeded


def test_every_reason_is_that_of_a_mutation() -> None:
    for _, file, *parts in UNSEEN:
        for part in parts:
            assert any(each.file.name == file and part in text_of(each) for each in ALL), (file, part)


@functools.cache
def unchanged() -> Path:
    """Return the package whose engine notes each place, and has no mutation."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return engine(Path(folder.name), noting(), NOTE)


@functools.cache
def scenes_at() -> dict[int, list[tuple[str, str]]]:
    """Map the number of each mutation to the scenes that reach it. Unchanged, they succeed."""
    found: dict[int, list[tuple[str, str]]] = {number: [] for number in range(len(ALL))}
    for kind, transport in itertools.product(KINDS, ("nccl", "shm")):
        with tempfile.TemporaryDirectory() as places:
            has_succeeded, late = play(unchanged(), kind, transport, places)
            assert has_succeeded, (kind, transport, late)
            for number in map(int, os.listdir(places)):
                if ALL[number].file.name.startswith("slot_") == (transport == "shm"):
                    twins = (number, number + 1) if ALL[number].wrong == "early" else (number,)
                    for each in twins:
                        found[each].append((kind, transport))
    for number, scenes in found.items():
        scenes.sort(key=lambda scene: scene[0] != FIRST.get(ALL[number].file.name))  # noqa: B023
    return found


@pytest.mark.skipif(not LONG, reason="long form only (SW_TEST_LONG=1, make mutate-events)")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("number", range(len(ALL)), ids=lambda number: ALL[number].name)
def test_a_composition_fails_without_an_order_that_it_uses(number: int, tmp_path: Path) -> None:
    mutation: Mutation = ALL[number]
    reason = reason_unseen(mutation)
    if reason is not None and not SEARCHES:
        pytest.skip(f"test_event_mutations.py alone sees it: {reason}")
    scenes = scenes_at()[number]
    package = engine(tmp_path, {mutation.file: mutation.mutated()})
    is_seen = not all(succeeds(package, *scene) for scene in scenes)
    what = f"{mutation.name}: {mutation.text}, of {len(scenes)} scenes"
    assert not is_seen or reason is None, f"a scene of compositions fails, take this reason away: {what}"
    assert is_seen or reason is not None, f"no scene of compositions fails with this changed: {what}"
