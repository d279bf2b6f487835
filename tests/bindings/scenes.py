"""Scenes of the extension module without torch: each makes an object of a type, uses its methods, and drops it.

Run as a program with the engine's file, a folder and the words of one form:

    plain            each scene once, then scenes side by side and objects shared by threads, for a sanitizer to look at
    faults STRIDE    each scene again and again, in which every STRIDE-th allocation fails, from the first to the last
                     (faults_preload.c). Whatever happens, the error is none of CPython's own SystemError, the process
                     lives, and the same scene then succeeds
"""

from __future__ import annotations

import ctypes
import gc
import importlib.machinery
import importlib.util
import math
import os
import shutil
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any


def load(path: str) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader("shardwright._engine", path)
    spec = importlib.util.spec_from_loader("shardwright._engine", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


engine: Any = load(sys.argv[1])
FOLDER = sys.argv[2]
MEMORY = ctypes.create_string_buffer(1 << 16)
ZEROS = bytes(1 << 16)
BASE = (ctypes.addressof(MEMORY) + 63) & ~63


class Tensor:
    """What the engine reads of a tensor where torch has no table."""

    device, dtype, shape = "cpu", "torch.float32", (16,)

    def __init__(self, place: int) -> None:
        self.place = place
        self.grad: Any = None

    def data_ptr(self) -> int:
        return BASE + 64 * self.place

    def stride(self) -> tuple[int, ...]:
        return (1,)


class Scalar(Tensor):
    shape = ()

    def stride(self) -> tuple[int, ...]:
        return ()


def fresh(name: str) -> str:
    path = os.path.join(FOLDER, name)
    shutil.rmtree(path, ignore_errors=True)
    return path


def communicator() -> None:
    comm = engine.HostComm(0, 1, timeout_s=5, log=str)
    comm.connect([comm.address], b"x" * 16, ["h"])
    arena = comm.arena(8192, "a", of_hosts=True)
    arena.tensor(0, "float32", (4, 4), (4, 1))
    comm.all_reduce(arena.address, 16, "float32", arena=arena)
    comm.all_gather(arena, [(0, 64), (64, 64)], slices=([0], [0]))
    comm.broadcast([(BASE, 64)], 0)
    assert comm.all_gather_bytes(b"y" * 3000) == [b"y" * 3000]
    comm.barrier("b")
    comm.stats(), comm.describe(), comm.hosts, comm.end_reason
    comm.close()


def two_ranks() -> None:
    """The scene's thread is rank 0; its allocations alone may fail."""
    comms = [engine.HostComm(rank, 2, timeout_s=5) for rank in range(2)]
    addresses = [each.address for each in comms]

    def peer() -> None:
        try:
            comms[1].connect(addresses, b"x" * 16, ["h", "h"])
            comms[1].extend([0, 0], "h")
            comms[1].all_gather_bytes(b"1" * 2000)
            comms[1].arena(4096)
        except (engine.Error, OSError, MemoryError):
            pass
        finally:
            comms[1].close()

    thread = threading.Thread(target=peer)
    thread.start()
    try:
        comms[0].connect(addresses, b"x" * 16, ["h", "h"])
        comms[0].extend([0, 0], "h")
        comms[0].all_gather_bytes(b"0" * 2000)
        comms[0].arena(4096)
    finally:
        comms[0].close()
        thread.join()


def store_of_units() -> engine.Store:
    """Make a store of four units, of one parameter of 8 KiB each."""
    rows = [(f"p{i}", 1 << 11, "float32", True) for i in range(4)]
    made = engine.Reducer(engine.HostComm(0, 1), rows, bucket_cap_bytes=1 << 14)
    return engine.Store(
        made, "units", [0], "m", narrow=[(1, "bfloat16")], units=[(f"u{i}", [i], False) for i in range(4)]
    )


def stores() -> None:
    made = store_of_units()
    for i in range(4):
        made.gather(i)
        made.whole(i, (1 << 11,), None), made.slice(i), made.pieces(i)
        made.release(i)
        made.take_write(i), made.state(i), made.is_whole(i), made.is_apart(i), made.adopt(i), made.is_stepped(i)
    assert made.publish(True) == [1]
    made.write(0, BASE, "all"), made.read(0, BASE), made.derive(), made.stats(), made.unit_sizes()
    reducer = engine.Reducer(engine.HostComm(0, 1), [("p", 64, "float32", True)], bucket_cap_bytes=1 << 12)
    for form in ("private", "shared"):
        whole = engine.Store(reducer, form, [0], "m", slices=([0], [0]), narrow=[(0, "bfloat16")])
        whole.whole(0, (8, 8), (8, 1)), whole.whole(0, (8, 8), None, True), whole.words(), whole.mapped(), whole.span(0)
        whole.publish(foreign=False, all=False), whole.cast(True)
        whole.reason, whole.is_home, whole.one_copy, whole.is_collective, whole.bytes_held, whole.unit_bytes


def reducer() -> None:
    comm = engine.HostComm(0, 1)
    made = engine.Reducer(comm, [("p", 16, "float32", True), ("q", 16, "float32", True, 1)], bucket_cap_bytes=1 << 12)
    params, views = [Tensor(0), Tensor(1)], [Tensor(2), Tensor(3)]
    calls = {"copy": lambda *_: None, "open": lambda: True, "renew": lambda i: None, "task_id": lambda: -1}
    made.attach(params, views, **calls, layouts=None)
    made.watch_hooks(0, {})
    hooks = [made.hook(i) for i in range(2)]
    made.set_tracer(lambda *_: None)
    made.set_bucket_callback(lambda *_: None)
    made.set_bucket_callback(None)
    made.forward(True)
    for hook, param in zip(hooks, params):
        param.grad = Tensor(4)
        hook(param)
    made.close()
    made.average()
    made.foreign(), made.stats(), made.bucket_parameters(0), made.bucket_shape(0), made.place(1)
    made.gradient(0, (16,), None), made.bucket(0), made.used_by_any(0), made.averaged_in(1)


def state_file() -> None:
    made = engine.StateFile(FOLDER, "m", 1 << 16)
    address = made.grow(4096)
    made.tensor(address, "float32", (16,), None, made)
    made.store(address, BASE, 64)
    made.fetch(address, BASE, 64)
    made.forget()


def optimizer() -> None:
    tensors = [Tensor(i) for i in range(4)]
    names = {"lr": 0.1, "weight_decay": 0.0}
    adam = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "decoupled": True}
    MEMORY.raw = ZEROS
    lists = [[each] for each in tensors]
    engine.adam_step(*lists, None, [Scalar(5)], None, **names, **adam)
    engine.sgd_step(*lists[:3], None, **names, momentum=0.9, dampening=0.0, nesterov=False, first=True)
    engine.norm_value([engine.norm_sum(tensors)])


def checkpoint() -> None:
    for name in ("a", "a.n.partial"):
        fresh(name)
    plan = engine.CheckpointPlan(
        [("model", False, 0, "{}", [("w", "F32", (1024,), 0), ("v", "F32", (4, 4), 1)])], [("t", 4, 0)]
    )
    partial, folder = os.path.join(FOLDER, "a.n.partial"), os.path.join(FOLDER, "a")
    plan.needed(0, 1)
    plan.create(partial)
    try:
        tallies = []
        for path, nbytes, first, pieces in plan.files():
            ranges = [(begin, size) for _, begin, size in pieces]
            tallies.append(engine.CheckpointPlan.write(os.path.join(partial, path), nbytes, first, ranges, BASE))
        plan.commit(folder=folder, replaces=None, nonce="n", step=1, world_size=1, tallies=tallies, creator=plan)
    finally:
        plan.abandon()
    read = engine.CheckpointFolder(folder)
    catalog = read.catalog(list(read.files))
    read.tensors("model.safetensors"), read.checksums("t"), read.path, read.step, read.nonce, read.metric
    read.load([("model.safetensors", 0, 8, BASE, 0)], 2)
    assert len(engine.CheckpointFolder.received(folder, catalog).read_bytes("t")) == 4
    alone = engine.CheckpointPlan.write(os.path.join(folder, "t"), 4, 0, [(0, 4)], BASE)
    engine.CheckpointFolder.merged(folder, 1, 1, "n", [("t", 4)], [alone]).checksums("t")
    with open(os.path.join(folder, "model.safetensors"), "r+b") as file:
        engine.CheckpointFolder.header(file.fileno(), "model.safetensors")
        engine.CheckpointFolder.lock(file.fileno(), "model.safetensors")
        read.lies_in(file.fileno(), dict.fromkeys(read.files, 0))
    engine.CheckpointFolder.is_alive(folder), engine.CheckpointFolder.check_removable(folder)
    engine.CheckpointFolder.identity(folder), engine.CheckpointFolder.find(folder)
    engine.CheckpointFolder.remove(folder)


def saver() -> None:
    fresh("s")
    plan = engine.CheckpointPlan([("model", False, 0, "{}", [("w", "F32", (1024,), 0)])], [])
    made = engine.CheckpointSaver(0, 1)
    try:
        made.begin(
            folder=os.path.join(FOLDER, "s"), nonce="n", replaces="", number=1, step=0, metric=0.5, shared=plan,
            shared_sources=[(0, 0, 4096, BASE, True, False)], own=None, own_sources=[], lazy=False, stale=["x"],
            retired=[], timeout_s=5.0, device=None,
        )  # fmt: skip
        while not made.wait(1.0):
            pass
        made.progress(), made.spare(), made.unwritten(), made.warm(0), made.protect()
        kept = {"own": None, "own_sources": [], "timeout_s": 5.0, "device": None}
        made.keep(nonce="k", shared=plan, shared_sources=[(0, 0, 4096, BASE, True, False)], image=BASE + 8192,
                  image_bytes=1 << 14, disk_fd=-1, **kept)  # fmt: skip
    finally:
        made.close()


class Alone:
    """A transport of one rank, which needs no message."""

    rank, world_size = 0, 1


def codecs() -> None:
    engine.block_record_bytes(32, 8), engine.half_encode("float16", BASE, BASE + 4096, 32, 1.0)
    engine.half_decode("float16", BASE + 4096, BASE, 32)
    exchange = engine.Exchange(Alone())
    for kind, rows in (("plain", 0), ("half", 0), ("blocks", 0), ("powersgd", 8)):
        wire = "bfloat16" if kind == "half" else "float32"
        made = engine.Codec(kind, wire=wire, block=32, error_feedback=True, rank=1, least_rate=0.0, seed=1)
        entry = made.add(64, rows, 7)
        made.set_bucket(0, [(entry, 0, 64, True)]), made.average(exchange, 0, BASE, 64)
        for part, shape in made.shapes(entry).items():
            nbytes = 4 * math.prod(shape)
            made.read(entry, part, BASE + 4096, nbytes), made.write(entry, part, BASE + 4096, nbytes)
        made.is_made(entry), made.set_rounds(2), made.bucket_sent_bytes(0), made.restart(0)
        (made.rounds, made.sent_bytes, made.keeps)
    (exchange.rank, exchange.world_size, exchange.in_flight)
    engine.fold(BASE, [BASE + 64, BASE + 128], 16, "float32", "sum")
    engine.object_addresses([{}, [1]]), engine.tensor_places([Tensor(0)]), engine.host_limits()
    engine.device_tensor(-1, MEMORY, BASE, "float32", (16,), None)


class Simulation:
    """A GPU of tests/fake, whose driver, NCCL and kernels are the files in SW_FAKES."""

    def __init__(self, paths: str) -> None:
        self.cuda, self.nccl, kernels = paths.split(os.pathsep)
        os.environ["SIM_NCCL_FOLDER"] = FOLDER
        driver, self.held, reference = ctypes.CDLL(self.cuda), ctypes.CDLL(self.nccl), ctypes.CDLL(kernels)
        self.driver, self.reference = driver, reference
        driver.sim_torch_begin.argtypes = (ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int)
        driver.sim_torch_adopt.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
        reference.sim_kernel_references.restype = ctypes.c_void_p
        reference.sim_image_hash.restype = ctypes.c_uint64
        body = ctypes.create_string_buffer(b"an image that only the simulation takes")
        image = (
            b"SWIMAGE1" + engine.crc32c(ctypes.addressof(body), len(body)).to_bytes(4, "little") + bytes(4) + body.raw
        )
        with open(os.path.join(FOLDER, f"shardwright-{reference.sim_image_hash():016x}-sm_90.image"), "wb") as file:
            file.write(image)

    def begin(self) -> None:
        """Forget what earlier scenes enqueued: the simulation has few streams."""
        references, count = self.reference.sim_kernel_references(), self.reference.sim_kernel_count()
        self.driver.sim_torch_begin(0, 1, references, count)
        self.driver.sim_torch_adopt(None, BASE, 1 << 15)

    def open(self, host: Any) -> Any:
        return engine.DeviceComm(
            0, libcuda=self.cuda, libnccl=self.nccl, packaged=FOLDER, host=host, make_room=lambda: None
        )


simulation: Any = None


def gpu() -> None:
    """Two objects of each type that a DeviceComm makes; its peers are none."""
    host = engine.HostComm(0, 1)
    comm = simulation.open(host)
    arena = host.arena(engine.slot_part_bytes(1 << 14), "slots", of_hosts=True)
    comm.connect_slots(arena, [0], 1 << 14, "shm", 0, 5.0)
    try:
        comm.broadcast([(BASE, 16, "float32")], 0, 0)
        comm.all_gather([(BASE, 16, "float32")], 0)
        comm.exchange((BASE, 16, "float32"), BASE + 64, 0)
        comm.norm_sum([(BASE, 16, "float32")], 0)
        comm.clip([(BASE, 16, "float32")], 1.0, False, BASE + 128, 0)
        comm.pack([(BASE + 256, BASE, 64)], 0)
        comm.follow(0, 0), comm.refuse_capture(0, "a test"), comm.watch(), comm.describe(), comm.stats()
        offload = engine.DeviceOffload(comm, 1 << 12, 1)
        offload.stats()
        engine.device_block_encode(comm, 32, 8, [(BASE + 4096, BASE, 0, 32)], 0)
        engine.block_slice_records(32, 8, [(BASE, 0, 0, 32)], 0, False, 0, 1)
        engine.device_powersgd_sizes([], [(BASE, 32)], "float32", True, 1)
        made = engine.Reducer(
            comm,
            [("p", 16, "float32", True), ("q", 16, "float32", False)],
            bucket_cap_bytes=1 << 12,
            sliced=True,
            allocate=Memory,
        )
        made.mark_unfrozen(1), made.set_bucket_callback(print)
        made.stats(), made.bucket_shape(0)
        units = engine.DeviceUnits(
            comm, made, lambda: 0, allocate=Memory, units=[("u", 0, False, 0, [(0, "float32")])], turns=2
        )
        units.set_announce(lambda unit: None)
        (
            units.ahead(0),
            units.gather(0),
            units.tensor(0, 0, (16,), None),
            units.slice(0),
            units.release(0),
            units.drop_ahead(),
        )
        units.gather(0, True), units.is_apart(0), units.release(0), units.update(), units.digest()
        units.state(0), units.is_whole(0), units.coming(), units.take_write(0), units.sizes(), units.stats()
        groups = engine.DeviceUnits(comm, made, lambda: 0, buckets=[(0, Memory(64))], order=[0], ends=[1], label="u")
        groups.gather_anew(), groups.arrive([0]), groups.arrive(None)
    finally:
        comm.close()
    comm.describe()
    engine.DeviceStage(0, 1 << 20, simulation.cuda).stats()


class Memory:
    """Memory of the simulated GPU, as torch's tensors give it."""

    is_cuda = False

    def __init__(self, nbytes: int) -> None:
        pass

    def data_ptr(self) -> int:
        return BASE + 512


SCENES: list[Callable[[], None]] = [
    communicator, two_ranks, stores, reducer, state_file, optimizer, checkpoint, saver, codecs, gpu,
]  # fmt: skip
#: What a scene may raise when an allocation failed in it.
TOLD = (MemoryError, OSError, engine.Error, ValueError, KeyboardInterrupt, RuntimeError, NotImplementedError)
wrong: list[str] = []


def is_wrong(kind: type[BaseException]) -> bool:
    return issubclass(kind, SystemError) or not issubclass(kind, TOLD)


def note_unraisable(told: Any) -> None:
    if issubclass(told.exc_type, SystemError):  # threading's own code raises others
        wrong.append(f"unraisable {told.exc_type.__name__}: {told.exc_value}")


def begin(scene: Callable[[], None]) -> None:
    if scene is gpu:
        gc.collect()
        simulation.begin()


def run_with_faults(scene: Callable[[], None], stride: int) -> int:
    """Fail every stride-th allocation of the scene in turn. Return how many failed."""
    preloaded = ctypes.CDLL(None)
    arm, count = preloaded.faults_arm, preloaded.faults_count
    arm.argtypes, arm.restype, count.restype = (ctypes.c_long,), None, ctypes.c_long
    if simulation is not None:
        with open("/proc/self/maps") as maps:
            for line in maps:
                if line.rstrip().endswith((simulation.cuda, simulation.nccl)) and " r-xp " in line:
                    preloaded.faults_spare(*(ctypes.c_void_p(int(at, 16)) for at in line.split()[0].split("-")))
    begin(scene)
    scene()
    nth = 1
    while True:
        told: BaseException | None = None
        begin(scene)
        try:
            arm(nth)  # the first that fail are of this call itself
            scene()
        except BaseException as failure:
            told = failure
        made = 0
        try:
            made = count()
            arm(0)
        except BaseException:  # the failure was left to these calls: the scene has fewer allocations
            arm(0)
        if told is not None and is_wrong(type(told)):
            wrong.append(f"{scene.__name__}, allocation {nth}: {type(told).__name__}: {told}")
        del told
        if made < nth:
            break
        nth += stride
    gc.collect()
    begin(scene)
    scene()
    return nth


def in_threads(work: Callable[[int], None]) -> None:
    all_of_them = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for each in all_of_them:
        each.start()
    for each in all_of_them:
        each.join()


def share_objects() -> None:
    """Use one object in three threads, as the guard of each type orders them."""
    made = store_of_units()
    file = engine.StateFile(FOLDER, "m", 1 << 16)
    address = file.grow(4096)
    plan = engine.CheckpointPlan([("model", False, 0, "{}", [("w", "F32", (16,), 0)])], [])
    fresh("b.n.partial"), fresh("b")
    partial, folder = os.path.join(FOLDER, "b.n.partial"), os.path.join(FOLDER, "b")
    plan.create(partial)
    ((path, nbytes, first, ((_, begin, size),)),) = plan.files()
    tallies = [engine.CheckpointPlan.write(os.path.join(partial, path), nbytes, first, [(begin, size)], BASE)]
    plan.commit(folder=folder, replaces=None, nonce="n", step=1, world_size=1, tallies=tallies, creator=plan)
    read = engine.CheckpointFolder(folder)

    def work(i: int) -> None:
        for _ in range(20):
            made.gather(i)
            made.release(i)
            file.grow(4096) if i == 0 else file.tensor(address, "float32", (16,), None, file)
            read.catalog([path]) if i == 0 else read.tensors(path)

    in_threads(work)


def close_beside() -> None:
    """Close a saver while other threads look at it and cancel."""
    for _ in range(50):
        made, together = engine.CheckpointSaver(0, 1), threading.Barrier(3)

        def work(i: int, made: Any = made, together: threading.Barrier = together) -> None:
            together.wait()
            try:
                while i > 0:
                    made.progress(), made.cancel("a test")
            except engine.Error:
                return
            made.close()

        in_threads(work)


def main() -> None:
    global simulation
    sys.unraisablehook = note_unraisable
    if "SW_FAKES" in os.environ:
        simulation = Simulation(os.environ["SW_FAKES"])
    only = sys.argv[5:] or [scene.__name__ for scene in SCENES]
    for scene in SCENES:
        if scene.__name__ not in only or (scene is gpu and simulation is None):
            continue
        if sys.argv[3] == "faults":
            print(scene.__name__, run_with_faults(scene, int(sys.argv[4])), flush=True)
        else:
            begin(scene)
            scene()
            if scene not in (optimizer, checkpoint, saver, codecs, gpu):  # these use one memory or folder
                in_threads(lambda _, scene=scene: scene())
    if sys.argv[3] == "plain":
        share_objects()
        close_beside()
    if wrong:
        print("\n".join(wrong))
    sys.exit(bool(wrong))


main()
