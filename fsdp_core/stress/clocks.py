"""Streams of the CPU that only keep clocks, so that what orders their work can be told.

Each stream counts what was issued on it, and has a vector clock: how far into every stream's work
it has waited (Mattern, 1989). Work issued on a stream comes after another stream's work up to that
count, and after no more. What the host waits for comes before all that is issued later, anywhere.
"""

import contextlib
from collections.abc import Iterator

Clock = dict[int, int]
"""How far into the work of each stream, by its number."""


class ClockEvent:
    """A point in a stream's work."""

    def __init__(self, clocks: "Clocks", clock: Clock) -> None:
        self._clocks, self.clock = clocks, clock

    def synchronize(self) -> None:
        """The host waits."""
        self._clocks.host_waits(self.clock)


class ClockStream:
    """A stream that knows how far into each stream's work it has waited."""

    def __init__(self, clocks: "Clocks", number: int, name: str) -> None:
        self._clocks, self.number, self.name = clocks, number, name
        self.clock: Clock = {number: 0}

    @property
    def time(self) -> int:
        """How much was issued here."""
        return self.clock[self.number]

    def issue(self) -> None:
        """Work is issued."""
        self.clock[self.number] += 1

    def join(self, clock: Clock) -> None:
        """Order what follows after all that a clock knows."""
        mine = self.clock
        for number, time in clock.items():
            if mine.get(number, 0) < time:
                mine[number] = time

    def wait_event(self, event: ClockEvent) -> None:
        """Order what follows after the event."""
        self.join(event.clock)

    def wait_stream(self, stream: "ClockStream") -> None:
        """Order what follows after the other stream's work so far."""
        self.join(stream.clock)

    def record_event(self) -> ClockEvent:
        """Mark this point."""
        return ClockEvent(self._clocks, dict(self.clock))

    def synchronize(self) -> None:
        """The host waits."""
        self._clocks.host_waits(self.clock)

    def comes_after(self, stream: "ClockStream", time: int) -> bool:
        """Whether work issued now runs after that of `stream` at `time`."""
        return self.clock.get(stream.number, 0) >= time


class Clocks:
    """All streams of a rank; stands for the CPU's in `Device.modelling_streams`."""

    def __init__(self) -> None:
        self.streams: list[ClockStream] = []
        self._host: Clock = {}
        self._active = [self.new_stream("default")]

    def new_stream(self, name: str) -> ClockStream:
        """A side stream; without a name it gets its number."""
        number = len(self.streams)
        stream = ClockStream(self, number, name or f"side {number}")
        stream.join(self._host)
        self.streams.append(stream)
        return stream

    def current_stream(self) -> ClockStream:
        """The stream that work is issued on now."""
        return self._active[-1]

    @contextlib.contextmanager
    def on(self, stream: ClockStream) -> Iterator[None]:
        """Issue work on `stream` inside the context."""
        self._active.append(stream)
        try:
            yield
        finally:
            self._active.pop()

    def synchronize(self) -> None:
        """The host waits for all streams."""
        for stream in self.streams:
            self.host_waits(stream.clock)

    def host_waits(self, clock: Clock) -> None:
        """Order all that is issued from now on, on any stream, after what a clock knows."""
        for number, time in clock.items():
            self._host[number] = max(self._host.get(number, 0), time)
        for stream in self.streams:
            stream.join(self._host)
