"""Law: an optimizer without masters steps low-precision parameters through float32 masters. The bits are those of a
naive loop that keeps a float32 copy, steps the user's optimizer on it and rounds: at every stage, for every elementwise
class, on slices and on whole tensors. States and checkpoints carry the masters as `master`."""

import copy
import os
import pathlib

import pytest
import torch
from harness import LONG, gather, in_turn, on_every_rank
from models import Mlp
from oracle.data_parallel import NaiveDataParallel
from oracle.fold import bits_equal
from peer import PEER, batch, sw
from torch import nn

if PEER != "torch":
    from internals import master_weights

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD plain": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-3),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}
STAGES = [
    {"zero": 0},
    {"zero": 1, "bucket_cap_mb": 0.001},
    {"zero": 2},
    {"zero": 3},
    {"zero": 3, "share_parameters": False, "units": nn.Linear},
]


class Low(nn.Module):
    """A bfloat16 model with a float32 last layer, and with a transposed and an empty parameter."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.body = Mlp().to(dtype)
        self.turned = nn.Parameter(torch.randn(5, 9).t().to(dtype))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=dtype))
        self.head = nn.Linear(9, 3)

    def forward(self, x):
        x = self.body(x.to(self.turned.dtype)) @ self.turned.t() + self.empty.sum()
        return self.head(x.float())


def loss_of(model, rank, step):
    return model(batch(rank, 6, 7, step=step)).square().mean()


def train(model, optimizer, rank, steps=range(4)):
    losses = []
    for step in steps:
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def build(make, seed=0, dtype=torch.bfloat16):
    torch.manual_seed(seed)
    module = Low(dtype)
    return module, make(module.parameters())


class ByHand:
    """A naive form: the user's optimizer over float32 copies, which are rounded into the parameters."""

    def __init__(self, module, make):
        self.parameters = list(module.parameters())
        self.masters = [p.detach().float().requires_grad_() for p in self.parameters]
        self.inner = make(self.masters)

    def step(self):
        for p, master in zip(self.parameters, self.masters):
            if p.grad is not None:  # torch's fused SGD assumes the parameter's strides
                master.grad = torch.empty_like(master).copy_(p.grad)
        self.inner.step()
        with torch.no_grad():
            for p, master in zip(self.parameters, self.masters):
                p.copy_(master)

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None
        self.inner.zero_grad()


def whole(model, optimizer):
    """Return (parameters, state by position). Collective."""
    state = copy.deepcopy(sw.full_optimizer_state_dict(model, optimizer))
    with sw.full_parameters(model):
        parameters = [p.detach().clone() for p in sw.unwrap(model).parameters()]
    gather(None)
    return parameters, state


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_every_rank(at_least=3)
def test_every_elementwise_optimizer_steps_on_masters(rank, world_size, name):
    torch.manual_seed(0)
    naive = NaiveDataParallel(Low())
    hand = ByHand(naive.module, OPTIMIZERS[name])
    losses = []
    for step in range(4):
        loss = loss_of(naive, rank, step)
        loss.backward()
        naive.synchronise()
        hand.step()
        hand.zero_grad()
        losses.append(loss.item())
    for options in in_turn(STAGES, list(OPTIMIZERS).index(name), of=3):
        model, optimizer = sw.wrap(*build(OPTIMIZERS[name]), **options)
        assert train(model, optimizer, rank) == losses, options
        parameters, state = whole(model, optimizer)
        for position, (mine, p, master) in enumerate(zip(parameters, hand.parameters, hand.masters, strict=True)):
            assert bits_equal(mine, p.detach()), (options, position)
            entry, expected = state["state"].get(position, {}), hand.inner.state.get(master, {})
            assert ("master" in entry) == (p.dtype == torch.bfloat16), (options, position)
            if "master" in entry:
                assert bits_equal(entry["master"], master.detach()), (options, position)
            for key, value in expected.items():
                same = bits_equal(entry[key], value) if isinstance(value, torch.Tensor) else entry[key] == value
                assert same, (options, position, key)


@on_every_rank()
def test_a_policy_may_deny_masters_and_sw_optim_decides_for_itself(rank, world_size):
    no = {"body": sw.Precision(param_dtype=torch.bfloat16, master=False)}
    for options in in_turn(STAGES, 0):
        model, optimizer = sw.wrap(*build(OPTIMIZERS["AdamW"]), precision=no, **options)
        train(model, optimizer, rank, range(2))
        state = whole(model, optimizer)[1]["state"]
        for position, (name, p) in enumerate(sw.unwrap(model).named_parameters()):
            entry = state[position]
            low = name.startswith("body.")
            assert ("master" in entry) == (not low and p.dtype == torch.bfloat16)
            assert entry["exp_avg"].dtype == (torch.bfloat16 if low else torch.float32)
        for master in (True, False):
            model, optimizer = sw.wrap(*build(lambda p: sw.optim.AdamW(p, lr=1e-3, master=master)), **options)  # noqa: B023
            train(model, optimizer, rank, range(2))
            assert ("master" in whole(model, optimizer)[1]["state"][0]) == master
    module = Mlp()
    made = torch.optim.AdamW(module.parameters())
    assert sw.wrap(module, made)[1] is made  # no low-precision parameter: unchanged


@on_every_rank()
def test_masters_follow_writes_and_widen_earlier_state(rank, world_size):
    found = []
    for options in (STAGES[0], *in_turn(STAGES[1:], 0)):
        module, optimizer = build(OPTIMIZERS["AdamW"])
        module(batch(0, 6, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()  # bfloat16 moments, no master
        model, optimizer = sw.wrap(module, optimizer, clip_grad_norm=1.0, **options)
        losses = train(model, optimizer, rank, range(2))
        with sw.full_parameters(model, writable=True), torch.no_grad():
            module.body[0].weight.mul_(2)
        losses += train(model, optimizer, rank, range(2, 4))
        parameters, state = whole(model, optimizer)
        low = [i for i, p in enumerate(parameters) if p.dtype == torch.bfloat16]
        assert all(torch.equal(state["state"][i]["master"].to(torch.bfloat16), parameters[i]) for i in low), (
            options,
            low,
        )
        entries = [entry for _, entry in sorted(state["state"].items())]
        found.append((losses, parameters, [entry[key] for entry in entries for key in sorted(entry)]))
    for other in found[1:]:
        assert other[0] == found[0][0]
        assert all(map(bits_equal, other[1] + other[2], found[0][1] + found[0][2]))


WRITERS = {**OPTIMIZERS, "sw.AdamW": lambda p: sw.optim.AdamW(p, lr=1e-3), "sw.SGD": lambda p: sw.optim.SGD(p, lr=0.1)}


def write(module):
    """Write some elements of each parameter through `.data`: a NaN's remedy, -0 for 0, others; and swap averages in and
    out."""
    for p in module.parameters():
        p.data[1::2] = 0.25
        p.data[:1] = -p.data[:1]
        p.data[2:3] = -0.0
        kept = p.data.clone()
        p.data.copy_(torch.full_like(kept, 7.0))
        p.data.copy_(kept)


@pytest.mark.parametrize("name", ["AdamW", "Adam amsgrad", "sw.AdamW", "sw.SGD"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@on_every_rank(at_least=3)
def test_a_step_begins_with_what_other_code_has_written(rank, world_size, name, dtype):
    """An element that other code wrote wins over its master; the master of any other keeps what was rounded off."""
    torch.manual_seed(0)
    naive = NaiveDataParallel(Low(dtype))
    hand = ByHand(naive.module, WRITERS[name])
    losses = []
    for step in range(4):
        loss = loss_of(naive, rank, step)
        loss.backward()
        if step == 2:
            write(naive.module)
            for p, master in zip(hand.parameters, hand.masters):
                rounded = master.detach().to(p.dtype)
                same = (rounded == p) & (torch.signbit(rounded) == torch.signbit(p))
                master.data.copy_(torch.where(same, master, p.float()))
        naive.synchronise()
        hand.step()
        hand.zero_grad()
        losses.append(loss.item())
    number = list(WRITERS).index(name)
    for written, options in [(False, each) for each in in_turn(STAGES[:3], number)] + [
        (True, each) for each in in_turn(STAGES, number, of=2)
    ]:
        model, optimizer = sw.wrap(*build(WRITERS[name], dtype=dtype), **options)
        found = train(model, optimizer, rank, range(2))
        loss = loss_of(model, rank, 2)
        loss.backward()
        if written:
            with sw.full_parameters(model, writable=True):
                write(sw.unwrap(model))
        else:
            gather(None)  # ranks share nothing that they write to, but a backward may still read
            write(sw.unwrap(model))
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), *train(model, optimizer, rank, range(3, 4))]
        assert found == losses, (options, written)
        for mine, p in zip(whole(model, optimizer)[0], hand.parameters, strict=True):
            assert bits_equal(mine, p.detach()), (options, written)


@pytest.mark.parametrize(("first", "second"), [(0, 2), (2, 0), (1, 4), (4, 1)])
@on_every_rank(at_least=3)
def test_whole_states_carry_masters_between_stages(rank, world_size, first, second):
    make = OPTIMIZERS["Adam amsgrad"]
    model, optimizer = sw.wrap(*build(make), **STAGES[0])
    losses = train(model, optimizer, rank)
    expected = whole(model, optimizer)
    model, optimizer = sw.wrap(*build(make), **STAGES[first])
    begun = train(model, optimizer, rank, range(2))
    if first:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    weights, state = sw.full_state_dict(model), whole(model, optimizer)[1]
    module, optimizer = build(make, seed=3)
    module.load_state_dict(weights)
    model, optimizer = sw.wrap(module, optimizer, **STAGES[second])
    sw.load_full_optimizer_state_dict(model, optimizer, state)
    assert begun + train(model, optimizer, rank, range(2, 4)) == losses
    found = whole(model, optimizer)
    assert all(map(bits_equal, found[0], expected[0]))
    for position, entry in expected[1]["state"].items():
        assert all(bits_equal(found[1]["state"][position][key], value) for key, value in entry.items()), position


@on_every_rank()
def test_a_wrapped_module_is_wrapped_again_at_another_stage(rank, world_size):
    make = OPTIMIZERS["AdamW"]
    model, optimizer = sw.wrap(*build(make), **STAGES[0])
    losses = train(model, optimizer, rank)
    for options in (STAGES[0], STAGES[2], STAGES[3]):
        module, optimizer = build(make)
        model, optimizer = sw.wrap(module, optimizer, **STAGES[0])
        begun = train(model, optimizer, rank, range(2))
        model, optimizer = sw.wrap(module, optimizer, **options)
        assert begun + train(model, optimizer, rank, range(2, 4)) == losses, options
        gather(None)


def saved_bytes(folder):
    files = [each for kind in ("model", "optimizer") for each in pathlib.Path(folder).rglob(f"{kind}*")]
    return {each.name: each.read_bytes() for each in files}


@pytest.mark.parametrize("partition", ["auto", "tensor"])
@on_every_rank(at_least=3)
def test_checkpoints_carry_masters(rank, world_size, partition):
    expected, forms = None, list(enumerate(STAGES))
    for number, options in forms if LONG else forms[partition == "tensor" :: 2]:
        folder = os.path.join(os.environ["SW_TEST_FOLDER"], f"masters-{partition}-{number}")
        model, optimizer = sw.wrap(*build(OPTIMIZERS["AdamW"]), partition=partition, **options)
        train(model, optimizer, rank, range(2))
        sw.save(folder, model, optimizer, step=2)
        losses = train(model, optimizer, rank, range(2, 4))
        model, optimizer = sw.wrap(*build(OPTIMIZERS["AdamW"], seed=1), partition=partition, **options)
        sw.load(folder, model, optimizer)
        assert train(model, optimizer, rank, range(2, 4)) == losses, options
        expected = expected or saved_bytes(folder)
        assert saved_bytes(folder) == expected, options
        assert any(b"master.body.0.weight" in data for data in expected.values())
        gather(None)


@on_every_rank()
def test_a_small_step_is_not_lost(rank, world_size):
    """Steps of less than half a unit of bfloat16 add up."""
    for options in in_turn(STAGES, 1):
        module = nn.Linear(64, 8, bias=False).to(torch.bfloat16)
        with torch.no_grad():
            module.weight.fill_(1.0)
        model, optimizer = sw.wrap(
            module, torch.optim.SGD(module.parameters(), lr=2.0**-11), **{**options, "bucket_cap_mb": 25}
        )
        for _ in range(16):
            model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with sw.full_parameters(model):
            assert torch.all(module.weight == 1.0 - 16 * 2.0**-11), options
        gather(None)


@on_every_rank()
def test_an_optimizer_at_stage_0_is_copied_and_a_failed_step_leaves_it_whole(rank, world_size):
    model, optimizer = sw.wrap(*build(OPTIMIZERS["AdamW"]), zero=0)
    train(model, optimizer, rank, range(1))
    twin = copy.deepcopy(optimizer)
    assert twin.param_groups[0] is twin._inner.param_groups[0] and twin.state is twin._inner.state
    members = list(optimizer.param_groups[0]["params"])

    def fail(*_):
        raise ArithmeticError("on purpose")

    handle = optimizer._inner.register_step_post_hook(fail)
    loss_of(model, rank, 1).backward()
    with pytest.raises(ArithmeticError):
        optimizer.step()
    handle.remove()
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], members, strict=True))
    assert set(map(id, optimizer.state)) <= set(map(id, members))
    for p in members:
        if "master" in optimizer.state.get(p, {}):
            assert torch.equal(optimizer.state[p]["master"].to(p.dtype), p)
    optimizer.zero_grad()
    train(model, optimizer, rank, range(2, 3))
    gather(None)


@on_every_rank()
def test_a_failed_allocation_before_a_step_loses_no_state(rank, world_size):
    """If the float32 gradient cannot be allocated, momentum and masters stay, and the next step uses them."""
    found = []
    for fails in (False, True):
        model, optimizer = sw.wrap(*build(OPTIMIZERS["AdamW"]), **STAGES[0])
        train(model, optimizer, rank, range(2))
        loss_of(model, rank, 2).backward()
        if fails:
            calls, take = [], master_weights._take

            def second_fails(inner, parameter, take=take, calls=calls):
                calls.append(parameter)
                if len(calls) == 2:
                    raise MemoryError("no more")
                return take(inner, parameter)

            master_weights._take = second_fails
            with pytest.raises(MemoryError):
                optimizer.step()
            master_weights._take = take
        optimizer.step()
        found.append(whole(model, optimizer))
    assert all(map(bits_equal, found[0][0], found[1][0]))
    for position, entry in found[0][1]["state"].items():
        for key, value in entry.items():
            assert bits_equal(found[1][1]["state"][position][key], value), (position, key)
