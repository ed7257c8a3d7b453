"""What is damaged in a run folder, file by file, and which verdicts stand.

    manifest.json -> scenario.yaml, cases.json
    verdict.json  -> case.json, outcome.json of each run -> spec.json, records, kept contents

Each speaks for the files after it by their checksums. A pass stands on all of them: where one is
not as it was, the answer is an error. Other answers are kept: damage after a case failed must not
turn the failure into a question. Nothing is judged again, and nothing is changed.
"""

import dataclasses
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UsageError, shown
from harness.records import CaseSpec, RecordError, RunSpec, Verdict, What
from harness.repeats import confirming_runs, runs_of
from harness.store.files import CHANGED, checksum_of, read_object, read_sealed, told
from harness.store.folder import (
    CASE_FILE,
    LEGS,
    MANIFEST_FILE,
    OUTCOME_FILE,
    SEARCH_FILE,
    VERDICT_FILE,
    RunFolder,
    changed_files,
    find_verdict,
    load_case,
    read_outcome,
)

DEFAULT_OUT = Path("out")
TRUSTING = ("passed", "skipped")
"""Outcomes that damage must not leave standing."""
_EARLIER = re.compile(r"\.attempt\d+$")


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What was found: `verdicts` of cases that have one, those of damaged passes being errors; ids
    of cases that are `unjudged`; `damage`, one line a file, its path in the folder first.

    `num_runs` counts those that the `num_cases` planned need.
    """

    verdicts: tuple[Verdict, ...]
    num_cases: int
    num_runs: int
    unjudged: tuple[str, ...]
    damage: tuple[str, ...]


def inspect(path: Path) -> Inspection:
    """Try every checksum of a run folder (`UsageError`: it is none, or damaged beyond reading)."""
    folder = RunFolder.open(path)
    verdicts, unjudged, runs = [], [], set[str]()
    damage: dict[tuple[Path, str], None] = {}  # runs are shared by cases, each file is named once
    for case in folder.cases:
        stored = folder.load_verdict(case.id)
        found = list(_damage(folder.case_folder(case.id), case, folder))
        damage |= dict.fromkeys(found)
        if stored is None:
            unjudged.append(case.id)
        else:
            verdicts.append(_standing(stored, found, folder.path))
        if not case.skip_reason:
            repeats = None if stored is None else stored.confirmation
            is_made = repeats is not None and repeats.outcome != "not_made"
            specs = [*runs_of(case), *(confirming_runs(case).values() if is_made else ())]
            runs |= {spec.key for spec in specs}
    # Questions of a search are in no plan.
    planned = {case.id for case in folder.cases}
    for place in sorted(each.parent for each in folder.path.glob(f"cases/*/{CASE_FILE}")):
        if place.name in planned or place.name.startswith(".") or _EARLIER.search(place.name):
            continue
        try:
            case = CaseSpec.from_json(read_object(place / CASE_FILE))
            if case.id != place.name:
                raise RecordError(f"is that of case {case.id}")
            damage |= dict.fromkeys(_damage(place, case, folder, is_question=True))
        except (OSError, RecordError, UsageError) as error:
            damage[place / CASE_FILE, told(error)] = None
    return Inspection(
        verdicts=tuple(verdicts), num_cases=len(folder.cases), num_runs=len(runs),
        unjudged=tuple(unjudged), damage=tuple(_line(folder.path, *each) for each in damage),
    )  # fmt: skip


def verified(folder: RunFolder, case: CaseSpec, stored: Verdict) -> Verdict:
    """The stored verdict, or an error if it is a pass and files that it rests on are damaged."""
    return _standing(stored, _damage(folder.case_folder(case.id), case, folder), folder.path)


def verified_alone(place: Path, case: CaseSpec, stored: Verdict) -> Verdict:
    """As `verified`, of a case's folder by itself, wherever it lies, with its three runs."""
    return stored if case.skip_reason else _standing(stored, _damage(place, case), place)


def _standing(stored: Verdict, found: Iterable[tuple[Path, str]], root: Path) -> Verdict:
    if stored.outcome not in TRUSTING or not (damage := list(found)):
        return stored
    # Whole folders that are gone were not made, as far as anybody can tell.
    gone = next(((path, why) for path, why in damage if not path.parent.exists()), None)
    what: What = "not_run" if gone is not None else "corrupt_record"
    message = f"{_line(root, *(gone or damage[0]))} ({VERDICT_FILE} says {stored.outcome})"
    return dataclasses.replace(stored, outcome="error", what=what, message=message, checks=())


def _line(root: Path, path: Path, why: str) -> str:
    return f"{path.relative_to(root)}: {why.removeprefix(f'{path.name}: ')}"


def _damage(
    place: Path, case: CaseSpec, folder: RunFolder | None = None, *, is_question: bool = False
) -> Iterator[tuple[Path, str]]:
    """Files of the case at `place` and of its runs that are not as they were, and what is wrong."""
    sums: dict[str, str] = {}
    verdict, why = find_verdict(place, case.id)
    if verdict is not None:
        sums = read_sealed(place / VERDICT_FILE)[1]
    elif place.exists() and ((place / VERDICT_FILE).exists() or not is_question):
        yield place / VERDICT_FILE, why
    yield from _case_file_damage(place / CASE_FILE, case, sums.get(CASE_FILE))
    if case.skip_reason:
        if verdict is not None and verdict.outcome == "passed":
            yield place / VERDICT_FILE, "says passed of a case that was to be skipped"
        return
    due = set(sums)
    if verdict is not None and verdict.outcome in TRUSTING:
        due |= {spec.key for spec in runs_of(case)}
    for spec, at in _runs_at(place, case, folder):
        path = at / OUTCOME_FILE
        outcome, why = read_outcome(at, spec)
        if outcome is not None:
            if spec.key in due and sums.get(spec.key) != checksum_of(path):
                yield path, "not the one that the verdict was made from"
        elif spec.key in due or path.exists():
            yield path, why if path.exists() or path.is_symlink() else "missing"
        yield from ((at / name, changed) for name, changed in changed_files(at).items())


def _runs_at(
    place: Path, case: CaseSpec, folder: RunFolder | None
) -> Iterator[tuple[RunSpec, Path]]:
    """Runs that the case may rest on, in the run folder and with the case."""
    legs = [(getattr(case, leg), place / leg) for leg in LEGS]
    if folder is not None:
        at = [(getattr(case, leg), folder.leg_folder(case, leg)) for leg in LEGS]
        more = (*runs_of(case)[len(LEGS) :], *confirming_runs(case).values())
        yield from (*at, *((spec, folder.run_folder(spec.key)) for spec in more))
        legs = [each for each in legs if place.exists() and each not in at]
    yield from legs


def _case_file_damage(
    path: Path, case: CaseSpec, checksum: str | None
) -> Iterator[tuple[Path, str]]:
    if checksum is None and not path.exists():
        return
    try:
        if CaseSpec.from_json(read_object(path)) != case:
            yield path, "not the case that was planned"
        elif checksum not in (None, checksum_of(path)):
            yield path, CHANGED
    except (OSError, RecordError) as error:
        yield path, told(error)


# --- where run folders and cases are ----------------------------------------------------------


def unused(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that is free."""
    number, candidate = 2, path
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate


def newest_run(out: Path = DEFAULT_OUT) -> Path:
    """The run folder made last under `out`, no search's (`UsageError`: there is none)."""
    made = [path for path in out.glob(f"*/{MANIFEST_FILE}")
            if path.is_file() and not path.with_name(SEARCH_FILE).exists()]  # fmt: skip
    if not made:
        raise UsageError(f"expected a run folder, {out}/ holds none")
    return max(made, key=lambda path: path.stat().st_mtime_ns).parent


def find_case(name: str, run: Path | None) -> tuple[Path, CaseSpec]:
    """A case's folder by its path, or by its id in a run folder (the newest by default).

    Raises:
        UsageError: there is no such case, or nothing at the path.
    """
    path = Path(name)
    if run is None and (path / CASE_FILE).is_file():
        return path, load_case(path).case
    if run is None and len(path.parts) > 1:  # no id has a slash
        inside = ", ".join(sorted(f"cases/{each.name}" for each in path.glob("cases/*"))[:10])
        told = f"as {inside} in it" if inside else f"it has no {CASE_FILE}"
        raise UsageError(f"{shown(name)}: expected a case folder, {told}")
    folder = RunFolder.open(run or newest_run())
    ids = {each.id: each for each in folder.cases}
    if name not in ids:
        known = ", ".join([*ids][:10])
        raise UsageError(f"{shown(name)}: expected a case folder or id; {folder.path} has {known}")
    return folder.case_folder(name), ids[name]


def find_answer(name: str, run: Path | None) -> tuple[Path, CaseSpec, Verdict | None, str]:
    """A case's folder, the case, and its verdict; None and why if there is none that can be read.

    A pass stands on the files of its runs and on those that lie with the case, which are the same
    unless somebody copied them (`UsageError`: there is no such case).
    """
    place, case = find_case(name, run)
    stored, why = find_verdict(place, case.id)
    parent = place.absolute().parent.parent
    if stored is None:
        return place, case, None, why
    if (parent / MANIFEST_FILE).is_file() and place.name == case.id:
        folder = RunFolder.open(parent)
        for planned in (each for each in folder.cases if each.id == case.id):
            stored = verified(folder, planned, stored)
    return place, case, verified_alone(place, case, stored), ""


def bisect_line(case: CaseSpec, place: Path) -> str:
    """The command that finds where a failing case, whose folder is `place`, fails; "" if none."""
    return f"harness bisect {shlex.quote(str(place))}" if case.expect == "bitwise" else ""
