"""Laws of the extension module that C cannot state alone.

A message never fails to decode. Code that runs inside a call, and other threads, free nothing that the call uses.
`__init__` makes an object once. A number out of range is refused, not cut. Each object ends in the state that its last call
promised, also if that call failed.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shardwright import _engine as engine

KEEP: dict[str, Any] = {
    "own": None,
    "own_sources": [],
    "image": 0,
    "image_bytes": 0,
    "disk_fd": -1,
    "timeout_s": 5.0,
    "device": None,
}
SGD = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
BEGIN: dict[str, Any] = {
    "nonce": "n",
    "replaces": "",
    "number": 1,
    "step": 0,
    "metric": None,
    "own": None,
    "own_sources": [],
    "lazy": False,
    "stale": [],
    "retired": [],
    "timeout_s": 5.0,
    "device": None,
}


def in_a_child(law: Callable[[], None], seconds: float = 30) -> None:
    """Run `law` in a forked child, since a law that is broken may crash or hang the process."""
    child = os.fork()
    if child == 0:
        gc.freeze()  # a law that collects looks at what it has made
        try:
            law()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    deadline = time.monotonic() + seconds
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail(f"the child had not ended after {seconds} s")
        time.sleep(0.005)
    assert done[1] == 0, f"wait status {done[1]}"


def threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(i)` in `count` threads that interleave as often as they can. Raise the first exception."""
    failures: list[BaseException] = []

    def run(i: int) -> None:
        try:
            work(i)
        except BaseException as failure:
            failures.append(failure)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        all_of_them = [threading.Thread(target=run, args=(i,)) for i in range(count)]
        for each in all_of_them:
            each.start()
        for each in all_of_them:
            each.join()
    finally:
        sys.setswitchinterval(before)
    if failures:
        raise failures[0]


def plan_of(count: int = 4) -> engine.CheckpointPlan:
    return engine.CheckpointPlan([("model", False, 0, "{}", [(f"w{i}", "F32", (4,), 0) for i in range(count)])], [])


# messages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("letter", ["é", "検", "𝄞"])
def test_a_message_that_is_cut_ends_with_a_whole_character(tmp_path: Path, letter: str) -> None:
    folder = str(tmp_path)
    for _ in range(4):
        folder = os.path.join(folder, letter * 60)
    os.makedirs(folder)
    for k in range(1, 60):
        with pytest.raises(engine.CheckpointError) as caught:
            engine.CheckpointFolder(os.path.join(folder, "a" * k))
        assert "\ufffd" not in str(caught.value)


def test_a_name_that_is_no_utf8_is_in_the_message_of_a_checkpoint(tmp_path: Path) -> None:

    saved(tmp_path)
    Path(os.fsdecode(os.fsencode(tmp_path / "a") + b"/caf\xe9")).write_text("mine")
    with pytest.raises(engine.CheckpointError, match="caf"):
        engine.CheckpointFolder.check_removable(str(tmp_path / "a"))


# what runs inside a call --------------------------------------------------------------------------------------------


def reducer(comm: engine.HostComm) -> engine.Reducer:
    return engine.Reducer(comm, [("p", 4, "float32", True)], bucket_cap_bytes=1 << 20)


class AtEnd:
    """An object whose destructor calls `what`."""

    def __init__(self, what: Callable[[], object]) -> None:
        self.what = what

    def __call__(self, *_: object) -> None: ...

    def __del__(self) -> None:
        self.what()


@pytest.mark.parametrize("collected", [False, True])
def test_a_hook_that_a_destructor_calls_finds_no_reducer(collected: bool) -> None:
    def law() -> None:
        comm, found = engine.HostComm(0, 1), []
        for _ in range(50):
            each = reducer(comm)
            hook = each.hook(0)
            tracer = AtEnd(lambda hook=hook: found.append(hook(None)))
            if collected:
                tracer.cycle = each  # type: ignore[attr-defined]
            each.set_tracer(tracer)
            del tracer  # the reducer has the last reference
            del each
            gc.collect()
        # the collector calls __del__ first, and the hook of a whole reducer raises that it has no tensors
        assert found == ([] if collected else [None] * 50)

    in_a_child(law)


def test_a_hook_that_a_subclass_drops_with_its_attributes_finds_no_reducer() -> None:
    class Derived(engine.Reducer): ...

    def law() -> None:
        comm, found = engine.HostComm(0, 1), []
        for _ in range(50):
            each = Derived(comm, [("p", 4, "float32", True)])
            each.mine = AtEnd(lambda hook=each.hook(0): found.append(hook(None)))  # type: ignore[attr-defined]
            del each
        assert found == [None] * 50 and sys.getrefcount(comm) == 2

    in_a_child(law)


@pytest.mark.parametrize("name", ["timeout_s", "silent_s", "warn_after_s"])
def test_a_period_whose_reading_closes_the_communicator_is_refused(name: str) -> None:
    def law() -> None:
        kept = []
        for _ in range(20):
            comm = engine.HostComm(0, 1)

            class Seconds:
                def __float__(self, comm: engine.HostComm = comm) -> float:
                    comm.close()
                    kept.append(engine.HostComm(0, 1))  # which may get the memory of the closed one
                    return 5.0

            with pytest.raises(ValueError, match=f"HostComm: {name} cannot be set: the communicator is not open"):
                setattr(comm, name, Seconds())
        assert not any(getattr(each, name) == 5.0 for each in kept)

    in_a_child(law)


@pytest.mark.parametrize("act", ["unfreeze", "renew", "hook", "sliced"])
def test_views_that_another_takes_out_of_the_list_are_not_used(act: str) -> None:
    def law() -> None:
        import torch

        sliced = act == "sliced"
        each = engine.Reducer(engine.HostComm(0, 1), [("p", 4, "float32", True)], bucket_cap_bytes=64, sliced=sliced)
        params, views = [torch.zeros(4, requires_grad=True)], [torch.from_dlpack(each.gradient(0, (4,)))]
        kept = views[0]  # so that an average renews the view
        calls = {"copy": lambda *_: None, "open": lambda: True, "task_id": lambda: -1}
        each.attach(params, views, renew=lambda _: views.clear(), layouts=None, **calls)
        params[0].grad = torch.ones(4)
        if act == "unfreeze":
            views.clear()
            each.mark_unfrozen(0)
            return
        if act != "renew":
            views.clear()
        with pytest.raises(IndexError, match="list index out of range"):
            each.hook(0)(params[0]) if act == "hook" else each.average()
        assert kept.shape == (4,)

    in_a_child(law)


def test_an_init_that_an_argument_runs_again_makes_one_saver(tmp_path: Path) -> None:
    def law() -> None:
        saver = engine.CheckpointSaver.__new__(engine.CheckpointSaver)
        inner: list[None] = []

        class Host:
            def __index__(self) -> int:
                if not inner:
                    inner.append(None)
                    saver.__init__(0, 1)  # type: ignore[misc]
                return 0

        before = len(os.listdir("/proc/self/task"))
        with pytest.raises(TypeError, match="CheckpointSaver: already initialised"):
            saver.__init__(0, 1, None, [Host()], str(tmp_path / "channel"))  # type: ignore[misc,list-item]
        saver.close()
        assert inner and len(os.listdir("/proc/self/task")) == before

    in_a_child(law)


class Changing:
    """A shape of one dimension that is `first` when it is read first, and large later."""

    def __init__(self, first: int) -> None:
        self.first, self.read = first, 0

    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> int:
        if i:
            raise IndexError
        self.read += 1
        return self.first if self.read == 1 else 1 << 30


def makers_of_tensors(folder: Path) -> dict[str, Callable[[Any, Any], object]]:
    """Functions of (shape, strides) that make a capsule over memory for 16 float32."""
    comm = engine.HostComm(0, 1)
    arena = comm.arena(4096)
    file = engine.StateFile(str(folder), "m", 1 << 16)
    address = file.grow(4096)
    made = engine.Reducer(comm, [("p", 16, "float32", True)], bucket_cap_bytes=1 << 12)
    store = engine.Store(made, "units", [0], "m", units=[("u", [0], False)])
    return {
        "arena": lambda shape, strides: arena.tensor(4096 - 64, "float32", shape, strides),
        "store": lambda shape, strides: store.whole(0, shape, strides),
        "file": lambda shape, strides: file.tensor(address + 4096 - 64, "float32", shape, strides, file),
        "gradient": lambda shape, strides: made.gradient(0, shape, strides),
    }


@pytest.mark.parametrize("kind", ["arena", "store", "file", "gradient"])
def test_a_tensor_reaches_no_byte_outside_its_memory(kind: str, tmp_path: Path) -> None:
    def law() -> None:
        import torch

        make = makers_of_tensors(tmp_path)[kind]
        assert torch.from_dlpack(make(Changing(16), None)).shape == (16,)  # type: ignore[arg-type]
        assert torch.from_dlpack(make((4, 4), (1, 4))).stride() == (1, 4)  # type: ignore[arg-type]
        for shape, strides in [((16,), (2,)), ((4, 4), (5, 1)), ((2, 8), (1 << 40, 1)), ((17,), None)]:
            with pytest.raises(ValueError, match="leave|has 17 elements"):
                make(shape, strides)
        for shape, strides, why in [
            ((16,), (-1,), "strides: stride must be at least 0, got -1"),
            ((-16,), None, "shape: size must be at least 0, got -16"),
            ((16,), (1, 1), "strides must have 1 values, as shape has, got 2"),
            ((3, 3), (1 << 62, 1 << 62), "shape overflows the address space"),
            ((0, 1 << 62, 1 << 62), None, "shape overflows the address space"),
            ((1,) * 65, None, "shape must have at most 64 dimensions, got 65"),
        ]:
            with pytest.raises(ValueError, match=why):
                make(shape, strides)

    in_a_child(law)


@pytest.mark.parametrize("name", ["describe", "stats"])
def test_a_communicator_that_a_destructor_closes_is_still_described(name: str) -> None:
    def law() -> None:
        comm = engine.HostComm(0, 1)
        tell = getattr(comm, name)
        gc.disable()
        end = AtEnd(comm.close)
        end.itself = end  # type: ignore[attr-defined]
        del end
        gc.set_threshold(1)
        gc.enable()
        with contextlib.suppress(engine.Error):  # the interpreter decides when it collects
            tell()
        gc.collect()
        with pytest.raises(engine.Error, match="the communicator was closed"):
            comm.describe()

    in_a_child(law)


def test_a_callable_that_replaces_itself_is_dropped_once() -> None:
    def law() -> None:
        each = reducer(engine.HostComm(0, 1))
        for put in (each.set_tracer, each.set_bucket_callback, each.set_order, each.set_announcer):
            put(AtEnd(lambda put=put: put(None)))
            put(print)
            put(None)

    in_a_child(law)


def test_rows_are_read_though_their_list_shrinks_meanwhile() -> None:
    def law() -> None:
        rows: list[Any] = []

        class Size:
            def __index__(self) -> int:
                rows.clear()
                gc.collect()
                return 4

        rows += [(f"name {i}" * 9, "F32", (Size(),), 0) for i in range(9)]
        plan = engine.CheckpointPlan([("model", False, 0, "{}", rows)], [])
        assert rows == [] and len(plan.files()[0][3]) >= 9

    in_a_child(law)


def test_attach_that_fails_leaves_what_was_attached() -> None:
    def law() -> None:
        each = reducer(engine.HostComm(0, 1))
        with pytest.raises(ValueError, match="attach: parameters and views must have 1 entries each"):
            each.attach([], [], copy=print, open=print, renew=print, task_id=print, layouts=None)
        with pytest.raises(engine.Error, match=r"call attach\(\) first"):
            each.watch_hooks(0, {})

    in_a_child(law)


# threads ------------------------------------------------------------------------------------------------------------


def test_threads_that_gather_units_take_turns() -> None:
    count = 4
    rows = [(f"p{i}", 1 << 12, "float32", True) for i in range(count)]
    made = engine.Reducer(engine.HostComm(0, 1), rows, bucket_cap_bytes=1 << 14)
    units = engine.Store(made, "units", [0], "m", units=[(f"u{i}", [i], False) for i in range(count)])
    until = time.monotonic() + 1

    def work(i: int) -> None:
        while time.monotonic() < until:
            units.gather(i)
            assert units.state(i) == "unsharded"
            units.release(i)

    threads(count, work)
    assert units.stats()["gathers"] == units.stats()["releases"]


def saved(tmp_path: Path) -> str:
    """Write a checkpoint of 2 MiB by a plan and return its folder."""
    import ctypes

    plan = engine.CheckpointPlan([("model", False, 0, "{}", [("w", "F32", (1 << 19,), 0)])], [])
    ((path, nbytes, first, _),) = plan.files()
    partial, folder = str(tmp_path / "a.n.partial"), str(tmp_path / "a")
    plan.create(partial)
    memory = ctypes.create_string_buffer(1 << 21)
    data = nbytes - (1 << 21)
    address = ctypes.addressof(memory)
    tallies = engine.CheckpointPlan.write(os.path.join(partial, path), nbytes, first, [(data, 1 << 21)], address)
    plan.commit(folder=folder, replaces=None, nonce="n", step=1, world_size=1, tallies=[tallies], creator=plan)
    return folder


def test_threads_read_a_checkpoint_whose_catalog_is_replaced(tmp_path: Path) -> None:
    def law() -> None:
        folder = engine.CheckpointFolder(saved(tmp_path))
        (name,) = folder.files
        header = folder.tensors(name)
        until = time.monotonic() + 1

        def work(i: int) -> None:
            while time.monotonic() < until:
                if i == 0:
                    folder.catalog([name])
                else:
                    assert folder.tensors(name) == header

        threads(3, work)

    in_a_child(law)


def test_threads_make_and_abandon_the_folder_of_one_plan(tmp_path: Path) -> None:
    def law() -> None:
        plan, until = plan_of(), time.monotonic() + 1

        def work(i: int) -> None:
            while time.monotonic() < until:
                try:
                    plan.create(str(tmp_path / f"a{i}.{'n' * 9}.partial"))
                    plan.abandon()
                except ValueError as refused:
                    assert "commit or abandon" in str(refused)
                except engine.CheckpointError as refused:
                    assert "another thread is inside the plan" in str(refused) or "partial" in str(refused)

        threads(3, work)
        plan.abandon()

    in_a_child(law)


def test_a_plan_is_not_trimmed_while_a_save_with_it_is_under_way(tmp_path: Path) -> None:
    plan, saver = plan_of(0), engine.CheckpointSaver(0, 1)
    saver.begin(folder=str(tmp_path / "a"), shared=plan, shared_sources=[], **BEGIN)
    with pytest.raises(
        engine.CheckpointError, match="another thread is inside the plan, or a save with it is under way"
    ):
        plan.trim(0, 1)
    while not saver.wait(0.1):
        pass
    plan.trim(0, 1)
    saver.close()


def test_threads_grow_and_read_one_state_file(tmp_path: Path) -> None:
    def law() -> None:
        file = engine.StateFile(str(tmp_path), "m", 1 << 16)
        address, until = file.grow(4096), time.monotonic() + 0.5

        def work(i: int) -> None:
            for round in itertools.count():
                if time.monotonic() > until:
                    return
                if i == 0 and round < 5_000:  # each is a mapping, of which a process has 65,530 by default
                    file.grow(4096)
                file.tensor(address, "float32", (1024,), None, file)

        threads(3, work)

    in_a_child(law)


# state --------------------------------------------------------------------------------------------------------------


def test_a_communicator_with_arenas_is_not_extended() -> None:
    def law() -> None:
        comms = [engine.HostComm(rank, 2, timeout_s=20) for rank in range(2)]
        addresses = [each.address for each in comms]

        def work(rank: int) -> None:
            comms[rank].connect(addresses, b"x" * 16, ["h", "h"])
            arena = comms[rank].arena(4096)
            with pytest.raises(engine.Error, match="extend: arenas, reducers or a GPU's communicator use"):
                comms[rank].extend([0, 0], "h")
            del arena
            comms[rank].barrier()
            with pytest.raises(OverflowError, match="extend: host_of must be an int of 32 bits, got 4294967296"):
                comms[rank].extend([0, 1 << 32], "h")
            comms[rank].barrier()

        threads(2, work)

    in_a_child(law)


def test_a_save_without_a_plan_is_refused(tmp_path: Path) -> None:
    def law() -> None:
        saver = engine.CheckpointSaver(0, 1)
        with pytest.raises(engine.CheckpointError, match="a save needs the plan of what ranks share"):
            saver.begin(folder=str(tmp_path / "a"), shared=None, shared_sources=[], **BEGIN)
        with pytest.raises(engine.CheckpointError, match="a save needs the plan of what ranks share"):
            saver.keep(nonce="n", shared=None, shared_sources=[], **KEEP)
        with pytest.raises(TypeError, match="begin: shared and own must be CheckpointPlans"):
            saver.begin(folder=str(tmp_path / "a"), shared=None, shared_sources=[(0, 0, 1, 0, True, False)], **BEGIN)
        saver.close()

    in_a_child(law)


def test_a_closed_communicator_can_be_made_anew_and_a_child_forks_from_it() -> None:
    def law() -> None:
        kept = engine.HostComm(0, 1)
        comm = engine.HostComm.__new__(engine.HostComm)
        with pytest.raises(ValueError, match="HostComm: warn_after_s must be in"):
            comm.__init__(0, 1, warn_after_s=-1)
        comm.__init__(0, 1)
        with pytest.raises(TypeError, match="HostComm: already initialised"):
            comm.__init__(0, 1)
        comm.close()
        for _ in range(3):
            comm.__init__(0, 1)
            comm.barrier()
            in_a_child(engine.forked, 5)
            comm.close()
        with pytest.raises(engine.Error, match="the communicator was closed"):
            comm.barrier()
        kept.barrier()

    in_a_child(law)


def test_init_makes_an_object_once(tmp_path: Path) -> None:
    comm = engine.HostComm(0, 1)
    rows = reducer(comm)
    made = [
        (engine.Store(rows, "private", [0], "m"), (rows, "private", [0], "m")),
        (engine.StateFile(str(tmp_path), "m", 1 << 16), (str(tmp_path), "m", 1 << 16)),
        (engine.CheckpointSaver(0, 1), (0, 1)),
        (comm, (0, 1)),
    ]
    for each, arguments in made:
        with pytest.raises(TypeError, match="already initialised"):
            each.__init__(*arguments)  # type: ignore[misc]
    with pytest.raises(TypeError, match="a Reducer is initialised once"):
        reducer(comm).__init__(comm, [])  # type: ignore[misc,call-arg]


def test_a_child_that_was_forked_beside_a_call_does_not_wait_for_its_end(tmp_path: Path) -> None:
    """The thread that was inside does not exist in the child."""
    file = engine.StateFile(str(tmp_path), "m", 1 << 16)
    stop, said = threading.Event(), os.pipe()

    def work() -> None:
        while not stop.is_set():
            file.grow(1 << 22)
            file.forget()

    def law() -> None:
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match="this process was forked") as refused:
            file.forget()
        if "forked while a thread of its parent was inside the StateFile" in str(refused.value):
            os.write(said[1], b"x")
        assert time.monotonic() - begun < 30  # what waits for a thread that does not exist waits for ever

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(20):
            in_a_child(law)
    finally:
        stop.set()
        thread.join()
    os.close(said[1])
    assert os.read(said[0], 64), "no child was forked during a call"
    os.close(said[0])


def test_a_forked_child_leaves_the_state_file_to_its_parent(tmp_path: Path) -> None:
    import ctypes

    import torch

    file = engine.StateFile(str(tmp_path), "m", 1 << 16)
    address = file.grow(8192)
    one, number = [torch.ones(4)], [torch.zeros(())]
    state = [torch.from_dlpack(file.tensor(address + 4096 * i, "float32", (4,), None, file)) for i in range(2)]  # type: ignore[arg-type]
    names = {"lr": 1.0, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0, "decoupled": True}

    def law() -> None:
        for call in (
            lambda: file.grow(4096),
            lambda: file.tensor(address, "float32", (4,), None, file),
            file.forget,
            lambda: engine.adam_step(one, one, state[:1], state[1:], None, number, None, state_file=file, **names),
        ):
            with pytest.raises(RuntimeError, match="this process was forked from the one that made the StateFile"):
                call()
        engine.StateFile(str(tmp_path), "m", 1 << 16).grow(4096)

    in_a_child(law)
    assert file.nbytes == 8192 and ctypes.string_at(file.grow(4096), 4) == bytes(4)
    assert engine.adam_step(one, one, state[:1], state[1:], None, number, None, state_file=file, **names) == []


# arguments ----------------------------------------------------------------------------------------------------------


def test_arguments_are_refused_in_one_sentence() -> None:
    comm = engine.HostComm(0, 1)
    refused: list[tuple[type, str, Callable[[], object]]] = [
        (TypeError, "barrier: takes at most 1 arguments by position, got 2", lambda: comm.barrier("a", "b")),  # type: ignore[call-arg]
        (TypeError, "barrier: label must be a str, got <class 'int'>", lambda: comm.barrier(1)),  # type: ignore[arg-type]
        (ValueError, "barrier: label must be without null characters, got", lambda: comm.barrier("a\0b")),
        (TypeError, "arena: nbytes is missing", lambda: comm.arena()),  # type: ignore[call-arg]
        (TypeError, "arena: has no argument 'size', or has it already", lambda: comm.arena(1, size=2)),  # type: ignore[call-arg]
        (TypeError, "arena: has no argument 'nbytes', or has it already", lambda: comm.arena(1, nbytes=2)),  # type: ignore[call-arg]
        (TypeError, "arena: takes at most 2 arguments by position, got 3", lambda: comm.arena(1, "a", True)),  # type: ignore[call-arg]
        (TypeError, "arena: nbytes must be an int, got <class 'float'>", lambda: comm.arena(1.5)),  # type: ignore[arg-type]
        (
            OverflowError,
            "arena: nbytes must be an int of 64 bits, got 1180591620717411303424",
            lambda: comm.arena(1 << 70),
        ),
        (
            OverflowError,
            "HostComm: rank must be an int of 32 bits, got 4294967296",
            lambda: engine.HostComm(1 << 32, 1),
        ),
        (ValueError, "broadcast: nbytes must be at least 0, got -1", lambda: comm.broadcast([(0, -1)], 0)),
        (
            TypeError,
            "broadcast address:A nbytes:N: a row must be a tuple of these, got 3",
            lambda: comm.broadcast([3], 0),
        ),  # type: ignore[list-item]
        (
            OverflowError,
            r"broadcast: address must be an int in \[0, 2\*\*64\), got -1",
            lambda: comm.broadcast([(-1, 0)], 0),
        ),
        (
            OverflowError,
            r"warm: nbytes must be an int in \[0, 2\*\*64\), got -1",
            lambda: engine.CheckpointSaver(0, 1).warm(-1),
        ),
        (
            ValueError,
            "Codec: kind must be 'plain', 'half', 'blocks' or 'powersgd', got 'x'",
            lambda: engine.Codec("x"),
        ),
        (
            ValueError,
            "Codec.set_bucket: member 0 has no entry of 4 elements",
            lambda: engine.Codec("plain").set_bucket(0, [(0, 0, 4, True)]),
        ),
        (TypeError, "attach: copy is missing", lambda: reducer(comm).attach([], [])),  # type: ignore[call-arg]
        (TypeError, "sgd_step: first is missing", lambda: engine.sgd_step([], [], None, None, **SGD)),  # type: ignore[call-arg]
    ]
    for kind, sentence, call in refused:
        with pytest.raises(kind, match="^" + sentence):
            call()


def test_a_period_is_refused_in_the_sentence_of_its_fault() -> None:
    comm = engine.HostComm(0, 1)
    for name, range in (("timeout_s", r"\(0, 1e9"), ("silent_s", r"\[0, 1e9"), ("warn_after_s", r"\[0, 1e9")):
        before = getattr(comm, name)
        for wrong in (float("nan"), float("inf"), -1.0, 1e-12):
            with pytest.raises(ValueError, match=rf"^HostComm: {name} must be in {range}\] seconds$"):
                setattr(comm, name, wrong)
        with pytest.raises(TypeError, match=f"^HostComm: cannot delete {name}$"):
            delattr(comm, name)
        assert getattr(comm, name) == before
        setattr(comm, name, 1e-9)
        assert getattr(comm, name) == 1e-9
    comm.close()
    with pytest.raises(ValueError, match="^HostComm: timeout_s cannot be set: the communicator is not open$"):
        comm.timeout_s = 5.0


def test_each_text_signature_is_one_of_python() -> None:
    owners = [engine, *(each for each in vars(engine).values() if isinstance(each, type))]
    named = [(owner, each) for owner in owners for each in vars(owner).values() if callable(each)]
    read = [inspect.signature(each) for _, each in named if getattr(each, "__text_signature__", None)]
    assert len(read) > 100
