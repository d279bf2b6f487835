"""Law: a module with DTensor parameters trains over the data-parallel dimension of its mesh as the whole model does in one
process, with the same bits at every stage; norms count each parameter once; states are whole and load at any split."""

import pytest
import torch
from harness import on_every_rank, same_everywhere
from model_parallel_subjects import STEPS, mesh_of, oracle, train, wrapped
from oracle.fold import bits_equal
from peer import PEER, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

MAX_NORM = 0.7


@on_every_rank(exactly=4)
def test_every_stage_has_the_bits_of_stage_0_and_the_values_of_one_process(rank, world_size):
    mesh = mesh_of(2, 2)
    place = mesh.get_local_rank("dp")
    expected, expected_norms, _ = oracle(2, MAX_NORM)
    first = None
    for stage in (0, 1, 2, 3, "private", "by hand"):
        model, optimizer = wrapped(mesh, stage)
        parameters = list(model.parameters())
        norms = train(model, optimizer, place, STEPS, MAX_NORM)
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        found = sw.full_state_dict(model)
        assert norms == pytest.approx(expected_norms, rel=1e-5) and same_everywhere([norms, *found.values()]), stage
        first = first or (found, norms)
        assert norms == first[1], stage
        for name, value in found.items():
            assert bits_equal(value, first[0][name]), (stage, name)
            assert torch.allclose(value, expected[name], rtol=0, atol=1e-6), (stage, name)
