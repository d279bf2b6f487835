"""Law: in every order of their moves, with two faults at any point, the ranks that are left after a fault agree on which of them go on.

The explorer drives the protocol itself, regroup.move(). A rank reads the words of its attempt, and says its next word later, when
others may have spoken. Ranks die, stop for good, find an error after they have met, or go on without a living rank that comes too late.
"""

from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import pytest
from shardwright.comm import regroup


class Rank(NamedTuple):
    """`does`: the phase, or the word that it is about to say. `members`: of its attempt, before the meeting and, once met, after it."""

    attempt: int
    members: tuple[int, ...]
    does: object


MEETS, MET, ENDED, DEAD, STOPPED = "meets", "met", "ended", "dead", "stopped"
#: ranks; the words of each attempt, by (attempt, key); faults that are left; whether ranks are late
State = tuple[tuple[Rank, ...], frozenset, int, bool]


def frozen(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def following(state: State, least: int) -> Iterator[State]:
    """Yield every state that one move, one fault or one look makes of this one."""
    ranks, words, faults, lates = state
    dead = {number for number, each in enumerate(ranks) if each.does == DEAD}
    gone = dead | {number for number, each in enumerate(ranks) if each.does == ENDED}  # an error ends its process

    def moved(number: int, rank: Rank, faults: int = faults, words: frozenset = words) -> State:
        return (*ranks[:number], rank, *ranks[number + 1 :]), words, faults, lates

    for number, rank in enumerate(ranks):
        if number in gone or rank.does == STOPPED:
            continue
        if faults:
            yield moved(number, rank._replace(does=DEAD), faults - 1)
            if lates:
                yield moved(number, rank._replace(does=STOPPED), faults - 1)
        if rank.does == MET:
            others = [ranks[each] for each in rank.members]
            is_broken = any(each in gone for each in rank.members) or any(
                each.attempt > rank.attempt or each.does == STOPPED for each in others
            )
            if is_broken or faults:  # without a death: an error while the group is made
                yield moved(number, Rank(rank.attempt + 1, rank.members, MEETS), faults - (not is_broken))
            continue
        said = {key: value for (attempt, key), value in words if attempt == rank.attempt}
        if rank.does != MEETS:
            key, value = rank.does
            new = words if key in said else words | {((rank.attempt, key), value)}
            yield moved(number, rank._replace(does=MEETS), words=new)
            continue
        known = {key: list(value) if isinstance(value, tuple) else value for key, value in said.items()}
        own, dead_here = rank.members.index(number), {at for at, each in enumerate(rank.members) if each in gone}
        in_time = regroup.move(own, len(rank.members), least, known, dead_here, False)
        for is_late in (False, True) if lates else (False,):
            found = regroup.move(own, len(rank.members), least, known, dead_here, is_late)
            if is_late and found.says == ("outcome", False) != in_time.says:
                if not any(ranks[each].does == STOPPED for each in rank.members):
                    continue  # else attempts without end: one that moves is ready in time
            if found.says is not None:
                yield moved(number, rank._replace(does=(found.says[0], frozen(found.says[1]))))
            elif found.goes_on is not None:
                chosen = known["members"]
                if own not in chosen:
                    yield moved(number, rank._replace(does=ENDED))
                    continue
                members = tuple(rank.members[each] for each in chosen)
                attempt, does = (rank.attempt, MET) if found.goes_on else (rank.attempt + 1, MEETS)
                yield moved(number, Rank(attempt, members, does))


def check(state: State) -> None:
    met: dict[int, tuple[int, ...]] = {}
    for number, rank in enumerate(state[0]):
        if rank.does == MET:
            assert number in rank.members
            assert met.setdefault(rank.attempt, rank.members) == rank.members, state


def check_end(state: State, least: int) -> None:
    ranks, _, _, lates = state
    living = tuple(number for number, each in enumerate(ranks) if each.does not in (DEAD, ENDED, STOPPED))
    assert all(ranks[number].does == MET and ranks[number].members == living for number in living), state
    assert len({ranks[number].attempt for number in living}) <= 1
    if not lates:
        left = [number for number, each in enumerate(ranks) if each.does not in (DEAD, STOPPED)]
        assert len(living) == (len(left) if len(left) >= least else 0), state


def explore(world_size: int, faults: int, least: int, lates: bool) -> int:
    """Visit every state that can be reached. Return their number."""
    first: State = (
        tuple(Rank(1, tuple(range(world_size)), MEETS) for _ in range(world_size)),
        frozenset(),
        faults,
        lates,
    )
    seen, open_states = {first}, [first]
    while open_states:
        state = open_states.pop()
        check(state)
        after = [each for each in following(state, least) if each != state]
        if not after:
            check_end(state, least)
        for each in after:
            if each not in seen:
                seen.add(each)
                open_states.append(each)
    return len(seen)


@pytest.mark.parametrize(
    ("world_size", "faults", "least", "lates"),
    [(2, 2, 1, False), (3, 2, 1, False), (3, 1, 3, False), (3, 2, 2, False), (3, 1, 1, True)],
)
def test_two_faults_at_any_point_end_in_one_group_of_the_living(world_size, faults, least, lates):
    assert explore(world_size, faults, least, lates) > 500


def test_a_protocol_that_counts_the_dead_is_caught():
    def blind(own, count, least, said, dead, is_late, move=regroup.move):
        return move(own, count, least, said, (), is_late)

    with mock.patch.object(regroup, "move", blind), pytest.raises(AssertionError):
        explore(3, 1, 1, lates=False)


def test_a_protocol_that_waits_for_a_rank_that_has_stopped_is_caught():
    def patient(own, count, least, said, dead, is_late, move=regroup.move):
        return move(own, count, least, said, dead, is_late and "members" not in said)

    with mock.patch.object(regroup, "move", patient), pytest.raises(AssertionError):
        explore(3, 1, 1, lates=True)
