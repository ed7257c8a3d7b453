"""Which cases have changed since they passed: `select: changed`.

A case is left out if the history has an answer for exactly what it asks, given by the code as it is
now in this environment, and every such answer says passed.

    what it asks       its three runs, its expectation, the limits of its checks (`inputs_of`)
    the code           the commit, or one since which git says that no path of the packages changed
    this environment   packages, driver, hardware, stored variables

Whatever cannot be found out, a commit that a shallow clone lacks for instance, counts as changed.
The contents of a text corpus (`data.path`) are not looked at.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from harness import provenance
from harness.history import History
from harness.history.entries import CaseEntry, FolderEntry, inputs_of, name_of
from harness.history.gathering import environment_of
from harness.machine import Machine
from harness.provenance import record
from harness.records import CaseSpec, dumps

MAX_FOLDERS = 500
"""The newest run folders that are looked at."""


def changed(
    cases: Sequence[CaseSpec], database: Path | None, here: Machine
) -> tuple[CaseSpec, ...]:
    """The cases without a passed record of what they are now; all of them without a history.

    Raises:
        HarnessError: the history cannot be read.
    """
    if database is None or not database.exists():
        return tuple(cases)
    answers = _answers(database, environment_name(here))
    return tuple(case for case in cases if answers.get(inputs_of(case)) != {"passed"})


def environment_name(here: Machine) -> str:
    """Names this machine's environment as the history does."""
    return name_of(environment_of(record(json.loads(dumps(here)))))


def _answers(database: Path, environment: str) -> dict[str, set[str]]:
    """Outcomes by what was asked, of folders that the code as it is now made here."""
    found: dict[str, set[str]] = {}
    same: dict[str, bool] = {}
    with History.open(database) as history:
        newest = f"ORDER BY created DESC, id LIMIT {MAX_FOLDERS}"
        for _, folder in history.rows(FolderEntry, newest):
            if folder.environment_id != environment:
                continue
            if folder.commit not in same:
                same[folder.commit] = provenance.same_code(folder.commit)
            if not same[folder.commit]:
                continue
            for _, answer in history.rows(CaseEntry, "WHERE folder = ?", [folder.id]):
                if answer.inputs:
                    found.setdefault(answer.inputs, set()).add(answer.outcome)
        # A row that was left out may have said no.
        return {} if history.damaged else found
