"""Where run folders are: names for new ones, the newest, and cases by name."""

import shlex
from pathlib import Path

from harness.errors import UsageError, shown
from harness.records import CaseSpec, Verdict
from harness.store.folder import SEARCH_FILE, SPEC_FILE, RunFolder, find_verdict, load_case
from harness.store.verify import verified, verified_alone

DEFAULT_OUT = Path("out")


def unused(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that is free."""
    number, candidate = 2, path
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate


def newest_run(out: Path = DEFAULT_OUT) -> Path:
    """The run folder made last under `out`, those of searches left out.

    Raises:
        UsageError: there is none.
    """
    made = [
        path
        for path in out.glob("*/manifest.json")
        if path.is_file() and not path.with_name(SEARCH_FILE).exists()  # of a search
    ]
    if not made:
        raise UsageError(f"expected a run folder, {out}/ holds none")
    return max(made, key=lambda path: path.stat().st_mtime_ns).parent


def find_case(name: str, run: Path | None) -> tuple[Path, CaseSpec]:
    """A case's folder by its path, or by its id in a run folder (the newest by default).

    Raises:
        UsageError: there is no such case, or nothing at the path.
    """
    path = Path(name)
    if run is None and (path / "case.json").is_file():
        return path, load_case(path).case
    if run is None and (path / SPEC_FILE).is_file():
        run = path  # one run, which is refused for what it is
    if run is None and len(path.parts) > 1:  # no id has a slash
        there = "one without case.json" if path.is_dir() else "no folder there"
        raise UsageError(f"{shown(name)}: expected a case folder, got {there}")
    folder = RunFolder.open(run or newest_run())
    ids = [case.id for case in folder.cases]
    if name not in ids:
        known = ", ".join(ids[:10]) + (", ..." if len(ids) > 10 else "")
        raise UsageError(f"{shown(name)}: expected a case folder or id; {folder.path} has {known}")
    return folder.case_folder(name), folder.cases[ids.index(name)]


def find_answer(name: str, run: Path | None) -> tuple[Path, CaseSpec, Verdict | None, str]:
    """A case's folder, the case, and its verdict; None and why if there is none that can be read.

    A pass stands on the files of its runs and on those that lie with the case, which are the same
    unless somebody copied them.

    Raises:
        UsageError: there is no such case.
    """
    place, case = find_case(name, run)
    stored, why = find_verdict(place, case.id)
    if stored is None:
        return place, case, None, why
    parent = place.absolute().parent.parent
    if (parent / "manifest.json").is_file() and place.name == case.id:
        folder = RunFolder.open(parent)
        planned = next((each for each in folder.cases if each.id == case.id), None)
        if planned is not None:
            stored = verified(folder, planned, stored)
    return place, case, verified_alone(place, case, stored), ""


def bisect_line(case: CaseSpec, place: Path) -> str:
    """The command that finds where a failing case, whose folder is `place`, fails; "" if none."""
    return f"harness bisect {shlex.quote(str(place))}" if case.expect == "bitwise" else ""
