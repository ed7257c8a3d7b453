"""A case by name, with an answer that its records bear out."""

from pathlib import Path

from harness.lookup import find_case
from harness.records import CaseSpec, Verdict
from harness.rejudge import confirmed_alone, confirmed_in
from harness.store import RunFolder, find_verdict


def find_answer(name: str, run: Path | None) -> tuple[Path, CaseSpec, Verdict | None, str]:
    """A case's folder, the case, and its verdict; None and why if there is none that can be read.

    A pass is judged again, over all records that there are: in a run folder over those of its runs
    and over those that lie with the case, which are the same files unless somebody copied them.

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
            stored = confirmed_in(folder, planned, stored)
    # Of a case that was to be skipped there may be no records: that is known in the plan alone.
    if stored.outcome == "passed":
        stored = confirmed_alone(place, case, stored)
    return place, case, stored, ""
