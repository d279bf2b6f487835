"""Law: Lightning's Trainer and Fabric with our strategies have the losses, metrics and weights of DDPStrategy at every stage, to the
bit at 2 ranks. Their checkpoints hold the same at every stage, resume at any other stage and number of ranks, and load
in plain Lightning."""

import functools
import importlib.util
import pathlib
import subprocess
import sys

import internals
import pytest
import torch
from harness import LONG, in_turn
from oracle.fold import bits_equal
from peer import PEER, engine
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer

if importlib.util.find_spec("lightning") is None:
    pytest.skip("lightning is not installed", allow_module_level=True)
pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

RANKS = 3


def assert_same(left, right, what=None):
    left, right = list(left), list(right)
    assert len(left) == len(right) and all(map(bits_equal, left, right)), what


def assert_near(left, right, what=None, **tolerance):
    for a, b in zip(left, right, strict=True):
        assert torch.allclose(a.double(), b.double(), **tolerance), (what, (a.double() - b.double()).abs().max())


def results_of(trainer, module, data, evaluates):
    """Return losses, metrics and weights; `evaluates`: also those of the other functions of the Trainer."""
    found = [trainer.callback_metrics["val"]] if "val" in trainer.callback_metrics else []
    weights = [value.detach().clone() for value in module.state_dict().values()]
    if not evaluates:
        return module.losses, found, weights
    found += [each["val"] for each in trainer.validate(module, datamodule=data, verbose=False)]
    found += [each["test"] for each in trainer.test(module, datamodule=data, verbose=False)]
    return (
        module.losses,
        [torch.as_tensor(each) for each in found] + trainer.predict(module, datamodule=data),
        weights,
    )


def train_at_every_stage(
    rank, world_size, folder, *, build="Subject", exact=True, stock="ddp", callbacks=(), evaluates=False, **options
):
    """`exact`: at 2 ranks the bits are DDPStrategy's."""
    import lightning_subjects as subjects

    found, stages = {}, subjects.STAGES
    # in the quick form, stage 0 and one more; other trainings have the rest
    number = world_size + len(build) + len(options) + sum(map(len, [*options, *callbacks]))
    stages = {name: stages[name] for name in ["0", *in_turn([*stages][1:], number, of=4)]}
    for name, strategy in {"stock": stock, **stages}.items():
        made = [getattr(subjects, each)() for each in callbacks]
        fitted = subjects.fit(strategy, folder, getattr(subjects, build), callbacks=made, **options)
        found[name] = results_of(*fitted, evaluates)
        assert all(value.requires_grad for value in fitted[1].parameters()), name
    losses, metrics, weights = found.pop("stock")
    assert len(losses) >= 8 and len(set(losses)) > 4
    for name, (own, own_metrics, own_weights) in found.items():
        if exact and world_size == 2:
            assert own == losses, name
            assert_same([*own_metrics, *own_weights], [*metrics, *weights], name)
        tolerance = dict(rtol=0.1, atol=0.1) if options.get("precision") == "bf16-true" else dict(rtol=1e-4, atol=1e-5)
        assert_near([*own_metrics, *own_weights], [*metrics, *weights], name, **tolerance)
        assert own == found["0"][0], name
        assert_same([*own_metrics, *own_weights], [*found["0"][1], *found["0"][2]], name)


def files_of_every_stage(rank, world_size, folder):
    """The Trainer's files depend on no stage, and hold what DDPStrategy's hold."""
    import lightning_subjects as subjects

    found, stages = {}, dict(in_turn([*subjects.STAGES.items()], 0))
    for name, strategy in {"stock": "ddp", **stages}.items():
        at = f"{folder}/{name}"
        plugins = [subjects.AsyncCheckpointIO()] if name.startswith("3") else []
        subjects.fit(strategy, at, enable_checkpointing=True, callbacks=[subjects.keep_last(at)], plugins=plugins)
        found[name] = subjects.saved(f"{at}/epoch=0.ckpt")
    stock = found.pop("stock")
    for name, file in found.items():
        assert file.keys() == stock.keys(), name
        assert list(file["state_dict"]) == list(stock["state_dict"]), name
        assert_same(file["state_dict"].values(), stock["state_dict"].values(), name)
        (own,), (theirs,) = file["optimizer_states"], stock["optimizer_states"]
        assert own["param_groups"] == theirs["param_groups"] and own["state"].keys() == theirs["state"].keys(), name
        for number, state in theirs["state"].items():
            assert_same([own["state"][number][key] for key in state], state.values(), (name, number))
        assert file["lr_schedulers"] == stock["lr_schedulers"] and file["loops"] == stock["loops"], name


def resume_at_every_stage(rank, world_size, folder):
    """A run that goes on at another stage has the bits of an uninterrupted one. The stock class's files serve, too."""
    import lightning_subjects as subjects

    names = ["stock", *subjects.STAGES][:: 1 if LONG else 2]
    for number, name in enumerate(names):
        at = f"{folder}/{name}"
        strategy = subjects.STAGES.get(name, "ddp")
        _, module, _ = subjects.fit(strategy, at, enable_checkpointing=True, callbacks=[subjects.keep_last(at)])
        other = names[number - 1]
        again = subjects.STAGES.get(other, "ddp")
        _, resumed, _ = subjects.fit(again, f"{at}-{other}", ckpt_path=f"{at}/epoch=0.ckpt")
        assert resumed.losses == module.losses[len(module.losses) // 2 :], (name, other)
        assert_same(resumed.state_dict().values(), module.state_dict().values(), (name, other))


def save_for_one_rank(rank, world_size, folder):
    import lightning_subjects as subjects

    options = dict(enable_checkpointing=True, callbacks=[subjects.keep_last(folder)])
    subjects.fit(subjects.STAGES["2"], folder, epochs=1, accumulate_grad_batches=2, **options)


def resume_on_one_rank(rank, world_size, folder):
    """The file of zero=2 at 2 ranks goes on at one rank, with our strategy and in plain Lightning, with the same bits."""
    import lightning_subjects as subjects

    path, options = (
        f"{folder}/epoch=0.ckpt",
        dict(use_distributed_sampler=False),
    )  # it shuffles, and is DDPStrategy's alone
    _, plain, _ = subjects.fit("auto", folder, ckpt_path=path, **options)
    assert plain.trainer.global_step == 15 and plain.losses
    for name in ("0", "3"):
        _, resumed, _ = subjects.fit(subjects.STAGES[name], folder, ckpt_path=path, **options)
        assert resumed.losses == plain.losses, name
        assert_same(resumed.state_dict().values(), plain.state_dict().values(), name)
    loaded = subjects.Subject.load_from_checkpoint(path, weights_only=False)
    assert_same(loaded.state_dict().values(), subjects.saved(path)["state_dict"].values())


def folders_at_every_stage(rank, world_size, folder):
    """With state_dict_type="sharded" ModelCheckpoint writes folders of slices, which go on at any stage with the same bits."""
    import lightning_subjects as subjects

    names = list(subjects.STAGES)[:: 1 if LONG else 4]
    for number, name in enumerate(names):
        at, other = f"{folder}/{name}", names[number - 1]
        sharded = {**subjects.STAGES[name], "state_dict_type": "sharded"}
        watch = subjects.WatchSaves(at, "{epoch}", save_top_k=-1)
        trainer, module, data = subjects.fit(sharded, at, enable_checkpointing=True, callbacks=[watch])
        assert watch.was_writing == [f"{at}/epoch=0.ckpt", f"{at}/epoch=1.ckpt"]  # the call returned before the end
        assert all(pathlib.Path(at, f"epoch={epoch}.ckpt", "MANIFEST.json").is_file() for epoch in (0, 1)), name
        kinds = ["full", "sharded"] if LONG else [["full", "sharded"][number % 2]]  # what is loaded depends on the path
        for kind in kinds:
            again = {**subjects.STAGES[other], "state_dict_type": kind}
            _, resumed, _ = subjects.fit(again, f"{at}-{other}", ckpt_path=f"{at}/epoch=0.ckpt")
            assert resumed.losses == module.losses[len(module.losses) // 2 :], (name, other, kind)
            assert_same(resumed.state_dict().values(), module.state_dict().values(), (name, other, kind))
    with torch.no_grad():
        [p.zero_() for p in module.parameters()]
    trainer.validate(module, datamodule=data, ckpt_path=f"{at}/epoch=1.ckpt", verbose=False)
    assert_same(resumed.state_dict().values(), module.state_dict().values(), "validated")
    sharded = {"zero": 3, "state_dict_type": "sharded"}
    stock = f"{folder}/stock"
    subjects.fit("ddp", stock, enable_checkpointing=True, callbacks=[subjects.keep_last(stock)])
    _, resumed, _ = subjects.fit(sharded, folder, ckpt_path=f"{stock}/epoch=0.ckpt")
    assert_same(
        resumed.state_dict().values(), subjects.saved(f"{stock}/epoch=1.ckpt")["state_dict"].values(), "of a file"
    )
    newest = subjects.pl.callbacks.ModelCheckpoint(
        f"{folder}/newest", "{epoch}", save_last="link", every_n_train_steps=1
    )
    subjects.fit(sharded, folder, enable_checkpointing=True, callbacks=[newest], max_steps=3)
    if rank == 0:  # which removes older ones
        assert sorted(each.name for each in pathlib.Path(folder, "newest").iterdir()) == ["epoch=0.ckpt", "last.ckpt"]
    assert subjects.fit(sharded, folder, ckpt_path=f"{folder}/newest/last.ckpt", max_steps=4)[0].global_step == 4


def folders_are_refused_on_all_ranks(rank, world_size, folder):
    import lightning_subjects as subjects

    sharded = {"zero": 2, "state_dict_type": "sharded"}
    with pytest.raises(ValueError, match="state_dict_type must be 'full' or 'sharded', got 'local'"):
        subjects.ShardwrightStrategy(state_dict_type="local")
    pathlib.Path(folder, "mine", "epoch=1.ckpt", "theirs").mkdir(parents=True, exist_ok=True)
    for callbacks, build, sentence in (
        ([subjects.keep_last(f"{folder}/mine", enable_version_counter=False)], "Subject", "has no MANIFEST.json"),
        (
            [subjects.keep_last(f"{folder}/ema"), subjects.ema()],
            "Subject",
            "put weights into the checkpoint's state_dict",
        ),
        ([subjects.keep_last(f"{folder}/two")], "Adversaries", "takes one optimizer, got 2"),
        ([subjects.keep_last(f"{folder}/odd")], "KeepsAnObject", "checkpoint.mine is a object"),
    ):
        with pytest.raises((engine.CheckpointError, ValueError), match=sentence):
            build = getattr(subjects, build)
            subjects.fit(sharded, folder, build, enable_checkpointing=True, callbacks=callbacks)
    assert pathlib.Path(folder, "mine", "epoch=0.ckpt", "MANIFEST.json").is_file()  # the save before was waited for


def save_folders_for_one_rank(rank, world_size, folder):
    import lightning_subjects as subjects

    for kind in ("full", "sharded"):
        callbacks = [subjects.keep_last(f"{folder}/{kind}")]
        subjects.fit(
            {"zero": 2, "state_dict_type": kind}, folder, epochs=1, enable_checkpointing=True, callbacks=callbacks
        )


def resume_folders_on_one_rank(rank, world_size, folder):
    import lightning_subjects as subjects

    found = []
    for kind in ("full", "sharded"):
        path, options = f"{folder}/{kind}/epoch=0.ckpt", {"zero": 1, "state_dict_type": kind}
        found.append(subjects.fit(options, folder, ckpt_path=path, use_distributed_sampler=False)[1])
    assert found[0].losses == found[1].losses and found[0].losses
    assert_same(*(each.state_dict().values() for each in found))


def save_after_the_fit(rank, world_size, folder):
    """The Trainer saves after its fit and fits once more."""
    import lightning_subjects as subjects

    for name, strategy in in_turn([*subjects.STAGES.items()], 0):
        trainer, module, data = subjects.fit(strategy, folder, epochs=1)
        trainer.save_checkpoint(f"{folder}/{name}.ckpt")
        file = subjects.saved(f"{folder}/{name}.ckpt")
        assert_same(file["state_dict"].values(), module.state_dict().values(), name)
        assert len(file["optimizer_states"][0]["state"]) == 8, name
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, datamodule=data)
        assert trainer.current_epoch == 2, name


def masters_are_not_rounded(rank, world_size, folder):
    """A low-precision module has float32 parameters under precision=; a resumed run has their bits."""
    import lightning_subjects as subjects

    class Low(subjects.Subject):
        def __init__(self):
            super().__init__()
            self.net.to(torch.bfloat16)

        def _loss(self, x):
            return self.net(x.to(torch.bfloat16)).float().square().mean()

    for zero in (0, 3):
        strategy, at = {"zero": zero, "precision": "bf16"}, f"{folder}/{zero}"
        options = dict(enable_checkpointing=True, callbacks=[subjects.keep_last(at)])
        _, whole, _ = subjects.fit(strategy, at, Low, limit_val_batches=0, **options)
        _, resumed, _ = subjects.fit(strategy, at, Low, limit_val_batches=0, ckpt_path=f"{at}/epoch=0.ckpt")
        assert resumed.losses == whole.losses[len(whole.losses) // 2 :], zero
        assert {value.dtype for value in whole.parameters()} == {torch.float32}
        assert_same(resumed.state_dict().values(), whole.state_dict().values(), zero)


def evaluate_in_the_precision_of_the_fit(rank, world_size, folder):
    """validate, test and predict outside of a fit have the policy's bits, and change no dtype."""
    import lightning_subjects as subjects

    seen = []

    class Subject(subjects.Subject):
        def __init__(self):
            super().__init__()
            self.net[0] = torch.nn.Identity()

        def _loss(self, x):
            seen.append(self.net(x).dtype)
            return super()._loss(x)

    trainer, module, data = subjects.fit({"zero": 3, "precision": "bf16"}, folder, Subject, epochs=1)
    fitted = trainer.callback_metrics["val"].clone()
    for strategy in ({"zero": 3, "precision": "bf16"}, {"precision": "bf16"}):
        seen.clear()
        trainer = subjects.trainer(strategy, folder)
        (found,) = trainer.validate(module, datamodule=data, verbose=False)
        assert bits_equal(torch.tensor(found["val"]), fitted.double().float()) and set(seen) == {torch.bfloat16}
        (outputs,) = {each.dtype for each in trainer.predict(module, datamodule=data)}
        assert outputs is torch.bfloat16
        assert {value.dtype for value in module.parameters()} == {torch.float32}
        assert trainer.strategy.model is None or trainer.strategy.model is module
    assert module.net(torch.zeros(2, 7)).dtype is torch.float32
    low = Subject()
    low.net.to(torch.bfloat16)
    trainer.predict(low, datamodule=data)
    assert low.net[1].weight.dtype is torch.bfloat16


def fit_experts(rank, world_size, folder):
    """A module whose experts other ranks average has an engine for them, which ends with the fit, too."""
    import expert_subjects as experts
    import lightning_subjects as subjects

    mesh, engines = experts.mesh_of(world_size), []

    class Experts(subjects.Subject):
        def __init__(self):
            super().__init__()
            self.net = experts.distributed(mesh)
            self.inlet = torch.nn.Linear(7, experts.WIDTH)

        def _loss(self, x):
            found, balance = self.net(self.inlet(x))
            return found.square().mean() + 0.01 * balance

    class Watch(subjects.pl.Callback):
        def on_train_start(self, trainer, module):
            engines.extend(internals.replicas(trainer.model))

    strategy = {"zero": 3, "share_parameters": False, "groups": {"net.layers.*.experts": mesh["dp_mod_ep"]}}
    trainer, module, _ = subjects.fit(strategy, folder, Experts, epochs=1, callbacks=[Watch()])
    trainer.save_checkpoint(f"{folder}/experts.ckpt")
    assert len(engines) == 2 and all(each.retired for each in engines)
    assert all(p.numel() and bool(torch.isfinite(p.detach()).all()) for p in module.parameters())


def load_while_a_folder_is_written(rank, world_size, folder):
    """A load waits for the save that is being written: it may be the folder that is asked for."""
    import lightning_subjects as subjects

    found, path = [], f"{folder}/now.ckpt"

    class SavesAndLoads(subjects.pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            strategy = trainer.strategy
            trainer.save_checkpoint(path)
            assert strategy._folders.writing == path
            found.append(strategy.load_checkpoint(path)["global_step"])
            assert strategy._folders.writing == ""

    sharded = {"zero": 2, "state_dict_type": "sharded"}
    subjects.fit(sharded, folder, callbacks=[SavesAndLoads()], max_steps=2, enable_checkpointing=True)
    assert found == [1, 2]


def fit_with_hooks(rank, world_size, folder):
    """A communication hook of the strategy is registered on CPUs, too. What programs read of DDPStrategy is there."""
    import lightning_subjects as subjects

    names = []
    for build in (subjects.ShardwrightStrategy, subjects.FabricStrategy):
        made = build(zero=1, find_unused_parameters=True, start_method="spawn")
        assert made._ddp_kwargs == {"find_unused_parameters": True}

    class Watch(subjects.pl.Callback):
        def on_train_end(self, trainer, module):
            names.append(trainer.model._get_ddp_logging_data()["comm_hook"])

    for zero in (0, 2):
        for wrapper in (None, default_hooks.fp16_compress_wrapper):
            strategy = {"zero": zero, "ddp_comm_hook": default_hooks.allreduce_hook, "ddp_comm_wrapper": wrapper}
            subjects.fit(strategy, folder, epochs=1, callbacks=[Watch()])
    assert names == 2 * [
        "allreduce_hook",
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook).__qualname__,
    ]


def fit_odd_modules(rank, world_size, folder):
    """A module without optimizer, one that returns a LightningOptimizer, and a static graph by hand."""
    import lightning_subjects as subjects

    class NoOptimizer(subjects.Subject):
        def configure_optimizers(self):
            return None

    class Lightnings(subjects.Subject):
        def configure_optimizers(self):
            return subjects.LightningOptimizer(torch.optim.AdamW(self.parameters(), lr=self.rate))

    for zero in (0, 2):
        trainer, module, _ = subjects.fit({"zero": zero}, folder, NoOptimizer)
        assert_same([p.detach() for p in module.parameters()], subjects.initial(), zero)
        trainer, module, _ = subjects.fit({"zero": zero}, folder, Lightnings)
        assert module.losses[-1] < module.losses[0] / 2 and trainer.global_step == len(module.losses), zero
        trainer, module, _ = subjects.fit({"zero": zero, "static_graph": True}, folder, subjects.ByHand)
        assert trainer.global_step == len(module.losses) // 2, zero


def step_on_whole_tensors(rank, world_size, folder):
    """An optimizer that is not elementwise has partition="tensor"."""
    import lightning_subjects as subjects

    build = functools.partial(subjects.Subject, torch.optim.Adafactor)
    _, stock, _ = subjects.fit("ddp", folder, build)
    for zero in (1, 3):
        _, module, _ = subjects.fit({"zero": zero, "partition": "tensor"}, folder, build)
        assert module.losses == stock.losses, zero
        assert_same(module.state_dict().values(), stock.state_dict().values(), zero)


def clip_values(rank, world_size, folder):
    """Clipping by value has DDPStrategy's weights."""
    import lightning_subjects as subjects

    options = dict(gradient_clip_val=0.01, gradient_clip_algorithm="value")
    _, stock, _ = subjects.fit("ddp", folder, **options)
    for name, strategy in in_turn([*subjects.STAGES.items()], 1):
        _, module, _ = subjects.fit(strategy, folder, **options)
        assert_same(module.state_dict().values(), stock.state_dict().values(), name)


def fabric_at_every_stage(rank, world_size, folder):
    import lightning_subjects as subjects

    clips = [None, {"max_norm": 0.1}, {"clip_val": 0.01}]
    for number, clip in enumerate(clips):
        losses, weights = subjects.fabric_fit("ddp", f"{folder}/stock-{number}", clip=clip)
        first = None
        for name in in_turn([*subjects.STAGES], number):
            strategy = subjects.STAGES[name]
            own, own_weights = subjects.fabric_fit(strategy, f"{folder}/{name}-{number}", clip=clip)
            first = first or (own, own_weights)
            if clip is None or "clip_val" in clip:
                assert own == losses, name
                assert_same(own_weights, weights, name)
            assert_near(own_weights, weights, name, rtol=1e-4, atol=1e-5)
            assert own == first[0], name
            assert_same(own_weights, first[1], name)
    more = range(3, 5)
    expected = subjects.fabric_fit("ddp", f"{folder}/stock-0", resumed=True, steps=more)
    names = in_turn([*subjects.STAGES], 0)
    for number, name in enumerate(names):
        found = subjects.fabric_fit(subjects.STAGES[name], f"{folder}/{names[number - 1]}-0", resumed=True, steps=more)
        assert found[0] == expected[0], name
        assert_same(found[1], expected[1], name)


def fabric_folders_at_every_stage(rank, world_size, folder):
    """With state_dict_type="sharded" fabric.save() writes folders, which go on at any stage as files do."""
    import lightning_subjects as subjects

    names, more = ("1", "3", "3 private", "0"), range(3, 5)
    subjects.fabric_fit("ddp", f"{folder}/stock")
    expected = subjects.fabric_fit("ddp", f"{folder}/stock", resumed=True, steps=more)
    for number, name in enumerate(names[:: 1 if LONG else 2]):
        path, sharded = f"{folder}/{name}", {**subjects.STAGES[name], "state_dict_type": "sharded"}
        subjects.fabric_fit(sharded, path)
        assert pathlib.Path(path, "MANIFEST.json").is_file()
        subjects.fabric_fit(sharded, path)  # in its place
        losses, weights = subjects.fabric_fit(subjects.STAGES[names[number - 1]], path, resumed=True, steps=more)
        assert losses == expected[0], name
        assert_same(weights, expected[1], name)
    own = subjects.fabric({"zero": 2, "state_dict_type": "sharded"})
    model, scheduled = own.setup(subjects.mlp()), torch.optim.SGD([torch.zeros(1)], 0.5)
    schedule = torch.optim.lr_scheduler.StepLR(scheduled, 3)
    state = {"net": model, "schedule": schedule, "epoch": 7, "more": [1, "a"]}
    own.save(f"{folder}/state", state)
    schedule.last_epoch, state["epoch"] = 5, 0
    assert own.load(f"{folder}/state", {"net": model, "schedule": schedule}) == {"epoch": 7, "more": [1, "a"]}
    assert schedule.last_epoch == 0
    own.load(f"{folder}/state", state)
    assert state["epoch"] == 7
    bare = subjects.mlp()
    own.load_raw(f"{folder}/state", bare)
    assert_same(bare.state_dict().values(), own.strategy.get_module_state_dict(model._forward_module).values())
    for call, error, sentence in (
        (lambda: own.load(f"{folder}/state", {"net": model, "rng": 1}), KeyError, "has no 'rng'"),
        (lambda: own.load(f"{folder}/state"), TypeError, "shardwright ckpt export"),
        (lambda: own.save(f"{folder}/b", {"a": model, "b": own.setup(subjects.mlp())}), TypeError, "2 modules"),
        (lambda: own.save(f"{folder}/b", state, filter={"net": lambda *_: True}), TypeError, "no meaning"),
        (lambda: own.save(f"{folder}/b", {**state, "odd": object()}), engine.CheckpointError, "odd"),
        (lambda: own.load(f"{folder}/epoch", state), FileNotFoundError, ""),
    ):
        with pytest.raises(error, match=sentence):
            call()
    assert own.load(f"{folder}/state", {"net": model, "rng": 1}, strict=False)["epoch"] == 7


def refuse(rank, world_size, folder):
    """Wrong use is one sentence on all ranks."""
    import lightning_subjects as subjects

    class TwoRates(subjects.Subject):
        def __init__(self):
            super().__init__(rate=1e-2 if rank == 0 else 1e-3)

    class Foreign(subjects.Subject):
        def configure_optimizers(self):
            return torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())

    class Lbfgs(subjects.Subject):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    class Sliced(subjects.Subject):
        def configure_optimizers(self):
            return ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam)

    cases = [
        (Lbfgs, "torch.optim.lbfgs.LBFGS steps on all parameters as one vector and cannot be sliced"),
        (
            TwoRates,
            r"ranks disagree about the optimizer: group 0 has (initial_)?lr=0.01 on rank 0, (initial_)?lr=0.001 on rank 1",
        ),
        (Foreign, "not one of the wrapped Foreign"),
        (Sliced, "slices state itself: pass the optimizer whose class it was given, or zero=0"),
    ]
    said = []
    for build, sentence in cases:
        for zero in (1, 3):
            with pytest.raises((ValueError, engine.Error), match=sentence) as caught:
                subjects.fit({"zero": zero}, folder, build)
            said.append(str(caught.value))
    for options, sentence in [
        ({"zero": 4}, "zero must be 0, 1, 2 or 3, got 4"),
        (
            {"clip_grad_norm": 1.0},
            "clip_grad_norm is no option of ShardwrightStrategy: pass gradient_clip_val to the Trainer",
        ),
        ({"compres": None}, "unknown option 'compres': did you mean 'compress'?"),
        ({"zero": 0, "units": "size"}, "units= requires zero=3, got zero=0"),
    ]:
        with pytest.raises((ValueError, TypeError)) as caught:
            subjects.ShardwrightStrategy(**options)
        assert str(caught.value) == sentence
    with pytest.raises(TypeError, match="clip_grad_norm is no option of FabricStrategy: call fabric.clip_gradients"):
        subjects.FabricStrategy(clip_grad_norm=1.0)
    own = subjects.fabric({"zero": 1})
    with pytest.raises(engine.Error, match="set up its module first") as caught:
        own.setup_optimizers(torch.optim.AdamW(subjects.mlp().parameters()))
    subjects.fit({"zero": 3}, folder)  # after errors, too
    return said


LAWS = {
    "plain": (2, functools.partial(train_at_every_stage, evaluates=True)),
    "accumulated": (2, functools.partial(train_at_every_stage, accumulate_grad_batches=2)),
    "accumulated at 3": (3, functools.partial(train_at_every_stage, accumulate_grad_batches=2)),
    "clipped": (2, functools.partial(train_at_every_stage, build="Wide", gradient_clip_val=0.01, exact=False)),
    "two optimizers": (
        2,
        functools.partial(train_at_every_stage, build="Adversaries", stock="ddp_find_unused_parameters_true"),
    ),
    "by hand": (2, functools.partial(train_at_every_stage, build="ByHand", exact=False)),
    "bf16-mixed": (2, functools.partial(train_at_every_stage, precision="bf16-mixed")),
    "bf16-true": (2, functools.partial(train_at_every_stage, precision="bf16-true", exact=False)),  # ours has masters
    "64-true": (2, functools.partial(train_at_every_stage, precision="64-true")),
    "EMA": (2, functools.partial(train_at_every_stage, callbacks=["ema"])),
    "SWA": (2, functools.partial(train_at_every_stage, callbacks=["swa"])),
    "files": (2, files_of_every_stage),
    "resumed": (2, resume_at_every_stage),
    "folders": (2, folders_at_every_stage),
    "refused folders": (2, folders_are_refused_on_all_ranks),
    "saved after the fit": (2, save_after_the_fit),
    "masters": (2, masters_are_not_rounded),
    "evaluated": (2, evaluate_in_the_precision_of_the_fit),
    "experts": (2, fit_experts),
    "loaded at once": (2, load_while_a_folder_is_written),
    "hooks": (2, fit_with_hooks),
    "odd modules": (2, fit_odd_modules),
    "whole tensors": (2, step_on_whole_tensors),
    "clipped by value": (2, clip_values),
    "Fabric": (2, fabric_at_every_stage),
    "Fabric's folders": (2, fabric_folders_at_every_stage),
}


def run(rank, world_size, *, folder, laws):
    import lightning_subjects as subjects

    for size, body in laws:
        with subjects.world(rank, size, world_size, folder) as takes_part:
            found = body(rank, size, folder) if takes_part else None
    return found


@pytest.fixture(scope="module")
def team(teams):
    """Start separate ranks, since they import Lightning, which no other test needs."""
    with teams.fresh(RANKS) as team:
        yield team


@pytest.mark.timeout(150)
@pytest.mark.parametrize("law", LAWS)
def test_the_trainer_is_ddps(team, tmp_path, law):
    team.run(run, 140, folder=str(tmp_path), laws=[LAWS[law]])


@pytest.mark.timeout(150)
def test_a_file_of_two_ranks_is_resumed_by_one(team, tmp_path):
    laws = [(2, save_for_one_rank), (1, resume_on_one_rank)]
    laws += [(2, save_folders_for_one_rank), (1, resume_folders_on_one_rank)]
    team.run(run, 140, folder=str(tmp_path), laws=laws)


@pytest.mark.timeout(150)
def test_wrong_use_is_one_sentence_on_all_ranks(team, tmp_path):
    first, second, _ = team.run(run, 140, folder=str(tmp_path), laws=[(2, refuse)])
    assert first == second


@pytest.mark.skipif(not LONG, reason="long form")
def test_the_example_prints_its_readme(tmp_path):
    examples = pathlib.Path(__file__).resolve().parents[2] / "examples"
    expected = (examples / "README.md").read_text()
    for stage in "0123":
        command = [sys.executable, str(examples / "06_lightning.py"), stage]
        printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, cwd=tmp_path).stdout
        assert len(printed.splitlines()) == 2 and printed.replace(f"zero={stage}", "zero=2") in expected, printed


SPAWNS = """
import lightning.pytorch as pl, shardwright.integrations.lightning
from lightning.pytorch.demos.boring_classes import BoringModel

if __name__ == "__main__":
    options = dict(accelerator="cpu", devices=2, max_steps=2, logger=False, enable_checkpointing=False)
    for ending in ("_spawn", "_fork", "_notebook"):
        trainer = pl.Trainer(strategy="shardwright_zero2" + ending, enable_progress_bar=False, **options)
        model = BoringModel()
        before = [p.detach().clone() for p in model.parameters()]
        trainer.fit(model)
        print(any((a != b).any() for a, b in zip(before, model.parameters())))
"""


@pytest.mark.skipif(not LONG, reason="long form")
def test_processes_start_by_spawn_and_fork_too(tmp_path):
    program = tmp_path / "spawns.py"
    program.write_text(SPAWNS)
    command = [sys.executable, str(program)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240, cwd=tmp_path).stdout
    assert found.split() == ["True"] * 3, found


@pytest.mark.skipif(not LONG, reason="long form")
def test_the_other_package_has_the_strategy_too(tmp_path):
    if importlib.util.find_spec("pytorch_lightning") is None:
        pytest.skip("pytorch_lightning is not installed")
    source = (pathlib.Path(__file__).resolve().parents[2] / "examples" / "06_lightning.py").read_text()
    program = tmp_path / "other.py"
    program.write_text(
        source.replace("lightning.pytorch as pl", "pytorch_lightning as pl").replace(
            "integrations.lightning ", "integrations.pytorch_lightning "
        )
    )
    found = subprocess.run([sys.executable, str(program)], check=True, capture_output=True, text=True, timeout=120)
    assert (
        "zero=2, 2 ranks, 3 epochs" in found.stdout
        and "lightning.pytorch" not in program.read_text().split("def main")[0]
    )
