"""Law: for any arrangement of forwards and backwards, each synchronised backward is one round of the naive law."""

import dataclasses
import logging
import time

import internals
import pytest
import shardwright as sw
import torch
from harness import Stopwatch, gather, on_every_rank, same_everywhere
from models import Fragile, Heads, Mlp
from peer import (
    PEER,
    assert_same_gradients,
    batch,
    compare_step,
    data_parallel,
    engine,
    pair,
    zero_grad,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

both_caps = pytest.mark.parametrize("cap", [0.001, 25])
both_kinds = pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])


def loss(model, rank, step):
    return model(batch(rank, 6, 7, step=step)).square().mean()


@both_caps
@on_every_rank()
def test_several_forwards_before_one_backward(rank, world_size, cap):
    wrapped, naive = pair(Mlp, bucket_cap_mb=cap)
    for step in range(3):
        compare_step(
            wrapped, naive, lambda model, s=step: sum(loss(model, rank, 3 * s + n) for n in range(3)).backward()
        )
        zero_grad(wrapped, naive)


@on_every_rank()
def test_several_forwards_and_then_a_backward_for_each(rank, world_size):
    wrapped, naive = pair(Mlp, bucket_cap_mb=0.001)
    for step in range(2):
        ours = [loss(wrapped, rank, 3 * step + n) for n in range(3)]
        theirs = [loss(naive, rank, 3 * step + n) for n in range(3)]
        for our, their in zip(ours, theirs, strict=True):
            our.backward()
            their.backward()
            naive.synchronise()
            assert_same_gradients(wrapped, naive)
        zero_grad(wrapped, naive)


@on_every_rank()
def test_two_losses_of_one_forward(rank, world_size):
    wrapped, naive = pair(Mlp)
    for step in range(3):
        outputs = [model(batch(rank, 6, 7, step=step)) for model in (wrapped, naive)]
        for retain in (True, False):
            for output in outputs:
                (output.square().mean() if retain else output.abs().sum()).backward(retain_graph=retain)
            naive.synchronise()
            assert_same_gradients(wrapped, naive)
        zero_grad(wrapped, naive)


@on_every_rank()
def test_a_graph_that_is_retained_and_walked_twice(rank, world_size):
    wrapped, naive = pair(Mlp, bucket_cap_mb=0.001)
    for step in range(2):
        ours, theirs = loss(wrapped, rank, step), loss(naive, rank, step)
        for retain in (True, True, False):
            ours.backward(retain_graph=retain)
            theirs.backward(retain_graph=retain)
            naive.synchronise()
            assert_same_gradients(wrapped, naive)


@on_every_rank()
def test_a_backward_through_some_outputs_only(rank, world_size):
    wrapped, naive = pair(Heads, find_unused_parameters=engine is None)

    def backward(model):
        first = model(batch(rank, 6, 7), "left")
        model(batch(rank, 6, 7), "right")  # never walked
        first.backward()

    for _ in range(2):
        compare_step(wrapped, naive, backward)


@on_every_rank(deadline_s=10)
def test_gradients_asked_with_autograd_grad_synchronise_nothing(rank, world_size):
    wrapped, naive = pair(Mlp)
    x = batch(rank, 6, 7).requires_grad_()
    if rank == 0:
        (slope,) = torch.autograd.grad(wrapped(x).sum(), x)
        assert slope.shape == x.shape
    compare_step(wrapped, naive, lambda model: loss(model, rank, 0).backward())


@on_every_rank()
def test_gradients_set_by_hand_cost_no_round_where_the_forward_is_not_synchronised(rank, world_size):
    wrapped, _ = pair(Mlp)
    parameters = list(wrapped.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(2):
        with wrapped.no_sync():
            value = loss(wrapped, rank, step)
        for parameter, gradient in zip(parameters, torch.autograd.grad(value, parameters)):
            parameter.grad = gradient
        optimizer.step()
    assert internals.reducer(wrapped).stats()["rounds"] == 0


@on_every_rank()
def test_a_gradient_penalty_with_create_graph(rank, world_size):
    wrapped, naive = pair(Mlp, bucket_cap_mb=0.001)

    def backward(model):
        x = batch(rank, 6, 7).requires_grad_()
        output = model(x).square().mean()
        (slope,) = torch.autograd.grad(output, x, create_graph=True)
        (output + slope.square().sum()).backward()

    for _ in range(2):
        compare_step(wrapped, naive, backward)


# ---------------------------------------------------------------- activation checkpointing


class Segments(nn.Module):
    """Layers that run under checkpoint in the order of `plan`. Each letter is a layer; an upper-case one is outside any
    segment.
    """

    def __init__(self, plan: str, reentrant: bool) -> None:
        super().__init__()
        self.plan, self.reentrant = plan, reentrant
        self.layers = nn.ModuleDict({name: nn.Linear(7, 7) for name in sorted(set(plan.lower()))})

    def forward(self, x):
        for name in self.plan:
            layer = self.layers[name.lower()]
            if name.isupper():
                x = torch.tanh(layer(x))
            else:
                x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=self.reentrant)
        return x


@both_kinds
@both_caps
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("AbcD", id="some layers"),
        pytest.param("abc", id="all parameters inside segments"),
        pytest.param("aba", id="a layer shared by two segments"),
        pytest.param("AbaC", id="a layer plain and in a segment"),
        pytest.param("abA", id="a layer in a segment and then plain"),
    ],
)
@on_every_rank()
def test_activation_checkpointing(rank, world_size, plan, cap, reentrant):
    wrapped, naive = pair(lambda: Segments(plan, reentrant), bucket_cap_mb=cap)

    def backward(model, step):
        x = batch(rank, 6, 7, step=step).requires_grad_()
        model(x).square().mean().backward()

    for step in range(3):
        compare_step(wrapped, naive, lambda model, step=step: backward(model, step))
        zero_grad(wrapped, naive, set_to_none=step == 0)


@both_kinds
@on_every_rank()
def test_activation_checkpointing_with_accumulation(rank, world_size, reentrant):
    wrapped, naive = pair(lambda: Segments("aba", reentrant), bucket_cap_mb=0.001)
    for step in range(2):
        with wrapped.no_sync():
            for model in (wrapped, naive):
                model(batch(rank, 6, 7, step=step).requires_grad_()).square().mean().backward()
        compare_step(
            wrapped, naive, lambda model, s=step: model(batch(rank, 6, 7, step=s + 9).requires_grad_()).sum().backward()
        )
        zero_grad(wrapped, naive)


@pytest.mark.skipif(PEER == "torch", reason="torch refuses")
@both_caps
@on_every_rank()
def test_segments_that_begin_later_give_the_right_gradient_or_an_error_once(rank, world_size, cap):
    """A bucket may have left when a second gradient of a parameter arrives. The average is never wrong, and the error
    that names the parameter is raised once.
    """
    wrapped, naive = pair(lambda: Segments("ABAC", reentrant=True), bucket_cap_mb=cap)
    errors = 0
    for step in range(8):
        plan = "ABAC" if step < 3 else "abacA"
        for module in (wrapped.module, naive.module):
            module.plan = plan
        x = batch(rank, 6, 7, step=step).requires_grad_()
        zero_grad(wrapped, naive)
        try:
            wrapped(x).square().mean().backward()
        except engine.Error as error:
            errors += 1
            assert step == 3 or step == 4, step
            assert "layers.a" in str(error) or "rank" in str(error), error
            continue
        naive(x).square().mean().backward()
        naive.synchronise()
        assert_same_gradients(wrapped, naive)
    assert errors <= 2
    assert same_everywhere(errors)


# ---------------------------------------------------------------- exceptions


@both_caps
@on_every_rank()
def test_an_exception_in_the_backward_of_all_ranks_and_then_clean_steps(rank, world_size, cap):
    wrapped, naive = pair(Fragile, bucket_cap_mb=cap)
    compare_step(wrapped, naive, lambda model: loss(model, rank, 0).backward())
    for step in (1, 3):
        zero_grad(wrapped, naive)
        with pytest.raises(ArithmeticError, match="as the test asked"):
            wrapped(batch(rank, 6, 7), fail=True).sum().backward()
        zero_grad(wrapped, naive)
        naive.touched.clear()
        for further in (step, step + 1):
            compare_step(wrapped, naive, lambda model, further=further: loss(model, rank, further).backward())
            zero_grad(wrapped, naive)


@pytest.mark.skipif(PEER == "torch", reason="torch hangs")
@both_caps
@on_every_rank(at_least=2)
def test_an_exception_in_the_backward_of_one_rank_is_named_on_the_others(rank, world_size, cap):
    wrapped, naive = pair(Fragile, bucket_cap_mb=cap)
    compare_step(wrapped, naive, lambda model: loss(model, rank, 0).backward())
    zero_grad(wrapped, naive)
    start = Stopwatch()
    if rank == 1:
        with pytest.raises(ArithmeticError, match="as the test asked"):
            wrapped(batch(rank, 6, 7), fail=True).sum().backward()
    else:
        with pytest.raises(engine.Error) as raised:
            wrapped(batch(rank, 6, 7)).sum().backward()
            raise AssertionError("the backward ended as if nothing had happened")
        assert "rank 1" in str(raised.value)
    zero_grad(wrapped, naive)
    naive.touched.clear()
    compare_step(wrapped, naive, lambda model: loss(model, rank, 1).backward())
    assert start.seconds() < 4


@pytest.mark.skipif(PEER == "torch", reason="torch hangs")
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@on_every_rank(at_least=2)
def test_peers_of_a_rank_whose_backward_failed_need_not_wait_for_its_next_forward(rank, world_size, zero):
    wrapped, optimizer = sw.wrap(model := Fragile(), torch.optim.SGD(model.parameters(), lr=0.1), zero=zero)
    loss(wrapped, rank, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    failed = "as the test asked" if rank == 1 else "rank 1 .* left a backward unfinished"
    start = Stopwatch()
    with pytest.raises(ArithmeticError if rank == 1 else engine.Error, match=failed):
        wrapped(batch(rank, 6, 7), fail=rank == 1).sum().backward()
    assert start.seconds() < 2
    if rank == 1:
        time.sleep(2.5)  # idle: neither a forward, nor a step, nor an exit
    optimizer.zero_grad()
    loss(wrapped, rank, 1).backward()
    optimizer.step()
    assert same_everywhere([p.sum().item() for p in model.parameters()])


@on_every_rank()
def test_an_exception_in_the_forward_and_then_a_clean_step(rank, world_size):
    wrapped, naive = pair(Mlp)
    with pytest.raises(RuntimeError):
        wrapped(torch.ones(3, 99))
    compare_step(wrapped, naive, lambda model: loss(model, rank, 0).backward())


@on_every_rank(at_least=2)
def test_a_batch_left_out_after_an_exception_in_the_forward_is_warned_about(rank, world_size):
    """The rank that left a parameter out warns once; not if a step came between, nor for a forward that checkpoint
    stops early.
    """
    wrapped, _ = pair(Mlp)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("shardwright").addHandler(handler)
    try:
        for left_out in (False, True, True):
            if rank == 1:
                with pytest.raises(RuntimeError):
                    wrapped(torch.ones(3, 99))
                if not left_out:
                    optimizer.step()
            elif not left_out:
                loss(wrapped, rank, 0).backward()
                optimizer.step()
            out = checkpoint(wrapped, batch(rank, 6, 7), use_reentrant=False)
            out.sum().backward()
            optimizer.step()
    finally:
        logging.getLogger("shardwright").removeHandler(handler)
    texts = [record.getMessage() for record in records]
    ended = [text for text in texts if "ended in an exception" in text]
    assert len(ended) == (rank == 1), texts
    assert all("rank 1" in text and "forward of Mlp" in text for text in ended), texts
    counted = [text for text in texts if text not in ended]  # on all ranks: rank 1 ran a forward more
    (line,) = counted
    assert line.startswith("rank 1 ran 2 forwards of Mlp before its backward 1 of step 3, and rank 0 ran 1:"), texts


# ---------------------------------------------------------------- outputs


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    hidden: list
    name: str = "result"


class Structured(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(7, 9), nn.Linear(9, 5)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        logits = self.second(hidden)
        if self.kind == "dict":
            return {"logits": logits, "deep": [{"hidden": hidden}], "number": 3}
        if self.kind == "dataclass":
            return Result(logits, [hidden])
        return logits, (hidden, None)


def total(output):
    if isinstance(output, dict):
        return output["logits"].square().mean() + output["deep"][0]["hidden"].sum()
    if isinstance(output, Result):
        return output.logits.square().mean() + output.hidden[0].sum()
    return output[0].square().mean() + output[1][0].sum()


@both_caps
@pytest.mark.parametrize("kind", ["dict", "dataclass", "tuple"])
@on_every_rank()
def test_outputs_of_any_structure(rank, world_size, kind, cap):
    wrapped, naive = pair(lambda: Structured(kind), bucket_cap_mb=cap)
    for step in range(2):
        compare_step(wrapped, naive, lambda model, step=step: total(model(batch(rank, 6, 7, step=step))).backward())
    output = wrapped(batch(rank, 2, 7))
    assert type(output) is type(naive(batch(rank, 2, 7)))


# ---------------------------------------------------------------- two modules, two groups


@on_every_rank()
def test_two_wrapped_modules_in_turn_and_in_one_backward(rank, world_size):
    one, naive_one = pair(Mlp, bucket_cap_mb=0.001)
    two, naive_two = pair(lambda: nn.Linear(5, 4))
    for step in range(2):
        compare_step(one, naive_one, lambda model, step=step: loss(model, rank, step).backward())
        compare_step(two, naive_two, lambda model, step=step: model(batch(rank, 6, 5, step=step)).sum().backward())
        zero_grad(one, naive_one)
        zero_grad(two, naive_two)
        x = batch(rank, 6, 7, step=step)
        two(one(x)).square().mean().backward()
        naive_two(naive_one(x)).square().mean().backward()
        naive_two.synchronise()
        naive_one.synchronise()
        assert_same_gradients(one, naive_one)
        assert_same_gradients(two, naive_two)


@on_every_rank()
def test_a_subgroup_averages_over_its_own_ranks(rank, world_size):
    import torch.distributed as dist

    members = [[r for r in range(world_size) if r % 2 == parity] for parity in (0, 1)]
    groups = [dist.new_group(ranks) for ranks in members if ranks]
    group = groups[rank % 2]
    wrapped, naive = pair(Mlp, process_group=group)
    assert wrapped.process_group.size() == len(members[rank % 2])
    for step in range(2 + rank % 2):  # the groups go their own ways
        compare_step(wrapped, naive, lambda model, step=step: loss(model, rank, step).backward())
        zero_grad(wrapped, naive)
    gather(None)


def two_backwards_of_one_forward(wrapped, rank):
    first = loss(wrapped, rank, 0)
    first.backward(retain_graph=rank == 0)
    if rank == 0:
        first.backward()


def two_micro_batches(wrapped, rank):
    for step in range(2 if rank == 0 else 1):
        loss(wrapped, rank, step).backward()


def a_forward_more(wrapped, rank):
    loss(wrapped, rank, 0).backward()
    if rank == 0:
        loss(wrapped, rank, 1)  # with gradients, and never used: a step of nothing


@pytest.mark.skipif(PEER == "torch", reason="torch hangs, or pairs them in silence")
@pytest.mark.parametrize("step", [two_backwards_of_one_forward, two_micro_batches, a_forward_more])
@on_every_rank(at_least=2, spoils=True)
def test_different_numbers_of_backwards_are_named_on_every_rank(rank, world_size, step):
    wrapped, _ = pair(Mlp)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    start = Stopwatch()
    with pytest.raises(engine.Error) as raised:
        for _ in range(2):
            step(wrapped, rank)
            optimizer.step()
        raise AssertionError("nobody noticed")
    assert start.seconds() < 2
    texts = gather(str(raised.value))
    assert texts == [texts[0]] * world_size and "rank 0" in texts[0] and "backward" in texts[0]


@pytest.mark.skipif(PEER == "torch", reason="torch pairs them in silence")
@on_every_rank(at_least=2, spoils=True)
def test_two_models_alike_that_step_in_another_order_are_told_apart(rank, world_size):
    torch.manual_seed(0)
    models = [data_parallel(torch.nn.Linear(3, 3)) for _ in range(2)]
    for model in models if rank == 0 else models[::-1]:
        with pytest.raises(engine.Error, match="shared memory") as raised:
            model(torch.ones(2, 3)).sum().backward()
        break
    texts = gather(str(raised.value))
    assert texts == [texts[0]] * world_size


@pytest.mark.skipif(PEER == "torch", reason="ours")
@on_every_rank()
def test_a_step_inside_a_backward_is_refused(rank, world_size):
    wrapped, naive = pair(Mlp)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    handle = wrapped.module[0].bias.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(engine.Error, match="inside a backward"):
        loss(wrapped, rank, 0).backward()
    handle.remove()
    zero_grad(wrapped, naive)
    optimizer.zero_grad()
    compare_step(wrapped, naive, lambda model: loss(model, rank, 1).backward())


@pytest.mark.parametrize("cap", [0.001, 25])
@on_every_rank()
def test_hooks_of_the_user_run_before_the_gradient_is_averaged(rank, world_size, cap):
    """Hooks registered before and after wrapping run as under torch's wrapper, and may change or replace the gradient."""

    def double(parameter):
        parameter.grad.mul_(2)

    def replace(parameter):
        parameter.grad = parameter.grad * 3

    wrapped, naive = pair(Mlp, bucket_cap_mb=cap)
    for step in range(4):
        if step == 1:
            for module in (wrapped.module, naive.module):
                module[0].weight.register_post_accumulate_grad_hook(double)
                module[2].bias.register_post_accumulate_grad_hook(replace)
        compare_step(wrapped, naive, lambda model, step=step: loss(model, rank, step).backward())
        zero_grad(wrapped, naive)


@on_every_rank()
def test_a_gradient_that_somebody_kept_keeps_its_values(rank, world_size):
    """With torch's default gradient_as_bucket_view=False the gradients of two backwards are two tensors."""
    wrapped, naive = pair(Mlp, bucket_cap_mb=0.001)
    kept, expected = [], []
    for step in range(4):
        compare_step(wrapped, naive, lambda model, step=step: loss(model, rank, step).backward())
        kept.append([parameter.grad for parameter in wrapped.module.parameters()])
        expected.append([grad.clone() for grad in kept[-1]])
        zero_grad(wrapped, naive)
        for mine, theirs in zip(kept, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
