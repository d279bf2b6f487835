"""Options of a wrapped module: one frozen dataclass, validated in one place. Names are torch's where torch has one."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from . import keywords
from .checks import Check, among, check_units, count, number, offload_kinds, switch
from .compress import Compressor, check_compressor
from .keywords import (
    CommunicatorOf,
    Gather,
    Partition,
    PrecisionLike,
    Reduce,
    SparseGradients,
    Transport,
    WriteGuard,
    Zero,
)
from .names import near, offers_fields, unknown_name
from .precision import Precision

#: the options that step_in_backward excludes
_BESIDE_STEPS = {
    "clip_grad_norm": "needs the norm of all of them: sw.optim's and torch's optimizers then step after the backward",
    "compress": "averages buckets once all are there",
    "partition": "'tensor' collects whole gradients for a step",
    "check_every": "looks at all of them before a step",
    "groups": "steps on parameters of several groups of ranks together",
}
#: the first fields of Options, which most programs need; each listing names them first
BASIC_COUNT = 10
_MIB = 1024 * 1024
_Made = TypeVar("_Made")


def _check_precision(name: str, value: Any) -> None:
    for module, each in value.items() if isinstance(value, Mapping) else ((None, value),):
        Precision.of(each, name if module is None else f"{name}[{module!r}]")


def _check_mesh(name: str, value: Any) -> None:
    if not hasattr(value, "get_group"):
        raise TypeError(f"{name} must be a DeviceMesh, got {value!r}")
    if getattr(value, "ndim", 1) not in (1, 2):
        raise ValueError(
            f"{name} must have one dimension, or two (replicate, shard), got {value.ndim}: "
            "pass mesh['name'] of the data-parallel one, or mesh['replicate', 'shard']"
        )


def _check_groups(name: str, value: Any) -> None:
    if not isinstance(value, Mapping) or not value:
        raise TypeError(f"{name} must be a dict of patterns or modules to meshes or process groups, got {value!r}")
    for key, group in value.items():
        if not isinstance(key, str) and not hasattr(key, "named_parameters"):
            raise TypeError(f"{name}: a key must be a pattern or a module, got {key!r}")
        if getattr(group, "ndim", 1) != 1:
            raise ValueError(f"{name}: the mesh of {text_of_group(key)} must have one dimension, got {group.ndim}")


def _check_device(name: str, value: Any) -> None:
    if not re.fullmatch(r"cuda(:\d+)?", str(value)):
        raise ValueError(f"{name} must name a GPU, such as 'cuda' or 'cuda:0', got {value!r}")


def _check_ignored(name: str, value: Any) -> None:
    if isinstance(value, (str, bytes)) or not isinstance(value, Collection):
        raise TypeError(f"{name} must be a collection of parameters or names, got {value!r}")


def _option(
    default: Any, check: Check | None = None, *, zero: tuple[int, ...] = (0, 1, 2, 3), alike: bool = True
) -> Any:
    """Return a field with its check of values but the default, its stages, and if ranks must have the same value."""
    return dataclasses.field(default=default, metadata={"check": check, "stages": zero, "compared": alike})


@offers_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a wrapped module. All fields are keyword-only; every rank must pass the same values.

    Parameters
    ----------
    zero : {0, 1, 2, 3}
        The stage. 0 slices nothing over ranks, 1 the optimizer's state, 2 also averaged gradients, 3 also parameters,
        where a host shares one copy, or each rank gathers units.
    share_parameters : {"auto", True, False}
        At zero=3. True, and "auto": the ranks of a host share one copy of the parameters. False: each rank keeps its
        slices and gathers units while they are used.
    precision : {"bf16", "fp16", "fp32"}, Precision, or dict of module names to them, optional
        The dtypes in which the module computes. Parameters are then float32 (low-precision ones are converted), serve
        as their own masters, and are cast during the wrapper's forward. None: no cast. See docs/design/optim.md.
    compress : Fp16, Bf16, Int8, Int4, PowerSGD or "auto", optional
        The format in which gradients travel; it excludes a communication hook. "auto" compresses only where that pays
        off: never inside one host or between GPUs. Between hosts (at zero=0) it times five plain rounds, then all ranks
        make the same choice. None: uncompressed.
    offload : {"cpu", "nvme:<folder>"} or dict of "parameters" and "optimizer" to them, optional
        The place of the state and the masters of sw.optim's optimizers, with the same bits. "nvme:<folder>": an unnamed
        file per rank, which a step streams through three buffers of 16 MiB. "cpu": host memory, for parameters on a
        GPU; the step then runs on the host in batches, overlapped with copies. See docs/design/activations.md.
        "parameters", at zero=3: the place of all slices, with the same bits. "nvme:<folder>", on CPUs with share_parameters=False:
        one unnamed file per host, from which units are gathered; it needs sw.optim. "cpu", on GPUs with "optimizer" and
        sw.optim: pinned host memory, for averaged gradients too; no effect on CPUs.
    units : "auto", "size", float, type or collection of types
        At zero=3 without sharing: the cut into units. "auto": modules that sw.fully_shard marked, or else repeated
        blocks. "size": modules of at least 32 MiB; a number: of that many MiB. Types: modules of these types. Other
        parameters belong to the whole module's own unit.
    clip_grad_norm : float, optional
        Each optimizer.step() begins with sw.clip_grad_norm_(module, clip_grad_norm). Needs the optimizer.
    partition : {"auto", "flat", "tensor"}
        How an optimizer is sliced at zero >= 1. "auto": flat slices, for optimizers known to be elementwise. "flat":
        flat slices; the caller guarantees that it is elementwise. "tensor": whole tensors, balanced over ranks.
    process_group : torch.distributed.ProcessGroup, optional
        The ranks that train together. Default: the default group; without one, the group of the launcher's variables
        (docs/launch.md); without those, one rank.
    device_mesh : torch.distributed.device_mesh.DeviceMesh, optional
        A mesh of one dimension: its group is used. A mesh of two, (replicate, shard): all its ranks average gradients;
        the stage slices inside a row, and all rows keep the same bits. Traffic is least where each row lies on one
        host. Not together with `process_group`.

    Other Parameters
    ----------------
    step_in_backward : bool
        On CPUs, for the elementwise optimizers of torch.optim and sw.optim: the backward steps on each bucket as its mean
        is complete, and frees its gradients, with the bits of ordinary steps. `.grad` then raises if it is read, and
        optimizer.step() only counts. Not with clipping by the norm, GradScaler, no_sync() or closures. Without an
        optimizer it takes over those of torch's _apply_optimizer_in_backward (docs/optimizers.md).
    groups : dict of str or Module to DeviceMesh or ProcessGroup, optional
        Parameters that are replicated over fewer ranks (experts), and those ranks. A key is a module, or a pattern of
        fnmatch for names of parameters or of modules around them ("layers.*.experts"). The parameters must be DTensors
        over the remaining ranks: the group times their mesh are the ranks of all other parameters. Their gradients are
        summed over the group and divided by the number of ranks of all other parameters. See docs/compose.md.
    timeout_s : float
        The seconds that a rank waits for another before CommTimeoutError.
    warn_after_s : float, optional
        The seconds after which a wait is logged as a warning, and again whenever it has doubled: the rank, its process
        and host, the collective, and what that process does. While ranks join, 10 at most. 0 or None: never.
    silent_s : float, optional
        On CPUs: the seconds after which a stopped rank (SIGSTOP), or a host that acknowledges nothing, is a CommError.
        Default: `timeout_s`, since debuggers, job control and SLURM stop ranks and continue them.
    sparse_gradients : {"auto", "dense"}
        Gradients of nn.Embedding(sparse=True). "auto": at zero=0 on CPUs, without `precision`, they stay sparse, and
        their rows are gathered; elsewhere they are made dense, with one warning. "dense": made dense, without a warning.
    reduce : {"mean", "sum"}
        The reduction of contributions. A sum leaves the scale to the loss.
    deterministic : bool
        On GPUs: the fold in rank order, with the host's bits, instead of the transport's own mean, which a mesh makes
        by rows and columns, alike at every stage; over hosts each folds first. On the host it always holds.
    communicator : {"own", "borrow"}
        On GPUs: the NCCL communicator. "borrow": that of torch's process group, which saves memory; an error with
        SHARDWRIGHT_GPU_TRANSPORT=shm or ipc. All ranks must call torch's collectives over the group in the same place
        between our steps, never inside a backward. A failing rank or a passed deadline aborts torch's communicator too.
    transport : {"auto", "pool", "staged"}
        The place of gradient memory: shared between ranks, or private and staged through slots. The bits are the same.
    prefetch : int
        On GPUs. At zero=3: the units gathered ahead of the running one; each after the first takes the largest unit's
        memory. At zero=1 and 2, unless 0: gathers of parameters run on behind a step, and a unit's forward waits for
        its own (docs/design/gpu.md).
    gather : {None, "int8"}
        At zero=3 with share_parameters=False: the form from which float32 parameters are gathered. "int8": records of
        32 elements, 8-bit integers and one float32 scale, which each rank encodes from its slices after every step. The
        slices stay exact: the optimizer steps on them, they are saved, and full_parameters gathers them.
    write_guard : {"auto", "samples", None}
        At zero=3 with shared parameters: the check for writes outside of the step that version counters do not record.
        Writes through `.data` are not recorded; EMA and SWA swap weights that way. "samples": compare 8 words of each
        parameter before and after each forward and before each step. "auto": "samples" if several ranks share the
        parameters. None: compare versions alone.
    check_every : int, optional
        Check every `check_every` steps that ranks hold equal parameters and that averaged gradients are finite. All
        ranks raise an Error that names the parameter and the rank. A check costs two or three passes over the model's
        bytes and no message (docs/design/reduce.md). Ranks must not step on their own inside no_sync().
    device : str or torch.device, optional
        With offload={"parameters": "cpu", ...}: the GPU of this rank, for a module on the CPU or, with init= or weights=, the
        meta device. The GPU never holds all of the module. Default: the device of the module.
    ignored_params : collection of Parameter or str
        Parameters left alone: neither broadcast nor averaged.
    reshard_after_forward : bool
        At zero=3 without sharing: release units between forward and backward, except for the outermost one.
    bucket_cap_mb : float
        The largest gradient bucket, MiB; at zero >= 2 on CPUs never above 8. On GPUs at zero=3 each unit and dtype is
        one bucket. It affects speed and memory only: results do not depend on it.
    broadcast_buffers : bool
        Broadcast buffers from rank 0 at construction and before each forward, by torch's rules.
    init_sync : bool
        Broadcast parameters and buffers from rank 0 at construction. Their table is compared in any case.
    gradient_as_bucket_view, find_unused_parameters, static_graph : bool
        Accepted like torch's. Gradients are always views of buckets, and one that the program keeps is moved out before
        its bucket is written to again. Unused parameters are always handled.

    Raises
    ------
    TypeError, ValueError
        For a value of the wrong type or outside its range.
    NotImplementedError
        For a value that is not supported yet.
    """

    zero: Zero = _option(0, among(*get_args(Zero)))
    share_parameters: bool | Literal["auto"] = _option("auto", among("auto", True, False), zero=(3,))
    precision: PrecisionLike | Mapping[str, PrecisionLike] | None = _option(None, _check_precision)
    compress: Compressor | Literal["auto"] | None = _option(None)
    offload: str | Mapping[str, str | None] | None = _option(None, lambda name, value: offload_kinds(value))
    units: float | Literal["auto", "size"] | type[torch.nn.Module] | Collection[type[torch.nn.Module]] = _option(
        "auto", check_units, zero=(3,)
    )
    clip_grad_norm: float | None = _option(None, number(also="None or "), alike=False)
    partition: Partition = _option("auto", among(*get_args(Partition)), alike=False)
    process_group: ProcessGroup | None = _option(None, alike=False)
    device_mesh: DeviceMesh | None = _option(None, _check_mesh)
    step_in_backward: bool = _option(False, switch)
    groups: Mapping[Any, DeviceMesh | ProcessGroup] | None = _option(None, _check_groups, alike=False)
    timeout_s: float = _option(1800.0, number("seconds", 1e9))
    warn_after_s: float | None = _option(30.0, number("seconds", 1e9, "None or 0 for never, or ", (None, 0)))
    silent_s: float | None = _option(None, number("seconds", 1e6))
    sparse_gradients: SparseGradients = _option("auto", among(*get_args(SparseGradients)), alike=False)
    reduce: Reduce = _option("mean", among(*get_args(Reduce)))
    deterministic: bool = _option(False, switch)
    communicator: CommunicatorOf = _option("own", among(*get_args(CommunicatorOf)))
    transport: Transport = _option("auto", among(*get_args(Transport)))
    prefetch: int = _option(1, count(0, 1024, "a number of units in [0, 1024]"))
    gather: Gather | None = _option(None, among(None, *get_args(Gather)), zero=(3,))
    write_guard: WriteGuard | None = _option("auto", among(*get_args(WriteGuard), None), zero=(3,))
    check_every: int | None = _option(None, count(1, float("inf"), "None or a number of steps, at least 1"))
    device: str | torch.device | None = _option(None, _check_device, zero=(3,), alike=False)
    ignored_params: Collection[torch.nn.Parameter | str] = _option((), _check_ignored, alike=False)
    reshard_after_forward: bool = _option(True, switch, zero=(3,))
    bucket_cap_mb: float = _option(25, number("MiB", 2**40))
    broadcast_buffers: bool = _option(True, switch, alike=False)
    init_sync: bool = _option(True, switch)
    gradient_as_bucket_view: bool = _option(False, switch, alike=False)
    find_unused_parameters: bool = _option(False, switch, alike=False)
    static_graph: bool = _option(False, switch, alike=False)

    def __post_init__(self) -> None:
        for name, rules in FIELDS.items():
            value, default = getattr(self, name), getattr(Options, name)
            if rules["check"] is not None and (value is not None or default is not None):
                rules["check"](name, value)
            if self.zero not in rules["stages"] and value not in (default, None):
                raise ValueError(f"{name}= requires zero=3, got zero={self.zero}")
        check_compressor(self.compress, self.reduce)
        for name, why in _BESIDE_STEPS.items() if self.step_in_backward else ():
            if getattr(self, name) not in (getattr(Options, name), "flat"):
                raise ValueError(f"step_in_backward=True frees each gradient before the next, and {name}= {why}")
        if self.process_group is not None and self.device_mesh is not None:
            raise ValueError("process_group and device_mesh were both given: pass one of them")
        if self.gather is not None and self.share_parameters is not False:
            raise ValueError(
                f"gather={self.gather!r} needs share_parameters=False, got {self.share_parameters!r}: parameters that a host shares are "
                "not gathered"
            )
        if offload_kinds(self.offload)[0] == "nvme" and (self.zero, self.share_parameters) != (3, False):
            raise ValueError(
                f"offload={self.offload!r} puts parameters into a file, which needs zero=3 and share_parameters=False, got zero={self.zero} "
                f"and share_parameters={self.share_parameters!r}"
            )
        if self.device is not None and offload_kinds(self.offload)[0] != "cpu":
            raise ValueError(
                f"device={self.device!r} is for parameters that stay in host memory, offload={{'parameters': 'cpu', ...}}, got offload={self.offload!r}: "
                "move the module to its GPU instead"
            )
        if self.write_guard == "samples" and self.share_parameters is False:
            raise ValueError(
                f"write_guard={self.write_guard!r} watches parameters that a host shares, got share_parameters=False, under which released ones "
                "are watched anyway"
            )

    @property
    def stage(self) -> int:
        """Return `zero`; with `step_in_backward` 2 for 0 and 1, whose means are not whole at any time either."""
        return max(self.zero, 2) if self.step_in_backward else self.zero

    def compared(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name, rules in FIELDS.items() if rules["compared"]}

    @property
    def chosen_transport(self) -> str:
        """Return `transport`; where that is "auto", the environment's SHARDWRIGHT_TRANSPORT, for debugging."""
        forced = os.environ.get("SHARDWRIGHT_TRANSPORT", "auto")
        FIELDS["transport"]["check"]("SHARDWRIGHT_TRANSPORT", forced)
        return forced if self.transport == "auto" else self.transport

    @property
    def bucket_cap_bytes(self) -> int:
        """Return the largest bucket, bytes; at least one cache line."""
        return max(int(self.bucket_cap_mb * _MIB), 128)

    @classmethod
    def from_keywords(cls, keywords: Mapping[str, Any], also_known: Collection[str] = ()) -> Options:
        """Make options from a caller's keywords. Raise TypeError for an unknown name, with the nearest known one."""
        for name in keywords:
            if name not in FIELDS:
                raise TypeError(unknown_name(name, {*FIELDS, *also_known}))
        return cls(**keywords)

    def ignored_names(self, module: Any) -> set[str]:
        """Return the names in ignored_params. Raise ValueError for one that no parameter or buffer of `module` has."""
        named = {n for each in (module.named_parameters, module.named_buffers) for n, _ in each(remove_duplicate=False)}
        names = {item for item in self.ignored_params if isinstance(item, str)}
        for name in sorted(names - named):
            raise ValueError(
                f"ignored_params: {type(module).__name__} has no parameter or buffer {name!r}{near(name, named)}"
            )
        return names

    def without_group(self) -> Options:
        """Return a copy that can be pickled, without process group and mesh."""
        return dataclasses.replace(self, process_group=None, device_mesh=None, groups=None, ignored_params=())


#: the rules of each option
FIELDS = {each.name: each.metadata for each in dataclasses.fields(Options)}


def refuse_options(options: Collection[str], names: Collection[str], where: str, instead: str) -> None:
    """Raise TypeError for an option that has no effect at `where`."""
    for name in names:
        if name in options:
            raise TypeError(f"{name} is no option of {where}: {instead}")


def text_of_group(key: Any) -> str:
    return repr(key) if isinstance(key, str) else f"a {type(key).__name__}"


def _with_values(type_: str) -> str:
    """Return a type with legal values in the place of their names in keywords.py."""
    return re.sub(r"\b[A-Z]\w+\b", lambda name: _values(getattr(keywords, name[0], None)) or name[0], type_)


def _values(alias: Any) -> str:
    return f"Literal[{', '.join(map(repr, get_args(alias)))}]" if get_origin(alias) is Literal else ""


def describes_options(taken: Any, **defaults: Any) -> Callable[[_Made], _Made]:
    """Show the keywords of `**options` in a call's signature and docstring. `defaults`: those other than Options'."""

    def parameter(name: str) -> inspect.Parameter:
        kind, default = inspect.Parameter.KEYWORD_ONLY, defaults.get(name, getattr(Options, name))
        return inspect.Parameter(name, kind, default=default, annotation=_with_values(Options.__annotations__[name]))

    def place(each: inspect.Parameter) -> tuple[int, float]:
        """Return where a parameter stands: basic options, keywords that are no options, expert options."""
        at = names.index(each.name) if each.name in names else BASIC_COUNT - 0.5
        return each.kind, at if each.kind == each.KEYWORD_ONLY else 0

    def describe(call: Any) -> Any:
        signature = inspect.signature(call)
        given = signature.parameters
        shown = [each for each in given.values() if each.name[0] != "_" and each.kind != each.VAR_KEYWORD]
        shown += [parameter(name) for name in names if name in taken.__annotations__ and name not in given]
        call.__signature__ = signature.replace(parameters=sorted(shown, key=place))
        if call.__doc__:  # python -OO has none
            basic, _, expert = (Options.__doc__ or "").partition("\n\n    Other Parameters\n    ----------------\n")
            basic, expert = basic.partition("----------\n")[2], expert.partition("\n\n    Raises")[0]
            for kind, described in (("basic", basic), ("expert", expert)):
                placeholder = f"    **options\n        The {kind} fields of Options.\n"
                call.__doc__ = call.__doc__.replace(placeholder, described + "\n")
        return call

    names = list(FIELDS)
    return describe
