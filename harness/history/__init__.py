"""History across nights: what ran, on what, with which answer, in one SQLite file beside the runs.

    run folder -> gathering -> entry -> ledger (tables, database)
      -> trend (changes), flaky, comparison, cost

Values are compared only between runs of equal work in equal environments; everything else is
`incomparable`. Nothing that was recorded is ever changed or removed.
"""

from harness.history.comparison import Comparison, compare
from harness.history.cost import CostModel, cost_model
from harness.history.flaky import Flaky, flaky_cases
from harness.history.gathering import gather, machine_kind
from harness.history.ledger import History, Recorded
from harness.history.recording import DATABASE_FILE, NOT_WRITTEN_FILE, record_folder, remember
from harness.history.trend import CaseTrend, Night, trends

__all__ = [
    "DATABASE_FILE", "NOT_WRITTEN_FILE", "CaseTrend", "Comparison", "CostModel", "Flaky", "History",
    "Night", "Recorded", "compare", "cost_model", "flaky_cases", "gather", "machine_kind",
    "record_folder", "remember", "trends",
]  # fmt: skip
