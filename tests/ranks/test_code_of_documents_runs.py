"""Laws of README and docs: each block of Python runs, in the order of its page and with the names of the blocks before it, and prints
what the page shows behind it. tests/pages.py has the comments by which a page prepares a block, or says why it does not run.

A page is one process. A block that calls sw.wrap or sw.fully_shard begins with a new model and optimizer.
"""

import contextlib
import doctest
import importlib
import importlib.util
import io
import math
import os
import re
import tempfile
import traceback

import harness
import pages
import pytest
import shardwright as sw
import torch
import torch.distributed as dist
from torch import nn

WITH_CODE = [page for page in pages.PAGES if any(block.language in pages.PYTHON for block in pages.blocks_of(page))]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Repeated layers and a head, as programs have them. `blocks` is another name for `layers`."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(16, 32)

    @property
    def blocks(self):
        return self.layers

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def new_model():
    model = Model()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}


def names():
    """Return the names that every page has from the start."""

    def train(step=0):
        model, optimizer = page["model"], page["optimizer"]
        model(torch.arange(8).reshape(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    page = {"__name__": "page", "torch": torch, "nn": nn, "dist": dist, "sw": sw, "math": math, "os": os}
    page |= {"Model": Model, "train": train, "steps": 3, "step": 0, **new_model()}
    return page


def run(block, page):
    """Run a block in its page's names, and return what it printed."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if re.search(r"\b(sw\.wrap|fully_shard|FSDP)\(", block.code):
        page |= new_model()
    exec(compile(block.before, f"{block.place}, comment", "exec"), page)
    printed = io.StringIO()
    code = compile("\n" * block.line + block.code, str(block.page), "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, page)
    return printed.getvalue()


@pytest.mark.parametrize("name", [str(page.relative_to(pages.ROOT)) for page in WITH_CODE])
@harness.on_every_rank(exactly=1, spoils=True)
def test_each_block_of_a_page_runs_and_prints_what_the_page_shows(rank, world_size, name):
    page, failed = names(), []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for block in pages.blocks_of(pages.ROOT / name):
            if block.language not in pages.PYTHON:
                continue
            if block.reason or any(importlib.util.find_spec(each.partition(".")[0]) is None for each in block.needs):
                compile(block.code, block.place, "exec")
                continue
            try:
                printed = run(block, page)
            except Exception:
                failed.append(f"{block.place}\n{traceback.format_exc()}")
                continue
            if block.printed is not None and not pages.is_printed(block.printed, printed):
                failed.append(f"{block.place} shows\n{block.printed}and printed\n{printed}")
        os.chdir(pages.ROOT)
    assert not failed, "\n\n".join(failed)


@harness.on_every_rank(exactly=3, spoils=True)
def test_the_program_of_the_readme_prints_what_the_readme_says(rank, world_size):
    block, *_ = (each for each in pages.blocks_of(pages.ROOT / "README.md") if each.language in pages.PYTHON)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block.code.replace("torch.distributed.destroy", "#"), block.place, "exec"), {"__name__": "page"})
    shown = re.findall(r"^rank (\d): first weight (\S+)$", (pages.ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(shown) == world_size
    [(number, weight)] = re.findall(r"^rank (\d): first weight (\S+)$", printed.getvalue(), re.MULTILINE)
    assert abs(float(weight) - float(dict(shown)[number])) < 2e-6  # torch's products differ by instruction set


@harness.on_every_rank(exactly=1, spoils=True)
def test_the_examples_of_docstrings_run_and_print_what_they_show(rank, world_size):
    attempted = 0
    for path in sorted((pages.ROOT / "python").rglob("*.py")):
        if ">>> " not in path.read_text() or path.stem == "accelerate" and not importlib.util.find_spec("accelerate"):
            continue
        name = ".".join(path.relative_to(pages.ROOT / "python").with_suffix("").parts).removesuffix(".__init__")
        module, printed = importlib.import_module(name), io.StringIO()
        runner = doctest.DocTestRunner(verbose=False)
        for example in doctest.DocTestFinder().find(module):
            runner.run(example, out=printed.write)
        assert runner.summarize(verbose=False).failed == 0, printed.getvalue()
        attempted += runner.tries
    assert attempted > 60
