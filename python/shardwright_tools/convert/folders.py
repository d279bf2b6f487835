"""Reader and writer of our own format. The reader checks every block that it reads; the writer commits like a save."""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from shardwright._engine import CheckpointError, CheckpointFolder, CheckpointPlan
from shardwright.checkpoint.files import MAX_FILE_BYTES, why_not_there
from shardwright.checkpoint.folder.partial import make_folder
from shardwright.checkpoint.slices import Sliced
from shardwright.checkpoint.state.content import IN_PARTS, MODEL_METADATA, Group, model_index
from shardwright.checkpoint.state.names import plain
from shardwright.checkpoint.state.stored import Stored, stored_tensors
from shardwright.formats import tree
from shardwright.optim import moments

from .contents import Contents, Lazy, durable_file, lazily

#: callback that takes the number of bytes just written
Progress = Callable[[int], None]
#: further files that from_pretrained reads
BESIDE_A_MODEL = (
    *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json"),
)  # fmt: skip
_BESIDE_BYTES = 64 << 20


def read_folder(path: str) -> Contents:
    folder = CheckpointFolder(path)
    stored = {stem: stored_tensors(folder, stem) for stem in ("model", "optimizer", "state")}
    lazy = {stem: {n: _lazy(folder, each) for n, each in found.items()} for stem, (found, _) in stored.items()}
    state = _tree(folder, "state.json")
    extra = {
        key: tree.decode(state[key], lazy["state"])  # type: ignore[arg-type]
        for key in ("scheduler", "scaler", "user_state", "model_extra_state", "extra")
        if state.get(key)
    }
    contents = Contents(lazy["model"], stored["model"][1], extra=extra, step=folder.step)
    take_beside(contents, folder.path, ())
    if "optimizer.json" in folder.files:
        body = tree.decode(_tree(folder, "optimizer.json"), lazy["optimizer"])  # type: ignore[arg-type]
        contents.groups, contents.state = body["groups"], body["state"]
        for name, entries in contents.state.items():
            if name in lazy["model"]:
                entries |= {key: _widened(key, value, lazy["model"][name].shape) for key, value in entries.items()}
        if body.get("further"):
            contents.extra["optimizer_further"] = body["further"]
    return contents


def _lazy(folder: CheckpointFolder, stored: Stored) -> Lazy:
    shape = stored.shape if stored.complex_dtype is None else stored.shape[:-1]

    def part(first: int, nbytes: int, address: int) -> None:
        folder.load([(stored.path, stored.begin + first, nbytes, address, 0)])

    def read() -> torch.Tensor:
        memory = stored.empty()
        if stored.nbytes:
            part(0, stored.nbytes, memory.data_ptr())
        return memory

    return Lazy(stored.torch_dtype, tuple(shape), read, stored.path, part)


def _widened(key: str, value: Any, shape: tuple[int, ...]) -> Any:
    """Return a moment in blocks of int8 as the float32 tensor that other programs know; anything else as it is."""
    numel = math.prod(shape)
    records = (moments.blocks(numel), moments.RECORD)
    if key not in moments.FORMS or not isinstance(value, Lazy) or (value.dtype, value.shape) != (torch.uint8, records):
        return value
    return Lazy(torch.float32, shape, lambda: moments.decoded(value.read(), key, numel).reshape(shape), value.file)


def _tree(folder: CheckpointFolder, path: str) -> Any:
    return tree.loads(folder.read_bytes(path))


def take_beside(contents: Contents, folder: str, files: Iterable[str]) -> None:
    """Add the paths of the files in `folder` that from_pretrained reads in addition to the tensors.

    A link is followed only to where the model's `files` lie, as in the Hub's cache: a folder from elsewhere must not
    name any file of this machine. `left_out` names the others.
    """
    known = {os.path.dirname(os.path.realpath(each)) for each in files}
    for path in (os.path.join(folder, name) for name in BESIDE_A_MODEL):
        if not os.path.lexists(path):
            continue
        name, place = os.path.basename(path), os.path.realpath(path)
        if os.path.islink(path) and not (known and os.path.exists(place)):
            contents.left_out.append(f"{name}, a symbolic link{'' if os.path.exists(place) else ' to nothing'}")
        elif os.path.islink(path) and os.path.dirname(place) not in known:
            contents.left_out.append(f"{name}, a symbolic link to '{place}', which is not where the model's files lie")
        elif not os.path.isfile(place) or os.path.getsize(place) > _BESIDE_BYTES:
            contents.left_out.append(f"{name}, no regular file of at most {_BESIDE_BYTES >> 20} MiB")
        else:
            contents.beside.append(path)


def copy_beside(contents: Contents, output: str) -> None:
    """Copy the additional files of the model to the folder `output`, durably."""
    for path in contents.beside:
        with open(path, "rb") as source, durable_file(os.path.join(output, os.path.basename(path))) as file:
            shutil.copyfileobj(source, file)


def write_folder(contents: Contents, output: str, progress: Progress, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Write a checkpoint to the new folder `output`. It is durable on return."""
    if refusal := why_not_there(output, False):
        raise CheckpointError(refusal)
    groups, texts = _layout(contents, max_file_bytes)
    plan, lazy = plan_of(groups, texts)
    index = model_index(plan, list(contents.model))
    if index:
        texts["model.safetensors.index.json"] = index
        plan, _ = plan_of(groups, texts)
    nonce = "d" + secrets.token_hex(12)
    partial = f"{output}.{nonce}.partial"
    make_folder(os.path.dirname(output))
    plan.create(partial)
    try:
        tallies = write_all(plan, partial, lazy, texts, progress)
        copy_beside(contents, partial)
        plan.commit(
            folder=output, replaces="", nonce=nonce, step=contents.step, world_size=1, tallies=tallies, creator=plan
        )
    except BaseException:
        plan.abandon()
        raise


def plan_of(groups: list[Group], texts: Mapping[str, bytes]) -> tuple[CheckpointPlan, list[Lazy]]:
    """Return the plan of groups of Lazy tensors, and these tensors in the order of the plan."""
    groups = [dataclasses.replace(group, tensors=lazily(group.tensors)) for group in groups]  # arrays became tensors
    lazy = [each for group in groups for each in group.tensors.values()]
    entries = []
    for group in groups:
        tensors = {name: Sliced(each.dtype, each.shape, ()) for name, each in group.tensors.items()}
        entries.append(dataclasses.replace(group, tensors=tensors).plan_entry())
    return CheckpointPlan(entries, [(path, len(text), IN_PARTS) for path, text in texts.items()]), lazy


def write_all(
    plan: CheckpointPlan, partial: str, lazy: list[Lazy], texts: Mapping[str, bytes], progress: Progress
) -> list[bytes]:
    """Write tensors and texts durably to the plan's files, with one tensor in memory at a time. Return the tallies."""
    tallies = []
    in_order = list(texts.values())
    for path, nbytes, first_block, pieces in plan.files():
        place = os.path.join(partial, path)
        for source, begin, size in pieces:
            if source < len(lazy):
                memory = plain(lazy[source].read())
            else:
                memory = torch.frombuffer(bytearray(in_order[source - len(lazy)]), dtype=torch.uint8)
            tallies.append(CheckpointPlan.write(place, nbytes, first_block, [(begin, size)], memory.data_ptr()))
            progress(size)
            del memory
        CheckpointPlan.sync(place)
    return tallies


def _layout(contents: Contents, max_file_bytes: int) -> tuple[list[Group], dict[str, bytes]]:
    extra = dict(contents.extra)
    kept = {key: extra.pop(key, None) for key in ("scheduler", "scaler", "user_state", "model_extra_state")}
    kept["model_extra_state"] = kept["model_extra_state"] or {}
    further = extra.pop("optimizer_further", None)
    state_tensors: dict[str, Lazy] = {}
    if set(extra) == {"extra"}:
        extra = extra["extra"]
    body = {"step": contents.step, **kept, "extra": extra}
    body = {key: tree.encode(value, key, state_tensors) for key, value in body.items()}
    metadata = MODEL_METADATA | contents.tied | MODEL_METADATA
    groups = [Group("model", dict(contents.model), metadata, max_file_bytes=max_file_bytes)]
    texts = {"state.json": tree.dumps(body)}
    if contents.groups is not None:
        tensors, optimizer = _optimizer(contents, further)
        groups.append(Group("optimizer", tensors, {"format": "pt"}, numbered=True, max_file_bytes=max_file_bytes))
        texts["optimizer.json"] = tree.dumps(optimizer)
    groups.append(Group("state", state_tensors, {"format": "pt"}))
    return groups, texts


def _optimizer(contents: Contents, further: Any) -> tuple[dict[str, Lazy], dict[str, Any]]:
    tensors: dict[str, Lazy] = {}
    groups = [
        tree.encode({k: v for k, v in group.items() if k != "params"}, f"param_groups.{number}", tensors)
        | {"params": list(group["params"])}
        for number, group in enumerate(contents.groups or ())
    ]
    body: dict[str, Any] = {"groups": groups}
    if further:
        body["further"] = tree.encode(further, "further", tensors)
    state: dict[str, dict[str, Any]] = {}
    order = {name: place for place, name in enumerate(contents.model)}
    for name in sorted(contents.state, key=lambda each: order.get(each, len(order))):
        state[name] = {}
        for key, value in sorted(contents.state[name].items(), key=lambda item: str(item[0])):
            state[name][str(key)] = tree.encode(value, f"{key}.{name}", tensors)
    return tensors, {**body, "state": state}
