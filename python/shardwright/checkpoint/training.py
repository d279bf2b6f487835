"""Training: the objects that a checkpoint holds, checked once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from ..optim.sharded import ShardedOptimizer
from ..options.name_map import NameMap, Rename
from ..parallel.engine import engine_of
from .joined import Optimizers, join_modules, join_optimizers, members_of
from .state.names import check_wrappers
from .state.optimizer_extras import bare_optimizer


@dataclasses.dataclass
class Training:
    """The objects that a checkpoint holds: model and optimizer are one each, or lists or dicts of them (joined.py), or this
    rank's stages of a pipeline, which become trainings of their own. `extra` is a tree of plain values and tensors."""

    model: Any
    optimizer: Any = None
    scheduler: Any = None
    scaler: Any = None
    dataloader: Any = None
    user_state: Any = None
    extra: Any = None
    #: in pipeline order; the place of each in the pipeline
    stages: list[Training] = dataclasses.field(default_factory=list)
    index: int = 0

    def __post_init__(self) -> None:
        from ..optim.diloco import DiLoCo

        if is_pipeline(self.model):
            self.stages = _stages_of(self.model, self.optimizer)
            self.model, self.optimizer = torch.nn.Module(), None
        self.model, self.optimizer = join_modules(self.model), join_optimizers(self.optimizer)
        if any(isinstance(each, DiLoCo) for each in members_of(self.optimizer)):
            raise ValueError(
                "optimizer is a DiLoCo, whose ranks differ between exchanges: save after its synchronise(), with the DiLoCo in "
                "user_state={'trainer': ...}, which any number of ranks takes back, and in dataloader=[...], which holds each "
                "rank's own"
            )
        if isinstance(self.optimizer, Optimizers):
            self.optimizer = Optimizers({name: bare_optimizer(each) for name, each in self.optimizer.members.items()})
        else:
            self.optimizer = bare_optimizer(self.optimizer)
        if not isinstance(self.model, torch.nn.Module):
            raise ValueError(f"model must be a torch.nn.Module, or a list or dict, got a {type(self.model).__name__}")
        check_wrappers(self.model)
        if not (self.optimizer is None or hasattr(self.optimizer, "param_groups")):
            raise ValueError(
                f"optimizer must be a torch.optim.Optimizer, or a list or dict of them, got a {type(self.optimizer).__name__}"
            )
        _check_owners(self.model, members_of(self.optimizer))
        user_state = self.user_state.values() if isinstance(self.user_state, dict) else (self.user_state,)
        if any(isinstance(each, DiLoCo) and each.is_sliced for each in user_state):
            raise ValueError(
                "user_state is saved from rank 0 only, but it contains a DiLoCo over a mesh, which has slices on each rank: pass it in "
                "dataloader=[...], and give each replica its own folder"
            )

    @property
    def parts(self) -> list[Training]:
        """Return the stages, or itself."""
        return self.stages or [self]

    def names(self, include: str | Iterable[str], rename: Rename, strict: bool) -> NameMap:
        """Return the names to load."""
        found = NameMap(include, rename, strict)
        if self.stages and found.include:
            raise ValueError("include is not supported for stages of a pipeline, each of which takes its own tensors")
        return found


def is_pipeline(module: Any) -> bool:
    """Return whether `module` is a stage of torch.distributed.pipelining, or a list of them."""
    each = module[0] if isinstance(module, (list, tuple)) and module else module
    return hasattr(each, "stage_index") and hasattr(each, "submod")


def _stages_of(module: Any, optimizer: Any) -> list[Training]:
    stages = list(module) if isinstance(module, (list, tuple)) else [module]
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if optimizer is None:
        optimizers = [None] * len(stages)
    if len(optimizers) != len(stages):
        raise ValueError(f"each stage needs its optimizer: got {len(stages)} stages and {len(optimizers)} optimizers")
    odd = next((each for each in stages if not is_pipeline(each) or engine_of(each.submod) is None), None)
    if odd is not None:
        raise ValueError(f"a stage must be an sw.PipelineStage, whose module is wrapped, got a {type(odd).__name__}")
    found = [Training(s.submod, o, index=s.stage_index) for s, o in zip(stages, optimizers)]
    return sorted(found, key=lambda stage: stage.index)


def _check_owners(model: torch.nn.Module, optimizers: list[Any]) -> None:
    """Raise ValueError for optimizers of other modules: a sliced one, or all of them. Others may have a loss's parameters."""
    held = {id(parameter) for parameter in model.parameters()}
    sizes, of_others = [], []
    for each in optimizers:
        members = [id(parameter) for group in each.param_groups for parameter in group["params"]]
        sizes.append(len(members))
        of_others.append(bool(members) and held.isdisjoint(members))
        is_sliced = isinstance(each, ShardedOptimizer)
        if is_sliced and (of_others[-1] or any(replica.retired for replica in each.replicas)):
            raise ValueError(_not_of(model, len(members)))
    if held and of_others and all(of_others):
        raise ValueError(_not_of(model, sum(sizes)))


def _not_of(model: torch.nn.Module, count: int) -> str:
    return (
        f"optimizer: its {count} parameters are those of another module, or of an earlier wrapper, than the {type(model).__name__} given as "
        "model: pass the optimizer that sw.wrap returned with this model, or that was made from its parameters"
    )
