"""Promises of GPUs, as bodies that run in any place: on real GPUs (tests/gpu), on simulated ones, and on the CPU.

Bodies that compare bits train Given, whose gradients are its inputs. No result of a device's own libraries is in them,
so a training on GPUs has the bits of the same ranks' CPUs.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import internals
import pytest
import shardwright as sw
import torch
import torch.distributed as dist
from harness import gather, same_everywhere
from models import Mlp
from oracle.fold import bits_equal
from peer import batch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

SHAPES = ((40, 24), (17, 30), (33, 16), (9,))
STEPS = 3


class Place:
    """The place of a rank's module.

    Parameters
    ----------
    kind : {"cuda", "shared", "simulated", "cpu"}
        A GPU of its own, one that all ranks share, a simulated one, none.
    rank : int
    gpus : SimulatedGpus, optional
    """

    def __init__(self, kind: str, rank: int, gpus: Any = None) -> None:
        self.kind, self._gpus = kind, gpus
        self.device = (
            torch.device("cuda", rank if kind == "cuda" else 0) if kind in ("cuda", "shared") else torch.device("cpu")
        )

    @property
    def is_gpu(self) -> bool:
        return self.kind != "cpu"

    def put(self, module: nn.Module) -> nn.Module:
        return self._gpus.adopt_module(module) if self._gpus else module.to(self.device)

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        return self._gpus.adopt(value) if self._gpus else value.to(self.device)

    def aside(self) -> Any:
        """A context in which CPU tensors count as CPU tensors, not as simulated GPU tensors."""
        return self._gpus.torch_on_cpu() if self._gpus else contextlib.nullcontext()

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """A context in which torch's stream is captured into a graph."""
        if self._gpus:
            with self._gpus.capture():
                yield
        else:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                yield

    @contextlib.contextmanager
    def without_torchs_waits(self) -> Iterator[None]:
        """A context in which no torch operation may make the host wait; on a real GPU such an operation raises. The
        engine counts its own waits.
        """
        if self._gpus:
            before = len(self._gpus.devices.waits)
            yield
            assert self._gpus.devices.waits[before:] == []
        elif self.is_gpu:
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
        else:
            yield

    @contextlib.contextmanager
    def lending(self, rank: int, world_size: int) -> Iterator[dict[str, Any]]:
        """A context in which torch has an NCCL communicator. Yields options of wrap that name its group."""
        if self._gpus:
            from test_communicators_are_borrowed_on_simulated_gpus import lending

            with lending(self._gpus, rank, world_size):
                yield {}
            return
        group = dist.new_group(backend="cpu:gloo,cuda:nccl")
        dist.all_reduce(torch.ones(1, device=self.device), group=group)  # torch makes it at its first use
        yield {"process_group": group}
        torch.cuda.synchronize(self.device)
        dist.destroy_process_group(group)


class Scale(nn.Module):
    """A layer whose weight's gradient is its input."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


class Given(nn.Module):
    """A module whose gradients are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Scale(*shape) for shape in SHAPES)

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([part(each) for part, each in zip(self.parts, given)]).sum()


def inputs(rank: int, step: int, device: torch.device) -> list[torch.Tensor]:
    return [batch(rank, *shape, step=step).to(device) for shape in SHAPES]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return sw.optim.AdamW(parameters, lr=0.01)


def wrapped(place: Place | None, options: dict[str, Any], make: Any = adamw) -> tuple[Any, Any]:
    """Train on the CPU, in no place."""
    module = Given() if place is None else place.put(Given())
    model, optimizer = sw.wrap(module, make(module.parameters()), bucket_cap_mb=0.002, deterministic=True, **options)
    return model, optimizer


def steps(model: Any, optimizer: Any, rank: int, device: torch.device, count: int = STEPS) -> None:
    for step in range(count):
        model(inputs(rank, step, device)).backward()
        optimizer.step()
        optimizer.zero_grad()


def tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state.detach().cpu().clone()
    elif isinstance(state, dict):
        for key in sorted(state, key=str):
            yield from tensors(state[key])
    elif isinstance(state, (list, tuple)):
        for each in state:
            yield from tensors(each)


def whole(model: Any, optimizer: Any = None) -> list[torch.Tensor]:
    found = list(tensors(sw.full_state_dict(model)))
    return found + (list(tensors(sw.full_optimizer_state_dict(model, optimizer))) if optimizer is not None else [])


def assert_bits(found: list[torch.Tensor], expected: list[torch.Tensor], what: Any) -> None:
    assert len(found) == len(expected) > len(SHAPES) - 1, what
    assert all(map(bits_equal, found, expected)), what


def has_the_bits_of_the_cpu(place: Place, rank: int, **options: Any) -> None:
    """Return parameters and state after some steps, at every stage."""
    shared = {name: value for name, value in options.items() if name == "clip_grad_norm"}
    with place.aside():
        twin = wrapped(None, shared)
        steps(*twin, rank, torch.device("cpu"))
        expected = whole(*twin)
    for zero in (0, 1, 2, 3):
        ours = wrapped(place, {"zero": zero, **options})
        steps(*ours, rank, place.device)
        assert_bits(whole(*ours), expected, (zero, options))


# the promises -------------------------------------------------------------------------------------------------------


def every_stage(place: Place, rank: int, world_size: int) -> None:
    has_the_bits_of_the_cpu(place, rank)
    has_the_bits_of_the_cpu(place, rank, clip_grad_norm=1.0)


def no_hidden_waits(place: Place, rank: int, world_size: int) -> None:
    """The host does not wait in a step that used every parameter; torch's own waits count too."""
    for zero in (0, 1, 2, 3):
        make = adamw if zero % 2 else lambda p: torch.optim.AdamW(p, lr=0.01)
        model, optimizer = wrapped(place, {"zero": zero}, make)
        given = [inputs(rank, step, place.device) for step in range(STEPS)]
        for step, each in enumerate(given):
            with place.without_torchs_waits() if step else contextlib.nullcontext():  # the first makes state
                model(each).backward()
                optimizer.step()
                optimizer.zero_grad()


def offload(place: Place, rank: int, world_size: int) -> None:
    """With offload="cpu" moments and masters are CPU tensors."""
    has_the_bits_of_the_cpu(place, rank, offload="cpu")
    model, optimizer = wrapped(place, {"zero": 1, "offload": "cpu"})
    steps(model, optimizer, rank, place.device, 1)
    assert all(each.device.type == "cpu" for state in optimizer.state.values() for each in tensors_of(state))


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in state.values() if isinstance(value, torch.Tensor)]


def checkpoints(place: Place, rank: int, world_size: int) -> None:
    """A save of GPU state has the CPU's bytes although training continues at once, and loads at another stage."""
    from test_checkpoint_bytes_do_not_depend_on_the_ranks import manifest_entries, shared_folder

    folder = shared_folder(rank)

    def save(model: Any, optimizer: Any, name: str, device: torch.device) -> None:
        steps(model, optimizer, rank, device)
        with sw.Checkpointer(f"{folder}/{name}", model, optimizer) as saves:
            saves.save(STEPS - 1)
            steps(model, optimizer, rank, device, 1)  # what overwrites all of it
            saves.wait()

    def entries(name: str) -> Any:
        return manifest_entries(f"{folder}/{name}/step-{STEPS:06d}")

    with place.aside():
        twin = wrapped(None, {})
        save(*twin, "cpu", torch.device("cpu"))
        expected = whole(*twin)
    for zero, next_zero in ((0, 3), (1, 0), (3, 1)):
        save(*wrapped(place, {"zero": zero}), str(zero), place.device)
        assert entries(str(zero)) == entries("cpu"), zero
        model, optimizer = wrapped(place, {"zero": next_zero})
        with sw.Checkpointer(f"{folder}/{zero}", model, optimizer) as saves:
            assert saves.restore() == STEPS
        steps(model, optimizer, rank, place.device, 1)
        assert_bits(whole(model, optimizer), expected, (zero, next_zero))


FUSED: dict[str, tuple[Any, Any]] = {
    "AdamW": (lambda p: sw.optim.AdamW(p, lr=0.01), lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)),
    "Adam": (lambda p: sw.optim.Adam(p, lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01, fused=True)),
    "SGD": (
        lambda p: sw.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, fused=True),
    ),
}


def fused_optimizers(place: Place, rank: int, world_size: int) -> None:
    """The optimizers match torch's fused ones on the same device up to rounding, and the CPU bit for bit. They need no
    wrapper.
    """
    for name, (ours, theirs) in FUSED.items():
        arms: dict[str, list[nn.Parameter]] = {}
        for arm, make in (("ours", ours), ("torch", theirs), ("cpu", ours)):
            with place.aside() if arm == "cpu" else contextlib.nullcontext():
                parameters = [nn.Parameter(batch(9, *shape)) for shape in SHAPES]
                if arm != "cpu":
                    parameters = [nn.Parameter(place.tensor(p.detach())) for p in parameters]
                optimizer = make(parameters)
                for step in range(5):
                    for parameter, shape in zip(parameters, SHAPES):
                        gradient = batch(rank, *shape, step=step)
                        parameter.grad = gradient if arm == "cpu" else place.tensor(gradient)
                    optimizer.step()
                arms[arm] = [p.detach().cpu().clone() for p in parameters]
        assert all(map(bits_equal, arms["ours"], arms["cpu"])), name
        for found, expected in zip(arms["ours"], arms["torch"]):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def clipping_by_parameters(place: Place, rank: int, world_size: int) -> None:
    """The norm and clipping take parameters as torch's functions do: of a module before and after wrapping, on any
    device.
    """
    norms = []
    for where in (None, place):
        with place.aside() if where is None else contextlib.nullcontext():
            module = Given() if where is None else where.put(Given())
            for wrapping in (False, True):
                model = sw.DistributedDataParallel(module, deterministic=True) if wrapping else module
                module.zero_grad()
                model(inputs(0, 1, torch.device("cpu") if where is None else where.device)).backward()
                norms.append(sw.clip_grad_norm_(module.parameters(), 1.0).cpu())
                norms += [parameter.grad.detach().cpu().clone() for parameter in module.parameters()]
    half = len(norms) // 2
    assert_bits(norms[half:], norms[:half], "clipped")


def borrowed(place: Place, rank: int, world_size: int) -> None:
    """Over torch's communicator the bits are the CPU's, with torch's own collectives between the steps."""
    with place.aside():
        twin = wrapped(None, {})
        steps(*twin, rank, torch.device("cpu"))
        expected = whole(*twin)
    if not place.is_gpu:
        with pytest.raises(NotImplementedError, match="communicator='borrow' requires a module on a GPU"):
            wrapped(place, {"communicator": "borrow"})
        return
    for zero in (0, 1, 3):
        with place.lending(rank, world_size) as group:
            ours = wrapped(place, {"zero": zero, "communicator": "borrow", **group})
            assert internals.link(ours[0]).borrows
            steps(*ours, rank, place.device)
            assert_bits(whole(*ours), expected, zero)
            del ours


def captures(place: Place, rank: int, world_size: int) -> None:
    """A call inside a capture into a CUDA graph is refused by name, and training continues as if it had not been tried."""
    results = []
    for tries in (False, True):
        model, optimizer = wrapped(place, {})

        def refused(what: str, call: Callable[[], Any], tries: bool = tries) -> None:
            if tries and place.is_gpu:
                with (
                    place.capture(),
                    pytest.raises((NotImplementedError, sw.Error), match=f"{what}: the stream is being"),
                ):
                    call()

        for step in range(STEPS):
            given = inputs(rank, step, place.device)
            refused("a forward of Given", lambda model=model, given=given: model(given))
            model(given).backward()
            refused("an optimizer's step", optimizer.step)
            optimizer.step()
            optimizer.zero_grad()
        results.append(whole(model, optimizer))
    assert_bits(results[1], results[0], "after captures")


def join(place: Place, rank: int, world_size: int) -> None:
    """Ranks run out of inputs, each after another number of steps."""

    def train(model: Any, optimizer: Any, device: torch.device) -> list[torch.Tensor]:
        with model.join():
            steps(model, optimizer, rank, device, 1 + rank)
        return whole(model)

    with place.aside():
        expected = train(*wrapped(None, {}), torch.device("cpu"))
    for zero in (0, 1, 2, 3):
        assert_bits(train(*wrapped(place, {"zero": zero}), place.device), expected, zero)
    assert same_everywhere(expected)


def hooks(place: Place, rank: int, world_size: int) -> None:
    """torch's own hooks over torch's group, and a user's hook, decide the gradient."""
    for zero in (0, 2):
        for hook, factor in ((default_hooks.allreduce_hook, 1.0), (_doubled, 2.0)):
            model, _ = wrapped(place, {"zero": zero})
            model.register_comm_hook(None, hook)
            model(inputs(rank, 0, place.device)).backward()
            found = list(sw.full_gradients(model).values())
            means = [sum(each) / world_size for each in zip(*gather(inputs(rank, 0, torch.device("cpu"))))]
            for gradient, mean in zip(found, means):
                torch.testing.assert_close(gradient.cpu(), factor * mean, rtol=1e-5, atol=1e-6)


def _doubled(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses any other annotation than its own
    averaged = default_hooks.allreduce_hook(state, bucket)
    return averaged.then(lambda done: done.value().mul(2))


def batch_norm(place: Place, rank: int, world_size: int) -> None:
    """Statistics are over the ranks' batches together, and equal on all ranks bit for bit."""
    torch.manual_seed(0)
    single = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh())
    synced = place.put(sw.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(single)))
    model = sw.DistributedDataParallel(synced, deterministic=True, broadcast_buffers=False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, single)]
    for step in range(2):
        parts = [batch(r, 3 + r, 4, step=step) for r in range(world_size)]
        ours = model(parts[rank].to(place.device))
        ours.square().sum().backward()
        theirs = single(torch.cat(parts))
        (theirs.square().sum() / world_size).backward()  # as an average over ranks is
        torch.testing.assert_close(ours.cpu(), theirs.split([len(p) for p in parts])[rank], rtol=1e-4, atol=1e-5)
        for found, expected in zip(model.module.parameters(), single.parameters()):
            torch.testing.assert_close(found.grad.cpu(), expected.grad, rtol=1e-3, atol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for found, expected in zip(model.module.buffers(), single.buffers()):
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
    assert same_everywhere([buffer.cpu() for buffer in model.module.buffers()])


def elsewhere(place: Place, rank: int, world_size: int) -> None:
    """A program that never selects a GPU trains: the module and its tensors tell the device."""
    hooked = {"compress": sw.Int8()}, {"zero": 2, "compress": sw.PowerSGD(2)}
    for options in ({}, {"zero": 2}, {"zero": 3}, {"offload": "cpu"}, {"compress": sw.Bf16()}, *hooked):
        torch.manual_seed(0)
        module = place.put(Mlp())
        model, optimizer = sw.wrap(module, adamw(module.parameters()), **options)
        for step in range(2):
            model(batch(rank, 6, 7, step=step).to(place.device)).square().mean().backward()
            sw.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert same_everywhere(whole(model)), options


def nccl_alone(place: Place, rank: int, world_size: int) -> None:
    """A program that never selects a GPU trains over a group that has NCCL only."""
    group = dist.new_group(backend="nccl") if place.kind == "cuda" else None
    for zero in (0, 2):
        module = place.put(Given())
        model, optimizer = sw.wrap(module, adamw(module.parameters()), zero=zero, process_group=group)
        steps(model, optimizer, rank, place.device, 1)
        assert same_everywhere([each.cpu() for each in whole(model)]), zero
        del model, optimizer
    if group is not None:
        torch.cuda.synchronize(place.device)
        dist.destroy_process_group(group)


PROMISES: dict[str, Callable[[Place, int, int], None]] = {
    body.__name__: body
    for body in (
        *(
            every_stage,
            no_hidden_waits,
            offload,
            checkpoints,
            fused_optimizers,
            clipping_by_parameters,
            borrowed,
            captures,
            join,
            hooks,
            batch_norm,
            elsewhere,
            nccl_alone,
        ),
    )
}
#: NCCL alone has a communicator to lend, and refuses ranks that share a GPU
OF_GPUS_OF_THEIR_OWN = ("borrowed", "nccl_alone")
#: the program chooses no GPU
WITHOUT_SET_DEVICE = ("elsewhere", "nccl_alone")
