"""The zip archives of torch.save and torch.jit.save, read by the parser of torch.load."""

from __future__ import annotations

from typing import IO

import torch


def records_of(source: str | IO[bytes]) -> list[str] | None:
    """Return the names of an archive's records; None if torch.load does not take the file for an archive.

    torch.load chooses between a state dict and TorchScript by this list. Another parser may list other records of a
    malicious file. A file keeps its position.
    """
    if isinstance(source, str):
        with open(source, "rb") as file:
            return records_of(file)
    at = source.tell()
    try:
        if not torch.serialization._is_zipfile(source):
            return None
        with torch.serialization._open_zipfile_reader(source) as archive:
            names: list[str] = archive.get_all_records()
            return names
    finally:
        source.seek(at)
