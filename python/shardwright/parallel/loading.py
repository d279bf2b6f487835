"""load_state_dict() at zero=3, of a wrapper, its module or any module inside it.

torch's function copies into parameters in place. At zero=3 they are shared with other ranks, or released. So the
outermost module that loads opens a context like full_parameters(writable=True), and closes it behind its last child:
all ranks call load_state_dict(), as at the other stages, and rank 0's values hold.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch

from .._engine import Error
from ..comm.waits import calling
from ..parameters.unshard_schedule import NoHook
from ..torch_compat.state_dicts import hook_loading


class StateLoading:
    """The loads of state dicts into one wrapped module. `handles` remove the hooks of its modules."""

    def __init__(self, replica: Any, module: torch.nn.Module) -> None:
        self._replica = weakref.ref(replica)
        self.depth = 0
        self._writing = contextlib.ExitStack()
        begin, end = _LoadHook(self, "begin"), _LoadHook(self, "end")
        self.handles = [handle for each in module.modules() for handle in hook_loading(each, begin, end)]

    def begin(self, state: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        """Open the context before the first module loads. Collective."""
        replica = self._replica()
        if replica is None or (not self.depth and replica.is_writing):
            return
        if metadata.get("assign_to_params_buffers"):
            raise Error(
                f"load_state_dict(assign=True) would replace parameters of a {replica.label} wrapped with zero=3, of which ranks keep slices: "
                "leave assign out, or load before wrapping"
            )
        if not self.depth:
            with calling("load_state_dict() at zero=3"):
                self._writing.enter_context(replica.writable_parameters())
        self.depth += 1

    def end(self, *_: Any) -> None:
        """Close the context behind the module that opened it. Collective."""
        if self.depth:
            self.depth -= 1
            if not self.depth:
                with calling("load_state_dict() at zero=3"):
                    self._writing.close()

    def abandon(self) -> None:
        """Close the context of a load that ended in an exception. Collective if there is one."""
        self.depth = 0
        self._writing.close()


class _LoadHook:
    """A hook in a module's own dictionaries. In a copy of the module it does nothing."""

    def __init__(self, loading: StateLoading, method: str) -> None:
        self._loading, self._method = weakref.ref(loading), method

    def __call__(self, *arguments: Any) -> None:
        loading = self._loading()
        if loading is not None:
            getattr(loading, self._method)(*arguments)

    def __deepcopy__(self, memo: Any) -> NoHook:
        return NoHook()

    def __reduce__(self) -> Any:
        return NoHook().__reduce__()
