"""Cases that did not pass, by cause: what happened, in which quantity, of which tensor.

Of a run that did not come to its end: by exception or signal, where it was raised, and in which
module. All of it is in fields; a case that has none of them is a cause of its own words.

Numbers inside names are taken for one another: `layers.3.attn` and `layers.7.attn` that both lose a
digest are one cause until somebody has looked.
"""

import re
from dataclasses import dataclass

from harness.records import Ending, Outcome
from reports.report import OUTCOME_ORDER, CaseReport, Report
from reports.text import one_line

_NUMBER = re.compile(r"\d+")
MAX_WORDS = 160
_GREEN: tuple[Outcome, ...] = ("passed", "skipped")


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Cases that seem to have failed for one reason; `words` is what they share."""

    outcome: Outcome
    what: str
    words: str
    cases: tuple[CaseReport, ...]


def causes(report: Report) -> tuple[Cause, ...]:
    """The causes, those of failures first, then by how many cases have them."""
    found: dict[tuple[Outcome, str, str], list[CaseReport]] = {}
    for case in report.cases:
        if case.outcome not in _GREEN:
            key = (case.outcome, case.verdict.what, _words(case))
            found.setdefault(key, []).append(case)
    ordered = sorted(
        found.items(), key=lambda item: (OUTCOME_ORDER.index(item[0][0]), -len(item[1]))
    )
    return tuple(
        Cause(outcome=outcome, what=what, words=words, cases=tuple(cases))
        for (outcome, what, words), cases in ordered
    )


def _words(case: CaseReport) -> str:
    place, ended = case.verdict.difference, case.verdict.ending
    if place is not None and ended is None:
        text = f"{place.quantity} of {place.tensor}" if place.tensor else place.quantity
    elif ended is not None and (ended.exception or ended.signal or ended.collective):
        text = _ending_words(ended)
    else:
        return one_line(case.message, MAX_WORDS)
    return one_line(_NUMBER.sub("N", text), MAX_WORDS)


def _ending_words(ended: Ending) -> str:
    who = ended.exception or ended.signal
    if ended.collective is not None:
        who = f"{who} in {ended.collective.expected}".removeprefix(" in ")
    where = [
        f"in {ended.phase}" if ended.phase else "", ended.module,
        f"at {ended.raised_at}" if ended.raised_at else "",
    ]  # fmt: skip
    return " ".join(part for part in (who, *where) if part)
