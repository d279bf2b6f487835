"""Muon: momentum whose matrices are made orthogonal before they are added, and AdamW for all that is no matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..torch_compat.dtensor import held_tensor, is_dtensor, placed_like, redistributed, replicate, waited
from .fused import _AdamStep
from .master_weights import as_written, master_of

__all__ = ["Muon", "muon_groups"]

#: convolutions whose weights have three dimensions, as stacks of matrices have
_OF_LINES = (torch.nn.Conv1d, torch.nn.ConvTranspose1d)
_ALGORITHMS = ("muon", "adamw")
_SCALES = ("original", "match_rms_adamw")
#: elements of the largest matrix that is multiplied with others of its stack: larger ones gain nothing by it
_SMALL_NUMEL = 1 << 14
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def muon_groups(
    module: torch.nn.Module,
    *,
    rule: Callable[[str, Tensor], str | None] | None = None,
    rows: Callable[[str, Tensor], Sequence[int] | None] | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups for `Muon`: which parameters are stepped on as matrices, and which by AdamW.

    A weight of two dimensions is a matrix, and one of three a stack of them (experts). AdamW takes everything else, and

    - weights of `torch.nn.Embedding` and `EmbeddingBag`, and those tied to them;
    - the output layer: a `torch.nn.Linear` with the shape of an embedding that has more rows than columns, and what the
      module's `get_output_embeddings()` returns. One that is padded to another size is not found: name it by `rule`;
    - weights of convolutions, stacks of one matrix (position embeddings), and what is neither.

    Parameters
    ----------
    module : torch.nn.Module
        The model, before or after `sw.wrap`.
    rule : callable, optional
        rule(name, parameter) returns "muon", "adamw", or None for the rule above.
    rows : callable, optional
        rows(name, parameter) returns the heights of the blocks that a matrix consists of, each made orthogonal by itself,
        or None: a fused query-key-value weight of three equal parts is [d, d, d], one of 8 heads is [d / 8] * 8.

    Returns
    -------
    list of dict
        Groups with "params", "names", "algorithm" and, where given, "rows". Print or change them; a group may
        have options of its own, such as "lr".

    Examples
    --------
    >>> import torch, shardwright as sw
    >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 10))
    >>> for group in sw.optim.muon_groups(model):
    ...     print(group["algorithm"], group["names"])
    muon ['1.weight']
    adamw ['0.weight', '1.bias', '2.weight', '2.bias']
    """
    found: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    apart = _no_matrices(module)
    for name, parameter in module.named_parameters():
        algorithm = None if rule is None else rule(name, parameter)
        if algorithm is None:
            is_matrix = parameter.dim() == 2 or (parameter.dim() == 3 and parameter.shape[0] > 1)
            algorithm = "muon" if is_matrix and id(parameter) not in apart else "adamw"
        heights = tuple(rows(name, parameter) or ()) if rows is not None and algorithm == "muon" else ()
        group = found.setdefault((algorithm, heights), {"params": [], "names": [], "algorithm": algorithm})
        group["params"].append(parameter)
        group["names"].append(name)
        if heights:
            group["rows"] = heights
    return sorted(found.values(), key=lambda group: group["algorithm"] == "adamw")


def _no_matrices(module: torch.nn.Module) -> set[int]:
    """Return the ids of weights of embeddings, output layers and convolutions."""
    embeddings = [each for each in module.modules() if isinstance(each, (torch.nn.Embedding, torch.nn.EmbeddingBag))]
    shapes = {
        (each.num_embeddings, each.embedding_dim) for each in embeddings if each.num_embeddings > each.embedding_dim
    }
    found = {id(each.weight) for each in embeddings}
    for each in module.modules():
        is_output = isinstance(each, torch.nn.Linear) and (each.out_features, each.in_features) in shapes
        if is_output or isinstance(each, _OF_LINES):
            found.add(id(each.weight))
        output = getattr(each, "get_output_embeddings", None)
        output = output() if callable(output) else None
        found.add(id(getattr(output, "weight", None)))
    return found


class Muon(_AdamStep):
    r"""Muon for matrices, AdamW for the rest, in one optimizer.

    Parameters
    ----------
    params : torch.nn.Module, or iterable of Tensor or of dict
        A module, from which `muon_groups` makes groups; groups, each with its "algorithm", "muon" or "adamw"; or, as
        in torch.optim.Muon, matrices. ValueError for a tensor under "muon" that is neither a matrix nor a stack of them.
    lr : float or Tensor, default 1e-3
        Learning rate of both algorithms.
    weight_decay : float, default 0.1
        Decoupled, for both.
    momentum : float, default 0.95
    nesterov : bool, default True
    ns_coefficients : three floats
        a, b, c of the Newton-Schulz polynomial a x + b x^3 + c x^5.
    eps : float, default 1e-7
        Least norm by which an update is divided; groups of AdamW have `adamw_eps`.
    ns_steps : int, default 5
        Newton-Schulz iterations, in [1, 99].
    adjust_lr_fn : {None, "original", "match_rms_adamw"}
        Scale of an update of A x B: sqrt(max(1, A / B)), the default, or 0.2 sqrt(max(A, B)), with which AdamW's learning
        rate and weight decay fit.
    adamw_lr, betas, adamw_eps : float, pair of float, float
        Of AdamW; adamw_lr is `lr` by default.
    ns_dtype : {"bfloat16", "float32"}
        Dtype of the iterations.
    maximize : bool, default False
    master : bool, default True
        As in `AdamW`.

    Raises
    ------
    ValueError
        For an option out of range, or blocks of rows that do not add up to a matrix's.

    Notes
    -----
    State: one momentum buffer for each matrix, AdamW's two moments for others. Matrices get the bits of
    `torch.optim.Muon` with the same options; those of AdamW the bits of `sw.optim.AdamW`. State dicts of torch.optim.Muon
    load. A step costs 2 `ns_steps` (2 m^2 n + m^3) operations for a matrix of m x n, m <= n. At zero >= 1 each matrix
    belongs to one rank, so that ranks have equal work (docs/optimizers.md).

    References
    ----------
    Jordan and others, *Muon: An optimizer for hidden layers in neural networks*, 2024. Liu and others, *Muon is Scalable
    for LLM Training*, 2025, section 2.2 (match_rms_adamw).

    Examples
    --------
    >>> import torch, shardwright as sw
    >>> model = torch.nn.Linear(4, 4, bias=False)
    >>> optimizer = sw.optim.Muon(model, lr=0.02, weight_decay=0.0)
    >>> model(torch.eye(4)).sum().backward()
    >>> optimizer.step()
    """

    can_offload = False  # torch's operations step on matrices, in memory

    def __init__(
        self,
        params: torch.nn.Module | ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw_lr: float | Tensor | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        ns_dtype: str = "bfloat16",
        maximize: bool = False,
        master: bool = True,
    ) -> None:
        self._master = master
        self._of_adamw = {"lr": lr if adamw_lr is None else adamw_lr, "eps": adamw_eps}
        groups: Any = muon_groups(params) if isinstance(params, torch.nn.Module) else params
        if isinstance(groups, Mapping):
            groups = [groups]
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "ns_coefficients": ns_coefficients,
            "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn, "betas": betas, "ns_dtype": ns_dtype, "maximize": maximize,
            "amsgrad": False, "decoupled_weight_decay": True, "algorithm": "muon", "rows": (),
        }  # fmt: skip
        super().__init__(groups, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, of AdamW if its "algorithm" is. ValueError for an option or a shape that does not fit."""
        param_group.pop("names", None)
        if param_group.get("algorithm") == "adamw":
            for key, value in self._of_adamw.items():
                param_group.setdefault(key, value)
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_of_adamw": self._of_adamw}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # of torch.optim.Muon
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load torch's format, also of torch.optim.Muon: what its groups lack stays as it is here."""
        own = [{key: group[key] for key in ("algorithm", "rows", "ns_dtype")} for group in self.param_groups]
        saved = state_dict["param_groups"]
        if len(own) == len(saved):
            state_dict = {**state_dict, "param_groups": [{**mine, **theirs} for mine, theirs in zip(own, saved)]}
        super().load_state_dict(state_dict)

    def take_clip(self, clip: Any) -> bool:
        return False  # a matrix is stepped on by torch, which does not know the factor

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        first, last = group["betas"]
        legal = {
            "algorithm": ("'muon' or 'adamw'", group["algorithm"] in _ALGORITHMS),
            "lr": (">= 0", 0.0 <= float(group["lr"])),
            "weight_decay": (">= 0", 0.0 <= group["weight_decay"]),
            "momentum": ("in [0, 1)", 0.0 <= group["momentum"] < 1.0),
            "eps": (">= 0", 0.0 <= group["eps"]),
            "betas": ("two numbers in [0, 1)", 0.0 <= first < 1.0 and 0.0 <= last < 1.0),
            "ns_steps": ("in [1, 99]", 1 <= group["ns_steps"] <= 99),
            "ns_coefficients": ("three numbers", len(group["ns_coefficients"]) == 3),
            "adjust_lr_fn": (f"None or one of {_SCALES}", group["adjust_lr_fn"] in (None, *_SCALES)),
            "ns_dtype": (f"one of {tuple(_DTYPES)}", group["ns_dtype"] in _DTYPES),
        }
        for option, (range_, is_legal) in legal.items():
            if not is_legal:
                raise ValueError(f"sw.optim.Muon: {option} must be {range_}, got {group[option]!r}")
        if group["algorithm"] == "adamw":
            return
        for position, p in enumerate(group["params"]):
            if p.dim() not in (2, 3):
                raise ValueError(
                    f"sw.optim.Muon: parameter {position} of group {len(self.param_groups) - 1} must be a matrix or a stack of "
                    f"matrices, not of shape {tuple(p.shape)}: give it to a group with algorithm='adamw', as sw.optim.muon_groups does"
                )
            if group["rows"] and sum(group["rows"]) != p.shape[-2]:
                raise ValueError(
                    f"sw.optim.Muon: rows {tuple(group['rows'])} must add up to the {p.shape[-2]} rows of parameter {position} of group "
                    f"{len(self.param_groups) - 1}, not {sum(group['rows'])}"
                )

    def _keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["algorithm"] == "muon" else super()._keys(group)

    def _step_group(self, group: dict[str, Any], grad_scale: float) -> None:
        if group["algorithm"] == "adamw":
            super()._step_group(group, grad_scale)
            return
        lr, factor = float(group["lr"]), -grad_scale if group["maximize"] else grad_scale
        for p in group["params"]:
            if p.grad is None:
                continue
            state, has_master = self.state[p], self._has_master(p)
            target = p
            if has_master:
                target = master_of(p, state)
                target.copy_(as_written(target, p))
            gradient = p.grad.to(target.dtype)
            if factor != 1.0:
                gradient = gradient * factor
            buffer = state.get("momentum_buffer")
            if buffer is None:
                buffer = state["momentum_buffer"] = torch.zeros_like(target, memory_format=torch.preserve_format)
            buffer.lerp_(gradient, 1 - group["momentum"])
            update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
            target.mul_(1 - lr * group["weight_decay"])
            heights = list(group["rows"]) or [p.shape[-2]]
            held = _by_matrices(update) if is_dtensor(update) else None
            local = update if held is None else waited(held_tensor(held))
            how = group["ns_coefficients"], group["ns_steps"], group["eps"], _DTYPES[group["ns_dtype"]]
            is_even = len(heights) > 1 and len(set(heights)) == 1
            blocks = local.reshape(-1, heights[0], p.shape[-1]) if is_even else local
            if is_even and _is_batched(blocks, how[-1]):
                made = [orthogonal(blocks, *how).reshape(local.shape)]
            else:
                made = [orthogonal(each, *how) for each in ([local] if len(heights) == 1 else local.split(heights, -2))]
            scales = [_scale((height, p.shape[-1]), group["adjust_lr_fn"]) for height in heights]
            if held is not None:  # blocks of a DTensor are no views
                whole = (
                    made[0] if len(made) == 1 else torch.cat([each.float() * s for each, s in zip(made, scales)], -2)
                )
                placed = redistributed(placed_like(whole.contiguous(), held), target.placements)
                target.add_(placed, alpha=-lr * (scales[0] if len(made) == 1 else 1.0))
            elif len(made) == 1:
                target.add_(made[0], alpha=-lr * scales[0])
            else:
                for block, each, scale in zip(target.split(heights, -2), made, scales):
                    block.add_(each, alpha=-lr * scale)
            if has_master:
                p.copy_(target)


def _is_batched(matrices: Tensor, dtype: torch.dtype) -> bool:
    """Return True if the matrices of a stack are multiplied together. In float32 on a CPU that would be slower."""
    small = matrices.dim() == 3 and 0 < matrices[:1].numel() <= _SMALL_NUMEL
    return small and (dtype is not torch.float32 or not matrices.is_cpu)


def orthogonal(matrices: Tensor, coefficients: Iterable[float], steps: int, eps: float, dtype: torch.dtype) -> Tensor:
    """Return the matrix, or each matrix of a stack, with singular values near 1, in `dtype`.

    Small matrices of a stack are multiplied together. Which ones does not depend on what a rank owns.
    """
    multiply: Any = torch.addmm
    if matrices.dim() == 3:
        if not _is_batched(matrices, dtype):
            made = [orthogonal(each, coefficients, steps, eps, dtype) for each in matrices]
            return torch.stack(made) if made else matrices.to(dtype)
        multiply = torch.baddbmm
    a, b, c = coefficients
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.to(dtype, copy=True)
    x = x.mT if is_tall else x
    for each in x if x.dim() == 3 else [x]:
        each.div_(each.norm().clamp(min=eps))  # the spectral norm is at most this one
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply(x, multiply(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _by_matrices(update: Any) -> Any:
    """Return a DTensor of which each rank holds whole matrices: all of one matrix, its own ones of a stack. Collective."""
    is_stack = update.dim() == 3
    placements = [each if is_stack and getattr(each, "dim", None) == 0 else replicate() for each in update.placements]
    return redistributed(update, placements)


def _scale(shape: Sequence[int], rule: str | None) -> float:
    rows, columns = shape
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))
