"""What a leg's graphs hold on to, and how much memory moved under it, in words.

Counts are of the rank that has most: ranks run the same program. Pointers that move from step to
step are what makes a compiler's graphs be recorded again; graphs of our own refuse to run then.
"""

from dataclasses import dataclass

from harness.records import EventRecord, RunResult
from reports.text import one_line

GRAPHS = "graphs"
MOST_NAMES = 4


@dataclass(frozen=True, kw_only=True)
class LegAddresses:
    """Addresses of one leg.

    Attributes:
        captured: graphs.
        by_owner, by_place, unnamed: storages that graphs use and do not own, by who names them.
        moved: long-lived tensors that moved, by step; empty if it was not counted.
        names: of some that moved.
    """

    leg: str
    captured: int
    by_owner: int
    by_place: int
    unnamed: int
    moved: dict[int, int]
    names: tuple[str, ...]

    @property
    def words(self) -> str:
        """One sentence."""
        parts = []
        if self.captured:
            parts.append(
                f"{self.captured} graphs rely on {self.by_owner} named tensors, "
                f"{self.by_place} storages known by place and {self.unnamed} unnamed"
            )
        counts = self.moved.values()
        if not counts:
            parts.append("moved pointers were not counted")
        elif not any(counts):
            parts.append("no pointer moved")
        else:
            last = max(step for step, count in self.moved.items() if count)
            parts.append(
                f"{sum(counts)} pointers moved, at most {max(counts)} in a step, "
                f"last in step {last}"
            )
            if self.names:
                parts.append(f"the first of them {', '.join(self.names)}")
        return "; ".join(parts)


def leg_addresses(leg: str, run: RunResult) -> LegAddresses:
    """Those of a run, whatever of it was recorded."""
    events = [e for records in run.ranks for e in records.events if e.name == GRAPHS]
    moved: dict[int, int] = {}
    for record in (record for records in run.ranks for record in records.steps):
        if record.pointer_changes is not None:
            moved[record.step] = max(moved.get(record.step, 0), record.pointer_changes)
    names = [one_line(str(name), 120) for event in events for name in _listed(event, "moved")]
    return LegAddresses(
        leg=leg,
        captured=_most(events, "captured"),
        by_owner=_most(events, "ledger_names"),
        by_place=max((len(_listed(event, "ledger_places")) for event in events), default=0),
        unnamed=_most(events, "ledger_unnamed"),
        moved=dict(sorted(moved.items())),
        names=tuple(dict.fromkeys(names))[:MOST_NAMES],
    )


def _most(events: list[EventRecord], key: str) -> int:
    """The largest count; a file may say anything."""
    values = [event.detail.get(key) for event in events]
    return max((v for v in values if isinstance(v, int) and not isinstance(v, bool)), default=0)


def _listed(event: EventRecord, key: str) -> list[object]:
    value = event.detail.get(key)
    return value if isinstance(value, list) else []
