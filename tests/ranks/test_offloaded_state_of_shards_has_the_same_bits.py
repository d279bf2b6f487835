"""Law of offload="nvme:<folder>" beside tensor parallelism and with experts in groups of their own: parameters, states and
checkpoints have the bits of no offload."""

import os
from pathlib import Path

import pytest
import torch
from composed_subjects import SUBJECTS
from harness import LONG, gather, on_every_rank
from oracle.fold import bits_equal
from peer import PEER, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")


def wrap(subject, kind, zero, **options):
    model = subject.plain()
    own = {"groups": {"layers.*.experts": subject.mesh["dp_mod_ep"]}} if kind == "experts" else {}
    own = own or {"device_mesh": subject.mesh["dp"]}
    if zero == "private":
        own["share_parameters"] = False
    optimizer = sw.optim.AdamW(model.parameters(), lr=1e-2)
    return sw.wrap(model, optimizer, zero=3 if zero == "private" else zero, clip_grad_norm=0.5, **own, **options)


def train(subject, model, optimizer, rank, first, steps):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        subject.backward(model, step, rank)
        optimizer.step()
    state = sw.full_optimizer_state_dict(model, optimizer)["state"]
    tensors = [each for number in sorted(state) for _, each in sorted(state[number].items())]
    return [*sw.full_state_dict(model).values(), *tensors]


@pytest.mark.parametrize("kind", SUBJECTS)
@on_every_rank(exactly=4)
def test_every_stage_has_the_bits_of_no_offload(rank, world_size, kind):
    subject, folder = SUBJECTS[kind](), Path(os.environ["SW_TEST_FOLDER"]) / f"offloaded-{kind}"
    place = folder / f"rank-{rank}"
    place.mkdir(parents=True)
    expected = None
    for stage in (1, 2, 3, "private") if LONG else (2, "private"):
        random = torch.get_rng_state()
        if expected is None:
            model, optimizer = wrap(subject, kind, stage)
            expected = train(subject, model, optimizer, rank, 0, 3)
            torch.set_rng_state(random)
            sw.save(folder / "plain", model, optimizer, step=3)
        model, optimizer = wrap(subject, kind, stage, offload=f"nvme:{place}")
        found = train(subject, model, optimizer, rank, 0, 3)
        assert all(bits_equal(a, b) for a, b in zip(found, expected, strict=True)), stage
        described = sw.describe()["models"][-1 - (kind == "experts")]
        held = sum(each.nbytes for own in optimizer.state.values() for key, each in own.items() if key != "step")
        assert described["offload"] == f"nvme:{place}"
        assert described["optimizer_state_bytes"] == held <= described["offload_bytes"]
        torch.set_rng_state(random)
        sw.save(folder / str(stage), model, optimizer, step=3)
        for each in filter(Path.is_file, (folder / "plain").iterdir()):
            same = each.name == "MANIFEST.json" or each.read_bytes() == (folder / str(stage) / each.name).read_bytes()
            assert same, (stage, each.name)
        model, optimizer = wrap(subject, kind, stage, offload=f"nvme:{place}")
        sw.load(folder / "plain", model, optimizer)
        assert all(
            bits_equal(a, b) for a, b in zip(train(subject, model, optimizer, rank, 3, 0), expected, strict=True)
        )
    assert os.listdir(place) == []

    with pytest.raises(Exception, match=r"nowhere") as caught:  # of one rank: the same sentence on all
        wrap(subject, kind, 2, offload=f"nvme:{place if rank != 3 else place / 'nowhere'}")
    assert len({each.split("offload to")[-1].rstrip() for each in gather(str(caught.value))}) == 1
