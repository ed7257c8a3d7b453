"""What ranks say of whose their memory is: a limit as a formula over it, and a peak explained.

Both read the event `memory` that every rank writes at its end. A formula's sizes are those of the
same rank of the reference: a candidate that keeps more must not raise its own limit.
"""

from collections.abc import Mapping
from typing import Any

from harness.checks.answer import error, failed, passed
from harness.checks.evidence import rank_table
from harness.checks.limits import FORMULA_NAMES, evaluate
from harness.records import CheckResult, RankRecords, RunResult

NAME = "peak_memory"
EVENT = "memory"
MIB = 1 << 20
SMALL_BYTES = 16 * MIB
"""What may stay unexplained of any peak, however small."""
_AT_REST = FORMULA_NAMES[:4]
_OF_RUN = ("microbatches", "micro_batch_size")


def memory_notes(records: RankRecords) -> Mapping[str, Any]:
    """What the rank's event `memory` holds; empty if it wrote none."""
    return next((event.detail for event in records.events if event.name == EVENT), {})


def limits_of(formula: str, reference: RunResult, peaks: Mapping[int, int]) -> dict[int, float]:
    """What the formula allows each rank, in bytes.

    Args:
        peaks: of the reference, by rank.

    Raises:
        ValueError: a rank of the reference did not say what it keeps, or no finite limit > 0.
    """
    config = reference.spec.config
    model = config.get("model", {})
    sizes = {name: config[name] for name in _OF_RUN if name in config}
    sizes |= {name: model[name] for name in FORMULA_NAMES if name in model}
    sizes["world_size"] = reference.spec.world_size
    limits = {}
    for rank, records in rank_table(reference).items():
        kept = memory_notes(records).get("at_rest")
        if not isinstance(kept, Mapping) or not all(_is_count(kept.get(n)) for n in _AT_REST):
            raise ValueError(f"Expected what rank {rank} of the reference keeps, it did not say.")
        mine = {name: kept[name] for name in _AT_REST} | {"reference": peaks.get(rank, 0)}
        limits[rank] = evaluate(formula, sizes | mine)
        if limits[rank] <= 0:
            raise ValueError(f"Expected a limit > 0 for rank {rank}, got {limits[rank]:g}.")
    return limits


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def explained(candidate: RunResult, max_part: float, peaks: Mapping[int, int]) -> CheckResult:
    """Whether every rank knows whose its peak was, but for a part of it or 16 MiB.

    Args:
        max_part: of the rank's peak.
        peaks: that the ranks recorded: what was not even seen as it came has no owner either.
    """
    told = {rank: _told(records) for rank, records in rank_table(candidate).items()}
    owners = {rank: each for rank, each in told.items() if each is not None}
    if not owners or len(owners) < len(told):
        silent = ", ".join(str(rank) for rank in told if rank not in owners) or "none"
        return error(NAME, "not_run", f"ranks that did not say whose their peak was: {silent}")
    rests = {
        rank: abs(mine["rest"]) + abs(peaks[rank] - sum(mine.values()))
        for rank, mine in owners.items()
    }
    allowed = {rank: max(max_part * peaks[rank], SMALL_BYTES) for rank in owners}
    # Not the largest rest: a smaller one may be more of a smaller peak.
    worst = max(owners, key=lambda rank: (rests[rank] - allowed[rank], -rank))
    mine = owners[worst]
    largest = sorted(mine.items(), key=lambda item: (-item[1], item[0]))
    shares = ", ".join(f"{name} {value / MIB:.1f}" for name, value in largest if value)
    message = (
        f"of the peak of rank {worst}, {peaks[worst] / MIB:.1f} MiB, {rests[worst] / MIB:.1f} MiB "
        f"have no owner, limit {allowed[worst] / MIB:.1f}; in MiB: {shares}"
    )
    figures = {f"{name.replace(' ', '_')}_bytes": float(value) for name, value in mine.items()}
    figures["unexplained_bytes"] = float(rests[worst])
    if rests[worst] <= allowed[worst]:
        return passed(NAME, message, **figures)
    listed = memory_notes(rank_table(candidate)[worst])["explained"].get("largest_rest", ())
    places = ", ".join(str(place) for place, _ in listed[:3]) or "the allocator"
    message += f"; asked for by {places}"
    return failed(NAME, "memory_regression", message, None, **figures)


def _told(records: RankRecords) -> dict[str, int] | None:
    """Bytes of each owner at the rank's peak; None if it did not say, or they do not add up."""
    told = memory_notes(records).get("explained")
    owners = told.get("owners") if isinstance(told, Mapping) else None
    if not isinstance(told, Mapping) or not isinstance(owners, Mapping) or "rest" not in owners:
        return None
    found = {str(name): n for name, n in owners.items() if type(n) is int}
    is_whole = len(found) == len(owners) and sum(found.values()) == told.get("peak_bytes")
    return found if is_whole else None
