"""SyncBatchNorm: batch normalisation over the batches of all ranks together, on CPU and GPU tensors.

torch's own class rejects CPU tensors. Each rank sends one row: count, mean and biased variance of its batch, one value
per channel. Every rank combines the rows in rank order, in float32 or wider, so all statistics are equal bit for bit.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from ..comm.process_group import gather_in_rank_order, group_size
from ..torch_compat.internals import BatchNorm


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """Batch normalisation over the batches of all ranks of a group. Collective in training, in forward and in backward.

    Arguments, parameters, buffers and state_dict are those of torch.nn.SyncBatchNorm. With one rank, and in evaluation,
    where a rank may run alone, it computes torch's batch_norm.

    Notes
    -----
    With the ranks' counts n_r, means and biased variances v_r: N = sum n_r, mean = sum n_r mean_r / N and var = sum n_r
    (v_r + (mean_r - mean)^2) / N; running_var takes N / (N - 1) var. Weight and bias get the gradient of this rank's
    loss, which a wrapper averages like any other. Ranks may have batches of different sizes, including none. Cost: an
    all_reduce of (2 C + 1) W float32 in forward and 2 C W in backward, over torch's group.

    References
    ----------
    Ioffe and Szegedy, "Batch Normalization", 2015, algorithm 1; Chan, Golub and LeVeque, "Updating formulae and a
    pairwise algorithm for computing sample variances", 1979, for the joined variance.

    Examples
    --------
    >>> import torch, shardwright as sw
    >>> inner = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    >>> model = sw.SyncBatchNorm.convert_sync_batchnorm(inner)
    >>> type(model[1]).__module__.startswith("shardwright")
    True
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm of {self.num_features} channels got an input of shape {tuple(input.shape)}"
            )
        if not self.training or group_size(self.process_group) == 1:
            return BatchNorm.forward(self, input)
        output, mean, variance, count = _Normalise.apply(input, self.weight, self.bias, self.eps, self.process_group)
        if self.track_running_stats:
            self._track(mean, variance, count)
        return output

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        factor = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else factor
        unbiased = variance * (count / (count - 1).clamp(min=1.0))
        for running, now in ((self.running_mean, mean), (self.running_var, unbiased)):
            if running is not None:
                running.mul_(1 - factor).add_(now.to(running.dtype), alpha=factor)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_group: Any = None) -> torch.nn.Module:
        """Replace every BatchNorm in `module` by one of this class with its parameters and buffers; return `module`."""
        if isinstance(module, BatchNorm) and not isinstance(module, cls):
            settings = module.eps, module.momentum, module.affine, module.track_running_stats, process_group
            made = cls(module.num_features, *settings)
            for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked", "training"):
                setattr(made, name, getattr(module, name))
            return made
        for name, child in module.named_children():
            changed = cls.convert_sync_batchnorm(child, process_group)
            if changed is not child:
                setattr(module, name, changed)
        return module


class _Normalise(torch.autograd.Function):
    """Compute (output, mean, biased variance, count) over all ranks; no double backward."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, group: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        others = [dim for dim in range(input.dim()) if dim != 1]
        numel = input.numel() // input.shape[1] if input.shape[1] else 0
        own = wide.new_zeros(2 * input.shape[1] + 1)
        own[0] = numel
        if numel:
            variance, mean = torch.var_mean(wide, others, correction=0)
            own[1:] = torch.cat([mean, variance])
        rows = gather_in_rank_order(own, group)
        count = cast(torch.Tensor, sum(row[0] for row in rows))
        means, variances = zip(*(row[1:].chunk(2) for row in rows))
        mean = sum(row[0] * each for row, each in zip(rows, means)) / count
        variance = sum(row[0] * (v + (each - mean).square()) for row, each, v in zip(rows, means, variances)) / count
        shape = [1, -1] + [1] * (input.dim() - 2)
        scale = torch.rsqrt(variance + eps)
        normal = (wide - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normal, weight, scale, count)
        ctx.group, ctx.others, ctx.shape, ctx.dtype = group, others, shape, input.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        output = normal
        if weight is not None:
            output = output * weight.to(wide.dtype).view(shape)
        if bias is not None:
            output = output + bias.to(wide.dtype).view(shape)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *unused: Any) -> tuple[torch.Tensor | None, ...]:
        normal, weight, scale, count = ctx.saved_tensors
        wide = gradient.to(normal.dtype)
        of_bias, of_weight = wide.sum(ctx.others), (wide * normal).sum(ctx.others)
        for_input = for_weight = for_bias = None
        if ctx.needs_input_grad[0]:
            rows = gather_in_rank_order(torch.cat([of_bias, of_weight]), ctx.group)
            total_bias, total_weight = (sum(part) / count for part in zip(*(row.chunk(2) for row in rows)))
            inner = wide - total_bias.view(ctx.shape) - normal * total_weight.view(ctx.shape)
            factor = scale if weight is None else scale * weight.to(scale.dtype)
            for_input = (inner * factor.view(ctx.shape)).to(ctx.dtype)
        if weight is not None and ctx.needs_input_grad[1]:
            for_weight = of_weight.to(weight.dtype)
        if ctx.needs_input_grad[2]:
            for_bias = of_bias.to(weight.dtype if weight is not None else ctx.dtype)
        return for_input, for_weight, for_bias, None, None
