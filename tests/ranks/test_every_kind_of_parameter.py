"""Law: for any parameters (shared, frozen, empty, of any dtype and layout) the averaged gradient has the oracle's bits
and the parameter's shape and strides.
"""

import copy
import warnings

import pytest
import torch
from harness import gather, on_every_rank, same_everywhere
from internals import views
from models import Mlp
from oracle.data_parallel import NaiveDataParallel
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
from torch import nn

both_caps = pytest.mark.parametrize("cap", [0.001, 25])


def steps(rank, wrapped, naive, backward, count=3):
    for step in range(count):
        compare_step(wrapped, naive, lambda model, step=step: backward(model, step))
        zero_grad(wrapped, naive, set_to_none=step != 1)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(13, 7), nn.Linear(7, 7), nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.mid(self.embed(tokens))))


@both_caps
@on_every_rank()
def test_a_tied_parameter_is_averaged_once(rank, world_size, cap):
    wrapped, naive = pair(Tied, bucket_cap_mb=cap)
    tokens = torch.arange(6) + rank
    steps(rank, wrapped, naive, lambda model, step: model((tokens + step) % 13).square().mean().backward())
    assert wrapped.module.head.weight is wrapped.module.embed.weight


def frozen_mlp():
    module = Mlp()
    module[0].weight.requires_grad_(False)
    module[4].bias.requires_grad_(False)
    return module


@both_caps
@on_every_rank()
def test_a_frozen_parameter_has_no_gradient(rank, world_size, cap):
    wrapped, naive = pair(frozen_mlp, bucket_cap_mb=cap)
    steps(rank, wrapped, naive, lambda model, step: model(batch(rank, 6, 7, step=step)).sum().backward())
    assert wrapped.module[0].weight.grad is None and wrapped.module[4].bias.grad is None


@both_caps
@on_every_rank()
def test_a_parameter_that_is_unfrozen_later_is_averaged_from_then_on(rank, world_size, cap):
    wrapped, naive = pair(frozen_mlp, bucket_cap_mb=cap)

    def backward(model, step):
        model(batch(rank, 6, 7, step=step)).square().sum().backward()

    steps(rank, wrapped, naive, backward)
    for module in (wrapped.module, naive.module):
        module[0].weight.requires_grad_(True)
        module[4].bias.requires_grad_(True)
    for name in ("0.weight", "4.bias"):
        naive.watch(name, naive.module.get_parameter(name))
    steps(rank, wrapped, naive, backward)
    compare_step(wrapped, naive, lambda model: backward(model, 9))
    assert wrapped.module[0].weight.grad is not None


@pytest.mark.skipif(PEER == "torch", reason="torch does not notice")
@on_every_rank(at_least=2)
def test_a_parameter_unfrozen_on_one_rank_alone_is_named_on_all(rank, world_size):
    wrapped = data_parallel(
        frozen_mlp(), bucket_cap_mb=0.001, process_group=torch.distributed.new_group(), timeout_s=20.0
    )
    wrapped(batch(rank, 6, 7)).square().sum().backward()
    wrapped.zero_grad()
    if rank == 1:
        wrapped.module[0].weight.requires_grad_(True)
    with pytest.raises(engine.Error) as raised:
        wrapped(batch(rank, 6, 7)).square().sum().backward()
    texts = gather(str(raised.value))
    assert texts == [texts[0]] * world_size and "'0.weight' unfrozen" in texts[0] and "rank 1" in texts[0], texts


@on_every_rank()
def test_a_parameter_that_is_frozen_later_keeps_no_gradient(rank, world_size):
    wrapped, naive = pair(Mlp)

    def backward(model, step):
        model(batch(rank, 6, 7, step=step)).square().sum().backward()

    compare_step(wrapped, naive, lambda model: backward(model, 0))
    zero_grad(wrapped, naive)
    for module in (wrapped.module, naive.module):
        module[2].weight.requires_grad_(False)
    steps(rank, wrapped, naive, backward)
    assert wrapped.module[2].weight.grad is None or not wrapped.module[2].weight.grad.any()
    for module in (wrapped.module, naive.module):
        module[2].weight.requires_grad_(True)
    steps(rank, wrapped, naive, backward)


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.linear = nn.Linear(7, 5)
        self.last = nn.Parameter(torch.empty(0))

    def forward(self, x):
        return self.linear(x).sum() + self.nothing.sum() + self.last.sum()


@both_caps
@on_every_rank()
def test_a_parameter_of_no_elements(rank, world_size, cap):
    wrapped, naive = pair(Empty, bucket_cap_mb=cap)
    steps(rank, wrapped, naive, lambda model, step: model(batch(rank, 6, 7, step=step)).backward())


class Scalars(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.shift = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x):
        return (x * self.scale).sum() + self.shift.square()


@on_every_rank()
def test_parameters_without_dimensions(rank, world_size):
    wrapped, naive = pair(Scalars)
    steps(rank, wrapped, naive, lambda model, step: model(batch(rank, 3, step=step)).backward())


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.narrow = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.complex128))

    def forward(self, x):
        return ((x @ self.narrow).to(torch.complex128) * self.wide).abs().square().sum()


@both_caps
@on_every_rank()
def test_complex_parameters(rank, world_size, cap):
    wrapped, naive = pair(Complex, bucket_cap_mb=cap)
    x = torch.complex(batch(rank, 4, 5), batch(rank, 4, 5, step=50))
    steps(rank, wrapped, naive, lambda model, step: model(x * (step + 1)).backward())


class Lazy(nn.Module):
    """autograd passes gradients whose conjugation or negation is only a flag, not done in memory."""

    def __init__(self):
        super().__init__()
        self.conjugated = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.negated = nn.Parameter(torch.randn(1))

    def forward(self, x):
        turned = torch.complex(torch.zeros(1), self.negated).conj()
        return self.conjugated.conj() * x + turned * x[:1]


@both_caps
@on_every_rank()
def test_gradients_that_are_conjugated_or_negated_by_a_flag(rank, world_size, cap):
    wrapped, naive = pair(Lazy, bucket_cap_mb=cap)
    x = torch.complex(batch(rank, 5), batch(rank, 5, step=50))
    flags = set()
    for name, parameter in naive.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: flags.add((name, p.grad.is_conj(), p.grad.is_neg()))
        )
    steps(rank, wrapped, naive, lambda model, step: model(x * (step + 1)).backward(torch.full((5,), 1 + 3j)))
    assert any(conj or neg for _, conj, neg in flags), flags


class Mixed(nn.Module):
    """One linear layer per dtype, interleaved so that neighbours have different dtypes."""

    DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32, torch.bfloat16)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7).to(dtype) for dtype in self.DTYPES)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float().square().sum()


@pytest.mark.parametrize("transport", TRANSPORTS)
@both_caps
@on_every_rank()
def test_parameters_of_several_dtypes(rank, world_size, cap, transport):
    wrapped, naive = pair(Mixed, bucket_cap_mb=cap, transport=transport)
    steps(rank, wrapped, naive, lambda model, step: model(batch(rank, 6, 7, step=step)).backward())


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@on_every_rank()
def test_a_module_of_one_other_dtype(rank, world_size, dtype):
    dtype = getattr(torch, dtype)
    wrapped, naive = pair(lambda: Mlp().to(dtype), bucket_cap_mb=0.001)
    steps(rank, wrapped, naive, lambda m, step: m(batch(rank, 6, 7, step=step, dtype=dtype)).square().sum().backward())


@on_every_rank()
def test_autocast_around_the_forward(rank, world_size):
    wrapped, naive = pair(Mlp)

    def backward(model, step):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(batch(rank, 6, 7, step=step)).square().mean()
        output.backward()

    steps(rank, wrapped, naive, backward)


def conv():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 2)).to(memory_format=torch.channels_last)


@both_caps
@on_every_rank()
def test_channels_last_parameters_keep_their_strides(rank, world_size, cap):
    wrapped, naive = pair(conv, bucket_cap_mb=cap)

    def backward(model, step):
        x = batch(rank, 2, 3, 8, 8, step=step).to(memory_format=torch.channels_last)
        model(x).square().mean().backward()

    steps(rank, wrapped, naive, backward)
    backward(wrapped, 0)
    for parameter in wrapped.module.parameters():
        assert parameter.grad.stride() == parameter.stride()


class Strided(nn.Module):
    def __init__(self):
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(5, 7).t())
        self.permuted = nn.Parameter(torch.randn(2, 3, 4).permute(2, 0, 1))
        self.gaps = nn.Parameter(torch.randn(7, 10)[:, ::2])

    def forward(self, x):
        return (x @ self.transposed).square().sum() + self.permuted.pow(3).sum() * x.sum() + (x @ self.gaps).sum()


@both_caps
@on_every_rank()
def test_parameters_of_any_strides(rank, world_size, cap):
    wrapped, naive = pair(Strided, bucket_cap_mb=cap)
    steps(rank, wrapped, naive, lambda model, step: model(batch(rank, 6, 7, step=step)).backward())


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(17, 5, sparse=True), nn.Linear(5, 3)

    def forward(self, tokens):
        return self.head(self.embed(tokens)).square().sum()


@on_every_rank()
def test_a_sparse_gradient_is_made_dense_with_one_warning(rank, world_size):
    views._warned_of_sparse = False  # the warning comes once in a process, and this one may have run other tests
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            wrapped, naive = pair(Sparse, **({} if PEER == "torch" else {"zero": 1}))
            for step in range(3):
                tokens = torch.tensor([rank, 3, 3, 16, step])
                compare_step(wrapped, naive, lambda model, tokens=tokens: model(tokens).backward())
                if step != 1:
                    zero_grad(wrapped, naive)
    assert len([warning for warning in caught if "sparse gradient" in str(warning.message)]) == 1


@pytest.mark.skipif(PEER == "torch", reason="our sentence")
@on_every_rank()
def test_a_frozen_parameter_of_a_dtype_that_is_not_moved_may_stay_out(rank, world_size):
    def build():
        module = Mlp()
        module.quantised = nn.Parameter(torch.zeros(5, 3, dtype=torch.uint16), requires_grad=False)
        return module

    torch.manual_seed(0)
    with pytest.raises(ValueError, match="'quantised': dtype uint16 .* ignored_params"):
        data_parallel(build())
    wrapped = data_parallel(build(), ignored_params=["quantised"])
    wrapped(batch(rank, 6, 7)).square().mean().backward()
    assert same_everywhere([p.grad for p in wrapped.parameters() if p.requires_grad])


@on_every_rank()
def test_ignored_parameters_stay_local(rank, world_size):
    torch.manual_seed(rank)
    module = Mlp()
    own = module[2].weight.detach().clone()
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["2.weight"])
    wrapped = data_parallel(module)
    assert torch.equal(wrapped.module[2].weight, own)
    wrapped(batch(rank, 6, 7)).square().sum().backward()
    everyone = gather({name: parameter.grad.tolist() for name, parameter in module.named_parameters()})
    for name in everyone[0]:
        if name != "2.weight" and world_size > 1:
            assert all(theirs[name] == everyone[0][name] for theirs in everyone), name
    if world_size > 1:
        assert everyone[0]["2.weight"] != everyone[1]["2.weight"]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@on_every_rank()
def test_parameters_keep_their_identity_and_an_optimizer_made_before_stays_right(rank, world_size, optimizer):
    torch.manual_seed(0)
    module = Mlp()
    before = [(id(parameter), parameter.data_ptr()) for parameter in module.parameters()]
    ours = getattr(torch.optim, optimizer)(module.parameters(), lr=0.1)
    naive = NaiveDataParallel(copy.deepcopy(module))
    wrapped = data_parallel(module)
    assert before == [(id(parameter), parameter.data_ptr()) for parameter in module.parameters()]
    theirs = getattr(torch.optim, optimizer)(naive.module.parameters(), lr=0.1)
    for step in range(3):
        x = batch(rank, 6, 7, step=step)
        compare_step(wrapped, naive, lambda model, x=x: model(x).square().sum().backward())
        ours.step()
        theirs.step()
        assert_same_parameters(wrapped, naive)
        zero_grad(wrapped, naive)
    assert_same_gradients(wrapped, naive)
