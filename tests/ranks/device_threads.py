"""Autograd on a simulated GPU runs where it runs on CUDA: in a thread of torch's own, whose Python code hooks and final
callbacks are, while backward() waits in C for that thread. No signal handler runs during that wait.

torch takes the caller's thread for tensors on the CPU, so here a second Python thread calls torch's engine. torch's own
thread has the caller's modes, autocast and grad mode; so has this one.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch

#: None ends the thread
_Job = Callable[[], None] | None


class DeviceThread:
    """A stand-in for torch's engine of autograd; `library` is the simulated libcuda."""

    def __init__(self, library: Any) -> None:
        self._torchs = torch.autograd.Variable._execution_engine
        self._library, self._host = library, threading.get_ident()
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="autograd", daemon=True)
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torchs, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self._host:  # a backward inside a backward, or no rank's own thread
            return self._torchs.run_backward(*args, **kwargs)
        found: list[Any] = []
        inside = _state_of_this_thread()

        def job() -> None:
            self._library.sim_torch_move()
            try:
                with inside():
                    found.append((self._torchs.run_backward(*args, **kwargs), None))
            except BaseException as error:
                found.append((None, error))
            self._library.sim_torch_done()

        self._jobs.put(job)
        try:
            self._library.sim_torch_await()
        finally:  # Python's handlers run behind a call
            self._library.sim_torch_move()
        ((result, error),) = found
        found.clear()
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it holds the graph


def _state_of_this_thread() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context that another thread enters to be in the modes that this one is in now."""
    modes = dispatch._get_current_dispatch_mode_stack()
    functions = torch.overrides._get_current_function_mode_stack()
    with_grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    casts = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def inside() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            torch.set_num_threads(threads)  # OpenMP's number is a thread's own; some sums depend on it
            for mode in functions:
                torch.overrides._push_mode(mode)
                stack.callback(torch.overrides._pop_mode)
            for mode in modes:
                dispatch._push_mode(mode)
                stack.callback(dispatch._pop_mode)
            stack.enter_context(torch.set_grad_enabled(with_grad))
            on, dtype, caches = casts
            stack.enter_context(torch.autocast("cpu", dtype, enabled=on, cache_enabled=caches))
            yield

    return inside
