"""torchelastic's error file of a rank that ends with an error. torchrun takes the earliest failure for the root cause.

torchrun reads a file of each worker that failed, and reports the failure with the lowest time, in seconds. A killed
rank writes no file; its time is the one at which its agent noticed. Its peers often raise a CommError that names it
before that. Such an error only reports another rank's failure, so its file gets a later time, and the root cause comes
first.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import time
import traceback
from types import TracebackType
from typing import Any

from .._engine import CheckpointError, CommError

#: words of a save that failed because another rank did
PEER_LOST = "another rank failed or left"

_VARIABLE = "TORCHELASTIC_ERROR_FILE"
#: seconds added to reports of another rank's failure: more than the interval at which an agent polls
_LATER_S = 5


@functools.cache
def report_failures() -> None:
    """Write torchelastic's error file when an exception ends this process, from now on; no effect without torchrun."""
    if os.environ.get(_VARIABLE):
        sys.excepthook = functools.partial(_report, sys.excepthook)


def _report(before: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    gc.freeze()  # at exit the interpreter would traverse all of torch's objects, 0.7 s of each restart
    path = os.environ.get(_VARIABLE)
    try:
        if path and isinstance(error, Exception):
            _write(path, error, trace)
    except Exception:  # the original error matters more
        pass
    before(kind, error, trace)


def _write(path: str, error: Exception, trace: TracebackType | None) -> None:
    """Write the file as torch.distributed.elastic's record() does, or correct the time in its file."""
    is_heard = reports_peer(error, -1, int(os.environ.get("RANK", "-1")))
    if os.path.exists(path) and not is_heard:
        return
    stack = "".join(traceback.format_exception(type(error), error, trace))
    extra = {"py_callstack": stack, "timestamp": str(int(time.time()) + (_LATER_S if is_heard else 0))}
    # a full disk leaves an empty file, which an agent cannot read: it would end with an error
    partial = f"{path}.partial"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}, file)
        os.replace(partial, path)
    except OSError:
        os.unlink(partial)


def reports_peer(error: BaseException | None, *own: int) -> bool:
    """Return True for a report of the failure of another rank than `own`, also where a save or a load failed by it."""
    while error is not None:
        if isinstance(error, CommError) and getattr(error, "rank", -1) not in own:
            return True
        if isinstance(error, CheckpointError) and PEER_LOST in str(error):
            return True
        error = error.__cause__
    return False
