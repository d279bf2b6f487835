"""Wrappers inside a wrapped module: some stay active, the outer wrapper takes over the parameters of the others."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..._engine import Error
from ...torch_compat.foreign_wrappers import find_wrapper, is_ours


def _check_takeable(wrapper: Any, *, is_whole: bool) -> None:
    """Raise Error if an outer wrapper cannot take this one's parameters over. `is_whole`: there is no outer module."""
    if is_whole:
        raise Error("this module is wrapped already: pass sw.unwrap(module)")
    given = {"precision=": wrapper._precision, "compress=": wrapper._compress, "groups=": wrapper._options.groups}
    given["a communication hook"] = wrapper._comm_hooks
    for name, value in given.items():
        if value:
            raise Error(
                f"this module holds a wrapper with {name}, which a wrapper around it at zero >= 1 cannot take over: put sw.unwrap "
                "of it in its place"
            )


def find_inner(outer: Any, zero: int) -> tuple[list[Any], list[Any]]:
    """Return (inner wrappers that still average their own gradients, inner wrappers that this one takes over).

    Wrappers of zero=0 nest as torch's do. Otherwise the outermost wrapper has all parameters, so that one engine
    slices, clips and saves them, and inner wrappers only call their modules. Collective if they had engines.
    """
    foreign = find_wrapper(outer.module, outer._ignored_names())
    if foreign is not None:
        raise Error(
            f"this module holds a {foreign}, beside which no other wrapper averages: put its module in its place"
        )
    inner: list[Any] = [each for each in outer.module.modules() if isinstance(each, TorchDDP) and is_ours(each)]
    inner = [each for each in inner if not getattr(each, "_is_taken", False)]
    if not zero and not any(each._zero for each in inner):
        return inner, []
    for each in inner:
        _check_takeable(each, is_whole=each is outer.module)
    for each in inner:
        for replica in (each._replica, *each._parts):
            if replica is not None and not replica.retired:
                replica.retire(together=True)
        if each._replica is not None:
            each._retire.detach()  # the finalizer would keep the engines alive with the wrapper
        each._reset_engine()
        each._given_back = each._inner, each._is_around
    take(inner, outer)
    return [], inner


def take(inner: Iterable[Any], outer: Any) -> None:
    """Mark inner wrappers as taken over by `outer`: they then only call their modules."""
    for each in inner:
        each._inner, each._is_taken, each._is_around = [], True, True
        each._outer = weakref.ref(outer)


def give_back(inner: Iterable[Any]) -> None:
    """Undo take() if the outer wrapper could not be made. Each wrapper makes a new engine."""
    for each in inner:
        (each._inner, each._is_around), each._is_taken = each._given_back, False
