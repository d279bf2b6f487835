"""meta_loading: transformers' from_pretrained leaves a model's tensors in their files until the model is wrapped.

transformers' own code loads: its names, its conversions and its casts run on stored tensors (formats/stored.py), which
have a shape and no memory. What the files lack, and buffers, it makes and initialises as always. A program may then tie,
rename, copy and add to the model, as PEFT does; wrap reads what each rank keeps.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from .._engine import Error
from ..formats.lazy import Lazy
from ..formats.stored import Stored, StoredOnDemand, replaying
from .after_import import after_import

_MODELS = "transformers.modeling_utils"
#: static methods of its PreTrainedModel
_LOAD, _FINISH = "_load_pretrained_model", "_finalize_model_loading"
_ARGUMENTS = ["model", "state_dict", "checkpoint_files", "load_config"]
_logger = logging.getLogger("shardwright")
#: contexts that a program entered; and those that it did not ask for, with objects that keep them while they are alive
_count = _automatic = 0


@contextlib.contextmanager
def meta_loading() -> Iterator[None]:
    """Return a context in which transformers' from_pretrained leaves tensors in their files. Also a decorator.

    A model that is loaded inside has shapes, dtypes and devices as always, and its values stay in the files: sw.wrap,
    sw.fully_shard, sw.DistributedDataParallel and the integrations read each rank's part as they wrap it, at any stage.
    PEFT's adapters, an optimizer and tied or copied modules may be made before.

    Raises
    ------
    Error
        As from_pretrained is called: for transformers before version 5. Later, for an operation that needs values of a
        model that is not wrapped, such as its forward; sw.materialize reads a model whole.

    Notes
    -----
    Not collective: a rank that cannot read the folder raises in its from_pretrained. Call it alike on all ranks. Tensors
    that the files lack are made and initialised whole on each rank, from its random stream; wrap then takes rank 0's.
    Quantised models, several devices (`device_map`) and `state_dict=` load as without this context.

    Examples
    --------
    >>> import shardwright as sw
    >>> with sw.meta_loading():
    ...     pass  # model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    """
    global _count
    _install()
    _count += 1
    try:
        yield
    finally:
        _count -= 1


@contextlib.contextmanager
def automatic_loading() -> Iterator[None]:
    """Return meta_loading() for a program that did not ask for it: what needs values reads them, and nothing is refused."""
    global _automatic
    _install()
    _automatic += 1
    try:
        yield
    finally:
        _automatic -= 1


def keep_loading(holder: Any) -> None:
    """Be inside automatic_loading() as long as `holder`, a program's arguments or its accelerator, is alive."""
    context = automatic_loading()
    context.__enter__()
    weakref.finalize(holder, context.__exit__, None, None, None).atexit = False


@functools.cache
def _install() -> None:
    after_import(_MODELS, _change)


def _change(module: Any) -> None:
    kind = module.PreTrainedModel
    load, finish = kind.__dict__.get(_LOAD), kind.__dict__.get(_FINISH)
    if not all(isinstance(each, staticmethod) for each in (load, finish)):
        return _refuse(kind)
    load, finish = load.__func__, finish.__func__
    if list(inspect.signature(load).parameters)[:4] != _ARGUMENTS:
        return _refuse(kind)

    @functools.wraps(load)
    def load_stored(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not (_count or _automatic) or state_dict is not None or not checkpoint_files or not _is_plain(load_config):
            return load(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        found = _stored(checkpoint_files, Stored if _count else StoredOnDemand)
        with replaying():
            result = load(model, found, checkpoint_files, load_config, *args, **kwargs)
        _tell_whole(model)
        return result

    @functools.wraps(finish)
    def finish_stored(*args: Any, **kwargs: Any) -> Any:
        with replaying():  # it compares tied tensors
            return finish(*args, **kwargs)

    for name, made in ((_LOAD, load_stored), (_FINISH, finish_stored)):
        setattr(kind, name, staticmethod(made))
    return None


def _refuse(kind: Any) -> None:
    """Let from_pretrained raise inside meta_loading(), and load whole inside automatic_loading()."""
    load, said = kind.from_pretrained.__func__, list[bool]()

    @functools.wraps(load)
    def refuse(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if _count:
            import transformers

            raise Error(
                f"sw.meta_loading() needs transformers 5 or later, found {transformers.__version__}, which makes rotary buffers that no later "
                "call can make again: upgrade it, or load without sw.meta_loading()"
            )
        if _automatic and not said:
            said.append(True)
            _logger.warning(
                "zero=3: each rank loads models whole, since only transformers 5 and later can leave tensors in their files"
            )
        return load(cls, *args, **kwargs)

    kind.from_pretrained = classmethod(refuse)


def _is_plain(load_config: Any) -> bool:
    devices = set((getattr(load_config, "device_map", None) or {}).values())
    return getattr(load_config, "hf_quantizer", None) is None and len(devices) <= 1 and "disk" not in devices


def _stored(files: Any, kind: type[Stored]) -> dict[str, Any]:
    from ..formats.places import stored_tensors  # imports torch.distributed.checkpoint

    found: dict[str, Any] = {}
    for file in files:
        found |= stored_tensors(file)
    return {name: kind.of(each) if isinstance(each, Lazy) else each for name, each in found.items()}


def _tell_whole(model: torch.nn.Module) -> None:
    """Log which tensors each rank must read whole."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    whole = [(name, each.what) for name, each in named.items() if isinstance(each, Stored) and each.boxes is None]
    if whole:
        _logger.warning(
            "sw.meta_loading(): ranges of bytes cannot express transformers' conversion of %d tensors, so each rank will read each of them "
            "whole, one after another: %r (%s) is the first",
            *(len(whole), *whole[0]),
        )
