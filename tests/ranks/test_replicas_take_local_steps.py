"""Law: over a mesh (replicate, shard) DiLoCo is H steps of each row as if it were one rank, then an outer step on the
mean change over rows, bit for bit at zero=1, 2 and 3. After an exchange all ranks have the same bits; the ranks of a
row always have.
"""

import copy
import math

import internals
import pytest
import torch
import torch.distributed as dist
from harness import LONG, gather, in_turn, same_everywhere
from internals import process_group
from models import Mlp
from oracle.compression import block_mean, half_mean
from oracle.data_parallel import NaiveDataParallel
from oracle.fold import bits_equal, fold
from peer import PEER, batch, sw
from test_every_stage_has_the_same_bits import PRIVATE, stage
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

pytestmark = pytest.mark.skipif(PEER == "torch", reason="torch has none")

STAGES = (1, 2, 3, PRIVATE)
EVERY = 4
MEANS = {
    "float32": lambda changes: fold(changes, "mean"),
    "bf16": lambda changes: half_mean(changes, torch.bfloat16),
    "int8": lambda changes: block_mean(changes, 256, 127),
}
#: the host of each rank of a mesh of two rows; None: one host
PLACES = {"one host": None, "rows on hosts": [0, 0, 1, 1], "columns on hosts": [0, 1, 0, 1]}


def mesh_of(world_size, rows=2):
    return init_device_mesh("cpu", (rows, world_size // rows), mesh_dim_names=("replicate", "shard"))


def made(zero, mesh, build=Mlp, every=EVERY, inner=torch.optim.AdamW, wire="bf16", **options):
    torch.manual_seed(0)
    module = build()
    settings = stage(zero, {"bucket_cap_mb": 0.001, "device_mesh": mesh["shard"], "clip_grad_norm": 0.5})
    model, inner = sw.wrap(module, inner(module.parameters(), lr=0.01), **settings)
    return model, sw.DiLoCo(model, inner, every=every, wire=wire, device_mesh=mesh, **options)


def steps(model, trainer, rank, first, count):
    for step in range(first, first + count):
        trainer.zero_grad()
        model(batch(rank, 8, 7, step=step)).square().mean().backward()
        trainer.step()


def whole(model):
    with sw.full_parameters(model):
        return [parameter.detach().clone() for parameter in model.module.parameters()]


class Naive:
    """A naive form: whole parameters on every rank, everything gathered; `runs` has the slices of a row's ranks."""

    def __init__(self, mesh, mean, fragments, runs, overlap):
        torch.manual_seed(0)
        self.row, self.column = mesh.get_group("shard"), mesh.get_group("replicate")
        self.model = NaiveDataParallel(Mlp(), self.row)
        self.parameters = list(self.model.module.parameters())
        self.inner = torch.optim.AdamW(self.parameters, lr=0.01)
        self.mean, self.fragments, self.runs, self.overlap = mean, fragments, runs, overlap
        self.common = [p.detach().clone() for p in self.parameters]
        self.momentum, self.count, self.under_way = [None for _ in self.common], 0, None

    def step(self, rank, step):
        self.inner.zero_grad()
        self.model(batch(rank, 8, 7, step=step)).square().mean().backward()
        self.model.synchronise()
        sw.clip_grad_norm_(self.parameters, 0.5)
        self.inner.step()
        self.count += 1
        if self.under_way is not None and self.under_way[0] == self.count:
            self.take(self.under_way[1])
        for k, fragment in enumerate(self.fragments):
            if (self.count - (k + 1) * EVERY // len(self.fragments)) % EVERY == 0:
                everyone = gather({i: self.common[i] - self.parameters[i].detach() for i in fragment}, self.column)
                mean = {i: self.mean_of([theirs[i].flatten() for theirs in everyone], self.runs[i]) for i in fragment}
                self.under_way = (
                    self.count + self.overlap,
                    {i: (mean[i], self.parameters[i].detach().clone()) for i in mean},
                )
                if not self.overlap:
                    self.take(self.under_way[1])

    def mean_of(self, changes, runs):
        return torch.cat([self.mean([change[low:high] for change in changes]) for low, high in runs if low < high])

    def take(self, taken):
        for i, (flat, then) in taken.items():
            change, parameter = flat.view_as(then), self.parameters[i]
            self.momentum[i] = change.clone() if self.momentum[i] is None else self.momentum[i].mul(0.9).add(change)
            self.common[i].add_(change.add(self.momentum[i], alpha=0.9), alpha=-0.7)
            local = parameter.detach() - then + self.common[i] if self.overlap else self.common[i]
            parameter.data.copy_(local)


def on_hosts(mesh, hosts):
    """Return communicators of all groups of `mesh`, with ranks that are told their host."""
    for group in (dist.group.WORLD, mesh.get_group(0), mesh.get_group(1)):
        here = [hosts[each] for each in dist.get_process_group_ranks(group)]
        numbers = list(dict.fromkeys(here))
        process_group._forced_hosts = [numbers.index(each) for each in here] if len(numbers) > 1 else None
        process_group.host_group(group, 60.0)
        process_group._forced_hosts = None


def is_the_naive_one(rank, world_size, hosts, cases):
    mesh = mesh_of(world_size)
    if hosts is not None:
        on_hosts(mesh, hosts)
    for zero, wire, fragments, overlap in cases:
        model, trainer = made(zero, mesh, wire=wire, fragments=fragments, overlap=overlap)
        runs = [[trainer._held._run(i, r) for r in range(world_size // 2)] for i in trainer._held._indices]
        naive = Naive(mesh, MEANS[wire], trainer._fragments, runs, overlap)
        for step in range(2 * EVERY + 1):
            steps(model, trainer, rank, step, 1)
            naive.step(rank, step)
            mine = whole(model)
            assert all(map(bits_equal, mine, [p.detach() for p in naive.parameters])), (zero, wire, fragments, step)
            if step % EVERY == EVERY - 1 and fragments == 1 and not overlap:
                assert same_everywhere([p.tolist() for p in mine])
        trainer.synchronise()
        assert same_everywhere([p.tolist() for p in whole(model)])
        assert trainer.wire_bytes > 0
        gather(None)


@pytest.mark.parametrize("place", PLACES)
def test_it_is_the_naive_one(fresh_ranks, place):
    cases = [(zero, "bf16", 1, 0) for zero in STAGES] + [
        (3, "int8", 2, 1),
        (PRIVATE, "float32", 2, 1),
        (1, "int8", 2, 0),
    ]
    if LONG:
        cases = [(z, w, f, o) for z in STAGES for w in MEANS for f, o in ((1, 0), (2, 0), (2, 1), (4, 0))]
    with fresh_ranks(4) as team:
        team.run(is_the_naive_one, hosts=PLACES[place], cases=in_turn(cases, [*PLACES].index(place), of=3))


def wider_meshes(rank, world_size):
    """Train with three ranks per row, some of which own no slice of the small model, and with one rank per row."""
    for rows in (2, 6):
        mesh = mesh_of(world_size, rows)
        for zero in STAGES if LONG else (1, PRIVATE):
            for wire in in_turn(("bf16", "int8"), int(zero == 1) + rows // 6):
                model, trainer = made(zero, mesh, lambda: torch.nn.Linear(7, 3), every=1, wire=wire)
                steps(model, trainer, rank, 0, 2)
                assert same_everywhere([p.tolist() for p in whole(model)])
                gather(None)


def test_rows_of_other_sizes(fresh_ranks):
    with fresh_ranks(6) as team:
        team.run(wider_meshes)


def steps_in_the_backward(rank, world_size):
    mesh = mesh_of(world_size)
    for zero in STAGES:
        found = []
        for in_backward in (False, True):
            torch.manual_seed(0)
            module = Mlp()
            settings = {"bucket_cap_mb": 0.001, "device_mesh": mesh["shard"], "step_in_backward": in_backward}
            model, inner = sw.wrap(module, torch.optim.AdamW(module.parameters(), lr=0.01), **stage(zero, settings))
            trainer = sw.DiLoCo(model, inner, every=EVERY, fragments=2, device_mesh=mesh)
            steps(model, trainer, rank, 0, 2 * EVERY + 1)
            trainer.synchronise()
            found.append(whole(model))
        assert all(bits_equal(*pair) for pair in zip(*found, strict=True)), zero
    module = Mlp()
    model, inner = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), step_in_backward=True)
    with pytest.raises(sw.Error, match="step_in_backward=True averages the gradients of every step") as caught:
        sw.DiLoCo(model, inner, every=EVERY)
    assert same_everywhere(str(caught.value))


def test_rows_may_step_in_the_backward(fresh_ranks):
    with fresh_ranks(4) as team:
        team.run(steps_in_the_backward)


def resumes(rank, world_size, folder):
    mesh = mesh_of(world_size)
    mine = f"{folder}/{mesh.get_local_rank('replicate')}"
    options = {"wire": "int8", "fragments": 2, "overlap": 1}
    for zero in STAGES if LONG else (2, PRIVATE):
        model, trainer = made(zero, mesh, **options)
        with sw.Checkpointer(f"{mine}-{zero}", model, dataloader=[trainer]) as checkpoints:
            steps(model, trainer, rank, 0, 6)
            assert "pending" in trainer.state_dict()
            checkpoints.save(5)
            steps(model, trainer, rank, 6, 5)
        expected = whole(model)
        again, other = made(zero, mesh, **options)
        with sw.Checkpointer(f"{mine}-{zero}", again, dataloader=[other]) as checkpoints:
            assert checkpoints.restore() == 6 and other.steps == 6
            steps(again, other, rank, 6, 5)
        assert all(map(bits_equal, whole(again), expected)), zero
        state = copy.deepcopy(other.state_dict())
        gather(None)
        with pytest.raises(ValueError, match="it contains a DiLoCo over a mesh"):
            sw.Checkpointer(f"{mine}-{zero}-x", again, user_state={"trainer": other})
        state["layout"][0][1] += 32
        with pytest.raises(sw.Error, match="the state has other slices than this rank's"):
            other.load_state_dict(state)
        gather(None)


def test_it_resumes_with_the_same_bits(fresh_ranks, tmp_path):
    with fresh_ranks(4) as team:
        team.run(resumes, folder=str(tmp_path))


def is_not_finite(rank, world_size):
    mesh, found = mesh_of(world_size), []
    for zero in (1, 3):
        model, trainer = made(zero, mesh, every=2)
        steps(model, trainer, rank, 0, 1)
        if rank == 3:  # in one column alone; every row raises the error on all ranks
            trainer._tensors[0].view(-1)[0] = math.inf
        with pytest.raises(sw.Error, match="'0.weight' .* not finite on some rank after 2 steps") as caught:
            trainer.inner_optimizer.step = lambda: None
            trainer.step()
        del trainer.inner_optimizer.step
        found.append("could not exchange" in str(caught.value))
        gather(None)
    return found


def test_what_is_not_finite_in_a_column_is_an_error_in_every_row(fresh_ranks):
    with fresh_ranks(4) as team:
        assert team.run(is_not_finite) == [[heard] * 2 for heard in (True, False, True, False)]


def is_misused(rank, world_size):
    mesh = mesh_of(world_size)
    build = lambda: torch.optim.SGD(module.parameters(), lr=0.1)  # noqa: E731
    module, found = Mlp(), []

    def refused(*arguments, **options):
        with pytest.raises((ValueError, TypeError, sw.Error)) as caught:
            sw.DiLoCo(*arguments, every=4, **options)
        found.append(str(caught.value))
        gather(None)

    refused(module, build(), device_mesh=mesh)
    refused(module, build(), device_mesh=mesh["shard"])
    over_all, inner = sw.wrap(module, build(), zero=2, device_mesh=mesh)
    refused(over_all, inner, device_mesh=mesh)
    module = Mlp()
    rows, inner = sw.wrap(module, build(), zero=2, device_mesh=mesh["shard"])
    refused(rows, build(), device_mesh=mesh)
    refused(rows, inner, device_mesh=mesh, process_group=dist.group.WORLD)
    refused(rows, inner, device_mesh=mesh, outer=lambda parameters: Odd(parameters, {}))
    refused(rows, inner)
    refused(rows, inner, device_mesh=DeviceMesh("cpu", torch.tensor([[3, 1], [0, 2]])))
    sliced = sw.DiLoCo(rows, inner, every=4, device_mesh=mesh)
    assert sliced.is_sliced
    if rank == 2:
        with pytest.raises(ValueError, match="every must be"):
            sw.DiLoCo(rows, inner, every=0, device_mesh=mesh)
    else:
        with pytest.raises(sw.Error, match="rank 2 could not begin DiLoCo: DiLoCo: every must be"):
            sw.DiLoCo(rows, inner, every=4, device_mesh=mesh)
    with rows.join(), pytest.raises(sw.Error, match=r"cannot step inside join\(\)"):
        sliced.step()
    sw.wrap(module)
    with pytest.raises(sw.Error, match="has been wrapped again"):
        sliced.step()
    return found


class Odd(torch.optim.Optimizer):
    def step(self):
        pass


def test_misuse_is_named(fresh_ranks):
    with fresh_ranks(4) as team:
        values = team.run(is_misused)
    sentences = (
        "must be wrapped with zero >= 1, or fully sharded, over mesh['shard'], got Mlp",
        "must be a DeviceMesh of two dimensions",
        "wrapped over ranks [0, 1, 2, 3], but this rank's row of device_mesh is",
        "inner_optimizer must be the optimizer that sw.wrap(model, optimizer, zero=2, ...) returned, got SGD",
        "process_group and device_mesh were both given",
        "Odd, which is not known to be elementwise",
        "cannot run at zero=2 between all ranks",
        "order all of its rows equally",
    )
    for found in values:
        assert len(found) == len(sentences)
        for text, sentence in zip(found, sentences):
            assert sentence in text


def outer_steps_that_fail(rank, world_size):
    mesh = mesh_of(world_size)
    for zero in STAGES[:3]:
        model, trainer = made(zero, mesh, every=1)
        forks = internals.replica(model).access
        steps(model, trainer, rank, 0, 1)
        assert not forks._depth
        count = forks._own[0]
        trainer._check_finite = lambda k: trainer._nothing  # an error before the row writes
        with pytest.raises((AttributeError, sw.Error), match="_nothing"):
            trainer.synchronise()
        assert not forks._depth and forks._own[0] == count
        del trainer._check_finite
        trainer.outer_optimizer.step = lambda: trainer._nothing  # one while it does
        with pytest.raises(AttributeError, match="_nothing"):
            trainer.synchronise()
        assert not forks._depth and forks._own[0] == count + 2
        del trainer.outer_optimizer.step
        steps(model, trainer, rank, 1, 1)
        assert same_everywhere(whole(model))


def test_after_an_outer_step_that_fails_forked_children_read_again(fresh_ranks):
    with fresh_ranks(4) as team:
        team.run(outer_steps_that_fail)
