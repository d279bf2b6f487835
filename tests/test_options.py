"""Laws of options: each is validated before anything is created, and an option without effect is refused."""

import gc
import re
import types
import weakref
from pathlib import Path

import pytest
import shardwright as sw
import torch
from shardwright.compress.make import make_state
from shardwright.integrations.deepspeed import keys as deepspeed_keys
from shardwright.integrations.deepspeed.config import optimizer_class
from shardwright.integrations.settings import read_settings
from shardwright.optim.master_weights import has_own_masters
from shardwright.optim.rules import rule_of
from shardwright.options import compress, compressors, options

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"reduce": "avg", "compress": sw.Int8()}, ValueError, "reduce must be"),
        ({"compress": "x", "reduce": "sum"}, TypeError, "compress must be"),
        ({"compress": sw.Int8(), "reduce": "sum"}, NotImplementedError, "computes the mean"),
        ({"precision": 17}, ValueError, "precision must be"),
        ({"precision": {"": 17}}, ValueError, r"precision\[''\] must be"),
        ({"clip_grad_norm": -1.0}, ValueError, "clip_grad_norm must be None or a number above 0, got"),
        ({"zero": 4}, ValueError, "zero must be 0, 1, 2 or 3"),
        ({"units": "size"}, ValueError, r"units= requires zero=3, got zero=0"),
        ({"precision": torch.bfloat16}, ValueError, "got torch.bfloat16: did you mean 'bf16'"),
        ({"precision": "float16"}, ValueError, "did you mean 'fp16'"),
        ({"compress": "int8"}, TypeError, r"got 'int8': did you mean sw.Int8\(\)\?"),
        ({"compress": sw.PowerSGD}, TypeError, r"did you mean sw.PowerSGD\(\)\?"),
    ],
)
def test_a_value_out_of_range_is_named(given, kind, words):
    with pytest.raises(kind, match=words):
        sw.Options(**given)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        *((name, "zero") for name in ("zero_stage", "stage", "zero_optimization", "sharding_strategy", "Zero")),
        *((name, "bucket_cap_mb") for name in ("bucket_cap", "bucket_size", "bucket_cap_mib")),
        *((name, "gradient_as_bucket_view") for name in ("gradient_as_bucket", "gradients_as_bucket_view")),
        *(
            ("world_size", "process_group"),
            ("group", "process_group"),
            ("mesh", "device_mesh"),
            ("precission", "precision"),
        ),
        *(
            ("max_grad_norm", "clip_grad_norm"),
            ("timeout", "timeout_s"),
            ("comm_hook", "compress"),
            ("offlod", "offload"),
        ),
    ],
)
def test_an_unknown_option_offers_the_nearest_name_also_of_other_libraries(name, ours):
    for call in (lambda: sw.wrap(torch.nn.Linear(3, 3), **{name: 1}), lambda: sw.Options(**{name: 1})):
        with pytest.raises(TypeError, match=f"unknown option '{name}': did you mean '{ours}'"):
            call()


def test_checkpoints_and_compressors_offer_names_too():
    module = torch.nn.Linear(3, 3)
    for call, words in [
        (
            lambda: sw.Checkpointer("unused", module, keep=3),
            "Checkpointer: unknown option 'keep': did you mean 'keep_last'",
        ),
        (lambda: sw.save("unused", module, exist_ok=True), "save: unknown option 'exist_ok': did you mean 'overwrite'"),
        (lambda: sw.PowerSGD(matrix_approximation_rank=2), "PowerSGD: unknown option .*: did you mean 'rank'"),
        (lambda: sw.Int8(block_size=64), "Int8: unknown option 'block_size': did you mean 'block'"),
        (lambda: sw.Precision(params_dtype=torch.float32), "Precision: .* did you mean 'param_dtype'"),
        (lambda: sw.shard_optimizer(module, None, partitioning="flat"), "did you mean 'partition'"),
    ]:
        with pytest.raises(TypeError, match=words):
            call()


def test_arguments_in_the_wrong_place_are_told_where_they_belong():
    module = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(module.parameters())
    for call, words in [
        (lambda: sw.wrap(module, optimizer, 2), "wrap: options are passed by name, such as zero=, got 2 by position"),
        (lambda: sw.wrap(optimizer, module), r"got SGD: the module comes first, sw.wrap\(module, optimizer\)"),
        (lambda: sw.wrap(torch.nn.Linear, optimizer), "needs a torch.nn.Module, got the class Linear"),
        (
            lambda: sw.wrap(module, torch.optim.SGD),
            r"got the class SGD: make the optimizer first, SGD\(module.parameters\(\)\)",
        ),
        (
            lambda: sw.wrap(module, module.parameters(), zero=1),
            "got generator: make one of these parameters, as in torch",
        ),
        (lambda: sw.wrap(module, 2), "got int: pass options by name, such as zero=2"),
    ]:
        with pytest.raises(TypeError, match=words):
            call()


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("warp", "wrap"),
        ("Wrap", "wrap"),
        ("FSDP", "fully_shard"),
        ("DDP", "DistributedDataParallel"),
        ("stat", "stats"),
    ],
)
def test_an_unknown_name_of_the_package_offers_the_nearest(name, ours):
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': did you mean '{ours}'"):
        getattr(sw, name)
    assert not hasattr(sw, "__wrapped__")


def test_a_call_that_needs_a_wrapped_module_says_what_to_pass():
    module = torch.nn.Linear(3, 3)
    calls = (
        sw.full_gradients,
        sw.average_gradients,
        lambda m: sw.shard_optimizer(m, None),
        lambda m: sw.load_full_state_dict(m, {}),
    )
    for call in calls:
        with pytest.raises(
            sw.Error, match="needs a wrapped module, .* got Linear: call sw.wrap first, and pass the module"
        ):
            call(module)
    with pytest.raises(sw.Error, match="stats needs a module that is wrapped"):
        sw.stats(module)
    wrapped = sw.wrap(module)
    with pytest.raises(sw.Error, match="zero >= 1, got zero=0: use the optimizer as it is"):
        sw.shard_optimizer(wrapped, None)


def test_stats_are_those_of_one_model():
    models = [sw.wrap(torch.nn.Linear(3, 3)), sw.wrap(torch.nn.Bilinear(2, 2, 2))]
    assert [sw.stats(model)["models"][0]["module"] for model in models] == ["Linear", "Bilinear"]
    assert sw.stats(sw.unwrap(models[0])) == sw.stats(models[0]) and len(sw.stats(models[0])["communicators"]) == 1
    assert len(sw.stats()["models"]) >= 2


def test_torchs_mixed_precision_is_an_option_of_wrap():
    from types import SimpleNamespace

    policy = SimpleNamespace(param_dtype=torch.bfloat16, reduce_dtype=None, buffer_dtype=None)
    module = torch.nn.Linear(3, 3)
    wrapped, _ = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), zero=2, mixed_precision=policy)
    assert wrapped(torch.ones(1, 3)).dtype == torch.bfloat16 and wrapped.mixed_precision is policy
    for given, words in [({"precision": "bf16"}, "both given"), ({"compress": sw.Int8()}, "both set the wire format")]:
        with pytest.raises(ValueError, match=words):
            sw.wrap(torch.nn.Linear(3, 3), mixed_precision=policy, **given)


def test_clipping_needs_the_optimizer():
    with pytest.raises(ValueError, match=r"clip_grad_norm=1.0 needs the optimizer"):
        sw.wrap(torch.nn.Linear(3, 3), clip_grad_norm=1.0)


@pytest.mark.parametrize("option", [{"clip_grad_norm": 1.0}, {"partition": "tensor"}])
def test_an_option_of_wrap_is_refused_where_it_has_no_effect(option):
    with pytest.raises(TypeError, match="is no option of DistributedDataParallel"):
        sw.DistributedDataParallel(torch.nn.Linear(3, 3), **option)
    with pytest.raises(TypeError, match="is no option of fully_shard"):
        sw.fully_shard(torch.nn.Linear(3, 3), **option)


def test_a_stage_is_no_option_of_fully_shard():
    with pytest.raises(TypeError, match="zero is no option of fully_shard"):
        sw.fully_shard(torch.nn.Linear(3, 3), zero=2)


def refused():
    module = torch.nn.Linear(3, 3)
    with pytest.raises(
        ValueError, match="LBFGS steps on all parameters as one vector and cannot be sliced: use zero=0"
    ):
        sw.wrap(module, torch.optim.LBFGS(module.parameters()), zero=1)
    return weakref.ref(module)


def test_a_refusal_keeps_no_module_alive():
    """A traceback holds its frames. A frame that held the exception would form a circle, and live until a collection."""
    refused()  # what torch imports at first use holds frames, too
    gc.collect()
    gc.disable()
    try:
        assert refused()() is None
    finally:
        gc.enable()


def test_help_of_wrap_describes_every_option():
    described = set(re.findall(r"^    ([a-z_, ]+) : ", sw.wrap.__doc__, re.MULTILINE))
    names = {name for line in described for name in line.split(", ")}
    assert names >= {*options.FIELDS, "module", "optimizer", "mixed_precision"} and "**options" not in sw.wrap.__doc__


def test_each_compressor_is_known_wherever_compressors_are_named():
    """A compressor has a class, a name in files, a hook, and a row in the documents."""
    known = {kind.__name__ for kind in subclasses(compress.Compressor) if not kind.__name__.startswith("_")}
    made = {type(each).__name__ for each in compressors.COMPRESSORS.values()}
    assert (
        known == made == set(compress.KINDS) == {type(compressors.COMPRESSORS[name.lower()]).__name__ for name in known}
    )
    text = " ".join((ROOT / "docs" / name).read_text() for name in ("communication.md", "features.md"))
    for name, each in compressors.COMPRESSORS.items():
        assert f"{type(each).__name__}" in text and hasattr(sw, type(each).__name__)
        assert name in deepspeed_keys.KEYS["shardwright"].text
        assert read_settings(f"compress={name}")["compress"] == each
        assert make_state(each, types.SimpleNamespace(group=None)).codec


def test_each_optimizer_of_ours_is_known_wherever_optimizers_are_named():
    """A fused optimizer is torch's class with our step, may be sliced, keeps its masters, and is in the documents."""
    kinds = [each for name in sw.optim.__all__ if isinstance(each := getattr(sw.optim, name), type)]
    for kind in kinds:
        made = kind([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1)
        assert rule_of(made) is not None and has_own_masters(made)
        assert issubclass(
            kind, getattr(torch.optim, kind.__name__) if kind is not sw.optim.Muon else torch.optim.Optimizer
        )
        assert optimizer_class(f"sw.optim.{kind.__name__}") is kind
        assert f"{kind.__name__}`" in (ROOT / "docs" / "features.md").read_text()


def subclasses(kind):
    return {kind}.union(*(subclasses(each) for each in kind.__subclasses__())) - {compress.Compressor}


#: calls of users with an object of a wrong kind -> the sentence that names the argument, its range and the value
WRONG_KINDS = {
    "wrap process_group": (lambda m, f: sw.wrap(m, process_group="world"), TypeError, "process_group must be a .* got 'world'"),
    "wrap device": (lambda m, f: sw.wrap(m, zero=3, device="gpu"), ValueError, "device must name a GPU, .* got 'gpu'"),
    "fully_shard mesh": (lambda m, f: sw.fully_shard(m, mesh="dp"), TypeError, "mesh must be a DeviceMesh or None, got 'dp'"),
    "fully_shard offload": (
        lambda m, f: sw.fully_shard(m, offload_policy=True),
        TypeError,
        "offload_policy must be an OffloadPolicy of torch's or None, got True",
    ),
    "checkpointer": (lambda m, f: sw.Checkpointer(3, m), TypeError, "directory must be a path, .* got 3"),
    "save": (lambda m, f: sw.save(3, m), TypeError, "path must be a path, .* got 3"),
    "load": (lambda m, f: sw.load(None, m), TypeError, "path must be a path, .* got None"),
    "load a file": (lambda m, f: sw.load(__file__, m), sw.CheckpointError, "is a file, and a checkpoint is a folder"),
    "rename": (lambda m, f: sw.load(f, m, rename=3), TypeError, "rename must be a mapping .* got 3"),
    "materialize": (lambda m, f: sw.materialize("m"), TypeError, "materialize needs a torch.nn.Module, got str"),
    "materialize init": (
        lambda m, f: sw.materialize(torch.nn.Linear(2, 2, device="meta"), init="normal"),
        TypeError,
        "init must be a function of a module, got 'normal'",
    ),
    "clip": (lambda m, f: sw.clip_grad_norm_(m, "1"), TypeError, "max_norm must be a number, at least 0, got '1'"),
    "tokens": (lambda m, f: sw.metrics(sw.wrap(m), tokens="many"), ValueError, "tokens must be at least 1 .* got 'many'"),
    "steps": (lambda m, f: next(sw.steps(m, 3)), TypeError, "checkpointer must be a sw.Checkpointer, got Linear"),
    "survive": (lambda m, f: sw.survive(3, m), TypeError, "train must be a function of a step, got 3"),
    "sampler": (lambda m, f: sw.elastic.Sampler(64, 16), TypeError, "batches must be what .* got 16"),
    "register": (
        lambda m, f: sw.optim.register(torch.optim.SGD(m.parameters(), lr=0.1), partition="flat"),
        TypeError,
        "got an object of SGD$",
    ),
    "init_process_group": (lambda m, f: sw.init_process_group(timeout=5), TypeError, "timeout must be a .* got 5"),
    "deepspeed": (
        lambda m, f: sw.deepspeed.plan({"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": "high"}}}, 1),
        ValueError,
        "optimizer.params.lr must be a number, got 'high'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_KINDS)
def test_an_object_of_a_wrong_kind_is_a_sentence_that_names_its_argument(case, tmp_path):
    call, kind, words = WRONG_KINDS[case]
    with pytest.raises(kind, match=words) as caught:
        call(torch.nn.Linear(3, 3), tmp_path)
    assert "\n" not in str(caught.value)


def test_a_class_of_units_that_no_module_has_is_told(caplog):
    sw.wrap(torch.nn.Linear(3, 3), zero=3, share_parameters=False, units=torch.nn.Conv2d)
    assert "units: Linear holds no torch.nn.modules.conv.Conv2d: it is gathered whole" in caplog.text


def test_fully_shard_refuses_a_module_that_torchs_has_cut():
    from torch.distributed.fsdp import fully_shard

    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    sw.init_process_group() if not torch.distributed.is_initialized() else None
    fully_shard(module[0])
    with pytest.raises(sw.Error, match="of which torch's fully_shard has cut '0' already"):
        sw.fully_shard(module)


def test_an_ignored_parameter_of_another_module_is_named(caplog):
    sw.wrap(torch.nn.Linear(2, 2), ignored_params=[torch.nn.Parameter(torch.ones(3))])
    assert "ignored_params: a parameter of shape (3,) is not one of Linear, so it has no effect" in caplog.text


def test_a_trace_inside_another_profiler_leaves_autograd_out(tmp_path, caplog):
    sw.wrap(torch.nn.Linear(3, 3))
    with torch.profiler.profile(), sw.trace(tmp_path / "trace.json"):
        pass
    assert "another profiler of torch's is on" in caplog.text
    model = sw.wrap(torch.nn.Linear(3, 3))
    with sw.trace(tmp_path / "around.json"), torch.profiler.profile():
        model(torch.ones(2, 3))
    assert "another profiler of torch's has ended it" in caplog.text


def test_an_interface_that_is_none_is_named(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("[enforce fail at device.cc:84] ifa != nullptr. Unable to find address for: eth9")

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME must name a network interface .*\blo\b.*, got 'eth9'"):
        sw.init_process_group()


def test_a_checkpointer_of_the_optimizer_that_wrap_was_given_says_which_to_pass(tmp_path):
    module = torch.nn.Linear(3, 3)
    given = torch.optim.AdamW(module.parameters())
    model, optimizer = sw.wrap(module, given, zero=2)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    with sw.Checkpointer(tmp_path, model, given) as checkpoints:
        with pytest.raises(sw.CheckpointError, match="at zero >= 1 pass the optimizer that sw.wrap"):
            checkpoints.save(1)
