"""Law: moments in blocks of int8 have the same bits at every stage and world size, as a naive AdamW has them. A
checkpoint holds the blocks, with the same bytes from any stage, and loads at another stage and into another dtype.
"""

import copy
import json
import math
import os
import pathlib
import struct

import pytest
import torch
from harness import on_every_rank
from oracle import moments
from oracle.fold import bits_equal
from peer import PEER, batch, sw
from test_bfloat16_moments_at_every_stage import STAGES, Mixed, assert_equal, train
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
KEYS = ("exp_avg", "exp_avg_sq")


def tensors_of(folder):
    """Return dtype, shape and bytes of each tensor of the optimizer, by name."""
    found = {}
    for path in sorted(folder.glob("optimizer-*.safetensors")):
        data = path.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[name] = entry["dtype"], entry["shape"], data[8 + size + begin : 8 + size + end]
    return found


def train_naively(rank, steps=4):
    """Return the parameters and moments of training with zero=0 and float32 moments that the oracle rounds."""
    torch.manual_seed(0)
    module = Mixed()
    turned, *others = module.turned, *module.first.parameters(), *module.low.parameters()
    wide = sw.optim.AdamW([{"params": [turned], "lr": 1e-3}, {"params": others}], lr=1e-2, state_dtype=torch.float32)
    model, optimizer = sw.wrap(module, wide)
    records = {}
    for step in range(steps):
        model(batch(rank, 6, 7, step=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for number, p in enumerate([turned, *others]):
            for key in KEYS:
                value = wide.state[p][key]
                flat = value.as_strided((p.numel(),), (1,))
                records[number, key] = moments.encoded(flat, key, 5, number, step + 1)
                flat.copy_(moments.decoded(records[number, key], key, p.numel()))
    return [p.detach().clone() for p in module.parameters()], records


@pytest.mark.parametrize("master", [True, False], ids=["masters", "no masters"])
@on_every_rank()
def test_bits_are_those_of_zero_0(rank, world_size, master):
    expected = train(rank, 0, dtype="int8", master=master)
    for options in STAGES:
        assert_equal(train(rank, master=master, dtype="int8", **options), expected)
    in_file = f"nvme:{os.environ['SW_TEST_FOLDER']}"
    assert_equal(train(rank, 2, dtype="int8", master=master, offload=in_file), expected)
    if master:
        parameters, records = train_naively(rank)
        assert all(map(bits_equal, expected[0], parameters))
        for number, state in expected[1].items():
            for key in KEYS if number else ():  # 0 is transposed, and decoded
                assert state[key].shape == (-(-expected[0][number].numel() // 32), 33)
                assert torch.equal(state[key], records[number, key])


@on_every_rank()
def test_a_checkpoint_holds_blocks_and_loads_anywhere(rank, world_size):
    folder = pathlib.Path(os.environ["SW_TEST_FOLDER"])
    saved = train(rank, 0, dtype="int8", save="0")
    for options in STAGES[1:3]:
        train(rank, dtype="int8", save=f"{options['zero']}", **options)
        assert tensors_of(folder / "0") == tensors_of(folder / f"{options['zero']}")
    kinds = {name: entry[:2] for name, entry in tensors_of(folder / "0").items()}
    assert kinds["exp_avg_sq.first.weight"] == ("U8", [-(-7 * 150 // 32), 33])
    assert kinds["exp_avg_sq.turned"] == ("F32", [130, 9])  # transposed: blocks of memory would not load elsewhere
    goes_on = train(rank, 0, dtype="int8", steps=6)
    for options in (*STAGES, {"zero": 0}):
        assert_equal(train(rank, steps=0, load="2", dtype="int8", **options), saved)
    assert_equal(train(rank, 1, first=4, steps=2, load="3", dtype="int8"), goes_on)
    for dtype in (torch.float32, torch.bfloat16):
        wide = train(rank, 1, steps=0, load="0", dtype=dtype)
        assert_equal(train(rank, 0, steps=0, load="0", dtype=dtype), wide)
        for number, state in saved[1].items():
            for key in KEYS:
                held = state[key]
                if held.dtype is torch.uint8:
                    held = moments.decoded(held, key, wide[1][number][key].numel()).reshape(wide[1][number][key].shape)
                assert bits_equal(wide[1][number][key], held.to(dtype))
    train(rank, 1, dtype=None, save="float32")
    narrow = train(rank, 0, steps=0, load="float32", dtype="int8")
    assert_equal(train(rank, 3, steps=0, load="float32", dtype="int8"), narrow)
    assert narrow[1][1]["exp_avg"].dtype is torch.uint8


@on_every_rank()
def test_state_dicts_load_at_another_stage(rank, world_size):
    def trained(zero, given=None, steps=2, dtype="int8"):
        torch.manual_seed(1)
        module = Mixed()
        model, optimizer = sw.wrap(module, sw.optim.AdamW(module.parameters(), lr=1e-2, state_dtype=dtype), zero=zero)
        if given is not None:
            sw.load_full_state_dict(model, given[0])
            sw.load_full_optimizer_state_dict(model, optimizer, copy.deepcopy(given[1]))  # torch keeps step counts
        for step in range(steps):
            model(batch(rank, 6, 7, step=step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return sw.full_state_dict(model), sw.full_optimizer_state_dict(model, optimizer)

    saved = trained(0)
    expected = trained(0, saved)
    for zero in (1, 2, 3):
        for found in (trained(zero, saved), trained(zero, trained(zero))):
            assert all(map(bits_equal, found[0].values(), expected[0].values()))
            assert_equal(([], found[1]["state"]), ([], expected[1]["state"]))


@pytest.mark.parametrize(("of", "into"), [((64, 100), (64, 50)), ((6, 60), (6, 100))], ids=["more", "fewer"])
@on_every_rank()
def test_records_of_another_shape_are_refused_before_anything_changes(rank, world_size, of, into):
    def stepped(shape, zero, dtype="int8", **options):
        torch.manual_seed(0)
        module = nn.Linear(*shape[::-1], bias=False)
        model, optimizer = sw.wrap(module, sw.optim.AdamW(module.parameters(), state_dtype=dtype), zero=zero, **options)
        model(torch.ones(2, shape[1])).square().mean().backward()
        optimizer.step()
        return model, optimizer

    count = math.prod(into)
    sentence = rf"must have shape \({-(-count // 32)}, 33\), the records of {count} elements, not \({-(-math.prod(of) // 32)}, 33"
    for zero in (0, 1, 2, 3):
        given = sw.full_optimizer_state_dict(*stepped(of, zero))
        given["param_groups"][0]["lr"] = 7.0
        for dtype in ("int8", torch.float32):
            model, optimizer = stepped(into, zero, dtype)
            before = sw.full_optimizer_state_dict(model, optimizer)
            name = "weight" if zero else "parameter 0"
            with pytest.raises(ValueError, match=f"optimizer state: 'exp_avg' of {name} {sentence}"):
                sw.load_full_optimizer_state_dict(model, optimizer, given)
            after = sw.full_optimizer_state_dict(model, optimizer)
            assert_equal(([], after["state"]), ([], before["state"]))
            assert after["param_groups"] == before["param_groups"]
    (_, whole), (model, other) = (stepped(shape, 1, partition="tensor") for shape in (of, into))
    if other.piece_of(model.module.weight) is not None:
        with pytest.raises(ValueError, match=f"'exp_avg' of weight {sentence}"):
            other.load_state_dict(whole.own_slices())


@on_every_rank()
def test_blocks_of_fully_shard_end_with_the_shard(rank, world_size):
    folder = pathlib.Path(os.environ["SW_TEST_FOLDER"])

    def trained(dtype, load=None, steps=4):
        torch.manual_seed(0)
        module = Mixed()
        module.turned = nn.Parameter(module.turned.detach().contiguous())
        sw.fully_shard(module)
        optimizer = sw.optim.AdamW(module.parameters(), lr=1e-3, state_dtype=dtype)
        losses = []
        if load is not None:
            sw.load(folder / load, module, optimizer)
        for step in range(steps):
            loss = module(batch(rank, 6, 7, step=step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, module, optimizer

    (found, module, optimizer), (expected, _, _) = trained("int8"), trained(torch.float32)
    assert found == pytest.approx(expected, rel=0.02)
    for p, state in optimizer.state.items():
        assert state["exp_avg_sq"].shape == (-(-p.to_local().numel() // 32), 33)
    sw.save(folder / "rows", module, optimizer)
    assert tensors_of(folder / "rows")["exp_avg.first.weight"][:2] == ("F32", [150, 7])
    _, _, again = trained("int8", load="rows", steps=0)
    for (p, state), (q, other) in zip(optimizer.state.items(), again.state.items(), strict=True):
        for key in KEYS:
            ours, theirs = (moments.decoded(each[key], key, p.to_local().numel()) for each in (state, other))
            assert bits_equal(ours, theirs)
    assert_loads_whole(rank, trained)


def assert_loads_whole(rank, trained):
    """A checkpoint of blocks of whole parameters loads into shards."""
    folder = pathlib.Path(os.environ["SW_TEST_FOLDER"])
    torch.manual_seed(0)
    module = Mixed()
    module.turned = nn.Parameter(module.turned.detach().contiguous())
    model, optimizer = sw.wrap(module, sw.optim.AdamW(module.parameters(), state_dtype="int8"), zero=2)
    model(batch(rank, 6, 7)).square().mean().backward()
    optimizer.step()
    sw.save(folder / "whole", model, optimizer)
    whole = tensors_of(folder / "whole")
    _, module, optimizer = trained("int8", load="whole", steps=0)
    for name, p in module.named_parameters():
        records = torch.tensor(list(whole[f"exp_avg_sq.{name}"][2]), dtype=torch.uint8).reshape(-1, 33)
        expected = moments.decoded(records, "exp_avg_sq", p.numel()).reshape(p.shape)
        rows = expected.chunk(torch.distributed.get_world_size())
        mine = rows[rank] if rank < len(rows) else expected[:0]
        held = moments.decoded(optimizer.state[p]["exp_avg_sq"], "exp_avg_sq", mine.numel()).reshape(mine.shape)
        torch.testing.assert_close(held, mine, rtol=2**-4, atol=mine.max().item() * 2**-17 if mine.numel() else 0)
