"""The page of safety: package, version and combination of features, from any number of reports.

A scenario says what it is about (`about`), records say the version. A cell's answer is the worst of
its cases:

    wrong      a check failed
    crashes    the candidate did not end by itself, or hung
    not run    a case without a verdict, skipped, in error, or in which nobody is to blame; also a
               combination that was run with other versions of the package only
    safe       every case passed
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from harness.records import Json, Outcome, What
from reports.reading import About, CaseReport, Report
from reports.text import one_line

Answer = Literal["wrong", "crashes", "not run", "safe"]
ANSWERS: tuple[Answer, ...] = ("wrong", "crashes", "not run", "safe")
CRASHES: tuple[What, ...] = (
    "crashed", "hang", "killed", "oom", "illegal_access", "capture_refused",
)  # fmt: skip
UNKNOWN = "not recorded"
Place = tuple[tuple[str, ...], str]  # combination and version
WORDS = (
    "The worst answer of the cases of a package, a version and a combination of features. Safe: "
    "all of these cases passed, and no more than that."
)


@dataclass(frozen=True, kw_only=True)
class Finding(Json):
    """What one case says."""

    answer: Answer
    scenario: str
    case_id: str
    machine: str
    folder: str
    words: str  # the place, or why there is no answer


@dataclass(frozen=True, kw_only=True)
class Cell(Json):
    """All that is known of one version in one combination; no findings if it never ran."""

    about: About
    answer: Answer
    findings: tuple[Finding, ...]

    @property
    def words(self) -> str:
        """'wrong: megatron_lm_5974 (before step 0, rank 0, ...)', and how many say otherwise."""
        worst = [each for each in self.findings if each.answer == self.answer]
        told = dict.fromkeys(f"{f.scenario} ({f.words})" if f.words else f.scenario for f in worst)
        others = len(self.findings) - len(worst)
        more = [f"{others} other case{'s' * (others > 1)}"] * bool(others)
        return f"{self.answer}{': ' * bool(told)}{'; '.join([*told, *more])}"


@dataclass(frozen=True, kw_only=True)
class Table(Json):
    """Cells of one package: a row a combination, a column a version."""

    package: str
    versions: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


def tables(reports: Iterable[Report]) -> tuple[Table, ...]:
    """One for each package that a scenario is about, by name."""
    found: dict[str, dict[Place, list[Finding]]] = {}
    for report in reports:
        for case in report.cases:
            if (about := case.about) is not None:
                place = (about.combination, about.version or UNKNOWN)
                held = found.setdefault(about.package, {}).setdefault(place, [])
                held.append(_finding(case, report))
    return tuple(_table(package, found[package]) for package in sorted(found))


def _table(package: str, found: Mapping[Place, list[Finding]]) -> Table:
    versions = sorted({version for _, version in found}, key=_in_order)
    # Cases that never ran have no version: their column is shown if a combination has no other.
    ran = {words for words, version in found if version != UNKNOWN}
    never = [place for place in found if place[1] == UNKNOWN]
    if all(p[0] in ran and {each.answer for each in found[p]} <= {"not run"} for p in never):
        versions = [version for version in versions if version != UNKNOWN]
    rows = []
    for words in sorted({words for words, _ in found}):
        cells = []
        for version in versions:
            about = About(package=package, version=version, combination=words)
            cell = tuple(found.get((words, version), ()))
            worst: Answer = min((f.answer for f in cell), key=ANSWERS.index, default="not run")
            cells.append(Cell(about=about, answer=worst, findings=cell))
        rows.append((" + ".join(words) or "alone", tuple(cells)))
    return Table(package=package, versions=tuple(versions), rows=tuple(rows))


def _finding(case: CaseReport, report: Report) -> Finding:
    verdict = case.verdict
    wrong: Answer = "crashes" if verdict.what in CRASHES else "wrong"
    answers: dict[Outcome, Answer] = {"passed": "safe", "failed": wrong}
    answer = answers.get(verdict.outcome, "not run")
    words = {"safe": "", "not run": verdict.what or verdict.outcome, "crashes": case.reason}
    return Finding(
        answer=answer, scenario=case.spec.scenario, case_id=case.spec.id, machine=report.machine,
        folder=str(report.folder), words=one_line(words.get(answer, case.where or verdict.what)),
    )  # fmt: skip


def _in_order(version: str) -> list[tuple[int, int, str]]:
    """Releases by their numbers, 0.10 after 0.9."""
    parts = version.replace("+", ".").split(".")
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]
