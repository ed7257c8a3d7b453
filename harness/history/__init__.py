"""The history of runs: what ran, on what, with which answer.

    run folder -> ledger (the files) -> trend

Nothing that was recorded is ever changed or removed.
"""

from harness.history.ledger import (
    HISTORY_FOLDER,
    NOT_WRITTEN_FILE,
    History,
    gather,
    machine_kind,
    record_folder,
    remember,
)
from harness.history.trend import Answer, CaseTrend, Comparison, Flaky, compare, flaky_cases, trends

__all__ = [
    "HISTORY_FOLDER", "NOT_WRITTEN_FILE", "Answer", "CaseTrend", "Comparison", "Flaky", "History",
    "compare", "flaky_cases", "gather", "machine_kind", "record_folder", "remember", "trends",
]  # fmt: skip
