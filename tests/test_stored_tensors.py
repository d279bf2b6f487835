"""Law: a stored tensor's views, copies, casts and concatenations are those of the tensor it stands for, in any range of bytes."""

from __future__ import annotations

import copy
import ctypes
import pickle
import random
import sys
import types

import pytest
import shardwright as sw
import torch
from shardwright.formats.lazy import Lazy
from shardwright.formats.places import stored_tensors
from shardwright.formats.stored import Stored, StoredOnDemand, replaying, waits
from shardwright.integrations import meta_loading

OPS = (
    "transpose",
    "slice",
    "select",
    "unsqueeze",
    "squeeze",
    "chunk",
    "split",
    "unbind",
    "reshape",
    "cast",
    "clone",
    "permute",
    "cat",
)


def some_op(rng, tensor):
    """Return a random operation on a tensor of this shape."""
    count, kind = tensor.ndim, rng.choice(OPS)
    at = rng.randrange(count) if count else 0
    if kind in ("reshape", "cast", "clone", "unsqueeze", "squeeze") or not count:
        rows = rng.choice([n for n in range(1, tensor.numel() + 1) if tensor.numel() % n == 0])
        dtype = rng.choice([torch.bfloat16, torch.float32])
        return {
            "reshape": lambda x: x.reshape(rows, -1),
            "cast": lambda x: x.to(dtype),
            "unsqueeze": lambda x: x.unsqueeze(at),
            "squeeze": lambda x: x.squeeze(),
        }.get(kind, lambda x: x.contiguous())
    low = rng.randrange(tensor.shape[at])
    high, step = rng.randrange(low + 1, tensor.shape[at] + 1), rng.choice([1, 1, 2])
    other, order = rng.randrange(count), rng.sample(range(count), count)
    return {
        "transpose": lambda x: x.transpose(at, other),
        "slice": lambda x: x[(slice(None),) * at + (slice(low, high, step),)],
        "select": lambda x: x.select(at, low),
        "chunk": lambda x: x.chunk(2, dim=at)[-1],
        "split": lambda x: x.split(2, dim=at)[0],
        "unbind": lambda x: x.unbind(at)[low],
        "permute": lambda x: x.permute(order),
        "cat": lambda x: torch.cat([x, x], dim=at),
    }[kind]


def assert_is(stored, real, rng):
    """Raise unless they are alike. Return True if the stored one is read in ranges."""
    assert (stored.shape, stored.stride(), stored.dtype) == (real.shape, real.stride(), real.dtype)
    lazy = stored.lazy
    assert torch.equal(lazy.read(), real)
    raw = bytes(torch.empty(real.shape, dtype=real.dtype).copy_(real).view(-1).view(torch.uint8).tolist())
    for part in filter(None, (lazy.part, lazy.peek)):
        for _ in range(4):
            low = rng.randrange(len(raw))
            high = rng.randrange(low + 1, len(raw) + 1)
            memory = ctypes.create_string_buffer(high - low)
            part(low, high - low, ctypes.addressof(memory))
            assert memory.raw == raw[low:high]
    return lazy.part is not None


def test_any_chain_of_operations() -> None:
    rng, in_ranges = random.Random(1), 0
    torch.manual_seed(0)
    for _ in range(300):
        shape = [rng.randrange(1, 7) for _ in range(rng.choice([1, 2, 3]))]
        reals = [torch.randn(shape) for _ in range(rng.choice([1, 2, 3]))]
        join, at = rng.choice([torch.cat, torch.stack]), rng.randrange(len(shape))
        real, stored = reals[0], Stored.of(Lazy.of(reals[0]))
        with replaying():
            if len(reals) > 1:
                real, stored = join(reals, dim=at), join([Stored.of(Lazy.of(each)) for each in reals], dim=at)
            for _ in range(rng.randrange(5)):
                act = some_op(rng, real)
                real, stored = act(real), act(stored)
        in_ranges += assert_is(stored, real, rng)
    assert in_ranges > 200


def test_a_large_read_is_cut_and_jumps_over_gaps(monkeypatch) -> None:
    read: list[int] = []
    real = torch.arange(64 * 512, dtype=torch.float32).view(64, 512)
    plain = Lazy.of(real)

    def part(first, nbytes, address):
        read.append(nbytes)
        plain.part(first, nbytes, address)

    monkeypatch.setattr("shardwright.formats.stored._READ_BYTES", 4096)
    monkeypatch.setattr("shardwright.formats.stored._GAP_BYTES", 64)
    lazy = Stored.of(Lazy(real.dtype, (64, 512), plain.read, part=part)).t().contiguous().lazy
    memory = torch.empty(128, 64)  # rows 256..384 of the transpose: a quarter of each row of the file
    lazy.part(256 * 64 * 4, memory.nbytes, memory.data_ptr())
    assert torch.equal(memory, real.t()[256:384])
    assert sum(read) == memory.nbytes and max(read) <= 4096


def test_what_needs_values_is_refused_and_what_needs_a_shape_is_not() -> None:
    real = torch.randn(3, 4)
    stored = torch.nn.Parameter(Stored.of(Lazy.of(real)))
    assert (
        isinstance(stored, torch.nn.Parameter) and waits(stored) and not stored.is_meta and stored.device.type == "cpu"
    )
    assert torch.zeros_like(stored).sum() == 0 and "shape=(3, 4)" in repr(stored)
    acts = (lambda: stored @ torch.ones(4), lambda: stored.sum(), stored.detach().zero_, lambda: stored[0, 0].item())
    for act in (*acts, lambda: torch.zeros(3, 4).copy_(stored), lambda: pickle.dumps(stored)):
        with pytest.raises(sw.Error, match="left in its file"):
            act()
    with pytest.raises(sw.Error, match="takes no other data"):
        stored.data = real
    stored.data = stored.data.bfloat16()
    assert torch.equal(stored.lazy.read(), real.bfloat16())
    twin = copy.deepcopy(stored)
    assert (
        isinstance(twin, torch.nn.Parameter) and twin is not stored and torch.equal(twin.lazy.read(), real.bfloat16())
    )


def test_what_boxes_cannot_express_is_kept_and_read_whole() -> None:
    real = torch.randn(4, 6)
    with replaying():
        stored = Stored.of(Lazy.of(real))
        doubled, both = stored * 2, torch.cat([stored, stored]).reshape(-1)[3:20]
        assert bool((stored == stored).all()) and stored[0, 0].item() == real[0, 0].item()
        target = torch.zeros(4, 6).copy_(stored)
    assert doubled.boxes is None and doubled.what == "mul"
    assert torch.equal(doubled.lazy.read(), real * 2) and torch.equal(target, real)
    assert torch.equal(both.lazy.read(), torch.cat([real, real]).reshape(-1)[3:20])


def test_materialize_reads_it_whole() -> None:
    module, real = torch.nn.Linear(4, 3), torch.randn(3, 4)
    module.weight = torch.nn.Parameter(Stored.of(Lazy.of(real)))
    bias = module.bias
    sw.materialize(module)
    assert type(module.weight) is torch.nn.Parameter and torch.equal(module.weight, real) and module.bias is bias


@pytest.mark.parametrize("call", [sw.materialize, sw.wrap])
def test_one_of_another_device_is_refused(call) -> None:
    module = torch.nn.Linear(4, 3, bias=False)
    module.weight = torch.nn.Parameter(Stored.of(Lazy.of(torch.randn(3, 4)), "cuda:0"))
    with pytest.raises(sw.Error, match="'weight' is on cuda:0, and .* left it in its file: only models of the CPU"):
        call(module)
    assert isinstance(module.weight, Stored)


@pytest.mark.parametrize("name", ["share_memory_", "data_ptr", "numpy", "tolist", "untyped_storage", "storage"])
def test_memory_that_is_not_there_is_refused_or_read(name) -> None:
    module, real = torch.nn.Linear(4, 3, bias=False), torch.randn(3, 4)
    for kind in (Stored, StoredOnDemand):
        module.weight = torch.nn.Parameter(kind.of(Lazy.of(real)), requires_grad=False)
        act = module.share_memory if name == "share_memory_" else getattr(module.weight, name)
        if kind is Stored:
            with pytest.raises(sw.Error, match=f"{name} needs the values of a tensor of shape .3, 4., which"):
                act()
        else:
            act()
            assert type(module.weight) is torch.nn.Parameter and torch.equal(module.weight, real)


def test_what_nobody_asked_for_refuses_nothing() -> None:
    real = torch.randn(3, 4)

    def linear(**held):
        module = torch.nn.Linear(4, 3, bias=False)
        module.weight = torch.nn.Parameter(StoredOnDemand.of(Lazy.of(real.clone())))
        return module

    acts = {
        "forward": lambda m: m(torch.ones(2, 4)).sum().backward(),
        "norm": lambda m: m.weight.norm(),
        "init": lambda m: torch.nn.init.ones_(m.weight),
        "data": lambda m: m.weight.data.mul_(2),
        "view": lambda m: m.weight.detach().t()[1:].zero_(),
        "detached": lambda m: m.weight.detach().zero_(),
        "part": lambda m: m.weight[1:].zero_(),
        "copy": lambda m: torch.zeros(3, 4).copy_(m.weight),
        "load": lambda m: m.load_state_dict({"weight": torch.ones(3, 4)}),
        "pickle": lambda m: pickle.dumps(m),
        "set": lambda m: setattr(m.weight, "data", torch.ones(3, 4)),
        "double": lambda m: m.double(),
        "deepcopy": lambda m: copy.deepcopy(m).weight.data.zero_(),
    }
    for name, act in acts.items():
        module, plain = linear(), torch.nn.Linear(4, 3, bias=False)
        plain.weight = torch.nn.Parameter(real.clone())
        kept = module.weight
        for each in (module, plain):
            with torch.enable_grad() if name == "forward" else torch.no_grad():
                act(each)
        assert module.weight is kept and module.weight.requires_grad, name
        assert torch.equal(sw.materialize(module).weight, plain.weight), name
        assert (plain.weight.grad is None) == (module.weight.grad is None), name
    module = linear()
    view = module.weight.detach()
    module.weight.data.zero_()
    assert torch.equal(view.clone(), torch.zeros(3, 4))


def test_an_old_transformers_is_refused_only_to_who_asked(monkeypatch) -> None:
    kind = type("PreTrainedModel", (), {"from_pretrained": classmethod(lambda cls: "loaded")})
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(__version__="4.57.0"))
    meta_loading._change(types.SimpleNamespace(PreTrainedModel=kind))
    with meta_loading.automatic_loading():
        assert kind.from_pretrained() == "loaded"
        with sw.meta_loading(), pytest.raises(sw.Error, match="needs transformers 5 or later, found 4.57.0"):
            kind.from_pretrained()
    assert kind.from_pretrained() == "loaded"


@pytest.mark.parametrize("zero", [0, 3])
def test_a_buffer_of_no_state_dict_is_filled(zero) -> None:
    module, real = torch.nn.Linear(4, 3, bias=False), torch.randn(3, 4)
    module.weight = torch.nn.Parameter(Stored.of(Lazy.of(real)))
    module.register_buffer("first", module.weight.detach().clone(), persistent=False)
    sw.wrap(module, zero=zero)
    assert type(module.first) is torch.Tensor and torch.equal(module.first, real)


def test_a_file_that_changed_since_is_refused(tmp_path) -> None:
    names = ("weight", "bias")
    sw.save_pretrained(sw.wrap(torch.nn.Linear(4, 3)), tmp_path / "model")
    teacher, stored = torch.nn.Linear(4, 3), stored_tensors(tmp_path / "model")
    for name in names:
        setattr(teacher, name, torch.nn.Parameter(Stored.of(stored[name])))
    sw.save_pretrained(sw.wrap(torch.nn.Linear(4, 3)), tmp_path / "model")
    with pytest.raises(
        sw.CheckpointError, match="model.safetensors' was replaced or written since the model was loaded"
    ):
        sw.materialize(teacher)
    assert all(isinstance(each, Stored) for each in teacher.parameters())
