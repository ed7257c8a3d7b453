"""What a profiler's trace of one step says about communication: how much, and how well hidden.

Works on the events of a chrome trace, as `torch.profiler` writes it, and on nothing else. A
collective is hidden while a kernel runs on the compute stream, which is the stream that is busiest
with kernels that are not NCCL's: copies into and out of communication buffers, on streams beside
it, hide nothing.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NCCL = re.compile(r"nccl\w*?Kernel\w*?_(AllGather|ReduceScatter|AllReduce|Broadcast|SendRecv)")
ANY_NCCL = re.compile(r"^nccl", re.IGNORECASE)
EXPOSED_SHARE = 0.5
"""A collective counts as not overlapped if at least this share of it is not."""

Span = tuple[float, float]
"""Begin and end, us."""


@dataclass(frozen=True)
class Kernel:
    """One kernel on the device; times in us."""

    name: str
    stream: int
    span: Span

    @property
    def collective(self) -> str | None:
        """Which collective of NCCL it is, `other` for one without a known name, or None."""
        if found := NCCL.search(self.name):
            return found[1]
        return "other" if ANY_NCCL.match(self.name) else None


@dataclass(frozen=True)
class Collective:
    """One collective of the step; `number` counts those of its kind from 1."""

    kind: str
    number: int
    begin_us: float
    duration_us: float
    exposed_us: float

    @property
    def is_exposed(self) -> bool:
        """Whether most of it is not overlapped."""
        return self.exposed_us >= EXPOSED_SHARE * self.duration_us


@dataclass(frozen=True)
class Summary:
    """One step. Times in ms; `comm_ms` and `exposed_ms` count each moment once.

    Attributes:
        step_ms: from the first kernel's begin to the last one's end.
        compute_ms: the compute stream is busy.
        counts: collectives of each kind.
        exposed: the collectives that are not overlapped, in order.
    """

    step_ms: float
    compute_ms: float
    comm_ms: float
    exposed_ms: float
    counts: dict[str, int]
    exposed: list[Collective]


def kernels(events: Iterable[Mapping[str, Any]]) -> list[Kernel]:
    """The kernels among the events of a chrome trace, by their begin."""
    found = [
        Kernel(
            event["name"],
            int(event.get("args", {}).get("stream", event.get("tid", 0))),
            (float(event["ts"]), float(event["ts"]) + float(event["dur"])),
        )
        for event in events
        if event.get("ph") == "X" and event.get("cat") == "kernel"
    ]
    return sorted(found, key=lambda kernel: kernel.span)


def summarise(events: Iterable[Mapping[str, Any]]) -> Summary:
    """The summary of a trace of one step; all zero for a trace without kernels."""
    found = kernels(events)
    if not found:
        return Summary(0.0, 0.0, 0.0, 0.0, {}, [])
    compute = merged(k.span for k in _on_compute_stream(found))
    communication = [(k, kind) for k in found if (kind := k.collective) is not None]
    comm = merged(k.span for k, _ in communication)
    counts: Counter[str] = Counter()
    collectives = []
    for kernel, kind in communication:
        counts[kind] += 1
        begin, end = kernel.span
        exposed = end - begin - overlap([kernel.span], compute)
        collectives.append(Collective(kind, counts[kind], begin, end - begin, exposed))
    first, last = found[0].span[0], max(k.span[1] for k in found)
    return Summary(
        step_ms=(last - first) / 1e3,
        compute_ms=_length(compute) / 1e3,
        comm_ms=_length(comm) / 1e3,
        exposed_ms=(_length(comm) - overlap(comm, compute)) / 1e3,
        counts=dict(counts),
        exposed=[c for c in collectives if c.is_exposed],
    )


def _on_compute_stream(found: Sequence[Kernel]) -> list[Kernel]:
    own = [kernel for kernel in found if kernel.collective is None]
    busy: Counter[int] = Counter()
    for kernel in own:
        # Whole nanoseconds: equal sums in any order.
        busy[kernel.stream] += round((kernel.span[1] - kernel.span[0]) * 1e3)
    if not busy:
        return []
    stream = busy.most_common(1)[0][0]
    return [kernel for kernel in own if kernel.stream == stream]


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union of spans as disjoint spans in order."""
    union: list[Span] = []
    for begin, end in sorted(spans):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union


def overlap(one: Sequence[Span], other: Sequence[Span]) -> float:
    """Length of the intersection of two unions, each disjoint and in order."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] <= other[j][1]:
            i += 1
        else:
            j += 1
    return total


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def described(summary: Summary) -> list[str]:
    """The summary in lines for people."""
    counts = ", ".join(f"{number} {kind}" for kind, number in sorted(summary.counts.items()))
    lines = [
        f"step {summary.step_ms:.2f} ms, compute stream busy {summary.compute_ms:.2f} ms",
        f"collectives: {counts or 'none'}; {summary.comm_ms:.2f} ms, "
        f"not overlapped {summary.exposed_ms:.2f} ms",
    ]
    lines += [
        f"not overlapped: {c.kind} {c.number} of {summary.counts[c.kind]}, "
        f"{c.exposed_us:.0f} of {c.duration_us:.0f} us"
        for c in summary.exposed
    ]
    return lines
