"""What a search has found so far, stage by stage: `bisect.json`, and what page and screen show."""

from dataclasses import dataclass
from pathlib import Path

from harness.bisector.causes import FoundCauses
from harness.bisector.commits import CommitSearch, ReleaseSearch
from harness.bisector.experiments import AskedQuestion
from harness.bisector.found import Location
from harness.bisector.repro import Alone
from harness.checksum import with_checksum
from harness.codec import Json, RecordError, dumps
from harness.disk import write_atomic
from harness.object_file import read_object
from harness.records import Outcome, What
from harness.store import SEARCH_FILE


@dataclass(frozen=True, kw_only=True)
class Findings(Json):
    """All that is known of a failing case.

    Attributes:
        case_id, scenario: which case.
        outcome, what, message: its verdict.
        command: that goes on with the search, or shows it again.
        environment: what legs or nights ran in, where it differs; said first.
        place: where the fault entered; None before that stage.
        causes: smallest sets of differences between the legs that still fail; None before that
            stage, or if nobody asked.
        least_case: the scenario that fails alone; None before that stage, or if nobody asked.
        commits: the first bad one, or the range of suspects; None if nobody asked.
        release: of a package, the first bad one; None if nobody asked.
        questions: what was asked, in order.
        num_runs: made in all sittings.
        seconds: spent in all sittings.
        stopped: why the search ended before its end; "" if it did not.
    """

    case_id: str
    scenario: str
    outcome: Outcome
    what: What
    message: str
    command: str
    environment: tuple[str, ...] = ()
    place: Location | None = None
    causes: FoundCauses | None = None
    least_case: Alone | None = None
    commits: CommitSearch | None = None
    release: ReleaseSearch | None = None
    questions: tuple[AskedQuestion, ...] = ()
    num_runs: int = 0
    seconds: float = 0.0
    stopped: str = ""


def keep_findings(folder: Path, findings: Findings) -> Path:
    """Write what is known; the file's path.

    Raises:
        Infrastructure: the disk refused.
    """
    path = folder / SEARCH_FILE
    write_atomic(path, dumps(with_checksum(findings)) + "\n")
    return path


def read_findings(folder: Path) -> Findings | None:
    """What an earlier sitting has kept; None if there is none that decodes."""
    try:
        return Findings.from_json(read_object(folder / SEARCH_FILE))
    except (OSError, RecordError):
        return None
