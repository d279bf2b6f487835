"""Law: a module with DTensor parameters trains over the data-parallel dimension of its mesh like the whole model in one
process, with the same bits at every stage. Norms count each parameter once. States are whole and load at any split.
"""

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from harness import LONG, gather, in_turn, on_every_rank, same_everywhere
from internals import wrapping
from model_parallel_subjects import (
    STEPS,
    build,
    loss_of,
    mesh_of,
    optimizer_of,
    oracle,
    parallelized,
    tokens,
    train,
    with_loss_parallel,
    wrapped,
)
from oracle.fold import bits_equal
from peer import PEER, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

MAX_NORM = 0.7
FEW = STEPS if LONG else 3


@on_every_rank(exactly=4)
def test_every_stage_has_the_bits_of_stage_0_and_the_values_of_one_process(rank, world_size):
    mesh = mesh_of(2, 2)
    place = mesh.get_local_rank("dp")
    expected, expected_norms, _ = oracle(2, MAX_NORM, FEW)
    first = None
    for stage in (0, *in_turn((1, 2, 3, "private", "by hand"), 1, of=3)):
        model, optimizer = wrapped(mesh, stage)
        parameters = list(model.parameters())
        norms = train(model, optimizer, place, FEW, MAX_NORM)
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        found = sw.full_state_dict(model)
        assert norms == pytest.approx(expected_norms, rel=1e-5) and same_everywhere([norms, *found.values()]), stage
        first = first or (found, norms)
        assert norms == first[1], stage
        for name, value in found.items():
            assert bits_equal(value, first[0][name]), (stage, name)
            assert torch.allclose(value, expected[name], rtol=0, atol=1e-6), (stage, name)


def assert_equal_states(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert bits_equal(found[name], value), name


def assert_equal_optimizers(found, expected):
    assert found["param_groups"] == expected["param_groups"] and found["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert_equal_states(found["state"][number], state)


@on_every_rank(exactly=4)
def test_states_are_whole_and_load_at_another_split(rank, world_size):
    mesh = mesh_of(2, 2)
    place = mesh.get_local_rank("dp")
    _, _, expected = oracle(2)
    kept = None
    readers = [(1, (2, 2)), (2, (4, 1)), ("private", (1, 4)), (0, (1, 4)), (3, (2, 2))]
    for stage, (data, model_ranks) in ((0, (2, 2)), *in_turn(readers, 0)):
        mesh = mesh_of(data, model_ranks)
        model, optimizer = wrapped(mesh, stage)
        if kept is None:
            train(model, optimizer, place)
            kept = sw.full_state_dict(model), sw.full_optimizer_state_dict(model, optimizer)
            for number, state in expected["state"].items():
                for key, value in state.items():
                    assert torch.allclose(kept[1]["state"][number][key], value, rtol=0, atol=1e-6), (number, key)
            gradients = sw.full_gradients(model)
            assert same_everywhere([*gradients.values()]) and gradients["embedding.weight"].shape == (16, 8)
            continue
        first = mesh.get_local_rank("dp") == 0
        sw.load_full_state_dict(model, kept[0] if first else None)
        sw.load_full_optimizer_state_dict(model, optimizer, kept[1])
        assert_equal_states(sw.full_state_dict(model), kept[0])
        assert_equal_optimizers(sw.full_optimizer_state_dict(model, optimizer), kept[1])
    train(model, optimizer, place, steps=1, first=STEPS)  # with the state that was loaded
    assert torch.allclose(
        sw.full_state_dict(model)["embedding.weight"], oracle(2, steps=STEPS + 1)[0]["embedding.weight"], atol=1e-6
    )


def told_everywhere(call, *words):
    """Check that every rank raises one and the same sentence, with these words."""
    with pytest.raises(Exception) as caught:
        call()
    text = str(caught.value)
    assert all(word in text for word in words), text
    said = gather(text)
    assert len({each.split(": ", 1)[-1] if "could not wrap" in each else each for each in said}) == 1, said
    return caught.value


@on_every_rank(exactly=4)
def test_what_cannot_be_is_one_sentence_on_all_ranks(rank, world_size):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = mesh_of(2, 2)
    place = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")

    def wrap(model=None, **options):
        model = model or parallelized(mesh)
        return sw.wrap(model, optimizer_of(model), **{"device_mesh": mesh["dp"], "zero": 1, **options})

    with pytest.raises(
        sw.Error, match=r"'tp' with ranks \d, \d, and gradients are averaged over ranks 0, 1, 2, 3.*mesh\[\"dp\"\]"
    ):
        wrap(device_mesh=None)
    with pytest.raises(sw.Error, match=r"embedding.weight.*share one rank, and share \d, \d"):
        wrap(device_mesh=mesh)
    told_everywhere(lambda: wrap(zero=1 + place[1]), "mesh dimension 'tp'", "option zero")
    told_everywhere(lambda: wrap(partition="tensor"), "'embedding.weight' is a DTensor")
    part = DeviceMesh("cpu", [0, 1])
    outside = pytest.raises(
        ValueError, match=rf"this rank, {rank}, is not part of the device_mesh given, .* ranks 0, 1"
    )
    with outside if rank > 1 else nullcontext():
        sw.wrap(torch.nn.Linear(2, 2), device_mesh=part)
    with pytest.raises(KeyError, match=r"\('data',\) specified. Valid mesh_dim_names are \['dp', 'tp'\]"):  # torch's
        wrap(device_mesh=mesh["data"])
    foreign = torch.nn.Linear(2, 2, bias=False)
    foreign.weight = torch.nn.Parameter(distribute_tensor(torch.ones(2, 2), part, [Replicate()]))
    with pytest.raises(
        sw.Error, match="'weight' is a DTensor on a mesh .* with ranks 0, 1, of which this rank is none"
    ):
        sw.wrap(foreign, device_mesh=mesh["dp"])

    model = parallelized(mesh).to(torch.bfloat16)  # a module that cannot be wrapped stays as it was
    told_everywhere(lambda: wrap(model, precision="bf16", zero=1 + place[1]), "option zero")
    assert all(
        p.dtype == torch.bfloat16 and p.to_local().dtype == p.dtype
        for p in model.parameters()
        if p is not model.shift and hasattr(p, "placements")
    )

    model = parallelized(mesh)
    with torch.no_grad():
        model.shift += place[1]
    told_everywhere(lambda: wrap(model), "parameter 'shift' is not sharded over mesh dimension 'tp', and ranks ")
    model = parallelized(mesh)
    other = distribute_tensor(model.shift.detach(), mesh["dp"], [Replicate()])
    model.shift = torch.nn.Parameter(other)
    with pytest.raises(sw.Error, match=r"parameter 'shift' is a DTensor on a mesh of dimension 'dp'.*share one rank"):
        wrap(model)

    model = parallelized(mesh)  # what fails on one rank alone reaches all four
    if rank == 3:
        model.shift = torch.nn.Parameter(torch.empty(8, device="meta"))
    told_everywhere(lambda: sw.wrap(model, device_mesh=mesh["dp"]), "'shift' is on the meta device")
    model = parallelized(mesh)
    trained = model if rank < 3 else torch.nn.Linear(2, 2)
    told_everywhere(lambda: sw.wrap(model, optimizer_of(trained), zero=1, device_mesh=mesh["dp"]), "not one of the")

    model, optimizer = wrap()
    data = tokens(0, place[0])
    with_loss_parallel(model, data)
    model.module.shift.grad.mul_(1 + 1e-6 * place[1])  # by rounding: the first rank's counts
    assert same_everywhere([sw.clip_grad_norm_(model, 1.0)])
    model.module.shift.grad.mul_(1 + place[1])
    with pytest.raises(
        sw.Error, match=r"not sharded over mesh dimension 'tp', and ranks \d and \d have other gradients, of norm"
    ):
        sw.clip_grad_norm_(model, 1.0)
    model.module.norm.weight._local_tensor = model.module.norm.weight.to_local().clone()
    told_everywhere(lambda: model(data[:, :-1]), "'norm.weight' is a DTensor whose local tensor", "wrap again")


@on_every_rank(exactly=4)
def test_a_checkpoint_has_the_same_bytes_for_every_split(rank, world_size):
    folder = Path(os.environ["SW_TEST_FOLDER"])
    readers = [(0, (1, 4)), ("private", (2, 2)), (2, (4, 1)), ("by hand", (1, 4)), (3, None)]
    for number, (stage, split) in enumerate([(1, (2, 2)), *in_turn(readers, 0)]):
        if split is None:  # without DTensors
            model = build()
            model, optimizer = sw.wrap(model, optimizer_of(model), zero=stage)
        else:
            mesh = mesh_of(*split)
            model, optimizer = wrapped(mesh, stage)
        path = folder / f"split-{number}"
        if number == 0:
            train(model, optimizer, mesh.get_local_rank("dp"), steps=2)
            kept = sw.full_state_dict(model), sw.full_optimizer_state_dict(model, optimizer)
            random = torch.get_rng_state()
        else:
            sw.load(folder / "split-0", model, optimizer)
            assert_equal_states(sw.full_state_dict(model), kept[0])
            assert_equal_optimizers(sw.full_optimizer_state_dict(model, optimizer), kept[1])
        torch.set_rng_state(random)
        sw.save(path, model, optimizer, step=2)
        files = sorted(each.name for each in path.iterdir() if each.is_file())
        first = folder / "split-0"
        assert any("model" in each for each in files) and any("optimizer" in each for each in files)
        for each in files:
            assert each == "MANIFEST.json" or (path / each).read_bytes() == (first / each).read_bytes(), (
                stage,
                split,
                each,
            )


@on_every_rank(exactly=4)
def test_low_precision_compression_and_accumulation(rank, world_size):
    mesh = mesh_of(2, 2)
    place = mesh.get_local_rank("dp")

    def low(zero, optimizer_class=torch.optim.AdamW):
        model = parallelized(mesh).to(torch.bfloat16)
        model, optimizer = sw.wrap(
            model, optimizer_class(model.parameters(), lr=1e-2), zero=zero, device_mesh=mesh["dp"]
        )
        train(model, optimizer, place, steps=2)
        return sw.full_state_dict(model)

    def accumulated(stage, **options):
        model, optimizer = wrapped(mesh, stage, **options)
        for step in range(2):
            optimizer.zero_grad(set_to_none=step == 0)
            with model.no_sync():
                with_loss_parallel(model, tokens(2 * step, place))
            with_loss_parallel(model, tokens(2 * step + 1, place))
            optimizer.step()
        return sw.full_state_dict(model)

    def fused(zero):
        model = parallelized(mesh)
        optimizer = sw.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = sw.wrap(model, optimizer, zero=zero, device_mesh=mesh["dp"])
        train(model, optimizer, place, steps=2)
        return sw.full_state_dict(model), sw.full_optimizer_state_dict(model, optimizer)

    expected = low(3, sw.optim.AdamW)
    for optimizer_class in in_turn((torch.optim.AdamW, sw.optim.AdamW), 0):
        assert_equal_states(low(0, optimizer_class), expected)
    found, expected = fused(0), fused(2)
    assert_equal_states(found[0], expected[0])
    assert_equal_optimizers(found[1], expected[1])
    expected = accumulated(0)
    for stage in in_turn((1, 2, 3, "private", "by hand"), 3, of=5):
        assert_equal_states(accumulated(stage), expected)
    assert_equal_states(accumulated(2, compress=sw.Int8()), accumulated(0, compress=sw.Int8()))

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loss = torch.distributed.tensor.parallel.loss_parallel
    for stage in in_turn((0, 1), 1):  # one shard overflows
        model, optimizer = wrapped(mesh, stage)
        with_loss_parallel(model, tokens(0, place))
        if rank % 2:
            model.module.blocks[0].up.weight.grad.to_local()[0] = float("inf")
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        assert gather(scaler._found_inf_per_device(optimizer)[torch.device("cpu")].item()) == [1.0] * world_size
        scaler.update()
    model, optimizer = wrapped(mesh, 2)  # one rank's overflow is an overflow everywhere, plain gradients included
    with loss():
        scaler.scale(loss_of(model, tokens(0, place))).backward()
    slices = [p.grad._local_tensor.piece for p in model.parameters() if hasattr(p, "placements")]
    if rank == 3:
        next(each for each in slices if each.numel())[0] = float("inf")
    scaler.unscale_(optimizer)
    assert gather(scaler._found_inf_per_device(optimizer)[torch.device("cpu")].item()) == [1.0] * world_size


@on_every_rank(exactly=2)
def test_optimizer_state_that_is_placed_otherwise_than_its_parameter_is_written(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(24.0).view(4, 6) / 24

    def sgd(p, kind):
        return kind.SGD([p], lr=0.1, momentum=0.9)

    def adam(p, kind):
        return kind.AdamW([p], lr=0.1, amsgrad=True)

    def trained(make, kind, placement=None, other=None, dtype=torch.float32):
        p = torch.nn.Parameter(whole.to(dtype, copy=True))
        if placement is not None:
            p = torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [placement]))
        optimizer = make(p, kind)
        for step in range(3):
            grad = (whole - step).to(dtype)
            p.grad = grad if placement is None else distribute_tensor(grad, mesh, [other or placement])
            optimizer.step()
            state = optimizer.state[p]
            for key in [key for key, value in state.items() if other and hasattr(value, "placements")]:
                assert tuple(state[key].placements) == tuple(p.placements)
                state[key] = state[key].redistribute(placements=[other])
        held = {"parameter": p.detach(), **optimizer.state[p]}
        return {key: each.full_tensor() if hasattr(each, "placements") else each for key, each in held.items()}

    for make in (sgd, adam):
        for dtype in (torch.float32, torch.bfloat16):
            expected = trained(make, sw.optim, dtype=dtype)
            assert len(expected) == (2 if make is sgd else 5) + (dtype is torch.bfloat16)  # the master, too
            for placement, other in [(Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(1), Shard(0))]:
                assert_equal_states(trained(make, sw.optim, placement, other, dtype), expected)
    other_mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [[0, 1]])
    p = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    optimizer = sgd(p, sw.optim)
    p.grad = torch.zeros_like(p)
    optimizer.state[p]["momentum_buffer"] = distribute_tensor(whole, other_mesh, [Shard(0), Shard(0)])
    with pytest.raises(
        ValueError, match="step: the state 'momentum_buffer' of a parameter .* over the mesh of its param"
    ):
        optimizer.step()


@on_every_rank(exactly=4)
def test_offloaded_state_of_shards_is_refused_at_stage_0_and_has_the_same_bits_above(rank, world_size):
    mesh = mesh_of(2, 2)
    place = mesh.get_local_rank("dp")
    folder = os.environ["SW_TEST_FOLDER"]

    def trained(zero, offload, dtype=torch.float32):
        model = parallelized(mesh).to(dtype)
        optimizer = sw.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = sw.wrap(model, optimizer, zero=zero, device_mesh=mesh["dp"], offload=offload)
        train(model, optimizer, place, steps=2)
        return sw.full_state_dict(model), sw.full_optimizer_state_dict(model, optimizer)

    for dtype in (torch.float32, torch.bfloat16):
        told_everywhere(
            lambda dtype=dtype: trained(0, f"nvme:{folder}", dtype),
            *("at zero=0 keeps the state of whole parameters", "'embedding.weight' is a DTensor", "zero=1 or higher"),
        )
        expected = trained(0, None, dtype)
        for zero in in_turn((1, 2, 3), int(dtype is torch.bfloat16)):
            found = trained(zero, f"nvme:{folder}", dtype)
            assert_equal_states(found[0], expected[0])
            assert_equal_optimizers(found[1], expected[1])
    plain = torch.nn.Linear(2, 2)
    optimizer = sw.optim.SGD(plain.parameters(), lr=0.1)
    plain, optimizer = sw.wrap(plain, optimizer, device_mesh=mesh["dp"], offload=f"nvme:{folder}")
    with pytest.raises(ValueError, match="parameter 0 of group 1 is a DTensor, whose state cannot be offloaded"):
        optimizer.add_param_group({"params": [parallelized(mesh).embedding.weight]})
    assert len(optimizer.param_groups) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrapping.cuda.runtime, "holds", lambda parameter: True)
        told_everywhere(lambda: trained(0, "cpu"), "offload='cpu' at zero=0", "is a DTensor", "zero=1 or higher")


def saves(rank, world_size, folder):
    mesh = mesh_of(world_size // 2, 2)
    model, optimizer = wrapped(mesh, 2)
    train(model, optimizer, mesh.get_local_rank("dp"), steps=2)
    sw.save(f"{folder}/a", model, optimizer, step=2)
    state = sw.full_state_dict(model)
    if rank == 0:
        torch.save(state, f"{folder}/a.pt")


def restores(rank, world_size, folder):
    model, optimizer = wrapped(mesh_of(world_size // 2, 2), "private")
    sw.load(f"{folder}/a", model, optimizer)
    assert_equal_states(sw.full_state_dict(model), torch.load(f"{folder}/a.pt"))
    assert sw.full_optimizer_state_dict(model, optimizer)["state"][0]["step"].item() == 2


@pytest.mark.skipif(not LONG, reason="two worlds of its own")
@pytest.mark.parametrize(("before", "after"), [(6, 4), (4, 6)])
def test_three_data_ranks_become_two(fresh_ranks, tmp_path, before, after):
    for size, body in ((before, saves), (after, restores)):
        with fresh_ranks(size) as team:
            team.run(body, folder=str(tmp_path))
