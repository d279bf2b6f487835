"""Options of a wrapped module: one frozen dataclass, validated in one place.

Names are torch's where torch has one. An option of a stage that does not exist yet is refused by name, at construction
and not after an hour.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from typing import Any

from .compress import check_compressor
from .names import near, offers_fields, unknown_name
from .offload import offload_kind
from .precision import Precision
from .units import check_units, comparable

__all__ = ["Options"]

_MIB = 1024 * 1024
_TRANSPORTS = ("auto", "pool", "staged")
#: what ranks must give alike
_COMPARED = (
    *("bucket_cap_mb", "transport", "reduce", "deterministic", "communicator", "timeout_s", "warn_after_s", "silent_s"),
    *("zero", "share_parameters", "gather", "write_guard", "units", "reshard_after_forward", "prefetch", "compress"),
    *("offload", "check_every"),
)


@offers_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a wrapped module. All fields are keyword-only; every rank must pass the same values.

    Parameters
    ----------
    zero : {0, 1, 2, 3}
        The stage. 0 slices nothing over ranks, 1 optimizer state, 2 also averaged gradients, 3 also parameters.
    precision : {"bf16", "fp16", "fp32"}, Precision, or dict of module names to them, optional
        The dtypes in which the module computes. None: nothing is cast.
    compress : Fp16, Bf16, Int8, Int4, PowerSGD or "auto", optional
        The format in which gradients travel. None: uncompressed.
    clip_grad_norm : float, optional
        The norm to which each step clips gradients first. Needs the optimizer.
    offload : {"cpu", "nvme:<folder>"}, optional
        The place of the state of sw.optim's optimizers.
    partition : {"auto", "flat", "tensor"}
        How an optimizer is sliced at zero >= 1.
    process_group : torch.distributed.ProcessGroup, optional
        The ranks that train together. Default: the default group; without one, the group of the launcher's variables
        (docs/launch.md); without those, one rank.
    device_mesh : torch.distributed.device_mesh.DeviceMesh, optional
        A mesh of one dimension: its group is used. A mesh of two, (replicate, shard): all its ranks average gradients;
        the stage slices inside a row, and all rows keep the same bits. Traffic is least where each row lies on one
        host. Not together with `process_group`.
    groups : dict of str or Module to DeviceMesh or ProcessGroup, optional
        Parameters that are replicated over fewer ranks (experts), and those ranks. A key is a module, or a pattern of
        fnmatch for names of parameters or of modules around them ("layers.*.experts"). The parameters must be DTensors
        over the remaining ranks: the group times their mesh are the ranks of all other parameters. Their gradients are
        summed over the group and divided by the number of ranks of all other parameters. See docs/compose.md.
    bucket_cap_mb : float
        The largest gradient bucket, MiB; at zero >= 2 never above 8. It affects speed and memory only: results do not
        depend on it.
    timeout_s : float
        The seconds that a rank waits for another before CommTimeoutError.
    warn_after_s : float, optional
        The seconds after which a wait for another rank is logged as a warning, and again whenever it has doubled: for
        which rank, its process and host, in which collective, and what that process does. While ranks join, 10 seconds
        at most. 0 or None: never.
    silent_s : float, optional
        On CPUs: the seconds after which a rank that is stopped (SIGSTOP), or a host that acknowledges nothing (a cut
        link), is a CommError. Default: wait for both until `timeout_s`, since debuggers, job control and SLURM stop
        ranks and continue them.
    broadcast_buffers : bool
        Broadcast buffers from rank 0 at construction and before each forward, by torch's rules.
    init_sync : bool
        Broadcast parameters and buffers from rank 0 at construction. Their table is compared in any case.
    gradient_as_bucket_view, find_unused_parameters, static_graph : bool
        Accepted for compatibility with torch. Gradients are always views of buckets, and one that the program keeps is
        moved out of its bucket before that is written to again. Unused parameters are always handled.
    sparse_gradients : {"auto", "dense"}
        Gradients of nn.Embedding(sparse=True). "auto": at zero=0 on CPUs, without `precision`, they stay sparse, and
        their rows are gathered; elsewhere they are made dense, with one warning. "dense": made dense, without a warning.
    ignored_params : collection of Parameter or str
        Parameters left alone: neither broadcast nor averaged.
    reduce : {"mean", "sum"}
        The reduction of contributions. A sum leaves the scale to the loss, for example where ranks count their own
        tokens.
    deterministic : bool
        On GPUs: the fold in rank order, with the host's bits, instead of the transport's own mean. On the host it
        always holds. On a mesh the transport's mean is made by rows and columns, alike at every stage; the fold sends
        more between nodes.
    communicator : {"own", "borrow"}
        On GPUs: the NCCL communicator. "own": one of our own. "borrow": that of torch's process group, found by
        ProcessGroupNCCL._comm_ptr; an error with SHARDWRIGHT_GPU_TRANSPORT=shm or ipc. It saves a communicator's
        memory. All ranks must call torch's collectives over the group in the same place between our steps, never inside
        a backward. A failing rank or a passed deadline also aborts torch's communicator.
    transport : {"auto", "pool", "staged"}
        The place of gradient memory: shared between ranks, or private and staged through slots. The bits are the same.
    share_parameters : {"auto", True, False}
        At zero=3. True, and "auto": the ranks of a host share one copy of the parameters, which needs no gather. False:
        each rank keeps its slices and gathers units while they are used.
    units : "auto", "size", float, type or collection of types
        At zero=3 without sharing: the cut into units. "auto": modules that sw.fully_shard marked, or else repeated
        blocks. "size": modules of at least 32 MiB; a number: of that many MiB. Types: modules of these types. Other
        parameters belong to the whole module's own unit.
    reshard_after_forward : bool
        At zero=3 without sharing: release units between forward and backward, except for the outermost one.
    prefetch : int
        On GPUs. At zero=3: the number of units gathered ahead of the running one. Each after the first takes memory of
        the largest unit's size. At zero=1 and 2, unless 0: gathers of parameters run on behind a step, and a unit's
        forward waits for its own. 0: gathers overlap with nothing (docs/design/gpu_gathers.md).
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
        bytes and no message (docs/design/replica_check.md). Ranks must not step on their own inside no_sync().

    Raises
    ------
    TypeError, ValueError
        For a value of the wrong type or outside its range.
    NotImplementedError
        For a value that is not supported yet.
    """

    zero: int = 0
    precision: Any = None
    compress: Any = None
    clip_grad_norm: float | None = None
    offload: str | None = None
    partition: str = "auto"
    process_group: Any = None
    device_mesh: Any = None
    groups: Any = None
    bucket_cap_mb: float = 25
    timeout_s: float = 1800.0
    warn_after_s: float | None = 30.0
    silent_s: float | None = None
    broadcast_buffers: bool = True
    init_sync: bool = True
    gradient_as_bucket_view: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False
    sparse_gradients: str = "auto"
    ignored_params: Collection[Any] = ()
    reduce: str = "mean"
    deterministic: bool = False
    communicator: str = "own"
    transport: str = "auto"
    units: Any = "auto"
    reshard_after_forward: bool = True
    prefetch: int = 1
    share_parameters: Any = "auto"
    gather: str | None = None
    write_guard: str | None = "auto"
    check_every: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.zero, bool) or not isinstance(self.zero, int) or self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero must be 0, 1, 2 or 3, got {self.zero!r}")
        if self.reduce not in ("mean", "sum"):
            raise ValueError(f"reduce must be 'mean' or 'sum', got {self.reduce!r}")
        offload_kind(self.offload)
        check_compressor(self.compress, self.reduce)
        _check_precision(self.precision)
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
        check_groups(self.groups)
        _check_positive("bucket_cap_mb", self.bucket_cap_mb, "MiB", 2**40)
        _check_positive("timeout_s", self.timeout_s, "seconds", 1e9)
        if self.warn_after_s not in (None, 0) or isinstance(self.warn_after_s, bool):
            _check_positive("warn_after_s", self.warn_after_s, "seconds", 1e9, "None or 0 for never, or ")
        if self.silent_s is not None:
            _check_positive("silent_s", self.silent_s, "seconds", 1e6)
        for name in (each.name for each in dataclasses.fields(self) if isinstance(each.default, bool)):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.sparse_gradients not in ("auto", "dense"):
            raise ValueError(f"sparse_gradients must be 'auto' or 'dense', got {self.sparse_gradients!r}")
        if self.transport not in _TRANSPORTS:
            raise ValueError(f"transport must be one of {', '.join(_TRANSPORTS)}, got {self.transport!r}")
        if self.communicator not in ("own", "borrow"):
            raise ValueError(f"communicator must be 'own' or 'borrow', got {self.communicator!r}")
        if self.share_parameters != "auto" and not isinstance(self.share_parameters, bool):
            raise ValueError(f"share_parameters must be 'auto', True or False, got {self.share_parameters!r}")
        if self.gather not in (None, "int8"):
            raise ValueError(f"gather must be None or 'int8', got {self.gather!r}")
        if self.gather is not None and self.share_parameters is not False:
            raise ValueError(
                f"gather={self.gather!r} needs share_parameters=False, got {self.share_parameters!r}: parameters that a host shares are "
                "not gathered"
            )
        if self.write_guard not in ("auto", "samples", None):
            raise ValueError(f"write_guard must be 'auto', 'samples' or None, got {self.write_guard!r}")
        if self.write_guard == "samples" and self.share_parameters is False:
            raise ValueError(
                f"write_guard={self.write_guard!r} watches parameters that a host shares, got share_parameters=False, under which released ones "
                "are watched anyway"
            )
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or not 0 <= self.prefetch <= 1024:
            raise ValueError(f"prefetch must be a number of units in [0, 1024], got {self.prefetch!r}")
        every = self.check_every
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(f"check_every must be None or a number of steps, at least 1, got {every!r}")
        check_units(self.units)
        self._check_stage()
        if isinstance(self.ignored_params, (str, bytes)) or not isinstance(self.ignored_params, Collection):
            raise TypeError(f"ignored_params must be a collection of parameters or names, got {self.ignored_params!r}")

    def compared(self) -> dict[str, Any]:
        """Return the values that ranks compare when they wrap a module."""
        found = {name: getattr(self, name) for name in _COMPARED}
        found.update(transport=self.chosen_transport, units=comparable(self.units), offload=offload_kind(self.offload))
        return found

    @property
    def chosen_transport(self) -> str:
        """Return `transport`; where that is "auto", the environment's SHARDWRIGHT_TRANSPORT.

        A debug entry: bits do not depend on it.
        """
        forced = os.environ.get("SHARDWRIGHT_TRANSPORT", "auto")
        if forced not in _TRANSPORTS:
            raise ValueError(f"SHARDWRIGHT_TRANSPORT must be one of {', '.join(_TRANSPORTS)}, got {forced!r}")
        return forced if self.transport == "auto" else self.transport

    @property
    def bucket_cap_bytes(self) -> int:
        """Return the largest bucket, bytes; at least one cache line."""
        return max(int(self.bucket_cap_mb * _MIB), 128)

    @classmethod
    def from_keywords(cls, keywords: Mapping[str, Any], also_known: Collection[str] = ()) -> Options:
        """Make options from keywords. TypeError for an unknown one suggests the nearest of ours and `also_known`."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in keywords:
            if name not in known:
                raise TypeError(unknown_name(name, known | set(also_known)))
        return cls(**keywords)

    def _check_stage(self) -> None:
        """Raise ValueError for an option of zero=3 that is given at another stage."""
        for name in ("gather", "share_parameters", "units", "reshard_after_forward", "write_guard"):
            if self.zero != 3 and getattr(self, name) not in (getattr(Options, name), None):
                raise ValueError(f"{name}= requires zero=3, got zero={self.zero}")

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


def refuse_options(options: Collection[str], names: Collection[str], where: str, instead: str) -> None:
    """Raise TypeError for an option that has no effect at `where`."""
    for name in names:
        if name in options:
            raise TypeError(f"{name} is no option of {where}: {instead}")


def _check_precision(precision: Any) -> None:
    for name, value in precision.items() if isinstance(precision, Mapping) else ():
        Precision.of(value, f"precision[{name!r}]")
    if precision is not None and not isinstance(precision, Mapping):
        Precision.of(precision)


def check_groups(groups: Any) -> None:
    if groups is None:
        return
    if not isinstance(groups, Mapping) or not groups:
        raise TypeError(f"groups must be a dict of patterns or modules to meshes or process groups, got {groups!r}")
    for key, group in groups.items():
        if not isinstance(key, str) and not hasattr(key, "named_parameters"):
            raise TypeError(f"groups: a key must be a pattern or a module, got {key!r}")
        if getattr(group, "ndim", 1) != 1:
            raise ValueError(f"groups: the mesh of {text_of_group(key)} must have one dimension, got {group.ndim}")


def text_of_group(key: Any) -> str:
    """Return a key of `groups` for messages."""
    return repr(key) if isinstance(key, str) else f"a {type(key).__name__}"


def _check_clip(max_norm: Any) -> None:
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)):
        raise TypeError(f"clip_grad_norm must be a number or None, got {max_norm!r}")
    if not max_norm > 0:
        raise ValueError(f"clip_grad_norm must be above 0, got {max_norm!r}")


def _check_positive(name: str, value: Any, unit: str, largest: float, also: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be {also}a number of {unit}, got {value!r}")
    if not 0 < value <= largest:
        raise ValueError(f"{name} must be {also}above 0 and at most {largest:g} {unit}, got {value!r}")
