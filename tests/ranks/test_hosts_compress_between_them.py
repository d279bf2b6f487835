"""Law: over several hosts the fold inside a host is uncompressed, and every rank gets the compressor's mean of the
hosts' sums.

Ranks of one machine are told their host, as in test_hosts_fold_in_two_steps.py.
"""

import contextlib

import pytest
import shardwright as sw
import torch
import torch.distributed as dist
from harness import gather, in_turn, on_every_rank, same_everywhere
from internals import process_group
from models import Mlp
from oracle.compression import block_mean, half_mean
from oracle.fold import bits_equal
from peer import batch
from test_hybrid_sharding import mesh_of

MAPS = {"2+1": [0, 0, 1], "1+2": [0, 1, 1], "1+1+1": [0, 1, 2], "crosswise": [0, 1, 0]}
every_map = pytest.mark.parametrize("shape", MAPS)

COMPRESSORS = {
    "fp16": sw.Fp16(),
    "bf16": sw.Bf16(),
    "int8": sw.Int8(block=32),
    "int4": sw.Int4(block=32),
    "powersgd": sw.PowerSGD(rank=2, warmup_steps=1, min_compression_rate=1),
}


class Odd(torch.nn.Module):
    """Parameters of uneven rows; `left` takes part where it is asked for."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(7, 41), torch.nn.Linear(41, 5)
        self.left = torch.nn.Linear(7, 5)

    def forward(self, x, left):
        y = self.second(torch.tanh(self.first(x)))
        return y + self.left(x) if left else y


@contextlib.contextmanager
def on_hosts(host_of):
    group = dist.new_group(range(len(host_of)))
    process_group._forced_hosts = host_of
    try:
        yield group
    finally:
        process_group._forced_hosts = None


def hosts_of(shape, world_size):
    return [*MAPS[shape], *[max(MAPS[shape])] * (world_size - 3)]


def made(host_of, compress, module=Mlp, **options):
    torch.manual_seed(0)
    with on_hosts(host_of) as group:
        return sw.wrap(module(), process_group=group, compress=compress, timeout_s=20, **options)


def host_sums(contributions, host_of):
    """Return float32 sums of each host's ranks in order, times hosts over ranks."""
    share, sums = torch.tensor((max(host_of) + 1) / len(host_of)), {}
    for host, contribution in zip(host_of, contributions):
        sums[host] = sums[host] + contribution.float() if host in sums else contribution.float()
    return [sums[host] * share for host in sorted(sums)]


def backward(model, rank, step):
    model.zero_grad()
    model(batch(rank, 8, 7, step=step)).square().mean().backward()


def gradients_of_all(model, rank, step):
    """Return each rank's own gradients, by parameter."""
    model.zero_grad()
    with model.no_sync():
        backward(model, rank, step)
    own = gather([p.grad.clone() for p in model.module.parameters()])
    model.zero_grad()
    return [list(theirs) for theirs in zip(*own)]


@every_map
@pytest.mark.parametrize("name", ["fp16", "bf16", "int8"])
@on_every_rank(at_least=3)
def test_it_is_the_naive_compressor_of_the_hosts_sums(rank, world_size, shape, name):
    host_of = hosts_of(shape, world_size)
    model = made(host_of, COMPRESSORS[name])
    means = {
        "fp16": lambda sums: half_mean(sums, torch.float16),
        "bf16": lambda sums: half_mean(sums, torch.bfloat16),
        "int8": lambda sums: block_mean(sums, 32, 127),
    }
    for step in range(2):
        everyone = gradients_of_all(model, rank, step)
        backward(model, rank, step)
        for parameter, contributions in zip(model.module.parameters(), everyone):
            assert bits_equal(parameter.grad, means[name](host_sums(contributions, host_of))), (shape, step)


@pytest.mark.parametrize("transport", ["auto", "staged"])
@pytest.mark.parametrize("name", COMPRESSORS)
@on_every_rank(at_least=3)
def test_results_and_the_hosts_errors_add_up(rank, world_size, name, transport):
    host_of = hosts_of("2+1", world_size)
    model = made(host_of, COMPRESSORS[name], bucket_cap_mb=0.001, transport=transport)
    parameters = dict(model.module.named_parameters())
    got = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in parameters.items()}
    wanted = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in parameters.items()}
    for step in range(6):
        everyone = gradients_of_all(model, rank, step)
        for (n, _), contributions in zip(parameters.items(), everyone):
            wanted[n] += sum(c.double() for c in contributions) / world_size
        with model.no_sync():
            backward(model, rank, step)
        for p in parameters.values():
            p.grad = None
        backward(model, rank, step)
        for n, p in parameters.items():
            got[n] += p.grad
        assert same_everywhere([p.grad for p in parameters.values()])
    state = model.compression_state
    owed = {}
    if state is not None:
        assert state.iter == 6
        entries = state.state_dict()["parameters"]
        owed = (
            state.errors()
            if name.startswith("powersgd")
            else {n: e["error"] for n, e in entries.items() if "error" in e}
        )
    firsts = {host_of.index(host) for host in host_of}
    assert bool(owed) == (rank in firsts and name not in ("fp16", "bf16", "int8"))
    everyones = [theirs for theirs in gather(owed) if theirs]
    for n, p in parameters.items():
        if everyones and n in everyones[0]:
            mean = sum(theirs[n].double().view_as(p) for theirs in everyones) / len(everyones)
            assert torch.allclose(got[n] + mean, wanted[n], atol=1e-5), n
        else:
            assert torch.allclose(got[n], wanted[n], atol=0.1 if name in ("bf16", "int8") else 1e-2), n


@every_map
@on_every_rank(at_least=3)
def test_bytes_are_those_between_hosts(rank, world_size, shape):
    host_of = hosts_of(shape, world_size)
    hosts, is_first = max(host_of) + 1, host_of.index(host_of[rank]) == rank
    model = made(host_of, sw.Bf16(), module=lambda: torch.nn.Linear(640, 63, bias=False))
    backward_once = lambda: model(torch.ones(2, 640)).sum().backward()  # noqa: E731
    backward_once()
    slice_numel = -(-(-(-640 * 63 // hosts)) // 64) * 64
    assert sw.stats(model)["models"][0]["step_wire_bytes"] == (2 * (hosts - 1) * slice_numel * 2 if is_first else 0)


@on_every_rank(at_least=3)
def test_low_precision_is_summed_in_float32_and_rounded_at_the_end(rank, world_size):
    host_of = hosts_of("2+1", world_size)
    model = made(host_of, sw.Bf16(), module=lambda: torch.nn.Linear(300, 5, dtype=torch.bfloat16))
    x = torch.randn(4, 300, generator=torch.Generator().manual_seed(rank)).bfloat16()
    with model.no_sync():
        model(x).float().square().sum().backward()
    contributions = gather(model.module.weight.grad.clone())
    model.zero_grad()
    model(x).float().square().sum().backward()
    expected = half_mean(host_sums(contributions, host_of), torch.bfloat16).bfloat16()
    assert bits_equal(model.module.weight.grad, expected)


@on_every_rank(at_least=3)
def test_complex_gradients_are_pairs(rank, world_size):
    class Turn(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.turn = torch.nn.Parameter(torch.randn(9, 30, dtype=torch.complex64))

        def forward(self, x):
            return (x @ self.turn).abs()

    host_of = hosts_of("2+1", world_size)
    model = made(host_of, sw.Bf16(), module=Turn)
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(rank)).to(torch.complex64)
    with model.no_sync():
        model(x).sum().backward()
    contributions = gather(torch.view_as_real(model.module.turn.grad.clone()))
    model.zero_grad()
    model(x).sum().backward()
    expected = half_mean(host_sums(contributions, host_of), torch.bfloat16)
    assert bits_equal(torch.view_as_real(model.module.turn.grad), expected)


@on_every_rank(at_least=3)
def test_unused_parameters_keep_their_bits_and_their_error(rank, world_size):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.idle = torch.nn.Linear(7, 7), torch.nn.Linear(7, 7)

        def forward(self, x, all_of_it):
            return self.idle(self.a(x)) if all_of_it else self.a(x)

    model = made(hosts_of("2+1", world_size), sw.Int4(block=32), module=Net)
    x = batch(rank, 8, 7)
    model(x, True).square().mean().backward()
    owed = {n: e["error"] for n, e in model.compression_state.state_dict()["parameters"].items()}
    accumulated = model.module.idle.weight.grad.clone()
    model.module.a.zero_grad()
    model(x, False).square().mean().backward()
    assert bits_equal(model.module.idle.weight.grad, accumulated)
    after = {n: e["error"] for n, e in model.compression_state.state_dict()["parameters"].items()}
    assert all(bits_equal(owed[n], after[n]) for n in owed if n.startswith("idle"))


@pytest.mark.parametrize("wire", ["bf16", "int8", "float32"])
@on_every_rank(at_least=3)
def test_local_steps_are_averaged_over_hosts(rank, world_size, wire):
    torch.manual_seed(0)
    host_of = hosts_of("2+1", world_size)
    module = Mlp()
    with on_hosts(host_of) as group:
        trainer = sw.DiLoCo(
            module, torch.optim.SGD(module.parameters(), lr=0.1), every=2, wire=wire, process_group=group, timeout_s=20
        )
    before = [p.detach().clone() for p in module.parameters()]
    for step in range(2):
        trainer.zero_grad()
        module(batch(rank, 8, 7, step=step)).square().mean().backward()
        if step == 1:
            trainer.inner_optimizer.step()  # what step() does first
            local = gather([p.detach().clone() for p in module.parameters()])
            trainer.inner_optimizer.param_groups[0]["lr"] = 0.0
        trainer.step()
    for place, (p, start) in enumerate(zip(module.parameters(), before)):
        change = sum((start - theirs[place]).double() for theirs in local) / world_size
        tolerance = {"bf16": 2**-7, "int8": 2**-6, "float32": 1e-5}[wire]
        assert torch.allclose(p.double(), start - 0.7 * 1.9 * change, atol=float(change.abs().max()) * 2 * tolerance)
        assert same_everywhere(p.tolist())


@on_every_rank(at_least=3)
def test_headroom_measures_between_hosts(rank, world_size):
    with on_hosts(hosts_of("2+1", world_size)) as group:
        model = sw.wrap(Mlp(), process_group=group, timeout_s=20)
    found = sw.headroom(model, lambda: backward(model, rank, 0), repeat=3, bandwidth=1e5)
    sizes = {candidate.name: candidate.wire_bytes for candidate in found.candidates}
    numel = sum(p.numel() for p in model.module.parameters())
    assert (
        sizes["Bf16()"] == 2 * numel and found.choice != "none"
    )  # two hosts: a host's bytes, once there and once back
    assert len(set(gather((found.choice, found.step_s)))) == 1


@on_every_rank(at_least=3)
def test_the_state_of_another_model_is_refused(rank, world_size):
    host_of = hosts_of("2+1", world_size)
    model = made(host_of, sw.Int4(block=32))
    state = model.compression_state.state_dict()
    with pytest.raises(sw.Error, match="the loaded state belongs to another model"):
        model.compression_state.load_state_dict({**state, "parameters": {"other.weight": {"error": torch.zeros(3)}}})
    backward(model, rank, 0)
    assert same_everywhere([p.grad for p in model.module.parameters()])


@on_every_rank(at_least=3)
def test_ranks_may_be_in_different_numbers_of_groups(rank, world_size):
    dist.new_group([0, 1])  # from here on torch's own names of groups would differ
    model = made(hosts_of("2+1", world_size), sw.Fp16())
    backward(model, rank, 0)
    assert same_everywhere([p.grad for p in model.module.parameters()])


@pytest.mark.parametrize("name", ["bf16", "int8", "powersgd"])
@on_every_rank(at_least=3)
def test_every_stage_trains_with_the_same_bits(rank, world_size, name):
    after, stages = {}, in_turn((1, 2, 3), int(name != "bf16"))
    for zero in (0, *stages):
        torch.manual_seed(0)
        module = Mlp()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        with on_hosts(hosts_of("2+1", world_size)) as group:
            options = {"process_group": group, "timeout_s": 20, "zero": zero}
            model, optimizer = sw.wrap(module, optimizer, compress=COMPRESSORS[name], **options)
            for step in range(4):
                model(batch(rank, 8, 7, step=step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            after[zero] = sw.full_state_dict(model)
    for zero in stages:
        for key, value in after[0].items():
            assert bits_equal(after[zero][key], value), (zero, key)
    assert same_everywhere([*after[0].values()])


@pytest.mark.parametrize("shape", ["2+1", "crosswise"])
@pytest.mark.parametrize("name", COMPRESSORS)
@on_every_rank(at_least=3)
def test_rows_of_fully_shard_have_the_bits_and_the_bytes_of_zero_0(rank, world_size, name, shape):
    found, sent = [], []
    for by_rows in (False, True):
        torch.manual_seed(0)
        module = Odd()
        with on_hosts(hosts_of(shape, world_size)) as group:
            options = {"process_group": group, "timeout_s": 20, "compress": COMPRESSORS[name]}
            if by_rows:
                for each in (module.first, module.second):
                    sw.fully_shard(each, **options)
                model = sw.fully_shard(module, **options)
                optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            else:
                optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
                model, optimizer = sw.wrap(module, optimizer, zero=0, **options)
            for step in range(6):
                model(batch(rank, 8, 7, step=step), left=step == rank or step > 3).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(sw.full_state_dict(model))
            sent.append(sw.stats(model)["models"][0]["wire_bytes"])
    for key, value in found[0].items():
        assert bits_equal(found[1][key], value), key
    assert same_everywhere([*found[1].values()])
    assert sent[0] == 0 or 0.8 < sent[1] / sent[0] < 1.25, sent  # units are other buckets


def crosses(rank, world_size, host_of, rows):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    crossed = []
    for dtype in (None, torch.bfloat16):
        torch.manual_seed(0)
        module = torch.nn.Linear(512, 96)
        process_group._forced_hosts = host_of
        mesh = None if rows is None else mesh_of(rows)
        sw.fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        module(batch(rank, 8, 512)).sum().backward()
        module.zero_grad()
        comm = module._shardwright_mark.engine.replica.group.comm
        output = module(batch(rank, 8, 512)).sum()
        gather(None)
        before = comm.stats()["wire_bytes_sent"] if host_of.index(host_of[rank]) == rank else 0
        output.backward()
        gather(None)
        sent = comm.stats()["wire_bytes_sent"] - before if host_of.index(host_of[rank]) == rank else 0
        crossed.append(sum(gather(sent)))
    numel = 512 * 96
    if rows is None:  # slices enter one host each; a compressor's mean enters all, in half the bytes
        assert 4 * numel < crossed[0] < 4.2 * numel and 4 * numel < crossed[1] < 4.2 * numel, crossed
    else:
        assert 8 * numel < crossed[0] < 8.2 * numel and 4 * numel < crossed[1] < 4.2 * numel, crossed


@pytest.mark.parametrize(("host_of", "rows"), [([0, 0, 1], None), ([0, 0, 1, 1], [[0, 1], [2, 3]])])
def test_a_reduce_dtype_travels_between_hosts(fresh_ranks, host_of, rows):
    with fresh_ranks(len(host_of)) as team:
        team.run(crosses, host_of=host_of, rows=rows)
