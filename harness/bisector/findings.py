"""What a search has found so far, stage by stage: `bisect.json`, and what page and screen show."""

from dataclasses import dataclass
from pathlib import Path

from harness.bisector.alone import Alone
from harness.bisector.causes import FoundCauses
from harness.bisector.commits import CommitSearch
from harness.bisector.found import Location
from harness.bisector.layer_range import LayerRange
from harness.bisector.releases import ReleaseSearch
from harness.codec import Json, RecordError
from harness.records import Outcome, What
from harness.store.files import read_object, write_object

FINDINGS_FILE = "bisect.json"


@dataclass(frozen=True, kw_only=True)
class AskedQuestion(Json):
    """One question that cost runs."""

    words: str
    answer: str
    runs: int
    seconds: float


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
        layers: that must be captured; None before that stage, or if no capture is to blame.
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
    layers: LayerRange | None = None
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
    path = folder / FINDINGS_FILE
    write_object(path, findings)
    return path


def read_findings(folder: Path) -> Findings | None:
    """What an earlier sitting has kept; None if there is none that decodes."""
    try:
        return Findings.from_json(read_object(folder / FINDINGS_FILE))
    except (OSError, RecordError):
        return None
