"""A clock, resources that users share evenly, and collectives that begin when the last rank has come."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator

Action = Callable[[], None]


class Clock:
    """Simulated seconds. Actions of one time run in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.count = 0
        self._queue: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, action: Action) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._numbers), action))

    def run(self) -> None:
        while self._queue:
            self.now, _, action = heapq.heappop(self._queue)
            self.count += 1
            action()


class Signal:
    """Something that happens once; what waits for it goes on then."""

    def __init__(self) -> None:
        self.fired = False
        self._waiting: list[Action] = []

    def fire(self) -> None:
        self.fired = True
        for action in self._waiting:
            action()
        self._waiting.clear()

    def then(self, action: Action) -> None:
        if self.fired:
            action()
        else:
            self._waiting.append(action)


Process = Generator[Signal, None, None]


class Shared:
    """A resource of `capacity`: a user runs at full speed while the weights of all add up to it, else at its fair part."""

    def __init__(self, clock: Clock, capacity: float) -> None:
        self._clock, self._capacity = clock, capacity
        self._work = 0.0  # what each user has had since the beginning, in seconds at full speed
        self._since = 0.0
        self._load = 0.0
        self._ends: list[tuple[float, int, float, Signal]] = []
        self._numbers = itertools.count()
        self._alarms = 0
        self.busy = 0.0

    def use(self, seconds: float, weight: float = 1.0) -> Signal:
        """Return the signal that fires when a user of this weight has had `seconds` at full speed."""
        signal = Signal()
        self._advance()
        self._load += weight
        heapq.heappush(self._ends, (self._work + seconds, next(self._numbers), weight, signal))
        self._set_alarm()
        return signal

    def hold(self, weight: float) -> None:
        """Add to the load, or with a negative weight take away, something that ends by another's work."""
        self._advance()
        self._load += weight
        self._set_alarm()

    @property
    def _speed(self) -> float:
        return min(1.0, self._capacity / self._load) if self._load > 0 else 1.0

    def _advance(self) -> None:
        passed = self._clock.now - self._since
        self._since = self._clock.now
        if self._load > 0:
            self._work += passed * self._speed
            self.busy += passed

    def _set_alarm(self) -> None:
        self._alarms += 1
        alarm = self._alarms
        if self._ends:
            left = max(0.0, self._ends[0][0] - self._work) / self._speed
            self._clock.after(left, lambda: self._ring(alarm))

    def _ring(self, alarm: int) -> None:
        if alarm != self._alarms:
            return
        self._advance()
        self._work = max(self._work, self._ends[0][0])  # no rounding keeps the first one waiting
        done = []
        while self._ends and self._ends[0][0] <= self._work:
            _, _, weight, signal = heapq.heappop(self._ends)
            self._load -= weight
            done.append(signal)
        if not self._ends:
            self._load = max(0.0, round(self._load, 9))
        self._set_alarm()
        for signal in done:
            signal.fire()


class Group:
    """The classes of ranks of one communicator, whose operations run one after the other."""

    def __init__(self, clock: Clock, members: int, link: Shared, carriers: tuple[Shared, float] | None = None) -> None:
        self._clock, self._members, self._link, self._carriers = clock, members, link, carriers
        self._operations: list[tuple[float, float, Signal]] = []
        self._arrived: list[int] = []
        self._begun = 0
        self._running = False

    def post(self, number: int, latency: float, transfer: float) -> Signal:
        """Post this class's operation `number`, equal on all; return the signal of its end."""
        if number == len(self._operations):
            self._operations.append((latency, transfer, Signal()))
            self._arrived.append(0)
        self._arrived[number] += 1
        self._begin()
        return self._operations[number][2]

    def _begin(self) -> None:
        ready = self._begun < len(self._arrived) and self._arrived[self._begun] == self._members
        if self._running or not ready:
            return
        self._running = True
        latency, transfer, _ = self._operations[self._begun]
        self._clock.after(latency, lambda: self._transfer(transfer))

    def _transfer(self, seconds: float) -> None:
        if self._carriers is not None:
            self._carriers[0].hold(self._carriers[1])
        self._link.use(seconds).then(self._end)

    def _end(self) -> None:
        if self._carriers is not None:
            self._carriers[0].hold(-self._carriers[1])
        self._running = False
        signal = self._operations[self._begun][2]
        self._begun += 1
        self._begin()
        signal.fire()


def start(clock: Clock, process: Process) -> None:
    """Run a process until it ends; it goes on whenever the signal that it yields fires."""

    def resume() -> None:
        for signal in process:
            if not signal.fired:
                signal.then(resume)
                return

    clock.after(0.0, resume)


def sleep(clock: Clock, seconds: float) -> Signal:
    signal = Signal()
    clock.after(seconds, signal.fire)
    return signal
