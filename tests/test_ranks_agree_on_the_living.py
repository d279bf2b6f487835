"""Law: in every order of their moves, with two faults at any point, the ranks that are left after a fault agree on which of them go on,
and a spare that waits is in a lost rank's place.

The explorer drives the protocol itself, regroup.move(). A rank reads the words of its attempt, and says its next word later, when
others may have spoken. Ranks die, stop for good, find an error after they have met, or go on without a living rank that comes too late.
Spares come at any time, and die as ranks do. Ranks that have met with a free place begin an attempt for a spare that waits.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import pytest
from shardwright.comm import regroup


class Rank(NamedTuple):
    """`does`: the phase, or the word that it is about to say. `members`: of its attempt, before the meeting and, once met, after it.

    `chosen`: the spares that it has seen chosen.
    """

    attempt: int
    members: tuple[int, ...]
    does: object
    chosen: frozenset = frozenset()


class Law(NamedTuple):
    """What move() gets in each call: the number of ranks at the start, the least one, for how many spares they wait, and hosts."""

    full: int
    least: int = 1
    awaited: int = 0
    hosts: tuple[int, ...] = ()  # of each rank; only ranks of one host see one another end

    def sees(self, number: int, other: int) -> bool:
        return not self.hosts or self.hosts[number] == self.hosts[other]


#: the attempt of words that stay: which ranks have ended
ALWAYS = 0
MEETS, MET, ENDED, DEAD, STOPPED, COMES = "meets", "met", "ended", "dead", "stopped", "comes"
#: ranks, then spares; the words of each attempt, by (attempt, key); faults that are left; whether ranks are late
State = tuple[tuple[Rank, ...], frozenset, int, bool]


def frozen(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def name_of(number: int) -> str:
    return f"s{number}"


def meant(chosen: list, members: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(each[1:]) if isinstance(each, str) else members[each] for each in chosen)


def dead(rank: Rank) -> Rank:
    """A spare that dies before it has come has said its name to no rank."""
    return rank._replace(does=DEAD, attempt=0 if rank.does == COMES else rank.attempt)


def following(state: State, law: Law) -> Iterator[State]:
    """Yield every state that one move, one fault or one look makes of this one."""
    ranks, words, faults, lates = state
    gone = {number for number, each in enumerate(ranks) if each.does in (DEAD, ENDED)}  # an error ends its process
    came = [n for n, each in enumerate(ranks) if n >= law.full and each.does != COMES and each.attempt]

    def moved(number: int, rank: Rank, faults: int = faults, words: frozenset = words) -> State:
        return (*ranks[:number], rank, *ranks[number + 1 :]), words, faults, lates

    for number, rank in enumerate(ranks):
        if number in gone or rank.does == STOPPED:
            continue
        mates = {at for at in range(len(ranks)) if at not in gone and law.sees(number, at)}
        if faults and (lates or not law.hosts or len(mates) > 1):  # only lateness tells of a whole host
            yield moved(number, dead(rank), faults - 1)
            if lates:
                yield moved(number, rank._replace(does=STOPPED), faults - 1)
            if lates and law.hosts and number == min(mates):
                yield (
                    tuple(dead(each) if at in mates else each for at, each in enumerate(ranks)),
                    words,
                    faults - 1,
                    lates,
                )
        if rank.does == COMES:
            yield moved(number, rank._replace(does=MEETS))
            continue
        told = {each for (attempt, each), _ in words if attempt == ALWAYS}
        names = {each: at for at, each in enumerate(rank.members)}
        names |= {each: name_of(each) for each in came if each not in names}
        ended = {each for each in gone if each in names and (law.sees(number, each) or each in told)}
        spares = [each for each in came if each not in rank.chosen | ended and each not in rank.members]
        if rank.does == MET:
            others = [ranks[each] for each in rank.members]
            is_broken = any(each in gone for each in rank.members) or any(
                each.attempt > rank.attempt or each.does == STOPPED for each in others
            )
            is_broken |= bool(spares) and len(rank.members) < law.full  # they grow
            if is_broken or faults:  # without a death: an error while the group is made
                yield moved(number, rank._replace(attempt=rank.attempt + 1, does=MEETS), faults - (not is_broken))
            continue
        said = {key: value for (attempt, key), value in words if attempt == rank.attempt}
        if rank.does != MEETS:
            key, value = rank.does
            new = words if key in said else words | {((rank.attempt, key), value)}
            yield moved(number, rank._replace(does=MEETS), words=new)
            continue
        known = {key: list(value) if isinstance(value, tuple) else value for key, value in said.items()}
        is_member = number in rank.members
        own = rank.members.index(number) if is_member else name_of(number)
        dead_here = {names[each] for each in ended}
        untold = [names[each] for each in sorted(ended - told)] if law.hosts else []
        near = {name_of(each): [names[at] for at in rank.members if law.sees(each, at)] for each in spares}
        sizes = near, law.full, law.awaited, untold
        in_time = regroup.move(own, len(rank.members), law.least, known, dead_here, False, *sizes)
        for is_late in (False, True) if lates else (False,):
            found = regroup.move(own, len(rank.members), law.least, known, dead_here, is_late, *sizes)
            if is_late and found.says == ("outcome", False) != in_time.says:
                others = meant(known["members"], rank.members)
                if not any(ranks[at].does == STOPPED or (at in gone and not law.sees(number, at)) for at in others):
                    continue  # else attempts without end: one that moves is ready in time
            if found.tells is not None:
                (whom,) = (each for each, at in names.items() if at == found.tells)
                yield moved(number, rank, words=words | {((ALWAYS, whom), True)})
            elif found.says is not None:
                yield moved(number, rank._replace(does=(found.says[0], frozen(found.says[1]))))
            elif found.goes_on is not None:
                chosen = known.get("members", [])
                if not chosen or (is_member and own not in chosen):
                    yield moved(number, rank._replace(does=ENDED))
                    continue
                members = meant(chosen, rank.members)
                assert len(set(members)) == len(members), state
                if len(members) >= len(rank.members):  # else those behind a lost one move up
                    kept = [(each, at) for at, each in enumerate(rank.members) if each in members]
                    assert all(members[at] == each for each, at in kept), state
                has_met = own in chosen and found.goes_on
                attempt, does = (rank.attempt, MET) if has_met else (rank.attempt + 1, MEETS)
                seen = rank.chosen | {each for each in members if each >= law.full}
                yield moved(number, Rank(attempt, members, does, seen))


def check(state: State) -> None:
    met: dict[int, tuple[int, ...]] = {}
    for number, rank in enumerate(state[0]):
        if rank.does == MET:
            assert number in rank.members
            assert met.setdefault(rank.attempt, rank.members) == rank.members, state


def check_end(state: State, law: Law) -> None:
    """In a state that nothing follows the living have met, but for spares beside a full group."""
    ranks, _, _, lates = state
    living = [number for number, each in enumerate(ranks) if each.does not in (DEAD, ENDED, STOPPED)]
    met = tuple(number for number in living if ranks[number].does == MET)
    assert all(set(ranks[number].members) == set(met) for number in met), state
    assert len({ranks[number].attempt for number in met}) <= 1
    spares = [number for number in living if number not in met]
    assert all(number >= law.full for number in spares), state
    assert not spares or not met or len(met) == law.full, state
    if not lates:
        left = [number for number, each in enumerate(ranks) if each.does not in (DEAD, STOPPED)]
        is_alone = not any(each in left for number in left for each in ranks[number].members)  # spares without a rank
        assert len(met) == (min(len(left), law.full) if len(left) >= law.least and not is_alone else 0), state


def explore(
    world_size: int,
    faults: int,
    least: int,
    lates: bool,
    spares: int = 0,
    awaited: int = 0,
    hosts: tuple[int, ...] = (),
) -> int:
    """Visit every state that can be reached. Return their number."""
    law, members = Law(world_size, least, awaited, hosts), tuple(range(world_size))
    first: State = (
        (*(Rank(1, members, MEETS) for _ in members), *(Rank(1, members, COMES) for _ in range(spares))),
        frozenset(),
        faults,
        lates,
    )
    seen, open_states = {first}, [first]
    while open_states:
        state = open_states.pop()
        check(state)
        after = [each for each in following(state, law) if each != state]
        if not after:
            check_end(state, law)
        for each in after:
            if each not in seen:
                seen.add(each)
                open_states.append(each)
    return len(seen)


LONG = os.environ.get("SW_TEST_LONG") == "1"


@pytest.mark.parametrize(
    ("world_size", "faults", "least", "lates"),
    [(2, 2, 1, False), (3, 2, 1, False), (3, 1, 3, False), (3, 2, 2, False), (3, 1, 1, True)],
)
def test_two_faults_at_any_point_end_in_one_group_of_the_living(world_size, faults, least, lates):
    assert explore(world_size, faults, least, lates) > 500


@pytest.mark.parametrize(
    ("world_size", "faults", "least", "lates", "spares", "awaited"),
    [(2, 2, 1, False, 1, 0), (3, 1, 1, False, 1, 0), (3, 1, 2, False, 1, 1), (2, 1, 1, True, 1, 0)]
    + [(3, 2, 1, False, 1, 0), (2, 2, 1, False, 2, 0), (3, 1, 1, True, 1, 0)] * LONG,
)
def test_two_faults_with_spares_end_in_one_group_without_a_free_place(
    world_size, faults, least, lates, spares, awaited
):
    assert explore(world_size, faults, least, lates, spares, awaited) > 5000


@pytest.mark.parametrize(
    ("faults", "lates", "hosts"),
    [(1, False, (0, 0, 1, 1)), (2, True, (0, 1)), (1, True, (0, 0, 1))]
    + [(2, False, (0, 0, 1, 1)), (2, False, (0, 0, 0, 1)), (2, True, (0, 0, 1)), (1, True, (0, 0, 1, 1))] * LONG,
)
def test_a_rank_or_a_host_that_is_lost_ends_in_one_group_of_the_living(faults, lates, hosts):
    """Without a rank that is late, a rank of the lost one's host tells the other hosts."""
    assert explore(len(hosts), faults, 1, lates, hosts=hosts) > 100


@pytest.mark.parametrize(
    ("world_size", "faults", "lates", "hosts"),
    [(2, 1, False, (0, 1, 1)), (2, 2, False, (0, 0, 1, 1)), (3, 1, False, (0, 0, 1, 1)), (2, 1, True, (0, 1, 1))]
    + [(2, 1, True, (0, 0, 1)), (3, 2, False, (0, 0, 1, 1)), (3, 1, True, (0, 0, 1, 1)), (2, 2, False, (0, 1, 0, 1))]
    * LONG,
)
def test_spares_of_any_host_leave_no_free_place(world_size, faults, lates, hosts):
    """`hosts`: of the ranks, then of the spares."""
    assert explore(world_size, faults, 1, lates, len(hosts) - world_size, hosts=hosts) > 500


def test_a_spare_of_the_lost_ranks_host_comes_first():
    said = {f"here/{each}": True for each in (0, 2)}
    spares = {"s8": [2, 3], "s9": [0, 1]}  # of the host of ranks 2 and 3, and of the other one
    assert regroup.move(0, 4, 1, said, {1, 3}, False, spares, 4).says == ("members", [0, "s9", 2, "s8"])
    assert regroup.move(0, 4, 1, said, {1, 3}, False, {"s8": [2, 3]}, 4).says == ("members", [0, 2, "s8"])
    assert regroup.move(0, 2, 1, {"here/0": True}, {1}, False, spares, 4).says == ("members", [0, "s9", "s8"])


@pytest.mark.parametrize("spares", [0, 1])
def test_a_protocol_that_tells_other_hosts_nothing_is_caught(spares):
    def mute(*arguments, move=regroup.move):
        return move(*arguments[:9])

    with mock.patch.object(regroup, "move", mute), pytest.raises(AssertionError):
        explore(4 - spares, 2, 1, False, spares, hosts=(0, 0, 1, 1))


@pytest.mark.parametrize("fault", ["takes a dead spare", "gives it another place"])
def test_a_protocol_that_is_wrong_about_spares_is_caught(fault):
    def wrong(own, count, least, said, dead, is_late, names=(), full=0, *_, move=regroup.move):
        if fault == "takes a dead spare":
            return move(own, count, least, said, [each for each in dead if isinstance(each, int)], is_late, names, full)
        found = move(own, count, least, said, dead, is_late, names, full)
        if found.says is None or found.says[0] != "members":
            return found
        return regroup.Move(("members", sorted(found.says[1], key=lambda each: (isinstance(each, str), each))))

    with mock.patch.object(regroup, "move", wrong), pytest.raises(AssertionError):
        explore(2, 2, 1, False, spares=1)


def test_a_protocol_that_counts_the_dead_is_caught():
    def blind(own, count, least, said, dead, is_late, *_, move=regroup.move):
        return move(own, count, least, said, (), is_late)

    with mock.patch.object(regroup, "move", blind), pytest.raises(AssertionError):
        explore(3, 1, 1, lates=False)


def test_a_protocol_that_waits_for_a_rank_that_has_stopped_is_caught():
    def patient(own, count, least, said, dead, is_late, *_, move=regroup.move):
        return move(own, count, least, said, dead, is_late and "members" not in said)

    with mock.patch.object(regroup, "move", patient), pytest.raises(AssertionError):
        explore(3, 1, 1, lates=True)
