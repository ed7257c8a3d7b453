"""Runs that are made again because the machine failed them, and what may be believed of them.

    a run ended -> a failure of the machine, by name -> less than N such attempts -> made again
    a case passed -> steps that earlier attempts of its runs recorded -> the same bits, or no pass

Every attempt is kept: its folder beside the run's, its outcome in the history and in every report.
A check's no is never tried again, and neither is anything else that tells of the program
(`harness.infrastructure`). An attempt that computed other bits before the machine failed it
is evidence: the pass of the attempt after it does not stand.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from harness.checks.evidence import different_leaves, groups_of, rank_table, state_table
from harness.infrastructure import SHARED_GPU, machine_failure
from harness.provenance import fingerprint
from harness.records import (
    DIGEST_HEX_CHARS,
    CaseSpec,
    CheckResult,
    Difference,
    InitialRecord,
    Json,
    RunResult,
    RunSpec,
    StepRecord,
    Verdict,
    What,
)
from harness.store import LEGS, RunFolder, kept_folder, load_run_folder, num_kept, read_outcome
from harness.store.streams import aligned

MANIFEST_KEY = "retries"
"""Of the run folder's manifest: how often a run may be made again."""
CHECK_NAME = "attempts"


@dataclass(frozen=True, kw_only=True)
class Attempt(Json):
    """One earlier attempt of a run.

    Attributes:
        signature: the failure of the machine that ended it; `shared_gpu` if another run on its
            GPU may have; "" for one that somebody stopped.
        num_steps: steps that some rank recorded.
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
        """What a pass after it is told with; "" for an attempt whose harness ended before it."""
        return self.signature or ("killed" if self.what == "killed" else "")


class Retries:
    """How often runs of one folder may still be made again."""

    def __init__(self, folder: RunFolder, limit: int) -> None:
        """Allow `limit` attempts more than the first, for each run."""
        self._folder = folder
        self.limit = limit

    def why_again(self, spec: RunSpec) -> str:
        """The failure for which a run that has ended is made again; "" if its outcome stands."""
        if not self.limit:
            return ""
        outcome, _ = read_outcome(self._folder.run_folder(spec.key), spec.key)
        if outcome is None or not outcome.what:
            return ""
        failure = machine_failure(self._folder.load_run(spec))
        earlier = earlier_attempts(self._folder, spec)
        spent = sum(attempt.signature not in ("", SHARED_GPU) for attempt in earlier)
        return failure if spent < self.limit else ""


def stored_limit(manifest: Mapping[str, object]) -> int:
    """The limit that a run folder was made with; 0 if it says none."""
    stored = manifest.get(MANIFEST_KEY)
    whole = isinstance(stored, int) and not isinstance(stored, bool) and stored > 0
    return int(stored) if whole else 0  # type: ignore[call-overload]


def earlier_attempts(folder: RunFolder, spec: RunSpec) -> tuple[Attempt, ...]:
    """Every attempt of a run but the last, oldest first."""
    return tuple(_attempt(run, number) for number, run in enumerate(_earlier_runs(folder, spec)))


def _earlier_runs(folder: RunFolder, spec: RunSpec) -> list[RunResult]:
    current = folder.run_folder(spec.key)
    places = [kept_folder(current, number) for number in range(num_kept(current))]
    return [load_run_folder(place, spec) for place in places]


def _attempt(run: RunResult, number: int) -> Attempt:
    shared = _is_in_doubt(run)
    return Attempt(
        key=run.outcome.key,
        number=number,
        what=run.outcome.what,
        message=run.outcome.message,
        signature=SHARED_GPU if shared else machine_failure(run),
        num_steps=len({record.step for records in run.ranks for record in records.steps}),
        wall_s=run.outcome.wall_s,
    )


def _is_in_doubt(run: RunResult) -> bool:
    return run.outcome.undecided or run.outcome.what == SHARED_GPU


def beside_attempts(folder: RunFolder, case: CaseSpec, verdict: Verdict) -> Verdict:
    """The verdict, unless it says passed and an earlier attempt of one of its runs says otherwise.

    A candidate that computed other bits has failed; a reference that did is not deterministic. Of
    bits that were computed beside a run that spoiled the GPU, nobody can say whose they are.
    """
    if verdict.outcome != "passed":
        return verdict
    for leg in LEGS:
        spec: RunSpec = getattr(case, leg)
        earlier = _earlier_runs(folder, spec)
        if not earlier:
            continue
        last = folder.load_run(spec)
        for number, run in enumerate(earlier):
            if _same_environment(run, last) and (place := _first_difference(run, last)) is not None:
                return _contradicted(verdict, leg, number, place, shared=_is_in_doubt(run))
    return verdict


def _contradicted(
    verdict: Verdict, leg: str, number: int, place: Difference, *, shared: bool
) -> Verdict:
    of = f" of {place.tensor}" if place.tensor else ""
    message = (
        f"attempt {number} of the {leg}, which did not finish, had other {place.quantity}{of} at "
        f"step {place.step} on rank {place.rank} than the attempt after it"
    )
    what: What = "diverged" if leg == "candidate" else "nondeterministic_reference"
    if shared:
        what = SHARED_GPU
        message += "; it was on a GPU under MPS with runs that failed"
    answer = CheckResult(
        check=CHECK_NAME,
        outcome="failed" if what == "diverged" else "incomparable",
        what=what,
        message=message,
        difference=place,
    )
    return dataclasses.replace(
        verdict, outcome=answer.outcome, what=answer.what, message=message, difference=place,
        checks=(*verdict.checks, answer),
    )  # fmt: skip


def _same_environment(earlier: RunResult, last: RunResult) -> bool:
    prints = [
        {records.rank: fingerprint(records.start.environment)
         for records in run.ranks if records.start is not None}
        for run in (earlier, last)
    ]  # fmt: skip
    shared = set(prints[0]) & set(prints[1])
    return bool(shared) and not any(different_leaves(prints[0][r], prints[1][r]) for r in shared)


def _first_difference(earlier: RunResult, last: RunResult) -> Difference | None:
    """In any bit of what both recorded: the state before step 0, losses, every digest group."""
    earlier, last = aligned(earlier, last)
    ours, theirs = state_table(earlier), state_table(last)
    for key in (key for key in ours if key in theirs):
        one, other = ours[key], theirs[key]
        for quantity in ("loss", "grad_norm", *groups_of(one.digests, other.digests)):
            left, right = _bits(one, quantity), _bits(other, quantity)
            if left != right:
                return _difference(last, key, quantity, left, right)
    return None


def _difference(
    run: RunResult, key: tuple[int, int], quantity: str, left: str, right: str
) -> Difference:
    step, rank = key
    tensor = ""
    if quantity not in ("loss", "grad_norm"):
        size = DIGEST_HEX_CHARS
        place = next(
            i for i in range(0, len(left) + 1, size) if left[i:][:size] != right[i:][:size]
        )
        start = rank_table(run)[rank].start
        names = start.tensors.get(quantity, ()) if start is not None else ()
        tensor = names[place // size] if place // size < len(names) else ""
        left, right = left[place:][:size], right[place:][:size]
    return Difference(
        step=step, rank=rank, quantity=quantity, tensor=tensor, reference=left, candidate=right
    )


def _bits(record: StepRecord | InitialRecord, quantity: str) -> str:
    if isinstance(record, InitialRecord):
        return record.digests.get(quantity, "")
    if quantity == "loss":
        losses = (record.loss, *record.microbatch_losses)
        return " ".join(value.bits for value in losses if value is not None)
    if quantity == "grad_norm":
        return "" if record.grad_norm is None else record.grad_norm.bits
    return record.digests.get(quantity, "")
