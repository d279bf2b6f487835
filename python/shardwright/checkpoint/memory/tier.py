"""MemoryTier: a rank's part in keeping steps in memory and restoring them."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..._engine import CheckpointError, CheckpointFolder, CheckpointPlan, CheckpointSaver
from ..folder.retention import branch_of
from ..peers import Peers
from .buddies import Buddies
from .budget import SLOTS, Need, memory_left, no_restore, refusal
from .client import ANSWER_S, Client, ancestors, launcher_of, name_of
from .image import Image, Table
from .ranges import connect_carriers, in_blocks, on_hosts
from .restoring import WHOLE, Candidate, Source

_logger = logging.getLogger("shardwright")
#: file of the checkpoint directory: the name of its guardians. Another directory, or one that was made anew, has another. It is
#: not hidden, so that `rm -r directory/*` removes the steps in memory, too
JOB = "memory.json"
_JOB_BYTES = 16
#: address space for the growth of rank 0's own files while the layout stays; they may also double
_ROOM_BYTES = 64 << 20
_ROUND_S = 0.5


class MemoryTier:
    """This rank's part of the memory tier. If it is impossible, `off` has the reason, equal on all ranks, and rank 0 logs it.

    `run` is equal on all ranks and was never used before. `replicas`: the number of hosts with a copy of each host's images.
    """

    def __init__(
        self, peers: Peers, directory: str, run: str, replicas: int | None, *, threads: int, timeout_s: float
    ) -> None:
        self._peers, self._timeout_s = peers, timeout_s
        self.off = ""
        self._hosts, self._host, self._here = peers.host_of, peers.host, peers.here
        self._index, self._is_first = peers.index, peers.index == 0
        self._client: Client | None = None
        self._buddies: Buddies | None = None
        self._images: dict[int, tuple[Any, Image]] = {}  # slot -> (layout that it was made for, image)
        self._complete: tuple[int, int] | None = None  # slot and step of the newest image that is complete on all hosts
        self._last: tuple[int, int] | None = None
        self._room = 0  # bytes for rank 0's own files in an image of the current layout
        self._failure = ""
        self._directory, self._branch = directory, 0  # number of rollbacks so far
        self._files_of = functools.lru_cache(maxsize=2)(_files_of)
        self._has_warned = self.are_ready = False
        self._has_seen_all = True  # images of all hosts, in the last candidates()
        self.answers: list[Any] = []
        self.skipped = self.kept_bytes = self.fetched_bytes = 0
        self._saver = CheckpointSaver(peers.rank, peers.world_size, threads=threads)
        self.replicas = 0
        #: words of a candidate's label, and of the warning of a tier that is off
        self.where, self._without = "in memory", "checkpoints go to the disk alone, without a memory tier"
        self._begin(directory, run, replicas)

    def _begin(self, directory: str, run: str, replicas: int | None) -> None:
        """Find the place of images. Collective."""
        self.replicas = self._choose_replicas(replicas)
        with self._or_off():
            self._find_guardians(directory, run)
            if self.replicas:
                self._meet_buddies()

    # agreement --------------------------------------------------------------------------------------------------------

    def _turn_off_if(self, reason: str) -> None:
        """Turn the tier off if there is a reason, which must be equal on all ranks."""
        if not reason or self.off:
            return
        self.off = reason
        if self._peers.rank == 0:
            _logger.warning("%s: %s", self._without, reason)
        self.close(goodbye=True)

    @contextlib.contextmanager
    def _or_off(self) -> Iterator[None]:
        """Turn the tier off on an error of on_hosts(), which is equal on all ranks."""
        try:
            yield
        except CheckpointError as error:
            self._turn_off_if(str(error))

    def _choose_replicas(self, asked: int | None) -> int:
        others = self._peers.host_count - 1
        machines = self._peers.exchange(_machine() if self._is_first else "", "machines of hosts")
        names = [each for rank, each in enumerate(machines) if self._hosts.index(self._hosts[rank]) == rank]
        if asked is None:
            same = [host for host, each in enumerate(names) if others and each == names[(host + 1) % len(names)]]
            if same and self._peers.rank == 0:
                why = "steps in memory are not copied to other hosts; memory_replicas=1 asks for it"
                _logger.warning("hosts %d and %d are one machine: %s", same[0], (same[0] + 1) % len(names), why)
            return 1 if others and not same else 0
        if asked > others:
            raise ValueError(
                f"memory_replicas must be in [0, {others}], the number of other hosts, got {asked}: ranks "
                f"{', '.join(map(str, self._here))} are all on host {socket.gethostname()}, and a copy there would be lost with it"
            )
        return asked

    def _find_guardians(self, directory: str, run: str) -> None:
        """Connect each rank to its host's guardian. The host's first rank starts it. Collective."""

        def describe() -> list[Any]:
            return [job_of(directory) if self._peers.rank == 0 else "", ancestors(), self._rollbacks()]

        answers = on_hosts(self._peers, describe, "guardians")
        self._branch = len(answers[0][2])
        chains = [[(pid, start) for pid, start in answers[rank][1]] for rank in self._here]
        name = name_of(answers[0][0], self._peers.simulated_host)
        answer_s = min(ANSWER_S, self._peers.timeout_s / 4)  # the others wait for this rank

        def connect() -> None:
            if self._is_first:
                self._client = Client.start(name, run, launcher_of(chains, os.getsid(0)), answer_s=answer_s)
            else:
                self._client = Client(name, run, answer_s)

        self._first_then_others(connect, "guardians")

    def _first_then_others(self, call: Callable[[], None], label: str) -> None:
        """Run call() on the first rank of each host, then on the others. An error is equal on all ranks. Collective."""
        for is_first in (True, False):
            on_hosts(self._peers, call if self._is_first == is_first else lambda: None, label)

    def _rollbacks(self) -> list[int]:
        """Return the steps of all rollbacks of this directory, on rank 0."""
        return branch_of(self._directory).rollbacks if self._peers.rank == 0 else []

    def _meet_buddies(self) -> None:
        """Make the wire between carriers. Collective."""
        wire = connect_carriers(self._peers, "memory", self._timeout_s)
        if wire is None:
            return
        carriers, client = self._peers.carriers, self._guardian
        near = ((self._host + k, self._host - k) for k in range(1, self.replicas + 1))
        others = [(carriers[to % len(carriers)], carriers[by % len(carriers)]) for to, by in near]

        def make(k: int, slot: int, data: int, tables: int) -> Image:
            return Image.make(client, f"of-{k}-{slot}", data, tables)

        self._buddies = Buddies(wire, others, make)

    @property
    def _guardian(self) -> Client:
        assert self._client is not None
        return self._client

    def _image_of_host(self, name: str, make: Callable[[], Image] | None, label: str) -> Image:
        """Return an image that the host's first rank makes and the others open. An error is equal on all ranks. Collective."""
        opened: list[Image] = []

        def open_it() -> None:
            opened.append(make() if self._is_first and make is not None else Image.open(self._guardian, name))

        try:
            self._first_then_others(open_it, label)
        except BaseException:
            for image in opened:
                image.close()
            raise
        return opened[0]

    # saving -----------------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Return True while this rank copies a step to or from another host."""
        return self._buddies is not None and self._buddies.is_busy

    def is_due(self, step: int, ready: bool, digests: Any = ()) -> bool:
        """Return True if `step` must be copied now; set `are_ready` if all ranks are, and `answers` to their digests. Collective."""
        if self.off:
            return False
        mine = [step, self.is_busy, self._trouble(), ready, digests]
        answers = self._peers.agreement(mine, "a step in memory") or [mine]
        self._turn_off_if(next(filter(None, (each[2] for each in answers)), ""))
        ours = answers[0][0]
        for rank, (theirs, *_) in enumerate(answers):
            if theirs != ours:
                raise CheckpointError(f"rank 0 keeps step {ours} in memory while rank {rank} keeps step {theirs}")
        if self.off:
            return False
        if any(is_busy for _, is_busy, *_ in answers):
            self.skipped += 1
            return False
        self._complete = self._last or self._complete
        self.are_ready = all(each[3] for each in answers)
        self.answers = [each[4] for each in answers]
        return True

    def _trouble(self) -> str:
        """Return the reason why this rank must turn the tier off, or ""."""
        failure = self._failure or ("" if self._buddies is None else self._buddies.failure)
        if not failure and self._client is not None and not self._client.is_alive:
            failure = f"its guardian {'does not answer' if self._client.is_silent else 'has ended'}"
        return f"host {socket.gethostname()}: {failure}" if failure else ""

    def put(
        self, step: int, nonce: str, layout: Any, content: dict[str, Any], share: Callable[[], tuple[int, bool]]
    ) -> Image | None:
        """Copy this rank's share of a step, `content`, after is_due(), on all ranks. Return its image; None if it cannot be copied.

        An error ends the tier at the next step. The same `layout` object means equal plans, on all ranks. share(), called for a
        new one, returns this rank's bytes and True if a restore reads only its slices. `content` has the plans, sources and device
        of CheckpointSaver.keep().
        """
        slot = 0 if self._complete is None else (self._complete[0] + 1) % SLOTS
        image = self._image(slot, layout, content["shared"], share, content["own"])
        if image is None:
            return None
        self._last = slot, step
        try:
            self._write(image, step, nonce, content)
        except Exception as error:
            self._failure = f"a step cannot be copied: {error}"
            return None
        if self._buddies is not None:
            self._buddies.start(image, slot, nonce, len(self._here))
        return image

    def _write(self, image: Image, step: int, nonce: str, content: dict[str, Any]) -> None:
        image.clear(self._index)
        place = {"image": image.address, "image_bytes": image.data, "disk_fd": image.disk_fd}
        memory: Any = {**place, "timeout_s": self._timeout_s}
        tallies, runs, self.kept_bytes = self._saver.keep(nonce=nonce, **content, **memory)
        ranks = {"rank": self._peers.rank, "world_size": self._peers.world_size}
        head = {"step": step, "nonce": nonce, **ranks, "data": image.data, "branch": self._branch}
        if content["own"] is not None:
            head["files"] = [*self._files_of(content["shared"]), *self._files_of(content["own"])]
        self._finish(image, Table(head, runs, tallies))

    def _finish(self, image: Image, table: Table) -> None:
        """Make what this rank has copied valid."""
        image.write(self._index, table)

    def _left(self) -> tuple[int, str]:
        """Return the bytes that images may still take, and the name of the limit."""
        return memory_left()

    def _image(
        self, slot: int, layout: Any, plan: CheckpointPlan, share: Callable[[], tuple[int, bool]], own: Any
    ) -> Image | None:
        """Return this host's image for a slot; None if it does not fit. Collective if the layout is new."""
        found = self._images.get(slot)
        if found is not None and found[0] is layout:
            return found[1]
        if found is not None:
            self._images.pop(slot)[1].close()
        if not any(made_for is layout for made_for, _ in self._images.values()):
            own_bytes = 0 if own is None else sum(in_blocks(nbytes) for _, nbytes, *_ in own.files())
            share_bytes, has_slices = share()
            self._turn_off_if(self._over_budget(share_bytes + own_bytes, own_bytes, has_slices))
        if self.off:
            return None
        data = sum(in_blocks(nbytes) for _, nbytes, _ in self._files_of(plan)) + in_blocks(self._room)
        name = f"own-{slot}"
        make = functools.partial(Image.make, self._guardian, name, data, len(self._here))
        with self._or_off():
            self._images[slot] = layout, self._image_of_host(name, make, f"image {slot}")
        return None if self.off else self._images[slot][1]

    def _over_budget(self, share_bytes: int, own_bytes: int, has_slices: bool) -> str:
        """Return the reason why the images of some host do not fit. Set the room for rank 0's files. Collective."""
        left, limit = self._left()
        held = 0
        if self._is_first and self._client is not None:
            with contextlib.suppress(CheckpointError):
                held = int(self._client.ask("list")[0]["nbytes"])
        mine = [share_bytes, left, limit, held, socket.gethostname(), own_bytes]
        answers = self._peers.exchange(mine, "budget of the memory tier")
        self._room = 2 * answers[0][5] + _ROOM_BYTES
        needs = []
        count = self._peers.host_count
        of_host = [sum(share for (share, *_), at in zip(answers, self._hosts) if at == host) for host in range(count)]
        for host in range(count):
            here = [each for each, at in zip(answers, self._hosts) if at == host]
            least, limit = min((left, limit) for _, left, limit, *_ in here)
            theirs = [of_host[(host - k) % count] for k in range(1, self.replicas + 1)]
            needs.append(Need(here[0][4], of_host[host], theirs, here[0][3], least, limit))
        reason = self._refusal(needs)
        warning = "" if has_slices else no_restore(needs, self.replicas)
        if warning and not reason and not self._has_warned and self._peers.rank == 0:
            self._has_warned = True
            _logger.warning("steps go into memory, but %s", warning)
        return reason

    def _refusal(self, needs: Sequence[Need]) -> str:
        """Return the reason why images of some host do not fit, or ""."""
        return refusal(needs, self.replicas)

    # restoring --------------------------------------------------------------------------------------------------------

    def candidates(self) -> list[Candidate]:
        """Return the steps that are complete in the memory of all hosts together, oldest first. Collective."""
        if self.off:
            return []
        # ask first: the table of a rank that could not copy never arrives, and carriers wait for it
        answers = self._peers.exchange(self._trouble(), "are steps in memory whole")
        self._turn_off_if(next(filter(None, answers), ""))
        if self.off:
            return []
        self.wait()
        mine = [*(self._look() if self._is_first else ([], True)), self._rollbacks()]
        images_of, have_seen, noted = zip(*self._peers.exchange(mine, "steps in memory"))
        self._has_seen_all = all(have_seen)
        found: dict[Any, dict[int, dict[str, list[int]]]] = {}
        for rank, images in enumerate(images_of):
            for name, key, ranks in images:
                found.setdefault(tuple(key), {}).setdefault(self._hosts[rank], {})[name] = ranks
        complete = []
        for (step, nonce, world_size, data, branch), by_host in sorted(found.items(), key=lambda each: each[0]):
            if any(step > rollback for rollback in noted[0][branch:]):  # of a host that was away then
                continue
            held = {rank for images in by_host.values() for ranks in images.values() for rank in ranks}
            if held == {*range(world_size)}:
                parts = tuple(by_host.get(host, {}) for host in range(self._peers.host_count))
                complete.append(Candidate(step, nonce, world_size, data, parts, self, self.where))
            else:
                self._pass_over(step)
        return complete

    def _pass_over(self, step: int) -> None:
        """Hear of a step that the hosts do not have whole."""

    def _look(self) -> tuple[list[tuple[str, list[Any], list[int]]], bool]:
        """Return (image, [step, nonce, world size, data, branch], ranks) of this host's valid tables, and if each image was read."""
        found: dict[Any, list[int]] = {}
        errors: list[Exception] = []
        with self._collected(errors):
            for name in self._guardian.ask("list")[0]["names"]:
                with self._collected(errors), contextlib.closing(Image.open(self._guardian, name)) as image:
                    for table in image.each_table():
                        key = tuple(table.head[each] for each in ("step", "nonce", "world_size", "data", "branch"))
                        found.setdefault((name, key), []).append(table.head["rank"])
        return [(name, [*key], ranks) for (name, key), ranks in found.items()], not errors

    @contextlib.contextmanager
    def _collected(self, errors: list[Exception]) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, OSError) as error:
            errors.append(error)
            _logger.warning("steps %s cannot be read: %s", self.where, error)

    def assemble(self, chosen: Candidate, opened: contextlib.ExitStack) -> Source:
        """Open an image of a candidate on each host, until `opened` ends. An error is equal on all ranks. Collective."""
        best = chosen.best(self._host)
        make = functools.partial(Image.make, self._guardian, WHOLE, chosen.data, 0)  # it has no pages yet
        opened.callback(self._drop_whole)
        image = self._image_of_host(best or WHOLE, None if best else make, "an image to restore")
        opened.callback(image.close)
        open_image = functools.partial(Image.open, self._guardian)
        source = Source(chosen, image, self._peers, open_image, self._timeout_s, self._left)
        opened.callback(self._end_restore, source)
        source.meet()
        source.bring(source.lists())
        return source

    def _end_restore(self, source: Source) -> None:
        self.fetched_bytes = source.moved_bytes
        source.close()

    def _drop_whole(self) -> None:
        """Let the guardian free the image that a host without one made. Ranks that mapped it keep it until they close it."""
        if self._is_first and self._client is not None:
            with contextlib.suppress(CheckpointError):
                self._client.ask("drop", WHOLE)

    def took(self, chosen: Candidate) -> None:
        """Keep the restored candidate until the next step is complete."""
        names = [name for host in chosen.parts for name in host]
        self._complete, self._last = (int(names[0].rpartition("-")[2]), chosen.step), None

    @property
    def has_step(self) -> bool:
        """Return True if a step was restored from here, or is complete here."""
        return self._complete is not None

    def forget_after(self, step: int) -> None:
        """Take part in a rollback, which Directory.go_on_from() has noted: later steps are no candidates any more."""
        self._branch += 1
        self._complete = None if self._complete is not None and self._complete[1] > step else self._complete

    # the end ----------------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until the last step is on all hosts or its copy failed (no progress for timeout_s). Not collective."""
        moved, since, wait = -1, time.monotonic(), self._peers.wait()
        awaited = "for the copy of a step to or from another host to go on; the deadline is"
        while self._buddies is not None and not self._buddies.wait(_ROUND_S) and self._peers.is_alive:
            if moved != self._buddies.moved:
                moved, since, wait = self._buddies.moved, time.monotonic(), self._peers.wait()
            wait.look(lambda s: f"rank {self._peers.rank} has waited {s:.1f} s {awaited} {self._timeout_s:g} s")
            if time.monotonic() - since > self._timeout_s:
                self._failure = f"nothing of the copy of a step to or from another host came in {self._timeout_s:g} s"
                return

    def progress(self) -> dict[str, int]:
        """Return the counts of Checkpointer.progress."""
        step = 0 if self._last is None else self._last[1]
        counts = {"memory_bytes": self.kept_bytes, "memory_skipped": self.skipped, "memory_fetched": self.fetched_bytes}
        return {"memory_step": step, **counts}

    def close(self, *, goodbye: bool) -> None:
        """Disconnect from the guardian. With the `goodbye` of all ranks it frees the images."""
        if self._buddies is not None:
            self._buddies.close(gently=goodbye)
            self._buddies = None
        for _, image in self._images.values():
            image.close()
        self._images.clear()
        if self._client is not None:
            self._client.close(goodbye=goodbye)
            self._client = None
        self._saver.close()


def _files_of(plan: CheckpointPlan) -> list[tuple[str, int, int]]:
    """Return (path, bytes, bytes before the first tensor) of each file; a file of values has no tensor."""
    files = ((path, nbytes, [begin for _, begin, _ in placed]) for path, nbytes, _, placed in plan.files())
    return [(path, nbytes, min(begins, default=0) or nbytes) for path, nbytes, begins in files]


def job_of(directory: str) -> str:
    """Return the name of what hosts hold of the directory's steps. Durable. Made at first use, and again for a copy of another one."""
    path = os.path.join(directory, JOB)
    folder = os.stat(directory).st_ino
    try:
        with open(path, encoding="ascii") as file:
            answers = json.load(file)
            found, place = str(answers["job"]), answers["place"]
            if len(bytes.fromhex(found)) != _JOB_BYTES:
                raise ValueError(f"it has the job {found!r}")
            # inodes tell copies apart; a device's number, which f_fsid may have, is another one after a reboot
            if place == [folder, os.fstat(file.fileno()).st_ino]:
                return found
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError) as error:
        _logger.warning(
            "'%s' is damaged (%s): steps that hosts hold under its name are not found any more", path, error
        )
    made = secrets.token_hex(_JOB_BYTES)
    fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="ascii") as file:
        json.dump({"job": made, "place": [folder, os.fstat(fd).st_ino]}, file)
        file.flush()
        os.fsync(fd)
    os.replace(f"{path}.new", path)
    CheckpointFolder.sync(directory)
    return made


def _machine() -> str:
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return socket.gethostname()
