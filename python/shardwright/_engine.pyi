"""The C engine as Python sees it. Everything that can block releases the GIL, and runs Python's signal handlers while it waits."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from typing_extensions import disjoint_base

class Error(RuntimeError):
    """Base of the engine's errors: ranks that disagree, a move that the state does not allow."""

class CommError(Error):
    """A peer died or left.

    Attributes: `rank`, the peer (-1 if unknown); `host`, its host name.
    """

    rank: int
    host: str

class CommTimeoutError(CommError, TimeoutError):
    """A peer did not come before the deadline."""

class CheckpointError(Error):
    """A checkpoint could not be written or read.

    Attributes: `errno`, where the system refused something; None otherwise.
    """

    errno: int | None

class NewerCheckpointError(CheckpointError):
    """A checkpoint is of a newer version than this program reads."""

def instruction_sets() -> list[str]:
    """Kernel tables that were compiled in and run on this processor, best last."""

def instruction_set() -> str:
    """The table in force."""

def force_instruction_set(name: str | None, /) -> None:
    """Debug entry: `name` from instruction_sets(), or None for the best one. ValueError otherwise."""

def fold(destination: int, sources: Sequence[int], numel: int, dtype: str, op: str, /) -> None:
    """The kernel itself, on addresses of `numel` elements each: destination = op over sources in their order (a test's entry)."""

def crc32c(address: int, nbytes: int, /) -> int:
    """CRC-32C of `nbytes` bytes at `address`: the checksum of checkpoints' blocks."""

def sample_crc32c(address: int, nbytes: int, stride: int, /) -> int:
    """The checksum of a few cache lines of some memory: its first and last 64 bytes, and 64 at every `stride`."""

def prefer_huge_pages(address: int, nbytes: int, /) -> None:
    """Asks for huge pages in memory that nobody touched yet. A hint."""

def object_addresses(containers: list[Any], /) -> bytes:
    """The identities of the members of dicts (keys and values) and lists, and of any other object itself."""

def tensor_places(tensors: list[Any], /) -> bytes | None:
    """Address, device type, dtype, shape and strides of each tensor; None if torch shows no view of one of them in C."""

def host_limits() -> dict[str, Any]:
    """memory_max_bytes, memory_current_bytes, fsize_bytes, nofile (None where unlimited or unknown)."""

def own_pages(address: int, nbytes: int, /) -> None:
    """In a forked child, replace inherited pages by private ones with the same contents."""

def forked() -> None:
    """To be called first in a forked child: what it writes to memory of ranks from then on stays its own."""

def self_test() -> None:
    """A fold and a threaded all_reduce on comm/local; raises Error on a wrong result. Needs no torch."""

def adam_step(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    max_exp_avg_sqs: Sequence[torch.Tensor] | None,
    steps: Sequence[torch.Tensor],
    copies: Sequence[torch.Tensor] | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool = False,
    grad_scale: float = 1.0,
    state_file: StateFile | None = None,
    gpu: tuple[DeviceComm | DeviceOffload, int] | None = None,
    clip: int = 0,
) -> list[int]:
    """One step of Adam (decoupled: AdamW) on CPU tensors of float32, bfloat16 or float16; amsgrad if `max_exp_avg_sqs`.

    `steps` are scalars that count up. `copies` receive the new parameters, rounded to their own dtype. Every array of
    a parameter has its shape. Returns the indices of those whose arrays have other strides than they: if there are
    any, nothing was done. ValueError, before anything is written, for anything else. Arrays over `state_file` are moved
    through its buffers: OSError if that fails, and Error at each later step if part of them had changed by then. `gpu`: all but
    `steps` is on that GPU; up to 48 parameters of one step count go as one launch, enqueued on the stream of that address. With a
    DeviceOffload gradients alone are there, and `copies`, or `params` where there are none: the step runs on the CPU, in the order of the stream.
    `clip`: the address of a float32 on that GPU; each gradient is first multiplied by it, rounded to its dtype and written back.
    """

def sgd_step(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    momentum_buffers: Sequence[torch.Tensor] | None,
    copies: Sequence[torch.Tensor] | None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
    maximize: bool = False,
    grad_scale: float = 1.0,
    state_file: StateFile | None = None,
    gpu: tuple[DeviceComm | DeviceOffload, int] | None = None,
    clip: int = 0,
) -> list[int]:
    """One step of SGD; as adam_step. `first`: buffers are not used, they become the gradient."""

@final
class StateFile:
    """Optimizer state in a file without a name in `folder`; `label` names it in messages. OSError where it cannot be made.

    A step goes through three buffers of `buffer_bytes` (a multiple of 64 KiB).
    """

    def __init__(self, folder: str, label: str, buffer_bytes: int) -> None: ...
    def grow(self, nbytes: int, /) -> int:
        """The address of so many zeroed bytes more, in whole pages. OSError where there is no space: as before then."""

    def tensor(
        self, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int] | None, owner: object, /
    ) -> object:
        """A DLPack capsule over bytes at `address`; `owner`, which must keep this object, lives as long as its tensor."""

    def forget(self) -> None:
        """Pages that were looked at are this process's memory no longer; what was written stays."""

    @property
    def nbytes(self) -> int: ...
    @property
    def buffer_nbytes(self) -> int: ...
    @property
    def direct(self) -> bool: ...

def norm_sum(tensors: Iterable[torch.Tensor], /) -> bytes:
    """The exact sum of squares of dense CPU tensors (float32, bfloat16, float16, float64), closed: 139 int64 words,
    whose word-by-word sum over ranks is the sum of all."""

def norm_value(sums: Iterable[bytes], /) -> float:
    """The square root of all `sums` together, rounded once; NaN or infinity if such an element was met."""

# Compression, on addresses; see csrc/compress/codec.h and powersgd.h. An address of 0 means: none.

def block_record_bytes(block: int, bits: int, /) -> int:
    """Bytes of one record. ValueError unless block is a multiple of 32 in [32, 4096] and bits 8 or 4."""

def block_encode(block: int, bits: int, records: int, source: int, error: int, numel: int, /) -> None:
    """records = quantized source (+ error); an array's records begin with it."""

def block_fold(
    block: int, bits: int, out: int, wires: Sequence[int], count: int, scale: float, residual: int, /
) -> None:
    """out = quantized (scale * sum of the decoded wires, in order) of `count` records; residual: what that left out."""

def block_is_finite(block: int, bits: int, records: int, count: int, /) -> bool:
    """Whether no record says that something was not finite."""

def block_decode(block: int, bits: int, out: int, records: int, error: int, own: int, numel: int, /) -> None:
    """out = decoded records; first, with an error: error = (out + error) - decoded own."""

def half_encode(dtype: str, wire: int, source: int, numel: int, scale: float, /) -> None:
    """wire = round(source * scale) to "float16" or "bfloat16"."""

def half_decode(dtype: str, out: int, wire: int, numel: int, /) -> None:
    """out = wire as float32."""

def cuda_devices(library: str | None = None, /) -> dict[str, Any]:
    """``{"version": (major, minor), "devices": [{"name", "capability", "multiprocessors"}]}`` of the driver.

    NotImplementedError when there is no driver, it shows no GPU or is too old; ``Error`` when it fails.
    """

def device_kernel_cases() -> dict[str, int]:
    """Return the number of cases of each kernel, by its name."""

def device_kernel_check(
    comm: DeviceComm, kernel: str, first: int = 0, step: int = 1, strict: bool = False
) -> dict[str, Any]:
    """Compare a kernel with its reference on the GPU: cases first, first + step, ..., each on three grids.

    Returns ``{"cases", "launches", "differences", "sentences"}``; `sentences` describes the first differences. `strict`, for
    compute-sanitizer: each case has new device memory that holds only what the kernel is declared to read. ``Error`` when a call of the
    driver's fails.
    """

def device_kernel_source() -> tuple[str, list[str]]:
    """The CUDA text of the device kernels and the options it must be compiled with."""

def device_kernel_image(
    major: int,
    minor: int,
    packaged: str | None = None,
    cache: str | None = None,
    nvrtc: str | None = None,
    builtins: str | None = None,
) -> tuple[str, bytes]:
    """``(origin, image)`` of the device kernels for compute capability major.minor.

    Looked for in this order: the folder `packaged`, the folder `cache`, the compiler library `nvrtc`.
    """

def device_block_encode(
    comm: DeviceComm, block: int, bits: int, parts: list[tuple[int, int, int, int]], stream: int, /
) -> None:
    """As block_encode, of parts (records, source, error, numel), on the GPU of `comm`, enqueued on `stream`; so are those below.

    source 0: records of zeros. One launch for each 100 parts.
    """

def device_block_fold(
    comm: DeviceComm,
    block: int,
    bits: int,
    out: int,
    own: int,
    others: int,
    stride_bytes: int,
    own_index: int,
    world_size: int,
    count: int,
    scale: float,
    rest: int,
    stream: int,
    /,
) -> None:
    """As block_fold; rank r's records at others + r * stride_bytes, but the own. `rest` is NaN where a record is not finite."""

def device_block_verdict(
    comm: DeviceComm, block: int, bits: int, verdict: int, records: int, count: int, stream: int, /
) -> None:
    """The int32 at `verdict` becomes 0 if all records are of finite values, else 1."""

def device_block_decode(
    comm: DeviceComm, block: int, bits: int, parts: list[tuple[int, int, int, int, int]], verdict: int, stream: int, /
) -> None:
    """As block_decode, of parts (values, error, records, own, numel); errors are changed unless the int32 at `verdict` is 1.

    records 0: the values stay. One launch for each 100 parts.
    """

def device_block_owe(
    comm: DeviceComm,
    block: int,
    bits: int,
    parts: list[tuple[int, int, int]],
    verdict: int,
    scale: float,
    stream: int,
    /,
) -> None:
    """error += rest * scale, of parts (error, rest, numel), unless the int32 at `verdict` is 1. One launch for each 100 parts."""

#: (gradient, memory, left, right, basis, out, copy, rows, cols, rank, memory_dtype): addresses, 0 for none
_DeviceMatrix = tuple[int, int, int, int, int, int, int, int, int, int, str]

def device_powersgd_project(comm: DeviceComm, matrices: list[_DeviceMatrix], verdict: int, stream: int, /) -> None:
    """As powersgd_project, `out` is P; enqueued on `stream`, one launch for up to 46 matrices. So are those below."""

def device_powersgd_absorb(comm: DeviceComm, matrices: list[_DeviceMatrix], verdict: int, stream: int, /) -> None:
    """Unless the int32 at `verdict` is not 0: memory = v; out and copy (0: none) = Q = vᵀ left. out 0: memory alone."""

def device_powersgd_expand(comm: DeviceComm, matrices: list[_DeviceMatrix], verdict: int, stream: int, /) -> None:
    """gradient = leftᵀ right if the verdict is 0, else NaN; if it is 2, memory and out become zeros."""

def device_powersgd_orthonormalize(
    comm: DeviceComm, factors: list[tuple[int, int, int, int, int]], verdict: int, stream: int, /
) -> None:
    """Of (to, from, count, rank, seed): rows of `from` made orthonormal, unless the verdict is not 0. Up to 64 a launch."""

def device_finite(comm: DeviceComm, verdict: int, values: int, numel: int, refusal: int, stream: int, /) -> None:
    """The int32 at `verdict` becomes `refusal` (1 or 2) if it is 0 and one of the float32 values is not finite."""

def device_fold(
    comm: DeviceComm,
    to: int,
    own: int,
    rest: int,
    numel: int,
    stride_bytes: int,
    own_index: int,
    count: int,
    dtype: str,
    is_mean: bool,
    stream: int,
    /,
) -> None:
    """As fold: contribution k lies at rest + k * stride_bytes, but number own_index at `own`."""

def device_cast(
    comm: DeviceComm,
    to: int,
    to_dtype: str,
    from_: int,
    from_dtype: str,
    numel: int,
    scale: float,
    stream: int,
    /,
) -> None:
    """Scales in float32 and rounds; float32, float16 and bfloat16 each way."""

def device_tensor(
    ordinal: int,
    owner: object,
    address: int,
    dtype: str,
    shape: Sequence[int],
    strides: Sequence[int] | None,
    /,
) -> object:
    """A DLPack capsule over memory of `owner`, which lives as long as its tensor, on GPU `ordinal`; -1: on the CPU."""

def nccl_unique_id(library: str | None = None, /) -> bytes:
    """128 bytes that one rank makes and sends to all: what DeviceComm.connect() takes."""

def slot_part_bytes(slot_bytes: int, /) -> int:
    """Bytes of a rank's part of an arena with slots of `slot_bytes` each: what DeviceComm.connect_slots() takes."""

@final
class DeviceComm:
    """A rank's GPU: its kernels, a way to its peers (NCCL, or slots in memory that the ranks of a host share), and one stream for it.

    Streams are addresses, as ``torch.cuda.Stream.cuda_stream``; memory is (address, ...). One issuing thread a rank.
    """

    #: the stream of all collectives
    stream: int
    #: connected, not closed, and nothing has failed
    is_alive: bool
    has_failed: bool
    def __init__(
        self,
        ordinal: int,
        *,
        libcuda: str | None = None,
        libnccl: str | None = None,
        packaged: str | None = None,
        cache: str | None = None,
        nvrtc: str | None = None,
        builtins: str | None = None,
        host: HostComm | None = None,
        make_room: Callable[[], object] | None = None,
        beside: DeviceComm | None = None,
    ) -> None:
        """Open this rank's GPU alone. `beside`: use the stream of that one. Libraries: None for those that torch has loaded; the rest as device_kernel_image(). `host`: is asked whether the
        ranks that this one waits for live, and ended when the GPU's communicator fails, with the same sentence, so that ranks that
        wait there learn it; None: nobody is asked or told. `make_room` is called, from any thread, where an allocation of GPU memory
        fails, before it is tried once more.

        NotImplementedError names what is missing: the driver, a GPU, an image of the kernels. NCCL may be: see describe().
        """
    def connect(self, id: bytes, rank: int, world_size: int, timeout_s: float, /) -> None:
        """Joins the peers through NCCL. Collective. CommTimeoutError when one does not come; NotImplementedError without NCCL."""
    def connect_slots(
        self, arena: Arena, members: Sequence[int], slot_bytes: int, place: str, rank: int, timeout_s: float, /
    ) -> None:
        """Joins the peers through slots in `arena` (slot_part_bytes(slot_bytes) each, zero): its ranks `members`, of which this is number
        `rank`. `place`: "shm", in the arena; "ipc", in the GPUs' own memory, or NotImplementedError on all ranks; "auto", there if
        all ranks can. Collective. CommTimeoutError when one does not come."""
    def borrow(self, handle: int, rank: int, world_size: int, timeout_s: float, /) -> None:
        """In place of connect(), this rank alone: over the communicator at `handle`, which stays its owner's.

        Nothing ends it here; after a failure its owner has to. ValueError when it is of another rank, world size or GPU.
        """
    def give_back(self, stream: int, /) -> None:
        """What `stream` does from now on comes after ours, if the communicator is borrowed: its owner's next operations."""
    def refuse_capture(self, stream: int, what: str, /) -> None:
        """NotImplementedError, naming `what`, when `stream` is being captured into a CUDA graph."""
    def broadcast(self, ranges: Sequence[tuple[int, int, str]], root: int, stream: int, /) -> None:
        """(address, numel, dtype) of `root` to all, in the order of `stream`. Waits for nothing."""
    def all_gather(self, ranges: Sequence[tuple[int, int, str]], stream: int, /) -> None:
        """Slice r of each (address, numel, dtype) becomes rank r's, in the order of `stream`. Waits for nothing."""
    def exchange(self, range: tuple[int, int, str], received: int, stream: int, /) -> None:
        """Of a range (address, numel, dtype) cut into one slice a rank: place r at `received` becomes rank r's copy of this rank's slice, but
        the own one, which stays where it is. In the order of `stream`."""
    def norm_sum(self, ranges: Sequence[tuple[int, int, str]], stream: int, /) -> bytes:
        """The exact sum of squares, as norm_sum() gives it. Waits on the host."""
    def clip(
        self, ranges: Sequence[tuple[int, int, str]], max_norm: float, is_sliced: bool, result: int, stream: int, /
    ) -> None:
        """Two float32 at `result`, in the order of `stream`: the exact norm, and max_norm / (norm + 1e-6) if that is below 1, else 1.
        `is_sliced`: of the ranges of all ranks together; collective then. Waits for nothing."""
    def follow(self, later: int, earlier: int, /) -> None:
        """What stream `later` does from now on comes after all that `earlier` was given."""
    def pack(self, copies: list[tuple[int, int, int]], stream: int, verdict: int = 0, /) -> None:
        """Copies (to, from, nbytes) on `stream`, up to 64 a launch; unless the int32 at `verdict`, if there is one, is not 0."""

    def convert(
        self,
        copies: list[tuple[int, int, int]],
        to_dtype: str,
        from_dtype: str,
        scale: float,
        stream: int,
        factor: int = 0,
        /,
    ) -> None:
        """As pack: (to, from, nbytes of from) on `stream`, each element times `scale`, or times the float32 at `factor`, and rounded to
        `to_dtype`. float32, float16 and bfloat16. A copy that is its own target is left alone where the factor is 1."""

    def start_watch(self) -> None:
        """Watch the communicator in a thread of the engine's until it is closed: it ends it, also beside a call that is blocked, when a rank
        has failed or what was enqueued is late."""

    def watch(self) -> None:
        """Raises when a rank has failed or is late, which ends the communicator. Does not wait; any thread."""
    def abort(self, reason: str, /) -> None:
        """Ends the communicator on this rank: what waits in it is let go, later calls raise CommError with `reason`."""
    def describe(self) -> dict[str, Any]:
        """ordinal, name, address (PCI), capability, nccl (version; zeros where it is missing), nccl_missing (why; else ""), kernels
        (where their image came from), transport ("nccl", "shm", "ipc"; None before connecting)."""
    def stats(self) -> dict[str, int]:
        """Driver calls since creation: launches, copies, records, stream_waits, host_waits, allocations."""
    def close(self) -> None:
        """Ends the communicator once what was enqueued has run. Idempotent."""

@final
class DeviceRegion:
    """Memory by ncclMemAlloc, for a communicator. See csrc/comm/device_region.h.

    What operations read or write of it they do on all ranks, at the same offsets, or on none. It is freed behind the last use on `stream`.
    """

    #: of its first byte
    address: int
    nbytes: int
    #: whether NCCL may reach it where it lies
    is_registered: bool
    is_window: bool
    def register(self, as_window: bool = False, /) -> None:
        """Register with NCCL. NotImplementedError: it declined; Error: it failed. `as_window`: collective, and a failure ends the
        communicator; plainly where no rank can have windows."""
    def __init__(self, comm: DeviceComm, nbytes: int, stream: int) -> None:
        """This rank alone. NotImplementedError: what `comm` goes through registers nothing; Error: it failed."""
    def deregister(self) -> None:
        """The memory stays. Waits for the communicator's stream. Idempotent."""

@final
class DeviceUnits:
    """Units of parameters that are gathered into a GPU's places, ordered by events. See csrc/zero/device_units.h."""

    def __init__(
        self,
        comm: DeviceComm,
        place_count: int,
        units: list[tuple[str, int, int, list[tuple[int, int, int, str, str]]]],
    ) -> None:
        """`units`: (name, place, address there, runs), runs (address of this rank's slice, offset_bytes in the unit, nbytes of a
        slice in the unit, dtype of the slice, dtype in the unit). A unit with address 0 is gathered apart alone. ValueError
        for a place that does not exist."""
    def gather(self, unit: int, /) -> None:
        """Enqueued, once its place was left; waits for nothing. Error where another unit lies there. Alike on all ranks, in one order."""
    def take(self, unit: int, stream: int, /) -> None:
        """`stream` sees the unit, which is being gathered, from now on."""
    def wait(self, unit: int, /) -> None:
        """All streams see the unit from now on: the host waits until it is whole."""
    def release(self, unit: int, stream: int, /) -> None:
        """`stream` has been given all that uses the unit."""
    def gather_apart(self, unit: int, address: int, stream: int, /) -> None:
        """Into other memory, in the order of `stream`; its place is not touched."""
    def update(self, stream: int, /) -> None:
        """Slices were written on `stream`. Error where a unit is not sharded."""
    def gather_anew(self, stream: int, /) -> None:
        """Gather all units once more, each in its place, behind the writes to their slices on `stream`. Waits for nothing; take() each."""
    def state(self, unit: int, /) -> str:
        """ "sharded", "gathering" or "unsharded"."""
    def holder(self, place: int, /) -> int | None:
        """The unit that lies, or is being gathered, in a place."""
    def stats(self) -> dict[str, int]:
        """gathers, releases, gathered_bytes (of whole units)."""

@final
class DeviceOffload:
    """Steps on the CPU for parameters on a GPU, in batches through pinned memory. See csrc/zero/device_offload.h.

    `slot_bytes`: of each of three slots, a multiple of 256; `thread_count`: that step, the caller's among them.
    """

    def __init__(self, comm: DeviceComm, slot_bytes: int, thread_count: int) -> None: ...
    @property
    def buffer_nbytes(self) -> int:
        """Of pinned memory that steps go through."""
    @property
    def thread_count(self) -> int: ...
    def stats(self) -> dict[str, int]:
        """batches, bytes_down, bytes_up."""

#: gradient, memory, left, right, basis (addresses), rows, cols, rank, seed, the memory's dtype ("float32" or "bfloat16")
_Matrix = tuple[int, int, int, int, int, int, int, int, int, str]

def powersgd_stride(count: int, /) -> int:
    """Elements of a factor's row for `count` rows or columns of a matrix."""

def powersgd_init_basis(matrices: Sequence[_Matrix], /) -> None:
    """basis = orthonormal pseudo-random rows of the seed."""

def powersgd_project(matrices: Sequence[_Matrix], p: Sequence[int], /) -> None:
    """P = v Q, and the gradient becomes v: the state is not touched. ValueError for a rank out of range, before anything is written."""

def powersgd_absorb(matrices: Sequence[_Matrix], p: Sequence[int], q: Sequence[int], /) -> None:
    """P is orthonormalized in place; Q = vᵀ P; the state takes both, and v."""

def powersgd_decompress(matrices: Sequence[_Matrix], q: Sequence[int], /) -> None:
    """gradient = P Qᵀ; the next step's basis is the orthonormalized Q."""

def powersgd_error(matrices: Sequence[_Matrix], errors: Sequence[int], /) -> None:
    """What each matrix still owes, rows x cols float32."""

def powersgd_is_finite(values: int, numel: int, /) -> bool:
    """Whether all of `numel` float32 values are finite."""

@final
class Arena:
    """Memory of one size on every rank, mapped by all of them. Made by HostComm.arena()."""

    nbytes: int
    address: int
    def tensor(
        self,
        offset_bytes: int,
        dtype: str,
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
        rank: int = -1,
        /,
    ) -> Any:
        """A DLPack capsule (for torch.utils.dlpack.from_dlpack) over this rank's part, or rank's: the memory lives as
        long as the tensor."""

    def populate(self, offset_bytes: int, nbytes: int, /) -> None:
        """Pages of this rank's part are there from now on, huge ones where the kernel can."""

@final
class HostComm:
    """The ranks of a group, joined through shared memory, and through a wire between hosts. One issuing thread a rank."""

    rank: int
    world_size: int
    #: deadline of each wait, seconds
    timeout_s: float
    #: a peer of this host that is stopped for so long ends a wait for it, seconds; 0: the deadline does
    silent_s: float
    #: a wait of so many seconds is logged, then again whenever it has doubled; 0: never
    warn_after_s: float
    #: abstract socket name that peers connect to, "" at world size 1
    address: str
    #: the host name of each rank, once joined; empty for ranks of other hosts before extend()
    hosts: list[str]
    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        timeout_s: float = 1800.0,
        warn_after_s: float = 30.0,
        host: str = "",
        log: Callable[[str], None] | None = None,
    ) -> None: ...
    def connect(
        self, addresses: Sequence[str], secret: bytes, hosts: Sequence[str], *, members: Sequence[int] | None = None
    ) -> None:
        """Joins the ranks of this host: `members`, ascending (None: all). `addresses` and `hosts` have one entry a member.

        `secret`: 16 bytes, equal on all ranks. Until extend() the communicator is one of the members alone.

        Raises CommError naming the first peer that cannot be reached, CommTimeoutError at the deadline.
        """
    def extend(self, host_of: Sequence[int], host: str, *, wire: Any = None) -> None:
        """Joins the ranks of other hosts, after connect(). Collective over all ranks: no rank returns before all have come.

        `host_of`: the host of each rank, numbered by their lowest rank; `host`: this host's name. `wire`, on each host's lowest
        rank, moves bytes between hosts: send(rank, tag, address, nbytes), receive(...) and wait(what those returned).
        A failure ends the communicator.
        """
    def arena(self, nbytes: int, label: str = "arena", *, of_hosts: bool = False) -> Arena:
        """Collective. MemoryError on every rank alike, naming rank and limit, when one of them cannot allocate.

        `of_hosts`: it is enough that the ranks of each host map one another's parts; else several hosts are a
        NotImplementedError.
        """
    def all_reduce(
        self,
        address: int,
        numel: int,
        dtype: str,
        op: str = "sum",
        label: str = "all_reduce",
        arena: Arena | None = None,
    ) -> None:
        """In place, `numel` elements at `address`. Zero-copy when `arena` is given, in which the range must lie; else staged."""
    def broadcast(self, ranges: Sequence[tuple[int, int]], root: int, label: str = "broadcast", /) -> None:
        """Bytes of `ranges` (address, nbytes) of `root` to the same ranges of all."""
    def all_gather_bytes(self, data: bytes, label: str = "all_gather", /) -> list[bytes]:
        """Every rank's `data` (any length each), in rank order."""
    def all_gather(
        self,
        arena: Arena,
        ranges: Sequence[tuple[int, int]],
        label: str = "all_gather",
        *,
        one_copy: bool = False,
        slices: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        """Of each range (offset_bytes, nbytes) of `arena`, cut into world_size equal slices of whole cache lines, every
        rank's slice of its own part to all parts. `one_copy`: of the part that the ranks of a host share, which is their
        lowest rank's, to that of every other host. `slices`: as Reducer's; slices go round inside a replica."""
    def barrier(self, label: str = "barrier", /) -> None: ...
    def abort(self, reason: str, /) -> None:
        """Ends the communicator: every peer's present or next call raises CommError with `reason`; so does the call of another thread of
        this rank."""
    def stats(self) -> dict[str, int]:
        """Counts since creation: all_reduce, broadcast, all_gather, barrier, bytes_reduced, bytes_staged, waits, wait_ns."""
    def describe(self) -> dict[str, Any]:
        """rank, world_size, transport, peers (one sentence each), watch ("pidfd"|"file lock"|"none"), timeout_s."""
    @property
    def is_alive(self) -> bool:
        """Whether it can still be used: not closed, and no rank of it has met an error or left."""
    @property
    def dead_rank(self) -> int | None:
        """A rank of this host whose process has ended; None if none is known."""
    def peer(self, rank: int, /) -> str:
        """Return a rank, its process and host, and what the process does, for messages."""
    @property
    def end_reason(self) -> str | None:
        """Why it is not alive: what the rank has said that met an error, or which rank died or left. None where it is, or was closed."""
    def close(self) -> None:
        """Leaves the group; peers that wait for this rank afterwards get a CommError. Idempotent."""

@final
class GradientHook:
    """The link from a hook that Reducer.hook() returns to its reducer: it does not keep the engine alive."""

@disjoint_base
class Reducer:
    """Buckets of gradients and their mean, round by round. See docs/design/reduce.md.

    Parameters are given in registration order; buckets are cut over the reverse of it. Frozen parameters have
    buckets of their own, whose memory is never touched until one of them is unfrozen. Over a DeviceComm the object is of a
    subclass, device_reducer.DeviceReducer, of which the engine calls _locate, _keep, _restore, _blank, _blank_bucket and _end.
    """

    def __init__(
        self,
        comm: HostComm | DeviceComm,
        parameters: Sequence[tuple[str, int, str, bool] | tuple[str, int, str, bool, int]],
        *,
        bucket_cap_bytes: int,
        transport: str = "auto",
        reduce: str = "mean",
        sliced: bool = False,
        slices: tuple[Sequence[int], Sequence[int]] | None = None,
        label: str = "model",
        first_cap_bytes: int = 0,
        deterministic: bool = False,
        wire: str | None = None,
        lent: bool = False,
        row: DeviceComm | None = None,
        column: DeviceComm | None = None,
    ) -> None:
        """`parameters`: (name, numel, dtype, requires_grad), and as a fifth a group: those of different groups share no bucket. `first_cap_bytes`: of the first bucket, after which caps double up to
        `bucket_cap_bytes`; 0: all alike. `transport`: "auto", "pool", "staged". `reduce`: "mean", "sum".
        `sliced`: this rank keeps its slices of the averaged gradients alone; views are then ShardedGradients, whose `_pending`
        the engine takes, and `copy(index, grad, add)` writes or adds a gradient that it cannot read by itself. `slices`: which
        slice of a bucket each rank owns, and its replica, which owns all of them once; None: rank r owns slice r. Collective over a
        HostComm. Of a DeviceComm alone: `deterministic`, the fold in rank order; `wire`, "float16" or "bfloat16", in what means travel; `lent`,
        lend() brings memory; `row` and `column`, beside it, of a mesh: the transport reduces in the one, then in the other."""
    transport: str
    transport_reason: str
    bucket_count: int
    planned_bytes: int
    def gradient(self, index: int, shape: Sequence[int], strides: Sequence[int] | None = None, /) -> Any:
        """A DLPack capsule over the gradient memory of parameter `index`, zeroed; exactly its bytes. Take it with
        torch.utils.dlpack.from_dlpack; the memory lives as long as the tensor, whatever becomes of the Reducer."""
    def bucket(self, bucket: int, /) -> Any:
        """A DLPack capsule over a whole bucket, 1-D, padding included (zeros; sliced, in a pool: anything, since buckets share
        their memory)."""
    def bucket_parameters(self, bucket: int, /) -> list[int]:
        """Parameter indices of a bucket, in memory order."""
    def has_memory(self, index: int, /) -> bool:
        """Whether the gradient of a parameter has memory: on a GPU, once it trains."""
    def is_used(self, index: int, /) -> bool:
        """Whether a backward of this rank touched a parameter since the last synchronised one."""
    def result(self, index: int, /) -> Any:
        """A DLPack capsule over this rank's slice of a parameter's averaged gradient, one-dimensional."""
    def place(self, index: int, /) -> tuple[int, int, int]:
        """(bucket, begin, numel) of a parameter; begin in elements of its bucket."""
    def bucket_shape(self, bucket: int, /) -> tuple[int, int, str, bool]:
        """(offset_bytes, numel, dtype, trainable); numel is world_size equal slices, padding included."""
    def bucket_dtype(self, bucket: int, /) -> str: ...
    def attach(
        self,
        parameters: Sequence[torch.Tensor],
        views: list[torch.Tensor],
        *,
        copy: Callable[[torch.Tensor, torch.Tensor], None],
        open: Callable[[], bool],
        renew: Callable[[int], None],
        task_id: Callable[[], int],
        layouts: list[torch.Tensor] | None,
        unlike: Callable[..., None] | None = None,
        describe: Callable[[], str] | None = None,
        stream: Callable[[], int] | None = None,
    ) -> None:
        """Binds tensors. `views[i]` is the gradient view over memory(i), None where its bucket has no memory; the list itself is kept, and must
        hold the only reference to each view. `stream()`, on a GPU, is torch's current stream.

        `copy(view, grad)` writes a gradient of any layout into its view. `open()` is called by the first gradient of
        a round: it arranges that close() runs at the end of the outermost graph task and returns whether this
        backward synchronises. `renew(i)` replaces views[i], before it is overwritten, when somebody else holds it: the
        old one must keep its values. `task_id()` is torch's current graph task id. `layouts[i]`, if sliced, has the strides
        that gradients have, where the parameter itself does not always (it may be released). `unlike()` is called on every rank
        after a round in which ranks had noted different steps; it raises. After a round with different numbers of forwards
        before it, it is called with (rank, forwards) of the most and of the fewest, the backward's number, and the step's.
        """
    def watch_hooks(self, index: int, table: dict[int, Any], /) -> None:
        """`table` is where torch keeps the gradient hooks of a parameter, ours the last of them. Once there are more, the
        gradient is taken at the end of the backward, after all of them."""
    def count_step(self) -> None:
        """A step of the optimizer. Ranks compare steps, and rounds since the last one, in every round."""
    def note_step(self, digest: int, /) -> None:
        """Adds what the next step uses (32 bits, a digest of hyperparameters) to what ranks compare in every round."""
    def forget_steps(self) -> None:
        """Counts from 0 again; on all ranks."""
    def hook(self, index: int, /) -> Callable[[torch.Tensor], None]:
        """The post-accumulate-grad hook of parameter `index`."""
    def forward(self, synchronised: bool, /) -> None:
        """Counts a forward with gradients. A round left open by an exception is abandoned first (collective)."""
    @property
    def is_open(self) -> bool: ...
    @property
    def last_round_failed(self) -> bool:
        """The last round that synchronised averaged nothing: some rank abandoned it, or it failed."""
    @property
    def rounds(self) -> int: ...
    @property
    def pending_forward(self) -> bool:
        """A synchronised forward whose round has not opened yet."""
    def open_round(self) -> None:
        """Announces the round of the current graph task through `open()`; its first gradient opens it. Once a task."""
    def close(self) -> None:
        """Ends the round: sends what is left, waits, sets `.grad`. In a backward that does not synchronise: ends it only."""
    def fail(self) -> None:
        """The backward of an open round has ended in an exception: tells the peers, in 10 s at most."""
    def close_pending(self) -> None:
        """A whole round outside a backward, with the gradients as they stand, if pending_forward; else nothing."""
    def shadow(self, standing: Sequence[int] = (), /) -> None:
        """A whole round in which this rank takes part without contributing (torch's Join). `standing`, on a GPU at zero >= 2: a byte a parameter,
        whether the other ranks' contributions are on top of the mean that stands."""
    def average(self) -> None:
        """A whole round outside a backward: what stands in `.grad` are the contributions, and every parameter that has one is used."""
    def averaged_in(self, index: int, /) -> int:
        """The number, from 1, of the last round in which some rank used the parameter; 0: none."""
    def foreign(self) -> list[int]:
        """Indices of the parameters whose `.grad` is a tensor other than our view."""
    def set_divide_by(self, active_only: bool, /) -> None:
        """True: the mean is over the ranks that contribute in the round; False (default): over the world size."""
    def set_bucket_callback(
        self, callback: Callable[[int, bool, bool], None] | None, wait: Callable[[], None] | None = None, /
    ) -> None:
        """A user's communication hook owns the buckets: called at the end of a round for each bucket in order,
        (bucket, is_last); it leaves the result in the memory of bucket(bucket), or, if sliced, in that of result()."""
    def set_tracer(self, tracer: Callable[[int, str], None] | None, /) -> None:
        """Called with a bucket and "begin" as it is posted, or "wait" at the end of a round, and with "end" behind it."""
    def used_by_any(self, index: int, /) -> bool:
        """In or after a round: whether some rank used the parameter in it."""
    def divisor(self) -> int: ...
    def standing_ranks(self, index: int, /) -> int:
        """In a bucket callback of sliced gradients: how many ranks did not clear the parameter's mean, which is to be added."""
    def mark_unfrozen(self, index: int, /) -> None:
        """Touches the memory of a parameter that was frozen, so that its hook may run."""
    def stats(self) -> dict[str, int]:
        """rounds, local_rounds, abandoned, buckets_sent, buckets_early, copies, bytes, unplaced_bytes_peak; on a GPU also DeviceComm.stats()."""

    # over a DeviceComm
    def adopt(self, bucket: int, tensor: torch.Tensor, /) -> None:
        """Its memory, all of it written; it takes part from the next round on. Sliced: this rank's slice of the mean."""
    def set_places(self, tensors: tuple[torch.Tensor, ...], /) -> None:
        """Sliced: where buckets travel, in turn, at most two, the largest first. Between two rounds."""
    def lend(self, tensors: tuple[torch.Tensor, ...], /) -> None:
        """Of one made `lent`, before the first round: of the largest bucket's bytes; and with `wire`, of as many elements of it."""
    def withdraw(self) -> None:
        """The engine averages no bucket from the next round on. Waits for what was enqueued."""
    def set_active(self, trains: bytes, /) -> None:
        """Which ranks still train, a byte a rank, alike on all ranks before a round."""
    def set_order(self, order: Callable[[], int] | None, /) -> None:
        """What gives a digest, of 32 bits, that ranks must agree on in each round."""
    def set_announcer(self, announce: Callable[[bytes], None] | None, /) -> None:
        """Told, as a round opens, which contributions are on top of the mean that stands: a byte a parameter."""

@final
class Units:
    """Sets of parameters that are gathered together out of the ranks' slices, and released. See csrc/zero/unit.h."""

    def __init__(
        self,
        arena: Arena,
        units: list[tuple[str, int, list[tuple[int, int, int, int, bool]]]],
        warm_bytes: int,
        label: str,
        codes: Arena = ...,
    ) -> None:
        """`units`: (name, nbytes, runs), runs (target_bytes, rank, source_bytes, nbytes, coded). Coded: float32 of which each rank
        keeps records, blocks of 32 elements as 8 bits, in its part of `codes`, 36 bytes for 128 of its slices. ValueError for a
        run that leaves its unit or a rank's part of the arenas."""
    def gather(self, unit: int, /) -> None:
        """Sharded to unsharded. Error from elsewhere."""
    def gather_codes(self, unit: int, /) -> None:
        """The same, with what the records say of coded runs."""
    def release(self, unit: int, /) -> None:
        """Unsharded to sharded: its addresses read as NaN. Error from elsewhere, and in a child of the process that made them."""
    def take_write(self, unit: int, /) -> int:
        """Of a sharded unit: the first byte that somebody changed since it was released; -1 if none, or where the system does not
        tell. What was written is dropped."""
    def state(self, unit: int, /) -> str:
        """ "sharded", "gathering" or "unsharded"."""
    def stats(self) -> dict[str, int]:
        """gathers, releases, gathered_bytes (read from ranks' parts), gather_ns, most_unit_bytes (of pages in use at once)."""
    def tensor(
        self, unit: int, offset_bytes: int, numel: int, dtype: str, shape: Sequence[int], strides: Sequence[int], /
    ) -> Any:
        """A DLPack capsule over a unit's addresses, which last as long as the tensor, whatever lies behind them."""

@final
class CheckpointPlan:
    """Which bytes stand where in which file, and which of them a rank writes. Arithmetic only; see docs/format.md."""

    #: of paths, headers and sizes
    digest: int
    def __new__(
        cls,
        groups: list[tuple[str, bool, int, str, list[tuple[str, str, list[int], int]]]],
        texts: list[tuple[str, int, int]],
    ) -> CheckpointPlan:
        """`groups`: (stem, numbered, max_file_bytes, metadata as JSON, tensors), tensors (name, dtype, shape, holder);
        `texts`: (path, nbytes, holder). Sources are numbered through all groups' tensors, then the texts. `holder` 0: all ranks hold
        the same, each writes a part; 1: rank 0 writes its own; 2: each writes what it gives as a source."""
    def files(self) -> list[tuple[str, int, int, list[tuple[int, int, int]]]]:
        """(path, nbytes, first block, [(source, begin, nbytes)]), in order."""
    def needed(self, rank: int, world_size: int, /) -> list[int]:
        """Sources of which the rank writes some byte, but for those of holder 2."""
    def trim(self, rank: int, world_size: int, keep_bytes: int = 0, /) -> None:
        """Forget the text of the headers that other ranks write, if all headers take more than `keep_bytes`. Only this rank may save
        with the plan then; a lazy save cannot name a tensor that was changed, and names its place in a file."""
    def create(self, partial: str, /) -> None:
        """Make the folder `partial` with LOCK and every file, with its whole size and disk space. This plan holds the lock until commit()
        or abandon(). After an error nothing is left."""
    def abandon(self) -> None:
        """Release LOCK and remove the folder that create() made. Nothing happens once it is committed or abandoned."""
    def create_files(self, folder: str, /) -> None:
        """Make every file in `folder`, with its whole size, disk space and header. Not durable."""
    @classmethod
    def write(cls, path: str, nbytes: int, first_block: int, ranges: list[tuple[int, int]], address: int, /) -> bytes:
        """Writes (begin, nbytes), ascending, of a file of `nbytes` whose blocks are numbered from `first_block` in its plan; their bytes
        follow each other at `address`. Returns tallies of what was written, for commit(). Not durable."""
    @classmethod
    def sync(cls, path: str, /) -> None:
        """Makes a file durable."""
    def commit(
        self,
        *,
        folder: str,
        replaces: str | None,
        nonce: str,
        step: int,
        world_size: int,
        tallies: list[bytes],
        creator: CheckpointPlan,
    ) -> None:
        """Make the folder that create() made the checkpoint `folder`, durable when this returns; write headers, and release LOCK.
        `creator`: the plan that made it, this one or one without some of its files. `tallies`: what write() has returned, on all
        ranks. An existing folder is replaced in one step. After an error call abandon()."""

@final
class DeviceStage:
    """Slots of pinned memory between a GPU and a checkpoint. See csrc/checkpoint/device_stage.h.

    `slot_bytes`: of each of three slots, a multiple of 1 MiB. The GPU is opened by the first save.
    """

    def __init__(self, ordinal: int, slot_bytes: int, libcuda: str | None = None) -> None: ...
    def stats(self) -> dict[str, int]:
        """batches, bytes_down and host_waits since creation; pinned_bytes held."""

@final
class CheckpointSaver:
    """One save at a time: a snapshot on the caller's thread, the rest on threads that never take the GIL."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        pages: Arena | None = None,
        hosts: list[int] | None = None,
        path: str | None = None,
        *,
        threads: int = 2,
        direct: bool = True,
        idle_io: bool = False,
        bandwidth: int = 0,
    ) -> None:
        """`pages`: an Arena of these ranks with at least 4096 bytes; None at world size 1, and for keep() alone. `hosts`: each rank's, numbered by their lowest
        ranks, and `path`: a zeroed file of 4096 bytes for each; None where there is one. `bandwidth`: bytes a second."""
    def begin(
        self,
        *,
        folder: str,
        nonce: str,
        replaces: str,
        number: int,
        step: int,
        metric: float | None,
        shared: CheckpointPlan,
        shared_sources: list[tuple[int, int, int, int, bool, bool]],
        own: CheckpointPlan | None,
        own_sources: list[tuple[int, int, int, int, bool, bool]],
        lazy: bool,
        stale: list[str],
        retired: list[str],
        timeout_s: float,
        device: tuple[DeviceStage, int] | None,
    ) -> None:
        """Takes the snapshot and starts the rest. Sources are (source, begin, nbytes, address, eager, on_device), ascending; their
        memory is read until protect() returns (lazy) or this returns (else, and what is on a device). `number` counts saves
        from 1, alike on all ranks; `nonce` is equal on all and never used before. `device`: what the GPU's memory comes down
        through, and the stream that wrote it."""
    def keep(
        self,
        *,
        nonce: str,
        shared: CheckpointPlan,
        shared_sources: list[tuple[int, int, int, int, bool, bool]] | bytes,
        own: CheckpointPlan | None,
        own_sources: list[tuple[int, int, int, int, bool, bool]],
        image: int,
        image_bytes: int,
        timeout_s: float,
        device: tuple[DeviceStage, int] | None,
    ) -> tuple[bytes, bytes, int]:
        """Write this rank's part into the image at address `image`, where block n lies at n MiB, the own plan's blocks behind those of
        the shared plan. Return its tallies, its runs as pairs of 8-byte words (begin, bytes), and their bytes. As bytes, sources
        are six 8-byte words each."""
    def warm(self, nbytes: int, /) -> bool:
        """Staging for a save of as many bytes is touched by a thread of its own. Whether that could be begun."""
    def protect(self) -> None:
        """Copies what is still live: call it before the memory of a lazy save changes."""
    def wait(self, timeout_s: float, /) -> bool:
        """Whether nothing runs any more. Raises CheckpointError with the outcome of a save that failed, once."""
    def fail(self, number: int, message: str, /) -> None:
        """Tells the other ranks that this one cannot begin save `number`."""
    def cancel(self, message: str, /) -> None:
        """Makes a running save fail soon, with this reason."""
    def progress(self) -> dict[str, int]:
        """bytes_total, bytes_written, staging_bytes, direct_bytes, busy."""
    def unwritten(self) -> list[int]:
        """Return the ranks of this host whose part of the last save is not durable yet."""
    def spare(self) -> list[tuple[int, int]]:
        """(address, nbytes) of the memory for snapshots, which is anybody's until the next save begins; none while one runs."""
    def close(self) -> None:
        """Gives up a running save, waits for its threads and frees everything. Idempotent."""

@final
class CheckpointFolder:
    """A checkpoint to read from: its manifest is sound and its files have their sizes. CheckpointError otherwise."""

    path: str
    step: int
    world_size: int
    nonce: str
    metric: float | None
    #: path -> bytes
    files: dict[str, int]
    #: of all files
    block_count: int
    def __new__(cls, path: str) -> CheckpointFolder: ...
    @classmethod
    def check_removable(cls, path: str, /) -> None:
        """CheckpointError unless at `path` is nothing, an empty folder, or a checkpoint of a version known here and nothing else."""
    @classmethod
    def check_replaceable(cls, path: str, /) -> None:
        """The same for all that a save to `path` takes the place of."""
    @classmethod
    def lock(cls, fd: int, path: str, /) -> bool:
        """Lock an open file for this descriptor; return False where another open file has the lock. CheckpointError: the file system
        has no locks."""
    @classmethod
    def is_alive(cls, path: str, /) -> bool | None:
        """Return whether the save that writes to `path` is alive; None: no LOCK can be opened there, or the file system has no locks."""
    @classmethod
    def make(cls, path: str, /) -> None:
        """Make a folder and those above it that are missing, durable when this returns."""
    @classmethod
    def sync(cls, path: str, /) -> None:
        """Make the names in a folder durable."""
    @classmethod
    def remove(cls, path: str, /) -> None:
        """Remove a file, a link, or a folder with what is in it, three folders deep. CheckpointError names the first failure; the rest
        is removed nevertheless. A missing path is no failure."""
    @classmethod
    def received(cls, path: str, catalog: bytes, /) -> CheckpointFolder:
        """The checkpoint at `path`, of which another rank has read `catalog`: no file is opened until something is read of it."""
    @classmethod
    def merged(
        cls, path: str, step: int, world_size: int, nonce: str, files: list[tuple[str, int]], tallies: list[bytes], /
    ) -> CheckpointFolder:
        """A checkpoint of these files, of which ranks have written what their tallies of CheckpointSaver.keep() say. CheckpointError
        names a block that they did not write once each."""
    def lies_in(self, fd: int, begins: dict[str, int], /) -> None:
        """Read from an open file, in which each file begins at begins[path]. The caller keeps `fd` open while it reads."""
    def catalog(self, paths: list[str], /) -> bytes:
        """The manifest, and of `paths` the headers of safetensors files and the others whole, checked. tensors() and read_bytes() of
        these files read nothing then."""
    @classmethod
    def find(cls, path: str, /) -> str | None:
        """Return where the checkpoint `path` is, by the name of its manifest: there, or under its replaced name if that alone exists.
        None: neither has one."""
    @classmethod
    def identity(cls, path: str, /) -> str:
        """Return a text that identifies what lies at `path` now, "" for nothing: another folder of that name differs."""
    def tensors(self, path: str, /) -> tuple[dict[str, str], list[tuple[str, str, tuple[int, ...], int, int]]]:
        """Metadata and (name, dtype, shape, begin, nbytes) of a safetensors file; begin is from the file's start."""
    @classmethod
    def header(cls, fd: int, path: str, /) -> tuple[dict[str, str], list[tuple[str, str, tuple[int, ...], int, int]]]:
        """Return what tensors() does, of an open file that belongs to no checkpoint. `path` is for messages."""
    def load(
        self,
        ranges: list[tuple[str, int, int, int, int]],
        threads: int = 1,
        direct: bool = False,
        turn: tuple[int, int] = (0, 1),
        /,
    ) -> None:
        """Fills (path, begin, nbytes, address, undo), ascending, from checked blocks, by several threads.

        An address 0: its blocks are checked alone. Memory at `undo` (0: none) holds what stood at the address afterwards,
        whatever the outcome. `direct`: past the page cache what is not in it. `turn` (i, of n): begins at this part.
        """
    def read_bytes(self, path: str, /) -> bytes:
        """A whole file, checked."""
    def checksums(self, path: str, /) -> list[int]:
        """CRC-32C of each block, as the manifest states it."""
