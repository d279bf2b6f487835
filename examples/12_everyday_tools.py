"""A torchtitan-like loop with the tools around it: StatefulDataLoader, torchmetrics, an average of the weights, TensorBoard.

    torchrun --nproc-per-node 2 examples/12_everyday_tools.py [stage]
    torchrun --nproc-per-node 2 examples/12_everyday_tools.py fsdp       # sw.fully_shard by hand, as torchtitan composes
    torchrun --nproc-per-node 2 examples/12_everyday_tools.py ddp        # torch's DistributedDataParallel

It trains 20 steps, saves, and trains 20 more. Then a new model, loader and metric go on from the save and train the last 20
steps again: the losses are the same. See README.md.
"""

import sys
import tempfile

import shardwright as sw
import torch
import torch.distributed as dist
import torchmetrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.tensorboard import SummaryWriter
from torchdata.stateful_dataloader import StatefulDataLoader

CLASSES, WIDTH, STEPS = 4, 32, 40


class Points(torch.utils.data.Dataset):
    """Points around random centres, each with its centre's number as label; each rank has its own."""

    def __init__(self, rank, ranks):
        generator = torch.Generator().manual_seed(1)
        labels = torch.randint(0, CLASSES, (1024,), generator=generator)
        centres = torch.randn(CLASSES, WIDTH, generator=generator)
        noise = torch.randn(len(labels), WIDTH, generator=generator)
        self.points = list(zip(centres[labels] + 2 * noise, labels))[rank::ranks]

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.GELU(), torch.nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x):
        return x + self.layers(x)


def build(stage):
    """Return the model, its optimizer and its schedule, wrapped as `stage` says."""
    torch.manual_seed(0)
    bare = torch.nn.Sequential(*(Block() for _ in range(3)), torch.nn.Linear(WIDTH, CLASSES))
    if stage == "fsdp":
        for block in bare[:3]:
            sw.fully_shard(block)
        model = sw.fully_shard(bare)
        optimizer = sw.shard_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    else:
        model, optimizer = bare, torch.optim.AdamW(bare.parameters(), lr=1e-2)
        if stage == "ddp":
            model = DistributedDataParallel(bare)
        else:
            model, optimizer = sw.wrap(bare, optimizer, zero=int(stage))
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


class Training:
    """Everything that one run holds, and one step of it."""

    def __init__(self, stage, directory):
        self.rank, ranks = dist.get_rank(), dist.get_world_size()
        self.model, self.optimizer, self.schedule = build(stage)
        self.loader = StatefulDataLoader(Points(self.rank, ranks), batch_size=16, shuffle=True)
        self.average = AveragedModel(torch.nn.Linear(WIDTH, CLASSES), multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.batches = self.endless()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES)
        self.checkpointer = sw.Checkpointer(
            directory, model=self.model, optimizer=self.optimizer, scheduler=self.schedule, dataloader=self.loader,
            user_state=self.average,
        )  # fmt: skip

    def head(self):
        """Return a copy of the last layer, whole on every rank."""
        is_torchs = isinstance(self.model, DistributedDataParallel)
        whole = self.model.state_dict() if is_torchs else sw.full_state_dict(self.model)
        layer = torch.nn.Linear(WIDTH, CLASSES)
        layer.load_state_dict(
            {key.rpartition(".")[2]: value for key, value in whole.items() if key.split(".")[-2] == "3"}
        )
        return layer

    def endless(self):
        """Return batches of one epoch after the other."""
        while True:
            yield from self.loader

    def run(self, steps, writer=None):
        """Train, and return the mean losses of all ranks."""
        losses = []
        for step, (points, labels) in zip(steps, self.batches):
            scores = self.model(points)
            loss = torch.nn.functional.cross_entropy(scores, labels)
            loss.backward()
            sw.clip_grad_norm_(self.model, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.average.update_parameters(self.head())
            self.accuracy.update(scores.detach(), labels)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
            if writer is not None:
                writer.add_scalar("loss", losses[-1], step)
        return losses


def main():
    torch.set_num_threads(1)
    stage = sys.argv[1] if len(sys.argv) > 1 else "3"
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    places = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(places)
    writer = SummaryWriter(f"{places[0]}/logs") if rank == 0 else None

    training = Training(stage, f"{places[0]}/checkpoints")
    losses = training.run(range(STEPS // 2), writer)
    training.checkpointer.save(STEPS // 2 - 1)
    losses += training.run(range(STEPS // 2, STEPS), writer)
    accuracy = training.accuracy.compute()  # over all ranks
    training.checkpointer.close()

    again = Training(stage, f"{places[0]}/checkpoints")
    resumed = again.run(range(again.checkpointer.restore(), STEPS))
    assert resumed == losses[STEPS // 2 :], "the resumed run went another way"
    assert all(torch.equal(a, b) for a, b in zip(training.average.parameters(), again.average.parameters()))
    again.checkpointer.close()

    if rank == 0:
        writer.close()
        logged = EventAccumulator(f"{places[0]}/logs").Reload().Scalars("loss")
        assert len(logged) == STEPS
        for begin in range(0, STEPS, 10):
            print(f"steps {begin} to {begin + 9}: loss {sum(losses[begin : begin + 10]) / 10:.4f}")
        print(f"steps 20 to 39 again, from the save: loss {sum(resumed) / len(resumed):.4f}, the same")
        print(f"accuracy while training {accuracy:.4f}, {len(logged)} losses in TensorBoard's log")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
