"""From a run folder to tables: one row a verdict, one a recorded step.

Runs are read once, however many cases share them. A case that was planned and has no verdict gets
one that says so: a report must not be green because something is missing from it.
"""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from harness.checks.memory import peak_bytes
from harness.records import CaseSpec, FloatBits, RunResult, RunSpec, Verdict
from harness.rejudge import confirmed
from harness.store import LEGS, VERDICT_FILE, RunFolder, load_run_folder


@dataclass(frozen=True, kw_only=True)
class Frames:
    """A run folder in memory.

    Attributes:
        folder: the folder that was read.
        verdicts: one for every planned case, in the plan's order.
        runs: every run that a case names, by key.
        verdict_frame: case, outcome, what, wall_s.
        step_frame: run, rank, step, loss_bits, loss, grad_norm; NaN where not finite.
    """

    folder: RunFolder
    verdicts: tuple[Verdict, ...]
    runs: dict[str, RunResult]
    verdict_frame: pd.DataFrame
    step_frame: pd.DataFrame
    _steps: dict[str, pd.DataFrame]

    def steps_of(self, key: str) -> pd.DataFrame:
        """The rows of one run in the step frame: looked up, since a nightly has thousands."""
        return self._steps.get(key, self.step_frame.iloc[:0])

    def peaks_of(self, key: str) -> list[tuple[int, int]]:
        """Rank and peak bytes of every rank of a run."""
        return [(records.rank, peak_bytes(records)) for records in self.runs[key].ranks]


def load(path: Path) -> Frames:
    """Read a run folder.

    Raises:
        UsageError: it is not a run folder, or damaged beyond reading.
    """
    folder = RunFolder.open(path)
    runs: dict[str, RunResult] = {}
    for case in folder.cases:
        for leg in LEGS:
            spec: RunSpec = getattr(case, leg)
            if spec.key not in runs:
                runs[spec.key] = _run(folder, case, leg, spec)
    verdicts = tuple(_verdict(folder, case, runs) for case in folder.cases)
    steps = _steps(runs)
    return Frames(
        folder=folder,
        verdicts=verdicts,
        runs=runs,
        verdict_frame=pd.DataFrame(
            [(v.case_id, v.outcome, v.what, v.wall_s) for v in verdicts],
            columns=["case", "outcome", "what", "wall_s"],
        ),
        step_frame=steps,
        _steps={str(key): rows for key, rows in steps.groupby("run", sort=False)},
    )


def _verdict(folder: RunFolder, case: CaseSpec, runs: dict[str, RunResult]) -> Verdict:
    found = folder.load_verdict(case.id)
    if found is not None:
        return confirmed(folder, case, found, runs)
    damaged = (folder.case_folder(case.id) / VERDICT_FILE).exists()
    message = (
        f"no verdict: its {VERDICT_FILE} does not decode"
        if damaged
        else "no verdict: the harness stopped before this case was judged; --resume goes on"
    )
    return Verdict(
        case_id=case.id,
        outcome="error",
        what="corrupt_record" if damaged else "not_run",
        message=message,
        checks=(),
        runs={leg: getattr(case, leg).key for leg in LEGS},
        wall_s=0.0,
    )


def _run(folder: RunFolder, case: CaseSpec, leg: str, spec: RunSpec) -> RunResult:
    sealed = folder.case_folder(case.id) / leg
    # A folder from which only the cases were kept can still be reported.
    if not folder.run_folder(spec.key).is_dir() and sealed.is_dir():
        return load_run_folder(sealed, spec)
    return folder.load_run(spec)


def _number(value: FloatBits | None) -> float:
    return float("nan") if value is None or value.value is None else value.value


def _steps(runs: dict[str, RunResult]) -> pd.DataFrame:
    rows = [
        (
            key,
            records.rank,
            record.step,
            "" if record.loss is None else record.loss.bits,
            _number(record.loss),
            _number(record.grad_norm),
        )
        for key, run in runs.items()
        for records in run.ranks
        for record in records.steps
    ]
    columns = ["run", "rank", "step", "loss_bits", "loss", "grad_norm"]
    return pd.DataFrame(rows, columns=columns)
