"""Law: after any loss, return or addition of hosts, at any world size, stage and number of copies, a restore gives the
newest step of which the present hosts have every rank's share, with its bits. A damaged share is skipped.

All ranks train the same samples, and gradients have 8 bits. So their mean is exactly that of one rank, and each state
is a function of the step. A model of the guardians predicts the restored step. Hosts are simulated.
"""

import functools
import os
import random
import signal
import tempfile
import zlib

import pytest
import torch
from harness import LONG, gather
from internals import client, process_group
from peer import PEER, batch, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="shardwright's checkpoints")
TO_DISK = 5
STAGES = {stage: {"zero": stage} for stage in range(4)}
STAGES |= {"private": {"zero": 3, "share_parameters": False, "units": torch.nn.Linear}}
SEEDS, LIVES = (range(12), 12) if LONG else ((), 0)
client.LINGER_S = 60.0


def build():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(24, 3000), torch.nn.GELU(), torch.nn.Linear(3000, 24))
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.bfloat16().float())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def digest(pair):
    with sw.full_parameters(pair[0]):
        return zlib.crc32(b"".join(value.numpy().tobytes() for value in pair[0].state_dict().values()))


def train(pair, step):
    model, optimizer = pair
    (model(batch(0, 5, 24, step=step))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return digest(pair)


def alone(rank, world_size, steps):
    """Return the digests after 0, 1, 2 ... steps."""
    pair = sw.wrap(*build())
    return [digest(pair), *(train(pair, step) for step in range(steps))]


def live(rank, world_size, folder, hosts, zero, replicas, steps, lose=(), tear=(), flip=()):
    """Restore, train, and lose what the test asks for. Return the restored step, its slot in memory, and the digests
    from it on.

    tear: hosts whose first rank has not finished its copy of the last step. flip: hosts with a changed byte.
    """
    process_group._forced_hosts = hosts
    pair = sw.wrap(*build(), timeout_s=20, **STAGES[zero])
    checkpoints = sw.Checkpointer(folder, *pair, memory_every=1, memory_replicas=replicas)
    tier = checkpoints._memory
    assert not tier.off, tier.off
    begin = checkpoints.restore()
    slot = None if tier._complete is None else tier._complete[0]
    found = [digest(pair)]
    for step in range(begin, begin + steps):
        found.append(train(pair, step))
        checkpoints.save(step, every=TO_DISK)
        tier.wait()
    found.append(train(pair, begin + steps))  # the moments, too
    checkpoints.wait()
    gather(None)
    if tier._is_first and tier._last is not None:
        image = tier._images[tier._last[0]][1]
        if tier._host in tear:
            image.clear(0)
        if tier._host in flip:
            begins = [begin for table in image.each_table() for begin, _ in table.each_run()]
            image.view[max(begins)] ^= 1
    if tier._host in lose and tier._is_first:
        os.kill(tier._client.ask("list")[0]["pid"], signal.SIGKILL)
    gather(None)
    return begin, slot, found


class Guardians:
    """A model of the memory of each host: which share of which step it holds."""

    def __init__(self):
        self.of_host, self.disk, self.starts = {}, 0, 0
        self.slot = None
        self.damaged = set()  # hosts, names and keys of images in which a byte has changed

    def newest(self, hosts):
        """Return the step that ranks on these hosts restore, and later steps that they may restore instead: the world
        size decides if a damaged share is read, or its copy. Steps in memory have their slots.
        """
        shares, doubtful = {}, set()
        for host in set(hosts):
            for name, (key, ranks) in self.of_host.get(host, {}).items():
                shares.setdefault(key, {}).setdefault(name[-1], set()).update(ranks)
                if (host, name, key) in self.damaged:
                    doubtful.add(key)
        certain, possible = {}, {}
        for key, by_slot in shares.items():
            if set.union(*by_slot.values()) == {*range(key[2])} and key[0] >= self.disk:
                (possible if key in doubtful else certain)[key[0]] = int(min(by_slot))
        step = max(certain, default=self.disk)
        return (step, certain.get(step)), {each: slot for each, slot in possible.items() if each >= step}

    def kept(self, hosts, replicas, begin, steps):
        self.starts += 1
        count = max(hosts) + 1
        for step in range(begin + 1, begin + steps + 1):
            self.slot = 0 if self.slot is None else 1 - self.slot
            key = step, self.starts, len(hosts)
            for host in range(count):
                for k in range(replicas + 1):
                    ranks = {rank for rank, at in enumerate(hosts) if at == (host - k) % count}
                    name = f"of-{k}-{self.slot}" if k else f"own-{self.slot}"
                    self.of_host.setdefault(host, {})[name] = key, ranks
            if step % TO_DISK == 0:
                self.disk = max(self.disk, step)

    def flipped(self, host):
        name = f"own-{self.slot}"
        self.damaged.add((host, name, self.of_host[host][name][0]))

    def torn(self, hosts, host):
        name = f"own-{self.slot}"
        key, ranks = self.of_host[host][name]
        self.of_host[host][name] = key, ranks - {hosts.index(host)}


def killed(team):
    for rank in range(team.world_size):
        team.signal(rank, signal.SIGKILL)


class Job:
    """Restart one job repeatedly; each start must restore what the model predicts."""

    def __init__(self, fresh_ranks, folder, oracle):
        self.fresh_ranks, self.folder, self.oracle = fresh_ranks, folder, oracle
        self.model = Guardians()

    def start(self, hosts, steps, *, zero, replicas=0, lose=(), tear=(), flip=()):
        wanted, possible = self.model.newest(hosts)
        with self.fresh_ranks(len(hosts)) as team:
            loss = {"lose": lose, "tear": tear, "flip": flip}
            told = team.run(live, folder=self.folder, hosts=hosts, zero=zero, replicas=replicas, steps=steps, **loss)
            killed(team)
        ((begin, slot),) = {(begin, slot) for begin, slot, _ in told}
        assert (begin, slot) in [wanted, *possible.items()], (begin, slot, wanted, possible)
        self.model.slot = slot
        for _, _, digests in told:
            assert digests == self.oracle[begin : begin + steps + 2]
        self.model.kept(hosts, replicas, begin, steps)
        for host in flip if steps else ():
            self.model.flipped(host)
        for host in tear if steps else ():
            self.model.torn(hosts, host)
        for host in lose:
            self.model.of_host.pop(host, None)
        return begin


@pytest.fixture(scope="module")
def oracle(teams):
    with teams.fresh(1) as team:
        return team.run(alone, steps=90)[0]


@pytest.fixture
def job(fresh_ranks, oracle):
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder:
        yield Job(fresh_ranks, folder, oracle)


@pytest.mark.timeout(180)
def test_hosts_join_leave_and_come_back_with_old_steps(job):
    start = functools.partial(job.start, zero=2)
    assert start([0, 1], 3, replicas=1) == 0
    assert start([0, 1, 2], 1) == 3, "a new host has nothing"
    assert start([0], 1) == 3, "step 4 is on three hosts, and step 3 on each of two"
    assert start([0, 1, 1], 2, replicas=1, lose=[0], tear=[1]) == 4
    assert start([0, 1], 0, replicas=1) == 5, "the disk's: step 6 of rank 1 was torn, and its copy lost"


@pytest.mark.timeout(180)
def test_a_damaged_step_is_passed_over_until_new_ones_take_its_place(job):
    start = functools.partial(job.start, zero=2)
    assert start([0, 1], 2, flip=[1]) == 0
    assert job.model.newest([0, 1]) == ((1, 0), {2: 1}), "the step before is there"
    assert start([0, 1], 2) == 1, "a byte of step 2 has changed"
    assert job.model.newest([0, 1]) == ((3, 0), {}), "nothing that is left is in doubt"
    assert start([0, 1], 0) == 3


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
def test_any_sequence_of_losses(job, seed):
    chance = random.Random(seed)
    for _ in range(LIVES):
        world_size = chance.randint(1, 4)
        cuts = sorted(chance.choice((0, 0, 1)) for _ in range(world_size - 1))
        hosts = [0]
        for _ in cuts:
            hosts.append(hosts[-1] + chance.choice((0, 1, 1)))
        count = hosts[-1] + 1
        lost = [host for host in range(count) if chance.random() < 0.3]
        steps = chance.randint(0, 3)
        torn = [host for host in range(count) if chance.random() < 0.2 and host not in lost]
        flips = [host for host in range(count) if chance.random() < 0.1 and host not in lost + torn]
        options = {"zero": chance.choice([*STAGES]), "replicas": chance.randint(0, count - 1)}
        print(hosts, steps, options, lost, torn, flips, flush=True)
        job.start(hosts, steps, lose=lost, tear=torn, flip=flips, **options)
