"""Training at a world size that changes between restarts: the same global batches, each sample once an epoch.

    batches = sw.elastic.batches(64, micro_batch=8)
    sampler = sw.elastic.Sampler(len(data), batches, seed=0)
    for x, y in DataLoader(data, batch_sampler=sampler):
        with model.no_sync() if sampler.accumulates() else contextlib.nullcontext():
            (loss(model(x), y) * batches.scale(len(x))).backward()
        if sampler.is_last:
            optimizer.step()
            optimizer.zero_grad()
            sampler.step()

Samples form one stream: the permutations of all epochs, one after another. At any world size, step s trains samples s *
global_batch to (s + 1) * global_batch of the stream, and ranks take consecutive parts. A restart therefore needs only a
position in the stream. The last step of an epoch may include samples of the next one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .comm.process_group import group_size, resolve_group
from .options.checks import count

__all__ = ["Batches", "Sampler", "batches", "by_samples"]


_check_samples = count(1, float("inf"), "a number of samples, at least 1")


@dataclasses.dataclass(frozen=True)
class Batches:
    """The cut of a global batch into micro-batches of ranks. Make it with batches().

    `global_batch`: samples of all ranks in one step. `accumulation`: backwards of a rank in one step, the same on all
    ranks; all but the last belong inside no_sync().
    """

    global_batch: int
    accumulation: int
    rank: int
    world_size: int

    def scale(self, samples: int) -> float:
        """Return the factor of a micro-batch's mean loss that makes averaged gradients those of the global mean."""
        return samples * self.world_size / self.global_batch

    def own(self) -> list[tuple[int, int]]:
        """Return [begin, end) of each micro-batch of this rank inside a global batch."""
        begin, end = _part(self.global_batch, self.rank, self.world_size)
        cuts = [_part(end - begin, number, self.accumulation) for number in range(self.accumulation)]
        return [(begin + low, begin + high) for low, high in cuts]


def _part(total: int, number: int, parts: int) -> tuple[int, int]:
    return total * number // parts, total * (number + 1) // parts


def batches(global_batch: int, micro_batch: int | None = None, *, process_group: Any = None) -> Batches:
    """Cut global batches for this world size. A rank accumulates over micro-batches that it cannot compute at once.

    Parameters
    ----------
    global_batch : int
        Samples in one step, at any world size. ValueError if it leaves some rank an empty micro-batch.
    micro_batch : int, optional
        Largest number of samples in one backward. Default: this rank's part of a global batch.
    process_group : ProcessGroup, optional
        Default: the default group, else the ranks in the launcher's variables, else one rank.
    """
    group = resolve_group(process_group, None, trains=True)
    return cut(global_batch, micro_batch, torch.distributed.get_rank(group), group_size(group))


def cut(global_batch: int, micro_batch: int | None, rank: int, world_size: int) -> Batches:
    """Return batches() of one rank."""
    _check_samples("global_batch", global_batch)
    _check_samples("micro_batch", 1 if micro_batch is None else micro_batch)
    most = -(-global_batch // world_size)
    accumulation = -(-most // (micro_batch or most))
    if global_batch // world_size < accumulation:
        raise ValueError(
            f"global_batch={global_batch} of {world_size} ranks with micro_batch={micro_batch} leaves a rank without samples: "
            f"take a multiple of {world_size}" + ("" if global_batch < world_size else ", or a larger micro_batch")
        )
    return Batches(global_batch, accumulation, rank, world_size)


class Sampler(torch.utils.data.Sampler[list[int]]):
    """The micro-batches of this rank, as a `batch_sampler` of a DataLoader. Its state fits any world size.

    Parameters
    ----------
    size : int
        Samples in the data set.
    batches : Batches
    seed : int
    shuffle : bool
        False: samples in their order, epoch after epoch.

    Notes
    -----
    step(), not iteration, advances `position`, the samples that all ranks have trained: DataLoader workers read ahead.
    Pass the sampler to a Checkpointer as `user_state`: its state is equal on all ranks. Memory: 8 bytes per sample.
    """

    def __init__(self, size: int, batches: Batches, *, seed: int = 0, shuffle: bool = True) -> None:
        _check_samples("size", size)
        if not isinstance(batches, Batches):
            raise TypeError(f"Sampler: batches must be what sw.elastic.batches() returned, got {batches!r}")
        self.batches, self.position = batches, 0
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self._order: tuple[int, torch.Tensor] = (-1, torch.empty(0, dtype=torch.int64, device="cpu"))
        self._backwards = 0

    @property
    def epoch(self) -> int:
        """Return the number of completed epochs."""
        return self.position // self._size

    def __iter__(self) -> Iterator[list[int]]:
        """Yield micro-batches from `position` to the end of the epoch, up to the end of a global batch."""
        position, own = self.position, self.batches.own()
        self._backwards = 0
        end = (position // self._size + 1) * self._size
        while position < end:
            for low, high in own:
                yield self._samples(position + low, position + high)
            position += self.batches.global_batch

    def __len__(self) -> int:
        left = self._size - self.position % self._size
        return -(-left // self.batches.global_batch) * self.batches.accumulation

    def _samples(self, begin: int, end: int) -> list[int]:
        """Return the samples at positions [begin, end) of the stream."""
        found: list[int] = []
        while begin < end:
            epoch, index = divmod(begin, self._size)
            until = min(index + end - begin, self._size)
            found += self._permutation(epoch)[index:until].tolist() if self._shuffle else range(index, until)
            begin += until - index
        return found

    def _permutation(self, epoch: int) -> torch.Tensor:
        if self._order[0] != epoch:
            generator = torch.Generator("cpu").manual_seed((self._seed + epoch) % 2**63)
            self._order = epoch, torch.randperm(self._size, generator=generator, dtype=torch.int64, device="cpu")
        return self._order[1]

    def accumulates(self) -> bool:
        """Return True if this micro-batch is not the last of its step. Call it once for each, before its forward."""
        self._backwards += 1
        return not self.is_last

    @property
    def is_last(self) -> bool:
        """Return True if the micro-batch of the last accumulates() completes its step."""
        return self._backwards % self.batches.accumulation == 0

    def step(self) -> None:
        """Count a global batch as trained. Call it after optimizer.step()."""
        self.position += self.batches.global_batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position, for any world size and global batch."""
        return {"position": self.position, "size": self._size, "seed": self._seed, "shuffle": self._shuffle}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a position. Raise ValueError for a state of another size, seed or shuffle."""
        for name, own in (("size", self._size), ("seed", self._seed), ("shuffle", self._shuffle)):
            if state_dict[name] != own:
                raise ValueError(f"the sampler was saved with {name}={state_dict[name]} and has {name}={own}")
        self.position, self._backwards = int(state_dict["position"]), 0


def by_samples(
    optimizer: torch.optim.Optimizer, sampler: Sampler, factor: Callable[[int], float]
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a scheduler whose learning rates are the initial ones times factor(samples trained), at any global batch."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: factor(sampler.position))
