"""PipelineStage: torch's pipeline stage for a wrapped module, with gradients averaged once per step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage as TorchPipelineStage

from ...layout.param_groups import mark_of
from ..engine import Engine, needed_engine

#: wrapper -> its stage
_stages: weakref.WeakKeyDictionary[Engine, Callable[[], Any]] = weakref.WeakKeyDictionary()


class PipelineStage(TorchPipelineStage):
    """A stage of torch.distributed.pipelining, for every schedule and every stage of ZeRO.

    Parameters
    ----------
    submodule : Module
        The result of sw.wrap, or the outermost module of sw.fully_shard.
    *args, **kwargs
        Like torch's.
    keep_whole : bool
        At zero=3 with private parameters: keep units whole from the step's first forward until the gradients are averaged,
        instead of gathering them for each micro-batch.

    Raises
    ------
    Error
        For a module that is not wrapped.
    ValueError
        For a module that already is another stage.
    NotImplementedError
        For a torch version with schedules that do not report the end of all backwards of a step.

    Notes
    -----
    Backwards of micro-batches add up locally. After the schedule has run all of them, one round averages the sums. This
    includes zero-bubble schedules, which compute weight gradients without autograd hooks. These schedules read
    parameters in their backwards, so private units are whole during each backward.
    """

    def __init__(self, submodule: torch.nn.Module, *args: Any, keep_whole: bool = False, **kwargs: Any) -> None:
        if not hasattr(TorchPipelineStage, "perform_reduce_grad"):
            raise NotImplementedError(
                f"sw.PipelineStage needs a torch whose stages have perform_reduce_grad, and this is {torch.__version__}: use torch's own "
                "PipelineStage with the result of sw.wrap"
            )
        engine = needed_engine("sw.PipelineStage", submodule)
        self._engine, self._keeps_whole = engine, keep_whole
        self._kept = contextlib.ExitStack()
        self._is_kept = False
        self._is_averaged = True
        super().__init__(submodule, *args, **kwargs)
        other = _stages.get(engine, lambda: None)()
        if other is not None and other.stage_index != self.stage_index:
            raise ValueError(
                f"sw.PipelineStage: this {type(engine.module).__name__} is stage {other.stage_index} already, got stage_index="
                f"{self.stage_index}: wrap a module of its own for each stage"
            )
        _stages[engine] = weakref.ref(self)

    def _keep(self) -> None:
        if self._keeps_whole and not self._is_kept and self.has_backward and torch.is_grad_enabled():
            self._is_kept = True
            self._kept.enter_context(self._whole())

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for replica in self._engine.replicas:
                stack.enter_context(replica.access.whole())
            yield

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a micro-batch."""
        self._keep()
        self._is_averaged = not self.has_backward
        with self._engine.no_sync():
            return super().forward_maybe_with_nosync(*args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run a backward of a micro-batch, or a part of it: "full", "input" or "weight". Averages no gradients."""
        reads = backward_type != "full" and self._engine.replica.releases_parameters
        whole = self._whole() if reads else contextlib.nullcontext()
        with self._engine.no_sync(), whole:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=False)

    def _average(self) -> None:
        self._is_kept = False
        self._kept.close()
        for replica in self._engine.replicas:
            replica.average_gradients()
        self._is_averaged = True

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Scale the gradients of the step. Average them here if the schedule does not call perform_reduce_grad."""
        if not self._is_averaged:
            self._average()
        super().scale_grads(grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Average and scale the gradients of the step. The schedule calls this after all backwards."""
        self._average()
        if mark_of(self.submod) is None:
            super().perform_reduce_grad(grad_scale_factor)
        else:  # torch's would run FSDP2's own backward
            self.submod.set_requires_gradient_sync(True)  # type: ignore[operator]
            super().scale_grads(grad_scale_factor)
