"""Law: a forked child reads its parent's gradients and parameters as of the fork or gets an error, and its own writes
stay private.
"""

import copy
import os
import socket
import tempfile

import internals
import pytest
import torch
from harness import gather, on_every_rank
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch, compare_step, engine, in_a_child, pair, sw, zero_grad

pytestmark = pytest.mark.skipif(PEER == "torch", reason="about the engine's memory")


def backward(model, rank, step):
    model(batch(rank, 4, 7, step=step)).square().mean().backward()


def scribble(wrapped, rank):
    """Try every way in which a child could write into its parent's gradients."""
    for parameter in wrapped.parameters():
        parameter.grad.fill_(7)
    assert all(bool((p.grad == 7).all()) for p in wrapped.parameters())
    try:
        backward(wrapped, rank, 1)  # autograd adds, and then the engine refuses
    finally:
        wrapped.zero_grad(set_to_none=False)


@on_every_rank()
@pytest.mark.parametrize("transport", ["pool", "staged"])
def test_what_a_child_writes_to_gradients_does_not_reach_its_parent(rank, world_size, transport):
    wrapped, naive = pair(Mlp, transport=transport, bucket_cap_mb=0.001)
    compare_step(wrapped, naive, lambda model: backward(model, rank, 0))
    before = [p.grad.clone() for p in wrapped.parameters()]
    text = in_a_child(lambda: scribble(wrapped, rank))
    assert text.startswith("Error") and "fork" in text, text
    assert all(bits_equal(p.grad, old) for p, old in zip(wrapped.parameters(), before))
    zero_grad(wrapped, naive)
    compare_step(wrapped, naive, lambda model: backward(model, rank, 2))


@on_every_rank()
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_a_child_writes_to_parameters_does_not_reach_its_parent(rank, world_size, zero):
    torch.manual_seed(0)
    model = Mlp()
    model, optimizer = sw.wrap(model, torch.optim.AdamW(model.parameters()), zero=zero)
    backward(model, rank, 0)
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]

    def write():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7)
        assert all(bool((p == 7).all()) for p in model.parameters())

    assert in_a_child(write) == ""
    internals.comm(model).barrier()
    assert all(bits_equal(p.detach(), old) for p, old in zip(model.parameters(), before))
    optimizer.zero_grad()
    backward(model, rank, 1)
    optimizer.step()


@on_every_rank()
def test_a_childs_child_has_what_the_child_wrote(rank, world_size):
    wrapped, naive = pair(Mlp)
    compare_step(wrapped, naive, lambda model: backward(model, rank, 0))
    first = next(iter(wrapped.parameters()))

    def write():
        first.grad.fill_(7)

        def look():
            assert bool((first.grad == 7).all())
            first.grad.fill_(8)

        assert in_a_child(look) == ""
        assert bool((first.grad == 7).all())

    assert in_a_child(write) == ""
    assert not bool((first.grad == 7).any())


STAGES = [{"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "share_parameters": False, "units": torch.nn.Linear}]


class Child:
    """A forked child that runs the given actions one by one, each when it is told to."""

    def __init__(self, *actions):
        self._go, go = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self._go.close()
            for action in actions:
                if not go.recv(1):
                    break
                try:
                    text = repr(action())
                except BaseException as error:
                    text = f"{type(error).__name__}: {error}"
                go.sendall(text.encode()[:4000] + b"\n")
            os._exit(0)
        go.close()
        self._said = self._go.makefile("rb")

    def __call__(self):
        self._go.sendall(b"x")
        return self._said.readline().decode().rstrip("\n")

    def close(self):
        self._said.close()
        self._go.close()
        os.waitpid(self.pid, 0)


def trained(zero, **options):
    torch.manual_seed(0)
    module = Mlp()
    return sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.5), zero=zero, **options)


def step(model, optimizer, rank, number):
    backward(model, rank, number)
    optimizer.step()
    optimizer.zero_grad()


READS = {
    "the module": lambda model: float(sw.unwrap(model)(batch(0, 4, 7)).double().sum()),
    "the wrapper": lambda model: float(model(batch(0, 4, 7)).double().sum()),
    "a state dict": lambda model: sum(float(v.double().sum()) for v in sw.unwrap(model).state_dict().values()),
    "full_state_dict": lambda model: sum(float(v.double().sum()) for v in sw.full_state_dict(model).values()),
    "parameters": lambda model: sum(float(p.double().sum()) for p in model.parameters()),
    "copies": lambda model: sum(float(p.double().sum()) for p in copy.deepcopy(sw.unwrap(model)).parameters()),
    "numpy": lambda model: float(next(model.parameters()).detach().numpy().sum()),
}


@on_every_rank(at_least=2)
@pytest.mark.parametrize("options", STAGES[:3])
def test_a_child_that_reads_late_gets_an_error_and_one_that_read_in_time_keeps_the_values(rank, world_size, options):
    model, optimizer = trained(**options)
    step(model, optimizer, rank, 0)
    expected = {}
    with torch.no_grad():
        for name, read in READS.items():
            if name != "full_state_dict":  # collective
                expected[name] = repr(read(model))
        children = {name: Child(*[lambda read=read: read(model)] * 2) for name, read in READS.items()}
        early = {name: Child(*[lambda read=read: read(model)] * 2) for name, read in READS.items() if name in expected}
        for name, child in early.items():
            assert child() == expected[name], name
    internals.comm(model).barrier()
    for number in range(1, 4):
        step(model, optimizer, rank, number)
    for name, child in children.items():
        for _ in range(2):
            said = child()
            assert said.startswith("Error") and "fork" in said, (name, said)
        child.close()
    for name, child in early.items():
        assert child() == expected[name], name
        child.close()
    step(model, optimizer, rank, 4)


@on_every_rank(at_least=2)
@pytest.mark.parametrize("options", STAGES)
def test_a_child_of_a_child_and_one_forked_where_parameters_are_whole(rank, world_size, options):
    model, optimizer = trained(**options)
    step(model, optimizer, rank, 0)

    def total():
        return float(sum(p.detach().double().sum() for p in model.parameters()))

    def grandchild():
        said = []
        with torch.no_grad():
            each = Child(total)
            said.append(each())
            each.close()
        return said[0]

    with sw.full_parameters(model):
        before = repr(total())
        late, early = Child(grandchild), Child(total, grandchild, total)
        assert early() == before
    internals.comm(model).barrier()
    for number in range(1, 3):
        step(model, optimizer, rank, number)
    assert "Error: parameters of Mlp" in late()
    assert early() == repr(before)
    assert early() == before
    late.close()
    early.close()
    internals.comm(model).barrier()


@on_every_rank(at_least=2)
@pytest.mark.parametrize("options", STAGES[:3])
def test_a_step_that_all_ranks_refuse_changes_nothing_for_a_child(rank, world_size, options):
    model, optimizer = trained(**options)
    step(model, optimizer, rank, 0)

    def look():
        return float(next(model.parameters()).detach().sum())

    expected = repr(look())
    early, late = Child(look), Child(look)
    backward(model, rank, 1)
    optimizer.param_groups[0]["lr"] = 0.5 + rank
    with pytest.raises(sw.Error, match="ranks disagree about the optimizer"):
        optimizer.step()
    assert early() == expected
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    assert late().startswith("Error: parameters of Mlp")
    early.close()
    late.close()


@on_every_rank(at_least=2)
@pytest.mark.parametrize("options", STAGES[:3])
def test_a_change_under_way_at_the_fork_or_during_the_copy_is_an_error(rank, world_size, options):
    model, optimizer = trained(**options)
    access = internals.replica(model).access

    def look():
        return float(next(model.parameters()).detach().sum())

    with access:
        inside = Child(look)
    after = Child(look, look)
    with access:
        said = after()
        assert said.startswith("Error") and "fork" in said, said
    for child in (inside, after):
        assert child().startswith("Error")
        child.close()
    storage = access._storage
    found = storage.mapped()

    def mapped():
        access._shared[0] += 2  # as if the parent stepped between the child's two looks
        return found

    storage.mapped = mapped
    said = in_a_child(look)
    del storage.mapped
    assert said.startswith("Error") and "fork" in said, said
    internals.comm(model).barrier()


@on_every_rank(at_least=2)
@pytest.mark.parametrize("options", STAGES)
def test_a_child_that_touches_no_parameter_copies_none(rank, world_size, options):
    model, optimizer = trained(**options)
    step(model, optimizer, rank, 0)
    copied = Child(
        lambda: (internals.replica(model).access._is_pending, len(list(model.parameters())), repr(model)[:3])
    )
    assert copied().startswith("(True")
    copied.close()
    internals.comm(model).barrier()


@on_every_rank(at_least=2)
def test_a_childs_gradients_are_those_of_the_fork_or_none(rank, world_size):
    model, optimizer = trained(zero=1)
    backward(model, rank, 0)
    first = next(model.parameters())
    before = first.grad.clone()
    early, late = Child(lambda: bits_equal(first.grad, before)), Child(lambda: first.grad)
    assert early() == "True"
    backward(model, rank, 1)
    assert late() == "None"
    early.close()
    late.close()
    internals.comm(model).barrier()


@on_every_rank(at_least=2)
def test_a_child_does_not_step_into_its_parents_state_file(rank, world_size):
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        module = Mlp()
        optimizer = sw.optim.AdamW(module.parameters())
        model, optimizer = sw.wrap(module, optimizer, offload=f"nvme:{folder}")
        backward(model, rank, 0)
        optimizer.step()
        said = in_a_child(optimizer.step)
        assert said.startswith("Error") and "forked child" in said, said
        optimizer.step()
        internals.comm(model).barrier()


@on_every_rank(at_least=2)
@pytest.mark.parametrize("zero", [1, 3])
def test_every_way_out_of_torch_reads_through_the_guard(rank, world_size, zero):
    """A read after the parent's next step raises, whichever library asks for the memory."""
    torch.manual_seed(0)
    model = Mlp()
    model, optimizer = sw.wrap(model, torch.optim.AdamW(model.parameters()), zero=zero)
    parameter = next(iter(model.parameters()))
    ways = {
        "numpy": lambda: parameter.detach().numpy(),
        "array": parameter.__array__,
        "dlpack": parameter.__dlpack__,
        "from_dlpack": lambda: torch.from_dlpack(parameter),
        "data_ptr": parameter.data_ptr,
        "storage": parameter.untyped_storage,
        "data": lambda: parameter.data,
        "a new parameter": lambda: torch.nn.Parameter(parameter.detach()),
        "to_dlpack": lambda: torch.utils.dlpack.to_dlpack(parameter.detach()),
    }
    watch = internals.replica(model).access

    def read():
        watch._shared[0] += 2  # as the parent's next step does
        for name, way in ways.items():
            with pytest.raises(engine.Error, match="are read in process .* a forked child"):
                way()
                pytest.fail(name)
        watch._shared[0] -= 2

    assert in_a_child(read) == ""
    gather(None)


@on_every_rank(at_least=2)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_an_older_wrapper_that_is_still_held_does_not_disturb_a_child(rank, world_size, zero):
    older, _ = trained(zero)
    model, optimizer = sw.wrap(sw.unwrap(older), torch.optim.SGD(sw.unwrap(older).parameters(), lr=0.5), zero=zero)
    expected = repr(float(sw.unwrap(model)(batch(0, 4, 7)).double().sum()))
    child = Child(lambda: READS["the module"](model))
    assert child() == expected
    child.close()
    internals.comm(model).barrier()
    step(model, optimizer, rank, 0)
