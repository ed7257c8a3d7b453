"""Records of a decoder of one layer, as two ranks would write them, and edits of one leg.

Every call's digest is that of the value it handles, so that what one module returns and the next is
given are equal, as in a real run.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from fsdp_core.config import TrainConfig
from harness.bisect.found import Location
from harness.checks.complete import launches, owed
from harness.checks.evidence import BEFORE
from harness.records import (
    COPIES,
    DIGEST_HEX_CHARS,
    NEVER_RAN,
    SAMPLES,
    TAP_HEX_CHARS,
    CaseSpec,
    EndRecord,
    FloatBits,
    InitialRecord,
    RankExit,
    RankRecords,
    RunOutcome,
    RunResult,
    RunSpec,
    StartRecord,
    StepRecord,
)
from harness.store import CaseRuns

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


def _md5(*words: object) -> str:
    return hashlib.md5("/".join(map(str, words)).encode()).hexdigest()


def step_record(rank: int, step: int) -> StepRecord:
    """One whole record."""
    values = dict(CALLS)
    return StepRecord(
        step=step, rank=rank, loss=FloatBits.from_bits(0x40000000 + step),
        microbatch_losses=tuple(FloatBits.from_bits(0x40000100 + 2 * step + n) for n in range(2)),
        grad_norm=FloatBits.from_bits(0x3F000000 + step),
        digests={g: "".join(_md5(g, n, rank, step) for n in names) for g, names in TENSORS.items()},
        nonfinite=dict.fromkeys(TENSORS, ()), step_s=0.01, live_bytes=1, peak_bytes=1,
        taps="".join(
            _md5(values[tap], number, rank, step) + f"{place_of(tap, number):08x}"
            for tap, number in ROWS
        ),
    )  # fmt: skip


def initial_record(rank: int) -> InitialRecord:
    """The state before the first step, which has no gradients."""
    digests = {
        group: "".join(_md5(group, name, rank, BEFORE) for name in TENSORS[group])
        for group in ("weights", "optim", "rng")
    }
    return InitialRecord(rank=rank, digests=digests, nonfinite={})


def run_of(
    *, graph: tuple[str, ...] = (), replica: int = 0, taps: bool = True, captured_in: int = 0
) -> RunResult:
    """A whole run, whose graphs are captured in a step."""
    patterns = ["**:input", "**:output", "**:gradient"] if taps else []
    spec = RunSpec(
        config={"steps": STEPS, "microbatches": 2, "graph": list(graph), "taps": patterns}
        | ({"graph_warmup_steps": captured_in} if captured_in else {}),
        device="cpu", world_size=WORLD, timeout_s=60.0, replica=replica,
    )  # fmt: skip
    return RunResult(
        spec=spec,
        outcome=RunOutcome(
            key=spec.key, what="", message="", culprit_rank=None, started_unix_s=0.0, wall_s=1.0,
            ranks=tuple(RankExit(rank=rank, code=0) for rank in range(WORLD)),
        ),
        ranks=tuple(_rank(rank, spec, taps=taps) for rank in range(WORLD)),
    )  # fmt: skip


def _rank(rank: int, spec: RunSpec, *, taps: bool) -> RankRecords:
    steps = tuple(step_record(rank, step) for step in range(STEPS))
    if not taps:
        steps = tuple(dataclasses.replace(record, taps="") for record in steps)
    graph = {"graph": spec.config["graph"], "steps": STEPS, "microbatches": 2}
    graphs = tuple(owed(TrainConfig.from_dict(graph), rank, STEPS))
    return RankRecords(
        rank=rank,
        start=StartRecord(
            schema=1, run=spec.key, rank=rank, world_size=WORLD, pid=1, device="cpu",
            tensors=dict(TENSORS), environment={"fingerprint": {"torch": "x"}},
            taps=tuple(f"{tap}[{number}]" for tap, number in ROWS) if taps else (),
            tap_stages=(0,) * len(ROWS) if taps else (),
        ),
        steps=steps, events=(), error=None, problems=(),
        end=EndRecord(
            rank=rank, steps=STEPS, peak_bytes=1, startup_s=0.1, wall_s=1.0,
            replays=launches(graphs), graphs=graphs,
        ),
        initial=initial_record(rank),
    )  # fmt: skip


def tapped(
    run: RunResult, microbatches: int, rows: Mapping[str, str], *, stages: Sequence[int] = ()
) -> RunResult:
    """The run with these rows of taps in every step of every rank; without stages, of the first."""

    def change(records: RankRecords) -> RankRecords:
        assert records.start is not None
        start = dataclasses.replace(
            records.start, taps=tuple(rows), tap_stages=tuple(stages) or (0,) * len(rows)
        )
        text = "".join(rows.values())
        steps = tuple(dataclasses.replace(step, taps=text) for step in records.steps)
        return dataclasses.replace(records, start=start, steps=steps)

    spec = dataclasses.replace(run.spec, config={**run.spec.config, "microbatches": microbatches})
    return dataclasses.replace(run, spec=spec, ranks=tuple(map(change, run.ranks)))


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
    return _calls(rows, lambda row: _md5("other", row) + row[DIGEST_HEX_CHARS:])


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
            found[group] = "".join(_md5(p) if name in changed else p for p, name in pairs)
        return dataclasses.replace(record, digests=found)

    return edit


def floats(**values: Any) -> Edit:
    """A step with other losses or norm: whole fields of the record."""
    return lambda record: dataclasses.replace(record, **values)


def both(*edits: Edit) -> Edit:
    """One edit after the other."""

    def edit(record: StepRecord) -> StepRecord:
        for each in edits:
            record = each(record)
        return record

    return edit


def of_rank(run: RunResult, rank: int, **fields: Any) -> RunResult:
    """The run with fields of a rank's records replaced; of its start record by name of those."""
    ranks = list(run.ranks)
    start = {name: fields.pop(name) for name in ("tensors", "environment") if name in fields}
    own = ranks[rank]
    assert own.start is not None
    fields |= {"start": dataclasses.replace(own.start, **start)} if start else {}
    ranks[rank] = dataclasses.replace(own, **fields)
    return dataclasses.replace(run, ranks=tuple(ranks))


def case_of(candidate: RunResult, control: RunResult | None = None) -> CaseRuns:
    """A case whose reference is the plain run."""
    reference, control = run_of(), control or run_of(replica=1)
    case = CaseSpec(
        id="x", scenario="s", labels={}, reference=reference.spec, control=control.spec,
        candidate=candidate.spec, expect="bitwise", checks={"state": {}},
    )  # fmt: skip
    return CaseRuns(case=case, reference=reference, control=control, candidate=candidate)


def fields_of(found: Location, expected: dict[str, Any]) -> dict[str, Any]:
    """What a place says of what is expected, to be compared with it."""
    return {name: getattr(found, name) for name in expected}


OTHER = FloatBits.from_bits(0x41414141)
