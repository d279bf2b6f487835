"""Law: with modules on GPUs, mistakes that would silently train or save the wrong thing raise the same error as on the
CPU, or work the same. The CPU's tests run body for body on simulated GPUs.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import test_gradients_that_are_not_averaged_are_refused as gradients
import test_units_are_whole_only_while_they_run as units
import torch
from harness import LONG, at_least_two, gather, in_turn
from models import Heads, Mlp
from oracle.fold import bits_equal
from peer import PEER, batch
from simulated_gpus import POLICIES, SimulatedGpus, run, sw
from test_units_on_simulated_gpus import OnGpuByHand

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True

_SLICES = "test_slices_of_an_optimizer_are_not_saved_as_whole"
_OPTIMIZERS = "test_an_optimizer_is_its_modules_and_the_same_on_all_ranks"
_AVERAGES = "test_averages_of_weights_at_every_stage"
_GRADIENTS = "test_gradients_that_are_not_averaged_are_refused"
_UNITS = "test_fully_shard_composes_zero_3_in_place"
_CORRUPTION = "test_silent_corruption_is_named"
_READS = "test_released_parameters_are_not_read"
#: (module, test without "test_", arguments)
LAWS: list[tuple[str, str, dict[str, Any]]] = [
    (_SLICES, "no_pickler_takes_slices", {"stage": "1"}),
    (_SLICES, "one_rank_has_the_whole_until_the_next_step", {"stage": "3 private"}),
    (_SLICES, "one_rank_has_the_whole_until_the_next_step", {"stage": "1 whole tensors"}),
    (_OPTIMIZERS, "what_differs_as_it_is_given_is_named", {"zero": 0}),
    (_OPTIMIZERS, "several_optimizers_step_in_any_order", {"zero": 0}),
    (_OPTIMIZERS, "another_classs_state_is_not_loaded", {"zero": 2}),
    (_AVERAGES, "parameters_of_each_rank_are_swapped_as_in_one_process", {"kind": "exchange", "stage": "2"}),
    (
        _AVERAGES,
        "where_all_have_whole_parameters_every_stage_is_right",
        {"kind": "store and restore", "stage": "3 private"},
    ),
    (_AVERAGES, "released_parameters_are_not_swapped", {"kind": "store and restore"}),
    (_GRADIENTS, "what_nobody_averaged_is_not_stepped_on", {"stage": "1", "how": "by hand"}),
    (_GRADIENTS, "what_nobody_averaged_is_not_stepped_on", {"stage": "2", "how": "bubbles"}),
    *[
        (
            _GRADIENTS,
            "an_explicit_call_has_the_bits_of_a_backward",
            {"stage": stage, "how": "by hand", "to_none": to_none},
        )
        for stage, to_none in (("0", False), ("1", True), ("2", True), ("3 private", True))[:: 1 if LONG else 3]
    ],
    (_UNITS, "a_list_of_modules_is_one_unit", {"reshard_after_forward": True, "tied": True}),
    (_UNITS, "an_inner_module_with_a_mesh_of_its_own_is_refused_on_all_ranks", {"odd": "last"}),
    (_CORRUPTION, "a_flipped_bit_is_named_before_the_next_checked_step", {"stages": ("0", "2")}),
    (_CORRUPTION, "a_gradient_that_is_not_finite_is_named_with_its_rank", {"stages": ("0", "2", "3 private")}),
    (_READS, "a_read_is_an_error_with_the_name", {}),
    (_READS, "what_needs_no_values_answers", {}),
    (_READS, "modules_of_the_outermost_unit_may_be_called_by_themselves", {}),
]
#: the host's, for any device; the long form has them, too
OF_THE_HOST = {
    "no_pickler_takes_slices",
    "what_differs_as_it_is_given_is_named",
    "another_classs_state_is_not_loaded",
    "an_inner_module_with_a_mesh_of_its_own_is_refused_on_all_ranks",
    "modules_of_the_outermost_unit_may_be_called_by_themselves",
}


@pytest.mark.parametrize(
    "law",
    [each for each in LAWS if LONG or each[1] not in OF_THE_HOST],
    ids=lambda law: "-".join([law[1], *map(str, law[2].values())]),
)
def test_the_laws_of_the_cpu_hold(teams: Any, world_size: int, paths: dict[str, str], law: Any) -> None:
    if world_size < importlib.import_module(law[0]).__dict__[f"test_{law[1]}"].at_least:
        pytest.skip("of several ranks")
    run(teams, world_size, paths, keep_law, *law, policy=POLICIES[len(law[1]) % len(POLICIES)])


def keep_law(gpus: SimulatedGpus, rank: int, world_size: int, module: str, name: str, given: dict[str, Any]) -> None:
    found = importlib.import_module(module)
    with pytest.MonkeyPatch.context() as patch:
        for each in (found, units):
            patch.setattr(each, "sw", OnGpuByHand(gpus))
        getattr(found, f"test_{name}").body(rank, world_size, **given)


@pytest.mark.parametrize(
    ("change", "clearings"),
    [(each, (True, False) if LONG else (at % 2 == 0,)) for at, each in enumerate(gradients.CHANGES)],
)
def test_changes_between_backward_and_step_are_stepped_on(
    teams: Any, world_size: int, paths: dict[str, str], change: Any, clearings: tuple[bool, ...]
) -> None:
    run(teams, world_size, paths, changed_gradients, change.__name__, clearings)


def changed_gradients(
    gpus: SimulatedGpus, rank: int, world_size: int, change: str, clearings: tuple[bool, ...]
) -> None:
    for to_none in clearings:
        arguments = rank, getattr(gradients, change), to_none
        with gpus.torch_on_cpu():
            expected = gradients.changing(*gradients.wrap("0", Heads), *arguments)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gradients, "sw", OnGpuByHand(gpus))
            for stage in in_turn(("0", "1"), len(change)):
                found = gradients.changing(*gradients.wrap(stage, Heads), *arguments)
                assert all(bits_equal(a, b) for a, b in zip(found, expected, strict=True)), stage
    gather(None)


@at_least_two
def test_what_one_rank_alone_set_is_told_to_all(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, set_on_one_rank, policy="on demand")


def set_on_one_rank(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    gpus.watch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "sw", OnGpuByHand(gpus))
        gradients.test_what_one_rank_alone_set_is_told_to_all.body(rank, world_size, stage="0")


@at_least_two
@pytest.mark.parametrize("given", [True, False])
def test_a_learning_rate_that_differs_is_named_a_step_later(
    teams: Any, world_size: int, paths: dict[str, str], given: bool
) -> None:
    run(teams, world_size, paths, different_rates, given, policy="on demand")


def different_rates(gpus: SimulatedGpus, rank: int, world_size: int, given: bool) -> None:
    gpus.watch()  # a rank that has seen it ends the communicator, while others wait for their GPUs
    torch.manual_seed(0)
    module = gpus.adopt_module(Mlp())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    wrapped, optimizer = sw.wrap(module, optimizer) if given else (sw.wrap(module), optimizer)
    with pytest.raises(sw.Error, match=r"ranks disagree about the optimizer of Mlp.*different hyperparameters"):
        for step in range(50):
            wrapped(batch(rank, 6, 7)).sum().backward()
            optimizer.param_groups[0]["lr"] = 0.1 if step < 3 else 0.1 / (rank + 1)
            optimizer.step()
    gather(None)
