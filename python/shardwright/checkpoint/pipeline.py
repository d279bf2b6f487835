"""One checkpoint of all stages of a pipeline: save() and load() with a list of stages.

The ranks of a stage first agree on its content, as for a separate module. Then all ranks exchange the names of all
stages and plan one folder; a rank writes no part of a tensor that it does not have. Stages keep their order, so the
folder equals that of the whole model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .._engine import CheckpointError, CheckpointFolder, CheckpointPlan
from ..options.name_map import NameMap
from ..parallel.engine import engine_of
from . import tree
from .joined import join_modules
from .peers import Peers, averages_gradients, whole_parameters
from .restore.agreeing import agree_on, apply_together
from .restore.reading import Reader
from .slices import Sliced, released_slices, sliced_state
from .state.content import Content, Group
from .state.names import ModelTensors, model_tensors
from .state.stored import stored_tensors
from .training import Training
from .writing import Writer, new_nonce

__all__ = [
    "PipelineWriter",
    "Stage",
    "check_options_of_stages",
    "is_pipeline",
    "load_stages",
    "make_writer",
    "peers_of",
    "stages_of",
]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of this rank. `index`: its position in the pipeline."""

    index: int
    training: Training


def is_pipeline(module: Any) -> bool:
    """Return whether `module` is a stage of torch.distributed.pipelining, or a list of them."""
    each = module[0] if isinstance(module, (list, tuple)) and module else module
    return hasattr(each, "stage_index") and hasattr(each, "submod")


def peers_of(module: Any, process_group: Any, timeout_s: float) -> Peers:
    """Return the Peers of a module, or of all stages of a pipeline."""
    try:
        module = torch.nn.Module() if is_pipeline(module) else join_modules(module)
    except ValueError:  # the check of arguments raises it on all ranks
        module = torch.nn.Module()
    return Peers(module, process_group, timeout_s)


def make_writer(stages: Sequence[Stage], peers: Peers, nonce: str, board: str | None, **options: Any) -> Writer:
    """Return the writer of a module, or of `stages`."""
    return PipelineWriter(peers, nonce, board, stages, **options) if stages else Writer(peers, nonce, board, **options)


def check_options_of_stages(snapshot: str, memory_every: int | None) -> None:
    """Raise ValueError for an option that a Checkpointer of stages does not support."""
    if snapshot != "copy":
        raise ValueError(f"snapshot={snapshot!r} is not supported for stages of a pipeline: it must be 'copy'")
    if memory_every is not None:
        raise ValueError(
            f"memory_every={memory_every} is not supported for stages of a pipeline, which go to disk alone"
        )


def stages_of(module: Any, optimizer: Any) -> list[Stage]:
    """Return this rank's stages in pipeline order. Raise ValueError if stages and optimizers do not match."""
    stages = list(module) if isinstance(module, (list, tuple)) else [module]
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if optimizer is None:
        optimizers = [None] * len(stages)
    if len(optimizers) != len(stages):
        raise ValueError(f"each stage needs its optimizer: got {len(stages)} stages and {len(optimizers)} optimizers")
    odd = next((each for each in stages if not is_pipeline(each) or engine_of(each.submod) is None), None)
    if odd is not None:
        raise ValueError(f"a stage must be an sw.PipelineStage, whose module is wrapped, got a {type(odd).__name__}")
    found = [Stage(s.stage_index, Training(s.submod, o)) for s, o in zip(stages, optimizers)]
    return sorted(found, key=lambda stage: stage.index)


@dataclasses.dataclass
class _Held:
    """The tensors of a stage on this rank, and the description of the whole stage, equal on its ranks."""

    told: dict[str, Any]
    tensors: dict[str, Any]


@dataclasses.dataclass
class _Opened:
    """A stage with its ranks and this rank's writer and slices."""

    stage: Stage
    peers: Peers
    writer: Writer
    slices: dict[int, Sliced]
    passing: set[int]


class PipelineWriter(Writer):
    """A Writer of all stages of a pipeline. `peers` are the ranks of all of them."""

    def __init__(self, peers: Peers, nonce: str, board: str | None, stages: Sequence[Stage], **options: Any) -> None:
        super().__init__(peers, nonce, board, **options)
        self._stages, self._options = stages, options
        self._opened = contextlib.ExitStack()

    def begin(self, *args: Any, **kwargs: Any) -> None:
        with self._opened:
            super().begin(*args, **kwargs)

    def _agree(self, training: Training, step: int, *released: Any) -> tuple[Content, Content | None, CheckpointPlan]:
        held: list[_Held] = []
        opened: list[_Opened] = []
        # report a failure here to all ranks, before the ranks of a stage exchange anything
        self._peers.together(lambda: opened.extend(map(self._open, self._stages)), "modules of a pipeline")

        def describe() -> list[Any]:
            held.extend(self._hold(each, step) for each in opened)
            return [each.told for each in held]

        told: dict[int, Any] = {}
        for each in itertools.chain(*self._peers.together(describe, "stages of a pipeline")):
            if each["is_first"]:  # the rank that has the non-tensor values
                told.setdefault(each["index"], each)
        in_order = [told[index] for index in sorted(told)]
        made: list[Any] = []

        def make() -> int:
            owned = {each.told["index"]: each.tensors for each in held}
            _check_apart(in_order)
            draft = self._find(training, step, {}, set())
            draft.found = _joined_model(in_order, owned)
            made.extend((draft, *_joined_optimizer(in_order, owned)))
            return 0

        self._peers.together(make, "content of a pipeline")
        draft, optimizer, body = made
        self._hear(draft, None)
        layout = self._lay_out(draft)
        contents: list[tuple[Content, Content | None, CheckpointPlan]] = []

        def lay_out() -> int:
            shared, _ = self._shared_content(training, draft, None, layout)
            if optimizer is not None:
                shared.groups.insert(
                    1,
                    Group("optimizer", optimizer, {"format": "pt"}, numbered=True, max_file_bytes=self._max_file_bytes),
                )
            layout.plan = CheckpointPlan(*shared.entries())
            contents.append((shared, self._own_content(draft, layout, body), layout.plan))
            return layout.plan.digest

        if len({*self._peers.together(lay_out, "plan of a checkpoint")}) > 1:
            raise CheckpointError("ranks would write other files than rank 0: their stages do not fit together")
        return contents[0]

    def _open(self, stage: Stage) -> _Opened:
        peers = Peers(stage.training.model, None, self._timeout_s)
        writer = Writer(peers, new_nonce(), None, **self._options)
        self._opened.callback(writer.close)
        return _Opened(stage, peers, writer, *released_slices(stage.training.model))

    def _hold(self, opened: _Opened, step: int) -> _Held:
        """Return this rank's part of a stage. Collective over the stage's ranks, which raise together."""
        training, optimizer = opened.stage.training, opened.stage.training.optimizer
        peers, writer, slices, passing = opened.peers, opened.writer, opened.slices, opened.passing
        if passing:
            self._opened.enter_context(whole_parameters(training.model, writable=False))
        draft, failure = None, None
        try:
            draft = writer._find(training, step, slices, passing)
            if draft.found.extras:
                raise CheckpointError(
                    f"'{next(iter(draft.found.extras))}' is extra state, which a pipeline cannot save"
                )
        except Exception as error:  # sent to the stage's ranks before they wait for this one
            failure = error
        writer._hear(draft, failure, averages_gradients(training.model))
        assert draft is not None
        layout, found = writer._lay_out(draft), draft.found
        made: list[_Held] = []

        def make() -> None:
            states = None
            if hasattr(optimizer, "replica_of"):
                states = sliced_state(optimizer, layout.described, writer._values(optimizer, layout))
            content, body = writer._shared_content(training, draft, states, layout)
            self._opened.callback(content.held.clear)
            groups = content.groups[: 1 if optimizer is None else 2]
            tensors = {
                f"{g.stem}.{n}": _in_parts(t, peers, of_first=n in g.first)
                for g in groups
                for n, t in g.tensors.items()
            }
            rows = {
                g.stem: [[n, str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in g.tensors.items()]
                for g in groups
            }
            options = {
                n: t for g in groups for n, t in g.tensors.items() if n in g.first and isinstance(t, torch.Tensor)
            }
            checksums = writer._staging.checksums({**found.buffers, **options})
            told = {"index": opened.stage.index, "is_first": peers.rank == 0, "checksums": checksums}
            told |= {"buffers": list(found.buffers), "tied": found.tied, **rows}
            if body is not None:
                told["tree"] = json.loads(tree.dumps(body))
            made.append(_Held(told, tensors))

        peers.together(make, "content of a stage")
        return made[0]


def _check_apart(in_order: Sequence[Any]) -> None:
    """Raise CheckpointError if two stages use one name for different tensors: a checkpoint has one tensor per name."""
    seen: dict[str, Any] = {}
    for told in in_order:
        for name in [*(each[0] for each in told["model"]), *told["tied"]]:
            first = seen.setdefault(name, told)
            if first is not told and not _is_alike(name, first, told):
                raise CheckpointError(
                    f"'{name}' is in stage {first['index']} and in stage {told['index']}: modules of stages have the names of the "
                    "whole model, each in one stage; of weights that stages tie, save one (buffers of one name must have equal bits)"
                )


def _is_alike(name: str, first: Any, other: Any) -> bool:
    """Return whether a tensor that both stages hold whole (a buffer, or an option of a group) has equal bits."""
    return name in first["checksums"] and first["checksums"][name] == other["checksums"].get(name)


def _in_parts(tensor: Any, peers: Peers, *, of_first: bool) -> Sliced:
    """Return a tensor as a Sliced that one of the ranks with equal tensors writes."""
    if isinstance(tensor, Sliced):
        return tensor
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    writes = not of_first or peers.rank == 0
    turn = (0, 1) if of_first else (peers.rank, peers.world_size)
    return Sliced(tensor.dtype, tuple(tensor.shape), ((0, flat),) if writes else (), (tensor,), None, turn)


def _join(
    in_order: Sequence[Any], owned: Mapping[int, Any], stem: str, takes: Callable[[Any, str], bool]
) -> dict[str, Any]:
    """Return the tensors of all stages. For a name in several stages, with equal tensors, take the first stage's."""
    found: dict[str, Any] = {}
    first: dict[str, Any] = {}
    kinds: dict[str, Any] = {}
    for told in in_order:
        for name, dtype, shape in told[stem]:
            if not takes(told, name):
                continue
            if kinds.setdefault(name, (dtype, shape)) != (dtype, shape):
                raise CheckpointError(
                    f"'{name}' of stage {told['index']} has another shape or dtype than in a stage before it"
                )
            if name in found and not _is_alike(name, first[name], told):
                raise CheckpointError(
                    f"'{name}' of the optimizers of stage {first[name]['index']} and stage {told['index']} differs: one checkpoint "
                    "holds one optimizer"
                )
            first.setdefault(name, told)
            own = owned.get(told["index"], {}).get(f"{stem}.{name}")
            found.setdefault(name, own or Sliced(getattr(torch, dtype), tuple(shape), ()))
    return found


def _joined_model(in_order: Sequence[Any], owned: Mapping[int, Any]) -> ModelTensors:
    tied = {name: kept for told in in_order for name, kept in told["tied"].items()}
    parameters = _join(in_order, owned, "model", lambda told, name: name not in told["buffers"])
    return ModelTensors(parameters, _join(in_order, owned, "model", lambda told, name: name in told["buffers"]), tied)


def _joined_optimizer(in_order: Sequence[Any], owned: Mapping[int, Any]) -> tuple[dict[str, Any] | None, Any]:
    """Merge the optimizers of all stages; return the tensors and the tree."""
    trees = [told.get("tree") for told in in_order]
    if all(each is None for each in trees):
        return None, None
    body = trees[0]
    for told, other in zip(in_order[1:], trees[1:]):
        if body is None or other is None or len(other["groups"]) != len(body["groups"]):
            raise CheckpointError(
                f"the optimizer of stage {told['index']} has other parameter groups than the first stage's"
            )
        if body.get("further") != other.get("further"):
            raise CheckpointError(
                f"the optimizer of stage {told['index']} has other state beside that of parameters than the first stage's: one "
                "checkpoint holds one optimizer"
            )
        for number, (mine, theirs) in enumerate(zip(body["groups"], other["groups"])):
            odd = next((k for k in {**mine, **theirs} if k != "params" and mine.get(k) != theirs.get(k)), None)
            if odd is not None:
                raise CheckpointError(
                    f"group {number} has {odd}={mine.get(odd)} in the first stage and {theirs.get(odd)} in stage {told['index']}: "
                    "one checkpoint holds one optimizer"
                )
            mine["params"] += [name for name in theirs["params"] if name not in mine["params"]]
        body["state"] |= {name: each for name, each in other["state"].items() if name not in body["state"]}
    return _join(in_order, owned, "optimizer", lambda told, name: True), body


def load_stages(
    path: str, peers: Peers, stages: Sequence[Stage], *, verify: bool, names: NameMap, timeout_s: float
) -> Any:
    """Fill each stage of this rank from one checkpoint. Return its `extra`. Collective over the ranks of all stages.

    No live tensor changes before all stages have agreed."""
    of_stage: dict[int, list[str]] = {}

    def describe() -> list[str]:
        tied: list[str] = []
        for stage in stages:
            tensors = model_tensors(stage.training.model)
            of_stage[stage.index] = list(tensors.all())
            tied += tensors.tied
        return [*(name for each in of_stage.values() for name in each), *tied]

    of_all = peers.together(describe, f"load of {path}")

    def check() -> None:
        if peers.rank or not names.strict or names.rename is not None:
            return
        known = {name for each in of_all for name in each}
        left_over = [name for name in stored_tensors(CheckpointFolder(path), "model")[0] if name not in known]
        if left_over:
            raise CheckpointError(f"'{path}' has '{left_over[0]}', which no stage of the pipeline has")

    peers.together(check, f"load of {path}")
    agreed: list[tuple[Reader, Peers]] = []

    def agree() -> None:
        for stage in stages:
            of_it = Peers(stage.training.model, None, timeout_s)
            own = NameMap(f"^(?:{'|'.join(map(re.escape, of_stage[stage.index]))})$", names.rename, names.strict)
            reader, refusal = agree_on(path, stage.training, of_it, verify=verify, names=own)
            if reader is None:
                raise CheckpointError(refusal)
            agreed.append((reader, of_it))

    try:
        peers.together(agree, f"load of {path}")
    except BaseException:
        for reader, _ in agreed:
            reader.take_back()
        raise
    extra: list[Any] = [None]

    def fill() -> None:
        for reader, of_it in agreed:
            extra[0] = apply_together(reader, of_it, everything=False)

    peers.together(fill, f"load of {path}")
    return extra[0]
