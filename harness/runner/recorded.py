"""A run that was recorded by hand: what lies in its folder, and how it becomes a run to judge.

    spec.json         the command; world size, device and steps as far as known when it was started
    rankN.jsonl       the records of each rank, written by the ranks themselves
    part-N.json       how one of several `harness wrap` of the same job ended
    outcome.json      what became of the whole run

That is the form of a run inside of a run folder, so any of those can be read here, too.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.engine.evidence import last_place, place_path
from harness.engine.outcome import RankEvidence, classify, ending_of
from harness.errors import UsageError
from harness.records import RankExit, RecordError, RunOutcome, RunResult, RunSpec, dumps
from harness.store import OUTCOME_FILE, SPEC_FILE, load_run_folder, sealed_outcome
from harness.store.files import read_object, told, write_atomic, write_object, write_once
from harness.store.streams import rank_path, read_rank, read_start
from harness.values import Json

UNKNOWN_SIZE = 0
"""World size in the specification of a run whose ranks have not said it yet."""


@dataclass(frozen=True, kw_only=True)
class Part(Json):
    """What one `harness wrap` saw of a run: `code` is the command's, negative for a signal.

    `exits` are codes of ranks on its machine that it could see, by rank as text, `order` the ranks
    that failed, as it saw them end, `stopped_by` the signal that it passed on to stop it, or 0.
    """

    code: int
    exits: dict[str, int] = field(default_factory=dict)
    order: tuple[int, ...] = ()
    stopped_by: int = 0
    started_unix_s: float = 0.0
    wall_s: float = 0.0


def _read_spec(folder: Path) -> RunSpec:
    """The specification of a recorded run, completed by what its ranks say of themselves."""
    if not (folder / SPEC_FILE).is_file():
        raise UsageError(f"{folder}: expected the folder of one run, as RUN/runs/KEY; it has no "
                         f"{SPEC_FILE}")  # fmt: skip
    try:
        spec = RunSpec.from_json(read_object(folder / SPEC_FILE, sealed=False))
    except (OSError, RecordError) as error:
        raise UsageError(f"{folder / SPEC_FILE}: {told(error)}") from error
    return _completed(folder, replace(spec, recorded=spec.recorded or spec.key))


def _completed(folder: Path, spec: RunSpec) -> RunSpec:
    """`spec` with the world size and device that the first of its ranks has recorded, if any."""
    starts = [start for path in folder.glob("rank*.jsonl") if (start := read_start(path))]
    if spec.world_size != UNKNOWN_SIZE or not starts:
        return spec
    first = min(starts, key=lambda start: start.rank)
    spec = replace(spec, world_size=first.world_size)
    return replace(spec, device="cuda") if first.device == "cuda" else spec


def load(folder: Path) -> RunResult:
    """A recorded run as the checks see it, in whatever state its files are (`UsageError`: none)."""
    spec = _read_spec(folder)
    if spec.world_size == UNKNOWN_SIZE:
        raise UsageError(f"{folder}: expected a recorded run, no rank of it has recorded anything")
    return load_run_folder(folder, spec)


def with_steps(run: RunResult, steps: int) -> RunResult:
    """The run, with this number of steps if its specification says none."""
    return renamed(run, config={"steps": steps} | run.spec.config)


def renamed(run: RunResult, **changes: Any) -> RunResult:
    """The run with another specification, under the key that this gives."""
    spec = replace(run.spec, **changes)
    return replace(run, spec=spec, outcome=replace(run.outcome, key=spec.key))


def steps_on_rank_0(run: RunResult) -> int:
    """Steps that rank 0 recorded."""
    return next((len(records.steps) for records in run.ranks if records.rank == 0), 0)


def begin(folder: Path, spec: RunSpec, *, is_joint: bool) -> None:
    """Make the folder of a run and its specification; of a joint one, if it is not there yet.

    Raises `UsageError` if it holds something else, `Infrastructure` if it cannot be written.
    """
    refused = UsageError(f"--out {folder}: expected a new or empty folder, it holds other files")
    with suppress(FileNotFoundError):
        if not is_joint and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise refused
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}") from error
    if not write_once(folder / SPEC_FILE, dumps(spec) + "\n"):
        same = is_joint and _read_spec(folder).recorded == spec.recorded
        if not same or (folder / OUTCOME_FILE).exists():
            raise refused


def finish(folder: Path, spec: RunSpec, part: Part, *, index: int, parts: int) -> RunResult | None:
    """Store what process `index` of `parts` saw; the last one says what became of the run.

    Returns the run, None if others have not ended yet or no rank has recorded anything.
    """
    write_object(folder / f"part-{index}.json", part)
    seen = [folder / f"part-{number}.json" for number in range(parts)]
    spec = _completed(folder, spec)
    if not all(path.exists() for path in seen) or spec.world_size == UNKNOWN_SIZE:
        return None
    outcome = _conclude(folder, spec, [Part.from_json(read_object(path)) for path in seen])
    write_atomic(folder / SPEC_FILE, dumps(spec) + "\n")  # of all parts the same
    if not write_once(folder / OUTCOME_FILE, sealed_outcome(folder, outcome)):
        return None
    for rank in range(0 if outcome.what else spec.world_size):
        place_path(folder, rank).unlink(missing_ok=True)  # a run that ended well needs none
    return load(folder)


def _conclude(folder: Path, spec: RunSpec, parts: Sequence[Part]) -> RunOutcome:
    """What became of a run, from its records and what was seen of its processes."""
    code = next((part.code for part in parts if part.code), 0)
    command_ended = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
    seen = {int(rank): known for part in parts for rank, known in part.exits.items()}
    order, ranks = [rank for part in parts for rank in part.order], []
    for rank in range(spec.world_size):
        records = read_rank(rank_path(folder, rank), rank)
        usual = 1 if records.error is not None else 0 if records.end is not None else code
        failed_at = float(order.index(rank)) if rank in order else None
        exit = RankExit(rank=rank, code=seen.get(rank, usual), failed_at=failed_at)
        ranks.append(RankEvidence(exit=exit, records=records, place=last_place(folder, rank)))
    answer = classify(ranks)
    what, message, culprit, _ = answer
    if culprit is not None and ranks[culprit].silent and culprit not in seen:
        # The code is that of the command: nobody saw the rank's own.
        message = f"rank {culprit} ended without an end record; the command {command_ended}"
    if not what and code:
        what = "crashed"
        message = f"the command {command_ended} although every rank ended well"
    if what and (stopped_by := next((p.stopped_by for p in parts if p.stopped_by), 0)):
        what, message = "interrupted", f"harness wrap was sent signal {stopped_by}: {message}"
    return RunOutcome(
        key=spec.recorded, what=what, message=message, culprit_rank=culprit,
        ranks=tuple(rank.exit for rank in ranks),
        started_unix_s=min(part.started_unix_s for part in parts),
        wall_s=max(part.wall_s for part in parts), ending=ending_of(answer, ranks),
    )  # fmt: skip
