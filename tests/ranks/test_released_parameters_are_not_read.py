"""Law: at zero=3 with private parameters, code that needs a released parameter's values gets an error with its name and
the call that gathers it. Metadata, gradients, hooks and backwards work as ever. A module of the outermost unit may be
called alone, and Hugging Face's generate() gives the tokens of one process at every stage.
"""

import copy
import importlib.util
import time

import pytest
import torch
from harness import gather, on_every_rank, same_everywhere
from oracle.fold import bits_equal
from peer import PEER, batch, engine, sw
from test_units_are_whole_only_while_they_run import Blocks, assert_released, private, steps, wrap
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
STAGES = {
    "0": {"zero": 0},
    "1": {"zero": 1},
    "2": {"zero": 2},
    "3 shared": {"zero": 3},
    "3 private": {"zero": 3, "share_parameters": False},
}
NAMED = r"parameter 'blocks\.1\.wide\.weight' is released.*{} needs .*with sw\.full_parameters\(module\)"

#: (what the error calls it, what is done with the weight)
READS = [
    ("norm", lambda w: w.norm()),
    ("linalg_vector_norm", torch.linalg.vector_norm),
    ("sum", torch.sum),
    ("detach", lambda w: w.detach()),
    ("clone", lambda w: w.clone()),
    (r"\.data", lambda w: w.data),
    (r"\.T", lambda w: w.T),
    ("view", lambda w: w.view(-1)),
    ("__getitem__", lambda w: w[0]),
    ("tolist", lambda w: w.tolist()),
    ("numpy", lambda w: w.numpy()),
    ("item", lambda w: w.item()),
    ("to", lambda w: w.to(torch.float64)),
    ("sub", lambda w: torch.ones_like(w) - w),
    ("mul", lambda w: 2 * w),
    ("linear", lambda w: nn.functional.linear(torch.ones(1, w.shape[1]), w)),
    ("cat", lambda w: torch.cat([torch.ones_like(w), w])),
    ("equal", lambda w: torch.equal(w, w)),
    ("allclose", lambda w: torch.allclose(torch.ones_like(w), w)),
    ("_foreach_norm", lambda w: torch._foreach_norm([w])),
    ("__deepcopy__", copy.deepcopy),
    ("__reduce_ex__", lambda w: torch.save(w, "/dev/null")),
    ("view", lambda w: nn.utils.parameters_to_vector([w])),
    ("unbind", list),
    ("isnan", torch.isnan),
]


@on_every_rank()
def test_a_read_is_an_error_with_the_name(rank, world_size):
    model, optimizer = private(Blocks)
    steps(model, optimizer, rank, 1)
    weight = model.module.blocks[1].wide.weight
    for name, read in READS:
        with pytest.raises(engine.Error, match=NAMED.format(name)):
            read(weight)
        with torch.no_grad(), pytest.raises(engine.Error, match=NAMED.format(name)):
            read(weight)
    with sw.full_parameters(model):
        expected = sw.full_state_dict(model)["blocks.1.wide.weight"]
        assert type(weight) is nn.Parameter and torch.equal(weight, expected) and weight.norm() == expected.norm()
    steps(model, optimizer, rank, 1)
    assert_released(model)
    gather(None)


@on_every_rank()
def test_what_needs_no_values_answers(rank, world_size):
    model, optimizer = private(Blocks)
    whole = Blocks()
    x = batch(rank, 6, 7)
    for (name, w), like in zip(model.module.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(w, nn.Parameter) and w.shape == like.shape and w.size(0) == like.size(0)
        assert (w.dtype, w.device, w.layout, w.ndim, w.numel()) == (
            like.dtype,
            like.device,
            like.layout,
            like.ndim,
            like.numel(),
        )
        assert w.is_leaf and w.grad_fn is None and w.grad is None and w.requires_grad and not w.is_sparse
        assert w.nbytes == like.nbytes and w.element_size() == 4 and len(w) == len(like) and hash(w) == id(w)
        assert torch.zeros_like(w).shape == w.new_zeros(3).new_empty(w.shape).shape and torch.is_floating_point(w)
        assert w in {w: name} and any(w is each for each in model.parameters())
        if w.numel() > 32:
            assert repr(w) == f"Parameter {name!r} of shape {tuple(w.shape)}, torch.float32, released"
    seen = []
    weight = model.module.blocks[1].wide.weight
    weight.register_hook(lambda g: seen.append(g.shape))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    weight.requires_grad_(False)
    weight.requires_grad = True
    model(x).sum().backward()
    assert seen == [weight.shape, True]
    weight.grad = None
    assert weight.grad is None
    del weight.grad
    model.zero_grad()
    optimizer.zero_grad(set_to_none=False)
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0
    assert_released(model)
    gather(None)


@on_every_rank()
def test_backwards_with_inputs_that_are_released(rank, world_size):
    def train(model, optimizer):
        module, found = sw.unwrap(model), []
        with model.no_sync():
            loss = model(batch(rank, 6, 7)).square().mean()
            wanted = [module.blocks[1].wide.weight, module.first.bias]
            found += [g.clone() for g in torch.autograd.grad(loss, wanted, retain_graph=True)]
            found += [g.clone() for g in torch.autograd.grad(loss, wanted, create_graph=True)]
        return [each.tolist() for each in found] + steps(model, optimizer, rank)

    model, optimizer = wrap(Blocks, 0)
    expected = train(model, optimizer)
    model, optimizer = private(Blocks)
    assert train(model, optimizer) == expected
    assert_released(model)
    gather(None)


class OwnParameter(nn.Parameter):
    """A parameter class of the user's."""

    def twice(self):
        return self * 2


@on_every_rank()
def test_a_parameter_has_its_own_class_while_it_is_whole(rank, world_size):
    torch.manual_seed(0)
    module = Blocks()
    module.blocks[1].wide.weight = weight = OwnParameter(module.blocks[1].wide.weight.detach())
    model, optimizer = sw.wrap(module, torch.optim.AdamW(module.parameters(), lr=1e-2), zero=3, share_parameters=False)
    steps(model, optimizer, rank, 2)
    assert isinstance(weight, OwnParameter)
    with pytest.raises(engine.Error, match=NAMED.format("mul")):
        weight.twice()
    with sw.full_parameters(model):
        assert type(weight) is OwnParameter and torch.isfinite(weight.twice()).all()
    del model, optimizer
    import gc

    gc.collect()
    assert type(weight) is OwnParameter and torch.isfinite(weight.twice()).all()
    gather(None)


@on_every_rank()
def test_modules_of_the_outermost_unit_may_be_called_by_themselves(rank, world_size):
    def train(model, optimizer):
        module = sw.unwrap(model)
        losses = steps(model, optimizer, rank, 1)
        with torch.no_grad():
            losses.append(module.last(module.blocks[0](module.first(batch(0, 6, 7)))).sum().item())
        with model.no_sync():  # and with a backward
            module.last(module.first(batch(rank, 6, 7))).square().mean().backward()
        return losses + steps(model, optimizer, rank, 2)

    model, optimizer = wrap(Blocks, 0)
    expected = train(model, optimizer), sw.full_state_dict(model)
    model, optimizer = private(Blocks)
    found = train(model, optimizer), sw.full_state_dict(model)
    assert found[0] == expected[0] and all(bits_equal(found[1][name], p) for name, p in expected[1].items())
    assert_released(model)
    with pytest.raises(engine.Error, match=NAMED.format("linear")):
        model.module.blocks[1].wide(torch.ones(1, 16))  # a part of an inner unit is not
    gather(None)


# generate() ----------------------------------------------------------------------------------------------------------


def _llama(transformers):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=97,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
    )


def _t5(transformers):
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            vocab_size=97,
            decoder_start_token_id=0,
            eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
    )


def generated(model, ids, **options):
    model.eval()
    tokens = model.generate(ids, max_new_tokens=5, synced_gpus=True, do_sample=False, **options)
    model.train()
    return tokens


def generates_at(rank, make, stage):
    import transformers

    torch.manual_seed(0)
    module = make(transformers)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ids = torch.randint(3, 97, (2, 5), generator=torch.Generator().manual_seed(rank))
    x = torch.randint(3, 97, (2, 8), generator=torch.Generator().manual_seed(rank))
    expected = generated(module, ids)
    model, optimizer = sw.wrap(module, optimizer, **stage)
    assert torch.equal(generated(module, ids), expected)
    for _ in range(2):
        model(input_ids=x, labels=x).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    alone = make(transformers)
    alone.load_state_dict(sw.full_state_dict(model))
    for options in ({}, {"num_beams": 2}):
        expected = generated(alone, ids, **options)
        assert torch.equal(generated(module, ids, **options), expected)
        with sw.full_parameters(model):
            assert torch.equal(generated(module, ids, **options), expected)
    model(input_ids=x, labels=x).loss.backward()
    optimizer.step()
    gather(None)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("make", [_llama, _t5])
@on_every_rank(deadline_s=120)
def test_generate_gives_the_tokens_of_one_process(rank, world_size, make, stage):
    generates_at(rank, make, STAGES[stage])


# cost ----------------------------------------------------------------------------------------------------------------


@on_every_rank(exactly=1)
def test_zeroing_and_clipping_many_released_parameters_costs_microseconds_each(rank, world_size):
    """Compared with the same loop over plain parameters. The bounds are ten times the measured values, for a busy
    machine.
    """
    module = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(200)))
    model, optimizer = sw.wrap(
        module, torch.optim.SGD(module.parameters(), lr=0.1), zero=3, share_parameters=False, units=nn.Linear
    )

    def best_us(call, times=20):
        found = []
        for _ in range(times):
            start = time.thread_time()
            call()
            found.append((time.thread_time() - start) / 200 * 1e6)
        return min(found)

    assert best_us(optimizer.zero_grad) < 2
    assert best_us(model.zero_grad) < 10
    assert best_us(lambda: [p.grad for p in model.parameters()]) < 10
    assert same_everywhere(True)
