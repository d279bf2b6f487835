"""Law: state that an optimizer keeps outside of torch's `state` and `param_groups` is restored, or named in an error
before a byte is written; it is never lost silently. The optimizers imitate popular ones.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import shardwright as sw
import torch
from torch import nn


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().mean()  # noqa: B023
            loss.backward()
            return loss

        closure()
        if isinstance(optimizer, (torch.optim.LBFGS, Sam)):
            optimizer.step(closure)
        else:
            optimizer.step()


class ScheduleFree(torch.optim.Optimizer):
    """Like schedule-free AdamW: mode and sums are group options and z is state, so nothing is outside."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0, "lr_max": -1.0, "train_mode": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                z.sub_(p.grad, alpha=group["lr"])
                p.lerp_(z, group["lr"] ** 2 / group["weight_sum"])


class Soap(torch.optim.Optimizer):
    """Like Shampoo: state holds lists of preconditioner matrices, some of them None."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "shampoo_beta": 0.9})
        self._data_format = "channels_first"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, GG=[torch.eye(n) if n < 6 else None for n in p.shape], Q=None)
                state["step"] += 1
                for mat, dim in zip(state["GG"], range(p.dim())):
                    if mat is not None:
                        grad = p.grad.movedim(dim, 0).reshape(p.shape[dim], -1)
                        mat.lerp_(grad @ grad.t(), 0.1)
                state["Q"] = [m if m is None else torch.linalg.qr(m)[0] for m in state["GG"]]
                p.sub_(p.grad, alpha=group["lr"] / state["step"])


class Lookahead(torch.optim.Optimizer):
    """Like Lookahead: wraps another optimizer, exposes its state, and keeps slow weights under a key of their own."""

    def __init__(self, inner: torch.optim.Optimizer, k: int = 3) -> None:
        self.optimizer, self.k, self.count = inner, k, 0
        self.param_groups, self.defaults = inner.param_groups, inner.defaults
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.state = inner.state
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        self.count += 1
        if self.count % self.k == 0:
            params = [p for group in self.param_groups for p in group["params"]]
            for slow, fast in zip(self.slow, params):
                slow.lerp_(fast, 0.5)
                fast.copy_(slow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {**self.optimizer.state_dict(), "slow": list(self.slow), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        kept = dict(state_dict)
        for mine, theirs in zip(self.slow, kept.pop("slow")):
            mine.copy_(theirs)
        self.count = kept.pop("count")
        self.optimizer.load_state_dict(kept)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state


def without_hooks(optimizer: Lookahead) -> Lookahead:
    """Remove the hooks, as in optimizers from before torch's optimizers had any."""
    del optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return optimizer


class Sam(torch.optim.Optimizer):
    """Keeps a base optimizer whose state is missing from its own state_dict()."""

    def __init__(self, params: Any, base: Any, **options: Any) -> None:
        super().__init__(params, {"rho": 0.05, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        for p in params:
            self.state[p]["old_p"] = p.clone()
            p.add_(p.grad, alpha=0.05)
        with torch.enable_grad():
            closure()
        for p in params:
            p.copy_(self.state[p]["old_p"])
        self.base_optimizer.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class Shampoo(torch.optim.SGD):
    """Like distributed Shampoo: state_dict() raises."""

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError("use distributed_state_dict")


class EightBit(torch.optim.Optimizer):
    """Like 8-bit Adam: state holds codes, maxima and a map that all parameters share; its load_state_dict() keeps
    dtypes.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.name2qmap: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.name2qmap.setdefault("dynamic", torch.linspace(-1, 1, 256))
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(state1=torch.full(p.shape, 128, dtype=torch.uint8), absmax1=torch.ones(1), step=0)
                    state["qmap1"] = self.name2qmap["dynamic"]
                state["step"] += 1
                m = state["qmap1"][state["state1"].long()] * state["absmax1"] * 0.9 + p.grad
                state["absmax1"].copy_(m.abs().max())
                state["state1"].copy_(((m / state["absmax1"] + 1) * 127.5).round().clamp(0, 255))
                p.sub_(m, alpha=group["lr"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("nothing beside the state asks for it")


class Cached(torch.optim.SGD):
    """Keeps a tensor in an attribute."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.averages = {"loss": [torch.zeros(1)]}


MADE = {
    "schedule-free": lambda p: ScheduleFree(p),
    "SOAP": lambda p: Soap(p),
    "8 bit": lambda p: EightBit(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
    "Lookahead": lambda p: Lookahead(torch.optim.Adam(p, lr=0.05)),
    "Lookahead, before its first step": lambda p: Lookahead(torch.optim.Adam(p, lr=0.05)),
    "Lookahead without hooks": lambda p: without_hooks(Lookahead(torch.optim.Adam(p, lr=0.05))),
}


def said(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return what was logged, but for the watcher's remarks, which come on a busy machine."""
    return [record for record in caplog.records if record.name != "shardwright.watch"]


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("snapshot", ["copy", "lazy"])
def test_an_optimizer_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, name: str, snapshot: str, caplog: pytest.LogCaptureFixture
) -> None:
    if name in ("Lookahead", "Lookahead, before its first step") and snapshot == "lazy":
        pytest.skip("its own class has no hooks of steps")
    model = model_of(0)
    optimizer = MADE[name](model.parameters())
    train(model, optimizer, 0 if "before" in name else 4)
    with sw.Checkpointer(tmp_path, model, optimizer, snapshot=snapshot) as checkpoints:
        checkpoints.save(3)
        train(model, optimizer, 4)
    other = model_of(1)
    another = MADE[name](other.parameters())
    if name not in ("Lookahead", "Lookahead without hooks"):
        train(other, another, 2)  # state that is to go
    with caplog.at_level(logging.WARNING, "shardwright"), sw.Checkpointer(tmp_path, other, another) as checkpoints:
        assert checkpoints.restore() == 4
    assert not said(caplog)
    train(other, another, 4)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


def test_state_of_an_optimizer_inside_is_an_error_until_it_is_passed(tmp_path: Path) -> None:
    model = model_of(0)
    optimizer = Sam(model.parameters(), torch.optim.Adam, lr=0.05)
    train(model, optimizer, 3)
    with pytest.raises(
        sw.CheckpointError, match="Sam keeps an optimizer in its attribute 'base_optimizer'.*user_state"
    ):
        sw.save(tmp_path / "a", model, optimizer)
    assert not (tmp_path / "a").exists()
    sw.save(tmp_path / "a", model, optimizer, extra={"base_optimizer": optimizer.base_optimizer.state_dict()})
    with sw.Checkpointer(
        tmp_path / "b", model, optimizer, user_state={"base_optimizer": optimizer.base_optimizer}
    ) as checkpoints:
        checkpoints.save(2)
    train(model, optimizer, 3)
    other = model_of(1)
    another = Sam(other.parameters(), torch.optim.Adam, lr=0.05)
    with sw.Checkpointer(
        tmp_path / "b", other, another, user_state={"base_optimizer": another.base_optimizer}
    ) as checkpoints:
        assert checkpoints.restore() == 3
    train(other, another, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


def test_what_cannot_be_had_is_named_before_a_byte_is_written(tmp_path: Path) -> None:
    model = model_of(0)
    refusing = Shampoo(model.parameters(), lr=0.1)

    class Hiding(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            found = super().state_dict()
            return {**found, "state": {0: {"hidden": torch.ones(1)}}}

    class Strange(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "callback": print}

    for optimizer, sentence in (
        (refusing, r"Shampoo\.state_dict\(\) raises NotImplementedError: use distributed_state_dict"),
        (Hiding(model.parameters(), lr=0.1), "Hiding.*'hidden' of parameter 0, which its attribute 'state' lacks"),
        (Strange(model.parameters(), lr=0.1), "further.callback is a builtin_function_or_method"),
    ):
        with pytest.raises(sw.CheckpointError, match=sentence):
            sw.save(tmp_path / "a", model, optimizer)
        assert not (tmp_path / "a").exists()


def test_further_state_of_several_optimizers_is_compared_by_member(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class More(torch.optim.SGD):
        name = "mean"

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), self.name: 3}

        def load_state_dict(self, state: Any) -> None:
            self.read = state.pop(self.name)
            super().load_state_dict(state)

    models = [model_of(0), model_of(1)]
    optimizers = [More(each.parameters(), lr=0.1) for each in models]
    sw.save(tmp_path / "a", models, optimizers)
    sw.load(tmp_path / "a", models, optimizers)
    assert [each.read for each in optimizers] == [3, 3]
    optimizers[1].name = "median"
    with pytest.raises(sw.CheckpointError, match="it has '1.mean', which the optimizer here lacks"):
        sw.load(tmp_path / "a", models, optimizers)
    optimizers[1] = torch.optim.SGD(models[1].parameters(), lr=0.1)  # type: ignore[call-overload]
    sw.save(tmp_path / "b", models, optimizers)
    optimizers[1] = More(models[1].parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "shardwright"):
        sw.load(tmp_path / "b", models, optimizers)
    assert ["'1.mean'" in record.message for record in said(caplog)] == [True]


def test_state_that_state_dict_shows_under_other_names_is_not_lacking(tmp_path: Path) -> None:
    class Named(torch.optim.Adam):
        def state_dict(self) -> dict[str, Any]:
            found = super().state_dict()
            return {**found, "state": {f"weight {number}": values for number, values in found["state"].items()}}

    model = model_of(0)
    optimizer = Named(model.parameters(), lr=0.05)
    train(model, optimizer, 2)
    sw.save(tmp_path / "a", model, optimizer)
    other = model_of(1)
    another = Named(other.parameters(), lr=0.05)
    sw.load(tmp_path / "a", other, another)
    train(model, optimizer, 2)
    train(other, another, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


def test_tensors_in_attributes_are_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(0)
    optimizer = Cached(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "shardwright"), sw.Checkpointer(tmp_path, model, optimizer) as checkpoints:
        checkpoints.save(0)
        checkpoints.save(1)
    assert [record.message.count("'averages'") for record in said(caplog)] == [1]


def test_a_hook_that_adds_to_state_dict_counts(tmp_path: Path) -> None:
    model = model_of(0)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "seen": 7})
    optimizer.register_load_state_dict_post_hook(lambda _: found.append(1))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: found.append(state.get("seen")))
    sw.save(tmp_path / "a", model, optimizer)
    sw.load(tmp_path / "a", model, optimizer)
    assert found == [7, 1]


def test_a_folder_with_more_or_less_than_the_optimizer_keeps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(0)
    plain, more = (
        torch.optim.Adam(model.parameters(), lr=0.05),
        Lookahead(torch.optim.Adam(model.parameters(), lr=0.05)),
    )
    train(model, plain, 2)
    train(model, more, 2)
    sw.save(tmp_path / "plain", model, plain)
    sw.save(tmp_path / "more", model, more)
    before = copy.deepcopy([p.detach() for p in model.parameters()])
    train(model, plain, 1)
    with pytest.raises(sw.CheckpointError, match="it has 'slow', 'count', which the optimizer here lacks"):
        sw.load(tmp_path / "more", model, plain)
    with caplog.at_level(logging.WARNING, "shardwright"):
        sw.load(tmp_path / "plain", model, more)
    assert "holds no 'slow' of the optimizer's state_dict()" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters())) and more.count == 2


def test_where_the_engine_has_wrapped_the_optimizer_it_is_an_error(tmp_path: Path) -> None:
    class Counting(torch.optim.AdamW):
        calls = defaultdict(int)

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "calls": 3}

    model = model_of(0)
    module, optimizer = sw.wrap(model, Counting(model.parameters()), zero=1, partition="flat")
    with pytest.raises(sw.CheckpointError, match="Counting.*'calls' beside state and param_groups.*user_state"):
        sw.save(tmp_path / "a", module, optimizer)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("form", [lambda each: each, lambda each: [each], lambda each: {"m": each}])
def test_an_optimizer_of_another_model_is_refused(tmp_path: Path, form: Any) -> None:
    a, b = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(a.parameters())
    for call in (sw.save, sw.Checkpointer):
        with pytest.raises(ValueError, match="its 2 parameters are those of another module"):
            call(tmp_path / "of another", form(b), form(optimizer))
    wrapped, older = sw.wrap(b, torch.optim.Adam(b.parameters()), zero=2)
    with pytest.raises(ValueError, match="its 2 parameters are those of another module"):
        sw.Checkpointer(tmp_path / "sliced", [a], [older])
    with pytest.raises(ValueError, match="its 2 parameters are those of another module"):
        sw.Checkpointer(tmp_path / "two", [a], [optimizer, older])
