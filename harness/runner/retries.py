"""Attempts: which runs are repeated, by `--resume` or at once, and what earlier ones prove.

    interrupted, not_run          they say nothing of the program: `--resume` makes them
    undecided, shared_gpu         nobody knows what ended it (`harness.engine.local`): likewise
    killed, and not for memory    somebody did it: likewise
    killed, anything else         only on request (`--again-killed`)
    what the machine failed       `--resume` makes them, and at most `launch.retries` times the run
                                  itself, at once (`harness.infrastructure`)

Any other outcome is final: a rank that is killed may have used too much memory, which is a failure.
Every attempt is kept, its folder next to the run's, its outcome in history and reports. An attempt
that computed other bits before the machine failed it is evidence: no pass after it is one.
"""

import dataclasses
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.checks import confirmation
from harness.checks.evidence import different_leaves
from harness.checks.judge import unequal
from harness.infrastructure import SHARED_GPU, machine_failure
from harness.provenance import fingerprint
from harness.records import (
    CaseSpec,
    CheckResult,
    Difference,
    Json,
    RunOutcome,
    RunResult,
    RunSpec,
    Verdict,
    What,
)
from harness.repeats import confirming_runs, unique_runs
from harness.store import LEGS, RunFolder, kept_folder, load_run_folder, num_kept
from harness.store.streams import aligned

MANIFEST_KEY = "retries"
"""Of the run folder's manifest: how often a run may be repeated."""
TO_REPEAT: tuple[What, ...] = ("interrupted", "not_run", SHARED_GPU)
"""Outcomes that say nothing of the program."""
_HALF_WRITTEN = re.compile(r"\..+\.(\d+)\.tmp")


@dataclass(frozen=True, kw_only=True)
class Attempt(Json):
    """One earlier attempt of a run.

    `signature` is the failure of the machine that ended it, `shared_gpu` if another run on its GPU
    may have, "" for one that somebody stopped; `num_steps` are those that some rank recorded.
    """

    key: str
    number: int
    what: What
    message: str
    signature: str
    num_steps: int
    wall_s: float

    @property
    def cause(self) -> str:
        """What a pass after it is shown with; "" for an attempt whose harness ended before it."""
        return self.signature or ("killed" if self.what == "killed" else "")


def says_nothing(outcome: RunOutcome | None) -> bool:
    """Whether an outcome, if there is one, says nothing of the program: `--resume` asks again."""
    if outcome is None or outcome.undecided or outcome.what in TO_REPEAT:
        return True
    return outcome.what == "killed" and outcome.from_outside


def why_again(folder: RunFolder, spec: RunSpec, limit: int) -> str:
    """The failure for which a run that has ended is repeated at once; "" if it is final."""
    outcome = folder.finished(spec.key)
    if outcome is not None and outcome.undecided:
        return SHARED_GPU  # of one that the engine starts again it is not
    if outcome is None or not outcome.what or not limit:
        return ""
    failure = machine_failure(folder.load_run(spec))
    earlier = earlier_attempts(folder, spec) if failure else ()
    spent = sum(attempt.signature not in ("", SHARED_GPU) for attempt in earlier)
    return failure if spent < limit else ""


def is_left(folder: RunFolder, spec: RunSpec) -> bool:
    """Whether `--resume` makes a run, for the first time or again."""
    outcome = folder.finished(spec.key)
    if outcome is None or says_nothing(outcome):
        return True
    return bool(outcome.what and machine_failure(folder.load_run(spec)))


def open_repeats(folder: RunFolder) -> dict[str, list[RunSpec]]:
    """By case, the repeats that are left to be made for a failure which is stored."""
    found: dict[str, list[RunSpec]] = {}
    for case in folder.cases:
        verdict = folder.load_verdict(case.id) if case.confirm else None
        if verdict is not None and confirmation.is_open(case, verdict):
            specs = confirming_runs(case).values()
            found[case.id] = [spec for spec in specs if is_left(folder, spec)]
    return found


def stored_limit(manifest: Mapping[str, object]) -> int:
    """The limit that a run folder was made with; 0 if it says none."""
    stored = manifest.get(MANIFEST_KEY)
    return stored if isinstance(stored, int) else 0


def set_killed_aside(path: Path) -> None:
    """Set every killed run of a folder aside, so that `--resume` makes it."""
    with RunFolder.open(path) as folder:
        repeats = (spec.key for case in folder.cases for spec in confirming_runs(case).values())
        for key in dict.fromkeys([*unique_runs(folder.cases), *repeats]):
            if (outcome := folder.finished(key)) and outcome.what == "killed":
                folder.set_aside(key)


def clear_leftovers(folder: RunFolder) -> None:
    """Remove what a killed harness left half-written; the folder is locked by the caller.

    `.NAME.PID.tmp` was to be renamed into place, `cases/.CASE.tmp` to be sealed. Below `runs`
    nothing is looked for, as Slurm jobs may be at work there.
    """
    root = folder.path
    for path in root.glob("cases/.*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
    for path in (path for at in (".", "report", "cases/*") for path in root.glob(f"{at}/.*.tmp")):
        process = _HALF_WRITTEN.fullmatch(path.name)
        # Reports are made without the lock: their harness may be at it.
        if process and not Path("/proc", process[1]).exists():
            with suppress(OSError):
                path.unlink()


# ---- what earlier attempts prove


def earlier_attempts(folder: RunFolder, spec: RunSpec) -> tuple[Attempt, ...]:
    """Every attempt of a run but the last, oldest first."""
    return tuple(
        Attempt(
            key=run.outcome.key, number=number, what=run.outcome.what, message=run.outcome.message,
            signature=SHARED_GPU if _is_in_doubt(run) else machine_failure(run),
            num_steps=len({record.step for records in run.ranks for record in records.steps}),
            wall_s=run.outcome.wall_s,
        )
        for number, run in enumerate(_earlier_runs(folder, spec))
    )  # fmt: skip


def _earlier_runs(folder: RunFolder, spec: RunSpec) -> list[RunResult]:
    current = folder.run_folder(spec.key)
    places = [kept_folder(current, number) for number in range(num_kept(current))]
    return [load_run_folder(place, spec) for place in places]


def _is_in_doubt(run: RunResult) -> bool:
    return run.outcome.undecided or run.outcome.what == SHARED_GPU


def held_against_attempts(folder: RunFolder, case: CaseSpec, verdict: Verdict) -> Verdict:
    """The verdict, unless it says passed and an earlier attempt of one of its runs says otherwise.

    A candidate that computed other bits has failed; a reference that did is not deterministic. Of
    bits that were computed while another run spoiled the GPU, nobody can say whose they are.
    """
    for role in LEGS if verdict.outcome == "passed" else ():
        spec: RunSpec = getattr(case, role)
        for number, run in enumerate(_earlier_runs(folder, spec)):
            place = _first_difference(run, folder.load_run(spec))
            if place is None:
                continue
            of = f" of {place.tensor}" if place.tensor else ""
            message = (
                f"attempt {number} of the {role}, which did not finish, had other "
                f"{place.quantity}{of} at step {place.step} on rank {place.rank} than the attempt "
                "after it"
            )
            what: What = "diverged" if role == "candidate" else "nondeterministic_reference"
            if _is_in_doubt(run):
                what = SHARED_GPU
                message += "; another run was on its GPUs then"
            answer = CheckResult(
                check="attempts", what=what, message=message, difference=place,
                outcome="failed" if what == "diverged" else "incomparable",
            )  # fmt: skip
            return dataclasses.replace(
                verdict, outcome=answer.outcome, what=what, message=message, difference=place,
                checks=(*verdict.checks, answer),
            )  # fmt: skip
    return verdict


def _first_difference(earlier: RunResult, last: RunResult) -> Difference | None:
    """In any bit of what both recorded in one environment: the state before step 0 included."""
    ours, theirs = (
        {each.rank: fingerprint(each.start.environment) for each in run.ranks if each.start}
        for run in (earlier, last)
    )
    shared = ours.keys() & theirs.keys()
    if not shared or any(different_leaves(ours[rank], theirs[rank]) for rank in shared):
        return None
    answers = [answer for answer in unequal(*aligned(earlier, last)) if answer.outcome == "failed"]
    places = [answer.difference for answer in answers if answer.difference is not None]
    return min(places, key=lambda place: (place.step, not place.tensor), default=None)
