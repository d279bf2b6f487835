"""Law: at zero=0 gradients of nn.Embedding(sparse=True) stay sparse. They are the coalesced mean with the bits of the
dense fold, under accumulation, on ranks that use no row, for a lone embedding, with hooks and with uneven inputs. At
zero >= 1 they are dense.
"""

import copy
import warnings

import pytest
import torch
from harness import gather, on_every_rank, same_everywhere
from oracle.data_parallel import NaiveDataParallel
from oracle.fold import bits_equal
from peer import PEER, batch, data_parallel, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True


class Rows(nn.Module):
    """A model with two sparse tables and a dense head. A forward uses the requested tables."""

    def __init__(self, kind=nn.Embedding):
        super().__init__()
        self.left, self.right = kind(17, 5, sparse=True), nn.EmbeddingBag(11, 5, sparse=True, mode="sum")
        self.head = nn.Linear(5, 3)

    def forward(self, tokens, use="left right"):
        total = torch.zeros(len(tokens), 5)
        if "left" in use:
            total = total + self.left(tokens)
        if "right" in use:
            total = total + self.right((tokens % 11).unsqueeze(1))
        return self.head(total).square().sum() if "alone" not in use else total.square().sum()


def tokens_of(rank, step):
    return torch.tensor([rank, 3, 3, 16, step])


def pair(build=Rows, **options):
    torch.manual_seed(0)
    module = build()
    return data_parallel(module, **options), NaiveDataParallel(
        copy.deepcopy(module), reduce=options.get("reduce", "mean")
    )


def compare(wrapped, naive, sparse=("left.weight", "right.weight")):
    for (name, p), q in zip(wrapped.module.named_parameters(), naive.module.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is None:
            continue
        assert p.grad.is_sparse == (name in sparse), name
        if p.grad.is_sparse:
            assert p.grad.is_coalesced() and same_everywhere([p.grad.indices(), p.grad.values()]), name
        assert bits_equal(p.grad.to_dense() if p.grad.is_sparse else p.grad, q.grad), name


@pytest.mark.parametrize("options", [{}, {"reduce": "sum"}, {"bucket_cap_mb": 0.0001, "transport": "staged"}])
@on_every_rank()
def test_they_are_the_mean_of_all_ranks(rank, world_size, options):
    wrapped, naive = pair(**options)
    for step, uses in enumerate(["left right", "left", "right alone", "left alone" if rank else "right", "left right"]):
        local = step == 4
        if local:
            with wrapped.no_sync():
                for model in (wrapped, naive):
                    model(tokens_of(rank, 7)).backward()
        for model in (wrapped, naive):
            model(tokens_of(rank, step), uses).backward()
        naive.synchronise()
        compare(wrapped, naive)
        if step != 1:  # the next one adds to the mean
            wrapped.zero_grad()
            naive.module.zero_grad()
    assert gather(wrapped._get_ddp_logging_data()["rounds"]) == [5] * world_size


@on_every_rank()
def test_sparse_adam_steps_alike_on_all_ranks(rank, world_size):
    wrapped, _ = pair()
    tables = [wrapped.module.left.weight, wrapped.module.right.weight]
    optimizers = [torch.optim.SparseAdam(tables, lr=0.1), torch.optim.SGD(wrapped.module.head.parameters(), lr=0.1)]
    before = tables[0].detach().clone()
    for step in range(3):
        wrapped(tokens_of(rank, step)).backward()
        norm = sw.clip_grad_norm_(wrapped, 1.0)
        assert norm > 0 and same_everywhere([norm])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert same_everywhere([p.detach() for p in wrapped.parameters()])
    changed = (tables[0] != before).any(1).nonzero().flatten().tolist()
    assert changed == sorted({*range(max(3, world_size)), 3, 16}), changed


@on_every_rank()
def test_gradients_of_autograd_are_averaged_by_hand(rank, world_size):
    wrapped, naive = pair()
    for model in (wrapped, naive):
        parameters = list(model.module.parameters())
        found = torch.autograd.grad(model.module(tokens_of(rank, 1)), parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
    naive.touched.update(name for name, _ in naive.module.named_parameters())
    naive.synchronise()
    sw.average_gradients(wrapped)
    compare(wrapped, naive)


@on_every_rank()
def test_a_lone_embedding_may_be_wrapped(rank, world_size):
    wrapped, naive = pair(lambda: nn.Embedding(9, 4, sparse=True))
    for step in range(3):
        for model in (wrapped, naive):
            model(torch.tensor([rank, step])).square().sum().backward()
        naive.synchronise()
        compare(wrapped, naive, sparse=("weight",))
        wrapped.zero_grad()
        naive.module.zero_grad()


@on_every_rank()
def test_a_table_that_is_used_densely_too_is_dense(rank, world_size):
    def build():
        module = Rows()
        module.out = nn.Linear(5, 17, bias=False)
        module.out.weight = module.left.weight
        return module

    wrapped, naive = pair(build)
    for model in (wrapped, naive):
        model(tokens_of(rank, 0)).backward()
    naive.synchronise()
    compare(wrapped, naive, sparse=("right.weight",))


@on_every_rank()
def test_a_communication_hook_gets_each_in_a_bucket_of_its_own(rank, world_size):
    seen = []

    def hook(state, bucket):
        seen.append(bucket.buffer().is_sparse)
        everyone = gather(bucket.buffer().to_dense())
        total = sum(everyone[1:], everyone[0]) / world_size
        future = torch.futures.Future()
        future.set_result([total.to_sparse(1)] if bucket.buffer().is_sparse else [total])
        return future

    wrapped, naive = pair()
    wrapped.register_comm_hook(None, hook)
    for model in (wrapped, naive):
        model(tokens_of(rank, 1), "left").backward()
    naive.synchronise()
    assert seen == [False, True]
    for p, q in zip(wrapped.parameters(), naive.module.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.allclose(p.grad.to_dense(), q.grad)


@on_every_rank()
def test_ranks_that_ran_out_of_inputs_take_part(rank, world_size):
    wrapped, naive = pair()
    with wrapped.join():
        for step in range(rank + 1):
            wrapped.zero_grad()
            wrapped(tokens_of(rank, step)).backward()
    naive(tokens_of(rank, world_size - 1)).backward()
    naive.synchronise(active=rank == world_size - 1)
    if rank == world_size - 1:
        compare_alone = wrapped.module.left.weight.grad.to_dense()
        assert torch.equal(compare_alone, naive.module.left.weight.grad)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@on_every_rank(spoils=True)  # the warning comes once in a process
def test_they_are_dense_where_that_is_asked_for(rank, world_size, zero):
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = data_parallel(Rows(), zero=zero, sparse_gradients="dense")
        wrapped(tokens_of(rank, 0)).backward()
    assert not [each for each in caught if "sparse gradient" in str(each.message)]
    _, naive = pair()
    naive(tokens_of(rank, 0)).backward()
    naive.synchronise()
    found = sw.full_gradients(wrapped)
    assert all(bits_equal(found[name].detach(), q.grad) for name, q in naive.module.named_parameters())


@on_every_rank()
def test_ranks_that_disagree_get_one_sentence(rank, world_size):
    torch.manual_seed(0)
    module = Rows()
    module.left.sparse = rank != world_size - 1
    with pytest.raises((sw.Error, ValueError), match="ranks disagree|sparse_gradients"):
        data_parallel(module, **({} if world_size > 1 else {"sparse_gradients": "never"}))
    assert batch(rank, 1).numel() == 1
