"""A finished run folder goes into the history, whatever state the history is in.

A run must not fail because its history cannot be written: that is one line, and a note in the run
folder, which the report shows. `harness history --add RUN` records the folder later.
"""

import time
from pathlib import Path

from harness.errors import HarnessError, UsageError, one_line
from harness.history.database import Damaged, Gone, set_aside
from harness.history.gathering import gather
from harness.history.ledger import History, Recorded
from harness.store import RunFolder
from harness.store.files import write_atomic

DATABASE_FILE = "history.sqlite"
NOT_WRITTEN_FILE = "history_not_written.txt"
TRIES = 20
PAUSE_S = 0.1
"""Between tries to record while another harness keeps a damaged history aside."""


def remember(folder: Path, database: Path) -> str:
    """Record a run folder; a warning of one line, "" if all went well. Raises nothing."""
    note = folder / NOT_WRITTEN_FILE
    try:
        _, warning = record_folder(folder, database)
        note.unlink(missing_ok=True)
    except Exception as error:  # noqa: BLE001 - the run's verdicts stand, whatever is wrong here
        known = isinstance(error, HarnessError)
        why = str(error) if known else f"internal error: {type(error).__name__}: {error}"
        warning = one_line(f"not written to the history: {why}")
        try:
            write_atomic(note, warning + "\n")
        except HarnessError as unwritten:
            warning = f"{warning}; {unwritten}"
    return warning


def record_folder(folder: Path, database: Path) -> tuple[Recorded, str]:
    """Record a run folder, in a new history if the one there is damaged, which is then kept aside.

    Returns:
        What was added, and a line to tell if the old history had to be kept aside.

    Raises:
        HarnessError: not a run folder, or the history cannot be written.
    """
    entry = gather(RunFolder.open(folder))
    notes: list[str] = []
    for left in reversed(range(TRIES)):
        try:
            with History.open(database, create=True) as history:
                return history.record(entry), "; ".join(notes)
        except (Damaged, Gone) as error:
            if not left:
                raise
            if isinstance(error, Damaged):
                notes += _kept_aside(database, error)
            # Another harness is moving the damaged one, or making the new one.
            time.sleep(PAUSE_S)
    raise AssertionError("unreachable: the last try returns or raises")


def _kept_aside(database: Path, error: Damaged) -> list[str]:
    try:
        kept = set_aside(database)
    except (Damaged, Gone, UsageError):
        return []
    return [
        f"{error}; it is kept as {kept}, a new history was begun, and "
        f"`harness history --add RUN` brings older run folders into it"
    ]
