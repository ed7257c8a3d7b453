"""The step in which a run stopped, as far as it came: calls that its ranks digested before the end.

A rank that fails writes the rows of taps that it has (`UNFINISHED`). Held against the step of the
reference, with what was not reached counted as equal, they say whether the run had gone wrong
before it stopped: a crash in the backward pass may come from the forward pass.
"""

from collections.abc import Iterator
from dataclasses import replace

from harness.bisector.divergence import where_they_part
from harness.bisector.found import Location
from harness.bisector.legs import Legs
from harness.checks.evidence import rank_table, step_table
from harness.records import (
    DIGEST_HEX_CHARS,
    NEVER_RAN,
    TAP_HEX_CHARS,
    UNFINISHED,
    RankRecords,
    RunResult,
)


def parted_before_the_end(
    reference: RunResult, candidate: RunResult, ended: Location
) -> Location | None:
    """Where the step that did not end left its reference; None if it did not, or nobody looked.

    Nothing is said of the step that captures: warm-ups and captures run the same calls.
    """
    config, step = candidate.spec.config, ended.step
    if step is None or (config.get("graph") and step <= config.get("graph_warmup_steps", 0)):
        return None
    whole = step_table(reference)
    ranks = []
    for rank, records in rank_table(candidate).items():
        rows, ours = _rows(records, step), whole.get((step, rank))
        if ours is not None and records.start is not None and rows:
            taps = "".join(_known(rows, ours.taps, records.start.taps))
            if len(taps) == len(ours.taps):
                records = replace(records, steps=(*records.steps, replace(ours, taps=taps)))
        ranks.append(records)
    parted = where_they_part(Legs(reference, replace(candidate, ranks=tuple(ranks))))
    return parted if parted is not None and parted.step == step else None


def _rows(records: RankRecords, step: int) -> list[str]:
    for event in records.events:
        if event.name == UNFINISHED and event.step == step:
            text = event.detail.get("taps")
            if isinstance(text, str):
                return [text[i : i + TAP_HEX_CHARS] for i in range(0, len(text), TAP_HEX_CHARS)]
    return []


def _known(rows: list[str], reference: str, names: tuple[str, ...]) -> Iterator[str]:
    """Each row that ran; in the place of one that did not, that of the reference.

    So is the last of each tap, into which calls that have no row of their own are folded: it may
    lack some.
    """
    taps = [name.rpartition("[")[0] for name in names]
    for number, row in enumerate(rows):
        ran = row[DIGEST_HEX_CHARS:] != NEVER_RAN
        is_last = number + 1 >= len(taps) or taps[number + 1] != taps[number]
        theirs = reference[number * TAP_HEX_CHARS : (number + 1) * TAP_HEX_CHARS]
        yield row if ran and not is_last else theirs
