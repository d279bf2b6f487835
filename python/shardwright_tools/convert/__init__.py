"""Readers and writers of other programs' checkpoints (docs/design/checkpoint_load.md)."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwright._engine import CheckpointError, CheckpointFolder
from shardwright.checkpoint.folder.partial import make_folder

if TYPE_CHECKING:
    from .contents import Contents
    from .folders import Progress

#: formats that read() knows, by their names for --from
READERS = ("shardwright", "dcp", "megatron", "deepspeed", "hf", "torch")
#: formats that write() knows, by their names for --to
WRITERS = ("shardwright", "hf", "dcp", "torch", "deepspeed-universal")


@contextlib.contextmanager
def _one_sentence(path: str) -> Iterator[None]:
    """Convert errors from files with a valid outer form but unexpected contents to CheckpointError."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"'{path}' cannot be converted: {type(error).__name__}: {error}") from error


def read(path: str, *, kind: str | None = None, tag: str | None = None) -> Contents:
    """Return the contents of the checkpoint at `path`. `kind`: a format in READERS; None: detect it from the files."""
    from shardwright.formats.dcp import is_dcp
    from shardwright.formats.model_files import model_files as files_of_model

    from . import dcp_format, deepspeed_universal, deepspeed_zero, folders, megatron, model_files

    with _one_sentence(path):
        if not os.path.lexists(path):
            raise CheckpointError(f"'{path}' does not exist")
        if kind in (None, "shardwright") and CheckpointFolder.find(path) is not None:
            return folders.read_folder(path)
        if kind in (None, "megatron") and megatron.is_megatron(path):
            return megatron.read_megatron(path)
        if kind in (None, "dcp") and is_dcp(path):
            return dcp_format.read_dcp(path)
        if kind in (None, "deepspeed"):
            folder = deepspeed_zero.deepspeed_folder(path, tag)
            if folder is not None:
                is_universal = os.path.isdir(os.path.join(folder, "zero"))
                return (deepspeed_universal.read_universal if is_universal else deepspeed_zero.read_zero)(folder)
        if kind in (None, "hf", "torch") and files_of_model(path):
            return model_files.read_model(path)
        known = "one of Shardwright, torch.distributed.checkpoint, Megatron, DeepSpeed or Hugging Face"
        raise CheckpointError(f"'{path}' is not a checkpoint of a known format{f' ({kind})' if kind else f': {known}'}")


def write(contents: Contents, output: str, kind: str, progress: Progress) -> None:
    """Write a checkpoint of a format in WRITERS to the new path `output`: either all of it, durably, or nothing."""
    from . import dcp_format, deepspeed_universal, folders, model_files

    if os.path.lexists(output):
        raise CheckpointError(f"'{output}' exists already: name a new one")
    if kind == "shardwright":
        with _one_sentence(output):
            folders.write_folder(contents, output, progress)
        return
    make = {
        "hf": model_files.write_model, "dcp": dcp_format.write_dcp, "torch": model_files.write_torch_file,
        "deepspeed-universal": deepspeed_universal.write_universal,
    }[kind]  # fmt: skip
    partial = f"{output}.{os.getpid()}.partial"
    make_folder(os.path.dirname(output))
    try:
        with _one_sentence(output):
            make(contents, partial, progress)
        for folder, _, _ in os.walk(partial):
            CheckpointFolder.sync(folder)
        os.rename(partial, output)  # readers see all of it or nothing
        CheckpointFolder.sync(os.path.dirname(output))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
