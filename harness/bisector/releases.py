"""The first bad release of a package: the failing run with each release that is asked for.

    releases from A to B -> both ends -> halving between one that passes and one that fails

The reference stays as it was. A release that cannot be installed, or fails in another way, gives no
verdict and is passed over. Where a later release mends the failure, its first good one is found.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.bisector.asking import Asker
from harness.bisector.chance import Patience
from harness.bisector.differences import config_of, leaves_of
from harness.bisector.failure import Judged, failure_of
from harness.bisector.questions import FAILS, PASSES, UNRESOLVED, Answer
from harness.checks.evidence import count
from harness.codec import Json
from harness.errors import UsageError, shown
from harness.program.launch import make_environments
from harness.program.packages import releases
from harness.program.spec import program_of
from harness.records import CaseSpec, Verdict


@dataclass(frozen=True, kw_only=True)
class ReleaseSearch(Json):
    """What a search among releases has found.

    Attributes:
        package: its name.
        first, last: ends of the range.
        older, newer: releases next to each other, as far as they were asked, of which one passes
            and one fails; "" where both ends of the range answer alike.
        older_answer, newer_answer: of these; of the ends where they answer alike.
        skipped: releases between the two that gave no verdict.
        num_releases: in the range.
    """

    package: str
    first: str
    last: str
    older: str = ""
    newer: str = ""
    older_answer: Answer = UNRESOLVED
    newer_answer: Answer = UNRESOLVED
    skipped: tuple[str, ...] = ()
    num_releases: int = 0

    def __str__(self) -> str:
        """For people: `first bad release: toy 1.3; last good: 1.2 (of 6 releases)`."""
        of = f"of {count(self.num_releases, 'release')}"
        if not self.older:
            ends = f"{self.package} {self.first} and {self.last}"
            if UNRESOLVED in (self.older_answer, self.newer_answer):
                return f"no release found: {ends}: {self.older_answer}, {self.newer_answer} ({of})"
            return f"all are {_word(self.older_answer)}: {ends} ({of}; those between not asked)"
        between = f"; no verdict between: {', '.join(self.skipped)}" if self.skipped else ""
        new, old = _word(self.newer_answer), _word(self.older_answer)
        return (
            f"first {new} release: {self.package} {self.newer}; last {old}: {self.older} "
            f"({of}{between})"
        )


def _word(answer: Answer) -> str:
    return "bad" if answer == FAILS else "good"


def find_release(
    case: CaseSpec, verdict: Verdict, package: str, ends: str, asker: Asker,
    *, patience: Patience | None = None,
) -> ReleaseSearch:  # fmt: skip
    """Search the releases `A..B` of a package for that from which on a case fails, or passes.

    Raises:
        UsageError: no such range, package or release.
        OutOfBudget: what was asked is kept.
    """
    versions = published(package, ends)
    judged = Judged(case, failure_of(verdict), asker, verdict)
    judged.patience = patience

    def ask(version: str) -> Answer:
        leaves = leaves_of(case.candidate.config) | {f"packages.{package}": version}
        candidate = replace(case.candidate, config=config_of(leaves))
        try:
            make_environments(filter(None, [program_of(candidate.config)]), lambda _: None)
        except UsageError:
            return UNRESOLVED
        return judged.answer(candidate, words=f"does it fail with {package} {version}?")

    found = search(versions, ask)
    first, last = versions[0], versions[-1]
    return replace(found, package=package, first=first, last=last, num_releases=len(versions))


def published(package: str, ends: str) -> list[str]:
    """The releases `A..B` of a package, the oldest first.

    Raises:
        UsageError: no such range, package or release.
    """
    first, dots, last = ends.partition("..")
    if not first or not dots or not last or last.startswith("."):
        raise UsageError(f"--package: expected NAME A..B, got {shown(ends)}")
    return releases(package, first, last, Path(sys.executable))


def search(versions: Sequence[str], ask: Callable[[str], Answer]) -> ReleaseSearch:
    """Two neighbours of which one passes and one fails; versions are asked once each."""
    low, high, skipped = 0, len(versions) - 1, set[int]()
    answers = {0: ask(versions[0])}
    if high:
        answers[high] = ask(versions[high])
    plain = ReleaseSearch(
        package="", first="", last="", older_answer=answers[low], newer_answer=answers[high]
    )
    if {answers[low], answers[high]} != {FAILS, PASSES}:
        return plain
    while between := [n for n in range(low + 1, high) if n not in skipped]:
        middle = min(between, key=lambda n: abs(2 * n - low - high))
        answers[middle] = ask(versions[middle])
        if answers[middle] == answers[low]:
            low = middle
        elif answers[middle] == answers[high]:
            high = middle
        else:
            skipped.add(middle)
    passed_over = tuple(versions[n] for n in sorted(skipped) if low < n < high)
    return replace(plain, older=versions[low], newer=versions[high], skipped=passed_over)
