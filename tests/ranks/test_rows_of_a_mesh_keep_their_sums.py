"""Law: on a mesh (replicate, shard) micro-batches with set_requires_all_reduce(False) add up in each row, as in FSDP2.
The next mean of all ranks includes their sums: an owner adds its slice of its row's sum to its contribution, so the bits
are those of the fold of that. `.grad` stands meanwhile, and rows on different hosts exchange no gradient. Where the sums
cannot stay, the means add up.
"""

import copy

import pytest
import torch
from harness import gather, on_every_rank, same_everywhere
from internals import process_group
from oracle.fold import bits_equal, fold
from oracle.hosts import fold_over_hosts
from peer import PEER, batch, sw
from subjects_of_rows import rows_of
from test_hybrid_sharding import mesh_of
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
WIDTH, MICRO = 400, 3
#: the rows, and the host of each rank; whether the sums stay in the rows
CASES = {
    "one host": ([[0, 1], [2, 3]], None, True),
    "replicas only": ([[0], [1], [2]], None, True),
    "rows on hosts": ([[0, 1], [2, 3]], [0, 0, 1, 1], True),
    "two rows on a host": ([[0, 1], [2, 3], [4, 5]], [0, 0, 0, 0, 1, 1], True),
    "rows across hosts": ([[0, 1], [2, 3]], [0, 1, 0, 1], False),
    "a row across hosts, and one on a host": ([[0, 3], [1, 2]], [0, 0, 0, 1], False),
}


class Net(nn.Module):
    """Uneven rows; `left` takes part in the micro-batches that ask for it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, WIDTH + 1), nn.Linear(WIDTH + 1, 3)
        self.left = nn.Linear(5, 3)
        self.fails = self.by_keyword = False

    def forward(self, x, left=True):
        inner = self.run(self.first, x)
        if self.fails:
            inner.register_hook(lambda gradient: 1 / 0)
        y = self.run(self.second, torch.tanh(inner))
        return y + self.run(self.left, x) if left else y

    def run(self, layer, x):
        return layer(input=x) if self.by_keyword else layer(x)


def uses_left(rank, number):
    """Some ranks use it in the first micro-batch, none in the last."""
    return number == 0 and rank % 2 == 0


def own_gradients(module, rank, step, number):
    module.zero_grad()
    module(batch(rank, 6, 5, step=10 * step + number), uses_left(rank, number)).square().mean().backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def expected_mean(gradients, rows, hosts):
    """Return the mean of one chunk of a parameter: `gradients[micro][rank]` are its chunks, its owners those of `rows`."""

    def of_chunk(chunk, at):
        owners = [row[at] for row in rows]
        kept = {owner: None for owner in owners}
        for number, each in enumerate(gradients):
            terms = [rows_of(value, at, len(rows[0])).clone() for value in each]
            for owner in owners:
                if kept[owner] is not None:
                    terms[owner] = terms[owner] + kept[owner]
            if number < len(gradients) - 1:
                kept = {row[at]: fold([terms[r] for r in sorted(row)], "sum") for row in rows}
        return fold(terms, "mean") if hosts is None else fold_over_hosts(terms, hosts, "mean")

    return [of_chunk(chunk, at) for chunk, at in enumerate(range(len(rows[0])))]


def cut(module, mesh, **options):
    for each in (module.first, module.second):
        sw.fully_shard(each, mesh=mesh, **options)
    return sw.fully_shard(module, mesh=mesh, **options)


def adds_up(rank, world_size, rows, hosts, stays):
    process_group._forced_hosts = hosts
    mesh, plain = mesh_of(rows), Net()
    module = cut(copy.deepcopy(plain), mesh)
    at = next(row.index(rank) for row in rows if rank in row)
    sent = [0, 0]
    comm = None
    for step in range(3):
        gradients = []
        for number in range(MICRO):
            gradients.append(gather(own_gradients(plain, rank, step, number)))
            module.set_requires_all_reduce(number == MICRO - 1)
            before = comm.stats()["wire_bytes_sent"] if comm is not None else 0
            module(batch(rank, 6, 5, step=10 * step + number), uses_left(rank, number)).square().mean().backward()
            comm = module._shardwright_mark.engine.replica.group.comm
            gather(None)
            if before:
                sent[number == MICRO - 1] += comm.stats()["wire_bytes_sent"] - before
            if number < MICRO - 1 and stays:
                assert all(p.grad is None for p in module.parameters()), number
        for name, parameter in module.named_parameters():
            found = parameter.grad.to_local()
            if stays:
                chunks = expected_mean([[each[name] for each in micro] for micro in gradients], rows, hosts)
                assert bits_equal(found, chunks[at]), (step, name, found, chunks[at])
            total = sum(each[name] for micro in gradients for each in micro) / world_size
            torch.testing.assert_close(found, rows_of(total, at, len(rows[0])), rtol=1e-5, atol=1e-6)
        module.zero_grad()
    stats = sw.stats(module)["models"][0]
    assert stats["row_rounds"] == (3 * (MICRO - 1) if stays else 0), stats
    assert stats["rounds"] == (3 if stays else 3 * MICRO)
    if hosts is not None and stays and rank == 0:
        everything = 4 * sum(p.numel() for p in plain.parameters())
        assert sent[0] < 0.1 * (MICRO - 1) * sent[1] and sent[1] > 0.5 * everything, sent
    if hosts is None and stays and len(rows[0]) > 1:
        assert stats["row_bytes"] * MICRO == stats["bytes"] * (MICRO - 1)


@pytest.mark.parametrize("case", CASES)
def test_a_mean_includes_what_rows_have_added_up(fresh_ranks, case):
    rows, hosts, stays = CASES[case]
    with fresh_ranks(sum(map(len, rows))) as team:
        team.run(adds_up, rows=rows, hosts=hosts, stays=stays)


def has_the_result_of_fsdp2(rank, world_size):
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of([[0, 1], [2, 3]])
    theirs, ours, once = Net(), cut(Net(), mesh), cut(Net(), mesh)
    for each in (theirs.first, theirs.second, theirs):
        fully_shard(each, mesh=mesh)
    made = [(module, torch.optim.AdamW(module.parameters(), lr=1e-2)) for module in (theirs, ours, once)]
    for step in range(4):
        for module, optimizer in made:
            for number in range(MICRO):
                if module is once:
                    module.set_requires_gradient_sync(number == MICRO - 1)
                else:
                    module.set_requires_all_reduce(number == MICRO - 1)
                module(batch(rank, 6, 5, step=10 * step + number)).square().mean().backward()
            optimizer.step()
            if step != 1:  # else the next means add to this one's
                optimizer.zero_grad()
        for (name, p), mine, other in zip(theirs.named_parameters(), ours.parameters(), once.parameters(), strict=True):
            for each in (mine, other):
                torch.testing.assert_close(each.to_local(), p.to_local(), rtol=1e-5, atol=1e-6, msg=f"{step} {name}")


def test_parameters_are_those_of_fsdp2_and_of_one_mean(fresh_ranks):
    with fresh_ranks(4) as team:
        team.run(has_the_result_of_fsdp2)


def is_as_exact_as_fsdp2(rank, world_size):
    """By the greatest element of each gradient: single elements cancel, and both are 7e-3 of them away from float64."""
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of([[0, 1], [2, 3]])
    theirs, ours, exact = Net(), cut(Net(), mesh), Net().double()
    for each in (theirs.first, theirs.second, theirs):
        fully_shard(each, mesh=mesh)
    for step in range(4):
        for number in range(MICRO):
            for module in (theirs, ours):
                module.set_requires_all_reduce(number == MICRO - 1)
                module(batch(rank, 6, 5, step=10 * step + number)).square().mean().backward()
            for each in range(world_size):
                exact(batch(each, 6, 5, step=10 * step + number).double()).square().mean().backward()
        for (name, a), b, c in zip(ours.named_parameters(), theirs.parameters(), exact.parameters(), strict=True):
            mine, other, value = a.grad.full_tensor(), b.grad.full_tensor(), c.grad / world_size
            allowed = 1e-6 * value.abs().max()
            assert (mine - other).abs().max() <= allowed and (mine - value).abs().max() <= allowed, (step, name)
        for module in (theirs, ours, exact):
            module.zero_grad()


def test_means_are_within_1e_6_of_fsdp2_and_of_float64(fresh_ranks):
    with fresh_ranks(4) as team:
        team.run(is_as_exact_as_fsdp2)


def calls_hooks(rank, world_size):
    from torch.distributed.fsdp import fully_shard

    def train(shard, mesh):
        module, seen = Net(), []
        for each in (module.left, module.first, module.second, module):
            shard(each, mesh=mesh)

        def set_hook(name):
            def hook(flat):
                seen.append((name, flat.numel()))
                flat.mul_({"first": 2, "second": -1, "left": 3}[name])

            getattr(module, name).set_all_reduce_hook(hook)

        set_hook("left")
        set_hook("second")
        found = []
        for number in range(6):
            if number == 2:  # late, and one of them anew
                set_hook("first")
                set_hook("second")
            if mesh.ndim == 2:
                module.set_requires_all_reduce(number != 1)
            x = batch(rank, 6, 5, step=number).requires_grad_(number > 3)
            module.by_keyword = number % 2 == 1
            module(x).square().mean().backward()
            found.append([None if p.grad is None else p.grad.to_local().clone() for p in module.parameters()])
            if number == 0:
                module.zero_grad()
        return found, seen

    from torch.distributed.device_mesh import init_device_mesh

    for mesh in (init_device_mesh("cpu", (world_size,)), mesh_of([[0, 1], [2, 3]])):
        (theirs, called), (ours, calls) = train(fully_shard, mesh), train(sw.fully_shard, mesh)
        assert calls == called, (calls, called)
        for mine, other in zip(ours, theirs, strict=True):
            for a, b in zip(mine, other, strict=True):
                assert (a is None) == (b is None)
                if b is not None:
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_hooks_get_and_change_the_means_of_fsdp2s_hooks(fresh_ranks):
    with fresh_ranks(4) as team:
        team.run(calls_hooks)


def meets_the_rest(rank, world_size):
    mesh = mesh_of([[0, 1], [2, 3]])
    module, plain = cut(Net(), mesh), Net()

    def backward(number):
        module(batch(rank, 6, 5, step=number)).square().mean().backward()

    def expect(numbers):
        plain.zero_grad()
        for number in numbers:
            plain(batch(rank, 6, 5, step=number)).square().mean().backward()
        everything = gather({name: p.grad for name, p in plain.named_parameters()})
        found = sw.full_gradients(module)
        for name in found:
            torch.testing.assert_close(found[name], sum(each[name] for each in everything) / 4, rtol=1e-5, atol=1e-6)
        assert same_everywhere([found[name] for name in sorted(found)])

    module.set_requires_all_reduce(False)
    backward(0)
    with module.no_sync():  # joins the next sum
        backward(1)
    backward(2)
    module.set_requires_all_reduce(True)
    backward(3)
    expect(range(4))
    module.set_requires_all_reduce(False)  # on a mean that stands
    backward(4)
    module.set_requires_all_reduce(True)
    backward(5)
    expect(range(6))
    module.zero_grad()
    module.first.set_requires_all_reduce(False)  # the others average
    backward(6)
    expect([6])
    module.set_requires_all_reduce(False)
    backward(7)
    module.set_requires_all_reduce(True)
    backward(8)
    expect([6, 7, 8])
    module.zero_grad()
    module.set_requires_all_reduce(False)
    backward(9)
    module.fails = rank == 1
    with pytest.raises(ZeroDivisionError if rank == 1 else sw.Error):
        backward(10)
    module.fails = False
    module.zero_grad()
    module.set_requires_all_reduce(True)
    backward(11)
    expect([11])  # a round that fails drops what rows have kept


def test_it_composes_with_no_sync_standing_means_and_failed_rounds(fresh_ranks):
    with fresh_ranks(4) as team:
        team.run(meets_the_rest)


@on_every_rank()
def test_without_replicas_it_changes_nothing(rank, world_size):
    module = Net()
    sw.fully_shard(module)
    module.set_requires_all_reduce(False)
    module(batch(rank, 6, 5)).square().mean().backward()
    assert all(p.grad is not None for p in module.parameters())


def disagrees(rank, world_size):
    module = cut(Net(), mesh_of([[0, 1], [2, 3]]))
    module(batch(rank, 6, 5)).sum().backward()
    module.set_requires_all_reduce(False)
    module(batch(rank, 6, 5)).sum().backward()
    module.set_requires_all_reduce(rank != 2)
    with pytest.raises(sw.Error, match="ranks disagree on collective"):
        module(batch(rank, 6, 5)).sum().backward()


def test_ranks_that_disagree_get_one_sentence(fresh_ranks):
    with fresh_ranks(4) as team:
        team.run(disagrees)


def fails_early(module, _):
    raise ZeroDivisionError


def leaves_nothing(rank, world_size):
    """The gradient of each weight with `scale` is 3 * scale in the mean of two ranks."""
    mesh = mesh_of([[0], [1]])

    def made(over, factor=None, hook=False):
        module = nn.Linear(4, 4, bias=False)
        sw.fully_shard(module, **({"mesh": mesh} if over else {}))
        if factor is not None:
            module.set_gradient_divide_factor(factor)
        if hook:
            module.set_all_reduce_hook(lambda flat: None)

        def run(scale):
            module(torch.full((2, 4), float(scale * (rank + 1)))).sum().backward()

        def found():
            return module.weight.grad.full_tensor().unique().tolist()

        def reaches_none():
            x = torch.ones(2, 4, requires_grad=True)
            torch.autograd.grad(module(x).sum(), x)

        def fails():
            handle = module.register_full_backward_pre_hook(fails_early)
            with pytest.raises(ZeroDivisionError):
                run(1)
            handle.remove()

        return module, run, found, reaches_none, fails

    for failed in (False, True):  # an announced round of rows that never opened
        module, run, found, reaches_none, fails = made(True)
        run(1)
        module.zero_grad()
        module.set_requires_all_reduce(False)
        (fails if failed else reaches_none)()
        module.zero_grad()
        module.set_requires_all_reduce(True)
        run(2)
        assert found() == [6.0], (failed, found())
    module, run, found, *_ = made(True, factor=4.0)
    run(1)
    module.set_requires_all_reduce(False)
    run(2)
    module.zero_grad()  # drops the mean, and not what rows have kept
    with pytest.raises(sw.Error, match=r"set_gradient_divide_factor\(2\) between micro-batches"):
        module.set_gradient_divide_factor(2.0)
    module.set_requires_all_reduce(True)
    run(3)
    assert found() == [7.5], found()
    for hook in (False, True):
        module, run, found, reaches_none, fails = made(False, factor=None if hook else 4.0, hook=hook)
        run(1)
        (fails if hook else reaches_none)()
        module.zero_grad()
        run(2)
        assert found() == [6.0 if hook else 3.0], (hook, found())


def test_a_backward_without_a_round_leaves_no_row_and_no_mean_behind(fresh_ranks):
    with fresh_ranks(2) as team:
        team.run(leaves_nothing)
