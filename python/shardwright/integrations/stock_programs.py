"""Training of unmodified accelerate and transformers Trainer programs with shardwright.

`install` replaces their Accelerator and Trainer by our classes, in this process, before the program imports either.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from .after_import import after_import
from .settings import VARIABLE, read_settings

_TRAINER = "transformers.trainer"


class CannotRun(Exception):
    """Options or a program that cannot be run; one sentence for the user."""


def install(text: str) -> None:
    """Let programs that start in this process use our classes, with the options in `text`; see read_settings."""
    read_settings(text)
    os.environ[VARIABLE] = text
    import accelerate.accelerator

    from .accelerate import Accelerator

    accelerate.Accelerator = accelerate.accelerator.Accelerator = Accelerator
    after_import(_TRAINER, _replace_trainer)


def _replace_trainer(module: Any) -> None:
    from .accelerate import Accelerator
    from .trainer_mixins import TrainerMixin

    stock = module.Trainer
    if not issubclass(stock, TrainerMixin):  # otherwise the program imports our class itself
        ours = type(stock.__name__, (TrainerMixin, stock), {"__doc__": stock.__doc__, "__module__": stock.__module__})
        module.Trainer = sys.modules["transformers"].Trainer = ours  # type: ignore[attr-defined]
    module.Accelerator = Accelerator


def run_program(text: str, command: Sequence[str]) -> None:
    """Run `program.py arguments...` or `-m module arguments...` with our classes. Raise CannotRun before it starts."""
    try:
        read_settings(text)
        _check_program(command)
        install(text)
    except (ValueError, TypeError, OSError) as error:
        raise CannotRun(f"options {text!r}: {error}") from None
    except ModuleNotFoundError as error:
        raise CannotRun(f"{error.name} is not installed, and this command needs it: pip install {error.name}") from None
    if command[0] == "-m":
        sys.argv = list(command[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
        runpy.run_path(command[0], run_name="__main__")


def _check_program(command: Sequence[str]) -> None:
    name = command[0]
    if name == "-m":
        top = command[1].split(".")[0]
        here = importlib.machinery.PathFinder.find_spec(top, [os.getcwd()])
        if here is None and importlib.util.find_spec(top) is None:
            raise CannotRun(f"no module named {command[1]!r}: pass its name as `python -m` takes it")
        return
    main = os.path.join(name, "__main__.py") if os.path.isdir(name) else name
    if not os.access(main, os.R_OK):
        why = "cannot be read" if os.path.lexists(main) else "does not exist" if main == name else "has no __main__.py"
        raise CannotRun(f"program {name!r} {why}: pass its path behind the options, as in `zero2 program.py`")
