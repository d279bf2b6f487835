"""Law: all ranks save to an fsspec address and restore from it alone. A failure of the one rank that uploads is an
error on every rank.
"""

import shutil

import pytest
import torch
from harness import change, on_every_rank
from peer import PEER, batch, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder
from torch import nn

pytest.importorskip("fsspec")
pytestmark = pytest.mark.skipif(PEER == "torch", reason="shardwright's checkpoints")


def trained(seed, rank):
    torch.manual_seed(seed)
    module = nn.Linear(7, 9)
    model, optimizer = sw.wrap(module, torch.optim.Adam(module.parameters()), zero=2)
    model(batch(rank, 6, 7)).square().mean().backward()
    optimizer.step()
    return model, optimizer


@on_every_rank(at_least=2)
def test_all_ranks_save_to_an_address_and_restore_from_it(rank, world_size):
    from internals import mirror as mirrors

    change(mirrors, _PAUSES_S=(0.01,))
    folder = shared_folder(rank)
    address, local = f"file://{folder}/remote", {"local_directory": f"{folder}/local"}
    model, optimizer = trained(0, rank)
    expected = sw.full_state_dict(model)
    with sw.Checkpointer(f"{address}/run", model, optimizer, **local) as checkpoints:
        checkpoints.save(4)
    sw.save(f"{address}/one", model, optimizer, **local)
    if rank == 0:
        shutil.rmtree(f"{folder}/local")
    again = trained(1, rank)
    with sw.Checkpointer(f"{address}/run", *again, **local) as checkpoints:
        if rank == 0:
            checkpoints._place.mirror._store.download = lambda *_: 1 / 0
        with pytest.raises(sw.CheckpointError, match="download from .* failed: division by zero"):
            checkpoints.restore()
        if rank == 0:
            del checkpoints._place.mirror._store.download
        assert checkpoints.restore() == 5
        if rank == 0:
            checkpoints._place.mirror._store.upload = lambda *_: 1 / 0
        checkpoints.save(5)
        with pytest.raises(sw.CheckpointError, match="division by zero"):
            checkpoints.wait()
        if rank == 0:
            del checkpoints._place.mirror._store.upload
    assert all(torch.equal(value, expected[name]) for name, value in sw.full_state_dict(again[0]).items())
    again = trained(2, rank)
    sw.load(f"{address}/one", *again, **local)
    assert all(torch.equal(value, expected[name]) for name, value in sw.full_state_dict(again[0]).items())
    with pytest.raises(sw.CheckpointError, match="has no checkpoint"):
        sw.load(f"{address}/none", *again, **local)
