"""Laws of failure: every other rank names a rank that is killed, exits or stops (rank, host, pid and the operation), at
once or at the deadline. A surviving forked child hides nothing, and nothing stays behind in the system.
"""

import contextlib
import gc
import os
import random
import resource
import signal
import socket
import subprocess
import time

import harness
import internals
import pytest
import torch
import torch.distributed as dist
from harness import (
    LONG,
    RanksFailed,
    Stopwatch,
    at_least_two,
    gather,
    join_from_own_namespaces,
    on_every_rank,
    run_programs,
)
from models import Mlp
from peer import PEER, batch, compare_step, data_parallel, engine, host_comm, in_a_child, pair, sw, zero_grad

pytestmark = pytest.mark.skipif(PEER == "torch", reason="torch names no rank")


def backward(model, rank, step):
    model(batch(rank, 6, 7, step=step)).square().mean().backward()


def shared_memory_files():
    """List the ranks' /dev/shm; if other programs share it, without names of torch and multiprocessing."""
    names = set(os.listdir(harness.shared_memory_folder))
    if harness.shared_memory_folder == "/dev/shm":
        names = {name for name in names if not name.startswith(("sem.", "torch_", "psm_"))}
    return names


@pytest.fixture(autouse=True)
def nothing_stays_behind():
    before = shared_memory_files()
    yield
    assert shared_memory_files() <= before


def assert_named(outcomes, dead, words, within_s=1.0):
    """Check that every other rank got a CommError about `dead` within `within_s` of waiting, with all `words` in its
    text.
    """
    for outcome in outcomes:
        if outcome.rank == dead:
            continue
        if not outcome.ok:
            raise RanksFailed(outcomes)
        kind, culprit, host, text, seconds = outcome.value
        assert kind == "CommError" and culprit == dead, outcome.value
        assert host == socket.gethostname()
        assert seconds < within_s, seconds
        for word in (f"rank {dead}", host, *words):
            assert word in text, (word, text)


def report(action, after_s=0.0):
    """Return (type, rank, host, text, seconds) of the engine's error that ends `action`, no sooner than `after_s`."""
    start = Stopwatch()
    try:
        action()
    except engine.CommError as error:
        assert start.elapsed() > after_s, (start.elapsed(), error)
        return type(error).__name__, error.rank, error.host, str(error), start.seconds()
    raise AssertionError("nobody was missed")


# ---------------------------------------------------------------- killed, exited, stopped


def killed_between_steps(rank, world_size, transport):
    torch.manual_seed(0)
    wrapped = data_parallel(Mlp(), transport=transport)
    for step in range(2):
        backward(wrapped, rank, step)
    gather(None)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return report(lambda: backward(wrapped, rank, 2))


@pytest.mark.parametrize("transport", ["pool", "staged"])
@at_least_two
def test_a_rank_that_is_killed_is_named_with_what_was_being_reduced(fresh_ranks, world_size, transport):
    with fresh_ranks(world_size) as team:
        team.start(killed_between_steps, transport=transport)
        outcomes = team.wait(30, patient=True)
        assert outcomes[1].ended == "signal SIGKILL"
        assert_named(outcomes, 1, [f"pid {team.pids[1]}", "bucket", "Mlp"])


def killed_inside_the_backward(rank, world_size):
    torch.manual_seed(0)
    wrapped = data_parallel(Mlp(), bucket_cap_mb=0.001)
    backward(wrapped, rank, 0)
    gather(None)
    if rank == 1:  # the uppermost buckets are posted when the lowest layer's gradient comes
        wrapped.module[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    return report(lambda: backward(wrapped, rank, 1))


@at_least_two
def test_a_rank_that_is_killed_inside_its_backward_is_named(fresh_ranks, world_size):
    with fresh_ranks(world_size) as team:
        team.start(killed_inside_the_backward)
        outcomes = team.wait(30, patient=True)
        assert_named(outcomes, 1, [f"pid {team.pids[1]}", "bucket"])


def failed_beside_a_dead_rank(rank, world_size):
    torch.manual_seed(0)
    wrapped = data_parallel(Mlp(), bucket_cap_mb=0.001)
    backward(wrapped, rank, 0)
    gather(None)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def fail(_):
        time.sleep(0.5)  # rank 1 is gone by now
        raise ArithmeticError("as the test asked")

    wrapped.module[0].weight.register_hook(fail)
    start = Stopwatch()
    with pytest.raises(ArithmeticError):
        backward(wrapped, rank, 1)
    waited = start.seconds()
    assert waited < 3, f"{waited} s: nobody is left who could end the round"
    return report(lambda: backward(wrapped, rank, 2))


@at_least_two
def test_an_exception_beside_a_dead_rank_comes_out_at_once(fresh_ranks, world_size):
    with fresh_ranks(world_size) as team:
        team.start(failed_beside_a_dead_rank)
        outcomes = team.wait(30, patient=True)
        assert_named(outcomes, 1, [f"pid {team.pids[1]}"])


def killed_while_others_wait(rank, world_size):
    comm = host_comm(rank, world_size)
    comm.barrier()
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    result = report(lambda: comm.barrier("evaluation"))
    with pytest.raises(engine.CommError) as again:
        comm.barrier("another")
    assert again.value.rank == 1 and result[3] in str(again.value)
    return result


@at_least_two
def test_a_rank_that_is_killed_while_others_wait_is_named_at_once(fresh_ranks, world_size):
    with fresh_ranks(world_size) as team:
        team.start(killed_while_others_wait)
        outcomes = team.wait(30, patient=True)
        assert_named(outcomes, 1, [f"pid {team.pids[1]}", "evaluation"], within_s=0.5 + 1.0)


def exits(rank, world_size):
    torch.manual_seed(0)
    wrapped = data_parallel(Mlp())
    backward(wrapped, rank, 0)
    dist.barrier()  # without tensors: torch's worker thread lets go of a gather's with the GIL, maybe after the interpreter's end
    if rank == 1:
        raise SystemExit(3)
    return report(lambda: backward(wrapped, rank, 1))


@at_least_two
def test_a_rank_that_exits_is_named(fresh_ranks, world_size):
    with fresh_ranks(world_size) as team:
        team.start(exits)
        outcomes = team.wait(30, patient=True)
        assert outcomes[1].ended == "exit 3"
        assert_named(outcomes, 1, [f"pid {team.pids[1]}"])


def exits_as_a_program(rank, world_size):
    value = exits(rank, world_size)
    print("named", value[1], value[4] < 1.0, value[3])


def test_programs_whose_peer_exits_say_so_and_end(tmp_path):
    """Run whole programs, from interpreter start to end: the exit must neither hang nor crash."""
    outputs, statuses = run_programs(3, exits_as_a_program, str(tmp_path))
    assert statuses == [0, 3, 0], outputs
    for rank in (0, 2):
        assert "named 1 True" in outputs[rank], outputs[rank]


def stopped(rank, world_size):
    torch.manual_seed(0)
    wrapped = data_parallel(Mlp(), timeout_s=2.0)
    backward(wrapped, rank, 0)
    gather(None)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return report(lambda: backward(wrapped, rank, 1), after_s=1.8)


@at_least_two
def test_a_stopped_rank_is_named_as_stopped_at_the_deadline(fresh_ranks, world_size):
    with fresh_ranks(world_size) as team:
        team.start(stopped)
        outcomes = team.wait(30, ignore=[1])
        for outcome in outcomes:
            if outcome.rank != 1:
                if not outcome.ok:
                    raise RanksFailed(outcomes)
                kind, culprit, _, text, seconds = outcome.value
                assert kind == "CommTimeoutError" and culprit == 1
                assert "rank 1" in text and "stopped" in text and f"pid {team.pids[1]}" in text, text
                assert seconds < 4


def stopped_too_long(rank, world_size):
    """Rank 1 is stopped for 0.3 s, which is tolerated, and then for good."""
    torch.manual_seed(0)
    wrapped = data_parallel(Mlp(), timeout_s=60.0, silent_s=0.8)
    backward(wrapped, rank, 0)
    for step in (1, 2):
        gather(None)
        if rank == 1:
            if step == 1:
                child = os.fork()
                if child == 0:
                    time.sleep(0.3)
                    os.kill(os.getppid(), signal.SIGCONT)
                    os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
        if step == 1:
            backward(wrapped, rank, step)
    return report(lambda: backward(wrapped, rank, 2), after_s=0.7)


@at_least_two
def test_a_rank_that_is_stopped_for_longer_than_silent_s_is_an_error(fresh_ranks, world_size):
    with fresh_ranks(world_size) as team:
        team.start(stopped_too_long)
        outcomes = team.wait(30, ignore=[1])
        for outcome in outcomes:
            if outcome.rank != 1:
                if not outcome.ok:
                    raise RanksFailed(outcomes)
                kind, culprit, _, text, seconds = outcome.value
                assert kind == "CommError" and culprit == 1
                assert "rank 1 has been stopped for" in text and "(silent_s=0.8)" in text, text
                assert seconds < 2.5, seconds


def all_stopped(rank, world_size):
    """A job is suspended rank by rank, rank 1 first, and resumed in another order."""
    torch.manual_seed(0)
    wrapped = data_parallel(Mlp(), timeout_s=60.0, silent_s=0.8)
    backward(wrapped, rank, 0)
    pids = gather(os.getpid())
    if rank == 1:
        child = os.fork()
        if child == 0:
            others = [pid for pid in pids if pid != pids[1]]
            for pause_s, number, each in ((0.3, signal.SIGSTOP, others), (1.2, signal.SIGCONT, others)):
                time.sleep(pause_s)
                for pid in each:
                    os.kill(pid, number)
            time.sleep(0.2)
            os.kill(pids[1], signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    backward(wrapped, rank, 1)


@at_least_two
def test_a_job_that_is_suspended_goes_on_whatever_silent_s_is(fresh_ranks, world_size):
    with fresh_ranks(world_size) as team:
        team.run(all_stopped)


def wait_for_state(pid, letter):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == letter:
                return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} never came to state {letter}")


def stopped_for_a_while(rank, world_size):
    lines = []
    comm = host_comm(rank, world_size, timeout_s=30, warn_after_s=0.2, log=lines.append)
    comm.barrier()
    gather(None)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    comm.barrier("evaluation")
    return comm.all_gather_bytes(b"%d" % rank), lines


@at_least_two
def test_a_rank_that_was_stopped_for_a_while_is_warned_about_and_goes_on(fresh_ranks, world_size):
    with fresh_ranks(world_size) as team:
        team.start(stopped_for_a_while)
        wait_for_state(team.pids[1], "T")
        time.sleep(0.8)
        team.signal(1, signal.SIGCONT)
        outcomes = team.wait(30)
        if not all(outcome.ok for outcome in outcomes):
            raise RanksFailed(outcomes)
        for outcome in outcomes:
            gathered, lines = outcome.value
            assert gathered == [b"%d" % rank for rank in range(world_size)]
            if outcome.rank != 1:
                assert lines and all(word in lines[0] for word in ("rank 1", "(stopped)", "evaluation")), lines


def two_die(rank, world_size):
    comm = host_comm(rank, world_size)
    comm.barrier()
    gather(None)
    if rank in (1, 2):
        os.kill(os.getpid(), signal.SIGKILL)
    return report(comm.barrier)


@at_least_two
def test_the_death_of_two_ranks_names_one_of_them(fresh_ranks, world_size):
    with fresh_ranks(world_size) as team:
        team.start(two_die)
        for outcome in team.wait(30, patient=True):
            if outcome.rank not in (1, 2):
                assert outcome.ok and outcome.value[1] in (1, 2) and outcome.value[4] < 1


# ---------------------------------------------------------------- forked children


def leaves_a_child(rank, world_size):
    torch.manual_seed(0)
    wrapped = data_parallel(Mlp())
    backward(wrapped, rank, 0)
    child = 0
    if rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
    children = gather(child)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return *report(lambda: backward(wrapped, rank, 1)), children[1]


@at_least_two
def test_a_child_of_the_dead_rank_that_lives_on_hides_nothing(fresh_ranks, world_size):
    with fresh_ranks(world_size) as team:
        team.start(leaves_a_child)
        outcomes = team.wait(30, patient=True)
        child = outcomes[0].value[-1]
        try:
            os.kill(child, 0)  # it does live
            for outcome in outcomes:
                outcome.value = outcome.value and outcome.value[:-1]
            assert_named(outcomes, 1, [f"pid {team.pids[1]}"])
        finally:
            os.kill(child, signal.SIGKILL)


@on_every_rank()
def test_an_engine_call_in_a_forked_child_raises_and_disturbs_nobody(rank, world_size):
    comm = host_comm(rank, world_size)
    wrapped, naive = pair(Mlp)
    compare_step(wrapped, naive, lambda model: backward(model, rank, 0))
    if rank == 0:
        memory = torch.ones(4)
        for action in (
            comm.barrier,
            lambda: comm.all_reduce(memory.data_ptr(), 4, "float32"),
            lambda: comm.all_gather_bytes(b"x"),
            lambda: comm.arena(4096, "child"),
            lambda: backward(wrapped, rank, 1),
        ):
            text = in_a_child(action)
            assert text.startswith("Error") and "fork" in text, text
        in_a_child(comm.close)  # may refuse; may not take leave in its parent's name
    comm.barrier()
    zero_grad(wrapped, naive)
    compare_step(wrapped, naive, lambda model: backward(model, rank, 2))
    comm.close()


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((7,), float(index))


@on_every_rank()
def test_dataloader_workers_forked_in_the_middle_change_nothing(rank, world_size):
    wrapped, naive = pair(Mlp, bucket_cap_mb=0.001)
    compare_step(wrapped, naive, lambda model: backward(model, rank, 0))
    for _ in range(2):
        loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=2)
        for x in loader:
            zero_grad(wrapped, naive)
            x = x + rank
            compare_step(wrapped, naive, lambda model, x=x: model(x).square().mean().backward())


# ---------------------------------------------------------------- limits


@contextlib.contextmanager
def limited(kind, soft):
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def linear():
    """Train with 1.4 MiB of gradients."""
    return torch.nn.Linear(600, 601)


#: the rank of a host that makes what its ranks share
FIRST = 0


def under_a_file_size_limit(rank, world_size, poor):
    """Rank `poor` has room for all control pages, but none for a pool."""
    with limited(resource.RLIMIT_FSIZE, 600_000 * world_size) if rank == poor else contextlib.nullcontext():
        wrapped, naive = pair(linear)
        for step in range(2):
            x = batch(rank, 2, 600, step=step)
            compare_step(wrapped, naive, lambda model, x=x: model(x).square().mean().backward())
        model = sw.describe()["models"][-1]
    return model["transport"], model["transport_reason"], str(sw.describe())


@at_least_two
def test_a_low_file_size_limit_on_the_first_rank_makes_the_group_fall_back(fresh_ranks, world_size):
    with fresh_ranks(world_size) as team:
        values = team.run(under_a_file_size_limit, poor=FIRST)
    for transport, reason, text in values:
        assert transport == "staged", values
        assert "RLIMIT_FSIZE" in reason and f"rank {FIRST}" in reason, reason
        assert reason in text
    assert len({value[:2] for value in values}) == 1


@at_least_two
def test_a_low_file_size_limit_on_another_rank_changes_nothing(fresh_ranks, world_size):
    """Joining creates no file."""
    with fresh_ranks(world_size) as team:
        values = team.run(under_a_file_size_limit, poor=world_size - 1)
    assert [value[0] for value in values] == ["pool"] * world_size, values


def wrap_under_a_limit(rank, world_size, kind, soft, transport, poor):
    """Return the sentence that every rank gets when rank `poor` cannot join; its RLIMIT_NOFILE leaves `soft` more
    descriptors.
    """
    if kind == resource.RLIMIT_NOFILE:
        sw.describe()  # opens files of its own

        first_free = os.open("/dev/null", os.O_RDONLY)
        os.close(first_free)
        soft += first_free
    with limited(kind, soft) if rank == poor else contextlib.nullcontext():
        with pytest.raises((engine.Error, MemoryError, OSError)) as raised:
            data_parallel(linear(), transport=transport, timeout_s=10.0)
    return str(raised.value)


def assert_one_sentence(texts, *words):
    assert texts == [texts[0]] * len(texts), texts
    for word in words:
        assert word in texts[0], (word, texts[0])


@at_least_two
def test_a_pool_that_was_demanded_and_cannot_be_is_an_error_on_every_rank(fresh_ranks, world_size):
    with fresh_ranks(world_size) as team:
        soft = 600_000 * world_size
        texts = team.run(wrap_under_a_limit, 15, kind=resource.RLIMIT_FSIZE, soft=soft, transport="pool", poor=FIRST)
    assert_one_sentence(texts, "RLIMIT_FSIZE", f"rank {FIRST}")


@at_least_two
def test_control_pages_that_the_first_rank_cannot_make_are_an_error_on_every_rank(fresh_ranks, world_size):
    with fresh_ranks(world_size) as team:
        texts = team.run(wrap_under_a_limit, 15, kind=resource.RLIMIT_FSIZE, soft=4096, transport="auto", poor=FIRST)
    assert_one_sentence(texts, "RLIMIT_FSIZE", f"rank {FIRST}")


@pytest.mark.parametrize("free", [0, 1, 2])
@at_least_two
def test_a_rank_out_of_descriptors_is_an_error_on_every_rank(fresh_ranks, world_size, free):
    """Rank `poor` needs a file descriptor for its socket and one for the store's file; without that one it reports
    through Gloo.
    """
    with fresh_ranks(world_size) as team:
        last = world_size - 1
        begin = Stopwatch()
        texts = team.run(wrap_under_a_limit, 15, kind=resource.RLIMIT_NOFILE, soft=free, transport="auto", poor=last)
    assert_one_sentence(texts, f"rank {last}")
    assert begin.seconds() < 10.0, "the others waited for their deadline"


@at_least_two
def test_a_first_rank_out_of_descriptors_is_an_error_on_every_rank(fresh_ranks, world_size):
    """The poor rank writes nothing before the ranks have met; the others learn at once that it cannot."""
    with fresh_ranks(world_size) as team:
        texts = team.run(wrap_under_a_limit, 15, kind=resource.RLIMIT_NOFILE, soft=0, transport="auto", poor=0)
    assert_one_sentence(texts, "rank 0")


def wrap_under_an_address_space_limit(rank, world_size):
    """The last rank has room for the control page (torch itself needs part of the limit), but none for 64 MiB."""
    sw.DistributedDataParallel(torch.nn.Linear(3, 3))(torch.ones(1, 3)).sum().backward()
    torch.manual_seed(0)
    module = torch.nn.Linear(4096, 4096, bias=False)
    with open("/proc/self/statm") as file:
        soft = int(file.read().split()[0]) * resource.getpagesize() + (24 << 20)
    try:
        with limited(resource.RLIMIT_AS, soft) if rank == world_size - 1 else contextlib.nullcontext():
            wrapped = data_parallel(module, timeout_s=10.0)
        return internals.reducer(wrapped).transport, internals.reducer(wrapped).transport_reason
    except (engine.Error, MemoryError, OSError) as error:
        return "error", str(error)


@at_least_two
def test_a_rank_out_of_address_space_is_the_same_news_on_every_rank(fresh_ranks, world_size):
    with fresh_ranks(world_size) as team:
        values = team.run(wrap_under_an_address_space_limit, 20)
    assert values == [values[0]] * world_size, values
    assert values[0][0] in ("staged", "error") and f"rank {world_size - 1}" in values[0][1], values


def trains_in_a_namespace(rank, world_size):
    wrapped, naive = pair(Mlp)
    for step in range(2):
        compare_step(wrapped, naive, lambda model, step=step: backward(model, rank, step))
    gather(None)
    if rank == 1:
        os._exit(9)
    return os.getpid(), internals.reducer(wrapped).transport, report(lambda: backward(wrapped, rank, 9))


UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]


def test_ranks_in_pid_namespaces_of_their_own_train_and_miss_each_other(fresh_ranks):
    try:
        subprocess.run([*UNSHARE, "true"], check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no user namespaces here: {error}")
    with fresh_ranks(3, [(join_from_own_namespaces, {"pids": True})] * 3) as team:
        team.start(trains_in_a_namespace)
        outcomes = team.wait(30, patient=True)
    assert outcomes[1].ended == "exit 9", outcomes
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.ok, outcome
        pid, transport, said = outcome.value
        assert (pid, transport) == (1, "pool") and said[:2] == ("CommError", 1), outcome.value


# ---------------------------------------------------------------- while joining, and with the model gone


def joins_without_one(rank, world_size, how):
    """The last rank has published its address, and never joins."""
    from internals import HostGroup

    meet = HostGroup._meet

    def then_die(self, *arguments):
        found = meet(self, *arguments)
        if rank == world_size - 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("no")
        return found

    HostGroup._meet = then_die
    start = Stopwatch()
    with pytest.raises(RuntimeError) as raised:
        sw.DistributedDataParallel(linear(), timeout_s=30.0)
    return getattr(raised.value, "rank", None), str(raised.value), start.seconds()


@pytest.mark.parametrize("how", ["killed", "failed"])
@at_least_two
def test_a_rank_that_dies_while_the_others_join_it_is_named_at_once(fresh_ranks, world_size, how):
    with fresh_ranks(world_size) as team:
        team.start(joins_without_one, how=how)
        outcomes = team.wait(20, patient=True)
    for outcome in outcomes[:-1]:
        assert outcome.ok, outcome
        culprit, text, seconds = outcome.value
        assert culprit == world_size - 1 and f"rank {world_size - 1}" in text and seconds < 1.5, outcome.value


def drops_its_model(rank, world_size):
    """A backward failed with posted buckets; then the ranks continue with another model."""
    torch.manual_seed(0)
    wrapped = data_parallel(Mlp(), bucket_cap_mb=0.001)
    backward(wrapped, rank, 0)
    if rank == 1:

        def fail(gradient):
            raise ValueError("on purpose")

        handle = wrapped.module[0].weight.register_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            backward(wrapped, rank, 1)
        handle.remove()
        del wrapped, handle
        gc.collect()
    else:
        with pytest.raises(engine.Error, match="rank 1 .* left a backward unfinished"):
            backward(wrapped, rank, 1)
    again, naive = pair(Mlp)
    compare_step(again, naive, lambda model: backward(model, rank, 2))


@at_least_two
def test_a_model_that_is_dropped_after_a_failed_backward_leaves_its_peers_in_step(fresh_ranks, world_size):
    with fresh_ranks(world_size) as team:
        team.run(drops_its_model, 20)


# ---------------------------------------------------------------- nothing stays behind


def trains_for_ever(rank, world_size):
    torch.manual_seed(0)
    wrapped = data_parallel(torch.nn.Sequential(torch.nn.Linear(7, 2000), torch.nn.Linear(2000, 5)), bucket_cap_mb=0.05)
    step = 0
    while True:
        backward(wrapped, rank, step)
        wrapped.zero_grad()
        step += 1


def one_step(rank, world_size):
    wrapped, naive = pair(Mlp)
    compare_step(wrapped, naive, lambda model: backward(model, rank, 0))


@pytest.mark.timeout(600 if LONG else 60)
def test_kill_9_of_every_rank_at_a_random_moment_leaves_nothing(fresh_ranks):
    generator = random.Random(2026)
    before = shared_memory_files()
    for _ in range(50 if LONG else 3):
        with fresh_ranks(3) as team:
            team.start(trains_for_ever)
            time.sleep(generator.uniform(0.05, 0.8))
            order = generator.sample(range(3), 3)
            for rank in order:
                team.signal(rank, signal.SIGKILL)
                time.sleep(generator.choice([0, 0, 0.01]))
            outcomes = team.wait(10, patient=True)
            # the last may have seen the first die, and said so, before its own turn came
            assert all(outcome.ended == "signal SIGKILL" or outcome.error for outcome in outcomes), outcomes
        assert not [pid for pid in team.pids if os.path.exists(f"/proc/{pid}")]
        assert shared_memory_files() <= before
    with fresh_ranks(3) as team:
        team.run(one_step)


@pytest.mark.timeout(600 if LONG else 60)
def test_one_rank_killed_at_a_random_moment_is_named_by_all_others(fresh_ranks, tmp_path):
    generator = random.Random(7)
    for turn in range(20 if LONG else 3):
        folder = tmp_path / str(turn)
        folder.mkdir()
        with fresh_ranks(3) as team:
            team.start(trains_until_an_error, folder=str(folder))
            while len(list(folder.iterdir())) < 3:
                time.sleep(0.01)
            time.sleep(generator.uniform(0, 0.3))
            dead = generator.randrange(3)
            killed = time.monotonic()
            team.signal(dead, signal.SIGKILL)
            outcomes = team.wait(20, patient=True)
            for outcome in outcomes:
                if outcome.rank != dead:
                    if not outcome.ok:
                        raise RanksFailed(outcomes)
                    assert outcome.value[0] == dead and outcome.value[1] - killed < 1.5, outcome.value


def trains_until_an_error(rank, world_size, folder):
    torch.manual_seed(0)
    wrapped = data_parallel(Mlp(), bucket_cap_mb=0.001)
    backward(wrapped, rank, 0)
    gather(None)
    open(os.path.join(folder, str(rank)), "w").close()
    try:
        for step in range(1, 1_000_000):
            backward(wrapped, rank, step % 10)
    except engine.CommError as error:
        return error.rank, time.monotonic(), str(error)
