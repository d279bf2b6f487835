"""One process of a run: a rank. Its only argument is a JSON object from the runner."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pkgutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

_PR_SET_PDEATHSIG = 1


def load(name: str) -> Any:
    """Return the function that "module:function" names; a file of this package may omit the package."""
    is_ours = Path(__file__).with_name(name.partition(":")[0] + ".py").exists()
    return pkgutil.resolve_name(f"{__package__}.{name}" if is_ours else name)


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # this process ends with its parent
    spec = json.loads(sys.argv[1])
    rank, world_size, folder = spec["rank"], spec["ranks"], spec["folder"]
    rows = Path(folder) / "rows.jsonl"
    with contextlib.ExitStack() as stack:
        try:
            place = stack.enter_context(load(spec["place"])(rank, world_size, folder))
        except NotImplementedError as error:  # no GPU. Behind it the same class says that ours cannot use the GPU
            if rank == 0:
                (Path(folder) / "skipped").write_text(str(error))
            return
        backend = place.backend if world_size == 1 else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
        file = stack.enter_context(open(rows if rank == 0 else os.devnull, "a"))
        for found in load(spec["body"])(place, rank, world_size, **spec["arguments"]):
            file.write(json.dumps(found) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
