"""The oracle: data-parallel training without a bucket, a slice or a process, on ranks that are threads.

One thread runs at a time: a rank runs from its start, or from one meeting, to its next meeting; the lowest rank goes first. So a
program that seeds torch's generator and builds a module does so without another rank in between, and every run is the same.

`Package` has the functions of shardwright under their names. It knows no stage: every rank has whole parameters, gradients and
state. Where a program leaves ranks with different weights (as plain data parallelism would), so do they here.
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import shardwright as sw
import torch
from oracle.fold import fold

#: no program takes so long; a thread that waits longer has found an error of the oracle itself
LIMIT_S = 300.0
LOW = torch.bfloat16


class OutOfStep(Exception):
    """Ranks came to different meetings, or one ended while others wait for it: the engine owes an error on every rank."""


class World:
    """W ranks as threads that take turns.

    Parameters
    ----------
    world_size : int
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._changed = threading.Condition()
        self._turn = 0
        self._running = set(range(world_size))
        self._came: dict[int, tuple[str, Any]] = {}
        self._said: list[Any] = []
        self._meeting = 0
        self._broken = False

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """body(rank) on every rank; what each returned, or the exception that it raised."""
        results: list[Any] = [None] * self.world_size

        def rank_main(rank: int) -> None:
            try:
                self._wait_until(lambda: self._turn == rank)
                results[rank] = body(rank)
            except BaseException as error:
                results[rank] = error
            finally:
                self._end(rank)

        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def meet(self, rank: int, label: str, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, once all have come to a meeting of this label."""
        with self._changed:
            self._came[rank] = label, value
            meeting = self._meeting
            self._settle()
            self._pass_on(rank)
        self._wait_until(lambda: self._broken or (self._meeting > meeting and self._turn == rank))
        if self._broken and self._meeting == meeting:
            raise OutOfStep(f"rank {rank} came to {label!r}, and some rank did not")
        return self._said

    def _settle(self) -> None:
        """Ends a meeting to which all have come; breaks off one to which some rank never will."""
        if not self._came or (len(self._came) < len(self._running) and not self._broken):
            return
        labels = {label for label, _ in self._came.values()}
        if len(self._came) < self.world_size or len(labels) > 1:
            self._broken = True
            return
        self._said = [self._came[rank][1] for rank in range(self.world_size)]
        self._came = {}
        self._meeting += 1

    def _pass_on(self, rank: int) -> None:
        order = [(rank + 1 + step) % self.world_size for step in range(self.world_size)]
        if self._meeting and not self._came:  # a new turn, from the lowest
            order = list(range(self.world_size))
        self._turn = next((each for each in order if each in self._running and each not in self._came), -1)
        self._changed.notify_all()

    def _end(self, rank: int) -> None:
        with self._changed:
            self._running.discard(rank)
            self._settle()
            self._pass_on(rank)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(condition, LIMIT_S):
                raise AssertionError("the oracle waits for itself")


class Model(torch.nn.Module):
    """A wrapped module: its gradients are averaged at the end of a backward."""

    def __init__(self, module: torch.nn.Module, package: Package) -> None:
        super().__init__()
        self.module, self._package = module, package
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._touched: set[str] = set()
        self._task = -1
        self._reached = False  # a parameter, by the backward that runs
        self.is_unaveraged = False  # a step used gradients that no wrapper averages
        self._is_owed = False  # a synchronised forward that no backward has followed
        self._handles: list[Any] = []
        self._watched: set[int] = set()
        self._watch()

    def _watch(self) -> None:
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                hook = lambda _, name=name: self._touch(name)  # noqa: E731
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def retire(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> Model:
        made = Model(copy.deepcopy(self.module, memo), self._package)
        made.train(self.training)
        made.require_backward_grad_sync = self.require_backward_grad_sync
        return made

    def _leave_broken_round(self) -> None:
        """A backward that ended in an exception is over, and averages nothing; what it used stays used."""
        if self._reached:
            self._reached = self._is_owed = False
        self._task = -1

    def __call__(self, *arguments: Any) -> Any:
        self._watch()
        self._leave_broken_round()
        buffers = list(self.module.buffers())
        if self.require_forward_param_sync and buffers:
            self._package.take_from_rank_0(buffers, "buffers")
        synchronises = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled():
            self._is_owed |= synchronises
        output = self.module(*arguments)
        self.require_forward_param_sync = synchronises
        if output.grad_fn is not None:
            output.register_hook(lambda _: self._announce())
        return output

    def _touch(self, name: str) -> None:
        self._announce()
        self._reached = True
        self._touched.add(name)

    def _announce(self) -> None:
        task = torch._C._current_graph_task_id()
        if self._task != task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        reached, self._reached, self._task = self._reached, False, -1
        if self.require_backward_grad_sync and reached:
            self.synchronise()

    def close_pending(self) -> None:
        self._leave_broken_round()
        if self._is_owed:
            self.synchronise()

    @torch.no_grad()
    def synchronise(self) -> None:
        """A round: parameters that some rank has used since the last one get the mean of all ranks' gradients."""
        self._is_owed = False
        mine = {n: (n in self._touched, copy.copy(p.grad)) for n, p in self.module.named_parameters()}
        self._touched = set()
        everyone = self._package.meet("a round", mine)
        if self.is_unaveraged:
            raise sw.Error("no wrapper averages a parameter")
        for name, parameter in self.module.named_parameters():
            if any(theirs[name][0] for theirs in everyone):
                grads = [theirs[name][1] for theirs in everyone]
                zeros = torch.zeros_like(parameter, requires_grad=False)
                self._package.after_meeting(parameter, fold([zeros if g is None else g for g in grads], "mean"))
        self._package.meet("the end of a round", None)
        self._package.apply()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


class Masters:
    """An optimizer of low-precision parameters: the user's own over float32 copies, which are rounded into the parameters.

    Whatever it does begins with the parameter in each element to which the copy does not round.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner, self._pairs = inner, list[tuple[torch.Tensor, torch.Tensor]]()
        for group in inner.param_groups:
            group["params"] = [self._master(p) for p in group["params"]]

    def _master(self, parameter: torch.Tensor) -> torch.Tensor:
        master = parameter.detach().float().requires_grad_()
        self._pairs.append((parameter, master))
        if parameter in self._inner.state:  # Adagrad makes state as it is made
            state = self._inner.state.pop(parameter)
            self._inner.state[master] = {
                key: value.float() if value.shape == parameter.shape else value for key, value in state.items()
            }
        return master

    @torch.no_grad()
    def _take(self) -> None:
        for p, master in self._pairs:
            rounded = master.detach().to(p.dtype)
            same = rounded.view(torch.int16) == p.detach().view(torch.int16)
            master.copy_(torch.where(same, master, p.float()))

    @torch.no_grad()
    def _give(self) -> None:
        for p, master in self._pairs:
            p.copy_(master)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            value = None if closure is None else closure()
        for hook in self.hooks:
            hook()
        self._take()
        for p, master in self._pairs:
            master.grad = None if p.grad is None else p.grad.float()
        self._inner.step()
        self._give()
        return value

    hooks: tuple[Callable[[], Any], ...] = ()

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> None:
        self.hooks += (hook,)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p, _ in self._pairs:
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.detach_().zero_()

    def add_param_group(self, group: dict[str, Any]) -> None:
        self._inner.add_param_group({**group, "params": [self._master(p) for p in group["params"]]})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._inner.param_groups

    def state_dict(self) -> dict[str, Any]:
        return {**self._inner.state_dict(), "masters": [master.detach() for _, master in self._pairs]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._inner.load_state_dict({key: value for key, value in state.items() if key != "masters"})
        for (_, mine), theirs in zip(self._pairs, state["masters"]):
            mine.copy_(theirs)

    def eval(self) -> None:
        self._through("eval")

    def train(self) -> None:
        self._through("train")

    def _through(self, name: str) -> None:
        self._take()
        getattr(self._inner, name)()
        self._give()


class Checkpoints:
    """Stands for `sw.Checkpointer`."""

    def __init__(self, package: Package, path: str, model: Any, optimizer: Any) -> None:
        self._package, self._given, self._path, self._calls = package, (model, optimizer), path, 0

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def save(self, step: int, *, every_s: float) -> bool:
        self._calls += 1
        if self._calls > 1 and every_s < 1:  # time counts from the first call
            self._newest = step + 1
            self._package.save(self._path, *self._given)
            return True
        return False

    def wait(self) -> None:
        pass

    def restore(self) -> int:
        self._package.load(self._path, *self._given)
        return self._newest


def _listed(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]


class Package:
    """Stands for the package `sw` on one rank of the oracle."""

    optim, Error = sw.optim, sw.Error

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._models: dict[torch.nn.Module, Model] = {}
        self._checkpoints: dict[str, Any] = {}

    def meet(self, label: str, value: Any) -> list[Any]:
        return self._world.meet(self._rank, label, value)

    def after_meeting(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """No rank's gradient is replaced while another still reads it."""
        self._waiting.append((parameter, gradient))

    def apply(self) -> None:
        for parameter, gradient in self._waiting:
            parameter.grad = gradient
        self._waiting.clear()

    def take_from_rank_0(self, tensors: list[torch.Tensor], label: str) -> None:
        values = [tensor.detach().clone() for tensor in tensors] if self._rank == 0 else None
        for tensor, value in zip(tensors, self.meet(label, values)[0]):
            if self._rank:
                tensor.data.copy_(value)

    # the package's functions ------------------------------------------------------------------------------------------

    def wrap(self, module: Any, optimizer: Any = None, *, zero: int = 0, **options: Any) -> Any:
        if isinstance(module, Model):
            raise sw.Error("this module is wrapped already")
        is_foreign = optimizer is not None and self._foreign(module, optimizer)
        self.meet("wrap", None)
        if is_foreign and zero:
            raise sw.Error("a parameter of the optimizer is not one of the module's")
        if module in self._models:
            self._models[module].retire()
        model = self._models[module] = Model(module, self)
        self.take_from_rank_0([*module.parameters(), *module.buffers()], "wrap")
        return model if optimizer is None else (model, self.shard_optimizer(model, optimizer))

    def _foreign(self, module: Any, optimizer: Any) -> bool:
        known = {id(p) for p in module.parameters()}
        return any(id(p) not in known for group in optimizer.param_groups for p in group["params"])

    def _note_unaveraged(self, model: Model, optimizer: Any) -> None:
        """Let the next round raise for gradients that no wrapper averages. All of a program's differ between ranks."""
        known = {id(p) for module in self._models for p in module.parameters()}
        members = (p for group in optimizer.param_groups for p in group["params"])
        model.is_unaveraged |= any(id(p) not in known and p.grad is not None for p in members)

    def shard_optimizer(self, model: Model, optimizer: Any, **_: Any) -> Any:
        members = [p for group in optimizer.param_groups for p in group["params"]]
        is_ours = type(optimizer).__module__.startswith("shardwright")
        if isinstance(optimizer, torch.optim.Optimizer) and not is_ours and any(p.dtype == LOW for p in members):
            optimizer = Masters(optimizer)
        elif self._foreign(model.module, optimizer):
            optimizer.register_step_pre_hook(lambda *_: self._note_unaveraged(model, optimizer))
        optimizer.register_step_pre_hook(lambda *_: model.close_pending())
        return optimizer

    def unwrap(self, model: Any) -> Any:
        return model.module if isinstance(model, Model) else model

    @contextlib.contextmanager
    def full_parameters(self, model: Model, *, writable: bool = False) -> Iterator[None]:
        yield
        if writable:
            self.take_from_rank_0(list(model.module.parameters()), "full_parameters")

    def full_state_dict(self, model: Model) -> dict[str, Any]:
        return copy.deepcopy(model.module.state_dict())

    def load_full_state_dict(self, model: Model, state: Any) -> None:
        if self._rank == 0:
            model.module.load_state_dict(state)
        self.take_from_rank_0([*model.module.parameters(), *model.module.buffers()], "load_full_state_dict")

    def full_optimizer_state_dict(self, model: Model, optimizer: Any) -> dict[str, Any]:
        return copy.deepcopy(optimizer.state_dict())

    def load_full_optimizer_state_dict(self, model: Model, optimizer: Any, state: Any) -> None:
        optimizer.load_state_dict(state)

    def full_gradients(self, model: Model) -> dict[str, Any]:
        model.close_pending()
        return {name: p.grad for name, p in model.module.named_parameters()}

    def clip_grad_norm_(self, model: Model, max_norm: float) -> torch.Tensor:
        model.close_pending()
        gradients = [p.grad for p in model.module.parameters() if p.grad is not None]
        squares = (value * value for gradient in gradients for value in gradient.double().flatten().tolist())
        norm = math.sqrt(math.fsum(squares))
        scale = max_norm / (norm + 1e-6)
        for gradient in gradients if not scale >= 1 else ():
            gradient.mul_(scale)
        return torch.tensor(norm)

    def save(self, path: str, model: Any, optimizer: Any, **_: Any) -> None:
        states = [copy.deepcopy(each.module.state_dict()) for each in _listed(model)]
        states = self.meet("save", states)[0]
        self._checkpoints[path] = copy.deepcopy((states, [each.state_dict() for each in _listed(optimizer)]))

    def load(self, path: str, model: Any, optimizer: Any) -> None:
        self.meet("load", None)
        states, optimizer_states = copy.deepcopy(self._checkpoints[path])
        for each, state in zip(_listed(model), states):
            each.module.load_state_dict(state)
        for each, state in zip(_listed(optimizer), optimizer_states):
            each.load_state_dict(state)

    def Checkpointer(self, path: str, model: Any, optimizer: Any) -> Checkpoints:  # noqa: N802
        return Checkpoints(self, path, model, optimizer)
