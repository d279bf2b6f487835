"""sw.metrics(): the scalars of a run, to a file, a tracker, a scrape or a function."""

from __future__ import annotations

import http.server
import importlib
import json
import logging
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from .._engine import Error
from ..comm import account
from . import watch
from .rings import LINKS, PHASES, AccountError, AccountFile, Row
from .verdict import shares

_logger = logging.getLogger("shardwright")
Scalars = Mapping[str, float]
#: what logs the scalars of a step, and what closes it
Tracker = tuple[Callable[[int, Scalars], object], Callable[[], object]]
Tokens = int | Callable[[int], int]
#: steps that a mean is of, at most
_MOST = 1000


def metrics(
    model: torch.nn.Module,
    *,
    tokens: Tokens | None = None,
    to: Iterable[str | Callable[[int, Scalars], object]] = (),
    every: int = 10,
    peak_flops: float | None = None,
) -> Metrics:
    """Give the scalars of each `every` steps to trackers, on rank 0. Does not communicate.

    Parameters
    ----------
    model : Module
        A wrapped module; its parameters count for the MFU.
    tokens : int or callable, optional
        Tokens of a rank in a step, or a function of the step's number.
    to : sequence
        "jsonl:PATH", "tensorboard:FOLDER", "wandb" or "wandb:PROJECT", "prometheus:PORT" or "prometheus:ADDRESS:PORT"
        (default address 127.0.0.1), or a callable that gets the step and a dict of floats.
    every : int
        Steps between two calls, from 1 on. Values are means over these steps.
    peak_flops : float, optional
        Operations per second that a rank can compute, for the MFU: 6 · parameters · tokens / seconds / peak.

    Returns
    -------
    Metrics
        Ends with close(), at the end of a `with`, or with the process.

    Raises
    ------
    ValueError
        For a tracker of unknown name, and for numbers out of range, on all ranks alike.
    Error
        Before any module was wrapped.

    Notes
    -----
    A tracker that is not installed, cannot begin or fails later is logged in one sentence and left out; training goes on.

    Examples
    --------
    >>> import torch, shardwright as sw
    >>> model = sw.wrap(torch.nn.Linear(4, 1))
    >>> with sw.metrics(model, tokens=4096, to=[print]):
    ...     pass
    """
    if isinstance(to, str):
        raise ValueError(f"metrics: to= takes a list of trackers, got the text {to!r}")
    targets = [
        (getattr(each, "__name__", repr(each)), _calling(each)) if callable(each) else _parsed(each) for each in to
    ]
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"metrics: every must be a whole number of steps from 1 on, got {every!r}")
    if peak_flops is not None and not peak_flops > 0:
        raise ValueError(f"metrics: peak_flops must be above 0 operations a second, got {peak_flops!r}")
    if tokens is not None and not callable(tokens) and (isinstance(tokens, (bool, str)) or tokens < 1):
        raise ValueError(f"metrics: tokens must be at least 1 a step, or a function of the step, got {tokens!r}")
    if account.own_rank() is None:
        raise Error("metrics needs a module that is wrapped: pass the module that sw.wrap returned")
    return Metrics(model, targets, tokens, every, peak_flops)


class Metrics:
    """The handle that sw.metrics() returns."""

    def __init__(
        self,
        model: torch.nn.Module,
        targets: list[tuple[str, Callable[[], Tracker]]],
        tokens: Tokens | None,
        every: int,
        peak_flops: float | None,
    ) -> None:
        self._tokens, self._peak = tokens, peak_flops
        self._parameters = sum(each.shape.numel() for each in model.parameters())
        self._trackers: list[tuple[str, Tracker]] = []
        self._end: Callable[[], None] = lambda: None
        self._added: dict[str, float] = {}
        if account.own_rank() != 0:
            return
        for name, make in targets:
            try:
                self._trackers.append((name, make()))
            except Exception as error:
                _logger.warning("metrics: %s is left out: %s", name, _reason(error))
        self._end = watch.subscribe(every, self._log, self._throughput)

    def _throughput(self, rows: list[Row]) -> tuple[float | None, float | None]:
        seconds, tokens = sum(row.total_ns for row in rows) * 1e-9, self._tokens
        if tokens is None or seconds <= 0:
            return None, None
        count = sum(tokens(_number(row)) for row in rows) if callable(tokens) else tokens * len(rows)
        mfu = None if self._peak is None else 6 * self._parameters * count / seconds / self._peak
        return count * account.own_world_size() / seconds, mfu

    def _scalars(self, rows: list[Row]) -> dict[str, float]:
        scalars = means(rows)
        found = zip(("tokens_per_s", "mfu"), self._throughput(rows))
        return scalars | {name: value for name, value in found if value is not None}

    def _log(self, rows: list[Row]) -> None:
        scalars, step = self._scalars(rows), _number(rows[-1])
        for name, tracker in list(self._trackers):
            try:
                tracker[0](step, {**scalars, **self._added})
            except Exception as error:
                self._trackers.remove((name, tracker))
                _logger.warning("metrics: %s failed at step %d and is left out: %s", name, step, _reason(error))

    def add(self, **scalars: float) -> None:
        """Add scalars of the program, such as loss=, to those that trackers get; the last value of a name counts."""
        self._added.update({name: float(value) for name, value in scalars.items()})

    def close(self) -> None:
        """End; each tracker writes what it holds."""
        self._end()
        for name, (_, close) in self._trackers:
            try:
                close()
            except Exception as error:
                _logger.warning("metrics: %s did not close: %s", name, _reason(error))
        self._trackers = []

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def means(rows: list[Row]) -> dict[str, float]:
    """Return the means of a step over rows, in seconds and bytes, and the shares of what bounds it."""
    each = [row.as_dict() for row in rows]
    names = ("step_s", *(f"{phase}_s" for phase in PHASES), "exposed_communication_s", "own_s")
    scalars = {name: statistics.fmean(row[name] for row in each) for name in (*names, *(f"{x}_bytes" for x in LINKS))}
    return scalars | {f"share_{name}": share for name, share in shares(rows).items()}


class Recent:
    """The scalars of the steps since they were last asked for, for a framework's own trackers; none but on rank 0."""

    def __init__(self) -> None:
        self._step = 0

    def __call__(self) -> dict[str, float]:
        path = account.own_file() if account.own_rank() == 0 else None
        try:
            rows = [] if path is None else AccountFile(path).rows(_MOST, after=self._step)
        except (OSError, AccountError) as error:
            _logger.debug("no scalars for trackers: %s", error)
            return {}
        if not rows:
            return {}
        self._step = rows[-1].step
        return {f"shardwright/{name}": value for name, value in means(rows).items()}


def _number(row: Row) -> int:
    """Return the number of a row's step in the training, over restarts."""
    return row.step + account.steps_before


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed (pip install {error.name})"
    return f"{type(error).__name__}: {error}"


def _calling(function: Callable[[int, Scalars], object]) -> Callable[[], Tracker]:
    return lambda: (function, lambda: None)


def _parsed(text: Any) -> tuple[str, Callable[[], Tracker]]:
    name, _, rest = str(text).partition(":")
    port = rest.rpartition(":")[2]
    if name not in _MAKERS or (not rest and name != "wandb"):
        raise ValueError(
            "metrics: to= takes 'jsonl:PATH', 'tensorboard:FOLDER', 'wandb', 'wandb:PROJECT', 'prometheus:PORT', "
            f"'prometheus:ADDRESS:PORT' or a callable, got {text!r}"
        )
    if name == "prometheus" and not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"metrics: {text!r} must end with a port from 0 to 65535")
    return name, lambda: _MAKERS[name](rest)


def _jsonl(path: str) -> Tracker:
    file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115, the tracker closes it

    def log(step: int, scalars: Scalars) -> None:
        file.write(json.dumps({"step": step, "time": time.time(), **scalars}) + "\n")

    return log, file.close


def _tensorboard(folder: str) -> Tracker:
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(folder)

    def log(step: int, scalars: Scalars) -> None:
        for name, value in scalars.items():
            writer.add_scalar(f"shardwright/{name}", value, step)

    return log, writer.close


def _wandb(project: str) -> Tracker:
    """Log to the program's run if it has one, else to one of its own, which goes on with that of the checkpoint restored last."""
    wandb = importlib.import_module("wandb")
    own: list[Any] = []

    def begin() -> None:
        if wandb.run is None:
            run = account.tracker_runs.get("wandb") or uuid.uuid4().hex[:8]
            own.append(wandb.init(project=project or None, id=run, resume="allow"))

    def log(step: int, scalars: Scalars) -> None:
        begin()
        if own:
            account.tracker_runs["wandb"] = own[-1].id
        wandb.run.log({"shardwright/step": step, **{f"shardwright/{name}": value for name, value in scalars.items()}})

    def close() -> None:
        if own:
            own[-1].finish()
            account.tracker_runs.clear()  # a later training of this process has its own

    if not account.awaits_runs:
        begin()
    return log, close


def _prometheus(place: str) -> Tracker:
    """Serve the last scalars in Prometheus' text format, in a thread of its own."""
    address, _, port = place.rpartition(":")
    last: dict[str, float] = {}

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer a scrape."""
            rows = (
                f"# TYPE shardwright_{name} gauge\nshardwright_{name} {each!r}\n" for name, each in list(last.items())
            )
            text = "".join(rows).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = http.server.ThreadingHTTPServer((address or "127.0.0.1", int(port)), Answer)
    threading.Thread(target=server.serve_forever, name="sw-prometheus", daemon=True).start()

    def log(step: int, scalars: Scalars) -> None:
        last.update(step=float(step), **scalars)

    def close() -> None:
        server.shutdown()
        server.server_close()

    return log, close


_MAKERS: dict[str, Callable[[str], Tracker]] = {
    "jsonl": _jsonl,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "prometheus": _prometheus,
}
