"""Which checkpoints a rollback has abandoned: the file `.branch` in a directory of checkpoints. Rank 0's business.

After restore(step=2) a training goes on from step 2, while step-000005 of the abandoned course may still lie there. A restore() after
a crash must not prefer it. Checkpoints are named by their nonces, so one that is saved again under the same step is not abandoned.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence

from .._engine import CheckpointFolder
from .retention import Kept, list_checkpoints

logger = logging.getLogger("shardwright")
BRANCH = ".branch"
_LIMIT_BYTES = 1 << 20


def abandoned(directory: str) -> set[str]:
    """Return the nonces of abandoned checkpoints."""
    path = os.path.join(directory, BRANCH)
    try:
        with open(path, "rb") as file:
            nonces = json.loads(file.read(_LIMIT_BYTES))["abandoned"]
        return {nonce for nonce in nonces if isinstance(nonce, str)}
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning("'%s' cannot be read (%s): restore() prefers the newest checkpoint", path, error)
        return set()


def in_order(directory: str, kept: Sequence[Kept]) -> list[Kept]:
    """Return checkpoints as restore() prefers them, the best last: abandoned ones come first."""
    nonces = abandoned(directory)
    if not nonces:
        return list(kept)
    known = {each.path: each.nonce for each in list_checkpoints(directory, look=True)}
    return sorted(kept, key=lambda each: (known.get(each.path) not in nonces, each.step, each.path))


def go_on_from(directory: str, chosen: Kept) -> None:
    """Record that training goes on from `chosen`: later checkpoints are abandoned, and `chosen` is not. Durable.

    Cost: one manifest read a checkpoint.
    """
    path = os.path.join(directory, BRANCH)
    listed = list_checkpoints(directory, look=True)
    before = abandoned(directory)
    after = {k.nonce for k in listed if k.nonce and (k.step > chosen.step or k.nonce in before)} - {chosen.nonce}
    if after == before:
        return
    with open(f"{path}.new", "wb") as file:
        file.write(json.dumps({"abandoned": sorted(after)}).encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)
    CheckpointFolder.sync(directory)
