"""Law: at zero=3 on GPUs units are gathered into shared places, one ahead of the running unit. The bits are those of
stage 0 for any module and backward. Nothing races or leaks, no step waits for the GPU, and no step after the second
allocates.

The CPU's tests of units run body for body, with modules on simulated GPUs.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import test_every_stage_has_the_same_bits as stages
import test_fully_shard_composes_zero_3_in_place as by_hand
import test_fully_shard_has_the_contract_of_fsdp2 as contract
import test_fully_shard_has_the_methods_of_fsdp2 as methods
import test_integers_are_released as integers
import test_units_are_gathered_in_their_compute_dtype as computed
import test_units_are_recomputed_with_the_same_bits as recomputed
import test_units_are_whole_only_while_they_run as units
import torch
from harness import DEADLINE_S, LONG, at_least_two, gather, in_turn, same_everywhere
from internals import UnitSchedule, process_group
from models import Heads, Mlp
from oracle.fold import bits_equal
from peer import PEER, batch
from simulated_gpus import POLICIES, SimulatedGpus, meet, run, stats, sw
from test_stages_on_simulated_gpus import OnGpu, some
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True


class OnGpuByHand(OnGpu):
    """A stand-in for the package, whose fully_shard() also moves modules to the simulated GPU."""

    def fully_shard(self, module: Any, **options: Any) -> Any:
        for each in module if isinstance(module, list) else [module]:
            self._gpus.adopt_module(each)
        return sw.fully_shard(module, **{"deterministic": True, **options})


@contextlib.contextmanager
def inside(gpus: SimulatedGpus) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (units, by_hand, computed, contract, methods):
            patch.setattr(module, "sw", OnGpuByHand(gpus))
        if not LONG:  # the second step gathers as the first has taught it
            patch.setattr(units.steps, "__defaults__", (2, None))
        yield


#: (test without "test_", its arguments); the cut of Blocks that a CPU's test takes is by name
SHAPES = [
    (build.__name__, cut)
    for build in units.MODELS
    for cut in units.CUTS
    if (build.__name__, cut) not in (("Tied", "layers"), ("Tied", "nested"), ("Viewed", "blocks"))
]
#: the laws below have the other modules
QUICK_SHAPES = [
    ("Tied", "whole"),
    ("Normed", "layers"),
    ("RecomputedReentrant", "nested"),
    ("RecomputedTogether", "blocks"),
    ("Adapted", "nested"),
    ("Several", "layers"),
    ("Viewed", "whole"),
]


@pytest.mark.parametrize(("model", "cut"), SHAPES if LONG else QUICK_SHAPES)
def test_every_module_has_the_bits_of_stage_0(
    teams: Any, world_size: int, paths: dict[str, str], model: str, cut: str
) -> None:
    run(teams, world_size, paths, every_module, model, cut, policy=POLICIES[len(model + cut) % len(POLICIES)])


def every_module(gpus: SimulatedGpus, rank: int, world_size: int, model: str, cut: str) -> None:
    made = next(each for each in units.MODELS if each.__name__ == model)
    units.test_every_module_has_the_bits_of_stage_0.body(rank, world_size, build=made, cut=cut)


STEPS = ["several_forwards", "the_same_graph_twice", "gradients_of_inputs", "accumulating"]


@pytest.mark.parametrize(("train", "cut"), some(itertools.product(STEPS, ["blocks", "nested"]), 3))
def test_every_shape_of_a_step(teams: Any, world_size: int, paths: dict[str, str], train: str, cut: str) -> None:
    run(teams, world_size, paths, every_step, train, cut, policy="late")


def every_step(gpus: SimulatedGpus, rank: int, world_size: int, train: str, cut: str) -> None:
    units.test_every_shape_of_a_step.body(rank, world_size, train=getattr(units, train), cut=cut)


LAWS: list[tuple[Any, str, dict[str, Any]]] = [
    (units, "units_that_are_kept_after_the_forward", {"build": units.Recomputed}),
    (units, "everything_is_released_after_a_backward", {}),
    (units, "a_parameter_read_outside_of_its_unit_is_an_error_with_its_name", {}),
    (units, "what_is_written_in_full_parameters_is_everybodys", {}),
    (units, "copies_of_a_released_module_are_refused", {}),
    (units, "twenty_steps_of_a_gpt", {"options": {"units": nn.Linear}}),
    (units, "hooks_that_are_added_later_see_whole_parameters", {}),
    (by_hand, "by_hand_as_by_wrap", {"train": units.steps, "reshard_after_forward": True}),
    (by_hand, "by_hand_as_by_wrap", {"train": by_hand.accumulating, "reshard_after_forward": False}),
    (by_hand, "the_class_is_a_subclass_that_is_not_copied", {}),
    (by_hand, "unshard_and_reshard", {}),
    (by_hand, "clipping_and_norms", {}),
    (by_hand, "a_meta_module_is_filled_after_the_calls_as_with_torch", {}),
    (by_hand, "precision_is_said_of_the_outermost_or_of_each", {}),
    (by_hand, "a_list_of_modules_is_one_unit", {"reshard_after_forward": True, "tied": True}),
    (by_hand, "a_list_of_modules_is_one_unit", {"reshard_after_forward": False, "tied": False}),
    (by_hand, "mesh_is_fsdp2s_name", {}),
    (by_hand, "an_inner_module_that_the_outermost_ignores_has_an_engine_of_its_own", {}),
    (methods, "gradients_are_the_sum_over_the_factor", {}),
    (methods, "one_unit_has_its_own_factor_and_it_may_change", {}),
    (methods, "a_module_of_the_meta_device_and_ignored_names", {}),
    (methods, "a_registered_method_runs_as_a_forward", {}),
    (methods, "units_are_reset_after_an_exception", {}),
    (methods, "a_module_without_trained_parameters_is_gathered", {}),
    (contract, "parameters_and_gradients_are_dtensors_of_rows", {}),
    *((contract, "torchs_optimizers_step_with_the_bits_of_stage_0", {"name": name}) for name in contract.OPTIMIZERS),
    (contract, "scalers_schedules_and_gradients_that_programs_change", {}),
    (contract, "gradients_stand_until_they_are_cleared", {}),
    (contract, "an_optimizer_in_the_backward", {}),
    (contract, "what_a_rank_writes_to_its_rows_is_gathered", {}),
    (contract, "forwards_of_every_order", {}),
]
COMPUTED: list[tuple[Any, str, dict[str, Any]]] = [
    *((computed, "every_module_has_the_bits_of_stage_0", {"build": build}) for build in (units.Twice, units.Tied)),
    *((computed, "every_module_has_the_bits_of_stage_0", {"build": b}) for b in (units.Recomputed, units.Several)),
    *((computed, "every_module_has_the_bits_of_stage_0", {"build": b}) for b in (units.Turned, units.Adapted)),
    *(
        (computed, "every_shape_of_a_step", {"train": train})
        for train in (units.several_forwards, units.the_same_graph_twice, units.gradients_of_inputs, units.accumulating)
    ),
    *((computed, "every_kind_of_parameter_and_policy", {"policy": policy}) for policy in computed.POLICIES),
    (computed, "whole_parameters_are_exact_and_modules_compute_with_what_was_written", {}),
]
WITHIN: list[tuple[Any, str, dict[str, Any]]] = [
    (integers, "every_stage_has_the_same_bits_and_a_rank_its_part_of_the_bytes", {}),
    *((recomputed, "every_shape_of_a_step", {"train": each}) for each in (units.several_forwards, units.accumulating)),
    (recomputed, "a_step_has_the_same_bits_at_every_stage", {"name": "two"}),
]


@pytest.mark.parametrize("law", range(len(WITHIN)), ids=lambda law: WITHIN[law][1])
def test_the_laws_of_recomputed_units_and_of_integers_hold(
    teams: Any, world_size: int, paths: dict[str, str], law: int
) -> None:
    run(teams, world_size, paths, keep_law, law, "WITHIN", policy=POLICIES[law % len(POLICIES)])


@pytest.mark.parametrize("law", some(range(len(LAWS)), 2), ids=lambda law: LAWS[law][1])
def test_the_laws_of_the_cpu_hold(teams: Any, world_size: int, paths: dict[str, str], law: int) -> None:
    run(teams, world_size, paths, keep_law, law, policy=POLICIES[law % len(POLICIES)])


@pytest.mark.parametrize(
    "law", some(range(len(COMPUTED) - 1), 4) + [len(COMPUTED) - 1], ids=lambda law: COMPUTED[law][1]
)
def test_the_laws_of_compute_dtypes_hold(teams: Any, world_size: int, paths: dict[str, str], law: int) -> None:
    run(teams, world_size, paths, keep_law, law, "COMPUTED", policy=POLICIES[law % len(POLICIES)])


def keep_law(gpus: SimulatedGpus, rank: int, world_size: int, law: int, laws: str = "LAWS") -> None:
    module, name, arguments = globals()[laws][law]
    getattr(module, f"test_{name}").body(rank, world_size, **arguments)


def test_places_and_gathers_are_of_16_bits(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, half_of_the_bytes)


def half_of_the_bytes(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    plain, low = computed.gathered_on_a_gpu(rank, world_size)
    assert low[0] == plain[0] / 2 and low[1] <= plain[1] / 2 + 128, (plain, low)


@pytest.mark.parametrize(("policy", "cut"), some(itertools.product(POLICIES, ["blocks", "nested"]), 5))
def test_no_step_waits_for_the_gpu_or_allocates(
    teams: Any, world_size: int, paths: dict[str, str], policy: str, cut: str
) -> None:
    for precision in in_turn((None, "bf16"), int(cut == "nested")):
        run(teams, world_size, paths, quiet_steps, cut, precision, policy=policy)


def quiet_steps(gpus: SimulatedGpus, rank: int, world_size: int, cut: str, precision: str | None) -> None:
    model, optimizer = units.private(lambda: units.Blocks(5), units=units.CUTS[cut], precision=precision)
    gc.collect()
    before = len(gpus._held)
    for step in range(5):
        loss = model(batch(rank, 6, 7, step=step)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            held, counts = len(gpus._held), sw.stats()["models"][-1]
    found = sw.stats()["models"][-1]
    assert stats(model)["host_waits"] == 0 and found["allocations"] == counts["allocations"]
    assert len(gpus._held) == held == before, "torch's memory was asked for in a step"
    plan = sw.describe()["models"][-1]
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    assert plan["unit_bytes"] < whole * (1 if cut == "nested" else 0.8), plan
    # In the forward each but the first, in the backward each but the one that it begins with: as on the host.
    assert found["gathers"] - counts["gathers"] == 3 * (found["units"] + found["units"] - 2), (found, counts)
    units.assert_released(model)


@pytest.mark.parametrize("policy", some(POLICIES, 4))
def test_units_that_run_at_once_lie_apart(teams: Any, world_size: int, paths: dict[str, str], policy: str) -> None:
    run(teams, world_size, paths, at_once, policy=policy)


class Crossed(units.Blocks):
    """A block that runs inside another, of which it is not a part, and whose place it has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_forward_hook(lambda _, args, output: output + self.blocks[2](args[0]))


def at_once(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    units.assert_same_training(lambda model, optimizer: units.steps(model, optimizer, rank), Crossed)


@pytest.mark.parametrize("case", ["a backward through a backward", "outputs that are views of parameters"])
def test_units_that_a_backward_needs_at_once_must_be_kept(
    teams: Any, world_size: int, paths: dict[str, str], case: str
) -> None:
    run(teams, world_size, paths, at_once_in_a_backward, units.Viewed if case.startswith("outputs") else units.Blocks)


def at_once_in_a_backward(gpus: SimulatedGpus, rank: int, world_size: int, build: Any) -> None:
    def train(model: Any, optimizer: Any) -> Any:
        return (units.steps if build is units.Viewed else units.penalty_on_gradients)(model, optimizer, rank)

    units.assert_same_training(train, build, reshard_after_forward=False)
    model, optimizer = units.private(build)
    with pytest.raises(sw.Error, match="share memory on a GPU.*reshard_after_forward=False"):
        train(model, optimizer)
    gather(None)


@at_least_two
def test_ranks_that_run_different_units_are_named_a_step_later(
    teams: Any, world_size: int, paths: dict[str, str]
) -> None:
    run(teams, world_size, paths, different_units, policy="on demand")


def different_units(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    gpus.watch()
    model, optimizer = units.wrap(Heads, 3, units=nn.Linear)
    with pytest.raises(sw.Error, match="ran different units or the same in another order"):
        for step in range(50):
            model(batch(rank, 6, 7, step=step), ["left", "right"][rank % 2]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    gather(None)


def test_wrapping_again_gathers_what_was_released_and_dropping_does_not(
    teams: Any, world_size: int, paths: dict[str, str]
) -> None:
    run(teams, world_size, paths, wrapped_again)


def wrapped_again(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    model, optimizer = units.private(units.Blocks)
    units.steps(model, optimizer, rank, 2)
    expected = sw.full_state_dict(model)
    module = sw.unwrap(model)
    again = units.sw.wrap(module, zero=0)
    assert all(bits_equal(expected[name], p) for name, p in module.state_dict().items())
    model = units.sw.wrap(module, zero=3)
    del again
    gc.collect()
    units.assert_released(model)
    del model
    gc.collect()
    for p in module.blocks.parameters():  # no rank has the values any longer: new ones can be assigned
        if p.numel() > 32:
            with pytest.raises(sw.Error, match="its wrapper is gone"):
                p.sum()
            p.data = torch.ones(p.shape)
            assert p.sum() == p.numel()
    gather(None)


def test_a_gpu_that_has_failed_keeps_no_module_hooked(teams: Any, paths: dict[str, str]) -> None:
    run(teams, 1, paths, dropped_after_a_failure)


def dropped_after_a_failure(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """An error while a wrapper ends would reach no caller, so the remaining work is done anyway."""
    model, optimizer = units.private(units.Blocks)
    units.steps(model, optimizer, rank, 1)
    module = model.module
    assert any(each._forward_pre_hooks for each in module.modules())
    with mock.patch.object(UnitSchedule, "_drop_ahead", side_effect=sw.Error("the driver's")):
        del model, optimizer
        gc.collect()
    assert not any(each._forward_pre_hooks or each._forward_hooks for each in module.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in module.parameters())


def test_evaluation_and_checkpoints(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, evaluated)


def evaluated(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    def train(model: Any, optimizer: Any) -> list[float]:
        losses = []
        for step in range(3 if LONG else 2):
            losses += units.steps(model, optimizer, rank, 1)
            model.eval()
            with torch.no_grad():
                losses.append(units.loss_of(model, rank, 20 + step).item())
                with sw.full_parameters(model):
                    losses.append(units.loss_of(model, rank, 30 + step).item())
            model.train()
        return losses

    units.assert_same_training(train, units.Blocks)
    model, optimizer = units.private(units.Blocks)
    losses = units.steps(model, optimizer, rank, 2)
    folder = gather(str(gpus.folder / "saved"))[0]
    sw.save(folder, model, optimizer)
    losses = units.steps(model, optimizer, rank, 2)
    other, second = units.private(units.Blocks, units=nn.Linear)
    sw.load(folder, other, second)
    assert units.steps(other, second, rank, 2) == losses
    for mine, theirs in zip(units.parameters_of(model), units.parameters_of(other), strict=True):
        assert bits_equal(mine, theirs)


ROWS = {"rows": [[0, 1], [2, 3]], "turned": [[3, 1], [0, 2]], "replicas only": [[0], [1], [2], [3]]}


def on_a_mesh(
    rank: int, world_size: int, paths: dict[str, str], policy: str, rows: list[list[int]], deterministic: bool
) -> None:
    mesh = DeviceMesh("cpu", torch.tensor(rows), mesh_dim_names=("replicate", "shard"))
    with SimulatedGpus(paths, meet(rank), policy) as gpus, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "sw", OnGpu(gpus))
        for training, made in [(stages.accumulating_onto_the_average, Mlp), (stages.clipped_by_ours, stages.Odd)]:
            options = {"build": made, "bucket_cap_mb": 0.001}
            whole = stages.run(0, training, rank, **options)
            for zero in in_turn((1, 2, 3), int(made is Mlp)):
                given = {**options, "device_mesh": mesh, "deterministic": deterministic or zero > 1}
                sliced = stages.run(zero, training, rank, **given)
                if given["deterministic"]:
                    sliced.assert_equals(whole, (training.__name__, zero))
        assert same_everywhere([*sliced.parameters])


@pytest.mark.parametrize(("case", "policy"), [*zip([*ROWS] if LONG else ["turned"], POLICIES)])
def test_on_a_mesh_of_two_dimensions_every_stage_has_the_bits_of_stage_0(
    teams: Any, paths: dict[str, str], case: str, policy: str
) -> None:
    given = {"paths": paths, "policy": policy, "rows": ROWS[case], "deterministic": case != "rows"}
    teams.run(4, on_a_mesh, spoils=False, deadline_s=DEADLINE_S, arguments=given)


@at_least_two
def test_the_first_operations_of_two_communicators_may_be_in_any_order(
    teams: Any, world_size: int, paths: dict[str, str]
) -> None:
    """NCCL connects peers at a communicator's first operation of a kind, for which their hosts wait."""
    run(teams, world_size, paths, first_operations, transport="nccl", strict="")  # "order" forbids it


def first_operations(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    module = gpus.adopt_module(Mlp())
    model, _ = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), zero=3, timeout_s=10)
    links = [link for group in process_group.live_groups() for link in group.links.values()]
    assert len(links) == 2
    ranges = [(gpus.adopt(torch.zeros(world_size)).data_ptr(), world_size, "float32") for _ in links]
    torchs = gpus.stream
    for k in (0, 1) if rank else (1, 0):
        with gpus.other_stream() as aside:  # torch's waits for neither
            links[k].comm.follow(aside, torchs)
            links[k].comm.all_gather(ranges[k : k + 1], aside)
    gather(None)
    del model
