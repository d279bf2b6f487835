"""Laws of the package: importing it is cheap and starts nothing. The doctor reports what it found, and its exit code
tells if all is well. No tensor that the package creates takes the program's default device or default dtype.
"""

import ast
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

PYTHON = Path(__file__).resolve().parents[1] / "python"
#: every file of both packages by its path below them, without .py
FILES = {
    str(file.relative_to(package).with_suffix("")): file
    for package in (PYTHON / "shardwright_tools", PYTHON / "shardwright")
    for file in sorted(package.rglob("*.py"))
}
LONG = os.environ.get("SW_TEST_LONG") == "1"
IMPORT_S_MAX = 0.1
HELP_S_MAX = 0.15
#: functions of torch that ask torch.set_default_device(), most of them torch.set_default_dtype(), where they are not told
MAKERS = {
    *("empty", "empty_strided", "empty_permuted", "zeros", "ones", "full", "arange", "eye", "linspace", "logspace"),
    *("rand", "randn", "randint", "randperm", "tensor", "as_tensor", "asarray", "scalar_tensor"),
}


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=150, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_costs_little_above_torch_and_starts_no_thread():
    """Importing costs little processor time. A first process compiles bytecode, as pip does; compiling costs more than
    the rest.

    The modules of sw.wrap are loaded at its first use.
    """
    code = """
import gc, os, time
import torch, torch.distributed, torch.nn.parallel
gc.collect()  # of torch's million objects: it takes longer than the import, and is due sooner or later
threads = len(os.listdir("/proc/self/task"))
start = time.process_time()
import shardwright
shardwright.wrap
print(time.process_time() - start, len(os.listdir("/proc/self/task")) - threads)
"""
    found = [run(code, PYTHONDONTWRITEBYTECODE="")]
    while len(found) < 4 and float(found[-1][0]) >= IMPORT_S_MAX:
        found.append(run(code, PYTHONDONTWRITEBYTECODE=""))
    assert min(float(seconds) for seconds, _ in found) < IMPORT_S_MAX, found
    assert {threads for _, threads in found} == {"0"}


def test_importing_loads_neither_compressors_nor_the_code_of_gpus():
    """What few programs use loads at its first use: a module costs half a millisecond, a frozen dataclass one."""
    code = "import sys, shardwright; shardwright.wrap; print(*(m for m in sys.modules if m.startswith('shardwright.')))"
    loaded = {each.removeprefix("shardwright.") for each in run(code)}
    assert "wrapping" in loaded
    late = ("compress.", "options.compressors", "gradients.device_", "parameters.device_", "parallel.backends.")
    assert [each for each in sorted(loaded) if each.startswith(late)] == []


def test_help_costs_little():
    """Return the processor time of a whole process, interpreter start included, with bytecode as above."""
    command = [sys.executable, "-m", "shardwright", "--help"]

    def processor_s():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
        subprocess.run(command, check=True, capture_output=True, timeout=60, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    found = [processor_s()]
    while len(found) < 4 and found[-1] >= HELP_S_MAX:
        found.append(processor_s())
    assert min(found) < HELP_S_MAX, found


def test_importing_and_help_need_no_torch():
    code = """
import contextlib, io, sys
import shardwright_tools.cli
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    shardwright_tools.cli.main(["--help"])
print("torch" in sys.modules)
"""
    assert run(code) == ["False"]


def test_training_on_the_cpu_asks_for_no_driver():
    """The package asks torch for no GPU: asking takes time with a GPU, warns with an old one, and makes GPUs unusable
    in a forked child.
    """
    code = """
import sys, tempfile
import torch
import shardwright as sw
asked = []
def spy(name):
    real = getattr(torch.cuda, name)
    def ask(*args):
        caller = sys._getframe(1).f_code.co_filename
        asked.extend([f"{name}-in-{caller}"] if "shardwright" in caller.split("/") else [])
        return real(*args)
    setattr(torch.cuda, name, ask)
for name in ("is_available", "device_count", "current_device", "init"):
    spy(name)
module = torch.nn.Linear(4, 4)
model, optimizer = sw.wrap(module, sw.optim.AdamW(module.parameters()), zero=2)
with tempfile.TemporaryDirectory() as folder, sw.Checkpointer(folder, model, optimizer) as checkpoints:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    checkpoints.save(0)
    checkpoints.wait()
    checkpoints.restore()
print("asked:", *asked)
"""
    assert run(code) == ["asked:"]


def test_the_doctor_succeeds_and_times_an_all_reduce_by_size():
    """What it prints without --json is tested of an installed wheel."""
    command = [sys.executable, "-m", "shardwright", "doctor", "--json", "--bench"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in json.loads(done.stdout)["bench"] if row["where"] == "processes"]
    assert len(rows) >= 5 and all(row["ranks"] >= 2 and row["gigabytes_a_second"] > 0 for row in rows)
    assert rows[-1]["seconds"] > rows[0]["seconds"]


def test_the_command_line_refuses_what_it_does_not_know():
    done = subprocess.run([sys.executable, "-m", "shardwright", "cure"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "doctor" in done.stderr


def test_an_engine_object_that_was_not_initialised_says_so():
    code = """
from shardwright import Error, _engine
empty = _engine.Reducer.__new__(_engine.Reducer)
for call in (empty.stats, empty.count_step, lambda: empty.gradient(0, []), lambda: empty.bucket(0), lambda: empty.hook(0)):
    try:
        call()
    except Error as error:
        print(str(error).replace(" ", "-"))
"""
    assert run(code) == ["the-reducer-was-not-initialised"] * 5


def of_defaults(text):
    """Return calls that create a tensor without naming both its device and its dtype."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    makers = [call for call in calls if ast.unparse(call.func) in {f"torch.{name}" for name in MAKERS}]
    return [
        f"{call.lineno}: {ast.unparse(call)}"
        for call in makers
        if not {"device", "dtype"} <= {word.arg for word in call.keywords}
    ]


def test_every_tensor_is_made_on_a_named_device_with_a_named_dtype():
    assert len(of_defaults("torch.empty(3)\ntorch.zeros(3, dtype=a)\ntorch.tensor(x, device=b)")) == 3
    assert of_defaults("torch.ones(3, dtype=a, device=b) + torch.empty_like(x) + x.new_empty(3)") == []
    found = {name: of_defaults(file.read_text()) for name, file in FILES.items()}
    assert {file: calls for file, calls in found.items() if calls} == {}


#: files that may name numpy -> reason
NUMPY = {
    "formats/tree": "values of the user's state",
    "checkpoint/state/content": "a generator that the program uses",
    "formats/lazy": "whether it is there",
    "formats/unpickle": "values of another program's pickle",
    "doctor/hosts": "torch's collectives of objects, in a check that trains nothing",
    "gradients/sharded_gradient": "the caller's own numpy()",
}


#: among them torch's collectives of objects
_GO_BY_NUMPY = ("numpy", "from_numpy", "__array__", "all_gather_object", "gather_object", "broadcast_object_list")


def of_numpy(text):
    """Return what needs numpy: its import, and torch's functions that go by it."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            yield from (each for each in modules if each.split(".")[0] == "numpy")
        elif isinstance(node, ast.Attribute) and node.attr in _GO_BY_NUMPY:
            yield node.attr


def test_the_package_needs_no_numpy():
    """torch is the only dependency, and works without numpy. A tensor's bytes are layout.memory.bytes_of()."""
    found = "import numpy.core as n\nfrom numpy import x\ny.numpy()\ntorch.from_numpy(x)"
    assert len(list(of_numpy(found))) == 4
    assert {name for name, file in FILES.items() if list(of_numpy(file.read_text()))} == NUMPY.keys()


#: reason why there is memory behind an address -> files that take one
ADDRESSES = {
    "memory that the package made": [
        *(
            "compress/device_exchange",
            "optim/device_clip",
            "optim/ownership",
        ),
        *(
            "compress/costs",
            "compress/state",
            "optim/diloco",
        ),
        *(
            "parameters/sharded_groups",
            "checkpoint/state/stored",
            "checkpoint/peers",
            "checkpoint/rows",
            "checkpoint/memory/buddies",
            "checkpoint/memory/image",
            "cli/ckpt",
            "convert/folders",
            "convert/model_files",
            "formats/lazy",
            "parameters/building",
            "formats/stored",
            "parallel/loading",
            "doctor/bench",
        ),
    ],
    "compared, not read": [
        *(
            "gradients/comm_hook",
            "optim/clip_grad",
            "parameters/gathered_unit",
            "parameters/drift",
            "parameters/gather_extensions",
            "parameters/materialize",
            "optim/offload",
            "parameters/read_guard",
            "parameters/sharded_parameter",
            "gradients/module_gradients",
        ),
        *("optim/sharded", "parameters/unshard_schedule"),
    ],
    "checked by layout/memory.py before": [
        *(
            "backend/device_link",
            "layout/memory",
            "parameters/step_gathers",
            "parameters/storage",
            "comm/process_group",
            "layout/param_table",
        ),
        *("checkpoint/state/content", "checkpoint/dcp", "checkpoint/device_staging", "checkpoint/restore/filling"),
        *("checkpoint/state/names", "checkpoint/memory/repeated", "checkpoint/samples", "checkpoint/slices"),
        "parallel/agreement/replica_check",
    ],
    "plain memory of the check's own": ["gpu_check/faults", "gpu_check/speed"],
    "of torch's own class, checked before": ["parallel/moved_tensors"],
}


def test_no_address_is_taken_of_a_tensor_that_may_have_no_memory():
    """A wrapper subclass, a fake or a freed tensor has the address 0. Reading there would end the process."""
    found = {
        name
        for name, file in FILES.items()
        if any(
            isinstance(node, ast.Attribute) and node.attr == "data_ptr"
            for node in ast.walk(ast.parse(file.read_text()))
        )
    }
    assert found == {name for names in ADDRESSES.values() for name in names}
