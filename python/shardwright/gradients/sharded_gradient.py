"""ShardedGradient: the `.grad` at zero >= 2, which holds only this rank's slice of the averaged gradient.

It has its parameter's shape and dtype and no memory of its own. It supports the operations of training loops: norms
(torch's clip_grad_norm_), clamping (its clip_grad_value_), scaling by a number, GradScaler's unscaling, zeroing, the
next backward's accumulation, and comparison with a tensor (torch.allclose, torch.equal; collective). Reads of programs
that log or check (abs, mean, isnan, clone, numpy, ...; _READS) return what the whole gradient gives, which they gather:
they are collective. Every other operation raises and names sw.full_gradients, so that no code takes a slice for the whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from .._engine import Error
from ..torch_compat.internals import no_torch_function, tree_leaves, without_memory_of

aten = torch.ops.aten


class ShardedGradient(torch.Tensor):
    """The gradient of a parameter of which this rank keeps its slice."""

    #: this rank's elements of the average, one-dimensional, in the parameter's memory order; may be empty
    piece: torch.Tensor
    #: all elements of the average on this rank; more than `piece` if gradients are staged
    _held: torch.Tensor
    #: the sum of backwards since the last round, which the engine takes
    _pending: torch.Tensor | None
    #: True if zeroed since the last round: the average no longer stands
    _cleared: bool
    #: the ModuleGradients of its module, weak, since autograd holds gradients
    _owner: Callable[[], Any]
    _index: int

    @staticmethod
    def __new__(
        cls, index: int, parameter: torch.Tensor, piece: torch.Tensor, owner: Any, held: torch.Tensor | None = None
    ) -> ShardedGradient:
        made: ShardedGradient = without_memory_of(cls, parameter)
        made.piece, made._held = piece, piece if held is None else held
        made._cleared, made._pending = False, None
        made._owner, made._index = weakref.ref(owner), index
        return made

    __torch_function__ = no_torch_function

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        pending = ", with gradients that are not averaged yet" if self._pending is not None else ""
        return f"ShardedGradient(shape={tuple(self.shape)}, {self.piece.numel()} elements on this rank{pending})"

    @property
    def _module(self) -> Any:
        owner = self._owner()
        if owner is None:
            raise Error("this gradient's module is no longer wrapped, and no rank has the others' slices")
        return owner

    def averaged_piece(self) -> torch.Tensor:
        """Return `piece`; raise if a backward has added to it since it was averaged."""
        if self._pending is not None:
            raise Error(
                "a gradient holds what a backward inside no_sync() added, which is not averaged yet: run a backward outside of "
                "it before stepping, clipping or reading gradients"
            )
        return torch.zeros_like(self.piece) if self._cleared else self.piece

    def as_on_this_rank(self) -> torch.Tensor:
        """Return the whole gradient, plus this rank's additions since it was averaged. Collective."""
        module = self._module
        module.announce("read", self._index)
        whole = module.gathered(self._index, self.piece)
        whole = torch.zeros_like(whole) if self._cleared else whole
        return whole if self._pending is None else whole + self._pending

    def rewrite(self, whole: torch.Tensor, piece: torch.Tensor) -> None:
        """Replace the average, on all ranks. `piece`: this rank's slice of `whole`."""
        module = self._module
        self.piece.copy_(piece)
        if self._held is not self.piece:
            self._held.copy_(whole)
        self._cleared = False
        module.forget_norms()

    def clipped(self, max_norm: float) -> torch.Tensor:
        """Return the memory of an averaged gradient for a GPU's clipping kernels, and note the clipping."""
        self._module.scaled(self._index, "clip", max_norm)
        return self._held

    def __deepcopy__(self, memo: Any) -> Any:
        _refuse("cannot be copied")

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse("cannot be pickled")

    def share_memory_(self) -> Any:
        """Raise: module.share_memory() bypasses the dispatch, and torch would read memory that does not exist."""
        raise Error(
            "a gradient of which this rank keeps a slice has no memory to share: zero_grad() first, and wrap again after"
        )

    @property
    def data(self) -> Any:
        """Return the gradient itself. Assigning it would bypass the dispatch and leave the slice unchanged."""
        return self

    @data.setter
    def data(self, value: Any) -> None:
        if value is not self:
            _refuse("has no memory, and its data cannot be replaced")

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        _refuse("has no memory to lend")

    def apply_(self, *_: Any) -> Any:
        """Raise: this and similar methods read memory without the dispatch."""
        _refuse("has no elements to visit")

    map_ = map2_ = apply_  # type: ignore[assignment]

    def numpy(self, **options: Any) -> Any:
        """Return the whole gradient as torch's numpy() does. Collective."""
        return self.as_on_this_rank().numpy(**options)

    def tolist(self) -> Any:
        """Return the whole gradient as torch's tolist() does. Collective."""
        return self.as_on_this_rank().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub declares the default, a plain function, not the protocol
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            raise Error(
                f"{func} was asked of a gradient of which this rank keeps a slice (zero >= 2): "
                "sw.full_gradients(module) gives whole gradients"
            )
        return handler(*args, **(kwargs or {}))


class SteppedGradient(ShardedGradient):
    """The gradient of a parameter that was stepped on in the backward. Its memory is another bucket's by then."""

    #: nothing accumulates on it, and the engine's assignment has no effect
    _cleared = property(lambda self: True, lambda self, value: None)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SteppedGradient(shape={tuple(self.shape)})"

    def averaged_piece(self) -> NoReturn:
        """Raise Error."""
        raise Error(
            "this gradient was stepped on inside the backward and is gone (step_in_backward=True): clipping by the norm, GradScaler and "
            "reads of .grad need sw.wrap without it"
        )

    as_on_this_rank = averaged_piece

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Take what a later backward adds, and zeros; raise Error for the rest."""
        if func not in _OF_STEPPED:
            next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)).averaged_piece()
        return _HANDLERS[func](*args, **(kwargs or {}))


def _refuse(what: str) -> NoReturn:
    raise Error(f"a gradient of which this rank keeps a slice {what}: see sw.full_gradients")


def _add(grad: Any, other: Any, *, alpha: float = 1) -> Any:
    is_gradient = (
        isinstance(other, torch.Tensor) and other.shape == grad.shape and not isinstance(other, ShardedGradient)
    )
    if not isinstance(grad, ShardedGradient) or not is_gradient or alpha != 1:
        _refuse("takes a backward's gradient and nothing else")
    grad._pending = other.clone() if grad._pending is None else grad._pending + other
    return grad


def _scaled(name: str) -> Callable[..., Any]:
    def scale(grad: Any, factor: Any) -> Any:
        if isinstance(factor, torch.Tensor) and (isinstance(factor, ShardedGradient) or factor.numel() != 1):
            _refuse("is scaled by one number only")
        module = grad._module  # raises before anything has changed
        getattr(grad._held, name)(factor)
        if grad._pending is not None:
            grad._pending = getattr(grad._pending.clone(), name)(factor)
        module.scaled(grad._index, name, module.number(factor))
        return grad

    return scale


def _clamp(grad: Any, min: Any = None, max: Any = None) -> Any:
    """Clamp each element of the average between numbers around 0; each rank clamps its own elements."""
    if (min or 0) > 0 or (max or 0) < 0:
        _refuse("is clamped by numbers only, from at most 0 to at least 0")
    grad.averaged_piece()
    module = grad._module
    for name, bound in (("clamp_min_", min), ("clamp_max_", max)):
        if bound is not None:
            getattr(grad._held, name)(bound)
            module.scaled(grad._index, name, float(bound))
    return grad


def _zero(grad: Any) -> Any:
    grad._cleared = True  # keep the slice: other ranks may not have cleared theirs
    grad._pending = None
    return grad


def _fill(grad: Any, value: Any) -> Any:
    if value != 0:
        _refuse("is filled with 0 only")
    return _zero(grad)


def _norm(grad: Any, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> torch.Tensor:
    if dim is not None or keepdim:
        _refuse("has a norm over all of it, not by dimension")
    if grad._cleared and grad._pending is None:
        nothing = torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)
        return torch.linalg.vector_norm(nothing, order, dtype=dtype)
    real = grad.dtype.to_real() if hasattr(grad.dtype, "to_real") else grad.dtype
    norm = grad._module.norm(grad._index, float(order), grad.averaged_piece)
    # a CPU scalar needs no copy to the GPU and no wait
    return torch.full((), norm, dtype=dtype or real, device=grad.device)


def _norms(grads: Any, order: Any = 2, dtype: Any = None) -> list[torch.Tensor]:
    return [
        _norm(g, order, dtype=dtype) if isinstance(g, ShardedGradient) else torch.linalg.vector_norm(g, order)
        for g in grads
    ]


def _each(name: str) -> Callable[..., Any]:
    """Apply a foreach operation gradient by gradient, to ours and to plain tensors."""

    def apply(grads: Any, factors: Any = None) -> None:
        several = isinstance(factors, (list, tuple))
        for position, grad in enumerate(grads):
            arguments = () if factors is None else (factors[position] if several else factors,)
            getattr(grad, name)(*arguments)

    return apply


def unscale_on_this_rank(grads: Any, found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Unscale averaged gradients of one dtype, whole or sliced, and set `found_inf` if one overflowed."""
    sliced = [grad for grad in grads if isinstance(grad, ShardedGradient)]
    for grad in sliced:
        grad.averaged_piece()
    for grad in sliced:
        grad._module.scaled(grad._index, "mul_", grad._module.number(inverse_scale))
    plain = [g._held if isinstance(g, ShardedGradient) else g for g in grads]
    aten._amp_foreach_non_finite_check_and_unscale_([g for g in plain if g.numel()], found_inf, inverse_scale)


def _unscale(grads: Any, found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Answer torch's GradScaler. Modules with DTensors: parallel/composition/loss_scaling.py."""

    def overflowed() -> bool:
        unscale_on_this_rank(grads, found_inf, inverse_scale)
        return bool(found_inf.item())

    module = next(grad._module for grad in grads if isinstance(grad, ShardedGradient))
    module.announce("vote")
    if module.any_rank(overflowed):
        found_inf.fill_(1.0)


def _read(function: Any) -> Callable[..., Any]:
    """Handle an operation that writes to nothing and whose result shares no memory with a gradient. Collective."""

    def read(*arguments: Any, **options: Any) -> Any:
        whole: dict[int, torch.Tensor] = {}  # one gradient may be several operands
        for each in arguments:
            if isinstance(each, ShardedGradient) and id(each) not in whole:
                whole[id(each)] = each.as_on_this_rank()
        return function(*(whole.get(id(each), each) for each in arguments), **options)

    return read


#: operations that _read() handles. Arithmetic with other tensors is left out: `p.grad = p.grad + penalty` would be no average
_READS = (
    "abs,clone,isnan,isposinf,isneginf,sign,sqrt,log,log10,log2,histc,median,nanmedian,sort,topk,amax,amin,aminmax,argmax,argmin",
    "sum,sum.dim_IntList,nansum,mean,mean.dim,std.correction,var.correction,var_mean.correction,max,max.dim,min,min.dim",
    "pow.Tensor_Scalar,any,any.dim,all,all.dim,count_nonzero,count_nonzero.dim_IntList,_local_scalar_dense,_to_copy,allclose,equal",
    "eq.Tensor,ne.Tensor,eq.Scalar,ne.Scalar,lt.Scalar,le.Scalar,gt.Scalar,ge.Scalar,histogram.bin_ct",
)


def _reads() -> dict[Any, Callable[..., Any]]:
    found = {}
    for name in ",".join(_READS).split(","):
        packet, _, overload = name.partition(".")
        function = getattr(getattr(aten, packet, None), overload or "default", None)
        if function is not None:  # missing in older torch
            found[function] = _read(function)
    return found


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.add_.Tensor: _add,
    aten.mul_.Tensor: _scaled("mul_"),
    aten.mul_.Scalar: _scaled("mul_"),
    aten.div_.Tensor: _scaled("div_"),
    aten.div_.Scalar: _scaled("div_"),
    aten.clamp_.default: _clamp,
    aten.clamp_min_.default: _clamp,
    aten.clamp_max_.default: lambda grad, max: _clamp(grad, max=max),
    aten._foreach_clamp_min_.Scalar: _each("clamp_min_"),
    aten._foreach_clamp_max_.Scalar: _each("clamp_max_"),
    **_reads(),
    aten.zero_.default: _zero,
    aten.fill_.Scalar: _fill,
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: _norm,
    aten._foreach_norm.Scalar: _norms,
    aten._foreach_mul_.Scalar: _each("mul_"),
    aten._foreach_mul_.Tensor: _each("mul_"),
    aten._foreach_mul_.ScalarList: _each("mul_"),
    aten._foreach_div_.Scalar: _each("div_"),
    aten._foreach_div_.Tensor: _each("div_"),
    aten._foreach_zero_.default: _each("zero_"),
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten.detach.default: lambda grad: grad,
}
_OF_STEPPED = {
    aten.add_.Tensor,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten._foreach_zero_.default,
    aten.detach.default,
}
