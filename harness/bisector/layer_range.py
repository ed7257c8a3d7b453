"""The smallest range of layers that must be captured for a case to fail.

    the cause alone -> the least last layer that fails -> the greatest first layer that does

For a cause that captures parts of layers. The reference stays as it is, so a question is one run:
the candidate with `graph_layers`. Halving takes log2 of the layers for each end, the least range
first, as most faults are in one layer. A fault of several layers that are no range, or of no layer
in particular, ends as some range that was seen to fail.
"""

from dataclasses import dataclass, replace

from harness.bisector.alone import judged_of_cause
from harness.bisector.asking import Asker
from harness.bisector.causes import FoundCauses
from harness.bisector.differences import LegChanges, why_illegal
from harness.bisector.halving import first_failing
from harness.bisector.questions import FAILS
from harness.codec import Json
from harness.records import CaseSpec, RunSpec, Verdict

KEY = "graph_layers"


@dataclass(frozen=True, kw_only=True)
class LayerRange(Json):
    """Layers of which the captured parts are enough to fail.

    Attributes:
        first, last: both are in it.
        num_layers: of the model.
        scopes: that are captured in them.
    """

    first: int
    last: int
    num_layers: int
    scopes: tuple[str, ...]

    def __str__(self) -> str:
        """For people: `attn captured in layer 5 alone, of 8`."""
        num = self.last - self.first + 1
        if num == self.num_layers:
            return f"fails only with {'+'.join(self.scopes)} captured in all {num} layers"
        which = f"layer {self.first} alone" if num == 1 else f"layers {self.first} to {self.last}"
        return f"fails with {'+'.join(self.scopes)} captured in {which}, of {self.num_layers}"


def find_layer_range(
    case: CaseSpec, verdict: Verdict, causes: FoundCauses, asker: Asker
) -> LayerRange | None:
    """The range, for the first cause; None if no capture of layers is a part of it.

    Args:
        case: that failed.
        verdict: its answer.
        causes: of its failure.
        asker: makes the runs.

    Raises:
        OutOfBudget: what was asked is kept.
    """
    cause = next(iter(causes.causes), None)
    if cause is None or not any(name.startswith("graph: ") for name in cause.changes):
        return None
    candidate = LegChanges(case.reference, case.candidate).run_with(cause.changes)
    first, last = _captured(candidate)
    if first == last or why_illegal(_within(candidate, first, last)):
        return None
    judged = judged_of_cause(case, verdict, causes, cause, asker)
    if judged is None:
        return None
    scopes = "+".join(candidate.config["graph"])

    def fails(first: int, last: int) -> bool:
        words = f"does it fail with {scopes} captured in layers {first} to {last}?"
        return judged.answer(_within(candidate, first, last), words=words) == FAILS

    end = first_failing(range(first, last), lambda end: fails(first, end))
    last = last if end is None else end
    begin = first_failing(range(last, first, -1), lambda begin: fails(begin, last))
    first = first if begin is None else begin
    return LayerRange(
        first=first, last=last, num_layers=candidate.config["model"]["layers"],
        scopes=tuple(candidate.config["graph"]),
    )  # fmt: skip


def _captured(candidate: RunSpec) -> tuple[int, int]:
    """The layers that are captured as it is."""
    first, last = candidate.config.get(KEY) or (0, candidate.config["model"]["layers"] - 1)
    return int(first), int(last)


def _within(candidate: RunSpec, first: int, last: int) -> RunSpec:
    return replace(candidate, config={**candidate.config, KEY: [first, last]})
