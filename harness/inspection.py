"""What is damaged in a run folder, file by file, and which verdicts stand in spite of it.

    case.json, verdict.json, links of each case
      -> spec.json, outcome.json, records and kept contents of each run
    case.json, verdict.json and runs of each question that a search asked here

Every file that a verdict rests on is read again and checked against its checksum, every pass is
judged again. Nothing is changed.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from harness.checks.complete import find_flaw
from harness.checks.confirmation import confirmation
from harness.contents import damaged_contents
from harness.disk import read_plain
from harness.errors import UsageError
from harness.object_file import has_checksum, read_object, told
from harness.records import CaseSpec, Confirmation, RecordError, RunResult, RunSpec, Verdict
from harness.rejudge import confirmed
from harness.repeats import confirming_runs, runs_of
from harness.store import (
    CASE_FILE,
    LEGS,
    OUTCOME_FILE,
    SPEC_FILE,
    VERDICT_FILE,
    RunFolder,
    load_run_folder,
    read_outcome,
)
from harness.streams import rank_path

MAX_COMPARED_BYTES = 1 << 30
_EARLIER = re.compile(r"\.attempt\d+$")


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What was found.

    Attributes:
        verdicts: of each case that has one, confirmed.
        num_cases: cases planned.
        num_runs: runs that these need.
        unjudged: cases without a verdict, by id: interrupted, or their folder is gone.
        damage: one line for each file that is not as it was written, its path in the folder first.
    """

    verdicts: tuple[Verdict, ...]
    num_cases: int
    num_runs: int
    unjudged: tuple[str, ...]
    damage: tuple[str, ...]


@dataclass
class _Finding:
    folder: RunFolder
    runs: dict[str, RunResult] = field(default_factory=dict)
    damage: dict[str, None] = field(default_factory=dict)
    """Lines as keys: runs are shared by cases, and each line is told once."""

    def note(self, path: Path, why: str) -> None:
        """One damaged file; a reason often begins with its name already."""
        why = why.removeprefix(f"{path.name}: ")
        self.damage[f"{path.relative_to(self.folder.path)}: {why}"] = None


def inspect(path: Path) -> Inspection:
    """Read a whole run folder.

    Raises:
        UsageError: it is not a run folder, or damaged beyond reading.
    """
    folder = RunFolder.open(path)
    finding = _Finding(folder)
    verdicts, unjudged = [], []
    for case in folder.cases:
        # A case folder is made when its case is judged.
        judged = folder.case_folder(case.id).exists()
        if not case.skip_reason:
            for number, spec in enumerate(runs_of(case)):
                # Timed runs, past the three legs, have no links in the case's folder.
                leg = LEGS[number] if number < len(LEGS) else ""
                _take_run(finding, case, spec, leg, judged=judged)
            if (told := _confirmation_of(folder, case)) is not None:
                for spec in confirming_runs(case).values():
                    _take_run(finding, case, spec, "", judged=told.outcome != "not_made")
        _take_checksums(finding, case)
        verdict = _take_verdict(finding, case, judged=judged)
        if verdict is None:
            unjudged.append(case.id)
        else:
            verdicts.append(verdict)
    _take_questions(finding)
    return Inspection(
        verdicts=tuple(verdicts),
        num_cases=len(folder.cases),
        num_runs=len(finding.runs),
        unjudged=tuple(unjudged),
        damage=tuple(finding.damage),
    )


def _confirmation_of(folder: RunFolder, case: CaseSpec) -> Confirmation | None:
    verdict = folder.load_verdict(case.id)
    return None if verdict is None else verdict.confirmation


def _take_questions(finding: _Finding) -> None:
    """Cases of a search, which are in no plan; its own answers say what came of them."""
    folder = finding.folder
    planned = {case.id for case in folder.cases}
    for path in sorted(folder.path.glob(f"cases/*/{CASE_FILE}")):
        name = path.parent.name
        if name in planned or name.startswith(".") or _EARLIER.search(name):
            continue
        try:
            case = CaseSpec.from_json(read_object(path))
        except (OSError, RecordError, UsageError) as error:
            finding.note(path, told(error))
            continue
        if case.id != name:
            finding.note(path, f"is that of case {case.id}")
            continue
        for number, spec in enumerate(runs_of(case)):
            leg = LEGS[number] if number < len(LEGS) else ""
            _take_run(finding, case, spec, leg, judged=True)
        _take_checksums(finding, case)
        verdict = path.with_name(VERDICT_FILE)
        if verdict.exists() and folder.load_verdict(case.id) is None:
            finding.note(verdict, "not as it was written")


def _take_run(finding: _Finding, case: CaseSpec, spec: RunSpec, leg: str, *, judged: bool) -> None:
    sealed = finding.folder.case_folder(case.id) / leg
    current = finding.folder.run_folder(spec.key)
    place = finding.folder.leg_folder(case, leg) if leg else current
    if spec.key not in finding.runs:
        finding.runs[spec.key] = load_run_folder(place, spec)
        for path, why in _run_damage(place, finding.runs[spec.key], judged=judged):
            finding.note(path, why)
    if leg and place == current and judged:
        for path in sorted([*place.glob("*.json*"), *place.glob("*.contents")]):
            if not _same(path, sealed / path.name):
                finding.note(sealed / path.name, "not the file of the run")


def _run_damage(place: Path, run: RunResult, *, judged: bool) -> Iterator[tuple[Path, str]]:
    key = run.spec.key
    outcome, why = read_outcome(place, key)
    if outcome is None and (judged or (place / OUTCOME_FILE).exists()):
        yield place / OUTCOME_FILE, why if place.exists() else "missing"
    if place.exists():
        try:
            found = RunSpec.from_json(read_object(place / SPEC_FILE, sealed=False)).key
            if found != key:
                yield place / SPEC_FILE, f"is that of run {found}"
        except (OSError, RecordError) as error:
            yield place / SPEC_FILE, told(error)
    told_of = set()
    for records in run.ranks:
        for problem in records.problems[:1]:
            told_of.add(records.rank)
            yield rank_path(place, records.rank), problem
    is_whole = outcome is not None and not outcome.what
    yield from damaged_contents(place, run.spec, is_whole=is_whole)
    flaw = find_flaw(run) if is_whole else None
    if flaw is not None and flaw.rank not in told_of:
        yield rank_path(place, flaw.rank or 0), flaw.message


def _take_checksums(finding: _Finding, case: CaseSpec) -> None:
    """Files whose checksum is gone, in a folder whose files have one."""
    folder = finding.folder
    if not folder.has_checksums:
        return
    place = folder.case_folder(case.id)
    specs = [*runs_of(case), *confirming_runs(case).values()]
    runs = [folder.run_folder(spec.key) for spec in specs]
    paths = [place / CASE_FILE, place / VERDICT_FILE, *(run / OUTCOME_FILE for run in runs)]
    for path in paths:
        # What is no object, or is not there, is told where it is read.
        with suppress(OSError, RecordError):
            if not has_checksum(path):
                finding.note(path, "its checksum is gone")
    made = [finding.runs[spec.key] for spec in specs if spec.key in finding.runs]
    ends = [
        (run.spec.key, records.rank, records.end.sha256)
        for run in made
        for records in run.ranks
        if records.end is not None
    ]
    # Ranks may be of another make, which writes none; but then none of them does.
    if any(checksum for _, _, checksum in ends):
        for key, rank, checksum in ends:
            if not checksum:
                finding.note(rank_path(folder.run_folder(key), rank), "its checksum is gone")


def _same(path: Path, other: Path) -> bool:
    try:
        if path.samefile(other):
            return True
        sizes = {path.stat().st_size, other.stat().st_size}
        if len(sizes) > 1 or max(sizes) > MAX_COMPARED_BYTES:
            return False
        mine, theirs = (read_plain(each, MAX_COMPARED_BYTES) for each in (path, other))
        return mine == theirs
    except OSError:
        return False


def _take_verdict(finding: _Finding, case: CaseSpec, *, judged: bool) -> Verdict | None:
    folder = finding.folder.case_folder(case.id)
    stored = finding.folder.load_verdict(case.id)
    if stored is None:
        if judged:
            finding.note(folder / VERDICT_FILE, "missing, or not as it was written")
        return None
    if not case.skip_reason or (folder / CASE_FILE).exists():
        _take_case_file(finding, case, folder / CASE_FILE)
    verdict = confirmed(finding.folder, case, stored, finding.runs)
    if verdict is not stored:
        finding.note(folder / VERDICT_FILE, f"says {stored.outcome}, but: {verdict.message}")
    elif (told := stored.confirmation) is not None and told.outcome != "not_made":
        sides = (case.reference, case.candidate, *confirming_runs(case).values())
        first, second, *again = (finding.runs[spec.key] for spec in sides)
        found = confirmation(case, stored, (first, second), (again[0], again[1]))
        if found != told:
            why = f"says {told.outcome} of the repeats, their records {found.outcome}"
            finding.note(folder / VERDICT_FILE, why)
    return verdict


def _take_case_file(finding: _Finding, case: CaseSpec, path: Path) -> None:
    try:
        if CaseSpec.from_json(read_object(path)) != case:
            finding.note(path, "not the case that was planned")
    except (OSError, RecordError, UsageError) as error:
        finding.note(path, told(error))
