"""Laws of options outside a program: a word, a list, a file and a variable mean the same arguments; anything else is an
error; `shardwright run` runs a program with our Accelerator.
"""

import json
import os
import subprocess
import sys

import pytest
import shardwright as sw

pytest.importorskip("accelerate", reason="an optional extra")

from shardwright.integrations.settings import chosen, read_settings
from shardwright_tools.cli import main


def test_texts_and_files_stand_for_arguments(tmp_path, monkeypatch):
    assert read_settings("zero2") == {"zero": 2}
    expected = {"zero": 3, "compress": sw.Int8(), "wrap_options": {"share_parameters": False, "bucket_cap_mb": 2}}
    assert read_settings("zero=3, compress=int8, share_parameters=false, bucket_cap_mb=2") == expected
    plain = {"zero": 3, "compress": "int8", "share_parameters": False, "bucket_cap_mb": 2}
    for name, text in (
        ("a.json", json.dumps(plain)),
        ("b.yaml", "\n".join(f"{k}: {json.dumps(v)}" for k, v in plain.items())),
    ):
        (tmp_path / name).write_text(text)
        assert read_settings(str(tmp_path / name)) == expected
    for text, kind, words in [
        ("zero4", ValueError, "zero must be 0, 1, 2 or 3, got 4"),
        ("zero=4", ValueError, "zero must be 0, 1, 2 or 3"),
        ("zer=2", TypeError, "did you mean 'zero'"),
        ("compress=int3", ValueError, "compress must be one of fp16"),
    ]:
        with pytest.raises(kind, match=words):
            read_settings(text)
    (tmp_path / "c.json").write_text("[2]")
    with pytest.raises(ValueError, match="must hold a mapping, got list"):
        read_settings(str(tmp_path / "c.json"))
    given = dict(compress=None, partition="auto", wrap_options=None)
    assert chosen("", None, **given) == {**given, "zero": 0}
    monkeypatch.setenv("SHARDWRIGHT_OPTIONS", "zero=3,partition=flat")
    assert chosen("", None, **given) == {**given, "zero": 3, "partition": "flat"}
    assert chosen("zero1", None, **given)["zero"] == 1 and chosen("zero1", 0, **given) == {**given, "zero": 0}


def test_run_takes_a_module_with_options_of_the_environment(tmp_path, monkeypatch, capsys):
    from shardwright.integrations import stock_programs

    given = []
    monkeypatch.setattr(stock_programs, "run_program", lambda text, command: given.append((text, command)))
    monkeypatch.setenv("SHARDWRIGHT_OPTIONS", "zero1")
    module = ["-m", "package.module", "--its", "own", "-m"]
    for words, expected in [
        (module, ("zero1", module)),
        (["zero2", *module], ("zero2", module)),
        (["-mpackage.module", "own"], ("zero1", ["-m", "package.module", "own"])),
        (["program.py", "-m", "x"], ("zero1", ["program.py", "-m", "x"])),
    ]:
        assert main(["run", *words]) == 0
        assert given.pop() == expected
    for words in ([], ["-m"], ["zero2"], ["zero2", "-m"]):
        assert main(["run", *words]) == 2 and "no program given" in capsys.readouterr().err
    monkeypatch.delenv("SHARDWRIGHT_OPTIONS")
    assert main(["run", *module]) == 2 and "no options given: pass them before -m, as" in capsys.readouterr().err
    assert not given


def test_run_puts_our_accelerator_in_the_place_of_the_stock_one(tmp_path, monkeypatch, capsys, caplog):
    import accelerate
    import accelerate.accelerator
    from accelerate.state import AcceleratorState, GradientState
    from shardwright.integrations.accelerate import Accelerator

    for home in (accelerate, accelerate.accelerator):
        monkeypatch.setattr(home, "Accelerator", home.Accelerator)  # put back afterwards
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    monkeypatch.setenv("SHARDWRIGHT_OPTIONS", "")
    monkeypatch.delenv("RANK", raising=False)
    program = tmp_path / "stock.py"
    program.write_text(
        "import sys\nfrom accelerate import Accelerator\na = Accelerator(cpu=True)\nprint(type(a).__module__, a.zero, sys.argv[1:])\n"
    )
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        assert main(["run", "zero3", str(program), "--its", "own"]) == 0
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    assert capsys.readouterr().out == f"{Accelerator.__module__} 3 ['--its', 'own']\n"
    assert "accelerate has started one process, which trains as one rank" in caplog.text
    monkeypatch.setenv("SHARDWRIGHT_OPTIONS", "zero1")
    try:
        assert main(["run", str(program), "more"]) == 0
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    assert capsys.readouterr().out == f"{Accelerator.__module__} 1 ['more']\n"
    assert main(["run", "zero3"]) == 2
    monkeypatch.delenv("SHARDWRIGHT_OPTIONS")
    assert main(["run", str(program)]) == 2 and "no options given: pass them before" in capsys.readouterr().err


TRANSFORMERS = """
import dataclasses
def __getattr__(name):
    if name != "Trainer":
        raise AttributeError(name)
    import importlib
    return importlib.import_module("transformers.trainer").Trainer
@dataclasses.dataclass
class TrainingArguments: ...
"""
#: the second in a child
IMPORTS = """
import os
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
    from transformers import Trainer
else:
    from shardwright.integrations.transformers import Trainer as Ours
    from transformers import Trainer
    assert Trainer is Ours
print([each.__name__ for each in Trainer.__mro__])
"""


def test_run_puts_our_trainer_in_the_place_of_the_stock_one(tmp_path):
    """Whether a program imports ours before, or the stock one alone."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text(TRANSFORMERS)
    (tmp_path / "transformers" / "trainer.py").write_text("class Trainer: ...")
    program = tmp_path / "program.py"
    program.write_text(IMPORTS)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "shardwright", "run", "zero2", str(program)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    expected = str(["Trainer", "TrainerMixin", "Trainer", "object"])
    assert done.stdout.splitlines() == [expected] * 2, done.stdout + done.stderr
