"""Lays names that change from step to step over all steps of a rank's records.

A program that the harness did not write makes optimizer state in its first step, leaves gradients
out, adds parameters. Its rank says from which step on a group has which tensors (`NamesRecord`).
Here every step gets the tensors of all steps, in the order in which they first appear, with the
digest `ABSENT` for what it did not hold: so a tensor that one run has and another has not differs
like any other, at its step and under its name.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from harness.records import (
    ABSENT,
    DIGEST_GROUPS,
    DIGEST_HEX_CHARS,
    TAP_HEX_CHARS,
    InitialRecord,
    NamesRecord,
    RankRecords,
    RunResult,
    StepRecord,
)

Tensors = Mapping[str, Sequence[str]]


def with_all_names(records: RankRecords, names: Iterable[NamesRecord]) -> RankRecords:
    """The records with one list of names for all steps, in the start record.

    Lengths that do not fit the names become problems.
    """
    if records.start is None:
        return records
    ordered = sorted(names, key=lambda record: record.step)
    union: dict[str, dict[str, None]] = {group: {} for group in DIGEST_GROUPS}
    taps: dict[str, None] = {}
    for record in ordered:
        for group, held in record.tensors.items():
            union.setdefault(group, {}).update(dict.fromkeys(held))
        taps.update(dict.fromkeys(record.taps))
    whole = {group: tuple(held) for group, held in union.items()}
    problems: list[str] = []
    at = _NamesAt(ordered)
    initial = records.initial
    if initial is not None:
        now, _ = at(-1)
        digests = dict(_expanded(initial.digests, now, whole, problems, "the initial state"))
        initial = InitialRecord(rank=initial.rank, digests=digests, nonfinite=initial.nonfinite)
    steps = []
    for step in records.steps:
        now, now_taps = at(step.step)
        digests = dict(_expanded(step.digests, now, whole, problems, f"step {step.step}"))
        steps.append(
            dataclasses.replace(step, digests=digests, taps=_taps(step, now_taps, tuple(taps)))
        )
    start = dataclasses.replace(
        records.start, tensors=whole, taps=tuple(taps), tap_stages=(0,) * len(taps)
    )
    return dataclasses.replace(
        records, start=start, steps=tuple(steps), initial=initial,
        problems=(*records.problems, *problems[:8]),
    )  # fmt: skip


def aligned(*runs: RunResult) -> tuple[RunResult, ...]:
    """Runs of a program with the same names on each rank, in the order of the first run.

    Of two runs one may have from the start what the other makes in its first step.
    """
    if all(run.spec.is_builtin for run in runs):
        return runs
    union: dict[int, tuple[dict[str, dict[str, None]], dict[str, None]]] = {}
    for run in runs:
        for records in run.ranks:
            if records.start is not None:
                tensors, taps = union.setdefault(records.rank, ({}, {}))
                for group, names in records.start.tensors.items():
                    tensors.setdefault(group, {}).update(dict.fromkeys(names))
                taps.update(dict.fromkeys(records.start.taps))
    wholes = {
        rank: ({group: tuple(names) for group, names in tensors.items()}, tuple(taps))
        for rank, (tensors, taps) in union.items()
    }
    nothing: tuple[dict[str, tuple[str, ...]], tuple[str, ...]] = ({}, ())
    laid = [
        tuple(_laid_over(each, *wholes.get(each.rank, nothing)) for each in run.ranks)
        for run in runs
    ]
    return tuple(
        dataclasses.replace(run, ranks=ranks) for run, ranks in zip(runs, laid, strict=True)
    )


def _laid_over(
    records: RankRecords, whole: dict[str, tuple[str, ...]], taps: tuple[str, ...]
) -> RankRecords:
    start = records.start
    if start is None or (start.tensors, start.taps) == (whole, taps):
        return records
    problems: list[str] = []

    def laid(digests: Mapping[str, str]) -> dict[str, str]:
        return dict(_expanded(digests, start.tensors, whole, problems, ""))

    initial = records.initial
    return dataclasses.replace(
        records,
        start=dataclasses.replace(start, tensors=whole, taps=taps, tap_stages=(0,) * len(taps)),
        initial=None
        if initial is None
        else dataclasses.replace(initial, digests=laid(initial.digests)),
        steps=tuple(
            dataclasses.replace(
                step, digests=laid(step.digests), taps=_taps(step, start.taps, taps)
            )
            for step in records.steps
        ),
    )


class _NamesAt:
    """Names at a step; asked in the order of steps."""

    def __init__(self, ordered: Sequence[NamesRecord]) -> None:
        self._left = list(ordered)
        self._now: dict[str, Sequence[str]] = {}
        self._taps: Sequence[str] = ()

    def __call__(self, step: int) -> tuple[Tensors, Sequence[str]]:
        while self._left and self._left[0].step <= step:
            record = self._left.pop(0)
            self._now |= record.tensors
            self._taps = record.taps
        return self._now, self._taps


def _expanded(
    digests: Mapping[str, str], now: Tensors, whole: Tensors, problems: list[str], where: str
) -> Iterator[tuple[str, str]]:
    for group, names in whole.items():
        text, held = digests.get(group), now.get(group, ())
        if text is None:
            yield group, ABSENT * len(names)
        elif held == names and len(text) == DIGEST_HEX_CHARS * len(held):
            yield group, text
        else:
            if len(text) != DIGEST_HEX_CHARS * len(held):
                problems.append(
                    f"line 0: {where}: the digest of {group} has {len(text)} characters, expected "
                    f"{DIGEST_HEX_CHARS * len(held)} for {len(held)} tensors"
                )
            chunks = {
                name: text[i * DIGEST_HEX_CHARS : (i + 1) * DIGEST_HEX_CHARS]
                for i, name in enumerate(held)
            }
            yield group, "".join(chunks.get(name, ABSENT) for name in names)


def _taps(step: StepRecord, held: Sequence[str], whole: Sequence[str]) -> str:
    if tuple(held) == tuple(whole):
        return step.taps
    rows = {
        name: step.taps[i * TAP_HEX_CHARS : (i + 1) * TAP_HEX_CHARS] for i, name in enumerate(held)
    }
    return "".join(rows.get(name, "f" * TAP_HEX_CHARS) for name in whole)
