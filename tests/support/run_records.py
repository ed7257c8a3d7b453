"""Whole synthetic runs, and edits of one record, so that a test states only what is wrong."""

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fsdp_core.config import ParallelConfig, TrainConfig
from harness.checks import CHECKS, judge
from harness.checks.complete import Flaw, find_flaw, launches, owed
from harness.checks.evidence import BEFORE, Runs
from harness.records import (
    SCHEMA_VERSION,
    CaseSpec,
    CheckResult,
    EndRecord,
    EventRecord,
    FloatBits,
    InitialRecord,
    RankExit,
    RankRecords,
    RunOutcome,
    RunResult,
    RunSpec,
    StartRecord,
    StepRecord,
    Verdict,
)

TENSORS = {
    "samples": ("tokens", "targets"),
    "grads": ("embed.weight", "head.weight"),
    "weights": ("embed.weight", "head.weight"),
    "optim": ("embed.weight.exp_avg", "head.weight.exp_avg"),
    "rng": ("cpu",),
}
TAPS = {
    # name of the row: (stage, place in the step)
    "layers.0.attn:output[0]": (0, 0), "layers.0.attn:output[1]": (0, 4),
    "layers.1.attn:output[0]": (1, 1), "layers.1.attn:output[1]": (1, 5),
    "layers.0.attn:gradient[0]": (0, 3), "layers.0.attn:gradient[1]": (0, 7),
    "layers.1.attn:gradient[0]": (1, 2), "layers.1.attn:gradient[1]": (1, 6),
}  # fmt: skip
STATE = ("weights", "optim", "rng")
"""Groups that there are before the first step."""
Edit = Callable[[RunResult], RunResult]
NAN, INF = FloatBits.from_bits(0x7FC00000), FloatBits.from_bits(0xFF800000)


def f32(number: float) -> FloatBits:
    """A float32 as it is recorded."""
    return FloatBits.from_bits(struct.unpack(">I", struct.pack(">f", number))[0])


def digest_of(*words: object) -> str:
    return hashlib.md5("/".join(map(str, words)).encode()).hexdigest()


def digests_of(group: str, rank: int, step: int, names: Iterable[str] = ()) -> str:
    """Of a group's tensors, in a whole run."""
    return "".join(digest_of(group, name, rank, step) for name in names or TENSORS[group])


@dataclass(frozen=True)
class Lab:
    """Builds cases of a given size; what goes `through` several taps has one digest."""

    steps: int = 4
    world_size: int = 2
    microbatches: int = 2
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: TENSORS)
    taps: Mapping[str, tuple[int, int]] = field(default_factory=lambda: TAPS)
    through: Mapping[str, str] = field(default_factory=dict)

    def spec(self, replica: int = 0, graph: tuple[str, ...] = (), **more: Any) -> RunSpec:
        config = {
            "steps": self.steps, "microbatches": self.microbatches, "graph": list(graph),
            "parallel": asdict(ParallelConfig(dp=self.world_size)), **more,
        }  # fmt: skip
        return RunSpec(
            config=config, device="cpu", world_size=self.world_size, timeout_s=60.0, replica=replica
        )

    def case(self, **changes: Any) -> CaseSpec:
        """Eager against graphs; a run too short to warm up is eager with a key of its own."""
        eager = replace(self.spec(), timeout_s=61.0)
        checks: dict[str, dict[str, Any]] = {
            "loss": {}, "state": {}, "taps": {}, "finite": {}, "peak_memory": {"max_ratio": 2.0},
        }  # fmt: skip
        case = CaseSpec(
            id="dp2-attn", scenario="alignment", labels={}, reference=self.spec(), expect="bitwise",
            candidate=self.spec(graph=("attn",)) if self.steps > 2 else eager, checks=checks,
            control=self.spec(replica=1),
        )  # fmt: skip
        return replace(case, **changes)

    def step(self, rank: int, step: int) -> StepRecord:
        losses = tuple(
            FloatBits.from_bits(0x40000000 + 4096 * step + 64 * rank + micro)
            for micro in range(self.microbatches)
        )
        taps = (
            digest_of(self.through.get(tap, tap), number, rank, step) + f"{place:08x}"
            for (tap, _, number), place in (
                (name.partition("["), place) for name, (_, place) in self.taps.items()
            )
        )
        return StepRecord(
            step=step, rank=rank, loss=losses[0], microbatch_losses=losses,
            grad_norm=FloatBits.from_bits(0x3F000000 + step), taps="".join(taps),
            digests={g: digests_of(g, rank, step, names) for g, names in self.tensors.items()},
            nonfinite=dict.fromkeys(self.tensors, ()), step_s=0.01, live_bytes=1000,
            peak_bytes=2000 + rank,
        )  # fmt: skip

    def rank(self, rank: int, spec: RunSpec) -> RankRecords:
        graphs = tuple(owed(TrainConfig.from_dict(spec.config), rank, self.steps))
        return RankRecords(
            rank=rank, events=(), error=None, problems=(),
            start=StartRecord(
                schema=SCHEMA_VERSION, rank=rank, world_size=self.world_size, pid=100 + rank,
                device="cpu", tensors=dict(self.tensors), taps=tuple(self.taps),
                tap_stages=tuple(stage for stage, _ in self.taps.values()),
                environment={"fingerprint": {"torch": "2.12", "threads": 1}, "host": "a"},
            ),
            steps=tuple(self.step(rank, step) for step in range(self.steps)),
            end=EndRecord(
                rank=rank, steps=self.steps, peak_bytes=2000 + rank, startup_s=0.1, wall_s=1.0,
                replays=launches(graphs), graphs=graphs,
            ),
            initial=InitialRecord(
                rank=rank, nonfinite={},
                digests={g: digests_of(g, rank, BEFORE, self.tensors[g]) for g in STATE},
            ),
        )  # fmt: skip

    def run(self, spec: RunSpec) -> RunResult:
        """A whole run."""
        ranks = range(self.world_size)
        outcome = RunOutcome(
            key=spec.key, what="", message="", culprit_rank=None, started_unix_s=0.0, wall_s=1.0,
            ranks=tuple(RankExit(rank=rank, code=0) for rank in ranks),
        )  # fmt: skip
        each = tuple(self.rank(rank, spec) for rank in ranks)
        return RunResult(spec=spec, outcome=outcome, ranks=each)

    def legs(self) -> tuple[RunResult, RunResult, RunResult]:
        """Reference, control and candidate of `case()`, equal in every compared bit."""
        case = self.case()
        return self.run(case.reference), self.run(case.control), self.run(case.candidate)


LAB = Lab()
"""Two ranks, four steps, two microbatches."""
REFERENCE, CONTROL, CANDIDATE = LAB.legs()

# --- edits ------------------------------------------------------------------------------------


def edit(run: RunResult, *at: int, **changes: Any) -> RunResult:
    """Changes in the outcome, in rank `at[0]`, or in its step `at[1]`, -1 before the first."""

    def merged(old: Any, new: Mapping[str, Any]) -> Any:
        found = {}
        for name, value in new.items():
            was = getattr(old, name)
            if isinstance(value, dict):
                value = was | value if isinstance(was, dict) else merged(was, value)
            found[name] = value
        return replace(old, **found)

    if not at:
        return replace(run, outcome=merged(run.outcome, changes))
    if at[1:] == (BEFORE,):
        changes = {"initial": changes}
    elif at[1:]:
        steps = run.ranks[at[0]].steps
        changes = {"steps": tuple(merged(s, changes) if s.step == at[1] else s for s in steps)}
    each = tuple(merged(one, changes) if one.rank == at[0] else one for one in run.ranks)
    return replace(run, ranks=each)


def edit_all(run: RunResult, **changes: Any) -> RunResult:
    """Every step of every rank; a callable is asked with step and rank."""
    for records in run.ranks:
        for record in records.steps:
            at = record.step, records.rank
            new = {name: v(*at) if callable(v) else v for name, v in changes.items()}
            run = edit(run, records.rank, record.step, **new)
    return run


def flip(run: RunResult, rank: int, step: int, group: str, bit: int = 0) -> RunResult:
    """One bit of a group's digests; step -1 is the state before the first one."""
    records = run.ranks[rank]
    held = records.initial if step < 0 else records.steps[step]
    assert held is not None
    text = held.digests[group]
    number = int(text, 16) ^ (1 << (4 * len(text) - 1 - bit))
    return edit(run, rank, step, digests={group: f"{number:0{len(text)}x}"})


def told(run: RunResult, rank: int, *events: tuple[str, Any]) -> RunResult:
    """The run whose rank wrote these events, by name and detail, in step 2."""
    more = (EventRecord(name=name, rank=rank, step=2, detail=detail) for name, detail in events)
    return edit(run, rank, events=(*run.ranks[rank].events, *more))


def configured(run: RunResult, **config: Any) -> RunResult:
    """The run under another configuration, with the key of that."""
    spec = replace(run.spec, config=run.spec.config | config)
    return edit(replace(run, spec=spec), key=spec.key)


def both(*edits: Edit) -> Edit:
    """All of these edits, the last one first; none leaves a run as it is."""
    return lambda run: edits[0](both(*edits[1:])(run)) if edits else run


same = both()


def at(rank: int, step: int, /, **changes: Any) -> Edit:
    return lambda run: edit(run, rank, step, **changes)


def bit(rank: int, step: int, group: str, number: int = 0) -> Edit:
    return lambda run: flip(run, rank, step, group, number)


# --- answers ----------------------------------------------------------------------------------


def ask(name: str, *about: Any, **options: Any) -> CheckResult:
    """What a registered check says of reference, candidate and, if need be, a case."""
    reference, candidate, *case = about
    more = {key: options.pop(key) for key in ("samples", "repeats") if key in options}
    runs = Runs(
        case=case[0] if case else LAB.case(), reference=reference, control=reference,
        candidate=candidate, **more,
    )  # fmt: skip
    return CHECKS[name].run(runs, options)


def verdict_of(*runs: RunResult, **case: Any) -> Verdict:
    """Of reference, control and candidate, with a case that names them."""
    names = ("reference", "control", "candidate")
    specs = {name: run.spec for name, run in zip(names, runs, strict=True)}
    reference, control, candidate = runs
    return judge(LAB.case(**(specs | case)), reference, control, candidate)


def flaw_of(run: RunResult) -> Flaw:
    """The flaw of a run that has one."""
    flaw = find_flaw(run)
    assert flaw is not None
    return flaw


def said(answer: CheckResult | Verdict) -> tuple[str, str]:
    """Outcome and kind."""
    return answer.outcome, answer.what


def place(answer: CheckResult | Verdict | Flaw) -> tuple[int, int, str, str]:
    """Step, rank, quantity and tensor of the first difference."""
    found = answer.difference
    assert found is not None
    return found.step, found.rank, found.quantity, found.tensor


def answers(verdict: Verdict) -> Mapping[str, CheckResult]:
    """By check."""
    return {result.check: result for result in verdict.checks}
