"""Options of a wrapped module: one frozen dataclass, validated in one place.

Names are torch's where torch has one. What a later stage of the engine brings is known by name already and refused
with a sentence, so that a program finds out at construction, not after an hour.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Collection, Mapping
from typing import Any

from .compressors import check_compressor
from .offload import offload_kind
from .units import check_units

__all__ = ["Options"]

_MIB = 1024 * 1024
_TRANSPORTS = ("auto", "pool", "staged")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a module is wrapped. All fields are keyword-only; every rank must pass the same values.

    Parameters
    ----------
    zero : {0, 1, 2, 3}
        What is sliced over ranks: nothing; the optimizer's state; averaged gradients too; parameters too.
    precision : {"bf16", "fp16", "fp32"}, Precision, or dict of module names to them, optional
        The dtypes in which the module computes. None: nothing is cast.
    compress : Fp16, Bf16, Int8, Int4, PowerSGD or "auto", optional
        What travels instead of whole gradients.
    clip_grad_norm : float, optional
        The norm to which each step clips gradients first. Needs the optimizer.
    offload : {"cpu", "nvme:<folder>"}, optional
        Where the state of sw.optim's optimizers lies.
    partition : {"auto", "flat", "tensor"}
        How an optimizer is sliced at zero >= 1.
    process_group : torch.distributed.ProcessGroup, optional
        Ranks that train together. Default: the default group; without one, what the launcher's variables say
        (docs/launch.md); without those, one rank.
    device_mesh : torch.distributed.device_mesh.DeviceMesh, optional
        Of one dimension: its group is used. Of two, (replicate, shard): all its ranks average gradients; what a stage slices is
        sliced inside a row and kept alike by all rows; least travels where each lies on one host. Not together with `process_group`.
    bucket_cap_mb : float
        Largest gradient bucket, MiB; at zero >= 2 never above 8. Affects speed and memory only: results do not depend on it.
    timeout_s : float
        Seconds a rank waits for another before CommTimeoutError.
    broadcast_buffers : bool
        Broadcast buffers from rank 0 at construction and before each forward, by torch's rules.
    init_sync : bool
        Broadcast parameters and buffers from rank 0 at construction. Their table is compared in any case.
    gradient_as_bucket_view, find_unused_parameters, static_graph : bool
        Accepted for torch's sake. Gradients are always views of buckets, and one that somebody keeps is moved out of its
        bucket before that is written to again; unused parameters are always handled.
    ignored_params : collection of Parameter or str
        Parameters left alone: neither broadcast nor averaged.
    reduce : {"mean", "sum"}
        How contributions are joined. A sum leaves the scale to the loss, as where ranks count their own tokens.
    deterministic : bool
        On GPUs: the fold in rank order, with the host's bits, instead of the transport's own mean. On the host it always holds.
    communicator : {"own", "borrow", "register"}
        On GPUs: a NCCL communicator of our own, or torch's of the process group, whose torch says where it is (ProcessGroupNCCL._comm_ptr), or
        one of our own that reads and writes buckets where they lie. "borrow" means NCCL: beside SHARDWRIGHT_GPU_TRANSPORT=shm or ipc it is an error. One communicator less in memory; torch's own collectives over the group are in one order with ours between steps, and not to be
        called inside a backward; and what ends ours, a failing rank or a deadline, ends torch's by its abort().
        "register" takes memory for buckets from NCCL (2.19 or newer) and registers it, on all ranks or, with one line in the log that names the rank and
        NCCL's reason, on none. Bits are those of "own"; the memory is none that torch's allocator counts, and `record_stream` does nothing for it.
    transport : {"auto", "pool", "staged"}
        Where gradient memory lies: shared between ranks, or private and staged through slots. Same bits either way.
    share_parameters : {"auto", True, False}
        Of zero=3: whether the ranks of a host share one copy of the parameters, which nothing has to gather ("auto": they do), or
        each keeps its slices and gathers whole ones while they are used.
    units : "auto", "size", float, type or collection of types
        Of zero=3 without sharing: what is gathered together. Modules that sw.fully_shard marked, or else repeated blocks; modules
        of at least 32 MiB ("size") or that many MiB; or modules of the types. What is left belongs to the whole module's own unit.
    reshard_after_forward : bool
        Of zero=3 without sharing: whether units are released between forward and backward. The outermost one never is.

    gather : {None, "int8"}
        Of zero=3 with share_parameters=False: what float32 parameters are gathered from. "int8": from blocks of 32 elements as 8-bit
        integers and one float32 scale, which each rank makes of its slices after every step; the slices, what the optimizer
        steps on and what is saved, stay exact, and so is everything inside full_parameters.
    write_guard : {"auto", "samples", "read-only", None}
        Of zero=3 with shared parameters: how a write outside of the step is found that versions do not tell of, as one through `.data` (averages of
        weights, EMA and SWA, are swapped in and out by such). "samples": 8 words of each are compared before and after each forward
        and before each step; "auto" is that where several ranks share them. "read-only", for debugging: a write gets a SIGSEGV at its line. None:
        versions alone are compared.

    Raises
    ------
    TypeError, ValueError
        A value of the wrong type or outside its range.
    NotImplementedError
        A value whose stage of the engine does not exist yet.
    """

    zero: int = 0
    precision: Any = None
    compress: Any = None
    clip_grad_norm: float | None = None
    offload: str | None = None
    partition: str = "auto"
    process_group: Any = None
    device_mesh: Any = None
    bucket_cap_mb: float = 25
    timeout_s: float = 1800.0
    broadcast_buffers: bool = True
    init_sync: bool = True
    gradient_as_bucket_view: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False
    ignored_params: Collection[Any] = ()
    reduce: str = "mean"
    deterministic: bool = False
    communicator: str = "own"
    transport: str = "auto"
    units: Any = "auto"
    reshard_after_forward: bool = True
    share_parameters: Any = "auto"
    gather: str | None = None
    write_guard: str | None = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.zero, bool) or not isinstance(self.zero, int) or self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero must be 0, 1, 2 or 3, got {self.zero!r}")
        offload_kind(self.offload)
        check_compressor(self.compress, self.reduce)
        if self.partition not in ("auto", "flat", "tensor"):
            raise ValueError(f"partition must be 'auto', 'flat' or 'tensor', got {self.partition!r}")
        if self.clip_grad_norm is not None:
            _check_clip(self.clip_grad_norm)
        if self.process_group is not None and self.device_mesh is not None:
            raise ValueError("process_group and device_mesh were both given: pass one of them")
        if self.device_mesh is not None and not hasattr(self.device_mesh, "get_group"):
            raise TypeError(f"device_mesh must be a DeviceMesh, got {self.device_mesh!r}")
        if self.device_mesh is not None and getattr(self.device_mesh, "ndim", 1) not in (1, 2):
            raise ValueError(
                f"device_mesh must have one dimension, or two (replicate, shard), got {self.device_mesh.ndim}: "
                "pass mesh['name'] of the data-parallel one, or mesh['replicate', 'shard']"
            )
        _check_positive("bucket_cap_mb", self.bucket_cap_mb, "MiB", 2**40)
        _check_positive("timeout_s", self.timeout_s, "seconds", 1e9)
        for name in (
            "broadcast_buffers",
            "init_sync",
            "gradient_as_bucket_view",
            "find_unused_parameters",
            "static_graph",
            "deterministic",
            "reshard_after_forward",
        ):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.transport not in _TRANSPORTS:
            raise ValueError(f"transport must be one of {', '.join(_TRANSPORTS)}, got {self.transport!r}")
        if self.communicator not in ("own", "borrow", "register"):
            raise ValueError(f"communicator must be 'own', 'borrow' or 'register', got {self.communicator!r}")
        if self.reduce not in ("mean", "sum"):
            raise ValueError(f"reduce must be 'mean' or 'sum', got {self.reduce!r}")
        if self.share_parameters != "auto" and not isinstance(self.share_parameters, bool):
            raise ValueError(f"share_parameters must be 'auto', True or False, got {self.share_parameters!r}")
        if self.gather not in (None, "int8"):
            raise ValueError(f"gather must be None or 'int8', got {self.gather!r}")
        if self.gather is not None and self.share_parameters is not False:
            raise ValueError(
                f"gather={self.gather!r} needs share_parameters=False, got {self.share_parameters!r}: parameters that a host shares are "
                "not gathered"
            )
        if self.write_guard not in ("auto", "samples", "read-only", None):
            raise ValueError(f"write_guard must be 'auto', 'samples', 'read-only' or None, got {self.write_guard!r}")
        if self.write_guard in ("samples", "read-only") and self.share_parameters is False:
            raise ValueError(
                f"write_guard={self.write_guard!r} watches parameters that a host shares, got share_parameters=False, under which released ones "
                "are watched anyway"
            )
        check_units(self.units)
        self._check_stage()
        if isinstance(self.ignored_params, (str, bytes)) or not isinstance(self.ignored_params, Collection):
            raise TypeError(f"ignored_params must be a collection of parameters or names, got {self.ignored_params!r}")

    @property
    def chosen_transport(self) -> str:
        """`transport`; where that is "auto", the environment's SHARDWRIGHT_TRANSPORT.

        A debug entry: bits do not depend on it.
        """
        forced = os.environ.get("SHARDWRIGHT_TRANSPORT", "auto")
        if forced not in _TRANSPORTS:
            raise ValueError(f"SHARDWRIGHT_TRANSPORT must be one of {', '.join(_TRANSPORTS)}, got {forced!r}")
        return forced if self.transport == "auto" else self.transport

    @property
    def bucket_cap_bytes(self) -> int:
        """Largest bucket, bytes; at least one cache line."""
        return max(int(self.bucket_cap_mb * _MIB), 128)

    @classmethod
    def from_keywords(cls, keywords: Mapping[str, Any], also_known: Collection[str] = ()) -> Options:
        """Options from a caller's keywords.

        Raises
        ------
        TypeError
            An unknown name; the sentence offers the nearest of ours and of `also_known`.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        for name in keywords:
            if name not in known:
                raise TypeError(_unknown_name(name, known | set(also_known)))
        return cls(**keywords)

    def _check_stage(self) -> None:
        """Raise ValueError for an option of zero=3 that is given at another stage."""
        for name in ("gather", "share_parameters", "units", "reshard_after_forward", "write_guard"):
            if self.zero != 3 and getattr(self, name) not in (getattr(Options, name), None):
                raise ValueError(f"{name} is of zero=3, and was given with zero={self.zero}")

    def ignored_names(self, module: Any) -> set[str]:
        """The names in ignored_params. ValueError for one that no parameter or buffer of `module` has."""
        named = {
            name
            for pairs in (module.named_parameters, module.named_buffers)
            for name, _ in pairs(remove_duplicate=False)
        }
        names = {item for item in self.ignored_params if isinstance(item, str)}
        for name in sorted(names - named):
            near = difflib.get_close_matches(name, sorted(named), n=1)
            raise ValueError(
                f"ignored_params: {type(module).__name__} has no parameter or buffer {name!r}"
                + (f": did you mean {near[0]!r}?" if near else "")
            )
        return names

    def without_group(self) -> Options:
        """A copy that can be pickled: process group and mesh left out."""
        return dataclasses.replace(self, process_group=None, device_mesh=None, ignored_params=())


def _check_clip(max_norm: Any) -> None:
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)):
        raise TypeError(f"clip_grad_norm must be a number or None, got {max_norm!r}")
    if not max_norm > 0:
        raise ValueError(f"clip_grad_norm must be above 0 and needs the optimizer, got {max_norm!r}")


def _check_positive(name: str, value: Any, unit: str, largest: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of {unit}, got {value!r}")
    if not 0 < value <= largest:
        raise ValueError(f"{name} must be above 0 and at most {largest:g} {unit}, got {value!r}")


def _unknown_name(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    if near:
        return f"unknown option {name!r}: did you mean {near[0]!r}?"
    return f"unknown option {name!r}; known are {', '.join(sorted(known))}"
