"""Simulated GPUs for tests of ranks: torch's CPU tensors stand for device tensors, in each rank's own process.

Inside `with SimulatedGpus(...)` the wrapper takes every tensor to be on a GPU, and the engine uses the fake
libcuda.so.1 and libnccl.so.2 of tests/fake, whose ranks meet in files. Operations of torch run at once, when they are
called. Before each, a TorchDispatchMode tells the simulation what it reads and writes. An operation that events do not
order after its inputs, or before later writes, is a report, whatever its values are. Leaving the context fails on any
report or leak. Calls that torch refuses for tensors on real GPUs, or for which it waits, are refused and counted here
too (simulated_devices.py).
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import gc
import importlib
import itertools
import operator
import os
import re
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import internals
import peer
import pytest
import shardwright as sw
import torch
from device_threads import DeviceThread
from harness import DEADLINE_S, before_waiting, gather
from internals import VARIABLE, ShardedGradient, _engine, _Guarded, device_staging, process_group
from internals import cuda as sw_device
from internals import transport as device_transport
from simulated_devices import HOLDERS, WRITE, Devices, held, operator_of
from torch.utils._python_dispatch import TorchDispatchMode

POLICIES = ("eager", "on demand", "random", "late")
#: small, so that messages take several, and since launches look at all memory
SLOT_BYTES = 8192
#: GPUs run what they can where their host has called nothing for so long: it waits for others, who may wait for that
STALL_S = 0.05


def build() -> dict[str, str]:
    """Build the fakes in pytest's process. Return their paths."""
    from test_csrc import BUILDERS
    from test_fake_gpu import libraries, reference_kernels

    mode = BUILDERS["plain"].mode
    cuda, nccl = libraries(mode).values()
    return {"cuda": str(cuda), "nccl": str(nccl), "kernels": str(reference_kernels(mode))}


def run(
    teams: Any,
    world_size: int,
    paths: dict[str, str],
    scene: Any,
    *arguments: Any,
    policy: str = "random",
    transport: str | None = None,
    strict: str | None = None,
) -> None:
    """Run `scene(gpus, rank, world_size, *arguments)` on every rank, inside a simulation that ends with it.

    A test's module may have inside(gpus), a context around its scenes. `transport`: one of device_transport.TRANSPORTS; default: what the
    environment's SHARDWRIGHT_GPU_TRANSPORT says, so that `SHARDWRIGHT_GPU_TRANSPORT=shm pytest tests/ranks/test_x.py` runs a whole file with it.
    `strict`: see SimulatedGpus; default: what the environment's SIM_STRICT says, in the same way.
    """
    place = {"module": scene.__module__, "scene": scene.__name__}
    transport = transport or os.environ.get(VARIABLE, "nccl")
    strict = os.environ.get("SIM_STRICT", "") if strict is None else strict
    given = {"paths": paths, "policy": policy, "transport": transport, "strict": strict, "given": arguments, **place}
    teams.run(world_size, simulate, spoils=False, deadline_s=DEADLINE_S, arguments=given)


def simulate(
    rank: int,
    world_size: int,
    paths: dict[str, str],
    policy: str,
    transport: str,
    module: str,
    scene: str,
    given: tuple[Any, ...],
    strict: str = "",
) -> None:
    """Body of a team: run() runs it on each rank."""
    found = importlib.import_module(module)
    inside = getattr(found, "inside", lambda gpus: contextlib.nullcontext())
    with SimulatedGpus(paths, meet(rank), policy, transport=transport, strict=strict) as gpus, inside(gpus):
        getattr(found, scene)(gpus, rank, world_size, *given)


def keep_promise(
    gpus: SimulatedGpus, rank: int, world_size: int, module: str, name: str, given: dict[str, Any]
) -> None:
    """A scene that runs the body of `module`'s test_`name`; its wrapper first moves modules to the simulated GPU."""
    found = importlib.import_module(module)

    def wrap(inner: torch.nn.Module, transport: Any = None, **options: Any) -> Any:
        return sw.DistributedDataParallel(gpus.adopt_module(inner), deterministic=True, **options)

    with pytest.MonkeyPatch.context() as patch:
        for where in (peer, found):
            patch.setattr(where, "data_parallel", wrap, raising=False)
        getattr(found, f"test_{name}").body(rank, world_size, **given)


def meet(rank: int) -> str:
    """Return a new folder that all ranks know."""
    made = tempfile.mkdtemp(dir=os.environ["SW_TEST_FOLDER"]) if rank == 0 else ""
    folder: str = gather(made)[0]
    return folder


class _Runtime(sw_device.CudaRuntime):
    """A stand-in for torch.cuda that the engine sees."""

    watches = False  # a thread that asks for events would learn of their order in the host's name

    def __init__(self, gpus: SimulatedGpus) -> None:
        super().__init__()
        self._gpus = gpus

    def holds(self, tensor: torch.Tensor) -> bool:
        return True

    def stages(self, tensor: torch.Tensor) -> bool:
        return True

    def ordinal(self, tensor: torch.Tensor) -> int:
        return 0

    def current_stream(self, ordinal: int) -> int:
        return self._gpus.stream

    def stream_reader(self, ordinal: int) -> Any:
        return functools.partial(operator.attrgetter("stream"), self._gpus)

    def zeros(self, numel: int, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
        self._gpus.check_room(numel * dtype.itemsize)
        return self._gpus.adopt(torch.zeros(numel, dtype=dtype))

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(0)

    def moved(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        self._gpus.check_room(tensor.nbytes)
        return self._gpus.adopt(tensor.clone())

    @property
    def torch_waits(self) -> list[str]:
        """Return the places where the package made the host wait through torch."""
        return self._gpus.devices.waits

    def seen(self, tensor: torch.Tensor) -> torch.Tensor:
        self._gpus.notice(tensor)
        self._gpus.operate([(tensor.data_ptr(), tensor.nbytes, WRITE)], b"torch's own zeros")
        return tensor

    def make_room(self, ordinal: int) -> None:
        self._gpus.rooms += 1
        self._gpus._cuda.sim_torch_cache(0)

    def libraries(self) -> dict[str, str | None]:
        paths = self._gpus.paths
        return {"libcuda": paths["cuda"], "libnccl": paths["nccl"], "packaged": str(self._gpus.folder)}


def _guarded(function: Any) -> Any:
    """Return a method that passes guarded tensors to their guard first, as torch's methods in C do."""

    @functools.wraps(function)
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, _Guarded) and torch.overrides.has_torch_function((tensor,)):
            return torch.overrides.handle_torch_function(call, (tensor,), tensor, *args, **kwargs)
        return function(tensor, *args, **kwargs)

    return call


@functools.cache
def _words(count: int) -> Any:
    return ctypes.c_uint64 * count


class _Watch(TorchDispatchMode):
    """Tell the simulation what each operation of torch reads and writes in adopted memory."""

    def __init__(self, gpus: SimulatedGpus) -> None:
        super().__init__()
        self._gpus = gpus

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types:
            if ShardedGradient in types:  # what it does with its memory is seen, too; from inside here it would not be
                with self:
                    return ShardedGradient.__torch_dispatch__(function, types, args, kwargs)
            if any(each.__name__ in HOLDERS for each in types):
                return NotImplemented  # what it does with what it holds comes here
        operator, gpus = operator_of(function), self._gpus
        accessed = operator.tensors(operator.accesses, args, kwargs)
        spans: list[tuple[int, int, int]] = []
        for tensor, access in accessed:
            spans += gpus.ranges(tensor, access)
        gpus.operate(spans, operator.label)
        given = accessed or operator.tensors(operator.arguments, args, kwargs)
        on_gpu = gpus.devices.before(operator, [tensor for tensor, _ in given], args, kwargs)
        result = operator.call(*args, **kwargs)
        gpus.devices.after(result, on_gpu)
        if operator.reads_a_number:
            gpus.synchronize()
        return result


class SimulatedGpus:
    """A context of simulated GPUs, one per rank.

    Parameters
    ----------
    paths : dict of str to str
        What build() returned.
    folder : path
        Of all ranks; where collectives meet.
    policy, seed
        When enqueued operations run: one of POLICIES.
    transport
        What carries the bytes between ranks: one of device_transport.TRANSPORTS.
    strict
        What the driver and NCCL do in the worst case: words of tests/fake/sim.h, or "all".
    """

    def __init__(
        self,
        paths: dict[str, str],
        folder: str | Path,
        policy: str = "on demand",
        seed: int = 1,
        transport: str = "nccl",
        strict: str = "",
    ) -> None:
        self._transport, self._strict = transport, strict
        self._patch = pytest.MonkeyPatch()
        self.paths, self.folder = paths, Path(folder)
        self._policy, self._seed = POLICIES.index(policy), seed
        self._cuda = ctypes.CDLL(paths["cuda"], ctypes.RTLD_GLOBAL)
        self._nccl = ctypes.CDLL(paths["nccl"])  # the engine finds it loaded
        self._kernels = ctypes.CDLL(paths["kernels"])
        self._kernels.sim_kernel_references.restype = ctypes.c_void_p
        self._kernels.sim_image_hash.restype = ctypes.c_uint64
        self._cuda.sim_torch_stream.restype = ctypes.c_void_p
        self._cuda.sim_torch_leaks.restype = ctypes.c_char_p
        self._cuda.sim_torch_failed.restype = ctypes.c_char_p
        self._cuda.sim_torch_begin.argtypes = (ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int)
        self._cuda.sim_torch_adopt.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
        self._cuda.sim_torch_op.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
        self._cuda.sim_torch_synchronize.argtypes = (ctypes.c_void_p,)
        self._cuda.sim_torch_fail_named.argtypes = (ctypes.c_char_p, ctypes.c_int)
        self._cuda.sim_torch_fail.argtypes = (ctypes.c_long, ctypes.c_int)
        self._cuda.sim_torch_slow_named.argtypes = (ctypes.c_char_p, ctypes.c_long)
        self._cuda.sim_torch_calls.restype = ctypes.c_long
        self._nccl.sim_nccl_averages.restype = ctypes.c_long
        self._nccl.sim_nccl_settlements.restype = ctypes.c_long
        self._nccl.sim_nccl_sent_bytes.restype = ctypes.c_size_t
        self._nccl.sim_nccl_sent_across.restype = ctypes.c_double
        self._cuda.sim_torch_limit_memory.argtypes = (ctypes.c_uint64,)
        self._cuda.sim_torch_cache.argtypes = (ctypes.c_uint64,)
        self._cuda.sim_torch_memory_in_use.restype = ctypes.c_uint64
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._held: list[torch.Tensor] = []
        self.devices = Devices(self._is_adopted)
        #: bytes that were a GPU's at any time, without what the engine has allocated; their limit with that, 0: none
        self.adopted_bytes = self.limit_bytes = 0
        #: how often torch's cache was asked for memory
        self.rooms = 0
        self.stream = 0

    # in and out -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> SimulatedGpus:
        gc.collect()  # what an earlier simulation left is closed before it is forgotten
        self._close_groups()
        self._write_image()
        self._patch.setenv("SIM_NCCL_FOLDER", str(self.folder))
        self._patch.setenv("SIM_BUS", str(os.getpid()))  # a card of its own
        self._patch.setenv(VARIABLE, self._transport)
        self._patch.setenv("SIM_STRICT", self._strict)
        self._patch.setattr(device_transport, "SLOT_BYTES", SLOT_BYTES)
        count = self._kernels.sim_kernel_count()
        self._nccl.sim_nccl_let_aborts_wait(0)
        self._cuda.sim_torch_begin(self._policy, self._seed, self._kernels.sim_kernel_references(), count)
        self.stream = 0  # the legacy default stream
        self._before = sw_device.runtime
        sw_device.runtime = _Runtime(self)
        device_staging.SLOT_BYTES = 1 << 20  # a block: launches look at all memory
        self._left = threading.Event()
        self._clock = threading.Thread(target=self._pass_time, name="gpu-time", daemon=True)
        self._clock.start()
        self._autograd = DeviceThread(self._cuda)
        self._patch.setattr(torch.autograd.Variable, "_execution_engine", self._autograd)
        self._mode = _Watch(self)
        self._mode.__enter__()
        before_waiting.append(self._drain)
        self._change_torch()
        return self

    def _change_torch(self) -> None:
        """Patch the methods of torch that bypass the dispatcher to do what they do on GPUs."""
        of = {name: getattr(torch.Tensor, name) for name in ("tolist", "cpu", "numpy", "__dlpack__")}

        def tolist(tensor: torch.Tensor) -> Any:
            self._read(tensor, "tolist")
            return of["tolist"](tensor)

        def cpu(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            self._read(tensor, "cpu")
            if not self.devices.on_gpu(tensor):
                return of["cpu"](tensor, *args, **kwargs)
            return self.devices.put(tensor.clone(), on_gpu=False)  # memory of its own

        def numpy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.devices.refuse(tensor, TypeError("can't convert cuda:0 device type tensor to numpy"))
            return of["numpy"](tensor, *args, **kwargs)

        def dlpack(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # torch has another GPU as the current one where a program does not choose its own
            self.devices.refuse(tensor, BufferError("Can't export tensors on a different CUDA device index"))
            return of["__dlpack__"](tensor, *args, **kwargs)

        norm_sum = _engine.norm_sum

        def of_the_host(tensors: list[torch.Tensor]) -> bytes:
            for position, tensor in enumerate(tensors if sw_device.runtime is not self._before else ()):
                self.devices.refuse(tensor, ValueError(f"norm_sum: tensors[{position}] must be on the CPU, not cuda:0"))
            return norm_sum(tensors)

        self._patch.setattr(_engine, "norm_sum", of_the_host)
        for name, changed in (("tolist", tolist), ("cpu", cpu), ("numpy", numpy), ("__dlpack__", dlpack)):
            self._patch.setattr(torch.Tensor, name, _guarded(changed))

    def _read(self, tensor: torch.Tensor, what: str) -> None:
        """Note that the host is about to read a tensor's values."""
        self.synchronize()
        if self.devices.on_gpu(tensor):
            self.devices.wait(what)

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        try:
            self._leave(kind, value)
        finally:
            self._left.set()
            self._clock.join()
            self._patch.undo()
            self._autograd.close()

    def _leave(self, kind: Any, value: Any) -> None:
        self._mode.__exit__(None, None, None)
        before_waiting.remove(self._drain)
        sw_device.runtime.kernels.clear()
        sw_device.runtime = self._before
        if kind is not None:
            if hasattr(value, "add_note"):
                value.add_note(f"the simulation: {self.reports() or 'no reports'}")
            return
        self.synchronize()
        gc.collect()
        self._close_groups()
        gc.collect()
        assert self.reports() == "", self.reports()
        deadline = time.monotonic() + 2  # a thread that looks after a link may hold it for one look more
        while self._cuda.sim_torch_leaks() != b"" and time.monotonic() < deadline:
            time.sleep(0.01)
            gc.collect()
        assert self._cuda.sim_torch_leaks() == b"", self._cuda.sim_torch_leaks()

    def _close_groups(self) -> None:
        for group in process_group.live_groups():
            for link in group.links.values():
                link.close()
            group.links.clear()

    def _write_image(self) -> None:
        body = b"an image that only the simulation takes\0"
        path = self.folder / f"shardwright-{self._kernels.sim_image_hash():016x}-sm_90.image"
        if not path.exists():
            buffer = ctypes.create_string_buffer(body, len(body))
            checksum = _engine.crc32c(ctypes.addressof(buffer), len(body))
            own = path.with_suffix(f".{os.getpid()}")
            own.write_bytes(b"SWIMAGE1" + checksum.to_bytes(4, "little") + bytes(4) + body)
            own.rename(path)

    # memory and operations ------------------------------------------------------------------------------------------

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note that the engine's streams will use the tensor. It is kept until the simulation ends."""
        storage = tensor.untyped_storage()
        if self.notice(tensor):
            self.adopted_bytes += storage.nbytes()
            self._cuda.sim_torch_adopt(self.stream, storage.data_ptr(), storage.nbytes())
        with torch._C.DisableTorchFunctionSubclass():  # one that is released is an error to whoever reads it
            self._held.append(tensor.detach())
        return tensor

    def _is_adopted(self, address: int) -> bool:
        at = bisect.bisect(self._begins, address)
        return bool(at) and address < self._ends[at - 1]

    def notice(self, tensor: torch.Tensor) -> bool:
        """Make the tensor's memory a GPU's to torch's operations from now on. Return True if it was not before."""
        storage = tensor.untyped_storage()
        at = bisect.bisect(self._begins, storage.data_ptr())
        if not storage.nbytes() or (at and self._ends[at - 1] > storage.data_ptr()):
            return False
        self._begins.insert(at, storage.data_ptr())
        self._ends.insert(at, storage.data_ptr() + storage.nbytes())
        return True

    def adopt_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Adopt parameters and buffers of a module; of a DTensor its local tensor."""
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta:
                self.adopt(held(tensor))
        return module

    def ranges(self, tensor: torch.Tensor, access: int) -> list[tuple[int, int, int]]:
        """Return the ranges of adopted memory that `tensor` covers; rows if it is not dense."""
        if tensor.layout is not torch.strided or not tensor.numel():
            return []
        address = tensor.data_ptr()
        at = bisect.bisect(self._begins, address)
        if not at or address >= self._ends[at - 1]:
            return []
        if tensor.is_contiguous():
            return [(address, tensor.numel() * tensor.element_size(), access)]
        spans = [(address, tensor.element_size())]
        for size, stride in sorted(zip(tensor.shape, tensor.stride()), key=lambda pair: pair[1]):
            step = stride * tensor.element_size()
            if size > 1 and step:
                dense = len(spans) == 1 and step <= spans[0][1]
                if dense:
                    spans = [(address, step * (size - 1) + spans[0][1])]
                else:
                    spans = [(begin + k * step, length) for k in range(size) for begin, length in spans]
        return [(begin, length, access) for begin, length in spans]

    def operate(self, accesses: list[tuple[int, int, int]], label: bytes) -> None:
        """Note that torch is about to run the operation of this name."""
        array = None
        if accesses:
            words = tuple(itertools.chain.from_iterable(accesses))  # sim_torch_access: three of 64 bits
            array = _words(len(words))(*words)
        if self._cuda.sim_torch_op(self.stream, array, len(accesses), label) < 0:
            raise AssertionError(f"the simulation is stuck before {label.decode()}: {self.reports()}")

    def _pass_time(self) -> None:
        while not self._left.wait(STALL_S):
            self._cuda.sim_torch_look()

    def _drain(self) -> None:
        """Run everything on torch's stream without a host wait."""
        self.operate([], b"a wait for other ranks")

    def synchronize(self) -> None:
        """Make the host wait for torch's stream."""
        if self._cuda.sim_torch_synchronize(self.stream) < 0:
            raise AssertionError(f"the simulation is stuck: {self.reports()}")

    @contextlib.contextmanager
    def other_stream(self) -> Any:
        """A context in which torch enqueues on another stream."""
        before, self.stream = self.stream, self._cuda.sim_torch_stream()
        try:
            yield self.stream
        finally:
            self.stream = before

    @contextlib.contextmanager
    def capture(self) -> Any:
        """A context in which this thread captures torch's stream into a graph, in torch's (global) mode. If the engine
        enqueues on it, or any thread makes a call that a capture forbids, the capture ends with a report.
        """
        self._cuda.sim_torch_capture(ctypes.c_void_p(self.stream), 1)
        try:
            yield
        finally:
            broken = self._cuda.sim_torch_capture(ctypes.c_void_p(self.stream), 0)
        assert broken == 0, f"the capture was broken: {self.reports()}"

    def watch(self) -> None:
        """Watch later communicators by a thread, as on a GPU."""
        sw_device.runtime.watches = True

    @contextlib.contextmanager
    def torch_on_cpu(self) -> Any:
        """A context without the simulation: tensors are CPU tensors."""
        now, sw_device.runtime = sw_device.runtime, self._before
        try:
            yield
        finally:
            sw_device.runtime = now

    def watch_gil(self) -> None:
        """Record calls that enqueue with the GIL held from now on: on a full queue they would block every thread."""
        self._cuda.sim_torch_gil_site.restype = ctypes.c_char_p
        self._cuda.sim_torch_watch_gil(ctypes.cast(ctypes.pythonapi.PyGILState_Check, ctypes.c_void_p))

    def held_gil(self) -> set[str]:
        """Return the engine functions that made such calls, by their names in csrc/python, or else the whole call
        chain.
        """
        found, index = set(), 0
        while chain := self._cuda.sim_torch_gil_site(index).decode():
            own = re.findall(r"(\w+) at \w+_(?:type|module|use)\.c", chain)
            found.add(own[-1] if own else chain)
            index += 1
        return found

    def limit_queue(self, operations: int) -> None:
        """Limit a stream to `count` operations; a call that adds one more blocks, as with a driver's launch queue. 0:
        no limit.
        """
        self._cuda.sim_torch_limit_queue(operations)

    def stall(self, on: bool) -> None:
        """Stop the GPU, or let it run again."""
        self._cuda.sim_torch_stall(int(on))

    def blocked(self) -> tuple[int, int]:
        """Return (threads inside a call that waits for the GPU, calls that have found a full queue)."""
        calls = ctypes.c_long()
        found = self._cuda.sim_torch_blocked(ctypes.byref(calls))
        return found, calls.value

    def run_text(self, library: str, spoiled: int = -1) -> None:
        """Run kernels from their own text from now on (test_fake_gpu.kernel_text()). The result of number `spoiled` is
        wrong.
        """
        self._text = ctypes.CDLL(library)  # kept: the simulation calls it
        self._cuda.sim_torch_run_kernels(self._text.run_kernel_text, spoiled)

    def check_room(self, nbytes: int) -> None:
        """Raise what torch raises where its memory and the engine's would exceed the limit."""
        if self.limit_bytes and self.adopted_bytes + self.memory_in_use() + nbytes > self.limit_bytes:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes")

    def limit_memory(self, limit_bytes: int, cached_bytes: int = 0) -> None:
        """Set the memory for the engine's own allocations. torch's cache holds part of it until it is asked to free it."""
        self._cuda.sim_torch_limit_memory(limit_bytes)
        self._cuda.sim_torch_cache(cached_bytes)

    def memory_in_use(self) -> int:
        """Return the bytes of GPU memory that the engine has allocated."""
        found: int = self._cuda.sim_torch_memory_in_use()
        return found

    def communicators(self) -> int:
        """Return the number of this rank's open NCCL communicators."""
        found: int = self._nccl.sim_nccl_communicators()
        return found

    def averages(self) -> int:
        """Return the number of reductions with ncclAvg that this process has requested."""
        found: int = self._nccl.sim_nccl_averages()
        return found

    def sent_bytes(self) -> int:
        """Return the bytes that this process has sent by NCCL operations, counted as rings send them."""
        found: int = self._nccl.sim_nccl_sent_bytes()
        return found

    def set_node(self, node: int) -> None:
        """Place this rank on a node, as NCCL sees it."""
        self._nccl.sim_nccl_set_node(node)

    def sent_across(self) -> float:
        """Return the bytes that this process has sent to other nodes through NCCL. A ring leaves each node once."""
        found: float = self._nccl.sim_nccl_sent_across()
        return found

    def settlements(self) -> int:
        """Return the number of NCCL calls and groups that this process had to poll until they were done."""
        found: int = self._nccl.sim_nccl_settlements()
        return found

    def fail_call(self, nth: int, result: int) -> None:
        """Make the nth counted call of the driver or NCCL from now on fail."""
        self._cuda.sim_torch_fail(nth, result)

    def fail_next(self, name: str, result: int) -> None:
        """Make the next call of that name fail."""
        self._cuda.sim_torch_fail_named(name.encode(), result)

    def slow_next(self, name: str, seconds: float) -> None:
        """Hold the next call of that name until it is released."""
        self._cuda.sim_torch_slow_named(name.encode(), int(seconds * 1000))

    def let_aborts_wait(self) -> None:
        """Make NCCL's aborts wait for kernels of this rank's other communicators, and for the peers' aborts."""
        self._nccl.sim_nccl_let_aborts_wait(1)

    def calls(self) -> int:
        """Return the number of counted calls of the driver and NCCL."""
        found: int = self._cuda.sim_torch_calls()
        return found

    def fork(self) -> int:
        """Fork while no thread is inside the simulation, which the child could not enter otherwise."""
        self._cuda.sim_lock()
        try:
            return os.fork()
        finally:
            self._cuda.sim_leave()

    def failed_call(self) -> str:
        """Return the name of the call that fail_call() hit last."""
        name: bytes = self._cuda.sim_torch_failed()
        return name.decode()

    def reports(self) -> str:
        """Return all reports so far, each with its call sites; "" if there are none."""
        text = ctypes.c_char_p()
        count = self._cuda.sim_torch_reports(ctypes.byref(text))
        return f"{count} reports: {text.value.decode()}" if count else ""


def stats(wrapped: Any) -> dict[str, int]:
    """Return the counters of a wrapped module, with torch's host waits added to the engine's."""
    counts: dict[str, int] = internals.reducer(wrapped).stats()
    if isinstance(sw_device.runtime, _Runtime):
        counts["host_waits"] += len(sw_device.runtime.torch_waits)
    return counts


__all__ = ["POLICIES", "SimulatedGpus", "build", "meet", "run", "stats", "sw"]
