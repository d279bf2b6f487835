"""Laws of a Checkpointer's observers: modules named in SHARDWRIGHT_OBSERVERS hear of each save, restore and close."""

from __future__ import annotations

import pytest
import shardwright as sw
import torch
from shardwright.checkpoint.observers import VARIABLE

HEARS = """
heard = []

class Observer:
    def on_save(self, step): heard.append(("save", step))
    def on_restore(self, step): heard.append(("restore", step))
    def on_close(self): heard.append(("close",))

def observer_of(model): return Observer()
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    for name, text in (("hears", HEARS), ("has_none", "def observer_of(model): return None"), ("no_function", "")):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_observers_hear_of_saves_restores_and_the_end(modules, monkeypatch):
    monkeypatch.setenv(VARIABLE, "hears,has_none")
    with sw.Checkpointer(modules / "runs", torch.nn.Linear(2, 2)) as checkpoints:
        assert checkpoints.restore() == 0
        assert [checkpoints.save(step, every=2) for step in (0, 1)] == [False, True]
    checkpoints.close()
    import hears

    assert hears.heard == [("restore", 0), ("save", 0), ("save", 1), ("close",)]


@pytest.mark.parametrize("name", ["no_such_module", "no_function"])
def test_a_module_that_is_no_observer_is_named(modules, monkeypatch, name):
    monkeypatch.setenv(VARIABLE, name)
    with pytest.raises(ValueError, match=f"{VARIABLE}={name}: .*'{name}'"):
        sw.Checkpointer(modules / "runs", torch.nn.Linear(2, 2))
