"""The name `shardwright.deepspeed`, for `import shardwright.deepspeed as deepspeed`: the module integrations/deepspeed."""

import sys

from ..integrations import deepspeed
from ..integrations.deepspeed import *  # noqa: F403
from ..integrations.deepspeed import zero

sys.modules[__name__], sys.modules[f"{__name__}.zero"] = deepspeed, zero
