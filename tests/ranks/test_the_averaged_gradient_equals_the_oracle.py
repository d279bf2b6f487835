"""Law: after a synchronised backward `.grad` has the oracle's bits on every rank, for any bucket cap, transport,
instruction set and keyword arguments. So training has the bits of the naive loop.
"""

import pytest
import torch
from harness import on_every_rank, same_everywhere
from models import Mlp
from peer import (
    PEER,
    TRANSPORTS,
    assert_same_gradients,
    assert_same_parameters,
    batch,
    compare_step,
    data_parallel,
    engine,
    pair,
    zero_grad,
)

CAPS = (0.001, 0.05, 25)


def train(rank, wrapped, naive, steps=4, set_to_none=True):
    """Train momentum SGD in both worlds, and compare every step."""
    optimizers = [
        torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, foreach=False)
        for module in (wrapped.module, naive.module)
    ]
    for step in range(steps):
        x = batch(rank, 6, 7, step=step)
        compare_step(wrapped, naive, lambda model, x=x: model(x).square().mean().backward())
        for optimizer in optimizers:
            optimizer.step()
        assert_same_parameters(wrapped, naive)
        zero_grad(wrapped, naive, set_to_none)
    assert same_everywhere([*wrapped.module.parameters()])


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("cap", CAPS)
@on_every_rank()
def test_whatever_the_bucket_cap_and_the_transport(rank, world_size, cap, transport):
    wrapped, naive = pair(Mlp, bucket_cap_mb=cap, transport=transport)
    train(rank, wrapped, naive)


@pytest.mark.skipif(PEER == "torch", reason="ours")
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_every_rank()
def test_a_sum_that_is_not_divided(rank, world_size, transport):
    wrapped, naive = pair(Mlp, bucket_cap_mb=0.001, transport=transport, reduce="sum")
    train(rank, wrapped, naive)


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_every_rank()
def test_with_gradients_of_several_megabytes(rank, world_size, transport):
    wrapped, naive = pair(
        lambda: torch.nn.Sequential(torch.nn.Linear(7, 1031), torch.nn.Linear(1031, 611), torch.nn.Linear(611, 5)),
        bucket_cap_mb=1,
        transport=transport,
    )
    train(rank, wrapped, naive, steps=2)


@pytest.mark.skipif(engine is None, reason="the engine itself")
@on_every_rank()
def test_whatever_the_instruction_set(rank, world_size):
    try:
        for name in engine.instruction_sets():
            engine.force_instruction_set(name)
            wrapped, naive = pair(Mlp, bucket_cap_mb=0.001)
            train(rank, wrapped, naive, steps=2)
    finally:
        engine.force_instruction_set(None)


@pytest.mark.parametrize("threads", [2, 4])
@on_every_rank()
def test_whatever_the_number_of_threads(rank, world_size, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        wrapped, naive = pair(
            lambda: torch.nn.Sequential(torch.nn.Linear(7, 1031), torch.nn.Tanh(), torch.nn.Linear(1031, 611)),
            bucket_cap_mb=1,
        )
        train(rank, wrapped, naive, steps=3)
    finally:
        torch.set_num_threads(before)


@on_every_rank()
def test_with_gradients_that_are_zeroed_and_not_dropped(rank, world_size):
    wrapped, naive = pair(Mlp, bucket_cap_mb=0.001)
    train(rank, wrapped, naive, set_to_none=False)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"broadcast_buffers": False},
        {"init_sync": False},
        {"device_ids": None, "output_device": None, "dim": 0, "check_reduction": False},
    ],
    ids=lambda options: next(iter(options)),
)
@on_every_rank()
def test_whatever_keyword_of_torch_is_given(rank, world_size, options):
    wrapped, naive = pair(Mlp, **options)
    train(rank, wrapped, naive, steps=3)


@on_every_rank()
def test_with_a_one_dimensional_device_mesh(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh

    wrapped, naive = pair(Mlp, device_mesh=init_device_mesh("cpu", (world_size,)))
    train(rank, wrapped, naive, steps=2)


@on_every_rank()
def test_an_unknown_keyword_is_refused_by_name(rank, world_size):
    torch.manual_seed(0)
    with pytest.raises(TypeError, match="bucket_cap_gb"):
        pair(Mlp, bucket_cap_gb=1)


@pytest.mark.skipif(PEER == "torch", reason="our sentences")
@on_every_rank()
def test_what_a_keyword_of_torch_asks_for_in_vain_is_said_with_what_to_use(rank, world_size):
    """Each is refused before any collective, so a rank that catches the error can continue. Arguments that have no
    effect here are accepted.
    """
    for options, sentence in (
        ({"mixed_precision": object()}, "precision="),
        ({"bucket_cap_mb_list": [1, 0]}, "bucket_cap_mb_list must be"),
        ({"delay_all_reduce_named_params": []}, "leave both None"),
        ({"param_to_hook_all_reduce": torch.zeros(1)}, "leave both None"),
        ({"dim": 1}, "dim must be 0, got 1"),
        ({"device_ids": [0]}, "device_ids=.0. .* cpu"),
        ({"output_device": 0}, "output_device=0 .* cpu"),
        ({"zero": 4}, "zero"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"device_mesh": 3}, "device_mesh must be a DeviceMesh, got 3"),
        ({"ignored_params": ["0.wieght"]}, "no parameter or buffer '0.wieght': did you mean '0.weight'"),
    ):
        with pytest.raises((NotImplementedError, TypeError, ValueError), match=sentence):
            data_parallel(Mlp(), **options)
    with pytest.warns(FutureWarning, match="check_reduction"):
        wrapped, naive = pair(Mlp, check_reduction=True, skip_all_reduce_unused_params=True, batched_grad_copy=True)
    train(rank, wrapped, naive, steps=2)
    for refused in (
        lambda: wrapped._update_process_group(None),
        lambda: wrapped._set_sparse_metadata({}),
        lambda: wrapped._register_fused_optim(torch.optim.SGD),
    ):
        with pytest.raises(NotImplementedError):
            refused()


@on_every_rank()
def test_a_module_without_a_parameter_that_needs_a_gradient_is_refused(rank, world_size):
    with pytest.raises((RuntimeError, ValueError)):
        pair(torch.nn.Tanh)


@on_every_rank()
def test_a_nan_and_an_infinity_travel_to_every_rank(rank, world_size):
    wrapped, naive = pair(Mlp)
    x = batch(rank, 6, 7)
    if rank == world_size - 1:
        x[0, 0] = float("nan")
    compare_step(wrapped, naive, lambda model: model(x).square().mean().backward())
    assert wrapped.module[0].weight.grad.isnan().any()


@on_every_rank()
def test_the_wrapper_is_torchs_class(rank, world_size):
    wrapped, _ = pair(Mlp)
    assert isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
    assert isinstance(wrapped.module, Mlp)


@on_every_rank()
def test_a_forward_without_gradients_or_in_eval_mode_opens_no_round(rank, world_size):
    wrapped, naive = pair(Mlp)
    for step in range(3):
        if rank == 0:  # alone: it may wait for nobody
            wrapped.eval()
            with torch.no_grad():
                wrapped(batch(rank, 6, 7))
            wrapped.train()
        compare_step(wrapped, naive, lambda model, step=step: model(batch(rank, 6, 7, step=step)).sum().backward())
        zero_grad(wrapped, naive)


@pytest.mark.skipif(PEER == "torch", reason="sw.wrap")
@on_every_rank()
def test_wrap_returns_the_same_and_takes_an_optimizer(rank, world_size):
    import shardwright as sw

    torch.manual_seed(0)
    module = Mlp()
    given = torch.optim.SGD(module.parameters(), lr=0.1)
    wrapped, optimizer = sw.wrap(module, given, zero=0)
    assert isinstance(wrapped, sw.DistributedDataParallel)
    wrapped(batch(rank, 6, 7)).square().mean().backward()
    optimizer.step()
    assert same_everywhere([*module.parameters()])
    alone = sw.wrap(Mlp())
    assert isinstance(alone, sw.DistributedDataParallel)
    with pytest.raises(TypeError, match="bucket_cap_mb"):
        sw.wrap(Mlp(), bucket_cap=3)


@on_every_rank()
def test_a_hundred_parameters_of_one_to_a_hundred_elements(rank, world_size):
    class Many(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.all = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(n)) for n in range(1, 101))

        def forward(self, x):
            return sum((parameter * x).sum() for parameter in self.all)

    for cap in (0.001, 25):
        wrapped, naive = pair(Many, bucket_cap_mb=cap)
        for step in range(2):
            compare_step(wrapped, naive, lambda model, step=step: model(batch(rank, 1, step=step)).backward())
            assert_same_gradients(wrapped, naive)
