"""Records of a decoder of one layer, as two ranks would write them, and edits of one leg."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from harness.bisect.found import Location
from harness.records import (
    COPIES,
    DIGEST_HEX_CHARS,
    NEVER_RAN,
    SAMPLES,
    TAP_HEX_CHARS,
    FloatBits,
    RankRecords,
    RunResult,
    StepRecord,
)
from harness.store import CaseRuns
from tests.support import records
from tests.support.run_records import Lab, configured, digest_of, edit, edit_all

WEIGHTS = (
    "embedding.weight", "norm.weight", "layers.0.attn.norm.weight",
    "layers.0.attn.attention.wq.weight", "layers.0.attn.attention.wo.weight",
    "layers.1.attn.norm.weight", "head.weight",
)  # fmt: skip
BIAS = "layers.1.mlp.router.bias"
"""Moved by no gradient, as experts' biases are."""
TENSORS = {
    "grads": WEIGHTS,
    "weights": (*WEIGHTS, BIAS),
    "optim": (*(f"{name}.exp_avg" for name in WEIGHTS), "step_count"),
    "rng": ("cpu",),
    "buffers": ("layers.0.mlp.router.balance_loss",),
    COPIES: WEIGHTS,
    SAMPLES: ("tokens", "targets"),
}
# What each call handles, in program order: a tap and the value that goes through it.
FORWARD = (
    ("embedding:input", "tokens"), ("embedding:output", "x0"),
    ("layers.0:input", "x0"), ("layers.0.attn:input", "x0"),
    ("layers.0.attn.norm:input", "x0"), ("layers.0.attn.norm:output", "n0"),
    ("layers.0.attn.attention:input", "n0"),
    ("layers.0.attn.attention.wq:input", "n0"), ("layers.0.attn.attention.wq:output", "q0"),
    ("layers.0.attn.attention.wo:input", "c0"), ("layers.0.attn.attention.wo:output", "a0"),
    ("layers.0.attn.attention:output", "a0"), ("layers.0.attn:output", "x1"),
    ("layers.0:output", "x1"), ("norm:input", "x1"), ("norm:output", "y"),
    ("head:input", "y"), ("head:output", "z"),
)  # fmt: skip
BACKWARD = (
    ("head:gradient", "dz"), ("norm:gradient", "dy"), ("layers.0.attn:gradient", "dx1"),
    ("layers.0:gradient", "dx1"), ("layers.0.attn.attention.wo:gradient", "da0"),
    ("layers.0.attn.attention:gradient", "da0"), ("layers.0.attn.attention.wq:gradient", "dq0"),
    ("layers.0.attn.norm:gradient", "dn0"), ("embedding:gradient", "dx0"),
)  # fmt: skip
CALLS = FORWARD + BACKWARD
ROWS = tuple((tap, number) for tap, _ in CALLS for number in range(2))
STEPS, WORLD = 4, 2
Edit = Callable[[StepRecord], StepRecord]


def place_of(tap: str, number: int) -> int:
    """Place in a step in which microbatch 1 follows microbatch 0."""
    return number * len(CALLS) + [name for name, _ in CALLS].index(tap)


MODEL = Lab(
    tensors=TENSORS, through=dict(CALLS),
    taps={f"{tap}[{number}]": (0, place_of(tap, number)) for tap, number in ROWS},
)  # fmt: skip


def run_of(
    *, graph: tuple[str, ...] = (), replica: int = 0, taps: bool = True, captured_in: int = 0
) -> RunResult:
    """A whole run, whose graphs are captured in a step."""
    model = MODEL if taps else dataclasses.replace(MODEL, taps={})
    more: dict[str, Any] = {"taps": ["**:input", "**:output", "**:gradient"] if taps else []}
    more |= {"graph_warmup_steps": captured_in} if captured_in else {}
    return edit_all(model.run(model.spec(replica, graph, **more)), evaluation=records.ONE)


def foreign(run: RunResult, *, extra: bool = False, group: str = "ema") -> RunResult:
    """The run as one of somebody's program, with a group of its own, or one tensor more."""
    program = {"kind": "script", "target": "x.py", "folder": "/x", "record": "auto"}
    config = {"program": program, "steps": STEPS, "taps": []}
    run = dataclasses.replace(run, spec=dataclasses.replace(run.spec, config=config))
    names = {g if g != "buffers" else group: held for g, held in TENSORS.items()}
    names["weights"] += ("extra",) if extra else ()

    def renamed(record: Any) -> Any:
        held = {g if g != "buffers" else group: text for g, text in record.digests.items()}
        held["weights"] += "e" * DIGEST_HEX_CHARS if extra else ""
        return dataclasses.replace(record, digests=held)

    for rank, own in enumerate(run.ranks):
        steps = tuple(map(renamed, own.steps))
        run = of_rank(run, rank, tensors=names, steps=steps, initial=renamed(own.initial))
    return run


def tapped(
    run: RunResult, microbatches: int, rows: Mapping[str, str], *, stages: Sequence[int] = ()
) -> RunResult:
    """The run with these rows of taps in every step of every rank; without stages, of the first."""
    start = {"taps": tuple(rows), "tap_stages": tuple(stages) or (0,) * len(rows)}
    for rank in range(WORLD):
        run = edit(run, rank, start=start)
    return configured(edit_all(run, taps="".join(rows.values())), microbatches=microbatches)


def edited(run: RunResult, edits: dict[int, Edit], *, step: int = 2) -> RunResult:
    """The run with the records of one step changed, rank by rank."""

    def change(records: RankRecords) -> RankRecords:
        edit = edits.get(records.rank, lambda record: record)
        steps = tuple(edit(r) if r.step == step else r for r in records.steps)
        return dataclasses.replace(records, steps=steps)

    return dataclasses.replace(run, ranks=tuple(map(change, run.ranks)))


def calls_from(tap: str, number: int = 0) -> Edit:
    """A step in which this call, and all after it, saw something else."""
    first = place_of(tap, number)
    return other_calls([row for row in ROWS if place_of(*row) >= first])


def other_calls(rows: Collection[tuple[str, int]]) -> Edit:
    """A step in which these calls alone, each a tap and its number, saw something else."""
    return _calls(rows, lambda row: digest_of("other", row) + row[DIGEST_HEX_CHARS:])


def without_calls(rows: Collection[tuple[str, int]]) -> Edit:
    """A step in which these calls were never made."""
    return _calls(rows, lambda row: "0" * DIGEST_HEX_CHARS + NEVER_RAN)


def _calls(rows: Collection[tuple[str, int]], change: Callable[[str], str]) -> Edit:
    def edit(record: StepRecord) -> StepRecord:
        width = TAP_HEX_CHARS
        held = [record.taps[i : i + width] for i in range(0, len(record.taps), width)]
        pairs = zip(ROWS, held, strict=False)
        taps = "".join(change(row) if name in rows else row for name, row in pairs)
        return dataclasses.replace(record, taps=taps)

    return edit


def digests(**names: Collection[str]) -> Edit:
    """A step in which these tensors of each group have other digests."""

    def edit(record: StepRecord) -> StepRecord:
        found = dict(record.digests)
        for group, changed in names.items():
            parts = [found[group][i : i + 32] for i in range(0, len(found[group]), 32)]
            pairs = zip(parts, TENSORS[group], strict=True)
            found[group] = "".join(digest_of(p) if name in changed else p for p, name in pairs)
        return dataclasses.replace(record, digests=found)

    return edit


def floats(**values: Any) -> Edit:
    """A step with other losses or norm: whole fields of the record."""
    return lambda record: dataclasses.replace(record, **values)


def both(*edits: Edit) -> Edit:
    """One edit after the other."""
    return lambda record: functools.reduce(lambda each, edit: edit(each), edits, record)


def of_rank(run: RunResult, rank: int, **fields: Any) -> RunResult:
    """The run with fields of a rank's records replaced; of its start record by name of those."""
    named = [name for name in ("tensors", "taps", "environment") if name in fields]
    start = {name: fields.pop(name) for name in named}
    own = run.ranks[rank].start
    assert own is not None
    fields |= {"start": dataclasses.replace(own, **start)} if start else {}
    return edit(run, rank, **fields)


def case_of(candidate: RunResult, control: RunResult | None = None) -> CaseRuns:
    """A case whose reference is the plain run."""
    reference, control = run_of(), control or run_of(replica=1)
    specs = reference.spec, control.spec, candidate.spec
    case = records.case_spec("x", *specs, checks={"state": {}})
    return CaseRuns(case=case, reference=reference, control=control, candidate=candidate)


def fields_of(found: Location, expected: dict[str, Any]) -> dict[str, Any]:
    """What a place says of what is expected, to be compared with it."""
    return {name: getattr(found, name) for name in expected}


OTHER = FloatBits.from_bits(0x41414141)
