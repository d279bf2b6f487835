"""Law of mixed precision: under a policy the forward computes in low precision on float32 masters. Losses, parameters
and optimizer state have the bits of stage 0 at every stage. Stage 0 has the bits of a naive loop that casts every
parameter by hand."""

import copy
import itertools

import pytest
import torch
from harness import LONG, gather, in_turn, on_every_rank, same_everywhere
from models import Mlp
from oracle.data_parallel import NaiveDataParallel
from oracle.fold import bits_equal, fold
from peer import PEER, batch, sw
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.attention = nn.Linear(24, 72)
        self.mix = nn.Linear(24, 24, bias=False)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (3, 8)).transpose(1, 2) for each in self.attention(self.norm(x)).chunk(3, -1))
        return x + self.mix(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Gpt(nn.Module):
    """A GPT of two blocks and a norm. Its head is tied to the embedding and used outside of its module's forward."""

    def __init__(self, recompute=None):
        super().__init__()
        self.embedding = nn.Embedding(31, 24)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(24)
        self.recompute = recompute

    def forward(self, tokens, scale=1.0):
        x = self.embedding(tokens) * scale
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return F.linear(self.norm(x), self.embedding.weight)


def loss_of(model, rank, step):
    tokens = torch.randint(0, 31, (3, 9), generator=torch.Generator().manual_seed(100 * step + rank))
    logits = model(tokens)
    return F.cross_entropy(logits.float().flatten(0, 1)[:-1], tokens.flatten()[1:])


def plain(model, optimizer, rank, steps):
    losses = []
    for step in range(steps):
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def accumulated_and_clipped(model, optimizer, rank, steps):
    losses = []
    for step in range(steps // 2):
        with model.no_sync():
            loss_of(model, rank, 2 * step).backward()
        loss = loss_of(model, rank, 2 * step + 1)
        loss.backward()
        losses += [loss.item(), sw.clip_grad_norm_(model, 0.3).item()]
        optimizer.step()
        optimizer.zero_grad()
    return losses


def run(rank, zero, precision, training=plain, steps=6, build=Gpt, **options):
    torch.manual_seed(0)
    module = build()
    model, optimizer = sw.wrap(
        module, torch.optim.AdamW(module.parameters(), lr=3e-3), zero=zero, precision=precision, **options
    )
    losses = training(model, optimizer, rank, steps)
    assert all(isinstance(p, nn.Parameter) and p.dtype == torch.float32 for p in module.parameters())
    state = copy.deepcopy(sw.full_optimizer_state_dict(model, optimizer)["state"])
    with sw.full_parameters(model):
        tensors = [p.detach().clone() for p in module.parameters()]
    tensors += [entry[key] for entry in state.values() for key in sorted(entry)]
    gather(None)
    return losses, tensors


def assert_same(found, expected, what=None):
    assert found[0] == expected[0], (what, found[0], expected[0])
    assert all(bits_equal(a, b) for a, b in zip(found[1], expected[1], strict=True)), what


def stages(at):
    """Return the stages above 0, in the quick form those whose turn it is; at the last one parameters are released between uses."""
    return in_turn([{"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "share_parameters": False}], at)


POLICIES = {
    "bf16": "bf16",
    "fp16": "fp16",
    "fp32": "fp32",
    "modules": {"": "bf16", "norm": "fp32", "blocks.0.attention": "fp16"},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("training", [plain, accumulated_and_clipped])
@on_every_rank()
def test_many_steps_have_the_bits_of_stage_0(rank, world_size, training, policy):
    precision = POLICIES[policy]
    if policy == "modules":
        precision = {**precision, "norm": sw.Precision(param_dtype=torch.float32, output_dtype=torch.bfloat16)}
    steps = 20 if LONG else 7
    expected = run(rank, 0, precision, training, steps, bucket_cap_mb=0.01)
    turns = (0, 1) if training is accumulated_and_clipped and not LONG else ([*POLICIES].index(policy),)
    for stage in itertools.chain.from_iterable(map(stages, turns)):
        assert_same(run(rank, precision=precision, training=training, steps=steps, **stage), expected, stage)
    assert same_everywhere(expected[1][0].tolist())
    if policy != "fp32":
        assert expected[0] != run(rank, 0, "fp32", training, steps)[0]


class CastByHand(nn.Module):
    """A naive form: every parameter is cast, and autograd does the rest."""

    def __init__(self, module, dtype):
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, *inputs):
        cast = {name: p.to(self.dtype) for name, p in self.module.named_parameters()}
        return torch.func.functional_call(self.module, cast, inputs)


@pytest.mark.parametrize("name", LOW)
@on_every_rank()
def test_stage_0_is_the_naive_loop_that_casts(rank, world_size, name):
    torch.manual_seed(0)
    naive = NaiveDataParallel(CastByHand(Gpt(), LOW[name]))
    optimizer = torch.optim.AdamW(naive.module.parameters(), lr=3e-3)
    losses = []
    for step in range(6):
        loss = loss_of(naive, rank, step)
        loss.backward()
        naive.synchronise()
        optimizer.step()
        naive.module.zero_grad()
        losses.append(loss.item())
    found = run(rank, 0, name)
    assert found[0] == losses
    for mine, theirs in zip(found[1], naive.module.parameters()):
        assert bits_equal(mine, theirs.detach())


@on_every_rank()
def test_a_scaler_of_torch_runs_unchanged_in_fp16(rank, world_size):
    def scaled(model, optimizer, rank, steps):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
        seen = []
        for step in range(steps):
            loss = loss_of(model, rank, step)
            scaler.scale(loss * (1e9 if step == 2 and rank == world_size - 1 else 1.0)).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                sw.clip_grad_norm_(model, 0.3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen += [loss.item(), scaler.get_scale()]
        assert 2.0**11 in seen and 2.0**12 in seen
        return seen

    expected = run(rank, 0, "fp16", scaled)
    for stage in stages(0):
        assert_same(run(rank, precision="fp16", training=scaled, **stage), expected, stage)


@on_every_rank()
def test_modules_compute_as_their_policy_says(rank, world_size):
    low = sw.Precision(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    policies = {"": low, "blocks.1": "fp32"}
    for zero in (0, 3):
        torch.manual_seed(0)
        module = Gpt()
        seen = {}
        for name, each in module.named_modules():
            if isinstance(each, (nn.Linear, nn.LayerNorm, Block)):

                def look(module, inputs, name=name, seen=seen):
                    weight = next(module.parameters())
                    seen[name] = (inputs[0].dtype, weight.dtype, type(weight) is nn.Parameter)

                each.register_forward_pre_hook(look)
        model = sw.wrap(module, zero=zero, precision=policies)
        output = model(torch.zeros(1, 4, dtype=torch.int64), scale=torch.ones(1))
        assert output.dtype == torch.float64
        assert seen["blocks.0"] == (torch.bfloat16, torch.bfloat16, False)
        assert seen["blocks.0.mix"][:2] == (torch.bfloat16, torch.bfloat16)
        assert seen["blocks.1"] == (torch.bfloat16, torch.float32, True)  # cast after this hook, which runs first
        assert seen["blocks.1.norm"][:2] == (torch.float32, torch.float32)
        assert seen["norm"][:2] == (torch.bfloat16, torch.bfloat16)
        seen.clear()
        sw.unwrap(model)(torch.zeros(1, 4, dtype=torch.int64))
        assert {each[:2] for each in seen.values()} == {(torch.float32, torch.float32)}  # outside of the wrapper
        gather(None)


@pytest.mark.parametrize("recompute", [False, True], ids=["non-reentrant", "reentrant"])
@on_every_rank()
def test_recomputed_activations_have_the_same_bits(rank, world_size, recompute):
    for precision in ("bf16", {"": "bf16", "blocks.0.norm": "fp32", "blocks.1": "fp32"}):
        expected = run(rank, 0, precision)
        for stage in ({"zero": 0}, *stages(1)):
            assert_same(run(rank, precision=precision, build=lambda: Gpt(recompute), **stage), expected, stage)


@on_every_rank()
def test_after_an_exception_parameters_are_back_in_their_slots(rank, world_size):
    torch.manual_seed(0)
    module = Gpt(recompute=False)
    before = list(module.parameters())
    model, optimizer = sw.wrap(module, torch.optim.AdamW(module.parameters(), lr=3e-3), zero=2, precision="bf16")

    def fail(*_):
        raise ArithmeticError("on purpose")

    handle = module.blocks[1].mix.register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        loss_of(model, rank, 0)
    handle.remove()
    assert all(a is b for a, b in zip(module.parameters(), before, strict=True))
    loss = loss_of(model, rank, 0)
    handle = module.blocks[0].mix.register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        loss.backward()
    handle.remove()
    assert all(a is b for a, b in zip(module.parameters(), before, strict=True))
    optimizer.zero_grad()
    plain(model, optimizer, rank, 2)
    gather(None)


@on_every_rank()
def test_low_precision_parameters_get_masters_unless_denied(rank, world_size):
    for zero in (0, 2):
        for master in (True, False):
            torch.manual_seed(0)
            module = Mlp().to(torch.bfloat16)
            optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
            policy = sw.Precision(param_dtype=torch.bfloat16, master=master)
            model, optimizer = sw.wrap(module, optimizer, zero=zero, precision=policy)
            assert {p.dtype for p in module.parameters()} == {torch.float32 if master else torch.bfloat16}
            before = [p.detach().clone() for p in module.parameters()]
            output = model(batch(rank, 6, 7))
            assert output.dtype == torch.bfloat16
            output.float().square().mean().backward()
            optimizer.step()
            after = list(module.parameters())
            unmoved = sum(int((a == b).sum()) for a, b in zip(before, after, strict=True))
            assert (unmoved < 100) is master, unmoved  # steps smaller than half a unit of bfloat16
            gather(None)


@on_every_rank()
def test_released_parameters_have_no_copies_without_gradients(rank, world_size):
    torch.manual_seed(0)
    module = Gpt()
    model = sw.wrap(module, zero=3, share_parameters=False, precision="bf16")
    tokens, alive = torch.arange(8).view(1, 8), []

    def look(*_):  # in the last norm, after the blocks
        held = [each.attention.weight for each in module.blocks] + [module.embedding.weight]
        alive.append([each.dtype for each in held])

    module.norm.register_forward_pre_hook(look)
    with torch.no_grad():
        first = model(tokens)
    assert alive == [[torch.float32, torch.float32, torch.bfloat16]]
    assert bits_equal(first, model(tokens).detach())
    gather(None)


@on_every_rank()
def test_released_low_parameters_can_be_wrapped_again(rank, world_size):
    torch.manual_seed(0)
    module = Gpt().to(torch.bfloat16)
    expected = [p.detach().float() for p in gather(module)[0].parameters()]
    keep = sw.wrap(module, zero=3, share_parameters=False)
    assert keep.module is module
    model = sw.wrap(module, zero=0, precision="bf16")
    assert all(bits_equal(a, b.detach()) for a, b in zip(expected, module.parameters(), strict=True))
    assert model(torch.arange(8).view(1, 8)).isfinite().all()
    gather(None)


@on_every_rank(at_least=2)
def test_a_module_that_could_not_be_wrapped_is_unchanged(rank, world_size):
    module = Mlp().to(torch.bfloat16)
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(sw.Error, match="bucket_cap_mb"):
        sw.wrap(module, precision="bf16", bucket_cap_mb=1.0 + rank)
    assert all(bits_equal(a, b.detach()) for a, b in zip(before, module.parameters(), strict=True))
    assert not any(each._forward_pre_hooks or each._forward_hooks for each in module.modules())
    gather(None)


@on_every_rank()
def test_states_copies_and_wrapping_again(rank, world_size):
    torch.manual_seed(0)
    module = Gpt()
    model, optimizer = sw.wrap(module, torch.optim.AdamW(module.parameters()), zero=1, precision="bf16")
    plain(model, optimizer, rank, 1)
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    direct = sw.DistributedDataParallel(Gpt(), precision=sw.Precision(reduce_dtype=torch.float16))
    assert repr(direct.compression_state or sw.stats()["models"][-1]["compress"]) in ("'Fp16()'", "Fp16()")
    average, twin = copy.deepcopy(module), copy.deepcopy(model)
    tokens = torch.arange(8).view(1, 8)
    assert average(tokens).dtype == torch.float32
    assert model(tokens).dtype == twin(tokens).dtype == torch.bfloat16
    assert bits_equal(model(tokens), twin(tokens))
    again = sw.wrap(module, zero=0)
    assert again(tokens).dtype == torch.float32
    gather(None)


@on_every_rank()
def test_the_bare_module_evaluates_generates_and_is_averaged_outside_of_the_wrapper(rank, world_size):
    for precision in (None, "bf16"):
        expected = None
        for stage in ({"zero": 0}, *stages(int(precision is None))):
            torch.manual_seed(0)
            module = Gpt()
            model, optimizer = sw.wrap(module, torch.optim.AdamW(module.parameters()), precision=precision, **stage)
            plain(model, optimizer, rank, 2)
            with sw.full_parameters(model):
                average = torch.optim.swa_utils.AveragedModel(
                    sw.unwrap(model), avg_fn=lambda a, p, n: 0.5 * a + 0.5 * p
                )
                average.update_parameters(sw.unwrap(model))
            plain(model, optimizer, rank, 2)
            with sw.full_parameters(model):
                average.update_parameters(sw.unwrap(model))
            tokens = torch.arange(8).view(1, 8)
            with torch.no_grad():
                for _ in range(3):
                    tokens = torch.cat([tokens, module(tokens)[:, -1:].argmax(-1)], 1)
                found = [tokens, module(tokens), average(tokens)]
            assert [each.dtype for each in found[1:]] == [torch.float32] * 2
            expected = expected or found
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), stage
            gather(None)


@on_every_rank()
def test_a_container_without_a_tensor_to_cast_is_passed_on_itself(rank, world_size):
    class Caching(nn.Linear):
        def forward(self, x, cache, *, options):
            cache.append(x.dtype)
            options["seen"] = True
            return super().forward(x)

    cache, options = [], {"a": [1, torch.ones(2, dtype=torch.int64)]}
    sw.wrap(Caching(3, 3), precision="bf16")(torch.ones(2, 3), cache, options=options)
    assert cache == [torch.bfloat16] and options["seen"]
    norms = nn.Sequential(nn.Linear(7, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model = sw.wrap(norms, precision={"": "bf16", "1": sw.Precision(torch.float32, cast_forward_inputs=False)})
    model(batch(rank, 6, 7)).float().sum().backward()
    assert norms[1].weight.grad.isfinite().all()
    gather(None)


@on_every_rank()
def test_recurrent_layers_and_structured_outputs(rank, world_size):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRU(7, 5, batch_first=True)

        def forward(self, x, *, extra):
            output, last = self.cell(x["x"])
            return {"output": output, "many": [last, extra], "count": torch.tensor(3)}

    module = Recurrent()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    policy = sw.Precision(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model, optimizer = sw.wrap(module, optimizer, zero=1, precision=policy)
    for _ in range(2):
        output = model({"x": batch(rank, 3, 4, 7)}, extra=(torch.ones(2), torch.ones(2, dtype=torch.int64)))
        assert output["output"].dtype == output["many"][0].dtype == output["many"][1][0].dtype == torch.float32
        assert output["count"].dtype == output["many"][1][1].dtype == torch.int64
        output["output"].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert module.cell(batch(rank, 3, 4, 7))[0].dtype == torch.float32
    gather(None)


class Rows(nn.Module):
    """A model with sparse gradients, of rows that occur more than once."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(17, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.table(tokens))


def looks_up(model, optimizer, rank, steps):
    losses = []
    for step in range(steps):
        loss = model(torch.tensor([rank, 3, 3, 16, step])).float().square().mean()
        loss.backward()
        assert all(not p.grad.is_sparse for p in model.module.parameters() if isinstance(p.grad, torch.Tensor))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", LOW)
@on_every_rank()
def test_sparse_gradients_are_made_dense(rank, world_size, name):
    expected = run(rank, 0, name, looks_up, build=Rows)
    for options in stages([*LOW].index(name)):
        assert_same(run(rank, precision=name, training=looks_up, build=Rows, **options), expected, options)


@on_every_rank()
def test_gradients_travel_in_reduce_dtype(rank, world_size):
    expected = run(rank, 0, "bf16", compress=sw.Bf16())
    for stage in ({"zero": 0}, *stages(0)):
        policy = sw.Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        assert_same(run(rank, precision=policy, **stage), expected, stage)
    with pytest.raises(ValueError, match="both set the wire format of gradients"):
        sw.wrap(Mlp(), precision=policy, compress=sw.Int8())
    full = sw.Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert_same(run(rank, 2, full), run(rank, 0, "bf16"))
    # without masters each bfloat16 gradient is widened, added, and rounded once
    for stage in ({"zero": 0}, *stages(1)):
        torch.manual_seed(0)
        module = Mlp().to(torch.bfloat16)
        policy = sw.Precision(torch.bfloat16, reduce_dtype=torch.float32, master=False)
        model = sw.wrap(module, precision=policy, **stage)
        torch.manual_seed(0)
        plain = Mlp().to(torch.bfloat16)
        for each in (model, plain):
            each(batch(rank, 6, 7).bfloat16()).float().square().mean().backward()
        found = sw.full_gradients(model)
        for name, p in plain.named_parameters():
            assert bits_equal(found[name], fold(gather(p.grad), "mean")), (stage, name)
    gather(None)


@on_every_rank()
def test_autocast_has_the_same_bits_at_every_stage(rank, world_size):
    def autocast(model, optimizer, rank, steps):
        losses = []
        for step in range(steps):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, rank, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected = run(rank, 0, None, autocast)
    for stage in stages(1):
        assert_same(run(rank, precision=None, training=autocast, **stage), expected, stage)


@on_every_rank()
def test_a_compiled_wrapper_computes_the_same(rank, world_size):
    if world_size > 1 and not LONG:
        return  # compiling takes seconds, and nothing here depends on the ranks
    import torch._dynamo

    gradients = []
    for options in ({"zero": 0}, {"zero": 3, "share_parameters": False}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = sw.wrap(Gpt(), precision="bf16", **options)
        compiled = torch.compile(model, backend="eager")
        tokens = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(rank))
        for call in (model, compiled, compiled):
            model.zero_grad()
            output = call(tokens)
            assert output.dtype == torch.bfloat16
            output.float().square().mean().backward()
            gradients.append({name: g.clone() for name, g in sw.full_gradients(model).items()})
    for again in gradients[1:]:
        assert all(bits_equal(value, again[name]) for name, value in gradients[0].items())
    torch._dynamo.reset()


@on_every_rank()
def test_unsupported_options_are_a_sentence(rank, world_size):
    for precision, kind, words in [
        ("bf8", ValueError, "precision.* must be None, 'bf16'"),
        ({"": "bf16", "4x": "fp32"}, ValueError, "no module is called '4x': did you mean '4'"),
        (
            {"0": sw.Precision(reduce_dtype=torch.bfloat16), "2": sw.Precision(reduce_dtype=torch.float16)},
            ValueError,
            "one for the",
        ),
    ]:
        with pytest.raises(kind, match=words):
            sw.wrap(Mlp(), precision=precision)
    if hasattr(torch.Tensor, "grad_dtype"):
        module = nn.Linear(3, 3).to(torch.bfloat16)
        module.weight.grad_dtype = torch.float32
        with pytest.raises(NotImplementedError, match="'weight' is torch.bfloat16 with grad_dtype=torch.float32"):
            sw.wrap(module)
        model = sw.wrap(module, precision="bf16")
        model(batch(rank, 2, 3)).sum().backward()
        assert module.weight.grad.dtype == torch.float32
    with pytest.raises(TypeError, match="param_dtype must be a floating dtype"):
        sw.Precision(param_dtype=torch.int8)
    gather(None)


@on_every_rank(at_least=2)
def test_ranks_that_disagree_get_an_error(rank, world_size):
    with pytest.raises(sw.Error, match="precision"):
        sw.wrap(Mlp(), precision="bf16" if rank else "fp16")
    gather(None)


def arrivals(precision, stage):
    """Return the order in which a backward leaves blocks and brings gradients."""
    torch.manual_seed(0)
    module, events = Gpt(), []
    model, optimizer = sw.wrap(module, torch.optim.AdamW(module.parameters()), precision=precision, **stage)
    for name, parameter in module.named_parameters():
        if name.endswith("weight"):
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    for number, block in enumerate(module.blocks):
        block.register_full_backward_hook(lambda *_, number=number: events.append(number))
    plain(model, optimizer, 0, 1)
    return events


@pytest.mark.parametrize("stage", [{"zero": 0}, {"zero": 2}, {"zero": 3}, {"zero": 3, "share_parameters": False}])
@on_every_rank(exactly=1)
def test_gradients_arrive_while_the_backward_runs(rank, world_size, stage):
    found, expected = (arrivals(precision, stage) for precision in ("bf16", None))
    for one in (0, 1):  # all of a later block come before the gradient of an earlier one
        names = [name for name in expected if str(name).startswith(f"blocks.{one}.")]
        assert names and all(found.index(name) < found.index(f"blocks.{one - 1}.mix.weight") for name in names if one)
    assert found.index("norm.weight") < found.index(1) and found[-1] == expected[-1] == "embedding.weight"
