"""Law: after faults at random moments (a rank is killed, is stopped or fails, two at once, a host is lost, a link is cut for a while;
in a step, in a save, in a recovery) the ranks that are left end with the bits of a replay in one process with the same numbers of
ranks, nothing hangs, every checkpoint is whole, and neither file descriptors, threads nor mappings grow. The next start, with ranks that a warm parent forks, goes on from there.

SW_TEST_SEED repeats the faults of a run, which its failure names; SW_TEST_FAULTS is their number."""

import collections
import contextlib
import ctypes
import os
import random
import signal
import tempfile
import threading
import time
import zlib

import pytest
import torch
import torch.distributed as dist
from harness import LONG, RanksFailed
from internals import DirectoryLock, regroup
from oracle.hosts import fold_over_hosts
from peer import PEER, sw
from test_a_lost_rank_is_survived_in_place import STAGES, digest, held

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
FAULTS = int(os.environ.get("SW_TEST_FAULTS", 1000 if LONG else 5))
WORLD, STEPS, TO_DISK = 4, 12, 3
#: seconds from a step's begin to a fault, which covers the step, its save and the next ones
WITHIN_S = 0.06
#: seconds from a fault to one that shall hit the recovery
RECOVERY_S = 0.3
SILENT_S, WAIT_S = 1.5, 3.0
#: a rank fails: its program ends by an error of its own. All ranks of a host die at once. A host's link is cut, and mended after CUT_S
FAILS, HOST, CUT, CUT_S = signal.SIGUSR2, "a host", "a cut", 3.0
#: faults and how often they are drawn. A stopped rank without another one on its host cannot be ended
ON_ONE = {signal.SIGKILL: 70, signal.SIGSTOP: 12, FAILS: 18}
ON_TWO = {signal.SIGKILL: 64, FAILS: 12, HOST: 12, CUT: 12}
#: where each rank begins: on one host, or on two
ONE, TWO = (0, 0, 0, 0), (0, 0, 1, 1)
#: file descriptors, threads and mappings that a moment may have more: a save or a copy may be under way
MORE = 2, 4, 12


def built():
    torch.manual_seed(5)
    module = torch.nn.Sequential(
        torch.nn.Linear(12, 40), torch.nn.GELU(), torch.nn.Linear(40, 40), torch.nn.Linear(40, 3)
    )
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2)


def loss_of(model, step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (model(torch.randn(6, 12, generator=generator)) - torch.randn(6, 3, generator=generator)).square().mean()


def mappings():
    with open("/proc/self/maps") as file:
        return sum(1 for _ in file)


def settle(checkpoints):
    """Wait for a save and for copies to other hosts, which have files open; not for long, as their ranks may be lost."""
    until = time.monotonic() + 5
    while (checkpoints.progress["busy"] or checkpoints._memory.is_busy) and time.monotonic() < until:
        time.sleep(0.002)


def fail(*_):
    signal.alarm(20)  # where Python ignores exceptions, such as in a finalizer
    raise SystemExit(1)


def train(rank, world_size, folder, notes, stage, stop, silent_s, replicas=None, wait_s=WAIT_S):
    """Train to `stop` in place, and note when which step begins. Return (first step, digests or None, what is held after each recovery)."""
    signal.signal(FAILS, fail)
    module, optimizer = built()
    model, optimizer = sw.wrap(module, optimizer, timeout_s=20, silent_s=silent_s, bucket_cap_mb=0.005, **STAGES[stage])
    checkpoints = sw.Checkpointer(folder, model, optimizer, memory_every=1, memory_replicas=replicas, keep_last=2)
    noted = os.open(f"{notes}/{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    sizes, holds, first = [], [], None
    for step in sw.steps(checkpoints, stop, wait_s=wait_s):
        with step:
            os.write(noted, b"%d %d %d\n" % (time.monotonic_ns(), step, dist.get_world_size()))
            first = int(step) if first is None else first
            loss_of(model, step, dist.get_rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.save(step, every=TO_DISK)
            if sizes and dist.get_world_size() != sizes[-1]:
                settle(checkpoints)
                holds.append((os.environ.get("LOCAL_RANK") == "0", *held()[:2], mappings()))
            sizes.append(dist.get_world_size())
    os.close(noted)
    try:
        digests = digest(model, optimizer)
        checkpoints.close()
    except sw.CommError:  # a fault after the loop; the next start goes on from the disk
        digests = None
    return first, digests, holds


class Replay:
    """The same training in one process: gradients are folded over the ranks that a step had, and over their hosts."""

    def __init__(self):
        self.module, self.optimizer = built()

    def step(self, step, hosts):
        every, numbers = [], [sorted(set(hosts)).index(each) for each in hosts]
        for rank in range(len(hosts)):
            self.optimizer.zero_grad()
            loss_of(self.module, step, rank).backward()
            every.append([each.grad.clone() for each in self.module.parameters()])
        for parameter, grads in zip(self.module.parameters(), zip(*every)):
            parameter.grad = fold_over_hosts(grads, numbers, "mean")
        self.optimizer.step()

    def digest(self):
        state = self.optimizer.state_dict()["state"]
        tensors = [
            *self.module.state_dict().values(),
            *(each[name] for each in state.values() for name in sorted(each)),
        ]
        return [zlib.crc32(torch.as_tensor(each).contiguous().numpy()) for each in tensors]


def read_notes(notes):
    """Return (time, step, number of ranks, first number of the rank) of all ranks, in order of time."""
    lines = []
    for name in os.listdir(notes):
        with open(f"{notes}/{name}") as file:
            found = [tuple(map(int, line.split())) for line in file.read().splitlines() if line.count(" ") == 2]
        lines += [(*each, int(name)) for each in found]
    return sorted(lines)


def drawn(chance, most, kinds, host_of):
    """Return the faults of one start, (step, seconds, kind, ranks): some rank is left, and at most `most` are hit."""
    alive, faults, step = [*range(WORLD)], [], 0
    while len(alive) > 1 and most and (not faults or chance.random() < 0.8):
        count = min(len(alive) - 1, most, 2 if chance.random() < 0.25 else 1)
        ranks, (kind,) = chance.sample(alive, count), chance.choices([*kinds], kinds.values())
        mates = [each for each in alive if host_of[each] == host_of[ranks[0]]]
        if kind in (HOST, CUT) and len(mates) in (len(alive), *range(most + 1, WORLD)):
            kind = signal.SIGKILL
        ranks = mates if kind == HOST else ranks[:1] if kind == CUT else ranks
        alive, most = [each for each in alive if kind == CUT or each not in ranks], most - len(ranks)
        if faults and chance.random() < 0.4:  # while the others recover
            faults.append((None, chance.uniform(0, RECOVERY_S), kind, ranks))
        else:
            step = chance.randint(step, min(step + 4, STEPS - 1))
            faults.append((step, chance.uniform(0, WITHIN_S), kind, ranks))
    return faults


def is_over(team, hit):
    return all(team._connections[rank].poll(0) for rank in range(WORLD) if rank not in hit)


def inject(team, cut, notes, begin, faults):
    """Signal ranks as their steps come. Return the ranks that were hit, by kind."""
    hit = {}
    for step, seconds, kind, ranks in faults:
        deadline = time.monotonic() + 60
        while step is not None and not any(found >= begin + step for _, found, *_ in read_notes(notes)[-WORLD:]):
            assert time.monotonic() < deadline, f"step {begin + step} does not come"
            if is_over(team, hit):
                break
            time.sleep(0.002)
        time.sleep(seconds)
        if kind == CUT:
            cut(ranks[0])
            continue
        for number in [signal.SIGSTOP, signal.SIGKILL] if kind == HOST else [kind]:
            for rank in ranks:
                team.signal(rank, number)
                hit[rank] = kind
    return hit


def one_start(ranks, host_of, folder, begin, stage, faults, replay, **options):
    """Run STEPS steps under `faults`. Return the number of living ranks that were left out as too slow."""
    is_stopping = any(kind in (signal.SIGSTOP, HOST, CUT) for _, _, kind, _ in faults)
    arguments = {"stage": stage, "stop": begin + STEPS, "silent_s": SILENT_S if is_stopping else None}
    with tempfile.TemporaryDirectory() as notes, ranks() as (team, cut):
        team.start(train, folder=folder, notes=notes, **arguments, **options)
        hit, last_ns = inject(team, cut, notes, begin, faults), time.monotonic_ns()
        outcomes = team.wait(90, ignore=[rank for rank in hit if hit[rank] == signal.SIGSTOP], patient=True)
        rest = [each for each in outcomes if each.rank not in hit]
        ended = [each for each in outcomes if each.ok]
        left_out = [each for each in rest if is_stopping and (each.ended or "too late to go on" in (each.error or ""))]
        if not ended or len(ended) < len(rest) - len(left_out):
            raise RanksFailed(outcomes)
        begun = read_notes(notes)
        sizes = {step: size for _, step, size, _ in begun}
    assert sorted(sizes) == [*range(begin, begin + STEPS)]
    for step in sorted(sizes):
        members = {rank for _, *which, rank in begun if which == [step, sizes[step]]}
        replay.step(step, [host_of[rank] for rank in sorted(members)])
    expected = [replay.digest()]
    if (
        min(at for at, step, *_ in begun if step == begin + STEPS - 1) < last_ns
    ):  # else no fault can come after the loop
        expected.append(None)
    for outcome in ended:
        first, found, holds = outcome.value
        assert first == begin and found in expected, f"rank {outcome.rank} began at {first}, {sizes}"
        for is_carrier in (False, True):  # which is connected to other hosts
            alike = [numbers for role, *numbers in holds if role == is_carrier]
            for of_one, more in zip(zip(*alike), MORE):
                assert max(of_one) <= of_one[0] + more, f"rank {outcome.rank} holds more and more: {holds}"
    return len(left_out)


def look_at(folder, step):
    """Each checkpoint is whole, the newest is that of `step`, and one start's folder of attempts is there."""
    from shardwright_tools.cli import main

    names = sorted(name for name in os.listdir(folder) if name.startswith("step-") and "." not in name)
    assert names and names[-1] == f"step-{step:06d}", names
    for name in names:
        assert main(["ckpt", "verify", f"{folder}/{name}"]) == 0
    assert len([name for name in os.listdir(folder) if "attempts" in name]) <= 1


@pytest.fixture
def one_thread():
    """As ranks have: products are rounded by it."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(usual)


def run(ranks, host_of, capsys, count, kinds, **options):
    """Go through `count` random faults of these kinds, in as many starts as that takes."""
    seed = int(os.environ.get("SW_TEST_SEED", time.time()))
    chance, replay = random.Random(seed), Replay()
    began, done, starts, left_out, found = time.monotonic(), 0, 0, 0, collections.Counter()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        while done < count:
            stage, faults = chance.choice([*STAGES]), drawn(chance, count - done, kinds, host_of)
            try:
                left_out += one_start(ranks, host_of, folder, starts * STEPS, stage, faults, replay, **options)
                look_at(folder, (starts + 1) * STEPS)
            except BaseException as error:
                raise AssertionError(f"SW_TEST_SEED={seed}, start {starts}, zero={stage}, {faults}") from error
            done, starts = done + sum(len(which) for *_, which in faults), starts + 1
            for *_, kind, which in faults:
                found[getattr(kind, "name", kind)] += len(which)
            if LONG and (starts % 10 == 0 or done >= count):
                with capsys.disabled():
                    seconds = time.monotonic() - began
                    print(
                        f"\n{done} faults in {starts} starts and {seconds:.0f} s, {left_out} left out, {dict(found)}",
                        end="",
                        flush=True,
                    )


@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("one_thread")
def test_ranks_go_on_after_faults_at_random_moments(fresh_ranks, capsys):
    @contextlib.contextmanager
    def ranks():
        with fresh_ranks(WORLD) as team:
            yield team, None

    run(ranks, ONE, capsys, FAULTS, ON_ONE)


@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("one_thread")
def test_ranks_of_two_hosts_go_on_after_faults_at_random_moments(hosts, capsys):
    @contextlib.contextmanager
    def ranks():
        with hosts(2, 2) as on:

            def cut(rank):
                on.network.unplug(TWO[rank])
                time.sleep(CUT_S)
                on.network.plug(TWO[rank])

            yield on.team, cut

    run(ranks, TWO, capsys, FAULTS if LONG else 3, ON_TWO, replicas=1, wait_s=2 * WAIT_S)


def in_a_child(body):
    """Fork a child that runs body(say) and never returns; return its number once it has said so."""
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            body(lambda: os.write(writes, b"."))
        finally:
            os._exit(1)
    os.close(writes)
    assert os.read(reads, 1) == b"."
    os.close(reads)
    return pid


def fields_of(pid):
    """Return the fields of a process's state, from its letter on."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def test_the_lock_of_a_killed_process_is_awaited(tmp_path):
    """Its first thread has ended, so that it is a zombie, while another one holds its files, as in fsync."""

    def body(say):
        lock = DirectoryLock(str(tmp_path))
        threading.Thread(target=lambda: (time.sleep(0.5), os._exit(0))).start()
        say()
        ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # exit(2), of this thread alone
        del lock

    pid = in_a_child(body)
    while fields_of(pid)[0] != "Z":
        time.sleep(0.001)
    DirectoryLock(str(tmp_path)).release()
    os.waitpid(pid, 0)


def test_a_rank_that_is_left_out_has_ended_before_the_others_go_on():
    def body(say):
        memory = bytearray(1 << 28)  # which takes a while to free
        say()
        os.kill(os.getpid(), signal.SIGSTOP)
        del memory

    pid = in_a_child(body)
    regroup._kill(regroup.Member(pid, int(fields_of(pid)[19]), "", ""))
    assert os.waitpid(pid, os.WNOHANG)[0] == pid


def lose_one(rank, world_size, folder):
    """Rank 2 dies; the others note what they do first."""
    order = []
    for kind, name in ((regroup.Regroup, "meet"), (sw.Checkpointer, "_leave")):
        usual = getattr(kind, name)
        setattr(kind, name, lambda self, usual=usual, name=name: (order.append(name), usual(self))[1])
    module, optimizer = built()
    model, optimizer = sw.wrap(module, optimizer, timeout_s=20)
    checkpoints = sw.Checkpointer(folder, model, optimizer)
    for step in sw.steps(checkpoints, 3):
        with step:
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            loss_of(model, step, dist.get_rank()).backward()
            optimizer.step()
            checkpoints.save(step, every=3)
    return order


def test_a_stopped_rank_is_ended_before_its_save_is_awaited(fresh_ranks):
    """It may have stopped in the commit, which the others would await for minutes."""
    with tempfile.TemporaryDirectory() as folder, fresh_ranks(3) as team:
        team.start(lose_one, folder=folder)
        outcomes = team.wait(60, patient=True)
        assert [each.value for each in outcomes[:2]] == [["meet", "_leave"]] * 2, [each.trace for each in outcomes]
