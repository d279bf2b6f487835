"""Clip gradients by the global norm, with the same bits at every stage: the sum of squares is exact, see optim.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import _engine
from ..backend.device_link import DeviceLink
from ..comm.agreement import added_sums, sums_over_ranks
from ..comm.process_group import host_group, resolve_group
from ..comm.waits import on_every_rank
from ..gradients.sharded_gradient import ShardedGradient
from ..layout.views import as_real
from ..parallel.engine import engine_of
from ..parallel.replica import Replica, live_replicas
from ..torch_compat import cuda
from .device_clip import SCALED_DTYPES, DeviceClip
from .fused import global_norm


@on_every_rank("sw.clip_grad_norm_()")
def clip_grad_norm_(
    module_or_parameters: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor] | Iterable[torch.nn.Module],
    max_norm: float,
    *,
    error_if_nonfinite: bool = False,
    pp_mesh: Any = None,
) -> torch.Tensor:
    """Scale averaged gradients so that their 2-norm is at most `max_norm`. Collective at zero >= 1.

    Parameters
    ----------
    module_or_parameters : Module, Tensor, iterable of Tensor or iterable of Module
        A wrapped module at any stage, or bare modules or parameters, whose gradients are not sliced. Several wrapped
        modules are this rank's pipeline stages of one model.
    max_norm : float
        At least 0.
    error_if_nonfinite : bool
        Raise RuntimeError on every rank, instead of scaling by a norm that is infinite or NaN.
    pp_mesh : DeviceMesh, optional
        The pipeline dimension of a mesh: the norm is that of all its ranks' modules. Collective over it.

    Returns
    -------
    Tensor
        The norm before clipping, a scalar: float64 if a gradient is float64, else float32; on the GPU if the host does
        not wait for it (see Notes). Equal gradients give the same number at every stage, bucket size and world size.

    Raises
    ------
    ValueError
        If max_norm is negative or NaN.

    Notes
    -----
    Scale: max_norm / (norm + 1e-6) if that is below 1, as torch.nn.utils.clip_grad_norm_. Cost: one pass over the
    gradients (at zero >= 1 over this rank's slices), 1,112 bytes a rank, and a second pass if the scale is below 1. On
    a GPU the host does not wait, except with `error_if_nonfinite`, inside join(), and for float64 and complex
    gradients.
    """
    given = module_or_parameters
    if not isinstance(given, (torch.Tensor, torch.nn.Module)):  # a tensor and a Sequential are iterable, too
        if not isinstance(given, Iterable):
            raise TypeError(
                f"clip_grad_norm_ needs a module, a tensor or several of either, got {type(given).__name__}"
            )
        given = list(given)
    return clip(given, max_norm, error_if_nonfinite, pp_mesh)


def clip(
    given: Any,
    max_norm: float,
    error_if_nonfinite: bool = False,
    pp_mesh: Any = None,
    take: Callable[[DeviceClip], bool] | None = None,
) -> torch.Tensor:
    """Clip like clip_grad_norm_(). If `take` returns True, the step that follows multiplies by the scale itself."""
    if isinstance(max_norm, (str, bytes, type(None))):
        raise TypeError(f"clip_grad_norm_: max_norm must be a number, at least 0, got {max_norm!r}")
    if not max_norm >= 0:
        raise ValueError(f"clip_grad_norm_: max_norm must be at least 0, got {max_norm!r}")
    modules = given if isinstance(given, list) else [given]
    modules = modules if all(isinstance(each, torch.nn.Module) for each in modules) else []
    of_modules = [[] if (engine := engine_of(module)) is None else list(engine.replicas) for module in modules]
    replicas = [replica for each in of_modules for replica in each]
    are_stages = pp_mesh is not None or (bool(modules) and isinstance(given, list))
    if are_stages and (not modules or [] in of_modules):
        raise TypeError("clip_grad_norm_: pipeline stages must be wrapped modules")
    for replica in replicas:
        replica.gradients.close_pending()
    parameters: list[torch.Tensor]
    if replicas:
        parameters = [p for replica in replicas for p in replica.table.parameters]
    else:  # a tensor is iterable, but its rows have no gradients
        parameters = list(given.parameters()) if modules else [given] if isinstance(given, torch.Tensor) else given
    own = replicas[0] if replicas else None
    link = None if error_if_nonfinite or are_stages or len(replicas) > 1 else _link_of(parameters, own)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if link is not None:
        is_sliced, measured = own is not None and own.zero > 0, gradients
        if own is not None and is_sliced:
            max_norm, measured = own.gradients.agree_on_clipping(max_norm)
        on_gpu = DeviceClip(link, parameters, measured, max_norm, is_sliced=is_sliced)
        if take is None or not take(on_gpu):
            on_gpu.scale()
        return on_gpu.norm
    if own is None or not (are_stages or len(replicas) > 1 or own.zero or own.model_ranks is not None):
        # by a GPU's kernels if a wrapped module of this process uses that GPU
        real = [_real(gradient) for gradient in gradients]
        link = own.link if own is not None else _link_beside(real)
        norm = global_norm(each.cpu() for each in real) if link is None else _engine.norm_value([link.norm_sum(real)])
    else:

        def squares() -> bytes:
            return added_sums([_squares_of(replica) for replica in replicas])

        if pp_mesh is None:
            norm = _engine.norm_value([squares()])
        else:
            over_stages = host_group(resolve_group(None, pp_mesh), own.group.comm.timeout_s).comm
            norm = _engine.norm_value([sums_over_ranks(over_stages, squares, "all pipeline stages")])
    if error_if_nonfinite and not abs(norm) < float("inf"):
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients is {norm}, so they cannot be clipped")
    scale = max_norm / (norm + 1e-6)
    if not scale >= 1:
        _scale(gradients, scale)
    is_double = any(gradient.dtype in (torch.float64, torch.complex128) for gradient in gradients)
    return torch.tensor(norm, dtype=torch.float64 if is_double else torch.float32, device="cpu")


def _link_of(parameters: list[torch.Tensor], replica: Replica | None) -> DeviceLink | None:
    """Return the link of the GPU that can clip all gradients, alike on all ranks; None if the host needs the norm."""
    if replica is not None and replica.model_ranks is not None:
        return None
    if replica is not None and replica.zero:
        fits = not replica.in_sliced_join and all(each.dtype in SCALED_DTYPES for each in parameters)
        return replica.link if fits else None
    gradients = [p.grad for p in parameters if p.grad is not None]
    is_strided = all(type(each) is torch.Tensor and each.layout is torch.strided for each in gradients)
    if not is_strided or any(each.dtype not in SCALED_DTYPES for each in gradients):
        return None
    if len({each.data_ptr() for each in gradients if each.numel()}) < sum(each.numel() > 0 for each in gradients):
        return None  # two parameters over one memory: it is scaled twice, in two launches
    return replica.link if replica is not None else _link_beside(gradients)


def local_norms(module: torch.nn.Module) -> dict[str, float]:
    """Return the 2-norms of this rank's part of each averaged gradient, by the bare module's names. Not collective.

    The part is the whole gradient at zero=0, else this rank's slices, 0.0 if it owns none; without a gradient, no
    entry.
    """
    engine = engine_of(module)
    if engine is None or not engine.replicas:
        raise _engine.Error("local_norms needs a wrapped module, or the outermost fully sharded one")
    found = {}
    for replica in engine.replicas:
        for index, (name, parameter) in enumerate(zip(replica.table.names, replica.table.parameters)):
            held = replica.gradients.slice_of(index) if replica.zero else parameter.grad
            if held is not None:
                each = held.detach().double() if held.is_floating_point() else held
                found[name] = float(torch.linalg.vector_norm(each))
    return found


def _squares_of(replica: Replica) -> bytes:
    """Return the exact sum of squares of a wrapped module's gradients. Collective at zero >= 1, and over a model mesh."""
    gradients = replica.gradients
    if replica.zero == 0 or (replica.zero == 1 and replica.in_sliced_join):  # a joined rank keeps no gradients
        if replica.zero:
            gradients.slices()  # raises if they are not averaged
        whole = [p.grad for p in replica.table.parameters]
        real = [None if each is None else _real(each) for each in whole]
        squares = gradients.squares_of(lambda: real, over_ranks=False)
    else:
        replica.announce("norm")
        squares = gradients.squares_of(gradients.slices)
    ranks = replica.model_ranks
    return squares if ranks is None else ranks.add_squares(squares, replica.table.sharded_kinds, replica.label)


def _link_beside(gradients: list[torch.Tensor]) -> DeviceLink | None:
    """Return the link of the one GPU that holds all gradients."""
    there = {cuda.runtime.ordinal(each) if cuda.runtime.holds(each) else None for each in gradients}
    links = (replica.link for replica in live_replicas())
    return next((each for each in links if each is not None and there == {each.ordinal} and each.comm.is_alive), None)


def _scale(gradients: list[torch.Tensor], factor: float) -> None:
    """Scale all gradients; on a GPU float32 and float64 together: torch rounds no factor of these to 16 bits."""
    together: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        is_plain = type(gradient) is torch.Tensor and gradient.dtype in (torch.float32, torch.float64)
        if is_plain and cuda.runtime.holds(gradient):
            together.setdefault(gradient.dtype, []).append(gradient)
        else:
            gradient.mul_(factor)
    for each in together.values():
        torch._foreach_mul_(each, factor)


def _real(gradient: torch.Tensor) -> torch.Tensor:
    if isinstance(gradient, ShardedGradient):
        raise _engine.Error("clip_grad_norm_ needs the wrapped module, not its parameters, at zero >= 2")
    return as_real(gradient.coalesce().values() if gradient.is_sparse else gradient)
