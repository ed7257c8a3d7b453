"""What each cheap check would have seen of a fault, alone: pure functions over two runs.

    loss at 5 decimals    of the lowest rank, as a log or a curve shows it
    loss bits             of every rank
    final weights         of every rank, after the last step
    digests               of gradients, weights, moments and random states, each step, each rank

Each looks only at what both runs hold, as somebody would who compares two logs: a record that is
missing is not seen. A run that ended by itself is seen by everybody who waits for it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from harness.checks.evidence import StepTable, shared_pairs, show_value, step_table
from harness.codec import Json
from harness.records import FloatBits, RunResult, What

DECIMALS = 5
OURS: tuple[What, ...] = ("stale_address", "stale_guards", "race", "capture_refused")
"""What only a run that is watched ends with: a plain one would have gone on."""
How = Literal["step", "end", "no", "watched"]


@dataclass(frozen=True, kw_only=True)
class Sight(Json):
    """What a check saw.

    Attributes:
        how: `step`: a difference in step `step`; `end`: the run ended before anything differed;
            `no`: nothing; `watched`: nothing up to `step`, in which a check of ours ended the run.
        step: where it says so, else None.
    """

    how: How
    step: int | None = None

    @property
    def seen(self) -> bool:
        """Whether somebody would have noticed."""
        return self.how in ("step", "end")

    def __str__(self) -> str:
        words = {"step": f"{self.step}", "end": "ends", "no": "no", "watched": "no, stopped"}
        return words[self.how]


NOTHING = Sight(how="no")
Check = Callable[[RunResult, RunResult], Sight]


def loss_decimals(reference: RunResult, candidate: RunResult) -> Sight:
    """The loss at `DECIMALS` decimals, on the lowest rank that both runs recorded."""
    ours, theirs = step_table(reference), step_table(candidate)
    pairs = shared_pairs(ours, theirs)
    lowest = min((rank for _, rank in pairs), default=0)
    steps = (step for step, rank in pairs if rank == lowest)
    return _first(
        (s for s in steps if _rounded(ours[s, lowest].loss) != _rounded(theirs[s, lowest].loss)),
        candidate,
    )


def loss_bits(reference: RunResult, candidate: RunResult) -> Sight:
    """Bits of the loss on every rank."""
    ours, theirs = step_table(reference), step_table(candidate)
    pairs = shared_pairs(ours, theirs)
    differ = (key[0] for key in pairs if ours[key].loss != theirs[key].loss)
    return _first(differ, candidate)


def final_weights(reference: RunResult, candidate: RunResult) -> Sight:
    """Digests of the weights after the last step, on every rank that got there in both runs."""
    ours, theirs = step_table(reference), step_table(candidate)
    last = max((step for step, _ in ours), default=None)
    pairs = [key for key in shared_pairs(ours, theirs) if key[0] == last]
    differ = (key[0] for key in pairs if _weights(ours, key) != _weights(theirs, key))
    return _first(differ, candidate)


def digests(reference: RunResult, candidate: RunResult) -> Sight:
    """Digests of everything, of every step and rank."""
    ours, theirs = step_table(reference), step_table(candidate)
    pairs = shared_pairs(ours, theirs)
    differ = (key[0] for key in pairs if ours[key].digests != theirs[key].digests)
    return _first(differ, candidate)


PLAIN: dict[str, Check] = {
    "loss at 5 decimals": loss_decimals,
    "loss bits": loss_bits,
    "final weights": final_weights,
    "digests": digests,
}
"""Of a run without stressors, by the name of the column."""
STRESSED = "digests with stressors"


def seen_plain(reference: RunResult, candidate: RunResult) -> dict[str, Sight]:
    """What each check sees of a run without stressors."""
    return {name: check(reference, candidate) for name, check in PLAIN.items()}


def seen_stressed(pairs: Iterable[tuple[RunResult, RunResult]]) -> Sight:
    """What digests see of the best of several runs, with and without stressors."""
    order: tuple[How, ...] = ("step", "end", "watched", "no")
    sights = [digests(*pair) for pair in pairs]
    return min(sights, key=lambda s: (order.index(s.how), s.step or 0), default=NOTHING)


def _first(steps: Iterable[int], candidate: RunResult) -> Sight:
    found = next(iter(sorted(steps)), None)
    if found is not None:
        return Sight(how="step", step=found)
    what = candidate.outcome.what
    if what in OURS:
        return Sight(how="watched", step=_ended_in(candidate))
    return Sight(how="end", step=_ended_in(candidate)) if what else NOTHING


def _ended_in(run: RunResult) -> int | None:
    return min((r.error.step for r in run.ranks if r.error is not None), default=None)


def _weights(table: StepTable, key: tuple[int, int]) -> str | None:
    return table[key].digests.get("weights")


def _rounded(value: FloatBits | None) -> str:
    """As a log prints it, in which one NaN is like another."""
    if value is None:
        return "none"
    return show_value(value) if value.value is None else f"{value.value:.{DECIMALS}f}"
