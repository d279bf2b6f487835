"""Checks of modules that sw.fully_shard was called on, whose parameters are DTensors over rows."""

import torch
from oracle.fold import bits_equal
from torch.distributed.tensor import DTensor, Shard


def rows_of(whole, rank, world_size, dim=0):
    """Return the rows of a tensor that a rank has: a chunk of torch.chunk, or none."""
    chunks = torch.chunk(whole, world_size, dim)
    return chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)


def assert_released(module):
    """No parameter is whole: each is a DTensor of rows."""
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter, torch.nn.Parameter), name
        assert any(isinstance(each, Shard) for each in parameter.placements), name


def assert_same_state(module, whole):
    """A module has the values of a whole state dict, by each rank's rows and as whole tensors."""
    found = module.state_dict()
    assert found.keys() == whole.keys()
    for name, value in found.items():
        each = value.full_tensor() if isinstance(value, DTensor) else value
        assert bits_equal(each.detach(), whole[name]), name
