"""Law: a restored run has exactly the losses of an uninterrupted one at the same world size, with dropout's generators,
a scheduler, a scaler, a data position and user state.
"""

import itertools
import os
import random

import pytest
import torch
from checkpoint_subjects import Small, assert_same_state, build, state_of
from harness import gather, on_every_rank
from peer import PEER, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder

pytestmark = pytest.mark.skipif(PEER == "torch", reason="shardwright's checkpoints")
STEPS, STOP = 9, 5


class Data:
    """A loader of batches in random order that has its own generator and saves its position."""

    def __init__(self, rank):
        self.generator = torch.Generator().manual_seed(100 + rank)
        self.position = 0

    def next(self):
        self.position += 1
        return torch.randn(5, 24, generator=self.generator) * random.choice([0.5, 2.0])

    def state_dict(self):
        return {"position": self.position, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.position = state["position"]
        self.generator.set_state(state["generator"])


class Training:
    def __init__(self, rank, folder, seed, **options):
        model, optimizer = build(Small, seed)
        self.model, self.optimizer = sw.wrap(model, optimizer)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, total_steps=30)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        self.data = Data(rank)
        self.user = {"seen": 0, "history": []}
        self.checkpoints = sw.Checkpointer(
            folder, self.model, self.optimizer, scheduler=self.scheduler, scaler=self.scaler, dataloader=self.data,
            user_state=self.user, **options,
        )  # fmt: skip
        torch.manual_seed(seed + rank)
        random.seed(seed + rank)

    def run(self, begin, end):
        losses = []
        for step in range(begin, end):
            loss = self.model(self.data.next())
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.user["seen"] += 1
            self.user["history"].append(loss.item())
            losses.append(loss.item())
            self.checkpoints.save(step, every=STOP)
        return losses


@pytest.mark.parametrize("snapshot", ["copy", "lazy"])
@on_every_rank()
def test_the_losses_after_a_restore_are_those_of_the_uninterrupted_run(rank, world_size, snapshot):
    folder = shared_folder(rank)
    first = Training(rank, f"{folder}/a", 0, snapshot=snapshot)
    losses = first.run(0, STEPS)
    first.checkpoints.close()
    if rank == 0:
        assert sorted(os.listdir(f"{folder}/a")) == [".lock", f"step-{STOP:06d}"]
    gather(None)
    second = Training(rank, f"{folder}/a", 77)
    with second.checkpoints:
        assert second.checkpoints.restore() == STOP
        assert second.user["seen"] == STOP and second.user["history"] == gather(losses)[0][:STOP]
        assert second.run(STOP, STEPS) == losses[STOP:]
    assert_same_state(state_of(second.model, second.optimizer), state_of(first.model, first.optimizer))
    assert second.scheduler.get_last_lr() == first.scheduler.get_last_lr()
    assert second.scaler.get_scale() == first.scaler.get_scale()


@on_every_rank()
def test_steps_are_counted_and_old_checkpoints_go(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = build(Small)
    with sw.Checkpointer(folder, model, optimizer, keep_last=2, keep_every=4, keep_best=1) as checkpoints:
        assert checkpoints.restore() == 0
        saved = [checkpoints.save(step, every=2, metric=abs(step - 4.0)) for step in range(16)]
        assert saved == [step % 2 == 1 for step in range(16)]
        checkpoints.wait()
        gather(None)  # rank 0 returns when it has removed what no rule keeps
        left = sorted(name for name in os.listdir(folder) if name.startswith("step"))
        # 14 and 16 are the newest, 4, 8, 12, 16 multiples; 4 (step 3) and 6 (step 5) are as near to 4: the newer stays
        assert left == [f"step-{n:06d}" for n in (4, 6, 8, 12, 14, 16)]
        assert checkpoints.restore() == 16


@on_every_rank()
def test_on_busy_is_decided_by_all_ranks_alike(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = build(Small)
    slow = {"bandwidth_bytes_per_s": 100_000, "timeout_s": 60.0}
    with sw.Checkpointer(f"{folder}/skip", model, optimizer, on_busy="skip", **slow) as checkpoints:
        answers = [checkpoints.save(step) for step in range(3)]
        assert answers == [True, False, False] and gather(answers) == [answers] * world_size
        checkpoints.wait()
        assert checkpoints.save(3)
    with sw.Checkpointer(f"{folder}/raise", model, optimizer, on_busy="raise", **slow) as checkpoints:
        assert checkpoints.save(0)
        with pytest.raises(sw.CheckpointError, match="step 2 was not saved: the save before it is still being written"):
            checkpoints.save(1)


@on_every_rank()
def test_a_lazy_save_holds_the_values_of_its_moment(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = build(Small)
    slow = {"bandwidth_bytes_per_s": 1_200_000, "timeout_s": 60.0}
    with sw.Checkpointer(folder, model, optimizer, snapshot="lazy", **slow) as checkpoints:
        for step in itertools.count():
            model(torch.randn(5, 24)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                then = state_of(model, optimizer)
                checkpoints.save(step)
            elif not any(gather(checkpoints.progress["busy"])):  # all ranks take as many steps
                break
        assert step > 1, "the save was over before a step could disturb it"
        checkpoints.wait()
        assert checkpoints.restore() == 1
    assert_same_state(state_of(model, optimizer), then)


@on_every_rank()
def test_a_lazy_save_of_a_parameter_changed_outside_the_step_is_an_error_that_names_it(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = build(Small)
    slow = {"bandwidth_bytes_per_s": 50_000, "timeout_s": 60.0}
    with sw.Checkpointer(folder, model, optimizer, snapshot="lazy", **slow) as checkpoints:
        checkpoints.save(0)
        with torch.no_grad():
            model.layers[0].weight.mul_(2)
        model(torch.randn(5, 24)).backward()
        optimizer.step()
        with pytest.raises(sw.CheckpointError, match="'layers.0.weight' was changed before the optimizer's step"):
            checkpoints.wait()
        assert not [name for name in os.listdir(folder) if name.endswith("1")]


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_every_rank()
def test_a_lazy_save_is_of_one_moment_where_parameters_are_written_in_full_parameters(rank, world_size, stage):
    """Training is ten times faster than the writes: 4 MiB at 20 MB/s."""
    folder = os.path.join(os.environ["SW_TEST_FOLDER"], f"written-{stage}")
    torch.manual_seed(0)
    module = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(4)])
    model, optimizer = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), zero=stage)
    saved = sw.full_state_dict(model)
    with sw.Checkpointer(
        folder, model, optimizer, snapshot="lazy", bandwidth_bytes_per_s=20_000_000 // world_size
    ) as saves:
        saves.save(0)
        with sw.full_parameters(model, writable=True), torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1)
        saves.wait()
        assert saves.restore() == 1
    assert all(torch.equal(value, saved[name]) for name, value in sw.full_state_dict(model).items())
    gather(None)
