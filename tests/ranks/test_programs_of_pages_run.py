"""Law of docs/howto and docs/reference: the program of each page runs on as many ranks as the page says, two by default, and they
print what the page shows, but for the digits of its numbers.

Ranks have a process group already, so calls that make or end one are left out.
"""

import contextlib
import importlib.util
import io
import os
import re
import sys
import tempfile
import traceback

import harness
import pages
import pytest
import torch
import torch.distributed as dist

#: pages whose program starts its own processes, is started by another command, ends by a signal, or compiles for a minute
LEFT_OUT = {"notebooks-and-spawn", "lightning", "accelerate", "trainer", "compile", "slurm"}
LIBRARIES = ("peft", "transformers", "bitsandbytes", "accelerate", "lightning")


def program_of(page):
    block = next((each for each in pages.blocks_of(page) if each.language == "python"), None)
    if block is None or page.stem in LEFT_OUT:
        return None
    used = [name for name in LIBRARIES if re.search(rf"^import .*\b{name}\b|^from {name}\b", block.code, re.M)]
    return block.code if all(map(importlib.util.find_spec, used)) else None


def ranks_of(page):
    return 4 if "--nproc-per-node 4 train.py" in page.read_text() else 2


def shown_by(page):
    """Return what the page says that its program prints, with # for each number, or None."""
    text = page.read_text()
    found = re.search(r"^```python\n.*?^```.*?prints[^\n]*\n\n```text\n(.*?)```", text, re.M | re.S)
    return None if found is None or text[: found.start(1)].count("```text") != 1 else masked(found[1])


def masked(text):
    return sorted(re.sub(r"[+-]?\d[\d,]*\.?\d*(e-?\d+)?", "#", text).splitlines())


def pages_of(folder, ranks):
    return [
        page for page in pages.PROGRAMS if page.parent.name == folder and program_of(page) and ranks_of(page) == ranks
    ]


def run_all(rank, folder, ranks):
    failed = []
    for page in pages_of(folder, ranks):
        place = [tempfile.mkdtemp()]
        dist.broadcast_object_list(place)
        os.chdir(place[0])
        code = re.sub(
            r"\b(torch\.distributed|dist|sw)\.(init|destroy)_process_group\([^)]*\)", "None", program_of(page)
        )
        printed = io.StringIO()
        torch.manual_seed(0)
        sys.argv, arguments = ["train.py"], sys.argv
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(code, page.name, "exec"), {"__name__": "__main__"})
        except Exception:
            failed.append(f"{page.name}\n{traceback.format_exc()}")
        expected, texts = shown_by(page), [""] * ranks
        dist.all_gather_object(texts, printed.getvalue())
        if expected is not None and set(masked("".join(texts))) != set(expected):
            failed.append(f"{page.name} shows\n{expected}\nand printed\n{texts}")
        sys.argv = arguments
        os.chdir(pages.ROOT)
    assert not failed, "\n\n".join(failed)


@harness.on_every_rank(exactly=2, spoils=True, deadline_s=300)
def test_programs_of_two_ranks_run(rank, world_size, folder):
    run_all(rank, folder, world_size)


test_programs_of_two_ranks_run = pytest.mark.parametrize("folder", ["howto", "reference"])(
    test_programs_of_two_ranks_run
)


@harness.on_every_rank(exactly=4, spoils=True, deadline_s=300)
def test_programs_of_four_ranks_run(rank, world_size):
    run_all(rank, "howto", world_size)


def test_all_code_of_these_pages_compiles():
    for page in pages.PROGRAMS:
        for block in pages.blocks_of(page):
            if block.language in ("python", "py"):
                compile(block.code, block.place, "exec")


def test_most_pages_have_a_program_that_runs():
    assert len(pages_of("howto", 2)) >= 14 and len(pages_of("howto", 4)) == 4 and len(pages_of("reference", 2)) >= 8
