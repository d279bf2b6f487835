"""`shardwright kernels`: compile the GPU kernels ahead of time, for hosts without a run-time compiler.

Needs NVRTC (the pip package nvidia-cuda-nvrtc or a CUDA toolkit), but no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwright import _engine

DESCRIPTION = __doc__
EPILOG = """Exit code 0: each architecture has an image; 1: one has none; 2: usage error.

Programs look for an image in SHARDWRIGHT_KERNELS (or the package's folder `images` if it is unset), then in the user's cache;
else they compile one. An image compiled by CUDA 12 runs under drivers of CUDA 12 and later, not under earlier ones."""
_OLDEST = 75


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    text = f"compute capabilities of at least {_OLDEST}, written 80 or 8.0; default: those of this host's GPUs"
    parser.add_argument("--arch", type=_architecture, nargs="+", metavar="SM", help=text)
    parser.add_argument("--to", metavar="FOLDER", help="write missing images to this folder; default: the user's cache")
    parser.add_argument("--nvrtc", metavar="PATH", help="the NVRTC library; default: the one of torch's CUDA")


def run(options: argparse.Namespace) -> int:
    """Find or compile an image for each architecture and print a line about it."""
    parser = options.parser
    architectures = options.arch or _of_this_machine()
    if not architectures:
        parser.error("no GPU found: pass the architectures, as in --arch 80 90")
    if options.to is not None:
        try:  # under the umask, so that other users can read it; the engine's own cache is private
            os.makedirs(options.to, exist_ok=True)
            info = os.stat(options.to)
        except OSError as error:
            parser.error(f"--to {options.to}: {error.strerror}")
        if info.st_uid != os.geteuid() or info.st_mode & 0o022:
            parser.error(f"--to {options.to}: must belong to this user, and no other user may write to it")
    found = list(_images(options, sorted(set(architectures))))
    ok = all(each["ok"] for each in found)
    if options.json:
        print(json.dumps({"ok": ok, "to": options.to, "images": found}, indent=2))
    else:
        for each in found:
            print(f"sm_{each['arch']}: {each['detail']}", file=sys.stdout if each["ok"] else sys.stderr)
    return 0 if ok else 1


def _images(options: argparse.Namespace, architectures: list[int]) -> Iterator[dict[str, Any]]:
    from shardwright.torch_compat.cuda import nvrtc_companion, runtime

    places: dict[str, str | None] = runtime.libraries()
    if options.nvrtc is not None:
        places |= {"nvrtc": options.nvrtc, "builtins": nvrtc_companion(Path(options.nvrtc))}
    if options.to is not None:
        places |= {"packaged": None, "cache": options.to}
    for architecture in architectures:
        try:
            major, minor = divmod(architecture, 10)
            origin, image = _engine.device_kernel_image(major, minor, **places)
        except (_engine.Error, NotImplementedError, RuntimeError) as error:
            yield {"arch": architecture, "ok": False, "detail": str(error)}
            continue
        ok = options.to is None or origin in ("cached", "compiled")
        kind = "machine code" if image[:4] == b"\x7fELF" else "PTX, which the driver compiles at first use"
        detail = f"{origin}, {len(image)} bytes of {kind}"
        if options.to is not None:
            state = {"cached": "exists already", "compiled": "written"}.get(origin, "not written")
            detail = state + detail.removeprefix(origin)
        if not ok:
            detail += f": '{options.to}' is not writable"
        yield {"arch": architecture, "ok": ok, "origin": origin, "size_bytes": len(image), "detail": detail}


def _of_this_machine() -> list[int]:
    try:
        devices = _engine.cuda_devices()["devices"]
    except (_engine.Error, NotImplementedError, RuntimeError):
        return []
    return [10 * major + minor for major, minor in (each["capability"] for each in devices)]


def _architecture(text: str) -> int:
    found = re.fullmatch(r"(?:sm_)?(\d{1,2})\.?(\d)", text)
    number = 10 * int(found[1]) + int(found[2]) if found else 0
    if number < _OLDEST:
        sentence = f"{text!r} is not a compute capability of at least {_OLDEST}, such as 80 or 9.0"
        raise argparse.ArgumentTypeError(sentence)
    return number
