"""How the ranks that are left after a fault agree on their new group, and make torch's default group anew.

They meet in a folder that all of them see, since the store of torch's old group may have ended with rank 0. Each word in it is a
file that is linked once, so all ranks read the word of the first that spoke. Spares wait in the same folder for the place of a
lost rank. move() is the whole protocol. A test explores it with every order of moves and two faults at any point
(docs/design/in_place.md).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple

import torch.distributed as dist

from .._engine import Error
from ..torch_compat.internals import default_store, end_groups, set_group_timeout
from . import process_group
from .account import is_running, state_of
from .board import ENDED, SPARES, Board, Member, own_member
from .rendezvous import comm_error
from .waits import Wait

#: pause between two looks into the folder: the first, the longest, and the longest of ranks on several hosts
_LOOK_S, _FAR_LOOK_S = (0.001, 0.05), 0.25
#: deadline of torch's Gloo while the ranks connect, for each that died meanwhile, on one host and on several; then the group gets
#: the deadline of the one before
_CONNECT_S, _FAR_CONNECT_S = 8.0, 20.0
#: a killed process ends within it, unless the kernel keeps one of its threads
_END_S = 10.0


class Finished(Exception):
    """Raised by meet(): all ranks have ended their last step, and some have left."""


class Move(NamedTuple):
    """The next action of a rank: say a word, (key, value), or that `tells` has ended, if any; or end with an outcome."""

    says: tuple[str, Any] | None = None
    goes_on: bool | None = None  # None: look again
    tells: int | str | None = None


def move(
    own: int | str,
    count: int,
    least: int,
    said: Mapping[str, Any],
    dead: Collection[int | str],
    is_late: bool,
    spares: Mapping[str, Collection[int]] = MappingProxyType({}),
    full: int = 0,
    awaited: int = 0,
    untold: Sequence[int | str] = (),
) -> Move:
    """Return the next move of member `own` of `count` in one attempt, from what was `said` in it and which members are `dead`.

    `is_late`: this rank no longer waits for living members that have not come, or not said that they are ready. `spares`: names of
    living spares that wait, and the members of each one's host; such a name is the `own` of a spare. A spare of a lost rank's host is
    taken before others. The group grows up to `full` ranks. For `awaited` lost ranks the others wait until a spare is there.
    `untold`: those of `dead` on this rank's host of which other hosts, which cannot see it, have not been told. Words, each said once:

    here/R      member R takes part
    members     those that go on, in the order of their new numbers; a spare by its name; [] if fewer than `least` are left
    ready/R     member R, or spare R, has read that it is one of them
    outcome     True: all of them were ready and alive; False: one died or stopped, and the rest tries again without it
    """
    is_spare = isinstance(own, str)
    if not is_spare and f"here/{own}" not in said:
        return Move((f"here/{own}", True))
    if untold:
        return Move(tells=untold[0])
    if "members" not in said:
        if is_spare:  # it has no word before; once no rank is left to choose it, it ends
            return Move(goes_on=False) if all(each in dead for each in range(count)) else Move()
        seats: dict[int, int | str] = {
            each: each for each in range(count) if f"here/{each}" in said and each not in dead
        }
        living = sum(each not in dead for each in range(count))
        if not is_late and (len(seats) < living or len(spares) < min(count - len(seats), awaited)):
            return Move()
        waiting = dict(spares)
        for seat, is_near in [(each, near) for near in (True, False) for each in range(count)]:
            name = next((name for name, mates in waiting.items() if not is_near or seat in mates), None)
            if seat not in seats and name is not None:
                seats[seat] = name
                del waiting[name]
        chosen = [seats[each] for each in sorted(seats)]
        chosen += [*waiting][: max(full - len(chosen), 0)]
        return Move(("members", chosen if len(chosen) >= least else []))
    members = said["members"]
    if own not in members:
        return Move(goes_on=False)
    if "outcome" in said:
        return Move(goes_on=said["outcome"])
    if f"ready/{own}" not in said:
        return Move((f"ready/{own}", True))
    is_ready = all(f"ready/{each}" in said for each in members)
    if any(each in dead for each in members) or (is_late and not is_ready):
        return Move(("outcome", False))
    return Move(("outcome", True)) if is_ready else Move()


class Regroup:
    """The members of a job that goes on in place, numbered as torch's default group numbers them.

    `own`: this rank's number; -1 in a spare that has no rank's place yet. Others: those of move().
    """

    def __init__(
        self,
        folder: str,
        members: Sequence[Member],
        own: int,
        *,
        least: int,
        wait_s: float,
        awaited: int,
        backend: str,
        timeout: timedelta,
    ) -> None:
        self._folder, self.members, self.full = folder, list(members), len(members)
        self._least, self._wait_s, self._awaited = least, wait_s, awaited
        self._backend, self._timeout = backend, timeout
        self._chosen = set[str]()
        self.attempt = 0
        self.is_over = False  # True once this rank cannot go on
        self._process, self.own = own_member(), own
        with self._in_folder():
            self._waiting, self._told = (Board(os.path.join(folder, name)) for name in (SPARES, ENDED))
            if own < 0:
                self._waiting.say(self._process.name, self._process)
            self._candidates()

    def _board(self, attempt: int) -> Board:
        return Board(os.path.join(self._folder, str(attempt)), self._has_hosts)

    def _candidates(self) -> dict[int | str, Member]:
        """Return the members, and the spares that have never been chosen."""
        spares = {name: Member(*each) for name, each in sorted(self._waiting.said().items())}
        candidates: dict[int | str, Member] = dict(enumerate(self.members))
        candidates |= {name: each for name, each in spares.items() if name not in self._chosen}
        self._has_hosts = any(each.place != self._process.place for each in candidates.values())
        self._waiting.is_far = self._told.is_far = self._has_hosts
        return candidates

    def _ended(self, candidates: Mapping[Any, Member]) -> set[Any]:
        """Return those that have ended, as far as this host sees them or was told."""
        told, place = self._told.said(), self._process.place
        return {
            number
            for number, each in candidates.items()
            if each.name in told or (each.place == place and not is_running(each.pid, each.start))
        }

    def dead(self) -> set[int]:
        """Return the members whose processes have ended, as far as this host sees them or was told."""
        return self._ended(dict(enumerate(self.members)))

    def has_lost(self) -> bool:
        """Return True if a member has ended, or ranks of another host, which see more, have begun the next attempt."""
        with self._in_folder():
            return bool(self.dead()) or (
                self._has_hosts and any(key != "grow" for key in self._board(self.attempt + 1).said())
            )

    def grows(self, step: int) -> bool:
        """Return True, on all ranks before the same step, if a place is free and a spare waits. Else it costs a look, or nothing.

        Rank 0 says it a step ahead: each step is a round of all ranks, so they have read it before the next one.
        """
        if len(self.members) == self.full:
            return False
        with self._in_folder():
            board = self._board(self.attempt + 1)
            if self.own == 0 and "grow" not in board.said():
                candidates = self._candidates()
                if len(candidates) - len(self._ended(candidates)) > len(self.members):
                    board.say("grow", step + 1)
            return bool(step >= board.said().get("grow", step + 1))

    @contextlib.contextmanager
    def _in_folder(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise self._end(
                f"process {self._process.pid} cannot go on in attempt {self.attempt} of {self._folder}: a later start of the job has "
                "removed it"
            ) from None

    def _end(self, sentence: str) -> Error:
        self.is_over = True
        return Error(sentence)

    def meet(self) -> None:
        """Agree with the living members on the next members. Error: this rank is not one of them, or too few are left."""
        with self._in_folder():
            while not self._meet():
                pass

    def _meet(self) -> bool:
        """Meet in the next attempt. Return False if a member died in it, or this spare was not chosen."""
        self.attempt += 1
        board = self._board(self.attempt)
        wait, pause_s, has_chosen = Wait(None), _LOOK_S[0], False
        while True:
            said, candidates = board.said(), self._candidates()
            if "done" in said:
                raise Finished
            if not has_chosen and "members" in said:
                has_chosen, wait = True, Wait(None)  # from here on they have as long again to be ready
            dead = self._ended(candidates)
            spares = {
                name: [number for number, each in enumerate(self.members) if each.place == candidates[name].place]
                for name in candidates
                if isinstance(name, str) and name not in dead
            }
            untold = [each for each in dead if self._has_hosts and candidates[each].name not in self._told.said()]
            own = self._process.name if self.own < 0 else self.own
            limits = spares, self.full, self._awaited, untold
            found = move(own, len(self.members), self._least, said, dead, wait.waited_s > self._wait_s, *limits)
            if found.tells is not None:
                self._told.say(candidates[found.tells].name, True)
                continue
            if found.says is not None:
                board.say(*found.says)
                continue
            if found.goes_on is not None:
                if "members" not in said:
                    raise self._end(
                        f"all {len(self.members)} ranks have ended while a spare, process {self._process.pid}, waited for the place of one"
                    )
                left = sum(f"here/{each}" in said and each not in dead for each in range(len(self.members)))
                return self._follow(said["members"], candidates, found.goes_on, left)
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _FAR_LOOK_S if self._has_hosts else _LOOK_S[1])

    def _follow(
        self, chosen: list[int | str], candidates: Mapping[int | str, Member], goes_on: bool, left: int
    ) -> bool:
        """Take the chosen ones for the members, and end those of this host that are left out and live."""
        is_member = self.own >= 0
        if not chosen:
            raise self._end(
                f"{left} of {len(self.members)} ranks are left, and min_ranks={self._least}: this job cannot go on in place"
            )
        if is_member and self.own not in chosen:
            raise self._end(
                f"rank {self.own} of {len(self.members)} on host {socket.gethostname()} came {self._wait_s:g} s too late to go on: "
                f"ranks {', '.join(map(str, chosen))} go on without it"
            )
        for number, each in enumerate(self.members):
            if is_member and number not in chosen and each.place == self._process.place:
                _kill(each)
        self._chosen.update(each for each in chosen if isinstance(each, str))
        self.members = [candidates[each] for each in chosen]
        own = self.own if is_member else self._process.name
        self.own = chosen.index(own) if own in chosen else -1
        return goes_on

    def finish(self) -> None:
        """Tell a rank that hears of a loss from now on that all had ended their last step."""
        self._board(self.attempt + 1).say("done", True)

    def make_group(self) -> None:
        """Replace torch's default group by one of the members, or raise CommError if that is impossible. Collective."""
        leave(self._wait_s)
        folder, size = os.path.join(self._folder, str(self.attempt)), len(self.members)
        board, most_s = self._board(self.attempt), _FAR_CONNECT_S if self._has_hosts else _CONNECT_S
        short = timedelta(seconds=min(most_s, self._timeout.total_seconds()))
        board.say(f"came/{self.own}", True)
        try:  # else Gloo would wait for a member that has died since they met
            self._await(board, [f"came/{each}" for each in range(size)])
            store = _file_store(os.path.join(folder, "torch.store"), self.own)
            with self._ending_the_stopped():
                dist.init_process_group(self._backend, store=store, rank=self.own, world_size=size, timeout=short)
        except (RuntimeError, OSError) as error:
            raise comm_error(f"joining in place: torch's group cannot be made: {error}") from error
        default_store().set_timeout(self._timeout)
        set_group_timeout(dist.group.WORLD, self._timeout)
        here = self._here()
        own = {"RANK": self.own, "WORLD_SIZE": size, "LOCAL_RANK": here.index(self.own), "LOCAL_WORLD_SIZE": len(here)}
        os.environ |= {name: str(value) for name, value in own.items() if name in os.environ}

    @contextlib.contextmanager
    def _ending_the_stopped(self) -> Iterator[None]:
        """End each member of this host that is stopped for `wait_s`: it may hold the lock of torch's store, which has no deadline."""
        is_over, stopped_s = threading.Event(), dict.fromkeys(self._here(), 0.0)

        def watch() -> None:
            while not is_over.wait(_LOOK_S[1]):
                for each in stopped_s:
                    member = self.members[each]
                    stopped_s[each] = stopped_s[each] + _LOOK_S[1] if state_of(member.pid, member.start) == "T" else 0.0
                    if stopped_s[each] > self._wait_s:
                        _kill(member)

        thread = threading.Thread(target=watch, name="sw-regroup", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _here(self) -> list[int]:
        """Return the members of this host."""
        return [number for number, each in enumerate(self.members) if each.place == self._process.place]

    def _await(self, board: Board, words: Sequence[str]) -> None:
        """Return once each member has said its word. RuntimeError if one has died, or stays away for wait_s."""
        wait, pause_s = Wait(None), _LOOK_S[0]
        while absent := [number for number, word in enumerate(words) if word not in board.said()]:
            if dead := self.dead():
                for each in dead if self._has_hosts else ():
                    self._told.say(self.members[each].name, True)
                raise RuntimeError(f"rank {min(dead)} died")
            if wait.waited_s > self._wait_s:
                raise RuntimeError(f"rank {absent[0]} has not come within {self._wait_s:g} s")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LOOK_S[1])


def _file_store(path: str, own: int) -> dist.FileStore:
    """Return torch's store in a file, which it opens by name in each call.

    Its constructor holds Python's lock while it waits for the file's, with which another rank may have stopped: it gets a file alone.
    """
    alone = f"{path}.{own}"
    store = dist.FileStore(alone, -1)
    with contextlib.suppress(FileExistsError):
        os.link(alone, path)
    os.symlink(os.path.basename(path), f"{alone}.new")
    os.replace(f"{alone}.new", alone)
    return store


def leave(coming_s: float | None = None) -> None:
    """End every communicator of this process and torch's groups, without a word to ranks that may be dead."""
    process_group.begin_anew(coming_s)
    end_groups()


def _kill(member: Member) -> None:
    """Kill a process of this job that others have left behind, and await its end: then it holds no lock and writes nothing more."""
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(member.pid)
        try:
            if is_running(member.pid, member.start):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                ending = select.poll()
                ending.register(fd, select.POLLIN)
                ending.poll(1000 * _END_S)
        finally:
            os.close(fd)
