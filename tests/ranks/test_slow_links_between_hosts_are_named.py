"""Law: shardwright doctor --hosts names the host behind a slow link, another version, another clock, and a world of one."""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import pytest
from hosts import lab
from shardwright_tools.doctor import hosts
from shardwright_tools.doctor.hosts import Host, Link


def examined(rank: int, world_size: int) -> Any:
    found, links, findings = hosts.examine()
    return [each.name for each in found], [(each.first, each.second) for each in links], findings


def test_a_slow_host_is_named_among_three(teams: Any) -> None:
    with lab(teams, 1, 2, 1) as made:
        made.network.limit(1, "20mbit")
        values = made.team.run(examined)
    names, links, findings = values[0]
    assert all(each == values[0] for each in values)  # on all ranks alike, also on the one that speaks for no host
    assert names == ["host0", "host1", "host2"] and links == [
        ("host0", "host1"),
        ("host0", "host2"),
        ("host1", "host2"),
    ]
    assert len(findings) == 1 and findings[0].startswith("host1: all its links are slow"), findings


@pytest.mark.parametrize("count", range(2, 10))
def test_each_pair_is_timed_once_and_no_host_twice_at_a_time(count: int) -> None:
    found = list(hosts.rounds(count))
    assert sorted(itertools.chain(*found)) == list(itertools.combinations(range(count), 2))
    for pairs in found:
        assert len(set(itertools.chain(*pairs))) == 2 * len(pairs)


def host(n: int, **versions: str) -> Host:
    return Host(f"h{n}", str(n), n, {"torch": "2.13.0", "shardwright": "0.1.0", **versions})


def links(
    slow: set[tuple[int, int]] = frozenset(), late: set[tuple[int, int]] = frozenset(), clock: int = -1
) -> list[Link]:  # type: ignore[assignment]
    return [
        Link(
            f"h{a}",
            f"h{b}",
            5e-3 if (a, b) in late else 5e-5,
            1e8 if (a, b) in slow else 1.2e9,
            3.0 if b == clock else 0.001,
        )
        for a, b in itertools.combinations(range(4), 2)
    ]


def test_what_is_wrong_is_named_and_nothing_else() -> None:
    four = [host(n) for n in range(4)]
    assert hosts.findings_of(four, links()) == []
    assert hosts.findings_of(four[:2], links()[:1]) == []
    (one,) = hosts.findings_of(four, links(slow={(1, 2)}))
    assert one.startswith("the link h1 - h2: 50 us, 0.8 Gbit/s is slow")
    (one,) = hosts.findings_of(four, links(late={(0, 3)}))
    assert one.startswith("the link h0 - h3: 5,000 us")
    (one,) = hosts.findings_of(four, links(slow={(0, 2), (1, 2), (2, 3)}))
    assert one.startswith("h2: all its links are slow, at most 0.8 of 9.6 Gbit/s")
    (one,) = hosts.findings_of(four, links(clock=3))
    assert one == "h3: its clock is 3.0 s ahead of h0's: set it by NTP"
    (one,) = hosts.findings_of([host(0), host(1), host(2, torch="2.12.0"), host(3)], links())
    assert one.startswith("h2: torch 2.12.0, and 2.13.0 on h0, h1, h3")
    (one,) = hosts.findings_of([host(0)], [])
    assert "all ranks are on one host, h0" in one


def test_a_world_of_one_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    options = argparse.Namespace(json=False)
    assert hosts.run(options) == 2 and "needs a launcher that starts it on each host" in capsys.readouterr().out
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")):
        assert hosts.run(options) == 2 and "needs a launcher" in capsys.readouterr().out, name
        monkeypatch.setenv(name, value)
    assert hosts.run(options) == 2 and "the world is of one" in capsys.readouterr().out
