"""Law: a model that from_pretrained loads inside meta_loading() has, once wrapped, the bits of the same program outside it, at
every stage: with conversions, casts, tied, missing and added parameters. It cannot be used before, and an error is one on all ranks.
"""

import contextlib
import copy
import json
import logging
import os
import types

import pytest
import torch
from harness import gather, on_every_rank
from internals import Stored, meta_loading, stored_tensors
from oracle.fold import bits_equal
from peer import PEER, batch, sw
from test_a_module_is_built_in_slices import PRIVATE, STAGES, every_stage
from test_weights_are_loaded_in_slices import HAS_TRANSFORMERS, shared_folder, write_safetensors
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
WIDTH, EXPERTS = 24, 3


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(EXPERTS, 2 * WIDTH, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))

    def forward(self, x):
        gate, up = torch.einsum("bi,eoi->ebo", x, self.gate_up).chunk(2, -1)
        return torch.einsum("ebi,eoi->bo", gate.relu() * up, self.down)


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.experts, self.query = nn.Linear(7, WIDTH), Experts(), nn.Linear(WIDTH, WIDTH)
        self.key, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("table", torch.arange(WIDTH, dtype=torch.float32), persistent=False)

    def forward(self, x):
        x = self.norm(self.first(x)) + self.table / WIDTH
        return self.experts(self.query(x) * self.key(x))


class PreTrainedModel(nn.Module):
    """What transformers' class of this name does while it loads, as far as meta_loading() is concerned."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.tied = (
            Body(),
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )
        self.score = nn.Linear(WIDTH, 5)
        self.tied.weight = self.head.weight

    def forward(self, x):
        return self.score(self.tied(self.head(self.body(x))))

    @classmethod
    def from_pretrained(cls, folder, dtype=torch.float32, whole=False):
        with torch.device("meta"):
            model = cls().to(dtype)
        config = types.SimpleNamespace(hf_quantizer=None, device_map=None, whole=whole, dtype=dtype)
        files = [os.path.join(folder, "model.safetensors")]
        missing = cls._load_pretrained_model(model, None, files, config)
        return cls._finalize_model_loading(model, config, missing)

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config):
        if state_dict is None:
            state_dict = sw_read(checkpoint_files[0])
        held = {name: each[...].to(device="cpu", dtype=load_config.dtype) for name, each in state_dict.items()}
        listed = {part: [held.pop(f"experts.{n}.{part}") for n in range(EXPERTS)] for part in ("w1", "w2", "w3")}
        held["experts.gate_up"] = torch.cat([torch.stack(listed["w1"]), torch.stack(listed["w3"])], dim=1)
        held["experts.down"] = torch.stack([each.transpose(0, 1) for each in listed["w2"]]).contiguous()
        held["query.weight"], held["key.weight"] = (each.contiguous() for each in held.pop("qk.weight").chunk(2))
        if load_config.whole:
            held["query.weight"] = held["query.weight"] * 2
        missing = {name for name, _ in model.named_parameters()}
        for name, each in held.items():
            full = name if name.startswith("head") else f"body.{name}"
            path, _, own = full.rpartition(".")
            module = model.get_submodule(path)
            is_buffer = own in module._buffers
            setattr(module, own, each if is_buffer else nn.Parameter(each, requires_grad=each.is_floating_point()))
            missing.discard(full)
        return missing

    @staticmethod
    def _finalize_model_loading(model, load_config, missing):
        model.tied.weight = model.head.weight
        for name in sorted(missing):
            path, _, own = name.rpartition(".")
            module = model.get_submodule(path)
            setattr(module, own, nn.Parameter(torch.empty_like(getattr(module, own), device="cpu")))
            nn.init.normal_(getattr(module, own))
        model.body.table = torch.arange(WIDTH, dtype=load_config.dtype)
        model.body.norm.num_batches_tracked = model.body.norm.num_batches_tracked.long()
        return model


def sw_read(path):
    return {name: each for name, each in STATES[path].items()}


STATES: dict[str, dict[str, torch.Tensor]] = {}


@contextlib.contextmanager
def stand_in():
    """Let a module of transformers' name hold the class above, unless the change was made to it before."""
    module = types.ModuleType("transformers.modeling_utils")
    module.PreTrainedModel = type("PreTrainedModel", (PreTrainedModel,), dict(PreTrainedModel.__dict__))
    meta_loading._change(module)
    yield module.PreTrainedModel


def write(rank, scale=1.0):
    """Write a model as an older program has it: experts apart, two projections in one, no last layer."""
    folder = shared_folder(rank)
    torch.manual_seed(3)
    state = {
        f"experts.{n}.{part}": torch.randn(WIDTH, WIDTH) / WIDTH for n in range(EXPERTS) for part in ("w1", "w2", "w3")
    }
    state |= {
        "qk.weight": torch.randn(2 * WIDTH, WIDTH) / 5,
        "query.bias": torch.randn(WIDTH),
        "key.bias": torch.randn(WIDTH),
    }
    state |= {
        "first.weight": torch.randn(WIDTH, 7),
        "first.bias": torch.randn(WIDTH),
        "head.weight": torch.randn(WIDTH, WIDTH),
    }
    state |= {
        "norm.weight": torch.randn(WIDTH),
        "norm.bias": torch.randn(WIDTH),
        "norm.running_mean": torch.randn(WIDTH),
    }
    state |= {"norm.running_var": torch.rand(WIDTH) + 1, "norm.num_batches_tracked": torch.tensor(5)}
    path = str(folder / "model.safetensors")
    if rank == 0:
        write_safetensors(path, state)
    STATES[path] = state
    gather(None)
    return folder


class Adapter(nn.Module):
    """A layer around another, which moves its own to that one's device and dtype, as PEFT's do."""

    def __init__(self, base):
        super().__init__()
        self.base, self.low = base, nn.Linear(WIDTH, 2, bias=False)
        self.high, self.saved = nn.Linear(2, WIDTH, bias=False), copy.deepcopy(base)
        self.to(device=base.weight.device, dtype=base.weight.dtype)

    def forward(self, x):
        return self.base(x) + self.high(self.low(x)) + self.saved(x)


def adapted(model):
    for each in model.parameters():
        each.requires_grad_(False)
    model.body.query = Adapter(model.body.query)
    model.score.requires_grad_(True)
    return model


def outcome(model, rank, options, dtype=torch.float32):
    """Return what wrap and two steps make of a model."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    parameters = list(model.parameters())
    model.train()
    wrapped, optimizer = sw.wrap(model, optimizer, **options)
    assert [id(p) for p in parameters] == [id(p) for p in model.parameters()]
    assert model.tied.weight is model.head.weight and not any(isinstance(p, Stored) for p in model.parameters())
    found = [sw.full_state_dict(wrapped), {name: each.clone() for name, each in model.named_buffers()}]
    for step in range(2):
        wrapped(batch(rank, 6, 7, step=step).to(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*found, sw.full_state_dict(wrapped)]


def assert_equal(found, wanted):
    for mine, theirs in zip(found, wanted):
        assert mine.keys() == theirs.keys()
        assert [name for name in theirs if not bits_equal(mine[name], theirs[name])] == []


@every_stage
@pytest.mark.parametrize("change", ["none", "cast", "adapted", "whole"])
@on_every_rank(at_least=1)
def test_it_has_the_bits_of_a_plain_load(rank, world_size, change, stage):
    folder, options = write(rank), STAGES[stage]
    how = {"dtype": torch.bfloat16} if change == "cast" else {"whole": change == "whole"}
    with stand_in() as kind:
        torch.manual_seed(rank)
        wanted = outcome(
            (adapted if change == "adapted" else nn.Identity())(kind.from_pretrained(folder, **how)),
            rank,
            options,
            how.get("dtype", torch.float32),
        )
        torch.manual_seed(rank)
        with sw.meta_loading():
            model = kind.from_pretrained(folder, **how)
    assert sum(type(each).__name__ == "Stored" for each in model.parameters()) == 11
    found = outcome(
        (adapted if change == "adapted" else nn.Identity())(model), rank, options, how.get("dtype", torch.float32)
    )
    assert_equal(found, wanted)
    gather(None)


@every_stage
@on_every_rank()
def test_every_way_to_wrap_reads_it(rank, world_size, stage):
    folder, options = write(rank), STAGES[stage]
    torch.manual_seed(1)
    with stand_in() as kind, sw.meta_loading():
        models = [kind.from_pretrained(folder) for _ in range(3)]
    torch.manual_seed(1)
    with stand_in() as kind:
        twins = [kind.from_pretrained(folder).state_dict() for _ in range(3)]
    wrapped = sw.DistributedDataParallel(models[0], **options)
    assert_equal([sw.full_state_dict(wrapped)], twins[:1])
    if options == PRIVATE:
        sw.fully_shard(models[1].body)
        sw.fully_shard(models[1])
        optimizer = sw.shard_optimizer(models[1], torch.optim.SGD(models[1].parameters(), lr=0.1))
        assert_equal([sw.full_state_dict(models[1])], twins[1:2])
        models[1](batch(rank, 6, 7)).sum().backward()
        optimizer.step()
    alone = sw.materialize(models[2])
    assert_equal([alone.state_dict()], twins[2:])
    gather(None)


@on_every_rank()
def test_it_cannot_be_used_before(rank, world_size):
    folder = write(rank)
    with stand_in() as kind, sw.meta_loading():
        model = kind.from_pretrained(folder)
    with pytest.raises(sw.Error, match="which sw.meta_loading.. left in its file: give the model to sw.wrap"):
        model(batch(rank, 6, 7))
    with pytest.raises(RuntimeError, match="left in its file"):
        model.load_state_dict(model.state_dict())
    assert sw.materialize(model)(batch(rank, 6, 7)).shape == (6, 5)
    gather(None)


@on_every_rank()
def test_a_conversion_that_ranges_cannot_express_is_said(rank, world_size):
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("shardwright").addHandler(handler)
    folder = write(rank)
    with stand_in() as kind, sw.meta_loading():
        kind.from_pretrained(folder)
        assert said == []
        kind.from_pretrained(folder, whole=True)
    logging.getLogger("shardwright").removeHandler(handler)
    assert len(said) == 1 and "conversion of 1 tensors" in said[0] and "'body.query.weight' (mul)" in said[0]
    gather(None)


@every_stage
@on_every_rank(at_least=2)
def test_an_error_is_one_on_all_ranks_and_the_model_stays_in_its_files(rank, world_size, stage):
    folder, options = write(rank), STAGES[stage]
    with stand_in() as kind, sw.meta_loading():
        model = kind.from_pretrained(folder)
        before = [type(p).__name__ for p in model.parameters()]

        def refused(match, given=model, optimizer=None):
            with pytest.raises(sw.Error, match=match) as caught:
                sw.wrap(given, optimizer, **options) if optimizer else sw.wrap(given, **options)
            assert "\n" not in str(caught.value)
            assert [type(p).__name__ for p in model.parameters()] == before
            gather(None)

        added = kind.from_pretrained(folder)
        added.more = nn.Linear(3, 3, device="meta")
        refused("'more.(weight|bias)' is on the meta device and came from no file", added)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[model.head.weight]["momentum_buffer"] = torch.zeros(WIDTH, WIDTH)
        refused("holds state of parameter 'head.weight', which has no values yet", model, optimizer)
        hook = model.head.weight.register_hook(lambda grad: grad)
        refused("'(head|tied).weight' cannot get memory in place: it has hooks")
        hook.remove()
        refused("ranks disagree|different", model if rank else kind.from_pretrained(folder, whole=True))
        plain = kind.__mro__[1]()
        disagree = (
            "ranks disagree about where a module's values are: rank 0 has no DTensor, rank 1 .* load the model alike"
        )
        refused(disagree, model if rank else plain)
        with pytest.raises(sw.Error, match=disagree):
            sw.DistributedDataParallel(model if rank else plain, **options)
        torn = folder / "model.safetensors"
        data = torn.read_bytes()
        times = torn.stat().st_atime_ns, torn.stat().st_mtime_ns
        gather(None)
        if rank == 0:
            os.truncate(torn, len(data) - 8)
        gather(None)
        refused("was replaced or written since the model was loaded from it")
        if rank == 0:
            torn.write_bytes(data)
            os.utime(torn, ns=times)
        gather(None)
        wrapped = sw.wrap(model, **options)
    assert wrapped(batch(rank, 6, 7)).isfinite().all()
    gather(None)


@pytest.mark.timeout(170)
@on_every_rank(exactly=3, deadline_s=150)
def test_a_rank_reads_its_slices_of_what_is_converted(rank, world_size):
    folder = shared_folder(rank)
    names = [f"{layer}.{n}" for layer in range(4) for n in range(4)]
    if rank == 0:
        write_safetensors_of_ones(folder / "model.safetensors", {name: (1024, 1024) for name in names})
    gather(None)
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))
    stored = {name: Stored.of(each) for name, each in stored_tensors(folder / "model.safetensors").items()}
    for number, layer in enumerate(module):
        four = [stored[f"{number}.{n}"] for n in range(4)]
        halves = [torch.cat(four[:2], 1), torch.cat([each.t() for each in four[2:]], 1)]
        layer.weight = nn.Parameter(torch.cat(halves).contiguous())
    sw.wrap(nn.Linear(4, 4), **PRIVATE)
    gather(None)
    read = [line.split()[1] for line in open("/proc/self/io") if line.startswith("rchar")]
    model = sw.wrap(module, **PRIVATE)
    read += [line.split()[1] for line in open("/proc/self/io") if line.startswith("rchar")]
    whole = 4 * 2048 * 2048 * 4
    # rows of the upper half are read as they are; of the lower half, a transpose, with the gaps between them
    bound = (1.1 if rank == 0 else 2.5) * whole / world_size + 4e6
    assert int(read[1]) - int(read[0]) < bound
    assert bits_equal(sw.full_state_dict(model)["3.weight"], torch.ones(2048, 2048))


def write_safetensors_of_ones(path, shapes):
    header, at = {}, 0
    for name, shape in shapes.items():
        size = shape[0] * shape[1] * 4
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(at >> 20):
            file.write(b"\0\0\x80\x3f" * (1 << 18))


def transformers_models():
    import transformers

    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    llama, gpt2 = transformers.LlamaConfig(**sizes, pad_token_id=0), transformers.GPT2Config(61, 32, 32, 2, 2)
    tied = transformers.LlamaConfig(**sizes, tie_word_embeddings=True)
    mixtral = transformers.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=3)
    causal = transformers.AutoModelForCausalLM
    return {
        "llama": (llama, causal),
        "tied": (tied, causal),
        "mixtral": (mixtral, causal),
        "gpt2": (gpt2, causal),
        "a new head": (llama, transformers.AutoModelForSequenceClassification),
        "no head": (llama, transformers.AutoModel),
        "adapters": (llama, causal),
    }


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers is not installed")
@pytest.mark.parametrize("name", ["llama", "tied", "mixtral", "gpt2", "a new head", "no head", "adapters"])
@every_stage
@on_every_rank(deadline_s=150)
def test_models_of_transformers_have_the_bits_of_from_pretrained(rank, world_size, stage, name):
    folder = shared_folder(rank)
    import transformers

    config, kind = transformers_models()[name]
    torch.manual_seed(5)
    if rank == 0:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="30KB")
    gather(None)
    found = []
    for context in (contextlib.nullcontext(), sw.meta_loading()):
        torch.manual_seed(rank)
        with context:
            model = kind.from_pretrained(folder, dtype=torch.float32)
        if name == "adapters":
            peft = pytest.importorskip("peft")
            model = peft.get_peft_model(
                model, peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
            )
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        wrapped, optimizer = sw.wrap(model, optimizer, **STAGES[stage])
        states = [sw.full_state_dict(wrapped), dict(model.named_buffers())]
        wrapped(input_ids=torch.arange(1, 9)[None] + rank)[0].float().square().mean().backward()
        optimizer.step()
        found.append([*states, sw.full_state_dict(wrapped)])
    assert_equal(*found)
    gather(None)
