"""Promises that a step on a GPU keeps beside its bits: what it saves, scales, recomputes, refuses, and never waits for."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import shardwright as sw
import torch

from .correct import Given, Product, gradients, train, whole, wrapped
from .report import Row, row

_STEPS = 2


def _wrapped(place: Any, **options: Any) -> tuple[Any, Any]:
    return wrapped(place.put(Given()), **options)


def _steps(place: Any, model: Any, optimizer: Any, first: int) -> None:
    train(model, optimizer, 0, place.device, range(first, first + _STEPS))


def _same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _save_and_load(place: Any) -> bool:
    """Restore at another stage and train on."""
    model, optimizer = _wrapped(place, zero=1)
    with tempfile.TemporaryDirectory() as folder:
        _steps(place, model, optimizer, 0)
        with sw.Checkpointer(folder, model, optimizer) as saves:
            saves.save(_STEPS)
        _steps(place, model, optimizer, _STEPS)
        other, others = _wrapped(place, zero=3)
        with sw.Checkpointer(folder, other, others) as saves:
            saves.restore()
        _steps(place, other, others, _STEPS)
    return _same(whole(other, others), whole(model, optimizer))


def _offload(place: Any) -> bool:
    """Step on the host, with the bits of a step on the GPU."""
    found = []
    for options in ({}, {"offload": "cpu"}):
        model, optimizer = _wrapped(place, zero=1, **options)
        _steps(place, model, optimizer, 0)
        found.append(whole(model, optimizer))
    return _same(*found)


def _loss_scale(place: Any) -> bool:
    """Skip a step whose gradients overflow, and unscale the others."""
    model, optimizer = _wrapped(place, zero=2)
    scaler = torch.amp.GradScaler(place.device.type, init_scale=8.0, growth_interval=100)
    for step in range(3):
        given = gradients(0, step, place.device)
        if step == 1:
            given[0].fill_(float("inf"))
        scaler.scale(model(given)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler.get_scale() == 4.0


def _recomputed(place: Any) -> bool:
    found = []
    for is_recomputed in (False, True):
        model, optimizer = _wrapped(place, zero=3, units=Product)
        if is_recomputed:
            sw.checkpoint_units(model)
        _steps(place, model, optimizer, 0)
        found.append(whole(model, optimizer))
    return _same(*found)


def _side_stream(place: Any) -> bool:
    """Train on a stream beside torch's default one."""
    found = []
    for stream in (contextlib.nullcontext, place.side_stream):
        model, optimizer = _wrapped(place, zero=2)
        with stream():
            _steps(place, model, optimizer, 0)
        found.append(whole(model, optimizer))
    return _same(*found)


def _compiled(place: Any) -> bool:
    """Train with compiled blocks. The backend needs no compiler on the machine."""
    found = []
    for is_compiled in (False, True):
        model, optimizer = _wrapped(place, zero=3, units=Product)
        for each in model.module.parts if is_compiled else ():
            each.compile(backend="aot_eager")
        _steps(place, model, optimizer, 0)
        found.append(whole(model, optimizer))
    return _same(*found)


def _no_wait(place: Any) -> bool:
    """Step at every stage without a wait of the host, torch's or ours."""
    for zero in (0, 1, 2, 3):
        model, optimizer = _wrapped(place, zero=zero)
        _steps(place, model, optimizer, 0)
        given = gradients(0, 9, place.device)
        with place.without_waits():
            model(given).backward()
            optimizer.step()
            optimizer.zero_grad()
    return True


def _capture(place: Any) -> bool:
    """Refuse a forward inside a capture, and train on afterwards."""
    model, optimizer = _wrapped(place, zero=1)
    _steps(place, model, optimizer, 0)
    given = gradients(0, 9, place.device)
    is_refused = False
    with place.capture():
        try:
            model(given)
        except NotImplementedError:
            is_refused = True
    _steps(place, model, optimizer, _STEPS)
    return is_refused


_PROMISES: dict[str, Callable[[Any], bool]] = {
    "save and load": _save_and_load,
    "offload": _offload,
    "GradScaler": _loss_scale,
    "checkpoint_units": _recomputed,
    "side stream": _side_stream,
    "compiled blocks": _compiled,
    "no host wait": _no_wait,
    "capture refused": _capture,
}


def promises(place: Any, rank: int, world_size: int) -> Iterator[Row]:
    """Try each promise; one that raises does not keep the others from their rows."""
    for name, keeps in _PROMISES.items():
        try:
            is_kept = keeps(place)
        except Exception as error:
            yield row(name, "failed", note=f"{type(error).__name__}: {error}")
        else:
            yield row(name, "ok" if is_kept else "wrong")
