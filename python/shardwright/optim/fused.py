"""Fused optimizers on the engine's kernels, and the exact global norm. docs/design/optim.md has the arithmetic.

`AdamW`, `Adam` and `SGD` are torch's classes with another `step()`. Arguments, `param_groups` and `state_dict()` are
torch's, and state dicts load into each other both ways, but for moments in "int8": torch's classes take those from
sw.load_full_optimizer_state_dict alone. Tensors are on the CPU or on a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .. import _engine
from ..layout.views import dtype_name
from ..torch_compat import cuda
from ..torch_compat.autograd import increment_versions
from ..torch_compat.dtensor import held_tensor, is_dtensor, placed_as, waited
from . import moments
from .device_clip import DeviceClip
from .forwarding import loss_of
from .master_weights import LOW, load_in_float32, master_of
from .offload import StateStore

#: options of torch that exclude one fused pass
_OTHER_FORMS = {"foreach": True, "fused": False, "capturable": True, "differentiable": True}


class _Fused(torch.optim.Optimizer):
    """The base of the three optimizers: float32 masters (see optim/master_weights.py), layouts, loading."""

    _master: bool
    #: the engine can step on state that lies elsewhere
    can_offload = True
    #: keeps new state on another device or in a file, and old state from its next step on; None: on the parameters' device.
    #: Copies of the optimizer have none
    store: StateStore | None = None
    #: True if parameters are DTensors. Their state is DTensors too; the engine gets the local tensors
    _has_dtensors = False
    #: the next step's kernels multiply gradients by its factor
    _clip: DeviceClip | None = None
    #: of the moments; None: that of the master or parameter, rounded to nearest
    state_dtype: torch.dtype | Literal["int8"] | None = None
    #: with state_dtype, by id: a parameter's place in the groups << 40, plus its first element. Others are whole
    origins: Mapping[int, int] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one optimization step. `closure` reevaluates the model with gradients enabled; return its result."""
        loss = None if closure is None else loss_of(closure)
        clip = self._clip
        try:
            # torch's GradScaler sets these for a fused step, and skips one after an overflow
            overflowed, scale = _numbers_of(getattr(self, "found_inf", None), getattr(self, "grad_scale", None))
            if not overflowed:
                for group in self.param_groups:
                    self._step_group(group, 1.0 / scale)
        finally:  # even after an exception: gradients are then clipped, as on the host
            self._clip = None
            if clip is not None:
                clip.scale()
        return loss

    def take_clip(self, clip: DeviceClip) -> bool:
        """Return True if the next step multiplies gradients by the factor of `clip`; else clip them before it."""
        takes = self.store is None and clip.covers(p for group in self.param_groups for p in group["params"])
        self._clip = clip if takes else None
        return takes

    def _keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of a parameter's state, without its master."""
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def _scalars(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return the engine's arguments from a group's hyperparameters."""
        raise NotImplementedError

    def _call(
        self, lists: _Lists, grads: list[Tensor], copies: list[Tensor] | None, first: bool, options: dict[str, Any]
    ) -> list[int]:
        """Call the engine. `first`: the first step of these parameters. Return those with mismatched layouts."""
        raise NotImplementedError

    def _step_group(self, group: dict[str, Any], grad_scale: float) -> None:
        keys = self._keys(group)
        options = {**self._scalars(group), "maximize": group["maximize"], "grad_scale": grad_scale}
        calls: dict[tuple[bool, bool, torch.device | None], _Lists] = {}
        needed, of_state, store = set(keys), self.state, self.store
        origins = None if self.state_dtype is None else self._origins_of(group)
        new = None if store is None else store.new
        last_kind, lists = None, _Lists(keys)
        for p in group["params"]:
            grad = p.grad
            if grad is None:
                continue
            has_master, on_host = self._has_master(p), p.is_cpu
            state = of_state[p] if keys or has_master else {}
            if self._has_dtensors:
                self._place_state(p, state)
            if store is not None:
                store.adopt(state)
            elif not on_host:
                _check_beside(p, state)
            first = not state.keys() >= needed or (bool(keys) and state[keys[-1]] is None)  # as torch has saved it
            kind = (has_master, first, None if on_host else p.device)
            if kind != last_kind:
                last_kind, lists = kind, calls.setdefault(kind, _Lists(keys))
            lists.params.append(p)
            lists.targets.append(master_of(p, state, new) if has_master else p)
            lists.grads.append(grad)
            lists.states.append(state)
            if origins is not None:
                lists.origins.append(origins[id(p)])
            if not on_host and "step" in state:  # torch's fused form keeps the step count on the GPU
                state["step"] = state["step"].cpu()
            held = state
            if first:  # zeros for what the state lacks; a step that fails keeps none of them
                count = torch.zeros((), dtype=torch.float32, device="cpu")
                lacked = [key for key in keys if state.get(key) is None]
                held = {**state, **{key: count if key == "step" else self._state_like(p) for key in lacked}}
            for key, tensors in lists.lists.items():
                tensors.append(held[key])
        for (has_master, first, _), lists in calls.items():
            arguments = {**options, **self._where(lists.params[0])}
            copies = self._plain(lists.params) if has_master else None
            lists.run(lambda: self._call(lists, self._plain(lists.grads, lists.params), copies, first, arguments))
            for key, tensors in lists.lists.items() if first else ():
                for state, value in zip(lists.states, tensors):
                    state[key] = value
            self._written(lists, lists.targets if has_master else [])

    def _origins_of(self, group: dict[str, Any]) -> Mapping[int, int]:
        """Return what tells the random bits of parameters apart, by their ids."""
        before = itertools.takewhile(lambda each: each is not group, self.param_groups)
        first = sum(len(each["params"]) for each in before)
        return {id(p): number << 40 for number, p in enumerate(group["params"], first)} | dict(self.origins)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_master": self._master, **self._kept_options()}

    def _kept_options(self) -> dict[str, Any]:
        """Return what a copy keeps besides torch's attributes and the choice of masters."""
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._note_dtensors()
        for each in self.state.values():  # torch accepts integers too
            step = each.get("step")
            if isinstance(step, Tensor) and not step.is_floating_point():
                each["step"] = step.to(torch.float32)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does. Raise ValueError for a parameter or a form of the step that is not supported."""
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise
        self._note_dtensors()

    def _note_dtensors(self) -> None:
        self._has_dtensors = any(is_dtensor(p) for group in self.param_groups for p in group["params"])

    def _plain(self, tensors: list[Tensor], like: list[Tensor] | None = None) -> list[Tensor]:
        """Return what the engine reads and writes: local tensors of DTensors, first placed like those of `like`."""
        if not self._has_dtensors:
            return tensors
        if like is not None:
            tensors = [placed_as(each, p) if is_dtensor(each) else each for each, p in zip(tensors, like)]
        return [waited(held_tensor(each)) if is_dtensor(each) else each for each in tensors]

    def _place_state(self, p: Tensor, state: dict[str, Any]) -> None:
        """Place the state's DTensors like their parameter. Collective over the mesh if placements differ."""
        for key, value in state.items():
            if not is_dtensor(value) or key == "step":
                continue
            if not is_dtensor(p) or value.device_mesh != p.device_mesh:
                mesh = f"a DTensor on {p.device_mesh}" if is_dtensor(p) else "a plain tensor"
                raise ValueError(
                    f"step: the state {key!r} of a parameter that is {mesh} is a DTensor on {value.device_mesh}: distribute it over the mesh "
                    "of its parameter"
                )
            if tuple(value.placements) != tuple(p.placements):
                made = torch.empty_like(p, dtype=value.dtype, requires_grad=False)
                state[key] = made.copy_(placed_as(value, p))

    def _check_group(self, group: dict[str, Any]) -> None:
        name, number = type(self).__name__, len(self.param_groups) - 1
        for option, other in _OTHER_FORMS.items():
            if group.get(option) is other:
                raise ValueError(
                    f"sw.optim.{name}: {option}={other} is not supported, since the step is one fused pass; use torch.optim.{name} for it"
                )
        for position, p in enumerate(group["params"]):
            refused = ""
            if self.store is not None and is_dtensor(p):
                refused = "is a DTensor, whose state cannot be offloaded at zero=0: wrap with zero=1 or higher"
            elif p.dtype is not torch.float32 and p.dtype not in LOW:
                got = dtype_name(p.dtype)
                refused = f"must be float32, bfloat16 or float16, not {got}; torch.optim.{name} supports it"
            elif p.device.type not in ("cpu", "cuda", "meta"):
                refused = f"must be on the CPU or a CUDA GPU, not {p.device}; torch.optim.{name}(fused=True) takes it"
            if refused:
                raise ValueError(f"sw.optim.{name}: parameter {position} of group {number} {refused}")

    def _has_master(self, p: Tensor) -> bool:
        return self._master and p.dtype in LOW

    def _form_of_state(self, p: Tensor) -> tuple[Tensor, torch.dtype]:
        """Return a tensor with the shape and strides of a state tensor of `p`, and its dtype."""
        if self.state_dtype == "int8":
            return moments.zeros(p), torch.uint8
        return p, self.state_dtype or (torch.float32 if self._has_master(p) else p.dtype)

    def _state_like(self, p: Tensor) -> Tensor:
        """Return a new state tensor of `p`: zeros."""
        like, dtype = self._form_of_state(p)
        if self.store is not None:
            return self.store.zeros(like, dtype)
        device = p.device if like is not p else None
        return torch.zeros_like(like, dtype=dtype, device=device, memory_format=torch.preserve_format)

    def state_nbytes(self, p: Tensor, group: dict[str, Any]) -> list[int]:
        """Return the bytes of each state tensor of `p`, without its step count."""
        like, dtype = self._form_of_state(p)
        count = sum(key != "step" for key in self._keys(group))
        return [like.numel() * dtype.itemsize] * count + [4 * p.numel()] * self._has_master(p)

    def _where(self, p: Tensor) -> dict[str, Any]:
        """Return the engine's arguments for the device that steps on parameters like `p`."""
        if self.store is None:
            return {"gpu": cuda.place_of(p), "clip": 0 if self._clip is None else self._clip.address}
        return {"state_file": self.store.file, "gpu": self.store.place()}

    def _written(self, lists: _Lists, masters: list[Tensor]) -> None:
        params = lists.params
        increment_versions(params)
        if self._clip is not None:
            increment_versions(lists.grads)
            self._clip.count_stepped(lists.grads)
        if masters:
            increment_versions(masters)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's format. Blocks of int8 that are not in row-major order, or of a DTensor's shard, are decoded."""
        made = super().state_dict()
        if self.state_dtype == "int8":
            members = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
            saved = itertools.chain.from_iterable(group["params"] for group in made["param_groups"])
            of = dict(zip(saved, members))
            made["state"] = {number: moments.portable(each, of[number]) for number, each in made["state"].items()}
        return made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load torch's format, from this class or torch's own, but keep masters in float32, moments there or in state_dtype."""
        load_in_float32(self, super().load_state_dict, state_dict, self._has_master, self.state_dtype)


class _Lists:
    """The tensors of one engine call as parallel lists, with the state dict of each parameter."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self.params: list[Tensor] = []
        self.targets: list[Tensor] = []  # masters, or the parameters themselves
        self.grads: list[Tensor] = []
        self.states: list[dict[str, Any]] = []
        self.origins: list[int] = []  # with state_dtype
        self.lists: dict[str, list[Tensor]] = {key: [] for key in keys}

    def run(self, call: Callable[[], list[int]]) -> None:
        """Run `call()`. If it reports mismatched layouts, nothing has changed: rearrange those, and call it again."""
        mismatched = call()
        if not mismatched:
            return
        for i in mismatched:
            target = self.targets[i]
            self.grads[i] = _with_strides_of(target, self.grads[i])
            for key, tensors in self.lists.items():
                if key != "step" and not moments.is_records(key, tensors[i]):  # these have no layout
                    tensors[i] = self.states[i][key] = _with_strides_of(target, tensors[i])
        if mismatched := call():
            raise ValueError(f"step: parameters {mismatched} have a layout that their gradients cannot take")


def _numbers_of(found_inf: Tensor | None, scale: Tensor | None) -> list[float]:
    """Return the values of two scalars, by default 0 and 1. On a GPU the host waits once for both."""
    given = [each.detach().reshape(()) for each in (found_inf, scale) if each is not None]
    values = iter(torch.stack(given).tolist() if given else ())
    return [other if each is None else next(values) for each, other in ((found_inf, 0.0), (scale, 1.0))]


def _check_beside(p: Tensor, state: dict[str, Any]) -> None:
    """Raise ValueError if state is not on its parameter's GPU, whose kernels would read the address."""
    for key, value in state.items():
        if key != "step" and isinstance(value, Tensor) and value.device != p.device:
            raise ValueError(
                f"step: the state {key!r} of a parameter on {p.device} is on {value.device}: state does not follow a module that moves; "
                "create the optimizer after the move, or load its state again"
            )


def _with_strides_of(like: Tensor, tensor: Tensor) -> Tensor:
    if tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype, device=tensor.device, requires_grad=False).copy_(tensor)


class _AdamStep(_Fused):
    _seed = 0

    def _keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("step", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))

    def _scalars(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {
            "lr": float(group["lr"]),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "decoupled": isinstance(self, torch.optim.AdamW) or group.get("decoupled_weight_decay", False),
        }

    def _call(
        self, lists: _Lists, grads: list[Tensor], copies: list[Tensor] | None, first: bool, options: dict[str, Any]
    ) -> list[int]:
        of, plain = lists.lists, self._plain
        largest = plain(of["max_exp_avg_sq"]) if "max_exp_avg_sq" in of else None
        moments = plain(of["exp_avg"]), plain(of["exp_avg_sq"]), largest
        if self.state_dtype is not None:
            options = {**options, "origins": lists.origins, "seed": self._seed}
        return _engine.adam_step(plain(lists.targets), grads, *moments, of["step"], copies, **options)


class AdamW(_AdamStep, torch.optim.AdamW):
    r"""AdamW in one pass over memory.

    Parameters
    ----------
    params : iterable of Tensor or of dict
        Dense tensors on the CPU or a CUDA GPU, float32, bfloat16 or float16, or groups of them.
    lr, betas, eps, weight_decay, amsgrad, maximize
        As in `torch.optim.AdamW`.
    foreach, capturable, differentiable, fused
        Accepted for compatibility. Forms other than the fused one raise ValueError.
    master : bool, default True
        Keep a float32 master (and float32 moments) for each bfloat16 or float16 parameter, in `state[p]["master"]`;
        the parameter is its rounded copy, written in the same pass. Where other code has written the parameter, so
        that the master does not round to it, the step begins with the parameter. False: the parameter itself is updated
        and its moments have its dtype, as in torch.
    state_dtype : torch.dtype or "int8", optional
        The dtype of both moments: bfloat16, float32, or "int8": 8 bits an element, and 8 for each 32 elements, from a
        parameter's first one on. Second moments in bfloat16, both in "int8", and with `master=False` bfloat16
        parameters, are then rounded at random: up with the probability of the part dropped. To nearest, a second moment
        would never decay, and a parameter would lose small updates. Not with `amsgrad`, nor in a GPU's kernels. With "int8"
        second moments below 2^-17 of the largest of their 32 are raised to that, and 2^127 makes a parameter NaN.
    seed : int, default 0
        The seed of random rounding, in [0, 2**64). The random bits of an element depend on the seed, its step, its
        place in its parameter and the place of that in the groups: not on the stage or world size.

    Raises
    ------
    ValueError
        For an option out of torch's range, or for a parameter or form of the step that this class does not support.

    Notes
    -----
    Each element gets the arithmetic of the vector body of `torch.optim.AdamW(fused=True)`. float32 results have its
    bits, except in torch's scalar tails (at most one unit in the last place a step)::

        p *= 1 - lr*wd;  m += (1 - beta1)*(g - m);  v = beta2*v + (1 - beta2)*g*g
        p -= lr/(1 - beta1**t) * m / (sqrt(v)/sqrt(1 - beta2**t) + eps)

    Cost of a step: 16 bytes read and 12 written an element in float32, 12 and 8 with moments in bfloat16, 10 and 6 in
    "int8". There state[p] has moments as uint8 of shape (ceil(numel / 32), 33): 32 codes and an exponent. With torch's
    GradScaler and `fused=True` the pass itself unscales the gradient, and `.grad` keeps its scaled value.

    References
    ----------
    Loshchilov and Hutter, *Decoupled Weight Decay Regularization*, 2019, algorithm 2. Reddi, Kale and Kumar, *On the
    Convergence of Adam and Beyond*, 2018, algorithm 2 (amsgrad).

    Examples
    --------
    >>> import torch, shardwright as sw
    >>> p = torch.nn.Parameter(torch.ones(4))
    >>> optimizer = sw.optim.AdamW([p], lr=0.1)
    >>> p.grad = torch.ones(4)
    >>> optimizer.step()
    >>> round(p[0].item(), 4)
    0.899
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master: bool = True,
        state_dtype: torch.dtype | Literal["int8"] | None = None,
        seed: int = 0,
    ) -> None:
        if state_dtype not in (None, torch.float32, torch.bfloat16, "int8"):
            legal = "torch.bfloat16, torch.float32 or 'int8'"
            raise ValueError(f"sw.optim.AdamW: state_dtype must be {legal}, not {state_dtype}")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"sw.optim.AdamW: seed must be in [0, 2**64), not {seed}")
        self._master, self.state_dtype, self._seed = master, state_dtype, seed
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad,
            maximize=maximize, foreach=foreach, capturable=capturable, differentiable=differentiable, fused=fused,
        )  # fmt: skip

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if self.state_dtype is not None and group["amsgrad"]:
            raise ValueError(
                "sw.optim.AdamW: amsgrad keeps a maximum that random rounding would raise: not with state_dtype"
            )

    def _kept_options(self) -> dict[str, Any]:
        return {"state_dtype": self.state_dtype, "_seed": self._seed}


class Adam(_AdamStep, torch.optim.Adam):
    """Adam in one pass over memory: like `AdamW`, but with weight decay added to the gradient (L2).

    Parameters
    ----------
    params, lr, betas, eps, weight_decay, amsgrad, maximize
        As in `torch.optim.Adam`; `weight_decay` is 0 by default.
    decoupled_weight_decay : bool, default False
        True is AdamW. ValueError if the installed torch does not have it.
    foreach, capturable, differentiable, fused, master
        As in `AdamW`, like the errors.

    References
    ----------
    Kingma and Ba, *Adam: A Method for Stochastic Optimization*, 2015, algorithm 1.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        master: bool = True,
    ) -> None:
        self._master = master
        newer: dict[str, Any] = {"decoupled_weight_decay": True} if decoupled_weight_decay else {}
        try:
            super().__init__(
                params, lr, betas, eps, weight_decay, amsgrad,
                foreach=foreach, maximize=maximize, capturable=capturable, differentiable=differentiable, fused=fused, **newer,
            )  # fmt: skip
        except TypeError:
            if not newer:
                raise
            raise ValueError("sw.optim.Adam: decoupled_weight_decay needs a newer torch; use sw.optim.AdamW") from None


class SGD(_Fused, torch.optim.SGD):
    """Stochastic gradient descent with momentum in one pass over memory.

    Parameters
    ----------
    lr, momentum, dampening, weight_decay, nesterov, maximize
        As in `torch.optim.SGD`.
    params, foreach, differentiable, fused, master
        As in `AdamW`, like the errors. Sparse gradients are refused by `step()`.

    Notes
    -----
    Bits as `torch.optim.SGD(fused=True)`, with the same exception as in `AdamW`. At a parameter's first step its
    gradient becomes its buffer. Cost of a step: 12 bytes read and 8 written an element, or 8 and 4 without momentum.

    References
    ----------
    Sutskever, Martens, Dahl and Hinton, *On the importance of initialization and momentum in deep learning*, 2013.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        master: bool = True,
    ) -> None:
        self._master = master
        super().__init__(
            params, lr, momentum, dampening, weight_decay, nesterov,
            maximize=maximize, foreach=foreach, differentiable=differentiable, fused=fused,
        )  # fmt: skip

    def _keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def _scalars(self, group: dict[str, Any]) -> dict[str, Any]:
        scalars = {name: float(group[name]) for name in ("lr", "momentum", "dampening", "weight_decay")}
        return {**scalars, "nesterov": group["nesterov"]}

    def _call(
        self, lists: _Lists, grads: list[Tensor], copies: list[Tensor] | None, first: bool, options: dict[str, Any]
    ) -> list[int]:
        of, plain = lists.lists, self._plain
        buffers = plain(of["momentum_buffer"]) if of else None
        return _engine.sgd_step(plain(lists.targets), grads, buffers, copies, first=first, **options)


def global_norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all elements together: the exact sum of squares, rounded once.

    Parameters
    ----------
    tensors : iterable of Tensor
        Dense float32, bfloat16, float16 or float64 on the CPU, any shapes; ValueError for others.

    Returns
    -------
    float
        The same number for any order or cut of the same elements; NaN if one is NaN, else infinity if one is infinite.

    Examples
    --------
    >>> import torch, shardwright as sw
    >>> sw.optim.global_norm([torch.tensor([3.0]), torch.tensor([4.0])])
    5.0
    """
    dense = [t if t.layout is not torch.strided or t.is_contiguous() else t.contiguous() for t in tensors]
    return _engine.norm_value([_engine.norm_sum(dense)])
