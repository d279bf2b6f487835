"""Law: a module on a GPU trains like one on the CPU. It runs on simulated GPUs, with ranks as processes, for any
schedule. With deterministic=True `.grad` has the oracle's bits after every backward, and so do the parameters after
every step. Nothing races, leaks, or waits on the host in a step that used every parameter.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pathlib
import signal
import sys
import threading
import time
from typing import Any

import internals
import pytest
import torch
import torch.distributed as dist
from harness import DEADLINE_S, LONG, Stopwatch, at_least_two, gather, same_everywhere
from internals import VARIABLE, device_link, host_group
from internals import cuda as sw_device
from models import Fragile, Heads, Mlp
from oracle.data_parallel import NaiveDataParallel
from peer import PEER, assert_same_parameters, batch, compare_step, pair, zero_grad
from shardwright_tools.doctor.bench import make_round
from simulated_gpus import POLICIES, SimulatedGpus, keep_promise, run, simulate, stats, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True


def on_gpu(gpus: SimulatedGpus, build_module: Any, **options: Any) -> Any:
    """Return pair() with its wrapped module on the simulated GPU."""
    return pair(lambda: gpus.adopt_module(build_module()), deterministic=True, **options)


def train(rank: int, wrapped: Any, naive: NaiveDataParallel, steps: int = 3 if LONG else 2, make: Any = None) -> None:
    make = make or (lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    optimizers = [make(module) for module in (wrapped.module, naive.module)]
    for step in range(steps):
        x = batch(rank, 6, 7, step=step)
        compare_step(wrapped, naive, lambda model, x=x: model(x).square().mean().backward())
        for optimizer in optimizers:
            optimizer.step()
        assert_same_parameters(wrapped, naive)
        zero_grad(wrapped, naive)
    assert same_everywhere([*wrapped.module.parameters()])


@pytest.mark.parametrize("policy", POLICIES)
def test_an_mlp_trains_with_the_oracles_bits(teams: Any, world_size: int, paths: dict[str, str], policy: str) -> None:
    for ranks in (1, world_size) if policy == "late" and not LONG else (world_size,):
        run(teams, ranks, paths, mlp, policy=policy)


def mlp(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    wrapped, naive = on_gpu(gpus, Mlp, bucket_cap_mb=0.001)
    chosen = os.environ[VARIABLE]
    assert internals.reducer(wrapped).transport == ("one rank" if (world_size, chosen) == (1, "nccl") else chosen)
    train(rank, wrapped, naive)
    counts = stats(wrapped)
    assert counts["buckets_early"] > 0, counts
    assert counts["host_waits"] == 0, counts


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_one_rank_makes_no_communicator(teams: Any, paths: dict[str, str], zero: int) -> None:
    """And needs no NCCL, whose communicator takes some hundred MB of a GPU."""
    run(teams, 1, paths, alone, zero, transport="nccl")


def alone(gpus: SimulatedGpus, rank: int, world_size: int, zero: int) -> None:
    gpus.paths = {**gpus.paths, "nccl": "/nowhere/libnccl.so.2"}
    torch.manual_seed(0)
    module, twin = gpus.adopt_module(Mlp()), None
    with gpus.torch_on_cpu():
        twin = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    wrapped, optimizer = sw.wrap(module, optimizer, zero=zero)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(2):
        for model, steps in ((wrapped, optimizer), (twin, theirs)):
            model(batch(rank, 6, 7, step=step)).square().mean().backward()
            steps.step()
            steps.zero_grad()
    assert gpus.communicators() == 0
    whole = sw.full_state_dict(wrapped)
    assert all(bool((whole[name] == value).all()) for name, value in twin.state_dict().items())


def test_nccls_own_mean_is_alike_on_all_ranks_and_near(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, nccls_mean)


def nccls_mean(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    wrapped, naive = pair(lambda: gpus.adopt_module(Mlp()), bucket_cap_mb=0.001)
    for step in range(3):
        for model in (wrapped, naive):
            model(batch(rank, 6, 7, step=step)).square().mean().backward()
        naive.synchronise()
        for ours, theirs in zip(wrapped.module.parameters(), naive.module.parameters()):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)
        assert same_everywhere([parameter.grad for parameter in wrapped.module.parameters()])
        zero_grad(wrapped, naive)


#: the promises of the CPU, body for body: (module, its tests without "test_", arguments)
_USE = "test_what_was_used_and_accumulated_is_what_is_averaged"
_SHAPE = "test_every_shape_of_backward"
_KIND = "test_every_kind_of_parameter"
PROMISES: list[tuple[str, str, dict[str, Any]]] = [
    (_USE, "inside_no_sync_gradients_are_summed_locally_and_folded_once", {"cap": 0.001}),
    (_USE, "without_no_sync_each_backward_folds_onto_the_running_average", {"cap": 0.001}),
    (_USE, "no_sync_after_an_average_adds_to_it_on_every_rank", {"cap": 0.001}),
    (_USE, "require_backward_grad_sync_is_read_when_the_backward_runs", {}),
    (_USE, "no_sync_is_left_even_by_an_exception", {}),
    (_USE, "use_on_one_rank_under_no_sync_counts_in_the_next_synchronised_backward", {"cap": 0.001}),
    (_USE, "unused_on_one_rank_is_a_contribution_of_zero", {"cap": 0.001}),
    (_USE, "unused_on_one_rank_contributes_what_stands_in_its_gradient", {}),
    (_USE, "unused_on_all_ranks_keeps_the_gradient_bit_for_bit", {"cap": 0.001}),
    (_USE, "an_average_that_nobody_touches_again_stands", {}),
    (_USE, "gradients_that_the_user_replaced_or_scaled_are_what_counts", {}),
    (_USE, "clipping_and_zeroing_between_steps_act_on_the_average", {}),
    (_SHAPE, "several_forwards_before_one_backward", {"cap": 0.001}),
    (_SHAPE, "several_forwards_and_then_a_backward_for_each", {}),
    (_SHAPE, "two_losses_of_one_forward", {}),
    (_SHAPE, "a_graph_that_is_retained_and_walked_twice", {}),
    (_SHAPE, "a_backward_through_some_outputs_only", {}),
    (_SHAPE, "gradients_asked_with_autograd_grad_synchronise_nothing", {}),
    (_SHAPE, "a_gradient_penalty_with_create_graph", {}),
    (_SHAPE, "activation_checkpointing_with_accumulation", {"reentrant": True}),
    (_SHAPE, "activation_checkpointing_with_accumulation", {"reentrant": False}),
    (_SHAPE, "an_exception_in_the_forward_and_then_a_clean_step", {}),
    (_SHAPE, "outputs_of_any_structure", {"kind": "dataclass", "cap": 0.001}),
    (_SHAPE, "two_wrapped_modules_in_turn_and_in_one_backward", {}),
    (_SHAPE, "hooks_of_the_user_run_before_the_gradient_is_averaged", {"cap": 0.001}),
    (_SHAPE, "a_gradient_that_somebody_kept_keeps_its_values", {}),
    (_KIND, "a_tied_parameter_is_averaged_once", {"cap": 0.001}),
    (_KIND, "a_frozen_parameter_has_no_gradient", {"cap": 0.001}),
    (_KIND, "a_parameter_that_is_unfrozen_later_is_averaged_from_then_on", {"cap": 0.001}),
    (_KIND, "a_parameter_that_is_frozen_later_keeps_no_gradient", {}),
    (_KIND, "a_parameter_of_no_elements", {"cap": 0.001}),
    (_KIND, "parameters_without_dimensions", {}),
    (_KIND, "complex_parameters", {"cap": 0.001}),
    (_KIND, "gradients_that_are_conjugated_or_negated_by_a_flag", {"cap": 0.001}),
    (_KIND, "parameters_of_several_dtypes", {"cap": 0.001, "transport": "nccl"}),
    (_KIND, "a_module_of_one_other_dtype", {"dtype": "bfloat16"}),
    (_KIND, "autocast_around_the_forward", {}),
    (_KIND, "channels_last_parameters_keep_their_strides", {"cap": 0.001}),
    (_KIND, "parameters_of_any_strides", {"cap": 0.001}),
    (_KIND, "ignored_parameters_stay_local", {}),
    (_KIND, "parameters_keep_their_identity_and_an_optimizer_made_before_stays_right", {"optimizer": "AdamW"}),
]
#: those that no order of streams decides; the long form has them, too
OF_THE_HOST = {
    "require_backward_grad_sync_is_read_when_the_backward_runs",
    "no_sync_is_left_even_by_an_exception",
    "an_average_that_nobody_touches_again_stands",
    "several_forwards_and_then_a_backward_for_each",
    "two_losses_of_one_forward",
    "a_backward_through_some_outputs_only",
    "gradients_asked_with_autograd_grad_synchronise_nothing",
    "an_exception_in_the_forward_and_then_a_clean_step",
    "outputs_of_any_structure",
    "a_tied_parameter_is_averaged_once",
    "a_frozen_parameter_has_no_gradient",
    "a_parameter_that_is_frozen_later_keeps_no_gradient",
    "autocast_around_the_forward",
    "ignored_parameters_stay_local",
    "parameters_keep_their_identity_and_an_optimizer_made_before_stays_right",
}


@pytest.mark.parametrize(
    "promise", [each for each in PROMISES if LONG or each[1] not in OF_THE_HOST], ids=lambda promise: promise[1]
)
def test_the_promises_of_the_cpu_hold(teams: Any, world_size: int, paths: dict[str, str], promise: Any) -> None:
    policy = POLICIES[len(promise[1]) % len(POLICIES)]
    run(teams, world_size, paths, keep_promise, *promise, policy=policy)


def test_a_gpt_trains_with_the_oracles_bits(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, gpt_scene)


def gpt_scene(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples"))
    from gpt.model import GPT, VOCABULARY

    def loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    wrapped, naive = on_gpu(gpus, lambda: GPT(context=8, layers=2, width=20, heads=2), bucket_cap_mb=0.01)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, fused=True) for m in (wrapped.module, naive.module)]
    for step in range(3):
        tokens = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank))
        compare_step(wrapped, naive, lambda model, tokens=tokens: loss(model, tokens).backward())
        for optimizer in optimizers:
            optimizer.step()
        assert_same_parameters(wrapped, naive)
        zero_grad(wrapped, naive)
    assert stats(wrapped)["host_waits"] == 0


def test_clipping_has_the_bits_of_the_cpu_and_waits_for_nothing(
    teams: Any, world_size: int, paths: dict[str, str]
) -> None:
    run(teams, world_size, paths, clip_scene, policy="late")


def clip_scene(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    module = gpus.adopt_module(Mlp())
    naive = NaiveDataParallel(copy.deepcopy(module))
    theirs = torch.optim.SGD(naive.module.parameters(), lr=0.1)
    ours: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    wrapped, ours = sw.wrap(module, ours, clip_grad_norm=0.05, deterministic=True)
    beside = 0
    for step in range(3):
        x = batch(rank, 6, 7, step=step)
        compare_step(wrapped, naive, lambda model, x=x: model(x).square().mean().backward())
        ours.step()
        before = stats(wrapped)["host_waits"]
        with gpus.torch_on_cpu():  # by the host's norm, for which gradients come down
            sw.clip_grad_norm_(naive.module, 0.05)
        beside += stats(wrapped)["host_waits"] - before
        theirs.step()
        assert_same_parameters(wrapped, naive)
        zero_grad(wrapped, naive)
    assert stats(wrapped)["host_waits"] == beside, stats(wrapped)


def test_a_step_waits_on_the_host_only_where_a_parameter_is_unused(
    teams: Any, world_size: int, paths: dict[str, str]
) -> None:
    run(teams, world_size, paths, wait_scene)


def wait_scene(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    wrapped, naive = on_gpu(gpus, Heads)
    allocations = stats(wrapped)["allocations"]
    for step, heads in enumerate(["left right", "left" if rank == 0 else "left right", "left right", "left"]):
        x = batch(rank, 6, 7, step=step)
        compare_step(wrapped, naive, lambda model, x=x, heads=heads: model(x, heads).backward())
        expected = (0, rank == 0, rank == 0, 1 + (rank == 0))[step] if world_size > 1 else 0
        assert stats(wrapped)["host_waits"] == expected, (step, stats(wrapped))
        zero_grad(wrapped, naive)
    assert stats(wrapped)["allocations"] == allocations


def test_buffers_and_parameters_are_rank_0s(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, buffer_scene, policy="on demand")


def buffer_scene(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    module = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5))
    module[0].weight.data = module[0].weight.data.t().contiguous().t()  # not as it is sent
    module[1].register_buffer("flag", torch.tensor([rank == 0, True]))
    wrapped = sw.wrap(gpus.adopt_module(module), deterministic=True)
    for step in range(2):
        wrapped(batch(rank, 6, 7, step=step)).square().mean().backward()
        before = module[1].running_mean.tolist()
        assert rank or module[1].num_batches_tracked.item() == step + 1
    wrapped.eval()
    with torch.no_grad():
        wrapped(batch(rank, 6, 7))
    assert same_everywhere([*module.parameters()])
    assert rank or before == module[1].running_mean.tolist()
    wrapped.train()(batch(rank, 6, 7))
    assert same_everywhere(module[1].flag.tolist())


def test_streams_of_the_users_own_are_followed(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, stream_scene)


def stream_scene(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """The optimizer runs on another stream than the backward; the user orders the two as torch requires."""
    wrapped, naive = on_gpu(gpus, Mlp, bucket_cap_mb=0.001)
    comm = internals.link(wrapped).comm
    backwards = gpus.stream
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (wrapped.module, naive.module)]
    for step in range(3):
        x = batch(rank, 6, 7, step=step)
        compare_step(wrapped, naive, lambda model, x=x: model(x).square().mean().backward())
        with gpus.other_stream() as side:
            comm.follow(side, backwards)
            for optimizer in optimizers:
                optimizer.step()
        # The parameters are the user's to order; the buckets are ours: see the next backward.
        wrapped.zero_grad()
        naive.module.zero_grad()
        comm.follow(gpus.stream, side)
        assert_same_parameters(wrapped, naive)


class Hopping(torch.nn.Module):
    """Two layers. `away` and `home` are identity functions before and after the last layer in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(7, 5), torch.nn.Linear(5, 3)
        self.away = self.home = lambda x: x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.away(self.last(self.home(self.first(x))))


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in the bucket", "in other memory"])
def test_gradients_that_are_written_on_two_streams_are_followed(
    teams: Any, world_size: int, paths: dict[str, str], elsewhere: bool
) -> None:
    run(teams, world_size, paths, two_streams, elsewhere)


def two_streams(gpus: SimulatedGpus, rank: int, world_size: int, elsewhere: bool) -> None:
    """The last layer's gradients are written on a user's stream; if they lie in other memory, that stream receives it
    back.
    """
    wrapped, naive = on_gpu(gpus, Hopping)
    comm = internals.link(wrapped).comm
    home = gpus.stream
    with gpus.other_stream() as side:
        pass

    def hop(stream: int) -> Any:
        class Hop(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.view_as(x)

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                comm.follow(side, home)  # as autograd does; not the other way round: what follows is of other memory
                gpus.stream = stream
                return gradient

        return Hop.apply

    wrapped.module.away, wrapped.module.home = hop(side), hop(home)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (wrapped.module, naive.module)]
    for step in range(3):
        x = batch(rank, 6, 7, step=step)
        last = [*wrapped.module.last.parameters()]
        if elsewhere:
            for parameter in last:
                parameter.grad = gpus.adopt(torch.zeros_like(parameter))
        own = [parameter.grad for parameter in last]

        def backward(model: Any, x: torch.Tensor = x, own: list[Any] = own) -> None:
            model(x).square().mean().backward()
            if (
                elsewhere and model is wrapped
            ):  # torch's allocator gives it to whoever asks on the stream that it comes from
                gpus.stream = side
                for gradient in own:
                    gradient.zero_()
                gpus.stream = home

        compare_step(wrapped, naive, backward)
        for optimizer in optimizers:
            optimizer.step()
        assert_same_parameters(wrapped, naive)
        zero_grad(wrapped, naive, set_to_none=False)


def test_two_hooks_of_a_module_at_once_follow_one_another(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, two_hooks)


def two_hooks(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """With one output on the CPU, autograd runs hooks in the caller's thread and in its own. The second one here has the
    gradients of the left head, and comes while the first is inside a slow call of the driver.
    """
    tasks: dict[int, int] = {}
    task_id = internals.autograd.graph_task_id
    with pytest.MonkeyPatch.context() as patch:
        known = lambda: tasks.get(threading.get_ident(), None) or task_id()  # noqa: E731
        patch.setattr(internals.autograd, "graph_task_id", known)
        wrapped = sw.wrap(gpus.adopt_module(Heads()), deterministic=True, bucket_cap_mb=0.0001)
    left, right = wrapped.module.left, wrapped.module.right
    started: list[threading.Thread] = []
    failed: list[BaseException] = []

    def aside(task: int) -> None:
        tasks[threading.get_ident()] = task
        try:
            for parameter in left.parameters():
                for hook in internals.autograd.gradient_hooks(parameter).values():
                    hook(parameter)
        except BaseException as error:
            failed.append(error)

    def begin(_: torch.Tensor) -> None:
        gpus.slow_next("cuEventRecord", 0.5)
        started.append(threading.Thread(target=aside, args=(task_id(),)))
        started[-1].start()
        time.sleep(0.1)

    right.register_forward_hook(lambda module, inputs, output: output.register_hook(begin) and None)
    for step in range(2):
        for parameter in left.parameters():
            parameter.grad = gpus.adopt(torch.full_like(parameter, rank + 1.0))
        wrapped(batch(rank, 6, 7, step=step), "right").backward()
        started[-1].join()
        assert not failed, failed
        expected = sum(range(1, world_size + 1)) / world_size
        assert all(bool((parameter.grad == expected).all()) for parameter in left.parameters())
        assert same_everywhere([parameter.grad for parameter in wrapped.parameters()])
        wrapped.zero_grad()


# what cannot work says so, on every rank --------------------------------------------------------------------------


def test_what_is_not_there_or_cannot_be_is_named(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, refusals)


def refusals(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3, device="meta"))
    with pytest.raises(sw.Error, match="meta"):
        sw.wrap(module)
    optimizer = torch.optim.SGD((module := gpus.adopt_module(Mlp())).parameters(), lr=0.1)
    with pytest.raises(NotImplementedError, match="gather='int8' and write_guard= are the host's"):
        sw.wrap(module, optimizer, zero=3, share_parameters=False, gather="int8")
    with pytest.raises(ValueError, match="must name the one GPU that the module is on"):
        sw.DistributedDataParallel(module, device_ids=[1])


@at_least_two  # one rank needs no NCCL
@pytest.mark.parametrize("missing", ["driver", "gpu", "nccl", "libraries"])
def test_a_gpu_that_cannot_be_used_on_one_rank_is_named_on_all_and_the_cpu_works(
    teams: Any, world_size: int, paths: dict[str, str], missing: str
) -> None:
    run(teams, world_size, paths, missing_piece, missing, transport="nccl")


def missing_piece(gpus: SimulatedGpus, rank: int, world_size: int, missing: str) -> None:
    says = {
        "driver": "/nowhere/libcuda.so.1 cannot be used",
        "gpu": "shows no GPU",
        "nccl": "is NCCL 2.13.5: 2.14 or newer",
        "libraries": "none to be found",
    }

    def find_none() -> dict[str, str | None]:
        raise RuntimeError("none to be found")

    with pytest.MonkeyPatch.context() as patch:
        if rank == world_size - 1:
            if missing == "driver":
                gpus.paths = {**gpus.paths, "cuda": "/nowhere/libcuda.so.1"}
            elif missing == "libraries":
                patch.setattr(sw_device.runtime, "libraries", find_none)
            else:
                patch.setenv(*{"gpu": ("CUDA_VISIBLE_DEVICES", ""), "nccl": ("SIM_NCCL_VERSION", "21305")}[missing])
        with pytest.raises(RuntimeError, match=says[missing]) as caught:
            sw.wrap(gpus.adopt_module(Mlp()))
        assert missing == "libraries" or isinstance(caught.value, NotImplementedError)
        if rank < world_size - 1:
            assert f"rank {world_size - 1} cannot use its GPU" in str(caught.value)
        with gpus.torch_on_cpu():
            train(rank, *pair(Mlp))


def test_a_backward_that_fails_is_named_and_wrapping_again_goes_on(
    teams: Any, world_size: int, paths: dict[str, str]
) -> None:
    run(teams, world_size, paths, failing_backward)


def failing_backward(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    module = gpus.adopt_module(Fragile())
    wrapped = sw.wrap(module, deterministic=True, bucket_cap_mb=0.0001)
    for step in range(2):
        wrapped(batch(rank, 6, 7, step=step)).square().mean().backward()
    last = world_size - 1
    if rank == last:
        with pytest.raises(ArithmeticError):
            wrapped(batch(rank, 6, 7), True).square().mean().backward()
    gather(None)
    with pytest.raises(sw.CommError, match=f"failed on rank {last} in the middle of a round" if rank == last else None):
        wrapped(batch(rank, 6, 7))
    wrapped, naive = on_gpu(gpus, Mlp, bucket_cap_mb=0.001)
    train(rank, wrapped, naive)


@at_least_two
@pytest.mark.parametrize(
    "zero, call",
    [
        (0, "ncclBroadcast"),
        (0, "ncclSend"),
        (0, "ncclRecv"),
        (3, "ncclAllGather"),
        (3, "ncclGroupEnd"),
    ],
)
def test_a_call_that_fails_inside_a_group_of_nccls_leaves_none_open(
    teams: Any, world_size: int, paths: dict[str, str], zero: int, call: str
) -> None:
    run(teams, world_size, paths, failing_in_a_group, zero, call, transport="nccl")


def failing_in_a_group(gpus: SimulatedGpus, rank: int, world_size: int, zero: int, call: str) -> None:
    """A NCCL group belongs to a thread. If it leaves one open, its later communicators do nothing."""
    gpus.watch()
    torch.manual_seed(0)
    module = gpus.adopt_module(Mlp())
    if rank == 0:
        gpus.fail_next(call, 3)
    with pytest.raises(sw.Error):
        model, optimizer = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), zero=zero, deterministic=True)
        for step in range(50):
            model(batch(rank, 6, 7, step=step)).square().mean().backward()
            optimizer.step()
    assert gpus.failed_call() == (call if rank == 0 else "")
    gather(None)
    train(rank, *on_gpu(gpus, Mlp, bucket_cap_mb=0.001))


@at_least_two
def test_a_deadline_of_nccls_own_is_a_timeout(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, nccls_deadline, transport="nccl")


def nccls_deadline(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    wrapped = sw.wrap(gpus.adopt_module(Mlp()))
    gather(None)
    gpus.fail_next("ncclCommGetAsyncError", 8)
    with pytest.raises(sw.CommTimeoutError, match=r"\(8\)"):
        internals.link(wrapped).comm.watch()


@at_least_two
@pytest.mark.parametrize("host_waits", [True, False], ids=["in the engine", "in torch"])
def test_a_rank_that_does_not_come_is_told_at_the_deadline(
    teams: Any, world_size: int, paths: dict[str, str], host_waits: bool
) -> None:
    run(teams, world_size, paths, absent_rank, host_waits)


def absent_rank(gpus: SimulatedGpus, rank: int, world_size: int, host_waits: bool) -> None:
    """The watching thread releases a thread that waits inside torch for its GPU."""
    gpus.watch()
    torch.manual_seed(0)
    wrapped = sw.wrap(gpus.adopt_module(Heads()), timeout_s=1.0)
    if rank and host_waits:
        with pytest.raises(sw.Error, match="was not done within 1 s; a peer has not issued it"):
            wrapped(batch(rank, 6, 7), "left").backward()
    elif rank:
        wrapped(batch(rank, 6, 7), "left right").backward()
        wrapped.module.body.weight.grad.sum()
    with (
        pytest.raises(sw.Error, match="was not done within 1 s|has met an error") if rank else contextlib.nullcontext()
    ):
        wrapped(batch(rank, 6, 7), "left")
    gather(None)


@at_least_two
@pytest.mark.parametrize("transport", ["nccl", "shm"])
@pytest.mark.parametrize("where", ["in the engine", "in torch"])
def test_a_rank_that_is_killed_is_named_at_once(
    fresh_ranks: Any, world_size: int, paths: dict[str, str], where: str, transport: str
) -> None:
    with fresh_ranks(world_size) as team:
        place = {"module": __name__, "scene": "killed_rank", "given": (where,)}
        team.start(simulate, paths=paths, policy="random", transport=transport, **place)
        outcomes = team.wait(60, patient=True)
        assert outcomes[-1].ended == "signal SIGKILL"
        assert all(outcome.ok for outcome in outcomes[:-1]), outcomes


def killed_rank(gpus: SimulatedGpus, rank: int, world_size: int, where: str) -> None:
    """The deadline is half an hour. The host learns of the death at once, whichever thread waits for the GPU."""
    gpus.watch()
    wrapped = sw.wrap(gpus.adopt_module(Heads()))
    wrapped(batch(rank, 6, 7), "left right").backward()
    gpus.synchronize()
    gather(None)
    if rank == world_size - 1:
        time.sleep(1)  # the others wait by then
        os.kill(os.getpid(), signal.SIGKILL)
    start = Stopwatch()
    with pytest.raises(sw.CommError, match=rf"rank {world_size - 1} .*died or exited"):
        if where == "in the engine":  # who left a parameter unused waits for the others' use
            wrapped(batch(rank, 6, 7), "left").backward()
        wrapped(batch(rank, 6, 7), "left right").backward()
        wrapped.module.body.weight.grad.sum()
        wrapped(batch(rank, 6, 7), "left")
    assert start.seconds() < 10  # two seconds, on a machine with nothing else to do


@at_least_two
def test_two_communicators_of_a_gpu_end_side_by_side(fresh_ranks: Any, world_size: int, paths: dict[str, str]) -> None:
    with fresh_ranks(world_size) as team:
        place = {"module": __name__, "scene": "killed_beside_a_gather", "given": ()}
        team.start(simulate, paths=paths, policy="random", transport="nccl", **place)
        outcomes = team.wait(60, patient=True)
        assert outcomes[-1].ended == "signal SIGKILL"
        assert all(outcome.ok for outcome in outcomes[:-1]), outcomes


def killed_beside_a_gather(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """NCCL's abort of one communicator waits for the other's kernels, which wait for the dead rank; the simulation
    would report it.
    """
    gpus.watch()
    wrapped = sw.wrap(gpus.adopt_module(Heads()), zero=3)
    links = list(internals.replica(wrapped).group.links.values())
    means, gathered = gpus.adopt(torch.ones(4)), gpus.adopt(torch.ones(4))
    wrapped(batch(rank, 6, 7), "left right").backward()
    gpus.synchronize()
    gather(None)
    if rank == world_size - 1:
        time.sleep(1)  # the others wait by then
        os.kill(os.getpid(), signal.SIGKILL)
    start = Stopwatch()
    with pytest.raises(sw.CommError, match=rf"rank {world_size - 1} .*died or exited"):
        with gpus.other_stream():  # side by side, as a mean and a gather are
            links[1].broadcast([gathered], world_size - 1)
        links[0].broadcast([means], world_size - 1)
        means.sum()
        wrapped(batch(rank, 6, 7), "left")
    assert start.seconds() < 10
    assert [link.comm.is_alive for link in links] == [False, False]


@at_least_two
def test_different_numbers_of_backwards_are_named_a_step_later(
    teams: Any, world_size: int, paths: dict[str, str]
) -> None:
    run(teams, world_size, paths, uneven_backwards, policy="on demand")


def uneven_backwards(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    gpus.watch()  # a rank that has seen it ends the communicator, while others wait for their GPUs
    torch.manual_seed(0)
    wrapped = sw.wrap(gpus.adopt_module(Mlp()))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with pytest.raises(sw.Error, match="ranks ran different numbers of backwards or optimizer steps of Mlp"):
        for _ in range(50):
            for _ in range(2 if rank == 0 else 1):
                wrapped(batch(rank, 6, 7)).sum().backward()
            optimizer.step()
    gather(None)


@pytest.mark.parametrize("nth", [3, 20, 33])
def test_a_call_of_the_driver_that_fails_is_named(teams: Any, world_size: int, paths: dict[str, str], nth: int) -> None:
    run(teams, 1, paths, failing_call, nth)


def failing_call(gpus: SimulatedGpus, rank: int, world_size: int, nth: int) -> None:
    wrapped, naive = on_gpu(gpus, Mlp, bucket_cap_mb=0.001)
    gpus.fail_call(nth, 999)
    with pytest.raises(sw.Error, match=r"CUDA_ERROR_UNKNOWN|\(999\)"):
        train(rank, wrapped, naive, steps=3)
    gpus.fail_call(0, 0)


@pytest.mark.parametrize("zero", [0, 2])
def test_a_torch_that_shows_no_addresses_trains_alike(
    teams: Any, world_size: int, paths: dict[str, str], zero: int
) -> None:
    run(teams, world_size, paths, without_addresses, zero)


def without_addresses(gpus: SimulatedGpus, rank: int, world_size: int, zero: int) -> None:
    """Before torch 2.10 there is no DLPack table. Gradients are then examined in Python, and copied in as few launches."""

    def trained() -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        module = gpus.adopt_module(Mlp())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        wrapped, optimizer = sw.wrap(module, optimizer, zero=zero, deterministic=True)
        before = stats(wrapped)["launches"]
        for step in range(3):
            wrapped(batch(rank, 6, 7, step=step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in wrapped.parameters()], stats(wrapped)["launches"] - before

    expected, launches = trained()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Parameter, "__dlpack_c_exchange_api__", None, raising=False)
        found, without = trained()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) and without == launches


def test_the_doctors_round_is_a_mean(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, doctors_round)


def doctors_round(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    parameter = torch.nn.Parameter(gpus.adopt(torch.zeros(64)))
    link = device_link.device_link(host_group(dist.group.WORLD, DEADLINE_S), parameter, DEADLINE_S)
    run_round = make_round(link, parameter)
    with torch.no_grad():
        parameter.grad.fill_(float(rank))
    run_round()
    gpus.synchronize()
    assert torch.allclose(parameter.grad, torch.full((64,), (world_size - 1) / 2))
