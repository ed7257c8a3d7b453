"""Is a run whole? Every rank, every step, every digest, and nothing else.

    outcome  ->  ranks  ->  one rank: start, problems, steps, end  ->  one step: digests, losses

The first flaw found is returned. Nothing is compared before both runs are known to be whole: a
missing step would otherwise be a step that did not differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fsdp_core.config import TrainConfig
from harness.checks.evidence import rank_table, show_ranks
from harness.checks.graph_proof import not_as_owed, not_compiled
from harness.checks.soaked import shortfall, steps_due
from harness.infrastructure import machine_failure
from harness.records import (
    ABSENT,
    DIGEST_GROUPS,
    DIGEST_HEX_CHARS,
    SCHEMA_VERSION,
    TAP_HEX_CHARS,
    Difference,
    RankExit,
    RankRecords,
    RunResult,
    StartRecord,
    StepRecord,
    What,
)
from harness.shared_gpus import SHARED_GPU

HEX_DIGITS = "0123456789abcdef"
PROVING_GROUPS = ("grads", "weights", "optim")
"""Digest groups that must cover at least one tensor of a run; it may hold no RNG."""
NO_BLAME: tuple[What, ...] = ("interrupted", "not_run", "unsupported", SHARED_GPU)
"""What may end a candidate's run through no fault of its own: no verdict rather than a failure."""
NO_STEP = (
    ": the recorder saw no step of a torch optimizer after a backward pass; "
    "say where steps are with `with recorder.step():` of harness.recorder.record"
)


@dataclass(frozen=True, kw_only=True)
class Flaw:
    """Why a run is not whole. None, or "" as `module`, where a field does not apply.

    Of `ranks` that share one flaw, `rank` is the lowest.
    """

    what: What
    message: str
    rank: int | None = None
    step: int | None = None
    difference: Difference | None = None
    module: str = ""
    ranks: tuple[int, ...] = ()


def failure_of_machine(run: RunResult, flaw: Flaw) -> str:
    """Name of the machine's failure that crashed a run, else ""; who hung alone knows why."""
    return machine_failure(run) if flaw.what == "crashed" else ""


def find_flaw(run: RunResult) -> Flaw | None:
    """The first reason why `run` must not be compared, or None if it is whole."""
    return _outcome_flaw(run) or _ranks_flaw(run) or _records_flaw(run) or _exit_flaw(run)


def _outcome_flaw(run: RunResult) -> Flaw | None:
    outcome = run.outcome
    if outcome.key != run.spec.key:
        return Flaw(
            what="corrupt_record",
            message=f"the outcome belongs to run {outcome.key}, expected {run.spec.key}",
        )
    if outcome.undecided:
        how = f"ended as {outcome.what}" if outcome.what else "then finished alone"
        told = f"the run shared a GPU under MPS and {how}: --resume finds out whose doing that was"
        return Flaw(what=SHARED_GPU, message=told)
    if outcome.what:
        message = outcome.message or f"the run ended as {outcome.what}"
        return Flaw(what=outcome.what, message=message, rank=outcome.culprit_rank)
    return None


def _ranks_flaw(run: RunResult) -> Flaw | None:
    expected = set(range(run.spec.world_size))
    if not expected:
        return Flaw(what="empty_run", message="the run has no ranks")
    numbers = [records.rank for records in run.ranks]
    if not any(r.steps or r.problems or r.error for r in run.ranks):
        told = "" if run.spec.is_builtin else NO_STEP
        return Flaw(what="empty_run", message=f"no rank recorded a step{told}")
    if len(set(numbers)) != len(numbers) or set(numbers) - expected:
        return Flaw(
            what="corrupt_record",
            message=f"expected records of ranks 0 to {run.spec.world_size - 1} once, got {numbers}",
        )
    silent = {r.rank for r in run.ranks if not (r.start or r.steps or r.problems or r.error)}
    if missing := sorted((expected - set(numbers)) | silent):
        rank = missing[0]
        return Flaw(
            what="missing_rank",
            message=f"no records of rank {rank} ({len(missing)} of {len(expected)} ranks missing)",
            rank=rank,
        )
    return None


def _records_flaw(run: RunResult) -> Flaw | None:
    config = run.spec.config
    steps, microbatches = config.get("steps"), config.get("microbatches")
    stated = {"steps": steps} | ({"microbatches": microbatches} if run.spec.is_builtin else {})
    for name, value in stated.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            return Flaw(
                what="corrupt_record",
                message=f"the specification's {name}: expected an integer >= 1, got {value!r}",
            )
    steps = steps_due(run)
    assert steps is not None
    assert isinstance(microbatches, int | None)
    key = run.spec.recorded or run.spec.key
    # Folders of the built-in trainer may be older than its records of that state.
    owes_initial = not run.spec.is_builtin or any(r.initial is not None for r in run.ranks)
    for records in rank_table(run).values():
        flaw = _rank_flaw(records, key, run.spec.world_size, steps, microbatches)
        if flaw is None and run.spec.is_builtin:
            flaw = _replays_flaw(records, config, steps)
        if flaw is None and owes_initial and records.initial is None:
            message = f"rank {records.rank} has no record of the state before step 0"
            flaw = Flaw(what="corrupt_record", message=message, rank=records.rank)
        if flaw is not None:
            return _of_all(flaw, run, steps) if flaw.what == "missing_step" else flaw
    if (short := shortfall(run)) is not None:
        what, message, rank = short
        return Flaw(what=what, message=message, rank=rank)
    return _proof_flaw(run)


def _replays_flaw(records: RankRecords, config: Mapping[str, object], steps: int) -> Flaw | None:
    """A graphed leg that never replayed, or an eager one that did, would agree by testing nothing.

    What is captured of each layer replays in every step after the warm-up, in every microbatch.
    """
    assert records.end is not None
    end, rank = records.end, records.rank
    # Nothing is owed by an eager run, whatever else its configuration says.
    owes = config.get("graph") or config.get("compile")
    try:
        run = TrainConfig.from_dict(config if owes else {"graph": ()})
    except (ValueError, TypeError) as error:
        return Flaw(what="corrupt_record", message=f"the specification's config: {error}")
    what: What = "not_compiled"
    short = not_compiled(run, rank, end)
    if short is None:
        what, short = "not_replayed", not_as_owed(run, rank, steps, end)
    if short is None:
        return None
    return Flaw(
        what=what, message=f"rank {rank}: {short.message}", rank=rank,
        difference=short.difference, module=short.module,
    )  # fmt: skip


def _proof_flaw(run: RunResult) -> Flaw | None:
    """A rank may own no row of a small model; all of them together must own some."""
    for group in PROVING_GROUPS:
        if not any(_holds(records, group) for records in run.ranks):
            return Flaw(
                what="empty_run",
                message=f"no rank digests a tensor of {group}: empty digests prove nothing",
            )
    return None


def _holds(records: RankRecords, group: str) -> bool:
    """Whether a rank digests a tensor of a group in any step."""
    if records.start is None or not records.start.tensors[group]:
        return False
    return any(record.digests[group].replace(ABSENT, "") for record in records.steps)


def _rank_flaw(
    records: RankRecords, key: str, world_size: int, steps: int, microbatches: int | None
) -> Flaw | None:
    flaw = _lines_flaw(records) or _start_flaw(records, key, world_size)
    if flaw is not None:
        return flaw
    flaw = _sequence_flaw(records, steps) or _end_flaw(records, steps)
    if flaw is not None:
        return flaw
    assert records.start is not None
    for record in records.steps:
        flaw = _step_flaw(record, records.rank, records.start, microbatches)
        if flaw is not None:
            return flaw
    return None


def _lines_flaw(records: RankRecords) -> Flaw | None:
    rank = records.rank
    # A line after the end may be out of sequence too; what it says of itself comes first.
    for problem in (*records.after_end, *records.problems):
        return Flaw(
            what="record_after_end" if records.after_end else "corrupt_record",
            message=f"rank {rank}: {problem}",
            rank=rank,
        )
    if records.error is not None:
        if records.end is not None:
            return Flaw(
                what="record_after_end",
                message=f"rank {rank} recorded both an error and an end",
                rank=rank,
                step=records.error.step,
            )
        return Flaw(
            what=records.error.what or "crashed",
            message=f"rank {rank}, step {records.error.step}: "
            f"{records.error.type}: {records.error.message}",
            rank=rank,
            step=records.error.step,
        )
    return None


def _start_flaw(records: RankRecords, key: str, world_size: int) -> Flaw | None:
    rank, start = records.rank, records.start
    if start is None:
        return Flaw(what="corrupt_record", message=f"rank {rank} has no start record", rank=rank)
    facts = (
        ("schema", start.schema, SCHEMA_VERSION),
        ("rank", start.rank, rank),
        ("world_size", start.world_size, world_size),
        ("run", start.run or key, key),
    )
    for name, got, expected in facts:
        if got != expected:
            return Flaw(
                what="corrupt_record",
                message=f"rank {rank} start record, {name}: expected {expected}, got {got}",
                rank=rank,
            )
    if not set(start.tensors) >= set(DIGEST_GROUPS):
        return Flaw(
            what="corrupt_record",
            message=f"rank {rank} names tensors of {sorted(start.tensors)}, "
            f"expected {sorted(DIGEST_GROUPS)}",
            rank=rank,
        )
    if len(start.taps) != len(start.tap_stages):
        return Flaw(
            what="corrupt_record",
            message=f"rank {rank} names {len(start.taps)} taps and {len(start.tap_stages)} stages "
            "of them",
            rank=rank,
        )
    return None


def _sequence_flaw(records: RankRecords, steps: int) -> Flaw | None:
    rank, seen = records.rank, [record.step for record in records.steps]
    if len(seen) == steps and seen == list(range(steps)):
        return None
    # Never by the steps that are due: a forged plan may ask for any number.
    found = {step for step in seen if 0 <= step < steps}
    if len(found) < steps:
        first = next(step for step in range(steps) if step not in found)
        return Flaw(
            what="missing_step",
            message=f"rank {rank} has no record of step {first} "
            f"({steps - len(found)} of {steps} steps missing)",
            rank=rank,
            step=first,
        )
    extra = sorted(set(seen) - found)
    if extra:
        return Flaw(
            what="record_after_end",
            message=f"rank {rank} recorded step {extra[0]}, the run ends with step {steps - 1}",
            rank=rank,
            step=extra[0],
        )
    place = next(i for i, step in enumerate(seen) if step != i)
    return Flaw(
        what="corrupt_record",
        message=f"rank {rank}: expected step {place} next, got step {seen[place]}",
        rank=rank,
        step=seen[place],
    )


def _of_all(flaw: Flaw, run: RunResult, steps: int) -> Flaw:
    """A missing step with all ranks that lack the same one, and how those exited."""
    lack = [(records.rank, _sequence_flaw(records, steps)) for records in run.ranks]
    ranks = tuple(sorted(rank for rank, own in lack if own is not None and own.step == flaw.step))
    left = {each.rank for each in run.outcome.ranks if each.code == 0}
    left -= {records.rank for records in run.ranks if records.end is not None}
    message = flaw.message
    if len(ranks) > 1:
        message = f"{show_ranks(set(ranks))} have no record of step {flaw.step} of {steps} steps"
    if left >= set(ranks):
        message += ", exited with code 0 without an end record"
    return replace(flaw, ranks=ranks, message=message)


def _end_flaw(records: RankRecords, steps: int) -> Flaw | None:
    rank, end = records.rank, records.end
    if end is None:
        return Flaw(
            what="corrupt_record",
            message=f"rank {rank} has no end record: its file stops after step {steps - 1}",
            rank=rank,
        )
    for name, got, expected in (("rank", end.rank, rank), ("steps", end.steps, steps)):
        if got != expected:
            return Flaw(
                what="corrupt_record",
                message=f"rank {rank} end record, {name}: expected {expected}, got {got}",
                rank=rank,
            )
    return None


def _step_flaw(
    record: StepRecord, rank: int, start: StartRecord, microbatches: int | None
) -> Flaw | None:
    def flaw(message: str) -> Flaw:
        return Flaw(
            what="corrupt_record",
            message=f"rank {rank}, step {record.step}: {message}",
            rank=rank,
            step=record.step,
        )

    if record.rank != rank:
        return flaw(f"the record says rank {record.rank}")
    if microbatches is not None and len(record.microbatch_losses) != microbatches:
        return flaw(
            f"expected {microbatches} microbatch losses, got {len(record.microbatch_losses)}"
        )
    if wrong := _digests_wrong(record, start):
        return flaw(wrong)
    return None


def _digests_wrong(record: StepRecord, start: StartRecord) -> str:
    """What is wrong with the digests of a step, in words; '' if nothing is."""
    if set(record.digests) != set(start.tensors):
        return f"digests of {sorted(record.digests)}, expected {sorted(start.tensors)}"
    for group, names in start.tensors.items():
        text = record.digests[group]
        if len(text) != DIGEST_HEX_CHARS * len(names):
            return (
                f"the digest of {group} has {len(text)} characters, "
                f"expected {DIGEST_HEX_CHARS * len(names)} for {len(names)} tensors"
            )
        # Stripping both ends leaves nothing exactly when every character is a hex digit.
        if text.strip(HEX_DIGITS):
            return f"the digest of {group} is not lower-case hex"
    if len(record.taps) != TAP_HEX_CHARS * len(start.taps):
        return (
            f"the taps have {len(record.taps)} characters, "
            f"expected {TAP_HEX_CHARS * len(start.taps)} for {len(start.taps)} rows"
        )
    return "the taps are not lower-case hex" if record.taps.strip(HEX_DIGITS) else ""


def _exit_flaw(run: RunResult) -> Flaw | None:
    exits: dict[int, RankExit] = {}
    for state in run.outcome.ranks:
        if state.rank in exits or not 0 <= state.rank < run.spec.world_size:
            return Flaw(
                what="corrupt_record",
                message=f"the outcome names rank {state.rank} twice or out of range",
                rank=state.rank,
            )
        exits[state.rank] = state
    for rank in range(run.spec.world_size):
        if rank not in exits or exits[rank].code is None:
            return Flaw(what="missing_rank", message=f"rank {rank} has no exit state", rank=rank)
        code = exits[rank].code
        if code != 0:
            return Flaw(
                what="crashed" if code is not None and code > 0 else "killed",
                message=f"rank {rank} exited with {code} after its last record",
                rank=rank,
            )
    return None
