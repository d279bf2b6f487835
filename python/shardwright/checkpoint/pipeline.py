"""One checkpoint of all stages of a pipeline: save() and load() with a list of stages.

The ranks of a stage first agree on its content, as for a separate module. Then all ranks exchange the names of all
stages and plan one folder; a rank writes no part of a tensor that it does not have. Stages keep their order, so the
folder equals that of the whole model.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from .._engine import CheckpointError, CheckpointFolder
from ..formats import tree
from ..options.name_map import NameMap
from .device_staging import DeviceStaging
from .inventory import FIRST, Draft, Inventory, Listed
from .joined import join_modules
from .peers import Peers
from .restore.agreeing import Restore, agree_on, apply_together
from .rows import dense, structure_of
from .slices import Sliced
from .state.content import Content, model_group, optimizer_group
from .state.names import ModelTensors, model_tensors
from .state.stored import stored_tensors
from .training import Training, is_pipeline


def peers_of(module: Any, process_group: Any, timeout_s: float) -> Peers:
    """Return the Peers of a module, or of all stages of a pipeline."""
    try:
        module = torch.nn.Module() if is_pipeline(module) else join_modules(module)
    except ValueError:  # the check of arguments raises it on all ranks
        module = torch.nn.Module()
    return Peers(module, process_group, timeout_s)


def inventory_of(training: Training, *given: Any) -> Inventory:
    """Return the inventory of a training, or of its stages."""
    return PipelineInventory(training.stages, *given) if training.stages else Inventory(*given)


class PipelineInventory(Inventory):
    """The inventory of all stages of a pipeline. `peers` are the ranks of all of them."""

    def __init__(self, stages: Sequence[Training], peers: Peers, staging: DeviceStaging, max_file_bytes: int) -> None:
        super().__init__(peers, staging, max_file_bytes)
        self._stages = stages
        self._of_stage: list[Inventory] = []

    def agree(self, training: Training, step: int, opened: contextlib.ExitStack) -> Listed:
        self.peers.together(self._open, FIRST)
        owned: dict[int, dict[str, Any]] = {}

        def describe() -> list[Any]:
            return [self._describe(*each, step, opened, owned) for each in zip(self._stages, self._of_stage)]

        described: dict[int, Any] = {}
        for each in itertools.chain(*self.peers.together(describe, "stages of a pipeline")):
            if each["is_first"]:  # the rank that has the non-tensor values
                described.setdefault(each["index"], each)
        in_order = [described[index] for index in sorted(described)]
        joined: list[Any] = []

        def find() -> Draft:
            draft = self.find(training, step, {}, set())
            draft.found = _joined_model(in_order, owned)
            joined.extend(_joined_optimizer(in_order, owned))
            return draft

        draft = self.compare(find, training)

        def members() -> tuple[Content, Any]:
            tensors, body = joined
            groups = [model_group(draft.found, self._max_file_bytes)]
            if tensors is not None:
                groups.append(optimizer_group(tensors, self._max_file_bytes))
            return Content(groups, self._staging), body

        return self.listed(draft, members, repeats=False)

    def _open(self) -> None:
        """Make the inventories of this rank's stages, once: each rank of a stage has its peers and its layout."""
        if not self._of_stage:
            peers = [Peers(each.model, None, self.peers.timeout_s) for each in self._stages]
            self._of_stage = [Inventory(each, self._staging, self._max_file_bytes) for each in peers]

    def _describe(
        self, stage: Training, inventory: Inventory, step: int, opened: contextlib.ExitStack, owned: dict[int, Any]
    ) -> dict[str, Any]:
        """Describe a whole stage, equal on its ranks, and add this rank's parts to `owned`. Collective over its ranks."""
        draft, peers = inventory.draft(stage, step, opened), inventory.peers
        made: list[dict[str, Any]] = []

        def make() -> None:
            found = draft.found
            if found.extras:
                raise CheckpointError(f"'{next(iter(found.extras))}' is extra state, which a pipeline cannot save")
            content, body = inventory.members(stage, draft)
            each = [(g, n, t) for g in content.groups for n, t in g.tensors.items()]
            owned[stage.index] = {f"{g.stem}.{n}": _in_parts(t, peers, of_first=n in g.first) for g, n, t in each}
            options = {n: t for g, n, t in each if n in g.first and isinstance(t, torch.Tensor)}
            described: dict[str, Any] = {g.stem: structure_of(g.tensors) for g in content.groups}
            described |= {"index": stage.index, "is_first": peers.rank == 0, "tied": found.tied}
            described |= {"buffers": list(found.buffers), "tree": body and json.loads(tree.dumps(body))}
            bits = self._staging.checksums(options | found.buffers)
            described["checksums"] = {n: [bits[n], *kind] for n, *kind in structure_of(options | found.buffers)}
            made.append(described)

        peers.together(make, "content of a stage")
        return made[0]


def _in_parts(tensor: Any, peers: Peers, *, of_first: bool) -> Sliced:
    """Return a tensor as a Sliced that one of the ranks with equal tensors writes."""
    if isinstance(tensor, Sliced):
        return tensor
    flat = dense(tensor).reshape(-1)
    writes = not of_first or peers.rank == 0
    turn = (0, 1) if of_first else (peers.rank, peers.world_size)
    return Sliced(tensor.dtype, tuple(tensor.shape), ((0, flat),) if writes else (), (tensor,), None, turn)


def _join(
    in_order: Sequence[Any], owned: Mapping[int, Any], stem: str, tied: Iterable[str], why: str
) -> dict[str, Any]:
    """Return the tensors of all stages; `why` ends the error if two use one name, or one of `tied`, for different tensors."""
    found: dict[str, Any] = {}
    first: dict[str, Any] = {}
    for described in in_order:
        kinds = {name: (dtype, shape) for name, dtype, shape in described[stem]}
        for name in [*kinds, *(each for each in tied if each in described["tied"])]:
            before = first.setdefault(name, described)
            bits = before["checksums"].get(name)
            if before is not described and (bits is None or bits != described["checksums"].get(name)):
                stages = f"in stage {before['index']} and in stage {described['index']}"
                raise CheckpointError(f"'{name}' is {stages}: {why}")
            if before is described and name in kinds:
                dtype, shape = kinds[name]
                own = owned.get(described["index"], {}).get(f"{stem}.{name}")
                found[name] = own or Sliced(getattr(torch, dtype), tuple(shape), ())
    return found


def _joined_model(in_order: Sequence[Any], owned: Mapping[int, Any]) -> ModelTensors:
    tied = {name: kept for described in in_order for name, kept in described["tied"].items()}
    why = (
        "modules of stages have the names of the whole model, each in one stage; of weights that stages tie, save one "
        "(buffers of one name must have equal bits)"
    )
    found = _join(in_order, owned, "model", tied, why)
    buffers = {name for described in in_order for name in described["buffers"]}
    parameters = {name: each for name, each in found.items() if name not in buffers}
    return ModelTensors(parameters, {name: each for name, each in found.items() if name in buffers}, tied)


def _joined_optimizer(in_order: Sequence[Any], owned: Mapping[int, Any]) -> tuple[dict[str, Any] | None, Any]:
    """Merge the optimizers of all stages; return the tensors and the tree."""
    trees = [described["tree"] for described in in_order]
    if all(each is None for each in trees):
        return None, None
    body = trees[0]
    for described, other in zip(in_order[1:], trees[1:]):
        what = ""
        if body is None or other is None or len(other["groups"]) != len(body["groups"]):
            what = "parameter groups"
        elif body.get("further") != other.get("further"):
            what = "state beside that of parameters"
        if what:
            raise CheckpointError(
                f"the optimizer of stage {described['index']} has other {what} than the first stage's: one checkpoint holds one optimizer"
            )
        for number, (mine, theirs) in enumerate(zip(body["groups"], other["groups"])):
            odd = next((k for k in {**mine, **theirs} if k != "params" and mine.get(k) != theirs.get(k)), None)
            if odd is not None:
                raise CheckpointError(
                    f"group {number} has {odd}={mine.get(odd)} in the first stage and {theirs.get(odd)} in stage {described['index']}: "
                    "one checkpoint holds one optimizer"
                )
            mine["params"] += [name for name in theirs["params"] if name not in mine["params"]]
        body["state"] |= {name: each for name, each in other["state"].items() if name not in body["state"]}
    return _join(in_order, owned, "optimizer", (), "one checkpoint holds one optimizer, with equal options"), body


def load_stages(
    path: str, peers: Peers, stages: Sequence[Training], *, verify: bool, names: NameMap, timeout_s: float
) -> Any:
    """Fill each stage of this rank from one checkpoint once all have agreed. Return its `extra`. Collective over all stages."""
    of_stage: dict[int, list[str]] = {}

    def describe() -> list[str]:
        tied: list[str] = []
        for stage in stages:
            tensors = model_tensors(stage.model)
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
    agreed: list[tuple[Restore, Peers]] = []

    def agree() -> None:
        for stage in stages:
            of_it = Peers(stage.model, None, timeout_s)
            own = NameMap(f"^(?:{'|'.join(map(re.escape, of_stage[stage.index]))})$", names.rename, names.strict)
            agreed.append((agree_on(path, stage, of_it, verify=verify, names=own), of_it))

    try:
        peers.together(agree, f"load of {path}")
    except BaseException:
        for reader, _ in agreed:
            reader.filler.take_back()
        raise
    extras: list[Any] = [None]
    peers.together(lambda: extras.extend(apply_together(*each) for each in agreed), f"load of {path}")
    return extras[-1]
