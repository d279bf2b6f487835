"""Clipping on a GPU: norm and factor stay there, and the host does not wait.

One launch per table of tensors adds the squares of all gradients. As many multiply gradients by the factor, or the
kernels of a sw.optim optimizer do so in the next step and write the product back: `.grad` is clipped either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..backend.device_link import DeviceLink
from ..gradients.sharded_gradient import ShardedGradient
from ..layout.views import dense_strides
from ..torch_compat import cuda
from ..torch_compat.autograd import increment_versions

#: dtypes that the kernels multiply with the bits of torch's mul_
SCALED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class DeviceClip:
    """The norm of `measured`, a float32 scalar on the GPU, and the factor that clips the gradients of `parameters`.

    With `is_sliced` the norm is over all ranks' tensors, and making the object is collective.
    """

    def __init__(
        self,
        link: DeviceLink,
        parameters: Sequence[torch.Tensor],
        measured: Iterable[torch.Tensor],
        max_norm: float,
        *,
        is_sliced: bool,
    ) -> None:
        link.refuse_capture("a norm")
        result = cuda.runtime.zeros(2, torch.float32, parameters[0])
        link.clip(measured, max_norm, result, is_sliced=is_sliced)
        self.norm, self._factor = result.unbind()
        self.address = self._factor.data_ptr()  # of a float32
        self._link, self._members = link, {id(parameter) for parameter in parameters}
        self._gradients: list[torch.Tensor] = []  # memory to multiply by the factor
        for parameter in parameters:
            gradient = parameter.grad
            if isinstance(gradient, ShardedGradient):
                self._gradients.append(gradient.clipped(max_norm))
            elif gradient is not None:
                self._gradients.append(gradient.detach())

    def covers(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return True if the gradients of all `parameters` are in this clip."""
        return all(id(parameter) in self._members for parameter in parameters)

    def count_stepped(self, gradients: Iterable[torch.Tensor]) -> None:
        """Note that an optimizer's kernels have multiplied the memory of `gradients`."""
        done = {gradient.data_ptr() for gradient in gradients}
        self._gradients = [each for each in self._gradients if each.data_ptr() not in done]

    @torch.no_grad()
    def scale(self) -> None:
        """Multiply all gradients that no kernel has multiplied yet."""
        gradients, self._gradients = [each for each in self._gradients if each.numel()], []
        dense = [each for each in gradients if _is_plain(each)]
        self._link.scale(dense, self._factor)
        increment_versions(dense)
        for gradient in gradients:
            if not _is_plain(gradient):
                gradient.copy_(gradient.float() * self._factor)


def _is_plain(gradient: torch.Tensor) -> bool:
    return type(gradient) is torch.Tensor and dense_strides(gradient) is not None
