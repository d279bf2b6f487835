"""Observers of a Checkpointer: programs outside of the package that watch or disturb a run, such as `shardwright chaos`."""

from __future__ import annotations

import importlib
import os
from typing import Any, Protocol

#: names of modules with commas; each has observer_of(model)
VARIABLE = "SHARDWRIGHT_OBSERVERS"


class Observer(Protocol):
    """The events of a run that a Checkpointer reports, on each rank."""

    def on_save(self, step: int) -> None:
        """Step `step` ended: save(step) was called, for a step that is saved or one that is not."""

    def on_restore(self, step: int) -> None:
        """restore() succeeded; the next step is `step`."""

    def on_close(self) -> None:
        """close() was called, for the first time."""


def observers_of(model: Any) -> list[Observer]:
    """Return the observers that the modules named in VARIABLE have for `model`; a module's observer_of() may return None."""
    found = []
    for name in filter(None, os.environ.get(VARIABLE, "").split(",")):
        try:
            observer_of = importlib.import_module(name.strip()).observer_of
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{VARIABLE}={os.environ[VARIABLE]}: {error}") from error
        found.append(observer_of(model))
    return [each for each in found if each is not None]
