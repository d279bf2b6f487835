"""Law: the engine accounts for every nanosecond of a step, by phase, on each rank and at each stage; waits for a slow rank are counted
by the ranks that wait, and name it. No call of Python's is needed, and no message."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import shardwright as sw
import torch
import torch.distributed as dist
from harness import gather, on_every_rank
from internals import PHASES, AccountFile, _engine, account, process_group, row_of
from models import Mlp
from test_hosts_fold_in_two_steps import hosts_of, on_hosts


def wrapped(**options: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = Mlp()
    return sw.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-3), **options)


def step(model: Any, optimizer: Any, *, forward_s: float = 0.0, data_s: float = 0.0) -> None:
    time.sleep(data_s)
    loss = model(torch.ones(3, 7)).square().sum()
    time.sleep(forward_s)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def own_file() -> AccountFile:
    assert account._file is not None
    return AccountFile(account._file)


def last() -> Any:
    found = _engine.account_row()
    assert found is not None
    return row_of(found)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@on_every_rank()
def test_phases_tile_a_step(rank: int, world_size: int, zero: int) -> None:
    model, optimizer = wrapped(zero=zero)
    step(model, optimizer)
    first = last()
    for _ in range(3):
        step(model, optimizer, forward_s=0.02, data_s=0.03)
    found = last()
    assert found.step == first.step + 3 and found.forwards == 1
    assert sum(found.phases) == found.total_ns
    assert found.phases[PHASES.index("data")] >= 30e6 and found.phases[PHASES.index("forward")] >= 20e6
    assert all(0 <= wait <= phase for wait, phase in zip(found.waits, found.phases))
    rows = own_file().rows(4)
    assert [row.step for row in rows] == list(range(first.step, found.step + 1)) and rows[-1] == found
    assert all(later.begun_ns == earlier.ended_ns for earlier, later in zip(rows, rows[1:]))
    assert sw.stats(model)["step"]["step"] == found.step
    assert sw.stats(model)["step"]["forward_s"] == pytest.approx(found.phases[1] * 1e-9)


@on_every_rank(at_least=2)
def test_a_late_rank_is_named_by_those_that_wait(rank: int, world_size: int) -> None:
    model, optimizer = wrapped(zero=1)
    step(model, optimizer)
    for _ in range(5):
        step(model, optimizer, forward_s=0.06 if rank == 1 else 0.0)
    found: list[Any] = gather(own_file().rows(5))
    late, others = found[1], [row for r, rows in enumerate(found) if r != 1 for row in rows]
    assert sum(row.late_rank == 1 and row.exposed_ns >= 20e6 for row in others) * 2 > len(others), found
    assert all(row.own_ns >= 60e6 for row in late), found
    assert sum(row.own_ns < 50e6 for row in others) * 2 > len(others), found


@on_every_rank()
def test_accumulated_forwards_are_one_step(rank: int, world_size: int) -> None:
    model, optimizer = wrapped()
    step(model, optimizer)
    before = last().step
    with model.no_sync():
        model(torch.ones(3, 7)).sum().backward()
    time.sleep(0.02)
    step(model, optimizer)
    assert last().step == before + 1 and last().forwards == 2
    assert last().phases[PHASES.index("data")] >= 20e6
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).step()  # not ours
    assert last().step == before + 1
    model.eval()
    with torch.no_grad():
        model(torch.ones(3, 7))
    assert last().step == before + 1


@on_every_rank()
def test_a_step_with_a_closure_is_one(rank: int, world_size: int) -> None:
    """As Lightning's: the forward runs inside of optimizer.step()."""
    model, optimizer = wrapped(zero=1)
    step(model, optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 7)).square().sum()
        loss.backward()
        return loss

    before = last().step
    for _ in range(3):
        optimizer.step(closure)
    assert last().step == before + 3 and last().forwards == 1 and min(last().phases[1:4]) > 0


@on_every_rank()
def test_a_save_is_a_save(rank: int, world_size: int) -> None:
    folder = gather(str(Path(os.environ.get("TMPDIR", "/tmp"), f"sw-account-{os.getpid()}")))[0]
    model, optimizer = wrapped(zero=2)
    step(model, optimizer)
    sw.save(folder, model, optimizer)
    assert own_file().head().phase == "data"
    step(model, optimizer)
    save = last().phases[PHASES.index("save")]
    assert save > 0 and sum(last().phases) == last().total_ns
    dist.barrier()
    if rank == 0:
        import shutil

        shutil.rmtree(folder)


@on_every_rank()
def test_collectives_are_in_the_ring(rank: int, world_size: int) -> None:
    model, optimizer = wrapped(zero=2)
    step(model, optimizer)
    found = own_file().operations(50)
    head = own_file().head()
    assert head.rank == rank and head.world_size == world_size and head.pid == os.getpid() and not head.ended
    assert account.is_running(head.pid, head.start_ticks)
    assert any("Mlp" in each.label and each.kind == "reduce_scatter" for each in found), found
    assert all(each.is_done and each.done_ns >= each.posted_ns for each in found), found
    assert [each.serial for each in found] == list(range(found[0].serial, found[-1].serial + 1))


@on_every_rank(exactly=1)
def test_a_forked_child_does_not_write_to_its_parents_file(rank: int, world_size: int) -> None:
    model, optimizer = wrapped()
    step(model, optimizer)
    before = own_file().head().steps
    pid = os.fork()
    if pid == 0:
        _engine.account_call("a child's", False)
        os._exit(0)
    os.waitpid(pid, 0)
    assert own_file().head().steps == before and own_file().head().call == ""


@on_every_rank(spoils=True)
def test_without_a_folder_there_is_an_account_all_the_same(rank: int, world_size: int) -> None:
    account._of = account._file = None
    os.environ.pop("XDG_RUNTIME_DIR", None)
    os.environ[account.RUN_FOLDER] = "/proc/none"
    import tempfile

    tempfile.tempdir = "/proc/none"
    model, optimizer = wrapped()
    step(model, optimizer)
    assert account._file is None and last().total_ns > 0


@on_every_rank(at_least=2)
def test_bytes_by_link_on_one_host(rank: int, world_size: int) -> None:
    """All buffers of collectives go through shared memory."""
    model, optimizer = wrapped(zero=2)
    step(model, optimizer)
    step(model, optimizer)
    found = last()
    assert found.link_bytes == (found.size_bytes, 0, 0) and found.size_bytes > 0
    numbers = [each.number for each in own_file().operations(30) if each.group]
    assert numbers and gather(numbers) == [numbers] * world_size
    groups = own_file().groups()
    assert list(range(world_size)) in [ranks for _, ranks in groups] and gather(groups) == [groups] * world_size


@on_every_rank(at_least=3)
def test_bytes_by_link_between_hosts(rank: int, world_size: int) -> None:
    """A carrier's account has what the wire's own count has; the other ranks send nothing."""
    host_of = hosts_of("2+1", world_size)
    with on_hosts(host_of) as group:
        model, optimizer = wrapped(zero=2, process_group=group)
    comm = process_group.host_group(group, 20).comm
    step(model, optimizer)
    before, sent = last().step, comm.stats()["wire_bytes_sent"]
    for _ in range(3):
        step(model, optimizer)
    gather(None)
    rows = [row for row in own_file().rows(10) if row.step > before]
    sent = comm.stats()["wire_bytes_sent"] - sent
    tcp = sum(row.link_bytes[1] for row in rows)
    assert len(rows) == 3 and (tcp > 0) == (rank in (0, 2))
    assert rank not in (0, 2) or abs(tcp - sent) <= sent / 3, (tcp, sent)  # one step's may be on its way
    shares = host_of.count(host_of[rank]) > 1
    assert all(row.link_bytes[0] == (row.size_bytes if shares else 0) and row.link_bytes[2] == 0 for row in rows)
