"""Experts in groups of their own, and tensor parallelism, as subjects of the same laws: 4 ranks."""

import expert_subjects as experts
import model_parallel_subjects as tensors
import torch
from internals import engine_of


class Experts:
    def __init__(self):
        self.mesh = experts.mesh_of(2)

    def plain(self):
        return experts.distributed(self.mesh)

    def wrapped(self, stage, **options):
        return experts.wrapped(self.mesh, stage, **options)

    def backward(self, model, step, rank):
        experts.backward(model, step, rank)


class Tensors:
    def __init__(self):
        self.mesh = tensors.mesh_of(2, 2)

    def plain(self):
        return tensors.parallelized(self.mesh)

    def wrapped(self, stage, **options):
        return tensors.wrapped(self.mesh, stage, **options)

    def backward(self, model, step, rank):
        tensors.with_loss_parallel(model, tensors.tokens(step, self.mesh.get_local_rank("dp")))


SUBJECTS = {"experts": Experts, "tensors": Tensors}


def own(model):
    """Return the engine of a module, whichever way it was wrapped."""
    return engine_of(model)


def part_of(whole, parameter):
    """Return this rank's part of a whole tensor, as `parameter` is placed."""
    if not hasattr(parameter, "placements"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, parameter.device_mesh, parameter.placements).to_local()


def whole_of(part, parameter):
    """Return the whole of a part. Collective over the parameter's mesh."""
    if not hasattr(parameter, "placements"):
        return part
    from torch.distributed.tensor import DTensor

    kept = {"shape": parameter.shape, "stride": parameter.stride()}
    placed = DTensor.from_local(part, parameter.device_mesh, parameter.placements, run_check=False, **kept)
    return placed.full_tensor()


def placed_as(gradient, parameter):
    """Return a gradient with the placements of its parameter."""
    return gradient.redistribute(placements=parameter.placements) if hasattr(parameter, "placements") else gradient


def local(value):
    return value.to_local() if hasattr(value, "to_local") else value


def gathered(value, group):
    found = [torch.empty_like(value) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(found, value.contiguous(), group=group)
    return found
