"""Laws of the options' types: the keywords of each call are the fields of Options, listed with the basic ones first; mypy accepts
right programs and refuses wrong ones."""

import inspect
import os
import re
import typing
from pathlib import Path

import pytest
import shardwright as sw
from shardwright.options import keywords
from shardwright.options.options import BASIC_COUNT, FIELDS, Options

ROOT = Path(__file__).resolve().parents[1]
LONG = os.environ.get("SW_TEST_LONG") == "1"
BASIC = (
    "zero share_parameters precision compress offload units clip_grad_norm partition process_group device_mesh".split()
)
CALLS = {
    "wrap": (sw.wrap, keywords.WrapOptions, ()),
    "DistributedDataParallel": (
        sw.DistributedDataParallel,
        keywords.DDPOptions,
        ("clip_grad_norm", "partition", "step_in_backward"),
    ),
    "fully_shard": (
        sw.fully_shard,
        keywords.FullyShardOptions,
        ("zero", "share_parameters", "clip_grad_norm", "partition", "step_in_backward", "device"),
    ),
}


def test_programs_can_read_the_types():
    hints = typing.get_type_hints(sw.Options)
    assert list(hints) == list(FIELDS) and typing.get_args(hints["zero"]) == (0, 1, 2, 3)
    typing.get_type_hints(sw.DistributedDataParallel.__init__)
    assert "device" not in inspect.signature(sw.fully_shard).parameters
    assert inspect.signature(sw.fully_shard).parameters["broadcast_buffers"].default is False
    shown = inspect.signature(sw.wrap).parameters
    assert shown["zero"].annotation == "Literal[0, 1, 2, 3]" and shown["gather"].annotation == "Literal['int8'] | None"


#: a statement, and the text of mypy's complaint; empty for a right one
STATEMENTS = [
    ("model, optimizer = sw.wrap(module, optimizer, zero=2, compress=sw.Int8(), partition='tensor')", ""),
    ("sw.wrap(module, precision={'head': 'bf16'}, units=[torch.nn.Linear], offload={'parameters': 'cpu'})", ""),
    ("sw.wrap(module, init=True, weights='folder', mixed_precision=None, timeout_s=60, zero=3)", ""),
    ("sw.wrap(module, **settings)", ""),
    ("sw.wrap(module, compress='int8')", "No overload variant"),
    ("sw.wrap(module, compres='auto')", "No overload variant"),
    ("sw.wrap(module, zero='2')", "No overload variant"),
    ("sw.wrap(module, zero=4)", "No overload variant"),
    ("sw.wrap(module, precision='bfloat16')", "No overload variant"),
    ("sw.DistributedDataParallel(module, bucket_cap_mb=1, zero=1, units='size', check_every=10)", ""),
    ("sw.DistributedDataParallel(module, compress='int8')", "incompatible type"),
    ("sw.DistributedDataParallel(module, chek_every=1)", 'Unexpected keyword argument "chek_every"'),
    ("sw.DistributedDataParallel(module, zero='1')", "incompatible type"),
    ("sw.DistributedDataParallel(module, partition='flat')", 'Unexpected keyword argument "partition"'),
    ("sw.fully_shard([module], reshard_after_forward=2, ignored_params=None, gather='int8', init=True)", ""),
    ("sw.fully_shard(module, gather='int4')", "No overload variant"),
    ("sw.fully_shard(module, zero=3)", "No overload variant"),
    ("sw.Checkpointer('runs/a', module, optimizer, keep_last=3, best='max', snapshot='lazy', on_busy='skip')", ""),
    ("sw.Checkpointer('runs/a', module, best='largest')", "incompatible type"),
    ("sw.Checkpointer('runs/a', module, keep=3)", 'Unexpected keyword argument "keep"'),
    ("sw.Options(zero=2, compress=sw.Fp16(), write_guard=None)", ""),
    ("sw.Options(reduce='avg')", "incompatible type"),
]
#: these need torch's types
STATEMENTS += [
    ("sw.wrap(module, optimizer, zero=1).forward(1)", '"tuple[DistributedDataParallel, Optimizer]" has no attribute'),
    ("sw.wrap(module, device_mesh='dp')", "No overload variant"),
    ("sw.fully_shard(module, mesh=torch.distributed.device_mesh.init_device_mesh('cpu', (2, 2)))", ""),
    ("sw.wrap(module, groups={'*.experts': torch.distributed.device_mesh.init_device_mesh('cpu', (2,))})", ""),
] * LONG
PROGRAM = """\
from typing import Any

import shardwright as sw
import torch

module: torch.nn.Module
optimizer: torch.optim.Optimizer
settings: dict[str, Any]
"""
#: The quick form reads neither torch, whose names are then Any, nor what the calls do
SETTINGS = """\
[mypy]
follow_imports = silent
[mypy-torch.*]
follow_imports = skip
[mypy-shardwright.*]
follow_imports = skip
[mypy-shardwright,shardwright.options.*,shardwright.wrapping,shardwright.parallel.ddp,shardwright.parallel.fully_shard]
follow_imports = silent
[mypy-shardwright.checkpoint,shardwright.checkpoint.checkpointer,shardwright.comm.waits]
follow_imports = silent
"""


def test_keywords_are_the_fields_of_options_in_order_and_with_their_types():
    types = {name: each.__forward_arg__ for name, each in keywords.OptionFields.__annotations__.items()}
    assert types == {name: Options.__annotations__[name] for name in FIELDS}
    assert list(types) == list(FIELDS) and list(FIELDS)[:BASIC_COUNT] == BASIC


@pytest.mark.parametrize("name", CALLS)
def test_a_call_shows_and_takes_each_option_with_its_default_basic_ones_first(name):
    call, known, refused = CALLS[name]
    shown = {key: each for key, each in inspect.signature(call).parameters.items() if each.kind == each.KEYWORD_ONLY}
    by_position = set(inspect.signature(call).parameters) - set(shown)
    assert {*shown, *by_position} >= {*FIELDS} - {*refused} and not {*shown} & {*refused}
    ours = [key for key in shown if key in BASIC]
    assert list(shown)[: len(ours)] == ours == [key for key in BASIC if key in ours]
    typed = set(known.__annotations__)
    assert typed == set(shown) if name != "DistributedDataParallel" else typed == {*FIELDS} - by_position - {*refused}
    others = {"reshard_after_forward", "ignored_params"} | ({"broadcast_buffers"} if name == "fully_shard" else set())
    for key in {*shown} & {*FIELDS} - others:
        assert shown[key].default == getattr(Options, key)


def test_help_lists_ten_basic_options_and_then_the_others():
    for text in (sw.wrap.__doc__, Options.__doc__):
        basic, expert = text.partition("    Raises\n")[0].split("    Other Parameters\n")
        names = [[name for line in re.findall(r"(?m)^    ([a-z_, ]+) : ", part) for name in line.split(", ")]
                 for part in (basic, expert)]  # fmt: skip
        assert [name for name in names[0] if name in FIELDS] == BASIC
        assert [name for name in names[1] if name in FIELDS and name not in BASIC] == list(FIELDS)[BASIC_COUNT:]


def test_mypy_accepts_right_programs_and_refuses_wrong_ones(tmp_path, monkeypatch):
    api = pytest.importorskip("mypy.api")
    (tmp_path / "mypy.ini").write_text("[mypy]\nfollow_imports = silent\n" if LONG else SETTINGS)
    (tmp_path / "program.py").write_text(PROGRAM + "".join(f"{statement}\n" for statement, _ in STATEMENTS))
    monkeypatch.setenv("MYPYPATH", str(ROOT / "python"))
    monkeypatch.chdir(tmp_path)
    options = ["--config-file", "mypy.ini", "--cache-dir", os.devnull, "--no-error-summary", "--hide-error-context"]
    out, err, _ = api.run([*options, "program.py"])
    assert err == ""
    found = {int(line): text for line, text in re.findall(r"(?m)^program\.py:(\d+): error: (.*)$", out)}
    first = PROGRAM.count("\n") + 1
    for line, (statement, complaint) in enumerate(STATEMENTS, first):
        assert bool(complaint) == (line in found) and complaint in found.get(line, ""), (statement, found.get(line))
    assert set(found) <= set(range(first, first + len(STATEMENTS)))
